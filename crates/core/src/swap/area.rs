//! One area: a disk, what is known of its slots, and the key that they are sealed with.
//!
//! # Concurrency
//!
//! All of it is shared. Which slots are in use is the allocator's business (`slots`), what is in them the
//! table's; the rest are numbers and flags of their own.

use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};

use super::bad::Bad;
use super::disk::{Disk, SLOT_BYTES, Transfer};
use super::location::AreaId;
use super::seal::{Seal, Tampered};
use super::slots::Slots;
use super::table::{State, Table};
use crate::stats::{add, subtract};

/// See the module.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) id: AreaId,
    pub(super) priority: i32,
    pub(super) disk: Box<dyn Disk>,
    /// [`Disk::stretch_slots`].
    pub(super) stretch_slots: u32,
    pub(super) slots: Slots,
    seal: Seal,
    table: Table,
    /// It is another process's, and nothing is written there (`SWAP-5`).
    is_frozen: AtomicBool,
    /// Children may read what was there when they were forked (`SWAP-5`).
    is_shared: AtomicBool,
    /// Slots that are kept for them alone.
    slots_left: AtomicU64,
    /// It is on its way to its end.
    is_draining: AtomicBool,
    /// The last write failed: others come first.
    rests: AtomicBool,
    /// A transfer or a discard was begun since the disk was last flushed.
    is_dirty: AtomicBool,
    /// Objects that are there, and their bytes.
    pub(super) objects: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// Slots that no write reached, which are left alone.
    pub(super) slots_bad: AtomicU64,
    bad: Bad,
    /// A write has failed since the area was made.
    had_bad: AtomicBool,
    /// Transfers that were made and have not ended.
    pub(super) in_flight: AtomicUsize,
}

impl Area {
    /// An area of `slots` slots. Allocates.
    pub(super) fn new(
        id: AreaId,
        disk: Box<dyn Disk>,
        slots: u32,
        priority: i32,
        seal: Seal,
    ) -> Area {
        Area {
            id,
            priority,
            stretch_slots: disk.stretch_slots(),
            disk,
            // Writes are packed under one lock, so they come from one processor at a time.
            slots: Slots::new(slots, 1),
            seal,
            table: Table::new(),
            is_frozen: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            slots_left: AtomicU64::new(0),
            is_draining: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            is_dirty: AtomicBool::new(false),
            objects: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            slots_bad: AtomicU64::new(0),
            bad: Bad::new(),
            had_bad: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
        }
    }

    pub(super) fn is_frozen(&self) -> bool {
        // Relaxed: a fork waits until everybody holds still.
        self.is_frozen.load(Relaxed)
    }

    pub(super) fn freeze(&self) {
        self.is_frozen.store(true, Relaxed);
        self.is_shared.store(false, Relaxed);
    }

    pub(super) fn is_shared(&self) -> bool {
        self.is_shared.load(Relaxed)
    }

    /// A child may read from now on what is there.
    pub(super) fn share(&self) {
        self.is_shared.store(true, Relaxed);
        self.table.each(|_, entry| entry.share());
    }

    /// No child has the disk any more.
    pub(super) fn unshare(&self) {
        self.is_shared.store(false, Relaxed);
        let mut free = 0..0;
        self.table.each(|slot, entry| {
            if !entry.unshare() {
                return;
            }
            self.slots_left.fetch_sub(1, Relaxed);
            if free.end != slot {
                self.give_back(std::mem::replace(&mut free, slot..slot));
            }
            free.end = slot + 1;
        });
        self.give_back(free);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed)
    }

    pub(super) fn set_draining(&self, is_draining: bool) {
        if is_draining {
            self.slots.begin_drain();
        } else {
            self.slots.end_drain();
        }
        self.is_draining.store(is_draining, Relaxed);
    }

    /// In a child of `fork`: locks the memory of the key.
    pub(super) fn lock_key_again(&self) -> bool {
        self.seal.lock_again()
    }

    pub(super) fn rests(&self) -> bool {
        self.rests.load(Relaxed)
    }

    /// Whether slots may be taken.
    pub(super) fn is_open(&self) -> bool {
        !self.is_frozen() && !self.is_draining()
    }

    /// Whether the owner may close it: it is not used any more, and nothing is there or on its way.
    pub(super) fn is_done(&self) -> bool {
        // Acquire: pairs with the AcqRel in forget(): what is done with the slots comes after.
        !self.is_open() && self.objects.load(Acquire) == 0 && self.in_flight.load(Acquire) == 0
    }

    /// Slots in use, without the bad ones.
    pub(super) fn slots_used(&self) -> u64 {
        u64::from(self.slots.used()).saturating_sub(self.slots_bad.load(Relaxed))
    }

    /// Slots that are kept for children alone.
    pub(super) fn slots_left(&self) -> u64 {
        let left = self.slots_left.load(Relaxed);
        // It may be below zero for a moment: unshare() was faster than forget().
        if left > u64::MAX / 2 { 0 } else { left }
    }

    /// Takes `1 << order` slots, and makes their part of the table. Allocates at the first use of a cluster.
    pub(super) fn take(&self, order: u32) -> Option<Range<u32>> {
        let first = self.slots.take(0, order)?;
        let slots = first..first + (1 << order);
        if !self.table.prepare(slots.clone()) {
            // As in an area that is full.
            self.give_back(slots);
            return None;
        }
        Some(slots)
    }

    /// Gives slots back that were taken and not written.
    pub(super) fn give_back(&self, slots: Range<u32>) {
        if !slots.is_empty() {
            self.slots.free(slots.start, slots.end - slots.start);
        }
    }

    /// Seals the contents of a slot, which `live` objects touch. The caller has the slot.
    pub(super) fn seal(&self, slot: u32, live: u64, bytes: &mut [u8; SLOT_BYTES]) {
        let entry = self.table.entry(slot);
        let generation = entry.begin(live);
        entry.set_tag(self.seal.seal(slot, generation, bytes));
    }

    /// Opens what was read of a slot (`SWAP-4`).
    pub(super) fn open(&self, slot: u32, bytes: &mut [u8; SLOT_BYTES]) -> Result<(), Tampered> {
        let (generation, tag) = self.table.entry(slot).proof();
        self.seal.open(slot, generation, tag, bytes)
    }

    /// Hands a transfer to the disk, or has it back.
    pub(super) fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        assert!(
            !self.is_frozen() || transfer.direction == super::disk::Direction::Read,
            "SWAP-5: a write to a parent's area"
        );
        let last = transfer.first + transfer.count as u64 - 1;
        let stretch = u64::from(self.stretch_slots);
        assert_eq!(transfer.first / stretch, last / stretch, "DISK-4: a transfer of two stretches");
        self.disk.begin(transfer)?;
        self.is_dirty.store(true, Relaxed);
        Ok(())
    }

    /// Sends what was begun on its way.
    pub(super) fn flush(&self) {
        if self.is_dirty.swap(false, Relaxed) {
            self.disk.flush();
        }
    }

    /// These slots were written, and `objects` with `bytes` are there.
    pub(super) fn written(&self, slots: Range<u32>, objects: usize, bytes: usize) {
        slots.clone().for_each(|slot| self.table.entry(slot).written());
        add(&self.objects, objects as u64);
        add(&self.bytes, bytes as u64);
        self.rests.store(false, Relaxed);
        self.try_bad_again(&slots);
    }

    /// After a write that went well, of these slots, or one that found none: bad slots are free again, if it is time.
    pub(super) fn try_bad_again(&self, written: &Range<u32>) {
        if !self.had_bad.load(Relaxed) {
            return;
        }
        for slots in self.bad.step(written) {
            slots.clone().for_each(|slot| self.table.entry(slot).try_again());
            subtract(&self.slots_bad, slots.len() as u64);
            self.give_back(slots);
        }
    }

    /// These slots were not written. They are used again; bad ones not soon ([`Bad`]).
    pub(super) fn not_written(&self, slots: Range<u32>, is_bad: bool) {
        slots.clone().for_each(|slot| self.table.entry(slot).not_written(is_bad));
        if is_bad {
            add(&self.slots_bad, slots.len() as u64);
            self.had_bad.store(true, Relaxed);
            self.bad.add(slots);
        } else {
            self.give_back(slots);
        }
        self.rests.store(true, Relaxed);
    }

    /// An object of `length` bytes that touches these slots is not needed any more.
    pub(super) fn forget(&self, slots: Range<u32>, length: usize) {
        let mut free = slots.start..slots.start;
        for slot in slots {
            let state = self.table.entry(slot).forget();
            if state == State::Free {
                free.end = slot + 1;
            } else {
                // Relaxed: a count. unshare() may be faster.
                self.slots_left.fetch_add(u64::from(state == State::Left), Relaxed);
                self.give_back(free);
                free = slot + 1..slot + 1;
            }
        }
        self.give_back(free);
        subtract(&self.bytes, length as u64);
        // AcqRel: pairs with the Acquire in is_done().
        let before = self.objects.fetch_sub(1, AcqRel);
        assert!(before > 0, "more objects end than were written");
    }

    /// Lets the disk forget clusters that nobody uses: few at a time, since others may wait for the caller, and no more
    /// than it takes. One thread at a time calls this. Returns how many.
    pub(super) fn punch(&self) -> usize {
        const AT_ONCE: usize = 4;
        if self.is_frozen() {
            return 0;
        }
        let mut clusters = [const { 0..0 }; AT_ONCE];
        let mut count = 0;
        self.slots.take_discards(AT_ONCE.min(self.disk.discard_room()), &mut |cluster| {
            clusters[count] = cluster;
            count += 1;
        });
        for cluster in clusters.into_iter().take(count) {
            self.disk.discard(u64::from(cluster.start), cluster.len() as u64);
            self.slots.discarded(cluster);
        }
        if count > 0 {
            // The next flush sends that on its way, also if no transfer is begun.
            self.is_dirty.store(true, Relaxed);
        }
        count
    }

    /// Whether objects are in this slot.
    pub(super) fn is_live(&self, slot: u32) -> bool {
        self.table.find(slot).is_some_and(|entry| entry.word().is_live())
    }

    /// Bytes of the table.
    pub(super) fn table_bytes(&self) -> usize {
        self.table.memory_bytes()
    }

    /// From now on there is, or is not, memory for tables of clusters. Returns how often there was none.
    #[cfg(any(test, fuzzing))]
    pub(super) fn refuse_memory(&self, refuses: bool) -> u64 {
        self.table.refuses.store(refuses, Relaxed);
        self.slots.refuse_memory(refuses)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::super::areas::NewArea;
    use super::super::disk::faulty::Faulty;
    use super::super::tests::new_area;
    use super::{Area, AreaId};

    fn area(slots: u32) -> Area {
        let id = AreaId::new(0).expect("a number of an area");
        let NewArea { disk, slots, priority, seal } = new_area(&Faulty::new(1), slots, 0);
        Area::new(id, disk, slots, priority, seal)
    }

    /// Goal: without memory for what is kept of slots no slot is taken, and none is lost. It ended the process.
    #[test]
    fn no_memory_for_a_table_is_no_room() {
        let area = area(1024);
        assert_eq!(area.take(4), Some(0..16));
        area.table.refuses.store(true, Relaxed);
        assert_eq!(area.take(4), Some(16..32), "of the cluster that has a table");
        assert_eq!((area.take(9), area.slots_used()), (None, 32));
        area.table.refuses.store(false, Relaxed);
        assert_eq!(area.take(9), Some(512..1024));
    }

    /// Goal: a count that is below zero for a moment is not told as 2^64 - 1.
    #[test]
    fn fewer_slots_than_none_are_none() {
        let area = area(16);
        area.slots_left.fetch_sub(1, Relaxed);
        assert_eq!(area.slots_left(), 0);
        area.slots_left.fetch_add(3, Relaxed);
        assert_eq!(area.slots_left(), 2);
    }
}
