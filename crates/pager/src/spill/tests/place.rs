//! What a place says of its disks, and what it lends to a child.

#![allow(unsafe_code, reason = "descriptors of which others think that they have them")]

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use zfolio_core::store::Backing;
use zfolio_core::store::backing::{Completed, Location, Operation, Request, Token};
use zfolio_core::swap::AREAS_MAX;
use zfolio_core::swap::disk::SLOT_BYTES;
use zfolio_sys::custody::{Asked, Custodian, ask};
use zfolio_sys::disk::Kind;
use zfolio_sys::testing::{IO_URING, forbid_calls, forbid_direct, in_child};
use zfolio_sys::{Errno, disk, files};

use super::directory;
use crate::spill::place::{
    Hooks, Lent, Place, PlaceError, Places, SPILL_BYTES_MIN, Ways, is_direct,
};
use crate::spill::{Sender, SpillDisk};

/// A place in a directory, with an area. The calling thread carries out all transfers.
fn opened(directory: PathBuf) -> Place {
    opened_with(directory, None)
}

fn opened_with(directory: PathBuf, hooks: Option<Hooks>) -> Place {
    let paths = vec![(directory, 0)];
    let places = Places { paths, limit_bytes: Some(SPILL_BYTES_MIN), ..Places::default() };
    let place = Place::new(&places, SPILL_BYTES_MIN, SLOT_BYTES, Sender::Caller).unwrap();
    hooks.into_iter().for_each(|hooks| place.open_when_needed(hooks));
    assert_eq!(place.ways(), None, "nothing is open");
    let disks = place.open(place.plan().unwrap()).unwrap();
    place.add(place.new_areas(), disks).unwrap();
    place
}

/// Writes an object of a slot, and waits until it is written.
fn write(place: &Place) -> Location {
    let (backing, object) = (place.backing(), [7; SLOT_BYTES]);
    let operation = Operation::Write(&object);
    let mut requests = [Request { token: Token::numbered(1), operation, refused: None }];
    backing.submit(&mut requests);
    assert_eq!(requests[0].refused, None);
    backing.flush();
    let mut written = None;
    while written.is_none() {
        backing.pause();
        backing.poll(&mut |completion| match completion.result {
            Ok(Completed::Written(location)) => written = Some(location),
            other => panic!("{other:?}"),
        });
    }
    written.expect("the loop has ended")
}

/// Goal: a place says how its disks are used now, and not how they were opened. Method: a filter that forbids the ring
/// after the first write.
#[test]
fn a_ring_that_has_stopped_working_is_told() {
    let Some(directory) = directory() else { return };
    let test = || {
        let place = opened(directory);
        let first = write(&place);
        if place.ways().is_some_and(|ways| !ways.by_ring) {
            return eprintln!("SKIPPED: no io_uring here");
        }
        let is_direct = place.disks()[0].medium().is_direct();
        assert_eq!(place.ways(), Some(Ways { by_ring: true, is_direct, calls: 0 }));
        forbid_calls(&IO_URING, Errno::PERM).unwrap();
        let second = write(&place);
        assert_eq!(place.ways(), Some(Ways { by_ring: false, is_direct, calls: 1 }));
        for location in [first, second] {
            place.backing().discard(location, SLOT_BYTES);
        }
        place.close();
    };
    std::thread::spawn(test).join().unwrap();
}

/// A regression: where io_uring was forbidden after the file had been opened, whoever flushed, with the store and the
/// table locked, carried out all transfers, so that all faults waited for each read. Goal: the disk gets one thread for
/// that, once there is one to be had. Method: a filter that forbids the ring after the first write.
#[test]
fn a_ring_that_has_stopped_working_gets_a_thread() {
    static MAY_START: AtomicBool = AtomicBool::new(false);
    static TRIES: AtomicU32 = AtomicU32::new(0);
    fn start(disk: Arc<SpillDisk>) -> bool {
        TRIES.fetch_add(1, Relaxed);
        let may_start = MAY_START.load(Relaxed);
        if may_start {
            std::thread::spawn(move || disk.serve());
        }
        may_start
    }
    let Some(directory) = directory() else { return };
    let test = || {
        let place = opened_with(directory, Some(Hooks { start, claim: |_| None }));
        let first = write(&place);
        if place.ways().is_some_and(|ways| !ways.by_ring) {
            return eprintln!("SKIPPED: no io_uring here");
        }
        assert!(place.start_threads());
        assert_eq!(TRIES.load(Relaxed), 0, "the ring works");
        forbid_calls(&IO_URING, Errno::PERM).unwrap();
        let second = write(&place);
        let disk = place.disks().remove(0);
        assert!(!disk.is_by_ring() && !disk.is_served());
        assert!(!place.start_threads(), "none is to be had");
        MAY_START.store(true, Relaxed);
        for _ in 0..3 {
            assert!(place.start_threads());
            assert_eq!(TRIES.load(Relaxed), 2);
        }
        while !disk.is_served() {
            std::thread::yield_now();
        }
        let third = write(&place);
        for location in [first, second, third] {
            place.backing().discard(location, SLOT_BYTES);
        }
        disk.stop();
        drop(disk);
        place.close();
    };
    std::thread::spawn(test).join().unwrap();
}

/// Goal: a file system without direct I/O is told. Method: a filter that refuses the flag, as such a file system does.
#[test]
fn a_disk_through_the_page_cache_is_told() {
    let Some(directory) = directory() else { return };
    let test = || {
        forbid_direct().unwrap();
        assert_eq!(is_direct(&directory), Ok(false));
        let place = opened(directory);
        let location = write(&place);
        assert!(place.ways().is_some_and(|ways| !ways.is_direct));
        place.backing().discard(location, SLOT_BYTES);
        place.close();
    };
    std::thread::spawn(test).join().unwrap();
}

/// Goal: who has areas already, as a child that still reads its parent's, opens half as many as there is room for,
/// those with the highest priorities.
#[test]
fn as_many_places_are_opened_as_there_is_room_for() {
    let Some(directory) = directory() else { return };
    let paths = (0..9).map(|priority| (directory.clone(), priority % 3)).collect();
    let places = Places { paths, limit_bytes: Some(SPILL_BYTES_MIN), ..Places::default() };
    let place = Place::new(&places, SPILL_BYTES_MIN, SLOT_BYTES, Sender::Caller).unwrap();
    let mut priorities = Vec::new();
    for room in [16, 7, 3, 1, 0] {
        assert_eq!(place.room(), room);
        let disks = place.open(place.plan().unwrap()).unwrap();
        priorities.push(disks.iter().map(|new| new.priority).collect::<Vec<_>>());
        place.add(place.new_areas(), disks).unwrap();
    }
    let all = vec![0, 1, 2, 0, 1, 2, 0, 1, 2];
    let expected = [all, vec![1, 2, 2, 2], vec![2, 2], vec![2], vec![]];
    assert_eq!(priorities, expected);
    place.close();
}

/// A regression: an area whose last object ends after its file was lent has ended in the child, which gave it a disk
/// all the same, and was aborted inside of `fork`. Goal: the child is without the area. Method: a write whose object
/// ends between the two steps of a fork.
#[test]
fn a_child_starts_without_an_area_that_was_lent_and_has_ended() {
    let Some(directory) = directory() else { return };
    for threads in [true, false] {
        let place = opened(directory.clone());
        let location = write(&place);
        let mut lent = place.lend().unwrap();
        assert_eq!(lent.files().count(), 1);
        place.backing().discard(location, SLOT_BYTES);
        assert!(place.share(&mut lent));
        let is_good = in_child(|| {
            let files = lent.files().map(files::duplicate).collect::<Result<_, _>>().unwrap();
            place.start_over(&lent, files, threads).unwrap();
            place.ways().is_none() && place.room() == AREAS_MAX
        });
        assert!(is_good, "threads: {threads}");
        assert_eq!(lent.files().count(), 0, "it is of no use to a child");
        place.close();
    }
}

/// A regression: a child used what was lent to it by its number, whatever another thread of the parent had put there.
/// Goal: nothing is shared, and nobody goes on, where the file is not the one that was lent. Method: another file under
/// its number.
#[test]
fn a_file_that_the_program_replaces_is_lent_to_nobody() {
    let Some(directory) = directory() else { return };
    let place = opened(directory);
    let location = write(&place);
    let mut lent = place.lend().unwrap();
    assert!(lent.is_whole());
    let number = lent.files().next().unwrap().as_raw_fd();
    let other = std::fs::File::open("/proc/self/stat").unwrap();
    // SAFETY: the number is that of `lent`, which expects this.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
    assert!(!lent.is_whole() && !place.share(&mut lent));
    drop(lent);
    // SAFETY: the copy that was just made, which nobody else has.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    let mut lent = place.lend().unwrap();
    assert!(place.share(&mut lent) && lent.is_whole());
    place.backing().discard(location, SLOT_BYTES);
    place.close();
}

/// A regression: a child that was forked while the run owed its parent the answer about a device, and there was no area
/// yet, waited for that answer at the number of its parent's descriptor. Goal: the child asks for itself. Method: a run
/// that does not answer, and any device, which nobody opens.
#[test]
fn a_child_asks_for_itself_whether_it_may_use_a_device() {
    static TIMES: AtomicU32 = AtomicU32::new(0);
    fn name() -> String {
        format!("place-test.{}", std::process::id())
    }
    fn claim(_: &Path) -> Option<Asked> {
        let is_first = TIMES.fetch_add(1, Relaxed) == 0;
        is_first.then(|| ask(&name(), std::process::id(), 0)).flatten()
    }
    let all = std::fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().path());
    let device = all.into_iter().find(|path| matches!(disk::kind(path), Ok(Kind::Device(_))));
    let (Some(device), Some(_custodian)) = (device, Custodian::new(&name())) else {
        return eprintln!("SKIPPED: no block device, or no /dev/shm");
    };
    let limit_bytes = Some(SPILL_BYTES_MIN);
    let places = Places { paths: vec![(device, 0)], limit_bytes, ..Places::default() };
    let place = Place::new(&places, SPILL_BYTES_MIN, SLOT_BYTES, Sender::Caller).unwrap();
    place.open_when_needed(Hooks { start: |_| false, claim });
    assert!(matches!(place.plan(), Err(PlaceError::Unanswered)));
    assert!(matches!(place.plan(), Err(PlaceError::Unanswered)));
    assert_eq!(TIMES.load(Relaxed), 1);
    let is_good = in_child(|| {
        place.start_over(&Lent::default(), Vec::new(), true).unwrap();
        place.plan().is_ok() && TIMES.load(Relaxed) == 2
    });
    assert!(is_good);
}
