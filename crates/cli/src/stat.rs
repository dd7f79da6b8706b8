//! `zfolio stat`: the figures of managed processes while they run. Reading them does not stop any
//! process.

mod rates;
mod screen;
mod zswap;

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::Value;
use zfolio_core::economy::Use;
use zfolio_core::size;
use zfolio_core::stats::{Figures, OrderCounts, Orders, Price};
use zfolio_core::zcomp::Choice;
use zfolio_core::zsmalloc::ClassStats;
use zfolio_iaa::accelerate::Named;
use zfolio_iaa::backend::has_format_of;
use zfolio_sys::probe::child;
use zfolio_sys::terminal::{self, Screen, Wake};
use zfolio_sys::{clock, probe};

use crate::arguments::StatArgs;
use crate::device;
use crate::duration;
use crate::failure::Failure;
use crate::ledger_file;
use crate::output::{escaped, print};
use crate::run::{compression_ratio, process_json};
use crate::stats_file::{self, StatsFile};
use crate::table::Table;
use rates::{Rate, Rates};

const HEADINGS: [&str; 17] = [
    "PID",
    "<COMMAND",
    "<ALGORITHM",
    "LIMIT",
    "PROCESS",
    "RESIDENT",
    "STAGED",
    "POOL",
    "META",
    "DISK",
    "DEMAND",
    "RATIO",
    "FAULTS",
    "P50",
    "P99",
    "STALL",
    "RUN",
];

/// Prints the figures, once or repeatedly.
///
/// # Errors
///
/// If the process belongs to another user, is not managed, or does not exist, or if the output
/// cannot be written.
pub(crate) fn stat(arguments: &StatArgs) -> Result<ExitCode, Failure> {
    if let (Some(seconds), false, true) = (arguments.watch, arguments.json, terminal::is_screen()) {
        return watch(arguments, seconds);
    }
    if arguments.accelerators {
        print(&accelerators()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut seen = false;
    loop {
        let text = match arguments.pid {
            None => overview(arguments),
            Some(pid) => match find(pid) {
                Ok(file) if arguments.classes => classes(arguments, &file)?,
                Ok(file) if arguments.zswap => zswap::text(arguments, &file),
                Ok(file) => one(arguments, &file),
                // The process ended while it was watched.
                Err(_) if seen => return Ok(ExitCode::SUCCESS),
                Err(failure) => return Err(failure),
            },
        };
        seen = true;
        if !show(arguments, &text)? {
            return Ok(ExitCode::SUCCESS);
        }
        let Some(seconds) = arguments.watch else { return Ok(ExitCode::SUCCESS) };
        std::thread::sleep(Duration::from_secs_f64(seconds));
    }
}

/// Writes `text`; false if the reader has closed the pipe.
fn show(arguments: &StatArgs, text: &str) -> Result<bool, Failure> {
    if arguments.watch.is_none() || arguments.json {
        return print(text);
    }
    print(&format!("{text}\n"))
}

/// The first rates are shown soon, however long the interval is.
const FIRST: Duration = Duration::from_millis(250);

/// The result of one look, with what it is compared to.
enum Look {
    /// All processes, and the rates of each.
    All(Vec<StatsFile>, Vec<Option<Rate>>),
    /// One process, its previous figures, and the time between the two looks.
    One(Box<StatsFile>, Option<Box<StatsFile>>, u64),
}

impl Look {
    fn lines(&self, arguments: &StatArgs, seconds: f64) -> Vec<String> {
        let size = terminal::size();
        match self {
            Look::All(files, rates) => {
                let runs = runs(files);
                screen::overview(files, rates, &runs, (size, seconds), !arguments.noheadings)
            }
            Look::One(file, before, between_ns) => {
                screen::one(file, before.as_deref(), size, *between_ns)
            }
        }
    }
}

/// Shows figures on the terminal until `q`, a signal, or the end of the watched process.
fn watch(arguments: &StatArgs, seconds: f64) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::output(format!("the terminal: {error}"));
    let mut rates = Rates::default();
    let (mut before, mut before_ns) = (None, clock::monotonic_ns());
    // Errors are printed before the terminal is taken over.
    let mut process = arguments.pid.map(find).transpose()?;
    let screen = Screen::open().map_err(failed)?;
    let mut pause = Duration::from_secs_f64(seconds).min(FIRST);
    loop {
        let now_ns = clock::monotonic_ns();
        let look = match process {
            Some(file) => Look::One(Box::new(file), before, now_ns - before_ns),
            None => {
                let files = files(arguments.all);
                let rates = rates.since(&files, now_ns);
                Look::All(files, rates)
            }
        };
        // After a key or a change of the window's size, the same figures are drawn again.
        loop {
            if !screen.draw(&look.lines(arguments, seconds)).map_err(failed)? {
                return Ok(ExitCode::SUCCESS);
            }
            let passed = Duration::from_nanos(clock::monotonic_ns() - now_ns);
            match screen.wait(pause.saturating_sub(passed)).map_err(failed)? {
                Wake::Time => break,
                Wake::Draw => {}
                Wake::Quit => return Ok(ExitCode::SUCCESS),
                Wake::Ended(signal) => {
                    drop(screen);
                    child::die_of(signal)
                }
            }
        }
        pause = Duration::from_secs_f64(seconds);
        process = match arguments.pid.map(find) {
            None => None,
            Some(Ok(file)) => Some(file),
            // The process ended while it was watched.
            Some(Err(_)) => return Ok(ExitCode::SUCCESS),
        };
        (before, before_ns) = match look {
            Look::One(file, ..) => (Some(file), now_ns),
            Look::All(..) => (None, now_ns),
        };
    }
}

/// The file of `pid`, or why there is none.
pub(crate) fn find(pid: u32) -> Result<StatsFile, Failure> {
    const ACCEPTED: &str = "accepted: a process under 'zfolio run', or that uses the library \
                            ('zfolio stat' lists them)";
    let me = probe::effective_uid();
    let Ok(owner) = fs::metadata(format!("/proc/{pid}")).map(|metadata| metadata.uid()) else {
        return Err(Failure::argument(format!("PID: there is no process {pid}; {ACCEPTED}")));
    };
    if owner != me && me != 0 {
        return Err(Failure::argument(format!(
            "PID: process {pid} belongs to uid {owner}, not to you (uid {me}); accepted: a process \
             of your own, or run as root"
        )));
    }
    // In /proc a process that may not be dumped belongs to root; its file belongs to the user.
    let directories = stats_file::directories();
    directories
        .iter()
        .filter(|(uid, _)| me == 0 || *uid == me)
        .find_map(|(_, directory)| stats_file::of(directory, pid))
        .ok_or_else(|| {
            Failure::argument(format!("PID: process {pid} is not managed by zfolio; {ACCEPTED}"))
        })
}

/// The size classes of one process's pool, as a table.
fn classes(arguments: &StatArgs, file: &StatsFile) -> Result<String, Failure> {
    let rows =
        file.classes().map_err(|why| Failure::machine(format!("PID {}: {why}", file.pid)))?;
    if arguments.json {
        let number = |field: &String| field.parse::<u64>().map_or(Value::Null, Value::from);
        let row = |row: &Vec<String>| {
            let fields = ClassStats::COLUMNS.iter().zip(row);
            Value::Object(fields.map(|(name, field)| ((*name).to_owned(), number(field))).collect())
        };
        return Ok(json_text(arguments, &Value::Array(rows.iter().map(row).collect())));
    }
    let mut table = Table::new(&ClassStats::COLUMNS);
    if arguments.noheadings {
        table = table.without_headings();
    }
    rows.into_iter()
        .filter(|row| row.len() == ClassStats::COLUMNS.len())
        .for_each(|row| table.push(row));
    Ok(table.to_string())
}

/// The figures of the accelerators that the user's disks and processes use.
fn accelerators() -> Result<String, Failure> {
    let mut text = device::accelerators()?;
    for file in files(false).iter().filter(|file| is_accelerators(&file.stats.algorithm())) {
        // One that has ended meanwhile, or is stopped, has no figures.
        if let Some(figures) = file.accelerator().ok().filter(|figures| !figures.is_empty()) {
            write!(text, "process {} ({}):\n{figures}", file.pid, escaped(&file.command()))
                .expect("writing to a string");
        }
    }
    if text.is_empty() {
        text = "no disk and no process uses an accelerator: see --accelerate of 'zfolio device add' and 'zfolio run'\n"
            .to_owned();
    }
    Ok(text)
}

/// Whether an accelerator may be at work for this algorithm.
fn is_accelerators(algorithm: &str) -> bool {
    Named::<Choice>::parse(algorithm, str::parse)
        .is_ok_and(|named| named.algorithm.codecs().iter().any(has_format_of))
}

/// The files to show: the user's own; with --all, those of every user that can be read.
fn files(all: bool) -> Vec<StatsFile> {
    let me = probe::effective_uid();
    let directories = stats_file::directories();
    let wanted = directories.iter().filter(|(uid, _)| *uid == me || all);
    let mut files: Vec<StatsFile> =
        wanted.flat_map(|(_, directory)| stats_file::list(directory)).collect();
    files.retain(|file| file.live);
    files
}

/// A line for each process.
fn overview(arguments: &StatArgs) -> String {
    let files = files(arguments.all);
    if arguments.json {
        let processes: Vec<Value> = files.iter().map(process_json).collect();
        return json_text(arguments, &Value::from(processes));
    }
    let mut table = Table::new(&HEADINGS);
    if arguments.noheadings {
        table = table.without_headings();
    }
    let runs = runs(&files);
    for file in &files {
        table.push(row(arguments, file, &runs));
    }
    let mut text = table.to_string();
    for run in runs {
        writeln!(text, "{run}").expect("writing to a string");
    }
    text
}

/// The runs whose processes share a limit, each with its sum.
fn runs(files: &[StatsFile]) -> Vec<Run> {
    let ids: BTreeSet<u32> = files
        .iter()
        .filter_map(|file| u32::try_from(file.run()).ok())
        .filter(|run| *run > 0)
        .collect();
    let directories = stats_file::directories();
    let ledger = |run| directories.iter().find_map(|(_, path)| ledger_file::read(path, run));
    let about = |run| {
        let ledger = ledger(run)?;
        let processes = files.iter().filter(|file| file.run() == u64::from(run)).count();
        let (sum_bytes, _) = ledger.sum_bytes();
        Some(Run { run, processes, sum_bytes, limit_bytes: ledger.total_bytes() })
    };
    ids.into_iter().filter_map(about).collect()
}

/// The limit of a process: that of its run, if the processes of that run share it.
fn limit_bytes(file: &StatsFile, runs: &[Run]) -> u64 {
    let shared = runs.iter().find(|run| u64::from(run.run) == file.run());
    let own = || file.stats.figures.limit_bytes.load(Relaxed);
    shared.map_or_else(own, |run| run.limit_bytes)
}

/// The processes of a run, under one limit.
struct Run {
    run: u32,
    processes: usize,
    sum_bytes: u64,
    limit_bytes: u64,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.processes == 1 { "process" } else { "processes" };
        write!(
            f,
            "run {}: {} {what}, {} of {}",
            self.run,
            self.processes,
            size::display(self.sum_bytes),
            size::display(self.limit_bytes)
        )
    }
}

/// Indented if printed once; one line for each moment if watched.
fn json_text(arguments: &StatArgs, value: &Value) -> String {
    if arguments.watch.is_some() { format!("{value}\n") } else { format!("{value:#}\n") }
}

fn row(arguments: &StatArgs, file: &StatsFile, runs: &[Run]) -> Vec<String> {
    let Figures {
        process_bytes,
        resident_bytes,
        staged_bytes,
        pool_bytes,
        metadata_bytes,
        spilled_bytes,
        demand_bytes,
        stall_ns,
        ..
    } = &file.stats.figures;
    let text = |value: u64| if arguments.bytes { value.to_string() } else { size::display(value) };
    let bytes = |figure: &std::sync::atomic::AtomicU64| text(figure.load(Relaxed));
    let histograms = file.stats.histograms();
    let faults: u64 = histograms.iter().map(|(_, histogram)| histogram.count()).sum();
    let stored = &file.stats.fault_stored_ns;
    vec![
        file.pid.to_string(),
        file.command(),
        file.stats.algorithm(),
        text(limit_bytes(file, runs)),
        bytes(process_bytes),
        bytes(resident_bytes),
        bytes(staged_bytes),
        bytes(pool_bytes),
        bytes(metadata_bytes),
        bytes(spilled_bytes),
        bytes(demand_bytes),
        compression_ratio(&file.stats.figures).unwrap_or("-".to_owned()),
        faults.to_string(),
        duration::display(stored.quantile(500)),
        duration::display(stored.quantile(990)),
        duration::display(stall_ns.load(Relaxed)),
        // A process that uses the library is of no run.
        Some(file.run()).filter(|run| *run > 0).map_or("-".to_owned(), |run| run.to_string()),
    ]
}

/// One process: all figures, each with its meaning.
fn one(arguments: &StatArgs, file: &StatsFile) -> String {
    if arguments.json {
        return json_text(arguments, &process_json(file));
    }
    let mut table = Table::new(&["<FIGURE", "VALUE", "<MEANING"]);
    if arguments.noheadings {
        table = table.without_headings();
    }
    file.stats.figures.each(|name, meaning, value| {
        let shown =
            if arguments.bytes { value.to_string() } else { screen::figure_text(name, value) };
        table.push(vec![name.to_owned(), shown, meaning.to_owned()]);
    });
    order_rows(&file.stats.orders).for_each(|row| table.push(row));
    for (kind, histogram) in file.stats.histograms() {
        for (per_mille, percentile) in [(500, "p50"), (990, "p99")] {
            let value = histogram.quantile(per_mille);
            let shown = if arguments.bytes { value.to_string() } else { duration::display(value) };
            let meaning = format!("Time to serve a fault of kind '{kind}', {percentile}.");
            table.push(vec![format!("fault_{kind}_ns_{percentile}"), shown, meaning]);
        }
    }
    let (command, algorithm) = (escaped(&file.command()), file.stats.algorithm());
    let prices = prices(arguments, file);
    format!("process {} ({command}), compressed with {algorithm}\n{table}\n{prices}", file.pid)
}

/// Name, value and meaning of the runs of slots of each order of which there were any.
fn order_rows(orders: &Orders) -> impl Iterator<Item = Vec<String>> {
    let counts = orders.counts().into_iter().filter(|order| !order.is_zero());
    counts.flat_map(|OrderCounts { size, swpout, swpout_fallback }| {
        let rows = [
            ("swpout", swpout, "that were taken on disk"),
            ("swpout_fallback", swpout_fallback, "for which the disk had no room"),
        ];
        rows.map(|(name, value, what)| {
            let meaning = format!("Runs of {size} {what}.");
            vec![format!("{name}_{size}"), value.to_string(), meaning]
        })
    })
}

/// What a MiB of each use of memory saves. A use of which nothing is known has a `-`.
fn prices(arguments: &StatArgs, file: &StatsFile) -> Table {
    let headings = ["<A MIB OF", "BYTES", "SAVES A SECOND", "SAVED SO FAR", "<MEANING"];
    let mut table = Table::new(&headings);
    if arguments.noheadings {
        table = table.without_headings();
    }
    file.stats.prices.each().for_each(|price| table.push(price_row(price, arguments.bytes)));
    table
}

/// The row of one use; with `exact` in bytes and nanoseconds.
fn price_row((of, price): (Use, Price), exact: bool) -> Vec<String> {
    let bytes = if exact { price.bytes.to_string() } else { size::display(price.bytes) };
    let time = |ns: Option<i64>| match ns {
        Some(ns) if exact => ns.to_string(),
        ns => price_text(ns),
    };
    let (name, meaning) = (of.name().to_owned(), of.meaning().to_owned());
    vec![name, bytes, time(price.price_ns), time(price.total_ns), meaning]
}

/// A price, or a sum of it.
pub(crate) fn price_text(ns: Option<i64>) -> String {
    ns.map_or("-".to_owned(), duration::signed)
}

#[cfg(test)]
mod tests {
    use super::price_row;
    use crate::run::process_json;
    use crate::stats_file::StatsFile;
    use serde_json::json;
    use zfolio_core::economy::Use;
    use zfolio_core::stats::Price;

    /// Goal: a price that is not known is shown as such, and not as 0.
    #[test]
    fn what_is_not_known_is_no_zero() {
        let known = Price { bytes: 3 << 20, price_ns: Some(0), total_ns: Some(-2_100_000) };
        let row = |price, exact| price_row((Use::Staging, price), exact)[..4].join(" ");
        assert_eq!(row(known, false), "staging 3M 0 -2.1ms");
        assert_eq!(row(known, true), "staging 3145728 0 -2100000");
        assert_eq!(row(Price::default(), false), "staging 0 - -");
        assert_eq!(row(Price::default(), true), "staging 0 - -");
    }

    /// Goal: runs of slots are shown by size, in the kernel's words; sizes of which there were none are left out.
    #[test]
    fn runs_of_slots_are_shown_by_size() {
        let file = StatsFile::made_up(7, "sh");
        file.stats.orders.set(&[3, 0, 0, 0, 0, 9, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
        let rows = super::order_rows(&file.stats.orders).map(|row| row[..2].join(" "));
        let expected =
            ["swpout_4kB 3", "swpout_fallback_4kB 0", "swpout_128kB 9", "swpout_fallback_128kB 2"];
        assert_eq!(rows.collect::<Vec<_>>(), expected);
        let orders = &process_json(&file)["orders"];
        assert_eq!(orders["128kB"], json!({ "swpout": 9, "swpout_fallback": 2 }));
        assert_eq!(orders["64kB"], json!({ "swpout": 0, "swpout_fallback": 0 }));
    }

    /// Goal: the same in JSON.
    #[test]
    fn json_has_null_for_what_is_not_known() {
        let file = StatsFile::made_up(7, "sh");
        file.stats.prices.set(Use::Copies, 5, Some((-70, 30)));
        let prices = &process_json(&file)["prices"];
        assert_eq!(prices["copies"], json!({ "bytes": 5, "price_ns": -70, "total_ns": 30 }));
        let unknown = json!({ "bytes": 0, "price_ns": null, "total_ns": null });
        let unknowns = Use::ALL.into_iter().filter(|of| prices[of.name()] == unknown);
        assert_eq!(unknowns.count(), Use::ALL.len() - 1, "{prices}");
    }
}
