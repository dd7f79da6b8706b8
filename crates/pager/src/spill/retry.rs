//! A read that failed, and is tried again: the disk may be good again after a while.
//!
//! The pauses grow from a millisecond to a second, ten seconds in all. Nothing is under way in a pause and nobody holds
//! a lock, so other faults, changes of mappings and forks go on; what waits is the fault on that unit, or a change of a
//! mapping that needs the unit. After the last try the process is stopped, since its data is lost.
//!
//! A read that the backing refused because it is busy is no failure: it is asked for again, as often as need be. So is
//! one that succeeded, but the pool had no memory for the unit. A unit that was read and is not what was written, or
//! whose slots are beyond the end of the file, is lost at once.

use zfolio_core::stats::add;
use zfolio_core::store::Ticket;

use super::Away;
use crate::engine::Engine;
use crate::fatal;
use crate::folio::Table;

/// The first pause. The pauses are doubled up to the longest.
const PAUSE_NS_MIN: u64 = 1_000_000;
const PAUSE_NS_MAX: u64 = 1_000_000_000;

/// So many reads of a unit fail before the process is stopped.
const TRIES_MAX: u32 = 20;

/// The pause before a unit is asked for again whose read the backing has refused, or for which the pool had no room.
const REFUSED_NS: u64 = 1_000_000;

/// The pause after so many reads that failed.
const fn pause_ns(failed: u32) -> u64 {
    let doubled = PAUSE_NS_MIN << (failed - 1);
    if doubled < PAUSE_NS_MAX { doubled } else { PAUSE_NS_MAX }
}

/// All pauses together.
const PAUSES_NS: u64 = {
    let (mut sum_ns, mut failed) = (0, 1);
    while failed < TRIES_MAX {
        sum_ns += pause_ns(failed);
        failed += 1;
    }
    sum_ns
};

/// 1 + 2 + 4 + ... + 512 ms, and nine times 1 s.
const _: () = assert!(PAUSES_NS == 10_023_000_000);

/// How often reads have failed for somebody who waits for a unit, and when the next is due. Another unit begins anew.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Tries {
    /// The unit whose reads have failed, if any has.
    unit: Option<Ticket>,
    failed: u32,
    /// 0: the unit was asked for, and how that ended is not known yet.
    after_ns: u64,
}

impl Engine {
    /// Whether a unit may be asked for: not while a pause lasts, which begins here when a read has failed. The pause
    /// ends early if somebody else has had the unit fetched. Does not sleep.
    pub(crate) fn may_try(&self, tries: &mut Tries, address: usize, ticket: Ticket) -> bool {
        self.forgive(tries);
        if tries.after_ns == 0 && self.store.is_unread(ticket) {
            self.note_unread(tries, address, ticket);
        } else if tries.after_ns == 0
            && self.store.has_come(ticket)
            && !self.store.is_coming(ticket)
        {
            tries.after_ns = self.now_ns() + REFUSED_NS;
        }
        self.now_ns() >= tries.after_ns || !self.store.is_away(ticket)
    }

    /// A unit was asked for. If the backing has refused that, a short pause begins.
    pub(crate) fn note_asked(&self, tries: &mut Tries, ticket: Ticket) {
        let is_refused = !self.store.is_coming(ticket) && !self.store.is_unread(ticket);
        tries.after_ns = if is_refused { self.now_ns() + REFUSED_NS } else { 0 };
    }

    /// The last read of a unit has failed: sleeps until it may be asked for again, as the caller does next.
    pub(crate) fn await_try(&self, tries: &mut Tries, address: usize, ticket: Ticket) {
        while !self.may_try(tries, address, ticket) {
            self.pause_for_room();
        }
        tries.after_ns = 0;
    }

    /// Once a unit has been read, what failed before is over, also if the pool had no room for it or others took its
    /// place, and it must be read again.
    pub(crate) fn forgive(&self, tries: &mut Tries) {
        if tries.unit.is_some_and(|unit| self.store.has_come(unit)) {
            *tries = Tries::default();
        }
    }

    /// Of units that somebody waits for together, one whose last read has failed. It is the one that `tries` counts, as
    /// long as that is away: failures of the others do not count.
    pub(super) fn unread<'a>(&self, tries: &mut Tries, wanted: &'a [Away]) -> Option<&'a Away> {
        self.forgive(tries);
        let counted = wanted.iter().find(|unit| tries.unit == Some(unit.ticket));
        let is_unread = |unit: &&Away| self.store.is_unread(unit.ticket);
        match counted {
            Some(unit) => Some(unit).filter(is_unread),
            None => wanted.iter().find(is_unread),
        }
    }

    /// Sleeps for a millisecond at most before a unit is asked for again whose read the backing has refused.
    pub(crate) fn pause_for_room(&self) {
        self.mover.system.wait_for(&self.work.spilling.found, self.heard());
    }

    /// A read has failed: a pause begins, or the process is stopped.
    fn note_unread(&self, tries: &mut Tries, address: usize, ticket: Ticket) {
        let failed = if tries.unit == Some(ticket) { tries.failed } else { 0 };
        *tries = Tries { unit: Some(ticket), failed: failed + 1, after_ns: 0 };
        if tries.failed == TRIES_MAX {
            self.note_lost();
            let (bytes, disk) = (self.geometry().unit_bytes(), self.disk_of(ticket));
            fatal::unreadable(address, bytes, disk.as_deref(), (TRIES_MAX, PAUSES_NS));
        }
        add(&self.figures().read_back_retry, 1);
        tries.after_ns = self.now_ns() + pause_ns(tries.failed);
    }

    /// Has units fetched that a change needs which the handler applies: it does not sleep. The table is held for
    /// writing.
    pub(crate) fn fetch_for_event(&self, table: &Table, wanted: &[Away]) {
        let spilling = &self.work.spilling;
        let mut tries = spilling.event_tries.lock();
        match self.unread(&mut tries, wanted) {
            // A pause goes on while another thread has the unit read: else each read of that thread that fails would
            // count here, too.
            None => self.fetch_all(table, wanted),
            Some(unit) if self.may_try(&mut tries, unit.base, unit.ticket) => {
                self.fetch_all(table, wanted);
                tries.after_ns = 0;
            }
            Some(_) => {}
        }
    }

    /// The handler has applied all changes that waited.
    pub(crate) fn end_event_tries(&self) {
        *self.work.spilling.event_tries.lock() = Tries::default();
    }
}
