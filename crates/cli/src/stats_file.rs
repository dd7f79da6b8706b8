//! The statistics of managed processes, as files: `/dev/shm/zfolio-UID/PID`. A process that uses
//! the Rust library has one for each pager: `PID.1`, `PID.2`, ...
//!
//! Each library maps its file and counts there; other processes read it. The file contains the
//! bytes of one [`Stats`], so reading it is a copy.
//!
//! # Invariants
//!
//! - `SF-1` The directory belongs to the user in its name alone (mode 0700): all files in it were
//!   written by that user's processes. The superuser looks into those of others, too, who may have put anything there
//!   (`shared::open_to_read`, `shared::write_at`, `shared::unlink`).
//! - `SF-2` A file belongs to the process that it names only if the start time matches too, because
//!   a PID may be used again.
//! - `SF-3` A process under `zfolio run` leaves its file behind; the run reads and removes it. So
//!   the file of a process that has ended is stale only if its run has ended too. Of a process in another PID namespace
//!   neither is known here: its file stays.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Seek, SeekFrom};
use std::mem::offset_of;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use zfolio_core::budget::WriteBudget;
#[cfg(test)]
use zfolio_core::ledger::Owner;
use zfolio_core::stats::{STATS_MAGIC, Stats, asked_stall};
use zfolio_sys::{clock, process, shared};

/// The parent of the directories of all users.
const SHARED_MEMORY: &str = "/dev/shm";
const PREFIX: &str = "zfolio-";

/// How long to wait for an answer of a process, which checks every 20 ms.
const ANSWER_NS: u64 = 2_000_000_000;

/// The statistics of one process.
#[derive(Debug)]
pub(crate) struct StatsFile {
    path: PathBuf,
    /// The process id.
    pub(crate) pid: u32,
    /// A copy of its figures.
    pub(crate) stats: Box<Stats>,
    /// The number of the pager, if the process uses the library.
    pub(crate) library: Option<u32>,
    /// Whether the process is running.
    pub(crate) live: bool,
}

/// The process that a file name refers to, and the number of its pager.
fn parse_name(name: &str) -> Option<(u32, Option<u32>)> {
    match name.split_once('.') {
        None => Some((name.parse().ok()?, None)),
        Some((pid, number)) => Some((pid.parse().ok()?, Some(number.parse().ok()?))),
    }
}

/// The names of the files in a directory, by PID; the file of the whole process comes before its
/// pagers.
fn names(directory: &Path) -> Vec<(u32, Option<u32>)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| parse_name(entry.file_name().to_str()?)).collect();
    names.sort_unstable();
    names
}

/// The path of the file with that name.
fn path_of(directory: &Path, pid: u32, library: Option<u32>) -> PathBuf {
    directory.join(library.map_or(pid.to_string(), |number| format!("{pid}.{number}")))
}

impl StatsFile {
    /// The statistics of a process that does not exist.
    #[cfg(test)]
    pub(crate) fn made_up(pid: u32, command: &str) -> StatsFile {
        let stats = Box::new(Stats::default());
        stats.publish(Owner { pid, namespace: 0, start_ticks: 1 }, 0, "zstd", command);
        StatsFile { path: PathBuf::new(), pid, library: None, stats, live: true }
    }

    /// Reads a file of `pid` in `directory`; `None` if it does not exist or is not complete yet.
    fn read(directory: &Path, pid: u32, library: Option<u32>) -> Option<StatsFile> {
        let path = path_of(directory, pid, library);
        let stats = read_stats(&path).ok()?;
        let same = stats.pid.load(Relaxed) == pid;
        let live = start_ticks(pid) == Some(stats.start_ticks.load(Relaxed));
        (same && stats.is_whole()).then_some(StatsFile { path, pid, stats, library, live })
    }

    /// The program's name for display, with a mark if it uses the library.
    pub(crate) fn command(&self) -> String {
        let mark = if self.library.is_some() { "[library]" } else { "" };
        self.stats.command() + mark
    }

    /// Asks the process for the size classes of its pool; returns the fields of each as text, or
    /// nothing while nothing was compressed.
    ///
    /// # Errors
    ///
    /// A message: the process does not answer.
    pub(crate) fn classes(&self) -> Result<Vec<Vec<String>>, String> {
        let fields = |line: &str| line.split_ascii_whitespace().map(str::to_owned).collect();
        Ok(parts(&self.tables()?).0.lines().map(fields).collect())
    }

    /// Asks the process for the figures of its accelerator: empty without one, or while nothing was compressed.
    ///
    /// # Errors
    ///
    /// A message: the process does not answer.
    pub(crate) fn accelerator(&self) -> Result<String, String> {
        Ok(parts(&self.tables()?).1.to_owned())
    }

    /// The tables of [`Stats::tables_asked`].
    fn tables(&self) -> Result<String, String> {
        let mut text = String::new();
        if self.stats.figures.engaged.load(Relaxed) == 0 {
            return Ok(text);
        }
        let failed = |error: io::Error| format!("{}: {error}", self.path.display());
        let asked = self.stats.tables_asked.load(Relaxed).wrapping_add(1);
        self.write(offset_of!(Stats, tables_asked), &asked.to_ne_bytes()).map_err(failed)?;
        let until = clock::monotonic_ns() + ANSWER_NS;
        while read_stats(&self.path).map_err(failed)?.tables_published.load(Acquire) != asked {
            if clock::monotonic_ns() > until {
                return Err("the process does not answer: it is stopped".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut file = shared::open_to_read(&self.path).map_err(failed)?;
        file.seek(SeekFrom::Start(size_of::<Stats>() as u64)).map_err(failed)?;
        file.read_to_string(&mut text).map_err(failed)?;
        Ok(text)
    }

    /// Writes a word of the page of figures.
    fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        shared::write_at(&self.path, bytes, offset)
    }

    /// Asks the process to hold another limit.
    pub(crate) fn ask_limit(&self, bytes: u64) -> io::Result<()> {
        self.write(offset_of!(Stats, limit_asked), &bytes.to_ne_bytes())
    }

    /// Asks the process to wait for another share of its time, in millionths.
    pub(crate) fn ask_stall(&self, ppm: u32) -> io::Result<()> {
        self.write(offset_of!(Stats, stall_asked), &asked_stall(ppm).to_ne_bytes())
    }

    /// Asks the process to let the pool take another part of its limit, in percent.
    pub(crate) fn ask_max_pool_percent(&self, percent: u8) -> io::Result<()> {
        let at = offset_of!(Stats, max_pool_percent_asked);
        self.write(at, &u64::from(percent).to_ne_bytes())
    }

    /// Asks the process to bring a full pool down to another part of that, in percent.
    pub(crate) fn ask_accept_threshold_percent(&self, percent: u8) -> io::Result<()> {
        let at = offset_of!(Stats, accept_threshold_percent_asked);
        self.write(at, &u64::from(percent).to_ne_bytes())
    }

    /// Asks the process to write no more than a budget, which is full then, also if it is the same as before.
    pub(crate) fn ask_write_budget(&self, budget: WriteBudget) -> io::Result<()> {
        let serial = self.stats.write_budget_serial.load(Relaxed).wrapping_add(1);
        self.write(offset_of!(Stats, write_budget_asked), &budget.to_asked().to_ne_bytes())?;
        // Behind the budget: whoever sees this number finds that budget.
        self.write(offset_of!(Stats, write_budget_serial), &serial.to_ne_bytes())
    }

    /// Asks the process to compress with another algorithm, by a word of `zcomp::asked`.
    pub(crate) fn ask_algorithm(&self, word: u64) -> io::Result<()> {
        self.write(offset_of!(Stats, algorithm_asked), &word.to_ne_bytes())
    }

    /// The figures as they are now. `None`: the process has ended.
    pub(crate) fn again(&self) -> Option<StatsFile> {
        let directory = self.path.parent()?;
        StatsFile::read(directory, self.pid, self.library).filter(|file| file.live)
    }

    /// The PID of its `zfolio run`; 0 if there is none.
    pub(crate) fn run(&self) -> u64 {
        self.stats.run.load(Relaxed)
    }

    /// When the process started, in clock ticks.
    pub(crate) fn start_ticks(&self) -> u64 {
        self.stats.start_ticks.load(Relaxed)
    }

    /// What tells its process from all others: the process id, in its own namespace, and the start.
    pub(crate) fn key(&self) -> (u32, u64) {
        (self.pid, self.start_ticks())
    }

    /// Removes the file. It may have been removed already.
    pub(crate) fn remove(&self) {
        shared::unlink(&self.path).ok();
    }

    /// SF-3: the process has ended, and so has the run that would read the file.
    fn is_stale(&self) -> bool {
        let run = u32::try_from(self.run()).unwrap_or(0);
        !self.live && !self.is_elsewhere() && (run == 0 || start_ticks(run).is_none())
    }

    /// Whether the process is, or was, in another PID namespace, whose numbers mean nothing here.
    fn is_elsewhere(&self) -> bool {
        let its = u32::try_from(self.stats.namespace.load(Relaxed)).unwrap_or(0);
        process::is_other_namespace(its)
    }
}

/// Reads the bytes of a [`Stats`].
fn read_stats(path: &Path) -> io::Result<Box<Stats>> {
    // SAFETY: `Stats` is `repr(C)` and made of atomic integers only, eight-byte words and pairs of four and arrays of
    // bytes in multiples of eight, so it has no padding and any bytes are a valid value.
    #[allow(unsafe_code, reason = "the bytes of a file become a structure")]
    unsafe {
        shared::read(path)
    }
}

/// Whether a file with another layout has the header of a process whose run is alive. The header is
/// the same in all builds; what follows it is not.
fn is_of_a_live_run(path: &Path) -> bool {
    let mut header = [0; offset_of!(Stats, algorithm)];
    let read = shared::open_to_read(path).and_then(|mut file| file.read_exact(&mut header));
    let word = |at: usize| u64::from_ne_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    let run = u32::try_from(word(offset_of!(Stats, run))).unwrap_or(0);
    read.is_ok() && word(0) == STATS_MAGIC && run != 0 && start_ticks(run).is_some()
}

/// When the process `pid` started, in clock ticks: field 22 of its `stat`. `None` if it does not
/// exist, or has ended and was not waited for yet.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; it ends at the last closing one.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let fields = String::from_utf8_lossy(&text[end + 1..]).into_owned();
    // The first of these fields is number 3, the state.
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let ticks = fields.nth(22 - 4)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(ticks)
}

/// The directory of `uid`.
pub(crate) fn directory(uid: u32) -> PathBuf {
    Path::new(SHARED_MEMORY).join(format!("{PREFIX}{uid}"))
}

/// Makes the directory of `uid`, the user of this process, or checks the existing one (SF-1).
///
/// # Errors
///
/// A message about what is wrong with it.
pub(crate) fn prepare_directory(uid: u32) -> Result<PathBuf, String> {
    let path = directory(uid);
    match DirBuilder::new().mode(0o700).create(&path) {
        // The umask may have taken some of that away.
        Ok(()) => fs::set_permissions(&path, fs::Permissions::from_mode(0o700))
            .map_err(|error| format!("{}: {error}", path.display()))?,
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(format!("{} cannot be made: {error}", path.display()));
        }
        _ => {}
    }
    check_directory(&path, uid)?;
    Ok(path)
}

/// Checks SF-1 for the directory at `path`.
fn check_directory(path: &Path, uid: u32) -> Result<(), String> {
    let shown = path.display();
    let found = fs::symlink_metadata(path).map_err(|error| format!("{shown}: {error}"))?;
    if !found.is_dir() {
        return Err(format!("{shown} is not a directory; remove it"));
    }
    if found.uid() != uid {
        return Err(format!("{shown} belongs to uid {}, not to {uid}; remove it", found.uid()));
    }
    if found.mode() & 0o777 != 0o700 {
        return Err(format!("{shown} has mode {:o}, not 700; remove it", found.mode() & 0o777));
    }
    Ok(())
}

/// The directories of all users that can be read, each with its user.
pub(crate) fn directories() -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten();
    let uid_of = |name: &str| name.strip_prefix(PREFIX)?.parse().ok();
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| Some((uid_of(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(uid, path)| check_directory(path, *uid).is_ok())
        .collect();
    found.sort_unstable();
    found
}

/// Every complete file in `directory`, by PID. Stale files are removed.
pub(crate) fn list(directory: &Path) -> Vec<StatsFile> {
    let mut files = Vec::new();
    for (pid, library) in names(directory) {
        match StatsFile::read(directory, pid, library) {
            Some(file) if file.is_stale() => file.remove(),
            Some(file) => files.push(file),
            // The file is incomplete, and its process has ended. If another build of zfolio wrote
            // it, its run may still read it.
            None if start_ticks(pid).is_none()
                && !is_of_a_live_run(&path_of(directory, pid, library)) =>
            {
                shared::unlink(&path_of(directory, pid, library)).ok();
            }
            None => {}
        }
    }
    files
}

/// The file of one process in `directory`, if it is managed now; otherwise that of its first pager.
pub(crate) fn of(directory: &Path, pid: u32) -> Option<StatsFile> {
    let mut names = names(directory).into_iter().filter(|(owner, _)| *owner == pid);
    names.find_map(|(_, library)| StatsFile::read(directory, pid, library).filter(|file| file.live))
}

/// The file of the running process `pid`, whose number in its own namespace is `inner_pid`, and that started at
/// `start_ticks`. A process of the superuser's run may have become another user's, and executed a program since: then
/// that user's directory has the file of what it is now.
pub(crate) fn of_start(
    directory: &Path,
    (pid, inner_pid): (u32, u32),
    start_ticks: u64,
) -> Option<StatsFile> {
    let of = |directory: &Path| {
        let file = StatsFile::read(directory, inner_pid, None);
        file.filter(|file| file.start_ticks() == start_ticks)
    };
    let owner = || Some(fs::metadata(format!("/proc/{pid}")).ok()?.uid());
    let its = if is_superusers(directory) { owner() } else { None };
    let its = its.map(|uid| (uid, self::directory(uid)));
    let its = its.filter(|(uid, path)| path != directory && check_directory(path, *uid).is_ok());
    its.and_then(|(_, path)| of(&path)).or_else(|| of(directory))
}

/// Whether processes of runs in this directory can become other users'.
fn is_superusers(directory: &Path) -> bool {
    directory == self::directory(0)
}

/// The files of the processes of the run `run` that are running.
pub(crate) fn running(directory: &Path, run: u32) -> Vec<StatsFile> {
    let mut files = of_run(directory, run, 0);
    files.retain(|file| file.live);
    files
}

/// The files of the run `run` whose processes started at `since` clock ticks or later, running or not: of each process
/// the one that was made last. Those of processes that have become another user's are in that user's directory.
pub(crate) fn of_run(directory: &Path, run: u32, since: u64) -> Vec<StatsFile> {
    latest(all_of_run(directory, run, since))
}

/// All files of these processes; of two of one process the one that was made last comes behind the other.
fn all_of_run(directory: &Path, run: u32, since: u64) -> Vec<StatsFile> {
    let mut files = list(directory);
    if is_superusers(directory) {
        let others = directories().into_iter().filter(|(_, other)| other != directory);
        files.extend(others.flat_map(|(_, other)| list(&other)));
        files.sort_by_cached_key(|file| fs::metadata(&file.path).and_then(|it| it.modified()).ok());
    }
    // A file of an earlier run with the same PID is older than this process.
    files.retain(|file| file.run() == u64::from(run) && file.start_ticks() >= since);
    files
}

/// Of each process, by PID, the last of its `files`.
fn latest(files: Vec<StatsFile>) -> Vec<StatsFile> {
    let named = files.into_iter().map(|file| ((file.key(), file.library), file));
    named.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// The same as [`of_run`]; files of processes that have ended are removed, and children that still run keep theirs.
pub(crate) fn take_run(directory: &Path, run: u32, since: u64) -> Vec<StatsFile> {
    let files = all_of_run(directory, run, since);
    files.iter().filter(|file| !file.live).for_each(StatsFile::remove);
    latest(files)
}

/// Of the run's processes those that have ended, while the run goes on: their files are removed.
pub(crate) fn take_ended(
    directory: &Path,
    run: u32,
    since: u64,
    has_ended: impl Fn(&StatsFile) -> bool,
) -> Vec<StatsFile> {
    let mut files = all_of_run(directory, run, since);
    files.retain(|file| !file.is_elsewhere() && has_ended(file));
    for file in &mut files {
        file.live = false;
        let key = |stats: &Stats| (stats.pid.load(Relaxed), stats.start_ticks.load(Relaxed));
        let again = read_stats(&file.path).ok().filter(|stats| key(stats) == key(&file.stats));
        // It may have run on while the others were read. Otherwise another process has its id by now, and its file
        // there.
        if let Some(stats) = again {
            file.stats = stats;
            file.remove();
        }
    }
    latest(files)
}

/// How many files there are.
pub(crate) fn count(directory: &Path) -> usize {
    fs::read_dir(directory).into_iter().flatten().count()
}

/// The lines of the size classes, and those of the accelerator: an empty line is between them.
fn parts(tables: &str) -> (&str, &str) {
    match tables.strip_prefix('\n') {
        Some(accelerator) => ("", accelerator),
        None => tables.split_once("\n\n").unwrap_or((tables, "")),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Owner, StatsFile, check_directory, list, parts, read_stats, start_ticks, take_ended,
        take_run,
    };
    use std::fs::{self, DirBuilder};
    use std::mem::offset_of;
    use std::os::unix::fs::DirBuilderExt;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::Ordering::Relaxed;
    use zfolio_core::budget::WriteBudget;
    use zfolio_core::stats::Stats;

    #[test]
    fn tables_are_told_apart_by_an_empty_line() {
        assert_eq!(parts("1 2\n3 4\n"), ("1 2\n3 4\n", ""));
        assert_eq!(parts("1 2\n\nglobal:\n\n  a: 1\n"), ("1 2", "global:\n\n  a: 1\n"));
        assert_eq!(parts("\nglobal:\n"), ("", "global:\n"));
        assert_eq!(parts(""), ("", ""));
    }

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let path = std::env::temp_dir().join(format!("zfolio-{name}-{}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            Directory(path)
        }

        fn write(&self, pid: u32, start: u64, run: u64) {
            self.write_as(&pid.to_string(), (pid, 0), start, run);
        }

        fn write_as(&self, name: &str, (pid, namespace): (u32, u32), start_ticks: u64, run: u64) {
            let mut bytes = Vec::new();
            let stats = Stats::default();
            stats.publish(Owner { pid, namespace, start_ticks }, run, "lz4", "test");
            stats.figures.limit_bytes.store(256 << 20, Relaxed);
            write_stats(&mut bytes, &stats);
            fs::write(self.0.join(name), bytes).unwrap();
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// The layout written by hand, so that a change of it fails this test.
    fn write_stats(into: &mut Vec<u8>, stats: &Stats) {
        into.extend(stats.magic.load(Relaxed).to_le_bytes());
        into.extend(stats.bytes.load(Relaxed).to_le_bytes());
        into.extend(stats.pid.load(Relaxed).to_le_bytes());
        into.extend(stats.start_ticks.load(Relaxed).to_le_bytes());
        into.extend(stats.run.load(Relaxed).to_le_bytes());
        into.extend(stats.algorithm.iter().map(|byte| byte.load(Relaxed)));
        into.extend(stats.command.iter().map(|byte| byte.load(Relaxed)));
        stats.figures.each(|_, _, value| into.extend(value.to_le_bytes()));
        into.resize(offset_of!(Stats, namespace), 0);
        into.extend(stats.namespace.load(Relaxed).to_le_bytes());
        assert_eq!(into.len(), size_of::<Stats>());
    }

    fn me() -> (u32, u64) {
        let pid = std::process::id();
        (pid, start_ticks(pid).expect("we run"))
    }

    /// Above every PID that the kernel assigns (2^22).
    const NOBODY: u32 = 5_000_000;

    #[test]
    fn what_was_written_is_read() {
        let directory = Directory::new("read");
        let (pid, start) = me();
        directory.write(pid, start, 0);
        let file = StatsFile::read(&directory.0, pid, None).expect("whole");
        assert!(file.live && file.run() == 0);
        assert_eq!(file.stats.command(), "test");
        assert_eq!(file.stats.figures.get("limit_bytes"), Some(256 << 20));
    }

    /// Goal: a process can tell that the same budget is asked for again.
    #[test]
    fn each_request_for_a_budget_has_a_number() {
        let directory = Directory::new("budget");
        let (pid, start) = me();
        directory.write(pid, start, 0);
        let budget: WriteBudget = "10M/h".parse().unwrap();
        let numbers = [1, 2].map(|_| {
            StatsFile::read(&directory.0, pid, None).unwrap().ask_write_budget(budget).unwrap();
            let stats = StatsFile::read(&directory.0, pid, None).unwrap().stats;
            assert_eq!(stats.write_budget_asked.load(Relaxed), budget.to_asked());
            stats.write_budget_serial.load(Relaxed)
        });
        assert_eq!(numbers, [1, 2]);
    }

    #[test]
    fn short_and_foreign_files_are_not_read() {
        let directory = Directory::new("short");
        let (pid, start) = me();
        directory.write(pid, start, 0);
        let path = directory.0.join(pid.to_string());
        let mut bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(read_stats(&path).is_err() && list(&directory.0).is_empty());
        bytes[0] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(list(&directory.0).is_empty(), "the magic is wrong");
        assert!(path.exists(), "the process that it names may still be writing it");
    }

    #[test]
    fn a_stale_file_is_removed_and_one_of_a_live_run_is_kept() {
        let directory = Directory::new("stale");
        let (pid, start) = me();
        directory.write(NOBODY, 1, 0);
        directory.write(NOBODY + 1, 1, u64::from(NOBODY));
        directory.write(NOBODY + 2, 1, u64::from(pid));
        // The PID of this process, used again: the start time differs.
        directory.write(pid, start + 1, 0);
        let left: Vec<u32> = list(&directory.0).iter().map(|file| file.pid).collect();
        assert_eq!(left, [NOBODY + 2]);
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 1);
    }

    /// Goal: the files of a run in another PID namespace stay: neither its number nor those of its processes mean
    /// anything here, and without them it is neither seen nor changed by anyone.
    #[test]
    fn files_of_a_run_elsewhere_stay() {
        let (directory, here) = (Directory::new("elsewhere"), super::process::pid_namespace());
        for (pid, namespace) in [(NOBODY, here), (NOBODY + 1, here ^ 1)] {
            directory.write_as(&pid.to_string(), (pid, namespace), 1, u64::from(NOBODY));
        }
        let left: Vec<u32> = list(&directory.0).iter().map(|file| file.pid).collect();
        assert_eq!(left, [NOBODY + 1]);
    }

    /// Goal: the pagers of a process that uses the library are distinguished; a file that a killed
    /// process left is removed.
    #[test]
    fn pagers_of_the_library_have_files_beside_that_of_the_process() {
        let directory = Directory::new("library");
        let (pid, start) = me();
        for name in ["1", "12", "2", "x", "3.1"] {
            directory.write_as(&format!("{pid}.{name}"), (pid, 0), start, 0);
        }
        assert_eq!(super::of(&directory.0, pid).unwrap().library, Some(1));
        directory.write(pid, start, 0);
        directory.write_as(&format!("{NOBODY}.1"), (NOBODY, 0), 1, 0);
        let files = list(&directory.0);
        let listed: Vec<_> = files.iter().map(|file| (file.library, file.command())).collect();
        let library = "test[library]".to_owned();
        assert_eq!(listed[0], (None, "test".to_owned()));
        assert_eq!(listed[1..], [1, 2, 12].map(|number| (Some(number), library.clone())));
        assert!(!directory.0.join(format!("{NOBODY}.1")).exists());
        assert_eq!(super::of(&directory.0, pid).unwrap().library, None);
    }

    #[test]
    fn a_file_of_another_build_is_left_to_its_run() {
        let directory = Directory::new("build");
        let (pid, _) = me();
        for (number, run) in [(NOBODY, pid), (NOBODY + 1, NOBODY)] {
            directory.write(number, 1, run.into());
            let path = directory.0.join(number.to_string());
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 8]).unwrap();
        }
        assert!(list(&directory.0).is_empty());
        assert!(directory.0.join(NOBODY.to_string()).exists(), "its run is alive");
        assert!(!directory.0.join((NOBODY + 1).to_string()).exists());
    }

    #[test]
    fn a_run_takes_its_own_files_only() {
        let directory = Directory::new("run");
        let (pid, start) = me();
        directory.write(pid, start, u64::from(pid));
        directory.write(NOBODY, 100, u64::from(pid));
        directory.write(NOBODY + 1, 99, u64::from(pid));
        directory.write(NOBODY + 2, 100, 1);
        let taken: Vec<(u32, bool)> =
            take_run(&directory.0, pid, 100).iter().map(|file| (file.pid, file.live)).collect();
        assert_eq!(taken, [(pid, true), (NOBODY, false)]);
        assert!(!directory.0.join(NOBODY.to_string()).exists(), "taken");
        assert!(directory.0.join(pid.to_string()).exists(), "lives on");
    }

    /// Goal: a process that has the id of one that has ended keeps its own file, and is not counted as the other.
    /// Method: the file is exchanged after the look at the process.
    #[test]
    fn a_new_process_of_the_same_id_keeps_its_file() {
        let directory = Directory::new("again");
        let (run, [first, second]) = (std::process::id(), [1, 2]);
        directory.write(first, 100, run.into());
        directory.write(second, 100, run.into());
        let has_ended = |file: &StatsFile| {
            if file.pid == second {
                directory.write(second, 200, run.into());
            }
            true
        };
        let taken = take_ended(&directory.0, run, 100, has_ended);
        let starts: Vec<_> = taken.iter().map(StatsFile::key).collect();
        assert_eq!(starts, [(first, 100), (second, 100)]);
        let left: Vec<_> = list(&directory.0).iter().map(StatsFile::key).collect();
        assert_eq!(left, [(second, 200)]);
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let directory = Directory::new("owner");
        let uid = zfolio_sys::probe::effective_uid();
        assert_eq!(check_directory(&directory.0, uid), Ok(()));
        assert!(check_directory(&directory.0, uid + 1).unwrap_err().contains("belongs to uid"));
        assert!(check_directory(Path::new("/dev/null"), uid).unwrap_err().contains("directory"));
        assert!(check_directory(Path::new("/"), 0).unwrap_err().contains("mode"));
    }
}
