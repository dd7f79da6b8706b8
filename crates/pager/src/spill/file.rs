//! What is spilled to: a file without a name in a directory, or a block device, as a whole or by parts (`parts`).
//!
//! # Cost
//!
//! The file takes the room that was written and not punched out again. Its size is set at once, to all that it may
//! have: writes that make a file longer are serialised by ext4 and have half of the throughput (653 against 1229 MB/s,
//! `fio --rw=write --bs=64k --direct=1 --iodepth=8 --fallocate=none` and `=truncate`).

use std::fmt;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zfolio_core::size;
use zfolio_core::swap::disk::{SLOT_BYTES, Slot};
use zfolio_sys::descriptor::Descriptor;
use zfolio_sys::disk::{self, DeviceNumber, Kind};
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::{Errno, cpu, mounts, signal};

use super::parts::Parts;

/// See the module.
#[derive(Debug)]
pub struct Medium {
    file: Descriptor,
    /// Keeps a device that is shared from all who would have it alone.
    _claim: Option<Descriptor>,
    /// What this process has of it. `None`: all.
    parts: Option<Parts>,
    /// What was given: a directory, or a device.
    path: Arc<Path>,
    is_device: bool,
    is_direct: bool,
    /// Whether it tells by a mark who has it ([`disk::mark_used`]).
    is_marked: bool,
    bytes: u64,
}

/// Why nothing can be spilled to a path. Displayed in one line, which begins with the path.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// There is nothing of that name.
    Missing(PathBuf),
    /// It is neither a directory nor a block device.
    OtherKind(PathBuf),
    /// It may not be written to.
    NotWritable {
        /// What was given.
        path: PathBuf,
        /// The system's answer.
        errno: Errno,
    },
    /// Files in this directory are kept in memory.
    InMemory {
        /// What was given.
        path: PathBuf,
        /// The kind of its file system.
        file_system: &'static str,
    },
    /// The device keeps what is written to it in memory.
    MemoryDevice(PathBuf),
    /// The device is mounted.
    Mounted {
        /// What was given.
        path: PathBuf,
        /// Where.
        at: PathBuf,
    },
    /// The device is in use as swap.
    Swap(PathBuf),
    /// The device, or a part of it, is in use in another way.
    InUse(PathBuf),
    /// The device is in use, perhaps by the run, and this process cannot ask the run for a part of it.
    NoClaim(PathBuf),
    /// Other processes of the run have all of the device.
    Full(PathBuf),
    /// There is less room than the least that is of use.
    TooSmall {
        /// What was given.
        path: PathBuf,
        /// The bytes that it has, or that were asked for.
        bytes: u64,
        /// The least.
        bytes_min: u64,
    },
    /// The system does not open it.
    Failed {
        /// What was given.
        path: PathBuf,
        /// The system's answer.
        errno: Errno,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ACCEPTED: &str = "give a directory on a disk, or a block device";
        match self {
            Refusal::Missing(path) => write!(f, "'{}' does not exist: {ACCEPTED}", path.display()),
            Refusal::OtherKind(path) => {
                let path = path.display();
                write!(f, "'{path}' is neither a directory nor a block device: {ACCEPTED}")
            }
            Refusal::NotWritable { path, errno } => {
                let (path, why) = (path.display(), ErrnoText(*errno));
                write!(f, "'{path}' cannot be written to ({why}): give one that can")
            }
            Refusal::InMemory { path, file_system } => {
                let path = path.display();
                write!(f, "'{path}' is on a {file_system}, whose files are memory: {ACCEPTED}")
            }
            Refusal::MemoryDevice(path) => {
                write!(f, "'{}' keeps its data in memory: {ACCEPTED}", path.display())
            }
            Refusal::Mounted { path, at } => {
                let (path, at) = (path.display(), at.display());
                write!(f, "'{path}' is mounted on '{at}': give a device that is not in use")
            }
            Refusal::Swap(path) => {
                let path = path.display();
                write!(f, "'{path}' is in use as swap: give a device that is not in use")
            }
            Refusal::InUse(path) => write!(
                f,
                "'{}' or a part of it is in use (mounted, swap, part of another device, open, or another run's): \
                 give a device that is not in use",
                path.display()
            ),
            Refusal::NoClaim(path) => {
                let path = path.display();
                write!(
                    f,
                    "'{path}' is in use, and there is no 'zfolio run' to ask for a part of it"
                )
            }
            Refusal::Full(path) => {
                let path = path.display();
                write!(f, "other processes of this run have all of '{path}'")
            }
            Refusal::TooSmall { path, bytes, bytes_min } => {
                let (bytes, least) = (size::display(*bytes), size::display(*bytes_min));
                write!(f, "'{}' has room for {bytes}: {least} is the least", path.display())
            }
            Refusal::Failed { path, errno } => {
                let (path, why) = (path.display(), ErrnoText(*errno));
                write!(f, "'{path}' cannot be opened ({why}): {ACCEPTED}")
            }
        }
    }
}

impl std::error::Error for Refusal {}

impl Medium {
    /// Opens a file without a name in the directory `path`, of at most `bytes`; or the block device `path`, of which
    /// the first `bytes` are used, or what it has.
    ///
    /// Called by a thread that shares its table of files with all who transfer.
    ///
    /// # Errors
    ///
    /// See [`Refusal`].
    pub fn open(path: &Path, bytes: u64, bytes_min: u64) -> Result<Medium, Refusal> {
        let failed = |errno| Refusal::Failed { path: path.to_owned(), errno };
        if bytes < bytes_min {
            return Err(Refusal::TooSmall { path: path.to_owned(), bytes, bytes_min });
        }
        match disk::kind(path) {
            Ok(Kind::Directory) => match disk::kept_in_memory(path) {
                Ok(None) => Medium::open_in_directory(path, bytes),
                Ok(Some(file_system)) => {
                    Err(Refusal::InMemory { path: path.to_owned(), file_system })
                }
                Err(errno) => Err(failed(errno)),
            },
            Ok(Kind::Device(number)) if disk::is_in_memory(number) => {
                Err(Refusal::MemoryDevice(path.to_owned()))
            }
            Ok(Kind::Device(number)) => Medium::open_device(path, number, bytes, bytes_min),
            Ok(Kind::Other) => Err(Refusal::OtherKind(path.to_owned())),
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Refusal::Missing(path.to_owned())),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Opens a file in any directory, also one in memory.
    pub(super) fn open_in_directory(path: &Path, bytes: u64) -> Result<Medium, Refusal> {
        let file = disk::open_unlinked(path).map_err(|errno| not_opened(path, errno))?;
        // Beyond RLIMIT_FSIZE the size stays as it is. Writes up to the limit make the file longer, others are refused.
        signal::without_file_size_signal(|| disk::set_bytes(file.as_fd(), bytes)).ok();
        let is_direct = is_direct_possible(file.as_fd(), false);
        Ok(Medium::of(file, path, false, is_direct, bytes))
    }

    fn open_device(
        path: &Path,
        number: DeviceNumber,
        bytes: u64,
        bytes_min: u64,
    ) -> Result<Medium, Refusal> {
        let file = open_alone(path, number)?;
        // A child of a process that has ended reads there, without having opened it for itself alone.
        if disk::is_used_by_others(file.as_fd(), disk::WHOLE) != Ok(false) {
            return Err(Refusal::InUse(path.to_owned()));
        }
        let bytes = bytes.min(device_bytes(file.as_fd(), path, bytes_min)?);
        let is_direct = is_direct_possible(file.as_fd(), true);
        Ok(Medium::of(file, path, true, is_direct, bytes))
    }

    /// Opens a part of the block device `path`, which other processes of the run use too. `claim` is the run's, that of
    /// a device that nobody else may have; without one this process claims the device itself.
    ///
    /// Called by a thread that shares its table of files with all who transfer.
    ///
    /// # Errors
    ///
    /// See [`Refusal`].
    pub(super) fn open_part(path: &Path, claim: Option<OwnedFd>) -> Result<Medium, Refusal> {
        let failed = |errno| Refusal::Failed { path: path.to_owned(), errno };
        let claim = match (claim, disk::kind(path)) {
            (Some(claim), _) => claim,
            (None, Ok(Kind::Device(number))) => match open_alone(path, number) {
                Err(Refusal::InUse(path)) => return Err(Refusal::NoClaim(path)),
                alone => alone?,
            },
            (None, _) => return Err(Refusal::OtherKind(path.to_owned())),
        };
        let file = disk::open_again(cpu::thread_id(), claim.as_raw_fd());
        let file = file.map_err(|errno| not_opened(path, errno))?;
        let bytes = device_bytes(file.as_fd(), path, 0)?;
        let parts = Parts::of(bytes / SLOT_BYTES as u64);
        match parts.take(file.as_fd(), cpu::thread_id()) {
            Ok(_) => {}
            Err(Errno::NOSPC) => return Err(Refusal::Full(path.to_owned())),
            Err(errno) => return Err(failed(errno)),
        }
        let is_direct = is_direct_possible(file.as_fd(), true);
        let (file, claim) = (Descriptor::new(file), Some(Descriptor::new(claim)));
        let (path, is_device, is_marked, parts) = (path.into(), true, true, Some(parts));
        Ok(Medium { file, _claim: claim, parts, path, is_device, is_direct, is_marked, bytes })
    }

    fn of(file: OwnedFd, path: &Path, is_device: bool, is_direct: bool, bytes: u64) -> Medium {
        let is_marked = disk::mark_used(file.as_fd(), disk::WHOLE).is_ok();
        let (file, path) = (Descriptor::new(file), path.into());
        Medium { file, _claim: None, parts: None, path, is_device, is_direct, is_marked, bytes }
    }

    /// The bytes that this process has of it.
    fn ranges(&self) -> Vec<disk::Range> {
        self.parts.as_ref().map_or_else(|| vec![disk::WHOLE], |parts| parts.ranges().collect())
    }

    /// What this process has of a device that others use too.
    pub(super) fn parts(&self) -> Option<&Parts> {
        self.parts.as_ref()
    }

    /// Takes a part more of such a device. Returns its slots, which come behind all others; `None`: there is none.
    pub(super) fn take_part(&self) -> Option<u32> {
        let parts = self.parts.as_ref()?;
        parts.take(self.file(), cpu::thread_id()).ok()
    }

    /// Where on the medium a slot is.
    pub(super) fn on_medium(&self, slot: u64) -> u64 {
        self.parts.as_ref().map_or(slot, |parts| parts.on_device(slot))
    }

    /// Opens the same file once more, for a child of `fork`, in the calling thread's table of files. `thread` has this
    /// descriptor in its own.
    ///
    /// # Errors
    ///
    /// The system does not open it, or cannot mark it as in use by the child.
    pub(super) fn lend(&self, thread: u32) -> Result<OwnedFd, Errno> {
        let file = disk::open_again(thread, self.file().as_raw_fd())?;
        if self.is_direct {
            disk::set_direct(file.as_fd(), true)?;
        }
        if self.is_marked {
            self.ranges().into_iter().try_for_each(|range| disk::mark_used(file.as_fd(), range))?;
        }
        Ok(file)
    }

    /// In a child: the medium on the file that was lent to it. The child writes nothing there, and so claims nothing.
    pub(super) fn lent(&self, file: OwnedFd) -> Medium {
        let (file, path) = (Descriptor::new(file), Arc::clone(&self.path));
        let Medium { is_device, is_direct, is_marked, bytes, .. } = *self;
        let parts = self.parts.as_ref().map(Parts::copy);
        Medium { file, _claim: None, parts, path, is_device, is_direct, is_marked, bytes }
    }

    /// Whether no other process has it, or any of the parts: nobody whom it was lent to, and nobody who lent it.
    pub(super) fn is_alone(&self) -> bool {
        let is_ours = |range| disk::is_used_by_others(self.file(), range) == Ok(false);
        self.is_marked && self.ranges().into_iter().all(is_ours)
    }

    /// The descriptor: for a child, which needs it in its own table of files.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.file()
    }

    /// The directory in which the file is, or the device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file of a test, in the place of one that was opened at `path`.
    #[cfg(test)]
    pub(super) fn played(file: OwnedFd, path: &Path) -> Medium {
        Medium {
            file: Descriptor::new(file),
            _claim: None,
            parts: None,
            path: path.into(),
            is_device: false,
            is_direct: false,
            is_marked: false,
            bytes: 1 << 20,
        }
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// Whether transfers go past the page cache. Where they do not (some network file systems), what is written is in
    /// memory until the kernel has written it back.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// How many slots this process has of it.
    #[must_use]
    pub fn slots(&self) -> u64 {
        self.parts.as_ref().map_or(self.bytes / SLOT_BYTES as u64, Parts::slots)
    }

    /// Tells the medium that a range of slots is not needed any more. It may wait for the medium.
    pub(super) fn discard(&self, first: u64, count: u64) -> Result<(), Errno> {
        let (offset, bytes) = (first * SLOT_BYTES as u64, count * SLOT_BYTES as u64);
        match self.is_device {
            true => disk::discard_blocks(self.file(), offset, bytes),
            false => disk::punch(self.file(), offset, bytes),
        }
    }

    /// Whether this is a child's copy.
    pub(super) fn is_inherited(&self) -> bool {
        self.file.is_inherited()
    }
}

/// Opens a block device for this process alone.
fn open_alone(path: &Path, number: DeviceNumber) -> Result<OwnedFd, Refusal> {
    if let Some(at) = mounts::mounted_at(number) {
        return Err(Refusal::Mounted { path: path.to_owned(), at });
    }
    if mounts::is_swap(number) {
        return Err(Refusal::Swap(path.to_owned()));
    }
    disk::open_device(path).map_err(|errno| not_opened(path, errno))
}

/// Bytes of all whole slots of a block device.
fn device_bytes(file: BorrowedFd<'_>, path: &Path, bytes_min: u64) -> Result<u64, Refusal> {
    let has = disk::device_bytes(file)
        .map_err(|errno| Refusal::Failed { path: path.to_owned(), errno })?;
    let bytes = has - has % SLOT_BYTES as u64;
    if bytes < bytes_min {
        return Err(Refusal::TooSmall { path: path.to_owned(), bytes: has, bytes_min });
    }
    Ok(bytes)
}

/// Why a path could not be opened.
pub(super) fn not_opened(path: &Path, errno: Errno) -> Refusal {
    let path = path.to_owned();
    match errno {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Refusal::NotWritable { path, errno },
        Errno::BUSY => Refusal::InUse(path),
        errno => Refusal::Failed { path, errno },
    }
}

/// Makes transfers direct, and tries one: some file systems accept the flag and refuse the transfer. Of a device the
/// first slot is read; in a file, which has no contents yet, it is written.
fn is_direct_possible(file: BorrowedFd<'_>, is_device: bool) -> bool {
    if disk::set_direct(file, true).is_err() {
        return false;
    }
    let mut slot = Box::new(Slot([0; SLOT_BYTES]));
    let tried = match is_device {
        true => disk::read_at(file, &mut slot.0, 0),
        false => signal::without_file_size_signal(|| disk::write_at(file, &slot.0, 0)),
    };
    // Of other errors, such as a full disk, nothing follows.
    let is_refused = matches!(tried, Err(Errno::INVAL | Errno::OPNOTSUPP));
    if is_refused {
        // Whoever took the flag gives it back.
        disk::set_direct(file, false).ok();
    }
    !is_refused
}
