//! The world of a run: the engine on a simulated kernel, and a model of what the program wrote.

#![allow(clippy::disallowed_types, reason = "the model's lock is none of the engine's")]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::Stats;
use zfolio_core::store::{Backing, Key};
use zfolio_core::zcomp::Zcomp;
use zfolio_workers::Crew;

use super::accelerator::Accelerator;
use super::areas::{self, Ground};
use super::codec::{self, codecs};
use super::disk::{Below, Disk, Faults, Shared};
use super::random::Random;
use super::schedule::{self, Schedule};
use super::settings::{Damage, Settings};
use super::source::Source;
use super::space::{Access, Space};
use super::tree::Tree;
use crate::charge::OverLimit;
use crate::config::Mode;
use crate::engine::{Engine, Parts, StatsHome};
use crate::mappings::event;

/// The disk stalls at one of so many requests.
const STALLS: usize = 3000;

/// How a broken `UNIT-1` shows.
pub(super) const IN_TWO_PLACES: &str = "UNIT-1: it is in two places";

/// A thread that is changing a page's mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Claim {
    thread: usize,
    /// No other thread may touch the page meanwhile.
    alone: bool,
}

/// What the program wrote.
#[derive(Debug)]
pub(super) struct Model {
    bytes: Vec<u8>,
    claims: Vec<Option<Claim>>,
}

impl Model {
    /// The bytes that a page should have.
    pub(super) fn page(&mut self, page: usize) -> &mut [u8] {
        &mut self.bytes[page * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// Whether `thread` may touch a page now.
    fn admits(&self, thread: usize, page: usize) -> bool {
        self.claims[page].is_none_or(|claim| !claim.alone || claim.thread == thread)
    }

    /// Whether only one thread may touch a page now.
    pub(super) fn is_alone(&self, page: usize) -> bool {
        self.claims[page].is_some_and(|claim| claim.alone)
    }
}

/// Figures that print nothing on standard error when the limit is passed.
struct Figures(Box<Stats>);

impl std::ops::Deref for Figures {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        &self.0
    }
}

impl StatsHome for Figures {
    fn over_limit(&self, _over: &OverLimit, _first: bool) {}
}

/// See the module.
#[derive(Debug)]
pub(super) struct World {
    pub(super) settings: Settings,
    pub(super) schedule: Arc<Schedule>,
    pub(super) space: Arc<Space>,
    pub(super) engine: Engine,
    pub(super) source: Arc<Source>,
    /// The backing, if there is one.
    pub(super) disk: Option<Arc<dyn Below>>,
    /// The areas, if it is them.
    pub(super) areas: Option<Arc<Ground>>,
    /// The accelerator, if the codec is one's.
    pub(super) accelerator: Option<Arc<Accelerator>>,
    /// The tree that the process is part of, if its limit is a share.
    pub(super) tree: Option<Tree>,
    model: Mutex<Model>,
    /// Threads of the program that are not done.
    pub(super) threads_left: AtomicUsize,
    /// 1 while a thread forks.
    pub(super) forking: AtomicUsize,
}

/// Pages that a thread has claimed, as long as this lives.
#[derive(Debug)]
pub(super) struct Claimed<'w> {
    world: &'w World,
    pages: std::ops::Range<usize>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        self.world.model().claims[self.pages.clone()].fill(None);
    }
}

type Backings = (Option<Arc<dyn Below>>, Option<Arc<Ground>>, Option<Box<dyn Backing>>);

/// What is below the engine: nothing, a disk that keeps objects, or areas.
fn backing(seed: u64, settings: &Settings, schedule: &Arc<Schedule>) -> Backings {
    let Some(spill) = settings.spill else { return (None, None, None) };
    let (schedule, random) = (Arc::clone(schedule), Random::new(seed, 12));
    let is_lasting = matches!(settings.damage, Some(Damage::Disk | Damage::Slots));
    let (refuses, outages) = (spill.refuses, spill.outages);
    let faults = Faults { refuses, outages, is_lasting, stalls: STALLS };
    if spill.areas {
        let sizes = (settings.config(0).object_max().bytes(), spill.bytes_max);
        // To empty an area takes memory.
        let drains = !settings.is_calm() && !is_lasting;
        let ground = Ground::new(schedule, random, sizes, (faults, drains));
        let ground = Arc::new(ground);
        let backing = Box::new(areas::Shared(Arc::clone(&ground)));
        return (Some(Arc::<Ground>::clone(&ground)), Some(ground), Some(backing));
    }
    let disk = Arc::new(Disk::new(schedule, random, spill.bytes_max, faults));
    (Some(Arc::<Disk>::clone(&disk)), None, Some(Box::new(Shared(disk))))
}

impl World {
    pub(super) fn new(seed: u64, settings: Settings, trace: bool) -> World {
        let schedule = Schedule::new(seed, settings.all_threads(), trace);
        let shape = (settings.pages, settings.cpus);
        let kernel = Random::new(seed, 2);
        let space =
            Space::new(Arc::clone(&schedule), kernel, settings.mode, settings.refusals, shape);
        const STREAMS: usize = 2;
        let devices = Random::new(seed, 18);
        let accelerator = settings.accelerator;
        let accelerator = accelerator.map(|busy| Accelerator::new(&schedule, busy, devices));
        let codecs = codecs(seed, &settings, accelerator.as_ref(), STREAMS);
        let wide = codec::wide(seed, &settings, STREAMS);
        // One of each is used from the start, and all may come to be used.
        let stream_bytes: usize = codecs.iter().chain(&wide).map(Zcomp::memory_bytes).sum();
        let need_bytes = settings.limit_bytes + (STREAMS * stream_bytes) as u64;
        let tree = settings.tree.then(|| Tree::new(&mut Random::new(seed, 6), need_bytes));
        let (tree, limit_bytes) = tree.map_or((None, need_bytes), |(tree, all)| (Some(tree), all));
        let config = settings.config(limit_bytes);
        let (refuses, pages_max) = (settings.pool_refuses, settings.pool_pages_max);
        let source = Arc::new(Source::new(Random::new(seed, 3), refuses, pages_max));
        let (disk, areas, backing) = backing(seed, &settings, &schedule);
        let parts = Parts {
            system: Box::new(Arc::clone(&space)),
            source: Arc::<Source>::clone(&source),
            codecs,
            crew: Crew::new(0),
            key: Key::new([0x5A; Key::BYTES]),
            backing,
            cpus: settings.cpus,
        };
        let engine = Engine::on(parts, config, Box::new(Figures(Box::default())));
        let engine = engine.expect("address space for the staging area");
        tree.iter().for_each(|tree| engine.hold_share(tree.member));
        wide.into_iter().for_each(|codec| engine.use_wide_units(codec));
        engine.writes().set(settings.spill.map(|spill| spill.budget).unwrap_or_default());
        let model = Model {
            bytes: vec![0; settings.pages * PAGE_BYTES],
            claims: vec![None; settings.pages],
        };
        World {
            schedule,
            space,
            engine,
            source,
            disk,
            areas,
            accelerator,
            tree,
            model: Mutex::new(model),
            threads_left: AtomicUsize::new(settings.threads),
            forking: AtomicUsize::new(0),
            settings,
        }
    }

    /// Flips a bit of a stored, compressed unit, if a randomly chosen folio has one.
    pub(super) fn flip(&self, random: &mut Random) {
        let Some(table) = self.engine.table.try_read() else { return };
        let address = self.space.address(random.below(self.settings.pages));
        let Some(folio) = table.known(address).and_then(|lock| lock.try_lock()) else { return };
        let stored = folio.stored.iter().filter_map(|index| folio.copies[index].as_ref());
        let object = stored.filter_map(|entry| self.engine.store.object(entry)).next();
        object.into_iter().for_each(|object| self.source.flip(object, random));
    }

    pub(super) fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims pages for the calling thread, if no thread has claimed any of them.
    pub(super) fn claim(&self, pages: std::ops::Range<usize>, alone: bool) -> Option<Claimed<'_>> {
        let mut model = self.model();
        let claims = &mut model.claims[pages.clone()];
        if claims.iter().any(Option::is_some) {
            return None;
        }
        claims.fill(Some(Claim { thread: schedule::me(), alone }));
        Some(Claimed { world: self, pages })
    }

    /// The model learns that the page at `address` reads as zeros.
    pub(super) fn forget(&self, address: usize) {
        let page = self.space.page(address);
        self.model().page(page).fill(0);
    }

    /// The model learns that a page moved.
    pub(super) fn follow(&self, from: usize, to: usize) {
        let (from, to) = (self.space.page(from), self.space.page(to));
        let mut model = self.model();
        let bytes = model.page(from).to_vec();
        model.page(to).copy_from_slice(&bytes);
        model.page(from).fill(0);
    }

    /// Touches a page, and waits for it if it is missing; `act` gets the page's bytes and the
    /// model's. False: the page may not be touched now.
    pub(super) fn touch(
        &self,
        page: usize,
        write: bool,
        mut act: impl FnMut(&mut [u8], &mut [u8]),
    ) -> bool {
        let address = self.space.address(page);
        let mut faulted = false;
        loop {
            schedule::point();
            if !self.model().admits(schedule::me(), page) {
                return false;
            }
            let access = self.space.touch(address, write, |bytes| {
                act(bytes, self.model().page(page));
            });
            match access {
                Access::Done => break,
                Access::Refused => return false,
                Access::Fault => self.fault(address),
            }
            faulted = true;
        }
        if faulted {
            self.check_touched(page);
        }
        self.schedule.progress();
        self.schedule.note(if write { "write" } else { "read" }, [page as u64, 0, 0]);
        true
    }

    /// A page was missing, and is not missing now: fails if the engine keeps it elsewhere too. The folio's
    /// lock is enough for this check, unless a change of a mapping waits.
    fn check_touched(&self, page: usize) {
        let address = self.space.address(page);
        let Some(table) = self.engine.table.try_read() else { return };
        let Some(folio) = table.known(address).and_then(|lock| lock.try_lock()) else { return };
        let waits = self.engine.mover.inbox.first();
        if self.model().is_alone(page) || waits.is_some_and(|waits| event::is_change(waits.message))
        {
            return;
        }
        let staged = folio.staged_units();
        let away = (staged | folio.stored).contains(self.engine.geometry().index(address));
        assert!(!(away && self.space.is_here(address)), "page {page:#x}: {IN_TWO_PLACES}");
    }

    /// The calling thread has touched a missing page: serves its fault, or waits for the handler.
    fn fault(&self, address: usize) {
        if self.settings.mode == Mode::Handler {
            return self.space.wait_for_page(address);
        }
        let thread = schedule::me();
        let served = self.engine.serves(address, self.schedule.now_ns())
            || self.engine.is_the_kernels(address);
        let may_touch = self.model().admits(thread, self.space.page(address));
        assert!(served || !may_touch || !self.space.is_mapped(address), "a fault is not served");
    }

    /// Reads a page and compares it with the model.
    pub(super) fn read(&self, page: usize) -> bool {
        self.touch(page, false, |found, expected| compare(page, found, expected))
    }

    /// Whether the program has ended.
    pub(super) fn is_over(&self) -> bool {
        self.engine.work.stopping.load(Relaxed)
    }
}

/// Fails if the bytes of a page differ from what was written.
#[track_caller]
pub(super) fn compare(page: usize, found: &[u8], expected: &[u8]) {
    if found != expected {
        let at = found.iter().zip(expected).position(|(found, expected)| found != expected);
        let at = at.expect("they differ");
        panic!(
            "page {page:#x}, byte {at}: {:02x?} is there, {:02x?} was written",
            &found[at..(at + 8).min(PAGE_BYTES)],
            &expected[at..(at + 8).min(PAGE_BYTES)]
        );
    }
}
