//! `zfolio bench codecs`: each algorithm, level and unit on the memory of real processes.
//!
//! # What is measured
//!
//! - **ratio**: the data divided by the pool's pages and metadata.
//! - **store, load**: the complete work of the product on a unit, with checksum and allocator, in
//!   MB (10^6 bytes) of data per second of CPU time, on one thread.
//! - **of bare**: the same without the checksum, divided by the speed of the codec alone in the
//!   same round; the median of the rounds. The codec alone writes the compressed units one after
//!   the other into memory that exists already, as in lzbench, and reads them from there. **new**
//!   stores into a new pool, which gets its zeroed pages from the system during the measurement.
//!   **in** stores into a pool that has room, because objects were removed before (objects above
//!   192 KiB leave no room: their pages are freed with them). **out** loads.
//! - **fault**: one load at a random place, p50 and p99.
//! - **2 threads**: the speed of two threads that store into one pool with room, divided by the
//!   speed of one thread; and the same for the codec alone, which is the upper bound. These two,
//!   and the faults, are measured in elapsed time, so the machine must be idle.
//!
//! Every unit is loaded and compared once per setting.

mod choice;
mod measure;
mod plot;
mod zram;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::json;
use zfolio_core::number;
use zfolio_core::size;
use zfolio_core::zcomp::{Algorithm, Bare, Params, compressed_bytes_max};
use zfolio_pager::with_dictionary;

use crate::compare::setting::Compression;
use crate::compare::{Failure, corpus_path, go_on, print};
use crate::corpus::parse_size;
use crate::mapping::Anonymous;
use crate::usemem::Corpus;
use crate::{kernel, os};
use choice::Choice;
use measure::Measured;
use zram::Beside;

pub(crate) const HELP: &str = "\
Examples:
  zfolio bench codecs
  zfolio bench codecs --corpus corpus.bin --setting lz4:4K --setting zstd,level=3:16K
  sudo zfolio bench codecs --against kernel --plot codecs.svg --json > codecs.json";

/// The unit sizes in the table, unless `--setting` says otherwise.
const UNITS: [&str; 3] = ["4K", "16K", "64K"];

/// How many pieces, spread over the corpus, the sample consists of.
const PIECES: u64 = 64;

/// With a smaller sample a setting takes too little time for clock and caches.
const SAMPLE_BYTES_MIN: u64 = 4 << 20;

/// Arguments of `zfolio bench codecs`.
#[derive(Args, Debug)]
pub(crate) struct CodecsArgs {
    /// Pages of real processes [default: made once, with 'zfolio corpus make', in ~/.cache/zfolio]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// How much of it to use, in pieces from all over
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// ALGORITHM[,level=N]:UNIT; may be repeated
    /// [default: every algorithm at some levels, in units of 4K, 16K and 64K]
    #[arg(long, value_name = "SETTING")]
    setting: Vec<Compression>,
    /// Beside the same data in a zram device (root)
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Rounds; each speed is the median
    #[arg(short, long, default_value_t = 3, value_parser = number::within(1_u32..=1000))]
    repeats: u32,
    /// One JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Draw ratio over speed
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Against {
    /// The kernel's zram
    Kernel,
}

/// Measures and prints. Always returns true, since every problem is a failure.
pub(crate) fn codecs(args: &CodecsArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    let path = corpus_path(args.corpus.as_deref())?;
    let sample = read_sample(&path, args.bytes)?;
    let settings = if args.setting.is_empty() { defaults() } else { args.setting.clone() };
    // Everything that can be refused is refused before the measurement.
    let params = settings.iter().map(params_of).collect::<Result<Vec<Params>, Failure>>()?;
    let refused = |file: &Path, error: io::Error| {
        Failure::Refused(format!("--plot {}: {error}", file.display()))
    };
    if let Some(file) = &args.plot {
        // The old contents of the file stay until the drawing is ready.
        let opened = File::options().append(true).create(true).open(file);
        opened.map_err(|error| refused(file, error))?;
    }
    let mut rows = Vec::with_capacity(settings.len());
    for (setting, params) in settings.iter().zip(params) {
        go_on()?;
        eprintln!("zfolio: {setting}");
        let measured = measure::measure(setting, params, &sample, args.repeats);
        rows.push(measured.map_err(Failure::Wrong)?);
    }
    let (beside, note) = match args.against.map(|_| zram::measure(&sample)) {
        Some(Ok(beside)) => (beside, None),
        Some(Err(why)) => (Vec::new(), Some(format!("the kernel's zram was left out: {why}"))),
        None => (Vec::new(), None),
    };
    let title = title(&path, &sample, args.repeats);
    let choice = Choice::of(&rows);
    if args.json {
        print(&format!("{:#}\n", as_json(&title, &rows, &choice, &beside, note.as_deref())))?;
    } else {
        print(&as_text(&title, &rows, &choice, &beside, note.as_deref()))?;
    }
    if let Some(file) = &args.plot {
        let drawn = std::fs::write(file, plot::draw(&title, &rows, &choice));
        drawn.map_err(|error| refused(file, error))?;
    }
    Ok(true)
}

/// The codec of a setting, with its dictionary read.
fn params_of(setting: &Compression) -> Result<Params, Failure> {
    let params = setting.algorithm.parse::<Params>().and_then(with_dictionary);
    params.map_err(|error| Failure::Refused(format!("--setting {setting}: {error}")))
}

/// Every algorithm at levels that differ noticeably, smallest units first.
fn defaults() -> Vec<Compression> {
    let mut names = Vec::new();
    for algorithm in Algorithm::ALL {
        let levels: &[i32] = match algorithm {
            Algorithm::Lz4 => &[1, 4],
            Algorithm::Lz4hc => &[4, 9],
            Algorithm::Zstd => &[-3, 1, 3],
            Algorithm::Deflate => &[1, 6],
            _ => &[],
        };
        names.extend(levels.iter().map(|level| format!("{algorithm},level={level}")));
        names.extend(levels.is_empty().then(|| algorithm.to_string()));
    }
    let both = names.iter().flat_map(|name| UNITS.iter().map(move |unit| format!("{name}:{unit}")));
    both.map(|text| text.parse().expect("names and levels are the algorithm's own")).collect()
}

/// Compresses `unit` to the start of `dest`, which has room for all of it: a unit that does not shrink is copied.
/// Returns the length.
pub(crate) fn pack(codec: &mut Bare, unit: &[u8], dest: &mut [u8]) -> usize {
    let most = compressed_bytes_max(unit.len());
    codec.compress(unit, &mut dest[..most]).unwrap_or_else(|| {
        dest[..unit.len()].copy_from_slice(unit);
        unit.len()
    })
}

/// Fills `unit` from what [`pack`] has made of it. False: the codec does not read it.
pub(crate) fn unpack(codec: &mut Bare, packed: &[u8], unit: &mut [u8]) -> bool {
    if packed.len() < unit.len() {
        return codec.decompress(packed, unit);
    }
    unit.copy_from_slice(packed);
    true
}

/// Reads pieces of the corpus into one range of memory.
pub(crate) fn read_sample(path: &Path, bytes: u64) -> Result<Anonymous, Failure> {
    let corpus = Corpus::open(path).map_err(|error| Failure::Refused(error.to_string()))?;
    let bytes = bytes.min(corpus.bytes()) / (PIECES * kernel::FOLIO_BYTES_MAX);
    let bytes = bytes * PIECES * kernel::FOLIO_BYTES_MAX;
    if bytes < SAMPLE_BYTES_MIN {
        let line = "--bytes and the corpus: accepted: 4M or more of each";
        return Err(Failure::Refused(line.to_owned()));
    }
    let (piece, step) = (bytes / PIECES, corpus.bytes() / PIECES);
    let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    let mut file = File::open(path).map_err(failed)?;
    let mut sample =
        Anonymous::new(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(failed)?;
    let chunks = sample.chunks_exact_mut(usize::try_from(piece).unwrap_or(usize::MAX));
    for (number, chunk) in (0_u64..).zip(chunks) {
        // A multiple of the largest folio, so that adjacent pages of a process stay in one unit.
        let at = (number * step) & !(kernel::FOLIO_BYTES_MAX - 1);
        file.seek(SeekFrom::Start(at)).map_err(failed)?;
        file.read_exact(chunk).map_err(failed)?;
    }
    Ok(sample)
}

/// Converts nanoseconds.
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn title(path: &Path, sample: &[u8], rounds: u32) -> String {
    format!(
        "{} of {}; medians of {rounds} round(s), one thread; Linux {}",
        size::display(sample.len() as u64),
        path.display(),
        zfolio_sys::probe::kernel_release(),
    )
}

fn as_text(
    title: &str,
    rows: &[Measured],
    choice: &Choice,
    beside: &[Beside],
    note: Option<&str>,
) -> String {
    let mut text = format!("{title}\n\n");
    text += "                              pool/     meta-   store   load  of bare           \
             fault us       2 threads\n";
    text += "ALGORITHM          UNIT RATIO  codec   data %    MB/s   MB/s  new   in    out   \
             p50    p99    in    bare\n";
    for (index, row) in rows.iter().enumerate() {
        text += &format!("{row}{}\n", if choice.is_best(index) { "  *" } else { "" });
    }
    text += "\n* none of the others is both smaller and faster (store and load together)\n";
    for (what, index) in choice.named() {
        text += &format!("{what:>9}: {}\n", rows[index].setting);
    }
    if !beside.is_empty() {
        text += "\nthe same data in the kernel's zram, through its block device\n";
        text += "ALGORITHM          UNIT RATIO   used/codec    write   read MB/s\n";
        beside.iter().for_each(|row| text += &format!("{row}\n"));
    }
    note.into_iter().for_each(|note| text += &format!("\n{note}\n"));
    text
}

fn as_json(
    title: &str,
    rows: &[Measured],
    choice: &Choice,
    beside: &[Beside],
    note: Option<&str>,
) -> serde_json::Value {
    let rows_json = rows.iter().enumerate().map(|(index, row)| {
        let mut value = row.json();
        value["best"] = choice.is_best(index).into();
        value
    });
    let named = choice
        .named()
        .map(|(what, index)| (what.to_owned(), json!(rows[index].setting.to_string())));
    json!({
        "title": title,
        "settings": rows_json.collect::<Vec<_>>(),
        "recommended": serde_json::Map::from_iter(named),
        "zram": beside.iter().map(Beside::json).collect::<Vec<_>>(),
        "note": note,
    })
}

#[cfg(test)]
mod tests {
    use super::{UNITS, defaults};

    #[test]
    fn every_algorithm_and_unit_is_measured() {
        let settings = defaults();
        for algorithm in zfolio_core::zcomp::Algorithm::ALL {
            let own =
                |text: &str| text == algorithm.name() || text.starts_with(&format!("{algorithm},"));
            let count = settings.iter().filter(|setting| own(&setting.algorithm)).count();
            assert!(count >= UNITS.len() && count % UNITS.len() == 0, "{algorithm}: {count}");
        }
    }
}
