//! Reclaim: the old end of the resident queue goes to the staging area, the old end of the staging
//! area into the store.
//!
//! ```text
//! capture: pop the oldest resident unit, move it to a hollow slot         -> Staged
//! compress: pop the oldest staged unit; if its checksum is its copy's it
//!           is clean, else compress it; its slot is free                  -> Stored
//! ```
//!
//! Between the two a unit has its second chance: a fault moves it back for the price of a move. The
//! background thread keeps `available` between the low and the high watermark; a fault that finds
//! nothing available reclaims for itself.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zfolio_core::stats::add;
use zfolio_core::zswap::Checksum;
use zfolio_sys::{cpu, futex};

use crate::engine::Engine;
use crate::folio::Refusal;
use crate::unit::{State, Table};

/// Who reclaims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// A thread that waits for memory.
    Direct,
    /// The background thread.
    Background,
}

/// What one turn of reclaim did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reclaimed {
    /// A unit is staged; no memory is free yet.
    Captured,
    /// A unit is stored; its pages are free.
    Freed,
    /// There is nothing left to take.
    Nothing,
}

/// Units looked at in search of one that can be captured, before reclaim says that there is none.
const CAPTURE_TRIES: usize = 64;

/// How often the background thread compares its count with the kernel's.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

impl Engine {
    /// Takes one unit a step further out.
    pub(crate) fn reclaim_one(&self, table: &Table, cpu: usize, by: By) -> Reclaimed {
        let captured = self.capture_next(table);
        if captured && self.staging.staged_units() <= self.staged_target {
            return Reclaimed::Captured;
        }
        if self.compress_next(table, cpu) {
            let figures = self.figures();
            add(
                if by == By::Direct {
                    &figures.reclaim_direct
                } else {
                    &figures.reclaim_background
                },
                1,
            );
            return Reclaimed::Freed;
        }
        if captured { Reclaimed::Captured } else { Reclaimed::Nothing }
    }

    /// Moves the oldest resident unit that can be moved to the staging area.
    fn capture_next(&self, table: &Table) -> bool {
        let mut slot = match self.staging.take_hollow() {
            Some(slot) => slot,
            None => return false,
        };
        for _ in 0..CAPTURE_TRIES.min(self.resident.len()) {
            let Some((address, queue)) = self.resident.pop() else { break };
            let Some(lock) = table.get(address) else { continue };
            let Some(mut unit) = lock.try_lock() else {
                // Somebody brings it back right now: it is young.
                self.resident.push(address, queue);
                continue;
            };
            unit.queued = false;
            if !matches!(unit.state, State::Resident) {
                continue;
            }
            unit.prefetched = false;
            match self.folios.capture(&self.staging, address, slot) {
                Ok(full) => {
                    unit.state = State::Staged(full);
                    unit.captured = self.resident.capture_time(queue);
                    self.count_out();
                    self.staging.push_staged(address);
                    return true;
                }
                Err((hollow, refusal)) => {
                    slot = hollow;
                    match refusal {
                        Refusal::Nothing => {
                            self.count_out();
                            self.drop_copy(&mut unit);
                            unit.state = State::Empty;
                            continue;
                        }
                        Refusal::Busy => add(&self.figures().reclaim_busy, 1),
                        Refusal::Mapping => add(&self.figures().reclaim_refused, 1),
                    }
                    unit.queued = true;
                    self.resident.push(address, queue);
                }
            }
        }
        self.staging.give_hollow(slot);
        false
    }

    /// Puts the oldest staged unit into the store; its slot is free, or given back above the limit.
    pub(crate) fn compress_next(&self, table: &Table, cpu: usize) -> bool {
        while let Some(address) = self.staging.pop_staged() {
            let Some(lock) = table.get(address) else { continue };
            // try_lock: `any_slot` comes here with a unit locked.
            let Some(mut unit) = lock.try_lock() else {
                self.staging.push_staged(address);
                return false;
            };
            let State::Staged(slot) = &unit.state else { continue };
            let contents = self.staging.unit(slot);
            let checksum = Checksum::of(contents);
            let figures = self.figures();
            if unit.copy.as_ref().is_some_and(|copy| copy.checksum() == checksum) {
                add(&figures.reclaim_clean, 1);
            } else {
                let mut entry = None;
                self.zswap.store(cpu, &[contents], &[checksum], figures, &mut |_, stored| {
                    entry = stored.ok()
                });
                let Some(entry) = entry else {
                    // Refused: it stays staged, and is tried again when it is the oldest again.
                    drop(unit);
                    self.staging.push_staged(address);
                    return false;
                };
                add(entry.reclaimed(figures), 1);
                if let Some(old) = unit.copy.replace(entry) {
                    self.zswap.invalidate(old, figures);
                }
            }
            if let State::Staged(slot) = std::mem::replace(&mut unit.state, State::Stored) {
                add(&figures.demand_stored_bytes, self.unit().bytes() as u64);
                drop(unit);
                if self.charge_bytes() > self.config.limit_bytes {
                    self.staging.give_hollow(self.folios.release(&self.staging, slot));
                } else {
                    self.staging.give_free(slot);
                }
            }
            return true;
        }
        false
    }

    /// Wakes the background thread.
    pub(crate) fn ring_reclaimer(&self) {
        if self.reclaimer_idle.swap(false, Relaxed) {
            self.reclaim_bell.fetch_add(1, Relaxed);
            futex::wake(&self.reclaim_bell, 1);
        }
    }

    /// The background thread: until the engine stops.
    pub fn reclaim_in_background(&self) {
        while !self.stopping.load(Relaxed) {
            let bell = self.reclaim_bell.load(Relaxed);
            self.sample();
            if self.available_bytes() < self.low_bytes {
                self.reclaim_to_high();
            }
            self.reclaimer_idle.store(true, Relaxed);
            // A bell between the look above and here is heard at the next sample, 20 ms later at most;
            // who needs memory meanwhile reclaims for itself.
            futex::wait(&self.reclaim_bell, bell, Some(SAMPLE_INTERVAL));
        }
    }

    fn reclaim_to_high(&self) {
        let mut turns = 0;
        let wanted = || self.available_bytes() < self.high_bytes && !self.at_floor();
        while wanted() && !self.stopping.load(Relaxed) {
            // Not held across units: who changes a mapping waits for one unit at most.
            let table = self.table.read();
            if self.reclaim_one(&table, cpu::current(), By::Background) == Reclaimed::Nothing {
                return;
            }
            drop(table);
            turns += 1;
            if turns % 64 == 0 {
                self.sample();
                // Nothing compresses: the limit cannot be held, and more of the same does not help.
                if turns > 4 * self.staging.slots() {
                    return;
                }
            }
        }
    }
}
