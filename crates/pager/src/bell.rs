//! A bell: what one of the engine's own threads sleeps on while it has nothing to do.
//!
//! ```text
//! the thread   heard = heard(); looks for work; will_sleep(); sleep(heard)
//! the others   provide work; wake_sleeper()
//! ```
//!
//! Work that others provide between the thread's look and `will_sleep` is not announced. A thread
//! that must not miss it looks again after `will_sleep`, under the lock under which work is
//! provided: either it finds the work, or the one who provided it sees that the thread will sleep.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use zfolio_sys::futex;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// The futex: how often the bell rang.
    rings: AtomicU32,
    /// The thread sleeps, or is about to: it must be woken.
    idle: AtomicBool,
}

impl Bell {
    /// How often the bell rang. A ring after this call ends the next [`Bell::sleep`].
    pub(crate) fn heard(&self) -> u32 {
        self.rings.load(Relaxed)
    }

    /// From here on [`Bell::wake_sleeper`] rings.
    pub(crate) fn will_sleep(&self) {
        self.idle.store(true, Relaxed);
    }

    /// Sleeps until the bell rings, or for `pause`; not at all if it rang after `heard`.
    pub(crate) fn sleep(&self, heard: u32, pause: Option<Duration>) {
        futex::wait(&self.rings, heard, pause);
    }

    /// Rings if the thread sleeps or is about to. Returns whether it did.
    pub(crate) fn wake_sleeper(&self) -> bool {
        // Read first: a write would take the bell from the CPU of a thread that looks at it.
        let sleeps = self.idle.load(Relaxed) && self.idle.swap(false, Relaxed);
        if sleeps {
            self.ring();
        }
        sleeps
    }

    /// Rings, whatever the thread does.
    pub(crate) fn ring(&self) {
        self.rings.fetch_add(1, Relaxed);
        futex::wake(&self.rings, 1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Bell;

    /// Goal: a ring that comes before the sleep is not missed, and who does not sleep is rung for once at
    /// most. Method: sleeps that would last an hour.
    #[test]
    fn a_ring_before_the_sleep_ends_it() {
        let (bell, hour) = (Bell::default(), Some(Duration::from_secs(3600)));
        let heard = bell.heard();
        bell.wake_sleeper();
        assert_eq!(bell.heard(), heard, "nobody sleeps");
        bell.will_sleep();
        bell.wake_sleeper();
        bell.wake_sleeper();
        assert_eq!(bell.heard(), heard + 1);
        bell.sleep(heard, hour);
        let heard = bell.heard();
        bell.ring();
        bell.sleep(heard, hour);
    }

    /// Goal: a ring ends a sleep.
    #[test]
    fn a_sleeper_is_woken() {
        let bell = &Bell::default();
        std::thread::scope(|scope| {
            let heard = bell.heard();
            bell.will_sleep();
            let sleeper = scope.spawn(move || {
                while bell.heard() == heard {
                    bell.sleep(heard, None);
                }
            });
            bell.wake_sleeper();
            sleeper.join().unwrap();
        });
    }
}
