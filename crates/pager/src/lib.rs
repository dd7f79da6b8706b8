//! Managed memory with a limit: faults come in, folios go out.
//!
//! The modules are declared in the order in which a page passes them: out through `reclaim`, `seam`
//! and `staging` into the store, back through `fault`.

#![deny(unsafe_code)]

mod shape;
mod table;

mod replacement;

mod reclaim;

mod copies;

mod mover;
mod system;

mod runs;

mod fault;

mod prefetch;

mod adopt;
mod change;
mod fork;

mod event;

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

pub use charge::OverLimit;
pub use config::{Config, Error, LIMIT_BYTES_MIN, Mode, with_dictionary};
pub use engine::{Engine, StatsHome};
pub use fork::Quiet;
pub use pager::{Builder, Pager};
pub use region::Region;
pub use report::{FaultTimes, Stats};
pub use runs::Runs;
pub use slice::{Pod, Slice};
pub use transfer::TransferError;
