//! Events: mappings that change behind the engine's back.
//!
//! Changes that come through the C library are made by the engine itself (`change`), exactly. A
//! program that makes the system call on its own is seen here: the kernel tells of it, before
//! (`REMOVE`) or after (`UNMAP`, `REMAP`) it happened, and goes on as soon as the event is *read*. So
//! what is exact here is the outcome for the thread that made the call; another thread that maps
//! the same addresses anew at the same moment is a race that the events leave open.
//!
//! # Invariants
//!
//! - `EVT-1` The thread that reads never waits for the table: who holds it may be in a system call
//!   that does not return until its own event is read. What cannot be served now is kept, in order.
//! - `EVT-2` Events of the engine's own calls are announced before the call, and skipped.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::add;
use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::uffd::{Message, Messages, Uffd};
use zfolio_sys::{clock, cpu};

use crate::engine::Engine;
use crate::rank;
use crate::shape::Units;
use crate::staging::Full;
use crate::table::Table;

/// Messages that can wait: each waiting thread has at most one.
pub(crate) const WAITING_MAX: usize = 4096;

/// The ranges that the engine itself is changing: start and end, twice.
#[derive(Debug, Default)]
pub(crate) struct Announced([AtomicUsize; 4]);

impl Announced {
    /// Announces a change of `range`, and of `other` for a move.
    pub(crate) fn set(&self, range: (usize, usize), other: (usize, usize)) {
        // Release: pairs with the Acquire in covers(); the system call that follows is ordered too.
        for (cell, value) in self.0.iter().zip([range.0, range.1, other.0, other.1]) {
            cell.store(value, Ordering::Release);
        }
    }

    /// The change is done, and its events are read: the call has returned.
    pub(crate) fn clear(&self) {
        self.set((0, 0), (0, 0));
    }

    /// Whether an event on `start..end` is of an announced change.
    fn covers(&self, start: usize, end: usize) -> bool {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index: usize| self.0[index].load(Ordering::Acquire));
        (start < b && end > a) || (start < d && end > c)
    }
}

/// What was read from the userfaultfd and is still to be done, in the order in which it was told.
///
/// A change of mappings keeps moves from working (`EAGAIN`) until its event is read. So whoever meets
/// that reads, and leaves what he read here for the handler.
#[derive(Debug)]
pub(crate) struct Inbox(Mutex<{ rank::INBOX }, VecDeque<(Message, u64)>>);

/// The inbox held.
pub(crate) type Held<'a> = Guard<'a, { rank::INBOX }, VecDeque<(Message, u64)>>;

impl Default for Inbox {
    fn default() -> Self {
        Inbox(Mutex::new(VecDeque::with_capacity(WAITING_MAX)))
    }
}

impl Inbox {
    /// Reads what there is, without waiting, and skips what the engine itself does (`EVT-2`).
    pub(crate) fn pull(&self, from: &Uffd, announced: &Announced) {
        let mut messages = Messages::default();
        // Under the lock, so that messages are kept in the order in which the kernel told them.
        let mut inbox = self.0.lock();
        // EBADF and the like cannot be: the userfaultfd lives as long as the engine (UFFD-1).
        let Ok(messages) = from.read(&mut messages) else { return };
        let now = clock::monotonic_ns();
        for message in messages {
            let ours = match *message {
                Message::Fault { .. } => false,
                Message::Remove { start, end } | Message::Unmap { start, end } => {
                    announced.covers(start, end)
                }
                Message::Remap { from, bytes, .. } => announced.covers(from, from + bytes),
                Message::Other => true,
            };
            if !ours {
                inbox.push_back((*message, now));
            }
        }
    }

    /// Holds it still, for `fork`: the handler looks here without the table.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.0.lock()
    }

    /// The next thing to do, and when it was told.
    pub(crate) fn first(&self) -> Option<(Message, u64)> {
        self.0.lock().front().copied()
    }

    /// The first is done.
    pub(crate) fn done(&self) {
        self.0.lock().pop_front();
    }
}

impl Engine {
    /// Honours an event of somebody else's change. False: the table is held, try again.
    pub(crate) fn honour(&self, message: Message) -> bool {
        let Some(mut table) = self.table.try_write() else { return false };
        match message {
            Message::Remove { start, end } => {
                self.forget(&table, start, end, false);
                add(&self.figures().removes, 1);
            }
            Message::Unmap { start, end } => {
                self.forget(&table, start, end, true);
                let (first, last) = table.exterior(start, end);
                table.remove(first, last);
                table.prune(first, last);
                add(&self.figures().unmaps, 1);
            }
            Message::Remap { from, to, bytes } => {
                self.follow(&table, from, to, bytes);
                let (first, last) = table.exterior(from, from + bytes);
                table.remove(first, last);
                table.prune(first, last);
                drop(table);
                // Registered already, by the kernel. If not, it stays the kernel's.
                self.adopt(to, to + bytes).ok();
                add(&self.figures().remaps, 1);
                return true;
            }
            Message::Fault { .. } | Message::Other => {}
        }
        self.measure_tables(&mut table);
        true
    }

    /// Drops what is kept of `start..end`. What a folio at an edge keeps beyond it comes back.
    fn forget(&self, table: &Table, start: usize, end: usize, unmapped: bool) {
        let folio_bytes = self.shape.folio_bytes();
        for (base, lock) in table.known_folios(start, end) {
            let mut folio = lock.lock();
            if !folio.managed {
                continue;
            }
            if base >= start && base + folio_bytes <= end {
                self.drop_folio(&mut folio, !unmapped);
                continue;
            }
            // The kernel may drop its pages before or after ours are placed: so the dropped part is
            // zeros in what we place.
            let dropped = start.max(base) - base..end.min(base + folio_bytes) - base;
            self.bring_back_without(&mut folio, base, dropped);
            if unmapped {
                self.retire(&mut folio);
            }
        }
    }

    /// After a move: puts what is kept of the old range into the new one.
    fn follow(&self, table: &Table, from: usize, to: usize, bytes: usize) {
        for (base, lock) in table.known_folios(from, from + bytes) {
            let mut folio = lock.lock();
            // What the move took of the folio went along; what it left behind stays where it was.
            let taken =
                from.max(base) - base..(from + bytes).min(base + self.shape.folio_bytes()) - base;
            let target = |at: usize| {
                if taken.contains(&at) { to + (base + at) - from } else { base + at }
            };
            if let Some(slot) = folio.staged.take() {
                self.place_apart(&slot, slot.units(), &taken, target);
                self.give_slot(slot);
            }
            let stored = folio.stored;
            if !stored.is_empty() {
                let mut scratch = self.take_scratch(base);
                self.load_copies(&mut folio, base, stored, &mut scratch, cpu::current());
                self.place_apart(&scratch, stored, &taken, target);
                self.give_scratch(scratch);
            }
            self.drop_folio(&mut folio, false);
        }
        debug_assert!(bytes % PAGE_BYTES == 0);
    }

    /// Places units of a slot, cut at the ends of `taken`, each part at its `target`.
    fn place_apart(
        &self,
        slot: &Full,
        units: Units,
        taken: &Range<usize>,
        target: impl Fn(usize) -> usize,
    ) {
        for run in units.runs() {
            let bytes = self.shape.bytes(run);
            let cut = |at: usize| at.clamp(bytes.start, bytes.end);
            let cuts = [bytes.start, cut(taken.start), cut(taken.end), bytes.end];
            for part in cuts.windows(2).filter(|part| part[0] < part[1]) {
                self.seam.place_bytes(&self.staging, slot, part[0]..part[1], target(part[0]));
            }
        }
    }
}
