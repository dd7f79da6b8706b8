//! Everything that a disk does at once, against models: writers of ranges of their own, beside a thread that
//! recompresses, writes back, saves, resizes, and has limit, memory and backing fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::tests::zram_in;
use super::{Chosen, Error, Recompression, What, Zram};
use crate::budget::WriteBudget;
use crate::store::backing::faulty::{Breakable, Faulty};
use crate::store::backing::sealed::Sealed;
use crate::testing::{self, Random};
use crate::zcomp::Algorithm;
use crate::zsmalloc::world::{World, bytes, unit};

/// Writers, units of each, and units behind them that come and go with the disk's size.
const WRITERS: usize = 2;
const OWN: usize = 40;
const TAIL: usize = 40;
const ALL: usize = WRITERS * OWN + TAIL;

const SECTOR: usize = 512;
const PAGE: usize = 4096;

type Disk = Zram<Arc<World>>;

fn read_at_last(disk: &Disk, at: usize, into: &mut [u8]) {
    while let Err(error) = disk.read(0, at as u64, into) {
        assert!(error.is_transient(), "{error}");
        std::thread::yield_now();
    }
}

/// Units of one kind or of several: noise, text, words, zeros.
fn contents(random: &mut Random, length: usize) -> Vec<u8> {
    let (kind, tag) = (random.below(5), random.below(1 << 30) as u64);
    let piece = |at: usize, length: usize| match (kind + at) % 4 {
        0 => bytes(tag + at as u64, length),
        1 => bytes(tag, 64).repeat(length / 64),
        2 => tag.to_ne_bytes().repeat(length / 8),
        _ => vec![0; length],
    };
    let step = if kind == 4 { SECTOR } else { length };
    (0..length / step).flat_map(|at| piece(at, step)).collect()
}

/// One writer and its model.
struct Writer<'d> {
    disk: &'d Disk,
    base: usize,
    unit_bytes: usize,
    model: Vec<u8>,
}

impl Writer<'_> {
    /// Writes, zeroes and reads parts of units and runs of units.
    fn work(&mut self, random: &mut Random, turns: usize) {
        let sectors = self.model.len() / SECTOR;
        for turn in 0..turns {
            let step = [self.unit_bytes / SECTOR, 1, PAGE / SECTOR, PAGE / SECTOR][random.below(4)];
            let first = random.below(sectors / step) * step;
            let count = (1 + random.below(if step == 8 { 3 } else { 36 })) * step;
            let (at, cpu) = (first * SECTOR, random.below(3));
            let length = count.min(sectors - first) * SECTOR;
            let from = (self.base + at) as u64;
            let (new, done) = match random.below(10) {
                0..=5 => {
                    let new = contents(random, length);
                    let done = self.disk.write(cpu, from, &new);
                    (new, done)
                }
                6 => (vec![0; length], self.disk.write_zeroes(cpu, from, length as u64)),
                _ => {
                    let mut found = vec![1; length];
                    read_at_last(self.disk, self.base + at, &mut found);
                    assert!(found == self.model[at..at + length], "turn {turn}: {length} at {at}");
                    continue;
                }
            };
            match done {
                Ok(()) => self.model[at..at + length].copy_from_slice(&new),
                Err(error) => {
                    assert!(error.is_transient(), "{error}");
                    self.settle(at, &new);
                }
            }
        }
    }

    /// Notes which units of a write that failed are written (`ZRAM-2`).
    fn settle(&mut self, at: usize, new: &[u8]) {
        let mut from = at;
        while from < at + new.len() {
            let end = ((from / self.unit_bytes + 1) * self.unit_bytes).min(at + new.len());
            let mut found = vec![0; end - from];
            read_at_last(self.disk, self.base + from, &mut found);
            let is_new = found == new[from - at..end - at];
            assert!(is_new || found == self.model[from..end], "ZRAM-2: half a unit at {from}");
            self.model[from..end].copy_from_slice(&found);
            from = end;
        }
    }
}

/// Does one thing that a disk or its owner does beside writers.
fn trouble<B: Breakable>(disk: &Disk, world: &World, backing: &B, random: &mut Random) {
    let unit_bytes = disk.unit().bytes();
    let or_for_now = |done: Result<(), Error>| {
        let refused = done.err().filter(|error| !error.is_transient());
        assert_eq!(refused, None);
    };
    match random.below(16) {
        0 => {
            let all = Recompression { what: What::All, max_pages: 30, ..Recompression::default() };
            or_for_now(disk.recompress(2, all).map(drop));
        }
        1 => or_for_now(disk.recompress_old(1, 0, 20).error.map_or(Ok(()), Err)),
        2 => {
            let first = random.below(ALL) as u64;
            let _done = disk.write_back(2, &Chosen::Indices(vec![first..=first + 30]));
        }
        3 => _ = disk.write_back_old(0),
        4 => _ = disk.write_ahead(),
        5 => disk.compact_if_wasteful(),
        6 => disk.compact(),
        14..16 => _ = disk.join_old(2, 0, 8),
        7 => {
            let more = [0, 20_000, 200_000][random.below(3)];
            let limit = if random.below(3) == 0 { 0 } else { disk.used_bytes() + more };
            disk.set_mem_limit(limit);
        }
        8 => {
            let from = world.requests.load(Relaxed) + random.below(4);
            world.refuse(from..from + random.below(6));
        }
        9 => {
            backing.faults().fail.store(random.below(4), Relaxed);
            backing.faults().refuse.store(random.below(4), Relaxed);
        }
        10 => disk.mark_idle(None),
        11 => {
            let units = WRITERS * OWN + random.below(TAIL + 1);
            let done = disk.resize((units * unit_bytes) as u64);
            assert!(matches!(done, Ok(()) | Err(Error::Busy { .. })), "{done:?}");
        }
        // The tail, which may end before this does.
        12 => {
            let first = WRITERS * OWN + random.below(TAIL);
            let tail = contents(random, (ALL - first) * unit_bytes);
            let at = (first * unit_bytes) as u64;
            let done = match random.below(2) {
                0 => disk.write(2, at, &tail),
                _ => disk.discard(2, at, tail.len() as u64),
            };
            if !matches!(done, Err(Error::Invalid { .. })) {
                or_for_now(done);
            }
        }
        _ => {
            let saved = disk.save(2, &[], &mut Vec::new());
            drop(saved);
            disk.tidy();
        }
    }
}

/// With pages apart, and a backing or none.
fn race<B: Breakable + Send + Sync>(order: u8, seed: u64, turns: usize, has_backing: bool) {
    let unit_bytes = unit(order).bytes();
    let (world, backing) = (World::new(), B::new(ALL * unit_bytes / 3));
    let disk_bytes = (ALL * unit_bytes) as u64;
    let disk = zram_in(&world, order, disk_bytes, &[Algorithm::Lz4, Algorithm::Zstd]);
    let disk = match has_backing {
        true => disk.with_backing(Box::new(backing.clone()), WriteBudget::NONE),
        false => disk,
    };
    let disk = disk.with_pages_apart(Algorithm::Lz4.into()).unwrap();
    let mut writers: Vec<Writer<'_>> = (0..WRITERS)
        .map(|who| (who * OWN * unit_bytes, vec![0; OWN * unit_bytes]))
        .map(|(base, model)| Writer { disk: &disk, base, unit_bytes, model })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, disk, world, backing) = (&stop, &disk, &*world, &backing);
        scope.spawn(move || {
            let mut random = Random::new(seed + 100);
            while !stop.load(Relaxed) {
                trouble(disk, world, backing, &mut random);
            }
            disk.set_mem_limit(0);
        });
        let writing: Vec<_> = (seed..)
            .zip(&mut writers)
            .map(|(seed, writer)| scope.spawn(move || writer.work(&mut Random::new(seed), turns)))
            .collect();
        let done: Vec<_> = writing.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Relaxed);
        done.into_iter().for_each(|done| done.unwrap());
    });
    world.refuse(0..0);
    backing.behave();
    disk.store.drain();
    for writer in &writers {
        let mut found = vec![1; writer.model.len()];
        disk.read(0, writer.base as u64, &mut found).unwrap();
        assert!(found == writer.model, "the end, from {}", writer.base);
    }
    disk.audit();
    disk.reset();
    disk.store.drain();
    let stat = disk.mm_stat();
    assert_eq!((stat.orig_data_size, stat.compr_data_size, stat.same_pages), (0, 0, 0));
    assert_eq!((disk.apart_stat().units, disk.apart_stat().pages), (0, 0));
    drop(writers);
    drop(disk);
    assert_eq!(world.pages.load(Relaxed), 0, "pages that were not given back");
}

/// Goal: whatever else goes on, each writer has what it has written, or is told that it was not; and nothing is left at
/// the end. `SEED=n` plays other orders, `ROUNDS=n` more of them.
#[test]
fn writers_among_everything_else_lose_nothing() {
    let seed = testing::seed();
    let rounds = std::env::var("ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let seed = seed + 10 * round;
        println!("SEED={seed}");
        match round % 6 {
            0 => race::<Faulty>(0, seed, 400, true),
            1 => race::<Sealed>(0, seed, 400, true),
            2 => race::<Faulty>(2, seed, 150, true),
            3 => race::<Sealed>(2, seed, 150, true),
            4 => race::<Faulty>(2, seed, 300, false),
            _ => race::<Faulty>(3, seed, 150, false),
        }
    }
}
