//! The rest of a tree of processes that share one limit: a supervisor that sets the target of the engine's
//! process, and another process that takes and gives back. So the engine's limit rises and falls during a run.

#![allow(clippy::disallowed_types, reason = "a list of the simulation's own")]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

use zfolio_core::ledger::{Ledger, Member, Owner, Seat};

use super::random::Random;
use super::schedule;
use super::world::World;

/// The tree has so much more than the process needs to hold its data.
const MORE_BYTES_MAX: usize = 8 << 20;

/// Ledgers that no run has: they live for ever, so runs use them again.
static UNUSED: Mutex<Vec<&'static Ledger>> = Mutex::new(Vec::new());

/// See the module.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) member: &'static Member,
    other: &'static Member,
    /// The process can hold its data within so many bytes.
    need_bytes: u64,
}

impl Tree {
    /// A tree in which the engine's process needs `need_bytes`. Returns its limit too.
    pub(super) fn new(random: &mut Random, need_bytes: u64) -> (Tree, u64) {
        let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let ledger = unused.unwrap_or_else(|| Box::leak(Box::default()));
        let total_bytes = need_bytes + (4 << 20) + random.below(MORE_BYTES_MAX) as u64;
        ledger.begin(1, total_bytes);
        ledger.set_reserve(random.below(1 << 20) as u64, total_bytes / 2);
        let member = |pid| -> &'static Member {
            let owner = Owner { pid, namespace: 0, start_ticks: 1 };
            Box::leak(Box::new(Member::new(ledger, owner).expect("two slots are free")))
        };
        (Tree { member: member(1), other: member(2), need_bytes }, total_bytes)
    }

    fn seat(&self) -> Seat<'static> {
        self.member.seat().expect("it never leaves")
    }

    /// One decision of the supervisor, or of the other process.
    fn step(&self, random: &mut Random) {
        let (seat, other) = (self.seat(), self.other.seat().expect("it never leaves"));
        let some = random.below(4 << 20) as u64;
        match random.below(5) {
            0 => seat.set_target(None),
            1..3 => seat.set_target(Some(self.need_bytes + some)),
            3 => {
                other.give_down_to(some);
            }
            _ => {
                let _taken = other.take(1, some + 1);
            }
        }
        self.member.ledger().note_sum(seat.charge_bytes() + other.share_bytes());
    }

    /// The life of the supervisor and of the other process, until the threads of the program end.
    pub(super) fn live(&self, world: &World, mut random: Random) {
        while world.threads_left.load(Relaxed) > 0 {
            self.step(&mut random);
            let pause = random.of(&[20_000, 200_000, 5_000_000]);
            schedule::wait("a decision".to_owned(), Some(random.below(pause) as u64));
        }
    }

    /// Sets the lowest target that the process can hold, but for a small excess (`Engine::excess`).
    pub(super) fn narrow(&self) {
        self.seat().set_target(Some(self.need_bytes));
    }

    /// Whether the share is no more than this target, or than what the process charges.
    pub(super) fn is_narrow(&self) -> bool {
        self.seat().share_bytes() <= self.need_bytes.max(self.seat().charge_bytes())
    }

    /// Fails if bytes of the ledger are lost.
    pub(super) fn check(&self) {
        assert_eq!(self.member.ledger().missing_bytes(), 0, "LEDGER-1: {self:?}");
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.member.leave();
        self.other.leave();
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        unused.push(self.member.ledger());
    }
}
