//! The seam: taking a folio out of the program (`capture`) and putting one in (`place`).
//!
//! Today by `UFFDIO_MOVE`, in both directions. A copying way for kernels from 5.11 to 6.7 goes behind
//! the same four functions; nothing above knows how the bytes travel.
//!
//! Two userfaultfds: `program` is told of faults in the program's memory; `staging` only makes slots
//! of the staging area possible targets of a move. They are separate so that giving staged pages
//! back is never an event that somebody must read.
//!
//! # Invariants
//!
//! - `FOLIO-1` After `capture` said `Ok`, no page of the folio is in the program and all its bytes are
//!   in the slot; after it said anything else, every page is where it was.
//! - `FOLIO-2` `place` never puts a page over one that is there: what a program has written since is
//!   newer.
//! - `FOLIO-3` What was moved is told by where the pages are, not by the kernel's count: Linux 6.18
//!   was seen to move pages and then answer `EEXIST` with a count of 0, when other threads touched the
//!   unit meanwhile. A page that is in a slot, or no longer in it, has been moved.
//!
//! # Cost
//!
//! Measured for 64 KiB: capture 3.1 us, place 3.1 us; a new zeroed folio by copy 9 us.

use std::ops::Range;

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_sys::Errno;
use zfolio_sys::map::{self, Reservation};
use zfolio_sys::uffd::{Progress, Reach, Uffd, feature};

use crate::config::Mode;
use crate::event::{Announced, Inbox};
use crate::staging::{Full, Hollow, Staging};
use crate::unit::Table;

/// Why a folio could not be taken out. It is still the program's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// Nothing is there: not one page.
    Nothing,
    /// A page is pinned by a device, or shared with a child in a way that cannot be undone now.
    Busy,
    /// The mapping does not allow it: read-only, at an edge, or not there any more.
    Mapping,
}

/// What is asked of the kernel: for the program's memory, and for the staging area.
pub(crate) fn needs(mode: Mode) -> [(Reach, u64); 2] {
    let program = match mode {
        Mode::Inline => (Reach::Program, feature::SIGBUS | feature::MOVE),
        Mode::Handler => {
            let events = feature::EVENT_REMOVE | feature::EVENT_UNMAP | feature::EVENT_REMAP;
            (Reach::Kernel, feature::THREAD_ID | feature::MOVE | events)
        }
    };
    [program, (Reach::Program, feature::MOVE)]
}

/// The two userfaultfds, and a unit of zeros.
#[derive(Debug)]
pub(crate) struct Folios {
    pub(crate) program: Uffd,
    staging: Uffd,
    zeros: Reservation,
    unit: UnitOrder,
    pub(crate) inbox: Inbox,
    pub(crate) announced: Announced,
}

impl Folios {
    /// Takes over both userfaultfds and registers the staging area.
    pub(crate) fn new(
        program: Uffd,
        staging: Uffd,
        area: &Staging,
        unit: UnitOrder,
    ) -> Result<Folios, Errno> {
        let zeros = Reservation::new(unit.bytes(), PAGE_BYTES)?;
        let (inbox, announced) = (Inbox::default(), Announced::default());
        let folios = Folios { program, staging, zeros, unit, inbox, announced };
        folios.register_area(area)?;
        Ok(folios)
    }

    fn register_area(&self, area: &Staging) -> Result<(), Errno> {
        self.staging.register(area.address(), area.bytes())?;
        // A child must not share the staged pages: a shared page cannot be moved (EBUSY).
        map::keep_from_children(area.address(), area.bytes())
    }

    /// In a child of `fork`: new userfaultfds, a new staging area.
    pub(crate) fn open_again(&self, area: &Staging, mode: Mode) -> Result<(), Errno> {
        let [program, staging] = needs(mode);
        self.program.reopen(program.0, program.1)?;
        self.staging.reopen(staging.0, staging.1)?;
        self.register_area(area)?;
        Ok(())
    }

    /// Moves the unit at `address` out of the program, into `slot`.
    pub(crate) fn capture(
        &self,
        area: &Staging,
        address: usize,
        slot: Hollow,
    ) -> Result<Full, (Hollow, Refusal)> {
        let to = area.hollow_address(&slot);
        let mut done = 0;
        let mut holes = 0;
        let mut unshared = false;
        while done < self.unit.bytes() {
            let rest = self.unit.bytes() - done;
            let progress = self.take_out(address + done, to + done, rest);
            done += progress.bytes;
            match progress.stopped {
                None | Some(Errno::AGAIN) => {}
                // A page that is not there is a page of zeros.
                Some(Errno::NOENT) => {
                    holes += 1;
                    let zeroed = self.staging.zero(to + done, PAGE_BYTES);
                    debug_assert_eq!(zeroed.stopped, None, "the slot was hollow");
                    done += PAGE_BYTES;
                }
                // FOLIO-3: the page is in the slot, which nobody else can write to: it was moved.
                Some(Errno::EXIST) if present(to + done) => done += PAGE_BYTES,
                Some(Errno::BUSY) if !unshared => {
                    unshared = true;
                    self.unshare(address + done, rest);
                }
                Some(error) => {
                    self.undo(to, address, done);
                    let busy = error == Errno::BUSY;
                    return Err((slot, if busy { Refusal::Busy } else { Refusal::Mapping }));
                }
            }
        }
        if holes == self.unit.pages() {
            discard_pages(to, self.unit.bytes());
            return Err((slot, Refusal::Nothing));
        }
        Ok(area.filled(slot))
    }

    /// Moves the pages of `slot` into the program at `address`, and wakes who waits there.
    pub(crate) fn place(&self, area: &Staging, slot: Full, address: usize) -> Hollow {
        let from = area.full_address(&slot);
        let left_over = self.put_in(from, address, self.unit.bytes());
        if left_over {
            discard_pages(from, self.unit.bytes());
            self.wake(address);
        }
        area.emptied(slot)
    }

    /// Puts a part of a slot's pages at `to`, wherever that is, and wakes who waits there.
    pub(crate) fn place_part(&self, area: &Staging, slot: &Full, part: Range<usize>, to: usize) {
        if !part.is_empty() {
            self.put_in(area.full_address(slot) + part.start, to, part.len());
            self.program.wake(to, part.len()).ok();
        }
    }

    /// Gives the program a unit of zeros at `address` with new pages. False: the mapping is not there.
    pub(crate) fn place_zeros(&self, address: usize) -> bool {
        let mut done = 0;
        while done < self.unit.bytes() {
            let rest = self.unit.bytes() - done;
            // SAFETY: the unit of zeros is readable and as long as a unit.
            #[allow(unsafe_code, reason = "the copy reads our own buffer")]
            let progress = unsafe { self.program.copy(self.zeros.address(), address + done, rest) };
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                Some(Errno::EXIST) => done += PAGE_BYTES,
                Some(_) => {
                    self.wake(address);
                    return false;
                }
            }
        }
        self.wake(address);
        true
    }

    /// Gives the program one page of zeros. True: a page was there already.
    pub(crate) fn place_zero_page(&self, address: usize) -> bool {
        let page = address & !(PAGE_BYTES - 1);
        let stopped = loop {
            match self.program.zero(page, PAGE_BYTES).stopped {
                Some(Errno::AGAIN) => self.let_change_happen(),
                stopped => break stopped,
            }
        };
        // Also after EEXIST: somebody else was first, and who waits must look again.
        self.program.wake(page, PAGE_BYTES).ok();
        stopped == Some(Errno::EXIST)
    }

    /// Fills a hollow slot with new pages. `NOMEM`: the system has no memory.
    pub(crate) fn fill(&self, area: &Staging, slot: Hollow) -> Result<Full, Errno> {
        let to = area.hollow_address(&slot);
        let mut done = 0;
        while done < self.unit.bytes() {
            // SAFETY: the unit of zeros is readable and as long as a unit.
            #[allow(unsafe_code, reason = "the copy reads our own buffer")]
            let progress = unsafe {
                self.staging.copy(self.zeros.address(), to + done, self.unit.bytes() - done)
            };
            done += progress.bytes;
            if let Some(error) = progress.stopped.filter(|error| *error != Errno::AGAIN) {
                return Err(error);
            }
        }
        Ok(area.filled(slot))
    }

    /// Gives the pages of a slot back to the system.
    pub(crate) fn release(&self, area: &Staging, slot: Full) -> Hollow {
        discard_pages(area.full_address(&slot), self.unit.bytes());
        area.emptied(slot)
    }

    /// Registers again what is managed of a range.
    pub(crate) fn register_ranges(&self, table: &Table, start: usize, end: usize) {
        for (from, to) in table.ranges().filter(|(from, to)| *from < end && *to > start) {
            let (from, to) = (from.max(start), to.min(end));
            // It was registered a moment ago.
            self.program.register(from, to - from).ok();
        }
    }

    /// A mapping is changing, and nothing moves until that is read of.
    #[cold]
    fn let_change_happen(&self) {
        self.inbox.pull(&self.program, &self.announced);
        std::thread::yield_now();
    }

    /// Leaves a range to the kernel: no page of it is anywhere but in the program.
    pub(crate) fn unregister(&self, start: usize, end: usize) {
        if start < end {
            // It fails where nothing is mapped any more, and then there is nothing to unregister.
            self.program.unregister(start, end - start).ok();
        }
    }

    /// Wakes who waits in a unit, to try again.
    pub(crate) fn wake(&self, address: usize) {
        // It fails for a range that is not page-aligned only.
        self.program.wake(address, self.unit.bytes()).ok();
    }

    #[allow(unsafe_code, reason = "the seam itself")]
    fn take_out(&self, from: usize, to: usize, bytes: usize) -> Progress {
        // SAFETY: the program finds the bytes again through the userfaultfd `program`, with which the
        // unit is registered, and the unit's lock is held until its state says where they are.
        unsafe { self.staging.move_pages(from, to, bytes) }
    }

    /// Moves or copies `bytes`; says whether a page was left behind in `from`.
    #[allow(unsafe_code, reason = "the seam itself")]
    fn put_in(&self, from: usize, to: usize, bytes: usize) -> bool {
        let mut left_over = false;
        let mut done = 0;
        while done < bytes {
            // SAFETY: the slot's pages are the caller's to give away (STAGE-1).
            let progress = unsafe { self.program.move_pages(from + done, to + done, bytes - done) };
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                // Moved, whatever the kernel says (FOLIO-3); or a hole, while undoing a capture.
                Some(_) if !present(from + done) => done += PAGE_BYTES,
                Some(_) => {
                    left_over = true;
                    self.copy_page(from + done, to + done);
                    done += PAGE_BYTES;
                }
            }
        }
        left_over
    }

    /// Copies one page where a move is refused: read-only memory, or a page shared with a child.
    ///
    /// Where a page is present already it stays (`FOLIO-2`); where nothing is mapped there is nothing
    /// to do.
    #[allow(unsafe_code, reason = "the seam itself")]
    fn copy_page(&self, from: usize, to: usize) {
        loop {
            // SAFETY: `from` is a present page of a slot (STAGE-3).
            let progress = unsafe { self.program.copy(from, to, PAGE_BYTES) };
            match progress.stopped {
                Some(Errno::AGAIN) => self.let_change_happen(),
                Some(Errno::NOMEM) => crate::fatal::out_of_memory(to, Errno::NOMEM),
                _ => return,
            }
        }
    }

    /// Puts back what an unfinished capture took.
    fn undo(&self, slot: usize, address: usize, bytes: usize) {
        if bytes > 0 && self.put_in(slot, address, bytes) {
            discard_pages(slot, bytes);
        }
        self.wake(address);
    }

    /// Gives this process pages of its own where it shares them with a child, so that they can move.
    fn unshare(&self, address: usize, bytes: usize) {
        let mut residency = [0_u8; 512];
        let pages = bytes / PAGE_BYTES;
        if map::residency(address, bytes, &mut residency[..pages]).is_err() {
            return;
        }
        // Only present pages: populating a missing one would be a fault that nobody serves.
        for (index, page) in residency[..pages].iter().enumerate() {
            if page & 1 == 1 {
                map::unshare_pages(address + index * PAGE_BYTES, PAGE_BYTES).ok();
            }
        }
    }
}

/// Whether the page at `address` is resident.
fn present(address: usize) -> bool {
    let mut residency = [0_u8; 1];
    map::residency(address, PAGE_BYTES, &mut residency).is_ok() && residency[0] & 1 == 1
}

/// Drops the pages of a slot.
#[allow(unsafe_code, reason = "the pages of a slot are ours")]
fn discard_pages(address: usize, bytes: usize) {
    // SAFETY: callers own the slot (STAGE-1) and are done with its contents.
    let released = unsafe { map::release(address, bytes) };
    debug_assert!(released.is_ok(), "{released:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: UnitOrder = UnitOrder::DEFAULT;

    fn folios() -> (Folios, Staging, Reservation) {
        let area = Staging::new(4, UNIT).unwrap();
        let [program, staging] =
            needs(Mode::Inline).map(|(reach, features)| Uffd::open(reach, features).unwrap());
        let folios = Folios::new(program, staging, &area, UNIT).unwrap();
        let space = Reservation::new(UNIT.bytes(), UNIT.bytes()).unwrap();
        (folios, area, space)
    }

    fn pages(address: usize) -> Vec<bool> {
        let mut present = vec![0_u8; UNIT.pages()];
        map::residency(address, UNIT.bytes(), &mut present).unwrap();
        present.iter().map(|page| page & 1 == 1).collect()
    }

    /// Goal: a folio with holes goes out whole and comes back as it was. Method: every page present or
    /// not by a bit of a mask.
    #[test]
    #[allow(unsafe_code, reason = "writes to memory mapped for the test")]
    fn a_folio_with_holes_goes_out_and_comes_back() {
        for mask in [1_u16, 0x8000, 0xFFFF, 0x00FF, 0xFF00, 0x5555, 0xAAAA, 0x8001, 0x7FFE, 0x0180]
        {
            let (folios, area, space) = folios();
            for page in (0..16).filter(|page| mask >> page & 1 == 1) {
                let at = space.base().as_ptr().wrapping_add(page * PAGE_BYTES);
                // SAFETY: inside the mapping.
                unsafe { at.write(u8::try_from(page).unwrap() + 1) };
            }
            folios.program.register(space.address(), space.bytes()).unwrap();
            for round in 0..3 {
                let slot = area.take_hollow().unwrap();
                let full =
                    folios.capture(&area, space.address(), slot).expect("something is there");
                assert_eq!(pages(space.address()), [false; 16], "mask {mask:#x} round {round}");
                assert_eq!(
                    pages(area.full_address(&full)),
                    [true; 16],
                    "mask {mask:#x} round {round}"
                );
                for (page, chunk) in area.unit(&full).chunks(PAGE_BYTES).enumerate() {
                    let expected =
                        if mask >> page & 1 == 1 { u8::try_from(page).unwrap() + 1 } else { 0 };
                    assert_eq!((chunk[0], chunk[1]), (expected, 0), "mask {mask:#x} page {page}");
                }
                let at = area.full_address(&full);
                let hollow = folios.place(&area, full, space.address());
                assert_eq!(
                    pages(at),
                    [false; 16],
                    "mask {mask:#x} round {round}: the slot is not hollow"
                );
                assert_eq!(pages(space.address()), [true; 16], "mask {mask:#x} round {round}");
                area.give_hollow(hollow);
            }
        }
    }
}
