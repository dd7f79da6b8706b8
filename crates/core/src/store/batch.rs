//! What goes into a store and comes out of it, in batches, and what becomes of each unit.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::AtomicU64;

use super::checksum::Checksum;
use super::entry::{EntryId, State};
use crate::page::UnitOrder;
use crate::stats::{Figures, add, subtract};
use crate::zsmalloc::Handle;

/// A unit to store.
#[derive(Debug, Default)]
pub struct Outgoing<'a> {
    /// The unit.
    pub bytes: &'a [u8],
    /// Before: the copy that the unit came from, if there is one. After: the copy that is good now; or,
    /// of a unit that was rejected, the copy that there was. The caller takes it back in any case.
    pub entry: Option<EntryId>,
    /// What became of the unit.
    pub outcome: Outcome,
    pub(super) checksum: Checksum,
    /// The new entry, until the old one is dropped.
    pub(super) stored: Option<EntryId>,
}

impl<'a> Outgoing<'a> {
    /// A unit to store, and the stored copy that it came from, if there is one.
    pub fn new(bytes: &'a [u8], entry: Option<EntryId>) -> Self {
        Outgoing { bytes, entry, ..Outgoing::default() }
    }

    /// Whether the unit is one machine word repeated; known once it was compared with its copy.
    #[must_use]
    pub fn is_same_filled(&self) -> bool {
        self.checksum.same_filled().is_some()
    }

    /// Whether the unit is zeros; known once it was compared with its copy.
    #[must_use]
    pub fn is_zeros(&self) -> bool {
        self.checksum.same_filled() == Some(0)
    }
}

/// What became of a unit that was to be stored.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// Nothing yet.
    #[default]
    Pending,
    /// It was compared with its copy, and differs; or there was no copy. It is not stored yet.
    Changed,
    /// It is what its copy is: nothing was compressed.
    Clean,
    /// It is one machine word repeated: stored as that word.
    SameFilled,
    /// It was stored compressed.
    Compressed,
    /// It would not shrink: stored as it is.
    Incompressible,
    /// It was not stored, and is still the caller's.
    Rejected(Reject),
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

/// A unit to load.
#[derive(Debug, Default)]
pub struct Incoming<'a> {
    /// What is loaded; `None` is passed over.
    pub entry: Option<&'a EntryId>,
    /// Where the unit goes: as long as the unit. Unless it is [`Loaded::Whole`], what is written here is
    /// nothing that anybody stored.
    pub bytes: &'a mut [u8],
    /// What became of it.
    pub outcome: Loaded,
}

impl<'a> Incoming<'a> {
    /// A unit to load.
    pub fn new(entry: &'a EntryId, bytes: &'a mut [u8]) -> Self {
        Incoming { entry: Some(entry), bytes, outcome: Loaded::Pending }
    }
}

/// What became of a unit that was to be loaded.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Loaded {
    /// Nothing yet.
    #[default]
    Pending,
    /// All of it is there, with the checksum of what was stored.
    Whole,
    /// It is on the backing. Drop all locks, hand the ticket to `Store::wait`, and try again.
    Away(Ticket),
    /// It cannot be given back.
    Lost(Error),
}

/// An entry on the backing that somebody wants to load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    pub(super) handle: Handle,
    /// Which entry it was: the handle may be another's by the time of the wait.
    pub(super) checksum: Checksum,
}

impl Ticket {
    /// The checksum of what was stored.
    #[must_use]
    pub fn checksum(self) -> Checksum {
        self.checksum
    }
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
    /// The backing does not deliver it. Unless the error is transient, data is lost.
    Unreadable {
        /// The checksum of what was stored.
        expected: Checksum,
        /// Whether a later try may succeed.
        is_transient: bool,
    },
}

impl Error {
    /// Whether a later try may succeed. If not, the data is lost.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Unreadable { is_transient: true, .. })
    }
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
            Error::Unreadable { expected, is_transient } => {
                let when = if *is_transient { "now" } else { "any more" };
                write!(f, "cannot be read {when}: stored checksum {expected:?}, nothing loaded")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Entries that were made, or ended: the figures are changed once for a batch (`STORE-3`), since each
/// change is a locked instruction on a cache line that all CPUs want.
#[derive(Default)]
pub(super) struct Tally {
    units: u64,
    bytes: u64,
    same_filled: u64,
    incompressible: u64,
    compressed_bytes: u64,
    alloc_fail: u64,
    compress_fail: u64,
}

impl Tally {
    /// Rejects a unit.
    pub(super) fn reject(&mut self, unit: &mut Outgoing<'_>, reject: Reject) {
        match reject {
            Reject::AllocFail => self.alloc_fail += 1,
            Reject::CompressFail => self.compress_fail += 1,
        }
        unit.outcome = Outcome::Rejected(reject);
    }

    /// Counts one entry of `unit`, whose object has `length` bytes.
    pub(super) fn count(&mut self, state: State, unit: UnitOrder, length: usize) {
        self.units += 1;
        self.bytes += unit.bytes() as u64;
        self.compressed_bytes += length as u64;
        self.same_filled += u64::from(state.is_same_filled());
        self.incompressible += u64::from(state.is_raw());
    }

    pub(super) fn add_to(&self, figures: &Figures) {
        self.change(figures, add);
        change_one(add, &figures.reject_alloc_fail, self.alloc_fail);
        change_one(add, &figures.reject_compress_fail, self.compress_fail);
    }

    pub(super) fn subtract_from(&self, figures: &Figures) {
        self.change(figures, subtract);
    }

    fn change(&self, figures: &Figures, step: fn(&AtomicU64, u64)) {
        change_one(step, &figures.stored_units, self.units);
        change_one(step, &figures.stored_bytes, self.bytes);
        change_one(step, &figures.same_filled_units, self.same_filled);
        change_one(step, &figures.incompressible_units, self.incompressible);
        change_one(step, &figures.compressed_bytes, self.compressed_bytes);
    }
}

/// Most batches leave some gauges as they are.
fn change_one(step: fn(&AtomicU64, u64), figure: &AtomicU64, by: u64) {
    if by > 0 {
        step(figure, by);
    }
}
