//! A bit for each handle, for who walks over some of the handles only.
//!
//! The user is `crate::store`: its walker looks for entries that are in the pool, among many more that are not. Each 64
//! handles have a word, and each word has a bit in a summary, so that a walk passes 4096 handles without a mark at a
//! time.
//!
//! # Invariants
//!
//! - `MARK-1` What [`Pool::mark`] saw done before is seen by whoever finds the mark, and by whoever removes it.
//! - `MARK-2` A word with a mark has its bit in the summary, but for moments in `Pool::mark` and `Pair::leave`, each of
//!   which sets it at its end.
//!
//! # Cost
//!
//! An eighth of a byte for each handle that was ever taken, once the first is marked. A walk over 250,000 handles
//! without a mark reads 64 words.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicU64, fence};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicU64, fence};

use super::source::PageSource;
use super::table::{Entry, Table};
use super::{Handle, Pool};

/// 64 marks: of handles, or of words of marks.
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

/// A word of marks, and its bit in the summary.
struct Pair<'a> {
    word: &'a AtomicU64,
    summary: &'a AtomicU64,
    bit: u64,
}

impl Pair<'_> {
    /// Sets a mark.
    fn mark(&self, mark: u64) {
        // AcqRel: pairs with itself in unmark() and with the Acquire of a walk (MARK-1).
        self.word.fetch_or(mark, AcqRel);
        // SeqCst, here and in leave(): each side writes one word and then reads the other. One of the two at least sees
        // what the other wrote, and sets the bit.
        fence(SeqCst);
        if self.summary.load(Relaxed) & self.bit == 0 {
            // AcqRel: who finds the bit finds the mark.
            self.summary.fetch_or(self.bit, AcqRel);
        }
    }

    /// A walk has found no mark in the word: its bit is removed, but if a mark has come meanwhile.
    fn leave(&self) {
        self.summary.fetch_and(!self.bit, AcqRel);
        fence(SeqCst);
        if self.word.load(Acquire) != 0 {
            self.summary.fetch_or(self.bit, AcqRel);
        }
    }
}

/// The table of the marks of handles, and that of the summary.
#[derive(Debug)]
pub(super) struct MarkTables<const RANK: u8> {
    words: Table<RANK, Marks>,
    summary: Table<RANK, Marks>,
}

/// The place of bit `index`: its word, and what it is there.
fn place(index: u32) -> (u32, u64) {
    (index / 64, 1 << (index % 64))
}

/// The first bit of a word from bit `from` on.
fn first_from(word: u64, from: u32) -> Option<u32> {
    let left = word >> from << from;
    (left != 0).then(|| left.trailing_zeros())
}

impl<const RANK: u8> MarkTables<RANK> {
    pub(super) fn new(handles: u32) -> Self {
        let words = handles.div_ceil(64);
        MarkTables { words: Table::new(0, words), summary: Table::new(0, words.div_ceil(64)) }
    }

    /// Bytes of the tables.
    pub(super) fn bytes(&self) -> usize {
        self.words.bytes() + self.summary.bytes()
    }

    /// Gives all memory back.
    pub(super) fn release<S: PageSource>(&mut self, source: &S) {
        self.words.release(source);
        self.summary.release(source);
    }

    fn pair(&self, word: u32) -> Pair<'_> {
        let (at, bit) = place(word);
        Pair { word: &self.words.get(word).0, summary: &self.summary.get(at).0, bit }
    }

    fn mark<S: PageSource>(&self, index: u32, source: &S) {
        let (word, mark) = place(index);
        for (table, place) in [(&self.summary, word / 64), (&self.words, word)] {
            while table.len() <= place {
                if table.take(source, 1).is_err() {
                    return;
                }
            }
        }
        self.pair(word).mark(mark);
    }

    fn unmark(&self, index: u32) {
        let (word, mark) = place(index);
        if word < self.words.len() {
            // AcqRel: pairs with itself and with mark() (MARK-1).
            self.words.get(word).0.fetch_and(!mark, AcqRel);
        }
    }

    fn next(&self, from: u32) -> Option<u32> {
        let (mut word, mut skipped) = (from / 64, from % 64);
        while word < self.words.len() {
            // Acquire: pairs with the AcqRel in Pair::mark() (MARK-1).
            let marks = self.words.get(word).0.load(Acquire);
            if let Some(bit) = first_from(marks, skipped) {
                return Some(word * 64 + bit);
            }
            if marks == 0 {
                self.leave(word);
            }
            (word, skipped) = (self.next_word(word + 1)?, 0);
        }
        None
    }

    /// A word without a mark: the summary forgets it, if it knows it.
    fn leave(&self, word: u32) {
        // Two threads that make the table longer may make a word too many.
        if word / 64 >= self.summary.len() {
            return;
        }
        let pair = self.pair(word);
        if pair.summary.load(Relaxed) & pair.bit != 0 {
            pair.leave();
        }
    }

    /// The first word from this one on that has a mark, as far as the summary knows.
    fn next_word(&self, from: u32) -> Option<u32> {
        let mut skipped = from % 64;
        for at in from / 64..self.summary.len() {
            // Acquire: pairs with the AcqRel in Pair::mark().
            if let Some(bit) = first_from(self.summary.get(at).0.load(Acquire), skipped) {
                return Some(at * 64 + bit);
            }
            skipped = 0;
        }
        None
    }
}

impl<S: PageSource> Pool<S> {
    /// Marks a handle. Without memory for that it stays unmarked.
    pub(crate) fn mark(&self, handle: Handle) {
        self.marks.mark(handle.index(), &self.source);
    }

    /// Removes the mark of a handle.
    pub(crate) fn unmark(&self, handle: Handle) {
        self.marks.unmark(handle.index());
    }

    /// The first marked handle whose number is at least `from`, counted from 0.
    pub(crate) fn next_marked(&self, from: u32) -> Option<Handle> {
        self.marks.next(from).map(Handle::from_index)
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::{Pair, SeqCst};

    /// Goal: no mark is missing in the summary (`MARK-2`). Method: two threads mark handles of one word, while a walker
    /// that found the word empty leaves it.
    #[test]
    fn loom_a_word_with_a_mark_is_in_the_summary() {
        loom::model(|| {
            let words = Arc::new((AtomicU64::new(0), AtomicU64::new(1)));
            let mark = |mark| {
                let words = Arc::clone(&words);
                thread::spawn(move || Pair { word: &words.0, summary: &words.1, bit: 1 }.mark(mark))
            };
            let others = [mark(1), mark(2)];
            Pair { word: &words.0, summary: &words.1, bit: 1 }.leave();
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(words.0.load(SeqCst), 3);
            assert_eq!(words.1.load(SeqCst), 1);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::world::{World, unit};
    use super::{Handle, Pool};
    use crate::testing::{Random, seed};

    /// Goal: a word of marks that the summary does not reach yet is passed. Method: the table of words is made as long
    /// as two threads may make it, of which each sees that one word is missing.
    #[test]
    fn a_word_beyond_the_summary_is_passed() {
        let pool = Pool::new(World::new(), unit(0));
        let last = 64 * 64 - 1;
        pool.mark(Handle::from_index(last));
        while pool.marks.words.len() <= 64 {
            pool.marks.words.take(&pool.source, 1).expect("there is memory");
        }
        assert_eq!(pool.next_marked(last + 1), None);
        pool.mark(Handle::from_index(last + 1));
        assert_eq!(pool.next_marked(last + 1), Some(Handle::from_index(last + 1)));
    }

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
            let index = u32::try_from(random.below(1 << (8 + step % 13))).expect("small");
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
