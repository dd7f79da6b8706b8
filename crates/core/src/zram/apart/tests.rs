//! Goal: what is kept apart is the unit's newest contents, costs what the figures say, and is joined when it should be.
//! The scripts and the race of the disk mix all of this; here is each step by itself.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::super::tests::{zram, zram_in};
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

/// Letters, which shrink to a half or so.
fn letters(tag: u64, length: usize) -> Vec<u8> {
    bytes(tag, length).iter().map(|byte| b'a' + byte % 16).collect()
}

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
        disk.save(0, &mut file).unwrap();
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
        assert!(disk.save(0, &mut Vec::new()).is_err());
    }
    disk.read(0, 4096, &mut page).unwrap();
    assert!(page == model[4096..8192]);
    write(&disk, &mut model, 0, &letters(3, PAGE_BYTES));
    check(&disk, &model);
}

/// Goal: where memory lacks nothing more is kept apart (`APART-5`): a write changes the unit as a whole, with what was
/// apart.
#[test]
fn where_memory_lacks_units_stay_whole() {
    let (disk, mut model) = filled(16);
    for unit in 0..2 {
        write(&disk, &mut model, unit * UNIT, &letters(2, PAGE_BYTES));
    }
    disk.set_mem_limit(8 << 20);
    write(&disk, &mut model, PAGE_BYTES, &letters(3, PAGE_BYTES));
    write(&disk, &mut model, 4 * UNIT, &letters(4, PAGE_BYTES));
    assert_eq!(disk.apart_stat().units, 1, "the one that was not written again");
    check(&disk, &model);
    disk.set_now(9);
    assert_eq!(disk.join_old(0, 5, 8).units, 1);
    check(&disk, &model);
    disk.set_mem_limit(0);
    write(&disk, &mut model, 4 * UNIT, &letters(5, PAGE_BYTES));
    assert_eq!(disk.apart_stat().units, 1);
    check(&disk, &model);

    let disk = zram(ORDER, 16 * UNIT as u64, &[Algorithm::Lz4]);
    let disk = disk.with_backing(Box::new(Faulty::new(4 << 20)), WriteBudget::NONE);
    let disk = disk.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    disk.write(0, 0, &model).unwrap();
    assert_eq!(disk.write_back(&Chosen::Indices(vec![0..=14])).units, 15);
    for unit in [0, 15] {
        write(&disk, &mut model, unit * UNIT, &letters(6, PAGE_BYTES));
    }
    assert_eq!(disk.apart_stat(), ApartStat::default());
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
    assert_eq!(disk.save(0, &mut file).unwrap().units, 16);
    check(&disk, &model);
    let mut reader = super::super::Reader::open(&file[..]).unwrap();
    let key = reader.header().key.clone();
    let codec = Zcomp::new(Algorithm::Zstd.into(), disk.unit(), 2).unwrap();
    let loaded = Zram::new(vec![codec], World::new(), key, disk.disk_bytes(), 1).unwrap();
    let loaded = loaded.with_pages_apart(Algorithm::Zstd.into()).unwrap();
    loaded.load_saved(0, &mut reader).unwrap();
    check(&loaded, &model);
}
