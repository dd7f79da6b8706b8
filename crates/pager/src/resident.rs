//! The queue of resident units, oldest first.
//!
//! # Invariants
//!
//! - `RES-1` An entry may be stale: the unit went away, or went out and came back. Its owner looks at
//!   the unit, and the unit's `queued` flag keeps a unit from having two entries (`UNIT-3`).
//!
//! # Cost
//!
//! 8 bytes per managed unit; room is made when a range is adopted, never at a fault.

use std::collections::VecDeque;

use zfolio_core::sync::Mutex;

use crate::rank;

/// The queue.
#[derive(Debug)]
pub(crate) struct Resident(Mutex<{ rank::RESIDENT }, VecDeque<usize>>);

impl Resident {
    /// An empty queue.
    pub(crate) fn new() -> Resident {
        Resident(Mutex::new(VecDeque::new()))
    }

    /// Makes room for `units` entries in all.
    pub(crate) fn reserve(&self, units: usize) {
        let mut queue = self.0.lock();
        let more = units.saturating_sub(queue.len());
        queue.reserve(more);
    }

    /// Appends the youngest.
    pub(crate) fn push(&self, address: usize) {
        self.0.lock().push_back(address);
    }

    /// Takes the oldest.
    pub(crate) fn pop(&self) -> Option<usize> {
        self.0.lock().pop_front()
    }

    /// Entries, stale ones included.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Bytes of the queue itself.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.0.lock().capacity() * size_of::<usize>()
    }
}
