//! A share of a tree's limit (`zfolio_core::ledger`): the limit in force is what the ledger says.
//!
//! The background thread notes the charge, comes down to a target, and takes more before the low
//! watermark. A thread that finds the limit reached takes a chunk, if one is free, before it
//! reclaims.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::budget::Bucket;
use zfolio_core::ledger::{Ledger, Member, Seat, signed};

use super::Charge;
use super::over_limit::OverLimit;
use crate::engine::Engine;

/// By so much of the total the tree may be over its limit, with memory that does not compress,
/// before that is reported.
const DEBT_SHARE: u64 = 16;

impl Charge {
    /// The process's slot, if its limit is a share.
    pub(super) fn seat(&self) -> Option<Seat<'static>> {
        self.share.get()?.seat()
    }
}

/// The pause of the background thread after the limit has fallen. It doubles while the limit does
/// not fall again.
const FALLING_PAUSE_MS: u64 = 2;

/// Whether the limit falls: pages that a child of `fork` copies lower its limit without a fault of
/// the engine, so the background thread has to look more often.
#[derive(Debug, Default)]
pub(super) struct Falling {
    /// The limit at the last sample.
    limit_bytes: AtomicU64,
    pause_ms: AtomicU64,
}

impl Falling {
    fn note(&self, limit_bytes: u64) {
        let before = self.limit_bytes.swap(limit_bytes, Relaxed);
        let longer = self.pause_ms.load(Relaxed).saturating_mul(2);
        let pause = if limit_bytes < before { FALLING_PAUSE_MS } else { longer };
        self.pause_ms.store(pause, Relaxed);
    }

    /// The pause until the next sample, at most `most`.
    fn pause(&self, most: Duration) -> Duration {
        match self.pause_ms.load(Relaxed) {
            0 => most,
            pause => Duration::from_millis(pause).min(most),
        }
    }
}

impl Engine {
    /// From now on the limit is the share of `member`, within the limit of the settings, which is
    /// the tree's.
    pub fn hold_share(&self, member: &'static Member) {
        // Once only: a child of `fork` has the same member.
        self.charge.share.set(member).ok();
    }

    /// Notes the charge in the ledger; gives back what is above the target, or takes more before it
    /// is needed.
    pub(super) fn follow_share(&self) {
        let Some(seat) = self.charge.seat() else { return };
        let charge = self.charge_bytes();
        seat.note(charge, self.stats().waited_ns());
        self.charge.falling.note(seat.limit_bytes());
        if let Some(member) = self.charge.share.get() {
            self.prepare_for_limit(member.ledger().total_bytes());
            self.share_disk(member.ledger(), seat);
        }
        match seat.target_bytes().filter(|target| *target < seat.share_bytes()) {
            Some(target) => {
                seat.give_down_to(target.max(seat.charge_bytes()));
            }
            None => {
                let ahead = seat.copies_ahead_bytes();
                let free = signed(self.mover.free_bytes() as u64);
                if self.below_limit() + free < signed(self.charge.low_bytes() + ahead) {
                    self.grow(self.charge.high_bytes() + ahead);
                }
            }
        }
    }

    /// What may be spilled is that of the settings, less what the other processes have on disk now. Between two looks
    /// all of them together may pass it by what they write meanwhile.
    fn share_disk(&self, ledger: &Ledger, seat: Seat<'_>) {
        let Some(place) = &self.work.place else { return };
        let ours = self.figures().spill_slot_bytes.load(Relaxed);
        seat.note_spilled(ours);
        let others = ledger.spilled_bytes().saturating_sub(ours);
        place.set_limit(place.limit_bytes().saturating_sub(others));
    }

    /// The budget for writes to the disk: the run's, or the process's own.
    pub(crate) fn writes(&self) -> &Bucket {
        match (self.charge.share.get(), self.charge.seat()) {
            (Some(member), Some(_)) => member.ledger().writes(),
            _ => &self.work.spilling.writes,
        }
    }

    /// Counts a fault that was served, for who counts the kernel's.
    pub(crate) fn count_served(&self) {
        if let Some(seat) = self.charge.seat() {
            seat.count_served();
        }
    }

    /// The pause of the background thread until its next turn, at most `most`.
    pub(crate) fn pause(&self, most: Duration) -> Duration {
        self.charge.falling.pause(most)
    }

    /// Takes more from the ledger, so that `bytes` fit below the limit. False: so much is not to be
    /// had.
    pub(crate) fn grow(&self, bytes: u64) -> bool {
        let (Some(member), Some(seat)) = (self.charge.share.get(), self.charge.seat()) else {
            return false;
        };
        let least = (self.charge_bytes() + bytes).saturating_sub(self.limit_bytes()).max(1);
        seat.take(least, least.max(member.ledger().chunk_bytes())) > 0
    }

    /// Takes what is held above the limit although it is not free: it cannot be reclaimed, and the
    /// other processes must give way. False: they have nothing left to give, or the limit is the
    /// process's own.
    pub(super) fn force_share(&self, over: &OverLimit) -> bool {
        let (Some(member), Some(seat)) = (self.charge.share.get(), self.charge.seat()) else {
            return false;
        };
        let ledger = member.ledger();
        let debt = i64::try_from(ledger.total_bytes() / DEBT_SHARE).unwrap_or(i64::MAX);
        let missing = over.charged_bytes.saturating_sub(over.limit_bytes);
        let is_payable = i64::try_from(missing)
            .is_ok_and(|missing| ledger.free_bytes().saturating_sub(missing) >= -debt);
        if is_payable {
            // The share may be above the target that is the limit.
            let charge = over.charged_bytes.saturating_sub(seat.shared_bytes());
            seat.force(charge.saturating_sub(seat.share_bytes()));
            seat.set_target(None);
        }
        is_payable
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zfolio_core::budget::WriteBudget;
    use zfolio_core::ledger::{Ledger, Member, Owner};

    use super::Falling;
    use crate::config::Mode;
    use crate::engine::Engine;

    const MIB: u64 = 1 << 20;

    fn member(ledger: &'static Ledger, pid: u32) -> &'static Member {
        let owner = Owner { pid, namespace: 0, start_ticks: 1 };
        Box::leak(Box::new(Member::new(ledger, owner).unwrap()))
    }

    #[test]
    fn the_background_thread_looks_more_often_while_the_limit_falls() {
        let (falling, most) = (Falling::default(), Duration::from_millis(20));
        assert_eq!(falling.pause(most), most);
        let pauses = [90, 90, 80, 80, 80, 80, 80, 80, 85, 70].map(|limit| {
            falling.note(limit);
            falling.pause(most).as_millis()
        });
        assert_eq!(pauses, [20, 20, 2, 4, 8, 16, 20, 20, 20, 2]);
    }

    /// Goal: a process takes what it needs while it is free, comes down to a target, gives the rest
    /// back, and keeps every byte. Method: an engine adopts more than a first share, with another
    /// process in the ledger.
    #[test]
    #[allow(unsafe_code, reason = "what a program does")]
    fn a_process_takes_what_is_free_and_comes_down_to_its_target() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let ledger: &Ledger = Box::leak(Box::default());
        ledger.begin(1, 64 * MIB);
        let (ours, other) = (member(ledger, 1), member(ledger, 2).seat().unwrap());
        let engine = Engine::inline_for_test(64 * MIB);
        let engine: &Engine = Box::leak(Box::new(engine));
        let served = crate::inline::register(engine).unwrap();
        assert_eq!(engine.writes().budget(), WriteBudget::NONE, "its own");
        let budget = "1G/day".parse().expect("a budget");
        ledger.writes().set(budget);
        engine.hold_share(ours);
        assert_eq!(engine.writes().budget(), budget, "that of all processes together");
        let seat = ours.seat().unwrap();
        assert_eq!(engine.limit_bytes(), 4 * MIB, "a first share");
        let pages = || (0..40 << 20).step_by(4096);
        let value = |at: usize| u8::try_from(at >> 12 & 0xff).unwrap();
        let space = engine.adopted(40 << 20, |bytes| pages().for_each(|at| bytes[at] = value(at)));
        engine.make_room(space.bytes());
        assert!(engine.limit_bytes() > 40 * MIB && engine.below_limit() > 0, "it was free");
        assert_eq!(engine.figures().snapshot().reclaim_direct, 0);

        seat.set_target(Some(16 * MIB));
        assert_eq!(engine.limit_bytes(), 16 * MIB, "at once");
        for _ in 0..100 {
            engine.reclaim_turn();
        }
        engine.make_room(space.bytes());
        engine.sample();
        assert_eq!(seat.share_bytes(), 16 * MIB);
        assert!(engine.charge_bytes() <= 16 * MIB, "{}", engine.charge_bytes());
        assert_eq!(ledger.missing_bytes(), 0);
        let all = u64::try_from(ledger.free_bytes()).unwrap();
        assert_eq!(all, 44 * MIB, "all but 16 MiB and the first share of the other");
        assert_eq!(other.take(all, all), all);

        // Nothing is free: what is touched again comes at the cost of the rest.
        seat.set_target(None);
        for at in pages() {
            // SAFETY: inside the mapping.
            let byte = unsafe { space.base().add(at) };
            // SAFETY: the mapping is ours, and nobody else has a reference into it.
            let byte = unsafe { byte.read_volatile() };
            assert_eq!(byte, value(at));
        }
        assert_eq!(engine.limit_bytes(), 16 * MIB);
        engine.unmap_adopted(&space);
        drop(served);
    }
}
