//! A backing in memory: for tests, and for whoever writes another.
//!
//! It allocates under its lock, so it is not for a store that serves page faults.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use super::{Backing, Completed, Completion, Failure, Location, Operation, Request, Token, Usage};
use crate::sync::Mutex;

/// Rank of the lock: above that of the store, which calls with its own held.
const RANK_MEMORY: u8 = super::RANK_BACKING + 1;

/// Bytes on the heap, up to a limit.
#[derive(Debug)]
pub struct Memory {
    bytes_max: usize,
    inner: Mutex<RANK_MEMORY, Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    kept: BTreeMap<Location, Box<[u8]>>,
    bytes: usize,
    read_bytes: u64,
    written_bytes: u64,
    next: u64,
    done: VecDeque<(Token, Done)>,
}

/// A request that is done and not reported.
#[derive(Debug)]
enum Done {
    Written(Location),
    Read(Box<[u8]>),
    Failed(Failure),
}

impl Memory {
    /// A backing that keeps at most `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Memory {
        Memory { bytes_max, inner: Mutex::new(Inner::default()) }
    }

    /// Bytes that are kept now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.lock().bytes
    }

    /// Locations in use.
    #[must_use]
    pub fn locations(&self) -> usize {
        self.inner.lock().kept.len()
    }
}

impl Memory {
    /// Reports one request that is done; false if there is none.
    pub(super) fn poll_one(&self, each: &mut dyn FnMut(Completion<'_>)) -> bool {
        let Some((token, done)) = self.inner.lock().done.pop_front() else { return false };
        let result = match &done {
            Done::Written(location) => Ok(Completed::Written(*location)),
            Done::Read(bytes) => Ok(Completed::Read(bytes)),
            Done::Failed(failure) => Err(*failure),
        };
        each(Completion { token, result });
        true
    }
}

#[cfg(any(test, fuzzing))]
impl Memory {
    /// Forgets what is kept at a location.
    pub(super) fn forget(&self, location: Location) {
        let length = self.inner.lock().kept[&location].len();
        self.discard(location, length);
    }
}

impl Inner {
    fn write(&mut self, bytes: &[u8], bytes_max: usize) -> Result<Location, Failure> {
        if self.bytes + bytes.len() > bytes_max {
            return Err(Failure::Transient);
        }
        let location = Location::new(self.next).ok_or(Failure::Final)?;
        self.next += 1;
        self.bytes += bytes.len();
        self.written_bytes += bytes.len() as u64;
        self.kept.insert(location, bytes.into());
        Ok(location)
    }
}

impl Backing for Memory {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let mut inner = self.inner.lock();
        for request in requests {
            let done = match request.operation {
                Operation::Write(bytes) => match inner.write(bytes, self.bytes_max) {
                    Ok(location) => Done::Written(location),
                    Err(failure) => {
                        request.refused = Some(failure);
                        continue;
                    }
                },
                Operation::Read { location, .. } => match inner.kept.get(&location).cloned() {
                    Some(bytes) => {
                        inner.read_bytes += bytes.len() as u64;
                        Done::Read(bytes)
                    }
                    None => Done::Failed(Failure::Final),
                },
            };
            inner.done.push_back((request.token, done));
        }
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        while self.poll_one(each) {}
    }

    fn usage(&self) -> Usage {
        let Inner { bytes, read_bytes, written_bytes, .. } = *self.inner.lock();
        Usage { used_bytes: bytes as u64, read_bytes, written_bytes }
    }

    fn discard(&self, location: Location, length: usize) {
        let mut inner = self.inner.lock();
        let bytes = inner.kept.remove(&location).expect("a location is discarded once");
        assert_eq!(bytes.len(), length, "the length of what was written");
        inner.bytes -= length;
    }
}
