//! Manageable mappings: all of them, and those that the kernel still serves alone.
//!
//! # Invariants
//!
//! - `NAT-1` `noted` are private anonymous mappings of the program, neighbours joined, that the engine
//!   may register. Before it takes over it has none of them; from then on all but the `fresh` ones,
//!   which are handed over together, under the same lock.
//! - `NAT-2` What the engine manages is noted and not fresh, but for what raw system calls have moved. So
//!   a change of anything else needs no engine.
//! - `NAT-3` `reserved` is what of `noted` nobody could touch yet (`PROT_NONE`): address space only. Once the
//!   engine has taken over it is empty.
//!
//! # Concurrency
//!
//! One lock, held with all signals blocked. Nothing under it is managed, so nothing under it faults. The
//! keeper is asked under it to adopt what is fresh, and takes it never.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use zfolio_core::ranges::Ranges;
use zfolio_pager::Engine;
use zfolio_sys::signal::{self, Mask};

use crate::heap::{Held, Lock};
use crate::keeper::{Call, ask};

static LOCK: Lock = Lock::new();
static RANGES: Kept = Kept(UnsafeCell::new(Noted {
    noted: Ranges::new(),
    fresh: Ranges::new(),
    reserved: Ranges::new(),
}));
/// Bytes noted that may be in use, for a look without the lock.
static MANAGEABLE: AtomicU64 = AtomicU64::new(0);
/// Whether there is anything in `RESERVED`, likewise.
static HAS_RESERVED: AtomicBool = AtomicBool::new(false);
/// The engine, once it has taken over.
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// The engine, from when it is made.
static MADE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());

/// See `NAT-1`.
struct Noted {
    noted: Ranges,
    fresh: Ranges,
    reserved: Ranges,
}

/// What [`Native::take`] took: ranges noted, and those of them that were fresh.
pub(crate) struct Taken {
    noted: Vec<(usize, usize)>,
    fresh: Vec<(usize, usize)>,
}

impl Taken {
    /// Whether there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.noted.is_empty()
    }
}

struct Kept(UnsafeCell<Noted>);

// SAFETY: reached through Native, which holds the lock.
unsafe impl Sync for Kept {}

/// Address space that was ever manageable, in granules of 64 MiB of a 47-bit space: 2^21 bits.
///
/// A filter: most `munmap` and `madvise` calls are about something else, and must not wait for us.
static GRANULES: [AtomicU8; 1 << 18] = [const { AtomicU8::new(0) }; 1 << 18];
const GRANULE_BITS: u32 = 26;

/// The ranges under their lock, signals blocked.
pub(crate) struct Native {
    mask: Mask,
    held: Option<Held<'static>>,
}

/// Takes the lock.
pub(crate) fn lock() -> Native {
    let mask = signal::block_all();
    Native { mask, held: Some(LOCK.lock()) }
}

impl Drop for Native {
    fn drop(&mut self) {
        self.held = None;
        signal::restore(&self.mask);
    }
}

impl Native {
    fn ranges(&mut self) -> &mut Noted {
        // SAFETY: the lock is held, and `&mut self` is the one way to the ranges.
        unsafe { &mut *RANGES.0.get() }
    }

    /// Notes a range that was mapped. The engine, if there is one, has it with the next that are adopted.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.note(start, end);
        if engine().is_some() {
            self.ranges().fresh.join(start, end);
        }
    }

    /// Notes a range that the engine has, or is about to have.
    pub(crate) fn note(&mut self, start: usize, end: usize) {
        self.ranges().noted.join(start, end);
        self.ranges().reserved.remove(start, end);
        self.count();
        mark(start, end);
    }

    /// Notes a range that nobody can touch yet. The engine has not taken over.
    pub(crate) fn reserve(&mut self, start: usize, end: usize) {
        self.note(start, end);
        self.ranges().reserved.insert(start, end);
        self.count();
    }

    /// What of a range was only reserved may be in use from now on.
    pub(crate) fn allow(&mut self, start: usize, end: usize) {
        self.ranges().reserved.remove(start, end);
        self.count();
    }

    /// Forgets a range; tells how many bytes of it were noted.
    pub(crate) fn remove(&mut self, start: usize, end: usize) -> usize {
        let ranges = self.ranges();
        ranges.fresh.remove(start, end);
        ranges.reserved.remove(start, end);
        let gone = ranges.noted.remove(start, end);
        self.count();
        gone
    }

    /// Forgets a range that is about to be changed; [`Native::put_back`] is for a change that fails.
    pub(crate) fn take(&mut self, start: usize, end: usize) -> Taken {
        let Noted { noted, fresh, .. } = self.ranges();
        let taken = Taken {
            noted: noted.pieces(start, end).collect(),
            fresh: fresh.pieces(start, end).collect(),
        };
        self.remove(start, end);
        taken
    }

    /// Notes what was forgotten, and nothing else: a call may name more than was ever mapped.
    pub(crate) fn put_back(&mut self, taken: &Taken) {
        for (start, end) in &taken.noted {
            self.note(*start, *end);
        }
        for (start, end) in &taken.fresh {
            self.ranges().fresh.join(*start, *end);
        }
    }

    /// Whether the engine may have any of a range, and must be asked before it changes.
    pub(crate) fn is_engines(&mut self, start: usize, end: usize) -> bool {
        if engine().is_none() {
            return false;
        }
        let Noted { noted, fresh, .. } = self.ranges();
        noted.bytes_in(start, end) > fresh.bytes_in(start, end)
    }

    /// All ranges, for the engine that takes over.
    pub(crate) fn all(&mut self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ranges().noted.iter()
    }

    /// Has the keeper adopt what is fresh, once that is `bytes` or more, and tells how much that was.
    /// Under the lock: nobody can have unmapped any of it meanwhile, and something else be there.
    pub(crate) fn adopt_fresh(&mut self, bytes: usize) -> usize {
        let fresh = &mut self.ranges().fresh;
        if fresh.bytes() < bytes.max(1) {
            return 0;
        }
        let fresh = std::mem::take(fresh);
        // It does not fail: what cannot be registered stays the kernel's.
        ask(Call::Adopt, [&raw const fresh as usize, 0, 0, 0, 0, 0]).ok();
        fresh.bytes()
    }

    fn count(&mut self) {
        let Noted { noted, reserved, .. } = self.ranges();
        HAS_RESERVED.store(reserved.bytes() > 0, Ordering::Relaxed);
        MANAGEABLE.store((noted.bytes() - reserved.bytes()) as u64, Ordering::Relaxed);
    }

    /// The engine, if it has taken over.
    pub(crate) fn engine(&self) -> Option<&'static Engine> {
        engine()
    }

    /// In a child that could not have an engine of its own: nothing is managed there.
    pub(crate) fn forget_engine() {
        ENGINE.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Publishes the engine. The lock is held: no mapping changes meanwhile.
    pub(crate) fn set_engine(&mut self, engine: &'static Engine) {
        self.ranges().reserved = Ranges::new();
        self.count();
        // Release: pairs with the Acquire in engine().
        ENGINE.store(std::ptr::from_ref(engine).cast_mut(), Ordering::Release);
    }
}

/// The engine, if there is one.
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

/// The engine, whether it has taken over yet or not.
pub(crate) fn made() -> Option<&'static Engine> {
    // SAFETY: null, or what keep_engine() stored, which lives as long as the process.
    unsafe { MADE.load(Ordering::Acquire).as_ref() }
}

/// Whether address space was noted that nobody could touch yet.
pub(crate) fn has_reserved() -> bool {
    HAS_RESERVED.load(Ordering::Relaxed)
}

/// Bytes of manageable mappings that may be in use.
pub(crate) fn manageable_bytes() -> u64 {
    MANAGEABLE.load(Ordering::Relaxed)
}

/// The granules that a range lies in. A call may name addresses up to the end of all words, which no mapping has.
fn granules(start: usize, end: usize) -> std::ops::Range<usize> {
    let last = (end - 1) >> GRANULE_BITS;
    start >> GRANULE_BITS..last.saturating_add(1).min(8 * GRANULES.len())
}

/// Remembers that a range may be managed.
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
