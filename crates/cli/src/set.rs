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

use zfolio_core::ledger::Ledger;
use zfolio_core::size;
use zfolio_core::stats::Stats;
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
/// If the process is not managed or belongs to another user, if its run has ended and the setting is one that the run's
/// processes share, or if its file cannot be written.
pub(crate) fn set(arguments: &SetArgs) -> Result<ExitCode, Failure> {
    let (pid, settings) = (arguments.pid, &arguments.settings);
    check_names(settings)?;
    let shared = shared_limit_of(pid);
    let is_own = |setting: &Setting| shared.is_none() || !is_of_run(*setting);
    let own: Vec<Setting> = settings.iter().copied().filter(is_own).collect();
    // Nothing is asked for if a part of it is refused, so all that can be refused here is checked first.
    if let Some(Shared { run, has_ended: true, .. }) = shared {
        if settings.iter().any(|setting| matches!(setting, Setting::Limit(_))) {
            return Err(is_over("limit", run.into()));
        }
    }
    let needs_files = !own.is_empty() || settings.iter().any(|setting| setting.of_disk().is_some());
    let files = if needs_files { files_of(pid)? } else { Vec::new() };
    for file in &files {
        own.iter().try_for_each(|setting| check_run(file, *setting))?;
        settings.iter().try_for_each(|setting| check_spills(file, *setting))?;
    }
    let shared_limit = shared.map_or(Ok(None), |shared| ask_run(&shared, settings))?;
    // All processes are asked before any is waited for.
    for file in &files {
        own.iter().try_for_each(|setting| ask(file, *setting))?;
    }
    await_answers(pid, &files, &own, shared_limit);
    for file in &files {
        own.iter().try_for_each(|setting| check_answer(file, *setting))?;
    }
    if let Some((run, bytes)) = shared_limit.filter(|(run, _)| *run != pid) {
        tell_who_shares(pid, run, bytes);
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a setting that is given twice.
fn check_names(settings: &[Setting]) -> Result<(), Failure> {
    let mut names: Vec<_> = settings.iter().map(|setting| setting.name()).collect();
    names.sort_unstable();
    match names.windows(2).find(|two| two[0] == two[1]) {
        None => Ok(()),
        Some(twice) => {
            Err(Failure::argument(format!("{}: given more than once; accepted: once", twice[0])))
        }
    }
}

/// Whether the processes of a run share what this setting changes, unless the run has `--per-process`.
fn is_of_run(setting: Setting) -> bool {
    matches!(setting, Setting::Limit(_) | Setting::WriteBudget(_))
}

/// Asks for what the processes of a run share. The run and the limit, if that is a part of it.
fn ask_run(shared: &Shared, settings: &[Setting]) -> Result<Option<(u32, u64)>, Failure> {
    let Shared { run, directory, .. } = shared;
    let mut limit = None;
    for setting in settings {
        let asked = match *setting {
            Setting::Limit(bytes) => {
                limit = Some((*run, bytes));
                ledger_file::ask_limit(directory, *run, bytes)
            }
            Setting::WriteBudget(budget) => ledger_file::set_write_budget(directory, *run, budget),
            _ => Ok(()),
        };
        asked.map_err(|error| unwritten(*run, &error))?;
    }
    Ok(limit)
}

/// Waits until all processes, and the run whose processes share a limit, have done what they were asked for; for those
/// that do not in time there is a line each.
fn await_answers(pid: u32, files: &[StatsFile], own: &[Setting], shared_limit: Option<(u32, u64)>) {
    let until = clock::monotonic_ns() + ANSWER_NS;
    loop {
        let silent = files.iter().filter(|file| !own.iter().all(|one| holds(file, *one))).count();
        let silent_run = shared_limit.filter(|(run, bytes)| is_silent(*run, *bytes));
        if silent == 0 && silent_run.is_none() {
            return;
        }
        if clock::monotonic_ns() > until {
            return tell_who_is_silent(pid, silent, files.len(), silent_run.map(|(run, _)| run));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a run has not acted on the limit that it was asked for. `--limit auto`, or another user of this command, may
/// have asked for another one meanwhile: the run does not owe an answer to this one any more.
fn is_silent(run: u32, bytes: u64) -> bool {
    ledger_of(run)
        .is_some_and(|(_, ledger)| ledger.limit_asked() == bytes && ledger.total_bytes() != bytes)
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

/// One line if other processes share the limit that was set for one, and that is what the run has now: a run that does
/// not answer has its old limit.
fn tell_who_shares(pid: u32, run: u32, bytes: u64) {
    let others = files_of(run).map_or(0, |files| files.len().saturating_sub(1));
    let holds = ledger_of(run).is_some_and(|(_, ledger)| ledger.total_bytes() == bytes);
    if others > 0 && holds {
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
    /// The run was killed: it has left its ledger, which its processes use, and no longer changes the limit.
    has_ended: bool,
}

/// The run whose limit a setting for `pid` means: it is that run's `zfolio run`, or one of its processes.
fn shared_limit_of(pid: u32) -> Option<Shared> {
    let of = |run| {
        let (directory, ledger) = ledger_of(run)?;
        Some(Shared { run, directory, has_ended: !ledger_file::is_followed(&ledger) })
    };
    // The number of a run that was killed may be that of another run's process by now.
    let (same, of_its_run) = (of(pid), || of(u32::try_from(stat::find(pid).ok()?.run()).ok()?));
    match same {
        Some(Shared { has_ended: false, .. }) => same,
        _ => of_its_run().or(same),
    }
}

/// The ledger of a run, and its directory.
fn ledger_of(run: u32) -> Option<(PathBuf, Box<Ledger>)> {
    stats_file::directories().into_iter().find_map(|(_, directory)| {
        let ledger = ledger_file::read(&directory, run)?;
        Some((directory, ledger))
    })
}

/// The setting `name` is one that the processes of `run` share, and there is nobody who changes it.
fn is_over(name: &str, run: u64) -> Failure {
    // The processes of a run of the superuser may become another user's, who sees nothing of the run but its number.
    let is_there = u32::try_from(run).is_ok_and(|run| stats_file::start_ticks(run).is_some());
    let or_else = if is_there { ", or is another user's" } else { "" };
    Failure::argument(format!(
        "{name}: run {run} has ended{or_else}, and nobody changes what its processes share; accepted: for a process \
         whose run goes on, or that was started with --per-process"
    ))
}

/// Refuses a setting that the process shares with its run, where there is no ledger that it could be written into: the
/// process would not look at a word of its own.
fn check_run(file: &StatsFile, setting: Setting) -> Result<(), Failure> {
    let is_shared = is_of_run(setting) && file.stats.has_share.load(Relaxed) != 0;
    if is_shared { Err(is_over(setting.name(), file.run())) } else { Ok(()) }
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
    file.again().is_none_or(|now| is_done(&now.stats, setting))
}

/// Whether a process with these figures has done what it was asked for.
fn is_done(stats: &Stats, setting: Setting) -> bool {
    let figures = &stats.figures;
    let (figure, value) = match setting {
        // `--limit auto --per-process`, or another user of this command, has asked for another one meanwhile.
        Setting::Limit(bytes) if stats.limit_asked.load(Relaxed) != bytes => return true,
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
            return asked::answered(word, stats.algorithm_answer.load(Relaxed)).is_some();
        }
    };
    figure.load(Relaxed) == value
}

fn unwritten(pid: u32, error: &io::Error) -> Failure {
    Failure::machine(format!("PID {pid}: its file in /dev/shm cannot be written: {error}"))
}

#[cfg(test)]
mod tests {
    use super::{is_done, is_silent, ledger_file, ledger_of, set};
    use crate::arguments::{SetArgs, Setting};
    use std::sync::atomic::Ordering::Relaxed;
    use zfolio_core::ledger::{Ledger, Owner};
    use zfolio_core::stats::Stats;
    use zfolio_sys::process;

    const MIB: u64 = 1 << 20;

    /// A ledger, which is removed when this is dropped.
    struct Run {
        run: u32,
        ledger: &'static Ledger,
    }

    impl Run {
        /// Of a run that has this number, and is seen as one in this PID namespace. `None`: there is no `/dev/shm`.
        fn new(run: u32, namespace: u32) -> Option<Run> {
            let Some(ledger) = ledger_file::create(run, 64 * MIB) else {
                eprintln!("SKIPPED: no /dev/shm");
                return None;
            };
            ledger.enter(Owner { pid: run, namespace, start_ticks: 2 }).expect("there is room");
            Some(Run { run, ledger })
        }

        /// What `zfolio set` of these settings is refused for.
        fn refusal(&self, settings: &[Setting]) -> String {
            let arguments = SetArgs { pid: self.run, settings: settings.to_vec() };
            let failure = set(&arguments).expect_err("it is refused");
            assert_eq!(failure.status(), 2);
            failure.to_string()
        }
    }

    impl Drop for Run {
        fn drop(&mut self) {
            ledger_file::remove(self.run);
        }
    }

    /// Goal: a command that is refused has changed nothing. A regression: the limit of a run was another one already
    /// when there was no process that could be asked for the rest. Method: a run that has none; it is in another PID
    /// namespace, where its number is above every one that the kernel assigns.
    #[test]
    fn a_command_that_is_refused_changes_nothing() {
        let Some(run) = Run::new(5_000_011, process::pid_namespace() ^ 1) else { return };
        for other in [Setting::Stall(1000), Setting::MaxPoolPercent(50)] {
            let line = run.refusal(&[Setting::Limit(128 * MIB), other]);
            assert!(line.contains("there is no process 5000011"), "{line}");
            assert_eq!(run.ledger.limit_asked(), 0);
        }
    }

    /// Goal: the limit of a run that was killed is refused: nobody acts on it, although its ledger is still there.
    #[test]
    fn the_limit_of_a_run_that_was_killed_is_refused() {
        let Some(run) = Run::new(5_000_012, process::pid_namespace()) else { return };
        let line = run.refusal(&[Setting::Limit(128 * MIB)]);
        assert!(line.contains("limit: run 5000012 has ended, and"), "{line}");
        assert_eq!(run.ledger.limit_asked(), 0);
    }

    /// Goal: a run whose limit somebody else has changed meanwhile is not said to be stopped, as one with
    /// `--limit auto` was, which asks for its own limit once a second.
    #[test]
    fn a_run_that_was_asked_for_another_limit_meanwhile_owes_no_answer() {
        let Some(Run { run, ledger }) = &Run::new(5_000_013, process::pid_namespace() ^ 1) else {
            return;
        };
        let ask = |mib| {
            let (directory, _) = ledger_of(*run).expect("it was just made");
            ledger_file::ask_limit(&directory, *run, mib * MIB).expect("it is ours");
        };
        ask(128);
        assert!(is_silent(*run, 128 * MIB), "it has not acted on it");
        ask(96);
        assert!(!is_silent(*run, 128 * MIB) && is_silent(*run, 96 * MIB));
        ledger.follow_asked();
        assert!(!is_silent(*run, 96 * MIB), "it has");
    }

    /// Goal: the same for a process with a limit of its own: until it has done what it was asked for last it is waited
    /// for, and not for what was asked for before.
    #[test]
    fn a_process_that_was_asked_for_another_limit_meanwhile_owes_no_answer() {
        let (stats, limit) = (Stats::default(), Setting::Limit(128 * MIB));
        stats.figures.limit_bytes.store(64 * MIB, Relaxed);
        stats.limit_asked.store(128 * MIB, Relaxed);
        assert!(!is_done(&stats, limit));
        stats.limit_asked.store(96 * MIB, Relaxed);
        assert!(is_done(&stats, limit) && !is_done(&stats, Setting::Limit(96 * MIB)));
        stats.figures.limit_bytes.store(96 * MIB, Relaxed);
        assert!(is_done(&stats, Setting::Limit(96 * MIB)));
    }
}
