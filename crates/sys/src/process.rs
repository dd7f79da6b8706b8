//! What the kernel says about this process.

use rustix::io::Errno;

use crate::map::PAGE_BYTES;

/// Bytes of memory that this process has resident, as the kernel counts them (about 2 us).
///
/// They are read from the calling thread's entry in `/proc`, since the thread that started the
/// process may have ended.
///
/// The kernel counts per CPU and adds up only now and then, so the number may be off by 64 pages
/// per CPU. `None` if `/proc` is not mounted, or if the process may not open files.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    let mut text = [0_u8; 128];
    let length = crate::files::read_small(c"/proc/thread-self/statm", &mut text).ok()?;
    let second = text[..length].split(|byte| *byte == b' ').nth(1)?;
    let pages: u64 = std::str::from_utf8(second).ok()?.parse().ok()?;
    Some(pages * PAGE_BYTES as u64)
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

/// Whether a tracer is attached. False if `/proc` is not mounted.
#[must_use]
pub fn is_traced() -> bool {
    let mut text = [0_u8; 1024];
    let length = crate::files::read_small(c"/proc/self/status", &mut text).unwrap_or(0);
    let mut lines = text[..length].split(|byte| *byte == b'\n');
    let tracer = lines.find_map(|line| line.strip_prefix(b"TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim_ascii() != b"0")
}

/// Whether a sandbox (seccomp) that the program set up forbids this thread to open files. The
/// kernel itself never answers `EPERM` to a process that opens its own entry in `/proc`.
#[must_use]
pub fn is_confined() -> bool {
    crate::files::open_read(c"/proc/thread-self/statm").is_err_and(|error| error == Errno::PERM)
}

/// Whether system calls of this thread are filtered (seccomp), so that one that nobody expects may end the process.
#[must_use]
pub fn is_filtered() -> bool {
    let mut status = [0_u8; 4096];
    let length = crate::files::read_small(c"/proc/thread-self/status", &mut status).unwrap_or(0);
    let mut lines = status[..length].split(|byte| *byte == b'\n');
    let mode = lines.find_map(|line| line.strip_prefix(b"Seccomp:"));
    mode.is_none_or(|mode| mode.trim_ascii() != b"0")
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

/// Ends the process at once, without running any handler.
pub fn abort_now(status: i32) -> ! {
    // SAFETY: exit_group never returns and touches no memory of ours.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_tells_about_us() {
        assert!(super::resident_bytes().unwrap_or(0) > 100 << 10);
        assert!(super::start_ticks() > 0 && !super::is_confined());
        assert_eq!(super::id(), std::process::id());
    }
}
