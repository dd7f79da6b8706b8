//! Goal: the device is a disk. What scripts cannot say is here: threads, damage, and each figure.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Barrier};

use super::script::play_and_count;
use super::table::UNITS_MAX;
use super::{Error, IoStat, Recompression, What, Zram};
use crate::store::script::odd::Odd;
use crate::store::{self, Key};
use crate::testing::{self, Random};
use crate::zcomp::{Algorithm, Zcomp};
use crate::zsmalloc::world::{World, bytes, unit};

const UNIT: usize = 64 << 10;
const SECTOR: usize = 512;

pub(super) fn zram(order: u8, disk_bytes: u64, algorithms: &[Algorithm]) -> Zram<Arc<World>> {
    zram_in(&World::new(), order, disk_bytes, algorithms)
}

/// A disk whose pages are those of `world`.
pub(super) fn zram_in(
    world: &Arc<World>,
    order: u8,
    disk_bytes: u64,
    algorithms: &[Algorithm],
) -> Zram<Arc<World>> {
    let codec = |algorithm: &Algorithm| Zcomp::new((*algorithm).into(), unit(order), 2).unwrap();
    let secret = bytes(7, Key::BYTES).try_into().unwrap();
    let codecs = algorithms.iter().map(codec).collect();
    Zram::new(codecs, Arc::clone(world), Key::new(secret), disk_bytes, 2).unwrap()
}

/// Contents that shrink to a few hundred bytes with any algorithm.
fn text(tag: u64, length: usize) -> Vec<u8> {
    bytes(tag, 256).repeat(length / 256)
}

/// Letters, which shrink to a half or so. LZ4 finds no match in these; zstd has an entropy coder.
pub(super) fn letters(tag: u64, length: usize) -> Vec<u8> {
    bytes(tag, length).iter().map(|byte| b'a' + byte % 16).collect()
}

/// The flags of each unit, as in `block_state`.
fn flags(disk: &Zram<Arc<World>>) -> Vec<String> {
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    state.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect()
}

/// Goal: the device never disagrees with plain bytes. Method: scripts of seeded random bytes, see `script`.
#[test]
fn a_device_agrees_with_plain_bytes() {
    let seed = testing::seed();
    let (mut units_split, mut units_joined) = (0, 0);
    for turn in 0..100 {
        let mut random = Random::new(seed + turn);
        let length = 200 + random.below(1500);
        let script = random.bytes(length);
        let played = std::panic::catch_unwind(|| play_and_count(&script));
        assert!(played.is_ok(), "seed {}", seed + turn);
        let [split, joined] = played.unwrap();
        (units_split, units_joined) = (units_split + split, units_joined + joined);
    }
    println!("{units_split} units were split, {units_joined} joined");
    assert!(units_split > 0 && units_joined > 0, "{units_split} {units_joined}");
}

/// Goal: a unit of which the last algorithm failed is tried again, and one that it did not shrink is not. Method: a
/// codec that fails once, and shrinks only what has zeros at its end.
#[test]
fn a_codec_that_failed_is_tried_again() {
    let lz4 = Zcomp::new(Algorithm::Lz4.into(), unit(0), 2).unwrap();
    let odd = Odd::default();
    let last = Zcomp::with_backend(&odd, unit(0), 2).unwrap();
    let secret = bytes(7, Key::BYTES).try_into().unwrap();
    let disk = Zram::new(vec![lz4, last], World::new(), Key::new(secret), 8192, 2).unwrap();
    // Noise, which shrinks less with lz4 than zeros at its end.
    let mut contents = bytes(1, 4096);
    contents[3000..].fill(0);
    disk.write(0, 0, &contents).unwrap();
    disk.write(0, 4096, &bytes(2, 4096)).unwrap();
    odd.0.store(1, Relaxed);
    for (tried, shrank) in [(2, 0), (1, 1), (0, 0)] {
        let done = disk.recompress(0, Recompression::default()).unwrap();
        assert_eq!((done.tried, done.shrank), (tried, shrank));
    }
    let mut found = vec![0; 4096];
    disk.read(0, 0, &mut found).unwrap();
    assert!(found == contents);
}

/// Goal: writers of parts of one unit lose nothing of each other. Method: each of four threads writes its own sectors
/// of all units, several times, and reads them back; two share a CPU, and so a scratch buffer.
#[test]
fn writers_of_one_unit_lose_nothing() {
    const THREADS: usize = 4;
    let disk = zram(4, 8 * UNIT as u64, &[Algorithm::Lz4]);
    let last = |thread: usize, at: usize| bytes((thread * 1000 + at) as u64, SECTOR);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..3_u64 {
                    for at in (thread..8 * UNIT / SECTOR).step_by(7 * THREADS) {
                        let (from, mut found) = ((at * SECTOR) as u64, vec![0; SECTOR]);
                        let contents =
                            if round == 2 { last(thread, at) } else { bytes(round + 1, SECTOR) };
                        disk.write(thread % 2, from, &contents).unwrap();
                        disk.read(thread % 2, from, &mut found).unwrap();
                        assert!(found == contents, "thread {thread}, sector {at}");
                    }
                }
            });
        }
    });
    for thread in 0..THREADS {
        for at in (thread..8 * UNIT / SECTOR).step_by(7 * THREADS) {
            let mut found = vec![0; SECTOR];
            disk.read(0, (at * SECTOR) as u64, &mut found).unwrap();
            assert!(found == last(thread, at), "thread {thread}, sector {at}");
        }
    }
}

/// Goal: writers and readers of ranges that overlap neither wait for ever nor mix two writes in one unit. Method: four
/// threads write and read runs of whole units at random, each unit of one write with contents of its own.
#[test]
fn runs_of_units_that_overlap_stay_whole() {
    const UNITS: usize = 24;
    let disk = zram(0, UNITS as u64 * 4096, &[Algorithm::Lz4]);
    let seed = testing::seed();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let disk = &disk;
            scope.spawn(move || {
                let mut random = Random::new(seed + thread as u64);
                for turn in 0..500 {
                    let first = random.below(UNITS);
                    let units = 1 + random.below(UNITS - first);
                    let at = (first * 4096) as u64;
                    let tag = (thread * 500 + turn) as u64;
                    disk.write(thread % 2, at, &text(tag, units * 4096)).unwrap();
                    let mut found = vec![0; units * 4096];
                    disk.read(thread % 2, at, &mut found).unwrap();
                    for unit in found.chunks_exact(4096) {
                        assert!(unit.chunks_exact(256).all(|part| part == &unit[..256]));
                    }
                }
            });
        }
    });
}

/// Goal: a run of units that meets the end of the disk, as it is when its slots are taken, ends there.
#[test]
fn a_run_of_units_ends_with_the_disk() {
    let disk = zram(0, 8 << 12, &[Algorithm::Lz4]);
    disk.resize(6 << 12).unwrap();
    assert_eq!(disk.write_together(0, 4, &text(1, 4 << 12)), Ok(2 << 12));
    assert!(matches!(disk.write_together(0, 6, &text(1, 2 << 12)), Err(Error::Invalid { .. })));
    disk.resize(8 << 12).unwrap();
    let mut found = vec![1; 4 << 12];
    disk.read(0, 4 << 12, &mut found).unwrap();
    assert!(found == [text(1, 2 << 12), vec![0; 2 << 12]].concat());
}

/// Goal: of a run of units that meets a refusal, the refused ones are stored from what the pool gives back. Method: the
/// source refuses one request after the other.
#[test]
fn a_run_of_units_is_tried_again() {
    for refused in 0..8 {
        let world = World::new();
        let disk = zram_in(&world, 0, 1 << 20, &[Algorithm::Lz4]);
        world.refuse(refused..refused + 1);
        let contents: Vec<u8> = (0..16)
            .flat_map(|at| if at % 2 == 0 { bytes(at, 4096) } else { text(at, 4096) })
            .collect();
        assert_eq!(disk.write(0, 0, &contents), Ok(()), "request {refused}");
        let mut found = vec![1; contents.len()];
        disk.read(0, 0, &mut found).unwrap();
        assert!(found == contents);
    }
}

/// Goal: while a disk grows and shrinks, writers get all or an error, and what they wrote stays.
#[test]
fn a_disk_that_shrinks_cuts_off_nothing() {
    let disk = zram(0, 64 << 12, &[Algorithm::Lz4]);
    let wrote = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut wrote = Vec::new();
            for turn in 0..2000_u64 {
                let at = turn % 64;
                match disk.write(0, at << 12, &text(at, 4096)) {
                    Ok(()) => wrote.push(at),
                    Err(error) => assert!(matches!(error, Error::Invalid { .. }), "{error}"),
                }
            }
            wrote
        });
        while !writer.is_finished() {
            let shrunk = disk.resize(8 << 12);
            assert!(matches!(shrunk, Ok(()) | Err(Error::Busy { .. })));
            disk.resize(64 << 12).unwrap();
        }
        writer.join().unwrap()
    });
    let mut found = vec![0; 4096];
    for at in wrote {
        disk.read(1, at << 12, &mut found).unwrap();
        assert!(found == text(at, 4096), "unit {at}");
    }
}

/// Goal: a change of the size that is refused does not undo another one.
#[test]
fn a_refused_change_of_the_size_undoes_no_other() {
    let disk = zram(0, 64 << 12, &[Algorithm::Lz4]);
    let begin = Barrier::new(3);
    for round in 0..500 {
        let [shrunk, grown] = std::thread::scope(|scope| {
            let resize = |units: u64| {
                begin.wait();
                disk.resize(units << 12)
            };
            let changes = [1, 128].map(|units| scope.spawn(move || resize(units)));
            begin.wait();
            disk.write(0, 3 << 12, &text(1, 4096)).ok();
            changes.map(|change| change.join().unwrap())
        });
        grown.expect("a disk can always grow");
        if shrunk.is_err() {
            assert_eq!(disk.disk_bytes(), 128 << 12, "round {round}");
        }
        disk.resize(128 << 12).unwrap();
        disk.discard(0, 3 << 12, 4096).unwrap();
        disk.resize(64 << 12).unwrap();
    }
}

/// Changes a bit of the object of a unit.
fn damage(disk: &Zram<Arc<World>>, unit: u64) {
    let object = {
        let slot = disk.table.get(unit).unwrap().lock();
        disk.store.object(slot.entry.as_ref().unwrap()).unwrap()
    };
    flip(object.start + 100);
}

/// Changes a bit of an object.
fn flip(at: usize) {
    let damaged = at as *mut u8;
    // SAFETY: the object's memory is the pool's, on the heap, and no other thread uses the pool.
    unsafe { *damaged ^= 1 };
}

/// Goal: a unit that is lost keeps nobody from recompressing the others, and what was done for them is counted.
#[test]
fn a_damaged_unit_is_not_in_the_way() {
    let lost = |error| matches!(error, Some(Error::Lost { unit: 1, .. }));
    let by_itself = |disk: &Zram<Arc<World>>| {
        let turn = disk.recompress_old(0, 0, 9);
        assert!(turn.is_round && lost(turn.error), "{turn:?}");
        assert_eq!((turn.done.tried, turn.done.shrank), (4, 3));
    };
    let asked = |disk: &Zram<Arc<World>>| {
        for _ in 0..2 {
            assert!(lost(disk.recompress(0, Recompression::default()).err()));
        }
    };
    for recompress in [&by_itself as &dyn Fn(&Zram<Arc<World>>), &asked] {
        let disk = zram(0, 4 << 12, &[Algorithm::Lz4, Algorithm::Zstd]);
        (0..4).for_each(|unit| disk.write(0, unit << 12, &letters(unit, 4096)).unwrap());
        damage(&disk, 1);
        let before = disk.mm_stat().compr_data_size;
        recompress(&disk);
        let after = disk.mm_stat().compr_data_size;
        assert!(after < before - before / 8, "{before} {after}");
        let mut unit = vec![0; 4096];
        for at in [0, 2, 3] {
            disk.read(0, at << 12, &mut unit).unwrap();
            assert!(unit == letters(at, 4096));
        }
        assert!(disk.read(0, 1 << 12, &mut unit).is_err());
    }
}

/// Goal: a unit that was damaged in memory is never handed out, and is good again once it is overwritten. A part of it
/// that is written fails and changes nothing.
#[test]
fn a_damaged_unit_is_not_handed_out() {
    let disk = zram(4, 4 * UNIT as u64, &[Algorithm::Lz4]);
    disk.write(0, 0, &bytes(1, 4 * UNIT)).unwrap();
    damage(&disk, 1);
    let (mut unit, mut sector) = (vec![0; UNIT], vec![0; 512]);
    let at = UNIT as u64;
    for _ in 0..2 {
        let lost = disk.read(0, at, &mut unit).unwrap_err();
        assert!(
            matches!(lost, Error::Lost { unit: 1, error: store::Error::Corrupt { .. } }),
            "{lost}"
        );
        assert!(disk.read(1, at + 512, &mut sector).is_err());
        assert!(disk.write(0, at, &sector).is_err());
    }
    assert_eq!((disk.io_stat().failed_reads, disk.io_stat().failed_writes), (4, 2));
    disk.read(0, 0, &mut unit).unwrap();
    assert!(unit == bytes(1, 4 * UNIT)[..UNIT]);
    disk.write(0, at, &text(9, UNIT)).unwrap();
    disk.read(0, at, &mut unit).unwrap();
    assert!(unit == text(9, UNIT));
}

/// Goal: a unit that was damaged in memory is good again once it is overwritten, also with what it had been. The write
/// succeeded, and stored nothing: there was a copy with this checksum. Method: a unit that shrinks, one that does not,
/// and a page that is apart.
#[test]
fn a_damaged_unit_can_be_written_again() {
    let disk = zram(4, 4 * UNIT as u64, &[Algorithm::Lz4]);
    let disk = disk.with_pages_apart(Algorithm::Lz4.into()).unwrap();
    let (mut found, mut page) = (vec![0; UNIT], vec![0; 4096]);
    for (unit, contents) in [(0, text(1, UNIT)), (1, bytes(2, UNIT))] {
        let at = unit * UNIT as u64;
        disk.write(0, at, &contents).unwrap();
        damage(&disk, unit);
        disk.read(0, at, &mut found).unwrap_err();
        disk.write(0, at, &contents).unwrap();
        disk.read(0, at, &mut found).unwrap();
        assert!(found == contents, "unit {unit}");
    }
    disk.write(0, 4096, &bytes(3, 4096)).unwrap();
    disk.apart.as_ref().unwrap().each(|pages| {
        let page = pages.iter().flatten().next().unwrap();
        flip(disk.store.object(page).unwrap().start + 100);
    });
    disk.read(0, 4096, &mut page).unwrap_err();
    disk.write(0, 4096, &bytes(3, 4096)).unwrap();
    disk.read(0, 4096, &mut page).unwrap();
    assert!(page == bytes(3, 4096));
    disk.audit();
}

/// Goal: a discard is advice and costs no room: where the rest of a unit cannot be stored anew, that part stays, and
/// the whole units of the range go all the same. Zeros that are asked for are zeros, or the request fails.
#[test]
fn a_discard_needs_no_room() {
    let disk = zram(4, 1 << 20, &[Algorithm::Lz4]);
    let unit = disk.unit().bytes();
    let contents = bytes(1, 4 * unit);
    disk.write(0, 0, &contents).unwrap();
    disk.set_mem_limit(disk.mm_stat().mem_used_total);
    let (at, length) = ((unit / 2) as u64, 2 * unit as u64);
    let read = || {
        let mut found = vec![0; 4 * unit];
        disk.read(0, 0, &mut found).unwrap();
        found
    };
    let refused = disk.write_zeroes(0, at, 512).unwrap_err();
    assert!(matches!(refused, Error::NoSpace { .. }), "{refused}");
    assert!(read() == contents);
    // Half a unit, a unit, and half a unit, each of which could be stored once the one between them has gone.
    disk.discard(0, at, length).unwrap();
    let mut expected = contents.clone();
    expected[unit..2 * unit].fill(0);
    let found = read();
    assert!(found[..2 * unit] == expected[..2 * unit], "the first half stays");
    assert!(found[3 * unit..] == expected[3 * unit..]);
    disk.set_mem_limit(0);
    disk.discard(0, at, length).unwrap();
    expected[unit / 2..unit * 5 / 2].fill(0);
    assert!(read() == expected, "there is room");
    disk.write_zeroes(0, 0, 512).unwrap();
    expected[..512].fill(0);
    assert!(read() == expected);
    // Two units each time, and no whole page at the end.
    let pages = 4 * disk.unit().pages() as u64;
    assert_eq!((disk.io_stat().notify_free, disk.io_stat().failed_writes), (pages, 1));
}

/// Goal: a full device refuses what is new, keeps what it has, and takes new contents once there is room.
#[test]
fn a_full_device_refuses_and_keeps() {
    let disk = zram(0, 64 << 20, &[Algorithm::Lz4]);
    let limit = 2 << 20;
    disk.set_mem_limit(limit);
    let mut stored = 0;
    let error = loop {
        match disk.write(0, stored << 12, &bytes(stored, 4096)) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, Error::NoSpace { limit_bytes: limit });
    assert!(
        stored > 300 && disk.mm_stat().mem_used_max <= limit + (64 << 10),
        "{:?}",
        disk.mm_stat()
    );
    let mut found = vec![0; 4096];
    for at in 0..stored {
        disk.read(0, at << 12, &mut found).unwrap();
        assert!(found == bytes(at, 4096), "unit {at}");
    }
    assert!(disk.write(0, 0, &bytes(9999, 4096)).is_err(), "a second copy has no room");
    disk.write(0, 4096, &bytes(1, 4096)).unwrap();
    let far = disk.write(0, 48 << 20, &bytes(1, 4096)).unwrap_err();
    assert_eq!(far, Error::NoSpace { limit_bytes: limit }, "and nor has the table");
    assert!(disk.table.get(48 << 8).is_none(), "a refused write leaves nothing");
    disk.write(0, 0, &[0; 4096]).unwrap();
    disk.read(0, 0, &mut found).unwrap();
    assert!(found == [0; 4096], "zeros need none");
    disk.discard(0, 16 << 12, 32 << 12).unwrap();
    disk.write(0, 0, &bytes(9999, 4096)).unwrap();
    disk.set_mem_limit(0);
    disk.write(0, stored << 12, &bytes(1, 4096)).unwrap();
}

/// Goal: the figures are the kernel's. Method: units whose form is known.
#[test]
fn figures_say_what_is_stored() {
    let disk = zram(0, 1 << 20, &[Algorithm::Lz4, Algorithm::Zstd]);
    disk.set_now(100);
    disk.write(0, 0, &bytes(1, 4096)).unwrap();
    disk.write(0, 4096, &text(2, 4096)).unwrap();
    disk.write(0, 8192, &[0x11; 4096]).unwrap();
    disk.write(0, 12288, &[0; 4096]).unwrap();
    let stat = disk.mm_stat();
    assert_eq!((stat.orig_data_size, stat.same_pages, stat.huge_pages), (4 * 4096, 2, 1));
    assert!(stat.compr_data_size > 4096 && stat.compr_data_size < 4096 + 1000);
    disk.write(0, 0, &text(3, 4096)).unwrap();
    let stat = disk.mm_stat();
    assert_eq!((stat.huge_pages, stat.huge_pages_since), (0, 1));
    assert_eq!(stat.to_string().split_whitespace().count(), 9);
    assert!(
        disk.write(0, 100, &[0; 512]).is_err() && disk.read(0, 1 << 20, &mut [0; 512]).is_err()
    );
    disk.discard(0, 12288, 4096).unwrap();
    assert_eq!(
        disk.io_stat().to_string().split_whitespace().collect::<Vec<_>>(),
        ["0", "0", "2", "1"]
    );
    assert_eq!(disk.mm_stat().same_pages, 1);
    let mut state = String::new();
    disk.mark_idle(None);
    disk.set_now(200);
    disk.read(0, 4096, &mut [0; 512]).unwrap();
    disk.block_state(&mut state).unwrap();
    let lines: Vec<Vec<&str>> =
        state.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = [
        ["0", "100.000000", "...i.."],
        ["1", "200.000000", "......"],
        ["2", "100.000000", "s....."],
    ];
    assert_eq!(lines, expected);
    let (used, max) = (disk.mm_stat().mem_used_total, disk.mm_stat().mem_used_max);
    disk.discard(0, 0, disk.disk_bytes()).unwrap();
    disk.compact();
    assert!(disk.mm_stat().mem_used_total < used && disk.mm_stat().mem_used_max == max);
    disk.reset_mem_used_max();
    assert_eq!(disk.mm_stat().mem_used_max, disk.mm_stat().mem_used_total);
}

/// Goal: after a reset the disk reads as zeros, and all that is counted begins anew.
#[test]
fn a_reset_begins_everything_anew() {
    let disk = zram(0, 64 << 20, &[Algorithm::Lz4]);
    disk.write(0, 0, &bytes(1, 8 << 12)).unwrap();
    disk.discard(0, 0, 4 << 12).unwrap();
    assert!(disk.read(0, 64 << 20, &mut [0; 512]).is_err());
    let before = (disk.mm_stat(), disk.io_stat());
    assert!(before.0.orig_data_size > 0 && before.1.notify_free == 4 && before.1.invalid_io == 1);
    disk.reset();
    let mm = disk.mm_stat();
    let zeros = mm.columns().iter().filter(|column| **column == 0).count();
    assert_eq!(zeros, 7, "all but what the tables take: {mm:?}");
    assert_eq!((mm.mem_used_max, disk.io_stat()), (mm.mem_used_total, IoStat::default()));
    let mut found = [1; 512];
    disk.read(0, 0, &mut found).unwrap();
    assert_eq!(found, [0; 512]);
}

/// Goal: recompression tries what was asked for, keeps the smaller object, and gives up on what no algorithm shrinks.
#[test]
fn recompression_tries_what_was_asked_for() {
    let disk = zram(0, 1 << 20, &[Algorithm::Lz4, Algorithm::Zstd]);
    disk.write(0, 0, &letters(5, 4096)).unwrap();
    disk.write(0, 4096, &bytes(1, 4096)).unwrap();
    disk.write(0, 8192, &[0x22; 4096]).unwrap();
    let request = |what| Recompression { what, ..Recompression::default() };
    assert_eq!(disk.recompress(0, request(What::Idle)).unwrap().tried, 0);
    disk.set_now(50);
    disk.read(0, 4096, &mut [0; 4096]).unwrap();
    disk.mark_idle(Some(30));
    let done = disk.recompress(0, request(What::HugeIdle)).unwrap();
    assert_eq!((done.tried, done.shrank), (1, 1), "letters are idle, noise was read");
    assert!(done.bytes_saved > 1500);
    let done = disk.recompress(0, request(What::All)).unwrap();
    assert_eq!((done.tried, done.shrank), (1, 0), "noise");
    assert_eq!(disk.recompress(0, request(What::All)).unwrap().tried, 0, "it is known by now");
    assert_eq!(flags(&disk), ["....r.", "..h..n", "s....."], "what was tried is not idle any more");
    assert_eq!(disk.recompress(0, request(What::Idle)).unwrap().tried, 0);
    let mut found = vec![0; 4096];
    disk.read(0, 0, &mut found).unwrap();
    assert!(found == letters(5, 4096));
    disk.write(0, 4096, &bytes(2, 4096)).unwrap();
    assert_eq!(
        disk.recompress(0, request(What::Huge)).unwrap().tried,
        1,
        "new contents, new chance"
    );
}

/// Goal: with a threshold an object is replaced only by one below it, as in the kernel: units were recompressed that a
/// request had not asked for, and cost time to read since. One that shrank and is not below can be tried again with
/// another threshold.
#[test]
fn recompression_keeps_what_is_below_the_threshold() {
    let disk = zram(0, 1 << 20, &[Algorithm::Lz4, Algorithm::Zstd]);
    disk.write(0, 0, &letters(5, 4096)).unwrap();
    let bytes_of = || disk.mm_stat().compr_data_size;
    let tries = |threshold: u64| {
        let threshold = usize::try_from(threshold).unwrap();
        let done = disk.recompress(0, Recompression { threshold, ..Recompression::default() });
        done.map(|done| (done.tried, done.shrank, done.bytes_saved)).unwrap()
    };
    let before = bytes_of();
    // What the other algorithm makes of it, on a disk of its own.
    let other = zram(0, 1 << 20, &[Algorithm::Zstd]);
    other.write(0, 0, &letters(5, 4096)).unwrap();
    let after = other.mm_stat().compr_data_size;
    assert!(after < before, "{after}, {before}");
    assert_eq!(tries(before + 1), (0, 0, 0), "its object is small enough");
    assert_eq!((tries(after), bytes_of()), ((1, 0, 0), before), "the new one would not be below");
    assert_eq!(flags(&disk), ["..h..."]);
    assert_eq!((tries(after + 1), bytes_of()), ((1, 1, before - after), after));
    assert_eq!(flags(&disk), ["....r."]);
}

/// Goal: a unit that the algorithm of a priority cannot shrink is not tried with it again, whatever algorithms come
/// behind that, until it has other contents: units at the front used up `max_pages` each time, and the others were
/// never tried. Method: the second algorithm is the first one again, and so shrinks nothing.
#[test]
fn what_one_algorithm_cannot_shrink_is_left_to_the_next() {
    let disk =
        zram(0, 1 << 20, &[Algorithm::Lz4, Algorithm::Lz4, Algorithm::Zstd, Algorithm::Zstd]);
    (0..5).for_each(|unit| disk.write(0, unit << 12, &letters(unit, 4096)).unwrap());
    disk.write(0, 5 << 12, &bytes(5, 4096)).unwrap();
    let tries = |priority| {
        let request = Recompression { priority, max_pages: 2, ..Recompression::default() };
        let done = disk.recompress(0, request).unwrap();
        (done.tried, done.shrank)
    };
    let expected = [(2, 0), (2, 0), (2, 0), (0, 0)];
    assert_eq!([1, 1, 1, 1].map(tries), expected, "each unit once");
    assert_eq!(disk.recompress_old(0, 0, 10).done.tried, 0);
    disk.read(0, 0, &mut [0; 4096]).unwrap();
    assert_eq!(tries(1), (0, 0), "the same contents");
    disk.write(0, 0, &letters(9, 4096)).unwrap();
    assert_eq!(tries(1), (1, 0));
    let expected = [(2, 2), (2, 2), (2, 1), (0, 0)];
    assert_eq!([2, 2, 2, 2].map(tries), expected);
    assert_eq!([3, 3, 3, 3].map(tries), [(2, 0), (2, 0), (2, 0), (0, 0)]);
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    assert!(state.lines().take(5).all(|line| line.ends_with("....rn")), "{state}");
    assert!(state.lines().last().unwrap().ends_with("..h..n"), "{state}");
}

/// Goal: a full disk takes zeros wherever nothing was ever written: they are there already, and need no table. A file
/// system that zeroes its tables with writes had "no space" where a request for zeros succeeds.
#[test]
fn zeros_need_no_room_where_nothing_was_written() {
    let disk = zram(4, 1 << 30, &[Algorithm::Lz4]);
    disk.write(0, 0, &bytes(1, UNIT)).unwrap();
    disk.set_mem_limit(disk.mm_stat().mem_used_total);
    let far = 512 << 20;
    disk.write_zeroes(0, far, UNIT as u64).unwrap();
    for (at, length) in [(far, UNIT), (far + 4096, 512), (far + 512, 4 * UNIT)] {
        assert_eq!(disk.write(0, at, &vec![0; length]), Ok(()), "{length} bytes at {at}");
        assert!(disk.write(0, at, &vec![1; length]).is_err(), "any other word needs a slot");
        let mut found = vec![1; length];
        disk.read(0, at, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 0));
    }
    assert!(disk.table.get(far / UNIT as u64).is_none(), "a refused write leaves nothing");
    assert_eq!(disk.io_stat().failed_writes, 3);
}

/// Goal: the same where it is memory that the table lacks, also for a write of several units, of which each is tried
/// alone then. Method: units beyond the end of any table, for which it makes no slot either.
#[test]
fn zeros_need_no_memory_where_nothing_was_written() {
    let disk = zram(0, 1 << 20, &[Algorithm::Lz4]);
    let (beyond, zeros) = (UNITS_MAX << 12, vec![0; 4 << 12]);
    assert_eq!(disk.write_front(0, beyond, &zeros), Ok(1 << 12));
    assert_eq!(disk.write_front(0, beyond, &vec![1; 4 << 12]), Err(Error::NoMemory));
}

/// Goal: what the disk recompresses by itself stays marked idle. With the marks gone, a request to write back what is
/// idle wrote hardly anything.
#[test]
fn the_policy_leaves_the_marks_of_idle_units() {
    let disk = zram(0, 1 << 20, &[Algorithm::Lz4, Algorithm::Zstd]);
    disk.write(0, 0, &letters(5, 4096)).unwrap();
    disk.write(0, 4096, &bytes(1, 4096)).unwrap();
    disk.mark_idle(None);
    let done = disk.recompress_old(0, 0, 10).done;
    assert_eq!((done.tried, done.shrank), (2, 1));
    assert_eq!(flags(&disk), ["...ir.", "..hi.n"]);
}

/// Goal: what was not used for long is recompressed by itself, some units at a time, and nothing is tried twice.
#[test]
fn old_units_are_recompressed_by_themselves() {
    const UNITS: u64 = 600;
    let disk = zram(0, UNITS << 12, &[Algorithm::Lz4, Algorithm::Zstd]);
    for unit in 0..UNITS {
        disk.write(0, unit << 12, &letters(unit, 4096)).unwrap();
    }
    disk.write(0, 7 << 12, &bytes(7, 4096)).unwrap();
    disk.set_now(100);
    disk.read(0, 0, &mut vec![0; 8192]).unwrap();
    let round = |age_s| {
        let (mut tried, mut shrank) = (0, 0);
        loop {
            let turn = disk.recompress_old(1, age_s, 32);
            assert!(turn.done.tried <= 32);
            (tried, shrank) = (tried + turn.done.tried, shrank + turn.done.shrank);
            if turn.is_round {
                return (tried, shrank);
            }
        }
    };
    assert_eq!(round(101), (0, 0), "nothing is so old");
    assert_eq!(round(100), (UNITS - 2, UNITS - 3), "two were read, one is noise");
    assert_eq!(round(100), (0, 0), "all are known");
    disk.set_now(300);
    assert_eq!(round(150), (2, 2));
    for unit in (0..UNITS).filter(|unit| *unit != 7) {
        let mut found = vec![0; 4096];
        disk.read(0, unit << 12, &mut found).unwrap();
        assert!(found == letters(unit, 4096), "unit {unit}");
    }
    let alone = zram(0, 1 << 20, &[Algorithm::Lz4]);
    assert!(alone.recompress_old(0, 0, 1).is_round, "there is no other algorithm");
}

/// Goal: a walk in small pieces decompresses each unit once. Method: the store's count of the units that were loaded is
/// not public, so a unit is damaged after its first piece: the scratch buffer still has it, another CPU's does not.
#[test]
fn small_pieces_come_from_the_scratch_buffer() {
    let disk = zram(4, UNIT as u64, &[Algorithm::Lz4]);
    let contents = bytes(3, UNIT);
    disk.write(0, 0, &contents).unwrap();
    let mut sector = vec![0; 512];
    disk.read(0, 0, &mut sector).unwrap();
    let object = {
        let slot = disk.table.get(0).unwrap().lock();
        disk.store.object(slot.entry.as_ref().unwrap()).unwrap()
    };
    let damaged = object.start as *mut u8;
    // SAFETY: as in `a_damaged_unit_is_not_handed_out`.
    unsafe { *damaged ^= 1 };
    disk.read(0, 512, &mut sector).unwrap();
    assert!(sector == contents[512..1024]);
    assert!(disk.read(1, 512, &mut sector).is_err());
    // What is written goes into the buffer too, and from there into a new object.
    disk.write(0, 1024, &sector).unwrap();
    disk.read(1, 512, &mut sector).unwrap();
    assert!(sector == contents[512..1024]);
}

/// Goal: without memory nothing is lost. Method: each request for pages of a script of writes is refused once.
#[test]
fn without_memory_nothing_changes() {
    for refused in 0..6 {
        let disk = zram(0, 1 << 20, &[Algorithm::Lz4]);
        let world = World::new();
        let poor = zram_in(&world, 0, 1 << 20, &[Algorithm::Lz4]);
        world.refuse(refused..refused + 4);
        let mut failed = 0;
        for at in 0..128_u64 {
            let contents = if at % 2 == 0 { bytes(at, 4096) } else { text(at, 4096) };
            disk.write(0, at << 12, &contents).unwrap();
            match poor.write(0, at << 12, &contents) {
                Ok(()) => {}
                Err(Error::NoMemory) => failed += 1,
                Err(error) => panic!("{error}"),
            }
            let mut found = vec![1; 4096];
            poor.read(0, at << 12, &mut found).unwrap();
            assert!(
                found == contents || found == [0; 4096],
                "unit {at}, from request {refused} on"
            );
        }
        assert!(world.requests.load(Relaxed) <= refused || failed > 0);
    }
}
