//! Telling the program that a limit is passed, on a thread where it may do as it likes.
//!
//! The limit is passed on the way of a fault, where no code of the program's may run. So the fault leaves
//! the figures here and rings, and a thread calls the program's function.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use zfolio_sys::futex;

use crate::charge::OverLimit;

/// What a program is told with.
pub(crate) type Callback = dyn Fn(&OverLimit) + Send + Sync;

/// The function to call, and what it is to be told.
pub(crate) struct Notice {
    limit_bytes: u64,
    /// `charged`, `resident`, `staged`, `pool`: each by itself, as figures are.
    figures: [AtomicU64; 4],
    /// How often it rang.
    bell: AtomicU32,
    stopping: AtomicBool,
}

impl Notice {
    pub(crate) fn new(limit_bytes: u64) -> Notice {
        Notice {
            limit_bytes,
            figures: [const { AtomicU64::new(0) }; 4],
            bell: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    /// From a fault: the limit is passed.
    pub(crate) fn ring(&self, over: &OverLimit) {
        let told = [over.charged_bytes, over.resident_bytes, over.staged_bytes, over.pool_bytes];
        for (figure, value) in self.figures.iter().zip(told) {
            figure.store(value, Relaxed);
        }
        self.wake();
    }

    fn wake(&self) {
        // Release: pairs with the Acquire in listen(), which reads what was stored before.
        self.bell.fetch_add(1, std::sync::atomic::Ordering::Release);
        futex::wake(&self.bell, 1);
    }

    /// Ends [`Notice::listen`].
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Relaxed);
        self.wake();
    }

    /// The thread: calls the program's function each time that the bell rang, until it is stopped.
    pub(crate) fn listen(&self, callback: &Callback) {
        let mut heard = 0;
        loop {
            let bell = self.bell.load(std::sync::atomic::Ordering::Acquire);
            if self.stopping.load(Relaxed) {
                return;
            }
            if bell == heard {
                futex::wait(&self.bell, bell, None);
                continue;
            }
            heard = bell;
            let [charged_bytes, resident_bytes, staged_bytes, pool_bytes] =
                [0, 1, 2, 3].map(|index: usize| self.figures[index].load(Relaxed));
            callback(&OverLimit {
                limit_bytes: self.limit_bytes,
                charged_bytes,
                resident_bytes,
                staged_bytes,
                pool_bytes,
                unmanaged_bytes: 0,
            });
        }
    }
}
