//! When a pool is worth compacting.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{PageSource, Pool, PoolStats};
use crate::page::PAGE_BYTES;

/// How much one step moves at most: 4 MiB take a millisecond.
pub(crate) const STEP_BYTES: usize = 4 << 20;

/// A pool is compacted when more than a 32nd of it, and 64 KiB, became unused since the last time: looking at all size
/// classes takes 10 to 20 us.
const WASTE_SHARE: u64 = 32;
const WASTE_MIN: u64 = 64 << 10;

/// See the module.
#[derive(Debug, Default)]
pub struct Compaction {
    /// Unused bytes that the last one left: about half a page for each size class that is in use. In a pool of 5 MiB
    /// that is a tenth.
    left_bytes: AtomicU64,
}

impl Compaction {
    /// Compacts a pool for a millisecond or so, if that is due. Returns whether it did.
    pub fn step<S: PageSource>(&self, pool: &Pool<S>) -> bool {
        let is_due = self.is_due(pool.stats());
        if is_due && pool.compact(STEP_BYTES).bytes_moved < STEP_BYTES {
            self.ended(pool.stats());
        }
        is_due
    }

    fn is_due(&self, pool: PoolStats) -> bool {
        let unused = unused_bytes(pool);
        let left = self.left_bytes.fetch_min(unused, Relaxed).min(unused);
        unused - left >= WASTE_MIN + pool.bytes_stored / WASTE_SHARE
    }

    /// Nothing more can be gained now.
    fn ended(&self, pool: PoolStats) {
        self.left_bytes.store(unused_bytes(pool), Relaxed);
    }
}

fn unused_bytes(pool: PoolStats) -> u64 {
    (pool.pages_used * PAGE_BYTES as u64).saturating_sub(pool.bytes_stored)
}

#[cfg(test)]
mod tests {
    use super::{Compaction, PAGE_BYTES, PoolStats};

    const MIB: u64 = 1 << 20;

    fn pool(stored: u64, unused: u64) -> PoolStats {
        let pages_used = (stored + unused) / PAGE_BYTES as u64;
        PoolStats { pages_used, bytes_stored: stored, ..PoolStats::default() }
    }

    /// Goal: compaction that gained nothing is due again when more became unused, and not before: a program
    /// that faults all the time makes a tenth of its pool unused within milliseconds.
    #[test]
    fn a_pool_is_compacted_when_more_became_unused() {
        let compaction = Compaction::default();
        let is_due = |unused| compaction.is_due(pool(8 * MIB, unused));
        assert!(!is_due(MIB / 4));
        assert!(is_due(MIB));
        assert!(is_due(MIB), "until it has ended");
        compaction.ended(pool(8 * MIB, MIB));
        assert!(!is_due(MIB + MIB / 4));
        assert!(is_due(MIB + MIB / 2));
    }

    /// Goal: what cannot be gained falls with the pool.
    #[test]
    fn a_pool_that_shrank_is_compacted_sooner() {
        let compaction = Compaction::default();
        compaction.ended(pool(64 * MIB, 4 * MIB));
        assert!(!compaction.is_due(pool(MIB, MIB / 4)));
        assert!(compaction.is_due(pool(MIB, MIB / 2)));
    }
}
