//! `zfolio bench spill`: memory that does not compress, far above a limit.
//!
//! A program fills memory with noise, in order, reads it back in order, and then pages at random, with one thread and
//! with several; it compares every byte. That is measured:
//!
//! - **file**: not with the program, but what the file system can do when the same bytes are written and read straight
//!   to a file, 64 KiB at a time and 16 at once, and 4 KiB at random, one and as many at once as there are threads.
//! - **kernel**: with swap on a file in the same directory, in a memory cgroup of the limit.
//! - **run**: under `zfolio run --limit`, which seals what it writes.
//!
//! Each figure is the median of rounds in which all ways run by turns.

mod file;
mod noise;
mod table;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::Args;
use zfolio_core::number;
use zfolio_core::size;

use crate::compare::{Against, Failure, go_on, own_program, print};
use crate::corpus::parse_size;
use crate::kernel;
use crate::kernel::swap_file::SwapFile;
use crate::os;
use crate::watch::{Ended, Look, WatchError, Whose, read_text, watch};
use noise::Report;
use table::{Row, Table};

pub(crate) const HELP: &str = "\
With --against kernel the program also runs in a memory cgroup with swap on a file in the same
directory. That needs root; everything that is changed (swap, cgroup, huge pages) is put back, also
after Ctrl-C or a failure.

Examples:
  sudo zfolio bench spill --against kernel
  zfolio bench spill --dir /mnt/nvme --bytes 4G --limit 1G -n 64 --json";

/// How often memory is sampled.
const SAMPLE: Duration = Duration::from_millis(50);

/// Arguments of `zfolio bench spill`.
#[derive(Args, Debug)]
pub(crate) struct SpillArgs {
    /// Compare with it
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Where the files are [default: $TMPDIR, else /var/tmp]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// How much memory the program fills
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// The limit
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = parse_size)]
    limit: u64,
    /// Threads that read pages at random
    #[arg(short = 'n', default_value_t = 16, value_parser = number::within(1_u32..=48))]
    threads: u32,
    /// Random reads of one thread; all threads together make four times as many
    #[arg(long, default_value_t = 25_000, value_parser = number::within(16_u32..=10_000_000))]
    reads: u32,
    /// Rounds; each figure is the median
    #[arg(short, long, default_value_t = 3, value_parser = number::within(1_u32..=1000))]
    repeats: u32,
    /// One JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Be the program
    #[arg(long, hide = true)]
    workload: bool,
}

/// What is measured: in order, MB/s written and read; at random, reads a second by one thread and by all.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Figures(pub(crate) [f64; 4]);

impl Figures {
    /// From the bytes that were written and read in order, with the nanoseconds of either; and reads with theirs.
    #[expect(
        clippy::cast_precision_loss,
        reason = "bytes and nanoseconds of one run are below 2^53"
    )]
    fn new(bytes: usize, in_order_ns: [u64; 2], random: [(usize, u64); 2]) -> Figures {
        let rate = |of: f64, ns: u64| of * 1e9 / ns.max(1) as f64;
        let [write_ns, read_ns] = in_order_ns;
        let [one, all] = random.map(|(reads, ns)| rate(reads as f64, ns));
        Figures([rate(bytes as f64 / 1e6, write_ns), rate(bytes as f64 / 1e6, read_ns), one, all])
    }
}

/// One of the ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    File,
    Kernel,
    Run,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::File => "file",
            Way::Kernel => "kernel",
            Way::Run => "run",
        }
    }
}

/// What all rounds share.
struct Bench<'a> {
    args: &'a SpillArgs,
    dir: PathBuf,
    zfolio: PathBuf,
    kernel: Option<SwapFile>,
}

/// Measures and prints. Returns whether every run gave figures without a wrong byte.
pub(crate) fn spill(args: &SpillArgs) -> Result<bool, Failure> {
    if args.workload {
        return workload(args);
    }
    os::catch_stop_signals();
    args.check()?;
    let dir = args.dir()?;
    let mut notes = Vec::new();
    let kernel = args.against.and_then(|Against::Kernel| match SwapFile::find(&dir) {
        Ok(kernel) => Some(kernel),
        Err(reason) => {
            notes.push(format!("the kernel's swap was left out: {reason}"));
            None
        }
    });
    let bench = Bench { args, dir, zfolio: own_program(None)?, kernel };
    let mut table = Table { title: bench.title(), rows: bench.rows(), notes };
    kernel::journal::undo_on_panic();
    for round in 1..=args.repeats {
        bench.round(round, &mut table.rows)?;
    }
    let text = if args.json { format!("{:#}\n", table.json()) } else { table.text() };
    print(&text)?;
    Ok(table.is_right())
}

fn workload(args: &SpillArgs) -> Result<bool, Failure> {
    let failed = |error: std::io::Error| Failure::Failed(format!("--bytes: {error}"));
    let report = noise::run(args.bytes(), args.threads as usize, args.reads as usize);
    let report = report.map_err(failed)?;
    print(&format!("{}\n", report.json()))?;
    Ok(report.is_right)
}

impl SpillArgs {
    fn check(&self) -> Result<(), Failure> {
        let refuse = |name: &str, given: u64, accepted: &str| {
            let given = size::display(given);
            Err(Failure::Refused(format!("{name} {given}: accepted: {accepted}")))
        };
        if !(16 << 20..=1 << 40).contains(&self.bytes) {
            return refuse("--bytes", self.bytes, "16M to 1T");
        }
        if self.limit < 32 << 20 {
            return refuse("--limit", self.limit, "32M or more");
        }
        Ok(())
    }

    /// The directory of the files: one on a disk.
    fn dir(&self) -> Result<PathBuf, Failure> {
        let dir = self.dir.clone().or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from));
        let dir = dir.unwrap_or_else(|| "/var/tmp".into());
        let why = match zfolio_sys::disk::kept_in_memory(&dir) {
            _ if !dir.is_dir() => "is no directory".to_owned(),
            Ok(Some(kind)) => format!("is on a {kind}, whose files are memory"),
            _ => return Ok(dir),
        };
        let dir = dir.display();
        Err(Failure::Refused(format!("--dir: '{dir}' {why}; accepted: a directory on a disk")))
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.bytes).expect("at most 2^40")
    }
}

impl Bench<'_> {
    fn title(&self) -> String {
        let args = self.args;
        let kernel =
            self.kernel.as_ref().map_or(String::new(), |kernel| format!("{}; ", kernel.describe()));
        format!(
            "spill: {} of noise in {}, files in {}, {} threads; {kernel}medians of {} round(s); Linux {}, {} CPU(s)",
            size::display(args.bytes),
            size::display(args.limit),
            self.dir.display(),
            args.threads,
            args.repeats,
            zfolio_sys::probe::kernel_release(),
            crate::compare::rounds::cpus(),
        )
    }

    fn rows(&self) -> Vec<Row> {
        let kernel = self.kernel.as_ref().map(|_| Way::Kernel);
        [Some(Way::File), kernel, Some(Way::Run)].into_iter().flatten().map(Row::new).collect()
    }

    fn round(&self, round: u32, rows: &mut [Row]) -> Result<(), Failure> {
        for row in rows {
            eprintln!("zfolio: round {round} of {}: {}", self.args.repeats, row.way.name());
            go_on()?;
            match self.run(row.way) {
                Ok((figures, peak_bytes)) => row.add(figures, peak_bytes),
                Err(WatchError::Stopped(signal)) => return Err(Failure::Stopped(signal)),
                Err(WatchError::System(error)) => {
                    eprintln!("zfolio: {}: {error}", row.way.name());
                    row.failures.push(error.to_string());
                }
            }
        }
        Ok(())
    }

    /// Runs one way. Returns its figures, and the most memory that the program had.
    fn run(&self, way: Way) -> Result<(Figures, Option<u64>), WatchError> {
        let args = self.args;
        let (threads, reads) = (args.threads as usize, args.reads as usize);
        let look = |whose| Look { whose, every: SAMPLE, elapsed_max: None };
        let ended = match way {
            Way::File => {
                let figures = file::measure(&self.dir, args.bytes(), threads, reads);
                return Ok((figures.map_err(std::io::Error::other)?, None));
            }
            Way::Kernel => {
                let kernel = self.kernel.as_ref().expect("rows() has it only if there is one");
                let mut command = Command::new(&self.zfolio);
                self.add_workload(&mut command);
                kernel.run((args.bytes, args.limit), command, &look(Whose::All), read_text)?
            }
            Way::Run => {
                let mut command = Command::new(&self.zfolio);
                command.args(["run", "--quiet", "--limit", &args.limit.to_string(), "--spill"]);
                command.arg(&self.dir).arg("--").arg(&self.zfolio);
                self.add_workload(&mut command);
                os::tie(&mut command, None);
                watch(command, &look(Whose::Descendants), read_text)?
            }
        };
        let report = report_of(&ended)?;
        Ok((report.figures, Some(ended.anonymous_bytes_max)))
    }

    /// Adds the arguments with which this program is the workload.
    fn add_workload(&self, command: &mut Command) {
        let args = self.args;
        command.args(["bench", "spill", "--workload", "--bytes", &args.bytes.to_string()]);
        command.args(["-n", &args.threads.to_string(), "--reads", &args.reads.to_string()]);
    }
}

/// What the workload said.
fn report_of(ended: &Ended<String>) -> Result<Report, WatchError> {
    let complaint = ended.complaint.trim().lines().next().unwrap_or("without a word");
    let report = Report::parse(&ended.output);
    let report = report.ok_or_else(|| format!("{}: {complaint}", ended.status));
    let report = report.and_then(|report| match report.is_right {
        true => Ok(report),
        false => Err("a byte was not what had been written".to_owned()),
    });
    Ok(report.map_err(std::io::Error::other)?)
}
