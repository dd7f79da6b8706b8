//! Writeback: units that are not used, or do not shrink, go to a backing, compressed as they are.
//!
//! That is done when it is asked for ([`Zram::write_back`]), and by itself: for what was not used for long
//! ([`Zram::write_back_old`]), and to make room below the limit of memory ([`Zram::write_ahead`], which the device's
//! owner calls now and then, and each write that finds no room).
//!
//! ```text
//! asked, old     the table's slots, each under its lock: is it one of those? its ticket -> a batch
//!                without any lock: Store::write_back_chosen(batch), then a wait until all of the batch has ended
//! for room       Store::write_back: the store's walker takes what was used least lately
//! ```
//!
//! A unit that is used between these two steps is written all the same: it is in the pool until its write has ended,
//! and one that is overwritten meanwhile has another entry. What is read of a unit that is away goes through the pool,
//! and leaves it again at once (`Store::put_away`): the unit stays on the backing, as in the kernel.
//!
//! # Invariants
//!
//! - `WB-1` Nobody waits for the backing while he holds a slot.
//! - `WB-2` While `writeback_limit` is enabled, no more is written than it has left: each batch reserves what its
//!   objects take at most, and pays what they took. The same holds for the budget, which bounds only what the device
//!   writes by itself. (What a stuck backing writes later is paid later.)
//! - `WB-3` No wait is longer than [`STUCK_PAUSES`] pauses in which the backing ends nothing. Then the units stay in
//!   the pool, unless their writes end later, and a client has `ENOSPC` or `EIO`.
//! - `WB-4` After writes to make room that all failed, no others are begun for that until the next second, or until the
//!   backing has written something: each could cost places on the backing, and clients who find no room ask as
//!   fast as they can.

#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::Zram;
use super::slot::Slot;
use super::table::UNITS_MAX;
use crate::budget::{Bucket, WriteBudget};
use crate::page::PAGE_BYTES;
use crate::store::{Form, STUCK_PAUSES, Ticket};
use crate::zsmalloc::PageSource;

/// Units that are written together, unless something else is set: the kernel's `writeback_batch_size`.
pub const WRITEBACK_BATCH_DEFAULT: usize = 32;

/// The largest such number.
pub const WRITEBACK_BATCH_MAX: usize = 4096;

/// Bytes of units that a write which finds no room has written back together.
const ROOM_BYTES: u64 = 256 << 10;

/// How often one request has units written back to make room for one of its units, at most. Each time some have left
/// the pool; but others write too.
const ROOM_TRIES: u32 = 256;

/// Memory that is kept free below the limit, as a part of it.
const AHEAD_PART: u64 = 16;

/// How often [`Zram::tidy`] lets the backing forget some of what was discarded: 64 MiB of an area in all.
const TIDY_CALLS: usize = 8;

/// How many slots [`Zram::write_back_old`] looks at in one call.
const LOOKS_MAX: usize = 4096;

/// Which units are written back; the kernel's words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// Those that did not shrink.
    Huge,
    /// Those that are marked idle.
    Idle,
    /// Those that are both.
    HugeIdle,
    /// Those that no algorithm of the device could shrink.
    Incompressible,
    /// Those with these indices.
    Indices(Vec<RangeInclusive<u64>>),
}

/// Why [`Zram::write_back`] has stopped early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Stop {
    /// `writeback_limit`, or the budget, is used up.
    Limit,
    /// The backing takes nothing: it is full, fails, or is stuck.
    Backing,
    /// The disk is about to end.
    Halted,
}

/// What [`Zram::write_back`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WroteBack {
    /// Units that are on the backing now, and were not before.
    pub units: u64,
    /// Units that were to be written and stayed: the write failed, or they were used or overwritten meanwhile.
    pub stayed: u64,
    /// Why not all were tried.
    pub stop: Option<Stop>,
}

/// What [`Zram::write_back_old`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OldTurn {
    /// What it did.
    pub done: WroteBack,
    /// It has come to the end of the disk, and begins anew with the next call.
    pub is_round: bool,
}

/// What the device has written back, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WritebackStat {
    /// Units that somebody has asked for.
    pub asked_units: u64,
    /// Units that were not used for long.
    pub old_units: u64,
    /// Units that made room below the limit of memory.
    pub room_units: u64,
    /// Writes that came to nothing, asked for or not: refused, failed, or the unit was used meanwhile.
    pub not_written: u64,
    /// How often the budget was used up.
    pub budget_used_up: u64,
    /// What the device may write by itself now; `u64::MAX`: any amount.
    pub budget_bytes: u64,
}

/// What a device with a backing keeps.
#[derive(Debug)]
pub(super) struct Writeback {
    /// `writeback_limit` in bytes, and whether it is enabled.
    limit_bytes: AtomicU64,
    is_limited: AtomicBool,
    budget: Bucket,
    /// What the batches take at most that are under way.
    pending_bytes: AtomicU64,
    /// What the backing had written when limit and budget were last charged.
    charged_bytes: AtomicU64,
    batch: AtomicUsize,
    /// Where [`Zram::write_back_old`] goes on.
    hand: AtomicU64,
    asked_units: AtomicU64,
    old_units: AtomicU64,
    /// Bytes that the backing took before anything was written: buffers.
    fixed_bytes: usize,
    rest: Rest,
    /// What was counted when the device was reset last, in the order of [`Zram::since_reset`].
    before_reset: [AtomicU64; 5],
}

impl Writeback {
    pub(super) fn new(fixed_bytes: usize, budget: WriteBudget) -> Writeback {
        let bucket = Bucket::default();
        bucket.set(budget);
        Writeback {
            limit_bytes: AtomicU64::new(0),
            is_limited: AtomicBool::new(false),
            budget: bucket,
            pending_bytes: AtomicU64::new(0),
            charged_bytes: AtomicU64::new(0),
            batch: AtomicUsize::new(WRITEBACK_BATCH_DEFAULT),
            hand: AtomicU64::new(0),
            asked_units: AtomicU64::new(0),
            old_units: AtomicU64::new(0),
            fixed_bytes,
            rest: Rest::default(),
            before_reset: [const { AtomicU64::new(0) }; 5],
        }
    }

    /// Whether limit or budget bound what is written.
    fn is_bounded(&self) -> bool {
        self.is_limited.load(Relaxed) || !self.budget.budget().is_none()
    }
}

/// A pause after writes that failed (`WB-4`). Relaxed: whoever sees it late sends some units more.
#[derive(Debug, Default)]
struct Rest {
    /// The second in which it ends.
    until_s: AtomicU32,
    /// How many units the backing had written when it began.
    written: AtomicU64,
}

impl Rest {
    fn begin(&self, now_s: u32, written: u64) {
        self.written.store(written, Relaxed);
        self.until_s.store(now_s.saturating_add(1), Relaxed);
    }

    fn lasts(&self, now_s: u32, written: u64) -> bool {
        now_s < self.until_s.load(Relaxed) && self.written.load(Relaxed) == written
    }
}

/// Who has units written back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    /// Somebody has asked for it: the budget is charged, and asked by nobody.
    Asked,
    /// The device does so by itself.
    Policy,
}

/// Units that are to be written together, and the most that each takes on the backing.
type Batch = Vec<(Ticket, u64)>;

/// A number of bytes that is reserved of limit and budget (`WB-2`).
struct Reserved<'w>(&'w Writeback, u64);

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.0.pending_bytes.fetch_sub(self.1, Relaxed);
    }
}

/// What an object of so many bytes takes of the backing at most: whole slots of 4 KiB. Where it shares a slot with
/// others it takes less.
fn slot_bytes(object_bytes: usize) -> u64 {
    object_bytes.next_multiple_of(PAGE_BYTES) as u64
}

/// How many units from the front may be written with so many bytes, and what they take at most.
fn fitting(batch: &Batch, left: u64) -> (usize, u64) {
    let (mut count, mut bytes) = (0, 0);
    for (_, object) in batch {
        if bytes + object > left {
            break;
        }
        (count, bytes) = (count + 1, bytes + object);
    }
    (count, bytes)
}

impl<S: PageSource> Zram<S> {
    /// Whether there is a backing.
    #[must_use]
    pub fn has_backing(&self) -> bool {
        self.writeback.is_some()
    }

    /// What the backing has grown by since it was empty: tables.
    pub(super) fn backing_tables_bytes(&self) -> u64 {
        let grown = |writeback: &Writeback| {
            self.store.backing_bytes().saturating_sub(writeback.fixed_bytes) as u64
        };
        self.writeback.as_ref().map_or(0, grown)
    }

    /// What was counted since the device was reset last: bytes that the backing has read, and written; entries that it
    /// has taken to make room; writes that came to nothing; and how often the budget was used up.
    pub(super) fn since_reset(&self) -> [u64; 5] {
        let Some(writeback) = &self.writeback else { return [0; 5] };
        let (now, before) = (self.ever_counted(writeback), &writeback.before_reset);
        std::array::from_fn(|at| now[at].saturating_sub(before[at].load(Relaxed)))
    }

    /// The same since the device was made.
    fn ever_counted(&self, writeback: &Writeback) -> [u64; 5] {
        let (usage, spill) = (self.store.backing_usage(), self.store.spill_stats());
        let used_up = writeback.budget.used_up();
        [usage.read_bytes, usage.written_bytes, spill.written_oldest, spill.not_written, used_up]
    }

    /// The device is reset. What is left of the limit and of the budget stays.
    pub(super) fn note_backing_reset(&self) {
        let Some(writeback) = &self.writeback else { return };
        for (before, now) in writeback.before_reset.iter().zip(self.ever_counted(writeback)) {
            before.store(now, Relaxed);
        }
        writeback.asked_units.store(0, Relaxed);
        writeback.old_units.store(0, Relaxed);
    }

    /// Sets `writeback_limit`: how many pages of 4 KiB may be written while it is enabled. Without a backing nothing
    /// happens.
    pub fn set_writeback_limit(&self, pages: u64) {
        let Some(writeback) = &self.writeback else { return };
        self.charge(writeback);
        writeback.limit_bytes.store(pages.saturating_mul(PAGE_BYTES as u64), Relaxed);
    }

    /// What is left of `writeback_limit`, in pages of 4 KiB.
    #[must_use]
    pub fn writeback_limit(&self) -> u64 {
        self.writeback.as_ref().map_or(0, |writeback| {
            self.charge(writeback);
            writeback.limit_bytes.load(Relaxed) / PAGE_BYTES as u64
        })
    }

    /// Sets `writeback_limit_enable`.
    pub fn enable_writeback_limit(&self, is_enabled: bool) {
        let Some(writeback) = &self.writeback else { return };
        self.charge(writeback);
        writeback.is_limited.store(is_enabled, Relaxed);
    }

    /// `writeback_limit_enable`.
    #[must_use]
    pub fn is_writeback_limited(&self) -> bool {
        self.writeback.as_ref().is_some_and(|writeback| writeback.is_limited.load(Relaxed))
    }

    /// Sets `writeback_batch_size`, 1 to [`WRITEBACK_BATCH_MAX`].
    pub fn set_writeback_batch(&self, units: usize) {
        let units = units.clamp(1, WRITEBACK_BATCH_MAX);
        self.writeback.iter().for_each(|writeback| writeback.batch.store(units, Relaxed));
    }

    /// `writeback_batch_size`: how many units are written together.
    #[must_use]
    pub fn writeback_batch(&self) -> usize {
        let set = |writeback: &Writeback| writeback.batch.load(Relaxed);
        self.writeback.as_ref().map_or(WRITEBACK_BATCH_DEFAULT, set)
    }

    /// What the device has written back by itself; zeros without a backing.
    #[must_use]
    pub fn writeback_stat(&self) -> WritebackStat {
        let Some(writeback) = &self.writeback else { return WritebackStat::default() };
        self.charge(writeback);
        let [asked_units, old_units] =
            [&writeback.asked_units, &writeback.old_units].map(|units| units.load(Relaxed));
        let [_, _, room_units, not_written, budget_used_up] = self.since_reset();
        WritebackStat {
            asked_units,
            old_units,
            room_units,
            not_written,
            budget_bytes: self.left(writeback, Why::Policy, 0),
            budget_used_up,
        }
    }

    /// Writes units back, and waits until that is done. Units whose pages are apart are joined first, as far as they
    /// are here.
    pub fn write_back(&self, cpu: usize, chosen: &Chosen) -> WroteBack {
        let mut done = WroteBack::default();
        let Some(writeback) = &self.writeback else { return done };
        let mut batch = Batch::with_capacity(writeback.batch.load(Relaxed));
        let all = [0..=UNITS_MAX - 1];
        let ranges = if let Chosen::Indices(ranges) = chosen { ranges } else { &all[..] };
        // In their order, so that a unit that two of them have is written and counted once.
        let mut ranges: Vec<_> =
            ranges.iter().map(|range| (*range.start(), *range.end())).collect();
        ranges.sort_unstable();
        let mut next = 0;
        for (start, last) in ranges {
            let (start, end) = (start.max(next), last.saturating_add(1).min(UNITS_MAX));
            next = next.max(end);
            for (unit, lock) in self.table.slots(start, end) {
                let wanted = {
                    let mut slot = lock.lock();
                    self.join_if_here(cpu, unit, &mut slot);
                    self.is_chosen(&slot, chosen).then(|| self.ticket(&slot)).flatten()
                };
                batch.extend(wanted);
                if batch.len() >= writeback.batch.load(Relaxed) {
                    self.write_all(writeback, &mut batch, Why::Asked, &mut done);
                }
                if done.stop.is_some() {
                    return done;
                }
            }
        }
        self.write_all(writeback, &mut batch, Why::Asked, &mut done);
        done
    }

    /// Writes units back that were not used for so many seconds, one batch at a time: goes on where the last call has
    /// stopped.
    pub fn write_back_old(&self, age_s: u32) -> OldTurn {
        let mut turn = OldTurn { is_round: true, ..OldTurn::default() };
        let Some(writeback) = &self.writeback else { return turn };
        let (now, first) = (self.now_s.load(Relaxed), writeback.hand.load(Relaxed));
        let mut batch = Batch::with_capacity(writeback.batch.load(Relaxed));
        let mut next = first;
        for (unit, lock) in self.table.slots(first, UNITS_MAX).take(LOOKS_MAX) {
            if batch.len() >= writeback.batch.load(Relaxed) {
                break;
            }
            next = unit + 1;
            let slot = lock.lock();
            if now.saturating_sub(slot.used_s()) >= age_s {
                batch.extend(self.ticket(&slot));
            }
        }
        self.write_all(writeback, &mut batch, Why::Policy, &mut turn.done);
        turn.is_round = self.table.slots(next, UNITS_MAX).next().is_none();
        writeback.hand.store(if turn.is_round { 0 } else { next }, Relaxed);
        turn
    }

    /// Handles what the backing has completed, and lets it forget what was discarded. The device's owner calls this now
    /// and then.
    pub fn tidy(&self) {
        self.store.poll();
        // Each lets a few clusters of an area go.
        for _ in 0..TIDY_CALLS {
            self.store.tidy();
        }
    }

    /// Writes back what was used least lately, some units, if memory is near its limit. Returns whether it wrote any,
    /// and so may be called again at once.
    pub fn write_ahead(&self) -> bool {
        let limit = self.limit.get();
        if limit == 0 || self.writeback.is_none() || self.used_bytes() + limit / AHEAD_PART <= limit
        {
            return false;
        }
        let has_left = self.write_for_room(Why::Policy);
        if has_left {
            // What has left frees pages only once few pages have all that is left of a class.
            self.make_room();
        }
        has_left
    }

    /// Does a write again that found no room, as long as writing back makes some, or joining units does. The caller
    /// holds no lock.
    pub(super) fn with_room<R>(
        &self,
        cpu: usize,
        why: Why,
        mut write: impl FnMut() -> Result<R, super::Error>,
    ) -> Result<R, super::Error> {
        let mut tries = 0;
        loop {
            match write() {
                Err(super::Error::NoSpace { .. })
                    if tries < ROOM_TRIES
                        && (self.write_for_room(why) || self.join_for_room(cpu)) =>
                {
                    tries += 1;
                }
                done => return done,
            }
        }
    }

    /// Writes back what was used least lately, some units, if memory is beyond its limit. False: nothing could be
    /// written back. The caller holds no lock (`WB-1`).
    pub(super) fn write_beyond_limit(&self) -> bool {
        if !self.limit.is_passed(self) {
            return true;
        }
        let has_left = self.write_for_room(Why::Policy);
        if has_left {
            self.make_room();
        }
        has_left
    }

    /// Has an entry fetched, and waits until it is here, as long as the backing ends anything (`WB-3`). False: it is
    /// not. The caller holds no lock (`WB-1`).
    pub(super) fn fetch(&self, ticket: Ticket) -> bool {
        self.store.fetch([ticket], |_| true);
        let stop = self.wait_while(|| self.store.is_coming(ticket));
        if stop.is_some() {
            self.store.stop_waiting(ticket);
        }
        stop.is_none() && !self.store.is_away(ticket)
    }

    /// Has the store write back what was used least lately, and waits until some of it has left the pool, by this call
    /// or another one, or all of it where limit or budget have to be paid (`WB-2`). False: nothing has, nor is there
    /// room on the backing now that was not there before. The caller holds no lock (`WB-1`).
    fn write_for_room(&self, why: Why) -> bool {
        let Some(writeback) = &self.writeback else { return false };
        let unit_bytes = self.unit.bytes() as u64;
        let most = (ROOM_BYTES / unit_bytes).max(1);
        let units = |left: u64| most.min(left / unit_bytes);
        let has_left = || self.store.spill_stats().written;
        let (now_s, before) = (self.now_s.load(Relaxed), self.store.spill_stats());
        let reserved = match writeback.rest.lasts(now_s, before.written) {
            true => None,
            false => self.reserve(writeback, why, |left| units(left) * unit_bytes),
        };
        let units = reserved.as_ref().map_or(0, |reserved| reserved.1 / unit_bytes);
        self.note_used();
        let count = |units: u64| usize::try_from(units).unwrap_or(usize::MAX);
        let done = match units {
            // What was fetched and not read can leave without being written.
            0 => self.store.return_kept(count(most)),
            units => self.store.write_back(count(units)),
        };
        // What is bounded is paid before the reservation ends.
        let is_bounded = writeback.is_bounded();
        let waits = || has_left() == before.written || is_bounded;
        let stop = self.wait_while(|| waits() && self.store.in_flight().1 > 0);
        self.charge(writeback);
        drop(reserved);
        let after = self.store.spill_stats();
        if after.failed > before.failed && after.written == before.written {
            writeback.rest.begin(now_s, after.written);
        }
        stop.is_none() && (done.written > 0 || done.given_up > 0 || after.written > before.written)
    }

    fn is_chosen(&self, slot: &Slot, chosen: &Chosen) -> bool {
        let is_huge = matches!(self.form(slot), Some(Form::Incompressible(_)));
        match chosen {
            Chosen::Huge => is_huge,
            Chosen::Idle => slot.is_idle(),
            Chosen::HugeIdle => is_huge && slot.is_idle(),
            Chosen::Incompressible => is_huge && slot.has_no_codec(),
            Chosen::Indices(_) => true,
        }
    }

    /// A slot's unit for a batch, if it has an object in the pool.
    fn ticket(&self, slot: &Slot) -> Option<(Ticket, u64)> {
        let entry = self.entry_here(slot)?;
        let has_object = self.store.form(entry) != Form::SameFilled;
        has_object.then(|| (self.store.ticket(entry), slot_bytes(self.store.object_bytes(entry))))
    }

    /// Takes what was written since the last call off limit and budget.
    fn charge(&self, writeback: &Writeback) {
        let written = self.store.backing_usage().written_bytes;
        let before = writeback.charged_bytes.fetch_max(written, Relaxed);
        let more = written.saturating_sub(before);
        if more == 0 {
            return;
        }
        writeback.budget.take(more);
        if writeback.is_limited.load(Relaxed) {
            let less = |limit: u64| Some(limit.saturating_sub(more));
            // The function above always has a result.
            writeback.limit_bytes.fetch_update(Relaxed, Relaxed, less).ok();
        }
    }

    /// How much may be written now, if so many bytes are reserved.
    fn left(&self, writeback: &Writeback, why: Why, pending: u64) -> u64 {
        let limit = match writeback.is_limited.load(Relaxed) {
            true => writeback.limit_bytes.load(Relaxed).saturating_sub(pending),
            false => u64::MAX,
        };
        let now_ns = u64::from(self.now_s.load(Relaxed)) * 1_000_000_000;
        let budget = match why {
            Why::Asked => u64::MAX,
            Why::Policy => writeback.budget.left(pending, now_ns, || ()),
        };
        limit.min(budget)
    }

    /// Reserves as much as `of` makes of what may be written now. `None`: that is nothing.
    fn reserve<'w>(
        &self,
        writeback: &'w Writeback,
        why: Why,
        of: impl Fn(u64) -> u64,
    ) -> Option<Reserved<'w>> {
        self.charge(writeback);
        let mut pending = writeback.pending_bytes.load(Relaxed);
        loop {
            let bytes = of(self.left(writeback, why, pending));
            if bytes == 0 {
                return None;
            }
            let all = &writeback.pending_bytes;
            match all.compare_exchange(pending, pending + bytes, Relaxed, Relaxed) {
                Ok(_) => return Some(Reserved(writeback, bytes)),
                Err(other) => pending = other,
            }
        }
    }

    /// Writes a batch back, as far as limit and budget allow, and empties it.
    fn write_all(&self, writeback: &Writeback, batch: &mut Batch, why: Why, done: &mut WroteBack) {
        while !batch.is_empty() && done.stop.is_none() {
            let Some(reserved) = self.reserve(writeback, why, |left| fitting(batch, left).1) else {
                done.stop = Some(Stop::Limit);
                break;
            };
            let (count, _) = fitting(batch, reserved.1);
            let tickets: Vec<Ticket> = batch.drain(..count).map(|(ticket, _)| ticket).collect();
            done.stop = self.write_some(&tickets);
            if writeback.is_bounded() && done.stop.is_none() {
                // Units that were overwritten meanwhile leave nothing, and are paid for when their writes have ended.
                done.stop = self.wait_while(|| self.store.in_flight().1 > 0);
            }
            self.charge(writeback);
            drop(reserved);
            let units = tickets.iter().filter(|ticket| self.store.is_away(**ticket)).count();
            let counted = match why {
                Why::Asked => &writeback.asked_units,
                Why::Policy => &writeback.old_units,
            };
            counted.fetch_add(units as u64, Relaxed);
            done.units += units as u64;
            done.stayed += (tickets.len() - units) as u64;
        }
        batch.clear();
    }

    /// Has the store write these back, and waits until all of them have been, or have not. The caller holds no lock
    /// (`WB-1`).
    fn write_some(&self, tickets: &[Ticket]) -> Option<Stop> {
        self.note_used();
        for _ in 0..=tickets.len() {
            let before = self.store.spill_stats();
            let started = self.store.write_back_chosen(tickets);
            let is_under_way = || tickets.iter().any(|ticket| self.store.is_leaving(*ticket));
            let stop = self.wait_while(is_under_way);
            if stop.is_some() {
                return stop;
            }
            let after = self.store.spill_stats();
            let has_failed = after.failed + after.refused > before.failed + before.refused;
            let has_room = started.given_up > 0;
            if has_failed && after.written == before.written && !has_room {
                // Others may have all buffers: what they write ends before the next try.
                if self.store.in_flight().1 == 0 {
                    return Some(Stop::Backing);
                }
                let stop = self.wait_while(|| self.store.in_flight().1 > 0);
                if stop.is_some() {
                    return stop;
                }
            } else if started.refused == 0 {
                return None;
            }
        }
        Some(Stop::Backing)
    }

    /// Waits for the backing as long as `is_under_way`. What it returns: why it has not waited to the end (`WB-3`).
    fn wait_while(&self, is_under_way: impl Fn() -> bool) -> Option<Stop> {
        let (mut pauses, mut seen) = (0, self.store.completions());
        while is_under_way() {
            if self.is_halted.load(Relaxed) {
                return Some(Stop::Halted);
            }
            self.store.poll();
            if !is_under_way() {
                break;
            }
            if pauses == STUCK_PAUSES {
                return Some(Stop::Backing);
            }
            self.store.pause();
            pauses = if self.store.completions() == seen { pauses + 1 } else { 0 };
            seen = self.store.completions();
        }
        None
    }
}
