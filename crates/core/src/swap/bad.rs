//! The slots of an area that a write did not reach since the medium failed.
//!
//! They are left alone: the medium may have no good block there. But a medium that was out of reach for a while
//! (another path, a network) fails every write, and would have lost a slot for good by each of them. So after some
//! writes that went well, or that found no slot, all of them are tried once more; and each time only after twice as
//! many. What a slot that stays bad costs in the end is one failed write in a million.

use std::ops::Range;

use super::RANK_BAD;
use crate::sync::Mutex;

/// Writes before the first time that bad slots are tried again; at most so many later.
const PATIENCE: u32 = 64;
const PATIENCE_MAX: u32 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Bad(Mutex<RANK_BAD, Runs>);

#[derive(Debug)]
struct Runs {
    runs: Vec<Range<u32>>,
    writes: u32,
    patience: u32,
}

impl Bad {
    pub(super) fn new() -> Bad {
        Bad(Mutex::new(Runs { runs: Vec::new(), writes: 0, patience: PATIENCE }))
    }

    /// These slots are bad. Without memory for that they are so for good.
    pub(super) fn add(&self, slots: Range<u32>) {
        let runs = &mut self.0.lock().runs;
        if let Some(last) = runs.last_mut().filter(|last| last.end == slots.start) {
            last.end = slots.end;
        } else if runs.try_reserve(1).is_ok() {
            runs.push(slots);
        }
    }

    /// After a write that went well, or that found no slot: the slots that are to be tried again, if it is time.
    pub(super) fn step(&self) -> Vec<Range<u32>> {
        let mut all = self.0.lock();
        all.writes += 1;
        if all.writes < all.patience || all.runs.is_empty() {
            return Vec::new();
        }
        all.writes = 0;
        all.patience = (2 * all.patience).min(PATIENCE_MAX);
        std::mem::take(&mut all.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::{Bad, PATIENCE};

    /// Goal: what stays bad is tried ever less often, and neighbours are one run.
    #[test]
    fn bad_slots_are_tried_again_after_twice_as_many_writes() {
        let bad = Bad::new();
        for round in 0..4 {
            bad.add(64..96);
            bad.add(96..128);
            bad.add(0..32);
            let writes = (1..).find_map(|write| Some(write).zip(bad.step().first().cloned()));
            assert_eq!(writes, Some((PATIENCE << round, 64..128)));
        }
        let all = 16 * PATIENCE;
        assert!((0..all).all(|_| bad.step().is_empty()), "each is handed out once");
    }
}
