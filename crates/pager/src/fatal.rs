//! Errors that the process cannot survive: it is stopped with a message, and never gets wrong data.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use zfolio_core::store;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::{Errno, files, process};

/// A line of text built without an allocation.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.length..];
        let kept = text.len().min(room.len());
        room[..kept].copy_from_slice(&text.as_bytes()[..kept]);
        self.length += kept;
        Ok(())
    }
}

/// Exit status of a process that zfolio had to stop.
pub const STATUS: i32 = 125;

/// Exit status of a process that `--strict` stopped. The numbers above it are in use: 123 by
/// `xargs`, 124 by `timeout`, 125 to 127 by commands that start programs.
pub const STATUS_OVER_LIMIT: i32 = 122;

/// Prints one line on the program's standard error.
pub fn print(message: std::fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], length: 0 };
    line.write_fmt(format_args!("zfolio: {message}\n")).ok();
    files::tell_program(std::str::from_utf8(&line.bytes[..line.length]).unwrap_or("zfolio: ?\n"));
}

/// Prints one line on standard error, from a thread that shares the program's table of files. It
/// needs no permission.
pub fn print_here(message: std::fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], length: 0 };
    line.write_fmt(format_args!("zfolio: {message}\n")).ok();
    files::tell_here(&line.bytes[..line.length]);
}

/// Handles a panic of zfolio inside a program: prints one line and ends the process. The standard
/// hook would print a backtrace, and map and unmap files for that, which takes locks that this
/// thread may hold.
pub fn defect(defect: &std::panic::PanicHookInfo<'_>) -> ! {
    print(format_args!("a defect in zfolio: {defect}"));
    process::abort_now(STATUS)
}

/// A stored unit is lost.
pub(crate) fn corrupt(address: usize, bytes: usize, error: store::Error) -> ! {
    lost(address, bytes, format_args!("{error}"))
}

/// A stored unit cannot be read: the disk has failed so many times, and longer than somebody waits for it.
pub(crate) fn unreadable(address: usize, bytes: usize, tries: u32, waited_ns: u64) -> ! {
    let seconds = waited_ns / 1_000_000_000;
    lost(
        address,
        bytes,
        format_args!("cannot be read: the disk has failed {tries} times in {seconds} s"),
    )
}

fn lost(address: usize, bytes: usize, why: std::fmt::Arguments<'_>) -> ! {
    print(format_args!(
        "the unit of {bytes} bytes at {address:#x} {why}; the process is stopped, so that it gets no wrong data"
    ));
    process::abort_now(STATUS)
}

/// The system has no page left for a fault that must be served.
pub(crate) fn out_of_memory(address: usize, error: Errno) -> ! {
    print(format_args!("a fault at {address:#x} cannot be served: {}", ErrnoText(error)));
    process::abort_now(STATUS)
}

/// A table of the engine must grow, and the process may have no more address space.
pub fn out_of_address_space(bytes: usize) -> ! {
    print(format_args!(
        "no address space for {bytes} bytes of tables: RLIMIT_AS, RLIMIT_DATA or vm.max_map_count is reached"
    ));
    process::abort_now(STATUS)
}

/// Whether an error comes from a sandbox: the kernel itself does not return it here.
pub(crate) fn is_forbidden(error: Errno) -> bool {
    matches!(error, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

/// Memory could not be registered. If a sandbox of the program forbids it, this prints a line,
/// once. A program that uses the library gets the error instead.
pub(crate) fn print_if_forbidden(whole_process: bool, error: Errno) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    if whole_process && is_forbidden(error) && !PRINTED.swap(true, Relaxed) {
        print(format_args!(
            "userfaultfd's ioctl: {} (a seccomp filter of the program?): the limit is not held",
            ErrnoText(error)
        ));
    }
}

/// A sandbox forbids the userfaultfd, without which compressed memory cannot come back.
#[cold]
pub(crate) fn forbidden(error: Errno) -> ! {
    print(format_args!(
        "userfaultfd's ioctl: {}; a seccomp filter of the program forbids it, and compressed memory cannot \
         come back: stopped",
        ErrnoText(error)
    ));
    process::abort_now(STATUS)
}

/// `--strict`: the limit cannot be held.
pub(crate) fn over_limit(limit: u64, charge: u64) -> ! {
    // In whole MiB: size::display allocates, and this thread may be in a signal handler.
    print(format_args!(
        "{} MiB are needed and the limit is {} MiB: stopped, as --strict asks (exit status \
         {STATUS_OVER_LIMIT})",
        charge.div_ceil(1 << 20),
        limit >> 20,
    ));
    process::abort_now(STATUS_OVER_LIMIT)
}
