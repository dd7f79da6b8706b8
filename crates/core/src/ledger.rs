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
//!   put back. If the process was only stopped, and goes on after that, the sum is too large by the
//!   same amount, until the supervisor sees it and takes it away again.
//! - `LEDGER-3` The share of a slot is raised by its owner only. The owner lowers it, and so does the
//!   supervisor: once the owner is gone, or while the owner watches nothing and does not use it. Without
//!   a supervisor a new process takes over the slot of one that is gone.
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
//! 128 bytes a slot, 128 KiB in all. `take` is one compare-and-swap and one addition.

use std::fmt;

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use Ordering::{Acquire, Relaxed, Release};

use crate::budget::Bucket;

mod member;
mod seat;

#[cfg(all(test, feature = "loom"))]
mod loom_tests;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

pub use member::Member;
pub use seat::Seat;

/// Processes that can have a share at once.
#[cfg(not(all(test, feature = "loom")))]
pub const SLOTS: usize = 1024;
#[cfg(all(test, feature = "loom"))]
pub(crate) const SLOTS: usize = 3;

/// "zledger\4" as a little-endian word. The last byte is the version of the layout.
pub const LEDGER_MAGIC: u64 = u64::from_le_bytes(*b"zledger\x04");

/// A process below this size has no use for an engine, whose tables and streams take a few MiB. It
/// pays for what it has, and never gives way.
pub const SMALL_BYTES: u64 = 8 << 20;

/// What a small process has beyond its size when nothing is free.
pub const SMALL_MARGIN_BYTES: u64 = 512 << 10;

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
/// The process reclaims its memory, and so can come down below what it uses.
const RECLAIMS: u32 = 4;

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
    spilled_bytes: AtomicU64,
    served: AtomicU64,
    _padding: [AtomicU64; 6],
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
    /// The number of the run's PID namespace; 0 if it is not known.
    namespace: AtomicU32,
    /// The total that another process asks for; 0: nobody did.
    limit_asked: AtomicU64,
    /// What all processes together may write to disk.
    writes: Bucket,
    /// How many filters the run's system calls go through, and 1 more; 0 if it is not known.
    filters: AtomicU32,
    _padding: [AtomicU32; 3],
    slots: [Slot; SLOTS],
}

#[cfg(not(all(test, feature = "loom")))]
const _: () = {
    assert!(size_of::<Slot>() == 128, "two cache lines");
    assert!(std::mem::offset_of!(Ledger, slots) % 64 == 0);
    assert!(size_of::<Ledger>() == 128 + 128 * SLOTS);
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
            namespace: AtomicU32::default(),
            limit_asked: AtomicU64::default(),
            writes: Bucket::default(),
            filters: AtomicU32::default(),
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

    /// Begins a ledger that is zeros, or that an earlier run has left and no process uses: all of `total_bytes` is
    /// free, and nothing of what the earlier run had, wrote or was asked for remains.
    pub fn begin(&self, run: u32, total_bytes: u64) {
        self.writes.clear();
        self.sum_bytes.store(0, Relaxed);
        self.sum_bytes_max.store(0, Relaxed);
        self.limit_asked.store(0, Relaxed);
        self.set_surroundings(0, None);
        self.bytes.store(u32::try_from(size_of::<Ledger>()).expect("128 KiB"), Relaxed);
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

    /// Notes in which PID namespace that is the run's, and how many filters (seccomp) its system calls go through.
    pub fn set_surroundings(&self, namespace: u32, filters: Option<u32>) {
        self.namespace.store(namespace, Relaxed);
        self.filters.store(filters.map_or(0, |count| count.saturating_add(1)), Relaxed);
    }

    /// Whether a process with these may look at the run's processes as the run does: process ids mean the same, and no
    /// filter of the program's own forbids more.
    #[must_use]
    pub fn sees_the_same(&self, namespace: u32, filters: impl FnOnce() -> Option<u32>) -> bool {
        let is_here = namespace != 0 && self.namespace.load(Relaxed) == namespace;
        is_here && filters().is_some_and(|count| self.filters.load(Relaxed) == count + 1)
    }

    /// The limit of the tree.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Relaxed)
    }

    /// Where in a ledger's file another process writes the total that it asks for.
    #[cfg(not(all(test, feature = "loom")))]
    pub const LIMIT_ASKED_AT: usize = std::mem::offset_of!(Ledger, limit_asked);

    /// The total that was asked for last; 0: none was.
    #[must_use]
    pub fn limit_asked(&self) -> u64 {
        self.limit_asked.load(Relaxed)
    }

    /// Makes the total what another process asks for, if it does. The supervisor calls this.
    pub fn follow_asked(&self) {
        let asked = self.limit_asked();
        if asked != 0 && asked != self.total_bytes() {
            self.set_total(asked);
        }
    }

    /// Changes the total: what is more is free, what is less may be missing, so that `free_bytes` is
    /// below 0 until the processes have given way.
    ///
    /// In between more seems to be taken than there is, never less: if the supervisor is killed
    /// there, nobody takes too much.
    fn set_total(&self, total_bytes: u64) {
        let before = self.total_bytes();
        if total_bytes < before {
            self.free_bytes.fetch_sub(signed(before - total_bytes), Relaxed);
            self.total_bytes.store(total_bytes, Relaxed);
        } else {
            self.total_bytes.store(total_bytes, Relaxed);
            self.free_bytes.fetch_add(signed(total_bytes - before), Relaxed);
        }
    }

    /// What all processes together may write to disk.
    #[must_use]
    pub fn writes(&self) -> &Bucket {
        &self.writes
    }

    /// Where in a ledger's file another process writes the words of another budget ([`Bucket::words`]).
    #[cfg(not(all(test, feature = "loom")))]
    pub const WRITES_AT: usize = std::mem::offset_of!(Ledger, writes);

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

    /// An equal part of the total for each process. The total: there is only one process.
    #[must_use]
    pub fn fair_bytes(&self) -> u64 {
        self.fair_bytes.load(Relaxed)
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
    /// A process that has a slot already has executed another program: it keeps the slot, no more
    /// than a first share, and no target.
    #[must_use]
    pub fn enter(&self, owner: Owner) -> Option<usize> {
        if let Some((index, seat)) = self.seats().find(|(_, seat)| seat.owner() == owner) {
            seat.slot.start_over();
            seat.give_down_to(self.first_bytes());
            return Some(index);
        }
        // Acquire: what release() wrote into the slot comes before what its next owner writes.
        let claim = |slot: &Slot| slot.owner.compare_exchange(0, owner.word(), Acquire, Relaxed);
        let index = self.slots.iter().position(|slot| claim(slot).is_ok())?;
        self.used.fetch_max(u32::try_from(index + 1).expect("few slots"), Relaxed);
        self.begin_slot(index, owner);
        Some(index)
    }

    /// As [`Ledger::enter`], for a process whose supervisor is gone, so that nobody frees the slots of the dead: it
    /// takes over the slot of one that `is_gone`, if there is one, and gives back what that had.
    #[must_use]
    pub fn enter_or_take_over(
        &self,
        owner: Owner,
        is_gone: impl Fn(Owner) -> bool,
    ) -> Option<usize> {
        let take_over = |seat: &Seat<'_>| {
            let gone = seat.owner();
            // Two that take it over meet here. Acquire: as in enter().
            let claim =
                || seat.slot.owner.compare_exchange(gone.word(), owner.word(), Acquire, Relaxed);
            is_gone(gone) && claim().is_ok()
        };
        let Some((index, _)) = self.seats().find(|(_, seat)| take_over(seat)) else {
            return self.enter(owner);
        };
        self.clear(index);
        self.begin_slot(index, owner);
        Some(index)
    }

    /// Begins a slot that its owner has just got.
    fn begin_slot(&self, index: usize, owner: Owner) {
        let (seat, first) = (self.seat(index), self.first_bytes());
        seat.slot.start_ticks.store(owner.start_ticks, Relaxed);
        if seat.take(first, first) == 0 {
            seat.force(SMALL_MARGIN_BYTES);
        }
    }

    /// What a process takes at its start.
    fn first_bytes(&self) -> u64 {
        (self.total_bytes() / FIRST_SHARE).clamp(FIRST_BYTES_MIN, FIRST_BYTES_MAX)
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
        self.clear(index);
        // Release: pairs with the Acquire in enter().
        self.slots[index].owner.store(0, Release);
    }

    /// Makes the share of a slot free, and forgets all but its owner.
    fn clear(&self, index: usize) {
        let seat = self.seat(index);
        seat.give_down_to(0);
        seat.slot.start_over();
        seat.slot.start_ticks.store(0, Relaxed);
        seat.slot.charge_bytes.store(0, Relaxed);
    }

    /// What is neither free nor in a share. Above 0 while a process takes or gives; it stays so if the
    /// process was killed meanwhile. Below 0: so much is there twice, since it was put back for a
    /// process that was only stopped (`LEDGER-2`).
    #[must_use]
    pub fn missing_bytes(&self) -> i64 {
        let shares: u64 = self.slots.iter().map(|slot| slot.share_bytes.load(Relaxed)).sum();
        signed(self.total_bytes()) - self.free_bytes() - signed(shares)
    }

    /// What all processes have on disk.
    #[must_use]
    pub fn spilled_bytes(&self) -> u64 {
        self.seats().map(|(_, seat)| seat.spilled_bytes()).sum()
    }

    /// Makes free what is missing, or takes from what is free what is there twice: `missing` is from
    /// [`Ledger::missing_bytes`]. If less is free than that, the processes have to give way.
    pub fn settle(&self, missing: i64) {
        self.free_bytes.fetch_add(missing, Relaxed);
    }
}

impl Slot {
    /// Forgets what the program before `execve` has done.
    fn start_over(&self) {
        self.shared_bytes.store(0, Relaxed);
        self.waited_ns.store(0, Relaxed);
        self.spilled_bytes.store(0, Relaxed);
        self.served.store(0, Relaxed);
        self.flags.store(0, Relaxed);
        // It was for what that program had to give. After the flags: the supervisor sets none without them.
        self.target_bytes.store(0, Relaxed);
    }
}
