//! The word of a handle: where its object is, how long it is, and who is reading it.
//!
//! ```text
//! 63    62..56  55..28   27..21   20..0
//! live  pins    zspage   object   length - 1       an object
//! 0     where                     length - 1       the object is elsewhere: 42 bits say where
//! 0     0       0        next vacant slot + 1      vacant (the lower 32 bits), or taken (0)
//! ```
//!
//! The pool does not know which of the last two a word is: the user of the handle remembers.
//!
//! # Invariants
//!
//! - `SLOT-1` Pins are counted by compare-and-swap on a live word, so a vacant word is never changed
//!   by a reader, and an object is not freed between a reader's look and its pin.
//! - `SLOT-2` `PINS_MAX` pins mean: wait. So many readers of one object at once are not real; it is
//!   how compaction holds an object still while it moves.

#[cfg(all(test, feature = "loom"))]
use loom::{sync::atomic::AtomicU64, thread::yield_now as pause};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::shape::OBJECTS_MAX;
use super::table::Entry;
use super::zspage::{ZSPAGE_ID_BITS, ZspageId};
use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX};
#[cfg(not(all(test, feature = "loom")))]
use crate::sync::pause;

const LENGTH_BITS: u32 = 21;
const OBJECT_BITS: u32 = 7;
const PIN_BITS: u32 = 7;

const OBJECT_SHIFT: u32 = LENGTH_BITS;
const ZSPAGE_SHIFT: u32 = OBJECT_SHIFT + OBJECT_BITS;
const PIN_SHIFT: u32 = ZSPAGE_SHIFT + ZSPAGE_ID_BITS;
const LIVE: u64 = 1 << 63;
const PIN: u64 = 1 << PIN_SHIFT;
const PINS_MAX: u64 = (1 << PIN_BITS) - 1;

const _: () = {
    assert!(PIN_SHIFT + PIN_BITS == 63);
    assert!(PAGE_BYTES << UNIT_ORDER_MAX <= 1 << LENGTH_BITS);
    assert!(OBJECTS_MAX <= 1 << OBJECT_BITS);
    assert!(LENGTH_BITS + Away::PLACE_BITS == 63);
};

/// Where an object is that has left the pool, and how long it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Away {
    /// Of the user's choice, below `1 << PLACE_BITS`.
    pub(crate) place: u64,
    /// Bytes of the object, at least 1.
    pub(crate) length: usize,
}

impl Away {
    /// Bits of a place.
    pub(crate) const PLACE_BITS: u32 = 42;

    fn to_word(self) -> u64 {
        assert!(self.place >> Away::PLACE_BITS == 0, "place {} is out of range", self.place);
        debug_assert!(self.length > 0 && self.length <= 1 << LENGTH_BITS);
        self.place << LENGTH_BITS | (self.length as u64 - 1)
    }

    fn from_word(word: u64) -> Away {
        debug_assert_eq!(word & LIVE, 0, "the object is here");
        Away { place: word >> LENGTH_BITS, length: length(word) }
    }
}

/// Bytes of an object, here or away.
fn length(word: u64) -> usize {
    (word & ((1 << LENGTH_BITS) - 1)) as usize + 1
}

/// An object: the place it has and the bytes in use of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Object {
    pub(super) zspage: ZspageId,
    /// Which of the zspage's objects.
    pub(super) index: usize,
    /// Bytes stored, at least 1.
    pub(super) length: usize,
}

/// Why a slot could not be vacated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Misuse {
    /// There is no object: freed twice, or never stored.
    Stale,
    /// Somebody reads it.
    Pinned,
}

/// The word.
#[derive(Debug)]
pub(super) struct Slot(AtomicU64);

impl Object {
    fn to_word(self) -> u64 {
        debug_assert!(self.length > 0 && self.length <= 1 << LENGTH_BITS);
        debug_assert!(self.index < OBJECTS_MAX);
        LIVE | u64::from(self.zspage.to_raw()) << ZSPAGE_SHIFT
            | (self.index as u64) << OBJECT_SHIFT
            | (self.length as u64 - 1)
    }

    /// The object of a live word.
    fn from_word(word: u64) -> Option<Object> {
        /// `bits` bits of `word` from `shift` on; at most 28.
        #[expect(clippy::cast_possible_truncation, reason = "masked to 28 bits or fewer")]
        const fn field(word: u64, shift: u32, bits: u32) -> u32 {
            (word >> shift & ((1 << bits) - 1)) as u32
        }
        (word & LIVE != 0).then(|| Object {
            zspage: ZspageId::from_raw(field(word, ZSPAGE_SHIFT, ZSPAGE_ID_BITS)),
            index: field(word, OBJECT_SHIFT, OBJECT_BITS) as usize,
            length: length(word),
        })
    }
}

fn pins(word: u64) -> u64 {
    word >> PIN_SHIFT & PINS_MAX
}

impl Slot {
    /// Makes a taken slot live: from now on its handle finds `object`.
    pub(super) fn publish(&self, object: Object) {
        debug_assert_eq!(self.0.load(Relaxed) & LIVE, 0, "published twice");
        // Release: pairs with the Acquire in object() and pin(); the object's bytes are seen whole.
        self.0.store(object.to_word(), Release);
    }

    /// The object, if there is one.
    pub(super) fn object(&self) -> Option<Object> {
        // Acquire: pairs with the Release in publish() and settle().
        Object::from_word(self.0.load(Acquire))
    }

    /// The object, if there is one, held where it is until [`Slot::unpin`].
    pub(super) fn pin(&self) -> Option<Object> {
        let mut word = self.0.load(Relaxed);
        loop {
            let object = Object::from_word(word)?;
            if pins(word) == PINS_MAX {
                // A copy of some microseconds; or whoever copies does not run, and should.
                pause();
                word = self.0.load(Relaxed);
                continue;
            }
            // Acquire: pairs with the Release in publish() and settle().
            match self.0.compare_exchange_weak(word, word + PIN, Acquire, Relaxed) {
                Ok(_) => return Some(object),
                Err(now) => word = now,
            }
        }
    }

    /// Takes back one pin.
    pub(super) fn unpin(&self) {
        // Release: pairs with the Acquire in vacate() and hold(); what was read was read before.
        let before = self.0.fetch_sub(PIN, Release);
        debug_assert!(before & LIVE != 0 && pins(before) > 0, "unpinned without a pin");
    }

    /// Holds the object still, and readers off, until [`Slot::settle`]. `None`: there is no object, or
    /// somebody reads it. Only for who holds the lock of the object's class: one at a time.
    pub(super) fn hold(&self) -> Option<Object> {
        let mut word = self.0.load(Relaxed);
        loop {
            let object = Object::from_word(word).filter(|_| pins(word) == 0)?;
            let held = word | PINS_MAX << PIN_SHIFT;
            // Acquire: pairs with the Release in unpin() and publish().
            match self.0.compare_exchange_weak(word, held, Acquire, Relaxed) {
                Ok(_) => return Some(object),
                Err(now) => word = now,
            }
        }
    }

    /// Ends a [`Slot::hold`]: from now on the handle finds `object`, which has the same bytes.
    pub(super) fn settle(&self, object: Object) {
        debug_assert_eq!(pins(self.0.load(Relaxed)), PINS_MAX, "SLOT-2");
        // Release: pairs with the Acquire in object() and pin(); the moved bytes are seen whole.
        self.0.store(object.to_word(), Release);
    }

    /// Forgets the link of a slot that was just taken.
    pub(super) fn clear(&self) {
        debug_assert_eq!(self.0.load(Relaxed) & LIVE, 0, "taken twice");
        self.0.store(0, Relaxed);
    }

    /// Ends the object: afterwards the slot is taken, and its handle finds nothing.
    pub(super) fn vacate(&self) -> Result<Object, Misuse> {
        self.leave(0)
    }

    /// Ends the object, and notes where its bytes are from now on. Their length is that of the object.
    pub(super) fn send_away(&self, place: u64) -> Result<Object, Misuse> {
        let object = self.object().ok_or(Misuse::Stale)?;
        // A move by compaction changes zspage and index only.
        self.leave(Away { place, length: object.length }.to_word())
    }

    /// Where the bytes of a handle are that has no object.
    pub(super) fn away(&self) -> Away {
        // Acquire: pairs with the Release in leave().
        Away::from_word(self.0.load(Acquire))
    }

    /// The same, where another thread may bring the bytes back just now: `None` if it has.
    pub(super) fn try_away(&self) -> Option<Away> {
        // Acquire: pairs with the Release in leave().
        Some(self.0.load(Acquire)).filter(|word| word & LIVE == 0).map(Away::from_word)
    }

    /// Bytes of the object, here or away.
    pub(super) fn length(&self) -> usize {
        length(self.0.load(Relaxed))
    }

    /// Ends the object, and leaves `after` in its place.
    fn leave(&self, after: u64) -> Result<Object, Misuse> {
        let mut word = self.0.load(Relaxed);
        loop {
            let object = Object::from_word(word).ok_or(Misuse::Stale)?;
            if pins(word) != 0 {
                return Err(Misuse::Pinned);
            }
            // Acquire: pairs with the Release in unpin(), publish() and settle(). Release: pairs with the
            // Acquire in away().
            match self.0.compare_exchange_weak(word, after, AcqRel, Relaxed) {
                Ok(_) => return Ok(object),
                Err(now) => word = now,
            }
        }
    }
}

impl Entry for Slot {
    fn vacant() -> Self {
        Slot(AtomicU64::new(0))
    }

    fn set_link(&self, link: u32) {
        debug_assert_eq!(self.0.load(Relaxed) & LIVE, 0, "a live slot has no link");
        self.0.store(u64::from(link), Relaxed);
    }

    #[expect(clippy::cast_possible_truncation, reason = "a vacant word is a 32-bit link")]
    fn link(&self) -> u32 {
        // Read only by whom the chain belongs to: nothing to order.
        let word = self.0.load(Relaxed);
        debug_assert_eq!(word >> 32, 0, "TABLE-2: a live slot in a chain");
        word as u32
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::{Away, Misuse, Object, Slot};
    use crate::zsmalloc::table::Entry;
    use crate::zsmalloc::zspage::{ZSPAGE_ID_BITS, ZspageId};

    #[test]
    fn a_word_keeps_the_ends_of_each_field() {
        for length in [1, 2, 4096, 2 << 20] {
            for index in [0, 1, 127] {
                for zspage in [0, 7, (1 << ZSPAGE_ID_BITS) - 1] {
                    let slot = Slot::vacant();
                    let object = Object { zspage: ZspageId::from_raw(zspage), index, length };
                    slot.publish(object);
                    assert_eq!(slot.object(), Some(object));
                    assert_eq!(slot.pin(), Some(object));
                    assert_eq!(slot.vacate(), Err(Misuse::Pinned));
                    slot.unpin();
                    assert_eq!(slot.vacate(), Ok(object));
                    assert_eq!(slot.vacate(), Err(Misuse::Stale));
                    assert_eq!(slot.pin(), None);
                    for place in [0, 1, (1 << Away::PLACE_BITS) - 1] {
                        slot.publish(object);
                        assert_eq!(slot.send_away(place), Ok(object));
                        assert_eq!((slot.object(), slot.pin()), (None, None));
                        assert_eq!(slot.away(), Away { place, length });
                        assert_eq!(slot.length(), length);
                    }
                }
            }
        }
    }
}

/// A slot for the loom tests of the store, which have one object.
#[cfg(all(test, feature = "loom"))]
pub(crate) mod loom_slot {
    use super::{Object, Slot};
    use crate::zsmalloc::table::Entry;
    use crate::zsmalloc::zspage::ZspageId;

    pub(crate) struct LoomSlot(Slot);

    impl LoomSlot {
        pub(crate) fn new() -> Self {
            LoomSlot(Slot::vacant())
        }

        pub(crate) fn publish(&self) {
            self.0.publish(Object { zspage: ZspageId::from_raw(0), index: 0, length: 4 });
        }

        pub(crate) fn pin(&self) -> bool {
            self.0.pin().is_some()
        }

        pub(crate) fn unpin(&self) {
            self.0.unpin();
        }

        pub(crate) fn vacate(&self) -> bool {
            self.0.vacate().is_ok()
        }

        pub(crate) fn send_away(&self) -> bool {
            self.0.send_away(1).is_ok()
        }
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    use super::{Misuse, Object, Slot};
    use crate::zsmalloc::table::Entry;
    use crate::zsmalloc::zspage::ZspageId;

    /// Two places, and a slot that says in which of them the bytes are. Loom sees to it that nobody
    /// writes a place while another reads it.
    struct World {
        slot: Slot,
        places: [UnsafeCell<u32>; 2],
    }

    const BYTES: u32 = 7;

    impl World {
        fn new() -> Arc<World> {
            let slot = Slot::vacant();
            let places = [UnsafeCell::new(BYTES), UnsafeCell::new(0)];
            slot.publish(at(0));
            Arc::new(World { slot, places })
        }

        fn read(&self) {
            let Some(object) = self.slot.pin() else { return };
            // SAFETY: pinned, so nobody writes this place: what loom checks here.
            self.places[object.index].with(|bytes| assert_eq!(unsafe { *bytes }, BYTES));
            self.slot.unpin();
        }

        /// Moves the object to the other place, and uses the one that it left for something else.
        fn migrate(&self) {
            let Some(object) = self.slot.hold() else { return };
            let to = 1 - object.index;
            // SAFETY: held, so nobody writes it.
            let bytes = self.places[object.index].with(|bytes| unsafe { *bytes });
            // SAFETY: reserved for the mover.
            self.places[to].with_mut(|place| unsafe { *place = bytes });
            self.slot.settle(at(to));
            // SAFETY: the object has left it.
            self.places[object.index].with_mut(|place| unsafe { *place = 0 });
        }
    }

    fn at(index: usize) -> Object {
        Object { zspage: ZspageId::from_raw(0), index, length: 4 }
    }

    #[test]
    fn loom_readers_and_a_move() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let reader = loom::thread::spawn(move || other.read());
            world.migrate();
            world.read();
            reader.join().unwrap();
            assert!(world.slot.vacate().is_ok());
        });
    }

    #[test]
    fn loom_a_free_under_a_read_is_told() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let reader = loom::thread::spawn(move || other.read());
            match world.slot.vacate() {
                // SAFETY: vacated, so no reader comes any more, and none is there.
                Ok(object) => world.places[object.index].with_mut(|place| unsafe { *place = 0 }),
                Err(misuse) => assert_eq!(misuse, Misuse::Pinned),
            }
            reader.join().unwrap();
        });
    }
}
