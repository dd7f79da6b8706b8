//! Waiting for a word to change.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{Flags, wait as futex_wait, wake as futex_wake};
use rustix::time::Timespec;

/// Sleeps while `word` holds `expected`, until woken, `timeout` (if any), or a signal.
///
/// It may return without a reason, so the caller must check the word again.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    // After every result (woken, changed before, timed out, signal) the caller checks the word.
    futex_wait(word, Flags::PRIVATE, expected, timeout.as_ref()).ok();
}

/// Wakes up to `count` waiters.
pub fn wake(word: &AtomicU32, count: u32) {
    // The kernel takes a signed number, and wakes one thread only for a negative one.
    let count = count.min(i32::MAX.unsigned_abs());
    // The only errors are a bad address or operation, which a reference rules out.
    futex_wake(word, Flags::PRIVATE, count).ok();
}
