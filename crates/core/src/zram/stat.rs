//! What a device reports, by the kernel's names and in the kernel's columns.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Zram;
use super::slot::Letters;
use super::table::UNITS_MAX;
use crate::page::PAGE_BYTES;
use crate::store::{CodecId, Form};
use crate::zsmalloc::{PageSource, PoolStats};

/// `io_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStat<N = u64> {
    /// Reads that failed.
    pub failed_reads: N,
    /// Writes and discards that failed.
    pub failed_writes: N,
    /// Requests that were not aligned, or beyond the end.
    pub invalid_io: N,
    /// Pages that were discarded or zeroed as a whole, whether there was something or not.
    pub notify_free: N,
}

impl IoStat {
    /// The names of the columns.
    pub const NAMES: [&str; 4] = ["failed_reads", "failed_writes", "invalid_io", "notify_free"];
}

impl fmt::Display for IoStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IoStat { failed_reads, failed_writes, invalid_io, notify_free } = self;
        write!(f, "{failed_reads:8} {failed_writes:8} {invalid_io:8} {notify_free:8}")
    }
}

/// `mm_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MmStat {
    /// Bytes of the units that are stored, uncompressed.
    pub orig_data_size: u64,
    /// The same, compressed, without what is on the backing.
    pub compr_data_size: u64,
    /// All that the device takes, but its streams and the buffers of its backing: the pool with its unused parts, and
    /// the tables.
    pub mem_used_total: u64,
    /// The limit of that; 0: none.
    pub mem_limit: u64,
    /// The most that it was.
    pub mem_used_max: u64,
    /// Units that are one machine word, repeated. The kernel counts pages, which are its units. Pages that are apart
    /// count neither here nor below.
    pub same_pages: u64,
    /// Pages that compaction has freed.
    pub pages_compacted: u64,
    /// Units that do not shrink, without those on the backing.
    pub huge_pages: u64,
    /// Such units that clients ever wrote, and that a load has brought.
    pub huge_pages_since: u64,
}

impl MmStat {
    /// The names of the columns.
    pub const NAMES: [&str; 9] = [
        "orig_data_size",
        "compr_data_size",
        "mem_used_total",
        "mem_limit",
        "mem_used_max",
        "same_pages",
        "pages_compacted",
        "huge_pages",
        "huge_pages_since",
    ];

    /// The figures in these columns.
    #[must_use]
    pub fn from_columns(columns: [u64; 9]) -> MmStat {
        let [orig_data_size, compr_data_size, mem_used_total, mem_limit, mem_used_max, rest @ ..] =
            columns;
        let [same_pages, pages_compacted, huge_pages, huge_pages_since] = rest;
        MmStat {
            orig_data_size,
            compr_data_size,
            mem_used_total,
            mem_limit,
            mem_used_max,
            same_pages,
            pages_compacted,
            huge_pages,
            huge_pages_since,
        }
    }

    /// The columns.
    #[must_use]
    pub fn columns(&self) -> [u64; 9] {
        let MmStat {
            orig_data_size, compr_data_size, mem_used_total, mem_limit, mem_used_max, ..
        } = *self;
        let MmStat { same_pages, pages_compacted, huge_pages, huge_pages_since, .. } = *self;
        [
            orig_data_size,
            compr_data_size,
            mem_used_total,
            mem_limit,
            mem_used_max,
            same_pages,
            pages_compacted,
            huge_pages,
            huge_pages_since,
        ]
    }
}

impl fmt::Display for MmStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.columns();
        write!(f, "{first:8}")?;
        rest.iter().try_for_each(|column| write!(f, " {column:8}"))
    }
}

/// `bd_stat`, in pages of 4 KiB of the backing. The kernel has a unit in each; here units share them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BdStat {
    /// Pages in use.
    pub bd_count: u64,
    /// Pages that were read.
    pub bd_reads: u64,
    /// Pages that were written.
    pub bd_writes: u64,
}

impl BdStat {
    /// The names of the columns.
    pub const NAMES: [&str; 3] = ["bd_count", "bd_reads", "bd_writes"];
}

impl fmt::Display for BdStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BdStat { bd_count, bd_reads, bd_writes } = self;
        write!(f, "{bd_count:8} {bd_reads:8} {bd_writes:8}")
    }
}

impl<S: PageSource> Zram<S> {
    /// Bytes that the device takes, but its streams and the buffers of its backing.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.bytes_with(&self.store.pool_stats())
    }

    /// The same with these figures of the pool.
    fn bytes_with(&self, pool: &PoolStats) -> u64 {
        let tables =
            self.table.bytes() as u64 + self.backing_tables_bytes() + self.apart_tables_bytes();
        pool.pages_used * PAGE_BYTES as u64 + pool.metadata_bytes + tables
    }

    /// `bd_stat`; zeros without a backing.
    #[must_use]
    pub fn bd_stat(&self) -> BdStat {
        let usage = self.store.backing_usage();
        let pages = |bytes: u64| bytes.div_ceil(PAGE_BYTES as u64);
        let [read_bytes, written_bytes, ..] = self.since_reset();
        BdStat {
            bd_count: pages(usage.used_bytes),
            bd_reads: pages(read_bytes),
            bd_writes: pages(written_bytes),
        }
    }

    /// How many threads can compress at once.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.scratch.len()
    }

    /// `mm_stat`.
    #[must_use]
    pub fn mm_stat(&self) -> MmStat {
        let (pool, figures) = (self.store.pool_stats(), &self.figures);
        // What is on the backing counts as stored and takes no memory. Units that die on their way are there for a
        // moment longer than in the figures.
        let away = self.store.spill_stats();
        let used = self.used_bytes();
        self.note_used();
        MmStat {
            orig_data_size: figures.stored_bytes.load(Relaxed) + self.split_bytes(),
            compr_data_size: self.compressed_bytes().saturating_sub(away.bytes),
            mem_used_total: used,
            mem_limit: self.limit.get(),
            mem_used_max: self.used_max.load(Relaxed).max(used),
            same_pages: figures.same_filled_units.load(Relaxed),
            pages_compacted: pool.pages_compacted,
            huge_pages: figures.incompressible_units.load(Relaxed).saturating_sub(away.raw_units),
            huge_pages_since: self.huge_since.load(Relaxed),
        }
    }

    /// `io_stat`.
    #[must_use]
    pub fn io_stat(&self) -> IoStat {
        let load = |count: &AtomicU64| count.load(Relaxed);
        IoStat {
            failed_reads: load(&self.io.failed_reads),
            failed_writes: load(&self.io.failed_writes),
            invalid_io: load(&self.io.invalid_io),
            notify_free: load(&self.io.notify_free),
        }
    }

    /// `block_state`: a line for each unit that is stored, with its index, when it was used last (seconds since the
    /// device was made) and the letters of its state.
    ///
    /// # Errors
    ///
    /// Those of `to`.
    pub fn block_state(&self, to: &mut dyn fmt::Write) -> fmt::Result {
        for (unit, lock) in self.table.slots(0, UNITS_MAX) {
            let slot = lock.lock();
            if slot.is_empty() {
                continue;
            }
            let form = self.form(&slot);
            let codec = match form {
                Some(Form::Compressed(codec) | Form::Incompressible(codec)) => codec,
                _ => CodecId::FIRST,
            };
            let written_back = self.away(&slot).is_some();
            let letters = Letters {
                same: form == Some(Form::SameFilled),
                written_back,
                huge: matches!(form, Some(Form::Incompressible(_))),
                // What is there was written back, and is marked no longer; pages apart of it may be.
                idle: slot.is_idle() && (!written_back || slot.is_apart()),
                recompressed: codec != CodecId::FIRST,
                no_codec: slot.has_no_codec(),
            };
            let used_s = slot.used_s();
            drop(slot);
            writeln!(to, "{unit:12} {used_s:12}.000000 {letters}")?;
        }
        Ok(())
    }

    /// Sets `mem_limit`; 0: none.
    pub fn set_mem_limit(&self, bytes: u64) {
        self.limit.set(bytes);
    }

    /// Notes the most that was used since the last note, for `mem_used_max`: what the pool had at most, which it
    /// knows exactly, and the tables of now. If tables grew after the pool had its most, the two were never as large
    /// together. So a note is taken before units leave the pool for a backing, and where the tables of pages apart grow
    /// or shrink.
    pub(super) fn note_used(&self) {
        let pages_used = self.store.pool().take_pages_used_max();
        let pool = PoolStats { pages_used, ..self.store.pool_stats() };
        self.used_max.fetch_max(self.bytes_with(&pool), Relaxed);
    }

    /// Begins `mem_used_max` anew.
    pub fn reset_mem_used_max(&self) {
        self.note_used();
        self.used_max.store(self.used_bytes(), Relaxed);
    }

    /// Begins all that is counted anew.
    pub(super) fn reset_counts(&self) {
        let IoStat { failed_reads, failed_writes, invalid_io, notify_free } = &self.io;
        let counts = [failed_reads, failed_writes, invalid_io, notify_free, &self.huge_since];
        counts.into_iter().for_each(|count| count.store(0, Relaxed));
        self.store.pool().reset_pages_compacted();
        self.note_apart_reset();
        self.note_backing_reset();
        self.reset_mem_used_max();
    }

    /// Moves objects together, and gives back the pages that this frees.
    pub fn compact(&self) {
        self.store.pool().compact(usize::MAX);
        self.store.pool().trim();
    }

    /// Does a part of that, a millisecond's, if enough became unused since the last time. The device's owner calls this
    /// now and then.
    pub fn compact_if_wasteful(&self) {
        if self.compaction.step(self.store.pool()) {
            self.store.pool().trim();
        }
    }
}
