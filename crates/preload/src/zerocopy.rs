//! Memory that the kernel or the C library uses without a sign of when it is done: it is never compressed.
//!
//! `vmsplice` and zero-copy sends hold references to *pages* that `UFFDIO_MOVE` does not see: if such a page
//! were moved out and used for another unit, the reader of the pipe or socket would read that unit's data. A
//! stack that the program supplies is used by the C library at moments when no fault can be served.
//!
//! When a thread exits, the kernel marks the robust mutexes that the thread holds, and cannot wait for a fault
//! then. At the first mutex that it cannot access, it also gives up all others of the thread, including those
//! in memory shared with other processes. So robust mutexes are never compressed. Nor are those with priority
//! inheritance: where threads meet at one, the kernel writes to it and cannot wait for a fault either, and the C
//! library ends the process for the error.
//!
//! In a child of `fork` the C library clears the thread-specific values of the threads that the child does not have,
//! before it calls any handler. Where they were compressed, the kernel would make pages of zeros for these writes, and
//! what else was on the pages would be lost to the child. So these values are never compressed.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_sys::map;

use crate::interpose::{interpose, next, set_errno};
use crate::mappings::{give_up, page_end};
use crate::settings;

unsafe extern "C" {
    fn pthread_mutexattr_getrobust(
        attributes: *const libc::pthread_mutexattr_t,
        robust: *mut c_int,
    ) -> c_int;
    fn pthread_mutexattr_getprotocol(
        attributes: *const libc::pthread_mutexattr_t,
        protocol: *mut c_int,
    ) -> c_int;
}

/// So many thread-specific values are in each block of them. The first block is in the thread's control block, which is
/// not managed, and the others are from `calloc` (`PTHREAD_KEY_2NDLEVEL_SIZE` of the C library).
const VALUES: usize = 32;

/// A value, and the number of times that its key was made.
const VALUE_BYTES: usize = 16;

/// Where a thread's control block has the addresses of its blocks of values. 0: it is not known.
static BLOCKS_AT: AtomicUsize = AtomicUsize::new(0);

/// Looks up, before there are threads, what the C library tells debuggers about these blocks: three words of which the
/// third is where their addresses are.
pub(crate) fn learn() {
    let name = c"_thread_db_pthread_specific";
    // SAFETY: a name that ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if !found.is_null() {
        // SAFETY: a constant of the C library, of three words of 32 bits.
        let [.., at] = unsafe { *found.cast::<[u32; 3]>() };
        BLOCKS_AT.store(usize::try_from(at).unwrap_or(0), Relaxed);
    }
}

/// Stops managing the block in which this thread has its value of a key.
fn give_up_values(key: usize) {
    // SAFETY: a call without arguments; the answer is the address of the control block.
    let thread = unsafe { libc::pthread_self() };
    let (Ok(thread), at @ 1..) = (usize::try_from(thread), BLOCKS_AT.load(Relaxed)) else { return };
    let place = (thread + at + key / VALUES * size_of::<usize>()) as *const usize;
    // SAFETY: the C library has just found the block there.
    let block = unsafe { *place };
    give_up(block, page_end(block, VALUES * VALUE_BYTES));
}

/// Whether the kernel writes to a mutex with these attributes, and cannot wait for a fault: it is robust, or has
/// priority inheritance.
fn is_the_kernels(attributes: *const libc::pthread_mutexattr_t) -> bool {
    if attributes.is_null() {
        return false;
    }
    let (mut robust, mut protocol) = (0, 0);
    // SAFETY: the caller's attributes, and a place for the answer.
    unsafe { pthread_mutexattr_getrobust(attributes, &raw mut robust) };
    // SAFETY: the same.
    unsafe { pthread_mutexattr_getprotocol(attributes, &raw mut protocol) };
    robust == libc::PTHREAD_MUTEX_ROBUST || protocol == libc::PTHREAD_PRIO_INHERIT
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

    /// `pthread_setspecific(3)`: the block that has the value is not managed.
    fn pthread_setspecific(key: libc::pthread_key_t, value: *const c_void) -> c_int {
        let next = next!(pthread_setspecific);
        // SAFETY: the program's own call, with its own arguments.
        let answer = unsafe { next(key, value) };
        let key = usize::try_from(key).unwrap_or(0);
        if answer == 0 && key >= VALUES {
            give_up_values(key);
        }
        answer
    }

    /// `pthread_mutex_init(3)`: a mutex to which the kernel writes is not managed.
    fn pthread_mutex_init(
        mutex: *mut libc::pthread_mutex_t,
        attributes: *const libc::pthread_mutexattr_t
    ) -> c_int {
        if settings::get().is_some() && is_the_kernels(attributes) {
            give_up(mutex as usize, page_end(mutex as usize, size_of::<libc::pthread_mutex_t>()));
        }
        let next = next!(pthread_mutex_init);
        // SAFETY: the program's own call, with its own arguments.
        unsafe { next(mutex, attributes) }
    }
}
