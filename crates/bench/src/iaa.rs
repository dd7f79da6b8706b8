//! `zfolio bench iaa`: a timed simulation of accelerators, with the driver's own policy.
//!
//! No machine of ours has the device. Three constants are fitted to three published latencies; all else that is
//! printed is a prediction, beside the published figure if there is one. Those for usemem need the work per page, which
//! one published throughput gives (`usemem.rs`). The simulation is in `simulation.rs`.

mod published;
mod retries;
mod simulation;
mod usemem;

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use zfolio_core::number;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zcomp::BATCH_MAX;
use zfolio_iaa::Settings;
use zfolio_iaa::queues::QUEUES_MAX;

use crate::compare::{Failure, print};
use crate::corpus::parse_size;
use published::{COMPILATION, COMPILATION_THREADS};
use retries::retries;
use simulation::{CONSTANTS, ENGINES, Machine, Outcome, simulate};
use usemem::{Model, THREADS_PER_CORE, TOUCH_NS};

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
    #[arg(long, default_value_t = 4, value_parser = number::within(1_u8..=8))]
    devices: u8,
    /// Work queues of each device
    #[arg(long, default_value_t = 1, value_parser = number::within(1_u8..=8))]
    queues: u8,
    /// Entries of each device, for all of its queues together
    #[arg(long, default_value_t = 128, value_parser = number::within(8_u32..=4096))]
    entries: u32,
    /// Cores of a package
    #[arg(long, default_value_t = 56, value_parser = number::within(1_u16..=1024))]
    cores: u16,
    /// Packages, over which the threads of the kernel compilation are spread
    #[arg(long, default_value_t = 2, value_parser = number::within(1_u16..=64))]
    packages: u16,
    /// Processes of usemem, on the first CPUs of one package: one for each core at most
    #[arg(long, default_value_t = 30, value_parser = number::within(1_u16..=1024))]
    processes: u16,
    /// What is compressed at a time: 4K to 2M
    #[arg(long, default_value = "64K", value_name = "SIZE", value_parser = parse_folio)]
    folio: usize,
    /// Folios that each core compresses
    #[arg(long, default_value_t = 100, value_parser = number::within(1_u32..=100_000))]
    folios: u32,
    /// What chooses when cores begin
    #[arg(long, default_value_t = 1, value_parser = number::within(0..=u64::MAX))]
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

/// Predicts and prints. Always returns true.
pub(crate) fn iaa(args: &IaaArgs) -> Result<bool, Failure> {
    if usize::from(args.devices) * usize::from(args.queues) > QUEUES_MAX {
        return Err(Failure::Refused(format!("--queues: accepted: {QUEUES_MAX} in all at most")));
    }
    usemem::check(args)?;
    let model = Model::of_v9(args);
    let mut tables = vec![latencies(args), layouts(args), retries(args)];
    tables.extend(usemem::tables(args, model.as_ref()));
    tables.push(compilation(args));
    if args.json {
        let each = tables.iter().map(|table| (table.name.to_owned(), table.json.clone()));
        let mut all: serde_json::Map<String, Value> = each.collect();
        all.extend(numbers(model.as_ref().ok()));
        print(&format!("{:#}\n", Value::Object(all)))?;
        return Ok(true);
    }
    let c = CONSTANTS;
    let mut text = format!(
        "iaa: a simulation, nothing is measured; {} devices of {} queue(s) and {} entries, {} cores a package\n\
         fitted to the first table: submit {} ns, port {} ns, latency {} ns\n\
         assumed: memory {} ns, a try {} ns, software {} ns\n",
        args.devices,
        args.queues,
        args.entries,
        args.cores,
        c.submit_ns,
        c.port_ns,
        c.latency_ns,
        c.memory_ns,
        c.try_ns,
        c.software_ns,
    );
    tables.iter().for_each(|table| text += &table.text);
    print(&text)?;
    Ok(true)
}

/// The numbers that the tables rest on, and where they are from, for JSON.
fn numbers(model: Option<&Model>) -> [(String, Value); 3] {
    let work_ns = |folio: usize| model.map(|model| model.work_ns[folio].round());
    let fitted = json!({
        "submit_ns": CONSTANTS.submit_ns,
        "port_ns": CONSTANTS.port_ns,
        "latency_ns": CONSTANTS.latency_ns,
        "work_ns_64k": work_ns(0),
        "work_ns_2m": work_ns(1),
    });
    let assumed = json!({
        "memory_ns": CONSTANTS.memory_ns,
        "try_ns": CONSTANTS.try_ns,
        "software_ns": CONSTANTS.software_ns,
        "engines": ENGINES,
        "threads_per_core": THREADS_PER_CORE,
        "jitter_percent": JITTER_PERCENT,
    });
    let measured = json!({ "touch_ns": TOUCH_NS });
    [("fitted", fitted), ("assumed", assumed), ("measured", measured)]
        .map(|(name, numbers)| (name.to_owned(), numbers))
}

/// How much the work between two folios varies.
const JITTER_PERCENT: u64 = 2;

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
        consecutive: false,
        settings: Settings::default(),
        folio_pages: args.folio / PAGE_BYTES,
        batch: BATCH_MAX,
        work_ns: 0,
        jitter_percent: JITTER_PERCENT,
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

/// A kernel compilation: the published counters say how many pages batches can help.
fn compilation(args: &IaaArgs) -> Table {
    let text = "\nprediction: what batching changes for a kernel compilation, in percent: published, predicted, error\n\
                \x20 row      elapsed               sys\n";
    let mut table = Table { name: "compilation", text: text.to_owned(), json: json!([]) };
    for (row, out) in &COMPILATION {
        let threads = u64::from(COMPILATION_THREADS);
        let elapsed = Duration::from_secs_f64(row.elapsed_alone_s());
        let work = elapsed.as_nanos() * u128::from(threads) / u128::from(*out);
        let work = u64::try_from(work).unwrap_or(u64::MAX);
        let both = runs(args, COMPILATION_THREADS, row.folio.bytes(), work);
        let saved_s = saved_s(&both, *out);
        let [elapsed, sys] = row.times(saved_s / as_f64(threads), saved_s);
        let name = row.name();
        writeln!(table.text, "  {name:<8}{}  {}", show(elapsed), show(sys))
            .expect("a string grows");
        push(
            &mut table.json,
            json!({
                "name": name, "input_pages_out": out,
                "elapsed_published": elapsed[0], "elapsed_predicted": elapsed[1], "elapsed_error": elapsed[2],
                "sys_published": sys[0], "sys_predicted": sys[1], "sys_error": sys[2],
            }),
        );
    }
    table
}

/// Folios that go out page by page, each CPU by its own device, and in batches by all devices, if each page comes with
/// so much other work. As published there are two queues of each device, with the series one of them for each
/// direction.
fn runs(args: &IaaArgs, threads: u16, bytes: usize, work_ns_page: u64) -> [Outcome; 2] {
    let pages = bytes / PAGE_BYTES;
    let base = Machine {
        queues: 2,
        folio_pages: pages,
        folios: (args.folios as usize * 16 / pages).max(5),
        busy_cores: usize::from(threads.div_ceil(args.packages).min(args.cores)),
        work_ns: work_ns_page * pages as u64,
        ..machine(args)
    };
    let mut alone = Machine { batch: 1, ..base.clone() };
    alone.settings.distribute_comps = false;
    let mut series = base;
    series.settings.comp_wqs_per_iaa = 1;
    [alone, series].map(|machine| simulate(&machine, CONSTANTS))
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
