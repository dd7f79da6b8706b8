//! `zfolio corpus`: the memory of real processes, as a file for measurements.
//!
//! How well memory compresses depends on the data. So the comparison uses the data of real
//! programs: the resident, private, anonymous pages of a process, in the order of their addresses,
//! without gaps.

pub(crate) mod capture;
pub(crate) mod make;

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use zfolio_core::size;
use zfolio_sys::partial::Partial;

use crate::compare::Failure;
use capture::CaptureError;

/// Arguments of `zfolio corpus`.
#[derive(Args, Debug)]
pub struct CorpusArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Save the memory of a process that runs
    #[command(after_help = "\
The resident anonymous private pages of the process are written in address order. Pages of zeros are
left out unless --zeros is given. The process is not stopped: what it changes meanwhile may be saved
as it was before or after.

Examples:
  zfolio corpus capture 1234 -o corpus.bin
  zfolio corpus capture $(pidof redis-server) -o redis.bin --zeros")]
    Capture(CaptureArgs),
    /// Start real programs (python3, node, java), and save the memory that they fill
    #[command(after_help = "\
Each program that is present builds ordinary data (dicts and lists, a Map and a Float64Array, a
HashMap), is captured as 'zfolio corpus capture' does, and stopped. Programs that are absent are
skipped, and the line on standard error says so.

Examples:
  zfolio corpus make -o corpus.bin
  zfolio corpus make -o small.bin --bytes 64M")]
    Make(MakeArgs),
}

/// Arguments of `zfolio corpus capture`.
#[derive(Args, Debug)]
struct CaptureArgs {
    /// The process
    #[arg(value_parser = parse_pid)]
    pid: u32,
    /// Where to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Keep pages of zeros
    #[arg(long)]
    zeros: bool,
}

/// Arguments of `zfolio corpus make`.
#[derive(Args, Debug)]
struct MakeArgs {
    /// Where to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// How much in all, in equal parts from each program
    #[arg(long, default_value = "400M", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// Keep pages of zeros
    #[arg(long)]
    zeros: bool,
}

fn parse_pid(text: &str) -> Result<u32, String> {
    let pid = text.parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| format!("'{text}' is not a process id; accepted: 1 or more"))
}

/// A size, for clap.
pub(crate) fn parse_size(text: &str) -> Result<u64, size::SizeError> {
    size::parse(text)
}

/// Why no corpus was written.
#[derive(Debug)]
pub(crate) enum CorpusFailure {
    /// The user must change an argument.
    Refused(String),
    /// The system returned an error.
    Failed(String),
    /// A signal requested a stop; nothing was written.
    Stopped(i32),
}

impl CorpusFailure {
    pub(crate) fn status(&self) -> u8 {
        match self {
            CorpusFailure::Refused(_) => 2,
            CorpusFailure::Failed(_) => 125,
            // As in a shell.
            CorpusFailure::Stopped(signal) => u8::try_from(128 + signal).unwrap_or(1),
        }
    }
}

impl fmt::Display for CorpusFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CorpusFailure::Refused(line) | CorpusFailure::Failed(line) => f.write_str(line),
            CorpusFailure::Stopped(_) => f.write_str("interrupted; nothing was written"),
        }
    }
}

impl From<CaptureError> for CorpusFailure {
    fn from(error: CaptureError) -> CorpusFailure {
        let line = error.to_string();
        if error.is_refusal() { CorpusFailure::Refused(line) } else { CorpusFailure::Failed(line) }
    }
}

impl From<CorpusFailure> for Failure {
    fn from(failure: CorpusFailure) -> Failure {
        match failure {
            CorpusFailure::Refused(line) => Failure::Refused(line),
            CorpusFailure::Failed(line) => Failure::Failed(line),
            CorpusFailure::Stopped(signal) => Failure::Stopped(signal),
        }
    }
}

/// Runs `zfolio corpus`.
#[must_use]
pub fn corpus(args: CorpusArgs) -> ExitCode {
    let outcome = match &args.what {
        What::Capture(args) => capture_to(args),
        What::Make(args) => make::make(&args.output, args.bytes, args.zeros),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("zfolio: {failure}");
            ExitCode::from(failure.status())
        }
    }
}

/// A file that gets its name only when it is complete.
#[derive(Debug)]
pub(crate) struct Output {
    partial: Partial,
    pub(crate) writer: BufWriter<File>,
}

impl Output {
    /// `option` is what named the file.
    pub(crate) fn create(option: &str, path: &Path) -> Result<Output, CorpusFailure> {
        let refused = |why: &str| {
            let path = path.display();
            CorpusFailure::Refused(format!("{option}: '{path}' {why}; accepted: a file to write"))
        };
        if path.file_name().is_none() {
            return Err(refused("names no file"));
        }
        if path.is_dir() {
            return Err(refused("is a directory"));
        }
        let made = Partial::create(path);
        let (partial, file) =
            made.map_err(|error| refused(&format!("cannot be written: {error}")))?;
        Ok(Output { partial, writer: BufWriter::new(file) })
    }

    /// Gives the file its name.
    pub(crate) fn finish(mut self) -> Result<(), CorpusFailure> {
        let path = self.partial.path().to_owned();
        let named = io::Write::flush(&mut self.writer).and_then(|()| self.partial.finish());
        named.map_err(|error| CorpusFailure::Failed(format!("{}: {error}", path.display())))
    }
}

fn capture_to(args: &CaptureArgs) -> Result<(), CorpusFailure> {
    let process = capture::Process::open(args.pid)?;
    let mut output = Output::create("--output", &args.output)?;
    let counts = process.capture(&mut output.writer, u64::MAX, args.zeros)?;
    if counts.pages_written == 0 {
        let line = format!("PID {}: no resident anonymous pages to capture", args.pid);
        return Err(CorpusFailure::Refused(line));
    }
    output.finish()?;
    eprintln!("{}: {} of {}", args.output.display(), counts, process.name());
    Ok(())
}
