//! Runs of rising faults: how far a fault goes, and what is brought back ahead of it.
//!
//! A fault that goes on where the same thread's last one ended continues a **run**. In a run a fault
//! brings the rest of its folio back and not one unit; and a run that lasts is gone ahead of, by a
//! thread of its own.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_sys::{futex, thread};

use crate::engine::Engine;
use crate::folio::Geometry;

/// Faults in a row, after the first, that make a run worth going ahead of.
const RUN_MIN: u32 = 2;

/// Bytes brought back ahead of a run, at most.
const AHEAD_BYTES: usize = 1 << 20;

/// Runs told apart, by thread. Two threads that share one only see their runs end early.
const RUNS: usize = 16;

/// What is known of one thread's present run.
#[derive(Debug, Default)]
struct Run {
    /// The address that would continue it.
    expected: AtomicUsize,
    /// Up to where it was gone ahead of.
    ahead: AtomicUsize,
    length: AtomicU32,
}

/// All runs, and the prefetch that works for one of them at a time.
#[derive(Debug)]
pub(crate) struct Prefetch {
    geometry: Geometry,
    runs: [Run; RUNS],
    /// The next folio to bring back, and the end of what may be.
    next: AtomicUsize,
    end: AtomicUsize,
    bell: AtomicU32,
}

impl Prefetch {
    pub(crate) fn new(geometry: Geometry) -> Prefetch {
        Prefetch {
            geometry,
            runs: Default::default(),
            next: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            bell: AtomicU32::new(0),
        }
    }

    fn run_of(&self, thread: usize) -> &Run {
        // Fibonacci hashing: thread numbers and addresses of thread descriptors are multiples of
        // something.
        let mixed = (thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        &self.runs[mixed as usize % RUNS]
    }

    /// Whether a fault at `address` goes on where the last one ended, or in what was gone ahead of it.
    pub(crate) fn continues(&self, thread: usize, address: usize) -> bool {
        let run = self.run_of(thread);
        let unit = address & !(self.geometry.unit_bytes() - 1);
        let expected = run.expected.load(Relaxed);
        unit == expected || (unit > expected && unit <= run.ahead.load(Relaxed))
    }

    /// Notes that a fault brought memory up to `end`. True if it is worth going ahead of.
    fn note(&self, thread: usize, continued: bool, end: usize) -> bool {
        let run = self.run_of(thread);
        run.expected.store(end, Relaxed);
        if !continued {
            run.length.store(0, Relaxed);
            run.ahead.store(0, Relaxed);
            return false;
        }
        let lasts = run.length.fetch_add(1, Relaxed) + 1 >= RUN_MIN;
        if lasts {
            run.ahead.store(end + self.window(), Relaxed);
        }
        lasts
    }

    fn window(&self) -> usize {
        AHEAD_BYTES.max(2 * self.geometry.folio_bytes())
    }

    /// Takes the next folio of the window.
    fn take(&self) -> Option<usize> {
        let next = self.next.load(Relaxed);
        let after = next + self.geometry.folio_bytes();
        let claimed = next < self.end.load(Relaxed)
            && self.next.compare_exchange(next, after, Relaxed, Relaxed).is_ok();
        claimed.then_some(next)
    }
}

impl Engine {
    /// After a fault that brought memory up to `end`: goes ahead of the run, if it is one.
    pub(crate) fn prefetch_after(&self, thread: usize, continued: bool, end: usize) {
        if !self.work.prefetch.note(thread, continued, end) {
            return;
        }
        let from = self.geometry().base_above(end);
        let window = self.work.prefetch.window();
        let next = self.work.prefetch.next.load(Relaxed);
        if next < from || next > from + window {
            self.work.prefetch.next.store(from, Relaxed);
        }
        self.work.prefetch.end.store(from + window, Relaxed);
        self.work.prefetch.bell.fetch_add(1, Relaxed);
        futex::wake(&self.work.prefetch.bell, 1);
    }

    /// The prefetching thread: until the engine stops.
    pub fn prefetch_in_background(&self) {
        while !self.work.stopping.load(Relaxed) {
            let bell = self.work.prefetch.bell.load(Relaxed);
            thread::follow();
            while self.prefetch_turn() {}
            futex::wait(&self.work.prefetch.bell, bell, None);
        }
    }

    /// Brings the next folio of the window back. False: there is none.
    pub(crate) fn prefetch_turn(&self) -> bool {
        let Some(base) = self.work.prefetch.take() else { return false };
        let table = self.table.read();
        self.prefetch_folio(&table, base, self.cpu());
        true
    }

    /// Ends the background threads.
    pub fn stop(&self) {
        self.work.stopping.store(true, Relaxed);
        self.wake_all();
    }

    /// Wakes the threads that sleep until there is work.
    pub fn wake_all(&self) {
        self.wake_reclaimer();
        self.work.prefetch.bell.fetch_add(1, Relaxed);
        futex::wake(&self.work.prefetch.bell, u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::Prefetch;
    use crate::folio::Geometry;
    use zfolio_core::page::UnitOrder;

    /// Goal: each of two threads that take turns keeps its run. Method: both rise by units of 4 KiB.
    #[test]
    fn runs_of_two_threads_are_told_apart() {
        let prefetch = Prefetch::new(Geometry::new(UnitOrder::from_bytes(4096).unwrap()));
        let (one, other) = (1, 2);
        assert!(!std::ptr::eq(prefetch.run_of(one), prefetch.run_of(other)));
        for step in 0..4_usize {
            for (thread, start) in [(one, 1 << 30), (other, 5 << 30)] {
                let at = start + step * 4096;
                let continued = prefetch.continues(thread, at + 100);
                assert_eq!(continued, step > 0);
                let lasts = prefetch.note(thread, continued, at + 4096);
                assert_eq!(lasts, step >= 2);
            }
        }
        assert!(prefetch.continues(one, (1 << 30) + (1 << 20)), "in the window");
        assert!(!prefetch.continues(one, 1 << 30), "behind");
    }
}
