//! Errors that the process cannot survive: it is stopped with a message, and never gets wrong data.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use zfolio_core::store;
use zfolio_core::swap::disk;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::{Errno, files, process};

use crate::charge::OverLimit;
use crate::spill::SpillDisk;

/// A line of text built without an allocation.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
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
pub fn print(message: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], length: 0 };
    line.write_fmt(format_args!("zfolio: {message}\n")).ok();
    files::tell_program(std::str::from_utf8(&line.bytes[..line.length]).unwrap_or("zfolio: ?\n"));
}

/// Prints one line on standard error, from a thread that shares the program's table of files. It
/// needs no permission.
pub fn print_here(message: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], length: 0 };
    line.write_fmt(format_args!("zfolio: {message}\n")).ok();
    files::tell_here(&line.bytes[..line.length]);
}

/// Handles a panic of zfolio inside a program: prints one line and ends the process. The standard
/// hook would print a backtrace, and map and unmap files for that, which takes locks that this
/// thread may hold.
pub fn defect(defect: &std::panic::PanicHookInfo<'_>) -> ! {
    let payload = defect.payload();
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let message = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    match defect.location() {
        Some(place) => print(format_args!("a defect in zfolio: {} ({place})", OneLine(message))),
        None => print(format_args!("a defect in zfolio: {}", OneLine(message))),
    }
    process::abort_now(STATUS)
}

/// A message that may have several lines, as those of `assert_eq!` have, as one.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, line) in self.0.lines().enumerate() {
            f.write_str(if number == 0 { "" } else { "; " })?;
            f.write_str(line.trim())?;
        }
        Ok(())
    }
}

/// A thread that serves others and panics would leave threads waiting for ever, or locks held: the process ends when
/// the thread drops this.
pub(crate) struct NoUnwind;

impl Drop for NoUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_here(format_args!("a thread of the pager panicked: stopped"));
            std::process::abort();
        }
    }
}

/// A stored unit is lost. `disk` is where it was, if that is known and it was on one.
pub(crate) fn corrupt(
    address: usize,
    bytes: usize,
    disk: Option<&SpillDisk>,
    error: store::Error,
) -> ! {
    match error {
        // The disk has answered: other bytes than were written, or none beyond the end of the file.
        store::Error::Unreadable { is_transient: false, .. } => {
            lost(address, bytes, format_args!("{}", Changed(disk)))
        }
        error => lost(address, bytes, format_args!("{error}")),
    }
}

/// A stored unit cannot be read: the disk has failed so many times in so many nanoseconds, and longer than somebody
/// waits for it.
pub(crate) fn unreadable(
    address: usize,
    bytes: usize,
    disk: Option<&SpillDisk>,
    (tries, waited_ns): (u32, u64),
) -> ! {
    lost(address, bytes, format_args!("{}", Failed { disk, tries, waited_ns }))
}

/// Bytes of a path that a message has room for: what follows from it is said after the path.
const PATH_BYTES_MAX: usize = 200;

/// Where a unit was to be read from, if that is known.
struct Origin<'a>(Option<&'a Path>);

impl<'a> Origin<'a> {
    fn of(disk: Option<&'a SpillDisk>) -> Origin<'a> {
        Origin(disk.map(|disk| disk.medium().path()))
    }
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(path) = self.0 else { return Ok(()) };
        let bytes = path.as_os_str().as_encoded_bytes();
        let shown = &bytes[..bytes.len().min(PATH_BYTES_MAX)];
        f.write_str(" from '")?;
        for chunk in shown.utf8_chunks() {
            f.write_str(chunk.valid())?;
            f.write_str(if chunk.invalid().is_empty() { "" } else { "?" })?;
        }
        f.write_str(if shown.len() < bytes.len() { "..'" } else { "'" })
    }
}

/// The disk holds something else than was written there.
struct Changed<'a>(Option<&'a SpillDisk>);

impl fmt::Display for Changed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = Origin::of(self.0);
        write!(
            f,
            "cannot be read{from}: what is there is not what was written (changed or cut off)"
        )
    }
}

/// The disk has failed.
struct Failed<'a> {
    disk: Option<&'a SpillDisk>,
    tries: u32,
    waited_ns: u64,
}

impl fmt::Display for Failed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, tries) = (Origin::of(self.disk), self.tries);
        let seconds = self.waited_ns / 1_000_000_000;
        write!(f, "cannot be read{from}: the disk has failed {tries} times in {seconds} s")?;
        match self.disk.and_then(SpillDisk::read_error) {
            Some(disk::Error::Failed { errno }) if errno != 0 => {
                write!(f, " ({})", ErrnoText(Errno::from_raw_os_error(errno)))
            }
            Some(error) => write!(f, " ({error})"),
            None => Ok(()),
        }
    }
}

fn lost(address: usize, bytes: usize, why: fmt::Arguments<'_>) -> ! {
    print(format_args!(
        "the unit of {bytes} bytes at {address:#x} {why}; the process is stopped, so that it gets no wrong data"
    ));
    process::abort_now(STATUS)
}

/// The system gives no page for a fault that must be served: it has none left, or a sandbox forbids to ask.
pub(crate) fn out_of_memory(address: usize, error: Errno) -> ! {
    if is_forbidden(error) {
        forbidden(IOCTL, error);
    }
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
            "{IOCTL}: {} (a seccomp filter of the program?): the limit is not held",
            ErrnoText(error)
        ));
    }
}

/// The calls on a userfaultfd, in messages.
pub(crate) const IOCTL: &str = "userfaultfd's ioctl";

/// A sandbox forbids a `call` without which compressed memory cannot come back, or would come back with wrong bytes.
#[cold]
pub(crate) fn forbidden(call: &str, error: Errno) -> ! {
    print(format_args!(
        "{call}: {}; a seccomp filter of the program forbids it, and compressed memory cannot come back: \
         stopped",
        ErrnoText(error)
    ));
    process::abort_now(STATUS)
}

/// `--strict`: the limit cannot be held.
pub(crate) fn over_limit(over: &OverLimit) -> ! {
    let limit = if over.is_share { "its share of the limit" } else { "the limit" };
    // In whole MiB: size::display allocates, and this thread may be in a signal handler.
    print(format_args!(
        "{} MiB are needed and {limit} is {} MiB: stopped, as --strict asks (exit status {STATUS_OVER_LIMIT})",
        over.charged_bytes.div_ceil(1 << 20),
        over.limit_bytes >> 20,
    ));
    process::abort_now(STATUS_OVER_LIMIT)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::{Changed, Failed, Origin, PATH_BYTES_MAX};

    #[test]
    fn a_path_leaves_room_for_what_follows() {
        let text =
            |path: &[u8]| Origin(Some(Path::new(std::ffi::OsStr::from_bytes(path)))).to_string();
        assert_eq!(text(b"/var/tmp"), " from '/var/tmp'");
        assert_eq!(text(b"/odd\xFF/x"), " from '/odd?/x'");
        let long = text("/\u{e9}".repeat(500).as_bytes());
        assert!(long.len() <= PATH_BYTES_MAX + " from '..'".len(), "{long}");
        assert!(long.ends_with("..'"), "{long}");
    }

    #[test]
    fn a_message_without_a_place_is_whole() {
        let changed = "cannot be read: what is there is not what was written (changed or cut off)";
        assert_eq!(Changed(None).to_string(), changed);
        let failed = Failed { disk: None, tries: 20, waited_ns: 10_023_000_000 };
        assert_eq!(failed.to_string(), "cannot be read: the disk has failed 20 times in 10 s");
    }
}
