//! `zfolio run --metrics`: the figures of the run, for Prometheus.
//!
//! The processes of a run come and go, a compiler for each file. So they are told by their command, and not one by one:
//! a gauge is the sum over those that run, a counter the sum over all, those included that have ended. Then there are
//! as many series as commands, and no counter falls.
//!
//! # Cost
//!
//! Nothing until a page is asked for. Then a file of some KiB is read for each process of the run.

use std::collections::BTreeMap;
use std::sync::Arc;

use zfolio_block::metrics::{Durations, Page, Seconds, Text, label};
use zfolio_core::ledger::Ledger;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::{OrderCounts, Snapshot};
use zfolio_core::sync::Mutex;

use super::ended::Ended;
use super::settings::Settings;
use super::supervisor::Supervisor;
use super::waits;
use crate::stats_file::StatsFile;

/// The figures of processes by the label of their command.
#[derive(Clone, Default, Debug)]
pub(super) struct Groups(BTreeMap<String, Group>);

impl Groups {
    pub(super) fn add(&mut self, file: &StatsFile) {
        self.0.entry(label("command", &file.command())).or_default().add(file);
    }
}

/// The figures of all processes with one command.
#[derive(Clone, Debug, Default)]
struct Group {
    /// Processes that run.
    live: u64,
    now: Now,
    ever: Ever,
    over_limit_bytes_max: u64,
    faults: [(&'static str, Durations); 4],
    waited_ns: BTreeMap<&'static str, u64>,
    /// Runs of slots, by size: those that were taken, and those for which there was no room.
    orders: BTreeMap<&'static str, [u64; 2]>,
}

macro_rules! sums {
    ($(#[$doc:meta])* $name:ident: $($figure:ident,)+) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        struct $name { $($figure: u64,)+ }

        impl $name {
            fn add(&mut self, figures: &Snapshot) {
                $(self.$figure = self.$figure.saturating_add(figures.$figure);)+
            }
        }
    };
}

sums! {
    /// Sums over the processes that run.
    Now: resident_bytes, staged_bytes, pool_bytes, metadata_bytes, unmanaged_bytes, demand_bytes, stored_bytes,
    compressed_bytes, spilled_bytes,
}

sums! {
    /// Sums over all processes.
    Ever: reclaim_clean, reclaim_compressed, reclaim_same_filled, reclaim_incompressible, spill_written_bytes,
    spill_read_bytes, reject_alloc_fail, reject_compress_fail, reject_written_back, read_back_fail,
    written_back_limit, written_back_full, written_back_fail,
}

impl Group {
    fn add(&mut self, file: &StatsFile) {
        let figures = file.stats.figures.snapshot();
        if file.live {
            self.live += 1;
            self.now.add(&figures);
        }
        self.ever.add(&figures);
        self.over_limit_bytes_max = self.over_limit_bytes_max.max(figures.over_limit_bytes_max);
        for (all, (kind, histogram)) in self.faults.iter_mut().zip(file.stats.histograms()) {
            all.0 = kind;
            all.1.add(histogram);
        }
        for (waited_ns, reason) in waits::reasons(&file.stats.figures) {
            *self.waited_ns.entry(reason.label()).or_default() += waited_ns;
        }
        for order in file.stats.orders.counts() {
            let OrderCounts { size, swpout, swpout_fallback } = order;
            let sums = self.orders.entry(size).or_default();
            sums.iter_mut().zip([swpout, swpout_fallback]).for_each(|(sum, more)| *sum += more);
        }
    }
}

/// What makes the page of a run.
pub(super) fn page(
    ended: Arc<Mutex<1, Ended>>,
    settings: &Settings,
    supervisor: Option<&Supervisor>,
) -> Page {
    let ledger = supervisor.map(Supervisor::ledger);
    let info = [
        label("algorithm", &settings.algorithm.to_string()),
        label("unit", &settings.unit.unwrap_or(UnitOrder::DEFAULT).to_string()),
        label("version", env!("CARGO_PKG_VERSION")),
    ];
    let (info, limit_bytes) = (info.join(","), settings.limit_bytes);
    Box::new(move || {
        let ended = ended.lock();
        let files = ended.files();
        let limit_bytes = ledger.map_or(limit_bytes, Ledger::total_bytes);
        let charged_bytes = ledger.map(|ledger| ledger.sum_bytes().0);
        let mut groups = ended.sums.clone();
        ended.kept().chain(&files).for_each(|file| groups.add(file));
        text(&groups, &info, limit_bytes, charged_bytes)
    })
}

/// The page.
fn text(
    Groups(groups): &Groups,
    info: &str,
    limit_bytes: u64,
    charged_bytes: Option<u64>,
) -> String {
    let mut page = Text::new("zfolio_run", String::new());
    page.gauge("info", "How the run compresses.", &[(info, 1)]);
    page.gauge(
        "limit_bytes",
        "The limit; with --per-process, of each process.",
        &[("", limit_bytes)],
    );
    if let Some(charged_bytes) = charged_bytes {
        let meaning = "What all processes together have charged against the limit.";
        page.gauge("charged_bytes", meaning, &[("", charged_bytes)]);
    }
    gauges(&mut page, groups);
    counters(&mut page, groups);
    page.finish()
}

/// One sample for each group, and for each of the values that `of` gives of it.
fn samples<const N: usize, V>(
    groups: &BTreeMap<String, Group>,
    name: &str,
    of: impl Fn(&Group) -> [(&'static str, V); N],
) -> Vec<(String, V)> {
    let samples = |(command, group): (&String, &Group)| {
        let labels = |value: &str| match value {
            "" => command.clone(),
            value => format!("{command},{}", label(name, value)),
        };
        of(group).map(|(value, sample)| (labels(value), sample))
    };
    groups.iter().flat_map(samples).collect()
}

fn gauges(page: &mut Text, groups: &BTreeMap<String, Group>) {
    let one = |of: fn(&Group) -> u64| samples(groups, "", |group| [("", of(group))]);
    page.gauge("processes", "Processes that run.", &one(|group| group.live));
    let uses = samples(groups, "use", |Group { now, .. }| {
        [
            ("resident", now.resident_bytes),
            ("staged", now.staged_bytes),
            ("pool", now.pool_bytes),
            ("tables", now.metadata_bytes),
            ("unmanaged", now.unmanaged_bytes),
        ]
    });
    page.gauge("memory_bytes", "The memory that is charged, by its use.", &uses);
    let needed = "What would be resident without zfolio.";
    page.gauge("needed_bytes", needed, &one(|group| group.now.demand_bytes));
    let stored = samples(groups, "state", |Group { now, .. }| {
        [("original", now.stored_bytes), ("compressed", now.compressed_bytes)]
    });
    page.gauge("stored_bytes", "Units in the pool, before and after compression.", &stored);
    page.gauge(
        "on_disk_bytes",
        "Units on disk, compressed.",
        &one(|group| group.now.spilled_bytes),
    );
    let over = one(|group| group.over_limit_bytes_max);
    page.gauge("over_limit_max_bytes", "Furthest that one of them was above its limit.", &over);
}

fn counters(page: &mut Text, groups: &BTreeMap<String, Group>) {
    let faults = samples(groups, "kind", |group| group.faults);
    page.histogram("fault_duration_seconds", "Faults, and how long their threads waited.", &faults);
    let waited = groups.iter().flat_map(|(command, group)| {
        let labels = move |reason: &str| format!("{command},{}", label("reason", reason));
        group.waited_ns.iter().map(move |(reason, ns)| (labels(reason), Seconds(*ns)))
    });
    let meaning = "Time that threads waited for memory, by what they waited for.";
    page.metric(("waited_seconds_total", "counter"), meaning, &waited.collect::<Vec<_>>());
    let reclaimed = samples(groups, "outcome", |Group { ever, .. }| {
        [
            ("clean", ever.reclaim_clean),
            ("compressed", ever.reclaim_compressed),
            ("same_filled", ever.reclaim_same_filled),
            ("incompressible", ever.reclaim_incompressible),
        ]
    });
    page.counter("reclaimed_units", "Units that were stored.", &reclaimed);
    let disk = samples(groups, "way", |Group { ever, .. }| {
        [("out", ever.spill_written_bytes), ("in", ever.spill_read_bytes)]
    });
    page.counter("disk_bytes", "Bytes that were written to disk and read from it.", &disk);
    let orders = |of: usize| {
        let samples = |(command, group): (&String, &Group)| {
            let labels = |size: &str| format!("{command},{}", label("size", size));
            group.orders.iter().map(|(size, counts)| (labels(size), counts[of])).collect::<Vec<_>>()
        };
        groups.iter().flat_map(samples).collect::<Vec<_>>()
    };
    page.counter("swpout", "Runs of slots that were taken on disk, by size.", &orders(0));
    let meaning = "Runs of slots for which there was no room, so that a smaller one was tried.";
    page.counter("swpout_fallback", meaning, &orders(1));
    let refused = samples(groups, "reason", |Group { ever, .. }| {
        [
            ("limit", ever.written_back_limit),
            ("full", ever.written_back_full),
            ("fail", ever.written_back_fail),
        ]
    });
    page.counter("disk_refusals", "Writes to disk that did not succeed, by reason.", &refused);
    let rejects = samples(groups, "reason", |Group { ever, .. }| {
        [
            ("alloc_fail", ever.reject_alloc_fail),
            ("compress_fail", ever.reject_compress_fail),
            ("written_back", ever.reject_written_back),
            ("read_back_fail", ever.read_back_fail),
        ]
    });
    page.counter(
        "rejected_units",
        "Units that could not be stored, moved to disk or read back.",
        &rejects,
    );
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use zfolio_block::testing;

    use super::{Groups, text};
    use crate::stats_file::StatsFile;

    fn process(pid: u32, command: &str, live: bool, faults: u64) -> StatsFile {
        let mut file = StatsFile::made_up(pid, command);
        file.live = live;
        file.stats.figures.pool_bytes.store(1000, Relaxed);
        file.stats.figures.reclaim_clean.store(5, Relaxed);
        file.stats.figures.written_back_full.store(3, Relaxed);
        file.stats.figures.stall_ns.store(3_500_000_000, Relaxed);
        file.stats.figures.stall_spill_ns.store(500_000_000, Relaxed);
        file.stats.orders.set(&[0, 0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 6, 0, 0, 0, 0]);
        (0..faults).for_each(|_| file.stats.fault_stored_ns.add(2000));
        file
    }

    fn groups(files: &[StatsFile]) -> Groups {
        let mut groups = Groups::default();
        files.iter().for_each(|file| groups.add(file));
        groups
    }

    /// Goal: the dashboard asks for nothing that the page does not have.
    #[test]
    fn the_dashboard_knows_the_names() {
        let page = text(&groups(&[process(1, "sh", true, 1)]), "", 64, Some(40));
        testing::check_dashboard(
            include_str!("../../../../examples/grafana.json"),
            "zfolio_run_",
            &page,
        );
    }

    /// Goal: what has ended counts in the counters and not in the gauges; processes with one command are one series;
    /// names are what the format allows, whatever the command is called.
    #[test]
    fn counters_keep_what_has_ended() {
        let files =
            [process(1, "cc1", false, 2), process(2, "cc1", true, 3), process(3, "a\"b", true, 0)];
        let page = text(&groups(&files), "unit=\"4K\"", 64, Some(40));
        let has = |line: &str| assert!(page.contains(&format!("\n{line}\n")), "{line} in {page}");
        has("zfolio_run_info{unit=\"4K\"} 1");
        has("zfolio_run_limit_bytes 64");
        has("zfolio_run_charged_bytes 40");
        has("zfolio_run_processes{command=\"cc1\"} 1");
        has("zfolio_run_processes{command=\"a\\\"b\"} 1");
        has("zfolio_run_memory_bytes{command=\"cc1\",use=\"pool\"} 1000");
        has("zfolio_run_reclaimed_units_total{command=\"cc1\",outcome=\"clean\"} 10");
        has("zfolio_run_disk_refusals_total{command=\"cc1\",reason=\"full\"} 6");
        has("zfolio_run_swpout_total{command=\"cc1\",size=\"64kB\"} 8");
        has("zfolio_run_swpout_fallback_total{command=\"cc1\",size=\"128kB\"} 12");
        has("zfolio_run_waited_seconds_total{command=\"cc1\",reason=\"disk\"} 1.000000000");
        has("zfolio_run_waited_seconds_total{command=\"cc1\",reason=\"pages\"} 6.000000000");
        has(
            "zfolio_run_fault_duration_seconds_bucket{command=\"cc1\",kind=\"stored\",le=\"0.000001024\"} 0",
        );
        has(
            "zfolio_run_fault_duration_seconds_bucket{command=\"cc1\",kind=\"stored\",le=\"0.000004096\"} 5",
        );
        has("zfolio_run_fault_duration_seconds_count{command=\"cc1\",kind=\"stored\"} 5");
        let alone = text(&groups(&[]), "", 64, None);
        assert!(
            !alone.contains("zfolio_run_charged_bytes")
                && alone.contains("\nzfolio_run_limit_bytes 64\n")
        );
    }
}
