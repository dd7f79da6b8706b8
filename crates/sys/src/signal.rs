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

/// Runs `call` where all signals are blocked, with those open that its own instructions raise: a sandbox of the
/// program's that answers a system call by a signal would otherwise end the process.
pub fn with_faults_open<R>(call: impl FnOnce() -> R) -> R {
    let mask = block_sent();
    let result = call();
    restore(&mask);
    result
}

/// Runs `call` without the signal that the kernel sends a thread whose write would make a file grow beyond
/// `RLIMIT_FSIZE`: SIGXFSZ ends a program that does not expect it. `call` gets the error alone (`FBIG`).
///
/// Costs four system calls besides `call`. Whether there is a limit is not asked: another thread may change it at any
/// time.
pub fn without_file_size_signal<R>(call: impl FnOnce() -> R) -> R {
    let only = only(libc::SIGXFSZ);
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `only` is a set, and `before` a place for one. The call fails only for a bad `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const only, before.as_mut_ptr()) };
    // One that was sent before is the program's.
    let was_pending = is_pending(libc::SIGXFSZ);
    let result = call();
    if !was_pending {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the set and the time outlive the call, and no description of the signal is wanted.
        unsafe { libc::sigtimedwait(&raw const only, std::ptr::null_mut(), &raw const now) };
    }
    // SAFETY: pthread_sigmask wrote the old mask.
    restore(&Mask(unsafe { before.assume_init() }));
    result
}

/// The set of one signal.
fn only(signal: libc::c_int) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is a place for a set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set was emptied above; the call fails only for numbers that are not signals.
    unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    // SAFETY: sigemptyset initialised it.
    unsafe { set.assume_init() }
}

/// Whether a blocked signal waits for this thread or for the process.
fn is_pending(signal: libc::c_int) -> bool {
    let mut set = only(signal);
    // SAFETY: `set` is a place for a set.
    unsafe { libc::sigpending(&raw mut set) };
    // SAFETY: `set` is a set, whether the call succeeded or not.
    unsafe { libc::sigismember(&raw const set, signal) == 1 }
}

#[cfg(test)]
mod tests {
    use super::{block_all, is_pending, restore, without_file_size_signal};

    fn raise() {
        // SAFETY: a signal to this thread, which is blocked, or ends the test.
        unsafe { libc::raise(libc::SIGXFSZ) };
    }

    /// Goal: the signal of a write is taken, the program's own is kept, and the mask is as before. Method: `raise` in
    /// place of a write; a missed signal ends the test.
    #[test]
    fn a_signal_of_the_call_is_taken_and_an_earlier_one_is_kept() {
        without_file_size_signal(raise);
        assert!(!is_pending(libc::SIGXFSZ));
        let mask = block_all();
        without_file_size_signal(raise);
        assert!(!is_pending(libc::SIGXFSZ));
        raise();
        without_file_size_signal(|| ());
        assert!(is_pending(libc::SIGXFSZ), "the program's own");
        // Taken here, since it would end the test.
        // SAFETY: ignoring a signal drops those that are pending.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: as it was.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        assert!(!is_pending(libc::SIGXFSZ));
        restore(&mask);
    }
}
