//! The kernel's zswap in front of a swap file: compressed memory of which a part goes to disk, as under `zfolio run`.
//!
//! What its pool takes is charged to no cgroup of version 1, and is bounded for the whole machine only, in percent. So
//! the bound is the smallest, and the most that the pool had is added to the cgroup's limit. A cgroup of version 2 is
//! charged for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::cgroup::Hierarchy;
use super::journal::Journal;
use super::swap_file::SwapFile;
use super::zram::read;
use super::{Swapped, begin, run_in_cgroup};
use crate::watch::{Look, WatchError};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// The least that the kernel takes; with 0 it compresses nothing.
const MAX_POOL_PERCENT: &str = "1";

/// How often the pool is looked at.
const SAMPLE: Duration = Duration::from_millis(10);

/// What the comparison requires; checked before anything is changed.
#[derive(Debug)]
pub(crate) struct Zswap {
    file: SwapFile,
}

/// Pages that went into the pool, came back from it, and were written back, as the kernel counts them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) zswpout: u64,
    pub(crate) zswpin: u64,
    pub(crate) zswpwb: u64,
}

/// The file of a parameter of the module.
pub(super) fn parameter(name: &str) -> PathBuf {
    Path::new(PARAMETERS).join(name)
}

/// Gives a parameter a value, and records the undo.
fn set(journal: &Journal, name: &str, value: &str) -> io::Result<()> {
    let path = parameter(name);
    let before = read(&path)?;
    if before == value { Ok(()) } else { journal.write(&path, &before, value) }
}

/// The number behind a name, in a text with one name a line.
fn number_of(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

/// Bytes of the pool.
fn pool_bytes() -> u64 {
    number_of(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "Zswap:") << 10
}

impl Counts {
    fn now() -> Counts {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let of = |name: &str| number_of(&text, name);
        Counts { zswpout: of("zswpout"), zswpin: of("zswpin"), zswpwb: of("zswpwb") }
    }

    fn since(self, before: Counts) -> Counts {
        Counts {
            zswpout: self.zswpout - before.zswpout,
            zswpin: self.zswpin - before.zswpin,
            zswpwb: self.zswpwb - before.zswpwb,
        }
    }
}

impl Zswap {
    /// Checks that the comparison is possible, with a swap file in `dir`; otherwise returns the reason, in one line.
    pub(crate) fn find(dir: &Path) -> Result<Zswap, String> {
        let file = SwapFile::find(dir)?;
        match parameter("enabled").exists() {
            true => Ok(Zswap { file }),
            false => Err(format!("this kernel has no zswap: there is no {PARAMETERS}")),
        }
    }

    /// The compressor that is set.
    pub(crate) fn compressor() -> String {
        read(&parameter("compressor")).unwrap_or_default()
    }

    /// One line that describes what is used.
    pub(crate) fn describe(&self) -> String {
        format!("zswap over {}", self.file.describe())
    }

    /// Runs `command` in a cgroup of `limit_bytes`, with zswap over a file for `bytes`, and restores the system
    /// (`KRN-2`).
    pub(crate) fn run<T: Default + Send + 'static>(
        &self,
        (bytes, limit_bytes): (u64, u64),
        command: Command,
        look: &Look<'_>,
        read: fn(ChildStdout) -> T,
    ) -> Result<(Swapped<T>, Counts), WatchError> {
        let journal = begin(4)?;
        set(&journal, "max_pool_percent", MAX_POOL_PERCENT)?;
        set(&journal, "enabled", "Y")?;
        self.file.set_up(&journal, bytes)?;
        let hierarchy = self.file.hierarchy();
        let (before, is_over, most) = (Counts::now(), AtomicBool::new(false), AtomicU64::new(0));
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    most.fetch_max(pool_bytes(), Relaxed);
                    std::thread::sleep(SAMPLE);
                }
            });
            let ended = run_in_cgroup((&journal, hierarchy, limit_bytes), command, look, read);
            is_over.store(true, Relaxed);
            ended
        })?;
        let counts = Counts::now().since(before);
        journal.undo()?;
        let is_charged = matches!(hierarchy, Hierarchy::V2(_));
        let beside_bytes_max = if is_charged { 0 } else { most.into_inner() };
        Ok((Swapped { ended, beside_bytes_max }, counts))
    }
}

#[cfg(test)]
mod tests {
    use super::number_of;

    #[test]
    fn a_number_is_found_by_its_whole_name() {
        let text = "Zswapped:   12 kB\nZswap:       7 kB\nzswpin 3\n";
        let found = ["Zswap:", "Zswapped:", "zswpin", "zswp"].map(|name| number_of(text, name));
        assert_eq!(found, [7, 12, 3, 0]);
    }
}
