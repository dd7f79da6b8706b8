//! Where entries go when they leave the pool: a swap area, a file, another machine.
//!
//! A [`Backing`] takes **requests** in batches and answers each later with one **completion**. The bytes
//! of a write are the caller's again when `submit` returns, so a backing copies them; one that encrypts
//! what it writes has to do that anyway, and a backing in memory has nothing to wait for. The bytes of a
//! read are lent by `poll` for the time of one call.
//!
//! A request names its entry by a [`Token`]. An entry has at most one request in flight.

#![forbid(unsafe_code)]

#[cfg(any(test, fuzzing))]
pub(crate) mod faulty;
pub mod memory;
#[cfg(any(test, fuzzing))]
pub(crate) mod sealed;

use std::fmt;
use std::sync::Arc;

use crate::zsmalloc::{Away, Handle};

/// Names a request, and the entry that it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token(pub(super) Handle);

impl Token {
    /// A token for whoever plays a store: tests and benchmarks of backings.
    #[doc(hidden)]
    #[must_use]
    pub fn numbered(number: u32) -> Token {
        Token(Handle::from_index(number))
    }

    /// The number of such a token.
    #[doc(hidden)]
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.to_raw() - 1
    }
}

/// Where a backing keeps the bytes of one entry: a number below 2^42 of the backing's choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Location(u64);

impl Location {
    /// Bits of its number.
    pub const BITS: u32 = Away::PLACE_BITS;

    /// A location, or `None` if the number is 2^42 or more.
    #[must_use]
    pub fn new(number: u64) -> Option<Location> {
        (number >> Location::BITS == 0).then_some(Location(number))
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// What is wanted of a backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation<'a> {
    /// Keep these bytes. The backing chooses the location.
    Write(&'a [u8]),
    /// Return the bytes that are kept here.
    Read {
        /// What a completed write returned.
        location: Location,
        /// How many bytes that write had.
        length: usize,
    },
}

/// One request of a batch.
#[derive(Debug)]
pub struct Request<'a> {
    /// What its completion will name.
    pub token: Token,
    /// What is wanted.
    pub operation: Operation<'a>,
    /// The backing's answer: why it did not accept the request, which then has no completion.
    pub refused: Option<Failure>,
}

/// The end of one request.
#[derive(Debug)]
pub struct Completion<'a> {
    /// That of the request.
    pub token: Token,
    /// What was done.
    pub result: Result<Completed<'a>, Failure>,
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completed<'a> {
    /// The bytes are kept, here.
    Written(Location),
    /// The bytes that were kept.
    Read(&'a [u8]),
}

/// Why a backing did not do something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// It may succeed later: the backing is full or busy, or out of reach, or could not read.
    Transient,
    /// It will not succeed however often it is tried: the bytes are damaged, or gone.
    Final,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Transient => "the backing cannot do it now",
            Failure::Final => "the backing cannot do it at all",
        })
    }
}

impl std::error::Error for Failure {}

/// What a backing has and did, in bytes of its medium: whole slots, where it has slots.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Bytes in use now.
    pub used_bytes: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

/// Where entries go when they leave the pool.
///
/// The store calls `flush`, `tidy` and `poll`, and submits writes, with its lock of rank [`RANK_BACKING`] held. Reads
/// are submitted without that lock, by several threads at once. `submit` and `discard` are called also with locks of
/// the store's caller; so the locks of a backing have higher ranks. None of these waits for a device.
pub trait Backing: Send + Sync + fmt::Debug {
    /// Accepts each of the `requests`, or says why not.
    fn submit(&self, requests: &mut [Request<'_>]);

    /// No more requests follow for now: what was accepted is to be on its way.
    fn flush(&self) {}

    /// Lets the medium forget some of what was discarded.
    fn tidy(&self) {}

    /// Calls `each` for every request that is done and was not reported yet, with no lock held:
    /// `each` may call `discard`. Reads that were accepted are on their way after it. Never waits.
    fn poll(&self, each: &mut dyn FnMut(Completion<'_>));

    /// Bytes of its own memory: tables and buffers.
    fn memory_bytes(&self) -> usize {
        0
    }

    /// What it has and did, if it counts that.
    fn usage(&self) -> Usage {
        Usage::default()
    }

    /// Forgets what is kept at a location, `length` bytes as its write had. No request for it is in flight, and
    /// none will come.
    fn discard(&self, location: Location, length: usize);

    /// Waits for a moment, or until a request is done. The caller holds no lock, and will poll.
    fn pause(&self) {
        crate::sync::pause();
    }
}

/// A backing that its owner keeps a hand on.
impl<B: Backing> Backing for Arc<B> {
    fn submit(&self, requests: &mut [Request<'_>]) {
        (**self).submit(requests);
    }

    fn flush(&self) {
        (**self).flush();
    }

    fn tidy(&self) {
        (**self).tidy();
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        (**self).poll(each);
    }

    fn memory_bytes(&self) -> usize {
        (**self).memory_bytes()
    }

    fn usage(&self) -> Usage {
        (**self).usage()
    }

    fn discard(&self, location: Location, length: usize) {
        (**self).discard(location, length);
    }

    fn pause(&self) {
        (**self).pause();
    }
}

/// Rank of the lock under which a store talks to its backing: above the streams, below the pool.
pub const RANK_BACKING: u8 = 45;

const _: () = assert!(crate::zcomp::RANK_DECOMPRESS < RANK_BACKING);
