//! The command line: what is accepted, its help, and the one line for what is not.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::size;
use zfolio_core::zcomp::{self, Params, Zcomp};

use crate::allowance::Allowance;
use crate::completion;
use crate::dictionary;
use crate::failure::Failure;
use crate::manual;
use crate::run::RUN_LIMIT_BYTES_MIN;
use crate::spelling;

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

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a program under a memory limit
    Run(RunArgs),
    /// Show the figures of managed processes, live
    Stat(StatArgs),
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
  zfolio run -- make -j8                        half of the memory for each process

The program inherits everything, and so do its children: each managed process has the limit for
itself. zfolio waits, passes signals on, and ends as the program ended: with its exit status, or by
the same signal. Otherwise: 127 PROGRAM was not found; 126 it cannot be executed or managed (static,
setuid, 32-bit, musl); 125 this machine can't ('zfolio doctor' says why); 122 --strict ended the
program; 2 a wrong argument.

Defaults may stand in the environment: ZFOLIO_LIMIT, ZFOLIO_ALGORITHM, ZFOLIO_UNIT, and ZFOLIO_STRICT=1,
ZFOLIO_QUIET=1. An option given overrides them."
)]
pub(crate) struct RunArgs {
    /// The memory that the program may use [default: half of what the machine or cgroup allows]
    ///
    /// Everything counts: resident, staged and compressed memory, and zfolio's own. At least 32M; with %, of
    /// what the machine or cgroup allows.
    #[arg(long, short, value_name = "SIZE|N%", value_parser = parse_limit)]
    pub(crate) limit: Option<u64>,

    /// The compression algorithm, and its parameters: see 'zfolio algorithms' [default: zstd]
    #[arg(long, short, value_name = "NAME[,level=N][,dict=FILE]", value_parser = parse_algorithm)]
    pub(crate) algorithm: Option<Params>,

    /// What is compressed as one object: a power of two, 4K to 2M [default: 16K]
    ///
    /// Large units compress better and faster; small ones serve a random access sooner.
    #[arg(long, short, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) unit: Option<UnitOrder>,

    /// End the program (status 122) when the limit can't be held, instead of going over it
    #[arg(long)]
    pub(crate) strict: bool,

    /// Write the figures of all processes of the run to FILE, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) stats: Option<PathBuf>,

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
  LIMIT     what was asked for           PROCESS   resident memory of the whole process
  RESIDENT  managed memory, mapped       STAGED    unmapped but not yet compressed
  POOL      compressed, with overhead    META      tables of zfolio
  DEMAND    what the program would hold resident without zfolio
  RATIO     size before compression / POOL
  FAULTS    served in all; P50, P99: time of those that decompressed; STALL: time waited in all

With --watch on a terminal: what fits, who waits most on top; q ends it. Of the time between two looks:
  WAIT      time that threads waited, in % (above 100 if several waited at once)
  FAULTS/S  faults served in a second     OUT/S     taken out of the program in a second

Examples:
  zfolio stat                     one's own managed processes
  zfolio stat --watch             the same, each second
  zfolio stat 4711                every figure of one process, with its meaning
  zfolio stat 4711 --watch 0.2 --json > log     a line of JSON, five times a second
  zfolio stat 4711 --classes      how full its pool's zspages are, by size of the objects
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

/// Arguments of `zfolio suggest`.
#[derive(Args, Debug)]
#[command(after_help = "\
The program runs once, with a limit that follows: a share of what it needs at each moment, more while
it waits most of the time. How long it waited for what tells how long it would take at higher limits.
Times are of this machine and this run. Ctrl-C ends the program, and what is known by then is printed.

Examples:
  zfolio suggest -- python3 build_index.py
  zfolio suggest --plot curve.svg --slowdown 25 -- sort -S 2G -o sorted lines
  zfolio suggest --verify -- ./simulate input.dat      run it again at the recommended limit")]
pub(crate) struct SuggestArgs {
    /// The slowdown that is accepted, in percent of the time without a limit
    #[arg(long, value_name = "PERCENT", default_value_t = 10,
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) slowdown: u16,

    /// What the program is given while it is observed, in percent of its need: less shows more
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = clap::value_parser!(u8).range(10..=90))]
    pub(crate) share: u8,

    /// How many limits are listed
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u16).range(2..=1000))]
    pub(crate) points: u16,

    /// The compression algorithm, and its parameters: see 'zfolio algorithms'
    #[arg(long, short, value_name = "NAME[,level=N][,dict=FILE]", default_value = ALGORITHM_DEFAULT,
          value_parser = parse_algorithm)]
    pub(crate) algorithm: Params,

    /// What is compressed as one object: a power of two, 4K to 2M
    #[arg(long, short, value_name = "SIZE", default_value = "16K", value_parser = parse_unit)]
    pub(crate) unit: UnitOrder,

    /// Draw the curve into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,

    /// Write JSON to standard output; what the program writes there goes to standard error
    #[arg(long)]
    pub(crate) json: bool,

    /// Run the program again at the recommended limit, and tell how that was
    #[arg(long)]
    pub(crate) verify: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
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

pub(crate) fn parse_limit(given: &str) -> Result<u64, String> {
    let bytes = match given.trim().strip_suffix('%') {
        Some(percent) => Allowance::percentage(given, percent)?,
        None => size::parse(given).map_err(|error| error.to_string())?,
    };
    if bytes < RUN_LIMIT_BYTES_MIN {
        let least = size::display(RUN_LIMIT_BYTES_MIN);
        let told = if given.contains('%') {
            format!(" ({})", size::display(bytes))
        } else {
            String::new()
        };
        return Err(format!("'{given}'{told} is too small; accepted: {least} or more"));
    }
    Ok(bytes)
}

pub(crate) fn parse_unit(given: &str) -> Result<UnitOrder, String> {
    let bytes = size::parse(given).map_err(|error| error.to_string())?;
    let order = usize::try_from(bytes).ok().and_then(UnitOrder::from_bytes);
    order.ok_or_else(|| format!("'{given}' is not a unit; accepted: a power of two, 4K to 2M"))
}

/// With the dictionary that is named, read and tried: whoever asks hears now that it cannot be used.
pub(crate) fn parse_algorithm(given: &str) -> Result<Params, String> {
    let mut params: Params = given.parse().map_err(|error: zcomp::Error| error.to_string())?;
    if let Some(named) = &params.dictionary {
        let dictionary = dictionary::read(named.path())?;
        params.dictionary = Some(Arc::new(dictionary));
        let smallest = UnitOrder::from_bytes(PAGE_BYTES).expect("a page is a unit");
        Zcomp::new(params.clone(), smallest, 1).map_err(|error| error.to_string())?;
    }
    Ok(params)
}

fn parse_pid(given: &str) -> Result<u32, String> {
    match given.parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(format!(
            "'{given}' is not a process id; accepted: a number, as 'zfolio stat' lists"
        )),
    }
}

fn parse_seconds(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{given}' is not a time; accepted: seconds, 0.01 to 86400")),
    }
}

/// The arguments, or the one line to print instead. Help and version are printed, and end the process
/// here.
///
/// # Errors
///
/// When they are not accepted, or help cannot be written.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Arguments, Failure> {
    let words: Vec<OsString> = words.collect();
    Arguments::try_parse_from(&words).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => match error.print() {
            Err(why) if why.kind() != io::ErrorKind::BrokenPipe => {
                Failure::output(format!("help: {why}"))
            }
            _ => std::process::exit(error.exit_code()),
        },
        _ => Failure::argument(one_line(&error, &words)),
    })
}

/// Prints the help of the command that `words` name, as its `--help` does, and ends the process.
///
/// # Errors
///
/// When there is no such command, or its help cannot be written.
pub(crate) fn help(words: &[String]) -> Result<ExitCode, Failure> {
    let mut definition = Arguments::command();
    let path = command_path(&mut definition, words)?;
    let line = ["zfolio"].into_iter().chain(path.iter().map(String::as_str)).chain(["--help"]);
    parse(line.map(OsString::from)).map(|_| ExitCode::SUCCESS)
}

/// `words`, if they name a command, or a command of a command.
///
/// # Errors
///
/// When they do not: as the command line itself says it, with the name that was meant.
pub(crate) fn command_path<'a>(
    definition: &mut clap::Command,
    words: &'a [String],
) -> Result<&'a [String], Failure> {
    let mut command = &*definition;
    for (index, word) in words.iter().enumerate() {
        if let Some(inner) = command.find_subcommand(word) {
            command = inner;
            continue;
        }
        if !command.has_subcommands() {
            let path = words[..index].join(" ");
            let told = format!("'{word}': 'zfolio {path}' has no commands of its own");
            return Err(Failure::argument(format!("{told}; accepted: zfolio help {path}")));
        }
        let line = ["zfolio"].into_iter().chain(words[..=index].iter().map(String::as_str));
        let line: Vec<OsString> = line.map(OsString::from).collect();
        let error = definition.try_get_matches_from_mut(&line).expect_err("no such command");
        return Err(Failure::argument(one_line(&error, &line)));
    }
    Ok(words)
}

/// What clap found wrong: the argument, what was given, what is accepted.
fn one_line(error: &clap::Error, words: &[OsString]) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(", "),
        Some(ContextValue::StyledStr(text)) => text.to_string(),
        _ => String::new(),
    };
    let argument = context(ContextKind::InvalidArg);
    // "--limit <SIZE>", "[PID]", "<PROGRAM>...": the name is enough.
    let name = argument.split(' ').next().unwrap_or_default();
    let name = name.trim_matches(['[', ']', '<', '>', '.']);
    let value = context(ContextKind::InvalidValue);
    let hint = "accepted: what 'zfolio --help' and 'zfolio COMMAND --help' list";
    match error.kind() {
        ErrorKind::ValueValidation => match std::error::Error::source(error) {
            Some(source) => format!("{name}: {source}"),
            None => format!("{name}: '{value}' is not accepted; {hint}"),
        },
        ErrorKind::UnknownArgument => match spelling::option(words, name) {
            Some(meant) => format!("argument '{name}' is not known; did you mean '{meant}'?"),
            None => format!("argument '{name}' is not known; {hint}"),
        },
        ErrorKind::InvalidSubcommand => {
            let given = context(ContextKind::InvalidSubcommand);
            match spelling::command(words, &given) {
                Some(meant) => format!("command '{given}' is not known; did you mean '{meant}'?"),
                None => format!("command '{given}' is not known; {hint}"),
            }
        }
        ErrorKind::MissingRequiredArgument if name.starts_with("PROGRAM") => {
            "PROGRAM: missing; accepted: a program and its arguments, as in \
             'zfolio run --limit 2G -- python3 train.py'"
                .to_owned()
        }
        ErrorKind::MissingRequiredArgument => format!("{name}: missing; {hint}"),
        ErrorKind::InvalidValue if value.is_empty() => {
            format!("{name}: a value is missing; accepted: {argument}")
        }
        ErrorKind::InvalidValue => {
            let accepted = context(ContextKind::ValidValue);
            format!("{name}: '{value}' is not accepted; accepted: {accepted}")
        }
        ErrorKind::ArgumentConflict => {
            let other = context(ContextKind::PriorArg);
            let other = other.trim_matches(['[', ']']);
            format!("{name}: not together with {other}; accepted: one of them")
        }
        _ => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            format!("{}; {hint}", first.trim_start_matches("error: "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arguments, Command, help, parse};
    use clap::CommandFactory;

    fn words(line: &str) -> impl Iterator<Item = std::ffi::OsString> {
        ["zfolio"].into_iter().chain(line.split_whitespace()).map(Into::into)
    }

    fn refused(line: &str) -> String {
        let failure = match parse(words(line)) {
            Err(failure) => failure,
            Ok(Arguments { command: Command::Help(asked) }) => {
                help(&asked.commands).expect_err(line)
            }
            Ok(_) => panic!("{line} is accepted"),
        };
        assert_eq!(failure.status(), 2, "{line}");
        failure.to_string()
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        let mut definition = Arguments::command();
        for command in definition.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{help}");
        }
    }

    #[test]
    fn run_takes_what_follows_as_it_is() {
        for line in ["run -l 1G -- ls -l --limit 7", "run -l 1G ls -l --limit 7"] {
            let Command::Run(run) = parse(words(line)).expect(line).command else { panic!() };
            assert_eq!(run.limit, Some(1 << 30));
            assert_eq!(run.program, ["ls", "-l", "--limit", "7"]);
            assert_eq!(run.unit, None);
        }
    }

    #[test]
    fn refusals_name_the_argument_what_was_given_and_what_is_accepted() {
        let cases = [
            ("run --limit 12Q -- true", "--limit: '12Q' is not a size; accepted:"),
            ("run --limit 0% -- true", "--limit: '0%' is not a share; accepted: 1% to 100%"),
            ("run --limit 101% -- true", "--limit: '101%' is not a share"),
            ("run --limit x% -- true", "--limit: 'x%' is not a share"),
            ("run --limit 0.0001% -- true", "--limit: '0.0001%'"),
            ("run -q -v -- true", "not together with"),
            ("run --limit 31M -- true", "--limit: '31M' is too small; accepted: 32M or more"),
            ("run --limit -- true", "--limit"),
            ("run --unit 48K -- true", "--unit: '48K' is not a unit; accepted: a power of two"),
            ("run --unit 2K -- true", "--unit: '2K' is not a unit"),
            ("run --unit 4M -- true", "--unit: '4M' is not a unit"),
            ("run --algorithm lz5 -- true", "--algorithm: "),
            ("run --algorithm zstd,level=99 -- true", "--algorithm: "),
            ("run --algorithm zstd,dict=/nowhere -- true", "--algorithm: dictionary '/nowhere': "),
            ("run --algorithm zstd,dict=/ -- true", "--algorithm: dictionary '/': "),
            ("run --algorithm zstd,level=1,level=1 -- true", "--algorithm: zstd has parameter"),
            ("run --frob -- true", "argument '--frob' is not known; accepted:"),
            ("run", "PROGRAM: missing; accepted:"),
            ("run --limit 1G", "PROGRAM: missing; accepted:"),
            ("fly", "command 'fly' is not known; accepted:"),
            ("rnu -- true", "command 'rnu' is not known; did you mean 'run'?"),
            ("bench usmem", "command 'usmem' is not known; did you mean 'usemem'?"),
            (
                "bench codecs --agianst kernel",
                "'--agianst' is not known; did you mean '--against'?",
            ),
            (
                "bench codecs --against krnel",
                "--against: 'krnel' is not accepted; accepted: kernel",
            ),
            ("help bench codex", "command 'codex' is not known; did you mean 'codecs'?"),
            ("help run true", "'true': 'zfolio run' has no commands of its own"),
            ("dict train -o x", "--corpus: missing; accepted:"),
            ("dict train --corpus c -o x --size 2M", "--size: '2M' is not accepted; accepted: 256"),
            ("dict train --corpus c -o x --unit 5K", "--unit: '5K' is not a unit"),
            ("stat abc", "PID: 'abc' is not a process id; accepted:"),
            ("stat 0", "PID: '0' is not a process id"),
            ("stat --watch 0", "--watch: '0' is not a time; accepted:"),
            ("stat --all 7", "not together with"),
        ];
        for (line, told) in cases {
            let refused = refused(line);
            assert!(refused.contains(told), "{line}: {refused}");
            assert!(refused.starts_with("zfolio: ") && !refused.contains('\n'), "{refused}");
        }
    }

    #[test]
    fn an_algorithm_is_named_with_what_is_accepted() {
        for (given, accepted) in
            [("lz5", "zstd"), ("zstd,level=99", "accepted"), ("zstd,frob=7", "level")]
        {
            let refused = refused(&format!("run --algorithm {given} -- true"));
            assert!(refused.contains(accepted), "{refused}");
        }
    }
}
