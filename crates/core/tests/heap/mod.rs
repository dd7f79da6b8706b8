//! A page source for tests outside of the crate: the system's allocator, which no test counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zsmalloc::PageSource;

/// Runs of pages from the system's allocator.
pub(crate) struct Heap;

fn layout(pages: usize) -> Layout {
    Layout::from_size_align(pages * PAGE_BYTES, PAGE_BYTES).expect("a run has a layout")
}

// SAFETY: a run is an allocation of `pages` pages, aligned to a page, nobody else's until it is given back.
unsafe impl PageSource for Heap {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        // SAFETY: the pool takes one page at least, so the layout is not empty.
        NonNull::new(unsafe { System.alloc_zeroed(layout(pages)) })
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        // SAFETY: by the caller's promise allocated in take() with this layout, and not used after.
        unsafe { System.dealloc(run.as_ptr(), layout(pages)) };
    }

    unsafe fn discard(&self, _start: NonNull<u8>, _pages: usize) {}
}
