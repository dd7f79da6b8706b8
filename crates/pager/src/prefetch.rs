//! The prefetching thread: brings back what the streams of faults will want next.
//!
//! A fault that continues a stream ([`streams`]) brings in more than its own unit: what the stream
//! wants in the same folio. What it wants beyond is brought in by this thread, folio by folio, in
//! the direction of the walk.

mod streams;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use zfolio_core::stats::add;
use zfolio_core::sync::Mutex;
use zfolio_sys::{futex, thread};

use crate::engine::Engine;
use crate::fault::Served;
use crate::folio::{Geometry, Units};
use crate::rank;
use streams::Streams;

pub(crate) use streams::Plan;

/// The streams, and the sleep of the thread.
#[derive(Debug)]
pub(crate) struct Prefetch {
    streams: Mutex<{ rank::STREAMS }, Streams>,
    /// The futex that the thread sleeps on; changed to wake the thread.
    bell: AtomicU32,
    /// The thread sleeps, or is about to.
    idle: AtomicBool,
}

impl Prefetch {
    pub(crate) fn new(geometry: Geometry, limit_bytes: u64) -> Prefetch {
        Prefetch {
            streams: Mutex::new(Streams::new(geometry, limit_bytes)),
            bell: AtomicU32::new(0),
            idle: AtomicBool::new(false),
        }
    }

    fn wake(&self) {
        self.bell.fetch_add(1, Relaxed);
        futex::wake(&self.bell, u32::MAX);
    }
}

impl Engine {
    /// What a fault at `address` should bring in.
    pub(crate) fn plan(&self, address: usize) -> Plan {
        let plan = self.work.prefetch.streams.lock().fault(address / self.geometry().unit_bytes());
        if plan.vain > 0 {
            add(&self.figures().prefetch_unused, plan.vain as u64);
        }
        plan
    }

    /// After a fault that has brought in `units`: wakes the prefetching thread, if it has something
    /// to do.
    pub(crate) fn prefetch_after(&self, plan: &Plan, served: Served, units: &Range<usize>) {
        let prefetch = &self.work.prefetch;
        match served {
            Served::Zero => return prefetch.streams.lock().brought_zeros(plan, units),
            Served::Stored { .. } if plan.is_expected => prefetch.streams.lock().was_gone(plan),
            _ => {}
        }
        // The thread says that it is idle, then looks for work under the lock of the streams. Either
        // it finds the work of this plan, or that look was before this plan was made, and this
        // thread sees it idle.
        if plan.has_ahead && prefetch.idle.swap(false, Relaxed) {
            prefetch.wake();
        }
    }

    /// The life of the prefetching thread, until the engine stops.
    pub fn prefetch_in_background(&self) {
        let prefetch = &self.work.prefetch;
        while !self.work.stopping.load(Relaxed) {
            let bell = prefetch.bell.load(Relaxed);
            // After the look at the bell: who changes the process's identity rings it.
            thread::follow();
            if self.prefetch_turn() {
                continue;
            }
            prefetch.idle.store(true, Relaxed);
            if !self.prefetch_turn() && !self.work.stopping.load(Relaxed) {
                futex::wait(&prefetch.bell, bell, None);
            }
            prefetch.idle.store(false, Relaxed);
        }
    }

    /// Brings in the next piece that a stream wants. False: no stream wants anything.
    pub(crate) fn prefetch_turn(&self) -> bool {
        let table = self.table.read();
        let Some(piece) = self.work.prefetch.streams.lock().take() else { return false };
        let first = piece.units.start * self.geometry().unit_bytes();
        let base = self.geometry().base(first);
        let index = self.geometry().index(first);
        let units = Units::from(index..index + piece.units.len());
        self.prefetch_units(&table, base, units, piece.folios_above, self.cpu());
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
        self.work.prefetch.wake();
    }
}
