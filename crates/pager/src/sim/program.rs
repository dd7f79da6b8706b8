//! A thread of the simulated program: writes, reads and compares, and changes mappings.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::asked_stall;

use super::random::{Random, mixed};
use super::schedule;
use super::settings::{Damage, Storm};
use super::world::{Claimed, World, compare};

/// So many reads here and there come before the limit falls for the last time.
const READS_BEFORE_THE_FALL: usize = 1000;

/// All of memory goes to the disk within so many turns of the background thread: 600 were enough for 10 MiB.
const TURNS_FOR_ALL: usize = 4000;

/// Before some forks others may run at so many points while the backing is at rest.
const POINTS_AT_REST: usize = 24;

/// A thread that forks may come so late: longer than nothing is fetched for it.
const LATE_NS: u64 = 30_000_000;

/// A state of pages that lasts for some steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    ReadOnly,
    Pinned,
}

/// Pages in such a state; no other thread changes their mapping meanwhile.
struct Kept<'w> {
    kind: Kind,
    pages: Range<usize>,
    steps_left: usize,
    _claimed: Claimed<'w>,
}

/// One thread.
pub(super) struct Program<'w> {
    pub(super) world: &'w World,
    pub(super) random: Random,
    /// Pages that are touched often.
    hot: Range<usize>,
    kept: Vec<Kept<'w>>,
}

impl<'w> Program<'w> {
    pub(super) fn new(world: &'w World, seed: u64, thread: usize) -> Program<'w> {
        let random = Random::new(seed, 16 + thread as u64);
        Program { world, random, hot: 0..16, kept: Vec::new() }
    }

    /// The whole life of the thread. The last thread of the program reads all memory, and unmaps
    /// it.
    pub(super) fn live(&mut self, first: bool) {
        if first {
            self.begin();
        }
        for _ in 0..self.world.settings.steps {
            self.step();
            self.let_go();
        }
        while !self.kept.is_empty() {
            self.let_go();
        }
        if self.world.threads_left.fetch_sub(1, Relaxed) == 1 {
            self.end();
        }
    }

    /// Maps the memory that the program begins with.
    fn begin(&mut self) {
        let grain = self.world.settings.grain();
        let pages = self.world.settings.pages_first.next_multiple_of(grain);
        let at = self.random.below((self.world.settings.pages - pages) / grain) * grain;
        match self.world.settings.early {
            true => self.adopt_written(at..at + pages),
            false => self.adopt_new(at..at + pages),
        }
    }

    /// Maps and writes a range, and has the engine adopt it. No fault follows, and the limit is held all the same.
    fn adopt_written(&mut self, pages: Range<usize>) {
        let Some((claimed, start, end)) = self.map_free(&pages) else { return };
        for page in pages.clone() {
            // Neither zeros nor one word: they take no memory once they are stored.
            let seed = self.random.next() | 2;
            assert!(self.write_by(seed, page), "it is mapped");
        }
        self.world.engine.adopt(start, end).expect("the kernel refuses nothing");
        drop(claimed);
        self.world.check_limit_within(TURNS_FOR_ALL);
    }

    fn step(&mut self) {
        if self.world.settings.damage == Some(Damage::Bits) {
            self.world.flip(&mut self.random);
        }
        if let Some(storm) = self.world.settings.storm.filter(|_| self.random.one_in(2)) {
            return self.step_of(storm);
        }
        let run = self.random.of(&[1, 4, 16, 64]);
        match self.random.below(40) {
            0..5 => self.each(run, Program::write),
            5..10 => self.each(run, Program::read),
            10 => self.each_falling(run),
            11..13 => self.each(run, Program::stamp),
            13 => self.each(run, Program::rewrite),
            14..18 => (0..run).for_each(|_| self.anywhere(Program::write)),
            18..23 => (0..run).for_each(|_| self.anywhere(Program::read)),
            23..29 => (0..run).for_each(|_| self.in_hot_set()),
            29 => self.scan(),
            30 => self.move_hot_set(),
            31 => self.world.engine.make_room(self.random.below(1 << 20)),
            32 => self.look_at_staging(),
            33 => self.audit_or_sample(),
            34 if self.random.one_in(4) => self.world.space.end_child(),
            34 if self.world.settings.fixed => self.keep(),
            35 if self.world.settings.fixed => self.fork(),
            36.. if self.world.settings.changes => self.change_mappings(),
            _ => self.discard(),
        }
    }

    fn step_of(&mut self, storm: Storm) {
        match (storm, self.random.below(4)) {
            (Storm::Forks, 0) => self.fork(),
            (Storm::Mappings, 0) => self.each(64, Program::write),
            (Storm::Mappings, 1) => self.relocate_behind(),
            (_, 2) => self.unmap_behind(),
            _ => self.discard_behind(),
        }
    }

    fn write(&mut self, page: usize) -> bool {
        let seed = self.random.next();
        self.write_by(seed, page)
    }

    fn write_by(&mut self, seed: u64, page: usize) -> bool {
        let noise = self.random.one_in(self.world.settings.noise);
        self.world.touch(page, true, |bytes, model| {
            compare(page, bytes, model);
            fill(bytes, seed, noise);
            model.copy_from_slice(bytes);
        })
    }

    fn read(&mut self, page: usize) -> bool {
        self.world.read(page)
    }

    /// Changes one word of a page, whose unit may have a copy in the store.
    fn stamp(&mut self, page: usize) -> bool {
        let (at, word) = (self.random.below(PAGE_BYTES / 8) * 8, self.random.next());
        self.world.touch(page, true, |bytes, model| {
            compare(page, bytes, model);
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
            model.copy_from_slice(bytes);
        })
    }

    /// Writes a page without changing its bytes.
    fn rewrite(&mut self, page: usize) -> bool {
        self.world.touch(page, true, |bytes, model| compare(page, bytes, model))
    }

    /// Calls `act` for adjacent pages in rising order, while they can be touched.
    fn each(&mut self, count: usize, act: fn(&mut Self, usize) -> bool) {
        let first = self.some_page();
        for page in first..(first + count).min(self.world.settings.pages) {
            if !act(self, page) {
                return;
            }
        }
    }

    fn each_falling(&mut self, count: usize) {
        let last = self.some_page();
        for page in (last.saturating_sub(count)..=last).rev() {
            if !self.read(page) {
                return;
            }
        }
    }

    /// Reads an eighth of all memory in rising order: a scan.
    fn scan(&mut self) {
        let pages = self.world.settings.pages;
        let first = self.some_page();
        (first..pages.min(first + pages / 8)).all(|page| self.read(page));
    }

    fn anywhere(&mut self, act: fn(&mut Self, usize) -> bool) {
        let page = self.some_page();
        act(self, page);
    }

    fn in_hot_set(&mut self) {
        let page = self.hot.start + self.random.below(self.hot.len());
        match self.random.below(3) {
            0 => self.write(page),
            1 => self.stamp(page),
            _ => self.read(page),
        };
    }

    fn move_hot_set(&mut self) {
        let first = self.some_page();
        let length = self.random.of(&[8, 50, 200]);
        self.hot = first..(first + length).min(self.world.settings.pages);
    }

    /// A page of memory that the engine is likely to move soon: of a folio that goes out next, or of a
    /// staged one.
    pub(super) fn page_on_its_way(&mut self) -> Option<usize> {
        let (engine, space) = (&self.world.engine, &self.world.space);
        if self.random.one_in(2) {
            let (mut next, most) = (Vec::new(), 1 + self.random.below(8));
            engine.replacement.retain(|base| {
                next.extend((next.len() < most).then_some(base));
                true
            });
            let last = next.last().filter(|base| space.is_mapped(**base));
            return last.map(|base| space.page(*base));
        }
        let table = engine.table.try_read()?;
        (0..16).find_map(|_| {
            let page = self.random.below(self.world.settings.pages);
            let folio = table.known(space.address(page)).and_then(|lock| lock.try_lock())?;
            folio.staged.is_some().then_some(page)
        })
    }

    /// A page that is mapped, if one is found soon.
    pub(super) fn some_page(&mut self) -> usize {
        let pages = self.world.settings.pages;
        let mut page = 0;
        for _ in 0..8 {
            page = self.random.below(pages);
            if self.world.space.is_mapped(self.world.space.address(page)) {
                break;
            }
        }
        page
    }

    /// Reads a page of the staging area, as a program does that reads all of its memory.
    fn look_at_staging(&mut self) {
        let Some(at) = self.world.space.look_at_staging(self.random.below(1 << 30)) else { return };
        if self.world.settings.mode == crate::config::Mode::Inline {
            let now = self.world.schedule.now_ns();
            assert!(self.world.engine.serves(at, now), "a stranger is not served");
        }
    }

    fn audit_or_sample(&mut self) {
        if self.random.one_in(2) {
            self.world.audit();
        } else if self.world.settings.proactive {
            self.ask();
        } else {
            self.world.engine.sample();
        }
    }

    /// Asks for another limit, and for a share of time to be waited.
    fn ask(&mut self) {
        let stats = self.world.engine.stats();
        let least = self.world.engine.config().limit_bytes;
        let limit = least + self.random.below(4 << 20) as u64;
        stats.limit_asked.store(limit, Relaxed);
        stats.stall_asked.store(asked_stall(self.random.of(&[0, 10_000, 500_000])), Relaxed);
        let percent = 1 + self.random.below(100) as u64;
        self.random
            .of(&[&stats.max_pool_percent_asked, &stats.accept_threshold_percent_asked])
            .store(percent, Relaxed);
        self.world.engine.sample();
    }

    /// For some steps, makes pages read-only or lets a device write to them.
    fn keep(&mut self) {
        let first = self.some_page();
        let pages = first..(first + self.random.of(&[1, 3, 30])).min(self.world.settings.pages);
        let Some(claimed) = self.world.claim(pages.clone(), false) else { return };
        let kind = self.random.of(&[Kind::ReadOnly, Kind::Pinned]);
        self.set(kind, pages.clone(), true);
        let steps_left = self.random.below(20);
        self.kept.push(Kept { kind, pages, steps_left, _claimed: claimed });
    }

    fn set(&mut self, kind: Kind, pages: Range<usize>, on: bool) {
        let space = &self.world.space;
        match kind {
            Kind::ReadOnly => {
                space.protect(space.address(pages.start), pages.len() * PAGE_BYTES, on)
            }
            Kind::Pinned => pages.for_each(|page| {
                // A device pins a page of the program's own, which a write makes sure of.
                let there = !on || self.world.touch(page, true, |_, _| ());
                if there {
                    space.pin(space.address(page), on);
                }
            }),
        }
    }

    /// Ends the states that have lasted long enough.
    fn let_go(&mut self) {
        for mut kept in std::mem::take(&mut self.kept) {
            if kept.steps_left == 0 {
                self.set(kept.kind, kept.pages.clone(), false);
            } else {
                kept.steps_left -= 1;
                self.kept.push(kept);
            }
        }
    }

    /// Stops all movement, and makes a child, which shares pages with the program.
    fn fork(&mut self) {
        if self.world.forking.swap(1, Relaxed) == 1 {
            return;
        }
        let engine = &self.world.engine;
        let mut quiet = loop {
            engine.settle_for_fork();
            let rest = |rests| self.world.disk.iter().for_each(|disk| disk.rest(rests));
            rest(true);
            match self.random.of(&[1, POINTS_AT_REST, usize::MAX]) {
                // The thread gets no CPU for so long that faults fetch again.
                usize::MAX => schedule::wait("a CPU".to_owned(), Some(LATE_NS)),
                points => (0..points).for_each(|_| schedule::point()),
            }
            rest(false);
            if let Some(quiet) = engine.quiet(crate::spill::Lent::default()) {
                break quiet;
            }
        };
        schedule::point();
        let staged = engine.replacement.staged_folios();
        assert_eq!(staged, 0, "a folio is staged: a child would not have it");
        assert_eq!(engine.store.in_flight().0, 0, "a child would wait for ever for a request");
        let waiting = self.world.disk.as_ref().map_or(0, |disk| disk.waiting());
        assert_eq!(waiting, 0, "SPILL-2: a child would find a lock of the backing's held");
        for page in 0..self.world.settings.pages {
            let at = self.world.space.address(page);
            let mut model = self.world.model();
            let known = self.world.space.is_mapped(at) && !model.is_alone(page);
            if known && quiet.is_resident(at) && !self.world.space.is_here(at) {
                let zeros = model.page(page).iter().all(|byte| *byte == 0);
                assert!(zeros, "page {page:#x}: a child would read zeros");
            }
        }
        self.world.disk.iter().for_each(|disk| disk.share());
        self.world.space.share_all();
        schedule::point();
        drop(quiet);
        self.world.forking.store(0, Relaxed);
    }

    /// The last thread of the program: compares all memory, and unmaps it.
    fn end(&mut self) {
        let world = self.world;
        for page in 0..world.settings.pages {
            world.read(page);
        }
        world.audit();
        if world.settings.tree && world.settings.is_calm() {
            // What goes out from here on is clean and scattered: reclaim in the background pays least.
            (0..READS_BEFORE_THE_FALL).for_each(|_| self.anywhere(Program::read));
        }
        world.check_limit();
        world.check_budget();
        self.unmap_all();
        world.audit();
        world.check_empty();
        world.engine.work.stopping.store(true, Relaxed);
    }
}

/// Fills a page by a seed: with zeros, with one word repeated, with bytes that compress to an
/// eighth, or with noise.
fn fill(bytes: &mut [u8], seed: u64, noise: bool) {
    let fresh = match seed % 8 {
        0 => 0,
        1 => 8,
        _ if noise => PAGE_BYTES,
        _ => PAGE_BYTES / 8,
    };
    for (index, word) in bytes[..fresh].chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&mixed(seed.wrapping_add((index as u64) << 20)).to_le_bytes());
    }
    let (first, rest) = bytes.split_at_mut(fresh);
    match first.len() {
        0 => rest.fill(0),
        length => rest.chunks_exact_mut(length).for_each(|part| part.copy_from_slice(first)),
    }
}
