//! `zfolio bench`: the same work under the kernel's zram swap, under `zfolio run`, and inline.
//!
//! # How it is made fair
//!
//! - **Equal total memory.** The kernel does not charge zram's memory to the cgroup, so a kernel run
//!   costs the cgroup's limit and `mem_used_max` of `mm_stat`. The kernel's settings run first, and
//!   zfolio gets, for everything, the *smallest* total that any of them needed.
//! - **Interleaved rounds.** A B C A B C, and the median of each figure, so that a machine that
//!   becomes slower for a while hits all settings alike.
//! - **The same program.** `usemem` knows nothing of zfolio. The inline rows run the same source in a
//!   process of their own.
//! - **The best of the kernel.** Ratios are taken against the kernel's best setting of each phase.

pub(crate) mod outcome;
pub(crate) mod setting;
mod table;
mod watch;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Args, Subcommand, ValueEnum};
use zfolio_core::size;
use zfolio_sys::files;

use crate::codecs::{self, CodecsArgs};
use crate::corpus::{make, parse_size};
use crate::inline::{self, InlineJob};
use crate::kernel::{self, Kernel, KernelSetting};
use crate::os;
use crate::usemem::Corpus;
use outcome::Outcome;
use setting::{Compression, DEFAULTS, Setting};
use table::{Row, Table};
use watch::{WatchError, watch};

/// Arguments of `zfolio bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Fill memory with the pages of real processes, use it, check every byte; compare settings
    #[command(after_help = "\
With --against kernel the same program is run under the kernel's zram swap in a memory cgroup, with
4 KiB and with 64 KiB folios, with lz4 and with lzo-rle. That needs root and zram; without, the rest is
run. A zram device of its own is used, never one that is in use, and everything that is changed (swap,
cgroup, huge pages) is put back, also after Ctrl-C or a failure.

zfolio gets as much memory in all as the kernel's most frugal setting needed: the cgroup's limit and
what zram held beside it.

Examples:
  sudo zfolio bench usemem --against kernel
  sudo zfolio bench usemem --against kernel --bytes 4G --limit 1G -n 4 -r 5 --json > result.json
  zfolio bench usemem --corpus corpus.bin --total 512M --setting lz4:64K --setting zstd,level=3:64K")]
    Usemem(Box<UsememArgs>),
    /// Compress units of the memory of real processes with each algorithm; recommend settings
    #[command(after_help = codecs::HELP)]
    Codecs(Box<CodecsArgs>),
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Against {
    /// The kernel's zram swap in a memory cgroup
    Kernel,
}

/// The ways of running the workload.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Without any limit
    Free,
    /// Under zfolio run
    Run,
    /// In a region of the library
    Inline,
}

/// Arguments of `zfolio bench usemem`.
#[derive(Args, Debug)]
struct UsememArgs {
    /// Compare with it
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Pages of real processes [default: made once, with 'zfolio corpus make', in ~/.cache/zfolio]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// How much memory the workload uses in all
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// The memory cgroup's limit, for the kernel
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = parse_size)]
    limit: u64,
    /// zfolio's limit, for everything [default: what the kernel needed; without it, half of --bytes]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    total: Option<u64>,
    /// How zfolio compresses: ALGORITHM[,level=N]:UNIT; may be repeated
    /// [default: lz4:4K lz4:16K zstd,level=1:4K zstd,level=1:16K]
    #[arg(long, value_name = "SETTING")]
    setting: Vec<Compression>,
    /// Leave out a way of running; may be repeated
    #[arg(long, value_enum, value_name = "WAY")]
    without: Vec<Way>,
    /// Threads that share the memory
    #[arg(short = 'n', default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Workers are processes (no inline rows then)
    #[arg(long)]
    processes: bool,
    /// Rounds; each figure is the median
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// What chooses the pages of the random reads
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Random reads
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(1..))]
    reads: u32,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    json: bool,
    /// The program usemem [default: beside this program, then in PATH]
    #[arg(long, value_name = "FILE")]
    usemem: Option<PathBuf>,
    /// The program zfolio
    #[arg(long, value_name = "FILE", hide = true)]
    zfolio: Option<PathBuf>,
    /// Run the workload inline, in this process, with the first --setting and --total
    #[arg(long, hide = true)]
    inline_child: bool,
}

/// Why the comparison ended early.
pub(crate) enum Failure {
    /// The user must change an argument.
    Refused(String),
    /// The system said no.
    Failed(String),
    /// A signal asked us to stop.
    Stopped(i32),
}

/// Runs `zfolio bench`.
#[must_use]
pub fn bench(args: BenchArgs) -> ExitCode {
    let outcome = match args.what {
        What::Usemem(args) if args.inline_child => inline_child(&args),
        What::Usemem(args) => compare(&args),
        What::Codecs(args) => codecs::codecs(&args),
    };
    let (line, status) = match outcome {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => return ExitCode::FAILURE,
        Err(Failure::Refused(line)) => (line, 2),
        Err(Failure::Failed(line)) => (line, 1),
        Err(Failure::Stopped(signal)) => {
            // As the shell tells it.
            (
                "interrupted; everything was put back".to_owned(),
                u8::try_from(128 + signal).unwrap_or(1),
            )
        }
    };
    eprintln!("zfolio bench: {line}");
    ExitCode::from(status)
}

/// Prints what was measured. Whoever closed the pipe has read enough.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let printed = files::print(text).map(|_read| ());
    printed.map_err(|error| Failure::Failed(format!("standard output: {error}")))
}

/// The hidden mode that a parent starts for each inline row.
fn inline_child(args: &UsememArgs) -> Result<bool, Failure> {
    let (Some(compression), Some(limit_bytes), Some(corpus)) =
        (args.setting.first(), args.total, args.corpus.as_deref())
    else {
        let line = "--inline-child: needs --setting, --total and --corpus";
        return Err(Failure::Refused(line.to_owned()));
    };
    let (workers, reads) = (args.workers as usize, args.reads as usize);
    let (bytes, seed) = (args.bytes, args.seed);
    let job = InlineJob { corpus, bytes, limit_bytes, workers, seed, reads, compression };
    let report = inline::run(&job).map_err(Failure::Failed)?;
    print(&format!("{}\n", report.json()))?;
    Ok(report.mismatch.is_none())
}

/// Everything that the runs share.
struct Bench<'a> {
    args: &'a UsememArgs,
    corpus: PathBuf,
    usemem: PathBuf,
    zfolio: PathBuf,
    kernel: Option<Kernel>,
}

/// The comparison; whether every run gave an answer, and the right one.
fn compare(args: &UsememArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    check_sizes(args)?;
    let corpus_path = corpus_path(args.corpus.as_deref())?;
    let corpus = Corpus::open(&corpus_path).map_err(|error| Failure::Refused(error.to_string()))?;
    let mut notes = Vec::new();
    let bench = Bench {
        args,
        usemem: find_usemem(args)?,
        zfolio: own_program(args)?,
        kernel: find_kernel(args, &mut notes),
        corpus: corpus_path,
    };
    let (title, context) = (bench.title(&corpus), bench.context(&corpus));
    let mut table = Table { title, context, rows: bench.rows(&mut notes), notes };
    if table.rows.is_empty() {
        return Err(Failure::Refused("--without: nothing is left to run".to_owned()));
    }
    kernel::journal::undo_on_panic();
    let mut total = args.total;
    for round in 1..=args.repeats {
        bench.round(round, &corpus, &mut table.rows, &mut total)?;
    }
    if args.json {
        print(&format!("{:#}\n", table.json()))?;
    } else {
        print(&table.text())?;
    }
    Ok(table.all_right())
}

fn check_sizes(args: &UsememArgs) -> Result<(), Failure> {
    let refuse = |name: &str, given: u64, accepted: &str| {
        let given = size::display(given);
        Err(Failure::Refused(format!("{name} {given}: accepted: {accepted}")))
    };
    if args.bytes < 1 << 20 {
        return refuse("--bytes", args.bytes, "1M or more");
    }
    // Below, the program itself does not fit, and the kernel kills it.
    if args.limit < 4 << 20 {
        return refuse("--limit", args.limit, "4M or more");
    }
    match args.total {
        Some(total) if total < 4 << 20 => refuse("--total", total, "4M or more"),
        _ => Ok(()),
    }
}

/// The corpus that was given, or the one in the cache, made now if it is not there.
pub(crate) fn corpus_path(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let no_home = || Failure::Refused("--corpus FILE: needed where HOME is not set".to_owned());
    let folder = cache.ok_or_else(no_home)?.join("zfolio");
    let path = folder.join("corpus.bin");
    if !path.exists() {
        eprintln!("zfolio bench: making a corpus in {}", path.display());
        let failed = |line: String| Failure::Failed(line);
        std::fs::create_dir_all(&folder)
            .map_err(|error| failed(format!("{}: {error}", folder.display())))?;
        make::make(&path, 400 << 20, false).map_err(|error| failed(error.to_string()))?;
    }
    Ok(path)
}

fn own_program(args: &UsememArgs) -> Result<PathBuf, Failure> {
    let own = args.zfolio.clone().map_or_else(std::env::current_exe, Ok);
    own.map_err(|error| Failure::Failed(format!("cannot find this program: {error}")))
}

fn find_usemem(args: &UsememArgs) -> Result<PathBuf, Failure> {
    if let Some(path) = &args.usemem {
        let missing = || Failure::Refused(format!("--usemem {}: no such file", path.display()));
        return if path.is_file() { Ok(path.clone()) } else { Err(missing()) };
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = beside.into_iter().chain(std::env::split_paths(&path));
    let found = folders.map(|folder| folder.join("usemem")).find(|file| file.is_file());
    let line =
        "the program usemem is neither beside zfolio nor in PATH; name it with --usemem FILE";
    found.ok_or(Failure::Failed(line.to_owned()))
}

/// The kernel's side, if it was asked for and can be had; a note if it cannot.
fn find_kernel(args: &UsememArgs, notes: &mut Vec<String>) -> Option<Kernel> {
    args.against?;
    match Kernel::find() {
        Ok(kernel) => Some(kernel),
        Err(reason) => {
            let note = format!("the kernel's zram was left out: {reason}");
            eprintln!("zfolio bench: {note}");
            notes.push(note);
            None
        }
    }
}

impl Bench<'_> {
    fn title(&self, corpus: &Corpus) -> String {
        let args = self.args;
        let kernel = match &self.kernel {
            Some(kernel) => {
                let limit = size::display(args.limit);
                format!("{}, limit {limit} + zram's own memory; ", kernel.describe())
            }
            None => String::new(),
        };
        let cpus = cpus();
        format!(
            "usemem: {} of {} ({}), {} {}(s); {kernel}medians of {} round(s); Linux {}, {cpus} CPU(s)",
            size::display(args.bytes),
            self.corpus.display(),
            size::display(corpus.bytes()),
            args.workers,
            if args.processes { "process" } else { "thread" },
            args.repeats,
            zfolio_sys::probe::kernel_release(),
        )
    }

    fn context(&self, corpus: &Corpus) -> serde_json::Value {
        let args = self.args;
        serde_json::json!({
            "bytes": args.bytes,
            "cgroup_limit_bytes": self.kernel.as_ref().map(|_| args.limit),
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

    /// What will be run, the kernel's settings first.
    fn rows(&self, notes: &mut Vec<String>) -> Vec<Row> {
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

    /// Runs every row once. `total` is decided when the first zfolio row comes.
    fn round(
        &self,
        round: u32,
        corpus: &Corpus,
        rows: &mut [Row],
        total: &mut Option<u64>,
    ) -> Result<(), Failure> {
        for at in 0..rows.len() {
            let setting = rows[at].setting.clone();
            eprintln!("zfolio bench: round {round} of {}: {setting}", self.args.repeats);
            corpus.warm().map_err(|error| Failure::Failed(format!("corpus: {error}")))?;
            let outcome = match &setting {
                Setting::Free => self.run_free(),
                Setting::Kernel(kernel) => self.run_kernel(kernel),
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
                    eprintln!("zfolio bench: {setting}: {error}");
                    rows[at].failures.push(error.to_string());
                }
            }
        }
        Ok(())
    }

    /// The least memory in all that any of the kernel's runs needed; half of the data without one.
    fn smallest_total(&self, rows: &[Row]) -> u64 {
        let kernel = rows.iter().filter(|row| row.setting.is_kernel());
        let beside = kernel.flat_map(|row| &row.runs).filter_map(|run| run.zram_bytes_max);
        beside.min().map_or(self.args.bytes / 2, |least| self.args.limit + least)
    }

    /// The words that say what the workload is, for `usemem`.
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
        finish(command, Some("usemem"))
    }

    fn run_kernel(&self, setting: &KernelSetting) -> Result<Outcome, WatchError> {
        let kernel =
            self.kernel.as_ref().expect("rows() lists kernel settings only if there is one");
        let pressure = kernel.set_up(setting, self.args.bytes, self.args.limit)?;
        let mut command = Command::new(&self.usemem);
        self.workload(&mut command);
        os::tie(&mut command, Some(pressure.members()?));
        let mut outcome = finish(command, Some("usemem"))?;
        let (zram_bytes_max, charged_bytes_max) = pressure.figures()?;
        pressure.put_back()?;
        if charged_bytes_max > self.args.limit {
            let line = format!("the cgroup was charged {charged_bytes_max} bytes, over its limit");
            return Err(std::io::Error::other(line).into());
        }
        outcome.total_bytes = exact(self.args.limit + zram_bytes_max);
        outcome.zram_bytes_max = Some(zram_bytes_max);
        Ok(outcome)
    }

    fn run_under(&self, compression: &Compression, total: u64) -> Result<Outcome, WatchError> {
        // Each process has the limit for itself.
        let processes = if self.args.processes { u64::from(self.args.workers) } else { 1 };
        let mut command = Command::new(&self.zfolio);
        command.args(["run", "--quiet", "--limit", &(total / processes).to_string()]);
        command.args(["--algorithm", &compression.algorithm]);
        command.args(["--unit", &compression.unit_bytes.to_string(), "--"]).arg(&self.usemem);
        self.workload(&mut command);
        os::tie(&mut command, None);
        let outcome = finish(command, Some("usemem"))?;
        Ok(Outcome { total_bytes: exact(total), ..outcome })
    }

    fn run_inline(&self, compression: &Compression, total: u64) -> Result<Outcome, WatchError> {
        let mut command = Command::new(&self.zfolio);
        let Compression { algorithm, unit_bytes } = compression;
        command.args(["bench", "usemem", "--inline-child", "--total", &total.to_string()]);
        command.arg("--setting").arg(format!("{algorithm}:{unit_bytes}"));
        self.workload(&mut command);
        os::tie(&mut command, None);
        let outcome = finish(command, None)?;
        Ok(Outcome { total_bytes: exact(total), ..outcome })
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs `command` to its end and reads its report. A wrong byte is a report, too.
fn finish(command: Command, name: Option<&str>) -> Result<Outcome, WatchError> {
    let ended = watch(command, name)?;
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
    // What the process itself says is exact, and it ended within 50 ms of it; the samples also see
    // processes that share the work. Both are peaks, so the larger one is the truth.
    outcome.resident_bytes_max = outcome.resident_bytes_max.max(exact(ended.resident_bytes_max));
    outcome.cpu_seconds = exact(ended.cpu_ns) / 1e9;
    Ok(outcome)
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
fn exact(value: u64) -> f64 {
    value as f64
}
