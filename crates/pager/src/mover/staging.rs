//! The staging area: where folios rest between the program and the pool.
//!
//! A **slot** is room for one folio. A **hollow** slot is address space without pages; a folio can
//! be moved in. A **full** slot has the pages of some or all of its units:
//!
//! - **staged**: the units of a folio that was captured;
//! - **free**: pages whose contents are not needed; a folio is decompressed into them, and then
//!   they are moved into the program;
//! - **scratch**: units are decompressed here and copied into the program, and the pages stay;
//! - **leaving**: pages that soon go back to the system, together with those of other slots.
//!
//! A folio that goes out makes a hollow slot full, a folio that is moved in makes a full slot
//! hollow. So in a steady state whole folios come and go, and no page is allocated or given back.
//!
//! # Invariants
//!
//! - `STAGE-1` A slot is named by one token, [`Hollow`] or [`Full`], which is not `Copy`: only the
//!   owner of the token uses the slot.
//! - `STAGE-2` `hollow + free + scratch + leaving + staged + tokens in flight == slots`.
//! - `STAGE-3` Every page of the units that a full slot's token names is present, so reading or
//!   writing it never waits for a fault to be served. Free and scratch slots have all their units.
//!
//! # Concurrency
//!
//! One mutex around four lists, whose memory is allocated beforehand.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::sync::Mutex;
use zfolio_sys::Errno;
use zfolio_sys::map::Reservation;

use crate::folio::{Geometry, Units};
use crate::rank;

/// The most slots whose pages are given back together. Each such call interrupts every other CPU
/// that runs the process, however many pages it gives back.
pub(crate) const LEAVING_MAX: usize = 16;
const LEAVING_BYTES_MAX: usize = 1 << 20;

/// A slot without pages.
#[derive(Debug)]
pub(crate) struct Hollow(usize);

/// A slot with pages.
#[derive(Debug)]
pub(crate) struct Full {
    /// Its number plus 1, in four bytes: each folio in the table has room for a token, or none.
    slot: NonZeroU32,
    units: Units,
}

impl Full {
    fn new(slot: usize, units: Units) -> Full {
        let number = u32::try_from(slot + 1).ok().and_then(NonZeroU32::new);
        Full { slot: number.expect("2^32 slots take 256 TiB"), units }
    }

    fn slot(&self) -> usize {
        self.slot.get() as usize - 1
    }

    /// The units whose pages are in the slot.
    pub(crate) fn units(&self) -> Units {
        self.units
    }
}

/// See the module.
#[derive(Debug, Default)]
struct Lists {
    hollow: Slots,
    /// Slots with the pages of all their units.
    free: Slots,
    scratch: Vec<Full>,
    leaving: Vec<Full>,
}

/// A set of slots, one bit each. Slots are taken in rising order, round and round: folios that
/// leave the program one after the other then get adjacent slots, which are moved and given back
/// together.
#[derive(Debug, Default)]
struct Slots {
    words: Vec<u64>,
    next: usize,
}

impl Slots {
    fn none(slots: usize) -> Slots {
        Slots { words: vec![0; slots.div_ceil(64)], next: 0 }
    }

    fn all(slots: usize) -> Slots {
        let mut all = Slots::none(slots);
        (0..slots).for_each(|slot| all.push(slot));
        all
    }

    fn push(&mut self, slot: usize) {
        debug_assert!(!self.contains(slot), "STAGE-1");
        self.words[slot / 64] |= 1 << (slot % 64);
    }

    fn contains(&self, slot: usize) -> bool {
        self.words.get(slot / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    fn take(&mut self, slot: usize) -> Option<usize> {
        let there = self.contains(slot);
        if there {
            self.words[slot / 64] &= !(1 << (slot % 64));
            self.next = slot + 1;
        }
        there.then_some(slot)
    }

    /// Takes the first slot after the one taken last, else the first of all.
    fn pop(&mut self) -> Option<usize> {
        let (word, bit) = (self.next / 64, self.next % 64);
        let here = self.words.get(word).map_or(0, |bits| bits & (u64::MAX << bit));
        let found = match here {
            0 => {
                let after = (word + 1..self.words.len()).chain(0..self.words.len());
                let word = after.into_iter().find(|word| self.words[*word] != 0)?;
                word * 64 + self.words[word].trailing_zeros() as usize
            }
            bits => word * 64 + bits.trailing_zeros() as usize,
        };
        self.take(found)
    }
}

/// The area.
#[derive(Debug)]
pub(crate) struct Staging {
    space: Reservation,
    geometry: Geometry,
    slots: usize,
    scratch_max: usize,
    lists: Mutex<{ rank::STAGING }, Lists>,
    /// Bytes of the pages of all slots: what the area costs.
    bytes_used: AtomicUsize,
    free: AtomicUsize,
}

impl Staging {
    /// An area of `slots` hollow slots, of which up to `scratch_max` may become scratch.
    pub(crate) fn new(
        slots: usize,
        scratch_max: usize,
        geometry: Geometry,
    ) -> Result<Staging, Errno> {
        let space = Reservation::new(slots * geometry.folio_bytes(), geometry.folio_bytes())?;
        let lists = Lists {
            hollow: Slots::all(slots),
            free: Slots::none(slots),
            scratch: Vec::with_capacity(scratch_max),
            leaving: Vec::with_capacity(slots),
        };
        Ok(Staging {
            space,
            geometry,
            slots,
            scratch_max,
            lists: Mutex::new(lists),
            bytes_used: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
        })
    }

    /// In a child of `fork`, which did not inherit the area: maps it anew, all slots hollow.
    ///
    /// Nothing may be staged, and no thread may have a token.
    pub(crate) fn map_again(&self) -> Result<(), Errno> {
        self.space.map_again()?;
        let mut lists = self.lists.lock();
        let Lists { free, scratch, leaving, hollow, .. } = &mut *lists;
        let freed = std::iter::from_fn(|| free.pop()).map(|slot| self.whole(slot));
        for slot in freed.chain(scratch.drain(..)).chain(leaving.drain(..)) {
            hollow.push(self.emptied(slot).0);
        }
        self.free.store(0, Relaxed);
        Ok(())
    }

    /// The area's first address.
    pub(crate) fn address(&self) -> usize {
        self.space.address()
    }

    /// The area's length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.space.bytes()
    }

    /// Whether `address` is in the area.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.address()..self.address() + self.bytes()).contains(&address)
    }

    /// The address of a hollow slot.
    pub(crate) fn hollow_address(&self, slot: &Hollow) -> usize {
        self.address() + slot.0 * self.geometry.folio_bytes()
    }

    /// The address of a full slot.
    pub(crate) fn full_address(&self, slot: &Full) -> usize {
        self.address() + slot.slot() * self.geometry.folio_bytes()
    }

    /// The bytes of adjacent units of a full slot.
    #[allow(unsafe_code, reason = "the one view of the pages that the tokens stand for")]
    pub(crate) fn part<'a>(&'a self, slot: &'a Full, units: Range<usize>) -> &'a [u8] {
        assert!((Units::from(units.clone()) - slot.units).is_empty(), "STAGE-3");
        let bytes = self.geometry.bytes(units);
        let start = (self.full_address(slot) + bytes.start) as *const u8;
        // SAFETY: the slot lies inside the reservation (slot < slots); by STAGE-3 the units' pages
        // are present, and by STAGE-1 the borrow of the token keeps every writer out.
        unsafe { std::slice::from_raw_parts(start, bytes.len()) }
    }

    /// The `units` of a full slot, to be written: in parts that are one object each (`Units::objects`).
    #[allow(unsafe_code, reason = "the one view of the pages that the tokens stand for")]
    pub(crate) fn objects_mut<'a>(
        &'a self,
        slot: &'a mut Full,
        units: Units,
        wide: Units,
    ) -> impl Iterator<Item = (Range<usize>, &'a mut [u8])> {
        let (start, there) = (self.full_address(slot), slot.units);
        let mut end = 0;
        units.objects(wide).map(move |object| {
            assert!((Units::from(object.clone()) - there).is_empty(), "STAGE-3");
            assert!(end <= object.start, "two objects overlap");
            end = object.end;
            let bytes = self.geometry.bytes(object.clone());
            let part = (start + bytes.start) as *mut u8;
            // SAFETY: the slot lies inside the reservation (slot < slots), and by STAGE-3 the
            // object's pages are present. No two of the slices overlap, as was just asserted; for
            // as long as one of them lives the only token is borrowed exclusively, which rules out
            // any other access (STAGE-1).
            (object, unsafe { std::slice::from_raw_parts_mut(part, bytes.len()) })
        })
    }

    /// Writes zeros over a range of a full slot's bytes, except in units that the slot lacks.
    pub(crate) fn zero(&self, slot: &mut Full, bytes: Range<usize>) {
        let unit_bytes = self.geometry.unit_bytes();
        let touched = slot.units & self.geometry.touched(bytes.clone());
        for (unit_at, unit) in self.objects_mut(slot, touched, Units::NONE) {
            let start = unit_at.start * unit_bytes;
            let from = bytes.start.saturating_sub(start);
            let to = (bytes.end - start).min(unit_bytes);
            unit[from..to].fill(0);
        }
    }

    /// The token of a slot that was hollow, and has the pages of `units` now.
    pub(crate) fn filled(&self, slot: Hollow, units: Units) -> Full {
        self.bytes_used.fetch_add(self.geometry.bytes_of(units), Relaxed);
        Full::new(slot.0, units)
    }

    /// The token of a slot that was full, and has no pages now.
    pub(crate) fn emptied(&self, slot: Full) -> Hollow {
        self.bytes_used.fetch_sub(self.geometry.bytes_of(slot.units), Relaxed);
        Hollow(slot.slot())
    }

    /// Notes that a full slot no longer has the pages of `units`.
    pub(crate) fn take_units(&self, slot: &mut Full, units: Units) {
        debug_assert!((units - slot.units).is_empty(), "STAGE-3");
        self.bytes_used.fetch_sub(self.geometry.bytes_of(units), Relaxed);
        slot.units -= units;
    }

    /// Takes a hollow slot.
    pub(crate) fn take_hollow(&self) -> Option<Hollow> {
        self.lists.lock().hollow.pop().map(Hollow)
    }

    /// Takes the slot that lies just above `slot`, if it is hollow.
    pub(crate) fn take_hollow_above(&self, slot: &Hollow) -> Option<Hollow> {
        self.lists.lock().hollow.take(slot.0 + 1).map(Hollow)
    }

    /// Takes a free slot.
    pub(crate) fn take_free(&self) -> Option<Full> {
        if self.free.load(Relaxed) == 0 {
            return None;
        }
        let mut lists = self.lists.lock();
        let slot = lists.free.pop()?;
        // The count is changed under the lock, here and below; else it could fall below zero.
        self.free.fetch_sub(1, Relaxed);
        Some(self.whole(slot))
    }

    /// Takes the slot that lies just above `slot`, if it is free.
    pub(crate) fn take_free_above(&self, slot: &Full) -> Option<Full> {
        let mut lists = self.lists.lock();
        let slot = lists.free.take(slot.slot() + 1)?;
        self.free.fetch_sub(1, Relaxed);
        Some(self.whole(slot))
    }

    fn whole(&self, slot: usize) -> Full {
        Full::new(slot, self.geometry.all())
    }

    /// Gives a hollow slot back.
    pub(crate) fn give_hollow(&self, slot: Hollow) {
        self.lists.lock().hollow.push(slot.0);
    }

    /// Makes a slot free that has all its units; their contents are no longer needed.
    pub(crate) fn give_free(&self, slot: Full) {
        assert_eq!(slot.units, self.geometry.all(), "STAGE-3");
        let mut lists = self.lists.lock();
        lists.free.push(slot.slot());
        self.free.fetch_add(1, Relaxed);
    }

    /// Takes a scratch slot.
    pub(crate) fn take_scratch(&self) -> Option<Full> {
        self.lists.lock().scratch.pop()
    }

    /// Gives a scratch slot back. Returns the slot if there are scratch slots enough.
    pub(crate) fn give_scratch(&self, slot: Full) -> Result<(), Full> {
        assert_eq!(slot.units, self.geometry.all(), "STAGE-3");
        let mut lists = self.lists.lock();
        if lists.scratch.len() >= self.scratch_max {
            return Err(slot);
        }
        lists.scratch.push(slot);
        Ok(())
    }

    /// Collects a slot whose pages can go back to the system. True: enough slots are leaving, and
    /// the caller should give their pages back ([`Staging::take_leaving`]).
    pub(crate) fn give_leaving(&self, slot: Full) -> bool {
        let mut lists = self.lists.lock();
        lists.leaving.push(slot);
        lists.leaving.len() >= self.geometry.at_most(LEAVING_BYTES_MAX)
    }

    /// Takes leaving slots, up to `most` and [`LEAVING_MAX`] and in the order of their addresses.
    pub(crate) fn take_leaving(&self, most: usize) -> [Option<Full>; LEAVING_MAX] {
        let mut taken = [const { None }; LEAVING_MAX];
        let mut lists = self.lists.lock();
        let first = lists.leaving.len().saturating_sub(most.min(LEAVING_MAX));
        for (place, slot) in taken.iter_mut().zip(lists.leaving.drain(first..)) {
            *place = Some(slot);
        }
        drop(lists);
        taken.sort_unstable_by_key(|slot| slot.as_ref().map_or(usize::MAX, Full::slot));
        taken
    }

    /// How many slots are hollow, free, scratch and leaving.
    #[cfg(all(test, debug_assertions))]
    pub(crate) fn census(&self) -> [usize; 4] {
        let count = |slots: &Slots| slots.words.iter().map(|word| word.count_ones() as usize).sum();
        let lists = self.lists.lock();
        [count(&lists.hollow), count(&lists.free), lists.scratch.len(), lists.leaving.len()]
    }

    /// Slots in the area.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of the pages of all slots.
    pub(crate) fn bytes_used(&self) -> usize {
        self.bytes_used.load(Relaxed)
    }

    /// Bytes of the pages of free slots.
    pub(crate) fn free_bytes(&self) -> usize {
        self.free.load(Relaxed) * self.geometry.folio_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::Slots;

    /// Goal: no slot is handed out twice, and adjacent slots follow each other. Method: 1000
    /// pseudo-random steps, compared with a plain set.
    #[test]
    fn hollow_slots_are_a_set() {
        const SLOTS: usize = 150;
        let mut hollows = Slots::all(SLOTS);
        let mut model: std::collections::BTreeSet<usize> = (0..SLOTS).collect();
        let mut taken = Vec::new();
        let mut random = 1_u64;
        for _ in 0..1000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let choice = usize::try_from(random >> 40).unwrap();
            if choice % 5 < 2 && !taken.is_empty() {
                let slot: usize = taken.swap_remove(choice % taken.len());
                hollows.push(slot);
                assert!(model.insert(slot));
                continue;
            }
            let next = hollows.next;
            let found = hollows.pop();
            let expected = model.range(next..).next().or_else(|| model.iter().next()).copied();
            assert_eq!(found, expected);
            taken.extend(found);
            found.into_iter().for_each(|slot| assert!(model.remove(&slot)));
        }
        assert_eq!(hollows.take(SLOTS), None);
        while hollows.pop().is_some() {}
        assert_eq!(hollows.words, [0; SLOTS.div_ceil(64)]);
    }
}
