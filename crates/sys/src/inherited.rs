//! What this process has inherited and Rust's runtime changes before `main`: that runtime ignores SIGPIPE. A program that
//! is started in the place of this process needs it as it was.
//!
//! An executable runs [`look`] from its `.init_array`, which is before that runtime. In one that does not, SIGPIPE
//! counts as not ignored, as it is for most programs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

// Relaxed: `look` runs before there is a second thread, and nothing is written afterwards.
static IS_PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Notes what this process has inherited. To be called once, before `main`.
pub extern "C" fn look() {
    // SAFETY: a `sigaction` is integers and an optional function: zeros are a valid one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: it changes nothing, and writes the present action to a place of ours.
    let failed = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    let is_ignored = failed == 0 && action.sa_sigaction == libc::SIG_IGN;
    IS_PIPE_IGNORED.store(is_ignored, Relaxed);
}

/// Whether this process was started with SIGPIPE ignored, as services of systemd are.
#[must_use]
pub fn is_pipe_ignored() -> bool {
    IS_PIPE_IGNORED.load(Relaxed)
}
