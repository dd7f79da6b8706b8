//! File descriptors and small files.

use std::ffi::{CStr, CString};
use std::io::{self, ErrorKind, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use rustix::fs::{Access, FileType, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

use crate::{inherited, process};

/// How many descriptors this process may have (`ulimit -n`).
#[must_use]
pub fn limit() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.unwrap_or(u64::MAX)
}

/// Raises [`limit`] as far as this process may (`ulimit -Hn`), if need be.
pub fn raise_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, all).ok();
}

/// Reads the beginning of a small file, without any allocation.
///
/// # Errors
///
/// Those of `open` and `read`.
pub fn read_small(path: &CStr, into: &mut [u8]) -> Result<usize, Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::read(&file, into)
}

/// Writes `text` to standard output. False if the reader has closed the pipe, which is not an
/// error.
///
/// # Errors
///
/// If it cannot be written, as on a full disk; or if this process was started without standard output.
pub fn print(text: &str) -> io::Result<bool> {
    check_output()?;
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether this process was started with a standard output. What Rust's runtime has put in its place takes everything.
///
/// # Errors
///
/// `BADF`, as a write without that runtime.
pub fn check_output() -> io::Result<()> {
    if inherited::is_closed(io::stdout().as_raw_fd()) { Err(Errno::BADF.into()) } else { Ok(()) }
}

/// Takes standard output for this process alone: children write theirs to standard error from now
/// on.
///
/// # Errors
///
/// If no descriptor is left, or if this process was started without standard output.
pub fn lend_output() -> io::Result<std::fs::File> {
    check_output()?;
    let kept = rustix::io::fcntl_dupfd_cloexec(io::stdout(), 3)?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    Ok(kept.into())
}

/// The names in a directory, without those of itself and its parent. Unlike `opendir` it needs no `malloc` of the C
/// library.
///
/// # Errors
///
/// Those of `open` and `getdents64`.
pub fn names(path: &Path) -> Result<Vec<CString>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    let mut buffer = Vec::with_capacity(8192);
    let mut entries = RawDir::new(&directory, buffer.spare_capacity_mut());
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        if ![c".", c".."].contains(&entry.file_name()) {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// What a symbolic link points to.
///
/// # Errors
///
/// Those of `readlink`.
pub fn link(path: &Path) -> Result<CString, Errno> {
    rustix::fs::readlink(path, Vec::new())
}

/// Whether there is such a file, as far as this process may see.
#[must_use]
pub fn exists(path: &Path) -> bool {
    rustix::fs::access(path, Access::EXISTS).is_ok()
}

/// Whether this process may open the file at `path` to read and write, as far as its permissions say.
///
/// # Errors
///
/// Those of `access`: why not.
pub fn may_change(path: &Path) -> Result<(), Errno> {
    rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)
}

/// What tells the device file at `path` from one that is made there later: its inode and the device.
///
/// # Errors
///
/// Those of `stat`: it cannot be looked at.
pub fn device_identity(path: &Path) -> Result<[u64; 2], Errno> {
    rustix::fs::stat(path).map(|stat| [stat.st_ino, stat.st_rdev])
}

/// Reads a whole file, of at most `bytes_max` bytes.
///
/// # Errors
///
/// Those of `open` and `read`; `FBIG` if it is longer.
pub fn read_whole(path: impl AsRef<Path>, bytes_max: usize) -> Result<Vec<u8>, Errno> {
    let file = rustix::fs::open(path.as_ref(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // One byte more than allowed, to distinguish a longer file from one of exactly that length.
    let mut bytes = vec![0; bytes_max + 1];
    let mut length = 0;
    loop {
        match rustix::io::read(&file, &mut bytes[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        if length > bytes_max {
            return Err(Errno::FBIG);
        }
    }
    bytes.truncate(length);
    bytes.shrink_to_fit();
    Ok(bytes)
}

/// Gives the calling thread, and the threads that it starts, a table of file descriptors of their own. It has
/// copies of `but`, under the same numbers, perhaps one of standard error, and nothing else.
///
/// So what the program does to its descriptors (closing all of them, for example) does not affect
/// this thread, and this thread keeps none of the program's pipes open.
///
/// # Errors
///
/// `ENOMEM`; `EPERM` or `ENOSYS` in a sandbox. The thread may have copies of the program's descriptors then, and must
/// end.
pub fn leave_program_files(but: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>, Errno> {
    let mut kept: Vec<u32> = but.iter().map(|file| file.as_raw_fd().unsigned_abs()).collect();
    // SAFETY: unsharing the table of descriptors copies it: no descriptor changes its meaning.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }?;
    kept.extend(keep_error());
    kept.sort_unstable();
    let mut first = 0;
    for kept in kept.iter().copied().chain([u32::MAX]) {
        if first < kept {
            // SAFETY: the table is this thread's own (above), and the caller's contract is that the thread
            // has no other descriptor yet. A raw call, since neither library offers it for every descriptor.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, first, kept - 1, 0_u32) };
            if closed != 0 {
                return Err(crate::map::last_error());
            }
        }
        first = kept.saturating_add(1);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if limit.is_none_or(|most| most >= RESERVE_FROM) {
        reserve();
    }
    IS_USED.store(false, Ordering::Release);
    // SAFETY: this table's copies, which nobody else owns.
    Ok(but.iter().map(|file| unsafe { OwnedFd::from_raw_fd(file.as_raw_fd()) }).collect())
}

/// A copy of standard error in a table of our own, where calls are filtered, and what it is. -1: none.
static ERROR_COPY: AtomicI32 = AtomicI32::new(-1);
static ERROR_COPY_FILE: Noted = Noted::new();

/// Device and inode of the journal's socket, as systemd has named them to this process.
static JOURNAL_FILE: Noted = Noted::new();

/// Notes which socket is that of systemd's journal, before the program runs and may change its environment.
pub fn learn_journal() {
    let named = std::env::var("JOURNAL_STREAM").ok();
    JOURNAL_FILE.set(named.and_then(|named| parse_journal(&named)).unwrap_or_default());
}

/// Device and inode in the value of `JOURNAL_STREAM`.
fn parse_journal(value: &str) -> Option<[u64; 2]> {
    let (device, inode) = value.split_once(':')?;
    Some([device.parse().ok()?, inode.parse().ok()?])
}

/// Whether a copy of this file is kept. It is not asked who is at the other end of a socket: a filter may end the
/// process for that.
fn is_for_copy(about: &Stat) -> bool {
    let is_file = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
    is_file || [about.st_dev, about.st_ino] == JOURNAL_FILE.get()
}

/// Copies standard error within the calling thread's table, which is its own, where it could be had later neither by
/// `pidfd_getfd`, for which a filter may end the process, nor by opening it: a socket cannot be opened, and of a file
/// that is opened anew the program's next line would begin where this one does. Only the journal's socket: others may
/// have somebody who waits for their end. Returns the copy's number.
fn keep_error() -> Option<u32> {
    ERROR_COPY.store(-1, Ordering::Relaxed);
    if !process::is_filtered() {
        return None;
    }
    let copy = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 3).ok()?;
    let about = rustix::fs::fstat(&copy).ok().filter(is_for_copy)?;
    let what = [about.st_dev, about.st_ino];
    ERROR_COPY_FILE.set(what);
    let number = copy.into_raw_fd();
    ERROR_COPY.store(number, Ordering::Relaxed);
    Some(number.unsigned_abs())
}

/// Writes a message to that copy, if there is one, and the program's standard error still is the same. In the program's
/// table another file may have the copy's number.
fn write_to_copy(message: &str) -> bool {
    let number = ERROR_COPY.load(Ordering::Relaxed);
    if number < 0 {
        return false;
    }
    // SAFETY: the number is used within this function, for calls that answer an error where no file has it.
    let copy = unsafe { BorrowedFd::borrow_raw(number) };
    let what = Some(ERROR_COPY_FILE.get());
    let programs = rustix::fs::stat(c"/proc/self/fd/2").ok().map(|stat| [stat.st_dev, stat.st_ino]);
    let is_same = identity(copy) == what && programs == what;
    if is_same {
        write_all(copy, message.as_bytes());
    }
    is_same
}

/// Another descriptor of the same open file.
///
/// # Errors
///
/// `MFILE`.
pub fn duplicate(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(file, 0)
}

/// Two descriptors of a table of our own that are kept for a message: their numbers are the lowest of the table, so
/// that they can be had also where the program has set `RLIMIT_NOFILE` so low that nothing can be opened. -1: none.
static RESERVED: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];

/// How often a message is tried once these two are free.
const TRIES: usize = 1000;

/// Where fewer can be open from the start, all are needed for the work, and none is kept.
const RESERVE_FROM: u64 = 32;

/// Device and inode of what lies there. A thread that has the program's table, as in a child of `fork`, may have a file
/// of the program's under these numbers.
static RESERVED_FILE: Noted = Noted::new();

/// Device and inode of a file, in words that several threads may use.
struct Noted([AtomicU64; 2]);

impl Noted {
    const fn new() -> Noted {
        Noted([const { AtomicU64::new(0) }; 2])
    }

    fn set(&self, what: [u64; 2]) {
        self.0.iter().zip(what).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    fn get(&self) -> [u64; 2] {
        self.0.each_ref().map(|word| word.load(Ordering::Relaxed))
    }
}

/// Device and inode of a file.
fn identity(file: BorrowedFd<'_>) -> Option<[u64; 2]> {
    rustix::fs::fstat(file).ok().map(|stat| [stat.st_dev, stat.st_ino])
}

/// A file in the program's table of descriptors. Another thread of the program may close it there (`closefrom`), and
/// open one of its own under the same number: that one is not closed.
#[derive(Debug)]
pub struct Exposed {
    file: ManuallyDrop<OwnedFd>,
    identity: Option<[u64; 2]>,
}

impl From<OwnedFd> for Exposed {
    fn from(file: OwnedFd) -> Exposed {
        Exposed { identity: identity(file.as_fd()), file: ManuallyDrop::new(file) }
    }
}

impl AsFd for Exposed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Exposed {
    /// Whether the number still means the file that it was opened for.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.identity.is_some() && identity(self.file.as_fd()) == self.identity
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if self.is_same() {
            // SAFETY: it is dropped once, here, and not used any more.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// A thread uses what [`RESERVED`] has; what another one has to say at that moment is lost. A child of `fork` starts
/// over with its own table.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Takes what [`RESERVED`] has place for, if that can be had.
fn reserve() {
    let file = rustix::fs::memfd_create(c"zfolio-reserve", rustix::fs::MemfdFlags::CLOEXEC);
    let other = file.as_ref().map_err(|errno| *errno).and_then(|file| duplicate(file.as_fd()));
    let what = file.as_ref().ok().and_then(|file| identity(file.as_fd())).unwrap_or_default();
    RESERVED_FILE.set(what);
    for (place, file) in RESERVED.iter().zip([file, other]) {
        place.store(file.map_or(-1, IntoRawFd::into_raw_fd), Ordering::Relaxed);
    }
}

/// Gives up what [`RESERVED`] has, if it is in this thread's table.
fn unreserve() {
    for place in &RESERVED {
        let number = place.swap(-1, Ordering::Relaxed);
        if number < 0 {
            continue;
        }
        // SAFETY: nobody else has taken the number out of `place`. If another file has it, that one is not closed.
        let file = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        let ours = RESERVED_FILE.get();
        drop(Exposed { file, identity: Some(ours) });
    }
}

/// Opens what the work needs, if need be in the place of what is kept for messages: the program may have lowered
/// `RLIMIT_NOFILE` since this table was made.
///
/// # Errors
///
/// Those of `open`.
pub(crate) fn open_first<T>(open: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match open() {
        Err(Errno::MFILE) => {
            unreserve();
            open()
        }
        opened => opened,
    }
}

/// The program's standard error.
///
/// # Errors
///
/// Those of the calls; `PERM` also where a filter may end the process for them: systemd's `@system-service` does.
fn programs_error() -> Result<OwnedFd, Errno> {
    if process::is_filtered() {
        return Err(Errno::PERM);
    }
    let own = rustix::process::getpid();
    let process = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?;
    rustix::process::pidfd_getfd(process, 2, rustix::process::PidfdGetfdFlags::empty())
}

/// Opens the file of the program's standard error once more: a terminal, a pipe, or a file, to be written to at its
/// end. A socket cannot be opened.
fn open_error() -> Result<OwnedFd, Errno> {
    // NONBLOCK: to open a pipe that has no reader fails, instead of waiting for one.
    let flags =
        OFlags::WRONLY | OFlags::APPEND | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let error = rustix::fs::open(c"/proc/self/fd/2", flags, rustix::fs::Mode::empty())?;
    // This one is for appending; the program's may be.
    if is_data(error.as_fd(), programs_error_appends) {
        return Err(Errno::BADF);
    }
    // A write waits for room, as one to the program's own descriptor does.
    rustix::fs::fcntl_setfl(&error, OFlags::APPEND)?;
    Ok(error)
}

/// Whether the program has opened its standard error for appending.
fn programs_error_appends() -> bool {
    let flags = process::number_of(c"/proc/self/fdinfo/2", b"flags:", 8);
    flags.is_some_and(|flags| flags & u64::from(OFlags::APPEND.bits()) != 0)
}

/// Writes a message to the program's standard error, from a thread with its own table of
/// descriptors.
///
/// `pidfd_getfd` duplicates the program's descriptor for the length of one write; where that is
/// forbidden, the file is opened once more, or there is a copy. If the program has closed it, nothing is written.
pub fn tell_program(message: &str) {
    let tell = || {
        let error = match programs_error() {
            Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => {
                if write_to_copy(message) {
                    return Ok(());
                }
                open_error()
            }
            error => error,
        };
        write_message(error?.as_fd(), message.as_bytes());
        Ok(())
    };
    // Acquire and Release: whoever is next finds what the last one has reserved.
    if tell() == Err(Errno::MFILE) && !IS_USED.swap(true, Ordering::Acquire) {
        unreserve();
        // Threads of this table that look at the size of the process open a file for the length of one read, as soon as
        // there is room for it.
        for _ in 0..TRIES {
            if tell() != Err(Errno::MFILE) {
                break;
            }
            std::thread::yield_now();
        }
        reserve();
        IS_USED.store(false, Ordering::Release);
    }
}

/// Writes a message to standard error, without a lock or an allocation.
pub fn tell_here(message: &[u8]) {
    write_message(std::io::stderr().as_fd(), message);
}

/// Device and inode of what was standard error when the program began, once that is learnt: in a program that zfolio
/// was loaded into. Others get each message.
static ERROR_FILE: Noted = Noted::new();
static IS_LEARNT: AtomicBool = AtomicBool::new(false);

/// Notes what standard error is, before the program runs.
pub fn learn_error() {
    IS_LEARNT.store(true, Ordering::Relaxed);
    let what = identity(std::io::stderr().as_fd()).unwrap_or_default();
    ERROR_FILE.set(what);
}

/// Writes a message, unless the program has closed its standard error and a file of its data has the number now.
fn write_message(error: BorrowedFd<'_>, message: &[u8]) {
    let appends =
        || rustix::fs::fcntl_getfl(error).is_ok_and(|flags| flags.contains(OFlags::APPEND));
    if !is_data(error, appends) {
        write_all(error, message);
    }
}

/// Whether a descriptor of the program's is a character device with a driver of its own. Those of the kernel for
/// memory, as `/dev/zero`, do not mind where they are mapped.
#[must_use]
pub fn is_character_device(number: i32) -> bool {
    const MEMORY: u32 = 1;
    if number < 0 {
        return false;
    }
    // SAFETY: the number is used for one call, which answers an error where no file has it.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::fs::fstat(file).is_ok_and(|about| {
        FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice
            && rustix::fs::major(about.st_rdev) != MEMORY
    })
}

/// Whether the program's data may be there: it is no open file, or one with contents, other than the file of the start,
/// that is not for appending, as a log would be. A line is written also where a filter does not let it be looked at.
fn is_data(error: BorrowedFd<'_>, appends: impl FnOnce() -> bool) -> bool {
    if !IS_LEARNT.load(Ordering::Relaxed) {
        return false;
    }
    let about = match rustix::fs::fstat(error) {
        Ok(about) => about,
        Err(errno) => return errno == Errno::BADF,
    };
    let kind = FileType::from_raw_mode(about.st_mode);
    let has_contents = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
    let before = ERROR_FILE.get();
    has_contents && before != [about.st_dev, about.st_ino] && !appends()
}

/// Whether a write of a line does not wait: a pipe has room for a page, or it is no pipe.
#[must_use]
pub fn has_room(file: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&file, PollFlags::OUT)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Writes all of `bytes`, in several calls if needed; gives up on an error.
pub fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) | Err(_) => return,
            Ok(written) => bytes = &bytes[written..],
        }
    }
}

/// Opens `path` for reading.
///
/// # Errors
///
/// Those of `open`.
pub fn open_read(path: &CStr) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

    use super::{
        Errno, Exposed, JOURNAL_FILE, identity, is_character_device, is_data, is_for_copy,
        learn_error, open_error, parse_journal, programs_error, read_whole,
    };

    /// Goal: a message goes to a standard error that is a file from the start, and where nothing was learnt; not into a
    /// file that has got its number since, unless that is for appending.
    #[test]
    fn a_file_of_data_gets_no_message() {
        let folder = std::env::current_exe().unwrap();
        let path = |name: &str| folder.with_extension(format!("{name}-{}", std::process::id()));
        let [log, data] = ["log", "data"].map(path);
        let is_good = crate::testing::in_child(|| {
            let take = |file: &std::fs::File| rustix::stdio::dup2_stderr(file).is_ok();
            // A second look is one at the same file, opened once more.
            let is_refused = || {
                let error = std::io::stderr();
                let flags = rustix::fs::fcntl_getfl(&error).unwrap();
                let appends = || flags.contains(rustix::fs::OFlags::APPEND);
                let is_refused = is_data(error.as_fd(), appends);
                assert_eq!(open_error().err(), is_refused.then_some(Errno::BADF));
                is_refused
            };
            let first = std::fs::File::create(&log).unwrap();
            let other = std::fs::File::create(&data).unwrap();
            let appended = std::fs::File::options().append(true).open(&data).unwrap();
            let before = take(&other) && !is_refused() && take(&first);
            learn_error();
            let same = !is_refused();
            before && same && take(&other) && is_refused() && take(&appended) && !is_refused()
        });
        [log, data].iter().for_each(|path| std::fs::remove_file(path).unwrap());
        assert!(is_good);
    }

    /// Goal: of sockets only the journal's has a copy, and nothing is asked of the socket. Method: another socket.
    #[test]
    fn the_journals_socket_is_known_by_its_numbers() {
        assert_eq!(parse_journal("9:71234"), Some([9, 71234]));
        assert_eq!(["", "9", "9:", "x:1", "9:1:1"].map(parse_journal), [None; 5]);
        let (journal, other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(crate::testing::in_child(|| {
            JOURNAL_FILE.set(identity(journal.as_fd()).unwrap());
            let copied = [journal.as_fd(), other.as_fd()]
                .map(|socket| is_for_copy(&rustix::fs::fstat(socket).unwrap()));
            copied == [true, false]
        }));
    }

    /// Goal: the program's standard error can be had also after a `chroot` to where no `/proc` is; but not under a
    /// filter there, which may end the process.
    #[test]
    fn standard_error_is_found_without_proc() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: chroot is root's");
        }
        let folder = std::env::temp_dir().join(format!("zfolio-chroot-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let is_good = crate::testing::in_child(|| {
            rustix::process::chroot(&folder).unwrap();
            assert!(super::process::filters().is_none());
            // In a container that is filtered itself nothing else can be seen here.
            let before = programs_error().err();
            let as_before = [None, Some(Errno::PERM)].contains(&before);
            crate::testing::forbid_calls(&[libc::SYS_acct], Errno::PERM).unwrap();
            as_before && programs_error().err() == Some(Errno::PERM)
        });
        std::fs::remove_dir(&folder).unwrap();
        assert!(is_good);
    }

    /// Goal: a device whose driver may want an address is known; `/dev/zero`, which is like a file of zeros, is none.
    #[test]
    fn devices_of_memory_have_no_driver() {
        let is_device =
            |path| std::fs::File::open(path).map(|device| is_character_device(device.as_raw_fd()));
        assert!(!is_device("/dev/zero").unwrap() && !is_device("/proc/self/status").unwrap());
        // /dev/ptmx has one.
        assert!(is_device("/dev/ptmx").unwrap_or(true) && !is_character_device(-1));
    }

    /// Goal: nobody else's file is closed. Method: another file is put under the number of one before that is dropped.
    #[test]
    fn an_exposed_file_is_closed_only_if_it_is_still_the_same() {
        let open = |path| -> OwnedFd { std::fs::File::open(path).unwrap().into() };
        let (exposed, other) = (Exposed::from(open("/proc/self/status")), open("/proc/self/stat"));
        let number = exposed.as_fd().as_raw_fd();
        assert!(exposed.is_same());
        // SAFETY: the number is that of `exposed`, which expects this.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        assert!(!exposed.is_same());
        drop(exposed);
        // SAFETY: the copy that was just made, which nobody else has.
        let copy = unsafe { OwnedFd::from_raw_fd(number) };
        assert_eq!(identity(copy.as_fd()), identity(other.as_fd()));
    }

    #[test]
    fn a_whole_file_is_read_up_to_a_length() {
        let path = std::env::temp_dir().join(format!("zfolio-files-{}", std::process::id()));
        let name = path.to_str().unwrap();
        std::fs::write(&path, [7; 1000]).unwrap();
        assert_eq!(read_whole(name, 1000).unwrap(), [7; 1000]);
        assert_eq!(read_whole(name, 999), Err(Errno::FBIG));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read_whole(name, 1000), Err(Errno::NOENT));
    }
}
