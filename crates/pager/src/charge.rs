//! The charge: what counts against the limit, the watermarks of reclaim, and the figures.
//!
//! ```text
//! charge = resident units + slots of the mover + pool + tables     counted here, exactly
//!        + the process's other memory                              sampled from the kernel
//! ```
//!
//! Pages of files do not count (`charge/file_pages.rs`).
//!
//! # Invariants
//!
//! - `CHG-1` `resident_bytes` is the unit size times the resident units.
//! - `CHG-2` Reclaim goes on while the charge is above the limit and resident memory and slots take more
//!   than the floor. So at the floor there is a reserve for faults too, as below the limit. Where the floor passes the
//!   limit, and no disk takes what is stored, it is higher by as much, to half of it (`Engine::below_floor`).

mod asked;
mod file_pages;
mod follow;
mod over_limit;
mod share;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use zfolio_core::ledger::{Member, signed};
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{Figures, Stats, add, raise, set, subtract};
use zfolio_core::store::{SpillStats, Ticket};
use zfolio_core::swap::AreasStats;
use zfolio_core::swap::disk::SLOT_BYTES;
use zfolio_core::sync::Mutex;

use crate::config::Config;
use crate::engine::{Engine, StatsHome};
use crate::folio::{Geometry, Units};
use crate::rank;
use crate::spill::{Place, SpillDisk};

use asked::Asked;
use file_pages::FilePages;
use follow::Follow;
pub use over_limit::OverLimit;
pub(crate) use over_limit::report_first;
use share::Falling;

/// The floor: an eighth of the limit is for resident memory and slots, whatever else is charged. With a
/// small limit it is 3 MiB, of which reserve, staging area and scratch slots take up to 1.75.
const FLOOR_SHARE: u64 = 8;
const FLOOR_BYTES_MIN: u64 = 3 << 20;

/// Low watermark: 1/64 of the limit, 1/2 to 16 MiB: a burst of faults at 1 GB/s for 1/2 to 16 ms. A
/// program of 50 MiB has 4 % fewer faults in 36 MiB with a minimum of 1/2 MiB than with 1 MiB.
const LOW_SHARE: u64 = 64;
const LOW_BYTES_MIN: u64 = 512 << 10;
const LOW_BYTES_MAX: u64 = 16 << 20;

/// What lies in the staging area before it is compressed, in proactive reclaim: a 16th of the limit,
/// 256 MiB at most. It is address space only, with 100 KiB of lists.
const SOAK_SHARE: u64 = 16;
const SOAK_BYTES_MAX: u64 = 256 << 20;

/// Probation holds a 32nd of the limit before it is reclaimed from first.
const PROBATION_SHARE: u64 = 32;

/// See the module.
pub(crate) struct Charge {
    pub(crate) config: Config,
    pub(crate) stats: Box<dyn StatsHome>,
    folio_bytes: u64,
    /// The limit in force: that of the settings, unless another one was asked for, it follows the need,
    /// or there is a share.
    limit_bytes: AtomicU64,
    /// The highest limit of the settings, and of those that were asked for.
    highest_bytes: AtomicU64,
    asked: Asked,
    follow: Follow,
    /// The process's share of a tree's limit, if it has one: the limit in force.
    share: OnceLock<&'static Member>,
    falling: Falling,
    file_pages: FilePages,
    resident_bytes: AtomicU64,
    tables_bytes: AtomicU64,
    /// Streams that were used: measured with each sample, as their number grows with use.
    stream_bytes: AtomicU64,
    /// Tables and buffers of the store's backing.
    backing_bytes: AtomicU64,
    /// The kernel's count of the process's memory minus the count here. Negative where only some
    /// pages of resident units are present.
    uncounted_bytes: AtomicI64,
    /// The limit is passed now, and the owner of the figures was notified.
    is_over_limit: AtomicBool,
    /// An excess that nobody was told of yet, and whether it is the first.
    untold: Mutex<{ rank::UNTOLD }, Option<(OverLimit, bool)>>,
    /// The owner of the figures was notified at least once.
    was_over_limit: AtomicBool,
    /// When the sums over time of the figures were last brought up to date.
    summed_ns: AtomicU64,
    /// What had been waited when the excess was last summed up.
    waited_ns: AtomicU64,
}

impl Charge {
    /// Nothing is charged yet.
    pub(crate) fn new(config: Config, stats: Box<dyn StatsHome>, geometry: Geometry) -> Charge {
        let limit = config.limit_bytes;
        stats.figures.limit_bytes.store(limit, Relaxed);
        stats.figures.unit_bytes.store(geometry.unit_bytes() as u64, Relaxed);
        Charge {
            config,
            stats,
            folio_bytes: geometry.folio_bytes() as u64,
            limit_bytes: AtomicU64::new(limit),
            highest_bytes: AtomicU64::new(limit),
            asked: Asked::default(),
            follow: Follow::default(),
            file_pages: FilePages::default(),
            share: OnceLock::new(),
            falling: Falling::default(),
            resident_bytes: AtomicU64::new(0),
            tables_bytes: AtomicU64::new(0),
            stream_bytes: AtomicU64::new(0),
            backing_bytes: AtomicU64::new(0),
            uncounted_bytes: AtomicI64::new(0),
            is_over_limit: AtomicBool::new(false),
            untold: Mutex::default(),
            was_over_limit: AtomicBool::new(false),
            summed_ns: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
        }
    }

    /// In a child of `fork`: the sums over time, and over what was waited, begin now, since those of its parent go on.
    pub(crate) fn start_over(&self) {
        self.summed_ns.store(0, Relaxed);
        self.waited_ns.store(0, Relaxed);
    }

    /// The limit in force.
    pub(crate) fn limit_bytes(&self) -> u64 {
        match self.seat() {
            Some(seat) => seat.limit_bytes(),
            None => self.limit_bytes.load(Relaxed),
        }
    }

    /// Whether the limit in force is a share of one that other processes have a part of.
    pub(crate) fn has_a_share(&self) -> bool {
        self.share.get().is_some() && self.limit_bytes() < self.config.limit_bytes
    }

    /// What sizes follow from: the limit in force, and never more than that of the settings, for which the
    /// staging area was made.
    fn scale_bytes(&self) -> u64 {
        self.limit_bytes().min(self.config.limit_bytes)
    }

    /// Low watermark of background reclaim, in bytes available.
    pub(crate) fn low_bytes(&self) -> u64 {
        let low = (self.scale_bytes() / LOW_SHARE).clamp(LOW_BYTES_MIN, LOW_BYTES_MAX);
        low.max(2 * self.folio_bytes)
    }

    /// High watermark of background reclaim, in bytes available.
    pub(crate) fn high_bytes(&self) -> u64 {
        2 * self.low_bytes()
    }

    /// Folios of second chance to keep.
    pub(crate) fn staged_target(&self) -> usize {
        usize::try_from(self.low_bytes() / self.folio_bytes).unwrap_or(usize::MAX).max(2)
    }

    /// Bytes that may lie in the staging area, in proactive reclaim; 0 if the settings do not ask for
    /// that.
    pub(crate) fn soak_bytes_max(&self) -> u64 {
        match self.config.stall_ppm {
            0 => 0,
            _ => (self.scale_bytes() / SOAK_SHARE).min(SOAK_BYTES_MAX),
        }
    }

    /// Folios that probation may hold before it is reclaimed from first.
    pub(crate) fn probation_folios(&self) -> usize {
        let share = self.scale_bytes() / PROBATION_SHARE / self.folio_bytes;
        usize::try_from(share).unwrap_or(usize::MAX).max(self.staged_target())
    }

    /// What resident memory and slots may take in any case: with less a program makes no progress,
    /// whatever the rest of the limit is taken by. With less than twice the high watermark the reserve would
    /// leave nothing resident; with more than 3/8 of the limit small limits would not be held.
    pub(crate) fn floor_bytes(&self) -> u64 {
        let (limit, most) = (self.scale_bytes(), self.scale_bytes() / 8 * 3);
        (limit / FLOOR_SHARE).max(FLOOR_BYTES_MIN.max(2 * self.high_bytes()).min(most))
    }

    /// The most that the limit can become: a limit that follows the need has no upper bound.
    pub(crate) fn limit_bytes_max(&self) -> u64 {
        match self.share.get() {
            _ if self.follow.is_on() => u64::MAX,
            // A child of `fork` may have as much again that its parent pays for.
            Some(_) => 2 * self.highest_bytes.load(Relaxed),
            None => self.highest_bytes.load(Relaxed),
        }
    }

    /// Units became resident (`CHG-1`).
    pub(crate) fn count_in(&self, bytes: usize) {
        add(&self.resident_bytes, bytes as u64);
    }

    /// Units are no longer resident.
    pub(crate) fn count_out(&self, bytes: usize) {
        subtract(&self.resident_bytes, bytes as u64);
    }

    /// The sizes of tables and queues have changed.
    pub(crate) fn set_tables(&self, bytes: usize) {
        self.tables_bytes.store(bytes as u64, Relaxed);
    }

    /// The memory of the streams that were used, as it is now.
    pub(crate) fn set_streams(&self, bytes: usize) {
        self.stream_bytes.store(bytes as u64, Relaxed);
    }

    /// Managed memory that is mapped.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes.load(Relaxed)
    }

    /// The process's memory that is not managed; 0 for a library's pager. (Pages that were counted
    /// here and dropped without the engine's knowledge make the difference negative.)
    fn unmanaged_bytes(&self) -> u64 {
        u64::try_from(self.uncounted_bytes.load(Relaxed)).unwrap_or(0)
    }
}

/// Sets the gauges of what could not be read from the disk.
fn note_not_read(figures: &Figures, spill: &SpillStats, areas: &AreasStats) {
    figures.read_back_fail.store(spill.not_read, Relaxed);
    figures.read_back_tampered.store(areas.tampered, Relaxed);
}

impl Engine {
    /// The figures.
    pub fn figures(&self) -> &Figures {
        &self.charge.stats.figures
    }

    /// The figures and histograms.
    pub fn stats(&self) -> &Stats {
        &self.charge.stats
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.charge.config
    }

    /// Counts units that became resident.
    pub(crate) fn count_in(&self, units: Units) {
        self.charge.count_in(self.geometry().bytes_of(units));
    }

    /// Counts units that are no longer resident.
    pub(crate) fn count_out(&self, units: Units) {
        self.charge.count_out(self.geometry().bytes_of(units));
    }

    /// Charges the streams that were used so far.
    pub(crate) fn measure_streams(&self) {
        self.charge.set_streams(self.store.stream_bytes());
    }

    /// Tables, queues, buffers and streams, without the pool's.
    fn tables_bytes(&self) -> u64 {
        let Charge { tables_bytes, stream_bytes, backing_bytes, .. } = &self.charge;
        tables_bytes.load(Relaxed) + stream_bytes.load(Relaxed) + backing_bytes.load(Relaxed)
    }

    /// What is charged against the limit now, without the process's other memory.
    fn counted_bytes(&self) -> u64 {
        let pool = self.store.pool_stats();
        self.charge.resident_bytes()
            + self.mover.bytes_used() as u64
            + pool.pages_used * PAGE_BYTES as u64
            + pool.metadata_bytes
            + self.tables_bytes()
    }

    /// What is charged against the limit now.
    pub(crate) fn charge_bytes(&self) -> u64 {
        self.counted_bytes().saturating_add_signed(self.charge.uncounted_bytes.load(Relaxed))
    }

    /// The limit in force.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.charge.limit_bytes()
    }

    /// Whether the limit has fallen below the charge.
    pub(crate) fn must_come_down(&self) -> bool {
        self.limit_may_fall() && self.headroom() < 0
    }

    /// Whether the limit is a share, which may fall, or was asked for.
    pub(crate) fn limit_may_fall(&self) -> bool {
        self.charge.seat().is_some() || self.charge.asked.has_limit()
    }

    /// Bytes until the limit; negative above it.
    pub(crate) fn below_limit(&self) -> i64 {
        signed(self.limit_bytes()) - signed(self.charge_bytes())
    }

    /// Bytes until resident memory and slots take as much as the floor; negative above it. Where the floor passes the
    /// limit and there is no disk to spill to, the floor is higher by as much, but by half of it at most.
    fn below_floor(&self, below_limit: i64) -> i64 {
        let movable = self.charge.resident_bytes() + self.mover.bytes_used() as u64;
        let floor = signed(self.charge.floor_bytes());
        let below = floor - signed(movable);
        let passed = (below - below_limit).clamp(0, floor / 2);
        if self.store.has_backing() { below } else { below + passed }
    }

    /// Bytes until a fault has to reclaim, 0 or less where it must: until the limit, or until the floor if
    /// that is more (`CHG-2`).
    pub(crate) fn headroom(&self) -> i64 {
        let below_limit = self.below_limit();
        below_limit.max(self.below_floor(below_limit))
    }

    /// Whether the limit cannot be held, because all else takes so much that less than the floor is
    /// left to resident memory.
    pub(crate) fn at_floor(&self) -> bool {
        let below_limit = self.below_limit();
        below_limit < self.below_floor(below_limit)
    }

    /// Bytes that faults can use without waiting: the headroom plus free slots.
    pub(crate) fn available_bytes(&self) -> u64 {
        u64::try_from(self.headroom() + signed(self.mover.free_bytes() as u64)).unwrap_or(0)
    }

    /// From now on the limit rises: it is at least `share_per_mille` thousandths of what the
    /// program needs, and it also rises while the program waits most of the time.
    ///
    /// Sizes that depend on the limit (watermarks, staging area) are still those of the configured
    /// limit.
    pub fn follow_need(&self, share_per_mille: u64) {
        self.charge.follow.start(share_per_mille);
    }

    /// Compares the count with the kernel's, updates the gauges, and sets the limit if it follows
    /// the need. Also answers a request for the tables of pool and accelerator.
    pub fn sample(&self) {
        self.answer_tables();
        self.follow_asked();
        let resident = self.mover.system.resident().unwrap_or_default();
        self.set_file_bytes(resident.file_bytes);
        let process = resident.memory_bytes;
        self.compare_with_kernel(process);
        self.measure_excess();
        self.follow_share();
        self.rearm();
        let demand = self.set_gauges(process);
        if self.charge.follow.is_on() {
            self.step_limit(demand);
        }
        self.figures().limit_bytes.store(self.limit_bytes(), Relaxed);
    }

    /// Notes how much more memory the process has than is counted here.
    fn compare_with_kernel(&self, process: u64) {
        if !self.config().whole_process || process == 0 {
            return;
        }
        let uncounted = signed(process) - signed(self.counted_bytes());
        self.charge.uncounted_bytes.store(uncounted, Relaxed);
        self.figures().unmanaged_bytes.store(self.charge.unmanaged_bytes(), Relaxed);
        let over = process.saturating_sub(self.limit_bytes());
        raise(&self.figures().over_limit_bytes_max, over);
        self.sum_excess(over);
    }

    /// Adds the excess over the limit, times the wait since the last reading.
    fn sum_excess(&self, over: u64) {
        let now_ns = self.figures().stall_ns.load(Relaxed);
        let before_ns = self.charge.waited_ns.swap(now_ns, Relaxed);
        let waited_us = now_ns.saturating_sub(before_ns) / 1000;
        add(&self.figures().over_limit_kib_stall_us, (over >> 10).saturating_mul(waited_us));
    }

    /// Sets the gauges; returns what the program would hold resident without compression.
    pub(crate) fn set_gauges(&self, process: u64) -> u64 {
        let figures = self.figures();
        let pool = self.store.pool_stats();
        let pool_bytes = pool.pages_used * PAGE_BYTES as u64;
        let resident = self.charge.resident_bytes();
        set(&figures.process_bytes, &figures.process_bytes_max, process);
        set(&figures.resident_bytes, &figures.resident_bytes_max, resident);
        figures.staged_bytes.store(self.mover.bytes_used() as u64, Relaxed);
        set(&figures.pool_bytes, &figures.pool_bytes_max, pool_bytes);
        figures.copies.store(self.copies.count() as u64, Relaxed);
        figures.pages_compacted.store(pool.pages_compacted, Relaxed);
        self.set_spill_gauges();
        self.measure_streams();
        figures.metadata_bytes.store(self.tables_bytes() + pool.metadata_bytes, Relaxed);
        // A resident unit that also has a copy in the store counts once.
        let stored = figures.demand_stored_bytes.load(Relaxed);
        let demand = resident + stored + self.charge.unmanaged_bytes();
        set(&figures.demand_bytes, &figures.demand_bytes_max, demand);
        figures.sum_over_time(&self.charge.summed_ns, self.now_ns(), demand, process);
        demand
    }

    fn set_spill_gauges(&self) {
        if !self.store.has_backing() {
            return;
        }
        // Who forks holds it: then the figures stay as they are.
        let Some(gate) = self.work.spilling.gate.try_read() else { return };
        // Its tables grow with what is on the disk.
        self.charge.backing_bytes.store(self.store.backing_bytes() as u64, Relaxed);
        let (figures, spill) = (self.figures(), self.store.spill_stats());
        figures.spilled_units.store(spill.units, Relaxed);
        set(&figures.spilled_bytes, &figures.spilled_bytes_max, spill.bytes);
        // A wide unit is one entry, and counts as what it is made of.
        let units = |bytes: u64| bytes / self.geometry().unit_bytes() as u64;
        figures.written_back_units.store(units(spill.written_unit_bytes), Relaxed);
        figures.written_back_clean.store(spill.returned, Relaxed);
        let rejected = spill.not_written.saturating_sub(spill.refused);
        figures.reject_written_back.store(rejected, Relaxed);
        figures.read_back_units.store(units(spill.read_unit_bytes), Relaxed);
        figures.spilled_incompressible_units.store(spill.raw_units, Relaxed);
        let areas = self.work.place.as_ref().map(Place::stats);
        self.pay_for_writes();
        self.set_rule_gauges();
        let areas = areas.unwrap_or_default();
        let ways = self.work.place.as_ref().and_then(Place::ways);
        drop(gate);
        if let Some(ways) = ways {
            figures.spill_way.store(if ways.by_ring { 1 } else { 2 }, Relaxed);
            figures.spill_calls.store(ways.calls, Relaxed);
            figures.spill_buffered.store(u64::from(!ways.is_direct), Relaxed);
        }
        self.stats().orders.set(&areas.swpout, &areas.swpout_fallback);
        figures.spill_slot_bytes.store(areas.slots_used * SLOT_BYTES as u64, Relaxed);
        figures.spill_written_bytes.store(areas.bytes_written, Relaxed);
        figures.spill_read_bytes.store(areas.bytes_read, Relaxed);
        figures.written_back_limit.store(areas.refused_limit, Relaxed);
        figures.written_back_full.store(areas.refused_full + areas.failed_full, Relaxed);
        figures.written_back_fail.store(areas.writes_failed, Relaxed);
        note_not_read(figures, &spill, &areas);
    }

    /// Before the process is stopped for a unit that cannot be loaded: the figures say what happened to the disk. The
    /// background thread would do that at its next look, for which there is no time any more.
    #[cold]
    pub(crate) fn note_lost(&self) {
        let areas = self.work.place.as_ref().map(Place::stats).unwrap_or_default();
        note_not_read(self.figures(), &self.store.spill_stats(), &areas);
    }

    /// The disk that has the unit of a ticket, for the message before the process is stopped.
    #[cold]
    pub(crate) fn disk_of(&self, ticket: Ticket) -> Option<Arc<SpillDisk>> {
        let location = self.store.location(ticket)?;
        self.work.place.as_ref()?.disk_of(location)
    }

    /// Raises the limit that follows the need.
    fn step_limit(&self, demand: u64) {
        let (now, waited) = (self.now_ns(), self.stats().waited_ns());
        let limit = self.charge.follow.step(now, waited, demand, self.limit_bytes());
        self.charge.limit_bytes.store(limit, Relaxed);
    }
}
