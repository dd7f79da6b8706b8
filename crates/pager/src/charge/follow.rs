//! A limit that follows the need, for a run that is to tell how it would do at other limits.
//!
//! What a program needs is known when it has ended, and a limit far below it makes a run endless. So
//! such a run begins with a small limit, which rises:
//!
//! - with the need: it is a given share of what the program would hold resident now;
//! - while the program waits most of the time for what was there before, once it has done so for 4
//!   seconds: then a lower limit is known to be too low, and the run should come to its end.
//!
//! Waiting for fresh memory does not count: it is over when the program has what it needs. The limit never
//! falls. Waiting is all threads' together, so that with many of them the limit rises earlier than it
//! must; the run tells less then, and nothing wrong.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How long waiting is watched before it is judged.
const WINDOW_NS: u64 = 500_000_000;

/// Waiting above 6/10 of a window is too much: the run takes 2.5 times as long as it must.
const WAITING_TENTHS: u64 = 6;

/// Waiting that a run may do before any of it is too much: a short run is observed as it began.
const PATIENCE_NS: u64 = 4_000_000_000;

/// What the limit gains then, as a part of the need: from one half to all in 16 windows, 8 seconds.
const STEP_SHARE: u64 = 32;

/// Whether the limit follows, and what is remembered for it. Only the background thread steps.
#[derive(Debug, Default)]
pub(crate) struct Follow {
    /// Thousandths of the need; 0 means that the limit stays as it is.
    share_per_mille: AtomicU64,
    window_ns: AtomicU64,
    window_waited_ns: AtomicU64,
}

impl Follow {
    /// From now on the limit is `share_per_mille` thousandths of the need at least.
    pub(crate) fn start(&self, share_per_mille: u64) {
        self.share_per_mille.store(share_per_mille, Relaxed);
    }

    /// Whether [`Follow::start`] was called.
    pub(crate) fn is_on(&self) -> bool {
        self.share_per_mille.load(Relaxed) > 0
    }

    /// The limit that should hold now, `limit` or more, after `waited_ns` for what was there before.
    pub(crate) fn step(&self, now_ns: u64, waited_ns: u64, need: u64, limit: u64) -> u64 {
        let share = self.share_per_mille.load(Relaxed);
        if share == 0 {
            return limit;
        }
        let mut wanted = (need / 1000 * share).max(limit);
        let window = now_ns.saturating_sub(self.window_ns.load(Relaxed));
        if window >= WINDOW_NS {
            let waited = waited_ns.saturating_sub(self.window_waited_ns.load(Relaxed));
            let too_much = waited / WAITING_TENTHS > window / 10 && waited_ns > PATIENCE_NS;
            // The first window begins at 0: nobody knows what was waited in it.
            if too_much && self.window_ns.load(Relaxed) > 0 {
                wanted += need / STEP_SHARE;
            }
            self.window_ns.store(now_ns, Relaxed);
            self.window_waited_ns.store(waited_ns, Relaxed);
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::Follow;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_limit_is_a_share_of_the_need_and_never_falls() {
        let follow = Follow::default();
        assert_eq!(follow.step(SECOND, 0, 1 << 30, 64 << 20), 64 << 20, "not started");
        follow.start(500);
        assert_eq!(follow.step(SECOND, 0, 64_000_000, 40_000_000), 40_000_000);
        assert_eq!(follow.step(SECOND, 0, 100_000_000, 40_000_000), 50_000_000);
        assert_eq!(follow.step(SECOND, 0, 10_000_000, 50_000_000), 50_000_000);
    }

    #[test]
    fn the_limit_rises_while_the_program_mostly_waits() {
        let follow = Follow::default();
        follow.start(500);
        let need = 320_000_000;
        let step = |seconds: u64, waited: u64, limit| {
            follow.step(seconds * SECOND, waited * SECOND, need, limit)
        };
        assert_eq!(step(98, 2, 160_000_000), 160_000_000, "nothing to compare with");
        assert_eq!(step(99, 3, 160_000_000), 160_000_000, "patience");
        assert_eq!(step(100, 4, 160_000_000), 160_000_000, "patience");
        assert_eq!(step(110, 9, 160_000_000), 160_000_000, "half of the time");
        assert_eq!(step(120, 18, 160_000_000), 170_000_000, "nine tenths");
        assert_eq!(step(120, 18, 170_000_000), 170_000_000, "not twice for the same time");
    }
}
