//! A codec whose batches a crew works on.

use std::fmt;
use std::hint::spin_loop;
use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::{
    Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Error, Job, Params, Unpack,
    Zcomp,
};
use zfolio_sys::{clock, thread};

use crate::batch::{Batch, End, Made};
use crate::crew::Crew;
use crate::desk::State;

/// Work that a worker must be able to take off the submitter to be offered a batch: about twice what it takes to wake
/// a thread on another CPU.
pub const OFFER_NS: u64 = 20_000;

/// Bytes of units that go to a crew at once: longer units go one by one, as without a crew. A stream has room for the
/// compressed form of so many bytes.
const BATCH_BYTES: usize = 512 << 10;

/// Polls before the submitter lets others have its CPU, one of which may be the worker that it waits for.
const PATIENCE: u32 = 64;

/// The rank of the state of one worker, which only that worker takes, holding nothing. A codec may have locks of its
/// own.
const RANK_HAND: u8 = 2;

/// One codec state for each worker.
type Hands<C> = Box<[Mutex<RANK_HAND, Box<C>>]>;

/// What the workers have for the two directions of one codec.
enum Skill {
    Compress(Hands<dyn Compressor>),
    Decompress(Hands<dyn Decompressor>),
}

/// What a stream shares with workers.
pub(crate) struct Shared {
    batch: Batch,
    skill: Arc<Skill>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl Shared {
    /// What a worker does: takes jobs until none is left. In a child of `fork` its hand may be one that the parent's
    /// worker held at that moment; then it helps nobody with this codec.
    pub(crate) fn work(&self, worker: usize) {
        match &*self.skill {
            Skill::Compress(hands) => {
                let Some(mut hand) = hands[worker].try_lock() else { return };
                self.take_all(|source, dest| answered(hand.compress_unit(source, dest)));
            }
            Skill::Decompress(hands) => {
                let Some(mut hand) = hands[worker].try_lock() else { return };
                self.take_all(|source, dest| usize::from(hand.decompress(source, dest).is_ok()));
            }
        }
    }

    fn take_all(&self, mut work: impl FnMut(&[u8], &mut [u8]) -> Made) {
        while let Some(taken) = self.batch.take(End::Last) {
            taken.work(&mut work);
        }
    }
}

/// How a slot says what a compressor answered.
fn answered(answer: Answer) -> Made {
    match answer {
        Answer::Compressed(bytes) => bytes,
        Answer::Incompressible => usize::MAX,
        Answer::Failed => 0,
    }
}

fn answer(made: Made) -> Answer {
    match made {
        0 => Answer::Failed,
        usize::MAX => Answer::Incompressible,
        bytes => Answer::Compressed(bytes),
    }
}

/// A codec whose batches a crew works on, together with the thread that submits them.
pub struct Workers {
    codec: Box<dyn Backend>,
    crew: Arc<Crew>,
    batch_max: usize,
    compress: Arc<Skill>,
    decompress: Arc<Skill>,
    memory_bytes: usize,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codec = self.codec.name();
        f.debug_struct("Workers").field("codec", &codec).field("crew", &self.crew).finish()
    }
}

impl Workers {
    /// Has a crew work on the batches of `codec`, whose units have `unit_bytes`.
    ///
    /// # Errors
    ///
    /// Those of the codec: it is set up for each worker, in both directions.
    pub fn new(
        codec: Box<dyn Backend>,
        unit_bytes: usize,
        crew: Arc<Crew>,
    ) -> Result<Workers, Error> {
        let crew_batch = (BATCH_BYTES / unit_bytes).clamp(1, BATCH_MAX);
        let batch_max = if crew.is_empty() { 1 } else { crew_batch };
        let workers = if batch_max > 1 { crew.len() } else { 0 };
        let compress = (0..workers).map(|_| codec.compressor(unit_bytes).map(Mutex::new));
        let compress = compress.collect::<Result<Hands<_>, _>>()?;
        let decompress = (0..workers).map(|_| codec.decompressor(unit_bytes).map(Mutex::new));
        let decompress = decompress.collect::<Result<Hands<_>, _>>()?;
        let memory_bytes = compress.iter().map(|hand| hand.lock().memory_bytes()).sum::<usize>()
            + decompress.iter().map(|hand| hand.lock().memory_bytes()).sum::<usize>();
        Ok(Workers {
            codec,
            crew,
            batch_max,
            compress: Arc::new(Skill::Compress(compress)),
            decompress: Arc::new(Skill::Decompress(decompress)),
            memory_bytes,
        })
    }
}

/// Sets up a codec of the library's, whose batches a crew works on.
///
/// # Errors
///
/// Those of [`Zcomp::new`].
pub fn with_crew(
    params: Params,
    unit: UnitOrder,
    streams: usize,
    crew: &Arc<Crew>,
) -> Result<Zcomp, Error> {
    Zcomp::around(params, unit, streams, &|codec| {
        let workers = Workers::new(codec, unit.bytes(), Arc::clone(crew))?;
        Ok(Box::new(workers) as Box<dyn Backend>)
    })
}

impl Backend for Workers {
    fn name(&self) -> &'static str {
        self.codec.name()
    }

    fn batch_max(&self) -> usize {
        self.batch_max.max(self.codec.batch_max())
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        let codec = self.codec.compressor(unit_bytes)?;
        if self.batch_max == 1 {
            return Ok(codec);
        }
        Ok(Box::new(Stream { codec, line: Line::new(&self.crew, &self.compress) }))
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        let codec = self.codec.decompressor(unit_bytes)?;
        if self.batch_max == 1 {
            return Ok(codec);
        }
        Ok(Box::new(Stream { codec, line: Line::new(&self.crew, &self.decompress) }))
    }

    fn memory_bytes(&self) -> usize {
        self.codec.memory_bytes() + self.memory_bytes
    }
}

/// A codec's state for one stream, and its line to the crew.
struct Stream<C: ?Sized> {
    codec: Box<C>,
    line: Line,
}

impl Compressor for Stream<dyn Compressor> {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        self.codec.compress_unit(source, dest)
    }

    #[allow(unsafe_code, reason = "workers have the bytes after the call has returned")]
    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        if jobs.is_empty() {
            // Nothing would be at work, so nobody would take the offer of it back.
            return;
        }
        if let [job] = jobs {
            job.answer = self.codec.compress_unit(job.source, job.dest);
            return;
        }
        let each = jobs.iter_mut().map(|job| (job.source, &mut *job.dest));
        // SAFETY: the caller's contract is the line's.
        unsafe { self.line.submit(each, |from, to| answered(self.codec.compress_unit(from, to))) };
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let set = |(job, made): (&mut Job<'_>, Made)| job.answer = answer(made);
        self.line.is_done(|made| jobs.iter_mut().zip(made).for_each(set))
    }

    fn memory_bytes(&self) -> usize {
        self.codec.memory_bytes() + size_of::<Shared>()
    }
}

impl Decompressor for Stream<dyn Decompressor> {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.codec.decompress(source, dest)
    }

    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        self.codec.decompress_prefix(source, unit, wanted)
    }

    #[allow(unsafe_code, reason = "workers have the bytes after the call has returned")]
    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        if jobs.is_empty() {
            // As in the other direction.
            return;
        }
        if let [job] = jobs {
            job.result = self.codec.decompress(job.source, job.dest);
            return;
        }
        let each = jobs.iter_mut().map(|job| (job.source, &mut *job.dest));
        let work = |from: &[u8], to: &mut [u8]| self.codec.decompress(from, to).is_ok().into();
        // SAFETY: the caller's contract is the line's.
        unsafe { self.line.submit(each, work) };
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        let result = |made| if made == 0 { Err(Corrupt) } else { Ok(()) };
        let set = |(job, made): (&mut Unpack<'_>, Made)| job.result = result(made);
        self.line.is_done(|made| jobs.iter_mut().zip(made).for_each(set))
    }

    fn memory_bytes(&self) -> usize {
        self.codec.memory_bytes() + size_of::<Shared>()
    }
}

/// A stream's line to its crew.
struct Line {
    crew: Arc<Crew>,
    shared: Arc<Shared>,
    /// Jobs at work; 0: there is no batch.
    count: u32,
    /// A bit for each desk with an offer of this batch.
    offered: u64,
    polls: u32,
    /// What a job takes here, smoothed.
    job_ns: u64,
}

impl Line {
    fn new(crew: &Arc<Crew>, skill: &Arc<Skill>) -> Self {
        let shared = Arc::new(Shared { batch: Batch::new(), skill: Arc::clone(skill) });
        Line { crew: Arc::clone(crew), shared, count: 0, offered: 0, polls: 0, job_ns: 0 }
    }

    /// Publishes jobs, two at least, offers them to workers, and works too, until no job is left to take.
    ///
    /// # Safety
    ///
    /// The contract of [`Compressor::submit`].
    #[allow(unsafe_code, reason = "the contract of a backend's submit")]
    unsafe fn submit<'j>(
        &mut self,
        jobs: impl Iterator<Item = (&'j [u8], &'j mut [u8])>,
        mut work: impl FnMut(&[u8], &mut [u8]) -> Made,
    ) {
        // SAFETY: until poll() says that all are done the caller leaves the bytes alone; and Settle waits for workers
        // if this panics before.
        self.count = unsafe { self.shared.batch.publish(jobs) };
        let settle = Settle(self);
        let line = &mut *settle.0;
        line.offer();
        let began = clock::monotonic_ns();
        let mut mine = 0_u64;
        while let Some(taken) = line.shared.batch.take(End::First) {
            taken.work(&mut work);
            mine += 1;
        }
        if let Some(job_ns) = (clock::monotonic_ns() - began).checked_div(mine) {
            line.job_ns = if line.job_ns == 0 { job_ns } else { (line.job_ns * 7 + job_ns) / 8 };
        }
        std::mem::forget(settle);
    }

    /// Offers the batch to as many workers as have [`OFFER_NS`] of work each; first to those that are awake, and to
    /// none without a thread.
    fn offer(&mut self) {
        let others = u64::from(self.count - 1);
        let mut wanted = (self.job_ns * others / OFFER_NS).min(others);
        self.offered = 0;
        for state in [State::Awake, State::Asleep] {
            for (worker, desk) in self.crew.desks().iter().enumerate() {
                if wanted == 0 {
                    return;
                }
                if desk.is(state) && desk.offer(&self.shared) {
                    self.offered |= 1 << worker;
                    wanted -= 1;
                }
            }
        }
    }

    /// Whether the batch is done; then `told` gets what was made of its jobs, in their order.
    fn is_done(&mut self, told: impl FnOnce(&mut dyn Iterator<Item = Made>)) -> bool {
        if self.count == 0 {
            return true;
        }
        if !self.shared.batch.is_done(self.count) {
            self.polls += 1;
            if self.polls > PATIENCE {
                thread::yield_now();
            }
            return false;
        }
        told(&mut (0..self.count as usize).map(|index| self.shared.batch.made(index)));
        self.end();
        true
    }

    /// Nothing is at work.
    fn end(&mut self) {
        for (worker, desk) in self.crew.desks().iter().enumerate() {
            if self.offered & 1 << worker != 0 {
                desk.withdraw(&self.shared);
            }
        }
        (self.count, self.offered, self.polls) = (0, 0, 0);
    }
}

impl Drop for Line {
    /// `WORK-2`: waits for workers that have found nothing more to take, and are about to say so.
    fn drop(&mut self) {
        while self.crew.desks().iter().any(|desk| desk.has(&self.shared)) {
            thread::yield_now();
        }
    }
}

/// Ends a batch whose submitter panics: its bytes are somebody else's afterwards.
struct Settle<'l>(&'l mut Line);

impl Drop for Settle<'_> {
    fn drop(&mut self) {
        while self.0.shared.batch.take(End::First).is_some() {}
        while !self.0.shared.batch.is_done(self.0.count) {
            spin_loop();
        }
        self.0.end();
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
