//! The comparison as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::outcome::{self, Outcome, PHASES};
use super::setting::Setting;

/// A row: a setting, its runs, and its errors.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) setting: Setting,
    pub(crate) runs: Vec<Outcome>,
    /// Why runs gave no result.
    pub(crate) failures: Vec<String>,
}

/// The whole comparison.
#[derive(Debug)]
pub(crate) struct Table {
    /// What was measured and on what, in one line.
    pub(crate) title: String,
    /// The same as JSON.
    pub(crate) context: Value,
    pub(crate) rows: Vec<Row>,
    /// What was omitted, one line each.
    pub(crate) notes: Vec<String>,
}

impl Table {
    fn medians(&self) -> impl Iterator<Item = (&Setting, Outcome)> {
        let median = |row: &'_ Row| Outcome::median_of(&row.runs);
        self.rows.iter().filter_map(move |row| Some((&row.setting, median(row)?)))
    }

    /// The kernel's best speed of each phase.
    fn kernel_best(&self) -> Option<[f64; 4]> {
        let kernel: Vec<Outcome> =
            self.medians().filter(|(s, _)| s.is_kernel()).map(|(_, median)| median).collect();
        outcome::best(kernel.iter())
    }

    /// Whether every run gave a result, and every byte was right.
    pub(crate) fn all_right(&self) -> bool {
        let right =
            |row: &Row| row.failures.is_empty() && row.runs.iter().all(|r| r.verify == "ok");
        self.rows.iter().all(right)
    }

    /// The table, the ratios and the errors.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.title);
        self.write_figures(&mut text);
        self.write_ratios(&mut text);
        for row in &self.rows {
            for failure in &row.failures {
                line(&mut text, format_args!("{}: FAILED: {failure}", row.setting));
            }
        }
        for note in &self.notes {
            line(&mut text, format_args!("{note}"));
        }
        text
    }

    fn write_figures(&self, text: &mut String) {
        line(
            text,
            format_args!(
                "{:<24}{:>9}{:>10}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>8}  verify",
                "", "memory", "resident", "write", "read", "incr", "random", "p50", "p99", "CPU"
            ),
        );
        line(
            text,
            format_args!(
                "{:<24}{:>9}{:>10}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>8}",
                "", "MiB", "MiB max", "MB/s", "MB/s", "MB/s", "us mean", "us", "us", "s"
            ),
        );
        for (setting, median) in self.medians() {
            let mib = |bytes: f64| bytes / 1_048_576.0;
            let total = match setting {
                Setting::Free => "any".to_owned(),
                _ => format!("{:.0}", mib(median.total_bytes)),
            };
            line(
                text,
                format_args!(
                    "{:<24}{total:>9}{:>10.0}{:>8.0}{:>8.0}{:>8.0}{:>9.2}{:>9.2}{:>9.1}{:>8.1}  {}",
                    setting.to_string(),
                    mib(median.resident_bytes_max),
                    median.write_mb_s,
                    median.read_mb_s,
                    median.increment_mb_s,
                    median.random_us_mean,
                    median.random_us_p50,
                    median.random_us_p99,
                    median.cpu_seconds,
                    median.verify,
                ),
            );
        }
        text.push('\n');
    }

    fn write_ratios(&self, text: &mut String) {
        let Some(best) = self.kernel_best() else { return };
        if !self.medians().any(|(setting, _)| setting.is_zfolio()) {
            return;
        }
        let [write, read, increment, random] = PHASES;
        let title = "times the kernel's best of each phase";
        line(
            text,
            format_args!(
                "{title:<42}{write:>9}{read:>9}{increment:>9}{random:>9}{:>9}",
                "geo mean"
            ),
        );
        for (setting, median) in self.medians().filter(|(setting, _)| setting.is_zfolio()) {
            let ([write, read, increment, random], mean) = outcome::ratios(&median, &best);
            line(
                text,
                format_args!(
                    "{:<42}{write:>9.2}{read:>9.2}{increment:>9.2}{random:>9.2}{mean:>9.2}",
                    setting.to_string()
                ),
            );
        }
        text.push('\n');
    }

    /// The same as JSON, with every run.
    pub(crate) fn json(&self) -> Value {
        let best = self.kernel_best();
        let rows = self.rows.iter().map(|row| {
            let median = Outcome::median_of(&row.runs);
            let ratios = median.as_ref().zip(best.as_ref()).filter(|_| row.setting.is_zfolio());
            let ratios = ratios.map(|(median, best)| {
                let ([write, read, increment, random], mean) = outcome::ratios(median, best);
                json!({
                    "write": write, "read": read, "increment": increment, "random": random,
                    "geometric_mean": mean,
                })
            });
            json!({
                "setting": row.setting.to_string(),
                "median": median.map(|median| median.json()),
                "ratio_to_kernel_best": ratios,
                "runs": row.runs.iter().map(Outcome::json).collect::<Vec<_>>(),
                "failures": row.failures,
            })
        });
        let rows: Vec<Value> = rows.collect();
        json!({ "context": self.context, "settings": rows, "notes": self.notes })
    }
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::{Row, Table};
    use crate::compare::outcome::Outcome;
    use crate::compare::setting::Setting;
    use crate::kernel::KernelSetting;

    #[test]
    fn the_table_tells_figures_ratios_and_failures() {
        let run = |speed: f64| Outcome {
            total_bytes: 512.0 * 1_048_576.0,
            write_mb_s: speed,
            read_mb_s: speed,
            increment_mb_s: speed,
            random_us_mean: 1000.0 / speed,
            verify: "ok".to_owned(),
            ..Outcome::default()
        };
        let kernel = KernelSetting { algorithm: "lz4".to_owned(), folio_kib: 64 };
        let ours = || "lz4:64K".parse().expect("well formed");
        let row = |setting, runs, failures| Row { setting, runs, failures };
        let table = Table {
            title: "usemem".to_owned(),
            context: serde_json::Value::Null,
            rows: vec![
                row(Setting::Kernel(kernel), vec![run(100.0)], vec![]),
                row(Setting::Run(ours()), vec![run(150.0)], vec![]),
                row(Setting::Inline(ours()), vec![], vec!["not built".to_owned()]),
            ],
            notes: vec!["a note".to_owned()],
        };
        let text = table.text();
        for part in ["kernel lz4 64K", "512", "1.50", "inline lz4 64K: FAILED: not built", "a note"]
        {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!(!table.all_right());
        let json = table.json();
        let ratio = json["settings"][1]["ratio_to_kernel_best"]["geometric_mean"].as_f64();
        assert!(ratio.is_some_and(|ratio| (ratio - 1.5).abs() < 1e-9), "{json}");
    }
}
