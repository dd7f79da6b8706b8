//! The lists of clusters, and which cluster a CPU gets next.
//!
//! # Invariants
//!
//! - `LIST-1` A cluster below `fresh` is on the list of its place, or, if it is `Current` or `Discarding`, on
//!   none. One at `fresh` or above was never used, and is on none.
//!
//! # Concurrency
//!
//! All of it belongs to whoever holds the lock of the lists.

use super::ORDERS;
use super::cluster::{CLUSTER_SLOTS, Cluster, Place, link, set_link};
use super::counts::Counts;
use super::table::Table;

/// While this part of the clusters has no slot in use, nonfull ones may wait.
pub(super) const EMPTY_PART: u32 = 8;

/// Clusters in a row: indices plus one, 0 if there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct List {
    head: u32,
    tail: u32,
    pub(super) len: u32,
}

impl List {
    /// The first cluster.
    fn first(&self) -> Option<u32> {
        self.head.checked_sub(1)
    }

    /// The last cluster.
    fn last(&self) -> Option<u32> {
        self.tail.checked_sub(1)
    }

    /// Puts a cluster last.
    fn push(&mut self, table: &Table, index: u32) {
        let cluster = table.get(index);
        set_link(&cluster.previous, self.tail);
        set_link(&cluster.next, 0);
        match self.last() {
            Some(last) => set_link(&table.get(last).next, index + 1),
            None => self.head = index + 1,
        }
        self.tail = index + 1;
        self.len += 1;
    }

    /// Takes a cluster out.
    fn remove(&mut self, table: &Table, cluster: &Cluster) {
        let (previous, next) = (link(&cluster.previous), link(&cluster.next));
        match previous.checked_sub(1) {
            Some(previous) => set_link(&table.get(previous).next, next),
            None => self.head = next,
        }
        match next.checked_sub(1) {
            Some(next) => set_link(&table.get(next).previous, previous),
            None => self.tail = previous,
        }
        self.len -= 1;
    }

    /// The clusters, first to last.
    #[cfg(any(test, fuzzing))]
    pub(super) fn iter<'t>(&self, table: &'t Table) -> impl Iterator<Item = u32> + 't {
        std::iter::successors(self.first(), |index| link(&table.get(*index).next).checked_sub(1))
    }
}

/// How far a CPU goes to find a cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Reach {
    /// The lists of its order, and clusters without a slot in use.
    Lists,
    /// The CPUs have given back the clusters that they held for this order or without a slot in use. Order
    /// 0 may go on to lists of larger orders.
    Order,
    /// They have given back all.
    All,
}

/// What kept a CPU from a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Missing {
    /// The table of this cluster, which was never used.
    Table(u32),
    /// The clusters that CPUs hold. The caller recalls them, and asks again with this reach.
    Recall(Reach),
    /// Nothing: there is no room.
    Room,
}

/// A cluster for a CPU. It is `Current` already.
#[derive(Clone, Copy, Debug)]
pub(super) struct Picked {
    pub(super) index: u32,
    /// How many slots it has.
    pub(super) len: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lists {
    /// Slots of the area.
    pub(super) slots: u32,
    /// The first cluster that was never used.
    pub(super) fresh: u32,
    /// The number of CPUs. With fewer free clusters the area is short of them.
    cpus: u32,
    pub(super) free: List,
    pub(super) nonfull: [List; ORDERS],
    pub(super) frag: [List; ORDERS],
    pub(super) full: List,
    pub(super) discard: List,
    /// Clusters that somebody discards.
    discarding: u32,
    /// Clusters that CPUs hold.
    pub(super) current: u32,
    discards: u64,
    discards_skipped: u64,
    steals: u64,
}

impl Lists {
    /// The lists of an area without slots.
    pub(super) fn new(cpus: u32) -> Lists {
        Lists {
            slots: 0,
            fresh: 0,
            cpus,
            free: List::default(),
            nonfull: [List::default(); ORDERS],
            frag: [List::default(); ORDERS],
            full: List::default(),
            discard: List::default(),
            discarding: 0,
            current: 0,
            discards: 0,
            discards_skipped: 0,
            steals: 0,
        }
    }

    /// Clusters of the area.
    pub(super) fn clusters(&self) -> u32 {
        self.slots.div_ceil(CLUSTER_SLOTS)
    }

    /// Slots of a cluster: 512, or fewer in the last one.
    pub(super) fn len_of(&self, index: u32) -> u32 {
        (self.slots - index * CLUSTER_SLOTS).min(CLUSTER_SLOTS)
    }

    /// Free clusters, those that were never used among them.
    fn free_clusters(&self) -> u32 {
        self.free.len + self.clusters() - self.fresh
    }

    /// The list of a place. A cluster's order stays while it is on a list.
    fn list(&mut self, place: Place, order: u32) -> Option<&mut List> {
        match place {
            Place::Free => Some(&mut self.free),
            Place::Nonfull => Some(&mut self.nonfull[order as usize]),
            Place::Frag => Some(&mut self.frag[order as usize]),
            Place::Full => Some(&mut self.full),
            Place::Discard => Some(&mut self.discard),
            Place::Discarding | Place::Current => None,
        }
    }

    /// How many clusters are at a place that has no list.
    fn count(&mut self, place: Place) -> &mut u32 {
        if place == Place::Current { &mut self.current } else { &mut self.discarding }
    }

    /// Moves a cluster of this order from where it is to another place: to the end of the list, if that has
    /// one.
    pub(super) fn relocate(&mut self, table: &Table, index: u32, order: u32, to: Place) {
        let cluster = table.get(index);
        let from = cluster.place();
        match self.list(from, order) {
            Some(list) => list.remove(table, cluster),
            None => *self.count(from) -= 1,
        }
        self.place(table, index, order, to);
    }

    /// Puts a cluster that is nowhere at a place.
    fn place(&mut self, table: &Table, index: u32, order: u32, to: Place) {
        match self.list(to, order) {
            Some(list) => list.push(table, index),
            None => *self.count(to) += 1,
        }
        table.get(index).set_place(to);
    }

    /// Where a cluster goes whose last slot was freed: to be discarded; or, if the area is short of free
    /// clusters and others wait to be discarded already, to the free ones as it is.
    pub(super) fn place_of_empty(&mut self) -> Place {
        if self.free_clusters() < self.cpus && self.discard.len > 0 {
            self.discards_skipped += 1;
            return Place::Free;
        }
        Place::Discard
    }

    /// Finds a cluster for a CPU that needs 2^`order` slots, in this order: nonfull and ripe, free, never
    /// used, waiting to be discarded, nonfull; after the CPUs gave back what they held, the same again; and for
    /// order 0 the lists of larger orders. With `fresh` false no cluster is used for the first time.
    ///
    /// The order that a cluster serves is the caller's to set, and that of a stolen one was another.
    pub(super) fn pick(
        &mut self,
        table: &Table,
        order: u32,
        reach: Reach,
        fresh: bool,
    ) -> Result<Picked, Missing> {
        let nonfull = self.nonfull[order as usize].first();
        if let Some(index) = nonfull.filter(|_| self.is_ripe(order)) {
            return Ok(self.make_current(table, index, order));
        }
        if let Some(index) = self.first_free(table, order) {
            return Ok(self.make_current(table, index, order));
        }
        if fresh && self.fresh < self.clusters() && self.fits(self.fresh, order) {
            return self.first_use(table);
        }
        if let Some(index) = self.last_discard(table, order) {
            self.discards_skipped += 1;
            return Ok(self.make_current(table, index, order));
        }
        if let Some(index) = nonfull {
            return Ok(self.make_current(table, index, order));
        }
        if reach == Reach::Lists && self.current > 0 {
            return Err(Missing::Recall(Reach::Order));
        }
        if order > 0 {
            return Err(Missing::Room);
        }
        if let Some((index, from)) = self.first_of_larger() {
            self.steals += 1;
            return Ok(self.make_current(table, index, from));
        }
        if reach < Reach::All && self.current > 0 {
            return Err(Missing::Recall(Reach::All));
        }
        Err(Missing::Room)
    }

    /// Whether the first nonfull cluster of an order is used before empty ones: if it has become nonfull before
    /// as many others as there are CPUs, or if less than an eighth of the clusters are empty.
    ///
    /// A cluster becomes nonfull when the first of its slots is freed, and often the others follow soon. If it
    /// were used at once, it would be filled slot by slot while it is emptied, with two changes of its place for
    /// each slot, and often by another CPU than the one that frees (10 instead of 22 million pairs of take and
    /// free a second on one thread with 4096 slots in use, and 9 instead of 41 million on two).
    fn is_ripe(&self, order: u32) -> bool {
        self.nonfull[order as usize].len > self.cpus
            || self.free_clusters() + self.discard.len < self.clusters().div_ceil(EMPTY_PART)
    }

    /// Whether a cluster without a slot in use has a run of this order. The last one may be too short.
    fn fits(&self, index: u32, order: u32) -> bool {
        self.len_of(index) >= 1 << order
    }

    /// The free cluster that was freed first and is long enough: the first or the second one.
    fn first_free(&self, table: &Table, order: u32) -> Option<u32> {
        let first = self.free.first()?;
        if self.fits(first, order) {
            return Some(first);
        }
        link(&table.get(first).next).checked_sub(1)
    }

    /// The cluster that waits for the shortest time to be discarded, and is long enough.
    fn last_discard(&self, table: &Table, order: u32) -> Option<u32> {
        let last = self.discard.last()?;
        if self.fits(last, order) {
            return Some(last);
        }
        link(&table.get(last).previous).checked_sub(1)
    }

    /// A cluster that order 0 takes from another order: one that has no run of its order, else one of the
    /// smallest order.
    fn first_of_larger(&self) -> Option<(u32, u32)> {
        let first = |lists: &[List; ORDERS]| {
            (1..).zip(&lists[1..]).find_map(|(order, list)| Some((list.first()?, order)))
        };
        first(&self.frag).or_else(|| first(&self.nonfull))
    }

    /// Takes the next cluster that was never used.
    fn first_use(&mut self, table: &Table) -> Result<Picked, Missing> {
        let index = self.fresh;
        let Some(cluster) = table.find(index) else { return Err(Missing::Table(index)) };
        self.fresh += 1;
        self.current += 1;
        cluster.set_place(Place::Current);
        Ok(Picked { index, len: self.len_of(index) })
    }

    /// Gives a cluster, which is on a list of this order, to a CPU.
    fn make_current(&mut self, table: &Table, index: u32, order: u32) -> Picked {
        self.relocate(table, index, order, Place::Current);
        Picked { index, len: self.len_of(index) }
    }

    /// Hands out a cluster that waits to be discarded: its index, and its slots.
    pub(super) fn next_discard(&mut self, table: &Table) -> Option<u32> {
        let index = self.discard.first()?;
        self.relocate(table, index, 0, Place::Discarding);
        Some(index)
    }

    /// A cluster that was handed out has been discarded.
    pub(super) fn discarded(&mut self, table: &Table, index: u32) {
        let handed_out = table.find(index).is_some_and(|it| it.place() == Place::Discarding);
        assert!(
            handed_out,
            "SLOT-3: slot {} is said to be discarded, and nobody was to do that",
            index * CLUSTER_SLOTS
        );
        self.relocate(table, index, 0, Place::Free);
        self.discards += 1;
    }

    /// The counts of lists.
    pub(super) fn add_to(&self, counts: &mut Counts) {
        counts.free = self.free_clusters();
        counts.nonfull = self.nonfull.map(|list| list.len);
        counts.frag = self.frag.map(|list| list.len);
        counts.full = self.full.len;
        counts.discard = self.discard.len;
        counts.discarding = self.discarding;
        counts.current = self.current;
        counts.discards = self.discards;
        counts.discards_skipped = self.discards_skipped;
        counts.steals = self.steals;
    }
}
