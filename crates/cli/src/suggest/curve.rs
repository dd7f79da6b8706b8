//! Estimates how long a program would take at limits that it did not run at.
//!
//! The program ran once, under a rising limit. Its waits are recorded in slices, one for each limit
//! that was in force for a while. For each slice a [`Forecast`] gives how long that part of the run
//! would have waited for stored units at another limit; the sum is the curve. Two kinds of waits
//! are not refaults:
//!
//! - Waits for fresh memory while the need grew. Each MiB had to wait because earlier memory did
//!   not fit. At a limit above the need of that moment it would not have waited; at a limit below,
//!   as long as it did.
//! - Other waits for fresh memory, as in a program that frees and allocates: they shrink in
//!   proportion to the memory that does not fit.
//!
//! The rest of the time is work, which no limit changes. Threads may wait at the same time, so that
//! a second of waiting costs less than a second of the run. The factor is the number of threads
//! that ran or waited at once, on average.
//!
//! # Invariants
//!
//! - `CURVE-1` Time never rises with the limit.
//! - `CURVE-2` There is no estimate for limits below the last one that was in force
//!   ([`Curve::observed`]): nothing is known about the use of memory that stayed resident.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use zfolio_core::refault::{Bucket, Forecast, Measured, Refaults};

/// A MiB: limits are given in whole MiB.
const MIB: u64 = 1 << 20;

/// The bytes of one fault on fresh memory: mostly a folio.
const FRESH_BYTES: u64 = 64 << 10;

/// What one process has counted so far.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Counts {
    /// The bytes that came back, and the time waited for them, by distance.
    pub(super) refaults: Vec<Bucket>,
    /// Nanoseconds waited for fresh memory.
    pub(super) fresh_ns: u64,
    /// How many faults on fresh memory.
    pub(super) fresh_faults: u64,
    /// Nanoseconds waited in all.
    pub(super) stall_ns: u64,
}

impl Counts {
    /// The difference to the earlier `before`.
    fn since(&self, before: &Counts) -> Counts {
        let added = |(index, now): (usize, &Bucket)| {
            let earlier = before.refaults.get(index).copied().unwrap_or_default();
            Bucket {
                count: now.count.saturating_sub(earlier.count),
                waited_ns: now.waited_ns.saturating_sub(earlier.waited_ns),
                bytes: now.bytes.saturating_sub(earlier.bytes),
                ..*now
            }
        };
        Counts {
            refaults: self.refaults.iter().enumerate().map(added).collect(),
            fresh_ns: self.fresh_ns.saturating_sub(before.fresh_ns),
            fresh_faults: self.fresh_faults.saturating_sub(before.fresh_faults),
            stall_ns: self.stall_ns.saturating_sub(before.stall_ns),
        }
    }

    /// Nanoseconds waited for units that were moved back or on their way: all other waits.
    fn moved_ns(&self) -> u64 {
        let stored: u64 = self.refaults.iter().map(|bucket| bucket.waited_ns).sum();
        self.stall_ns.saturating_sub(stored).saturating_sub(self.fresh_ns)
    }

    /// The part of the wait for fresh memory that belongs to `grown_bytes` of growth; the rest was
    /// for memory that the program had freed before.
    fn grown_ns(&self, grown_bytes: u64) -> u64 {
        let fresh_bytes = u128::from(self.fresh_faults.saturating_mul(FRESH_BYTES).max(1));
        let grown = u128::from(self.fresh_ns) * u128::from(grown_bytes) / fresh_bytes;
        u64::try_from(grown).unwrap_or(u64::MAX).min(self.fresh_ns)
    }
}

/// The waits under one limit.
#[derive(Debug)]
struct Slice {
    refaults: Refaults,
    measured: Measured,
    /// Waiting for fresh memory while the need did not grow.
    fresh_ns: u64,
}

/// Waiting for fresh memory while the need grew.
#[derive(Debug)]
struct Growth {
    need_bytes: u64,
    fresh_ns: u64,
}

/// The waits of one process, by the limit in force.
#[derive(Default, Debug)]
pub(super) struct Process {
    slices: BTreeMap<u64, Slice>,
    growth: Vec<Growth>,
    last: Counts,
    last_measured: Measured,
    limit_bytes: u64,
}

impl Process {
    /// Adds a reading of the process: all its counts, and its present state.
    pub(super) fn look(&mut self, counts: Counts, now: &Measured) {
        let added = counts.since(&self.last);
        let before = std::mem::replace(&mut self.last_measured, *now);
        self.limit_bytes = self.limit_bytes.max(now.limit_bytes);
        // The waits since the last reading happened under the present limit.
        let slice = self.slices.entry(now.limit_bytes).or_insert_with(|| Slice {
            refaults: Refaults::default(),
            // Units that were stored when the slice began had left memory before.
            measured: Measured {
                left_bytes: before.demand_stored_bytes,
                returned_bytes: 0,
                moved_wait_ns: 0,
                fresh_wait_ns: 0,
                ..*now
            },
            fresh_ns: 0,
        });
        added.refaults.iter().for_each(|bucket| slice.refaults.add_bucket(bucket));
        let sums = slice.measured;
        slice.measured = Measured {
            left_bytes: sums.left_bytes + now.left_bytes.saturating_sub(before.left_bytes),
            returned_bytes: slice.refaults.returned_bytes(),
            moved_wait_ns: sums.moved_wait_ns + added.moved_ns(),
            fresh_wait_ns: 0,
            ..*now
        };
        let need_bytes = now.need_bytes;
        let grown_ns = added.grown_ns(need_bytes.saturating_sub(before.need_bytes));
        self.growth.push(Growth { need_bytes, fresh_ns: grown_ns });
        slice.fresh_ns += added.fresh_ns - grown_ns;
        self.last = counts;
    }

    /// The most that the process needed.
    pub(super) fn need_bytes(&self) -> u64 {
        self.last_measured.need_bytes
    }

    /// How long the process waited in all.
    fn stall_ns(&self) -> u64 {
        self.last.stall_ns
    }
}

/// The estimate for one process.
#[derive(Debug)]
struct Expected {
    process: Process,
    /// One forecast for each slice.
    forecasts: Vec<Forecast>,
}

impl Expected {
    fn new(process: Process) -> Expected {
        let forecast = |slice: &Slice| Forecast::new(&slice.refaults, &slice.measured);
        let forecasts = process.slices.values().map(forecast).collect();
        Expected { process, forecasts }
    }

    /// How long all its threads together would have waited.
    fn waiting_ns(&self, limit_bytes: u64) -> u64 {
        let stored = self.forecasts.iter().map(|forecast| forecast.waiting_ns(limit_bytes));
        let fresh = self.process.slices.values().map(|slice| fresh_ns(slice, limit_bytes));
        let grown = self.process.growth.iter().map(|growth| match growth.need_bytes {
            need if limit_bytes < ample(need) => growth.fresh_ns,
            _ => 0,
        });
        stored.chain(fresh).chain(grown).sum()
    }
}

/// The curve of a run.
#[derive(Debug)]
pub(super) struct Curve {
    expected: Vec<Expected>,
    /// How long the run took.
    pub(super) elapsed_ns: u64,
    /// CPU time of all its processes, without zfolio's threads.
    pub(super) ran_ns: u64,
}

/// The estimate for one limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Point {
    pub(super) limit_bytes: u64,
    /// All threads together.
    pub(super) waiting_ns: u64,
    pub(super) time_ns: u64,
}

impl Curve {
    pub(super) fn new(processes: Vec<Process>, elapsed_ns: u64, ran_ns: u64) -> Curve {
        Curve { expected: processes.into_iter().map(Expected::new).collect(), elapsed_ns, ran_ns }
    }

    pub(super) fn processes(&self) -> impl Iterator<Item = &Process> {
        self.expected.iter().map(|expected| &expected.process)
    }

    /// How long all processes waited.
    pub(super) fn stall_ns(&self) -> u64 {
        self.processes().map(Process::stall_ns).sum()
    }

    /// The need of the largest process.
    pub(super) fn need_bytes(&self) -> u64 {
        self.processes().map(Process::need_bytes).max().unwrap_or(0)
    }

    /// The highest limit that was in force for a process; nothing is known about lower ones.
    pub(super) fn observed(&self) -> u64 {
        let highest = self.processes().map(|process| process.limit_bytes).max();
        whole_mib(highest.unwrap_or(0))
    }

    /// A limit at which nothing would have been compressed: the need, plus the 16th of the limit
    /// where reclaim begins.
    pub(super) fn ample(&self) -> u64 {
        ample(self.need_bytes()).max(self.observed())
    }

    /// How many threads ran or waited at once, in thousandths and at least 1000: a second of the
    /// run stands for so many seconds of waiting.
    fn threads_per_mille(&self) -> u64 {
        let busy = u128::from(self.ran_ns) + u128::from(self.stall_ns());
        let threads = busy * 1000 / u128::from(self.elapsed_ns.max(1));
        u64::try_from(threads).unwrap_or(u64::MAX).max(1000)
    }

    fn lost_ns(&self, waiting_ns: u64) -> u64 {
        let lost = u128::from(waiting_ns) * 1000 / u128::from(self.threads_per_mille());
        u64::try_from(lost).unwrap_or(u64::MAX)
    }

    /// How long the run would have taken without a limit.
    pub(super) fn work_ns(&self) -> u64 {
        self.elapsed_ns.saturating_sub(self.lost_ns(self.stall_ns()))
    }

    /// The estimate for a limit.
    pub(super) fn at(&self, limit_bytes: u64) -> Point {
        let waiting = self.expected.iter().map(|expected| expected.waiting_ns(limit_bytes));
        let waiting_ns = waiting.sum::<u64>().min(self.stall_ns());
        let time_ns = self.work_ns() + self.lost_ns(waiting_ns);
        Point { limit_bytes, waiting_ns, time_ns }
    }

    /// `count` limits from the observed one to the ample one.
    pub(super) fn points(&self, count: u64) -> Vec<Point> {
        let (from, to) = (self.observed(), self.ample());
        let steps = count.max(2) - 1;
        let limit = |step: u64| whole_mib(from + (to - from) / steps * step).min(to);
        let mut limits: Vec<u64> = (0..steps).map(limit).chain([to]).collect();
        limits.dedup();
        limits.into_iter().map(|limit| self.at(limit)).collect()
    }

    /// The lowest limit with an estimate of at most `slower_per_mille` thousandths more than the
    /// time without a limit.
    pub(super) fn recommended(&self, slower_per_mille: u64) -> Point {
        let most = u128::from(self.work_ns()) * u128::from(1000 + slower_per_mille) / 1000;
        let is_good = |mib: u64| u128::from(self.at(mib * MIB).time_ns) <= most;
        // CURVE-1: from some limit on the time is good, and below it is not. At `ample` it is.
        let (mut bad, mut good) = (self.observed() / MIB, self.ample() / MIB);
        if is_good(bad) {
            good = bad;
        }
        while bad + 1 < good {
            let middle = bad.midpoint(good);
            if is_good(middle) { good = middle } else { bad = middle }
        }
        self.at(good * MIB)
    }
}

/// A limit at which nothing is compressed.
fn ample(need_bytes: u64) -> u64 {
    whole_mib(need_bytes + need_bytes / 15)
}

/// The wait for fresh memory at another limit, while the need does not grow. It is in proportion to
/// the part of the need that does not fit.
fn fresh_ns(slice: &Slice, limit_bytes: u64) -> u64 {
    let ample = ample(slice.measured.need_bytes);
    let missing = u128::from(ample.saturating_sub(limit_bytes));
    let was_missing = u128::from(ample.saturating_sub(slice.measured.limit_bytes)).max(1);
    let fresh = u128::from(slice.fresh_ns);
    u64::try_from((fresh * missing / was_missing).min(fresh)).unwrap_or(slice.fresh_ns)
}

/// `bytes`, rounded up to whole MiB.
fn whole_mib(bytes: u64) -> u64 {
    bytes.div_ceil(MIB) * MIB
}
