//! A process's own place in the ledger.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::{Ledger, Owner, SLOTS, Seat};

/// See the module. A child of `fork` has its parent's, until it [enters](Member::enter) itself.
#[derive(Debug)]
pub struct Member {
    ledger: &'static Ledger,
    index: AtomicUsize,
    /// The process, as the slot names it: another may have taken the slot over.
    word: AtomicU64,
}

impl Member {
    /// Enters `owner`. `None`: no slot is free.
    #[must_use]
    pub fn new(ledger: &'static Ledger, owner: Owner) -> Option<Member> {
        let index = AtomicUsize::new(ledger.enter(owner)?);
        Some(Member { ledger, index, word: AtomicU64::new(owner.word()) })
    }

    /// In a child of `fork`: enters it, in place of its parent. False: no slot is free, and the child has no limit of
    /// the tree's.
    ///
    /// `is_gone` tells which processes are gone if nobody else frees their slots, and else nothing of any.
    pub fn enter(
        &self,
        owner: Owner,
        resident_bytes: u64,
        is_gone: impl Fn(Owner) -> bool,
    ) -> bool {
        let Some(index) = self.ledger.enter_or_take_over(owner, is_gone) else {
            self.index.store(usize::MAX, Relaxed);
            return false;
        };
        self.ledger.seat(index).set_forked(resident_bytes);
        self.word.store(owner.word(), Relaxed);
        self.index.store(index, Relaxed);
        true
    }

    /// Leaves: nobody watches this process, or it has no slot. The supervisor counts it from
    /// outside.
    pub fn leave(&self) {
        let index = self.index.swap(usize::MAX, Relaxed);
        if index < SLOTS && self.ledger.seat(index).owner().word() == self.word.load(Relaxed) {
            self.ledger.release(index);
        }
    }

    /// The ledger.
    pub fn ledger(&self) -> &'static Ledger {
        self.ledger
    }

    /// Its slot. `None`: it has none.
    pub fn seat(&self) -> Option<Seat<'static>> {
        let index = self.index.load(Relaxed);
        (index < SLOTS).then(|| self.ledger.seat(index))
    }
}
