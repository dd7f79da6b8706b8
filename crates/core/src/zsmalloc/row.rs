//! Handles as the rows of a table: words of the user's own beside each, and handles without an object.
//!
//! The user is `crate::store`. A handle of its own lives from [`Pool::store_batch`] or [`Pool::take_handle`]
//! to [`Pool::free`] or [`Pool::give_handle`]. Meanwhile its object may leave the pool ([`Pool::send_away`])
//! and come back ([`Pool::bring_back`]); the slot keeps the place that the user gave it. One thread at a time
//! does any of these with one handle: that is the user's duty.
//!
//! # Invariants
//!
//! - `ROW-1` The words beside a slot that was never taken are 0. The pool never writes them after.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use super::slot::Away;
use super::source::{OutOfMemory, PageSource};
use super::table::Chain;
use super::{Handle, Misuse, Pool, misused};

impl<S: PageSource> Pool<S> {
    /// The words beside `handle` ([`Pool::with_words`]).
    pub(crate) fn words(&self, handle: Handle) -> &[AtomicU32] {
        self.slots.tail(handle.index())
    }

    /// Takes a handle without an object.
    ///
    /// # Errors
    ///
    /// When the source has no memory: nothing changed.
    pub(crate) fn take_handle(&self) -> Result<Handle, OutOfMemory> {
        let mut taken = self.slots.take(&self.source, 1)?;
        let index = taken.pop(&self.slots).expect("take() gives one at least");
        self.slots.get(index).clear();
        Ok(Handle::from_index(index))
    }

    /// Ends a handle that has no object.
    pub(crate) fn give_handle(&self, handle: Handle) {
        let slot = self.slots.get(handle.index());
        assert!(slot.object().is_none(), "ZS-3: handle {} has an object", handle.to_raw());
        let mut chain = Chain::default();
        chain.push(&self.slots, handle.index());
        self.slots.put_back(chain);
    }

    /// Bytes of `handle`'s object, here or away. Whoever calls knows that there is one.
    pub(crate) fn length_anywhere(&self, handle: Handle) -> usize {
        self.slots.get(handle.index()).length()
    }

    /// Where the object of `handle` is, which was sent away.
    pub(crate) fn away(&self, handle: Handle) -> Away {
        self.slots.get(handle.index()).away()
    }

    /// The same, where another thread may bring the object back just now: `None` if it has.
    pub(crate) fn try_away(&self, handle: Handle) -> Option<Away> {
        self.slots.get(handle.index()).try_away()
    }

    /// Frees the object of `handle`, and keeps the handle, with the `place` where the bytes are now. False:
    /// somebody reads the object, and nothing changed.
    ///
    /// # Panics
    ///
    /// When `handle` names no object, or `place` has more than [`Away::PLACE_BITS`] bits.
    pub(crate) fn send_away(&self, handle: Handle, place: u64) -> bool {
        let class = self.class_of(self.object(handle).length);
        let mut inner = class.lock();
        let object = match self.slots.get(handle.index()).send_away(place) {
            Ok(object) => object,
            Err(Misuse::Pinned) => return false,
            Err(misuse) => misused(handle, misuse),
        };
        let counters = Some(&self.counters);
        let emptied = inner.free(&self.zspages, class.shape(), object, handle.0, counters);
        drop(inner);
        self.counters.freed(object.length);
        if let Some(zspage) = emptied {
            self.give_back(zspage);
        }
        true
    }

    /// Copies `bytes` in as the object of `handle`, which has none. If need be, the zspages that are kept empty make
    /// room for it.
    ///
    /// # Errors
    ///
    /// When the source has no memory: no object changed.
    ///
    /// # Panics
    ///
    /// When `bytes` is empty or longer than a unit.
    pub(crate) fn bring_back(&self, handle: Handle, bytes: &[u8]) -> Result<(), OutOfMemory> {
        let length = bytes.len();
        assert!((1..=self.unit.bytes()).contains(&length), "object of {length} bytes");
        let class = self.class_of(length);
        let (zspages, counters, shape) = (&self.zspages, &self.counters, class.shape());
        let reserved = class.lock().reserve(zspages, shape, handle.0, length, counters);
        let reserved = match reserved {
            Some(reserved) => reserved,
            None => self.reserve_in_new(class, handle, length).or_else(|_| {
                self.trim();
                self.reserve_in_new(class, handle, length)
            })?,
        };
        counters.pages_touched(reserved.pages_more);
        counters.stored(1, length);
        let target = zspages.get(reserved.object.zspage).object(reserved.object.index, length);
        // SAFETY: `target` is valid for `length` bytes (object() checks it against the run). By ZS-4 nobody
        // else touches them before publish(): the slot is not live, so neither a reader nor compaction
        // finds the object. `bytes` is borrowed, and nobody has a reference into a reserved object, so the
        // two do not overlap.
        unsafe { target.copy_from_nonoverlapping(NonNull::from(bytes).cast(), length) };
        self.slots.get(handle.index()).publish(reserved.object);
        Ok(())
    }
}
