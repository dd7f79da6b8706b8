//! The store: units go in compressed, and come back as they were or not at all.
//!
//! [`Zswap::store`] compresses a batch of units and places each in the pool; what the caller keeps
//! of a unit is its [`Entry`]: where it is and what its checksum was. There is no index here: the
//! caller's folio table is the index, so that a fault looks up one entry in one place.
//!
//! # Invariants
//!
//! - `ZSWAP-1` An [`Entry`] is invalidated exactly once, by whom it was given to; then nobody uses it.
//! - `ZSWAP-2` What `load` hands out has the checksum of what `store` was given, or is an error.
//! - `ZSWAP-3` Between calls, `stored_units` counts the entries given out and not yet invalidated. An entry
//!   is invalidated after the `store` that gave it has returned.
//! - `ZSWAP-4` A store has one codec, with one dictionary or none, from its beginning to its end: that is how
//!   an entry knows with which it was compressed. A second codec would be named in the entry's place, which
//!   has 30 bits to spare.
//!
//! # Concurrency
//!
//! `zcomp stream` -> `zsmalloc class`. A load holds a stream of its CPU's decompressors, never one
//! of the compressors: a fault does not wait for the reclaim that it interrupts.
//!
//! # Cost
//!
//! An entry is 24 bytes: 8 for the place, 16 for the checksum; 0.15 % of a 16 KiB unit. Hashing costs
//! about 1/15 of what LZ4 costs to compress, and saves all of it for a unit that comes back unchanged.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::AtomicU64;

use twox_hash::XxHash3_128;

use crate::page::{UnitOrder, same_filled};
use crate::stats::{Figures, add, subtract};
use crate::zcomp::{BATCH_MAX, Element, Outcome, Zcomp};
use crate::zsmalloc::{Handle, PageSource, Pool, PoolStats};

/// The checksum of a unit: XXH3 with a secret, 128 bits; of a same-filled unit, its word and a mark.
///
/// Two words, not a `u128`: that would be aligned to 16 bytes and make an [`Entry`] 32 bytes long.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Checksum([u64; 2]);

/// The second word of a same-filled unit's checksum. A hash has it by chance once in 2^64.
const SAME_FILLED: u64 = u64::from_le_bytes(*b"samefill");

/// A secret of the process, with which its checksums are taken.
///
/// A unit with the checksum of its stored copy is taken for that copy, and its contents are dropped. Who chooses
/// contents (a peer, a file's author) could otherwise build two units with one checksum, and lose one for
/// the other. A child of `fork` has its parent's secret, as it has the parent's entries.
#[derive(Clone)]
pub struct Key([u8; Key::BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// As long as XXH3's own constants, which it replaces.
    pub const BYTES: usize = 192;

    /// A key of random bytes.
    #[must_use]
    pub fn new(secret: [u8; Key::BYTES]) -> Key {
        Key(secret)
    }

    /// The checksum of `unit`.
    #[must_use]
    pub fn checksum(&self, unit: &[u8]) -> Checksum {
        if let Some(word) = same_filled(unit) {
            return Checksum([word, SAME_FILLED]);
        }
        let hash = XxHash3_128::oneshot_with_secret(&self.0, unit).expect("136 bytes or more");
        let bytes = hash.to_le_bytes();
        let word = |from: usize| {
            u64::from_le_bytes(bytes[from..from + 8].try_into().expect("8 of 16 bytes"))
        };
        Checksum([word(0), word(8)])
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[1], self.0[0])
    }
}

/// Where a stored unit is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Every machine word of the unit is the checksum's first.
    SameFilled,
    /// Compressed in the pool.
    Compressed(Handle),
    /// As it is in the pool: it would not shrink.
    Raw(Handle),
}

/// A stored unit, as its owner remembers it.
///
/// Not `Copy`: `ZSWAP-1` is kept by moving it into [`Zswap::invalidate`].
#[derive(Debug)]
#[must_use = "an entry that is dropped leaks its memory: invalidate it"]
pub struct Entry {
    place: Place,
    checksum: Checksum,
}

const _: () = assert!(size_of::<Option<Entry>>() == 24);

impl Entry {
    /// The checksum of the unit that was stored.
    #[must_use]
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// The counter of units reclaimed in this way.
    #[must_use]
    pub fn reclaimed<'f>(&self, figures: &'f Figures) -> &'f AtomicU64 {
        match self.place {
            Place::SameFilled => &figures.reclaim_same_filled,
            Place::Compressed(_) => &figures.reclaim_compressed,
            Place::Raw(_) => &figures.reclaim_incompressible,
        }
    }
}

/// Why a unit was not stored. It is still the caller's. One counter per variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reject {
    /// The pool got no memory.
    AllocFail,
    /// The codec failed.
    CompressFail,
}

/// A stored unit cannot be given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// What was stored does not decompress. Data is lost; do not retry.
    Undecodable {
        /// The checksum of what was stored.
        expected: Checksum,
    },
    /// It decompresses to something else. Data is lost; do not retry.
    Corrupt {
        /// The checksum of what was stored.
        expected: Checksum,
        /// The checksum of what came out.
        found: Checksum,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Undecodable { expected } => {
                write!(f, "does not decompress: stored checksum {expected:?}")
            }
            Error::Corrupt { expected, found } => {
                write!(f, "is corrupt: stored checksum {expected:?}, loaded {found:?}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// The store.
#[derive(Debug)]
pub struct Zswap<S: PageSource> {
    zcomp: Zcomp,
    pool: Pool<S>,
    unit: UnitOrder,
    key: Key,
}

impl<S: PageSource> Zswap<S> {
    /// A store for units of one size.
    pub fn new(zcomp: Zcomp, source: S, unit: UnitOrder, key: Key) -> Self {
        Zswap { zcomp, pool: Pool::new(source, unit), unit, key }
    }

    /// The checksum of a unit, as this store takes it.
    #[must_use]
    pub fn checksum(&self, unit: &[u8]) -> Checksum {
        self.key.checksum(unit)
    }

    /// Units that one call should store together.
    #[must_use]
    pub fn batch_max(&self) -> usize {
        self.zcomp.batch_max()
    }

    /// Stores `units`, whose checksums the caller has already taken; `each` gets one result per unit.
    ///
    /// # Panics
    ///
    /// If a unit has another size than the store's, or the slices differ in length.
    pub fn store(
        &self,
        cpu: usize,
        units: &[&[u8]],
        checksums: &[Checksum],
        figures: &Figures,
        each: &mut dyn FnMut(usize, Result<Entry, Reject>),
    ) {
        assert_eq!(units.len(), checksums.len());
        let mut stored = Tally::default();
        self.zcomp.compress(cpu, units, &mut |elements| {
            // What goes into the pool, whose element it is, and as what.
            let mut objects = [&[][..]; BATCH_MAX];
            let mut owners = [(0, Place::Raw as fn(Handle) -> Place); BATCH_MAX];
            let mut count = 0;
            let mut told = |index: usize, place: Result<(Place, usize), Reject>| {
                match &place {
                    Ok((place, length)) => stored.count(place, *length),
                    Err(Reject::AllocFail) => add(&figures.reject_alloc_fail, 1),
                    Err(Reject::CompressFail) => add(&figures.reject_compress_fail, 1),
                }
                each(index, place.map(|(place, _)| Entry { place, checksum: checksums[index] }));
            };
            for Element { index, outcome } in elements {
                let (bytes, place): (_, fn(Handle) -> Place) = match *outcome {
                    Outcome::Compressed(bytes) => (bytes, Place::Compressed),
                    Outcome::Incompressible => (units[*index], Place::Raw),
                    Outcome::SameFilled(_) => {
                        told(*index, Ok((Place::SameFilled, 0)));
                        continue;
                    }
                    Outcome::Failed => {
                        told(*index, Err(Reject::CompressFail));
                        continue;
                    }
                };
                (objects[count], owners[count]) = (bytes, (*index, place));
                count += 1;
            }
            self.pool.store_batch(&objects[..count], &mut |at, kept| {
                let (index, place) = owners[at];
                let kept = kept.map(|handle| (place(handle), objects[at].len()));
                told(index, kept.map_err(|_| Reject::AllocFail));
            });
        });
        stored.tell(self.unit, figures, add);
    }

    /// Writes the unit of `entry` to `unit`, all of it. The entry stays good.
    ///
    /// # Errors
    ///
    /// The unit is lost (`ZSWAP-2`); what `unit` then holds is nothing anybody stored.
    ///
    /// # Panics
    ///
    /// If `unit` has another size than the store's.
    pub fn load(&self, cpu: usize, entry: &Entry, unit: &mut [u8]) -> Result<(), Error> {
        assert_eq!(unit.len(), self.unit.bytes());
        let expected = entry.checksum;
        match entry.place {
            Place::SameFilled => {
                fill(unit, expected.0[0]);
                return Ok(());
            }
            Place::Compressed(handle) => self
                .pool
                .read(handle, |bytes| self.zcomp.decompress(cpu, bytes, unit))
                .map_err(|_| Error::Undecodable { expected })?,
            Place::Raw(handle) => self.pool.read(handle, |bytes| unit.copy_from_slice(bytes)),
        }
        let found = self.checksum(unit);
        if found == expected { Ok(()) } else { Err(Error::Corrupt { expected, found }) }
    }

    /// Drops a stored unit.
    pub fn invalidate(&self, entry: Entry, figures: &Figures) {
        let mut gone = Tally::default();
        match entry.place {
            Place::SameFilled => gone.count(&entry.place, 0),
            Place::Compressed(handle) | Place::Raw(handle) => {
                gone.count(&entry.place, self.pool.free(handle));
            }
        }
        gone.tell(self.unit, figures, subtract);
    }

    /// What the pool holds.
    #[must_use]
    pub fn pool_stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// The pool, for its table of classes.
    #[must_use]
    pub fn pool(&self) -> &Pool<S> {
        &self.pool
    }

    /// Bytes of streams and buffers, allocated once.
    #[must_use]
    pub fn stream_bytes(&self) -> usize {
        self.zcomp.memory_bytes()
    }
}

/// Units that were stored, or are gone: the gauges are told of a batch at once (`ZSWAP-3`), since each
/// telling is a locked instruction on a line that all CPUs want.
#[derive(Default)]
struct Tally {
    units: u64,
    same_filled: u64,
    incompressible: u64,
    compressed_bytes: u64,
}

impl Tally {
    /// Counts one, of `length` bytes in the pool.
    fn count(&mut self, place: &Place, length: usize) {
        self.units += 1;
        self.compressed_bytes += length as u64;
        match place {
            Place::SameFilled => self.same_filled += 1,
            Place::Compressed(_) => {}
            Place::Raw(_) => self.incompressible += 1,
        }
    }

    /// `step` is [`add`] or [`subtract`].
    fn tell(&self, unit: UnitOrder, figures: &Figures, step: fn(&AtomicU64, u64)) {
        step(&figures.stored_units, self.units);
        step(&figures.stored_bytes, self.units * unit.bytes() as u64);
        step(&figures.same_filled_units, self.same_filled);
        step(&figures.incompressible_units, self.incompressible);
        step(&figures.compressed_bytes, self.compressed_bytes);
    }
}

/// Writes `word` over all of `unit`, whose length is a multiple of the word's.
fn fill(unit: &mut [u8], word: u64) {
    for chunk in unit.chunks_exact_mut(size_of::<u64>()) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
}
