//! `zfolio bench iaa`: a timed simulation of accelerators, with the driver's own policy.
//!
//! No machine of ours has the device. Three constants are fitted to three published latencies; all else that is
//! printed is a prediction, beside the published figure if there is one. The simulation is in `simulation.rs`.

mod simulation;

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zcomp::BATCH_MAX;
use zfolio_iaa::Settings;
use zfolio_iaa::queues::QUEUES_MAX;

use crate::compare::{Failure, print};
use crate::corpus::parse_size;
use simulation::{CONSTANTS, Machine, Outcome, simulate};

pub(crate) const HELP: &str = "\
Nothing is measured: it is a model, and the same arguments give the same figures. Which figures the
constants were fitted to, and the error of each prediction, is printed.

Examples:
  zfolio bench iaa
  zfolio bench iaa --devices 1 --cores 30 --processes 30
  zfolio bench iaa --queues 2 --folio 2M --json";

/// Arguments of `zfolio bench iaa`.
#[derive(Args, Debug)]
pub(crate) struct IaaArgs {
    /// Devices of a package
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    devices: u8,
    /// Work queues of each device
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    queues: u8,
    /// Entries of each device, for all of its queues together
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=4096))]
    entries: u32,
    /// Cores of a package
    #[arg(long, default_value_t = 56, value_parser = clap::value_parser!(u16).range(1..=1024))]
    cores: u16,
    /// Packages, over which the processes are spread
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    packages: u16,
    /// Processes of usemem, one for each core
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=1024))]
    processes: u16,
    /// What is compressed at a time: 4K to 2M
    #[arg(long, default_value = "64K", value_name = "SIZE", value_parser = parse_folio)]
    folio: usize,
    /// Folios that each core compresses
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    folios: u32,
    /// What chooses when cores begin
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object instead of the tables
    #[arg(long)]
    json: bool,
}

fn parse_folio(text: &str) -> Result<usize, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let is_good = bytes.is_power_of_two() && (PAGE_BYTES..=2 << 20).contains(&bytes);
    is_good.then_some(bytes).ok_or_else(|| format!("{text}: accepted: a power of two, 4K to 2M"))
}

/// The published nanoseconds per page of a 64 KiB folio, p50: the constants are fitted to these.
const LATENCIES: [(&str, usize, bool, u64); 3] = [
    ("sequential", 1, false, 3503),
    ("batched, mapped", BATCH_MAX, false, 1356),
    ("batched, distributed", BATCH_MAX, true, 706),
];

/// The folios of the published runs, and the pages that went out of memory in the sequential runs of v9. Later series
/// publish no counters: that theirs are the same is assumed.
struct Folio {
    name: &'static str,
    bytes: usize,
    /// usemem's, all of them in whole folios.
    usemem_out: u64,
    /// The kernel compilation's, but only those in whole folios: single pages are no batch.
    compilation_out: u64,
}

const FOLIO_64K: Folio =
    Folio { name: "64K", bytes: 64 << 10, usemem_out: 58_146_954, compilation_out: 2_958_806 * 16 };

const FOLIO_2M: Folio =
    Folio { name: "2M", bytes: 2 << 20, usemem_out: 59_815_486, compilation_out: 8_810 * 512 };

/// The folios of v14's kernel compilation, which compiles less in less memory, and of which no counter is published.
/// Assumed: as many pages go out in whole folios for each second of system time as in v9.
const DEFCONFIG_64K: Folio =
    Folio { compilation_out: FOLIO_64K.compilation_out * 30_872 / 370_503, ..FOLIO_64K };

const DEFCONFIG_2M: Folio =
    Folio { compilation_out: FOLIO_2M.compilation_out * 34_621 / 430_792, ..FOLIO_2M };

/// Published seconds by `deflate-iaa`: with pages compressed one by one, and in batches.
struct Published {
    series: &'static str,
    folio: Folio,
    elapsed_s: [f64; 2],
    sys_s: [f64; 2],
}

const fn published(
    series: &'static str,
    folio: Folio,
    elapsed_s: [f64; 2],
    sys_s: [f64; 2],
) -> Published {
    Published { series, folio, elapsed_s, sys_s }
}

/// `usemem --init-time -w -O -b 1 -s 10 -n 30 10g` under `memory.high=150G`, with KB/s of all processes.
const USEMEM: [(Published, [u64; 2]); 8] = [
    (published("v9", FOLIO_64K, [100.46, 69.70], [2416.97, 1648.37]), [6_091_607, 10_174_344]),
    (published("v9", FOLIO_2M, [87.15, 63.04], [2011.56, 1450.45]), [6_371_048, 11_282_935]),
    (published("v12", FOLIO_64K, [93.21, 69.98], [2190.52, 1651.51]), [7_191_949, 10_702_115]),
    (published("v12", FOLIO_2M, [82.26, 69.30], [1901.90, 1634.78]), [7_237_676, 11_228_928]),
    (published("v13", FOLIO_64K, [98.94, 70.90], [2379.29, 1686.18]), [6_118_675, 9_901_216]),
    (published("v13", FOLIO_2M, [88.70, 67.84], [2059.83, 1581.07]), [6_309_635, 10_558_225]),
    (published("v14", FOLIO_64K, [99.19, 67.45], [2356.19, 1580.47]), [6_226_967, 10_551_714]),
    (published("v14", FOLIO_2M, [88.14, 63.37], [2025.53, 1455.23]), [6_347_201, 11_315_500]),
];

/// A kernel's `allmodconfig` by 32 threads under `memory.max=2G`; in v14 its `defconfig` under 1.7 GiB.
const COMPILATION: [Published; 8] = [
    published("v9", FOLIO_64K, [835.31, 837.75], [3705.03, 3642.59]),
    published("v9", FOLIO_2M, [790.66, 789.01], [4307.92, 4184.09]),
    published("v12", FOLIO_64K, [874.74, 821.59], [3834.35, 3791.12]),
    published("v12", FOLIO_2M, [808.10, 794.85], [4351.01, 4266.95]),
    published("v13", FOLIO_64K, [836.64, 806.94], [3897.57, 3661.83]),
    published("v13", FOLIO_2M, [818.48, 779.67], [4226.52, 4245.18]),
    published("v14", DEFCONFIG_64K, [100.10, 98.74], [308.72, 301.23]),
    published("v14", DEFCONFIG_2M, [95.29, 93.44], [346.21, 344.48]),
];

const COMPILATION_THREADS: u16 = 32;

/// Pages that the 30 processes write.
const USEMEM_WRITTEN: u64 = 30 * (10 << 30) / PAGE_BYTES as u64;

impl Published {
    fn name(&self) -> String {
        format!("{} {}", self.series, self.folio.name)
    }

    /// Elapsed and system time: what batching changed as published, what it changes if it saves these seconds, and the
    /// error, in percent.
    fn times(&self, elapsed_saved_s: f64, sys_saved_s: f64) -> [[f64; 3]; 2] {
        let row = |[from, to]: [f64; 2], saved| error(change(from, to), change(from, from - saved));
        [row(self.elapsed_s, elapsed_saved_s), row(self.sys_s, sys_saved_s)]
    }
}

/// Percent, from one figure to another one.
fn change(from: f64, to: f64) -> f64 {
    100.0 * (to / from - 1.0)
}

/// Published, predicted, and by how much the prediction is off.
fn error(published: f64, predicted: f64) -> [f64; 3] {
    [published, predicted, predicted - published]
}

fn show([published, predicted, error]: [f64; 3]) -> String {
    format!("{published:>+6.1}{predicted:>+7.1}{error:>+7.1}")
}

/// The work to write one page where nothing goes out, as measured with the workload of `zfolio bench usemem`:
/// 1001 MB/s (docs/benchmarks/2026-11-21-usemem.md).
const TOUCH_NS: u64 = 4092;

/// Predicts and prints. Always returns true.
pub(crate) fn iaa(args: &IaaArgs) -> Result<bool, Failure> {
    if usize::from(args.devices) * usize::from(args.queues) > QUEUES_MAX {
        return Err(Failure::Refused(format!("--queues: accepted: {QUEUES_MAX} in all at most")));
    }
    let tables = [latencies(args), layouts(args), retries(args), usemem(args), compilation(args)];
    if args.json {
        let each = tables.iter().map(|table| (table.name.to_owned(), table.json.clone()));
        let fitted = json!({
            "submit_ns": CONSTANTS.submit_ns,
            "port_ns": CONSTANTS.port_ns,
            "latency_ns": CONSTANTS.latency_ns,
        });
        let assumed = json!({
            "memory_ns": CONSTANTS.memory_ns,
            "try_ns": CONSTANTS.try_ns,
            "software_ns": CONSTANTS.software_ns,
        });
        let mut all: serde_json::Map<String, Value> = each.collect();
        all.extend([("fitted".to_owned(), fitted), ("assumed".to_owned(), assumed)]);
        print(&format!("{:#}\n", Value::Object(all)))?;
        return Ok(true);
    }
    let c = CONSTANTS;
    let mut text = format!(
        "iaa: a simulation, nothing is measured; {} devices of {} queue(s) and {} entries, {} cores a package\n\
         fitted to the first table: submit {} ns, port {} ns, latency {} ns; assumed: memory {} ns, a try {} ns\n",
        args.devices,
        args.queues,
        args.entries,
        args.cores,
        c.submit_ns,
        c.port_ns,
        c.latency_ns,
        c.memory_ns,
        c.try_ns,
    );
    tables.iter().for_each(|table| text += &table.text);
    print(&text)?;
    Ok(true)
}

/// A table as text, and the same for programs.
struct Table {
    name: &'static str,
    text: String,
    json: Value,
}

fn machine(args: &IaaArgs) -> Machine {
    Machine {
        devices: usize::from(args.devices),
        queues: usize::from(args.queues),
        entries: args.entries,
        busy_cores: 1,
        cores: usize::from(args.cores),
        settings: Settings::default(),
        folio_pages: args.folio / PAGE_BYTES,
        batch: BATCH_MAX,
        work_ns: 0,
        decompress_percent: 0,
        folios: args.folios as usize,
        vanish_ns: Vec::new(),
        seed: args.seed,
    }
}

fn latencies(args: &IaaArgs) -> Table {
    let text = format!("\none core, folios of {} KiB: ns per page, p50\n", args.folio >> 10);
    let mut table = Table { name: "latency", text, json: json!([]) };
    for (name, batch, distributes, published) in LATENCIES {
        let mut one = Machine { batch, ..machine(args) };
        one.settings.distribute_comps = distributes;
        let p50 = simulate(&one, CONSTANTS).percentile(50);
        let error = percent(p50, published);
        writeln!(
            table.text,
            "  {name:<22}{p50:>6}  published {published:>5}  fitted, off by {error:+.1} %"
        )
        .expect("a string grows");
        push(
            &mut table.json,
            json!({ "name": name, "p50_ns": p50, "published_ns": published, "error_percent": error }),
        );
    }
    table
}

/// Queues for all cores of a package: half of the folios are compressed, half decompressed.
fn layouts(args: &IaaArgs) -> Table {
    let text = format!(
        "\nprediction: {} cores at once, half of the folios decompressed (assumed as fast): \
         pages per us, p99 ns per page\n",
        args.cores,
    );
    let mut table = Table { name: "layouts", text, json: json!([]) };
    let devices = usize::from(args.devices);
    let all = [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2)];
    for (queues, comp_wqs) in all.into_iter().filter(|it| it.0 * devices <= QUEUES_MAX) {
        for distributes in [true, false] {
            let mut many =
                Machine { queues, decompress_percent: 50, work_ns: 50_000, ..machine(args) };
            many.busy_cores = many.cores;
            many.settings.comp_wqs_per_iaa = comp_wqs;
            (many.settings.distribute_comps, many.settings.distribute_decomps) =
                (distributes, distributes);
            let outcome = simulate(&many, CONSTANTS);
            let (rate, p99) = (rate(&outcome), outcome.percentile(99));
            let place = if distributes { "shared" } else { "mapped" };
            let (retries, given_up) = (outcome.retries, outcome.given_up);
            writeln!(
                table.text,
                "  {queues} queue(s), {comp_wqs} compress only, {place}{rate:>8.2}{p99:>8}  \
                 retries {retries}, given up {given_up}",
            )
            .expect("a string grows");
            push(
                &mut table.json,
                json!({
                    "queues": queues, "compress_only": comp_wqs, "place": place, "pages_per_us": rate,
                    "p99_ns": p99, "retries": retries, "given_up": given_up,
                }),
            );
        }
    }
    table
}

/// With how many cores on one device a queue is full for the first time, and a job is given up.
fn retries(args: &IaaArgs) -> Table {
    let mut found = [None, None];
    for cores in 1..=128 {
        let mut one = Machine { devices: 1, busy_cores: cores, cores, ..machine(args) };
        one.folios = one.folios.min(20);
        let outcome = simulate(&one, CONSTANTS);
        for (first, is_met) in found.iter_mut().zip([outcome.retries > 0, outcome.given_up > 0]) {
            *first = first.or(is_met.then_some(cores));
        }
        if found.iter().all(Option::is_some) {
            break;
        }
    }
    let show =
        |cores: Option<usize>| cores.map_or("none up to 128".to_owned(), |it| it.to_string());
    let [full, given_up] = found;
    let text = format!(
        "\nprediction: cores without other work on one device\n  first retry {}, \
         first job given up {}; published: 30\n",
        show(full),
        show(given_up),
    );
    Table {
        name: "retries",
        text,
        json: json!({ "first_retry": full, "first_given_up": given_up, "published": 30 }),
    }
}

fn usemem(args: &IaaArgs) -> Table {
    let text = "\nprediction: what batching changes for usemem, in percent: published, predicted, error \
                (throughput also with\n\
                the work per page that this project measured for writes alone, not that of the sequential row)\n\
                \x20 row      throughput            writes alone    elapsed               sys\n";
    let mut table = Table { name: "usemem", text: text.to_owned(), json: json!([]) };
    for (row, [sequential, batched]) in &USEMEM {
        let (out, bytes) = (row.folio.usemem_out, row.folio.bytes);
        let written_ns = 4 * u64::from(args.processes) * 1_000_000_000 / sequential;
        // The published time of a page, over the pages that go out, less what compression takes without others.
        let anchored = (written_ns * USEMEM_WRITTEN / out).saturating_sub(LATENCIES[0].3);
        let both = [anchored, TOUCH_NS * USEMEM_WRITTEN / out]
            .map(|work| runs(&machine(args), args, args.processes, bytes, work));
        let [gain, alone] = both.each_ref().map(|[one, all]| change(rate(one), rate(all)));
        let throughput = error(change(as_f64(*sequential), as_f64(*batched)), gain);
        let write_s = as_f64(4 * USEMEM_WRITTEN) / as_f64(*sequential);
        let [elapsed, sys] = row.times(write_s * gain / (100.0 + gain), saved_s(&both[0], out));
        let [_, alone, alone_error] = error(throughput[0], alone);
        let name = row.name();
        let [first, second, third] = [throughput, elapsed, sys].map(show);
        writeln!(
            table.text,
            "  {name:<8}{first}  {alone:>+6.1}{alone_error:>+7.1}  {second}  {third}"
        )
        .expect("a string grows");
        push(
            &mut table.json,
            json!({
                "name": name, "published": throughput[0], "predicted": throughput[1], "error": throughput[2],
                "writes_alone": alone, "writes_alone_error": alone_error,
                "elapsed_published": elapsed[0], "elapsed_predicted": elapsed[1], "elapsed_error": elapsed[2],
                "sys_published": sys[0], "sys_predicted": sys[1], "sys_error": sys[2],
            }),
        );
    }
    table.text += "  Wanted: errors of 8 points at most. Not met where the error is larger: see the document.\n";
    table
}

/// A kernel compilation: what is published of v9's counters says how many pages batches can help, for v14 by its system
/// time.
fn compilation(args: &IaaArgs) -> Table {
    let text = "\nprediction: what batching changes for a kernel compilation, in percent: published, predicted, error\n\
                \x20 row      elapsed               sys\n";
    let mut table = Table { name: "compilation", text: text.to_owned(), json: json!([]) };
    // As published: a queue of each device for each direction.
    let mut base = Machine { queues: 2, ..machine(args) };
    base.settings.comp_wqs_per_iaa = 1;
    for row in &COMPILATION {
        let out = row.folio.compilation_out;
        let threads = u64::from(COMPILATION_THREADS);
        let work = Duration::from_secs_f64(row.elapsed_s[0]).as_nanos() * u128::from(threads)
            / u128::from(out);
        let work = u64::try_from(work).unwrap_or(u64::MAX);
        let both = runs(&base, args, COMPILATION_THREADS, row.folio.bytes, work);
        let saved_s = saved_s(&both, out);
        let [elapsed, sys] = row.times(saved_s / as_f64(threads), saved_s);
        let name = row.name();
        writeln!(table.text, "  {name:<8}{}  {}", show(elapsed), show(sys))
            .expect("a string grows");
        push(
            &mut table.json,
            json!({
                "name": name,
                "elapsed_published": elapsed[0], "elapsed_predicted": elapsed[1], "elapsed_error": elapsed[2],
                "sys_published": sys[0], "sys_predicted": sys[1], "sys_error": sys[2],
            }),
        );
    }
    table
}

/// Folios that go out page by page and in batches, if each page comes with so much other work.
fn runs(
    base: &Machine,
    args: &IaaArgs,
    threads: u16,
    bytes: usize,
    work_ns_page: u64,
) -> [Outcome; 2] {
    let pages = bytes / PAGE_BYTES;
    let busy_cores = usize::from(threads.div_ceil(args.packages).min(args.cores));
    let folios = (args.folios as usize * 16 / pages).max(5);
    let work_ns = work_ns_page * pages as u64;
    let base = Machine { folio_pages: pages, folios, busy_cores, work_ns, ..base.clone() };
    [1, BATCH_MAX].map(|batch| simulate(&Machine { batch, ..base.clone() }, CONSTANTS))
}

/// Seconds that batches save of the time in which a core compresses so many pages, or waits for that.
fn saved_s([one, all]: &[Outcome; 2], pages: u64) -> f64 {
    (mean(one) - mean(all)) * as_f64(pages) / 1e9
}

/// Nanoseconds per page.
fn mean(outcome: &Outcome) -> f64 {
    as_f64(outcome.page_ns.iter().sum()) / as_f64(outcome.page_ns.len() as u64)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a simulation are below 2^53"
)]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// Pages per microsecond.
fn rate(outcome: &Outcome) -> f64 {
    1000.0 * as_f64(outcome.begun) / as_f64(outcome.end_ns.max(1))
}

fn percent(found: u64, wanted: u64) -> f64 {
    100.0 * (as_f64(found) / as_f64(wanted) - 1.0)
}

fn push(array: &mut Value, row: Value) {
    array.as_array_mut().expect("it was made as one").push(row);
}

#[cfg(test)]
mod tests;
