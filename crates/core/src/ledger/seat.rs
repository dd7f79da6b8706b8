//! What a process, and the supervisor for it, does with one slot.

use std::fmt;

use super::Ordering::{Acquire, Relaxed};
use super::{FORKED, Ledger, Owner, RECLAIMS, Slot, WATCHES, signed};

/// What a child of `fork` takes at its start, as far as it is free: a 16th of the total. It may copy
/// so much of what it shares with its parent before the supervisor notices.
const FORK_SHARE: u64 = 16;

/// What a process leaves free as long as it only watches its size: a 16th of the total, unless it is
/// the only process. Such a process can grow faster than it watches.
const WATCH_SHARE: u64 = 16;

/// A slot of a ledger.
#[derive(Clone, Copy)]
pub struct Seat<'l> {
    pub(super) ledger: &'l Ledger,
    pub(super) slot: &'l Slot,
}

impl fmt::Debug for Seat<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat")
            .field("owner", &self.owner())
            .field("share_bytes", &self.share_bytes())
            .field("target_bytes", &self.target_bytes())
            .field("shared_bytes", &self.shared_bytes())
            .field("charge_bytes", &self.charge_bytes())
            .finish_non_exhaustive()
    }
}

impl Seat<'_> {
    pub(super) fn is_used(&self) -> bool {
        self.slot.owner.load(Acquire) != 0
    }

    /// Whose it is.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the two halves of a word")]
    pub fn owner(&self) -> Owner {
        let word = self.slot.owner.load(Acquire);
        let start_ticks = self.slot.start_ticks.load(Relaxed);
        Owner { pid: word as u32, namespace: (word >> 32) as u32, start_ticks }
    }

    /// What the process may charge.
    #[must_use]
    pub fn share_bytes(&self) -> u64 {
        self.slot.share_bytes.load(Relaxed)
    }

    /// What its share should come down to, and may not exceed.
    #[must_use]
    pub fn target_bytes(&self) -> Option<u64> {
        Some(self.slot.target_bytes.load(Relaxed)).filter(|target| *target > 0)
    }

    /// What it has resident and another process pays for.
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        self.slot.shared_bytes.load(Relaxed)
    }

    /// What it charged at its last look, without what another process pays for.
    #[must_use]
    pub fn charge_bytes(&self) -> u64 {
        self.slot.charge_bytes.load(Relaxed)
    }

    /// How long its threads have waited for what was compressed.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.slot.waited_ns.load(Relaxed)
    }

    /// What it has on disk.
    #[must_use]
    pub fn spilled_bytes(&self) -> u64 {
        self.slot.spilled_bytes.load(Relaxed)
    }

    /// Notes what it has on disk.
    pub fn note_spilled(&self, bytes: u64) {
        self.slot.spilled_bytes.store(bytes, Relaxed);
    }

    /// How many page faults it has served itself. Each is one of the kernel's count too: the thread repeats its access.
    #[must_use]
    pub fn served(&self) -> u64 {
        self.slot.served.load(Relaxed)
    }

    /// Counts a page fault that the process has served itself.
    pub fn count_served(&self) {
        self.slot.served.fetch_add(1, Relaxed);
    }

    /// How often it took what was not free.
    #[must_use]
    pub fn forced(&self) -> u32 {
        self.slot.forced.load(Relaxed)
    }

    /// Whether it watches its size.
    #[must_use]
    pub fn watches(&self) -> bool {
        self.slot.flags.load(Relaxed) & WATCHES != 0
    }

    /// Whether it reclaims its memory.
    #[must_use]
    pub fn reclaims(&self) -> bool {
        self.slot.flags.load(Relaxed) & RECLAIMS != 0
    }

    /// Whether it was forked, and has executed no program since.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.slot.flags.load(Relaxed) & FORKED != 0
    }

    /// The limit of the process, for all that it has resident.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        let target = self.target_bytes().unwrap_or(u64::MAX);
        self.share_bytes().min(target) + self.shared_bytes()
    }

    /// Takes `least` to `most` bytes from what is free; returns how many. 0: there is less than
    /// `least`, or the target does not allow it.
    ///
    /// The reserve is for processes that have less than half of a fair part.
    #[must_use]
    pub fn take(&self, least: u64, most: u64) -> u64 {
        self.take_and_leave(least, most, 0)
    }

    /// The same for a process that only watches its size. It leaves a part free, since it may have
    /// grown beyond its share when it looks next.
    #[must_use]
    pub fn take_watching(&self, least: u64, most: u64) -> u64 {
        let total = self.ledger.total_bytes();
        let is_alone = self.ledger.fair_bytes() >= total;
        self.take_and_leave(least, most, if is_alone { 0 } else { total / WATCH_SHARE })
    }

    /// Takes as [`Seat::take`], and leaves `left` free.
    fn take_and_leave(&self, least: u64, most: u64, left: u64) -> u64 {
        let share = self.share_bytes();
        let bound = self.target_bytes().unwrap_or(u64::MAX).saturating_sub(share);
        // What it may take although less than the reserve is left.
        let small = (self.ledger.fair_bytes() / 2).saturating_sub(share);
        let reserve = signed(self.ledger.reserve_bytes.load(Relaxed).max(left));
        let free = &self.ledger.free_bytes;
        let mut found = free.load(Relaxed);
        loop {
            let ample = u64::try_from(found.saturating_sub(reserve)).unwrap_or(0);
            let room = ample.max(small.min(u64::try_from(found).unwrap_or(0))).min(bound);
            if room < least || room == 0 {
                return 0;
            }
            let bytes = room.min(most);
            match free.compare_exchange_weak(found, found - signed(bytes), Relaxed, Relaxed) {
                Ok(_) => {
                    self.slot.share_bytes.fetch_add(bytes, Relaxed);
                    return bytes;
                }
                Err(now) => found = now,
            }
        }
    }

    /// Takes bytes whether they are free or not, and drops a target that forbids it: what cannot be
    /// reclaimed is there, and the others must give way.
    pub fn force(&self, bytes: u64) {
        self.ledger.free_bytes.fetch_sub(signed(bytes), Relaxed);
        let share = self.slot.share_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.slot.forced.fetch_add(1, Relaxed);
        if self.target_bytes().is_some_and(|target| target < share) {
            self.set_target(None);
        }
    }

    /// Gives back what the share is above `bytes`; returns how much that was.
    pub fn give_down_to(&self, bytes: u64) -> u64 {
        let lower = |share: u64| (share > bytes).then_some(bytes);
        match self.slot.share_bytes.fetch_update(Relaxed, Relaxed, lower) {
            Ok(before) => {
                self.ledger.free_bytes.fetch_add(signed(before - bytes), Relaxed);
                before - bytes
            }
            Err(_) => 0,
        }
    }

    /// Sets or drops the target. It is never 0.
    pub fn set_target(&self, bytes: Option<u64>) {
        self.slot.target_bytes.store(bytes.map_or(0, |bytes| bytes.max(1)), Relaxed);
    }

    /// Sets what another process pays for.
    pub fn set_shared(&self, bytes: u64) {
        self.slot.shared_bytes.store(bytes, Relaxed);
    }

    /// The process watches its size from now on.
    pub fn set_watches(&self) {
        self.slot.flags.fetch_or(WATCHES, Relaxed);
    }

    /// The process reclaims its memory from now on, and watches its size.
    pub fn set_reclaims(&self) {
        self.slot.flags.fetch_or(WATCHES | RECLAIMS, Relaxed);
    }

    /// The process has copied up to `bytes` of what another process pays for: it pays for these
    /// itself.
    pub fn note_copied(&self, bytes: u64) {
        let less = |shared: u64| Some(shared.saturating_sub(bytes));
        // The function above always has a result.
        self.slot.shared_bytes.fetch_update(Relaxed, Relaxed, less).ok();
    }

    /// The process was just forked, and has `resident_bytes`: the parent pays for all of them. The
    /// process takes what it may copy of them before anybody looks, if that is free.
    pub fn set_forked(&self, resident_bytes: u64) {
        // In this order: the supervisor clears what a process shares that was not forked.
        self.slot.flags.fetch_or(FORKED, Relaxed);
        self.set_shared(resident_bytes);
        let copies = resident_bytes.min(self.ledger.total_bytes() / FORK_SHARE);
        let _taken = self.take_watching(1, copies.max(1));
    }

    /// What a forked process keeps available, since pages that it copies are noticed late.
    #[must_use]
    pub fn copies_ahead_bytes(&self) -> u64 {
        if self.is_forked() {
            self.shared_bytes().min(self.ledger.total_bytes() / (2 * FORK_SHARE))
        } else {
            0
        }
    }

    /// Notes what the process has resident, and how long it has waited.
    pub fn note(&self, resident_bytes: u64, waited_ns: u64) {
        let charge = resident_bytes.saturating_sub(self.shared_bytes());
        self.slot.charge_bytes.store(charge, Relaxed);
        self.slot.waited_ns.store(waited_ns, Relaxed);
    }
}
