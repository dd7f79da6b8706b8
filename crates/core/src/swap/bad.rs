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

/// How many runs are remembered that are being tried again; the oldest are forgotten.
const TRIED_MAX: usize = 4096;

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
        let before = all.forget_tried(&slots);
        let patience = before.map_or(PATIENCE, |before| (2 * before).min(PATIENCE_MAX));
        let due = all.writes + patience;
        all.next = if all.bad.is_empty() { due } else { all.next.min(due) };
        match all.bad.last_mut() {
            // In an outage one frame after the other fails.
            Some(last) if last.slots.end == slots.start && last.patience == patience => {
                (last.slots.end, last.due) = (slots.end, due);
            }
            _ => all.bad.push(Run { slots, patience, due }),
        }
    }

    /// After a write that went well, of these slots, or one that found none: the slots that are to be tried again.
    pub(super) fn step(&self, written: &Range<u32>) -> Vec<Range<u32>> {
        let mut all = self.0.lock();
        let all = &mut *all;
        all.forget_tried(written);
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

impl Runs {
    /// What was tried again of these slots is known now. Returns the longest patience that there was with any of it.
    fn forget_tried(&mut self, slots: &Range<u32>) -> Option<u64> {
        let meets = |run: &&Run| run.slots.start < slots.end && slots.start < run.slots.end;
        let patience = self.tried.iter().filter(meets).map(|run| run.patience).max();
        if patience.is_some() {
            self.tried = self.tried.iter().flat_map(|run| run.without(slots)).collect();
        }
        patience
    }
}

impl Run {
    /// What is left of it without these slots: two parts, or fewer.
    fn without(&self, slots: &Range<u32>) -> impl Iterator<Item = Run> + use<> {
        let Range { start, end } = self.slots;
        let parts = [start..end.min(slots.start), start.max(slots.end)..end];
        let (patience, due) = (self.patience, self.due);
        let parts = parts.into_iter().filter(|part| part.start < part.end);
        parts.map(move |slots| Run { slots, patience, due })
    }
}

#[cfg(test)]
mod tests {
    use super::{Bad, PATIENCE};

    /// The writes until something is tried again, and the first slot of that. What is written is elsewhere.
    fn next(bad: &Bad) -> Option<(u64, u32)> {
        let elsewhere = 1000..1032;
        (1..=64 * PATIENCE)
            .find_map(|write| Some(write).zip(bad.step(&elsewhere).first().map(|run| run.start)))
    }

    /// Goal: what stays bad is tried ever less often, and what has failed for the first time soon, whatever there was
    /// before. What was good once more counts as new.
    #[test]
    fn bad_slots_are_tried_again_after_twice_as_many_writes() {
        let bad = Bad::new();
        for round in 0..5 {
            bad.add(64..96);
            assert_eq!(next(&bad), Some((PATIENCE << round, 64)));
        }
        // A part of them fails in another frame.
        bad.add(80..112);
        bad.add(0..32);
        assert_eq!(next(&bad), Some((PATIENCE, 0)), "an outage");
        assert_eq!(next(&bad), Some(((PATIENCE << 5) - PATIENCE, 80)));
        assert_eq!(next(&bad), None, "each is handed out once");
        assert!(bad.step(&(80..112)).is_empty());
        bad.add(80..112);
        assert_eq!(next(&bad), Some((PATIENCE, 80)), "they were good meanwhile");
    }

    /// Goal: neighbours that fail one after the other are one run, also where there are thousands of them.
    #[test]
    fn an_outage_is_one_run() {
        let bad = Bad::new();
        (0..10_000).for_each(|frame| bad.add(32 * frame..32 * frame + 32));
        let elsewhere = 1_000_000..1_000_032;
        let mut found = (0..=PATIENCE).flat_map(|_| bad.step(&elsewhere));
        assert_eq!((found.next(), found.next()), (Some(0..320_000), None));
    }
}
