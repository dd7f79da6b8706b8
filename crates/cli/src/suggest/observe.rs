//! The observed run: `zfolio run` as a child, and the figures of its processes.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::Value;
use zfolio_core::stats::Stats;
use zfolio_sys::probe::child::{self, Change, Program, Signals};
use zfolio_sys::{clock, probe};

use super::curve::{Counts, Process};
use crate::failure::Failure;
use crate::stats_file;

/// How often the figures are read. Waits after the last reading count as waits for fresh memory.
const LOOK: Duration = Duration::from_millis(50);

/// The names of zfolio's own threads start with this.
const OWN_THREADS: &str = "zfolio-";

/// A run, and what was observed.
pub(super) struct Observed {
    pub(super) change: Change,
    pub(super) elapsed_ns: u64,
    /// CPU time of the program, without zfolio's threads.
    pub(super) ran_ns: u64,
    pub(super) processes: Vec<Process>,
    /// The report of `zfolio run --stats`; `None` if the program was not run.
    pub(super) report: Option<Value>,
}

/// Blocks the signals that would end this process while the program runs; once for all runs.
pub(super) fn signals() -> Result<Signals, Failure> {
    Signals::block().map_err(|error| Failure::machine(format!("signals cannot be taken: {error}")))
}

/// Runs `zfolio run` with `options` and, if `follow` is above 0, with a limit that follows the
/// need.
pub(super) fn run(
    signals: &Signals,
    options: Vec<OsString>,
    program: &[OsString],
    follow_per_mille: u64,
) -> Result<Observed, Failure> {
    let machine =
        |what: &str, why: &dyn std::fmt::Display| Failure::machine(format!("{what}: {why}"));
    let zfolio = env::current_exe().map_err(|error| machine("zfolio itself", &error))?;
    let report = Report::new()?;
    let mut words: Vec<OsString> = vec!["zfolio".into(), "run".into(), "--quiet".into()];
    words.extend(["--stats".into(), report.0.clone().into_os_string()]);
    words.extend(options);
    words.push("--".into());
    words.extend(program.iter().cloned());
    let words = words.into_iter().map(c_string).collect::<Result<Vec<_>, _>>()?;
    let follow = (follow_per_mille > 0).then(|| format!("ZFOLIO_FOLLOW={follow_per_mille}").into());
    let environment = env::vars_os()
        .filter(|(name, _)| name != "ZFOLIO_FOLLOW")
        .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
        .map(OsString::from_vec)
        .chain(follow)
        .map(c_string)
        .collect::<Result<Vec<_>, _>>()?;
    let path = c_string(zfolio.into())?;
    let started = Program {
        path: &path,
        arguments: &words,
        environment: &environment,
        output: None,
        orphaned: libc::SIGKILL,
    };
    let begun_ns = clock::monotonic_ns();
    let pid = signals.start(&started).map_err(|error| machine("zfolio run", &error))?;
    let mut looks = Looks::default();
    let change = loop {
        looks.look(pid);
        match signals.next(LOOK).map_err(|error| machine("signals", &error))? {
            Some(signal) if signal.number == libc::SIGCHLD => {
                let ended = end_of(pid).map_err(|error| machine("zfolio run", &error))?;
                if let Some(change) = ended {
                    break change;
                }
            }
            // A signal of the terminal has reached the program as well, which decides what to do.
            Some(signal) if signal.from_process && signal.sender != pid => {
                child::send(pid, signal.number).ok();
            }
            _ => {}
        }
    };
    let elapsed_ns = clock::monotonic_ns() - begun_ns;
    let report = report.read();
    let (ran_ns, processes) = looks.end();
    Ok(Observed { change, elapsed_ns, ran_ns, processes, report })
}

fn c_string(text: OsString) -> Result<CString, Failure> {
    CString::new(text.into_vec())
        .map_err(|_| Failure::argument("PROGRAM ARGS: an argument holds a zero byte"))
}

/// Handles all changes of children; returns how `pid` ended, if it did.
fn end_of(pid: i32) -> std::io::Result<Option<Change>> {
    while let Some((who, change, _)) = child::changed()? {
        match change {
            _ if who != pid => {}
            // The child stopped with its program; so this process stops too, until it is continued.
            Change::Stopped(_) => child::stop_here(),
            end => return Ok(Some(end)),
        }
    }
    Ok(None)
}

/// The file of `--stats`, removed when dropped.
struct Report(PathBuf);

impl Report {
    /// Makes it in the directory of the statistics, which belongs to this user alone.
    fn new() -> Result<Report, Failure> {
        let directory = stats_file::prepare_directory(probe::effective_uid());
        let directory = directory.map_err(Failure::machine)?;
        Ok(Report(directory.join(format!("suggest-{}.json", std::process::id()))))
    }

    fn read(&self) -> Option<Value> {
        serde_json::from_slice(&fs::read(&self.0).ok()?).ok()
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        // The file does not exist if the run was refused.
        fs::remove_file(&self.0).ok();
    }
}

/// What was observed of the processes of a run.
#[derive(Default)]
struct Looks {
    /// By PID and start time.
    processes: BTreeMap<(u32, u64), Seen>,
}

#[derive(Default)]
struct Seen {
    process: Process,
    ran_ns: u64,
}

impl Looks {
    fn look(&mut self, run: i32) {
        let directory = stats_file::directory(probe::effective_uid());
        for file in stats_file::list(&directory) {
            if i64::try_from(file.run()) != Ok(i64::from(run)) {
                continue;
            }
            let key = (file.pid, file.stats.start_ticks.load(Relaxed));
            let seen = self.processes.entry(key).or_default();
            seen.process.look(counts(&file.stats), &file.stats.measured());
            seen.ran_ns = ran_ns(file.pid).unwrap_or(seen.ran_ns);
        }
    }

    fn end(self) -> (u64, Vec<Process>) {
        let ran_ns = self.processes.values().map(|seen| seen.ran_ns).sum();
        // A process that stayed below the first limit needs no estimate.
        let processes = self.processes.into_values().map(|seen| seen.process);
        (ran_ns, processes.filter(|process| process.need_bytes() > 0).collect())
    }
}

fn counts(stats: &Stats) -> Counts {
    Counts {
        refaults: stats.refaults.each().collect(),
        fresh_ns: stats.fault_zero_ns.sum(),
        fresh_faults: stats.figures.faults_zero.load(Relaxed),
        stall_ns: stats.figures.stall_ns.load(Relaxed),
    }
}

/// CPU time of the program's own threads: that of the process without zfolio's threads.
fn ran_ns(pid: u32) -> Option<u64> {
    let all = ticks(Path::new(&format!("/proc/{pid}/stat")))?.1;
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of_task = |task: fs::DirEntry| ticks(&task.path().join("stat"));
    let own = tasks.flatten().filter_map(of_task).filter(|(name, _)| name.starts_with(OWN_THREADS));
    let own: u64 = own.map(|(_, ticks)| ticks).sum();
    Some(all.saturating_sub(own) * (1_000_000_000 / probe::clock_ticks().max(1)))
}

/// Name and CPU time in clock ticks of a process or thread: fields 2, 14 and 15 of its `stat`.
fn ticks(path: &Path) -> Option<(String, u64)> {
    let text = String::from_utf8_lossy(&fs::read(path).ok()?).into_owned();
    let (name, fields) = text.split_once('(')?.1.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(14 - 3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some((name.to_owned(), next()? + next()?))
}
