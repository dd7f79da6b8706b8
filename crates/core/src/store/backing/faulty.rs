//! A backing in memory that fails, dawdles and damages as it is told to; and what tests ask of any such backing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::memory::Memory;
use super::{Backing, Completed, Completion, Failure, Location, Operation, Request, Token, Usage};
use crate::sync::Mutex;
use crate::zsmalloc::Handle;

/// Above the ranks of [`Memory`]'s lock, and of those of areas and disks.
const RANK_FAULTS: u8 = super::RANK_BACKING + 4;

/// A backing that a test breaks. Clones are the same backing.
pub(crate) trait Breakable: Backing + Clone + 'static {
    /// One that keeps about `bytes_max` bytes.
    fn new(bytes_max: usize) -> Self;

    /// What goes wrong next.
    fn faults(&self) -> &Faults;

    /// Nothing goes wrong from now on.
    fn behave(&self) {
        self.faults().behave();
    }

    /// Locations in use.
    fn locations(&self) -> usize;

    /// Bytes that are kept.
    fn bytes(&self) -> usize;
}

/// What goes wrong next. Shared by the backing and by who plays with it.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Completions are kept back.
    pub(crate) holds: AtomicBool,
    /// So many requests are refused.
    pub(crate) refuse: AtomicUsize,
    /// So many requests fail once they are accepted.
    pub(crate) fail: AtomicUsize,
    /// Whether refusals and failures are for good.
    pub(crate) is_final: AtomicBool,
    /// So many reads return other bytes.
    pub(crate) damage: AtomicUsize,
    /// The entries that were damaged, or failed for good.
    hurt: Mutex<RANK_FAULTS, BTreeSet<u32>>,
}

/// The backing in memory.
#[derive(Clone, Debug)]
pub(crate) struct Faulty(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    faults: Faults,
    memory: Memory,
}

impl Faults {
    pub(super) fn behave(&self) {
        self.holds.store(false, Relaxed);
        for count in [&self.refuse, &self.fail, &self.damage] {
            count.store(0, Relaxed);
        }
    }

    /// Whether the entry with this handle may be lost.
    pub(crate) fn has_hurt(&self, handle: Handle) -> bool {
        self.hurt.lock().contains(&handle.to_raw())
    }

    /// The handle is another entry's from now on.
    pub(crate) fn heal(&self, handle: Handle) {
        self.hurt.lock().remove(&handle.to_raw());
    }

    /// The entry of this request may be lost from now on.
    pub(super) fn hurts(&self, token: Token) {
        self.hurt.lock().insert(token.0.to_raw());
    }

    fn takes(count: &AtomicUsize) -> bool {
        count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1)).is_ok()
    }

    fn failure(&self) -> Failure {
        if self.is_final.load(Relaxed) { Failure::Final } else { Failure::Transient }
    }

    /// Refuses the request if one is to be refused.
    pub(super) fn refuses(&self, request: &mut Request<'_>) -> bool {
        let refuses = Faults::takes(&self.refuse);
        if refuses {
            let failure = self.failure();
            let reads = matches!(request.operation, Operation::Read { .. });
            if reads && failure == Failure::Final {
                self.hurts(request.token);
            }
            request.refused = Some(failure);
        }
        refuses
    }
}

impl Breakable for Faulty {
    fn new(bytes_max: usize) -> Faulty {
        Faulty(Arc::new(Inner { faults: Faults::default(), memory: Memory::new(bytes_max) }))
    }

    fn faults(&self) -> &Faults {
        &self.0.faults
    }

    fn locations(&self) -> usize {
        self.0.memory.locations()
    }

    fn bytes(&self) -> usize {
        self.0.memory.bytes()
    }
}

impl Backing for Faulty {
    fn submit(&self, requests: &mut [Request<'_>]) {
        for request in requests {
            if !self.0.faults.refuses(request) {
                self.0.memory.submit(std::slice::from_mut(request));
            }
        }
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        let (faults, memory) = (&self.0.faults, &self.0.memory);
        let mut spoil = |completion: Completion<'_>| {
            let token = completion.token;
            match completion.result {
                Ok(Completed::Written(location)) if Faults::takes(&faults.fail) => {
                    memory.forget(location);
                    each(Completion { token, result: Err(faults.failure()) });
                }
                Ok(Completed::Read(_)) if Faults::takes(&faults.fail) => {
                    if faults.failure() == Failure::Final {
                        faults.hurts(token);
                    }
                    each(Completion { token, result: Err(faults.failure()) });
                }
                Ok(Completed::Read(bytes)) if Faults::takes(&faults.damage) => {
                    faults.hurts(token);
                    let mut other = bytes.to_vec();
                    match bytes.len() % 3 {
                        0 => _ = other.pop(),
                        1 => other[bytes.len() / 2] ^= 0x10,
                        _ => other.fill(0xEE),
                    }
                    each(Completion { token, result: Ok(Completed::Read(&other)) });
                }
                result => each(Completion { token, result }),
            }
        };
        loop {
            let holds = faults.holds.load(Relaxed);
            if holds || !memory.poll_one(&mut spoil) {
                break;
            }
        }
    }

    fn usage(&self) -> Usage {
        self.0.memory.usage()
    }

    fn discard(&self, location: Location, length: usize) {
        self.0.memory.discard(location, length);
    }

    /// Whoever waits would wait for ever.
    fn pause(&self) {
        self.0.faults.holds.store(false, Relaxed);
    }
}
