//! Managed memory with a limit: faults come in, folios go out.
//!
//! The modules are declared in the order in which a page passes them: `replacement` chooses the
//! folio that goes out; `reclaim` has the `mover` take the folio out and the store compress it;
//! `fault` brings the folio back, and `prefetch` brings it back before it is touched.

#![deny(unsafe_code)]

mod folio;

mod replacement;

mod reclaim;

mod copies;
mod density;
mod economy;
mod wide;

mod mover;

mod pool_mappings;
mod system;

mod fault;
pub mod spill;

mod prefetch;

mod mappings;

mod fork;

mod bell;
mod charge;
mod config;
mod engine;
pub mod fatal;
mod rank;

mod handler;
mod inline;

mod notice;
mod pager;
mod published;
mod region;
mod report;
mod slice;
mod transfer;

#[cfg(all(test, debug_assertions))]
mod sim;

pub use charge::OverLimit;
pub use config::{Config, Error, LIMIT_BYTES_MIN, Mode, with_dictionary};
pub use engine::{Engine, StatsHome};
pub use fork::Quiet;
pub use mappings::relocate::moved_parts;
pub use pager::{Builder, Pager};
pub use pool_mappings::PoolMappings;
pub use region::Region;
pub use report::{FaultTimes, Stats};
pub use slice::{Pod, Slice};
pub use transfer::TransferError;
