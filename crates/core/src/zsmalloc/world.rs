//! What the tests and the fuzz target run the pool in: a source that keeps a book and refuses on demand, and seeded
//! numbers.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

pub(crate) use super::check::check_rows;
use super::{PageSource, Pool};
use crate::page::{PAGE_BYTES, UnitOrder};
use crate::sync::Mutex;

/// Above all ranks of the pool: the source is the last that is called.
const RANK_RUNS: u8 = 60;

/// A source of heap memory full of rubbish. It panics when the pool breaks the contract.
#[derive(Debug)]
pub(crate) struct World {
    /// Pages that are out.
    pub(crate) pages: AtomicUsize,
    /// Calls of `take` up to now, the refused ones too.
    pub(crate) requests: AtomicUsize,
    /// The requests that are refused, by number, as two bounds.
    refused: [AtomicUsize; 2],
    /// Pages that may be out.
    pages_max: AtomicUsize,
    /// Whether runs are filled with rubbish (which makes them resident).
    pub(crate) rubbish: AtomicBool,
    /// The pages of each run that is out, by its address.
    runs: Mutex<RANK_RUNS, BTreeMap<usize, usize>>,
}

impl World {
    pub(crate) fn new() -> Arc<World> {
        Arc::new(World {
            pages: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            refused: [AtomicUsize::new(0), AtomicUsize::new(0)],
            pages_max: AtomicUsize::new(usize::MAX),
            rubbish: AtomicBool::new(true),
            runs: Mutex::new(BTreeMap::new()),
        })
    }

    /// Refuses the requests of these numbers, and no others from now on.
    pub(crate) fn refuse(&self, numbers: Range<usize>) {
        self.refused[0].store(numbers.start, Relaxed);
        self.refused[1].store(numbers.end, Relaxed);
    }

    /// Refuses from now on what would make more than `pages` of those that are out.
    pub(crate) fn bound(&self, pages: usize) {
        self.pages_max.store(pages, Relaxed);
    }

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, PAGE_BYTES).expect("a run has a layout")
    }
}

// SAFETY: a run is a heap allocation of `pages` pages, aligned to a page, until it is given back.
unsafe impl PageSource for World {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        assert!(pages > 0);
        let number = self.requests.fetch_add(1, Relaxed);
        if (self.refused[0].load(Relaxed)..self.refused[1].load(Relaxed)).contains(&number) {
            return None;
        }
        if self.pages.load(Relaxed) + pages > self.pages_max.load(Relaxed) {
            return None;
        }
        // SAFETY: the layout is not empty.
        let run = NonNull::new(unsafe { alloc(World::layout(pages)) })?;
        if self.rubbish.load(Relaxed) {
            // SAFETY: just allocated with this size.
            unsafe { run.write_bytes(0xA5, pages * PAGE_BYTES) };
        }
        self.pages.fetch_add(pages, Relaxed);
        let twice = self.runs.lock().insert(run.as_ptr().addr(), pages);
        assert_eq!(twice, None, "the heap gave a run out twice");
        Some(run)
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        let from = start.as_ptr().addr();
        let runs = self.runs.lock();
        let (base, length) = runs.range(..=from).next_back().expect("part of a run");
        assert!(from + pages * PAGE_BYTES <= base + length * PAGE_BYTES, "part of one run");
        drop(runs);
        // SAFETY: by the caller's promise part of a run, and nobody relies on what it holds.
        unsafe { start.write_bytes(0x5A, pages * PAGE_BYTES) };
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        let known = self.runs.lock().remove(&run.as_ptr().addr());
        assert_eq!(known, Some(pages), "a run comes back once, and whole");
        self.pages.fetch_sub(pages, Relaxed);
        // SAFETY: by the caller's promise allocated in take() with this layout, and not used after.
        unsafe { dealloc(run.as_ptr(), World::layout(pages)) };
    }
}

/// Numbers that look random: xorshift64*, seeded.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

/// The order of units of `PAGE_BYTES << order`.
pub(crate) fn unit(order: u8) -> UnitOrder {
    UnitOrder::from_bytes(PAGE_BYTES << order).expect("an order")
}

/// `length` bytes that depend on `tag`.
pub(crate) fn bytes(tag: u64, length: usize) -> Vec<u8> {
    let mut random = Random(tag | 1 << 63);
    let mut bytes = vec![0; length];
    for word in bytes.chunks_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
    }
    bytes
}

/// The same of a pool in which each handle has an object.
pub(crate) fn check(pool: &Pool<Arc<World>>) {
    check_rows(pool, 0);
}
