//! The figures as text and as JSON.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::zcomp::Params;

use super::disk::Sizes;
use super::phase::{Phase, REQUEST_BYTES, Speed};
use crate::compare::outcome::median;

/// What one round found on one disk: the speeds in the order of [`Table::phases`], and the sizes after the first phase.
#[derive(Clone, Default, Debug)]
pub(super) struct Run {
    pub(super) speeds: Vec<Speed>,
    pub(super) sizes: Sizes,
}

/// The figures of one algorithm, unit and number of jobs.
#[derive(Debug)]
pub(super) struct Setting {
    pub(super) params: Params,
    pub(super) unit: UnitOrder,
    pub(super) jobs: usize,
    zfolio: Vec<Run>,
    /// In the same rounds; empty if the other side was left out.
    other: Vec<Run>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, {} job(s)", self.params, self.unit, self.jobs)
    }
}

/// All that was measured.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) title: String,
    /// The name of the other side.
    pub(super) other: &'static str,
    pub(super) phases: Vec<Phase>,
    pub(super) settings: Vec<Setting>,
    pub(super) notes: Vec<String>,
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
impl Speed {
    /// By elapsed time. In order: MB/s; at random: thousands of requests a second.
    fn by_wall(&self, phase: Phase) -> f64 {
        let per_s = self.requests as f64 * 1e9 / self.wall_ns as f64;
        if phase.is_in_order() { per_s * REQUEST_BYTES as f64 / 1e6 } else { per_s / 1e3 }
    }

    /// CPU time of one request in microseconds.
    fn cpu_us(&self) -> f64 {
        self.cpu_ns as f64 / 1e3 / self.requests as f64
    }
}

fn unit_of(phase: Phase) -> &'static str {
    if phase.is_in_order() { "MB/s" } else { "1000/s" }
}

/// Figures of rounds: zfolio's, the other side's, and the median of one divided by the other within a round.
struct Compared {
    zfolio: Option<f64>,
    other: Option<f64>,
    ratio: Option<f64>,
}

impl Setting {
    pub(super) fn new(params: Params, unit: UnitOrder, jobs: usize) -> Setting {
        Setting { params, unit, jobs, zfolio: Vec::new(), other: Vec::new() }
    }

    /// The name of the algorithm.
    pub(super) fn name(&self) -> &'static str {
        self.params.algorithm.name()
    }

    /// Adds the runs of a round: zfolio's, and the other side's if there is one.
    pub(super) fn add(&mut self, runs: Vec<Run>) {
        let mut runs = runs.into_iter();
        self.zfolio.extend(runs.next());
        self.other.extend(runs.next());
    }

    /// The medians of a figure.
    fn compare(&self, figure: impl Fn(&Run) -> f64) -> Compared {
        let of = |runs: &[Run]| -> Vec<f64> { runs.iter().map(&figure).collect() };
        let some = |values: Vec<f64>| (!values.is_empty()).then(|| median(values));
        let (zfolio, other) = (of(&self.zfolio), of(&self.other));
        let ratios = zfolio.iter().zip(&other).map(|(zfolio, other)| zfolio / other).collect();
        Compared { ratio: some(ratios), zfolio: some(zfolio), other: some(other) }
    }

    fn speeds(&self, index: usize, phase: Phase) -> Compared {
        self.compare(|run| run.speeds[index].by_wall(phase))
    }

    /// How many times as much CPU time the other side needs for a request.
    fn cpu_ratio(&self, index: usize) -> Option<f64> {
        self.compare(|run| 1.0 / run.speeds[index].cpu_us()).ratio
    }

    fn lines(&self, phases: &[Phase], text: &mut String) {
        let named = format!(
            "{:<16} {:>4} {:>4}",
            self.params.to_string(),
            self.unit.to_string(),
            self.jobs
        );
        for (index, phase) in phases.iter().copied().enumerate() {
            let (compared, cpu) = (self.speeds(index, phase), self.cpu_ratio(index));
            line(text, &named, [phase.name(), unit_of(phase)], &compared, cpu);
        }
        let mib = |bytes: u64| bytes_f64(bytes) / f64::from(1 << 20);
        let compressed = self.compare(|run| mib(run.sizes.compressed_bytes));
        line(text, &named, ["compressed", "MiB"], &compressed, None);
        let used = self.compare(|run| mib(run.sizes.used_bytes));
        line(text, &named, ["memory", "MiB"], &used, None);
    }

    fn json(&self, other: &str, phases: &[Phase]) -> Value {
        let rows = phases.iter().copied().enumerate().map(|(index, phase)| {
            let compared = self.speeds(index, phase);
            let of = |runs: &[Run], median: Option<f64>| {
                let speeds = runs.iter().map(|run| &run.speeds[index]);
                let runs: Vec<f64> = speeds.clone().map(|speed| speed.by_wall(phase)).collect();
                let cpu_us: Vec<f64> = speeds.map(Speed::cpu_us).collect();
                median.map(|median| json!({"median": median, "runs": runs, "cpu_us": cpu_us}))
            };
            json!({
                "phase": phase.name(),
                "unit": unit_of(phase),
                "zfolio": of(&self.zfolio, compared.zfolio),
                other: of(&self.other, compared.other),
                "ratio": compared.ratio,
                "ratio_by_cpu_time": self.cpu_ratio(index),
            })
        });
        let sizes = |runs: &[Run]| {
            runs.last().map(|Run { sizes: Sizes { compressed_bytes, used_bytes }, .. }| {
                json!({"compressed_bytes": compressed_bytes, "used_bytes": used_bytes})
            })
        };
        json!({
            "algorithm": self.params.to_string(),
            "unit_bytes": self.unit.pages() * PAGE_BYTES,
            "jobs": self.jobs,
            "rows": rows.collect::<Vec<_>>(),
            "sizes": {"zfolio": sizes(&self.zfolio), other: sizes(&self.other)},
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of one machine are below 2^53")]
fn bytes_f64(bytes: u64) -> f64 {
    bytes as f64
}

impl Table {
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.title);
        let columns = format!("{:>9} {:>10}  ratio by CPU", "zfolio", self.other);
        writeln!(text, "ALGORITHM        UNIT JOBS  PHASE                    {columns}")
            .expect("a String takes everything");
        self.settings.iter().for_each(|setting| setting.lines(&self.phases, &mut text));
        if !self.notes.is_empty() {
            text.push('\n');
        }
        self.notes.iter().for_each(|note| text += &format!("{note}\n"));
        text
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "title": self.title,
            "settings": self.settings.iter().map(|it| it.json(self.other, &self.phases)).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }
}

fn line(text: &mut String, named: &str, [what, unit]: [&str; 2], of: &Compared, cpu: Option<f64>) {
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let ratio = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let (zfolio, other) = (figure(of.zfolio), figure(of.other));
    let (by_wall, by_cpu) = (ratio(of.ratio), ratio(cpu));
    let columns = format!("{zfolio:>9} {other:>10} {by_wall:>6} {by_cpu:>6}");
    writeln!(text, "{named}  {what:<16} {unit:<7} {columns}").expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::{Phase, Run, Setting, Sizes, Speed, Table, UnitOrder};

    /// A run whose requests take so many microseconds.
    fn run(us: u64, used_bytes: u64) -> Run {
        let speed = Speed { requests: 1000, wall_ns: us * 1_000_000, cpu_ns: 2 * us * 1_000_000 };
        let sizes = Sizes { compressed_bytes: used_bytes / 2, used_bytes };
        Run { speeds: vec![speed; Phase::ALL.len()], sizes }
    }

    fn table(title: &str, setting: Setting, notes: Vec<String>) -> Table {
        let (title, phases) = (title.to_owned(), Phase::ALL.to_vec());
        Table { title, other: "kernel", phases, settings: vec![setting], notes }
    }

    /// Goal: medians, and ratios that pair the runs of a round. Method: rounds in which the machine is slower and
    /// slower, so that medians of unpaired runs have another ratio.
    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut setting = Setting::new("lz4".parse().unwrap(), UnitOrder::FOLIO, 2);
        for (zfolio, kernel) in [(1, 2), (30, 60), (40, 20)] {
            setting.add(vec![run(zfolio, 4 << 20), run(kernel, 8 << 20)]);
        }
        let table = table("disks", setting, vec!["a note".into()]);
        let json = table.json();
        let row = &json["settings"][0]["rows"][4];
        assert_eq!(row["phase"], "random write 4K");
        // 30 us: 33.3 thousand a second; 20 us: 50 thousand.
        assert!((row["zfolio"]["median"].as_f64().unwrap() - 33.333).abs() < 0.01, "{row}");
        assert!((row["kernel"]["median"].as_f64().unwrap() - 50.0).abs() < 0.01, "{row}");
        assert!((row["ratio"].as_f64().unwrap() - 2.0).abs() < 1e-9, "{row}");
        assert!((row["ratio_by_cpu_time"].as_f64().unwrap() - 2.0).abs() < 1e-9, "{row}");
        assert_eq!(json["settings"][0]["sizes"]["kernel"]["used_bytes"], 8 << 20);
        let text = table.text();
        for wanted in ["disks", "random mixed 4K", "  2.00", "  0.50", "a note", "64K    2"] {
            assert!(text.contains(wanted), "{wanted} is missing:\n{text}");
        }
    }

    /// Goal: without the kernel a row has dashes instead of its figures.
    #[test]
    fn a_missing_kernel_is_a_dash() {
        let mut setting = Setting::new("lz4".parse().unwrap(), UnitOrder::DEFAULT, 1);
        setting.add(vec![run(10, 1 << 20)]);
        let table = table("", setting, Vec::new());
        assert!(table.json()["settings"][0]["rows"][0]["kernel"].is_null());
        let text = table.text();
        let row = text.lines().find(|line| line.contains("random read")).unwrap();
        assert!(row.ends_with("100.0          -      -      -"), "{row}");
    }
}
