//! A set of addresses, kept as ranges.
//!
//! # Invariants
//!
//! - `RANGE-1` Ranges are not empty and do not overlap. Adjacent ranges stay separate, except that
//!   [`Ranges::join`] merges them.
//! - `RANGE-2` `bytes` is the sum of their lengths.

use std::collections::BTreeMap;

/// A set of addresses. Ranges are half open: they do not include their end.
#[derive(Debug, Default)]
pub struct Ranges {
    /// The end of each range, by its start.
    ends: BTreeMap<usize, usize>,
    bytes: usize,
}

impl Ranges {
    /// An empty set.
    pub const fn new() -> Ranges {
        Ranges { ends: BTreeMap::new(), bytes: 0 }
    }

    /// Adds a range as one range of its own; parts of it that were in other ranges leave those.
    pub fn insert(&mut self, start: usize, end: usize) {
        self.remove(start, end);
        self.put(start, end);
    }

    /// Adds a range, merged with all ranges that overlap or touch it.
    pub fn join(&mut self, start: usize, end: usize) {
        if start >= end {
            return;
        }
        let (mut first, mut last) = (start, end);
        // At most one existing range reaches in from below, and at most one begins at the end or
        // reaches past it.
        if let Some((below, until)) = self.last_below(start).filter(|below| below.1 >= start) {
            (first, last) = (below, last.max(until));
        }
        if let Some((_, until)) = self.last_below(end.saturating_add(1)) {
            last = last.max(until);
        }
        self.remove(first, last);
        self.put(first, last);
    }

    /// The range that contains `address`.
    pub fn around(&self, address: usize) -> Option<(usize, usize)> {
        let (start, end) = self.ends.range(..=address).next_back()?;
        (address < *end).then_some((*start, *end))
    }

    /// Removes `start..end`; returns how many bytes of it were in the set.
    pub fn remove(&mut self, start: usize, end: usize) -> usize {
        if start >= end {
            return 0;
        }
        let before = self.bytes;
        while let Some((old_start, old_end)) = self.last_below(end).filter(|last| last.1 > start) {
            self.ends.remove(&old_start);
            self.bytes -= old_end - old_start;
            self.put(old_start, start.min(old_end));
            self.put(end.max(old_start), old_end);
            if old_start <= start {
                break;
            }
        }
        before - self.bytes
    }

    fn put(&mut self, start: usize, end: usize) {
        if start < end {
            self.ends.insert(start, end);
            self.bytes += end - start;
        }
    }

    /// The last range that starts below `end`.
    fn last_below(&self, end: usize) -> Option<(usize, usize)> {
        self.ends.range(..end).next_back().map(|(start, end)| (*start, *end))
    }

    /// Whether the set contains `address`.
    pub fn contains(&self, address: usize) -> bool {
        self.around(address).is_some()
    }

    /// Whether the set contains any of `start..end`.
    pub fn overlap(&self, start: usize, end: usize) -> bool {
        start < end && self.last_below(end).is_some_and(|last| last.1 > start)
    }

    /// The parts of `start..end` in the set, in rising order.
    pub fn pieces(&self, start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let first = self.around(start).map_or(start, |around| around.0);
        let ranges = self.ends.range(first..end.max(first));
        let pieces = ranges.map(move |(from, to)| (start.max(*from), end.min(*to)));
        pieces.filter(|(from, to)| from < to)
    }

    /// The parts of `start..end` that are not in the set.
    pub fn gaps(&self, start: usize, end: usize) -> Ranges {
        let mut gaps = Ranges::new();
        gaps.put(start, end);
        self.pieces(start, end).for_each(|(from, to)| _ = gaps.remove(from, to));
        gaps
    }

    /// How many bytes of `start..end` are in the set.
    pub fn bytes_in(&self, start: usize, end: usize) -> usize {
        self.pieces(start, end).map(|(from, to)| to - from).sum()
    }

    /// The ranges, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.ends.iter().map(|(start, end)| (*start, *end))
    }

    /// Bytes of all ranges together.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Ranges;
    use crate::testing::Random;

    #[test]
    fn removing_the_middle_leaves_both_ends() {
        let mut ranges = Ranges::new();
        ranges.insert(0, 10);
        assert_eq!(ranges.remove(3, 5), 2);
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(0, 3), (5, 10)]);
        assert_eq!(ranges.bytes(), 8);
    }

    #[test]
    fn nothing_is_in_an_empty_range() {
        let mut ranges = Ranges::new();
        ranges.insert(4, 8);
        ranges.insert(6, 6);
        assert!(!ranges.overlap(6, 6) && !ranges.overlap(8, 9) && ranges.overlap(7, 8));
        assert_eq!(ranges.remove(6, 6), 0);
        ranges.insert(7, 7);
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(4, 8)]);
    }

    /// Goal: ranges that are only added by `join` are the longest runs of a set of addresses.
    #[test]
    fn joined_ranges_are_the_runs_of_a_set() {
        const ADDRESSES: usize = 64;
        let mut random = Random::new(7);
        let (mut ranges, mut set) = (Ranges::new(), BTreeSet::new());
        for _ in 0..20_000 {
            let start = random.below(ADDRESSES);
            let end = start + random.below((ADDRESSES - start + 1).min(9));
            if random.below(2) == 0 {
                ranges.join(start, end);
                set.extend(start..end);
            } else {
                ranges.remove(start, end);
                set.retain(|address| !(start..end).contains(address));
            }
            assert_eq!(ranges.bytes(), set.len());
            let found: Vec<(usize, usize)> = ranges.iter().collect();
            assert!(found.windows(2).all(|pair| pair[0].1 < pair[1].0), "two that touch are one");
            assert!(found.iter().flat_map(|(start, end)| *start..*end).eq(set.iter().copied()));
            let address = random.below(ADDRESSES);
            let around = found.iter().find(|(start, end)| (*start..*end).contains(&address));
            assert_eq!(ranges.around(address), around.copied());
        }
    }

    /// Goal: after any sequence of changes the ranges agree with a set of addresses.
    #[test]
    fn ranges_agree_with_a_set() {
        const ADDRESSES: usize = 64;
        let mut random = Random::new(42);
        let (mut ranges, mut set) = (Ranges::new(), BTreeSet::new());
        for _ in 0..20_000 {
            let start = random.below(ADDRESSES);
            let end = start + random.below(ADDRESSES - start + 1);
            let before = set.iter().filter(|address| (start..end).contains(*address)).count();
            assert_eq!(ranges.overlap(start, end), before > 0);
            assert_eq!(ranges.bytes_in(start, end), before);
            let gaps = ranges.gaps(start, end);
            let missing = (start..end).filter(|address| !set.contains(address));
            assert!(gaps.iter().flat_map(|(start, end)| start..end).eq(missing));
            if random.below(2) == 0 {
                ranges.insert(start, end);
                set.extend(start..end);
            } else {
                assert_eq!(ranges.remove(start, end), before);
                set.retain(|address| !(start..end).contains(address));
            }
            assert_eq!(ranges.bytes(), set.len());
            let found: Vec<(usize, usize)> = ranges.iter().collect();
            assert!(found.windows(2).all(|pair| pair[0].1 <= pair[1].0), "RANGE-1");
            assert!(found.iter().flat_map(|(start, end)| *start..*end).eq(set.iter().copied()));
            let address = random.below(ADDRESSES);
            assert_eq!(ranges.contains(address), set.contains(&address));
        }
    }
}
