//! The counts as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::policy::{Counts, Name};
use super::trace::Trace;

/// The counts of one trace with one capacity.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) trace: String,
    pub(crate) accesses: usize,
    /// Pages of the trace.
    pub(crate) pages: usize,
    pub(crate) capacity: usize,
    /// The share of the pages that fits, as the user wrote it.
    pub(crate) share: String,
    pub(crate) opt: Counts,
    /// In the order of the table's policies.
    pub(crate) counts: Vec<Counts>,
}

impl Row {
    pub(crate) fn new(trace: &Trace, share: String, capacity: usize, opt: Counts) -> Row {
        let (accesses, pages) = (trace.accesses.len(), trace.pages.len());
        let (trace, counts) = (trace.name.clone(), Vec::new());
        Row { trace, accesses, pages, capacity, share, opt, counts }
    }

    /// Misses of pages that had been in before: the first access to a page misses with every
    /// policy.
    fn refaults(&self, counts: &Counts) -> u64 {
        counts.misses - self.pages as u64
    }

    /// Refaults of a policy divided by those of the optimum, which must have some.
    fn ratio(&self, count: u64) -> Option<f64> {
        let best = self.refaults(&self.opt);
        (best > 0).then(|| count as f64 / best as f64)
    }
}

/// The whole comparison.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) policies: Vec<Name>,
    pub(crate) rows: Vec<Row>,
    /// What was left out, one line each.
    pub(crate) notes: Vec<String>,
}

impl Table {
    /// The name of each policy in the heading. A name that is too long is a number there, and is
    /// explained below the table.
    fn headings(&self) -> Vec<String> {
        let heading = |(at, name): (usize, &Name)| match name.to_string() {
            name if name.len() <= 8 => name,
            _ => format!("({})", at + 1),
        };
        self.policies.iter().enumerate().map(heading).collect()
    }

    /// The table of refaults, that of rescues, and the notes.
    pub(crate) fn text(&self) -> String {
        let mut text = "refaults divided by those of the optimum\n".to_owned();
        let refaults = |row: &Row, counts: &Counts| row.refaults(counts);
        self.write(&mut text, refaults, |_| true);
        if self.policies.iter().any(|name| matches!(name, Name::Zfolio(_))) {
            text.push_str("\nrescues from the staging area, divided by the optimum's refaults\n");
            let rescues = |_: &Row, counts: &Counts| counts.rescues;
            self.write(&mut text, rescues, |name| matches!(name, Name::Zfolio(_)));
        }
        if self.rows.iter().flat_map(|row| &row.counts).any(|counts| counts.write_faults > 0) {
            text.push_str("\nwrite faults of watched pages, divided by the optimum's refaults\n");
            let faults = |_: &Row, counts: &Counts| counts.write_faults;
            self.write(&mut text, faults, |name| matches!(name, Name::Zfolio(_)));
        }
        text.push('\n');
        for (heading, name) in self.headings().iter().zip(&self.policies) {
            if *heading != name.to_string() {
                line(&mut text, format_args!("{heading} {name}"));
            }
        }
        for note in &self.notes {
            line(&mut text, format_args!("{note}"));
        }
        text
    }

    fn write(
        &self,
        text: &mut String,
        count: impl Fn(&Row, &Counts) -> u64,
        shown: impl Fn(&Name) -> bool,
    ) {
        let shown: Vec<bool> = self.policies.iter().map(shown).collect();
        let shown = || shown.iter().enumerate().filter(|(_, shown)| **shown).map(|(at, _)| at);
        let headings = self.headings();
        let titles = (&"trace", "accesses", "pages", "share", "optimum");
        let (trace, accesses, pages, share, opt) = titles;
        write_start(text, trace, &[accesses, pages, share, opt]);
        shown().for_each(|at| write_cell(text, &headings[at]));
        text.push('\n');
        // Sums of logarithms, for the geometric means.
        let mut sums = vec![(0.0, 0); self.policies.len()];
        for row in &self.rows {
            let (accesses, pages) = (row.accesses.to_string(), row.pages.to_string());
            let opt = row.refaults(&row.opt).to_string();
            write_start(text, &row.trace, &[&accesses, &pages, &row.share, &opt]);
            for at in shown() {
                let ratio = row.ratio(count(row, &row.counts[at]));
                let cell = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
                write_cell(text, &cell);
                if let Some(ratio) = ratio.filter(|ratio| *ratio > 0.0) {
                    sums[at] = (sums[at].0 + ratio.ln(), sums[at].1 + 1);
                }
            }
            text.push('\n');
        }
        write_start(text, "geometric mean", &["", "", "", ""]);
        for at in shown() {
            let (sum, count) = sums[at];
            let mean = if count > 0 {
                format!("{:.2}", (sum / f64::from(count)).exp())
            } else {
                "-".to_owned()
            };
            write_cell(text, &mean);
        }
        text.push('\n');
    }

    /// The same as JSON, with every count.
    pub(crate) fn json(&self) -> Value {
        let counts_of = |row: &Row, counts: &Counts| {
            json!({
                "hits": counts.hits,
                "rescues": counts.rescues,
                "misses": counts.misses,
                "write_faults": counts.write_faults,
                "refaults": row.refaults(counts),
                "ratio_to_optimum": row.ratio(row.refaults(counts)),
            })
        };
        let rows = self.rows.iter().map(|row| {
            let policies = self.policies.iter().zip(&row.counts);
            let policies =
                policies.map(|(name, counts)| (name.to_string(), counts_of(row, counts)));
            json!({
                "trace": row.trace,
                "accesses": row.accesses,
                "pages": row.pages,
                "share": row.share,
                "capacity": row.capacity,
                "optimum": counts_of(row, &row.opt),
                "policies": policies.collect::<serde_json::Map<String, Value>>(),
            })
        });
        json!({ "rows": rows.collect::<Vec<_>>(), "notes": self.notes })
    }
}

fn write_start(text: &mut String, trace: &str, cells: &[&str; 4]) {
    let [accesses, pages, share, opt] = cells;
    write!(text, "{trace:<16}{accesses:>9}{pages:>7}{share:>7}{opt:>9}")
        .expect("a String takes everything");
}

fn write_cell(text: &mut String, cell: &str) {
    write!(text, "{cell:>9}").expect("a String takes everything");
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::{Row, Table};
    use crate::replacement::policy::Counts;

    #[test]
    fn the_table_has_ratios_rescues_and_notes() {
        let counts =
            |rescues, misses| Counts { hits: 0, rescues, misses, write_faults: 3 * rescues };
        let row = |opt, counts| Row {
            trace: "program".to_owned(),
            accesses: 1_000,
            pages: 100,
            capacity: 50,
            share: "1/2".to_owned(),
            opt,
            counts,
        };
        let table = Table {
            policies: vec!["lru".parse().unwrap(), "zfolio,staging=8".parse().unwrap()],
            rows: vec![
                row(counts(0, 140), vec![counts(0, 180), counts(10, 160)]),
                row(counts(0, 100), vec![counts(0, 100), counts(7, 101)]),
            ],
            notes: vec!["a note".to_owned()],
        };
        let text = table.text();
        for part in
            ["2.00", "1.50", "0.25", "(2) zfolio,staging=8", "a note", "1/2", "     -", "0.75"]
        {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let json = table.json();
        let zfolio = &json["rows"][0]["policies"]["zfolio,staging=8"];
        assert_eq!((&zfolio["refaults"], &zfolio["rescues"]), (&60.into(), &10.into()), "{json}");
        assert!(json["rows"][1]["policies"]["lru"]["ratio_to_optimum"].is_null(), "{json}");
    }
}
