//! Clocks.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, through the vDSO (about 25 ns).
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).expect("the monotonic clock starts at boot");
    let nanos = u64::try_from(now.tv_nsec).expect("nanoseconds are 0..10^9");
    seconds * 1_000_000_000 + nanos
}
