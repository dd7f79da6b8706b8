//! Pieces of large requests: what a front end hands to the device by one call, where it has no room for the whole.
//!
//! A piece ends where one of the device's units does, and is a unit at least: so a unit that is whole in a request is
//! read, compressed and decompressed once.

use zfolio_core::page::{PAGE_BYTES, UNIT_ORDER_MAX};

use crate::device::{Device, SECTOR_BYTES};

/// Pieces are about so long, or one unit of the device if that is larger.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// Units of a device that are larger are cut.
const UNIT_BYTES_MAX: usize = PAGE_BYTES << UNIT_ORDER_MAX;

const _: () = assert!(PIECE_BYTES.is_power_of_two() && UNIT_BYTES_MAX.is_power_of_two());

/// How requests to a device are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    /// A power of two.
    unit_bytes: u64,
}

impl Pieces {
    pub(crate) fn of(device: &dyn Device) -> Pieces {
        let preferred_bytes = device.preferred_bytes().max(SECTOR_BYTES);
        Pieces { unit_bytes: u64::from(preferred_bytes).min(UNIT_BYTES_MAX as u64) }
    }

    /// The longest piece.
    pub(crate) fn bytes_max(self) -> usize {
        let unit_bytes = usize::try_from(self.unit_bytes).expect("no more than UNIT_BYTES_MAX");
        unit_bytes.max(PIECE_BYTES)
    }

    /// The last end of a unit in `bytes` from `at` on. It may be before `at`, where no unit ends.
    pub(crate) fn last_end(self, at: u64, bytes: u64) -> u64 {
        (at + bytes) / self.unit_bytes * self.unit_bytes
    }

    /// The first end of a unit that is no less than `bytes` behind `at`.
    pub(crate) fn end_behind(self, at: u64, bytes: u64) -> u64 {
        (at + bytes).next_multiple_of(self.unit_bytes)
    }

    /// The length of the next piece of a request that has `left` bytes from `at` on: all of them if they are no more
    /// than a piece, or up to the last end of a unit.
    pub(crate) fn next(self, at: u64, left: u64) -> usize {
        let most = self.bytes_max() as u64;
        // A piece is a unit at least, so a unit ends behind `at`.
        let bytes = if left <= most { left } else { self.last_end(at, most) - at };
        usize::try_from(bytes).expect("no more than a piece")
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, Pieces};
    use crate::testing::Memory;

    #[test]
    fn pieces_end_where_units_do() {
        let next = |unit_bytes: u32, at: u64, left: u64| {
            Pieces::of(&Memory::new(8 << 20).preferring(unit_bytes)).next(at, left)
        };
        let unit = 64 << 10;
        assert_eq!(next(unit, 0, 4096), 4096);
        assert_eq!(next(unit, 0, 1 << 20), PIECE_BYTES);
        assert_eq!(next(unit, 512, 1 << 20), PIECE_BYTES - 512);
        assert_eq!(next(unit, 512, PIECE_BYTES as u64), PIECE_BYTES, "it is a piece at most");
        assert_eq!(next(unit, (64 << 10) - 512, 1 << 20), (192 << 10) + 512);
        assert_eq!(next(2 << 20, 0, 4 << 20), 2 << 20);
        assert_eq!(next(2 << 20, 512, 4 << 20), (2 << 20) - 512);
        assert_eq!(next(2 << 20, (2 << 20) - 512, 4 << 20), 512);
        assert_eq!(next(2 << 20, 0, (2 << 20) + 512), 2 << 20);
        assert_eq!(next(0, 512, 1 << 20), PIECE_BYTES, "a sector is the smallest unit");
        assert_eq!(next(8 << 20, 0, 8 << 20), 2 << 20, "larger units are cut");
    }
}
