//! The result of one run, the medians of several, and their ratios.

use serde_json::{Value, json};

/// The four phases that are compared, in the order of the tables.
pub(crate) const PHASES: [&str; 4] = ["write", "read", "incr", "random"];

/// The result of one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Total memory: the limit, plus what zram held for the kernel's rows. 0 without a limit.
    pub(crate) total_bytes: f64,
    pub(crate) write_mb_s: f64,
    pub(crate) read_mb_s: f64,
    pub(crate) increment_mb_s: f64,
    pub(crate) random_us_mean: f64,
    pub(crate) random_us_p50: f64,
    pub(crate) random_us_p99: f64,
    pub(crate) random_us_max: f64,
    /// Sampled from outside.
    pub(crate) resident_bytes_max: f64,
    pub(crate) cpu_seconds: f64,
    /// `ok`, or the first wrong byte.
    pub(crate) verify: String,
    /// The most that zram (`mem_used_max`) or the pool of zswap held, for the kernel's rows.
    pub(crate) zram_bytes_max: Option<u64>,
}

/// Reads a field; the report comes from another program, so the field may be missing.
fn number(report: &Value, key: &str) -> Result<f64, String> {
    report[key].as_f64().ok_or(format!("the report of usemem has no {key}"))
}

impl Outcome {
    /// Reads the report of usemem.
    pub(crate) fn parse(text: &str) -> Result<Outcome, String> {
        let report: Value = serde_json::from_str(text.trim())
            .map_err(|error| format!("the report of usemem is not understood: {error}"))?;
        let verify = report["verify"].as_str().ok_or("the report of usemem has no verify")?;
        Ok(Outcome {
            write_mb_s: number(&report, "write_mb_s")?,
            read_mb_s: number(&report, "read_mb_s")?,
            increment_mb_s: number(&report, "increment_mb_s")?,
            random_us_mean: number(&report, "random_us_mean")?,
            random_us_p50: number(&report, "random_us_p50")?,
            random_us_p99: number(&report, "random_us_p99")?,
            random_us_max: number(&report, "random_us_max")?,
            resident_bytes_max: number(&report, "resident_bytes_max")?,
            verify: verify.to_owned(),
            ..Outcome::default()
        })
    }

    /// The speeds of [`PHASES`]; more is better: MB/s, and random reads per microsecond.
    pub(crate) fn speeds(&self) -> [f64; 4] {
        let random = 1.0 / self.random_us_mean.max(f64::MIN_POSITIVE);
        [self.write_mb_s, self.read_mb_s, self.increment_mb_s, random]
    }

    /// The median of each figure; `verify` is `ok` only if it is in all runs. `None` if there are
    /// no runs.
    pub(crate) fn median_of(runs: &[Outcome]) -> Option<Outcome> {
        let last = runs.last()?;
        let of = |figure: fn(&Outcome) -> f64| median(runs.iter().map(figure).collect());
        let wrong = runs.iter().find(|run| run.verify != "ok").unwrap_or(last);
        Some(Outcome {
            total_bytes: of(|run| run.total_bytes),
            write_mb_s: of(|run| run.write_mb_s),
            read_mb_s: of(|run| run.read_mb_s),
            increment_mb_s: of(|run| run.increment_mb_s),
            random_us_mean: of(|run| run.random_us_mean),
            random_us_p50: of(|run| run.random_us_p50),
            random_us_p99: of(|run| run.random_us_p99),
            random_us_max: of(|run| run.random_us_max),
            // The maximum, because it is a peak.
            resident_bytes_max: runs.iter().map(|run| run.resident_bytes_max).fold(0.0, f64::max),
            cpu_seconds: of(|run| run.cpu_seconds),
            verify: wrong.verify.clone(),
            zram_bytes_max: last.zram_bytes_max,
        })
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "total_bytes": self.total_bytes,
            "write_mb_s": self.write_mb_s,
            "read_mb_s": self.read_mb_s,
            "increment_mb_s": self.increment_mb_s,
            "random_us_mean": self.random_us_mean,
            "random_us_p50": self.random_us_p50,
            "random_us_p99": self.random_us_p99,
            "random_us_max": self.random_us_max,
            "resident_bytes_max": self.resident_bytes_max,
            "cpu_seconds": self.cpu_seconds,
            "verify": self.verify,
            "zram_bytes_max": self.zram_bytes_max,
        })
    }
}

/// The median of at least one value.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// The best speed of each phase among `runs`; `None` if there are none.
pub(crate) fn best<'a>(runs: impl Iterator<Item = &'a Outcome>) -> Option<[f64; 4]> {
    runs.map(Outcome::speeds).reduce(|best, run| std::array::from_fn(|at| best[at].max(run[at])))
}

/// The quotient of each phase of `run` and `best`, and the geometric mean of the four.
pub(crate) fn ratios(run: &Outcome, best: &[f64; 4]) -> ([f64; 4], f64) {
    let speeds = run.speeds();
    let ratios: [f64; 4] = std::array::from_fn(|at| speeds[at] / best[at]);
    let mean = ratios.iter().product::<f64>().powf(0.25);
    (ratios, mean)
}

#[cfg(test)]
mod tests {
    use super::{Outcome, best, ratios};

    fn outcome(speed: f64, random_us_mean: f64) -> Outcome {
        Outcome {
            write_mb_s: speed,
            read_mb_s: speed * 2.0,
            increment_mb_s: speed,
            random_us_mean,
            verify: "ok".to_owned(),
            ..Outcome::default()
        }
    }

    #[test]
    fn ratios_are_taken_against_the_best_of_each_phase() {
        let kernel = [outcome(100.0, 20.0), outcome(50.0, 10.0)];
        let best = best(kernel.iter()).expect("two runs");
        let (each, mean) = ratios(&outcome(200.0, 5.0), &best);
        assert_eq!(each, [2.0, 2.0, 2.0, 2.0]);
        assert!((mean - 2.0).abs() < 1e-9);
    }

    #[test]
    fn medians_are_taken_per_figure_and_one_wrong_byte_shows() {
        let mut runs = vec![outcome(1.0, 9.0), outcome(3.0, 5.0), outcome(2.0, 7.0)];
        let median = Outcome::median_of(&runs).expect("three runs");
        assert!(
            (median.write_mb_s - 2.0).abs() < 1e-9 && (median.random_us_mean - 7.0).abs() < 1e-9
        );
        assert_eq!(median.verify, "ok");
        runs[0].verify = "offset 5".to_owned();
        runs.pop();
        let median = Outcome::median_of(&runs).expect("two runs");
        assert!((median.write_mb_s - 2.0).abs() < 1e-9);
        assert_eq!(median.verify, "offset 5");
        assert!(Outcome::median_of(&[]).is_none());
    }

    #[test]
    fn a_report_of_usemem_is_read_and_a_broken_one_is_named() {
        let report = crate::usemem::Report::of(4096, vec![Default::default()], 1 << 20);
        let outcome = Outcome::parse(&report.json()).expect("our own report");
        assert!((outcome.resident_bytes_max - 1_048_576.0).abs() < 1e-9);
        assert!(Outcome::parse("{}").is_err_and(|line| line.contains("has no")));
        assert!(Outcome::parse("hello").is_err_and(|line| line.contains("not understood")));
    }
}
