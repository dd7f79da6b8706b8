//! Proactive reclaim: memory that the program does not use goes out below the limit too, as long as
//! the program waits for less than a given share of its time (`zfolio run --stall`).
//!
//! Nothing tells the engine which memory is in use; it tries. Folios are captured at a certain
//! pace, the oldest first, and lie in the staging area for seconds: who touches a unit gets it back
//! by a move, and its folio is the youngest again. What nobody has touched is compressed. How fast
//! this goes follows from what the program waits for:
//!
//! ```text
//! credit   share of the time that has passed, less what the program has waited
//! pace     bytes captured in a second: a quarter more after half a second with little waiting,
//!          half as much after one with more than its share; none while the credit is used up
//! ```
//!
//! So the program waits for its share of the time at most, and for one burst more: what it touches
//! at once of what went out before it first complained (`PACE_SHARE_MAX`). Pages that are shared
//! with a child of `fork`, or its parent, stay.
//!
//! # Prior art
//!
//! Senpai (TMO, ASPLOS'22) lowers a cgroup's limit until its pressure (PSI) is at a target, by 1 %
//! of the memory in 6 seconds at most; Google's far memory (ASPLOS'19) compresses what was not used
//! for T seconds, and chooses T by the rate at which pages come back. Taken: the feedback from what
//! is waited for, and a time without use before anything is compressed. Left: access bits, which no
//! process can read of its own memory.
//!
//! # Invariants
//!
//! - `PACE-1` While the credit is used up, nothing goes out proactively.
//!
//! # Concurrency
//!
//! The background thread steps the pace; who switches `--stall` on begins it anew.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use zfolio_core::ledger::signed;
use zfolio_core::stats::add;
use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::folio::Table;
use crate::mover::Shared;
use crate::rank;

/// Half a second: long enough for some waits, and for several turns of the background thread.
const WINDOW_NS: u64 = 500_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// The pace at the start: a 256th of the resident memory in a second.
const PACE_SHARE_FIRST: u64 = 256;

/// The fastest: a 32nd, so that a program which walks over its memory every 10 seconds is noticed
/// before a third of that memory is gone.
const PACE_SHARE_MAX: u64 = 32;

/// The slowest: a 4096th, which costs a program that uses all of its memory 4 waits of 10 us in a
/// second for each GiB.
const PACE_SHARE_MIN: u64 = 4096;

/// A program that does not wait earns credit for so long at most.
const CREDIT_NS_MAX: u64 = 10 * SECOND_NS;

/// After a burst of waiting, which the limit may have caused, nothing goes out for so long at most.
const DEBT_NS_MAX: u64 = 600 * SECOND_NS;

/// How long one turn takes at most. A process that is so large that this is not enough goes out
/// more slowly.
const TURN_NS: u64 = 4_000_000;

/// A quarter of the resident memory may lie in the staging area before it is compressed: at the
/// fastest pace for 8 seconds.
const SOAK_SHARE: u64 = 4;

/// How fast memory goes out: see the module.
#[derive(Debug, Default)]
struct Pace {
    /// The time of the last step, and what the program had waited by then. 0: there was none.
    then_ns: u64,
    waited_ns: u64,
    credit_ns: i64,
    bytes_per_s: u64,
    /// What should have gone out and has not, as the product of bytes and nanoseconds.
    owed: u128,
    /// When the present window began, and what the program had waited by then.
    window_ns: u64,
    window_waited_ns: u64,
}

impl Pace {
    /// The bytes that should go out now, at a time at which the program has waited for `waited_ns`
    /// in all and has `resident` bytes. Call it often; what is not a multiple of `grain` bytes is
    /// kept for the next time.
    fn step(&mut self, now_ns: u64, waited_ns: u64, resident: u64, grain: u64, ppm: u32) -> u64 {
        // After a fork the child's waits begin at 0 again.
        let (passed, waited) = match self.then_ns {
            0 => (0, 0),
            then => (now_ns.saturating_sub(then), waited_ns.saturating_sub(self.waited_ns)),
        };
        (self.then_ns, self.waited_ns) = (now_ns, waited_ns);
        let earned = signed(share_of(passed, ppm)) - signed(waited);
        let [debt, credit] = [DEBT_NS_MAX, CREDIT_NS_MAX].map(|time| signed(share_of(time, ppm)));
        self.credit_ns = (self.credit_ns + earned).clamp(-debt, credit);
        self.set_pace(now_ns, waited_ns, resident, ppm);
        if self.credit_ns < 0 {
            self.owed = 0;
            return 0;
        }
        // A thread that was not scheduled does not catch up with more than a tenth of a second.
        self.owed += u128::from(self.bytes_per_s) * u128::from(passed.min(SECOND_NS / 10));
        let unit = u128::from(grain) * u128::from(SECOND_NS);
        let grains = u64::try_from(self.owed / unit).unwrap_or(0);
        self.owed %= unit;
        grains * grain
    }

    fn set_pace(&mut self, now_ns: u64, waited_ns: u64, resident: u64, ppm: u32) {
        let window = now_ns.saturating_sub(self.window_ns);
        if window >= WINDOW_NS {
            let waited = waited_ns.saturating_sub(self.window_waited_ns);
            let share = share_of(window, ppm);
            // The first window has no beginning.
            if self.window_ns == 0 {
                self.bytes_per_s = resident / PACE_SHARE_FIRST;
            } else if waited > share {
                self.bytes_per_s /= 2;
            } else if waited <= share / 2 {
                self.bytes_per_s += self.bytes_per_s / 4;
            }
            (self.window_ns, self.window_waited_ns) = (now_ns, waited_ns);
        }
        let least = resident / PACE_SHARE_MIN;
        self.bytes_per_s = self.bytes_per_s.clamp(least, resident / PACE_SHARE_MAX);
    }
}

/// So many millionths of a time.
fn share_of(time_ns: u64, ppm: u32) -> u64 {
    let share = u128::from(time_ns) * u128::from(ppm) / 1_000_000;
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// See the module.
#[derive(Debug)]
pub(super) struct Proactive {
    /// The share of its time that the program may wait, in millionths; 0: nothing goes out.
    stall_ppm: AtomicU32,
    pace: Mutex<{ rank::PACE }, Pace>,
}

impl Default for Proactive {
    fn default() -> Self {
        Proactive { stall_ppm: AtomicU32::new(0), pace: Mutex::new(Pace::default()) }
    }
}

impl Engine {
    /// From now on the program may wait for so many millionths of its time.
    pub(crate) fn set_stall(&self, ppm: u32) {
        let proactive = &self.work.reclaimer.proactive;
        if proactive.stall_ppm.swap(ppm, Relaxed) == 0 {
            // What was waited for until now is no debt.
            let _table = self.table.read();
            *proactive.pace.lock() = Pace::default();
        }
        self.figures().stall_ppm.store(ppm.into(), Relaxed);
        self.work.density.keep_dense(ppm > 0);
    }

    /// Whether memory goes out below the limit too.
    pub(crate) fn is_proactive(&self) -> bool {
        self.work.reclaimer.proactive.stall_ppm.load(Relaxed) > 0
    }

    /// Captures what is due, and compresses what has lain in the staging area for long.
    pub(super) fn reclaim_proactively(&self) {
        let proactive = &self.work.reclaimer.proactive;
        let ppm = proactive.stall_ppm.load(Relaxed);
        if ppm == 0 {
            return;
        }
        let (now, waited) = (self.now_ns(), self.stats().waited_ns());
        let resident = self.figures().resident_bytes.load(Relaxed);
        let grain = self.geometry().folio_bytes() as u64;
        let due = {
            let _table = self.table.read();
            proactive.pace.lock().step(now, waited, resident, grain, ppm)
        };
        self.reclaim_ahead(due / grain);
    }

    /// Captures `folios` folios, and compresses as many of the oldest staged ones as there are too
    /// many of. Ends early if that takes long, or if the limit asks for memory.
    pub(crate) fn reclaim_ahead(&self, folios: u64) {
        let (mut left, began) = (folios, self.now_ns());
        let is_in_time = || {
            !self.work.stopping.load(Relaxed)
                && self.now_ns().saturating_sub(began) < TURN_NS
                && self.available_bytes() >= self.charge.low_bytes()
        };
        while is_in_time() {
            // Taken anew for each move and each folio, so that a change of a mapping waits for one.
            if self.replacement.staged_folios() > self.soaking_folios() {
                if !self.compress_soaked(&self.table.read()) {
                    return;
                }
                continue;
            }
            if left == 0 {
                return;
            }
            let table = self.table.read();
            let before = self.replacement.staged_folios();
            // A page that is shared would exist twice once it is captured.
            if !self.capture_next(&table, Shared::Left) {
                return;
            }
            let captured = self.replacement.staged_folios().saturating_sub(before);
            left = left.saturating_sub(captured.max(1) as u64);
        }
    }

    /// Compresses the oldest staged folio. False: that was not possible.
    fn compress_soaked(&self, table: &Table) -> bool {
        self.in_background(|| {
            let units = self.compress_next(table, self.cpu());
            add(&self.figures().reclaim_proactive, units.count() as u64);
            (!units.is_empty(), units)
        })
    }

    /// Folios that lie in the staging area before the oldest of them is compressed.
    fn soaking_folios(&self) -> usize {
        let resident = self.figures().resident_bytes.load(Relaxed) / SOAK_SHARE;
        let most = self.charge.soak_bytes_max();
        let folios = resident.min(most) / self.geometry().folio_bytes() as u64;
        usize::try_from(folios).unwrap_or(usize::MAX).max(self.charge.staged_target())
    }

    /// Whether free pages should go back to the system although the limit is far: there are as many
    /// as the next faults need.
    pub(crate) fn has_free_to_spare(&self) -> bool {
        self.is_proactive() && self.mover.free_bytes() as u64 >= self.charge.low_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::{Pace, SECOND_NS, SOAK_SHARE};
    use crate::config::Mode;
    use crate::engine::Engine;
    use crate::mover::Shared;

    const FOLIO: u64 = 64 << 10;
    const STEP_NS: u64 = 20_000_000;
    const PERCENT: u32 = 10_000;

    /// What a program waits for a staged folio, and for one of which it decompresses all 16 units.
    const STAGED_NS: u64 = 12_000;
    const STORED_NS: u64 = 16 * 20_000;

    #[derive(Clone, Copy, PartialEq)]
    enum Place {
        Resident,
        Staged,
        Stored,
    }

    /// A program whose folios are each used once in a period, on an engine of three lists.
    struct Program {
        periods_ns: Vec<u64>,
        places: Vec<Place>,
        queue: VecDeque<usize>,
        staged: VecDeque<usize>,
        pace: Pace,
        now_ns: u64,
        waited_ns: u64,
    }

    impl Program {
        /// `folios` folios, of which every folio is used once in what `period_ns` says; 0 is never.
        fn new(folios: usize, period_ns: impl Fn(usize) -> u64) -> Program {
            Program {
                periods_ns: (0..folios).map(period_ns).collect(),
                places: vec![Place::Resident; folios],
                queue: (0..folios).collect(),
                staged: VecDeque::new(),
                pace: Pace::default(),
                now_ns: SECOND_NS,
                waited_ns: 0,
            }
        }

        fn resident_bytes(&self) -> u64 {
            self.places.iter().filter(|place| **place == Place::Resident).count() as u64 * FOLIO
        }

        fn stored(&self) -> usize {
            self.places.iter().filter(|place| **place == Place::Stored).count()
        }

        fn run(&mut self, ppm: u32, seconds: u64) {
            for _ in 0..seconds * SECOND_NS / STEP_NS {
                self.step(ppm);
            }
        }

        fn step(&mut self, ppm: u32) {
            let resident = self.resident_bytes();
            let due = self.pace.step(self.now_ns, self.waited_ns, resident, FOLIO, ppm);
            for _ in 0..due / FOLIO {
                let Some(folio) = self.queue.pop_front() else { break };
                self.places[folio] = Place::Staged;
                self.staged.push_back(folio);
            }
            while self.staged.len() as u64 > resident / SOAK_SHARE / FOLIO {
                let folio = self.staged.pop_front().unwrap();
                if self.places[folio] == Place::Staged {
                    self.places[folio] = Place::Stored;
                }
            }
            self.now_ns += STEP_NS;
            for folio in 0..self.places.len() {
                let period = self.periods_ns[folio];
                // Spread over the period, in an order that is not that of the addresses.
                let offset = folio as u64 * 7_919_000_000 % period.max(1);
                let uses = |at: u64| (at + offset).checked_div(period).unwrap_or(0);
                if uses(self.now_ns) == uses(self.now_ns - STEP_NS) {
                    continue;
                }
                self.waited_ns += match self.places[folio] {
                    Place::Resident => continue,
                    Place::Staged => STAGED_NS,
                    Place::Stored => STORED_NS,
                };
                self.places[folio] = Place::Resident;
                self.queue.push_back(folio);
            }
        }
    }

    /// Goal: what is not used goes out, what is used stays, and it stays so. Method: half of the
    /// memory is used once a second.
    #[test]
    fn unused_memory_goes_out_and_the_rest_stays() {
        let mut program = Program::new(2048, |folio| if folio % 2 == 0 { SECOND_NS } else { 0 });
        program.run(PERCENT, 120);
        let (waited, stored) = (program.waited_ns, program.stored());
        assert!(stored > 750, "of 1024 unused folios {stored} are stored");
        assert!(waited < 120 * SECOND_NS / 100, "waited {waited}");
        program.run(PERCENT, 60);
        assert!(
            program.waited_ns - waited < 60 * SECOND_NS / 100,
            "{}",
            program.waited_ns - waited
        );
        assert!((stored..=1050).contains(&program.stored()), "{stored}, {}", program.stored());
    }

    /// Goal: a program that uses all of its memory waits for no more than its share, but for one
    /// burst. Method: each folio is used once in 30 s, longer than anything lies in the staging area.
    #[test]
    fn a_program_that_uses_everything_waits_for_its_share() {
        for ppm in [PERCENT / 10, PERCENT, 5 * PERCENT] {
            let mut program = Program::new(1024, |_| 30 * SECOND_NS);
            program.run(ppm, 300);
            let share = 300 * SECOND_NS / 1_000_000 * u64::from(ppm);
            // What goes out at the fastest pace in half of the period.
            let burst = 1024 * 15 / 32 * STORED_NS;
            assert!(program.waited_ns < share + burst, "{ppm}: {} of {share}", program.waited_ns);
        }
    }

    /// Goal: nothing goes out while the program waits too much, and something does again after that
    /// (`PACE-1`).
    #[test]
    fn a_burst_of_waiting_stops_everything_for_as_long_as_it_was_worth() {
        let mut pace = Pace::default();
        let (mut now, mut stopped) = (SECOND_NS, 0);
        let mut step = |waited: u64| {
            now += STEP_NS;
            pace.step(now, waited, 1 << 30, FOLIO, PERCENT)
        };
        let before: u64 = (0..500).map(|_| step(0)).sum();
        assert!(before > 64 << 20, "{before}");
        // 10 s have earned 0.1 s; 0.3 s of waiting take 20 s more to be earned.
        while step(300_000_000) == 0 {
            stopped += 1;
        }
        assert!((995..=1005).contains(&stopped), "{stopped} steps of 20 ms");
        assert_eq!(pace.step(now + STEP_NS, 0, 0, FOLIO, 0), 0, "a child of fork, without a share");
    }

    /// Goal: what comes back below the limit leaves no copy behind, or the program would have more memory than it has
    /// without zfolio; where memory goes out for the limit alone, it may. Method: all of a mapping goes out, and is
    /// read.
    #[test]
    #[allow(unsafe_code, reason = "what a program does")]
    fn what_comes_back_below_the_limit_leaves_no_copy() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        for ppm in [0, 10_000] {
            let engine: &Engine = Box::leak(Box::new(Engine::inline_for_test(64 << 20)));
            let served = crate::inline::register(engine).unwrap();
            engine.set_stall(ppm);
            let byte = |at: usize| u8::try_from(at >> 12 & 0xff).unwrap();
            let space = engine.adopted(4 << 20, |all| {
                all.iter_mut().enumerate().for_each(|(at, it)| *it = byte(at) ^ at.to_le_bytes()[0])
            });
            let table = engine.table.read();
            while engine.capture_next(&table, Shared::Left)
                || !engine.compress_next(&table, 0).is_empty()
            {}
            drop(table);
            assert_eq!(engine.charge.resident_bytes(), 0);
            for at in (0..4 << 20).step_by(4096) {
                // SAFETY: inside the mapping.
                let place = unsafe { space.base().add(at) };
                // SAFETY: the mapping is ours, and nobody else has a reference into it.
                assert_eq!(unsafe { place.read_volatile() }, byte(at));
            }
            assert_eq!(engine.charge.resident_bytes(), 4 << 20);
            assert_eq!(engine.copies.count() > 0, ppm == 0, "{} copies", engine.copies.count());
            engine.unmap_adopted(&space);
            drop(served);
        }
    }
}
