//! `fork`: the engine stops moving memory, and a child gets an engine of its own, or its memory
//! back.
//!
//! ```text
//! parent   settle_for_fork: staged folios come back
//!          quiet: nothing moves until the child is made
//! child    map_again, open_again: staging area and userfaultfds, which fork does not copy
//!          register_again: from here on faults are served
//!     or   return_all: everything stored is written back, and nothing is managed any more
//! ```
//!
//! `return_all` is for a child that gets no thread or no userfaultfd from the kernel. The child
//! goes over its limit, since no byte may be lost.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::Inheritance;
use zfolio_core::sync::WriteGuard;
use zfolio_sys::Errno;
use zfolio_sys::map::OwnMemory;
use zfolio_workers::Hardware;

use crate::config::Error;
use crate::engine::Engine;
use crate::folio::{Folio, Geometry, Table};
use crate::mappings::event::Locked;
use crate::rank;
use crate::spill::{BATCH, Lent, Place, STILL_NS, Tries};

/// While this lives, the engine moves nothing: see [`Engine::quiet`].
#[derive(Debug)]
pub struct Quiet<'a> {
    geometry: Geometry,
    inheritance: Inheritance,
    lent: Lent,
    _gate: WriteGuard<'a, { rank::GATE }, ()>,
    inbox: Locked<'a>,
    table: WriteGuard<'a, { rank::TABLE }, Table>,
}

impl Quiet<'_> {
    /// The files that were lent to the child.
    #[must_use]
    pub fn lent(&self) -> &Lent {
        &self.lent
    }

    /// Whether nothing is managed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.managed_bytes() == 0
    }

    /// Whether the unit at `address` is mapped in the program, or not managed.
    #[must_use]
    pub fn is_resident(&mut self, address: usize) -> bool {
        // The table is held for writing, so a folio needs no lock. Its lock would have a lower rank
        // than the inbox.
        let index = self.geometry.index(address);
        match self.table.known_mut(address) {
            Some(folio) => !folio.managed || folio.resident.contains(index),
            None => !self.table.manages(address),
        }
    }
}

/// How stored units get back into the memory of a child: the memory as a file, and a place for one unit.
pub(crate) struct Way {
    memory: OwnMemory,
    unit: Vec<u8>,
}

impl Way {
    pub(crate) fn open(engine: &Engine) -> Way {
        let unit = vec![0_u8; engine.config().object_max().bytes()];
        Way { memory: OwnMemory::open(), unit }
    }
}

impl Engine {
    /// Brings every staged folio back, so that the staging area is empty when a child is made. From
    /// here to [`quiet`](Engine::quiet) nothing is captured: otherwise the faults of other threads
    /// would have folios staged again and again.
    ///
    /// A disk may take long to answer, or stall, while others are well. Then faults go on for as long as has been
    /// waited in vain, and the next try takes twice as long: else threads that fault all the time would put the
    /// fork off for ever where each request takes long.
    pub fn settle_for_fork(&self) {
        let mut patience_ns = STILL_NS;
        while !self.settle(patience_ns) {
            self.work.settling.store(false, Relaxed);
            self.look_at_backing_for(patience_ns);
            patience_ns *= 2;
        }
    }

    /// One try. False: the backing has ended nothing for so long, and is still at work.
    fn settle(&self, patience_ns: u64) -> bool {
        self.keep_still();
        self.work.settling.store(true, Relaxed);
        // A thread that captures holds the table for reading. Once the table was held for writing,
        // captures that began before are over, and later ones see the flag.
        drop(self.table_for_change(&[]));
        let table = self.table.read();
        while let Some(base) = self.replacement.pop_staged() {
            if let Some(lock) = table.known(base) {
                self.bring_staged(&mut lock.lock(), base, self.geometry().all());
            }
        }
        drop(table);
        self.drain_backing(patience_ns)
    }

    /// For the thread that forks, after [`settle_for_fork`](Engine::settle_for_fork): opens the files that the child
    /// will read in its table of files.
    ///
    /// # Errors
    ///
    /// Those of `open`. The child could not read what is on the disk.
    pub fn lend(&self) -> Result<Lent, Errno> {
        self.work.place.as_ref().map_or_else(|| Ok(Lent::default()), Place::lend)
    }

    /// Stops all movement for `fork`: nothing is staged, no folio moves, and no fault is served
    /// until the [`Quiet`] is dropped, in the parent and in the child.
    ///
    /// To be called after [`settle_for_fork`](Engine::settle_for_fork), which prevents captures
    /// until then.
    ///
    /// `None`: folios were staged meanwhile, the inbox has a change, or the backing is at work. Call `settle_for_fork`
    /// and try again.
    pub fn quiet(&self, mut lent: Lent) -> Option<Quiet<'_>> {
        let mut table = self.table.write();
        self.work.settling.store(false, Relaxed);
        // The child's inbox will be cleared, so changes that were read are applied now (EVT-3). What they need is
        // fetched by settle_for_fork: this thread may have another table of files than the disk.
        self.apply_changes(&mut table).ok()?;
        let inbox = self.mover.inbox.lock();
        let gate = self.work.spilling.gate.write();
        let changed = inbox.has_change();
        let is_idle = self.store.in_flight().0 == 0;
        let settled = self.replacement.staged_folios() == 0 && !changed && is_idle;
        if !settled || self.work.place.as_ref().is_some_and(|place| !place.share(&mut lent)) {
            return None;
        }
        let (geometry, inheritance) = (self.geometry(), self.figures().inheritance());
        Some(Quiet { geometry, inheritance, lent, _gate: gate, inbox, table })
    }

    /// In the child, before anything else is mapped there: maps the staging area, which `fork` did
    /// not copy. The figures are the child's own from here on.
    ///
    /// # Errors
    ///
    /// No memory, or the area's addresses are taken already.
    pub fn map_again(&self, held: &Quiet<'_>) -> Result<(), Error> {
        self.figures().inherit(&held.inheritance);
        self.store.start_over();
        self.charge.start_over();
        self.work.density.end_walk();
        let again = self.mover.map_again();
        again.map_err(|errno| Error::Memory { what: "staging area", errno })
    }

    /// In the child, by the thread whose table of files will hold them: opens new userfaultfds, and goes on with the
    /// disk by `lent`, copies of the files in [`Quiet::lent`]. Faults are served from
    /// [`register_again`](Engine::register_again) on.
    ///
    /// # Errors
    ///
    /// The kernel refuses what it granted the parent. Nothing is registered: see
    /// [`return_all`](Engine::return_all).
    pub fn open_again(&self, quiet: &mut Quiet<'_>, lent: Vec<OwnedFd>) -> Result<(), Error> {
        self.work.stopping.store(false, Relaxed);
        // The faults in the inbox are those of the parent's threads.
        quiet.inbox.clear();
        self.work.spilling.start_over();
        self.config().accelerated.hardware().into_iter().for_each(Hardware::start_over);
        if let Some(place) = &self.work.place {
            let again = place.start_over(&quiet.lent, lent, true);
            again.map_err(|errno| Error::Memory { what: "spilled memory", errno })?;
        }
        let again = self.mover.open_again();
        again.map_err(|errno| Error::Userfaultfd { mode: self.config().mode, errno })
    }

    /// In the child, once there are threads to serve its faults: registers the managed ranges with
    /// the new userfaultfd. With `has_holes` some may not have been inherited (`MADV_DONTFORK`), which the kernel does
    /// not tell: it registers a range with holes.
    ///
    /// # Errors
    ///
    /// As for [`return_all`](Engine::return_all).
    pub fn register_again(&self, quiet: &mut Quiet<'_>, has_holes: bool) -> Result<(), Errno> {
        let ranges: Vec<(usize, usize)> = quiet.table.ranges().iter().collect();
        for (start, end) in ranges {
            if has_holes {
                self.forget_holes(&mut quiet.table, start, end)?;
            }
            let left: Vec<(usize, usize)> = quiet.table.ranges().pieces(start, end).collect();
            for (start, end) in left {
                if self.mover.register(start, end).is_err() {
                    self.register_what_can_be(&mut quiet.table, start, end)?;
                }
            }
        }
        Ok(())
    }

    /// In the child, instead of [`register_again`](Engine::register_again): writes all stored units
    /// back to where they belong. From here on nothing is managed, and the child's engine threads
    /// end.
    ///
    /// # Errors
    ///
    /// Memory cannot be written, a disk not read, or the pool has no memory for what comes from there. The child would
    /// read zeros instead of its data, and must end.
    pub fn return_all(&self, quiet: &mut Quiet<'_>) -> Result<(), Errno> {
        self.work.stopping.store(true, Relaxed);
        let mut way = Way::open(self);
        if let Some(place) = &self.work.place {
            let copies = quiet.lent.files().map(zfolio_sys::files::duplicate);
            place.start_over(&quiet.lent, copies.collect::<Result<_, _>>()?, false)?;
        }
        let ranges: Vec<(usize, usize)> = quiet.table.ranges().iter().collect();
        self.return_parts(&mut quiet.table, &ranges, &mut way)?;
        self.measure_tables(&mut quiet.table);
        self.work.place.iter().for_each(Place::close);
        Ok(())
    }

    fn return_folio(
        &self,
        folio: &mut Folio,
        base: usize,
        Way { memory, unit }: &mut Way,
    ) -> Result<(), Errno> {
        for object in folio.stored.objects(folio.wide) {
            let copy = folio.copies[object.start].as_ref();
            let copy = copy.expect("UNIT-2: a stored unit has a copy");
            let bytes = self.geometry().bytes(object);
            let (address, unit) = (base + bytes.start, &mut unit[..bytes.len()]);
            let mut tries = Tries::default();
            // What the parent had no room for does not count.
            self.store.take_lack_of_room();
            while let Err(ticket) = self.load_unit(copy, address, unit, self.cpu()) {
                // No other thread could do this meanwhile. The gate is held for writing: pause_backing() would wait.
                self.store.fetch([ticket], |_| false);
                self.store.poll();
                self.store.pause();
                if self.store.take_lack_of_room() {
                    return Err(Errno::NOMEM);
                }
                if self.store.is_unread(ticket) {
                    self.await_try(&mut tries, address, ticket);
                } else {
                    self.forgive(&mut tries);
                }
            }
            // Page by page, since a part of the unit may be missing in the child.
            for (page, bytes) in unit.chunks_exact(PAGE_BYTES).enumerate() {
                let at = address + page * PAGE_BYTES;
                let is_there = || self.is_mapped(at, at + PAGE_BYTES);
                #[allow(
                    unsafe_code,
                    reason = "the child's own memory, which no descriptor serves any more"
                )]
                // SAFETY: nobody has a reference into managed memory, as its users promise, and this is the child's
                // only thread. What is stored was the program's to write to.
                let written = unsafe { memory.write(at, bytes) };
                match written {
                    // The child did not inherit the page (`MADV_DONTFORK`).
                    Err(_) if !is_there() => {}
                    other => other?,
                }
            }
            // What the disk has too needs no room any more.
            self.store.put_away(copy);
        }
        self.drop_folio(folio, false);
        Ok(())
    }

    /// Forgets the folios of a range that the child has not inherited, or only in part: it gets back what it has of
    /// them, and what it maps there is new.
    fn forget_holes(&self, table: &mut Table, start: usize, end: usize) -> Result<(), Errno> {
        let (holes, mut way) = (self.mapped(start, end).gaps(start, end), Way::open(self));
        self.return_parts(table, &holes.iter().collect::<Vec<_>>(), &mut way)
    }

    /// Registers those folios of a range that the kernel lets it. The others become the kernel's.
    fn register_what_can_be(
        &self,
        table: &mut Table,
        start: usize,
        end: usize,
    ) -> Result<(), Errno> {
        let mut way = Way::open(self);
        for base in (start..end).step_by(self.geometry().folio_bytes()) {
            let end = base + self.geometry().folio_bytes();
            if self.mover.register(base, end).is_err() {
                self.return_parts(table, &[(base, end)], &mut way)?;
            }
        }
        Ok(())
    }

    /// Writes the stored units of the folios that overlap some ranges back to where they belong, and leaves these
    /// folios to the kernel.
    ///
    /// # Errors
    ///
    /// As for [`return_all`](Engine::return_all).
    pub(crate) fn return_parts(
        &self,
        table: &mut Table,
        ranges: &[(usize, usize)],
        way: &mut Way,
    ) -> Result<(), Errno> {
        // What leaves the pool makes room there for what comes from a disk.
        for takes_all in [false, true] {
            for (start, end) in ranges {
                self.return_units(table, (*start, *end), takes_all, way)?;
            }
        }
        for (start, end) in ranges {
            let outer = table.exterior(*start, *end);
            table.uncover(outer.0, outer.1);
            table.remove(outer.0, outer.1);
        }
        Ok(())
    }

    /// Writes the stored units of the folios that overlap a range back to where they belong; unless it `takes_all`, not
    /// those of folios of which some are away.
    fn return_units(
        &self,
        table: &mut Table,
        (start, end): (usize, usize),
        takes_all: bool,
        way: &mut Way,
    ) -> Result<(), Errno> {
        let outer = table.exterior(start, end);
        let known = table.known_folios(outer.0, outer.1).map(|(base, _)| base);
        for base in known.collect::<Vec<_>>() {
            // The table is held for writing, so a folio needs no lock, as in `is_resident`.
            while let Some(folio) = table.known_mut(base) {
                if !takes_all && self.away(folio, self.geometry().all()).is_some() {
                    break;
                }
                match self.return_folio(folio, base, way) {
                    Ok(()) => break,
                    Err(Errno::NOMEM) if self.makes_room(table) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Makes room in the pool: copies of what is resident go, and what the disk has too. False: there is neither.
    fn makes_room(&self, table: &Table) -> bool {
        // This is the child's only thread: no other has a folio that is locked here, or waits for one.
        self.drop_oldest_copies(table) || self.store.return_kept(BATCH).written > 0
    }

    /// Whether a child of `fork` could have userfaultfds of its own.
    pub fn can_open_again(&self) -> bool {
        self.mover.system.can_open_again()
    }
}
