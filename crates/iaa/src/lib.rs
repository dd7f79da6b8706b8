//! A driver in user space of the Intel In-Memory Analytics Accelerator (IAA), as a backend of zfolio's codecs, and a
//! functional model of the device to test it on.
//!
//! `docs/design/iaa.md` has the whole of it: how a job goes, what a device that fails or lies can do, and what the
//! model assumes.

#![deny(unsafe_code)]

pub mod accelerate;
pub mod backend;
pub mod checksum;
#[allow(unsafe_code, reason = "memory that a device works on")]
mod completion;
pub mod discover;
pub mod driver;
pub mod failure;
mod flights;
pub mod layout;
mod machine;
pub mod model;
mod placement;
pub mod portal;
#[allow(unsafe_code, reason = "a ticket, or a lock, says who may use a queue")]
pub mod queues;
pub mod seat;
pub mod settings;
pub mod setup;
pub mod stats;
#[cfg(test)]
mod testing;

pub use backend::{Codes, Iaa};
pub use driver::{Driver, WorkQueue};
pub use settings::{Settings, WhenBusy};
