//! The ranks of the pager's locks, in the order in which they are taken (`docs/locks.md`).

/// The folio table: held for reading by faults and reclaim, for writing when mappings change.
pub(crate) const TABLE: u8 = 10;
/// One folio. A thread takes a second one by `try_lock` only.
pub(crate) const FOLIO: u8 = 20;
/// Changes of mappings that were read and not yet applied.
pub(crate) const INBOX: u8 = 25;
/// Faults that were read and not yet served.
pub(crate) const FAULTS: u8 = 26;
/// Held for reading by who waits for the backing or looks at it without the table, for writing by who forks.
pub(crate) const GATE: u8 = 27;
/// Tries to read what a change needs that the handler is about to apply.
pub(crate) const EVENT_TRIES: u8 = 28;
/// What came back lately, and how much is to be on the disk.
pub(crate) const COLD: u8 = 29;
/// The queues of resident folios.
pub(crate) const REPLACEMENT: u8 = 30;
/// The lists of slots.
pub(crate) const STAGING: u8 = 31;
/// The queue of folios that have copies.
pub(crate) const COPIES: u8 = 32;
/// The samples that the choice of a codec rests on.
pub(crate) const DENSITY: u8 = 33;
/// The streams that faults make through memory.
pub(crate) const STREAMS: u8 = 34;
/// The pace of proactive reclaim.
pub(crate) const PACE: u8 = 35;
/// What the background thread did lately.
pub(crate) const BUSY: u8 = 36;
/// What the last look at the prices saw.
pub(crate) const PRICES: u8 = 37;
/// Pages of which it is not known whether they were captured before a change or after it.
pub(crate) const DOUBTS: u8 = 38;
// 39 to 52: the streams of `core::zcomp`, the store and its areas, the pool of `core::zsmalloc`; but for
/// Which areas are spilled to.
pub(crate) const PLACE: u8 = 44;
/// The address space of the pool.
pub(crate) const POOL_MAPPINGS: u8 = 60;
/// That the limit is passed, which nobody was told of yet.
pub(crate) const UNTOLD: u8 = 61;
/// A ring: its queues, and what it has.
pub(crate) const RING: u8 = 62;
/// The queue of a disk.
pub(crate) const DISK: u8 = 63;
