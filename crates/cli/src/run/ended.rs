//! The figures of processes that have ended while their run goes on.
//!
//! Each process leaves a file of 16 KiB in `/dev/shm` for the summary. A build starts tens of thousands, and a
//! container's `/dev/shm` often has 64 MiB, which the program may need itself. So the run takes over the files of the
//! ended before there are many ([`FILES_MAX`]). Not those of other PID namespaces: whether they have ended is not
//! known.
//!
//! # Invariants
//!
//! - `END-1` The figures of a process that compressed memory, or was over its limit, are kept whole, up to
//!   [`KEPT_MAX`] of them. The others are counted, and the largest of them is kept.
//! - `END-2` A file is removed only while this structure is locked, and its figures are in it, whole or in the sums by
//!   command, before the lock is released: whoever looks for files under the lock finds each process once, so no
//!   counter falls.
//!
//! # Cost
//!
//! 20 us a second. Where there are many files, a read of each, with a pause of 50 times as long: files of live
//! processes and of other runs are looked at in vain.

use std::path::{Path, PathBuf};

use zfolio_sys::clock;

use super::detail::of;
use super::metrics::Groups;
use super::proc;
use super::summary::{is_over, was_compressed};
use super::tree::Tree;
use crate::stats_file::{self, StatsFile};

/// More files than these in the directory are looked at: 4 MiB.
const FILES_MAX: usize = 256;

/// The figures of so many processes are kept whole: 16 MiB.
const KEPT_MAX: usize = 1024;

/// Between two looks at how many there are, and the pause after a look at all of them, in times of its length.
const LOOK_NS: u64 = 1_000_000_000;
const REST: u64 = 50;

/// Processes that are counted only.
#[derive(Default, Debug)]
pub(super) struct Counted {
    /// How many they are, how many of them compressed memory, and how many were over the limit.
    pub(super) processes: usize,
    pub(super) compressed: usize,
    pub(super) over: usize,
    /// Those of them that ended between two looks at the tree.
    pub(super) unseen: usize,
    /// The most that one of them had resident, without pages of files.
    pub(super) peak_bytes: u64,
    /// The most pages of files of one of them.
    pub(super) file_bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Ended {
    directory: Option<PathBuf>,
    run: u32,
    since: u64,
    limit_bytes: u64,
    next_ns: u64,
    kept: Vec<StatsFile>,
    /// Of those that were not kept the one that needed most, and how much.
    largest: Option<(u64, StatsFile)>,
    /// All but that one.
    pub(super) counted: Counted,
    /// What they did, by command.
    pub(super) sums: Groups,
}

impl Ended {
    /// For this process's run, whose processes leave their files in `directory`, under a limit of `limit_bytes`.
    pub(super) fn new(directory: Option<PathBuf>, limit_bytes: u64) -> Ended {
        let run = std::process::id();
        Ended {
            directory,
            run,
            since: stats_file::start_ticks(run).unwrap_or(0),
            limit_bytes,
            next_ns: 0,
            kept: Vec::new(),
            largest: None,
            counted: Counted::default(),
            sums: Groups::default(),
        }
    }

    /// Takes over the files of those that have ended, if it is time and there are many files.
    pub(super) fn look_if_due(&mut self, tree: &mut Tree) {
        let now_ns = clock::monotonic_ns();
        if now_ns < self.next_ns {
            return;
        }
        let began = clock::thread_ns();
        let many = |directory: &PathBuf| stats_file::count(directory) > FILES_MAX;
        if let Some(directory) = self.directory.clone().filter(many) {
            self.take_over(&directory, tree);
        }
        let took = clock::thread_ns() - began;
        self.next_ns = now_ns + LOOK_NS.max(took * REST);
    }

    fn take_over(&mut self, directory: &Path, tree: &mut Tree) {
        // The next look at the tree ends those that it still has, and notes their peak.
        // One that is not there may have begun since.
        let has_ended =
            |file: &StatsFile| !tree.has(file) && !proc::is_alive(file.pid, file.start_ticks());
        for file in stats_file::take_ended(directory, self.run, self.since, has_ended) {
            let peak = tree.peak_bytes(&file);
            let need = peak.max(of(&file.stats.figures.demand_bytes_max));
            let is_told = was_compressed(&file) || is_over(peak, self.limit_bytes);
            if tree.is_first(&file) || is_told && self.kept.len() < KEPT_MAX {
                self.kept.push(file);
            } else if self.largest.as_ref().is_none_or(|(most, _)| need > *most) {
                let before = self.largest.replace((need, file));
                before.into_iter().for_each(|(_, file)| self.count(&file, tree));
            } else {
                self.count(&file, tree);
            }
        }
    }

    fn count(&mut self, file: &StatsFile, tree: &mut Tree) {
        let (peak, counted) = (tree.peak_bytes(file), &mut self.counted);
        counted.processes += 1;
        counted.compressed += usize::from(was_compressed(file));
        counted.over += usize::from(is_over(peak, self.limit_bytes));
        counted.unseen += usize::from(!tree.forget(file));
        counted.peak_bytes = counted.peak_bytes.max(peak);
        counted.file_bytes = counted.file_bytes.max(of(&file.stats.figures.file_bytes_max));
        self.sums.add(file);
    }

    /// The figures that were taken over and are kept.
    pub(super) fn kept(&self) -> impl Iterator<Item = &StatsFile> {
        self.kept.iter().chain(self.largest.iter().map(|(_, file)| file))
    }

    /// The files of the others, running or not.
    pub(super) fn files(&self) -> Vec<StatsFile> {
        let in_directory = |directory| stats_file::of_run(directory, self.run, self.since);
        self.directory.as_deref().map(in_directory).unwrap_or_default()
    }

    /// At the end of the run: the figures of all processes but the counted ones. The files of those that have ended are
    /// removed, and children that still run keep theirs.
    pub(super) fn finish(&mut self) -> Vec<StatsFile> {
        let take = |directory| stats_file::take_run(directory, self.run, self.since);
        let left = self.directory.as_deref().map(take).unwrap_or_default();
        let largest = self.largest.take().map(|(_, file)| file);
        self.kept.drain(..).chain(largest).chain(left).collect()
    }
}
