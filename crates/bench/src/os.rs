//! The system calls of the comparison that the standard library does not offer.
//!
//! # Invariants
//!
//! - `OS-1` The signal handler accesses only atomics.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Instant;

/// The signal that requested a stop, or 0.
static STOP: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_stop(signal: libc::c_int) {
    // Relaxed: the flag is polled, and publishes no other data.
    STOP.store(signal, Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP are recorded instead of ending the process, so that all
/// changes can be undone. Programs started by this process get the default behaviour: `exec` resets
/// it.
pub(crate) fn catch_stop_signals() {
    let handler = note_stop as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: a zeroed sigaction is a valid one: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as libc::sighandler_t;
        // SAFETY: the handler is async-signal-safe by OS-1; the old action is not requested.
        let status = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        assert_eq!(status, 0, "these signals can be caught");
    }
}

/// The signal that requested a stop, if one came.
pub(crate) fn stop_signal() -> Option<i32> {
    Some(STOP.load(Relaxed)).filter(|signal| *signal != 0)
}

fn checked(status: libc::c_int) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_encoded_bytes())?)
}

/// Uses `device` as swap space, with the highest priority.
pub(crate) fn swapon(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SWAP_FLAG_PREFER, with the highest possible priority.
    let flags = 0x8000 | 0x7fff;
    // SAFETY: the path is a C string that outlives the call.
    checked(unsafe { libc::swapon(device.as_ptr(), flags) })
}

/// Stops using `device` as swap space; its contents are brought back into memory.
pub(crate) fn swapoff(device: &Path) -> io::Result<()> {
    let device = c_path(device)?;
    // SAFETY: the path is a C string that outlives the call.
    checked(unsafe { libc::swapoff(device.as_ptr()) })
}

/// Gives an open file all blocks of its first `bytes`.
pub(crate) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let bytes = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: a system call without pointers; the descriptor is open as long as `file` is borrowed.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) })
}

/// Locks the file, or fails with `WouldBlock` if another process has locked it. Closing the file
/// unlocks it.
pub(crate) fn lock(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed; no memory is passed.
    checked(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) })
}

/// CPU time of all children that have ended and were waited for, in nanoseconds.
pub(crate) fn children_cpu_ns() -> u64 {
    // SAFETY: a zeroed rusage is valid: it holds only integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for the write.
    let status = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    assert_eq!(status, 0, "getrusage(RUSAGE_CHILDREN) cannot fail");
    [usage.ru_utime, usage.ru_stime]
        .iter()
        .map(|time| {
            let (seconds, micros) = (time.tv_sec.unsigned_abs(), time.tv_usec.unsigned_abs());
            seconds * 1_000_000_000 + micros * 1000
        })
        .sum()
}

/// The time now. Only differences are used.
#[expect(clippy::disallowed_methods, reason = "real programs run in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Sends `signal` to a process that this process started.
pub(crate) fn signal(pid: u32, signal: i32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    assert!(pid > 0, "0 and -1 would name more than one process");
    // SAFETY: a system call without pointers.
    checked(unsafe { libc::kill(pid, signal) })
}

/// Makes the program of `command` die with this process. With `group`, an open `cgroup.procs`, the
/// program starts in that cgroup.
pub(crate) fn tie(command: &mut Command, group: Option<File>) {
    let parent = std::process::id();
    let before_exec = move || {
        // SAFETY: a system call without pointers.
        checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        if std::os::unix::process::parent_id() != parent {
            // This process was killed before the child made its request.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let Some(group) = &group else { return Ok(()) };
        // "0" means the process that writes it.
        // SAFETY: one byte of a static string is read; the descriptor is open.
        let written = unsafe { libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) };
        if written == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec only system calls are made: no allocation, no lock.
    unsafe { command.pre_exec(before_exec) };
}
