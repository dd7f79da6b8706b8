//! The workload: memory full of noise, every byte of which is compared whenever it is read.
//!
//! It runs in a process of its own, which knows nothing of zfolio: under `zfolio run`, in the kernel's cgroup, or with
//! all the memory that it wants.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde_json::{Value, json};
use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::{clock, map};

use super::Figures;
use crate::mapping::Anonymous;

/// Words of a page.
const WORDS: usize = PAGE_BYTES / 8;

/// Of so many pages at random one at least is not in memory, unless almost all are.
const DRAWS: usize = 256;

/// The word at `index`: a hash of it, which no codec makes smaller.
fn word(index: usize) -> u64 {
    let mixed = (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ mixed >> 32
}

/// What one run of the workload found.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) figures: Figures,
    /// Every byte was what had been written.
    pub(super) is_right: bool,
}

impl Report {
    pub(super) fn json(&self) -> Value {
        json!({"figures": self.figures.0, "is_right": self.is_right})
    }

    pub(super) fn parse(text: &str) -> Option<Report> {
        let value: Value = serde_json::from_str(text.lines().last()?).ok()?;
        let figures = value.get("figures")?.as_array()?;
        let figures: Vec<f64> = figures.iter().map(Value::as_f64).collect::<Option<_>>()?;
        let is_right = value.get("is_right")?.as_bool()?;
        Some(Report { figures: Figures(figures.try_into().ok()?), is_right })
    }
}

fn fill(memory: &mut [u8]) {
    for (index, bytes) in memory.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(index).to_ne_bytes());
    }
}

/// Memory that was filled, and whether a wrong word was found in it.
struct Noise<'a> {
    memory: &'a [u8],
    is_right: AtomicBool,
}

impl<'a> Noise<'a> {
    fn new(memory: &'a [u8]) -> Noise<'a> {
        Noise { memory, is_right: AtomicBool::new(true) }
    }

    fn check(&self, page: usize) {
        let bytes = &self.memory[page * PAGE_BYTES..][..PAGE_BYTES];
        let differ = |(at, bytes): (usize, &[u8])| {
            let read = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
            read ^ word(page * WORDS + at)
        };
        let difference =
            bytes.chunks_exact(8).enumerate().map(differ).fold(0, |sum, one| sum | one);
        if difference != 0 {
            // Relaxed: it is read after all threads were joined.
            self.is_right.store(false, Relaxed);
        }
    }

    /// Reads pages at random that are not in memory: those that are need no disk.
    fn check_some(&self, reads: Range<usize>) {
        let pages = (self.memory.len() / PAGE_BYTES) as u64;
        // Beyond the words that the memory is filled with.
        let page = |read: usize, draw: usize| {
            usize::try_from(word(!(read | draw << 40)) % pages).expect("a page's number")
        };
        let mut draws = DRAWS;
        for read in reads {
            let away = (0..draws).map(|draw| page(read, draw)).find(|page| self.is_away(*page));
            if away.is_none() {
                // All of it fits: the looks would take longer than the reads.
                draws = 0;
            }
            self.check(away.unwrap_or_else(|| page(read, 0)));
        }
    }

    fn is_away(&self, page: usize) -> bool {
        let (address, mut present) = (self.memory[page * PAGE_BYTES..].as_ptr().addr(), [0]);
        map::residency(address, PAGE_BYTES, &mut present).is_ok() && present[0] & 1 == 0
    }
}

/// Runs it, with `reads` random reads by one thread and four times as many by `threads`.
///
/// # Errors
///
/// There is no memory.
pub(super) fn run(bytes: usize, threads: usize, reads: usize) -> io::Result<Report> {
    let pages = bytes / PAGE_BYTES;
    let mut memory = Anonymous::new(pages * PAGE_BYTES)?;
    let write_ns = time(|| fill(&mut memory));
    let noise = &Noise::new(&memory);
    let read_ns = time(|| (0..pages).for_each(|page| noise.check(page)));
    let one_ns = time(|| noise.check_some(0..reads));
    let each = 4 * reads / threads;
    let all_ns = time(|| {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let first = reads + thread * each;
                scope.spawn(move || noise.check_some(first..first + each));
            }
        });
    });
    let figures = Figures::new(
        pages * PAGE_BYTES,
        [write_ns, read_ns],
        [(reads, one_ns), (each * threads, all_ns)],
    );
    Ok(Report { figures, is_right: noise.is_right.load(Relaxed) })
}

fn time(work: impl FnOnce()) -> u64 {
    let began = clock::monotonic_ns();
    work();
    clock::monotonic_ns() - began
}

#[cfg(test)]
mod tests {
    use super::{Noise, PAGE_BYTES, Report, fill, run};

    /// Goal: all phases run, and what is reported is read again.
    #[test]
    fn the_workload_reports_what_it_found() {
        let report = run(8 << 20, 3, 100).unwrap();
        assert!(report.is_right && report.figures.0.iter().all(|figure| *figure > 0.0));
        let read = Report::parse(&format!("a line before\n{}\n", report.json())).unwrap();
        // Reading a number from JSON may change its last bit.
        let is_same = |(one, other): (&f64, &f64)| (one - other).abs() <= one.abs() * 1e-12;
        assert!(read.is_right && read.figures.0.iter().zip(&report.figures.0).all(is_same));
        assert!(Report::parse("").is_none() && Report::parse("{}").is_none());
    }

    /// Goal: one wrong byte anywhere is found.
    #[test]
    fn a_wrong_byte_is_found() {
        let mut memory = vec![0; 8 * PAGE_BYTES];
        fill(&mut memory);
        let is_right = |memory: &[u8], page| {
            let noise = Noise::new(memory);
            noise.check(page);
            noise.is_right.into_inner()
        };
        assert!((0..8).all(|page| is_right(&memory, page)));
        memory[5 * PAGE_BYTES + PAGE_BYTES - 1] ^= 1;
        assert!((0..8).all(|page| is_right(&memory, page) == (page != 5)));
    }
}
