//! Changes of mappings: what `munmap`, `madvise` and `mlock` do to managed memory; `relocate` has `mremap`.
//!
//! Each change holds the table for writing during the system call and the updates that follow, so
//! no folio moves and no fault is served meanwhile (`ENG-1`): the program sees exactly what it
//! would see without the engine. A folio that a change covers only in part is brought back first,
//! so that the kernel alone decides what each of its pages holds.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::ranges::Ranges;
use zfolio_core::stats::{add, subtract};
use zfolio_core::sync::WriteGuard;
use zfolio_sys::Errno;

use crate::engine::Engine;
use crate::folio::{Folio, Table, Units};
use crate::rank;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;

/// What is looked at in one call: as much as the kernel looks at in one go.
const LOOK_BYTES: usize = 4096 * PAGE_BYTES;

pub(crate) type Written<'a> = WriteGuard<'a, { rank::TABLE }, Table>;

impl Engine {
    /// The table, for a change that the engine makes, with all units of the folios that overlap `needed` in the
    /// pool. Changes that were read and wait come first: their calls have returned, so this change is the later one,
    /// and what is kept for an old address may belong to the new one by now (`EVT-3`).
    pub(crate) fn table_for_change(&self, needed: &[(usize, usize)]) -> Written<'_> {
        let _hold = self.hold_back();
        loop {
            let mut table = self.table.write();
            let mut away = Vec::new();
            // By the lock, for which what is being read waits.
            if self.mover.inbox.first_change().is_some() {
                away = self.apply_changes(&mut table).err().unwrap_or_default();
                self.measure_tables(&mut table);
            }
            if away.is_empty() {
                needed.iter().for_each(|range| self.note_away(&table, *range, &mut away));
            }
            if away.is_empty() {
                return table;
            }
            drop(table);
            self.await_tickets(&away);
        }
    }

    /// The folios that a change of `start..end` covers only in part, as ranges; of an empty range there are none.
    pub(crate) fn edges(&self, start: usize, end: usize) -> [(usize, usize); 2] {
        if start == end {
            return [(0, 0); 2];
        }
        let (geometry, bytes) = (self.geometry(), self.geometry().folio_bytes());
        let (first, last) = (geometry.base(start), geometry.base(end));
        // A program may name any address, also the last folio of all.
        let above = |edge: usize| edge.saturating_add(bytes);
        let first_is_partial = first != start || above(first) > end;
        [(first, first_is_partial), (last, last != end)]
            .map(|(edge, is_partial)| if is_partial { (edge, above(edge)) } else { (0, 0) })
    }

    /// Makes `call`, which unmaps a range or maps it anew; the range is no longer managed if `call`
    /// succeeds.
    ///
    /// # Errors
    ///
    /// Those of `call`. Then all contents are as before; folios that the range covers only in part
    /// are no longer managed.
    pub fn unmap<R, E>(
        &self,
        start: usize,
        end: usize,
        call: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        let mut table = self.table_for_change(&self.edges(start, end));
        self.settle_edges(&table, start, end, true);
        let answer = self.announce((start, end), (0, 0), call)?;
        self.unregister_around(&table, start, end);
        self.forget_range(&mut table, start, end);
        self.measure_tables(&mut table);
        add(&self.figures().unmaps, 1);
        Ok(answer)
    }

    /// Leaves to the kernel what lies outside a range, of the folios that it covers only in part: that was brought
    /// back.
    pub(super) fn unregister_around(&self, table: &Table, start: usize, end: usize) {
        let outer = table.exterior(start, end);
        self.unregister(table, outer.0, start);
        self.unregister(table, end, outer.1);
    }

    /// Unregisters what is covered of a range (`ADOPT-3`). If a mapping of a file were in it, the kernel would
    /// unregister nothing; and a mapping of the program's that stays registered in part is two mappings, which `mremap`
    /// refuses.
    pub(super) fn unregister(&self, table: &Table, start: usize, end: usize) {
        for (start, end) in table.covered(start, end) {
            // A mapping that is registered in part becomes one again later only if all of it has one `anon_vma`, which
            // the kernel gives it with its first page. So it gets one before it is cut.
            self.mover.have_page(start);
            self.mover.have_page(end - PAGE_BYTES);
            if self.mover.unregister(start, end).is_ok() {
                continue;
            }
            // A mapping smaller than a folio was unmapped, of which the kernel told nothing; a file is mapped there.
            self.mapped(start, end).iter().for_each(|(from, to)| self.unregister_parts(from, to));
        }
    }

    /// Unregisters what can be of a range, half by half where that is not all.
    fn unregister_parts(&self, start: usize, end: usize) {
        if self.mover.unregister(start, end).is_err() && end - start > PAGE_BYTES {
            let middle = start + ((end - start) / 2).next_multiple_of(PAGE_BYTES);
            self.unregister_parts(start, middle);
            self.unregister_parts(middle, end);
        }
    }

    /// Forgets a range that is unmapped, or mapped anew; folios that are only partly in it were left to the kernel.
    pub(super) fn forget_range(&self, table: &mut Table, start: usize, end: usize) {
        for (address, lock) in table.known_folios(start, end) {
            if address >= start && address + self.geometry().folio_bytes() <= end {
                self.drop_folio(&mut lock.lock(), false);
            }
        }
        table.forget(start, end);
    }

    /// Makes `call`, which gets start and length of a range and drops its contents: the range reads
    /// as zeros from now on.
    ///
    /// # Errors
    ///
    /// Those of `call`, which may have dropped a first part of the range by then.
    pub fn discard<R>(
        &self,
        start: usize,
        end: usize,
        call: impl Fn(usize, usize) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let table = self.table_for_change(&self.edges(start, end));
        self.settle_edges(&table, start, end, false);
        // ENOMEM: part of the range is not mapped, and the contents of all the rest were dropped.
        let dropped = |answer: &Result<R, Errno>| matches!(answer, Ok(_) | Err(Errno::NOMEM));
        let asked = end;
        let (answer, end) = self.announce((start, end), (0, 0), || {
            let answer = call(start, end - start);
            if dropped(&answer) {
                return (answer, end);
            }
            // The kernel drops one mapping after the other and stops at one that it refuses
            // (locked, sealed). To find that one, the call is repeated page by page.
            let refused =
                (start..end).step_by(PAGE_BYTES).find(|page| !dropped(&call(*page, PAGE_BYTES)));
            (answer, refused.unwrap_or(end))
        });
        let edge = self.geometry().base(end);
        if let Some(lock) = table.known(edge).filter(|_| end < asked && edge < end) {
            let mut folio = lock.lock();
            if folio.managed {
                self.wait_holding_locks(&table, &folio, edge);
                let dropped = start.max(edge) - edge..end - edge;
                self.bring_back_without(&mut folio, edge, &[dropped]);
            }
        }
        for (address, lock) in table.known_folios(start, end) {
            if address >= start && address + self.geometry().folio_bytes() <= end {
                let mut folio = lock.lock();
                let managed = folio.managed;
                self.drop_folio(&mut folio, managed);
            }
        }
        add(&self.figures().removes, 1);
        answer
    }

    /// Stops managing a range for good: every page is brought back, and none is captured again.
    pub fn pin(&self, start: usize, end: usize) {
        let mut table = self.table_for_change(&[(start, end)]);
        if table.covered(start, end).is_empty() {
            return;
        }
        let bytes = self.leave(&mut table, start, end);
        add(&self.figures().pinned_bytes, bytes as u64);
        self.measure_tables(&mut table);
    }

    /// Brings a range back, and leaves the range to the kernel. Returns the bytes that were managed.
    pub(super) fn leave(&self, table: &mut Table, start: usize, end: usize) -> usize {
        let (outer, mut bytes) = (table.exterior(start, end), 0);
        for (address, lock) in table.known_folios(outer.0, outer.1) {
            let mut folio = lock.lock();
            if !folio.managed {
                continue;
            }
            self.bring_back(&mut folio, address);
            self.retire(&mut folio);
            bytes += self.geometry().folio_bytes();
        }
        // Everything is back, so the kernel can serve touches of missing pages with zeros.
        self.unregister(table, outer.0, outer.1);
        table.uncover(start, end);
        table.remove(outer.0, outer.1);
        bytes
    }

    /// The parts of a range that are mapped.
    pub(crate) fn mapped(&self, start: usize, end: usize) -> Ranges {
        let mut mapped = Ranges::new();
        for from in (start..end).step_by(LOOK_BYTES) {
            let to = end.min(from + LOOK_BYTES);
            if self.is_mapped(from, to) {
                mapped.join(from, to);
                continue;
            }
            for page in (from..to).step_by(PAGE_BYTES) {
                if self.is_mapped(page, page + PAGE_BYTES) {
                    mapped.join(page, page + PAGE_BYTES);
                }
            }
        }
        mapped
    }

    /// Whether all of a range is mapped, of [`LOOK_BYTES`] at most.
    pub(crate) fn is_mapped(&self, start: usize, end: usize) -> bool {
        let mut present = [0_u8; LOOK_BYTES / PAGE_BYTES];
        let present = &mut present[..(end - start) / PAGE_BYTES];
        // Where nothing may be asked, what is managed counts as mapped: that loses nothing.
        self.mover.system.residency(start, end - start, present) != Err(Errno::NOMEM)
    }

    /// Reclaims until the charge is back at the limit, or at the floor, after `bytes` that the kernel has
    /// given were brought under management. Reclaims at most about twice as much.
    pub fn make_room(&self, bytes: usize) {
        // The adopted pages were counted as the process's other memory until now.
        self.sample();
        self.grow(0);
        for _ in 0..2 * (bytes / self.geometry().folio_bytes() + 1) {
            if self.headroom() >= 0 {
                return;
            }
            let table = self.table.read();
            if self.reclaim_one(&table, self.cpu(), By::Direct) == Reclaimed::Nothing {
                return;
            }
        }
    }

    /// Makes a system call of the engine's own, whose events are to be skipped (`EVT-2`).
    pub(super) fn announce<R>(
        &self,
        range: (usize, usize),
        other: (usize, usize),
        call: impl FnOnce() -> R,
    ) -> R {
        self.mover.announced.set(range, other);
        let answer = call();
        self.mover.announced.clear();
        answer
    }

    /// Brings back the folios that a change of `start..end` covers only in part. If `retire` is
    /// set, they are left to the kernel.
    pub(super) fn settle_edges(&self, table: &Written<'_>, start: usize, end: usize, retire: bool) {
        for (edge, end) in self.edges(start, end) {
            if end == 0 {
                continue;
            }
            let Some(lock) = table.get(edge) else { continue };
            let mut folio = lock.lock();
            if !folio.managed {
                continue;
            }
            self.bring_back(&mut folio, edge);
            if retire {
                self.retire(&mut folio);
            }
        }
    }

    /// Makes all staged and stored units of a folio resident. The change that needs them cannot
    /// wait, so the limit may be passed.
    fn bring_back(&self, folio: &mut Folio, base: usize) {
        self.bring_back_without(folio, base, &[]);
    }

    /// Like [`Engine::bring_back`], with zeros in the parts of the folio that are being dropped.
    pub(crate) fn bring_back_without(
        &self,
        folio: &mut Folio,
        base: usize,
        dropped: &[Range<usize>],
    ) {
        if let Some(slot) = &mut folio.staged {
            dropped.iter().for_each(|part| self.mover.zero(slot, part.clone()));
        }
        self.bring_staged(folio, base, self.geometry().all());
        let stored = folio.stored;
        if stored.is_empty() {
            return;
        }
        let mut scratch = self.take_scratch(base);
        let loaded = self.load_copies(folio, base, stored, &mut scratch, self.cpu());
        loaded.expect("SPILL-1: nothing that the change needs is away");
        dropped.iter().for_each(|part| self.mover.zero(&mut scratch, part.clone()));
        self.mover.place_copy(&scratch, stored, base);
        self.mover.give_scratch(scratch);
        self.note_resident(folio, base, stored, Queue::Main);
    }

    /// Leaves a folio to the kernel; all its units were brought back before.
    pub(crate) fn retire(&self, folio: &mut Folio) {
        debug_assert!(folio.staged.is_none() && folio.stored.is_empty());
        self.drop_folio(folio, false);
    }

    /// Forgets the contents of a folio: its pages are gone, or left to the kernel.
    pub(crate) fn drop_folio(&self, folio: &mut Folio, managed: bool) {
        folio.managed = managed;
        self.drop_copies(folio, self.geometry().all());
        self.count_out(folio.resident);
        folio.resident = Units::NONE;
        if let Some(slot) = folio.staged.take() {
            self.give_slot(slot);
        }
        let stored = self.geometry().bytes_of(folio.stored);
        subtract(&self.figures().demand_stored_bytes, stored as u64);
        folio.stored = Units::NONE;
    }

    /// Brings everything back and stops managing it. That includes pages outside whole folios, which are registered
    /// too: if they stayed covered, a `mremap` would have managed what their mapping grows by.
    pub fn unmanage_all(&self) {
        let covered = self.table_for_change(&[]).covered(0, usize::MAX);
        for (start, end) in covered {
            self.pin(start, end);
        }
    }

    /// Whether anything is managed.
    pub fn is_managing(&self) -> bool {
        self.table.read().managed_bytes() > 0
    }
}
