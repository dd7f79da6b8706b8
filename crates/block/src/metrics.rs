//! Figures for Prometheus: one page of text over HTTP.
//!
//! The format is that of <https://prometheus.io/docs/instrumenting/exposition_formats/>, names follow
//! <https://prometheus.io/docs/practices/naming/>: base units, `_total` for what only grows.

mod server;
mod text;

use zfolio_core::page::PAGE_BYTES;

use crate::Counts;
use crate::ram::Ram;
use crate::requests::Kind;

pub use server::{Address, Metrics, Page};
pub use text::{Durations, Seconds, Text, label};

/// What the page of a disk says of it.
impl Text {
    /// What the disk has, and what that takes.
    fn contents(&mut self, ram: &Ram) {
        let mm = ram.zram().mm_stat();
        self.gauge("size_bytes", "Size of the disk.", &[("", ram.zram().disk_bytes())]);
        let stored = [
            ("state=\"original\"", mm.orig_data_size),
            ("state=\"compressed\"", mm.compr_data_size),
        ];
        self.gauge("stored_bytes", "Units that are stored, before and after compression.", &stored);
        self.gauge(
            "memory_bytes",
            "Memory that the disk takes, tables included.",
            &[("", mm.mem_used_total)],
        );
        self.gauge("memory_max_bytes", "The most of it.", &[("", mm.mem_used_max)]);
        self.gauge("memory_limit_bytes", "Its limit; 0: none.", &[("", mm.mem_limit)]);
        let units =
            [("kind=\"same_filled\"", mm.same_pages), ("kind=\"incompressible\"", mm.huge_pages)];
        self.gauge(
            "units",
            "Stored units that are one machine word, and units that do not shrink.",
            &units,
        );
    }

    /// What was written in part of a unit.
    fn apart(&mut self, ram: &Ram) {
        let apart = ram.zram().apart_stat();
        self.gauge(
            "apart_pages",
            "Pages that are compressed alone, as they were written in part of a unit.",
            &[("", apart.pages)],
        );
        self.gauge("apart_bytes", "Their bytes, compressed.", &[("", apart.compressed_bytes)]);
        self.counter(
            "joined_units",
            "Units of such pages that were joined because they were idle.",
            &[("", apart.joined_units)],
        );
    }

    /// What clients asked for.
    fn requests(&mut self, ram: &Ram) {
        let kinds = [
            (Kind::Read, "op=\"read\""),
            (Kind::Write, "op=\"write\""),
            (Kind::Discard, "op=\"discard\""),
            (Kind::Flush, "op=\"flush\""),
        ];
        let sums = kinds.map(|(kind, op)| (op, ram.requests().sums(kind)));
        let requests = sums.map(|(op, (requests, _))| (op, requests));
        self.counter("requests", "Requests of clients; zeroing is a write.", &requests);
        // A flush has no bytes.
        let bytes = sums.map(|(op, (_, bytes))| (op, bytes));
        self.counter(
            "request_bytes",
            "Bytes that requests read, wrote and discarded.",
            &bytes[..3],
        );
        let durations = kinds.map(|(kind, op)| (op.to_owned(), ram.requests().durations(kind)));
        self.histogram(
            "request_duration_seconds",
            "How long the disk took for a request, without the way from and to the client.",
            &durations,
        );
    }

    /// What was done.
    fn events(&mut self, ram: &Ram) {
        let (mm, io, policy) = (ram.zram().mm_stat(), ram.zram().io_stat(), ram.policy_stat());
        self.counter(
            "compacted_pages",
            "Pages that compaction has freed.",
            &[("", mm.pages_compacted)],
        );
        let failed = [
            ("kind=\"read\"", io.failed_reads),
            ("kind=\"write\"", io.failed_writes),
            ("kind=\"invalid\"", io.invalid_io),
        ];
        self.counter(
            "failed_requests",
            "Requests that failed, and requests that were refused.",
            &failed,
        );
        let name = "discarded_pages";
        self.counter(name, "Pages that were discarded or zeroed.", &[("", io.notify_free)]);
        let tried = [("outcome=\"tried\"", policy.tried), ("outcome=\"shrank\"", policy.shrank)];
        self.counter(
            "recompressed_units",
            "Units recompressed without request, and those that shrank.",
            &tried,
        );
        self.counter(
            "recompression_saved_bytes",
            "Bytes that this saved.",
            &[("", policy.bytes_saved)],
        );
    }

    /// What was written back.
    fn writeback(&mut self, ram: &Ram) {
        let (bd, done) = (ram.zram().bd_stat(), ram.zram().writeback_stat());
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        self.gauge(
            "backing_bytes",
            "Bytes in use where units are written back to (bd_count).",
            &[("", bytes(bd.bd_count))],
        );
        self.counter(
            "backing_read_bytes",
            "Bytes that were read there (bd_reads).",
            &[("", bytes(bd.bd_reads))],
        );
        self.counter(
            "backing_written_bytes",
            "Bytes that were written there (bd_writes).",
            &[("", bytes(bd.bd_writes))],
        );
        let units = [
            ("reason=\"asked\"", done.asked_units),
            ("reason=\"old\"", done.old_units),
            ("reason=\"room\"", done.room_units),
        ];
        self.counter("written_back_units", "Units that were written back, and why.", &units);
        self.counter(
            "failed_writebacks",
            "Writes that were refused or failed, or whose unit was used meanwhile.",
            &[("", done.not_written)],
        );
        self.counter(
            "write_budget_used_up",
            "How often the budget for writes was used up.",
            &[("", done.budget_used_up)],
        );
    }
}

/// The page of a disk that a server serves.
#[must_use]
pub fn of_disk(name: &str, ram: &Ram, server: Counts) -> String {
    let mut page = Text::new("zfolio_device", label("device", name));
    let algorithm = ram.zram().codecs().next().map_or("?", |codec| codec.name());
    let (unit, version) = (ram.zram().unit(), env!("CARGO_PKG_VERSION"));
    let info = format!("algorithm=\"{algorithm}\",unit=\"{unit}\",version=\"{version}\"");
    page.gauge("info", "What the disk is made of.", &[(&info, 1)]);
    page.contents(ram);
    page.apart(ram);
    page.requests(ram);
    page.events(ram);
    page.writeback(ram);
    page.gauge("connections", "Clients that are connected.", &[("", server.live)]);
    page.counter(
        "accepted_connections",
        "Connections that were accepted.",
        &[("", server.accepted)],
    );
    let refused = [
        ("reason=\"full\"", server.refused),
        ("reason=\"timeout\"", server.timed_out),
        ("reason=\"tls\"", server.tls_refused),
        ("reason=\"unknown\"", server.unknown),
    ];
    page.counter(
        "refused_connections",
        "Connections that were ended: too many, or no memory for them; a handshake too slow; TLS failed; a front end \
         of another disk.",
        &refused,
    );
    page.finish()
}

#[cfg(test)]
mod tests {
    use super::of_disk;
    use super::text::tests::check;
    use crate::Counts;
    use crate::device::Device as _;
    use crate::testing::{self, ram};

    /// Goal: the page is what Prometheus reads: each metric once, with its meaning and kind before its values, names of
    /// the allowed letters, counters that end in `_total`.
    #[test]
    fn the_page_is_what_prometheus_reads() {
        let ram = ram(1 << 20, &["lz4", "zstd"]);
        ram.write(0, &vec![7; 8192]).unwrap();
        let counts =
            Counts { refused: 3, timed_out: 4, tls_refused: 5, unknown: 6, ..Counts::default() };
        let page = of_disk("cache", &ram, counts);
        check(&page);
        for line in [
            "requests_total{device=\"cache\",op=\"write\"} 1\n",
            "request_bytes_total{device=\"cache\",op=\"write\"} 8192\n",
            "request_duration_seconds_count{device=\"cache\",op=\"write\"} 1\n",
        ] {
            assert!(page.contains(&format!("zfolio_device_{line}")), "no '{line}' in: {page}");
        }
        for (reason, count) in [("full", 3), ("timeout", 4), ("tls", 5), ("unknown", 6)] {
            let line = format!(
                "zfolio_device_refused_connections_total{{device=\"cache\",reason=\"{reason}\"}} {count}\n"
            );
            assert!(page.contains(&line), "no '{line}' in: {page}");
        }
        let dashboard = include_str!("../../../examples/grafana.json");
        testing::check_dashboard(dashboard, "zfolio_device_", &page);
        assert!(
            page.contains("zfolio_device_units{device=\"cache\",kind=\"same_filled\"} 2\n"),
            "{page}"
        );
        assert!(
            page.contains("zfolio_device_stored_bytes{device=\"cache\",state=\"original\"} 8192\n")
        );
    }
}
