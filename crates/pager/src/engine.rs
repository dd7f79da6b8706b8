//! The engine: one limit, one store, and the memory that they manage.
//!
//! # Invariants
//!
//! - `ENG-1` Whoever looks at a folio holds the table for reading; whoever changes mappings holds it
//!   for writing. So while a mapping changes, no folio is on its way in or out.
//! - `ENG-2` No thread touches managed memory while it holds a lock of the engine.
//! - `ENG-3` `resident_bytes` is the unit size times the resident units.
//! - `ENG-4` Whoever takes a lock of the engine, but for the inbox, or of its pool and streams, holds the
//!   table: who forks holds that alone, so the child finds them free.
//!
//! # Concurrency
//!
//! `table` -> `folio` -> `resident` -> `staging` -> `inbox` -> streams -> pool -> `runs`. See
//! `docs/locks.md`.

use std::ops::Deref;
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::Release,
};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{Figures, Stats, add, raise, subtract};
use zfolio_core::sync::RwLock;
use zfolio_core::zcomp::Zcomp;
use zfolio_core::zsmalloc::ClassStats;
use zfolio_core::zswap::{Key, Zswap};
use zfolio_sys::uffd::Uffd;
use zfolio_sys::{clock, cpu, random};

use crate::config::{Config, Error, LIMIT_BYTES_MIN, Mode};
use crate::copies::Copies;
use crate::follow::Follow;
use crate::handler::Watched;
use crate::limit::{self, OverLimit};
use crate::prefetch::Prefetch;
use crate::rank;
use crate::reclaim::Average;
use crate::resident::Resident;
use crate::runs::Runs;
use crate::seam::{Seam, needs};
use crate::shape::{Shape, Units};
use crate::staging::Staging;
use crate::table::{Folio, Table};

/// Probation holds a 32nd of the limit before it is reclaimed from first.
const PROBATION_SHARE: u64 = 32;

/// An eighth of the limit stays resident.
const FLOOR_SHARE: u64 = 8;

/// Where the figures live: a page of our own, or one that `zfolio stat` can read.
pub trait StatsHome: Deref<Target = Stats> + Send + Sync {
    /// Somebody asked for the size classes of the pool, and here they are.
    fn tell_classes(&self, _classes: &[ClassStats]) {}

    /// The limit is passed, for the `first` time or again after it was held. Called on the way of a
    /// fault: nothing may be touched or locked here but what the process never compresses.
    fn over_limit(&self, over: &OverLimit, first: bool) {
        limit::tell_once(over, first);
    }
}

impl StatsHome for Box<Stats> {}

/// See the module.
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) shape: Shape,
    pub(crate) table: RwLock<{ rank::TABLE }, Table>,
    pub(crate) resident: Resident,
    pub(crate) copies: Copies,
    pub(crate) staging: Staging,
    pub(crate) seam: Seam,
    pub(crate) zswap: Zswap<Runs>,
    pub(crate) prefetch: Prefetch,
    pub(crate) stats: Box<dyn StatsHome>,
    pub(crate) resident_bytes: AtomicU64,
    metadata_bytes: AtomicU64,
    /// What the process has resident beyond what is counted here; less than nothing where units are
    /// resident in part.
    pub(crate) uncounted_bytes: AtomicI64,
    /// Watermarks of background reclaim, in bytes available.
    pub(crate) low_bytes: u64,
    pub(crate) high_bytes: u64,
    /// Resident memory that reclaim leaves alone: below it a program makes no progress, whatever the
    /// rest of the limit is taken by.
    pub(crate) floor_bytes: u64,
    /// Folios of second chance to keep.
    pub(crate) staged_target: usize,
    /// Before this time the pool need not be looked at again: compaction gained nothing.
    pub(crate) compact_after_ns: AtomicU64,
    /// When parked folios are tried again.
    pub(crate) unpark_after_ns: AtomicU64,
    /// Changes when the reclaimer should look.
    pub(crate) reclaim_bell: AtomicU32,
    /// The reclaimer sleeps, and is worth a wake-up.
    pub(crate) reclaimer_idle: AtomicBool,
    /// Of what was reclaimed last, how much had to be compressed.
    pub(crate) dirty_share: Average,
    /// How many whole folios went by one move.
    pub(crate) folios_moved: Average,
    pub(crate) watched: Watched,
    pub(crate) stopping: AtomicBool,
    /// Somebody is about to fork: nothing is captured (`Engine::settle_for_fork`).
    pub(crate) settling: AtomicBool,
    /// The limit is passed now, and that was told.
    pub(crate) is_over_limit: AtomicBool,
    /// It was told at least once.
    pub(crate) told_over_limit: AtomicBool,
    /// The limit in force: that of the settings, unless it follows the need.
    limit: AtomicU64,
    follow: Follow,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Engine {
    /// Sets everything up; nothing is managed yet.
    ///
    /// The userfaultfds belong to the calling thread's table of files.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn new(config: Config, stats: Box<dyn StatsHome>) -> Result<Engine, Error> {
        if config.limit_bytes < LIMIT_BYTES_MIN {
            return Err(Error::LimitTooSmall { given: config.limit_bytes });
        }
        cpu::learn();
        let shape = Shape::new(config.unit);
        let folio_bytes = shape.folio_bytes() as u64;
        // 1/64 of the limit, 1 to 16 MiB: a burst of faults at 1 GB/s for 1 to 16 ms.
        let low_bytes = (config.limit_bytes / 64).clamp(1 << 20, 16 << 20).max(2 * folio_bytes);
        let high_bytes = 2 * low_bytes;
        let folios = |bytes: u64| usize::try_from(bytes / folio_bytes).unwrap_or(usize::MAX);
        let staged_target = folios(low_bytes).max(2);
        let slots = staged_target + folios(high_bytes) + 64;
        let memory = |what| move |errno| Error::Memory { what, errno };
        // A scratch slot for each CPU, the handler and the prefetch; of folios of one unit one, for
        // those that come in before any slot is free.
        let scratch = if shape.units() > 1 { cpu::online() + 2 } else { 1 };
        let staging = Staging::new(slots, scratch, shape).map_err(memory("staging area"))?;
        let (program, area) = open_userfaultfds(config.mode)?;
        let seam = Seam::new(program, area, &staging, shape).map_err(memory("staging area"))?;
        let zcomp = Zcomp::new(config.params.clone(), config.unit, cpu::online().max(2))
            .map_err(|error| Error::Codec(error.to_string()))?;
        let mut secret = [0; Key::BYTES];
        random::fill(&mut secret).map_err(memory("a random key"))?;
        let engine = Engine {
            shape,
            table: RwLock::new(Table::new(shape)),
            resident: Resident::new(
                folios(config.limit_bytes / PROBATION_SHARE).max(staged_target),
            ),
            copies: Copies::new(),
            staging,
            seam,
            zswap: Zswap::new(zcomp, Runs::default(), config.unit, Key::new(secret)),
            prefetch: Prefetch::new(shape),
            stats,
            resident_bytes: AtomicU64::new(0),
            metadata_bytes: AtomicU64::new(0),
            uncounted_bytes: AtomicI64::new(0),
            low_bytes,
            high_bytes,
            floor_bytes: (config.limit_bytes / FLOOR_SHARE).max(4 * folio_bytes),
            staged_target,
            compact_after_ns: AtomicU64::new(0),
            unpark_after_ns: AtomicU64::new(0),
            reclaim_bell: AtomicU32::new(0),
            reclaimer_idle: AtomicBool::new(false),
            dirty_share: Average::new(Average::ONE),
            folios_moved: Average::new(Average::ONE),
            watched: Watched::default(),
            stopping: AtomicBool::new(false),
            settling: AtomicBool::new(false),
            is_over_limit: AtomicBool::new(false),
            told_over_limit: AtomicBool::new(false),
            limit: AtomicU64::new(config.limit_bytes),
            follow: Follow::default(),
            config,
        };
        engine.figures().limit_bytes.store(engine.config.limit_bytes, Relaxed);
        engine.figures().unit_bytes.store(shape.unit_bytes() as u64, Relaxed);
        Ok(engine)
    }

    /// Notes that the engine has taken over.
    pub fn engage(&self) {
        self.figures().engaged.store(1, Relaxed);
    }

    /// The figures.
    pub fn figures(&self) -> &Figures {
        &self.stats.figures
    }

    /// The figures and histograms.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Its settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Brings the sizes of tables and queues up to date, with room for the entry of every folio that
    /// can be resident.
    pub(crate) fn measure_tables(&self, table: &mut Table) {
        let managed = table.managed_bytes();
        let folios = managed / self.shape.folio_bytes() + 1;
        if self.resident.len() > 2 * folios || self.copies.queued() > 2 * folios {
            self.sweep_queues(table);
        }
        // A limit that follows the need may come to hold everything.
        let limit = if self.follow.is_on() { u64::MAX } else { self.config.limit_bytes };
        let within = limit / self.shape.unit_bytes() as u64;
        let within = folios.min(usize::try_from(within).unwrap_or(usize::MAX));
        self.resident.reserve(within);
        self.copies.reserve(within);
        let queues = self.resident.metadata_bytes() + self.copies.metadata_bytes();
        let bytes = table.metadata_bytes() + queues;
        self.metadata_bytes.store((bytes + self.zswap.stream_bytes()) as u64, Relaxed);
        self.figures().managed_bytes.store(managed as u64, Relaxed);
    }

    /// Drops from the queues what is of unmapped folios, and second entries (`UNIT-3`).
    fn sweep_queues(&self, table: &mut Table) {
        let mut queues = Sweep { table, kept: Vec::new() };
        self.resident
            .retain(|base| queues.keeps(base, |folio| folio.managed, |folio| &mut folio.queued));
        queues.end(|folio| &mut folio.queued);
        // What has no copies needs no entry.
        let copied = |folio: &Folio| !folio.copied_units().is_empty();
        self.copies.retain(|base| queues.keeps(base, copied, |folio| &mut folio.copied));
        queues.end(|folio| &mut folio.copied);
    }

    /// Counts units that became resident (`ENG-3`).
    pub(crate) fn count_in(&self, units: Units) {
        add(&self.resident_bytes, self.shape.bytes_of(units) as u64);
    }

    /// Counts units that no longer are.
    pub(crate) fn count_out(&self, units: Units) {
        subtract(&self.resident_bytes, self.shape.bytes_of(units) as u64);
    }

    /// What is charged against the limit now, without what is not ours.
    fn counted_bytes(&self) -> u64 {
        let pool = self.zswap.pool_stats();
        self.resident_bytes.load(Relaxed)
            + self.staging.bytes_used() as u64
            + pool.pages_used * PAGE_BYTES as u64
            + pool.metadata_bytes
            + self.metadata_bytes.load(Relaxed)
    }

    /// What is charged against the limit now.
    pub(crate) fn charge_bytes(&self) -> u64 {
        self.counted_bytes().saturating_add_signed(self.uncounted_bytes.load(Relaxed))
    }

    /// Bytes until the limit; 0 at it and above.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.charge_bytes())
    }

    /// What faults can have without waiting: room, and free staged pages, less what is over the limit.
    pub(crate) fn available_bytes(&self) -> u64 {
        let (limit, free) = (self.limit_bytes(), self.staging.free_bytes() as u64);
        (limit + free).saturating_sub(self.charge_bytes())
    }

    /// Compares the count with what the kernel says, and tells the gauges; and the size classes, if
    /// somebody wants to know.
    pub fn sample(&self) {
        let figures = self.figures();
        let stats = self.stats();
        let asked = stats.classes_asked.load(Relaxed);
        if asked != stats.classes_told.load(Relaxed) {
            let table = self.table.read();
            let classes = self.zswap.pool().classes();
            drop(table);
            self.stats.tell_classes(&classes);
            stats.classes_told.store(asked, Release);
        }
        let counted = self.counted_bytes();
        let process = zfolio_sys::process::resident_bytes().unwrap_or(0);
        if self.config.whole_process && process > 0 {
            let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
            let uncounted = signed(process) - signed(counted);
            self.uncounted_bytes.store(uncounted, Relaxed);
            figures.unmanaged_bytes.store(u64::try_from(uncounted).unwrap_or(0), Relaxed);
            let over = process.saturating_sub(self.limit_bytes());
            raise(&figures.over_limit_bytes_max, over);
        }
        self.measure_excess();
        self.rearm();
        let pool = self.zswap.pool_stats();
        let pool_bytes = pool.pages_used * PAGE_BYTES as u64;
        let resident = self.resident_bytes.load(Relaxed);
        figures.process_bytes.store(process, Relaxed);
        raise(&figures.process_bytes_max, process);
        figures.resident_bytes.store(resident, Relaxed);
        raise(&figures.resident_bytes_max, resident);
        figures.staged_bytes.store(self.staging.bytes_used() as u64, Relaxed);
        figures.pool_bytes.store(pool_bytes, Relaxed);
        raise(&figures.pool_bytes_max, pool_bytes);
        figures.copies.store(self.copies.count() as u64, Relaxed);
        figures.pages_compacted.store(pool.pages_compacted, Relaxed);
        let metadata = self.metadata_bytes.load(Relaxed) + pool.metadata_bytes;
        figures.metadata_bytes.store(metadata, Relaxed);
        // Copies of resident units count once: what is resident, and what is in the store only.
        let uncounted = u64::try_from(self.uncounted_bytes.load(Relaxed)).unwrap_or(0);
        let demand = resident + figures.demand_stored_bytes.load(Relaxed) + uncounted;
        figures.demand_bytes.store(demand, Relaxed);
        raise(&figures.demand_bytes_max, demand);
        if self.follow.is_on() {
            self.step_limit(demand);
        }
        figures.limit_bytes.store(self.limit_bytes(), Relaxed);
    }

    /// Sets the limit that follows the need.
    fn step_limit(&self, demand: u64) {
        let stats = self.stats();
        let waited_ns = stats.refaults.waited_ns() + stats.fault_staged_ns.sum();
        let now_ns = clock::monotonic_ns();
        let limit = self.follow.step(now_ns, waited_ns, demand, self.limit_bytes());
        self.limit.store(limit, Relaxed);
    }

    /// From now on the limit rises: with what the program needs, of which it is `share_per_mille`
    /// thousandths, and while the program waits most of the time.
    ///
    /// The sizes that follow from the limit (watermarks, staging area) stay those of the settings.
    pub fn follow_need(&self, share_per_mille: u64) {
        self.follow.start(share_per_mille);
    }

    /// The limit in force.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Whether so little is resident that reclaim must stop.
    pub(crate) fn at_floor(&self) -> bool {
        self.resident_bytes.load(Relaxed) <= self.floor_bytes
    }
}

/// A queue that loses its stale entries. The flag by which a folio has one entry is cleared at the first, so that
/// a second finds it cleared and goes, and is set again at the end.
struct Sweep<'t> {
    table: &'t mut Table,
    kept: Vec<usize>,
}

impl Sweep<'_> {
    /// Whether the entry of the folio at `base` stays.
    fn keeps(
        &mut self,
        base: usize,
        wanted: impl Fn(&Folio) -> bool,
        flag: impl Fn(&mut Folio) -> &mut bool,
    ) -> bool {
        let Some(folio) = self.table.known_mut(base) else { return false };
        let keep = std::mem::take(flag(folio)) && wanted(folio);
        if keep {
            self.kept.push(base);
        }
        keep
    }

    fn end(&mut self, flag: impl Fn(&mut Folio) -> &mut bool) {
        for base in self.kept.drain(..) {
            if let Some(folio) = self.table.known_mut(base) {
                *flag(folio) = true;
            }
        }
    }
}

/// The one that faults come through, and the one of the staging area.
fn open_userfaultfds(mode: Mode) -> Result<(Uffd, Uffd), Error> {
    let [program, staging] = needs(mode);
    let open = |(reach, features)| {
        Uffd::open(reach, features).map_err(|errno| Error::Userfaultfd { mode, errno })
    };
    Ok((open(program)?, open(staging)?))
}

impl Mode {
    /// Whether this process may serve faults so: opens what that needs, and closes it again.
    ///
    /// # Errors
    ///
    /// [`Error::Userfaultfd`]; its text says what is missing and what to do.
    pub fn check(self) -> Result<(), Error> {
        open_userfaultfds(self).map(drop)
    }
}
