//! Into the program: the pages of slots are moved or copied, and zeros are placed.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::uffd::Progress;

use super::staging::Full;
use super::{Mover, REFUSED};
use crate::fatal;
use crate::folio::Units;
use crate::mappings::event::Place;
use crate::system::Side;

impl Mover {
    /// Moves the pages of `slot` into the program's folio at `base`, and wakes the threads that
    /// wait for them.
    pub(crate) fn place(&self, mut slot: Full, base: usize) {
        let units = slot.units();
        self.place_units(&mut slot, units, base);
        self.staging.give_hollow(self.staging.emptied(slot));
    }

    /// Like [`Mover::place`], for some units of the slot. It keeps the others.
    pub(crate) fn place_units(&self, slot: &mut Full, units: Units, base: usize) {
        let from = self.staging.full_address(slot);
        for run in units.runs() {
            let bytes = self.geometry.bytes(run);
            if self.put_in(from + bytes.start, base + bytes.start, bytes.len()) {
                self.release_pages(from + bytes.start, bytes.len());
                self.wake_range(base + bytes.start, bytes.len());
            }
        }
        self.staging.take_units(slot, units);
    }

    /// Moves adjacent whole folios into the program by one call, from adjacent slots that begin
    /// with `slot`. The kernel may stop early: returns how many folios were moved. The caller gives
    /// the slots of these to [`Mover::placed`], and places each of the others by [`Mover::place`].
    pub(crate) fn place_many(&self, slot: &Full, base: usize, folios: usize) -> usize {
        let bytes = self.geometry.folio_bytes();
        let progress = self.move_in(self.staging.full_address(slot), base, folios * bytes);
        progress.bytes / bytes
    }

    /// Takes back the slot of a folio that [`Mover::place_many`] moved.
    pub(crate) fn placed(&self, slot: Full) {
        self.staging.give_hollow(self.staging.emptied(slot));
    }

    /// Copies `units` of a slot into the program's folio at `base`, and wakes the threads that wait
    /// for them.
    pub(crate) fn place_copy(&self, slot: &Full, units: Units, base: usize) {
        debug_assert!((units - slot.units()).is_empty(), "STAGE-3");
        for run in units.runs() {
            let bytes = self.geometry.bytes(run);
            self.place_bytes(slot, bytes.clone(), base + bytes.start);
        }
    }

    /// Copies a range of a slot's bytes to any address `to` of the program. The slot has the units
    /// of that range.
    ///
    /// A page that is present already stays (`MOVE-2`); where nothing is mapped, nothing is placed.
    pub(crate) fn place_bytes(&self, slot: &Full, part: Range<usize>, to: usize) {
        if self.copy_in(self.staging.full_address(slot) + part.start, to, part.len()) {
            self.wake_range(to, part.len());
        }
    }

    /// Gives the program new pages of zeros for `units` of the folio at `base`.
    pub(crate) fn place_zeros(&self, units: Units, base: usize) {
        for run in units.runs() {
            let bytes = self.geometry.bytes(run);
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
            // By now the address may belong to another mapping, with contents elsewhere (EVT-3).
            if steady.has_change(page, page + PAGE_BYTES) {
                break Some(Errno::CANCELED);
            }
            let stopped = self.system.zero(Side::Program, page, PAGE_BYTES).stopped;
            drop(steady);
            match stopped {
                Some(Errno::AGAIN) => self.let_change_happen(),
                None | Some(Errno::EXIST | Errno::NOENT | Errno::INVAL | Errno::NOMEM) => {
                    break stopped;
                }
                // None of the kernel's answers. Woken, the thread would fault again, for ever.
                Some(error) => fatal::out_of_memory(page, error),
            }
        };
        // Even if no page was placed: another thread was first, and waiting threads must look
        // again.
        self.wake_range(page, PAGE_BYTES);
        stopped == Some(Errno::EXIST)
    }

    #[allow(unsafe_code, reason = "the move itself")]
    fn move_in(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let steady = self.inbox.steady();
        // A change waits to be applied: copy_in() copies each page to where it belongs by now.
        if steady.has_change(to, to + bytes) {
            return REFUSED;
        }
        // SAFETY: the slots' pages are the caller's to give away (STAGE-1).
        unsafe { self.system.move_pages(Side::Program, from, to, bytes) }
    }

    /// Moves `bytes` into the program, or copies them where that fails. True: a page may be left at
    /// `from`, and a waiting thread may still be asleep.
    pub(super) fn put_in(&self, from: usize, to: usize, bytes: usize) -> bool {
        let mut left_over = false;
        let mut done = 0;
        while done < bytes {
            let progress = self.move_in(from + done, to + done, bytes - done);
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                // The page was moved, whatever the kernel reports (MOVE-3), or cannot be moved. It
                // is copied without looking whether it is still in the slot, because a page that
                // was swapped out looks missing. The copy of a missing page fails and changes
                // nothing.
                Some(_) => {
                    left_over = true;
                    self.copy_in(from + done, to + done, PAGE_BYTES);
                    done += PAGE_BYTES;
                }
            }
        }
        left_over
    }

    /// Copies pages into the program, to where they belong by now (`EVT-3`). True if some were not
    /// placed at `to`, so that the caller must wake the threads that wait there.
    #[allow(unsafe_code, reason = "the copy itself")]
    pub(super) fn copy_in(&self, from: usize, to: usize, bytes: usize) -> bool {
        let mut skipped = false;
        let mut done = 0;
        let mut at_once = bytes;
        let mut missed_at = None;
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
            let progress = unsafe { self.system.copy(Side::Program, from + done, place, next) };
            drop(steady);
            done += progress.bytes;
            match progress.stopped {
                None => {}
                Some(Errno::AGAIN) if progress.bytes > 0 => {}
                Some(Errno::AGAIN) => self.let_change_happen(),
                // No memory, or a sandbox. What is none of the kernel's answers below is not taken for one of them: the
                // bytes would be lost.
                Some(error)
                    if !matches!(
                        error,
                        Errno::EXIST | Errno::FAULT | Errno::INVAL | Errno::NOENT
                    ) =>
                {
                    fatal::out_of_memory(to + done, error)
                }
                // Not missing: there is a memory error, or it cannot be had back from swap.
                Some(Errno::FAULT) if self.system.is_unreadable(from + done) => {
                    fatal::out_of_memory(to + done, Errno::FAULT)
                }
                // The range may lie in several mappings, and no call crosses mappings: page by
                // page.
                Some(error) if error != Errno::EXIST && next > PAGE_BYTES => at_once = PAGE_BYTES,
                // No mapping there, or it was moved while the kernel looked for it. In the latter
                // case the next answer is EAGAIN, until the event of the move is read. So try once
                // more.
                Some(error)
                    if !matches!(error, Errno::EXIST | Errno::FAULT) && missed_at != Some(done) =>
                {
                    missed_at = Some(done);
                }
                // The page is present (MOVE-2), or missing in the slot (EFAULT), or nothing is
                // mapped.
                Some(_) => {
                    skipped = true;
                    done += PAGE_BYTES;
                }
            }
        }
        skipped
    }
}
