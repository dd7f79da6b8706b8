//! How much goes to the disk although memory would hold it: what the program hardly uses.
//!
//! A unit that is never used again takes memory in the pool, and what is used has less room to stay resident. On the
//! disk it takes none. But a unit on the disk that is used after all costs a read. Once in a second it is computed how
//! much on the disk pays best, from what came back in the last seconds and how long it had been away
//! ([`zfolio_core::refault::Recent`]). The background thread writes that, a 64th of the limit every quarter of a
//! second, the entries first that were used least lately. What was written in vain comes back for good
//! (`Engine::give_up_place`), and what stays on the disk is what is not used.
//!
//! Bounds, since all of this is an estimate: nothing is written while a quarter of all waiting is for the disk or all
//! that the program needs fits, nor what would save less than 2 % of the time, or less than a quarter of what the reads
//! cost.
//!
//! # Concurrency
//!
//! One mutex. The background thread alone takes it, and who starts over in a child.
//!
//! # Cost
//!
//! 11 KiB. Half a millisecond in a second while a program waits for memory; else a microsecond four times a second.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::refault::{Measured, OnDisk, Recent, Refaults, Stored};
use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::rank;

const SECOND_NS: u64 = 1_000_000_000;

/// So much more is on the disk after each look: this part (1/64) of the limit, and at most so many bytes, which any
/// disk writes until the next look.
const STEP_SHARE: u64 = 64;
const STEP_BYTES_MAX: u64 = 8 << 20;

/// What is written must save this part (1/50) of the time, and this part (1/4) of what the reads cost.
const SAVED_SHARE: u64 = 50;
const MARGIN_SHARE: u64 = 4;

/// This part (1/4) of the time waited may be for the disk.
const DISK_SHARE: u64 = 4;

/// Looks between two estimates.
const ESTIMATE_LOOKS: u64 = 4;

/// How long a fault waits for the disk at least.
const READ_NS: u64 = 150_000;

/// Of a budget for writes this part (1/2) is kept for what memory has no room for.
const BUDGET_SHARE: u64 = 2;

/// What a look finds; the times and faults are sums since the start.
#[derive(Clone, Copy, Default, Debug)]
struct Seen {
    now_ns: u64,
    /// Time that threads waited for memory, and the part of it in which they waited for the disk; faults that did.
    waited_ns: u64,
    disk_ns: u64,
    disk_faults: u64,
    stored: Stored,
    measured: Measured,
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct Cold(Mutex<{ rank::COLD }, State>);

#[derive(Default, Debug)]
struct State {
    recent: Recent,
    best: Option<OnDisk>,
    looks: u64,
    last: Seen,
    /// Time waited, and waited for the disk, and faults that did; each look halves what was before.
    waited_ns: u64,
    disk_ns: u64,
    disk_faults: u64,
    wanted_bytes: u64,
}

impl Cold {
    /// In a child of `fork`, whose sums begin anew.
    pub(super) fn start_over(&self) {
        *self.0.lock() = State::default();
    }

    /// The disk takes nothing: nothing more is wanted there until the next estimate.
    pub(super) fn give_up(&self) {
        let state = &mut *self.0.lock();
        (state.best, state.wanted_bytes) = (None, 0);
    }
}

impl State {
    /// Decides how much is to be on the disk.
    fn look(&mut self, seen: &Seen, refaults: &Refaults) {
        let last = std::mem::replace(&mut self.last, *seen);
        if last.now_ns > 0 {
            let halved = |sum: u64, now: u64, last: u64| sum / 2 + now.saturating_sub(last);
            self.waited_ns = halved(self.waited_ns, seen.waited_ns, last.waited_ns);
            self.disk_ns = halved(self.disk_ns, seen.disk_ns, last.disk_ns);
            self.disk_faults = halved(self.disk_faults, seen.disk_faults, last.disk_faults);
        }
        if self.looks % ESTIMATE_LOOKS == 0 {
            self.recent.look(refaults, seen.measured.left_bytes, seen.now_ns);
            let read_ns = self.disk_ns.checked_div(self.disk_faults).unwrap_or(0).max(READ_NS);
            let stored = Stored { read_ns, ..seen.stored };
            let best = self.recent.on_disk(&seen.measured, &stored, SECOND_NS / SAVED_SHARE);
            self.best = best.filter(|best| best.saved_ns >= best.read_ns / MARGIN_SHARE);
        }
        self.looks += 1;
        // Else what comes back until the next look would be written again.
        let may_wait = self.disk_ns.saturating_mul(DISK_SHARE) < self.waited_ns;
        // What was waited before the limit was raised says nothing.
        let is_short = seen.measured.need_bytes > seen.measured.limit_bytes;
        let best = self.best.filter(|_| may_wait && is_short);
        let step = (seen.measured.limit_bytes / STEP_SHARE).min(STEP_BYTES_MAX);
        self.wanted_bytes = best.map_or(0, |best| best.bytes.min(seen.stored.disk_bytes + step));
    }
}

impl Engine {
    /// Decides how much goes to the disk although memory would hold it. Called by the background thread, four times a
    /// second.
    pub(crate) fn look_at_cold(&self) {
        if !self.store.has_backing() {
            return;
        }
        let (stats, figures) = (self.stats(), self.figures());
        let limit_bytes = self.limit_bytes();
        let need_bytes = figures.demand_bytes.load(Relaxed);
        let seen = Seen {
            now_ns: self.now_ns(),
            waited_ns: figures.stall_ns.load(Relaxed),
            disk_ns: figures.stall_spill_ns.load(Relaxed),
            disk_faults: figures.faults_spilled.load(Relaxed),
            stored: Stored {
                bytes: figures.demand_stored_bytes.load(Relaxed),
                pool_bytes: self.filled_pool_bytes(),
                disk_bytes: self.store.spill_stats().bytes,
                read_ns: 0,
            },
            measured: Measured { limit_bytes, need_bytes, ..stats.measured() },
        };
        self.work.spilling.cold.0.lock().look(&seen, &stats.refaults);
    }

    /// Whether more is to be on the disk than is there or on its way, and the budget for writes has enough left.
    pub(super) fn is_more_wanted(&self) -> bool {
        let wanted = self.work.spilling.cold.0.lock().wanted_bytes;
        if wanted == 0 {
            return false;
        }
        let kept = self.writes().budget().bytes() / BUDGET_SHARE;
        let (_, writing) = self.store.in_flight();
        self.store.spill_stats().bytes + (writing as u64) < wanted && self.may_write() > kept
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::refault::{Measured, Refaults, Stored};

    use super::{Cold, SECOND_NS, Seen, State};

    const LOOK_NS: u64 = SECOND_NS / 4;
    const MIB: u64 = 1 << 20;
    const LIMIT: u64 = 64 * MIB;

    /// A program that has stored 200 MiB, which take 50, and waits all the time: either for what it had put away just
    /// before, or for all of that alike.
    struct Program {
        state: State,
        refaults: Refaults,
        seen: Seen,
        uses_all: bool,
        /// So many faults between two looks are on what left long ago.
        old_faults: u64,
    }

    /// What decides for a program that has something written, and the program after so many looks.
    fn wanting(looks: usize) -> (Cold, Program) {
        let (cold, mut program) = (Cold::default(), Program::new(false));
        program.looks(looks);
        *cold.0.lock() = std::mem::take(&mut program.state);
        assert!(cold.0.lock().wanted_bytes > 0);
        (cold, program)
    }

    impl Program {
        fn new(uses_all: bool) -> Program {
            let measured =
                Measured { limit_bytes: LIMIT, need_bytes: 240 * MIB, ..Measured::default() };
            let stored =
                Stored { bytes: 200 * MIB, pool_bytes: 50 * MIB, disk_bytes: 0, read_ns: 0 };
            let seen = Seen { measured, stored, ..Seen::default() };
            Program {
                state: State::default(),
                refaults: Refaults::default(),
                seen,
                uses_all,
                old_faults: 0,
            }
        }

        /// The time to the next look, in which threads waited so long for the disk.
        fn look(&mut self, disk_ns: u64) {
            let seen = &mut self.seen;
            seen.now_ns += LOOK_NS;
            seen.waited_ns += LOOK_NS;
            seen.disk_ns += disk_ns;
            seen.disk_faults += disk_ns / 100_000;
            seen.measured.left_bytes += 20 * MIB;
            for fault in 0..1000 {
                // Of what comes back after up to 400 MiB alike, a half is away for less than 200.
                let distance = if self.uses_all { fault * 400 * MIB / 1000 } else { 2 * MIB };
                self.refaults.add(distance, LOOK_NS / 1000);
                self.refaults.add_bytes(distance, 20 * MIB / 1000);
            }
            for _ in 0..self.old_faults {
                self.refaults.add(u64::MAX, 0);
            }
            self.state.look(seen, &self.refaults);
        }

        /// All that is wanted is written, and stays there.
        fn looks(&mut self, count: usize) {
            for _ in 0..count {
                let more = self.state.wanted_bytes.saturating_sub(self.seen.stored.disk_bytes);
                self.seen.stored.disk_bytes += more;
                self.seen.stored.pool_bytes -= more;
                self.look(0);
            }
        }

        fn disk_mib(&self) -> u64 {
            self.seen.stored.disk_bytes / MIB
        }
    }

    /// Goal: what is not used goes to the disk, a 64th of the limit at a time.
    #[test]
    fn what_is_not_used_is_written_step_by_step() {
        let mut program = Program::new(false);
        program.looks(8);
        let before = program.disk_mib();
        assert!((1..8).contains(&before), "{before}");
        program.looks(1);
        assert_eq!(program.disk_mib(), before + LIMIT / MIB / super::STEP_SHARE);
        program.looks(100);
        assert!(program.disk_mib() > 40, "{} of 50", program.disk_mib());
    }

    /// Goal: what is used does not go there.
    #[test]
    fn what_is_used_is_not_written() {
        let mut program = Program::new(true);
        program.looks(100);
        assert_eq!(program.disk_mib(), 0);
    }

    /// Goal: while a quarter of all waiting is for the disk, no more is written. Method: a little less, and a little
    /// more; a look halves what was before, so the time waited is that of two looks.
    #[test]
    fn nothing_is_written_while_the_disk_is_waited_for() {
        let mut program = Program::new(false);
        let quarter = 2 * LOOK_NS / 4;
        for (disk_ns, goes_on) in [(quarter * 9 / 10, true), (quarter * 11 / 10, false)] {
            program.looks(12);
            program.look(disk_ns);
            assert!(program.state.best.is_some());
            assert_eq!(program.state.wanted_bytes > 0, goes_on, "{disk_ns}");
        }
    }

    /// Goal: what is saved is at least a quarter of what the reads cost, which are faults on what left longest ago.
    /// Method: a second is saved in each second, and reads cost 0.75 and 0.85 of that.
    #[test]
    fn what_is_saved_is_more_than_the_reads_cost() {
        for (old_faults, pays) in [(1250, true), (1420, false)] {
            let mut program = Program::new(false);
            program.old_faults = old_faults;
            program.looks(40);
            assert_eq!(program.state.best.is_some(), pays, "{old_faults}");
        }
    }

    /// Goal: a disk that takes nothing is not asked again until the next estimate.
    #[test]
    fn a_full_disk_is_given_up() {
        let (cold, program) = wanting(13);
        cold.give_up();
        let mut looks = 0;
        loop {
            cold.0.lock().look(&program.seen, &program.refaults);
            if cold.0.lock().wanted_bytes > 0 {
                break;
            }
            looks += 1;
            assert!(looks < 8);
        }
        assert!(looks > 0, "{looks}");
    }

    /// Goal: a program that waits little has nothing written. Method: a 60th of the time, of which no more can be
    /// saved.
    #[test]
    fn nothing_is_written_for_nothing() {
        let mut program = Program::new(false);
        for look in 1..100 {
            program.seen.now_ns = look * 60 * LOOK_NS;
            program.looks(1);
        }
        assert_eq!(program.disk_mib(), 0);
    }

    /// Goal: under a limit that was raised above all that the program needs, nothing more is written.
    #[test]
    fn nothing_is_written_where_all_fits() {
        let mut program = Program::new(false);
        program.looks(12);
        let before = program.disk_mib();
        program.seen.measured.limit_bytes = program.seen.measured.need_bytes;
        program.looks(8);
        assert!(before > 0 && program.disk_mib() - before <= 1, "{before}, {}", program.disk_mib());
    }

    /// Goal: a child decides anew.
    #[test]
    fn a_child_starts_over() {
        let (cold, _) = wanting(12);
        cold.start_over();
        assert_eq!(cold.0.lock().wanted_bytes, 0);
    }
}
