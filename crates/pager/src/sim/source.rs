//! Memory for the pool; requests are refused now and then, and all of them while the pool has so much that it may
//! have no more.

#![allow(clippy::disallowed_types, reason = "the source's lock is none of the engine's")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zsmalloc::PageSource;

use super::random::Random;

#[derive(Debug)]
struct Book {
    random: Random,
    /// Runs that the pool has: their length in pages, by address.
    runs: BTreeMap<usize, usize>,
    /// Their sum.
    pages: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Source {
    book: Mutex<Book>,
    refuses: usize,
    pages_max: usize,
}

impl Source {
    /// A source of `pages_max` pages that refuses one of `refuses` requests.
    pub(super) fn new(random: Random, refuses: usize, pages_max: usize) -> Source {
        let book = Mutex::new(Book { random, runs: BTreeMap::new(), pages: 0 });
        Source { book, refuses, pages_max }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages that the pool has.
    pub(super) fn pages(&self) -> usize {
        self.lock().pages
    }

    /// Flips a bit of an object, as a broken memory module does.
    #[allow(unsafe_code, reason = "the memory is the source's own")]
    pub(super) fn flip(&self, object: Range<usize>, random: &mut Random) {
        let book = self.lock();
        let run = book.runs.range(..=object.start).next_back();
        let inside = |(start, pages): (&usize, &usize)| object.end <= start + pages * PAGE_BYTES;
        assert!(run.is_some_and(inside), "an object lies in a run");
        let at = (object.start + random.below(object.len())) as *mut u8;
        // SAFETY: the byte lies in a run that the pool has (above). No other thread reads it now,
        // since one simulated thread runs at a time, and no thread is suspended inside a codec.
        unsafe { *at ^= 1 << random.below(8) };
    }

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, PAGE_BYTES).expect("a run has a layout")
    }
}

#[allow(unsafe_code, reason = "the contract of PageSource")]
// SAFETY: a run is a heap allocation of `pages` pages, aligned to a page, until it is given back.
unsafe impl PageSource for Source {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        let mut book = self.lock();
        let refuses = self.refuses;
        if book.random.one_in(refuses) || book.pages + pages > self.pages_max {
            return None;
        }
        book.pages += pages;
        // SAFETY: the layout is not empty.
        let run = NonNull::new(unsafe { alloc(Source::layout(pages)) })?;
        assert_eq!(book.runs.insert(run.as_ptr() as usize, pages), None);
        Some(run)
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        let mut book = self.lock();
        let known = book.runs.remove(&(run.as_ptr() as usize));
        assert_eq!(known, Some(pages), "a run goes back as it came");
        book.pages -= pages;
        drop(book);
        // SAFETY: the run came from alloc() with this layout (asserted above), and nobody uses it.
        unsafe { dealloc(run.as_ptr(), Source::layout(pages)) };
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        // SAFETY: by the contract the pages are part of a run, and nobody relies on what they hold.
        unsafe { start.as_ptr().write_bytes(0xDB, pages * PAGE_BYTES) };
    }
}

#[allow(unsafe_code, reason = "frees what is left")]
impl Drop for Source {
    fn drop(&mut self) {
        let book = self.book.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (address, pages) in std::mem::take(&mut book.runs) {
            // SAFETY: the run came from alloc() with this layout, and the pool that had it is gone.
            unsafe { dealloc(address as *mut u8, Source::layout(pages)) };
        }
    }
}
