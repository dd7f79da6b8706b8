//! A bit for each handle, for who walks over some of the handles only.
//!
//! The user is `crate::store`: its walker looks for entries that are in the pool, among many more that are not.
//!
//! # Invariants
//!
//! - `MARK-1` What [`Pool::mark`] saw done before is seen by whoever finds the mark, and by whoever removes it.
//!
//! # Cost
//!
//! An eighth of a byte for each handle that was ever taken, once the first is marked. A walk over 250,000 handles
//! without a mark reads 32 KiB: 2 to 4 us.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire},
};

use super::source::PageSource;
use super::table::Entry;
use super::{Handle, Pool};

/// The marks of 64 handles.
#[derive(Debug)]
pub(super) struct Marks(AtomicU64);

/// Nobody gives marks back. So an entry is in a chain only when it is fresh, and alone: it needs no link. To store one
/// would overwrite the marks of a thread that finds the entry first.
impl Entry for Marks {
    fn vacant() -> Self {
        Marks(AtomicU64::new(0))
    }

    fn set_link(&self, link: u32) {
        debug_assert_eq!(link, 0, "a chain of one");
    }

    fn link(&self) -> u32 {
        0
    }
}

impl<S: PageSource> Pool<S> {
    fn place(handle: Handle) -> (u32, u64) {
        (handle.index() / 64, 1 << (handle.index() % 64))
    }

    /// Marks a handle. Without memory for that it stays unmarked.
    pub(crate) fn mark(&self, handle: Handle) {
        let (word, bit) = Self::place(handle);
        while self.marks.len() <= word {
            if self.marks.take(&self.source, 1).is_err() {
                return;
            }
        }
        // AcqRel: pairs with itself in unmark() and with the Acquire in next_marked() (MARK-1).
        self.marks.get(word).0.fetch_or(bit, AcqRel);
    }

    /// Removes the mark of a handle.
    pub(crate) fn unmark(&self, handle: Handle) {
        let (word, bit) = Self::place(handle);
        if word < self.marks.len() {
            // AcqRel: as in mark().
            self.marks.get(word).0.fetch_and(!bit, AcqRel);
        }
    }

    /// The first marked handle whose number is at least `from`, counted from 0.
    pub(crate) fn next_marked(&self, from: u32) -> Option<Handle> {
        let mut skipped = from % 64;
        for word in from / 64..self.marks.len() {
            // Acquire: pairs with the AcqRel in mark() (MARK-1).
            let marks = self.marks.get(word).0.load(Acquire) >> skipped << skipped;
            skipped = 0;
            if marks != 0 {
                return Some(Handle::from_index(word * 64 + marks.trailing_zeros()));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::world::{World, unit};
    use super::{Handle, Pool};
    use crate::testing::{Random, seed};

    /// Goal: marks agree with a set of numbers. Method: seeded random marks, removals and walks.
    #[test]
    fn marks_agree_with_a_set() {
        let seed = seed();
        let mut random = Random::new(seed);
        let pool = Pool::new(World::new(), unit(0));
        let mut set = BTreeSet::new();
        assert_eq!(pool.next_marked(0), None);
        pool.unmark(Handle::from_index(5));
        for step in 0..20_000 {
            let index = u32::try_from(random.below(30_000)).expect("small");
            match random.below(3) {
                0 => {
                    pool.mark(Handle::from_index(index));
                    set.insert(index);
                }
                1 => {
                    pool.unmark(Handle::from_index(index));
                    set.remove(&index);
                }
                _ => {
                    let expected = set.range(index..).next().copied().map(Handle::from_index);
                    assert_eq!(pool.next_marked(index), expected, "seed {seed}, step {step}");
                }
            }
        }
    }
}
