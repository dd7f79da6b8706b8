//! Plays whatever a front end or its guest may do, and checks what holds for all of it. For tests and the fuzz target.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemory as _, GuestMemoryMmap, Permissions};

use super::QUEUE_ENTRIES_MAX;
use super::guest::{Driver, Entry, INDIRECT, NEXT, WRITE, header, range};
use super::ring::Ring;
use super::server::converse;
use super::session::Session;
use super::worker::Worker;
use crate::device::Device;
use crate::testing::Memory;

/// Two regions with a hole between them.
const REGIONS: [(u64, usize); 2] = [(0, 256 << 10), (1 << 20, 128 << 10)];

/// No socket has room for less.
const MESSAGES_BYTES_MAX: usize = 64 << 10;

/// The bytes of disks.
const DISKS: [u64; 3] = [64 << 10, 1 << 20, 4 << 20];

/// Plays a script: its first byte chooses between messages and rings.
///
/// # Panics
///
/// When something breaks a rule that holds whatever a front end does.
pub fn play(script: &[u8]) {
    match script.split_first() {
        Some((0..=63, messages)) => play_messages(messages),
        Some((chosen, requests)) => _ = play_requests(*chosen, requests),
        None => {}
    }
}

/// Sends bytes to a session, and ends the connection.
pub(super) fn play_messages(messages: &[u8]) {
    let (mut front_end, socket) = UnixStream::pair().expect("two descriptors");
    let stream = Arc::new(socket.try_clone().expect("a descriptor"));
    let disk: Arc<dyn Device> = Arc::new(Memory::new(1 << 20));
    // Nobody reads the messages before the end of them, so there may be no more than the socket has room for.
    let messages = &messages[..messages.len().min(MESSAGES_BYTES_MAX)];
    front_end.write_all(messages).expect("a socket has room for that");
    front_end.shutdown(Shutdown::Write).ok();
    converse(socket, Session::new(disk, "script", stream, Arc::default()));
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

    fn number(&mut self) -> u64 {
        u64::from(self.byte()) << 8 | u64::from(self.byte())
    }

    /// An address: mostly in memory, sometimes at an edge of it or far away.
    fn address(&mut self) -> u64 {
        match self.byte() {
            0..=159 => (32 << 10) + self.number() * 3,
            160..=207 => (1 << 20) + self.number(),
            208..=223 => (256 << 10) - u64::from(self.byte()),
            224..=239 => u64::MAX - self.number(),
            _ => self.number() << (self.byte() % 48),
        }
    }

    fn length(&mut self) -> u32 {
        let number = u32::try_from(self.number()).expect("two bytes");
        match self.byte() {
            0..=63 => 512 * (number % 64),
            64..=95 => number % 32,
            96..=127 => number << (self.byte() % 17),
            128..=191 => 1,
            _ => 16,
        }
    }

    fn entry(&mut self, entries: u16) -> Entry {
        let (at, bytes, kind) = (self.address(), self.length(), self.byte());
        let flags = if kind & 1 != 0 { WRITE } else { 0 }
            | if kind & 6 != 0 { NEXT } else { 0 }
            | if kind > 247 { INDIRECT } else { 0 };
        let next = u16::from(self.byte()) % (entries + u16::from(kind > 240));
        Entry { at, bytes, flags, next }
    }
}

/// Has a ring serve chains of any descriptors. Returns how many requests were carried out.
pub(super) fn play_requests(chosen: u8, script: &[u8]) -> usize {
    let mut script = Script(script);
    let regions = REGIONS.map(|(at, bytes)| (GuestAddress(at), bytes));
    let memory = GuestMemoryMmap::<()>::from_ranges(&regions).expect("a little memory");
    let disk = Memory::new(DISKS[usize::from(chosen % 3)]).preferring(4096 << (chosen % 10));
    let disk = Arc::new(if chosen & 32 != 0 { disk.read_only() } else { disk });
    let entries = 16;
    let mut driver = Driver::new(4096, entries);
    let mut queue = Queue::new(QUEUE_ENTRIES_MAX).expect("a power of two");
    queue.try_set_size(entries).expect("a power of two");
    queue.try_set_desc_table_address(GuestAddress(driver.descriptors)).expect("aligned");
    queue.try_set_avail_ring_address(GuestAddress(driver.available)).expect("aligned");
    queue.try_set_used_ring_address(GuestAddress(driver.used)).expect("aligned");
    queue.set_event_idx(chosen & 16 != 0);
    queue.set_ready(true);
    let device: Arc<dyn Device> = disk.clone();
    let worker = Worker::new(device, "script", chosen & 8 != 0).expect("there is memory");
    let mut ring = Ring { queue, worker };
    let mut done = 0;
    while !script.0.is_empty() {
        let table: Vec<Entry> = (0..entries).map(|_| script.entry(entries)).collect();
        Driver::put(&memory, driver.descriptors, 0, &table);
        for entry in table.iter().filter(|entry| entry.flags & WRITE == 0 && entry.bytes >= 16) {
            // Where it lies in memory it is the header of a request, or a range.
            let (sector, count) = (script.number() % 9000, u32::from(script.byte()));
            let kind = [0, 1, 4, 8, 11, 13, 2][usize::from(script.byte() % 7)];
            let text =
                if script.byte() < 200 { header(kind, sector) } else { range(sector, count, 0) };
            if memory.check_range(GuestAddress(entry.at), 16, Permissions::Write)
                && entry.at >= driver.end()
            {
                memory.write_slice(&text, GuestAddress(entry.at)).expect("it was checked");
            }
        }
        let heads = script.byte() % 8;
        for _ in 0..heads {
            driver.offer(&memory, u16::from(script.byte()) % (entries + 1));
        }
        if script.byte() == 255 {
            driver.publish(&memory, u16::from(script.byte()) << 8);
        }
        let served = ring.serve(&memory, || true, || ());
        while let Some((head, written)) = driver.take(&memory) {
            assert!(head < u32::from(entries), "VU-4: {head}");
            done += usize::from(written > 0);
        }
        if served.is_err() {
            break;
        }
    }
    // The disk is whole whatever was asked for.
    let mut contents = vec![0; 64 << 10];
    disk.read(0, &mut contents).expect("the disk still reads");
    done
}
