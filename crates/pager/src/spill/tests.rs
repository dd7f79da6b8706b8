//! Both disks on real files and devices.

#![allow(unsafe_code, reason = "system calls that set up what a test needs")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use zfolio_core::swap::disk::{Buffer, Direction, Disk, SLOT_BYTES, Transfer};
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::{Errno, disk};

use super::file::Medium;
use super::{Plain, Sender, SpillDisk, Uring};

mod devices;
mod faults;
mod life;
mod limit;
mod model;
mod place;

/// Transfers at a time in the tests.
const DEPTH: usize = 16;

/// How a disk works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// By plain calls, in so many threads.
    Plain(usize),
    /// By a ring, in so many threads for the rest.
    Uring(Sender, usize),
}

const KINDS: [Kind; 6] = [
    Kind::Plain(0),
    Kind::Plain(1),
    Kind::Plain(2),
    Kind::Uring(Sender::Caller, 0),
    Kind::Uring(Sender::Caller, 1),
    Kind::Uring(Sender::Thread, 1),
];

/// A disk of this kind; `None`, with a reason, where the system has none.
fn make(kind: Kind, medium: Medium) -> Option<SpillDisk> {
    make_with(kind, medium, &Arc::new(EventFd::new().unwrap()))
}

fn make_with(kind: Kind, medium: Medium, ended: &Arc<EventFd>) -> Option<SpillDisk> {
    let ended = ended.clone();
    match kind {
        Kind::Plain(_) => Some(SpillDisk::Plain(Plain::new(medium, DEPTH, ended), Errno::NOSYS)),
        Kind::Uring(sender, _) => match Uring::new(medium, DEPTH, ended, sender) {
            Ok(disk) => Some(SpillDisk::Uring(disk)),
            Err((_, errno @ (Errno::NOSYS | Errno::PERM))) => {
                eprintln!("SKIPPED: no io_uring here: {errno}");
                None
            }
            Err((_, errno)) => panic!("no ring: {errno}"),
        },
    }
}

/// Runs `test` on a disk of each kind, with its threads; `medium` makes one for each.
fn on_each_kind(medium: impl Fn() -> Medium, test: impl Fn(&SpillDisk, Kind)) {
    for kind in KINDS {
        if let Some(disk) = make(kind, medium()) {
            with_threads(&disk, kind, || test(&disk, kind));
        }
    }
}

/// Runs `test` while the threads of the disk serve.
fn with_threads(disk: &SpillDisk, kind: Kind, test: impl FnOnce()) {
    /// Ends the threads, also after a failed assertion.
    struct Stop<'a>(&'a SpillDisk);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let (Kind::Plain(threads) | Kind::Uring(_, threads)) = kind;
    std::thread::scope(|scope| {
        let _stop = Stop(disk);
        for _ in 0..threads {
            scope.spawn(|| disk.serve());
        }
        test();
    });
}

/// A directory on a disk, for a test; `None`, with a reason, where there is none.
fn directory() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.parent()?.to_owned();
    let places = [std::env::temp_dir(), PathBuf::from("/var/tmp"), beside];
    let found = places.into_iter().find(|place| disk::kept_in_memory(place) == Ok(None));
    if found.is_none() {
        eprintln!("SKIPPED: no directory on a disk");
    }
    found
}

fn medium(directory: &Path, bytes: u64) -> Medium {
    Medium::open(directory, bytes, 0).unwrap()
}

fn read(token: u64, first: u64, count: usize) -> Transfer {
    let mut buffer = Buffer::new(count);
    // Bytes that nobody has written: a read that fails must not be taken for one that did not.
    buffer.slots_mut().iter_mut().for_each(|slot| slot.0.fill(0xEE));
    Transfer { token, direction: Direction::Read, first, count, buffer, result: Ok(()) }
}

/// A write of slots that hold what [`pattern`] says.
fn write(token: u64, first: u64, count: usize, version: u64) -> Transfer {
    let mut transfer = read(token, first, count);
    transfer.direction = Direction::Write;
    for (slot, number) in transfer.buffer.slots_mut().iter_mut().zip(first..) {
        slot.0 = pattern(number, version);
    }
    transfer
}

/// What a slot holds after the write of a version: each word of it differs from that of any other slot or version.
fn pattern(slot: u64, version: u64) -> [u8; SLOT_BYTES] {
    let mut bytes = [0; SLOT_BYTES];
    for (word, place) in bytes.chunks_exact_mut(8).zip(0_u64..) {
        let number = (slot << 40) | (version << 9) | place;
        word.copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    }
    bytes
}

/// Begins a transfer, and waits until it has ended.
fn alone(disk: &dyn Disk, transfer: Transfer) -> Transfer {
    disk.begin(transfer).expect("nothing else is under way");
    disk.flush();
    drain(disk, 1).remove(0)
}

/// Waits until `count` transfers have ended.
fn drain(disk: &dyn Disk, count: usize) -> Vec<Transfer> {
    let mut ended = Vec::new();
    let mut pauses = 0;
    loop {
        disk.poll(&mut |transfer| ended.push(transfer));
        if ended.len() >= count {
            assert_eq!(ended.len(), count, "DISK-1");
            return ended;
        }
        disk.pause();
        pauses += 1;
        assert!(pauses < 60_000, "{count} transfers do not end: {disk:?}");
    }
}

/// Asserts that a read has found a version of its slots.
fn assert_holds(transfer: &Transfer, version: u64) {
    assert_eq!(transfer.result, Ok(()), "{}", transfer.token);
    for (slot, number) in transfer.buffer.slots()[..transfer.count].iter().zip(transfer.first..) {
        assert!(slot.0 == pattern(number, version), "slot {number} of {}", transfer.token);
    }
}
