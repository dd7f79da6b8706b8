//! The figures: counters and gauges, each with a name, a unit in its name, and a meaning.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::budget::WriteBudget;

macro_rules! figures {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// All counters and gauges of the engine, one word each.
        #[repr(C)]
        #[derive(Default)]
        pub struct Figures { $($(#[doc = $doc])+ pub $name: AtomicU64,)+ }

        /// The figures as plain numbers, read one after the other.
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Snapshot { $($(#[doc = $doc])+ pub $name: u64,)+ }

        impl Snapshot {
            /// Calls `each` with name and value of each figure.
            pub fn each(&self, mut each: impl FnMut(&'static str, u64)) {
                $(each(stringify!($name), self.$name);)+
            }

            /// The figure called `name`.
            #[must_use]
            pub fn get(&self, name: &str) -> Option<u64> {
                match name { $(stringify!($name) => Some(self.$name),)+ _ => None }
            }
        }

        impl Figures {
            /// Calls `each` with name, meaning and present value of each figure.
            pub fn each(&self, mut each: impl FnMut(&'static str, &'static str, u64)) {
                $(
                    let meaning = concat!($($doc),+).trim_ascii();
                    each(stringify!($name), meaning, self.$name.load(Relaxed));
                )+
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
    /// The limit: resident + staged + pool + metadata bytes, for a whole process also unmanaged bytes. In a run whose
    /// processes share a limit: the process's share now.
    limit_bytes,
    /// The share of its time that the program may wait for memory, in millionths; 0: only the limit counts.
    stall_ppm,
    /// Bytes of one unit.
    unit_bytes,
    /// 1 once reclaim was needed and the mappings are registered.
    engaged,
    /// Address space that is managed.
    managed_bytes,
    /// Managed memory that is mapped in the program now.
    resident_bytes,
    /// Highest resident_bytes.
    resident_bytes_max,
    /// Unmapped but not yet compressed, and free staging pages.
    staged_bytes,
    /// The allocator's memory, fragmentation included.
    pool_bytes,
    /// Highest pool_bytes.
    pool_bytes_max,
    /// Pages that compaction of the pool has freed.
    pages_compacted,
    /// Folio tables, queues and handle tables.
    metadata_bytes,
    /// Resident memory of the process that is not managed and no page of a file: stacks, shared memory.
    unmanaged_bytes,
    /// Resident memory of the whole process without pages of files, as the kernel counts it, at the last reading.
    process_bytes,
    /// Highest process_bytes.
    process_bytes_max,
    /// Resident pages of files: code, libraries, mapped data. They do not count against the limit.
    file_bytes,
    /// Highest file_bytes.
    file_bytes_max,
    /// Pages of files given back because they were more than their share: a quarter of the limit.
    file_paged_out_bytes,
    /// What the program would hold resident without zfolio, at the last reading.
    demand_bytes,
    /// Highest demand_bytes.
    demand_bytes_max,
    /// The sum over time of demand_bytes, in KiB times milliseconds.
    demand_kib_ms,
    /// The sum over the same time of process_bytes.
    process_kib_ms,
    /// The sum over the same time of stored_bytes.
    stored_kib_ms,
    /// The sum over the same time of pool_bytes.
    pool_kib_ms,
    /// Furthest above the limit: the whole process, or the regions of a library's pager.
    over_limit_bytes_max,
    /// The sum over all waiting of what was above the limit meanwhile, in KiB times microseconds.
    over_limit_kib_stall_us,
    /// Units that are only in the store and not resident, before compression.
    demand_stored_bytes,
    /// Units stored now, including clean copies of resident units.
    stored_units,
    /// Size of the stored units before compression.
    stored_bytes,
    /// Size of the stored units after compression, without the allocator's overhead.
    compressed_bytes,
    /// Units stored four together, as one object (--algorithm auto without --unit); stored_units counts four as one.
    wide_units,
    /// Units stored as one machine word.
    same_filled_units,
    /// Units stored uncompressed.
    incompressible_units,
    /// Faults on memory that was never touched before: zeros.
    faults_zero,
    /// Faults served from the staging area.
    faults_staged,
    /// Faults that decompressed, without a wait for the disk.
    faults_stored,
    /// Faults that waited for the disk to read.
    faults_disk,
    /// Faults whose unit was back already: another thread, or the prefetch, was first.
    faults_raced,
    /// Faults served by a thread beside the handler: there are some where the process may use four CPUs or more.
    faults_assisted,
    /// Units brought back before a fault.
    prefetch_units,
    /// Units that were planned ahead of a walk that has ended before it came to them, or, by estimate, left
    /// them out.
    prefetch_unused,
    /// Units reclaimed without compression: their stored copy was still valid.
    reclaim_clean,
    /// Units compressed again, by the other codec of --algorithm auto.
    recompressed,
    /// 1 while --algorithm auto uses zstd, 0 while it uses lz4.
    dense,
    /// Units reclaimed and compressed.
    reclaim_compressed,
    /// Units reclaimed that were one machine word repeated.
    reclaim_same_filled,
    /// Units reclaimed that did not shrink.
    reclaim_incompressible,
    /// Units reclaimed by a thread that waited for memory.
    reclaim_direct,
    /// Units reclaimed in the background.
    reclaim_background,
    /// Units of these that went out although the limit did not ask for it (stall_ppm).
    reclaim_proactive,
    /// Units that could not be reclaimed: pinned by a device, or shared with a child.
    reclaim_busy,
    /// Units that could not be reclaimed: read-only, or at the edge of a mapping.
    reclaim_refused,
    /// Stored copies of units that are resident again.
    copies,
    /// Stored copies dropped: not worth their memory, or the unit was unmapped.
    copies_dropped,
    /// Times that memory was needed and nothing could be reclaimed.
    over_limit,
    /// Stores refused: the allocator had no memory.
    reject_alloc_fail,
    /// Stores refused: the codec failed.
    reject_compress_fail,
    /// Loads that failed: the data did not decompress to what was stored.
    decompress_fail,
    /// Units that are on disk now, and not in memory.
    spilled_units,
    /// Size of these units as they are on disk: compressed.
    spilled_bytes,
    /// The most that spilled_bytes was.
    spilled_bytes_max,
    /// Room on disk that is taken, in whole slots of 4 KiB.
    spill_slot_bytes,
    /// Bytes written to disk: the slots of all writes.
    spill_written_bytes,
    /// Bytes read from disk: the slots of all reads.
    spill_read_bytes,
    /// 1 if the disk is read and written by io_uring now, 2 if by plain calls; 0 before the first unit went there.
    spill_way,
    /// Reads and writes of the disk by plain calls: there is no io_uring, or it has refused them or stopped working.
    spill_calls,
    /// 1 if reads and writes of the disk go through the page cache: its file system has no direct I/O.
    spill_buffered,
    /// Units written to disk.
    written_back_units,
    /// Writes that were begun of units that memory would have held: hardly used, while others waited for memory.
    written_back_cold,
    /// Units that left memory without being written: the disk still had them.
    written_back_clean,
    /// Times that nothing could be written because as much was on disk as the spill limit allows.
    written_back_limit,
    /// Writes to disk for which there was no room: it is full, or a quota or ulimit -f is reached.
    written_back_full,
    /// Writes to disk that failed for another reason: an error of the disk, or the system was short of memory.
    written_back_fail,
    /// Of spilled_units those that are stored uncompressed.
    spilled_incompressible_units,
    /// Writes that failed, or came to nothing because the unit was wanted.
    reject_written_back,
    /// Units read from disk.
    read_back_units,
    /// Reads from disk that failed.
    read_back_fail,
    /// Pauses before a unit was read once more, because the disk had failed.
    read_back_retry,
    /// Slots of the disk that hold something else than was written there. Their units are never handed out.
    read_back_tampered,
    /// Faults that waited for the disk: for their unit, or for room.
    faults_spilled,
    /// The most that compressed memory may take, in percent of the limit; 100: only the limit counts. 0: nothing goes
    /// to disk.
    max_pool_percent,
    /// What compressed memory comes down to after it has passed that, in percent of it.
    accept_threshold_percent,
    /// Times that compressed memory passed max_pool_percent.
    pool_limit_hit,
    /// What may be written to disk in write_budget_s; 0: any amount.
    write_budget_bytes,
    /// In so many seconds; 0: in the whole run.
    write_budget_s,
    /// Times that the budget for writes was used up. Where the processes of a run share it, one of them counts.
    write_budget_used_up,
    /// Calls of madvise on managed memory.
    removes,
    /// Calls of munmap on managed memory.
    unmaps,
    /// Calls of mremap on managed memory.
    remaps,
    /// Memory that is no longer managed: locked, or used as a stack.
    pinned_bytes,
    /// Children forked.
    forks,
    /// Nanoseconds that threads of the program waited for faults, from when the engine learned of them.
    stall_ns,
    /// Nanoseconds of stall_ns before a fault's turn: others were served, or mappings were changed.
    stall_queue_ns,
    /// Nanoseconds of stall_ns in which another thread of the engine had the folio.
    stall_lock_ns,
    /// Nanoseconds of stall_ns in which a fault waited for the disk: for its unit, or for room.
    stall_spill_ns,
    /// Nanoseconds of stall_ns that were spent on making room.
    stall_reclaim_ns,
    /// Nanoseconds of stall_ns that were spent on decompressing, and on comparing checksums.
    stall_decompress_ns,
}

/// Prints only the figures that are not zero.
impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut output = f.debug_struct("Snapshot");
        self.each(|name, value| {
            if value != 0 {
                output.field(name, &value);
            }
        });
        output.finish_non_exhaustive()
    }
}

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.snapshot().fmt(f)
    }
}

/// How many figures a child of `fork` inherits.
const GAUGES: usize = 17;

impl Figures {
    /// The figures that describe the present state, which a child of `fork` shares. All other figures count
    /// what happened in one process.
    fn gauges(&self) -> [&AtomicU64; GAUGES] {
        [
            &self.stall_ppm,
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
            &self.wide_units,
            &self.same_filled_units,
            &self.incompressible_units,
            &self.copies,
            &self.dense,
        ]
    }

    /// Adds what the program would hold, what it does hold, and what is stored, times the time since `then_ns`; 0
    /// is the beginning. Who calls this notes the time there.
    pub fn sum_over_time(&self, then_ns: &AtomicU64, now_ns: u64, demand: u64, process: u64) {
        let then = match then_ns.load(Relaxed) {
            0 => now_ns,
            then => then,
        };
        let passed_ms = now_ns.saturating_sub(then) / 1_000_000;
        then_ns.store(then + passed_ms * 1_000_000, Relaxed);
        let (stored, pool) = (self.stored_bytes.load(Relaxed), self.pool_bytes.load(Relaxed));
        let sums = [
            (&self.demand_kib_ms, demand),
            (&self.process_kib_ms, process),
            (&self.stored_kib_ms, stored),
            (&self.pool_kib_ms, pool),
        ];
        for (sum, bytes) in sums {
            add(sum, (bytes >> 10).saturating_mul(passed_ms));
        }
    }

    /// Sets the gauges of what bounds what goes to disk: the two percentages of the pool, and the budget for writes.
    pub fn set_disk_bounds(&self, max_pool: u64, accept_threshold: u64, budget: WriteBudget) {
        self.max_pool_percent.store(max_pool, Relaxed);
        self.accept_threshold_percent.store(accept_threshold, Relaxed);
        self.write_budget_bytes.store(budget.bytes(), Relaxed);
        self.write_budget_s.store(budget.period().seconds(), Relaxed);
    }

    /// The values that a child of `fork` inherits, for [`Figures::inherit`].
    #[must_use]
    pub fn inheritance(&self) -> Inheritance {
        Inheritance(self.gauges().map(|gauge| gauge.load(Relaxed)))
    }

    /// Stores the values that the parent had at the fork.
    pub fn inherit(&self, parent: &Inheritance) {
        for (gauge, value) in self.gauges().into_iter().zip(parent.0) {
            gauge.store(value, Relaxed);
        }
    }
}

/// The figures that a child of `fork` inherits from its parent.
#[derive(Clone, Copy, Debug)]
pub struct Inheritance([u64; GAUGES]);

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

/// Sets a gauge, and raises its `_max`.
pub fn set(gauge: &AtomicU64, max: &AtomicU64, value: u64) {
    gauge.store(value, Relaxed);
    raise(max, value);
}

#[cfg(test)]
mod tests {
    use super::super::Stats;

    #[test]
    fn every_figure_is_listed_and_found_by_name() {
        let stats = Stats::default();
        stats.figures.faults_zero.store(7, std::sync::atomic::Ordering::Relaxed);
        let mut count = 0;
        stats.figures.each(|name, meaning, value| {
            assert!(!meaning.is_empty() && stats.figures.get(name) == Some(value));
            count += 1;
        });
        assert_eq!(count * 8, size_of_val(&stats.figures));
        assert_eq!(stats.figures.get("faults_zero"), Some(7));
        assert_eq!(stats.figures.get("nonsense"), None);
    }

    /// Goal: a person can read what `{:?}` prints. Method: figures that are zero are left out.
    #[test]
    fn debug_output_has_no_zeros() {
        let stats = Stats::default();
        stats.figures.faults_zero.store(7, std::sync::atomic::Ordering::Relaxed);
        stats.fault_stored_ns.add(1000);
        let text = format!("{stats:?}");
        assert!(text.contains("faults_zero: 7") && text.contains("count: 1,"), "{text}");
        assert!(!text.contains("faults_stored") && text.len() < 500, "{text}");
        let snapshot = stats.figures.snapshot();
        assert_eq!((snapshot.faults_zero, snapshot.get("faults_zero")), (7, Some(7)));
    }

    #[test]
    fn a_child_inherits_gauges_and_not_counters() {
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        let (parent, child) = (Stats::default(), Stats::default());
        parent.figures.stored_units.store(5, relaxed);
        parent.figures.faults_zero.store(7, relaxed);
        child.figures.inherit(&parent.figures.inheritance());
        super::subtract(&child.figures.stored_units, 5);
        assert_eq!(child.figures.get("stored_units"), Some(0));
        assert_eq!(child.figures.get("faults_zero"), Some(0));
    }
}
