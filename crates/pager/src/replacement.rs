//! The queues of resident folios: which folio goes out next.
//!
//! There are no access bits, so it is not known whether a resident folio is used. Known is only
//! which folios came back after they went out, and how soon. So there are two queues, each oldest
//! first:
//!
//! - **probation**: folios brought in once. A scan passes through this queue and pushes no other
//!   folio out.
//! - **main**: folios that came back soon (from the staging area, or before as many captures from
//!   probation as `main` has entries), and folios brought in while there was room.
//!
//! Reclaim takes from probation while that queue holds more than its share, else from main. A loop
//! over more memory than the limit then finds the folios of `main` still resident in each round; a
//! single queue would have evicted every folio just before the loop reached it.
//!
//! A folio is **parked** if no resident unit of it could be moved (a page is read-only, for
//! example): a failed capture costs as much as a successful one. All parked folios are tried again
//! now and then.
//!
//! # Prior art
//!
//! S3-FIFO (SOSP'23) and its ghost queue. Here a ghost costs four bytes a folio: the number of
//! captures from probation when the folio went out. One departure: folios that come while there is
//! room go to `main`; without this, a loop from the program's start on would never fill `main`.
//!
//! # Invariants
//!
//! - `RES-1` An entry may be stale: the folio was unmapped, or went out and came back. Whoever pops
//!   an entry looks at the folio. The folio's `queued` flag prevents a second entry of a folio
//!   (`UNIT-3`). Entries of unmapped folios are swept out before they outnumber the managed folios.
//!
//! # Cost
//!
//! 8 bytes for each folio in each of main, probation and parked: for all managed folios, or for as
//! many as the limit can hold if these are fewer. Room is made when mappings change, never at a
//! fault.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::replacement;
pub(crate) use zfolio_core::replacement::Queue;
use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::folio::{Folio, Table};
use crate::rank;

#[derive(Debug, Default)]
struct Queues {
    /// Main and probation, and which of their folios goes out next.
    resident: replacement::Queues,
    parked: Vec<usize>,
    /// Folios that are captured and not yet compressed, oldest first; entries may be stale.
    staged: VecDeque<usize>,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct Replacement {
    queues: Mutex<{ rank::REPLACEMENT }, Queues>,
    /// The length of the main queue, readable without the lock.
    main: AtomicUsize,
    /// The length of the staged queue, readable without the lock.
    staged: AtomicUsize,
    /// The number of captures from probation, wrapping: the clock of the ghosts.
    captures: AtomicU32,
    /// The number of pages stored, wrapping after 16 TiB: the clock of refault distances.
    pages_left: AtomicU32,
}

impl Replacement {
    /// Empty queues.
    pub(crate) fn new() -> Replacement {
        Replacement {
            queues: Mutex::new(Queues::default()),
            main: AtomicUsize::new(0),
            staged: AtomicUsize::new(0),
            captures: AtomicU32::new(0),
            pages_left: AtomicU32::new(0),
        }
    }

    /// Makes room for `folios` more entries in each queue: the entries that a queue has already may
    /// all be stale, left by unmapped mappings.
    pub(crate) fn reserve(&self, folios: usize) {
        let mut queues = self.queues.lock();
        queues.resident.reserve(folios);
        queues.parked.reserve(folios);
    }

    /// Makes room for as many staged folios as there can be.
    pub(crate) fn reserve_staged(&self, folios: usize) {
        self.queues.lock().staged.reserve(folios);
    }

    /// Queues the folio at `address` as the newest staged folio.
    pub(crate) fn push_staged(&self, address: usize) {
        let mut queues = self.queues.lock();
        queues.staged.push_back(address);
        self.staged.store(queues.staged.len(), Relaxed);
    }

    /// Takes the oldest entry of the staged folios. That folio may have been brought back since.
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

    /// Parks a folio that cannot be moved now.
    pub(crate) fn park(&self, address: usize) {
        self.queues.lock().parked.push(address);
    }

    /// Takes one parked folio out again.
    pub(crate) fn unpark(&self) -> Option<usize> {
        self.queues.lock().parked.pop()
    }

    /// How many folios are parked, stale entries included.
    pub(crate) fn parked(&self) -> usize {
        self.queues.lock().parked.len()
    }

    /// Drops the entries of main and probation for which `keep` returns false.
    pub(crate) fn retain(&self, keep: impl FnMut(usize) -> bool) {
        let mut queues = self.queues.lock();
        queues.resident.retain(keep);
        self.main.store(queues.resident.main_len(), Relaxed);
    }

    /// Appends a folio to a queue, as the youngest.
    pub(crate) fn push(&self, address: usize, queue: Queue) {
        let mut queues = self.queues.lock();
        queues.resident.push(address, queue);
        self.main.store(queues.resident.main_len(), Relaxed);
    }

    /// Takes the folio that should go out next, and returns its queue too. With more than `share` folios
    /// in probation, that is one of these.
    pub(crate) fn pop(&self, share: usize) -> Option<(usize, Queue)> {
        let mut queues = self.queues.lock();
        let next = queues.resident.pop(share);
        self.main.store(queues.resident.main_len(), Relaxed);
        next
    }

    /// Takes the oldest folio of `queue`, if that is the one at `address`.
    pub(crate) fn pop_if(&self, address: usize, queue: Queue) -> bool {
        let mut queues = self.queues.lock();
        let next = queues.resident.pop_if(address, queue);
        self.main.store(queues.resident.main_len(), Relaxed);
        next
    }

    /// The time to note for a folio that is captured from `queue` now, by the clock of the ghosts.
    pub(crate) fn capture_time(&self, queue: Queue) -> u32 {
        match queue {
            Queue::Probation => self.captures.fetch_add(1, Relaxed),
            Queue::Main => self.captures.load(Relaxed),
        }
    }

    /// Whether a folio that was captured at `time` came back soon enough for `main`.
    pub(crate) fn came_back_soon(&self, time: u32) -> bool {
        replacement::came_back_soon(time, self.captures.load(Relaxed), self.main.load(Relaxed))
    }

    /// The time to note for `bytes` that are stored now, by the clock of refault distances.
    pub(crate) fn note_stored(&self, bytes: usize) -> u32 {
        let pages = u32::try_from(bytes / PAGE_BYTES).expect("a folio at most");
        self.pages_left.fetch_add(pages, Relaxed).wrapping_add(pages)
    }

    /// Bytes that were stored after `time`.
    pub(crate) fn distance_bytes(&self, time: u32) -> u64 {
        u64::from(self.pages_left.load(Relaxed).wrapping_sub(time)) * PAGE_BYTES as u64
    }

    /// Entries of main and probation, stale ones included.
    pub(crate) fn len(&self) -> usize {
        self.queues.lock().resident.len()
    }

    /// Bytes of the queues themselves.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let queues = self.queues.lock();
        (queues.resident.capacity() + queues.parked.capacity() + queues.staged.capacity())
            * size_of::<usize>()
    }
}

impl Engine {
    /// Makes room in the queues for every folio that can be resident, and updates the count of
    /// bytes that tables and queues take.
    pub(crate) fn measure_tables(&self, table: &mut Table) {
        let managed = table.managed_bytes();
        let folios = managed / self.geometry().folio_bytes() + 1;
        if self.replacement.len() > 2 * folios || self.copies.queued() > 2 * folios {
            self.sweep_queues(table);
        }
        self.reserve_queues(managed as u64);
        let queues = self.replacement.metadata_bytes() + self.copies.metadata_bytes();
        let bytes = table.metadata_bytes() + queues;
        let config = self.config();
        let buffers = self.work.density.memory_bytes(config.unit, config.object_max());
        self.charge.set_tables(bytes + buffers);
        self.measure_streams();
        self.figures().managed_bytes.store(managed as u64, Relaxed);
    }

    /// Makes room in the queues for every folio that can be resident, with so much managed memory.
    pub(crate) fn reserve_queues(&self, managed_bytes: u64) {
        let folios = managed_bytes / self.geometry().folio_bytes() as u64 + 1;
        let within = self.charge.limit_bytes_max() / self.geometry().unit_bytes() as u64;
        let within = usize::try_from(folios.min(within)).unwrap_or(usize::MAX);
        self.replacement.reserve(within);
        self.copies.reserve(within);
    }

    /// Drops the entries of unmapped folios from the queues, and second entries (`UNIT-3`).
    fn sweep_queues(&self, table: &mut Table) {
        let mut queues = Sweep { table, kept: Vec::new() };
        self.replacement
            .retain(|base| queues.keeps(base, |folio| folio.managed, |folio| &mut folio.queued));
        queues.end(|folio| &mut folio.queued);
        // A folio without copies needs no entry.
        let copied = |folio: &Folio| !folio.copied_units().is_empty();
        self.copies.retain(|base| queues.keeps(base, copied, |folio| &mut folio.copied));
        queues.end(|folio| &mut folio.copied);
    }
}

/// Drops the stale entries of a queue. The first entry of a folio clears the folio's flag, so a
/// second entry finds the flag cleared and is dropped. At the end the flags of the kept entries are
/// set again.
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
        let resident = Replacement::new();
        (0..4).for_each(|unit| resident.push(unit, Queue::Main));
        for unit in 100..200 {
            resident.push(unit, Queue::Probation);
            if unit >= 102 {
                assert_eq!(resident.pop(2), Some((unit - 2, Queue::Probation)));
            }
        }
        assert_eq!(resident.len(), 6);
    }

    #[test]
    fn main_goes_once_probation_is_within_its_share() {
        let resident = Replacement::new();
        resident.push(1, Queue::Main);
        resident.push(2, Queue::Probation);
        assert_eq!(resident.pop(1), Some((1, Queue::Main)));
        assert_eq!(resident.pop(1), Some((2, Queue::Probation)));
        assert_eq!(resident.pop(1), None);
    }

    /// Goal: a folio joins main if, since its capture, fewer folios than main holds were captured
    /// from probation.
    #[test]
    fn soon_is_measured_in_captures() {
        let resident = Replacement::new();
        (0..3).for_each(|unit| resident.push(unit, Queue::Main));
        let time = resident.capture_time(Queue::Probation);
        assert!(resident.came_back_soon(time));
        resident.capture_time(Queue::Probation);
        resident.capture_time(Queue::Probation);
        assert!(!resident.came_back_soon(time));
    }

    /// Goal: the distance is the number of bytes stored since, and 0 right after a folio's own
    /// store. Method: the clock wraps in between.
    #[test]
    fn distance_is_what_left_since() {
        let resident = Replacement::new();
        resident.pages_left.store(u32::MAX - 20, super::Relaxed);
        let time = resident.note_stored(64 << 10);
        assert_eq!(resident.distance_bytes(time), 0);
        resident.note_stored(16 << 10);
        resident.note_stored(4 << 10);
        assert_eq!(resident.distance_bytes(time), 20 << 10);
    }

    #[test]
    fn what_is_not_wanted_leaves_both_queues() {
        let resident = Replacement::new();
        (0..10).for_each(|unit| resident.push(unit, Queue::Main));
        (10..20).for_each(|unit| resident.push(unit, Queue::Probation));
        resident.retain(|unit| unit % 5 == 0);
        let mut left: Vec<usize> = std::iter::from_fn(|| Some(resident.pop(0)?.0)).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 5, 10, 15]);
    }
}
