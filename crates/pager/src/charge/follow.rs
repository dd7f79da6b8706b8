//! A limit that follows the need, for a run that estimates how a program would do at other limits.
//!
//! How much memory a program needs is known only after it has ended, and a limit far below the need
//! makes a run endless. So such a run begins with a small limit, and the limit rises:
//!
//! - with the need: the limit is a given share of what the program would hold resident now;
//! - while the program waits most of the time for memory that it had before, after it has waited 4
//!   seconds in all: the limit is then known to be too low, and the run should come to its end.
//!
//! Waiting for fresh memory does not count: it ends when the program has what it needs. The limit
//! never falls. The waits of all threads are added up, so with many threads the limit rises earlier
//! than necessary. The run then measures fewer limits, and what it measures is still correct.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How long the program's waiting is measured before it is judged.
const WINDOW_NS: u64 = 500_000_000;

/// Waiting for more than 6/10 of a window is too much: the run then takes 2.5 times as long as it
/// would without waiting.
const WAITING_TENTHS: u64 = 6;

/// The limit does not rise before the program has waited so long in all: a short run is measured at
/// the limit that it began with.
const PATIENCE_NS: u64 = 4_000_000_000;

/// A window with too much waiting raises the limit by 1/32 of the need: from half of the need to
/// all of it in 16 windows, 8 seconds.
const STEP_SHARE: u64 = 32;

/// Whether the limit follows the need, and the state for it.
#[derive(Debug, Default)]
pub(crate) struct Follow {
    /// Thousandths of the need; 0 means that the limit stays as it is.
    share_per_mille: AtomicU64,
    /// When the present window began; 0 before the first.
    window_ns: AtomicU64,
    /// How long the program had waited by then.
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

    /// Returns the limit that should hold now: `limit` or more. `waited_ns` is how long the program
    /// has waited in all for memory that it had before.
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
            // The first window begins at time 0, so the waiting in it is not known.
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
