//! The store: units go in compressed, and come back as they were or not at all.
//!
//! What the store keeps of a unit is an **entry**, and what the caller keeps is the entry's [`EntryId`],
//! 4 bytes. Both directions take batches. [`Store::store`] hashes each unit; a unit with the checksum of
//! the copy that it came from is clean, and nothing is compressed. The others go to one of the store's codecs
//! and into the pool. [`Store::load`] decompresses units in the caller's order, and hands out nothing whose
//! checksum is not that of what was stored.
//!
//! A store may have a [`Backing`]. [`Store::write_back`] then moves the entries there that were used least
//! lately, without any lock of the caller; `spill` says how.
//!
//! # Invariants
//!
//! - `STORE-1` An [`EntryId`] is invalidated exactly once, by whoever it was given to; then nobody uses it.
//! - `STORE-2` A unit that is [`Loaded::Whole`] has the checksum of what was stored.
//! - `STORE-3` Between calls, `stored_units` counts the entries given out and not yet invalidated, wherever
//!   they are, and `compressed_bytes` their objects.
//! - `STORE-4` An entry names its codec, and a codec has one dictionary or none for life and units of one
//!   size: so an entry says how to decompress it, and how long it is.
//! - `STORE-5` No stream is held while an old entry is dropped, so no lock of the pool's users is taken below
//!   a stream but the pool's own.
//!
//! # Concurrency
//!
//! `zcomp stream` -> `RANK_BACKING` (no thread takes both) -> `zsmalloc class`. A load holds a stream of its
//! CPU's decompressors, never one of the compressors: a fault does not wait for the reclaim that it
//! interrupts. Any number of threads may load one entry at once. To invalidate an entry takes the [`EntryId`]
//! itself, so that no load of this entry is in progress then.
//!
//! # Cost
//!
//! An entry is a row of 24 bytes beside its handle in the pool's table (slot 8, checksum and state 16), 4 bytes
//! for the owner of its object, and the 4 bytes of the caller's [`EntryId`], which the caller keeps for every unit,
//! stored or not. In parentheses what entries of 24 bytes at the caller would cost, with 12 in the pool for
//! each object. Bytes for a folio of 64 KiB:
//!
//! | units | none stored | all stored | all same-filled |
//! | --- | --- | --- | --- |
//! | 16 of 4 KiB | 64 (384) | 512 (576) | 448 (384) |
//! | 4 of 16 KiB | 16 (96) | 128 (144) | 112 (96) |
//! | 1 of 64 KiB | 4 (24) | 32 (36) | 28 (24) |
//!
//! Hashing costs about 1/15 of what LZ4 costs to compress, and saves all of it for a unit that comes back
//! unchanged.

#![deny(unsafe_code)]

pub mod backing;
mod batch;
mod checksum;
mod codecs;
mod entry;
mod fresh;
mod image;
mod in_flight;
mod kept;
#[cfg(any(test, fuzzing))]
pub mod script;
mod spill;
#[cfg(test)]
mod tests;

use crate::page::{PAGE_BYTES, UnitOrder};
use crate::stats::Figures;
use crate::zcomp::{self, BATCH_MAX, Element, Unpack, Zcomp};
use crate::zsmalloc::{Handle, PageSource, Pinned, Pool, PoolStats};
pub use backing::{Backing, RANK_BACKING};
use batch::Tally;
pub use batch::{Error, Incoming, Loaded, Outcome, Outgoing, Reject, Ticket};
pub use checksum::{Checksum, Key};
use codecs::Codecs;
pub use codecs::{CODECS_MAX, CodecId};
pub use entry::EntryId;
use entry::{Place, ROW_WORDS, Row};
pub(crate) use spill::STUCK_PAUSES;
use spill::Spill;
pub use spill::{SpillStats, WrittenBack};

/// Units that are stored before the copies which they replace are dropped: a folio of 64 KiB in pages.
const AT_ONCE: usize = (64 << 10) / PAGE_BYTES;

/// The store.
#[derive(Debug)]
pub struct Store<S: PageSource> {
    codecs: Codecs,
    pool: Pool<S>,
    key: Key,
    /// The longest batch that a codec decompresses.
    batch_max: usize,
    spill: Option<Box<Spill>>,
    /// Entries of this codec never go to the backing.
    in_pool: Option<CodecId>,
}

/// How a unit is stored: see [`Store::form`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// As one machine word.
    SameFilled,
    /// As it is: this codec could not shrink it.
    Incompressible(CodecId),
    /// As this codec compressed it.
    Compressed(CodecId),
}

/// What [`Store::find`] found of a unit to load.
enum Found<'s> {
    /// Nothing is left to be done: the outcome is set.
    Done,
    /// The object is to be decompressed with this codec.
    Packed(CodecId, Pinned<'s>),
}

impl<S: PageSource> Store<S> {
    /// A store with these codecs: the first is [`CodecId::FIRST`], and so on. Their units may differ in size.
    ///
    /// # Panics
    ///
    /// If there is no codec, or more than [`CODECS_MAX`].
    pub fn new(codecs: Vec<Zcomp>, source: S, key: Key) -> Self {
        Store::for_units(UnitOrder::PAGE, codecs, source, key)
    }

    /// The same, where units of codecs that are added later ([`Store::add_codec`]) may be as large as `unit_max`.
    ///
    /// # Panics
    ///
    /// As [`Store::new`].
    pub fn for_units(unit_max: UnitOrder, codecs: Vec<Zcomp>, source: S, key: Key) -> Self {
        let codecs = Codecs::new(codecs, unit_max);
        let pool = Pool::with_words(source, codecs.unit_max(), ROW_WORDS);
        let batch_max = codecs.batch_max();
        Store { codecs, pool, key, batch_max, spill: None, in_pool: None }
    }

    /// Adds a codec for units that are stored from now on. `None`: there is no place for it, or its units or batches
    /// are longer than those of the first codecs, or than the store was made for.
    ///
    /// Nobody who forks may do so meanwhile.
    pub fn add_codec(&self, codec: Zcomp) -> Option<CodecId> {
        self.codecs.add(codec)
    }

    /// The codecs with their numbers.
    pub fn codecs(&self) -> impl Iterator<Item = (CodecId, &Zcomp)> {
        self.codecs.each()
    }

    /// The same with a backing. What passes through the pool on its way there and back finds `reserve_bytes` of pages.
    #[must_use]
    pub fn with_backing(mut self, backing: Box<dyn Backing>, reserve_bytes: usize) -> Self {
        self.pool.may_reserve(reserve_bytes);
        Store { spill: Some(Box::new(Spill::new(backing))), ..self }
    }

    /// Has all entries of a codec stay in the pool, and never go to the backing. There are none so far.
    pub fn keep_in_pool(&mut self, codec: CodecId) {
        self.in_pool = Some(codec);
    }

    /// The codec of this number.
    ///
    /// # Panics
    ///
    /// If the store has no such codec.
    #[must_use]
    pub fn codec(&self, id: CodecId) -> &Zcomp {
        self.codecs.get(id)
    }

    /// Hashes each unit that is [`Outcome::Pending`], and compares it with the copy that it came from: it is
    /// [`Outcome::Clean`] or [`Outcome::Changed`] then. Returns how many units are changed.
    ///
    /// [`Store::store`] does this too, of what is still pending: a caller who calls `compare` first can
    /// measure the time of compression alone.
    pub fn compare(&self, units: &mut [Outgoing<'_>]) -> usize {
        let mut changed = 0;
        for unit in units {
            if unit.outcome == Outcome::Pending {
                unit.checksum = self.key.checksum(unit.bytes);
                let is_clean = unit.entry.as_ref().is_some_and(|entry| self.is_copy(entry, unit));
                unit.outcome = if is_clean { Outcome::Clean } else { Outcome::Changed };
            }
            changed += usize::from(unit.outcome == Outcome::Changed);
        }
        changed
    }

    /// Whether `entry` is a good copy of a unit, which was hashed.
    fn is_copy(&self, entry: &EntryId, unit: &Outgoing<'_>) -> bool {
        let is_copy = self.has_good(entry, unit.checksum, unit.bytes.len());
        if is_copy && self.is_walked() {
            self.row(entry.0).cell().protect();
        }
        is_copy
    }

    /// Whether an entry is the unit with this checksum, and can be read as far as is known: a unit whose copy is bad is
    /// stored anew, though it is the same.
    fn has_good(&self, entry: &EntryId, checksum: Checksum, unit_bytes: usize) -> bool {
        let row = self.row(entry.0);
        let state = row.cell().load();
        // Same-filled units of two sizes may have one checksum.
        row.checksum(state) == checksum
            && self.codec(state.codec()).unit().bytes() == unit_bytes
            && !state.is_in_doubt()
    }

    /// Stores each of the `units` that is not the same as the copy that it came from, compressed with
    /// `codec` on this `cpu`'s stream. Says in each what became of it, and changes its entry for the new one; the
    /// old one is invalidated. A unit that is rejected keeps the entry that it had.
    ///
    /// Units whose outcome is neither [`Outcome::Pending`] nor [`Outcome::Changed`] are left alone.
    ///
    /// # Panics
    ///
    /// If a unit has another size than the codec's, or the store has no such codec.
    pub fn store(&self, cpu: usize, codec: CodecId, units: &mut [Outgoing<'_>], figures: &Figures) {
        let unit_bytes = self.codec(codec).unit().bytes();
        for unit in &*units {
            assert_eq!(unit.bytes.len(), unit_bytes, "a unit of {codec:?}");
        }
        if self.compare(units) == 0 {
            return;
        }
        let (mut stored, mut gone) = (Tally::default(), Tally::default());
        for units in units.chunks_mut(AT_ONCE) {
            self.store_some(cpu, codec, units, &mut stored);
            // The stream is released now (STORE-5).
            for unit in units {
                if let Some(entry) = unit.stored.take() {
                    if !unit.is_same_filled() && Some(codec) != self.in_pool {
                        self.mark(entry.0);
                    }
                    let old = unit.entry.replace(entry);
                    old.into_iter().for_each(|old| self.end(old, &mut gone));
                }
            }
        }
        stored.add_to(figures);
        gone.subtract_from(figures);
    }

    /// At most [`AT_ONCE`] of them. The new entries are left beside the old ones.
    fn store_some(
        &self,
        cpu: usize,
        codec: CodecId,
        units: &mut [Outgoing<'_>],
        stored: &mut Tally,
    ) {
        let mut sources = [&[][..]; AT_ONCE];
        let mut indices = [0; AT_ONCE];
        let mut count = 0;
        for (index, unit) in units.iter_mut().enumerate() {
            if unit.outcome != Outcome::Changed {
                continue;
            }
            if unit.checksum.same_filled().is_some() {
                self.store_same_filled(codec, unit, stored);
                continue;
            }
            (sources[count], indices[count]) = (unit.bytes, index);
            count += 1;
        }
        if count == 0 {
            return;
        }
        self.codec(codec).compress(cpu, &sources[..count], &mut |elements| {
            self.keep(codec, elements, &indices, units, stored);
        });
    }

    fn store_same_filled(&self, codec: CodecId, unit: &mut Outgoing<'_>, stored: &mut Tally) {
        match self.pool.take_handle() {
            Ok(handle) => {
                self.begin(handle, (Place::SameFilled, codec, false), 0, unit, stored);
                unit.outcome = Outcome::SameFilled;
            }
            Err(_) => stored.reject(unit, Reject::AllocFail),
        }
    }

    /// Puts what a codec made of some units into the pool, while the codec's stream is held.
    fn keep(
        &self,
        codec: CodecId,
        elements: &[Element<'_>],
        indices: &[usize; AT_ONCE],
        units: &mut [Outgoing<'_>],
        stored: &mut Tally,
    ) {
        // What goes into the pool, and of which unit it is.
        let mut objects = [&[][..]; BATCH_MAX];
        let mut owners = [(0, Outcome::Pending); BATCH_MAX];
        let mut count = 0;
        for element in elements {
            let index = indices[element.index];
            let (bytes, outcome) = match element.outcome {
                zcomp::Outcome::Compressed(bytes) => (bytes, Outcome::Compressed),
                zcomp::Outcome::Incompressible => (units[index].bytes, Outcome::Incompressible),
                zcomp::Outcome::Failed => {
                    stored.reject(&mut units[index], Reject::CompressFail);
                    continue;
                }
            };
            (objects[count], owners[count]) = (bytes, (index, outcome));
            count += 1;
        }
        self.pool.store_batch(&objects[..count], &mut |at, kept| {
            let (index, outcome) = owners[at];
            let unit = &mut units[index];
            match kept {
                Ok(handle) => {
                    let is_raw = outcome == Outcome::Incompressible;
                    let length = objects[at].len();
                    self.begin(handle, (Place::Pool, codec, is_raw), length, unit, stored);
                    unit.outcome = outcome;
                }
                Err(_) => stored.reject(unit, Reject::AllocFail),
            }
        });
    }

    /// Begins the entry of a unit, whose object of `length` bytes is stored.
    fn begin(
        &self,
        handle: Handle,
        (place, codec, is_raw): (Place, CodecId, bool),
        length: usize,
        unit: &mut Outgoing<'_>,
        stored: &mut Tally,
    ) {
        let row = self.row(handle);
        let state = row.begin(place, codec, is_raw, unit.checksum);
        unit.stored = Some(EntryId(handle));
        stored.count(state, self.codec(codec).unit(), length);
    }

    /// Loads each of the `units`, in their order, and says in each what became of it. The entries stay good.
    ///
    /// # Panics
    ///
    /// If a unit has another size than what was stored.
    pub fn load(&self, cpu: usize, units: &mut [Incoming<'_>]) {
        let mut rest = units;
        while !rest.is_empty() {
            let loaded = match self.batch_max {
                1 => self.load_some::<1>(cpu, rest),
                _ => self.load_some::<BATCH_MAX>(cpu, rest),
            };
            rest = &mut rest[loaded..];
        }
    }

    /// Loads units from the front on, as many as one batch of a codec has. Returns how many.
    ///
    /// The objects of a batch are pinned while they are decompressed. With software that is one at a time,
    /// and its checksum is taken while the unit is in the processor's cache.
    fn load_some<const BATCH: usize>(&self, cpu: usize, units: &mut [Incoming<'_>]) -> usize {
        let mut pinned = [const { None }; BATCH];
        let mut indices = [0; BATCH];
        let (mut count, mut codec, mut seen) = (0, CodecId::FIRST, 0);
        for unit in &mut *units {
            if let Found::Packed(other, pin) = self.find(unit) {
                if count > 0 && other != codec {
                    // The next batch's.
                    break;
                }
                codec = other;
                (pinned[count], indices[count]) = (Some(pin), seen);
                count += 1;
            }
            seen += 1;
            if count == self.codec(codec).batch_max().min(BATCH) {
                break;
            }
        }
        let mut jobs: [Unpack<'_>; BATCH] = std::array::from_fn(|_| Unpack::default());
        let mut wanted = indices[..count].iter().zip(&pinned);
        let mut next = wanted.next();
        let mut at = 0;
        for (index, unit) in units[..seen].iter_mut().enumerate() {
            if let Some((_, Some(pin))) = next.filter(|(wanted, _)| **wanted == index) {
                jobs[at] = Unpack::new(pin, unit.bytes);
                at += 1;
                next = wanted.next();
            }
        }
        if count > 0 {
            self.codec(codec).unpack(cpu, &mut jobs[..count]);
        }
        let results: [_; BATCH] = std::array::from_fn(|at| jobs[at].result);
        drop(pinned);
        for (index, result) in indices[..count].iter().zip(results) {
            self.verify(&mut units[*index], result.is_ok());
            if let Loaded::Lost(_) = units[*index].outcome {
                self.load_by_software(cpu, &mut units[*index]);
            }
        }
        seen
    }

    /// Loads a unit again that came out wrong: a device may be at fault, and not what is stored. If it is what is
    /// stored, the entry is noted as lost.
    #[cold]
    fn load_by_software(&self, cpu: usize, unit: &mut Incoming<'_>) {
        if let Found::Packed(codec, pin) = self.find(unit) {
            let is_decoded = self.codec(codec).unpack_by_software(cpu, &pin, unit.bytes);
            self.verify(unit, is_decoded);
            if let (Loaded::Lost(_), Some(entry)) = (unit.outcome, unit.entry) {
                self.row(entry.0).cell().spoil();
            }
            // Until now: else the entry could have left the pool and come back whole.
            drop(pin);
        }
    }

    /// Finds where a unit is, and loads it if no codec is needed.
    fn find(&self, unit: &mut Incoming<'_>) -> Found<'_> {
        let Some(entry) = unit.entry else { return Found::Done };
        let handle = entry.0;
        let row = self.row(handle);
        let state = row.cell().load();
        let unit_bytes = self.codec(state.codec()).unit().bytes();
        assert_eq!(unit.bytes.len(), unit_bytes, "{entry:?} has another size");
        let expected = row.checksum(state);
        let away = Loaded::Away(Ticket { handle, checksum: expected });
        match state.place() {
            Place::SameFilled => {
                fill(unit.bytes, expected.same_filled().expect("its checksum says so"));
                unit.outcome = Loaded::Whole;
            }
            Place::Pool | Place::Writing => match self.pool.pin(handle) {
                Some(pin) if state.is_raw() => {
                    unit.bytes.copy_from_slice(&pin);
                    self.verify(unit, true);
                    if let Loaded::Lost(_) = unit.outcome {
                        row.cell().spoil();
                    }
                }
                Some(pin) => return Found::Packed(state.codec(), pin),
                // It has just been written to the backing (ROW-3).
                None => unit.outcome = away,
            },
            Place::Backing if state.has_failed() => {
                unit.outcome = Loaded::Lost(Error::Unreadable { expected, is_transient: false });
            }
            Place::Backing | Place::Reading => unit.outcome = away,
            Place::Vacant | Place::WritingDead | Place::ReadingDead => {
                panic!("STORE-1: {entry:?}, which is {state:?}, is loaded")
            }
        }
        Found::Done
    }

    /// Compares what was loaded with what was stored (`STORE-2`).
    fn verify(&self, unit: &mut Incoming<'_>, is_decoded: bool) {
        let Some(entry) = unit.entry else { return };
        let row = self.row(entry.0);
        let expected = row.checksum(row.cell().load());
        let found = if is_decoded { self.key.hash(unit.bytes) } else { Checksum::default() };
        unit.outcome = match is_decoded {
            true if found == expected => Loaded::Whole,
            true => Loaded::Lost(Error::Corrupt { expected, found }),
            false => Loaded::Lost(Error::Undecodable { expected }),
        };
        if self.is_walked() {
            row.cell().protect();
        }
    }

    /// Drops a stored unit.
    pub fn invalidate(&self, entry: EntryId, figures: &Figures) {
        let mut gone = Tally::default();
        self.end(entry, &mut gone);
        gone.subtract_from(figures);
    }

    /// Ends an entry, and frees what it has; or leaves that to who completes a request for it.
    fn end(&self, entry: EntryId, gone: &mut Tally) {
        let handle = entry.0;
        let cell = self.row(handle).cell();
        // Before the end: from then on the row may be another's. A length is the same here and away.
        let length = match cell.load().place() {
            Place::SameFilled => 0,
            _ => self.pool.length_anywhere(handle),
        };
        let state = cell.end();
        gone.count(state, self.codec(state.codec()).unit(), length);
        match state.place() {
            Place::SameFilled => self.pool.give_handle(handle),
            Place::Pool => {
                self.give_up_location(state, handle);
                self.pool.free(handle);
            }
            Place::Backing => self.forget(handle, state),
            _ => {}
        }
    }

    /// How an entry's unit is stored.
    #[must_use]
    pub fn form(&self, entry: &EntryId) -> Form {
        let state = self.row(entry.0).cell().load();
        match state.codec() {
            _ if state.is_same_filled() => Form::SameFilled,
            codec if state.is_raw() => Form::Incompressible(codec),
            codec => Form::Compressed(codec),
        }
    }

    /// The checksum of an entry's unit.
    #[must_use]
    pub fn checksum(&self, entry: &EntryId) -> Checksum {
        let row = self.row(entry.0);
        row.checksum(row.cell().load())
    }

    /// Whether this is the unit of an entry, which can be read as far as is known: to store it again changes nothing.
    #[must_use]
    pub fn is_unit(&self, entry: &EntryId, bytes: &[u8]) -> bool {
        self.has_good(entry, self.key.checksum(bytes), bytes.len())
    }

    /// The word that an entry's unit repeats.
    #[must_use]
    pub fn same_filled(&self, entry: &EntryId) -> Option<u64> {
        self.checksum(entry).same_filled()
    }

    /// Bytes of an entry's object, wherever it is; 0 for a same-filled unit, which has none.
    #[must_use]
    pub fn object_bytes(&self, entry: &EntryId) -> usize {
        match self.row(entry.0).cell().load().place() {
            Place::SameFilled => 0,
            _ => self.pool.length_anywhere(entry.0),
        }
    }

    /// The addresses of an entry's object, if it has one in the pool: for a test that damages it.
    #[doc(hidden)]
    #[must_use]
    pub fn object(&self, entry: &EntryId) -> Option<std::ops::Range<usize>> {
        self.pool
            .pin(entry.0)
            .map(|pinned| pinned.as_ptr() as usize..pinned.as_ptr_range().end as usize)
    }

    fn row(&self, handle: Handle) -> Row<'_> {
        Row(self.pool.words(handle))
    }

    /// What the pool holds.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// The pool, for its table of classes, and to compact it.
    #[must_use]
    pub fn pool(&self) -> &Pool<S> {
        &self.pool
    }

    /// Bytes of the codecs' streams and buffers that were used ([`Zcomp::memory_bytes`]).
    #[must_use]
    pub fn stream_bytes(&self) -> usize {
        self.codecs.memory_bytes()
    }
}

/// Writes `word` over all of `unit`, whose length is a multiple of the word's.
fn fill(unit: &mut [u8], word: u64) {
    for chunk in unit.chunks_exact_mut(size_of::<u64>()) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
}
