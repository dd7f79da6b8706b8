//! Clients that vanish in the middle of each kind of request: what the others read, and what is left of them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::testing::Random;

use super::client::{
    BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES, context_data, exporting, go_data,
    option, request,
};
use super::sockets::{connect, listen, scratch, until};
use crate::Device;
use crate::nbd::{Config, Server};
use crate::testing::{self, Memory};

const SIZE: usize = 512 << 10;

/// A write that is shorter is one call of the device, once all of it is there.
const SMALL: u32 = 64 << 10;

/// Where requests begin: in the middle of a unit, whatever the units are.
const AT: u64 = (20 << 10) + 512;

/// The commands, and how long their requests are: some are one step of the server, others are several.
const REQUESTS: [(u16, u32); 11] = [
    (READ, 4096),
    (READ, 300 << 10),
    (WRITE, 4096),
    (WRITE, SMALL),
    (WRITE, 300 << 10),
    (FLUSH, 0),
    (TRIM, 300 << 10),
    (CACHE, 300 << 10),
    (WRITE_ZEROES, 4096),
    (WRITE_ZEROES, 300 << 10),
    (BLOCK_STATUS, 300 << 10),
];

/// A client that has chosen the export, with structured replies and block status.
fn connect_structured(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    let contexts = option(10, &context_data("disk", &["base:allocation"]));
    let options = [option(8, &[]), contexts, option(7, &go_data("disk", &[]))].concat();
    stream.write_all(&[&3_u32.to_be_bytes()[..], &options].concat()).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
        if (word(8), word(12)) == (7, 1) {
            return stream;
        }
    }
}

/// A client that stays: writes all of the disk, or reads it.
struct Faithful(UnixStream);

impl Faithful {
    fn write(&mut self, contents: &[u8]) {
        self.0.write_all(&request(WRITE, 0, 1, 0, u32::try_from(SIZE).unwrap())).unwrap();
        self.0.write_all(contents).unwrap();
        self.reply();
    }

    fn read(&mut self) -> Vec<u8> {
        self.0.write_all(&request(READ, 0, 1, 0, u32::try_from(SIZE).unwrap())).unwrap();
        self.reply();
        let mut contents = vec![0; SIZE];
        self.0.read_exact(&mut contents).unwrap();
        contents
    }

    fn reply(&mut self) {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
    }
}

/// How many sockets there are at a path: the one that is listened on, and the server's end of each connection.
fn sockets(path: &Path) -> usize {
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    all.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count()
}

/// A disk with a client that stays.
struct Stage {
    path: PathBuf,
    server: Server,
    faithful: Faithful,
    random: Random,
}

impl Stage {
    fn new(name: &str, device: Arc<dyn Device>) -> Stage {
        let path = scratch(&format!("vanish-{name}"));
        let listeners = listen(&path).unwrap();
        let server = Server::start(listeners, exporting(device), Config::default()).unwrap();
        let faithful = Faithful(connect(&path));
        Stage { path, server, faithful, random: Random::new(7) }
    }

    /// Has a client vanish behind so many bytes of a request: of all of them, before it has received the reply.
    fn vanish(&mut self, is_structured: bool, (command, bytes): (u16, u32), sent: usize) {
        let case = format!("command {command}, {bytes} bytes, {sent} sent, {is_structured}");
        let mut before = self.random.bytes(SIZE);
        // Compressible, different in each byte from what is written, and nowhere zero.
        before.iter_mut().for_each(|byte| *byte = 1 + *byte % 8);
        self.faithful.write(&before);
        let at = usize::try_from(AT).unwrap();
        let range = at..at + bytes as usize;
        let data: Vec<u8> = before[range.clone()].iter().map(|byte| byte + 8).collect();
        let from = if command == FLUSH { 0 } else { AT };
        let mut message = request(command, 0, 9, from, bytes);
        if command == WRITE {
            message.extend(&data);
        }
        let sent = sent.min(message.len());
        let mut client =
            if is_structured { connect_structured(&self.path) } else { connect(&self.path) };
        client.write_all(&message[..sent]).unwrap();
        drop(client);
        until("all but one have ended", || self.server.counts().live == 1);
        until("the sockets are closed", || sockets(&self.path) == 2);
        let after = self.faithful.read();
        assert!(after[..at] == before[..at], "{case}: before the range");
        assert!(after[range.end..] == before[range.end..], "{case}: behind the range");
        let (was, is, is_whole) = (&before[range.clone()], &after[range], sent == message.len());
        match command {
            WRITE if is_whole => assert!(is == data, "{case}"),
            WRITE if bytes > SMALL => {
                let received = sent.saturating_sub(28);
                let done = is.iter().zip(was).take_while(|(is, was)| is != was).count();
                assert!(done <= received, "{case}: {done} bytes are written");
                assert!(is[..done] == data[..done] && is[done..] == was[done..], "{case}: {done}");
            }
            TRIM | WRITE_ZEROES if is_whole => assert!(is.iter().all(|byte| *byte == 0), "{case}"),
            _ => assert!(is == was, "{case}"),
        }
    }

    fn vanish_everywhere(&mut self, is_structured: bool) {
        for which in &REQUESTS {
            let payload = if which.0 == WRITE { which.1 as usize } else { 0 };
            // Half of the header, all of it; of the payload a byte, the half, all but a byte, all of it.
            let mut cuts = vec![14, 28];
            if payload > 0 {
                cuts.extend([29, 28 + payload / 2, 27 + payload, 28 + payload]);
            }
            cuts.into_iter().for_each(|sent| self.vanish(is_structured, *which, sent));
        }
        assert_eq!(self.server.counts().refused, 0);
    }
}

/// Goal: whoever vanishes, wherever in whatever request, has changed nothing, or what the request says, or of a long
/// write a part from its beginning; the others go on, and no connection is left. Method: each command, cut behind each
/// of its parts.
#[test]
fn a_client_that_vanishes_on_plain_memory() {
    let mut stage = Stage::new("memory", Arc::new(Memory::new(SIZE as u64)));
    [false, true].into_iter().for_each(|is_structured| stage.vanish_everywhere(is_structured));
}

/// Goal: the same on compressed disks; and nothing of what has vanished takes memory.
#[test]
fn a_client_that_vanishes_on_a_compressed_disk() {
    for (name, unit) in [("pages", UnitOrder::DEFAULT), ("folios", UnitOrder::FOLIO)] {
        let disk = Arc::new(testing::ram_of_units(unit, SIZE as u64, &["lz4"]));
        let mut stage = Stage::new(name, disk.clone());
        // Tables are made once, those of the pool as well.
        (0..4).for_each(|_| stage.vanish(true, (WRITE, 300 << 10), 28 + (150 << 10)));
        let used = || {
            disk.discard(0, SIZE as u64).unwrap();
            disk.zram().compact();
            let stat = disk.zram().mm_stat();
            assert_eq!((stat.orig_data_size, stat.compr_data_size), (0, 0));
            stat.mem_used_total
        };
        let before = used();
        stage.vanish_everywhere(true);
        // Tables of the pool grow by some pages. A unit that every client had left would be eight times as much.
        let (after, most) = (used(), before + SIZE as u64 / 16);
        assert!(after <= most, "{name}: {before} bytes before, {after} now");
    }
}
