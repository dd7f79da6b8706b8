//! How much of the limit the pool may take, in the kernel's words: `max_pool_percent`, `accept_threshold_percent`.
//!
//! ```text
//! pool bytes   0 ........ accept ........ max ........ limit
//!                           |              |
//!                           |              +-- passed: the pool is full (pool_limit_hit), and entries are written back
//!                           +-- no longer passed: the pool is not full any more
//! ```
//!
//! Between the two marks nothing changes: this is the hysteresis. Unlike the kernel's, a full pool refuses nothing:
//! what is stored meanwhile is in memory anyway, and the limit holds for both. Empty zspages that are kept for what
//! passes through the pool do not count: to write back makes no fewer of them.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The maximum at which the pool has no bound but the limit.
const ALL: u64 = 100;

/// The percentages that are accepted.
const ACCEPTED: RangeInclusive<u8> = 1..=100;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolLimit {
    /// The most that the pool may take, in percent of the limit: 1 to 100. At 100 only the limit counts.
    pub max_pool_percent: u8,
    /// What it comes down to once it has taken more, in percent of that maximum: 1 to 100.
    pub accept_threshold_percent: u8,
}

impl Default for PoolLimit {
    /// The limit alone, and the kernel's threshold.
    fn default() -> PoolLimit {
        PoolLimit { max_pool_percent: 100, accept_threshold_percent: 90 }
    }
}

impl PoolLimit {
    /// Whether both are percentages that are accepted.
    #[must_use]
    pub fn is_valid(self) -> bool {
        [self.max_pool_percent, self.accept_threshold_percent]
            .iter()
            .all(|one| ACCEPTED.contains(one))
    }

    /// Reads one of the percentages. `None`: it is not accepted.
    #[must_use]
    pub fn parse_percent(given: &str) -> Option<u8> {
        given.parse().ok().filter(|percent| ACCEPTED.contains(percent))
    }
}

/// The limit of the pool that is in force, and whether the pool has passed it.
#[derive(Debug)]
pub(super) struct PoolFill {
    max_pool_percent: AtomicU64,
    accept_threshold_percent: AtomicU64,
    is_full: AtomicBool,
}

impl Default for PoolFill {
    fn default() -> PoolFill {
        let PoolLimit { max_pool_percent, accept_threshold_percent } = PoolLimit::default();
        PoolFill {
            max_pool_percent: AtomicU64::new(max_pool_percent.into()),
            accept_threshold_percent: AtomicU64::new(accept_threshold_percent.into()),
            is_full: AtomicBool::new(false),
        }
    }
}

impl PoolFill {
    pub(super) fn set_max_pool_percent(&self, percent: u64) {
        self.max_pool_percent.store(percent.clamp(1, ALL), Relaxed);
    }

    pub(super) fn set_accept_threshold_percent(&self, percent: u64) {
        self.accept_threshold_percent.store(percent.clamp(1, ALL), Relaxed);
    }

    /// Both percentages.
    pub(super) fn percents(&self) -> [u64; 2] {
        [&self.max_pool_percent, &self.accept_threshold_percent]
            .map(|percent| percent.load(Relaxed))
    }

    /// Whether the pool has a bound of its own.
    pub(super) fn is_bounded(&self) -> bool {
        self.max_pool_percent.load(Relaxed) < ALL
    }

    /// Whether entries are to be written back until the pool is no longer full: it has `pool_bytes`, of which
    /// `writing_bytes` are about to leave it. Calls `was_hit` if it has just become full. Called by one thread.
    pub(super) fn is_full(
        &self,
        (pool_bytes, writing_bytes): (u64, u64),
        limit_bytes: u64,
        was_hit: impl FnOnce(),
    ) -> bool {
        let [max, accept] = self.percents();
        let max_bytes = share(limit_bytes, max);
        let accept_bytes = share(max_bytes, accept);
        if max == ALL || pool_bytes <= accept_bytes {
            self.is_full.store(false, Relaxed);
        } else if pool_bytes > max_bytes && !self.is_full.swap(true, Relaxed) {
            was_hit();
        }
        self.is_full.load(Relaxed) && pool_bytes.saturating_sub(writing_bytes) > accept_bytes
    }
}

/// So many percent, without an overflow.
fn share(bytes: u64, percent: u64) -> u64 {
    bytes / 100 * percent + bytes % 100 * percent / 100
}

#[cfg(test)]
mod tests {
    use super::{PoolFill, PoolLimit, share};

    /// Goal: the kernel's hysteresis. Method: a pool that rises and falls, with a limit of 1000 bytes, a maximum of
    /// half of it, and a threshold of 80 % of that.
    #[test]
    fn a_full_pool_comes_down_to_the_threshold_and_counts_once() {
        let (fill, mut hits) = (PoolFill::default(), 0);
        let mut is_full = |fill: &PoolFill, pool, writing| {
            let full = fill.is_full((pool, writing), 1000, || hits += 1);
            (full, hits)
        };
        assert_eq!(is_full(&fill, 1000, 0), (false, 0), "only the limit counts");
        fill.set_max_pool_percent(50);
        fill.set_accept_threshold_percent(80);
        let steps = [
            (450, 0, (false, 0)),
            (500, 0, (false, 0)),
            (501, 0, (true, 1)),
            (600, 0, (true, 1)),
            (450, 0, (true, 1)),
            // Enough is on its way out; if it stays, the pool is still full.
            (450, 50, (false, 1)),
            (450, 20, (true, 1)),
            (400, 0, (false, 1)),
            (490, 0, (false, 1)),
            (510, 0, (true, 2)),
        ];
        for (pool, writing, expected) in steps {
            assert_eq!(is_full(&fill, pool, writing), expected, "{pool} {writing}");
        }
        fill.set_max_pool_percent(100);
        assert_eq!(is_full(&fill, 510, 0), (false, 2));
        fill.set_max_pool_percent(50);
        fill.set_accept_threshold_percent(100);
        assert_eq!(is_full(&fill, 501, 0), (true, 3));
        assert_eq!(is_full(&fill, 500, 0), (false, 3), "100 is without hysteresis");
    }

    #[test]
    fn a_share_of_any_size_is_exact() {
        assert_eq!([share(1000, 33), share(99, 50), share(u64::MAX, 100)], [330, 49, u64::MAX]);
        assert!(PoolLimit::default().is_valid());
        assert!(!PoolLimit { max_pool_percent: 0, ..PoolLimit::default() }.is_valid());
    }
}
