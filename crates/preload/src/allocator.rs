//! `malloc` and its family, served by mimalloc; but large blocks that grow are mappings of their own (`grown_blocks`).
//!
//! # Cost
//!
//! Each `malloc` makes one more load, and a branch that is taken once: about 0.3 ns of 10 ns. Each `free` compares the
//! address with null and with those of the early blocks, and looks whether it is the start of a page, which cannot be
//! measured.
//!
//! # Start
//!
//! mimalloc's start calls functions of the C library, such as `clock_gettime`. Another preloaded library (libfaketime)
//! may have its own, which allocates. In the middle of its start mimalloc would give a block that it does not know when
//! the block is freed. So whoever allocates during the start, on any thread, gets an early block.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};

use libmimalloc_sys as mi;

use crate::early_blocks::EarlyBlocks;
use crate::grown_blocks::{self, GROWN_BYTES_MIN, GrownBlocks};
use crate::interpose::{interpose, set_errno};

/// Options of mimalloc 3 (`mimalloc.h`) that are not among the declarations of libmimalloc-sys: the size of an arena in
/// KiB, and whether the kernel is asked for huge pages.
const OPTION_ARENA_RESERVE: mi::mi_option_t = 23;
const OPTION_ALLOW_THP: mi::mi_option_t = 43;

/// The smallest arena.
pub(crate) const ARENA_BYTES_MIN: u64 = 32 << 20;

/// Before the first block: starts mimalloc, and sets the size of an arena to an eighth of the limit, or a 64th of a
/// shared limit; to the smallest where the limit says little (`--stall`). With mimalloc's default of 1 GiB the first
/// arena alone would start the reclaim thread in every program.
///
/// It also keeps mimalloc from asking for huge pages, which the C library's `malloc` does not do either: where the
/// kernel gives them to those who ask (`madvise`), the first touch of 2 MiB makes all of it resident, and tables of
/// SQLite took 209 MB instead of 184.
fn set_up() {
    crate::lifecycle::wake_up();
    // mimalloc starts before it is told: if it starts with huge pages off, the whole process gets none.
    // SAFETY: the function has no precondition, and does nothing when it is called again.
    unsafe { mi::mi_process_init() };
    let Some(settings) = crate::settings::get() else { return };
    // A process begins with a 64th of a shared limit.
    let part = if settings.tree { 64 } else { 8 };
    let most = if settings.is_early() { ARENA_BYTES_MIN } else { 1 << 30 };
    let bytes = (settings.config.limit_bytes / part).clamp(ARENA_BYTES_MIN, most);
    let kib = std::ffi::c_long::try_from(bytes >> 10).expect("at most 1 GiB");
    for (option, value) in [(OPTION_ALLOW_THP, 0), (OPTION_ARENA_RESERVE, kib)] {
        // SAFETY: it stores a number.
        unsafe { mi::mi_option_set(option, value) };
    }
}

/// How far the start of mimalloc is.
static STATE: AtomicU8 = AtomicU8::new(NEW);
const NEW: u8 = 0;
const STARTING: u8 = 1;
const READY: u8 = 2;

/// The blocks that are asked for while mimalloc starts.
static EARLY: EarlyBlocks<{ 64 << 10 }> = EarlyBlocks::new();

/// Large blocks that have grown.
static GROWN: GrownBlocks = GrownBlocks::new();

/// Whether mimalloc serves blocks.
#[inline]
fn is_ready() -> bool {
    // Acquire: pairs with the Release in start().
    STATE.load(Ordering::Acquire) == READY
}

/// Starts mimalloc, if nobody did so yet. False while it is being started, by this thread or another one.
///
/// No thread waits here: the one that starts mimalloc may be waiting for this one, in a function of another library.
#[cold]
pub(crate) fn start() -> bool {
    if STATE.compare_exchange(NEW, STARTING, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        set_up();
        // Release: pairs with the Acquire in is_ready().
        STATE.store(READY, Ordering::Release);
    }
    is_ready()
}

/// Before each block: whether it is mimalloc's, and not an early one.
#[inline]
fn before_a_block() -> bool {
    is_ready() || start()
}

/// An early block.
#[cold]
fn early(bytes: usize, align: usize) -> *mut c_void {
    or_enomem(EARLY.allocate(bytes, align))
}

/// Whether a block is none of mimalloc's. Until it has started, mimalloc cannot tell that null is none.
#[inline]
fn is_foreign(block: *const c_void) -> bool {
    block.is_null() || EARLY.has(block)
}

/// Copies the first `bytes` of a block to a new one. False: there is no new one.
///
/// # Safety
///
/// Both have that many bytes, unless the new one is null.
unsafe fn fill(new: *mut c_void, block: *const c_void, bytes: usize) -> bool {
    if !new.is_null() {
        // SAFETY: the caller's contract; a new block is no part of another.
        unsafe { new.cast::<u8>().copy_from_nonoverlapping(block.cast(), bytes) };
    }
    !new.is_null()
}

/// [`realloc`] of an early block.
#[cold]
fn move_out(block: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: malloc takes any size.
    let new = unsafe { malloc(bytes) };
    // SAFETY: an early block, by the caller's contract.
    let kept = unsafe { EARLY.bytes_of(block) }.min(bytes);
    // SAFETY: both have that many bytes.
    unsafe { fill(new, block, kept) };
    new
}

/// [`realloc`] of a block that has grown before.
#[cold]
fn resize(place: grown_blocks::Place<'_>, block: *mut c_void, bytes: usize) -> *mut c_void {
    if !place.is_too_large_for(bytes) {
        return place.resize(bytes);
    }
    // SAFETY: mimalloc takes any size.
    let new = unsafe { mi::mi_malloc(bytes) };
    // SAFETY: the block has more bytes than the new one.
    if unsafe { fill(new, block, bytes) } {
        place.free();
    }
    new
}

/// [`realloc`] of a block of mimalloc's: one that is to be large, and has no room, becomes a mapping of its own. Null:
/// it is to stay mimalloc's.
#[cold]
fn outgrow(block: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: from mimalloc, by the caller's contract.
    let had = unsafe { mi::mi_usable_size(block) };
    if bytes <= had {
        return null_mut();
    }
    let new = GROWN.make(bytes);
    // SAFETY: the new block has more bytes than the old one.
    if unsafe { fill(new, block, had) } {
        // SAFETY: from mimalloc, by the caller's contract.
        unsafe { mi::mi_free(block) };
    }
    new
}

/// Sets `ENOMEM` if there is no block, as the C library does.
fn or_enomem(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        set_errno(libc::ENOMEM);
    }
    block
}

interpose! {
    /// `malloc(3)`.
    fn malloc(bytes: usize) -> *mut c_void {
        if !before_a_block() {
            return early(bytes, 1);
        }
        // SAFETY: mimalloc takes any size.
        or_enomem(unsafe { mi::mi_malloc(bytes) })
    }

    /// `calloc(3)`.
    fn calloc(count: usize, bytes: usize) -> *mut c_void {
        if !before_a_block() {
            // No block has so many bytes.
            return early(count.saturating_mul(bytes), 1);
        }
        // SAFETY: mimalloc checks the product.
        or_enomem(unsafe { mi::mi_calloc(count, bytes) })
    }

    /// `free(3)`.
    fn free(block: *mut c_void) -> () {
        if is_foreign(block) {
            return;
        }
        if let Some(place) = GROWN.find(block) {
            return place.free();
        }
        // SAFETY: from mimalloc, by the caller's contract.
        unsafe { mi::mi_free(block) };
    }

    /// `realloc(3)`: with a size of 0 it is `free`, as in glibc.
    fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
        if bytes == 0 && !block.is_null() {
            // SAFETY: the caller's contract.
            unsafe { free(block) };
            return null_mut();
        }
        if block.is_null() {
            // SAFETY: as malloc.
            return unsafe { malloc(bytes) };
        }
        if EARLY.has(block) {
            return move_out(block, bytes);
        }
        if let Some(place) = GROWN.find(block) {
            return or_enomem(resize(place, block, bytes));
        }
        if bytes >= GROWN_BYTES_MIN {
            let new = outgrow(block, bytes);
            if !new.is_null() {
                return new;
            }
        }
        // SAFETY: from mimalloc, by the caller's contract.
        or_enomem(unsafe { mi::mi_realloc(block, bytes) })
    }

    /// `reallocarray(3)`.
    fn reallocarray(block: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
        match count.checked_mul(bytes) {
            // SAFETY: as realloc.
            Some(total) => unsafe { realloc(block, total) },
            None => or_enomem(null_mut()),
        }
    }

    /// `aligned_alloc(3)`: rounds the alignment up to a power of two, as glibc does.
    fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
        let Some(align) = align.checked_next_power_of_two() else {
            set_errno(libc::EINVAL);
            return null_mut();
        };
        if !before_a_block() {
            return early(bytes, align);
        }
        // SAFETY: mimalloc requires only that the alignment is a power of two.
        or_enomem(unsafe { mi::mi_malloc_aligned(bytes, align) })
    }

    /// `memalign(3)`.
    fn memalign(align: usize, bytes: usize) -> *mut c_void {
        // SAFETY: aligned_alloc() accepts any two numbers.
        unsafe { aligned_alloc(align, bytes) }
    }

    /// `posix_memalign(3)`.
    fn posix_memalign(out: *mut *mut c_void, align: usize, bytes: usize) -> i32 {
        if !align.is_power_of_two() || align % size_of::<*mut c_void>() != 0 {
            return libc::EINVAL;
        }
        // SAFETY: the alignment is checked.
        let block = unsafe { aligned_alloc(align, bytes) };
        if block.is_null() {
            return libc::ENOMEM;
        }
        // SAFETY: the caller passes a pointer that is valid for the write.
        unsafe { out.write(block) };
        0
    }

    /// `valloc(3)`.
    fn valloc(bytes: usize) -> *mut c_void {
        // SAFETY: a page is a power of two.
        unsafe { aligned_alloc(zfolio_core::page::PAGE_BYTES, bytes) }
    }

    /// `pvalloc(3)`.
    fn pvalloc(bytes: usize) -> *mut c_void {
        match bytes.checked_next_multiple_of(zfolio_core::page::PAGE_BYTES) {
            // SAFETY: as valloc.
            Some(bytes) => unsafe { valloc(bytes) },
            None => or_enomem(null_mut()),
        }
    }

    /// `malloc_usable_size(3)`.
    fn malloc_usable_size(block: *const c_void) -> usize {
        if EARLY.has(block) {
            // SAFETY: an early block, by the caller's contract.
            return unsafe { EARLY.bytes_of(block) };
        }
        if block.is_null() {
            return 0;
        }
        if let Some(place) = GROWN.find(block) {
            return place.bytes();
        }
        // SAFETY: from mimalloc, by the caller's contract.
        unsafe { mi::mi_usable_size(block) }
    }

    /// `malloc_trim(3)`.
    fn malloc_trim(_pad: usize) -> i32 {
        if !is_ready() {
            return 0;
        }
        // SAFETY: the function has no precondition.
        unsafe { mi::mi_collect(true) };
        1
    }
}
