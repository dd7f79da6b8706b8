//! The queues of resident folios: which one goes next.
//!
//! There are no access bits: a folio that is resident tells nothing of itself. What tells is a folio
//! that went out and came back, and how soon. So there are two queues, each oldest first:
//!
//! - **probation**: folios brought back once. A scan passes through here and pushes out nothing else.
//! - **main**: folios that came back soon (from the staging area, or before as many others went out as
//!   `main` holds), and folios brought in while there was room.
//!
//! Reclaim takes from probation while it holds more than its share, else from main. A loop over more
//! memory than the limit then finds `main` still there each time round, where a single queue would
//! have evicted every folio just before its turn.
//!
//! A folio with nothing but units that could not be moved (a page is read-only) is **parked**: to try in
//! vain costs as much as a capture. All parked folios are tried again now and then.
//!
//! # Prior art
//!
//! S3-FIFO (SOSP'23) and its ghost queue, which here costs four bytes a folio: the number of captures
//! from probation when the folio went out. The departure: folios that come while there is room go to
//! `main`, or a loop from the start would never fill it.
//!
//! # Invariants
//!
//! - `RES-1` An entry may be stale: the folio went away, or went out and came back. Its owner looks at
//!   the folio, and the folio's `queued` flag keeps a folio from having two entries (`UNIT-3`). Entries of
//!   what was unmapped are swept out before they are as many as the others.
//!
//! # Cost
//!
//! 8 bytes per managed folio and queue, and for the parked, for as many as the limit holds; room is made when a
//! range is adopted, never at a fault.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::folio::{Folio, Table};
use crate::rank;

/// Which queue a folio joins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Queue {
    /// See the module.
    Main,
    /// See the module.
    Probation,
}

#[derive(Debug, Default)]
struct Queues {
    main: VecDeque<usize>,
    probation: VecDeque<usize>,
    parked: Vec<usize>,
    /// Folios that were captured and not yet compressed, oldest first.
    staged: VecDeque<usize>,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct Replacement {
    queues: Mutex<{ rank::RESIDENT }, Queues>,
    /// Units that probation may hold before it is reclaimed from first.
    share: usize,
    main: AtomicUsize,
    staged: AtomicUsize,
    /// Captures from probation, wrapping: the clock of the ghosts.
    captures: AtomicU32,
    /// Pages compressed, wrapping after 16 TiB: the clock of the refaults.
    pages_left: AtomicU32,
}

impl Replacement {
    /// Empty queues; probation may hold `share` folios.
    pub(crate) fn new(share: usize) -> Replacement {
        Replacement {
            queues: Mutex::new(Queues::default()),
            share,
            main: AtomicUsize::new(0),
            staged: AtomicUsize::new(0),
            captures: AtomicU32::new(0),
            pages_left: AtomicU32::new(0),
        }
    }

    /// Makes room for `folios` entries in each queue, beside those that are there: these may all be stale,
    /// of mappings that have gone.
    pub(crate) fn reserve(&self, folios: usize) {
        let mut queues = self.queues.lock();
        queues.main.reserve(folios);
        queues.probation.reserve(folios);
        queues.parked.reserve(folios);
    }

    /// Makes room for as many staged folios as there can be.
    pub(crate) fn reserve_staged(&self, folios: usize) {
        self.queues.lock().staged.reserve(folios);
    }

    /// Notes that the folio at `address` was staged, the newest of them.
    pub(crate) fn push_staged(&self, address: usize) {
        let mut queues = self.queues.lock();
        queues.staged.push_back(address);
        self.staged.store(queues.staged.len(), Relaxed);
    }

    /// Takes the oldest of the staged folios. It may have gone back since.
    pub(crate) fn pop_staged(&self) -> Option<usize> {
        let mut queues = self.queues.lock();
        let address = queues.staged.pop_front();
        self.staged.store(queues.staged.len(), Relaxed);
        address
    }

    /// Entries of staged folios, stale ones included.
    pub(crate) fn staged_folios(&self) -> usize {
        self.staged.load(Relaxed)
    }

    /// Puts a folio aside that cannot be moved now.
    pub(crate) fn park(&self, address: usize) {
        self.queues.lock().parked.push(address);
    }

    /// Takes one of those out again.
    pub(crate) fn unpark(&self) -> Option<usize> {
        self.queues.lock().parked.pop()
    }

    /// Folios put aside.
    pub(crate) fn parked(&self) -> usize {
        self.queues.lock().parked.len()
    }

    /// Drops the entries that `keep` does not want.
    pub(crate) fn retain(&self, mut keep: impl FnMut(usize) -> bool) {
        let mut queues = self.queues.lock();
        queues.main.retain(|address| keep(*address));
        queues.probation.retain(|address| keep(*address));
        self.main.store(queues.main.len(), Relaxed);
    }

    /// Appends the youngest of a queue.
    pub(crate) fn push(&self, address: usize, queue: Queue) {
        let mut queues = self.queues.lock();
        match queue {
            Queue::Main => queues.main.push_back(address),
            Queue::Probation => queues.probation.push_back(address),
        }
        self.main.store(queues.main.len(), Relaxed);
    }

    /// Takes the folio that should go next, and tells from where.
    pub(crate) fn pop(&self) -> Option<(usize, Queue)> {
        let mut queues = self.queues.lock();
        if queues.probation.len() > self.share || queues.main.is_empty() {
            let address = queues.probation.pop_front()?;
            return Some((address, Queue::Probation));
        }
        let address = queues.main.pop_front()?;
        self.main.store(queues.main.len(), Relaxed);
        Some((address, Queue::Main))
    }

    /// Takes the next one too, if it is `address`, of the same queue.
    pub(crate) fn pop_if(&self, address: usize, queue: Queue) -> bool {
        let mut queues = self.queues.lock();
        let queue = match queue {
            Queue::Main => &mut queues.main,
            Queue::Probation => &mut queues.probation,
        };
        let next = queue.front() == Some(&address);
        if next {
            queue.pop_front();
            self.main.store(queues.main.len(), Relaxed);
        }
        next
    }

    /// The time to remember of a folio that was captured from `queue`.
    pub(crate) fn capture_time(&self, queue: Queue) -> u32 {
        match queue {
            Queue::Probation => self.captures.fetch_add(1, Relaxed),
            Queue::Main => self.captures.load(Relaxed),
        }
    }

    /// Whether a folio that went out at `time` came back soon enough for `main`.
    pub(crate) fn came_back_soon(&self, time: u32) -> bool {
        let since = self.captures.load(Relaxed).wrapping_sub(time);
        (since as usize) < self.main.load(Relaxed)
    }

    /// The time to remember of `bytes` that are compressed now.
    pub(crate) fn leave(&self, bytes: usize) -> u32 {
        let pages = u32::try_from(bytes / PAGE_BYTES).expect("a folio at most");
        self.pages_left.fetch_add(pages, Relaxed).wrapping_add(pages)
    }

    /// Bytes that were compressed after what left at `time`.
    pub(crate) fn distance_bytes(&self, time: u32) -> u64 {
        u64::from(self.pages_left.load(Relaxed).wrapping_sub(time)) * PAGE_BYTES as u64
    }

    /// Entries, stale ones included.
    pub(crate) fn len(&self) -> usize {
        let queues = self.queues.lock();
        queues.main.len() + queues.probation.len()
    }

    /// Bytes of the queues themselves.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let queues = self.queues.lock();
        let queued = queues.main.capacity() + queues.probation.capacity();
        (queued + queues.parked.capacity() + queues.staged.capacity()) * size_of::<usize>()
    }
}

impl Engine {
    /// Brings the sizes of tables and queues up to date, with room for the entry of every folio that
    /// can be resident.
    pub(crate) fn measure_tables(&self, table: &mut Table) {
        let managed = table.managed_bytes();
        let folios = managed / self.geometry().folio_bytes() + 1;
        if self.replacement.len() > 2 * folios || self.copies.queued() > 2 * folios {
            self.sweep_queues(table);
        }
        let within = self.charge.limit_bytes_max() / self.geometry().unit_bytes() as u64;
        let within = folios.min(usize::try_from(within).unwrap_or(usize::MAX));
        self.replacement.reserve(within);
        self.copies.reserve(within);
        let queues = self.replacement.metadata_bytes() + self.copies.metadata_bytes();
        let bytes = table.metadata_bytes() + queues;
        self.charge.set_tables(bytes + self.store.stream_bytes());
        self.figures().managed_bytes.store(managed as u64, Relaxed);
    }

    /// Drops from the queues what is of unmapped folios, and second entries (`UNIT-3`).
    fn sweep_queues(&self, table: &mut Table) {
        let mut queues = Sweep { table, kept: Vec::new() };
        self.replacement
            .retain(|base| queues.keeps(base, |folio| folio.managed, |folio| &mut folio.queued));
        queues.end(|folio| &mut folio.queued);
        // What has no copies needs no entry.
        let copied = |folio: &Folio| !folio.copied_units().is_empty();
        self.copies.retain(|base| queues.keeps(base, copied, |folio| &mut folio.copied));
        queues.end(|folio| &mut folio.copied);
    }
}

/// A queue that loses its stale entries. The flag by which a folio has one entry is cleared at the first, so that
/// a second finds it cleared and goes, and is set again at the end.
struct Sweep<'t> {
    table: &'t mut Table,
    kept: Vec<usize>,
}

impl Sweep<'_> {
    /// Whether the entry of the folio at `base` stays.
    fn keeps(
        &mut self,
        base: usize,
        wanted: impl Fn(&Folio) -> bool,
        flag: impl Fn(&mut Folio) -> &mut bool,
    ) -> bool {
        let Some(folio) = self.table.known_mut(base) else { return false };
        let keep = std::mem::take(flag(folio)) && wanted(folio);
        if keep {
            self.kept.push(base);
        }
        keep
    }

    fn end(&mut self, flag: impl Fn(&mut Folio) -> &mut bool) {
        for base in self.kept.drain(..) {
            if let Some(folio) = self.table.known_mut(base) {
                *flag(folio) = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Queue, Replacement};

    /// Goal: a scan through probation leaves main alone.
    #[test]
    fn a_scan_pushes_out_nothing_but_itself() {
        let resident = Replacement::new(2);
        (0..4).for_each(|unit| resident.push(unit, Queue::Main));
        for unit in 100..200 {
            resident.push(unit, Queue::Probation);
            if unit >= 102 {
                assert_eq!(resident.pop(), Some((unit - 2, Queue::Probation)));
            }
        }
        assert_eq!(resident.len(), 6);
    }

    #[test]
    fn main_goes_once_probation_is_within_its_share() {
        let resident = Replacement::new(1);
        resident.push(1, Queue::Main);
        resident.push(2, Queue::Probation);
        assert_eq!(resident.pop(), Some((1, Queue::Main)));
        assert_eq!(resident.pop(), Some((2, Queue::Probation)));
        assert_eq!(resident.pop(), None);
    }

    /// Goal: a unit is welcome in main if fewer units than main holds went out since it did.
    #[test]
    fn soon_is_measured_in_captures() {
        let resident = Replacement::new(0);
        (0..3).for_each(|unit| resident.push(unit, Queue::Main));
        let time = resident.capture_time(Queue::Probation);
        assert!(resident.came_back_soon(time));
        resident.capture_time(Queue::Probation);
        resident.capture_time(Queue::Probation);
        assert!(!resident.came_back_soon(time));
    }

    /// Goal: what leaves at once comes back at no distance; the clock may wrap in between.
    #[test]
    fn distance_is_what_left_since() {
        let resident = Replacement::new(0);
        resident.pages_left.store(u32::MAX - 20, super::Relaxed);
        let time = resident.leave(64 << 10);
        assert_eq!(resident.distance_bytes(time), 0);
        resident.leave(16 << 10);
        resident.leave(4 << 10);
        assert_eq!(resident.distance_bytes(time), 20 << 10);
    }

    #[test]
    fn what_is_not_wanted_leaves_both_queues() {
        let resident = Replacement::new(0);
        (0..10).for_each(|unit| resident.push(unit, Queue::Main));
        (10..20).for_each(|unit| resident.push(unit, Queue::Probation));
        resident.retain(|unit| unit % 5 == 0);
        let mut left: Vec<usize> = std::iter::from_fn(|| Some(resident.pop()?.0)).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 5, 10, 15]);
    }
}
