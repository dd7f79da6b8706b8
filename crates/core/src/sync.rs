//! Locks with ranks.
//!
//! # Invariants
//!
//! - `SYNC-1` A thread takes locks in rising rank. A debug build asserts it at every `lock`; a
//!   second lock of equal rank is `try_lock` only.
//!
//! The table of ranks is `docs/locks.md`. Poisoning is ignored: in release builds a panic ends the
//! process (`panic = "abort"`), and in tests it is reported as a failure anyway.

#![allow(clippy::disallowed_types, reason = "the one place that wraps the standard mutex")]

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// A mutex of rank `RANK`.
#[derive(Debug, Default)]
pub struct Mutex<const RANK: u8, T>(std::sync::Mutex<T>);

/// The guard of a [`Mutex`]: the proof that a lock of rank `RANK` is held.
#[derive(Debug)]
pub struct Guard<'a, const RANK: u8, T>(MutexGuard<'a, T>);

impl<const RANK: u8, T> Mutex<RANK, T> {
    /// Makes a mutex that is not held.
    pub const fn new(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Waits for the lock.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread already holds a lock of this rank or a higher one
    /// (`SYNC-1`).
    pub fn lock(&self) -> Guard<'_, RANK, T> {
        ranks::assert_rising(RANK);
        if let Some(guard) = schedule::until(|| self.try_lock()) {
            return guard;
        }
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ranks::push(RANK);
        Guard(guard)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<Guard<'_, RANK, T>> {
        let guard = match self.0.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        ranks::push(RANK);
        Some(Guard(guard))
    }

    /// The value. `&mut self` proves that no other thread has access.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<const RANK: u8, T> Deref for Guard<'_, RANK, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<const RANK: u8, T> DerefMut for Guard<'_, RANK, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<const RANK: u8, T> Drop for Guard<'_, RANK, T> {
    fn drop(&mut self) {
        ranks::pop(RANK);
    }
}

/// A readers-writer lock of rank `RANK`.
#[derive(Debug, Default)]
pub struct RwLock<const RANK: u8, T> {
    lock: std::sync::RwLock<T>,
    /// How many writers try, and do not sleep yet.
    trying: AtomicU32,
}

/// The guard of a [`RwLock`] held for reading.
#[derive(Debug)]
pub struct ReadGuard<'a, const RANK: u8, T>(RwLockReadGuard<'a, T>);

/// The guard of a [`RwLock`] held for writing.
#[derive(Debug)]
pub struct WriteGuard<'a, const RANK: u8, T>(RwLockWriteGuard<'a, T>);

impl<const RANK: u8, T> RwLock<RANK, T> {
    /// Makes a lock that is not held.
    pub const fn new(value: T) -> Self {
        RwLock { lock: std::sync::RwLock::new(value), trying: AtomicU32::new(0) }
    }

    /// Waits until no writer holds the lock, and takes it for reading.
    ///
    /// # Panics
    ///
    /// As [`Mutex::lock`].
    pub fn read(&self) -> ReadGuard<'_, RANK, T> {
        ranks::assert_rising(RANK);
        if let Some(guard) = schedule::until(|| self.try_read()) {
            return guard;
        }
        let guard = self.lock.read().unwrap_or_else(PoisonError::into_inner);
        ranks::push(RANK);
        ReadGuard(guard)
    }

    /// As [`RwLock::read`], but looks up to `times` whether writers still try ([`RwLock::write_after`]), and lets them
    /// go first: for a thread that takes the lock again and again.
    ///
    /// # Panics
    ///
    /// As [`Mutex::lock`].
    pub fn read_behind(&self, times: u32) -> ReadGuard<'_, RANK, T> {
        let mut looks = (0..times).map(|_| self.is_tried());
        while looks.next().is_some_and(|is_tried| is_tried) {
            std::hint::spin_loop();
        }
        self.read()
    }

    /// Whether a writer tries, and does not sleep yet.
    pub fn is_tried(&self) -> bool {
        // Relaxed: only who goes first depends on it.
        self.trying.load(Relaxed) > 0
    }

    /// In a child of `fork`, whose parent held the lock: the writers that tried are the parent's, and none of them ends
    /// its tries here.
    pub fn forget_tries(&self) {
        self.trying.store(0, Relaxed);
    }

    /// Takes the lock for reading if no writer holds it or waits for it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, RANK, T>> {
        let guard = match self.lock.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        ranks::push(RANK);
        Some(ReadGuard(guard))
    }

    /// Takes the lock for writing if it is free.
    pub fn try_write(&self) -> Option<WriteGuard<'_, RANK, T>> {
        let guard = match self.lock.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        ranks::push(RANK);
        Some(WriteGuard(guard))
    }

    /// Waits until the lock is free, and takes it for writing.
    ///
    /// # Panics
    ///
    /// As [`Mutex::lock`].
    pub fn write(&self) -> WriteGuard<'_, RANK, T> {
        self.write_after(0)
    }

    /// As [`RwLock::write`], but tries `times` before the thread sleeps: for a lock that is held for less
    /// time than sleeping and waking take.
    ///
    /// # Panics
    ///
    /// As [`Mutex::lock`].
    pub fn write_after(&self, times: u32) -> WriteGuard<'_, RANK, T> {
        ranks::assert_rising(RANK);
        if let Some(guard) = schedule::until(|| self.try_write()) {
            return guard;
        }
        // Mostly the lock is free, and there is no need to say that somebody tries.
        if let Some(guard) = self.try_write() {
            return guard;
        }
        self.trying.fetch_add(1, Relaxed);
        let tried = (0..times).find_map(|_| {
            let guard = self.try_write();
            if guard.is_none() {
                std::hint::spin_loop();
            }
            guard
        });
        self.trying.fetch_sub(1, Relaxed);
        if let Some(guard) = tried {
            return guard;
        }
        let guard = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        ranks::push(RANK);
        WriteGuard(guard)
    }
}

impl<const RANK: u8, T> Deref for ReadGuard<'_, RANK, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<const RANK: u8, T> Drop for ReadGuard<'_, RANK, T> {
    fn drop(&mut self) {
        ranks::pop(RANK);
    }
}

impl<const RANK: u8, T> Deref for WriteGuard<'_, RANK, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<const RANK: u8, T> DerefMut for WriteGuard<'_, RANK, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<const RANK: u8, T> Drop for WriteGuard<'_, RANK, T> {
    fn drop(&mut self) {
        ranks::pop(RANK);
    }
}

/// Lets another thread run: it has what the caller waits for.
pub fn pause() {
    if !schedule::point() {
        std::thread::yield_now();
    }
}

/// Where a simulation decides which of its threads goes on. There is none of this in release builds.
#[cfg(debug_assertions)]
pub mod schedule {
    use std::cell::Cell;

    thread_local! {
        static POINT: Cell<Option<fn()>> = const { Cell::new(None) };
    }

    /// From now on the calling thread calls `point` before it takes a lock, while it waits for one, and in
    /// [`pause`](super::pause()). Other threads of the simulation may run meanwhile.
    pub fn set(point: Option<fn()>) {
        POINT.set(point);
    }

    /// Lets the simulation decide. False: there is none.
    pub(super) fn point() -> bool {
        POINT.get().inspect(|point| point()).is_some()
    }

    /// In a simulation, what `attempt` gives at last. `None`: there is no simulation, wait as usual.
    pub(super) fn until<R>(mut attempt: impl FnMut() -> Option<R>) -> Option<R> {
        while point() {
            if let Some(done) = attempt() {
                return Some(done);
            }
        }
        None
    }
}

#[cfg(not(debug_assertions))]
mod schedule {
    pub(super) fn point() -> bool {
        false
    }

    pub(super) fn until<R>(_attempt: impl FnMut() -> Option<R>) -> Option<R> {
        None
    }
}

#[cfg(debug_assertions)]
mod ranks {
    use std::cell::Cell;

    thread_local! {
        /// How many locks of each rank are held; ranks are below 64.
        static HELD: Cell<[u8; 64]> = const { Cell::new([0; 64]) };
    }

    pub(super) fn assert_rising(rank: u8) {
        let highest = HELD.get().iter().rposition(|held| *held > 0);
        let rising = highest.is_none_or(|highest| highest < usize::from(rank));
        assert!(rising, "SYNC-1: lock of rank {rank} wanted, one of rank {highest:?} is held");
    }

    pub(super) fn push(rank: u8) {
        count(rank, 1);
    }

    pub(super) fn pop(rank: u8) {
        count(rank, -1);
    }

    fn count(rank: u8, more: i8) {
        let mut held = HELD.get();
        held[usize::from(rank)] = held[usize::from(rank)].wrapping_add_signed(more);
        HELD.set(held);
    }
}

#[cfg(not(debug_assertions))]
mod ranks {
    // No thread-local storage here: the fault path runs this function in release builds.
    pub(super) fn assert_rising(_rank: u8) {}
    pub(super) fn push(_rank: u8) {}
    pub(super) fn pop(_rank: u8) {}
}

#[cfg(test)]
mod tests {
    use super::{Mutex, Relaxed, RwLock};

    /// Goal: who tries before it sleeps gets the lock, whether a reader ends soon or late.
    #[test]
    fn a_writer_that_tries_first_gets_the_lock() {
        for times in [1, u32::MAX] {
            let lock = RwLock::<1, _>::new(0);
            let reader = lock.read();
            std::thread::scope(|scope| {
                scope.spawn(|| *lock.write_after(times) += 1);
                std::thread::sleep(std::time::Duration::from_millis(5));
                assert_eq!(*reader, 0);
                drop(reader);
            });
            assert_eq!(*lock.read(), 1, "{times}");
        }
    }

    /// Goal: a reader that lets writers go first does so, and a reader that does not is not kept waiting.
    #[test]
    fn a_reader_behind_lets_a_writer_go_first() {
        let lock = RwLock::<1, _>::new(0);
        let reader = lock.read();
        std::thread::scope(|scope| {
            scope.spawn(|| *lock.write_after(u32::MAX) += 1);
            while lock.trying.load(Relaxed) == 0 {
                std::hint::spin_loop();
            }
            scope.spawn(|| assert_eq!(*lock.read_behind(0), 0)).join().unwrap();
            scope.spawn(|| assert_eq!(*lock.read_behind(u32::MAX), 1));
            std::thread::sleep(std::time::Duration::from_millis(5));
            drop(reader);
        });
        assert_eq!(lock.trying.load(Relaxed), 0);
    }

    #[test]
    fn rising_ranks_are_accepted() {
        let (low, high) = (Mutex::<1, _>::new(1), Mutex::<2, _>::new(2));
        let first = low.lock();
        let second = high.lock();
        assert_eq!(*first + *second, 3);
        assert!(low.try_lock().is_none());
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "SYNC-1")]
    fn one_of_two_locks_of_a_rank_still_counts() {
        let (low, one, two) = (Mutex::<1, _>::new(1), Mutex::<2, _>::new(2), Mutex::<2, _>::new(2));
        let _first = one.lock();
        drop(two.try_lock());
        let _second = low.lock();
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "SYNC-1")]
    fn falling_ranks_panic() {
        let (low, high) = (Mutex::<1, _>::new(1), Mutex::<2, _>::new(2));
        let _second = high.lock();
        let _first = low.lock();
    }
}
