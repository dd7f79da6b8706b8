//! The jobs of one stream, as its submitter and workers see them.
//!
//! ```text
//! submitter   publish: the slots are written, `done` is cleared, then `open` gets a bit for each
//! anybody     take: clears a bit of `open`, and so has the job; works; sets the job's bit of `done`
//! submitter   is_done: `done` has every bit
//! ```
//!
//! Between `is_done` and the next `publish` no bit of `open` is set: a worker that comes then finds nothing.

use std::slice;

use zfolio_core::zcomp::BATCH_MAX;

use crate::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// What was made of a job: a number that means what the submitter's direction says. 0: it failed, or whoever took it
/// panicked.
pub(crate) type Made = usize;

/// The memory of a job, which its submitter has borrowed.
#[derive(Debug)]
struct Slot {
    source: AtomicPtr<u8>,
    source_bytes: AtomicUsize,
    dest: AtomicPtr<u8>,
    dest_bytes: AtomicUsize,
    made: AtomicUsize,
}

impl Slot {
    fn new() -> Self {
        Slot {
            source: AtomicPtr::new(std::ptr::null_mut()),
            source_bytes: AtomicUsize::new(0),
            dest: AtomicPtr::new(std::ptr::null_mut()),
            dest_bytes: AtomicUsize::new(0),
            made: AtomicUsize::new(0),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Batch {
    /// A bit for each job that nobody has taken.
    open: AtomicU32,
    /// A bit for each job that is done.
    done: AtomicU32,
    slots: [Slot; BATCH_MAX],
}

/// Which end of a batch somebody takes jobs from: the submitter from the first on, workers from the last, so that they
/// do not want the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    First,
    Last,
}

/// A job that somebody has taken. It is done when this is dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct Taken<'b> {
    batch: &'b Batch,
    index: usize,
}

impl Batch {
    pub(crate) fn new() -> Self {
        Batch {
            open: AtomicU32::new(0),
            done: AtomicU32::new(0),
            slots: std::array::from_fn(|_| Slot::new()),
        }
    }

    /// Publishes jobs, at most [`BATCH_MAX`]: where each reads and writes. Returns how many.
    ///
    /// # Safety
    ///
    /// Until [`Batch::is_done`] says that as many are done, nobody else writes these bytes, or reads those of a
    /// destination. No other batch is at work here.
    pub(crate) unsafe fn publish<'j>(
        &self,
        jobs: impl Iterator<Item = (&'j [u8], &'j mut [u8])>,
    ) -> u32 {
        let mut count = 0;
        for (slot, (source, dest)) in self.slots.iter().zip(jobs) {
            slot.source.store(source.as_ptr().cast_mut(), Ordering::Relaxed);
            slot.source_bytes.store(source.len(), Ordering::Relaxed);
            slot.dest.store(dest.as_mut_ptr(), Ordering::Relaxed);
            slot.dest_bytes.store(dest.len(), Ordering::Relaxed);
            slot.made.store(0, Ordering::Relaxed);
            count += 1;
        }
        self.done.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire in take(). Whoever takes a job sees where it is.
        self.open.store((1 << count) - 1, Ordering::Release);
        count
    }

    /// Takes a job that nobody has taken.
    pub(crate) fn take(&self, end: End) -> Option<Taken<'_>> {
        loop {
            let open = self.open.load(Ordering::Relaxed);
            if open == 0 {
                return None;
            }
            let index = match end {
                End::First => open.trailing_zeros(),
                End::Last => open.ilog2(),
            };
            let bit = 1 << index;
            // Acquire: see publish().
            if self.open.fetch_and(!bit, Ordering::Acquire) & bit != 0 {
                return Some(Taken { batch: self, index: index as usize });
            }
        }
    }

    /// Whether all of `count` jobs are done.
    pub(crate) fn is_done(&self, count: u32) -> bool {
        // Acquire: pairs with the Release of a job that is dropped. The submitter sees what was written for it.
        self.done.load(Ordering::Acquire) == (1 << count) - 1
    }

    /// What was made of a job that is done.
    pub(crate) fn made(&self, index: usize) -> Made {
        self.slots[index].made.load(Ordering::Relaxed)
    }
}

impl Taken<'_> {
    /// Does the job: `work` reads its first argument and writes its second.
    pub(crate) fn work(self, work: impl FnOnce(&[u8], &mut [u8]) -> Made) {
        let slot = &self.batch.slots[self.index];
        let (source, dest) =
            (slot.source.load(Ordering::Relaxed), slot.dest.load(Ordering::Relaxed));
        let bytes = [&slot.source_bytes, &slot.dest_bytes].map(|it| it.load(Ordering::Relaxed));
        // SAFETY: WORK-1: this is the one who has the job, which the submitter has published and waits for, and the
        // contract of publish() keeps everybody else from writing these bytes until the job is done, below.
        let source = unsafe { slice::from_raw_parts(source, bytes[0]) };
        // SAFETY: as above; nobody else reads them either.
        let dest = unsafe { slice::from_raw_parts_mut(dest, bytes[1]) };
        slot.made.store(work(source, dest), Ordering::Relaxed);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: see is_done().
        self.batch.done.fetch_or(1 << self.index, Ordering::Release);
    }
}
