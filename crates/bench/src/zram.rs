//! `zfolio bench zram`: zfolio's compressed disk beside the kernel's `/dev/zramN`.
//!
//! Threads write and read a disk whose contents are the memory of real processes. Each thread has a part of the disk
//! of its own. Both disks get the same requests, from the same number of threads:
//!
//! - **zfolio**: calls of [`Zram`](zfolio_core::zram::Zram) in this process.
//! - the other side, if there is one ([`Against`]). **kernel**: `pread` and `pwrite` of a new zram device that is
//!   opened with `O_DIRECT`, so that a request has been carried out when the call returns. **one stream**: zfolio
//!   again, but all threads compress and decompress with one stream, as the kernel's zram did before it had one for
//!   each CPU. **codec**: no disk but the codec, whose results have places in memory that exists already. So its
//!   figures are what any disk around this codec could have at most.
//!
//! # How the comparison is kept fair
//!
//! - In each round the disks take turns at each phase, and the one that comes first changes from round to round. The
//!   ratio is taken within a round, and the table has the median of the rounds.
//! - A random write never repeats the contents of the page, since zfolio does not compress them then.
//! - Afterwards every byte of both disks is compared with what was written last.

pub(crate) mod disk;
mod phase;
mod table;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use zfolio_core::number;
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::size;
use zfolio_core::zcomp::{self, Params};
use zfolio_pager::with_dictionary;
use zfolio_sys::cpu;

use crate::codecs::read_sample;
use crate::compare::rounds::cpus;
use crate::compare::{Failure, corpus_path, print};
use crate::corpus::parse_size;
use crate::kernel::journal::{self, Journal};
use crate::kernel::zram::{algorithms, usable};
use crate::os;
use disk::{Alone, Device, Disk, Engine};
use phase::{Phase, Plan, REQUEST_BYTES, Side};
use table::{Run, Setting, Table};

pub(crate) const HELP: &str = "\
With --against kernel the same requests also go to a new zram device. That needs root; the device is
removed afterwards, also after Ctrl-C or a failure. The kernel compresses 4 KiB at a time, whatever
--unit says, and at the default level of the algorithm. With --against one-stream the same requests also
go to a disk of zfolio whose threads share one stream, and with --against codec to the codec alone, which
is what a disk around it could have at most. An algorithm that the kernel does not have can be
compared with another one of the kernel's (--kernel).

Examples:
  sudo zfolio bench zram --against kernel
  zfolio bench zram --against one-stream --unit 4K --jobs 1,2,3,4,5,6,7,8,9,10
  zfolio bench zram --algorithm zstd,level=1 --unit 16K --jobs 1,2 --corpus corpus.bin --json";

/// Arguments of `zfolio bench zram`.
#[derive(Args, Debug)]
pub(crate) struct ZramArgs {
    /// Compare with it
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Pages of real processes [default: made once, with 'zfolio corpus make', in ~/.cache/zfolio]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// The size of the disk, and how much of the corpus to use
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// Threads, each with a part of the disk; several numbers with commas between them
    #[arg(long, value_name = "N,...", default_value = "1,4", value_delimiter = ',',
        value_parser = number::within(1_u32..=64))]
    jobs: Vec<u32>,
    /// NAME[,level=N]; may be repeated [default: lz4 lzo-rle]
    #[arg(long, value_name = "ALGORITHM", value_parser = parse_algorithm)]
    algorithm: Vec<Params>,
    /// The algorithm of the kernel's device [default: that of the disk]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// What zfolio compresses as one object; may be repeated [default: 4K 64K]
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    unit: Vec<UnitOrder>,
    /// What is measured after the first write; several with commas between them [default: all]
    #[arg(long, value_enum, value_name = "PHASE,...", value_delimiter = ',')]
    phase: Vec<Phase>,
    /// How long each phase of random requests goes on, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = number::within(1_u64..=600_000))]
    random: u64,
    /// Rounds; each figure is the median
    #[arg(short, long, default_value_t = 3, value_parser = number::within(1_u32..=1000))]
    repeats: u32,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    json: bool,
}

/// What a disk of zfolio is compared with.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Against {
    /// The kernel's zram
    Kernel,
    /// A disk of zfolio with one stream for all CPUs
    OneStream,
    /// The codec alone, without a disk around it
    Codec,
}

impl Against {
    /// The column of the table.
    fn name(self) -> &'static str {
        match self {
            Against::Kernel => "kernel",
            Against::OneStream => "one stream",
            Against::Codec => "codec",
        }
    }
}

pub(crate) fn parse_algorithm(text: &str) -> Result<Params, zcomp::Error> {
    text.parse::<Params>().and_then(with_dictionary)
}

pub(crate) fn parse_unit(text: &str) -> Result<UnitOrder, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    let order = usize::try_from(bytes).ok().and_then(UnitOrder::from_bytes);
    order.ok_or_else(|| format!("unit {text}: accepted: a power of two from 4K to 2M"))
}

/// Measures and prints. Always returns true, since every problem is a failure.
pub(crate) fn zram(args: &ZramArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    let path = corpus_path(args.corpus.as_deref())?;
    let sample = read_sample(&path, args.bytes)?;
    let settings = args.settings(sample.len())?;
    let mut notes = Vec::new();
    let wanted = args.against.filter(|against| *against == Against::Kernel);
    let journal = wanted.and_then(|_| match open_journal() {
        Ok(journal) => Some(journal),
        Err(reason) => {
            notes.push(format!("the kernel's zram was left out: {reason}"));
            None
        }
    });
    journal::undo_on_panic();
    let title = title(args, &path, sample.len());
    let bench = Bench { args, sample: &sample, journal: journal.as_ref(), offered: algorithms() };
    let table = bench.measure(args.table(title, settings, notes))?;
    print(&if args.json { format!("{:#}\n", table.json()) } else { table.text() })?;
    Ok(true)
}

/// The journal for a zram device; without root or zram, the reason in one line.
fn open_journal() -> Result<Journal, String> {
    usable()?;
    Journal::open(Path::new(journal::PATH)).map_err(|error| error.to_string())
}

fn title(args: &ZramArgs, corpus: &Path, bytes: usize) -> String {
    format!(
        "zram: disks of {}, filled from {}; medians of {} round(s); Linux {}, {} CPU(s)",
        size::display(bytes as u64),
        corpus.display(),
        args.repeats,
        zfolio_sys::probe::kernel_release(),
        cpus(),
    )
}

impl ZramArgs {
    /// A table without figures.
    fn table(&self, title: String, settings: Vec<Setting>, notes: Vec<String>) -> Table {
        let other = self.against.unwrap_or(Against::Kernel).name();
        Table { title, other, phases: self.phases(), settings, notes }
    }

    /// The phases, in their order. A disk is always filled first.
    fn phases(&self) -> Vec<Phase> {
        let is_wanted = |phase: &Phase| {
            *phase == Phase::Write || self.phase.is_empty() || self.phase.contains(phase)
        };
        Phase::ALL.into_iter().filter(is_wanted).collect()
    }

    /// Every algorithm, with every unit, with every number of jobs.
    fn settings(&self, bytes: usize) -> Result<Vec<Setting>, Failure> {
        let default = |text: &str| parse_algorithm(text).expect("both are in every build");
        let algorithms = match self.algorithm.is_empty() {
            true => vec![default("lz4"), default("lzo-rle")],
            false => self.algorithm.clone(),
        };
        let units = match self.unit.is_empty() {
            true => vec![UnitOrder::DEFAULT, UnitOrder::FOLIO],
            false => self.unit.clone(),
        };
        let mut settings = Vec::new();
        for params in &algorithms {
            for unit in &units {
                let jobs = self.jobs.iter().map(|jobs| *jobs as usize);
                settings.extend(jobs.map(|jobs| Setting::new(params.clone(), *unit, jobs)));
            }
        }
        match settings.iter().find(|setting| part_bytes(setting, bytes) == 0) {
            None => Ok(settings),
            Some(Setting { unit, jobs, .. }) => Err(Failure::Refused(format!(
                "--bytes {}: too small for {jobs} jobs with units of {unit}; accepted: {} or more",
                size::display(bytes as u64),
                size::display((jobs * step_bytes(*unit)) as u64),
            ))),
        }
    }
}

/// What the part of a job is a multiple of: whole requests and whole units.
fn step_bytes(unit: UnitOrder) -> usize {
    REQUEST_BYTES.max(unit.bytes())
}

/// The part of the disk that one job has.
fn part_bytes(setting: &Setting, bytes: usize) -> usize {
    let step = step_bytes(setting.unit);
    bytes / setting.jobs / step * step
}

/// What all rounds share.
struct Bench<'a> {
    args: &'a ZramArgs,
    sample: &'a [u8],
    journal: Option<&'a Journal>,
    /// The kernel's algorithms; none if they are not known.
    offered: Vec<String>,
}

impl Bench<'_> {
    fn measure(&self, mut table: Table) -> Result<Table, Failure> {
        if self.journal.is_some() {
            let mut missing: Vec<String> = table
                .settings
                .iter()
                .map(|setting| self.device_algorithm(setting))
                .filter(|name| !self.offers(name))
                .map(str::to_owned)
                .collect();
            missing.dedup();
            table
                .notes
                .extend(missing.iter().map(|name| format!("the kernel's zram has no {name}")));
        }
        for round in 1..=self.args.repeats {
            for setting in &mut table.settings {
                eprintln!("zfolio: round {round} of {}: {setting}", self.args.repeats);
                self.round(round, setting)?;
            }
        }
        Ok(table)
    }

    /// The algorithm of the kernel's device beside a disk.
    fn device_algorithm<'a>(&'a self, setting: &'a Setting) -> &'a str {
        self.args.kernel.as_deref().unwrap_or(setting.name())
    }

    fn offers(&self, name: &str) -> bool {
        // Without a device the list is not known: the run itself will fail then.
        self.offered.is_empty() || self.offered.iter().any(|offer| offer == name)
    }

    /// Makes the disks of one setting, measures both, compares their contents, and removes them.
    fn round(&self, round: u32, setting: &mut Setting) -> Result<(), Failure> {
        let bytes = setting.jobs * part_bytes(setting, self.sample.len());
        let engine = |name, streams| {
            let codecs = std::slice::from_ref(&setting.params);
            let engine = Engine::new(name, codecs, setting.unit, bytes as u64, streams);
            failed(setting, name, engine).map(|engine| Box::new(engine) as Box<dyn Disk>)
        };
        let mut disks = vec![engine("zfolio", cpu::online())?];
        if self.args.against == Some(Against::OneStream) {
            disks.push(engine(Against::OneStream.name(), 1)?);
        }
        if self.args.against == Some(Against::Codec) {
            let alone = Alone::new(&setting.params, setting.unit, bytes);
            disks.push(Box::new(failed(setting, Against::Codec.name(), alone)?));
        }
        let algorithm = self.device_algorithm(setting);
        let journal = self.journal.filter(|_| self.offers(algorithm));
        if let Some(journal) = journal {
            let device = Device::new(journal, algorithm, bytes as u64);
            disks.push(Box::new(failed(setting, "kernel", device)?));
        }
        let pages = bytes / PAGE_BYTES;
        let mut sides: Vec<Side> = disks.into_iter().map(|disk| Side::new(disk, pages)).collect();
        let plan = Plan {
            sample: self.sample,
            jobs: setting.jobs,
            random_ns: self.args.random * 1_000_000,
            seed: u64::from(round),
        };
        let runs = self.take_turns(setting, &mut sides, &plan, &self.args.phases())?;
        // The kernel does not remove a device that is open.
        drop(sides);
        if let Some(journal) = journal {
            failed(setting, "kernel", journal.undo())?;
        }
        setting.add(runs);
        Ok(())
    }

    /// Carries out each phase on each disk. Returns a run for each disk.
    fn take_turns(
        &self,
        setting: &Setting,
        sides: &mut [Side],
        plan: &Plan<'_>,
        phases: &[Phase],
    ) -> Result<Vec<Run>, Failure> {
        let mut runs = vec![Run::default(); sides.len()];
        for phase in phases.iter().copied() {
            let mut turns: Vec<(&mut Side, &mut Run)> = sides.iter_mut().zip(&mut runs).collect();
            if plan.seed % 2 == 0 {
                turns.reverse();
            }
            for (side, run) in turns {
                if let Some(signal) = os::stop_signal() {
                    return Err(Failure::Stopped(signal));
                }
                let name = side.disk.name();
                run.speeds.push(failed(setting, name, side.carry_out(phase, plan))?);
                if phase == Phase::Write {
                    run.sizes = failed(setting, name, side.disk.sizes())?;
                }
            }
        }
        for side in sides {
            failed(setting, side.disk.name(), side.check(plan.sample))?;
        }
        Ok(runs)
    }
}

fn failed<T, E: Display>(
    setting: &Setting,
    name: &str,
    result: Result<T, E>,
) -> Result<T, Failure> {
    result.map_err(|error| Failure::Wrong(format!("{setting}: {name}: {error}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use zfolio_core::testing::Random;

    use super::{Bench, Failure, Journal, Phase, Table, ZramArgs, algorithms, open_journal};
    use crate::mapping::Anonymous;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ZramArgs,
    }

    fn parse(line: &str) -> ZramArgs {
        Line::try_parse_from(line.split(' ')).map(|line| line.args).unwrap()
    }

    /// Pages that shrink: each byte is one of four. They are aligned, as `O_DIRECT` needs them.
    fn sample(bytes: usize) -> Anonymous {
        let (mut sample, mut random) = (Anonymous::new(bytes).unwrap(), Random::new(1));
        sample.iter_mut().for_each(|byte| *byte = random.byte() & 3);
        sample
    }

    /// Measures a disk of 1 MiB. An error is the line that the user sees.
    fn measure(line: &str, journal: Option<&Journal>) -> Result<Table, String> {
        let (args, sample) = (parse(line), sample(1 << 20));
        let bench = Bench { args: &args, sample: &sample, journal, offered: algorithms() };
        let measured = args
            .settings(sample.len())
            .and_then(|settings| bench.measure(args.table(String::new(), settings, Vec::new())));
        measured.map_err(|failure| match failure {
            Failure::Refused(line) | Failure::Failed(line) | Failure::Wrong(line) => line,
            Failure::Stopped(signal) => format!("signal {signal}"),
        })
    }

    #[test]
    fn arguments_that_are_not_understood_are_refused() {
        assert_eq!(parse("x").settings(256 << 20).map_err(|_| ()).unwrap().len(), 8);
        assert_eq!(parse("x --jobs 1,2,3").jobs, [1, 2, 3]);
        assert_eq!(parse("x").phases(), Phase::ALL);
        let some = parse("x --phase reread,random-read --phase rewrite");
        assert_eq!(some.phases(), [Phase::Write, Phase::Rewrite, Phase::Reread, Phase::RandomRead]);
        let refused = ["--jobs 0", "--jobs 1;2", "--unit 5K", "--algorithm none", "-r 0"];
        for line in refused.into_iter().chain(["--phase none", "--against none"]) {
            let line = format!("x {line}");
            assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
        let refused = parse("x --unit 2M --jobs 4").settings(4 << 20);
        assert!(matches!(refused, Err(Failure::Refused(line)) if line.contains("8M or more")));
    }

    /// Goal: a row for each phase, with the contents compared, also where the jobs do not divide the disk. Method: a
    /// small run with whole and with parts of units; the sizes follow from the data.
    #[test]
    fn a_small_run_has_every_row() {
        let line = "x --algorithm lz4 --unit 4K --unit 64K --jobs 1,3 --random 5 -r 2";
        let table = measure(line, None).unwrap();
        let json = table.json();
        let settings = json["settings"].as_array().unwrap();
        assert_eq!(settings.len(), 4);
        for setting in settings {
            let rows = setting["rows"].as_array().unwrap();
            assert_eq!(rows.len(), Phase::ALL.len(), "{setting}");
            for row in rows {
                assert_eq!(row["zfolio"]["runs"].as_array().unwrap().len(), 2, "{row}");
                assert!(row["zfolio"]["median"].as_f64().unwrap() > 0.0, "{row}");
                assert!(row["kernel"].is_null() && row["ratio"].is_null(), "{row}");
            }
            // Two bits of each byte are random, so a disk of 960 KiB or more takes a quarter or more.
            let sizes = &setting["sizes"]["zfolio"];
            let [compressed, used] =
                ["compressed_bytes", "used_bytes"].map(|name| sizes[name].as_f64().unwrap());
            assert!(compressed >= 240.0 * 1024.0 && compressed < used, "{sizes}");
            assert!(compressed < 900.0 * 1024.0, "{sizes}");
        }
        assert_eq!(table.text().lines().filter(|line| line.starts_with("lz4 ")).count(), 4 * 9);
    }

    /// Goal: the same disk with one stream is measured beside, with the contents compared. Method: more threads than
    /// streams, with only some of the phases.
    #[test]
    fn one_stream_has_rows_too() {
        let line = "x --against one-stream --unit 4K --jobs 3 --phase rewrite,random-mixed --random 5 -r 1";
        let table = measure(line, None).unwrap();
        let json = table.json();
        for setting in json["settings"].as_array().unwrap() {
            let rows = setting["rows"].as_array().unwrap();
            let names = rows.iter().map(|row| row["phase"].as_str().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), ["write 64K", "rewrite 64K", "random mixed 4K"]);
            for row in rows {
                assert!(row["ratio"].as_f64().unwrap() > 0.0, "{row}");
                assert_eq!(row["one stream"]["runs"].as_array().unwrap().len(), 1, "{row}");
            }
            let sizes = &setting["sizes"];
            assert_eq!(
                sizes["zfolio"]["compressed_bytes"],
                sizes["one stream"]["compressed_bytes"]
            );
        }
        let header = table.text().lines().nth(2).unwrap().to_owned();
        assert!(header.contains("one stream"), "{header}");
    }

    /// Goal: the codec alone is measured beside, with the contents compared. Method: units that requests fill and units
    /// of which they are a part.
    #[test]
    fn the_codec_alone_has_rows_too() {
        let line =
            "x --against codec --algorithm lz4 --unit 4K --unit 128K --jobs 2 --random 5 -r 1";
        let json = measure(line, None).unwrap().json();
        for setting in json["settings"].as_array().unwrap() {
            for row in setting["rows"].as_array().unwrap() {
                assert!(row["ratio"].as_f64().unwrap() > 0.0, "{row}");
            }
            let sizes = &setting["sizes"];
            assert_eq!(sizes["zfolio"]["compressed_bytes"], sizes["codec"]["compressed_bytes"]);
        }
    }

    /// Goal: the kernel's device gets the same requests, is compared, and is gone afterwards.
    #[test]
    fn the_kernel_has_rows_too() {
        let journal = match open_journal() {
            Ok(journal) => journal,
            Err(why) => return eprintln!("SKIPPED the_kernel_has_rows_too: {why}"),
        };
        let Some(name) = algorithms().into_iter().next() else {
            return eprintln!("SKIPPED the_kernel_has_rows_too: no device says its algorithms");
        };
        let is_zram = |name: std::ffi::OsString| name.to_string_lossy().starts_with("zram");
        let entries = || std::fs::read_dir("/sys/block").unwrap().flatten();
        let devices = || entries().filter(|entry| is_zram(entry.file_name())).count();
        // The algorithm of the device is the one that --kernel names, whatever that of the disk is.
        let line =
            format!("x --algorithm deflate --kernel {name} --unit 4K --jobs 2 --random 5 -r 1");
        let before = devices();
        let table = measure(&line, Some(&journal)).unwrap();
        let rows = table.json()["settings"][0]["rows"].as_array().unwrap().clone();
        assert!(rows.iter().all(|row| row["ratio"].as_f64().unwrap() > 0.0), "{rows:?}");
        assert_eq!(devices(), before);
    }
}
