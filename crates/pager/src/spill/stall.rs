//! A medium that ends no write: how long a fault that needs memory waits for it.
//!
//! A disk that others write to may answer nothing for some seconds. A fault waits for a second, as the whole program
//! does for its own files. From then on one fault in fifty milliseconds passes the limit: whoever answers the requests
//! may need memory of this very program (a file system in user space), so it must not stand still, and the limit is not
//! passed by much while it creeps. After ten seconds the medium counts as one that takes nothing, and nobody waits.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// So long a fault waits for room while no write ends at all.
const WAIT_NS: u64 = 1_000_000_000;

/// And then the faults that pass the limit are so far apart.
const PASS_NS: u64 = 50_000_000;

/// Until nothing has ended for so long: as long as a read is tried again (`retry.rs`).
const DEAD_NS: u64 = 10_000_000_000;

/// Watches how long no write ends.
#[derive(Debug, Default)]
pub(super) struct Stall {
    /// Writes that had ended at the last look.
    ended: AtomicU64,
    /// When a look found writes under way, of which no later look found any ended; 0: there is no such look.
    since_ns: AtomicU64,
    /// When a fault last passed the limit.
    passed_ns: AtomicU64,
}

impl Stall {
    /// Whether a fault passes the limit instead of waiting for writes, if any are under way; `ended` counts the writes
    /// that have ended.
    pub(super) fn may_pass(&self, ended: u64, is_under_way: bool, now_ns: u64) -> bool {
        if self.ended.swap(ended, Relaxed) != ended || !is_under_way {
            self.since_ns.store(0, Relaxed);
            return false;
        }
        let since_ns = self.since_ns.load(Relaxed);
        if since_ns == 0 {
            self.since_ns.store(now_ns.max(1), Relaxed);
            return false;
        }
        let (stalled, passed) = (now_ns.saturating_sub(since_ns), self.passed_ns.load(Relaxed));
        stalled > DEAD_NS || stalled > WAIT_NS && now_ns.saturating_sub(passed) >= PASS_NS
    }

    /// A fault has passed the limit.
    pub(super) fn note_pass(&self, now_ns: u64) {
        self.passed_ns.store(now_ns, Relaxed);
    }

    /// In a child of `fork`, and once an area was opened: no write is under way.
    pub(super) fn start_over(&self) {
        self.ended.store(0, Relaxed);
        self.since_ns.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{DEAD_NS, PASS_NS, Stall, WAIT_NS};

    /// How many of the faults that look each millisecond of `span_ns` pass the limit.
    fn passes(stall: &Stall, from_ns: u64, span_ns: u64) -> usize {
        let passes = |now_ns: &u64| {
            let passes = stall.may_pass(7, true, *now_ns);
            if passes {
                stall.note_pass(*now_ns);
            }
            passes
        };
        (from_ns..from_ns + span_ns).step_by(1_000_000).filter(passes).count()
    }

    #[test]
    fn the_limit_is_passed_slowly_and_then_freely() {
        let stall = Stall::default();
        let begin = 5 * DEAD_NS;
        assert_eq!(passes(&stall, begin, WAIT_NS), 0);
        let slow = passes(&stall, begin + WAIT_NS, DEAD_NS - WAIT_NS);
        assert!(
            slow.abs_diff(usize::try_from((DEAD_NS - WAIT_NS) / PASS_NS).unwrap()) <= 1,
            "{slow}"
        );
        assert!(passes(&stall, begin + DEAD_NS, WAIT_NS) > 990);
        assert!(!stall.may_pass(8, true, begin + 2 * DEAD_NS), "one has ended");
        assert_eq!(passes(&stall, begin + 3 * DEAD_NS, WAIT_NS), 0);
    }

    /// Goal: what was asked for only now is not late. Method: nothing was under way, or nobody looked, for long.
    #[test]
    fn a_request_is_late_from_the_look_that_found_it() {
        let stall = Stall::default();
        assert!(!stall.may_pass(7, false, 1));
        assert!(!stall.may_pass(7, true, 1 + DEAD_NS));
        assert!(!stall.may_pass(7, true, 1 + DEAD_NS + WAIT_NS));
        assert!(stall.may_pass(7, true, 2 + DEAD_NS + WAIT_NS));
    }
}
