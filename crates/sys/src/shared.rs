//! Files in `/dev/shm/zfolio-UID` that one process maps and others read.

use std::ffi::{CString, OsStr, c_void};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::files;

/// The directory of this process's user.
fn folder() -> Option<CString> {
    let uid = rustix::process::geteuid().as_raw();
    CString::new(format!("/dev/shm/zfolio-{uid}")).ok()
}

/// Opens the directory, and makes it if need be.
///
/// # Errors
///
/// Those of `open`; `NOENT` also if it does not belong to this user alone.
pub(crate) fn open_folder() -> Result<OwnedFd, Errno> {
    let path = folder().ok_or(Errno::NOENT)?;
    // Not through a symbolic link, and not in a directory that another user made.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let open = || rustix::fs::open(&path, flags, Mode::empty());
    let folder = match open() {
        Err(Errno::NOENT) => {
            rustix::fs::mkdir(&path, Mode::RWXU).ok();
            open()
        }
        opened => opened,
    };
    let ours = |about: &Stat| about.st_uid == rustix::process::geteuid().as_raw();
    let folder = match folder {
        // Another user's may be closed to this one.
        Err(Errno::ACCESS) if rustix::fs::lstat(&path).is_ok_and(|about| !ours(&about)) => {
            return Err(Errno::NOENT);
        }
        folder => folder?,
    };
    let about = rustix::fs::fstat(&folder)?;
    if ours(&about) && about.st_mode & 0o077 == 0 { Ok(folder) } else { Err(Errno::NOENT) }
}

/// The path of a file in the directory.
pub(crate) fn path(name: &str) -> Option<CString> {
    CString::new(format!("{}/{name}", folder()?.to_str().ok()?)).ok()
}

/// Makes a file of `bytes` zeros, in a directory that belongs to this user alone.
///
/// An existing file of that name is removed first: an earlier process with the same id left it, or this
/// process before it executed another program. A reader that has it open keeps it. `None` if there is no
/// `/dev/shm`, or if another user made the directory; or, with the existing file removed, if the process
/// may not make a file of that size, or there is no room for it.
#[must_use]
pub fn create(name: &str, bytes: usize) -> Option<OwnedFd> {
    let folder = open_folder().ok()?;
    let name = CString::new(name).ok()?;
    rustix::fs::unlinkat(&folder, &name, AtFlags::empty()).ok();
    if !fits(bytes) {
        return None;
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(&folder, &name, flags, Mode::RUSR | Mode::WUSR).ok()?;
    // With its memory: where the file system is full, a store to the mapping would be SIGBUS.
    let allocate = || rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64);
    let made = match rustix::io::retry_on_intr(allocate) {
        // Not every file system can.
        Err(Errno::OPNOTSUPP) => rustix::fs::ftruncate(&file, bytes as u64),
        made => made,
    };
    if made.is_err() {
        rustix::fs::unlinkat(&folder, &name, AtFlags::empty()).ok();
        return None;
    }
    Some(file)
}

/// Opens a file that another process of this user made, of `bytes` bytes or more, to be mapped.
///
/// # Errors
///
/// Those of `open`; `NOENT` also if the file, or its directory, belongs to somebody else, or if it is shorter.
pub fn open(name: &str, bytes: usize) -> Result<OwnedFd, Errno> {
    let folder = open_folder()?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
    let about = rustix::fs::fstat(&file)?;
    let ours = about.st_uid == rustix::process::geteuid().as_raw();
    let is_whole = u64::try_from(about.st_size).is_ok_and(|size| size >= bytes as u64);
    if ours && is_whole { Ok(file) } else { Err(Errno::NOENT) }
}

/// Replaces all of a file after its first `keep_bytes` by `text`.
pub fn replace_tail(name: &str, keep_bytes: usize, text: &str) {
    if !fits(keep_bytes + text.len()) {
        return;
    }
    let Some(file) = path(name).and_then(|path| {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::open(path, flags, Mode::empty()).ok()
    }) else {
        return;
    };
    if rustix::fs::ftruncate(&file, keep_bytes as u64).is_ok() {
        files::write_all(file.as_fd(), text.as_bytes());
    }
}

/// Removes a file, if it is there.
pub fn remove(name: &str) {
    path(name).map(rustix::fs::unlink);
}

/// Whether this process may make a file of this size (`ulimit -f`): otherwise SIGXFSZ would end it.
fn fits(bytes: usize) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    limit.is_none_or(|limit| bytes as u64 <= limit)
}

/// Maps the first bytes of a file, shared; without a file, private zeros.
///
/// # Errors
///
/// Those of `mmap`.
///
/// # Safety
///
/// `at` is null, or the caller owns all of `at..at + bytes` and may replace it.
pub unsafe fn map(
    file: Option<&OwnedFd>,
    bytes: usize,
    at: *mut c_void,
) -> Result<*mut c_void, Errno> {
    let fixed = if at.is_null() { MapFlags::empty() } else { MapFlags::FIXED };
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    match file {
        // SAFETY: the caller's contract.
        Some(file) => unsafe {
            rustix::mm::mmap(at, bytes, protection, MapFlags::SHARED | fixed, file, 0)
        },
        // SAFETY: the same.
        None => unsafe {
            rustix::mm::mmap_anonymous(at, bytes, protection, MapFlags::PRIVATE | fixed)
        },
    }
}

/// Maps a file of [`create`] or [`open`] as a `T`, for the rest of the process's life. `None`: `mmap` fails.
///
/// # Safety
///
/// `T` consists of atomic integers, for which any bytes are valid; so other processes may change them. The file has
/// `size_of::<T>()` bytes or more.
#[must_use]
pub unsafe fn map_for_good<T>(file: &OwnedFd) -> Option<&'static T> {
    // SAFETY: `at` is null.
    let mapped = unsafe { map(Some(file), size_of::<T>(), std::ptr::null_mut()) };
    let base: *const T = mapped.ok()?.cast_const().cast();
    // SAFETY: a mapping of that size, page-aligned, which is never unmapped; the rest is the caller's contract.
    Some(unsafe { &*base })
}

/// Opens a file to read it, in a directory that may be another user's, to whom the file belongs then.
///
/// # Errors
///
/// Those of `open`; it is no regular file.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    open_there(path, OFlags::RDONLY)
}

/// Writes into a file that exists, in a directory that may be another user's, to whom the file belongs then.
///
/// # Errors
///
/// Those of `open` and `write`; it is no regular file.
pub fn write_at(path: &Path, bytes: &[u8], at: usize) -> io::Result<()> {
    open_there(path, OFlags::WRONLY)?.write_all_at(bytes, at as u64)
}

/// Opens a file of the user to whom its directory belongs. That user may have put anything there, for the superuser to
/// open: a link to the file of somebody else, or a pipe, which would wait for its other end.
fn open_there(path: &Path, mode: OFlags) -> io::Result<File> {
    let (folder, name) = folder_of(path)?;
    let flags = mode | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(&folder, name, flags, Mode::empty())?);
    let about = file.metadata()?;
    let is_theirs = about.uid() == rustix::fs::fstat(&folder)?.st_uid;
    if about.is_file() && is_theirs { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// The directory of a file, if it is one: another user may have put a symbolic link in its place, to a directory that
/// is not its own.
fn folder_of(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let parts = path.parent().zip(path.file_name());
    let (folder, name) = parts.ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok((rustix::fs::open(folder, flags, Mode::empty())?, name))
}

/// Removes a file from its directory, if that is no link.
///
/// # Errors
///
/// Those of `open` and `unlink`.
pub fn unlink(path: &Path) -> io::Result<()> {
    let (folder, name) = folder_of(path)?;
    Ok(rustix::fs::unlinkat(folder, name, AtFlags::empty())?)
}

/// Reads the first bytes of a file as a `T`.
///
/// # Errors
///
/// Those of `open` and `read`; the file is shorter than a `T`.
///
/// # Safety
///
/// Any bytes are a valid `T`, and a `T` has no padding.
pub unsafe fn read<T: Default>(path: &Path) -> io::Result<Box<T>> {
    let mut file = open_to_read(path)?;
    let mut value = Box::<T>::default();
    let base: *mut T = &raw mut *value;
    // SAFETY: `base` is the one pointer to a `T` that lives as long as `value`; its bytes are initialised, since it has
    // no padding, and may become any others (the caller's contract).
    let bytes = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), size_of::<T>()) };
    file.read_exact(bytes)?;
    Ok(value)
}

/// Unmaps what [`map`] mapped.
///
/// # Safety
///
/// The range belongs to the caller, and no reference into it is alive.
pub unsafe fn unmap(at: *mut c_void, bytes: usize) {
    // SAFETY: the caller's contract.
    let gone = unsafe { rustix::mm::munmap(at, bytes) };
    debug_assert!(gone.is_ok());
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt as _, symlink};

    use rustix::fs::{CWD, FileType, Mode};
    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::{Errno, create, folder, open, open_to_read, remove, unlink, write_at};
    use crate::testing::in_child;

    /// Goal: what a process counted before it executed another program is not taken for the figures of that program,
    /// which may make no file.
    #[test]
    fn a_file_goes_also_where_no_new_one_can_be_made() {
        let name = format!("test-{}", std::process::id());
        if create(&name, 4096).is_none() {
            return eprintln!("SKIPPED: no file can be made in /dev/shm");
        }
        let is_good = in_child(|| {
            let limit = Rlimit { current: Some(512), maximum: Some(512) };
            setrlimit(Resource::Fsize, limit).is_ok() && create(&name, 4096).is_none()
        });
        let is_gone = open(&name, 1).err() == Some(Errno::NOENT);
        remove(&name);
        assert!(is_good && is_gone);
    }

    /// Goal: a directory in the place of this user's that belongs to somebody else is not taken for a sandbox that
    /// forbids to open it. Method: the superuser makes the directory of a user whom nobody has.
    #[test]
    fn a_directory_of_somebody_else_is_none() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: another user is needed");
        }
        let uid = 3_000_000_000 + std::process::id();
        let path = format!("/dev/shm/zfolio-{uid}");
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        let is_good = in_child(|| {
            // SAFETY: it takes numbers only, in a child with one thread.
            let answer = unsafe { libc::setresuid(uid, uid, uid) };
            let is_there = folder().is_some_and(|folder| folder.to_str() == Ok(&path));
            answer == 0 && is_there && open("1", 1).err() == Some(Errno::NOENT)
        });
        std::fs::remove_dir(&path).unwrap();
        assert!(is_good);
    }

    /// Goal: whatever another user has put in its directory, nobody waits for it, and nothing elsewhere is removed.
    #[test]
    fn what_others_have_put_there_is_neither_waited_for_nor_followed() {
        let folder = std::env::temp_dir().join(format!("zfolio-shared-{}", std::process::id()));
        let [mine, others] = ["mine", "others"].map(|name| folder.join(name));
        std::fs::create_dir_all(&mine).unwrap();
        std::fs::write(mine.join("1"), [7; 8]).unwrap();
        symlink(&mine, &others).unwrap();
        symlink(mine.join("1"), mine.join("2")).unwrap();
        let (pipe, mode) = (mine.join("3"), Mode::from_raw_mode(0o600));
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, mode, 0).unwrap();
        assert!(open_to_read(&mine.join("1")).is_ok());
        write_at(&mine.join("1"), &[8], 7).unwrap();
        for other in [&mine.join("2"), &pipe, &mine, &others.join("1")] {
            assert!(open_to_read(other).is_err(), "{}", other.display());
            assert!(write_at(other, &[9], 0).is_err(), "{}", other.display());
        }
        assert_eq!(std::fs::read(mine.join("1")).unwrap(), [7, 7, 7, 7, 7, 7, 7, 8]);
        // A file that is not that user's: by a hard link, which some systems allow.
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::fs::Uid::from_raw(65534);
            rustix::fs::chown(&mine, Some(nobody), None).unwrap();
            assert!(write_at(&mine.join("1"), &[9], 0).is_err());
            rustix::fs::chown(&mine, Some(rustix::fs::Uid::ROOT), None).unwrap();
        }
        assert!(unlink(&others.join("1")).is_err() && mine.join("1").exists());
        unlink(&mine.join("2")).unwrap();
        assert!(mine.join("1").exists(), "the link goes, and not what it leads to");
        unlink(&mine.join("1")).unwrap();
        assert!(!mine.join("1").exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
