//! Memory for what the C library allocates on behalf of the engine's threads.
//!
//! `pthread_create` calls `calloc` for the new thread's vector of thread-local storage. That vector
//! must not be managed: the engine's threads would wait for themselves. So while a thread of ours
//! starts, the starting thread's allocations come from this small region, and are never freed.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_sys::cpu;

/// 256 KiB: a thread's vector is below 1 KiB, and a process starts four threads.
const REGION_BYTES: usize = 256 << 10;

#[repr(align(4096))]
struct Region(UnsafeCell<[u8; REGION_BYTES]>);

// SAFETY: parts of it are handed out once each (`NEXT` only rises while anybody may allocate).
unsafe impl Sync for Region {}

static REGION: Region = Region(UnsafeCell::new([0; REGION_BYTES]));
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// Looked at by every `malloc`: how many threads are starting threads of ours; and one more before the
/// first `malloc` of all.
static STARTING: AtomicU32 = AtomicU32::new(1);
static FIRST: AtomicBool = AtomicBool::new(true);
/// Which they are; 0: none. Several at a time: a new thread starts others before the one that started it
/// is back.
static STARTERS: [AtomicU32; 8] = [const { AtomicU32::new(0) }; 8];

/// Bytes before each block that hold its length.
const HEADER_BYTES: usize = 16;

/// Runs `start` with this thread's allocations served from here.
pub(crate) fn while_starting<R>(start: impl FnOnce() -> R) -> R {
    let me = cpu::thread_id();
    let free = |slot: &&AtomicU32| slot.compare_exchange(0, me, Relaxed, Relaxed).is_ok();
    let slot = loop {
        if let Some(slot) = STARTERS.iter().find(free) {
            break slot;
        }
        std::thread::yield_now();
    };
    STARTING.fetch_add(1, Relaxed);
    let answer = start();
    STARTING.fetch_sub(1, Relaxed);
    slot.store(0, Relaxed);
    answer
}

/// In a child of `fork`, on its only thread: whoever was starting a thread in the parent is not here.
pub(crate) fn start_over() {
    STARTERS.iter().for_each(|slot| slot.store(0, Relaxed));
    STARTING.store(0, Relaxed);
    // The threads that had these blocks are not here either.
    NEXT.store(0, Relaxed);
}

/// Whether a `malloc` must ask [`allocate`] first.
#[inline]
pub(crate) fn is_starting() -> bool {
    STARTING.load(Relaxed) != 0
}

/// Whether this very thread is starting one of ours.
#[inline]
pub(crate) fn is_starter() -> bool {
    // Looked at by every `free`: only then is it worth a system call.
    is_starting() && {
        let me = cpu::thread_id();
        STARTERS.iter().any(|slot| slot.load(Relaxed) == me)
    }
}

/// Whether this is the first call of all. Only before there is a second thread.
#[cold]
pub(crate) fn is_first() -> bool {
    let first = FIRST.load(Relaxed) && FIRST.swap(false, Relaxed);
    if first {
        STARTING.fetch_sub(1, Relaxed);
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
    let place = |from: usize| {
        let at = (base + from + HEADER_BYTES).next_multiple_of(align) - base;
        let end = at.checked_add(bytes)?.next_multiple_of(HEADER_BYTES);
        (end <= REGION_BYTES).then_some((at, end))
    };
    let from = NEXT.fetch_update(Relaxed, Relaxed, |from| Some(place(from)?.1)).ok()?;
    let (at, _) = place(from)?;
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
