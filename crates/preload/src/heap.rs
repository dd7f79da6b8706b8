//! The engine's own heap: Rust's global allocator in this library.
//!
//! It is dlmalloc under one lock, over mappings made by this module, and is used when tables grow. On the
//! fault path that happens at the first access to a group of eight folios. Its memory is never managed
//! (`PRE-1`).
//!
//! If the process may have no more address space (`RLIMIT_AS`, `RLIMIT_DATA`), the tables grow into a reserve
//! that exists from the start: a program must not end because it forks at such a limit.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use dlmalloc::{Allocator, Dlmalloc};
use zfolio_pager::fatal;
use zfolio_sys::{futex, map};

#[cfg_attr(not(test), global_allocator)]
static HEAP: Heap =
    Heap { lock: Lock::new(), heap: UnsafeCell::new(Dlmalloc::new_with_allocator(System)) };

struct Heap {
    lock: Lock,
    heap: UnsafeCell<Dlmalloc<System>>,
}

// SAFETY: `heap` is reached under `lock` only.
unsafe impl Sync for Heap {}

// SAFETY: dlmalloc's contract is malloc's; the lock makes each call exclusive.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _held = self.lock.lock();
        // SAFETY: exclusive under the lock.
        let heap = unsafe { &mut *self.heap.get() };
        // SAFETY: the layout is valid by the caller's contract.
        let block = unsafe { heap.malloc(layout.size(), layout.align()) };
        if block.is_null() {
            // The caller could only abort, and without a message in a thread that has no standard error.
            fatal::out_of_address_space(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _held = self.lock.lock();
        // SAFETY: exclusive under the lock.
        let heap = unsafe { &mut *self.heap.get() };
        // SAFETY: `pointer` came from this heap with this layout, by the caller's contract.
        unsafe { heap.free(pointer, layout.size(), layout.align()) };
    }
}

/// Takes the heap's lock, for `fork`: in the child no other thread may have held it.
pub(crate) fn hold() -> Held<'static> {
    HEAP.lock.lock()
}

/// Where dlmalloc's memory comes from.
struct System;

// SAFETY: mappings are fresh, private and live until freed here.
unsafe impl Allocator for System {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let fresh = map::map_aligned(size, map::PAGE_BYTES).ok();
        let block = fresh.map(std::ptr::NonNull::as_ptr).or_else(|| RESERVE.take(size));
        block.map_or((std::ptr::null_mut(), 0, 0), |at| (at, size, 0))
    }

    fn remap(&self, _at: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _at: *mut u8, _old: usize, _new: usize) -> bool {
        false
    }

    fn free(&self, at: *mut u8, size: usize) -> bool {
        if RESERVE.has(at) {
            return false;
        }
        // SAFETY: dlmalloc gives back what alloc() gave it.
        unsafe { rustix::mm::munmap(at.cast(), size) }.is_ok()
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        map::PAGE_BYTES
    }
}

/// 2 MiB: enough for the tables of 512 MiB in units of 16 KiB. A page of it exists only once it is used.
const RESERVE_BYTES: usize = 2 << 20;

#[repr(align(4096))]
struct Reserve {
    bytes: UnsafeCell<[u8; RESERVE_BYTES]>,
    taken: AtomicUsize,
}

static RESERVE: Reserve =
    Reserve { bytes: UnsafeCell::new([0; RESERVE_BYTES]), taken: AtomicUsize::new(0) };

// SAFETY: each part is handed out once: `taken` only rises.
unsafe impl Sync for Reserve {}

impl Reserve {
    /// Returns zeroed bytes, or `None` if too few are left.
    fn take(&self, bytes: usize) -> Option<*mut u8> {
        let bytes = bytes.checked_next_multiple_of(map::PAGE_BYTES)?;
        let end = |taken: usize| taken.checked_add(bytes).filter(|end| *end <= RESERVE_BYTES);
        let from = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end).ok()?;
        Some(self.bytes.get().cast::<u8>().wrapping_add(from))
    }

    /// Whether a block belongs to the reserve.
    fn has(&self, block: *mut u8) -> bool {
        (block as usize).wrapping_sub(self.bytes.get() as usize) < RESERVE_BYTES
    }
}

/// A lock that can be held across `fork`, and uses no thread-local storage.
pub(crate) struct Lock(AtomicU32);

/// The guard of a [`Lock`].
pub(crate) struct Held<'a>(&'a Lock);

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicU32::new(0))
    }

    /// Waits for the lock. Its word is 0: free; 1: held; 2: held, and a thread may wait.
    pub(crate) fn lock(&self) -> Held<'_> {
        // Acquire: pairs with the Release in drop().
        if self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.0.swap(2, Ordering::Acquire) != 0 {
                futex::wait(&self.0, 2, None);
            }
        }
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquires in lock().
        if self.0.0.swap(0, Ordering::Release) == 2 {
            futex::wake(&self.0.0, 1);
        }
    }
}
