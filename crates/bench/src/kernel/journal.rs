//! The journal of all changes to the system, with their undo.
//!
//! Each change is written here *before* it is made, as one line of text with its undo. Undoing goes
//! from the last line to the first. The same code undoes after success, after failure, after a
//! signal, in the panic hook (release builds abort, so `Drop` does not run), and after a run that
//! was killed.
//!
//! # Invariants
//!
//! - `JRN-1` Every change in force has its line in the file.
//! - `JRN-2` Undoing a line twice, or one whose change was never made, does nothing.
//! - `JRN-3` A zram device is touched only if it has our swap label, or contains no data.
//! - `JRN-4` Only one process holds the lock of the file; so lines found at the start are left
//!   over.
//! - `JRN-5` Recording and making a change happen under one lock of this process, and undoing too;
//!   so a thread that panics never undoes while another thread makes a change. After undoing no
//!   more changes are made.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::sync::Mutex;

use super::{swap_file, zram};
use crate::os;

/// The path of the journal. A restart of the machine removes it, like all changes that it can undo.
pub(crate) const PATH: &str = "/run/zfolio-bench.journal";

/// The lock of `JRN-5`.
static CHANGING: Mutex<1, ()> = Mutex::new(());

/// Set when a panic has undone all changes; the process is about to abort.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The undo of one change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Undo {
    /// Write the earlier value again.
    Write { path: PathBuf, value: String },
    /// End the processes of the memory cgroup, and remove it.
    Cgroup(PathBuf),
    /// Stop using the file as swap, and remove it.
    SwapFile(PathBuf),
    /// Stop using the zram device as swap.
    SwapOff { id: u32 },
    /// Set the zram device's earlier compressor again.
    Choose { id: u32, before: String },
    /// Empty the zram device.
    Reset { id: u32 },
    /// Remove the zram device.
    Remove { id: u32 },
}

impl fmt::Display for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Undo::Write { path, value } => write!(f, "write {} {value}", path.display()),
            Undo::Cgroup(path) => write!(f, "cgroup {}", path.display()),
            Undo::SwapFile(path) => write!(f, "swapfile {}", path.display()),
            Undo::Choose { id, before } => write!(f, "choose {id} {before}"),
            Undo::SwapOff { id } => write!(f, "swapoff {id}"),
            Undo::Reset { id } => write!(f, "reset {id}"),
            Undo::Remove { id } => write!(f, "remove {id}"),
        }
    }
}

impl Undo {
    /// Reads a line. The paths are ours, and contain no blanks.
    fn parse(line: &str) -> Option<Undo> {
        let (verb, rest) = line.split_once(' ')?;
        let id = || rest.parse().ok();
        Some(match verb {
            "write" => {
                let (path, value) = rest.split_once(' ')?;
                Undo::Write { path: path.into(), value: value.to_owned() }
            }
            "choose" => {
                let (id, before) = rest.split_once(' ')?;
                Undo::Choose { id: id.parse().ok()?, before: before.to_owned() }
            }
            "cgroup" => Undo::Cgroup(rest.into()),
            "swapfile" => Undo::SwapFile(rest.into()),
            "swapoff" => Undo::SwapOff { id: id()? },
            "reset" => Undo::Reset { id: id()? },
            "remove" => Undo::Remove { id: id()? },
            _ => return None,
        })
    }

    /// Undoes the change.
    fn perform(&self) -> io::Result<()> {
        match self {
            Undo::Write { path, value } => fs::write(path, value),
            Undo::Choose { id, before } => zram::choose_again(*id, before),
            Undo::Cgroup(path) => remove_cgroup(path),
            Undo::SwapFile(path) => swap_file::remove(path),
            Undo::SwapOff { id } => zram::swap_off(*id),
            Undo::Reset { id } => zram::reset(*id),
            Undo::Remove { id } => zram::remove(*id),
        }
    }
}

/// Kills the processes of the cgroup, and removes it.
fn remove_cgroup(path: &Path) -> io::Result<()> {
    for _ in 0..100 {
        let members = match fs::read_to_string(path.join("cgroup.procs")) {
            Ok(members) => members,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for pid in members.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0) {
            // It may have ended by itself in the meantime.
            let _already_gone = os::signal(pid, libc::SIGKILL);
        }
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The kernel is still ending the processes.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    fs::remove_dir(path)
}

/// The open journal, with its lock held. Dropping it undoes everything.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal at `path`, locks it, and undoes what a killed run left.
    pub(crate) fn open(path: &Path) -> io::Result<Journal> {
        let file = open_locked(path)?;
        let journal = Journal { path: path.to_owned(), file };
        if !fs::read_to_string(path)?.is_empty() {
            eprintln!("zfolio: undoing what an earlier run, killed, left behind");
            journal.undo()?;
        }
        Ok(journal)
    }

    /// Records the undo of a change, and makes the change (`JRN-1`, `JRN-5`).
    pub(crate) fn change(
        &self,
        undo: &Undo,
        make: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _alone = CHANGING.lock();
        if PANICKED.load(Relaxed) {
            return Err(io::Error::other("a thread has panicked"));
        }
        // One write call, so that a line is written completely or not at all.
        (&self.file).write_all(format!("{undo}\n").as_bytes())?;
        make()
    }

    /// Writes `value` to `path`; undoing writes `before`.
    pub(crate) fn write(&self, path: &Path, before: &str, value: &str) -> io::Result<()> {
        let undo = Undo::Write { path: path.to_owned(), value: before.to_owned() };
        self.change(&undo, || fs::write(path, value).map_err(|error| at(path, &error)))
    }

    /// Undoes every line, starting with the last.
    ///
    /// # Errors
    ///
    /// One line for each change that could not be undone; these stay in the journal.
    pub(crate) fn undo(&self) -> io::Result<()> {
        let _alone = CHANGING.lock();
        undo_lines(&self.path)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let undone = self.undo().and_then(|()| fs::remove_file(&self.path));
        if let Err(error) = undone {
            eprintln!("zfolio: not put back: {error}");
        }
    }
}

/// Opens the file at `path` and locks it (`JRN-4`).
fn open_locked(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|error| at(path, &error))?;
        // The child of a killed run holds its lock until it calls exec: wait a little longer than
        // that.
        let mut locked = os::lock(&file);
        for _ in 0..10 {
            if !locked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
            locked = os::lock(&file);
        }
        locked.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::other("another zfolio bench is using the kernel's zram now")
            }
            _ => at(path, &error),
        })?;
        // The earlier holder of the lock may have removed the file after it was opened here.
        let is_the_one = |named: fs::Metadata| Ok(named.ino() == file.metadata()?.ino());
        if fs::metadata(path).and_then(is_the_one).unwrap_or(false) {
            return Ok(file);
        }
    }
}

/// An error with the name of the file.
pub(crate) fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Undoes the lines of the journal at `path`; only lines that failed stay in it.
fn undo_lines(path: &Path) -> io::Result<()> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(at(path, &error)),
    };
    let (mut kept, mut errors) = (Vec::new(), Vec::new());
    for line in text.lines().rev() {
        // A line that cannot be read is from another version, so it cannot be undone safely.
        let outcome = Undo::parse(line).map(|undo| undo.perform());
        if let Some(Err(error)) = outcome {
            errors.push(format!("{line}: {error}"));
            kept.push(format!("{line}\n"));
        }
    }
    kept.reverse();
    fs::write(path, kept.concat())?;
    if errors.is_empty() { Ok(()) } else { Err(io::Error::other(errors.join("; "))) }
}

/// Makes a panic undo the journal at [`PATH`] before the process aborts.
pub(crate) fn undo_on_panic() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // If the panic came from inside a change, this thread holds the lock itself: continue
        // without it.
        let mut alone = CHANGING.try_lock();
        for _ in 0..500 {
            if alone.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            alone = CHANGING.try_lock();
        }
        if let Err(error) = undo_lines(Path::new(PATH)) {
            eprintln!("zfolio: not put back: {error}");
        }
        // Relaxed: the lock orders this store for every thread that reads it.
        PANICKED.store(true, Relaxed);
        drop(alone);
        previous(panic);
    }));
}

#[cfg(test)]
mod tests {
    use super::{Journal, Undo};
    use std::fs;

    #[test]
    fn a_line_reads_back_as_it_was_written() {
        for undo in [
            Undo::Write { path: "/sys/x/enabled".into(), value: "never".into() },
            Undo::Cgroup("/sys/fs/cgroup/memory/zfolio-bench".into()),
            Undo::SwapFile("/var/tmp/zfolio-bench-swap-1".into()),
            Undo::Choose { id: 1, before: "lzo-rle".into() },
            Undo::SwapOff { id: 1 },
            Undo::Reset { id: 2 },
            Undo::Remove { id: 3 },
        ] {
            assert_eq!(Undo::parse(&undo.to_string()), Some(undo));
        }
        assert_eq!(Undo::parse("swapoff"), None);
        assert_eq!(Undo::parse("format /dev/vda"), None);
    }

    /// Goal: the next run undoes the changes of a killed run, last change first; it does not undo
    /// those of a run that is still alive. Method: a journal is written as SIGKILL would leave it,
    /// and opened twice.
    #[test]
    fn what_a_killed_run_left_is_undone() {
        let folder = std::env::temp_dir().join(format!("zfolio-journal-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder of our own");
        let (path, setting) = (folder.join("journal"), folder.join("setting"));
        fs::write(&setting, "third").expect("our own file");
        let (first, second) = ("first".to_owned(), "second".to_owned());
        let lines = [first, second].map(|value| {
            let undo = Undo::Write { path: setting.clone(), value };
            format!("{undo}\n")
        });
        fs::write(&path, lines.concat()).expect("our own file");
        let journal = Journal::open(&path).expect("nobody has the lock");
        assert_eq!(fs::read_to_string(&setting).expect("our own file"), "first");
        assert_eq!(fs::read_to_string(&path).expect("the journal"), "");
        journal.write(&setting, "first", "changed").expect("our own file");
        let refused = Journal::open(&path).expect_err("JRN-4: the lock is held");
        assert!(refused.to_string().contains("another zfolio bench"), "{refused}");
        assert_eq!(fs::read_to_string(&setting).expect("our own file"), "changed");
        drop(journal);
        assert_eq!(fs::read_to_string(&setting).expect("our own file"), "first");
        assert!(!path.exists(), "an empty journal is removed");
        fs::remove_dir_all(&folder).expect("our own folder");
    }
}
