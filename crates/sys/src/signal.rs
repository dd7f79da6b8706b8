//! Signal masks.

use std::mem::MaybeUninit;

/// The mask that was in force before [`block_all`].
#[derive(Clone, Copy)]
pub struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mask")
    }
}

/// Signals that an instruction of the thread itself raises.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Blocks every signal that a program can block, in this thread.
#[must_use]
pub fn block_all() -> Mask {
    block_all_but(&[])
}

/// Blocks all signals in this thread except those that its own instructions raise.
#[must_use]
pub fn block_sent() -> Mask {
    block_all_but(&FAULTS)
}

fn block_all_but(open: &[libc::c_int]) -> Mask {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `all` is a valid place for a set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    for signal in open {
        // SAFETY: `all` was filled above; the call fails only for numbers that are not signals.
        unsafe { libc::sigdelset(all.as_mut_ptr(), *signal) };
    }
    // SAFETY: `all` was filled above; `before` is a valid place. It fails only for a bad `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: pthread_sigmask wrote the old mask.
    Mask(unsafe { before.assume_init() })
}

/// Restores a mask.
pub fn restore(mask: &Mask) {
    // SAFETY: the mask came from the kernel (block_all); the old mask is not requested.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask.0, std::ptr::null_mut()) };
}
