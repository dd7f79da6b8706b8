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
//! A unit that is zeros when it would be stored becomes empty, if most units of its folio are zeros then, and not all.
//!
//! # Invariants
//!
//! - `UNIT-1` A unit of a managed folio is either resident, staged, stored or empty. A missing page
//!   of a resident or empty unit, or of an unmanaged folio, reads as zeros. Every page of a staged
//!   or stored unit is missing.
//! - `UNIT-2` A stored unit has a copy, of its own or of the wide unit that it is in (`WIDE-1`). A resident or staged
//!   unit may have the copy that it was loaded from, which is good for as long as unit and copy have the same checksum.
//! - `UNIT-3` A folio has at most one entry in the queue of resident folios (`queued`). An unmapped
//!   folio at the same address may have left one more.
//! - `UNIT-4` A folio has one slot, so while some of its units are staged, no more are captured.
//!   Its units that are resident then came back since, or could not be moved when the slot was
//!   filled.
//! - `UNIT-5` A backed unit has a copy, which is on the store's backing and not in the pool, and is resident
//!   or staged.
//!
//! # Concurrency
//!
//! Each folio has a lock ([`FolioLock`]). A thread that takes it holds the table, at least for
//! reading.

mod geometry;
mod table;

use zfolio_core::store::EntryId;
use zfolio_core::sync::{Guard, Mutex};

use crate::mover::Full;
use crate::rank;
use crate::wide::Telling;

pub(crate) use geometry::{Geometry, UNITS_MAX, Units, WIDE_UNITS};
pub(crate) use table::Table;

/// One folio.
#[derive(Debug)]
pub(crate) struct Folio {
    /// False: only the kernel handles the folio, because it is pinned, or cut by the end of a
    /// mapping.
    pub(crate) managed: bool,
    /// The folio has an entry in the queue of resident folios, perhaps a stale one.
    pub(crate) queued: bool,
    /// The folio is among the parked folios, perhaps by a stale entry.
    pub(crate) parked: bool,
    /// Units that are mapped in the program; pages of them that were not touched are missing.
    pub(crate) resident: Units,
    /// The folio has an entry in the queue of folios with copies, perhaps a stale one (`COPY-2`).
    pub(crate) copied: bool,
    /// Units that could not be moved when this was tried last.
    pub(crate) refused: Units,
    /// Units that are in the store only.
    pub(crate) stored: Units,
    /// Units whose copy takes no memory: it is on the store's backing (`UNIT-5`).
    pub(crate) backed: Units,
    /// The slot of the staging area that holds the staged units.
    pub(crate) staged: Option<Full>,
    /// When the folio was captured last (`Replacement::capture_time`).
    pub(crate) captured: u32,
    /// When units of the folio were stored last (`Replacement::note_stored`).
    pub(crate) left: u32,
    /// The units that were stored at `left` and have not come back since.
    pub(crate) just_left: Units,
    /// When the other stored units were stored, on average. With `left` as their time, units that
    /// went out long ago would seem to have gone out just now.
    pub(crate) left_before: u32,
    /// Units of which four have one copy together (`WIDE-1`).
    pub(crate) wide: Units,
    /// Units that were loaded for a fault on them, or on their stream; not as a part of a wide unit.
    pub(crate) asked: Units,
    /// Whether what was asked for tells how units are used.
    pub(crate) telling: Telling,
    /// The copy of each unit, if it has one; that of a wide unit in the place of its first.
    pub(crate) copies: Box<[Option<EntryId>]>,
}

impl Folio {
    pub(crate) fn new(managed: bool, units: usize) -> Folio {
        Folio {
            managed,
            queued: false,
            parked: false,
            copied: false,
            resident: Units::NONE,
            refused: Units::NONE,
            stored: Units::NONE,
            backed: Units::NONE,
            staged: None,
            captured: 0,
            left: 0,
            just_left: Units::NONE,
            left_before: 0,
            wide: Units::NONE,
            asked: Units::NONE,
            telling: Telling::Free,
            copies: (0..units).map(|_| None).collect(),
        }
    }

    /// Takes out what the folio holds. What is left is empty, not managed, and has the entries in queues that it had.
    pub(crate) fn take(&mut self) -> Folio {
        let empty = Folio::new(false, self.copies.len());
        let Folio { queued, parked, copied, .. } = *self;
        std::mem::replace(self, Folio { queued, parked, copied, ..empty })
    }

    /// Puts into an empty folio what was taken out of another, except that nothing counts as resident yet.
    pub(crate) fn put(&mut self, taken: Folio) {
        debug_assert!(self.keeps_nothing());
        let Folio { queued, parked, copied, .. } = *self;
        let (resident, refused) = (Units::NONE, Units::NONE);
        *self = Folio { queued, parked, copied, resident, refused, ..taken };
    }

    /// Notes that units are stored from `now` on (`Replacement::note_stored`).
    pub(crate) fn note_stored(&mut self, units: Units, now: u32) {
        let joining = ((self.just_left & self.stored) - units).count() as u64;
        let before = (self.stored - self.just_left - units).count() as u64;
        if joining > 0 {
            let later = u64::from(self.left.wrapping_sub(self.left_before));
            let later = later * joining / (joining + before);
            let later = u32::try_from(later).expect("a part of a u32");
            self.left_before = self.left_before.wrapping_add(later);
        }
        self.stored |= units;
        self.backed -= units;
        (self.left, self.just_left) = (now, units);
    }

    /// When a stored unit was stored; an average for units that are not in `just_left`.
    pub(crate) fn left_at(&self, index: usize) -> u32 {
        if self.just_left.contains(index) { self.left } else { self.left_before }
    }

    /// The copy that a unit is in, if there is one.
    pub(crate) fn copy_of(&self, index: usize) -> Option<&EntryId> {
        self.copies[Units::one(index).whole(self.wide).span().start].as_ref()
    }

    /// The units whose pages are in the staging area.
    pub(crate) fn staged_units(&self) -> Units {
        self.staged.as_ref().map_or(Units::NONE, Full::units)
    }

    /// Whether all units are empty: never touched, or dropped.
    pub(crate) fn is_empty(&self) -> bool {
        self.resident.is_empty() && self.stored.is_empty() && self.staged.is_none()
    }

    /// Units that have a copy in the pool and are resident or staged.
    pub(crate) fn copied_units(&self) -> Units {
        let copied =
            |(index, copy): (usize, &Option<EntryId>)| copy.as_ref().map(|_| Units::one(index));
        let copied = self.copies.iter().enumerate().filter_map(copied);
        (copied.collect::<Units>() | self.wide) - self.stored - self.backed
    }

    /// Whether the folio is empty and has no copy.
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

    /// Goal: the units that left last have their own time, and all others the mean of their times,
    /// even if the clock wraps.
    #[test]
    fn units_left_when_they_did_and_their_elders_on_average() {
        let mut folio = Folio::new(true, 4);
        let start = u32::MAX - 5;
        folio.note_stored(Units::one(0), start);
        folio.note_stored(Units::one(1), start.wrapping_add(20));
        assert_eq!([0, 1].map(|index| folio.left_at(index)), [start, start.wrapping_add(20)]);
        folio.note_stored(Units::from(2..4), start.wrapping_add(100));
        let mean = start.wrapping_add(10);
        let last = start.wrapping_add(100);
        assert_eq!([0, 1, 2, 3].map(|index| folio.left_at(index)), [mean, mean, last, last]);
        // A unit that came back and leaves again is not counted in the mean.
        folio.stored -= Units::one(3);
        folio.just_left -= Units::one(3);
        folio.note_stored(Units::one(3), 1000);
        let mean = start.wrapping_add(40);
        assert_eq!([0, 2, 3].map(|index| folio.left_at(index)), [mean, mean, 1000]);
    }
}
