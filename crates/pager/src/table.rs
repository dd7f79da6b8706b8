//! The folio table: for every managed unit, where it is.
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
//!   that is missing in a resident unit, or in an unmanaged folio, reads as zeros; in any other unit
//!   every page is missing.
//! - `UNIT-2` A stored unit has a copy. A resident or staged unit may have one: the copy it came from,
//!   good for as long as the unit's checksum is the copy's.
//! - `UNIT-3` A folio is in the queue of resident folios at most once (`queued`).
//! - `UNIT-4` While something of a folio is staged, nothing of it is resident.
//!
//! # Concurrency
//!
//! The table is read by faults and reclaim and written when mappings change; a folio has its lock.
//!
//! # Cost
//!
//! 64 bytes a folio and 24 a unit: 0.13 % of 64 KiB units, 0.7 % of 4 KiB.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::sync::{Guard, Mutex};
use zfolio_core::zswap::Entry;

use crate::rank;
use crate::shape::{Shape, Units};
use crate::staging::Full;

/// One folio.
#[derive(Debug)]
pub(crate) struct Folio {
    /// False: the kernel's alone, pinned, or at the edge of what is left of a mapping.
    pub(crate) managed: bool,
    /// In the queue of resident folios, perhaps stale.
    pub(crate) queued: bool,
    /// Mapped in the program, as far as they were touched.
    pub(crate) resident: Units,
    /// In the store only.
    pub(crate) stored: Units,
    /// In a slot of the staging area.
    pub(crate) staged: Option<Full>,
    /// When it was captured last (`Resident::capture_time`).
    pub(crate) captured: u32,
    /// For each unit.
    pub(crate) copies: Box<[Option<Entry>]>,
}

impl Folio {
    fn new(managed: bool, units: usize) -> Folio {
        Folio {
            managed,
            queued: false,
            resident: Units::NONE,
            stored: Units::NONE,
            staged: None,
            captured: 0,
            copies: (0..units).map(|_| None).collect(),
        }
    }

    /// Whether nothing was ever written, or all of it dropped.
    pub(crate) fn is_empty(&self) -> bool {
        self.resident.is_empty() && self.stored.is_empty() && self.staged.is_none()
    }
}

/// A folio under its lock.
pub(crate) type FolioLock = Mutex<{ rank::FOLIO }, Folio>;

/// A folio locked.
pub(crate) type Held<'a> = Guard<'a, { rank::FOLIO }, Folio>;

const _: () = assert!(size_of::<FolioLock>() <= 64);

/// Address space covered by one leaf of the table.
const LEAF_BYTES: usize = 64 << 20;

/// What an allocator adds to a block of its own.
const ALLOCATION_BYTES: usize = 8;

/// The table.
#[derive(Debug)]
pub(crate) struct Table {
    shape: Shape,
    /// Managed ranges, whole folios, by their start: what is registered.
    ranges: BTreeMap<usize, usize>,
    leaves: BTreeMap<usize, OnceLock<Box<[FolioLock]>>>,
    leaves_made: AtomicUsize,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(shape: Shape) -> Table {
        Table {
            shape,
            ranges: BTreeMap::new(),
            leaves: BTreeMap::new(),
            leaves_made: AtomicUsize::new(0),
        }
    }

    /// The folio that `address` lies in, if it is managed or was.
    pub(crate) fn get(&self, address: usize) -> Option<&FolioLock> {
        let number = address / LEAF_BYTES;
        let leaf = self.leaves.get(&number)?.get_or_init(|| self.new_leaf(number));
        leaf.get(address % LEAF_BYTES / self.shape.folio_bytes())
    }

    /// Folios of address space that was managed when they were made: empty, until something is found.
    fn new_leaf(&self, number: usize) -> Box<[FolioLock]> {
        let first = number * LEAF_BYTES;
        let folios = (first..first + LEAF_BYTES).step_by(self.shape.folio_bytes());
        self.leaves_made.fetch_add(1, Relaxed);
        folios
            .map(|address| Mutex::new(Folio::new(self.manages(address), self.shape.units())))
            .collect()
    }

    /// Whether `address` is in a managed range.
    pub(crate) fn manages(&self, address: usize) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, end)| address < *end)
    }

    /// The whole folios inside a range: its managed interior.
    pub(crate) fn interior(&self, start: usize, end: usize) -> (usize, usize) {
        let first = self.shape.base_above(start);
        (first, self.shape.base(end).max(first))
    }

    /// A range widened to whole folios.
    pub(crate) fn exterior(&self, start: usize, end: usize) -> (usize, usize) {
        (self.shape.base(start), self.shape.base_above(end))
    }

    /// The folios of a range that are in the table, by address; the range is widened to whole folios.
    pub(crate) fn folios(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &FolioLock)> {
        let step = self.shape.folio_bytes();
        (self.shape.base(start)..end).step_by(step).filter_map(|at| Some((at, self.get(at)?)))
    }

    /// The same, without those that were never looked at: address space that is only reserved costs
    /// nothing.
    pub(crate) fn known_folios(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &FolioLock)> {
        let (first, step) = (self.shape.base(start), self.shape.folio_bytes());
        self.leaves.range(start / LEAF_BYTES..end.div_ceil(LEAF_BYTES)).flat_map(
            move |(number, leaf)| {
                let base = number * LEAF_BYTES;
                let folios = leaf.get().map_or(&[][..], |leaf| &leaf[..]);
                let placed = folios
                    .iter()
                    .enumerate()
                    .map(move |(index, folio)| (base + index * step, folio));
                placed.filter(move |(at, _)| (first..end).contains(at))
            },
        )
    }

    /// Managed ranges.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranges.iter().map(|(start, end)| (*start, *end))
    }

    /// Notes a range as managed. Its folios are made when they are first looked at.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.remove(start, end);
        self.ranges.insert(start, end);
        for leaf in start / LEAF_BYTES..end.div_ceil(LEAF_BYTES) {
            self.leaves.entry(leaf).or_default();
        }
    }

    /// Forgets that a range is managed. Its folios stay in the table.
    pub(crate) fn remove(&mut self, start: usize, end: usize) {
        let touched: Vec<(usize, usize)> = self
            .ranges
            .range(..end)
            .rev()
            .take_while(|(_, e)| **e > start)
            .map(|(s, e)| (*s, *e))
            .collect();
        for (old_start, old_end) in touched {
            self.ranges.remove(&old_start);
            if old_start < start {
                self.ranges.insert(old_start, start);
            }
            if old_end > end {
                self.ranges.insert(end, old_end);
            }
        }
    }

    /// Bytes under management.
    pub(crate) fn managed_bytes(&self) -> usize {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    /// Bytes of the table itself.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let folios = self.leaves_made.load(Relaxed) * (LEAF_BYTES / self.shape.folio_bytes());
        let copies = self.shape.units() * size_of::<Option<Entry>>() + ALLOCATION_BYTES;
        folios * (size_of::<FolioLock>() + copies)
            + self.leaves.len() * size_of::<OnceLock<Box<[FolioLock]>>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zfolio_core::page::UnitOrder;

    fn table() -> Table {
        Table::new(Shape::new(UnitOrder::DEFAULT))
    }

    const BASE: usize = 0x7000_0000_0000;
    const UNIT: usize = 65536;

    #[test]
    fn removing_the_middle_leaves_both_ends() {
        let mut table = table();
        table.insert(BASE, BASE + 10 * UNIT);
        table.remove(BASE + 3 * UNIT, BASE + 5 * UNIT);
        let left: Vec<_> = table.ranges().collect();
        assert_eq!(left, [(BASE, BASE + 3 * UNIT), (BASE + 5 * UNIT, BASE + 10 * UNIT)]);
        assert_eq!(table.managed_bytes(), 8 * UNIT);
    }

    #[test]
    fn inserting_over_a_range_does_not_count_it_twice() {
        let mut table = table();
        table.insert(BASE, BASE + 4 * UNIT);
        table.insert(BASE + 2 * UNIT, BASE + 6 * UNIT);
        assert_eq!(table.managed_bytes(), 6 * UNIT);
    }

    #[test]
    fn the_interior_is_whole_folios() {
        let table = table();
        assert_eq!(table.interior(BASE + 1, BASE + 3 * UNIT - 1), (BASE + UNIT, BASE + 2 * UNIT));
        assert_eq!(table.interior(BASE + 1, BASE + 2).0, table.interior(BASE + 1, BASE + 2).1);
    }

    #[test]
    fn every_address_of_a_range_finds_its_folio() {
        let mut table = table();
        table.insert(BASE + 1000 * UNIT, BASE + 1100 * UNIT);
        assert_eq!(table.folios(BASE + 1000 * UNIT, BASE + 1100 * UNIT).count(), 100);
        assert!(table.get(BASE + 1050 * UNIT + 5).is_some());
        assert!(table.get(BASE - 1).is_none());
    }
}
