//! Runs of rising faults, and the memory that is brought back ahead of them.
//!
//! A fault that continues where the same thread's last fault ended continues a **run**. In a run a
//! fault brings back the rest of its folio instead of one unit. Ahead of a run that lasts, the
//! prefetching thread brings back the folios that come next.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_sys::{futex, thread};

use crate::engine::Engine;
use crate::folio::Geometry;

/// A run is prefetched for after this many faults that continue it.
const RUN_MIN: u32 = 2;

/// How far ahead of a run memory is brought back; two folios if these are more.
const AHEAD_BYTES: usize = 1 << 20;

/// How many runs are kept, by a hash of the thread. If two threads share an entry, their runs only
/// end early.
const RUNS: usize = 16;

/// One thread's present run.
#[derive(Debug, Default)]
struct Run {
    /// The address that would continue the run.
    expected: AtomicUsize,
    /// The end of the window that was last prefetched for the run.
    ahead: AtomicUsize,
    /// Faults that continued the run.
    length: AtomicU32,
}

/// All runs, and the window of the prefetching thread, which works for one run at a time.
#[derive(Debug)]
pub(crate) struct Prefetch {
    geometry: Geometry,
    runs: [Run; RUNS],
    /// The window: the next folio to bring back, and where to stop.
    next: AtomicUsize,
    end: AtomicUsize,
    /// The futex that the prefetching thread sleeps on; changed to wake the thread.
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
        // Fibonacci hashing: thread numbers and addresses of thread descriptors often share a
        // factor, so their low bits alone would collide.
        let mixed = (thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        &self.runs[mixed as usize % RUNS]
    }

    /// Whether a fault at `address` continues the thread's run: it is where the last fault ended,
    /// or in the window prefetched since.
    pub(crate) fn continues(&self, thread: usize, address: usize) -> bool {
        let run = self.run_of(thread);
        let unit = address & !(self.geometry.unit_bytes() - 1);
        let expected = run.expected.load(Relaxed);
        unit == expected || (unit > expected && unit <= run.ahead.load(Relaxed))
    }

    /// Notes that a fault brought memory in up to `end`. True if its run should be prefetched for.
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

    /// Takes the next folio of the window, if there is one.
    fn take(&self) -> Option<usize> {
        let next = self.next.load(Relaxed);
        let after = next + self.geometry.folio_bytes();
        let claimed = next < self.end.load(Relaxed)
            && self.next.compare_exchange(next, after, Relaxed, Relaxed).is_ok();
        claimed.then_some(next)
    }
}

impl Engine {
    /// After a fault that brought memory in up to `end`: moves the window ahead of its run and
    /// wakes the prefetching thread, if the run has lasted long enough.
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

    /// The life of the prefetching thread, until the engine stops.
    pub fn prefetch_in_background(&self) {
        while !self.work.stopping.load(Relaxed) {
            let bell = self.work.prefetch.bell.load(Relaxed);
            thread::follow();
            while self.prefetch_turn() {}
            futex::wait(&self.work.prefetch.bell, bell, None);
        }
    }

    /// Brings back the next folio of the window. False: the window is empty.
    pub(crate) fn prefetch_turn(&self) -> bool {
        let Some(base) = self.work.prefetch.take() else { return false };
        let table = self.table.read();
        self.prefetch_folio(&table, base, self.cpu());
        true
    }

    /// Makes the engine's threads end.
    pub fn stop(&self) {
        self.work.stopping.store(true, Relaxed);
        self.wake_all();
    }

    /// Wakes the reclaiming and the prefetching thread.
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

    /// Goal: two threads that fault in turn each keep a run. Method: both rise by units of 4 KiB.
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
