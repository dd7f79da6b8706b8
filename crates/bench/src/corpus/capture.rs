//! Reads the resident, anonymous, private pages of a process through `/proc`.
//!
//! `maps` has the ranges, `pagemap` says which pages are resident and private, and `mem` has their
//! contents. The process is not stopped. Pages that are swapped out are skipped: reading them would
//! swap them in.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use zfolio_core::page::PAGE_BYTES;

/// Bit of a `pagemap` entry: the page is in memory.
const PRESENT: u64 = 1 << 63;
/// Bit of a `pagemap` entry: the page belongs to a file, or is shared anonymous memory.
const FILE_OR_SHARED: u64 = 1 << 61;

/// Pages that are examined and read together: 1 MiB.
const RUN_PAGES: usize = 256;

/// Why a process could not be captured.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum CaptureError {
    /// There is no such process: the user must give another PID.
    Missing(u32),
    /// The process belongs to another user: only that user or root can read it.
    Foreign { pid: u32, owner: u32 },
    /// The kernel's rules (Yama, a sandbox, an undumpable process) forbid it.
    Forbidden { pid: u32, error: io::Error },
    /// The process has no memory of its own: it is a kernel thread, or is ending.
    NoMemory(u32),
    /// The process ended, or the system returned an error.
    Read { pid: u32, error: io::Error },
    /// The corpus could not be written.
    Write(io::Error),
}

impl CaptureError {
    /// ESRCH from an open folder in /proc means that the process has no memory.
    fn of_read(pid: u32, error: io::Error) -> CaptureError {
        match error.raw_os_error() {
            Some(libc::ESRCH) => CaptureError::NoMemory(pid),
            _ => CaptureError::Read { pid, error },
        }
    }

    /// Whether another argument or another user would help.
    pub(crate) fn is_refusal(&self) -> bool {
        !matches!(self, CaptureError::Read { .. } | CaptureError::Write(_))
    }
}

impl fmt::Display for CaptureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CaptureError::Missing(pid) => {
                write!(f, "PID {pid}: no such process; accepted: the PID of a running process")
            }
            CaptureError::Foreign { pid, owner } => {
                write!(f, "PID {pid}: belongs to user {owner}; accepted: your own, or any as root")
            }
            CaptureError::Forbidden { pid, error } => {
                write!(f, "PID {pid}: {error}; run as root (or see kernel.yama.ptrace_scope)")
            }
            CaptureError::NoMemory(pid) => {
                write!(f, "PID {pid}: has no memory of its own; accepted: an ordinary process")
            }
            CaptureError::Read { pid, error } => write!(f, "PID {pid}: {error}"),
            CaptureError::Write(error) => write!(f, "cannot write: {error}"),
        }
    }
}

/// The result of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) pages_written: u64,
    /// Omitted, because they contained only zeros.
    pub(crate) pages_zero: u64,
    /// Not readable: device memory, or freed in the meantime.
    pub(crate) pages_unreadable: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.pages_written * PAGE_BYTES as u64;
        write!(f, "{} ({} pages)", zfolio_core::size::display(bytes), self.pages_written)?;
        if self.pages_zero > 0 {
            write!(f, ", without {} pages of zeros", self.pages_zero)?;
        }
        if self.pages_unreadable > 0 {
            write!(f, ", without {} pages that could not be read", self.pages_unreadable)?;
        }
        Ok(())
    }
}

/// A process whose memory can be read.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    memory: File,
    pagemap: File,
}

impl Process {
    /// Opens the files of process `pid`.
    pub(crate) fn open(pid: u32) -> Result<Process, CaptureError> {
        let folder = format!("/proc/{pid}");
        let owner = fs::metadata(&folder).map_err(|_| CaptureError::Missing(pid))?.uid();
        let open = |name: &str| {
            File::open(format!("{folder}/{name}")).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => CaptureError::Missing(pid),
                io::ErrorKind::PermissionDenied => {
                    let ours = zfolio_sys::probe::effective_uid();
                    if owner != ours && ours != 0 {
                        CaptureError::Foreign { pid, owner }
                    } else {
                        CaptureError::Forbidden { pid, error }
                    }
                }
                _ => CaptureError::of_read(pid, error),
            })
        };
        let (memory, pagemap) = (open("mem")?, open("pagemap")?);
        Ok(Process { pid, memory, pagemap })
    }

    /// Its name.
    pub(crate) fn name(&self) -> String {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        format!("{} (PID {})", name.trim(), self.pid)
    }

    /// Writes at most `bytes_max` bytes of its pages to `output`.
    pub(crate) fn capture(
        &self,
        output: &mut impl Write,
        bytes_max: u64,
        zeros: bool,
    ) -> Result<Counts, CaptureError> {
        let pid = self.pid;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
        let maps = maps.map_err(|error| CaptureError::of_read(pid, error))?;
        if maps.is_empty() {
            return Err(CaptureError::NoMemory(pid));
        }
        let mut counts = Counts::default();
        let pages_max = bytes_max / PAGE_BYTES as u64;
        let mut page_bytes = vec![0; RUN_PAGES * PAGE_BYTES];
        let mut entries = vec![0; RUN_PAGES * 8];
        for (start, end) in maps.lines().filter_map(private_range) {
            let mut at = start;
            while at < end && counts.pages_written < pages_max {
                let pages = usize::try_from((end - at) / PAGE_BYTES as u64).unwrap_or(usize::MAX);
                let pages = pages.min(RUN_PAGES);
                let entries = &mut entries[..pages * 8];
                // An address outside of the process's memory (vsyscall) has no entry.
                if self.pagemap.read_exact_at(entries, at / PAGE_BYTES as u64 * 8).is_err() {
                    break;
                }
                let wanted = entries.chunks_exact(8).map(is_private_page).collect::<Vec<_>>();
                for run in runs(&wanted) {
                    let left = usize::try_from(pages_max - counts.pages_written);
                    let length = run.len().min(left.unwrap_or(usize::MAX));
                    let place = at + (run.start * PAGE_BYTES) as u64;
                    let buffer = &mut page_bytes[..length * PAGE_BYTES];
                    self.copy_run(place, buffer, output, zeros, &mut counts)?;
                }
                at += (pages * PAGE_BYTES) as u64;
            }
        }
        Ok(counts)
    }

    /// Copies the pages at `place`, as many as fit into `buffer`.
    fn copy_run(
        &self,
        place: u64,
        buffer: &mut [u8],
        output: &mut impl Write,
        zeros: bool,
        counts: &mut Counts,
    ) -> Result<(), CaptureError> {
        let whole = self.memory.read_exact_at(buffer, place).is_ok();
        for (index, page) in buffer.chunks_exact_mut(PAGE_BYTES).enumerate() {
            // If one page cannot be read, reading the run fails; then each page is read alone.
            let at = place + (index * PAGE_BYTES) as u64;
            if !whole && self.memory.read_exact_at(page, at).is_err() {
                counts.pages_unreadable += 1;
            } else if !zeros && page.iter().all(|byte| *byte == 0) {
                counts.pages_zero += 1;
            } else {
                output.write_all(page).map_err(CaptureError::Write)?;
                counts.pages_written += 1;
            }
        }
        Ok(())
    }
}

/// The range of a line of `maps`, if it is private and readable.
fn private_range(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    let name = fields.nth(3).unwrap_or("");
    let of_kernel = matches!(name, "[vvar]" | "[vvar_vclock]" | "[vdso]" | "[vsyscall]");
    if of_kernel || !rights.starts_with('r') || !rights.ends_with('p') {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// Whether an entry of `pagemap` is a resident page that belongs to no file.
fn is_private_page(entry: &[u8]) -> bool {
    let entry = u64::from_ne_bytes(entry.try_into().expect("entries are cut to 8 bytes"));
    entry & PRESENT != 0 && entry & FILE_OR_SHARED == 0
}

/// The ranges of consecutive `true` values.
fn runs(wanted: &[bool]) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + wanted[at..].iter().position(|wanted| *wanted)?;
        let length = wanted[start..].iter().take_while(|wanted| **wanted).count();
        at = start + length;
        Some(start..at)
    })
}

#[cfg(test)]
mod tests {
    use super::{private_range, runs};

    #[test]
    fn private_readable_lines_have_a_range() {
        let heap = "55d0a000-55d0b000 rw-p 00000000 00:00 0          [heap]";
        assert_eq!(private_range(heap), Some((0x55d0_a000, 0x55d0_b000)));
        assert_eq!(
            private_range("7f00-8000 r--p 00000000 fe:00 123 /usr/lib/a b.so"),
            Some((0x7f00, 0x8000))
        );
        assert_eq!(private_range("7f00-8000 rw-s 00000000 00:01 1 /dev/zero (deleted)"), None);
        assert_eq!(private_range("7f00-8000 ---p 00000000 00:00 0"), None);
        assert_eq!(private_range("7f00-8000 r--p 00000000 00:00 0 [vvar]"), None);
        assert_eq!(private_range("garbage"), None);
    }

    #[test]
    fn runs_are_the_longest_ranges() {
        let found = |wanted: &[bool]| runs(wanted).collect::<Vec<_>>();
        assert_eq!(found(&[true, true, false, true]), [0..2, 3..4]);
        assert_eq!(found(&[false, false]), []);
        assert_eq!(found(&[false, true, false, true]), [1..2, 3..4]);
        assert_eq!(found(&[]), []);
    }
}
