//! A disk in memory: for tests and measurements, and for whoever writes another.

use std::collections::VecDeque;

use super::{Buffer, Direction, Disk, Error, RANK_DISK, SLOT_BYTES, Slot, Transfer};
use crate::sync::Mutex;

/// Transfers that may be under way at once.
const DEPTH: usize = 64;

/// Slots on the heap.
#[derive(Debug)]
pub struct Memory(Mutex<RANK_DISK, Inner>);

#[derive(Debug)]
struct Inner {
    slots: Buffer,
    ended: VecDeque<Transfer>,
}

impl Memory {
    /// A disk of `slots` slots of zeros.
    #[must_use]
    pub fn new(slots: usize) -> Memory {
        let (slots, ended) = (Buffer::new(slots), VecDeque::with_capacity(DEPTH));
        Memory(Mutex::new(Inner { slots, ended }))
    }
}

impl Inner {
    fn slots(&mut self, first: u64, count: usize) -> Option<&mut [Slot]> {
        let first = usize::try_from(first).ok()?;
        self.slots.slots_mut().get_mut(first..first.checked_add(count)?)
    }

    fn run(&mut self, transfer: &mut Transfer) -> Result<(), Error> {
        let buffer = &mut transfer.buffer.slots_mut()[..transfer.count];
        match (self.slots(transfer.first, transfer.count), transfer.direction) {
            (Some(slots), Direction::Read) => buffer.copy_from_slice(slots),
            (Some(slots), Direction::Write) => slots.copy_from_slice(buffer),
            (None, Direction::Read) => return Err(Error::Failed { errno: 0 }),
            (None, Direction::Write) => return Err(Error::Full),
        }
        Ok(())
    }
}

impl Disk for Memory {
    fn begin(&self, mut transfer: Transfer) -> Result<(), Transfer> {
        let mut inner = self.0.lock();
        if inner.ended.len() == DEPTH {
            return Err(transfer);
        }
        transfer.result = inner.run(&mut transfer);
        inner.ended.push_back(transfer);
        Ok(())
    }

    fn flush(&self) {}

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        loop {
            let ended = self.0.lock().ended.pop_front();
            let Some(transfer) = ended else { break };
            each(transfer);
        }
    }

    fn pause(&self) {
        crate::sync::pause();
    }

    fn discard(&self, first: u64, count: u64) {
        let mut inner = self.0.lock();
        let slots = usize::try_from(count).ok().and_then(|count| inner.slots(first, count));
        slots.into_iter().flatten().for_each(|slot| *slot = Slot([0; SLOT_BYTES]));
    }
}
