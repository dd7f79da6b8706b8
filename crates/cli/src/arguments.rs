//! The command line: its commands, their arguments and their help.

mod line;
mod values;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};
use zfolio_core::budget::WriteBudget;
use zfolio_core::number;
use zfolio_core::page::UnitOrder;
pub(crate) use zfolio_core::size::parse_stall;
use zfolio_core::zcomp::Choice;
use zfolio_iaa::accelerate::{Accelerate, Named};

use crate::completion;
use crate::device;
use crate::dictionary;
use crate::iaa;
use crate::manual;
use crate::metrics::parse_metrics;

pub(crate) use line::{command_path, help, parse, parse_words};
pub(crate) use values::{
    check_places, parse_accelerator, parse_algorithm, parse_limit_or_auto, parse_named,
    parse_percent, parse_spill, parse_spill_limit, parse_unit, parse_write_budget,
};
use values::{parse_pid, parse_seconds, parse_setting};

pub(crate) use zfolio_core::zcomp::ALGORITHM_DEFAULT;

/// Run programs in less memory than they need: cold memory is compressed, in user space.
#[derive(Parser, Debug)]
#[command(
    name = "zfolio",
    version,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Examples:
  zfolio run --limit 2G -- python3 train.py     run a program in 2 GiB
  zfolio stat                                   watch what runs, without root
  zfolio device add cache --size 4G --nbd /run/cache.sock     a compressed disk in memory
  zfolio doctor                                 what this machine can and can't do
  zfolio algorithms                             the compression algorithms
  sudo zfolio bench usemem --against kernel     measure, beside the kernel's zram

Exit status: 2 for a wrong argument, 125 where this machine can't; see 'zfolio run --help'."
)]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What `--accelerate` names. That there is none is a choice, too: the environment may name one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accelerator(pub(crate) Option<Accelerate>);

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a program under a memory limit
    Run(RunArgs),
    /// Show the figures of managed processes, live
    Stat(StatArgs),
    /// Change settings of what runs already
    Set(SetArgs),
    /// Make compressed disks in memory, and serve them to clients
    Device(device::DeviceArgs),
    /// List the In-Memory Analytics Accelerators, and set up queues on them
    Iaa(iaa::IaaArgs),
    /// Run a program once, and recommend a limit for it
    Suggest(SuggestArgs),
    /// Check what this machine offers, and say what to do where something is missing
    Doctor(DoctorArgs),
    /// List the compression algorithms and their levels
    Algorithms(AlgorithmsArgs),
    /// Measure, beside the kernel's own compressed memory
    #[command(after_help = "Examples:
  sudo zfolio bench usemem --against kernel
  zfolio bench usemem --help")]
    Bench(zfolio_bench::BenchArgs),
    /// Save the memory of real processes, to measure with
    #[command(after_help = "Examples:
  zfolio corpus make -o corpus.bin
  zfolio corpus capture 1234 -o corpus.bin")]
    Corpus(zfolio_bench::CorpusArgs),
    /// Make a dictionary for --algorithm NAME,dict=FILE
    #[command(after_help = "Examples:
  zfolio dict train --corpus corpus.bin -o typical.dict
  zfolio run --unit 4K --algorithm zstd,dict=typical.dict -- ./program")]
    Dict(dictionary::DictArgs),
    /// Print the completions of a shell
    Completions(completion::CompletionsArgs),
    /// Show the help of a command
    Help(HelpArgs),
    /// Print a manual page, or write all of them
    #[command(hide = true)]
    Man(manual::ManArgs),
    /// Answer a shell's completions
    #[command(name = completion::COMMAND, hide = true)]
    Complete(completion::CompleteArgs),
}

/// Arguments of `zfolio run`.
#[derive(Args, Debug)]
#[command(
    after_help = "Sizes: 256M, 1.5G, 1048576. K, M, G, T are powers of 1024; KB, MB, ... of 1000.

Examples:
  zfolio run --limit 256M -- python3 build_index.py
  zfolio run --limit 2G --algorithm zstd,level=3 --unit 16K -- redis-server --port 7777
  zfolio run --limit 1G --quiet --stats run.json -- ./simulate input.dat
  zfolio run --limit 2G -- make -j8             2 GiB for all processes together

Children are managed too: the program and all that it starts share the limit, and memory goes to the
processes that wait for it most. With --per-process each has the limit for itself. zfolio waits, passes
signals on, and ends as the program ended: with its exit status, or by the same signal. Otherwise:
127 PROGRAM was not found; 126 it cannot be executed or managed (static, setuid, 32-bit, musl); 125
this machine can't ('zfolio doctor' says why); 122 --strict ended the program; 2 a wrong argument.

Defaults may stand in the environment: ZFOLIO_LIMIT, ZFOLIO_STALL, ZFOLIO_ALGORITHM, ZFOLIO_UNIT,
ZFOLIO_ACCELERATE, ZFOLIO_SPILL (a place a line, or none), ZFOLIO_SPILL_LIMIT, ZFOLIO_MAX_POOL_PERCENT,
ZFOLIO_ACCEPT_THRESHOLD_PERCENT, ZFOLIO_WRITE_BUDGET, and ZFOLIO_PER_PROCESS=1, ZFOLIO_STRICT=1,
ZFOLIO_QUIET=1. An option given overrides them."
)]
pub(crate) struct RunArgs {
    /// The memory that the program may use [default: half of what the machine or cgroup allows]
    ///
    /// Everything counts: resident, staged and compressed memory, and zfolio's own. At least 32M; with %, of
    /// what the machine or cgroup allows; with auto, what is left there, once a second.
    #[arg(long, short, value_name = "SIZE|N%|auto", value_parser = parse_limit_or_auto)]
    pub(crate) limit: Option<Limit>,

    /// Compress also below the limit, as long as the program waits for less than N% of its time
    ///
    /// For a program whose need is not known: memory that it does not use is compressed. Without --limit, it may
    /// use all that the machine or cgroup allows. 0.01% to 50%.
    #[arg(long, value_name = "N%", value_parser = parse_stall)]
    pub(crate) stall: Option<u32>,

    /// Give each process of the run the limit for itself, instead of one limit for all
    #[arg(long)]
    pub(crate) per_process: bool,

    /// The compression algorithm, and its parameters: see 'zfolio algorithms' [default: auto]
    ///
    /// With --accelerate iaa: deflate-iaa (the default there) or deflate-iaa-dynamic, which are deflate,window=12 by
    /// the accelerator, with fixed codes or with codes made for each unit.
    #[arg(long, short, value_name = "NAME[,level=N][,window=N][,dict=FILE]", value_parser = parse_named)]
    pub(crate) algorithm: Option<Named<Choice>>,

    /// What is compressed as one object: a power of two, 4K to 2M [default: 4K, and with auto 16K where that pays]
    ///
    /// Large units compress better and faster; small ones serve a random access sooner.
    #[arg(long, short, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) unit: Option<UnitOrder>,

    /// What compresses and decompresses beside the threads of zfolio: cpu, cpu=N for N threads, or iaa [default: none]
    ///
    /// cpu: batches of units are divided among threads, where that takes long enough. Without a number there is a
    /// thread for each CPU but one. It helps where the program leaves CPUs idle.
    ///
    /// iaa: Intel's In-Memory Analytics Accelerator, on all queues of this machine that are for programs: see 'zfolio
    /// iaa'. Each process opens them for itself; what they do not do, software does. iaa=model is a model of the
    /// device in software: slow, for tests and trials. Attributes of its driver follow: iaa,verify_compress=1
    /// (sync_mode, verify_compress, distribute_comps, distribute_decomps, g_comp_wqs_per_iaa, check_crc, when_busy).
    #[arg(long, value_name = "cpu[=N]|iaa[=model][,ATTR=VALUE]...|none", value_parser = parse_accelerator)]
    pub(crate) accelerate: Option<Accelerator>,

    /// Where memory goes that does not fit compressed: a directory, or a block device that nobody else uses
    ///
    /// It goes to a file without a name, encrypted. Several may be given: higher priorities are filled first,
    /// equal ones in turn. [default: $TMPDIR, else /var/tmp, if that is a disk]
    #[arg(long, value_name = "DIR|DEV[,prio=N]", value_parser = parse_spill,
          value_hint = ValueHint::AnyPath)]
    pub(crate) spill: Vec<(PathBuf, i32)>,

    /// How much may be on disk in all, at least 16M [default: half of what is free there]
    #[arg(long, value_name = "SIZE", value_parser = parse_spill_limit, conflicts_with = "no_spill")]
    pub(crate) spill_limit: Option<u64>,

    /// How much may be written to disk: SIZE in each s, min, h or day, or SIZE in all [default: any amount]
    ///
    /// For all processes together. Once it is used up memory stays in memory, over the limit, until some of it is
    /// there again. It bounds the wear of an SSD: 10G/day.
    #[arg(long, value_name = "SIZE[/PERIOD]", value_parser = parse_write_budget,
          conflicts_with = "no_spill")]
    pub(crate) write_budget: Option<WriteBudget>,

    /// The most that compressed memory may take, in percent of the limit: the rest goes to disk [default: 100]
    ///
    /// The kernel's max_pool_percent, 1 to 100. With 100 only the limit counts.
    #[arg(long, value_name = "N", value_parser = parse_percent, conflicts_with = "no_spill")]
    pub(crate) max_pool_percent: Option<u8>,

    /// What compressed memory comes down to once it has passed that, in percent of it [default: 90]
    ///
    /// The kernel's accept_threshold_percent, 1 to 100.
    #[arg(long, value_name = "N", value_parser = parse_percent, conflicts_with = "no_spill")]
    pub(crate) accept_threshold_percent: Option<u8>,

    /// Keep everything in memory: what does not fit compressed goes over the limit
    #[arg(long, conflicts_with = "spill")]
    pub(crate) no_spill: bool,

    /// End the program (status 122) when the limit can't be held, instead of going over it
    #[arg(long)]
    pub(crate) strict: bool,

    /// Write the figures of all processes of the run to FILE, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) stats: Option<PathBuf>,

    /// Serve figures for Prometheus at this address of this machine while the program runs: localhost:9100
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_metrics)]
    pub(crate) metrics: Option<SocketAddr>,

    /// Show what goes on while the program runs: a status line on a terminal, else a line now and then
    #[arg(long)]
    pub(crate) progress: bool,

    /// Print every detail at the end
    #[arg(long, short, conflicts_with = "quiet")]
    pub(crate) verbose: bool,

    /// Print nothing but errors
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM",
          value_hint = ValueHint::CommandWithArguments)]
    pub(crate) program: Vec<OsString>,
}

/// Arguments of `zfolio stat`.
#[derive(Args, Debug)]
#[command(after_help = "Columns:
  LIMIT     the run's, or the process's  PROCESS   resident memory of the whole process
  RESIDENT  managed memory, mapped       STAGED    unmapped but not yet compressed
  POOL      compressed, with overhead    META      tables of zfolio
  DISK      on disk, compressed          DEMAND    what it would hold resident without zfolio
  RATIO     size before compression / (POOL + DISK)
  FAULTS    served in all; P50, P99: time of those that decompressed from memory; STALL: time waited in all
  RUN       the process id of its 'zfolio run'

With --watch on a terminal: what fits, who waits most on top; q ends it. Of the time between two looks:
  WAIT      time that threads waited, in % (above 100 if several waited at once)
  FAULTS/S  faults served in a second     OUT/S     taken out of the program in a second

Examples:
  zfolio stat                     one's own managed processes
  zfolio stat --watch             the same, each second
  zfolio stat 4711                every figure of one process, with its meaning
  zfolio stat 4711 --watch 0.2 --json > log     a line of JSON, five times a second
  zfolio stat 4711 --classes      how full its pool's zspages are, by size of the objects
  zfolio stat 4711 --zswap        the counters of the kernel's zswap, by its names
  sudo zfolio stat --all          those of every user")]
pub(crate) struct StatArgs {
    /// A managed process: all its figures, with their meanings
    #[arg(value_name = "PID", value_parser = parse_pid)]
    pub(crate) pid: Option<u32>,

    /// The processes of all users that may be read (as root: everybody's)
    #[arg(long, short, conflicts_with = "pid")]
    pub(crate) all: bool,

    /// The size classes of the process's pool, in the columns of the kernel's zsmalloc
    #[arg(long, requires = "pid", conflicts_with = "watch")]
    pub(crate) classes: bool,

    /// The counters of the kernel's zswap, a name and a value a line; pages are of 4 KiB
    #[arg(long, requires = "pid", conflicts_with_all = ["watch", "classes"])]
    pub(crate) zswap: bool,

    /// The figures of the accelerators that your disks and processes use, by the kernel's names
    #[arg(long, conflicts_with_all = ["pid", "all", "watch", "json"])]
    pub(crate) accelerators: bool,

    /// Show again each SECONDS [1 if not given]
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = parse_seconds)]
    pub(crate) watch: Option<f64>,

    /// Write JSON; with --watch, a line for each moment
    #[arg(long)]
    pub(crate) json: bool,

    /// Exact numbers: bytes and nanoseconds
    #[arg(long, short)]
    pub(crate) bytes: bool,

    /// No headings
    #[arg(long, short)]
    pub(crate) noheadings: bool,
}

/// Arguments of `zfolio set`.
#[derive(Args, Debug)]
#[command(after_help = "Settings:
  limit=SIZE|N%   as --limit of 'zfolio run', 32M or more; N% of what 'zfolio set' itself may have
  stall=N%        as --stall of 'zfolio run'; 0: only the limit counts
  max_pool_percent=N, accept_threshold_percent=N, write_budget=SIZE[/PERIOD]
                  as these options of 'zfolio run', for what goes to disk; write_budget=none: any amount
  algorithm=NAME[,level=N][,window=N]
                  for what is compressed from now on; what is compressed already stays as it is

For the PID of a 'zfolio run' the setting is that of all processes that it has now. The limit and the budget are
the ones that the processes of a run share, also for the PID of one of them, unless the run has --per-process. A
program that is executed later begins with the settings of its run.

Examples:
  zfolio set 4711 limit=1G
  zfolio set 4711 write_budget=10G/day
  zfolio set 4711 algorithm=zstd,level=3
  zfolio set 4711 limit=75% stall=1%
  zfolio set 4711 stall=0")]
pub(crate) struct SetArgs {
    /// A managed process, or a 'zfolio run'
    #[arg(value_name = "PID", value_parser = parse_pid)]
    pub(crate) pid: u32,

    /// The settings
    #[arg(value_name = "NAME=VALUE", required = true, value_parser = parse_setting)]
    pub(crate) settings: Vec<Setting>,
}

/// A limit, as `zfolio run` takes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    /// So many bytes.
    Bytes(u64),
    /// What machine and cgroup have left.
    Auto,
}

/// A setting that can be changed while a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Setting {
    /// The limit in bytes.
    Limit(u64),
    /// The share of its time that the program may wait, in millionths.
    Stall(u32),
    /// The most that the pool may take, in percent of the limit.
    MaxPoolPercent(u8),
    /// What a pool comes down to that has taken more, in percent of that.
    AcceptThresholdPercent(u8),
    /// What may be written to disk.
    WriteBudget(WriteBudget),
    /// The algorithm for what is compressed from now on, as a word of `zcomp::asked`.
    Algorithm(u64),
}

impl Setting {
    /// What stands before the `=`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Setting::Limit(_) => "limit",
            Setting::Stall(_) => "stall",
            Setting::MaxPoolPercent(_) => "max_pool_percent",
            Setting::AcceptThresholdPercent(_) => "accept_threshold_percent",
            Setting::WriteBudget(_) => "write_budget",
            Setting::Algorithm(_) => "algorithm",
        }
    }

    /// Its name, if it is about what goes to disk.
    pub(crate) fn of_disk(self) -> Option<&'static str> {
        match self {
            Setting::Limit(_) | Setting::Stall(_) | Setting::Algorithm(_) => None,
            Setting::MaxPoolPercent(_)
            | Setting::AcceptThresholdPercent(_)
            | Setting::WriteBudget(_) => Some(self.name()),
        }
    }
}

/// Arguments of `zfolio suggest`.
#[derive(Args, Debug)]
#[command(after_help = "\
The program runs once, with a limit that is a share of what it needs at each moment, and more while it
mostly waits. From its waits zfolio estimates how long it would take at higher limits. Times are of this
machine and this run. Ctrl-C ends the program, and the results so far are printed.

Examples:
  zfolio suggest -- python3 build_index.py
  zfolio suggest --plot curve.svg --slowdown 25 -- sort -S 2G -o sorted lines
  zfolio suggest --verify -- ./simulate input.dat      run it again at the recommended limit")]
pub(crate) struct SuggestArgs {
    /// The slowdown that is accepted, in percent of the time without a limit
    #[arg(long, value_name = "PERCENT", default_value_t = 10,
          value_parser = number::within(1_u16..=1000))]
    pub(crate) slowdown: u16,

    /// The limit during the observation, in percent of the program's need: less shows more
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = number::within(10_u8..=90))]
    pub(crate) share: u8,

    /// How many limits are listed
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = number::within(2_u16..=1000))]
    pub(crate) points: u16,

    /// The compression algorithm, and its parameters: see 'zfolio algorithms'
    #[arg(long, short, value_name = "NAME[,level=N][,window=N][,dict=FILE]", default_value = ALGORITHM_DEFAULT,
          value_parser = parse_algorithm)]
    pub(crate) algorithm: Choice,

    /// What is compressed as one object: a power of two, 4K to 2M [default: 4K, and with auto 16K where that pays]
    #[arg(long, short, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) unit: Option<UnitOrder>,

    /// Draw the curve into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,

    /// Write JSON to standard output; what the program writes there goes to standard error
    #[arg(long)]
    pub(crate) json: bool,

    /// Run the program again at the recommended limit, and print the result
    #[arg(long)]
    pub(crate) verify: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM",
          value_hint = ValueHint::CommandWithArguments)]
    pub(crate) program: Vec<OsString>,
}

/// Arguments of `zfolio doctor`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio doctor                   exit status 0 if 'zfolio run' can work, otherwise 1
  zfolio doctor --json            the same for a program")]
pub(crate) struct DoctorArgs {
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `zfolio algorithms`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio algorithms
  zfolio run --algorithm zstd,level=3 -- python3 train.py")]
pub(crate) struct AlgorithmsArgs {}

/// Arguments of `zfolio help`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio help run
  zfolio help bench codecs")]
pub(crate) struct HelpArgs {
    /// A command, and its own command if it has some
    #[arg(value_name = "COMMAND")]
    pub(crate) commands: Vec<String>,
}
