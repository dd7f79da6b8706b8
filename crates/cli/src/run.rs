//! `zfolio run`: starts a program with the preload library, represents it, and prints a summary at
//! its end.
//!
//! zfolio stays as the parent. It passes on signals that a process sends to it; signals of the
//! terminal reach both, since both are in the foreground group. When the terminal stops the
//! program, zfolio stops too. When the program ends, zfolio ends in the same way: with its status,
//! or by the same signal.
//!
//! # Invariants
//!
//! - `RUN-1` Everything that can be refused is refused before the program starts.
//! - `RUN-2` This process has one thread until the program has started (`CHILD-1` of `zfolio_sys::probe::child`). Only
//!   `--metrics` adds some afterwards.

mod auto;
mod detail;
mod elf;
mod ended;
mod family;
mod keep;
mod metrics;
mod proc;
mod program;
mod quota;
mod report;
mod settings;
mod spill;
mod summary;
mod supervisor;
mod tree;
mod waits;
mod watch;

pub(crate) use detail::compression_ratio;
pub(crate) use report::process_json;
pub(crate) use spill::directory as spill_directory;

use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zfolio_block::metrics::{Address, Page};
use zfolio_core::size;
use zfolio_core::sync::Mutex;
use zfolio_sys::probe;
use zfolio_sys::probe::child::{self, Change, Signal, Signals};

use crate::allowance;
use crate::arguments::RunArgs;
use crate::failure::Failure;
use crate::ledger_file;
use crate::metrics::take_address;
use crate::output::escaped;
use crate::requirements;
use crate::stats_file;
use auto::Auto;
use ended::Ended;
use keep::Keep;
use program::Program;
use settings::Settings;
use supervisor::Supervisor;
use tree::Tree;
use watch::Watch;

/// The smallest limit of `zfolio run`: the engine's buffers and a program's memory at its start both
/// fit. The library accepts less (`zfolio_pager::LIMIT_BYTES_MIN`), since its limit is for its regions only.
pub(crate) const RUN_LIMIT_BYTES_MIN: u64 = 32 << 20;

/// The file name of the library that is loaded into the program.
const PRELOAD: &str = "libzfolio_preload.so";

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct End {
    change: Change,
    /// The most that it had resident, by the kernel's count.
    resident_bytes_max: u64,
    elapsed: Duration,
}

/// Runs a program under a limit.
///
/// # Errors
///
/// If the program cannot be started; the table of exit statuses is in `failure.rs`.
pub(crate) fn run(arguments: &RunArgs) -> Result<ExitCode, Failure> {
    let mut settings = Settings::of(arguments)?;
    let program = Program::find(&arguments.program)?;
    settings.check_accelerator()?;
    let preload = find_preload()?;
    requirements::check()?;
    let claims = settings.spill.claim(arguments)?;
    let address = take_address(arguments.metrics)?;
    // After all that refuses a run: the figures of an earlier one are gone then.
    let report = arguments.stats.as_deref().map(create_report).transpose()?;
    let directory = stats_file::prepare_directory(probe::effective_uid());
    if let Some(address) = address.as_ref().filter(|_| directory.is_ok()) {
        tell_address(arguments, address, settings.quiet);
    }
    if !settings.quiet {
        if let Err(why) = &directory {
            // The program also runs without statistics; only the summary is missing.
            eprintln!("zfolio: there will be no statistics: {why}");
        }
        if let Some(excess) = settings.excess() {
            eprintln!("zfolio: {excess}");
        }
    }
    let directory = directory.ok();
    directory.as_deref().into_iter().for_each(sweep);
    let supervisor = supervisor(&mut settings);

    let environment = environment(&settings, &preload)?;
    let library = preload.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let onlooker = Onlooker { library, directory: directory.clone() };
    let watch = Watch::new(!settings.quiet, arguments.progress);
    let kills = allowance::oom_kills();
    let auto = directory.clone().filter(|_| settings.auto);
    let auto = auto.map(|directory| Auto::new(directory, settings.tree));
    let ended = Arc::new(Mutex::new(Ended::new(directory.clone(), settings.limit_bytes)));
    let metrics = address.filter(|_| directory.is_some()).map(|address| {
        (address, metrics::page(Arc::clone(&ended), &settings, supervisor.as_ref()))
    });
    let watchers = Watchers { keep: Keep::new(claims), supervisor, auto, watch, ended };
    let (pid, end, tree, watchers) = follow(&program, &environment, onlooker, metrics, watchers)?;
    let mut ended = watchers.ended.lock();
    let files = ended.finish();
    let story = summary::Story {
        settings: &settings,
        program: &arguments.program,
        verbose: arguments.verbose,
        pid,
        end,
        files: &files,
        counted: &ended.counted,
        tree: &tree,
        supervisor: watchers.supervisor.as_ref(),
        out_of_memory: kills < allowance::oom_kills(),
    };
    if !settings.quiet {
        // The reader may have closed the pipe; that does not change how the program ended.
        io::stderr().write_all(story.to_string().as_bytes()).ok();
    }
    if let Some(line) = summary::core_message(pid, end.change, &files) {
        eprintln!("{line}");
    }
    if let Some((mut file, path)) = report {
        let text = format!("{:#}\n", story.json());
        if let Err(error) = file.write_all(text.as_bytes()) {
            eprintln!("zfolio: {}", escaped(&unwritten(path, &error)));
        }
    }
    drop(ended);
    // To die of a signal runs no destructor: here the files of the run go.
    drop(watchers);
    match end.change {
        Change::Died(signal) | Change::Dumped(signal) => child::die_of(signal),
        Change::Exited(status) | Change::Stopped(status) => {
            Ok(ExitCode::from(u8::try_from(status).expect("an exit status has eight bits")))
        }
    }
}

/// Says where the figures are; of a port that the system has chosen, nobody would know otherwise.
fn tell_address(arguments: &RunArgs, address: &Address, quiet: bool) {
    if !quiet || arguments.metrics.is_some_and(|asked| asked.port() == 0) {
        eprintln!("zfolio: figures for Prometheus at http://{}/metrics", address.address());
    }
}

/// Removes what runs that were killed have left.
fn sweep(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        keep::sweep(&path);
        ledger_file::sweep(&path);
    }
}

/// Begins the ledger of a tree that shares the limit. If that cannot be made, each process has the limit for itself.
fn supervisor(settings: &mut Settings) -> Option<Supervisor> {
    if !settings.tree {
        return None;
    }
    let supervisor = Supervisor::new(settings.limit_bytes, settings.spill.write_budget);
    if supervisor.is_none() {
        settings.tree = false;
        if !settings.quiet {
            eprintln!(
                "zfolio: no file can be made in /dev/shm: each process has the whole limit for itself"
            );
        }
    }
    supervisor
}

/// Opens the file of `--stats` before the program runs, so that a wrong name is reported first.
fn create_report(path: &Path) -> Result<(File, &Path), Failure> {
    let file = File::create(path).map_err(|error| {
        Failure::argument(format!("{}; accepted: a file that can be", unwritten(path, &error)))
    })?;
    Ok((file, path))
}

/// Why there is no file of `--stats`.
fn unwritten(path: &Path, error: &io::Error) -> String {
    format!("--stats: '{}' cannot be written: {error}", path.display())
}

/// The preload library: named by ZFOLIO_PRELOAD, or next to this program, or where `make install`
/// puts it.
pub(crate) fn find_preload() -> Result<PathBuf, Failure> {
    let given = env::var_os("ZFOLIO_PRELOAD").filter(|given| !given.is_empty());
    let candidates = if let Some(given) = given {
        vec![PathBuf::from(given)]
    } else {
        let executable = env::current_exe().map_err(|error| {
            Failure::machine(format!("the path of zfolio cannot be read: {error}"))
        })?;
        let directory = executable.parent().unwrap_or(Path::new("/"));
        vec![directory.join(PRELOAD), directory.join("../lib/zfolio").join(PRELOAD)]
    };
    let found = candidates.iter().find_map(|path| path.canonicalize().ok()).ok_or_else(|| {
        let tried: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
        Failure::machine(format!(
            "{PRELOAD} is not there (tried {}); build it with 'make build', or set ZFOLIO_PRELOAD \
             to its path",
            tried.join(", ")
        ))
    })?;
    // The loader splits LD_PRELOAD at spaces and colons, and has no way to quote them.
    if found.as_os_str().as_bytes().iter().any(|byte| b" :\n\t".contains(byte)) {
        return Err(Failure::machine(format!(
            "'{}' has a space or a colon in its path, which LD_PRELOAD cannot carry; install zfolio \
             elsewhere",
            found.display()
        )));
    }
    Ok(found)
}

/// The program's environment: this process's own, with the library and its settings.
fn environment(settings: &Settings, preload: &Path) -> Result<Vec<CString>, Failure> {
    let mut library = preload.as_os_str().to_owned();
    let others = env::var_os("LD_PRELOAD").unwrap_or_default();
    let others = others.as_bytes().split(|byte| b" :".contains(byte)).map(OsStr::from_bytes);
    for other in others.filter(|other| !other.is_empty() && *other != preload.as_os_str()) {
        library.push(":");
        library.push(other);
    }
    let flag = |set: bool| set.then(|| OsString::from("1"));
    let spill = &settings.spill;
    let rule = |text: String| spill.is_any().then(|| OsString::from(text));
    let ours: [(&str, Option<OsString>); 16] = [
        ("LD_PRELOAD", Some(library)),
        ("ZFOLIO_LIMIT", Some(settings.limit_bytes.to_string().into())),
        ("ZFOLIO_UNIT", settings.unit.map(|unit| unit.bytes().to_string().into())),
        ("ZFOLIO_ALGORITHM", Some(settings.algorithm.to_string().into())),
        ("ZFOLIO_ACCELERATE", settings.accelerate.map(|it| it.to_string().into())),
        ("ZFOLIO_STALL", Some(size::display_stall(settings.stall_ppm).into())),
        ("ZFOLIO_SPILL", Some(spill.variable())),
        ("ZFOLIO_SPILL_LIMIT", rule(spill.limit_bytes.to_string())),
        ("ZFOLIO_MAX_POOL_PERCENT", rule(spill.pool.max_pool_percent.to_string())),
        ("ZFOLIO_ACCEPT_THRESHOLD_PERCENT", rule(spill.pool.accept_threshold_percent.to_string())),
        ("ZFOLIO_WRITE_BUDGET", rule(spill.write_budget.exact())),
        ("ZFOLIO_FALLS", flag(settings.auto)),
        ("ZFOLIO_PER_PROCESS", flag(!settings.tree)),
        ("ZFOLIO_STRICT", flag(settings.strict)),
        ("ZFOLIO_QUIET", flag(settings.quiet)),
        ("ZFOLIO_RUN", Some(std::process::id().to_string().into())),
    ];
    let inherited = env::vars_os()
        .filter(|(name, _)| ours.iter().all(|(our, _)| name.as_os_str() != OsStr::new(our)));
    let set = ours.iter().filter_map(|(name, value)| Some(((*name).into(), value.clone()?)));
    inherited.chain(set).map(|(name, value): (OsString, OsString)| pair(name, &value)).collect()
}

fn pair(mut name: OsString, value: &OsStr) -> Result<CString, Failure> {
    name.push("=");
    name.push(value);
    c_string(name)
}

fn c_string(text: OsString) -> Result<CString, Failure> {
    CString::new(text.into_vec())
        .map_err(|_| Failure::argument("PROGRAM ARGS: an argument holds a zero byte"))
}

/// What is needed for a [`Tree`] before the program has started.
struct Onlooker {
    library: String,
    directory: Option<PathBuf>,
}

/// Starts the program and watches its processes until it ends.
fn follow(
    program: &Program,
    environment: &[CString],
    onlooker: Onlooker,
    metrics: Option<(Address, Page)>,
    mut watchers: Watchers,
) -> Result<(i32, End, Tree, Watchers), Failure> {
    let shown = program.path.display();
    let path = c_string(program.path.clone().into())?;
    let words: Result<Vec<CString>, Failure> =
        program.arguments.iter().cloned().map(c_string).collect();
    let failed = |error| Failure::machine(format!("signals cannot be taken: {error}"));
    let signals = Signals::block().map_err(failed)?;
    #[allow(clippy::disallowed_methods, reason = "the program runs in real time, and so do we")]
    let start = Instant::now();
    let started = child::Program {
        path: &path,
        arguments: &words?,
        environment,
        output: None,
        orphaned: libc::SIGKILL,
    };
    let pid = signals.start(&started).map_err(|error| {
        let line = format!("PROGRAM: '{shown}' cannot be executed: {error}");
        Failure::not_executed(line, &error)
    })?;
    // The program runs; without the figures if there is no thread for them.
    let _served = metrics.and_then(|(address, page)| address.serve(page).ok());
    let mut tree = Tree::new(pid.unsigned_abs(), onlooker.library, onlooker.directory);
    loop {
        let Some(signal) = signals.next(watchers.rest(&tree)).map_err(failed)? else {
            watchers.look(&mut tree);
            continue;
        };
        if signal.number == libc::SIGCHLD {
            if let Some((change, resident_bytes_max)) = end_of(pid)? {
                let end = End { change, resident_bytes_max, elapsed: start.elapsed() };
                watchers.watch.clear();
                tree.finish(resident_bytes_max);
                return Ok((pid, end, tree, watchers));
            }
        } else if passes_on(signal, pid, zfolio_sys::process::leads_session()) {
            // The program may have just ended; then the next signal reports its end.
            child::send(pid, signal.number).ok();
            // Signals may arrive without a pause, so look here too.
            watchers.look(&mut tree);
        }
    }
}

/// All that looks at the processes now and then.
struct Watchers {
    keep: Keep,
    supervisor: Option<Supervisor>,
    auto: Option<Auto>,
    watch: Watch,
    ended: Arc<Mutex<1, Ended>>,
}

impl Watchers {
    /// The time until the next look.
    fn rest(&self, tree: &Tree) -> Duration {
        let supervisor = self.supervisor.as_ref().map_or(Duration::MAX, Supervisor::rest);
        let auto = self.auto.as_ref().map_or(Duration::MAX, Auto::rest);
        tree.rest().min(supervisor).min(auto)
    }

    /// Looks at the processes, and prints what is due.
    fn look(&mut self, tree: &mut Tree) {
        self.keep.look();
        tree.look_if_due();
        if let Some(supervisor) = &mut self.supervisor {
            supervisor.look_if_due(tree);
        }
        self.auto.iter_mut().for_each(Auto::look_if_due);
        let shared_limit = self.supervisor.as_ref().map(Supervisor::limit_bytes);
        self.watch.look_if_due(tree, shared_limit);
        self.ended.lock().look_if_due(tree);
    }
}

/// Handles all changes of children; returns the end of `pid`, if it ended.
fn end_of(pid: i32) -> Result<Option<(Change, u64)>, Failure> {
    loop {
        let change = child::changed().map_err(|error| {
            Failure::machine(format!("cannot wait for the program's end: {error}"))
        })?;
        match change {
            None => return Ok(None),
            // An orphan: this process is the first of a container.
            Some((other, ..)) if other != pid => {}
            Some((_, Change::Stopped(libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU), _)) => {
                child::stop_here();
            }
            // Whoever sends SIGSTOP to the program will also send SIGCONT to it.
            Some((_, Change::Stopped(_), _)) => {}
            Some((_, end, resident_bytes_max)) => return Ok(Some((end, resident_bytes_max))),
        }
    }
}

/// Whether this process passes the signal on to the program.
///
/// A signal that the terminal or the kernel sends to the group has reached the program as well; not
/// so an alarm set before this program was executed, and not the SIGHUP of a terminal that has gone,
/// which only the leader of its session gets. A signal that the program sent to this process
/// is not meant for the program.
fn passes_on(signal: Signal, pid: i32, leads_session: bool) -> bool {
    let alarm = matches!(signal.number, libc::SIGALRM | libc::SIGVTALRM | libc::SIGPROF);
    let hangup = leads_session && signal.number == libc::SIGHUP && !signal.from_process;
    alarm || hangup || (signal.from_process && signal.sender != pid)
}

#[cfg(test)]
mod tests {
    use super::passes_on;
    use zfolio_sys::probe::child::Signal;

    #[test]
    fn the_terminals_signals_are_not_sent_twice() {
        let sent = |number, from_process, sender| Signal { number, from_process, sender };
        assert!(!passes_on(sent(libc::SIGINT, false, 0), 100, true));
        assert!(passes_on(sent(libc::SIGINT, true, 7), 100, false));
        assert!(passes_on(sent(libc::SIGALRM, false, 0), 100, false));
        assert!(!passes_on(sent(libc::SIGTERM, true, 100), 100, false), "its own");
        assert!(passes_on(sent(libc::SIGHUP, false, 0), 100, true), "the leader alone has it");
        assert!(!passes_on(sent(libc::SIGHUP, false, 0), 100, false));
    }
}
