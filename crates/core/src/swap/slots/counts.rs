//! What the allocator counts.

use super::ORDERS;

/// What happened in an area, and where its clusters are now.
///
/// The clusters of all lists, those that are being discarded and those of CPUs are together all clusters of
/// the area.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Runs that were taken, by order.
    pub swpout: [u64; ORDERS],
    /// Runs that were refused for want of room, by order. The caller then tries smaller ones.
    pub swpout_fallback: [u64; ORDERS],
    /// Clusters without a slot in use, those that were never used among them.
    pub free: u32,
    /// Clusters that may have room for their order, by order.
    pub nonfull: [u32; ORDERS],
    /// Clusters that have room for smaller orders only, by order.
    pub frag: [u32; ORDERS],
    /// Clusters whose slots are all in use.
    pub full: u32,
    /// Clusters that wait to be discarded.
    pub discard: u32,
    /// Clusters that [`take_discards`](super::Slots::take_discards) handed out.
    pub discarding: u32,
    /// Clusters that CPUs take slots from.
    pub current: u32,
    /// Clusters that were discarded.
    pub discards: u64,
    /// Clusters that were freed whole and used again without.
    pub discards_skipped: u64,
    /// Clusters that order 0 took from a larger order.
    pub steals: u64,
}
