//! The supervisor of a tree's limit: looks at the ledger, and at the processes, 20 times a second.
//!
//! - A process that is gone leaves its share.
//! - Processes without a share are charged to a slot of this process.
//! - Children of `fork` pay for what is theirs alone.
//! - The others get their targets from [`Quota`].
//!
//! # Cost
//!
//! One file of `/proc` for each process and look, about 20 us; fewer looks if they would take more
//! than a 50th of a CPU.

use std::collections::BTreeMap;
use std::time::Duration;

use zfolio_core::ledger::{Ledger, Owner, Seat};
use zfolio_sys::{clock, process};

use super::proc;
use super::quota::{Quota, State, View};
use super::tree::{Seen, Tree};
use crate::ledger_file;
use crate::stats_file;

/// Between two looks.
const LOOK_NS: u64 = 50_000_000;

/// Between two looks at the pages of forked processes.
const PAGES_LOOK_NS: u64 = 100_000_000;

/// The pause after a look is at least this many times as long as the look.
const REST: u64 = 50;

/// A 64th of the total is kept free for new processes, if there is more than one.
const RESERVE_SHARE: u64 = 64;

/// A 16th of the total is made free at once for a process that waits.
const ROOM_SHARE: u64 = 16;

/// Bytes that are missing for so many looks are lost (`LEDGER-2`).
const LOST_LOOKS: u32 = 20;

/// A process of another PID namespace that was not seen for so many looks is gone.
const UNSEEN_LOOKS: u32 = 60;

/// See the module. Its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Supervisor {
    ledger: &'static Ledger,
    namespace: u32,
    /// The slot for processes without a share.
    own: usize,
    quota: Quota,
    /// How often each process of another namespace was looked for in vain.
    unseen: BTreeMap<usize, u32>,
    /// What is missing in the ledger, and for how many looks it was just that.
    missing: (i64, u32),
    next_ns: u64,
    next_pages_ns: u64,
}

impl Supervisor {
    /// Begins a ledger. `None`: no file can be made, and each process has the limit for itself.
    pub(super) fn new(limit_bytes: u64) -> Option<Supervisor> {
        let ledger = ledger_file::create(std::process::id(), limit_bytes)?;
        let pid = std::process::id();
        let namespace = process::pid_namespace();
        let start_ticks = stats_file::start_ticks(pid).unwrap_or(0);
        let own = ledger.enter(Owner { pid, namespace, start_ticks })?;
        ledger.seat(own).give_down_to(0);
        Some(Supervisor {
            ledger,
            namespace,
            own,
            quota: Quota::default(),
            unseen: BTreeMap::new(),
            missing: (0, 0),
            next_ns: 0,
            next_pages_ns: 0,
        })
    }

    /// The time until the next look.
    pub(super) fn rest(&self) -> Duration {
        Duration::from_nanos(self.next_ns.saturating_sub(clock::monotonic_ns()))
    }

    /// The highest sum of what all processes charged.
    pub(super) fn sum_bytes_max(&self) -> u64 {
        self.ledger.sum_bytes().1
    }

    /// Looks, if a look is due.
    pub(super) fn look_if_due(&mut self, tree: &Tree) {
        let now = clock::monotonic_ns();
        if now < self.next_ns {
            return;
        }
        let began = clock::thread_ns();
        let pages_ns = self.look(now, tree);
        // A look at pages takes longer, and has a pause of its own.
        let took = (clock::thread_ns() - began).saturating_sub(pages_ns);
        self.next_ns = clock::monotonic_ns() + LOOK_NS.max(took * REST);
    }

    /// Looks at everything; returns the CPU time that the look at pages took.
    fn look(&mut self, now_ns: u64, tree: &Tree) -> u64 {
        let seen: Vec<Seen<'_>> = tree.alive().collect();
        self.free_the_dead(&seen);
        let unwatched = self.charge_others(&seen);
        self.find_lost();
        let mut pages_ns = 0;
        if now_ns >= self.next_pages_ns {
            let began = clock::thread_ns();
            self.look_at_pages(&seen);
            pages_ns = clock::thread_ns() - began;
            self.next_pages_ns = now_ns + PAGES_LOOK_NS.max(pages_ns * REST);
        }
        let views: Vec<View> = self.seats().map(|(index, seat)| view(index, seat)).collect();
        let count = u64::try_from(views.len()).unwrap_or(u64::MAX).max(1);
        let total = self.ledger.total_bytes();
        let reserve = if count > 1 { total / RESERVE_SHARE } else { 0 };
        self.ledger.set_reserve(reserve, total / count);
        let watched: u64 = views.iter().filter(|v| v.watches).map(|view| view.charge).sum();
        self.ledger.note_sum(watched + unwatched);
        let (free, room) = (self.ledger.free_bytes(), total / ROOM_SHARE);
        let ledger = self.ledger;
        self.quota.step(State { now_ns, free, reserve, room }, &views, |index, target| {
            ledger.seat(index).set_target(target);
        });
        pages_ns
    }

    /// The slots of the program's processes.
    fn seats(&self) -> impl Iterator<Item = (usize, Seat<'static>)> + use<> {
        let own = self.own;
        self.ledger.seats().filter(move |(index, _)| *index != own)
    }

    /// Frees the slots of processes that are gone.
    fn free_the_dead(&mut self, seen: &[Seen<'_>]) {
        for (index, seat) in self.seats() {
            let owner = seat.owner();
            let is_seen = seen.iter().any(|one| one.is(owner));
            let is_here = self.namespace != 0 && owner.namespace == self.namespace;
            let is_alive = if is_here {
                proc::is_alive(owner.pid, owner.start_ticks)
            } else {
                let unseen = self.unseen.entry(index).or_insert(0);
                *unseen = if is_seen { 0 } else { *unseen + 1 };
                *unseen < UNSEEN_LOOKS
            };
            // Its number may be another process's by now.
            if !is_alive && seat.owner() == owner {
                self.ledger.release(index);
                self.quota.forget(index);
                self.unseen.remove(&index);
            }
        }
    }

    /// Charges the processes without a share to this process's slot, and what those without a
    /// watching thread have beyond their share. Returns what all these processes have.
    fn charge_others(&self, seen: &[Seen<'_>]) -> u64 {
        let (mut all, mut beyond) = (0, 0);
        for one in seen {
            let held = one.memory.counted_bytes();
            match self.seats().find(|(_, seat)| one.is(seat.owner())) {
                Some((_, seat)) if seat.watches() => {}
                Some((_, seat)) => {
                    let held = held.saturating_sub(seat.shared_bytes());
                    all += held;
                    beyond += held.saturating_sub(seat.share_bytes());
                }
                // A process that was just started may be about to take a slot; one that was just
                // forked has its parent's pages.
                None if !one.settled => {}
                // Its slot was just freed: the look that has seen it is older than its end.
                None if !proc::is_alive(one.pid, one.start_ticks) => {}
                None => {
                    all += held;
                    beyond += held;
                }
            }
        }
        let own = self.ledger.seat(self.own);
        match beyond.checked_sub(own.share_bytes()) {
            Some(0) => {}
            Some(more) => own.force(more),
            None => {
                own.give_down_to(beyond);
            }
        }
        all
    }

    /// Gives back what a process that was killed has lost.
    fn find_lost(&mut self) {
        let missing = self.ledger.missing_bytes();
        let looks = if missing == self.missing.0 { self.missing.1 + 1 } else { 0 };
        self.missing = (missing, looks);
        if let (Ok(lost @ 1..), LOST_LOOKS..) = (u64::try_from(missing), looks) {
            self.ledger.refund(lost);
            self.missing = (0, 0);
        }
    }

    /// Sets what each forked process has of another's.
    fn look_at_pages(&self, seen: &[Seen<'_>]) {
        for (_, seat) in self.seats().filter(|(_, seat)| seat.is_forked()) {
            let Some(one) = seen.iter().find(|one| one.is(seat.owner())) else { continue };
            let Some(pages) = proc::pages(one.pid) else { continue };
            let parent = proc::parent(one.pid);
            let has_parent = seen.iter().any(|other| Some(other.pid) == parent);
            let own = if has_parent { pages.private_bytes } else { pages.proportional_bytes };
            seat.set_shared(pages.resident_bytes.saturating_sub(own));
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        ledger_file::remove(std::process::id());
    }
}

fn view(index: usize, seat: Seat<'_>) -> View {
    View {
        index,
        share: seat.share_bytes(),
        target: seat.target_bytes(),
        charge: seat.charge_bytes(),
        watches: seat.watches(),
        waited_ns: seat.waited_ns(),
        forced: seat.forced(),
    }
}

#[cfg(test)]
mod tests {
    use super::Supervisor;
    use crate::run::tree::Tree;
    use std::process::Command;
    use zfolio_core::ledger::Owner;

    const MIB: u64 = 1 << 20;

    /// Goal: the share of a process that was killed is free at the next look; that of a living one
    /// is not.
    #[test]
    fn a_killed_process_leaves_its_share() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let start_ticks = crate::stats_file::start_ticks(child.id()).unwrap();
        let owner = Owner { pid: child.id(), namespace: supervisor.namespace, start_ticks };
        let seat = supervisor.ledger.seat(supervisor.ledger.enter(owner).unwrap());
        assert_eq!(seat.take(100 * MIB, 100 * MIB), 100 * MIB);
        let tree = Tree::new(child.id(), "no-such-library.so".to_owned(), None);
        supervisor.look(1, &tree);
        assert_eq!(seat.share_bytes(), 104 * MIB);
        child.kill().unwrap();
        child.wait().unwrap();
        supervisor.look(2, &tree);
        assert_eq!(supervisor.ledger.free_bytes(), 256 << 20);
        assert_eq!(supervisor.seats().count(), 0);
    }

    /// Goal: what a process without a share has is not free; and what was lost is put back.
    #[test]
    fn a_stranger_is_charged() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB) else { return };
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let mut tree = Tree::new(child.id(), "no-such-library.so".to_owned(), None);
        while tree.alive().all(|one| !one.settled) {
            tree.look();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        supervisor.look(1, &tree);
        let charged = (256 << 20) - supervisor.ledger.free_bytes();
        assert!(charged > 0 && charged < 64 << 20, "{charged}");
        assert!(supervisor.sum_bytes_max() > 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
