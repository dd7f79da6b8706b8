//! Goal: what is written back is what was written, wherever it is and whatever fails. The scripts of `script` say that
//! of single requests; here are threads, limits, damage and figures.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use super::{Chosen, Stop};
use crate::budget::WriteBudget;
use crate::store::backing::faulty::{Breakable, Faulty};
use crate::store::backing::sealed::Sealed;
use crate::store::backing::{Completion, Location, Operation, Request, Usage};
use crate::store::{self, Backing};
use crate::testing::{Random, seed};
use crate::zcomp::Algorithm;
use crate::zram::tests::zram;
use crate::zram::{BdStat, Error, Recompression, SaveError, Unread, What, Zram};
use crate::zsmalloc::world::{World, bytes, unit};

const PAGE: usize = 4096;

type Disk = Zram<Arc<World>>;

fn disk_on(backing: Box<dyn Backing>, order: u8, units: u64, budget: &str) -> Disk {
    let disk_bytes = units * unit(order).bytes() as u64;
    let disk = zram(order, disk_bytes, &[Algorithm::Lz4, Algorithm::Zstd]);
    let budget: WriteBudget = budget.parse().unwrap();
    disk.with_backing(backing, budget)
}

/// A disk in pages, and its backing of so many bytes.
fn disk<B: Breakable>(units: u64, backing_bytes: usize) -> (Disk, B) {
    let backing = B::new(backing_bytes);
    (disk_on(Box::new(backing.clone()), 0, units, "none"), backing)
}

/// Contents that shrink to a few hundred bytes.
fn text(tag: u64) -> Vec<u8> {
    bytes(tag, 256).repeat(PAGE / 256)
}

/// The letters of each unit that is stored.
fn letters(disk: &Disk) -> Vec<String> {
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    state.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect()
}

fn read(disk: &Disk, at: u64) -> Vec<u8> {
    let mut found = vec![0xEE; PAGE];
    disk.read(0, at << 12, &mut found).unwrap();
    found
}

/// Goal: each choice writes what it says; what was written back stays there when it is read, whole or in part, is not
/// tried with another algorithm, and gives its place up when it is overwritten or discarded.
#[test]
fn what_was_chosen_is_written_back() {
    let (disk, backing) = disk::<Sealed>(64, 16 << 20);
    let contents = [bytes(1, PAGE), text(2), vec![0x11; PAGE], bytes(4, PAGE), text(5)];
    for (at, unit) in (0_u64..).zip(&contents) {
        disk.write(0, at << 12, unit).unwrap();
    }
    disk.mark_idle(None);
    read(&disk, 0);
    read(&disk, 1);
    assert_eq!(disk.write_back(0, &Chosen::HugeIdle).units, 1);
    assert_eq!(letters(&disk), ["..h...", "......", "s.....", ".wh...", "...i.."]);
    assert_eq!(disk.write_back(0, &Chosen::Idle).units, 1, "a word takes no memory");
    assert_eq!(disk.write_back(0, &Chosen::Incompressible).units, 0, "nothing was tried");
    let all = Recompression { what: What::All, ..Recompression::default() };
    assert_eq!(disk.recompress(0, all).unwrap().tried, 2, "those in memory");
    assert_eq!(disk.write_back(0, &Chosen::Incompressible).units, 1);
    assert_eq!(disk.write_back(0, &Chosen::Huge).units, 0);
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![7..=9, 1..=1])).units, 1);
    assert_eq!(letters(&disk), [".wh..n", ".w..r.", "s.....", ".wh...", ".w...."]);
    let (bd, mm) = (disk.bd_stat(), disk.mm_stat());
    assert_eq!((bd.bd_count, bd.bd_reads), (bd.bd_writes, 0), "{bd:?}");
    assert!((3..=4).contains(&bd.bd_count), "two of 4 KiB, two of some 100 bytes: {bd:?}");
    assert_eq!(bd.to_string().split_whitespace().count(), BdStat::NAMES.len());
    assert_eq!((mm.orig_data_size, mm.compr_data_size, mm.huge_pages), (5 << 12, 0, 0));
    for _ in 0..3 {
        for (at, unit) in (0_u64..).zip(&contents) {
            assert!(read(&disk, at) == *unit, "unit {at}");
        }
        let mut sector = [0; 512];
        disk.read(1, (3 << 12) + 1024, &mut sector).unwrap();
        assert!(sector == contents[3][1024..1536]);
    }
    let mut all = vec![0; 5 * PAGE];
    disk.read(1, 0, &mut all).unwrap();
    assert!(all == contents.concat(), "all at once");
    assert!(disk.bd_stat().bd_reads >= bd.bd_count && disk.bd_stat().bd_writes == bd.bd_writes);
    assert_eq!(disk.mm_stat().compr_data_size, 0, "reads leave nothing in memory");
    disk.write(0, (3 << 12) + 512, &[9; 512]).unwrap();
    let changed = [&contents[3][..512], &[9; 512], &contents[3][1024..]].concat();
    assert!(read(&disk, 3) == changed);
    disk.write(0, 0, &text(9)).unwrap();
    disk.discard(0, 1 << 12, PAGE as u64).unwrap();
    assert_eq!(letters(&disk), ["......", "s.....", "......", ".w...."]);
    disk.discard(0, 4 << 12, PAGE as u64).unwrap();
    assert_eq!((backing.locations(), disk.bd_stat().bd_count), (0, 0));
    assert!(read(&disk, 0) == text(9) && read(&disk, 4) == [0; PAGE]);
}

/// Goal: many readers of a few units that are away all get them, though each lets them go again.
#[test]
fn readers_of_the_same_units_all_get_them() {
    let (disk, _) = disk::<Sealed>(4, 16 << 20);
    (0..4).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Huge).units, 4);
    std::thread::scope(|scope| {
        for reader in 0..6 {
            let disk = &disk;
            scope.spawn(move || {
                for turn in 0..2000 {
                    let at = (turn * 7 + reader) % 4;
                    assert!(read(disk, at) == bytes(at, PAGE), "unit {at}");
                }
            });
        }
    });
    assert_eq!(disk.store.spill_stats().units, 4, "all are away");
}

/// Goal: a unit of which two requests read a part is read from the backing once, and leaves nothing in memory. The
/// second request had it fetched once more, took its part from the scratch buffer, and left the unit in memory.
#[test]
fn a_unit_of_two_requests_is_fetched_once() {
    let disk = disk_on(Box::new(Faulty::new(16 << 20)), 3, 4, "none");
    let unit = disk.unit().bytes();
    let contents = bytes(1, 4 * unit);
    disk.write(0, 0, &contents).unwrap();
    assert_eq!(disk.write_back(0, &Chosen::Huge).units, 4);
    let mut found = vec![0; unit * 3 / 2];
    for at in [0, found.len()] {
        disk.read(0, at as u64, &mut found).unwrap();
        assert!(found == contents[at..at + found.len()]);
    }
    disk.store.drain();
    let spill = disk.store.spill_stats();
    assert_eq!((spill.units, spill.read, spill.kept), (4, 3, 0), "{spill:?}");
    assert_eq!(disk.mm_stat().compr_data_size, 0, "reads leave nothing in memory");
}

/// Goal: a unit that was fetched for a reader who takes his part from the scratch buffer leaves memory again. It stayed
/// there, wanted for ever. Method: the steps of two readers of one unit on one CPU, one after the other.
#[test]
fn a_reader_who_was_overtaken_leaves_nothing() {
    let (disk, _) = disk::<Faulty>(4, 16 << 20);
    disk.write(0, 0, &bytes(1, PAGE)).unwrap();
    assert_eq!(disk.write_back(0, &Chosen::Huge).units, 1);
    let ticket = disk.away(&disk.table.get(0).unwrap().lock()).unwrap();
    let mut found = [0; 512];
    disk.read(0, 0, &mut found).unwrap();
    disk.store.wait(ticket).unwrap();
    assert_eq!(disk.store.spill_stats().units, 0, "it was fetched again");
    disk.read(0, 512, &mut found).unwrap();
    assert!(found == bytes(1, PAGE)[512..1024]);
    assert_eq!(disk.store.spill_stats().units, 1, "it is away");
    // One that has lost its location meanwhile stays, until memory is wanted.
    disk.store.wait(ticket).unwrap();
    disk.store.give_up_backing(disk.table.get(0).unwrap().lock().entry.as_ref().unwrap());
    disk.read(0, 1024, &mut found).unwrap();
    assert_eq!(disk.store.spill_stats().units, 0);
    disk.store.write_back(usize::MAX);
    assert_eq!(disk.store.spill_stats().units, 1);
}

/// Goal: at the limit of memory, while nothing may be written, units that were fetched and not read make room, since
/// they are on the backing already.
#[test]
fn what_need_not_be_written_makes_room() {
    let (disk, _) = disk::<Faulty>(256, 16 << 20);
    (0..100).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=39])).units, 40);
    let away = |unit| disk.away(&disk.table.get(unit).unwrap().lock());
    disk.store.fetch((0..40).filter_map(away), |_| false);
    disk.store.drain();
    assert_eq!(disk.store.spill_stats().kept, 40);
    disk.enable_writeback_limit(true);
    disk.set_mem_limit(disk.mm_stat().mem_used_total - 1);
    (200..220).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    let spill = disk.store.spill_stats();
    assert!(spill.returned > 0 && spill.written == 40, "{spill:?}");
    (0..100)
        .chain(200..220)
        .for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// Goal: a backing that is full has room for what is wanted there once units in memory give up their places on it.
#[test]
fn what_is_in_memory_gives_up_its_place() {
    let (disk, backing) = disk::<Faulty>(256, 40 * PAGE);
    (0..100).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=39])).units, 40);
    let fetch = |units| {
        let away = |unit| disk.away(&disk.table.get(unit).unwrap().lock());
        disk.store.fetch(std::ops::Range::filter_map(units, away), |_| false);
        disk.store.drain();
    };
    fetch(0..10);
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![40..=49])).units, 10);
    assert_eq!((disk.store.spill_stats().kept, backing.locations()), (0, 40));
    fetch(10..20);
    disk.set_mem_limit(disk.mm_stat().mem_used_total - 1);
    disk.write(0, 200 << 12, &bytes(200, PAGE)).unwrap();
    (0..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// Goal: `WB-2`: never more pages than `writeback_limit` has left are written, each is counted, and what is left out is
/// written once there is more.
#[test]
fn the_limit_of_writes_is_kept() {
    let (disk, _) = disk::<Sealed>(64, 16 << 20);
    for at in 0..40 {
        let unit = if at % 2 == 0 { bytes(at, PAGE) } else { text(at) };
        disk.write(0, at << 12, &unit).unwrap();
    }
    disk.enable_writeback_limit(true);
    let done = disk.write_back(0, &Chosen::Huge);
    assert_eq!((done.units, done.stop), (0, Some(Stop::Limit)));
    let mut allowed = 0;
    for more in [1, 2, 5, 9] {
        disk.set_writeback_limit(more);
        allowed += more;
        let done = disk.write_back(0, &Chosen::Indices(vec![0..=39]));
        assert!(done.units >= more && done.stop == Some(Stop::Limit), "{done:?}");
        let written = disk.bd_stat().bd_writes;
        assert!(written + disk.writeback_limit() <= allowed, "{written} of {allowed}");
        allowed = written;
    }
    disk.enable_writeback_limit(false);
    let done = disk.write_back(0, &Chosen::Indices(vec![0..=39]));
    assert!(done.stop.is_none() && letters(&disk).iter().all(|unit| unit.contains('w')));
    assert_eq!(disk.writeback_stat().asked_units, 40);
    (0..40).filter(|at| at % 2 == 0).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE)));
}

/// Goal: `mem_used_max` of a disk with a backing is right also if nobody asked when it was largest, and counts no
/// tables that came later; after a reset nothing is told of before. Method: 4 MiB of noise are discarded, or written
/// back, before the first look.
#[test]
fn the_most_memory_is_known_although_nobody_looked() {
    for is_discarded in [true, false] {
        let (disk, _) = disk::<Sealed>(4096, 16 << 20);
        (0..1024).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
        if is_discarded {
            disk.discard(0, 0, 1024 << 12).unwrap();
            disk.compact();
        } else {
            assert_eq!(disk.write_back(0, &Chosen::Huge).units, 1024);
        }
        let mm = disk.mm_stat();
        assert!(mm.mem_used_total < 1 << 20, "{mm:?}");
        // The table of units, and what the pool keeps of each: 16 + 28 bytes.
        let most = (4 << 20) + 1024 * 44;
        assert!((4 << 20..most + (64 << 10)).contains(&mm.mem_used_max), "{mm:?}");
        let bd = disk.bd_stat();
        assert_eq!((bd.bd_count, bd.bd_writes > 0), (bd.bd_writes, !is_discarded), "{bd:?}");
        disk.reset();
        assert_eq!(disk.bd_stat(), BdStat::default());
        let mm = disk.mm_stat();
        assert_eq!(mm.mem_used_max, mm.mem_used_total);
    }
}

/// Goal: at its limit of memory a disk writes back instead of refusing; only when the backing is full too it refuses,
/// keeps what it has, and takes more once something was discarded.
#[test]
fn a_full_memory_goes_to_the_backing_first() {
    const LIMIT: u64 = 2 << 20;
    const BACKING: usize = 4 << 20;
    let (disk, _) = disk::<Sealed>(4096, BACKING);
    disk.set_mem_limit(LIMIT);
    let mut stored = 0;
    let error = loop {
        match disk.write(0, stored << 12, &bytes(stored, PAGE)) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
        assert!(disk.mm_stat().mem_used_total <= LIMIT + (64 << 10), "{:?}", disk.mm_stat());
    };
    assert_eq!(error, Error::NoSpace { limit_bytes: LIMIT });
    let both = (LIMIT + BACKING as u64) / PAGE as u64;
    assert!((both * 9 / 10..=both).contains(&stored), "{stored} of {both}");
    let mm = disk.mm_stat();
    assert!((LIMIT / 2..=LIMIT + (64 << 10)).contains(&mm.mem_used_max), "{mm:?}");
    let stat = disk.writeback_stat();
    assert!(stat.room_units > 900 && stat.not_written > 0, "{stat:?}");
    (0..stored).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
    assert!(disk.write(0, stored << 12, &bytes(1, PAGE)).is_err(), "still full");
    disk.discard(0, 0, (stored / 2) << 12).unwrap();
    for at in 0..stored / 4 {
        disk.write(0, at << 12, &bytes(at + 9000, PAGE)).unwrap();
    }
    (0..stored / 4).for_each(|at| assert!(read(&disk, at) == bytes(at + 9000, PAGE)));
    (stored / 2..stored).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE)));
}

/// Goal: `WB-2` holds for what makes room too, also when several clients want some at once.
#[test]
fn the_limit_of_writes_is_kept_under_pressure() {
    for bound in ["limit", "budget"] {
        let budget = if bound == "budget" { "1M" } else { "none" };
        let disk = disk_on(Box::new(Sealed::new(64 << 20)), 0, 4096, budget);
        disk.set_mem_limit(1 << 20);
        if bound == "limit" {
            disk.set_writeback_limit(256);
            disk.enable_writeback_limit(true);
        }
        let disk = &disk;
        let stored = move |first: u64| {
            let write = |at: &u64| disk.write(0, *at << 12, &bytes(*at, PAGE)).is_ok();
            (first..4096).step_by(3).take_while(write).count()
        };
        let stored: usize = std::thread::scope(|scope| {
            let clients = [0, 1, 2].map(|first| scope.spawn(move || stored(first)));
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        let written = disk.bd_stat().bd_writes;
        assert!((240..=256).contains(&written), "{bound}: {written} pages");
        assert!((400..520).contains(&stored), "{bound}: {stored} units");
        assert!(disk.writeback_limit() <= 256 - written || bound == "budget");
    }
}

/// A backing that counts a write when it has ended. The first wait for it meets a client who overwrites units.
#[derive(Debug)]
struct Overtaken {
    backing: Faulty,
    disk: Arc<OnceLock<Weak<Disk>>>,
    waits: AtomicU32,
    written: AtomicU64,
}

impl Backing for Overtaken {
    fn submit(&self, requests: &mut [Request<'_>]) {
        self.backing.submit(requests);
    }
    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.backing.poll(&mut |completion| {
            self.written.fetch_add(1, Relaxed);
            each(completion);
        });
    }
    fn discard(&self, location: Location, length: usize) {
        self.backing.discard(location, length);
    }
    fn usage(&self) -> Usage {
        let written_bytes = self.written.load(Relaxed) * PAGE as u64;
        Usage { written_bytes, ..self.backing.usage() }
    }
    fn pause(&self) {
        if self.waits.fetch_add(1, Relaxed) == 0 {
            let disk = self.disk.get().and_then(Weak::upgrade).unwrap();
            (0..4).for_each(|at| disk.write(1, at << 12, &bytes(100 + at, PAGE)).unwrap());
        } else {
            self.backing.pause();
        }
    }
}

/// Goal: `WB-2` holds for units that are overwritten while they are being written back: their writes were not waited
/// for, nor paid, before the next batch began. Method: a client who overwrites all of the first batch.
#[test]
fn what_was_overwritten_meanwhile_is_paid_first() {
    let place = Arc::new(OnceLock::new());
    let backing = Faulty::new(16 << 20);
    backing.faults().holds.store(true, Relaxed);
    let (waits, written) = (AtomicU32::new(0), AtomicU64::new(0));
    let overtaken = Overtaken { backing, disk: Arc::clone(&place), waits, written };
    let disk = Arc::new(disk_on(Box::new(overtaken), 0, 64, "none"));
    place.set(Arc::downgrade(&disk)).unwrap();
    (0..8).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    disk.enable_writeback_limit(true);
    disk.set_writeback_limit(4);
    let done = disk.write_back(0, &Chosen::Indices(vec![0..=7]));
    assert_eq!((done.units, done.stayed, done.stop), (0, 4, Some(Stop::Limit)));
    disk.store.drain();
    assert_eq!((disk.bd_stat().bd_writes, disk.writeback_limit()), (4, 0));
    (0..4).for_each(|at| assert!(read(&disk, at) == bytes(100 + at, PAGE)));
}

/// Goal: near the limit room is made ahead of the writes, without a request.
#[test]
fn room_is_made_ahead() {
    let (disk, _) = disk::<Faulty>(4096, 64 << 20);
    for at in 0..1000 {
        disk.write(0, at << 12, &bytes(at, PAGE)).unwrap();
    }
    assert!(!disk.write_ahead(), "there is no limit");
    let used = disk.mm_stat().mem_used_total;
    disk.set_mem_limit(2 * used);
    assert!(!disk.write_ahead(), "there is much room");
    disk.set_mem_limit(used);
    while disk.write_ahead() {}
    assert!(disk.mm_stat().mem_used_total <= used - used / 16, "{:?}", disk.mm_stat());
    assert!(disk.writeback_stat().room_units > 50);
}

/// Goal: a backing that fails or is gone costs no unit that is in memory; what it had is reported lost, and nothing is
/// ever handed out that was not written.
#[test]
fn a_failing_backing_keeps_units_in_memory() {
    let (disk, backing) = disk::<Sealed>(256, 16 << 20);
    for at in 0..100 {
        disk.write(0, at << 12, &bytes(at, PAGE)).unwrap();
    }
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=9])).units, 10);
    let faults = backing.faults();
    for is_final in [true, false] {
        faults.is_final.store(is_final, Relaxed);
        faults.fail.store(1000, Relaxed);
        let done = disk.write_back(0, &Chosen::Huge);
        assert_eq!((done.units, done.stop), (0, Some(Stop::Backing)));
        assert!(disk.writeback_stat().not_written >= 32, "{:?}", disk.writeback_stat());
        backing.behave();
    }
    // At the limit it is as if there was no backing.
    faults.refuse.store(usize::MAX, Relaxed);
    disk.set_mem_limit(64 << 10);
    assert!(matches!(disk.write(0, 200 << 12, &bytes(1, PAGE)), Err(Error::NoSpace { .. })));
    disk.set_mem_limit(0);
    backing.behave();
    (0..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
    // Reads that fail for good.
    faults.is_final.store(true, Relaxed);
    faults.fail.store(1000, Relaxed);
    let mut found = vec![0; PAGE];
    let lost = disk.read(0, 5 << 12, &mut found).unwrap_err();
    let unreadable = |expected| match lost {
        Error::Lost { unit: 5, error: store::Error::Unreadable { is_transient, .. } } => {
            is_transient == expected
        }
        _ => false,
    };
    assert!(unreadable(false), "{lost}");
    assert!(disk.write(0, (5 << 12) + 512, &[1; 512]).is_err(), "a part of it");
    backing.behave();
    assert!(disk.read(0, 5 << 12, &mut found).is_err(), "for good");
    disk.write(0, 5 << 12, &text(5)).unwrap();
    assert!(read(&disk, 5) == text(5), "until it is overwritten");
    // Other bytes than were written.
    faults.damage.store(1, Relaxed);
    assert!(disk.read(0, 6 << 12, &mut found).is_err(), "sealed");
    backing.behave();
    (10..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// Goal: `WB-4`: clients who find no room while all writes fail do not send units again each time, and writeback goes
/// on after a rest, or as soon as something was written. Each failed frame of an area costs its slots: clients
/// used up the area. Method: the writes that have failed are counted.
#[test]
fn writes_that_failed_are_not_repeated_at_once() {
    let (disk, backing) = disk::<Faulty>(1024, 16 << 20);
    (0..100).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    disk.set_mem_limit(disk.mm_stat().mem_used_total);
    backing.faults().fail.store(usize::MAX, Relaxed);
    let tries = || {
        let before = disk.store.spill_stats().failed;
        for at in 300..330 {
            let full = disk.write(0, at << 12, &bytes(at, PAGE));
            assert!(matches!(full, Err(Error::NoSpace { .. })), "{full:?}");
            assert!(!disk.write_ahead());
        }
        disk.store.spill_stats().failed - before
    };
    assert_eq!(tries(), 64, "one batch");
    disk.set_now(1);
    assert_eq!(tries(), 64, "one more");
    backing.behave();
    // What somebody asks for is tried at any time.
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=9])).units, 10);
    disk.set_mem_limit(disk.mm_stat().mem_used_total);
    (200..230).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    backing.faults().fail.store(usize::MAX, Relaxed);
    disk.set_mem_limit(disk.mm_stat().mem_used_total);
    assert!((1..=64).contains(&tries()), "some of a batch may be there already");
    backing.behave();
    assert_eq!(tries(), 0, "it rests");
    disk.set_now(2);
    (300..330).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    (0..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// Goal: a unit that the backing could not read is good again once it is overwritten, also with what it had been, while
/// the backing still fails. The write succeeded, and left the unit where it cannot be read.
#[test]
fn an_unread_unit_can_be_written_again() {
    let (disk, backing) = disk::<Faulty>(16, 16 << 20);
    for at in 0..8 {
        disk.write(0, at << 12, &bytes(at, PAGE)).unwrap();
    }
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=7])).units, 8);
    backing.faults().fail.store(1000, Relaxed);
    let lost = disk.read(0, 5 << 12, &mut [0; PAGE]).unwrap_err();
    assert!(lost.is_transient(), "{lost}");
    disk.write(0, 5 << 12, &bytes(5, PAGE)).unwrap();
    assert!(read(&disk, 5) == bytes(5, PAGE));
    // One that is there is not written again.
    disk.write(0, 6 << 12, &bytes(6, PAGE)).unwrap();
    assert_eq!(letters(&disk)[5..7], ["..h...", ".wh..."]);
    backing.behave();
    (0..8).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// A backing that accepts everything and ends nothing.
#[derive(Debug)]
struct Stuck;

impl Backing for Stuck {
    fn submit(&self, _requests: &mut [Request<'_>]) {}
    fn poll(&self, _each: &mut dyn FnMut(Completion<'_>)) {}
    fn discard(&self, _location: Location, _length: usize) {}
    fn pause(&self) {}
}

/// Goal: `WB-3`.
#[test]
fn a_stuck_backing_hangs_nobody() {
    let disk = disk_on(Box::new(Stuck), 0, 256, "none");
    for at in 0..100 {
        disk.write(0, at << 12, &bytes(at, PAGE)).unwrap();
    }
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=40])).stop, Some(Stop::Backing));
    disk.set_mem_limit(64 << 10);
    assert!(matches!(disk.write(0, 200 << 12, &bytes(1, PAGE)), Err(Error::NoSpace { .. })));
    assert!(!disk.write_ahead());
    (0..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
    disk.halt();
    assert_eq!(disk.write_back(0, &Chosen::Huge).stop, Some(Stop::Halted));
}

/// Goal: what was asked for never counts as written to make room, not even until its batch has ended: the figure went
/// back then, and kept units that were overwritten at that moment. Method: looks between the steps of a batch.
#[test]
fn what_was_asked_for_makes_no_room() {
    let (disk, backing) = disk::<Faulty>(16, 16 << 20);
    (0..12).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    let ticket = |unit| {
        let slot = disk.table.get(unit).unwrap().lock();
        disk.store.ticket(slot.entry.as_ref().unwrap())
    };
    let asked: Vec<_> = (0..4).map(ticket).collect();
    backing.faults().fail.store(1, Relaxed);
    disk.store.write_back_chosen(&asked);
    disk.store.write_back_chosen(&asked);
    disk.store.drain();
    assert_eq!((disk.store.spill_stats().written, disk.writeback_stat().room_units), (4, 0));
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![2..=5])).units, 2);
    assert_eq!(disk.writeback_stat().room_units, 0);
    // One that was chosen, and not written, may be written to make room.
    backing.faults().fail.store(1, Relaxed);
    disk.store.write_back_chosen(&[ticket(6)]);
    disk.store.drain();
    disk.store.write_back(usize::MAX);
    disk.store.drain();
    assert_eq!((disk.store.spill_stats().written, disk.writeback_stat().room_units), (12, 6));
    disk.audit();
}

/// Goal: a unit that was compressed to just the length of a page is no incompressible one, wherever it is. On a disk
/// with pages apart it hid one of those in memory while it was away.
#[test]
fn a_unit_as_long_as_a_page_is_not_huge() {
    let disk = disk_on(Box::new(Faulty::new(16 << 20)), 4, 4, "none");
    let disk = disk.with_pages_apart(Algorithm::Lz4.into()).unwrap();
    let unit = disk.unit().bytes();
    disk.write(0, unit as u64, &bytes(1, unit)).unwrap();
    let is_page = |noise: &usize| {
        let mut contents = bytes(2, *noise);
        contents.resize(unit, 7);
        disk.write(0, 0, &contents).unwrap();
        let slot = disk.table.get(0).unwrap().lock();
        disk.store.object_bytes(slot.entry.as_ref().unwrap()) == PAGE
    };
    (3500..PAGE).rev().find(is_page).expect("one of them shrinks to this");
    assert_eq!(disk.mm_stat().huge_pages, 1);
    for (unit, huge_pages) in [(0, 1), (1, 0)] {
        assert_eq!(disk.write_back(0, &Chosen::Indices(vec![unit..=unit])).units, 1);
        assert_eq!(disk.mm_stat().huge_pages, huge_pages);
        disk.audit();
    }
    (0..2).for_each(|at| disk.read(0, at * unit as u64, &mut vec![0; unit]).unwrap());
    disk.discard(0, 0, 2 * unit as u64).unwrap();
    disk.audit();
}

/// A backing that ends writes, and no read.
#[derive(Debug)]
struct Mute(Faulty, Arc<AtomicU32>);

impl Backing for Mute {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let is_write =
            |request: &&mut Request<'_>| matches!(request.operation, Operation::Write(_));
        let writes = requests.iter_mut().filter(is_write);
        writes.for_each(|write| self.0.submit(std::slice::from_mut(write)));
    }
    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.0.poll(each);
    }
    fn discard(&self, location: Location, length: usize) {
        self.0.discard(location, length);
    }
    fn pause(&self) {
        self.1.fetch_add(1, Relaxed);
    }
}

/// Goal: `WB-3` for reads that the backing has accepted: who reads such a unit, writes a part of it or saves the disk
/// waited for ever. What is written whole is good again, and nobody waits for others.
#[test]
fn a_read_that_never_ends_hangs_nobody() {
    let pauses = Arc::new(AtomicU32::new(0));
    let mute = Mute(Faulty::new(16 << 20), Arc::clone(&pauses));
    let disk = disk_on(Box::new(mute), 0, 16, "none");
    (0..8).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![2..=4])).units, 3);
    for _ in 0..2 {
        let lost = disk.read(0, 2 << 12, &mut [0; 512]).unwrap_err();
        assert!(lost.is_transient() && matches!(lost, Error::Lost { unit: 2, .. }), "{lost}");
        assert!(disk.write(0, 3 << 12, &[1; 512]).is_err());
    }
    let unread = disk.save(0, &[], &mut Vec::new()).unwrap_err();
    assert!(matches!(unread, SaveError::Unread { unit: 2, .. }), "{unread}");
    // The last save has all units that are here, and does not wait for each of the others.
    pauses.store(0, Relaxed);
    let saved = disk.save_as(0, &[], Unread::IsLost, &mut Vec::new()).unwrap();
    assert_eq!((saved.units, saved.lost), (8, 3));
    assert!(pauses.load(Relaxed) <= store::STUCK_PAUSES, "{pauses:?}");
    (2..5).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    (0..8).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// A backing that ends nothing as long as it holds, however often somebody pauses.
#[derive(Debug)]
struct Holding(Faulty);

impl Backing for Holding {
    fn submit(&self, requests: &mut [Request<'_>]) {
        self.0.submit(requests);
    }
    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.0.poll(each);
    }
    fn discard(&self, location: Location, length: usize) {
        self.0.discard(location, length);
    }
    fn pause(&self) {}
}

/// A regression: a unit that came after its reader had given up stayed in memory, wanted for ever: each time that the
/// backing stood still took a part of `mem_limit` for good. Goal: it makes room like any other that was fetched.
/// Method: both ways to wait for a unit, and reads that end only after that.
#[test]
fn a_unit_whose_reader_has_given_up_leaves_memory() {
    let backing = Faulty::new(16 << 20);
    let disk = disk_on(Box::new(Holding(backing.clone())), 0, 4, "none");
    (0..2).for_each(|at| disk.write(0, at << 12, &bytes(at, PAGE)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Huge).units, 2);
    backing.faults().holds.store(true, Relaxed);
    disk.read(0, 0, &mut vec![0; PAGE]).unwrap_err();
    let ticket = disk.away(&disk.table.get(1).unwrap().lock()).unwrap();
    assert!(!disk.fetch(ticket));
    backing.faults().holds.store(false, Relaxed);
    disk.store.drain();
    assert_eq!(disk.store.spill_stats().kept, 2, "both have come");
    assert_eq!(disk.store.return_kept(2).written, 2);
    (0..2).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
}

/// Goal: what was not used for long is written back by itself, within the budget, and goes on when there is more.
#[test]
fn old_units_are_written_back_within_the_budget() {
    let backing = Sealed::new(64 << 20);
    let disk = disk_on(Box::new(backing), 0, 1000, "1M/day");
    for at in 0..600 {
        disk.write(0, at << 12, &bytes(at, PAGE)).unwrap();
    }
    disk.set_now(1000);
    (0..100).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE)));
    let round = |age_s| {
        let (mut units, mut stop) = (0, None);
        loop {
            let turn = disk.write_back_old(age_s);
            units += turn.done.units;
            stop = stop.or(turn.done.stop);
            if turn.is_round {
                return (units, stop);
            }
        }
    };
    assert_eq!(round(1001), (0, None), "nothing is so old");
    assert_eq!(round(1000), (256, Some(Stop::Limit)), "1 MiB");
    assert_eq!(round(1000), (0, Some(Stop::Limit)));
    assert_eq!(disk.writeback_stat().budget_used_up, 1);
    assert_eq!(
        disk.write_back(0, &Chosen::Indices(vec![0..=9])).units,
        10,
        "who asks is not bound"
    );
    disk.set_now(1000 + 2 * 86400);
    let (units, stop) = round(86400 * 2);
    assert_eq!((units, stop), (246, Some(Stop::Limit)), "a day's, but for what was asked for");
    disk.set_now(1000 + 4 * 86400);
    assert_eq!(round(86400), (88, None), "the rest");
    assert!(letters(&disk).iter().all(|unit| unit == ".wh..."));
    assert_eq!(disk.writeback_stat().old_units, 590);
    (0..600).for_each(|at| assert!(read(&disk, at) == bytes(at, PAGE), "unit {at}"));
    disk.reset();
    let stat = disk.writeback_stat();
    assert_eq!((stat.old_units, stat.budget_used_up), (0, 0), "{stat:?}");
}

/// Goal: clients, the policy, and who asks do not disturb each other, with a limit that memory is always at, and a
/// backing that fails now and then. Method: three clients with units of their own beside two writers-back.
#[test]
fn clients_and_writeback_agree() {
    threads::<Faulty>(0);
    threads::<Sealed>(0);
    threads::<Sealed>(2);
}

const CLIENTS: u64 = 3;
const UNITS: u64 = 60;

/// One client's requests. Returns what its units have then.
fn client(disk: &Disk, number: u64, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed.wrapping_mul(8) + number);
    let unit_bytes = disk.unit().bytes();
    let mut model = vec![vec![0; unit_bytes]; 60];
    let mut found = vec![0; unit_bytes];
    for turn in 0..3000_u64 {
        let nth = random.below(60);
        let at = (number * UNITS + nth as u64) * unit_bytes as u64;
        let done = match random.below(8) {
            0..=2 => {
                let new = random.bytes(unit_bytes);
                disk.write(0, at, &new).map(|()| model[nth] = new)
            }
            3 => {
                let from = random.below(unit_bytes / 512) * 512;
                let part = [u8::try_from(turn % 251).unwrap(); 512];
                let done = disk.write(1, at + from as u64, &part);
                done.map(|()| model[nth][from..from + 512].copy_from_slice(&part))
            }
            4 => disk.discard(0, at, unit_bytes as u64).map(|()| model[nth].fill(0)),
            _ => disk.read(0, at, &mut found).map(|()| {
                assert!(found == model[nth], "seed {seed}, client {number}, unit {nth}");
            }),
        };
        let is_for_now = match done {
            Err(Error::Lost { error, .. }) => error.is_transient(),
            other => matches!(other, Ok(()) | Err(Error::NoSpace { .. })),
        };
        assert!(is_for_now, "{done:?}");
    }
    model
}

fn threads<B: Breakable>(order: u8) {
    let (seed, unit_bytes) = (seed(), PAGE << order);
    let backing = B::new(4 << 20);
    let disk = disk_on(Box::new(backing.clone()), order, CLIENTS * UNITS, "none");
    disk.set_mem_limit((512 << 10) << order);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (disk, ends, faults) = (&disk, &ends, backing.faults());
        let clients: Vec<_> =
            (0..CLIENTS).map(|number| scope.spawn(move || client(disk, number, seed))).collect();
        let policy = scope.spawn(move || {
            while !ends.load(Relaxed) {
                disk.write_ahead();
                disk.write_back_old(0);
            }
        });
        let asks = scope.spawn(move || {
            let mut random = Random::new(seed);
            while !ends.load(Relaxed) {
                let first = random.below_u64(CLIENTS * UNITS);
                disk.write_back(0, &Chosen::Indices(vec![first..=first + 20]));
                disk.write_back(0, &Chosen::Huge);
                faults.fail.store(random.below(3), Relaxed);
                faults.refuse.store(random.below(3), Relaxed);
            }
        });
        let models: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        ends.store(true, Relaxed);
        policy.join().unwrap();
        asks.join().unwrap();
        backing.behave();
        let mut found = vec![0; unit_bytes];
        for (at, unit) in models.iter().flatten().enumerate() {
            disk.read(0, (at * unit_bytes) as u64, &mut found).unwrap();
            assert!(found == *unit, "seed {seed}, unit {at}");
        }
    });
    let stat = disk.writeback_stat();
    assert!(stat.asked_units > 0 && stat.old_units + stat.room_units > 0, "{stat:?}");
    disk.reset();
    disk.store.drain();
    assert_eq!((backing.locations(), disk.bd_stat().bd_count), (0, 0));
    assert_eq!(disk.store.pool_stats().objects, 0);
}
