//! Mappings come under management: they are registered, and their resident pages are found.
//!
//! `Table::covered` has the ranges that may be managed, exact to the page, adjacent ranges joined.
//! A folio is managed if all of it is in these ranges, whether it lies in one mapping or in
//! several. A folio that was cut when a part was unmapped is managed again once that part is mapped
//! anew.

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;

use crate::config::Error;
use crate::engine::Engine;
use crate::fatal;
use crate::folio::Table;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;

/// A range of mappings that has just been registered, and the folios that it makes whole.
struct Registered {
    folios: (usize, usize),
    range: (usize, usize),
}

impl Engine {
    /// Takes a mapping under management, with its resident pages: its own whole folios, and the
    /// folios that it makes whole together with adjacent mappings.
    ///
    /// # Errors
    ///
    /// The range cannot be registered; it is left to the kernel.
    pub fn adopt(&self, start: usize, end: usize) -> Result<(), Error> {
        // A change that was read before must be applied before this mapping is registered (EVT-3).
        let mut table = self.table_for_change(&[]);
        let taken = self.take_in(&mut table, start, end);
        self.measure_tables(&mut table);
        taken.map_err(|errno| Error::Memory { what: "userfaultfd register", errno })
    }

    /// Registers a mapping and finds its resident pages.
    pub(crate) fn take_in(&self, table: &mut Table, start: usize, end: usize) -> Result<(), Errno> {
        let end = end.next_multiple_of(PAGE_BYTES);
        let folios = self.register(table, start, end)?;
        self.scan_resident(table, folios, (start, end));
        Ok(())
    }

    /// Takes many ranges under management. All are registered before any is scanned, so that a
    /// program that grows fast stops growing at once. A range that cannot be registered is left to
    /// the kernel.
    pub fn adopt_all(&self, ranges: impl Iterator<Item = (usize, usize)>) {
        let mut table = self.table_for_change(&[]);
        let mut registered = Vec::new();
        for (start, end) in ranges {
            self.register_most(&mut table, start, end, &mut registered);
        }
        for Registered { folios, range } in registered {
            self.scan_resident(&mut table, folios, range);
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
                Ok(folios) => registered.push(Registered { folios, range: (start, end) }),
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
    fn register(
        &self,
        table: &mut Table,
        start: usize,
        end: usize,
    ) -> Result<(usize, usize), Errno> {
        let joined = table.cover(start, end);
        let whole = table.interior(joined.0, joined.1);
        let outer = table.exterior(start, end);
        let (first, last) = (whole.0.max(outer.0), whole.1.min(outer.1));
        if first >= last {
            return Ok((start, start));
        }
        let bytes = self.geometry().folio_bytes();
        // Include the neighbours' parts of the folios at the ends, and one folio more at each side.
        let from = joined.0.max(outer.0.saturating_sub(bytes));
        let to = joined.1.min(outer.1.saturating_add(bytes));
        let register = |from: usize, to: usize| self.mover.register(from, to);
        if register(from, to).is_ok() {
            return Ok((first, last));
        }
        // The neighbours cannot be registered, or have changed by now: register the mapping alone.
        table.uncover(from, to);
        let (first, last) = table.interior(start, end);
        if first < last {
            let registered = register(start, end);
            registered.inspect_err(|error| {
                fatal::print_if_forbidden(self.config().whole_process, *error)
            })?;
        }
        table.cover(start, end);
        Ok((first, last))
    }

    /// Finds the resident pages of whole folios that have just been registered; they lie in
    /// `mapping` and its neighbours.
    fn scan_resident(
        &self,
        table: &mut Table,
        (start, end): (usize, usize),
        mapping: (usize, usize),
    ) {
        if start == end {
            return;
        }
        table.insert(start, end);
        for (base, lock) in table.known_folios(start, end) {
            let mut folio = lock.lock();
            let part = mapping.0.max(base)..mapping.1.min(base + self.geometry().folio_bytes());
            if part.len() < self.geometry().folio_bytes() && folio.managed {
                // Only this part of the folio is new; the other part may have contents in the
                // store.
                self.bring_back_without(&mut folio, base, part.start - base..part.end - base);
            }
            // An earlier mapping, unmapped without the engine, may have left contents here.
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
