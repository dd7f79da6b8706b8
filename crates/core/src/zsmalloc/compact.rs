//! Compaction: the emptiest zspages of a class give their objects to the fullest, and go; then those
//! that are left give the pages at their ends back.
//!
//! One object at a time, under its class's lock: no object of the class is reserved or freed meanwhile.
//! The owner of an object is in its zspage's descriptor; an owner whose slot is not live (in the middle
//! of a store) or pinned is passed over. The slot is held (`SLOT-2`), so that readers of this one object
//! wait, the bytes are copied, and the slot says the new place. Nothing that callers see changes.
//!
//! # Cost
//!
//! A pause for a class's users is one copy: objects that share a zspage have 192 KiB at most, 40 us. A
//! zspage comes free after at most half of its objects were moved, or there was nothing to gain.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering::Relaxed;

use super::Pool;
use super::class::{Class, Inner};
use super::shape::Shape;
use super::slot::Object;
use super::source::PageSource;
use super::zspage::ZspageId;
use crate::page::PAGE_BYTES;
use crate::sync::Guard;

/// What [`Pool::compact`] did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Compacted {
    /// Bytes of the objects that were moved.
    pub bytes_moved: usize,
    /// Pages that went back to the source.
    pub pages_freed: usize,
}

/// One step in a class.
enum Step {
    /// An object of so many bytes was moved; the zspage that it left may be empty.
    Moved(usize, Option<ZspageId>),
    /// The last pages of a zspage, so many, were given back.
    Shortened(usize),
    /// There is nothing to gain, or nothing that can be moved now.
    Done,
}

impl<S: PageSource> Pool<S> {
    /// Moves objects together until all that can be gained is, or `bytes_max` were moved (and the last
    /// object was begun before). Goes on next time with the class where it stopped.
    pub fn compact(&self, bytes_max: usize) -> Compacted {
        let mut compacted = Compacted::default();
        let first = self.compact_next.load(Relaxed);
        for turn in 0..self.classes.len() {
            let index = (first + turn) % self.classes.len();
            let class = &self.classes[index];
            while compacted.bytes_moved < bytes_max {
                match self.compact_step(class) {
                    Step::Moved(bytes, emptied) => {
                        compacted.bytes_moved += bytes;
                        if let Some(zspage) = emptied {
                            compacted.pages_freed += self.zspages.get(zspage).pages_touched.get();
                            self.give_back(zspage);
                        }
                    }
                    Step::Shortened(pages) => compacted.pages_freed += pages,
                    Step::Done => break,
                }
            }
            if compacted.bytes_moved >= bytes_max {
                self.compact_next.store(index, Relaxed);
                break;
            }
        }
        self.counters.pages_compacted.fetch_add(compacted.pages_freed, Relaxed);
        compacted
    }

    /// Pages of the zspages that [`Pool::compact`] would empty. Takes each class's lock for a moment.
    #[must_use]
    pub fn freeable_pages(&self) -> usize {
        self.classes.iter().map(Class::freeable_pages).sum()
    }

    fn compact_step(&self, class: &Class) -> Step {
        let shape = class.shape();
        let mut inner = class.lock();
        if let Some((from, to)) = inner.choose(&self.zspages, shape) {
            let held = self.hold_one(from, shape.objects);
            return held.map_or(Step::Done, |held| self.move_one(inner, shape, held, to));
        }
        let Some(id) = inner.slack(&self.zspages, shape) else { return Step::Done };
        let zspage = self.zspages.get(id);
        let owners = &self.zspages.owners(id)[..shape.objects];
        let Some(last) = owners.iter().rposition(|owner| owner.load(Relaxed) != 0) else {
            return Step::Done;
        };
        let pages = ((last + 1) * shape.object_bytes).div_ceil(PAGE_BYTES);
        if pages >= zspage.pages_touched.get() {
            // Its last object goes to a place further down: there is one, or `id` had no slack.
            let held = self.hold_at(id, last);
            return held.map_or(Step::Done, |held| self.move_one(inner, shape, held, id));
        }
        let gone = inner.shorten(zspage, pages);
        // SAFETY: the pages are the last `gone` that were touched of the zspage's run, and lie behind
        // its last object; no object is reserved there while the class is locked.
        unsafe { self.source.discard(zspage.page(pages), gone) };
        drop(inner);
        self.counters.pages_used.fetch_sub(gone, Relaxed);
        Step::Shortened(gone)
    }

    /// Moves an object, which is held, to the first free place of the zspage `to`.
    fn move_one(
        &self,
        mut inner: Guard<'_, 50, Inner>,
        shape: Shape,
        (owner, object): (NonZeroU32, Object),
        to: ZspageId,
    ) -> Step {
        let reserved = inner.reserve_at(&self.zspages, shape, to, owner, object.length);
        // Before it can be freed: or the pages could be counted off first.
        self.counters.pages_touched(reserved.pages_more);
        let place =
            |object: Object| self.zspages.get(object.zspage).object(object.index, object.length);
        let (source, target) = (place(object), place(reserved.object));
        // SAFETY: both are valid for `length` bytes (object() checks it against the run). The source is
        // published, and held by its slot, so nobody writes it (ZS-4) or ends it (ZS-5); the target was
        // reserved just now, so nobody else touches it; they are different objects, so they don't
        // overlap (ZS-1).
        unsafe { target.copy_from_nonoverlapping(source, object.length) };
        self.slots.get(owner.get() - 1).settle(reserved.object);
        let emptied = inner.free(&self.zspages, shape, object, owner, None);
        drop(inner);
        Step::Moved(object.length, emptied)
    }

    /// Holds an object of a zspage that can be moved, with its owner. The class's lock is held.
    fn hold_one(&self, id: ZspageId, objects: usize) -> Option<(NonZeroU32, Object)> {
        // The last first: what stays of a zspage should be at its start.
        (0..objects).rev().find_map(|index| self.hold_at(id, index))
    }

    /// Holds one object, if there is one that can be moved.
    fn hold_at(&self, id: ZspageId, index: usize) -> Option<(NonZeroU32, Object)> {
        let owner = NonZeroU32::new(self.zspages.owners(id)[index].load(Relaxed))?;
        let object = self.slots.get(owner.get() - 1).hold()?;
        assert!((object.zspage, object.index) == (id, index), "ZS-3: owner {owner}");
        Some((owner, object))
    }
}
