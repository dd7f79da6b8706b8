//! The same work with folios split into pages at swap-out, and whole.
//!
//! Each thread has memory of its own. It swaps all of it out, folio by folio, and then all of it in. Split, each
//! page takes a slot and is written, read and freed by itself. Whole, a folio takes its slots together, and is
//! written and read by one transfer. The area is an unlinked file on a file system in memory, so a transfer is a
//! system call and a copy, and there is no medium to wait for.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;

use serde_json::{Value, json};
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::size;
use zfolio_core::swap::slots::Slots;
use zfolio_sys::clock;

use crate::compare::outcome::median;

/// The orders of the published test: 4 KiB, 64 KiB, 2 MiB.
const ORDERS: [u32; 3] = [0, 4, 9];

/// The memory of a thread is a multiple of the largest folio.
pub(crate) const BYTES_MIN: u64 = 2 << 20;

/// The medians for folios of one order, in 10^6 bytes a second: out, and in.
#[derive(Debug)]
pub(crate) struct Splitting {
    pub(crate) order: u32,
    pub(crate) split: [f64; 2],
    pub(crate) whole: [f64; 2],
}

impl Splitting {
    /// How much more is done whole, out and in together, in percent.
    pub(crate) fn gain_percent(&self) -> f64 {
        let seconds = |speeds: [f64; 2]| 1.0 / speeds[0] + 1.0 / speeds[1];
        (seconds(self.split) / seconds(self.whole) - 1.0) * 100.0
    }

    pub(crate) fn folio(&self) -> String {
        size::display((PAGE_BYTES as u64) << self.order)
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "folio_bytes": PAGE_BYTES << self.order,
            "split_out_mb_s": self.split[0],
            "split_in_mb_s": self.split[1],
            "whole_out_mb_s": self.whole[0],
            "whole_in_mb_s": self.whole[1],
            "gain_percent": self.gain_percent(),
        })
    }
}

/// Measures each order both ways, by turns, with `threads` threads of `bytes` bytes each; medians of `repeats`.
///
/// # Errors
///
/// The file could not be made, written or read; or a page came back with other bytes.
pub(crate) fn measure(
    folder: &Path,
    threads: usize,
    bytes: u64,
    repeats: u32,
) -> io::Result<Vec<Splitting>> {
    let bytes = usize::try_from(bytes / BYTES_MIN * BYTES_MIN).expect("it fits in memory");
    let file = unlinked(folder, bytes * threads)?;
    let mut memories: Vec<Memory> = (0..threads).map(|cpu| Memory::new(cpu, bytes)).collect();
    let mut rows = Vec::new();
    for order in ORDERS {
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..repeats {
            for (run, taken) in runs.iter_mut().zip([0, order]) {
                run.push(out_and_in(&file, &mut memories, order, taken)?);
            }
        }
        let speeds = |run: &Vec<[f64; 2]>| {
            [0, 1].map(|way| median(run.iter().map(|speeds| speeds[way]).collect()))
        };
        rows.push(Splitting { order, split: speeds(&runs[0]), whole: speeds(&runs[1]) });
    }
    memories.iter().try_for_each(Memory::verify)?;
    Ok(rows)
}

/// A file of so many bytes that are all there, and that nobody else finds.
fn unlinked(folder: &Path, bytes: usize) -> io::Result<File> {
    let path = folder.join(format!("zfolio-bench-swap-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        file.write_all_at(&zeros[..zeros.len().min(bytes - at)], at as u64)?;
    }
    Ok(file)
}

/// One thread's memory: each page is full of its number.
struct Memory {
    cpu: usize,
    bytes: Vec<u8>,
}

impl Memory {
    fn new(cpu: usize, bytes: usize) -> Memory {
        let mut memory = Memory { cpu, bytes: vec![0; bytes] };
        for (page, bytes) in memory.bytes.chunks_exact_mut(PAGE_BYTES).enumerate() {
            let word = word(cpu, page);
            bytes.chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word));
        }
        memory
    }

    /// Swaps all folios of this order out. With `taken` below `order` they are split.
    fn swap_out(
        &mut self,
        file: &File,
        area: &Slots,
        order: u32,
        taken: u32,
    ) -> io::Result<Vec<u32>> {
        let mut firsts = Vec::with_capacity(self.bytes.len() / (PAGE_BYTES << taken));
        for folio in self.bytes.chunks_exact_mut(PAGE_BYTES << order) {
            for part in folio.chunks_exact_mut(PAGE_BYTES << taken) {
                let first = area.take(self.cpu, taken).expect("the area is as large as all memory");
                file.write_all_at(part, at(first))?;
                firsts.push(first);
                // So that a page that is not read back is noticed.
                part.chunks_exact_mut(PAGE_BYTES).for_each(|page| page[..8].fill(!0));
            }
        }
        Ok(firsts)
    }

    /// Swaps them in again.
    fn swap_in(&mut self, file: &File, area: &Slots, firsts: &[u32], taken: u32) -> io::Result<()> {
        for (part, first) in self.bytes.chunks_exact_mut(PAGE_BYTES << taken).zip(firsts) {
            file.read_exact_at(part, at(*first))?;
            area.free(*first, 1 << taken);
        }
        Ok(())
    }

    /// Whether each page is full of its number.
    fn verify(&self) -> io::Result<()> {
        for (page, bytes) in self.bytes.chunks_exact(PAGE_BYTES).enumerate() {
            let word = word(self.cpu, page);
            if bytes.chunks_exact(8).any(|bytes| bytes != word) {
                let line = format!("page {page} of thread {} came back with other bytes", self.cpu);
                return Err(io::Error::new(ErrorKind::InvalidData, line));
            }
        }
        Ok(())
    }
}

/// What a page consists of.
fn word(cpu: usize, page: usize) -> [u8; 8] {
    ((cpu as u64) << 48 | page as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()
}

/// The place of a slot in the file.
fn at(first: u32) -> u64 {
    u64::from(first) * PAGE_BYTES as u64
}

/// All memory out, and, when all threads have done that, in again; the speed of each.
fn out_and_in(
    file: &File,
    memories: &mut [Memory],
    order: u32,
    taken: u32,
) -> io::Result<[f64; 2]> {
    let bytes: usize = memories.iter().map(|memory| memory.bytes.len()).sum();
    let slots = u32::try_from(bytes / PAGE_BYTES).expect("at most a few GiB");
    let area = Slots::new(slots, memories.len());
    let barrier = Barrier::new(memories.len());
    let work = |memory: &mut Memory| -> io::Result<[u64; 2]> {
        barrier.wait();
        let start = clock::monotonic_ns();
        let firsts = memory.swap_out(file, &area, order, taken);
        let out = clock::monotonic_ns();
        // Also after an error, since the others wait here.
        barrier.wait();
        let begin = clock::monotonic_ns();
        memory.swap_in(file, &area, &firsts?, taken)?;
        Ok([out - start, clock::monotonic_ns() - begin])
    };
    let took = std::thread::scope(|scope| {
        let threads = memories.iter_mut().map(|memory| scope.spawn(|| work(memory)));
        let threads: Vec<_> = threads.collect();
        let took = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        took.collect::<io::Result<Vec<_>>>()
    })?;
    let slowest = |way: usize| took.iter().map(|took| took[way]).max().unwrap_or(1).max(1);
    let mb_s = |ns: u64| bytes as f64 * 1e3 / ns as f64;
    Ok([mb_s(slowest(0)), mb_s(slowest(1))])
}

#[cfg(test)]
mod tests {
    use super::{BYTES_MIN, ORDERS, measure};
    use crate::scratch::Scratch;

    /// Goal: all bytes come back, split and whole, with threads that share the area.
    #[test]
    fn memory_comes_back_split_and_whole() {
        let folder = Scratch::create("splitting").unwrap();
        let rows = measure(folder.path(), 3, 2 * BYTES_MIN, 2).unwrap();
        assert!(rows.iter().map(|row| row.order).eq(ORDERS));
        for row in rows {
            assert!(row.split.iter().chain(&row.whole).all(|speed| *speed > 0.0), "{row:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file is left");
    }
}
