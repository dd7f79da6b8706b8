//! `dlopen`: every module uses the same `malloc`.
//!
//! With `RTLD_DEEPBIND` a module searches its own libraries first: it would find the C library's `free`, and
//! pass it blocks of this library's `malloc`. So the flag is removed: a module then searches in the usual
//! order, the program's libraries first.
//!
//! # The caller
//!
//! The C library's `dlopen` identifies its caller by the return address, and searches the caller's `RUNPATH`,
//! `$ORIGIN` and namespace. So the functions here must *jump* to it and leave no frame of this library on the
//! stack. Each ends in a call whose result it returns, which every optimised build compiles to a jump. A debug
//! build does not: there `dlopen` would search the `RUNPATH` of this library, which has none. A case of
//! `tests/behaviour` checks the jump.

use std::ffi::{c_char, c_int, c_long, c_void};

use crate::interpose::{interpose, next};

interpose! {
    /// `dlopen(3)`.
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
        let next = next!(dlopen);
        // SAFETY: the program's own call.
        unsafe { next(name, flags & !libc::RTLD_DEEPBIND) }
    }

    /// `dlmopen(3)`.
    fn dlmopen(namespace: c_long, name: *const c_char, flags: c_int) -> *mut c_void {
        let next = next!(dlmopen);
        // SAFETY: the program's own call.
        unsafe { next(namespace, name, flags & !libc::RTLD_DEEPBIND) }
    }
}
