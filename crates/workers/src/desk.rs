//! Where one worker waits, and gets its offers.
//!
//! ```text
//! free       --offer-->     offered    the worker is woken if it sleeps
//! offered    --withdraw-->  free       by the submitter, whose batch is done without this worker
//! offered    --next-->      busy       by the worker
//! busy       --finish-->    free       by the worker, which does not touch the batch from then on
//! ```
//!
//! A worker sleeps only after it has said so and has looked once more; who offers looks whether it sleeps after the
//! offer. Both steps are separated by a fence: so either the worker sees the offer, or it is woken.
//!
//! A desk to which no thread has come, or has come yet, is absent: it gets no offers, which would keep those workers
//! asleep that could take them.

use std::ptr;

#[cfg(not(all(test, feature = "loom")))]
use zfolio_sys::futex;

use crate::atomic::{AtomicPtr, AtomicU32, Ordering, fence};

/// The bit of a desk whose worker is at work on the batch, which is aligned to more than that.
const BUSY: usize = 1;

/// See the module.
#[derive(Debug)]
pub(crate) struct Desk<T> {
    /// Null: free.
    batch: AtomicPtr<T>,
    /// A futex: [`ASLEEP`] while the worker sleeps, or is about to.
    state: AtomicU32,
}

/// What the worker of a desk does, in the order in which desks get offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    /// It looks for an offer, and need not be woken.
    Awake,
    /// It sleeps, or is about to.
    Asleep,
    /// It has no thread.
    Absent,
}

const AWAKE: u32 = State::Awake as u32;
const ASLEEP: u32 = State::Asleep as u32;
const ABSENT: u32 = State::Absent as u32;

impl<T: Sync> Desk<T> {
    pub(crate) fn new() -> Self {
        const { assert!(align_of::<T>() > BUSY) };
        Desk { batch: AtomicPtr::new(ptr::null_mut()), state: AtomicU32::new(ABSENT) }
    }

    /// Whether the worker does this. It may do something else at once.
    pub(crate) fn is(&self, state: State) -> bool {
        self.state.load(Ordering::Relaxed) == state as u32
    }

    /// The worker: is there from now on.
    pub(crate) fn arrive(&self) {
        self.state.swap(AWAKE, Ordering::Relaxed);
    }

    /// There is no worker from now on. What it was offered its submitter takes back.
    pub(crate) fn leave(&self) {
        self.state.swap(ABSENT, Ordering::Relaxed);
    }

    /// Offers a batch. False: the worker has another one.
    ///
    /// The caller keeps the batch until [`Desk::withdraw`] or [`Desk::has`] says that the worker does not have it.
    pub(crate) fn offer(&self, batch: &T) -> bool {
        let offer = ptr::from_ref(batch).cast_mut();
        // Release: pairs with the Acquire in next(). The worker sees the batch.
        let free = ptr::null_mut();
        if self.batch.compare_exchange(free, offer, Ordering::Release, Ordering::Relaxed).is_err() {
            return false;
        }
        // Pairs with the fence in will_sleep().
        fence(Ordering::SeqCst);
        self.wake();
        true
    }

    /// Takes an offer back that the worker has not taken.
    pub(crate) fn withdraw(&self, batch: &T) {
        let offer = ptr::from_ref(batch).cast_mut();
        // Whatever the answer is, the desk does not have the offer any more, or its worker has. Nothing is handed over.
        let _taken = self.batch.compare_exchange(
            offer,
            ptr::null_mut(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Whether the worker is at work on this batch.
    pub(crate) fn has(&self, batch: &T) -> bool {
        // Acquire: pairs with the Release in finish(). The batch may be freed after a no.
        let at_desk = self.batch.load(Ordering::Acquire);
        at_desk.addr() == ptr::from_ref(batch).addr() | BUSY
    }

    /// The worker: takes an offer, and has the batch until [`Desk::finish`].
    ///
    /// The borrow is the desk's, but the batch lives only until then: see `WORK-2`.
    pub(crate) fn next(&self) -> Option<&T> {
        let offer = self.batch.load(Ordering::Relaxed);
        if offer.is_null() {
            return None;
        }
        let busy = offer.map_addr(|address| address | BUSY);
        // Acquire: see offer().
        let offer = self.batch.compare_exchange(offer, busy, Ordering::Acquire, Ordering::Relaxed);
        let offer = offer.ok()?;
        // SAFETY: WORK-2: whoever has offered it keeps it while this desk has it.
        Some(unsafe { &*offer })
    }

    /// The worker: has no batch any more.
    pub(crate) fn finish(&self) {
        // Release: see has().
        self.batch.store(ptr::null_mut(), Ordering::Release);
    }

    /// The worker: is about to sleep. False: there is an offer.
    pub(crate) fn will_sleep(&self) -> bool {
        self.state.swap(ASLEEP, Ordering::Relaxed);
        // Pairs with the fence in offer().
        fence(Ordering::SeqCst);
        let is_free = self.batch.load(Ordering::Relaxed).is_null();
        if !is_free {
            self.state.swap(AWAKE, Ordering::Relaxed);
        }
        is_free
    }

    /// Wakes the worker if it sleeps.
    pub(crate) fn wake(&self) {
        let woken =
            self.state.compare_exchange(ASLEEP, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
        if woken.is_ok() {
            futex::wake(&self.state, 1);
        }
    }

    /// The worker: sleeps until it is woken, or without a reason.
    pub(crate) fn sleep(&self) {
        futex::wait(&self.state, ASLEEP, None);
    }
}

/// As loom has it: the kernel looks at the word under a lock that who wakes takes too.
#[cfg(all(test, feature = "loom"))]
mod futex {
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex};

    use crate::atomic::{AtomicU32, Ordering};

    loom::lazy_static! {
        static ref QUEUE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(super) fn wait(word: &AtomicU32, expected: u32, _most: Option<Duration>) {
        let mut queue = QUEUE.0.lock().expect("nothing panics");
        while word.load(Ordering::Relaxed) == expected {
            queue = QUEUE.1.wait(queue).expect("nothing panics");
        }
    }

    pub(super) fn wake(_word: &AtomicU32, _count: u32) {
        drop(QUEUE.0.lock());
        QUEUE.1.notify_all();
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests;
