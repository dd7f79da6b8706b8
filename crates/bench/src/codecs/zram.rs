//! The same data in the kernel's zram.

use std::fmt;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::{Value, json};
use zfolio_sys::clock;

use super::seconds;
use crate::kernel::journal::{self, Journal};
use crate::kernel::zram::{Disk, algorithms, usable};
use crate::mapping::Anonymous;

/// Bytes of one write or read.
const CALL_BYTES: usize = 1 << 20;

/// The results of zram with one algorithm.
#[derive(Debug)]
pub(crate) struct Beside {
    algorithm: String,
    ratio: f64,
    used_over_codec: f64,
    write_mb_s: f64,
    read_mb_s: f64,
}

impl Beside {
    pub(crate) fn json(&self) -> Value {
        json!({
            "algorithm": self.algorithm,
            "unit_bytes": 4096,
            "ratio": self.ratio,
            "used_over_codec": self.used_over_codec,
            "write_mb_s": self.write_mb_s,
            "read_mb_s": self.read_mb_s,
        })
    }
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Beside { algorithm, ratio, used_over_codec, write_mb_s, read_mb_s } = self;
        write!(
            f,
            "{algorithm:<18}   4K {ratio:>5.2} {used_over_codec:>12.3} {write_mb_s:>8.0} {read_mb_s:>6.0}"
        )
    }
}

/// Writes `sample` to a new device with each algorithm of this kernel, reads it back and compares.
pub(crate) fn measure(sample: &Anonymous) -> Result<Vec<Beside>, String> {
    usable()?;
    let journal = Journal::open(Path::new(journal::PATH)).map_err(|error| error.to_string())?;
    journal::undo_on_panic();
    let offered = algorithms();
    let measured = offered.iter().map(|algorithm| {
        let beside = measure_one(&journal, sample, algorithm);
        journal.undo()?;
        beside
    });
    measured.collect::<io::Result<Vec<Beside>>>().map_err(|error| error.to_string())
}

fn measure_one(journal: &Journal, sample: &Anonymous, algorithm: &str) -> io::Result<Beside> {
    let bytes = Disk::LABEL_BYTES + sample.len() as u64;
    let disk = Disk::set_up(journal, bytes, algorithm)?;
    let device = disk.open()?;
    let mut back = Anonymous::new(sample.len())?;
    // Populates the pages before the reading is timed.
    back.fill(1);
    let at = |index: usize| Disk::LABEL_BYTES + (index * CALL_BYTES) as u64;
    let start = clock::monotonic_ns();
    for (index, chunk) in sample.chunks(CALL_BYTES).enumerate() {
        device.write_all_at(chunk, at(index))?;
    }
    let wrote = seconds(clock::monotonic_ns() - start);
    let start = clock::monotonic_ns();
    for (index, chunk) in back.chunks_mut(CALL_BYTES).enumerate() {
        device.read_exact_at(chunk, at(index))?;
    }
    let read = seconds(clock::monotonic_ns() - start);
    if sample[..] != back[..] {
        return Err(io::Error::other(format!(
            "zram with {algorithm} did not give back what it got"
        )));
    }
    let (compressed, used) = disk.compressed_and_used()?;
    let mb = sample.len() as f64 / 1e6;
    Ok(Beside {
        algorithm: algorithm.to_owned(),
        ratio: sample.len() as f64 / used.max(1) as f64,
        used_over_codec: used as f64 / compressed.max(1) as f64,
        write_mb_s: mb / wrote,
        read_mb_s: mb / read,
    })
}
