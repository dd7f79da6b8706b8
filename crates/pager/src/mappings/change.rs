//! Changes of mappings: what `munmap`, `madvise`, `mremap` and `mlock` do to managed memory.
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
            if self.mover.inbox.has_change() {
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

    /// The folios that a change of `start..end` covers only in part, as ranges.
    pub(crate) fn edges(&self, start: usize, end: usize) -> [(usize, usize); 2] {
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
        let outer = table.exterior(start, end);
        // The parts of edge folios outside the range were brought back, and are left to the kernel.
        self.mover.unregister(outer.0, start);
        self.mover.unregister(end, outer.1);
        self.forget_range(&mut table, start, end);
        self.measure_tables(&mut table);
        add(&self.figures().unmaps, 1);
        Ok(answer)
    }

    /// Forgets a range that is unmapped, or mapped anew; folios that are only partly in it were left to the kernel.
    fn forget_range(&self, table: &mut Table, start: usize, end: usize) {
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
                self.wait_holding_locks(&folio, edge);
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
    fn leave(&self, table: &mut Table, start: usize, end: usize) -> usize {
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
        self.mover.unregister(outer.0, outer.1);
        table.uncover(start, end);
        table.remove(outer.0, outer.1);
        bytes
    }

    /// Makes `call`, which moves a range with its contents and returns the new range. `onto` is the new range if the
    /// program has chosen it, else empty. Of the new range that is managed which was in the old one, what is
    /// `noted` besides (parts of the old range, in rising order), and what the last such part grows by: what was given
    /// up (`pin`), or is another's mapping, stays so.
    ///
    /// # Errors
    ///
    /// Those of `call`. Then the contents are where the kernel has left them: since Linux 6.17 the first of several
    /// mappings may have moved, and older kernels may have unmapped what was at the new place.
    pub fn relocate<E>(
        &self,
        (start, end): (usize, usize),
        onto: (usize, usize),
        noted: &[(usize, usize)],
        call: impl FnOnce() -> Result<(usize, usize), E>,
    ) -> Result<(usize, usize), E> {
        let mut table = self.table_for_change(&[(start, end), onto]);
        let mut managed = Ranges::new();
        let old = table.covered(start, end);
        old.iter().chain(noted).for_each(|(from, to)| managed.join(*from, *to));
        let covered = [old, table.covered(onto.0, onto.1)].concat();
        // Every page is brought back, so that the kernel alone moves contents, or leaves them where they are if it
        // fails midway. This is slow for large blocks, but they seldom grow by `mremap`, and the registration is
        // lost in the move anyway. It has also split mappings, and `mremap` to a place of the kernel's choice
        // refuses a range of several; `leave` makes them one again.
        self.leave(&mut table, start, end);
        self.leave(&mut table, onto.0, onto.1);
        let moved = self.announce((start, end), onto, call);
        let to_manage = match &moved {
            Ok((to, to_end)) => {
                // Its folios are empty by now.
                table.forget(start, end);
                self.forget_range(&mut table, *to, *to_end);
                add(&self.figures().remaps, 1);
                moved_parts(managed.iter(), (start, end), (*to, *to_end)).collect()
            }
            Err(_) => covered,
        };
        for (start, end) in to_manage {
            self.take_in_mapped(&mut table, start, end);
        }
        self.measure_tables(&mut table);
        moved
    }

    /// Takes under management again what of a range is mapped after a call that may have moved it in part
    /// (`ADOPT-2`). A part that the kernel refuses is left to the kernel: registering splits mappings, and the
    /// program may have reached `vm.max_map_count`.
    fn take_in_mapped(&self, table: &mut Table, start: usize, end: usize) {
        let mapped: Vec<_> = self.mapped(start, end).iter().collect();
        for (start, end) in mapped {
            if self.take_in(table, start, end).is_err() {
                add(&self.figures().pinned_bytes, (end - start) as u64);
            }
        }
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
        self.mover.system.residency(start, end - start, present).is_ok()
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
    fn announce<R>(
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
    fn settle_edges(&self, table: &Written<'_>, start: usize, end: usize, retire: bool) {
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

    /// Brings everything back and stops managing it, before the engine ends.
    pub fn unmanage_all(&self) {
        let ranges: Vec<(usize, usize)> = self.table.read().ranges().iter().collect();
        for (start, end) in ranges {
            self.pin(start, end);
        }
    }

    /// Whether anything is managed.
    pub fn is_managing(&self) -> bool {
        self.table.read().managed_bytes() > 0
    }
}

/// Where parts of a range are once that range has moved, and perhaps become longer or shorter: what it grows by belongs
/// to the part at its end, and a part of what it loses is gone.
pub fn moved_parts(
    parts: impl Iterator<Item = (usize, usize)>,
    old: (usize, usize),
    new: (usize, usize),
) -> impl Iterator<Item = (usize, usize)> {
    let place = move |at: usize| new.1.min(new.0 + (at - old.0));
    let moved = move |(from, to)| (place(from), if to == old.1 { new.1 } else { place(to) });
    parts.map(moved).filter(|(from, to)| from < to)
}
