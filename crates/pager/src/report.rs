//! The figures that a library's pager reports.

use std::fmt;
use std::time::Duration;

use zfolio_core::size;
use zfolio_core::stats::{Histogram, Snapshot};

use crate::config::Mode;
use crate::engine::Engine;

/// Faults of one kind, and how long they took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct FaultTimes {
    /// How many faults there were.
    pub count: u64,
    /// Half of the faults took no longer.
    pub p50: Duration,
    /// 99 of 100 faults took no longer.
    pub p99: Duration,
}

impl From<&Histogram> for FaultTimes {
    fn from(histogram: &Histogram) -> FaultTimes {
        FaultTimes {
            count: histogram.count(),
            p50: Duration::from_nanos(histogram.quantile(500)),
            p99: Duration::from_nanos(histogram.quantile(990)),
        }
    }
}

/// The figures of a [`Pager`](crate::Pager) at one moment. `{}` prints a few lines for people.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// The codec, as the user would write it.
    pub algorithm: String,
    /// How faults are served.
    pub mode: Mode,
    /// Address space of all regions, touched or not.
    pub mapped_bytes: u64,
    /// Every single figure. Figures named `process_...` are for the whole process.
    pub figures: Snapshot,
    /// Touches of memory that was never touched before.
    pub faults_zero: FaultTimes,
    /// Touches of memory that was staged: taken out of the program, and not compressed yet.
    pub faults_staged: FaultTimes,
    /// Touches of compressed memory in the pool.
    pub faults_stored: FaultTimes,
    /// Touches of memory that the disk had to read.
    pub faults_disk: FaultTimes,
}

impl Stats {
    pub(crate) fn of(engine: &Engine, mapped_bytes: u64) -> Stats {
        let (config, stats) = (engine.config(), engine.stats());
        Stats {
            algorithm: config.algorithm.to_string(),
            mode: config.mode,
            mapped_bytes,
            figures: stats.figures.snapshot(),
            faults_zero: (&stats.fault_zero_ns).into(),
            faults_staged: (&stats.fault_staged_ns).into(),
            faults_stored: (&stats.fault_stored_ns).into(),
            faults_disk: (&stats.fault_disk_ns).into(),
        }
    }

    /// Bytes that count against the limit: resident, staged and compressed memory, and tables.
    ///
    /// 0 as long as all regions together are smaller than the limit: then they are ordinary memory,
    /// and nothing is counted.
    #[must_use]
    pub fn charged_bytes(&self) -> u64 {
        let figures = &self.figures;
        if figures.engaged == 0 {
            return 0;
        }
        figures.resident_bytes + figures.staged_bytes + figures.pool_bytes + figures.metadata_bytes
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = &self.figures;
        let (mapped, limit) =
            (size::display(self.mapped_bytes), size::display(figures.limit_bytes));
        if figures.engaged == 0 {
            return write!(
                f,
                "{mapped} mapped, within the limit of {limit}: nothing is compressed"
            );
        }
        writeln!(
            f,
            "memory      {mapped} mapped, in {} of the limit of {limit}: {} resident, {} staged, \
             {} compressed, {} tables",
            size::display(self.charged_bytes()),
            size::display(figures.resident_bytes),
            size::display(figures.staged_bytes),
            size::display(figures.pool_bytes),
            size::display(figures.metadata_bytes),
        )?;
        write!(
            f,
            "compressed  {} in {}, {} in units of {}; {} units of one word, {} incompressible",
            size::display(figures.stored_bytes),
            size::display(figures.pool_bytes),
            self.algorithm,
            size::display(figures.unit_bytes),
            figures.same_filled_units,
            figures.incompressible_units,
        )?;
        let stalled = Duration::from_nanos(figures.stall_ns);
        write!(f, "\nfaults      waited for {stalled:.1?} in all")?;
        for (kind, faults) in [
            ("zeros", self.faults_zero),
            ("staged", self.faults_staged),
            ("compressed", self.faults_stored),
            ("on disk", self.faults_disk),
        ] {
            if faults.count > 0 {
                let FaultTimes { count, p50, p99 } = faults;
                write!(f, "; {count} {kind} (p50 {p50:.1?}, p99 {p99:.1?})")?;
            }
        }
        if figures.over_limit > 0 {
            write!(
                f,
                "\nover limit  by {} at most; {} times nothing was left to reclaim",
                size::display(figures.over_limit_bytes_max),
                figures.over_limit
            )?;
        }
        Ok(())
    }
}
