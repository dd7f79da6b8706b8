//! How long a program would take at limits that it did not run at.
//!
//! It ran once, under a limit that rose. What it waited for is known in slices, one for each limit that
//! held for a while. Each slice says how long that part of the run would have waited for stored units at
//! another limit ([`Forecast`]); their sum is the curve. Two kinds of waiting are no refaults:
//!
//! - for fresh memory while the need grew: each MiB waited because what came before did not fit. At a
//!   limit above the need of that moment it would not have waited, at one below it as long as it did;
//! - for fresh memory otherwise, as of a program that frees and allocates: it shrinks with what does not
//!   fit.
//!
//! The rest of the time is work, which no limit changes. Threads may wait at the same time, so that a
//! second of waiting costs less than a second of the run: `threads` is how many of them ran or waited
//! at once, on average.
//!
//! # Invariants
//!
//! - `CURVE-1` Time never rises with the limit.
//! - `CURVE-2` Nothing is said about limits below the last one that held ([`Curve::observed`]): of
//!   what stayed resident all the time, nobody knows when it was used.

use std::collections::BTreeMap;

use zfolio_core::refault::{Bucket, Forecast, Measured, Refaults};

/// A MiB: limits are told in whole ones.
const MIB: u64 = 1 << 20;

/// What a fault on fresh memory brings, mostly: a folio.
const FRESH_BYTES: u64 = 64 << 10;

/// What one process counted up to some moment.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Counts {
    /// What came back, and what was waited for it, by distance.
    pub(super) refaults: Vec<Bucket>,
    /// Nanoseconds waited for fresh memory.
    pub(super) fresh_ns: u64,
    /// How often.
    pub(super) fresh_faults: u64,
    /// Nanoseconds waited in all.
    pub(super) stall_ns: u64,
}

impl Counts {
    /// What was added since `before`.
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

    /// Nanoseconds waited for what was moved back or on its way: the rest.
    fn moved_ns(&self) -> u64 {
        let stored: u64 = self.refaults.iter().map(|bucket| bucket.waited_ns).sum();
        self.stall_ns.saturating_sub(stored).saturating_sub(self.fresh_ns)
    }

    /// Of the waiting for fresh memory that for `grown_bytes`; the rest is for what the program freed before.
    fn grown_ns(&self, grown_bytes: u64) -> u64 {
        let fresh_bytes = u128::from(self.fresh_faults.saturating_mul(FRESH_BYTES).max(1));
        let grown = u128::from(self.fresh_ns) * u128::from(grown_bytes) / fresh_bytes;
        u64::try_from(grown).unwrap_or(u64::MAX).min(self.fresh_ns)
    }
}

/// What was waited under one limit.
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

/// What one process waited, by the limit that held.
#[derive(Default, Debug)]
pub(super) struct Process {
    slices: BTreeMap<u64, Slice>,
    growth: Vec<Growth>,
    last: Counts,
    last_measured: Measured,
    limit_bytes: u64,
}

impl Process {
    /// Adds a look at the process: all that it counted, and what holds now.
    pub(super) fn look(&mut self, counts: Counts, now: &Measured) {
        let added = counts.since(&self.last);
        let before = std::mem::replace(&mut self.last_measured, *now);
        self.limit_bytes = self.limit_bytes.max(now.limit_bytes);
        // What was waited since the last look was waited under the limit that held then.
        let slice = self.slices.entry(now.limit_bytes).or_insert_with(|| Slice {
            refaults: Refaults::default(),
            // What was stored when the slice began had left before.
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

    /// What it needed, at most.
    pub(super) fn need_bytes(&self) -> u64 {
        self.last_measured.need_bytes
    }

    /// What it waited in all.
    fn stall_ns(&self) -> u64 {
        self.last.stall_ns
    }
}

/// What is expected of one process.
#[derive(Debug)]
struct Expected {
    process: Process,
    /// Of each slice.
    forecasts: Vec<Forecast>,
}

impl Expected {
    fn new(process: Process) -> Expected {
        let forecast = |slice: &Slice| Forecast::new(&slice.refaults, &slice.measured);
        let forecasts = process.slices.values().map(forecast).collect();
        Expected { process, forecasts }
    }

    /// Nanoseconds that all its threads together would have waited.
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
    /// What its processes ran, on all CPUs together, without what zfolio's threads did.
    pub(super) ran_ns: u64,
}

/// One limit, and what is expected there.
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

    fn processes(&self) -> impl Iterator<Item = &Process> {
        self.expected.iter().map(|expected| &expected.process)
    }

    /// What all processes waited.
    pub(super) fn stall_ns(&self) -> u64 {
        self.processes().map(Process::stall_ns).sum()
    }

    /// What the largest process needed.
    pub(super) fn need_bytes(&self) -> u64 {
        self.processes().map(Process::need_bytes).max().unwrap_or(0)
    }

    /// The highest limit that held for a process: below it nothing is known.
    pub(super) fn observed(&self) -> u64 {
        let highest = self.processes().map(|process| process.limit_bytes).max();
        whole_mib(highest.unwrap_or(0))
    }

    /// A limit at which nothing would have been compressed: what was needed, and the 16th of the limit
    /// at which reclaim begins.
    pub(super) fn ample(&self) -> u64 {
        ample(self.need_bytes()).max(self.observed())
    }

    /// Thousandths of a second of the run that a second of waiting costs, as the number of threads
    /// that ran or waited at once: 1000 for one.
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

    /// What is expected at a limit.
    pub(super) fn at(&self, limit_bytes: u64) -> Point {
        let waiting = self.expected.iter().map(|expected| expected.waiting_ns(limit_bytes));
        let waiting_ns = waiting.sum::<u64>().min(self.stall_ns());
        let time_ns = self.work_ns() + self.lost_ns(waiting_ns);
        Point { limit_bytes, waiting_ns, time_ns }
    }

    /// `count` limits from what was observed to what is ample.
    pub(super) fn points(&self, count: u64) -> Vec<Point> {
        let (from, to) = (self.observed(), self.ample());
        let steps = count.max(2) - 1;
        let limit = |step: u64| whole_mib(from + (to - from) / steps * step).min(to);
        let mut limits: Vec<u64> = (0..steps).map(limit).chain([to]).collect();
        limits.dedup();
        limits.into_iter().map(|limit| self.at(limit)).collect()
    }

    /// The least limit known at which the run takes `slower_per_mille` thousandths longer at most than
    /// without one.
    pub(super) fn recommended(&self, slower_per_mille: u64) -> Point {
        let most = u128::from(self.work_ns()) * u128::from(1000 + slower_per_mille) / 1000;
        let is_good = |mib: u64| u128::from(self.at(mib * MIB).time_ns) <= most;
        // CURVE-1: bad, ..., bad, good, ..., good; what is ample is good.
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

/// What is waited for fresh memory at another limit, while the need does not grow. Room is made for what
/// does not fit: the less of the need does not, the less is waited.
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

#[cfg(test)]
mod tests {
    use super::{Counts, Curve, MIB, Process};
    use std::collections::VecDeque;
    use zfolio_core::refault::{Measured, Refaults};
    use zfolio_core::testing::{Random, seed};

    const FAULT_NS: u64 = 1000;
    const BLOCK: u64 = MIB;

    /// Blocks of a MiB: loops, hot parts, and places at random.
    fn trace(random: &mut Random) -> Vec<u64> {
        let blocks = 50 + random.below_u64(200);
        let kind = random.below_u64(3);
        (0..5000)
            .map(|step| match kind {
                0 => step % blocks,
                1 if random.below_u64(4) > 0 => random.below_u64(blocks / 5),
                _ => random.below_u64(blocks),
            })
            .collect()
    }

    /// The naive cache: least recently used goes. Misses on blocks that were there before, with the
    /// number of blocks that went since: what the engine counts.
    fn refaults(trace: &[u64], room: usize) -> Vec<u64> {
        let mut cache: VecDeque<u64> = VecDeque::new();
        let (mut gone, mut clock) = (std::collections::BTreeMap::new(), 0_u64);
        let mut distances = Vec::new();
        for block in trace {
            if let Some(at) = cache.iter().position(|other| other == block) {
                cache.remove(at);
            } else {
                distances.extend(gone.get(block).map(|then| clock - then));
                if cache.len() == room {
                    clock += 1;
                    gone.insert(cache.pop_front().unwrap(), clock);
                }
            }
            cache.push_back(*block);
        }
        distances
    }

    /// Counts as the engine has them after these refaults.
    fn counts(distances: &[u64]) -> Counts {
        let refaults = Refaults::default();
        for blocks in distances {
            refaults.add(blocks * BLOCK, FAULT_NS);
            refaults.add_bytes(blocks * BLOCK, BLOCK);
        }
        let stall_ns = refaults.waited_ns();
        Counts { refaults: refaults.each().collect(), stall_ns, ..Counts::default() }
    }

    /// What holds when so many blocks have come back, in a pool that is empty: a byte of the limit is a
    /// byte of resident memory.
    fn now(limit: u64, need: u64, returned: usize) -> Measured {
        let (returned_bytes, demand_stored_bytes) =
            (returned as u64 * BLOCK, (need - limit) * BLOCK);
        Measured {
            limit_bytes: limit * MIB,
            need_bytes: need * MIB,
            stored_bytes: 1,
            demand_stored_bytes,
            left_bytes: returned_bytes + demand_stored_bytes,
            returned_bytes,
            ..Measured::default()
        }
    }

    /// Goal: the curve of a run is what larger caches do, within 0.75 to 1.5 times, but for a 20th of what was
    /// observed and an eighth of the room gained: the length of a step of distances. Method: seeded traces;
    /// one run of the naive cache, looked at twice, beside runs with more room.
    #[test]
    fn what_is_expected_is_what_a_larger_cache_does() {
        let seed = seed();
        let mut random = Random::new(seed);
        for _ in 0..20 {
            let trace = trace(&mut random);
            let need = trace.iter().max().unwrap() + 1;
            let room = need / 4 + random.below_u64(need / 4);
            let observed = refaults(&trace, usize::try_from(room).unwrap());
            let mut process = Process::default();
            for seen in [observed.len() / 2, observed.len()] {
                process.look(counts(&observed[..seen]), &now(room, need, seen));
            }
            let curve = Curve::new(vec![process], 100_000 * FAULT_NS, 0);
            let all = observed.len() as u64 * FAULT_NS;
            assert_eq!(curve.at(room * MIB).waiting_ns, all, "seed {seed}");
            let real = |room: u64| {
                refaults(&trace, usize::try_from(room).unwrap()).len() as u64 * FAULT_NS
            };
            for more in (room..need).step_by(7) {
                let around = (more - room) / 8 + 1;
                let (least, most) = (real(more + around), real((more - around).max(room)));
                let told = curve.at(more * MIB).waiting_ns;
                let context = format!("seed {seed}: {more} of {need} from {room}");
                let slack = all / 20;
                assert!(told <= most + most / 2 + slack, "{context}: {told}, {most} at most");
                assert!(told + slack >= least - least / 4, "{context}: {told}, {least} at least");
            }
            assert_eq!(curve.at(curve.ample()).waiting_ns, 0, "seed {seed}");
        }
    }

    /// Goal: what was waited under a limit is told from that limit on. Method: the same loop under two
    /// limits one after the other; at the higher one nothing changes for the second half.
    #[test]
    fn each_limit_that_held_tells_of_its_own_part() {
        let (mut process, distances) = (Process::default(), vec![150; 200]);
        process.look(counts(&distances[..100]), &now(50, 200, 100));
        process.look(counts(&distances), &now(100, 200, 200));
        let curve = Curve::new(vec![process], 1000 * FAULT_NS, 0);
        let waiting = [100, 180, 214].map(|limit| curve.at(limit * MIB).waiting_ns / FAULT_NS);
        assert_eq!(waiting, [200, 200, 0]);
    }

    /// Goal: `CURVE-1`. Method: seeded processes with several slices.
    #[test]
    fn time_never_rises_with_the_limit_and_the_recommendation_is_kept() {
        let seed = seed();
        let mut random = Random::new(seed);
        for _ in 0..200 {
            let mut process = Process::default();
            let refaults = Refaults::default().each().collect();
            let mut counts = Counts { refaults, ..Counts::default() };
            for look in 1..10 {
                for bucket in &mut counts.refaults {
                    bucket.waited_ns += random.below_u64(1_000_000);
                    bucket.bytes += random.below_u64(10_000_000);
                }
                counts.fresh_ns += random.below_u64(1_000_000);
                counts.fresh_faults += random.below_u64(1_000_000);
                counts.stall_ns += look * 100_000_000;
                let now = Measured {
                    limit_bytes: look * 37 * MIB,
                    need_bytes: look * 80 * MIB,
                    stored_bytes: random.below_u64(1 << 32),
                    pool_bytes: random.below_u64(1 << 32),
                    ..Measured::default()
                };
                process.look(counts.clone(), &now);
            }
            let (elapsed, ran) = (1_000_000_000, random.below_u64(2_000_000_000));
            let curve = Curve::new(vec![process], elapsed, ran);
            let points = curve.points(20);
            assert!(points.is_sorted_by(|one, other| one.limit_bytes < other.limit_bytes));
            assert!(points.is_sorted_by(|one, other| one.time_ns >= other.time_ns), "{points:?}");
            assert_eq!(points[0].limit_bytes, curve.observed());
            assert_eq!(points.last().unwrap().time_ns, curve.work_ns(), "seed {seed}");
            let best = curve.recommended(100);
            assert!(best.time_ns <= curve.work_ns() * 11 / 10, "seed {seed}: {best:?}");
            if best.limit_bytes > curve.observed() {
                let below = curve.at(best.limit_bytes - MIB);
                assert!(below.time_ns > curve.work_ns() * 11 / 10, "seed {seed}: {below:?}");
            }
        }
    }

    fn fresh(fresh_ns: u64) -> Counts {
        Counts { fresh_ns, fresh_faults: 1, stall_ns: fresh_ns, ..Counts::default() }
    }

    /// Goal: memory that the program grows by is waited for at each limit below the need of that moment.
    #[test]
    fn fresh_memory_is_waited_for_where_it_did_not_fit() {
        let mut process = Process::default();
        for (look, need) in [75, 90, 150].into_iter().enumerate() {
            process.look(fresh((look as u64 + 1) * 1_000_000), &now(60, need, 0));
        }
        let curve = Curve::new(vec![process], 9_000_000, 0);
        let waiting = [60, 79, 80, 96, 159, 160].map(|limit| curve.at(limit * MIB).waiting_ns);
        assert_eq!(waiting, [3_000_000, 3_000_000, 2_000_000, 1_000_000, 1_000_000, 0]);
    }

    /// Goal: of memory that is freed and allocated again, half is waited for where half of what was
    /// missing is.
    #[test]
    fn memory_that_goes_round_is_waited_for_as_it_does_not_fit() {
        let mut process = Process::default();
        process.look(fresh(0), &now(60, 150, 0));
        process.look(fresh(1_000_000), &now(60, 150, 0));
        let curve = Curve::new(vec![process], 4_000_000, 0);
        assert_eq!(curve.ample(), 160 * MIB);
        let waiting = [60, 110, 159, 160].map(|limit| curve.at(limit * MIB).waiting_ns);
        assert_eq!(waiting, [1_000_000, 500_000, 10_000, 0]);
    }

    /// Two threads that wait at once lose half of what they wait.
    #[test]
    fn threads_wait_side_by_side() {
        let mut process = Process::default();
        process.look(fresh(1_000_000), &now(1, 9, 0));
        let curve = Curve::new(vec![process], 1_000_000, 1_000_000);
        assert_eq!(curve.work_ns(), 500_000);
        assert_eq!(curve.at(MIB).time_ns, 1_000_000);
    }
}
