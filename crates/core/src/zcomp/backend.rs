//! What a codec provides: one table entry, and the two directions.
//!
//! A backend is one file. It ends in its [`Backend`] entry, which [`super::Algorithm`] refers to;
//! nothing else in the crate knows it. Whatever a backend needs it takes in its constructors
//! (`ZC-1`); it has no lock, because a stream is used by one caller at a time.

#![forbid(unsafe_code)]

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::{Dictionary, Error};

/// The most units that any backend works on, and any stream tells, at once.
///
/// The Intel accelerator takes 8. Jobs and elements lie on the stack of the caller: 8 x (64 + 32) B = 768 B.
pub const BATCH_MAX: usize = 8;

/// The table entry of a codec.
#[derive(Debug)]
pub(super) struct Backend {
    /// The kernel's name.
    pub(super) name: &'static str,
    /// The levels that it accepts.
    pub(super) levels: RangeInclusive<i32>,
    /// The level if none is given.
    pub(super) level_default: i32,
    /// The units that it works on at once, 1 to [`BATCH_MAX`].
    pub(super) batch_max: usize,
    /// Sets up the state to compress units of so many bytes at a level of `levels`.
    pub(super) compressor: fn(level: i32, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error>,
    /// Sets up the state to decompress what any level produced.
    pub(super) decompressor: fn() -> Result<Box<dyn Decompressor>, Error>,
    /// What it can do beyond a level.
    pub(super) extended: Option<Extended>,
}

/// A codec's parameters beyond the level.
#[derive(Debug)]
pub(super) struct Extended {
    /// The levels that it accepts with them.
    pub(super) levels: RangeInclusive<i32>,
    /// The windows that it accepts, if any.
    pub(super) windows: Option<RangeInclusive<u8>>,
    /// Sets up what the streams share.
    pub(super) share: fn(&Wanted) -> Result<Box<dyn Shared>, Error>,
}

/// What an extended codec is set up for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) level: i32,
    pub(super) unit_bytes: usize,
    pub(super) window: Option<u8>,
    pub(super) dictionary: Option<Arc<Dictionary>>,
}

impl Wanted {
    /// The dictionary of a codec that has no other extension.
    pub(super) fn dictionary(&self) -> &Arc<Dictionary> {
        self.dictionary.as_ref().expect("Params::checked: no window, so a dictionary is why")
    }
}

/// What the streams of one codec share: a dictionary, digested once.
pub(super) trait Shared {
    /// Sets up the state to compress. It keeps what it shares alive.
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error>;

    /// Sets up the state to decompress. It keeps what it shares alive.
    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error>;

    /// Bytes taken at set-up, apart from the streams.
    fn memory_bytes(&self) -> usize;
}

/// A codec without parameters but its level, as shared by nobody.
pub(super) struct Plain {
    pub(super) backend: &'static Backend,
    pub(super) level: i32,
    pub(super) unit_bytes: usize,
}

impl Shared for Plain {
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error> {
        (self.backend.compressor)(self.level, self.unit_bytes)
    }

    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error> {
        (self.backend.decompressor)()
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// One element of a batch.
#[derive(Debug, Default)]
pub(super) struct Job<'a> {
    /// The place of the element in the caller's batch.
    pub(super) index: usize,
    /// The unit.
    pub(super) source: &'a [u8],
    /// Where its compressed form goes: [`super::compressed_bytes_max`] bytes.
    pub(super) dest: &'a mut [u8],
    /// What the backend did.
    pub(super) answer: Answer,
}

/// What a backend did with one job.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// It wrote so many bytes at the start of `dest`.
    Compressed(usize),
    /// `dest` is too small.
    Incompressible,
    /// Anything else; also the answer to a job that was not touched.
    #[default]
    Failed,
}

/// The state that compresses.
pub(super) trait Compressor: Send {
    /// Compresses one unit to the start of `dest`.
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer;

    /// Gives each of the `jobs`, at most `batch_max`, its answer. Who works on several at once has one of
    /// its own.
    fn compress(&mut self, jobs: &mut [Job<'_>]) {
        for job in jobs {
            job.answer = self.compress_unit(job.source, job.dest);
        }
    }

    /// Bytes taken at set-up.
    fn memory_bytes(&self) -> usize;
}

/// `source` does not decompress to exactly `dest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Corrupt;

/// The state that decompresses.
pub(super) trait Decompressor: Send {
    /// Fills `dest` from `source`, as `ZC-4` says.
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt>;

    /// Fills at least the first `wanted` bytes of `unit`, which is as long as the unit is, and writes
    /// nothing outside of it. The rest of `source` need not be looked at.
    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        debug_assert!(wanted <= unit.len(), "a prefix");
        self.decompress(source, unit)
    }

    /// Bytes taken at set-up.
    fn memory_bytes(&self) -> usize;
}
