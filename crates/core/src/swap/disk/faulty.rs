//! A disk in memory that fails, dawdles and damages as it is told to. For tests.
//!
//! Transfers end in any order, some of them late. One that is under way is carried out at any moment between its
//! begin and its end, as with a device that reads and writes memory when it likes. So the disk is also a judge:
//! it panics when a slot is written while another transfer of it is under way (`SWAP-1`), or while the disk is
//! another process's (`SWAP-5`).
//!
//! All of it follows from the seed and from what is set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Direction, Disk, Error, RANK_DISK, SLOT_BYTES, Slot, Transfer};
use crate::swap::location::SLOTS_MAX;
use crate::sync::Mutex;
use crate::testing::Random;

/// What goes wrong. A number says how many of the next transfers of that kind are hit.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Writes that fail since the disk is full; some of their slots are written.
    pub full: usize,
    /// Transfers that fail since the system is busy.
    pub busy: usize,
    /// Writes that fail since the medium does; some of their slots are written.
    pub failed_writes: usize,
    /// Reads that fail since the medium does.
    pub failed_reads: usize,
    /// Reads that find the file shorter than it was.
    pub short_reads: usize,
    /// Reads in which one bit is other than on the medium.
    pub flipped: usize,
    /// Reads in which one slot has the bytes of another.
    pub misplaced: usize,
    /// Reads in which one slot has the bytes that it had before it was last written.
    pub replayed: usize,
    /// Reads whose damage stays: the medium has what was returned.
    pub is_lasting: bool,
    /// What was damaged in a read comes whole in the next ones, until it is written again.
    pub is_once: bool,
    /// The file ends here: reads beyond fail, writes beyond find no room.
    pub end: Option<u64>,
    /// So many transfers are accepted at once; 0: any number.
    pub depth: usize,
    /// So many more discards are accepted; `None`: any number.
    pub discards: Option<usize>,
    /// Every transfer fails: the device is gone.
    pub is_gone: bool,
    /// Nothing ends until somebody pauses.
    pub holds: bool,
    /// All that is under way ends at the next poll; else any part of it does.
    pub is_prompt: bool,
    /// A write or a discard is an error of the caller's (`SWAP-5`).
    pub is_frozen: bool,
}

/// The disk. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct Faulty(Arc<Mutex<RANK_DISK, Inner>>);

#[derive(Debug)]
struct Inner {
    faults: Faults,
    random: Random,
    kept: BTreeMap<u64, Box<Slot>>,
    /// What each slot had before it was last written.
    before: BTreeMap<u64, Box<Slot>>,
    /// Slots whose bytes were returned other than they were written, since they were written; or not at all.
    hurt: BTreeSet<u64>,
    /// Slots that a child of `fork` may read (`SWAP-5`).
    guarded: BTreeSet<u64>,
    under_way: Vec<UnderWay>,
    transfers: usize,
    stretch_slots: u32,
}

#[derive(Debug)]
struct UnderWay {
    transfer: Transfer,
    /// Its end was decided: it is carried out.
    is_done: bool,
}

impl Faulty {
    /// An empty disk.
    #[must_use]
    pub fn new(seed: u64) -> Faulty {
        let inner = Inner {
            faults: Faults::default(),
            random: Random::new(seed),
            kept: BTreeMap::new(),
            before: BTreeMap::new(),
            hurt: BTreeSet::new(),
            guarded: BTreeSet::new(),
            under_way: Vec::new(),
            transfers: 0,
            stretch_slots: SLOTS_MAX,
        };
        Faulty(Arc::new(Mutex::new(inner)))
    }

    /// The disk has stretches of so many slots.
    #[must_use]
    pub fn with_stretches(self, stretch_slots: u32) -> Faulty {
        self.0.lock().stretch_slots = stretch_slots;
        self
    }

    /// Changes what goes wrong.
    pub fn break_it(&self, how: impl FnOnce(&mut Faults)) {
        how(&mut self.0.lock().faults);
    }

    /// To write or discard one of these slots is an error of the caller's from now on (`SWAP-5`).
    pub fn guard(&self, slots: impl Iterator<Item = u64>) {
        self.0.lock().guarded.extend(slots);
    }

    /// No slot is guarded.
    pub fn unguard(&self) {
        self.0.lock().guarded.clear();
    }

    /// Nothing goes wrong from now on. What is damaged stays so.
    pub fn behave(&self) {
        self.break_it(|faults| {
            let Faults { end, is_frozen, is_prompt, .. } = *faults;
            *faults = Faults { end, is_frozen, is_prompt, ..Faults::default() };
        });
    }

    /// The same contents for another process: another disk, with nothing under way.
    ///
    /// # Panics
    ///
    /// If anything is under way.
    #[must_use]
    pub fn fork(&self, seed: u64) -> Faulty {
        let inner = self.0.lock();
        assert!(inner.under_way.is_empty(), "a fork while transfers are under way");
        let copy = Inner {
            guarded: BTreeSet::new(),
            faults: inner.faults.clone(),
            random: Random::new(seed),
            kept: inner.kept.clone(),
            before: inner.before.clone(),
            hurt: inner.hurt.clone(),
            under_way: Vec::new(),
            transfers: 0,
            stretch_slots: inner.stretch_slots,
        };
        Faulty(Arc::new(Mutex::new(copy)))
    }

    /// Whether a slot may rightly be unreadable.
    #[must_use]
    pub fn has_hurt(&self, slot: u64) -> bool {
        self.0.lock().hurt.contains(&slot)
    }

    /// The bytes of a slot on the medium, if it was ever written, and not discarded since.
    #[must_use]
    pub fn slot(&self, slot: u64) -> Option<[u8; SLOT_BYTES]> {
        self.0.lock().kept.get(&slot).map(|slot| slot.0)
    }

    /// What the slot had before it was last written.
    #[must_use]
    pub fn slot_before(&self, slot: u64) -> Option<[u8; SLOT_BYTES]> {
        self.0.lock().before.get(&slot).map(|slot| slot.0)
    }

    /// Changes the bytes of a slot on the medium.
    pub fn tamper(&self, slot: u64, how: impl FnOnce(&mut [u8; SLOT_BYTES])) {
        let mut inner = self.0.lock();
        how(&mut inner.kept.entry(slot).or_insert_with(|| Box::new(Slot([0; SLOT_BYTES]))).0);
        inner.hurt.insert(slot);
    }

    /// Slots that hold anything.
    #[must_use]
    pub fn slots_kept(&self) -> usize {
        self.0.lock().kept.len()
    }

    /// Transfers that were begun.
    #[must_use]
    pub fn transfers(&self) -> usize {
        self.0.lock().transfers
    }
}

/// Takes one from the number.
fn hits(count: &mut usize) -> bool {
    let is_hit = *count > 0;
    *count -= usize::from(is_hit);
    is_hit
}

impl Inner {
    /// Carries a transfer out, as the faults say.
    fn run(&mut self, transfer: &mut Transfer) {
        transfer.result = match transfer.direction {
            Direction::Write => self.write(transfer),
            Direction::Read => self.read(transfer),
        };
        let failed_for_good = matches!(transfer.result, Err(Error::Failed { errno: 0 }));
        if failed_for_good && transfer.direction == Direction::Read {
            self.hurt.extend(transfer.first..transfer.first + transfer.count as u64);
        }
    }

    fn write(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let last = transfer.first + transfer.count as u64;
        let error = if self.faults.is_gone || hits(&mut self.faults.failed_writes) {
            Some(Error::Failed { errno: 5 })
        } else if self.faults.end.is_some_and(|end| last > end) || hits(&mut self.faults.full) {
            Some(Error::Full)
        } else {
            hits(&mut self.faults.busy).then_some(Error::Busy)
        };
        // Of one that fails any part may have been written.
        let written = match error {
            Some(_) => self.random.below(transfer.count),
            None => transfer.count,
        };
        for (slot, bytes) in (transfer.first..last).zip(transfer.buffer.slots()).take(written) {
            if let Some(before) = self.kept.insert(slot, Box::new(*bytes)) {
                self.before.insert(slot, before);
            }
            self.hurt.remove(&slot);
        }
        error.map_or(Ok(()), Err)
    }

    fn read(&mut self, transfer: &mut Transfer) -> Result<(), Error> {
        let slots = transfer.first..transfer.first + transfer.count as u64;
        if self.faults.is_gone || hits(&mut self.faults.failed_reads) {
            return Err(Error::Failed { errno: 5 });
        }
        let is_beyond = self.faults.end.is_some_and(|end| slots.end > end);
        if is_beyond || hits(&mut self.faults.short_reads) {
            return Err(Error::Failed { errno: 0 });
        }
        if hits(&mut self.faults.busy) {
            return Err(Error::Busy);
        }
        let buffer = &mut transfer.buffer.slots_mut()[..transfer.count];
        for (slot, bytes) in slots.clone().zip(&mut *buffer) {
            let kept = self.kept.get(&slot);
            *bytes =
                **kept.unwrap_or_else(|| panic!("slot {slot}, which was not written, is read"));
        }
        let is_spared = self.faults.is_once && self.hurt.range(slots.clone()).next().is_some();
        let at = self.random.below(transfer.count);
        if !is_spared {
            self.damage(slots.start + at as u64, &mut buffer[at]);
        }
        Ok(())
    }

    /// Damages what was read of a slot.
    fn damage(&mut self, slot: u64, bytes: &mut Slot) {
        let other = if hits(&mut self.faults.flipped) {
            let bit = self.random.below(SLOT_BYTES * 8);
            let mut other = *bytes;
            other.0[bit / 8] ^= 1 << (bit % 8);
            other
        } else if hits(&mut self.faults.misplaced) {
            let nth = self.random.below(self.kept.len().max(2) - 1);
            let mut others = self.kept.iter().filter(|(other, _)| **other != slot);
            others.nth(nth).map_or(*bytes, |(_, other)| **other)
        } else if hits(&mut self.faults.replayed) {
            self.before.get(&slot).map_or(*bytes, |before| **before)
        } else {
            return;
        };
        if other.0 != bytes.0 {
            *bytes = other;
            self.hurt.insert(slot);
            if self.faults.is_lasting {
                self.kept.insert(slot, Box::new(other));
            }
        }
    }

    /// Whether a transfer of one of these slots is under way that a write must not meet.
    fn meets(&self, first: u64, count: u64, is_write: bool) -> bool {
        self.under_way.iter().any(|UnderWay { transfer: other, .. }| {
            let apart = first + count <= other.first || other.first + other.count as u64 <= first;
            !apart && (is_write || other.direction == Direction::Write)
        })
    }

    fn is_guarded(&self, slots: std::ops::Range<u64>) -> bool {
        self.faults.is_frozen || self.guarded.range(slots).next().is_some()
    }

    /// Ends one transfer, if there is any.
    fn end_one(&mut self) -> Option<Transfer> {
        if self.under_way.is_empty() {
            return None;
        }
        let nth = self.random.below(self.under_way.len());
        let UnderWay { mut transfer, is_done } = self.under_way.swap_remove(nth);
        if !is_done {
            self.run(&mut transfer);
        }
        Some(transfer)
    }
}

impl Disk for Faulty {
    fn begin(&self, mut transfer: Transfer) -> Result<(), Transfer> {
        let mut inner = self.0.lock();
        let is_write = transfer.direction == Direction::Write;
        assert!((1..=transfer.buffer.slots().len()).contains(&transfer.count), "{transfer:?}");
        let slots = transfer.first..transfer.first + transfer.count as u64;
        assert!(!(is_write && inner.is_guarded(slots)), "SWAP-5: a write");
        let meets = inner.meets(transfer.first, transfer.count as u64, is_write);
        assert!(!meets, "SWAP-1: slot {} on its way twice", transfer.first);
        let depth = inner.faults.depth;
        if depth > 0 && inner.under_way.len() >= depth {
            return Err(transfer);
        }
        inner.transfers += 1;
        let is_done = inner.random.below(2) == 0;
        if is_done {
            inner.run(&mut transfer);
        }
        inner.under_way.push(UnderWay { transfer, is_done });
        Ok(())
    }

    fn flush(&self) {}

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        let mut inner = self.0.lock();
        let under_way = inner.under_way.len();
        let mut most = match inner.faults {
            Faults { holds: true, .. } => 0,
            Faults { is_prompt: true, .. } => under_way,
            _ => inner.random.below(under_way + 1),
        };
        while most > 0 {
            most -= 1;
            let Some(transfer) = inner.end_one() else { break };
            drop(inner);
            each(transfer);
            inner = self.0.lock();
        }
    }

    /// Whoever waits would wait for ever.
    fn pause(&self) {
        self.0.lock().faults.holds = false;
        crate::sync::pause();
    }

    fn discard(&self, first: u64, count: u64) {
        let mut inner = self.0.lock();
        assert!(!inner.is_guarded(first..first + count), "SWAP-5: a discard");
        assert!(!inner.meets(first, count, true), "SWAP-1: slot {first} is discarded on its way");
        if let Some(room) = &mut inner.faults.discards {
            *room = room.checked_sub(1).expect("a discard that the disk would leave out");
        }
        (first..first + count).for_each(|slot| _ = inner.kept.remove(&slot));
    }

    fn discard_room(&self) -> usize {
        self.0.lock().faults.discards.unwrap_or(usize::MAX)
    }

    fn stretch_slots(&self) -> u32 {
        self.0.lock().stretch_slots
    }
}
