//! The accelerator: a queue of jobs, and a thread that does them one after the other.
//!
//! A job owns its buffers, which go to the device and come back. So nothing of anybody else is ever at the device, and
//! a stream may end while its jobs are under way.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};

use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::{BATCH_MAX, RANK_DECOMPRESS};

use crate::words;

/// Jobs that the queue holds: less than two streams may have, so that drivers meet a full one.
const QUEUE_JOBS: usize = 12;

/// Locks that are taken while a stream is held rank above the stream's.
const RANK_QUEUE: u8 = RANK_DECOMPRESS + 1;
const RANK_MAILBOX: u8 = RANK_QUEUE + 1;

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Compress,
    Decompress,
}

/// A job, from the driver to the device and back.
pub(crate) struct Job {
    /// Its place in the mailbox.
    pub(crate) place: usize,
    pub(crate) kind: Kind,
    pub(crate) source: Vec<u8>,
    pub(crate) source_bytes: usize,
    pub(crate) dest: Vec<u8>,
    pub(crate) dest_bytes: usize,
    /// The bytes in `dest`, if the job succeeded.
    pub(crate) done: Option<usize>,
}

impl Job {
    fn work(&mut self) {
        let (source, dest) = (&self.source[..self.source_bytes], &mut self.dest[..self.dest_bytes]);
        self.done = match self.kind {
            Kind::Compress => words::compress(source, dest),
            Kind::Decompress => words::decompress(source, dest).then_some(self.dest_bytes),
        };
    }
}

/// Where the jobs of a stream come back.
pub(crate) type Mailbox = Mutex<RANK_MAILBOX, [Option<Job>; BATCH_MAX]>;

/// Why a job was not accepted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue is full: try again.
    Full,
    /// The device has gone.
    Gone,
}

struct Queue {
    jobs: VecDeque<(Job, Arc<Mailbox>)>,
    is_open: bool,
}

/// The device, as drivers have it.
pub(crate) struct Device {
    queue: Mutex<RANK_QUEUE, Queue>,
    thread: OnceLock<Thread>,
    jobs: AtomicU64,
}

impl Device {
    /// Hands a job to the device, if it is accepted. What is accepted is done.
    pub(crate) fn submit(&self, job: &mut Option<Job>, back: &Arc<Mailbox>) -> Result<(), Refused> {
        let mut queue = self.queue.lock();
        if !queue.is_open {
            return Err(Refused::Gone);
        }
        if queue.jobs.len() == QUEUE_JOBS {
            return Err(Refused::Full);
        }
        queue.jobs.extend(job.take().map(|job| (job, Arc::clone(back))));
        drop(queue);
        self.wake();
        Ok(())
    }

    /// How many jobs it has done.
    pub(crate) fn jobs(&self) -> u64 {
        self.jobs.load(Relaxed)
    }

    fn wake(&self) {
        self.thread.get().inspect(|thread| thread.unpark());
    }

    /// The life of the thread.
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            let (next, is_open) = (queue.jobs.pop_front(), queue.is_open);
            drop(queue);
            match next {
                Some((mut job, mailbox)) => {
                    job.work();
                    self.jobs.fetch_add(1, Relaxed);
                    let place = job.place;
                    mailbox.lock()[place] = Some(job);
                }
                // Whoever submits a job wakes this thread after it; if that was before, this returns at once.
                None if is_open => thread::park(),
                None => return,
            }
        }
    }
}

/// The device's thread, which ends when this is dropped.
pub(crate) struct Running {
    device: Arc<Device>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a device.
pub(crate) fn start() -> io::Result<Running> {
    let queue = Queue { jobs: VecDeque::with_capacity(QUEUE_JOBS), is_open: true };
    let device = Arc::new(Device {
        queue: Mutex::new(queue),
        thread: OnceLock::new(),
        jobs: AtomicU64::new(0),
    });
    let works = Arc::clone(&device);
    let thread = thread::Builder::new().name("device".to_owned()).spawn(move || works.work())?;
    device.thread.get_or_init(|| thread.thread().clone());
    Ok(Running { device, thread: Some(thread) })
}

impl Running {
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.device.queue.lock().is_open = false;
        self.device.wake();
        if let Some(thread) = self.thread.take() {
            // If it panicked, its thread has said so.
            drop(thread.join());
        }
    }
}
