//! A fault: find the unit, bring it back.
//!
//! ```text
//! look the unit up
//!   resident   a missing page reads as zeros
//!   staged     move it back with the other staged units of the folio (the second chance)
//!   stored     decompress and check one unit, and those of its folio that its stream wants;
//!              if it is on the backing, have it fetched, and be served later (`spill.rs`)
//!   empty      zeros: the whole folio if all of it is empty and folios are used as a whole, else one unit
//! ```
//!
//! A whole folio is brought into a free slot if there is one, whose pages are then moved into the
//! program. Other units are copied into new pages: a copy interrupts no CPU, and a scratch slot
//! keeps its pages.
//!
//! Memory is reserved before the folio is locked, since other folios may have to be reclaimed for
//! it, and reclaim never happens under a folio's lock.

use std::ops::Range;

use zfolio_core::ledger::signed;
use zfolio_core::stats::{Figures, add, subtract};
use zfolio_core::store::{self, EntryId, Loaded, Ticket};

use crate::engine::Engine;
use crate::folio::{Folio, FolioLock, Held, Table, UNITS_MAX, Units};
use crate::mover::Full;
use crate::prefetch::Plan;
use crate::reclaim::{By, Reclaimed};
use crate::replacement::Queue;
use crate::spill::{Later, Room, Tickets};

/// How a fault was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// With zeros.
    Zero,
    /// From the staging area.
    Staged,
    /// By decompression.
    Stored {
        /// Bytes that were compressed after the unit was compressed.
        distance_bytes: u64,
        /// It was in the pool because the backing had read it.
        was_fetched: bool,
    },
    /// Another thread had served it already.
    Raced,
}

/// The most folios that a fault compresses before it goes over the limit. A fault brings one folio
/// back (a run of zeros brings more, but only into slots that are free already), so compressing
/// four makes the charge fall. If nothing shrinks, compressing more would cost time and gain
/// nothing.
const FREED_MAX: usize = 4;

/// A fault that needs less than a slot gives the pages of at most this many slots back to the system, and gets new
/// ones: 64 pages take 40 us.
const RELEASED_BY_FAULT_MAX: usize = 4;

/// The most folios that a fault compresses before it writes to a disk, where there is one. When the process's other
/// memory grows, the charge passes the limit by more than four folios. Units that are written then are missed soon: to
/// read one back takes 100 us or more, and to compress a folio 50 us. Where compressing gains little, a fault writes
/// first (`is_for_the_disk`).
const FREED_BEFORE_DISK_MAX: usize = 64;

/// How often a fault drops copies where nothing can be stored. A folio of which the pool rejects some units, for want
/// of address space, leaves copies of the others, and to drop them makes no room for all of them the next time either.
const SHED_MAX: usize = 64;

/// How many folios a fault repacks before it goes over the limit.
const REPACKED_MAX: usize = 2;

/// How many adjacent whole folios are moved in at once at most.
const PLACE_MAX: usize = 4;
const PLACE_BYTES_MAX: usize = 256 << 10;

/// A folio on its way in.
struct Incoming<'t> {
    base: usize,
    folio: Held<'t>,
    slot: Full,
}

/// The memory reserved for a fault.
#[derive(Debug)]
enum Spare {
    /// A free slot, with pages for a whole folio.
    Free(Full),
    /// Room under the limit for new pages.
    Room,
}

/// A fault that is to be served, perhaps after several tries.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Since when its thread waits, as far as is known.
    pub(crate) began: u64,
    /// How much of that it waited for the backing.
    pub(crate) spilled_ns: u64,
    /// Whether the backing had to read its unit.
    pub(crate) was_away: bool,
    /// What it is to bring in: planned once, since a plan changes its stream.
    pub(crate) plan: Option<Plan>,
}

impl Turn {
    pub(crate) fn new(began: u64) -> Turn {
        Turn { began, spilled_ns: 0, was_away: false, plan: None }
    }
}

/// What a fault waited for, in nanoseconds.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Waits {
    /// For the folio's lock.
    lock_ns: u64,
    /// For room.
    reclaim_ns: u64,
    /// For the codec.
    decompress_ns: u64,
}

impl Waits {
    /// Adds them to the figures.
    pub(crate) fn count(self, figures: &Figures) {
        add(&figures.stall_lock_ns, self.lock_ns);
        add(&figures.stall_reclaim_ns, self.reclaim_ns);
        add(&figures.stall_decompress_ns, self.decompress_ns);
    }
}

/// What a touch of unit `index` is to bring back of what went out below the limit (`--stall`): one
/// unit, then a quarter of the folio, then all of it. A folio that is in use as a whole is back after
/// three touches; of one with a single unit in use, the others go out.
fn around(folio: &Folio, index: usize) -> Units {
    let count = match folio.resident.count() {
        0 => 1,
        1..4 => 4,
        _ => UNITS_MAX,
    };
    let start = index / count * count;
    Units::from(start..start + count)
}

impl Engine {
    /// Serves a fault at `address`; the thread that waits is awake when this returns. Returns also
    /// the range of units that was brought in.
    ///
    /// # Errors
    ///
    /// It cannot be served before the backing has read or written.
    pub(crate) fn fault(
        &self,
        table: &Table,
        address: usize,
        plan: &Plan,
        cpu: usize,
        waits: &mut Waits,
    ) -> Result<(Served, Range<usize>), Later> {
        let (base, index) = (self.geometry().base(address), self.geometry().index(address));
        let first = base / self.geometry().unit_bytes();
        let range = |units: Units| self.geometry().numbers(base, units);
        let one = range(Units::one(index));
        let Some(lock) = table.get(address) else {
            self.mover.place_zero_page(address);
            return Ok((Served::Zero, one));
        };
        let along = plan.within(first, self.geometry().units());
        let (mut spare, mut skipped, mut at_once) = (None, Units::NONE, false);
        let mut fills = self.work.reclaimer.fills_folios();
        loop {
            let mut folio = self.lock_folio(lock, waits);
            if !folio.managed || folio.resident.contains(index) {
                // Under the folio's lock: a page of zeros must not land in a unit that has just
                // been captured (UNIT-1).
                let was_there = self.mover.place_zero_page(address);
                drop(folio);
                self.give_spare(spare);
                let served = if was_there { Served::Raced } else { Served::Zero };
                return Ok((served, one));
            }
            let near = (along | self.beside(table, base, &mut folio, index)) - skipped;
            let touched = around(&folio, index) | near;
            let staged = self.bring_staged(&mut folio, base, touched);
            if staged.contains(index) {
                drop(folio);
                self.give_spare(spare);
                return Ok((Served::Staged, range(staged)));
            }
            let wanted = self.wanted(&folio, index, near, fills);
            if let Some(away) = self.away(&folio, wanted).filter(|_| !at_once) {
                // With the folio locked: nobody loads and puts away meanwhile what is asked for.
                let asked = self.fetch_for(table, &away, index);
                drop(folio);
                match asked {
                    // It has come, or cannot be read at all: to load it says which.
                    Ok(true) => (skipped, at_once) = (self.geometry().all(), true),
                    // What comes along from the backing is in the pool when it is touched.
                    Ok(false) => skipped |= away.units(),
                    Err(later) => {
                        self.give_spare(spare);
                        return Err(later);
                    }
                }
                continue;
            }
            let Some(spare) = spare.take() else {
                // Where the limit cannot be held there is no room for one unit either: a folio of zeros then comes as a
                // whole, with one fault instead of sixteen.
                let needed = Units::one(index).whole(folio.wide);
                let is_ahead = wanted != needed && !(folio.is_empty() && self.at_floor());
                drop(folio);
                spare = self.wait_for_room(table, wanted, (cpu, is_ahead), waits)?;
                if spare.is_none() {
                    (skipped, fills) = (self.geometry().all(), false);
                }
                continue;
            };
            let stored = folio.stored.contains(index);
            if stored {
                self.note_asked_for(&mut folio, wanted & (Units::one(index) | along));
            }
            let distance_bytes = self.replacement.distance_bytes(folio.left_at(index));
            let was_fetched = stored && self.was_fetched(&folio, index);
            let served = match stored {
                true => Served::Stored { distance_bytes, was_fetched },
                false => Served::Zero,
            };
            // Zeros cost little. Decompressing ahead is left to the prefetching thread.
            let most = if plan.rises && !stored { PLACE_MAX } else { 1 };
            let (brought, decompress_ns) =
                self.bring(table, folio, base, (wanted, spare), (most, cpu))?;
            waits.decompress_ns += decompress_ns;
            return Ok((served, brought));
        }
    }

    /// [`Engine::reserve`], and how long that took.
    fn wait_for_room(
        &self,
        table: &Table,
        units: Units,
        (cpu, is_ahead): (usize, bool),
        waits: &mut Waits,
    ) -> Result<Option<Spare>, Later> {
        let began = self.now_ns();
        let spare = self.reserve(table, units, (cpu, By::Direct), is_ahead)?;
        waits.reclaim_ns += self.now_ns() - began;
        Ok(spare)
    }

    fn lock_folio<'t>(&self, lock: &'t FolioLock, waits: &mut Waits) -> Held<'t> {
        lock.try_lock().unwrap_or_else(|| {
            let began = self.now_ns();
            let folio = lock.lock();
            waits.lock_ns += self.now_ns() - began;
            folio
        })
    }

    /// The units to bring in for a fault on unit `index`, which is one of them. `near` are those that
    /// the fault's stream wants; `fills`: an empty folio comes as a whole.
    fn wanted(&self, folio: &Folio, index: usize, near: Units, fills: bool) -> Units {
        if folio.is_empty() {
            if fills { self.geometry().all() } else { Units::one(index) | near }
        } else if folio.stored.contains(index) {
            (Units::one(index) | (folio.stored & near)).whole(folio.wide)
        } else {
            Units::one(index)
        }
    }

    /// Brings back those of `units` that are staged or stored, which no thread waits for yet; if these
    /// are a whole folio, up to `above` folios above it too. Nothing happens if another thread has
    /// the folio's lock. Returns the units that are being fetched, and must come before.
    pub(crate) fn prefetch_units(
        &self,
        table: &Table,
        base: usize,
        units: Units,
        above: usize,
        cpu: usize,
    ) -> Option<Tickets> {
        let lock = table.known(base)?;
        let missing = |folio: &Folio| folio.staged.is_some() || !(folio.stored & units).is_empty();
        let folio = lock.try_lock().filter(|folio| missing(folio))?;
        let stored = (folio.stored & units).whole(folio.wide);
        let away = self.away(&folio, stored);
        if let Some(away) = &away {
            if self.is_still() {
                return None;
            }
            self.fetch(table, away, None);
        }
        drop(folio);
        if away.is_some() {
            return away;
        }
        let by = (cpu, By::Ahead);
        let spare = self.reserve(table, stored, by, true).ok().flatten()?;
        let Some(mut folio) = lock.try_lock().filter(|folio| missing(folio)) else {
            self.give_spare(Some(spare));
            return None;
        };
        let staged = self.bring_staged(&mut folio, base, units);
        let stored = (folio.stored & units).whole(folio.wide);
        add(&self.figures().prefetch_units, (staged | stored).count() as u64);
        match spare {
            spare if stored.is_empty() => {
                drop(folio);
                self.give_spare(Some(spare));
            }
            Spare::Free(slot) if stored == self.geometry().all() => {
                let most = PLACE_MAX.min(1 + above);
                let incoming = Incoming { base, folio, slot };
                // An error: something has just left the pool. It is fetched when it is touched.
                let brought =
                    self.bring_whole(table, incoming, most, cpu).map_or(1, |(brought, _)| brought);
                let more = (brought - 1) * self.geometry().units();
                add(&self.figures().prefetch_units, more as u64);
            }
            spare => _ = self.bring_part(table, folio, base, (stored, spare), cpu).ok(),
        }
        None
    }

    /// Moves staged units back, and returns them: those of `units` while memory goes out below the
    /// limit, else all. At the limit it costs least if folios come and go as a whole: their slots
    /// keep the pages, and one move takes several of them.
    pub(crate) fn bring_staged(&self, folio: &mut Folio, base: usize, units: Units) -> Units {
        let staged = folio.staged_units();
        let units = if self.is_proactive() { units & staged } else { staged };
        if units.is_empty() {
            return units;
        }
        if units == staged {
            folio.staged.take().into_iter().for_each(|slot| self.mover.place(slot, base));
        } else if let Some(slot) = &mut folio.staged {
            self.mover.place_units(slot, units, base);
        }
        self.note_resident(folio, base, units, Queue::Main);
        units
    }

    /// Brings units of a folio into the memory that was reserved for them; with a free slot the folios above it too, up
    /// to `most` in all. Returns the range of units that was brought in, and the nanoseconds that decompressing took.
    ///
    /// # Errors
    ///
    /// A unit has just left the pool for the backing.
    fn bring(
        &self,
        table: &Table,
        folio: Held<'_>,
        base: usize,
        (units, spare): (Units, Spare),
        (most, cpu): (usize, usize),
    ) -> Result<(Range<usize>, u64), Later> {
        let range = self.geometry().numbers(base, units);
        match spare {
            Spare::Free(slot) if units == self.geometry().all() => {
                let incoming = Incoming { base, folio, slot };
                let (folios, took) = self.bring_whole(table, incoming, most, cpu)?;
                Ok((range.start..range.start + folios * self.geometry().units(), took))
            }
            spare => Ok((range, self.bring_part(table, folio, base, (units, spare), cpu)?)),
        }
    }

    /// Brings a whole folio, stored or empty, into its free slot, and moves the slot's pages in.
    /// The folios above it come along, up to `most` folios in all, while they are stored or empty
    /// like the first and the adjacent slots are free too. Returns how many folios were brought in,
    /// and the nanoseconds that decompressing took.
    ///
    /// # Errors
    ///
    /// A unit of the first folio has just left the pool for the backing.
    fn bring_whole(
        &self,
        table: &Table,
        first: Incoming<'_>,
        most: usize,
        cpu: usize,
    ) -> Result<(usize, u64), Later> {
        let (start, empty) = (first.base, first.folio.is_empty());
        let mut batch = [const { None }; PLACE_MAX];
        batch[0] = Some(first);
        let mut count = 1;
        let most = most.min(self.geometry().at_most(PLACE_BYTES_MAX));
        while let Some(Some(last)) = batch.get(count - 1).filter(|_| count < most) {
            let base = last.base + self.geometry().folio_bytes();
            let Some(folio) = table.get(base).and_then(|lock| lock.try_lock()) else { break };
            let alike =
                if empty { folio.is_empty() } else { folio.stored == self.geometry().all() };
            let slot =
                if alike && folio.managed { self.mover.take_free_above(&last.slot) } else { None };
            let Some(slot) = slot else { break };
            batch[count] = Some(Incoming { base, folio, slot });
            count += 1;
        }
        let (mut decompress_ns, mut filled, mut later) = (0, 0, None);
        for Incoming { base, folio, slot } in batch.iter_mut().flatten() {
            if empty {
                self.mover.zero(slot, 0..self.geometry().folio_bytes());
            } else {
                match self.load_copies(folio, *base, self.geometry().all(), slot, cpu) {
                    Ok(took) => decompress_ns += took,
                    Err(ticket) => {
                        // With the folio locked: nobody loads and puts away meanwhile what is asked for.
                        later = (filled == 0).then(|| self.fetch_one(table, ticket));
                        break;
                    }
                }
            }
            filled += 1;
        }
        for incoming in &mut batch[filled..count] {
            incoming.take().into_iter().for_each(|incoming| self.mover.give_free(incoming.slot));
        }
        count = filled;
        if let Some(later) = later {
            return Err(later);
        }
        let went = match &batch[0] {
            Some(first) if count > 1 => self.mover.place_many(&first.slot, start, count),
            _ => 0,
        };
        for (at, Incoming { base, mut folio, slot }) in batch.into_iter().flatten().enumerate() {
            match at < went {
                true => self.mover.placed(slot),
                false => self.mover.place(slot, base),
            }
            let soon = !empty && self.replacement.came_back_soon(folio.captured);
            let queue = if soon { Queue::Main } else { Queue::Probation };
            self.note_resident(&mut folio, base, self.geometry().all(), queue);
        }
        Ok((count, decompress_ns))
    }

    /// Brings in some units of a folio by copy; all of them are stored, or all empty. Returns the
    /// nanoseconds that decompressing took.
    ///
    /// # Errors
    ///
    /// A unit has just left the pool for the backing.
    fn bring_part(
        &self,
        table: &Table,
        mut folio: Held<'_>,
        base: usize,
        (units, spare): (Units, Spare),
        cpu: usize,
    ) -> Result<u64, Later> {
        let stored = folio.stored & units == units;
        let (mut decompress_ns, mut scratch) = (0, None);
        if stored {
            let mut slot = self.take_scratch(base);
            match self.load_copies(&mut folio, base, units, &mut slot, cpu) {
                Ok(took) => decompress_ns = took,
                Err(ticket) => {
                    let later = self.fetch_one(table, ticket);
                    drop(folio);
                    self.mover.give_scratch(slot);
                    self.give_spare(Some(spare));
                    return Err(later);
                }
            }
            self.mover.place_copy(&slot, units, base);
            scratch = Some(slot);
        } else {
            self.mover.place_zeros(units, base);
        }
        let soon = stored && self.replacement.came_back_soon(folio.captured);
        let room = matches!(spare, Spare::Room);
        let queue = if soon || room { Queue::Main } else { Queue::Probation };
        self.note_resident(&mut folio, base, units, queue);
        drop(folio);
        scratch.into_iter().for_each(|scratch| self.mover.give_scratch(scratch));
        self.give_spare(Some(spare));
        Ok(decompress_ns)
    }

    /// Decompresses stored units into `slot`: of wide units all four. Their copies are kept if the budget of copies
    /// allows. Returns the nanoseconds that this took.
    ///
    /// # Errors
    ///
    /// The ticket of a unit that has left the pool for the backing; the folio is as before.
    pub(crate) fn load_copies(
        &self,
        folio: &mut Folio,
        base: usize,
        units: Units,
        slot: &mut Full,
        cpu: usize,
    ) -> Result<u64, Ticket> {
        let began = self.now_ns();
        let mut batch: [store::Incoming<'_>; UNITS_MAX] = Default::default();
        let objects = self.mover.objects_mut(slot, units, folio.wide);
        let mut count = 0;
        for (wanted, (object, bytes)) in batch.iter_mut().zip(objects) {
            let copy = folio.copies[object.start].as_ref();
            let copy = copy.expect("UNIT-2: a stored unit has a copy");
            *wanted = store::Incoming::new(copy, bytes);
            count += 1;
        }
        let batch = &mut batch[..count];
        self.store.load(cpu, batch);
        for (loaded, object) in batch.iter().zip(units.objects(folio.wide)) {
            self.expect_whole(loaded, base + self.geometry().bytes(object).start)?;
        }
        self.keep_copies(folio, base, units);
        subtract(&self.figures().demand_stored_bytes, self.geometry().bytes_of(units) as u64);
        Ok(self.now_ns() - began)
    }

    /// Decompresses `copy` into `unit`; `address` is where the unit belongs, for an error message.
    ///
    /// # Errors
    ///
    /// The unit's ticket, if it is away.
    pub(crate) fn load_unit(
        &self,
        copy: &EntryId,
        address: usize,
        unit: &mut [u8],
        cpu: usize,
    ) -> Result<(), Ticket> {
        let mut wanted = [store::Incoming::new(copy, unit)];
        self.store.load(cpu, &mut wanted);
        self.expect_whole(&wanted[0], address)
    }

    /// Ends the process if the unit that belongs to `address` cannot be loaded: the program never
    /// gets wrong data. An error is the unit's ticket, if it is away.
    fn expect_whole(&self, unit: &store::Incoming<'_>, address: usize) -> Result<(), Ticket> {
        match unit.outcome {
            Loaded::Whole => Ok(()),
            Loaded::Away(ticket) => Err(ticket),
            Loaded::Lost(error) => {
                add(&self.figures().decompress_fail, u64::from(was_decompressed(error)));
                self.note_lost();
                let ticket = unit.entry.and_then(|entry| self.store.away(entry));
                let disk = ticket.and_then(|ticket| self.disk_of(ticket));
                let bytes = unit.bytes.len();
                crate::fatal::corrupt(address, bytes, disk.as_deref(), error);
            }
            outcome => unreachable!("{outcome:?} after a load"),
        }
    }

    /// Counts and queues units that have become resident.
    pub(crate) fn note_resident(&self, folio: &mut Folio, base: usize, units: Units, queue: Queue) {
        folio.resident |= units;
        self.count_in(units);
        if !folio.queued {
            folio.queued = true;
            self.replacement.push(base, queue);
        }
    }

    fn give_spare(&self, spare: Option<Spare>) {
        if let Some(Spare::Free(slot)) = spare {
            self.mover.give_free(slot);
        }
    }

    /// A slot with all its pages, to decompress into and copy from. Ends the process if the system
    /// has no memory; `base` is for the message.
    pub(crate) fn take_scratch(&self, base: usize) -> Full {
        self.mover.take_scratch().unwrap_or_else(|error| crate::fatal::out_of_memory(base, error))
    }

    /// Reserves memory for `units` of a folio: a free slot if these are all its units and there is
    /// one, else room for new pages.
    ///
    /// Below the low watermark the background thread is woken; without headroom the caller reclaims. If
    /// there is no room below the limit then: `None` for units that no thread waits for yet (`is_ahead`),
    /// and otherwise the limit is passed.
    ///
    /// # Errors
    ///
    /// There will be room once the backing has written.
    fn reserve(
        &self,
        table: &Table,
        units: Units,
        by: (usize, By),
        is_ahead: bool,
    ) -> Result<Option<Spare>, Later> {
        if self.available_bytes() < self.charge.low_bytes() {
            self.ring_reclaimer();
        }
        let before = self.below_limit();
        let spare = self.make_spare(table, units, by);
        if is_ahead {
            return Ok(spare.ok().flatten());
        }
        let spare = spare?;
        let is_passed = match spare {
            Some(Spare::Room) => false,
            Some(Spare::Free(_)) => self.below_limit() < 0,
            None => true,
        };
        // A limit may fall by more than one fault can reclaim. While the charge follows, there is nothing to report.
        let follows = || {
            let needed = if spare.is_none() { self.geometry().bytes_of(units) } else { 0 };
            self.limit_may_fall() && self.below_limit() > before + signed(needed as u64)
        };
        if is_passed {
            self.note_pass();
            if !follows() {
                self.note_over_limit();
            }
        }
        Ok(spare.or(Some(Spare::Room)))
    }

    /// A free slot, or room for `units` below the limit, if need be after reclaim. `None`: there is neither.
    ///
    /// # Errors
    ///
    /// There will be room once the backing has written.
    fn make_spare(
        &self,
        table: &Table,
        units: Units,
        (cpu, by): (usize, By),
    ) -> Result<Option<Spare>, Later> {
        let bytes = self.geometry().bytes_of(units) as u64;
        let needed = signed(bytes);
        let (mut freed, mut compacted, mut repacked, mut shed) = (0, false, 0, 0);
        let freed_max = if self.store.has_backing() { FREED_BEFORE_DISK_MAX } else { FREED_MAX };
        while freed < freed_max {
            match self.spill(needed, self.is_for_the_disk()) {
                Room::Made => continue,
                Room::Soon => return Err(Later::Room),
                Room::None => {}
            }
            let (below_limit, headroom) = (self.below_limit(), self.headroom());
            if headroom >= 0 {
                // The limit is passed, but what is stored is about to take less.
                if below_limit < 0 && repacked < REPACKED_MAX && self.densify_one(table) {
                    repacked += 1;
                    continue;
                }
                if units == self.geometry().all() {
                    self.work.reclaimer.whole_share.add(1, 1);
                    if let Some(slot) = self.mover.take_free() {
                        return Ok(Some(Spare::Free(slot)));
                    }
                }
                if below_limit >= needed {
                    return Ok(Some(Spare::Room));
                }
                if self.mover.release_leaving(RELEASED_BY_FAULT_MAX) > 0 {
                    continue;
                }
                if self.mover.free_bytes() > 0 {
                    let slots = self.release_free(RELEASED_BY_FAULT_MAX);
                    (0..slots).for_each(|_| self.work.reclaimer.whole_share.add(0, 1));
                    continue;
                }
            }
            if self.grow(bytes) {
                continue;
            }
            // The limit cannot be held, and the floor has room: the background thread sees to that.
            if headroom >= needed {
                break;
            }
            match self.reclaim_one(table, cpu, by) {
                Reclaimed::Captured => {}
                Reclaimed::Freed => freed += 1,
                // Nothing is captured until the fork that is about to happen is over. The excess
                // stays small until then (`is_settling`), and is soon reclaimed afterwards.
                Reclaimed::Nothing if self.is_settling() => return Ok(Some(Spare::Room)),
                Reclaimed::Nothing if shed < SHED_MAX && self.drop_oldest_copies(table) => {
                    shed += 1
                }
                Reclaimed::Nothing if compacted => break,
                Reclaimed::Nothing => {
                    self.compact_if_wasteful(table);
                    compacted = true;
                }
            }
        }
        // The last folio may have made room. If nothing shrank, reclaiming more gains nothing.
        let may_wait = self.below_limit() < needed && self.spill(needed, true) != Room::None;
        if self.below_limit() < needed && !may_wait {
            // Before the limit is passed: slots that were freed have their pages until several of them are released.
            self.mover.release_leaving(usize::MAX);
        }
        match self.below_limit() >= needed {
            true => Ok(Some(Spare::Room)),
            false if may_wait => Err(Later::Room),
            false => Ok(None),
        }
    }

    /// Gives the pages of up to `most` free slots back to the system, so that there is room for new ones. Returns how
    /// many slots that were.
    pub(crate) fn release_free(&self, most: usize) -> usize {
        let mut released = 0;
        while released < most {
            let Some(slot) = self.mover.take_free() else { break };
            released += 1;
            if self.mover.give_leaving(slot) {
                break;
            }
        }
        self.mover.release_leaving(usize::MAX);
        released
    }
}

/// Whether a unit was lost after the pool had its object: what the disk did not deliver was not decompressed.
fn was_decompressed(lost: store::Error) -> bool {
    !matches!(lost, store::Error::Unreadable { .. })
}

#[cfg(test)]
mod tests {
    use zfolio_core::store::{Error, Key};

    use super::{UNITS_MAX, Units, around, was_decompressed};
    use crate::folio::Folio;

    /// Goal: `decompress_fail` counts what the pool has damaged, and nothing that was lost on the disk.
    #[test]
    fn a_unit_that_the_disk_does_not_deliver_is_not_decompressed() {
        let [expected, found] =
            [1, 2].map(|byte| Key::new([3; Key::BYTES]).checksum(&vec![byte; 4097]));
        for is_transient in [false, true] {
            assert!(!was_decompressed(Error::Unreadable { expected, is_transient }));
        }
        assert!(was_decompressed(Error::Corrupt { expected, found }));
    }

    /// Goal: a folio in use as a whole is back after few touches, and of one with few units in use
    /// most stay out.
    #[test]
    fn each_touch_brings_back_more() {
        let back = |touched: &[usize]| {
            let mut folio = Folio::new(true, UNITS_MAX);
            let mut faults = 0;
            for &index in touched {
                if !folio.resident.contains(index) {
                    faults += 1;
                    let units = around(&folio, index);
                    assert!(units.contains(index));
                    folio.resident |= units;
                }
            }
            (faults, folio.resident)
        };
        let all: Vec<usize> = (0..UNITS_MAX).collect();
        assert_eq!(back(&all), (3, Units::from(0..16)));
        assert_eq!(back(&[5]), (1, Units::one(5)));
        assert_eq!(back(&[5, 14]), (2, Units::one(5) | Units::from(12..16)));
    }
}
