//! The driver: a `Backend` whose batches are done by the device.
//!
//! All memory is taken at set-up: eight jobs with their buffers for each stream. What the device does not accept in
//! time, or at all, the driver does itself, in the same format. So a device that goes away costs time, and no byte.

use std::array;
use std::sync::Arc;

use zfolio_core::zcomp::{
    Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Error, Job as ToCompress,
    Unpack, compressed_bytes_max,
};

use crate::device::{Device, Job, Kind, Mailbox, Refused};
use crate::words;

/// Polls that find the queue full, before the driver does a job itself.
const TRIES_MAX: u32 = 1000;

/// The accelerator as a codec.
pub(crate) struct Words {
    device: Arc<Device>,
}

impl Words {
    pub(crate) fn new(device: &Arc<Device>) -> Words {
        Words { device: Arc::clone(device) }
    }
}

impl Backend for Words {
    fn name(&self) -> &'static str {
        "words"
    }

    fn batch_max(&self) -> usize {
        BATCH_MAX
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        let room = compressed_bytes_max(unit_bytes);
        Ok(Box::new(Stream::new(&self.device, Kind::Compress, [unit_bytes, room])))
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        Ok(Box::new(Stream::new(&self.device, Kind::Decompress, [unit_bytes, unit_bytes])))
    }
}

/// Where a job of the present batch is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has ended, or there is none.
    Ended,
    /// It was refused so many times because the queue was full.
    Waits(u32),
    AtDevice,
}

/// What the next step of a job has led to.
enum Step {
    /// It goes on.
    UnderWay,
    /// The device has done it; the job is in its place.
    Done,
    /// The device does not do it.
    Refused,
}

/// One stream: a job for each place in a batch.
struct Stream {
    device: Arc<Device>,
    mailbox: Arc<Mailbox>,
    /// Those that are not at the device.
    jobs: [Option<Job>; BATCH_MAX],
    states: [State; BATCH_MAX],
    memory_bytes: usize,
}

impl Stream {
    fn new(device: &Arc<Device>, kind: Kind, [source, dest]: [usize; 2]) -> Stream {
        let job = |place| {
            let (source, dest) = (vec![0; source], vec![0; dest]);
            Some(Job { place, kind, source, source_bytes: 0, dest, dest_bytes: 0, done: None })
        };
        Stream {
            device: Arc::clone(device),
            mailbox: Arc::default(),
            jobs: array::from_fn(job),
            states: [State::Ended; BATCH_MAX],
            memory_bytes: BATCH_MAX * (source + dest),
        }
    }

    /// Copies a source to its job, and submits it.
    fn begin(&mut self, at: usize, source: &[u8], room: usize) -> Step {
        let job = self.jobs[at].as_mut().expect("the last batch has ended");
        if source.len() > job.source.len() || room > job.dest.len() {
            return Step::Refused;
        }
        job.source[..source.len()].copy_from_slice(source);
        (job.source_bytes, job.dest_bytes) = (source.len(), room);
        self.states[at] = State::Waits(0);
        self.step(at)
    }

    /// Takes a job that has not ended one step further. Never waits.
    fn step(&mut self, at: usize) -> Step {
        match self.states[at] {
            State::Waits(tries) => match self.device.submit(&mut self.jobs[at], &self.mailbox) {
                Ok(()) => {
                    self.states[at] = State::AtDevice;
                    Step::UnderWay
                }
                Err(Refused::Full) if tries < TRIES_MAX => {
                    self.states[at] = State::Waits(tries + 1);
                    Step::UnderWay
                }
                Err(_) => {
                    self.states[at] = State::Ended;
                    Step::Refused
                }
            },
            State::AtDevice => {
                self.jobs[at] = self.mailbox.lock()[at].take();
                if self.jobs[at].is_none() {
                    return Step::UnderWay;
                }
                self.states[at] = State::Ended;
                Step::Done
            }
            State::Ended => unreachable!("it is looked at before"),
        }
    }

    /// What the device made of a job.
    fn result(&self, at: usize) -> Option<&[u8]> {
        let job = self.jobs[at].as_ref().expect("it is done");
        Some(&job.dest[..job.done?])
    }

    /// The answer to a compression; `None`: it is under way.
    fn answer(&self, at: usize, step: &Step, source: &[u8], dest: &mut [u8]) -> Option<Answer> {
        let bytes = match step {
            Step::UnderWay => return None,
            Step::Refused => words::compress(source, dest),
            Step::Done => self.result(at).map(|result| {
                dest[..result.len()].copy_from_slice(result);
                result.len()
            }),
        };
        Some(bytes.map_or(Answer::Incompressible, Answer::Compressed))
    }

    /// The result of a decompression; `None`: it is under way.
    fn outcome(
        &self,
        at: usize,
        step: &Step,
        source: &[u8],
        dest: &mut [u8],
    ) -> Option<Result<(), Corrupt>> {
        let is_done = match step {
            Step::UnderWay => return None,
            Step::Refused => words::decompress(source, dest),
            Step::Done => self.result(at).map(|result| dest.copy_from_slice(result)).is_some(),
        };
        Some(if is_done { Ok(()) } else { Err(Corrupt) })
    }
}

impl Compressor for Stream {
    /// The way to the device is not worth it for one unit.
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        words::compress(source, dest).map_or(Answer::Incompressible, Answer::Compressed)
    }

    // Everything is copied, so nothing of the contract is needed.
    unsafe fn submit(&mut self, jobs: &mut [ToCompress<'_>]) {
        for (at, job) in jobs.iter_mut().enumerate() {
            let step = self.begin(at, job.source, job.dest.len());
            if let Some(answer) = self.answer(at, &step, job.source, job.dest) {
                job.answer = answer;
            }
        }
    }

    fn poll(&mut self, jobs: &mut [ToCompress<'_>]) -> bool {
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.states[at] != State::Ended {
                let step = self.step(at);
                if let Some(answer) = self.answer(at, &step, job.source, job.dest) {
                    job.answer = answer;
                }
            }
        }
        self.states == [State::Ended; BATCH_MAX]
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

impl Decompressor for Stream {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        if words::decompress(source, dest) { Ok(()) } else { Err(Corrupt) }
    }

    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        for (at, job) in jobs.iter_mut().enumerate() {
            let step = self.begin(at, job.source, job.dest.len());
            if let Some(result) = self.outcome(at, &step, job.source, job.dest) {
                job.result = result;
            }
        }
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.states[at] != State::Ended {
                let step = self.step(at);
                if let Some(result) = self.outcome(at, &step, job.source, job.dest) {
                    job.result = result;
                }
            }
        }
        self.states == [State::Ended; BATCH_MAX]
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}
