//! Notifies the program that the limit is passed, on a thread where any code may run.
//!
//! The limit is passed while a fault is served, when no code of the program may run. So the fault
//! stores the figures here and rings a bell, and a thread of its own calls the program's function.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use zfolio_sys::futex;

use crate::charge::OverLimit;

/// The program's function.
pub(crate) type Callback = dyn Fn(&OverLimit) + Send + Sync;

/// The figures of the last time that the limit was passed, and the bell.
pub(crate) struct Notice {
    /// `limit`, `charged`, `resident`, `staged`, `pool`. Each is stored by itself, so they may belong to
    /// different moments.
    figures: [AtomicU64; 5],
    /// How often the bell rang; the listening thread sleeps on it.
    bell: AtomicU32,
    stopping: AtomicBool,
}

impl Notice {
    pub(crate) fn new() -> Notice {
        Notice {
            figures: [const { AtomicU64::new(0) }; 5],
            bell: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    /// Called by a fault when the limit is passed.
    pub(crate) fn ring(&self, over: &OverLimit) {
        // The limit too: it is not always that of the start (`zfolio set`).
        let told = [
            over.limit_bytes,
            over.charged_bytes,
            over.resident_bytes,
            over.staged_bytes,
            over.pool_bytes,
        ];
        for (figure, value) in self.figures.iter().zip(told) {
            figure.store(value, Relaxed);
        }
        self.wake();
    }

    fn wake(&self) {
        // Release: pairs with the Acquire in listen(), which then reads the figures stored before.
        self.bell.fetch_add(1, std::sync::atomic::Ordering::Release);
        futex::wake(&self.bell, 1);
    }

    /// Ends [`Notice::listen`].
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Relaxed);
        self.wake();
    }

    /// The life of the thread: calls the program's function after the bell rang, until it is
    /// stopped.
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
            let [limit_bytes, charged_bytes, resident_bytes, staged_bytes, pool_bytes] =
                [0, 1, 2, 3, 4].map(|index: usize| self.figures[index].load(Relaxed));
            callback(&OverLimit {
                limit_bytes,
                is_share: false,
                charged_bytes,
                resident_bytes,
                staged_bytes,
                pool_bytes,
                unmanaged_bytes: 0,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::Notice;
    use crate::charge::OverLimit;

    /// Goal: the function gets the figures of the moment, the limit among them. The limit was that with which the
    /// pager was built, also after another process had set one.
    #[test]
    fn the_function_gets_the_figures_of_the_moment() {
        let over = OverLimit {
            limit_bytes: 5 << 20,
            is_share: false,
            charged_bytes: 9 << 20,
            resident_bytes: 4 << 20,
            staged_bytes: 3 << 20,
            pool_bytes: 2 << 20,
            unmanaged_bytes: 0,
        };
        let (sender, receiver) = mpsc::channel();
        let notice = Arc::new(Notice::new());
        let theirs = Arc::clone(&notice);
        let thread = std::thread::spawn(move || {
            theirs.listen(&move |over: &OverLimit| sender.send(*over).unwrap());
        });
        for limit_bytes in [5 << 20, 7 << 20] {
            let over = OverLimit { limit_bytes, ..over };
            notice.ring(&over);
            assert_eq!(receiver.recv().unwrap(), over);
        }
        notice.stop();
        thread.join().unwrap();
    }
}
