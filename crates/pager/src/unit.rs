//! The unit table: for every managed unit, where it is.
//!
//! ```text
//!            touch                capture               compress
//!   Empty ----------> Resident <----------> Staged ----------------> Stored
//!     ^                  |  ^      touch                                |
//!     |    MADV_DONTNEED |  +-------------------------------------------+
//!     +------------------+                 touch: decompress
//! ```
//!
//! # Invariants
//!
//! - `UNIT-1` A page that is missing in a `Resident` or `Unmanaged` unit reads as zeros; in a `Staged`
//!   or `Stored` unit every page is missing.
//! - `UNIT-2` `Stored` has a copy. A `Resident` or `Staged` unit may have one: the copy it came from,
//!   good for as long as the unit's checksum is the copy's.
//! - `UNIT-3` An address is in the queue of resident units at most once (`queued`).
//!
//! # Concurrency
//!
//! The table is read by faults and reclaim and written when mappings change; a unit has its lock.
//!
//! # Cost
//!
//! 48 bytes a unit: 0.07 % of 64 KiB.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::page::UnitOrder;
use zfolio_core::sync::Mutex;
use zfolio_core::zswap::Entry;

use crate::rank;
use crate::staging::Full;

/// Where a unit is.
#[derive(Debug)]
pub(crate) enum State {
    /// The kernel's alone: pinned, or at the edge of what is left of a mapping.
    Unmanaged,
    /// Never touched, or dropped by the program: reads as zeros.
    Empty,
    /// Mapped in the program, as far as it was touched.
    Resident,
    /// In a slot of the staging area.
    Staged(Full),
    /// In the store only.
    Stored,
}

/// One unit.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) state: State,
    pub(crate) copy: Option<Entry>,
    /// In the queue of resident units, perhaps stale.
    pub(crate) queued: bool,
    /// Brought back before it was asked for.
    pub(crate) prefetched: bool,
    /// When it was captured last (`Resident::capture_time`).
    pub(crate) captured: u32,
}

/// A unit under its lock.
pub(crate) type UnitLock = Mutex<{ rank::UNIT }, Unit>;

const _: () = assert!(size_of::<UnitLock>() <= 48);

/// Address space covered by one leaf of the table.
const LEAF_BYTES: usize = 64 << 20;

/// The table.
#[derive(Debug)]
pub(crate) struct Table {
    unit: UnitOrder,
    /// Managed ranges, whole units, by their start: what is registered.
    ranges: BTreeMap<usize, usize>,
    leaves: BTreeMap<usize, OnceLock<Box<[UnitLock]>>>,
    leaves_made: AtomicUsize,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(unit: UnitOrder) -> Table {
        Table {
            unit,
            ranges: BTreeMap::new(),
            leaves: BTreeMap::new(),
            leaves_made: AtomicUsize::new(0),
        }
    }

    /// The unit that `address` lies in, if it is managed or was.
    pub(crate) fn get(&self, address: usize) -> Option<&UnitLock> {
        let number = address / LEAF_BYTES;
        let leaf = self.leaves.get(&number)?.get_or_init(|| self.new_leaf(number));
        leaf.get(address % LEAF_BYTES / self.unit.bytes())
    }

    /// Units of address space that was managed when they were made: empty, until something is found.
    fn new_leaf(&self, number: usize) -> Box<[UnitLock]> {
        let first = number * LEAF_BYTES;
        let units = (first..first + LEAF_BYTES).step_by(self.unit.bytes());
        self.leaves_made.fetch_add(1, Relaxed);
        units
            .map(|address| {
                let state = if self.manages(address) { State::Empty } else { State::Unmanaged };
                Mutex::new(Unit {
                    state,
                    copy: None,
                    queued: false,
                    prefetched: false,
                    captured: 0,
                })
            })
            .collect()
    }

    /// Whether `address` is in a managed range.
    pub(crate) fn manages(&self, address: usize) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, end)| address < *end)
    }

    /// The first address of the unit that `address` lies in.
    pub(crate) fn align_down(&self, address: usize) -> usize {
        address & !(self.unit.bytes() - 1)
    }

    /// The whole units inside a range: its managed interior.
    pub(crate) fn interior(&self, start: usize, end: usize) -> (usize, usize) {
        let first = start.next_multiple_of(self.unit.bytes());
        (first, self.align_down(end).max(first))
    }

    /// The units of a range that are in the table, by address; the range is widened to whole units.
    pub(crate) fn units(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &UnitLock)> {
        let step = self.unit.bytes();
        (self.align_down(start)..end).step_by(step).filter_map(|at| Some((at, self.get(at)?)))
    }

    /// The same, without those that were never looked at: address space that is only reserved costs
    /// nothing.
    pub(crate) fn known_units(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &UnitLock)> {
        let (first, step) = (self.align_down(start), self.unit.bytes());
        self.leaves.range(start / LEAF_BYTES..end.div_ceil(LEAF_BYTES)).flat_map(
            move |(number, leaf)| {
                let base = number * LEAF_BYTES;
                let units = leaf.get().map_or(&[][..], |leaf| &leaf[..]);
                let placed =
                    units.iter().enumerate().map(move |(index, unit)| (base + index * step, unit));
                placed.filter(move |(at, _)| (first..end).contains(at))
            },
        )
    }

    /// Managed ranges.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranges.iter().map(|(start, end)| (*start, *end))
    }

    /// Notes a range as managed. Its units are made when they are first looked at.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.remove(start, end);
        self.ranges.insert(start, end);
        for leaf in start / LEAF_BYTES..end.div_ceil(LEAF_BYTES) {
            self.leaves.entry(leaf).or_default();
        }
    }

    /// Forgets that a range is managed. Its units stay in the table.
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
        let leaves = self.leaves_made.load(Relaxed) * (LEAF_BYTES / self.unit.bytes());
        leaves * size_of::<UnitLock>() + self.leaves.len() * size_of::<OnceLock<Box<[UnitLock]>>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        Table::new(UnitOrder::DEFAULT)
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
    fn the_interior_is_whole_units() {
        let table = table();
        assert_eq!(table.interior(BASE + 1, BASE + 3 * UNIT - 1), (BASE + UNIT, BASE + 2 * UNIT));
        assert_eq!(table.interior(BASE + 1, BASE + 2).0, table.interior(BASE + 1, BASE + 2).1);
    }

    #[test]
    fn every_address_of_a_range_finds_its_unit() {
        let mut table = table();
        table.insert(BASE + 1000 * UNIT, BASE + 1100 * UNIT);
        assert_eq!(table.units(BASE + 1000 * UNIT, BASE + 1100 * UNIT).count(), 100);
        assert!(table.get(BASE + 1050 * UNIT + 5).is_some());
        assert!(table.get(BASE - 1).is_none());
    }
}
