//! From the first transfer to the last: the descriptor to wait for, drops, children.

use std::sync::Arc;

use zfolio_core::swap::disk::{Disk, SLOT_BYTES};
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::testing::in_child;

use super::{
    DEPTH, KINDS, Kind, SpillDisk, alone, assert_holds, directory, drain, make, make_with, medium,
    on_each_kind, read, with_threads, write,
};

const SLOT: u64 = SLOT_BYTES as u64;

/// Goal: who sleeps on the descriptor is woken by every end, if he clears it before he polls. Method: never `pause`;
/// a wake-up that is missed lasts a minute, and fails the test.
#[test]
fn the_descriptor_is_readable_when_something_has_ended() {
    let Some(directory) = directory() else { return };
    for kind in KINDS {
        let ended = Arc::new(EventFd::new().unwrap());
        let medium = medium(&directory, 1024 * SLOT);
        let Some(disk) = make_with(kind, medium, &ended) else { continue };
        with_threads(&disk, kind, || {
            for round in 0..50 {
                for number in 0..DEPTH as u64 {
                    disk.begin(write(number, number * 16, 8, round)).unwrap();
                }
                disk.flush();
                let mut left = DEPTH;
                while left > 0 {
                    assert!(ended.wait(60_000), "{kind:?}: {left} are not reported");
                    ended.clear();
                    disk.poll(&mut |transfer| {
                        assert_eq!(transfer.result, Ok(()));
                        left -= 1;
                    });
                }
            }
        });
    }
}

/// Goal: a disk takes as many transfers as it was made for, and gives others back untouched.
#[test]
fn a_disk_takes_no_more_than_it_was_made_for() {
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 1024 * SLOT),
        |disk, kind| {
            for number in 0..DEPTH as u64 {
                disk.begin(write(number, number, 1, 7)).unwrap();
            }
            let refused = disk.begin(write(99, 500, 2, 7)).unwrap_err();
            assert_eq!((refused.token, refused.first, refused.count), (99, 500, 2), "{kind:?}");
            disk.flush();
            drain(disk, DEPTH);
            assert_eq!(alone(disk, refused).result, Ok(()));
            assert_holds(&alone(disk, read(1, 500, 2)), 7);
        },
    );
}

/// Goal: a disk that is dropped with transfers under way waits for them: the kernel writes to no memory that was
/// freed. Method: reads under way, and the memory is used for something else at once.
#[test]
fn a_drop_waits_for_what_is_under_way() {
    let Some(directory) = directory() else { return };
    for kind in KINDS {
        for _ in 0..20 {
            let Some(disk) = make(kind, medium(&directory, 1024 * SLOT)) else { break };
            assert_eq!(alone(&disk, write(0, 0, 16, 1)).result, Ok(()));
            disk.discard(100, 10);
            for number in 1..DEPTH as u64 {
                disk.begin(read(number, 0, 16)).unwrap();
            }
            if !matches!(disk, SpillDisk::Plain(..)) {
                disk.flush();
            }
            drop(disk);
            let canaries: Vec<Vec<u8>> = (0..DEPTH).map(|_| vec![0x55; 16 * SLOT_BYTES]).collect();
            assert!(canaries.iter().flatten().all(|byte| *byte == 0x55));
        }
    }
}

/// Goal: a child that inherits a disk can drop it, and can go on with the same file by a disk of its own; the parent's
/// disk works as before, and the parent knows whether a child has the file. Method: `fork` with threads that serve;
/// the child reads what the parent wrote, and the parent reads what the child wrote.
#[test]
fn a_child_goes_on_with_the_file_or_drops_it() {
    let Some(directory) = directory() else { return };
    for kind in KINDS {
        let ended = Arc::new(EventFd::new().unwrap());
        let medium = medium(&directory, 1024 * SLOT);
        let Some(disk) = make_with(kind, medium, &ended) else { continue };
        let copy = || {
            // SAFETY: only the child uses it, and the parent's value is never used there.
            unsafe { std::ptr::read(&raw const disk) }
        };
        let disk = &disk;
        with_threads(disk, kind, || {
            assert_eq!(alone(disk, write(1, 0, 16, 1)).result, Ok(()));
            assert!(disk.medium().is_alone(), "{kind:?}: nobody else has it");
            let is_good = in_child(|| {
                drop(copy());
                // SAFETY: nothing is closed or changed: it asks for flags.
                let flags = unsafe {
                    libc::fcntl(
                        std::os::fd::AsRawFd::as_raw_fd(&disk.medium().file()),
                        libc::F_GETFD,
                    )
                };
                flags >= 0
            });
            assert!(is_good, "{kind:?}: dropping");
            let lent = disk.medium().lend(zfolio_sys::cpu::thread_id()).unwrap();
            assert!(!disk.medium().is_alone(), "{kind:?}: it is lent");
            let lent = std::cell::Cell::new(Some(lent));
            let is_good = in_child(|| {
                let medium = disk.medium().lent(lent.take().unwrap());
                let is_shared = !medium.is_alone();
                let disk = make_with(kind, medium, &Arc::new(EventFd::new().unwrap())).unwrap();
                assert_holds(&alone(&disk, read(2, 0, 16)), 1);
                let broken = matches!(&disk, SpillDisk::Uring(ring) if ring.is_broken());
                alone(&disk, write(3, 16, 4, 2)).result.is_ok() && !broken && is_shared
            });
            assert!(is_good, "{kind:?}: going on");
            assert!(!disk.medium().is_alone(), "{kind:?}: this process has it twice");
            drop(lent.take());
            assert!(disk.medium().is_alone(), "{kind:?}: the child has ended");
            assert_holds(&alone(disk, read(4, 16, 4)), 2);
            assert_holds(&alone(disk, read(5, 0, 16)), 1);
        });
    }
}

/// Goal: what ended is counted by the way that it took.
#[test]
fn transfers_are_counted_by_the_way_that_they_took() {
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 1024 * SLOT),
        |disk, kind| {
            assert_eq!(alone(disk, write(1, 0, 4, 1)).result, Ok(()));
            assert_holds(&alone(disk, read(2, 0, 4)), 1);
            disk.discard(0, 4);
            assert_eq!(alone(disk, write(3, 0, 4, 2)).result, Ok(()));
            let counts = disk.counts();
            let by = (counts.by_ring, counts.by_calls);
            assert_eq!(
                by,
                if matches!(kind, Kind::Plain(_)) { (0, 3) } else { (3, 0) },
                "{kind:?}"
            );
            assert_eq!((counts.discards + counts.discards_left_out, counts.failed), (1, 0));
        },
    );
}
