//! Objects on their way back: the slots that they touch, read by few transfers.
//!
//! Requests wait in a [`Queue`] until the batch is complete. Then the new ones are sorted by slot, and those whose
//! slots are adjacent or the same go into one [`Read`], within a stretch (`DISK-4`). Each slot of a read is opened
//! once, when the first object needs it.
//!
//! A request whose read failed together with others' is read again alone: so no neighbour's fault is an object's own.
//! A request with a slot that did not open is read once more, too: a bit that flips on the way is not a loss.

use std::sync::Arc;

use super::area::Area;
use super::disk::{Buffer, SLOT_BYTES, Slot};
use super::frame::copy_out;
use super::location::{AreaId, Place};
use super::seal::Tampered;
use crate::store::backing::Token;

/// An object that is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) token: Token,
    pub(super) place: Place,
    pub(super) length: usize,
    /// It was read before, and is now to be read alone.
    pub(super) is_again: bool,
    /// What was read then did not open.
    pub(super) was_damaged: bool,
}

impl Wanted {
    fn end(&self) -> u32 {
        self.place.slots(self.length).end
    }
}

/// Objects that are wanted and not yet read, in the order of their batches.
#[derive(Debug)]
pub(super) struct Queue {
    wanted: Vec<Wanted>,
    /// How many a caller may add. Beyond is room for those that come back.
    room: usize,
    /// How many from the front on are sorted.
    sorted: usize,
}

impl Queue {
    /// A queue for `room` requests, and `again` that come back. Allocates.
    pub(super) fn new(room: usize, again: usize) -> Queue {
        Queue { wanted: Vec::with_capacity(room + again), room, sorted: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Adds a request. False: there is no room.
    pub(super) fn push(&mut self, wanted: Wanted) -> bool {
        let has_room = wanted.is_again || self.wanted.len() < self.room;
        if has_room {
            debug_assert!(self.wanted.len() < self.wanted.capacity(), "a queue does not grow");
            self.wanted.push(wanted);
        }
        has_room
    }

    /// Sorts what was added: the batch is complete.
    pub(super) fn end_batch(&mut self) {
        let batch = &mut self.wanted[self.sorted..];
        batch.sort_unstable_by_key(|wanted| (wanted.place.area, wanted.place.slot));
        self.sorted = self.wanted.len();
    }

    /// The slots of the next read, if its buffer may have `slots` slots, which are enough for the largest object. Moves
    /// its requests to `into`. `stretch_of`: slots of a stretch of an area's disk (`DISK-4`).
    pub(super) fn next(
        &mut self,
        slots: usize,
        stretch_of: impl Fn(AreaId) -> u32,
        into: &mut Vec<Wanted>,
    ) -> Option<(Place, usize)> {
        let first = self.wanted.get(..self.sorted)?.first()?;
        let (area, from) = (first.place.area, first.place.slot);
        let (mut end, mut count) = (first.end(), 1);
        if !first.is_again {
            let stretch = stretch_of(area);
            for next in &self.wanted[1..self.sorted] {
                let joined = end.max(next.end());
                let is_near = next.place.area == area && (from..=end).contains(&next.place.slot);
                let fits = (joined - from) as usize <= slots && count < Read::requests_max(slots);
                let is_one_stretch = from / stretch == (joined - 1) / stretch;
                if next.is_again || !is_near || !fits || !is_one_stretch {
                    break;
                }
                (end, count) = (joined, count + 1);
            }
        }
        into.extend(self.wanted.drain(..count));
        self.sorted -= count;
        Some((Place { area, slot: from, byte: 0 }, (end - from) as usize))
    }
}

/// What became of a slot that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Opened {
    NotYet,
    Yes,
    Tampered,
}

/// One transfer, and the objects that wait for it.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) buffer: Option<Buffer>,
    pub(super) requests: Vec<Wanted>,
    opened: Box<[Opened]>,
    pub(super) area: Option<Arc<Area>>,
    first: u32,
}

/// Requests of one read, for each of its slots.
const REQUESTS_PER_SLOT: usize = 8;

impl Read {
    /// A read of at most `slots` slots. Allocates.
    pub(super) fn new(slots: usize) -> Read {
        Read {
            buffer: Some(Buffer::new(slots)),
            requests: Vec::with_capacity(slots * REQUESTS_PER_SLOT),
            opened: vec![Opened::NotYet; slots].into(),
            area: None,
            first: 0,
        }
    }

    /// Bytes of buffer and lists.
    pub(super) fn memory_bytes(slots: usize) -> usize {
        slots * (SLOT_BYTES + REQUESTS_PER_SLOT * size_of::<Wanted>() + size_of::<Opened>())
    }

    /// Requests of a read of `slots` slots at most.
    pub(super) fn requests_max(slots: usize) -> usize {
        slots * REQUESTS_PER_SLOT
    }

    /// Slots of the buffer.
    pub(super) fn capacity(&self) -> usize {
        self.opened.len()
    }

    /// Begins: slots from `first` on will be read. Gives the buffer away.
    pub(super) fn begin(&mut self, area: Arc<Area>, first: u32) -> Buffer {
        (self.area, self.first) = (Some(area), first);
        self.opened.fill(Opened::NotYet);
        self.buffer.take().expect("it was free")
    }

    /// The bytes of a request, out of what was read. They are in `slots` or, if they are in more than one slot, are
    /// copied to `scratch`.
    pub(super) fn object<'s>(
        &mut self,
        wanted: &Wanted,
        slots: &'s mut [Slot],
        scratch: &'s mut [u8],
    ) -> Result<&'s [u8], Tampered> {
        let at = (wanted.place.slot - self.first) as usize;
        let touched = at..at + wanted.place.slots(wanted.length).len();
        let area = self.area.as_ref().expect("it was begun");
        for (at, slot) in touched.clone().zip(wanted.place.slot..) {
            if self.opened[at] == Opened::NotYet {
                let result = area.open(slot, &mut slots[at].0);
                self.opened[at] = if result.is_ok() { Opened::Yes } else { Opened::Tampered };
            }
        }
        if self.opened[touched.clone()].contains(&Opened::Tampered) {
            return Err(Tampered);
        }
        if touched.len() == 1 {
            return Ok(&slots[at].0[wanted.place.byte..][..wanted.length]);
        }
        let bytes = &mut scratch[..wanted.length];
        copy_out(&slots[touched], wanted.place.byte, bytes);
        Ok(bytes)
    }

    /// Slots that did not open.
    pub(super) fn tampered(&self) -> usize {
        self.opened.iter().filter(|opened| **opened == Opened::Tampered).count()
    }

    /// Takes the buffer back: the read is free.
    pub(super) fn reset(&mut self, buffer: Buffer) {
        self.buffer = Some(buffer);
        self.requests.clear();
        self.area = None;
    }
}
