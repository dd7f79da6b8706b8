//! Where the pool's memory comes from.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where runs of pages come from: `mmap` in the product, anything that can fail in a test.
///
/// The pool fills a run from its first page up and counts a page as used when it is first handed to
/// an object. So a source serves best with runs whose pages take no memory before they are written
/// (a fresh private mapping, without huge pages). A source that hands out pages which are resident
/// already (a cache of its own) costs up to `pages_taken`, not `pages_used`.
///
/// The pool calls with none of its locks held, but for `discard`. `take` may be called from several threads at once.
///
/// # Safety
///
/// A taken run is `pages * PAGE_BYTES` bytes, aligned to a page, readable and writable, with any
/// contents, nobody else's, and valid until it is given back.
pub unsafe trait PageSource: Send + Sync {
    /// A run of `pages` pages; `None` when there is no memory.
    fn take(&self, pages: usize) -> Option<NonNull<u8>>;

    /// Takes a run back.
    ///
    /// # Safety
    ///
    /// `run` came from `take(pages)` of this source, and is not used after.
    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize);

    /// Part of a run holds nothing any more: its pages need take no memory until they are written.
    /// A lock of the pool is held.
    ///
    /// # Safety
    ///
    /// The `pages` from `start` on are part of a run that was taken, and nobody relies on what they
    /// hold.
    unsafe fn discard(&self, start: NonNull<u8>, pages: usize);
}

// SAFETY: every call goes to the one inner source, which keeps the contract.
unsafe impl<S: PageSource + ?Sized> PageSource for Arc<S> {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        (**self).take(pages)
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise, handed on: `run` came from this very source.
        unsafe { (**self).give_back(run, pages) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        // SAFETY: as above.
        unsafe { (**self).discard(start, pages) }
    }
}

/// The source had no memory; nothing was stored, and what was to be stored is still the caller's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Bytes that were asked of the source.
    pub wanted_bytes: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: the page source refused {} bytes", self.wanted_bytes)
    }
}

impl std::error::Error for OutOfMemory {}
