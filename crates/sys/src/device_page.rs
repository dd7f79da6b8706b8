//! The page through which a device takes orders.

use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::map::PAGE_BYTES;

/// A mapped page of a device file, to which the program writes. A child of `fork` does not have it: the driver of the
/// device sees to that.
#[derive(Debug)]
pub struct DevicePage(NonNull<u8>);

// SAFETY: the mapping belongs to the value, and is tied to no thread.
unsafe impl Send for DevicePage {}
// SAFETY: `&DevicePage` gives out an address only.
unsafe impl Sync for DevicePage {}

impl DevicePage {
    /// Maps the first page of the file at `path`, for writing.
    ///
    /// # Errors
    ///
    /// Those of `open` and `mmap`. The file may be closed then: the mapping keeps the device.
    pub fn open(path: &Path) -> Result<DevicePage, Errno> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: no address is given, so no mapping that exists changes.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, ProtFlags::WRITE, flags, &file, 0)
        }?;
        Ok(DevicePage(NonNull::new(base.cast()).ok_or(Errno::NOMEM)?))
    }

    /// Where it is.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.0
    }
}

impl Drop for DevicePage {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and nobody has a reference into it.
        let gone = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
        debug_assert!(gone.is_ok(), "munmap of our own mapping failed: {gone:?}");
    }
}
