//! The background thread: reclaims before faults need memory, and keeps the pool compact.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zfolio_sys::cpu;

use super::haltpoll::{HaltPoll, World};
use super::{Average, By, Reclaimed};
use crate::config::Mode;
use crate::engine::Engine;
use crate::folio::Table;

/// The background thread takes a turn at least this often, and then compares the charge with the
/// kernel's count.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// The faults of the program and the bell, as halt polling looks at them.
struct Faults<'a> {
    engine: &'a Engine,
    /// How often the bell had rung.
    heard: u32,
}

impl World for Faults<'_> {
    fn now_ns(&self) -> u64 {
        self.engine.now_ns()
    }

    fn faults(&self) -> u64 {
        let figures = self.engine.figures();
        let stored = [&figures.faults_stored, &figures.faults_disk];
        let served = [&figures.faults_staged, &figures.faults_zero].into_iter().chain(stored);
        served.map(|faults| faults.load(Relaxed)).sum()
    }

    fn rang(&self) -> bool {
        self.engine.work.reclaimer.bell.heard() != self.heard
    }

    fn pause(&self) {
        self.engine.mover.system.pause();
    }
}

impl Engine {
    /// Whether there is enough reclaim work to be worth another CPU.
    ///
    /// A scattered clean folio costs a move and a hash. Done in the background, this saves a fault
    /// 2 us, but the move interrupts the program's CPU: random reads of 16 KiB units took 22 us
    /// with the thread and 15 us without. In handler mode the thread always pays, since the other
    /// CPU should not be idle: the scheduler would put a thread that the handler wakes there, which
    /// costs more (24 us with the thread, 50 us without).
    ///
    /// A limit that has fallen is always worth it: other processes wait for the memory, and this one
    /// may not fault again.
    fn is_worth_a_thread(&self) -> bool {
        self.config().mode == Mode::Handler
            || self.must_come_down()
            || self.work.reclaimer.dirty_share.get() >= Average::ONE / 8
            || self.work.reclaimer.folios_moved.get() >= 2 * Average::ONE
    }

    /// Wakes the background thread, if there is enough work for it.
    pub(crate) fn ring_reclaimer(&self) {
        if self.is_worth_a_thread() {
            self.wake_reclaimer();
        }
    }

    pub(crate) fn wake_reclaimer(&self) {
        self.work.reclaimer.bell.wake_sleeper();
    }

    /// The life of the background thread, until the engine stops.
    pub fn reclaim_in_background(&self) {
        let bell = &self.work.reclaimer.bell;
        let mut haltpoll = HaltPoll::new(self.cpus_to_poll());
        while !self.work.stopping.load(Relaxed) {
            let heard = bell.heard();
            zfolio_sys::thread::follow();
            self.look_after_handler();
            self.reclaim_turn();
            bell.will_sleep();
            // A wake-up between the turn above and here is lost, and the next turn comes with the
            // next sample, at most 20 ms later. A thread that needs memory meanwhile reclaims for
            // itself.
            let pause = self.pause(SAMPLE_INTERVAL);
            let sleep = haltpoll.poll(&Faults { engine: self, heard }, pause);
            self.work.reclaimer.busy.note_away(haltpoll.take_away_ns());
            if let Some(sleep) = sleep {
                bell.sleep(heard, Some(sleep));
            }
        }
    }

    /// How many CPUs there are, for halt polling; 0 where it does not pay.
    fn cpus_to_poll(&self) -> usize {
        // Inline, no thread wakes another for a fault.
        let wakes = self.config().mode == Mode::Handler;
        // With a quota of two CPUs on a larger machine, the scheduler finds another idle one.
        let all = self.work.cpus == cpu::given();
        if wakes && all && cpu::takes_turns() { self.work.cpus } else { 0 }
    }

    /// One turn of the background thread: does all of its jobs that are due.
    pub(crate) fn reclaim_turn(&self) {
        self.sample();
        self.tell_over_limit();
        self.follow_asked_algorithm();
        self.prepare_wide();
        if self.config().whole_process {
            self.page_out_files();
        }
        let table = self.table.read();
        self.compact_if_wasteful(&table);
        self.unpark(&table);
        self.note_done(&table);
        self.bound_density(&table);
        self.poll_backing(&table);
        self.store.tidy();
        self.set_prices(&table);
        self.look_for_hardware(&table);
        self.look_after_disks(&table);
        // The limit has fallen: free slots would count as available, and the charge would never come down to it.
        if self.must_come_down() {
            self.release_free(usize::MAX);
            self.store.pool().trim();
        }
        drop(table);
        if self.available_bytes() < self.charge.low_bytes() && self.is_worth_a_thread() {
            self.reclaim_to_high();
        }
        self.spill_in_background();
        self.reclaim_proactively();
        self.densify();
    }

    /// Compacts the pool if it is due. The table's guard proves that no fork is under way: the child would
    /// inherit the pool's locks as they are (`ENG-4`).
    pub(crate) fn compact_if_wasteful(&self, _table: &Table) {
        self.work.reclaimer.compaction.step(self.store.pool());
    }

    /// Has the accelerator look whether its devices have come or gone. The table's guard proves that no fork is under
    /// way (`ENG-4`).
    fn look_for_hardware(&self, _table: &Table) {
        let hardware = self.config().accelerated.hardware();
        hardware.into_iter().for_each(|hardware| hardware.look(self.now_ns()));
    }

    fn reclaim_to_high(&self) {
        let mut turns = 0;
        let wanted =
            || self.available_bytes() < self.charge.high_bytes() && self.is_worth_a_thread();
        while wanted() && !self.work.stopping.load(Relaxed) {
            // Taken anew for each folio, so that a change of a mapping waits for one folio at most.
            let table = self.table.read();
            let spilled = self.spill_ahead(&table);
            let reclaimed = !self.is_disk_behind()
                && self.reclaim_one(&table, self.cpu(), By::Background) != Reclaimed::Nothing;
            if !reclaimed && !spilled {
                return;
            }
            turns += 1;
            if turns % 64 == 0 {
                self.compact_if_wasteful(&table);
                self.note_done(&table);
                self.bound_density(&table);
                self.set_prices(&table);
                self.look_after_disks(&table);
                drop(table);
                self.densify();
                self.sample();
                // Nothing compresses, so the limit cannot be held and further turns do not help.
                if turns > 4 * self.mover.slots() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use zfolio_core::stats::Stats;
    use zfolio_core::zcomp::{Backend, Params};
    use zfolio_workers::{Accelerated, Hardware};

    use crate::config::Config;
    use crate::engine::Engine;

    /// Hardware without a codec, and when it looked last.
    #[derive(Debug, Default)]
    struct Chip(AtomicU64);

    impl Hardware for Chip {
        fn codec(&self, _params: &Params) -> Option<Box<dyn Backend>> {
            None
        }

        fn stats(&self, _name: &str) -> String {
            String::new()
        }

        fn look(&self, now_ns: u64) {
            self.0.store(now_ns, Relaxed);
        }

        fn start_over(&self) {}
    }

    /// Goal: a turn of the background thread is one of the accelerator too, to look for devices.
    #[test]
    fn hardware_looks_for_its_devices_in_the_background() {
        let chip = Arc::new(Chip::default());
        let accelerated = Accelerated::Hardware(Arc::clone(&chip) as _);
        let config = Config { accelerated, ..Config::for_test(8 << 20) };
        let stats = Box::new(Box::<Stats>::default());
        let engine = Engine::with_backing(config, stats, None).unwrap();
        let before = engine.now_ns();
        engine.reclaim_turn();
        assert!((before..=engine.now_ns()).contains(&chip.0.load(Relaxed)));
    }
}
