//! A backing in memory that fails, dawdles and damages as it is told to. For tests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::memory::Memory;
use super::{Backing, Completed, Completion, Failure, Location, Operation, Request, Token};
use crate::sync::Mutex;
use crate::zsmalloc::Handle;

/// Above the rank of [`Memory`]'s lock.
const RANK_FAULTS: u8 = super::RANK_BACKING + 2;

/// What goes wrong next. Shared by the backing and by who plays with it.
#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) memory: Memory,
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

/// The backing.
#[derive(Clone, Debug)]
pub(crate) struct Faulty(pub(crate) Arc<Faults>);

impl Faulty {
    pub(crate) fn new(bytes_max: usize) -> Faulty {
        Faulty(Arc::new(Faults {
            memory: Memory::new(bytes_max),
            holds: AtomicBool::new(false),
            refuse: AtomicUsize::new(0),
            fail: AtomicUsize::new(0),
            is_final: AtomicBool::new(false),
            damage: AtomicUsize::new(0),
            hurt: Mutex::new(BTreeSet::new()),
        }))
    }
}

impl Faults {
    /// Nothing goes wrong from now on.
    pub(crate) fn behave(&self) {
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

    fn hurts(&self, token: Token) {
        self.hurt.lock().insert(token.0.to_raw());
    }

    fn takes(count: &AtomicUsize) -> bool {
        count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1)).is_ok()
    }

    fn failure(&self) -> Failure {
        if self.is_final.load(Relaxed) { Failure::Final } else { Failure::Transient }
    }
}

impl Backing for Faulty {
    fn submit(&self, requests: &mut [Request<'_>]) {
        for request in requests {
            if Faults::takes(&self.0.refuse) {
                let failure = self.0.failure();
                let reads = matches!(request.operation, Operation::Read { .. });
                if reads && failure == Failure::Final {
                    self.0.hurts(request.token);
                }
                request.refused = Some(failure);
            } else {
                self.0.memory.submit(std::slice::from_mut(request));
            }
        }
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        let faults = &*self.0;
        let mut spoil = |completion: Completion<'_>| {
            let token = completion.token;
            match completion.result {
                Ok(Completed::Written(location)) if Faults::takes(&faults.fail) => {
                    faults.memory.discard(location);
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
            if holds || !faults.memory.poll_one(&mut spoil) {
                break;
            }
        }
    }

    fn discard(&self, location: Location) {
        self.0.memory.discard(location);
    }

    /// Whoever waits would wait for ever.
    fn pause(&self) {
        self.0.holds.store(false, Relaxed);
    }
}
