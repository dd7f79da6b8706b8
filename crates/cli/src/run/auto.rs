//! `--limit auto`: a limit that follows what the machine and the memory cgroup have left.
//!
//! Once a second: what is available, less a reserve, is what the run may have in addition to what
//! it has; where the reserve is used up, the run gives so much back. While the kernel itself is
//! under pressure (PSI), the run gives back a 64th of the machine's or cgroup's memory with each
//! look, also if some seems to be available; but not if that is more than half of all memory: then
//! tasks of another cgroup wait at its own limit, and what the run gives back would not help them.
//!
//! The processes of a run share this limit as any other (`quota.rs`). With `--per-process` each may
//! grow by all of what is left, as without zfolio; what must be given back is shared out by size.
//!
//! # Cost
//!
//! A look reads two files of the system, four of each memory cgroup on the way up, and the figures
//! of each process: 0.1 ms and more.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zfolio_core::ledger::signed;
use zfolio_sys::clock;

use super::RUN_LIMIT_BYTES_MIN;
use crate::allowance::{self, Allowance, Left};
use crate::ledger_file;
use crate::stats_file::{self, StatsFile};

const LOOK_NS: u64 = 1_000_000_000;

/// What others should find free: a 16th of all memory, within these bounds.
const RESERVE_SHARE: u64 = 16;
const RESERVE_BYTES_MIN: u64 = 32 << 20;
const RESERVE_BYTES_MAX: u64 = 1 << 30;

/// The kernel is under pressure if some task waited for memory for a tenth of the last 10 seconds.
const PRESSURE_PERCENT: f64 = 10.0;

/// What is given back at each look while it is.
const PRESSURE_SHARE: u64 = 64;

/// A new limit is asked for if it differs by more than a 64th.
const NOISE_SHARE: u64 = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Auto {
    run: u32,
    directory: PathBuf,
    tree: bool,
    next_ns: u64,
    /// By how much the run could have grown at the last look.
    room_before: i64,
}

impl Auto {
    /// For a run whose figures are in `directory`.
    pub(super) fn new(directory: PathBuf, tree: bool) -> Auto {
        Auto { run: std::process::id(), directory, tree, next_ns: 0, room_before: i64::MAX }
    }

    /// The time until the next look.
    pub(super) fn rest(&self) -> Duration {
        Duration::from_nanos(self.next_ns.saturating_sub(clock::monotonic_ns()))
    }

    /// So much of `room` as there was at the last look too. When a process has just ended, its memory is available
    /// already, and the run is still charged with it: counted twice, it would let the others grow beyond what there is.
    fn steady(&mut self, room: i64) -> i64 {
        let before = std::mem::replace(&mut self.room_before, room);
        room.min(before.max(0))
    }

    /// Looks, if it is time, and asks for other limits.
    pub(super) fn look_if_due(&mut self) {
        let now_ns = clock::monotonic_ns();
        if now_ns < self.next_ns {
            return;
        }
        self.next_ns = now_ns + LOOK_NS;
        let Some((all, left)) = Allowance::here().zip(allowance::left()) else { return };
        let room = self.steady(room(all.bytes, left));
        if self.tree {
            let Some(ledger) = ledger_file::read(&self.directory, self.run) else { return };
            let limit = limit(room, ledger.sum_bytes().0, 1.0, all.bytes);
            if is_new(ledger.limit_asked(), limit) {
                ledger_file::ask_limit(&self.directory, self.run, limit).ok();
            }
            return;
        }
        let files = stats_file::running(&self.directory, self.run);
        let size = |file: &StatsFile| file.stats.figures.process_bytes.load(Relaxed);
        let sum: u64 = files.iter().map(size).sum();
        for file in &files {
            let part = size(file) as f64 / sum.max(1) as f64;
            let limit = limit(room, size(file), part, all.bytes);
            if is_new(file.stats.limit_asked.load(Relaxed), limit) {
                file.ask_limit(limit).ok();
            }
        }
    }
}

/// Whether a limit differs so much from the one that was asked for last that it is asked for. 0:
/// none was, as after `execve`.
fn is_new(asked: u64, limit: u64) -> bool {
    asked == 0 || asked.abs_diff(limit) > asked / NOISE_SHARE
}

/// The limit to begin with: what is left now. `None`: that cannot be read.
pub(super) fn first_limit() -> Option<u64> {
    let (all, left) = Allowance::here().zip(allowance::left())?;
    Some(limit(room(all.bytes, left), 0, 1.0, all.bytes))
}

/// By how much the run may grow; below 0: how much it should give back.
fn room(all_bytes: u64, left: Left) -> i64 {
    let reserve = (all_bytes / RESERVE_SHARE).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX);
    let room = signed(left.bytes) - signed(reserve);
    let is_pressed = left.pressure_percent >= PRESSURE_PERCENT && left.bytes <= all_bytes / 2;
    if is_pressed { room.min(-signed(all_bytes / PRESSURE_SHARE)) } else { room }
}

/// The limit of a process that has `bytes`, and is this `part` of all that can give back.
fn limit(room: i64, bytes: u64, part: f64, all_bytes: u64) -> u64 {
    #[allow(clippy::cast_possible_truncation, reason = "a part of a size")]
    let change = if room < 0 { (room as f64 * part) as i64 } else { room };
    bytes.saturating_add_signed(change).min(all_bytes).max(RUN_LIMIT_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::{Auto, is_new, limit, room, signed};
    use crate::allowance::Left;

    const GIB: u64 = 1 << 30;

    fn left(bytes: u64, pressure_percent: f64) -> Left {
        Left { bytes, pressure_percent }
    }

    #[test]
    fn what_is_left_may_be_used_but_for_a_reserve() {
        let room = room(8 * GIB, left(3 * GIB, 0.0));
        assert_eq!(room, signed(3 * GIB - GIB / 2));
        assert_eq!(limit(room, GIB, 0.5, 8 * GIB), GIB + 3 * GIB - GIB / 2, "all of it for each");
        assert_eq!(limit(room, 7 * GIB, 1.0, 8 * GIB), 8 * GIB, "never more than there is");
    }

    #[test]
    fn what_is_missing_is_shared_out_by_size() {
        let room = room(8 * GIB, left(GIB / 4, 0.0));
        assert_eq!(room, -signed(GIB / 4));
        assert_eq!(limit(room, 3 * GIB, 0.75, 8 * GIB), 3 * GIB - GIB / 16 * 3);
        assert_eq!(limit(room, GIB, 0.25, 8 * GIB), GIB - GIB / 16);
        assert_eq!(limit(-signed(2 * GIB), GIB, 1.0, 8 * GIB), 32 << 20, "the least");
        assert_eq!(limit(0, 1 << 20, 1.0, 24 << 20), 32 << 20, "even where less is allowed");
    }

    #[test]
    fn pressure_asks_for_memory_whatever_is_left() {
        assert_eq!(room(8 * GIB, left(4 * GIB, 12.5)), -signed(GIB / 8));
        assert_eq!(room(8 * GIB, left(0, 12.5)), -signed(GIB / 2), "the larger of both");
    }

    /// Goal: memory that becomes free is used at the second look, so that of a process that has just ended does not
    /// count twice; what is missing is given back at once, and once.
    #[test]
    fn only_what_was_there_before_is_used() {
        let mut auto = Auto::new("/nowhere".into(), true);
        let looks = [500, 400, 4400, 4400, -30, 0, 100].map(|room| auto.steady(room));
        assert_eq!(looks, [500, 400, 400, 4400, -30, 0, 0]);
    }

    /// A regression: a run on an idle machine went down to the least limit while another cgroup was at its own.
    #[test]
    fn pressure_of_others_takes_nothing_of_a_machine_that_has_plenty() {
        assert_eq!(room(8 * GIB, left(5 * GIB, 60.0)), room(8 * GIB, left(5 * GIB, 0.0)));
    }

    #[test]
    fn small_changes_are_not_asked_for() {
        assert!(is_new(0, GIB) && !is_new(GIB, GIB) && !is_new(GIB, GIB + GIB / 100));
        assert!(is_new(GIB, GIB / 2) && is_new(GIB, GIB + GIB / 32));
    }
}
