//! Codecs behind one batch interface, with streams that are set up once.
//!
//! A [`Zcomp`] compresses **units** of one size with one [`Algorithm`] at one level. It owns a
//! **stream** (codec state and output buffer) per CPU and direction. The caller hands over a batch
//! of any length; each element gets its own [`Outcome`], so that one element that will not shrink
//! changes nothing for its neighbours, and software and hardware report in the same way.
//!
//! # Invariants
//!
//! - `ZC-1` After [`Zcomp::new`] nothing allocates and nothing frees, neither Rust nor C: this code
//!   runs below a `malloc` whose memory it manages. The C libraries work in memory that the
//!   backend gave them at set-up.
//! - `ZC-2` No thread-local storage: this code runs in signal handlers, and in threads of programs
//!   that know nothing of it.
//! - `ZC-3` A compressed unit has 1 to [`compressed_bytes_max`] bytes.
//! - `ZC-4` `decompress` reads nothing but `source`, writes nothing but `dest`, and returns `Ok`
//!   only if it used all of `source` and wrote all of `dest`, whatever bytes `source` holds. Of a
//!   prefix it need not use all of `source`.
//!
//! # Concurrency
//!
//! One lock per stream, of [`RANK_COMPRESS`] or [`RANK_DECOMPRESS`]. A caller takes its CPU's
//! stream, or else any free one, or else waits for its own. The directions have streams of their
//! own, because a fault that decompresses may interrupt a reclaim that compresses on the same CPU.
//! `each` is called with the compress stream held, so that the result need not be copied first:
//! what it locks has a rank above [`RANK_COMPRESS`], and it never calls `compress`. Likewise for
//! `decompress_batch` and [`RANK_DECOMPRESS`].
//!
//! # Cost
//!
//! [`Zcomp::memory_bytes`] tells. `docs/design/zcomp.md` has the table.

#![deny(unsafe_code)]

mod backend;
mod bare;
#[allow(unsafe_code, reason = "calls C")]
mod deflate;
mod dictionary;
mod ibm842;
#[allow(unsafe_code, reason = "calls C")]
mod lz4;
#[allow(unsafe_code, reason = "calls C")]
mod lz4hc;
#[allow(unsafe_code, reason = "loads and stores that may run over, in one file")]
mod lzo;
mod params;
mod sample;
mod stream;
#[cfg(test)]
mod tests;
#[allow(unsafe_code, reason = "calls C")]
mod zstd;

use std::fmt;
use std::ops::RangeInclusive;

use crate::page::UnitOrder;
use crate::prefetch::prefetch;
pub use backend::BATCH_MAX;
use backend::{Plain, Shared, Wanted};
pub use bare::Bare;
pub use dictionary::{DICTIONARY_BYTES, Dictionary};
pub use params::{ALGORITHM_DEFAULT, Algorithm, Params};
use stream::{CompressStream, DecompressStream, Lane};
pub use zstd::train::{train, without_tables};

/// Rank of the lock of a compress stream.
pub const RANK_COMPRESS: u8 = 40;

/// Rank of the lock of a decompress stream. Above [`RANK_COMPRESS`]: a fault may interrupt a
/// reclaim that holds one.
pub const RANK_DECOMPRESS: u8 = 41;

const _: () = assert!(RANK_COMPRESS < RANK_DECOMPRESS);

/// What became of one element of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// The unit is this machine word, in this machine's byte order, repeated.
    SameFilled(u64),
    /// The unit, compressed. The bytes live in the stream's buffer: copy them before returning.
    Compressed(&'a [u8]),
    /// The unit would not shrink to [`compressed_bytes_max`], or a sample of it says so; keep it as it is,
    /// or not at all.
    Incompressible,
    /// The codec failed. The unit is untouched and still the caller's.
    Failed,
}

/// One element of a batch that was compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element<'a> {
    /// Its place in the batch.
    pub index: usize,
    /// What became of it.
    pub outcome: Outcome<'a>,
}

/// One element of a batch to decompress.
#[derive(Debug)]
pub struct Packed<'a, 'd> {
    /// The compressed unit.
    pub source: &'a [u8],
    /// Where it goes, piece after piece; they need not be adjacent.
    pub dest: &'a mut [&'d mut [u8]],
    /// How much of it is wanted.
    pub extent: Extent,
}

impl Packed<'_, '_> {
    fn dest_bytes(&self) -> usize {
        self.dest.iter().map(|piece| piece.len()).sum()
    }
}

/// How much of a unit is decompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All of it, and it is exactly as long as the destination.
    Whole,
    /// The bytes from its beginning for which there is a destination. What comes behind them is not
    /// decompressed where the format allows it, and not looked at: no checksum of the unit can be checked.
    Prefix,
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No algorithm has this name. Whoever wrote it corrects it.
    Algorithm {
        /// What was written.
        given: String,
    },
    /// The algorithm has no such parameter. Whoever wrote it corrects it.
    Parameter {
        /// The algorithm.
        algorithm: Algorithm,
        /// What was written.
        given: String,
    },
    /// The level is not a number, or out of the algorithm's range. Whoever wrote it corrects it.
    Level {
        /// The algorithm.
        algorithm: Algorithm,
        /// What it accepts, beside the other parameters.
        levels: RangeInclusive<i32>,
        /// What was written.
        given: String,
    },
    /// The window is not a number, or out of the algorithm's range. Whoever wrote it corrects it.
    Window {
        /// The algorithm.
        algorithm: Algorithm,
        /// What it accepts.
        windows: RangeInclusive<u8>,
        /// What was written.
        given: String,
    },
    /// A parameter is given more than once. Whoever wrote it corrects it.
    Repeated {
        /// The algorithm.
        algorithm: Algorithm,
        /// The parameter.
        given: String,
    },
    /// The dictionary cannot be used. Whoever named it corrects it.
    Dictionary {
        /// The file.
        path: String,
        /// What is wrong with it, and what is accepted.
        why: String,
    },
    /// No dictionary can be made of these samples. Give more, or others.
    Training {
        /// How many there were.
        samples: usize,
    },
    /// There was no memory for a stream. Nothing was kept; try with fewer streams.
    OutOfMemory {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// These bytes are not a unit of that length compressed with this algorithm. Data is lost; do
    /// not retry. What `dest` holds now is arbitrary.
    Corrupt {
        /// The algorithm.
        algorithm: Algorithm,
        /// Length of the compressed bytes.
        source_bytes: usize,
        /// Length that they had to fill.
        dest_bytes: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Algorithm { given } => {
                write!(f, "unknown algorithm '{given}': accepted are ")?;
                Algorithm::ALL.iter().enumerate().try_for_each(|(index, algorithm)| {
                    write!(f, "{}{algorithm}", if index == 0 { "" } else { ", " })
                })
            }
            Error::Parameter { algorithm, given } => {
                let (levels, default) = (algorithm.levels(), algorithm.level_default());
                let (low, high) = (levels.start(), levels.end());
                write!(f, "{algorithm} has no parameter '{given}': accepted is ")?;
                write!(f, "level=N from {low} to {high} (default {default})")?;
                if let Some(windows) = algorithm.windows() {
                    write!(f, ", window=N from {} to {}", windows.start(), windows.end())?;
                }
                f.write_str(if algorithm.takes_dictionary() { ", dict=FILE" } else { "" })
            }
            Error::Level { algorithm, levels, given } => {
                let (low, high) = (levels.start(), levels.end());
                write!(f, "{algorithm} has no level '{given}': accepted are ")?;
                write!(f, "{low} to {high} (default {})", algorithm.level_default())
            }
            Error::Window { algorithm, windows, given } => {
                let (low, high) = (windows.start(), windows.end());
                write!(f, "{algorithm} has no window '{given}': accepted are ")?;
                write!(f, "{low} to {high} (default {high})")
            }
            Error::Repeated { algorithm, given } => {
                write!(f, "{algorithm} has parameter '{given}' twice: accepted is each once")
            }
            Error::Dictionary { path, why } => write!(f, "dictionary '{path}': {why}"),
            Error::Training { samples } => {
                write!(
                    f,
                    "{samples} samples are too few, or have nothing in common: accepted are "
                )?;
                write!(f, "at least ten times the dictionary's length of data that repeats itself")
            }
            Error::OutOfMemory { algorithm } => {
                write!(f, "no memory for a stream of {algorithm}")
            }
            Error::Corrupt { algorithm, source_bytes, dest_bytes } => {
                write!(f, "{source_bytes} bytes are not {dest_bytes} bytes compressed ")?;
                write!(f, "with {algorithm}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// The longest compressed form that is kept of a unit of `unit_bytes`: 15/16 of it.
///
/// A codec is given a destination of this length, so it gives up early on what will not shrink.
/// What saves less than a sixteenth is better kept as it is: for 4 KiB that is at most 256 bytes,
/// about what a size class and the metadata of the object cost, and each load would pay for the
/// codec where it could copy.
#[must_use]
pub const fn compressed_bytes_max(unit_bytes: usize) -> usize {
    unit_bytes - unit_bytes / 16
}

/// One codec at one level for units of one size, with its streams.
pub struct Zcomp {
    params: Params,
    unit: UnitOrder,
    compress: Box<[Lane<RANK_COMPRESS, CompressStream>]>,
    decompress: Box<[Lane<RANK_DECOMPRESS, DecompressStream>]>,
    memory_bytes: usize,
}

impl fmt::Debug for Zcomp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zcomp")
            .field("params", &self.params)
            .field("unit", &self.unit)
            .field("streams", &self.compress.len())
            .field("memory_bytes", &self.memory_bytes)
            .finish_non_exhaustive()
    }
}

impl Zcomp {
    /// Sets up `streams` streams for each direction. All memory is taken here (`ZC-1`).
    ///
    /// # Errors
    ///
    /// [`Error::Level`], [`Error::Window`], [`Error::Parameter`] if `params` has one that its algorithm does
    /// not, [`Error::Dictionary`] if that was not read or is not one, [`Error::OutOfMemory`] if there is none.
    ///
    /// # Panics
    ///
    /// If `streams` is 0.
    pub fn new(params: Params, unit: UnitOrder, streams: usize) -> Result<Zcomp, Error> {
        assert!(streams > 0, "a codec needs a stream");
        let shared = shared(&params, unit)?;
        let batch_max = params.algorithm.backend().batch_max;
        let compress = (0..streams)
            .map(|_| {
                let compressor = shared.compressor()?;
                Ok(Lane::new(CompressStream::new(compressor, batch_max, unit.bytes())))
            })
            .collect::<Result<Box<[_]>, Error>>()?;
        let decompress = (0..streams)
            .map(|_| Ok(Lane::new(DecompressStream::new(shared.decompressor()?, unit.bytes()))))
            .collect::<Result<Box<[_]>, Error>>()?;
        let memory_bytes = size_of_val(&*compress)
            + size_of_val(&*decompress)
            + shared.memory_bytes()
            + compress.iter().map(|lane| lane.wait().memory_bytes()).sum::<usize>()
            + decompress.iter().map(|lane| lane.wait().memory_bytes()).sum::<usize>();
        Ok(Zcomp { params, unit, compress, decompress, memory_bytes })
    }

    /// What it was made with. It decompresses what was compressed with the same, and nothing else.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// The units that the backend works on at once: 1 for software. A batch may have any length;
    /// one that is a multiple of this wastes nothing.
    #[must_use]
    pub fn batch_max(&self) -> usize {
        self.params.algorithm.backend().batch_max
    }

    /// Compresses each source, with the stream of `cpu` or another that is free.
    ///
    /// Each element is told once, alone or with others, at most [`BATCH_MAX`] at once, while the
    /// stream is held. Elements that the codec need not see may be told before others of the same batch.
    ///
    /// # Panics
    ///
    /// If a source is not exactly one unit long.
    pub fn compress(&self, cpu: usize, sources: &[&[u8]], each: &mut dyn FnMut(&[Element<'_>])) {
        for source in sources {
            assert_eq!(source.len(), self.unit.bytes(), "a source is one unit");
            prefetch(source.as_ptr(), sample::FIRST_BYTES);
        }
        stream::hold(&self.compress, cpu).compress(sources, each);
    }

    /// Decompresses `source` into `dest`, with the stream of `cpu` or another that is free.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] unless all of `source` was used to fill all of `dest` (`ZC-4`). Bytes
    /// that were changed and still fill it are not noticed: that is the store's checksum's task.
    pub fn decompress(&self, cpu: usize, source: &[u8], dest: &mut [u8]) -> Result<(), Error> {
        let mut result = Ok(());
        let one = Packed { source, dest: &mut [dest], extent: Extent::Whole };
        self.decompress_batch(cpu, &mut [one], &mut |_, told| result = told);
        result
    }

    /// Decompresses each element of `batch`, with the stream of `cpu` or another that is free.
    ///
    /// `each(index, result)` is called once per element, in order, while the stream is held; an element
    /// that fails changes nothing for the others. Its errors are those of [`Zcomp::decompress`]; of a
    /// [`Extent::Prefix`] all of `dest` was filled, and the rest of `source` may be anything.
    pub fn decompress_batch(
        &self,
        cpu: usize,
        batch: &mut [Packed<'_, '_>],
        each: &mut dyn FnMut(usize, Result<(), Error>),
    ) {
        let algorithm = self.params.algorithm;
        let mut stream = stream::hold(&self.decompress, cpu);
        for (index, packed) in batch.iter_mut().enumerate() {
            let result = stream.decompress(packed).map_err(|_| Error::Corrupt {
                algorithm,
                source_bytes: packed.source.len(),
                dest_bytes: packed.dest_bytes(),
            });
            each(index, result);
        }
    }

    /// The memory of all streams, mapped or not.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

/// What the streams of a codec of these parameters share.
fn shared(params: &Params, unit: UnitOrder) -> Result<Box<dyn Shared>, Error> {
    let level = params.checked()?;
    let (backend, unit_bytes) = (params.algorithm.backend(), unit.bytes());
    if let Some(unread) = params.dictionary.as_ref().filter(|it| it.bytes().is_empty()) {
        let why = "it was not read".to_owned();
        return Err(Error::Dictionary { path: unread.path().to_owned(), why });
    }
    // A unit of no more than the window cannot refer further back.
    let widest = params.algorithm.windows().map_or(0, |windows| *windows.end());
    let window = params.window.filter(|window| *window < widest && unit_bytes >> window > 1);
    match &backend.extended {
        Some(extended) if window.is_some() || params.dictionary.is_some() => {
            let dictionary = params.dictionary.clone();
            (extended.share)(&Wanted { level, unit_bytes, window, dictionary })
        }
        _ => Ok(Box::new(Plain { backend, level, unit_bytes })),
    }
}
