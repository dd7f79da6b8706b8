//! A file descriptor that can be replaced in place, and that a child of `fork` does not close.
//!
//! A child has copies of the engine's values, but not always the engine's table of files: there the number of a
//! descriptor means nothing, or another file. So a child replaces the number or leaves it alone.

use std::os::fd::{BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

use crate::process;

/// See the module.
#[derive(Debug)]
pub struct Descriptor {
    number: AtomicI32,
    /// The process that opened it.
    process: AtomicU32,
}

impl Descriptor {
    /// Owns `file` from here on.
    #[must_use]
    pub fn new(file: OwnedFd) -> Descriptor {
        let number = AtomicI32::new(file.into_raw_fd());
        Descriptor { number, process: AtomicU32::new(process::id()) }
    }

    /// The descriptor. In a child of `fork` it is of use only if the child has a copy of the table of files.
    pub fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: this value owns the descriptor (new, replace), which is open until it is dropped.
        unsafe { BorrowedFd::borrow_raw(self.number.load(Relaxed)) }
    }

    /// In a child of `fork`: owns `file` from here on, and leaves the number alone that came from the parent.
    pub fn replace(&self, file: OwnedFd) {
        self.number.store(file.into_raw_fd(), Relaxed);
        self.process.store(process::id(), Relaxed);
    }

    /// Whether this is a child's copy of the value, which was not replaced.
    #[must_use]
    pub fn is_inherited(&self) -> bool {
        self.process.load(Relaxed) != process::id()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if !self.is_inherited() {
            // SAFETY: only this value has the descriptor (new, replace), and this is its last use.
            drop(unsafe { OwnedFd::from_raw_fd(*self.number.get_mut()) });
        }
    }
}
