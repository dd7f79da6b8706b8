//! The zspage: a run of pages cut into equal objects, and the tables that describe all of them.
//!
//! A descriptor is a [`Zspage`] and one word for each object: its **owner**, the handle that the
//! object belongs to, or 0. There are five tables, for zspages of up to 8, 16, 32, 64 and 128
//! objects, so that no descriptor is much longer than it needs to be.
//!
//! # Concurrency
//!
//! `base` and `object_bytes` stay as they are for the life of a zspage, and are read without a lock.
//! Everything else belongs to whom holds the lock of the zspage's class, or, between `take` and the
//! first object, and after the last object, to the one thread that knows of it. It is atomic only
//! because a table is shared; the accesses are plain loads and stores.

use std::num::NonZeroU32;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, Ordering::Relaxed};

use super::shape::{OBJECTS_MAX, Shape};
use super::source::{OutOfMemory, PageSource};
use super::table::{Chain, Entry, Table};
use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX};

/// Bits of a [`ZspageId`]: 25 for the index in a table (at 32 KiB, 1 TiB), 3 for which table.
pub(super) const ZSPAGE_ID_BITS: u32 = 28;

const KIND_BITS: u32 = 3;

/// The most objects of a zspage, for each table.
const OBJECTS_OF_KIND: [usize; 5] = [8, 16, 32, 64, 128];

const _: () = {
    assert!(OBJECTS_OF_KIND.len() <= 1 << KIND_BITS);
    assert!(OBJECTS_OF_KIND[OBJECTS_OF_KIND.len() - 1] == OBJECTS_MAX);
    // 8 of address, 12 of size and links, 8 of counts, 4 to spare. With 8 owners, one cache line.
    assert!(size_of::<Zspage>() == 32);
    assert!(OBJECTS_MAX <= u8::MAX as usize && 1 << UNIT_ORDER_MAX <= u16::MAX as usize);
};

/// Which table, and which descriptor there. One more than `index << KIND_BITS | kind`, so that
/// "none" costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ZspageId(NonZeroU32);

impl ZspageId {
    /// The id that [`ZspageId::to_raw`] gave.
    pub(super) fn from_raw(raw: u32) -> Self {
        ZspageId(NonZeroU32::MIN.saturating_add(raw))
    }

    /// Below `1 << ZSPAGE_ID_BITS`.
    pub(super) fn to_raw(self) -> u32 {
        self.0.get() - 1
    }

    fn new(kind: usize, index: u32) -> Self {
        let kind = u32::try_from(kind).expect("five kinds");
        debug_assert!(index < 1 << (ZSPAGE_ID_BITS - KIND_BITS));
        ZspageId::from_raw(index << KIND_BITS | kind)
    }

    fn kind(self) -> usize {
        (self.to_raw() & ((1 << KIND_BITS) - 1)) as usize
    }

    fn index(self) -> u32 {
        self.to_raw() >> KIND_BITS
    }
}

/// A number that a lock protects (see the header), as short as its values are.
macro_rules! field {
    ($name:ident, $atomic:ident, $word:ident) => {
        #[derive(Debug, Default)]
        pub(super) struct $name($atomic);

        impl $name {
            pub(super) fn get(&self) -> usize {
                self.0.load(Relaxed) as usize
            }

            pub(super) fn set(&self, value: usize) {
                self.0
                    .store($word::try_from(value).expect("counts of a zspage are small"), Relaxed);
            }
        }
    };
}

field!(Field, AtomicU32, u32);
field!(Short, AtomicU16, u16);
field!(Byte, AtomicU8, u8);

/// A place in a list of zspages: none, or an id.
#[derive(Debug)]
pub(super) struct Link(AtomicU32);

impl Link {
    pub(super) fn get(&self) -> Option<ZspageId> {
        NonZeroU32::new(self.0.load(Relaxed)).map(ZspageId)
    }

    pub(super) fn set(&self, to: Option<ZspageId>) {
        self.0.store(to.map_or(0, |id| id.0.get()), Relaxed);
    }
}

/// The descriptor without the owners.
#[derive(Debug)]
pub(super) struct Zspage {
    /// The run; null while the descriptor is vacant.
    base: AtomicPtr<u8>,
    /// Bytes of each object.
    object_bytes: Field,
    /// Pages of the run.
    pub(super) pages: Short,
    /// Which class it belongs to.
    pub(super) class: Short,
    /// Objects with an owner.
    pub(super) objects_used: Byte,
    /// Pages from the first one on that an object ever covered: the pages that take memory.
    pub(super) pages_touched: Short,
    /// No object below has no owner.
    pub(super) free_from: Byte,
    /// The neighbours in the list of the fullness group; `next` is also the table's link.
    pub(super) previous: Link,
    pub(super) next: Link,
}

impl Entry for Zspage {
    fn vacant() -> Self {
        Zspage {
            base: AtomicPtr::new(ptr::null_mut()),
            object_bytes: Field::default(),
            pages: Short::default(),
            class: Short::default(),
            objects_used: Byte::default(),
            pages_touched: Short::default(),
            free_from: Byte::default(),
            previous: Link(AtomicU32::new(0)),
            next: Link(AtomicU32::new(0)),
        }
    }

    fn set_link(&self, link: u32) {
        self.next.0.store(link, Relaxed);
    }

    fn link(&self) -> u32 {
        self.next.0.load(Relaxed)
    }
}

impl Zspage {
    /// Where the object `index` begins.
    ///
    /// The `length` is there to be checked: object and length come from a word that [`super::Pool`]
    /// wrote, so by `ZS-1` they lie inside the run.
    pub(super) fn object(&self, index: usize, length: usize) -> NonNull<u8> {
        let offset = index * self.object_bytes.get();
        let base = NonNull::new(self.base.load(Relaxed)).expect("ZS-5: a zspage in use has a run");
        assert!(offset + length <= self.pages.get() * PAGE_BYTES, "ZS-1: object out of bounds");
        // SAFETY: the run is `pages * PAGE_BYTES` bytes, and `offset` was just compared with that.
        unsafe { base.add(offset) }
    }
}

impl Zspage {
    /// Where the page `index` of its run begins.
    pub(super) fn page(&self, index: usize) -> NonNull<u8> {
        let base = NonNull::new(self.base.load(Relaxed)).expect("ZS-5: a zspage in use has a run");
        assert!(index < self.pages.get(), "page {index} of a zspage");
        // SAFETY: inside the run, as was just compared.
        unsafe { base.add(index * PAGE_BYTES) }
    }
}

/// All descriptors of a pool.
#[derive(Debug)]
pub(super) struct Zspages {
    tables: [Table<52, Zspage>; OBJECTS_OF_KIND.len()],
}

impl Zspages {
    pub(super) fn new() -> Self {
        let len_max = 1 << (ZSPAGE_ID_BITS - KIND_BITS);
        Zspages { tables: OBJECTS_OF_KIND.map(|objects| Table::new(objects, len_max)) }
    }

    /// The descriptor.
    pub(super) fn get(&self, id: ZspageId) -> &Zspage {
        self.tables[id.kind()].get(id.index())
    }

    /// The owners of the objects; there may be more words than objects.
    pub(super) fn owners(&self, id: ZspageId) -> &[AtomicU32] {
        self.tables[id.kind()].tail(id.index())
    }

    /// A new zspage of class `class`, known to the caller only.
    pub(super) fn take<S: PageSource>(
        &self,
        source: &S,
        class: usize,
        shape: Shape,
    ) -> Result<ZspageId, OutOfMemory> {
        let kind = OBJECTS_OF_KIND.partition_point(|objects| *objects < shape.objects);
        let table = &self.tables[kind];
        let mut entry = table.take(source, 1)?;
        let Some(run) = source.take(shape.pages) else {
            table.put_back(entry);
            return Err(OutOfMemory { wanted_bytes: shape.pages * PAGE_BYTES });
        };
        let index = entry.pop(table).expect("take() gives one at least");
        let zspage = table.get(index);
        zspage.object_bytes.set(shape.object_bytes);
        zspage.pages.set(shape.pages);
        zspage.class.set(class);
        zspage.objects_used.set(0);
        zspage.pages_touched.set(0);
        zspage.free_from.set(0);
        zspage.previous.set(None);
        zspage.next.set(None);
        // Relaxed: who learns of the zspage does so through a lock or a published slot.
        zspage.base.store(run.as_ptr(), Relaxed);
        Ok(ZspageId::new(kind, index))
    }

    /// Ends a zspage without objects, which the caller took off its class's lists.
    pub(super) fn give_back<S: PageSource>(&self, source: &S, id: ZspageId) {
        let zspage = self.get(id);
        assert_eq!(zspage.objects_used.get(), 0, "ZS-5: a zspage in use is not given back");
        let base = zspage.base.swap(ptr::null_mut(), Relaxed);
        let run = NonNull::new(base).expect("ZS-5: given back once");
        // SAFETY: taken with as many pages in take(). No object of it is live, so that no slot leads
        // to it, nobody has it pinned, and it is in no list.
        unsafe { source.give_back(run, zspage.pages.get()) };
        let mut entry = Chain::default();
        let table = &self.tables[id.kind()];
        entry.push(table, id.index());
        table.put_back(entry);
    }

    /// Gives every run back, and the tables: the end of the pool.
    pub(super) fn release<S: PageSource>(&mut self, source: &S) {
        for table in &mut self.tables {
            for index in 0..table.len() {
                let zspage = table.get(index);
                if let Some(run) = NonNull::new(zspage.base.swap(ptr::null_mut(), Relaxed)) {
                    // SAFETY: taken with as many pages in take(); `&mut self` proves that nobody
                    // else can reach an object of it.
                    unsafe { source.give_back(run, zspage.pages.get()) };
                }
            }
            table.release(source);
        }
    }

    /// Bytes of all descriptors that were ever in use.
    pub(super) fn bytes(&self) -> usize {
        self.tables.iter().map(Table::bytes).sum()
    }

    /// Every zspage that has a run. For checks, while nobody else uses the pool.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn all(&self) -> Vec<ZspageId> {
        let ids = |(kind, table): (usize, &Table<52, Zspage>)| {
            (0..table.len()).map(move |index| ZspageId::new(kind, index)).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = self.tables.iter().enumerate().flat_map(ids).collect();
        all.retain(|id| !self.get(*id).base.load(Relaxed).is_null());
        all
    }
}
