//! Spill: what does not fit in the pool goes to the store's backing, and comes back.
//!
//! Out: while the limit can be held by compressing, only what is hardly used is written (`cold.rs`). When resident
//! memory is at its floor and the limit is not held, the background thread has the store write entries back, those
//! first that were used least lately. A fault that needs memory waits until a write has ended, instead of passing the
//! limit; if nothing can be written (the disk is full, or fails, or the budget for writes is used up), the limit is
//! passed as without a backing. The background thread also writes back while the pool takes more of the limit than it
//! may (`pool_limit.rs`).
//!
//! Back: a fault on a unit whose entry is away has the entry fetched, and is served later (`Later`). The handler puts
//! such a fault aside and serves others; inline, the faulting thread waits. A change of a mapping that needs units
//! which are away waits for them before it takes the table for writing.
//!
//! A read that failed is tried again after a pause (`retry.rs`): only who waits for that unit waits longer. Where the
//! process may have no more address space, a read can succeed and the pool have no memory for the unit. Then the
//! background thread writes other units back, even if the limit is held, and the read is tried again. (So does who
//! waits while he holds locks: the background thread may wait for these.)
//!
//! # Invariants
//!
//! - `SPILL-1` Who has the store write back, fetch or report holds the table, at least for reading (`ENG-4`). So while
//!   the table is held for writing, no entry leaves the pool or comes back.
//! - `SPILL-2` Nobody waits for the backing while he holds a lock, but `Engine::wait_holding_locks`. Who waits holds
//!   the **gate** for reading, and who forks takes it for writing: so a child finds no lock of the backing's held.
//! - `SPILL-3` While a change of a mapping waits for units, nothing is written back, so that they stay in the pool;
//!   unless the pool has no memory for a unit that was read.
//! - `SPILL-4` From [`Engine::settle_for_fork`] to the fork no fault has anything fetched (`Later::Still`), so that
//!   the backing comes to rest; but once it has, for `STILL_NS` at most, since the thread that forks may fault too.
//!   While it ends nothing, faults go on for half of the time, so that one disk that stalls does not stop all others.
//!
//! # Cost
//!
//! Without a backing one branch in each fault. With one, a look at the rows of the units to be loaded.

mod any;
mod cold;
mod file;
mod flight;
mod parts;
mod place;
mod plain;
mod pool_limit;
mod queue;
mod retry;
mod site;
mod stall;
#[cfg(test)]
mod tests;
mod uring;

use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, Ordering::Relaxed,
};

use zfolio_core::budget::{Bucket, WriteBudget};
use zfolio_core::ledger::signed;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::add;
use zfolio_core::store::{Ticket, WrittenBack};
use zfolio_core::sync::{Mutex, RwLock};

use crate::engine::Engine;
use crate::fatal;
use crate::folio::{Folio, Table, UNITS_MAX, Units};
use crate::rank;
use cold::Cold;
use pool_limit::PoolFill;
use stall::Stall;

pub use any::SpillDisk;
pub use file::{Medium, Refusal};
pub(crate) use place::Place;
pub use place::{
    Hooks, Lent, PlaceError, Places, SPILL_BYTES_MIN, claim, is_direct, parse_bytes, room,
};
pub use plain::Plain;
pub use pool_limit::PoolLimit;
pub use queue::Counts;
pub(crate) use retry::Tries;
pub use site::{Site, Sites};
pub use uring::{DEPTH, Sender, Uring};

/// Entries that are written back at a time.
pub(crate) const BATCH: usize = 32;

/// Pauses, of a millisecond at most, that prefetching waits for the backing.
const PATIENCE: usize = 20;

/// After so many tries in vain to make room in the pool for what was read, a second at least, a line says so.
const PATIENCE_FOR_ROOM: u32 = 1000;

/// The pause before another try to open an area, or to start a thread for a disk; after one on a device that others
/// have, who may end.
const SHUT_NS: u64 = 10_000_000_000;
const TAKEN_NS: u64 = 1_000_000_000;

/// The pause between two looks at areas that are shared with children, or frozen.
const LOOK_NS: u64 = 250_000_000;

/// A pool stays in memory while it takes less than one part in so many of what passes the limit.
const EXCESS_PART: i64 = 4;

/// So long at most nothing is fetched for a thread that forks, unless the backing is slower.
pub(crate) const STILL_NS: u64 = 20_000_000;

/// The shortest and the longest time for which nothing is written back after the backing took nothing.
const REST_NS_MIN: u64 = 2_000_000;
const REST_NS_MAX: u64 = 1_000_000_000;

/// Why a fault is not served yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Later {
    /// The entry of its unit is being fetched.
    Away(Ticket),
    /// There is room once the backing has written.
    Room,
    /// A thread is about to fork, and the entry of its unit is not being fetched (`SPILL-4`).
    Still,
}

/// Whether writing back makes room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Room {
    /// Some was made.
    Made,
    /// Once writes that are under way have ended.
    Soon,
    /// No: there is no backing, or it takes nothing.
    None,
}

/// What spilling remembers.
#[derive(Debug, Default)]
pub(crate) struct Spilling {
    /// How many changes of mappings wait for units that are away (`SPILL-3`).
    changes: AtomicUsize,
    /// The backing took nothing: until this time nothing is written back, and then so much longer.
    rests_until_ns: AtomicU64,
    rest_ns: AtomicU64,
    /// Entries that had left the pool, and writes that had failed, at the last look.
    wrote: AtomicU64,
    failed: AtomicU64,
    /// For how long no request has ended.
    stall: Stall,
    /// A thread waits for the backing; others wait for what that thread finds.
    is_awaited: AtomicBool,
    /// Counts the looks at the backing that found something.
    found: AtomicU32,
    /// See `SPILL-2`.
    pub(crate) gate: RwLock<{ rank::GATE }, ()>,
    /// Of the change that the handler is about to apply.
    event_tries: Mutex<{ rank::EVENT_TRIES }, Tries>,
    /// Until then a thread that forks keeps the backing at rest.
    still_until_ns: AtomicU64,
    /// A fault waits until there is an area to write to.
    wants_place: AtomicBool,
    /// No area could be opened: the next try comes after this time.
    shut_until_ns: AtomicU64,
    /// Others have all of a device: the next look whether they still do comes after this time.
    no_part_until_ns: AtomicU64,
    /// There was no thread for a disk: the next try comes after this time.
    no_thread_until_ns: AtomicU64,
    /// Why no area could be opened was told.
    has_complained: AtomicBool,
    /// Tries in vain to make room in the pool for what was read, since one succeeded.
    without_room: AtomicU32,
    /// When areas that are shared with children, or frozen, were last looked at.
    looked_ns: AtomicU64,
    /// Whether the pool takes too much of the limit.
    pool: PoolFill,
    /// How much is written although memory would hold it.
    cold: Cold,
    /// What this process may write, unless the processes of its run share that.
    pub(crate) writes: Bucket,
    /// Bytes that were written, or begun to be, when that was last taken from the budget.
    paid_bytes: AtomicU64,
}

/// Whether there is an area to write to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Door {
    Open,
    /// It will be, once the background thread has opened one.
    Soon,
    /// None could be opened.
    Shut,
}

/// While this lives, nothing is written back (`SPILL-3`).
#[derive(Debug)]
pub(crate) struct Hold<'a>(&'a Spilling);

/// Whether a count has changed since the last look.
fn moved(seen: &AtomicU64, now: u64) -> bool {
    seen.swap(now, Relaxed) != now
}

impl Spilling {
    /// Notes whether the backing took anything, or anything left the pool.
    fn note(&self, took: bool, now_ns: u64) {
        let rest_ns = self.rest_ns.load(Relaxed);
        if took {
            if rest_ns != 0 {
                self.rest_ns.store(0, Relaxed);
            }
        } else {
            let rest_ns = (2 * rest_ns).clamp(REST_NS_MIN, REST_NS_MAX);
            self.rest_ns.store(rest_ns, Relaxed);
            self.rests_until_ns.store(now_ns + rest_ns, Relaxed);
        }
    }

    /// In a child of `fork`: nobody waits, and nothing was written and nothing has failed yet. What its parent has
    /// written the parent pays for.
    pub(crate) fn start_over(&self) {
        for count in [&self.wrote, &self.failed, &self.paid_bytes] {
            count.store(0, Relaxed);
        }
        self.changes.store(0, Relaxed);
        self.rests_until_ns.store(0, Relaxed);
        self.rest_ns.store(0, Relaxed);
        self.stall.start_over();
        self.still_until_ns.store(0, Relaxed);
        self.shut_until_ns.store(0, Relaxed);
        self.no_part_until_ns.store(0, Relaxed);
        self.no_thread_until_ns.store(0, Relaxed);
        self.wants_place.store(false, Relaxed);
        self.cold.start_over();
        *self.event_tries.lock() = Tries::default();
    }

    fn hold(&self) -> Hold<'_> {
        self.changes.fetch_add(1, Relaxed);
        Hold(self)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.changes.fetch_sub(1, Relaxed);
    }
}

/// A unit that a change of a mapping needs, and that is away.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Away {
    /// The folio's address.
    base: usize,
    ticket: Ticket,
}

/// Tickets of units of one folio that are away; of one at least.
#[derive(Debug)]
pub(crate) struct Tickets([Option<Ticket>; UNITS_MAX]);

impl Tickets {
    /// That of a unit.
    pub(crate) fn of(&self, index: usize) -> Option<Ticket> {
        self.0[index]
    }

    /// The units that have one.
    pub(crate) fn units(&self) -> Units {
        let has = |index: &usize| self.0[*index].is_some();
        (0..UNITS_MAX).filter(has).map(Units::one).collect()
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = Ticket> {
        // The units of a wide one have the same.
        let mut last = None;
        self.0
            .iter()
            .flatten()
            .copied()
            .filter(move |ticket| last.replace(*ticket) != Some(*ticket))
    }
}

impl Engine {
    /// The disks that are spilled to. Each needs threads ([`SpillDisk::threads_needed`]).
    pub(crate) fn disks(&self) -> Vec<Arc<SpillDisk>> {
        self.work.place.as_ref().map(Place::disks).unwrap_or_default()
    }

    /// From now on files and devices are opened only once they are needed, by the background thread.
    pub fn spill_when_needed(&self, hooks: Hooks) {
        self.work.place.iter().for_each(|place| place.open_when_needed(hooks));
    }

    /// Whether there is an area to write to.
    fn door(&self) -> Door {
        let (place, spilling) = (&self.work.place, &self.work.spilling);
        match place {
            Some(place) if !place.is_open() => {
                let is_shut = self.now_ns() < spilling.shut_until_ns.load(Relaxed);
                if is_shut { Door::Shut } else { Door::Soon }
            }
            _ => Door::Open,
        }
    }

    /// Starts threads for disks whose ring has stopped working: until then whoever writes or reads waits, with locks
    /// held. The table's guard proves that no fork is under way, and `settling` that none is about to begin.
    pub(crate) fn look_after_disks(&self, _table: &Table) {
        let (Some(place), spilling) = (&self.work.place, &self.work.spilling) else { return };
        let now = self.now_ns();
        let is_due = now >= spilling.no_thread_until_ns.load(Relaxed);
        if is_due && !self.work.settling.load(Relaxed) && !place.start_threads() {
            // Each try may take some milliseconds.
            spilling.no_thread_until_ns.store(now + SHUT_NS, Relaxed);
        }
    }

    /// Opens areas to write to, if that is wanted; and looks after what forks have left. Called by the background
    /// thread, without a lock.
    fn look_after_place(&self) {
        let (Some(place), spilling) = (&self.work.place, &self.work.spilling) else { return };
        let (now, is_wanted) = (self.now_ns(), spilling.wants_place.swap(false, Relaxed));
        let is_due = is_wanted || now - spilling.looked_ns.load(Relaxed) >= LOOK_NS;
        if place.is_forked() && is_due {
            spilling.looked_ns.store(now, Relaxed);
            let table = self.table.read();
            let is_forking = self.work.settling.load(Relaxed);
            let closed = if is_forking { Vec::new() } else { place.look_after() };
            drop(table);
            drop(closed);
        }
        if place.has_parts() && now >= spilling.no_part_until_ns.load(Relaxed) {
            let table = self.table.read();
            // What a child may read is marked before the fork: nothing is added to that.
            if !self.work.settling.load(Relaxed) && !place.grow() {
                spilling.no_part_until_ns.store(now + LOOK_NS, Relaxed);
            }
            drop(table);
        }
        if !is_wanted || self.door() != Door::Soon {
            return;
        }
        let table = self.table.read();
        let has_room = place.room() > 0;
        drop(table);
        let opened = if has_room { self.open_place(place) } else { Err(PlaceError::Busy) };
        let Err(error) = opened else {
            // What it took to open them does not count for the first write to the new areas.
            return spilling.stall.start_over();
        };
        let rest_ns = match error {
            // Whoever waits for an area asks again. The run looks ten times a second.
            PlaceError::Unanswered => return,
            PlaceError::Busy => LOOK_NS,
            PlaceError::Path(Refusal::InUse(_) | Refusal::NoClaim(_) | Refusal::Full(_)) => {
                TAKEN_NS
            }
            _ => SHUT_NS,
        };
        spilling.shut_until_ns.store(self.now_ns() + rest_ns, Relaxed);
        if !spilling.has_complained.swap(true, Relaxed) {
            fatal::print(format_args!("{error}: what does not compress stays in memory"));
        }
    }

    fn open_place(&self, place: &Place) -> Result<(), PlaceError> {
        let gate = self.work.spilling.gate.read();
        let plan = place.plan()?;
        drop(gate);
        // Slow, as disks are: a thread that forks does not wait for it.
        let (opened, areas) = (place.open(plan)?, place.new_areas());
        let _table = self.table.read();
        place.add(areas, opened)
    }

    /// Waits for the backing for a moment. The caller holds no lock that a fork needs.
    fn pause_backing(&self) {
        let _gate = self.work.spilling.gate.read();
        self.store.pause();
    }

    /// A thread is about to fork: the backing comes to rest (`SPILL-4`).
    pub(crate) fn keep_still(&self) {
        self.work.spilling.still_until_ns.store(self.now_ns() + STILL_NS, Relaxed);
    }

    /// Whether nothing is to be fetched.
    pub(crate) fn is_still(&self) -> bool {
        let until = self.work.spilling.still_until_ns.load(Relaxed);
        until != 0 && self.work.settling.load(Relaxed) && self.now_ns() < until
    }

    /// Tickets of those of `units` of a folio that are stored and away. `None`: none is.
    pub(crate) fn away(&self, folio: &Folio, units: Units) -> Option<Tickets> {
        // With the table held for writing this is exact. Else a unit that leaves just now is found by who loads it.
        if !self.store.has_away() {
            return None;
        }
        let mut tickets = None;
        for index in (folio.stored & units).whole(folio.wide).iter() {
            let copy = folio.copy_of(index);
            if let Some(ticket) = copy.and_then(|copy| self.store.away(copy)) {
                tickets.get_or_insert(Tickets([None; UNITS_MAX])).0[index] = Some(ticket);
            }
        }
        tickets
    }

    /// Whether a stored unit is in the pool because the backing has read it.
    pub(crate) fn was_fetched(&self, folio: &Folio, index: usize) -> bool {
        folio.copy_of(index).is_some_and(|copy| self.store.keeps_location(copy))
    }

    /// Has units fetched, at the next poll; of these a fault waits for `touched`.
    pub(crate) fn fetch(&self, _table: &Table, tickets: &Tickets, touched: Option<Ticket>) {
        self.store.fetch(tickets.all(), |ticket| Some(ticket) == touched);
    }

    /// Has the units fetched that a fault on unit `index` wants. Returns whether that unit was among them, and is away
    /// no more.
    ///
    /// # Errors
    ///
    /// It is away.
    pub(crate) fn fetch_for(
        &self,
        table: &Table,
        away: &Tickets,
        index: usize,
    ) -> Result<bool, Later> {
        let touched = away.of(index);
        if self.is_still() {
            return if touched.is_some() { Err(Later::Still) } else { Ok(false) };
        }
        self.fetch(table, away, touched);
        match touched {
            Some(ticket) if self.store.is_away(ticket) => Err(Later::Away(ticket)),
            touched => Ok(touched.is_some()),
        }
    }

    /// Has a unit fetched that has just left the pool.
    pub(crate) fn fetch_one(&self, _table: &Table, ticket: Ticket) -> Later {
        self.store.fetch([ticket], |_| true);
        Later::Away(ticket)
    }

    /// Whether a fault that was to be served later is worth another try. The caller has polled.
    pub(crate) fn is_time(&self, later: Later) -> bool {
        match later {
            Later::Away(ticket) => !self.store.is_coming(ticket),
            Later::Room => true,
            Later::Still => !self.is_still(),
        }
    }

    /// Waits until units that were asked for have come, for a few milliseconds at most. The caller holds no lock
    /// (`SPILL-2`). False: they have not.
    pub(crate) fn await_some(&self, tickets: &Tickets) -> bool {
        for _ in 0..PATIENCE {
            let (heard, table) = (self.heard(), self.table.read());
            self.poll_backing(&table);
            let is_coming = tickets.all().any(|ticket| self.store.is_coming(ticket));
            drop(table);
            if !is_coming {
                return true;
            }
            self.pause_for_backing(heard);
        }
        false
    }

    /// Handles what the backing has completed.
    pub(crate) fn poll_backing(&self, _table: &Table) {
        let before = self.store.completions();
        self.store.poll();
        if self.store.completions() != before {
            let found = &self.work.spilling.found;
            // Release: pairs with the Acquire in pause_for_backing().
            found.fetch_add(1, Ordering::Release);
            self.mover.system.wake_all(found);
            if self.store.lacks_room() {
                self.wake_reclaimer();
            }
        }
    }

    /// Waits until the backing may have completed something, or another thread has found that, for a millisecond at
    /// most. The caller has polled since it asked for anything, holds no lock (`SPILL-2`), and polls next.
    fn pause_for_backing(&self, heard: u32) {
        let spilling = &self.work.spilling;
        let _gate = spilling.gate.read();
        // Acquire and Release: who is next to wait sees what the last one did.
        if !spilling.is_awaited.swap(true, Ordering::Acquire) {
            self.store.pause();
            spilling.is_awaited.store(false, Ordering::Release);
        } else {
            self.mover.system.wait_for(&spilling.found, heard);
        }
    }

    /// To be read before a look at the backing, for [`Engine::pause_for_backing`].
    fn heard(&self) -> u32 {
        // Acquire: pairs with the Release in poll_backing().
        self.work.spilling.found.load(Ordering::Acquire)
    }

    /// Waits until a fault that was to be served later is worth another try. The caller holds no lock (`SPILL-2`).
    pub(crate) fn await_backing(&self, later: Later) {
        loop {
            let (heard, table) = (self.heard(), self.table.read());
            self.poll_backing(&table);
            if self.is_time(later) && later != Later::Room {
                return;
            }
            drop(table);
            self.pause_for_backing(heard);
            if later == Later::Room {
                return;
            }
        }
    }

    /// Whether a change of a mapping may wait for units that are away (`SPILL-3`).
    fn is_change_waiting(&self) -> bool {
        self.work.spilling.changes.load(Relaxed) > 0 || self.mover.inbox.has_change()
    }

    /// Whether anything may be written back now.
    fn may_spill(&self) -> bool {
        self.store.has_backing()
            && self.door() == Door::Open
            && !self.work.settling.load(Relaxed)
            && self.now_ns() >= self.work.spilling.rests_until_ns.load(Relaxed)
            // What was read and has no room would wait for ever.
            && (self.store.lacks_room() || !self.is_change_waiting() && self.may_write() > 0)
    }

    /// Whether the budget for writes is used up.
    fn is_used_up(&self) -> bool {
        self.store.has_backing() && self.may_write() == 0
    }

    /// How much may be written, by the budget: all of it, unless there is one.
    fn may_write(&self) -> u64 {
        let writes = self.writes();
        if writes.budget().is_none() {
            return u64::MAX;
        }
        self.pay_for_writes();
        let was_used_up = || add(&self.figures().write_budget_used_up, 1);
        writes.left(0, self.now_ns(), was_used_up)
    }

    /// Bytes that were written to the backing: whole slots, where it has slots.
    pub(crate) fn bytes_written(&self) -> u64 {
        match &self.work.place {
            Some(place) => place.stats().bytes_written,
            None => self.store.spill_stats().written_bytes,
        }
    }

    /// Takes from the budget what was written and begun since the last call, so that others who share the budget see
    /// it; and gives back what was begun and not written after all.
    pub(crate) fn pay_for_writes(&self) {
        let settled = &self.work.spilling.paid_bytes;
        loop {
            let paid = settled.load(Relaxed);
            // In this order what ends meanwhile counts twice until the next call, and never not at all.
            let (_, writing) = self.store.in_flight();
            let bytes = self.bytes_written() + writing as u64;
            let (more, less) = (bytes.saturating_sub(paid), paid.saturating_sub(bytes));
            // Taken before others see it as settled: they could give it back first, and a full bucket would lose it.
            self.writes().take(more);
            // A thread that was overtaken has old figures: it would give back what others have begun meanwhile.
            if settled.compare_exchange(paid, bytes, Relaxed, Relaxed).is_ok() {
                return self.writes().give_back(less);
            }
            self.writes().give_back(more);
        }
    }

    /// Sets what this process may write, unless the processes of its run share that.
    pub(crate) fn set_write_budget(&self, budget: WriteBudget) {
        self.work.spilling.writes.set(budget);
    }

    /// Sets how much of the limit the pool may take, in percent.
    pub(crate) fn set_max_pool_percent(&self, percent: u64) {
        self.work.spilling.pool.set_max_pool_percent(percent);
    }

    /// Sets what a pool comes down to that has taken more, in percent of that.
    pub(crate) fn set_accept_threshold_percent(&self, percent: u64) {
        self.work.spilling.pool.set_accept_threshold_percent(percent);
    }

    /// The gauges of what the settings allow.
    pub(crate) fn set_rule_gauges(&self) {
        let [max_pool, accept_threshold] = self.work.spilling.pool.percents();
        self.figures().set_disk_bounds(max_pool, accept_threshold, self.writes().budget());
    }

    /// What the pool takes, without the pages that it keeps empty.
    fn filled_pool_bytes(&self) -> u64 {
        let stats = self.store.pool_stats();
        stats.pages_used.saturating_sub(stats.pages_reserved) * PAGE_BYTES as u64
    }

    /// Whether entries are to be written back because the pool takes too much of the limit.
    fn is_pool_full(&self) -> bool {
        let pool = &self.work.spilling.pool;
        if !pool.is_bounded() || !self.store.has_backing() {
            return false;
        }
        let pool_bytes = self.filled_pool_bytes();
        let (_, writing) = self.store.in_flight();
        let was_hit = || add(&self.figures().pool_limit_hit, 1);
        pool.is_full((pool_bytes, writing as u64), self.limit_bytes(), was_hit)
    }

    /// Has the store write back, and notes whether the backing takes anything. If that `is_needed` a backing that takes
    /// nothing is left alone for a while.
    fn write_back(&self, is_needed: bool) -> WrittenBack {
        // Units of 2 MiB are many bytes even in small numbers.
        let units = self.may_write() / self.config().object_max().bytes() as u64;
        let most = usize::try_from(units).unwrap_or(BATCH).clamp(1, BATCH);
        let done = self.store.write_back(most);
        if !self.writes().budget().is_none() {
            self.pay_for_writes();
        }
        // While it writes it may refuse more for want of buffers. What it accepted may fail later.
        let (_, writing) = self.store.in_flight();
        // And what was given up makes room for the next call.
        let accepts =
            done.started + done.written + done.given_up > 0 || done.refused == 0 || writing > 0;
        let stats = self.store.spill_stats();
        let spilling = &self.work.spilling;
        let wrote = moved(&spilling.wrote, stats.written + stats.returned);
        let failed = moved(&spilling.failed, stats.failed);
        let took = wrote || accepts && !failed;
        if took || is_needed {
            spilling.note(took, self.now_ns());
        } else {
            spilling.cold.give_up();
        }
        done
    }

    /// Bytes until the limit, once what is being written has left the pool.
    fn below_limit_soon(&self) -> i64 {
        let (_, writing) = self.store.in_flight();
        self.below_limit() + signed(writing as u64)
    }

    /// Whether writing back is what makes room: resident memory is at its floor, or what is in the pool takes hardly
    /// less there than it would take resident.
    pub(crate) fn is_for_the_disk(&self) -> bool {
        self.at_floor() || self.gains_little()
    }

    /// Whether what is in the pool takes hardly less there than it would take resident, and can be written back.
    fn gains_little(&self) -> bool {
        let (units, unit) = (self.pooled_units(), self.geometry().unit_bytes() as u64);
        self.store.has_backing() && 4 * self.store.pool_stats().bytes_stored > 3 * units * unit
    }

    /// Whether the limit is passed even once all that is being written has left the pool, and compressing gains little:
    /// compressing more would fill the pool for free slots that nobody may use. A pool that is too small to be written
    /// must grow: what is resident leaves by way of it.
    pub(crate) fn is_disk_behind(&self) -> bool {
        self.below_limit_soon() < 0
            && self.gains_little()
            && self.may_spill()
            && self.is_pool_worth_writing()
    }

    /// Whether the pool is a large part of what passes the limit, if anything does. Where memory that cannot be moved
    /// (shared, locked, read-only) passes the limit alone, writing all of a small pool would not hold the limit either,
    /// and each fault would wait for the disk.
    fn is_pool_worth_writing(&self) -> bool {
        -self.below_limit_soon() < EXCESS_PART * signed(self.filled_pool_bytes())
    }

    /// Has the store write entries back, if nothing else makes room for `needed` bytes below the limit (`is_last`).
    pub(crate) fn spill(&self, needed: i64, is_last: bool) -> Room {
        let is_wanted = is_last && self.store.has_backing() && self.below_limit() < needed;
        if !is_wanted || !self.is_pool_worth_writing() {
            return Room::None;
        }
        if self.door() == Door::Soon {
            // The background thread opens it, and writes and reads there once: one request that may stall.
            return if self.is_stalled(true) { Room::None } else { self.want_place() };
        }
        self.store.poll();
        let (_, writing) = self.store.in_flight();
        if self.is_stalled(writing > 0) {
            return Room::None;
        }
        if !self.may_spill() {
            // What is on its way may be the last for which there is a budget.
            return if writing > 0 && self.is_used_up() { Room::Soon } else { Room::None };
        }
        let mut written = 0;
        if self.below_limit_soon() < needed + signed(self.charge.low_bytes()) {
            written = self.write_back(true).written;
        }
        if written > 0 || self.below_limit() >= needed {
            return Room::Made;
        }
        let (_, writing) = self.store.in_flight();
        if writing > 0 { Room::Soon } else { Room::None }
    }

    /// Whether a fault passes the limit, since nothing that is being written ends. What is read makes no room.
    fn is_stalled(&self, is_writing: bool) -> bool {
        self.work.spilling.stall.may_pass(self.store.writes_ended(), is_writing, self.now_ns())
    }

    /// A fault is served over the limit.
    pub(crate) fn note_pass(&self) {
        if self.store.has_backing() {
            self.work.spilling.stall.note_pass(self.now_ns());
        }
    }

    /// Has the background thread open an area.
    fn want_place(&self) -> Room {
        self.work.spilling.wants_place.store(true, Relaxed);
        self.wake_reclaimer();
        Room::Soon
    }

    /// The background thread's part: writes entries back until the limit is held with a reserve, and the pool is not
    /// full. Returns whether it did anything.
    pub(crate) fn spill_ahead(&self, table: &Table) -> bool {
        let (is_full, is_more) = (self.is_pool_full(), self.is_more_wanted());
        if self.store.has_backing() && self.door() == Door::Soon {
            // A fault that finds no room asks for one at once. A child reads its parent's files before it has its own.
            let lacks_room = self.store.take_lack_of_room();
            let is_short = self.below_limit() < 0 && self.is_for_the_disk();
            if lacks_room || is_full || is_more || is_short {
                self.want_place();
            }
            return lacks_room && self.make_pool_room(table);
        }
        if !self.may_spill() {
            return self.store.take_lack_of_room() && self.make_pool_room(table);
        }
        self.store.poll();
        let lacks_room = self.store.take_lack_of_room();
        let is_short = self.below_limit_soon() < signed(self.charge.high_bytes());
        let is_needed = lacks_room
            || is_full
            || is_short && self.is_for_the_disk() && self.is_pool_worth_writing();
        if !is_needed && !is_more {
            return false;
        }
        let done = self.write_back(is_needed);
        if is_full || is_more {
            // What has left frees pages only once few pages have all that is left of a class.
            self.compact_if_wasteful(table);
        }
        if !is_needed {
            add(&self.figures().written_back_cold, done.started as u64);
        }
        let did = done.started > 0 || done.written > 0;
        if did {
            self.work.spilling.without_room.store(0, Relaxed);
        }
        if lacks_room {
            return did || self.make_pool_room(table);
        }
        if !did && is_needed {
            // Nothing that can be written was old enough; or the backing takes nothing.
            self.drop_oldest_copies(table);
        }
        did
    }

    /// Makes room in the pool for a unit that was read, where nothing can be written. The caller may hold a folio,
    /// which is passed over then. False: there was nothing to drop.
    #[cold]
    fn make_pool_room(&self, table: &Table) -> bool {
        self.compact_if_wasteful(table);
        let did = self.drop_oldest_copies(table);
        if !did && self.work.spilling.without_room.fetch_add(1, Relaxed) == PATIENCE_FOR_ROOM {
            fatal::print(format_args!(
                "no address space for what comes back from the disk (RLIMIT_AS?): what needs it waits"
            ));
        }
        did
    }

    /// Writes back while the limit is not held, and waits for the backing in between. Called by the background thread,
    /// without a lock.
    pub(crate) fn spill_in_background(&self) {
        while !self.work.stopping.load(Relaxed) {
            self.look_after_place();
            let table = self.table.read();
            // What is worth writing changes meanwhile.
            self.set_prices(&table);
            self.look_after_disks(&table);
            if !self.spill_ahead(&table) {
                return;
            }
            let (in_flight, _) = self.store.in_flight();
            drop(table);
            if in_flight >= BATCH {
                self.pause_backing();
            }
            if self.available_bytes() < self.charge.low_bytes() {
                return;
            }
        }
    }

    /// Lets the copies of `units` of a folio leave the pool, as far as the backing has them too. They are
    /// [`Folio::backed`] then, and take no memory.
    pub(crate) fn put_away(&self, folio: &mut Folio, units: Units) {
        if !self.store.has_backing() || self.work.spilling.changes.load(Relaxed) > 0 {
            return;
        }
        let before = folio.copied_units();
        for object in (units & before).whole(folio.wide).objects(folio.wide) {
            let copy = folio.copies[object.start].as_ref();
            if copy.is_some_and(|copy| self.store.put_away(copy)) {
                folio.backed |= Units::from(object);
            }
        }
        self.copies.change(before, folio.copied_units());
    }

    /// Nothing is written back while the answer lives (`SPILL-3`).
    pub(crate) fn hold_back(&self) -> Hold<'_> {
        self.work.spilling.hold()
    }

    /// Adds the units to `away` that are away, of the folios that overlap a range.
    pub(crate) fn note_away(&self, table: &Table, range: (usize, usize), away: &mut Vec<Away>) {
        if !self.store.has_backing() {
            return;
        }
        let (start, end) = table.exterior(range.0, range.1);
        for (base, lock) in table.known_folios(start, end) {
            let tickets = self.away(&lock.lock(), self.geometry().all());
            // One that cannot be read is none to wait for: to load it ends the process.
            let some = tickets.iter().flat_map(Tickets::all);
            let some = some.filter(|ticket| self.store.is_away(*ticket));
            away.extend(some.map(|ticket| Away { base, ticket }));
        }
    }

    /// Waits until none of these units is away, or it cannot be read. The caller holds no lock (`SPILL-2`).
    pub(crate) fn await_tickets(&self, wanted: &[Away]) {
        for some in wanted.chunks(BATCH) {
            let mut tries = Tries::default();
            loop {
                if let Some(unit) = self.unread(&mut tries, some) {
                    self.await_try(&mut tries, unit.base, unit.ticket);
                }
                let table = self.table.read();
                self.fetch_all(&table, some);
                self.poll_backing(&table);
                let away = some.iter().find(|unit| self.store.is_away(unit.ticket));
                drop(table);
                let Some(unit) = away else { break };
                if self.store.is_coming(unit.ticket) {
                    self.pause_backing();
                    continue;
                }
                self.pause_for_room();
            }
        }
    }

    /// Waits for all units of a folio that are away, with the table and the folio locked: all faults wait meanwhile.
    /// For a change that has begun, and needs a folio of which nobody knew before: the kernel has stopped at a page in
    /// the middle of `madvise`.
    #[cold]
    pub(crate) fn wait_holding_locks(&self, table: &Table, folio: &Folio, address: usize) {
        let mut tries = Tries::default();
        while let Some(tickets) = self.away(folio, self.geometry().all()) {
            let wanted: Vec<Away> =
                tickets.all().map(|ticket| Away { base: address, ticket }).collect();
            if let Some(unit) = self.unread(&mut tries, &wanted) {
                self.await_try(&mut tries, address, unit.ticket);
            }
            self.store.fetch(tickets.all(), |_| false);
            self.store.poll();
            let Some(ticket) = tickets.all().find(|ticket| self.store.is_away(*ticket)) else {
                // Another of its units may have gone meanwhile: what was written back below.
                continue;
            };
            let may_spill = self.may_spill();
            if self.store.take_lack_of_room() {
                // The background thread, which makes room otherwise, may wait for these locks.
                if may_spill {
                    self.write_back(true);
                } else {
                    self.make_pool_room(table);
                }
            }
            if self.store.is_coming(ticket) {
                self.pause_backing();
            } else {
                self.pause_for_room();
            }
        }
    }

    /// Has units fetched that a change of a mapping needs.
    pub(crate) fn fetch_all(&self, _table: &Table, wanted: &[Away]) {
        self.store.fetch(wanted.iter().map(|unit| unit.ticket), |_| false);
    }

    /// The units of a folio whose copies are on the backing only, of those that were (`UNIT-5`).
    pub(crate) fn still_backed(&self, folio: &Folio) -> Units {
        let is_away = |index: &usize| {
            folio.copy_of(*index).is_some_and(|copy| self.store.away(copy).is_some())
        };
        folio.backed.iter().filter(is_away).map(Units::one).collect()
    }

    /// Waits until the backing has nothing to do: before a fork, which copies what is under way to nobody. False: it
    /// has, and has ended nothing for `patience_ns`.
    pub(crate) fn drain_backing(&self, patience_ns: u64) -> bool {
        let (mut ended, mut since_ns) = (self.store.completions(), self.now_ns());
        loop {
            self.keep_still();
            if self.look_at_backing() == 0 {
                return true;
            }
            let (before, now_ns) = (ended, self.now_ns());
            ended = self.store.completions();
            if ended != before {
                since_ns = now_ns;
            } else if now_ns - since_ns >= patience_ns {
                return false;
            }
            self.pause_backing();
        }
    }

    /// Handles what the backing completes in a time, or until it has nothing to do.
    pub(crate) fn look_at_backing_for(&self, time_ns: u64) {
        let until_ns = self.now_ns() + time_ns;
        while self.look_at_backing() > 0 && self.now_ns() < until_ns {
            self.pause_backing();
        }
    }

    /// Handles what the backing has completed. Returns how many requests it still has.
    fn look_at_backing(&self) -> usize {
        let table = self.table.read();
        self.poll_backing(&table);
        self.store.in_flight().0
    }
}
