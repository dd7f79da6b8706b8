//! Mappings come under management: they are registered, and their resident pages are found.
//!
//! `Table::covered` has the ranges that may be managed, exact to the page, adjacent ranges joined.
//! A folio is managed if all of it is in these ranges, whether it lies in one mapping or in
//! several. A folio that was cut when a part was unmapped is managed again once that part is mapped
//! anew.
//!
//! # Invariants
//!
//! - `ADOPT-1` A page that is in `covered` keeps its contents when its range is adopted again. The preloaded
//!   library cannot know of memory that the program moves by a raw `mremap`: it may take for new what the
//!   engine manages already, because the event of the move has told the engine.
//! - `ADOPT-2` All of a folio that becomes managed is mapped. What is mapped later in a hole would be captured
//!   though no fault in it is reported, and read as zeros.
//! - `ADOPT-3` What is registered is covered, but for what a raw `mremap` has added and nobody has adopted yet. So the
//!   engine knows what to unregister: the kernel unregisters nothing of a range that has a mapping of a file in it.

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::ranges::Ranges;
use zfolio_sys::Errno;

use crate::config::Error;
use crate::engine::Engine;
use crate::fatal;
use crate::folio::Table;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;

/// A range of mappings that has just been registered: the folios that it makes whole, and its pages that were not
/// covered before.
struct Registered {
    folios: (usize, usize),
    fresh: Ranges,
}

impl Engine {
    /// Takes a mapping under management, with its resident pages: its own whole folios, and the
    /// folios that it makes whole together with adjacent mappings. What is managed already stays as it is.
    ///
    /// # Errors
    ///
    /// The range cannot be registered; it is left to the kernel.
    pub fn adopt(&self, start: usize, end: usize) -> Result<(), Error> {
        // A change that was read before must be applied before this mapping is registered (EVT-3).
        let mut table = self.table_for_change(&[(start, end)]);
        let taken = self.take_in(&mut table, start, end);
        self.measure_tables(&mut table);
        taken.map_err(|errno| Error::Memory { what: "userfaultfd register", errno })
    }

    /// Registers a mapping and finds its resident pages.
    pub(crate) fn take_in(&self, table: &mut Table, start: usize, end: usize) -> Result<(), Errno> {
        let end = end.next_multiple_of(PAGE_BYTES);
        let registered = self.register(table, start, end)?;
        self.scan_resident(table, &registered);
        Ok(())
    }

    /// Takes many ranges under management. All are registered before any is scanned, so that a
    /// program that grows fast stops growing at once. A range that cannot be registered is left to
    /// the kernel.
    pub fn adopt_all(&self, ranges: impl Iterator<Item = (usize, usize)>) {
        let ranges: Vec<(usize, usize)> = ranges.collect();
        let mut table = self.table_for_change(&ranges);
        let mut registered = Vec::new();
        for (start, end) in ranges {
            self.register_most(&mut table, start, end, &mut registered);
        }
        for registered in registered {
            self.scan_resident(&mut table, &registered);
        }
        self.measure_tables(&mut table);
    }

    /// Registers as much as possible of a range of many mappings: a mapping that cannot be
    /// registered (for example, it was replaced without the engine) must not prevent the
    /// registration of the others.
    fn register_most(
        &self,
        table: &mut Table,
        start: usize,
        end: usize,
        registered: &mut Vec<Registered>,
    ) {
        // A range in which nothing can be registered is given up after so many refusals.
        const REFUSALS_MAX: usize = 64;
        let (mut rest, mut refusals) = (vec![(start, end.next_multiple_of(PAGE_BYTES))], 0);
        while let Some((start, end)) = rest.pop() {
            match self.register(table, start, end) {
                Ok(part) => registered.push(part),
                // The limit of mappings is reached: registering halves would need even more
                // mappings.
                Err(Errno::NOMEM) => {}
                Err(_) => {
                    refusals += 1;
                    let middle = self.geometry().base_above(start + (end - start) / 2);
                    if refusals < REFUSALS_MAX && middle < end {
                        rest.extend([(start, middle), (middle, end)]);
                    }
                }
            }
        }
    }

    /// Registers a mapping and returns the range of the folios that it makes whole: its own, and at
    /// its ends those that it shares with neighbours.
    ///
    /// All of the mapping is registered, so that it stays one mapping: `mremap` refuses a range of
    /// several mappings. Its pages outside whole folios belong to no managed folio; a missing one
    /// reads as zeros.
    fn register(&self, table: &mut Table, start: usize, end: usize) -> Result<Registered, Errno> {
        let fresh = table.uncovered(start, end);
        let outer = table.exterior(start, end);
        self.uncover_holes(table, outer.0, start);
        self.uncover_holes(table, end, outer.1);
        let joined = table.cover(start, end);
        let whole = table.interior(joined.0, joined.1);
        let (first, last) = (whole.0.max(outer.0), whole.1.min(outer.1));
        if first >= last {
            return Ok(Registered { folios: (start, start), fresh });
        }
        let bytes = self.geometry().folio_bytes();
        // Include the neighbours' parts of the folios at the ends, and one folio more at each side.
        let from = joined.0.max(outer.0.saturating_sub(bytes));
        let to = joined.1.min(outer.1.saturating_add(bytes));
        let register = |from: usize, to: usize| self.mover.register(from, to);
        if register(from, to).is_ok() {
            return Ok(Registered { folios: (first, last), fresh });
        }
        // The neighbours cannot be registered, or have changed by now: register the mapping alone. What is managed
        // is registered, and stays covered (ADOPT-1).
        for (from, to) in table.unmanaged(from, to).iter() {
            self.unregister(table, from, to);
            table.uncover(from, to);
        }
        let (first, last) = table.interior(start, end);
        if first < last {
            let registered = register(start, end);
            registered.inspect_err(|error| {
                fatal::print_if_forbidden(self.config().whole_process, *error)
            })?;
        }
        table.cover(start, end);
        Ok(Registered { folios: (first, last), fresh })
    }

    /// Uncovers what is not mapped any more beside a new mapping, of the folios that it has a part of (`ADOPT-2`): a
    /// mapping smaller than a folio is covered without being registered, so the kernel says nothing when the program
    /// unmaps it.
    fn uncover_holes(&self, table: &mut Table, start: usize, end: usize) {
        let is_covered = table.uncovered(start, end).bytes() < end - start;
        if is_covered {
            let holes = self.mapped(start, end).gaps(start, end);
            holes.iter().for_each(|(from, to)| table.uncover(from, to));
        }
    }

    /// Finds the resident pages of whole folios that have just been registered.
    fn scan_resident(&self, table: &mut Table, Registered { folios, fresh }: &Registered) {
        let (start, end) = *folios;
        if start == end {
            return;
        }
        table.insert(start, end);
        let mut managed_before = Vec::new();
        for (base, lock) in table.known_folios(start, end) {
            let mut folio = lock.lock();
            let fresh = fresh.pieces(base, base + self.geometry().folio_bytes());
            let fresh: Vec<_> = fresh.map(|(from, to)| from - base..to - base).collect();
            if folio.managed && fresh.is_empty() {
                managed_before.push(base);
                continue;
            }
            // Only these parts of the folio are new; the others may have contents in the store (ADOPT-1).
            if folio.managed && fresh[0].len() < self.geometry().folio_bytes() {
                self.bring_back_without(&mut folio, base, &fresh);
            }
            self.drop_folio(&mut folio, true);
        }
        // The range is registered, so from now on only the engine brings pages, and the scan is
        // exact. One exception: a shared page of zeros becomes the program's own page when it is
        // written to, without a fault that the engine sees. So the folios of such pages join
        // probation, and as many folios are reclaimed at once: these ones, if probation is above
        // its share.
        let mut zeros = 0;
        self.mover.system.each_resident(start, end, &mut |from, to, zero| {
            let queue = if zero { Queue::Probation } else { Queue::Main };
            for (base, lock) in table.folios(from, to) {
                if managed_before.binary_search(&base).is_ok() {
                    continue;
                }
                let bytes =
                    from.max(base) - base..to.min(base + self.geometry().folio_bytes()) - base;
                let mut folio = lock.lock();
                let found = self.geometry().touched(bytes) - folio.resident;
                zeros += usize::from(zero && !folio.queued);
                self.note_resident(&mut folio, base, found, queue);
            }
        });
        for _ in 0..zeros {
            if self.reclaim_one(table, self.cpu(), By::Background) == Reclaimed::Nothing {
                break;
            }
        }
    }
}
