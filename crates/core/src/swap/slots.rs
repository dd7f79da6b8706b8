//! The slot allocator of one area: which slots are free, and which a CPU takes next.
//!
//! Slots come in **clusters** of 512. A caller takes 2^**order** contiguous slots (order 0 to 9), aligned to
//! as many, so that a folio is written by one transfer. Each CPU has a **current** cluster for each order and
//! takes slots from there in sequence: two CPUs do not meet, and neighbours on the disk are written one after
//! the other. The words are the kernel's, and so are the lists.
//!
//! One cluster's life: it is *free*; a CPU makes it *current*, and it serves that CPU's order from then on; it
//! is *full* when all of its slots are taken, *nonfull* when some of a full one are freed, and *frag* when a
//! CPU has found that no run of its order is left. When its last slot is freed its contents are *discarded*
//! (several clusters together, by whoever calls [`Slots::take_discards`]), and it is free again. A cluster
//! without a slot in use may serve any order.
//!
//! ```text
//!             take                     no slot left
//!   free  ------------->  current  ------------------>  full
//!    ^                     ^   |                          |
//!    | discarded      take |   | no run of its order      | free of a slot
//!    |                     |   v                          v
//!   discard  <-----------  nonfull  <----------------  frag, full
//!             free of the last slot     free of a slot
//! ```
//!
//! A CPU without room in its current cluster takes the first cluster of
//! 1. the nonfull ones of its order, if more of them than there are CPUs wait, or if less than an eighth of
//!    the clusters are empty: a cluster that is being emptied is left alone while there is room elsewhere,
//! 2. the free ones; those that were never used; those that wait to be discarded, without that,
//! 3. the nonfull ones of its order, however few,
//! 4. after all CPUs gave back what they hold for this order or without a slot in use: 1 to 3 again,
//! 5. for order 0 only: the frag ones of orders 1 to 9, the nonfull ones of orders 1 to 9, and the same after
//!    all CPUs gave back what they hold. Such a cluster serves order 0 from then on.
//!
//! So order 0 gets a slot as long as there is one; a larger order gets a run as long as a cluster of its order
//! has one, or a cluster has no slot in use. Otherwise the caller tries a smaller order.
//! `docs/design/slots.md` says why the rules are these.
//!
//! # Invariants
//!
//! - `SLOT-1` A slot is taken by one caller at a time. A free of a slot that is not taken panics.
//! - `SLOT-2` A cluster that is current, nonfull or frag serves one order. All runs that were taken from it
//!   since it was empty have that order, unless order 0 took it over.
//! - `SLOT-3` From [`Slots::take_discards`] to [`Slots::discarded`] no slot of a cluster is taken.
//! - `SLOT-4` A frag cluster has no free run of its order: each free moves it to nonfull. So order `n` never
//!   searches these.
//! - `SLOT-5` From the end of [`Slots::begin_drain`] to [`Slots::end_drain`] no slot is taken.
//!
//! # Concurrency
//!
//! `cpu` (rank 50) -> `cluster` (51) -> `lists` (52). No other lock is taken while one of these is held, and
//! the pool's locks, which have the same ranks, are never held here. A take in the current cluster and a free
//! take the locks of the CPU and of the cluster; the lists are locked only when a cluster changes its place:
//! four times in 512 slots of order 0, if these are freed one after the other.
//!
//! Each step is one critical section, with two exceptions. The place of a cluster is read under the cluster's
//! lock alone, to see whether the lists must be locked; they are then locked, and it is read again (the
//! exact rule is in `cluster`). Slots in use are counted without a common lock (`tally`, and its loom test).
//!
//! The table of clusters grows when a cluster of a new leaf is used for the first time: 4 KiB for each 64 MiB
//! of slots. [`Slots::take`] allocates then, with no lock of this module held. A caller that holds locks of
//! its own calls [`Slots::prepare`] before it takes them. Nothing else allocates, except [`Slots::new`] and
//! [`Slots::grow`].
//!
//! # Cost
//!
//! 128 bytes for each cluster in use (0.006 % of the slots), 24 for each 64 MiB of the area, 640 for each CPU.
//! 45 ns for a take and a free of one slot (`docs/benchmarks/2026-11-24-swap.md`).

#![forbid(unsafe_code)]

mod cluster;
mod counts;
mod lists;
#[cfg(any(test, fuzzing))]
mod model;
#[cfg(any(test, fuzzing))]
pub mod script;
mod table;
mod tally;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::sync::{Guard, Mutex};
pub use cluster::CLUSTER_SLOTS;
use cluster::{Map, Place};
pub use counts::Counts;
use lists::{Lists, Missing, Picked, Reach};
use table::{LEAF_CLUSTERS, Table};
use tally::Tally;

/// The largest order: 2^9 slots are a cluster.
pub const ORDER_MAX: u32 = 9;

/// Orders: 0 to 9.
pub const ORDERS: usize = ORDER_MAX as usize + 1;

/// Rank of a CPU's current clusters. The pool has the same ranks, and neither calls the other.
const RANK_CPU: u8 = 50;
/// Rank of a cluster.
const RANK_CLUSTER: u8 = 51;
/// Rank of the lists.
const RANK_LISTS: u8 = 52;

/// Clusters that are handed out to be discarded under one lock, in the order of their places.
const DISCARD_BATCH: usize = 64;

/// The allocator. The module says how it works.
#[derive(Debug)]
pub struct Slots {
    table: Table,
    cpus: Box<[Cpu]>,
    lists: Mutex<RANK_LISTS, Lists>,
    /// `Lists::slots`, for whoever has no lock.
    total: AtomicU32,
}

/// What one CPU has.
#[derive(Debug)]
#[repr(align(128))]
struct Cpu {
    number: u32,
    current: Mutex<RANK_CPU, Current>,
    tally: Tally,
}

/// A CPU's current clusters.
#[derive(Debug)]
struct Current {
    /// Nothing is taken.
    is_draining: bool,
    of: [Option<At>; ORDERS],
}

/// A current cluster, and the slot at which the search for a run begins.
#[derive(Clone, Copy, Debug)]
struct At {
    cluster: u32,
    next: u32,
}

#[cfg(not(all(test, feature = "loom")))]
const _: () = assert!(size_of::<Cpu>() == 640);

impl Slots {
    /// An area of `slots` slots for `cpus` CPUs.
    #[must_use]
    pub fn new(slots: u32, cpus: usize) -> Slots {
        let cpus = u32::try_from(cpus.max(1)).expect("a machine has fewer than 2^32 CPUs");
        let area = Slots {
            table: Table::new(),
            cpus: (0..cpus).map(Cpu::new).collect(),
            lists: Mutex::new(Lists::new(cpus)),
            total: AtomicU32::new(0),
        };
        area.grow(slots);
        area
    }

    /// Takes 2^`order` contiguous slots, aligned to as many; returns the first. `None`: there is no room
    /// for this order, or the area is drained.
    ///
    /// `cpu` is the number of the caller's CPU, any number. Threads that give the same number may wait for
    /// each other; nothing else depends on it.
    ///
    /// # Panics
    ///
    /// If the order is above 9.
    pub fn take(&self, cpu: usize, order: u32) -> Option<u32> {
        assert!(order <= ORDER_MAX, "order {order} of a run of slots: accepted: 0 to {ORDER_MAX}");
        let cpu = self.cpus.get(cpu).unwrap_or_else(|| &self.cpus[cpu % self.cpus.len()]);
        let (mut reach, mut fresh) = (Reach::Lists, true);
        loop {
            match self.take_on(cpu, order, reach, fresh) {
                Ok(first) => return Some(first),
                Err(Missing::Room) => return None,
                Err(Missing::Table(index)) => fresh = self.table.make(index),
                Err(Missing::Recall(further)) => {
                    self.recall(order, further);
                    reach = further;
                }
            }
        }
    }

    /// Frees the `count` slots from `first` on: a part of a run, a run, or several.
    ///
    /// # Panics
    ///
    /// If one of them is not in use (`SLOT-1`), or not in the area, or if there is none.
    pub fn free(&self, first: u32, count: u32) {
        let total = self.total();
        let end = first.checked_add(count).filter(|end| *end <= total && count > 0);
        let Some(end) = end else { free_outside(first, count, total) };
        let mut at = first;
        while at < end {
            let index = at / CLUSTER_SLOTS;
            let stop = end.min((index * CLUSTER_SLOTS).saturating_add(CLUSTER_SLOTS));
            self.free_in(index, at % CLUSTER_SLOTS, stop - at);
            at = stop;
        }
    }

    /// Adds slots at the end. Allocates.
    ///
    /// # Panics
    ///
    /// If the area would have 2^32 slots or more.
    pub fn grow(&self, slots: u32) {
        let (index, len) = loop {
            let target = self.total().checked_add(slots);
            let target = target.expect("an area has fewer than 2^32 slots");
            self.table.reserve(target.div_ceil(CLUSTER_SLOTS));
            let mut lists = self.lists.lock();
            // Otherwise another thread has added some meanwhile.
            if target.checked_sub(lists.slots) == Some(slots) {
                // The last cluster may have been short.
                let last = lists.slots / CLUSTER_SLOTS;
                lists.slots = target;
                // Relaxed: who frees a slot was told of it by somebody who had the lock.
                self.total.store(target, Relaxed);
                if last >= lists.fresh {
                    return;
                }
                break (last, lists.len_of(last));
            }
        };
        let mut map = self.table.get(index).lock();
        if map.extend(len) {
            self.settle(index, &map);
        }
    }

    /// From now on nothing is taken. What is in use can be listed ([`Slots::in_use`]) and freed. One thread
    /// begins and ends this.
    pub fn begin_drain(&self) {
        for cpu in &self.cpus {
            let mut current = cpu.current.lock();
            self.give_back(&mut current, |_, _| true);
            current.is_draining = true;
        }
    }

    /// From now on slots are taken again.
    pub fn end_drain(&self) {
        for cpu in &self.cpus {
            cpu.current.lock().is_draining = false;
        }
    }

    /// The first slot in use at or after `from`.
    #[must_use]
    pub fn in_use(&self, from: u32) -> Option<u32> {
        let fresh = self.lists.lock().fresh;
        let begin = from / CLUSTER_SLOTS;
        (begin..fresh).find_map(|index| {
            let from = if index == begin { from % CLUSTER_SLOTS } else { 0 };
            let slot = self.table.get(index).lock().first_used(from)?;
            Some(index * CLUSTER_SLOTS + slot)
        })
    }

    /// Slots in use. While others take and free, a number that was right a moment ago or is a little too large.
    #[must_use]
    pub fn used(&self) -> u32 {
        let used = tally::used(self.cpus.iter().map(|cpu| &cpu.tally));
        let total = self.total();
        u32::try_from(used).map_or(total, |used| used.min(total))
    }

    /// Slots of the area.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total.load(Relaxed)
    }

    /// Hands out up to `most` clusters whose contents are not needed any more, with no lock held: the oldest
    /// first, those that are found together in rising order. Each range is one cluster, or what the area has
    /// of it. Nothing of it is taken before [`Slots::discarded`] has the same range.
    pub fn take_discards(&self, most: usize, each: &mut dyn FnMut(Range<u32>)) {
        let mut left = most;
        loop {
            let mut found = [0; DISCARD_BATCH];
            let mut count = 0;
            let mut lists = self.lists.lock();
            while count < left.min(DISCARD_BATCH) {
                let Some(index) = lists.next_discard(&self.table) else { break };
                found[count] = index;
                count += 1;
            }
            let slots = lists.slots;
            drop(lists);
            if count == 0 {
                return;
            }
            left -= count;
            found[..count].sort_unstable();
            for index in &found[..count] {
                let first = index * CLUSTER_SLOTS;
                each(first..first.saturating_add(CLUSTER_SLOTS).min(slots));
            }
        }
    }

    /// A cluster that was handed out is discarded: its slots are taken again. Neighbours may be joined to one
    /// range.
    ///
    /// # Panics
    ///
    /// If the range is empty, or a cluster in it was not handed out.
    pub fn discarded(&self, cluster: Range<u32>) {
        let Range { start, end } = cluster;
        let is_range = start % CLUSTER_SLOTS == 0 && start < end && end <= self.total();
        assert!(is_range, "SLOT-3: slots {start}..{end} are said to be discarded: no cluster");
        for index in start / CLUSTER_SLOTS..end.div_ceil(CLUSTER_SLOTS) {
            self.lists.lock().discarded(&self.table, index);
        }
    }

    /// Makes the table for the next clusters that are used for the first time, unless it exists: after this
    /// 32 of them can be used before a take allocates. For callers that hold locks while they take slots.
    pub fn prepare(&self) {
        let (fresh, clusters) = {
            let lists = self.lists.lock();
            (lists.fresh, lists.clusters())
        };
        for index in [fresh, fresh.saturating_add(LEAF_CLUSTERS)] {
            if index < clusters && !self.table.make(index) {
                return;
            }
        }
    }

    /// From now on there is, or is not, memory for a table of clusters. Returns how often there was none.
    #[cfg(any(test, fuzzing))]
    pub(super) fn refuse_memory(&self, refuses: bool) -> u64 {
        self.table.refuses.store(refuses, Relaxed);
        self.table.refused.load(Relaxed)
    }

    /// What was counted up to now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.lists.lock().add_to(&mut counts);
        self.cpus.iter().for_each(|cpu| cpu.tally.add_to(&mut counts));
        counts
    }
}

/// The steps.
impl Slots {
    /// Takes a run from the CPU's current cluster of this order; if that has none, from others, as far as
    /// `reach` allows.
    fn take_on(&self, cpu: &Cpu, order: u32, reach: Reach, fresh: bool) -> Result<u32, Missing> {
        let mut current = cpu.current.lock();
        if current.is_draining {
            return Err(Missing::Room);
        }
        loop {
            let at = &mut current.of[order as usize];
            if let Some(first) = self.take_from(at, order) {
                cpu.tally.count_taken(order);
                return Ok(first);
            }
            let picked = self.lists.lock().pick(&self.table, order, reach, fresh);
            match picked {
                Ok(picked) => *at = Some(self.adopt(picked, cpu, order)),
                Err(missing) => {
                    if missing == Missing::Room {
                        cpu.tally.count_refused(order);
                    }
                    return Err(missing);
                }
            }
        }
    }

    /// Takes a run from a current cluster. The cluster goes on a list, and the CPU has none, if it has no run,
    /// or if this one was its last slot.
    fn take_from(&self, at: &mut Option<At>, order: u32) -> Option<u32> {
        let At { cluster: index, next } = (*at)?;
        let mut map = self.table.get(index).lock();
        let Some(first) = map.find(order, next) else {
            *at = None;
            self.put_back(index, &map);
            return None;
        };
        let count = 1 << order;
        map.take(first, count);
        if map.is_full() {
            *at = None;
            self.put_back(index, &map);
        } else {
            *at = Some(At { cluster: index, next: (first + count) % CLUSTER_SLOTS });
        }
        Some(index * CLUSTER_SLOTS + first)
    }

    /// Makes a cluster that was picked serve a CPU.
    fn adopt(&self, picked: Picked, cpu: &Cpu, order: u32) -> At {
        let Picked { index, len } = picked;
        let mut map = self.table.get(index).lock();
        map.extend(len);
        map.order = order;
        map.owner = cpu.number;
        At { cluster: index, next: 0 }
    }

    /// Puts a cluster that its CPU holds no longer on the list where it belongs.
    fn put_back(&self, index: u32, map: &Guard<'_, RANK_CLUSTER, Map>) {
        let to = if map.used() == 0 {
            None
        } else if map.is_full() {
            Some(Place::Full)
        } else if map.find(map.order, 0).is_none() {
            Some(Place::Frag)
        } else {
            Some(Place::Nonfull)
        };
        let mut lists = self.lists.lock();
        let to = to.unwrap_or_else(|| lists.place_of_empty());
        lists.relocate(&self.table, index, map.order, to);
    }

    /// Frees slots of one cluster.
    fn free_in(&self, index: u32, from: u32, count: u32) {
        let Some(cluster) = self.table.find(index) else { free_of_free(index, from) };
        let mut map = cluster.lock();
        if let Err(slot) = map.free(from, count) {
            drop(map);
            free_of_free(index, slot);
        }
        self.cpus[map.owner as usize].tally.count_freed(count);
        match cluster.place() {
            Place::Current => {}
            Place::Nonfull if map.used() > 0 => {}
            _ => self.settle(index, &map),
        }
    }

    /// Moves a cluster that has more free slots now to the list where it belongs, if it is on one for clusters
    /// with slots in use.
    fn settle(&self, index: u32, map: &Guard<'_, RANK_CLUSTER, Map>) {
        let mut lists = self.lists.lock();
        let from = self.table.get(index).place();
        let to = match from {
            Place::Nonfull | Place::Frag | Place::Full if map.used() == 0 => lists.place_of_empty(),
            Place::Frag | Place::Full => Place::Nonfull,
            Place::Nonfull => return,
            // With somebody: a CPU may have taken it from its list just now.
            Place::Current | Place::Discarding | Place::Free | Place::Discard => return,
        };
        lists.relocate(&self.table, index, map.order, to);
    }

    /// Has all CPUs put back the clusters that are of use to a take of this order: with [`Reach::Order`] those
    /// of its order and those without a slot in use, with [`Reach::All`] all.
    #[cold]
    fn recall(&self, order: u32, reach: Reach) {
        for cpu in &self.cpus {
            let mut current = cpu.current.lock();
            self.give_back(&mut current, |of, map| {
                reach == Reach::All || of == order || map.used() == 0
            });
        }
    }

    /// Puts back the current clusters of a CPU that `is_wanted`, which gets order and map.
    fn give_back(&self, current: &mut Current, is_wanted: impl Fn(u32, &Map) -> bool) {
        for (order, at) in (0..).zip(&mut current.of) {
            let Some(At { cluster: index, .. }) = *at else { continue };
            let map = self.table.get(index).lock();
            if is_wanted(order, &map) {
                *at = None;
                self.put_back(index, &map);
            }
        }
    }
}

impl Cpu {
    fn new(number: u32) -> Cpu {
        Cpu {
            number,
            current: Mutex::new(Current { is_draining: false, of: [None; ORDERS] }),
            tally: Tally::new(),
        }
    }
}

#[cold]
#[inline(never)]
fn free_of_free(index: u32, slot: u32) -> ! {
    let slot = index * CLUSTER_SLOTS + slot;
    panic!("SLOT-1: slot {slot} is freed, and is not in use");
}

#[cold]
#[inline(never)]
fn free_outside(first: u32, count: u32, total: u32) -> ! {
    panic!("SLOT-1: {count} slots are freed from slot {first} on; the area has {total}");
}
