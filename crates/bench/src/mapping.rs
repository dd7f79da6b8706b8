//! Memory from `mmap`: anonymous memory to fill, and windows of a file to fill it from.
//!
//! # Invariants
//!
//! - `MAP-1` `new` mapped `address..address + bytes` with at least the rights that the type needs
//!   (a [`Window`] only reads). The range belongs to this value alone, and stays mapped until
//!   `Drop`.
//!
//! A [`Window`] shows a file. If another process shrinks the file, an access ends in SIGBUS; if it
//! writes to the file, the workload's own check fails. Both are noticed, and neither is
//! memory-unsafe, since the bytes are only compared and copied.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

#[derive(Debug)]
struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    fn new(
        bytes: usize,
        rights: i32,
        flags: i32,
        file: Option<(&File, u64)>,
    ) -> io::Result<Mapping> {
        let (descriptor, offset) =
            file.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset));
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: no address is requested, so no existing mapping is replaced; the kernel checks
        // everything else.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, descriptor, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).expect("address 0 is never given unasked");
        Ok(Mapping { address, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: by MAP-1 the range belongs to this value, and no borrow outlives `self`.
        let status = unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(status, 0, "MAP-1: munmap of our own range cannot fail");
    }
}

/// Private anonymous memory, zero until written.
#[derive(Debug)]
pub struct Anonymous(Mapping);

impl Anonymous {
    /// Maps `bytes`.
    ///
    /// # Errors
    ///
    /// The error of `mmap`, usually `ENOMEM`.
    pub fn new(bytes: usize) -> io::Result<Anonymous> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Mapping::new(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None).map(Anonymous)
    }
}

impl Deref for Anonymous {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: by MAP-1 the range is mapped readable; anonymous memory is always initialised.
        unsafe { std::slice::from_raw_parts(self.0.address.as_ptr(), self.0.bytes) }
    }
}

impl DerefMut for Anonymous {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; by MAP-1 the range is writable, and `&mut self` excludes others.
        unsafe { std::slice::from_raw_parts_mut(self.0.address.as_ptr(), self.0.bytes) }
    }
}

/// A part of a file, read-only and shared: page cache, not anonymous memory.
#[derive(Debug)]
pub struct Window(Mapping);

impl Window {
    /// Maps `bytes` of `file` at `offset`, a multiple of the page, with all pages populated.
    ///
    /// # Errors
    ///
    /// The error of `mmap`.
    pub fn new(file: &File, offset: u64, bytes: usize) -> io::Result<Window> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Mapping::new(bytes, libc::PROT_READ, flags, Some((file, offset))).map(Window)
    }
}

impl Deref for Window {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: by MAP-1 the range is mapped readable, and file pages are always initialised.
        unsafe { std::slice::from_raw_parts(self.0.address.as_ptr(), self.0.bytes) }
    }
}
