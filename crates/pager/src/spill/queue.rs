//! The queue of a disk: what was accepted, what of it may go next, and what has ended.
//!
//! There is no system call here. Who carries out transfers takes them from the queue, owns them meanwhile, and hands
//! them back ended.
//!
//! ```text
//! begin -> waiting -> take -> (under way) -> end -> ended -> next_ended
//!             ^                    |
//!             +--- give_back ------+
//! ```
//!
//! # Invariants
//!
//! - `QUEUE-1` At most `depth` transfers are waiting, under way or ended; so no list grows after set-up.
//! - `QUEUE-2` A discard and a transfer of one of its slots are carried out in the order in which they were accepted.
//!   So what is written after a discard stays, and what is read before it was there.
//! - `QUEUE-3` Plain calls carry out one discard of a device at a time: it may take long, and of two threads that serve
//!   one is there for transfers.
//!
//! # Concurrency
//!
//! One lock, held for a look at lists of some 32 elements, never during a system call.

use std::collections::VecDeque;

use zfolio_core::swap::disk::{Error, Transfer};
use zfolio_sys::Errno;

use super::flight::Flight;

/// Discards that are remembered. With more of them new ones are left out: they are wishes.
pub(super) const DISCARDS: usize = 16;

/// So many times a write is passed over by a later read, at most.
const PASSES_MAX: u32 = 8;

/// A range of slots that are not needed any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Discard {
    /// The first slot.
    pub(super) first: u64,
    /// How many.
    pub(super) count: u64,
    number: u64,
}

/// Something to carry out.
#[derive(Debug)]
pub(super) enum Work {
    /// A transfer.
    Transfer(Flight),
    /// A discard.
    Discard(Discard),
}

/// Which work is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Share {
    /// Any.
    All,
    /// What a ring can do.
    Ring,
    /// What a ring leaves to plain calls.
    Calls,
}

/// How often something happened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Transfers that a ring has ended.
    pub by_ring: u64,
    /// Transfers that plain calls have ended.
    pub by_calls: u64,
    /// Transfers that ended with an error.
    pub failed: u64,
    /// Answers after which a transfer was tried again: it was short, or refused for now.
    pub again: u64,
    /// Ranges that the medium was told about.
    pub discards: u64,
    /// Ranges that it was not told about, since there were too many or it cannot do it.
    pub discards_left_out: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    /// Plain calls carry out all discards.
    discards_by_calls: bool,
    /// There is no ring any more, so all work is for plain calls. It is here, below the queue's lock, because a thread
    /// that looks for work and then sleeps must not have asked before.
    pub(super) is_without_ring: bool,
    waiting: VecDeque<Flight>,
    ended: VecDeque<Transfer>,
    /// Transfers that somebody has taken: their numbers and slots.
    out: Vec<(u64, u64, u64)>,
    /// Discards that wait, and those that somebody has taken.
    discards: VecDeque<Discard>,
    discards_out: Vec<Discard>,
    /// The number of the next transfer or discard.
    next: u64,
    /// How often the oldest waiting write was passed over.
    passes: u32,
    /// Work may have become possible that nobody has been told about.
    pub(super) is_stirred: bool,
    /// False once the medium has refused to discard.
    can_discard: bool,
    pub(super) counts: Counts,
    /// Why the last read that failed did.
    pub(super) read_error: Option<Error>,
}

fn overlap(first: (u64, u64), second: (u64, u64)) -> bool {
    first.0 < second.0 + second.1 && second.0 < first.0 + first.1
}

impl Discard {
    fn slots(&self) -> (u64, u64) {
        (self.first, self.count)
    }
}

impl Queue {
    /// A queue for `depth` transfers. Allocates, and nothing later does.
    pub(super) fn new(depth: usize, discards_by_calls: bool) -> Queue {
        assert!(depth > 0);
        Queue {
            depth,
            discards_by_calls,
            is_without_ring: false,
            waiting: VecDeque::with_capacity(depth),
            ended: VecDeque::with_capacity(depth),
            out: Vec::with_capacity(depth),
            discards: VecDeque::with_capacity(DISCARDS),
            discards_out: Vec::with_capacity(DISCARDS),
            next: 0,
            passes: 0,
            is_stirred: false,
            can_discard: true,
            counts: Counts::default(),
            read_error: None,
        }
    }

    /// Accepts a transfer, or gives it back if there are enough.
    pub(super) fn begin(&mut self, transfer: Transfer) -> Result<(), Transfer> {
        if self.under_way() == self.depth {
            return Err(transfer);
        }
        let number = self.number();
        self.waiting.push_back(Flight::new(transfer, number));
        Ok(())
    }

    /// Accepts a discard, or leaves it out.
    pub(super) fn discard(&mut self, first: u64, count: u64) {
        if !self.can_discard || self.discard_room() == 0 {
            self.counts.discards_left_out += 1;
        } else if count > 0 {
            let number = self.number();
            self.discards.push_back(Discard { first, count, number });
        }
    }

    /// How many more discards are accepted. A medium that cannot discard leaves any number out.
    pub(super) fn discard_room(&self) -> usize {
        let room = DISCARDS - self.discards.len() - self.discards_out.len();
        if self.can_discard { room } else { usize::MAX }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Transfers that were accepted and not handed back yet.
    pub(super) fn under_way(&self) -> usize {
        self.waiting.len() + self.out.len() + self.ended.len()
    }

    /// Whether something was taken and has not ended.
    pub(super) fn is_anything_out(&self) -> bool {
        !self.out.is_empty() || !self.discards_out.is_empty()
    }

    /// Takes something to carry out. Reads come before writes: a thread waits for a read, but rarely for a write.
    pub(super) fn take(&mut self, share: Share) -> Option<Work> {
        if let Some(index) = self.choose(share) {
            let flight = self.waiting.remove(index)?;
            let passed_over = |write: &Flight| !write.is_read() && write.number < flight.number;
            let passes = flight.is_read() && self.waiting.iter().any(passed_over);
            self.passes = if passes { self.passes + 1 } else { 0 };
            let (first, count) = flight.slots();
            self.out.push((flight.number, first, count));
            return Some(Work::Transfer(flight));
        }
        let index = self.choose_discard(share)?;
        let discard = self.discards.remove(index)?;
        self.discards_out.push(discard);
        Some(Work::Discard(discard))
    }

    /// Whether there is something to take.
    pub(super) fn has_work(&self, share: Share) -> bool {
        self.choose(share).is_some() || self.choose_discard(share).is_some()
    }

    /// The place of the next transfer to take.
    fn choose(&self, share: Share) -> Option<usize> {
        let is_meant = |flight: &Flight| match share {
            Share::All => true,
            Share::Ring => !flight.is_for_calls,
            Share::Calls => flight.is_for_calls || self.is_without_ring,
        };
        let may_go = |flight: &&Flight| is_meant(flight) && !self.must_wait(flight);
        let oldest = self.waiting.iter().position(|flight| may_go(&flight));
        if self.passes >= PASSES_MAX {
            return oldest;
        }
        let read = self.waiting.iter().position(|flight| flight.is_read() && may_go(&flight));
        read.or(oldest)
    }

    /// Whether an earlier discard of its slots has not ended (`QUEUE-2`).
    fn must_wait(&self, flight: &Flight) -> bool {
        self.discards.iter().chain(&self.discards_out).any(|discard| {
            discard.number < flight.number && overlap(discard.slots(), flight.slots())
        })
    }

    /// The place of the next discard to take: one that overlaps no earlier transfer (`QUEUE-2`, `QUEUE-3`).
    fn choose_discard(&self, share: Share) -> Option<usize> {
        let is_meant = match share {
            Share::All => true,
            Share::Ring => !self.discards_by_calls,
            Share::Calls => self.discards_by_calls || self.is_without_ring,
        };
        let may_go = |discard: &Discard| !self.is_used_before(discard);
        let is_one_out = self.discards_by_calls && !self.discards_out.is_empty();
        if is_meant && !is_one_out { self.discards.iter().position(may_go) } else { None }
    }

    /// Whether a transfer of these slots that was accepted earlier has not ended (`QUEUE-2`).
    fn is_used_before(&self, discard: &Discard) -> bool {
        let is_before = |number, slots| number < discard.number && overlap(slots, discard.slots());
        self.waiting.iter().any(|flight| is_before(flight.number, flight.slots()))
            || self.out.iter().any(|(number, first, count)| is_before(*number, (*first, *count)))
    }

    /// Takes a transfer back that is to be taken again, before those that were accepted later.
    pub(super) fn give_back(&mut self, flight: Flight) {
        self.is_in(flight.number);
        let place = self.waiting.iter().position(|other| other.number > flight.number);
        self.waiting.insert(place.unwrap_or(self.waiting.len()), flight);
        self.is_stirred = true;
    }

    /// Takes a discard back that is to be taken again.
    pub(super) fn give_discard_back(&mut self, discard: Discard) {
        self.discards_out.retain(|other| *other != discard);
        self.discards.push_front(discard);
        self.is_stirred = true;
    }

    /// Takes a transfer that has ended.
    pub(super) fn end(&mut self, flight: Flight, result: Result<(), Error>) {
        self.is_in(flight.number);
        self.counts.failed += u64::from(result.is_err());
        if flight.is_read() {
            self.read_error = result.err().or(self.read_error);
        }
        let mut transfer = flight.transfer;
        transfer.result = result;
        self.ended.push_back(transfer);
        // A discard may have waited for it.
        self.is_stirred |= !self.discards.is_empty();
    }

    /// Takes a discard that has ended. One that has failed is not tried again: the slots are written anew some day.
    pub(super) fn end_discard(&mut self, discard: Discard, done: Result<(), Errno>) {
        self.discards_out.retain(|other| *other != discard);
        // This medium or this kernel cannot discard.
        self.can_discard &= !matches!(done, Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY));
        if done.is_ok() {
            self.counts.discards += 1;
        } else {
            self.counts.discards_left_out += 1;
        }
        // A transfer may have waited for it.
        self.is_stirred |= !self.waiting.is_empty();
    }

    fn is_in(&mut self, number: u64) {
        let place = self.out.iter().position(|(other, ..)| *other == number);
        self.out.swap_remove(place.expect("who hands a transfer back has taken it"));
    }

    /// The next transfer that has ended, for whoever began it.
    pub(super) fn next_ended(&mut self) -> Option<Transfer> {
        self.ended.pop_front()
    }

    /// Whether there is one.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }
}

#[cfg(test)]
mod tests;
