//! The mover: takes folios out of the program (`capture`), puts them in (`place`), gives pages back
//! (`release`).
//!
//! A folio goes out by `UFFDIO_MOVE`, into a **slot** of the staging area. Staged units and whole
//! folios come back by a move too; other units come back by a copy from a scratch slot, which keeps
//! its pages. A move changes a page that is mapped, so it interrupts every other CPU that runs the
//! process; a copy does not. Callers do not depend on how the bytes travel, so that kernels from
//! 5.11 to 6.7 can be supported by copying, behind the same functions.
//!
//! # Invariants
//!
//! - `MOVE-1` After `capture` all bytes of the slot's units are in the slot, and no page of these
//!   units is in the program. Every other page is where it was.
//! - `MOVE-2` `place` never replaces a page that is present: the program may have written to it.
//! - `MOVE-3` The kernel moved at least as much as it reports. (When other threads touched the unit
//!   meanwhile, Linux 6.18 was seen to move pages and then answer `EEXIST` with a count of 0.) What
//!   it did not report is found by trying to put it back, page by page.
//!
//! # Cost
//!
//! Measured for 64 KiB: capture 3.1 us, place 3.1 us, and 5 to 10 us more each while the process
//! also runs on another virtual CPU. A copy takes 9 us, and 1 us for 4 KiB.

mod capture;
mod doubt;
mod place;
mod staging;
#[cfg(test)]
mod tests;

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::sync::Mutex;
use zfolio_sys::Errno;
use zfolio_sys::map::Reservation;
use zfolio_sys::uffd::{Message, Messages, Progress};

use crate::fatal::{self, IOCTL};
use crate::folio::{Geometry, Units};
use crate::mappings::event::{Announced, Inbox};
use crate::rank;
use crate::system::{Side, System};

pub(crate) use capture::{Refusal, Shared};
pub(crate) use doubt::Doubt;
pub(crate) use staging::{Full, Hollow};

use staging::Staging;

/// Nothing was moved: a change of the mapping waits to be applied.
const REFUSED: Progress = Progress { bytes: 0, stopped: Some(Errno::CANCELED) };

/// See the module.
#[derive(Debug)]
pub(crate) struct Mover {
    pub(crate) system: Box<dyn System>,
    pub(crate) inbox: Inbox,
    pub(crate) announced: Announced,
    staging: Staging,
    /// What was captured while a change of mappings began that is not applied yet.
    doubts: Mutex<{ rank::DOUBTS }, Vec<Doubt>>,
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
            doubts: Mutex::default(),
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

    /// In a child of `fork`, which did not inherit the staging area: maps it anew. Nothing may be
    /// staged, and no thread may have a slot.
    pub(crate) fn map_again(&self) -> Result<(), Errno> {
        self.staging.map_again()
    }

    /// In a child, after [`Mover::map_again`], by the thread whose table of files will hold the
    /// userfaultfds: opens them anew, and registers the staging area.
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

    /// Takes the slot that lies just above `slot`, if it is hollow and no thread has it.
    pub(crate) fn take_hollow_above(&self, slot: &Hollow) -> Option<Hollow> {
        self.staging.take_hollow_above(slot)
    }

    /// Gives back a hollow slot that was not used.
    pub(crate) fn give_hollow(&self, slot: Hollow) {
        self.staging.give_hollow(slot);
    }

    /// Takes a free slot: it has pages for a whole folio, and their contents are not needed.
    pub(crate) fn take_free(&self) -> Option<Full> {
        self.staging.take_free()
    }

    /// Takes the slot that lies just above `slot`, if it is free.
    pub(crate) fn take_free_above(&self, slot: &Full) -> Option<Full> {
        self.staging.take_free_above(slot)
    }

    /// Makes a slot free that has pages for a whole folio.
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
            // No slot is hollow, so one that is free.
            if let Some(slot) = self.staging.take_free() {
                return Ok(slot);
            }
            // All slots are staged, or in use by threads that soon give theirs back.
            self.system.pause();
        }
    }

    /// Gives a scratch slot back. Its pages go back to the system if there are scratch slots
    /// enough.
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
                // A stranger touched the slot and brought this page, which serves as well.
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

    /// Collects a slot whose pages are to go back to the system together with those of others.
    /// True: enough slots are leaving, and the caller should call [`Mover::release_leaving`].
    pub(crate) fn give_leaving(&self, slot: Full) -> bool {
        self.staging.give_leaving(slot)
    }

    /// Gives the pages of leaving slots back to the system, of `most` at most, with one call for adjacent slots.
    /// Returns how many slots that were.
    pub(crate) fn release_leaving(&self, most: usize) -> usize {
        let slots = self.staging.take_leaving(most);
        let count = slots.iter().flatten().count();
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
        count
    }

    /// The bytes of adjacent units that are in a slot.
    pub(crate) fn part<'a>(&'a self, slot: &'a Full, units: Range<usize>) -> &'a [u8] {
        self.staging.part(slot, units)
    }

    /// The `units` of a slot, to be written: in parts that are one object each ([`Units::objects`]).
    pub(crate) fn objects_mut<'a>(
        &'a self,
        slot: &'a mut Full,
        units: Units,
        wide: Units,
    ) -> impl Iterator<Item = (Range<usize>, &'a mut [u8])> {
        self.staging.objects_mut(slot, units, wide)
    }

    /// Writes zeros over a range of a slot's bytes, except in units that the slot lacks.
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

    /// Bytes of the pages of all slots.
    pub(crate) fn bytes_used(&self) -> usize {
        self.staging.bytes_used()
    }

    /// Bytes of the pages of free slots.
    pub(crate) fn free_bytes(&self) -> usize {
        self.staging.free_bytes()
    }

    /// Registers a range of the program's memory: from now on the engine serves its faults.
    ///
    /// # Errors
    ///
    /// As [`System::register`].
    pub(crate) fn register(&self, start: usize, end: usize) -> Result<(), Errno> {
        self.system.register(Side::Program, start, end - start)
    }

    /// Puts the page of zeros at `page`, of the program's memory and neither staged nor stored, unless a page is there.
    pub(crate) fn have_page(&self, page: usize) {
        // An error: there is a page; or the range is not registered, and the kernel gives it one when it is touched.
        let _ = self.system.zero(Side::Program, page, PAGE_BYTES);
    }

    /// Leaves a range to the kernel. None of its pages may be staged or stored.
    ///
    /// # Errors
    ///
    /// As [`System::unregister`].
    pub(crate) fn unregister(&self, start: usize, end: usize) -> Result<(), Errno> {
        self.system.unregister(start, end - start)
    }

    /// Wakes the threads that wait for pages of a folio, to try again.
    pub(crate) fn wake(&self, base: usize) {
        self.wake_range(base, self.geometry().folio_bytes());
    }

    /// Wakes the threads that wait for pages of a range.
    fn wake_range(&self, start: usize, bytes: usize) {
        match self.system.wake(Side::Program, start, bytes) {
            // The program has put all its threads into a sandbox that forbids the call. An earlier
            // move or copy failed for the same reason.
            Err(error) if fatal::is_forbidden(error) => fatal::forbidden(IOCTL, error),
            // The call fails only for a range that is not page-aligned.
            answer => debug_assert!(answer.is_ok(), "{answer:?}"),
        }
    }

    /// Reads the kernel's messages about the program's memory into the inbox ([`Inbox::first`]).
    pub(crate) fn read_messages(&self) {
        self.inbox.pull(&*self.system, &self.announced);
    }

    /// Reads the messages, and lets other threads run. To be called after `EAGAIN`: a mapping is
    /// changing, and no page can be moved until the event of the change is read.
    #[cold]
    fn let_change_happen(&self) {
        self.read_messages();
        self.system.pause();
    }

    /// Whether `address` is in the staging area.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.staging.contains(address)
    }

    /// Serves threads of the program that touch the staging area: it is listed in
    /// `/proc/self/maps`, and some programs read all memory listed there. They see zeros.
    #[cold]
    pub(crate) fn answer_strangers(&self) {
        let mut messages = Messages::default();
        for message in self.system.read(Side::Staging, &mut messages) {
            if let Message::Fault { address, .. } = *message {
                self.answer_stranger(address);
            }
        }
    }

    /// Gives such a thread a page of zeros. A slot that should be hollow may have a page
    /// afterwards: capture() and fill() allow for this.
    pub(crate) fn answer_stranger(&self, address: usize) {
        let page = address & !(PAGE_BYTES - 1);
        // EEXIST: the slot was filled meanwhile.
        if self.system.zero(Side::Staging, page, PAGE_BYTES).stopped.is_some() {
            self.system.wake(Side::Staging, page, PAGE_BYTES).ok();
        }
    }

    /// Whether the kernel itself serves a touch of `address`, in memory that is no longer managed.
    pub(crate) fn is_the_kernels(&self, address: usize) -> bool {
        self.system.unshare(address & !(PAGE_BYTES - 1), PAGE_BYTES).is_ok()
    }

    /// Gives pages of the caller's slot back to the system.
    #[allow(unsafe_code, reason = "the pages of a slot are ours")]
    fn release_pages(&self, address: usize, bytes: usize) {
        if bytes > 0 {
            // SAFETY: callers own the slot (STAGE-1) and are done with its contents.
            unsafe { self.system.discard(address, bytes) };
        }
    }
}
