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
//! - `ZSWAP-4` A store has one codec, with one dictionary or none, from its beginning to its end: that is how
//!   an entry knows with which it was compressed. A second codec would be named in the entry's place, which
//!   has 30 bits to spare.
//! - `ZSWAP-3` `stored_units` counts the entries given out and not yet invalidated.
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
use crate::zcomp::{Outcome, Zcomp};
use crate::zsmalloc::{Handle, PageSource, Pool, PoolStats};

/// The checksum of a unit: XXH3, 128 bits; of a same-filled unit, its word and a mark.
///
/// Two words, not a `u128`: that would be aligned to 16 bytes and make an [`Entry`] 32 bytes long.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Checksum([u64; 2]);

/// The second word of a same-filled unit's checksum. A hash has it by chance once in 2^64.
const SAME_FILLED: u64 = u64::from_le_bytes(*b"samefill");

impl Checksum {
    /// Of `unit`.
    #[must_use]
    pub fn of(unit: &[u8]) -> Checksum {
        if let Some(word) = same_filled(unit) {
            return Checksum([word, SAME_FILLED]);
        }
        let hash = XxHash3_128::oneshot(unit);
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
}

impl<S: PageSource> Zswap<S> {
    /// A store for units of one size.
    pub fn new(zcomp: Zcomp, source: S, unit: UnitOrder) -> Self {
        Zswap { zcomp, pool: Pool::new(source, unit), unit }
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
        self.zcomp.compress(cpu, units, &mut |index, outcome| {
            let place = match outcome {
                Outcome::SameFilled(_) => Ok(Place::SameFilled),
                Outcome::Compressed(bytes) => {
                    self.pool.store(bytes).map(Place::Compressed).map_err(|_| Reject::AllocFail)
                }
                Outcome::Incompressible => {
                    self.pool.store(units[index]).map(Place::Raw).map_err(|_| Reject::AllocFail)
                }
                Outcome::Failed => Err(Reject::CompressFail),
            };
            match &place {
                Ok(place) => self.count(place, figures, add),
                Err(Reject::AllocFail) => add(&figures.reject_alloc_fail, 1),
                Err(Reject::CompressFail) => add(&figures.reject_compress_fail, 1),
            }
            each(index, place.map(|place| Entry { place, checksum: checksums[index] }));
        });
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
        let found = Checksum::of(unit);
        if found == expected { Ok(()) } else { Err(Error::Corrupt { expected, found }) }
    }

    /// Drops a stored unit.
    pub fn invalidate(&self, entry: Entry, figures: &Figures) {
        self.count(&entry.place, figures, subtract);
        match entry.place {
            Place::SameFilled => {}
            Place::Compressed(handle) | Place::Raw(handle) => self.pool.free(handle),
        }
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

    /// Keeps the gauges of stored units (`ZSWAP-3`): `step` is [`add`] or [`subtract`].
    fn count(&self, place: &Place, figures: &Figures, step: fn(&AtomicU64, u64)) {
        let unit_bytes = self.unit.bytes() as u64;
        step(&figures.stored_units, 1);
        step(&figures.stored_bytes, unit_bytes);
        match *place {
            Place::SameFilled => step(&figures.same_filled_units, 1),
            Place::Compressed(handle) => {
                step(&figures.compressed_bytes, self.pool.length(handle) as u64);
            }
            Place::Raw(_) => {
                step(&figures.incompressible_units, 1);
                step(&figures.compressed_bytes, unit_bytes);
            }
        }
    }
}

/// Writes `word` over all of `unit`, whose length is a multiple of the word's.
fn fill(unit: &mut [u8], word: u64) {
    for chunk in unit.chunks_exact_mut(size_of::<u64>()) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
}
