//! Threads without the standard library's thread-local storage.
//!
//! `std::thread` registers destructors of thread-locals in each new thread, for which the C library
//! calls `calloc`: the program's, where we are a preloaded library. A thread started here runs
//! nothing but what it is given.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use rustix::io::Errno;

use crate::map::{PAGE_BYTES, Reservation};

type Life = Box<dyn FnOnce() + Send>;

/// What a new thread is handed.
struct Start {
    name: &'static CStr,
    life: Life,
}

/// Starts a detached thread with a stack of `stack_bytes`; it inherits the signal mask.
///
/// # Errors
///
/// Those of `pthread_create`: `AGAIN` for want of threads. `NOMEM` for want of a stack.
pub fn spawn(name: &'static CStr, stack_bytes: usize, life: Life) -> Result<(), Errno> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let attributes = attributes.as_mut_ptr();
    // SAFETY: a valid place for attributes.
    let made = unsafe { libc::pthread_attr_init(attributes) };
    assert_eq!(made, 0, "glibc's pthread_attr_init does not fail");
    // A stack of our own: the C library's cache of stacks would bring a dead thread's vector of
    // thread-local storage along, which the program's `malloc` has made.
    let stack = Reservation::new(stack_bytes, PAGE_BYTES)?;
    let bottom = stack.base().as_ptr().cast();
    // SAFETY: initialised above; the stack is mapped, and leaked below once the thread has it.
    unsafe { libc::pthread_attr_setstack(attributes, bottom, stack.bytes()) };
    // SAFETY: initialised above.
    unsafe { libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED) };
    let start = Box::into_raw(Box::new(Start { name, life }));
    let mut thread = MaybeUninit::uninit();
    // SAFETY: `run` takes what Box::into_raw gave; the attributes are initialised.
    let answer =
        unsafe { libc::pthread_create(thread.as_mut_ptr(), attributes, run, start.cast()) };
    // SAFETY: initialised above, and not used after.
    unsafe { libc::pthread_attr_destroy(attributes) };
    if answer == 0 {
        // Threads of the engine end with the process, and so do their stacks.
        let _forever = stack.leak();
        return Ok(());
    }
    // SAFETY: no thread has taken it.
    drop(unsafe { Box::from_raw(start) });
    Err(Errno::from_raw_os_error(answer))
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: spawn() made it for this thread alone.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    // A name is for people only.
    rustix::thread::set_name(start.name).ok();
    (start.life)();
    std::ptr::null_mut()
}

/// A number that no other living thread of the process has.
#[must_use]
pub fn tag() -> usize {
    // SAFETY: no preconditions; it reads the thread pointer.
    unsafe { libc::pthread_self() }.try_into().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_thread_runs_what_it_is_given() {
        static RAN: AtomicU32 = AtomicU32::new(0);
        let life = Box::new(|| {
            RAN.store(7, Ordering::Release);
            crate::futex::wake(&RAN, 1);
        });
        super::spawn(c"zfolio-test", 64 << 10, life).unwrap();
        while RAN.load(Ordering::Acquire) != 7 {
            crate::futex::wait(&RAN, 0, None);
        }
    }
}
