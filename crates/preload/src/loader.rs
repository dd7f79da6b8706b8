//! `dlopen`: every module shares the one `malloc`.
//!
//! `RTLD_DEEPBIND` has a module look into itself and its own libraries first, so that it finds the C library's
//! `free` and hands it blocks that are ours. So that flag is left out: a module finds what the program has
//! first, as it does without the flag.
//!
//! # The caller
//!
//! `dlopen` takes its return address for its caller's, and searches the caller's `RUNPATH`, `$ORIGIN` and
//! namespace. So the C library's function has to be *jumped* to, with nothing of ours on the stack. The functions
//! here end in a call whose answer they return, which any optimised build makes a jump; a debug build does not,
//! and there a module is found by our library's `RUNPATH`, of which there is none. `tests/behaviour` looks at it.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::allocator::interpose;

type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type OpenApart = unsafe extern "C" fn(c_long, *const c_char, c_int) -> *mut c_void;

/// The C library's functions, once they were looked up.
static OPEN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static OPEN_APART: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Looks a function of the C library up.
#[cold]
#[inline(never)]
fn look_up(name: &std::ffi::CStr, into: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: a look-up by name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!found.is_null(), "the C library has this function");
    into.store(found, Relaxed);
    found
}

interpose! {
    /// `dlopen(3)`.
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
        let mut next = OPEN.load(Relaxed);
        if next.is_null() {
            next = look_up(c"dlopen", &OPEN);
        }
        // SAFETY: the C library's function of this name has this type.
        let next = unsafe { std::mem::transmute::<*mut c_void, Open>(next) };
        // SAFETY: the program's own call.
        unsafe { next(name, flags & !libc::RTLD_DEEPBIND) }
    }

    /// `dlmopen(3)`.
    fn dlmopen(namespace: c_long, name: *const c_char, flags: c_int) -> *mut c_void {
        let mut next = OPEN_APART.load(Relaxed);
        if next.is_null() {
            next = look_up(c"dlmopen", &OPEN_APART);
        }
        // SAFETY: the C library's function of this name has this type.
        let next = unsafe { std::mem::transmute::<*mut c_void, OpenApart>(next) };
        // SAFETY: the program's own call.
        unsafe { next(namespace, name, flags & !libc::RTLD_DEEPBIND) }
    }
}
