//! The kernel's swap on a file, and a memory cgroup: what spilling is compared with.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};

use super::cgroup::Hierarchy;
use super::journal::{Journal, Undo, at};
use super::zram::header;
use super::{begin, may_change, run_in_cgroup};
use crate::os;
use crate::watch::{Ended, Look, WatchError};

/// Room in the file in addition to the workload, for the program's other pages.
const SLACK_BYTES: u64 = 128 << 20;

/// What the comparison requires; checked before anything is changed.
#[derive(Debug)]
pub(crate) struct SwapFile {
    hierarchy: Hierarchy,
    path: PathBuf,
}

impl SwapFile {
    /// Checks that a file in `dir` can be used; otherwise returns the reason, in one line.
    pub(crate) fn find(dir: &Path) -> Result<SwapFile, String> {
        may_change()?;
        // As the kernel names it in /proc/swaps, for whoever undoes this in another directory.
        let whole = dir.canonicalize().map_err(|error| format!("{}: {error}", dir.display()))?;
        let is_plain = |text: &str| !text.chars().any(|c| c.is_whitespace() || c == '\\');
        if !whole.to_str().is_some_and(is_plain) {
            return Err(format!("{}: a path without blanks is needed", dir.display()));
        }
        let path = whole.join(format!("zfolio-bench-swap-{}", std::process::id()));
        if path.exists() {
            return Err(format!("{}: exists already: remove it", path.display()));
        }
        Ok(SwapFile { hierarchy: Hierarchy::find()?, path })
    }

    /// One line that describes what is used.
    pub(crate) fn describe(&self) -> String {
        format!("swap on a file, memory cgroup {}", self.hierarchy)
    }

    /// Runs `command` in a cgroup of `limit_bytes`, with a file for `bytes`, and restores the system.
    pub(crate) fn run<T: Default + Send + 'static>(
        &self,
        (bytes, limit_bytes): (u64, u64),
        command: Command,
        look: &Look<'_>,
        read: fn(ChildStdout) -> T,
    ) -> Result<Ended<T>, WatchError> {
        let journal = begin(4)?;
        self.set_up(&journal, bytes)?;
        let ended = run_in_cgroup((&journal, &self.hierarchy, limit_bytes), command, look, read)?;
        journal.undo()?;
        Ok(ended)
    }

    /// Swaps to a file for `bytes`, and records the undo.
    pub(super) fn set_up(&self, journal: &Journal, bytes: u64) -> io::Result<()> {
        let file_bytes = (bytes + SLACK_BYTES).next_multiple_of(1 << 20);
        journal.change(&Undo::SwapFile(self.path.clone()), || self.make(file_bytes))
    }

    /// The memory controller.
    pub(super) fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// Makes the file, of which all blocks are there, and swaps to it.
    fn make(&self, bytes: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&self.path).map_err(|error| at(&self.path, &error))?;
        let made = os::allocate(&file, bytes).and_then(|()| {
            file.write_all_at(&header(bytes)?, 0)?;
            file.sync_all()?;
            os::swapon(&self.path)
        });
        made.map_err(|error| at(&self.path, &error))
    }
}

/// Undoes it: nothing is swapped to the file, and there is no file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let is_swap = swaps.lines().filter_map(|line| line.split_whitespace().next());
    if is_swap.map(Path::new).any(|swap| swap == path) {
        os::swapoff(path).map_err(|error| at(path, &error))?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path, &error)),
        _ => Ok(()),
    }
}
