//! The engine: one limit, one store, and the memory that they manage.
//!
//! Each part of the engine is a struct in a file of its own. An operation on several parts (a
//! fault, a reclaim, a change of a mapping) is a method of the engine, in the file named after the
//! operation.
//!
//! # Invariants
//!
//! - `ENG-1` A thread that looks at a folio holds the table for reading; a thread that changes
//!   mappings holds the table for writing. So while a mapping changes, no folio is on its way in or
//!   out.
//! - `ENG-2` No thread touches managed memory while it holds a lock of the engine.
//! - `ENG-4` A thread that takes a lock of the engine (except the inbox), the pool or the codecs holds
//!   the table. A thread that forks holds the table for writing, so the child finds these
//!   locks free.
//!
//! # Concurrency
//!
//! `table` -> `folio` -> `inbox` -> `faults` -> `replacement` -> `staging` -> `copies` -> `density` -> streams of
//! faults -> streams of the codecs -> pool -> `PoolMappings`. See `docs/locks.md`.

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::Release};

use zfolio_core::stats::Stats;
use zfolio_core::store::{Backing, Key, Store};
use zfolio_core::sync::RwLock;
use zfolio_core::zcomp::Zcomp;
use zfolio_core::zsmalloc::{self, PageSource};
#[cfg(test)]
use zfolio_sys::map::Reservation;
use zfolio_sys::{cpu, random};
use zfolio_workers::{Crew, HARDWARE_STATS};

use crate::charge::{Charge, OverLimit, report_first};
use crate::config::{Config, Error, LIMIT_BYTES_MIN, Mode};
use crate::copies::Copies;
use crate::density::Density;
use crate::economy::Economy;
use crate::folio::{Geometry, Table};
use crate::handler::Watched;
use crate::handler::assist::Assistants;
use crate::mover::Mover;
use crate::pool_mappings::PoolMappings;
use crate::prefetch::Prefetch;
use crate::rank;
use crate::reclaim::Reclaimer;
use crate::replacement::Replacement;
use crate::spill::{Place, Places, Sender, Spilling};
use crate::system::{Linux, System};
use crate::wide::Use;

/// The owner of the figures: they live in private memory, or in a file that `zfolio stat` reads.
pub trait StatsHome: Deref<Target = Stats> + Send + Sync {
    /// Publishes the tables of [`Stats::tables_asked`], after a request for them.
    fn publish_tables(&self, _text: &str) {}

    /// Whether [`StatsHome::over_limit`] may be called while a fault is served, because it neither waits nor writes to
    /// a file. Otherwise it is called by a thread that nobody waits for ([`Engine::tell_over_limit`]).
    fn is_told_at_once(&self) -> bool {
        false
    }

    /// Whether [`StatsHome::over_limit`] would not wait now. The thread that calls it has other work, and asks again.
    fn can_tell(&self) -> bool {
        true
    }

    /// The limit is passed, for the `first` time or again after it was held. If it may be called while a fault is
    /// served, an implementation may touch and lock only memory that is never compressed.
    fn over_limit(&self, over: &OverLimit, first: bool) {
        report_first(over, first);
    }
}

impl StatsHome for Box<Stats> {}

/// See the module.
pub struct Engine {
    pub(crate) table: RwLock<{ rank::TABLE }, Table>,
    pub(crate) charge: Charge,
    pub(crate) replacement: Replacement,
    pub(crate) copies: Copies,
    pub(crate) mover: Mover,
    pub(crate) store: Store<Arc<dyn PageSource>>,
    pub(crate) work: Work,
}

/// As much as is under way to the disk and back at a time.
const POOL_RESERVE_MAX: usize = 2 << 20;

/// Bytes of pages that the pool keeps for what passes through it to the disk and back: a 128th of the limit, but
/// [`POOL_RESERVE_MAX`] at most.
fn pool_reserve(limit_bytes: u64) -> usize {
    usize::try_from(limit_bytes / 128).map_or(POOL_RESERVE_MAX, |bytes| bytes.min(POOL_RESERVE_MAX))
}

/// What the engine's threads share.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) reclaimer: Reclaimer,
    pub(crate) density: Density,
    /// How all memory is used.
    pub(crate) used: Use,
    pub(crate) economy: Economy,
    pub(crate) prefetch: Prefetch,
    pub(crate) watched: Watched,
    pub(crate) assistants: Assistants,
    pub(crate) spilling: Spilling,
    /// The files and devices that are spilled to.
    pub(crate) place: Option<Place>,
    /// How many CPUs the process may use.
    pub(crate) cpus: usize,
    /// Who works on the batches of its codecs.
    pub(crate) crew: Arc<Crew>,
    pub(crate) stopping: AtomicBool,
    /// A thread is about to fork: nothing is captured (`Engine::settle_for_fork`).
    pub(crate) settling: AtomicBool,
}

/// What an engine is built from.
pub(crate) struct Parts {
    pub(crate) system: Box<dyn System>,
    /// The pool's memory.
    pub(crate) source: Arc<dyn PageSource>,
    /// One codec; or two, the fast one first.
    pub(crate) codecs: Vec<Zcomp>,
    /// Who works on their batches.
    pub(crate) crew: Arc<Crew>,
    pub(crate) key: Key,
    /// Where units go that do not fit in the pool, if there is such a place.
    pub(crate) backing: Option<Box<dyn Backing>>,
    pub(crate) cpus: usize,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("config", self.config()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Sets everything up; nothing is managed yet.
    ///
    /// The userfaultfds are opened in the calling thread's table of files.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn new(config: Config, stats: Box<dyn StatsHome>) -> Result<Engine, Error> {
        if config.limit_bytes < LIMIT_BYTES_MIN {
            return Err(Error::LimitTooSmall { given: config.limit_bytes });
        }
        if config.spill.paths.is_empty() {
            return Engine::with_backing(config, stats, None);
        }
        // Under `zfolio run` only the engine's own threads send, and files are opened once they are needed.
        let is_library = !config.whole_process;
        let sender = if is_library { Sender::Thread } else { Sender::Caller };
        let place =
            Place::new(&config.spill, config.limit_bytes, config.object_max().bytes(), sender);
        let place = place.map_err(Error::Spill)?;
        let mut engine = Engine::with_backing(config, stats, Some(Box::new(place.backing())))?;
        if is_library {
            let opened = place.plan().and_then(|plan| place.open(plan)).map_err(Error::Spill)?;
            place.add(place.new_areas(), opened).map_err(Error::Spill)?;
        }
        engine.work.place = Some(place);
        Ok(engine)
    }

    /// The same on any backing.
    pub(crate) fn with_backing(
        config: Config,
        stats: Box<dyn StatsHome>,
        backing: Option<Box<dyn Backing>>,
    ) -> Result<Engine, Error> {
        cpu::learn();
        let system = Box::new(Linux::open(config.mode)?);
        let cpus = cpu::online();
        let accelerated = &config.accelerated;
        let crew = Crew::new(accelerated.workers());
        let codecs = config.algorithm.codecs().into_iter();
        let codecs =
            codecs.map(|params| accelerated.zcomp(params, config.unit, cpus.max(2), &crew));
        let codecs = codecs.collect::<Result<Vec<_>, _>>();
        let codecs = codecs.map_err(|error| Error::Codec(error.to_string()))?;
        let mut secret = [0; Key::BYTES];
        random::fill(&mut secret).map_err(|errno| Error::Memory { what: "a random key", errno })?;
        let source = Arc::new(PoolMappings::default().with_chunk());
        let key = Key::new(secret);
        let parts = Parts { system, source, codecs, crew, key, backing, cpus };
        Engine::on(parts, config, stats)
    }

    /// Sets an engine up on any system; nothing is managed yet.
    ///
    /// # Errors
    ///
    /// There is no address space for the staging area, or the system does not register it.
    pub(crate) fn on(
        parts: Parts,
        config: Config,
        stats: Box<dyn StatsHome>,
    ) -> Result<Engine, Error> {
        let geometry = Geometry::new(config.unit);
        let object_max = config.object_max();
        let assistants = Assistants::new(config.assistants, parts.cpus);
        let density = Density::new(parts.codecs.len(), (config.unit, object_max));
        let limit_bytes = config.limit_bytes;
        let charge = Charge::new(config, stats, geometry);
        let folios = |bytes: u64| {
            usize::try_from(bytes / geometry.folio_bytes() as u64).unwrap_or(usize::MAX)
        };
        let soaking = folios(charge.soak_bytes_max());
        let slots = charge.staged_target() + folios(charge.high_bytes()) + soaking + 64;
        // A scratch slot for each CPU, the handler and the prefetch. With one unit a folio one slot
        // is enough: whole folios need it only while no slot is free.
        let scratch = if geometry.units() > 1 { parts.cpus + 2 } else { 1 };
        let mover = Mover::new(parts.system, slots, scratch, geometry)
            .map_err(|errno| Error::Memory { what: "staging area", errno })?;
        let replacement = Replacement::new();
        // Twice as many as slots, for stale entries.
        replacement.reserve_staged(2 * slots);
        let stall_ppm = charge.config.stall_ppm;
        let store = Store::for_units(object_max, parts.codecs, parts.source, parts.key);
        let store = match parts.backing {
            Some(backing) => store.with_backing(backing, pool_reserve(limit_bytes)),
            None => store,
        };
        let engine = Engine {
            table: RwLock::new(Table::new(geometry)),
            replacement,
            copies: Copies::new(),
            mover,
            store,
            charge,
            work: Work {
                reclaimer: Reclaimer::new(),
                density,
                used: Use::default(),
                economy: Economy::new(),
                prefetch: Prefetch::new(geometry, limit_bytes),
                watched: Watched::default(),
                assistants,
                spilling: Spilling::default(),
                place: None,
                cpus: parts.cpus,
                crew: parts.crew,
                stopping: AtomicBool::new(false),
                settling: AtomicBool::new(false),
            },
        };
        engine.set_stall(stall_ppm);
        let Places { pool, write_budget, .. } = engine.config().spill;
        engine.set_max_pool_percent(pool.max_pool_percent.into());
        engine.set_accept_threshold_percent(pool.accept_threshold_percent.into());
        engine.set_write_budget(write_budget);
        Ok(engine)
    }

    /// Notes in the figures that the engine manages memory from now on.
    pub fn engage(&self) {
        self.figures().engaged.store(1, Relaxed);
    }

    /// Who works on the batches of the engine's codecs: each worker is to be given a thread.
    pub fn crew(&self) -> &Arc<Crew> {
        &self.work.crew
    }

    /// The userfaultfd of the program's faults. While any process has it open, a touch of a missing
    /// page waits for the engine; once it is closed, missing pages read as zeros.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mover.system.file()
    }

    /// The sizes of units and folios.
    pub(crate) fn geometry(&self) -> Geometry {
        self.mover.geometry()
    }

    /// The system's time.
    pub(crate) fn now_ns(&self) -> u64 {
        self.mover.system.now_ns()
    }

    /// The CPU whose streams the caller tries first.
    pub(crate) fn cpu(&self) -> usize {
        self.mover.system.cpu()
    }

    /// Publishes the size classes of the pool, and the figures of the accelerator, if they were requested.
    pub(crate) fn answer_tables(&self) {
        let stats = self.stats();
        let asked = stats.tables_asked.load(Relaxed);
        if asked != stats.tables_published.load(Relaxed) {
            // Held also for the accelerator's figures, whose lock a child of fork must find free (ENG-4).
            let table = self.table.read();
            let mut text = zsmalloc::lines(&self.store.pool().classes());
            if let Some(hardware) = self.config().accelerated.hardware() {
                text.push('\n');
                HARDWARE_STATS.iter().for_each(|name| text += &hardware.stats(name));
            }
            drop(table);
            self.charge.stats.publish_tables(&text);
            stats.tables_published.store(asked, Release);
        }
    }
}

#[cfg(test)]
impl Config {
    /// For an inline engine with units of 16 KiB.
    pub(crate) fn for_test(limit_bytes: u64) -> Config {
        Config {
            limit_bytes,
            algorithm: "lz4".parse().expect("an algorithm"),
            unit: zfolio_core::page::UnitOrder::from_bytes(16 << 10).expect("a unit"),
            wide_units: false,
            mode: Mode::Inline,
            whole_process: false,
            strict: false,
            stall_ppm: 0,
            spill: Places::default(),
            accelerated: zfolio_workers::Accelerated::NONE,
            assistants: Some(0),
        }
    }
}

#[cfg(test)]
impl Engine {
    /// An inline engine with units of 16 KiB. [`Mode::check`] must have passed.
    pub(crate) fn inline_for_test(limit_bytes: u64) -> Engine {
        Engine::spilling_for_test(limit_bytes, None)
    }

    /// The same with a place for what does not fit.
    pub(crate) fn spilling_for_test(limit_bytes: u64, backing: Option<Box<dyn Backing>>) -> Engine {
        let stats = Box::new(Box::<Stats>::default());
        let config = Config::for_test(limit_bytes);
        Engine::with_backing(config, stats, backing).expect("Mode::check has passed")
    }

    /// A mapping with contents, under management.
    #[allow(unsafe_code, reason = "what a program does")]
    pub(crate) fn adopted(&self, bytes: usize, write: impl FnOnce(&mut [u8])) -> Reservation {
        let space = Reservation::new(bytes, 64 << 10).expect("address space");
        // SAFETY: the mapping is ours, and nobody else has a reference into it.
        write(unsafe { std::slice::from_raw_parts_mut(space.base().as_ptr(), space.bytes()) });
        self.adopt(space.address(), space.address() + space.bytes()).expect("it is ours");
        space
    }

    /// Ends the management of a mapping.
    pub(crate) fn unmap_adopted(&self, space: &Reservation) {
        let (start, end) = (space.address(), space.address() + space.bytes());
        self.unmap(start, end, || Ok::<(), ()>(())).expect("no system call is made");
    }
}

impl Mode {
    /// Whether this process may serve faults in this mode: opens the userfaultfds, and closes them
    /// again.
    ///
    /// # Errors
    ///
    /// [`Error::Userfaultfd`]; its text says what is missing and what to do.
    pub fn check(self) -> Result<(), Error> {
        Linux::open(self).map(drop)
    }
}
