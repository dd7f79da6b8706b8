//! Counters and gauges, by name, in a layout that another process may map and read.
//!
//! [`Stats`] consists of plain atomics in a fixed order, so that it can lie in a shared mapping: the engine
//! writes, `zfolio stat` reads, and neither waits for the other. Every figure has a name, a unit in its name,
//! and one line of meaning; [`Figures::each`] lists them all, so that a printer needs no list of its own.
//!
//! # Concurrency
//!
//! All loads and stores are `Relaxed`: figures are only reported, no decision depends on their order.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::ledger::Owner;
use crate::refault::{Measured, Refaults};
use crate::zcomp::{Choice, asked};

mod figures;
mod histogram;
mod orders;
mod prices;

pub use figures::{Figures, Inheritance, Snapshot, add, raise, set, subtract};
pub use histogram::{BUCKETS, Histogram};
pub use orders::{OrderCounts, Orders};
pub use prices::{Price, Prices};

/// "zfolio\0\1" as a little-endian word, which a reader checks first. It identifies the header, which is the same
/// in all builds. The layout after the header is identified by its length ([`Stats::bytes`]).
pub const STATS_MAGIC: u64 = u64::from_le_bytes(*b"zfolio\0\x01");

/// Bytes kept of a name (algorithm, command), zero-terminated.
pub const NAME_BYTES: usize = 64;

/// The page of statistics of one engine.
#[repr(C)]
pub struct Stats {
    /// [`STATS_MAGIC`], written last.
    pub magic: AtomicU64,
    /// `size_of::<Stats>()`: a reader with another layout refuses the page.
    pub bytes: AtomicU32,
    /// The process that writes.
    pub pid: AtomicU32,
    /// When that process started, in clock ticks (field 22 of `/proc/PID/stat`), to recognize a re-used PID.
    pub start_ticks: AtomicU64,
    /// The run it belongs to: the PID of `zfolio run`, 0 outside of one.
    pub run: AtomicU64,
    /// `lz4`, `zstd,level=1`, ...
    pub algorithm: [AtomicU8; NAME_BYTES],
    /// The program, as in `/proc/PID/comm`.
    pub command: [AtomicU8; NAME_BYTES],
    /// The figures.
    pub figures: Figures,
    /// Nanoseconds of faults on memory never touched.
    pub fault_zero_ns: Histogram,
    /// Nanoseconds of faults served from the staging area.
    pub fault_staged_ns: Histogram,
    /// Nanoseconds of faults that decompressed, without a wait for the disk.
    pub fault_stored_ns: Histogram,
    /// Nanoseconds of faults that waited for the disk to read.
    pub fault_disk_ns: Histogram,
    /// The faults of both kinds, and all bytes that came back, by distance.
    pub refaults: Refaults,
    /// What a MiB of each use of memory saves.
    pub prices: Prices,
    /// Runs of slots that writes to disk took.
    pub orders: Orders,
    /// A reader raises this number to request the tables that are not kept here: a line for each size class; an empty
    /// line; and the figures of the accelerator, if there is one.
    pub tables_asked: AtomicU32,
    /// The value of `tables_asked` when the tables were last written, as text after this page in the file.
    pub tables_published: AtomicU32,
    /// Another process asks for this limit, in bytes; 0: nobody did.
    pub limit_asked: AtomicU64,
    /// Another process asks for this share of the time to be waited, in millionths, plus 1; 0: nobody did.
    pub stall_asked: AtomicU64,
    /// Another process asks for this part of the limit for the pool, in percent; 0: nobody did.
    pub max_pool_percent_asked: AtomicU64,
    /// Another process asks for this part of that, to which a full pool comes down; 0: nobody did.
    pub accept_threshold_percent_asked: AtomicU64,
    /// Another process asks for this budget for writes ([`WriteBudget::to_asked`]); 0: nobody did.
    ///
    /// [`WriteBudget::to_asked`]: crate::budget::WriteBudget::to_asked
    pub write_budget_asked: AtomicU64,
    /// How often a budget was asked for: one that is asked for again is full again.
    pub write_budget_serial: AtomicU64,
    /// Another process asks for this algorithm ([`zcomp::asked`](crate::zcomp::asked)); 0: nobody did.
    pub algorithm_asked: AtomicU64,
    /// The answer to the word that was last acted on.
    pub algorithm_answer: AtomicU64,
    /// 1: the process's limit is a share of one that its run's processes have together; 0: it is the process's own.
    pub has_share: AtomicU64,
    /// The PID namespace of the process, in which its PID and that of its run count; 0: not known.
    pub namespace: AtomicU64,
}

impl Default for Stats {
    fn default() -> Self {
        Stats {
            magic: AtomicU64::new(0),
            bytes: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            start_ticks: AtomicU64::new(0),
            run: AtomicU64::new(0),
            tables_asked: AtomicU32::new(0),
            tables_published: AtomicU32::new(0),
            limit_asked: AtomicU64::new(0),
            stall_asked: AtomicU64::new(0),
            max_pool_percent_asked: AtomicU64::new(0),
            accept_threshold_percent_asked: AtomicU64::new(0),
            write_budget_asked: AtomicU64::new(0),
            write_budget_serial: AtomicU64::new(0),
            algorithm_asked: AtomicU64::new(0),
            algorithm_answer: AtomicU64::new(0),
            has_share: AtomicU64::new(0),
            namespace: AtomicU64::new(0),
            algorithm: [const { AtomicU8::new(0) }; NAME_BYTES],
            command: [const { AtomicU8::new(0) }; NAME_BYTES],
            figures: Figures::default(),
            fault_zero_ns: Histogram::default(),
            fault_staged_ns: Histogram::default(),
            fault_stored_ns: Histogram::default(),
            fault_disk_ns: Histogram::default(),
            refaults: Refaults::default(),
            prices: Prices::default(),
            orders: Orders::default(),
        }
    }
}

impl fmt::Debug for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut output = f.debug_struct("Stats");
        output.field("pid", &self.pid).field("run", &self.run);
        output.field("algorithm", &self.algorithm()).field("command", &self.command());
        output.field("figures", &self.figures);
        for (kind, histogram) in self.histograms() {
            output.field(kind, histogram);
        }
        output.field("prices", &self.prices);
        output.finish_non_exhaustive()
    }
}

impl Stats {
    /// Writes the header. The magic is written last, so that a reader sees a whole header or none.
    pub fn publish(&self, owner: Owner, run: u64, algorithm: &str, command: &str) {
        let size = u32::try_from(size_of::<Stats>()).expect("a few pages");
        self.bytes.store(size, Relaxed);
        self.pid.store(owner.pid, Relaxed);
        self.start_ticks.store(owner.start_ticks, Relaxed);
        self.namespace.store(owner.namespace.into(), Relaxed);
        self.run.store(run, Relaxed);
        write_name(&self.algorithm, algorithm);
        write_name(&self.command, command);
        // Release: pairs with the Acquire in is_whole().
        self.magic.store(STATS_MAGIC, std::sync::atomic::Ordering::Release);
    }

    /// Whether the header was written, and by a build with this layout.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        // Acquire: pairs with the Release in publish().
        self.magic.load(std::sync::atomic::Ordering::Acquire) == STATS_MAGIC
            && self.bytes.load(Relaxed) as usize == size_of::<Stats>()
    }

    /// The algorithm, as the user would write it.
    #[must_use]
    pub fn algorithm(&self) -> String {
        read_name(&self.algorithm)
    }

    /// The program's name.
    #[must_use]
    pub fn command(&self) -> String {
        read_name(&self.command)
    }

    /// Counts a fault that decompressed a unit: how long the thread waited, how much other memory was compressed since
    /// the unit was, and whether the disk had to read it.
    pub fn count_refault(&self, distance_bytes: u64, waited_ns: u64, is_from_disk: bool) {
        let (count, times) = match is_from_disk {
            true => (&self.figures.faults_disk, &self.fault_disk_ns),
            false => (&self.figures.faults_stored, &self.fault_stored_ns),
        };
        add(count, 1);
        times.add(waited_ns);
        self.refaults.add(distance_bytes, waited_ns);
    }

    /// The mean time of a fault that decompressed, wherever the unit was. `None`: there was none.
    #[must_use]
    pub fn refault_ns(&self) -> Option<u64> {
        let (pool, disk) = (&self.fault_stored_ns, &self.fault_disk_ns);
        (pool.sum() + disk.sum()).checked_div(pool.count() + disk.count())
    }

    /// How long threads have waited for what was compressed or about to be: not for fresh memory.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.refaults.waited_ns() + self.fault_staged_ns.sum()
    }

    /// What a forecast for another limit needs in addition to [`Refaults`].
    #[must_use]
    pub fn measured(&self) -> Measured {
        let figures = &self.figures;
        // A thread waits for decompression, for fresh memory, or for a unit that is moved back or on its way.
        let stall = figures.stall_ns.load(Relaxed).saturating_sub(self.refaults.waited_ns());
        let fresh = self.fault_zero_ns.sum().min(stall);
        let left = [
            &figures.reclaim_clean,
            &figures.reclaim_compressed,
            &figures.reclaim_same_filled,
            &figures.reclaim_incompressible,
        ];
        let left_units: u64 = left.into_iter().map(|units| units.load(Relaxed)).sum();
        Measured {
            limit_bytes: figures.limit_bytes.load(Relaxed),
            need_bytes: figures.demand_bytes_max.load(Relaxed),
            unmanaged_bytes: figures.unmanaged_bytes.load(Relaxed),
            stored_kib_ms: figures.stored_kib_ms.load(Relaxed),
            pool_kib_ms: figures.pool_kib_ms.load(Relaxed),
            demand_stored_bytes: figures.demand_stored_bytes.load(Relaxed),
            left_bytes: left_units.saturating_mul(figures.unit_bytes.load(Relaxed)),
            returned_bytes: self.refaults.returned_bytes(),
            moved_wait_ns: stall - fresh,
            fresh_wait_ns: fresh,
        }
    }

    /// How far above the limit the process was while it waited, on average.
    #[must_use]
    pub fn excess_bytes(&self) -> u64 {
        let sum = u128::from(self.figures.over_limit_kib_stall_us.load(Relaxed));
        let waited_ns = u128::from(self.figures.stall_ns.load(Relaxed)).max(1);
        u64::try_from((sum << 10) * 1000 / waited_ns).unwrap_or(u64::MAX)
    }

    /// The words in which other processes ask for something, and the answer to one of them.
    #[must_use]
    pub fn asked(&self) -> [&AtomicU64; 8] {
        [
            &self.limit_asked,
            &self.stall_asked,
            &self.max_pool_percent_asked,
            &self.accept_threshold_percent_asked,
            &self.write_budget_asked,
            &self.write_budget_serial,
            &self.algorithm_asked,
            &self.algorithm_answer,
        ]
    }

    /// The algorithm that another process has asked for, and got.
    #[must_use]
    pub fn algorithm_in_force(&self) -> Option<Choice> {
        let word = self.algorithm_asked.load(Relaxed);
        let is_done = asked::answered(word, self.algorithm_answer.load(Relaxed)) == Some(Ok(()));
        if is_done { asked::from_word(word) } else { None }
    }

    /// Writes another algorithm into the header.
    pub fn rename_algorithm(&self, algorithm: &str) {
        write_name(&self.algorithm, algorithm);
    }

    /// The histograms with their names.
    #[must_use]
    pub fn histograms(&self) -> [(&'static str, &Histogram); 4] {
        [
            ("zero", &self.fault_zero_ns),
            ("staged", &self.fault_staged_ns),
            ("stored", &self.fault_stored_ns),
            ("disk", &self.fault_disk_ns),
        ]
    }
}

/// The word for [`Stats::stall_asked`] that asks for a share in millionths.
#[must_use]
pub fn asked_stall(ppm: u32) -> u64 {
    u64::from(ppm) + 1
}

/// The share that a word of [`Stats::stall_asked`] asks for. `None`: nobody asked.
#[must_use]
pub fn stall_of_asked(word: u64) -> Option<u32> {
    u32::try_from(word.checked_sub(1)?).ok()
}

fn write_name(to: &[AtomicU8; NAME_BYTES], name: &str) {
    let kept = name.bytes().take(NAME_BYTES - 1).chain(std::iter::repeat(0));
    for (cell, byte) in to.iter().zip(kept) {
        cell.store(byte, Relaxed);
    }
}

fn read_name(from: &[AtomicU8; NAME_BYTES]) -> String {
    let bytes: Vec<u8> =
        from.iter().map(|cell| cell.load(Relaxed)).take_while(|b| *b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{Owner, Stats};

    #[test]
    fn a_refault_is_counted_by_time_and_by_distance() {
        let stats = Stats::default();
        stats.count_refault(5 << 20, 1000, false);
        stats.figures.stall_ns.store(1500, std::sync::atomic::Ordering::Relaxed);
        assert_eq!((stats.fault_stored_ns.count(), stats.refaults.waited_ns()), (1, 1000));
        assert_eq!((stats.measured().moved_wait_ns, stats.measured().fresh_wait_ns), (500, 0));
        // It counts as the middle of its bucket, 160 to 191.
        stats.fault_zero_ns.add(170);
        assert_eq!((stats.measured().moved_wait_ns, stats.measured().fresh_wait_ns), (324, 176));
    }

    /// Goal: a forecast knows how well memory compressed during the run. Method: 300 MiB take 100 in the pool for a
    /// second; then the program frees all of it, as it does before it ends.
    #[test]
    fn what_was_stored_is_told_after_it_was_freed() {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

        let (stats, then_ns) = (Stats::default(), AtomicU64::new(0));
        let look = |now_ns, stored_mib: u64, pool_mib: u64| {
            stats.figures.stored_bytes.store(stored_mib << 20, Relaxed);
            stats.figures.pool_bytes.store(pool_mib << 20, Relaxed);
            stats.figures.sum_over_time(&then_ns, now_ns, 0, 0);
        };
        look(1_000_000_000, 300, 100);
        look(2_000_000_000, 300, 100);
        look(2_001_000_000, 0, 1);
        let measured = stats.measured();
        let kib_ms = |mib: u64| mib << 10;
        assert_eq!(measured.stored_kib_ms, kib_ms(300) * 1000);
        assert_eq!(measured.pool_kib_ms, kib_ms(100) * 1000 + kib_ms(1));
    }

    /// Goal: the excess counts by the wait, not by the time. Method: 3 of 4 ms are waited 40 MiB above the limit.
    #[test]
    fn the_excess_is_that_of_the_waits() {
        use std::sync::atomic::Ordering::Relaxed;

        let stats = Stats::default();
        assert_eq!(stats.excess_bytes(), 0);
        stats.figures.stall_ns.store(4_000_000, Relaxed);
        stats.figures.over_limit_kib_stall_us.store((40 << 10) * 3000, Relaxed);
        assert_eq!(stats.excess_bytes(), 30 << 20);
    }

    #[test]
    fn a_header_is_whole_only_after_publish() {
        let stats = Stats::default();
        assert!(!stats.is_whole());
        stats.publish(Owner { pid: 1, namespace: 4, start_ticks: 2 }, 3, "zstd,level=1", "python3");
        assert!(stats.is_whole() && stats.algorithm() == "zstd,level=1");
        assert_eq!(stats.command(), "python3");
    }
}
