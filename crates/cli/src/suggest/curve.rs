//! How long a program would take at limits that it did not run at.
//!
//! It ran once, under a limit that rose. What it waited for is known in slices: for each limit that
//! held for a while, the time waited for units by the distance at which they came back
//! ([`Refaults`]). Each slice says how long that part of the run would have waited at another limit;
//! their sum is the curve.
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

use zfolio_core::refault::{Measured, Refaults};

/// A MiB: limits are told in whole ones.
const MIB: u64 = 1 << 20;

/// What one process counted up to some moment.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Counts {
    /// Nanoseconds waited, of refaults: by the end of the distances of a bucket.
    pub(super) waited: Vec<(u64, u64)>,
    /// Nanoseconds waited for staged units.
    pub(super) staged_ns: u64,
    /// Nanoseconds waited in all.
    pub(super) stall_ns: u64,
}

impl Counts {
    /// What was added since `before`.
    fn since(&self, before: &Counts) -> Counts {
        let earlier = |index: usize| before.waited.get(index).map_or(0, |(_, waited)| *waited);
        let added = |(index, (end, waited)): (usize, &(u64, u64))| {
            (*end, waited.saturating_sub(earlier(index)))
        };
        Counts {
            waited: self.waited.iter().enumerate().map(added).collect(),
            staged_ns: self.staged_ns.saturating_sub(before.staged_ns),
            stall_ns: self.stall_ns.saturating_sub(before.stall_ns),
        }
    }
}

/// What was waited under one limit.
#[derive(Debug)]
struct Slice {
    refaults: Refaults,
    measured: Measured,
    /// Waiting for neither stored nor staged units: for fresh memory, while room was made for it.
    fresh_ns: u64,
}

/// What one process waited, by the limit that held.
#[derive(Default, Debug)]
pub(super) struct Process {
    slices: BTreeMap<u64, Slice>,
    last: Counts,
    need_bytes: u64,
    limit_bytes: u64,
}

impl Process {
    /// Adds a look at the process: all that it counted, and what holds now.
    pub(super) fn look(&mut self, counts: Counts, now: &Measured) {
        let added = counts.since(&self.last);
        self.need_bytes = self.need_bytes.max(now.need_bytes);
        self.limit_bytes = self.limit_bytes.max(now.limit_bytes);
        // What was waited since the last look was waited under the limit that held then.
        let slice = self.slices.entry(now.limit_bytes).or_insert_with(|| Slice {
            refaults: Refaults::default(),
            measured: Measured { staged_wait_ns: 0, other_wait_ns: 0, ..*now },
            fresh_ns: 0,
        });
        let mut known = added.staged_ns;
        for (end, waited) in added.waited.iter().filter(|(_, waited)| *waited > 0) {
            slice.refaults.add(end - 1, *waited);
            known += waited;
        }
        slice.measured.staged_wait_ns += added.staged_ns;
        slice.fresh_ns += added.stall_ns.saturating_sub(known);
        // The pool's ratio is that of the last look.
        (slice.measured.stored_bytes, slice.measured.pool_bytes) =
            (now.stored_bytes, now.pool_bytes);
        self.last = counts;
    }

    /// Nanoseconds that all its threads together would have waited.
    fn waiting_ns(&self, limit_bytes: u64) -> u64 {
        let slices = self.slices.values().map(|slice| {
            let measured = Measured { need_bytes: self.need_bytes, ..slice.measured };
            let fresh_ns = fresh_ns(slice, limit_bytes, ample(self.need_bytes));
            slice.refaults.waiting_ns(&measured, limit_bytes) + fresh_ns
        });
        slices.sum()
    }

    /// What it needed, at most.
    pub(super) fn need_bytes(&self) -> u64 {
        self.need_bytes
    }

    /// What it waited in all.
    fn stall_ns(&self) -> u64 {
        self.last.stall_ns
    }
}

/// The curve of a run.
#[derive(Debug)]
pub(super) struct Curve {
    processes: Vec<Process>,
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
        Curve { processes, elapsed_ns, ran_ns }
    }

    /// What all processes waited.
    pub(super) fn stall_ns(&self) -> u64 {
        self.processes.iter().map(Process::stall_ns).sum()
    }

    /// What the largest process needed.
    pub(super) fn need_bytes(&self) -> u64 {
        self.processes.iter().map(Process::need_bytes).max().unwrap_or(0)
    }

    /// The highest limit that held for a process: below it nothing is known.
    pub(super) fn observed(&self) -> u64 {
        let highest = self.processes.iter().map(|process| process.limit_bytes).max();
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
        let waiting = self.processes.iter().map(|process| process.waiting_ns(limit_bytes));
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

/// What is waited for fresh memory at another limit. Room is made for what does not fit: the less of
/// the need does not, the less is waited.
fn fresh_ns(slice: &Slice, limit_bytes: u64, ample: u64) -> u64 {
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

    const FAULT_NS: u64 = 1000;
    const BLOCK: u64 = MIB;

    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state >> 16
    }

    /// Blocks of a MiB: loops, hot parts, and places at random.
    fn trace(state: &mut u64) -> Vec<u64> {
        let blocks = 50 + random(state) % 200;
        let kind = random(state) % 3;
        (0..5000)
            .map(|step| match kind {
                0 => step % blocks,
                1 if random(state) % 4 > 0 => random(state) % (blocks / 5),
                _ => random(state) % blocks,
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

    fn process(distances: &[u64], limit_bytes: u64, need_bytes: u64) -> Process {
        let refaults = Refaults::default();
        distances.iter().for_each(|blocks| refaults.add(blocks * BLOCK, FAULT_NS));
        let mut process = Process::default();
        let counts = Counts {
            waited: refaults.each().map(|(end, _, waited)| (end, waited)).collect(),
            staged_ns: 0,
            stall_ns: refaults.waited_ns(),
        };
        // An empty pool: a byte of the limit is a byte of resident memory.
        let now = Measured { limit_bytes, need_bytes, stored_bytes: 1, ..Measured::default() };
        process.look(counts, &now);
        process
    }

    /// Goal: the promise is kept by the naive cache, and is no empty one. Method: seeded traces; the
    /// curve of one run of the cache, beside runs with more room.
    #[test]
    fn what_is_expected_is_what_a_larger_cache_does_or_more() {
        let seed: u64 = std::env::var("SEED").map_or(42, |s| s.parse().expect("SEED is a u64"));
        let mut state = seed | 1;
        for _ in 0..30 {
            let trace = trace(&mut state);
            let need = trace.iter().max().unwrap() + 1;
            let room = need / 4 + random(&mut state) % (need / 4);
            let observed = refaults(&trace, usize::try_from(room).unwrap());
            let elapsed = 100_000 * FAULT_NS;
            let process = process(&observed, room * MIB, need * MIB);
            let curve = Curve::new(vec![process], elapsed, 0);
            assert_eq!(curve.at(room * MIB).waiting_ns, observed.len() as u64 * FAULT_NS);
            for more in (room..need).step_by(7) {
                let real = refaults(&trace, usize::try_from(more).unwrap()).len() as u64 * FAULT_NS;
                let told = curve.at(more * MIB).waiting_ns;
                assert!(told >= real, "seed {seed}: {more} of {need} from {room}: {told}, {real}");
            }
            assert_eq!(curve.at(curve.ample()).waiting_ns, 0, "seed {seed}");
        }
    }

    /// Goal: `CURVE-1`. Method: seeded processes with several slices.
    #[test]
    fn time_never_rises_with_the_limit_and_the_recommendation_is_kept() {
        let seed: u64 = std::env::var("SEED").map_or(42, |s| s.parse().expect("SEED is a u64"));
        let mut state = seed | 1;
        for _ in 0..200 {
            let mut process = Process::default();
            let mut counts = Counts { waited: vec![], staged_ns: 0, stall_ns: 0 };
            let ends: Vec<u64> = Refaults::default().each().map(|(end, ..)| end).collect();
            counts.waited = ends.iter().map(|end| (*end, 0)).collect();
            for look in 1..10 {
                for (_, waited) in &mut counts.waited {
                    *waited += random(&mut state) % 1_000_000;
                }
                counts.staged_ns += random(&mut state) % 1_000_000;
                let known: u64 = counts.waited.iter().map(|(_, waited)| waited).sum();
                counts.stall_ns = known + counts.staged_ns + look * 1000;
                let now = Measured {
                    limit_bytes: look * 37 * MIB,
                    need_bytes: look * 80 * MIB,
                    stored_bytes: random(&mut state) % (1 << 32),
                    pool_bytes: random(&mut state) % (1 << 32),
                    ..Measured::default()
                };
                process.look(counts.clone(), &now);
            }
            let (elapsed, ran) = (1_000_000_000, random(&mut state) % 2_000_000_000);
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

    /// Half of what had to be compressed for fresh memory is half of the waiting for it.
    #[test]
    fn fresh_memory_is_waited_for_as_it_does_not_fit() {
        let mut process = Process::default();
        let counts = Counts { waited: vec![(MIB, 0)], staged_ns: 0, stall_ns: 1_000_000 };
        let (limit_bytes, need_bytes) = (60 * MIB, 150 * MIB);
        process.look(counts, &Measured { limit_bytes, need_bytes, ..Measured::default() });
        let curve = Curve::new(vec![process], 4_000_000, 0);
        assert_eq!(curve.ample(), 160 * MIB);
        let waiting = [60, 110, 159, 160].map(|limit| curve.at(limit * MIB).waiting_ns);
        assert_eq!(waiting, [1_000_000, 500_000, 10_000, 0]);
    }

    /// Two threads that wait at once lose half of what they wait.
    #[test]
    fn threads_wait_side_by_side() {
        let mut process = Process::default();
        let counts = Counts { waited: vec![(MIB, 0)], staged_ns: 0, stall_ns: 1_000_000 };
        process.look(
            counts,
            &Measured { limit_bytes: MIB, need_bytes: 9 * MIB, ..Measured::default() },
        );
        let curve = Curve::new(vec![process], 1_000_000, 1_000_000);
        assert_eq!(curve.work_ns(), 500_000);
        assert_eq!(curve.at(MIB).time_ns, 1_000_000);
    }
}
