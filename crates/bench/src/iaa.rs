//! `zfolio bench iaa`: a timed simulation of accelerators, with the driver's own policy.
//!
//! No machine of ours has the device. Three constants are fitted to three published latencies; all else that is
//! printed is a prediction, beside the published figure if there is one. The simulation is in `simulation.rs`.

mod simulation;

use std::fmt::Write as _;

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

/// A published row of `usemem -n 30 10g` under `memory.high=150G`: gains of batching in percent.
struct Usemem {
    name: &'static str,
    folio_bytes: usize,
    /// KB/s of all processes, sequential. Of v14 only gains are at hand, so v12's are used.
    kb_s: u64,
    throughput: f64,
    elapsed: f64,
}

/// In the order in which the series give them.
const USEMEM: [Usemem; 4] = [
    Usemem {
        name: "v12 64K",
        folio_bytes: 64 << 10,
        kb_s: 7_191_949,
        throughput: 49.0,
        elapsed: -25.0,
    },
    Usemem {
        name: "v12 2M",
        folio_bytes: 2 << 20,
        kb_s: 7_237_676,
        throughput: 55.0,
        elapsed: -16.0,
    },
    Usemem {
        name: "v14 64K",
        folio_bytes: 64 << 10,
        kb_s: 7_191_949,
        throughput: 69.0,
        elapsed: -32.0,
    },
    Usemem {
        name: "v14 2M",
        folio_bytes: 2 << 20,
        kb_s: 7_237_676,
        throughput: 78.0,
        elapsed: -28.0,
    },
];

/// Pages that go out for each page that is written, in percent: (300 - 150) GB of 300 GB.
const OUT_PERCENT: u64 = 50;

/// usemem's last sleep (`-s 10`), which batching does not shorten.
const SLEEP_S: f64 = 10.0;

/// GB that a process writes.
const WRITTEN_KB: f64 = 10.0 * 1024.0 * 1024.0;

/// The work to write one page where nothing goes out, as measured with the workload of `zfolio bench usemem`:
/// 1001 MB/s (docs/benchmarks/2026-11-21-usemem.md).
const TOUCH_NS: u64 = 4092;

/// Predicts and prints. Always returns true.
pub(crate) fn iaa(args: &IaaArgs) -> Result<bool, Failure> {
    if usize::from(args.devices) * usize::from(args.queues) > QUEUES_MAX {
        return Err(Failure::Refused(format!("--queues: accepted: {QUEUES_MAX} in all at most")));
    }
    let tables = [latencies(args), layouts(args), retries(args), usemem(args)];
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
    let text = "\nprediction: what batching gains usemem, in percent (work per page that goes out: as the published\n\
                sequential row leaves it, and as this project measured writes alone)\n\
                \x20 row        published  predicted    error  | writes alone    error  \
                | elapsed published  predicted    error\n";
    let mut table = Table { name: "usemem", text: text.to_owned(), json: json!([]) };
    for row in &USEMEM {
        let per_page = 4 * u64::from(args.processes) * 1_000_000_000 / row.kb_s;
        // The published time of a page, over the pages that go out, less what compression takes without others.
        let anchored = (per_page * 100 / OUT_PERCENT).saturating_sub(LATENCIES[0].3);
        let [gain, alone] =
            [anchored, TOUCH_NS * 100 / OUT_PERCENT].map(|work| gain(args, row, work));
        let seconds = WRITTEN_KB * f64::from(args.processes) / as_f64(row.kb_s);
        let elapsed =
            100.0 * ((seconds / (1.0 + gain / 100.0) + SLEEP_S) / (seconds + SLEEP_S) - 1.0);
        let errors = [gain - row.throughput, alone - row.throughput, elapsed - row.elapsed];
        writeln!(
            table.text,
            "  {:<10}{:>+10.0}{gain:>+11.1}{:>+9.1}  |{alone:>+13.1}{:>+9.1}  |{:>+18.0}{elapsed:>+11.1}{:>+9.1}",
            row.name, row.throughput, errors[0], errors[1], row.elapsed, errors[2],
        ).expect("a string grows");
        push(
            &mut table.json,
            json!({
                "name": row.name, "published": row.throughput, "predicted": gain, "error": errors[0],
                "writes_alone": alone, "writes_alone_error": errors[1], "elapsed_published": row.elapsed,
                "elapsed_predicted": elapsed, "elapsed_error": errors[2],
            }),
        );
    }
    table.text += "  Wanted: errors of 8 points at most. Not met where the error is larger: see the document.\n";
    table
}

/// What batching gains, if each page that goes out comes with so much other work.
fn gain(args: &IaaArgs, row: &Usemem, work_ns_page: u64) -> f64 {
    let pages = row.folio_bytes / PAGE_BYTES;
    let busy_cores = usize::from(args.processes.div_ceil(args.packages).min(args.cores));
    let folios = (args.folios as usize * 16 / pages).max(5);
    let work_ns = work_ns_page * pages as u64;
    let base = Machine { folio_pages: pages, folios, busy_cores, work_ns, ..machine(args) };
    let [sequential, batched] =
        [1, BATCH_MAX].map(|batch| rate(&simulate(&Machine { batch, ..base.clone() }, CONSTANTS)));
    100.0 * (batched / sequential - 1.0)
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
