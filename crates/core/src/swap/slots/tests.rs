//! The allocator against the naive model, with threads, and what it refuses.

mod refusals;
mod rules;
mod threads;

use super::{Counts, Slots, script};
use crate::testing::{Random, seed};

/// Goal: no sequence of operations makes an area disagree with the model, slot by slot and count by count;
/// and the scripts come to everything that is counted. Method: seeded scripts, of the kind that the fuzz
/// target plays.
#[test]
fn random_scripts_agree_with_the_model() {
    println!("SEED={}", seed());
    let mut random = Random::new(seed());
    let mut all = Counts::default();
    for _ in 0..if cfg!(miri) { 2 } else { 400 } {
        let length = 50 + random.below(600);
        let counts = script::play_counting(&random.bytes(length));
        for order in 0..super::ORDERS {
            all.swpout[order] += counts.swpout[order];
            all.swpout_fallback[order] += counts.swpout_fallback[order];
            all.nonfull[order] += counts.nonfull[order];
            all.frag[order] += counts.frag[order];
        }
        all.free += counts.free;
        all.full += counts.full;
        all.discard += counts.discard;
        all.discarding += counts.discarding;
        all.current += counts.current;
        all.discards += counts.discards;
        all.discards_skipped += counts.discards_skipped;
        all.steals += counts.steals;
    }
    if cfg!(miri) {
        return;
    }
    let seen = |counts: &[u64]| counts.iter().all(|count| *count > 0);
    assert!(seen(&all.swpout) && seen(&all.swpout_fallback), "{all:?}");
    // Of the largest order a cluster is full or empty; of order 0 it is never without a run.
    assert!(all.nonfull[..9].iter().all(|clusters| *clusters > 0), "{all:?}");
    assert!(all.frag[1..9].iter().all(|clusters| *clusters > 0), "{all:?}");
    assert!(
        [all.free, all.full, all.discard, all.discarding, all.current].iter().all(|it| *it > 0)
    );
    assert!(seen(&[all.discards, all.discards_skipped, all.steals]), "{all:?}");
}

/// Takes runs of an order until there is none.
fn take_all(area: &Slots, cpu: usize, order: u32) -> Vec<u32> {
    std::iter::from_fn(|| area.take(cpu, order)).collect()
}
