//! What this machine offers: each kernel feature and permission is tested, not guessed.
//!
//! Each test opens what it needs, and closes it again; nothing stays changed. The caller decides
//! what a result means for the user.
//!
//! # Invariants
//!
//! - `PROBE-1` The structures handed to the kernel have the size that is encoded in their ioctl
//!   number; checked when this file is compiled.

pub mod child;

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use crate::Errno;
use crate::map::Reservation;
use crate::uffd::{Reach, Uffd, feature};

/// `_IO(type, number)` and `_IOWR(type, number, bytes)` of `asm-generic/ioctl.h`.
const fn ioctl_number(direction: u32, kind: u8, number: u8, bytes: usize) -> libc::c_ulong {
    assert!(bytes < 1 << 14);
    // 2 bits of direction, 14 of size, 8 of type, 8 of number.
    ((direction as libc::c_ulong) << 30)
        | ((bytes as libc::c_ulong) << 16)
        | ((kind as libc::c_ulong) << 8)
        | number as libc::c_ulong
}

const NONE: u32 = 0;
const READ_WRITE: u32 = 3;
const UFFD_KIND: u8 = 0xAA;

/// Makes a userfaultfd from an open `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = ioctl_number(NONE, UFFD_KIND, 0x00, 0);
const UFFDIO_API: libc::c_ulong = ioctl_number(READ_WRITE, UFFD_KIND, 0x3F, size_of::<Api>());

const _: () = {
    // PROBE-1: the numbers as a C compiler computes them from linux/userfaultfd.h.
    assert!(USERFAULTFD_IOC_NEW == 0xAA00);
    assert!(UFFDIO_API == 0xC018_AA3F);
};

/// Without the kernel's own faults: what an unprivileged caller may have.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_API_VERSION: u64 = 0xAA;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// A bit of the userfaultfd feature word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Feature {
    /// Its bit in the feature word.
    pub mask: u64,
    /// Its name without `UFFD_FEATURE_`.
    pub name: &'static str,
    /// The first kernel that has it.
    pub since: &'static str,
}

impl Feature {
    /// `UFFDIO_MOVE`: moves a page to another address without a copy.
    pub const MOVE: Feature = Feature { mask: feature::MOVE, name: "MOVE", since: "6.8" };
    /// A missing page raises SIGBUS in the thread that touched it.
    pub const SIGBUS: Feature = Feature { mask: feature::SIGBUS, name: "SIGBUS", since: "4.14" };
    /// A message names the thread that touched a missing page.
    pub const THREAD_ID: Feature =
        Feature { mask: feature::THREAD_ID, name: "THREAD_ID", since: "4.14" };
    /// `mremap` is reported.
    pub const EVENT_REMAP: Feature =
        Feature { mask: feature::EVENT_REMAP, name: "EVENT_REMAP", since: "4.11" };
    /// `madvise(MADV_DONTNEED)` is reported.
    pub const EVENT_REMOVE: Feature =
        Feature { mask: feature::EVENT_REMOVE, name: "EVENT_REMOVE", since: "4.11" };
    /// `munmap` is reported.
    pub const EVENT_UNMAP: Feature =
        Feature { mask: feature::EVENT_UNMAP, name: "EVENT_UNMAP", since: "4.11" };

    /// Whether the bit is set in a feature word.
    #[must_use]
    pub fn is_in(self, features: u64) -> bool {
        features & self.mask != 0
    }
}

/// A way to get a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Door {
    /// Open `/dev/userfaultfd`: file permissions decide, and the kernel's own faults are served.
    Device,
    /// The system call, with the kernel's own faults: needs root, `CAP_SYS_PTRACE` or the sysctl.
    Syscall,
    /// The system call for faults of the program only: allowed to everybody.
    SyscallUserMode,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A new userfaultfd, before the API handshake.
fn userfaultfd(door: Door) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match door {
        Door::Device => {
            let device = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_CLOEXEC)
                .open("/dev/userfaultfd")?;
            // SAFETY: this ioctl takes its flags by value and touches no memory of ours.
            check(unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) })?
        }
        Door::Syscall | Door::SyscallUserMode => {
            let user_mode = if door == Door::SyscallUserMode { UFFD_USER_MODE_ONLY } else { 0 };
            // SAFETY: the call takes its flags by value and touches no memory of ours.
            let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | user_mode) };
            check(libc::c_int::try_from(fd).expect("a descriptor or -1 fits in an int"))?
        }
    };
    // SAFETY: the kernel has just returned `fd` (not negative, by `check`), and no other code has
    // it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the API handshake with `features`; returns the feature word of the kernel.
fn agree(fd: &OwnedFd, features: u64) -> io::Result<u64> {
    let mut api = Api { api: UFFD_API_VERSION, features, ioctls: 0 };
    // SAFETY: by PROBE-1 the kernel reads and writes exactly the bytes of `api`, which outlives
    // the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
    Ok(api.features)
}

/// The userfaultfd features of this kernel, opened through `door`.
///
/// # Errors
///
/// If that is not possible: `ENOSYS` (no such call, or a seccomp filter), `ENOENT` (no device),
/// `EPERM` or `EACCES` (no permission).
pub fn userfaultfd_features(door: Door) -> io::Result<u64> {
    agree(&userfaultfd(door)?, 0)
}

/// So often a page is moved that somebody else has for the moment, with a pause in between.
const MOVES_MAX: u32 = 10;
const MOVE_PAUSE: Duration = Duration::from_millis(1);

/// Opens a userfaultfd as the engine does, and moves a page with `UFFDIO_MOVE`: a test that does
/// not rely on the feature word.
///
/// A page that somebody else has cannot be moved (`EBUSY`): a child of another thread's, until it
/// executes its program, or the kernel, which migrates it. It is written again, which gives this
/// process a page of its own if a child has the other, and moved again.
///
/// # Errors
///
/// The kernel's error; `EIO` if the page did not arrive unchanged.
pub fn move_a_page(reach: Reach) -> Result<(), Errno> {
    const MARK: u8 = 0x5A;
    let uffd = Uffd::open(reach, feature::MOVE)?;
    let bytes = page_bytes();
    let source = Reservation::new(bytes, bytes)?;
    let target = Reservation::new(bytes, bytes)?;
    uffd.register(target.address(), bytes)?;
    for tried in 1.. {
        // SAFETY: the first byte of a mapping of our own. Volatile: it is read at another address.
        unsafe { source.base().write_volatile(MARK) };
        // SAFETY: `source` is not read again.
        let progress = unsafe { uffd.move_pages(source.address(), target.address(), bytes) };
        match progress.stopped {
            None => break,
            Some(Errno::BUSY) if tried < MOVES_MAX => crate::thread::sleep(MOVE_PAUSE),
            Some(error) => return Err(error),
        }
    }
    // SAFETY: the first byte of a mapping of our own, present after the successful move. Volatile:
    // the kernel wrote it.
    let arrived = unsafe { target.base().read_volatile() };
    if arrived == MARK { Ok(()) } else { Err(Errno::IO) }
}

/// Bytes of a page of the running kernel.
#[must_use]
pub fn page_bytes() -> usize {
    // SAFETY: `sysconf` takes and returns plain numbers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("a page has a size")
}

/// The release of the running kernel, as `uname -r` prints it.
#[must_use]
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".to_owned(), |release| release.trim().to_owned())
}

/// The effective user of this process.
#[must_use]
pub fn effective_uid() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() }
}

/// The effective group of this process.
#[must_use]
pub fn effective_gid() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::getegid() }
}

/// Clock ticks in a second, the unit of field 22 of `/proc/PID/stat`.
#[must_use]
pub fn clock_ticks() -> u64 {
    // SAFETY: `sysconf` takes and returns plain numbers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).unwrap_or(100)
}

/// The address space that this process may have (`ulimit -v`), in bytes; `None` if unlimited.
#[must_use]
pub fn address_space_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit`, which outlives the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Whether the C library registered an rseq area for its threads, and exports its position.
#[must_use]
pub fn has_rseq() -> bool {
    const SIZE: &CStr = c"__rseq_size";
    // SAFETY: the name is zero-terminated; looking a symbol up changes nothing.
    let size = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SIZE.as_ptr()) };
    if size.is_null() {
        return false;
    }
    // SAFETY: glibc exports `__rseq_size` as `const unsigned int`, written before `main`.
    unsafe { size.cast::<libc::c_uint>().read() != 0 }
}

/// Whether this process may execute `path`, by its effective user.
///
/// # Errors
///
/// `EACCES` if it may not; what else the kernel answers.
pub fn may_execute(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is zero-terminated and outlives the call.
    let result =
        unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) };
    check(result).map(drop)
}

/// Whether the open `file` gives capabilities to whoever executes it (`setcap`).
#[must_use]
pub fn has_file_capabilities(file: &File) -> bool {
    const NAME: &CStr = c"security.capability";
    // SAFETY: the name is zero-terminated; with a size of 0 the kernel writes nothing and returns
    // the length that it would write.
    let length = unsafe { libc::fgetxattr(file.as_raw_fd(), NAME.as_ptr(), ptr::null_mut(), 0) };
    length > 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::{Door, Feature, Reach, move_a_page, page_bytes, userfaultfd_features};
    use crate::testing::in_child;

    #[test]
    fn a_page_is_a_power_of_two() {
        assert!(page_bytes().is_power_of_two());
    }

    #[test]
    fn a_page_moves_wherever_the_feature_is_told() {
        for (door, reach) in [
            (Door::Device, Reach::Kernel),
            (Door::Syscall, Reach::Kernel),
            (Door::SyscallUserMode, Reach::Program),
        ] {
            match userfaultfd_features(door) {
                Ok(features) if Feature::MOVE.is_in(features) => {
                    move_a_page(reach).expect("the kernel says that it can");
                }
                Ok(features) => eprintln!("SKIPPED: {door:?} has features {features:#x}, no MOVE"),
                Err(error) => eprintln!("SKIPPED: {door:?}: {error}"),
            }
        }
    }

    /// Goal: children of other threads are not taken for a kernel that cannot move pages. Method: pages are moved while
    /// another thread forks.
    #[test]
    fn a_page_moves_beside_forks() {
        if !userfaultfd_features(Door::SyscallUserMode).is_ok_and(|it| Feature::MOVE.is_in(it)) {
            eprintln!("SKIPPED: there is no MOVE");
            return;
        }
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    assert!(in_child(|| true));
                }
            });
            let failed = (0..2000).map(|_| move_a_page(Reach::Program)).find(Result::is_err);
            is_done.store(true, Relaxed);
            assert_eq!(failed, None);
        });
    }

    /// Goal: where the system call is forbidden, `/dev/userfaultfd` is enough for both kinds of
    /// access. Method: a filter as in a container, on this thread alone. The staging area used to
    /// be opened by the call only, so that in a container with the device every program ran without
    /// its limit.
    #[test]
    fn the_device_is_enough_where_seccomp_forbids_the_call() {
        if userfaultfd_features(Door::Device).is_err() {
            eprintln!("SKIPPED: /dev/userfaultfd cannot be opened");
            return;
        }
        let thread = std::thread::spawn(|| {
            crate::testing::forbid_calls(&[libc::SYS_userfaultfd], crate::Errno::PERM).unwrap();
            for door in [Door::Syscall, Door::SyscallUserMode] {
                let error = userfaultfd_features(door).expect_err("it is forbidden");
                assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            }
            for reach in [Reach::Kernel, Reach::Program] {
                crate::uffd::Uffd::open(reach, 0).expect("by the device");
            }
        });
        thread.join().expect("as asserted");
    }
}
