//! A descriptor that becomes readable when somebody rings, and stays so until it is cleared.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::descriptor::Descriptor;

/// See the module.
#[derive(Debug)]
pub struct EventFd(Descriptor);

fn open() -> Result<OwnedFd, Errno> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

impl EventFd {
    /// Opens one that is not readable.
    ///
    /// # Errors
    ///
    /// `MFILE` or `NFILE`: no descriptor is left. `NOMEM`.
    pub fn new() -> Result<EventFd, Errno> {
        open().map(|file| EventFd(Descriptor::new(file)))
    }

    /// In a child of `fork`: opens a new one in this place, since a ring of the parent's is none of the child's.
    ///
    /// # Errors
    ///
    /// As [`EventFd::new`].
    pub fn reopen(&self) -> Result<(), Errno> {
        self.0.replace(open()?);
        Ok(())
    }

    /// The descriptor, to wait for.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file()
    }

    /// Makes it readable. Never waits.
    pub fn ring(&self) {
        // It fails only if the counter is full, and then it is readable.
        rustix::io::write(self.file(), &1_u64.to_ne_bytes()).ok();
    }

    /// Makes it unreadable. What rings after this call makes it readable again.
    pub fn clear(&self) {
        // It fails only if it is not readable.
        rustix::io::read(self.file(), &mut [0; 8]).ok();
    }

    /// Waits until it is readable, `milliseconds` at most. Returns whether it is.
    #[must_use]
    pub fn wait(&self, milliseconds: u16) -> bool {
        let timeout = Timespec {
            tv_sec: i64::from(milliseconds) / 1000,
            tv_nsec: i64::from(milliseconds) % 1000 * 1_000_000,
        };
        let mut poll = [PollFd::from_borrowed_fd(self.file(), PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&timeout)).is_ok_and(|ready| ready > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::EventFd;

    /// Goal: it is readable from a ring until it is cleared, however often it rang.
    #[test]
    fn it_is_readable_from_a_ring_until_it_is_cleared() {
        let event = EventFd::new().unwrap();
        assert!(!event.wait(0));
        event.ring();
        event.ring();
        assert!(event.wait(1000) && event.wait(0));
        event.clear();
        assert!(!event.wait(0));
        event.clear();
        event.ring();
        assert!(event.wait(0));
    }
}
