//! The engine's own heap: Rust's global allocator in this library.
//!
//! dlmalloc over mappings that we make ourselves, under one lock; used when tables grow. On the fault
//! path that is the first look at eight folios. Nothing in it is ever managed (`PRE-1`).

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

use dlmalloc::{Allocator, Dlmalloc};
use zfolio_sys::{futex, map};

#[global_allocator]
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
        unsafe { heap.malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _held = self.lock.lock();
        // SAFETY: exclusive under the lock.
        let heap = unsafe { &mut *self.heap.get() };
        // SAFETY: `pointer` came from this heap with this layout, by the caller's contract.
        unsafe { heap.free(pointer, layout.size(), layout.align()) };
    }
}

/// Holds the heap still: for `fork`, whose child must find it free.
pub(crate) fn hold() -> Held<'static> {
    HEAP.lock.lock()
}

/// Where dlmalloc's memory comes from.
struct System;

// SAFETY: mappings are fresh, private and live until freed here.
unsafe impl Allocator for System {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        map::map_aligned(size, map::PAGE_BYTES)
            .map_or((std::ptr::null_mut(), 0, 0), |at| (at.as_ptr(), size, 0))
    }

    fn remap(&self, _at: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _at: *mut u8, _old: usize, _new: usize) -> bool {
        false
    }

    fn free(&self, at: *mut u8, size: usize) -> bool {
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

/// A lock that can be held across `fork`, and touches no thread-local storage.
pub(crate) struct Lock(AtomicU32);

/// The lock held.
pub(crate) struct Held<'a>(&'a Lock);

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicU32::new(0))
    }

    /// Waits for the lock. 0 free, 1 held, 2 held and waited for.
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
