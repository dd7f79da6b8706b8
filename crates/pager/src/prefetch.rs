//! The prefetching thread: brings back what the streams of faults will want next.
//!
//! A fault that continues a stream ([`streams`]) brings in more than its own unit: what the stream
//! wants in the same folio. What it wants beyond is brought in by this thread, folio by folio, or up to
//! four adjacent whole ones by one move, in the direction of the walk.

mod streams;

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::stats::add;
use zfolio_core::sync::Mutex;
use zfolio_sys::thread;

use crate::bell::Bell;
use crate::engine::Engine;
use crate::fault::Served;
use crate::folio::{Geometry, Table, Units};
use crate::rank;
use crate::spill::{Place, Tickets};
use streams::Streams;

pub(crate) use streams::Plan;

/// The streams, and the bell of the thread.
#[derive(Debug)]
pub(crate) struct Prefetch {
    streams: Mutex<{ rank::STREAMS }, Streams>,
    bell: Bell,
}

/// Pieces that are fetched from the backing at the same time.
const ABREAST: usize = 8;

/// Units of a folio that a stream wants, and how many whole folios above it.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    base: usize,
    units: Units,
    above: usize,
}

impl Wanted {
    /// Whether all units of `other` are among these.
    fn has(&self, other: &Wanted) -> bool {
        self.base == other.base && other.units & self.units == other.units
    }
}

impl Prefetch {
    pub(crate) fn new(geometry: Geometry, limit_bytes: u64) -> Prefetch {
        Prefetch { streams: Mutex::new(Streams::new(geometry, limit_bytes)), bell: Bell::default() }
    }
}

impl Engine {
    /// What a fault at `address` should bring in.
    pub(crate) fn plan(&self, address: usize) -> Plan {
        let plan = self.work.prefetch.streams.lock().fault(address);
        if plan.vain > 0 {
            add(&self.figures().prefetch_unused, plan.vain as u64);
        }
        plan
    }

    /// Wakes the prefetching thread, if a plan gives it something to do.
    pub(crate) fn prefetch_ahead(&self, plan: &Plan) {
        if plan.has_ahead {
            self.work.prefetch.bell.wake_sleeper();
        }
    }

    /// Units that were brought back ahead of a walk and used since the start, and the bytes of those that are
    /// not used yet; both by estimate.
    pub(crate) fn prefetched(&self) -> (u64, u64) {
        let (used, ahead) = self.work.prefetch.streams.lock().used_and_ahead();
        (used, (ahead * self.geometry().unit_bytes()) as u64)
    }

    /// After a fault that has brought in `units`: wakes the prefetching thread, if it has something
    /// to do.
    pub(crate) fn prefetch_after(&self, plan: &Plan, served: Served, units: &Range<usize>) {
        let prefetch = &self.work.prefetch;
        match served {
            Served::Zero => return prefetch.streams.lock().brought_zeros(plan, units),
            // What the backing has just delivered may merely have come after the walk: that does not show that memory
            // is short.
            Served::Stored { was_fetched: false, .. } if plan.is_expected => {
                prefetch.streams.lock().was_gone(plan);
            }
            _ => {}
        }
        self.prefetch_ahead(plan);
    }

    /// The life of the prefetching thread, until the engine stops.
    pub fn prefetch_in_background(&self) {
        let prefetch = &self.work.prefetch;
        while !self.work.stopping.load(Relaxed) {
            let heard = prefetch.bell.heard();
            // After that look at the bell: who changes the process's identity rings it.
            thread::follow();
            if self.prefetch_turn() {
                continue;
            }
            prefetch.bell.will_sleep();
            // No work is missed: plans are made under the lock under which this looks for them.
            if !self.prefetch_turn() && !self.work.stopping.load(Relaxed) {
                prefetch.bell.sleep(heard, None);
            }
        }
    }

    /// Brings in what streams want, piece by piece, until they want nothing. Up to [`ABREAST`] pieces that are on the
    /// backing are on their way while the oldest of them is brought in. False: no stream wanted anything.
    pub(crate) fn prefetch_turn(&self) -> bool {
        let mut coming = [const { None }; ABREAST];
        let (mut oldest, mut count, mut did) = (0, 0, false);
        loop {
            while count < ABREAST && !self.work.stopping.load(Relaxed) {
                thread::follow();
                let table = self.table.read();
                let Some(piece) = self.next_piece() else { break };
                did = true;
                let Some(away) = self.bring_piece(&table, &piece) else { continue };
                // After a fault on a unit that is on its way its stream has the whole window taken again.
                if !coming.iter().flatten().any(|(other, _): &(Wanted, Tickets)| other.has(&piece))
                {
                    coming[(oldest + count) % ABREAST] = Some((piece, away));
                    count += 1;
                }
            }
            let Some((piece, away)) = coming[oldest].take() else { return did };
            (oldest, count) = ((oldest + 1) % ABREAST, count - 1);
            if self.await_some(&away) {
                // What is away again, or still, is brought when it is touched.
                self.bring_piece(&self.table.read(), &piece);
            }
        }
    }

    fn bring_piece(&self, table: &Table, piece: &Wanted) -> Option<Tickets> {
        self.prefetch_units(table, piece.base, piece.units, piece.above, self.cpu())
    }

    /// The next piece that a stream wants.
    fn next_piece(&self) -> Option<Wanted> {
        let piece = self.work.prefetch.streams.lock().take()?;
        let first = piece.units.start * self.geometry().unit_bytes();
        let index = self.geometry().index(first);
        let units = Units::from(index..index + piece.units.len());
        Some(Wanted { base: self.geometry().base(first), units, above: piece.folios_above })
    }

    /// Makes the engine's threads end.
    pub fn stop(&self) {
        self.work.stopping.store(true, Relaxed);
        self.wake_all();
        self.disks().iter().for_each(|disk| disk.stop());
        self.work.crew.stop();
    }

    /// Wakes the reclaiming and the prefetching thread, the assistants, the threads of the disks, and the workers.
    pub fn wake_all(&self) {
        self.wake_reclaimer();
        self.work.prefetch.bell.ring();
        self.work.assistants.ring();
        self.work.place.iter().for_each(Place::wake);
        self.work.crew.wake_all();
    }
}
