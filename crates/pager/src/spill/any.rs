//! The disk that a medium gets: by io_uring where the system allows it, else by plain calls.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zfolio_core::swap::disk::{Disk, Error, Transfer};
use zfolio_sys::Errno;
use zfolio_sys::eventfd::EventFd;

use super::file::Medium;
use super::plain::Plain;
use super::queue::Counts;
use super::uring::{Sender, Uring};

/// See the module.
#[derive(Debug)]
pub enum SpillDisk {
    /// By io_uring.
    Uring(Uring),
    /// By plain calls, and why not by io_uring.
    Plain(Plain, Errno),
}

/// Calls a function of whichever disk it is.
macro_rules! either {
    ($disk:expr, $function:ident $(, $argument:expr)*) => {
        match $disk {
            SpillDisk::Uring(disk) => disk.$function($($argument),*),
            SpillDisk::Plain(disk, _) => disk.$function($($argument),*),
        }
    };
}

impl SpillDisk {
    /// A disk for up to `depth` transfers at a time. `ended` becomes readable when one has ended; disks may share it.
    #[must_use]
    pub fn new(medium: Medium, depth: usize, ended: Arc<EventFd>, sender: Sender) -> SpillDisk {
        match Uring::new(medium, depth, ended.clone(), sender) {
            Ok(disk) => SpillDisk::Uring(disk),
            Err((medium, why)) => SpillDisk::Plain(Plain::new(medium, depth, ended), why),
        }
    }

    /// The life of a thread that carries out transfers, until [`SpillDisk::stop`]: see [`Uring::serve`] and
    /// [`Plain::serve`].
    pub fn serve(&self) {
        either!(self, serve);
    }

    /// How many threads must serve now so that nobody who flushes waits for the medium: one where plain calls do the
    /// work, or where whoever flushes may not send; and one that discards, which takes long on a device.
    #[must_use]
    pub fn threads_needed(&self) -> u32 {
        let is_sent = matches!(self, SpillDisk::Uring(disk) if disk.is_sent_by_thread());
        u32::from(is_sent || !self.is_by_ring()) + u32::from(self.medium().is_device())
    }

    /// Starts the threads that are needed now and were not started before. False: one is not to be had.
    pub(super) fn start_threads(self: &Arc<SpillDisk>, start: fn(Arc<SpillDisk>) -> bool) -> bool {
        let needed = self.threads_needed();
        while either!(&**self, book_thread, needed) {
            if !start(Arc::clone(self)) {
                either!(&**self, cancel_thread);
                return false;
            }
        }
        true
    }

    /// Whether threads serve.
    #[cfg(test)]
    pub(super) fn is_served(&self) -> bool {
        either!(self, is_served)
    }

    /// See [`Plain::wake`].
    pub fn wake(&self) {
        either!(self, wake);
    }

    /// See [`Plain::stop`].
    pub fn stop(&self) {
        either!(self, stop);
    }

    /// Whether the kernel has something that it has not answered, by a ring or by a call.
    pub(super) fn is_waiting(&self) -> bool {
        either!(self, is_waiting)
    }

    /// Whether a ring does the work now: there is one, and it has not stopped working.
    #[must_use]
    pub fn is_by_ring(&self) -> bool {
        matches!(self, SpillDisk::Uring(disk) if !disk.is_broken())
    }

    /// See [`Plain::counts`].
    #[must_use]
    pub fn counts(&self) -> Counts {
        either!(self, counts)
    }

    /// See [`Plain::read_error`].
    #[must_use]
    pub fn read_error(&self) -> Option<Error> {
        either!(self, read_error)
    }

    /// See [`Plain::file`].
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        either!(self, file)
    }

    /// See [`Plain::medium`].
    #[must_use]
    pub fn medium(&self) -> &Medium {
        either!(self, medium)
    }
}

impl Disk for SpillDisk {
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        either!(self, begin, transfer)
    }

    fn flush(&self) {
        either!(self, flush);
    }

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        either!(self, poll, each);
    }

    fn pause(&self) {
        either!(self, pause);
    }

    fn discard(&self, first: u64, count: u64) {
        either!(self, discard, first, count);
    }

    fn discard_room(&self) -> usize {
        either!(self, discard_room)
    }
}
