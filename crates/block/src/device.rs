//! What front ends serve.

use std::fmt;

/// Offsets and lengths of requests are multiples of a sector.
pub const SECTOR_BYTES: u32 = 512;

/// A disk that front ends serve. Offsets and lengths are in bytes, any multiple of [`SECTOR_BYTES`].
///
/// Threads call it at the same time. What two requests for the same bytes do that overlap in time is any order of the
/// two, sector by sector, as with a real disk.
pub trait Device: Send + Sync {
    /// Its size, which may change while it is served: requests are checked against the size at their time.
    fn size_bytes(&self) -> u64;

    /// What requests are best aligned to: the unit that is compressed as one, a power of two.
    fn preferred_bytes(&self) -> u32;

    /// Whether everything that changes it is refused.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Fills `into` with the contents from `at` on.
    ///
    /// # Errors
    ///
    /// See [`Error`]. What is in `into` then is not to be shown to anybody.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error>;

    /// The contents from `at` on are `from` afterwards.
    ///
    /// # Errors
    ///
    /// See [`Error`]. Any sectors of the range may have changed.
    fn write(&self, at: u64, from: &[u8]) -> Result<(), Error>;

    /// The whole units of the range read as zeros afterwards, and take no memory. So do parts of units, or, where there
    /// is no room to zero them, they stay as they are: a discard is advice.
    ///
    /// # Errors
    ///
    /// As [`write`](Device::write).
    fn discard(&self, at: u64, bytes: u64) -> Result<(), Error>;

    /// The range reads as zeros afterwards. With `keeps_room` what it takes stays reserved, where the device can do
    /// that.
    ///
    /// # Errors
    ///
    /// As [`write`](Device::write).
    fn write_zeroes(&self, at: u64, bytes: u64, keeps_room: bool) -> Result<(), Error>;

    /// What was written before survives what the device promises to survive.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    fn flush(&self) -> Result<(), Error>;

    /// Calls `each` with the runs of the range in order, until `each` returns false: the length of the run, and whether
    /// it takes no memory and reads as zeros.
    ///
    /// # Errors
    ///
    /// See [`Error`]. Runs that were reported before the error are right.
    fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error>;

    /// A front end has refused a request because it was not aligned, or beyond the end: the device has not seen it, and
    /// may count it with those that it answers with [`Error::Invalid`].
    fn note_invalid(&self) {}
}

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// Out of range or not aligned: the caller's mistake.
    Invalid,
    /// The device is full; space may come back when something is discarded.
    NoSpace,
    /// Contents cannot be read, or are wrong.
    Io,
    /// The device is read-only.
    NotPermitted,
    /// No memory for the request; it may be tried again.
    NoMemory,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::Invalid => "out of range or not aligned",
            Error::NoSpace => "the device is full",
            Error::Io => "the contents cannot be read or written",
            Error::NotPermitted => "the device is read-only",
            Error::NoMemory => "no memory for the request",
        })
    }
}

impl std::error::Error for Error {}
