//! What an area is written to: a file, a block device, a simulated one.
//!
//! A [`Disk`] moves whole slots between itself and [`Buffer`]s. A [`Transfer`] owns its buffer: whoever begins
//! it gives the buffer away, and has it back when the transfer has ended. So no buffer is touched while the
//! kernel uses it.
//!
//! # Invariants
//!
//! - `DISK-1` Each transfer that was begun comes back through [`Disk::poll`] exactly once, with its buffer.
//! - `DISK-2` A transfer whose result is `Ok` moved all of its slots: a disk goes on after a short one.
//! - `DISK-3` What [`Disk::discard`] forgets is what was written before the call. A transfer that is begun after
//!   it finds its slots as if the discard had ended by then.
//! - `DISK-4` The slots of a transfer, or of a discard, lie in one stretch ([`Disk::stretch_slots`]). So a disk may
//!   have its stretches anywhere on its medium.
//!
//! # Concurrency
//!
//! All methods may be called by any thread; its locks have ranks above 47, and it holds none when it calls `each`.
//! None but [`Disk::pause`] waits for the medium.

#[doc(hidden)]
pub mod faulty;
pub mod memory;

use std::fmt;

use super::location::SLOTS_MAX;

/// Rank of the lock of a disk: nothing of the areas' is locked while one is called.
const RANK_DISK: u8 = crate::store::RANK_BACKING + 3;

/// Bytes of a slot: what direct I/O moves at least, on every file system that has it.
pub const SLOT_BYTES: usize = 4096;

/// The bytes of one slot, aligned as direct I/O wants them.
#[repr(C, align(4096))]
#[derive(Clone, Copy, Debug)]
pub struct Slot(pub [u8; SLOT_BYTES]);

const _: () = assert!(size_of::<Slot>() == SLOT_BYTES && align_of::<Slot>() == SLOT_BYTES);

/// Memory for one transfer: a number of slots that never changes.
#[derive(Debug)]
pub struct Buffer(Box<[Slot]>);

impl Buffer {
    /// A buffer of `slots` slots of zeros. Allocates.
    #[must_use]
    pub fn new(slots: usize) -> Buffer {
        Buffer(vec![Slot([0; SLOT_BYTES]); slots].into_boxed_slice())
    }

    /// Its slots.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.0
    }

    /// Its slots, to be written.
    pub fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.0
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the disk into the buffer.
    Read,
    /// From the buffer to the disk.
    Write,
}

/// Some slots on their way.
#[derive(Debug)]
pub struct Transfer {
    /// Names the transfer to whoever began it.
    pub token: u64,
    /// Which way.
    pub direction: Direction,
    /// The first slot on the disk.
    pub first: u64,
    /// How many slots, from the buffer's first on; at least 1 and at most the buffer's.
    pub count: usize,
    /// Where they are, or will be.
    pub buffer: Buffer,
    /// How it ended. `Ok` before that.
    pub result: Result<(), Error>,
}

/// Why a transfer failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// There is no room on the medium (`ENOSPC`, `EDQUOT`, `EFBIG`). A write may succeed later.
    Full,
    /// The system was short of something, or the call was interrupted (`EAGAIN`, `ENOMEM`, `EINTR`).
    Busy,
    /// The medium failed, or is shorter than it was. The number is the system's (`EIO`), 0 for an end of file.
    Failed {
        /// See above.
        errno: i32,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Full => f.write_str("no room on the disk"),
            Error::Busy => f.write_str("the system is busy"),
            Error::Failed { errno: 0 } => f.write_str("the file is shorter than it was"),
            Error::Failed { errno } => write!(f, "error {errno} of the disk"),
        }
    }
}

impl std::error::Error for Error {}

/// See the module.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Accepts a transfer. `Err` gives it back untouched: as many are under way as the disk takes.
    ///
    /// # Errors
    ///
    /// The transfer itself.
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer>;

    /// Sends all accepted transfers on their way, with one system call for all where there is one.
    fn flush(&self);

    /// Calls `each` with every transfer that has ended since, with no lock held. Never waits.
    fn poll(&self, each: &mut dyn FnMut(Transfer));

    /// Waits until a transfer has ended, a millisecond at most.
    fn pause(&self);

    /// The contents of these slots are not needed any more: the medium may forget them.
    fn discard(&self, first: u64, count: u64);

    /// How many more discards it takes now. It would leave others out, and the medium never hear of them.
    fn discard_room(&self) -> usize {
        usize::MAX
    }

    /// Slots of a stretch, whole clusters: the first so many lie side by side on the medium, and the next, and so on.
    /// It never changes.
    fn stretch_slots(&self) -> u32 {
        SLOTS_MAX
    }
}
