//! What another process asks for while this one runs (`zfolio set`): a limit, a share of the time to
//! be waited.
//!
//! The words lie in the page of figures, where the other process writes them. They hold from the
//! next sample on, until others are asked for. A share of a tree's limit is not changed by them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::budget::WriteBudget;
use zfolio_core::stats::stall_of_asked;

use crate::config::LIMIT_BYTES_MIN;
use crate::engine::Engine;

/// The words that were last acted on.
#[derive(Debug, Default)]
pub(super) struct Asked {
    limit_bytes: AtomicU64,
    stall: AtomicU64,
    max_pool_percent: AtomicU64,
    accept_threshold_percent: AtomicU64,
    write_budget: AtomicU64,
    write_budget_serial: AtomicU64,
    algorithm: AtomicU64,
}

/// The word that is asked for, if that is new: `before` was acted on last.
fn new(asked: &AtomicU64, before: &AtomicU64) -> Option<u64> {
    let asked = asked.load(Relaxed);
    // The page of a child of `fork` is new: what its parent was asked for still holds.
    let is_new = asked != 0 && before.swap(asked, Relaxed) != asked;
    is_new.then_some(asked)
}

impl Asked {
    /// Whether any limit was asked for.
    pub(super) fn has_limit(&self) -> bool {
        self.limit_bytes.load(Relaxed) != 0
    }
}

impl Engine {
    /// Does what was asked for since the last call.
    pub fn follow_asked(&self) {
        let (asked, stats) = (&self.charge.asked, self.stats());
        if let Some(limit) = new(&stats.limit_asked, &asked.limit_bytes) {
            self.set_limit(limit.max(LIMIT_BYTES_MIN));
        }
        if let Some(ppm) = new(&stats.stall_asked, &asked.stall).and_then(stall_of_asked) {
            self.set_stall(ppm);
        }
        if let Some(percent) = new(&stats.max_pool_percent_asked, &asked.max_pool_percent) {
            self.set_max_pool_percent(percent);
        }
        let threshold = &stats.accept_threshold_percent_asked;
        if let Some(percent) = new(threshold, &asked.accept_threshold_percent) {
            self.set_accept_threshold_percent(percent);
        }
        // The same budget may be asked for again, to be full again: the number of the request says so.
        let again = new(&stats.write_budget_serial, &asked.write_budget_serial);
        let budget = new(&stats.write_budget_asked, &asked.write_budget)
            .or_else(|| again.map(|_| stats.write_budget_asked.load(Relaxed)));
        if let Some(budget) = budget.and_then(WriteBudget::from_asked) {
            self.set_write_budget(budget);
        }
    }

    /// The same for another algorithm, which may take memory for its streams. Called by the background thread alone, so
    /// that what was asked for last is what holds.
    pub(crate) fn follow_asked_algorithm(&self) {
        let asked = new(&self.stats().algorithm_asked, &self.charge.asked.algorithm);
        asked.into_iter().for_each(|word| self.follow_algorithm(word));
    }

    /// Sizes that depend on the limit never become larger than for the limit of the settings.
    fn set_limit(&self, limit_bytes: u64) {
        // Before the first folio may be resident that did not fit below the old limit.
        self.prepare_for_limit(limit_bytes);
        self.charge.limit_bytes.store(limit_bytes, Relaxed);
    }

    /// Makes room in the queues for what can be resident below that limit.
    pub(super) fn prepare_for_limit(&self, limit_bytes: u64) {
        if self.charge.highest_bytes.fetch_max(limit_bytes, Relaxed) < limit_bytes {
            let _table = self.table.read();
            self.reserve_queues(self.figures().managed_bytes.load(Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use zfolio_core::budget::WriteBudget;

    use crate::config::Mode;
    use crate::engine::Engine;

    /// Goal: a budget that is asked for again is full again, as the first time; until then it is not. A regression: the
    /// word of the same budget was no news, and nothing was written after the budget was used up.
    #[test]
    fn a_budget_that_is_asked_for_again_is_full_again() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(64 << 20);
        let budget: WriteBudget = "1M".parse().expect("a budget");
        let left = |serial| {
            engine.stats().write_budget_serial.store(serial, Relaxed);
            engine.follow_asked();
            engine.writes().left(0, 0, || ())
        };
        engine.stats().write_budget_asked.store(budget.to_asked(), Relaxed);
        assert_eq!(left(1), 1 << 20);
        engine.writes().take(1 << 20);
        assert_eq!(left(1), 0, "nobody asked again");
        assert_eq!(left(2), 1 << 20, "it was asked for again");
    }
}
