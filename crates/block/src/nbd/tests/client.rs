//! A small client, written from the protocol's text and not from the server: numbers stand here as they are there.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::Device;
use crate::nbd::script::Driver;
use crate::nbd::{Exports, Tls};

/// Commands and flags.
pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const DISC: u16 = 2;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;
pub(super) const CACHE: u16 = 5;
pub(super) const WRITE_ZEROES: u16 = 6;
pub(super) const BLOCK_STATUS: u16 = 7;
pub(super) const FUA: u16 = 1;
pub(super) const NO_HOLE: u16 = 2;
pub(super) const DF: u16 = 4;
pub(super) const REQ_ONE: u16 = 8;
pub(super) const FAST_ZERO: u16 = 16;

/// An export `disk` of this device, which is the default.
pub(super) fn exporting(device: Arc<dyn Device>) -> Exports {
    let mut exports = Exports::new();
    exports.add("disk", "", device).unwrap();
    exports
}

/// An option with its header.
pub(super) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut message = b"IHAVEOPT".to_vec();
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(&u32::try_from(data.len()).unwrap().to_be_bytes());
    message.extend_from_slice(data);
    message
}

/// A text with its length before it.
pub(super) fn counted(text: &str) -> Vec<u8> {
    let mut data = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(text.as_bytes());
    data
}

/// The data of `OPT_GO` and `OPT_INFO`.
pub(super) fn go_data(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&u16::try_from(infos.len()).unwrap().to_be_bytes());
    infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    data
}

/// The data of the two options about contexts.
pub(super) fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&counted(query)));
    data
}

/// A request without payload.
pub(super) fn request(command: u16, flags: u16, cookie: u64, at: u64, bytes: u32) -> Vec<u8> {
    let mut message = 0x2560_9513_u32.to_be_bytes().to_vec();
    message.extend_from_slice(&flags.to_be_bytes());
    message.extend_from_slice(&command.to_be_bytes());
    message.extend_from_slice(&cookie.to_be_bytes());
    message.extend_from_slice(&at.to_be_bytes());
    message.extend_from_slice(&bytes.to_be_bytes());
    message
}

/// What has come from the server.
#[derive(Default, Debug)]
pub(super) struct Incoming(pub(super) VecDeque<u8>);

impl Incoming {
    pub(super) fn number<const N: usize>(&mut self) -> u64 {
        self.bytes(N).iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        assert!(self.0.len() >= count, "{count} bytes wanted, {} came", self.0.len());
        self.0.drain(..count).collect()
    }

    /// A reply to an option: its number, type and data.
    pub(super) fn option_reply(&mut self) -> (u64, u64, Vec<u8>) {
        assert_eq!(self.number::<8>(), 0x3_e889_0455_65a9);
        let (option, kind, length) = (self.number::<4>(), self.number::<4>(), self.number::<4>());
        (option, kind, self.bytes(usize::try_from(length).unwrap()))
    }

    /// The reply to a request. `data_bytes` are those that a simple reply has if it reports success.
    pub(super) fn reply(&mut self, cookie: u64, data_bytes: usize) -> Reply {
        let mut reply = Reply::default();
        loop {
            match self.number::<4>() {
                0x6744_6698 => {
                    assert_eq!(reply.chunks, 0, "a simple reply among chunks");
                    reply.error = self.number::<4>();
                    assert_eq!(self.number::<8>(), cookie);
                    if reply.error == 0 && data_bytes > 0 {
                        reply.data.push((None, self.bytes(data_bytes)));
                    }
                    return reply;
                }
                0x668e_33ef => {
                    reply.chunks += 1;
                    let (flags, kind) = (self.number::<2>(), self.number::<2>());
                    assert_eq!(self.number::<8>(), cookie);
                    let length = usize::try_from(self.number::<4>()).unwrap();
                    let mut payload = Incoming(self.bytes(length).into());
                    reply.read(kind, &mut payload);
                    assert!(payload.0.is_empty(), "a chunk of type {kind} has more than it may");
                    if flags == 1 {
                        return reply;
                    }
                    assert_eq!(flags, 0);
                }
                other => panic!("{other:#x} is not the magic number of a reply"),
            }
        }
    }
}

/// A reply as a client understands it.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Reply {
    pub(super) error: u64,
    /// Where the error is, if the reply says that.
    pub(super) error_at: Option<u64>,
    pub(super) text: String,
    /// Content chunks that are data, with their offsets; that of a simple reply has none.
    pub(super) data: Vec<(Option<u64>, Vec<u8>)>,
    /// Content chunks that are holes.
    pub(super) holes: Vec<(u64, u64)>,
    /// Block status: lengths and flags.
    pub(super) extents: Vec<(u64, u64)>,
    pub(super) chunks: usize,
}

impl Reply {
    fn read(&mut self, kind: u64, payload: &mut Incoming) {
        match kind {
            0 => {}
            1 => {
                let at = payload.number::<8>();
                assert!(!payload.0.is_empty(), "a chunk without data");
                self.data.push((Some(at), payload.bytes(payload.0.len())));
            }
            2 => {
                let hole = (payload.number::<8>(), payload.number::<4>());
                assert!(hole.1 > 0, "a hole without length");
                self.holes.push(hole);
            }
            5 => {
                assert_eq!(payload.number::<4>(), 1, "the number of the context");
                while !payload.0.is_empty() {
                    self.extents.push((payload.number::<4>(), payload.number::<4>()));
                }
                assert!(!self.extents.is_empty() && self.extents.iter().all(|extent| extent.0 > 0));
            }
            32769 | 32770 => {
                self.error = payload.number::<4>();
                assert_ne!(self.error, 0);
                let length = usize::try_from(payload.number::<2>()).unwrap();
                self.text = String::from_utf8(payload.bytes(length)).unwrap();
                self.error_at = (kind == 32770).then(|| payload.number::<8>());
            }
            other => panic!("{other} is not the type of a chunk"),
        }
    }

    /// The contents that a read from `at` on has returned: each byte once.
    pub(super) fn contents(&self, at: u64, bytes: usize) -> Vec<u8> {
        assert_eq!((self.error, &*self.text), (0, ""));
        let (mut contents, mut seen) = (vec![0xee; bytes], vec![false; bytes]);
        let place = |offset: u64| usize::try_from(offset - at).unwrap();
        let data = self.data.iter().map(|(from, data)| (place(from.unwrap_or(at)), data.clone()));
        let holes = self.holes.iter().map(|hole| (place(hole.0), vec![0; place(at + hole.1)]));
        for (from, data) in data.chain(holes) {
            let range = from..from + data.len();
            assert!(!seen[range.clone()].contains(&true), "chunks overlap");
            seen[range.clone()].fill(true);
            contents[range].copy_from_slice(&data);
        }
        assert!(!seen.contains(&false), "a part of what was read is missing");
        contents
    }
}

/// A client that has chosen an export.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) driver: Driver,
    pub(super) incoming: Incoming,
    cookie: u64,
}

impl Client {
    /// A client that has said which flags it knows, and has read the greeting.
    pub(super) fn greeted(exports: Exports, flags: u32) -> Client {
        Client::greeted_with(exports, flags, Tls::Off)
    }

    /// The same, of a server that has TLS.
    pub(super) fn greeted_with(exports: Exports, flags: u32, tls: Tls) -> Client {
        let (driver, incoming) = (Driver::new(exports, tls), Incoming::default());
        let mut client = Client { driver, incoming, cookie: 7 };
        client.send(&flags.to_be_bytes());
        assert_eq!(client.incoming.bytes(8), b"NBDMAGIC");
        assert_eq!(client.incoming.bytes(8), b"IHAVEOPT");
        assert_eq!(client.incoming.number::<2>(), 3);
        client
    }

    /// A client that uses the export `disk`, with all that the protocol has or with none of it.
    pub(super) fn of(device: Arc<dyn Device>, is_structured: bool) -> Client {
        let mut client = Client::greeted(exporting(device), 3);
        if is_structured {
            client.send(&option(8, &[]));
            assert_eq!(client.incoming.option_reply(), (8, 1, Vec::new()));
            client.send(&option(10, &context_data("disk", &["base:allocation"])));
            assert_eq!(client.incoming.option_reply().1, 4);
            assert_eq!(client.incoming.option_reply(), (10, 1, Vec::new()));
        }
        client.send(&option(7, &go_data("disk", &[])));
        while client.incoming.option_reply().1 != 1 {}
        assert!(client.driver.is_transmitting() && client.incoming.0.is_empty());
        client
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.driver.push(bytes);
        self.incoming.0.extend(self.driver.take());
    }

    /// Sends a request, and returns what it is answered with.
    pub(super) fn ask(&mut self, command: u16, flags: u16, at: u64, bytes: u32) -> Reply {
        self.cookie += 1;
        self.send(&request(command, flags, self.cookie, at, bytes));
        let data_bytes = if command == READ { bytes as usize } else { 0 };
        let reply = self.incoming.reply(self.cookie, data_bytes);
        assert!(self.incoming.0.is_empty(), "more than a reply");
        reply
    }

    /// Sends a write, and returns what it is answered with.
    pub(super) fn write(&mut self, flags: u16, at: u64, data: &[u8]) -> Reply {
        self.cookie += 1;
        let bytes = u32::try_from(data.len()).unwrap();
        self.send(&request(WRITE, flags, self.cookie, at, bytes));
        self.send(data);
        let reply = self.incoming.reply(self.cookie, 0);
        assert!(self.incoming.0.is_empty(), "more than a reply");
        reply
    }
}
