//! One connection's side of the protocol, without the connection.
//!
//! ```text
//! Flags --client flags--> Options --GO, EXPORT_NAME--> Requests --DISC--> Closed
//!                          |   ^
//!                          STARTTLS: options begin anew
//! ```
//!
//! Each phase ends in `Closed` too, when the client breaks the rules in a way after which its bytes mean nothing.

use std::sync::Arc;

use super::exports::Exports;
use super::handshake::Handshake;
use super::output::Output;
use super::tls::Tls;
use super::transmission::Transmission;
use super::wire;

/// See the module.
#[derive(Debug)]
pub struct Session {
    exports: Arc<Exports>,
    tls: Tls,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Flags,
    Options(Handshake),
    Requests(Transmission),
    Closed,
}

/// What [`Session::receive`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// So many bytes of the input are done with.
    pub consumed: usize,
    /// What is to be done now.
    pub next: Next,
}

/// What a session waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// More input: the session goes on once there are so many bytes behind those that it consumed, at most
    /// [`Exports::input_bytes`]. First the output is to be sent, since the client may wait for it.
    Input(usize),
    /// The output is to be sent; then the session goes on with the rest of the input, even if there is none.
    Send,
    /// The output is to be sent, and TLS begun: what the session gets from now on, and what it sends, is in records.
    /// There is no more input (`TLS-1`).
    Secure,
    /// The output is to be sent, and the connection closed.
    Close,
}

/// What one step of a phase did, with the number of bytes that it consumed or needs.
#[derive(Debug)]
pub(super) enum Step {
    /// The next step may follow.
    Took(usize),
    /// The next step may take long: first what is there is sent.
    TookLong(usize),
    /// There are fewer bytes than these, so nothing was done.
    Needs(usize),
    /// TLS begins.
    Secures(usize),
    /// The transmission begins.
    Begins(usize, Transmission),
    /// The connection ends.
    Ends(usize),
}

impl Session {
    /// A session that has not begun: [`greet`](Session::greet) comes first.
    #[must_use]
    pub fn new(exports: Arc<Exports>, tls: Tls) -> Session {
        Session { exports, tls, phase: Phase::Flags }
    }

    /// The server's first words.
    pub fn greet(&self, output: &mut Output) {
        output.push_u64(wire::MAGIC);
        output.push_u64(wire::OPTION_MAGIC);
        output.push_u16(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES);
    }

    /// Whether the client has chosen an export and may send requests.
    #[must_use]
    pub fn is_transmitting(&self) -> bool {
        matches!(self.phase, Phase::Requests(_))
    }

    /// Serves what is there of the client's bytes: those that it sent and that no earlier call consumed.
    pub fn receive(&mut self, input: &[u8], output: &mut Output) -> Received {
        let mut consumed = 0;
        let next = loop {
            if output.is_full() {
                break Next::Send;
            }
            match self.step(&input[consumed..], output) {
                Step::Took(bytes) => consumed += bytes,
                Step::TookLong(bytes) => {
                    consumed += bytes;
                    break Next::Send;
                }
                Step::Needs(bytes) => break Next::Input(bytes),
                Step::Secures(bytes) => {
                    consumed += bytes;
                    break Next::Secure;
                }
                Step::Begins(bytes, transmission) => {
                    consumed += bytes;
                    self.phase = Phase::Requests(transmission);
                }
                Step::Ends(bytes) => {
                    consumed += bytes;
                    self.phase = Phase::Closed;
                    break Next::Close;
                }
            }
        };
        Received { consumed, next }
    }

    fn step(&mut self, input: &[u8], output: &mut Output) -> Step {
        match &mut self.phase {
            Phase::Flags => match Handshake::begin(input, self.tls) {
                Ok(handshake) => {
                    self.phase = Phase::Options(handshake);
                    Step::Took(wire::CLIENT_FLAGS_BYTES)
                }
                Err(step) => step,
            },
            Phase::Options(handshake) => handshake.step(&self.exports, input, output),
            Phase::Requests(transmission) => transmission.step(input, output),
            Phase::Closed => Step::Ends(0),
        }
    }
}
