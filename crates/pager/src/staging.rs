//! The staging area: where folios rest between the program and the pool.
//!
//! A **slot** is room for one unit. It is **hollow** (address space without pages: a folio can be
//! moved in) or **full** (pages that are ours: a folio that has just come, or free pages into which a
//! unit can be decompressed). A folio that goes out turns a hollow slot into a full one, a folio that
//! goes back the other way round; so in a steady state no page is allocated, zeroed or given back.
//!
//! # Invariants
//!
//! - `STAGE-1` A slot is named by one token, [`Hollow`] or [`Full`], which is not `Copy`: who has the
//!   token has the slot to himself.
//! - `STAGE-2` `hollow + free + staged + tokens in flight == slots`.
//! - `STAGE-3` Every page of a full slot is present, so reading or writing it never faults.
//!
//! # Concurrency
//!
//! One mutex around three lists whose room is set up beforehand.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::page::UnitOrder;
use zfolio_core::sync::Mutex;
use zfolio_sys::Errno;
use zfolio_sys::map::Reservation;

use crate::rank;

/// A slot without pages.
#[derive(Debug)]
pub(crate) struct Hollow(u32);

/// A slot with all its pages.
#[derive(Debug)]
pub(crate) struct Full(u32);

/// Units that were captured, oldest first, by their address in the program.
#[derive(Debug, Default)]
struct Lists {
    hollow: Vec<Hollow>,
    free: Vec<Full>,
    staged: VecDeque<usize>,
}

/// The area.
#[derive(Debug)]
pub(crate) struct Staging {
    space: Reservation,
    unit: UnitOrder,
    slots: usize,
    lists: Mutex<{ rank::STAGING }, Lists>,
    /// Slots that are full, whoever has them: what the area costs, in units.
    full: AtomicUsize,
    free: AtomicUsize,
    staged: AtomicUsize,
}

impl Staging {
    /// An area of `slots` hollow slots.
    pub(crate) fn new(slots: usize, unit: UnitOrder) -> Result<Staging, Errno> {
        let space = Reservation::new(slots * unit.bytes(), unit.bytes())?;
        let last = u32::try_from(slots).map_err(|_| Errno::NOMEM)?;
        let lists = Lists {
            hollow: (0..last).rev().map(Hollow).collect(),
            free: Vec::with_capacity(slots),
            staged: VecDeque::with_capacity(slots),
        };
        Ok(Staging {
            space,
            unit,
            slots,
            lists: Mutex::new(lists),
            full: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
            staged: AtomicUsize::new(0),
        })
    }

    /// In a child of `fork`, which did not inherit the area: maps it anew, all slots hollow.
    ///
    /// Nothing may be staged, and nobody may have a token.
    pub(crate) fn map_again(&self) -> Result<(), Errno> {
        self.space.map_again()?;
        let mut lists = self.lists.lock();
        while let Some(slot) = lists.free.pop() {
            let hollow = self.emptied(slot);
            lists.hollow.push(hollow);
        }
        lists.staged.clear();
        self.free.store(0, Relaxed);
        self.staged.store(0, Relaxed);
        Ok(())
    }

    /// Its first address.
    pub(crate) fn address(&self) -> usize {
        self.space.address()
    }

    /// Its length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.space.bytes()
    }

    /// Where a hollow slot is.
    pub(crate) fn hollow_address(&self, slot: &Hollow) -> usize {
        self.address() + slot.0 as usize * self.unit.bytes()
    }

    /// Where a full slot is.
    pub(crate) fn full_address(&self, slot: &Full) -> usize {
        self.address() + slot.0 as usize * self.unit.bytes()
    }

    /// The bytes of a full slot.
    #[allow(unsafe_code, reason = "the one view of the pages that the tokens stand for")]
    pub(crate) fn unit<'a>(&'a self, slot: &'a Full) -> &'a [u8] {
        // SAFETY: the slot lies inside the reservation (slot < slots); by STAGE-3 its pages are
        // present, and by STAGE-1 the borrow of the token keeps every writer out.
        unsafe {
            std::slice::from_raw_parts(self.full_address(slot) as *const u8, self.unit.bytes())
        }
    }

    /// The bytes of a full slot, to be written.
    #[allow(unsafe_code, reason = "the one view of the pages that the tokens stand for")]
    #[allow(clippy::mut_from_ref, reason = "the token is borrowed mutably, and it owns the bytes")]
    pub(crate) fn unit_mut<'a>(&'a self, slot: &'a mut Full) -> &'a mut [u8] {
        // SAFETY: as in unit(); the exclusive borrow of the only token rules out any other access.
        unsafe {
            std::slice::from_raw_parts_mut(self.full_address(slot) as *mut u8, self.unit.bytes())
        }
    }

    /// The token of a slot into which a folio was moved.
    pub(crate) fn filled(&self, slot: Hollow) -> Full {
        self.full.fetch_add(1, Relaxed);
        Full(slot.0)
    }

    /// The token of a slot that gave its pages away.
    pub(crate) fn emptied(&self, slot: Full) -> Hollow {
        self.full.fetch_sub(1, Relaxed);
        Hollow(slot.0)
    }

    /// Takes a hollow slot.
    pub(crate) fn take_hollow(&self) -> Option<Hollow> {
        self.lists.lock().hollow.pop()
    }

    /// Takes a full slot that nobody uses.
    pub(crate) fn take_free(&self) -> Option<Full> {
        if self.free.load(Relaxed) == 0 {
            return None;
        }
        let slot = self.lists.lock().free.pop()?;
        self.free.fetch_sub(1, Relaxed);
        Some(slot)
    }

    /// Gives a hollow slot back.
    pub(crate) fn give_hollow(&self, slot: Hollow) {
        self.lists.lock().hollow.push(slot);
    }

    /// Gives a full slot back, its contents no longer needed.
    pub(crate) fn give_free(&self, slot: Full) {
        self.lists.lock().free.push(slot);
        self.free.fetch_add(1, Relaxed);
    }

    /// Notes that the unit at `address` was staged, the newest of them.
    pub(crate) fn push_staged(&self, address: usize) {
        self.lists.lock().staged.push_back(address);
        self.staged.fetch_add(1, Relaxed);
    }

    /// The oldest of the staged units. It may have gone back since.
    pub(crate) fn pop_staged(&self) -> Option<usize> {
        let address = self.lists.lock().staged.pop_front()?;
        self.staged.fetch_sub(1, Relaxed);
        Some(address)
    }

    /// Slots in the area.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Slots with pages, in whoever's hands.
    pub(crate) fn full_slots(&self) -> usize {
        self.full.load(Relaxed)
    }

    /// Slots with pages that nobody uses.
    pub(crate) fn free_slots(&self) -> usize {
        self.free.load(Relaxed)
    }

    /// Entries in the queue of staged units.
    pub(crate) fn staged_units(&self) -> usize {
        self.staged.load(Relaxed)
    }
}
