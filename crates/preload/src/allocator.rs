//! `malloc` and its family, by mimalloc.
//!
//! # Cost
//!
//! One load and a branch that is never taken before `malloc`: about 0.3 ns of 10.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libmimalloc_sys as mi;

/// Declares an entry point of the C library that this library replaces.
macro_rules! interpose {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty $body:block)+) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// That of the C function of the same name.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $out $body
        )+
    };
}
pub(crate) use interpose;

/// The next definition of a function of the C library.
macro_rules! next {
    ($name:literal as $type:ty) => {{
        // SAFETY: a look-up by name.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, $name.as_ptr()) };
        assert!(!next.is_null(), "the C library has this function");
        // SAFETY: the C library's function of this name has this type.
        unsafe { std::mem::transmute::<*mut libc::c_void, $type>(next) }
    }};
}
pub(crate) use next;

/// mimalloc's option `arena_reserve`, in KiB (`mimalloc.h` 3; not among the declarations of
/// libmimalloc-sys).
const OPTION_ARENA_RESERVE: mi::mi_option_t = 23;

/// Before the first block: arenas of an eighth of the limit. With mimalloc's own 1 GiB every program
/// could reach its limit as far as one can tell from its mappings, and would be watched.
#[cold]
fn set_up() {
    crate::home::wake_up();
    let Some(settings) = crate::settings::get() else { return };
    let bytes = (settings.config.limit_bytes / 8).clamp(32 << 20, 1 << 30);
    let kib = std::ffi::c_long::try_from(bytes >> 10).expect("at most 1 GiB");
    // SAFETY: it stores a number.
    unsafe { mi::mi_option_set(OPTION_ARENA_RESERVE, kib) };
}

/// Whether there was no block yet.
static FIRST: AtomicBool = AtomicBool::new(true);

/// Before each block.
#[inline]
fn before_a_block() {
    // The first is asked for by the loader, before there is a second thread.
    if FIRST.load(Relaxed) && FIRST.swap(false, Relaxed) {
        set_up();
    }
}

/// Leaves an error as the C library does.
pub(crate) fn set_errno(value: i32) {
    // SAFETY: it has no precondition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: glibc's errno of this thread, always valid.
    unsafe { errno.write(value) };
}

/// `NULL` with `ENOMEM`, as the C library answers.
fn or_enomem(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        set_errno(libc::ENOMEM);
    }
    block
}

interpose! {
    /// `malloc(3)`.
    fn malloc(bytes: usize) -> *mut c_void {
        before_a_block();
        // SAFETY: mimalloc takes any size.
        or_enomem(unsafe { mi::mi_malloc(bytes) })
    }

    /// `calloc(3)`.
    fn calloc(count: usize, bytes: usize) -> *mut c_void {
        before_a_block();
        // SAFETY: mimalloc checks the product.
        or_enomem(unsafe { mi::mi_calloc(count, bytes) })
    }

    /// `free(3)`.
    fn free(block: *mut c_void) -> () {
        // SAFETY: from mimalloc, or null, by the caller's contract.
        unsafe { mi::mi_free(block) };
    }

    /// `realloc(3)`: to nothing it is `free`, as glibc has it.
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

    /// `aligned_alloc(3)`: what is no power of two is rounded up to one, as glibc has it.
    fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
        let Some(align) = align.checked_next_power_of_two() else {
            set_errno(libc::EINVAL);
            return null_mut();
        };
        before_a_block();
        // SAFETY: a power of two is all that mimalloc asks for.
        or_enomem(unsafe { mi::mi_malloc_aligned(bytes, align) })
    }

    /// `memalign(3)`.
    fn memalign(align: usize, bytes: usize) -> *mut c_void {
        // SAFETY: the same.
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
        // SAFETY: the caller passes a valid place.
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
        // SAFETY: from mimalloc, or null, by the caller's contract.
        unsafe { mi::mi_usable_size(block) }
    }

    /// `malloc_trim(3)`.
    fn malloc_trim(_pad: usize) -> i32 {
        // SAFETY: a request without arguments that matter.
        unsafe { mi::mi_collect(true) };
        1
    }
}
