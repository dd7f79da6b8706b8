//! A compressed disk in memory as a [`Device`]: [`Zram`] with memory of the system, this thread's CPU and a clock.

use std::fmt;
use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::store::Key;
use zfolio_core::zcomp::{self, Params, Zcomp};
use zfolio_core::zram::{self, Zram};
use zfolio_core::zsmalloc::PageSource;
use zfolio_sys::{Errno, clock, cpu, random};

use crate::device::{Device, Error};

/// What a disk is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// The size of the disk in bytes: a multiple of the unit.
    pub disk_bytes: u64,
    /// The algorithms; the first compresses what is written, the others are for recompression.
    pub algorithms: Vec<Params>,
    /// What is compressed as one object.
    pub unit: UnitOrder,
    /// The most memory that it may take; 0: any amount.
    pub limit_bytes: u64,
}

/// Why there is no disk.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unmade {
    /// The size is no multiple of the unit, 0, or too large.
    Size,
    /// A codec could not be set up.
    Codec(zcomp::Error),
    /// The system gives no random bytes.
    Random(Errno),
}

impl fmt::Display for Unmade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unmade::Size => {
                f.write_str("the size of the disk is no multiple of the unit, 0, or too large")
            }
            Unmade::Codec(error) => error.fmt(f),
            Unmade::Random(error) => write!(f, "no random key: {error}"),
        }
    }
}

impl std::error::Error for Unmade {}

/// What is called when a unit turns out to be lost.
pub type Report = Box<dyn Fn(&zram::Error) + Send + Sync>;

/// See the module.
pub struct Ram {
    zram: Zram<Arc<dyn PageSource>>,
    since_ns: u64,
    report: Report,
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ram").field("stat", &self.zram.mm_stat()).finish_non_exhaustive()
    }
}

impl Ram {
    /// A disk of zeros, whose memory comes from `source`.
    ///
    /// # Errors
    ///
    /// See [`Unmade`].
    ///
    /// # Panics
    ///
    /// If there are no algorithms, or more than [`zram::ALGORITHMS_MAX`].
    pub fn new(
        config: &Config,
        source: Arc<dyn PageSource>,
        report: Report,
    ) -> Result<Ram, Unmade> {
        let cpus = cpu::online();
        let codec = |params: &Params| Zcomp::new(params.clone(), config.unit, cpus);
        let codecs = config.algorithms.iter().map(codec).collect::<Result<_, _>>();
        let mut secret = [0; Key::BYTES];
        random::fill(&mut secret).map_err(Unmade::Random)?;
        let codecs = codecs.map_err(Unmade::Codec)?;
        let zram = Zram::new(codecs, source, Key::new(secret), config.disk_bytes, cpus);
        let zram = zram.map_err(|_| Unmade::Size)?;
        zram.set_mem_limit(config.limit_bytes);
        Ok(Ram { zram, since_ns: clock::monotonic_ns(), report })
    }

    /// The disk.
    #[must_use]
    pub fn zram(&self) -> &Zram<Arc<dyn PageSource>> {
        &self.zram
    }

    /// Has the disk know the time: to be called each second or so.
    pub fn tick(&self) {
        let age_s = (clock::monotonic_ns() - self.since_ns) / 1_000_000_000;
        self.zram.set_now(u32::try_from(age_s).unwrap_or(u32::MAX));
    }

    fn answer(&self, done: Result<(), zram::Error>) -> Result<(), Error> {
        done.map_err(|error| match error {
            zram::Error::Invalid { .. } => Error::Invalid,
            zram::Error::NoSpace { .. } => Error::NoSpace,
            zram::Error::NoMemory => Error::NoMemory,
            error => {
                (self.report)(&error);
                Error::Io
            }
        })
    }
}

impl Device for Ram {
    fn size_bytes(&self) -> u64 {
        self.zram.disk_bytes()
    }

    fn preferred_bytes(&self) -> u32 {
        u32::try_from(self.zram.unit().bytes()).expect("2 MiB at most")
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.answer(self.zram.read(cpu::current(), at, into))
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Error> {
        self.answer(self.zram.write(cpu::current(), at, from))
    }

    fn discard(&self, at: u64, bytes: u64) -> Result<(), Error> {
        self.answer(self.zram.discard(cpu::current(), at, bytes))
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _keeps_room: bool) -> Result<(), Error> {
        // There is no room that could be kept: how much contents will take is not known.
        self.discard(at, bytes)
    }

    fn flush(&self) -> Result<(), Error> {
        // What is in memory survives everything but the end of this process.
        Ok(())
    }

    fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error> {
        self.answer(self.zram.runs(at, bytes, each))
    }
}
