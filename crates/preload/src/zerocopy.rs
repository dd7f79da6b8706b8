//! Memory that the kernel or the C library uses without a sign of when it is done: it is never compressed.
//!
//! `vmsplice` and zero-copy sends hold references to *pages* that `UFFDIO_MOVE` does not see: if such a page
//! were moved out and used for another unit, the reader of the pipe or socket would read that unit's data. A
//! stack that the program supplies is used by the C library at moments when no fault can be served.
//!
//! When a thread exits, the kernel marks the robust mutexes that the thread holds, and cannot wait for a fault
//! then. At the first mutex that it cannot access, it also gives up all others of the thread, including those
//! in memory shared with other processes. So robust mutexes are never compressed.

use std::ffi::{c_int, c_uint, c_void};

use zfolio_sys::map;

use crate::interpose::{interpose, next, set_errno};
use crate::mappings::{give_up, page_end};
use crate::settings;

unsafe extern "C" {
    fn pthread_mutexattr_getrobust(
        attributes: *const libc::pthread_mutexattr_t,
        robust: *mut c_int,
    ) -> c_int;
}

/// Whether a mutex with these attributes is robust.
fn is_robust(attributes: *const libc::pthread_mutexattr_t) -> bool {
    if attributes.is_null() {
        return false;
    }
    let mut robust = 0;
    // SAFETY: the caller's attributes, and a place for the answer.
    unsafe { pthread_mutexattr_getrobust(attributes, &raw mut robust) };
    robust == libc::PTHREAD_MUTEX_ROBUST
}

interpose! {
    /// `vmsplice(2)`: the memory is no longer managed.
    fn vmsplice(pipe: c_int, parts: *const libc::iovec, count: usize, flags: c_uint) -> isize {
        if settings::get().is_some() && !parts.is_null() {
            // SAFETY: the caller passes `count` parts.
            for part in unsafe { std::slice::from_raw_parts(parts, count) } {
                give_up(part.iov_base as usize, page_end(part.iov_base as usize, part.iov_len));
            }
        }
        let pipe = usize::try_from(pipe).unwrap_or(usize::MAX);
        let words = [pipe, parts as usize, count, flags as usize, 0, 0];
        // SAFETY: the program's own call, with its own words.
        match unsafe { map::forward(libc::SYS_vmsplice, words) } {
            Ok(bytes) => isize::try_from(bytes).unwrap_or(isize::MAX),
            Err(error) => {
                set_errno(error.raw_os_error());
                -1
            }
        }
    }

    /// `setsockopt(2)`: refuses zero-copy sends, with the error of a socket that does not support them.
    fn setsockopt(
        socket: c_int,
        level: c_int,
        name: c_int,
        value: *const c_void,
        bytes: libc::socklen_t
    ) -> c_int {
        if settings::get().is_some() && level == libc::SOL_SOCKET && name == libc::SO_ZEROCOPY {
            set_errno(libc::EOPNOTSUPP);
            return -1;
        }
        let next = next!(setsockopt);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(socket, level, name, value, bytes) }
    }

    /// `pthread_attr_setstack(3)`: the stack is not managed.
    fn pthread_attr_setstack(
        attributes: *mut libc::pthread_attr_t,
        stack: *mut c_void,
        bytes: usize
    ) -> c_int {
        give_up(stack as usize, page_end(stack as usize, bytes));
        let next = next!(pthread_attr_setstack);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(attributes, stack, bytes) }
    }

    /// `pthread_mutex_init(3)`: a robust mutex is not managed.
    fn pthread_mutex_init(
        mutex: *mut libc::pthread_mutex_t,
        attributes: *const libc::pthread_mutexattr_t
    ) -> c_int {
        if settings::get().is_some() && is_robust(attributes) {
            give_up(mutex as usize, page_end(mutex as usize, size_of::<libc::pthread_mutex_t>()));
        }
        let next = next!(pthread_mutex_init);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(mutex, attributes) }
    }
}
