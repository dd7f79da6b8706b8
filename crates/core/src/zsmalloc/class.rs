//! One size class: its zspages by fullness, and which object goes where.
//!
//! Zspages that are neither full nor gone are in one list per **fullness group**, the kernel's
//! twelve: 0 (no object in use: kept in reserve), under 10 %, under 20 %, ... under 100 %, and full.
//! An object is taken from the fullest zspage that has one, and there the first free one, so that
//! the emptiest zspages drain and a young zspage is touched page by page.
//!
//! # Concurrency
//!
//! Everything in [`Inner`] and in the descriptors of the class's zspages belongs to whom holds the
//! class's lock. Two threads meet here only if their objects are within 2 % of the same size.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering::Relaxed;

use super::shape::{PackedShape, Shape};
use super::slot::Object;
use super::stats::{ClassStats, Counters};
use super::table::Chain;
use super::zspage::{Zspage, ZspageId, Zspages};
use crate::page::PAGE_BYTES;
use crate::sync::{Guard, Mutex};

/// Fullness groups.
pub(super) const GROUPS: usize = 12;

/// The group of full zspages, the one without a list.
const FULL: usize = GROUPS - 1;

/// The group of zspages without an object.
const EMPTY: usize = 0;

// Two cache lines: 8 of shape, 8 of lock, 92 of lists, 16 of counters and chain, 4 to spare.
const _: () = assert!(size_of::<Class>() == 128);

/// A class. Aligned so that two classes' locks share no pair of cache lines, which is what is fetched.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Class {
    shape: PackedShape,
    inner: Mutex<50, Inner>,
}

/// What the lock of a class protects.
#[derive(Debug)]
pub(super) struct Inner {
    /// The first zspage of each group's list.
    heads: [Option<ZspageId>; FULL],
    /// Zspages of each group.
    counts: [u32; GROUPS],
    /// Handle slots that belong to this class while vacant, so that a store or free takes one lock.
    pub(super) slots: Chain,
    objects_used: Count,
    pages_touched: Count,
}

/// How many, of a class: the objects of a pool have numbers of 32 bits, and 2^32 pages are 16 TiB.
#[derive(Debug, Default)]
struct Count(u32);

impl Count {
    fn get(&self) -> usize {
        self.0 as usize
    }

    fn add(&mut self, more: usize) {
        self.0 += u32::try_from(more).expect("what one zspage has");
    }

    fn subtract(&mut self, less: usize) {
        self.0 -= u32::try_from(less).expect("what one zspage has");
    }
}

/// What [`Inner::reserve`] found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserved {
    pub(super) object: Object,
    /// Pages that take memory from now on and did not before.
    pub(super) pages_more: usize,
}

/// The fullness group of a zspage.
fn group(objects_used: usize, objects: usize) -> usize {
    match objects_used {
        0 => EMPTY,
        used if used == objects => FULL,
        used => 1 + used * 10 / objects,
    }
}

impl Class {
    pub(super) fn new(shape: Shape) -> Self {
        Class {
            shape: shape.packed(),
            inner: Mutex::new(Inner {
                heads: [None; FULL],
                counts: [0; GROUPS],
                slots: Chain::default(),
                objects_used: Count::default(),
                pages_touched: Count::default(),
            }),
        }
    }

    /// The arithmetic of the class.
    pub(super) fn shape(&self) -> Shape {
        self.shape.unpacked()
    }

    /// Waits for the class.
    pub(super) fn lock(&self) -> Guard<'_, 50, Inner> {
        self.inner.lock()
    }

    /// Pages of the zspages that compaction would empty.
    pub(super) fn freeable_pages(&self) -> usize {
        let (inner, shape) = (self.lock(), self.shape());
        (inner.zspages_used() * shape.objects - inner.objects_used.get()) / shape.objects
            * shape.pages
    }

    /// The row of the class called `index`.
    pub(super) fn stats(&self, index: usize) -> ClassStats {
        let inner = self.lock();
        let shape = self.shape();
        let zspages = inner.counts.iter().sum::<u32>() as usize;
        let objects_total = zspages * shape.objects;
        let objects_free = objects_total - inner.objects_used.get();
        ClassStats {
            class: index,
            size: shape.object_bytes,
            fullness: inner.counts,
            obj_allocated: objects_total,
            obj_used: inner.objects_used.get(),
            pages_used: inner.pages_touched.get(),
            pages_per_zspage: shape.pages,
            // Zspages that would be empty if the others were filled.
            freeable: objects_free / shape.objects * shape.pages,
        }
    }
}

impl Inner {
    /// Reserves an object of `length` bytes for `owner` in the fullest zspage that has one.
    pub(super) fn reserve(
        &mut self,
        zspages: &Zspages,
        shape: Shape,
        owner: NonZeroU32,
        length: usize,
        counters: &Counters,
    ) -> Option<Reserved> {
        let from = (EMPTY..FULL).rev().find(|from| self.heads[*from].is_some())?;
        let id = self.heads[from]?;
        if from == EMPTY {
            counters.reserve_left(zspages.get(id).pages_touched.get());
        }
        Some(self.reserve_in(zspages, shape, (id, Some(from)), owner, length))
    }

    /// Adds a new zspage and reserves its first object.
    pub(super) fn adopt(
        &mut self,
        zspages: &Zspages,
        shape: Shape,
        id: ZspageId,
        owner: NonZeroU32,
        length: usize,
    ) -> Reserved {
        self.reserve_in(zspages, shape, (id, None), owner, length)
    }

    /// Reserves an object of a zspage that is not full, and is in the list of the group `from`, or none.
    fn reserve_in(
        &mut self,
        zspages: &Zspages,
        shape: Shape,
        (id, from): (ZspageId, Option<usize>),
        owner: NonZeroU32,
        length: usize,
    ) -> Reserved {
        let zspage = zspages.get(id);
        let owners = &zspages.owners(id)[..shape.objects];
        let free_from = zspage.free_from.get();
        let index = owners[free_from..]
            .iter()
            .position(|owner| owner.load(Relaxed) == 0)
            .map(|offset| free_from + offset)
            .expect("ZS-2: a zspage that is not full has a free object");
        owners[index].store(owner.get(), Relaxed);
        zspage.free_from.set(index + 1);
        zspage.objects_used.set(zspage.objects_used.get() + 1);
        self.objects_used.add(1);

        let pages_touched = zspage.pages_touched.get();
        let pages_needed = (index * shape.object_bytes + length).div_ceil(PAGE_BYTES);
        let pages_more = pages_needed.saturating_sub(pages_touched);
        zspage.pages_touched.set(pages_touched + pages_more);
        self.pages_touched.add(pages_more);

        self.relink(zspages, id, from, group(zspage.objects_used.get(), shape.objects));
        Reserved { object: Object { zspage: id, index, length }, pages_more }
    }

    /// Zspages with an object in use.
    fn zspages_used(&self) -> usize {
        self.counts[EMPTY + 1..].iter().sum::<u32>() as usize
    }

    /// Chooses the zspages between which compaction moves objects: from the emptiest to the fullest
    /// that has room. `None` unless the class's free objects are a zspage's worth.
    pub(super) fn choose(&self, zspages: &Zspages, shape: Shape) -> Option<(ZspageId, ZspageId)> {
        if self.zspages_used() * shape.objects < self.objects_used.get() + shape.objects {
            return None;
        }
        let group_of = |mut groups: std::ops::Range<usize>, from_top: bool| {
            let listed = |group: &usize| self.heads[*group].is_some();
            if from_top { groups.rfind(listed) } else { groups.find(listed) }
        };
        let (low, high) = (group_of(EMPTY + 1..FULL, false)?, group_of(EMPTY + 1..FULL, true)?);
        let (from, to) = (self.heads[low]?, self.heads[high]?);
        if low != high {
            return Some((from, to));
        }
        // All in one group: the first two of them, always the same way, or they would go to and fro.
        let second = zspages.get(to).next.get()?;
        let used = |id| zspages.get(id).objects_used.get();
        Some(if used(second) > used(to) { (to, second) } else { (second, to) })
    }

    /// A zspage that has taken more pages than its objects need: some of them can be squeezed out. Looks
    /// at a few of each group.
    pub(super) fn slack(&self, zspages: &Zspages, shape: Shape) -> Option<ZspageId> {
        const LOOKED_AT: usize = 4;
        let is_slack = |id: &ZspageId| {
            let zspage = zspages.get(*id);
            let needed = zspage.objects_used.get() * shape.object_bytes;
            needed.div_ceil(PAGE_BYTES) < zspage.pages_touched.get()
        };
        self.heads[EMPTY + 1..].iter().find_map(|head| {
            let list = std::iter::successors(*head, |id| zspages.get(*id).next.get());
            list.take(LOOKED_AT).find(is_slack)
        })
    }

    /// Notes that a zspage's pages from `pages` on were given back; tells how many those were.
    pub(super) fn shorten(&mut self, zspage: &Zspage, pages: usize) -> usize {
        let gone = zspage.pages_touched.get() - pages;
        zspage.pages_touched.set(pages);
        self.pages_touched.subtract(gone);
        gone
    }

    /// Reserves an object of the zspage `id`, which is in a list, for `owner`, whose object moves.
    pub(super) fn reserve_at(
        &mut self,
        zspages: &Zspages,
        shape: Shape,
        id: ZspageId,
        owner: NonZeroU32,
        length: usize,
    ) -> Reserved {
        let from = group(zspages.get(id).objects_used.get(), shape.objects);
        self.reserve_in(zspages, shape, (id, Some(from)), owner, length)
    }

    /// Frees `owner`'s object. A zspage that this leaves empty is the caller's to give back, unless it is
    /// kept in `reserve`, if there is one and it has room: so a store after a free does not go to the source.
    pub(super) fn free(
        &mut self,
        zspages: &Zspages,
        shape: Shape,
        object: Object,
        owner: NonZeroU32,
        reserve: Option<&Counters>,
    ) -> Option<ZspageId> {
        let Object { zspage: id, index, .. } = object;
        let zspage = zspages.get(id);
        let word = &zspages.owners(id)[index];
        let found = word.load(Relaxed);
        assert!(found == owner.get(), "ZS-3: object of handle {owner} is owned by {found}");
        word.store(0, Relaxed);

        let objects_used = zspage.objects_used.get();
        let group_of = |objects_used| group(objects_used, shape.objects);
        let (from, to) = (group_of(objects_used), group_of(objects_used - 1));
        zspage.objects_used.set(objects_used - 1);
        zspage.free_from.set(zspage.free_from.get().min(index));
        self.objects_used.subtract(1);

        let keeps = |counters: &Counters| counters.reserve_joined(zspage.pages_touched.get());
        if to == EMPTY && !reserve.is_some_and(keeps) {
            self.unlink(zspages, id, from);
            self.pages_touched.subtract(zspage.pages_touched.get());
            return Some(id);
        }
        self.relink(zspages, id, Some(from), to);
        None
    }

    /// Takes a zspage in reserve off, for the caller to give back.
    pub(super) fn give_up_reserve(
        &mut self,
        zspages: &Zspages,
        counters: &Counters,
    ) -> Option<ZspageId> {
        let id = self.heads[EMPTY]?;
        let pages = zspages.get(id).pages_touched.get();
        self.unlink(zspages, id, EMPTY);
        counters.reserve_left(pages);
        self.pages_touched.subtract(pages);
        Some(id)
    }

    /// Moves a zspage to the list of another group. One that stays in its group keeps its place: its
    /// neighbours are not touched.
    fn relink(&mut self, zspages: &Zspages, id: ZspageId, from: Option<usize>, to: usize) {
        if from == Some(to) {
            return;
        }
        if let Some(from) = from {
            self.unlink(zspages, id, from);
        }
        self.link(zspages, id, to);
    }

    /// Puts a zspage first in the list of group `to`.
    fn link(&mut self, zspages: &Zspages, id: ZspageId, to: usize) {
        self.counts[to] += 1;
        if to == FULL {
            return;
        }
        let zspage = zspages.get(id);
        zspage.previous.set(None);
        zspage.next.set(self.heads[to]);
        if let Some(next) = self.heads[to] {
            zspages.get(next).previous.set(Some(id));
        }
        self.heads[to] = Some(id);
    }

    /// Takes a zspage off the list of group `from`.
    fn unlink(&mut self, zspages: &Zspages, id: ZspageId, from: usize) {
        self.counts[from] -= 1;
        if from == FULL {
            return;
        }
        let zspage = zspages.get(id);
        let (previous, next) = (zspage.previous.get(), zspage.next.get());
        match previous {
            Some(previous) => zspages.get(previous).next.set(next),
            None => self.heads[from] = next,
        }
        if let Some(next) = next {
            zspages.get(next).previous.set(previous);
        }
    }

    /// Whether lists and counts agree with the descriptors of the class. Returns objects and pages touched.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn check(
        &self,
        zspages: &Zspages,
        of_class: &[ZspageId],
        shape: Shape,
    ) -> (usize, usize) {
        let (mut objects, mut pages, mut counts) = (0, 0, [0; GROUPS]);
        for id in of_class {
            let zspage = zspages.get(*id);
            let owners = &zspages.owners(*id)[..shape.objects];
            let free = owners.iter().filter(|owner| owner.load(Relaxed) == 0).count();
            assert_eq!(zspage.objects_used.get() + free, shape.objects, "ZS-2");
            let below = &owners[..zspage.free_from.get()];
            assert!(below.iter().all(|owner| owner.load(Relaxed) != 0), "a free one below");
            assert!(zspage.pages_touched.get() <= shape.pages);
            objects += zspage.objects_used.get();
            pages += zspage.pages_touched.get();
            counts[group(zspage.objects_used.get(), shape.objects)] += 1;
        }
        assert_eq!(counts, self.counts, "zspages by group: {shape:?}");
        for (index, head) in self.heads.iter().enumerate() {
            let mut at = *head;
            let mut previous = None;
            let mut length = 0;
            while let Some(id) = at {
                assert_eq!(zspages.get(id).previous.get(), previous);
                assert_eq!(group(zspages.get(id).objects_used.get(), shape.objects), index);
                length += 1;
                previous = at;
                at = zspages.get(id).next.get();
            }
            assert_eq!(length, self.counts[index], "list of group {index}: {shape:?}");
        }
        assert_eq!(
            (objects, pages),
            (self.objects_used.get(), self.pages_touched.get()),
            "{shape:?}"
        );
        (objects, pages)
    }
}

#[cfg(test)]
mod tests {
    use super::{EMPTY, FULL, group};

    #[test]
    fn groups_are_tenths() {
        assert_eq!((group(0, 127), group(127, 127)), (EMPTY, FULL));
        assert_eq!((group(1, 127), group(126, 127)), (1, 10));
        assert_eq!((group(9, 100), group(10, 100), group(99, 100)), (1, 2, 10));
        assert_eq!((group(0, 1), group(1, 1), group(1, 2)), (EMPTY, FULL, 6));
    }
}
