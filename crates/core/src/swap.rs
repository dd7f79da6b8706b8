//! Swap: where entries go that do not fit in the pool.
//!
//! An **area** is a file or a block device, cut into **slots** of 4 KiB. `docs/design/spill.md` says how
//! objects get there and back.

#![forbid(unsafe_code)]

pub mod disk;
pub mod slots;
