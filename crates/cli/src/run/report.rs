//! The figures as JSON: `zfolio run --stats FILE`, and `zfolio stat --json`.

use serde_json::{Map, Value, json};
use zfolio_core::page::UnitOrder;
use zfolio_sys::probe::child::Change;

use super::summary::Story;
use crate::stats_file::StatsFile;

impl Story<'_> {
    /// The whole report. Sizes in bytes, times in nanoseconds.
    pub(super) fn json(&self) -> Value {
        let text = |text: &std::ffi::OsString| text.to_string_lossy().into_owned();
        let (status, signal) = match self.end.change {
            Change::Exited(status) => (Some(status), None),
            Change::Died(signal) | Change::Dumped(signal) | Change::Stopped(signal) => {
                (None, Some(signal))
            }
        };
        let processes = self.files.iter().map(|file| {
            let mut process = process_json(file);
            process["resident_bytes_max"] = json!(self.peak_bytes(file));
            process
        });
        let groups = self.tree.groups().into_iter().map(|group| {
            json!({
                "command": group.command,
                "reason": group.reason,
                "managed": group.managed,
                "processes": group.processes,
                "resident_bytes_max": group.peak_bytes,
            })
        });
        let advice = self.largest().and_then(|file| self.advice(file));
        json!({
            "zfolio": env!("CARGO_PKG_VERSION"),
            "command": self.program.iter().map(text).collect::<Vec<_>>(),
            "pid": self.pid,
            "exit_status": status,
            "exit_signal": signal,
            "elapsed_ns": u64::try_from(self.end.elapsed.as_nanos()).unwrap_or(u64::MAX),
            "kernel_resident_bytes_max": self.end.resident_bytes_max,
            "tree_resident_bytes_max": self.tree.together_bytes_max,
            "limit_bytes": self.settings.limit_bytes,
            "tree": self.settings.tree,
            "tree_charge_bytes_max": self.sum_bytes_max(),
            "unit_bytes": self.settings.unit.unwrap_or(UnitOrder::DEFAULT).bytes(),
            "algorithm": self.settings.algorithm.to_string(),
            "spill": self.settings.spill.paths.iter().map(|(path, _)| path.display().to_string())
                .collect::<Vec<_>>(),
            "spill_limit_bytes": self.settings.spill.limit_bytes,
            "max_pool_percent": self.settings.spill.pool.max_pool_percent,
            "accept_threshold_percent": self.settings.spill.pool.accept_threshold_percent,
            "write_budget": self.settings.spill.write_budget.exact(),
            "advice": advice.map(|advice| json!({
                "limit_bytes": advice.limit_bytes,
                "waiting_ns": advice.waiting_ns,
            })),
            "processes": processes.collect::<Vec<_>>(),
            "not_listed": {
                "processes": self.counted.processes,
                "compressed": self.counted.compressed,
                "over_limit": self.counted.over,
                "resident_bytes_max": self.counted.peak_bytes,
            },
            "without_figures": groups.collect::<Vec<_>>(),
        })
    }
}

/// The figures of one process, as in `zfolio stat --json` and `zfolio run --stats`.
pub(crate) fn process_json(file: &StatsFile) -> Value {
    let stats = &file.stats;
    let mut figures = Map::new();
    stats.figures.each(|name, _, value| {
        figures.insert(name.to_owned(), json!(value));
    });
    let mut faults = Map::new();
    for (kind, histogram) in stats.histograms() {
        let object = json!({
            "count": histogram.count(),
            "p50_ns": histogram.quantile(500),
            "p99_ns": histogram.quantile(990),
        });
        faults.insert(kind.to_owned(), object);
    }
    let mut prices = Map::new();
    for (of, price) in stats.prices.each() {
        let object = json!({
            "bytes": price.bytes,
            "price_ns": price.price_ns,
            "total_ns": price.total_ns,
        });
        prices.insert(of.name().to_owned(), object);
    }
    let orders = stats.orders.counts().into_iter().map(|order| {
        let object = json!({ "swpout": order.swpout, "swpout_fallback": order.swpout_fallback });
        (order.size.to_owned(), object)
    });
    let orders: Map<String, Value> = orders.collect();
    let held = stats.refaults.each().filter(|bucket| bucket.count + bucket.bytes > 0);
    // The distance of the last bucket has no end.
    let refaults = held.map(|bucket| {
        json!({
            "distance_from_bytes": bucket.from,
            "distance_below_bytes": (bucket.end != u64::MAX).then_some(bucket.end),
            "count": bucket.count,
            "waited_ns": bucket.waited_ns,
            "bytes": bucket.bytes,
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
        "prices": prices,
        "orders": orders,
    })
}
