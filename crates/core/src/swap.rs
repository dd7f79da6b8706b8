//! Swap: where entries go that do not fit in the pool.
//!
//! An **area** is a file or a block device, cut into **slots** of 4 KiB. [`Areas`] are a [`Backing`] of a store: they
//! pack its objects into frames (`frame`), take slots for them ([`slots`]), seal each slot (`seal`, `table`), and hand
//! frames to a [`Disk`]; what is wanted is read together with its neighbours (`read`). `docs/design/spill.md` has the
//! whole path out and back, and the reasons.
//!
//! # Invariants
//!
//! - `SWAP-1` A slot is written only while no live object touches it, and no transfer of it is under way.
//! - `SWAP-2` Each (slot, generation) of an area is sealed once, whichever process seals it.
//! - `SWAP-3` A location is reported only after its transfer has ended without an error.
//! - `SWAP-4` What is handed out of a slot was opened with the tag of its generation.
//! - `SWAP-5` What a child of `fork` may read is neither written nor discarded: slots that had objects at the fork, as
//!   long as a child has the disk. The child writes to none of its parent's areas.
//!
//! [`Backing`]: crate::store::Backing
//! [`Disk`]: disk::Disk

#![forbid(unsafe_code)]

mod area;
mod areas;
mod bad;
mod buffers;
pub mod disk;
mod frame;
mod location;
mod read;
#[cfg(any(test, fuzzing))]
pub mod script;
mod seal;
pub mod slots;
mod table;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

/// Rank of the lock on an area's bad slots.
const RANK_BAD: u8 = crate::store::RANK_BACKING + 4;

pub use areas::{AreaStatus, Areas, AreasStats, Config, NewArea};
pub use location::{AREAS_MAX, AreaId, SLOTS_MAX};
pub use seal::{KeyMemory, KeyRoom, SECRET_BYTES, Seal, TAG_BYTES, Tag, Tampered};
