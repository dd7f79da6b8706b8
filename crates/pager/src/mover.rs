//! The mover: takes folios out of the program (`capture`), puts them in (`place`), gives pages back (`release`).
//!
//! A folio goes out by `UFFDIO_MOVE`, into a **slot** of the staging area. It comes back by a move if it is whole and
//! its pages are ours to give, and some units of it come back by a copy. A move changes a page that is mapped,
//! so it interrupts every other CPU that runs the process; a copy does not. A copying way out for kernels from
//! 5.11 to 6.7 belongs behind the same functions: nothing above knows how the bytes travel.
//!
//! # Invariants
//!
//! - `MOVE-1` After `capture` no page of the units that are in the slot is in the program, and all their bytes are
//!   in the slot; every other page is where it was.
//! - `MOVE-2` `place` never puts a page over one that is there: what a program has written since is newer.
//! - `MOVE-3` The kernel moved at least as much as it says. Where it stopped, the pages themselves show what else was
//!   moved: Linux 6.18 was seen to move pages and then answer `EEXIST` with a count of 0, when other threads
//!   touched the unit meanwhile. A page that is in a slot, and no longer in the program, was moved.
//!
//! # Cost
//!
//! Measured for 64 KiB: capture 3.1 us, place 3.1 us, and 5 to 10 us more each while the process runs
//! on another virtual CPU; a copy 9 us, and 1 us for 4 KiB.

mod capture;
mod place;
mod staging;
#[cfg(test)]
mod tests;

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::map::Reservation;
use zfolio_sys::uffd::{Message, Messages};

use crate::fatal;
use crate::folio::{Geometry, Units};
use crate::mappings::event::{Announced, Inbox};
use crate::system::{Side, System};

pub(crate) use capture::Refusal;
pub(crate) use staging::{Full, Hollow};

use staging::Staging;

/// See the module.
#[derive(Debug)]
pub(crate) struct Mover {
    pub(crate) system: Box<dyn System>,
    pub(crate) inbox: Inbox,
    pub(crate) announced: Announced,
    staging: Staging,
    /// A folio of zeros, to copy from.
    zeros: Reservation,
    geometry: Geometry,
}

impl Mover {
    /// A mover with `slots` slots, of which up to `scratch_max` keep their pages for copies.
    ///
    /// # Errors
    ///
    /// No address space, or the staging area cannot be registered.
    pub(crate) fn new(
        system: Box<dyn System>,
        slots: usize,
        scratch_max: usize,
        geometry: Geometry,
    ) -> Result<Mover, Errno> {
        let mover = Mover {
            system,
            inbox: Inbox::default(),
            announced: Announced::default(),
            staging: Staging::new(slots, scratch_max, geometry)?,
            zeros: Reservation::new(geometry.folio_bytes(), PAGE_BYTES)?,
            geometry,
        };
        mover.register_staging()?;
        Ok(mover)
    }

    fn register_staging(&self) -> Result<(), Errno> {
        let (start, bytes) = (self.staging.address(), self.staging.bytes());
        self.system.register(Side::Staging, start, bytes)
    }

    /// In a child of `fork`, which did not inherit the staging area: maps it anew. Nothing may be in it, and
    /// nobody may have a slot.
    pub(crate) fn map_again(&self) -> Result<(), Errno> {
        self.staging.map_again()
    }

    /// After that, by the thread that will own it: what the kernel does not copy is opened anew.
    pub(crate) fn open_again(&self) -> Result<(), Errno> {
        self.system.open_again()?;
        self.register_staging()
    }

    /// The sizes of units and folios.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Takes a slot without pages, for a capture.
    pub(crate) fn take_hollow(&self) -> Option<Hollow> {
        self.staging.take_hollow()
    }

    /// Takes the one that lies just above `slot`, if it has no pages and nobody has it.
    pub(crate) fn take_hollow_above(&self, slot: &Hollow) -> Option<Hollow> {
        self.staging.take_hollow_above(slot)
    }

    /// Gives a slot back that was not used.
    pub(crate) fn give_hollow(&self, slot: Hollow) {
        self.staging.give_hollow(slot);
    }

    /// Takes a slot that has pages for a whole folio, whose contents nobody needs.
    pub(crate) fn take_free(&self) -> Option<Full> {
        self.staging.take_free()
    }

    /// Takes the one that lies just above `slot`, if it is such a one.
    pub(crate) fn take_free_above(&self, slot: &Full) -> Option<Full> {
        self.staging.take_free_above(slot)
    }

    /// Gives a slot back that has pages for a whole folio.
    pub(crate) fn give_free(&self, slot: Full) {
        self.staging.give_free(slot);
    }

    /// Takes a slot with pages for a whole folio, to decompress into and copy from.
    ///
    /// # Errors
    ///
    /// The system has no memory.
    pub(crate) fn take_scratch(&self) -> Result<Full, Errno> {
        loop {
            if let Some(slot) = self.staging.take_scratch() {
                return Ok(slot);
            }
            if let Some(slot) = self.staging.take_hollow() {
                return self.fill(slot);
            }
            // All the others are staged or free.
            if let Some(slot) = self.staging.take_free() {
                return Ok(slot);
            }
            // All are in the hands of threads that are about to be done.
            self.system.pause();
        }
    }

    /// Gives it back.
    pub(crate) fn give_scratch(&self, slot: Full) {
        if let Err(slot) = self.staging.give_scratch(slot) {
            self.release_pages(self.staging.full_address(&slot), self.geometry().folio_bytes());
            self.staging.give_hollow(self.staging.emptied(slot));
        }
    }

    /// Fills a hollow slot with new pages. `NOMEM`: the system has no memory.
    #[allow(unsafe_code, reason = "the copy reads our own folio of zeros")]
    fn fill(&self, slot: Hollow) -> Result<Full, Errno> {
        let to = self.staging.hollow_address(&slot);
        let mut done = 0;
        let bytes = self.geometry().folio_bytes();
        while done < bytes {
            let (from, to) = (self.zeros.address(), to + done);
            // SAFETY: the folio of zeros is readable and as long as a slot.
            let progress = unsafe { self.system.copy(Side::Staging, from, to, bytes - done) };
            done += progress.bytes;
            match progress.stopped {
                None | Some(Errno::AGAIN) => {}
                // A stranger touched the slot; it is ours now all the same.
                Some(Errno::EXIST) => done += PAGE_BYTES,
                Some(error) => {
                    self.release_pages(self.staging.hollow_address(&slot), bytes);
                    self.staging.give_hollow(slot);
                    return Err(error);
                }
            }
        }
        Ok(self.staging.filled(slot, self.geometry().all()))
    }

    /// Takes a slot whose pages are to go back to the system, with others that lie beside it. True: there are
    /// so many by now that it is time for [`Mover::release_leaving`].
    pub(crate) fn give_leaving(&self, slot: Full) -> bool {
        self.staging.give_leaving(slot)
    }

    /// Gives the pages of leaving slots back to the system, those that lie side by side together.
    pub(crate) fn release_leaving(&self) {
        let slots = self.staging.take_leaving();
        let mut adjacent = 0..0;
        for slot in slots.iter().flatten() {
            let from = self.staging.full_address(slot);
            if from != adjacent.end {
                self.release_pages(adjacent.start, adjacent.len());
                adjacent.start = from;
            }
            adjacent.end = from + self.geometry().folio_bytes();
        }
        self.release_pages(adjacent.start, adjacent.len());
        let emptied = slots.into_iter().flatten().map(|slot| self.staging.emptied(slot));
        emptied.for_each(|slot| self.staging.give_hollow(slot));
    }

    /// The bytes of a unit that is in a slot.
    pub(crate) fn unit<'a>(&'a self, slot: &'a Full, index: usize) -> &'a [u8] {
        self.staging.unit(slot, index)
    }

    /// The bytes of some units of a slot, to be written.
    pub(crate) fn units_mut<'a>(
        &'a self,
        slot: &'a mut Full,
        units: Units,
    ) -> impl Iterator<Item = (usize, &'a mut [u8])> {
        self.staging.units_mut(slot, units)
    }

    /// Writes zeros over a range of a slot's bytes, as far as it has them.
    pub(crate) fn zero(&self, slot: &mut Full, bytes: Range<usize>) {
        self.staging.zero(slot, bytes);
    }

    /// How many slots are hollow, free, scratch and leaving.
    #[cfg(all(test, debug_assertions))]
    pub(crate) fn census(&self) -> [usize; 4] {
        self.staging.census()
    }

    /// How many slots there are.
    pub(crate) fn slots(&self) -> usize {
        self.staging.slots()
    }

    /// Bytes of pages in slots, whoever has them.
    pub(crate) fn bytes_used(&self) -> usize {
        self.staging.bytes_used()
    }

    /// Bytes of pages that nobody uses.
    pub(crate) fn free_bytes(&self) -> usize {
        self.staging.free_bytes()
    }

    /// Registers a range of the program's memory: from now on its faults are ours to serve.
    ///
    /// # Errors
    ///
    /// As [`System::register`].
    pub(crate) fn register(&self, start: usize, end: usize) -> Result<(), Errno> {
        self.system.register(Side::Program, start, end - start)
    }

    /// Leaves a range to the kernel: no page of it is anywhere but in the program.
    pub(crate) fn unregister(&self, start: usize, end: usize) {
        if start < end {
            self.system.unregister(start, end - start);
        }
    }

    /// Wakes who waits in a folio, to try again.
    pub(crate) fn wake(&self, base: usize) {
        self.wake_range(base, self.geometry().folio_bytes());
    }

    /// Wakes who waits in a range.
    fn wake_range(&self, start: usize, bytes: usize) {
        match self.system.wake(Side::Program, start, bytes) {
            // A sandbox that the program has put all its threads into. What failed before us failed for that.
            Err(error) if fatal::is_forbidden(error) => fatal::forbidden(error),
            // Only for a range that is not page-aligned.
            answer => debug_assert!(answer.is_ok(), "{answer:?}"),
        }
    }

    /// Reads what the kernel has to say of the program's memory; [`Inbox::first`] has it afterwards.
    pub(crate) fn read_messages(&self) {
        self.inbox.pull(&*self.system, &self.announced);
    }

    /// A mapping is changing, and no page moves until its message is read.
    #[cold]
    fn let_change_happen(&self) {
        self.read_messages();
        self.system.pause();
    }

    /// Whether `address` is in the staging area.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.staging.contains(address)
    }

    /// Answers threads that look at the staging area, where none of the program's has any business: it
    /// is in `/proc/self/maps`, and some programs read all of that. They see zeros.
    #[cold]
    pub(crate) fn answer_strangers(&self) {
        let mut messages = Messages::default();
        for message in self.system.read(Side::Staging, &mut messages) {
            if let Message::Fault { address, .. } = *message {
                self.answer_stranger(address);
            }
        }
    }

    /// Gives one a page of zeros. A slot may then have a page when it should be hollow: capture() and
    /// fill() know.
    pub(crate) fn answer_stranger(&self, address: usize) {
        let page = address & !(PAGE_BYTES - 1);
        // EEXIST: the slot was filled meanwhile.
        if self.system.zero(Side::Staging, page, PAGE_BYTES).stopped.is_some() {
            self.system.wake(Side::Staging, page, PAGE_BYTES).ok();
        }
    }

    /// Whether the kernel serves a touch of `address`, in memory that was managed once.
    pub(crate) fn is_the_kernels(&self, address: usize) -> bool {
        self.system.unshare(address & !(PAGE_BYTES - 1), PAGE_BYTES).is_ok()
    }

    /// Drops pages of a slot that the caller has.
    #[allow(unsafe_code, reason = "the pages of a slot are ours")]
    fn release_pages(&self, address: usize, bytes: usize) {
        if bytes > 0 {
            // SAFETY: callers own the slot (STAGE-1) and are done with its contents.
            unsafe { self.system.discard(address, bytes) };
        }
    }
}
