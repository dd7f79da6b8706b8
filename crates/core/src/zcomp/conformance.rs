//! Whether a [`Backend`] keeps its promises: one call that a test of any backend makes.
//!
//! ```
//! use zfolio_core::page::UnitOrder;
//! use zfolio_core::zcomp::{conformance, software};
//!
//! # fn main() -> Result<(), zfolio_core::zcomp::Error> {
//! let unit = UnitOrder::DEFAULT;
//! let backend = software(&"lz4".parse()?, unit)?;
//! conformance::check(&*backend, &[unit]).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! [`check`] compresses and decompresses units of many kinds, one at a time and in batches of every length, 0
//! included, with damaged ones among them, on one stream and on streams of several threads. [`check_format`] checks
//! that one backend reads what another one writes. Each [`Promise`] that does not hold is reported once for each
//! size of unit. The units are random; the variable `SEED` chooses others, and every report has the seed.
//!
//! # What is not checked
//!
//! That no memory is allocated after set-up (`ZC-1`) needs an allocator that counts, and that no thread-local storage
//! is used (`ZC-2`) needs a look at the code. That damage is noticed is no promise: whatever decompresses to the right
//! length may be accepted, since a store has checksums. A backend that works with `unsafe` code should also be run
//! under an address sanitizer: here a write outside of a destination is seen only if it is within 256 bytes of it.
//!
//! # How
//!
//! Every part of the check runs on a thread of its own, with streams of its own, and reports each call that it is
//! about to make. So a panic is reported with its message, and a call that does not return, or a `poll` that never
//! returns true, is reported after [`PATIENCE`]; its thread is left behind. (Where panics abort, the first one ends the
//! process.)

#![deny(unsafe_code)]

pub(super) mod contents;
pub(super) mod guarded;
#[cfg(test)]
mod tests;
mod trial;

use std::any::Any;
use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{BATCH_MAX, Backend, Compressor, Decompressor};
use crate::page::UnitOrder;
use crate::testing::{Random, seed};
use trial::{Part, Trial};

/// How long any call to a backend may take: 2 MiB by the slowest codec take some seconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Threads that use streams of a backend at the same time.
const THREADS: usize = 4;

/// What a backend promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Promise {
    /// [`Backend::name`] is not empty.
    Name,
    /// [`Backend::batch_max`] is 1 to [`BATCH_MAX`].
    BatchMax,
    /// Streams of both directions are set up for every size of unit that is asked for.
    SetUp,
    /// `memory_bytes` is what was taken at set-up, and does not change (`ZC-1`).
    Memory,
    /// A compressed unit has 1 to `dest.len()` bytes (`ZC-3`).
    Length,
    /// Nothing outside of `dest` is written (`ZC-4`).
    Outside,
    /// The slices of a job stay what they are; only what they contain, and the answer, change.
    Job,
    /// Some unit shrinks.
    Shrinks,
    /// What was compressed decompresses to the same bytes.
    RoundTrip,
    /// A destination that is too small is [`Incompressible`](super::Answer::Incompressible), or what is in it
    /// decompresses.
    SmallDest,
    /// Each element of a batch has the result that it would have alone, in its own place.
    Batch,
    /// `Ok` only if all of `source` was used (`ZC-4`): bytes behind a unit make a difference.
    AllOfSource,
    /// `Ok` only if all of `dest` was written, and from `source` alone (`ZC-4`): it does not matter what was in `dest`.
    AllOfDest,
    /// A prefix is the beginning of the unit.
    Prefix,
    /// A unit that was damaged, or did not fit, changes nothing for those after it.
    Aftermath,
    /// Streams do not affect each other, whichever threads they are on.
    Streams,
    /// One backend reads what another one has written ([`check_format`]).
    Format,
    /// No call panics.
    NoPanic,
    /// Every call returns, and `poll` returns true in the end.
    Returns,
}

/// A promise that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The promise.
    pub promise: Promise,
    /// The size of the units.
    pub unit_bytes: usize,
    /// What happened, in one line.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Broken { promise, unit_bytes, what } = self;
        write!(f, "{promise:?}, units of {unit_bytes} bytes: {what}")
    }
}

/// What is wrong with a backend.
#[derive(Clone, PartialEq, Eq)]
pub struct Report {
    /// Its name.
    pub backend: String,
    /// The seed of the units.
    pub seed: u64,
    /// What does not hold: each promise once for each size of unit.
    pub broken: Vec<Broken>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SEED={}) breaks promises of zcomp::Backend:", self.backend, self.seed)?;
        self.broken.iter().try_for_each(|broken| write!(f, "\n  {broken}"))
    }
}

/// The same lines, so that `unwrap()` in a test prints them.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Report {}

/// Checks a backend with units of each of these sizes, all of which it accepts.
///
/// # Errors
///
/// What does not hold.
pub fn check(backend: &dyn Backend, units: &[UnitOrder]) -> Result<(), Report> {
    check_within(backend, units, PATIENCE)
}

fn check_within(
    backend: &dyn Backend,
    units: &[UnitOrder],
    patience: Duration,
) -> Result<(), Report> {
    let mut judge = Judge { broken: Vec::new(), patience };
    for unit in units {
        judge.check_unit(backend, unit.bytes());
    }
    judge.report(backend)
}

/// Checks that `reader` reads what `writer` writes, with units of each of these sizes. Whether either of them keeps its
/// other promises [`check`] says.
///
/// # Errors
///
/// What does not hold.
pub fn check_format(
    writer: &dyn Backend,
    reader: &dyn Backend,
    units: &[UnitOrder],
) -> Result<(), Report> {
    let mut judge = Judge { broken: Vec::new(), patience: PATIENCE };
    for unit in units {
        let unit_bytes = unit.bytes();
        let (writes, reads) = (writer.compressor(unit_bytes), reader.decompressor(unit_bytes));
        match (writes, reads) {
            (Ok(compressor), Ok(decompressor)) => {
                let streams = vec![Streams { compressor, decompressor }];
                let batch_max = writer.batch_max().min(reader.batch_max()).clamp(1, BATCH_MAX);
                let part = judge.start((Part::Format, 0), unit_bytes, batch_max, streams);
                judge.wait(part, unit_bytes);
            }
            (Err(error), _) | (_, Err(error)) => {
                judge.add(Promise::SetUp, unit_bytes, error.to_string());
            }
        }
    }
    judge.report(writer)
}

/// A stream for each direction.
struct Streams {
    compressor: Box<dyn Compressor>,
    decompressor: Box<dyn Decompressor>,
}

impl Streams {
    fn new(backend: &dyn Backend, unit_bytes: usize) -> Result<Streams, super::Error> {
        Ok(Streams {
            compressor: backend.compressor(unit_bytes)?,
            decompressor: backend.decompressor(unit_bytes)?,
        })
    }

    fn memory_bytes(&self) -> [usize; 2] {
        [self.compressor.memory_bytes(), self.decompressor.memory_bytes()]
    }
}

/// What a part of the check reports while it runs.
enum Told {
    /// It is about to make this call.
    Calls(&'static str),
    /// A promise does not hold.
    Broken(Promise, String),
}

/// A part of the check that runs.
struct Running {
    told: Receiver<Told>,
    thread: JoinHandle<()>,
}

/// Runs the parts of a check, and collects what they find.
struct Judge {
    broken: Vec<Broken>,
    patience: Duration,
}

impl Judge {
    /// Notes a promise that does not hold, if it is the first time with this size.
    fn add(&mut self, promise: Promise, unit_bytes: usize, what: String) {
        let is_known = |it: &Broken| it.promise == promise && it.unit_bytes == unit_bytes;
        if !self.broken.iter().any(is_known) {
            self.broken.push(Broken { promise, unit_bytes, what });
        }
    }

    /// Whether a call did not return: with the others it would be the same.
    fn is_stuck(&self) -> bool {
        self.broken.iter().any(|broken| broken.promise == Promise::Returns)
    }

    fn report(self, backend: &dyn Backend) -> Result<(), Report> {
        let Judge { broken, .. } = self;
        let backend = backend.name().to_owned();
        if broken.is_empty() { Ok(()) } else { Err(Report { backend, seed: seed(), broken }) }
    }

    fn check_unit(&mut self, backend: &dyn Backend, unit_bytes: usize) {
        if backend.name().is_empty() {
            self.add(Promise::Name, unit_bytes, "the name is empty".to_owned());
        }
        let batch_max = backend.batch_max();
        if !(1..=BATCH_MAX).contains(&batch_max) {
            let what = format!("batches of {batch_max}; accepted: 1 to {BATCH_MAX}");
            return self.add(Promise::BatchMax, unit_bytes, what);
        }
        let shared_bytes = backend.memory_bytes();
        for part in Part::OF_ONE_STREAM {
            if self.is_stuck() {
                return;
            }
            match Streams::new(backend, unit_bytes) {
                Ok(streams) => {
                    let running = self.start((part, 0), unit_bytes, batch_max, vec![streams]);
                    self.wait(running, unit_bytes);
                }
                Err(error) => {
                    let what = format!("a stream cannot be set up: {error}");
                    return self.add(Promise::SetUp, unit_bytes, what);
                }
            }
        }
        let streams = (0..2 * THREADS).map(|_| Streams::new(backend, unit_bytes));
        match streams.collect::<Result<Vec<_>, _>>() {
            Ok(mut streams) => {
                let mut take = || streams.drain(..2).collect();
                let parts: Vec<Running> = (0..)
                    .take(THREADS)
                    .map(|number| (Part::Together, number))
                    .map(|part| self.start(part, unit_bytes, batch_max, take()))
                    .collect();
                for part in parts {
                    if !self.is_stuck() {
                        self.wait(part, unit_bytes);
                    }
                }
            }
            Err(error) => {
                let what = format!("{} streams cannot be set up: {error}", 2 * THREADS);
                self.add(Promise::SetUp, unit_bytes, what);
            }
        }
        let now_bytes = backend.memory_bytes();
        if now_bytes != shared_bytes {
            let what =
                format!("the backend had {shared_bytes} bytes at first, and {now_bytes} now");
            self.add(Promise::Memory, unit_bytes, what);
        }
    }

    /// Starts a part; those with the same number have the same random units.
    fn start(
        &self,
        (part, number): (Part, u64),
        unit_bytes: usize,
        batch_max: usize,
        streams: Vec<Streams>,
    ) -> Running {
        let (tell, told) = mpsc::channel();
        let random = Random::new(seed() + number);
        let thread = thread::Builder::new().name("conformance".to_owned()).spawn(move || {
            Trial::new(unit_bytes, batch_max, streams, random, tell).run(part);
        });
        Running { told, thread: thread.expect("the system has a thread for a test") }
    }

    /// Waits for the end of a part, a call that does not return, or a panic.
    fn wait(&mut self, part: Running, unit_bytes: usize) {
        let mut call = "nothing yet";
        loop {
            match part.told.recv_timeout(self.patience) {
                Ok(Told::Calls(next)) => call = next,
                Ok(Told::Broken(promise, what)) => self.add(promise, unit_bytes, what),
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("{call}: no end after {:?}", self.patience);
                    // The thread has memory that the backend may still use, so it is left behind.
                    return self.add(Promise::Returns, unit_bytes, what);
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if let Err(panic) = part.thread.join() {
            let what = format!("{call}: panicked: {}", message(&*panic));
            self.add(Promise::NoPanic, unit_bytes, what);
        }
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
