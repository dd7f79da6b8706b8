//! What this process has inherited and Rust's runtime changes before `main`: that runtime ignores SIGPIPE, and opens
//! `/dev/null` under the number of a standard descriptor that is closed. A program that is started in the place of this
//! process needs both as they were.
//!
//! An executable runs [`look`] from its `.init_array`, which is before that runtime. In one that does not, SIGPIPE
//! counts as not ignored and the descriptors count as open, as they are for most programs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

// Relaxed: `look` runs before there is a second thread, and nothing is written afterwards.
static IS_PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// By the number of the descriptor.
static IS_CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Notes what this process has inherited. To be called once, before `main`.
pub extern "C" fn look() {
    // SAFETY: a `sigaction` is integers and an optional function: zeros are a valid one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: it changes nothing, and writes the present action to a place of ours.
    let failed = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    let is_ignored = failed == 0 && action.sa_sigaction == libc::SIG_IGN;
    IS_PIPE_IGNORED.store(is_ignored, Relaxed);
    for (number, is_closed) in (0..).zip(&IS_CLOSED) {
        // SAFETY: plain numbers. It fails only for a descriptor that is not open.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        is_closed.store(flags < 0, Relaxed);
    }
}

/// Whether this process was started with SIGPIPE ignored, as services of systemd are.
#[must_use]
pub fn is_pipe_ignored() -> bool {
    IS_PIPE_IGNORED.load(Relaxed)
}

/// Whether this process was started without the standard descriptor of this number. What it has there now is not
/// where anybody reads or writes.
#[must_use]
pub fn is_closed(number: i32) -> bool {
    usize::try_from(number)
        .ok()
        .and_then(|number| IS_CLOSED.get(number))
        .is_some_and(|is_closed| is_closed.load(Relaxed))
}
