//! Size-class allocator for compressed units, of 1 byte to 2 MiB.
//!
//! A **zspage** is a virtually contiguous run of pages, cut into equal **objects** of one **size
//! class**. Callers hold a [`Handle`], never a pointer: a handle is a **slot**, one word that says
//! where its object is, so that compaction may move an object under its holder.
//!
//! One object's life: [`Pool::store_batch`] locks the class of its length, takes a vacant slot and the
//! first free object of the fullest zspage (`class`), unlocks, and, once all of the batch have a place,
//! copies the bytes, and publishes the slot. [`Pool::read`] pins the slot, follows it to the zspage
//! (`zspage`), and hands out the bytes.
//! [`Pool::free`] locks the class, vacates the slot, and frees the object; a zspage without objects
//! goes back to the [`PageSource`]. [`Pool::compact`] moves objects out of the emptiest zspages, so
//! that there are such. `shape` computes the classes, `table` is what never moves. `row` is for a user
//! whose handles outlive their objects.
//!
//! # Invariants
//!
//! - `ZS-1` An object lies inside its zspage: `(index + 1) * object_bytes <= pages * PAGE_BYTES`.
//! - `ZS-2` For each zspage `objects_used + objects_free == objects_total`: the objects in use are
//!   those that have an owner.
//! - `ZS-3` A live slot names the one object whose owner is its handle. Vacating it ends the handle.
//! - `ZS-4` From reservation to publication an object's bytes belong to the thread that stores; from
//!   publication to the free nobody writes them.
//! - `ZS-5` A pinned object is neither freed nor moved; a zspage with an object in use keeps its run.
//! - `ZS-6` `pages_used` counts, for each zspage, the pages up to the end of the highest object that
//!   it held since it was last squeezed: those beyond were never written, or were discarded, and take
//!   no memory of a source of fresh mappings.
//! - `ZS-7` After [`Pool::new`] all memory comes from the source: nothing here allocates from the
//!   global allocator, with [`Pool::classes`] as the one exception. So the pool may serve a fault.
//!
//! # Concurrency
//!
//! `class[i]` (rank 50), the table of slots (51), the tables of zspages (52): each is released before
//! another is taken, and none is held while the source is called or bytes are copied. A store or a
//! free takes its class's lock and, once in 8 (in 4 above a page), that of the slots; a read takes
//! none and pins its object in the slot's own word.
//!
//! Compaction (`compact`) alone copies under the class's lock, one object at a time, so that none of
//! the class is reserved or freed meanwhile; a reader of that object waits in its slot.
//!
//! Pins and locks are words in memory: a process that forks while another thread is inside a pool has
//! them set for ever in the child. Who forks lets the pool's users finish first.
//!
//! # Cost
//!
//! Per object 12 bytes (slot and owner), and the words beside its handle if the user has any; per
//! zspage 32 (its objects come to about 64 KiB); per class 132 (430 of them for 64 KiB units). For
//! 100 MB in 64 KiB units 0.2 % of what is stored, less than 0.1 % of the data before compression.
//! `docs/design/zsmalloc.md` has the measured overhead.

#[cfg(any(test, fuzzing, debug_assertions))]
pub(crate) mod check;
mod class;
mod compact;
mod compaction;
mod marks;
mod row;
#[cfg(any(test, fuzzing))]
pub mod script;
mod shape;
mod slot;
mod source;
mod stats;
mod table;
#[cfg(test)]
mod tests;
#[cfg(any(test, fuzzing))]
pub(crate) mod world;
mod zspage;

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::page::{PAGE_BYTES, UnitOrder};
use crate::prefetch::prefetch;
use class::{Class, Reserved};
use marks::MarkTables;
use shape::Shape;
use slot::{Misuse, Object, Slot};
use stats::Counters;
use table::{Chain, ENTRIES_MAX, Table};
use zspage::{ZspageId, Zspages};

pub use compact::Compacted;
pub use compaction::Compaction;
pub(crate) use compaction::STEP_BYTES;
pub(crate) use slot::Away;
#[cfg(all(test, feature = "loom"))]
pub(crate) use slot::loom_slot;
pub use source::{OutOfMemory, PageSource};
pub use stats::{ClassStats, PoolStats, lines};

/// Slots that a class takes from the table, and gives back, at once. It keeps up to twice as many, each
/// with the words of the pool's user: few where there are few objects, and each of them takes the
/// codec 10 us and more.
const fn slots_batch(shape: Shape) -> u32 {
    if shape.object_bytes <= PAGE_BYTES { 8 } else { 4 }
}

/// Objects whose places are chosen before the first is copied to.
const AT_ONCE: usize = 8;

/// How much of an object's place is fetched beforehand: of all together 32 KiB at most, and 12 KiB of 4 KiB
/// units that shrink to 2/5. Beyond it the copy is long enough for the processor's own prefetch.
const PREFETCH_BYTES: usize = 4 << 10;

/// Names one stored object, until it is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(NonZeroU32);

impl Handle {
    /// The handle as a number; never 0.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        self.0.get()
    }

    /// The handle of a number from [`Handle::to_raw`]; `None` for 0.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Handle> {
        NonZeroU32::new(raw).map(Handle)
    }

    /// The handle of the first slot.
    pub(crate) const FIRST: Handle = Handle(NonZeroU32::MIN);

    /// The handle of the slot `index`, which is below `ENTRIES_MAX`.
    pub(crate) fn from_index(index: u32) -> Handle {
        Handle(NonZeroU32::MIN.saturating_add(index))
    }

    fn index(self) -> u32 {
        self.0.get() - 1
    }
}

/// The allocator. The module says how it works.
pub struct Pool<S: PageSource> {
    source: S,
    unit: UnitOrder,
    /// The largest length of each class, rising: what a length's class is searched in.
    sizes: Box<[u32]>,
    classes: Box<[Class]>,
    slots: Table<51, Slot>,
    marks: MarkTables<51>,
    zspages: Zspages,
    counters: Counters,
    /// The class that compaction looks at next.
    compact_next: AtomicUsize,
}

impl<S: PageSource> Pool<S> {
    /// A pool for units of `unit` and all that they compress to. Takes nothing from `source` yet.
    pub fn new(source: S, unit: UnitOrder) -> Self {
        Pool::with_words(source, unit, 0)
    }

    /// The same, with so many words of the user's own beside each handle ([`Pool::words`]).
    pub(crate) fn with_words(source: S, unit: UnitOrder, words: usize) -> Self {
        let shapes = shape::shapes(unit);
        Pool {
            source,
            unit,
            sizes: shapes.iter().map(|shape| size_u32(shape.object_bytes)).collect(),
            classes: shapes.into_iter().map(Class::new).collect(),
            slots: Table::new(words, ENTRIES_MAX),
            marks: MarkTables::new(ENTRIES_MAX),
            zspages: Zspages::new(),
            counters: Counters::new(),
            compact_next: AtomicUsize::new(0),
        }
    }

    /// Copies `bytes` in. Their length is remembered.
    ///
    /// # Errors
    ///
    /// When the source has no memory: nothing changed.
    ///
    /// # Panics
    ///
    /// When `bytes` is empty or longer than a unit.
    pub fn store(&self, bytes: &[u8]) -> Result<Handle, OutOfMemory> {
        let mut stored = Err(OutOfMemory { wanted_bytes: 0 });
        self.store_batch(&[bytes], &mut |_, result| stored = result);
        stored
    }

    /// Copies each of `objects` in, and tells `each` its number and its handle, once and in no order. One
    /// that is refused changes nothing for the others.
    ///
    /// The places are chosen first and copied to afterwards: so the memory of one is fetched while the next
    /// is chosen, instead of waited for (`docs/design/zsmalloc.md` has what that gains).
    ///
    /// # Panics
    ///
    /// When one of them is empty or longer than a unit.
    pub fn store_batch(
        &self,
        objects: &[&[u8]],
        each: &mut dyn FnMut(usize, Result<Handle, OutOfMemory>),
    ) {
        let mut first = 0;
        for objects in objects.chunks(AT_ONCE) {
            self.store_together(objects, &mut |at, stored| each(first + at, stored));
            first += objects.len();
        }
    }

    /// At most [`AT_ONCE`] of them.
    fn store_together(
        &self,
        objects: &[&[u8]],
        each: &mut dyn FnMut(usize, Result<Handle, OutOfMemory>),
    ) {
        let mut classes = [&self.classes[0]; AT_ONCE];
        for (class, bytes) in classes.iter_mut().zip(objects) {
            let length = bytes.len();
            assert!(
                (1..=self.unit.bytes()).contains(&length),
                "object of {length} bytes in a pool of units of {}",
                self.unit
            );
            *class = self.class_of(length);
            prefetch(ptr::from_ref(*class).cast(), size_of::<Class>());
        }

        let mut places = [None; AT_ONCE];
        let (mut count, mut stored_bytes, mut pages_more) = (0, 0, 0);
        for (at, bytes) in objects.iter().enumerate() {
            match self.reserve(classes[at], bytes.len()) {
                Ok((handle, reserved)) => {
                    let Object { zspage, index, length } = reserved.object;
                    let target = self.zspages.get(zspage).object(index, length);
                    prefetch(target.as_ptr(), length.min(PREFETCH_BYTES));
                    places[at] = Some((handle, reserved.object, target));
                    count += 1;
                    stored_bytes += length;
                    pages_more += reserved.pages_more;
                }
                Err(refused) => each(at, Err(refused)),
            }
        }
        // Before the copies: a locked instruction behind them would wait until their stores have left the
        // core, which otherwise the codec's next unit overlaps.
        self.counters.pages_touched(pages_more);
        self.counters.stored(count, stored_bytes);

        let places = || places.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?)));
        for (at, (_, _, target)) in places() {
            let bytes = objects[at];
            // SAFETY: `target` is valid for the length of `bytes` (object() checks it against the run). By
            // ZS-4 nobody else touches them before publish() below; `bytes` is borrowed from the caller,
            // who can have no reference into a reserved object (read() lends published ones only), so the
            // two do not overlap.
            unsafe { target.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        }
        for (at, (handle, object, _)) in places() {
            self.slots.get(handle.index()).publish(object);
            each(at, Ok(handle));
        }
    }

    /// Calls `with` with the bytes of `handle`, which stay where they are meanwhile.
    ///
    /// # Panics
    ///
    /// When `handle` names no object.
    pub fn read<R>(&self, handle: Handle, with: impl FnOnce(&[u8]) -> R) -> R {
        let pinned = self.pin(handle).unwrap_or_else(|| misused(handle, Misuse::Stale));
        with(&pinned)
    }

    /// The bytes of `handle`, which stay where they are until the result is dropped; `None` if it names no
    /// object.
    pub(crate) fn pin(&self, handle: Handle) -> Option<Pinned<'_>> {
        let slot = self.slots.get(handle.index());
        let object = slot.pin()?;
        let pin = Pin(slot);
        let start = self.zspages.get(object.zspage).object(object.index, object.length);
        // SAFETY: valid for `length` bytes (object() checks it against the run), which were written
        // before the slot was published; by ZS-5 the pin, which is dropped with the slice, keeps them
        // in place, and by ZS-4 nobody writes them. `Pinned` lends them for no longer than it lives.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), object.length) };
        Some(Pinned { bytes, _pin: pin })
    }

    /// Bytes of `handle`'s object.
    ///
    /// # Panics
    ///
    /// When `handle` names no object.
    #[must_use]
    pub fn length(&self, handle: Handle) -> usize {
        self.object(handle).length
    }

    /// Ends `handle` and its object, and tells how long that was.
    ///
    /// # Panics
    ///
    /// When `handle` names no object, or somebody reads it. (A handle that is freed twice names
    /// another object if a store came between: that can't be told.)
    pub fn free(&self, handle: Handle) -> usize {
        let class = self.class_of(self.object(handle).length);
        let shape = class.shape();
        let mut surplus = Chain::default();

        let mut inner = class.lock();
        let object = match self.slots.get(handle.index()).vacate() {
            Ok(object) => object,
            Err(misuse) => misused(handle, misuse),
        };
        let emptied = inner.free(&self.zspages, shape, object, handle.0, Some(&self.counters));
        inner.slots.push(&self.slots, handle.index());
        if inner.slots.len() > 2 * slots_batch(shape) {
            surplus.draw(&self.slots, &mut inner.slots, slots_batch(shape));
        }
        drop(inner);

        self.counters.freed(object.length);
        if surplus.len() > 0 {
            self.slots.put_back(surplus);
        }
        if let Some(zspage) = emptied {
            self.give_back(zspage);
        }
        object.length
    }

    /// Lets the pool keep empty zspages of so many bytes in all, 256 KiB at least; with any, 0.8 % of the pages used
    /// are added. A pool through which objects pass quickly, as on their way to a backing, takes no page from the
    /// system and gives none back then.
    pub(crate) fn may_reserve(&mut self, bytes: usize) {
        self.counters.may_reserve(bytes / PAGE_BYTES);
    }

    /// Gives the empty zspages back that are kept for the next store.
    pub fn trim(&self) {
        if !self.counters.has_reserve() {
            return;
        }
        for class in &self.classes {
            loop {
                let reserved = class.lock().give_up_reserve(&self.zspages, &self.counters);
                let Some(zspage) = reserved else { break };
                self.give_back(zspage);
            }
        }
    }

    /// The figures of the pool. Reads a few words.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let classes = size_of_val(&*self.classes) + size_of_val(&*self.sizes);
        let tables = self.slots.bytes() + self.marks.bytes() + self.zspages.bytes();
        self.counters.tell(size_of::<Self>() + classes + tables)
    }

    /// [`PoolStats::pages_used_max`], which begins anew with what is used now.
    pub fn take_pages_used_max(&self) -> u64 {
        self.counters.take_max() as u64
    }

    /// Begins [`PoolStats::pages_compacted`] anew.
    pub fn reset_pages_compacted(&self) {
        self.counters.pages_compacted.store(0, Relaxed);
    }

    /// The figures of each class. Takes each class's lock for a moment.
    #[must_use]
    pub fn classes(&self) -> Vec<ClassStats> {
        self.classes.iter().enumerate().map(|(index, class)| class.stats(index)).collect()
    }

    /// The class whose objects are the smallest that hold `length` bytes.
    fn class_of(&self, length: usize) -> &Class {
        &self.classes[self.class_index(length)]
    }

    fn class_index(&self, length: usize) -> usize {
        let length = size_u32(length);
        self.sizes.partition_point(|size| *size < length)
    }

    fn object(&self, handle: Handle) -> Object {
        let object = self.slots.get(handle.index()).object();
        object.unwrap_or_else(|| misused(handle, Misuse::Stale))
    }

    /// Takes a slot and reserves an object of `class` for it.
    fn reserve(&self, class: &Class, length: usize) -> Result<(Handle, Reserved), OutOfMemory> {
        let (zspages, counters, shape) = (&self.zspages, &self.counters, class.shape());
        let mut inner = class.lock();
        let index = match inner.slots.pop(&self.slots) {
            Some(index) => index,
            None => {
                drop(inner);
                let mut slots = self.slots.take(&self.source, slots_batch(shape))?;
                let index = slots.pop(&self.slots).expect("take() gives one at least");
                inner = class.lock();
                inner.slots.draw(&self.slots, &mut slots, slots_batch(shape));
                index
            }
        };
        let handle = Handle::from_index(index);
        if let Some(reserved) = inner.reserve(zspages, shape, handle.0, length, counters) {
            return Ok((handle, reserved));
        }
        drop(inner);
        match self.reserve_in_new(class, handle, length) {
            Ok(reserved) => Ok((handle, reserved)),
            Err(refused) => {
                class.lock().slots.push(&self.slots, index);
                Err(refused)
            }
        }
    }

    /// Reserves an object of `class` for `handle`, in a new zspage: there was no other with room.
    #[cold]
    fn reserve_in_new(
        &self,
        class: &Class,
        handle: Handle,
        length: usize,
    ) -> Result<Reserved, OutOfMemory> {
        let (zspages, counters, shape) = (&self.zspages, &self.counters, class.shape());
        match self.take_zspage(class) {
            Ok(zspage) => Ok(class.lock().adopt(zspages, shape, zspage, handle.0, length)),
            // Somebody may have freed an object meanwhile.
            Err(refused) => {
                let reserved = class.lock().reserve(zspages, shape, handle.0, length, counters);
                reserved.ok_or(refused)
            }
        }
    }

    /// A new zspage for `class`, known to nobody.
    #[cold]
    fn take_zspage(&self, class: &Class) -> Result<ZspageId, OutOfMemory> {
        let index = self.class_index(class.shape().object_bytes);
        let zspage = self.zspages.take(&self.source, index, class.shape())?;
        self.counters.pages_taken.fetch_add(class.shape().pages, Relaxed);
        Ok(zspage)
    }

    /// Gives an empty zspage back that is in no list of its class.
    #[cold]
    fn give_back(&self, id: ZspageId) {
        let zspage = self.zspages.get(id);
        self.counters.pages_used.fetch_sub(zspage.pages_touched.get(), Relaxed);
        self.counters.pages_taken.fetch_sub(zspage.pages.get(), Relaxed);
        self.zspages.give_back(&self.source, id);
    }
}

impl<S: PageSource> Drop for Pool<S> {
    fn drop(&mut self) {
        self.zspages.release(&self.source);
        self.slots.release(&self.source);
        self.marks.release(&self.source);
    }
}

impl<S: PageSource> fmt::Debug for Pool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("unit", &self.unit)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// The bytes of an object, which stay where they are for as long as this lives.
pub(crate) struct Pinned<'a> {
    /// Lent by `deref` only, for as long as the pin is there.
    bytes: &'a [u8],
    _pin: Pin<'a>,
}

impl Deref for Pinned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

/// A pin on an object, taken back when dropped.
struct Pin<'a>(&'a Slot);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// A length, which is not above a unit's.
fn size_u32(length: usize) -> u32 {
    u32::try_from(length).expect("2 MiB at most")
}

#[cold]
fn misused(handle: Handle, misuse: Misuse) -> ! {
    match misuse {
        Misuse::Stale => panic!("ZS-3: handle {} names no object", handle.to_raw()),
        Misuse::Pinned => panic!("ZS-5: handle {} is freed while it is read", handle.to_raw()),
    }
}
