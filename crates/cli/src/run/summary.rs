//! How a run was: the closing table, and the same figures as JSON.
//!
//! The process that needed the most memory is told in full: under `zfolio run -- make` that is a
//! compiler, not `make`. The others are summed up in one line.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Map, Value, json};
use zfolio_core::size;
use zfolio_core::stats::{Figures, Stats};
use zfolio_sys::probe::child::Change;

use super::End;
use crate::arguments::RunArgs;
use crate::duration;
use crate::stats_file::StatsFile;
use crate::table::Table;

/// A run that has ended.
pub(super) struct Story<'a> {
    /// What was asked for.
    pub(super) arguments: &'a RunArgs,
    /// The limit of each process.
    pub(super) limit_bytes: u64,
    /// The program.
    pub(super) pid: i32,
    /// How it ended.
    pub(super) end: End,
    /// What its processes left.
    pub(super) files: &'a [StatsFile],
}

fn of(figure: &AtomicU64) -> u64 {
    figure.load(Relaxed)
}

/// `part` of `whole` as a percentage with one decimal.
fn percent(part: u64, whole: u64) -> String {
    let tenths = (u128::from(part) * 1000).checked_div(u128::from(whole)).unwrap_or(0);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// `whole / part` with one decimal.
pub(crate) fn ratio(whole: u64, part: u64) -> Option<String> {
    let tenths = (u128::from(whole) * 10 + u128::from(part) / 2).checked_div(u128::from(part))?;
    Some(format!("{}.{}", tenths / 10, tenths % 10))
}

/// What a core file of the program lacks: the kernel writes zeros for what is not in its place, and
/// nothing else would say so.
pub(super) fn told_of_core(pid: i32, change: Change, files: &[StatsFile]) -> Option<String> {
    let Change::Dumped(_) = change else { return None };
    let figures = &files.iter().find(|file| file.is(pid))?.stats.figures;
    let missing = of(&figures.demand_stored_bytes) + of(&figures.staged_bytes);
    (missing > 0).then(|| {
        format!(
            "zfolio: the core lacks {} that were compressed: they are zeros in it",
            size::display(missing)
        )
    })
}

impl Story<'_> {
    /// The process to tell about.
    fn largest(&self) -> Option<&StatsFile> {
        self.files.iter().max_by_key(|file| {
            let figures = &file.stats.figures;
            (of(&figures.demand_bytes_max), of(&figures.process_bytes_max), file.is(self.pid))
        })
    }

    /// Everything, for a program to read. Sizes in bytes, times in nanoseconds.
    pub(super) fn json(&self) -> Value {
        let text = |text: &std::ffi::OsString| text.to_string_lossy().into_owned();
        let (status, signal) = match self.end.change {
            Change::Exited(status) => (Some(status), None),
            Change::Died(signal) | Change::Dumped(signal) | Change::Stopped(signal) => {
                (None, Some(signal))
            }
        };
        json!({
            "zfolio": env!("CARGO_PKG_VERSION"),
            "command": self.arguments.program.iter().map(text).collect::<Vec<_>>(),
            "pid": self.pid,
            "exit_status": status,
            "exit_signal": signal,
            "elapsed_ns": u64::try_from(self.end.elapsed.as_nanos()).unwrap_or(u64::MAX),
            "kernel_resident_bytes_max": self.end.resident_bytes_max,
            "limit_bytes": self.limit_bytes,
            "unit_bytes": self.arguments.unit.bytes(),
            "algorithm": self.arguments.algorithm.to_string(),
            "processes": self.files.iter().map(process_json).collect::<Vec<_>>(),
        })
    }
}

impl StatsFile {
    fn is(&self, pid: i32) -> bool {
        i64::from(self.pid) == i64::from(pid)
    }
}

/// The figures of one process, as `zfolio stat --json` and `zfolio run --stats` write them.
pub(crate) fn process_json(file: &StatsFile) -> Value {
    let stats = &file.stats;
    let mut figures = Map::new();
    stats.figures.each(|name, _, value| {
        figures.insert(name.to_owned(), json!(value));
    });
    let mut faults = Map::new();
    for (kind, histogram) in stats.histograms() {
        let told = json!({
            "count": histogram.count(),
            "p50_ns": histogram.quantile(500),
            "p99_ns": histogram.quantile(990),
        });
        faults.insert(kind.to_owned(), told);
    }
    // The distance of the last bucket has no end.
    let refaults = stats.refaults.each().map(|(end, count, waited)| {
        json!({
            "distance_below_bytes": (end != u64::MAX).then_some(end),
            "count": count,
            "waited_ns": waited,
        })
    });
    json!({
        "pid": file.pid,
        "command": stats.command(),
        "library": file.library,
        "algorithm": stats.algorithm(),
        "run": file.run(),
        "live": file.live,
        "figures": figures,
        "faults": faults,
        "refaults": refaults.collect::<Vec<_>>(),
    })
}

impl fmt::Display for Story<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(file) = self.largest() else {
            let name = self.arguments.program.first().map(|name| name.to_string_lossy());
            return writeln!(
                f,
                "zfolio: {} left no statistics: it was not managed, or ended while it started",
                name.unwrap_or_default()
            );
        };
        let figures = &file.stats.figures;
        if of(&figures.engaged) == 0 {
            self.tell_short(f, file)?;
        } else {
            self.tell_memory(f, &file.stats)?;
            tell_faults(f, &file.stats)?;
            self.tell_stall(f, figures)?;
            tell_reclaim(f, figures)?;
        }
        tell_over_limit(f, figures)?;
        self.tell_others(f, file)
    }
}

impl Story<'_> {
    fn tell_short(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile) -> fmt::Result {
        let figures = &file.stats.figures;
        let seen = of(&figures.process_bytes_max);
        // A short program may end before it was looked at; the kernel knows about the first one.
        let kernel = if file.is(self.pid) { self.end.resident_bytes_max } else { 0 };
        writeln!(
            f,
            "zfolio: {} stayed below its limit: peak {} of {}; nothing was compressed",
            file.stats.command(),
            size::display(seen.max(kernel)),
            size::display(self.limit_bytes)
        )
    }

    fn tell_memory(&self, f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
        let figures = &stats.figures;
        let (demand, peak) = (of(&figures.demand_bytes_max), of(&figures.process_bytes_max));
        write!(
            f,
            "zfolio: {} needed {} and ran in {} (limit {})",
            stats.command(),
            size::display(demand),
            size::display(peak),
            size::display(self.limit_bytes)
        )?;
        match ratio(demand, peak) {
            Some(times) if demand > peak => writeln!(f, ": {times} times less")?,
            _ => writeln!(f)?,
        }
        writeln!(
            f,
            "  peaks       {} resident, {} pool; {} metadata and {} unmanaged at the end",
            size::display(of(&figures.resident_bytes_max)),
            size::display(of(&figures.pool_bytes_max)),
            size::display(of(&figures.metadata_bytes)),
            size::display(of(&figures.unmanaged_bytes))
        )?;
        let (stored, pool) = (of(&figures.stored_bytes), of(&figures.pool_bytes));
        write!(
            f,
            "  pool        {} in units of {}",
            stats.algorithm(),
            size::display(of(&figures.unit_bytes))
        )?;
        match ratio(stored, pool) {
            Some(ratio) if stored > 0 => writeln!(
                f,
                "; at the end {} in {}, ratio {ratio}",
                size::display(stored),
                size::display(pool)
            ),
            _ => writeln!(f, "; empty at the end"),
        }
    }

    fn tell_stall(&self, f: &mut fmt::Formatter<'_>, figures: &Figures) -> fmt::Result {
        let elapsed = u64::try_from(self.end.elapsed.as_nanos()).unwrap_or(u64::MAX);
        let stalled = of(&figures.stall_ns);
        writeln!(
            f,
            "  stalled     {} in all threads together; the run took {} ({})",
            duration::display(stalled),
            duration::display(elapsed),
            percent(stalled, elapsed)
        )
    }

    fn tell_others(&self, f: &mut fmt::Formatter<'_>, told: &StatsFile) -> fmt::Result {
        let others = || self.files.iter().filter(|file| file.pid != told.pid);
        let count = others().count();
        if count == 0 {
            return Ok(());
        }
        let engaged = others().filter(|file| of(&file.stats.figures.engaged) != 0).count();
        let live = others().filter(|file| file.live).count();
        let largest = others().map(|file| of(&file.stats.figures.process_bytes_max)).max();
        let plural = if count == 1 { "process" } else { "processes" };
        write!(
            f,
            "  and         {count} more {plural}, {engaged} of them compressed; largest peak {}",
            size::display(largest.unwrap_or(0))
        )?;
        if live > 0 { writeln!(f, "; {live} still running") } else { writeln!(f) }
    }
}

fn tell_faults(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let mut table = Table::new(&["<  faults", "count", "p50", "p99"]);
    for (kind, histogram) in stats.histograms() {
        table.push(vec![
            format!("    {kind}"),
            histogram.count().to_string(),
            duration::display(histogram.quantile(500)),
            duration::display(histogram.quantile(990)),
        ]);
    }
    write!(f, "{table}")?;
    let (raced, prefetched) = (of(&stats.figures.faults_raced), of(&stats.figures.prefetch_units));
    if prefetched > 0 {
        writeln!(f, "  prefetched  {prefetched} units")?;
    }
    if raced > 0 { writeln!(f, "  raced       {raced} faults, served by another") } else { Ok(()) }
}

fn tell_reclaim(f: &mut fmt::Formatter<'_>, figures: &Figures) -> fmt::Result {
    let clean = of(&figures.reclaim_clean);
    let compressed = of(&figures.reclaim_compressed);
    let same_filled = of(&figures.reclaim_same_filled);
    let incompressible = of(&figures.reclaim_incompressible);
    let (direct, background) = (of(&figures.reclaim_direct), of(&figures.reclaim_background));
    writeln!(
        f,
        "  reclaimed   {} units: {compressed} compressed, {clean} clean, {same_filled} same-filled, \
         {incompressible} incompressible; {} by threads that waited",
        compressed + clean + same_filled + incompressible,
        percent(direct, direct + background)
    )
}

fn tell_over_limit(f: &mut fmt::Formatter<'_>, figures: &Figures) -> fmt::Result {
    let (most, times) = (of(&figures.over_limit_bytes_max), of(&figures.over_limit));
    match (most, times) {
        (0, 0) => Ok(()),
        (most, 0) => writeln!(f, "  over limit  {} at most", size::display(most)),
        (most, times) => writeln!(
            f,
            "  over limit  {} at most; {times} times nothing was left to reclaim",
            size::display(most)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{percent, ratio};

    #[test]
    fn parts_of_nothing_are_no_panic() {
        assert_eq!(percent(1, 0), "0.0 %");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(ratio(1, 0), None);
        assert_eq!(ratio(41, 10).as_deref(), Some("4.1"));
        assert_eq!(ratio(u64::MAX, 1).as_deref(), Some("18446744073709551615.0"));
    }
}
