//! Objects on their way out: packed into a frame, sealed slot by slot, written by one transfer.
//!
//! ```text
//!   front                                     gap                        back
//!   +------+--------+----+-----------+- - - - - - - - - - - +------------+------------+
//!   | 1300 |   900  | .. | 1800 ...  |                      | 4096 (raw) | 4096 (raw) |
//!   +------+--------+----+-----------+- - - - - - - - - - - +------------+------------+
//!   slot 0               slot 1       ..                     slot 14      slot 15
//! ```
//!
//! Objects are appended at the front. Those of a number of whole slots, as incompressible units are, go to the
//! back: there they touch no more slots than they fill, and nothing is lost in front of them. When the frame is
//! closed the back moves down to the front.
//!
//! An object that would touch one more slot where it is than at the beginning of the next slot goes there if at most
//! [`LOST_MAX`] bytes are lost by that. So few reads take two slots, and few bytes are lost.
//!
//! # Cost
//!
//! For each slot of the buffer 192 bytes for the list of objects. `docs/design/spill.md` says how much is lost.

use std::ops::Range;
use std::sync::Arc;

use super::area::Area;
use super::disk::{Buffer, SLOT_BYTES, Slot};
use crate::store::backing::Token;

/// log2 of the slots of a frame, unless one object has more.
pub(super) const FRAME_ORDER: u32 = 5;

/// Bytes that are given up at the end of a slot so that an object touches one slot less.
const LOST_MAX: usize = SLOT_BYTES / 8;

/// Objects of a frame, for each of its slots: shorter objects close the frame early.
const OBJECTS_PER_SLOT: usize = 16;

/// One object of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub(super) token: Token,
    /// Where it begins, from the beginning of the frame.
    at: u32,
    length: u32,
}

impl Packed {
    /// Its first byte, from the beginning of the frame.
    pub(super) fn at(&self) -> usize {
        self.at as usize
    }

    /// Its bytes.
    pub(super) fn length(&self) -> usize {
        self.length as usize
    }

    /// The slots of the frame that it touches.
    fn slots(&self) -> Range<usize> {
        self.at() / SLOT_BYTES..(self.at() + self.length()).div_ceil(SLOT_BYTES)
    }
}

/// Where a frame is: some slots of an area that nobody else has.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) area: Arc<Area>,
    pub(super) slots: Range<u32>,
}

impl Run {
    /// How many slots.
    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Whether `other` begins where this one ends, in the same stretch (`DISK-4`).
    pub(super) fn is_before(&self, other: &Run) -> bool {
        // A run that was taken lies in one stretch, so only its first slot can begin another one.
        Arc::ptr_eq(&self.area, &other.area)
            && self.slots.end == other.slots.start
            && other.slots.start % self.area.stretch_slots != 0
    }

    /// Takes `count` slots off the beginning.
    pub(super) fn split(&mut self, count: usize) -> Run {
        assert!(count <= self.count(), "{count} slots of {:?}", self.slots);
        let count = u32::try_from(count).expect("slots of a run");
        let first = self.slots.start;
        self.slots.start += count;
        Run { area: Arc::clone(&self.area), slots: first..first + count }
    }
}

/// The frame. Without a buffer while its transfer is under way.
#[derive(Debug, Default)]
pub(super) struct Frame {
    buffer: Option<Buffer>,
    objects: Vec<Packed>,
    /// Objects that touch each slot.
    live: Box<[u16]>,
    /// Where it will be written; from then on, where it is written.
    run: Option<Run>,
    /// Slots that may be filled.
    room: usize,
    /// Bytes filled at the front.
    front: usize,
    /// Slots filled at the back.
    back: usize,
}

impl Frame {
    /// A frame of at most `slots` slots. Allocates.
    pub(super) fn new(slots: usize) -> Frame {
        Frame {
            buffer: Some(Buffer::new(slots)),
            objects: Vec::with_capacity(slots * OBJECTS_PER_SLOT),
            live: vec![0; slots].into(),
            run: None,
            room: 0,
            front: 0,
            back: 0,
        }
    }

    /// Bytes of buffer and lists.
    pub(super) fn memory_bytes(slots: usize) -> usize {
        slots * (SLOT_BYTES + OBJECTS_PER_SLOT * size_of::<Packed>() + size_of::<u16>())
    }

    /// Slots of the buffer.
    pub(super) fn capacity(&self) -> usize {
        self.live.len()
    }

    /// Whether nothing was appended.
    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Begins to fill the frame: at most `room` slots, and not more than it has.
    pub(super) fn open(&mut self, room: usize) {
        debug_assert!(self.is_empty() && self.buffer.is_some());
        (self.room, self.front, self.back) = (room.min(self.capacity()), 0, 0);
    }

    /// Copies an object in. False: there is no room for it.
    pub(super) fn append(&mut self, token: Token, bytes: &[u8]) -> bool {
        let Some(at) = self.place(bytes.len()) else { return false };
        let slots = self.buffer.as_mut().expect("it is open").slots_mut();
        copy_in(slots, at, bytes);
        let narrow = |number: usize| u32::try_from(number).expect("a frame is below 4 GiB");
        self.objects.push(Packed { token, at: narrow(at), length: narrow(bytes.len()) });
        true
    }

    /// Takes room for an object of `length` bytes. Returns where it begins.
    fn place(&mut self, length: usize) -> Option<usize> {
        if self.objects.len() == self.objects.capacity() {
            return None;
        }
        let has_room = |front: usize, back: usize| front.div_ceil(SLOT_BYTES) + back <= self.room;
        if length % SLOT_BYTES == 0 {
            let back = self.back + length / SLOT_BYTES;
            return has_room(self.front, back).then(|| {
                self.back = back;
                (self.room - back) * SLOT_BYTES
            });
        }
        let at = begin(self.front, length);
        has_room(at + length, self.back).then(|| {
            self.front = at + length;
            at
        })
    }

    /// Ends the filling: moves the back down to the front, and counts the objects of each slot. Returns how many
    /// slots are filled.
    pub(super) fn close(&mut self) -> usize {
        let front = self.front.div_ceil(SLOT_BYTES);
        let (used, from) = (front + self.back, self.room - self.back);
        if self.back > 0 && from > front {
            let slots = self.buffer.as_mut().expect("it is open").slots_mut();
            slots.copy_within(from..self.room, front);
            let moved = u32::try_from((from - front) * SLOT_BYTES).expect("below 4 GiB");
            let in_back = |object: &&mut Packed| object.at() >= from * SLOT_BYTES;
            self.objects.iter_mut().filter(in_back).for_each(|object| object.at -= moved);
        }
        self.live[..used].fill(0);
        for object in &self.objects {
            self.live[object.slots()].iter_mut().for_each(|live| *live += 1);
        }
        used
    }

    /// Seals the slots of a closed frame for where it will be written, and gives the buffer away.
    pub(super) fn seal(&mut self, run: Run) -> Buffer {
        let mut buffer = self.buffer.take().expect("it is closed");
        let slots = buffer.slots_mut().iter_mut().zip(&self.live);
        for (slot, (Slot(bytes), live)) in run.slots.clone().zip(slots) {
            run.area.seal(slot, u64::from(*live), bytes);
        }
        self.run = Some(run);
        buffer
    }

    /// Where it is written, and what is in it.
    pub(super) fn contents(&self) -> (&Run, &[Packed]) {
        (self.run.as_ref().expect("it was sealed"), &self.objects)
    }

    /// Takes the buffer back: the frame is empty.
    pub(super) fn reset(&mut self, buffer: Buffer) {
        self.buffer = Some(buffer);
        self.objects.clear();
        self.run = None;
    }
}

/// Where an object of `length` bytes begins if the frame is filled up to `front`.
fn begin(front: usize, length: usize) -> usize {
    let (byte, next) = (front % SLOT_BYTES, front.next_multiple_of(SLOT_BYTES));
    let touches_more = (byte + length).div_ceil(SLOT_BYTES) > length.div_ceil(SLOT_BYTES);
    if touches_more && next - front <= LOST_MAX { next } else { front }
}

/// Copies `bytes` over slots, from byte `at` on.
fn copy_in(slots: &mut [Slot], at: usize, bytes: &[u8]) {
    let (first, byte) = (at / SLOT_BYTES, at % SLOT_BYTES);
    let (head, rest) = bytes.split_at(bytes.len().min(SLOT_BYTES - byte));
    slots[first].0[byte..][..head.len()].copy_from_slice(head);
    for (Slot(slot), piece) in slots[first + 1..].iter_mut().zip(rest.chunks(SLOT_BYTES)) {
        slot[..piece.len()].copy_from_slice(piece);
    }
}

/// Copies out of slots, from byte `at` on.
pub(super) fn copy_out(slots: &[Slot], at: usize, bytes: &mut [u8]) {
    let (first, byte) = (at / SLOT_BYTES, at % SLOT_BYTES);
    let (head, rest) = bytes.split_at_mut(bytes.len().min(SLOT_BYTES - byte));
    head.copy_from_slice(&slots[first].0[byte..][..head.len()]);
    for (Slot(slot), piece) in slots[first + 1..].iter().zip(rest.chunks_mut(SLOT_BYTES)) {
        piece.copy_from_slice(&slot[..piece.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::{Frame, LOST_MAX, SLOT_BYTES, begin, copy_out};
    use crate::store::backing::Token;
    use crate::testing::{Random, seed};

    /// A length that an object may have: of a third of a slot, whole slots, any.
    fn length(random: &mut Random) -> usize {
        match random.below(5) {
            0 => (1 + random.below(3)) * SLOT_BYTES,
            1 => 1 + random.below(64),
            2 => 1 + random.below(3 * SLOT_BYTES),
            _ => 700 + random.below(1300),
        }
    }

    /// Goal: objects keep their bytes, share none, touch one slot more than they need at most, and are counted in
    /// each slot. Method: seeded lengths until the frame is full, beside a list.
    #[test]
    fn a_frame_keeps_what_is_put_in() {
        let seed = seed();
        let mut random = Random::new(seed);
        for round in 0..500 {
            let mut frame = Frame::new(16);
            let room = 3 + random.below(14);
            frame.open(room);
            let mut objects = Vec::new();
            while objects.len() < 300 {
                let length = length(&mut random);
                let contents = random.bytes(length);
                let token = Token::numbered(u32::try_from(objects.len()).expect("few"));
                if !frame.append(token, &contents) {
                    break;
                }
                objects.push(contents);
            }
            let used = frame.close();
            let at = format!("seed {seed}, round {round}, {used} of {room} slots");
            assert!((1..=room).contains(&used), "{at}");
            let mut live = vec![0_u16; used];
            let mut taken = vec![false; used * SLOT_BYTES];
            assert_eq!(frame.objects.len(), objects.len());
            for (packed, contents) in frame.objects.iter().zip(&objects) {
                assert_eq!(objects[packed.token.number() as usize].len(), packed.length());
                let mut found = vec![0; contents.len()];
                let slots = frame.buffer.as_ref().expect("it is closed").slots();
                copy_out(slots, packed.at(), &mut found);
                assert!(found == *contents, "{at}");
                let bytes = &mut taken[packed.at()..packed.at() + contents.len()];
                assert!(bytes.iter().all(|taken| !taken), "{at}: a byte twice");
                bytes.fill(true);
                let touched = packed.slots();
                let needed = contents.len().div_ceil(SLOT_BYTES);
                let is_whole = contents.len() % SLOT_BYTES == 0;
                assert!(touched.len() <= needed + usize::from(!is_whole), "{at}");
                live[touched].iter_mut().for_each(|live| *live += 1);
            }
            assert_eq!(frame.live[..used], live, "{at}");
            assert!(live.iter().all(|live| *live > 0), "{at}: a slot without an object");
            let lost = taken.iter().filter(|taken| !**taken).count();
            // At the end of each slot at most LOST_MAX; and what the last one of the front has left.
            assert!(lost <= used * LOST_MAX + SLOT_BYTES, "{at}: {lost} bytes");
        }
    }

    #[test]
    fn an_object_straddles_only_if_that_saves_much() {
        let slot = SLOT_BYTES;
        for (front, length, at) in [
            (0, 100, 0),
            (0, 5000, 0),
            (slot - 512, 512, slot - 512),
            (slot - 512, 513, slot),
            (slot - 513, 514, slot - 513),
            (3000, 1096, 3000),
            (3000, 1097, 3000),
            // It touches two slots wherever it begins.
            (slot - 100, slot + 50, slot - 100),
            (slot - 100, slot + 101, slot),
            (slot, 1, slot),
        ] {
            assert_eq!(begin(front, length), at, "{length} bytes at {front}");
        }
    }
}
