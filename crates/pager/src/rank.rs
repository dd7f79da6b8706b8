//! The ranks of the pager's locks, in the order in which they are taken (`docs/locks.md`).

/// The folio table: read by faults and reclaim, written when mappings change.
pub(crate) const TABLE: u8 = 10;
/// One folio. A second one only by `try_lock`.
pub(crate) const FOLIO: u8 = 20;
/// Messages read and not yet served.
pub(crate) const INBOX: u8 = 25;
/// The queues of resident folios.
pub(crate) const RESIDENT: u8 = 30;
/// The lists of slots.
pub(crate) const STAGING: u8 = 31;
/// The queue of folios that have copies.
pub(crate) const COPIES: u8 = 32;
// 39 to 52: the streams of `core::zcomp` and the pool of `core::zsmalloc`.
/// The address space of the pool.
pub(crate) const RUNS: u8 = 60;
