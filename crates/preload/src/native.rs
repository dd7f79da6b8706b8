//! Manageable mappings while the kernel still serves them alone.
//!
//! # Invariants
//!
//! - `NAT-1` `ranges` are whole private anonymous mappings of the program, or parts of them, that the
//!   engine may register; they are kept until the engine takes them over, under the same lock.
//! - `NAT-2` `reserved` is what of them nobody could touch yet (`PROT_NONE`): address space only.
//!
//! # Concurrency
//!
//! One lock, held with all signals blocked. Nothing under it is managed, so nothing under it faults.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use zfolio_core::ranges::Ranges;
use zfolio_pager::Engine;
use zfolio_sys::signal::{self, Mask};

use crate::heap::{Held, Lock};

static LOCK: Lock = Lock::new();
static RANGES: Kept = Kept(UnsafeCell::new(Ranges::new()));
static RESERVED: Kept = Kept(UnsafeCell::new(Ranges::new()));
/// Bytes in `RANGES` that may be in use, for a look without the lock.
static MANAGEABLE: AtomicU64 = AtomicU64::new(0);
/// Whether there is anything in `RESERVED`, likewise.
static HAS_RESERVED: AtomicBool = AtomicBool::new(false);
/// The engine, once it has taken over.
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// The engine, from when it is made.
static MADE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());

struct Kept(UnsafeCell<Ranges>);

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
    fn ranges(&mut self) -> &mut Ranges {
        // SAFETY: the lock is held, and `&mut self` is the one way to the map.
        unsafe { &mut *RANGES.0.get() }
    }

    fn reserved(&mut self) -> &mut Ranges {
        // SAFETY: as above.
        unsafe { &mut *RESERVED.0.get() }
    }

    /// Notes a range.
    pub(crate) fn insert(&mut self, start: usize, end: usize) {
        self.ranges().insert(start, end);
        self.reserved().remove(start, end);
        self.count();
        mark(start, end);
    }

    /// Notes a range that nobody can touch yet.
    pub(crate) fn reserve(&mut self, start: usize, end: usize) {
        self.ranges().insert(start, end);
        self.reserved().insert(start, end);
        self.count();
        mark(start, end);
    }

    /// What of a range was only reserved may be in use from now on.
    pub(crate) fn allow(&mut self, start: usize, end: usize) {
        self.reserved().remove(start, end);
        self.count();
    }

    /// Forgets a range; tells how many bytes of it were noted.
    pub(crate) fn remove(&mut self, start: usize, end: usize) -> usize {
        let gone = self.ranges().remove(start, end);
        self.reserved().remove(start, end);
        self.count();
        gone
    }

    /// Hands all ranges to the engine, which is theirs from now on.
    pub(crate) fn take_all(&mut self) -> Ranges {
        let all = std::mem::take(self.ranges());
        *self.reserved() = Ranges::new();
        self.count();
        all
    }

    fn count(&mut self) {
        let reserved = self.reserved().bytes();
        HAS_RESERVED.store(reserved > 0, Ordering::Relaxed);
        MANAGEABLE.store((self.ranges().bytes() - reserved) as u64, Ordering::Relaxed);
    }

    /// Whether the engine has taken over.
    pub(crate) fn engine(&self) -> Option<&'static Engine> {
        engine()
    }

    /// In a child that could not have an engine of its own: nothing is managed there.
    pub(crate) fn forget_engine() {
        ENGINE.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Publishes the engine. The lock is held: no mapping changes meanwhile.
    pub(crate) fn set_engine(&mut self, engine: &'static Engine) {
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

/// Remembers that a range may be managed.
pub(crate) fn mark(start: usize, end: usize) {
    for granule in start >> GRANULE_BITS..=(end - 1) >> GRANULE_BITS {
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
    (start >> GRANULE_BITS..=(end - 1) >> GRANULE_BITS).any(|granule| {
        GRANULES
            .get(granule / 8)
            .is_some_and(|bits| bits.load(Ordering::Relaxed) >> (granule % 8) & 1 == 1)
    })
}
