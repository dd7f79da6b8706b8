//! What was taken on one CPU, and what was freed in its clusters.
//!
//! # Invariants
//!
//! - `TALLY-1` Over all CPUs, what [`used`] finds freed, it finds taken too: the difference is never negative.
//!
//! # Concurrency
//!
//! Who takes holds the lock of the CPU, so runs are counted by a load and a store. Frees come from anywhere,
//! and are counted by an addition, in a pair of cache lines of their own. There a CPU that frees meets the
//! one that took, in whose cluster it just was.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicU64, Ordering};

use Ordering::{Acquire, Relaxed, Release};

use super::ORDERS;
use super::counts::Counts;

/// See the module.
#[derive(Debug)]
pub(super) struct Tally {
    swpout: [AtomicU64; ORDERS],
    swpout_fallback: [AtomicU64; ORDERS],
    freed: Freed,
}

#[derive(Debug)]
#[repr(align(128))]
struct Freed(AtomicU64);

impl Tally {
    pub(super) fn new() -> Tally {
        Tally {
            swpout: std::array::from_fn(|_| AtomicU64::new(0)),
            swpout_fallback: std::array::from_fn(|_| AtomicU64::new(0)),
            freed: Freed(AtomicU64::new(0)),
        }
    }

    /// A run of this order was taken. The caller holds the lock of the CPU.
    pub(super) fn count_taken(&self, order: u32) {
        count(&self.swpout[order as usize]);
    }

    /// A run of this order was refused. The caller holds the lock of the CPU.
    pub(super) fn count_refused(&self, order: u32) {
        count(&self.swpout_fallback[order as usize]);
    }

    /// Slots were freed.
    pub(super) fn count_freed(&self, slots: u32) {
        // Release: pairs with the Acquire in `used`.
        self.freed.0.fetch_add(u64::from(slots), Release);
    }

    /// Adds runs taken and refused.
    pub(super) fn add_to(&self, counts: &mut Counts) {
        for order in 0..ORDERS {
            counts.swpout[order] += self.swpout[order].load(Relaxed);
            counts.swpout_fallback[order] += self.swpout_fallback[order].load(Relaxed);
        }
    }

    /// Slots taken up to now.
    fn taken(&self) -> u64 {
        let slots = |(order, runs): (usize, &AtomicU64)| runs.load(Relaxed) << order;
        self.swpout.iter().enumerate().map(slots).sum()
    }
}

/// Slots in use. While others take and free, it may be too large by what was taken meanwhile.
pub(super) fn used<'t>(tallies: impl Iterator<Item = &'t Tally> + Clone) -> u64 {
    // Acquire: pairs with the Release in `count_freed`. Who frees a slot has it from somebody who counted it
    // as taken before; so these loads come first, and those of `taken` find it (TALLY-1).
    let freed: u64 = tallies.clone().map(|tally| tally.freed.0.load(Acquire)).sum();
    let taken: u64 = tallies.map(Tally::taken).sum();
    taken.checked_sub(freed).expect("TALLY-1: what is freed was taken")
}

/// Counts one. Relaxed: the lock of the CPU orders it.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Relaxed) + 1, Relaxed);
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::{Tally, used};

    /// Goal: TALLY-1, whoever frees. Method: a thread takes on one CPU and hands the slots over; another frees
    /// them in two steps, one in a cluster that another CPU has by now; the third counts all the time.
    #[test]
    fn loom_what_is_freed_was_taken() {
        loom::model(|| {
            let tallies = Arc::new([Tally::new(), Tally::new()]);
            let handed_over = Arc::new(AtomicBool::new(false));
            let taker = {
                let (tallies, handed_over) = (Arc::clone(&tallies), Arc::clone(&handed_over));
                thread::spawn(move || {
                    tallies[1].count_taken(1);
                    handed_over.store(true, Release);
                })
            };
            let freer = {
                let (tallies, handed_over) = (Arc::clone(&tallies), Arc::clone(&handed_over));
                thread::spawn(move || {
                    if handed_over.load(Acquire) {
                        tallies[0].count_freed(1);
                        tallies[1].count_freed(1);
                    }
                })
            };
            assert!(used(tallies.iter()) <= 2);
            taker.join().expect("nothing panics");
            freer.join().expect("nothing panics");
            assert_ne!(used(tallies.iter()), 1, "all or nothing was freed");
        });
    }

    /// Goal: no run is lost of two that are counted under the lock of one CPU.
    #[test]
    fn loom_runs_are_counted_under_the_lock() {
        loom::model(|| {
            let tally = Arc::new(Mutex::new(Tally::new()));
            let other = {
                let tally = Arc::clone(&tally);
                thread::spawn(move || tally.lock().expect("nothing panics").count_taken(0))
            };
            tally.lock().expect("nothing panics").count_taken(0);
            other.join().expect("nothing panics");
            assert_eq!(used(std::iter::once(&*tally.lock().expect("nothing panics"))), 2);
        });
    }
}
