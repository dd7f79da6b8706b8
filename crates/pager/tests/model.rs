//! The library against a model: every page's contents are known from a number, and checked at each look.
//!
//! Tests run in both modes, inline and handler (if this process may use it). In handler mode system calls also read
//! and write regions directly. There are several pagers at a time, and several threads for each. A thread's part may
//! begin and end inside of a folio, so that two threads use the same folio. The environment may set `SEED`, and the
//! seconds per setting as `MODEL_SECONDS`.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the tests stand outside: real time, and a lock that is none of the engine's"
)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use std::fs::File;
use std::io::Seek;
use std::os::unix::fs::FileExt;

use zfolio_pager::{Mode, Pager, Region};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const UNITS: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 2 * MIB];

/// One test runs at a time: two of them measure the memory of the process, and all of them use some.
static ALONE: Mutex<()> = Mutex::new(());

/// xorshift64: the tests' only source of chance.
struct Random(u64);

impl Random {
    fn new(stream: u64) -> Random {
        let seed: u64 = std::env::var("SEED").map_or(42, |text| text.parse().unwrap());
        println!("SEED={seed}");
        Random(mixed(seed ^ (stream << 32)) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from((self.next() >> 16) % bound as u64).unwrap()
    }
}

/// The modes that this process may use.
fn modes() -> Vec<Mode> {
    let may =
        |mode: &Mode| mode.check().inspect_err(|why| eprintln!("SKIPPED: {mode:?}: {why}")).is_ok();
    [Mode::Inline, Mode::Handler].into_iter().filter(may).collect()
}

/// A file without a name, for bytes that go through the kernel.
fn scratch_file() -> File {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
    let path = std::env::temp_dir().join(format!("zfolio-model-{process}-{count}"));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn seconds() -> Duration {
    let text = std::env::var("MODEL_SECONDS");
    Duration::from_secs_f64(text.map_or(0.5, |text| text.parse().unwrap()))
}

/// The end of splitmix64.
fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// What a page contains: words that `seed` determines (0: zeros), and `stamp` as the last word.
#[derive(Clone, Copy, Default)]
struct Contents {
    seed: u64,
    stamp: u64,
}

impl Contents {
    /// Writes the page. One of 16 pages does not shrink, one of 16 repeats one word, and most shrink to
    /// an eighth.
    fn page(self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        if self.seed != 0 {
            let fresh = match self.seed % 16 {
                0 => WORDS,
                1 => 1,
                _ => WORDS / 8,
            };
            for (index, word) in page.chunks_exact_mut(8).take(fresh).enumerate() {
                let index = index as u64;
                word.copy_from_slice(&mixed(self.seed.wrapping_add(index << 20)).to_ne_bytes());
            }
            let (first, rest) = page.split_at_mut(fresh * 8);
            rest.chunks_exact_mut(first.len()).for_each(|part| part.copy_from_slice(first));
        }
        page[PAGE - 8..].copy_from_slice(&self.stamp.to_ne_bytes());
        page
    }
}

/// Some pages of a region, and what they should hold.
struct Part<'a> {
    bytes: &'a mut [u8],
    model: &'a mut [Contents],
    name: &'a str,
    /// The file that system calls write from the region and read into it, if this mode allows that.
    file: Option<File>,
}

/// The scratch file of one thread, if system calls may use a region.
fn file_for(pager: &Pager) -> Option<File> {
    (pager.stats().mode == Mode::Handler).then(scratch_file)
}

impl Part<'_> {
    fn write(&mut self, page: usize, seed: u64) {
        let contents = Contents { seed, stamp: seed };
        self.bytes[page * PAGE..][..PAGE].copy_from_slice(&contents.page());
        self.model[page] = contents;
    }

    /// Changes one word of a page, whose unit may have a copy in the store.
    fn stamp(&mut self, page: usize, stamp: u64) {
        self.bytes[(page + 1) * PAGE - 8..][..8].copy_from_slice(&stamp.to_ne_bytes());
        self.model[page].stamp = stamp;
    }

    fn verify(&self, page: usize) {
        verify(&self.bytes[page * PAGE..][..PAGE], self.model[page], self.name, page);
    }

    /// Writes some pages to a file and reads them into other pages, each by one system call.
    fn pass_through_the_kernel(&mut self, from: usize, random: &mut Random) {
        let Some(file) = &self.file else { return };
        let count = 1 + random.below(24.min(self.model.len() - from));
        let to = random.below(self.model.len() - count + 1);
        file.write_all_at(&self.bytes[from * PAGE..][..count * PAGE], 0).unwrap();
        let mut written = vec![0; count * PAGE];
        file.read_exact_at(&mut written, 0).unwrap();
        for (page, bytes) in (from..).zip(written.chunks(PAGE)) {
            verify(bytes, self.model[page], self.name, page);
        }
        file.read_exact_at(&mut self.bytes[to * PAGE..][..count * PAGE], 0).unwrap();
        self.model.copy_within(from..from + count, to);
    }

    /// One step of a program's life.
    fn step(&mut self, random: &mut Random) {
        let pages = self.model.len();
        let page = random.below(pages);
        let run = page..(page + 1 + random.below(96)).min(pages);
        match random.below(16) {
            0..3 => run.for_each(|page| self.write(page, random.next() | 2)),
            3 => run.for_each(|page| self.write(page, 0)),
            4 => run.for_each(|page| self.stamp(page, random.next())),
            5..7 => run.for_each(|page| self.verify(page)),
            7 => run.rev().for_each(|page| self.verify(page)),
            8 => self.pass_through_the_kernel(page, random),
            9..11 => self.write(page, random.next() | 2),
            11..13 => self.stamp(page, random.next()),
            _ => self.verify(page),
        }
    }
}

#[track_caller]
fn verify(bytes: &[u8], contents: Contents, name: &str, page: usize) {
    let expected = contents.page();
    if bytes != expected {
        let at = bytes.iter().zip(&expected).position(|(found, expected)| found != expected);
        panic!("{name}: page {page} byte {at:?} is not that of seed {:#x}", contents.seed);
    }
}

fn figure(pager: &Pager, name: &str) -> u64 {
    pager.stats().figures.get(name).unwrap()
}

/// Checks, when all regions are gone, that only free pages are left, which will be used again.
fn assert_empty(pager: &Pager, name: &str) {
    for (what, most) in [
        ("resident_bytes", 0),
        ("managed_bytes", 0),
        ("pool_bytes", 1 << 20),
        ("staged_bytes", 24 << 20),
    ] {
        let left = figure(pager, what);
        assert!(left <= most, "{name}: {left} of {what} with no region left");
    }
    let demand = figure(pager, "demand_bytes");
    assert_eq!(demand, 0, "{name}: something is stored for nobody");
}

/// Three threads share one region, whose limit is a quarter of its size.
fn share_a_region(pager: &Pager, name: &str, stream: u64, end: Instant) {
    const PAGES: usize = 64 * MIB / PAGE;
    let mut region = pager.map(PAGES * PAGE).unwrap();
    let mut model = vec![Contents::default(); PAGES];
    // The parts are no whole folios: they begin at pages 5463 and 10926.
    let share = PAGES / 3 + 2;
    std::thread::scope(|scope| {
        let parts = region.chunks_mut(share * PAGE).zip(model.chunks_mut(share));
        for (index, (bytes, model)) in parts.enumerate() {
            scope.spawn(move || {
                let mut part = Part { bytes, model, name, file: file_for(pager) };
                let mut random = Random::new(stream * 16 + index as u64);
                while Instant::now() < end {
                    part.step(&mut random);
                }
            });
        }
    });
    // Three threads only read, while parts are pinned and brought in.
    let (region, model) = (&region, &model);
    std::thread::scope(|scope| {
        for index in 0..3 {
            scope.spawn(move || {
                let first = PAGES / 3 * index;
                for page in (first..PAGES).take(PAGES / 2).step_by(2) {
                    verify(&region[page * PAGE..][..PAGE], model[page], name, page);
                }
            });
        }
        let mut random = Random::new(stream * 16 + 8);
        for _ in 0..20 {
            let at = random.below(PAGES * PAGE - 100_000);
            region.prefault(at..at + random.below(100_000));
            if random.below(8) == 0 {
                region.pin(at..at + random.below(50_000));
            }
        }
    });
}

/// Regions come, are changed in all ways, and go.
fn change_regions(pager: &Pager, name: &str, unit: usize, stream: u64, end: Instant) {
    let mut random = Random::new(stream * 16 + 12);
    let mut regions: Vec<(Region, Vec<Contents>)> = Vec::new();
    let mut file = scratch_file();
    while Instant::now() < end {
        if regions.len() < 3 {
            let pages = 1 + random.below(6 * MIB / PAGE);
            regions.push((pager.map(pages * PAGE).unwrap(), vec![Contents::default(); pages]));
        }
        let chosen = random.below(regions.len());
        if random.below(40) == 0 {
            let (bytes, mut model) = regions.swap_remove(chosen);
            let mut bytes = bytes;
            let part = Part { bytes: &mut bytes, model: &mut model, name, file: None };
            (0..part.model.len()).for_each(|page| part.verify(page));
            continue;
        }
        let (region, model) = &mut regions[chosen];
        let bytes = region.len();
        let at = random.below(bytes);
        let range = at..(at + random.below(3 * unit.max(1 << 16))).min(bytes);
        match random.below(12) {
            0..2 => {
                region.clear(range.clone());
                let (from, to) = (range.start.next_multiple_of(unit), range.end / unit * unit);
                if from < to {
                    model[from / PAGE..to / PAGE].fill(Contents::default());
                }
            }
            2 => region.prefault(range),
            3 if random.below(16) == 0 => region.pin(at..(at + 10 * PAGE).min(bytes)),
            4 => {
                let from = random.below(model.len());
                let count = 1 + random.below(200.min(model.len() - from));
                let to = random.below(model.len() - count + 1);
                file.set_len(0).unwrap();
                file.rewind().unwrap();
                region.write_to(from * PAGE..(from + count) * PAGE, &mut file).unwrap();
                file.rewind().unwrap();
                let read = region.read_from(to * PAGE.., &mut file).unwrap();
                assert_eq!(read, count * PAGE, "{name}");
                model.copy_within(from..from + count, to);
            }
            _ => {
                let mut part = Part { bytes: region, model, name, file: file_for(pager) };
                (0..8).for_each(|_| part.step(&mut random));
            }
        }
    }
    for (mut region, mut model) in regions {
        let part = Part { bytes: &mut region, model: &mut model, name, file: None };
        (0..part.model.len()).for_each(|page| part.verify(page));
    }
}

/// Goal: no byte is lost, wrong, or of another page, and the limit is held. Method: for each unit size
/// two pagers at a time, each with one region that threads share, and others that come and go.
#[test]
fn regions_agree_with_a_model() {
    let _alone = ALONE.lock();
    let settings = modes().into_iter().flat_map(|mode| UNITS.map(|unit| (mode, unit)));
    for (round, (mode, unit)) in settings.enumerate() {
        let end = Instant::now() + seconds();
        std::thread::scope(|scope| {
            for (side, algorithm) in ["lz4", "zstd"].into_iter().enumerate() {
                scope.spawn(move || {
                    let name = format!("{algorithm} {unit} {mode:?}");
                    let stream = u64::try_from(round * 2 + side + 1).unwrap();
                    let limit = (16 + 8 * side as u64) << 20;
                    let pager = Pager::builder().limit(limit).algorithm(algorithm).unit(unit);
                    let pager = pager.mode(mode).build().unwrap();
                    std::thread::scope(|scope| {
                        scope.spawn(|| share_a_region(&pager, &name, stream, end));
                        change_regions(&pager, &name, unit, stream, end);
                    });
                    assert!(figure(&pager, "faults_stored") > 0, "{name}: nothing was compressed");
                    assert_empty(&pager, &name);
                });
            }
        });
    }
}

/// Goal: many threads that reclaim at the same time lose no byte, and no thread waits for ever. Method:
/// 24 threads write and read their parts with very little room.
#[test]
fn many_threads_at_the_limit_make_progress() {
    let _alone = ALONE.lock();
    const PAGES: usize = 48 * MIB / PAGE;
    for (mode, unit) in modes().into_iter().flat_map(|mode| [(mode, 4 << 10), (mode, 64 << 10)]) {
        let pager = Pager::builder().limit(12 << 20).unit(unit).mode(mode).build().unwrap();
        let mut region = pager.map(PAGES * PAGE).unwrap();
        let mut model = vec![Contents::default(); PAGES];
        let share = PAGES / 24 + 1;
        let end = Instant::now() + seconds();
        std::thread::scope(|scope| {
            let parts = region.chunks_mut(share * PAGE).zip(model.chunks_mut(share));
            for (index, (bytes, model)) in parts.enumerate() {
                let file = file_for(&pager);
                scope.spawn(move || {
                    let mut part = Part { bytes, model, name: "many", file };
                    let mut random = Random::new(1000 + index as u64);
                    while Instant::now() < end {
                        part.step(&mut random);
                    }
                    (0..part.model.len()).for_each(|page| part.verify(page));
                });
            }
        });
        drop(region);
        assert_empty(&pager, "many");
    }
}

/// Goal: a page can be pinned while others read it. Method: three threads read all over a region that
/// is pinned piece by piece. A fault may be under way while its range is pinned; the kernel then
/// serves it.
#[test]
fn pinning_beside_readers_harms_nobody() {
    const PAGES: usize = 16 * MIB / PAGE;
    let _alone = ALONE.lock();
    for (mode, unit) in modes().into_iter().flat_map(|mode| [(mode, 4 << 10), (mode, 64 << 10)]) {
        let pager = Pager::builder().limit(8 << 20).unit(unit).mode(mode).build().unwrap();
        let mut region = pager.map(PAGES * PAGE).unwrap();
        let mut model = vec![Contents::default(); PAGES];
        let mut part = Part { bytes: &mut region, model: &mut model, name: "pinned", file: None };
        (1..PAGES).for_each(|page| part.write(page, page as u64 | 2));
        let (region, model, done) = (&region, &model, &AtomicBool::new(false));
        std::thread::scope(|scope| {
            for reader in 0..3 {
                scope.spawn(move || {
                    let mut random = Random::new(2000 + reader);
                    while !done.load(Relaxed) {
                        let page = random.below(PAGES);
                        verify(&region[page * PAGE..][..PAGE], model[page], "pinned", page);
                    }
                });
            }
            for at in (0..PAGES * PAGE).step_by(4 * unit.max(1 << 16)) {
                region.pin(at..at + 4 * unit.max(1 << 16));
            }
            done.store(true, Relaxed);
        });
    }
}

/// The process's memory, without what `malloc` keeps of what was freed: up to 15 MiB here, as its arenas happen to be
/// shared between threads.
#[allow(unsafe_code, reason = "the standard library has no malloc_trim")]
fn memory_in_use() -> u64 {
    // SAFETY: it has no requirements.
    unsafe { libc::malloc_trim(0) };
    zfolio_sys::process::ResidentMeter::new().read().unwrap().memory_bytes
}

/// Goal: a dropped pager leaves nothing behind. Method: after several pagers of each unit size the
/// process has as much memory and as many mappings as after the first one.
#[test]
fn pagers_that_go_leave_nothing() {
    let _alone = ALONE.lock();
    let once = |(mode, unit), stream: u64| {
        let pager = Pager::builder().limit(16 << 20).unit(unit).mode(mode).build().unwrap();
        let end = Instant::now() + seconds() / 20;
        share_a_region(&pager, "going", 100 + stream, end);
        assert_empty(&pager, "going");
    };
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let settings = || modes().into_iter().flat_map(|mode| UNITS.map(|unit| (mode, unit)));
    settings().for_each(|setting| once(setting, 0));
    let (resident, descriptors, mappings) = (memory_in_use(), files(), maps());
    settings().for_each(|setting| once(setting, 1));
    // A MiB, where a pager that stays has up to 16.
    let grown = memory_in_use().saturating_sub(resident);
    assert!(grown < 1 << 20, "{grown} bytes more");
    assert!(files() <= descriptors + 1, "descriptors are left open");
    assert!(maps() <= mappings + 24, "{} mappings after {mappings}", maps());
}
