//! The rings of a queue: takes chains that the guest has made available, and returns them.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags};
use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::GuestMemory;
use zfolio_sys::eventfd::EventFd;

use super::memory::Memory;
use super::worker::Worker;

/// The pause between two looks at whether a thread has ended.
const JOIN_PAUSE: Duration = Duration::from_micros(100);

/// The guest has broken its rings, or its memory or descriptors are gone: nothing more can be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Broken;

/// See the module.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) queue: Queue,
    pub(super) worker: Worker,
}

impl Ring {
    /// Serves all chains that are there, while `goes_on`; `notify` tells the guest. Then the guest is asked to say when
    /// there are more.
    pub(super) fn serve<M: GuestMemory>(
        &mut self,
        memory: &M,
        goes_on: impl Fn() -> bool,
        notify: impl Fn(),
    ) -> Result<(), Broken> {
        loop {
            self.queue.disable_notification(memory).map_err(|_| Broken)?;
            let mut served = 0;
            while goes_on() {
                let chain = self.queue.iter(memory).map_err(|_| Broken)?.next();
                let Some(chain) = chain else { break };
                let head = chain.head_index();
                let used = self.worker.serve(memory, chain);
                self.queue.add_used(memory, head, used).map_err(|_| Broken)?;
                served += 1;
                // With event indexes the guest says which request it waits for: it is told of that one at once.
                if self.queue.event_idx_enabled() && self.wants_notification(memory)? {
                    notify();
                }
            }
            // Without, it wants to know of every one, and is told of all that were there by one call.
            if served > 0 && !self.queue.event_idx_enabled() && self.wants_notification(memory)? {
                notify();
            }
            let has_more = self.queue.enable_notification(memory).map_err(|_| Broken)?;
            if !has_more || !goes_on() {
                return Ok(());
            }
        }
    }

    fn wants_notification(&mut self, memory: &impl GuestMemory) -> Result<bool, Broken> {
        self.queue.needs_notification(memory).map_err(|_| Broken)
    }
}

/// How a queue's thread is stopped.
#[derive(Debug)]
pub(super) struct Stop {
    event: EventFd,
    is_set: AtomicBool,
}

impl Stop {
    pub(super) fn new() -> Result<Stop, Errno> {
        Ok(Stop { event: EventFd::new()?, is_set: AtomicBool::new(false) })
    }

    pub(super) fn set(&self) {
        // Relaxed: it carries no data, and a thread that sees it late is woken by the ring.
        self.is_set.store(true, Relaxed);
        self.event.ring();
    }

    fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }
}

/// What the thread of a queue needs.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) memory: Arc<Memory>,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) stop: Arc<Stop>,
}

impl Place {
    /// Serves a queue until it is stopped or broken.
    pub(super) fn run(&self, ring: &mut Ring) -> Result<(), Broken> {
        let memory = self.memory.guest();
        // A kick or a call may have been lost while the queue stood still. One too many does no harm.
        self.call();
        loop {
            ring.serve(
                memory,
                || !self.stop.is_set() && !self.memory.has_lost_pages(),
                || self.call(),
            )?;
            if self.memory.has_lost_pages() {
                return Err(Broken);
            }
            if self.stop.is_set() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Tells the guest that requests are done.
    fn call(&self) {
        let Some(call) = &self.call else { return };
        let mut room = [PollFd::new(call, PollFlags::OUT)];
        // If the counter is full the guest is told already. A write would wait then if the front end, which shares the
        // descriptor, has taken the flag away by which nobody waits.
        if poll(&mut room, Some(&Timespec::default())) == Ok(1) {
            rustix::io::write(call, &1_u64.to_ne_bytes()).ok();
        }
    }

    /// Waits for a kick or for the stop.
    fn wait(&self) -> Result<(), Broken> {
        let files = [self.kick.as_fd(), self.stop.event.file()];
        let mut polled = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
        match poll(&mut polled, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(_) => return Err(Broken),
        }
        if polled[0].revents().is_empty() {
            return Ok(());
        }
        match take(&self.kick) {
            // Somebody else may have read it.
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            // No event descriptor after all: it would be readable for ever.
            _ => Err(Broken),
        }
    }
}

/// Reads an event descriptor, without waiting whatever its front end has made of it. Returns the number of bytes.
fn take(event: &OwnedFd) -> Result<usize, Errno> {
    let mut count = [0; 8];
    let into = &mut [IoSliceMut::new(&mut count)];
    // An offset of -1: none.
    rustix::io::preadv2(event, into, u64::MAX, ReadWriteFlags::NOWAIT)
}

/// Waits for the thread of a queue that was told to stop. Returns what it returns.
///
/// A front end can fill the counter of `call` at the very moment at which the thread writes to it, and has the write
/// wait. Nobody else might ever read it again.
pub(super) fn join<T>(thread: JoinHandle<T>, call: Option<&OwnedFd>) -> std::thread::Result<T> {
    while !thread.is_finished() {
        call.map(take);
        std::thread::sleep(JOIN_PAUSE);
    }
    thread.join()
}
