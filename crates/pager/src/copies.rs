//! Copies: stored copies of units that are resident again, and whether it pays to keep them.
//!
//! A unit that comes back may leave its stored copy behind. If the unit goes out again unchanged,
//! nothing is compressed. But the copy costs memory, which could keep other units resident and save
//! their faults. Which of the two uses is worth more depends on the program, so both are measured
//! while it runs:
//!
//! ```text
//! time that a byte saves
//!   in a copy            clean units * time to compress one * share waited for / bytes of copies
//!   as resident memory   near refaults * (time waited for one + time to reclaim a unit) / WINDOW
//! ```
//!
//! Only the background thread's time counts as time to reclaim a unit: when a thread that waits for
//! memory reclaims, that is part of the time waited. And compressing is waited for only as far as the
//! background thread could not keep up without the copies (`reclaim/busy.rs`).
//!
//! A **near refault** is a load of a unit that would still be resident if the limit were WINDOW
//! bytes (a 32nd of the limit) higher: fewer bytes have gone out after the unit than these WINDOW
//! bytes would have kept. A resident unit takes no pool memory, so WINDOW bytes keep
//! `WINDOW / (unit - object)` units, where `object` is the mean size of a unit in the pool.
//! [`Copies::review`] compares the two uses, and changes the budget of copies, by the rule of
//! [`zfolio_core::economy`].
//!
//! Where memory goes out although the limit does not ask for it (`--stall`), no copy stays: it would be there for as
//! long as its unit is in use, and the program would have more memory than without.
//!
//! # Invariants
//!
//! - `COPY-1` `count` is the number of units that have a copy in the pool and are resident or staged. A copy that
//!   is on the store's backing takes no memory, and does not count (`UNIT-5`).
//! - `COPY-2` A folio with such a unit is in the queue (`Folio::copied`); an entry may be stale.
//!
//! # Concurrency
//!
//! One mutex around the queue. The counters are atomics: an update that is lost to a race between
//! two reviews only delays a change of the budget.
//!
//! # Cost
//!
//! 8 bytes a folio in the queue, 11 in the folio; two reads of the clock for each batch that is
//! stored.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use zfolio_core::economy::{Verdict, Worth};
use zfolio_core::ledger::signed;
use zfolio_core::stats::add;
use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::folio::{Folio, Table, Units};
use crate::rank;
use crate::reclaim::busy::{ALL, Lately};

/// Loads between two reviews.
pub(crate) const REVIEW_LOADS: u64 = 256;

/// Each review forgets this part (1/8) of the measurements, so the last 2000 loads or so count. A
/// unit is resident for about that long, and its copy saves nothing before the unit goes out.
const FORGET_SHARE: u64 = 8;

/// Each review is counted as this many, so that an eighth of the count can be forgotten in
/// integers.
const REVIEW_SCALE: u64 = 64;

/// The count of clean units that the ledger begins with.
const CLEAN_CREDIT: u64 = 1024;

/// WINDOW is this part (1/32) of the limit.
const WINDOW_SHARE: u64 = 32;

/// So many copies are kept whatever they are worth: they show whether units go out clean.
const BUDGET_MIN: usize = 64;

/// A longer wait counts as this long: the process may have been stopped for hours.
const WAIT_NS_MAX: u64 = 1_000_000_000;

/// How many folios lose their copies in one call.
const DROP_FOLIOS: usize = 16;

/// What was measured; each review forgets an eighth of it.
#[derive(Debug, Default)]
struct Ledger {
    /// The sum over the reviews of the count of copies, and the number of reviews; both scaled by
    /// [`REVIEW_SCALE`].
    copies: AtomicU64,
    reviews: AtomicU64,
    /// Units loaded, and how many of these loads were near refaults.
    loads: AtomicU64,
    near: AtomicU64,
    /// How many of the loads the dense codec would save.
    saved: AtomicU64,
    /// See [`Span::together`].
    together: AtomicU64,
    /// Time that faults waited for loads.
    wait_ns: AtomicU64,
    /// Units that went out clean, and so many more that were not seen to do so: the first copies are too
    /// young to have gone out again.
    clean: AtomicU64,
    clean_credit: AtomicU64,
    /// Units compressed, and how long compressing them took.
    compressed: AtomicU64,
    compress_ns: AtomicU64,
}

/// Sizes that a review needs, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) limit: u64,
    pub(crate) unit: u64,
    /// The mean size of a stored unit in the pool, with the allocator's overhead.
    pub(crate) object: u64,
}

impl Sizes {
    /// WINDOW: see the module.
    fn window(self) -> u64 {
        self.limit / WINDOW_SHARE
    }

    /// How many bytes of units WINDOW more bytes would keep resident.
    fn near_bytes(self) -> u64 {
        kept_bytes(self.window(), self.unit, self.object)
    }
}

/// How many bytes of units `memory` more bytes would keep resident. Each unit takes its size less
/// its object in the pool, but is counted for at least a quarter of its size.
pub(crate) fn kept_bytes(memory: u64, unit: u64, object: u64) -> u64 {
    memory * unit / unit.saturating_sub(object).max(unit / 4)
}

/// What the last 2000 loads or so cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) loads: u64,
    /// Those of the loads that the dense codec would save (`Copies::set_saved`).
    pub(crate) saved: u64,
    /// With the dense codec in use: units of these that came in wide ones. Else: loads that wide units would save.
    pub(crate) together: u64,
    /// Units compressed.
    pub(crate) compressed: u64,
    /// See `Ledger::refault_ns`.
    pub(crate) refault_ns: u64,
    /// What the background thread did lately.
    pub(crate) lately: Lately,
}

/// What the two uses of memory were worth in the last 2000 loads or so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Account {
    pub(crate) resident: Worth,
    pub(crate) copies: Worth,
    /// What the copies take now.
    pub(crate) copies_bytes: u64,
    /// What these loads cost.
    pub(crate) span: Span,
}

fn mean(sum: &AtomicU64, of: &AtomicU64) -> u64 {
    sum.load(Relaxed) / of.load(Relaxed).max(1)
}

impl Ledger {
    /// Begins with a credit of clean units.
    fn new() -> Ledger {
        Ledger { clean_credit: AtomicU64::new(CLEAN_CREDIT), ..Ledger::default() }
    }

    /// Whether a byte of copies saves more than a byte more of resident memory would.
    fn verdict(&self, sizes: Sizes, lately: &Lately) -> Verdict {
        let clean = self.clean.load(Relaxed) + self.clean_credit.load(Relaxed);
        let copies = self.mean_copies().max(BUDGET_MIN as u64);
        let copies = self.copies_worth(clean, copies * sizes.object, lately);
        copies.against(self.resident_worth(sizes, lately))
    }

    /// What so many clean units save, with copies of so many bytes.
    fn copies_worth(&self, clean: u64, bytes: u64, lately: &Lately) -> Worth {
        let compress_ns = mean(&self.compress_ns, &self.compressed);
        let waited_ns = compress_ns * lately.clean_share(compress_ns) / ALL;
        Worth { saved_ns: clean.saturating_mul(waited_ns), bytes }
    }

    /// What WINDOW bytes more of resident memory would save.
    fn resident_worth(&self, sizes: Sizes, lately: &Lately) -> Worth {
        let near = self.near.load(Relaxed);
        Worth { saved_ns: near.saturating_mul(self.refault_ns(lately)), bytes: sizes.window() }
    }

    fn mean_copies(&self) -> u64 {
        mean(&self.copies, &self.reviews)
    }

    fn account(&self, copies: usize, sizes: Sizes, lately: Lately) -> Account {
        let bytes = self.mean_copies() * sizes.object;
        Account {
            resident: self.resident_worth(sizes, &lately),
            copies: self.copies_worth(self.clean.load(Relaxed), bytes, &lately),
            copies_bytes: copies as u64 * sizes.object,
            span: self.span(lately),
        }
    }

    /// The mean time that a thread waits for a load, with the time that the background thread takes
    /// to reclaim what the unit displaces.
    fn refault_ns(&self, lately: &Lately) -> u64 {
        mean(&self.wait_ns, &self.loads) + lately.reclaim_ns()
    }

    fn span(&self, lately: Lately) -> Span {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let (loads, saved, together) = (of(&self.loads), of(&self.saved), of(&self.together));
        let compressed = of(&self.compressed);
        let refault_ns = self.refault_ns(&lately);
        Span { loads, saved: saved.min(loads), together, compressed, refault_ns, lately }
    }

    fn forget(&self) {
        let all = [
            &self.copies,
            &self.reviews,
            &self.loads,
            &self.near,
            &self.saved,
            &self.together,
            &self.wait_ns,
            &self.clean,
            &self.clean_credit,
            &self.compressed,
            &self.compress_ns,
        ];
        for counter in all {
            let value = counter.load(Relaxed);
            // Rounded up, so that what has ended is forgotten altogether.
            counter.store(value - value.div_ceil(FORGET_SHARE), Relaxed);
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Copies {
    /// Folios with copies of resident units, oldest first.
    queue: Mutex<{ rank::COPIES }, VecDeque<usize>>,
    /// See `COPY-1`.
    count: AtomicUsize,
    /// The limit of `count`.
    budget: AtomicUsize,
    /// A load within this distance is a near refault.
    near_bytes: AtomicU64,
    /// A load within this distance would be saved by the dense codec.
    saved_bytes: AtomicU64,
    /// All loads since the start.
    loads: AtomicU64,
    ledger: Ledger,
}

impl Copies {
    /// No copies yet, and a budget without a limit.
    pub(crate) fn new() -> Copies {
        Copies {
            queue: Mutex::new(VecDeque::new()),
            count: AtomicUsize::new(0),
            budget: AtomicUsize::new(usize::MAX),
            near_bytes: AtomicU64::new(0),
            saved_bytes: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            ledger: Ledger::new(),
        }
    }

    /// Makes room for `folios` entries.
    pub(crate) fn reserve(&self, folios: usize) {
        let mut queue = self.queue.lock();
        let more = folios.saturating_sub(queue.len());
        queue.reserve(more);
    }

    /// Drops the entries for which `keep` returns false.
    pub(crate) fn retain(&self, mut keep: impl FnMut(usize) -> bool) {
        self.queue.lock().retain(|base| keep(*base));
    }

    /// Entries, stale ones included.
    pub(crate) fn queued(&self) -> usize {
        self.queue.lock().len()
    }

    /// Bytes of the queue itself.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.queue.lock().capacity() * size_of::<usize>()
    }

    /// Copies of units that are resident or staged (`COPY-1`).
    pub(crate) fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Whether there are more copies than the budget allows.
    pub(crate) fn over_budget(&self) -> bool {
        self.count() > self.budget.load(Relaxed)
    }

    /// Whether the budget allows one more copy.
    pub(crate) fn has_room(&self) -> bool {
        self.count() < self.budget.load(Relaxed)
    }

    /// What the two uses of memory were worth lately, and all loads since the start.
    fn account(&self, sizes: Sizes, lately: Lately) -> (Account, u64) {
        (self.ledger.account(self.count(), sizes, lately), self.loads.load(Relaxed))
    }

    /// Adjusts `count` after units of a folio gained or lost copies: `before` and `after` are the
    /// units with copies.
    pub(crate) fn change(&self, before: Units, after: Units) {
        let (before, after) = (before.count(), after.count());
        if after >= before {
            self.count.fetch_add(after - before, Relaxed);
        } else {
            self.count.fetch_sub(before - after, Relaxed);
        }
    }

    /// Notes that units are loaded. Those in `near` went out `distance_bytes` ago; the others long
    /// before.
    pub(crate) fn note_loads(&self, units: Units, near: Units, distance_bytes: u64) {
        if distance_bytes <= self.near_bytes.load(Relaxed) {
            self.ledger.near.fetch_add((units & near).count() as u64, Relaxed);
        }
        self.ledger.loads.fetch_add(units.count() as u64, Relaxed);
    }

    /// Notes units that are loaded and went out `distance_bytes` ago: whether the dense codec would
    /// have kept them resident.
    pub(crate) fn note_saved(&self, units: Units, distance_bytes: u64) {
        if distance_bytes < self.saved_bytes.load(Relaxed) {
            self.ledger.saved.fetch_add(units.count() as u64, Relaxed);
        }
    }

    /// Notes units that came in wide ones, or loads that wide units would have saved.
    pub(crate) fn note_together(&self, loads: usize) {
        self.ledger.together.fetch_add(loads as u64, Relaxed);
    }

    /// From now on the dense codec would save the loads of units that went out less than
    /// `distance_bytes` before.
    pub(crate) fn set_saved(&self, distance_bytes: u64) {
        self.saved_bytes.store(distance_bytes, Relaxed);
    }

    /// Notes that a fault waited for a load.
    pub(crate) fn note_wait(&self, took_ns: u64) {
        self.ledger.wait_ns.fetch_add(took_ns.min(WAIT_NS_MAX), Relaxed);
    }

    /// Notes that `clean` units went out unchanged, and `compressed` units were compressed in
    /// `took_ns`.
    pub(crate) fn note_stored(&self, clean: usize, compressed: usize, took_ns: u64) {
        self.ledger.clean.fetch_add(clean as u64, Relaxed);
        self.ledger.compressed.fetch_add(compressed as u64, Relaxed);
        self.ledger.compress_ns.fetch_add(took_ns, Relaxed);
    }

    /// Queues a folio. False: the queue is full, because it holds entries of unmapped folios.
    fn push(&self, base: usize) -> bool {
        let mut queue = self.queue.lock();
        let room = queue.len() < queue.capacity();
        if room {
            queue.push_back(base);
        }
        room
    }

    /// The folio that has waited longest in the queue.
    fn oldest(&self) -> Option<usize> {
        self.queue.lock().front().copied()
    }

    /// Takes the oldest folio out of the queue if it is `base`. False: another thread has taken it.
    fn take_oldest(&self, base: usize) -> bool {
        let mut queue = self.queue.lock();
        let is_oldest = queue.front() == Some(&base);
        if is_oldest {
            queue.pop_front();
        }
        is_oldest
    }

    /// Makes the oldest folio the youngest if it is `base`. Its entry never leaves the queue, so that there
    /// is room for it (`COPY-2`).
    fn pass_over(&self, base: usize) {
        let mut queue = self.queue.lock();
        if queue.front() == Some(&base) {
            queue.rotate_left(1);
        }
    }

    /// Whether `more` loads make it time for a review.
    pub(crate) fn is_due(&self, more: usize) -> bool {
        let more = more as u64;
        let before = self.loads.fetch_add(more, Relaxed);
        before / REVIEW_LOADS != (before + more) / REVIEW_LOADS
    }

    /// Compares the two uses of memory (see the module), and sets the budget. Returns what the
    /// last loads cost.
    pub(crate) fn review(&self, sizes: Sizes, lately: Lately) -> Span {
        let (count, budget) = (self.count(), self.budget.load(Relaxed));
        self.ledger.copies.fetch_add(count as u64 * REVIEW_SCALE, Relaxed);
        self.ledger.reviews.fetch_add(REVIEW_SCALE, Relaxed);
        let budget = self.ledger.verdict(sizes, &lately).step(budget, count);
        self.budget.store(budget.max(BUDGET_MIN), Relaxed);
        self.near_bytes.store(sizes.near_bytes(), Relaxed);
        let span = self.ledger.span(lately);
        self.ledger.forget();
        span
    }
}

#[cfg(test)]
impl Copies {
    pub(crate) fn budget(&self) -> usize {
        self.budget.load(Relaxed)
    }

    pub(crate) fn set_budget(&self, budget: usize) {
        self.budget.store(budget, Relaxed);
    }
}

impl Engine {
    /// Units of a folio were loaded: keeps their copies if the budget and the queue have room.
    pub(crate) fn keep_copies(&self, folio: &mut Folio, base: usize, units: Units) {
        let copies = &self.copies;
        // The time is exact for `just_left` only. Units that left before count as far away.
        copies.note_loads(units, folio.just_left, self.replacement.distance_bytes(folio.left));
        self.note_return(folio, units);
        folio.just_left -= units;
        if copies.is_due(units.count()) {
            let span = copies.review(self.sizes(), self.work.reclaimer.busy.lately());
            self.review_density(&span);
        }
        folio.stored -= units;
        copies.change(Units::NONE, units);
        self.give_up_place(folio, units);
        let is_spare = self.is_proactive() && self.below_limit() > signed(self.charge.high_bytes());
        let has_place = copies.has_room() && !is_spare && !self.at_floor();
        if !has_place || !(folio.copied || copies.push(base)) {
            self.shed_copies(folio, units);
            return;
        }
        folio.copied = true;
    }

    /// A unit that was loaded alone would wait for the disk in full each time. If memory has room for it when it is
    /// compressed, it gives up its place on the disk, and goes to the pool when it goes out again.
    fn give_up_place(&self, folio: &Folio, units: Units) {
        let mut objects = units.objects(folio.wide);
        let alone = objects.next().filter(|_| objects.next().is_none());
        let copy = alone.and_then(|object| folio.copies[object.start].as_ref());
        // In this order: hardly any copy has a place on the disk, and the other question takes longer.
        let copy = copy.filter(|copy| self.store.keeps_location(copy) && !self.is_for_the_disk());
        copy.into_iter().for_each(|copy| self.store.give_up_backing(copy));
    }

    /// Units of a staged folio gained copies, besides the units that `had` one: counts the copies,
    /// and queues the folio, or drops the copies if the queue has no room (`COPY-2`).
    pub(crate) fn note_copied(&self, folio: &mut Folio, base: usize, had: Units) {
        let copied = folio.copied_units();
        self.copies.change(had, copied);
        if copied.is_empty() || folio.copied {
            return;
        }
        folio.copied = self.copies.push(base);
        if !folio.copied {
            self.drop_copies(folio, copied);
        }
    }

    /// Adds the bytes of units that come back to the histogram of refault distances.
    fn note_return(&self, folio: &Folio, units: Units) {
        let just = units & folio.just_left;
        for (units, left) in [(just, folio.left), (units - just, folio.left_before)] {
            if !units.is_empty() {
                let bytes = self.geometry().bytes_of(units) as u64;
                let distance_bytes = self.replacement.distance_bytes(left);
                self.stats().refaults.add_bytes(distance_bytes, bytes);
                self.copies.note_saved(units, distance_bytes);
            }
        }
    }

    /// What resident memory and copies were worth lately, and all loads since the start.
    pub(crate) fn account(&self) -> (Account, u64) {
        self.copies.account(self.sizes(), self.work.reclaimer.busy.lately())
    }

    fn sizes(&self) -> Sizes {
        let unit = self.geometry().unit_bytes() as u64;
        let pool = self.store.pool_stats();
        let object = pool.bytes_stored / self.pooled_units().max(1);
        Sizes { limit: self.limit_bytes(), unit, object }
    }

    /// Drops the oldest copies if there are more than the budget allows, or if the limit cannot be held.
    /// False: none was dropped.
    pub(crate) fn drop_spare_copies(&self, table: &Table) -> bool {
        (self.copies.over_budget() || self.at_floor()) && self.drop_oldest_copies(table)
    }

    /// Drops the copies of the oldest folios in the queue, whatever the copies are worth: memory is
    /// short. False: none was dropped.
    pub(crate) fn drop_oldest_copies(&self, table: &Table) -> bool {
        if self.copies.count() == 0 {
            return false;
        }
        let mut dropped = 0;
        // Entries may be stale, and folios may be locked: each entry is looked at once.
        for _ in 0..self.copies.queued() {
            let Some(base) = self.copies.oldest().filter(|_| dropped < DROP_FOLIOS) else { break };
            let mut folio = match table.known(base).map(|lock| lock.try_lock()) {
                Some(Some(folio)) => folio,
                Some(None) => {
                    self.copies.pass_over(base);
                    continue;
                }
                None => {
                    self.copies.take_oldest(base);
                    continue;
                }
            };
            if self.copies.take_oldest(base) {
                folio.copied = false;
                let units = folio.copied_units();
                dropped += usize::from(!units.is_empty());
                self.shed_copies(&mut folio, units);
            }
        }
        dropped > 0
    }

    /// Frees the memory of the copies of units: those that the backing has too leave the pool, the others are dropped.
    fn shed_copies(&self, folio: &mut Folio, units: Units) {
        self.put_away(folio, units);
        self.drop_copies(folio, units - folio.backed);
    }

    /// Drops the stored copies of units; of a part of a wide unit, that of all four.
    pub(crate) fn drop_copies(&self, folio: &mut Folio, units: Units) {
        let before = folio.copied_units();
        let units = units.whole(folio.wide);
        for object in units.objects(folio.wide) {
            if let Some(copy) = folio.copies[object.start].take() {
                self.store.invalidate(copy, self.figures());
                add(&self.figures().copies_dropped, object.len() as u64);
            }
        }
        self.set_wide(folio, folio.wide - units);
        folio.backed -= units;
        self.copies.change(before, folio.copied_units());
    }
}
