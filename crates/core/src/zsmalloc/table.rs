//! Tables that grow and never move, in runs of the page source.
//!
//! A table is a list of **chunks**: the first has 128 entries, each next one twice as many. An entry
//! is a `T` and, for descriptors, a **tail** of `u32` words. Entries in use have an index; vacant
//! ones are linked through themselves in [`Chain`]s.
//!
//! # Invariants
//!
//! - `TABLE-1` Entries below `len` are initialised, and lie in chunks that stay until
//!   [`Table::release`]. `len` only rises.
//! - `TABLE-2` A vacant entry is in one chain.
//! - `TABLE-3` Chunk `k` is a run of `chunk_pages(k)` pages, or null.
//!
//! # Concurrency
//!
//! `get` takes no lock. The lock is held for a few links at a time; the source is called without it.
//!
//! # Cost
//!
//! Entries at or above `len` were never written, so that the half of the last chunk that may be
//! unused takes no memory from a source of fresh mappings.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use super::source::{OutOfMemory, PageSource};
use crate::page::PAGE_BYTES;
use crate::sync::{Guard, Mutex};

/// log2 of the entries of the first chunk.
const FIRST_SHIFT: u32 = 7;

/// Chunks of a table: 128 + 256 + ... + 2^31 entries.
const CHUNKS: usize = 25;

/// The most entries of a table: an index and one more fit 32 bits.
pub(super) const ENTRIES_MAX: u32 = u32::MAX - (1 << FIRST_SHIFT);

/// What a table can hold: it can be vacant, and then it has a link.
pub(super) trait Entry: Send + Sync {
    /// A vacant entry without a link.
    fn vacant() -> Self;
    /// Links a vacant entry: the index of the next plus one, or 0.
    fn set_link(&self, link: u32);
    /// The link of a vacant entry.
    fn link(&self) -> u32;
}

/// Vacant entries, linked: the index of the first plus one, or 0; and how many.
#[derive(Debug, Default)]
pub(super) struct Chain {
    head: u32,
    len: u32,
}

impl Chain {
    /// How many entries.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Takes the first entry off.
    pub(super) fn pop<const RANK: u8, T: Entry>(&mut self, table: &Table<RANK, T>) -> Option<u32> {
        let index = self.head.checked_sub(1)?;
        self.head = table.get(index).link();
        self.len -= 1;
        Some(index)
    }

    /// Puts `index` first.
    pub(super) fn push<const RANK: u8, T: Entry>(&mut self, table: &Table<RANK, T>, index: u32) {
        table.get(index).set_link(self.head);
        self.head = index + 1;
        self.len += 1;
    }

    /// Moves up to `count` entries of `from` to this chain.
    pub(super) fn draw<const RANK: u8, T: Entry>(
        &mut self,
        table: &Table<RANK, T>,
        from: &mut Chain,
        count: u32,
    ) {
        for _ in 0..count {
            let Some(index) = from.pop(table) else { break };
            self.push(table, index);
        }
    }
}

/// The table. The header says how it works.
#[derive(Debug)]
pub(super) struct Table<const RANK: u8, T> {
    chunks: [AtomicPtr<u8>; CHUNKS],
    /// Entries that were ever in use.
    len: AtomicU32,
    len_max: u32,
    /// Words after each entry.
    tail: usize,
    stride: usize,
    vacant: Mutex<RANK, Chain>,
    entry: PhantomData<T>,
}

impl<const RANK: u8, T: Entry> Table<RANK, T> {
    /// An empty table of up to `len_max` entries, each with `tail` words after it.
    pub(super) fn new(tail: usize, len_max: u32) -> Self {
        const {
            assert!(align_of::<T>() <= 8 && size_of::<T>() % align_of::<u32>() == 0);
            assert!(!std::mem::needs_drop::<T>());
        }
        assert!(len_max <= ENTRIES_MAX);
        Table {
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            len: AtomicU32::new(0),
            len_max,
            tail,
            stride: (size_of::<T>() + tail * size_of::<u32>()).next_multiple_of(8),
            vacant: Mutex::new(Chain::default()),
            entry: PhantomData,
        }
    }

    /// Chunk of `index`, and its place there.
    fn locate(index: u32) -> (usize, usize) {
        let position = index + (1 << FIRST_SHIFT);
        let top = position.ilog2();
        ((top - FIRST_SHIFT) as usize, (position - (1 << top)) as usize)
    }

    fn chunk_pages(&self, chunk: usize) -> usize {
        (self.stride << FIRST_SHIFT << chunk).div_ceil(PAGE_BYTES)
    }

    /// The address of an entry, if its chunk exists.
    fn address(&self, index: u32) -> Option<NonNull<u8>> {
        let (chunk, place) = Self::locate(index);
        // Acquire: pairs with the Release in grow(); the run's memory is seen with its address.
        let base = NonNull::new(self.chunks[chunk].load(Acquire))?;
        // SAFETY: `place < 128 << chunk` by locate(), so by TABLE-3 the entry lies inside the run.
        Some(unsafe { base.add(place * self.stride) })
    }

    /// The entry at `index`.
    ///
    /// # Panics
    ///
    /// When there never was one: the index was not given out by this table.
    pub(super) fn get(&self, index: u32) -> &T {
        let entry = self.entry(index).cast::<T>();
        // SAFETY: by TABLE-1 the entry is initialised and stays for as long as `self` is borrowed
        // (release() takes `&mut self`); it is only ever shared (`T: Sync`, no `&mut T` is made).
        unsafe { entry.as_ref() }
    }

    /// The words after the entry at `index`.
    pub(super) fn tail(&self, index: u32) -> &[AtomicU32] {
        // SAFETY: an entry is `size_of::<T>() + 4 * tail` bytes at least, see `stride`.
        let tail = unsafe { self.entry(index).add(size_of::<T>()) };
        // SAFETY: `tail` words follow, zeroed by append() before `len` covered them (TABLE-1); their
        // alignment is checked in new(); they are only ever shared.
        unsafe { std::slice::from_raw_parts(tail.cast::<AtomicU32>().as_ptr(), self.tail) }
    }

    /// The address of an initialised entry.
    fn entry(&self, index: u32) -> NonNull<u8> {
        assert!(index < self.len(), "no entry {index}: only {} were ever used", self.len());
        self.address(index).expect("TABLE-1: entries below len have a chunk")
    }

    /// Entries that were ever in use: each index below is valid for [`Table::get`].
    pub(super) fn len(&self) -> u32 {
        // Acquire: pairs with the Release in append(); the entry is seen initialised.
        self.len.load(Acquire)
    }

    /// Bytes of the pages that entries were ever written to.
    pub(super) fn bytes(&self) -> usize {
        let Some(last) = self.len().checked_sub(1) else { return 0 };
        let (chunk, place) = Self::locate(last);
        let whole: usize = (0..chunk).map(|chunk| self.chunk_pages(chunk)).sum();
        (whole + ((place + 1) * self.stride).div_ceil(PAGE_BYTES)) * PAGE_BYTES
    }

    /// Takes one to `count` vacant entries.
    pub(super) fn take<S: PageSource>(&self, source: &S, count: u32) -> Result<Chain, OutOfMemory> {
        loop {
            let mut taken = Chain::default();
            let mut vacant = self.vacant.lock();
            taken.draw(self, &mut vacant, count);
            while taken.len() < count {
                let Some(index) = self.append(&vacant) else { break };
                taken.push(self, index);
            }
            drop(vacant);
            if taken.len() > 0 {
                return Ok(taken);
            }
            self.grow(source)?;
        }
    }

    /// Gives entries back. They are vacant.
    pub(super) fn put_back(&self, mut chain: Chain) {
        let count = chain.len();
        self.vacant.lock().draw(self, &mut chain, count);
    }

    /// Initialises one more entry, if there is a chunk for it. The guard keeps others from it.
    fn append(&self, _vacant: &Guard<'_, RANK, Chain>) -> Option<u32> {
        let index = self.len.load(Relaxed);
        if index >= self.len_max {
            return None;
        }
        let entry = self.address(index)?;
        // SAFETY: entry and tail lie inside the run (see address() and `stride`), which is writable,
        // and at or above `len` nobody has a reference into it.
        unsafe { entry.write_bytes(0, self.stride) };
        // SAFETY: as above; the run is aligned to a page and `stride` to 8, so `T` is aligned.
        unsafe { entry.cast::<T>().write(T::vacant()) };
        // Release: pairs with the Acquire in len().
        self.len.store(index + 1, Release);
        Some(index)
    }

    /// Adds the chunk that the entry at `len` needs.
    #[cold]
    fn grow<S: PageSource>(&self, source: &S) -> Result<(), OutOfMemory> {
        let index = self.len();
        let (chunk, _) = Self::locate(index.min(ENTRIES_MAX - 1));
        let pages = self.chunk_pages(chunk);
        let refused = OutOfMemory { wanted_bytes: pages * PAGE_BYTES };
        if index >= self.len_max {
            return Err(refused);
        }
        let run = source.take(pages).ok_or(refused)?;
        // Release: pairs with the Acquire in address().
        let raced =
            self.chunks[chunk].compare_exchange(ptr::null_mut(), run.as_ptr(), Release, Relaxed);
        if raced.is_err() {
            // SAFETY: taken above with `pages`, and seen by nobody.
            unsafe { source.give_back(run, pages) };
        }
        Ok(())
    }

    /// Gives the chunks back: the end of the table.
    pub(super) fn release<S: PageSource>(&mut self, source: &S) {
        *self.len.get_mut() = 0;
        for chunk in 0..CHUNKS {
            let base = std::mem::replace(self.chunks[chunk].get_mut(), ptr::null_mut());
            if let Some(run) = NonNull::new(base) {
                // SAFETY: by TABLE-3 taken with as many pages; with `len` 0 and `&mut self` no
                // reference into it is left or can be made.
                unsafe { source.give_back(run, self.chunk_pages(chunk)) };
            }
        }
    }

    /// How many entries are vacant and here.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn vacant_len(&self) -> u32 {
        self.vacant.lock().len()
    }
}
