//! Counters and gauges, by name, in a layout that another process may map and read.
//!
//! [`Stats`] is plain atomics in a fixed order, so the page that holds it can be a shared mapping:
//! the engine writes, `zfolio stat` reads, and neither waits for the other. Every figure has a
//! name, a unit in its name, and one line of meaning; [`Stats::figures`] lists them all, so that a
//! printer needs no list of its own.
//!
//! # Concurrency
//!
//! All loads and stores are `Relaxed`: figures are told, never decided upon.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::refault::{Measured, Refaults};

/// "zfolio\0\1" as a little-endian word: what a reader checks first. It stands for the header, which is the
/// same in all builds: what is behind it is known by its length ([`Stats::bytes`]).
pub const STATS_MAGIC: u64 = u64::from_le_bytes(*b"zfolio\0\x01");

/// Bytes kept of a name (algorithm, command), zero-terminated.
pub const NAME_BYTES: usize = 64;

macro_rules! figures {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Everything that the engine tells, one word each.
        #[repr(C)]
        #[derive(Default)]
        pub struct Figures { $($(#[doc = $doc])+ pub $name: AtomicU64,)+ }

        /// The figures as plain numbers, as they were at about one moment.
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Snapshot { $($(#[doc = $doc])+ pub $name: u64,)+ }

        impl Snapshot {
            /// Name and value of each figure.
            pub fn each(&self, mut tell: impl FnMut(&'static str, u64)) {
                $(tell(stringify!($name), self.$name);)+
            }

            /// The figure called `name`.
            #[must_use]
            pub fn get(&self, name: &str) -> Option<u64> {
                match name { $(stringify!($name) => Some(self.$name),)+ _ => None }
            }
        }

        impl Figures {
            /// Name, meaning and present value of each figure.
            pub fn each(&self, mut tell: impl FnMut(&'static str, &'static str, u64)) {
                $(tell(stringify!($name), concat!($($doc),+).trim_ascii(), self.$name.load(Relaxed));)+
            }

            /// The figure called `name`.
            #[must_use]
            pub fn get(&self, name: &str) -> Option<u64> {
                match name { $(stringify!($name) => Some(self.$name.load(Relaxed)),)+ _ => None }
            }

            /// All figures, as plain numbers.
            #[must_use]
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Relaxed),)+ }
            }
        }
    };
}

figures! {
    /// The limit asked for: resident + staged + pool + metadata, and for a whole process unmanaged.
    limit_bytes,
    /// Bytes of one unit.
    unit_bytes,
    /// 1 once reclaim was needed and the regions are registered.
    engaged,
    /// Address space under management.
    managed_bytes,
    /// Managed memory mapped in the program now.
    resident_bytes,
    /// The most of it.
    resident_bytes_max,
    /// Unmapped but not yet compressed (second chance), and free staging pages.
    staged_bytes,
    /// The allocator's memory, fragmentation included.
    pool_bytes,
    /// The most of it.
    pool_bytes_max,
    /// Pages that compaction of the pool gave back.
    pages_compacted,
    /// Folio tables, queues and handle tables.
    metadata_bytes,
    /// Resident memory of the process that is not managed: code, libraries, stacks.
    unmanaged_bytes,
    /// Resident memory of the whole process, as the kernel counts it, when last read.
    process_bytes,
    /// The most of it that was read.
    process_bytes_max,
    /// What the program would hold resident without us, when last read.
    demand_bytes,
    /// The most of it.
    demand_bytes_max,
    /// The most that was seen above the limit: of the whole process, or of a library's pager.
    over_limit_bytes_max,
    /// Units that are in the store only, before compression.
    demand_stored_bytes,
    /// Units stored now, clean copies of resident units included.
    stored_units,
    /// Their size before compression.
    stored_bytes,
    /// Their size after compression, without the allocator's overhead.
    compressed_bytes,
    /// Units stored as one machine word.
    same_filled_units,
    /// Units stored as they are.
    incompressible_units,
    /// Faults on memory never touched before: zeros.
    faults_zero,
    /// Faults served from the staging area: the second chance.
    faults_staged,
    /// Faults that decompressed.
    faults_stored,
    /// Faults that found the unit back already: another thread, or the prefetch, was first.
    faults_raced,
    /// Units brought back before they were asked for.
    prefetch_units,
    /// Units reclaimed without compression: the stored copy was still good.
    reclaim_clean,
    /// Units reclaimed and compressed.
    reclaim_compressed,
    /// Units reclaimed that were one machine word.
    reclaim_same_filled,
    /// Units reclaimed that would not shrink.
    reclaim_incompressible,
    /// Units reclaimed by a thread that waited for memory.
    reclaim_direct,
    /// Units reclaimed in the background.
    reclaim_background,
    /// Units that could not be taken: pinned by a device, or shared with a child.
    reclaim_busy,
    /// Units that could not be taken: read-only, or at the edge of a mapping.
    reclaim_refused,
    /// Stored copies of units that are resident again.
    copies,
    /// Stored copies dropped: they were not worth their memory, or the unit was unmapped.
    copies_dropped,
    /// Times that memory was wanted and nothing could be reclaimed.
    over_limit,
    /// Stores refused: the allocator had no memory.
    reject_alloc_fail,
    /// Stores refused: the codec failed.
    reject_compress_fail,
    /// Loads that failed: the data did not decompress to what was stored.
    decompress_fail,
    /// `madvise` of managed memory.
    removes,
    /// `munmap` of managed memory.
    unmaps,
    /// `mremap` of managed memory.
    remaps,
    /// Ranges given up for good: locked, or handed out as a stack.
    pinned_bytes,
    /// Children forked.
    forks,
    /// Time that threads of the program waited for faults, in nanoseconds.
    stall_ns,
    /// Of that, what was spent on making room before a unit could be brought.
    stall_reclaim_ns,
}

/// The figures that are not zero: the others say nothing.
impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = f.debug_struct("Snapshot");
        self.each(|name, value| {
            if value != 0 {
                told.field(name, &value);
            }
        });
        told.finish_non_exhaustive()
    }
}

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.snapshot().fmt(f)
    }
}

/// How many figures a child of `fork` begins with.
const GAUGES: usize = 14;

impl Figures {
    /// What is so now, and in a child of `fork` too; all else counts what happened in one process.
    fn gauges(&self) -> [&AtomicU64; GAUGES] {
        [
            &self.engaged,
            &self.managed_bytes,
            &self.resident_bytes,
            &self.staged_bytes,
            &self.pool_bytes,
            &self.metadata_bytes,
            &self.demand_bytes,
            &self.demand_stored_bytes,
            &self.stored_units,
            &self.stored_bytes,
            &self.compressed_bytes,
            &self.same_filled_units,
            &self.incompressible_units,
            &self.copies,
        ]
    }

    /// Their values, for [`Figures::inherit`].
    #[must_use]
    pub fn inheritance(&self) -> Inheritance {
        Inheritance(self.gauges().map(|gauge| gauge.load(Relaxed)))
    }

    /// Takes over what a parent told at the fork.
    pub fn inherit(&self, parent: &Inheritance) {
        for (gauge, value) in self.gauges().into_iter().zip(parent.0) {
            gauge.store(value, Relaxed);
        }
    }
}

/// What a child of `fork` has of its parent's figures.
#[derive(Clone, Copy, Debug)]
pub struct Inheritance([u64; GAUGES]);

/// Buckets of a [`Histogram`]: four for each power of two of a 64-bit value.
pub const BUCKETS: usize = 256;

/// Counts of durations, in buckets at most 25 % wide.
#[repr(C)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

/// What it says, and not its 256 buckets.
impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p50, p99) = (self.quantile(500), self.quantile(990));
        write!(f, "Histogram {{ count: {}, p50: {p50}, p99: {p99} }}", self.count())
    }
}

impl Histogram {
    /// The bucket of `value`: its highest bit, then the two bits below.
    fn index(value: u64) -> usize {
        let value = value.max(4);
        let top = value.ilog2();
        (top as usize) * 4 + ((value >> (top - 2)) & 3) as usize
    }

    /// Counts one `value`.
    pub fn add(&self, value: u64) {
        self.buckets[Self::index(value)].fetch_add(1, Relaxed);
    }

    /// How many values were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum()
    }

    /// About the sum of the values counted: each as the middle of its bucket, so within 13 %.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let sum = self.buckets.iter().enumerate().map(|(index, bucket)| {
            let (top, step) = (index / 4, (index % 4) as u128);
            // 2^top * (1 + (step + 1/2) / 4).
            u128::from(bucket.load(Relaxed)) * (((9 + 2 * step) << top) / 8)
        });
        u64::try_from(sum.sum::<u128>()).unwrap_or(u64::MAX)
    }

    /// The upper end of the bucket that holds the `per_mille` quantile; 0 if nothing was counted.
    #[must_use]
    pub fn quantile(&self, per_mille: u64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = (count * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.load(Relaxed);
            if seen >= rank {
                let (top, step) = (index / 4, (index % 4) as u64);
                // 2^top * (1 + (step + 1) / 4), less one: the last value of the bucket.
                return ((5 + step) << top >> 2) - 1;
            }
        }
        u64::MAX
    }
}

/// The page of statistics of one engine.
#[repr(C)]
pub struct Stats {
    /// [`STATS_MAGIC`], written last.
    pub magic: AtomicU64,
    /// `size_of::<Stats>()`: a reader of another build refuses.
    pub bytes: AtomicU32,
    /// The process that writes.
    pub pid: AtomicU32,
    /// When that process started, in clock ticks (field 22 of `/proc/PID/stat`): tells a re-used PID.
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
    /// Nanoseconds of faults that decompressed.
    pub fault_stored_ns: Histogram,
    /// The same faults, and all that came back, by its distance.
    pub refaults: Refaults,
    /// Raised by a reader who wants the table of size classes, which is not kept here.
    pub classes_asked: AtomicU32,
    /// What that was when the table was told last: it is the text behind this page in the file.
    pub classes_told: AtomicU32,
}

impl Default for Stats {
    fn default() -> Self {
        Stats {
            magic: AtomicU64::new(0),
            bytes: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            start_ticks: AtomicU64::new(0),
            run: AtomicU64::new(0),
            classes_asked: AtomicU32::new(0),
            classes_told: AtomicU32::new(0),
            algorithm: [const { AtomicU8::new(0) }; NAME_BYTES],
            command: [const { AtomicU8::new(0) }; NAME_BYTES],
            figures: Figures::default(),
            fault_zero_ns: Histogram::default(),
            fault_staged_ns: Histogram::default(),
            fault_stored_ns: Histogram::default(),
            refaults: Refaults::default(),
        }
    }
}

impl fmt::Debug for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = f.debug_struct("Stats");
        told.field("pid", &self.pid).field("run", &self.run);
        told.field("algorithm", &self.algorithm()).field("command", &self.command());
        told.field("figures", &self.figures);
        for (kind, histogram) in self.histograms() {
            told.field(kind, histogram);
        }
        told.finish_non_exhaustive()
    }
}

impl Stats {
    /// Writes the header; the magic goes last, so that a reader sees a whole header or none.
    pub fn publish(&self, pid: u32, start_ticks: u64, run: u64, algorithm: &str, command: &str) {
        let size = u32::try_from(size_of::<Stats>()).expect("a few pages");
        self.bytes.store(size, Relaxed);
        self.pid.store(pid, Relaxed);
        self.start_ticks.store(start_ticks, Relaxed);
        self.run.store(run, Relaxed);
        write_name(&self.algorithm, algorithm);
        write_name(&self.command, command);
        // Release: pairs with the Acquire in is_whole().
        self.magic.store(STATS_MAGIC, std::sync::atomic::Ordering::Release);
    }

    /// Whether the header was written, by a build with this layout.
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

    /// Counts a fault that decompressed: how long it was waited for, and how much other memory had been
    /// compressed since the unit was.
    pub fn count_refault(&self, distance_bytes: u64, waited_ns: u64) {
        self.fault_stored_ns.add(waited_ns);
        self.refaults.add(distance_bytes, waited_ns);
    }

    /// What [`Refaults`] needs for a guess about another limit.
    #[must_use]
    pub fn measured(&self) -> Measured {
        let figures = &self.figures;
        // A stall is for what was decompressed, for fresh memory, or for what was moved back or on its way.
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
            stored_bytes: figures.stored_bytes.load(Relaxed),
            pool_bytes: figures.pool_bytes.load(Relaxed),
            demand_stored_bytes: figures.demand_stored_bytes.load(Relaxed),
            left_bytes: left_units.saturating_mul(figures.unit_bytes.load(Relaxed)),
            returned_bytes: self.refaults.returned_bytes(),
            moved_wait_ns: stall - fresh,
            fresh_wait_ns: fresh,
        }
    }

    /// The histograms with their names.
    #[must_use]
    pub fn histograms(&self) -> [(&'static str, &Histogram); 3] {
        [
            ("zero", &self.fault_zero_ns),
            ("staged", &self.fault_staged_ns),
            ("stored", &self.fault_stored_ns),
        ]
    }
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

/// Adds to a figure.
pub fn add(figure: &AtomicU64, value: u64) {
    figure.fetch_add(value, Relaxed);
}

/// Takes from a figure.
pub fn subtract(figure: &AtomicU64, value: u64) {
    figure.fetch_sub(value, Relaxed);
}

/// Raises a `_max` figure to `value` if that is more.
pub fn raise(figure: &AtomicU64, value: u64) {
    figure.fetch_max(value, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::{Histogram, Stats};

    #[test]
    fn quantile_is_within_its_bucket() {
        for value in [1u64, 4, 5, 7, 100, 1000, 12_345, 1 << 40] {
            let histogram = Histogram::default();
            histogram.add(value);
            let told = histogram.quantile(500);
            assert!(told >= value && told <= (value.max(4)) * 5 / 4, "{value}: {told}");
        }
    }

    #[test]
    fn quantiles_rise() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value));
        let (p50, p99) = (histogram.quantile(500), histogram.quantile(990));
        assert!((500..=640).contains(&p50), "p50 {p50}");
        assert!((990..=1280).contains(&p99), "p99 {p99}");
    }

    #[test]
    fn sum_is_within_an_eighth() {
        for value in [4u64, 5, 7, 100, 1000, 12_345, (1 << 40) + 1] {
            let histogram = Histogram::default();
            (0..3).for_each(|_| histogram.add(value));
            let off = histogram.sum().abs_diff(3 * value);
            assert!(off <= 3 * value / 8 + 3, "{value}: {}", histogram.sum());
        }
    }

    #[test]
    fn a_refault_is_counted_by_time_and_by_distance() {
        let stats = Stats::default();
        stats.count_refault(5 << 20, 1000);
        stats.figures.stall_ns.store(1500, std::sync::atomic::Ordering::Relaxed);
        assert_eq!((stats.fault_stored_ns.count(), stats.refaults.waited_ns()), (1, 1000));
        assert_eq!((stats.measured().moved_wait_ns, stats.measured().fresh_wait_ns), (500, 0));
        // Told as the middle of its bucket, 160 to 191.
        stats.fault_zero_ns.add(170);
        assert_eq!((stats.measured().moved_wait_ns, stats.measured().fresh_wait_ns), (324, 176));
    }

    #[test]
    fn every_figure_is_told_and_found_by_name() {
        let stats = Stats::default();
        stats.figures.faults_zero.store(7, std::sync::atomic::Ordering::Relaxed);
        let mut told = 0;
        stats.figures.each(|name, meaning, value| {
            assert!(!meaning.is_empty() && stats.figures.get(name) == Some(value));
            told += 1;
        });
        assert_eq!(told * 8, size_of_val(&stats.figures));
        assert_eq!(stats.figures.get("faults_zero"), Some(7));
        assert_eq!(stats.figures.get("nonsense"), None);
    }

    /// Goal: a person can read what `{:?}` prints. Method: nothing is told of what is zero.
    #[test]
    fn debug_output_has_no_zeros() {
        let stats = Stats::default();
        stats.figures.faults_zero.store(7, std::sync::atomic::Ordering::Relaxed);
        stats.fault_stored_ns.add(1000);
        let told = format!("{stats:?}");
        assert!(told.contains("faults_zero: 7") && told.contains("count: 1,"), "{told}");
        assert!(!told.contains("faults_stored") && told.len() < 500, "{told}");
        let snapshot = stats.figures.snapshot();
        assert_eq!((snapshot.faults_zero, snapshot.get("faults_zero")), (7, Some(7)));
    }

    #[test]
    fn a_child_inherits_what_is_and_not_what_was() {
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        let (parent, child) = (Stats::default(), Stats::default());
        parent.figures.stored_units.store(5, relaxed);
        parent.figures.faults_zero.store(7, relaxed);
        child.figures.inherit(&parent.figures.inheritance());
        super::subtract(&child.figures.stored_units, 5);
        assert_eq!(child.figures.get("stored_units"), Some(0));
        assert_eq!(child.figures.get("faults_zero"), Some(0));
    }

    #[test]
    fn a_header_is_whole_only_after_publish() {
        let stats = Stats::default();
        assert!(!stats.is_whole());
        stats.publish(1, 2, 3, "zstd,level=1", "python3");
        assert!(stats.is_whole() && stats.algorithm() == "zstd,level=1");
        assert_eq!(stats.command(), "python3");
    }
}
