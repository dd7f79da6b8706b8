//! `zfolio stat PID --zswap`: the counters of the kernel's zswap for one process, by the kernel's names.
//!
//! The first eleven are the files of `/sys/kernel/debug/zswap`, the last three lines of a cgroup's `memory.stat`. What
//! the kernel counts and cannot happen here is 0; `docs/cli.md` says of each why.

use serde_json::Value;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::stats::{Snapshot, Stats};

use super::json_text;
use crate::arguments::StatArgs;
use crate::stats_file::StatsFile;
use crate::table::Table;

/// The names and values, in the order of the kernel's documentation.
fn counters(stats: &Stats) -> [(&'static str, u64); 14] {
    let Snapshot {
        unit_bytes,
        stored_units,
        wide_units,
        same_filled_units,
        incompressible_units,
        spilled_units,
        spilled_incompressible_units,
        pool_bytes,
        written_back_units,
        reject_written_back,
        pool_limit_hit,
        reject_alloc_fail,
        reject_compress_fail,
        decompress_fail,
        reclaim_compressed,
        reclaim_incompressible,
        ..
    } = stats.figures.snapshot();
    let pages = |units: u64| units.saturating_mul(unit_bytes / PAGE_BYTES as u64);
    // Gauges of the disk are up to 20 ms older than the others.
    let in_pool = stored_units.saturating_sub(same_filled_units).saturating_sub(spilled_units);
    // Of wide units four are one object; the pool has its share of them.
    let more = (wide_units - wide_units / 4).saturating_mul(in_pool);
    let in_pool = in_pool + more / (in_pool + spilled_units).max(1);
    let raw_in_pool = incompressible_units.saturating_sub(spilled_incompressible_units);
    [
        ("stored_pages", pages(in_pool)),
        ("pool_total_size", pool_bytes),
        ("written_back_pages", pages(written_back_units)),
        ("pool_limit_hit", pool_limit_hit),
        ("reject_compress_poor", 0),
        ("reject_compress_fail", reject_compress_fail),
        ("reject_alloc_fail", reject_alloc_fail),
        ("reject_kmemcache_fail", 0),
        ("reject_reclaim_fail", reject_written_back),
        ("decompress_fail", decompress_fail),
        ("stored_incompressible_pages", pages(raw_in_pool)),
        ("zswpin", stats.refaults.returned_bytes() / PAGE_BYTES as u64),
        ("zswpout", pages(reclaim_compressed + reclaim_incompressible)),
        ("zswpwb", pages(written_back_units)),
    ]
}

/// A name and a value a line, or an object.
pub(super) fn text(arguments: &StatArgs, file: &StatsFile) -> String {
    let counters = counters(&file.stats);
    if arguments.json {
        let object = counters.map(|(name, value)| (name.to_owned(), Value::from(value)));
        return json_text(arguments, &Value::Object(object.into_iter().collect()));
    }
    let mut table = Table::new(&["<COUNTER", "VALUE"]);
    if arguments.noheadings {
        table = table.without_headings();
    }
    counters
        .into_iter()
        .for_each(|(name, value)| table.push(vec![name.to_owned(), value.to_string()]));
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::counters;
    use crate::stats_file::StatsFile;
    use std::sync::atomic::Ordering::Relaxed;

    /// Goal: pages are of 4 KiB whatever the unit, and what is on disk or same-filled is not in the pool.
    #[test]
    fn counters_have_the_kernels_meaning() {
        let file = StatsFile::made_up(7, "sh");
        let figures = &file.stats.figures;
        let set = [
            (&figures.unit_bytes, 16 << 10),
            (&figures.stored_units, 100),
            (&figures.same_filled_units, 20),
            (&figures.spilled_units, 30),
            (&figures.incompressible_units, 17),
            (&figures.spilled_incompressible_units, 10),
            (&figures.pool_bytes, 1 << 20),
            (&figures.written_back_units, 40),
            (&figures.written_back_clean, 1000),
            (&figures.reject_written_back, 3),
            (&figures.pool_limit_hit, 2),
            (&figures.reclaim_compressed, 6),
            (&figures.reclaim_incompressible, 7),
            (&figures.reclaim_clean, 1000),
        ];
        set.into_iter().for_each(|(figure, value)| figure.store(value, Relaxed));
        file.stats.refaults.add_bytes(7, 5 * (16 << 10));
        let expected = [
            ("stored_pages", 200),
            ("pool_total_size", 1 << 20),
            ("written_back_pages", 160),
            ("pool_limit_hit", 2),
            ("reject_compress_poor", 0),
            ("reject_compress_fail", 0),
            ("reject_alloc_fail", 0),
            ("reject_kmemcache_fail", 0),
            ("reject_reclaim_fail", 3),
            ("decompress_fail", 0),
            ("stored_incompressible_pages", 28),
            ("zswpin", 20),
            ("zswpout", 52),
            ("zswpwb", 160),
        ];
        assert_eq!(counters(&file.stats), expected);
    }
}
