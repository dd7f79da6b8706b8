//! Handler mode: a thread of the engine reads the userfaultfd and serves the faults.
//!
//! The handler runs on the CPU of the faulting thread: now and then it asks the kernel for that CPU
//! and pins itself there. From another, idle CPU each of the two wake-ups would be an interrupt to
//! a halted core, and a fault would take five times as long. When threads on several CPUs fault in
//! turns, the handler stays on the CPU from which most faults come ([`Follow`]).
//!
//! Where there are enough CPUs, threads may fault faster than one handler serves them. Then the handler calls
//! assistants ([`assist`]), which serve what it has read. It alone reads messages, since the kernel wakes all who wait
//! for one.
//!
//! A real-time thread that spins on the handler's CPU would keep the handler from running. If the
//! spinning thread waits for a thread that waits for the handler, that would last for ever. So the
//! background thread checks now and then whether the handler runs ([`Watched`]).

pub(crate) mod assist;
mod follow;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use zfolio_core::stats::add;
use zfolio_core::sync::ReadGuard;
use zfolio_sys::uffd::Message;
use zfolio_sys::{cpu, thread};

use crate::engine::Engine;
use crate::fault::{Served, Turn, Waits};
use crate::folio::Table;
use crate::mappings::event::{Aside, Event};
use crate::rank;
use crate::spill::{Later, Tries};

use follow::Follow;

/// The longest sleep of the handler, in milliseconds. The handler does not sleep until the next
/// message of the kernel, since now and then another thread reads a message and leaves it in the
/// `Inbox`.
const WAIT_MS: u16 = 20;

/// The same while faults wait for the backing.
const WAIT_ASIDE_MS: u16 = 1;

/// So many faults that were put aside are served before messages are read again: else the disk has nothing to do while
/// those are served for which it has read, their threads fault again together, and the handler has nothing to do while
/// it reads for them.
const SERVE_AT_ONCE: u32 = 4;

/// If a message waits so long while the handler does not run, the handler is unpinned.
const STUCK_NS: u64 = 10_000_000;

/// How long the handler then stays unpinned at first, and at most: each time that it is kept from running soon after it
/// was pinned again, twice as long. It loses 10 to 30 ms each time, so 3 % in the first second and 0.05 % later.
const ROAM_NS: u64 = 1_000_000_000;
const ROAM_MAX_NS: u64 = 64 * ROAM_NS;

/// The state by which the background thread sees whether the handler is kept from running.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// The handler's thread number; 0 if there is none.
    thread: AtomicU32,
    /// Counts the handler's turns and faults: it changes while the handler runs.
    turns: AtomicU64,
    /// Until this time the handler is unpinned. 0 most of the time: then no clock is read.
    roams_until_ns: AtomicU64,
    /// The background thread's: `turns` at its last look, and since when it has seen a message wait
    /// (0: none waits).
    seen_turns: AtomicU64,
    since_ns: AtomicU64,
    /// The background thread's: how long the handler stayed unpinned the last time, and until when.
    roamed_ns: AtomicU64,
    roamed_until_ns: AtomicU64,
}

impl Watched {
    /// Called by the handler at each turn and fault.
    fn beat(&self) {
        self.turns.store(self.turns.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Whether the handler is to stay unpinned. Most of the time `now_ns` is not called.
    fn roams(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let until = self.roams_until_ns.load(Relaxed);
        let roams = until != 0 && now_ns() < until;
        if until != 0 && !roams {
            self.roams_until_ns.store(0, Relaxed);
        }
        roams
    }

    /// Called by the background thread: the handler is kept from running, and stays unpinned for a while.
    fn roam(&self, now_ns: u64) {
        let (last, until) = (self.roamed_ns.load(Relaxed), self.roamed_until_ns.load(Relaxed));
        // Pinned again, it was kept from running sooner than it had stayed away for: what keeps it is still there.
        let is_again = last != 0 && now_ns < until + last;
        let roam_ns = if is_again { ROAM_MAX_NS.min(2 * last) } else { ROAM_NS };
        self.roamed_ns.store(roam_ns, Relaxed);
        self.roamed_until_ns.store(now_ns + roam_ns, Relaxed);
        self.roams_until_ns.store(now_ns + roam_ns, Relaxed);
    }

    /// Called by the background thread: whether a message has waited long while the handler did not
    /// run. `waits`: a message waits now.
    fn is_stuck(&self, waits: bool, now_ns: u64) -> bool {
        let turns = self.turns.load(Relaxed);
        let ran = turns != self.seen_turns.swap(turns, Relaxed);
        let since_ns = match self.since_ns.load(Relaxed) {
            _ if !waits => 0,
            since_ns if since_ns == 0 || ran => now_ns,
            since_ns => since_ns,
        };
        self.since_ns.store(since_ns, Relaxed);
        waits && now_ns.saturating_sub(since_ns) >= STUCK_NS
    }
}

impl Engine {
    /// The life of the handler: serves faults until the engine stops.
    pub fn handle_faults(&self) {
        let (mut follow, watched) = (Follow::default(), &self.work.watched);
        let mover = &self.mover;
        watched.thread.store(cpu::thread_id(), Relaxed);
        while !self.work.stopping.load(Relaxed) {
            watched.beat();
            thread::follow();
            if mover.inbox.first().is_none() && mover.system.wait(self.wait_ms(), self.disk_event())
            {
                mover.answer_strangers();
            }
            let all = self.handle_turn(&mut |thread| {
                watched.beat();
                follow.go(thread, watched, || self.now_ns());
            });
            if !all {
                // Another thread has the table, perhaps for a call that returns only when its event
                // is read. So messages must still be read (EVT-1).
                mover.system.pause();
            }
        }
    }

    /// What becomes readable when the disk has read or written, while faults wait for that.
    fn disk_event(&self) -> Option<BorrowedFd<'_>> {
        let place = self.work.place.as_ref().filter(|_| self.mover.inbox.may_be_aside());
        place.map(|place| place.ended().file())
    }

    /// How long the handler sleeps at most: not long while faults wait for the backing.
    pub(crate) fn wait_ms(&self) -> u16 {
        if self.mover.inbox.may_be_aside() { WAIT_ASIDE_MS } else { WAIT_MS }
    }

    /// Reads the messages and serves them, without waiting; `after` is called with the thread of
    /// each fault. False: a message could not be served now.
    ///
    /// What the messages want of the backing is sent together, and before faults are served that were put aside.
    pub(crate) fn handle_turn(&self, after: &mut dyn FnMut(u32)) -> bool {
        self.mover.read_messages();
        self.serve_messages(after) && self.serve_aside(after)
    }

    fn serve_messages(&self, after: &mut dyn FnMut(u32)) -> bool {
        let inbox = &self.mover.inbox;
        loop {
            if inbox.has_change() {
                if !self.try_apply() {
                    return false;
                }
                continue;
            }
            let Some((event, left)) = inbox.take_fault() else { return true };
            self.work.assistants.call(left);
            let Message::Fault { address, thread } = event.message else { continue };
            let (since, mut turn) = (self.now_ns(), Turn::new(event.at));
            let served = self.try_serve(address, &mut turn);
            after(thread);
            match served {
                None => {
                    inbox.put_back(event);
                    return false;
                }
                Some(Ok(())) => {}
                Some(Err(later)) => self.put_aside_fault(event, later, since, turn),
            }
        }
    }

    /// Puts a fault aside that waits for the backing.
    fn put_aside_fault(&self, event: Event, later: Later, since: u64, turn: Turn) {
        add(&self.figures().faults_spilled, 1);
        self.mover.inbox.put_aside(event, later, since, turn);
    }

    /// Serves the faults that were put aside, as far as it is time. False: one could not be served now.
    fn serve_aside(&self, after: &mut dyn FnMut(u32)) -> bool {
        let inbox = &self.mover.inbox;
        let count = inbox.aside();
        if count == 0 {
            return true;
        }
        let Some(table) = self.table.try_read() else { return false };
        // Before the look: what ends after it makes the event readable again.
        self.work.place.iter().for_each(|place| place.ended().clear());
        self.poll_backing(&table);
        drop(table);
        let (mut asked, mut served_since) = (false, 0);
        for _ in 0..count {
            if served_since == SERVE_AT_ONCE {
                served_since = 0;
                if !self.keep_backing_busy(after) {
                    return false;
                }
            }
            let Some(mut aside) = inbox.take_aside() else { break };
            let Message::Fault { address, thread } = aside.event.message else { continue };
            let mut is_due = self.is_time(aside.later) && !inbox.has_change();
            if let (true, Later::Away(ticket)) = (is_due, aside.later) {
                is_due = self.may_try(&mut aside.tries, address, ticket);
            }
            if !is_due {
                inbox.keep_aside(aside);
                continue;
            }
            aside.turn.spilled_ns = self.now_ns().saturating_sub(aside.since);
            let served = self.try_serve(address, &mut aside.turn);
            after(thread);
            match served {
                None => {
                    inbox.keep_aside(aside);
                    return false;
                }
                Some(Ok(())) => served_since += 1,
                Some(Err(later)) => {
                    if later != aside.later {
                        aside.tries = Tries::default();
                    }
                    if let Later::Away(ticket) = later {
                        asked = true;
                        self.note_asked(&mut aside.tries, ticket);
                    }
                    inbox.keep_aside(Aside { later, ..aside });
                }
            }
        }
        if asked {
            let Some(table) = self.table.try_read() else { return false };
            self.poll_backing(&table);
        }
        true
    }

    /// Serves what has come while faults were served that had been put aside, and sends what it wants of the backing.
    /// False: a message could not be served now.
    fn keep_backing_busy(&self, after: &mut dyn FnMut(u32)) -> bool {
        self.mover.read_messages();
        if self.mover.inbox.first().is_none() {
            return true;
        }
        let all = self.serve_messages(after);
        self.table.try_read().iter().for_each(|table| self.poll_backing(table));
        all
    }

    /// Called by the background thread: unpins a handler that is kept from running.
    pub(crate) fn look_after_handler(&self) {
        let watched = &self.work.watched;
        let thread = watched.thread.load(Relaxed);
        if thread == 0 {
            return;
        }
        let now = self.now_ns();
        if watched.is_stuck(self.mover.system.has_message(), now) {
            watched.roam(now);
            cpu::unpin(thread);
        }
    }

    /// Serves one fault. `None`: a writer has the table, and nothing was served.
    fn try_serve(&self, address: usize, turn: &mut Turn) -> Option<Result<(), Later>> {
        let table = self.table.try_read()?;
        Some(self.serve(table, address, turn))
    }

    /// Serves one fault, and counts it.
    ///
    /// # Errors
    ///
    /// It cannot be served yet.
    pub(crate) fn serve(
        &self,
        table: ReadGuard<'_, { rank::TABLE }, Table>,
        address: usize,
        turn: &mut Turn,
    ) -> Result<(), Later> {
        let (now, mut waits) = (self.now_ns(), Waits::default());
        let plan = turn.plan.get_or_insert_with(|| self.plan(address));
        let served = self.fault(&table, address, plan, self.cpu(), &mut waits);
        if matches!(served, Err(Later::Away(_))) {
            turn.was_away = true;
            // While the disk reads for this fault it may read ahead too.
            self.prefetch_ahead(plan);
        }
        let (served, units) = served?;
        let Turn { began, spilled_ns, was_away, .. } = *turn;
        waits.count(self.figures());
        add(&self.figures().stall_spill_ns, spilled_ns);
        add(&self.figures().stall_queue_ns, now.saturating_sub(began + spilled_ns));
        self.prefetch_after(plan, served, &units);
        drop(table);
        let took = self.now_ns().saturating_sub(began);
        let (figures, stats) = (self.figures(), self.stats());
        self.count_served();
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
            Served::Stored { distance_bytes, .. } => {
                stats.count_refault(distance_bytes, took, was_away);
                self.copies.note_wait(took);
            }
            Served::Raced => add(&figures.faults_raced, 1),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::{ROAM_MAX_NS, ROAM_NS, STUCK_NS, Watched};

    /// Goal: a handler counts as stuck only if a message waits for long and the handler does not
    /// run.
    #[test]
    fn a_handler_is_stuck_if_messages_wait_and_it_does_not_run() {
        let watched = Watched::default();
        let mut now = 1;
        let mut look = |watched: &Watched, waits, later| {
            now += later;
            watched.is_stuck(waits, now)
        };
        assert!(!look(&watched, false, 10 * STUCK_NS), "nothing to do");
        assert!(!look(&watched, true, 10 * STUCK_NS), "it may have come just now");
        assert!(!look(&watched, true, STUCK_NS - 1), "not for long");
        assert!(look(&watched, true, 1));
        watched.beat();
        assert!(!look(&watched, true, 10 * STUCK_NS), "it has run meanwhile");
        assert!(!look(&watched, false, 10 * STUCK_NS), "and is done");
        assert!(!look(&watched, true, STUCK_NS), "the next message");
        assert!(look(&watched, true, STUCK_NS));
    }

    /// Goal: an unpinned handler is pinned again after a while, and a pinned one reads no clock.
    #[test]
    fn a_handler_stays_unpinned_for_a_while_and_then_reads_no_clock() {
        let watched = Watched::default();
        let no_clock = || -> u64 { panic!("a clock is read") };
        assert!(!watched.roams(no_clock), "nobody has unpinned it");
        watched.roam(5);
        assert!(watched.roams(|| 5));
        assert!(watched.roams(|| 4 + ROAM_NS));
        assert!(!watched.roams(|| 5 + ROAM_NS));
        assert!(!watched.roams(no_clock), "this is over");
    }

    /// Goal: a handler that is kept from running again and again stays unpinned longer and longer, to a bound; one
    /// that was not for as long again begins anew.
    #[test]
    fn a_handler_that_is_stuck_again_stays_unpinned_for_longer() {
        let watched = Watched::default();
        let mut now = 1;
        let mut roam_after = |pause: u64| {
            now = watched.roamed_until_ns.load(Relaxed) + pause;
            watched.roam(now);
            watched.roamed_until_ns.load(Relaxed) - now
        };
        let seconds: Vec<u64> = (0..9).map(|_| roam_after(STUCK_NS) / ROAM_NS).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(roam_after(ROAM_MAX_NS - 1), ROAM_MAX_NS, "soon enough");
        assert_eq!(roam_after(ROAM_MAX_NS), ROAM_NS, "what kept it was gone");
        assert_eq!(roam_after(ROAM_NS), ROAM_NS);
        assert_eq!(roam_after(ROAM_NS - 1), 2 * ROAM_NS);
    }
}
