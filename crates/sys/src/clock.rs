//! Clocks.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, through the vDSO (about 25 ns).
#[must_use]
pub fn monotonic_ns() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds of CPU time that the calling thread has used.
#[must_use]
pub fn thread_ns() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

/// Nanoseconds of CPU time that all threads of the process have used.
#[must_use]
pub fn process_ns() -> u64 {
    nanoseconds(ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).expect("these clocks start at 0");
    let nanos = u64::try_from(now.tv_nsec).expect("nanoseconds are 0..10^9");
    seconds * 1_000_000_000 + nanos
}
