//! The front ends of zfolio's block devices.
//!
//! A front end speaks a protocol that clients know, and turns its requests into calls of a [`Device`]. It knows nothing
//! of compression; a device knows nothing of clients. There is one so far: [`nbd`].

#![forbid(unsafe_code)]

pub mod device;
pub mod nbd;
#[doc(hidden)]
pub mod testing;

pub use device::{Device, Error, SECTOR_BYTES};
