//! A fault: find the unit, bring it back.
//!
//! ```text
//! look the unit up
//!   Resident   a missing page of it reads as zeros
//!   Empty      a zeroed unit, in recycled pages if there are any, else in new ones
//!   Staged     move it back (the second chance)
//!   Stored     decompress into a free slot, check the checksum, move it in
//! ```
//!
//! Pages for `Empty` and `Stored` are reserved before the unit is locked: to get them, other units may
//! have to be reclaimed, and that never happens under a unit's lock.

use zfolio_core::stats::{add, subtract};
use zfolio_core::sync::Guard;

use crate::engine::Engine;
use crate::rank;
use crate::reclaim::{By, Reclaimed};
use crate::resident::Queue;
use crate::staging::{Full, Hollow};
use crate::unit::{State, Table, Unit};

/// How a fault was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// With zeros.
    Zero,
    /// From the staging area.
    Staged,
    /// By decompression.
    Stored,
    /// Somebody else was first.
    Raced,
}

/// Units that one fault compresses before it goes over the limit. Each fault brings one back, so the
/// charge falls all the same, unless nothing shrinks; and then more would only cost more.
const FREED_MAX: usize = 4;

/// What a fault may use.
#[derive(Debug)]
pub(crate) enum Spare {
    /// Pages that nobody needs.
    Free(Full),
    /// A place for new pages, and room for them under the limit.
    Room(Hollow),
}

type Held<'a> = Guard<'a, { rank::UNIT }, Unit>;

impl Engine {
    /// Serves a fault at `address`; the thread that waits is awake when this returns.
    pub(crate) fn fault(&self, table: &Table, address: usize, cpu: usize) -> Served {
        let Some(lock) = table.get(address) else {
            self.folios.place_zero_page(address);
            return Served::Zero;
        };
        let base = table.align_down(address);
        let mut spare = None;
        loop {
            let unit = lock.lock();
            match unit.state {
                State::Unmanaged | State::Resident => {
                    // Under the unit's lock: a page of zeros must not land in a unit that has just
                    // been captured (UNIT-1).
                    let was_there = self.folios.place_zero_page(address);
                    drop(unit);
                    self.give_spare(spare);
                    return if was_there { Served::Raced } else { Served::Zero };
                }
                State::Staged(_) => {
                    self.bring_staged(unit, base);
                    self.give_spare(spare);
                    return Served::Staged;
                }
                State::Empty | State::Stored if spare.is_none() => {
                    drop(unit);
                    spare = Some(self.reserve(table, cpu));
                }
                State::Empty => {
                    self.bring_zeros(unit, base, spare);
                    return Served::Zero;
                }
                State::Stored => {
                    self.bring_stored(unit, base, spare, cpu);
                    return Served::Stored;
                }
            }
        }
    }

    /// Brings a unit back that nobody waits for yet. False if it is not staged or stored.
    pub(crate) fn prefetch_unit(&self, table: &Table, base: usize, cpu: usize) -> bool {
        let Some(lock) = table.get(base) else { return false };
        let wanted = |unit: &Unit| matches!(unit.state, State::Stored | State::Staged(_));
        if !lock.try_lock().is_some_and(|unit| wanted(&unit)) {
            return false;
        }
        let spare = Some(self.reserve(table, cpu));
        let Some(mut unit) = lock.try_lock() else {
            self.give_spare(spare);
            return false;
        };
        match unit.state {
            State::Stored => {
                unit.prefetched = true;
                self.bring_stored(unit, base, spare, cpu);
            }
            State::Staged(_) => {
                unit.prefetched = true;
                self.give_spare(spare);
                self.bring_staged(unit, base);
            }
            _ => {
                self.give_spare(spare);
                return false;
            }
        }
        add(&self.figures().prefetch_units, 1);
        true
    }

    fn bring_staged(&self, mut unit: Held<'_>, base: usize) {
        if let State::Staged(slot) = std::mem::replace(&mut unit.state, State::Resident) {
            let hollow = self.folios.place(&self.staging, slot, base);
            self.staging.give_hollow(hollow);
        }
        self.note_resident(&mut unit, base, Queue::Main);
    }

    fn bring_zeros(&self, mut unit: Held<'_>, base: usize, spare: Option<Spare>) {
        let queue = self.queue_of(&unit, spare.as_ref());
        let hollow = match spare {
            Some(Spare::Free(mut slot)) => {
                self.staging.unit_mut(&mut slot).fill(0);
                Some(self.folios.place(&self.staging, slot, base))
            }
            Some(Spare::Room(hollow)) => {
                self.folios.place_zeros(base);
                Some(hollow)
            }
            None => unreachable!("the caller reserved"),
        };
        hollow.into_iter().for_each(|slot| self.staging.give_hollow(slot));
        unit.state = State::Resident;
        self.note_resident(&mut unit, base, queue);
    }

    fn bring_stored(&self, mut unit: Held<'_>, base: usize, spare: Option<Spare>, cpu: usize) {
        let queue = self.queue_of(&unit, spare.as_ref());
        let mut slot = self.fill_slot(spare.expect("the caller reserved"), base);
        self.load_copy(&mut unit, base, &mut slot, cpu);
        let hollow = self.folios.place(&self.staging, slot, base);
        self.staging.give_hollow(hollow);
        unit.state = State::Resident;
        self.note_resident(&mut unit, base, queue);
    }

    /// Where a unit that comes back joins: see [`crate::resident`].
    fn queue_of(&self, unit: &Unit, spare: Option<&Spare>) -> Queue {
        let room = matches!(spare, Some(Spare::Room(_)));
        let soon =
            matches!(unit.state, State::Stored) && self.resident.came_back_soon(unit.captured);
        if room || soon { Queue::Main } else { Queue::Probation }
    }

    /// Decompresses a stored unit's copy into `slot`; drops the copy if it is not worth keeping.
    pub(crate) fn load_copy(&self, unit: &mut Unit, base: usize, slot: &mut Full, cpu: usize) {
        let copy = unit.copy.as_ref().expect("UNIT-2: a stored unit has a copy");
        if let Err(error) = self.zswap.load(cpu, copy, self.staging.unit_mut(slot)) {
            add(&self.figures().decompress_fail, 1);
            crate::fatal::corrupt(base, self.unit().bytes(), error);
        }
        if !self.keep_copies() {
            self.drop_copy(unit);
        }
        subtract(&self.figures().demand_stored_bytes, self.unit().bytes() as u64);
    }

    /// Counts and queues a unit that has become resident.
    pub(crate) fn note_resident(&self, unit: &mut Unit, base: usize, queue: Queue) {
        self.count_in();
        if !unit.queued {
            unit.queued = true;
            self.resident.push(base, queue);
        }
    }

    /// Whether a stored copy is worth its memory once the unit is resident: while at least a quarter
    /// of the limit is resident data.
    fn keep_copies(&self) -> bool {
        self.resident_bytes.load(std::sync::atomic::Ordering::Relaxed)
            >= self.config.limit_bytes / 4
    }

    /// Drops the stored copy of a unit that is no longer stored only.
    pub(crate) fn drop_copy(&self, unit: &mut Unit) {
        if let Some(copy) = unit.copy.take() {
            self.zswap.invalidate(copy, self.figures());
            add(&self.figures().copies_dropped, 1);
        }
    }

    /// A slot with pages.
    pub(crate) fn fill_slot(&self, spare: Spare, base: usize) -> Full {
        match spare {
            Spare::Free(slot) => slot,
            Spare::Room(hollow) => self
                .folios
                .fill(&self.staging, hollow)
                .unwrap_or_else(|error| crate::fatal::out_of_memory(base, error)),
        }
    }

    fn give_spare(&self, spare: Option<Spare>) {
        match spare {
            Some(Spare::Free(slot)) => self.staging.give_free(slot),
            Some(Spare::Room(slot)) => self.staging.give_hollow(slot),
            None => {}
        }
    }

    /// Makes sure of pages for one unit: a free slot, or a hollow one and room for new pages.
    ///
    /// Below the low watermark the background reclaimer is woken; at the limit the caller reclaims.
    pub(crate) fn reserve(&self, table: &Table, cpu: usize) -> Spare {
        let unit_bytes = self.unit().bytes() as u64;
        if self.available_bytes() < self.low_bytes {
            self.ring_reclaimer();
        }
        let mut freed = 0;
        while freed < FREED_MAX {
            if self.charge_bytes() <= self.config.limit_bytes {
                if let Some(slot) = self.staging.take_free() {
                    return Spare::Free(slot);
                }
                if self.room_bytes() >= unit_bytes {
                    if let Some(slot) = self.staging.take_hollow() {
                        return Spare::Room(slot);
                    }
                }
            }
            if self.at_floor() {
                break;
            }
            match self.reclaim_one(table, cpu, By::Direct) {
                Reclaimed::Captured => {}
                Reclaimed::Freed => freed += 1,
                Reclaimed::Nothing => break,
            }
        }
        self.over_limit();
        self.any_slot(table, cpu)
    }

    /// A slot, whatever the limit says.
    pub(crate) fn any_slot(&self, table: &Table, cpu: usize) -> Spare {
        loop {
            if let Some(slot) = self.staging.take_free() {
                return Spare::Free(slot);
            }
            if let Some(slot) = self.staging.take_hollow() {
                return Spare::Room(slot);
            }
            // Every slot holds a staged unit, or is in the hands of a thread that is about to be done.
            if !self.compress_next(table, cpu) {
                std::thread::yield_now();
            }
        }
    }
}
