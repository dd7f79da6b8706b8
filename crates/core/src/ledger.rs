//! One limit for a tree of processes: who may use how much of it.
//!
//! The ledger lies in memory that all processes of a run have mapped. Each has a slot with its
//! **share**, the bytes that it may charge. What is not in a share is **free**. A process takes
//! chunks from `free` before it grows into them; a supervisor (`zfolio run`) sets **targets**, and
//! frees the slots of processes that are gone.
//!
//! ```text
//!            take: free -= n, then share += n
//!   free  <------------------------------------->  share of a slot
//!            give: share -= n, then free += n
//! ```
//!
//! # Invariants
//!
//! - `LEDGER-1` While nobody is between the two steps of a `take` or `give`, `free` plus all shares
//!   is the total.
//! - `LEDGER-2` Both steps take away first and add afterwards. A process that is killed in between
//!   makes the sum too small, never too large; [`Ledger::missing_bytes`] is what the supervisor may
//!   put back.
//! - `LEDGER-3` The share of a slot is changed by its owner only; by the supervisor once the owner
//!   is gone.
//! - `LEDGER-4` All bytes zero is a valid ledger: one without a total and without slots in use.
//!
//! # Concurrency
//!
//! Atomic words, no lock: the holder of a lock in shared memory may be stopped or killed. The
//! numbers are `Relaxed`, since each step changes one word and decides by that word alone. `owner`
//! publishes a slot.
//!
//! # Cost
//!
//! 64 bytes a slot, 64 KiB in all. `take` is one compare-and-swap and one addition.

use std::fmt;

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use Ordering::{Acquire, Relaxed, Release};

mod member;

#[cfg(all(test, feature = "loom"))]
mod loom_tests;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

pub use member::Member;

/// Processes that can have a share at once.
#[cfg(not(all(test, feature = "loom")))]
pub const SLOTS: usize = 1024;
#[cfg(all(test, feature = "loom"))]
pub(crate) const SLOTS: usize = 3;

/// "zledger\1" as a little-endian word. The last byte is the version of the layout.
pub const LEDGER_MAGIC: u64 = u64::from_le_bytes(*b"zledger\x01");

/// How the names of the files end that hold ledgers.
pub const FILE_SUFFIX: &str = ".ledger";

/// What a process takes at its start: a 64th of the total, within these bounds.
const FIRST_SHARE: u64 = 64;
const FIRST_BYTES_MIN: u64 = 4 << 20;
const FIRST_BYTES_MAX: u64 = 64 << 20;

/// What a process takes at once when it grows: a 64th of the total, within these bounds.
const CHUNK_SHARE: u64 = 64;
const CHUNK_BYTES_MIN: u64 = 1 << 20;
const CHUNK_BYTES_MAX: u64 = 64 << 20;

/// The process watches its own size, and so comes down to a target.
const WATCHES: u32 = 1;
/// The process was forked, and has executed no program since: its pages may be another process's
/// too.
const FORKED: u32 = 2;

/// A process, as it sees itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Owner {
    /// Its id in its own PID namespace.
    pub pid: u32,
    /// The number of that namespace; 0 if it is not known.
    pub namespace: u32,
    /// When it started, in clock ticks; 0 if that is not known.
    pub start_ticks: u64,
}

impl Owner {
    fn word(self) -> u64 {
        u64::from(self.namespace) << 32 | u64::from(self.pid)
    }
}

/// The words of one process.
#[repr(C)]
#[derive(Default)]
struct Slot {
    /// Process id and PID namespace; 0: the slot is not in use.
    owner: AtomicU64,
    start_ticks: AtomicU64,
    share_bytes: AtomicU64,
    /// 0: no target.
    target_bytes: AtomicU64,
    shared_bytes: AtomicU64,
    charge_bytes: AtomicU64,
    waited_ns: AtomicU64,
    flags: AtomicU32,
    forced: AtomicU32,
}

/// See the module.
#[repr(C)]
pub struct Ledger {
    magic: AtomicU64,
    /// `size_of::<Ledger>()`.
    bytes: AtomicU32,
    /// The PID of `zfolio run`.
    run: AtomicU32,
    total_bytes: AtomicU64,
    free_bytes: AtomicI64,
    /// What a process that has a fair part must leave free.
    reserve_bytes: AtomicU64,
    /// An equal part of the total for each process.
    fair_bytes: AtomicU64,
    /// What all processes together charge, at the supervisor's last look; and the highest such sum.
    sum_bytes: AtomicU64,
    sum_bytes_max: AtomicU64,
    /// Slots that were ever in use: the ones after them need not be looked at.
    used: AtomicU32,
    _padding: [AtomicU32; 15],
    slots: [Slot; SLOTS],
}

#[cfg(not(all(test, feature = "loom")))]
const _: () = {
    assert!(size_of::<Slot>() == 64, "a cache line");
    assert!(std::mem::offset_of!(Ledger, slots) % 64 == 0);
    assert!(size_of::<Ledger>() == 128 + 64 * SLOTS);
};

impl Default for Ledger {
    fn default() -> Self {
        Ledger {
            magic: AtomicU64::default(),
            bytes: AtomicU32::default(),
            run: AtomicU32::default(),
            total_bytes: AtomicU64::default(),
            free_bytes: AtomicI64::default(),
            reserve_bytes: AtomicU64::default(),
            fair_bytes: AtomicU64::default(),
            sum_bytes: AtomicU64::default(),
            sum_bytes_max: AtomicU64::default(),
            used: AtomicU32::default(),
            _padding: std::array::from_fn(|_| AtomicU32::default()),
            slots: std::array::from_fn(|_| Slot::default()),
        }
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("total_bytes", &self.total_bytes())
            .field("free_bytes", &self.free_bytes())
            .field("seats", &self.seats().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// A size as a number that may be subtracted from.
#[must_use]
pub fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Ledger {
    /// The name of the file in which a run's processes share a ledger.
    #[must_use]
    pub fn file_name(run: u64) -> String {
        format!("{run}{FILE_SUFFIX}")
    }

    /// Begins a ledger of zeros: all of `total_bytes` is free.
    pub fn begin(&self, run: u32, total_bytes: u64) {
        self.bytes.store(u32::try_from(size_of::<Ledger>()).expect("64 KiB"), Relaxed);
        self.run.store(run, Relaxed);
        self.total_bytes.store(total_bytes, Relaxed);
        self.free_bytes.store(signed(total_bytes), Relaxed);
        self.fair_bytes.store(total_bytes, Relaxed);
        // Release: pairs with the Acquire in is_whole().
        self.magic.store(LEDGER_MAGIC, Release);
    }

    /// Whether the ledger has begun, and was made by a build with this layout.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        // Acquire: pairs with the Release in begin().
        self.magic.load(Acquire) == LEDGER_MAGIC
            && self.bytes.load(Relaxed) as usize == size_of::<Ledger>()
    }

    /// The PID of the run.
    #[must_use]
    pub fn run(&self) -> u32 {
        self.run.load(Relaxed)
    }

    /// The limit of the tree.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Relaxed)
    }

    /// What nobody has. Negative: shares were taken by force.
    #[must_use]
    pub fn free_bytes(&self) -> i64 {
        self.free_bytes.load(Relaxed)
    }

    /// What a process takes when it grows.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        (self.total_bytes() / CHUNK_SHARE).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    }

    /// Sets what is kept free for new processes, and what an equal part is.
    pub fn set_reserve(&self, reserve_bytes: u64, fair_bytes: u64) {
        self.reserve_bytes.store(reserve_bytes, Relaxed);
        self.fair_bytes.store(fair_bytes, Relaxed);
    }

    /// Notes what all processes together charge.
    pub fn note_sum(&self, bytes: u64) {
        self.sum_bytes.store(bytes, Relaxed);
        self.sum_bytes_max.fetch_max(bytes, Relaxed);
    }

    /// What all processes together charge, and the highest such sum.
    #[must_use]
    pub fn sum_bytes(&self) -> (u64, u64) {
        (self.sum_bytes.load(Relaxed), self.sum_bytes_max.load(Relaxed))
    }

    /// Gives a process a slot and its first share; returns the number of the slot. `None`: none is
    /// free.
    ///
    /// A process that has a slot already has executed another program: it keeps the slot, and no
    /// more than a first share.
    #[must_use]
    pub fn enter(&self, owner: Owner) -> Option<usize> {
        let first = (self.total_bytes() / FIRST_SHARE).clamp(FIRST_BYTES_MIN, FIRST_BYTES_MAX);
        if let Some((index, seat)) = self.seats().find(|(_, seat)| seat.owner() == owner) {
            seat.slot.start_over();
            seat.give_down_to(first);
            return Some(index);
        }
        // Acquire: what release() wrote into the slot comes before what its next owner writes.
        let claim = |slot: &Slot| slot.owner.compare_exchange(0, owner.word(), Acquire, Relaxed);
        let index = self.slots.iter().position(|slot| claim(slot).is_ok())?;
        self.used.fetch_max(u32::try_from(index + 1).expect("few slots"), Relaxed);
        let seat = self.seat(index);
        seat.slot.start_ticks.store(owner.start_ticks, Relaxed);
        if seat.take(first, first) == 0 {
            seat.force(FIRST_BYTES_MIN);
        }
        Some(index)
    }

    /// The slot of that number.
    ///
    /// # Panics
    ///
    /// There are not so many.
    #[must_use]
    pub fn seat(&self, index: usize) -> Seat<'_> {
        Seat { ledger: self, slot: &self.slots[index] }
    }

    /// The slots in use.
    pub fn seats(&self) -> impl Iterator<Item = (usize, Seat<'_>)> {
        let used = self.used.load(Relaxed) as usize;
        let all = self.slots.iter().take(used).enumerate();
        all.map(|(index, slot)| (index, Seat { ledger: self, slot })).filter(|(_, s)| s.is_used())
    }

    /// Frees the slot of a process that is gone, or that leaves by itself: its share is free.
    pub fn release(&self, index: usize) {
        let seat = self.seat(index);
        seat.give_down_to(0);
        seat.slot.start_over();
        seat.slot.start_ticks.store(0, Relaxed);
        seat.slot.target_bytes.store(0, Relaxed);
        seat.slot.charge_bytes.store(0, Relaxed);
        // Release: pairs with the Acquire in enter().
        seat.slot.owner.store(0, Release);
    }

    /// What is neither free nor in a share. Above 0 while a process takes or gives; it stays so if the
    /// process was killed meanwhile (`LEDGER-2`).
    #[must_use]
    pub fn missing_bytes(&self) -> i64 {
        let shares: u64 = self.slots.iter().map(|slot| slot.share_bytes.load(Relaxed)).sum();
        signed(self.total_bytes()) - self.free_bytes() - signed(shares)
    }

    /// Puts back what a killed process has lost.
    pub fn refund(&self, bytes: u64) {
        self.free_bytes.fetch_add(signed(bytes), Relaxed);
    }
}

impl Slot {
    /// Forgets what the program before `execve` has done.
    fn start_over(&self) {
        self.shared_bytes.store(0, Relaxed);
        self.waited_ns.store(0, Relaxed);
        self.flags.store(0, Relaxed);
    }
}

/// A slot of a ledger.
#[derive(Clone, Copy)]
pub struct Seat<'l> {
    ledger: &'l Ledger,
    slot: &'l Slot,
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
    fn is_used(&self) -> bool {
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
        let share = self.share_bytes();
        let bound = self.target_bytes().unwrap_or(u64::MAX).saturating_sub(share);
        // What it may take although less than the reserve is left.
        let small = (self.ledger.fair_bytes.load(Relaxed) / 2).saturating_sub(share);
        let reserve = signed(self.ledger.reserve_bytes.load(Relaxed));
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

    /// The process was just forked, and has `resident_bytes`: the parent pays for all of them.
    pub fn set_forked(&self, resident_bytes: u64) {
        self.set_shared(resident_bytes);
        self.slot.flags.fetch_or(FORKED, Relaxed);
    }

    /// Notes what the process has resident, and how long it has waited.
    pub fn note(&self, resident_bytes: u64, waited_ns: u64) {
        let charge = resident_bytes.saturating_sub(self.shared_bytes());
        self.slot.charge_bytes.store(charge, Relaxed);
        self.slot.waited_ns.store(waited_ns, Relaxed);
    }
}
