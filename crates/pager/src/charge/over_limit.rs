//! The limit that is not held: how far it is passed, and who is told.
//!
//! Data that does not compress stays in memory, so that no byte is lost, and the limit is passed. Each
//! time that happens is counted; who owns the figures (`StatsHome`) is told when it begins.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{add, raise};

use crate::config::Error;
use crate::engine::Engine;

/// Bytes above a whole process's limit that are worth a word: less comes and goes with the kernel's own
/// counting.
const SLACK_BYTES: u64 = 8 << 20;

/// The same for a library's limit, whose count is exact: threads that fault at the same moment bring a
/// folio each.
const SLACK_FOLIOS: usize = 4;
const SLACK_BYTES_MIN: u64 = 1 << 20;

/// More is held than the limit allows, because it does not compress: the figures of that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OverLimit {
    /// The limit.
    pub limit_bytes: u64,
    /// All that counts against it.
    pub charged_bytes: u64,
    /// Of that, managed memory that is mapped.
    pub resident_bytes: u64,
    /// Of that, memory on its way out, and free pages for the next faults.
    pub staged_bytes: u64,
    /// Of that, compressed memory.
    pub pool_bytes: u64,
    /// Of that, what a process has beside its managed memory; 0 for a library's pager.
    pub unmanaged_bytes: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "over the limit of {} MiB: {} MiB are needed ({} MiB resident, {} MiB staged, {} MiB \
             compressed",
            self.limit_bytes >> 20,
            self.charged_bytes >> 20,
            self.resident_bytes >> 20,
            self.staged_bytes >> 20,
            self.pool_bytes >> 20,
        )?;
        if self.unmanaged_bytes > 0 {
            write!(f, ", {} MiB not managed", self.unmanaged_bytes >> 20)?;
        }
        f.write_str(")")
    }
}

impl Engine {
    /// By how much the limit may be passed before it is worth a word.
    fn slack_bytes(&self) -> u64 {
        let config = self.config();
        let passing = if config.whole_process {
            SLACK_BYTES
        } else {
            ((SLACK_FOLIOS * self.geometry().folio_bytes()) as u64).max(SLACK_BYTES_MIN)
        };
        passing.max(config.limit_bytes / 16)
    }

    /// How the limit is passed now, if it is by more than passes again by itself.
    pub fn excess(&self) -> Option<OverLimit> {
        let (limit, charge) = (self.limit_bytes(), self.charge_bytes());
        (charge >= limit + self.slack_bytes()).then(|| OverLimit {
            limit_bytes: limit,
            charged_bytes: charge,
            resident_bytes: self.charge.resident_bytes(),
            staged_bytes: self.mover.bytes_used() as u64,
            pool_bytes: self.store.pool_stats().pages_used * PAGE_BYTES as u64,
            unmanaged_bytes: self.charge.unmanaged_bytes(),
        })
    }

    /// [`Engine::excess`] as an error.
    ///
    /// # Errors
    ///
    /// [`Error::OverLimit`].
    pub(crate) fn check_limit(&self) -> Result<(), Error> {
        self.excess().map_or(Ok(()), |over| Err(Error::OverLimit(over)))
    }

    /// Counts that memory was wanted and not to be had; tells of it when it begins, and ends the process
    /// if that was asked for.
    #[cold]
    pub(crate) fn over_limit(&self) {
        add(&self.figures().over_limit, 1);
        self.measure_excess();
        let Some(over) = self.excess() else { return };
        if self.config().strict {
            crate::fatal::over_limit(over.limit_bytes, over.charged_bytes);
        }
        if !self.charge.is_over_limit.swap(true, Relaxed) {
            let first = !self.charge.was_over_limit.swap(true, Relaxed);
            self.charge.stats.over_limit(&over, first);
        }
    }

    /// Notes the most above a library's limit. A whole process's excess is what the kernel counts
    /// (`Engine::sample`).
    pub(crate) fn measure_excess(&self) {
        if !self.config().whole_process {
            let over = self.charge_bytes().saturating_sub(self.limit_bytes());
            raise(&self.figures().over_limit_bytes_max, over);
        }
    }

    /// Reports it anew once the limit is held again.
    pub(crate) fn rearm(&self) {
        if self.charge.is_over_limit.load(Relaxed) && self.charge_bytes() <= self.limit_bytes() {
            self.charge.is_over_limit.store(false, Relaxed);
        }
    }
}

/// The line of `StatsHome::over_limit` where nothing else is wanted.
pub(crate) fn report_first(over: &OverLimit, first: bool) {
    if first {
        crate::fatal::tell(format_args!("{over}"));
    }
}
