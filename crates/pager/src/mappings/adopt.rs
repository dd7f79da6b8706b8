//! Mappings come under management: registered, and what is resident in them found.
//!
//! `Table::covered` says to the page what may be managed, neighbours joined. A folio all of which is
//! there is managed, be it of one mapping or of several, and again when a part of it that was unmapped is
//! mapped anew.

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;

use crate::config::Error;
use crate::engine::Engine;
use crate::fatal;
use crate::folio::Table;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;

/// A range of mappings that has just been registered, and the folios that are whole by it.
struct Registered {
    folios: (usize, usize),
    range: (usize, usize),
}

impl Engine {
    /// Takes a mapping under management, with what is resident in it now: its whole folios, and those
    /// which it makes whole together with what lies beside it.
    ///
    /// # Errors
    ///
    /// The range cannot be registered; it stays the kernel's.
    pub fn adopt(&self, start: usize, end: usize) -> Result<(), Error> {
        let mut table = self.table.write();
        // What was unmapped here before must not be forgotten afterwards (EVT-3).
        self.apply_changes(&mut table);
        let taken = self.take_in(&mut table, start, end);
        self.measure_tables(&mut table);
        taken.map_err(|errno| Error::Memory { what: "userfaultfd register", errno })
    }

    /// Registers a mapping and finds what is resident in it.
    pub(crate) fn take_in(&self, table: &mut Table, start: usize, end: usize) -> Result<(), Errno> {
        let end = end.next_multiple_of(PAGE_BYTES);
        let folios = self.register(table, start, end)?;
        self.scan_resident(table, folios, (start, end));
        Ok(())
    }

    /// Takes many ranges under management, registering all before any is looked at: a program that
    /// grows fast stops growing at once. What cannot be registered stays the kernel's.
    pub fn adopt_all(&self, ranges: impl Iterator<Item = (usize, usize)>) {
        let mut table = self.table.write();
        self.apply_changes(&mut table);
        let mut registered = Vec::new();
        for (start, end) in ranges {
            self.register_most(&mut table, start, end, &mut registered);
        }
        for Registered { folios, range } in registered {
            self.scan_resident(&mut table, folios, range);
        }
        self.measure_tables(&mut table);
    }

    /// Registers what can be of a range of many mappings: one that cannot (it was replaced behind our
    /// back) must not keep the others from it.
    fn register_most(
        &self,
        table: &mut Table,
        start: usize,
        end: usize,
        registered: &mut Vec<Registered>,
    ) {
        // A range in which nothing can be registered is given up after as many tries.
        const REFUSALS_MAX: usize = 64;
        let (mut rest, mut refusals) = (vec![(start, end.next_multiple_of(PAGE_BYTES))], 0);
        while let Some((start, end)) = rest.pop() {
            match self.register(table, start, end) {
                Ok(folios) => registered.push(Registered { folios, range: (start, end) }),
                // No more mappings are allowed: halves would be more of them.
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

    /// Registers a mapping and tells the folios that are whole by it: its own, and at its ends those that
    /// it shares with neighbours.
    ///
    /// All of it, so that it stays one mapping: `mremap` refuses several. The pages beside whole
    /// folios are nobody's units; a touch of a missing one is answered with zeros.
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
        // As far as the neighbours' parts of the folios at the ends, and what is beside those.
        let from = joined.0.max(outer.0.saturating_sub(bytes));
        let to = joined.1.min(outer.1.saturating_add(bytes));
        let register = |from: usize, to: usize| self.mover.register(from, to);
        if register(from, to).is_ok() {
            return Ok((first, last));
        }
        // Whatever lies beside it by now: alone, then.
        table.uncover(from, to);
        let (first, last) = table.interior(start, end);
        if first < last {
            let registered = register(start, end);
            registered.inspect_err(|error| {
                fatal::tell_if_forbidden(self.config().whole_process, *error)
            })?;
        }
        table.cover(start, end);
        Ok((first, last))
    }

    /// Finds what is resident in whole folios that have just been registered, of a mapping and of
    /// what lies beside it.
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
                // The mapping is new, and the folio's other part may have contents still.
                self.bring_back_without(&mut folio, base, part.start - base..part.end - base);
            }
            // What an earlier mapping left here, unmapped behind our back.
            self.drop_folio(&mut folio, true);
        }
        // Registered: no page comes from now on but through us, so what is found is exact. But a page of
        // zeros that was only read becomes one of the program's own when it is written, and no fault
        // tells of it: so these go first, at once.
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
