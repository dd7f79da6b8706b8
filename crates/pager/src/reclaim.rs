//! Reclaim: the oldest resident folios go to the staging area, the oldest staged folios into the
//! store.
//!
//! ```text
//! capture:  pop the next folio of the queue, and up to 7 more if they are next
//!           in the queue and adjacent; move their resident units to
//!           hollow slots                                           -> staged
//! compress: pop the oldest staged folio; a unit with the checksum of its copy
//!           is clean, the other units are compressed; the slot
//!           becomes free, or leaving if it lacks some units        -> stored
//! ```
//!
//! Between capture and compression a folio has its second chance: a fault brings it back at the
//! cost of a move. The background thread keeps `available` between the low and the high watermark;
//! a fault that finds nothing available reclaims for itself. In inline mode, while the reclaimed
//! folios are clean and scattered, the faults do all of the reclaim (`is_worth_a_thread`): a second
//! thread would only cost interrupts.

mod background;
mod batch;
pub(crate) mod busy;
mod haltpoll;
mod proactive;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use zfolio_core::ledger::signed;
use zfolio_core::stats::add;
use zfolio_core::zsmalloc::Compaction;

use crate::bell::Bell;
use crate::engine::Engine;
use crate::folio::{Folio, Held, Table, Units};
use crate::mover::{Full, Hollow, Refusal, Shared};
use crate::replacement::Queue;

use busy::Busy;
use proactive::Proactive;

/// Who reclaims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// A thread that waits for memory.
    Direct,
    /// The prefetching thread, for which nobody waits.
    Ahead,
    /// The background thread, or the one that adopts a mapping.
    Background,
}

/// What [`Engine::reclaim_one`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reclaimed {
    /// Folios are staged; no memory is free yet.
    Captured,
    /// A folio is stored; its pages are free.
    Freed,
    /// No folio could be captured or stored.
    Nothing,
}

/// A running average over the last 64 numbers or so. A number that is lost to a race hardly changes
/// the average.
#[derive(Debug)]
pub(crate) struct Average(AtomicU32);

impl Average {
    /// The fixed-point form of 1.
    pub(crate) const ONE: u32 = 1 << 16;

    pub(crate) fn new(start: u32) -> Average {
        Average(AtomicU32::new(start))
    }

    /// Adds `part` / `of` to the average.
    pub(crate) fn add(&self, part: usize, of: usize) {
        let number = u32::try_from(part * Average::ONE as usize / of).unwrap_or(u32::MAX);
        let average = self.get();
        self.0.store(average - average / 64 + number / 64, Relaxed);
    }

    fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }
}

/// What reclaim remembers between its turns.
#[derive(Debug)]
pub(crate) struct Reclaimer {
    /// The background thread's.
    bell: Bell,
    /// The share of the units stored last that were dirty.
    dirty_share: Average,
    /// The share of unused zeros ([`Engine::unused_zeros`]) in folios that went out as a whole.
    zero_share: Average,
    /// Faults while that share is high.
    sparse_faults: AtomicU32,
    /// The share of free slots that faults want as they are, for a whole folio. Of the others the pages are given back
    /// to the system, so that a fault has new ones for a part of a folio.
    pub(crate) whole_share: Average,
    /// How many whole folios one move captures; 0 for a folio that is captured in part.
    folios_moved: Average,
    compaction: Compaction,
    pub(crate) busy: Busy,
    /// When parked folios are tried again.
    unpark_after_ns: AtomicU64,
    proactive: Proactive,
}

/// While a first fault brings one unit, one fault in so many may bring a whole folio: to see whether more of it is
/// used.
const FILL_EVERY: u32 = 16;

impl Reclaimer {
    /// Whether the first fault on a folio should bring zeros for all of it: not while most units of whole folios are
    /// still zeros when they go out, since a program that touches one page here and there would need sixteen times as
    /// much memory.
    pub(crate) fn fills_folios(&self) -> bool {
        self.zero_share.get() <= Average::ONE / 2
            || self.sparse_faults.fetch_add(1, Relaxed) % FILL_EVERY == 0
    }

    pub(crate) fn new() -> Reclaimer {
        Reclaimer {
            bell: Bell::default(),
            dirty_share: Average::new(Average::ONE),
            zero_share: Average::new(0),
            sparse_faults: AtomicU32::new(0),
            whole_share: Average::new(Average::ONE),
            folios_moved: Average::new(Average::ONE),
            compaction: Compaction::default(),
            busy: Busy::default(),
            unpark_after_ns: AtomicU64::new(0),
            proactive: Proactive::default(),
        }
    }
}

/// A folio on its way out.
struct Outgoing<'t> {
    base: usize,
    queue: Queue,
    folio: Held<'t>,
    slot: Hollow,
    shared: Shared,
}

/// Why a folio is not captured.
enum Missed {
    /// None of its units is resident any more.
    Gone,
    /// Another thread has its lock, or some of its units are staged already (`UNIT-4`).
    Busy,
}

/// How many adjacent folios one move captures at most; 512 KiB take 25 us.
const CAPTURE_MAX: usize = 8;
const CAPTURE_BYTES_MAX: usize = 512 << 10;

/// How many folios reclaim tries to capture before it gives up.
const CAPTURE_TRIES: usize = 64;

/// The shortest time between two turns of [`Engine::unpark`], and until the next one after a folio was busy.
const UNPARK_NS_MIN: u64 = 1_000_000_000;
const UNPARK_BUSY_NS_MIN: u64 = 20_000_000;

impl Engine {
    /// Captures folios, or stores one if enough are staged.
    pub(crate) fn reclaim_one(&self, table: &Table, cpu: usize, by: By) -> Reclaimed {
        if by == By::Background {
            return self.in_background(|| self.take_step(table, cpu));
        }
        // What a direct reclaim takes is counted with the wait (`Copies::note_wait`), and what the prefetching thread
        // takes is no part of the background thread's time (`busy.rs`).
        let (reclaimed, units) = self.take_step(table, cpu);
        let figures = self.figures();
        let is_direct = by == By::Direct;
        let counter = if is_direct { &figures.reclaim_direct } else { &figures.reclaim_background };
        add(counter, units.count() as u64);
        reclaimed
    }

    /// Counts the units that `reclaim` stores, and the time that this takes.
    fn in_background<T>(&self, reclaim: impl FnOnce() -> (T, Units)) -> T {
        let began = self.now_ns();
        let (answer, units) = reclaim();
        add(&self.figures().reclaim_background, units.count() as u64);
        self.work.reclaimer.busy.note_background(self.now_ns().saturating_sub(began));
        answer
    }

    /// Captures folios, or stores one. Returns the units that were stored.
    fn take_step(&self, table: &Table, cpu: usize) -> (Reclaimed, Units) {
        self.drop_spare_copies(table);
        let staged = || self.replacement.staged_folios();
        let target = self.charge.staged_target();
        let had_room = staged() <= target;
        let captured = had_room && self.capture_next(table, Shared::Copied);
        if captured && staged() <= target {
            return (Reclaimed::Captured, Units::NONE);
        }
        let units = self.compress_next(table, cpu);
        if !units.is_empty() {
            return (Reclaimed::Freed, units);
        }
        // All that seemed to be staged may have been touched again, and the queue was full of stale entries.
        let has_room = !had_room && staged() <= target;
        let captured = captured || (has_room && self.capture_next(table, Shared::Copied));
        let reclaimed = if captured { Reclaimed::Captured } else { Reclaimed::Nothing };
        (reclaimed, Units::NONE)
    }

    /// Captures the next folio of the queue that can be captured, and adjacent folios if they are
    /// next in the queue.
    fn capture_next(&self, table: &Table, shared: Shared) -> bool {
        if self.is_settling() {
            return false;
        }
        let mut tries = CAPTURE_TRIES.min(self.replacement.len());
        while tries > 0 {
            let next = self.replacement.pop(self.charge.probation_folios());
            let Some((base, queue)) = next else { break };
            let folio = match self.catch(table, base, queue) {
                Ok(folio) => folio,
                // A stale entry: it left the queue, and does not count as a try.
                Err(Missed::Gone) => continue,
                Err(Missed::Busy) => {
                    tries -= 1;
                    continue;
                }
            };
            let Some(slot) = self.hollow_slot() else {
                self.requeue(base, queue, folio);
                break;
            };
            let outgoing = Outgoing { base, queue, folio, slot, shared };
            let captured = if self.goes_whole(&outgoing.folio) {
                self.capture_adjacent(table, outgoing)
            } else {
                self.work.reclaimer.folios_moved.add(0, 1);
                self.capture(outgoing)
            };
            if captured {
                return true;
            }
            tries -= 1;
        }
        false
    }

    /// A slot to capture into. If all slots have pages, the pages of free slots go back to the
    /// system. Above the limit no fault uses free slots, and without a hollow slot no folio could
    /// be captured ever again. (The charge can jump above the limit: an adopted mapping brings its
    /// pages along.)
    fn hollow_slot(&self) -> Option<Hollow> {
        self.mover.take_hollow().or_else(|| {
            self.release_free(usize::MAX);
            self.mover.take_hollow()
        })
    }

    /// Whether captures wait for a fork that is about to happen. On a busy machine the fork may
    /// come late, so captures go on once the charge is far above the limit.
    pub(crate) fn is_settling(&self) -> bool {
        self.work.settling.load(Relaxed) && self.headroom() > -signed(self.charge.high_bytes())
    }

    /// Locks a folio that was just popped from `queue`. A busy folio is queued again.
    fn catch<'t>(&self, table: &'t Table, base: usize, queue: Queue) -> Result<Held<'t>, Missed> {
        let lock = table.known(base).ok_or(Missed::Gone)?;
        let Some(mut folio) = lock.try_lock() else {
            self.replacement.push(base, queue);
            return Err(Missed::Busy);
        };
        folio.queued = false;
        if folio.resident.is_empty() {
            return Err(Missed::Gone);
        }
        // UNIT-4: the folio's one slot is in use.
        if folio.staged.is_some() {
            self.requeue(base, queue, folio);
            return Err(Missed::Busy);
        }
        Ok(folio)
    }

    /// Whether all units of a folio can be captured.
    fn goes_whole(&self, folio: &Folio) -> bool {
        folio.resident == self.geometry().all() && folio.refused.is_empty()
    }

    fn requeue(&self, base: usize, queue: Queue, mut folio: Held<'_>) {
        folio.queued = true;
        self.replacement.push(base, queue);
    }

    /// Captures a whole folio, and the folios above it that are also whole and next in the queue.
    fn capture_adjacent(&self, table: &Table, first: Outgoing<'_>) -> bool {
        let (start, queue, shared) = (first.base, first.queue, first.shared);
        let mut batch = [const { None }; CAPTURE_MAX];
        batch[0] = Some(first);
        let (mut count, mut part) = (1, None);
        let most = self.geometry().at_most(CAPTURE_BYTES_MAX);
        while let Some(Some(last)) = batch.get(count - 1).filter(|_| count < most) {
            let base = last.base + self.geometry().folio_bytes();
            if !self.replacement.pop_if(base, queue) {
                break;
            }
            let Ok(folio) = self.catch(table, base, queue) else { break };
            let whole = self.goes_whole(&folio);
            let slot = if whole { self.mover.take_hollow_above(&last.slot) } else { None };
            let Some(slot) = slot else {
                part = Some((base, folio));
                break;
            };
            batch[count] = Some(Outgoing { base, queue, folio, slot, shared });
            count += 1;
        }
        self.work.reclaimer.folios_moved.add(count, 1);
        let went = match &batch[0] {
            Some(first) if count > 1 => self.mover.capture_many(start, count, &first.slot),
            _ => 0,
        };
        let mut captured = false;
        for (at, outgoing) in batch.into_iter().flatten().enumerate() {
            captured |= if at < went {
                let full = self.mover.captured(outgoing.slot);
                self.staged(outgoing.base, outgoing.queue, outgoing.folio, full)
            } else {
                self.capture(outgoing)
            };
        }
        // The folio that ended the run was taken from the queue in its turn: it goes out by itself.
        if let Some((base, folio)) = part {
            match self.hollow_slot() {
                Some(slot) => {
                    if !self.goes_whole(&folio) {
                        self.work.reclaimer.folios_moved.add(0, 1);
                    }
                    captured |= self.capture(Outgoing { base, queue, folio, slot, shared });
                }
                None => self.requeue(base, queue, folio),
            }
        }
        captured
    }

    /// Captures the resident units of one folio. False: none could be captured.
    fn capture(&self, mut outgoing: Outgoing<'_>) -> bool {
        debug_assert!(outgoing.folio.staged.is_none(), "UNIT-4");
        let units = outgoing.folio.resident - outgoing.folio.refused;
        if units.is_empty() {
            self.mover.give_hollow(outgoing.slot);
            self.put_aside(outgoing.base, outgoing.queue, outgoing.folio);
            return false;
        }
        match self.mover.capture(outgoing.base, units, outgoing.slot, outgoing.shared) {
            Ok((full, refused)) => {
                self.note_refused(&mut outgoing.folio, refused, units - full.units());
                self.staged(outgoing.base, outgoing.queue, outgoing.folio, full)
            }
            Err(refusal) => {
                self.note_refused(&mut outgoing.folio, Some(refusal), units);
                self.put_aside(outgoing.base, outgoing.queue, outgoing.folio);
                false
            }
        }
    }

    /// Notes why units of a folio were not captured.
    fn note_refused(&self, folio: &mut Folio, refusal: Option<Refusal>, units: Units) {
        match refusal {
            // This is over soon, as a rule. But a system call that pins many pages does not end before it has the last
            // one. With the pinned folios in the queue, each fault would try them first, and then take out the page
            // that has just come for that call.
            Some(Refusal::Busy) => {
                add(&self.figures().reclaim_busy, units.count() as u64);
                folio.refused |= units;
                let soon = self.now_ns() + self.unpark_pause_ns(UNPARK_BUSY_NS_MIN);
                self.work.reclaimer.unpark_after_ns.fetch_min(soon, Relaxed);
            }
            Some(Refusal::Mapping) => {
                add(&self.figures().reclaim_refused, units.count() as u64);
                folio.refused |= units;
            }
            Some(Refusal::Nothing) => self.make_empty(folio, units),
            None => {}
        }
    }

    /// Queues a folio again if it has resident units after a capture. If all of them were refused,
    /// the folio is parked.
    fn put_aside(&self, base: usize, queue: Queue, mut folio: Held<'_>) {
        if folio.resident.is_empty() {
            return;
        }
        if !(folio.resident - folio.refused).is_empty() {
            self.requeue(base, queue, folio);
        } else if !folio.parked {
            folio.parked = true;
            self.replacement.park(base);
        }
    }

    /// How long the parked folios stay parked: to try them takes at most a 50th of one CPU's time, at 4 us for each
    /// page that is moved to and fro in vain.
    fn unpark_pause_ns(&self, least: u64) -> u64 {
        let cost_ns = (self.replacement.parked() * self.geometry().pages()) as u64 * 4_000;
        (50 * cost_ns).max(least)
    }

    /// Queues the parked folios again, unless that was done a short time ago.
    fn unpark(&self, table: &Table) {
        let (parked, now) = (self.replacement.parked(), self.now_ns());
        if parked == 0 || now < self.work.reclaimer.unpark_after_ns.load(Relaxed) {
            return;
        }
        let pause_ns = self.unpark_pause_ns(UNPARK_NS_MIN);
        self.work.reclaimer.unpark_after_ns.store(now + pause_ns, Relaxed);
        for _ in 0..parked {
            let Some(base) = self.replacement.unpark() else { break };
            let Some(lock) = table.known(base) else { continue };
            let mut folio = lock.lock();
            (folio.parked, folio.refused) = (false, Units::NONE);
            if !folio.queued && !folio.resident.is_empty() {
                self.requeue(base, Queue::Main, folio);
            }
        }
    }

    /// Notes that the units of `slot` are staged. The folio is queued again if other units are
    /// resident.
    fn staged(&self, base: usize, queue: Queue, mut folio: Held<'_>, slot: Full) -> bool {
        self.count_out(slot.units());
        folio.resident -= slot.units();
        folio.staged = Some(slot);
        folio.captured = self.replacement.capture_time(queue);
        self.replacement.push_staged(base);
        self.put_aside(base, queue, folio);
        true
    }

    /// Puts the staged units of the oldest staged folio into the store, and returns these units.
    /// The slot goes where [`Engine::give_slot`] sends it.
    pub(crate) fn compress_next(&self, table: &Table, cpu: usize) -> Units {
        while let Some(base) = self.replacement.pop_staged() {
            let Some(lock) = table.known(base) else { continue };
            let mut held = lock.lock();
            let folio = &mut *held;
            let Some(slot) = folio.staged.take() else { continue };
            let units = slot.units();
            let wide = self.widen(table, base, &slot, folio);
            let had = folio.copied_units();
            let Some(stored) = self.store(&slot, wide, folio, cpu) else {
                folio.staged = Some(slot);
                folio.backed = self.still_backed(folio);
                self.note_copied(folio, base, had);
                // Rejected: the folio stays staged, and is tried again when it is the oldest again.
                self.replacement.push_staged(base);
                return Units::NONE;
            };
            folio
                .note_stored(stored, self.replacement.note_stored(self.geometry().bytes_of(units)));
            folio.backed -= units - stored;
            self.copies.change(had, folio.copied_units());
            add(&self.figures().demand_stored_bytes, self.geometry().bytes_of(stored) as u64);
            drop(held);
            self.give_slot(slot);
            return units;
        }
        Units::NONE
    }

    /// Gives back a slot whose contents are no longer needed. While there is headroom a slot with all
    /// its units becomes free, and one that lacks some units leaves: its pages go back to the system
    /// together with those of other leaving slots. So does one that no fault will need soon, and every slot while most
    /// faults need less than a slot: else they would give the pages back. Without headroom all pages go back at once.
    pub(crate) fn give_slot(&self, slot: Full) {
        let over = self.headroom() < 0;
        let is_used = self.work.reclaimer.whole_share.get() > Average::ONE / 2;
        let keeps = !over && is_used && !self.has_free_to_spare();
        if keeps && slot.units() == self.geometry().all() {
            self.mover.give_free(slot);
        } else if self.mover.give_leaving(slot) || over {
            self.mover.release_leaving(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;
    use zfolio_core::ledger::signed;

    use zfolio_core::testing::Random;

    use super::{By, Reclaimed};
    use crate::config::Mode;
    use crate::engine::Engine;
    use crate::folio::Units;
    use crate::mover::Shared;

    /// Goal: a limit that is passed by far is held again, even if every slot has pages at that
    /// moment. Method: while all slots are free, adopt a mapping of six times the limit with all
    /// its pages.
    #[test]
    fn a_limit_passed_at_once_is_held_again() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(8 << 20);
        let slots: Vec<_> =
            (0..engine.mover.slots()).map(|_| engine.mover.take_scratch().unwrap()).collect();
        slots.into_iter().for_each(|slot| engine.mover.give_free(slot));
        assert!(engine.mover.take_hollow().is_none());

        let space = engine.adopted(48 << 20, |bytes| bytes.fill(7));
        assert!(engine.charge_bytes() > 5 * engine.limit_bytes());
        engine.make_room(space.bytes());
        assert!(engine.charge_bytes() <= engine.limit_bytes(), "{}", engine.charge_bytes());
        engine.unmap_adopted(&space);
    }

    /// Goal: a slot whose folio is stored stays free for a fault that needs a whole one, and leaves while most faults
    /// need less. Method: tell the share of such faults, and give a slot.
    #[test]
    fn slots_that_nobody_needs_whole_are_not_kept() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(8 << 20);
        let stays_free = |part: usize| {
            (0..256).for_each(|_| engine.work.reclaimer.whole_share.add(part, 4));
            let before = engine.mover.free_bytes();
            engine.give_slot(engine.mover.take_scratch().expect("memory"));
            engine.mover.free_bytes() > before
        };
        assert_eq!([4, 1, 3].map(stays_free), [true, false, true]);
    }

    /// Goal: if all that is staged has been touched again, other folios are captured. Method: stage as much as is to be
    /// staged, and bring it back.
    #[test]
    fn what_is_not_staged_any_more_does_not_end_reclaim() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(8 << 20);
        let space = engine.adopted(32 << 20, |bytes| bytes.fill(7));
        let table = engine.table.read();
        while engine.replacement.staged_folios() <= engine.charge.staged_target() {
            assert!(engine.capture_next(&table, Shared::Copied));
        }
        for (base, lock) in table.known_folios(space.address(), space.address() + space.bytes()) {
            engine.bring_staged(&mut lock.lock(), base, engine.geometry().all());
        }
        assert!(
            engine.replacement.staged_folios() > engine.charge.staged_target(),
            "stale entries"
        );
        assert_eq!(engine.reclaim_one(&table, 0, By::Direct), Reclaimed::Captured);
        drop(table);
        engine.unmap_adopted(&space);
    }

    /// Goal: a folio that is not whole goes out in its turn, also if it lies above a whole one. Method: four folios,
    /// the second with a unit that cannot be moved now.
    #[test]
    fn a_part_of_a_folio_waits_for_no_other_turn() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(8 << 20);
        let folio = engine.geometry().folio_bytes();
        let space = engine.adopted(4 * folio, |bytes| bytes.fill(7));
        let second = space.address() + folio;
        let table = engine.table.read();
        table.known(second).expect("adopted").lock().refused = Units::one(0);
        assert!(engine.capture_next(&table, Shared::Copied));
        let staged = |base| table.known(base).expect("adopted").lock().staged.is_some();
        assert!(staged(space.address()) && staged(second));
        drop(table);
        engine.unmap_adopted(&space);
    }

    /// Goal: a limit that cannot be held leaves the floor to the program, with a reserve for its faults
    /// (`CHG-2`). Method: three times the limit of random bytes.
    #[test]
    fn at_the_floor_there_is_a_reserve() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let engine = Engine::inline_for_test(8 << 20);
        let mut random = Random::new(1);
        let space = engine.adopted(24 << 20, |bytes| bytes.fill_with(|| random.byte()));
        engine.make_room(space.bytes());
        for _ in 0..4 {
            engine.reclaim_turn();
        }
        assert!(engine.at_floor() && engine.excess().is_some());
        assert!(engine.available_bytes() >= engine.charge.low_bytes());
        let resident = engine.figures().resident_bytes.load(Relaxed);
        assert!(resident >= 1 << 19, "{resident} stay resident");
        assert_eq!(engine.copies.count(), 0, "copies are dropped first");
        // The limit is passed by more than half of the floor: that much more stays resident.
        let most = signed(engine.charge.floor_bytes() / 2 * 3);
        let used = signed(engine.charge.resident_bytes() + engine.mover.bytes_used() as u64);
        assert_eq!(engine.headroom(), most - used);
        engine.unmap_adopted(&space);
    }
}
