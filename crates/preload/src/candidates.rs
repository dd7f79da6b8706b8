//! Candidates: the mappings that the engine may manage, before and after it registers them.
//!
//! # Invariants
//!
//! - `CAND-1` `noted` holds the private anonymous mappings of the program that the engine may register;
//!   neighbours are joined. Before the engine takes over it manages none of them. Afterwards it manages all
//!   except the `fresh` ones, which are handed over together, under the same lock. Once it has given up
//!   (before a `fork`) it manages none of them again.
//! - `CAND-2` Every range that the engine manages is noted and not fresh, unless the program moved it by a raw
//!   system call: then the kernel's events tell the engine, which keeps what it manages if the range is
//!   handed over as fresh later (`ADOPT-1`). So a change of any other range does not concern the engine.
//! - `CAND-3` `reserved` holds the part of `noted` that was never accessible (`PROT_NONE`): address space
//!   without pages. It is empty once the engine has taken over.
//!
//! # Concurrency
//!
//! One lock, held with all signals blocked. The data under it is never managed, so that no access to it
//! faults. A thread that holds the lock may ask the mapping proxy to adopt the fresh ranges; the mapping
//! proxy never takes the lock.

mod noted;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use zfolio_pager::Engine;
use zfolio_sys::signal::{self, Mask};

use crate::heap::{Held, Lock};
use crate::mapping_proxy::{Call, ask};
use noted::Noted;

pub(crate) use noted::Taken;

static LOCK: Lock = Lock::new();
static RANGES: Kept = Kept(UnsafeCell::new(Noted::new()));
/// Bytes noted and not reserved, to be read without the lock.
static MANAGEABLE: AtomicU64 = AtomicU64::new(0);
/// Whether any range is reserved, to be read without the lock.
static HAS_RESERVED: AtomicBool = AtomicBool::new(false);
/// The engine, once it has taken over.
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// The engine, as soon as it exists.
static MADE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// Whether the engine has given up: see [`note_given_up`].
static HAS_GIVEN_UP: AtomicBool = AtomicBool::new(false);

struct Kept(UnsafeCell<Noted>);

// SAFETY: reached only through a Candidates, which holds the lock.
unsafe impl Sync for Kept {}

/// One bit for each 64 MiB of the 47-bit address space (2^21 bits): whether any of it was ever manageable.
///
/// A filter: most calls of `munmap` and `madvise` concern other memory, and must not wait for the lock.
static GRANULES: [AtomicU8; 1 << 18] = [const { AtomicU8::new(0) }; 1 << 18];
const GRANULE_BITS: u32 = 26;

/// The guard of the lock on the ranges; signals are blocked while it lives. Fields drop in this order.
pub(crate) struct Candidates {
    _held: Held<'static>,
    blocked: Blocked,
}

/// While it lives, this thread gets no signal.
pub(crate) struct Blocked(Mask);

impl Blocked {
    pub(crate) fn begin() -> Blocked {
        Blocked(signal::block_all())
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        signal::restore(&self.0);
    }
}

/// Takes the lock.
pub(crate) fn lock() -> Candidates {
    let blocked = Blocked::begin();
    Candidates { _held: LOCK.lock(), blocked }
}

impl Candidates {
    /// Releases the lock, for a change that is about to be made of what was [taken](Self::take). The caller keeps the
    /// answer until the change is made, and drops what was taken before it: a signal handler may leave by a jump, or
    /// fork, and a fork waits for the heap's lock, which this thread holds while it frees what was taken.
    #[must_use]
    pub(crate) fn release(self) -> Blocked {
        self.blocked
    }

    fn ranges(&mut self) -> &mut Noted {
        // SAFETY: the lock is held, and `&mut self` is the one way to the ranges.
        unsafe { &mut *RANGES.0.get() }
    }

    /// Notes a range that was mapped. If there is an engine, the range is fresh.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.ranges().insert(start, end, engine().is_some());
        self.publish(start, end);
    }

    /// Notes a range that is not fresh: there is no engine, or the engine manages the range.
    pub(crate) fn note(&mut self, start: usize, end: usize) {
        self.ranges().insert(start, end, false);
        self.publish(start, end);
    }

    /// Notes a range that is not accessible yet. The engine has not taken over.
    pub(crate) fn reserve(&mut self, start: usize, end: usize) {
        self.ranges().reserve(start, end);
        self.publish(start, end);
    }

    /// Notes that a range has become accessible.
    pub(crate) fn allow(&mut self, start: usize, end: usize) {
        self.ranges().allow(start, end);
        self.count();
    }

    /// Removes a range, and returns how many bytes of it were noted.
    pub(crate) fn remove(&mut self, start: usize, end: usize) -> usize {
        let gone = self.ranges().remove(start, end);
        self.count();
        gone
    }

    /// Removes a range that is about to be changed. If the change fails, [`Candidates::put_back`] restores it.
    pub(crate) fn take(&mut self, start: usize, end: usize) -> Taken {
        let taken = self.ranges().take(start, end);
        self.count();
        taken
    }

    /// Notes again what [`Candidates::take`] removed, and no more: a call may name a range of which only a
    /// part was mapped.
    pub(crate) fn put_back(&mut self, taken: &Taken) {
        self.ranges().put_back(taken);
        self.count();
    }

    /// Whether the engine may manage any of a range, so that the mapping proxy must make the change.
    pub(crate) fn is_engines(&mut self, start: usize, end: usize) -> bool {
        engine().is_some() && self.ranges().is_managed(start, end)
    }

    /// All ranges, for the engine that takes over.
    pub(crate) fn all(&mut self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranges().all()
    }

    /// If `bytes` or more are fresh, has the mapping proxy adopt all of them; returns how many it adopted.
    ///
    /// The lock stays held, so that no other thread can unmap a fresh range and map something else there.
    pub(crate) fn adopt_fresh(&mut self, bytes: usize) -> usize {
        let Some(fresh) = self.ranges().take_fresh(bytes.max(1)) else { return 0 };
        // Adopting does not fail: ranges that cannot be registered are just not managed.
        ask(Call::Adopt, [&raw const fresh as usize, 0, 0, 0, 0, 0]).ok();
        fresh.bytes()
    }

    fn count(&mut self) {
        let ranges = self.ranges();
        HAS_RESERVED.store(ranges.has_reserved(), Ordering::Relaxed);
        MANAGEABLE.store(ranges.manageable_bytes() as u64, Ordering::Relaxed);
    }

    /// Makes a range that was added known to those who look without the lock.
    fn publish(&mut self, start: usize, end: usize) {
        self.count();
        mark(start, end);
    }

    /// The engine, if it has taken over.
    pub(crate) fn engine(&self) -> Option<&'static Engine> {
        engine()
    }

    /// In a child that cannot have its parent's engine: nothing is managed there, and nothing is fresh. Who handed over
    /// what was fresh in the parent would wait for ever, since there is no mapping proxy.
    pub(crate) fn forget_engine(&mut self) {
        ENGINE.store(std::ptr::null_mut(), Ordering::Release);
        drop(self.ranges().take_fresh(0));
    }

    /// Publishes the engine. Since the lock is held, no mapping changes at the same time.
    pub(crate) fn set_engine(&mut self, engine: &'static Engine) {
        self.ranges().allow(0, usize::MAX);
        self.count();
        // Release: pairs with the Acquire in engine().
        ENGINE.store(std::ptr::from_ref(engine).cast_mut(), Ordering::Release);
    }
}

/// The engine, if it has taken over.
pub(crate) fn engine() -> Option<&'static Engine> {
    // SAFETY: null, or what set_engine() stored, which lives as long as the process.
    unsafe { ENGINE.load(Ordering::Acquire).as_ref() }
}

/// Keeps an engine for the life of the process.
pub(crate) fn keep_engine(engine: Engine) -> &'static Engine {
    let engine = Box::leak(Box::new(engine));
    MADE.store(engine, Ordering::Release);
    engine
}

/// The engine manages nothing from here on, since a child could not have what its parent needs. Called by the mapping
/// proxy, which carries out all that has mappings managed. False: that was so already.
pub(crate) fn note_given_up() -> bool {
    !HAS_GIVEN_UP.swap(true, Ordering::Relaxed)
}

/// Whether the engine, of this process or of one before it that has forked, manages nothing for good.
pub(crate) fn has_given_up() -> bool {
    HAS_GIVEN_UP.load(Ordering::Relaxed)
}

/// In a child of `fork` whose parent's engine managed nothing: the child makes its own.
pub(crate) fn forget_made() {
    MADE.store(std::ptr::null_mut(), Ordering::Relaxed);
}

/// The engine, whether it has taken over yet or not.
pub(crate) fn made() -> Option<&'static Engine> {
    // SAFETY: null, or what keep_engine() stored, which lives as long as the process.
    unsafe { MADE.load(Ordering::Acquire).as_ref() }
}

/// Whether there are noted ranges that were never accessible.
pub(crate) fn has_reserved() -> bool {
    HAS_RESERVED.load(Ordering::Relaxed)
}

/// Bytes of manageable mappings that are accessible.
pub(crate) fn manageable_bytes() -> u64 {
    MANAGEABLE.load(Ordering::Relaxed)
}

/// The granules that a range lies in. The result is cut at the end of the address space, since a call may
/// name any addresses.
fn granules(start: usize, end: usize) -> std::ops::Range<usize> {
    let last = (end - 1) >> GRANULE_BITS;
    start >> GRANULE_BITS..last.saturating_add(1).min(8 * GRANULES.len())
}

/// Records that a range may be managed.
pub(crate) fn mark(start: usize, end: usize) {
    for granule in granules(start, end) {
        if let Some(bits) = GRANULES.get(granule / 8) {
            bits.fetch_or(1 << (granule % 8), Ordering::Relaxed);
        }
    }
}

/// Whether any of a range was ever manageable.
pub(crate) fn may_be_managed(start: usize, end: usize) -> bool {
    if end <= start {
        return false;
    }
    granules(start, end).any(|granule| {
        GRANULES
            .get(granule / 8)
            .is_some_and(|bits| bits.load(Ordering::Relaxed) >> (granule % 8) & 1 == 1)
    })
}
