//! What another process asks for while this one runs (`zfolio set`): a limit, a share of the time to
//! be waited.
//!
//! The words lie in the page of figures, where the other process writes them. They hold from the
//! next sample on, until others are asked for. A share of a tree's limit is not changed by them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::stats::{Stats, stall_of_asked};

use crate::config::LIMIT_BYTES_MIN;
use crate::engine::Engine;

/// The words that were last acted on.
#[derive(Debug, Default)]
pub(super) struct Asked {
    limit_bytes: AtomicU64,
    stall: AtomicU64,
}

impl Asked {
    /// The limit that is asked for, if that is new.
    fn limit(&self, stats: &Stats) -> Option<u64> {
        let asked = stats.limit_asked.load(Relaxed);
        // The page of a child of `fork` is new: what its parent was asked for still holds.
        let is_new = asked != 0 && self.limit_bytes.swap(asked, Relaxed) != asked;
        is_new.then_some(asked)
    }

    /// Whether any limit was asked for.
    pub(super) fn has_limit(&self) -> bool {
        self.limit_bytes.load(Relaxed) != 0
    }

    /// The share in millionths that is asked for, if that is new.
    fn stall(&self, stats: &Stats) -> Option<u32> {
        let asked = stats.stall_asked.load(Relaxed);
        let is_new = asked != 0 && self.stall.swap(asked, Relaxed) != asked;
        if is_new { stall_of_asked(asked) } else { None }
    }
}

impl Engine {
    /// Does what was asked for since the last call.
    pub fn follow_asked(&self) {
        if let Some(limit) = self.charge.asked.limit(self.stats()) {
            self.set_limit(limit.max(LIMIT_BYTES_MIN));
        }
        if let Some(ppm) = self.charge.asked.stall(self.stats()) {
            self.set_stall(ppm);
        }
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
