//! The workload: fill memory with the pages of real processes, use it, and check every byte.
//!
//! It works on a plain `&mut [u8]`, whatever kind of memory that is: the program `usemem` runs it
//! on anonymous memory, the inline comparison on a region of zfolio. Five phases, in order:
//!
//! | phase | work | result |
//! | --- | --- | --- |
//! | write | write every byte, from the corpus, repeated as often as needed | MB/s |
//! | read | read one byte of each page, in rising order | MB/s of pages |
//! | increment | increment one byte of each page, in rising order | MB/s of pages |
//! | random | read one byte of pages that the seed chooses | mean, p50, p99, max |
//! | verify | compare every byte with its expected value | ok, or the first wrong offset |
//!
//! # Invariants
//!
//! - `USE-1` Byte `i` of the whole (all workers' parts in order) is byte `i mod corpus` of the
//!   corpus, with two exceptions: bytes 8 to 15 of each page hold the salt of the repetition if
//!   salting is on, and byte 0 of each page is one more after the increment phase.
//! - `USE-2` The corpus uses no anonymous memory: it is read through windows of [`WINDOW_BYTES`].
//!
//! MB is 10^6 bytes. A phase allocates nothing except the mappings of the windows.

use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

use crate::mapping::Window;
pub use crate::report::{Measured, Mismatch, Report, resident_bytes_max};

/// Bytes of a page. Not the constant of `zfolio-core`, since the program `usemem` does not link that crate.
pub const PAGE_BYTES: usize = 4096;

/// How much of the corpus is mapped at a time.
pub const WINDOW_BYTES: usize = 2 << 20;

/// A smaller corpus would repeat more often than real data.
pub const CORPUS_BYTES_MIN: u64 = 1 << 20;

/// The place of the salt in a page; byte 0 is the one that is incremented.
const SALT_AT: std::ops::Range<usize> = 8..16;

const _: () = assert!(WINDOW_BYTES % PAGE_BYTES == 0 && CORPUS_BYTES_MIN % PAGE_BYTES as u64 == 0);

/// Why a corpus is refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum CorpusError {
    /// The file could not be opened.
    Open(PathBuf, io::Error),
    /// The file is a directory, a device or a pipe.
    NotAFile(PathBuf),
    /// The file is empty, too small, or does not end at the end of a page.
    Length(PathBuf, u64),
}

impl fmt::Display for CorpusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CorpusError::Open(path, error) => write!(f, "corpus {}: {error}", path.display()),
            CorpusError::NotAFile(path) => {
                write!(f, "corpus {}: not a regular file", path.display())
            }
            CorpusError::Length(path, bytes) => {
                let what = match bytes {
                    0 => "empty".to_owned(),
                    _ if bytes % PAGE_BYTES as u64 != 0 => format!("truncated: {bytes} bytes"),
                    _ => format!("too small: {bytes} bytes"),
                };
                let path = path.display();
                write!(
                    f,
                    "corpus {path}: {what}; accepted: a multiple of 4096 bytes, 1 MiB or more"
                )
            }
        }
    }
}

impl std::error::Error for CorpusError {}

/// A file of pages from real processes.
#[derive(Debug)]
pub struct Corpus {
    file: File,
    bytes: u64,
}

impl Corpus {
    /// Opens `path` and checks its length.
    ///
    /// # Errors
    ///
    /// [`CorpusError`]: the user must name another file.
    pub fn open(path: &Path) -> Result<Corpus, CorpusError> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = opened.map_err(|error| CorpusError::Open(path.to_owned(), error))?;
        if !metadata.is_file() {
            return Err(CorpusError::NotAFile(path.to_owned()));
        }
        let bytes = metadata.len();
        if bytes < CORPUS_BYTES_MIN || bytes % PAGE_BYTES as u64 != 0 {
            return Err(CorpusError::Length(path.to_owned(), bytes));
        }
        Ok(Corpus { file, bytes })
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads it once, so that all later windows come from the page cache.
    ///
    /// # Errors
    ///
    /// The error of reading the file.
    pub fn warm(&self) -> io::Result<()> {
        let mut file = &self.file;
        io::Seek::rewind(&mut file)?;
        io::copy(&mut file, &mut io::sink()).map(|_| ())
    }
}

/// The phases, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Fill all pages.
    Write,
    /// Touch each page.
    Read,
    /// Read, modify and write each page.
    Increment,
    /// Touch random pages.
    Random,
    /// Compare all bytes.
    Verify,
}

impl Phase {
    /// All phases in the order in which they run.
    pub const ALL: [Phase; 5] =
        [Phase::Write, Phase::Read, Phase::Increment, Phase::Random, Phase::Verify];
}

/// The work of one worker on its part of the whole.
#[derive(Clone, Debug)]
pub struct Workload<'a> {
    /// The data.
    pub corpus: &'a Corpus,
    /// The offset of this worker's part in the whole; a multiple of the page.
    pub start: u64,
    /// Whether each repetition of the corpus differs in eight bytes of each page.
    pub salt: bool,
    /// The seed that chooses the pages of the random phase.
    pub seed: u64,
    /// How many pages the random phase reads.
    pub reads: usize,
}

/// A piece of the worker's region, and the bytes of the corpus that belong there.
struct Piece {
    /// Its offset in the region.
    at: usize,
    bytes: usize,
    corpus_at: u64,
    /// How often the corpus was repeated before.
    repetition: u64,
}

/// Nanoseconds since `start`.
fn since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures the machine's own time")]
fn now() -> Instant {
    Instant::now()
}

impl Workload<'_> {
    /// Runs all phases on `region`. Calls `before` before each one, so that the workers can wait
    /// for each other.
    ///
    /// # Errors
    ///
    /// The corpus could not be mapped. Even then `before` was called for every phase, so that no
    /// other worker waits for ever.
    pub fn run(&self, region: &mut [u8], mut before: impl FnMut(Phase)) -> io::Result<Measured> {
        let mut measured = Measured { latencies_ns: vec![0; self.reads], ..Measured::default() };
        let mut failed = None;
        for (index, phase) in Phase::ALL.into_iter().enumerate() {
            before(phase);
            if failed.is_some() {
                continue;
            }
            let start = now();
            let done = self.perform(phase, region, &mut measured);
            measured.phase_ns[index] = since(start);
            failed = done.err();
        }
        failed.map_or(Ok(measured), Err)
    }

    fn perform(&self, phase: Phase, region: &mut [u8], into: &mut Measured) -> io::Result<()> {
        match phase {
            Phase::Write => self.write(region)?,
            Phase::Read => read(region),
            Phase::Increment => increment(region),
            Phase::Random => self.random(region, &mut into.latencies_ns),
            Phase::Verify => into.mismatch = self.verify(region, 1)?,
        }
        Ok(())
    }

    /// The pieces of the region, cut where the corpus repeats and where a window ends.
    fn pieces(&self, region_bytes: usize) -> impl Iterator<Item = Piece> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let place = self.start + at as u64;
            let (repetition, corpus_at) = (place / self.corpus.bytes, place % self.corpus.bytes);
            let to_end = usize::try_from(self.corpus.bytes - corpus_at).unwrap_or(usize::MAX);
            let bytes = WINDOW_BYTES.min(region_bytes - at).min(to_end);
            let piece = Piece { at, bytes, corpus_at, repetition };
            at += bytes;
            (bytes > 0).then_some(piece)
        })
    }

    fn window(&self, piece: &Piece) -> io::Result<Window> {
        Window::new(&self.corpus.file, piece.corpus_at, piece.bytes)
    }

    fn salt_of(&self, repetition: u64) -> Option<[u8; 8]> {
        // An odd constant of splitmix64: repetitions differ in all eight bytes, not only in the
        // last.
        self.salt.then(|| (repetition + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
    }

    /// Fills `region` according to USE-1.
    fn write(&self, region: &mut [u8]) -> io::Result<()> {
        for piece in self.pieces(region.len()) {
            let target = &mut region[piece.at..piece.at + piece.bytes];
            let window = self.window(&piece)?;
            let Some(salt) = self.salt_of(piece.repetition) else {
                target.copy_from_slice(&window);
                continue;
            };
            let pages = target.chunks_mut(PAGE_BYTES).zip(window.chunks(PAGE_BYTES));
            for (target, source) in pages.filter(|(target, _)| target.len() == PAGE_BYTES) {
                target.copy_from_slice(source);
                target[SALT_AT].copy_from_slice(&salt);
            }
        }
        Ok(())
    }

    /// Touches `self.reads` pages and records how long each access took.
    fn random(&self, region: &[u8], latencies_ns: &mut [u32]) {
        let pages = region.len() / PAGE_BYTES;
        let mut state = self.seed ^ self.start.rotate_left(32);
        for latency in latencies_ns {
            let page = random_below(&mut state, pages);
            let start = now();
            black_box(region[page * PAGE_BYTES]);
            *latency = u32::try_from(since(start)).unwrap_or(u32::MAX);
        }
    }

    /// The first byte of `region` that violates USE-1 after `increments` increment phases.
    ///
    /// # Errors
    ///
    /// The corpus could not be mapped.
    pub fn verify(&self, region: &[u8], increments: u8) -> io::Result<Option<Mismatch>> {
        let mut want = [0; PAGE_BYTES];
        for piece in self.pieces(region.len()) {
            let window = self.window(&piece)?;
            let salt = self.salt_of(piece.repetition);
            let found = &region[piece.at..piece.at + piece.bytes];
            let pages = found.chunks(PAGE_BYTES).zip(window.chunks(PAGE_BYTES));
            for (index, (found, source)) in pages.enumerate() {
                let want = &mut want[..source.len()];
                want.copy_from_slice(source);
                if let Some(salt) = salt {
                    want[SALT_AT].copy_from_slice(&salt);
                }
                want[0] = want[0].wrapping_add(increments);
                if found != want {
                    let place = self.start + (piece.at + index * PAGE_BYTES) as u64;
                    return Ok(first_difference(place, want, found));
                }
            }
        }
        Ok(None)
    }
}

#[cold]
fn first_difference(place: u64, want: &[u8], found: &[u8]) -> Option<Mismatch> {
    let at = want.iter().zip(found).position(|(want, found)| want != found)?;
    Some(Mismatch { offset: place + at as u64, expected: want[at], found: found[at] })
}

/// Touches each page.
fn read(region: &[u8]) {
    for page in region.chunks(PAGE_BYTES) {
        black_box(page[0]);
    }
}

/// Increments the first byte of each page.
fn increment(region: &mut [u8]) {
    for page in region.chunks_mut(PAGE_BYTES) {
        page[0] = page[0].wrapping_add(1);
    }
}

/// A number below `count`, by splitmix64.
pub(crate) fn random_below(state: &mut u64, count: usize) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let scaled = (u128::from(mixed) * count as u128) >> 64;
    usize::try_from(scaled).expect("less than `count`, which is a usize")
}

/// The bytes of each of `workers` that share `bytes`: whole pages, the same for all.
#[must_use]
pub fn share_bytes(bytes: u64, workers: usize) -> usize {
    let share = bytes / workers.max(1) as u64;
    usize::try_from(share).unwrap_or(usize::MAX) / PAGE_BYTES * PAGE_BYTES
}

/// The workload of worker `index` of `workers` that share `bytes`.
#[must_use]
pub fn part_of<'a>(whole: &Workload<'a>, bytes: u64, workers: usize, index: usize) -> Workload<'a> {
    let start = (share_bytes(bytes, workers) * index) as u64;
    Workload { start, reads: (whole.reads / workers).max(1), ..whole.clone() }
}

/// Runs `whole` on `memory`, with one part for each of `workers` threads. They wait for each other
/// before each phase.
///
/// # Errors
///
/// The corpus could not be mapped, or a thread panicked.
pub fn run_threads(
    memory: &mut [u8],
    whole: &Workload<'_>,
    workers: usize,
) -> io::Result<Vec<Measured>> {
    let bytes = memory.len() as u64;
    let barrier = Barrier::new(workers);
    std::thread::scope(|scope| {
        let start = |(index, part)| {
            let (workload, barrier) = (part_of(whole, bytes, workers, index), &barrier);
            scope.spawn(move || workload.run(part, |_| _ = barrier.wait()))
        };
        let parts = memory.chunks_exact_mut(share_bytes(bytes, workers)).take(workers);
        let threads: Vec<_> = parts.enumerate().map(start).collect();
        let panicked = |_| Err(io::Error::other("a worker panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::{
        Corpus, CorpusError, PAGE_BYTES, Phase, Workload, part_of, run_threads, share_bytes,
    };
    use std::fs;
    use std::path::PathBuf;

    /// A file of `bytes` pseudo-random bytes, removed when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, bytes: usize) -> Scratch {
            let name = format!("zfolio-usemem-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let contents: Vec<u8> =
                (0..bytes).map(|at| ((at * 31) ^ (at >> 9)).to_le_bytes()[0]).collect();
            fs::write(&path, contents).expect("a file of our own");
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_file(&self.0).expect("our own file");
        }
    }

    fn workload(corpus: &Corpus, salt: bool) -> Workload<'_> {
        Workload { corpus, start: 0, salt, seed: 7, reads: 100 }
    }

    /// Goal: USE-1 holds after all phases, and a single wrong bit is found at any place. Method: a
    /// region of 2.5 repetitions that ends in the middle of the corpus, with and without salt.
    #[test]
    fn one_wrong_bit_is_found_where_it_is() {
        let scratch = Scratch::new("flip", 1 << 20);
        let corpus = Corpus::open(&scratch.0).expect("1 MiB");
        for salt in [false, true] {
            let mut region = vec![0; 5 << 19];
            let workload = workload(&corpus, salt);
            let mut seen = Vec::new();
            let measured = workload.run(&mut region, |phase| seen.push(phase)).expect("mapped");
            assert_eq!(seen, Phase::ALL);
            assert_eq!(measured.mismatch, None);
            assert_eq!(measured.latencies_ns.len(), 100);
            for offset in [0, 8, 4095, 4096, (1 << 20) + 9, (5 << 19) - 1] {
                region[offset] ^= 0x40;
                let wrong = workload.verify(&region, 1).expect("mapped").expect("a flipped bit");
                assert_eq!(wrong.offset, offset as u64);
                assert_eq!(wrong.expected ^ wrong.found, 0x40);
                region[offset] ^= 0x40;
            }
            assert!(workload.verify(&region, 0).expect("mapped").is_some(), "increments count");
            let repeats = region[4096..8192] == region[4096 + (1 << 20)..8192 + (1 << 20)];
            assert_eq!(repeats, !salt);
        }
    }

    #[test]
    fn threads_fill_what_one_worker_would() {
        let scratch = Scratch::new("threads", 1 << 20);
        let corpus = Corpus::open(&scratch.0).expect("1 MiB");
        let whole = workload(&corpus, true);
        let (mut alone, mut together) = (vec![0; 3 << 20], vec![0; 3 << 20]);
        run_threads(&mut alone, &whole, 1).expect("mapped");
        let workers = run_threads(&mut together, &whole, 3).expect("mapped");
        assert_eq!(workers.len(), 3);
        assert!(workers.iter().all(|worker| worker.mismatch.is_none()));
        assert!(alone == together);
        assert_eq!(part_of(&whole, 3 << 20, 3, 2).start, 2 << 20);
        assert_eq!(share_bytes(10_000, 2), PAGE_BYTES);
    }

    #[test]
    fn a_corpus_that_is_empty_cut_or_missing_is_refused() {
        for (bytes, word) in [(0, "empty"), (4096, "too small"), ((1 << 20) + 1, "truncated")] {
            let scratch = Scratch::new(word, bytes);
            let line = Corpus::open(&scratch.0).expect_err(word).to_string();
            assert!(
                line.contains(word) && line.contains("accepted") && !line.contains('\n'),
                "{line}"
            );
        }
        let missing = Corpus::open(&PathBuf::from("/nonexistent/corpus.bin"));
        assert!(matches!(missing, Err(CorpusError::Open(..))));
        let folder = Corpus::open(&std::env::temp_dir());
        assert!(matches!(folder, Err(CorpusError::NotAFile(_))));
    }
}
