//! A disk by plain system calls: `pread`, `pwrite`, `fallocate`.
//!
//! One or two threads of its own carry the transfers out, if somebody lends them ([`Plain::serve`]). Without threads
//! [`Disk::flush`] carries them out itself, and then it waits for the medium. A device needs two: a discard takes long,
//! and one thread at a time carries one out (`QUEUE-3`).
//!
//! # Concurrency
//!
//! The queue has one lock, which is never held during a system call. A thread that finds nothing to do counts itself
//! as idle under the lock, and sleeps on a word that changes under the lock when it is wanted: so no work is missed.
//!
//! # fork
//!
//! Transfers are drained before a fork. A child has none of the threads, its table of files may be another one, and a
//! thread of the parent's may have held the lock. So a child may drop its copy, which takes no lock and closes nothing,
//! and makes a disk of its own on the same file ([`Medium::lent`]).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::swap::disk::{Disk, Error, Transfer};
use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::{Errno, disk, futex, signal, thread};

use super::file::Medium;
use super::flight::{By, Flight, Next};
use super::queue::{Counts, Queue, Share, Work};
use crate::rank;

/// The longest wait of [`Disk::pause`].
const PAUSE: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug)]
pub struct Plain {
    pub(super) medium: Medium,
    state: Mutex<{ rank::DISK }, State>,
    /// Rings when a transfer has ended.
    ended: Arc<EventFd>,
    /// Futexes: they change when an idle thread is wanted, and when a transfer has ended.
    wanted: AtomicU32,
    ends: AtomicU32,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) queue: Queue,
    /// Threads that were started, or are about to be ([`Plain::book_thread`]).
    booked: u32,
    /// Threads that serve, and those of them that sleep.
    threads: u32,
    idle: u32,
    /// Threads that wait in `pause`.
    pausing: u32,
    is_stopping: bool,
}

/// Whose thread carries something out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Thread {
    /// One of the disk's own: it blocks all signals.
    Own,
    /// The caller's.
    Other,
}

impl Plain {
    /// A disk for up to `depth` transfers at a time. `ended` becomes readable when one has ended; disks may share it.
    ///
    /// Allocates; nothing does later.
    #[must_use]
    pub fn new(medium: Medium, depth: usize, ended: Arc<EventFd>) -> Plain {
        // A device may take long to discard, and rings have no request for that before Linux 6.12.
        let queue = Queue::new(depth, medium.is_device());
        let state = State { queue, booked: 0, threads: 0, idle: 0, pausing: 0, is_stopping: false };
        Plain {
            medium,
            state: Mutex::new(state),
            ended,
            wanted: AtomicU32::new(0),
            ends: AtomicU32::new(0),
        }
    }

    /// The life of a thread that carries out transfers, until [`Plain::stop`]. It blocks all signals.
    pub fn serve(&self) {
        self.serve_after(&|| Share::All, Share::All);
    }

    /// As [`Plain::serve`]; calls `first` before each look at the queue, which says what is to be carried out here.
    /// Sleeps only if there is nothing to do of `all`.
    pub(super) fn serve_after(&self, first: &dyn Fn() -> Share, all: Share) {
        // A signal that a write has left pending must be gone before the thread's own mask is back.
        signal::without_file_size_signal(|| {
            let mask = signal::block_all();
            self.serve_all(first, all);
            signal::restore(&mask);
        });
    }

    fn serve_all(&self, first: &dyn Fn() -> Share, all: Share) {
        self.state.lock().threads += 1;
        loop {
            thread::follow();
            let share = first();
            let mut state = self.state.lock();
            if state.is_stopping {
                state.threads -= 1;
                return;
            }
            if let Some(work) = state.queue.take(share) {
                drop(state);
                self.carry_out(work, Thread::Own);
            } else if !state.queue.has_work(all) {
                // Who wants a thread changes the word under the lock, if he sees an idle one.
                state.idle += 1;
                let heard = self.wanted.load(Relaxed);
                drop(state);
                futex::wait(&self.wanted, heard, None);
                self.state.lock().idle -= 1;
            }
        }
    }

    /// Wakes the threads that serve: one of them may have to follow the program's identity.
    pub fn wake(&self) {
        let state = self.state.lock();
        self.wanted.fetch_add(1, Relaxed);
        drop(state);
        futex::wake(&self.wanted, u32::MAX);
    }

    /// Makes the threads that serve end. From here on [`Disk::flush`] carries out transfers itself.
    pub fn stop(&self) {
        self.state.lock().is_stopping = true;
        self.wake();
    }

    /// Whether a call is under way.
    pub(super) fn is_waiting(&self) -> bool {
        self.state.lock().queue.is_anything_out()
    }

    /// How often what happened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.state.lock().queue.counts
    }

    /// Why the last read that failed did.
    #[must_use]
    pub fn read_error(&self) -> Option<Error> {
        self.state.lock().queue.read_error
    }

    /// What it reads and writes.
    #[must_use]
    pub fn medium(&self) -> &Medium {
        &self.medium
    }

    /// The descriptor that becomes readable when a transfer has ended. Who has waited for it calls
    /// [`EventFd::clear`] **before** [`Disk::poll`]: what ends after that makes it readable again.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.ended.file()
    }

    /// Whether this is a copy in a child of `fork`.
    pub(super) fn is_inherited(&self) -> bool {
        self.medium.is_inherited()
    }

    /// The queue. The caller makes no system call meanwhile.
    pub(super) fn state(&self) -> Guard<'_, { rank::DISK }, State> {
        self.state.lock()
    }

    /// Counts a thread that is about to be started, unless there are as many as are `needed`.
    pub(super) fn book_thread(&self, needed: u32) -> bool {
        let mut state = self.state.lock();
        let is_needed = state.booked < needed && !state.is_stopping;
        state.booked += u32::from(is_needed);
        is_needed
    }

    /// A thread that was booked was not to be had.
    pub(super) fn cancel_thread(&self) {
        self.state.lock().booked -= 1;
    }

    /// Whether threads serve.
    pub(super) fn is_served(&self) -> bool {
        let state = self.state.lock();
        state.threads > 0 && !state.is_stopping
    }

    /// Has work of `share` carried out: by the threads that serve, or here.
    pub(super) fn run(&self, share: Share) {
        self.run_by(share, u32::MAX);
    }

    /// The same; wakes `most` idle threads at most.
    pub(super) fn run_by(&self, share: Share, most: u32) {
        let state = self.state.lock();
        if state.threads > 0 && !state.is_stopping {
            return self.want_threads(state, share, most);
        }
        drop(state);
        self.run_here(share);
    }

    /// Carries out all work of `share`.
    fn run_here(&self, share: Share) {
        loop {
            // In two statements: the guard must be gone before the work is carried out.
            let work = self.state.lock().queue.take(share);
            match work {
                Some(work) => self.carry_out(work, Thread::Other),
                None => return,
            }
        }
    }

    /// Wakes idle threads, `most` at most, if there is work for them.
    fn want_threads(&self, state: Guard<'_, { rank::DISK }, State>, share: Share, most: u32) {
        if state.idle == 0 || !state.queue.has_work(share) {
            return;
        }
        self.wanted.fetch_add(1, Relaxed);
        let idle = state.idle;
        drop(state);
        futex::wake(&self.wanted, idle.min(most));
    }

    fn carry_out(&self, work: Work, thread: Thread) {
        match work {
            Work::Transfer(mut flight) => {
                let mut again = 0;
                let result = loop {
                    let answer = self.transfer(&mut flight, thread);
                    match flight.note(answer, self.medium.is_direct(), By::Call) {
                        Next::Ended(result) => break result,
                        Next::Again => again += 1,
                    }
                };
                let mut state = self.state.lock();
                state.queue.counts.by_calls += 1;
                state.queue.counts.again += again;
                state.queue.end(flight, result);
                self.tell(state);
            }
            Work::Discard(discard) => {
                let done = self.medium.discard(discard.first, discard.count);
                let mut state = self.state.lock();
                state.queue.end_discard(discard, done);
                self.tell(state);
            }
        }
    }

    /// One system call.
    fn transfer(&self, flight: &mut Flight, thread: Thread) -> Result<usize, Errno> {
        let (file, offset, is_read) = (self.medium.file(), flight.offset(), flight.is_read());
        let bytes = flight.rest();
        match (is_read, thread) {
            (true, _) => disk::read_at(file, bytes, offset),
            (false, Thread::Own) => disk::write_at(file, bytes, offset),
            (false, Thread::Other) => {
                signal::without_file_size_signal(|| disk::write_at(file, bytes, offset))
            }
        }
    }

    /// Tells those who wait that something has ended.
    fn tell(&self, state: Guard<'_, { rank::DISK }, State>) {
        self.ends.fetch_add(1, Relaxed);
        let pausing = state.pausing;
        drop(state);
        if pausing > 0 {
            futex::wake(&self.ends, pausing);
        }
        self.ended.ring();
    }

    /// Hands what has ended to `each`. Returns whether something may be carried out that nobody was told about.
    pub(super) fn deliver(&self, each: &mut dyn FnMut(Transfer)) -> bool {
        loop {
            let mut state = self.state.lock();
            let Some(transfer) = state.queue.next_ended() else {
                return std::mem::take(&mut state.queue.is_stirred);
            };
            drop(state);
            each(transfer);
        }
    }
}

impl Disk for Plain {
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        self.state.lock().queue.begin(transfer)
    }

    fn flush(&self) {
        self.run(Share::All);
    }

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        if self.deliver(each) {
            self.run(Share::All);
        }
    }

    fn pause(&self) {
        let mut state = self.state.lock();
        if state.queue.has_ended() {
            return;
        }
        state.pausing += 1;
        let heard = self.ends.load(Relaxed);
        drop(state);
        futex::wait(&self.ends, heard, Some(PAUSE));
        self.state.lock().pausing -= 1;
    }

    fn discard(&self, first: u64, count: u64) {
        self.state.lock().queue.discard(first, count);
    }

    fn discard_room(&self) -> usize {
        self.state.lock().queue.discard_room()
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // Nobody serves: a thread that did would borrow the disk. So nothing is out, and what waits is not wanted.
        let is_anything_out = self.state.get_mut().queue.is_anything_out();
        debug_assert!(self.is_inherited() || !is_anything_out);
    }
}
