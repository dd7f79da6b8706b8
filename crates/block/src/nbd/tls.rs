//! TLS of a connection: records in, the client's bytes out, and back.
//!
//! rustls has the state of the protocol and neither a socket nor a buffer ("unbuffered"): it decrypts records where
//! they were received, and encrypts replies to where they are sent from.
//!
//! # Invariants
//!
//! - `TLS-1` A session gets bytes that came in clear, or bytes that came in records, never both in one message: what
//!   comes behind `OPT_STARTTLS` in clear ends the connection.
//! - `TLS-2` After [`Secured::receive`] no whole record is left: a call receives no more bytes than there is room for
//!   in clear, and contents are shorter than their records. So a send never finds contents that nobody has room for.
//! - `TLS-3` What a client sends makes this take no more than [`RECORDS_BYTES`], [`SENT_BYTES`] and what rustls copies
//!   of one record.
//!
//! # Cost
//!
//! A copy of what is received, which rustls makes of each record, and a copy to the session's input. None of what is
//! sent. A system call for each [`CLEAR_BYTES`] of replies.

use rustix::io::Errno;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeTlsData, UnbufferedStatus};
use zfolio_sys::zeroed::zeroed;

use super::certificates::Certificates;
use super::stream::Stream;

/// Whether a listener's clients speak TLS.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Tls {
    /// None does.
    #[default]
    Off,
    /// Those that ask for it.
    On,
    /// All: until a client has asked for it, nothing else is answered.
    Require,
}

/// The same, with what the server shows.
#[derive(Clone, Debug, Default)]
pub(crate) enum Security {
    #[default]
    Off,
    On(Certificates),
    Require(Certificates),
}

/// Room for records that were received, also for a client's certificates, which are one message.
const RECORDS_BYTES: usize = 128 << 10;

/// So much is encrypted at once.
const CLEAR_BYTES: usize = 64 << 10;

/// The longest contents of a record.
const RECORD_CLEAR_BYTES: usize = 16 << 10;

/// A header, a nonce and a tag; TLS 1.2 has the longest.
const RECORD_EXTRA_BYTES: usize = 5 + 8 + 16;

/// What comes before the records: a message about new keys.
const NEWS_BYTES: usize = 512;

/// Room for what is sent.
const SENT_BYTES: usize =
    CLEAR_BYTES + CLEAR_BYTES / RECORD_CLEAR_BYTES * RECORD_EXTRA_BYTES + NEWS_BYTES;

/// So much is said of why a client was refused.
const REFUSAL_LETTERS_MAX: usize = 200;

const _: () = {
    assert!(CLEAR_BYTES % RECORD_CLEAR_BYTES == 0);
    // A session leaves as much room as `Input::room` makes, which is more than a record takes.
    assert!(super::WHOLE_BYTES > RECORD_CLEAR_BYTES + 2048);
};

impl Security {
    /// Whether clients speak TLS.
    pub(crate) fn tls(&self) -> Tls {
        match self {
            Security::Off => Tls::Off,
            Security::On(_) => Tls::On,
            Security::Require(_) => Tls::Require,
        }
    }

    /// What the server shows.
    pub(super) fn certificates(&self) -> Option<&Certificates> {
        match self {
            Security::Off => None,
            Security::On(certificates) | Security::Require(certificates) => Some(certificates),
        }
    }
}

/// A connection of which each byte is in a record.
pub(super) struct Secured<'s> {
    stream: &'s Stream,
    state: UnbufferedServerConnection,
    /// A part of a record, or of a message of the handshake; rustls finds it at the front again (`TLS-2`).
    records: Box<[u8]>,
    received: usize,
    /// Records that are to be sent.
    sent: Box<[u8]>,
    filled: usize,
    /// The client has said that it sends nothing more.
    is_ended: bool,
    /// A call has failed, perhaps in the middle of a record: nothing may follow.
    is_broken: bool,
    /// Where the client is.
    peer: String,
    /// The client has sent contents, so the handshake is over on both sides.
    is_open: bool,
    /// What rustls has refused.
    refused: Option<rustls::Error>,
}

/// What [`Secured::turn`] does once the handshake is over.
#[derive(Clone, Copy)]
enum Write<'b> {
    Nothing,
    Contents(&'b [u8]),
    /// That nothing more comes.
    Close,
}

/// What [`Secured::turn`] did.
#[derive(Clone, Copy, Default)]
struct Turn {
    /// Bytes that were decrypted.
    clear: usize,
    /// Bytes that were encrypted; `None`: the handshake is not over.
    written: Option<usize>,
}

impl<'s> Secured<'s> {
    /// Begins TLS; [`receive`](Secured::receive) goes on with it. `NOMEM`, or `PROTO`: rustls has refused it.
    pub(super) fn new(stream: &'s Stream, certificates: &Certificates) -> Result<Self, Errno> {
        let state = UnbufferedServerConnection::new(certificates.config());
        Ok(Secured {
            stream,
            state: state.map_err(|_| Errno::PROTO)?,
            records: zeroed(RECORDS_BYTES)?,
            received: 0,
            sent: zeroed(SENT_BYTES)?,
            filled: 0,
            is_ended: false,
            is_broken: false,
            // A client that has gone has no address any more.
            peer: stream.peer(),
            is_open: false,
            refused: None,
        })
    }

    /// Receives what there is. `Some(0)`: nothing for the session. `None`: the client has ended its side. `PROTO`: what
    /// the client has sent is not TLS, or it is not one that may connect.
    pub(super) fn receive(&mut self, room: &mut [u8]) -> Result<Option<usize>, Errno> {
        let result = self.receive_records(room);
        self.is_broken |= result.is_err();
        result
    }

    fn receive_records(&mut self, room: &mut [u8]) -> Result<Option<usize>, Errno> {
        if self.is_ended {
            return Ok(None);
        }
        // TLS-2
        let most = room.len().min(RECORDS_BYTES);
        let Some(free) = self.records.get_mut(self.received..most).filter(|free| !free.is_empty())
        else {
            // A message of the handshake that no client needs.
            return Err(Errno::PROTO);
        };
        match self.stream.receive(free)? {
            0 => return Ok(None),
            bytes => self.received += bytes,
        }
        let turn = self.turn(room, Write::Nothing)?;
        Ok((turn.clear > 0 || !self.is_ended).then_some(turn.clear))
    }

    /// Who was refused in the handshake, and why; also a client that refuses the server.
    pub(super) fn refusal(&self) -> Option<String> {
        let why = self.refused.as_ref().filter(|_| !self.is_open)?;
        // Some of what is in it the client has sent.
        let why: String = why.to_string().chars().take(REFUSAL_LETTERS_MAX).collect();
        Some(format!("a client at {}: {why}", self.peer))
    }

    /// Sends all of it.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let result = self.send_records(bytes);
        self.is_broken |= result.is_err();
        result
    }

    fn send_records(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        for part in bytes.chunks(CLEAR_BYTES) {
            let written = self.turn(&mut [], Write::Contents(part))?.written;
            self.stream.send(&self.sent[..written.ok_or(Errno::PROTO)?])?;
        }
        Ok(())
    }

    /// Says that nothing more is sent, unless that would have to wait.
    pub(super) fn close(&mut self) {
        if self.is_broken {
            return;
        }
        if let Ok(Turn { written: Some(written), .. }) = self.turn(&mut [], Write::Close) {
            self.stream.send_now(&self.sent[..written]);
        }
    }

    /// Goes on until rustls needs more input. Contents go to `room`. What is written is to be sent.
    fn turn(&mut self, room: &mut [u8], write: Write<'_>) -> Result<Turn, Errno> {
        let (mut turn, mut start) = (Turn::default(), 0);
        loop {
            let records = &mut self.records[start..self.received];
            let UnbufferedStatus { discard, state } = self.state.process_tls_records(records);
            start += discard;
            let state = match state {
                Ok(state) => state,
                Err(why) => {
                    self.refused = Some(why);
                    self.alert(start);
                    return Err(Errno::PROTO);
                }
            };
            match state {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let contents = record.map_err(|_| Errno::PROTO)?.payload;
                        let place = room.get_mut(turn.clear..turn.clear + contents.len());
                        // TLS-2: there is room.
                        place.ok_or(Errno::PROTO)?.copy_from_slice(contents);
                        turn.clear += contents.len();
                    }
                }
                ConnectionState::EncodeTlsData(message) => {
                    self.filled = encode(message, self.stream, &mut self.sent, self.filled)?;
                }
                ConnectionState::TransmitTlsData(message) => {
                    self.stream.send(&self.sent[..self.filled])?;
                    self.filled = 0;
                    message.done();
                }
                ConnectionState::PeerClosed => self.is_ended = true,
                ConnectionState::WriteTraffic(mut traffic) => {
                    let written = match write {
                        Write::Nothing => Ok(0),
                        Write::Contents(contents) => traffic.encrypt(contents, &mut self.sent),
                        Write::Close => traffic.queue_close_notify(&mut self.sent),
                    };
                    turn.written = Some(written.map_err(|_| Errno::PROTO)?);
                    break;
                }
                ConnectionState::BlockedHandshake | ConnectionState::Closed => break,
                // Data before the handshake is over: not offered.
                _ => return Err(Errno::PROTO),
            }
        }
        self.records.copy_within(start..self.received, 0);
        self.received -= start;
        self.is_open |= turn.clear > 0;
        Ok(turn)
    }

    /// Tells the client what was wrong, unless that would have to wait. `start`: where what rustls still needs begins.
    fn alert(&mut self, start: usize) {
        let records = &mut self.records[start..self.received];
        // After an error the first state is the alert, if there is one.
        if let Ok(ConnectionState::EncodeTlsData(mut alert)) =
            self.state.process_tls_records(records).state
        {
            self.filled += alert.encode(&mut self.sent[self.filled..]).unwrap_or(0);
        }
        self.stream.send_now(&self.sent[..self.filled]);
        self.filled = 0;
    }
}

/// Adds a message of the handshake to what is to be sent. If there is no room for it, the others are sent first.
/// Returns how many bytes there are then.
fn encode(
    mut message: EncodeTlsData<'_, ServerConnectionData>,
    stream: &Stream,
    sent: &mut [u8],
    mut filled: usize,
) -> Result<usize, Errno> {
    let mut encoded = message.encode(&mut sent[filled..]);
    if encoded.is_err() {
        stream.send(&sent[..filled])?;
        filled = 0;
        encoded = message.encode(sent);
    }
    encoded.map(|bytes| filled + bytes).map_err(|_| Errno::PROTO)
}
