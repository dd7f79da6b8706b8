//! A disk of this machine: `/dev/ublkbN`, which file systems and swap can be on.
//!
//! The kernel's driver ublk hands the requests of a block device to a process (`linux/ublk_cmd.h`, and
//! <https://docs.kernel.org/block/ublk.html>). [`Server`] makes the device, and has a thread for each of its queues,
//! which takes requests from an io_uring and has the [`Device`] carry them out. `kernel` is the kernel's side as two
//! traits, which tests and the fuzzer play themselves; `request` takes a request apart.
//!
//! # Life of a device
//!
//! ```text
//!    ADD_DEV      SET_PARAMS, queues fetch, START_DEV      STOP_DEV              DEL_DEV
//!  ----------> /dev/ublkcN ------------------> /dev/ublkbN ---------> dead -----------> gone
//!                                                   |                  ^
//!                                                   +-- process dies --+   the next `Server` deletes it
//! ```
//!
//! # Invariants
//!
//! - `UB-1` A queue takes a thread and at most [`QUEUE_BYTES`] of buffers, whatever is asked of it. No request
//!   allocates.
//! - `UB-2` A request outside of the disk, or one that the server does not know, changes nothing and is answered by an
//!   error. None ends the thread.
//! - `UB-3` Each request is answered once. Contents go to the kernel only if the device has returned them without an
//!   error.
//! - `UB-4` Whatever fails while a device is made, no device and no thread is left.
//! - `UB-5` A [`Server`] stops and deletes the device that it has made, by its note, and not one that has the number
//!   later. Of others it deletes those that a server has made, that are dead, and whose processes are gone.
//!
//! # Concurrency
//!
//! A queue belongs to its thread. Control commands are sent by the thread that has the server. No locks.
//!
//! # Cost
//!
//! `docs/design/ublk.md`.
//!
//! [`Device`]: crate::device::Device

mod kernel;
mod node;
mod request;
#[cfg(any(test, fuzzing))]
pub mod script;
mod server;
#[cfg(test)]
mod tests;
mod worker;

pub use kernel::{Unstarted, refusal};
pub use node::Node;
pub use server::{Config, Server};

/// The most of a request, unless units are larger.
const REQUEST_BYTES: u32 = 256 << 10;

/// The largest unit that is one request.
const REQUEST_BYTES_MAX: u32 = 2 << 20;

/// The buffers of a queue. The larger requests are, the fewer may be under way.
pub const QUEUE_BYTES: u32 = 8 << 20;

/// The most queues. The kernel makes one for each CPU at most.
pub const QUEUES_MAX: u16 = 16;

/// The longest discard or zeroing.
const RANGE_BYTES_MAX: u32 = 1 << 30;

/// Blocks that file systems and partition tables count in, and what is written as a whole: a page.
const BLOCK_BYTES: u32 = 4096;

const _: () = {
    assert!(QUEUE_BYTES / REQUEST_BYTES <= zfolio_sys::ublk::DEPTH_MAX as u32);
    assert!(QUEUE_BYTES / REQUEST_BYTES_MAX >= 4);
    assert!(RANGE_BYTES_MAX.is_power_of_two() && BLOCK_BYTES.is_power_of_two());
};
