//! `zfolio set`: another limit, or another share of time to be waited, for what runs already.
//!
//! The words are written into the file in which the process publishes its figures; its background
//! thread finds them there at its next look, 20 ms later at most. For a run whose processes share a
//! limit they are written into its ledger, and `zfolio run` acts on them.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zfolio_sys::clock;

use crate::arguments::{SetArgs, Setting};
use crate::failure::Failure;
use crate::ledger_file;
use crate::stat;
use crate::stats_file::{self, StatsFile};

/// How long to wait until what was asked for holds.
const ANSWER_NS: u64 = 2_000_000_000;

/// Asks for other settings, and waits until they hold.
///
/// # Errors
///
/// If the process is not managed or belongs to another user, if the setting is not its own, or if
/// its file cannot be written.
pub(crate) fn set(arguments: &SetArgs) -> Result<ExitCode, Failure> {
    let pid = arguments.pid;
    let (mut shared_limit, mut own) = (None, Vec::new());
    for setting in &arguments.settings {
        match (setting, ledger_of(pid)) {
            (Setting::Limit(bytes), Some((directory, _))) => {
                let asked = ledger_file::ask_limit(&directory, pid, *bytes);
                asked.map_err(|error| unwritten(pid, &error))?;
                shared_limit = Some(*bytes);
            }
            _ => own.push(*setting),
        }
    }
    let files = if own.is_empty() { Vec::new() } else { files_of(pid)? };
    // All processes are asked before any is waited for.
    for file in &files {
        own.iter().try_for_each(|setting| ask(file, *setting))?;
    }
    let until = clock::monotonic_ns() + ANSWER_NS;
    loop {
        let silent = files.iter().filter(|file| !own.iter().all(|one| holds(file, *one))).count();
        let is_shared_held =
            shared_limit.is_none_or(|bytes| ledger_of(pid).is_none_or(|(_, total)| total == bytes));
        if silent == 0 && is_shared_held {
            return Ok(ExitCode::SUCCESS);
        }
        if clock::monotonic_ns() > until {
            tell_who_is_silent(pid, silent, files.len());
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One line for `silent` of `all` processes that do not answer; 0: it is `zfolio run` that does not.
fn tell_who_is_silent(pid: u32, silent: usize, all: usize) {
    match silent {
        0 => eprintln!("zfolio: {pid}: 'zfolio run' does not answer: it is stopped"),
        _ => eprintln!(
            "zfolio: {pid}: {silent} of {all} processes are small and not watched yet, or stopped: \
             this will hold once they have mapped more"
        ),
    }
}

/// The directory and the limit of the ledger of a run.
fn ledger_of(run: u32) -> Option<(PathBuf, u64)> {
    stats_file::directories().into_iter().find_map(|(_, directory)| {
        let ledger = ledger_file::read(&directory, run)?;
        Some((directory, ledger.total_bytes()))
    })
}

/// The files of a process, or of all processes of a run.
fn files_of(pid: u32) -> Result<Vec<StatsFile>, Failure> {
    let directories = stats_file::directories().into_iter();
    let files: Vec<StatsFile> =
        directories.flat_map(|(_, directory)| stats_file::running(&directory, pid)).collect();
    if files.is_empty() { Ok(vec![stat::find(pid)?]) } else { Ok(files) }
}

fn ask(file: &StatsFile, setting: Setting) -> Result<(), Failure> {
    let run = u32::try_from(file.run()).unwrap_or(0);
    if matches!(setting, Setting::Limit(_)) && ledger_of(run).is_some() {
        return Err(Failure::argument(format!(
            "limit: process {} shares the limit of a run; accepted: 'zfolio set {run} limit=...'",
            file.pid
        )));
    }
    match setting {
        Setting::Limit(bytes) => file.ask_limit(bytes),
        Setting::Stall(ppm) => file.ask_stall(ppm),
    }
    .map_err(|error| unwritten(file.pid, &error))
}

/// Whether the process has done what it was asked for, or has ended.
fn holds(file: &StatsFile, setting: Setting) -> bool {
    file.again().is_none_or(|now| match setting {
        Setting::Limit(bytes) => now.stats.figures.limit_bytes.load(Relaxed) == bytes,
        Setting::Stall(ppm) => now.stats.figures.stall_ppm.load(Relaxed) == u64::from(ppm),
    })
}

fn unwritten(pid: u32, error: &io::Error) -> Failure {
    Failure::machine(format!("PID {pid}: its file in /dev/shm cannot be written: {error}"))
}
