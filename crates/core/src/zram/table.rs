//! The table: from the index of a unit to its slot.
//!
//! ```text
//! segment 0      64 leaves
//! segment 1     128 leaves
//! segment k     64 << k leaves, made when one of them is first needed
//!   leaf        256 slots (4 KiB), made when one of them is first written
//! ```
//!
//! # Concurrency
//!
//! A look takes no lock. Segments and leaves are made by whoever needs one first, and stay until the table is dropped:
//! so the disk can grow while it is in use.
//!
//! # Cost
//!
//! A look reads three words. A leaf takes 4 KiB, and 16 bytes in its segment: for 1 MiB of disk with units of 4 KiB,
//! 16 MiB with 64 KiB.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::slot::{LEAF_SLOTS, SlotLock};

type Leaf = Box<[SlotLock]>;
type Segment = Box<[OnceLock<Leaf>]>;

/// Leaves of the first segment; each next one has twice as many.
const FIRST_LEAVES: usize = 64;
const SEGMENTS: usize = 18;

/// Units that a table can have: 16 TiB in units of 4 KiB.
pub(super) const UNITS_MAX: u64 = (((1 << SEGMENTS) - 1) * FIRST_LEAVES * LEAF_SLOTS) as u64;

const _: () = assert!(UNITS_MAX * 4096 >= 15 << 40);

/// There is no memory for a part of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NoMemory;

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    segments: [OnceLock<Segment>; SEGMENTS],
    /// Bytes of segments and leaves.
    bytes: AtomicUsize,
}

/// Segment and place there of a leaf.
fn place_of(leaf: usize) -> (usize, usize) {
    let segment = ((leaf + FIRST_LEAVES) / FIRST_LEAVES).ilog2();
    (segment as usize, leaf + FIRST_LEAVES - (FIRST_LEAVES << segment))
}

/// The index of a unit as leaf and place there.
fn split(unit: u64) -> Option<(usize, usize)> {
    let unit = usize::try_from(unit).ok().filter(|_| unit < UNITS_MAX)?;
    Some((unit / LEAF_SLOTS, unit % LEAF_SLOTS))
}

/// `count` values of `make` in a box.
fn boxed<T>(count: usize, make: impl Fn() -> T) -> Result<Box<[T]>, NoMemory> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| NoMemory)?;
    all.extend(std::iter::repeat_with(make).take(count));
    Ok(all.into_boxed_slice())
}

impl Table {
    pub(super) fn new() -> Table {
        Table { segments: [const { OnceLock::new() }; SEGMENTS], bytes: AtomicUsize::new(0) }
    }

    /// The slot of a unit. `None`: nothing near it was ever written.
    pub(super) fn get(&self, unit: u64) -> Option<&SlotLock> {
        let (leaf, at) = split(unit)?;
        self.leaf(leaf).map(|leaf| &leaf[at])
    }

    fn leaf(&self, leaf: usize) -> Option<&Leaf> {
        let (segment, at) = place_of(leaf);
        self.segments.get(segment)?.get()?[at].get()
    }

    /// The slot of a unit, made if need be.
    ///
    /// # Errors
    ///
    /// There is no memory for it, or the unit is beyond [`UNITS_MAX`].
    pub(super) fn make(&self, unit: u64) -> Result<&SlotLock, NoMemory> {
        let (leaf, at) = split(unit).ok_or(NoMemory)?;
        let (segment, place) = place_of(leaf);
        let segment_leaves = FIRST_LEAVES << segment;
        let segment = self.make_in(&self.segments[segment], segment_leaves, OnceLock::new)?;
        let leaf = self.make_in(&segment[place], LEAF_SLOTS, SlotLock::default)?;
        Ok(&leaf[at])
    }

    /// What is in `cell`; or `count` values of `make`, which are put there.
    fn make_in<'t, T>(
        &self,
        cell: &'t OnceLock<Box<[T]>>,
        count: usize,
        make: impl Fn() -> T,
    ) -> Result<&'t [T], NoMemory> {
        if cell.get().is_none() {
            // If another thread was faster, this one is dropped.
            if cell.set(boxed(count, make)?).is_ok() {
                self.bytes.fetch_add(count * size_of::<T>(), Relaxed);
            }
        }
        Ok(cell.get().expect("it was there, or was set by one of two threads"))
    }

    /// The slots that there are, of the units from `first` up to `end`, with their indices and in their order.
    pub(super) fn slots(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, &SlotLock)> {
        let leaf_of = |unit: u64| {
            usize::try_from(unit.min(UNITS_MAX)).map_or(usize::MAX, |unit| unit / LEAF_SLOTS)
        };
        let (from, to) = (leaf_of(first), leaf_of(end.saturating_sub(1)) + usize::from(end > 0));
        let leaves = self.segments.iter().enumerate().flat_map(move |(number, segment)| {
            let start = (FIRST_LEAVES << number) - FIRST_LEAVES;
            let all = segment.get().map_or(&[][..], |leaves| &leaves[..]);
            let within = |leaf: usize| leaf.clamp(start, start + all.len()) - start;
            let wanted = within(from)..within(to).max(within(from));
            let before = start + wanted.start;
            all[wanted].iter().enumerate().map(move |(at, leaf)| (before + at, leaf))
        });
        leaves.flat_map(move |(number, leaf)| {
            let slots = leaf.get().map_or(&[][..], |leaf| &leaf[..]);
            let start = (number * LEAF_SLOTS) as u64;
            let all = slots.iter().enumerate().map(move |(at, slot)| (start + at as u64, slot));
            all.filter(move |(unit, _)| (first..end).contains(unit))
        })
    }

    /// Bytes that the table takes.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST_LEAVES, LEAF_SLOTS, SEGMENTS, Table, UNITS_MAX, place_of};

    /// Goal: each leaf has a place of its own, inside of its segment. Method: all leaves of the first segments, and
    /// those at the edges of the others.
    #[test]
    fn leaves_follow_each_other_through_the_segments() {
        let mut expected = (0, 0);
        for leaf in 0..FIRST_LEAVES * 31 {
            assert_eq!(place_of(leaf), expected, "leaf {leaf}");
            expected.1 += 1;
            if expected.1 == FIRST_LEAVES << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        let mut first = 0;
        for segment in 0..SEGMENTS {
            let leaves = FIRST_LEAVES << segment;
            assert_eq!(place_of(first), (segment, 0));
            assert_eq!(place_of(first + leaves - 1), (segment, leaves - 1));
            first += leaves;
        }
        assert_eq!((first * LEAF_SLOTS) as u64, UNITS_MAX);
    }

    /// Goal: a slot stays where it is, only what was made is listed, and no index leads outside.
    #[test]
    fn slots_stay_and_are_listed_in_order() {
        let table = Table::new();
        let units = [0, 1, 255, 256, 70_000, 4_000_000];
        for unit in units {
            assert!(table.make(unit).is_ok());
            assert!(std::ptr::eq(table.get(unit).unwrap(), table.make(unit).unwrap()));
        }
        assert!(table.get(2).is_some(), "of the same leaf");
        assert!(table.get(512).is_none() && table.get(UNITS_MAX).is_none());
        assert!(table.make(UNITS_MAX).is_err() && table.make(u64::MAX).is_err());
        let listed: Vec<u64> = table.slots(0, u64::MAX).map(|(unit, _)| unit).collect();
        let leaf = |unit: u64| (unit / 256 * 256..).take(256);
        let expected: Vec<u64> =
            leaf(0).chain(leaf(256)).chain(leaf(70_000)).chain(leaf(4_000_000)).collect();
        assert_eq!(listed, expected);
        assert_eq!(
            table.slots(255, 258).map(|(unit, _)| unit).collect::<Vec<_>>(),
            [255, 256, 257]
        );
        assert_eq!(table.slots(9, 9).count(), 0);
        assert!(table.bytes() > 4 * 4096);
    }

    /// Goal: threads that make the same leaf at once get the same slots.
    #[test]
    fn threads_agree_on_a_leaf() {
        for _ in 0..200 {
            let table = Table::new();
            let make = || std::ptr::from_ref(table.make(300).unwrap()) as usize;
            let (one, two) = std::thread::scope(|scope| {
                let one = scope.spawn(make);
                (make(), one.join().unwrap())
            });
            assert_eq!(one, two);
        }
    }
}
