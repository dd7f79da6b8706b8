//! Pages of which it is not known whether they were captured before a change of mappings or after it.
//!
//! A program that moves a mapping onto memory in use, past the C library (`mremap` with `MREMAP_FIXED`), replaces that
//! memory at once, and its events come after. A capture in between takes pages of the new mapping for those of the old
//! one. The kernel says whether a change is under way, and does so until the change's events were read, which nobody
//! does while a capture goes on. So a capture begins when none is under way, and one after which none is under way was
//! before any. After another one, in whose few microseconds a change has begun, the events are read; and what was
//! captured where they say that a mapping was moved to is in doubt: if it was there before, it is to be dropped, and if
//! it came with the move, it is to be put back. Which of the two is known once the move is applied
//! (`Engine::apply_changes`).

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::uffd::Progress;

use super::{Mover, REFUSED};
use crate::fatal::{self, IOCTL};

/// What one call has captured: all of it before the change, or all of it after.
#[derive(Debug)]
pub(crate) struct Doubt {
    /// Where the mapping was moved to.
    target: usize,
    /// Where each page was.
    pub(crate) places: Vec<usize>,
    /// The bytes of one page after the other.
    bytes: Vec<u8>,
}

impl Mover {
    /// After a capture of `from..from + bytes` into `to`, at whose end a change was under way: reads the events, and
    /// says what of the capture counts. The caller has the table, so nothing is applied meanwhile.
    pub(super) fn check_capture(
        &self,
        (from, to, bytes): (usize, usize, usize),
        progress: Progress,
    ) -> Progress {
        while self.is_changing() {
            self.let_change_happen();
        }
        let steady = self.inbox.steady();
        let target = |at| Some((at, steady.moved_onto(from + at)?));
        let moved_onto: Vec<_> = (0..bytes).step_by(PAGE_BYTES).filter_map(target).collect();
        if moved_onto.is_empty() {
            // What seems to be missing may have been moved away.
            let is_known = progress.bytes > 0 || !steady.has_change(from, from + bytes);
            return if is_known { progress } else { REFUSED };
        }
        drop(steady);
        let mut doubts: Vec<Doubt> = Vec::new();
        for (at, target) in moved_onto {
            // What was moved and not reported (MOVE-3), too.
            if at >= progress.bytes && !self.has_page(to + at) {
                continue;
            }
            if doubts.last().is_none_or(|last| last.target != target) {
                doubts.push(Doubt { target, places: Vec::new(), bytes: Vec::new() });
            }
            let doubt = doubts.last_mut().expect("pushed above");
            doubt.places.push(from + at);
            doubt.bytes.extend_from_slice(self.page_of_slot(to + at));
            self.release_pages(to + at, PAGE_BYTES);
        }
        self.doubts.lock().append(&mut doubts);
        self.undo(to, from, 0..bytes);
        REFUSED
    }

    /// Whether a change of mappings is under way, while it is not known where captured pages belong.
    pub(super) fn is_changing(&self) -> bool {
        self.system.is_changing().unwrap_or_else(|error| fatal::forbidden(IOCTL, error))
    }

    /// Whether a page is seen at an address: one that was swapped out is not.
    fn has_page(&self, address: usize) -> bool {
        let mut present = [0];
        let answer = self.system.residency(address, PAGE_BYTES, &mut present);
        answer.is_ok() && present[0] & 1 == 1
    }

    #[allow(unsafe_code, reason = "a page of the caller's slot")]
    fn page_of_slot(&self, address: usize) -> &[u8] {
        debug_assert!(self.has(address));
        // SAFETY: the page is in a slot that the capturing thread owns (STAGE-1), and is present: a move has put it
        // there. Nobody writes to it until that thread gives it back, after this borrow.
        unsafe { std::slice::from_raw_parts(address as *const u8, PAGE_BYTES) }
    }

    /// Takes the doubts about pages that may have come with the move of a mapping to `target`.
    pub(crate) fn take_doubts(&self, target: usize) -> Vec<Doubt> {
        let mut doubts = self.doubts.lock();
        let (taken, kept) = doubts.drain(..).partition(|doubt: &Doubt| doubt.target == target);
        *doubts = kept;
        taken
    }

    /// Whether there are doubts: only about changes that wait to be applied.
    pub(crate) fn has_doubts(&self) -> bool {
        !self.doubts.lock().is_empty()
    }

    /// Puts pages back that came with the move of a mapping. If one of their places has a page, that one came with the
    /// move, and they were there before it: they are dropped.
    pub(crate) fn place_doubt(&self, doubt: &Doubt) {
        if doubt.places.iter().any(|place| self.has_page(*place)) {
            return;
        }
        for (bytes, place) in doubt.bytes.chunks_exact(PAGE_BYTES).zip(&doubt.places) {
            self.copy_in(bytes.as_ptr() as usize, *place, PAGE_BYTES);
            self.wake_range(*place, PAGE_BYTES);
        }
    }
}
