//! Changes of mappings: what `munmap`, `madvise`, `mremap` and `mlock` do to managed memory.
//!
//! Each change holds the table for writing around the system call and what follows from it, so no
//! folio moves and no fault is served meanwhile (`ENG-1`): the program sees exactly what it would see
//! without us. A unit that a change covers only in part is first brought back, so that the kernel
//! alone decides what each of its pages holds.

use std::ops::Range;

use zfolio_core::stats::{add, subtract};
use zfolio_core::sync::WriteGuard;
use zfolio_sys::Errno;

use crate::engine::Engine;
use crate::rank;
use crate::resident::Queue;
use crate::unit::{State, Table, Unit};

type Written<'a> = WriteGuard<'a, { rank::TABLE }, Table>;

impl Engine {
    /// A range is unmapped, or mapped anew, by `call`; it is no longer managed if that succeeds.
    ///
    /// # Errors
    ///
    /// Those of `call`; then nothing has changed.
    pub fn unmap<R, E>(
        &self,
        start: usize,
        end: usize,
        call: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        let mut table = self.table.write();
        self.settle_edges(&table, start, end, true);
        let answer = self.announce((start, end), (0, 0), call)?;
        for (address, lock) in table.known_units(start, end) {
            if address >= start && address + self.unit().bytes() <= end {
                self.drop_unit(&mut lock.lock(), State::Unmanaged);
            }
        }
        let outer = (table.align_down(start), end.next_multiple_of(self.unit().bytes()));
        // What is left of units at the edges was brought back, and is the kernel's alone.
        self.folios.unregister(outer.0, start);
        self.folios.unregister(end, outer.1);
        table.remove(outer.0, outer.1);
        self.measure_tables(&table);
        add(&self.figures().unmaps, 1);
        Ok(answer)
    }

    /// The contents of a range are dropped by `call`: it reads as zeros from now on.
    ///
    /// # Errors
    ///
    /// Those of `call`; then nothing has changed.
    pub fn discard<R>(
        &self,
        start: usize,
        end: usize,
        call: impl FnOnce() -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let table = self.table.write();
        self.settle_edges(&table, start, end, false);
        let answer = self.announce((start, end), (0, 0), call);
        // ENOMEM: part of the range is not mapped, and all that is was dropped.
        if !matches!(answer, Ok(_) | Err(Errno::NOMEM)) {
            return answer;
        }
        for (address, lock) in table.known_units(start, end) {
            if address >= start && address + self.unit().bytes() <= end {
                let mut unit = lock.lock();
                if !matches!(unit.state, State::Unmanaged) {
                    self.drop_unit(&mut unit, State::Empty);
                }
            }
        }
        add(&self.figures().removes, 1);
        answer
    }

    /// Gives a range up for good: every page of it is brought back, and none is taken again.
    pub fn pin(&self, start: usize, end: usize) {
        let mut table = self.table.write();
        let outer = (table.align_down(start), end.next_multiple_of(self.unit().bytes()));
        for (address, lock) in table.known_units(outer.0, outer.1) {
            let mut unit = lock.lock();
            if matches!(unit.state, State::Unmanaged) {
                continue;
            }
            self.bring_back(&table, &mut unit, address);
            self.retire(&mut unit);
            add(&self.figures().pinned_bytes, self.unit().bytes() as u64);
        }
        // Everything is back, so a page that is missing is the kernel's to fill with zeros.
        self.folios.unregister(outer.0, outer.1);
        table.remove(outer.0, outer.1);
        self.measure_tables(&table);
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
        for (address, lock) in table.known_units(start, end) {
            self.bring_back(&table, &mut lock.lock(), address);
        }
        let managed = table.ranges().any(|(from, to_end)| from < end && to_end > start);
        self.settle_edges(&table, onto.0, onto.1, true);
        // One mapping again: `mremap` refuses a range of several, and registering has split it.
        self.folios.unregister(start, end);
        let moved = self.announce((start, end), onto, call);
        let (to, to_end) = match moved {
            Ok(place) => place,
            Err(error) => {
                self.folios.register_ranges(&table, start, end);
                return Err(error);
            }
        };
        for (_, lock) in table.known_units(start, end) {
            self.retire(&mut lock.lock());
        }
        for (address, lock) in table.known_units(to, to_end) {
            if address >= to && address + self.unit().bytes() <= to_end {
                self.drop_unit(&mut lock.lock(), State::Unmanaged);
            }
        }
        for (start, end) in [(start, end), (to, to_end)] {
            let first = table.align_down(start);
            table.remove(first, end.next_multiple_of(self.unit().bytes()));
        }
        self.measure_tables(&table);
        add(&self.figures().remaps, 1);
        Ok((to, to_end, managed))
    }

    /// Makes a system call whose events are nobody's business but ours.
    fn announce<R>(
        &self,
        range: (usize, usize),
        other: (usize, usize),
        call: impl FnOnce() -> R,
    ) -> R {
        self.folios.announced.set(range, other);
        let answer = call();
        self.folios.announced.clear();
        answer
    }

    /// Brings back the units that a change of `start..end` covers in part; retires them if asked.
    fn settle_edges(&self, table: &Written<'_>, start: usize, end: usize, retire: bool) {
        let last = table.align_down(end);
        let first = table.align_down(start);
        for (edge, partial) in
            [(first, first != start || first + self.unit().bytes() > end), (last, last != end)]
        {
            if !partial {
                continue;
            }
            let Some(lock) = table.get(edge) else { continue };
            let mut unit = lock.lock();
            if matches!(unit.state, State::Unmanaged) {
                continue;
            }
            self.bring_back(table, &mut unit, edge);
            if retire {
                self.retire(&mut unit);
            }
        }
    }

    /// Makes a unit resident, over the limit if need be: the change that wants it cannot wait.
    fn bring_back(&self, table: &Table, unit: &mut Unit, address: usize) {
        self.bring_back_without(table, unit, address, 0..0);
    }

    /// The same, with zeros in a part of it that is being dropped.
    pub(crate) fn bring_back_without(
        &self,
        table: &Table,
        unit: &mut Unit,
        address: usize,
        dropped: Range<usize>,
    ) {
        let slot = match std::mem::replace(&mut unit.state, State::Resident) {
            State::Unmanaged => {
                unit.state = State::Unmanaged;
                return;
            }
            State::Resident => return,
            State::Empty => None,
            State::Staged(slot) => Some(slot),
            State::Stored => {
                let cpu = zfolio_sys::cpu::current();
                // Reclaims only by `try_lock` of other units: this one is locked, and not staged.
                let mut slot = self.fill_slot(self.any_slot(table, cpu), address);
                self.load_copy(unit, address, &mut slot, cpu);
                Some(slot)
            }
        };
        if let Some(mut slot) = slot {
            self.staging.unit_mut(&mut slot)[dropped].fill(0);
            self.staging.give_hollow(self.folios.place(&self.staging, slot, address));
        }
        self.note_resident(unit, address, Queue::Main);
    }

    /// Leaves a resident unit to the kernel.
    pub(crate) fn retire(&self, unit: &mut Unit) {
        if matches!(unit.state, State::Resident) {
            self.count_out();
        }
        self.drop_copy(unit);
        unit.state = State::Unmanaged;
    }

    /// Forgets what a unit held; its pages, if it had any, are gone.
    pub(crate) fn drop_unit(&self, unit: &mut Unit, next: State) {
        match std::mem::replace(&mut unit.state, next) {
            State::Unmanaged | State::Empty => {}
            State::Resident => self.count_out(),
            State::Staged(slot) => self.staging.give_free(slot),
            State::Stored => {
                subtract(&self.figures().demand_stored_bytes, self.unit().bytes() as u64)
            }
        }
        self.drop_copy(unit);
    }

    /// Brings every staged unit back, so that a child of `fork` finds nothing in the staging area.
    pub fn settle_for_fork(&self) {
        let table = self.table.read();
        while let Some(address) = self.staging.pop_staged() {
            if let Some(lock) = table.get(address) {
                let mut unit = lock.lock();
                if matches!(unit.state, State::Staged(_)) {
                    self.bring_back(&table, &mut unit, address);
                }
            }
        }
    }

    /// Everything that is managed comes back and stays: the engine ends.
    pub fn unmanage_all(&self) {
        let ranges: Vec<(usize, usize)> = self.table.read().ranges().collect();
        for (start, end) in ranges {
            self.pin(start, end);
        }
    }

    /// Whether anything is managed.
    pub fn is_managing(&self) -> bool {
        self.table.read().managed_bytes() > 0
    }
}
