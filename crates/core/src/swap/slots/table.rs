//! Where clusters are: a table that grows and never moves.
//!
//! Clusters come in **leaves** of 32 (4 KiB of table for 64 MiB of slots). A leaf is made at the first use
//! of one of its clusters. The leaves are in **chunks**: the first chunk has 16, the second as many, each
//! next one twice as many as the one before. A chunk is made when the area becomes so large.
//!
//! # Invariants
//!
//! - `TABLE-1` A cluster that was ever used has a leaf, which stays as long as the table.
//!
//! # Concurrency
//!
//! No lock. [`OnceLock`] publishes chunks and leaves; of two leaves that are made at once one is dropped.
//!
//! # Cost
//!
//! 24 bytes for each leaf, from the beginning; 4 KiB for each leaf in use: 0.006 % of the slots.

use std::sync::OnceLock;

use super::cluster::Cluster;

/// Clusters of a leaf: one page of table.
pub(super) const LEAF_CLUSTERS: u32 = 32;

/// Leaves of the first chunk: 1 GiB of slots.
const FIRST_LEAVES: u32 = 16;

/// Chunks: 16 + 16 + 32 + ... + 2^17 leaves are enough for the 2^18 of 2^32 slots.
const CHUNKS: usize = 15;

const _: () = {
    assert!(LEAF_CLUSTERS as usize * size_of::<Cluster>() == 4096);
    assert!(
        (FIRST_LEAVES as u64) << (CHUNKS - 1)
            == (1 << 32) / (LEAF_CLUSTERS * super::CLUSTER_SLOTS) as u64
    );
};

type Leaf = OnceLock<Box<[Cluster]>>;

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    chunks: [OnceLock<Box<[Leaf]>>; CHUNKS],
    /// Leaves are refused, as though there were no memory.
    #[cfg(any(test, fuzzing))]
    pub(super) refuses: std::sync::atomic::AtomicBool,
    /// How many were.
    #[cfg(any(test, fuzzing))]
    pub(super) refused: std::sync::atomic::AtomicU64,
}

impl Table {
    pub(super) fn new() -> Table {
        Table {
            chunks: [const { OnceLock::new() }; CHUNKS],
            #[cfg(any(test, fuzzing))]
            refuses: std::sync::atomic::AtomicBool::new(false),
            #[cfg(any(test, fuzzing))]
            refused: std::sync::atomic::AtomicU64::new(0),
        }
    }

    /// Makes the chunks for so many clusters. Allocates.
    pub(super) fn reserve(&self, clusters: u32) {
        let Some(last) = clusters.checked_sub(1) else { return };
        let (last, _) = place(last / LEAF_CLUSTERS);
        for (chunk, made) in self.chunks[..=last].iter().enumerate() {
            made.get_or_init(|| {
                let leaves = FIRST_LEAVES << chunk.saturating_sub(1);
                (0..leaves).map(|_| Leaf::new()).collect()
            });
        }
    }

    /// Makes the leaf of a cluster, unless it exists. False: there is no memory. Allocates.
    #[must_use]
    pub(super) fn make(&self, index: u32) -> bool {
        let leaf = self.leaf(index).expect("the area is so large");
        if leaf.get().is_some() {
            return true;
        }
        #[cfg(any(test, fuzzing))]
        if self.refuses.load(std::sync::atomic::Ordering::Relaxed) {
            self.refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            return false;
        }
        let mut clusters = Vec::new();
        if clusters.try_reserve_exact(LEAF_CLUSTERS as usize).is_err() {
            return false;
        }
        clusters.extend((0..LEAF_CLUSTERS).map(|_| Cluster::new()));
        // Another thread may have been faster; its leaf is as good.
        drop(leaf.set(clusters.into_boxed_slice()));
        true
    }

    /// A cluster, if it has a leaf.
    pub(super) fn find(&self, index: u32) -> Option<&Cluster> {
        self.leaf(index)?.get()?.get((index % LEAF_CLUSTERS) as usize)
    }

    /// A cluster that was used.
    pub(super) fn get(&self, index: u32) -> &Cluster {
        self.find(index).expect("TABLE-1: a cluster in use has a leaf")
    }

    fn leaf(&self, index: u32) -> Option<&Leaf> {
        let (chunk, at) = place(index / LEAF_CLUSTERS);
        self.chunks.get(chunk)?.get()?.get(at as usize)
    }
}

/// The chunk of a leaf, and its place there.
fn place(leaf: u32) -> (usize, u32) {
    match (leaf / FIRST_LEAVES).checked_ilog2() {
        None => (0, leaf),
        Some(doublings) => (doublings as usize + 1, leaf - (FIRST_LEAVES << doublings)),
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST_LEAVES, LEAF_CLUSTERS, Table, place};

    #[test]
    fn chunks_follow_each_other() {
        let last = |chunk: u32| (FIRST_LEAVES << chunk) - 1;
        assert_eq!((place(0), place(last(0))), ((0, 0), (0, 15)));
        for chunk in 1..15 {
            let leaves = FIRST_LEAVES << (chunk - 1);
            let number = chunk as usize;
            assert_eq!(place(last(chunk - 1) + 1), (number, 0));
            assert_eq!(place(last(chunk)), (number, leaves - 1));
        }
    }

    #[test]
    fn a_leaf_is_made_once_and_stays() {
        let table = Table::new();
        assert!(table.find(0).is_none());
        let clusters = 1_000 * LEAF_CLUSTERS;
        table.reserve(clusters);
        assert!(table.find(clusters - 1).is_none());
        assert!(table.make(clusters - 1) && table.make(clusters - 1));
        let cluster: *const _ = table.get(clusters - 1);
        table.reserve(1 << 23);
        assert!(table.make((1 << 23) - 1));
        assert_eq!(cluster, std::ptr::from_ref(table.get(clusters - 1)));
        assert!(table.find(clusters - 1 - LEAF_CLUSTERS).is_none());
    }
}
