//! The folio table: a folio by its address.
//!
//! # Concurrency
//!
//! Faults and reclaim hold the table for reading; it is held for writing when mappings change. Each
//! folio has its own lock.
//!
//! # Cost
//!
//! 72 bytes a folio and 4 a unit: 0.12 % with units of 64 KiB, 0.21 % with 4 KiB. A stored unit
//! costs 28 bytes more in the store. Folios are made in groups of eight when one of the group is
//! first looked at. So address space that is only reserved costs next to nothing (74 KiB for 1
//! TiB), and a mapping of 256 KiB far from all others (V8 has hundreds of these) costs 1.8 KiB at
//! units of 16 KiB: 0.7 %.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::ranges::Ranges;
use zfolio_core::store::EntryId;
use zfolio_core::sync::Mutex;

use super::{Folio, FolioLock, Geometry};
use crate::wide::Use;

/// Adjacent folios that are made together.
const GROUP_FOLIOS: usize = 8;

/// Groups in a leaf: 16 MiB of address space in folios of 64 KiB.
const LEAF_GROUPS: usize = 32;

/// Folios in a leaf.
const LEAF_FOLIOS: usize = GROUP_FOLIOS * LEAF_GROUPS;

/// Leaves in a branch: 512 MiB of address space in folios of 64 KiB. More leaves would make a
/// mapping far from all others expensive; fewer would make reserved address space expensive.
const BRANCH_LEAVES: usize = 32;

/// What the allocator adds to each block.
const ALLOCATION_BYTES: usize = 8;

type Group = [FolioLock; GROUP_FOLIOS];

/// Made when one of its folios is first looked at. `OnceLock`, since the table is only read then.
type Leaf = OnceLock<Box<Folios>>;

/// What a leaf has: folios, and how their units are used.
#[derive(Debug)]
struct Folios {
    groups: [OnceLock<Box<Group>>; LEAF_GROUPS],
    region: Use,
}

/// Made when one of its leaves is first looked at: MariaDB reserves 8 TiB, which would take half a
/// million leaves.
type Branch = OnceLock<Box<[Leaf; BRANCH_LEAVES]>>;

/// The table.
#[derive(Debug)]
pub(crate) struct Table {
    geometry: Geometry,
    /// The managed ranges: whole folios.
    ranges: Ranges,
    /// The ranges that may be managed, exact to the page, adjacent ranges joined. A folio is
    /// managed if all of it is in these ranges, whether it lies in one mapping or in several.
    covered: Ranges,
    /// The key is the address divided by the bytes that a branch covers.
    branches: BTreeMap<usize, Branch>,
    branches_made: AtomicUsize,
    leaves_made: AtomicUsize,
    groups_made: AtomicUsize,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(geometry: Geometry) -> Table {
        Table {
            geometry,
            ranges: Ranges::new(),
            covered: Ranges::new(),
            branches: BTreeMap::new(),
            branches_made: AtomicUsize::new(0),
            leaves_made: AtomicUsize::new(0),
            groups_made: AtomicUsize::new(0),
        }
    }

    fn leaf_bytes(&self) -> usize {
        LEAF_FOLIOS * self.geometry.folio_bytes()
    }

    fn group_bytes(&self) -> usize {
        GROUP_FOLIOS * self.geometry.folio_bytes()
    }

    fn branch_bytes(&self) -> usize {
        BRANCH_LEAVES * self.leaf_bytes()
    }

    /// The keys of the branches that a range lies in.
    fn branch_numbers(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        start / self.branch_bytes()..end.div_ceil(self.branch_bytes())
    }

    /// The folio that `address` lies in; it is made if necessary. `None`: no memory near `address`
    /// is managed.
    pub(crate) fn get(&self, address: usize) -> Option<&FolioLock> {
        let branch = self.branches.get(&(address / self.branch_bytes()))?;
        let leaves = branch.get_or_init(|| {
            self.branches_made.fetch_add(1, Relaxed);
            Box::new([const { OnceLock::new() }; BRANCH_LEAVES])
        });
        let leaf = leaves.get(address % self.branch_bytes() / self.leaf_bytes())?;
        let leaf = leaf.get_or_init(|| {
            self.leaves_made.fetch_add(1, Relaxed);
            let groups = [const { OnceLock::new() }; LEAF_GROUPS];
            Box::new(Folios { groups, region: Use::default() })
        });
        let group = leaf.groups.get(address % self.leaf_bytes() / self.group_bytes())?;
        let start = address - address % self.group_bytes();
        let folios = group.get_or_init(|| self.new_group(start));
        folios.get((address - start) / self.geometry.folio_bytes())
    }

    /// The folio that `address` lies in, if it was made already.
    pub(crate) fn known(&self, address: usize) -> Option<&FolioLock> {
        let leaf = self.leaf(address)?;
        let group = leaf.groups.get(address % self.leaf_bytes() / self.group_bytes())?.get()?;
        group.get(address % self.group_bytes() / self.geometry.folio_bytes())
    }

    /// The region that `address` lies in, if any of its folios was made.
    pub(crate) fn region(&self, address: usize) -> Option<&Use> {
        self.leaf(address).map(|leaf| &leaf.region)
    }

    fn leaf(&self, address: usize) -> Option<&Folios> {
        let leaves = self.branches.get(&(address / self.branch_bytes()))?.get()?;
        leaves.get(address % self.branch_bytes() / self.leaf_bytes())?.get().map(Box::as_ref)
    }

    /// The folio that `address` lies in, if it was made already. The caller has the table for
    /// writing, so the folio's lock is not needed.
    pub(crate) fn known_mut(&mut self, address: usize) -> Option<&mut Folio> {
        let (leaf_bytes, group_bytes) = (self.leaf_bytes(), self.group_bytes());
        let (branch_bytes, index) =
            (self.branch_bytes(), address % group_bytes / self.geometry.folio_bytes());
        let leaves = self.branches.get_mut(&(address / branch_bytes))?.get_mut()?;
        let leaf = leaves.get_mut(address % branch_bytes / leaf_bytes)?.get_mut()?;
        let group = leaf.groups.get_mut(address % leaf_bytes / group_bytes)?.get_mut()?;
        Some(group.get_mut(index)?.get_mut())
    }

    /// Makes the folios of a group; all are empty. Those in managed ranges are managed.
    fn new_group(&self, start: usize) -> Box<Group> {
        self.groups_made.fetch_add(1, Relaxed);
        Box::new(std::array::from_fn(|index| {
            let address = start + index * self.geometry.folio_bytes();
            Mutex::new(Folio::new(self.manages(address), self.geometry.units()))
        }))
    }

    /// Whether `address` is in a managed range.
    pub(crate) fn manages(&self, address: usize) -> bool {
        self.ranges.contains(address)
    }

    /// The whole folios inside a range: its managed interior.
    pub(crate) fn interior(&self, start: usize, end: usize) -> (usize, usize) {
        let first = self.geometry.base_above(start);
        (first, self.geometry.base(end).max(first))
    }

    /// A range widened to whole folios.
    pub(crate) fn exterior(&self, start: usize, end: usize) -> (usize, usize) {
        (self.geometry.base(start), self.geometry.base_above(end))
    }

    /// The folios of a range, widened to whole folios, in rising order. They are made if necessary.
    pub(crate) fn folios(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &FolioLock)> {
        let step = self.geometry.folio_bytes();
        (self.geometry.base(start)..end).step_by(step).filter_map(|at| Some((at, self.get(at)?)))
    }

    /// Like [`Table::folios`], without folios that were never made: address space that is only
    /// reserved costs nothing.
    pub(crate) fn known_folios(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &FolioLock)> {
        let first = self.geometry.base(start);
        let branches = self.branches.range(self.branch_numbers(start, end));
        let leaves = branches.flat_map(move |(number, branch)| {
            let base = number * self.branch_bytes();
            let leaves = branch.get().into_iter().flat_map(|leaves| leaves.iter());
            let place = move |index| base + index * self.leaf_bytes();
            let placed = leaves.enumerate().map(move |(index, leaf)| (place(index), leaf));
            placed.filter(move |(base, _)| *base < end && base + self.leaf_bytes() > first)
        });
        leaves.flat_map(move |(base, leaf)| {
            let groups = leaf.get().into_iter().flat_map(|leaf| leaf.groups.iter());
            groups.enumerate().flat_map(move |(index, group)| {
                let base = base + index * self.group_bytes();
                let folios = group.get().into_iter().flat_map(|folios| folios.iter());
                let place = move |index| base + index * self.geometry.folio_bytes();
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
        for branch in self.branch_numbers(start, end) {
            self.branches.entry(branch).or_default();
        }
    }

    /// Notes that a range may be managed; returns the joined range that it is part of now.
    pub(crate) fn cover(&mut self, start: usize, end: usize) -> (usize, usize) {
        self.covered.join(start, end);
        self.covered.around(start).unwrap_or((start, end))
    }

    /// The parts of a range that are known to be manageable.
    pub(crate) fn covered(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        self.covered.pieces(start, end).collect()
    }

    /// Whether all of a range is known to be manageable.
    pub(crate) fn covers(&self, start: usize, end: usize) -> bool {
        self.covered.bytes_in(start, end) == end - start
    }

    /// The parts of a range that are not known to be manageable yet.
    pub(crate) fn uncovered(&self, start: usize, end: usize) -> Ranges {
        self.covered.gaps(start, end)
    }

    /// The parts of a range that are not managed.
    pub(crate) fn unmanaged(&self, start: usize, end: usize) -> Ranges {
        self.ranges.gaps(start, end)
    }

    /// Forgets that a range may be managed: it is unmapped, or left to the kernel.
    pub(crate) fn uncover(&mut self, start: usize, end: usize) {
        self.covered.remove(start, end);
    }

    /// Forgets that a range is managed. Its folios stay in the table.
    pub(crate) fn remove(&mut self, start: usize, end: usize) {
        self.ranges.remove(start, end);
    }

    /// Forgets a range that is unmapped, or left to the kernel. A folio of which it has a part is managed no more.
    pub(crate) fn forget(&mut self, start: usize, end: usize) {
        let (first, last) = self.exterior(start, end);
        self.uncover(start, end);
        self.remove(first, last);
        self.prune(first, last);
    }

    /// Frees the folios of a range that was unmapped, except those that share a group with managed
    /// memory.
    pub(crate) fn prune(&mut self, start: usize, end: usize) {
        let branch_bytes = self.branch_bytes();
        let branches = self.branches.range_mut(self.branch_numbers(start, end));
        // The branches are taken out while they are pruned, so that `self.ranges` can be borrowed.
        let taken: Vec<_> =
            branches.map(|(number, branch)| (*number, std::mem::take(branch))).collect();
        for (number, mut branch) in taken {
            let base = number * branch_bytes;
            let is_used = self.ranges.overlap(base, base + branch_bytes);
            // All leaves of an unused branch are freed.
            let (start, end) = if is_used { (start, end) } else { (base, base + branch_bytes) };
            let leaves = branch.get_mut().into_iter().flat_map(|leaves| leaves.iter_mut());
            for (index, leaf) in leaves.enumerate() {
                self.prune_leaf(leaf, base + index * self.leaf_bytes(), start, end);
            }
            if is_used {
                self.branches.insert(number, branch);
                continue;
            }
            self.branches.remove(&number);
            if branch.get().is_some() {
                self.branches_made.fetch_sub(1, Relaxed);
            }
        }
    }

    /// [`Table::prune`] for the leaf that begins at `base`.
    fn prune_leaf(&self, leaf: &mut Leaf, base: usize, start: usize, end: usize) {
        let (leaf_bytes, group_bytes) = (self.leaf_bytes(), self.group_bytes());
        let touched = |from: usize, bytes: usize| from < end && from + bytes > start;
        let Some(folios) = leaf.get_mut().filter(|_| touched(base, leaf_bytes)) else { return };
        let whole = !self.ranges.overlap(base, base + leaf_bytes);
        for (index, group) in folios.groups.iter_mut().enumerate() {
            let from = base + index * group_bytes;
            if whole || touched(from, group_bytes) && !self.ranges.overlap(from, from + group_bytes)
            {
                self.prune_group(group);
            }
        }
        if whole {
            *leaf = OnceLock::new();
            self.leaves_made.fetch_sub(1, Relaxed);
        }
    }

    fn prune_group(&self, group: &mut OnceLock<Box<Group>>) {
        if let Some(mut folios) = group.take() {
            self.groups_made.fetch_sub(1, Relaxed);
            // The caller has dropped the contents of all these folios.
            debug_assert!(folios.iter_mut().all(|folio| folio.get_mut().keeps_nothing()));
        }
    }

    /// Bytes under management.
    pub(crate) fn managed_bytes(&self) -> usize {
        self.ranges.bytes()
    }

    /// Bytes of the table itself.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let copies = self.geometry.units() * size_of::<Option<EntryId>>() + ALLOCATION_BYTES;
        let group = size_of::<Group>() + GROUP_FOLIOS * copies + ALLOCATION_BYTES;
        let leaf = size_of::<Folios>() + ALLOCATION_BYTES;
        let branch = BRANCH_LEAVES * size_of::<Leaf>() + ALLOCATION_BYTES;
        self.groups_made.load(Relaxed) * group
            + self.leaves_made.load(Relaxed) * leaf
            + self.branches_made.load(Relaxed) * branch
            // A key and a branch each; nodes of the tree are two thirds full on average.
            + self.branches.len() * (size_of::<usize>() + size_of::<Branch>()) * 3 / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folio::Units;
    use zfolio_core::page::UnitOrder;

    fn table() -> Table {
        Table::new(Geometry::new(UnitOrder::DEFAULT))
    }

    const BASE: usize = 0x7000_0000_0000;
    const UNIT: usize = 65536;

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

    /// Goal: even a lot of address space costs next to nothing while it is only reserved.
    #[test]
    fn eight_tebibytes_reserved_take_less_than_a_mebibyte() {
        let mut table = table();
        table.insert(BASE, BASE + (8 << 40));
        assert!(table.metadata_bytes() < 600 << 10, "{}", table.metadata_bytes());
        table.get(BASE + (5 << 40)).expect("managed").lock().resident = Units::one(0);
        assert_eq!(table.known_folios(BASE, BASE + (8 << 40)).count(), GROUP_FOLIOS);
        assert!(table.metadata_bytes() < 602 << 10);
    }

    /// Goal: a freed branch is no longer counted, even if folios of an earlier range were still in
    /// it.
    #[test]
    fn a_branch_goes_with_all_that_is_in_it() {
        let mut table = table();
        table.insert(BASE, BASE + 100 * UNIT);
        table.get(BASE).expect("managed");
        table.remove(BASE, BASE + 100 * UNIT);
        let far = BASE + 4 * LEAF_FOLIOS * UNIT;
        table.insert(far, far + UNIT);
        table.get(far).expect("managed");
        table.remove(far, far + UNIT);
        table.prune(far, far + UNIT);
        assert_eq!(table.metadata_bytes(), 0);
    }

    /// Goal: while ranges come and go, the table knows which are managed, and frees the folios of
    /// the others. Method: a plain set of folio numbers beside the table.
    #[test]
    fn ranges_that_come_and_go_agree_with_a_set() {
        const FOLIOS: usize = 3 * LEAF_FOLIOS;
        // Half of it in one branch, half in the next.
        let first = BASE - FOLIOS / 2 * UNIT;
        let at = |folio: usize| first + folio * UNIT;
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
            let told: Vec<usize> = looked.map(|(base, _)| (base - at(0)) / UNIT).collect();
            assert!(told.is_sorted());
            assert!(managed.iter().all(|folio| told.binary_search(folio).is_ok()));
            assert!(told.len() <= GROUP_FOLIOS * managed.len());
        }
        table.remove(at(0), at(FOLIOS));
        table.prune(at(0), at(FOLIOS));
        assert_eq!(table.metadata_bytes(), 0);
    }
}
