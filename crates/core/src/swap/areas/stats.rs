//! What the areas did and have.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::disk;
use super::super::location::AreaId;
use super::super::slots::ORDERS;
use super::Areas;
use crate::stats::add;

/// What is counted as it happens.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) swpout: [AtomicU64; ORDERS],
    pub(super) swpout_fallback: [AtomicU64; ORDERS],
    pub(super) writes: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) bytes_written: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) reads_again: AtomicU64,
    pub(super) clusters_discarded: AtomicU64,
    pub(super) failed_full: AtomicU64,
    pub(super) failed_busy: AtomicU64,
    pub(super) failed_medium: AtomicU64,
    pub(super) writes_failed: AtomicU64,
    pub(super) tampered: AtomicU64,
    pub(super) refused_limit: AtomicU64,
    pub(super) refused_growing: AtomicU64,
    pub(super) refused_full: AtomicU64,
    pub(super) refused_busy: AtomicU64,
}

impl Counters {
    /// A transfer failed.
    pub(super) fn failed(&self, error: disk::Error) {
        let counter = match error {
            disk::Error::Full => &self.failed_full,
            disk::Error::Busy => &self.failed_busy,
            disk::Error::Failed { .. } => &self.failed_medium,
        };
        add(counter, 1);
    }

    /// In a child: what happened before is counted by its parent.
    pub(super) fn start_over(&self) {
        // Every counter is named, so that none that is added later is left out.
        let Counters {
            swpout,
            swpout_fallback,
            writes,
            reads,
            bytes_written,
            bytes_read,
            reads_again,
            clusters_discarded,
            failed_full,
            failed_busy,
            failed_medium,
            writes_failed,
            tampered,
            refused_limit,
            refused_growing,
            refused_full,
            refused_busy,
        } = self;
        let transfers = [writes, reads, bytes_written, bytes_read, reads_again, clusters_discarded];
        let failures = [failed_full, failed_busy, failed_medium, writes_failed, tampered];
        let refusals = [refused_limit, refused_growing, refused_full, refused_busy];
        let orders = swpout.iter().chain(swpout_fallback);
        let all = transfers.into_iter().chain(failures).chain(refusals).chain(orders);
        all.for_each(|counter| counter.store(0, Relaxed));
    }
}

/// What all areas have, and what they did since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AreasStats {
    /// Slots in use, but for those of a parent's areas: with objects, being written, or taken for the next frame.
    pub slots_used: u64,
    /// Slots that a failed write has left unusable.
    pub slots_bad: u64,
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Runs of 2^order slots that were taken, by order.
    pub swpout: [u64; ORDERS],
    /// Runs that no area had room for, so that a smaller one was tried, by order.
    pub swpout_fallback: [u64; ORDERS],
    /// Write transfers that have ended.
    pub writes: u64,
    /// Read transfers that have ended.
    pub reads: u64,
    /// Bytes of the writes that did not fail.
    pub bytes_written: u64,
    /// Bytes of the reads that did not fail.
    pub bytes_read: u64,
    /// Objects that were read a second time, alone.
    pub reads_again: u64,
    /// Clusters that a disk was told to forget.
    pub clusters_discarded: u64,
    /// Transfers that failed since the disk was full.
    pub failed_full: u64,
    /// Transfers that failed since the system was busy.
    pub failed_busy: u64,
    /// Transfers that failed since the medium did.
    pub failed_medium: u64,
    /// Those of `failed_busy` and `failed_medium` that were writes.
    pub writes_failed: u64,
    /// Slots that did not open: not the bytes that were written.
    pub tampered: u64,
    /// Batches with a write that was refused since as many slots as allowed are in use.
    pub refused_limit: u64,
    /// Batches with a write that was refused since no area has slots for it, while the owner is about to add some.
    pub refused_growing: u64,
    /// Batches with a write that was refused since no area has slots for it.
    pub refused_full: u64,
    /// Requests that were refused: all buffers are on their way.
    pub refused_busy: u64,
    /// Bytes of tables.
    pub table_bytes: u64,
    /// Bytes of buffers.
    pub buffer_bytes: u64,
}

/// One area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AreaStatus {
    /// Its number.
    pub id: AreaId,
    /// Its priority.
    pub priority: i32,
    /// Its slots.
    pub slots: u32,
    /// Those in use.
    pub slots_used: u64,
    /// Those that can be taken: neither in use nor bad.
    pub slots_free: u64,
    /// Its objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slots that are kept for children alone: their objects have ended in this process.
    pub slots_left: u64,
    /// It is another process's, and nothing is written there.
    pub is_frozen: bool,
    /// Children may read what was there when they were forked.
    pub is_shared: bool,
    /// Nothing is written there, since it is to be empty.
    pub is_draining: bool,
}

impl Areas {
    /// The figures of all areas together.
    #[must_use]
    pub fn stats(&self) -> AreasStats {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let of_orders =
            |counters: &[AtomicU64; ORDERS]| std::array::from_fn(|at| of(&counters[at]));
        let counters = &self.counters;
        let mut stats = AreasStats {
            swpout: of_orders(&counters.swpout),
            swpout_fallback: of_orders(&counters.swpout_fallback),
            writes: of(&counters.writes),
            reads: of(&counters.reads),
            bytes_written: of(&counters.bytes_written),
            bytes_read: of(&counters.bytes_read),
            reads_again: of(&counters.reads_again),
            clusters_discarded: of(&counters.clusters_discarded),
            failed_full: of(&counters.failed_full),
            failed_busy: of(&counters.failed_busy),
            failed_medium: of(&counters.failed_medium),
            writes_failed: of(&counters.writes_failed),
            tampered: of(&counters.tampered),
            refused_limit: of(&counters.refused_limit),
            refused_growing: of(&counters.refused_growing),
            refused_full: of(&counters.refused_full),
            refused_busy: of(&counters.refused_busy),
            buffer_bytes: self.buffer_bytes as u64,
            ..AreasStats::default()
        };
        for area in self.all() {
            // What a parent has used counts there.
            stats.slots_used += if area.is_frozen() { 0 } else { area.slots_used() };
            stats.slots_bad += of(&area.slots_bad);
            stats.objects += of(&area.objects);
            stats.bytes += of(&area.bytes);
            stats.table_bytes += area.table_bytes() as u64;
        }
        stats
    }

    /// [`AreasStats::refused_growing`] and [`AreasStats::refused_full`].
    #[must_use]
    pub fn refused_for_room(&self) -> u64 {
        self.counters.refused_growing.load(Relaxed) + self.counters.refused_full.load(Relaxed)
    }

    /// One area; `None` if there is none of this number.
    #[must_use]
    pub fn status(&self, id: AreaId) -> Option<AreaStatus> {
        self.area(id).map(|area| AreaStatus {
            id,
            priority: area.priority,
            slots: area.slots.total(),
            slots_used: area.slots_used(),
            slots_free: u64::from(area.slots.total().saturating_sub(area.slots.used())),
            objects: area.objects.load(Relaxed),
            bytes: area.bytes.load(Relaxed),
            slots_left: area.slots_left(),
            is_frozen: area.is_frozen(),
            is_shared: area.is_shared(),
            is_draining: area.is_draining(),
        })
    }
}
