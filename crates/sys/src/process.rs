//! What the kernel says about this process.

use std::ffi::CStr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use rustix::time::Timespec;

use crate::map::PAGE_BYTES;

/// What this process has resident, by kind. The kernel counts per CPU and adds up only now and then,
/// so each number may be off by 64 pages per CPU.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Resident {
    /// Anonymous memory, and shared memory (`memfd`, tmpfs, System V): only swap could free it.
    pub memory_bytes: u64,
    /// Pages of files: code, libraries, mapped data. The kernel can free them: it writes back what is
    /// dirty, and reads them again when they are touched.
    pub file_bytes: u64,
}

/// Reads what this process has resident.
#[derive(Default, Debug)]
pub struct ResidentMeter {
    /// Shared memory at the last look, and pages of files and shared memory together at that time.
    shared_memory: AtomicU64,
    looked_at: AtomicU64,
}

/// A change of file pages and shared memory together that is worth another look at each.
const LOOK_BYTES: u64 = 1 << 20;

impl ResidentMeter {
    /// Nothing was looked at yet.
    #[must_use]
    pub const fn new() -> ResidentMeter {
        ResidentMeter { shared_memory: AtomicU64::new(0), looked_at: AtomicU64::new(0) }
    }

    /// Reads the sizes (2 us).
    ///
    /// `statm` counts shared memory and pages of files together. `status` separates them, but takes
    /// 30 us to read, so it is read only once the sum has changed by 1 MiB.
    ///
    /// They are read from the calling thread's entry in `/proc`, since the thread that started the
    /// process may have ended. `None` if `/proc` is not mounted, or if the process may not open files.
    pub fn read(&self) -> Option<Resident> {
        let mut text = [0_u8; 128];
        let length = crate::files::read_small(c"/proc/thread-self/statm", &mut text).ok()?;
        let mut words = text[..length].split(|byte| *byte == b' ').skip(1);
        let mut pages = || std::str::from_utf8(words.next()?).ok()?.parse::<u64>().ok();
        let (all, shared) = (pages()? * PAGE_BYTES as u64, pages()? * PAGE_BYTES as u64);
        if shared.abs_diff(self.looked_at.load(Relaxed)) >= LOOK_BYTES {
            // Where it cannot be read now, the last look counts, and the next call looks again.
            if let Some(memory) = shared_memory() {
                self.shared_memory.store(memory, Relaxed);
                self.looked_at.store(shared, Relaxed);
            }
        }
        let file_bytes = shared.saturating_sub(self.shared_memory.load(Relaxed));
        Some(Resident { memory_bytes: all.saturating_sub(file_bytes), file_bytes })
    }
}

/// Shared memory that this process has resident.
fn shared_memory() -> Option<u64> {
    // The line is the 23rd of some 60, below 1 KiB; the names of groups may make it longer.
    let mut text = [0_u8; 4096];
    let length = crate::files::read_small(c"/proc/thread-self/status", &mut text).ok()?;
    let mut lines = text[..length].split(|byte| *byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(b"RssShmem:"))?;
    let number = std::str::from_utf8(line).ok()?.trim().strip_suffix("kB")?.trim();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// When this process started: field 22 of `/proc/self/stat`, in clock ticks. 0 if it cannot be
/// read.
#[must_use]
pub fn start_ticks() -> u64 {
    let mut text = [0_u8; 512];
    let Ok(length) = crate::files::read_small(c"/proc/self/stat", &mut text) else { return 0 };
    let Some(end) = text[..length].iter().rposition(|byte| *byte == b')') else { return 0 };
    let field = text[end + 2..length].split(|byte| *byte == b' ').nth(22 - 3);
    field.and_then(|field| std::str::from_utf8(field).ok()?.parse().ok()).unwrap_or(0)
}

/// The number of this process's PID namespace; 0 if `/proc` does not say.
#[must_use]
pub fn pid_namespace() -> u32 {
    // The link reads "pid:[4026531836]".
    let Ok(link) = rustix::fs::readlink(c"/proc/self/ns/pid", Vec::new()) else { return 0 };
    let text = link.to_str().unwrap_or("");
    let number = text.strip_prefix("pid:[").and_then(|rest| rest.strip_suffix(']'));
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Whether this is the number of another PID namespace than this process's, in which process ids mean something else.
/// 0 is of none.
#[must_use]
pub fn is_other_namespace(number: u32) -> bool {
    number != 0 && number != pid_namespace()
}

/// Whether this process is the first of its session, as what a terminal was opened for.
#[must_use]
pub fn leads_session() -> bool {
    use rustix::process::{getpid, getsid};
    getsid(None).is_ok_and(|session| session == getpid())
}

/// Whether two processes have one address space; false if nobody can say (`kcmp` is not there, or refused).
#[must_use]
pub fn share_memory(one: u32, other: u32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0_usize, 0_usize) == 0 }
}

/// Keeps all memory of this process from being swapped out, from the first access to each page on: what it has, and
/// what it will have.
///
/// # Errors
///
/// `PERM`: the process needs `CAP_IPC_LOCK`. With a mere limit (`RLIMIT_MEMLOCK`) it would get no more memory once it
/// has locked so much.
pub fn lock_memory() -> Result<(), Errno> {
    const CAP_IPC_LOCK: u32 = 14;
    if !has_capability(CAP_IPC_LOCK) {
        return Err(Errno::PERM);
    }
    let flags = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: it changes no contents.
    let answer = unsafe { libc::mlockall(flags) };
    let error = || Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOMEM);
    if answer == 0 { Ok(()) } else { Err(error()) }
}

/// Whether this thread has a capability, by its number. False if `/proc` is not mounted.
fn has_capability(number: u32) -> bool {
    let effective = number_of(STATUS, b"CapEff:", 16);
    effective.is_some_and(|set| set >> number & 1 == 1)
}

/// What the kernel says about the calling thread.
const STATUS: &CStr = c"/proc/thread-self/status";

/// The most bytes of a name and a number in a file of `/proc`.
const LINE_BYTES_MAX: usize = 64;

/// The number in the line of a file in `/proc` that begins with `name`, however long the file is: a thread may be in
/// 65536 groups, which are named in one line. Nothing is allocated. `None` if that cannot be read.
pub(crate) fn number_of(path: &CStr, name: &[u8], radix: u32) -> Option<u64> {
    number_in(crate::files::open_read(path).ok()?.as_fd(), name, radix)
}

/// The same of an open file.
fn number_in(file: BorrowedFd<'_>, name: &[u8], radix: u32) -> Option<u64> {
    let mut text = [0_u8; 4096];
    // Bytes in `text` that were read before: what may be the beginning of the line.
    let mut kept = 0;
    loop {
        let more = match rustix::io::read(file, &mut text[kept..]) {
            Err(Errno::INTR) => continue,
            more => more.ok()?,
        };
        let length = kept + more;
        let mut lines = text[..length].split(|byte| *byte == b'\n');
        // What follows the last end of a line has more bytes to come, unless this is the end of the file.
        let last = if more > 0 { lines.next_back() } else { None }.unwrap_or_default().len();
        if let Some(number) = lines.find_map(|line| line.strip_prefix(name)) {
            let number = std::str::from_utf8(number.trim_ascii()).ok()?;
            return u64::from_str_radix(number, radix).ok();
        }
        if more == 0 {
            return None;
        }
        if last <= LINE_BYTES_MAX {
            text.copy_within(length - last..length, 0);
            kept = last;
        } else {
            // The rest of a longer line: no name begins there.
            (text[0], kept) = (b' ', 1);
        }
    }
}

/// Tells the kernel that the calling thread serves a block device: memory that the kernel allocates for it is not freed
/// by writing to disks, which could wait for this very thread.
///
/// # Errors
///
/// `PERM`: it needs `CAP_SYS_RESOURCE`.
pub fn serve_disk() -> Result<(), Errno> {
    rustix::process::configure_io_flusher_behavior(true)
}

/// Whether there is a process of this id in this PID namespace. One that has ended, and was not waited for, is there.
#[must_use]
pub fn exists(id: u64) -> bool {
    let id = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw);
    // Not by /proc, which may be missing, or hide processes of other users.
    id.is_some_and(|id| rustix::process::test_kill_process(id) != Err(Errno::SRCH))
}

/// Whether a tracer is attached. False if `/proc` is not mounted.
#[must_use]
pub fn is_traced() -> bool {
    let mut text = [0_u8; 1024];
    let length = crate::files::read_small(c"/proc/self/status", &mut text).unwrap_or(0);
    let mut lines = text[..length].split(|byte| *byte == b'\n');
    let tracer = lines.find_map(|line| line.strip_prefix(b"TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim_ascii() != b"0")
}

/// Whether a sandbox (seccomp) that the program set up forbids this thread to open files, and so may answer other calls
/// by a signal. The kernel itself never answers `PERM` to a process that opens its own entry in `/proc`. `ACCESS` is
/// also the answer of Landlock and its like, which do nothing but refuse.
#[must_use]
pub fn is_confined() -> bool {
    let opened = crate::files::open_read(c"/proc/thread-self/statm");
    opened.is_err_and(|error| match error {
        Errno::PERM => true,
        Errno::ACCESS | Errno::NOSYS => has_seccomp(),
        _ => false,
    })
}

/// Whether this thread is under seccomp, also where no file can be opened. Only for threads to which that has happened:
/// a filter may end the process for this call too, and few do.
fn has_seccomp() -> bool {
    // SAFETY: it takes a number, and changes nothing. A filter that refuses it is one.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP) != 0 }
}

/// Whether system calls of this thread are filtered (seccomp), so that one that nobody expects may end the process.
#[must_use]
pub fn is_filtered() -> bool {
    match crate::files::open_read(STATUS) {
        Ok(status) => filters_in(status.as_fd()) != Some(0),
        // The program has lost sight of /proc (`chroot`): hardly any filter answers so.
        Err(Errno::NOENT) => has_seccomp(),
        Err(_) => true,
    }
}

/// How many filters (seccomp) the system calls of this thread go through; `None` if that cannot be read. None of them
/// can be taken away.
#[must_use]
pub fn filters() -> Option<u32> {
    filters_in(crate::files::open_read(STATUS).ok()?.as_fd())
}

/// The same of a thread whose `status` in `/proc` is open.
fn filters_in(status: BorrowedFd<'_>) -> Option<u32> {
    u32::try_from(number_in(status, b"Seccomp_filters:", 10)?).ok()
}

/// This process's name, as in `/proc/PID/comm`; `?` if that cannot be read.
#[must_use]
pub fn command() -> String {
    let mut name = [0_u8; 64];
    let length = crate::files::read_small(c"/proc/self/comm", &mut name).unwrap_or(0);
    std::str::from_utf8(&name[..length]).map_or("?", str::trim_end).to_owned()
}

/// The id of this process.
#[must_use]
pub fn id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

/// A handle of the process that listens at the other end of a connection through a Unix socket, for
/// [`has_ended`]. It is that process's if something comes through the connection, or through another one to the same
/// process, afterwards. `None`: the process is another user's, in another PID namespace, or has ended; or the kernel
/// has no such handles (before Linux 5.3).
#[must_use]
pub fn of_peer(connection: BorrowedFd<'_>) -> Option<OwnedFd> {
    let id = i32::try_from(crate::custody::peer(connection)?).ok()?;
    rustix::process::pidfd_open(Pid::from_raw(id)?, PidfdFlags::empty()).ok()
}

/// Whether a process has ended: its memory is free, and its files are closed. It need not have been waited for.
#[must_use]
pub fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut looked = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    rustix::event::poll(&mut looked, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Leaves the terminal and its session, so that neither ends this process.
///
/// # Errors
///
/// `PERM`: the process leads its process group.
pub fn leave_session() -> Result<(), Errno> {
    rustix::process::setsid().map(|_| ())
}

/// Ends the process at once, without running any handler.
pub fn abort_now(status: i32) -> ! {
    // SAFETY: exit_group never returns and touches no memory of ours.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::{ResidentMeter, exists, filters, has_capability, has_ended, number_of, of_peer};
    use std::ffi::CString;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt as _;

    /// Goal: a process is there until it was waited for, and none that never was.
    #[test]
    fn a_process_is_there_until_it_was_waited_for() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = child.id().into();
        assert!(exists(id) && exists(1) && exists(super::id().into()));
        child.wait().unwrap();
        assert!(!exists(id) && !exists(0) && !exists(1 << 40));
    }

    /// Goal: the end of the process at the other end of a socket is noticed before anybody has waited for it, and not
    /// before it has come. Method: a child that has an end of a pair of sockets for its input, which it was given; the
    /// number of the other end is that of whoever made them.
    #[test]
    fn the_end_of_the_other_process_is_noticed() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = of_peer(ours.as_fd()).expect("this process");
        assert!(!has_ended(own.as_fd()));
        let mut child = std::process::Command::new("cat")
            .stdin(std::os::fd::OwnedFd::from(theirs))
            .spawn()
            .unwrap();
        let id = rustix::process::Pid::from_child(&child);
        let handle = rustix::process::pidfd_open(id, rustix::process::PidfdFlags::empty()).unwrap();
        assert!(!has_ended(handle.as_fd()));
        drop(ours);
        while !has_ended(handle.as_fd()) {
            std::thread::yield_now();
        }
        assert!(exists(child.id().into()), "nobody has waited for it");
        child.wait().unwrap();
        assert!(of_peer(std::fs::File::open("/dev/null").unwrap().as_fd()).is_none());
    }

    /// Goal: a line is found wherever it is, also behind a long one, and only from its beginning on. Method: files in
    /// which it crosses the end of each piece that is read.
    #[test]
    fn a_line_is_found_behind_any_number_of_groups() {
        let path = std::env::temp_dir().join(format!("zfolio-status-{}", super::id()));
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        let number = |text: &str, name: &[u8], radix| {
            std::fs::write(&path, text).unwrap();
            number_of(&CString::new(path.as_os_str().as_bytes()).unwrap(), name, radix)
        };
        for groups in (0..20).chain(3950..4150).chain(8000..8200) {
            let groups = "7".repeat(groups);
            let text = format!("Name:\tx\nGroups:\t{groups}Here:9 \nCap:\t00ff\nFilters:\t12\n");
            assert_eq!(number(&text, b"Filters:", 10), Some(12), "{}", groups.len());
            assert_eq!(number(text.trim_end(), b"Filters:", 10), Some(12), "{}", groups.len());
            assert_eq!(number(&text, b"Cap:", 16), Some(255), "{}", groups.len());
            assert_eq!(number(&text, b"Here:", 10), None, "{}", groups.len());
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(number_of(&name, b"Filters:", 10), None);
    }

    /// Goal: how this thread is filtered, and what it may do, is read also if it is in many groups.
    #[test]
    fn many_groups_hide_nothing() {
        assert!(crate::testing::in_child(|| {
            let before = (filters(), has_capability(6));
            let groups: Vec<libc::gid_t> = (1_000_000..1_002_000).collect();
            // SAFETY: so many numbers are there.
            let answer = unsafe { libc::setgroups(groups.len(), groups.as_ptr()) };
            // CAP_SETGID is number 6; without it there is nothing to see.
            (answer == 0) == before.1
                && before.0.is_some()
                && (filters(), has_capability(6)) == before
        }));
    }

    /// 8 MiB of a file in memory (shared memory), and of one on disk, each page touched; in a process of its own, in
    /// which no other test touches memory.
    #[test]
    fn shared_memory_is_memory_and_a_file_is_not() {
        assert!(crate::testing::in_child(|| {
            map_both_files();
            true
        }));
    }

    fn map_both_files() {
        const BYTES: usize = 8 << 20;
        let meter = ResidentMeter::new();
        let map = |file: std::os::fd::BorrowedFd<'_>| {
            let (read, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
            // SAFETY: a new mapping, at a place of the kernel's choice.
            let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES, read, flags, file, 0) };
            let at = at.unwrap();
            crate::map::populate_read(at as usize, BYTES).unwrap();
            at
        };
        let before = meter.read().unwrap();
        let memory = rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&memory, &vec![1; BYTES], 0).unwrap();
        let shared = map(memory.as_fd());
        let with_shared = meter.read().unwrap();
        // In the folder of the build: /tmp may be kept in memory.
        let path = std::env::current_exe().unwrap().with_extension(format!("{}", super::id()));
        std::fs::write(&path, vec![1; BYTES]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mapped = map(file.as_fd());
        let with_both = meter.read().unwrap();
        for at in [shared, mapped] {
            // SAFETY: nobody uses this mapping.
            unsafe { rustix::mm::munmap(at, BYTES) }.unwrap();
        }
        // Buffers and the process's own files are touched too, so it is about halves.
        let half = BYTES as u64 / 2;
        let grown = |after: u64, before: u64| after.saturating_sub(before) > half;
        assert!(grown(with_shared.memory_bytes, before.memory_bytes), "{before:?} {with_shared:?}");
        assert!(!grown(with_shared.file_bytes, before.file_bytes), "{before:?} {with_shared:?}");
        assert!(
            grown(with_both.file_bytes, with_shared.file_bytes),
            "{with_shared:?} {with_both:?}"
        );
    }

    /// Goal: who may open no file because of Landlock is not taken for one under a filter: the limit is held.
    #[test]
    fn landlock_is_no_filter() {
        assert!(crate::testing::in_child(|| {
            let before = super::is_confined();
            // One word: the rights that need a rule. LANDLOCK_ACCESS_FS_READ_FILE is 4.
            let handled = 4_u64;
            let rules = [&raw const handled as usize, size_of_val(&handled), 0];
            // SAFETY: it reads the word.
            let rules = unsafe {
                libc::syscall(libc::SYS_landlock_create_ruleset, rules[0], rules[1], rules[2])
            };
            if rules < 0 {
                eprintln!("SKIPPED: no Landlock here");
                return true;
            }
            // SAFETY: it takes numbers only.
            let alone = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            // SAFETY: the same; the kernel reads no memory for it.
            let confined = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules, 0) };
            let opened = crate::files::open_read(c"/proc/thread-self/statm");
            assert_eq!((alone, confined, opened.err()), (0, 0, Some(rustix::io::Errno::ACCESS)));
            !before && super::is_confined() == super::has_seccomp()
        }));
    }

    #[test]
    fn the_kernel_tells_about_us() {
        let resident = ResidentMeter::new().read().unwrap();
        assert!(resident.memory_bytes > 50 << 10 && resident.file_bytes > 50 << 10);
        assert!(super::start_ticks() > 0 && !super::is_confined());
        assert!(super::filters().is_some());
        assert_eq!(super::id(), std::process::id());
        assert!(super::pid_namespace() > 0 && super::exists(u64::from(super::id())));
    }
}
