//! The limit is passed: by how much, and whom the engine notifies.
//!
//! Data that does not compress stays in memory, so that no byte is lost, and the limit is passed.
//! Each fault that is served over the limit is counted. When the limit is first passed, and
//! whenever it is passed again after it was held, the engine notifies the owner of the figures
//! (`StatsHome`).

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{add, raise};

use crate::config::Error;
use crate::engine::Engine;

/// A whole process's excess is reported from this size on: the kernel's own count varies by less.
const SLACK_BYTES: u64 = 8 << 20;

/// The same for a library's limit, whose count is exact: threads that fault at the same moment
/// bring in one folio each.
const SLACK_FOLIOS: usize = 4;
const SLACK_BYTES_MIN: u64 = 1 << 20;

/// More memory is held than the limit allows, because data does not compress: the figures of that
/// moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OverLimit {
    /// The limit.
    pub limit_bytes: u64,
    /// The limit is this process's share of one that it has with others.
    pub is_share: bool,
    /// All memory that counts against the limit, without free pages for the next faults.
    pub charged_bytes: u64,
    /// The part of `charged_bytes` that is managed memory mapped in the program.
    pub resident_bytes: u64,
    /// The part of `charged_bytes` that is on its way out.
    pub staged_bytes: u64,
    /// The part of `charged_bytes` that is compressed memory.
    pub pool_bytes: u64,
    /// The part of `charged_bytes` that is not managed; 0 for a library's pager.
    pub unmanaged_bytes: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = if self.is_share { "its share of the limit," } else { "the limit of" };
        write!(
            f,
            "over {limit} {} MiB: {} MiB are needed ({} MiB resident, {} MiB staged, {} MiB compressed",
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
    /// An excess below this many bytes is not reported.
    fn slack_bytes(&self) -> u64 {
        let config = self.config();
        let passing = if config.whole_process {
            SLACK_BYTES
        } else {
            ((SLACK_FOLIOS * self.geometry().folio_bytes()) as u64).max(SLACK_BYTES_MIN)
        };
        passing.max(self.charge.scale_bytes() / 16)
    }

    /// By how much the limit is passed now. `None` if the excess is small enough to be temporary. Free slots
    /// are a reserve for the next faults, and do not count.
    pub fn excess(&self) -> Option<OverLimit> {
        let free = self.mover.free_bytes() as u64;
        let (limit, charge) = (self.limit_bytes(), self.charge_bytes().saturating_sub(free));
        (charge >= limit + self.slack_bytes()).then(|| OverLimit {
            limit_bytes: limit,
            is_share: self.charge.has_a_share(),
            charged_bytes: charge,
            resident_bytes: self.charge.resident_bytes(),
            staged_bytes: (self.mover.bytes_used() as u64).saturating_sub(free),
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

    /// Counts that a fault is served over the limit. Notifies the owner of the figures unless it
    /// knows already, and ends the process if the settings are strict.
    #[cold]
    pub(crate) fn note_over_limit(&self) {
        add(&self.figures().over_limit, 1);
        self.measure_excess();
        let Some(over) = self.excess() else { return };
        if self.force_share(&over) {
            return;
        }
        if self.config().strict {
            crate::fatal::over_limit(&over);
        }
        if !self.charge.is_over_limit.swap(true, Relaxed) {
            let first = !self.charge.was_over_limit.swap(true, Relaxed);
            // A thread that serves a fault must not write to standard error: another may be writing to the same pipe
            // from memory that is compressed, and have the pipe's lock; and whoever reads the pipe may never do so,
            // while the table is locked here.
            if self.charge.stats.is_told_at_once() {
                self.charge.stats.over_limit(&over, first);
            } else {
                let mut untold = self.charge.untold.lock();
                *untold = Some(both(*untold, (over, first)));
            }
        }
    }

    /// Notifies the owner of the figures of an excess that was noted while a fault was served. Called by a thread that
    /// nobody waits for, without a lock.
    pub fn tell_over_limit(&self) {
        if !self.charge.stats.can_tell() {
            return;
        }
        // No thread forks under the table: the child would inherit the lock as it is.
        let table = self.table.read();
        let untold = self.charge.untold.lock().take();
        drop(table);
        if let Some((over, first)) = untold {
            self.charge.stats.over_limit(&over, first);
        }
    }

    /// Notes a library's largest excess. A whole process's excess comes from the kernel's count
    /// (`Engine::compare_with_kernel`).
    pub(crate) fn measure_excess(&self) {
        if !self.config().whole_process {
            let over = self.charge_bytes().saturating_sub(self.limit_bytes());
            raise(&self.figures().over_limit_bytes_max, over);
        }
    }

    /// Once the limit is held again, the next excess is reported anew.
    pub(crate) fn rearm(&self) {
        if self.charge.is_over_limit.load(Relaxed) && self.charge_bytes() <= self.limit_bytes() {
            self.charge.is_over_limit.store(false, Relaxed);
        }
    }
}

/// An excess that nobody was notified of yet, and a later one: the later one's figures, and whether either was the
/// first.
fn both(untold: Option<(OverLimit, bool)>, later: (OverLimit, bool)) -> (OverLimit, bool) {
    (later.0, later.1 || untold.is_some_and(|(_, first)| first))
}

/// What `StatsHome::over_limit` does by default: the first time, one line on standard error.
pub(crate) fn report_first(over: &OverLimit, first: bool) {
    if first {
        crate::fatal::print(format_args!("{over}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the one line about the first excess is printed, also if a second excess is noted before the thread has
    /// looked that prints it. The second replaced the first, and no line came any more.
    #[test]
    fn a_later_excess_does_not_hide_the_first() {
        let over = |charged_bytes| OverLimit {
            limit_bytes: 1,
            is_share: false,
            charged_bytes,
            resident_bytes: 0,
            staged_bytes: 0,
            pool_bytes: 0,
            unmanaged_bytes: 0,
        };
        assert_eq!(both(Some((over(2), true)), (over(3), false)), (over(3), true));
        assert_eq!(both(Some((over(2), false)), (over(3), false)), (over(3), false));
        assert_eq!(both(None, (over(3), true)), (over(3), true));
    }
}
