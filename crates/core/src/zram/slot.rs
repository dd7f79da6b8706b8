//! A slot: what the device keeps of one unit.
//!
//! # Cost
//!
//! 16 bytes with the lock, for units of any size: 0.39 % of the disk with units of 4 KiB, 0.024 % with 64 KiB. Only
//! units in leaves that were ever written to have one.

use std::fmt;

use super::ALGORITHMS_MAX;
use crate::store::EntryId;
use crate::sync::{Guard, Mutex};

/// The rank of a slot's lock: below everything that the store locks.
pub(super) const RANK_SLOT: u8 = 21;

/// A slot with its lock.
pub(super) type SlotLock = Mutex<RANK_SLOT, Slot>;

const _: () = assert!(size_of::<SlotLock>() == 16);

/// Takes a slot for a request that holds `held` others. It waits only without others, so that nobody waits in a circle:
/// `None` if somebody else has the slot.
pub(super) fn lock_after(held: usize, lock: &SlotLock) -> Option<Guard<'_, RANK_SLOT, Slot>> {
    if held == 0 { Some(lock.lock()) } else { lock.try_lock() }
}

const IDLE: u32 = 1 << 31;
const APART: u32 = 1 << 30;
/// The highest priority of a codec that failed to shrink the unit. The last one: as if it was the last that any device
/// has.
const FAILED: u32 = FAILED_BITS[ALGORITHMS_MAX - 1];
const FAILED_BITS: [u32; ALGORITHMS_MAX] = [0, 1 << 28, 2 << 28, 3 << 28];
/// Seconds since the device was made: 8 years.
const TIME: u32 = (1 << 28) - 1;

/// What the device keeps of a unit.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The copy of the unit as a whole. `None`: the unit is empty, or all of its pages are apart.
    pub(super) entry: Option<EntryId>,
    /// ```text
    /// 31      idle: not used since it was marked
    /// 30      some of its pages are apart, or all of them
    /// 29..28  the highest priority of a codec that could not shrink it; 3: the last codec could not
    /// 27..0   when it was used last, in seconds
    /// ```
    state: u32,
}

impl Slot {
    /// Notes that the unit was read or written.
    pub(super) fn touch(&mut self, now_s: u32) {
        self.state = self.state & (FAILED | APART) | now_s & TIME;
    }

    /// Whether the unit reads as zeros, and takes no memory.
    pub(super) fn is_empty(&self) -> bool {
        self.entry.is_none() && !self.is_apart()
    }

    /// Whether pages of the unit are apart.
    pub(super) fn is_apart(&self) -> bool {
        self.state & APART != 0
    }

    /// Notes whether pages of the unit are apart.
    pub(super) fn set_apart(&mut self, is_apart: bool) {
        self.state = if is_apart { self.state | APART } else { self.state & !APART };
    }

    /// Notes that the unit has other contents. No page of it is apart.
    pub(super) fn renew(&mut self, now_s: u32) {
        self.state = now_s & TIME;
    }

    /// When the unit was used last, by the clock of [`super::Zram::set_now`].
    pub(super) fn used_s(&self) -> u32 {
        self.state & TIME
    }

    /// Whether the unit was marked idle and not used since.
    pub(super) fn is_idle(&self) -> bool {
        self.state & IDLE != 0
    }

    /// Marks the unit.
    pub(super) fn mark_idle(&mut self) {
        self.state |= IDLE;
    }

    /// Ends the mark: something was done with the unit because of it.
    pub(super) fn end_idle(&mut self) {
        self.state &= !IDLE;
    }

    /// Whether the last codec failed to shrink it too.
    pub(super) fn has_no_codec(&self) -> bool {
        self.state & FAILED == FAILED
    }

    /// Notes that the last codec failed to shrink it.
    pub(super) fn note_no_codec(&mut self) {
        self.state |= FAILED;
    }

    /// Whether the codec of this priority failed to shrink it, or one of a higher priority.
    pub(super) fn has_failed(&self, priority: usize) -> bool {
        self.state & FAILED >= FAILED_BITS[priority]
    }

    /// Notes that the codec of this priority, which is not the last one, failed to shrink it.
    pub(super) fn note_failed(&mut self, priority: usize) {
        if !self.has_failed(priority) {
            self.state = self.state & !FAILED | FAILED_BITS[priority];
        }
    }
}

/// The kernel's letters for the state of a unit, in `block_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Letters {
    pub(super) same: bool,
    pub(super) written_back: bool,
    pub(super) huge: bool,
    pub(super) idle: bool,
    pub(super) recompressed: bool,
    pub(super) no_codec: bool,
}

impl fmt::Display for Letters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Letters { same, written_back, huge, idle, recompressed, no_codec } = *self;
        let letters = [
            (same, 's'),
            (written_back, 'w'),
            (huge, 'h'),
            (idle, 'i'),
            (recompressed, 'r'),
            (no_codec, 'n'),
        ];
        letters.iter().try_for_each(|(is, letter)| write!(f, "{}", if *is { *letter } else { '.' }))
    }
}

#[cfg(test)]
mod tests {
    use super::{Letters, Slot, TIME};

    /// Goal: a use ends idleness, new contents end all that was known of the old, and no time runs into a mark.
    #[test]
    fn uses_end_what_they_must() {
        let mut slot = Slot::default();
        slot.touch(7);
        slot.mark_idle();
        slot.note_no_codec();
        assert!(slot.is_idle() && slot.has_no_codec() && slot.used_s() == 7);
        slot.set_apart(true);
        slot.touch(u32::MAX);
        assert!(!slot.is_idle() && slot.has_no_codec() && slot.used_s() == TIME);
        assert!(slot.is_apart() && !slot.is_empty());
        slot.mark_idle();
        slot.renew(9);
        assert!(!slot.is_idle() && !slot.has_no_codec() && slot.used_s() == 9);
        assert!(!slot.is_apart() && slot.is_empty());
    }

    /// Goal: the highest priority that failed is known, whatever the order, until there are other contents.
    #[test]
    fn the_highest_priority_that_failed_is_known() {
        let mut slot = Slot::default();
        slot.touch(u32::MAX);
        assert!([1, 2, 3].iter().all(|priority| !slot.has_failed(*priority)));
        slot.note_failed(2);
        slot.note_failed(1);
        slot.touch(7);
        slot.mark_idle();
        slot.end_idle();
        assert_eq!([1, 2, 3].map(|priority| slot.has_failed(priority)), [true, true, false]);
        assert!(!slot.has_no_codec() && !slot.is_idle() && slot.used_s() == 7);
        slot.note_no_codec();
        slot.note_failed(1);
        assert!(slot.has_no_codec() && slot.has_failed(3));
        slot.renew(9);
        assert!(!slot.has_failed(1));
    }

    #[test]
    fn letters_have_the_order_of_the_kernel() {
        let all = Letters {
            same: true,
            written_back: true,
            huge: true,
            idle: true,
            recompressed: true,
            no_codec: true,
        };
        assert_eq!(all.to_string(), "swhirn");
        let some = Letters { same: false, written_back: false, idle: false, ..all };
        assert_eq!(some.to_string(), "..h.rn");
    }
}
