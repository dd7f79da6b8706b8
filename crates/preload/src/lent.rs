//! Memory that the program lends to somebody who does not tell when he is done with it.
//!
//! `vmsplice` and zero-copy sends keep the *pages*, in a way that a move does not notice: a page that
//! was moved out and used for another unit would be read by whoever has the pipe or the socket. A
//! stack that the program supplies is used by the C library at moments when no fault can be served.
//!
//! When a thread exits, the kernel marks the robust mutexes that the thread holds, and waits for no fault: it
//! stops at the first that it cannot reach, and with it at all others of the thread, those in memory shared with
//! other processes too. So robust mutexes are never compressed.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use zfolio_sys::map;

use crate::allocator::{interpose, next, set_errno};
use crate::mappings::{give_up, page_end};
use crate::settings;

type MutexInit =
    unsafe extern "C" fn(*mut libc::pthread_mutex_t, *const libc::pthread_mutexattr_t) -> c_int;

/// The C library's `pthread_mutex_init`, once it was looked up: programs call it often.
static MUTEX_INIT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

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
    /// `vmsplice(2)`: what is lent is not managed any more.
    fn vmsplice(pipe: c_int, parts: *const libc::iovec, count: usize, flags: c_uint) -> isize {
        if settings::get().is_some() && !parts.is_null() {
            // SAFETY: the caller passes `count` parts.
            for part in unsafe { std::slice::from_raw_parts(parts, count) } {
                give_up(part.iov_base as usize, page_end(part.iov_base as usize, part.iov_len));
            }
        }
        let words = [usize::try_from(pipe).unwrap_or(usize::MAX), parts as usize, count, flags as usize, 0, 0];
        // SAFETY: the program's own call, with its own words.
        match unsafe { map::forward(libc::SYS_vmsplice, words) } {
            Ok(bytes) => isize::try_from(bytes).unwrap_or(isize::MAX),
            Err(error) => {
                set_errno(error.raw_os_error());
                -1
            }
        }
    }

    /// `setsockopt(2)`: zero-copy sends are refused, as a socket that cannot do them does.
    fn setsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, bytes: libc::socklen_t) -> c_int {
        if settings::get().is_some() && level == libc::SOL_SOCKET && name == libc::SO_ZEROCOPY {
            set_errno(libc::EOPNOTSUPP);
            return -1;
        }
        type Call = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, libc::socklen_t) -> c_int;
        let next = next!(c"setsockopt" as Call);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(socket, level, name, value, bytes) }
    }

    /// `pthread_attr_setstack(3)`: the stack is not managed.
    fn pthread_attr_setstack(attributes: *mut libc::pthread_attr_t, stack: *mut c_void, bytes: usize) -> c_int {
        give_up(stack as usize, page_end(stack as usize, bytes));
        type Call = unsafe extern "C" fn(*mut libc::pthread_attr_t, *mut c_void, usize) -> c_int;
        let next = next!(c"pthread_attr_setstack" as Call);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(attributes, stack, bytes) }
    }
    /// `pthread_mutex_init(3)`: a robust mutex is not managed.
    fn pthread_mutex_init(mutex: *mut libc::pthread_mutex_t, attributes: *const libc::pthread_mutexattr_t) -> c_int {
        if settings::get().is_some() && is_robust(attributes) {
            give_up(mutex as usize, page_end(mutex as usize, size_of::<libc::pthread_mutex_t>()));
        }
        let mut found = MUTEX_INIT.load(Relaxed);
        if found.is_null() {
            found = next!(c"pthread_mutex_init" as MutexInit) as *mut c_void;
            MUTEX_INIT.store(found, Relaxed);
        }
        // SAFETY: the C library's function of this name has this type.
        let next = unsafe { std::mem::transmute::<*mut c_void, MutexInit>(found) };
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(mutex, attributes) }
    }
}
