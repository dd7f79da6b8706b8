//! Plays bytes to a session as a connection would, and checks what holds for any bytes. For tests and the fuzz target.

use std::sync::Arc;

use super::wire::{self, Reader};
use super::{Exports, Next, Output, Session, Tls};
use crate::testing::Memory;

/// A connection without a socket.
#[derive(Debug)]
pub(super) struct Driver {
    session: Session,
    output: Output,
    /// What was given and not consumed.
    input: Vec<u8>,
    /// What the session waits for.
    needed: usize,
    /// The most that it may wait for.
    needed_max: usize,
    /// What was sent and not taken.
    sent: Vec<u8>,
    pub(super) is_closed: bool,
    /// TLS has begun: what is pushed and sent from then on would be in records.
    pub(super) is_secured: bool,
}

impl Driver {
    /// A connection whose session has sent its greeting.
    pub(super) fn new(exports: Exports, tls: Tls) -> Driver {
        let needed_max = exports.input_bytes();
        let mut output = Output::new(exports.piece_bytes()).expect("there is memory");
        let session = Session::new(Arc::new(exports), tls);
        session.greet(&mut output);
        let sent = output.filled().to_vec();
        output.clear();
        let (input, needed) = (Vec::new(), 0);
        let (is_closed, is_secured) = (false, false);
        Driver { session, output, input, needed, needed_max, sent, is_closed, is_secured }
    }

    /// Gives the session these bytes, and all that it wants before it needs more.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        // A connection calls again only if there is more than before.
        while !self.is_closed && (self.input.len() >= self.needed || !bytes.is_empty()) {
            let received = self.session.receive(&self.input, &mut self.output);
            assert!(received.consumed <= self.input.len(), "NBD-5");
            self.input.drain(..received.consumed);
            self.sent.extend_from_slice(self.output.filled());
            self.output.clear();
            match received.next {
                Next::Send => {}
                Next::Close => self.is_closed = true,
                Next::Secure => {
                    assert!(self.input.is_empty() && !self.is_secured, "TLS-1");
                    self.is_secured = true;
                    self.needed = 1;
                    break;
                }
                Next::Input(needed) => {
                    let is_bounded = needed <= self.needed_max;
                    assert!(self.input.len() < needed && is_bounded, "NBD-1, NBD-5");
                    self.needed = needed;
                    break;
                }
            }
        }
    }

    /// What was sent since the last call.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.sent)
    }

    pub(super) fn is_transmitting(&self) -> bool {
        self.session.is_transmitting()
    }
}

/// Two exports that all scripts have: a small disk, and one that is read-only and prefers large units.
fn exports() -> Exports {
    let mut exports = Exports::new();
    let disk = Arc::new(Memory::new(1 << 20).preferring(64 << 10));
    exports.add("disk", "of a script", disk).expect("it is the first");
    let frozen = Arc::new(Memory::new(64 << 10).preferring(2 << 20).read_only());
    exports.add("frozen", "", frozen).expect("it has another name");
    exports
}

/// Plays a script: the first byte chooses whether there is TLS, and each one that follows what is sent next; that takes
/// its numbers from those behind it.
///
/// # Panics
///
/// When the session breaks a rule that holds whatever a client sends.
pub fn play(script: &[u8]) {
    play_counting(script);
}

/// The same. Returns how many bytes of replies to requests there were.
pub(super) fn play_counting(script: &[u8]) -> usize {
    let mut replied = 0;
    let mut script = Script(script);
    let tls = [Tls::Off, Tls::On, Tls::Require][usize::from(script.byte() % 3)];
    let mut driver = Driver::new(exports(), tls);
    let (mut message, mut replies) = (Vec::new(), driver.take());
    let (mut parsed, mut was_transmitting) = (18, false);
    while !script.0.is_empty() && !driver.is_closed {
        message.clear();
        script.message(driver.is_transmitting(), &mut message);
        // Cut anywhere, so that every place is once the end of what was received.
        let cut = script.number() % (message.len() + 1);
        for part in [&message[..cut], &message[cut..]] {
            let is_clear = !driver.is_secured;
            driver.push(part);
            assert!(tls != Tls::Off || !driver.is_secured, "there is no TLS");
            if tls == Tls::Require && is_clear {
                assert!(!driver.is_transmitting(), "in clear");
                check_refusals(&driver.take());
                continue;
            }
            replies.append(&mut driver.take());
            if driver.is_transmitting() && !was_transmitting {
                was_transmitting = true;
                // The reply that begins the transmission may have the form of OPT_EXPORT_NAME.
                parsed = replies.len();
            }
            if was_transmitting {
                let whole = whole_replies(&replies[parsed..]);
                (parsed, replied) = (parsed + whole, replied + whole);
            }
        }
        if parsed > 1 << 20 {
            replies.drain(..parsed);
            parsed = 0;
        }
    }
    replied
}

/// Checks that replies in clear say nothing about exports, where TLS is required.
fn check_refusals(replies: &[u8]) {
    const ERROR: u32 = 1 << 31;
    let mut reader = Reader(replies);
    while !reader.0.is_empty() {
        assert_eq!(reader.u64(), Some(wire::OPTION_REPLY_MAGIC));
        match (reader.u32(), reader.u32()) {
            (Some(wire::OPT_STARTTLS | wire::OPT_ABORT), Some(wire::REP_ACK)) => {}
            (Some(_), Some(kind)) if kind & ERROR != 0 => {}
            other => panic!("{other:?} in clear"),
        }
        reader.counted().expect("a reply is sent as a whole");
    }
}

/// Checks that replies to requests begin as they must, as far as they can be told apart without the requests. Returns
/// how many bytes need not be looked at again.
fn whole_replies(replies: &[u8]) -> usize {
    let mut reader = Reader(replies);
    loop {
        let before = reader.0.len();
        match reader.u32() {
            Some(wire::CHUNK_MAGIC) => {}
            // After the data of a simple reply, which has no length of its own, nothing can be told.
            Some(wire::SIMPLE_REPLY_MAGIC) => return replies.len(),
            Some(other) => panic!("{other:#x} is not the magic number of a reply"),
            None => return replies.len() - before,
        }
        let payload = || {
            reader.bytes(12)?;
            reader.counted()
        };
        if { payload }().is_none() {
            return replies.len() - before;
        }
    }
}

/// What is left of a script.
struct Script<'s>(&'s [u8]);

impl Script<'_> {
    /// The next byte; 0 at the end.
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> usize {
        usize::from(self.byte()) << 8 | usize::from(self.byte())
    }

    fn raw(&mut self, count: usize, message: &mut Vec<u8>) {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        message.extend_from_slice(front);
        self.0 = rest;
    }

    /// Adds the next thing that the client sends: mostly what belongs there, since all else ends the connection.
    fn message(&mut self, is_transmitting: bool, message: &mut Vec<u8>) {
        match self.byte() {
            0 => {
                let count = self.number() % 600;
                self.raw(count, message);
            }
            1 => message.extend_from_slice(&u32::from(self.byte() % 4).to_be_bytes()),
            2 => self.option(message),
            3 => self.request(message),
            _ if is_transmitting => self.request(message),
            _ => self.option(message),
        }
    }

    fn option(&mut self, message: &mut Vec<u8>) {
        const NAMES: [&[u8]; 4] = [b"", b"disk", b"frozen", b"nothing"];
        let option = u32::from(self.byte() % 13);
        let name = NAMES[usize::from(self.byte() % 4)];
        let mut data = Vec::new();
        let counted = |data: &mut Vec<u8>, text: &[u8]| {
            data.extend_from_slice(&u32::try_from(text.len()).unwrap_or(0).to_be_bytes());
            data.extend_from_slice(text);
        };
        match option {
            wire::OPT_EXPORT_NAME => data.extend_from_slice(name),
            wire::OPT_INFO | wire::OPT_GO => {
                counted(&mut data, name);
                data.extend_from_slice(&[0, 2, 0, self.byte() % 5, 0, 1]);
            }
            wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => {
                counted(&mut data, name);
                data.extend_from_slice(&[0, 0, 0, 1]);
                counted(&mut data, b"base:allocation");
            }
            _ => {}
        }
        if self.byte() >= 224 {
            let count = self.number() % 300;
            self.raw(count, &mut data);
        }
        let length = u32::try_from(data.len()).unwrap_or(0) + u32::from(self.byte() == 255);
        message.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        message.extend_from_slice(&option.to_be_bytes());
        message.extend_from_slice(&length.to_be_bytes());
        message.append(&mut data);
    }

    fn request(&mut self, message: &mut Vec<u8>) {
        // All commands, one that does not exist, and those more often that do not end the connection.
        const COMMANDS: [u16; 16] = [0, 0, 0, 0, 1, 1, 1, 1, 3, 4, 4, 5, 6, 6, 7, 8];
        let chosen = self.byte();
        let command =
            if chosen == 255 { wire::CMD_DISC } else { COMMANDS[usize::from(chosen % 16)] };
        let flags = u16::from(self.byte() % 64);
        let at = (self.number() as u64) << (self.byte() % 12);
        let bytes = match self.byte() {
            0..=63 => u32::from(self.byte()) * 512,
            64..=127 => u32::from(self.byte()) * 8192,
            128..=132 => u32::from(self.byte()) << (self.byte() % 32),
            _ => 4096,
        };
        message.extend_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        message.extend_from_slice(&flags.to_be_bytes());
        message.extend_from_slice(&command.to_be_bytes());
        message.extend_from_slice(&[self.byte(); 8]);
        message.extend_from_slice(&at.to_be_bytes());
        message.extend_from_slice(&bytes.to_be_bytes());
        if command == wire::CMD_WRITE && bytes <= 4 << 20 {
            message.resize(message.len() + bytes as usize, self.byte());
        }
    }
}
