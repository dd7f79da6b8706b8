//! Memory that a device and the program share, mapped from the device's file.

use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::lineage;
use crate::map::PAGE_BYTES;

/// A mapping of a device's file. A child of `fork` does not have it: the driver of the device sees to that.
#[derive(Debug)]
pub struct DeviceMemory {
    base: NonNull<u8>,
    bytes: usize,
    /// The process that mapped it.
    process: u64,
}

// SAFETY: the mapping belongs to the value, and is tied to no thread.
unsafe impl Send for DeviceMemory {}
// SAFETY: `&DeviceMemory` gives out an address and a length only.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Maps the first page of the file at `path`, to be written to: through it a device takes orders.
    ///
    /// # Errors
    ///
    /// Those of `open` and `mmap`; `NOTTY`: it is no character device. An ordinary file would take orders that nobody
    /// carries out.
    pub fn open(path: &Path) -> Result<DeviceMemory, Errno> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if kind != FileType::CharacterDevice {
            return Err(Errno::NOTTY);
        }
        DeviceMemory::map(&file, 0, PAGE_BYTES, ProtFlags::WRITE)
    }

    /// Maps `bytes` from `offset` on, whole pages. The file may be closed then: the mapping keeps the device.
    ///
    /// # Errors
    ///
    /// Those of `mmap`.
    pub(crate) fn map(
        file: impl AsFd,
        offset: u64,
        bytes: usize,
        access: ProtFlags,
    ) -> Result<DeviceMemory, Errno> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: no address is given, so no mapping that exists changes.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, file, offset) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(DeviceMemory { base, bytes, process: lineage::current() })
    }

    /// Where it is.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How long it is.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.process != lineage::current() {
            // A child has no such mapping, and something else may be mapped there.
            return;
        }
        // SAFETY: the mapping belongs to this value, and nobody has a reference into it.
        let gone = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(gone.is_ok(), "munmap of our own mapping failed: {gone:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::io::Errno;

    use super::DeviceMemory;
    use crate::map::PAGE_BYTES;

    /// Goal: what takes orders is a device, and no file that lies in its place.
    #[test]
    fn only_a_character_device_is_mapped() {
        let path = std::env::temp_dir().join(format!("zfolio-device-{}", crate::process::id()));
        std::fs::write(&path, [0; PAGE_BYTES]).unwrap();
        assert_eq!(DeviceMemory::open(&path).err(), Some(Errno::NOTTY));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(DeviceMemory::open(&path).err(), Some(Errno::NOENT));
        assert_eq!(DeviceMemory::open(Path::new("/dev/zero")).unwrap().bytes(), PAGE_BYTES);
    }
}
