//! Handler mode: a thread of the engine reads the userfaultfd and serves.
//!
//! The handler runs where the faulting thread runs: it asks where that is now and then, and pins itself
//! there. On another CPU that is idle, each of the two wake-ups is an interrupt to a halted core, and
//! a fault takes five times as long.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::stats::add;
use zfolio_core::sync::ReadGuard;
use zfolio_sys::uffd::Message;
use zfolio_sys::{clock, cpu, thread};

use crate::engine::Engine;
use crate::fault::Served;
use crate::rank;
use crate::table::Table;

/// Faults of one thread between two looks at where it runs: 8 us each, so 0.1 us a fault.
const FOLLOW_INTERVAL: u32 = 64;

/// Milliseconds that a handler sleeps at most. Another thread may have read for it (`Inbox`), rarely.
const WAIT_MS: u16 = 20;

/// What a handler remembers of the thread that it serves.
#[derive(Debug, Default)]
struct Follow {
    thread: u32,
    faults: u32,
    cpu: Option<usize>,
}

impl Follow {
    /// Goes where `thread` is.
    fn go(&mut self, thread: u32) {
        self.faults = self.faults.wrapping_add(1);
        if thread == self.thread && self.faults % FOLLOW_INTERVAL != 0 {
            return;
        }
        self.thread = thread;
        let there = cpu::of_thread(thread);
        if let Some(there) = there.filter(|_| there != self.cpu) {
            cpu::pin(there);
            self.cpu = Some(there);
        }
    }
}

impl Engine {
    /// A handler's life: serves until the engine stops.
    pub fn handle_faults(&self) {
        let mut follow = Follow::default();
        let seam = &self.seam;
        while !self.stopping.load(Relaxed) {
            thread::follow();
            if seam.inbox.first().is_none() && seam.wait(WAIT_MS) {
                seam.answer_strangers();
            }
            seam.inbox.pull(&seam.program, &seam.announced);
            while let Some(told) = seam.inbox.first() {
                let done = if let Message::Fault { address, thread } = told.message {
                    let served = if told.outdated {
                        seam.wake(self.shape.base(address));
                        true
                    } else {
                        self.try_serve(address, thread, told.at)
                    };
                    follow.go(thread);
                    if served {
                        seam.inbox.done();
                    }
                    served
                } else {
                    self.try_honour()
                };
                if !done {
                    // The table is held, perhaps by a call that waits for its event: read on (EVT-1).
                    std::thread::yield_now();
                    break;
                }
            }
        }
    }

    /// Serves one fault unless the table is held.
    fn try_serve(&self, address: usize, thread: u32, began: u64) -> bool {
        let Some(table) = self.table.try_read() else { return false };
        self.serve(table, address, thread as usize, began);
        true
    }

    /// Serves one fault of `thread`, and counts it.
    pub(crate) fn serve(
        &self,
        table: ReadGuard<'_, { rank::TABLE }, Table>,
        address: usize,
        thread: usize,
        began: u64,
    ) {
        let run = self.prefetch.continues(thread, address);
        let (served, end) = self.fault(&table, address, run, cpu::current());
        drop(table);
        self.prefetch_after(thread, run, end);
        let took = clock::monotonic_ns().saturating_sub(began);
        let (figures, stats) = (self.figures(), self.stats());
        add(&figures.stall_ns, took);
        match served {
            Served::Zero => {
                add(&figures.faults_zero, 1);
                stats.fault_zero_ns.add(took);
            }
            Served::Staged => {
                add(&figures.faults_staged, 1);
                stats.fault_staged_ns.add(took);
            }
            Served::Stored { distance_bytes } => {
                add(&figures.faults_stored, 1);
                stats.count_refault(distance_bytes, took);
                self.copies.note_wait(took);
            }
            Served::Raced => add(&figures.faults_raced, 1),
        }
    }
}
