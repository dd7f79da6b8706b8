//! A cluster: which of its slots are taken, and which list it is on.
//!
//! # Invariants
//!
//! - `CLUSTER-1` `used` is the number of bits below `len` that are set. Bits at or above `len` are set too:
//!   these slots do not exist, so no run contains one.
//!
//! # Concurrency
//!
//! [`Map`] belongs to whoever holds the cluster's lock. Place and links are written under the lock of the
//! lists. A cluster stops being [`Place::Current`] only with both locks held. So a thread that holds the
//! cluster's lock and reads `Current` may rely on it; any other place may become `Current` at that moment.

use std::sync::atomic::{
    AtomicU8, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use super::RANK_CLUSTER;
use crate::sync::{Guard, Mutex};

/// Slots of a cluster: 2 MiB, as much as the largest folio has.
pub const CLUSTER_SLOTS: u32 = 512;

/// Bits of a word of the map.
const WORD_SLOTS: u32 = u64::BITS;

/// log2 of the same: runs of this order and larger ones are whole words.
const WORD_ORDER: u32 = WORD_SLOTS.ilog2();

/// Words of the map.
const WORDS: u32 = CLUSTER_SLOTS / WORD_SLOTS;

const _: () = {
    assert!(CLUSTER_SLOTS == 1 << super::ORDER_MAX, "the largest run is one cluster");
    assert!(CLUSTER_SLOTS % WORD_SLOTS == 0);
    // Two cache lines: 88 bytes of lock and map, 9 of place and links.
    assert!(size_of::<Cluster>() == 128);
};

/// Where a cluster is: on one of the lists, or with somebody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// No slot is taken, and the contents are not needed.
    Free,
    /// Some slots are taken, and there may be a run of the cluster's order.
    Nonfull,
    /// Some slots are taken, and there is no run of the cluster's order.
    Frag,
    /// All slots are taken.
    Full,
    /// No slot is taken, and the contents wait to be discarded.
    Discard,
    /// On no list: somebody discards the contents.
    Discarding,
    /// On no list: a CPU takes slots from it.
    Current,
}

impl Place {
    /// By their numbers, which is how a cluster keeps its own.
    const ALL: [Place; 7] = [
        Place::Free,
        Place::Nonfull,
        Place::Frag,
        Place::Full,
        Place::Discard,
        Place::Discarding,
        Place::Current,
    ];

    fn number(self) -> u8 {
        self as u8
    }
}

/// A cluster. Aligned so that two of them share no pair of cache lines, which is what is fetched.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Cluster {
    map: Mutex<RANK_CLUSTER, Map>,
    place: AtomicU8,
    /// Index of the cluster before this one in its list, plus one; 0 if there is none.
    pub(super) previous: AtomicU32,
    /// Index of the cluster after it, in the same way.
    pub(super) next: AtomicU32,
}

impl Cluster {
    /// A cluster without slots, as it is before its first use.
    pub(super) fn new() -> Cluster {
        Cluster {
            map: Mutex::new(Map {
                bits: [!0; WORDS as usize],
                len: 0,
                used: 0,
                order: 0,
                owner: 0,
            }),
            place: AtomicU8::new(Place::Free.number()),
            previous: AtomicU32::new(0),
            next: AtomicU32::new(0),
        }
    }

    /// Waits for the cluster.
    pub(super) fn lock(&self) -> Guard<'_, RANK_CLUSTER, Map> {
        self.map.lock()
    }

    pub(super) fn place(&self) -> Place {
        // Acquire: pairs with the Release in `set_place`. Both locks order all that matters, see the module.
        Place::ALL[usize::from(self.place.load(Acquire))]
    }

    /// The caller holds the lock of the lists.
    pub(super) fn set_place(&self, place: Place) {
        self.place.store(place.number(), Release);
    }
}

/// A link of a cluster, for whoever holds the lock of the lists.
pub(super) fn link(of: &AtomicU32) -> u32 {
    // Relaxed: the lock orders it.
    of.load(Relaxed)
}

/// Sets a link of a cluster, for whoever holds the lock of the lists.
pub(super) fn set_link(of: &AtomicU32, to: u32) {
    // Relaxed: the lock orders it.
    of.store(to, Relaxed);
}

/// Which slots are taken, a bit each. Slots are counted from the cluster's first.
#[derive(Debug)]
pub(super) struct Map {
    bits: [u64; WORDS as usize],
    len: u32,
    used: u32,
    /// The order that the cluster serves while slots are taken.
    pub(super) order: u32,
    /// The number of the CPU that took slots last. What is freed is counted there.
    pub(super) owner: u32,
}

impl Map {
    /// Slots that are taken.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Whether all slots are taken.
    pub(super) fn is_full(&self) -> bool {
        self.used == self.len
    }

    /// The first free aligned run of 2^`order` slots at or after `from`, or, if there is none, before it.
    ///
    /// The words are visited from that of `from` on, once around, and the first one a second time: then
    /// its slots below `from` count too.
    pub(super) fn find(&self, order: u32, from: u32) -> Option<u32> {
        if order >= WORD_ORDER {
            return self.find_words(1 << (order - WORD_ORDER), from / WORD_SLOTS);
        }
        let first = from / WORD_SLOTS;
        let mut above = !0 << (from % WORD_SLOTS);
        for step in 0..=WORDS {
            let word = (first + step) % WORDS;
            let found = first_slot(word, runs(!self.bits[word as usize], order) & above);
            if found.is_some() {
                return found;
            }
            above = !0;
        }
        None
    }

    /// The same for runs of `words` words.
    fn find_words(&self, words: u32, from: u32) -> Option<u32> {
        let runs = WORDS / words;
        let is_free = |first: &u32| {
            let first = *first as usize;
            self.bits[first..first + words as usize].iter().all(|bits| *bits == 0)
        };
        let mut from_there_on = (0..runs).map(|step| (from / words + step) % runs * words);
        from_there_on.find(is_free).map(|word| word * WORD_SLOTS)
    }

    /// Takes a run that [`Map::find`] found.
    pub(super) fn take(&mut self, first: u32, count: u32) {
        for (word, mask) in masks(first, first + count) {
            debug_assert_eq!(
                self.bits[word as usize] & mask,
                0,
                "SLOT-1: {count} slots at {first}"
            );
            self.bits[word as usize] |= mask;
        }
        self.used += count;
    }

    /// Frees slots. `Err`: one of them is not taken, this one, and nothing has changed.
    pub(super) fn free(&mut self, first: u32, count: u32) -> Result<(), u32> {
        let end = first + count;
        let missing = |(word, mask)| first_slot(word, !self.bits[word as usize] & mask);
        if let Some(slot) = masks(first, end).find_map(missing) {
            return Err(slot);
        }
        // These bits are set because the slots do not exist.
        if end > self.len {
            return Err(first.max(self.len));
        }
        for (word, mask) in masks(first, end) {
            self.bits[word as usize] &= !mask;
        }
        self.used -= count;
        Ok(())
    }

    /// The first slot in use at or after `from`.
    pub(super) fn first_used(&self, from: u32) -> Option<u32> {
        let used = |(word, mask)| first_slot(word, self.bits[word as usize] & mask);
        masks(from, self.len.max(from)).find_map(used)
    }

    /// From now on there are `len` slots. False: there were as many.
    pub(super) fn extend(&mut self, len: u32) -> bool {
        if len <= self.len {
            return false;
        }
        for (word, mask) in masks(self.len, len) {
            self.bits[word as usize] &= !mask;
        }
        self.len = len;
        true
    }

    /// Whether the count agrees with the bits (`CLUSTER-1`).
    #[cfg(any(test, fuzzing))]
    pub(super) fn check(&self) {
        let set = |from, end| {
            let count = |(word, mask): (u32, u64)| (self.bits[word as usize] & mask).count_ones();
            masks(from, end).map(count).sum::<u32>()
        };
        assert_eq!(set(0, self.len), self.used, "CLUSTER-1: slots in use");
        let absent = CLUSTER_SLOTS - self.len;
        assert_eq!(set(self.len, CLUSTER_SLOTS), absent, "CLUSTER-1: slots that do not exist");
    }
}

/// The first slot of each aligned run of 2^`order` slots, 32 at most, that is free in a word.
fn runs(free: u64, order: u32) -> u64 {
    /// The multiples of 1, 2, 4, 8, 16 and 32.
    const HEADS: [u64; WORD_ORDER as usize] = [
        !0,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
    ];
    let folded = (0..order).fold(free, |free, step| free & free >> (1 << step));
    folded & HEADS[order as usize]
}

/// The slot of the lowest bit that is set in a word.
fn first_slot(word: u32, bits: u64) -> Option<u32> {
    (bits != 0).then(|| word * WORD_SLOTS + bits.trailing_zeros())
}

/// The slots `first..end` as words and bits in them.
fn masks(first: u32, end: u32) -> impl Iterator<Item = (u32, u64)> {
    (first / WORD_SLOTS..end.div_ceil(WORD_SLOTS)).map(move |word| {
        let base = word * WORD_SLOTS;
        let above_first = !0 << first.saturating_sub(base);
        let below_end = !0 >> (WORD_SLOTS - (end - base).min(WORD_SLOTS));
        (word, above_first & below_end)
    })
}

#[cfg(test)]
mod tests {
    use super::{CLUSTER_SLOTS, Cluster, Map};
    use crate::testing::{Random, seed};

    /// The naive search: each aligned place in turn, each slot in turn.
    fn first_run(taken: &[bool], order: u32, from: u32) -> Option<u32> {
        let step = 1usize << order;
        let free = |first: &usize| taken[*first..first + step].iter().all(|taken| !taken);
        let places = || (0..taken.len()).step_by(step);
        let above = places().filter(|first| *first >= from as usize).find(free);
        above.or_else(|| places().find(free)).map(|first| u32::try_from(first).unwrap())
    }

    /// Goal: runs are found, taken and freed as a naive map does it, at each order and length. Method:
    /// seeded operations; bits that do not exist are taken in the naive map.
    #[test]
    fn a_map_agrees_with_single_slots() {
        let seed = seed();
        let mut random = Random::new(seed);
        for len in [1, 5, 63, 64, 65, 300, 511, CLUSTER_SLOTS] {
            let cluster = Cluster::new();
            let mut map = cluster.lock();
            map.extend(len);
            let mut taken: Vec<bool> = (0..CLUSTER_SLOTS).map(|slot| slot >= len).collect();
            for _ in 0..4_000 {
                step(&mut map, &mut taken, len, &mut random);
                map.check();
            }
        }
    }

    fn step(map: &mut Map, taken: &mut [bool], len: u32, random: &mut Random) {
        let below = |random: &mut Random, end: u32| {
            u32::try_from(random.below_u64(u64::from(end))).expect("below a u32")
        };
        let order = below(random, 10);
        if random.below(2) == 0 {
            let from = below(random, CLUSTER_SLOTS) >> order << order;
            let found = map.find(order, from);
            assert_eq!(found, first_run(taken, order, from), "order {order} from {from}");
            if let Some(first) = found {
                map.take(first, 1 << order);
                taken[first as usize..][..1 << order].fill(true);
            }
        } else {
            let first = below(random, CLUSTER_SLOTS);
            let count = 1 + below(random, (CLUSTER_SLOTS - first).min(40));
            let slots = first as usize..(first + count) as usize;
            let wrong = slots.clone().find(|slot| *slot >= len as usize || !taken[*slot]);
            let freed = map.free(first, count);
            assert_eq!(freed.err().map(|slot| slot as usize), wrong, "{slots:?} of {len}");
            if wrong.is_none() {
                taken[slots].fill(false);
            }
        }
        let from = below(random, CLUSTER_SLOTS);
        let used = (from..len).find(|slot| taken[*slot as usize]);
        assert_eq!(map.first_used(from), used, "from {from}");
    }
}
