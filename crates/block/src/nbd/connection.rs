//! A connection: moves bytes between a socket and a session, on a thread of its own.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::zeroed::zeroed;

use super::WHOLE_BYTES;
use super::exports::Exports;
use super::output::Output;
use super::session::{Next, Session};
use super::stream::Stream;
use super::tls::{Secured, Security};

/// How a connection ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// As the protocol has it, because the client went away, or because TLS failed once it had begun.
    Closed,
    /// The handshake of TLS has failed: which client's, and why.
    Refused(String),
    /// The client took too long for the handshake.
    TimedOut,
    /// The server stops.
    Stopped,
    /// There is no memory for it.
    NoMemory,
}

/// What the server wants of its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// To go on.
    Serve,
    /// To serve what was received, and to end.
    Drain,
    /// To end.
    Cut,
}

/// So much of the input is moved to its front without need.
const MOVED_BYTES: usize = 8 << 10;

/// What was received and not consumed.
struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    fn new(most: usize) -> Result<Input, Errno> {
        Ok(Input { bytes: zeroed(most)?, start: 0, end: 0 })
    }

    fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room behind what is there, for so many bytes from `start` on at least.
    fn room(&mut self, needed: usize) -> &mut [u8] {
        // Little is moved often, so that the same memory is used again, which is likely in the cache; much only if it
        // has to be.
        let is_little = self.end - self.start <= MOVED_BYTES;
        let most = self.bytes.len();
        let is_tight = self.start + needed > most || most - self.end < WHOLE_BYTES;
        if self.start > 0 && (is_little || is_tight) {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }
}

/// What carries the bytes of a session.
enum Channel<'s> {
    Clear(&'s Stream),
    Secured(Box<Secured<'s>>),
}

impl Channel<'_> {
    /// Receives what there is, which may be nothing for the session. `None`: the client has ended its side.
    fn receive(&mut self, room: &mut [u8]) -> Result<Option<usize>, Errno> {
        match self {
            Channel::Clear(stream) => {
                stream.receive(room).map(|bytes| (bytes > 0).then_some(bytes))
            }
            Channel::Secured(secured) => secured.receive(room),
        }
    }

    /// Sends all of it.
    fn send(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        match self {
            Channel::Clear(stream) => stream.send(bytes),
            Channel::Secured(secured) => secured.send(bytes),
        }
    }
}

/// Serves one client until it or the server ends the connection. `handshake` is the time that the handshake may take,
/// that of TLS included.
pub(super) fn serve(
    stream: &Stream,
    security: &Security,
    exports: Arc<Exports>,
    handshake: Duration,
    order: impl Fn() -> Order,
) -> End {
    let mut channel = Channel::Clear(stream);
    let end = converse(&mut channel, stream, security, exports, handshake, order);
    let Channel::Secured(secured) = &mut channel else { return end };
    secured.close();
    secured.refusal().map_or(end, End::Refused)
}

fn converse<'s>(
    channel: &mut Channel<'s>,
    stream: &'s Stream,
    security: &Security,
    exports: Arc<Exports>,
    handshake: Duration,
    order: impl Fn() -> Order,
) -> End {
    let deadline_ns =
        monotonic_ns().saturating_add(u64::try_from(handshake.as_nanos()).unwrap_or(u64::MAX));
    let (Ok(mut input), Ok(mut output)) =
        (Input::new(exports.input_bytes()), Output::new(exports.piece_bytes()))
    else {
        return End::NoMemory;
    };
    let mut session = Session::new(exports, security.tls());
    stream.set_deadline(Some(deadline_ns));
    session.greet(&mut output);
    loop {
        let received = session.receive(input.available(), &mut output);
        input.consume(received.consumed);
        if order() == Order::Cut {
            return End::Stopped;
        }
        if session.is_transmitting() {
            stream.set_deadline(None);
        }
        if !output.filled().is_empty() {
            if let Err(why) = channel.send(output.filled()) {
                return ended(why);
            }
            output.clear();
        }
        let needed = match received.next {
            Next::Send => continue,
            Next::Close => return End::Closed,
            Next::Input(needed) => needed,
            Next::Secure => {
                let secured = security.certificates().map(|own| Secured::new(stream, own));
                let secured = match secured {
                    Some(Ok(secured)) => secured,
                    Some(Err(Errno::NOMEM)) => return End::NoMemory,
                    _ => return End::Closed,
                };
                *channel = Channel::Secured(Box::new(secured));
                1
            }
        };
        if order() != Order::Serve {
            return End::Stopped;
        }
        // If the order comes between the look above and the wait below, the socket's input is ended too, so that the
        // wait ends.
        match channel.receive(input.room(needed)) {
            Ok(None) => return End::Closed,
            Ok(Some(bytes)) => input.end += bytes,
            Err(why) => return ended(why),
        }
    }
}

fn ended(why: Errno) -> End {
    if why == Errno::AGAIN { End::TimedOut } else { End::Closed }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use rustix::io::Errno;

    use super::super::exports::Exports;
    use super::super::stream::Stream;
    use super::super::tls::Security;
    use super::{End, Input, Order, serve};
    use crate::testing::{Memory, without_memory};
    use crate::vhost_user::Worker;

    const MOST: usize = 512 << 10;

    /// Goal: a client that connects while there is no memory for its buffers costs nobody anything else: the process
    /// ended, and the contents of the disk with it.
    #[test]
    fn without_memory_the_connection_ends() {
        let device = Arc::new(Memory::new(1 << 20).preferring(2 << 20));
        let mut exports = Exports::new();
        exports.add("disk", "", device.clone()).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let stream = Stream::new(ours.into());
        without_memory("nbd::connection::tests::without_memory_the_connection_ends", || {
            let time = Duration::from_secs(60);
            let end = serve(&stream, &Security::Off, Arc::new(exports), time, || Order::Serve);
            assert_eq!(end, End::NoMemory);
            assert!(matches!(Worker::new(device, "disk", false), Err(Errno::NOMEM)));
        });
    }

    /// Goal: what was received stays in order, however it is consumed; there is always the room that is needed.
    #[test]
    fn input_makes_the_room_that_is_needed() {
        let mut input = Input::new(MOST).unwrap();
        let (mut sent, mut served) = (0_u64, 0_u64);
        for round in 0..300_usize {
            let needed = 1 + round * 7919 % (MOST / 2);
            while input.available().len() < needed {
                let have = input.available().len();
                let room = input.room(needed);
                assert!(have + room.len() >= needed, "round {round}");
                let bytes = room.len().min(8 + round * 104_729 % 300_000) / 8 * 8;
                for word in room[..bytes].chunks_exact_mut(8) {
                    word.copy_from_slice(&sent.to_ne_bytes());
                    sent += 1;
                }
                input.end += bytes;
                if bytes == 0 {
                    break;
                }
            }
            let consumed = input.available().len().min(needed) / 8 * 8;
            for word in input.available()[..consumed].chunks_exact(8) {
                assert_eq!(word, served.to_ne_bytes(), "round {round}");
                served += 1;
            }
            input.consume(consumed);
        }
    }
}
