//! A vhost-user-blk device: a disk of virtual machines, through memory that they share with this process.
//!
//! The words are those of the two texts: <https://qemu-project.gitlab.io/qemu/interop/vhost-user.html> for the messages
//! and <https://docs.oasis-open.org/virtio/virtio/v1.3/virtio-v1.3.html> for what is in the memory. A **front end**
//! (QEMU) connects to a socket and sends **messages**: the files of the guest's memory, and for each **queue** the
//! places of its **rings** and two event descriptors: **kick**, by which the guest says that there are requests, and
//! **call**, by which it is told that they are done. A request is a **chain** of **descriptors**, each a range of the
//! guest's memory that the device reads or writes.
//!
//! [`Server`] accepts front ends; each has a `Session`, which keeps what the messages say, and a thread for each queue
//! that runs, with a `Ring` that takes chains and a `Worker` that has the [`Device`] serve them. `Chain` is the parser:
//! a function of the guest's memory alone, for tests and fuzzers.
//!
//! # Invariants
//!
//! - `VU-1` A connection takes a thread, and for each queue that runs a thread, a buffer of 256 KiB or of one unit of
//!   the device, if that is larger, and two lists of [`SEGMENTS_MAX`] segments, whatever its front end sends; it maps
//!   [`GUEST_BYTES_MAX`] at most, and twice that while its memory changes.
//! - `VU-2` No request allocates. Its data are copied once, between the guest's memory and a piece that the device
//!   gets. The device never sees memory that a guest could change meanwhile.
//! - `VU-3` All of a request's descriptors lie in the guest's memory, or the request is refused. A request that is
//!   refused changes nothing but its status.
//! - `VU-4` Each chain is returned once, in the order in which the guest has made them available.
//! - `VU-5` Contents go to the guest only if the device has returned them without an error.
//! - `VU-6` Memory whose file was shortened reads as zeros, and its front end is left; nobody else notices.
//! - `VU-7` A queue that was in use before goes on only with the disk that has served it ([`Marks`]).
//!
//! # Concurrency
//!
//! Messages are served by the connection's thread, under the session's lock, which nobody else takes. What changes a
//! queue that runs stops its thread first, between two requests, and starts it again.
//!
//! # Cost
//!
//! With requests in the ring, no system call for a request but the one that tells the guest, if it wants to be told.
//! `docs/design/vhost-user.md` has measurements.
//!
//! [`Device`]: crate::device::Device

mod chain;
mod features;
#[cfg(any(test, fuzzing))]
mod guest;
mod marks;
mod memory;
mod ring;
#[cfg(any(test, fuzzing))]
pub mod script;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod worker;

#[cfg(test)]
pub(crate) use worker::Worker;

pub use marks::Marks;
pub use server::{Config, Server};

/// The longest ring; the longest that QEMU makes.
pub const QUEUE_ENTRIES_MAX: u16 = 1024;

/// The most descriptors of a chain. A guest makes chains of `SEGMENTS_TOLD` and two others.
pub const SEGMENTS_MAX: usize = QUEUE_ENTRIES_MAX as usize;

/// How many segments of data a guest is told to use at most: with header and status they fit the rings of 128 entries
/// that QEMU makes.
const SEGMENTS_TOLD: u32 = 126;

/// How long a segment of data a guest is told to use at most: so a request has 126 MiB at most.
const SEGMENT_BYTES_TOLD: u32 = 1 << 20;

/// The most queues of a front end. QEMU asks for one for each CPU of its guest.
pub const QUEUES_MAX: u16 = 64;

/// The most ranges of a discard or of a zeroing.
const RANGES_MAX: usize = 64;

/// The longest of them.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// How many front ends there may be at once. Mostly there is one; the others are for one that comes back before it is
/// noticed that the old one is gone.
pub const CONNECTIONS_MAX: usize = 16;

/// The most memory of a guest.
pub const GUEST_BYTES_MAX: u64 = 2 << 40;

const _: () = {
    assert!(QUEUE_ENTRIES_MAX.is_power_of_two());
    assert!(SEGMENTS_TOLD as usize + 2 <= 128 && 128 <= SEGMENTS_MAX);
    assert!(RANGE_BYTES_MAX.is_power_of_two());
    // All front ends together, each with the memory that it had and the one that it has now, leave half of the 128 TiB
    // of addresses that a process has to others.
    assert!(2 * CONNECTIONS_MAX as u64 * GUEST_BYTES_MAX <= 64 << 40);
    // The same of their regions: a message has 32 at most.
    assert!(2 * CONNECTIONS_MAX * 32 <= zfolio_sys::foreign::RANGES_MAX);
};
