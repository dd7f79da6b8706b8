//! The page, and the unit: a power of two of pages that is compressed as one object.

use std::fmt;

/// Bytes in a page, the smallest thing that a program can touch.
///
/// `zfolio-sys` has a constant of the same name and value, since neither crate depends on the other.
pub const PAGE_BYTES: usize = 4096;

/// The largest order: 2^9 pages = 2 MiB, one huge page.
pub const UNIT_ORDER_MAX: u8 = 9;

const _: () = {
    assert!(PAGE_BYTES.is_power_of_two());
    assert!(PAGE_BYTES << UNIT_ORDER_MAX == 2 << 20);
};

/// The size of a unit as a power of two of pages: order 0 is 4 KiB, order 4 is 64 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UnitOrder(u8);

impl UnitOrder {
    /// One page.
    pub const PAGE: UnitOrder = UnitOrder(0);

    /// 4 KiB, the default: real programs touch their memory here and there, and wait a quarter less than
    /// with 16 KiB (`docs/design/pager.md`, "Rejected").
    pub const DEFAULT: UnitOrder = UnitOrder::PAGE;

    /// 64 KiB: what is moved at once, at least.
    pub const FOLIO: UnitOrder = UnitOrder(4);

    /// The order of a unit of `bytes`, or `None` unless it is a power of two of 4 KiB to 2 MiB.
    #[must_use]
    pub fn from_bytes(bytes: usize) -> Option<UnitOrder> {
        (0..=UNIT_ORDER_MAX).map(UnitOrder).find(|order| order.bytes() == bytes)
    }

    /// The folio of such units: what is moved at once.
    #[must_use]
    pub fn folio(self) -> UnitOrder {
        self.max(UnitOrder::FOLIO)
    }

    /// log2 of the pages.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }

    /// Bytes of one unit.
    #[must_use]
    pub fn bytes(self) -> usize {
        PAGE_BYTES << self.0
    }

    /// Pages of one unit.
    #[must_use]
    pub fn pages(self) -> usize {
        1 << self.0
    }
}

impl fmt::Display for UnitOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = self.bytes() >> 10;
        if kib < 1024 { write!(f, "{kib}K") } else { write!(f, "{}M", kib >> 10) }
    }
}

/// The machine word, in this machine's byte order, that `unit` repeats, if it does.
///
/// A unit is one word repeated exactly if it equals itself moved by a word. The comparison is
/// libc's `memcmp`: vectors, and an exit at the first difference.
#[must_use]
pub fn same_filled(unit: &[u8]) -> Option<u64> {
    let word = u64::from_ne_bytes(*unit.first_chunk()?);
    let moved = &unit[size_of::<u64>()..];
    (unit.len() % size_of::<u64>() == 0 && *moved == unit[..moved.len()]).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::{PAGE_BYTES, UnitOrder, same_filled};

    #[test]
    fn only_powers_of_two_from_one_page_to_2_mib_are_units() {
        assert_eq!(UnitOrder::from_bytes(65536), Some(UnitOrder::FOLIO));
        assert_eq!(UnitOrder::from_bytes(2 << 20).map(UnitOrder::pages), Some(512));
        for bytes in [0, 1, 2048, 4097, 12288, 4 << 20] {
            assert_eq!(UnitOrder::from_bytes(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn a_unit_is_same_filled_only_if_every_word_is() {
        let mut unit = 0x0102_0304_0506_0708_u64.to_ne_bytes().repeat(PAGE_BYTES / 8);
        assert_eq!(same_filled(&unit), Some(0x0102_0304_0506_0708));
        for at in [0, 7, 8, 63, 64, 2048, PAGE_BYTES - 1] {
            unit[at] ^= 1;
            assert_eq!(same_filled(&unit), None, "byte {at}");
            unit[at] ^= 1;
        }
    }
}
