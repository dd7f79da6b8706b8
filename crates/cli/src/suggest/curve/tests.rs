//! Tests of the curve against naive caches.

use super::{Counts, Curve, MIB, Process};
use std::collections::VecDeque;
use zfolio_core::refault::{Measured, Refaults};
use zfolio_core::testing::{Random, seed};

const FAULT_NS: u64 = 1000;
const BLOCK: u64 = MIB;

/// Accesses to blocks of a MiB: loops, hot parts, and random places.
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

/// A naive cache that evicts the least recently used block. Returns the misses on blocks that were
/// cached before, each with the number of blocks evicted since, as the engine counts.
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

/// The counts of an engine after these refaults.
fn counts(distances: &[u64]) -> Counts {
    let refaults = Refaults::default();
    for blocks in distances {
        refaults.add(blocks * BLOCK, FAULT_NS);
        refaults.add_bytes(blocks * BLOCK, BLOCK);
    }
    let stall_ns = refaults.waited_ns();
    Counts { refaults: refaults.each().collect(), stall_ns, ..Counts::default() }
}

/// The state after `returned` blocks have come back. The pool is empty, so a byte of the limit is a
/// byte of resident memory.
fn now(limit: u64, need: u64, returned: usize) -> Measured {
    let (returned_bytes, demand_stored_bytes) = (returned as u64 * BLOCK, (need - limit) * BLOCK);
    Measured {
        limit_bytes: limit * MIB,
        need_bytes: need * MIB,
        stored_kib_ms: 1,
        demand_stored_bytes,
        left_bytes: returned_bytes + demand_stored_bytes,
        returned_bytes,
        ..Measured::default()
    }
}

/// Goal: the estimate is what larger caches do, within 0.75 to 1.5 times. Allowed beyond that: a
/// 20th of what was observed, and an eighth of the gained room, the length of a step of distances.
/// Method: seeded traces; one run of the naive cache, read twice, compared with runs with more
/// room.
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
        let real =
            |room: u64| refaults(&trace, usize::try_from(room).unwrap()).len() as u64 * FAULT_NS;
        for more in (room..need).step_by(7) {
            let around = (more - room) / 8 + 1;
            let (least, most) = (real(more + around), real((more - around).max(room)));
            let estimate = curve.at(more * MIB).waiting_ns;
            let context = format!("seed {seed}: {more} of {need} from {room}");
            let slack = all / 20;
            assert!(estimate <= most + most / 2 + slack, "{context}: {estimate}, {most} at most");
            assert!(
                estimate + slack >= least - least / 4,
                "{context}: {estimate}, {least} at least"
            );
        }
        assert_eq!(curve.at(curve.ample()).waiting_ns, 0, "seed {seed}");
    }
}

/// Goal: waits under a limit count from that limit on. Method: the same loop under two limits one
/// after the other; up to the higher one nothing changes for the second half.
#[test]
fn each_limit_explains_its_own_part_of_the_run() {
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
                stored_kib_ms: random.below_u64(1 << 32),
                pool_kib_ms: random.below_u64(1 << 32),
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

/// Goal: waits for growing memory count at each limit below the need of that moment.
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

/// Goal: for memory that is freed and allocated again, half of the wait remains if half of the
/// missing memory is still missing.
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

/// Goal: two threads that wait at the same time cost half of the sum of their waits.
#[test]
fn threads_wait_side_by_side() {
    let mut process = Process::default();
    process.look(fresh(1_000_000), &now(1, 9, 0));
    let curve = Curve::new(vec![process], 1_000_000, 1_000_000);
    assert_eq!(curve.work_ns(), 500_000);
    assert_eq!(curve.at(MIB).time_ns, 1_000_000);
}
