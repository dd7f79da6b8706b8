//! What goes wrong: no room, a limit of the process, a file that is shortened, io_uring forbidden.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use zfolio_core::swap::disk::{Disk, Error, SLOT_BYTES};
use zfolio_sys::testing::{IO_URING, forbid_calls};
use zfolio_sys::{Errno, disk};

use super::{
    KINDS, Kind, Medium, SpillDisk, alone, assert_holds, directory, drain, make, medium,
    on_each_kind, read, with_threads, write,
};
use crate::spill::Sender;

const SLOT: u64 = SLOT_BYTES as u64;

/// Goal: where the file was shortened, a read is an error, also one that begins before its end; and what is still
/// there is read. Method: `ftruncate` in the middle of a slot.
#[test]
fn a_shortened_file_is_an_error_and_never_old_bytes() {
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 64 * SLOT),
        |disk, kind| {
            assert_eq!(alone(disk, write(1, 0, 16, 1)).result, Ok(()));
            disk::set_bytes(disk.medium().file(), 8 * SLOT + 100).unwrap();
            let gone = Err(Error::Failed { errno: 0 });
            for (first, count) in [(8, 1), (9, 4), (0, 16), (7, 2), (60, 4)] {
                assert_eq!(alone(disk, read(2, first, count)).result, gone, "{kind:?} {first}");
            }
            assert_eq!(disk.read_error(), gone.err(), "{kind:?}");
            assert_holds(&alone(disk, read(3, 0, 8)), 1);
            // It has room again.
            assert_eq!(alone(disk, write(4, 8, 8, 2)).result, Ok(()));
            assert_holds(&alone(disk, read(5, 8, 8)), 2);
        },
    );
}

/// Goal: beyond `RLIMIT_FSIZE` a write is refused, and the program lives, whatever thread begins it; within it all is
/// as before, and when the limit is raised too. Method: a limit so high that no other test meets it, in a file with a
/// hole below; it lies in the middle of a slot. No signal is blocked: a missed one ends the test.
#[test]
fn the_limit_of_a_file_does_not_end_the_program() {
    const LIMIT: u64 = 1 << 40;
    let Some(directory) = directory() else { return };
    let limit = |bytes: u64| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the limit outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    };
    let first = LIMIT / SLOT;
    for with_size in [true, false] {
        limit(if with_size { libc::RLIM_INFINITY } else { LIMIT + 100 });
        let bytes = LIMIT + 64 * SLOT;
        on_each_kind(
            || medium(&directory, bytes),
            |disk, kind| {
                limit(LIMIT + 100);
                for (slot, count) in [(first + 1, 1), (first, 1), (first - 1, 3), (first, 16)] {
                    let ended = alone(disk, write(1, slot, count, 1));
                    assert_eq!(ended.result, Err(Error::Full), "{kind:?} {slot} {count}");
                }
                assert_eq!(alone(disk, write(2, first - 4, 4, 2)).result, Ok(()), "{kind:?}");
                assert_holds(&alone(disk, read(3, first - 4, 4)), 2);
                limit(libc::RLIM_INFINITY);
                assert_eq!(alone(disk, write(4, first - 1, 4, 3)).result, Ok(()), "{kind:?}");
                assert_holds(&alone(disk, read(5, first - 1, 4)), 3);
            },
        );
    }
    limit(libc::RLIM_INFINITY);
}

/// Goal: what no file of this file system can hold is refused as a full disk is: `EFBIG`. Method: far beyond.
#[test]
fn what_no_file_can_hold_is_refused() {
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 64 * SLOT),
        |disk, kind| {
            let far = (1 << 62) / SLOT;
            let ended = alone(disk, write(1, far, 1, 1));
            assert_eq!(ended.result, Err(Error::Full), "{kind:?}");
        },
    );
}

/// Goal: where io_uring is forbidden, the disk works by plain calls, and says why.
#[test]
fn without_a_ring_plain_calls_do_the_work() {
    let Some(directory) = directory() else { return };
    for call in IO_URING {
        let medium = medium(&directory, 64 * SLOT);
        let thread = std::thread::spawn(move || {
            forbid_calls(&[call], Errno::PERM).unwrap();
            let ended = std::sync::Arc::new(zfolio_sys::eventfd::EventFd::new().unwrap());
            let disk = SpillDisk::new(medium, 16, ended, Sender::Caller);
            assert!(matches!(disk, SpillDisk::Plain(_, Errno::PERM)), "{disk:?}");
            assert_eq!(alone(&disk, write(1, 0, 16, 1)).result, Ok(()));
            assert_holds(&alone(&disk, read(2, 0, 16)), 1);
        });
        thread.join().unwrap();
    }
}

/// A ring with transfers under way, of which `error` is then the answer to every call.
fn forbidden_later(kind: Kind, medium: Medium, error: Errno) {
    let Some(disk) = make(kind, medium) else { return };
    let is_forbidden = &AtomicBool::new(false);
    let SpillDisk::Uring(ring) = &disk else { return };
    with_threads(&disk, kind, || {
        for number in 0..8 {
            disk.begin(write(number, number * 4, 4, 1)).unwrap();
        }
        disk.flush();
        // These are begun before and flushed after.
        for number in 8..12 {
            disk.begin(write(number, number * 4, 4, 1)).unwrap();
        }
        forbid_calls(&IO_URING, error).unwrap();
        is_forbidden.store(true, Ordering::Relaxed);
        disk.flush();
        for ended in drain(&disk, 12) {
            assert_eq!(ended.result, Ok(()), "{kind:?} {error}");
        }
        for number in 0..12 {
            disk.begin(read(number, number * 4, 4)).unwrap();
        }
        disk.flush();
        for ended in drain(&disk, 12) {
            assert_holds(&ended, 1);
        }
        disk.discard(0, 16);
        assert_eq!(alone(&disk, write(1, 0, 16, 2)).result, Ok(()));
        assert_holds(&alone(&disk, read(2, 0, 16)), 2);
    });
    // With a thread of the disk's own the filter does not reach whoever sends.
    if kind == Kind::Uring(Sender::Caller, 0) {
        assert!(ring.is_broken(), "{error}");
        assert!(disk.counts().by_calls >= 16, "{:?}", disk.counts());
    }
    let counts = disk.counts();
    assert_eq!(counts.by_ring + counts.by_calls, 26, "{counts:?}");
    assert_eq!(counts.failed, 0, "{counts:?}");
}

/// Goal: when io_uring is forbidden while transfers are under way, none is lost: what the kernel has ends, the rest and
/// all later ones go by plain calls. Method: a filter on the calling thread, with each answer that the kernel or a
/// filter may give.
#[test]
fn a_ring_that_is_forbidden_later_loses_nothing() {
    let Some(directory) = directory() else { return };
    let errors = [Errno::PERM, Errno::NOSYS, Errno::ACCESS, Errno::AGAIN, Errno::BUSY, Errno::BADF];
    for kind in KINDS {
        for error in errors {
            let medium = medium(&directory, 64 * SLOT);
            std::thread::spawn(move || forbidden_later(kind, medium, error)).join().unwrap();
        }
    }
}

/// Goal: a thread that ends while its transfers are under way takes none with it: the kernel cancels what it can, and
/// that is tried again. Method: many writes to holes, which workers of the kernel carry out, from threads that end at
/// once.
#[test]
fn a_thread_that_ends_takes_no_transfer_with_it() {
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 4096 * SLOT),
        |disk, _| {
            for round in 0..20 {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        for number in 0..16 {
                            let first = round * 160 + number * 10;
                            disk.begin(write(number, first, 8, round)).unwrap();
                        }
                        disk.flush();
                    });
                });
                for ended in drain(disk, 16) {
                    assert_eq!(ended.result, Ok(()), "{:?}", disk.counts());
                }
                for number in 0..16 {
                    assert_holds(&alone(disk, read(0, round * 160 + number * 10, 8)), round);
                }
            }
        },
    );
}

/// Goal: a full file system refuses writes, and takes them when it has room again; what was written stays. Method: a
/// tmpfs of 1 MiB that only one thread sees, by the page cache.
#[test]
fn a_full_file_system_refuses_and_has_room_again() {
    let thread = std::thread::spawn(|| {
        let Some(place) = super::devices::private_tmpfs("size=1M") else { return };
        let room = disk::free_bytes(&place).unwrap();
        on_each_kind(
            || {
                await_room(&place, room);
                Medium::open_in_directory(&place, 1 << 30).unwrap()
            },
            |disk, kind| {
                fill(disk, kind, 256);
            },
        );
    });
    thread.join().unwrap();
}

/// Waits until a file system has as much room as before: the kernel closes the file of a ring a moment after the ring.
pub(super) fn await_room(place: &Path, room: u64) {
    let has_room = || disk::free_bytes(place).unwrap() >= room;
    let ten_ms = std::time::Duration::from_millis(10);
    let waits = (0..1_000).take_while(|_| !has_room()).inspect(|_| std::thread::sleep(ten_ms));
    assert!(waits.count() < 1_000, "{} is full after its files were closed", place.display());
}

/// Writes until the medium is full, gives room back, and goes on. `slots`: about how many there are.
pub(super) fn fill(disk: &SpillDisk, kind: Kind, slots: u64) {
    let mut kept = 0;
    let full = (0..2 * slots).step_by(8).find(|first| {
        let result = alone(disk, write(1, *first, 8, 1)).result;
        assert!(matches!(result, Ok(()) | Err(Error::Full)), "{kind:?} {result:?}");
        kept += u64::from(result.is_ok()) * 8;
        result.is_err()
    });
    let full = full.expect("it is full at last");
    assert!(full >= 16, "{kind:?}: full at {full}");
    for first in (0..kept).step_by(8) {
        assert_holds(&alone(disk, read(2, first, 8)), 1);
    }
    assert_eq!(alone(disk, write(3, full, 8, 2)).result, Err(Error::Full), "{kind:?}");
    disk.discard(0, 16);
    // The discard comes first (QUEUE-2): this write goes to one of its slots.
    assert_eq!(alone(disk, write(4, 8, 1, 3)).result, Ok(()), "{kind:?}");
    assert_eq!(alone(disk, write(5, full, 8, 2)).result, Ok(()), "{kind:?}");
    assert_holds(&alone(disk, read(6, full, 8)), 2);
    assert_holds(&alone(disk, read(7, 8, 1)), 3);
}
