//! The front ends of zfolio's block devices.
//!
//! A front end speaks a protocol that clients know, and turns its requests into calls of a [`Device`]. It knows nothing
//! of compression; a device knows nothing of clients. There are three front ends so far, [`nbd`], [`vhost_user`] and
//! [`ublk`], and one device, [`ram`]: a compressed disk in memory. Other processes read and write its [attributes]
//! through its [control] socket, and Prometheus reads its [metrics]. Contents are [saved] as a file. A
//! [configuration](conf) names disks, for a daemon.

#![forbid(unsafe_code)]

pub mod address;
mod clients;
pub mod device;
pub mod listen;
pub mod nbd;
mod pieces;
pub mod ublk;
pub mod vhost_user;

pub mod attributes;
pub mod conf;
pub mod control;
pub mod metrics;
pub mod ram;
mod requests;
pub mod saved;
#[doc(hidden)]
pub mod testing;

pub use clients::{Counts, Held, Refusals, Report};
pub use device::{Device, Error, SECTOR_BYTES};
