//! The naive model of an area: a `bool` for each slot, and the rules of the module as they are written there.
//! For tests.

use std::collections::VecDeque;

use super::cluster::Place;
use super::lists::EMPTY_PART;
use super::table::LEAF_CLUSTERS;
use super::{CLUSTER_SLOTS, Counts, ORDER_MAX, ORDERS, Slots};

const LEN: usize = CLUSTER_SLOTS as usize;

/// A cluster of the model.
#[derive(Clone, Debug)]
struct Cluster {
    /// One for each slot that exists.
    taken: Vec<bool>,
    place: Place,
    order: u32,
}

impl Cluster {
    fn used(&self) -> usize {
        self.taken.iter().filter(|taken| **taken).count()
    }

    /// The first free run at or after `from`, else the first of all.
    fn find(&self, order: u32, from: usize) -> Option<usize> {
        let count = 1 << order;
        let is_free = |first: &usize| {
            first + count <= self.taken.len() && self.taken[*first..][..count].iter().all(|it| !it)
        };
        let places = || (0..LEN).step_by(count);
        places().filter(|first| *first >= from).find(is_free).or_else(|| places().find(is_free))
    }
}

/// The area of the model.
#[derive(Debug)]
pub(super) struct Model {
    clusters: Vec<Cluster>,
    /// The clusters that were ever used.
    fresh: usize,
    /// Leaves that exist, and whether more can be made.
    leaves: usize,
    pub(super) refuses: bool,
    free: VecDeque<usize>,
    nonfull: Vec<VecDeque<usize>>,
    frag: Vec<VecDeque<usize>>,
    full: VecDeque<usize>,
    discard: VecDeque<usize>,
    /// For each CPU and order the current cluster, and where the search begins.
    current: Vec<[Option<(usize, usize)>; ORDERS]>,
    pub(super) is_draining: bool,
    counts: Counts,
}

impl Model {
    pub(super) fn new(slots: usize, cpus: usize) -> Model {
        let mut model = Model {
            clusters: Vec::new(),
            fresh: 0,
            leaves: 0,
            refuses: false,
            free: VecDeque::new(),
            nonfull: vec![VecDeque::new(); ORDERS],
            frag: vec![VecDeque::new(); ORDERS],
            full: VecDeque::new(),
            discard: VecDeque::new(),
            current: vec![[None; ORDERS]; cpus],
            is_draining: false,
            counts: Counts::default(),
        };
        model.grow(slots);
        model
    }

    pub(super) fn total(&self) -> usize {
        self.clusters.iter().map(|cluster| cluster.taken.len()).sum()
    }

    pub(super) fn used(&self) -> usize {
        self.clusters.iter().map(Cluster::used).sum()
    }

    pub(super) fn in_use(&self, from: usize) -> Option<usize> {
        let taken = |slot: &usize| self.clusters[*slot / LEN].taken[*slot % LEN];
        (from..self.total()).find(taken)
    }

    pub(super) fn grow(&mut self, slots: usize) {
        for _ in 0..slots {
            if self.clusters.last().is_none_or(|last| last.taken.len() == LEN) {
                self.clusters.push(Cluster { taken: Vec::new(), place: Place::Free, order: 0 });
            }
            let last = self.clusters.len() - 1;
            self.clusters[last].taken.push(false);
            if matches!(self.clusters[last].place, Place::Frag | Place::Full) {
                self.relocate(last, Place::Nonfull);
            }
        }
    }

    /// Takes a run as the rules say.
    pub(super) fn take(&mut self, cpu: usize, order: u32) -> Option<usize> {
        if self.is_draining {
            return None;
        }
        let at = order as usize;
        let cpu = cpu % self.current.len();
        let first = loop {
            if let Some((index, next)) = self.current[cpu][at] {
                if let Some(first) = self.clusters[index].find(order, next) {
                    break index * LEN + first;
                }
                self.current[cpu][at] = None;
                self.put_back(index);
                continue;
            }
            let Some(index) = self.pick(order) else {
                self.counts.swpout_fallback[at] += 1;
                return None;
            };
            self.clusters[index].order = order;
            self.current[cpu][at] = Some((index, 0));
        };
        let (index, count) = (first / LEN, 1 << order);
        self.clusters[index].taken[first % LEN..][..count].fill(true);
        self.current[cpu][at] = Some((index, (first + count) % LEN));
        if self.clusters[index].taken.iter().all(|taken| *taken) {
            self.current[cpu][at] = None;
            self.put_back(index);
        }
        self.counts.swpout[at] += 1;
        Some(first)
    }

    /// The cluster that a CPU gets.
    fn pick(&mut self, order: u32) -> Option<usize> {
        if let Some(index) = self.pick_own(order) {
            return Some(index);
        }
        self.recall(|cluster| cluster.order == order || cluster.used() == 0);
        if let Some(index) = self.pick_own(order) {
            return Some(index);
        }
        if order > 0 {
            return None;
        }
        if let Some(index) = self.steal() {
            return Some(index);
        }
        self.recall(|_| true);
        self.pick_own(order).or_else(|| self.steal())
    }

    /// Makes the tables for the next 32 clusters.
    pub(super) fn prepare(&mut self) {
        let leaf = LEAF_CLUSTERS as usize;
        for index in [self.fresh, self.fresh + leaf] {
            if index < self.clusters.len() && !self.refuses {
                self.leaves = self.leaves.max(index / leaf + 1);
            }
        }
    }

    /// A cluster of this order, or without a slot in use.
    fn pick_own(&mut self, order: u32) -> Option<usize> {
        let fits = |index: &&usize| self.clusters[**index].taken.len() >= 1 << order;
        let fresh = Some(self.fresh).filter(|fresh| *fresh < self.clusters.len());
        let leaf = self.fresh / LEAF_CLUSTERS as usize;
        let fresh = fresh.filter(|fresh| fits(&fresh) && (leaf < self.leaves || !self.refuses));
        let nonfull = &self.nonfull[order as usize];
        let empty = self.free_clusters() + self.discard.len();
        let is_scarce = empty < self.clusters.len().div_ceil(EMPTY_PART as usize);
        let ripe = nonfull.front().filter(|_| nonfull.len() > self.current.len() || is_scarce);
        if let Some(index) = ripe.or_else(|| self.free.iter().find(fits)).copied() {
            self.relocate(index, Place::Current);
            return Some(index);
        }
        if let Some(index) = fresh {
            self.leaves = self.leaves.max(leaf + 1);
            self.fresh += 1;
            self.clusters[index].place = Place::Current;
            return Some(index);
        }
        let waiting = self.discard.iter().rfind(fits);
        self.counts.discards_skipped += u64::from(waiting.is_some());
        let index = waiting.or_else(|| self.nonfull[order as usize].front()).copied()?;
        self.relocate(index, Place::Current);
        Some(index)
    }

    /// A cluster of a larger order, for order 0.
    fn steal(&mut self) -> Option<usize> {
        let first =
            |lists: &[VecDeque<usize>]| lists[1..].iter().find_map(|list| list.front().copied());
        let index = first(&self.frag).or_else(|| first(&self.nonfull))?;
        self.counts.steals += 1;
        self.relocate(index, Place::Current);
        Some(index)
    }

    fn recall(&mut self, is_wanted: impl Fn(&Cluster) -> bool) {
        for cpu in 0..self.current.len() {
            for order in 0..ORDERS {
                let Some((index, _)) = self.current[cpu][order] else { continue };
                if is_wanted(&self.clusters[index]) {
                    self.current[cpu][order] = None;
                    self.put_back(index);
                }
            }
        }
    }

    fn put_back(&mut self, index: usize) {
        let cluster = &self.clusters[index];
        let to = match cluster.used() {
            0 => self.place_of_empty(),
            used if used == cluster.taken.len() => Place::Full,
            _ if cluster.find(cluster.order, 0).is_none() => Place::Frag,
            _ => Place::Nonfull,
        };
        self.relocate(index, to);
    }

    fn place_of_empty(&mut self) -> Place {
        if self.free_clusters() < self.current.len() && !self.discard.is_empty() {
            self.counts.discards_skipped += 1;
            return Place::Free;
        }
        Place::Discard
    }

    fn free_clusters(&self) -> usize {
        self.free.len() + self.clusters.len() - self.fresh
    }

    pub(super) fn free(&mut self, first: usize, count: usize) {
        let mut at = first;
        while at < first + count {
            let (index, end) = (at / LEN, (at / LEN * LEN + LEN).min(first + count));
            for slot in at..end {
                assert!(std::mem::take(&mut self.clusters[index].taken[slot % LEN]), "slot {slot}");
            }
            at = end;
            let to = match self.clusters[index].place {
                Place::Current => continue,
                _ if self.clusters[index].used() == 0 => self.place_of_empty(),
                Place::Nonfull => continue,
                _ => Place::Nonfull,
            };
            self.relocate(index, to);
        }
    }

    pub(super) fn begin_drain(&mut self) {
        self.recall(|_| true);
        self.is_draining = true;
    }

    /// The clusters that are handed out: the oldest, in rising order.
    pub(super) fn take_discards(&mut self, most: usize) -> Vec<usize> {
        let count = most.min(self.discard.len());
        let mut all: Vec<usize> = self.discard.iter().copied().take(count).collect();
        all.iter().for_each(|index| self.relocate(*index, Place::Discarding));
        all.chunks_mut(super::DISCARD_BATCH).for_each(<[usize]>::sort_unstable);
        all
    }

    pub(super) fn discarded(&mut self, index: usize) {
        self.counts.discards += 1;
        self.relocate(index, Place::Free);
    }

    /// The slots of a cluster.
    pub(super) fn range(&self, index: usize) -> std::ops::Range<usize> {
        index * LEN..index * LEN + self.clusters[index].taken.len()
    }

    /// Moves a cluster to the end of the list of a place.
    fn relocate(&mut self, index: usize, to: Place) {
        for lists in [&mut self.nonfull, &mut self.frag] {
            lists.iter_mut().for_each(|list| list.retain(|other| *other != index));
        }
        for list in [&mut self.free, &mut self.full, &mut self.discard] {
            list.retain(|other| *other != index);
        }
        let cluster = &mut self.clusters[index];
        cluster.place = to;
        match to {
            Place::Free => self.free.push_back(index),
            Place::Nonfull => self.nonfull[cluster.order as usize].push_back(index),
            Place::Frag => self.frag[cluster.order as usize].push_back(index),
            Place::Full => self.full.push_back(index),
            Place::Discard => self.discard.push_back(index),
            Place::Discarding | Place::Current => {}
        }
    }

    /// What must be true of the slots alone, whatever the lists say, when an order was refused: no cluster
    /// without a slot in use is long enough, but for those that are being discarded or have no table; no
    /// cluster of the order has a run; and for order 0 no slot is free anywhere else.
    pub(super) fn assert_no_room(&self, order: u32) {
        for (index, cluster) in self.clusters.iter().enumerate() {
            let is_out_of_reach = cluster.place == Place::Discarding
                || index >= self.leaves * LEAF_CLUSTERS as usize
                || index >= self.fresh && self.refuses;
            let may_serve = order == 0 || cluster.order == order || cluster.used() == 0;
            let run = if may_serve { cluster.find(order, 0) } else { None };
            assert!(is_out_of_reach || run.is_none(), "order {order}, {run:?} of cluster {index}");
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let len = |list: &VecDeque<usize>| u32::try_from(list.len()).expect("few");
        let at = |place| self.clusters[..self.fresh].iter().filter(move |it| it.place == place);
        let count = |place| u32::try_from(at(place).count()).expect("few");
        let mut counts = self.counts;
        counts.free = u32::try_from(self.free_clusters()).expect("few");
        for order in 0..ORDERS {
            counts.nonfull[order] = len(&self.nonfull[order]);
            counts.frag[order] = len(&self.frag[order]);
        }
        counts.full = len(&self.full);
        counts.discard = len(&self.discard);
        counts.discarding = count(Place::Discarding);
        counts.current = count(Place::Current);
        counts
    }
}

/// Whether lists, maps and counts of an area agree. Nobody uses it meanwhile.
pub(super) fn check(area: &Slots) {
    let mut listed = 0;
    let (fresh, clusters, free) = {
        let lists = area.lists.lock();
        let one = [(Place::Free, 0), (Place::Full, 0), (Place::Discard, 0)];
        let by_order = |place| (0..=ORDER_MAX).map(move |order| (place, order));
        let all = by_order(Place::Nonfull).chain(by_order(Place::Frag)).chain(one);
        for (place, order) in all {
            let list = match place {
                Place::Free => &lists.free,
                Place::Nonfull => &lists.nonfull[order as usize],
                Place::Frag => &lists.frag[order as usize],
                Place::Full => &lists.full,
                _ => &lists.discard,
            };
            let found = list.iter(&area.table).take(1 + lists.fresh as usize);
            let right = found.filter(|index| area.table.get(*index).place() == place).count();
            assert_eq!(right, list.len as usize, "LIST-1: {place:?} of order {order}");
            listed += list.len;
        }
        (lists.fresh, lists.clusters(), lists.free.len)
    };
    let (mut used, mut current, mut discarding) = (0, 0, 0);
    for index in 0..fresh {
        let cluster = area.table.get(index);
        let map = cluster.lock();
        map.check();
        used += map.used();
        let run = map.find(map.order, 0).is_some();
        let is_right = match cluster.place() {
            Place::Free | Place::Discard | Place::Discarding => map.used() == 0,
            Place::Full => map.is_full(),
            Place::Nonfull => !map.is_full() && map.used() > 0,
            Place::Frag => !map.is_full() && map.used() > 0 && !run,
            Place::Current => !map.is_full(),
        };
        assert!(is_right, "SLOT-2, SLOT-4: cluster {index}, {:?}: {map:?}", cluster.place());
        current += u32::from(cluster.place() == Place::Current);
        discarding += u32::from(cluster.place() == Place::Discarding);
    }
    let held = area.cpus.iter().map(|cpu| cpu.current.lock().of.iter().flatten().count());
    assert_eq!(held.sum::<usize>(), current as usize, "clusters of CPUs");
    assert_eq!(area.used(), used, "slots in use");
    let counts = area.counts();
    assert_eq!((counts.current, counts.discarding), (current, discarding));
    assert_eq!(counts.free, free + clusters - fresh);
    assert_eq!(listed + current + discarding, fresh, "LIST-1: clusters");
}
