//! Events: mappings that change without the engine.
//!
//! Changes that come through the C library are made by the engine itself (`change`), exactly. A
//! program can also make the system call on its own. Then the kernel sends an event, before
//! (`REMOVE`) or after (`UNMAP`, `REMAP`) the change, and lets the call return as soon as the event
//! is *read*. No event is read while a move or copy is under way (`Inbox::steady`), so the outcome is
//! exact for the thread that made the call. One case is open: another thread maps memory at the
//! same addresses before the event is read.
//!
//! # Invariants
//!
//! - `EVT-1` The thread that reads messages never waits for the table: the owner of the table may
//!   be in a system call that returns only after its own event was read. A message that cannot be
//!   served now is kept, in order.
//! - `EVT-2` Before a system call of its own the engine announces the call's events; they are
//!   skipped.
//! - `EVT-3` Changes that were read are applied before new memory is taken under management, and
//!   before the engine makes a change of its own. Until a change is applied, nothing is captured in
//!   its range, and memory that is brought in goes to where the change moved it, or nowhere if the
//!   change dropped it.
//! - `EVT-4` A fault is served by what the table and the inbox say of its address when it is served,
//!   and changes that were read are applied before. So a fault whose page was changed after its
//!   message was read, or whose thread has gone on since, does no harm: it is served like a touch of
//!   that address by any other thread. Whatever is placed, a thread that waits there is woken.
//! - `EVT-5` What was captured counts only if no change that was made before it is still to be read
//!   ([`crate::mover::Doubt`]). What is in doubt is settled when the change is applied.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::add;
use zfolio_core::sync::{Guard, Mutex, ReadGuard, RwLock, WriteGuard};
use zfolio_sys::uffd::{Message, Messages};

use crate::engine::Engine;
use crate::fault::Turn;
use crate::folio::{Folio, Table, Units};
use crate::mover::{Doubt, Full};
use crate::rank;
use crate::spill::{Away, Later, Tries};
use crate::system::{Side, System};

/// Room in the inbox: each waiting thread has at most one message there.
pub(crate) const WAITING_MAX: usize = 4096;

/// How often a reader of messages tries to get the inbox before it sleeps: for 30 to 100 us. A move of the
/// reclaiming thread, which holds it, takes 15 to 30 us; to sleep and be woken takes longer, and nobody else
/// needs the CPU, because the program's thread waits for the message.
const TRIES: u32 = 2000;

/// The one or two ranges that the engine itself is changing: start, end, start, end.
#[derive(Debug, Default)]
pub(crate) struct Announced([AtomicUsize; 4]);

impl Announced {
    /// Announces a change of `range`; `other` is the target of a move.
    pub(crate) fn set(&self, range: (usize, usize), other: (usize, usize)) {
        // Release: pairs with the Acquire in covers(); the system call that follows is ordered too.
        for (cell, value) in self.0.iter().zip([range.0, range.1, other.0, other.1]) {
            cell.store(value, Ordering::Release);
        }
    }

    /// Ends the announcement, after the call has returned: its events have been read by then.
    pub(crate) fn clear(&self) {
        self.set((0, 0), (0, 0));
    }

    /// Whether an event on `start..end` comes from an announced change. An event of the engine's own call
    /// lies within the pages of the announced range; one that reaches beyond them is of another
    /// thread's call.
    fn covers(&self, start: usize, end: usize) -> bool {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index: usize| self.0[index].load(Ordering::Acquire));
        let within = |from: usize, to: usize| {
            from < to && start >= from & !(PAGE_BYTES - 1) && end <= to.next_multiple_of(PAGE_BYTES)
        };
        within(a, b) || within(c, d)
    }
}

/// A message in the inbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) message: Message,
    /// When the message was read, by [`System::now_ns`].
    pub(crate) at: u64,
}

/// A fault that waits for the store's backing.
#[derive(Debug, Clone)]
pub(crate) struct Aside {
    pub(crate) event: Event,
    pub(crate) later: Later,
    /// Since when it waits, by [`System::now_ns`].
    pub(crate) since: u64,
    /// Its unit could not be read, or not asked for.
    pub(crate) tries: Tries,
    pub(crate) turn: Turn,
}

/// Faults that are still to be served.
#[derive(Debug)]
struct Faults {
    /// In the kernel's order.
    next: VecDeque<Event>,
    aside: VecDeque<Aside>,
}

/// Messages that were read from the userfaultfd and are still to be served, in the kernel's order.
///
/// A change of mappings makes moves fail (`EAGAIN`) until its event is read. So a thread whose move
/// fails reads the messages, and leaves them here for the handler.
///
/// A thread that moves or copies memory holds the lock of the changes ([`Steady`]). Faults have another lock, so
/// that the handler can remove a fault that it has served while the reclaim thread moves.
#[derive(Debug)]
pub(crate) struct Inbox {
    changes: RwLock<{ rank::INBOX }, VecDeque<Event>>,
    /// How many changes wait. Read without the lock, which a move of another thread holds; so it may miss what is being
    /// read just now.
    waiting: AtomicUsize,
    faults: Mutex<{ rank::FAULTS }, Faults>,
    /// How many faults are aside.
    aside: AtomicUsize,
    /// How many faults assistants are serving.
    in_hand: AtomicUsize,
}

/// The inbox, locked.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    faults: Guard<'a, { rank::FAULTS }, Faults>,
    changes: WriteGuard<'a, { rank::INBOX }, VecDeque<Event>>,
    inbox: &'a Inbox,
}

impl Locked<'_> {
    /// Whether a change waits to be applied.
    pub(crate) fn has_change(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Forgets all messages, the assistants and who tried to read: a child of `fork` has none of the threads.
    pub(crate) fn clear(&mut self) {
        self.changes.clear();
        self.inbox.count(&self.changes);
        self.faults.next.clear();
        self.faults.aside.clear();
        self.inbox.aside.store(0, Ordering::Relaxed);
        self.inbox.in_hand.store(0, Ordering::Relaxed);
        self.inbox.changes.forget_tries();
    }
}

impl Default for Inbox {
    fn default() -> Self {
        let room = || VecDeque::with_capacity(WAITING_MAX);
        let faults = Faults { next: room(), aside: VecDeque::with_capacity(WAITING_MAX) };
        let (changes, faults) = (RwLock::new(room()), Mutex::new(faults));
        let zero = || AtomicUsize::new(0);
        Inbox { changes, waiting: zero(), faults, aside: zero(), in_hand: zero() }
    }
}

/// While this is held no event is read, so a thread that changes mappings meanwhile cannot go on. A
/// move or copy made while this is held comes before such a change, or is refused with `EAGAIN`
/// (`EVT-3`). Several threads move and copy at once.
#[derive(Debug)]
pub(crate) struct Steady<'a>(ReadGuard<'a, { rank::INBOX }, VecDeque<Event>>);

impl Steady<'_> {
    /// Whether a change of any part of `start..end` waits to be applied.
    pub(crate) fn has_change(&self, start: usize, end: usize) -> bool {
        self.0.iter().any(|event| changes(event.message, start, end))
    }

    /// The new place of the mapping that was moved onto `page`, by a change that waits to be applied.
    pub(crate) fn moved_onto(&self, page: usize) -> Option<usize> {
        self.0.iter().rev().find_map(|event| match event.message {
            Message::Remap { to, bytes, .. } if (to..to + bytes).contains(&page) => Some(to),
            _ => None,
        })
    }

    /// Where memory that belonged at `at` is to be placed, given the changes that wait.
    pub(crate) fn place_now(&self, at: usize, bytes: usize) -> Place {
        let (mut place, mut moved) = (at, false);
        for Event { message, .. } in self.0.iter() {
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

/// Whether two messages are of one thread that waits for one page.
fn is_same_fault(one: Message, other: Message) -> bool {
    let fault = |message| match message {
        Message::Fault { address, thread } => Some((address / PAGE_BYTES, thread)),
        _ => None,
    };
    fault(one).is_some() && fault(one) == fault(other)
}

impl Inbox {
    /// Reads the messages that there are, without waiting, and skips events of the engine's own
    /// calls (`EVT-2`).
    pub(crate) fn pull(&self, from: &dyn System, announced: &Announced) {
        let mut messages = Messages::default();
        // Read under the lock, so that messages are kept in the order in which the kernel sent
        // them.
        let mut changes = self.changes.write_after(TRIES);
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
                self.keep(&mut changes, Event { message, at });
            }
        }
    }

    /// Adds a message behind those of its kind.
    fn keep(&self, changes: &mut VecDeque<Event>, event: Event) {
        if is_change(event.message) {
            changes.push_back(event);
            self.count(changes);
        } else {
            self.faults.lock().next.push_back(event);
        }
    }

    /// To be called after each change of the list.
    fn count(&self, changes: &VecDeque<Event>) {
        // Release: pairs with the Acquire in has_change(). Who sees that no change waits sees what was applied.
        self.waiting.store(changes.len(), Ordering::Release);
    }

    /// Locks the inbox for a `fork`, since the handler looks into the inbox without the table.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let changes = self.changes.write();
        Locked { faults: self.faults.lock(), changes, inbox: self }
    }

    /// The next message to serve: changes come before faults, since the thread of a fault waits,
    /// but the thread of a change goes on.
    pub(crate) fn first(&self) -> Option<Event> {
        let change = self.changes.read().front().copied();
        change.or_else(|| self.faults.lock().next.front().copied())
    }

    /// Takes the first fault, to serve it, and says how many are left.
    pub(crate) fn take_fault(&self) -> Option<(Event, usize)> {
        let mut faults = self.faults.lock();
        let event = faults.next.pop_front()?;
        Some((event, faults.next.len()))
    }

    /// The same for an assistant, until [`Inbox::let_go`].
    pub(crate) fn take_in_hand(&self) -> Option<Event> {
        let mut faults = self.faults.lock();
        let event = faults.next.pop_front()?;
        self.in_hand.fetch_add(1, Ordering::Relaxed);
        Some(event)
    }

    /// An assistant has served its fault, or put it aside.
    pub(crate) fn let_go(&self) {
        self.in_hand.fetch_sub(1, Ordering::Relaxed);
    }

    /// Puts a fault back that was taken, and could not be served: it is the next one.
    pub(crate) fn put_back(&self, event: Event) {
        self.faults.lock().next.push_front(event);
    }

    /// Puts a fault aside that was taken: it cannot be served yet. If it is aside already, a signal has interrupted its
    /// thread, and the thread has touched the page again: it waits once, and its wait is counted once.
    pub(crate) fn put_aside(&self, event: Event, later: Later, since: u64, turn: Turn) {
        let mut faults = self.faults.lock();
        let is_aside = |aside: &Aside| is_same_fault(aside.event.message, event.message);
        if faults.aside.iter().any(is_aside) {
            return;
        }
        faults.aside.push_back(Aside { event, later, since, tries: Tries::default(), turn });
        self.aside.store(faults.aside.len(), Ordering::Relaxed);
    }

    /// How many faults are aside.
    pub(crate) fn aside(&self) -> usize {
        self.aside.load(Ordering::Relaxed)
    }

    /// Whether a fault is aside, or an assistant may put one aside.
    pub(crate) fn may_be_aside(&self) -> bool {
        self.aside() + self.in_hand.load(Ordering::Relaxed) > 0
    }

    /// Takes the fault that is aside for longest, to try it again.
    pub(crate) fn take_aside(&self) -> Option<Aside> {
        let mut faults = self.faults.lock();
        let aside = faults.aside.pop_front();
        self.aside.store(faults.aside.len(), Ordering::Relaxed);
        aside
    }

    /// Puts a fault aside again.
    pub(crate) fn keep_aside(&self, aside: Aside) {
        let mut faults = self.faults.lock();
        faults.aside.push_back(aside);
        self.aside.store(faults.aside.len(), Ordering::Relaxed);
    }

    /// Whether a change waits to be applied; what is being read just now may be missed. That is for who serves a fault,
    /// since messages may come at any time then, and not for who must come after what was read
    /// ([`Inbox::first_change`]).
    pub(crate) fn has_change(&self) -> bool {
        // Acquire: pairs with the Release in count().
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Keeps the changes as they are for one move or copy. A thread that waits to read messages goes first: else one
    /// that moves again and again would keep it away for many moves.
    pub(crate) fn steady(&self) -> Steady<'_> {
        Steady(self.changes.read_behind(TRIES))
    }

    /// Whether a change of any part of `start..end` may wait: one does, or another thread is reading
    /// messages.
    #[cfg(all(test, debug_assertions))]
    pub(crate) fn may_have_change(&self, start: usize, end: usize) -> bool {
        let waits = |event: &Event| changes(event.message, start, end);
        self.changes.try_read().is_none_or(|inbox| inbox.iter().any(waits))
    }

    /// The first change that waits to be applied. Who holds the table misses none whose call has returned.
    pub(super) fn first_change(&self) -> Option<Message> {
        self.changes.read().front().map(|event| event.message)
    }

    /// Removes the first change; the caller has the table for writing. Faults stay, for the handler.
    fn drop_change(&self) {
        let mut changes = self.changes.write();
        changes.pop_front();
        self.count(&changes);
    }
}

/// Where to put memory that is brought in while changes wait.
pub(crate) enum Place {
    /// To the address where it belonged.
    Here,
    /// To this address: its mapping was moved.
    There(usize),
    /// Perhaps to several places: the caller asks for each page by itself.
    Apart,
    /// Nowhere: it was dropped.
    Nowhere,
}

/// Whether a message is a change of any part of `start..end`.
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

/// Whether a message is a change of mappings, and not a fault.
pub(crate) fn is_change(message: Message) -> bool {
    !matches!(message, Message::Fault { .. })
}

impl Engine {
    /// Applies the changes that wait. False: another thread has the table, or units are away that a change needs;
    /// they are being fetched. Try again.
    pub(crate) fn try_apply(&self) -> bool {
        let Some(mut table) = self.table.try_write() else { return false };
        self.poll_backing(&table);
        let applied = self.apply_changes(&mut table);
        match &applied {
            Ok(()) => self.end_event_tries(),
            Err(away) => self.fetch_for_event(&table, away),
        }
        self.measure_tables(&mut table);
        applied.is_ok()
    }

    /// Applies the changes that wait in the inbox.
    ///
    /// # Errors
    ///
    /// The units that are away and that the next change needs.
    pub(crate) fn apply_changes(&self, table: &mut Table) -> Result<(), Vec<Away>> {
        while let Some(change) = self.mover.inbox.first_change() {
            let mut away = Vec::new();
            let needed = self.needed_by(change);
            needed.iter().for_each(|range| self.note_away(table, *range, &mut away));
            if !away.is_empty() {
                return Err(away);
            }
            self.mover.inbox.drop_change();
            match change {
                Message::Remove { start, end } => {
                    self.forget(table, start, end, false);
                    add(&self.figures().removes, 1);
                }
                Message::Unmap { start, end } => {
                    self.forget(table, start, end, true);
                    table.forget(start, end);
                    add(&self.figures().unmaps, 1);
                }
                Message::Remap { from, to, bytes } => {
                    let mut doubts = self.mover.take_doubts(to);
                    doubts.retain(|doubt| self.may_have_moved(table, doubt, from, to));
                    self.follow(table, from, to, bytes);
                    doubts.iter().for_each(|doubt| self.mover.place_doubt(doubt));
                    table.forget(from, from + bytes);
                    // The kernel has moved the registration too. Memory that cannot be registered
                    // is left to the kernel.
                    self.take_in(table, to, to + bytes).ok();
                    add(&self.figures().remaps, 1);
                }
                Message::Fault { .. } | Message::Other => {}
            }
        }
        debug_assert!(!self.mover.has_doubts(), "EVT-5");
        Ok(())
    }

    /// Whether pages that were captured where a mapping was moved to can have come with it: what was compressed, or
    /// never touched, did not.
    fn may_have_moved(&self, table: &Table, doubt: &Doubt, from: usize, to: usize) -> bool {
        let is_resident = |at| {
            let folio = table.known(at).map(|lock| lock.lock());
            folio.is_some_and(|folio| folio.resident.contains(self.geometry().index(at)))
        };
        let mut before = doubt.places.iter().map(|place| place - to + from);
        before.all(|at| is_resident(at) || !table.manages(at))
    }

    /// The ranges whose folios a change brings back.
    fn needed_by(&self, change: Message) -> [(usize, usize); 2] {
        match change {
            Message::Remove { start, end } | Message::Unmap { start, end } => {
                self.edges(start, end)
            }
            Message::Remap { from, bytes, .. } => [(from, from + bytes), (0, 0)],
            Message::Fault { .. } | Message::Other => [(0, 0); 2],
        }
    }

    /// Drops what the engine keeps of `start..end`. A folio that lies only partly in the range is
    /// brought back first.
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
            // The kernel may drop its pages before or after ours are placed. So we place zeros in
            // the dropped part.
            let dropped = start.max(base) - base..end.min(base + folio_bytes) - base;
            if !unmapped {
                // A capture before the kernel drops these pages would keep bytes that must read as
                // zeros. It is also unknown whether the kernel drops the pages at all: with
                // MADV_FREE they stay if they are written to. So these units count as empty: their
                // present pages are the program's, and missing pages read as zeros (UNIT-1).
                self.make_empty(&mut folio, self.geometry().touched(dropped.clone()));
            }
            self.bring_back_without(&mut folio, base, &[dropped]);
            if unmapped {
                self.retire(&mut folio);
            }
        }
    }

    /// Makes resident units empty; their present pages stay.
    pub(crate) fn make_empty(&self, folio: &mut Folio, units: Units) {
        let units = folio.resident & units;
        self.count_out(units);
        folio.resident -= units;
        self.drop_copies(folio, units);
    }

    /// After a mapping was moved: puts what the engine keeps of the old range into the new one.
    fn follow(&self, table: &Table, from: usize, to: usize, bytes: usize) {
        for (base, lock) in table.known_folios(from, from + bytes) {
            let mut folio = lock.lock();
            // The part of the folio that was moved goes to the new range; the rest stays where it
            // was.
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
                let loaded = self.load_copies(&mut folio, base, stored, &mut scratch, self.cpu());
                loaded.expect("SPILL-1: nothing that the change needs is away");
                self.place_apart(&scratch, stored, &taken, target);
                self.mover.give_scratch(scratch);
            }
            self.drop_folio(&mut folio, false);
        }
        debug_assert!(bytes % PAGE_BYTES == 0);
    }

    /// Places units of a slot, cut at the ends of `taken`. Each part goes to the `target` of its
    /// start.
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
