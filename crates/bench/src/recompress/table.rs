//! The figures as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use zfolio_core::zram::Recompressed;

use crate::compare::outcome::median;
use crate::report::percentile_us;
use crate::zram::disk::Sizes;

/// Reads of one part of the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latencies {
    us_mean: f64,
    us_p50: f64,
    us_p99: f64,
    us_max: f64,
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of one run are below 2^53")]
impl Latencies {
    /// From the nanoseconds of each read.
    pub(super) fn of(mut nanoseconds: Vec<u32>) -> Latencies {
        nanoseconds.sort_unstable();
        let total: u64 = nanoseconds.iter().map(|ns| u64::from(*ns)).sum();
        Latencies {
            us_mean: total as f64 / 1e3 / nanoseconds.len().max(1) as f64,
            us_p50: percentile_us(&nanoseconds, 50),
            us_p99: percentile_us(&nanoseconds, 99),
            us_max: percentile_us(&nanoseconds, 100),
        }
    }
}

type Figure = fn(&Latencies) -> f64;

/// The columns of the reads.
const FIGURES: [(&str, Figure); 4] = [
    ("mean_us", |it| it.us_mean),
    ("p50_us", |it| it.us_p50),
    ("p99_us", |it| it.us_p99),
    ("max_us", |it| it.us_max),
];

/// The reads of a round, in this order.
const READS: [&str; 4] = ["used, before", "used, meanwhile", "idle, before", "idle, afterwards"];

/// When the sizes are taken.
const SIZES: [&str; 3] = ["before", "after", "compacted"];

/// What one round found.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// In the order of [`READS`].
    pub(super) reads: [Latencies; 4],
    pub(super) done: Recompressed,
    /// Elapsed time of the recompression.
    pub(super) wall_ns: u64,
    /// CPU time of the thread that recompressed.
    pub(super) cpu_ns: u64,
    /// In the order of [`SIZES`].
    pub(super) sizes: [Sizes; 3],
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
impl Run {
    /// Data that was recompressed, in MB for each second of `ns`.
    fn mb_s(&self, unit_bytes: usize, ns: u64) -> f64 {
        (self.done.tried * unit_bytes as u64) as f64 * 1e3 / ns.max(1) as f64
    }

    fn mib(&self, at: usize, figure: fn(&Sizes) -> u64) -> f64 {
        figure(&self.sizes[at]) as f64 / f64::from(1 << 20)
    }
}

/// All rounds; at least one.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) unit_bytes: usize,
    pub(super) runs: Vec<Run>,
}

impl Table {
    fn median(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(figure).collect())
    }

    /// MB a second by elapsed time, and by CPU time.
    fn speeds(&self) -> [f64; 2] {
        let of = |ns: fn(&Run) -> u64| self.median(|run| run.mb_s(self.unit_bytes, ns(run)));
        [of(|run| run.wall_ns), of(|run| run.cpu_ns)]
    }

    /// Compressed size and memory at one of [`SIZES`], in MiB.
    fn sizes(&self, at: usize) -> [f64; 2] {
        let figures: [fn(&Sizes) -> u64; 2] = [|it| it.compressed_bytes, |it| it.used_bytes];
        figures.map(|figure| self.median(|run| run.mib(at, figure)))
    }

    /// How many units were tried and shrank; every round has the same data.
    fn done(&self) -> Recompressed {
        self.runs.last().map(|run| run.done).unwrap_or_default()
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.title);
        let ([wall, cpu], done) = (self.speeds(), self.done());
        let all_good = "a String takes everything";
        writeln!(text, "recompressed     {wall:9.1} MB/s, by CPU time {cpu:.1}").expect(all_good);
        writeln!(text, "units            {:9} tried, {} shrank", done.tried, done.shrank)
            .expect(all_good);
        text += "\nMiB              compressed    memory\n";
        for (at, name) in SIZES.into_iter().enumerate() {
            let [compressed, used] = self.sizes(at);
            writeln!(text, "{name:<16} {compressed:10.1} {used:9.1}").expect(all_good);
        }
        text += "\nREADS OF 4K        mean us    p50 us    p99 us    max us\n";
        for (at, name) in READS.into_iter().enumerate() {
            write!(text, "{name:<16}").expect(all_good);
            for (_, figure) in FIGURES {
                write!(text, " {:9.1}", self.median(|run| figure(&run.reads[at]))).expect(all_good);
            }
            text.push('\n');
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let ([wall, cpu], done) = (self.speeds(), self.done());
        let sizes = SIZES.into_iter().enumerate().map(|(at, name)| {
            let [compressed, used] = self.sizes(at);
            (name.to_owned(), json!({"compressed_mib": compressed, "memory_mib": used}))
        });
        let reads = READS.into_iter().enumerate().map(|(at, name)| {
            let mut row = json!({"reads": name});
            for (key, figure) in FIGURES {
                let runs: Vec<f64> = self.runs.iter().map(|run| figure(&run.reads[at])).collect();
                row[key] = json!({"median": median(runs.clone()), "runs": runs});
            }
            row
        });
        json!({
            "title": self.title,
            "recompression": {
                "mb_s": wall,
                "mb_s_by_cpu_time": cpu,
                "units_tried": done.tried,
                "units_shrank": done.shrank,
            },
            "sizes": sizes.collect::<serde_json::Map<_, _>>(),
            "reads": reads.collect::<Vec<_>>(),
        })
    }
}
