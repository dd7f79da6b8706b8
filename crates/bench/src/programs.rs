//! `zfolio bench programs`: real programs with less memory than they need.
//!
//! # What is measured
//!
//! - **need**: the peak of a program's anonymous and shared memory when it runs alone, sampled from
//!   outside. Code and mapped files are not in it: compression does not apply to them.
//! - **slowdown**: the time with a limit of a share of the need, divided by the time alone.
//! - **output**: the digest of what the program writes. It must be the same in every run.
//!
//! # How the comparison is kept fair
//!
//! - The first run of a program is not measured, so that its code and input are in memory.
//! - Under the kernel a program has as much memory in all as under zfolio: see `equal`.
//! - Rounds are interleaved, and each time is the median.
//!
//! | module | contents |
//! | --- | --- |
//! | `workload` | the programs, their input (`crates/bench/programs`) and their arguments |
//! | `generate`, `redis` | input that is too large for a file; the client of redis |
//! | `run` | one run: alone, under `zfolio run`, under the kernel |
//! | `equal` | the cgroup's limit that costs as much as zfolio's |
//! | `share`, `digest`, `figures` | a share of the need; an output; what `zfolio run --stats` wrote |
//! | `results`, `table` | slowdowns and means; text and JSON |

mod arguments;
mod digest;
mod equal;
mod figures;
mod generate;
mod redis;
mod results;
mod run;
mod share;
mod table;
mod workload;

use std::time::Duration;

use serde_json::json;
use zfolio_sys::probe;

use crate::compare::rounds::cpus;
use crate::compare::{Failure, find_kernel, own_program, print};
use crate::kernel::{self, Kernel};
use crate::os;
use crate::scratch::Scratch;
use crate::watch::WatchError;
pub(crate) use arguments::{AUTO_HELP, HELP, ProgramsArgs};
use equal::Model;
use results::{Cell, Measured, Row, Way};
use run::{Alone, End, Run, Runner};
use share::Share;
use table::Table;
use workload::Workload;

/// Runs the comparison; returns whether every run under zfolio gave the right output.
pub(crate) fn programs(args: &ProgramsArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    let mut notes = Vec::new();
    let bench = Bench {
        args,
        shares: args.shares(),
        zfolio: own_program(args.zfolio.as_deref())?,
        kernel: args.against.and_then(|_| find_kernel(&mut notes)),
    };
    kernel::journal::undo_on_panic();
    let scratch = Scratch::create("bench-programs")
        .map_err(|error| Failure::Failed(format!("no folder for temporary files: {error}")))?;
    let mut table = Table {
        title: bench.title(),
        context: bench.context(),
        shares: bench.shares.clone(),
        programs: Vec::new(),
        failures: Vec::new(),
        notes,
    };
    for program in args.programs() {
        let workload = match Workload::prepare(program, scratch.path(), args.scale) {
            Ok(workload) => workload,
            Err(reason) => {
                let note = format!("{} was skipped: {reason}", program.name());
                eprintln!("zfolio: {note}");
                table.notes.push(note);
                continue;
            }
        };
        match bench.measure(&workload) {
            Ok(measured) => table.programs.push(measured),
            Err(WatchError::Stopped(signal)) => return Err(Failure::Stopped(signal)),
            Err(WatchError::System(error)) => {
                let line = format!("{}: {error}", program.name());
                eprintln!("zfolio: {line}");
                table.failures.push(line);
            }
        }
    }
    drop(scratch);
    let text = if args.json { format!("{:#}\n", table.json()) } else { table.text() };
    print(&text)?;
    Ok(table.all_right())
}

/// What all programs share.
struct Bench<'a> {
    args: &'a ProgramsArgs,
    shares: Vec<Share>,
    zfolio: std::path::PathBuf,
    kernel: Option<Kernel>,
}

impl Bench<'_> {
    fn title(&self) -> String {
        let kernel = match &self.kernel {
            Some(kernel) => format!("{}, equal memory in all; ", kernel.describe()),
            None => String::new(),
        };
        let limits = if self.args.limit.is_empty() { "shares of what each needs" } else { "sizes" };
        format!(
            "programs: limits that are {limits}; {kernel}medians of {} round(s); \
             Linux {}, {} CPU(s)",
            self.args.rounds,
            probe::kernel_release(),
            cpus(),
        )
    }

    fn context(&self) -> serde_json::Value {
        json!({
            "rounds": self.args.rounds,
            "scale_percent": self.args.scale,
            "timeout_seconds": self.args.timeout,
            "kernel": probe::kernel_release(),
            "cpus": cpus(),
        })
    }

    /// The ways to limit memory, zfolio's first.
    fn ways(&self) -> Vec<Way> {
        let mut ways: Vec<Way> =
            self.args.setting.iter().cloned().map(|s| Way::Run(Some(s))).collect();
        if ways.is_empty() {
            ways.push(Way::Run(None));
        }
        ways.extend(self.kernel.as_ref().map(|_| Way::Kernel(self.args.kernel.clone())));
        ways
    }

    /// Runs one program alone, and in every way with every share.
    fn measure(&self, workload: &Workload) -> Result<Measured, WatchError> {
        let timeout = self.args.timeout.map(|seconds| Duration::from_secs(seconds.into()));
        let (zfolio, kernel) = (self.zfolio.clone(), self.kernel.as_ref());
        let runner = Runner { workload, zfolio, kernel, timeout };
        let name = workload.program.name();
        eprintln!("zfolio: {name}: alone");
        let expected = runner.alone()?.output;
        let mut alone: Vec<Alone> = Vec::new();
        let mut rows = Vec::new();
        let mut model = Model::new(0);
        for round in 1..=self.args.rounds {
            let now = runner.alone()?;
            if now.output != expected {
                let line = format!("its output alone varies: {expected}, {}", now.output);
                return Err(std::io::Error::other(line).into());
            }
            alone.push(now);
            if round == 1 {
                rows = self.empty_rows(&now);
                model = Model::new(now.need_bytes);
            }
            for row in &mut rows {
                for at in 0..row.cells.len() {
                    let of = format!("round {round} of {}", self.args.rounds);
                    eprintln!("zfolio: {name}: {of}: {} at {}", row.way, row.cells[at].share);
                    // The first round determines limits and the longest time.
                    run_cell(&runner, row, at, &alone[0], &mut model)?;
                }
            }
        }
        let slowdown_max = runner.slowdown_max(&alone[0]);
        Ok(Measured { program: workload.program, alone, slowdown_max, rows })
    }

    fn empty_rows(&self, alone: &Alone) -> Vec<Row> {
        let cell = |way: &Way, share: &Share| {
            let limit_bytes = share.limit_bytes(alone.need_bytes);
            let is_low = limit_bytes < arguments::LIMIT_BYTES_MIN && matches!(way, Way::Run(_));
            let share = *share;
            Cell { share, limit_bytes, runs: Vec::new(), late_before: None, limit_too_low: is_low }
        };
        let row = |way: Way| {
            let cells = self.shares.iter().map(|share| cell(&way, share)).collect();
            Row { way, cells }
        };
        self.ways().into_iter().map(row).collect()
    }
}

/// Runs the cell `at` of `row` once, unless its result is known already.
fn run_cell(
    runner: &Runner<'_>,
    row: &mut Row,
    at: usize,
    alone: &Alone,
    model: &mut Model,
) -> Result<(), WatchError> {
    // Shares fall, so a program that took too long before would only take longer.
    let late = |cell: &&Cell| cell.runs.iter().any(|run| run.end == End::Late);
    let late_before = row.cells[..at].iter().find(late).map(|cell| cell.share);
    let cell = &mut row.cells[at];
    if cell.limit_too_low {
        return Ok(());
    }
    if late_before.is_some() && cell.runs.is_empty() {
        cell.late_before = late_before;
        return Ok(());
    }
    let run = match &row.way {
        Way::Run(compression) => runner.managed(compression.as_ref(), cell.limit_bytes, alone),
        Way::Kernel(setting) => runner.swapped(setting, cell.limit_bytes, alone, model),
    };
    match run {
        Ok(run) => cell.runs.push(run),
        Err(WatchError::System(error)) => cell.runs.push(Run::failed(&error)),
        Err(stopped) => return Err(stopped),
    }
    Ok(())
}
