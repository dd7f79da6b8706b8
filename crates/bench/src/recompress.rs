//! `zfolio bench recompress`: a disk whose idle part is recompressed while another part is read.
//!
//! The disk is filled with the memory of real processes by the first algorithm. Most of it, the **idle** part, is
//! marked idle and recompressed by the second algorithm, as fast as one thread can. Meanwhile another thread reads
//! pages of the rest, the **used** part, at random, one every 0.1 ms. The same reads are measured before that, and
//! reads of the idle part before and afterwards.
//!
//! Every page that is read is compared with what was written, and so is the whole disk at the end.

mod table;

use std::hint::spin_loop;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use clap::Args;
use zfolio_core::number;
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::size;
use zfolio_core::testing::Random;
use zfolio_core::zcomp::Params;
use zfolio_core::zram::{Recompressed, Recompression, What};
use zfolio_sys::{clock, cpu};

use crate::codecs::read_sample;
use crate::compare::rounds::cpus;
use crate::compare::{Failure, corpus_path, go_on, print};
use crate::corpus::parse_size;
use crate::os;
use crate::zram::disk::{Disk, Engine};
use crate::zram::{parse_algorithm, parse_unit};
use table::{Latencies, Run, Table};

pub(crate) const HELP: &str = "\
The used part is a sixteenth of --bytes, beside it. A read is due every 0.1 ms, and its latency counts
from then on. MB are 10^6 bytes of data before compression.

Examples:
  zfolio bench recompress
  zfolio bench recompress --bytes 256M --from lzo-rle --to zstd,level=6 --unit 64K --json";

/// Arguments of `zfolio bench recompress`.
#[derive(Args, Debug)]
pub(crate) struct RecompressArgs {
    /// Pages of real processes [default: made once, with 'zfolio corpus make', in ~/.cache/zfolio]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// How much is idle, a multiple of 32M
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = parse_idle)]
    bytes: u64,
    /// What compresses at first: NAME[,level=N]
    #[arg(long, default_value = "lz4", value_name = "ALGORITHM", value_parser = parse_algorithm)]
    from: Params,
    /// What compresses again: NAME[,level=N]
    #[arg(long, default_value = "zstd", value_name = "ALGORITHM", value_parser = parse_algorithm)]
    to: Params,
    /// What is compressed as one object
    #[arg(long, default_value = "4K", value_name = "SIZE", value_parser = parse_unit)]
    unit: UnitOrder,
    /// How long reads are measured without recompression, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = number::within(1_u64..=600_000))]
    random: u64,
    /// Rounds; each figure is the median
    #[arg(short, long, default_value_t = 3, value_parser = number::within(1_u32..=1000))]
    repeats: u32,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    json: bool,
}

/// A read is due so often, and its latency counts from then on: a read that the one before it has delayed is late, too.
const READ_EVERY_NS: u64 = 100_000;

/// The idle part: its sixteenth is a whole unit, however large that is.
const IDLE_STEP_BYTES: u64 = 32 << 20;

fn parse_idle(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let is_good = bytes > 0 && bytes % IDLE_STEP_BYTES == 0;
    is_good.then_some(bytes).ok_or_else(|| format!("{text}: accepted: a multiple of 32M"))
}

/// Measures and prints. Always returns true, since every problem is a failure.
pub(crate) fn recompress(args: &RecompressArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    let path = corpus_path(args.corpus.as_deref())?;
    let sample = read_sample(&path, args.bytes)?;
    let title = title(args, &path);
    let mut runs = Vec::new();
    for round in 1..=args.repeats {
        eprintln!("zfolio: round {round} of {}", args.repeats);
        runs.push(Round::new(args, &sample, round)?.run()?);
    }
    let table = Table { title, unit_bytes: args.unit.bytes(), runs };
    print(&if args.json { format!("{:#}\n", table.json()) } else { table.text() })?;
    Ok(true)
}

fn title(args: &RecompressArgs, corpus: &Path) -> String {
    format!(
        "recompress: {} idle and {} in use, filled from {}, {} to {}, units of {}; medians of {} round(s); \
         Linux {}, {} CPU(s)",
        size::display(args.bytes),
        size::display(used_bytes(args)),
        corpus.display(),
        args.from,
        args.to,
        args.unit,
        args.repeats,
        zfolio_sys::probe::kernel_release(),
        cpus(),
    )
}

/// The part that is read, behind the idle one.
fn used_bytes(args: &RecompressArgs) -> u64 {
    args.bytes / 16
}

/// One disk, from its filling to its end.
struct Round<'a> {
    sample: &'a [u8],
    disk: Engine,
    /// Page numbers.
    idle: Range<usize>,
    used: Range<usize>,
    random_ns: u64,
    seed: u64,
}

impl Round<'_> {
    fn new<'a>(args: &RecompressArgs, sample: &'a [u8], round: u32) -> Result<Round<'a>, Failure> {
        let codecs = [args.from.clone(), args.to.clone()];
        let bytes = args.bytes + used_bytes(args);
        let disk = Engine::new("zfolio", &codecs, args.unit, bytes, cpu::online());
        let page = |bytes: u64| usize::try_from(bytes).map(|bytes| bytes / PAGE_BYTES);
        let (Ok(idle), Ok(all)) = (page(args.bytes), page(bytes)) else {
            return Err(Failure::Refused("--bytes: too much for this machine".to_owned()));
        };
        Ok(Round {
            sample,
            disk: disk.map_err(Failure::Failed)?,
            idle: 0..idle,
            used: idle..all,
            random_ns: args.random * 1_000_000,
            seed: u64::from(round),
        })
    }

    fn run(&self) -> Result<Run, Failure> {
        let all = self.idle.start..self.used.end;
        self.step(|| all.clone().try_for_each(|page| self.disk.write(at(page), self.page(page))))?;
        let used_before = self.step(|| self.read_for_a_while(&self.used))?;
        let idle_before = self.step(|| self.read_for_a_while(&self.idle))?;
        self.disk.zram.mark_idle(None);
        // What is read is not idle any more.
        self.step(|| self.check(self.used.clone()))?;
        let before = self.step(|| self.disk.sizes())?;
        let (used_meanwhile, done, wall_ns, cpu_ns) = self.step(|| self.recompress_and_read())?;
        let after = self.step(|| self.disk.sizes())?;
        self.disk.zram.compact();
        let compacted = self.step(|| self.disk.sizes())?;
        let idle_after = self.step(|| self.read_for_a_while(&self.idle))?;
        self.step(|| self.check(all.clone()))?;
        let reads = [used_before, used_meanwhile, idle_before, idle_after];
        Ok(Run { reads, done, wall_ns, cpu_ns, sizes: [before, after, compacted] })
    }

    fn step<T>(&self, step: impl FnOnce() -> Result<T, String>) -> Result<T, Failure> {
        go_on()?;
        step().map_err(Failure::Wrong)
    }

    /// What the disk has in a page.
    fn page(&self, page: usize) -> &[u8] {
        let page = page % (self.sample.len() / PAGE_BYTES);
        &self.sample[page * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// Recompresses all that is idle, and reads the used part until that is done. Also returns elapsed and CPU time of
    /// the recompression in nanoseconds.
    fn recompress_and_read(&self) -> Result<(Latencies, Recompressed, u64, u64), String> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| self.read(&self.used, &|| is_over.load(Relaxed)));
            let (began, cpu_began) = (clock::monotonic_ns(), clock::thread_ns());
            let request = Recompression { what: What::Idle, ..Recompression::default() };
            let done = self.disk.zram.recompress(cpu::current(), request);
            let (ended, cpu_ended) = (clock::monotonic_ns(), clock::thread_ns());
            is_over.store(true, Relaxed);
            let reads = reader.join().expect("the reader does not panic")?;
            let done = done.map_err(|error| error.to_string())?;
            Ok((reads, done, (ended - began).max(1), cpu_ended - cpu_began))
        })
    }

    fn read_for_a_while(&self, pages: &Range<usize>) -> Result<Latencies, String> {
        let ends = clock::monotonic_ns() + self.random_ns;
        self.read(pages, &|| clock::monotonic_ns() >= ends)
    }

    /// Reads pages at random, at least one, until it is over. Their comparison is not measured, unless it makes the
    /// next read late.
    fn read(&self, pages: &Range<usize>, is_over: &dyn Fn() -> bool) -> Result<Latencies, String> {
        let (mut random, mut buffer) = (Random::new(self.seed), vec![0; PAGE_BYTES]);
        let (mut nanoseconds, mut due) = (Vec::new(), clock::monotonic_ns());
        loop {
            let page = pages.start + random.below(pages.len());
            while clock::monotonic_ns() < due {
                spin_loop();
            }
            self.disk.read(at(page), &mut buffer)?;
            let took = clock::monotonic_ns() - due;
            nanoseconds.push(u32::try_from(took).unwrap_or(u32::MAX));
            due += READ_EVERY_NS;
            self.compare(page, &buffer)?;
            if is_over() {
                return Ok(Latencies::of(nanoseconds));
            }
        }
    }

    /// Reads pages in order, and compares them.
    fn check(&self, mut pages: Range<usize>) -> Result<(), String> {
        let mut buffer = vec![0; PAGE_BYTES];
        pages.try_for_each(|page| {
            self.disk.read(at(page), &mut buffer)?;
            self.compare(page, &buffer)
        })
    }

    fn compare(&self, page: usize, read: &[u8]) -> Result<(), String> {
        if read == self.page(page) {
            return Ok(());
        }
        Err(format!("the page at byte {} is not what was written there", at(page)))
    }
}

fn at(page: usize) -> u64 {
    (page * PAGE_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use zfolio_core::testing::Random;

    use super::{Disk, PAGE_BYTES, RecompressArgs, Round, Table, at};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RecompressArgs,
    }

    fn parse(line: &str) -> RecompressArgs {
        Line::try_parse_from(line.split(' ')).map(|line| line.args).unwrap()
    }

    /// The same with 2 MiB, which the command refuses: a debug build takes seconds for 32 MiB.
    fn small(line: &str) -> RecompressArgs {
        RecompressArgs { bytes: 2 << 20, ..parse(line) }
    }

    /// Pages that zstd shrinks to less than lz4 does: each byte is one of four.
    fn sample() -> Vec<u8> {
        let mut random = Random::new(1);
        (0..100 * PAGE_BYTES).map(|_| random.byte() & 3).collect()
    }

    #[test]
    fn arguments_that_are_not_understood_are_refused() {
        assert_eq!(parse("x").bytes, 1 << 30);
        for line in ["--bytes 0", "--bytes 33M", "--from none", "--to zstd,level=99", "--unit 5K"] {
            let line = format!("x {line}");
            assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    /// Goal: all of the idle part is recompressed and nothing of the used part, and the table has what that freed.
    #[test]
    fn a_small_run_recompresses_what_is_idle() {
        for unit in ["4K", "64K"] {
            let args = small(&format!("x --unit {unit} --random 5"));
            let sample = sample();
            let run = Round::new(&args, &sample, 1).and_then(|round| round.run());
            let Ok(run) = run else { panic!("{unit}: the round failed") };
            let units = args.bytes / args.unit.bytes() as u64;
            assert_eq!((run.done.tried, run.done.shrank), (units, units), "{unit}");
            let (title, unit_bytes) = ("a title".to_owned(), args.unit.bytes());
            let table = Table { title, unit_bytes, runs: vec![run] };
            let json = table.json();
            let [before, after] = ["before", "after"].map(|at| &json["sizes"][at]);
            let compressed = |sizes: &serde_json::Value| sizes["compressed_mib"].as_f64().unwrap();
            assert!(compressed(after) < compressed(before), "{json}");
            assert!(json["recompression"]["mb_s"].as_f64().unwrap() > 0.0, "{json}");
            for reads in json["reads"].as_array().unwrap() {
                assert!(reads["p99_us"]["median"].as_f64().unwrap() > 0.0, "{reads}");
            }
            let text = table.text();
            for wanted in ["a title", "MB/s", "used, meanwhile", "idle, afterwards"] {
                assert!(text.contains(wanted), "{wanted} is missing:\n{text}");
            }
        }
    }

    /// Goal: a page that is not what was written is found, by random reads and at the end. Method: every page is
    /// overwritten with another one's contents.
    #[test]
    fn a_wrong_page_is_found() {
        let args = small("x --random 5");
        let sample = sample();
        let Ok(round) = Round::new(&args, &sample, 1) else { panic!("no disk") };
        let all = round.idle.start..round.used.end;
        let shifted = all.clone().map(|page| round.disk.write(at(page), round.page(page + 1)));
        shifted.collect::<Result<Vec<()>, String>>().unwrap();
        for wrong in [round.check(all), round.read_for_a_while(&round.used).map(|_| ())] {
            assert!(wrong.unwrap_err().contains("is not what was written"));
        }
    }
}
