//! Folios: where each managed unit is, and the table that finds a folio by its address.
//!
//! ```text
//!            touch                capture               compress
//!   empty ----------> resident <----------> staged ----------------> stored
//!     ^                  |  ^      touch                                |
//!     |    MADV_DONTNEED |  +-------------------------------------------+
//!     +------------------+                 touch: decompress
//! ```
//!
//! # Invariants
//!
//! - `UNIT-1` A unit of a managed folio is resident, staged or stored, or none of these: empty. A page
//!   that is missing in a resident or empty unit, or in an unmanaged folio, reads as zeros; in any other
//!   unit every page is missing.
//! - `UNIT-2` A stored unit has a copy. A resident or staged unit may have one: the copy it came from,
//!   good for as long as the unit's checksum is the copy's.
//! - `UNIT-3` A folio is in the queue of resident folios at most once (`queued`), beside what an unmapped
//!   folio at its address left there.
//! - `UNIT-4` While something of a folio is staged, nothing of it is captured: it has one slot. What is
//!   resident beside it could not be moved when the slot was filled.
//!
//! # Concurrency
//!
//! A folio has its lock ([`FolioLock`]); who takes it holds the table, at least for reading.

mod geometry;
mod table;

use std::ops::BitOr as _;

use zfolio_core::store::EntryId;
use zfolio_core::sync::{Guard, Mutex};

use crate::mover::Full;
use crate::rank;

pub(crate) use geometry::{Geometry, UNITS_MAX, Units};
pub(crate) use table::Table;

/// One folio.
#[derive(Debug)]
pub(crate) struct Folio {
    /// False: the kernel's alone, pinned, or at the edge of what is left of a mapping.
    pub(crate) managed: bool,
    /// In the queue of resident folios, perhaps stale.
    pub(crate) queued: bool,
    /// Among the parked folios, perhaps stale.
    pub(crate) parked: bool,
    /// Mapped in the program, as far as they were touched.
    pub(crate) resident: Units,
    /// In the queue of folios with copies, perhaps stale (`COPY-2`).
    pub(crate) copied: bool,
    /// Could not be moved when that was tried last.
    pub(crate) refused: Units,
    /// In the store only.
    pub(crate) stored: Units,
    /// In a slot of the staging area.
    pub(crate) staged: Option<Full>,
    /// When it was captured last (`Replacement::capture_time`).
    pub(crate) captured: u32,
    /// When some of it was compressed last (`Replacement::leave`).
    pub(crate) left: u32,
    /// Which units those were, but for what has come back since.
    pub(crate) just_left: Units,
    /// When the other stored units were compressed, on average: they come back one by one, and with the time
    /// of their neighbours they would seem to have left just now.
    pub(crate) left_before: u32,
    /// For each unit.
    pub(crate) copies: Box<[Option<EntryId>]>,
}

impl Folio {
    fn new(managed: bool, units: usize) -> Folio {
        Folio {
            managed,
            queued: false,
            parked: false,
            copied: false,
            resident: Units::NONE,
            refused: Units::NONE,
            stored: Units::NONE,
            staged: None,
            captured: 0,
            left: 0,
            just_left: Units::NONE,
            left_before: 0,
            copies: (0..units).map(|_| None).collect(),
        }
    }

    /// Notes that units are stored from `now` on (`Replacement::leave`).
    pub(crate) fn leave(&mut self, units: Units, now: u32) {
        let joining = ((self.just_left & self.stored) - units).count() as u64;
        let before = (self.stored - self.just_left - units).count() as u64;
        if joining > 0 {
            let later = u64::from(self.left.wrapping_sub(self.left_before));
            let later = later * joining / (joining + before);
            let later = u32::try_from(later).expect("a part of a u32");
            self.left_before = self.left_before.wrapping_add(later);
        }
        self.stored |= units;
        (self.left, self.just_left) = (now, units);
    }

    /// When a stored unit was compressed, as far as is known.
    pub(crate) fn left_at(&self, index: usize) -> u32 {
        if self.just_left.contains(index) { self.left } else { self.left_before }
    }

    /// Whether nothing was ever written, or all of it dropped.
    pub(crate) fn is_empty(&self) -> bool {
        self.resident.is_empty() && self.stored.is_empty() && self.staged.is_none()
    }

    /// Units that have a copy and are not stored only.
    pub(crate) fn copied_units(&self) -> Units {
        let copied =
            |(index, copy): (usize, &Option<EntryId>)| copy.as_ref().map(|_| Units::one(index));
        self.copies.iter().enumerate().filter_map(copied).fold(Units::NONE, Units::bitor)
            - self.stored
    }

    /// Whether it is empty and no copy is left.
    fn keeps_nothing(&self) -> bool {
        self.is_empty() && self.copies.iter().all(Option::is_none)
    }
}

/// A folio under its lock.
pub(crate) type FolioLock = Mutex<{ rank::FOLIO }, Folio>;

/// A folio locked.
pub(crate) type Held<'a> = Guard<'a, { rank::FOLIO }, Folio>;

const _: () = assert!(size_of::<FolioLock>() <= 64);

#[cfg(test)]
mod tests {
    use super::{Folio, Units};

    /// Goal: what left last has its own time, what left before the mean of all those, across the wrap of the
    /// clock.
    #[test]
    fn units_left_when_they_did_and_their_elders_on_average() {
        let mut folio = Folio::new(true, 4);
        let start = u32::MAX - 5;
        folio.leave(Units::one(0), start);
        folio.leave(Units::one(1), start.wrapping_add(20));
        assert_eq!([0, 1].map(|index| folio.left_at(index)), [start, start.wrapping_add(20)]);
        folio.leave(Units::from(2..4), start.wrapping_add(100));
        let mean = start.wrapping_add(10);
        let last = start.wrapping_add(100);
        assert_eq!([0, 1, 2, 3].map(|index| folio.left_at(index)), [mean, mean, last, last]);
        // One that came back and leaves again is no elder.
        folio.stored -= Units::one(3);
        folio.just_left -= Units::one(3);
        folio.leave(Units::one(3), 1000);
        let mean = start.wrapping_add(40);
        assert_eq!([0, 2, 3].map(|index| folio.left_at(index)), [mean, mean, 1000]);
    }
}
