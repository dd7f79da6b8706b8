//! Dictionaries: how one is read for `--algorithm`, and `zfolio dict train`.
//!
//! Training uses units spread over the corpus. Every eighth unit is kept back, and the gain of the
//! dictionary is measured on these: on the units that it was trained on, it would look too good.
//! The same units decide whether the dictionary keeps its tables of frequencies or only its bytes,
//! because zstd's faster levels use the tables even if they do not fit the data.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use zfolio_core::page::{UnitOrder, same_filled};
use zfolio_core::size;
use zfolio_core::zcomp::{
    self, Algorithm, DICTIONARY_BYTES, Dictionary, Element, Outcome, Params, Zcomp,
};
use zfolio_sys::files;
use zfolio_sys::partial::Partial;

use crate::arguments::parse_unit;
use crate::failure::Failure;
use crate::output::print;

/// A dictionary is trained on so many times its length, as zstd's documentation recommends.
const SAMPLES_PER_DICTIONARY: usize = 100;

/// One sample of this many is kept back from training.
const KEPT_BACK: usize = 8;

/// Arguments of `zfolio dict`.
#[derive(Args, Debug)]
pub(crate) struct DictArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Make a dictionary of typical memory
    #[command(after_help = "\
It gains most with small units (--unit 4K), and with data like the corpus. At the end its gain on a part
of the corpus that was not used for training is printed.

Examples:
  zfolio corpus capture $(pidof redis-server) -o redis.bin
  zfolio dict train --corpus redis.bin -o redis.dict
  zfolio run --unit 4K --algorithm zstd,level=1,dict=redis.dict -- redis-server")]
    Train(TrainArgs),
}

/// Arguments of `zfolio dict train`.
#[derive(Args, Debug)]
struct TrainArgs {
    /// A file of typical memory: see 'zfolio corpus'
    #[arg(long, value_name = "FILE")]
    corpus: PathBuf,
    /// What will be compressed as one object: a power of two, 4K to 2M
    #[arg(long, short, value_name = "SIZE", default_value = "4K", value_parser = parse_unit)]
    unit: UnitOrder,
    /// The most bytes of the dictionary, 256 to 1M
    #[arg(long, value_name = "BYTES", default_value = "110K", value_parser = parse_length)]
    size: usize,
    /// Where to write
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
}

fn parse_length(given: &str) -> Result<usize, String> {
    let bytes = size::parse(given).map_err(|error| error.to_string())?;
    let bytes = usize::try_from(bytes).ok().filter(|bytes| DICTIONARY_BYTES.contains(bytes));
    bytes.ok_or_else(|| format!("'{given}' is not accepted; accepted: 256 to 1M"))
}

/// Reads the dictionary at `path`. Its path is made absolute, since children of the program read it
/// too, from any directory.
///
/// # Errors
///
/// One line: the file cannot be read, or cannot be a dictionary.
pub(crate) fn read(path: &str) -> Result<Dictionary, String> {
    let refused = |why: &dyn std::fmt::Display| format!("dictionary '{path}': {why}");
    let whole = Path::new(path).canonicalize().map_err(|error| refused(&error))?;
    let whole =
        whole.to_str().ok_or_else(|| refused(&"it is not UTF-8; accepted: a path that is"))?;
    if !is_usable(whole) {
        return Err(refused(&format!("its path is '{whole}'; accepted: a path without a comma")));
    }
    let bytes = files::read_whole(whole, *DICTIONARY_BYTES.end()).map_err(|errno| match errno {
        zfolio_sys::Errno::FBIG => {
            refused(&format!("it is too long; accepted: at most {} bytes", DICTIONARY_BYTES.end()))
        }
        other => refused(&std::io::Error::from(other)),
    })?;
    Dictionary::new(whole, bytes).map_err(|error| error.to_string())
}

/// Whether a dictionary can be used that is there: the library reads its path from ZFOLIO_ALGORITHM, where a comma ends
/// a parameter.
fn is_usable(path: &str) -> bool {
    !path.contains(',')
}

/// Runs `zfolio dict`.
///
/// # Errors
///
/// One line: a file cannot be read or written, or no dictionary can be made from the corpus.
pub(crate) fn dict(arguments: &DictArgs) -> Result<ExitCode, Failure> {
    let What::Train(arguments) = &arguments.what;
    let output = arguments.output.display();
    if !is_usable(&output.to_string()) {
        let line =
            format!("--output: '{output}' could not be used; accepted: a path without a comma");
        return Err(Failure::argument(line));
    }
    let samples = Samples::read(&arguments.corpus, arguments.unit, arguments.size)?;
    let corpus = arguments.corpus.display();
    let dictionary = zcomp::train(&samples.trained, arguments.unit.bytes(), arguments.size)
        .map_err(|error| Failure::argument(format!("--corpus: '{corpus}': {error}")))?;
    let dictionary = samples.better_form(dictionary)?;
    write_private(&arguments.output, dictionary.bytes()).map_err(|error| {
        Failure::argument(format!("--output: '{output}' cannot be written: {error}"))
    })?;
    let mut story = format!(
        "{output}: {} bytes, from {} units of {}\n",
        dictionary.bytes().len(),
        samples.trained.len() / arguments.unit.bytes(),
        arguments.unit
    );
    samples.write_gain(&dictionary, &mut story)?;
    print(&story)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a file that only this user may read, which replaces one of this name once it is whole: parts of a dictionary
/// are what was in the memory of processes, as it was there.
fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Of a link what it leads to is written. (To replace /dev/stdout would be worse.)
    let whole = path.canonicalize();
    let path = whole.as_deref().unwrap_or(path);
    // What is no file, as /dev/null, stays what it is.
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return OpenOptions::new().write(true).open(path)?.write_all(bytes);
    }
    let (partial, mut file) = Partial::create(path)?;
    file.write_all(bytes)?;
    partial.finish()
}

/// Units from a corpus.
struct Samples {
    unit: UnitOrder,
    trained: Vec<u8>,
    kept_back: Vec<u8>,
}

impl Samples {
    /// Reads units at equal distances, without same-filled ones.
    fn read(corpus: &Path, unit: UnitOrder, dictionary_bytes: usize) -> Result<Samples, Failure> {
        let failed = |error: std::io::Error| {
            Failure::argument(format!("--corpus: '{}' cannot be read: {error}", corpus.display()))
        };
        let file = File::open(corpus).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?;
        let unit_bytes = unit.bytes();
        let units = bytes.len() / unit_bytes as u64;
        let wanted = (SAMPLES_PER_DICTIONARY * dictionary_bytes / unit_bytes).max(64) as u64;
        let count = units.min(wanted);
        let mut samples = Samples { unit, trained: Vec::new(), kept_back: Vec::new() };
        let mut sample = vec![0; unit_bytes];
        for index in 0..count {
            let at = index * units / count * unit_bytes as u64;
            file.read_exact_at(&mut sample, at).map_err(failed)?;
            if same_filled(&sample).is_some() {
                continue;
            }
            let is_kept_back = index % KEPT_BACK as u64 == 0;
            let into = if is_kept_back { &mut samples.kept_back } else { &mut samples.trained };
            into.extend_from_slice(&sample);
        }
        Ok(samples)
    }

    /// The dictionary with or without its tables, whichever gains more with zstd at its default
    /// level.
    fn better_form(&self, trained: Vec<u8>) -> Result<Arc<Dictionary>, Failure> {
        let dictionary = |bytes: &[u8]| {
            let made = Dictionary::new("trained", bytes.to_vec());
            made.map(Arc::new).map_err(|error| Failure::machine(error.to_string()))
        };
        let (with, without) = (dictionary(&trained)?, zcomp::without_tables(&trained));
        if !DICTIONARY_BYTES.contains(&without.len()) {
            return Ok(with);
        }
        let without = dictionary(without)?;
        let ratio = |dictionary| self.ratio(Algorithm::Zstd, Some(dictionary));
        let is_without = ratio(Arc::clone(&without))? > ratio(Arc::clone(&with))?;
        Ok(if is_without { without } else { with })
    }

    /// Writes the ratio of the units that were kept back, without and with the dictionary.
    fn write_gain(&self, dictionary: &Arc<Dictionary>, story: &mut String) -> Result<(), Failure> {
        for algorithm in Algorithm::ALL.iter().filter(|algorithm| algorithm.takes_dictionary()) {
            let alone = self.ratio(*algorithm, None)?;
            let with_it = self.ratio(*algorithm, Some(Arc::clone(dictionary)))?;
            writeln!(story, "  {algorithm:<8} {alone:.2} -> {with_it:.2}")
                .expect("a String takes what it is given");
        }
        Ok(())
    }

    fn ratio(
        &self,
        algorithm: Algorithm,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<f64, Failure> {
        let params = Params { dictionary, ..algorithm.into() };
        let zcomp = Zcomp::new(params, self.unit, 1)
            .map_err(|error| Failure::machine(error.to_string()))?;
        // What a store keeps as a word never comes to a codec.
        let units = self.kept_back.chunks_exact(self.unit.bytes());
        let units: Vec<&[u8]> = units.filter(|unit| same_filled(unit).is_none()).collect();
        let mut stored_bytes = 0;
        zcomp.compress(0, &units, &mut |elements| {
            for Element { index, outcome } in elements {
                stored_bytes += match outcome {
                    Outcome::Compressed(bytes) => bytes.len(),
                    Outcome::Incompressible | Outcome::Failed => units[*index].len(),
                };
            }
        });
        Ok(self.kept_back.len() as f64 / f64::max(stored_bytes as f64, 1.0))
    }
}
