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
//! The table is read by faults and reclaim and written when mappings change; a folio has its lock.
//!
//! # Cost
//!
//! 64 bytes a folio and 24 a unit: 0.13 % of 64 KiB units, 0.7 % of 4 KiB. Folios are made by eights
//! when one of them is first looked at, so that address space which is only reserved costs next to
//! nothing (2.3 MiB for 1 TiB), and a mapping of 256 KiB far from all others (V8 has them by the
//! hundred) 1.9 KiB at units of 16 KiB: 0.7 %.

use std::collections::BTreeMap;
use std::ops::BitOr as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::ranges::Ranges;
use zfolio_core::sync::{Guard, Mutex};
use zfolio_core::zswap::Entry;

use crate::mover::Full;
use crate::rank;
use crate::shape::{Shape, Units};

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
    pub(crate) copies: Box<[Option<Entry>]>,
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
            |(index, copy): (usize, &Option<Entry>)| copy.as_ref().map(|_| Units::one(index));
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

/// Folios side by side that are made together.
const CLUSTER_FOLIOS: usize = 8;

/// Clusters in a leaf: 16 MiB of address space in folios of 64 KiB.
const LEAF_CLUSTERS: usize = 32;

/// Folios in a leaf.
const LEAF_FOLIOS: usize = CLUSTER_FOLIOS * LEAF_CLUSTERS;

/// What an allocator adds to a block of its own.
const ALLOCATION_BYTES: usize = 8;

type Cluster = [FolioLock; CLUSTER_FOLIOS];

/// Made when one of its folios is first looked at, by whoever only reads the table.
type Leaf = OnceLock<Box<[OnceLock<Box<Cluster>>; LEAF_CLUSTERS]>>;

/// The table.
#[derive(Debug)]
pub(crate) struct Table {
    shape: Shape,
    /// Managed, whole folios: what is registered.
    ranges: Ranges,
    /// What may be managed, to the page: neighbours joined. A folio all of which is here is managed, be
    /// it of one mapping or of several.
    covered: Ranges,
    /// By address over bytes covered.
    leaves: BTreeMap<usize, Leaf>,
    leaves_made: AtomicUsize,
    clusters_made: AtomicUsize,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(shape: Shape) -> Table {
        Table {
            shape,
            ranges: Ranges::new(),
            covered: Ranges::new(),
            leaves: BTreeMap::new(),
            leaves_made: AtomicUsize::new(0),
            clusters_made: AtomicUsize::new(0),
        }
    }

    fn leaf_bytes(&self) -> usize {
        LEAF_FOLIOS * self.shape.folio_bytes()
    }

    fn cluster_bytes(&self) -> usize {
        CLUSTER_FOLIOS * self.shape.folio_bytes()
    }

    /// The leaves that a range lies in.
    fn leaf_numbers(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        start / self.leaf_bytes()..end.div_ceil(self.leaf_bytes())
    }

    /// The folio that `address` lies in, if it is managed or was, or lies near such memory.
    pub(crate) fn get(&self, address: usize) -> Option<&FolioLock> {
        let leaf = self.leaves.get(&(address / self.leaf_bytes()))?;
        let clusters = leaf.get_or_init(|| {
            self.leaves_made.fetch_add(1, Relaxed);
            Box::new([const { OnceLock::new() }; LEAF_CLUSTERS])
        });
        let cluster = clusters.get(address % self.leaf_bytes() / self.cluster_bytes())?;
        let start = address - address % self.cluster_bytes();
        let folios = cluster.get_or_init(|| self.new_cluster(start));
        folios.get((address - start) / self.shape.folio_bytes())
    }

    /// The same, if it was ever looked at.
    pub(crate) fn known(&self, address: usize) -> Option<&FolioLock> {
        let clusters = self.leaves.get(&(address / self.leaf_bytes()))?.get()?;
        let cluster = clusters.get(address % self.leaf_bytes() / self.cluster_bytes())?.get()?;
        cluster.get(address % self.cluster_bytes() / self.shape.folio_bytes())
    }

    /// The same for whoever holds the table alone.
    pub(crate) fn known_mut(&mut self, address: usize) -> Option<&mut Folio> {
        let (leaf_bytes, cluster_bytes) = (self.leaf_bytes(), self.cluster_bytes());
        let index = address % cluster_bytes / self.shape.folio_bytes();
        let clusters = self.leaves.get_mut(&(address / leaf_bytes))?.get_mut()?;
        let cluster = clusters.get_mut(address % leaf_bytes / cluster_bytes)?.get_mut()?;
        Some(cluster.get_mut(index)?.get_mut())
    }

    /// Folios of address space that was managed when they were made: empty, until something is found.
    fn new_cluster(&self, start: usize) -> Box<Cluster> {
        self.clusters_made.fetch_add(1, Relaxed);
        Box::new(std::array::from_fn(|index| {
            let address = start + index * self.shape.folio_bytes();
            Mutex::new(Folio::new(self.manages(address), self.shape.units()))
        }))
    }

    /// Whether `address` is in a managed range.
    pub(crate) fn manages(&self, address: usize) -> bool {
        self.ranges.contains(address)
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
        let first = self.shape.base(start);
        self.leaves.range(self.leaf_numbers(start, end)).flat_map(move |(number, leaf)| {
            let base = number * self.leaf_bytes();
            let clusters = leaf.get().into_iter().flat_map(|clusters| clusters.iter());
            clusters.enumerate().flat_map(move |(index, cluster)| {
                let base = base + index * self.cluster_bytes();
                let folios = cluster.get().into_iter().flat_map(|folios| folios.iter());
                let place = move |index| base + index * self.shape.folio_bytes();
                let placed = folios.enumerate().map(move |(index, lock)| (place(index), lock));
                placed.filter(move |(at, _)| (first..end).contains(at))
            })
        })
    }

    /// Managed ranges.
    pub(crate) fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// Notes a range as managed. Its folios are made when they are first looked at.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.ranges.insert(start, end);
        for leaf in self.leaf_numbers(start, end) {
            self.leaves.entry(leaf).or_default();
        }
    }

    /// Notes that a range may be managed; tells what it is a part of now, neighbours joined.
    pub(crate) fn cover(&mut self, start: usize, end: usize) -> (usize, usize) {
        self.covered.join(start, end);
        self.covered.around(start).unwrap_or((start, end))
    }

    /// Forgets that a range may be managed: it is unmapped, or the kernel's alone from now on.
    pub(crate) fn uncover(&mut self, start: usize, end: usize) {
        self.covered.remove(start, end);
    }

    /// Forgets that a range is managed. Its folios stay in the table.
    pub(crate) fn remove(&mut self, start: usize, end: usize) {
        self.ranges.remove(start, end);
    }

    /// Gives back the folios of a range that is unmapped, except where something near is managed.
    pub(crate) fn prune(&mut self, start: usize, end: usize) {
        let (leaf_bytes, cluster_bytes) = (self.leaf_bytes(), self.cluster_bytes());
        let leaves = self.leaves.range(self.leaf_numbers(start, end));
        let numbers: Vec<usize> = leaves.map(|(number, _)| *number).collect();
        for number in numbers {
            let base = number * leaf_bytes;
            let whole = !self.ranges.overlap(base, base + leaf_bytes);
            for from in (base..base + leaf_bytes).step_by(cluster_bytes) {
                let touched = from < end && from + cluster_bytes > start;
                if whole || touched && !self.ranges.overlap(from, from + cluster_bytes) {
                    self.prune_cluster(number, (from - base) / cluster_bytes);
                }
            }
            let leaf = if whole { self.leaves.remove(&number) } else { None };
            if leaf.is_some_and(|leaf| leaf.get().is_some()) {
                self.leaves_made.fetch_sub(1, Relaxed);
            }
        }
    }

    fn prune_cluster(&mut self, leaf: usize, index: usize) {
        let clusters = self.leaves.get_mut(&leaf).and_then(OnceLock::get_mut);
        if let Some(mut cluster) = clusters.and_then(|all| all[index].take()) {
            self.clusters_made.fetch_sub(1, Relaxed);
            // Who unmaps has dropped them all.
            debug_assert!(cluster.iter_mut().all(|folio| folio.get_mut().keeps_nothing()));
        }
    }

    /// Bytes under management.
    pub(crate) fn managed_bytes(&self) -> usize {
        self.ranges.bytes()
    }

    /// Bytes of the table itself.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let copies = self.shape.units() * size_of::<Option<Entry>>() + ALLOCATION_BYTES;
        let cluster = size_of::<Cluster>() + CLUSTER_FOLIOS * copies + ALLOCATION_BYTES;
        let leaf = LEAF_CLUSTERS * size_of::<OnceLock<Box<Cluster>>>() + ALLOCATION_BYTES;
        self.clusters_made.load(Relaxed) * cluster
            + self.leaves_made.load(Relaxed) * leaf
            // The number and the leaf; nodes of the tree are two thirds full.
            + self.leaves.len() * (size_of::<usize>() + size_of::<Leaf>()) * 3 / 2
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

    /// Goal: whatever comes and goes, the table knows what is managed, and keeps nothing of the rest.
    #[test]
    fn ranges_that_come_and_go_agree_with_a_set() {
        const FOLIOS: usize = 3 * LEAF_FOLIOS;
        let at = |folio: usize| BASE + folio * UNIT;
        let (mut table, mut managed) = (table(), std::collections::BTreeSet::new());
        let mut random = 42_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 33).map_or(0, |number| number % below)
        };
        for _ in 0..2000 {
            let first = next(FOLIOS);
            let last = (first + 1 + next(40)).min(FOLIOS);
            if next(2) == 0 {
                table.insert(at(first), at(last));
                for (_, lock) in table.folios(at(first), at(last)) {
                    lock.lock().managed = true;
                }
                managed.extend(first..last);
            } else {
                for (_, lock) in table.known_folios(at(first), at(last)) {
                    lock.lock().managed = false;
                }
                table.remove(at(first), at(last));
                table.prune(at(first), at(last));
                managed.retain(|folio| !(first..last).contains(folio));
            }
            assert_eq!(table.managed_bytes(), managed.len() * UNIT);
            let folio = next(FOLIOS);
            let known = table.known(at(folio)).is_some_and(|lock| lock.lock().managed);
            assert_eq!(known, managed.contains(&folio));
            assert_eq!(table.manages(at(folio)), known);
            let looked = table.known_folios(at(0), at(FOLIOS));
            let told: Vec<usize> = looked.map(|(base, _)| (base - BASE) / UNIT).collect();
            assert!(told.is_sorted());
            assert!(managed.iter().all(|folio| told.binary_search(folio).is_ok()));
            assert!(told.len() <= CLUSTER_FOLIOS * managed.len());
        }
        table.remove(at(0), at(FOLIOS));
        table.prune(at(0), at(FOLIOS));
        assert_eq!(table.metadata_bytes(), 0);
    }
}
