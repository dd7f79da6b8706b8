//! What a codec provides: a name, how many units it works on at once, and the two directions.
//!
//! Anybody can write a [`Backend`], an accelerator's driver for example, and make a codec of it with
//! [`super::Zcomp::with_backend`]. Whether it does what is promised here [`super::conformance`] tests.
//!
//! The codecs of this crate are one file each. Such a file ends in a [`Software`] entry, which
//! [`super::Algorithm`] refers to; nothing else in the crate knows the codec.
//!
//! Each direction works on batches: `submit` starts a batch, `poll` says whether all of it is done, and `wait` passes
//! the time between two polls. Software compresses unit by unit within `submit`, so that `poll` has nothing to wait
//! for: these are the default methods. Whatever a codec needs it takes in its constructors (`ZC-1`); it needs no lock,
//! because a stream is used by one caller at a time.

use std::hint::spin_loop;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::{Dictionary, Error};

/// The most units that any backend works on, and any stream tells, at once.
///
/// The Intel accelerator takes 8. Jobs and elements lie on the stack of the caller: 8 x (64 + 32) B = 768 B.
pub const BATCH_MAX: usize = 8;

/// A codec that its implementer provides, in this crate or outside of it.
///
/// The methods are called at set-up only: what they return does the work.
pub trait Backend {
    /// Its name, for messages and figures.
    fn name(&self) -> &'static str;

    /// The units that it works on at once, 1 to [`BATCH_MAX`]: no batch is longer.
    fn batch_max(&self) -> usize {
        1
    }

    /// Sets up the state of one stream to compress units of `unit_bytes`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] or [`Error::SetUp`]; nothing is kept.
    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error>;

    /// Sets up the state of one stream to decompress units of `unit_bytes`.
    ///
    /// # Errors
    ///
    /// As [`Backend::compressor`].
    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error>;

    /// Bytes that its streams share, which it took at set-up.
    fn memory_bytes(&self) -> usize {
        0
    }
}

/// The table entry of a codec of this crate.
#[derive(Debug)]
pub(super) struct Software {
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
    pub(super) backend: &'static Software,
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

/// One unit to compress.
#[derive(Debug, Default)]
pub struct Job<'a> {
    /// The place of the unit in the caller's batch.
    pub(super) index: usize,
    /// The unit.
    pub source: &'a [u8],
    /// Where its compressed form goes: [`super::compressed_bytes_max`] bytes.
    pub dest: &'a mut [u8],
    /// What became of it.
    pub answer: Answer,
}

/// What a backend did with one job.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It wrote so many bytes, at least one, at the start of `dest`.
    Compressed(usize),
    /// `dest` is too small.
    Incompressible,
    /// Anything else; also the answer to a job that was not touched.
    #[default]
    Failed,
}

/// The state that compresses.
pub trait Compressor: Send {
    /// Compresses one unit to the start of `dest`.
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer;

    /// Starts a batch of at most [`Backend::batch_max`] jobs. It may be empty: then there is nothing to do. An
    /// implementer that works on several units at once has a method of its own; this one does all of the work before it
    /// returns.
    ///
    /// # Safety
    ///
    /// Until [`Compressor::poll`] has returned true for these jobs, or has panicked, the caller calls nothing
    /// but `poll`, with the same jobs, and `wait`; the bytes of each `source` stay as they are, and those of each
    /// `dest` are the implementer's alone: an accelerator may read and write them between the calls.
    #[allow(unsafe_code, reason = "a device works on the bytes after the call has returned")]
    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        for job in jobs {
            job.answer = self.compress_unit(job.source, job.dest);
        }
    }

    /// Whether every one of the `jobs`, those of the last `submit`, has its answer. Never waits; a panic
    /// leaves nothing at work.
    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let _ = jobs;
        true
    }

    /// Passes a moment of the time that a batch takes: called after each `poll` that has returned false, before the
    /// next one. It returns within microseconds, whether anything is done or not, and does not panic.
    fn wait(&mut self) {
        spin_loop();
    }

    /// Bytes taken at set-up.
    fn memory_bytes(&self) -> usize;
}

/// `source` does not decompress to exactly `dest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

/// One unit to decompress, all of it, to one place.
#[derive(Debug)]
pub struct Unpack<'a> {
    /// The compressed unit.
    pub source: &'a [u8],
    /// Where the unit goes: exactly as long as the unit.
    pub dest: &'a mut [u8],
    /// What became of it; [`Corrupt`] if it was not touched.
    pub result: Result<(), Corrupt>,
}

impl Default for Unpack<'_> {
    fn default() -> Self {
        Unpack { source: &[], dest: &mut [], result: Err(Corrupt) }
    }
}

impl<'a> Unpack<'a> {
    /// A unit that is still to be decompressed.
    pub fn new(source: &'a [u8], dest: &'a mut [u8]) -> Self {
        Unpack { source, dest, result: Err(Corrupt) }
    }
}

/// The state that decompresses.
pub trait Decompressor: Send {
    /// Fills `dest` from `source`, as `ZC-4` says.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] unless all of `source` was used to fill all of `dest`.
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt>;

    /// [`Decompressor::decompress`] without a device, of a unit that came out wrong: `source` may be right all the
    /// same.
    ///
    /// # Errors
    ///
    /// As those of [`Decompressor::decompress`].
    fn decompress_by_software(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.decompress(source, dest)
    }

    /// Fills at least the first `wanted` bytes of `unit`, which is as long as the unit is, and writes
    /// nothing outside of it. The rest of `source` need not be looked at.
    ///
    /// # Errors
    ///
    /// [`Corrupt`] unless `wanted` bytes were filled.
    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        debug_assert!(wanted <= unit.len(), "a prefix");
        self.decompress(source, unit)
    }

    /// Starts a batch of at most [`Backend::batch_max`] jobs, or of none, as [`Compressor::submit`] does.
    ///
    /// # Safety
    ///
    /// Until [`Decompressor::poll`] has returned true for these jobs, or has panicked, the caller calls nothing
    /// but `poll`, with the same jobs, and `wait`; the bytes of each `source` stay as they are, and those of each
    /// `dest` are the implementer's alone.
    #[allow(unsafe_code, reason = "a device works on the bytes after the call has returned")]
    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        for job in jobs {
            job.result = self.decompress(job.source, job.dest);
        }
    }

    /// Whether every one of the `jobs`, those of the last `submit`, has its result. Never waits; a panic
    /// leaves nothing at work.
    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        let _ = jobs;
        true
    }

    /// Passes a moment, as [`Compressor::wait`] does.
    fn wait(&mut self) {
        spin_loop();
    }

    /// Bytes taken at set-up.
    fn memory_bytes(&self) -> usize;
}
