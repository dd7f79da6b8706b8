//! The supervisor of a tree's limit: looks at the ledger, and at the processes, 20 times a second.
//!
//! - A process that is gone leaves its share.
//! - Processes without a share are charged to a slot of this process.
//! - Children of `fork` pay for what is theirs alone ([`Families`]). While they copy pages, the
//!   supervisor looks at them 100 times a second.
//! - The others get their targets from [`Quota`].
//!
//! # Cost
//!
//! One file of `/proc` for each process and look, about 20 us; fewer looks if they would take more
//! than a 50th of a CPU.

use std::collections::BTreeMap;
use std::time::Duration;

use zfolio_core::budget::WriteBudget;
use zfolio_core::ledger::{Ledger, Owner, SMALL_MARGIN_BYTES, Seat, signed};
use zfolio_sys::{clock, process};

use super::family::{Families, Forked};
use super::proc;
use super::quota::{Quota, State, View};
use super::tree::{Seen, Tree};
use crate::ledger_file;
use crate::stats_file;

/// Between two looks.
const LOOK_NS: u64 = 50_000_000;

/// Between two exact looks at the pages of forked processes.
const PAGES_LOOK_NS: u64 = 100_000_000;

/// For a second after each fork and each copied page: between two looks at their page faults, and
/// between two looks at all processes.
const LIVELY_NS: u64 = 1_000_000_000;
const FAULTS_LOOK_NS: u64 = 10_000_000;
const LIVELY_LOOK_NS: u64 = 20_000_000;

/// The pause after a look is at least this many times as long as the look; while forked processes
/// copy pages, a tenth of a CPU's time is worth it.
const REST: u64 = 50;
const REST_COPYING: u64 = 10;

/// A 64th of the total is kept free for new processes, if there is more than one.
const RESERVE_SHARE: u64 = 64;

/// While forked processes copy pages, as much as they have copied lately is kept free in addition,
/// at most an eighth of the total.
const COPYING_SHARE_MAX: u64 = 8;

/// A 16th of the total is made free at once for a process that waits.
const ROOM_SHARE: u64 = 16;

/// Less than an eighth of the total is free: processes without a watching thread give back what they
/// do not use.
const SCARCE_SHARE: u64 = 8;

/// Bytes that are missing, or there twice, for so long are so for good (`LEDGER-2`).
const LOST_NS: u64 = 1_000_000_000;

/// A process of another PID namespace that was not seen for so long is gone.
const UNSEEN_NS: u64 = 3_000_000_000;

/// What is known of a forked process.
#[derive(Clone, Copy, Debug)]
struct Copying {
    pid: u32,
    /// When it was first seen.
    since_ns: u64,
    /// What it has copied lately.
    lately_bytes: u64,
}

/// See the module. Its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Supervisor {
    ledger: &'static Ledger,
    /// The highest limit that was asked for; 0: none was.
    asked_bytes_max: u64,
    namespace: u32,
    /// The slot for processes without a share.
    own: usize,
    quota: Quota,
    /// When each process of another namespace was last seen.
    last_seen: BTreeMap<usize, (Owner, u64)>,
    /// What is missing in the ledger, and since when it is just that.
    missing: (i64, u64),
    families: Families,
    /// The forked processes at the last look, by the number of the slot.
    copying: BTreeMap<usize, Copying>,
    /// The last exact look at their pages, and the CPU time that it took.
    pages_ns: u64,
    pages_took_ns: u64,
    /// Until when they are looked at more often.
    lively_until_ns: u64,
    next_ns: u64,
    next_families_ns: u64,
}

impl Supervisor {
    /// Begins a ledger. `None`: no file can be made, and each process has the limit for itself.
    pub(super) fn new(limit_bytes: u64, write_budget: WriteBudget) -> Option<Supervisor> {
        let ledger = ledger_file::create(std::process::id(), limit_bytes)?;
        ledger.writes().set(write_budget);
        let pid = std::process::id();
        let namespace = process::pid_namespace();
        ledger.set_surroundings(namespace, process::filters());
        let start_ticks = stats_file::start_ticks(pid).unwrap_or(0);
        let own = ledger.enter(Owner { pid, namespace, start_ticks })?;
        ledger.seat(own).give_down_to(0);
        Some(Supervisor {
            ledger,
            asked_bytes_max: 0,
            namespace,
            own,
            quota: Quota::default(),
            last_seen: BTreeMap::new(),
            missing: (0, 0),
            families: Families::default(),
            copying: BTreeMap::new(),
            pages_ns: 0,
            pages_took_ns: 0,
            lively_until_ns: 0,
            next_ns: 0,
            next_families_ns: 0,
        })
    }

    /// The time until the next look.
    pub(super) fn rest(&self) -> Duration {
        let next_ns = self.next_ns.min(self.next_families_ns);
        Duration::from_nanos(next_ns.saturating_sub(clock::monotonic_ns()))
    }

    /// The ledger of the run.
    pub(super) fn ledger(&self) -> &'static Ledger {
        self.ledger
    }

    /// The highest limit that was asked for while the run went on; 0: none was.
    pub(super) fn asked_bytes_max(&self) -> u64 {
        self.asked_bytes_max.max(self.ledger.limit_asked())
    }

    /// The limit that the processes share.
    pub(super) fn limit_bytes(&self) -> u64 {
        self.ledger.total_bytes()
    }

    /// The highest sum of what all processes charged.
    pub(super) fn sum_bytes_max(&self) -> u64 {
        self.ledger.sum_bytes().1
    }

    /// Makes the looks that are due.
    pub(super) fn look_if_due(&mut self, tree: &Tree) {
        let now = clock::monotonic_ns();
        if now >= self.next_families_ns {
            let began = clock::thread_ns();
            let was_exact = self.look_at_families(now, tree);
            // An exact look takes longer, and has a pause of its own.
            let took = if was_exact { 0 } else { clock::thread_ns() - began };
            let pause = if self.is_lively(now) { FAULTS_LOOK_NS } else { LOOK_NS };
            self.next_families_ns = clock::monotonic_ns() + pause.max(took * REST_COPYING);
        }
        if now >= self.next_ns {
            let began = clock::thread_ns();
            self.look(now, tree);
            let took = clock::thread_ns() - began;
            let (pause, rest) =
                if self.is_lively(now) { (LIVELY_LOOK_NS, REST_COPYING) } else { (LOOK_NS, REST) };
            self.next_ns = clock::monotonic_ns() + pause.max(took * rest);
        }
    }

    fn look(&mut self, now_ns: u64, tree: &Tree) {
        self.asked_bytes_max = self.asked_bytes_max();
        self.ledger.follow_asked();
        let seen: Vec<Seen<'_>> = tree.alive().collect();
        self.free_the_dead(now_ns, &seen, tree);
        let unwatched = self.charge_others(&seen);
        self.find_lost(now_ns);
        let views = self.seats().map(|(index, seat)| view(index, seat, self.ahead(now_ns, index)));
        let views: Vec<View> = views.collect();
        let count = u64::try_from(views.len()).unwrap_or(u64::MAX).max(1);
        let total = self.ledger.total_bytes();
        let reserve = self.reserve_bytes(count);
        self.ledger.set_reserve(reserve, total / count);
        let watched = self.seats().filter(|(_, seat)| seat.watches());
        let watched: u64 = watched.map(|(_, seat)| seat.charge_bytes()).sum();
        self.ledger.note_sum(watched + unwatched);
        let (free, room) = (self.ledger.free_bytes(), total / ROOM_SHARE);
        let ledger = self.ledger;
        self.quota.step(State { now_ns, free, reserve, room }, &views, |index, target| {
            let seat = ledger.seat(index);
            // A process that has executed another program since it was looked at gives nothing.
            if target.is_none() || seat.watches() {
                seat.set_target(target);
            }
        });
    }

    /// Whether forked processes are looked at more often now.
    fn is_lively(&self, now_ns: u64) -> bool {
        now_ns < self.lively_until_ns
    }

    /// What a process keeps for pages that it may copy before anybody looks: all that it may, just forked; later as
    /// much as it has copied lately.
    fn ahead(&self, now_ns: u64, index: usize) -> u64 {
        match self.copying.get(&index) {
            Some(one) if now_ns < one.since_ns + LIVELY_NS => u64::MAX,
            Some(one) => one.lately_bytes,
            None => 0,
        }
    }

    /// Whether a process id of this owner means the same process here.
    fn is_here(&self, owner: Owner) -> bool {
        self.namespace != 0 && owner.namespace == self.namespace
    }

    /// The slots of the program's processes.
    fn seats(&self) -> impl Iterator<Item = (usize, Seat<'static>)> + use<> {
        let own = self.own;
        self.ledger.seats().filter(move |(index, _)| *index != own)
    }

    /// Frees the slots of processes that are gone, and of those that have executed a program without the library.
    fn free_the_dead(&mut self, now_ns: u64, seen: &[Seen<'_>], tree: &Tree) {
        for (index, seat) in self.seats() {
            let owner = seat.owner();
            let its = seen.iter().find(|one| one.is(owner));
            let is_alive = if self.is_here(owner) {
                proc::is_alive(owner.pid, owner.start_ticks)
            } else {
                let last = self.last_seen.entry(index).or_insert((owner, now_ns));
                if its.is_some() || last.0 != owner {
                    *last = (owner, now_ns);
                }
                // Of thousands of processes a look takes long, and so does the pause after it.
                now_ns - last.1 < UNSEEN_NS.max(2 * tree.pause_ns)
            };
            // Nobody watches any more, whatever the program before has left there.
            let is_left = seat.watches() && its.is_some_and(|one| tree.is_without_library(one.pid));
            // Its number may be another process's by now.
            if (!is_alive || is_left) && seat.owner() == owner {
                self.ledger.release(index);
                self.quota.forget(index);
                self.last_seen.remove(&index);
            }
        }
    }

    /// Charges the processes without a share to this process's slot, and what those without a
    /// watching thread have beyond their share. Where little is free, the latter keep no more than
    /// they use: they do not come down to a target. Returns what all these processes have.
    fn charge_others(&self, seen: &[Seen<'_>]) -> u64 {
        let (mut all, mut beyond) = (0, 0);
        let is_scarce = self.ledger.free_bytes() < signed(self.ledger.total_bytes() / SCARCE_SHARE);
        for one in seen {
            let held = one.memory.counted_bytes();
            match self.seats().find(|(_, seat)| one.is(seat.owner())) {
                Some((_, seat)) if seat.watches() => {}
                Some((_, seat)) => {
                    let held = held.saturating_sub(seat.shared_bytes());
                    all += held;
                    if is_scarce {
                        seat.give_down_to(held + SMALL_MARGIN_BYTES);
                    }
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

    /// Gives back what a process that was killed has lost. Takes it away again if the process was only stopped, and has
    /// gone on since.
    fn find_lost(&mut self, now_ns: u64) {
        let missing = self.ledger.missing_bytes();
        if missing != self.missing.0 {
            self.missing = (missing, now_ns);
        }
        if missing != 0 && now_ns - self.missing.1 >= LOST_NS {
            self.ledger.settle(missing);
            self.missing = (0, now_ns);
        }
    }

    /// Sets what each forked process has of another's. True: the look was an exact one.
    fn look_at_families(&mut self, now_ns: u64, tree: &Tree) -> bool {
        // A look may have met the process in its `execve`, after which it shares nothing.
        let is_stale = |seat: &Seat<'_>| !seat.is_forked() && seat.shared_bytes() > 0;
        self.seats().filter(|(_, seat)| is_stale(seat)).for_each(|(_, seat)| seat.set_shared(0));
        let seen: Vec<Seen<'_>> = tree.alive().collect();
        let forked = self.forked(&seen);
        self.note_forked(now_ns, &forked);
        if forked.is_empty() {
            return false;
        }
        let here = self.seats().filter(|(_, seat)| self.is_here(seat.owner()));
        let served: Vec<_> = here.map(|(_, seat)| (seat.owner().pid, seat.served())).collect();
        self.families.note_served(served.into_iter());
        let rest = if self.families.has_copied() { REST_COPYING } else { REST };
        if now_ns >= self.pages_ns + PAGES_LOOK_NS.max(self.pages_took_ns * rest) {
            let began = clock::thread_ns();
            let is_alive =
                |pid| seen.iter().any(|one| one.pid == pid && proc::is_alive(pid, one.start_ticks));
            for one in self.families.look(&forked, is_alive) {
                self.ledger.seat(one.index).set_shared(one.bytes);
            }
            (self.pages_ns, self.pages_took_ns) = (now_ns, clock::thread_ns() - began);
            return true;
        }
        for one in self.families.follow(&forked).into_iter().filter(|one| one.bytes > 0) {
            self.lively_until_ns = now_ns + LIVELY_NS;
            self.ledger.seat(one.index).note_copied(one.bytes);
            if let Some(copying) = self.copying.get_mut(&one.index) {
                copying.lately_bytes += one.bytes;
            }
        }
        false
    }

    fn note_forked(&mut self, now_ns: u64, forked: &[Forked]) {
        let before = std::mem::take(&mut self.copying);
        for Forked { index, pid } in forked {
            let known = before.get(index).filter(|one| one.pid == *pid).copied();
            if known.is_none() {
                self.lively_until_ns = now_ns + LIVELY_NS;
            }
            let new = Copying { pid: *pid, since_ns: now_ns, lately_bytes: 0 };
            self.copying.insert(*index, known.unwrap_or(new));
        }
    }

    /// What is kept free for new processes, and for pages that are copied before anybody looks.
    fn reserve_bytes(&mut self, processes: u64) -> u64 {
        let total = self.ledger.total_bytes();
        let most = total / COPYING_SHARE_MAX;
        let mut copied = 0;
        for one in self.copying.values_mut() {
            let lately = one.lately_bytes.min(most);
            copied += lately;
            // Half of it is forgotten after five looks.
            one.lately_bytes = lately / 8 * 7;
        }
        let copied = copied.min(most);
        if processes > 1 { total / RESERVE_SHARE + copied } else { 0 }
    }

    /// The processes that were forked, and have executed no program since.
    fn forked(&self, seen: &[Seen<'_>]) -> Vec<Forked> {
        let forked = self.seats().filter(|(_, seat)| seat.is_forked());
        let found = forked.filter_map(|(index, seat)| {
            let owner = seat.owner();
            let seen = || Some(seen.iter().find(|one| one.is(owner))?.pid);
            let pid = if self.is_here(owner) { Some(owner.pid) } else { seen() };
            Some(Forked { index, pid: pid? })
        });
        found.collect()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        ledger_file::remove(std::process::id());
    }
}

/// What the quota sees of a process. What it keeps for copies, `ahead` at most, is in use.
fn view(index: usize, seat: Seat<'_>, ahead: u64) -> View {
    let ahead = seat.copies_ahead_bytes().min(ahead);
    View {
        index,
        share: seat.share_bytes(),
        target: seat.target_bytes(),
        charge: seat.charge_bytes() + ahead,
        watches: seat.watches(),
        reclaims: seat.reclaims(),
        waited_ns: seat.waited_ns(),
        forced: seat.forced(),
    }
}

#[cfg(test)]
mod tests {
    use super::{LOST_NS, Supervisor, UNSEEN_NS};
    use crate::run::tree::Tree;
    use std::process::{Child, Command};
    use zfolio_core::budget::WriteBudget;
    use zfolio_core::ledger::{Owner, Seat};

    const MIB: u64 = 1 << 20;

    /// A process that sleeps, and its slot with 100 MiB beside its first share.
    fn with_a_share(supervisor: &Supervisor) -> (Child, Seat<'static>) {
        let child = Command::new("sleep").arg("30").spawn().unwrap();
        let start_ticks = crate::stats_file::start_ticks(child.id()).unwrap();
        let owner = Owner { pid: child.id(), namespace: supervisor.namespace, start_ticks };
        let seat = supervisor.ledger.seat(supervisor.ledger.enter(owner).unwrap());
        assert_eq!(seat.take(100 * MIB, 100 * MIB), 100 * MIB);
        (child, seat)
    }

    /// Goal: the share of a process that was killed is free at the next look; that of a living one
    /// is not.
    #[test]
    fn a_killed_process_leaves_its_share() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        let (mut child, seat) = with_a_share(&supervisor);
        let tree = Tree::new(child.id(), "no-such-library.so".to_owned(), None);
        supervisor.look(1, &tree);
        assert_eq!(seat.share_bytes(), 104 * MIB);
        child.kill().unwrap();
        child.wait().unwrap();
        supervisor.look(2, &tree);
        assert_eq!(supervisor.ledger.free_bytes(), 256 << 20);
        assert_eq!(supervisor.seats().count(), 0);
    }

    /// A regression: a process that executed a program without the library kept its share, and what that program took
    /// was charged to nobody. Method: `sleep`, whose slot says that it watches.
    #[test]
    fn a_process_with_another_program_leaves_its_share() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else { return };
        let (mut child, seat) = with_a_share(&supervisor);
        seat.set_reclaims();
        let mut tree = Tree::new(child.id(), "no-such-library.so".to_owned(), None);
        while !tree.is_without_library(child.id()) {
            tree.look();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        supervisor.look(1, &tree);
        assert_eq!(supervisor.seats().count(), 0);
        let charged = 256 * MIB - u64::try_from(supervisor.ledger.free_bytes()).unwrap();
        assert!(charged > 0 && charged < 64 * MIB, "{charged}");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Goal: a slot that another process has taken meanwhile is not freed for the one that had it. Method: owners of
    /// another PID namespace, whom no look sees.
    #[test]
    fn a_slot_is_not_freed_for_its_last_owner() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else { return };
        let mut tree = Tree::new(std::process::id(), "no-such-library.so".to_owned(), None);
        let owner = |pid| Owner { pid, namespace: supervisor.namespace ^ 1, start_ticks: 1 };
        let (first, second) = (owner(5_000_001), owner(5_000_002));
        let index = supervisor.ledger.enter(first).unwrap();
        supervisor.look(1, &tree);
        supervisor.ledger.release(index);
        assert_eq!(supervisor.ledger.enter(second), Some(index));
        supervisor.look(1 + UNSEEN_NS, &tree);
        assert_eq!(supervisor.seats().count(), 1);
        tree.pause_ns = UNSEEN_NS;
        supervisor.look(1 + 2 * UNSEEN_NS, &tree);
        assert_eq!(supervisor.seats().count(), 1, "there were no two looks since");
        tree.pause_ns = 0;
        supervisor.look(1 + 2 * UNSEEN_NS, &tree);
        assert_eq!(supervisor.seats().count(), 0);
    }

    /// Goal: small processes do not keep first shares that others need. Method: a process with 100 MiB
    /// that uses little, in a ledger with and without free memory.
    #[test]
    fn an_unwatched_process_keeps_what_it_uses_when_memory_is_scarce() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else { return };
        let (mut child, seat) = with_a_share(&supervisor);
        let mut tree = Tree::new(child.id(), "no-such-library.so".to_owned(), None);
        tree.look();
        supervisor.look(1, &tree);
        assert_eq!(seat.share_bytes(), 104 * MIB);
        supervisor.ledger.seat(supervisor.own).force(140 * MIB);
        supervisor.look(2, &tree);
        assert!(seat.share_bytes() < 8 * MIB, "{}", seat.share_bytes());
        assert_eq!(supervisor.ledger.missing_bytes(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Goal: what is missing for a second is put back, and what is there twice for a second is taken away, also if less
    /// than that is free. Method: the amount that a process changes between its two steps, and no process.
    #[test]
    fn what_is_lost_or_there_twice_is_settled_after_a_second() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else { return };
        let own = supervisor.ledger.seat(supervisor.own);
        let mut now_ns = 1;
        for (taken, twice) in [(0, -4 << 20), (0, 4 << 20), (257 * MIB, 4 << 20)] {
            own.give_down_to(0);
            own.force(taken);
            let free = supervisor.ledger.free_bytes();
            supervisor.ledger.settle(twice);
            for later in [0, LOST_NS - 1] {
                supervisor.find_lost(now_ns + later);
                assert_eq!(supervisor.ledger.missing_bytes(), -twice, "too early");
            }
            now_ns += LOST_NS;
            supervisor.find_lost(now_ns);
            assert_eq!(supervisor.ledger.free_bytes(), free, "{twice}");
            assert_eq!(supervisor.ledger.missing_bytes(), 0, "{twice}");
        }
    }

    /// Goal: what a process without a share has is not free.
    #[test]
    fn a_stranger_is_charged() {
        let Some(mut supervisor) = Supervisor::new(256 * MIB, WriteBudget::NONE) else { return };
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
