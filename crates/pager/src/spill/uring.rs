//! A disk by io_uring: many transfers under way, sent by one system call, with no thread that waits for them.
//!
//! ```text
//! begin   the queue accepts
//! flush   all that may go: queue -> ring (under the lock of the ring's side), then one system call without a lock
//! poll    answers: ring -> queue; ended transfers to whoever began them; what is left of short ones is sent again
//! ```
//!
//! If the ring stops working (a seccomp filter that the program installs after the start), nothing more is sent to
//! it. What it has taken ends as before, since the kernel writes answers to shared memory. What it has not taken goes
//! back to the queue. That and all later transfers are carried out by plain calls (`plain`), and counted.
//!
//! # Who sends
//!
//! The kernel reports the end of a transfer by way of the thread that sent it (`zfolio_sys::uring`): it wakes that
//! thread for a moment, and a sleep that the kernel does not restart (`epoll_wait`) ends with `EINTR`. A thread of the
//! engine bears that; a program does not expect it. And as long as the sender is in a wait that only ends when the
//! transfer has ended, nobody learns of the end. So where a program's own threads begin transfers, a thread of the
//! disk sends them ([`Sender::Thread`]). With [`Sender::Caller`] all who call are the engine's own threads.
//!
//! # Invariants
//!
//! - `URING-1` A flight in `Side::out` is accessed by nobody: the kernel may be reading or writing its buffer. It
//!   leaves `out` when its request was answered, or taken back unseen by the kernel.
//! - `URING-2` A request is taken back only when the ring is broken and no thread is in a call that submits.
//!
//! # Concurrency
//!
//! The lock of the ring's side, then the queue's. Neither is held during a system call.
//!
//! # fork
//!
//! As for `plain`. The ring's memory is not inherited.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zfolio_core::swap::disk::{Disk, Error, SLOT_BYTES, Transfer};
use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::uring::{Answer, ENTRIES_MAX, Operation, Queues, Request, Ring};
use zfolio_sys::{Errno, signal};

use super::file::Medium;
use super::flight::{By, Flight, Next};
use super::plain::Plain;
use super::queue::{Counts, DISCARDS, Discard, Share, Work};
use crate::rank;

/// Transfers at a time, if nothing else is wanted.
pub const DEPTH: usize = 32;

/// The longest wait of [`Disk::pause`], in milliseconds.
const PAUSE_MS: u16 = 1;

/// So many times in a row the kernel may be too short of memory to take a request, while it has none. Then the ring
/// counts as broken.
const STALLS_MAX: u32 = 64;

/// So many transfers in a row the ring may leave to plain calls. Then it counts as broken: a process that may not have
/// another thread (`RLIMIT_NPROC`) has no workers of the ring's, and each transfer waits in vain for one.
const LEFT_MAX: u32 = 4;

/// Who makes the system call that sends transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// Whoever flushes: all who do are the engine's own threads.
    Caller,
    /// A thread of the disk's ([`Uring::serve`]), while there is one.
    Thread,
}

/// See the module.
#[derive(Debug)]
pub struct Uring {
    calls: Plain,
    ring: Ring,
    side: Mutex<{ rank::RING }, Side>,
    sender: Sender,
}

/// Our side of the ring.
#[derive(Debug)]
struct Side {
    /// `None` only while the value is dropped.
    queues: Option<Queues>,
    /// What the ring has, by the number that its request has as token; and the vacant numbers.
    out: Vec<Option<Out>>,
    vacant: Vec<usize>,
    /// Threads in a call that submits.
    submitting: u32,
    /// Work was left in the queue, because the ring had no room for more requests.
    left_over: bool,
    stalls: u32,
    /// Transfers that the ring has left to plain calls since it has ended one.
    left: u32,
    is_broken: bool,
}

#[derive(Debug)]
enum Out {
    Transfer(Flight),
    Discard(Discard),
}

impl Uring {
    /// A disk for up to `depth` transfers at a time, 48 at most. `ended` becomes readable when one has ended; disks may
    /// share it.
    ///
    /// Allocates; nothing does later.
    ///
    /// # Errors
    ///
    /// The medium and the system's answer, if there is no ring to be had.
    pub fn new(
        medium: Medium,
        depth: usize,
        ended: Arc<EventFd>,
        sender: Sender,
    ) -> Result<Uring, (Medium, Errno)> {
        let places = (depth + DISCARDS).next_power_of_two();
        let entries = u32::try_from(places).expect("a depth is small");
        assert!(entries <= ENTRIES_MAX, "a ring is too small for {depth} transfers at a time");
        let (ring, queues) = match Ring::open(entries, Some(ended.file())) {
            Ok(opened) => opened,
            Err(errno) => return Err((medium, errno)),
        };
        let side = Side {
            queues: Some(queues),
            out: (0..places).map(|_| None).collect(),
            vacant: (0..places).collect(),
            submitting: 0,
            left_over: false,
            stalls: 0,
            left: 0,
            is_broken: false,
        };
        let calls = Plain::new(medium, depth, ended);
        Ok(Uring { calls, ring, side: Mutex::new(side), sender })
    }

    /// The life of a thread that carries out what the ring does not: discards of devices, and everything once the
    /// ring is broken. With [`Sender::Thread`] it also sends. Until [`Uring::stop`].
    pub fn serve(&self) {
        let (sends, all) = match self.sender {
            Sender::Thread => (true, Share::All),
            Sender::Caller => (false, Share::Calls),
        };
        let first = || {
            if sends {
                self.send();
            }
            self.rest()
        };
        self.calls.serve_after(&first, all);
    }

    /// Whether threads serve.
    #[cfg(test)]
    pub(super) fn is_served(&self) -> bool {
        self.calls.is_served()
    }

    /// Whether a thread of the disk's own sends, and not whoever flushes.
    pub(super) fn is_sent_by_thread(&self) -> bool {
        self.sender == Sender::Thread
    }

    /// See [`Plain::book_thread`].
    pub(super) fn book_thread(&self, needed: u32) -> bool {
        self.calls.book_thread(needed)
    }

    /// See [`Plain::cancel_thread`].
    pub(super) fn cancel_thread(&self) {
        self.calls.cancel_thread();
    }

    /// See [`Plain::wake`].
    pub fn wake(&self) {
        self.calls.wake();
    }

    /// See [`Plain::stop`].
    pub fn stop(&self) {
        self.calls.stop();
    }

    /// Whether the kernel has a request that it has not answered. What it has not taken is never carried out, once the
    /// ring is dropped.
    pub(super) fn is_waiting(&self) -> bool {
        self.reap();
        self.load().taken > 0
    }

    /// See [`Plain::counts`].
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.calls.counts()
    }

    /// See [`Plain::read_error`].
    #[must_use]
    pub fn read_error(&self) -> Option<Error> {
        self.calls.read_error()
    }

    /// What it reads and writes.
    #[must_use]
    pub fn medium(&self) -> &Medium {
        &self.calls.medium
    }

    /// See [`Plain::file`].
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.calls.file()
    }

    /// Whether the ring has stopped working, so that plain calls do its work.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.side.lock().is_broken
    }

    /// What plain calls are to do.
    fn rest(&self) -> Share {
        if self.side.lock().is_broken { Share::All } else { Share::Calls }
    }

    /// Sends all that may go now. Without a ring it does nothing.
    fn send(&self) {
        loop {
            let mut side = self.side.lock();
            if side.is_broken {
                return self.take_back(side);
            }
            let writes = self.fill(&mut side);
            let count = side.queues().untaken();
            if count == 0 {
                return;
            }
            side.submitting += 1;
            drop(side);
            // The thread may be the program's.
            let submit = || self.ring.submit(count);
            let answer = if writes { signal::without_file_size_signal(submit) } else { submit() };
            if !self.note_submitted(answer) {
                return;
            }
        }
    }

    /// Takes the answer to a submission. Returns whether another one is worth it.
    fn note_submitted(&self, answer: Result<u32, Errno>) -> bool {
        let mut side = self.side.lock();
        side.submitting -= 1;
        let is_idle = side.vacant.len() + side.queues().untaken() as usize == side.out.len();
        match answer {
            Ok(_) => side.stalls = 0,
            Err(Errno::INTR) => {}
            // Later, when something has ended: `pause` and `poll` try again. If nothing can end, at once.
            Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => {
                side.stalls += u32::from(is_idle);
                side.is_broken |= side.stalls > STALLS_MAX;
                if !side.is_broken {
                    return is_idle;
                }
            }
            // A filter forbids the call, or the descriptor is no ring any more.
            Err(_) => side.is_broken = true,
        }
        if side.is_broken {
            self.take_back(side);
            return false;
        }
        side.left_over || side.queues().untaken() > 0
    }

    /// Moves work from the queue to the ring. Returns whether there is a write among what the kernel will take.
    fn fill(&self, side: &mut Side) -> bool {
        let mut state = self.calls.state();
        // What an earlier call has left there is not looked at.
        let mut writes = side.queues().untaken() > 0;
        side.left_over = false;
        while let Some(index) = side.vacant.last().copied() {
            // There are as many entries as places in `out`; but while another thread submits, places are vacant again
            // whose entries are not (`Queues::untaken`).
            if !side.queues().has_room() {
                side.left_over = true;
                break;
            }
            let Some(work) = state.queue.take(Share::Ring) else { break };
            side.vacant.pop();
            let out = side.out[index].insert(match work {
                Work::Transfer(flight) => Out::Transfer(flight),
                Work::Discard(discard) => Out::Discard(discard),
            });
            writes |= matches!(out, Out::Transfer(flight) if !flight.is_read());
            let request = self.request(index, out);
            push(side.queues(), &request);
        }
        side.queues().publish();
        writes
    }

    /// The request for what lies in `Side::out`.
    fn request(&self, index: usize, out: &mut Out) -> Request<'_> {
        let slot = SLOT_BYTES as u64;
        let (offset, operation) = match out {
            Out::Discard(discard) => (discard.first * slot, Operation::Punch(discard.count * slot)),
            Out::Transfer(flight) => {
                let (offset, is_read, bytes) = (flight.offset(), flight.is_read(), flight.rest());
                let length = u32::try_from(bytes.len()).expect("a transfer is below 4 GiB");
                let operation = match is_read {
                    true => Operation::Read(bytes.as_mut_ptr(), length),
                    false => Operation::Write(bytes.as_ptr(), length),
                };
                (offset, operation)
            }
        };
        let file = Some(self.calls.medium.file());
        Request { token: index as u64, file, offset, operation }
    }

    /// Once the ring is broken and nobody submits: what the kernel has not taken goes back to the queue.
    #[allow(unsafe_code, reason = "the contract of taking requests back")]
    fn take_back(&self, mut side: Guard<'_, { rank::RING }, Side>) {
        if side.submitting > 0 {
            // Whoever submits comes here after that.
            return;
        }
        let Side { queues, out, vacant, .. } = &mut *side;
        let Some(queues) = queues else { return };
        let mut state = self.calls.state();
        state.queue.is_without_ring = true;
        let each = |token| {
            let index = index(token);
            match out[index].take() {
                Some(Out::Transfer(flight)) => state.queue.give_back(flight),
                Some(Out::Discard(discard)) => state.queue.give_discard_back(discard),
                None => unreachable!("URING-1"),
            }
            vacant.push(index);
        };
        // SAFETY: no thread submits (`submitting`), and none will: the ring is broken (URING-2).
        unsafe { queues.take_back(each) };
    }

    /// Takes the answers that have come. Returns whether the kernel has still to take something.
    fn reap(&self) -> bool {
        let mut side = self.side.lock();
        let Side { queues, out, vacant, left, is_broken, .. } = &mut *side;
        let Some(queues) = queues else { return false };
        while let Some(Answer { token, result }) = queues.pop() {
            let index = index(token);
            let out = out[index].take().expect("URING-1: one answer for each request");
            vacant.push(index);
            let mut state = self.calls.state();
            match out {
                Out::Discard(discard) => {
                    state.queue.end_discard(discard, result.map(drop));
                }
                Out::Transfer(mut flight) => {
                    let answer = result.map(|bytes| bytes as usize);
                    match flight.note(answer, self.calls.medium.is_direct(), By::Ring) {
                        Next::Ended(result) => {
                            *left = 0;
                            state.queue.counts.by_ring += 1;
                            state.queue.end(flight, result);
                        }
                        Next::Again => {
                            *left += u32::from(flight.is_for_calls);
                            state.queue.counts.again += 1;
                            state.queue.give_back(flight);
                        }
                    }
                }
            }
        }
        let (is_untaken, is_useless) = (queues.untaken() > 0, *left >= LEFT_MAX && !*is_broken);
        drop(side);
        if is_useless {
            self.break_off();
        }
        is_untaken
    }

    /// What the ring has.
    fn load(&self) -> Load {
        let side = self.side.lock();
        let untaken = side.queues.as_ref().map_or(0, Queues::untaken) as usize;
        // While a thread submits, what was answered and taken out of `out` may count as untaken.
        let taken = (side.out.len() - side.vacant.len()).saturating_sub(untaken);
        Load { taken, untaken, is_broken: side.is_broken }
    }

    /// From here on plain calls do the work.
    fn break_off(&self) {
        let mut side = self.side.lock();
        side.is_broken = true;
        self.take_back(side);
    }
}

/// What a ring has: requests that the kernel has taken and not answered, and those that it has not taken.
#[derive(Clone, Copy, Debug)]
struct Load {
    taken: usize,
    untaken: usize,
    is_broken: bool,
}

impl Side {
    fn queues(&mut self) -> &mut Queues {
        self.queues.as_mut().expect("there are queues while the ring works")
    }
}

/// A token is a place in `Side::out`.
fn index(token: u64) -> usize {
    usize::try_from(token).expect("tokens are places")
}

#[allow(unsafe_code, reason = "the kernel reads and writes the buffer of a flight")]
fn push(queues: &mut Queues, request: &Request<'_>) {
    // SAFETY: the request names the bytes of a flight that lies in `Side::out` until it is answered or taken back, and
    // is accessed by nobody meanwhile (URING-1). The file is open as long as the disk.
    let has_room = unsafe { queues.push(request) };
    assert!(has_room, "the caller has seen room, and nobody else pushes");
}

impl Disk for Uring {
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        self.calls.begin(transfer)
    }

    fn flush(&self) {
        if self.sender == Sender::Thread && self.calls.is_served() {
            // One thread sends all, and the other is there for when that one discards.
            let most = if self.is_broken() { u32::MAX } else { 1 };
            return self.calls.run_by(Share::All, most);
        }
        self.send();
        self.calls.run(self.rest());
    }

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        let is_untaken = self.reap();
        if self.calls.deliver(each) {
            self.flush();
        } else if is_untaken {
            self.send();
        }
    }

    fn pause(&self) {
        let load = self.load();
        if load.untaken > 0 {
            self.send();
        }
        let has_ended = self.calls.state().queue.has_ended();
        if has_ended || (load.taken == 0 && (load.is_broken || self.sender == Sender::Caller)) {
            return self.calls.pause();
        }
        // What the disk's own thread is about to send ends in the ring too.
        if load.is_broken || load.taken == 0 {
            return self.ring.wait_readable(PAUSE_MS);
        }
        match self.ring.wait(PAUSE_MS) {
            Ok(()) | Err(Errno::TIME | Errno::INTR) => {}
            // A filter forbids the call.
            Err(_) => self.break_off(),
        }
    }

    fn discard(&self, first: u64, count: u64) {
        self.calls.discard(first, count);
    }

    fn discard_room(&self) -> usize {
        self.calls.discard_room()
    }
}

impl Drop for Uring {
    /// Waits until nothing is under way: the kernel may be writing to buffers.
    fn drop(&mut self) {
        if self.calls.is_inherited() {
            // Its memory is not mapped here.
            std::mem::forget(self.side.get_mut().queues.take());
            return;
        }
        loop {
            match self.load() {
                Load { taken: 0, untaken: 0, .. } => return,
                Load { taken: 0, .. } => self.break_off(),
                _ => self.pause(),
            }
            // Nobody polls any more, and a pause returns at once while something that has ended was not delivered.
            self.calls.deliver(&mut drop);
            self.reap();
        }
    }
}
