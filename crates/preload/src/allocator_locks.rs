//! The locks of mimalloc: no thread holds one at the moment of a `fork`.
//!
//! A child has a copy of every lock, and only the thread that forked: a lock that another thread held is never released
//! there, and the child waits for it in its next `malloc`. The C library's `fork` holds the locks of its own `malloc`
//! meanwhile; mimalloc has no function for that, and some of its locks are in variables that only it can reach. It
//! takes each by `pthread_mutex_lock`, and the linker leads its calls here (`--wrap`, in `build.rs`). Nothing else in
//! this library calls these functions: Rust's locks are its own.
//!
//! Each thread enters a [`Gate`] before it takes such a lock; `fork` closes the gate. It comes before all locks of the
//! engine, since a thread that holds a lock of mimalloc maps memory, and waits for them; but after the lock that lets
//! one thread fork at a time.
//!
//! Two states of mimalloc are no locks, and a child may find them as another thread left them. A thread that looks at
//! an abandoned page clears its bit in `pages_abandoned` for a moment, and `free` of a block of that page in the child
//! waits for the bit. And if a thread was giving pages of arenas back to the system, the child never does so itself.

use std::ffi::c_int;
use std::time::Duration;

use libc::pthread_mutex_t;
use zfolio_core::gate::{Entrance, Gate};
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::thread;

static GATE: Gate = Gate::new();

/// Between two looks at the gate.
const PAUSE: Duration = Duration::from_micros(50);

/// So long `fork` waits, and then goes on all the same: the thread that forks may itself be in `malloc`, if a signal
/// came there and its handler forks. (The C library's `fork` waits for ever then.) Another thread may be slow, if the
/// memory that it wants must be made by writing to a disk.
const PATIENCE_NS: u64 = 10_000_000_000;

// Nobody else may call these functions, or take their place.
#[cfg(not(test))]
std::arch::global_asm!(".hidden __wrap_pthread_mutex_lock", ".hidden __wrap_pthread_mutex_unlock");

#[cfg(not(test))]
unsafe extern "C" {
    #[link_name = "__real_pthread_mutex_lock"]
    fn lock(mutex: *mut pthread_mutex_t) -> c_int;
    #[link_name = "__real_pthread_mutex_unlock"]
    fn unlock(mutex: *mut pthread_mutex_t) -> c_int;
}
#[cfg(test)]
use libc::{pthread_mutex_lock as lock, pthread_mutex_unlock as unlock};

/// A number that tells threads apart, without thread-local storage, which the C library may have to allocate.
fn this_thread() -> usize {
    // SAFETY: a call without arguments.
    let block = unsafe { libc::pthread_self() };
    usize::try_from(block).expect("an address")
}

/// mimalloc takes a lock.
///
/// # Safety
///
/// That of `pthread_mutex_lock`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __wrap_pthread_mutex_lock(mutex: *mut pthread_mutex_t) -> c_int {
    let this = this_thread();
    let mut insists = false;
    loop {
        match GATE.try_enter(this, insists) {
            Entrance::Inside => break,
            Entrance::Wanted => insists = true,
            Entrance::Closed => {}
        }
        thread::sleep(PAUSE);
    }
    // SAFETY: the caller's contract.
    unsafe { lock(mutex) }
}

/// mimalloc releases a lock.
///
/// # Safety
///
/// That of `pthread_mutex_unlock`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __wrap_pthread_mutex_unlock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller's contract.
    let answer = unsafe { unlock(mutex) };
    GATE.leave();
    answer
}

/// The guard of all locks of mimalloc: while it lives, no other thread has one.
pub(crate) struct AllocatorLocks {
    thread: usize,
}

/// Waits until no thread holds a lock of mimalloc. One fork at a time.
pub(crate) fn hold() -> AllocatorLocks {
    let held = AllocatorLocks { thread: this_thread() };
    let until_ns = monotonic_ns().saturating_add(PATIENCE_NS);
    while !GATE.try_close(held.thread) && monotonic_ns() < until_ns {
        thread::sleep(PAUSE);
    }
    held
}

impl AllocatorLocks {
    /// In a child, where no other thread exists.
    pub(crate) fn forget_in_child(self) {
        GATE.start_over();
        std::mem::forget(self);
    }
}

impl Drop for AllocatorLocks {
    fn drop(&mut self) {
        GATE.open(self.thread);
    }
}
