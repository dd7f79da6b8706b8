//! The figures as text and as JSON, beside those that were published for the kernel.

use std::fmt::Write as _;

use serde_json::{Value, json};
use zfolio_core::size;

use super::fragmentation::{Fragmentation, SwapIn};
use super::speed::Speed;
use super::splitting::Splitting;

/// Published for the kernel, by folio: what is gained by not splitting, in percent.
const PUBLISHED_GAIN: [(u32, f64); 3] = [(0, 4.9), (4, 10.7), (9, 65.9)];

/// Published for the kernel: the fallback rate with page-by-page swap-in goes from the first of these to the
/// last in 17 rounds; with whole folios it is 0 in all.
const PUBLISHED_FALLBACK: &str =
    "published for the kernel: page by page from 0 to 96 % in 17 rounds, whole folios 0 % in all";

/// All that was measured; what was not is empty.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) threads: usize,
    pub(crate) cpus: usize,
    pub(crate) repeats: u32,
    pub(crate) speed: Vec<Speed>,
    pub(crate) area_bytes: u64,
    pub(crate) fragmentation: Vec<Fragmentation>,
    /// Memory of each thread.
    pub(crate) bytes: u64,
    pub(crate) splitting: Vec<Splitting>,
}

impl Table {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let (threads, cpus, repeats) = (self.threads, self.cpus, self.repeats);
        line(&mut text, format_args!("{threads} thread(s), {cpus} CPU(s), medians of {repeats}"));
        if !self.speed.is_empty() {
            self.write_speed(&mut text);
        }
        if !self.fragmentation.is_empty() {
            self.write_fragmentation(&mut text);
        }
        if !self.splitting.is_empty() {
            self.write_splitting(&mut text);
        }
        text
    }

    fn write_speed(&self, text: &mut String) {
        line(text, format_args!("\npairs of take and free, millions a second"));
        let all = format!("{} threads", self.threads);
        line(
            text,
            format_args!(
                "{:>5} {:>8} {:>10} {all:>12} {:>7}",
                "order", "in use", "1 thread", "times"
            ),
        );
        for row in &self.speed {
            let (one, all, times) = (row.one, row.all, row.times());
            let (order, in_use) = (row.order, row.in_use);
            line(text, format_args!("{order:>5} {in_use:>8} {one:>10.1} {all:>12.1} {times:>7.2}"));
        }
    }

    fn write_fragmentation(&self, text: &mut String) {
        let area = size::display(self.area_bytes);
        line(text, format_args!("\nfolios of 64K that fell back, in percent; an area of {area}"));
        write!(text, "round").expect("a String takes everything");
        for run in &self.fragmentation {
            let way = if run.swap_in == SwapIn::Whole { "whole" } else { "pages" };
            let heading = format!("{way} {}%", run.full_percent);
            write!(text, " {heading:>11}").expect("a String takes everything");
        }
        text.push('\n');
        let rounds = self.fragmentation.first().map_or(0, |run| run.rates.len());
        for round in 0..rounds {
            write!(text, "{:>5}", round + 1).expect("a String takes everything");
            for run in &self.fragmentation {
                write!(text, " {:>11.1}", run.rates[round]).expect("a String takes everything");
            }
            text.push('\n');
        }
        line(text, format_args!("{PUBLISHED_FALLBACK}"));
    }

    fn write_splitting(&self, text: &mut String) {
        let bytes = size::display(self.bytes);
        line(text, format_args!("\nout and in, MB/s; {bytes} in each thread, a file in memory"));
        line(
            text,
            format_args!("{:<7}{:>18}{:>18}{:>18}", "", "split", "whole", "not splitting, %"),
        );
        let ways = format!("{:>9}{:>9}", "out", "in");
        line(text, format_args!("{:<7}{ways}{ways}{:>9}{:>9}", "folio", "here", "kernel"));
        for row in &self.splitting {
            let [split_out, split_in] = row.split;
            let [whole_out, whole_in] = row.whole;
            let gain = row.gain_percent();
            let published = published_gain(row.order);
            let published = published.map_or("-".to_owned(), |gain| format!("{gain:+.1}"));
            line(
                text,
                format_args!(
                    "{:<7}{split_out:>9.0}{split_in:>9.0}{whole_out:>9.0}{whole_in:>9.0}\
                     {gain:>+9.1}{published:>9}",
                    row.folio()
                ),
            );
        }
        line(text, format_args!("kernel: published for usemem"));
    }

    pub(crate) fn json(&self) -> Value {
        let splitting = self.splitting.iter().map(|row| {
            let mut value = row.json();
            value["published_gain_percent"] = json!(published_gain(row.order));
            value
        });
        json!({
            "threads": self.threads,
            "cpus": self.cpus,
            "repeats": self.repeats,
            "speed": self.speed.iter().map(Speed::json).collect::<Vec<_>>(),
            "area_bytes": self.area_bytes,
            "fragmentation":
                self.fragmentation.iter().map(Fragmentation::json).collect::<Vec<_>>(),
            "bytes": self.bytes,
            "splitting": splitting.collect::<Vec<_>>(),
        })
    }
}

fn published_gain(order: u32) -> Option<f64> {
    PUBLISHED_GAIN.iter().find(|(published, _)| *published == order).map(|(_, gain)| *gain)
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::super::{speed, splitting::Splitting};
    use super::Table;

    /// Goal: figures stand where they belong, and the pairs are counted. Method: a short measurement of the
    /// speed, given figures of splitting.
    #[test]
    fn the_tables_have_every_figure() {
        let splitting = vec![Splitting { order: 9, split: [50.0, 100.0], whole: [100.0, 200.0] }];
        let speed = speed::measure(2, 1, 10_000);
        assert!(speed.iter().all(|row| row.one > 0.0 && row.all > 0.0), "{speed:?}");
        let table = Table { threads: 2, speed, splitting, ..Table::default() };
        let text = table.text();
        for part in ["2 threads", "4096", "2M", "+100.0", "+65.9"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let json = table.json();
        assert_eq!(json["splitting"][0]["gain_percent"], 100.0);
        assert_eq!(json["speed"][1]["in_use"], 4096);
        assert!(!text.contains("fell back"), "it was not measured:\n{text}");
    }
}
