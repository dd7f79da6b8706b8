//! Events: mappings that change behind the engine's back.
//!
//! Changes that come through the C library are made by the engine itself (`change`), exactly. A
//! program that makes the system call on its own is seen here: the kernel tells of it, before
//! (`REMOVE`) or after (`UNMAP`, `REMAP`) it happened, and goes on as soon as the event is *read*. So
//! the outcome is exact for the thread that made the call, from the second such change on: before the
//! first nobody looks for them (`Inbox::steady`). Open is what another thread maps at the same
//! addresses before the event is read.
//!
//! # Invariants
//!
//! - `EVT-1` The thread that reads never waits for the table: who holds it may be in a system call
//!   that does not return until its own event is read. What cannot be served now is kept, in order.
//! - `EVT-2` Events of the engine's own calls are announced before the call, and skipped.
//! - `EVT-3` What was read is applied before new memory is taken under management. Until then nothing
//!   of its range is taken out, and what is brought in goes where it belongs by now: nowhere, if it was
//!   dropped.
//! - `EVT-4` A fault is served only if its page was not changed since its message was read. Else its thread, if it
//!   still waits, is woken, and asks again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::add;
use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::uffd::{Message, Messages};

use crate::engine::Engine;
use crate::folio::{Folio, Table, Units};
use crate::mover::Full;
use crate::rank;
use crate::system::{Side, System};

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

/// A message, and what came after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) message: Message,
    /// When it was read, by [`System::now_ns`].
    pub(crate) at: u64,
    /// A fault whose page was changed since: its thread may long have gone on, and what lies there now
    /// is not what it asked for (`EVT-4`).
    pub(crate) outdated: bool,
}

/// What was read from the userfaultfd and is still to be done, in the order in which the kernel sent it.
///
/// A change of mappings keeps moves from working (`EAGAIN`) until its event is read. So whoever meets
/// that reads, and leaves what he read here for the handler.
#[derive(Debug)]
pub(crate) struct Inbox {
    messages: Mutex<{ rank::INBOX }, VecDeque<Event>>,
    /// Whether there ever was a change of somebody else's. Most programs make none, and pay nothing.
    changing: AtomicBool,
}

/// The inbox held.
pub(crate) type Held<'a> = Guard<'a, { rank::INBOX }, VecDeque<Event>>;

impl Default for Inbox {
    fn default() -> Self {
        let messages = Mutex::new(VecDeque::with_capacity(WAITING_MAX));
        Inbox { messages, changing: AtomicBool::new(false) }
    }
}

/// No event is read while this is held, so whoever changes mappings meanwhile has not gone on: what
/// is moved or copied under it comes before the change, or is refused with `EAGAIN` (`EVT-3`).
#[derive(Debug)]
pub(crate) struct Steady<'a>(Option<Held<'a>>);

impl Steady<'_> {
    /// Whether a change of any of `start..end` waits to be applied.
    pub(crate) fn has_change(&self, start: usize, end: usize) -> bool {
        self.0.iter().flat_map(|held| held.iter()).any(|event| changes(event.message, start, end))
    }

    /// Where memory that belongs to `at` is to be placed, after the changes that wait.
    pub(crate) fn place_now(&self, at: usize, bytes: usize) -> Place {
        let (mut place, mut moved) = (at, false);
        for Event { message, .. } in self.0.iter().flat_map(|held| held.iter()) {
            if !changes(*message, place, place + bytes) {
                continue;
            }
            if bytes > PAGE_BYTES {
                return Place::Apart;
            }
            match *message {
                Message::Remap { from, to, bytes } if (from..from + bytes).contains(&place) => {
                    (place, moved) = (place - from + to, true);
                }
                _ => return Place::Nowhere,
            }
        }
        if moved { Place::There(place) } else { Place::Here }
    }
}

impl Inbox {
    /// Reads what there is, without waiting, and skips what the engine itself does (`EVT-2`).
    pub(crate) fn pull(&self, from: &dyn System, announced: &Announced) {
        let mut messages = Messages::default();
        // Under the lock, so that messages are kept in the order in which the kernel sent them.
        let mut inbox = self.messages.lock();
        let messages = from.read(Side::Program, &mut messages);
        let at = from.now_ns();
        for &message in messages {
            let ours = match message {
                Message::Fault { .. } => false,
                Message::Remove { start, end } | Message::Unmap { start, end } => {
                    announced.covers(start, end)
                }
                Message::Remap { from, bytes, .. } => announced.covers(from, from + bytes),
                Message::Other => true,
            };
            if !ours {
                if is_change(message) {
                    self.changing.store(true, Ordering::Relaxed);
                    inbox.iter_mut().for_each(|event| event.outdated |= event.is_fault_of(message));
                }
                inbox.push_back(Event { message, at, outdated: false });
            }
        }
    }

    /// Holds it still, for `fork`: the handler looks here without the table.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.messages.lock()
    }

    /// The next thing to do: a change before any fault, whose thread waits while that of the change goes
    /// on.
    pub(crate) fn first(&self) -> Option<Event> {
        let inbox = self.messages.lock();
        inbox.iter().find(|event| is_change(event.message)).or(inbox.front()).copied()
    }

    /// The first, a fault, is served. It is the foremost still: others come behind it.
    pub(crate) fn done(&self) {
        self.messages.lock().pop_front();
    }

    /// Holds it for one move or copy, where there are changes at all.
    pub(crate) fn steady(&self) -> Steady<'_> {
        Steady(self.changing.load(Ordering::Relaxed).then(|| self.messages.lock()))
    }

    /// Takes the first change, for whoever holds the table alone. Faults stay, for the handler.
    fn take_change(&self) -> Option<Message> {
        let mut inbox = self.messages.lock();
        let first = inbox.iter().position(|event| is_change(event.message))?;
        inbox.remove(first).map(|event| event.message)
    }
}

impl Event {
    /// Whether this is a fault on a page that `change` changes.
    fn is_fault_of(&self, change: Message) -> bool {
        matches!(self.message, Message::Fault { address, .. } if changes(change, address, address + 1))
    }
}

/// Where memory goes that is brought in while changes wait.
pub(crate) enum Place {
    /// Where it was to go.
    Here,
    /// Its mapping was moved there.
    There(usize),
    /// To several places: each page is to be asked for.
    Apart,
    /// It was dropped.
    Nowhere,
}

/// Whether a message is of a change of any of `start..end`.
fn changes(message: Message, start: usize, end: usize) -> bool {
    let overlap = |from: usize, to: usize| from < end && to > start;
    match message {
        Message::Remove { start, end } | Message::Unmap { start, end } => overlap(start, end),
        Message::Remap { from, to, bytes } => {
            overlap(from, from + bytes) || overlap(to, to + bytes)
        }
        Message::Fault { .. } | Message::Other => false,
    }
}

/// Whether a message is of a change of mappings, and not of a fault.
pub(crate) fn is_change(message: Message) -> bool {
    !matches!(message, Message::Fault { .. })
}

impl Engine {
    /// Applies what waits of other people's changes. False: the table is held, try again.
    pub(crate) fn try_apply(&self) -> bool {
        let Some(mut table) = self.table.try_write() else { return false };
        self.apply_changes(&mut table);
        self.measure_tables(&mut table);
        true
    }

    /// Applies what waits of other people's changes.
    pub(crate) fn apply_changes(&self, table: &mut Table) {
        while let Some(change) = self.mover.inbox.take_change() {
            match change {
                Message::Remove { start, end } => {
                    self.forget(table, start, end, false);
                    add(&self.figures().removes, 1);
                }
                Message::Unmap { start, end } => {
                    self.forget(table, start, end, true);
                    let (first, last) = table.exterior(start, end);
                    table.uncover(start, end);
                    table.remove(first, last);
                    table.prune(first, last);
                    add(&self.figures().unmaps, 1);
                }
                Message::Remap { from, to, bytes } => {
                    self.follow(table, from, to, bytes);
                    let (first, last) = table.exterior(from, from + bytes);
                    table.uncover(from, from + bytes);
                    table.remove(first, last);
                    table.prune(first, last);
                    // Registered already, by the kernel. If not, it stays the kernel's.
                    self.take_in(table, to, to + bytes).ok();
                    add(&self.figures().remaps, 1);
                }
                Message::Fault { .. } | Message::Other => {}
            }
        }
    }

    /// Drops what is kept of `start..end`. What a folio at an edge keeps beyond it comes back.
    fn forget(&self, table: &Table, start: usize, end: usize, unmapped: bool) {
        let folio_bytes = self.geometry().folio_bytes();
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
            if !unmapped {
                // A capture before the kernel drops them would keep what must read as zeros, and whether
                // they are dropped at all (or are to stay if written to, as MADV_FREE has it) is not known.
                // So these units are empty to us: what is there is the program's, what is missing is zeros.
                self.empty(&mut folio, self.geometry().touched(dropped.clone()));
            }
            self.bring_back_without(&mut folio, base, dropped);
            if unmapped {
                self.retire(&mut folio);
            }
        }
    }

    /// Forgets that units are resident; the next fault in one finds out.
    pub(crate) fn empty(&self, folio: &mut Folio, units: Units) {
        let units = folio.resident & units;
        self.count_out(units);
        folio.resident -= units;
        self.drop_copies(folio, units);
    }

    /// After a move: puts what is kept of the old range into the new one.
    fn follow(&self, table: &Table, from: usize, to: usize, bytes: usize) {
        for (base, lock) in table.known_folios(from, from + bytes) {
            let mut folio = lock.lock();
            // What the move took of the folio went along; what it left behind stays where it was.
            let taken = from.max(base) - base
                ..(from + bytes).min(base + self.geometry().folio_bytes()) - base;
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
                self.load_copies(&mut folio, base, stored, &mut scratch, self.cpu());
                self.place_apart(&scratch, stored, &taken, target);
                self.mover.give_scratch(scratch);
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
            let bytes = self.geometry().bytes(run);
            let cut = |at: usize| at.clamp(bytes.start, bytes.end);
            let cuts = [bytes.start, cut(taken.start), cut(taken.end), bytes.end];
            for part in cuts.windows(2).filter(|part| part[0] < part[1]) {
                self.mover.place_bytes(slot, part[0]..part[1], target(part[0]));
            }
        }
    }
}

#[cfg(test)]
mod tests;
