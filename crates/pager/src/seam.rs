//! The seam: taking a folio out of the program (`capture`) and putting one in (`place`).
//!
//! Today by `UFFDIO_MOVE` out; back by a move for a whole folio whose pages are ours to give, and by a
//! copy for some units of it. A move changes a page that is mapped, so it interrupts every other CPU
//! that runs the process; a copy does not. A copying way out for kernels from 5.11 to 6.7 goes behind
//! the same functions; nothing above knows how the bytes travel.
//!
//! Two userfaultfds: `program` is told of faults in the program's memory; `staging` only makes slots
//! of the staging area possible targets of a move. They are separate so that giving staged pages
//! back is never an event that somebody must read.
//!
//! # Invariants
//!
//! - `SEAM-1` After `capture` no page of the units that are in the slot it gives is in the program, and
//!   all their bytes are there; every other page is where it was.
//! - `SEAM-2` `place` never puts a page over one that is there: what a program has written since is
//!   newer.
//! - `SEAM-3` What was moved is at least the kernel's count; the rest is told by where the pages are: Linux 6.18
//!   was seen to move pages and then answer `EEXIST` with a count of 0, when other threads touched the
//!   unit meanwhile. A page that is in a slot, or no longer in it, has been moved.
//!
//! # Cost
//!
//! Measured for 64 KiB: capture 3.1 us, place 3.1 us, and 5 to 10 us more each while the process runs
//! on another virtual CPU; a copy 9 us, and 1 us for 4 KiB.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::map::{self, Reservation};
use zfolio_sys::uffd::{Message, Messages, Progress, Reach, Uffd, feature};

use crate::config::Mode;
use crate::event::{Announced, Inbox, Place};
use crate::fatal;
use crate::shape::{Shape, Units};
use crate::staging::{Full, Hollow, LEAVING_MAX, Staging};
use crate::table::Table;

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
    let staging = match mode {
        Mode::Inline => feature::SIGBUS | feature::MOVE,
        Mode::Handler => feature::MOVE,
    };
    [program, (Reach::Program, staging)]
}

/// The two userfaultfds, and a folio of zeros.
#[derive(Debug)]
pub(crate) struct Seam {
    pub(crate) program: Uffd,
    staging: Uffd,
    zeros: Reservation,
    shape: Shape,
    pub(crate) inbox: Inbox,
    pub(crate) announced: Announced,
}

impl Seam {
    /// Takes over both userfaultfds and registers the staging area.
    pub(crate) fn new(
        program: Uffd,
        staging: Uffd,
        area: &Staging,
        shape: Shape,
    ) -> Result<Seam, Errno> {
        let zeros = Reservation::new(shape.folio_bytes(), PAGE_BYTES)?;
        let (inbox, announced) = (Inbox::default(), Announced::default());
        let seam = Seam { program, staging, zeros, shape, inbox, announced };
        seam.register_area(area)?;
        Ok(seam)
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

    /// Moves adjacent whole folios out in one go, as far as it goes, into adjacent slots that begin with
    /// `slot`; tells how many went. The others are to be captured one by one, all the same into their
    /// slots.
    pub(crate) fn capture_many(
        &self,
        area: &Staging,
        base: usize,
        folios: usize,
        slot: &Hollow,
    ) -> usize {
        let bytes = self.shape.folio_bytes();
        let progress = self.take_out(base, area.hollow_address(slot), folios * bytes);
        progress.bytes / bytes
    }

    /// Moves `units` of the folio at `base` out of the program, into `slot`; tells also why some are not
    /// in it, if so.
    pub(crate) fn capture(
        &self,
        area: &Staging,
        base: usize,
        units: Units,
        slot: Hollow,
    ) -> Result<(Full, Option<Refusal>), (Hollow, Refusal)> {
        let to = area.hollow_address(&slot);
        let (mut taken, mut refused, mut holes) = (Units::NONE, None, 0);
        for mut run in units.runs() {
            while !run.is_empty() {
                let bytes = self.shape.bytes(run.clone());
                let mut done = bytes.start;
                let answer = self.capture_run(base, to, &mut done, bytes.end, &mut holes);
                let Err(refusal) = answer else {
                    taken |= Units::from(run);
                    break;
                };
                // The unit that could not be taken whole stays; the others go.
                let stopped = done / self.shape.unit_bytes();
                taken |= Units::from(run.start..stopped);
                self.undo(to, base, self.shape.bytes(stopped..stopped + 1), done);
                refused = Some(refusal);
                run.start = stopped + 1;
            }
        }
        if refused.is_none() && holes * PAGE_BYTES == self.shape.bytes_of(units) {
            discard_pages(to, self.shape.folio_bytes());
            return Err((slot, Refusal::Nothing));
        }
        if let (true, Some(refusal)) = (taken.is_empty(), refused) {
            return Err((slot, refusal));
        }
        Ok((area.filled(slot, taken), refused))
    }

    /// Moves the folio's bytes from `at`, which rises, to `end`.
    fn capture_run(
        &self,
        base: usize,
        to: usize,
        at: &mut usize,
        end: usize,
        holes: &mut usize,
    ) -> Result<(), Refusal> {
        let mut unshared = false;
        let mut at_once = end - *at;
        while *at < end {
            let next = at_once.min(end - *at);
            let progress = self.take_out(base + *at, to + *at, next);
            *at += progress.bytes;
            let done = *at;
            match progress.stopped {
                None | Some(Errno::AGAIN) => {}
                // A page that is not there is a page of zeros, or went with an earlier move.
                Some(Errno::NOENT) => {
                    let zeroed = self.staging.zero(to + done, PAGE_BYTES);
                    *holes += usize::from(zeroed.stopped.is_none());
                    *at += PAGE_BYTES;
                }
                // SEAM-3: the page is in the slot and no longer in the program: it was moved. If it is in
                // both, a stranger touched the slot, and undo() cleans it.
                Some(Errno::EXIST) if present(to + done) && !present(base + done) => {
                    *at += PAGE_BYTES;
                }
                Some(Errno::BUSY) if !unshared => {
                    unshared = true;
                    self.unshare(base + done, end - done);
                }
                Some(Errno::BUSY) => return Err(Refusal::Busy),
                // The range may be of several mappings, which no move crosses: page by page.
                Some(Errno::INVAL) if next > PAGE_BYTES => at_once = PAGE_BYTES,
                Some(_) => return Err(Refusal::Mapping),
            }
        }
        Ok(())
    }

    /// Moves the pages of `slot` into the program's folio at `base`, and wakes who waits there.
    pub(crate) fn place(&self, area: &Staging, slot: Full, base: usize) -> Hollow {
        let from = area.full_address(&slot);
        let mut left_over = false;
        for run in slot.units().runs() {
            let bytes = self.shape.bytes(run);
            left_over |= self.put_in(from + bytes.start, base + bytes.start, bytes.len());
        }
        if left_over {
            discard_pages(from, self.shape.folio_bytes());
            self.wake(base);
        }
        area.emptied(slot)
    }

    /// Moves adjacent whole folios in in one go, as far as it goes, from adjacent slots that begin with
    /// `slot`; tells how many went. The others are to be placed one by one, all the same.
    pub(crate) fn place_many(
        &self,
        area: &Staging,
        slot: &Full,
        base: usize,
        folios: usize,
    ) -> usize {
        let bytes = self.shape.folio_bytes();
        let progress = self.move_in(area.full_address(slot), base, folios * bytes);
        progress.bytes / bytes
    }

    /// Copies `units` of a slot into the program's folio at `base`, and wakes who waits there.
    pub(crate) fn place_copy(&self, area: &Staging, slot: &Full, units: Units, base: usize) {
        debug_assert!((units - slot.units()).is_empty(), "STAGE-3");
        for run in units.runs() {
            let bytes = self.shape.bytes(run);
            self.place_bytes(area, slot, bytes.clone(), base + bytes.start);
        }
    }

    /// Copies a range of a slot's bytes, which it has, to `to`, wherever that is.
    ///
    /// Where a page is present already it stays (`SEAM-2`); where nothing is mapped there is nothing
    /// to do.
    pub(crate) fn place_bytes(&self, area: &Staging, slot: &Full, part: Range<usize>, to: usize) {
        if self.copy_in(area.full_address(slot) + part.start, to, part.len()) {
            self.wake_range(to, part.len());
        }
    }

    /// Gives the program zeros, with new pages, for `units` of the folio at `base`.
    pub(crate) fn place_zeros(&self, units: Units, base: usize) {
        for run in units.runs() {
            let bytes = self.shape.bytes(run);
            if self.copy_in(self.zeros.address(), base + bytes.start, bytes.len()) {
                self.wake_range(base + bytes.start, bytes.len());
            }
        }
    }

    /// Gives the program one page of zeros. True: a page was there already.
    pub(crate) fn place_zero_page(&self, address: usize) -> bool {
        let page = address & !(PAGE_BYTES - 1);
        let stopped = loop {
            let steady = self.inbox.steady();
            // What lies there by now may have its contents elsewhere (EVT-3).
            if steady.has_change(page, page + PAGE_BYTES) {
                break Some(Errno::CANCELED);
            }
            let stopped = self.program.zero(page, PAGE_BYTES).stopped;
            drop(steady);
            match stopped {
                Some(Errno::AGAIN) => self.let_change_happen(),
                stopped => break stopped,
            }
        };
        // Also if there is none: somebody else was first, and who waits must look again.
        self.wake_range(page, PAGE_BYTES);
        stopped == Some(Errno::EXIST)
    }

    /// Fills a hollow slot with new pages. `NOMEM`: the system has no memory.
    pub(crate) fn fill(&self, area: &Staging, slot: Hollow) -> Result<Full, Errno> {
        let to = area.hollow_address(&slot);
        let mut done = 0;
        let bytes = self.shape.folio_bytes();
        while done < bytes {
            // SAFETY: the folio of zeros is readable and as long as a slot.
            #[allow(unsafe_code, reason = "the copy reads our own buffer")]
            let progress =
                unsafe { self.staging.copy(self.zeros.address(), to + done, bytes - done) };
            done += progress.bytes;
            match progress.stopped {
                None | Some(Errno::AGAIN) => {}
                // A stranger touched the slot; it is ours now all the same.
                Some(Errno::EXIST) => done += PAGE_BYTES,
                Some(error) => return Err(error),
            }
        }
        Ok(area.filled(slot, self.shape.all()))
    }

    /// Gives the pages of a slot back to the system.
    pub(crate) fn release(&self, area: &Staging, slot: Full) -> Hollow {
        discard_pages(area.full_address(&slot), self.shape.folio_bytes());
        area.emptied(slot)
    }

    /// Gives the pages of several slots back, those that lie side by side together.
    pub(crate) fn release_many(&self, area: &Staging, slots: [Option<Full>; LEAVING_MAX]) {
        let mut adjacent = 0..0;
        for slot in slots.iter().flatten() {
            let from = area.full_address(slot);
            if from != adjacent.end {
                discard_pages(adjacent.start, adjacent.len());
                adjacent.start = from;
            }
            adjacent.end = from + self.shape.folio_bytes();
        }
        discard_pages(adjacent.start, adjacent.len());
        slots.into_iter().flatten().for_each(|slot| area.give_hollow(area.emptied(slot)));
    }

    /// Sleeps until there is something to serve, or to be told of. True: in the staging area.
    pub(crate) fn wait(&self, milliseconds: u16) -> bool {
        self.program.wait(&self.staging, milliseconds)
    }

    /// Answers threads that look at the staging area, where none of the program's has any business: it
    /// is in `/proc/self/maps`, and some programs read all of that. They see zeros.
    #[cold]
    pub(crate) fn answer_strangers(&self) {
        let mut messages = Messages::default();
        for message in self.staging.read(&mut messages).unwrap_or_default() {
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
        if self.staging.zero(page, PAGE_BYTES).stopped.is_some() {
            self.staging.wake(page, PAGE_BYTES).ok();
        }
    }

    /// Whether the kernel serves a touch of `address`, in memory that was managed once.
    pub(crate) fn is_the_kernels(&self, address: usize) -> bool {
        map::unshare_pages(address & !(PAGE_BYTES - 1), PAGE_BYTES).is_ok()
    }

    /// Registers again what is managed of a range.
    pub(crate) fn register_ranges(&self, table: &Table, start: usize, end: usize) {
        for (from, to) in table.ranges().iter().filter(|(from, to)| *from < end && *to > start) {
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

    /// Wakes who waits in a folio, to try again.
    pub(crate) fn wake(&self, base: usize) {
        self.wake_range(base, self.shape.folio_bytes());
    }

    /// Wakes who waits in a range.
    fn wake_range(&self, start: usize, bytes: usize) {
        match self.program.wake(start, bytes) {
            // A sandbox that the program has put all its threads into. What failed before us failed for that.
            Err(error) if fatal::is_forbidden(error) => fatal::forbidden(error),
            // Only for a range that is not page-aligned.
            answer => debug_assert!(answer.is_ok(), "{answer:?}"),
        }
    }

    #[allow(unsafe_code, reason = "the seam itself")]
    fn take_out(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let steady = self.inbox.steady();
        // What lies there may be somebody else's by now (EVT-3).
        if steady.has_change(from, from + bytes) {
            return Progress { bytes: 0, stopped: Some(Errno::CANCELED) };
        }
        // SAFETY: the program finds the bytes again through the userfaultfd `program`, with which the
        // folio is registered, and the folio's lock is held until its state says where they are.
        unsafe { self.staging.move_pages(from, to, bytes) }
    }

    #[allow(unsafe_code, reason = "the seam itself")]
    fn move_in(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let steady = self.inbox.steady();
        // Each page by copy_in(), to where it belongs by now.
        if steady.has_change(to, to + bytes) {
            return Progress { bytes: 0, stopped: Some(Errno::CANCELED) };
        }
        // SAFETY: the slots' pages are the caller's to give away (STAGE-1).
        unsafe { self.program.move_pages(from, to, bytes) }
    }

    /// Moves or copies `bytes`; says whether a page may be left behind in `from`, and a thread asleep.
    fn put_in(&self, from: usize, to: usize, bytes: usize) -> bool {
        let mut left_over = false;
        let mut done = 0;
        while done < bytes {
            let progress = self.move_in(from + done, to + done, bytes - done);
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                // Moved, whatever the kernel says (SEAM-3), or not to be moved. Whether a page is left in
                // the slot is not asked: one that was swapped out is, and does not look so. The copy of
                // a page that is not there fails.
                Some(_) => {
                    left_over = true;
                    self.copy_in(from + done, to + done, PAGE_BYTES);
                    done += PAGE_BYTES;
                }
            }
        }
        left_over
    }

    /// Copies pages of ours into the program, to where they belong by now (`EVT-3`). Tells whether some
    /// did not come to `to`, and who waits there is to be woken.
    #[allow(unsafe_code, reason = "the seam itself")]
    fn copy_in(&self, from: usize, to: usize, bytes: usize) -> bool {
        let mut skipped = false;
        let mut done = 0;
        let mut at_once = bytes;
        while done < bytes {
            let next = at_once.min(bytes - done);
            let steady = self.inbox.steady();
            let place = match steady.place_now(to + done, next) {
                Place::Here => to + done,
                Place::There(place) => {
                    skipped = true;
                    place
                }
                Place::Apart => {
                    at_once = PAGE_BYTES;
                    continue;
                }
                Place::Nowhere => {
                    skipped = true;
                    done += next;
                    continue;
                }
            };
            // SAFETY: the source is present pages of a slot (STAGE-3), or the folio of zeros.
            let progress = unsafe { self.program.copy(from + done, place, next) };
            drop(steady);
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                Some(Errno::NOMEM) => fatal::out_of_memory(to + done, Errno::NOMEM),
                // The range may be of several mappings, which no call crosses: page by page.
                Some(error) if error != Errno::EXIST && next > PAGE_BYTES => at_once = PAGE_BYTES,
                // Present already (SEAM-2), or no mapping there.
                Some(_) => {
                    skipped = true;
                    done += PAGE_BYTES;
                }
            }
        }
        skipped
    }

    /// Puts back what an unfinished capture took of `unit`: all below `done`, and above every page that is
    /// in the slot (SEAM-3). Below nothing is asked: what was swapped out moves too, and is not resident.
    fn undo(&self, slot: usize, base: usize, unit: Range<usize>, done: usize) {
        let taken = done - unit.start;
        let mut left_over = self.put_in(slot + unit.start, base + unit.start, taken);
        let mut residency = [0_u8; 512];
        let pages = &mut residency[..(unit.end - done) / PAGE_BYTES];
        let looked = map::residency(slot + done, unit.end - done, pages);
        debug_assert!(looked.is_ok(), "the area is mapped");
        let mut at = done;
        for run in pages.chunk_by(|page, next| page & 1 == next & 1) {
            let bytes = run.len() * PAGE_BYTES;
            if run[0] & 1 == 1 {
                left_over |= self.put_in(slot + at, base + at, bytes);
            }
            at += bytes;
        }
        if left_over {
            discard_pages(slot + unit.start, unit.len());
        }
        self.wake(base);
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
    if bytes == 0 {
        return;
    }
    // SAFETY: callers own the slot (STAGE-1) and are done with its contents.
    let released = unsafe { map::release(address, bytes) };
    debug_assert!(released.is_ok(), "{released:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use zfolio_core::page::UnitOrder;

    const FOLIO_BYTES: usize = 64 << 10;

    fn world(unit_bytes: usize) -> (Seam, Staging, Reservation, Shape) {
        let shape = Shape::new(UnitOrder::from_bytes(unit_bytes).unwrap());
        let area = Staging::new(4, 1, shape).unwrap();
        let [program, staging] =
            needs(Mode::Inline).map(|(reach, features)| Uffd::open(reach, features).unwrap());
        let seam = Seam::new(program, staging, &area, shape).unwrap();
        let space = Reservation::new(FOLIO_BYTES, FOLIO_BYTES).unwrap();
        seam.program.register(space.address(), space.bytes()).unwrap();
        (seam, area, space, shape)
    }

    /// A bit for each page that is resident.
    fn pages(address: usize) -> u16 {
        let mut present = [0_u8; 16];
        map::residency(address, FOLIO_BYTES, &mut present).unwrap();
        (0..16).filter(|page| present[*page] & 1 == 1).map(|page| 1 << page).sum()
    }

    /// Makes the pages of `mask` resident; page `p` begins with `p + 1`.
    fn populate(seam: &Seam, space: &Reservation, mask: u16) {
        for page in (0..16_usize).filter(|page| mask >> page & 1 == 1) {
            let contents = vec![u8::try_from(page).unwrap() + 1; PAGE_BYTES];
            let to = space.address() + page * PAGE_BYTES;
            seam.copy_in(contents.as_ptr() as usize, to, PAGE_BYTES);
        }
        assert_eq!(pages(space.address()), mask);
    }

    fn first_byte(area: &Staging, slot: &Full, shape: Shape, page: usize) -> u8 {
        let address = page * PAGE_BYTES;
        area.unit(slot, shape.index(address))[address % shape.unit_bytes()]
    }

    /// Goal: a folio with holes goes out whole and comes back as it was. Method: every page present or
    /// not by a bit of a mask.
    #[test]
    fn a_folio_with_holes_goes_out_and_comes_back() {
        for mask in [1_u16, 0x8000, 0xFFFF, 0x00FF, 0xFF00, 0x5555, 0xAAAA, 0x8001, 0x7FFE, 0x0180]
        {
            let (seam, area, space, shape) = world(FOLIO_BYTES);
            populate(&seam, &space, mask);
            for round in 0..3 {
                let slot = area.take_hollow().unwrap();
                let answer = seam.capture(&area, space.address(), shape.all(), slot);
                let (full, refused) = answer.expect("something is there");
                assert_eq!(refused, None);
                assert_eq!(pages(space.address()), 0, "mask {mask:#x} round {round}");
                let at = area.full_address(&full);
                assert_eq!(pages(at), 0xFFFF, "mask {mask:#x} round {round}");
                for page in 0..16 {
                    let expected =
                        if mask >> page & 1 == 1 { u8::try_from(page).unwrap() + 1 } else { 0 };
                    assert_eq!(first_byte(&area, &full, shape, page), expected, "{mask:#x} {page}");
                }
                let hollow = seam.place(&area, full, space.address());
                assert_eq!(pages(at), 0, "mask {mask:#x} round {round}: the slot is not hollow");
                assert_eq!(pages(space.address()), 0xFFFF, "mask {mask:#x} round {round}");
                area.give_hollow(hollow);
            }
        }
    }

    /// Goal: some units go out, the others stay where they are, and the slot has exactly those.
    #[test]
    fn some_units_go_out_and_the_others_stay() {
        for units in [0x1_usize, 0x8000, 0x00F0, 0x5A5A, 0xFFFE] {
            let (seam, area, space, shape) = world(PAGE_BYTES);
            populate(&seam, &space, 0xFFFF);
            let mask = u16::try_from(units).unwrap();
            let wanted = (0..16).filter(|unit| units >> unit & 1 == 1);
            let wanted = wanted.fold(Units::NONE, |all, unit| all | Units::one(unit));
            let slot = area.take_hollow().unwrap();
            let (full, refused) =
                seam.capture(&area, space.address(), wanted, slot).expect("there");
            assert_eq!(refused, None);
            assert_eq!((pages(space.address()), pages(area.full_address(&full))), (!mask, mask));
            assert_eq!(area.bytes_used(), shape.bytes_of(wanted));
            for unit in wanted.iter() {
                assert_eq!(usize::from(first_byte(&area, &full, shape, unit)), unit + 1);
            }
            area.give_hollow(seam.place(&area, full, space.address()));
            assert_eq!((pages(space.address()), area.bytes_used()), (0xFFFF, 0));
        }
    }

    /// Goal: a copy fills what is missing and leaves what is there (SEAM-2).
    #[test]
    fn a_copy_does_not_touch_what_is_there() {
        let (seam, area, space, shape) = world(PAGE_BYTES);
        populate(&seam, &space, 0x0006);
        let slot = area.take_hollow().unwrap();
        let mut full = seam.fill(&area, slot).unwrap();
        shape.all().iter().for_each(|unit| area.unit_mut(&mut full, unit).fill(0x77));
        seam.place_copy(&area, &full, Units::from(0..4), space.address());
        assert_eq!(pages(space.address()), 0x000F);
        assert_eq!(pages(area.full_address(&full)), 0xFFFF, "the slot keeps its pages");
        let slot = area.take_hollow().unwrap();
        let back = seam.capture(&area, space.address(), Units::from(0..4), slot).expect("there").0;
        let firsts = [0, 1, 2, 3].map(|unit| first_byte(&area, &back, shape, unit));
        assert_eq!(firsts, [0x77, 2, 3, 0x77]);
    }

    /// Goal: a folio of two mappings comes back whole. Method: one page is kept from children, so that
    /// the kernel cuts the mapping there.
    #[test]
    fn a_copy_crosses_mappings() {
        for mapped_apart in [0, 7, 15] {
            let (seam, area, space, shape) = world(PAGE_BYTES);
            let apart = space.address() + mapped_apart * PAGE_BYTES;
            map::keep_from_children(apart, PAGE_BYTES).unwrap();
            let slot = area.take_hollow().unwrap();
            let full = seam.fill(&area, slot).unwrap();
            seam.place_copy(&area, &full, shape.all(), space.address());
            assert_eq!(pages(space.address()), 0xFFFF, "page {mapped_apart}");
        }
    }

    /// Goal: a folio of two mappings goes out whole.
    #[test]
    fn a_capture_crosses_mappings() {
        for mapped_apart in [0, 7, 15] {
            let (seam, area, space, shape) = world(16 << 10);
            populate(&seam, &space, 0xFFFF);
            let apart = space.address() + mapped_apart * PAGE_BYTES;
            map::keep_from_children(apart, PAGE_BYTES).unwrap();
            let slot = area.take_hollow().unwrap();
            let answer = seam.capture(&area, space.address(), shape.all(), slot);
            let (full, refused) = answer.expect("every page can be moved");
            assert_eq!((refused, pages(space.address())), (None, 0), "page {mapped_apart}");
            assert_eq!(pages(area.full_address(&full)), 0xFFFF);
        }
    }

    /// Goal: a page that cannot be moved keeps its unit, and no other. Method: it is read-only.
    #[test]
    fn what_cannot_be_moved_stays_and_the_rest_goes() {
        for fixed in [0, 5, 15] {
            let (seam, area, space, shape) = world(16 << 10);
            populate(&seam, &space, 0xFFFF);
            let at = space.base().as_ptr().wrapping_add(fixed * PAGE_BYTES).cast();
            // SAFETY: a page of our own mapping.
            #[allow(unsafe_code, reason = "what a program may do")]
            let changed = unsafe { libc::mprotect(at, PAGE_BYTES, libc::PROT_READ) };
            assert_eq!(changed, 0);
            let slot = area.take_hollow().unwrap();
            let answer = seam.capture(&area, space.address(), shape.all(), slot);
            let (full, refused) = answer.expect("three units can be moved");
            let stays = 0xF << (fixed / 4 * 4);
            assert_eq!((refused, pages(space.address())), (Some(Refusal::Mapping), stays));
            assert_eq!(full.units(), shape.all() - Units::one(fixed / 4));
            assert_eq!(pages(area.full_address(&full)), !stays);
            area.give_hollow(seam.place(&area, full, space.address()));
            assert_eq!(pages(space.address()), 0xFFFF);
        }
    }

    /// Goal: a slot that a stranger touched costs a refusal, never a byte. Method: a page of zeros in the
    /// middle of a hollow slot; the unit must be whole after the refusal, and go out the next time.
    #[test]
    fn a_slot_that_a_stranger_touched_loses_nothing() {
        for unit_bytes in [PAGE_BYTES, FOLIO_BYTES] {
            let (seam, area, space, shape) = world(unit_bytes);
            populate(&seam, &space, 0xFFFF);
            let slot = area.take_hollow().unwrap();
            seam.answer_stranger(area.hollow_address(&slot) + 5 * PAGE_BYTES + 9);
            assert_eq!(pages(area.hollow_address(&slot)), 1 << 5);
            let slot = match seam.capture(&area, space.address(), shape.all(), slot) {
                Ok((full, refused)) => {
                    assert_eq!((refused, shape.units()), (Some(Refusal::Mapping), 16));
                    assert_eq!(pages(space.address()), 1 << 5);
                    area.give_hollow(seam.place(&area, full, space.address()));
                    area.take_hollow().unwrap()
                }
                Err((slot, refusal)) => {
                    assert_eq!((refusal, shape.units()), (Refusal::Mapping, 1));
                    slot
                }
            };
            assert_eq!(pages(space.address()), 0xFFFF);
            let answer = seam.capture(&area, space.address(), shape.all(), slot);
            let (full, refused) = answer.expect("clean now");
            assert_eq!(refused, None);
            for page in 0..16 {
                assert_eq!(usize::from(first_byte(&area, &full, shape, page)), page + 1);
            }
        }
    }

    /// Goal: what was never written is told apart, and leaves nothing in the slot.
    #[test]
    fn a_folio_without_a_page_is_refused() {
        let (seam, area, space, shape) = world(16 << 10);
        let slot = area.take_hollow().unwrap();
        let (slot, refusal) = seam.capture(&area, space.address(), shape.all(), slot).unwrap_err();
        assert_eq!(refusal, Refusal::Nothing);
        assert_eq!((pages(area.hollow_address(&slot)), area.bytes_used()), (0, 0));
    }
}
