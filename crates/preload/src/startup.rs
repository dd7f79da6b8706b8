//! Memory for what the C library allocates on behalf of the engine's threads.
//!
//! `pthread_create` calls `calloc` for the new thread's vector of thread-local storage. That vector
//! must not be managed: the engine's threads would wait for themselves. So while a thread of ours
//! starts, the starting thread's allocations come from this small region, and are never freed.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_sys::cpu;

/// 256 KiB: a thread's vector is below 1 KiB, and a generation of children starts four threads: 64
/// generations, after which the program's allocator serves.
const REGION_BYTES: usize = 256 << 10;

#[repr(align(4096))]
struct Region(UnsafeCell<[u8; REGION_BYTES]>);

// SAFETY: parts of it are handed out once each (`NEXT` only rises while anybody may allocate).
unsafe impl Sync for Region {}

static REGION: Region = Region(UnsafeCell::new([0; REGION_BYTES]));
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// Looked at by every `malloc`: whether any thread is starting a thread of ours, or this is the first
/// `malloc` of all.
static STARTING: AtomicBool = AtomicBool::new(true);
static FIRST: AtomicBool = AtomicBool::new(true);
static STARTER: AtomicU32 = AtomicU32::new(0);

/// Bytes before each block that hold its length.
const HEADER_BYTES: usize = 16;

/// Runs `start` with this thread's allocations served from here.
pub(crate) fn while_starting<R>(start: impl FnOnce() -> R) -> R {
    STARTER.store(cpu::thread_id(), Relaxed);
    STARTING.store(true, Relaxed);
    let answer = start();
    STARTING.store(false, Relaxed);
    answer
}

/// Whether a `malloc` must ask [`allocate`] first.
#[inline]
pub(crate) fn is_starting() -> bool {
    STARTING.load(Relaxed)
}

/// Whether this very thread is starting one of ours.
#[cold]
pub(crate) fn is_starter() -> bool {
    is_starting() && STARTER.load(Relaxed) == cpu::thread_id()
}

/// Whether this is the first call of all. Only before there is a second thread.
#[cold]
pub(crate) fn is_first() -> bool {
    let first = FIRST.load(Relaxed) && FIRST.swap(false, Relaxed);
    if first {
        STARTING.store(false, Relaxed);
    }
    first
}

/// A zeroed block, if this is the starting thread and there is room.
#[cold]
pub(crate) fn allocate(bytes: usize, align: usize) -> Option<*mut u8> {
    if !is_starter() {
        return None;
    }
    let align = align.max(HEADER_BYTES);
    let base = REGION.0.get() as usize;
    let from = NEXT.load(Relaxed);
    let at = (base + from + HEADER_BYTES).next_multiple_of(align) - base;
    let end = at.checked_add(bytes)?.next_multiple_of(HEADER_BYTES);
    if end > REGION_BYTES || NEXT.compare_exchange(from, end, Relaxed, Relaxed).is_err() {
        return None;
    }
    let block = REGION.0.get().cast::<u8>().wrapping_add(at);
    // SAFETY: `at - HEADER_BYTES >= from`, so the header is inside the part that is ours now.
    unsafe { block.wrapping_sub(HEADER_BYTES).cast::<usize>().write(bytes) };
    // SAFETY: `at + bytes <= end <= REGION_BYTES`.
    unsafe { block.write_bytes(0, bytes) };
    Some(block)
}

/// The length of a block, if `pointer` is one from here.
#[inline]
pub(crate) fn length_of(pointer: *const u8) -> Option<usize> {
    let offset = (pointer as usize).wrapping_sub(REGION.0.get() as usize);
    if offset >= REGION_BYTES {
        return None;
    }
    // SAFETY: a pointer into the region is one that allocate() gave, behind its header.
    Some(unsafe { pointer.wrapping_sub(HEADER_BYTES).cast::<usize>().read() })
}
