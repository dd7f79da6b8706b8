//! What a seed chooses before a run begins.

use zfolio_core::budget::{Period, WriteBudget};
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_iaa::WhenBusy;

use super::accelerator;
use super::random::Random;
use super::space::Refusals;
use crate::config::{Config, Mode};
use crate::spill::{Places, PoolLimit};

/// One of so many runs has an accelerator.
const ACCELERATED_IN: usize = 12;

/// What happens to stored data in a run that the engine must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Damage {
    /// Bits of the pool flip.
    Bits,
    /// The codec refuses to decompress a unit, or decompresses it to something else.
    Decoder,
    /// The disk fails from some read on.
    Disk,
    /// What the disks have changes, or is not there any more.
    Slots,
}

/// What a program does most of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storm {
    /// It forks, and drops contents without the engine.
    Forks,
    /// It changes mappings without the engine.
    Mappings,
}

impl Spill {
    /// One that takes all that a program writes.
    pub(super) fn good(areas: bool) -> Spill {
        let (pool, budget) = (PoolLimit::default(), WriteBudget::default());
        Spill { bytes_max: 64 << 20, refuses: 0, outages: 0, pool, budget, areas }
    }

    /// Whether there is room for all that a program writes.
    fn is_large(self) -> bool {
        self.bytes_max > 32 << 20
    }

    /// Whether it takes all that a program writes.
    fn is_good(self) -> bool {
        self.is_large() && self.refuses + self.outages == 0 && self.budget.is_none()
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) mode: Mode,
    pub(super) unit: UnitOrder,
    /// Units that go out together become wide ones.
    pub(super) wide_units: bool,
    /// Threads that serve faults beside the handler.
    pub(super) assistants: usize,
    pub(super) algorithm: &'static str,
    /// The limit, without the bytes that codec streams take.
    pub(super) limit_bytes: u64,
    pub(super) cpus: usize,
    /// Threads of the program.
    pub(super) threads: usize,
    /// Steps of each thread.
    pub(super) steps: usize,
    /// Pages of address space.
    pub(super) pages: usize,
    /// Pages of the mapping that the program begins with.
    pub(super) pages_first: usize,
    /// That mapping is written before the engine is there, and the program waits until the limit is held.
    pub(super) early: bool,
    pub(super) refusals: Refusals,
    /// The pool gets no memory once in so many requests; 0 is never.
    pub(super) pool_refuses: usize,
    /// So many pages the pool gets at most: the process may have no more address space.
    pub(super) pool_pages_max: usize,
    /// The codec begins to fail once in so many units; 0 is never.
    pub(super) codec_fails: usize,
    /// One of so many written pages does not compress; 0 is none.
    pub(super) noise: usize,
    /// Mappings change, also without the engine's knowledge in handler mode.
    pub(super) changes: bool,
    /// Pages are pinned, shared with children and made read-only.
    pub(super) fixed: bool,
    /// Changes of mappings are aimed at memory that the engine is about to move.
    pub(super) aimed: bool,
    /// What half of all steps are, so that changes often wait while folios move.
    pub(super) storm: Option<Storm>,
    /// The limit is a share of a tree's limit: it rises and falls.
    pub(super) tree: bool,
    /// Memory goes out below the limit too, and other limits are asked for.
    pub(super) proactive: bool,
    /// What is wrong with stored data.
    pub(super) damage: Option<Damage>,
    /// There is a backing for what does not fit.
    pub(super) spill: Option<Spill>,
    /// The codec is an accelerator's, which does this when it has no room.
    pub(super) accelerator: Option<WhenBusy>,
}

/// The backing of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spill {
    /// How much it keeps.
    pub(super) bytes_max: usize,
    /// One of so many requests is refused, and one fails; 0 is none.
    pub(super) refuses: usize,
    /// At one of so many reads everything begins to fail for some time; 0 is none.
    pub(super) outages: usize,
    /// How much of the limit the pool may take.
    pub(super) pool: PoolLimit,
    /// What may be written.
    pub(super) budget: WriteBudget,
    /// The real areas are below, and not a disk that keeps objects one by one.
    pub(super) areas: bool,
}

impl Settings {
    /// The settings of a seed.
    pub(super) fn of(seed: u64) -> Settings {
        let random = &mut Random::new(seed, 1);
        let mode = random.of(&[Mode::Handler, Mode::Handler, Mode::Inline]);
        let unit = UnitOrder::from_bytes(random.of(&[4, 16, 16, 64]) << 10).expect("a unit");
        let hostile = random.one_in(2);
        let mut sometimes = |chances: &[usize]| {
            let chosen = random.of(chances);
            if hostile { chosen } else { 0 }
        };
        let refusals = Refusals {
            again: sometimes(&[0, 20, 200]),
            short: sometimes(&[0, 4, 30]),
            denied: sometimes(&[0, 20, 200]),
            register: sometimes(&[0, 0, 10]),
            signal: sometimes(&[0, 1]) == 1,
            swap: sometimes(&[0, 0, 20]),
            slow: sometimes(&[0, 10, 40, 300]),
        };
        let pool_refuses = sometimes(&[0, 3, 20]);
        let codec_fails = sometimes(&[0, 0, 10, 100]);
        // 1.5 to 4 MiB of room, for 3 to 10 MiB of memory.
        let limit_bytes = (6 + random.below(11) as u64) << 18;
        let pages_first = (3 << 8) + random.below(7 << 8);
        let settings = Settings {
            mode,
            unit,
            algorithm: random.of(&["auto", "auto", "lz4", "zstd", "deflate"]),
            limit_bytes,
            cpus: random.of(&[1, 2, 3]),
            threads: 1 + random.below(3),
            steps: random.of(&[20, 60, 120]),
            pages: 4096,
            pages_first,
            early: false,
            refusals,
            pool_refuses,
            pool_pages_max: usize::MAX,
            codec_fails,
            noise: random.of(&[0, 0, 2, 10]),
            changes: random.one_in(2),
            fixed: random.one_in(2),
            aimed: random.one_in(2),
            tree: random.one_in(4),
            storm: random.of(&[Some(Storm::Forks), Some(Storm::Mappings), None, None, None, None]),
            proactive: random.one_in(3),
            damage: None,
            spill: None,
            wide_units: false,
            assistants: Random::new(seed, 16).of(&[0, 0, 1, 2]),
            accelerator: None,
        };
        let mut settings = settings.with_spill(&mut Random::new(seed, 11));
        let is_on_areas = Random::new(seed, 13).one_in(2);
        settings.spill.iter_mut().for_each(|spill| spill.areas = is_on_areas);
        let random = &mut Random::new(seed, 15);
        // A change may need more units at once than the pool has room for: then it waits.
        let changes = settings.changes || settings.storm.is_some();
        if settings.spill.is_some_and(Spill::is_large) && !changes && !random.one_in(3) {
            let limit_pages = usize::try_from(settings.limit_bytes).unwrap_or(0) / PAGE_BYTES;
            settings.pool_pages_max = (limit_pages / random.of(&[1, 2, 4])).max(192);
        }
        settings.wide_units = Random::new(seed, 14).one_in(2);
        if settings.wide_units && settings.algorithm == "auto" {
            settings.unit = UnitOrder::DEFAULT;
        }
        let settings = match settings.storm {
            Some(_) => settings.with_storm(),
            None if Random::new(seed, 4).one_in(8) => settings.with_early(),
            None => settings,
        };
        settings.with_accelerator(&mut Random::new(seed, 17))
    }

    /// The settings of a directed test: the kernel refuses nothing, and the test starts all threads.
    pub(super) fn directed() -> Settings {
        Settings {
            mode: Mode::Handler,
            unit: UnitOrder::from_bytes(PAGE_BYTES).expect("a page is a unit"),
            wide_units: false,
            assistants: 0,
            algorithm: "lz4",
            limit_bytes: 4 << 20,
            cpus: 2,
            threads: 0,
            steps: 0,
            pages: 512,
            pages_first: 0,
            early: false,
            refusals: Refusals::default(),
            pool_refuses: 0,
            pool_pages_max: usize::MAX,
            codec_fails: 0,
            noise: 0,
            changes: true,
            fixed: false,
            aimed: false,
            storm: None,
            tree: false,
            proactive: false,
            damage: None,
            spill: None,
            accelerator: None,
        }
    }

    /// Some runs have a backing, and most of these more data than fits without. Chosen by a stream of its own.
    fn with_spill(self, random: &mut Random) -> Settings {
        if !random.one_in(3) {
            return self;
        }
        let bytes_max = random.of(&[1 << 20, 64 << 20, 64 << 20, 64 << 20]);
        let refuses = random.of(&[0, 0, 5, 50]);
        let noise = random.of(&[self.noise, 1, 1, 2]);
        let pool = PoolLimit {
            max_pool_percent: random.of(&[100, 100, 10, 40, 60]),
            accept_threshold_percent: random.of(&[90, 90, 50, 100]),
        };
        let (run, second) = (Period::Run, Period::Second);
        let periods =
            [(0, run), (0, run), (0, run), (1 << 18, run), (2 << 20, run), (8 << 20, second)];
        let (budget, period) = random.of(&periods);
        let budget = WriteBudget::new(budget, period).unwrap_or_default();
        // Requests that fail besides could make a wait too long.
        let outages = if refuses == 0 { random.of(&[0, 20, 200]) } else { 0 };
        let spill = Spill { bytes_max, refuses, outages, pool, budget, areas: false };
        Settings { spill: Some(spill), noise, ..self }
    }

    /// The same with damage to stored data. That of a disk is done where there is one, and data that needs it.
    pub(super) fn with_damage(self, damage: Option<Damage>) -> Settings {
        let mut settings = Settings { damage, ..self };
        let spill = match damage {
            Some(Damage::Disk) => Spill { outages: 50, ..Spill::good(false) },
            Some(Damage::Slots) => Spill::good(true),
            _ => return settings,
        };
        (settings.spill, settings.noise) = (Some(spill), 1);
        settings
    }

    /// A program that was faster than the engine, with a disk that has room for all of its noise. Where something is
    /// refused the limit need not be held.
    fn with_early(self) -> Settings {
        let areas = self.has_areas();
        Settings {
            early: true,
            threads: 1,
            refusals: Refusals::default(),
            pool_refuses: 0,
            pool_pages_max: usize::MAX,
            codec_fails: 0,
            noise: 1,
            fixed: false,
            tree: false,
            spill: Some(Spill::good(areas)),
            ..self
        }
    }

    /// Some runs have an accelerator. All that goes wrong with it is its own; where the limit must be held it has to do
    /// its work somehow.
    fn with_accelerator(self, random: &mut Random) -> Settings {
        if !random.one_in(ACCELERATED_IN) {
            return self;
        }
        let when_busy = random.of(&[WhenBusy::Software, WhenBusy::Reject]);
        let when_busy = if self.early { WhenBusy::Software } else { when_busy };
        let algorithm = accelerator::FORMAT;
        Settings { accelerator: Some(when_busy), algorithm, codec_fails: 0, ..self }
    }

    /// What a storm needs besides.
    fn with_storm(self) -> Settings {
        let mode = Mode::Handler;
        Settings { mode, threads: 3, changes: true, fixed: true, aimed: true, ..self }
    }

    /// Whether the real areas are below.
    pub(super) fn has_areas(&self) -> bool {
        self.spill.is_some_and(|spill| spill.areas)
    }

    /// The threads of the program, of the engine, of the rest of the tree, the one that looks after the areas, and that
    /// of the accelerator's devices.
    pub(super) fn all_threads(&self) -> usize {
        let engine = 2 + if self.mode == Mode::Handler { 1 + self.assistants } else { 0 };
        let others = [self.tree, self.has_areas(), self.accelerator.is_some()];
        self.threads + engine + others.map(usize::from).iter().sum::<usize>()
    }

    /// Whether the engine must be able to hold its limit.
    pub(super) fn is_calm(&self) -> bool {
        let is_capped = usize::from(self.is_capped());
        let refuses = self.pool_refuses + self.codec_fails + self.refusals.register + is_capped;
        let fits = self.noise == 0 || self.spill.is_some_and(|spill| spill.is_good());
        let rejects = self.accelerator == Some(WhenBusy::Reject);
        fits && refuses == 0 && !rejects && !self.fixed
    }

    /// The engine's settings, with this limit.
    pub(super) fn config(&self, limit_bytes: u64) -> Config {
        Config {
            limit_bytes,
            algorithm: self.algorithm.parse().expect("the name of an algorithm"),
            unit: self.unit,
            wide_units: self.wide_units,
            mode: self.mode,
            whole_process: false,
            strict: false,
            stall_ppm: 0,
            spill: Places {
                pool: self.spill.map(|spill| spill.pool).unwrap_or_default(),
                write_budget: self.spill.map(|spill| spill.budget).unwrap_or_default(),
                ..Places::default()
            },
            accelerated: zfolio_workers::Accelerated::NONE,
            assistants: Some(self.assistants),
        }
    }

    /// Mapped ranges are a multiple of so many pages: regions of the library consist of whole
    /// folios.
    pub(super) fn grain(&self) -> usize {
        match self.mode {
            Mode::Handler if !self.is_capped() => 1,
            _ => self.unit.folio().bytes() / PAGE_BYTES,
        }
    }

    /// Ranges whose contents are dropped are a multiple of so many pages.
    pub(super) fn discard_grain(&self) -> usize {
        match self.mode {
            Mode::Inline if !self.is_capped() => self.unit.pages(),
            _ => self.grain(),
        }
    }

    /// Whether the pool has room for little. Then no change may begin or end within a folio: it would need all units of
    /// that folio at once, for which there may never be room.
    pub(super) fn is_capped(&self) -> bool {
        self.pool_pages_max != usize::MAX
    }
}
