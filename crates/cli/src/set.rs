//! `zfolio set`: another limit, another share of time to be waited, or other bounds of what goes to disk, for what runs
//! already.
//!
//! The words are written into the file in which the process publishes its figures; its background
//! thread finds them there at its next look, 20 ms later at most. A limit that the processes of a run
//! share is written into its ledger, and `zfolio run` acts on it; so is a budget for writes, which all
//! of them find there.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use zfolio_core::size;
use zfolio_core::zcomp::asked::{self, Refused};
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
/// If the process is not managed or belongs to another user, or if its file cannot be written.
pub(crate) fn set(arguments: &SetArgs) -> Result<ExitCode, Failure> {
    let pid = arguments.pid;
    let mut names: Vec<_> = arguments.settings.iter().map(|setting| setting.name()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
        return Err(Failure::argument(format!(
            "{}: given more than once; accepted: once",
            twice[0]
        )));
    }
    let shared = shared_limit_of(pid);
    let (mut shared_limit, mut own) = (None, Vec::new());
    // Nothing is asked for if a part of it is refused.
    if arguments.settings.iter().any(|setting| setting.of_disk().is_some()) {
        for file in &files_of(pid)? {
            arguments.settings.iter().try_for_each(|setting| check_spills(file, *setting))?;
        }
    }
    for setting in &arguments.settings {
        match (setting, &shared) {
            (Setting::Limit(bytes), Some(Shared { run, directory })) => {
                let asked = ledger_file::ask_limit(directory, *run, *bytes);
                asked.map_err(|error| unwritten(*run, &error))?;
                shared_limit = Some((*run, *bytes));
            }
            (Setting::WriteBudget(budget), Some(Shared { run, directory })) => {
                let set = ledger_file::set_write_budget(directory, *run, *budget);
                set.map_err(|error| unwritten(*run, &error))?;
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
    let silent_run = loop {
        let silent = files.iter().filter(|file| !own.iter().all(|one| holds(file, *one))).count();
        let silent_run = shared_limit
            .filter(|(run, bytes)| ledger_of(*run).is_some_and(|(_, total)| total != *bytes));
        if silent == 0 && silent_run.is_none() {
            break None;
        }
        if clock::monotonic_ns() > until {
            tell_who_is_silent(pid, silent, files.len(), silent_run.map(|(run, _)| run));
            break silent_run;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    for file in &files {
        own.iter().try_for_each(|setting| check_answer(file, *setting))?;
    }
    // A run that does not answer has its old limit.
    let held = shared_limit.filter(|(run, _)| *run != pid && silent_run.is_none());
    if let Some((run, bytes)) = held {
        tell_who_shares(pid, run, bytes);
    }
    Ok(ExitCode::SUCCESS)
}

/// One line for `silent` of `all` processes that do not answer, and for a `zfolio run` that does not.
fn tell_who_is_silent(pid: u32, silent: usize, all: usize, silent_run: Option<u32>) {
    if silent > 0 {
        eprintln!(
            "zfolio: {pid}: {silent} of {all} processes are small and not watched yet, or stopped: \
             this will hold once they have mapped more"
        );
    }
    if let Some(run) = silent_run {
        eprintln!("zfolio: {run}: 'zfolio run' does not answer: it is stopped");
    }
}

/// One line if other processes share the limit that was set for one.
fn tell_who_shares(pid: u32, run: u32, bytes: u64) {
    let others = files_of(run).map_or(0, |files| files.len().saturating_sub(1));
    if others > 0 {
        let limit = size::display(bytes);
        eprintln!(
            "zfolio: {pid} shares its limit with {others} more: that of run {run} is {limit} now"
        );
    }
}

/// A run whose processes share a limit, and where its ledger is.
struct Shared {
    run: u32,
    directory: PathBuf,
}

/// The run whose limit a setting for `pid` means: it is that run's `zfolio run`, or one of its processes.
fn shared_limit_of(pid: u32) -> Option<Shared> {
    let of = |run| ledger_of(run).map(|(directory, _)| Shared { run, directory });
    of(pid).or_else(|| of(u32::try_from(stat::find(pid).ok()?.run()).ok()?))
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

/// Refuses a setting for what goes to disk, if nothing does.
fn check_spills(file: &StatsFile, setting: Setting) -> Result<(), Failure> {
    let Some(name) = setting.of_disk() else { return Ok(()) };
    match file.stats.figures.max_pool_percent.load(Relaxed) {
        0 => Err(Failure::argument(format!(
            "{name}: process {} has no disk to write to; accepted: for a process that was started with one \
             (--spill)",
            file.pid
        ))),
        _ => Ok(()),
    }
}

/// An algorithm that the process has refused is an error.
fn check_answer(file: &StatsFile, setting: Setting) -> Result<(), Failure> {
    let Setting::Algorithm(word) = setting else { return Ok(()) };
    let Some(now) = file.again() else { return Ok(()) };
    let answer = asked::answered(word, now.stats.algorithm_answer.load(Relaxed));
    let Some(Err(refused)) = answer else { return Ok(()) };
    let (pid, algorithm) = (file.pid, now.stats.algorithm());
    Err(match refused {
        Refused::Auto => Failure::argument(format!(
            "algorithm: process {pid} was started with one algorithm, and 'auto' needs two from the start; \
             accepted: a name that 'zfolio algorithms' lists"
        )),
        Refused::Full => Failure::argument(format!(
            "algorithm: process {pid} has used as many algorithms as it can; accepted: one of them, as {algorithm}"
        )),
        Refused::SetUp => Failure::machine(format!(
            "algorithm: process {pid} cannot set it up: no memory, or another version of zfolio"
        )),
    })
}

fn ask(file: &StatsFile, setting: Setting) -> Result<(), Failure> {
    match setting {
        Setting::Limit(bytes) => file.ask_limit(bytes),
        Setting::Stall(ppm) => file.ask_stall(ppm),
        Setting::MaxPoolPercent(percent) => file.ask_max_pool_percent(percent),
        Setting::AcceptThresholdPercent(percent) => file.ask_accept_threshold_percent(percent),
        Setting::WriteBudget(budget) => file.ask_write_budget(budget),
        Setting::Algorithm(word) => file.ask_algorithm(word),
    }
    .map_err(|error| unwritten(file.pid, &error))
}

/// Whether the process has done what it was asked for, or has ended.
fn holds(file: &StatsFile, setting: Setting) -> bool {
    let Some(now) = file.again() else { return true };
    let figures = &now.stats.figures;
    let (figure, value) = match setting {
        Setting::Limit(bytes) => (&figures.limit_bytes, bytes),
        Setting::Stall(ppm) => (&figures.stall_ppm, ppm.into()),
        Setting::MaxPoolPercent(percent) => (&figures.max_pool_percent, percent.into()),
        Setting::AcceptThresholdPercent(percent) => {
            (&figures.accept_threshold_percent, percent.into())
        }
        Setting::WriteBudget(budget) => {
            let seconds = figures.write_budget_s.load(Relaxed);
            let is_same = figures.write_budget_bytes.load(Relaxed) == budget.bytes();
            return is_same && seconds == budget.period().seconds();
        }
        Setting::Algorithm(word) => {
            return asked::answered(word, now.stats.algorithm_answer.load(Relaxed)).is_some();
        }
    };
    figure.load(Relaxed) == value
}

fn unwritten(pid: u32, error: &io::Error) -> Failure {
    Failure::machine(format!("PID {pid}: its file in /dev/shm cannot be written: {error}"))
}
