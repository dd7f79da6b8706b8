//! Goal: what is kept apart is the unit's newest contents, costs what the figures say, and is joined when it should be.
//! The scripts and the race of the disk mix all of this; here is each step by itself.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::super::tests::{letters, zram, zram_in};
use super::super::{Chosen, Error, Zram};
use super::{ApartStat, EXTRA_BYTES};
use crate::budget::WriteBudget;
use crate::page::PAGE_BYTES;
use crate::store::backing::faulty::{Breakable as _, Faulty};
use crate::zcomp::{Algorithm, Zcomp};
use crate::zsmalloc::PageSource;
use crate::zsmalloc::world::{World, bytes};

const UNIT: usize = 32 << 10;
const ORDER: u8 = 3;
const PAGES: u64 = 8;

/// A disk of units of 32 KiB that are all written, and what is on it.
fn filled(units: u64) -> (Zram<Arc<World>>, Vec<u8>) {
    filled_in(&World::new(), units)
}

fn filled_in(world: &Arc<World>, units: u64) -> (Zram<Arc<World>>, Vec<u8>) {
    let contents = letters(1, usize::try_from(units).unwrap() * UNIT);
    (filled_with(world, &contents), contents)
}

fn filled_with(world: &Arc<World>, contents: &[u8]) -> Zram<Arc<World>> {
    let disk = zram_in(world, ORDER, contents.len() as u64, &[Algorithm::Zstd]);
    let disk = disk.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    disk.write(0, 0, contents).unwrap();
    disk
}

/// Units whose pages are all the same: to split one costs as much as it can.
fn repeated(units: u64) -> Vec<u8> {
    (0..units).flat_map(|unit| bytes(unit, PAGE_BYTES).repeat(8)).collect()
}

fn write<S: PageSource>(disk: &Zram<S>, model: &mut [u8], at: usize, new: &[u8]) {
    disk.write(0, at as u64, new).unwrap();
    model[at..at + new.len()].copy_from_slice(new);
}

fn check<S: PageSource>(disk: &Zram<S>, model: &[u8]) {
    for piece in [512, PAGE_BYTES, 3 * 512, UNIT, model.len()] {
        for (at, expected) in (0..).step_by(piece).zip(model.chunks(piece)) {
            let mut found = vec![1; expected.len()];
            disk.read(0, at, &mut found).unwrap();
            assert!(found == expected, "{piece} bytes at {at}");
        }
    }
}

/// Goal: pages apart, which never leave the pool, are not looked at by each walk of the store. Method: a disk that has
/// nothing else is walked once; then nothing is marked.
#[test]
fn walks_pass_over_pages_apart() {
    let (disk, _) = filled(4);
    let disk = disk.with_backing(Box::new(Faulty::new(1 << 20)), WriteBudget::default());
    for unit in 0..4 {
        for page in 0..2 {
            let at = (unit * UNIT + page * PAGE_BYTES) as u64;
            disk.write(0, at, &letters(at, PAGE_BYTES)).unwrap();
        }
    }
    assert_eq!(disk.apart_stat().split_units, 4);
    disk.store.write_back(usize::MAX);
    assert_eq!(disk.store.pool().next_marked(0), None);
}

/// Goal: a unit that somebody has overwritten is none that was joined. Method: it is overwritten after it was found.
#[test]
fn what_was_overwritten_is_not_joined() {
    let (disk, mut model) = filled(4);
    write(&disk, &mut model, PAGE_BYTES, &letters(2, PAGE_BYTES));
    disk.set_now(10);
    let apart = disk.apart.as_ref().unwrap();
    assert_eq!(disk.old_parts(apart, 5, 8), [0]);
    write(&disk, &mut model, 0, &letters(3, UNIT));
    assert_eq!(disk.join_away(apart, 0, 0), None);
    write(&disk, &mut model, PAGE_BYTES, &letters(4, PAGE_BYTES));
    assert_eq!(disk.join_away(apart, 0, 0), Some(true));
    check(&disk, &model);
}

/// Goal: a page goes beside the copy, the next one splits the unit, and after some seconds the unit is joined; the
/// figures say so at each step.
#[test]
fn a_unit_is_split_and_joined() {
    let (disk, mut model) = filled(16);
    let before = disk.mm_stat();
    disk.set_now(10);
    write(&disk, &mut model, PAGE_BYTES, &letters(2, PAGE_BYTES));
    let stat = disk.apart_stat();
    assert_eq!((stat.units, stat.split_units, stat.pages), (1, 0, 1));
    check(&disk, &model);
    let beside = disk.mm_stat();
    assert_eq!(beside.orig_data_size, before.orig_data_size);
    assert_eq!(beside.compr_data_size, before.compr_data_size + stat.compressed_bytes);
    write(&disk, &mut model, PAGE_BYTES, &letters(3, PAGE_BYTES));
    assert_eq!(disk.apart_stat().pages, 1, "the same page again");
    write(&disk, &mut model, 5 * PAGE_BYTES, &letters(4, PAGE_BYTES));
    let stat = disk.apart_stat();
    assert_eq!((stat.units, stat.split_units, stat.pages), (1, 1, PAGES));
    check(&disk, &model);
    assert_eq!(disk.mm_stat().orig_data_size, before.orig_data_size);
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    assert_eq!(state.lines().count(), 16);
    // Of a split unit more is written at once, also across its end.
    write(&disk, &mut model, 2 * PAGE_BYTES, &letters(5, UNIT));
    check(&disk, &model);
    assert_eq!(disk.apart_stat().split_units, 2);
    assert_eq!(disk.join_old(0, 5, 8).units, 0, "too young");
    disk.set_now(12);
    disk.mark_idle(Some(2));
    disk.set_now(15);
    let joined = disk.join_old(0, 5, 8);
    assert_eq!((joined.units, joined.stayed), (2, 0));
    assert_eq!(disk.apart_stat(), ApartStat { joined_units: 2, ..ApartStat::default() });
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    let words: Vec<&str> = state.split_whitespace().collect();
    assert_eq!(words[..3], ["0", "10.000000", "...i.."], "to be joined is no use");
    check(&disk, &model);
    let after = disk.mm_stat();
    assert_eq!(after.orig_data_size, before.orig_data_size);
    assert!(after.compr_data_size.abs_diff(before.compr_data_size) < 1000);
}

/// Goal: `huge_pages_since` counts what clients write, and not that a unit is made one object again: that made the
/// figure grow for ever on a disk that is rewritten in pages.
#[test]
fn a_unit_that_is_joined_was_not_written() {
    let (disk, _) = filled(4);
    assert_eq!(disk.mm_stat().huge_pages_since, 0);
    disk.write(0, 0, &bytes(1, UNIT)).unwrap();
    assert_eq!(disk.mm_stat().huge_pages_since, 1);
    for turn in 1..3 {
        disk.write(0, 0, &bytes(1 + turn, PAGE_BYTES)).unwrap();
        assert_eq!(disk.join_old(0, 0, 8).units, 1);
        let stat = disk.mm_stat();
        assert_eq!((stat.huge_pages, stat.huge_pages_since), (1, 1));
    }
}

/// Goal: what is no whole page, is much of a unit, or of an empty one changes the unit as a whole, with what was apart.
#[test]
fn other_writes_change_the_unit_as_a_whole() {
    let (disk, mut model) = filled(16);
    for (at, length) in [(512, 512), (PAGE_BYTES, 3 * PAGE_BYTES), (100 * 512, PAGE_BYTES)] {
        write(&disk, &mut model, at, &letters(at as u64, length));
        assert_eq!(disk.apart_stat().units, 0, "{length} bytes at {at}");
        let page = (at + length) / UNIT * UNIT + 7 * PAGE_BYTES;
        write(&disk, &mut model, page, &letters(9, PAGE_BYTES));
        assert_eq!(disk.apart_stat().units, 1);
        write(&disk, &mut model, at, &letters(at as u64 + 1, length));
        assert_eq!(disk.apart_stat().units, 0, "{length} bytes at {at} again");
        check(&disk, &model);
    }
    disk.discard(0, 0, UNIT as u64).unwrap();
    disk.write(0, 0, &letters(3, PAGE_BYTES)).unwrap();
    assert_eq!(disk.apart_stat().units, 0, "an empty unit");
}

/// Goal: a split unit whose pages are zeroed one by one takes no memory in the end, and one that is overwritten, zeroed
/// or cut off as a whole leaves nothing apart.
#[test]
fn what_was_apart_ends_with_its_unit() {
    let (disk, mut model) = filled(16);
    let split = |model: &mut [u8]| {
        for page in [0, 4] {
            write(&disk, model, 15 * UNIT + page * PAGE_BYTES, &bytes(page as u64, PAGE_BYTES));
        }
        assert_eq!(disk.apart_stat().split_units, 1);
    };
    let last = 15 * UNIT as u64;
    split(&mut model);
    let mut runs = Vec::new();
    disk.runs(last, UNIT as u64, &mut |_, is_hole| {
        runs.push(is_hole);
        true
    })
    .unwrap();
    assert_eq!(runs, [false]);
    assert_eq!(disk.resize(last), Err(Error::Busy { unit: 15 }));
    for page in 0..PAGES {
        disk.discard(0, last + page * PAGE_BYTES as u64, PAGE_BYTES as u64).unwrap();
    }
    model[15 * UNIT..].fill(0);
    check(&disk, &model);
    assert_eq!(disk.apart_stat(), ApartStat::default());
    assert_eq!(disk.mm_stat().orig_data_size, last);
    disk.resize(last).unwrap();
    disk.resize(16 * UNIT as u64).unwrap();
    for whole in 0..2 {
        write(&disk, &mut model, 15 * UNIT, &letters(3, UNIT));
        split(&mut model);
        match whole {
            0 => write(&disk, &mut model, 15 * UNIT, &letters(4, UNIT)),
            _ => disk.discard(0, last, UNIT as u64).unwrap(),
        }
        assert_eq!(disk.apart_stat(), ApartStat::default());
    }
}

/// Goal: pages apart cost no more than the quarter that is allowed for them, however many are written; then writes
/// change units as a whole, and nothing is lost.
#[test]
fn what_is_apart_is_bounded() {
    let mut model = repeated(64);
    let disk = filled_with(&World::new(), &model);
    for page in 0..64 * 8 {
        write(&disk, &mut model, page * 5 % 512 * PAGE_BYTES, &bytes(page as u64, PAGE_BYTES));
        let apart = disk.apart.as_ref().unwrap();
        // One unit more than allowed, as that is found out afterwards.
        let extra_bytes = apart.extra_bytes.load(Relaxed);
        assert!(
            extra_bytes <= disk.compressed_bytes() / 4 + EXTRA_BYTES + UNIT as u64,
            "{extra_bytes}"
        );
    }
    let stat = disk.apart_stat();
    assert!(stat.split_units > 2 && stat.units < 64, "{stat:?}");
    check(&disk, &model);
}

/// Goal: without memory a write keeps all of its pages apart, or none. Method: each request for memory of a write that
/// splits a unit is refused, and all after it.
#[test]
fn without_memory_pages_stay_what_they_were() {
    let mut refusals = 0;
    for refused in 0..12 {
        let world = World::new();
        let (disk, mut model) = filled_in(&world, 16);
        write(&disk, &mut model, 0, &bytes(1, PAGE_BYTES));
        let now = world.requests.load(Relaxed);
        world.refuse(now + refused..now + 1000);
        for turn in 1..8 {
            let (at, new) = (2 * PAGE_BYTES + turn * UNIT, bytes(turn as u64, 2 * PAGE_BYTES));
            match disk.write(0, at as u64, &new) {
                Ok(()) => model[at..at + new.len()].copy_from_slice(&new),
                Err(error) => {
                    assert_eq!(error, Error::NoMemory);
                    refusals += 1;
                }
            }
            // To join takes memory too.
            disk.join_old(0, 0, 1);
            check(&disk, &model);
        }
        let mut file = Vec::new();
        disk.save(0, &[], &mut file).unwrap();
        world.refuse(0..0);
        while disk.join_old(0, 0, 8).units > 0 {}
        assert_eq!(disk.apart_stat().pages, 0);
        check(&disk, &model);
    }
    assert!(refusals > 0);
}

/// Goal: a page apart that was damaged is never handed out, nor is it joined; the rest of the unit is good, and a new
/// page heals it.
#[test]
fn a_damaged_page_is_not_handed_out() {
    let (disk, mut model) = filled(16);
    write(&disk, &mut model, 0, &letters(2, PAGE_BYTES));
    let object = {
        let _slot = disk.table.get(0).unwrap().lock();
        let parts = disk.apart.as_ref().unwrap().shard(0).lock();
        disk.store.object(parts[&0].pages[0].as_ref().unwrap()).unwrap()
    };
    let damaged = (object.start + 100) as *mut u8;
    // SAFETY: the object's memory is the pool's, on the heap, and no other thread uses the pool.
    unsafe { *damaged ^= 1 };
    let (mut unit, mut page) = (vec![0; UNIT], vec![0; PAGE_BYTES]);
    for _ in 0..2 {
        assert!(matches!(disk.read(0, 0, &mut unit), Err(Error::Lost { unit: 0, .. })));
        assert!(disk.read(0, 512, &mut page[..512]).is_err());
        assert!(disk.write(0, 512, &page[..512]).is_err());
        let joined = disk.join_old(0, 0, 8);
        assert_eq!((joined.units, joined.stayed), (0, 1));
        assert_eq!(disk.save(0, &[], &mut Vec::new()).unwrap().lost, 1);
    }
    disk.read(0, 4096, &mut page).unwrap();
    assert!(page == model[4096..8192]);
    write(&disk, &mut model, 0, &letters(3, PAGE_BYTES));
    check(&disk, &model);
}

/// Goal: with a limit pages are apart while an eighth of it is free (`APART-5`), the disk stays below it, and what is
/// apart takes no room from later writes (`APART-6`). Method: the same requests on a disk that keeps nothing apart.
#[test]
fn with_a_limit_pages_apart_leave_room_for_others() {
    const UNITS: u64 = 64;
    let contents = letters(1, usize::try_from(UNITS).unwrap() * UNIT / 2);
    let world = World::new();
    let plain = zram_in(&world, ORDER, UNITS * UNIT as u64, &[Algorithm::Zstd]);
    let disk = zram_in(&world, ORDER, UNITS * UNIT as u64, &[Algorithm::Zstd]);
    let disk = disk.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    let mut model = vec![0; 2 * contents.len()];
    write(&disk, &mut model, 0, &contents);
    plain.write(0, 0, &contents).unwrap();
    let limit = 2 * plain.used_bytes();
    disk.set_mem_limit(limit);
    plain.set_mem_limit(limit);
    for page in 0..256 {
        let (at, new) = (page * 5 % 256 * PAGE_BYTES, letters(page as u64, PAGE_BYTES));
        write(&disk, &mut model, at, &new);
        plain.write(0, at as u64, &new).unwrap();
        assert!(disk.used_bytes() <= limit, "LIM-1");
    }
    let split_units = disk.apart_stat().split_units;
    assert!(split_units > 8, "{split_units}");
    // Noise in the other half, until there is no room.
    let mut written = [0_u64; 2];
    for unit in 32..64 {
        let noise = bytes(unit, UNIT);
        let at = unit * UNIT as u64;
        for (count, disk) in written.iter_mut().zip([&disk, &plain]) {
            match disk.write(0, at, &noise) {
                Ok(()) => *count += 1,
                Err(error) => assert_eq!(error, Error::NoSpace { limit_bytes: limit }),
            }
            assert!(disk.used_bytes() <= limit + UNIT as u64, "LIM-1");
        }
        if written[0] == unit - 31 {
            model[usize::try_from(at).unwrap()..][..UNIT].copy_from_slice(&noise);
        }
    }
    assert!(written[0] >= written[1] && written[0] < 32, "{written:?}");
    assert!(disk.apart_stat().split_units < split_units, "units were joined for that");
    check(&disk, &model);
    // At its limit a disk keeps nothing more apart.
    let (before, at, new) = (disk.apart_stat().units, 31 * UNIT, letters(7, PAGE_BYTES));
    if disk.write(0, at as u64, &new).is_ok() {
        model[at..at + PAGE_BYTES].copy_from_slice(&new);
    }
    assert!(disk.apart_stat().units <= before);
    check(&disk, &model);
}

/// Goal: a page that replaces one that is apart is written only where it fits below the limit (`LIM-1`). Method: pages
/// that shrink are overwritten with noise, on a disk that is at its limit.
#[test]
fn pages_written_again_stay_below_the_limit() {
    let (disk, mut model) = filled(16);
    for page in 0..128 {
        write(&disk, &mut model, page * PAGE_BYTES, &letters(page as u64, PAGE_BYTES));
    }
    assert_eq!(disk.apart_stat().split_units, 16);
    disk.compact();
    let limit = disk.used_bytes();
    disk.set_mem_limit(limit);
    let mut refused = 0;
    for page in 0..128 {
        let (at, new) = (page * PAGE_BYTES, bytes(page as u64, PAGE_BYTES));
        match disk.write(0, at as u64, &new) {
            Ok(()) => model[at..at + PAGE_BYTES].copy_from_slice(&new),
            Err(error) => {
                assert_eq!(error, Error::NoSpace { limit_bytes: limit });
                refused += 1;
            }
        }
        assert!(disk.used_bytes() <= limit + UNIT as u64, "LIM-1");
    }
    assert!(refused > 0);
    check(&disk, &model);
}

/// Goal: the most that was used is what was used at one moment. Method: the tables of pages apart are largest first,
/// and the pool when none is left.
#[test]
fn the_most_of_two_moments_is_not_added_up() {
    let (disk, mut model) = filled(1024);
    for unit in 0..1024 {
        write(&disk, &mut model, unit * UNIT, &letters(unit as u64, PAGE_BYTES));
    }
    let tables = disk.apart_tables_bytes();
    assert!(tables > 2 * UNIT as u64, "{tables}");
    let mut used = 0;
    for unit in 0..1024 {
        write(&disk, &mut model, unit * UNIT, &bytes(unit as u64, UNIT));
        used = disk.used_bytes().max(used);
    }
    assert_eq!(disk.apart_tables_bytes(), 0);
    // Within a write the old unit and the new one are there.
    let most = disk.mm_stat().mem_used_max;
    assert!(used <= most && most < used + tables / 2, "{used} of {most}, {tables} in tables");
    check(&disk, &model);
}

/// A disk with a backing, all of whose units are there.
fn away(units: u64) -> (Zram<Arc<World>>, Faulty, Vec<u8>) {
    let contents = letters(1, usize::try_from(units).unwrap() * UNIT);
    let disk = zram(ORDER, contents.len() as u64, &[Algorithm::Lz4]);
    let backing = Faulty::new(4 << 20);
    let disk = disk.with_backing(Box::new(backing.clone()), WriteBudget::NONE);
    let disk = disk.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    disk.write(0, 0, &contents).unwrap();
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=units - 1])).units, units);
    (disk, backing, contents)
}

/// Goal: a page is written and read without its unit's copy, which stays on the backing; what needs the copy fetches
/// it.
#[test]
fn a_copy_beside_pages_may_be_away() {
    let (disk, _, mut model) = away(16);
    let fetched = || disk.store.spill_stats().read;
    write(&disk, &mut model, PAGE_BYTES, &letters(2, PAGE_BYTES));
    let mut page = vec![0; PAGE_BYTES];
    disk.read(0, PAGE_BYTES as u64, &mut page).unwrap();
    assert!(page == model[PAGE_BYTES..2 * PAGE_BYTES]);
    assert_eq!((disk.apart_stat().units, fetched()), (1, 0));
    let mut unit = vec![0; UNIT];
    disk.read(0, 0, &mut unit).unwrap();
    assert!(unit == model[..UNIT]);
    assert_eq!((disk.apart_stat().units, fetched(), disk.store.spill_stats().units), (1, 1, 16));
    // What is asked for is joined only where the copy is here.
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=0])).units, 0);
    assert_eq!(disk.apart_stat().units, 1);
    write(&disk, &mut model, 4 * PAGE_BYTES, &letters(3, PAGE_BYTES));
    assert_eq!(disk.apart_stat().split_units, 1);
    write(&disk, &mut model, UNIT, &letters(4, PAGE_BYTES));
    let mut file = Vec::new();
    disk.save(0, &[], &mut file).unwrap();
    assert_eq!(disk.apart_stat().units, 0, "a save joins");
    check(&disk, &model);
    // A part of a page has the unit fetched, and changed as a whole.
    write(&disk, &mut model, 2 * UNIT, &letters(5, PAGE_BYTES));
    write(&disk, &mut model, 2 * UNIT + 512, &letters(6, 512));
    assert_eq!(disk.apart_stat().units, 0);
    check(&disk, &model);
}

/// Goal: units whose copies are away are joined once they are old, and leave again where there is no room for them. A
/// backing that fails leaves everything as it is.
#[test]
fn units_are_joined_with_copies_that_are_away() {
    let (disk, backing, mut model) = away(16);
    for unit in 0..8 {
        write(&disk, &mut model, unit * UNIT, &letters(unit as u64, PAGE_BYTES));
    }
    disk.set_now(5);
    backing.faults().fail.store(1, Relaxed);
    let joined = disk.join_old(0, 5, 1);
    assert_eq!((joined.units, joined.stayed), (0, 1), "the read fails");
    check(&disk, &model);
    disk.compact();
    let limit = disk.used_bytes();
    disk.set_mem_limit(limit);
    disk.set_now(10);
    while disk.join_old(0, 5, 1).units > 0 {
        disk.store.drain();
        assert!(disk.used_bytes() <= limit + 2 * UNIT as u64, "{} of {limit}", disk.used_bytes());
    }
    assert_eq!((disk.apart_stat().units, disk.apart_stat().joined_units), (0, 8));
    check(&disk, &model);
}

/// Goal: a limit that is lowered below what pages apart take is kept by joining them, also where all copies are away:
/// no write fails while the backing has room (`APART-6`).
#[test]
fn a_lower_limit_has_units_joined() {
    let (disk, _, mut model) = away(64);
    for unit in 0..64 {
        write(&disk, &mut model, unit * UNIT, &bytes(unit as u64, PAGE_BYTES));
    }
    let before = disk.apart_stat().units;
    assert!(before > 8, "{before}");
    disk.compact();
    disk.set_mem_limit(disk.used_bytes() - 4 * PAGE_BYTES as u64);
    write(&disk, &mut model, 63 * UNIT, &letters(1, UNIT));
    assert!(disk.apart_stat().units < before);
    assert!(disk.used_bytes() <= disk.mm_stat().mem_limit + 2 * UNIT as u64);
    check(&disk, &model);
}

/// Goal: where nothing can be written back the limit is kept all the same: writes fail, and copies that are away do not
/// come into memory to be joined, but for one (`LIM-1`).
#[test]
fn a_backing_that_takes_nothing_does_not_fill_the_memory() {
    // Of a unit of 256 KiB one page apart may be in memory, and its copy away: all joined they take 16 times the limit.
    let (unit, limit) = (256 << 10, 1 << 20);
    let mut model = letters(1, 64 * unit);
    let disk = zram(6, model.len() as u64, &[Algorithm::Lz4]);
    let disk = disk.with_backing(Box::new(Faulty::new(32 << 20)), WriteBudget::NONE);
    let disk = disk.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    disk.write(0, 0, &model).unwrap();
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=63])).units, 64);
    disk.set_mem_limit(limit);
    disk.enable_writeback_limit(true);
    let mut failed = 0;
    for (now_s, turn) in (0..).zip(0..300) {
        let at = turn * 7919 % (64 * 64) * PAGE_BYTES;
        let new = bytes(turn as u64, PAGE_BYTES);
        match disk.write(0, at as u64, &new) {
            Ok(()) => model[at..at + PAGE_BYTES].copy_from_slice(&new),
            Err(error) => {
                assert!(matches!(error, Error::NoSpace { .. }), "{error}");
                failed += 1;
            }
        }
        disk.set_now(now_s);
        disk.join_old(0, 5, 1);
        assert!(disk.used_bytes() <= limit + 2 * unit as u64, "{} bytes", disk.used_bytes());
    }
    assert!(failed > 0, "the disk is full");
    disk.enable_writeback_limit(false);
    check(&disk, &model);
    for turn in 0..100 {
        write(&disk, &mut model, turn * 7919 % (64 * 64) * PAGE_BYTES, &bytes(9, PAGE_BYTES));
    }
    check(&disk, &model);
}

/// Goal: pages apart never leave the pool (`APART-5`), however much is written back; more than an eighth of the limit
/// they take only while an eighth of it is free, and in split units.
#[test]
fn pages_apart_stay_in_memory_and_leave_room() {
    let (disk, _, mut model) = away(64);
    let limit = 512 << 10;
    disk.set_mem_limit(limit);
    let mut grew = 0;
    for turn in 0..512 {
        let (before, used) = (disk.apart_stat(), disk.used_bytes());
        write(&disk, &mut model, turn * 13 % 512 * PAGE_BYTES, &letters(turn as u64, PAGE_BYTES));
        let apart = disk.apart_stat();
        if apart.pages > before.pages && before.compressed_bytes >= limit / 8 {
            grew += 1;
            assert!(
                used < limit - limit / 8 && apart.split_units > before.split_units,
                "{apart:?}"
            );
        }
        assert!(disk.used_bytes() <= limit + UNIT as u64, "LIM-1");
        disk.store.write_back(4);
    }
    assert!(grew > 0 && disk.apart_stat().units > 0);
    while disk.store.write_back(64).started > 0 {
        disk.store.drain();
    }
    let slots = disk.table.slots(0, 64);
    let copies_here = slots.filter(|(_, slot)| disk.entry_here(&slot.lock()).is_some()).count();
    assert_eq!(copies_here, 0, "all that may leave has left");
    check(&disk, &model);
}

/// Goal: where split units have memory for themselves and others want it, they are joined, and leave (`APART-6`).
#[test]
fn split_units_make_room_with_a_backing() {
    let (disk, _, mut model) = away(64);
    for page in (0..16 * 8).step_by(4) {
        write(&disk, &mut model, page * PAGE_BYTES, &letters(page as u64, PAGE_BYTES));
    }
    let split_units = disk.apart_stat().split_units;
    assert_eq!(split_units, 16);
    disk.compact();
    let limit = disk.used_bytes();
    disk.set_mem_limit(limit);
    for unit in 16..64 {
        write(&disk, &mut model, unit * UNIT, &letters(unit as u64, UNIT));
        assert!(disk.used_bytes() <= limit + UNIT as u64, "LIM-1");
    }
    assert!(disk.apart_stat().split_units < split_units, "units were joined for that");
    check(&disk, &model);
}

/// Goal: a disk of which pages are apart is saved with them.
#[test]
fn what_is_apart_is_saved() {
    let (disk, mut model) = filled(16);
    for page in [3, 12, 17, 19, 25] {
        write(&disk, &mut model, page * PAGE_BYTES, &bytes(page as u64, PAGE_BYTES));
    }
    assert!(disk.apart_stat().units > 2);
    let mut file = Vec::new();
    assert_eq!(disk.save(0, &[], &mut file).unwrap().units, 16);
    check(&disk, &model);
    let mut reader = super::super::Reader::open(&file[..]).unwrap();
    let key = reader.header().key.clone();
    let codec = Zcomp::new(Algorithm::Zstd.into(), disk.unit(), 2).unwrap();
    let loaded = Zram::new(vec![codec], World::new(), key, disk.disk_bytes(), 1).unwrap();
    let loaded = loaded.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    loaded.load_saved(0, &mut reader).unwrap();
    check(&loaded, &model);
}
