//! Folios and units: what moves at once, and what is compressed as one object.
//!
//! A **folio** is the aligned run of pages that the pager moves at once; it is cut into one or more
//! **units**. Folios are large because a move interrupts every other CPU that runs the process (on
//! virtual machines this takes 5 to 10 us, two to three times the move itself). Units are small
//! because a random touch decompresses a whole unit. A folio is 64 KiB, or one unit if that is
//! larger.

use std::ops::{BitAnd, BitOr, BitOrAssign, Range, Sub, SubAssign};

use zfolio_core::page::UnitOrder;

/// The most units in a folio: 64 KiB in units of 4 KiB.
pub(crate) const UNITS_MAX: usize = 16;

/// The sizes of units and folios.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    unit: UnitOrder,
    folio: UnitOrder,
}

impl Geometry {
    /// The geometry for units of this size.
    pub(crate) fn new(unit: UnitOrder) -> Geometry {
        let geometry = Geometry { unit, folio: unit.folio() };
        assert!(geometry.units() <= UNITS_MAX);
        geometry
    }

    pub(crate) fn unit_bytes(self) -> usize {
        self.unit.bytes()
    }

    pub(crate) fn folio_bytes(self) -> usize {
        self.folio.bytes()
    }

    /// Pages of a folio.
    pub(crate) fn pages(self) -> usize {
        self.folio.pages()
    }

    /// Units of a folio.
    pub(crate) fn units(self) -> usize {
        1 << (self.folio.get() - self.unit.get())
    }

    /// Whole folios in `bytes`, at least one.
    pub(crate) fn at_most(self, bytes: usize) -> usize {
        (bytes / self.folio_bytes()).max(1)
    }

    /// All units of a folio.
    pub(crate) fn all(self) -> Units {
        Units::from(0..self.units())
    }

    /// The first address of the folio that `address` lies in.
    pub(crate) fn base(self, address: usize) -> usize {
        address & !(self.folio_bytes() - 1)
    }

    /// The first address of a folio at or above `address`; of the last folio of all, if there is none.
    pub(crate) fn base_above(self, address: usize) -> usize {
        self.base(address.saturating_add(self.folio_bytes() - 1))
    }

    /// The units of a folio that begins at `base`, numbered by their addresses: the range from the first to the last.
    pub(crate) fn numbers(self, base: usize, units: Units) -> Range<usize> {
        let (first, span) = (base / self.unit_bytes(), units.span());
        first + span.start..first + span.end
    }

    /// The index in its folio of the unit that `address` lies in.
    pub(crate) fn index(self, address: usize) -> usize {
        address % self.folio_bytes() / self.unit_bytes()
    }

    /// The units that a range of a folio's bytes overlaps.
    pub(crate) fn touched(self, bytes: Range<usize>) -> Units {
        Units::from(bytes.start / self.unit_bytes()..bytes.end.div_ceil(self.unit_bytes()))
    }

    /// The range of a folio's bytes that adjacent units take.
    pub(crate) fn bytes(self, units: Range<usize>) -> Range<usize> {
        units.start * self.unit_bytes()..units.end * self.unit_bytes()
    }

    /// The number of bytes of some units.
    pub(crate) fn bytes_of(self, units: Units) -> usize {
        units.count() * self.unit_bytes()
    }
}

/// Units of a page that make one wide unit.
pub(crate) const WIDE_UNITS: usize = 4;

/// A set of the units of one folio.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Units(u16);

impl From<Range<usize>> for Units {
    /// Adjacent units.
    fn from(units: Range<usize>) -> Units {
        let below = |end: usize| if end < UNITS_MAX { (1_u16 << end) - 1 } else { u16::MAX };
        Units(below(units.end) & !below(units.start))
    }
}

impl FromIterator<Units> for Units {
    /// All units of the sets.
    fn from_iter<I: IntoIterator<Item = Units>>(sets: I) -> Units {
        sets.into_iter().fold(Units::NONE, Units::bitor)
    }
}

impl Units {
    pub(crate) const NONE: Units = Units(0);

    pub(crate) fn one(index: usize) -> Units {
        Units(1 << index)
    }

    pub(crate) fn contains(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The shortest range that contains all units of the set, which is not empty.
    pub(crate) fn span(self) -> Range<usize> {
        let end = u16::BITS - self.0.leading_zeros();
        self.0.trailing_zeros() as usize..end as usize
    }

    /// The wide unit that a unit lies in.
    pub(crate) fn wide_around(index: usize) -> Units {
        let start = index / WIDE_UNITS * WIDE_UNITS;
        Units::from(start..start + WIDE_UNITS)
    }

    /// The set cut into what is stored as one object each, in rising order: the wide units that lie in `wide`, and
    /// single units. The set has all or none of each wide unit.
    pub(crate) fn objects(self, wide: Units) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        self.iter().filter_map(move |index| {
            if index < end {
                return None;
            }
            let start = index;
            let length = if wide.contains(index) { WIDE_UNITS } else { 1 };
            end = start + length;
            debug_assert!((Units::from(start..end) - self).is_empty(), "a part of a wide unit");
            Some(start..end)
        })
    }

    /// The set and all units of the wide units that it has a part of.
    pub(crate) fn whole(self, wide: Units) -> Units {
        self | (self & wide).fours()
    }

    /// The wide units that the set has a part of.
    pub(crate) fn fours(self) -> Units {
        self.iter().map(Units::wide_around).collect()
    }

    /// Each unit, in rising order.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        (0..UNITS_MAX).filter(move |index| self.contains(*index))
    }

    /// The runs of adjacent units, each as long as possible, in rising order.
    pub(crate) fn runs(self) -> impl Iterator<Item = Range<usize>> {
        let mut rest = u32::from(self.0);
        std::iter::from_fn(move || {
            let start = rest.trailing_zeros();
            let length = (rest.checked_shr(start)?).trailing_ones();
            rest &= u32::MAX.checked_shl(start + length).unwrap_or(0);
            Some(start as usize..(start + length) as usize)
        })
    }
}

impl BitOr for Units {
    type Output = Units;
    fn bitor(self, other: Units) -> Units {
        Units(self.0 | other.0)
    }
}

impl BitOrAssign for Units {
    fn bitor_assign(&mut self, other: Units) {
        *self = *self | other;
    }
}

impl BitAnd for Units {
    type Output = Units;
    fn bitand(self, other: Units) -> Units {
        Units(self.0 & other.0)
    }
}

impl Sub for Units {
    type Output = Units;
    fn sub(self, other: Units) -> Units {
        Units(self.0 & !other.0)
    }
}

impl SubAssign for Units {
    fn sub_assign(&mut self, other: Units) {
        *self = *self - other;
    }
}

#[cfg(test)]
mod tests {
    use super::{Geometry, Units, WIDE_UNITS};
    use zfolio_core::page::UnitOrder;

    /// Goal: the runs cover exactly the set, are as long as possible, and rise. Method: all sets.
    #[test]
    fn runs_cover_every_set_and_do_not_touch() {
        for bits in 0..=u16::MAX {
            let units = Units(bits);
            let mut covered = Units::NONE;
            let mut end = None;
            for run in units.runs() {
                assert!(run.start < run.end && end.is_none_or(|end| run.start > end), "{bits:#x}");
                end = Some(run.end);
                covered |= Units::from(run);
            }
            assert_eq!(covered, units);
            assert_eq!(units.iter().count(), units.count());
            if bits != 0 {
                let last = units.iter().last().unwrap();
                assert_eq!(units.span(), units.iter().next().unwrap()..last + 1);
            }
        }
    }

    /// Goal: objects are the wide units and the single ones, in rising order, and together the whole set. Method: all
    /// sets, with wide units in four places.
    #[test]
    fn objects_are_wide_units_and_single_ones() {
        for fours in [0_u16, 0x000F, 0xF0F0, 0xFFFF] {
            let wide = Units(fours);
            assert_eq!(wide.fours(), wide);
            for bits in 0..=u16::MAX {
                let units = Units(bits).whole(wide);
                assert!((Units(bits) - units).is_empty(), "all of the set");
                assert_eq!(units & wide, (Units(bits) & wide).fours(), "wide units as a whole");
                assert_eq!(units - wide, Units(bits) - wide, "and nothing else");
                let (mut covered, mut end) = (Units::NONE, 0);
                for object in units.objects(wide) {
                    let is_wide = wide.contains(object.start);
                    assert_eq!(object.len(), if is_wide { WIDE_UNITS } else { 1 });
                    assert!(object.start >= end && (!is_wide || object.start % WIDE_UNITS == 0));
                    end = object.end;
                    covered |= Units::from(object);
                }
                assert_eq!(covered, units);
            }
        }
    }

    #[test]
    fn a_folio_is_64_kib_or_one_larger_unit() {
        for (unit, folio, units) in [(4, 64, 16), (16, 64, 4), (64, 64, 1), (2048, 2048, 1)] {
            let geometry = Geometry::new(UnitOrder::from_bytes(unit << 10).unwrap());
            assert_eq!((geometry.folio_bytes(), geometry.units()), (folio << 10, units));
            assert_eq!(geometry.all().count(), units);
        }
    }

    #[test]
    fn addresses_find_their_folio_and_unit() {
        let geometry = Geometry::new(UnitOrder::from_bytes(16 << 10).unwrap());
        assert_eq!((geometry.base(0x2_9abc), geometry.index(0x2_9abc)), (0x2_0000, 2));
        assert_eq!(geometry.base_above(0x2_0001), 0x3_0000);
        assert_eq!(geometry.base_above(usize::MAX), usize::MAX - 0xffff);
        assert_eq!(geometry.touched(0x3fff..0x4001), Units::from(0..2));
        assert_eq!(geometry.touched(0x4000..0x8000), Units::one(1));
        assert_eq!(geometry.bytes(1..3), 0x4000..0xc000);
    }
}
