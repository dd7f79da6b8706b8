//! Out of the program: folios move into slots.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::uffd::Progress;

use super::staging::{Full, Hollow};
use super::{Mover, REFUSED};
use crate::folio::Units;
use crate::system::Side;

/// What becomes of a page that this process shares with a child or its parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shared {
    /// It is copied, and goes. So the page exists twice until the other process lets go of it.
    Copied,
    /// Its unit stays. A page that was shared, and is this process's alone by now, goes.
    Left,
}

/// Why units could not be taken out of the program. They are still there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No page of the units is present.
    Nothing,
    /// A page is pinned by a device, or shared with a child in a way that cannot be undone now.
    Busy,
    /// The mapping does not allow it: read-only, at an edge, or not there any more.
    Mapping,
}

impl Mover {
    /// Moves adjacent whole folios out of the program by one call, into adjacent slots that begin
    /// with `slot`. The kernel may stop early: returns how many folios were moved. The caller gives
    /// the slots of these to [`Mover::captured`], and captures each of the others into its slot by
    /// [`Mover::capture`].
    pub(crate) fn capture_many(&self, base: usize, folios: usize, slot: &Hollow) -> usize {
        let bytes = self.geometry.folio_bytes();
        let to = self.staging.hollow_address(slot);
        let moved = self.take_out(base, to, folios * bytes).bytes;
        let whole = moved / bytes * bytes;
        // The next folio was moved in part, for example up to a missing page.
        if moved > whole {
            self.undo(to + whole, base + whole, 0..moved - whole);
        }
        whole / bytes
    }

    /// The full slot of a folio that [`Mover::capture_many`] moved.
    pub(crate) fn captured(&self, slot: Hollow) -> Full {
        self.staging.filled(slot, self.geometry.all())
    }

    /// Moves `units` of the folio at `base` out of the program, into `slot`. If some units stay,
    /// returns the reason with the slot. If all of them stay, gives the slot back and returns the
    /// reason alone.
    pub(crate) fn capture(
        &self,
        base: usize,
        units: Units,
        slot: Hollow,
        shared: Shared,
    ) -> Result<(Full, Option<Refusal>), Refusal> {
        let to = self.staging.hollow_address(&slot);
        let (mut taken, mut refused, mut holes) = (Units::NONE, None, 0);
        for mut run in units.runs() {
            while !run.is_empty() {
                let bytes = self.geometry.bytes(run.clone());
                let mut done = bytes.start;
                let answer = self.capture_run(base, to, &mut done, bytes.end, shared, &mut holes);
                let Err(refusal) = answer else {
                    taken |= Units::from(run);
                    break;
                };
                // The unit that could not be moved whole stays in the program; the other units go.
                let stopped = done / self.geometry.unit_bytes();
                taken |= Units::from(run.start..stopped);
                self.undo(to, base, self.geometry.bytes(stopped..stopped + 1));
                refused = Some(refusal);
                run.start = stopped + 1;
            }
        }
        let all_holes = refused.is_none() && holes * PAGE_BYTES == self.geometry.bytes_of(units);
        if all_holes {
            self.release_pages(to, self.geometry.folio_bytes());
            refused = Some(Refusal::Nothing);
        }
        match refused {
            Some(refusal) if all_holes || taken.is_empty() => {
                self.staging.give_hollow(slot);
                Err(refusal)
            }
            _ => Ok((self.staging.filled(slot, taken), refused)),
        }
    }

    /// Moves the folio's bytes from `at` up to `end`, and advances `at` over the pages that are
    /// done. Counts missing pages in `holes`.
    fn capture_run(
        &self,
        base: usize,
        to: usize,
        at: &mut usize,
        end: usize,
        shared: Shared,
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
                // A missing page reads as zeros, or was moved by an earlier call.
                Some(Errno::NOENT) => {
                    match self.system.zero(Side::Staging, to + done, PAGE_BYTES).stopped {
                        None => {
                            *holes += 1;
                            *at += PAGE_BYTES;
                        }
                        Some(Errno::EXIST) => *at += PAGE_BYTES,
                        Some(Errno::AGAIN) => {}
                        // No memory for a page table. Without this page the slot would lack a page
                        // of the unit (STAGE-3).
                        Some(_) => return Err(Refusal::Busy),
                    }
                }
                // The page was moved, whatever the kernel reports (MOVE-3), or a stranger touched the
                // slot. Which of them cannot be asked: a page that was swapped out looks missing.
                // undo() leaves one page of the two, the program's, and the next capture finds the
                // slot clean.
                Some(Errno::EXIST) => return Err(Refusal::Busy),
                Some(Errno::BUSY) if !unshared && self.unshare(base + done, end - done, shared) => {
                    unshared = true;
                }
                Some(Errno::BUSY) => return Err(Refusal::Busy),
                // The range may lie in several mappings, and no move crosses mappings: page by
                // page.
                Some(Errno::INVAL) if next > PAGE_BYTES => at_once = PAGE_BYTES,
                Some(_) => return Err(Refusal::Mapping),
            }
        }
        Ok(())
    }

    #[allow(unsafe_code, reason = "the capture itself")]
    fn take_out(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let steady = loop {
            let steady = self.inbox.steady();
            // By now the address may belong to another mapping (EVT-3).
            if steady.has_change(from, from + bytes) {
                return REFUSED;
            }
            match self.system.is_changing() {
                Ok(false) => break steady,
                Ok(true) => {}
                // A sandbox: nothing goes out, since nothing would come back.
                Err(_) => return REFUSED,
            }
            drop(steady);
            self.let_change_happen();
        };
        // SAFETY: the program finds the bytes again through the messages of its own side, with
        // which the folio is registered, and the folio's lock is held until its state says where
        // they are.
        let progress = unsafe { self.system.move_pages(Side::Staging, from, to, bytes) };
        // No event was read meanwhile: a change that was made before the move is still under way.
        let was_changed = self.is_changing();
        drop(steady);
        if was_changed { self.check_capture((from, to, bytes), progress) } else { progress }
    }

    /// Puts back every page of `part` that an unfinished capture has moved into the slot (MOVE-3).
    /// Tries all pages of the part, since `mincore` does not report pages that were swapped out:
    /// for a missing page the move and the copy fail, and nothing changes.
    pub(super) fn undo(&self, slot: usize, base: usize, part: Range<usize>) {
        if self.put_in(slot + part.start, base + part.start, part.len()) {
            self.release_pages(slot + part.start, part.len());
        }
        self.wake(base);
    }

    /// Makes the pages of a range this process's own, so that they can be moved: for the kernel a page is shared until
    /// it is written to, also when the other process has let go of it. What is still shared is copied, or left. False:
    /// the first page is left.
    fn unshare(&self, address: usize, bytes: usize, shared: Shared) -> bool {
        let (mut residency, mut left) = ([0_u8; 512], [0_u8; 512]);
        let pages = bytes / PAGE_BYTES;
        if self.system.residency(address, bytes, &mut residency[..pages]).is_err()
            || shared == Shared::Left && self.system.shared(address, &mut left[..pages]).is_err()
        {
            return false;
        }
        // Only present pages: to populate a missing one would be a fault that no thread serves.
        for (index, page) in residency[..pages].iter().enumerate() {
            if page & 1 == 1 && left[index] == 0 {
                self.system.unshare(address + index * PAGE_BYTES, PAGE_BYTES).ok();
            }
        }
        left[0] == 0
    }
}
