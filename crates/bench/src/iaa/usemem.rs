//! What the series changes for usemem, predicted.
//!
//! Process number i runs on CPU number i (`-b 1`), so all processes share the devices of one package. Without the
//! series a CPU uses one device, and logical CPUs are divided over the devices in the order of their numbers: 28 of 30
//! processes share one. With it they use all four by turns.
//!
//! ```text
//! a page written = touch + pages out per page written x (work + compression)
//!                  `- the half below memory.high ends before anything goes out
//! ```
//!
//! The simulation has the second half: each core compresses a folio, and works for as long as a folio takes otherwise.
//! What is not published is the work per page that goes out. It is computed from v9's throughput in batches, the only
//! throughput that goes in; v9's own gain and all of the other rows follow.

use std::fmt::Write as _;

use serde_json::json;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zcomp::BATCH_MAX;

use super::published::{HIGH, USEMEM, Usemem, WRITTEN};
use super::simulation::{CONSTANTS, Constants, Machine, simulate};
use super::{IaaArgs, JITTER_PERCENT, Table, as_f64, change, error, machine, push, show};

/// Logical CPUs of a core: the series counts 28 for a device of a package with 56 cores and 4 devices.
const THREADS_PER_CORE: usize = 2;

/// A first write to a page and usemem's 512 stores to it, where nothing goes out: measured, see the document.
const TOUCH_NS: f64 = 565.0;

/// usemem adds what it maps, in words, to the bytes that it writes: it says 9 KB where 8 were written.
const COUNTED: f64 = 9.0 / 8.0;

/// Fewer folios would show how a run begins.
const FOLIOS_MIN: usize = 30;

/// Pages that are written before any goes out.
const BEFORE: f64 = as_share(HIGH, WRITTEN);

#[expect(clippy::cast_precision_loss, reason = "pages of 300 GiB")]
const fn as_share(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// What a prediction is made from, beside the published configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) constants: Constants,
    touch_ns: f64,
    /// Per page that goes out, without its compression: for folios of 64K and of 2M.
    work_ns: [f64; 2],
    jitter_percent: u64,
}

/// Without the series, and with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Alone,
    Series,
}

/// What each process needs for a page that it writes, in nanoseconds.
struct Written(Vec<f64>);

impl Written {
    /// Of all processes, as usemem says it.
    fn kb_s(&self) -> f64 {
        let page = COUNTED * as_f64(PAGE_BYTES as u64) / 1024.0;
        self.0.iter().map(|ns| page * 1e9 / ns).sum()
    }

    /// Of all processes together.
    fn cpu_s(&self) -> f64 {
        let pages = as_f64(WRITTEN) / as_f64(self.0.len() as u64);
        self.0.iter().sum::<f64>() * pages / 1e9
    }

    /// Until the last process has written all.
    fn elapsed_s(&self) -> f64 {
        let pages = as_f64(WRITTEN) / as_f64(self.0.len() as u64);
        self.0.iter().copied().fold(0.0, f64::max) * pages / 1e9
    }
}

impl Model {
    /// The work per page from v9's throughput in batches, by a few steps of Newton's: a nanosecond more of work is
    /// about one more of time.
    pub(super) fn of_v9(args: &IaaArgs) -> Model {
        let mut model = Model {
            constants: CONSTANTS,
            touch_ns: TOUCH_NS,
            work_ns: [10_000.0; 2],
            jitter_percent: JITTER_PERCENT,
        };
        for usemem in USEMEM.iter().filter(|it| it.row.name().starts_with("v9 ")) {
            let per_kb_s = COUNTED * as_f64(PAGE_BYTES as u64) / 1024.0 * 1e9;
            let wanted = per_kb_s * f64::from(args.processes) / as_f64(usemem.kb_s[1]);
            let out = usemem.out_per_written(Side::Series);
            for _ in 0..4 {
                let found = model.written(args, usemem, Side::Series);
                let found = per_kb_s * f64::from(args.processes) / found.kb_s();
                model.work_ns[usemem.row.folio as usize] += (wanted - found) / out;
            }
        }
        model
    }

    fn written(&self, args: &IaaArgs, usemem: &Usemem, side: Side) -> Written {
        let bytes = usemem.row.folio.bytes();
        let pages = bytes / PAGE_BYTES;
        let out = usemem.out_per_written(side);
        let touched = self.touch_ns * (1.0 - BEFORE) / out;
        // Without what the simulation adds by chance.
        let work = (self.work_ns[usemem.row.folio as usize] + touched)
            / (1.0 + as_f64(self.jitter_percent) / 200.0);
        let is_by_cores = side == Side::Series && !usemem.distributes;
        let cores = usize::from(args.cores) * if is_by_cores { 1 } else { THREADS_PER_CORE };
        let mut one = Machine {
            cores,
            busy_cores: usize::from(args.processes).min(cores),
            consecutive: true,
            folio_pages: pages,
            folios: (args.folios as usize * 16 / pages).max(FOLIOS_MIN),
            jitter_percent: self.jitter_percent,
            work_ns: nanoseconds(work * as_f64(pages as u64)),
            batch: if side == Side::Alone { 1 } else { BATCH_MAX },
            ..machine(args)
        };
        one.settings.distribute_comps = side == Side::Series && usemem.distributes;
        let outcome = simulate(&one, self.constants);
        let went_out = as_f64((one.folios * pages) as u64);
        let page = |end: &u64| self.touch_ns * BEFORE + out * as_f64(*end) / went_out;
        Written(outcome.core_end_ns.iter().map(page).collect())
    }

    /// What the series changes in the throughput of a row, in percent.
    fn gain(&self, args: &IaaArgs, usemem: &Usemem) -> f64 {
        let [alone, series] =
            [Side::Alone, Side::Series].map(|side| self.written(args, usemem, side).kb_s());
        change(alone, series)
    }
}

impl Usemem {
    /// Pages that go out for each page that is written.
    fn out_per_written(&self, side: Side) -> f64 {
        as_f64(self.out[side as usize]) / as_f64(WRITTEN)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "work is positive and far below 2^53 ns"
)]
fn nanoseconds(ns: f64) -> u64 {
    ns.max(0.0) as u64
}

/// Throughput without the series and with it, and what follows of it for elapsed and system time.
pub(super) fn usemem(args: &IaaArgs, model: &Model) -> Table {
    let [small, large] = model.work_ns;
    let text = format!(
        "\nprediction: what the series changes for usemem; work per page out {small:.0} ns (64K), {large:.0} ns (2M), \
         from v9's batches\n  row      GB/s without it        gain, percent          elapsed               sys\n\
         \x20          published, predicted, error of each\n"
    );
    let mut table = Table { name: "usemem", text, json: json!([]) };
    for usemem in &USEMEM {
        let [alone, series] =
            [Side::Alone, Side::Series].map(|side| model.written(args, usemem, side));
        let [kb_s, series_kb_s] = usemem.kb_s.map(as_f64);
        let speed = error(kb_s / 1e6, alone.kb_s() / 1e6);
        let gain = error(change(kb_s, series_kb_s), change(alone.kb_s(), series.kb_s()));
        let [elapsed, sys] = usemem
            .row
            .times(alone.elapsed_s() - series.elapsed_s(), alone.cpu_s() - series.cpu_s());
        let name = usemem.row.name();
        let [absolute, found, off] = speed;
        let [second, third, fourth] = [gain, elapsed, sys].map(show);
        writeln!(
            table.text,
            "  {name:<8}{absolute:>5.2}{found:>6.2}{off:>+6.2}    {second}  {third}  {fourth}"
        )
        .expect("a string grows");
        push(
            &mut table.json,
            json!({
                "name": name, "published": gain[0], "predicted": gain[1], "error": gain[2],
                "alone_gb_s_published": absolute, "alone_gb_s_predicted": found,
                "elapsed_published": elapsed[0], "elapsed_predicted": elapsed[1], "elapsed_error": elapsed[2],
                "sys_published": sys[0], "sys_predicted": sys[1], "sys_error": sys[2],
            }),
        );
    }
    table.text += "  Wanted: errors of 8 points at most in the gain.\n";
    table
}

/// By how much each predicted gain changes, in points, if one of the model's numbers is a fifth lower or higher.
pub(super) fn sensitivity(args: &IaaArgs, model: &Model) -> Table {
    let is_wanted = |it: &&Usemem| ["v12 ", "v14 "].iter().any(|of| it.row.name().starts_with(of));
    let rows: Vec<&Usemem> = USEMEM.iter().filter(is_wanted).collect();
    let mut text =
        "\nby how many points a predicted gain changes, if a number is a fifth less/more\n  "
            .to_owned();
    write!(text, "{:<16}", "").expect("a string grows");
    for usemem in &rows {
        write!(text, "{:>13}", usemem.row.name()).expect("a string grows");
    }
    text.push('\n');
    let before: Vec<f64> = rows.iter().map(|usemem| model.gain(args, usemem)).collect();
    let mut table = Table { name: "sensitivity", text, json: json!([]) };
    for (name, scale) in KNOBS {
        write!(table.text, "  {name:<16}").expect("a string grows");
        let mut changes = Vec::new();
        for (usemem, before) in rows.iter().zip(&before) {
            let [less, more] = [0.8, 1.2].map(|by| scale(*model, by).gain(args, usemem) - before);
            write!(table.text, "  {less:>+5.1}/{more:>+5.1}").expect("a string grows");
            changes.push(json!({ "row": usemem.row.name(), "less": less, "more": more }));
        }
        table.text.push('\n');
        push(&mut table.json, json!({ "constant": name, "changes": changes }));
    }
    table
}

/// A number of the model, and the model with it scaled.
type Knob = (&'static str, fn(Model, f64) -> Model);

const KNOBS: [Knob; 7] = [
    ("submit", |model, by| with(model, |it| it.submit_ns = scaled(it.submit_ns, by))),
    ("port", |model, by| with(model, |it| it.port_ns = scaled(it.port_ns, by))),
    ("latency", |model, by| with(model, |it| it.latency_ns = scaled(it.latency_ns, by))),
    ("memory", |model, by| with(model, |it| it.memory_ns = scaled(it.memory_ns, by))),
    ("touch", |model, by| Model { touch_ns: model.touch_ns * by, ..model }),
    ("work", |model, by| Model { work_ns: model.work_ns.map(|ns| ns * by), ..model }),
    ("jitter 0/100 %", |model, by| Model {
        jitter_percent: if by < 1.0 { 0 } else { 100 },
        ..model
    }),
];

fn with(mut model: Model, change: impl FnOnce(&mut Constants)) -> Model {
    change(&mut model.constants);
    model
}

pub(super) fn scaled(ns: u64, by: f64) -> u64 {
    nanoseconds((as_f64(ns) * by).round())
}
