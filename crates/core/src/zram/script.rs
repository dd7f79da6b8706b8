//! A script of requests, played on a device and on plain bytes at once. The fuzz target plays what the fuzzer writes,
//! the tests what seeded numbers write.
//!
//! Any bytes are a script: the first chooses the unit, the backing and the kind of codec, each next one a request that
//! takes its numbers from those that follow. The page source fails as the script says, and so do the limit and the
//! backing. Whatever fails, each unit is what it was or what was written (`ZRAM-2`); only of a unit that the backing
//! has lost it may be said that it is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{ApartStat, Chosen, Error, Recompression, SECTOR_BYTES, What, Zram};
use crate::budget::WriteBudget;
use crate::page::{UnitOrder, same_filled};
use crate::store::Key;
use crate::store::backing::faulty::{Breakable, Faulty};
use crate::store::backing::sealed::Sealed;
use crate::zcomp::{self, Accelerate, Algorithm, Backend, Compressor, Decompressor, Zcomp};
use crate::zsmalloc::world::{World, bytes, unit};

/// Units of the largest disk of a script.
const UNITS: u64 = 24;

/// Units of the disk at first.
const UNITS_FIRST: u8 = 12;

/// What the backing holds: a script that writes much finds it full.
const BACKING_BYTES: usize = 256 << 10;

/// How often something is tried that fails for now.
const TRIES: usize = 1000;

/// The device, the bytes beside it, and what is left of the script.
struct Player<'p, B> {
    zram: Zram<Arc<World>>,
    world: Arc<World>,
    /// It is the device's, but for scripts without one.
    backing: B,
    model: Vec<u8>,
    unit_bytes: usize,
    script: &'p [u8],
    tag: u64,
    /// Units that were seen to be split.
    split: u64,
}

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When the device does not do what bytes do.
pub fn play(script: &[u8]) {
    play_and_count(script);
}

/// The same. Returns how many units it saw split, and joined.
pub(super) fn play_and_count(script: &[u8]) -> [u64; 2] {
    let Some((first, script)) = script.split_first() else { return [0; 2] };
    let order = unit([0, 2, 4][usize::from(*first) % 3]);
    let (is_batched, has_apart) = (first / 18 % 2 == 1, first / 36 % 4 > 0);
    match first / 3 % 6 {
        0 | 1 => play_on::<Faulty>(order, false, is_batched, has_apart, script),
        2 | 3 => play_on::<Faulty>(order, true, is_batched, has_apart, script),
        _ => play_on::<Sealed>(order, true, is_batched, has_apart, script),
    }
}

/// A codec that takes several units at once, as accelerators do.
struct Batched(Box<dyn Backend>);

impl Backend for Batched {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn batch_max(&self) -> usize {
        5
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, zcomp::Error> {
        self.0.compressor(unit_bytes)
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, zcomp::Error> {
        self.0.decompressor(unit_bytes)
    }
}

fn play_on<B: Breakable>(
    order: UnitOrder,
    has_backing: bool,
    is_batched: bool,
    has_apart: bool,
    script: &[u8],
) -> [u64; 2] {
    let codec = |algorithm: Algorithm| {
        let batched = |codec| Ok(Box::new(Batched(codec)) as Box<dyn Backend>);
        let accelerate: Accelerate<'_> = if is_batched { &batched } else { &Ok };
        Zcomp::around(algorithm.into(), order, 2, accelerate).expect("streams")
    };
    let codecs = [Algorithm::Lz4, Algorithm::Zstd].map(codec).into();
    let world = World::new();
    let secret = bytes(42, Key::BYTES).try_into().expect("as many bytes");
    let disk_bytes = u64::from(UNITS_FIRST) * order.bytes() as u64;
    let zram = Zram::new(codecs, Arc::clone(&world), Key::new(secret), disk_bytes, 2);
    let (zram, backing) = (zram.expect("a good size"), B::new(BACKING_BYTES));
    let zram = match has_backing {
        true => zram.with_backing(Box::new(backing.clone()), WriteBudget::NONE),
        false => zram,
    };
    let zram = match has_apart {
        true => zram.with_pages_apart(Algorithm::Lz4.into()).expect("streams"),
        false => zram,
    };
    let mut player = Player {
        zram,
        world,
        backing,
        model: vec![0; usize::from(UNITS_FIRST) * order.bytes()],
        unit_bytes: order.bytes(),
        script,
        tag: 0,
        split: 0,
    };
    while !player.script.is_empty() {
        player.step();
    }
    player.end()
}

impl<B: Breakable> Player<'_, B> {
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.script.split_first() else { return 0 };
        self.script = rest;
        usize::from(*first)
    }

    /// A range of sectors, short or long, mostly inside of the disk.
    fn range(&mut self) -> (u64, usize) {
        let sectors = (self.unit_bytes as u64 / SECTOR_BYTES).max(8);
        let first = (self.byte() << 8 | self.byte()) as u64 % (UNITS * sectors);
        let count = match self.byte() % 6 {
            0 => 1,
            1 => self.byte() as u64 % 8,
            // Whole units.
            2 => {
                return (
                    first / sectors * self.unit_bytes as u64,
                    self.unit_bytes * (self.byte() % 4),
                );
            }
            // Whole pages.
            4 | 5 => return (first / 8 * 4096, 4096 * (1 + self.byte() % 3)),
            _ => self.byte() as u64,
        };
        (first * SECTOR_BYTES, usize::try_from(count * SECTOR_BYTES).expect("255 sectors"))
    }

    /// Contents that shrink well, hardly, or not at all, or are one word.
    fn contents(&mut self, length: usize) -> Vec<u8> {
        self.tag += 1;
        let (kind, tag) = (self.byte() % 4, self.tag);
        match kind {
            0 => bytes(tag, length),
            1 => bytes(tag, 64).repeat(length / 64 + 1)[..length].to_vec(),
            2 => vec![0; length],
            _ => tag.to_ne_bytes().repeat(length / 8 + 1)[..length].to_vec(),
        }
    }

    fn inside(&self, at: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let at = usize::try_from(at).ok()?;
        (at + length <= self.model.len()).then_some(at..at + length)
    }

    fn step(&mut self) {
        let cpu = self.byte();
        match self.byte() % 32 {
            0..=4 => self.write(cpu),
            5..=7 => self.read(cpu),
            8 if self.byte() % 2 == 0 => self.write_zeroes(cpu),
            8 => self.discard(cpu),
            9 => self.recompress(cpu),
            10 => self.resize(),
            11 => {
                let first = self.world.requests.load(Relaxed) + self.byte() % 8;
                let count = self.byte() % 8;
                self.world.refuse(first..first + count);
            }
            12 => {
                let limit = self.byte() % 4 * (self.byte() << 10);
                // With a low limit little is kept apart.
                let is_limited = self.zram.has_backing() || cpu % 2 == 0;
                self.zram.set_mem_limit(if is_limited { limit as u64 } else { 0 });
            }
            13 if cpu % 2 == 0 => {
                let age = u32::try_from(self.byte()).expect("a byte");
                let turn = self.zram.recompress_old(cpu, age, 3);
                assert!(matches!(turn.error, None | Some(Error::NoMemory)), "{turn:?}");
            }
            13 => self.zram.compact(),
            14 => {
                let now = self.byte();
                self.zram.set_now(u32::try_from(now).expect("a byte"));
                let age = self.byte();
                self.zram.mark_idle((age % 2 == 0).then(|| u32::try_from(age).expect("a byte")));
            }
            16..=17 => self.write_back(cpu),
            18 => {
                let age = u32::try_from(self.byte()).expect("a byte");
                let done = self.zram.write_back_old(age).done;
                assert!(self.zram.has_backing() || done.units == 0);
                self.zram.write_ahead();
            }
            19 => self.break_the_backing(),
            20 => {
                let pages = self.byte() as u64;
                self.zram.set_writeback_limit(pages);
                self.zram.enable_writeback_limit(pages % 2 == 1);
                let batch = self.byte();
                self.zram.set_writeback_batch(batch);
            }
            24..=31 => self.write_pages(cpu),
            22..=23 => {
                let (age, most) = (self.byte() % 8, 1 + self.byte() % 8);
                self.zram.join_old(cpu, u32::try_from(age).expect("a few"), most);
            }
            _ if self.byte() % 8 == 0 => {
                self.zram.reset();
                self.model.fill(0);
            }
            _ => self.runs(),
        }
    }

    /// Writes units back, and no more than the limit allows.
    fn write_back(&mut self, cpu: usize) {
        let (what, first, count) =
            (self.byte(), self.byte() as u64 % UNITS, self.byte() as u64 % 9);
        let chosen = match what % 6 {
            0 => Chosen::Huge,
            1 => Chosen::Idle,
            2 => Chosen::HugeIdle,
            3 => Chosen::Incompressible,
            _ => Chosen::Indices(vec![first..=first + count, 3..=3]),
        };
        let (limit, before) = (self.zram.writeback_limit(), self.zram.bd_stat());
        let done = self.zram.write_back(cpu, &chosen);
        let after = self.zram.bd_stat();
        if self.zram.is_writeback_limited() {
            // In bytes, where the backing has no slots.
            let written = after.bd_writes.saturating_sub(before.bd_writes);
            assert!(written <= limit + 1, "{written} pages, {limit} are allowed: {done:?}");
        }
        assert!(self.zram.has_backing() || done.units == 0 && after.bd_count == 0);
        if let (Chosen::Indices(_), None, 0) = (&chosen, done.stop, done.stayed) {
            let mut state = String::new();
            self.zram.block_state(&mut state).expect("a string takes everything");
            for line in state.lines() {
                let mut words = line.split_whitespace();
                let unit: u64 = words.next().and_then(|word| word.parse().ok()).expect("an index");
                let letters = words.nth(1).expect("letters");
                let is_chosen = (first..=first + count).contains(&unit) || unit == 3;
                let is_away = letters.starts_with('s') || &letters[1..2] == "w";
                // What could not be joined stays.
                let is_apart = self.zram.table.get(unit).is_some_and(|it| it.lock().is_apart());
                let is_good = !is_chosen || is_away || is_apart || !self.zram.has_backing();
                assert!(is_good, "{line}: {done:?}");
            }
        }
    }

    /// What fails for now only: what is lost for good has tests of its own.
    fn break_the_backing(&mut self) {
        let (what, count) = (self.byte(), self.byte() % 6);
        let faults = self.backing.faults();
        match what % 4 {
            0 => faults.holds.store(count % 2 == 0, Relaxed),
            1 => faults.refuse.store(count, Relaxed),
            _ => faults.fail.store(count, Relaxed),
        }
    }

    /// Reads, as often as it takes.
    fn read_at_last(&self, cpu: usize, at: u64, into: &mut [u8]) -> Result<(), Error> {
        for _ in 0..TRIES {
            match self.zram.read(cpu, at, into) {
                Err(Error::Lost { error, .. }) if error.is_transient() => {}
                done => return done,
            }
        }
        panic!("the backing does not fail so often")
    }

    fn write(&mut self, cpu: usize) {
        let (at, length) = self.range();
        let contents = self.contents(length);
        let written = self.zram.write(cpu, at, &contents);
        let Some(range) = self.inside(at, length) else {
            assert!(matches!(written, Err(Error::Invalid { .. })), "{written:?}");
            return;
        };
        self.model_write(range, &contents, written);
    }

    /// Writes some pages of one unit, of few, so that others of it are apart already.
    fn write_pages(&mut self, cpu: usize) {
        let units = self.model.len() / self.unit_bytes;
        let (unit, pages) = (self.byte() % units.min(3), self.unit_bytes / 4096);
        let page = self.byte() % pages;
        let count = (1 + self.byte() % 2).min(pages - page);
        let contents = self.contents(count * 4096);
        let at = unit * self.unit_bytes + page * 4096;
        let before = self.zram.apart_stat().split_units;
        let written = self.zram.write(cpu, at as u64, &contents);
        self.split += u64::from(self.zram.apart_stat().split_units > before);
        self.model_write(at..at + contents.len(), &contents, written);
    }

    /// What the model has after a request that was to change a range.
    fn model_write(
        &mut self,
        range: std::ops::Range<usize>,
        contents: &[u8],
        done: Result<(), Error>,
    ) {
        if done.is_ok() {
            return self.model[range].copy_from_slice(contents);
        }
        assert!(done.as_ref().is_err_and(Error::is_transient), "{done:?}");
        let (mut at, mut has_kept) = (range.start, false);
        while at < range.end {
            let end = ((at / self.unit_bytes + 1) * self.unit_bytes).min(range.end);
            let mut found = vec![0; end - at];
            self.read_at_last(0, at as u64, &mut found).expect("nothing is lost");
            let (old, new) = (&self.model[at..end], &contents[at - range.start..end - range.start]);
            assert!(found == new || found == old, "ZRAM-2: half a unit at {at}");
            has_kept |= found == old;
            self.model[at..end].copy_from_slice(&found);
            at = end;
        }
        assert!(has_kept, "{done:?} where everything was written");
    }

    fn read(&mut self, cpu: usize) {
        let (at, length) = self.range();
        let mut found = vec![0xEE; length];
        let read = self.read_at_last(cpu, at, &mut found);
        match self.inside(at, length) {
            Some(range) => {
                assert_eq!(read, Ok(()));
                assert!(found == self.model[range], "{length} bytes at {at} are wrong");
            }
            None => assert!(matches!(read, Err(Error::Invalid { .. })), "{read:?}"),
        }
    }

    fn write_zeroes(&mut self, cpu: usize) {
        let (at, length) = self.range();
        let done = self.zram.write_zeroes(cpu, at, length as u64);
        match self.inside(at, length) {
            Some(range) => self.model_write(range, &vec![0; length], done),
            None => assert!(matches!(done, Err(Error::Invalid { .. })), "{done:?}"),
        }
    }

    /// Whole units are zeros afterwards, and of the two at the ends a part is zeros or what it was.
    fn discard(&mut self, cpu: usize) {
        let (at, length) = self.range();
        let done = self.zram.discard(cpu, at, length as u64);
        let Some(range) = self.inside(at, length) else {
            return assert!(matches!(done, Err(Error::Invalid { .. })), "{done:?}");
        };
        let whole = range.start.next_multiple_of(self.unit_bytes)
            ..range.end / self.unit_bytes * self.unit_bytes;
        match done {
            Ok(()) if whole.start <= whole.end => {
                self.model[whole.clone()].fill(0);
                self.settle_zeroed(range.start..whole.start);
                self.settle_zeroed(whole.end..range.end);
            }
            Ok(()) => self.settle_zeroed(range),
            // The backing may fail.
            Err(_) => self.model_write(range, &vec![0; length], done),
        }
    }

    /// Notes whether a part of a unit was zeroed.
    fn settle_zeroed(&mut self, part: std::ops::Range<usize>) {
        let mut found = vec![0; part.len()];
        self.read_at_last(0, part.start as u64, &mut found).expect("nothing is lost");
        let is_zeros = found.iter().all(|byte| *byte == 0);
        assert!(is_zeros || found == self.model[part.clone()], "half a discard of {part:?}");
        self.model[part].copy_from_slice(&found);
    }

    fn recompress(&mut self, cpu: usize) {
        let what = [What::All, What::Idle, What::Huge, What::HugeIdle][self.byte() % 4];
        let (threshold, max_pages) = (self.byte() << 4, self.byte() as u64);
        // Wherever the objects are, and however long those take to end that are on their way.
        let compressed = || self.zram.figures.compressed_bytes.load(Relaxed);
        let apart = self.zram.apart_stat().units;
        let (before, compressed_before) = (self.zram.mm_stat(), compressed());
        let request = Recompression { what, threshold, max_pages, priority: 1 };
        let done = self.zram.recompress(cpu, request);
        let after = self.zram.mm_stat();
        assert_eq!(before.orig_data_size, after.orig_data_size);
        match done {
            Ok(done) => {
                assert!(done.tried <= max_pages && done.shrank <= done.tried, "{done:?}");
                // To join units changes it too.
                if apart == 0 {
                    assert_eq!(compressed_before - compressed(), done.bytes_saved);
                }
            }
            Err(error) => {
                assert!(matches!(error, Error::NoSpace { .. } | Error::NoMemory), "{error:?}")
            }
        }
    }

    fn resize(&mut self) {
        let units = self.byte() as u64 % (UNITS + 1);
        let bytes = units * self.unit_bytes as u64;
        let length = usize::try_from(bytes).expect("a small disk");
        let resized = self.zram.resize(bytes);
        let tail = self.model.get(length..).unwrap_or(&[]);
        match resized {
            Ok(()) => {
                assert!(tail.iter().all(|byte| *byte == 0), "data was cut off");
                self.model.resize(length, 0);
            }
            Err(Error::Invalid { .. }) => assert_eq!(units, 0),
            Err(error) => {
                assert!(matches!(error, Error::Busy { .. }) && !tail.is_empty(), "{error:?}")
            }
        }
        assert_eq!(self.zram.disk_bytes(), self.model.len() as u64);
    }

    /// Holes read as zeros, and the runs together are the range.
    fn runs(&mut self) {
        let (at, length) = self.range();
        let (mut seen, mut before, model) = (0, None, &self.model);
        let runs = self.zram.runs(at, length as u64, &mut |bytes, is_hole| {
            let from = usize::try_from(at).expect("a small disk") + seen;
            seen += usize::try_from(bytes).expect("a small disk");
            assert!(bytes > 0 && before != Some(is_hole), "runs are joined");
            assert!(
                !is_hole
                    || model[from..][..usize::try_from(bytes).expect("small")]
                        .iter()
                        .all(|byte| *byte == 0)
            );
            before = Some(is_hole);
            true
        });
        assert_eq!(runs.is_ok(), self.inside(at, length).is_some());
        assert!(runs.is_err() || seen == length);
    }

    /// The device has what the model has, and its figures say so.
    fn end(self) -> [u64; 2] {
        self.world.refuse(0..0);
        self.backing.behave();
        self.zram.store.drain();
        let mut found = vec![0xEE; self.model.len()];
        self.zram.read(1, 0, &mut found).expect("nothing is lost");
        assert!(found == self.model, "the disk is not what was written");
        let stat = self.zram.mm_stat();
        let some =
            self.model.chunks(self.unit_bytes).filter(|unit| same_filled(unit) != Some(0)).count();
        assert!(stat.orig_data_size >= (some * self.unit_bytes) as u64, "{stat:?}");
        self.zram.audit();
        let away = self.zram.store.spill_stats().units;
        assert_eq!(away > 0, self.zram.bd_stat().bd_count > 0);
        let joined_units = self.zram.apart_stat().joined_units;
        self.zram.reset();
        self.zram.store.drain();
        assert_eq!((self.backing.locations(), self.zram.bd_stat().bd_count), (0, 0));
        let stat = self.zram.mm_stat();
        assert_eq!(
            (stat.orig_data_size, stat.compr_data_size, stat.same_pages, stat.huge_pages),
            (0, 0, 0, 0)
        );
        assert_eq!(self.zram.apart_stat(), ApartStat::default());
        let pool = self.zram.store.pool_stats();
        assert_eq!((pool.objects, pool.pages_used - pool.pages_reserved), (0, 0), "{pool:?}");
        drop(self.zram);
        assert_eq!(self.world.pages.load(Relaxed), 0, "all pages were given back");
        [self.split, joined_units]
    }
}
