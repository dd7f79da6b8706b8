//! `zfolio bench swap`: the slot allocator of swap areas.
//!
//! # What is measured
//!
//! - **speed**: pairs of take and free a second, on one thread and on several.
//! - **fragmentation**: how many folios of 64 KiB find no run of slots, round after round, while folios and
//!   single pages go out and come back. This depends on the seed alone, not on the machine.
//! - **splitting**: the same memory swapped out and in as single pages, and as whole folios, on a file in
//!   memory.
//!
//! Beside the last two stand the figures that were published for the kernel.

mod fragmentation;
mod speed;
mod splitting;
mod table;

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use zfolio_core::number;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::size;

use crate::compare::{Failure, go_on, print};
use crate::corpus::parse_size;
use crate::os;
use fragmentation::SwapIn;
use table::Table;

pub(crate) const HELP: &str = "\
Examples:
  zfolio bench swap
  zfolio bench swap --part fragmentation --area 1G --full 90 --full 95 --rounds 100
  zfolio bench swap --part splitting -n 8 --bytes 256M --json";

/// An area below this has too few clusters for the fragmentation test.
const AREA_MIN: u64 = 16 << 20;

/// An area has at most 2^32 slots, and the book of the test has a word for each.
const AREA_MAX: u64 = 256 << 30;

/// Arguments of `zfolio bench swap`.
#[derive(Args, Debug)]
pub(crate) struct SwapArgs {
    /// What to measure; may be repeated [default: all]
    #[arg(long, value_enum)]
    part: Vec<Part>,
    /// Threads [default: as many as there are CPUs]
    #[arg(short = 'n', value_parser = number::within(1_u32..=1024))]
    threads: Option<u32>,
    /// Rounds of speed and splitting; each figure is the median
    #[arg(short, long, default_value_t = 5, value_parser = number::within(1_u32..=1000))]
    repeats: u32,
    /// fragmentation: the size of the area
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = parse_size)]
    area: u64,
    /// fragmentation: how much of the area the memory needs, in percent; may be repeated
    /// [default: 50 75 90]
    #[arg(long, value_name = "PERCENT", value_parser = number::within(1_u32..=100))]
    full: Vec<u32>,
    /// fragmentation: rounds
    #[arg(long, default_value_t = 17, value_parser = number::within(1_u32..=100_000))]
    rounds: u32,
    /// fragmentation: what chooses folios and pages
    #[arg(long, default_value_t = 1, value_parser = number::within(0..=u64::MAX))]
    seed: u64,
    /// splitting: memory of each thread
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// splitting: where the file is
    #[arg(long, default_value = "/dev/shm", value_name = "FOLDER")]
    dir: PathBuf,
    /// One JSON object instead of the tables
    #[arg(long)]
    json: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Pairs of take and free a second
    Speed,
    /// Folios that find no run of slots, round after round
    Fragmentation,
    /// Folios as single pages, and whole
    Splitting,
}

impl SwapArgs {
    fn wants(&self, part: Part) -> bool {
        self.part.is_empty() || self.part.contains(&part)
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |name: &str, given: u64, accepted: &str| {
            let given = size::display(given);
            Err(Failure::Refused(format!("{name} {given}: accepted: {accepted}")))
        };
        if !(AREA_MIN..=AREA_MAX).contains(&self.area) {
            return refuse("--area", self.area, "16M to 256G");
        }
        if !(splitting::BYTES_MIN..=AREA_MAX).contains(&self.bytes) {
            return refuse("--bytes", self.bytes, "2M to 256G");
        }
        Ok(())
    }
}

/// Measures and prints. Always returns true, since every problem is a failure.
pub(crate) fn swap(args: &SwapArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    args.check()?;
    let table = measure(args)?;
    let text = if args.json { format!("{:#}\n", table.json()) } else { table.text() };
    print(&text)?;
    Ok(true)
}

fn measure(args: &SwapArgs) -> Result<Table, Failure> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.map_or(cpus, |threads| threads as usize);
    let mut table = Table { threads, cpus, repeats: args.repeats, ..Table::default() };
    if args.wants(Part::Speed) {
        announce("speed")?;
        table.speed = speed::measure(threads, args.repeats, 1);
    }
    if args.wants(Part::Fragmentation) {
        let full = if args.full.is_empty() { &[50, 75, 90][..] } else { &args.full };
        let slots = u32::try_from(args.area / PAGE_BYTES as u64).expect("at most 2^26");
        table.area_bytes = args.area;
        for (swap_in, full) in [SwapIn::Whole, SwapIn::PageByPage]
            .into_iter()
            .flat_map(|swap_in| full.iter().map(move |full| (swap_in, *full)))
        {
            announce("fragmentation")?;
            let measured = fragmentation::measure(slots, swap_in, full, args.rounds, args.seed);
            table.fragmentation.push(measured);
        }
    }
    if args.wants(Part::Splitting) {
        announce("splitting")?;
        let measured = splitting::measure(&args.dir, threads, args.bytes, args.repeats);
        let failed = |error: io::Error| {
            let line = format!("--dir {}: {error}", args.dir.display());
            let is_wrong = error.kind() == ErrorKind::InvalidData;
            if is_wrong { Failure::Wrong(line) } else { Failure::Failed(line) }
        };
        table.bytes = args.bytes;
        table.splitting = measured.map_err(failed)?;
    }
    Ok(table)
}

/// Says what comes next, unless the user has had enough.
fn announce(part: &str) -> Result<(), Failure> {
    go_on()?;
    eprintln!("zfolio: {part}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{SwapArgs, measure};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SwapArgs,
    }

    fn parse(line: &str) -> SwapArgs {
        Line::try_parse_from(line.split(' ')).map(|line| line.args).unwrap()
    }

    #[test]
    fn sizes_that_are_too_small_are_refused() {
        for line in ["x", "x --area 16M --bytes 2M --full 100"] {
            assert!(parse(line).check().is_ok(), "{line}");
        }
        for line in ["x --area 15M", "x --bytes 1M", "x --area 257G"] {
            assert!(parse(line).check().is_err(), "{line}");
        }
        for line in ["x --full 0", "x --full 101", "x --part all", "x -n 0", "x --rounds 0"] {
            assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let refused = measure(&parse("x --part splitting --dir /nowhere --bytes 2M"));
        assert!(matches!(refused, Err(super::Failure::Failed(line)) if line.contains("/nowhere")));
    }

    /// Goal: the tables have what was asked for. Method: a small run of the part that is the same everywhere.
    #[test]
    fn a_small_run_has_known_results() {
        let args = parse("x --part fragmentation --area 16M --full 50 --rounds 3");
        let Ok(table) = measure(&args) else { panic!("nothing can fail") };
        let json = table.json();
        assert_eq!(
            json["fragmentation"][0]["fallback_percent"],
            serde_json::json!([0.0, 0.0, 0.0])
        );
        assert_eq!(json["fragmentation"][1]["swap_in"], "page by page");
        assert_eq!(json["speed"], serde_json::json!([]));
        assert!(table.text().contains("whole 50%"), "{}", table.text());
    }
}
