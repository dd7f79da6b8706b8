//! The rounds of a comparison: which settings run, and how each of them is run.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use zfolio_core::size;

use super::Failure;
use super::arguments::{UsememArgs, Way};
use super::outcome::Outcome;
use super::setting::{Compression, DEFAULTS, Setting};
use super::table::Row;
use crate::inline;
use crate::kernel::zswap::{Counts, Zswap};
use crate::kernel::{Kernel, KernelSetting, Swapped};
use crate::os;
use crate::usemem::Corpus;
use crate::watch::{Ended, Look, WatchError, Whose, read_text, watch};

/// How often memory is sampled.
const SAMPLE: Duration = Duration::from_millis(50);

/// What all runs share.
pub(super) struct Bench<'a> {
    pub(super) args: &'a UsememArgs,
    pub(super) corpus: PathBuf,
    pub(super) usemem: PathBuf,
    pub(super) zfolio: PathBuf,
    pub(super) kernel: Option<Kernel>,
    pub(super) zswap: Option<Zswap>,
}

impl Bench<'_> {
    pub(super) fn title(&self, corpus: &Corpus) -> String {
        let args = self.args;
        let kernel = match &self.kernel {
            Some(kernel) => {
                let limit = size::display(args.limit);
                format!("{}, limit {limit} + zram's own memory; ", kernel.describe())
            }
            None => String::new(),
        };
        let zswap = match &self.zswap {
            Some(zswap) => {
                let limit = size::display(args.limit);
                format!("{}, limit {limit} + its pool; ", zswap.describe())
            }
            None => String::new(),
        };
        let cpus = cpus();
        format!(
            "usemem: {} of {} ({}), {} {}(s); {kernel}{zswap}medians of {} round(s); Linux {}, {cpus} CPU(s)",
            size::display(args.bytes),
            self.corpus.display(),
            size::display(corpus.bytes()),
            args.workers,
            if args.processes { "process" } else { "thread" },
            args.repeats,
            zfolio_sys::probe::kernel_release(),
        )
    }

    pub(super) fn context(&self, corpus: &Corpus) -> serde_json::Value {
        let args = self.args;
        serde_json::json!({
            "bytes": args.bytes,
            "cgroup_limit_bytes": (self.kernel.is_some() || self.zswap.is_some()).then_some(args.limit),
            "workers": args.workers,
            "processes": args.processes,
            "seed": args.seed,
            "reads": args.reads,
            "rounds": args.repeats,
            "corpus": self.corpus.display().to_string(),
            "corpus_bytes": corpus.bytes(),
            "kernel": zfolio_sys::probe::kernel_release(),
            "cpus": cpus(),
        })
    }

    /// The settings to run, the kernel's first.
    pub(super) fn rows(&self, notes: &mut Vec<String>) -> Vec<Row> {
        let wanted = |way| !self.args.without.contains(&way);
        let mut settings = Vec::new();
        if wanted(Way::Free) {
            settings.push(Setting::Free);
        }
        if self.kernel.is_some() {
            let (kernel, missing) = Kernel::settings();
            settings.extend(kernel.into_iter().map(Setting::Kernel));
            notes.extend(missing);
        }
        if self.zswap.is_some() {
            settings.push(Setting::Zswap(Zswap::compressor()));
        }
        let mut compressions = self.args.setting.clone();
        if compressions.is_empty() {
            let defaults = DEFAULTS.iter().map(|text| text.parse());
            compressions = defaults.collect::<Result<_, _>>().expect("a test reads them all");
        }
        if wanted(Way::Run) {
            settings.extend(compressions.iter().cloned().map(Setting::Run));
        }
        if wanted(Way::Inline) && self.args.processes {
            notes.push("inline was left out: --processes".to_owned());
        } else if wanted(Way::Inline) && !inline::AVAILABLE {
            notes.push("inline was left out: this build has no inline mode".to_owned());
        } else if wanted(Way::Inline) {
            settings.extend(compressions.into_iter().map(Setting::Inline));
        }
        let row = |setting| Row { setting, runs: Vec::new(), failures: Vec::new() };
        settings.into_iter().map(row).collect()
    }

    /// Runs every row once. The first row of zfolio determines `total` if it is not given.
    pub(super) fn round(
        &self,
        round: u32,
        corpus: &Corpus,
        rows: &mut [Row],
        total: &mut Option<u64>,
    ) -> Result<(), Failure> {
        for at in 0..rows.len() {
            let setting = rows[at].setting.clone();
            eprintln!("zfolio: round {round} of {}: {setting}", self.args.repeats);
            corpus.warm().map_err(|error| Failure::Failed(format!("corpus: {error}")))?;
            let outcome = match &setting {
                Setting::Free => self.run_free(),
                Setting::Kernel(kernel) => self.run_kernel(kernel),
                Setting::Zswap(_) => self.run_zswap(),
                Setting::Run(compression) => {
                    let total = *total.get_or_insert_with(|| self.smallest_total(rows));
                    self.run_under(compression, total)
                }
                Setting::Inline(compression) => {
                    let total = *total.get_or_insert_with(|| self.smallest_total(rows));
                    self.run_inline(compression, total)
                }
            };
            match outcome {
                Ok(outcome) => rows[at].runs.push(outcome),
                Err(WatchError::Stopped(signal)) => return Err(Failure::Stopped(signal)),
                Err(WatchError::System(error)) => {
                    eprintln!("zfolio: {setting}: {error}");
                    rows[at].failures.push(error.to_string());
                }
            }
        }
        Ok(())
    }

    /// The smallest total memory of the kernel's runs; without any, half of the data.
    fn smallest_total(&self, rows: &[Row]) -> u64 {
        let kernel = rows.iter().filter(|row| row.setting.is_kernel());
        let beside = kernel.flat_map(|row| &row.runs).filter_map(|run| run.zram_bytes_max);
        beside.min().map_or(self.args.bytes / 2, |least| self.args.limit + least)
    }

    /// Adds the arguments for `usemem` that describe the workload.
    fn workload(&self, command: &mut Command) {
        let args = self.args;
        command.arg("--corpus").arg(&self.corpus).arg("--bytes").arg(args.bytes.to_string());
        command.arg("-n").arg(args.workers.to_string()).arg("--seed").arg(args.seed.to_string());
        command.arg("--reads").arg(args.reads.to_string()).arg("--json");
        if args.processes {
            command.arg("--processes");
        }
    }

    fn run_free(&self) -> Result<Outcome, WatchError> {
        let mut command = Command::new(&self.usemem);
        self.workload(&mut command);
        os::tie(&mut command, None);
        finish(command, Whose::Named("usemem"))
    }

    fn run_kernel(&self, setting: &KernelSetting) -> Result<Outcome, WatchError> {
        let kernel =
            self.kernel.as_ref().expect("rows() lists kernel settings only if there is one");
        let mut command = Command::new(&self.usemem);
        self.workload(&mut command);
        let how = (setting, self.args.bytes, self.args.limit);
        let swapped = kernel.run(how, command, &look(Whose::Named("usemem")), read_text)?;
        self.swapped(swapped)
    }

    /// What the kernel's run had in all is the cgroup's limit and what was held beside it.
    fn swapped(&self, swapped: Swapped<String>) -> Result<Outcome, WatchError> {
        let beside_bytes_max = swapped.beside_bytes_max;
        let mut outcome = outcome_of(swapped.ended)?;
        outcome.total_bytes = exact(self.args.limit + beside_bytes_max);
        outcome.zram_bytes_max = Some(beside_bytes_max);
        Ok(outcome)
    }

    fn run_zswap(&self) -> Result<Outcome, WatchError> {
        let zswap = self.zswap.as_ref().expect("rows() lists zswap only if there is one");
        let mut command = Command::new(&self.usemem);
        self.workload(&mut command);
        let how = (self.args.bytes, self.args.limit);
        let (swapped, counts) =
            zswap.run(how, command, &look(Whose::Named("usemem")), read_text)?;
        let Counts { zswpout, zswpin, zswpwb } = counts;
        let pool = size::display(swapped.beside_bytes_max);
        eprintln!(
            "zfolio: zswap: zswpout {zswpout}, zswpin {zswpin}, zswpwb {zswpwb}, pool {pool} at most"
        );
        self.swapped(swapped)
    }

    fn run_under(&self, compression: &Compression, total: u64) -> Result<Outcome, WatchError> {
        // The limit applies to each process.
        let processes = if self.args.processes { u64::from(self.args.workers) } else { 1 };
        let mut command = Command::new(&self.zfolio);
        command.args(["run", "--quiet", "--limit", &(total / processes).to_string()]);
        command.args(compression.options());
        self.args.zswap.iter().for_each(|dir| _ = command.arg("--spill").arg(dir));
        command.arg("--").arg(&self.usemem);
        self.workload(&mut command);
        os::tie(&mut command, None);
        let outcome = finish(command, Whose::Named("usemem"))?;
        Ok(Outcome { total_bytes: exact(total), ..outcome })
    }

    fn run_inline(&self, compression: &Compression, total: u64) -> Result<Outcome, WatchError> {
        let mut command = Command::new(&self.zfolio);
        let Compression { algorithm, unit_bytes } = compression;
        let unit = unit_bytes.map_or(String::new(), |bytes| format!(":{bytes}"));
        command.args(["bench", "usemem", "--inline-child", "--total", &total.to_string()]);
        command.arg("--setting").arg(format!("{algorithm}{unit}"));
        self.workload(&mut command);
        os::tie(&mut command, None);
        let outcome = finish(command, Whose::All)?;
        Ok(Outcome { total_bytes: exact(total), ..outcome })
    }
}

pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs `command` to its end and reads its report. A report of a wrong byte is a result, too.
fn finish(command: Command, whose: Whose<'_>) -> Result<Outcome, WatchError> {
    outcome_of(watch(command, &look(whose), read_text)?)
}

fn look(whose: Whose<'_>) -> Look<'_> {
    Look { whose, every: SAMPLE, elapsed_max: None }
}

fn outcome_of(ended: Ended<String>) -> Result<Outcome, WatchError> {
    let outcome = Outcome::parse(&ended.output);
    let mut outcome = match outcome {
        Ok(outcome) if ended.status.success() || outcome.verify != "ok" => outcome,
        _ => {
            let complaint = match ended.complaint.trim().lines().next() {
                Some(line) => line,
                None if ended.status.signal() == Some(9) => {
                    "killed, for want of memory most likely"
                }
                None => "without a word",
            };
            return Err(std::io::Error::other(format!("{}: {complaint}", ended.status)).into());
        }
    };
    // The figure of the process itself is exact, and was read less than 50 ms before its end. The
    // samples include other processes that share the work. Both are peaks, so the larger one is
    // right.
    outcome.resident_bytes_max = outcome.resident_bytes_max.max(exact(ended.resident_bytes_max));
    outcome.cpu_seconds = exact(ended.cpu_ns) / 1e9;
    Ok(outcome)
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
fn exact(value: u64) -> f64 {
    value as f64
}
