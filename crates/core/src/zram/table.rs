//! The table: from the index of a unit to its slot.
//!
//! ```text
//! index of a unit   31..24   23..16   15..8    7..0
//!                   root  -> branch -> twig -> leaf -> slot
//! ```
//!
//! Each node has 256 places. All but the root are made when one of their units is first written.
//!
//! # Concurrency
//!
//! A look takes no lock. Nodes are made by whoever needs one first, and stay until the table is dropped: so the disk
//! can grow while it is in use.
//!
//! # Cost
//!
//! A look reads four words. A leaf takes 4 KiB, for 1 MiB of disk with units of 4 KiB, 16 MiB with 64 KiB; a twig 6 KiB
//! for 256 leaves. A single unit far from all others costs 16 KiB ([`GROWTH_BYTES_MAX`]).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::slot::SlotLock;
use crate::page::PAGE_BYTES;

type Node<T> = Box<[T]>;
type Place<T> = OnceLock<Node<T>>;
type Twig = Place<SlotLock>;
type Branch = Place<Twig>;
type Root = Place<Branch>;

/// Places of a node.
const WIDTH: usize = 256;

const _: () = assert!(WIDTH * size_of::<SlotLock>() == PAGE_BYTES);

/// Units that a table can have: 16 TiB in units of 4 KiB.
pub(super) const UNITS_MAX: u64 = 1 << 32;

/// The most that one more unit makes the table grow.
pub(super) const GROWTH_BYTES_MAX: usize =
    WIDTH * (size_of::<Branch>() + size_of::<Twig>() + size_of::<SlotLock>());

const _: () = assert!(GROWTH_BYTES_MAX <= 16 << 10);

/// There is no memory for a part of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NoMemory;

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    root: Node<Root>,
    /// Bytes of all nodes.
    bytes: AtomicUsize,
}

/// The places of a unit in root, branch, twig and leaf.
fn split(unit: u64) -> Option<[usize; 4]> {
    u32::try_from(unit).ok().map(|unit| unit.to_be_bytes().map(usize::from))
}

/// A node with values of `make`.
fn node<T>(make: impl Fn() -> T) -> Result<Node<T>, NoMemory> {
    let mut all = Vec::new();
    all.try_reserve_exact(WIDTH).map_err(|_| NoMemory)?;
    all.extend(std::iter::repeat_with(make).take(WIDTH));
    Ok(all.into_boxed_slice())
}

/// The places of a node; none, if it was not made.
fn inside<T>(node: &Place<T>) -> &[T] {
    node.get().map_or(&[], |node| node)
}

impl Table {
    pub(super) fn new() -> Table {
        let root: Node<Root> = std::iter::repeat_with(OnceLock::new).take(WIDTH).collect();
        Table { bytes: AtomicUsize::new(size_of_val(&*root)), root }
    }

    /// The slot of a unit. `None`: nothing near it was ever written.
    pub(super) fn get(&self, unit: u64) -> Option<&SlotLock> {
        let [root, branch, twig, leaf] = split(unit)?;
        Some(&self.root[root].get()?[branch].get()?[twig].get()?[leaf])
    }

    /// The slot of a unit, made if need be.
    ///
    /// # Errors
    ///
    /// There is no memory for it, or the unit is beyond [`UNITS_MAX`].
    pub(super) fn make(&self, unit: u64) -> Result<&SlotLock, NoMemory> {
        let [root, branch, twig, leaf] = split(unit).ok_or(NoMemory)?;
        let node = self.make_in(&self.root[root], OnceLock::new)?;
        let node = self.make_in(&node[branch], OnceLock::new)?;
        let node = self.make_in(&node[twig], SlotLock::default)?;
        Ok(&node[leaf])
    }

    /// The node at a place; or a new one with values of `make`, which is put there.
    fn make_in<'t, T>(
        &self,
        place: &'t Place<T>,
        make: impl Fn() -> T,
    ) -> Result<&'t [T], NoMemory> {
        if place.get().is_none() {
            // If another thread was faster, this node is dropped.
            if place.set(node(make)?).is_ok() {
                self.bytes.fetch_add(WIDTH * size_of::<T>(), Relaxed);
            }
        }
        Ok(place.get().expect("it was there, or was set by one of two threads"))
    }

    /// The slots that there are, of the units from `first` up to `end`, with their indices and in their order.
    pub(super) fn slots(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, &SlotLock)> {
        // Below each node only what overlaps the range: `level` is how many units a place of the node has.
        let overlaps = move |start: u64, level: u64| start < end && start + level > first;
        let roots = (0_u64..).zip(&self.root).map(|(at, node)| (at << 24, inside(node)));
        let branches = roots.filter(move |(start, _)| overlaps(*start, 1 << 24)).flat_map(
            move |(start, node)| {
                let all = (0_u64..).zip(node).map(move |(at, node)| (start + (at << 16), node));
                all.filter(move |(start, _)| overlaps(*start, 1 << 16))
            },
        );
        let twigs = branches.flat_map(move |(start, node)| {
            let all = (0_u64..).zip(inside(node)).map(move |(at, node)| (start + (at << 8), node));
            all.filter(move |(start, _)| overlaps(*start, 1 << 8))
        });
        twigs.flat_map(move |(start, leaf)| {
            let all = (start..).zip(inside(leaf));
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
    use super::{GROWTH_BYTES_MAX, Table, UNITS_MAX};

    /// Goal: a unit costs no more than is reserved for it, wherever it is, and the last one is there.
    #[test]
    fn a_unit_costs_what_is_reserved() {
        let table = Table::new();
        for unit in [0, UNITS_MAX - 1, 1 << 24, 1 << 16, 1 << 8, 255, 0x0123_4567] {
            let before = table.bytes();
            assert!(table.get(unit).is_none() || unit == 255, "{unit}");
            assert!(table.make(unit).is_ok());
            assert!(table.bytes() - before <= GROWTH_BYTES_MAX);
        }
        let far = table.slots(UNITS_MAX - 1, u64::MAX).map(|(unit, _)| unit).collect::<Vec<_>>();
        assert_eq!(far, [UNITS_MAX - 1]);
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
