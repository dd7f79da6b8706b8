//! The journal of what was changed in the system, and the way back.
//!
//! Every change is written here *before* it is made, as one line of text with its undo. Undoing goes
//! from the last line to the first. The same code undoes on success, on failure, on a signal, in the
//! panic hook (release builds abort, so no `Drop` runs), and for what a killed run left behind.
//!
//! # Invariants
//!
//! - `JRN-1` A change that is in force has its line in the file.
//! - `JRN-2` Undoing a line twice, or one whose change was never made, does nothing.
//! - `JRN-3` A zram device is touched only if it carries our swap label, or holds no data at all.
//! - `JRN-4` Who holds the lock of the file is alone; so lines found at the start are left over.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::zram;
use crate::os;

/// Where the journal is: gone after a restart, like everything that it can undo.
pub(crate) const PATH: &str = "/run/zfolio-bench.journal";

/// One way back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Undo {
    /// Write a value that was there before.
    Write { path: PathBuf, value: String },
    /// End what runs in the memory cgroup, and remove it.
    Cgroup(PathBuf),
    /// Take the zram device out of use as swap.
    SwapOff { id: u32 },
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
            Undo::SwapOff { id } => write!(f, "swapoff {id}"),
            Undo::Reset { id } => write!(f, "reset {id}"),
            Undo::Remove { id } => write!(f, "remove {id}"),
        }
    }
}

impl Undo {
    /// Reads a line. The paths are ours and hold no blanks.
    fn parse(line: &str) -> Option<Undo> {
        let (verb, rest) = line.split_once(' ')?;
        let id = || rest.parse().ok();
        Some(match verb {
            "write" => {
                let (path, value) = rest.split_once(' ')?;
                Undo::Write { path: path.into(), value: value.to_owned() }
            }
            "cgroup" => Undo::Cgroup(rest.into()),
            "swapoff" => Undo::SwapOff { id: id()? },
            "reset" => Undo::Reset { id: id()? },
            "remove" => Undo::Remove { id: id()? },
            _ => return None,
        })
    }

    /// Does it.
    fn perform(&self) -> io::Result<()> {
        match self {
            Undo::Write { path, value } => fs::write(path, value),
            Undo::Cgroup(path) => remove_cgroup(path),
            Undo::SwapOff { id } => zram::swap_off(*id),
            Undo::Reset { id } => zram::reset(*id),
            Undo::Remove { id } => zram::remove(*id),
        }
    }
}

/// Kills what is left in the group and removes it.
fn remove_cgroup(path: &Path) -> io::Result<()> {
    for _ in 0..100 {
        let members = match fs::read_to_string(path.join("cgroup.procs")) {
            Ok(members) => members,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for pid in members.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0) {
            // It may have ended by itself meanwhile, which is what we want.
            let _already_gone = os::kill(pid);
        }
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The kernel is still taking the processes down.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    fs::remove_dir(path)
}

/// The open, locked journal. Dropping it undoes everything.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal at `path`, takes its lock, and undoes what a killed run left.
    pub(crate) fn open(path: &Path) -> io::Result<Journal> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        if let Err(error) = os::lock(&file) {
            return Err(match error.kind() {
                io::ErrorKind::WouldBlock => {
                    io::Error::other("another zfolio bench is using the kernel's zram now")
                }
                _ => error,
            });
        }
        let journal = Journal { path: path.to_owned(), file };
        if !fs::read_to_string(path)?.is_empty() {
            eprintln!("zfolio bench: undoing what an earlier run, killed, left behind");
            journal.undo()?;
        }
        Ok(journal)
    }

    /// Notes the way back of a change that is about to be made (`JRN-1`).
    pub(crate) fn note(&self, undo: &Undo) -> io::Result<()> {
        // One write call: a line is there whole or not at all.
        (&self.file).write_all(format!("{undo}\n").as_bytes())
    }

    /// Writes `value` to `path`, to be put back to `before`.
    pub(crate) fn write(&self, path: &Path, before: &str, value: &str) -> io::Result<()> {
        self.note(&Undo::Write { path: path.to_owned(), value: before.to_owned() })?;
        fs::write(path, value).map_err(|error| at(path, &error))
    }

    /// Undoes every line, the last first.
    ///
    /// # Errors
    ///
    /// One line for each change that could not be undone; those stay in the journal.
    pub(crate) fn undo(&self) -> io::Result<()> {
        undo_all(&self.path)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            eprintln!("zfolio bench: not put back: {error}");
        }
    }
}

/// An error that names the file.
pub(crate) fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Undoes what the journal at `path` says, and keeps in it only what failed.
pub(crate) fn undo_all(path: &Path) -> io::Result<()> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(at(path, &error)),
    };
    let (mut kept, mut told) = (Vec::new(), Vec::new());
    for line in text.lines().rev() {
        // A line that we cannot read is from another version: nothing safe can be done with it.
        let outcome = Undo::parse(line).map(|undo| undo.perform());
        if let Some(Err(error)) = outcome {
            told.push(format!("{line}: {error}"));
            kept.push(format!("{line}\n"));
        }
    }
    kept.reverse();
    fs::write(path, kept.concat())?;
    if told.is_empty() { Ok(()) } else { Err(io::Error::other(told.join("; "))) }
}

/// Makes a panic undo the journal at [`PATH`] before the process aborts.
pub(crate) fn undo_on_panic() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if let Err(error) = undo_all(Path::new(PATH)) {
            eprintln!("zfolio bench: not put back: {error}");
        }
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
            Undo::SwapOff { id: 1 },
            Undo::Reset { id: 2 },
            Undo::Remove { id: 3 },
        ] {
            assert_eq!(Undo::parse(&undo.to_string()), Some(undo));
        }
        assert_eq!(Undo::parse("swapoff"), None);
        assert_eq!(Undo::parse("format /dev/vda"), None);
    }

    /// Goal: a killed run's changes are undone by the next one, the last first; a live run's are not.
    /// Method: a journal is written as SIGKILL would leave it, and opened, twice at once.
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
        fs::remove_dir_all(&folder).expect("our own folder");
    }
}
