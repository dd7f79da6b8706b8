//! How many buffers of which size, for a budget of bytes.
//!
//! Frames get half of the budget, reads the rest: a quarter of that reads of one object each, of which several are
//! outstanding when faults are random, the others long ones, for objects that were written together.
//!
//! | largest object | budget | frames | short reads | long reads |
//! | --- | --- | --- | --- | --- |
//! | 4 KiB | 64 KiB | 2 of 4 slots | 2 of 2 slots | none |
//! | 4 KiB | 768 KiB | 3 of 32 | 12 of 2 | 4 of 16 |
//! | 4 KiB | 2 MiB | 8 of 32 | 32 of 2 | 12 of 16 |
//! | 64 KiB | 768 KiB | 3 of 32 | 5 of 17 | none |
//! | 2 MiB | 16 MiB | 4 of 512 | 3 of 513 | none |

use super::disk::SLOT_BYTES;
use super::frame::{FRAME_ORDER, Frame};
use super::read::Read;

/// Slots of a frame, unless one object has more.
const FRAME_SLOTS: usize = 1 << FRAME_ORDER;

/// Slots of a long read.
const LONG_SLOTS: usize = 16;

/// Buffers of one kind, at most.
const BUFFERS_MAX: usize = 64;

/// Long reads, at most.
const LONG_READS_MAX: usize = 16;

/// Numbers of buffers, and their slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Buffers {
    pub(super) frames: usize,
    pub(super) frame_slots: usize,
    pub(super) short_reads: usize,
    pub(super) short_slots: usize,
    pub(super) long_reads: usize,
    pub(super) long_slots: usize,
}

impl Buffers {
    /// For objects of at most `object_bytes_max` bytes. Two frames and two reads there are with any budget.
    pub(super) fn new(object_bytes_max: usize, budget_bytes: usize) -> Buffers {
        let object = object_bytes_max.div_ceil(SLOT_BYTES);
        let budget = budget_bytes / SLOT_BYTES;
        let frame_slots = FRAME_SLOTS.min(budget / 4).max(object);
        let frames = (budget / 2 / frame_slots).clamp(2, BUFFERS_MAX);
        let reads = budget.saturating_sub(frames * frame_slots);
        // An object may begin anywhere in its first slot.
        let short_slots = object + 1;
        let long_slots = LONG_SLOTS;
        let has_long = long_slots > short_slots;
        let for_short = if has_long { reads / 4 } else { reads };
        let short_reads = (for_short / short_slots).clamp(2, BUFFERS_MAX);
        let left = reads.saturating_sub(short_reads * short_slots);
        let long_reads = if has_long { (left / long_slots).min(LONG_READS_MAX) } else { 0 };
        Buffers { frames, frame_slots, short_reads, short_slots, long_reads, long_slots }
    }

    /// Bytes of all of them, with the lists beside each.
    pub(super) fn memory_bytes(&self) -> usize {
        let reads: usize = self.reads().map(Read::memory_bytes).sum();
        self.frames * Frame::memory_bytes(self.frame_slots) + reads
    }

    /// The slots of each read.
    pub(super) fn reads(&self) -> impl Iterator<Item = usize> {
        let short = std::iter::repeat_n(self.short_slots, self.short_reads);
        short.chain(std::iter::repeat_n(self.long_slots, self.long_reads))
    }
}

#[cfg(test)]
mod tests {
    use super::Buffers;

    fn of(object_bytes_max: usize, budget_bytes: usize) -> [usize; 6] {
        let b = Buffers::new(object_bytes_max, budget_bytes);
        [b.frames, b.frame_slots, b.short_reads, b.short_slots, b.long_reads, b.long_slots]
    }

    /// Goal: the table in the header is right.
    #[test]
    fn buffers_follow_from_budget_and_object() {
        assert_eq!(of(4096, 64 << 10), [2, 4, 2, 2, 0, 16]);
        assert_eq!(of(4096, 768 << 10), [3, 32, 12, 2, 4, 16]);
        assert_eq!(of(4096, 2 << 20), [8, 32, 32, 2, 12, 16]);
        assert_eq!(of(64 << 10, 768 << 10), [3, 32, 5, 17, 0, 16]);
        assert_eq!(of(2 << 20, 16 << 20), [4, 512, 3, 513, 0, 16]);
    }

    /// Goal: no budget is passed unless one object needs more, and there are always buffers.
    #[test]
    fn a_budget_is_kept_where_it_can_be() {
        for order in 0..10 {
            let object = 4096_usize << order;
            for budget in [0, 4096, 32 << 10, 100_000, 1 << 20, 8 << 20, 64 << 20] {
                let [frames, frame, short, short_slots, long, long_slots] = of(object, budget);
                assert!(frames >= 2 && frame * 4096 >= object);
                assert!(short >= 2 && short_slots * 4096 > object);
                let bytes = 4096 * (frames * frame + short * short_slots + long * long_slots);
                let least = 4 * object + 2 * 4096;
                assert!(
                    bytes <= budget.max(least) + 2 * object + 2 * 4096,
                    "{order}: {bytes} {budget}"
                );
            }
        }
    }
}
