//! Threads, and how they wait for work.

use std::fmt;
use std::hint::spin_loop;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;

use zfolio_sys::{clock, signal, thread};

use crate::desk::Desk;
use crate::workers::Shared;

/// The most workers of a crew: a bit of a word for each.
pub const CREW_MAX: usize = 64;

/// How long a worker that was at work looks for the next offer before it sleeps: a request of several batches comes
/// back within this, and to be woken takes about as long.
pub const LINGER_NS: u64 = 50_000;

/// Looks between two at the clock, while a worker lingers.
const LOOKS: usize = 32;

/// Workers, which anybody may give threads to.
pub struct Crew {
    desks: Box<[Desk<Shared>]>,
    stopping: AtomicBool,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("workers", &self.len()).finish_non_exhaustive()
    }
}

impl Crew {
    /// A crew of so many workers, without threads: until [`Crew::serve`] runs, submitters work alone.
    ///
    /// # Panics
    ///
    /// If there are more than [`CREW_MAX`].
    #[must_use]
    pub fn new(workers: usize) -> Arc<Crew> {
        assert!(workers <= CREW_MAX, "{workers} workers, at most {CREW_MAX}");
        let desks = (0..workers).map(|_| Desk::new()).collect();
        Arc::new(Crew { desks, stopping: AtomicBool::new(false) })
    }

    /// How many workers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.desks.len()
    }

    /// Whether there is no worker.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.desks.is_empty()
    }

    pub(crate) fn desks(&self) -> &[Desk<Shared>] {
        &self.desks
    }

    /// The life of a worker: one thread's for each number below [`Crew::len`]. Returns after [`Crew::stop`].
    pub fn serve(&self, worker: usize) {
        let desk = &self.desks[worker];
        desk.arrive();
        let _leave = Leave(desk);
        let mut idle_since = None;
        // Relaxed: it is looked at again before the worker sleeps.
        while !self.stopping.load(Ordering::Relaxed) {
            thread::follow();
            if let Some(shared) = desk.next() {
                let _finish = Finish(desk);
                shared.work(worker);
                idle_since = None;
                continue;
            }
            let now = clock::monotonic_ns();
            if now - *idle_since.get_or_insert(now) < LINGER_NS {
                // Whoever wants the CPU has it: a worker that waits is worth less than any other thread.
                thread::yield_now();
                (0..LOOKS).for_each(|_| spin_loop());
            } else if desk.will_sleep() && !self.stopping.load(Ordering::Relaxed) {
                desk.sleep();
            }
        }
    }

    /// Wakes all workers, so that they call `thread::follow`.
    pub fn wake_all(&self) {
        self.desks.iter().for_each(Desk::wake);
    }

    /// Has [`Crew::serve`] return.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Pairs with the fence in Desk::will_sleep(): a worker sees the word, or is woken.
        fence(Ordering::SeqCst);
        self.wake_all();
    }

    /// In a child of `fork`, on its only thread, while no batch is at work: the parent's threads are not there, and the
    /// child may start some of its own. [`Threads`] must not be dropped there, which would wait for the parent's.
    pub fn start_over(&self) {
        for desk in &self.desks {
            desk.finish();
            desk.leave();
        }
    }

    /// Gives each worker a thread, with all signals blocked, that the C library knows.
    ///
    /// # Errors
    ///
    /// The system has no thread; those that were started have ended.
    pub fn start(self: Arc<Self>) -> io::Result<Threads> {
        let mut threads = Threads { crew: Arc::clone(&self), threads: Vec::new() };
        for worker in 0..self.len() {
            let crew = Arc::clone(&self);
            let mask = signal::block_all();
            let thread = std::thread::Builder::new().name("zfolio-worker".to_owned());
            let thread = thread.spawn(move || crew.serve(worker));
            signal::restore(&mask);
            threads.threads.push(thread?);
        }
        Ok(threads)
    }
}

/// Has nobody offer anything to a worker whose thread ends, also after a panic of a codec.
struct Leave<'d>(&'d Desk<Shared>);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Has the worker's desk free, also after a panic of a codec.
struct Finish<'d>(&'d Desk<Shared>);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// The threads of a crew, which end when this is dropped.
#[derive(Debug)]
pub struct Threads {
    crew: Arc<Crew>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// The crew.
    #[must_use]
    pub fn crew(&self) -> &Arc<Crew> {
        &self.crew
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.crew.stop();
        for thread in self.threads.drain(..) {
            // A codec that panicked there has been reported by its thread.
            drop(thread.join());
        }
    }
}
