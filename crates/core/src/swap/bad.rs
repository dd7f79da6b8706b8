//! The slots of an area that a write did not reach since the medium failed.
//!
//! They are left alone: the medium may have no good block there. But a medium that was out of reach for a while
//! (another path, a network) fails every write, and would have lost a slot for good by each of them. So they are tried
//! again after some writes that went well, or that found no slot; and those that fail again each time after twice as
//! many. What a slot that stays bad costs in the end is one failed write in a million.

use std::ops::Range;

use super::RANK_BAD;
use crate::sync::Mutex;

/// Writes before bad slots are tried again for the first time; at most so many later.
const PATIENCE: u64 = 64;
const PATIENCE_MAX: u64 = 1 << 20;

/// How many runs are remembered that were tried again: those that fail next are the same ones.
const TRIED_MAX: usize = 256;

/// See the module.
#[derive(Debug)]
pub(super) struct Bad(Mutex<RANK_BAD, Runs>);

#[derive(Clone, Debug)]
struct Run {
    slots: Range<u32>,
    patience: u64,
    /// After which write it is tried again.
    due: u64,
}

#[derive(Debug, Default)]
struct Runs {
    bad: Vec<Run>,
    tried: Vec<Run>,
    writes: u64,
    /// The first `due` of all.
    next: u64,
}

impl Bad {
    pub(super) fn new() -> Bad {
        Bad(Mutex::new(Runs::default()))
    }

    /// These slots are bad. Without memory for that they are so for good.
    pub(super) fn add(&self, slots: Range<u32>) {
        let mut all = self.0.lock();
        let all = &mut *all;
        if all.bad.try_reserve(1).is_err() {
            return;
        }
        let meets = |run: &Run| run.slots.start < slots.end && slots.start < run.slots.end;
        let before = all.tried.iter().position(meets).map(|at| all.tried.swap_remove(at).patience);
        let patience = before.map_or(PATIENCE, |before| (2 * before).min(PATIENCE_MAX));
        let due = all.writes + patience;
        all.next = if all.bad.is_empty() { due } else { all.next.min(due) };
        all.bad.push(Run { slots, patience, due });
    }

    /// After a write that went well, or that found no slot: the slots that are to be tried again.
    pub(super) fn step(&self) -> Vec<Range<u32>> {
        let mut all = self.0.lock();
        let all = &mut *all;
        all.writes += 1;
        let now = all.writes;
        if all.bad.is_empty() || now < all.next {
            return Vec::new();
        }
        let (due, rest): (Vec<Run>, Vec<Run>) = all.bad.drain(..).partition(|run| run.due <= now);
        all.bad = rest;
        all.next = all.bad.iter().map(|run| run.due).min().unwrap_or(0);
        let slots = due.iter().map(|run| run.slots.clone()).collect();
        all.tried.extend(due);
        all.tried.drain(..all.tried.len().saturating_sub(TRIED_MAX));
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::{Bad, PATIENCE};

    /// The writes until something is tried again, and that.
    fn next(bad: &Bad) -> Option<(u64, u32)> {
        (1..=64 * PATIENCE)
            .find_map(|write| Some(write).zip(bad.step().first().map(|run| run.start)))
    }

    /// Goal: what stays bad is tried ever less often, and what has failed for the first time soon, whatever there was
    /// before.
    #[test]
    fn bad_slots_are_tried_again_after_twice_as_many_writes() {
        let bad = Bad::new();
        for round in 0..5 {
            bad.add(64..96);
            assert_eq!(next(&bad), Some((PATIENCE << round, 64)));
        }
        // Half of them fail in another frame.
        bad.add(80..112);
        bad.add(0..32);
        assert_eq!(next(&bad), Some((PATIENCE, 0)), "an outage");
        assert_eq!(next(&bad), Some(((PATIENCE << 5) - PATIENCE, 80)));
        assert_eq!(next(&bad), None, "each is handed out once");
    }
}
