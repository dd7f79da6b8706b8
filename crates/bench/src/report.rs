//! The results of the workload: the figures of each worker, and the report of all together.
//!
//! MB is 10^6 bytes. A phase lasts as long as its slowest worker.

use std::fmt;

/// A byte that is not what was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// Its offset in the whole.
    pub offset: u64,
    /// The value by USE-1.
    pub expected: u8,
    /// The value that was read.
    pub found: u8,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { offset, expected, found } = self;
        write!(f, "offset {offset}: expected {expected:#04x}, found {found:#04x}")
    }
}

/// What one worker measured.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Measured {
    /// Nanoseconds of each phase of `Phase::ALL`.
    pub phase_ns: [u64; 5],
    /// Nanoseconds of each random read.
    pub latencies_ns: Vec<u32>,
    /// The first wrong byte, if any.
    pub mismatch: Option<Mismatch>,
}

/// The result of a run, for all workers together.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// Bytes used.
    pub bytes: u64,
    /// How many workers shared them.
    pub workers: usize,
    /// Speed of filling, in 10^6 bytes per second.
    pub write_mb_s: f64,
    /// Speed of touching each page.
    pub read_mb_s: f64,
    /// Speed of incrementing a byte of each page.
    pub increment_mb_s: f64,
    /// Mean of the random reads, in microseconds.
    pub random_us_mean: f64,
    /// Median.
    pub random_us_p50: f64,
    /// 99th percentile.
    pub random_us_p99: f64,
    /// Maximum.
    pub random_us_max: f64,
    /// The most that was resident by the kernel's count (`VmHWM`), summed over the processes.
    pub resident_bytes_max: u64,
    /// The first wrong byte, if any.
    pub mismatch: Option<Mismatch>,
}

impl Report {
    /// Combines the workers' figures: a phase lasts as long as its slowest worker.
    #[must_use]
    pub fn of(bytes: u64, workers: Vec<Measured>, resident_bytes_max: u64) -> Report {
        let slowest = |phase: usize| {
            workers.iter().map(|worker| worker.phase_ns[phase]).max().unwrap_or(0).max(1)
        };
        // bytes / ns * 1000 = 10^6 bytes / s.
        let mb_s = |phase| as_f64(bytes) * 1e3 / as_f64(slowest(phase));
        let mismatch = workers.iter().filter_map(|worker| worker.mismatch).min_by_key(|m| m.offset);
        let (write_mb_s, read_mb_s, increment_mb_s) = (mb_s(0), mb_s(1), mb_s(2));
        let count = workers.len();
        let mut latencies: Vec<u32> =
            workers.into_iter().flat_map(|worker| worker.latencies_ns).collect();
        latencies.sort_unstable();
        let total: u64 = latencies.iter().map(|ns| u64::from(*ns)).sum();
        Report {
            bytes,
            workers: count,
            write_mb_s,
            read_mb_s,
            increment_mb_s,
            random_us_mean: as_f64(total) / as_f64(latencies.len().max(1) as u64) / 1e3,
            random_us_p50: percentile_us(&latencies, 50),
            random_us_p99: percentile_us(&latencies, 99),
            random_us_max: percentile_us(&latencies, 100),
            resident_bytes_max,
            mismatch,
        }
    }

    /// The report as one JSON object.
    #[must_use]
    pub fn json(&self) -> String {
        let verify = self.mismatch.map_or("ok".to_owned(), |mismatch| mismatch.to_string());
        format!(
            "{{\"bytes\":{},\"workers\":{},\"write_mb_s\":{:.1},\"read_mb_s\":{:.1},\
             \"increment_mb_s\":{:.1},\"random_us_mean\":{:.3},\"random_us_p50\":{:.3},\
             \"random_us_p99\":{:.3},\"random_us_max\":{:.3},\"resident_bytes_max\":{},\
             \"verify\":\"{verify}\"}}",
            self.bytes,
            self.workers,
            self.write_mb_s,
            self.read_mb_s,
            self.increment_mb_s,
            self.random_us_mean,
            self.random_us_p50,
            self.random_us_p99,
            self.random_us_max,
            self.resident_bytes_max,
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "bytes            {} by {} worker(s)", self.bytes, self.workers)?;
        writeln!(f, "write            {:>9.0} MB/s", self.write_mb_s)?;
        writeln!(f, "sequential read  {:>9.0} MB/s", self.read_mb_s)?;
        writeln!(f, "increment        {:>9.0} MB/s", self.increment_mb_s)?;
        writeln!(
            f,
            "random read      {:>9.2} us mean, p50 {:.2}, p99 {:.2}, max {:.2}",
            self.random_us_mean, self.random_us_p50, self.random_us_p99, self.random_us_max
        )?;
        writeln!(f, "resident at most {:>9.1} MB", as_f64(self.resident_bytes_max) / 1e6)?;
        match self.mismatch {
            None => write!(f, "verify           ok"),
            Some(mismatch) => write!(f, "verify           FAILED at {mismatch}"),
        }
    }
}

/// The nearest-rank percentile of sorted nanoseconds, in microseconds.
pub(crate) fn percentile_us(sorted_ns: &[u32], percent: usize) -> f64 {
    let rank = (sorted_ns.len() * percent).div_ceil(100).max(1);
    sorted_ns.get(rank - 1).map_or(0.0, |ns| f64::from(*ns) / 1e3)
}

/// Numbers below 2^53 are exact; these are bytes and nanoseconds of one run.
#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
fn as_f64(value: u64) -> f64 {
    value as f64
}

/// `VmHWM` of this process: its peak of resident memory.
#[must_use]
pub fn resident_bytes_max() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::{Measured, Report};

    #[test]
    fn a_phase_lasts_as_long_as_its_slowest_worker() {
        let fast =
            Measured { phase_ns: [10, 20, 30, 0, 0], latencies_ns: vec![1000; 99], mismatch: None };
        let slow =
            Measured { phase_ns: [20, 10, 30, 0, 0], latencies_ns: vec![9000], mismatch: None };
        let report = Report::of(1000, vec![fast, slow], 5);
        assert!((report.write_mb_s - 50_000.0).abs() < 1e-6, "{report:?}");
        assert!((report.read_mb_s - 50_000.0).abs() < 1e-6);
        assert!((report.random_us_mean - 1.08).abs() < 1e-6);
        assert!(
            (report.random_us_p99 - 1.0).abs() < 1e-6 && (report.random_us_max - 9.0).abs() < 1e-6
        );
        assert!(report.json().contains("\"verify\":\"ok\""));
    }
}
