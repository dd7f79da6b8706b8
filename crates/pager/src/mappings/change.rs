//! Changes of mappings: what `munmap`, `madvise`, `mremap` and `mlock` do to managed memory.
//!
//! Each change holds the table for writing around the system call and what follows from it, so no
//! folio moves and no fault is served meanwhile (`ENG-1`): the program sees exactly what it would see
//! without us. A folio that a change covers only in part is first brought back, so that the kernel
//! alone decides what each of its pages holds.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{add, subtract};
use zfolio_core::sync::WriteGuard;
use zfolio_sys::Errno;

use crate::engine::Engine;
use crate::folio::{Folio, Table, Units};
use crate::rank;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;

type Written<'a> = WriteGuard<'a, { rank::TABLE }, Table>;

impl Engine {
    /// A range is unmapped, or mapped anew, by `call`; it is no longer managed if that succeeds.
    ///
    /// # Errors
    ///
    /// Those of `call`; then all reads as before (what it covers in part is no longer managed).
    pub fn unmap<R, E>(
        &self,
        start: usize,
        end: usize,
        call: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        let mut table = self.table.write();
        self.settle_edges(&table, start, end, true);
        let answer = self.announce((start, end), (0, 0), call)?;
        for (address, lock) in table.known_folios(start, end) {
            if address >= start && address + self.geometry().folio_bytes() <= end {
                self.drop_folio(&mut lock.lock(), false);
            }
        }
        let outer = table.exterior(start, end);
        // What is left of folios at the edges was brought back, and is the kernel's alone.
        self.mover.unregister(outer.0, start);
        self.mover.unregister(end, outer.1);
        table.uncover(start, end);
        table.remove(outer.0, outer.1);
        table.prune(outer.0, outer.1);
        self.measure_tables(&mut table);
        add(&self.figures().unmaps, 1);
        Ok(answer)
    }

    /// The contents of a range are dropped by `call`, which is told its start and length: it reads as zeros
    /// from now on.
    ///
    /// # Errors
    ///
    /// Those of `call`, which may have dropped a part of it by then, from the start.
    pub fn discard<R>(
        &self,
        start: usize,
        end: usize,
        call: impl Fn(usize, usize) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let table = self.table.write();
        self.settle_edges(&table, start, end, false);
        // ENOMEM: part of the range is not mapped, and all that is was dropped.
        let dropped = |answer: &Result<R, Errno>| matches!(answer, Ok(_) | Err(Errno::NOMEM));
        let asked = end;
        let (answer, end) = self.announce((start, end), (0, 0), || {
            let answer = call(start, end - start);
            if dropped(&answer) {
                return (answer, end);
            }
            // The kernel drops one mapping after the other up to the one that it refuses (locked, sealed):
            // once more, to see which.
            let refused =
                (start..end).step_by(PAGE_BYTES).find(|page| !dropped(&call(*page, PAGE_BYTES)));
            (answer, refused.unwrap_or(end))
        });
        let edge = self.geometry().base(end);
        if let Some(lock) = table.known(edge).filter(|_| end < asked && edge < end) {
            let mut folio = lock.lock();
            if folio.managed {
                self.bring_back_without(&mut folio, edge, start.max(edge) - edge..end - edge);
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

    /// Gives a range up for good: every page of it is brought back, and none is taken again.
    pub fn pin(&self, start: usize, end: usize) {
        let mut table = self.table.write();
        self.leave(&mut table, start, end);
        self.measure_tables(&mut table);
    }

    /// Brings a range back, and leaves it to the kernel.
    fn leave(&self, table: &mut Table, start: usize, end: usize) {
        let outer = table.exterior(start, end);
        for (address, lock) in table.known_folios(outer.0, outer.1) {
            let mut folio = lock.lock();
            if !folio.managed {
                continue;
            }
            self.bring_back(&mut folio, address);
            self.retire(&mut folio);
            add(&self.figures().pinned_bytes, self.geometry().folio_bytes() as u64);
        }
        // Everything is back, so a page that is missing is the kernel's to fill with zeros.
        self.mover.unregister(outer.0, outer.1);
        table.uncover(start, end);
        table.remove(outer.0, outer.1);
    }

    /// Registers what is managed of a range again. What the kernel refuses (registering splits mappings, and the
    /// program may have reached `vm.max_map_count` meanwhile) is left to the kernel.
    fn register_again_or_leave(&self, table: &mut Table, start: usize, end: usize) {
        let managed = table.ranges().iter().filter(|(from, to)| *from < end && *to > start);
        let parts: Vec<_> = managed.map(|(from, to)| (from.max(start), to.min(end))).collect();
        for (from, to) in parts {
            if self.mover.register(from, to).is_err() {
                self.leave(table, from, to);
            }
        }
    }

    /// A range is moved by `call`, which tells where to (`onto`, if that was said before); the contents
    /// move along. Tells also whether any of the old range was managed.
    ///
    /// # Errors
    ///
    /// Those of `call`; then nothing has changed.
    pub fn relocate<E>(
        &self,
        (start, end): (usize, usize),
        onto: (usize, usize),
        call: impl FnOnce() -> Result<(usize, usize), E>,
    ) -> Result<(usize, usize, bool), E> {
        let mut table = self.table.write();
        // Every page back: what moves is what the kernel has. Large blocks grow by `mremap` rarely
        // enough, and a moved registration is lost anyway.
        for (address, lock) in table.known_folios(start, end) {
            self.bring_back(&mut lock.lock(), address);
        }
        let managed = table.ranges().overlap(start, end);
        self.settle_edges(&table, onto.0, onto.1, true);
        // One mapping again: `mremap` refuses a range of several, and registering has split it.
        self.mover.unregister(start, end);
        let moved = self.announce((start, end), onto, call);
        let (to, to_end) = match moved {
            Ok(place) => place,
            Err(error) => {
                self.register_again_or_leave(&mut table, start, end);
                self.measure_tables(&mut table);
                return Err(error);
            }
        };
        for (_, lock) in table.known_folios(start, end) {
            self.retire(&mut lock.lock());
        }
        for (address, lock) in table.known_folios(to, to_end) {
            if address >= to && address + self.geometry().folio_bytes() <= to_end {
                self.drop_folio(&mut lock.lock(), false);
            }
        }
        for (start, end) in [(start, end), (to, to_end)] {
            let (first, last) = table.exterior(start, end);
            table.uncover(start, end);
            table.remove(first, last);
            table.prune(first, last);
        }
        self.measure_tables(&mut table);
        add(&self.figures().remaps, 1);
        Ok((to, to_end, managed))
    }

    /// Reclaims until what is charged fits, for whoever has brought `bytes` under management that the
    /// kernel had given without asking; not more than twice as much.
    pub fn make_room(&self, bytes: usize) {
        // What has just been adopted was counted among what is not ours.
        self.sample();
        for _ in 0..2 * (bytes / self.geometry().folio_bytes() + 1) {
            if self.room_bytes() > 0 || self.charge.at_floor() {
                return;
            }
            let table = self.table.read();
            if self.reclaim_one(&table, self.cpu(), By::Direct) == Reclaimed::Nothing {
                return;
            }
        }
    }

    /// Makes a system call whose events are nobody's business but ours.
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

    /// Brings back the folios that a change of `start..end` covers in part; retires them if asked.
    fn settle_edges(&self, table: &Written<'_>, start: usize, end: usize, retire: bool) {
        let (first, last) = (self.geometry().base(start), self.geometry().base(end));
        let first_is_partial = first != start || first + self.geometry().folio_bytes() > end;
        for (edge, partial) in [(first, first_is_partial), (last, last != end)] {
            if !partial {
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

    /// Makes all that a folio has resident, over the limit if need be: the change that wants it cannot
    /// wait.
    fn bring_back(&self, folio: &mut Folio, base: usize) {
        self.bring_back_without(folio, base, 0..0);
    }

    /// The same, with zeros in a part of it that is being dropped.
    pub(crate) fn bring_back_without(&self, folio: &mut Folio, base: usize, dropped: Range<usize>) {
        if let Some(slot) = &mut folio.staged {
            self.mover.zero(slot, dropped.clone());
        }
        self.bring_staged(folio, base);
        let stored = folio.stored;
        if stored.is_empty() {
            return;
        }
        let mut scratch = self.take_scratch(base);
        self.load_copies(folio, base, stored, &mut scratch, self.cpu());
        self.mover.zero(&mut scratch, dropped);
        self.mover.place_copy(&scratch, stored, base);
        self.mover.give_scratch(scratch);
        self.note_resident(folio, base, stored, Queue::Main);
    }

    /// Leaves a folio that was brought back to the kernel.
    pub(crate) fn retire(&self, folio: &mut Folio) {
        debug_assert!(folio.staged.is_none() && folio.stored.is_empty());
        self.drop_folio(folio, false);
    }

    /// Forgets what a folio held; its pages, if it had any, are gone or the kernel's alone.
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

    /// Everything that is managed comes back and stays: the engine ends.
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
