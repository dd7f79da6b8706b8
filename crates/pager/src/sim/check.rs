//! Checks that hold whenever the table is held for writing: the invariants of the engine, and that
//! no byte is lost.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::budget::Period;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::store::EntryId;

use super::schedule;
use super::tree::Tree;
use super::world::{IN_TWO_PLACES, World, compare};
use crate::folio::{Folio, Table, Units};
use crate::spill::BATCH;

/// The background thread has so many turns to come down to a limit that has fallen.
const TURNS_MAX: usize = 400;

/// Sums over all folios.
#[derive(Debug, Default)]
struct Sums {
    resident: usize,
    stored: usize,
    copied: usize,
    entries: usize,
    staged: usize,
}

/// The entries of the engine's queues.
struct Queues {
    resident: BTreeSet<usize>,
    parked: BTreeSet<usize>,
    staged: BTreeSet<usize>,
    copied: BTreeSet<usize>,
}

impl Queues {
    /// Reads all queues, and leaves them as they are.
    fn of(world: &World) -> Queues {
        let replacement = &world.engine.replacement;
        let (mut resident, mut copied) = (BTreeSet::new(), BTreeSet::new());
        replacement.retain(|base| {
            resident.insert(base);
            true
        });
        world.engine.copies.retain(|base| {
            copied.insert(base);
            true
        });
        let parked: Vec<usize> = std::iter::from_fn(|| replacement.unpark()).collect();
        parked.iter().rev().for_each(|base| replacement.park(*base));
        let staged: Vec<usize> = std::iter::from_fn(|| replacement.pop_staged()).collect();
        staged.iter().for_each(|base| replacement.push_staged(*base));
        let set = |bases: Vec<usize>| bases.into_iter().collect();
        Queues { resident, parked: set(parked), staged: set(staged), copied }
    }
}

impl World {
    /// Stops all movement and checks the engine. Pages that only one thread may touch now are left
    /// out.
    pub(super) fn audit(&self) {
        let table = self.engine.table_for_change(&[]);
        let queues = Queues::of(self);
        let (start, end) = (self.space.start(), self.space.address(self.settings.pages));
        let mut sums = Sums::default();
        for (base, lock) in table.known_folios(start, end) {
            self.check_folio(&lock.lock(), base, &queues, &mut sums);
        }
        self.check_sums(&sums);
        self.tree.iter().for_each(Tree::check);
        self.check_bytes(&table);
        self.schedule.note("audit", [sums.resident as u64, sums.stored as u64, sums.staged as u64]);
    }

    fn check_folio(&self, folio: &Folio, base: usize, queues: &Queues, sums: &mut Sums) {
        let name = self.space.page(base);
        let staged = folio.staged_units();
        let copies = folio.copies.iter().flatten().count();
        if !folio.managed {
            assert!(folio.is_empty() && copies == 0, "page {name:#x}: the folio is nobody's");
            return;
        }
        let (resident, stored) = (folio.resident, folio.stored);
        let overlaps = [resident & staged, resident & stored, staged & stored];
        assert_eq!(overlaps, [Units::NONE; 3], "page {name:#x}: UNIT-1: a unit is in two places");
        for unit in stored.iter() {
            assert!(
                folio.copy_of(unit).is_some(),
                "page {name:#x}: UNIT-2: unit {unit} has no copy"
            );
        }
        self.check_wide(folio, name);
        for unit in (staged | stored).iter() {
            self.check_missing(base + unit * self.engine.geometry().unit_bytes());
        }
        let is_in = |flag: bool, queue: &BTreeSet<usize>| flag && queue.contains(&base);
        if !resident.is_empty() {
            let queued =
                is_in(folio.queued, &queues.resident) || is_in(folio.parked, &queues.parked);
            assert!(queued, "page {name:#x}: UNIT-3: resident, and in no queue");
        }
        let staged_queued = staged.is_empty() || queues.staged.contains(&base);
        assert!(staged_queued, "page {name:#x}: staged, and not in the queue");
        let backed = folio.backed;
        assert!((backed & stored).is_empty(), "page {name:#x}: UNIT-5: stored and backed");
        for unit in backed.iter() {
            let copy = folio.copy_of(unit);
            let is_away = copy.is_some_and(|copy| self.engine.store.away(copy).is_some());
            assert!(is_away, "page {name:#x}: UNIT-5: the copy of unit {unit} is in the pool");
        }
        let copied = folio.copied_units();
        let copied_queued = copied.is_empty() || is_in(folio.copied, &queues.copied);
        assert!(copied_queued, "page {name:#x}: COPY-2: a copy that no queue knows");
        sums.resident += resident.count();
        sums.stored += stored.count();
        sums.copied += copied.count();
        sums.entries += copies;
        sums.staged += staged.count();
    }

    /// Fails if the units of a wide one are not stored together, or if it has more or less than one copy.
    fn check_wide(&self, folio: &Folio, name: usize) {
        assert_eq!(folio.wide, folio.wide.fours(), "page {name:#x}: WIDE-1: a part of a wide unit");
        for four in folio.wide.objects(folio.wide) {
            let units = Units::from(four.clone());
            let stored = (folio.stored & units).count();
            assert!(
                stored % units.count() == 0,
                "page {name:#x}: WIDE-1: {stored} of four are stored"
            );
            let has = units.iter().map(|unit| folio.copies[unit].is_some());
            assert!(
                has.eq(units.iter().map(|unit| unit == four.start)),
                "page {name:#x}: WIDE-1: copies of {four:?}"
            );
        }
    }

    /// Fails if a page of a staged or stored unit is in the program.
    fn check_missing(&self, start: usize) {
        let bytes = self.engine.geometry().unit_bytes();
        let pages = || (start..start + bytes).step_by(PAGE_BYTES);
        if pages().any(|at| self.is_changing(at)) {
            return;
        }
        for at in pages() {
            let page = self.space.page(at);
            assert!(!self.space.is_here(at), "page {page:#x}: {IN_TWO_PLACES}");
        }
    }

    fn check_sums(&self, sums: &Sums) {
        let (engine, geometry) = (&self.engine, self.engine.geometry());
        // Not `sample`: that may take the table, which the audit has.
        engine.set_gauges(0);
        let figures = engine.figures();
        let bytes = |units: usize| (units * geometry.unit_bytes()) as u64;
        let resident = figures.resident_bytes.load(Relaxed);
        assert_eq!(resident, bytes(sums.resident), "CHG-1: the charge of resident units");
        let stored = figures.demand_stored_bytes.load(Relaxed);
        assert_eq!(stored, bytes(sums.stored), "the bytes that are in the store only");
        assert_eq!(engine.copies.count(), sums.copied, "COPY-1");
        let entries = figures.stored_units.load(Relaxed);
        assert_eq!(entries, sums.entries as u64, "STORE-3: entries in the table, and in the store");
        let [hollow, free, scratch, leaving] = engine.mover.census();
        let slots = engine.mover.slots();
        let staged = engine.replacement.staged_folios();
        assert!(hollow + free + scratch + leaving <= slots, "STAGE-1: a slot is in two lists");
        let out = slots - hollow - free - scratch - leaving;
        assert!(out <= staged, "STAGE-2: {out} slots are out, {staged} folios staged");
        let used = engine.mover.bytes_used() as u64;
        let whole = ((free + scratch) * geometry.folio_bytes()) as u64 + bytes(sums.staged);
        assert!(used >= whole, "STAGE-2: {used} bytes in slots, {whole} in use");
        if leaving == 0 {
            assert_eq!(used, whole, "STAGE-2: bytes in slots");
        }
    }

    /// Fails if more was written than a budget for the whole run allows: each thread may exceed it by one batch. Where
    /// the pool gets no more memory, what comes back may have to have others written.
    pub(super) fn check_budget(&self) {
        let Some(budget) = self.settings.spill.map(|spill| spill.budget) else { return };
        let is_bounded = self.settings.is_capped();
        if budget.is_none() || budget.period() != Period::Run || is_bounded {
            return;
        }
        let batch = (BATCH * self.engine.config().object_max().bytes()) as u64;
        let allowed = budget.bytes() + self.settings.all_threads() as u64 * batch;
        let written = self.engine.bytes_written();
        assert!(written <= allowed, "BUDGET-1: {written} bytes were written, {allowed} allowed");
    }

    /// Whether a thread is changing the mapping of the page at `address`, or has changed it during this
    /// audit: the engine cannot apply the change before the audit ends.
    fn is_changing(&self, address: usize) -> bool {
        let waits = self.engine.mover.inbox.may_have_change(address, address + PAGE_BYTES);
        waits || self.model().is_alone(self.space.page(address))
    }

    /// Finds every page of the program, wherever it is, and compares it with the model.
    fn check_bytes(&self, table: &Table) {
        let (mut found, mut unit) =
            (vec![0; PAGE_BYTES], vec![0; self.engine.config().object_max().bytes()]);
        let mut loaded = usize::MAX;
        for page in 0..self.settings.pages {
            let at = self.space.address(page);
            if !self.space.is_mapped(at) || self.is_changing(at) {
                continue;
            }
            if !self.space.contents(at, &mut found) {
                self.look_elsewhere(table, at, &mut found, (&mut loaded, &mut unit));
                // Other threads have run meanwhile.
                if self.is_changing(at) {
                    continue;
                }
            }
            compare(page, &found, self.model().page(page));
        }
    }

    /// Finds the bytes of a page that is missing in the program.
    fn look_elsewhere(
        &self,
        table: &Table,
        at: usize,
        found: &mut [u8],
        (loaded, unit): (&mut usize, &mut [u8]),
    ) {
        let geometry = self.engine.geometry();
        let (base, index) = (geometry.base(at), geometry.index(at));
        found.fill(0);
        let Some(lock) = table.known(at) else { return };
        let folio = lock.lock();
        if let Some(slot) = folio.staged.as_ref().filter(|slot| slot.units().contains(index)) {
            let within = at % geometry.unit_bytes();
            let there = self.engine.mover.part(slot, index..index + 1).as_ptr() as usize + within;
            assert!(self.space.contents(there, found), "STAGE-3: a page of a slot is missing");
        } else if folio.stored.contains(index) {
            let object = Units::one(index).whole(folio.wide).span();
            let bytes = geometry.bytes(object);
            let address = base + bytes.start;
            if *loaded != address {
                let copy = folio.copy_of(index).expect("UNIT-2: a stored unit has a copy");
                self.load_anywhere(copy, address, &mut unit[..bytes.len()]);
                *loaded = address;
            }
            let within = at - address;
            found.copy_from_slice(&unit[within..within + PAGE_BYTES]);
        }
    }

    /// Loads a unit, from the backing if need be. The table is held for writing, so nobody else can.
    fn load_anywhere(&self, copy: &EntryId, address: usize, unit: &mut [u8]) {
        let store = &self.engine.store;
        let mut was_away = false;
        while let Err(ticket) = self.engine.load_unit(copy, address, unit, 0) {
            was_away = true;
            self.disk.iter().for_each(|disk| disk.hurry(true));
            store.fetch([ticket], |_| false);
            store.poll();
            if store.take_lack_of_room() {
                store.write_back(BATCH);
            }
        }
        self.disk.iter().for_each(|disk| disk.hurry(false));
        if was_away {
            store.put_away(copy);
        }
    }

    /// After everything was unmapped: fails if the engine still keeps anything.
    pub(super) fn check_empty(&self) {
        let engine = &self.engine;
        let figures = engine.figures();
        assert!(engine.drain_backing(u64::MAX), "it waits for ever");
        engine.sample();
        if let Some(disk) = &self.disk {
            assert_eq!(disk.contents(), (0, 0), "the disk keeps something for nobody");
        }
        assert_eq!(figures.stored_units.load(Relaxed), 0, "something is stored for nobody");
        assert_eq!(figures.resident_bytes.load(Relaxed), 0, "something is resident for nobody");
        assert_eq!(engine.store.pool_stats().objects, 0, "the pool has objects of nobody");
        assert!(!engine.is_managing(), "something is managed for nobody");
        let reasons = [
            &figures.stall_queue_ns,
            &figures.stall_lock_ns,
            &figures.stall_spill_ns,
            &figures.stall_reclaim_ns,
            &figures.stall_decompress_ns,
        ];
        let parts: u64 = reasons.iter().map(|figure| figure.load(Relaxed)).sum();
        assert!(parts <= figures.stall_ns.load(Relaxed), "more waits by reason than in all");
        let [hollow, free, scratch, leaving] = engine.mover.census();
        let slots = engine.mover.slots();
        assert_eq!(hollow + free + scratch + leaving, slots, "STAGE-2: a slot is lost");
    }

    /// Fails if the limit is passed although all data compresses; a small excess is allowed
    /// (`Engine::excess`). A share falls to what the process needs first, and the engine must follow.
    pub(super) fn check_limit(&self) {
        self.check_limit_within(TURNS_MAX);
    }

    /// The same after so many turns of the background thread at most, if there is a disk.
    pub(super) fn check_limit_within(&self, turns: usize) {
        if !self.settings.is_calm() {
            return;
        }
        match &self.tree {
            Some(tree) => self.come_down(tree),
            None if self.disk.is_some() => {
                for _ in 0..turns {
                    if self.engine.excess().is_none() {
                        break;
                    }
                    schedule::wait("the limit".to_owned(), Some(5_000_000));
                }
            }
            None => self.engine.make_room(4 << 20),
        }
        assert!(self.engine.excess().is_none(), "{:?}", self.engine.excess());
    }

    /// The limit falls, and no thread of the program touches anything: the background thread alone must
    /// come down to the limit, and give the rest of the share back.
    fn come_down(&self, tree: &Tree) {
        tree.narrow();
        for _ in 0..TURNS_MAX {
            if self.engine.excess().is_none() && tree.is_narrow() {
                return;
            }
            schedule::wait("the limit".to_owned(), Some(5_000_000));
        }
        assert!(tree.is_narrow(), "the share is not given back: {tree:?}");
    }
}
