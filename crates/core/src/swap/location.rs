//! Where an object is, as the 42 bits of a [`Location`].
//!
//! ```text
//! 41..38   37..12   11..0
//! area     slot     byte in the slot
//! ```
//!
//! So there are 16 areas, each of up to 2^26 slots: 256 GiB.

use std::ops::Range;

use super::disk::SLOT_BYTES;
use crate::store::backing::Location;

/// Areas at once.
pub const AREAS_MAX: usize = 1 << AREA_BITS;

/// Slots of an area at most.
pub const SLOTS_MAX: u32 = 1 << SLOT_BITS;

const AREA_BITS: u32 = 4;
const SLOT_BITS: u32 = 26;
const BYTE_BITS: u32 = SLOT_BYTES.ilog2();

const _: () = assert!(AREA_BITS + SLOT_BITS + BYTE_BITS == Location::BITS);

/// Names an area of one [`Areas`](super::Areas) for as long as it is there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct AreaId(u8);

impl AreaId {
    /// The area of this number, counted from 0; `None` if there are fewer at most.
    #[must_use]
    pub fn new(number: usize) -> Option<AreaId> {
        u8::try_from(number).ok().filter(|_| number < AREAS_MAX).map(AreaId)
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }

    /// All that there can be.
    pub(super) fn all() -> impl Iterator<Item = AreaId> {
        (0..AREAS_MAX).filter_map(AreaId::new)
    }

    /// The area in which a location is.
    #[must_use]
    pub fn of(location: Location) -> AreaId {
        Place::of(location).area
    }
}

/// Where an object begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) area: AreaId,
    pub(super) slot: u32,
    /// Byte in the slot.
    pub(super) byte: usize,
}

impl Place {
    /// The place which a location stands for.
    pub(super) fn of(location: Location) -> Place {
        let number = location.get();
        let field = |shift: u32, bits: u32| number >> shift & ((1 << bits) - 1);
        let area = usize::try_from(field(SLOT_BITS + BYTE_BITS, AREA_BITS)).ok();
        Place {
            area: area.and_then(AreaId::new).expect("4 bits"),
            slot: u32::try_from(field(BYTE_BITS, SLOT_BITS)).expect("26 bits"),
            byte: usize::try_from(field(0, BYTE_BITS)).expect("12 bits"),
        }
    }

    /// The location that stands for it.
    pub(super) fn location(self) -> Location {
        debug_assert!(self.slot < SLOTS_MAX && self.byte < SLOT_BYTES, "{self:?}");
        let slot = (self.area.get() as u64) << SLOT_BITS | u64::from(self.slot);
        Location::new(slot << BYTE_BITS | self.byte as u64).expect("42 bits")
    }

    /// The slots that an object of `length` bytes touches.
    pub(super) fn slots(self, length: usize) -> Range<u32> {
        let count = (self.byte + length).div_ceil(SLOT_BYTES);
        self.slot..self.slot + u32::try_from(count).expect("an object has at most 2 MiB")
    }
}

#[cfg(test)]
mod tests {
    use super::{AREAS_MAX, AreaId, Place, SLOTS_MAX};

    #[test]
    fn a_location_keeps_the_ends_of_each_field() {
        for number in [0, 1, AREAS_MAX - 1] {
            for slot in [0, 1, SLOTS_MAX - 1] {
                for byte in [0, 1, 4095] {
                    let area = AreaId::new(number).expect("one of 16");
                    let place = Place { area, slot, byte };
                    assert_eq!(Place::of(place.location()), place);
                    assert_eq!(AreaId::of(place.location()), area);
                }
            }
        }
        assert_eq!(AreaId::new(AREAS_MAX), None);
    }

    #[test]
    fn an_object_touches_the_slots_of_its_first_and_last_byte() {
        let area = AreaId::new(0).expect("one of 16");
        let slots = |byte, length| Place { area, slot: 7, byte }.slots(length);
        assert_eq!(slots(0, 1), 7..8);
        assert_eq!(slots(4095, 1), 7..8);
        assert_eq!(slots(0, 4096), 7..8);
        assert_eq!(slots(1, 4096), 7..9);
        assert_eq!(slots(4095, 2), 7..9);
        assert_eq!(slots(0, 2 << 20), 7..7 + 512);
        assert_eq!(slots(1, 2 << 20), 7..7 + 513);
    }
}
