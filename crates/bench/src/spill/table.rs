//! The figures as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use zfolio_core::size;

use super::{Figures, Way};
use crate::compare::outcome::median;

/// The figures of one way.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) way: Way,
    runs: Vec<Figures>,
    peak_bytes: Option<u64>,
    pub(super) failures: Vec<String>,
}

/// All that was measured.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) rows: Vec<Row>,
    pub(super) notes: Vec<String>,
}

impl Row {
    pub(super) fn new(way: Way) -> Row {
        Row { way, runs: Vec::new(), peak_bytes: None, failures: Vec::new() }
    }

    /// Adds a run, and the most memory that the program had.
    pub(super) fn add(&mut self, figures: Figures, peak_bytes: Option<u64>) {
        self.runs.push(figures);
        self.peak_bytes = self.peak_bytes.max(peak_bytes);
    }

    fn medians(&self) -> Option<Figures> {
        let of = |index: usize| median(self.runs.iter().map(|run| run.0[index]).collect());
        (!self.runs.is_empty()).then(|| Figures([0, 1, 2, 3].map(of)))
    }
}

impl Table {
    /// Whether every run gave figures, without a wrong byte.
    pub(super) fn is_right(&self) -> bool {
        self.rows.iter().all(|row| row.failures.is_empty())
    }

    /// What zfolio does over what `way` does.
    fn ratios(&self, way: Way) -> Option<[f64; 4]> {
        let of = |way| self.rows.iter().find(|row| row.way == way).and_then(Row::medians);
        let (run, other) = (of(Way::Run)?, of(way)?);
        Some([0, 1, 2, 3].map(|index| run.0[index] / other.0[index]))
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.title);
        let heading = ["written", "read", "at random", "by all", "most memory"];
        let units = ["MB/s", "MB/s", "1000/s", "1000/s", ""];
        for (name, columns) in [("", heading), ("", units)] {
            line(&mut text, name, &columns.map(str::to_owned));
        }
        for row in &self.rows {
            let peak = row.peak_bytes.map_or("-".to_owned(), size::display);
            let columns = row.medians().map_or_else(
                || ["-", "-", "-", "-", "-"].map(str::to_owned),
                |Figures([write, read, one, all])| {
                    let (one, all) = (one / 1e3, all / 1e3);
                    let speeds = [format!("{write:.0}"), format!("{read:.0}")];
                    let [write, read] = speeds;
                    [write, read, format!("{one:.1}"), format!("{all:.1}"), peak]
                },
            );
            line(&mut text, row.way.name(), &columns);
        }
        for way in [Way::File, Way::Kernel] {
            if let Some(ratios) = self.ratios(way) {
                let columns = ratios.map(|ratio| format!("{ratio:.2}"));
                line(&mut text, &format!("run / {}", way.name()), &columns);
            }
        }
        for row in &self.rows {
            for failure in &row.failures {
                writeln!(text, "{}: {failure}", row.way.name()).expect("a String takes everything");
            }
        }
        for note in &self.notes {
            writeln!(text, "{note}").expect("a String takes everything");
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let object = |figures: [f64; 4]| {
            let [write, read, one, all] = figures;
            json!({
                "write_mb_s": write,
                "read_mb_s": read,
                "random_reads_s": one,
                "random_reads_by_all_s": all,
            })
        };
        let row = |row: &Row| {
            json!({
                "way": row.way.name(),
                "medians": row.medians().map(|figures| object(figures.0)),
                "runs": row.runs.iter().map(|run| object(run.0)).collect::<Vec<_>>(),
                "memory_bytes_max": row.peak_bytes,
                "failures": row.failures,
            })
        };
        json!({
            "title": self.title,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "run_over_file": self.ratios(Way::File).map(object),
            "run_over_kernel": self.ratios(Way::Kernel).map(object),
            "notes": self.notes,
        })
    }
}

fn line(text: &mut String, name: &str, columns: &[String]) {
    write!(text, "{name:<13}").expect("a String takes everything");
    for column in columns {
        write!(text, "{column:>12}").expect("a String takes everything");
    }
    let end = text.trim_end().len();
    text.truncate(end);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::{Figures, Row, Table, Way};

    /// Goal: medians and ratios of what ran, and a way that failed shows.
    #[test]
    fn the_table_has_medians_and_ratios() {
        let mut rows: Vec<Row> = [Way::File, Way::Kernel, Way::Run].map(Row::new).into();
        for speed in [3.0, 1.0, 2.0] {
            rows[0].add(Figures([speed * 100.0; 4]), None);
            rows[2].add(Figures([speed * 50.0; 4]), Some(5 << 20));
        }
        rows[1].failures.push("it was killed".to_owned());
        let table = Table { title: "noise".to_owned(), rows, notes: vec!["a note".to_owned()] };
        let text = table.text();
        for wanted in ["noise", "run / file", "0.50", "5M", "kernel: it was killed", "a note"] {
            assert!(text.contains(wanted), "{wanted} is missing:\n{text}");
        }
        assert!(!table.is_right() && !text.contains("run / kernel"));
        let json = table.json();
        assert_eq!(json["rows"][2]["medians"]["write_mb_s"], 100.0);
        assert_eq!(json["run_over_file"]["random_reads_by_all_s"], 0.5);
    }
}
