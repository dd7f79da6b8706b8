//! Files and block devices that are read and written in whole blocks, past the page cache where that is possible.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, FsWord, Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl;

use crate::files;

/// `_IOR(0x12, 114, size_t)` and `_IO(0x12, 119)` of `linux/fs.h`.
const BLKGETSIZE64: ioctl::Opcode = 0x8008_1272;
const BLKDISCARD: ioctl::Opcode = 0x1277;
/// `_IO(0x12, 94)`.
const BLKROGET: ioctl::Opcode = 0x125E;

/// How often a device is claimed that somebody has, and the pause after each try: a second in all.
const TRIES: u32 = 100;
const TRY: Duration = Duration::from_millis(10);
/// How often it is opened alone. Whoever sets up a loop device claims for a moment the first that seems free to him.
const TRIES_OF_OPEN: u32 = 10;

/// What a path names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A block device.
    Device(DeviceNumber),
    /// Anything else.
    Other,
}

/// The kernel's number of a block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceNumber {
    /// Its driver.
    pub major: u32,
    /// Which of the driver's devices.
    pub minor: u32,
}

/// What `path` names; links are followed.
///
/// # Errors
///
/// `NOENT`: nothing. `ACCESS`: a directory on the way may not be searched.
pub fn kind(path: &Path) -> Result<Kind, Errno> {
    let status = rustix::fs::stat(path)?;
    Ok(match FileType::from_raw_mode(status.st_mode) {
        FileType::Directory => Kind::Directory,
        FileType::BlockDevice => Kind::Device(DeviceNumber {
            major: rustix::fs::major(status.st_rdev),
            minor: rustix::fs::minor(status.st_rdev),
        }),
        _ => Kind::Other,
    })
}

/// The number of the block device at `path`, if there is one.
pub(crate) fn device_number(path: &Path) -> Option<DeviceNumber> {
    match kind(path) {
        Ok(Kind::Device(number)) => Some(number),
        _ => None,
    }
}

/// The name of the file system of a directory or file, if its files are kept in memory.
///
/// # Errors
///
/// Those of `statfs`.
pub fn kept_in_memory(path: &Path) -> Result<Option<&'static str>, Errno> {
    const TMPFS: FsWord = 0x0102_1994;
    const RAMFS: FsWord = 0x8584_58F6;
    const HUGETLBFS: FsWord = 0x9584_58F6;
    Ok(match rustix::fs::statfs(path)?.f_type {
        TMPFS => Some("tmpfs"),
        RAMFS => Some("ramfs"),
        HUGETLBFS => Some("hugetlbfs"),
        _ => None,
    })
}

/// Whether a block device keeps in memory what is written to it: a compressed disk of the kernel's (zram), or a RAM
/// disk. False where the kernel does not tell.
#[must_use]
pub fn is_in_memory(DeviceNumber { major, minor }: DeviceNumber) -> bool {
    let link = rustix::fs::readlink(format!("/sys/dev/block/{major}:{minor}"), Vec::new());
    link.is_ok_and(|link| link.to_str().is_ok_and(names_memory))
}

/// Whether the link of a device, or of a part of one, names one in memory: `../../devices/virtual/block/zram0`.
fn names_memory(link: &str) -> bool {
    let is_numbered = |name: &str, kind| {
        name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    link.split('/').any(|name| is_numbered(name, "zram") || is_numbered(name, "ram"))
}

/// How much room a user without privileges has left in the file system of a path.
///
/// # Errors
///
/// The path cannot be looked at.
pub fn free_bytes(path: &Path) -> Result<u64, Errno> {
    let about = rustix::fs::statvfs(path)?;
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}

/// Opens a new file in a directory, for reading and writing, that has no name there: it ends with its last
/// descriptor.
///
/// # Errors
///
/// `ACCESS`, `PERM` or `ROFS`: the directory may not be written to. `NOSPC`.
pub fn open_unlinked(directory: &Path) -> Result<OwnedFd, Errno> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    files::open_first(|| match rustix::fs::open(directory, flags | OFlags::TMPFILE, mode) {
        // Not every file system has files without a name (NFS, FUSE); ISDIR is the answer of an old one.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
            open_and_unlink(directory)
        }
        answer => answer,
    })
}

/// As [`open_unlinked`], by giving the file a name for a moment.
fn open_and_unlink(directory: &Path) -> Result<OwnedFd, Errno> {
    let directory =
        rustix::fs::open(directory, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for _ in 0..16 {
        let mut number = [0; 8];
        crate::random::fill(&mut number)?;
        let name = format!(".zfolio-spill-{:016x}", u64::from_ne_bytes(number));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        match rustix::fs::openat(&directory, &*name, flags | OFlags::NOFOLLOW, mode) {
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
            Ok(file) => {
                rustix::fs::unlinkat(&directory, &*name, AtFlags::empty())?;
                return Ok(file);
            }
        }
    }
    Err(Errno::EXIST)
}

/// Opens a block device, for reading and writing, for this process alone: the kernel gives it to nobody else who
/// asks for that, and to nobody who would mount it.
///
/// # Errors
///
/// `BUSY`: it, or a partition of it, is mounted, in use as swap, part of another device, or open exclusively, a tenth
/// of a second long. `ACCESS`, `PERM` or `ROFS`: it may not be written to.
pub fn open_device(path: &Path) -> Result<OwnedFd, Errno> {
    let file = open_alone(path, OFlags::RDWR, TRIES_OF_OPEN)?;
    // The path may name something else by now.
    let status = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::BlockDevice {
        return Err(Errno::NOTBLK);
    }
    // The kernel opens some of these, and then refuses each write.
    if is_read_only(file.as_fd())? { Err(Errno::ROFS) } else { Ok(file) }
}

/// Whether a block device refuses writes.
fn is_read_only(file: BorrowedFd<'_>) -> Result<bool, Errno> {
    // SAFETY: BLKROGET writes one `int`.
    let request = unsafe { ioctl::Getter::<BLKROGET, i32>::new() };
    // SAFETY: it changes nothing.
    unsafe { ioctl::ioctl(file, request) }.map(|word| word != 0)
}

/// Whether a block device, or a partition of it, is mounted, in use as swap, part of another device, or open
/// exclusively. It is opened for reading only: when a descriptor is closed that may write, udev opens the device to
/// look at it.
#[must_use]
pub fn is_claimed(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).is_err_and(|error| error == Errno::BUSY)
}

/// Claims a block device as long as the answer, or a copy of it, is open: the kernel gives it to nobody else who asks
/// for it alone, and to nobody who would mount it. The claim allows reading only; whoever has it opens the device again
/// to write ([`open_again`]). udev keeps off what is locked by `flock`, so that is done too, where it succeeds.
///
/// # Errors
///
/// `BUSY`: somebody else has claimed it, or it, or a partition of it, is in use otherwise, a second long: a process
/// that was killed closes its files a moment later. Else those of `open`.
pub fn claim_device(path: &Path) -> Result<OwnedFd, Errno> {
    let file = open_alone(path, OFlags::RDONLY, TRIES)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok();
    Ok(file)
}

/// Opens a block device exclusively; tries that up to `tries` times.
fn open_alone(path: &Path, flags: OFlags, tries: u32) -> Result<OwnedFd, Errno> {
    for _ in 0..tries {
        match rustix::fs::open(path, flags | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::BUSY | Errno::INTR) => std::thread::sleep(TRY),
            answer => return answer,
        }
    }
    Err(Errno::BUSY)
}

/// Opens a file that another thread of this process has open, in the calling thread's table of files. The answer has
/// a position, flags and locks of its own.
///
/// # Errors
///
/// Those of `open`: no `/proc` here, a file of another user, no descriptor left.
pub fn open_again(thread: u32, number: i32) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/task/{thread}/fd/{number}");
    let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // The lowest numbers are what people write to, even if a program has closed them.
    if file.as_raw_fd() > 2 { Ok(file) } else { rustix::io::fcntl_dupfd_cloexec(&file, 3) }
}

/// A range of bytes of a file.
pub type Range = std::ops::Range<u64>;

/// All of a file, however long it becomes.
pub const WHOLE: Range = 0..u64::MAX / 2;

/// Marks a range of a file as in use by whoever has this description of it: this process, and children which inherit
/// it. The mark ends with the last of these.
///
/// # Errors
///
/// The file system has no locks. `AGAIN`: somebody has taken it for himself ([`take`]).
pub fn mark_used(file: BorrowedFd<'_>, range: Range) -> Result<(), Errno> {
    lock_call(file, libc::F_OFD_SETLK, libc::F_RDLCK, range).map(drop)
}

/// Marks a range of a file as in use, as [`mark_used`] does, if nobody else has marked any of it.
///
/// # Errors
///
/// `AGAIN`: somebody has. Else the file system has no locks.
pub fn take(file: BorrowedFd<'_>, range: Range) -> Result<(), Errno> {
    lock_call(file, libc::F_OFD_SETLK, libc::F_WRLCK, range.clone())?;
    // Others may read there later on, if this process allows it. The kernel exchanges the lock in one step.
    mark_used(file, range)
}

/// Whether a range of a file is marked through another description ([`mark_used`]).
///
/// # Errors
///
/// The file system has no locks.
pub fn is_used_by_others(file: BorrowedFd<'_>, range: Range) -> Result<bool, Errno> {
    let in_the_way = lock_call(file, libc::F_OFD_GETLK, libc::F_WRLCK, range)?;
    Ok(i32::from(in_the_way) != libc::F_UNLCK)
}

/// A call about a lock of a range. Returns the kind of lock that the kernel has answered with.
fn lock_call(file: BorrowedFd<'_>, command: i32, kind: i32, range: Range) -> Result<i16, Errno> {
    let word = |number: i32| i16::try_from(number).expect("a small constant");
    let (l_type, l_whence) = (word(kind), word(libc::SEEK_SET));
    let offset = |bytes: u64| i64::try_from(bytes).map_err(|_| Errno::OVERFLOW);
    let (l_start, l_len) = (offset(range.start)?, offset(range.end - range.start)?);
    let mut lock = libc::flock { l_type, l_whence, l_start, l_len, l_pid: 0 };
    // SAFETY: a call with a pointer to a structure of ours, which the kernel reads and writes.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if answer < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(lock.l_type)
}

/// From now on transfers go past the page cache, or through it. Offsets, lengths and addresses of direct transfers
/// are multiples of the block of the device.
///
/// # Errors
///
/// `INVAL`: the file system has no direct transfers.
pub fn set_direct(file: BorrowedFd<'_>, is_direct: bool) -> Result<(), Errno> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    rustix::fs::fcntl_setfl(file, flags)
}

/// Gives a file a size. What is added reads as zeros, and takes no room.
///
/// # Errors
///
/// `FBIG`: more than the file system, or `RLIMIT_FSIZE`, allows. For the latter the kernel also sends the thread
/// SIGXFSZ ([`crate::signal::without_file_size_signal`]).
pub fn set_bytes(file: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    rustix::fs::ftruncate(file, bytes)
}

/// The bytes of a block device.
///
/// # Errors
///
/// `NOTTY`: it is none.
pub fn device_bytes(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    // SAFETY: BLKGETSIZE64 writes one `u64`.
    let request = unsafe { ioctl::Getter::<BLKGETSIZE64, u64>::new() };
    // SAFETY: it changes nothing; another kind of file answers with an error.
    unsafe { ioctl::ioctl(file, request) }
}

/// Frees the blocks of a range of a file, which reads as zeros from then on. It may wait for the file system.
///
/// # Errors
///
/// `OPNOTSUPP`: the file system cannot.
pub fn punch(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, offset, bytes)
}

/// Tells a block device that a range is not needed any more; its contents are undefined from then on. It waits for
/// the device.
///
/// # Errors
///
/// `OPNOTSUPP`: the device cannot.
pub fn discard_blocks(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), Errno> {
    // SAFETY: BLKDISCARD reads two numbers of 64 bits: offset and length.
    let request = unsafe { ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([offset, bytes]) };
    // SAFETY: it touches no memory but its argument.
    unsafe { ioctl::ioctl(file, request) }
}

/// Reads at an offset; returns how many bytes were read: 0 at the end of the file.
///
/// # Errors
///
/// The medium's.
pub fn read_at(file: BorrowedFd<'_>, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
    rustix::io::pread(file, into, offset)
}

/// Writes at an offset; returns how many bytes were written.
///
/// # Errors
///
/// `NOSPC`, `DQUOT`: no room. `FBIG`: as for [`set_bytes`], with SIGXFSZ. The medium's.
pub fn write_at(file: BorrowedFd<'_>, from: &[u8], offset: u64) -> Result<usize, Errno> {
    rustix::io::pwrite(file, from, offset)
}

/// The largest size to which this process may make a file grow; `None` if any.
#[must_use]
pub fn file_bytes_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}

#[cfg(test)]
mod tests {
    use super::names_memory;

    /// Goal: devices in memory are known by what sysfs calls them, and parts of them too; no other device is.
    #[test]
    fn devices_in_memory_are_known_by_name() {
        let block = |name: &str| format!("../../devices/virtual/block/{name}");
        for name in ["zram0", "zram12", "zram0/zram0p1", "ram0", "ram15"] {
            assert!(names_memory(&block(name)), "{name}");
        }
        for name in ["loop0", "dm-0", "zramble", "ramdisk", "nvme0n1", "ublkb0", "md0"] {
            assert!(!names_memory(&block(name)), "{name}");
        }
        assert!(!names_memory("../../devices/pci0000:00/0000:00:02.0/virtio1/block/vda/vda1"));
    }
}
