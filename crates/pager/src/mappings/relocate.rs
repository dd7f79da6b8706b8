//! `mremap`: a range grows where it is, or moves with its contents.
//!
//! | way | what it needs | what it costs |
//! | --- | --- | --- |
//! | `stretch` | nothing is mapped behind the range, or it keeps its length | nothing is brought back |
//! | `carry` | a new place that is a whole number of folios away, and free | staged folios, and those at the ends that are not whole, are brought back; the kernel moves page tables |
//! | `relocate` | nothing | everything is brought back, so the limit may be passed |
//!
//! The first two are for ranges of which the engine manages all, and for handler mode: the registration goes along,
//! also for pages outside whole folios, whose faults only a handler serves.
//!
//! # Invariants
//!
//! - `CARRY-1` What the engine keeps of a folio goes to the folio whose addresses its pages get. Nothing that it keeps
//!   says where a unit is but the table, so copies stay good.
//! - `CARRY-2` No message is to come of what was at the new place before: it would be taken for a change of what is
//!   there now. So a carry begins when no change is under way, after the new place was reserved.

use zfolio_core::ranges::Ranges;
use zfolio_core::stats::add;

use crate::config::Mode;
use crate::engine::Engine;
use crate::folio::Table;
use crate::replacement::Queue;

/// So many times a carry looks whether another thread is still changing mappings, before it is given up.
const LOOKS: usize = 1000;

impl Engine {
    /// Makes `call`, by which a range grows to `new_end` where it is, or stays as it is. `None`: the engine does not
    /// manage all of the range, and nothing was done.
    ///
    /// # Errors
    ///
    /// Those of `call`. Nothing has changed then.
    pub fn stretch<E>(
        &self,
        (start, end): (usize, usize),
        new_end: usize,
        call: impl FnOnce() -> Result<(), E>,
    ) -> Option<Result<(), E>> {
        let mut table = self.table_for_change(&self.edges(end, new_end));
        if !self.serves_all(&table, start, end) {
            return None;
        }
        self.join_mapping(start, end);
        let grown = call();
        if grown.is_ok() && end < new_end {
            self.settle_edges(&table, end, new_end, true);
            self.forget_range(&mut table, end, new_end);
            self.take_in_mapped(&mut table, end, new_end);
            self.measure_tables(&mut table);
            add(&self.figures().remaps, 1);
        }
        Some(grown)
    }

    /// Makes `call`, which moves a range to `to`, where nothing is in use, and perhaps lets it grow to `to_end`.
    /// `None`: the engine does not manage all of the range, or the distance is not a number of whole folios, or others
    /// change mappings all the time; nothing was done.
    ///
    /// # Errors
    ///
    /// Those of `call`. Contents are where they were then, and folios that the range covers only in part are no longer
    /// managed.
    pub fn carry<E>(
        &self,
        (start, end): (usize, usize),
        (to, to_end): (usize, usize),
        call: impl FnOnce() -> Result<(), E>,
    ) -> Option<Result<(), E>> {
        let distance = to.wrapping_sub(start);
        if self.geometry().base(distance) != distance || !self.await_changes() {
            return None;
        }
        let mut table = self.table_for_change(&self.edges(start, end));
        if !self.serves_all(&table, start, end) {
            return None;
        }
        for (base, lock) in table.known_folios(start, end) {
            let mut folio = lock.lock();
            if folio.managed {
                self.bring_staged(&mut folio, base, self.geometry().all());
            }
        }
        self.settle_edges(&table, start, end, true);
        self.join_mapping(start, end);
        let moved = self.announce((start, end), (to, to_end), call);
        if moved.is_ok() {
            self.unregister_around(&table, start, end);
            self.forget_range(&mut table, to, to_end);
            self.carry_folios(&mut table, (start, end), distance);
            table.forget(start, end);
            self.take_in_mapped(&mut table, to, to_end);
            self.measure_tables(&mut table);
            add(&self.figures().remaps, 1);
        }
        Some(moved)
    }

    /// Whether the engine manages all of a range, in handler mode. See the module.
    fn serves_all(&self, table: &Table, start: usize, end: usize) -> bool {
        table.covers(start, end) && self.config().mode == Mode::Handler
    }

    /// Registers all of a range. A part of a folio whose rest was unmapped is not registered, and so is a mapping of
    /// its own to the kernel, whose `mremap` takes one only. Where this fails, that call does.
    fn join_mapping(&self, start: usize, end: usize) {
        self.mover.register(start, end).ok();
    }

    /// The pages of a range have moved, with their registration: so does what the engine keeps of its whole folios
    /// (`CARRY-1`).
    fn carry_folios(&self, table: &mut Table, (start, end): (usize, usize), distance: usize) {
        let there = |at: usize| at.wrapping_add(distance);
        table.cover(there(start), there(end));
        let (first, last) = table.interior(start, end);
        let managed: Vec<_> = table.ranges().pieces(first, last).collect();
        managed.iter().for_each(|(from, to)| table.insert(there(*from), there(*to)));
        for (base, lock) in table.known_folios(first, last) {
            let taken = lock.lock().take();
            if !taken.managed {
                continue;
            }
            debug_assert!(taken.staged.is_none(), "brought back before");
            let mut folio = table.get(there(base)).expect("inserted above").lock();
            let resident = taken.resident;
            folio.put(taken);
            self.count_out(resident);
            self.note_resident(&mut folio, there(base), resident, Queue::Main);
            let copied = folio.copied_units();
            self.note_copied(&mut folio, there(base), copied);
        }
    }

    /// Waits until no change of mappings is under way whose message was not read (`CARRY-2`). False: there is one each
    /// time.
    fn await_changes(&self) -> bool {
        (0..LOOKS).any(|_| {
            let is_changing = self.mover.system.is_changing() != Ok(false);
            if is_changing {
                self.mover.read_messages();
                self.mover.system.pause();
            }
            !is_changing
        })
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
        let covered = [&old[..], &table.covered(onto.0, onto.1)].concat();
        // Every page is brought back, so that the kernel alone moves contents, or leaves them where they are if it
        // fails midway. The registration has also split mappings, and `mremap` to a place of the kernel's choice
        // refuses a range of several; `leave` makes them one again.
        // What a raw `mremap` has added to a mapping is registered without being covered (`ADOPT-3`): `leave` does not
        // see it, and it would be a mapping of its own.
        let added = if old.is_empty() { Ranges::new() } else { table.uncovered(start, end) };
        self.leave(&mut table, start, end);
        self.leave(&mut table, onto.0, onto.1);
        added.iter().for_each(|(from, to)| _ = self.mover.unregister(from, to));
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
