//! Codecs behind one batch interface, with streams that are set up once.
//!
//! A [`Zcomp`] compresses **units** of one size with one [`Algorithm`] at one level. It owns
//! **streams** (codec state and output buffer), one for each CPU and direction. The caller passes a
//! batch of any length. Each element gets its own [`Outcome`]: an element that does not shrink does
//! not affect the others, and software and hardware report in the same way.
//!
//! # Invariants
//!
//! - `ZC-1` After [`Zcomp::new`] neither Rust nor C code allocates or frees memory: this code runs
//!   below a `malloc` whose memory it manages. The C libraries work in memory that the backend gave
//!   them at set-up.
//! - `ZC-2` No thread-local storage is used: this code runs in signal handlers, and in the
//!   program's threads.
//! - `ZC-3` A compressed unit has 1 to [`compressed_bytes_max`] bytes.
//! - `ZC-4` `decompress` reads only `source` and writes only `dest`. It returns `Ok` only if it
//!   used all of `source` and wrote all of `dest`, whatever bytes `source` holds. For a prefix it
//!   need not use all of `source`.
//!
//! # Concurrency
//!
//! One lock per stream, of [`RANK_COMPRESS`] or [`RANK_DECOMPRESS`]. A caller takes the stream of
//! its CPU; if that is taken, any free one; if none is free, it waits for its own. Each direction
//! has its own streams, because a fault that decompresses may interrupt a reclaim that compresses
//! on the same CPU. `each` is called while the compress stream is held, so that the result need not
//! be copied first. So all locks that `each` takes must rank above [`RANK_COMPRESS`], and it must
//! not call `compress`. The same holds for `decompress_batch` and [`RANK_DECOMPRESS`].
//!
//! # Cost
//!
//! [`Zcomp::memory_bytes`] returns the memory. `docs/design/zcomp.md` has a table.

#![deny(unsafe_code)]

pub mod asked;
mod backend;
mod bare;
pub mod conformance;
#[allow(unsafe_code, reason = "calls C")]
mod deflate;
mod dictionary;
#[allow(unsafe_code, reason = "calls C")]
mod lz4;
#[allow(unsafe_code, reason = "calls C")]
mod lz4hc;
#[allow(unsafe_code, reason = "loads and stores that may run over, in one file")]
mod lzo;
mod params;
mod sample;
#[allow(unsafe_code, reason = "the one caller of a backend's submit")]
mod stream;
mod sw842;
#[cfg(test)]
mod tests;
#[allow(unsafe_code, reason = "calls C")]
mod zstd;

use std::fmt;
use std::ops::RangeInclusive;

use crate::page::UnitOrder;
use crate::prefetch::prefetch;
pub use backend::{Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Job, Unpack};
use backend::{Plain, Shared, Software, Wanted};
pub use bare::Bare;
pub use deflate::crc32;
pub use dictionary::{DICTIONARY_BYTES, Dictionary};
pub use params::{ALGORITHM_DEFAULT, Algorithm, Choice, Params};
use stream::{CompressStream, DecompressStream, Streams};
pub use zstd::train::{train, without_tables};

/// Rank of the lock of a compress stream.
pub const RANK_COMPRESS: u8 = 40;

/// Rank of the lock of a decompress stream. Above [`RANK_COMPRESS`], because a fault may interrupt
/// a reclaim that holds a compress stream.
pub const RANK_DECOMPRESS: u8 = 41;

const _: () = assert!(RANK_COMPRESS < RANK_DECOMPRESS);

/// The result for one element of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// The unit, compressed. The bytes live in the stream's buffer: copy them before returning.
    Compressed(&'a [u8]),
    /// The unit does not shrink to [`compressed_bytes_max`], or a sample says so. Keep it as it is,
    /// or not at all.
    Incompressible,
    /// The codec failed. The unit is unchanged and still belongs to the caller.
    Failed,
}

/// One element of a batch that was compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element<'a> {
    /// Its place in the batch.
    pub index: usize,
    /// Its result.
    pub outcome: Outcome<'a>,
}

/// One element of a batch to decompress.
#[derive(Debug)]
pub struct Packed<'a, 'd> {
    /// The compressed unit.
    pub source: &'a [u8],
    /// The destination, in order; its parts need not be adjacent.
    pub dest: &'a mut [&'d mut [u8]],
    /// How much of the unit to decompress.
    pub extent: Extent,
}

impl Packed<'_, '_> {
    fn dest_bytes(&self) -> usize {
        self.dest.iter().map(|piece| piece.len()).sum()
    }
}

/// How much of a unit to decompress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The whole unit, which is exactly as long as the destination.
    Whole,
    /// The beginning of the unit, as long as the destination. The rest is not decompressed if the
    /// format allows that, and not checked: a checksum of the unit cannot be verified.
    Prefix,
}

/// The error of a codec.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No algorithm has this name. The user must correct it.
    Algorithm {
        /// What was written.
        given: String,
    },
    /// The same where [`Choice::Auto`] is accepted too.
    Choice {
        /// What was written.
        given: String,
    },
    /// The algorithm has no such parameter. The user must correct it.
    Parameter {
        /// The algorithm.
        algorithm: Algorithm,
        /// What was written.
        given: String,
    },
    /// The level is not a number, or out of the algorithm's range. The user must correct it.
    Level {
        /// The algorithm.
        algorithm: Algorithm,
        /// The accepted levels, given the other parameters.
        levels: RangeInclusive<i32>,
        /// What was written.
        given: String,
    },
    /// The window is not a number, or out of the algorithm's range. The user must correct it.
    Window {
        /// The algorithm.
        algorithm: Algorithm,
        /// The accepted windows.
        windows: RangeInclusive<u8>,
        /// What was written.
        given: String,
    },
    /// A parameter is given more than once. The user must correct it.
    Repeated {
        /// The algorithm.
        algorithm: Algorithm,
        /// The parameter.
        given: String,
    },
    /// The dictionary cannot be used. The user must correct it.
    Dictionary {
        /// The file.
        path: String,
        /// What is wrong with it, and what is accepted.
        why: String,
    },
    /// No dictionary can be made from these samples. Pass more samples, or others.
    Training {
        /// How many there were.
        samples: usize,
    },
    /// There was no memory for a stream. Nothing was kept; try fewer streams.
    OutOfMemory {
        /// The codec.
        codec: &'static str,
    },
    /// A codec could not be set up. Its implementer says why.
    SetUp {
        /// The codec.
        codec: &'static str,
        /// What is missing.
        why: String,
    },
    /// These bytes are not a unit of that length compressed with this codec. Data is lost; do
    /// not retry. What `dest` holds now is arbitrary.
    Corrupt {
        /// The codec.
        codec: &'static str,
        /// Length of the compressed bytes.
        source_bytes: usize,
        /// The length that they should decompress to.
        dest_bytes: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Algorithm { given } | Error::Choice { given } => {
                write!(f, "unknown algorithm '{given}'; accepted: ")?;
                if let Error::Choice { .. } = self {
                    write!(f, "{}, ", Choice::AUTO)?;
                }
                Algorithm::ALL.iter().enumerate().try_for_each(|(index, algorithm)| {
                    write!(f, "{}{algorithm}", if index == 0 { "" } else { ", " })
                })
            }
            Error::Parameter { algorithm, given } => {
                let (levels, default) = (algorithm.levels(), algorithm.level_default());
                let (low, high) = (levels.start(), levels.end());
                write!(f, "{algorithm} has no parameter '{given}'; accepted: ")?;
                write!(f, "level=N from {low} to {high} (default {default})")?;
                if let Some(windows) = algorithm.windows() {
                    write!(f, ", window=N from {} to {}", windows.start(), windows.end())?;
                }
                f.write_str(if algorithm.takes_dictionary() { ", dict=FILE" } else { "" })
            }
            Error::Level { algorithm, levels, given } => {
                let (low, high) = (levels.start(), levels.end());
                write!(f, "{algorithm} has no level '{given}'; accepted: ")?;
                write!(f, "{low} to {high} (default {})", algorithm.level_default())
            }
            Error::Window { algorithm, windows, given } => {
                let (low, high) = (windows.start(), windows.end());
                write!(f, "{algorithm} has no window '{given}'; accepted: ")?;
                write!(f, "{low} to {high} (default {high})")
            }
            Error::Repeated { algorithm, given } => {
                write!(f, "{algorithm} has parameter '{given}' twice; accepted: each once")
            }
            Error::Dictionary { path, why } => write!(f, "dictionary '{path}': {why}"),
            Error::Training { samples } => {
                write!(f, "{samples} samples are too few, or have nothing in common; accepted: ")?;
                write!(f, "at least ten times the dictionary's length of data that repeats itself")
            }
            Error::OutOfMemory { codec } => write!(f, "no memory for a stream of {codec}"),
            Error::SetUp { codec, why } => write!(f, "{codec} cannot be set up: {why}"),
            Error::Corrupt { codec, source_bytes, dest_bytes } => {
                write!(f, "{source_bytes} bytes are not {dest_bytes} bytes compressed ")?;
                write!(f, "with {codec}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// The longest compressed form that is kept of a unit of `unit_bytes`: 15/16 of it.
///
/// A codec gets a destination of this length, so it stops early on a unit that does not shrink. A
/// unit that would save less than a sixteenth is better kept as it is: for 4 KiB the saving is at
/// most 256 bytes, about what a size class and the object's metadata cost, and each load would have
/// to decompress instead of copying.
#[must_use]
pub const fn compressed_bytes_max(unit_bytes: usize) -> usize {
    unit_bytes - unit_bytes / 16
}

/// Puts an accelerator around a codec: what it writes and reads is what the codec does.
pub type Accelerate<'a> = &'a dyn Fn(Box<dyn Backend>) -> Result<Box<dyn Backend>, Error>;

/// One codec at one level for units of one size, with its streams.
pub struct Zcomp {
    name: &'static str,
    /// None of a codec that is not one of this crate's.
    params: Option<Params>,
    unit: UnitOrder,
    batch_max: usize,
    compress: Streams<RANK_COMPRESS, CompressStream>,
    decompress: Streams<RANK_DECOMPRESS, DecompressStream>,
    /// What the streams share.
    shared_bytes: usize,
}

impl fmt::Debug for Zcomp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zcomp")
            .field("name", &self.name)
            .field("params", &self.params)
            .field("unit", &self.unit)
            .field("streams", &self.compress.count())
            .field("memory_bytes", &self.memory_bytes())
            .finish_non_exhaustive()
    }
}

impl Zcomp {
    /// Sets up `streams` streams for each direction of a codec of this crate. All memory is taken
    /// here (`ZC-1`).
    ///
    /// # Errors
    ///
    /// [`Error::Level`], [`Error::Window`] or [`Error::Parameter`] if the algorithm does not accept
    /// one of `params`; [`Error::Dictionary`] if the dictionary was not read or is malformed;
    /// [`Error::OutOfMemory`].
    ///
    /// # Panics
    ///
    /// If `streams` is 0.
    pub fn new(params: Params, unit: UnitOrder, streams: usize) -> Result<Zcomp, Error> {
        Zcomp::around(params, unit, streams, &Ok)
    }

    /// The same with an accelerator around the codec.
    ///
    /// # Errors
    ///
    /// Those of [`Zcomp::new`], and of `accelerate`.
    ///
    /// # Panics
    ///
    /// If `streams` is 0.
    pub fn around(
        params: Params,
        unit: UnitOrder,
        streams: usize,
        accelerate: Accelerate<'_>,
    ) -> Result<Zcomp, Error> {
        let codec = accelerate(software(&params, unit)?)?;
        let zcomp = Zcomp::with_backend(&*codec, unit, streams)?;
        Ok(Zcomp { params: Some(params), ..zcomp })
    }

    /// Sets up `streams` streams for each direction of any codec.
    ///
    /// # Errors
    ///
    /// Those of the `backend`.
    ///
    /// # Panics
    ///
    /// If `streams` is 0, or the batch of the `backend` is 0 or more than [`BATCH_MAX`].
    pub fn with_backend(
        backend: &dyn Backend,
        unit: UnitOrder,
        streams: usize,
    ) -> Result<Zcomp, Error> {
        assert!(streams > 0, "a codec needs a stream");
        let (bytes, batch_max) = (unit.bytes(), backend.batch_max());
        let compress = (0..streams)
            .map(|_| Ok(CompressStream::new(backend.compressor(bytes)?, batch_max, bytes)))
            .collect::<Result<Vec<_>, Error>>()?;
        let decompress = (0..streams)
            .map(|_| Ok(DecompressStream::new(backend.decompressor(bytes)?, batch_max, bytes)))
            .collect::<Result<Vec<_>, Error>>()?;
        let (compress_bytes, decompress_bytes) =
            (compress[0].memory_bytes(), decompress[0].memory_bytes());
        let compress = Streams::new(compress, compress_bytes);
        let decompress = Streams::new(decompress, decompress_bytes);
        let shared_bytes = backend.memory_bytes();
        let (name, params) = (backend.name(), None);
        Ok(Zcomp { name, params, unit, batch_max, compress, decompress, shared_bytes })
    }

    /// The codec's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it was made with, if the codec is one of this crate's. It decompresses what was compressed
    /// with the same, and nothing else.
    #[must_use]
    pub fn params(&self) -> Option<&Params> {
        self.params.as_ref()
    }

    /// The size of its units.
    #[must_use]
    pub fn unit(&self) -> UnitOrder {
        self.unit
    }

    /// How many units the backend compresses at once: 1 for software. A batch may have any length;
    /// a multiple of this number wastes nothing.
    #[must_use]
    pub fn batch_max(&self) -> usize {
        self.batch_max
    }

    /// Compresses each source, with the stream of `cpu` or another one that is free.
    ///
    /// `each` gets every element exactly once, in groups of at most [`BATCH_MAX`], while the stream
    /// is held. Elements that need no codec may be reported before others of the same batch.
    ///
    /// # Panics
    ///
    /// If a source is not exactly one unit long.
    pub fn compress(&self, cpu: usize, sources: &[&[u8]], each: &mut dyn FnMut(&[Element<'_>])) {
        for source in sources {
            assert_eq!(source.len(), self.unit.bytes(), "a source is one unit");
            prefetch(source.as_ptr(), sample::FIRST_BYTES);
        }
        self.compress.hold(cpu).compress(sources, each);
    }

    /// Decompresses `source` into `dest`, with the stream of `cpu` or another one that is free.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] unless all of `source` was used to fill all of `dest` (`ZC-4`). Changed
    /// bytes that still decompress to this length are not detected here: the store's checksum does
    /// that.
    pub fn decompress(&self, cpu: usize, source: &[u8], dest: &mut [u8]) -> Result<(), Error> {
        let mut result = Ok(());
        let one = Packed { source, dest: &mut [dest], extent: Extent::Whole };
        self.decompress_batch(cpu, &mut [one], &mut |_, told| result = told);
        result
    }

    /// Decompresses each element of `batch`, with the stream of `cpu` or another one that is free.
    ///
    /// `each(index, result)` is called once per element, in order, while the stream is held. An
    /// element that fails does not affect the others. The errors are those of
    /// [`Zcomp::decompress`]; for an [`Extent::Prefix`] only all of `dest` must be filled, and the
    /// rest of `source` may be anything.
    pub fn decompress_batch(
        &self,
        cpu: usize,
        batch: &mut [Packed<'_, '_>],
        each: &mut dyn FnMut(usize, Result<(), Error>),
    ) {
        let codec = self.name;
        let mut stream = self.decompress.hold(cpu);
        for (index, packed) in batch.iter_mut().enumerate() {
            let result = stream.decompress(packed).map_err(|Corrupt| Error::Corrupt {
                codec,
                source_bytes: packed.source.len(),
                dest_bytes: packed.dest_bytes(),
            });
            each(index, result);
        }
    }

    /// Decompresses whole units, each to one place, with the stream of `cpu` or another that is free, in
    /// batches of [`Zcomp::batch_max`]. Each has its own result; one that fails changes nothing for the others.
    pub fn unpack(&self, cpu: usize, units: &mut [Unpack<'_>]) {
        self.decompress.hold(cpu).unpack(units);
    }

    /// Decompresses a unit that came out wrong once more, without a device. False: `source` is at fault.
    #[cold]
    pub(crate) fn unpack_by_software(&self, cpu: usize, source: &[u8], dest: &mut [u8]) -> bool {
        self.decompress.hold(cpu).decompress_by_software(source, dest).is_ok()
    }

    /// The memory of the streams that were used so far, and of what all share: more once more threads compress or
    /// decompress at once. The others have been set up, and are hardly resident.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.shared_bytes + self.compress.used_bytes() + self.decompress.used_bytes()
    }
}

/// A codec of this crate as a [`Backend`], for units of this size only: what an accelerator falls back to, or whose
/// format it claims ([`conformance::check_format`]).
///
/// # Errors
///
/// As [`Zcomp::new`].
pub fn software(params: &Params, unit: UnitOrder) -> Result<Box<dyn Backend>, Error> {
    Ok(Box::new(Named { software: params.algorithm.backend(), shared: shared(params, unit)? }))
}

/// See [`software`].
struct Named {
    software: &'static Software,
    shared: Box<dyn Shared>,
}

impl Backend for Named {
    fn name(&self) -> &'static str {
        self.software.name
    }

    fn batch_max(&self) -> usize {
        self.software.batch_max
    }

    fn compressor(&self, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        self.shared.compressor()
    }

    fn decompressor(&self, _unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        self.shared.decompressor()
    }

    fn memory_bytes(&self) -> usize {
        self.shared.memory_bytes()
    }
}

/// Makes what the streams of a codec with these parameters share.
fn shared(params: &Params, unit: UnitOrder) -> Result<Box<dyn Shared>, Error> {
    let level = params.checked()?;
    let (backend, unit_bytes) = (params.algorithm.backend(), unit.bytes());
    if let Some(unread) = params.dictionary.as_ref().filter(|it| it.bytes().is_empty()) {
        let why = "it was not read".to_owned();
        return Err(Error::Dictionary { path: unread.path().to_owned(), why });
    }
    // A unit that is no longer than the window cannot refer further back.
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
