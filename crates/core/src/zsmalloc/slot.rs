//! The word of a handle: where its object is, how long it is, and who is reading it.
//!
//! ```text
//! 63    62..56  55..28   27..21   20..0
//! live  pins    zspage   object   length - 1       an object
//! 0     0       0        next vacant slot + 1      vacant (the lower 32 bits), or taken (0)
//! ```
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
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

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
};

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
            length: field(word, 0, LENGTH_BITS) as usize + 1,
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

    /// Ends the object: afterwards the slot is taken, and its handle finds nothing.
    pub(super) fn vacate(&self) -> Result<Object, Misuse> {
        let mut word = self.0.load(Relaxed);
        loop {
            let object = Object::from_word(word).ok_or(Misuse::Stale)?;
            if pins(word) != 0 {
                return Err(Misuse::Pinned);
            }
            // Acquire: pairs with the Release in unpin(), publish() and settle().
            match self.0.compare_exchange_weak(word, 0, Acquire, Relaxed) {
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
    use super::{Misuse, Object, Slot};
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
                }
            }
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
