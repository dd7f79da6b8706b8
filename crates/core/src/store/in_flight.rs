//! The number of requests that are in flight.
//!
//! # Concurrency
//!
//! Whoever submits requests begins them: writes under the store's lock, reads without it. Whoever completes or refuses
//! them ends them. Who finds none in flight sees all that was done before they ended.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::AtomicUsize;
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Requests that are about to be accepted, or were and are not completed.
#[derive(Default, Debug)]
pub(super) struct InFlight(AtomicUsize);

impl InFlight {
    /// Before requests are submitted, so that a completion never comes first.
    pub(super) fn begin(&self, count: usize) {
        self.0.fetch_add(count, Relaxed);
    }

    /// A request is completed, or was refused. With the lock held this may come before what it does to its entry: who
    /// acts on the count looks with the lock held too.
    pub(super) fn end(&self) {
        // Release: pairs with the Acquire in count().
        self.0.fetch_sub(1, Release);
    }

    /// How many.
    pub(super) fn count(&self) -> usize {
        // Acquire: who finds none sees what all have done.
        self.0.load(Acquire)
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;
    use std::sync::atomic::Ordering::Relaxed;

    use super::InFlight;

    /// Goal: who finds no request in flight sees what was done for all of them, and the count is right at each look.
    /// Method: two threads do something for a request each; one of them submits another request before.
    #[test]
    fn loom_who_finds_none_sees_what_was_done() {
        loom::model(|| {
            let shared = Arc::new((InFlight::default(), [AtomicU32::new(0), AtomicU32::new(0)]));
            shared.0.begin(2);
            let threads = [1, 0].map(|more| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (in_flight, done) = &*shared;
                    in_flight.begin(more);
                    for _ in 0..more {
                        in_flight.end();
                    }
                    done[more].store(1, Relaxed);
                    in_flight.end();
                })
            });
            let (in_flight, done) = &*shared;
            let count = in_flight.count();
            assert!(count <= 3, "{count}");
            let done = || done.iter().map(|done| done.load(Relaxed)).sum::<u32>();
            assert!(count > 0 || done() == 2, "none in flight, and {} done", done());
            threads.into_iter().for_each(|thread| thread.join().expect("nothing panics"));
            assert_eq!((in_flight.count(), done()), (0, 2));
        });
    }
}
