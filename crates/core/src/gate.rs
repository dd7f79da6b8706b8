//! A gate: many threads pass it at once, and one that closes it finds nobody inside.
//!
//! It is for locks that belong to somebody else's code (the program's allocator) and that no thread may hold at a
//! moment of our choice (`fork`). Each thread enters before it takes such a lock, and leaves after it has released it.
//!
//! ```text
//!             enter                 close: nobody is inside
//!   n inside ------> n + 1 inside          0 inside ------> closed ------> 0 inside
//!            <------                                               open
//!             leave                 close: somebody is inside
//!                                          n inside ------> n inside, wanted
//! ```
//!
//! # Invariants
//!
//! - `GATE-1` While it is closed nobody is inside, except the thread that closed it.
//! - `GATE-2` A thread that is inside can always enter once more. Otherwise it would keep its first lock while it waits
//!   for its second one, and the gate could not be closed before it has left. So "wanted" only asks for a pause.
//!
//! # Concurrency
//!
//! Each step is one compare-and-swap of one word. `closer` is compared with the number of the thread that reads it, and
//! each thread sees what it has written itself: `Relaxed` is enough.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use Ordering::{AcqRel, Acquire, Relaxed};

#[cfg(all(test, feature = "loom"))]
mod loom_tests;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

/// The bits of the word above the count of threads that are inside.
const CLOSED: u32 = 1 << 31;
const WANTED: u32 = 1 << 30;

/// What became of an attempt to enter.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Entrance {
    /// The thread is inside.
    Inside,
    /// A thread wants to close the gate: to pause once, and then to [insist](Gate::try_enter), lets it.
    Wanted,
    /// The gate is closed: try again.
    Closed,
}

/// A gate. Threads are told apart by a number of the caller's that is not 0.
#[derive(Debug)]
pub struct Gate {
    word: AtomicU32,
    closer: AtomicUsize,
}

impl Gate {
    /// An open gate, with nobody inside.
    #[cfg(not(all(test, feature = "loom")))]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0), closer: AtomicUsize::new(0) }
    }

    /// The same, of loom's words, which are not constant.
    #[cfg(all(test, feature = "loom"))]
    pub fn new() -> Self {
        Self { word: AtomicU32::new(0), closer: AtomicUsize::new(0) }
    }

    /// Enters. The thread that has closed the gate passes always. A thread that has paused after [`Entrance::Wanted`]
    /// insists.
    pub fn try_enter(&self, thread: usize, insists: bool) -> Entrance {
        let mut word = self.word.load(Relaxed);
        loop {
            if word & CLOSED != 0 {
                let is_own = self.closer.load(Relaxed) == thread;
                return if is_own { Entrance::Inside } else { Entrance::Closed };
            }
            if word & WANTED != 0 && !insists {
                return Entrance::Wanted;
            }
            // Acquire: pairs with the step of open().
            match self.word.compare_exchange_weak(word, word + 1, Acquire, Relaxed) {
                Ok(_) => return Entrance::Inside,
                Err(now) => word = now,
            }
        }
    }

    /// Leaves. Without effect for the thread that has closed the gate, which is not counted, and in a child of `fork`
    /// for one that was inside when all was [forgotten](Self::start_over).
    pub fn leave(&self) {
        let one_less = |word: u32| (word & !(CLOSED | WANTED) != 0).then(|| word - 1);
        // Release: pairs with the Acquire of try_close().
        self.word.fetch_update(AcqRel, Relaxed, one_less).ok();
    }

    /// Closes the gate if nobody is inside. Otherwise it is wanted from now on; whoever gives up opens it.
    pub fn try_close(&self, thread: usize) -> bool {
        let mut word = self.word.load(Relaxed);
        loop {
            if word & CLOSED != 0 {
                return false;
            }
            let is_empty = word & !WANTED == 0;
            let next = if is_empty { CLOSED } else { word | WANTED };
            // Acquire: pairs with the Release of leave().
            match self.word.compare_exchange_weak(word, next, AcqRel, Relaxed) {
                Ok(_) if is_empty => {
                    self.closer.store(thread, Relaxed);
                    return true;
                }
                Ok(_) => return false,
                Err(now) => word = now,
            }
        }
    }

    /// Opens the gate that this thread has closed, or wants no more to close.
    pub fn open(&self, thread: usize) {
        let is_own = self.closer.load(Relaxed) == thread;
        if is_own {
            self.closer.store(0, Relaxed);
        }
        let opened =
            |word: u32| (is_own || word & CLOSED == 0).then_some(word & !(CLOSED | WANTED));
        // Release: pairs with the Acquires of the next thread that enters or closes.
        self.word.fetch_update(AcqRel, Relaxed, opened).ok();
    }

    /// In a child of `fork`, with its one thread: opens the gate, and nobody is inside.
    pub fn start_over(&self) {
        self.closer.store(0, Relaxed);
        self.word.store(0, Relaxed);
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}
