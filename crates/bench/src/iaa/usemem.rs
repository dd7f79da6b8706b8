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

use serde_json::{Value, json};
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zcomp::BATCH_MAX;

use super::published::{HIGH, PROCESSES, USEMEM, Usemem, WRITTEN};
use super::simulation::{CONSTANTS, Constants, Machine, simulate};
use super::{Failure, IaaArgs, JITTER_PERCENT, Table, as_f64, change, error, machine, push, show};

/// Logical CPUs of a core: the series counts 28 for a device of a package with 56 cores and 4 devices.
pub(super) const THREADS_PER_CORE: usize = 2;

/// A first write to a page and usemem's 512 stores to it, where nothing goes out: measured, see the document.
pub(super) const TOUCH_NS: f64 = 565.0;

/// usemem adds what it maps, in words, to the bytes that it writes: it says 9 KB where 8 were written.
const COUNTED: f64 = 9.0 / 8.0;

/// Steps by which the work per page is found, and how far off the throughput may be then.
const STEPS: usize = 4;
const FIT: f64 = 0.01;

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
    pub(super) work_ns: [f64; 2],
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
    /// about one more of time. Its processes are as many as published, whatever is predicted.
    ///
    /// # Errors
    ///
    /// One line: no work per page gives that throughput on this machine.
    pub(super) fn of_v9(args: &IaaArgs) -> Result<Model, String> {
        if args.cores < PROCESSES {
            let cores = args.cores;
            return Err(format!(
                "v9's {PROCESSES} processes have no core each, of {cores}: the work per page is not known"
            ));
        }
        let mut model = Model {
            constants: CONSTANTS,
            touch_ns: TOUCH_NS,
            work_ns: [10_000.0; 2],
            jitter_percent: JITTER_PERCENT,
        };
        for usemem in USEMEM.iter().filter(|it| it.row.is_fitted()) {
            let per_kb_s =
                COUNTED * as_f64(PAGE_BYTES as u64) / 1024.0 * 1e9 * f64::from(PROCESSES);
            let wanted_kb_s = as_f64(usemem.kb_s[1]);
            let out = usemem.out_per_written(Side::Series);
            let kb_s = |model: &Model| model.written(args, PROCESSES, usemem, Side::Series).kb_s();
            for _ in 0..STEPS {
                let off = per_kb_s / wanted_kb_s - per_kb_s / kb_s(&model);
                model.work_ns[usemem.row.folio as usize] += off / out;
            }
            let (work_ns, folio) = (model.work_ns[usemem.row.folio as usize], usemem.row.folio);
            // The simulation has no less than no work, so its throughput would not say that this is negative.
            if work_ns < 0.0 {
                return Err(format!(
                    "v9's throughput leaves less than no time for the work of a page: {work_ns:.0} ns ({})",
                    folio.name()
                ));
            }
            let found_kb_s = kb_s(&model);
            if (found_kb_s / wanted_kb_s - 1.0).abs() > FIT {
                let [found, wanted] = [found_kb_s, wanted_kb_s].map(|kb_s| kb_s / 1e6);
                return Err(format!(
                    "no work per page was found that gives v9's throughput: {found:.2} GB/s, not {wanted:.2} ({})",
                    folio.name()
                ));
            }
        }
        Ok(model)
    }

    fn written(&self, args: &IaaArgs, processes: u16, usemem: &Usemem, side: Side) -> Written {
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
            busy_cores: usize::from(processes).min(cores),
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
        let [alone, series] = self.both(args, usemem).map(|written| written.kb_s());
        change(alone, series)
    }

    /// Without the series, and with it.
    fn both(&self, args: &IaaArgs, usemem: &Usemem) -> [Written; 2] {
        [Side::Alone, Side::Series].map(|side| self.written(args, args.processes, usemem, side))
    }
}

/// Refuses more processes than cores: CPU number i is a core of its own up to there, and figures of fewer processes
/// would stand for all of them.
pub(super) fn check(args: &IaaArgs) -> Result<(), Failure> {
    let IaaArgs { processes, cores, .. } = *args;
    if processes > cores {
        return Err(Failure::Refused(format!(
            "--processes: {processes}; accepted: 1 to {cores}, one for each of --cores"
        )));
    }
    Ok(())
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

/// The two tables, or one line that says why there is none.
pub(super) fn tables(args: &IaaArgs, model: Result<&Model, &String>) -> Vec<Table> {
    match model {
        Ok(model) => vec![usemem(args, model), sensitivity(args, model)],
        Err(why) => {
            let text = format!("\nusemem is left out: {why}\n");
            vec![Table { name: "usemem_left_out", text, json: json!(why) }]
        }
    }
}

/// Throughput without the series and with it, and what follows of it for elapsed and system time.
pub(super) fn usemem(args: &IaaArgs, model: &Model) -> Table {
    let [small, large] = model.work_ns;
    let text = format!(
        "\nprediction: what the series changes for usemem; work per page out {small:.0} ns (64K), {large:.0} ns (2M), \
         from v9's batches\n"
    );
    let mut table = Table { name: "usemem", text, json: json!([]) };
    if args.processes == PROCESSES {
        beside_published(args, model, &mut table);
    } else {
        alone(args, model, &mut table);
    }
    table.text += "  The published pages out of each row go in too.\n";
    table
}

/// What a row has in JSON in any case.
fn row(usemem: &Usemem) -> serde_json::Map<String, Value> {
    let row = json!({
        "name": usemem.row.name(), "fitted": usemem.row.is_fitted(),
        "input_pages_out": usemem.out, "input_pages_written": WRITTEN,
    });
    let Value::Object(row) = row else { unreachable!("it was made as one") };
    row
}

/// Adds what other numbers of processes than the published one would do, with nothing to compare it with.
fn alone(args: &IaaArgs, model: &Model, table: &mut Table) {
    let processes = args.processes;
    writeln!(
        table.text,
        "  {processes} processes; published are {PROCESSES}, so there is nothing beside it\n\
         \x20 row      GB/s without it  gain, percent"
    )
    .expect("a string grows");
    for usemem in &USEMEM {
        let [alone, series] = model.both(args, usemem).map(|written| written.kb_s());
        let (name, speed, gain) = (usemem.row.name(), alone / 1e6, change(alone, series));
        writeln!(table.text, "  {name:<8}{speed:>16.2}{gain:>+15.1}").expect("a string grows");
        let mut row = row(usemem);
        row.extend([
            ("predicted".to_owned(), json!(gain)),
            ("alone_gb_s_predicted".to_owned(), json!(speed)),
        ]);
        push(&mut table.json, Value::Object(row));
    }
}

/// Adds what is predicted beside what was published.
fn beside_published(args: &IaaArgs, model: &Model, table: &mut Table) {
    table.text += "  row      GB/s without it        gain, percent          elapsed               sys\n\
                   \x20          published, predicted, error of each\n";
    for usemem in &USEMEM {
        let [alone, series] = model.both(args, usemem);
        let [kb_s, series_kb_s] = usemem.kb_s.map(as_f64);
        let speed = error(kb_s / 1e6, alone.kb_s() / 1e6);
        let gain = error(change(kb_s, series_kb_s), change(alone.kb_s(), series.kb_s()));
        let [elapsed, sys] = usemem
            .row
            .times(alone.elapsed_s() - series.elapsed_s(), alone.cpu_s() - series.cpu_s());
        let name = usemem.row.name();
        let [absolute, found, off] = speed;
        let [second, third, fourth] = [gain, elapsed, sys].map(show);
        let fitted = if usemem.row.is_fitted() { "  fitted" } else { "" };
        writeln!(
            table.text,
            "  {name:<8}{absolute:>5.2}{found:>6.2}{off:>+6.2}    {second}  {third}  {fourth}{fitted}"
        )
        .expect("a string grows");
        let figures = json!({
            "published": gain[0], "predicted": gain[1], "error": gain[2],
            "alone_gb_s_published": absolute, "alone_gb_s_predicted": found,
            "elapsed_published": elapsed[0], "elapsed_predicted": elapsed[1], "elapsed_error": elapsed[2],
            "sys_published": sys[0], "sys_predicted": sys[1], "sys_error": sys[2],
        });
        let Value::Object(figures) = figures else { unreachable!("it was made as one") };
        let mut row = row(usemem);
        row.extend(figures);
        push(&mut table.json, Value::Object(row));
    }
    table.text += "  fitted: with the series. Wanted: errors of 8 points at most in the gain.\n";
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
