//! An inline engine on the real kernel, with a backing in memory.

use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use zfolio_core::budget::{Period, WriteBudget};
use zfolio_core::stats::Stats;
use zfolio_core::store::backing::memory::Memory;
use zfolio_core::store::backing::{Completed, Completion, Failure, Location, Request};
use zfolio_core::store::{Backing, Key};
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::Zcomp;
use zfolio_core::zsmalloc::PageSource;
use zfolio_sys::Errno;
use zfolio_sys::map::Reservation;
use zfolio_workers::Crew;

use crate::config::{Config, Mode};
use crate::engine::{Engine, Parts};
use crate::folio::Table;
use crate::fork::Way;
use crate::inline;
use crate::pool_mappings::PoolMappings;
use crate::reclaim::{By, Reclaimed};
use crate::spill::{Away, BATCH, Door, Place, Places, Sender};
use crate::system::Linux;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Managed memory in units of a page, each filled by a seed of its own; most pages do not compress.
struct Filled<'e> {
    engine: &'e Engine,
    space: Reservation,
    seeds: Vec<u64>,
}

fn contents(seed: u64) -> Vec<u8> {
    let mut page = Random::new(seed).bytes(PAGE);
    if seed % 5 == 0 {
        page[PAGE / 8..].fill(0);
    }
    page
}

/// An engine with its background thread and a backing, until it is ended.
struct Running {
    engine: &'static Engine,
    served: Option<inline::Registered>,
    background: std::thread::JoinHandle<()>,
}

impl Running {
    fn start(limit: usize, backing_bytes: usize) -> Running {
        let backing = Box::new(Memory::new(backing_bytes));
        let engine = Engine::spilling_for_test(limit as u64, Some(backing));
        let engine: &'static Engine = Box::leak(Box::new(engine));
        let served = inline::register(engine);
        assert!(served.is_some(), "few engines");
        let background = std::thread::spawn(|| engine.reclaim_in_background());
        Running { engine, served, background }
    }

    fn filled(&self, bytes: usize) -> Filled<'static> {
        let space = self.engine.adopted(bytes, |_| ());
        Filled { engine: self.engine, space, seeds: vec![0; bytes / PAGE] }
    }

    fn of(&self, name: &str) -> u64 {
        self.engine.figures().get(name).expect("a figure")
    }

    /// Waits until the background thread has brought something about; it takes a turn each 20 ms.
    fn await_that(&self, what: &str, is_so: impl Fn() -> bool) {
        for _ in 0..3_000 {
            if is_so() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{what}: {:?}", self.engine.figures());
    }

    fn end(self, filled: &Filled<'_>) {
        self.engine.unmap_adopted(&filled.space);
        self.engine.stop();
        self.background.join().expect("it ends");
        drop(self.served);
    }
}

/// Goal: a pool that passes its part of the limit comes down to the threshold, and nothing is written before. Method:
/// data that fits when compressed; then a part is asked for that is less than it takes.
#[test]
fn a_pool_comes_down_to_its_part_of_the_limit() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes) = (16 * MIB, 48 * MIB);
    let running = Running::start(limit, 2 * bytes);
    let mut filled = running.filled(bytes);
    let pages = filled.seeds.len();
    // Seeds that are multiples of 5 make pages of which an eighth is noise.
    (0..pages).for_each(|page| filled.write(page, 5 * (page as u64 + 1)));
    running.await_that("what is compressed", || running.of("pool_bytes") > 4 * MIB as u64);
    assert_eq!([running.of("pool_limit_hit"), running.of("written_back_units")], [0, 0]);
    let stats = running.engine.stats();
    stats.accept_threshold_percent_asked.store(80, Relaxed);
    stats.max_pool_percent_asked.store(20, Relaxed);
    // Empty zspages do not count: with this limit 256 KiB, and a 128th of the pool.
    let accept = (limit / 5 * 4 / 5 + (320 << 10)) as u64;
    running.await_that("a smaller pool", || {
        running.of("pool_limit_hit") > 0 && running.of("pool_bytes") <= accept
    });
    assert!(running.of("written_back_units") > 0);
    assert_eq!([running.of("max_pool_percent"), running.of("accept_threshold_percent")], [20, 80]);
    (0..pages).for_each(|page| filled.check(page));
    running.end(&filled);
}

/// Goal: what a program still uses comes back from the disk for good, once memory has room for it. Method: a pool that
/// may take little, so that much is written; then a larger limit, and pages are read at random.
#[test]
fn what_is_read_alone_leaves_the_disk_if_memory_has_room_for_it() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let bytes = 48 * MIB;
    let running = Running::start(16 * MIB, 2 * bytes);
    let mut filled = running.filled(bytes);
    let pages = filled.seeds.len();
    running.engine.set_max_pool_percent(10);
    (0..pages).for_each(|page| filled.write(page, 5 * (page as u64 + 1)));
    running.await_that("much on the disk", || running.of("spilled_units") > 1000);
    let before = running.of("spilled_units");
    running.engine.stats().limit_asked.store(4 * bytes as u64, Relaxed);
    running.await_that("a larger limit", || running.of("limit_bytes") == 4 * bytes as u64);
    let mut random = Random::new(seed());
    (0..pages).for_each(|_| filled.check(random.below(pages)));
    // Some are read together, as walks, and keep their places on the disk.
    running.await_that("less on the disk", || running.of("spilled_units") < before / 2);
    (0..pages).for_each(|page| filled.check(page));
    running.end(&filled);
}

/// Goal: what is not used goes to the disk, so that what is used has its memory, and every byte is there. Method: data
/// that fits when compressed, of which a half is used at random.
#[test]
fn what_is_not_used_goes_to_the_disk() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let bytes = 48 * MIB;
    let running = Running::start(16 * MIB, 2 * bytes);
    let mut filled = running.filled(bytes);
    let pages = filled.seeds.len();
    (0..pages).for_each(|page| filled.write(page, 5 * (page as u64 + 1)));
    let (mut random, mut touches) = (Random::new(seed()), 0);
    // A few seconds are needed.
    while running.of("written_back_cold") < 256 {
        filled.check(pages / 2 + random.below(pages / 2));
        touches += 1;
        assert!(touches < 20_000_000, "{:?}", running.engine.figures());
    }
    running.await_that("what is on the disk", || running.of("spilled_units") > 0);
    (0..pages).for_each(|page| filled.check(page));
    running.end(&filled);
}

/// Goal: nothing is written while compressing holds the limit, also where a fault has to do that alone. Method: data
/// that fits when compressed, no background thread, and other memory that grows by a MiB at once, several times.
#[test]
fn a_fault_compresses_before_it_writes() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes) = (16 * MIB, 32 * MIB);
    let backing = Box::new(Memory::new(2 * bytes));
    let engine = Box::leak(Box::new(Engine::spilling_for_test(limit as u64, Some(backing))));
    let engine: &'static Engine = engine;
    let served = inline::register(engine).expect("few engines");
    let space = engine.adopted(bytes, |_| ());
    let mut filled = Filled { engine, space, seeds: vec![0; bytes / PAGE] };
    let pages = filled.seeds.len();
    (0..pages).for_each(|page| filled.write(page, 5 * (page as u64 + 1)));
    let mut random = Random::new(seed());
    for more in 1..=4 {
        engine.charge.set_streams(engine.store.stream_bytes() + more * MIB);
        assert!(engine.below_limit() < 0, "a MiB is more than the reserve");
        (0..100).for_each(|_| filled.check(random.below(pages)));
        assert!(engine.below_limit() >= 0);
    }
    engine.sample();
    assert_eq!(engine.figures().written_back_units.load(Relaxed), 0);
    (0..pages).for_each(|page| filled.check(page));
    engine.unmap_adopted(&filled.space);
    drop(served);
}

/// Goal: where memory that cannot be moved passes the limit by far, a pool that is small beside that stays in memory,
/// and one that is not does not. Method: four times the limit that is read-only; then data that compresses, then noise.
#[test]
fn a_small_pool_stays_where_the_limit_cannot_be_held() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes) = (16 * MIB, 32 * MIB);
    let running = Running::start(limit, 2 * bytes);
    let read_only = running.engine.adopted(4 * limit, |bytes| {
        bytes.fill(1);
        // SAFETY: only the kernel writes to it from now on.
        #[allow(unsafe_code, reason = "what a program does")]
        let done =
            unsafe { libc::mprotect(bytes.as_mut_ptr().cast(), bytes.len(), libc::PROT_READ) };
        assert_eq!(done, 0);
    });
    let mut filled = running.filled(bytes);
    let pages = filled.seeds.len();
    (0..pages).for_each(|page| filled.write(page, 5 * (page as u64 + 1)));
    let mut random = Random::new(seed());
    (0..2 * pages).for_each(|_| filled.check(random.below(pages)));
    running.engine.sample();
    let faults = running.of("faults_stored") + running.of("faults_disk");
    assert!(faults > pages as u64, "little stays resident");
    // What is hardly used may go, in the time that this takes on a busy machine.
    assert!(running.of("written_back_units") <= running.of("written_back_cold"));

    (0..pages).for_each(|page| filled.write(page, 5 * page as u64 + 1));
    let excess = (4 * limit) as u64;
    running.await_that("less of the pool", || running.of("pool_bytes") < excess / 3);
    assert!(running.of("written_back_units") > 0);
    (0..pages).for_each(|page| filled.check(page));
    running.engine.unmap_adopted(&read_only);
    running.end(&filled);
}

/// Goal: the limit comes to be held where a program was faster than the engine's start, and then waits for something
/// else. Method: noise, eight times the limit, all resident when it is adopted; no fault follows.
#[test]
fn what_was_there_before_the_engine_goes_to_the_disk() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes) = (8 * MIB, 64 * MIB);
    let running = Running::start(limit, 2 * bytes);
    let seeds: Vec<u64> = (0..bytes / PAGE).map(|page| 5 * page as u64 + 1).collect();
    let space = running.engine.adopted(bytes, |memory| {
        let pages = memory.chunks_exact_mut(PAGE).zip(&seeds);
        pages.for_each(|(page, seed)| page.copy_from_slice(&contents(*seed)));
    });
    let filled = Filled { engine: running.engine, space, seeds };
    running.await_that("the limit is held", || running.engine.below_limit() >= 0);
    (0..filled.seeds.len()).for_each(|page| filled.check(page));
    running.end(&filled);
}

/// Goal: nothing is written once a budget is used up, the limit is passed meanwhile, and no byte is lost; with another
/// budget the limit holds again. Method: noise, four times the limit, and a budget of less than that.
#[test]
fn a_used_up_budget_stops_writing() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes, budget) = (8 * MIB, 32 * MIB, 6 * MIB as u64);
    let running = Running::start(limit, 2 * bytes);
    let allowed = WriteBudget::new(budget, Period::Run).expect("a budget");
    running.engine.set_write_budget(allowed);
    let mut filled = running.filled(bytes);
    let pages = filled.seeds.len();
    (0..pages).for_each(|page| filled.write(page, 5 * page as u64 + 1));
    running.engine.sample();
    assert_eq!(running.of("write_budget_used_up"), 1);
    assert_eq!([running.of("write_budget_bytes"), running.of("write_budget_s")], [budget, 0]);
    let written = running.engine.bytes_written();
    // Each of two threads may have begun a batch.
    assert!(written >= budget && written <= budget + (2 * BATCH * 16) as u64 * 1024, "{written}");
    assert!(running.of("over_limit") > 0);
    (0..pages).for_each(|page| filled.check(page));
    running.engine.stats().write_budget_asked.store(WriteBudget::NONE.to_asked(), Relaxed);
    running.await_that("the limit holds again", || running.engine.below_limit() >= 0);
    assert!(running.engine.bytes_written() > written);
    (0..pages).for_each(|page| filled.check(page));
    running.end(&filled);
}

impl Filled<'_> {
    fn at(&self, page: usize) -> NonNull<u8> {
        let base = self.space.base();
        assert!(page < self.seeds.len());
        // SAFETY: inside the mapping.
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            base.add(page * PAGE)
        }
    }

    fn write(&mut self, page: usize, seed: u64) {
        self.seeds[page] = seed;
        let (from, to) = (contents(seed), self.at(page).as_ptr());
        // SAFETY: a page of the mapping, which is ours alone.
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), to, PAGE);
        }
    }

    fn check(&self, page: usize) {
        let mut found = vec![0; PAGE];
        // SAFETY: as in write().
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(page).as_ptr(), found.as_mut_ptr(), PAGE);
        }
        assert!(found == contents(self.seeds[page]), "page {page}");
    }

    fn check_limit(&self) {
        let (charge, limit) = (self.engine.charge_bytes(), self.engine.limit_bytes());
        // What is fetched is in the pool for a moment, beside what it displaces.
        assert!(charge <= limit + limit / 32, "{charge} of {limit}");
    }
}

/// Goal: with a backing the limit holds for data that does not compress, and every byte is there. Method: four times
/// the limit of it, written, read in order and at random, and changed here and there.
#[test]
fn a_limit_holds_for_data_that_does_not_compress() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes, seed) = (8 * MIB, 32 * MIB, seed());
    let backing = Box::new(Memory::new(2 * bytes));
    let engine = Box::leak(Box::new(Engine::spilling_for_test(limit as u64, Some(backing))));
    let engine: &Engine = engine;
    let served = inline::register(engine).expect("few engines");
    let background = std::thread::spawn(|| engine.reclaim_in_background());
    let space = engine.adopted(bytes, |_| ());
    let mut filled = Filled { engine, space, seeds: vec![0; bytes / PAGE] };
    let pages = filled.seeds.len();
    for page in 0..pages {
        filled.write(page, seed + page as u64 + 1);
        if page % 64 == 0 {
            filled.check_limit();
        }
    }
    (0..pages).for_each(|page| filled.check(page));
    let mut random = Random::new(seed);
    for step in 0..20_000_u64 {
        let page = random.below(pages);
        filled.check(page);
        if step % 8 == 0 {
            filled.write(page, seed + pages as u64 + step);
        }
        if step % 64 == 0 {
            filled.check_limit();
        }
    }
    engine.sample();
    let figures = engine.figures();
    let of = |name: &str| figures.get(name).expect("a figure");
    println!("{figures:?}");
    assert!(of("written_back_units") > 4000 && of("read_back_units") > 8000);
    assert!(of("written_back_clean") > of("written_back_units"), "most go back as they were");

    let over = of("over_limit_bytes_max");
    assert!(over <= limit as u64 / 32, "the limit was passed by {over}");
    (0..pages).for_each(|page| filled.check(page));
    engine.unmap_adopted(&filled.space);
    assert_eq!(figures.stored_units.load(Relaxed), 0);
    engine.stop();
    background.join().expect("it ends");
    drop(served);
}

/// Managed memory that does not compress.
fn noise(engine: &Engine, bytes: usize) -> Reservation {
    engine.adopted(bytes, |memory| {
        let pages = memory.chunks_exact_mut(PAGE).zip(1..);
        pages.for_each(|(page, number)| page.copy_from_slice(&contents(5 * number + 1)));
    })
}

/// Whether memory has what `noise` wrote.
fn is_noise(space: &Reservation) -> bool {
    let at = std::ptr::with_exposed_provenance::<u8>(space.address());
    #[allow(unsafe_code, reason = "what a program does")]
    // SAFETY: the mapping is there as long as `space`, and nobody writes to it.
    let memory = unsafe { std::slice::from_raw_parts(at, space.bytes()) };
    let mut pages = memory.chunks_exact(PAGE).zip(1..);
    pages.all(|(page, number)| page == contents(5 * number + 1))
}

/// Memory for a pool, of which there is no more once it is `dry`.
#[derive(Debug)]
struct Bounded {
    inner: PoolMappings,
    is_dry: AtomicBool,
}

#[allow(unsafe_code, reason = "the contract of PageSource")]
// SAFETY: every call goes to the one inner source, which keeps the contract, or hands out nothing.
unsafe impl PageSource for Bounded {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        if self.is_dry.load(Relaxed) { None } else { self.inner.take(pages) }
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise, handed on: `run` came from this source, and so from the inner one.
        unsafe { self.inner.give_back(run, pages) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        // SAFETY: as above.
        unsafe { self.inner.discard(start, pages) }
    }
}

/// An engine that has opened no file of its own, as a child of `fork` which reads its parent's; and its pool's memory.
fn without_a_file() -> (Engine, Arc<Bounded>) {
    let config = Config::for_test(16 * MIB as u64);
    let inner = PoolMappings::default().with_chunk();
    let source = Arc::new(Bounded { inner, is_dry: AtomicBool::new(false) });
    let codecs = config.algorithm.codecs().into_iter();
    let codecs = codecs.map(|params| Zcomp::new(params, config.unit, 2).unwrap());
    let parts = Parts {
        system: Box::new(Linux::open(config.mode).unwrap()),
        source: Arc::<Bounded>::clone(&source),
        codecs: codecs.collect(),
        crew: Crew::new(0),
        key: Key::new([3; Key::BYTES]),
        backing: Some(Box::new(Memory::new(64 * MIB))),
        cpus: 2,
    };
    let (unit_bytes, limit_bytes) = (config.object_max().bytes(), config.limit_bytes);
    let stats = Box::new(Box::<Stats>::default());
    let mut engine = Engine::on(parts, config, stats).unwrap();
    let paths = vec![(PathBuf::from("/nowhere"), 0)];
    let places = Places { paths, ..Places::default() };
    engine.work.place = Some(Place::new(&places, limit_bytes, unit_bytes, Sender::Caller).unwrap());
    (engine, source)
}

/// Has all that is managed leave for the disk, and the pool's memory end. Returns what is away.
fn send_away(engine: &Engine, table: &Table, source: &Bounded, space: &Reservation) -> Vec<Away> {
    while engine.reclaim_one(table, 0, By::Background) != Reclaimed::Nothing {}
    while engine.store.write_back(usize::MAX).written > 0 {}
    assert_eq!(engine.store.pool_stats().objects, 0);
    source.is_dry.store(true, Relaxed);
    let mut away = Vec::new();
    engine.note_away(table, (space.address(), space.address() + space.bytes()), &mut away);
    away
}

/// Has these units fetched, for which the pool has no room.
fn fetch_without_room(engine: &Engine, table: &Table, units: &[Away]) {
    engine.fetch_all(table, units);
    while engine.store.poll() > 0 {}
    assert!(engine.store.lacks_room(), "there was room");
}

/// A regression: where a child of `fork` had no file of its own yet, and its pool no memory for what it read of its
/// parent's, nobody made room, and it waited for ever. Goal: it asks for a file, and room is made as where nothing can
/// be written; also by who waits with locks held. Method: all of it is away when the pool's memory ends.
#[test]
fn a_child_without_a_file_makes_room_for_what_comes_back() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (engine, source) = without_a_file();
    let space = noise(&engine, 4 * MIB);
    let table = engine.table.read();
    let away = send_away(&engine, &table, &source, &space);
    assert_eq!(engine.door(), Door::Soon);
    fetch_without_room(&engine, &table, &away);
    let spilling = &engine.work.spilling;
    let tries = || spilling.without_room.load(Relaxed);
    engine.spill_ahead(&table);
    assert!(spilling.wants_place.load(Relaxed) && !engine.store.lacks_room());
    assert_eq!(tries(), 1, "there is no copy to drop");

    let unit = away.iter().find(|unit| engine.store.is_away(unit.ticket)).unwrap();
    let is_tried = std::thread::scope(|scope| {
        scope.spawn(|| {
            let table = engine.table.read();
            let folio = table.known(unit.base).unwrap().lock();
            engine.wait_holding_locks(&table, &folio, unit.base);
        });
        let is_tried = (0..3_000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            tries() > 1
        });
        source.is_dry.store(false, Relaxed);
        is_tried
    });
    assert!(is_tried, "who waits with locks held makes no room");
    drop(table);
    engine.unmap_adopted(&space);
}

/// A regression: a child of `fork` without an engine read a unit for which its pool had no memory again and again, for
/// ever. Goal: it gets all of it where room can be made, and is told where none can. Method: the pool's memory ends,
/// and it is full of units whose folios have others on the disk, the first of them too. If the disk has the units in
/// the pool too, these leave.
#[test]
fn a_child_without_an_engine_makes_room_or_is_told_that_there_is_none() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    assert_eq!(returned_to_a_child(true), (true, Ok(())));
    assert_eq!(returned_to_a_child(false), (true, Err(Errno::NOMEM)));
}

/// Whether it ended, and how. `keeps`: the disk has what is in the pool, too.
fn returned_to_a_child(keeps: bool) -> (bool, Result<(), Errno>) {
    let (engine, source) = without_a_file();
    let space = noise(&engine, 4 * MIB);
    let table = engine.table.read();
    let away = send_away(&engine, &table, &source, &space);
    let folios = away.chunks(engine.geometry().units());
    let others: Vec<Away> = folios.flat_map(|folio| folio[1..].iter().copied()).collect();
    fetch_without_room(&engine, &table, &others);
    let all = (space.address(), space.address() + space.bytes());
    for (_, lock) in table.known_folios(all.0, all.1).filter(|_| !keeps) {
        lock.lock().copies.iter().flatten().for_each(|copy| engine.store.give_up_backing(copy));
    }
    drop(table);
    // No page is missing for the kernel any more: it may write where it likes, as in a child.
    engine.mover.system.unregister(space.address(), space.bytes()).unwrap();
    let answer = std::thread::scope(|scope| {
        let child = scope.spawn(|| {
            engine.return_parts(&mut engine.table.write(), &[all], &mut Way::open(&engine))
        });
        let has_ended = (0..1_000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            child.is_finished()
        });
        source.is_dry.store(false, Relaxed);
        (has_ended, child.join().unwrap())
    });
    if answer.1.is_ok() {
        assert!(is_noise(&space), "other bytes came back");
    }
    engine.unmap_adopted(&space);
    answer
}

/// A backing that ends nothing while it holds, and whose writes can fail.
#[derive(Debug)]
struct Slow {
    memory: Memory,
    holds: AtomicBool,
    fails: AtomicBool,
}

impl Backing for Slow {
    fn submit(&self, requests: &mut [Request<'_>]) {
        self.memory.submit(requests);
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        if self.holds.load(Relaxed) {
            return;
        }
        self.memory.poll(&mut |Completion { token, result }| {
            let fails = matches!(result, Ok(Completed::Written(_))) && self.fails.load(Relaxed);
            let result = if fails { Err(Failure::Transient) } else { result };
            each(Completion { token, result });
        });
    }

    fn discard(&self, location: Location, length: usize) {
        self.memory.discard(location, length);
    }
}

/// A regression: each process of a run knew only what it had under way itself, and each wrote all that was left of a
/// budget which they share. Goal: what is under way is taken from the budget, and comes back if it is not written.
/// Method: writes that are held back, then fail, and then succeed.
#[test]
fn what_is_under_way_is_taken_from_the_budget() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let budget = 8 * MIB as u64;
    let [holds, fails] = [true, false].map(AtomicBool::new);
    let slow = Arc::new(Slow { memory: Memory::new(64 * MIB), holds, fails });
    let backing = Box::new(Arc::clone(&slow));
    let engine = Engine::spilling_for_test(16 * MIB as u64, Some(backing));
    engine.set_write_budget(WriteBudget::new(budget, Period::Run).unwrap());
    let space = noise(&engine, 4 * MIB);
    let table = engine.table.read();
    while engine.reclaim_one(&table, 0, By::Background) != Reclaimed::Nothing {}
    let left = || engine.writes().left(0, engine.now_ns(), || ());
    for _ in 0..3 {
        assert!(engine.write_back(true).started > 0);
        let (_, writing) = engine.store.in_flight();
        assert_eq!(left(), budget - writing as u64, "as any other process sees it");
    }
    slow.fails.store(true, Relaxed);
    slow.holds.store(false, Relaxed);
    assert_eq!(engine.store.poll(), 0);
    engine.pay_for_writes();
    assert_eq!((left(), engine.bytes_written()), (budget, 0), "nothing was written");
    slow.fails.store(false, Relaxed);
    engine.write_back(true);
    assert_eq!(engine.store.poll(), 0);
    engine.pay_for_writes();
    assert!(engine.bytes_written() > 0);
    assert_eq!(left(), budget - engine.bytes_written());
    drop(table);
    engine.unmap_adopted(&space);
}
