//! The slot table: one word and one tag for each slot.
//!
//! ```text
//! 63..24      15..13  12..0
//! generation  state   live
//! ```
//!
//! **Generation** is how often the slot was sealed, **live** how many objects touch it. The state moves as
//! follows; `free` says that no object is there, not that the allocator may give the slot out.
//!
//! ```text
//!              begin                 written
//!   free ----------------> sealed --------------> live
//!    ^ ^   next generation   | |                   |
//!    | |                     | | failed            | forget, by the last object
//!    | |   failed, for now   | +---------> bad     |
//!    | +---------------------+              |      |
//!    +--------------------------------------+------+
//!                               try_again
//!
//!            share                 forget, by the last object
//!   live <----------> shared  ------------------------------>  left
//!           unshare                                              | unshare
//!                                                                v
//!                                                               free
//! ```
//!
//! At a fork slots that are live become **shared**: a child may read them. One whose last object ends in this process
//! is **left** until no child has the disk any more; so it is not written meanwhile.
//!
//! A table is made a **cluster** of 512 slots at a time, when one of these is first written. A cluster stays for as
//! long as the area does: its generations must not begin again (`SWAP-2`).
//!
//! # Concurrency
//!
//! No lock. A slot on its way from `begin` to `written` belongs to the thread that writes. After that any thread
//! takes objects off by compare-and-swap, and the one that takes the last one frees the slot.
//!
//! # Cost
//!
//! 24 bytes a slot, and for each area 4 KiB, for each GiB of it that was ever in use 8 KiB.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::AtomicU64;
use std::sync::OnceLock;
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use super::location::SLOTS_MAX;
use super::seal::{TAG_BYTES, Tag};
use super::slots::CLUSTER_SLOTS;

/// Clusters of a leaf: 1 GiB.
const LEAF_CLUSTERS: u32 = 512;

const LEAVES: usize = (SLOTS_MAX / CLUSTER_SLOTS / LEAF_CLUSTERS) as usize;

const LIVE_BITS: u32 = 13;
const STATE_SHIFT: u32 = LIVE_BITS;
const GENERATION_SHIFT: u32 = 24;

/// Objects that touch one slot, at most.
pub(super) const LIVE_MAX: u64 = (1 << LIVE_BITS) - 1;

const _: () = {
    // Each object has a byte of its own there.
    assert!(super::disk::SLOT_BYTES as u64 <= LIVE_MAX);
    assert!(STATE_SHIFT + 3 <= GENERATION_SHIFT);
    assert!(SLOTS_MAX % (CLUSTER_SLOTS * LEAF_CLUSTERS) == 0);
};

/// The contents of a slot, as the header draws them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Free,
    Sealed,
    Live,
    Bad,
    Shared,
    Left,
}

/// A word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub(super) generation: u64,
    pub(super) state: State,
    pub(super) live: u64,
}

impl Word {
    /// Whether objects are there.
    pub(super) fn is_live(self) -> bool {
        matches!(self.state, State::Live | State::Shared)
    }

    fn to_bits(self) -> u64 {
        let state = match self.state {
            State::Free => 0,
            State::Sealed => 1,
            State::Live => 2,
            State::Bad => 3,
            State::Shared => 4,
            State::Left => 5,
        };
        self.generation << GENERATION_SHIFT | state << STATE_SHIFT | self.live
    }

    fn of(bits: u64) -> Word {
        let state = match bits >> STATE_SHIFT & 7 {
            0 => State::Free,
            1 => State::Sealed,
            2 => State::Live,
            4 => State::Shared,
            5 => State::Left,
            _ => State::Bad,
        };
        Word { generation: bits >> GENERATION_SHIFT, state, live: bits & LIVE_MAX }
    }
}

/// One slot.
#[derive(Debug)]
pub(super) struct Entry {
    word: AtomicU64,
    tag: [AtomicU64; TAG_BYTES / 8],
}

#[cfg(not(all(test, feature = "loom")))]
const _: () = assert!(size_of::<Entry>() == 24);

type Cluster = Box<[Entry]>;
type Leaf = Box<[OnceLock<Cluster>]>;

/// The table of one area.
#[derive(Debug)]
pub(super) struct Table {
    leaves: Box<[OnceLock<Leaf>]>,
    /// Bytes of all that was made.
    made_bytes: AtomicUsize,
    /// Clusters are refused, as though there were no memory.
    #[cfg(any(test, fuzzing))]
    pub(super) refuses: std::sync::atomic::AtomicBool,
}

impl Entry {
    fn new() -> Entry {
        Entry { word: AtomicU64::new(0), tag: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    /// What is known of the slot.
    pub(super) fn word(&self) -> Word {
        // Acquire: pairs with the Release of whoever changed the word: the tag is that of its generation.
        Word::of(self.word.load(Acquire))
    }

    /// Begins a generation, which `live` objects touch; and returns it. The caller alone has the slot.
    pub(super) fn begin(&self, live: u64) -> u64 {
        let Word { generation, state, live: before } = self.word();
        assert!(state == State::Free && before == 0, "SWAP-1: a slot that is {state:?} is written");
        assert!((1..=LIVE_MAX).contains(&live), "{live} objects");
        let generation = generation + 1;
        // A slot that is written once in a microsecond comes here after 12 days, a disk's never.
        assert!(generation >> (64 - GENERATION_SHIFT) == 0, "SWAP-2: no generation is left");
        let word = Word { generation, state: State::Sealed, live };
        self.word.store(word.to_bits(), Release);
        generation
    }

    /// Notes the tag of the generation that was begun.
    pub(super) fn set_tag(&self, tag: Tag) {
        let (first, second) = tag.split_at(8);
        for (word, half) in self.tag.iter().zip([first, second]) {
            // Relaxed: ordered by the word, in written().
            word.store(u64::from_le_bytes(half.try_into().expect("8 bytes")), Relaxed);
        }
    }

    /// The slot is on the disk: its objects may be read, and end.
    pub(super) fn written(&self) {
        self.end_write(State::Live);
    }

    /// The slot is not on the disk.
    pub(super) fn not_written(&self, is_bad: bool) {
        self.end_write(if is_bad { State::Bad } else { State::Free });
    }

    /// A bad slot may be good by now: it is free. The caller frees it.
    pub(super) fn try_again(&self) {
        let word = self.word();
        assert!(word.state == State::Bad, "a slot that is {:?} is tried again", word.state);
        // Release: as in end_write().
        self.word.store(Word { state: State::Free, ..word }.to_bits(), Release);
    }

    fn end_write(&self, state: State) {
        let word = self.word();
        assert!(word.state == State::Sealed, "a slot that is {:?} ends its write", word.state);
        let live = if state == State::Live { word.live } else { 0 };
        // Release: pairs with the Acquire in word(); the tag is seen with it.
        self.word.store(Word { state, live, ..word }.to_bits(), Release);
    }

    /// Generation and tag, with which the slot opens.
    pub(super) fn proof(&self) -> (u64, Tag) {
        let word = self.word();
        assert!(word.is_live(), "a slot that is {:?} is read", word.state);
        let mut tag = [0; TAG_BYTES];
        for (half, word) in tag.chunks_exact_mut(8).zip(&self.tag) {
            // Relaxed: ordered by the word, above.
            half.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        (word.generation, tag)
    }

    /// One object less. Returns the state after that. `Free`: the slot is the caller's to free.
    pub(super) fn forget(&self) -> State {
        self.step(|word| {
            assert!(word.is_live() && word.live > 0, "an object of a slot ends twice: {word:?}");
            let state = match (word.live, word.state) {
                (1, State::Live) => State::Free,
                (1, _) => State::Left,
                (_, state) => state,
            };
            Word { state, live: word.live - 1, ..word }
        })
    }

    /// A child may read the slot from now on, if it has objects.
    pub(super) fn share(&self) {
        self.step(|word| match word.state {
            State::Live => Word { state: State::Shared, ..word },
            _ => word,
        });
    }

    /// No child reads the slot any more. Returns whether it is the caller's to free.
    pub(super) fn unshare(&self) -> bool {
        let mut is_free = false;
        self.step(|word| {
            is_free = word.state == State::Left;
            match word.state {
                State::Shared => Word { state: State::Live, ..word },
                State::Left => Word { state: State::Free, ..word },
                _ => word,
            }
        });
        is_free
    }

    /// Changes the word; returns the new state.
    fn step(&self, mut next: impl FnMut(Word) -> Word) -> State {
        let mut bits = self.word.load(Relaxed);
        loop {
            let word = next(Word::of(bits));
            // AcqRel: whoever frees the slot, and so whoever writes it next, comes after all who left it.
            match self.word.compare_exchange_weak(bits, word.to_bits(), AcqRel, Relaxed) {
                Ok(_) => return word.state,
                Err(now) => bits = now,
            }
        }
    }
}

impl Table {
    /// A table without a cluster. Allocates 4 KiB.
    pub(super) fn new() -> Table {
        Table {
            leaves: (0..LEAVES).map(|_| OnceLock::new()).collect(),
            made_bytes: AtomicUsize::new(LEAVES * size_of::<OnceLock<Leaf>>()),
            #[cfg(any(test, fuzzing))]
            refuses: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// The place of a slot: leaf, cluster in the leaf, slot in the cluster.
    fn locate(slot: u32) -> (usize, usize, usize) {
        let cluster = slot / CLUSTER_SLOTS;
        let (leaf, cluster) = (cluster / LEAF_CLUSTERS, cluster % LEAF_CLUSTERS);
        (leaf as usize, cluster as usize, (slot % CLUSTER_SLOTS) as usize)
    }

    /// Makes the clusters of these slots, those that are not there. False: there is no memory. Allocates.
    #[must_use]
    pub(super) fn prepare(&self, slots: std::ops::Range<u32>) -> bool {
        let clusters = slots.start / CLUSTER_SLOTS..slots.end.div_ceil(CLUSTER_SLOTS);
        clusters.into_iter().all(|cluster| {
            let (leaf, at, _) = Table::locate(cluster * CLUSTER_SLOTS);
            let leaf = self.made(&self.leaves[leaf], LEAF_CLUSTERS, OnceLock::new);
            leaf.is_some_and(|leaf| self.made(&leaf[at], CLUSTER_SLOTS, Entry::new).is_some())
        })
    }

    /// What is in the cell; if it is empty, `count` new things. Of two boxes that are made at once one is dropped:
    /// nobody waits while the other allocates. `None`: there is no memory.
    fn made<'c, T>(
        &self,
        cell: &'c OnceLock<Box<[T]>>,
        count: u32,
        new: impl Fn() -> T,
    ) -> Option<&'c [T]> {
        if cell.get().is_none() {
            #[cfg(any(test, fuzzing))]
            if self.refuses.load(Relaxed) {
                return None;
            }
            let mut all = Vec::new();
            all.try_reserve_exact(count as usize).ok()?;
            all.extend((0..count).map(|_| new()));
            // Another thread may have been faster.
            if cell.set(all.into_boxed_slice()).is_ok() {
                self.made_bytes.fetch_add(count as usize * size_of::<T>(), Relaxed);
            }
        }
        cell.get().map(|all| &**all)
    }

    /// Calls `each` for all slots whose cluster was made, in their order.
    pub(super) fn each(&self, mut each: impl FnMut(u32, &Entry)) {
        for (leaf, clusters) in self.leaves.iter().enumerate() {
            for (at, cluster) in clusters.get().into_iter().flat_map(|leaf| leaf.iter().enumerate())
            {
                let first = (leaf * LEAF_CLUSTERS as usize + at) * CLUSTER_SLOTS as usize;
                for (slot, entry) in
                    cluster.get().into_iter().flat_map(|all| all.iter().enumerate())
                {
                    each(u32::try_from(first + slot).expect("an area has 2^26 slots"), entry);
                }
            }
        }
    }

    /// The entry of a slot whose cluster was made.
    pub(super) fn entry(&self, slot: u32) -> &Entry {
        self.find(slot).expect("the cluster of a slot in use was made")
    }

    /// The entry of a slot, if its cluster was made.
    pub(super) fn find(&self, slot: u32) -> Option<&Entry> {
        let (leaf, cluster, at) = Table::locate(slot);
        self.leaves.get(leaf)?.get()?.get(cluster)?.get()?.get(at)
    }

    /// Bytes of all that was made. Whoever writes to a disk in memory asks for them each time, so they are counted.
    pub(super) fn memory_bytes(&self) -> usize {
        self.made_bytes.load(Relaxed)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::collections::BTreeMap;

    use super::{Entry, LIVE_MAX, State, Table, Word};
    use crate::testing::{Random, seed};

    /// Goal: a word keeps the ends of each field.
    #[test]
    fn a_word_keeps_generation_state_and_count() {
        for generation in [0, 1, (1 << 40) - 1] {
            for live in [0, 1, 4096, LIVE_MAX] {
                use State::{Bad, Free, Left, Live, Sealed, Shared};
                for state in [Free, Sealed, Live, Bad, Shared, Left] {
                    let word = Word { generation, state, live };
                    assert_eq!(Word::of(word.to_bits()), word);
                }
            }
        }
    }

    /// Goal: a table does what a map does. Method: seeded steps on slots all over the table, those at its ends too.
    #[test]
    fn a_table_agrees_with_a_map() {
        let seed = seed();
        let mut random = Random::new(seed);
        let table = Table::new();
        let slots = [0, 1, 511, 512, 262_143, 262_144, 1 << 20, (1 << 26) - 1];
        assert!(slots.iter().all(|slot| table.find(*slot).is_none()));
        slots.iter().for_each(|slot| assert!(table.prepare(*slot..slot + 1)));
        let mut model: BTreeMap<u32, (Word, [u8; 16])> = BTreeMap::new();
        for _ in 0..20_000 {
            let slot = slots[random.below(slots.len())];
            let fresh = Word { generation: 0, state: State::Free, live: 0 };
            let (word, tag) = model.entry(slot).or_insert((fresh, [0; 16]));
            let entry = table.entry(slot);
            assert_eq!(entry.word(), *word, "seed {seed}, slot {slot}");
            match word.state {
                State::Free => {
                    word.live = 1 + random.below_u64(3);
                    word.generation += 1;
                    word.state = State::Sealed;
                    assert_eq!(entry.begin(word.live), word.generation);
                    *tag = random.bytes(16).try_into().expect("16 bytes");
                    entry.set_tag(*tag);
                }
                State::Sealed if random.below(4) == 0 => {
                    let is_bad = random.below(2) == 0;
                    entry.not_written(is_bad);
                    (word.state, word.live) = (if is_bad { State::Bad } else { State::Free }, 0);
                }
                State::Bad => {
                    entry.try_again();
                    word.state = State::Free;
                }
                State::Sealed => {
                    entry.written();
                    word.state = State::Live;
                }
                State::Live | State::Shared if random.below(4) == 0 => {
                    entry.share();
                    word.state = State::Shared;
                }
                State::Shared | State::Left if random.below(4) == 0 => {
                    assert_eq!(entry.unshare(), word.state == State::Left);
                    word.state = if word.live > 0 { State::Live } else { State::Free };
                }
                State::Live | State::Shared => {
                    assert_eq!(entry.proof(), (word.generation, *tag), "seed {seed}");
                    word.live -= 1;
                    if word.live == 0 {
                        let was_shared = word.state == State::Shared;
                        word.state = if was_shared { State::Left } else { State::Free };
                    }
                    assert_eq!(entry.forget(), word.state);
                }
                State::Left => {}
            }
        }
        let per_slot = 512 * 24;
        assert!(
            table.memory_bytes() > 6 * per_slot && table.memory_bytes() < 7 * per_slot + 50_000
        );
    }

    fn live(objects: u64) -> Entry {
        let entry = Entry::new();
        entry.begin(objects);
        entry.written();
        entry
    }

    #[test]
    #[should_panic(expected = "SWAP-1")]
    fn a_slot_with_objects_is_not_written() {
        live(1).begin(1);
    }

    #[test]
    #[should_panic(expected = "ends twice")]
    fn an_object_ends_once() {
        let entry = live(1);
        assert_eq!(entry.forget(), State::Free);
        entry.forget();
    }

    #[test]
    #[should_panic(expected = "is read")]
    fn a_slot_on_its_way_is_not_read() {
        let entry = Entry::new();
        entry.begin(1);
        entry.proof();
    }

    #[test]
    #[should_panic(expected = "SWAP-1")]
    fn a_bad_slot_is_not_written_again() {
        let entry = Entry::new();
        entry.begin(1);
        entry.not_written(true);
        entry.begin(1);
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;

    use super::{Entry, State};

    /// Goal: if the last object of a shared slot ends while it is shared no more, one of the two frees the slot.
    #[test]
    fn loom_a_slot_that_was_shared_is_freed_once() {
        loom::model(|| {
            let entry = Arc::new(Entry::new());
            entry.begin(1);
            entry.written();
            entry.share();
            let other = Arc::clone(&entry);
            let thread = loom::thread::spawn(move || other.forget() == State::Free);
            let frees = entry.unshare();
            assert!(frees ^ thread.join().unwrap(), "the slot is freed once");
            assert_eq!(entry.word().state, State::Free);
        });
    }

    /// Goal: of threads that take the last objects off a slot one frees it, and then it is written again with a
    /// tag that a reader sees whole.
    #[test]
    fn loom_the_last_object_frees_the_slot() {
        loom::model(|| {
            let entry = Arc::new(Entry::new());
            entry.begin(2);
            entry.set_tag([1; 16]);
            entry.written();
            let other = Arc::clone(&entry);
            let again = |entry: &Entry| {
                assert_eq!(entry.begin(1), 2);
                entry.set_tag([2; 16]);
                entry.written();
            };
            let thread = loom::thread::spawn(move || {
                let frees = other.forget() == State::Free;
                if frees {
                    again(&other);
                }
                frees
            });
            let frees = entry.forget() == State::Free;
            if frees {
                again(&entry);
            }
            assert_ne!(frees, thread.join().unwrap(), "one of two");
            assert_eq!(entry.proof(), (2, [2; 16]));
            assert_eq!(entry.forget(), State::Free);
        });
    }
}
