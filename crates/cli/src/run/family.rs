//! What forked processes of a tree have for themselves.
//!
//! A **family** are forked processes and their **root**: the first process up the line of parents
//! that was not forked, or has executed a program since. The root pays for all that it has; the
//! others for what they have beside that.
//!
//! Two looks:
//!
//! - [`Families::look`] reads `smaps_rollup`: exact, and takes 40 us for each MiB.
//! - [`Families::follow`] reads the number of page faults in between, for 30 us a process. Each page
//!   that a process copies is a fault, so what is copied is at most the faults less what the process
//!   has grown. A fault that its engine has served is none of these (`Seat::served`), although the kernel
//!   counts it. A process that gives memory back and touches it again has such faults too, and so does one
//!   that touches shared memory for the first time: each exact look shows which part of what was
//!   taken for copied was copied, and so much is taken for copied from then on ([`Trust`]).
//!
//! ```text
//! all pages of a family  = sum of Pss
//! paid for               = what the root has + what is private to each of the others
//! the rest               = shared by some of the others, and not by the root: each pays a part of it
//! ```

use std::collections::BTreeMap;

use super::proc::{self, Faults, Pages};
use zfolio_sys::map::PAGE_BYTES;

/// A forked process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Forked {
    /// The number of its slot.
    pub(super) index: usize,
    /// Its process id here.
    pub(super) pid: u32,
}

/// What a look has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Found {
    /// The number of the slot.
    pub(super) index: usize,
    pub(super) bytes: u64,
}

/// The faults that a process has served itself.
#[derive(Clone, Copy, Default, Debug)]
struct Served {
    all: u64,
    /// How many of these were not found among the faults that the kernel has counted yet.
    left: u64,
}

impl Served {
    /// How many of so many faults, which the kernel has counted, the process has not served itself.
    fn take_out_of(&mut self, faults: u64) -> u64 {
        let served = faults.min(self.left);
        self.left -= served;
        faults - served
    }
}

/// What was taken for copied is judged by an exact look if it was at least this much.
const JUDGED_BYTES_MIN: u64 = 1 << 20;

/// How far the page faults of a process tell of copies.
#[derive(Clone, Copy, Debug)]
struct Trust {
    /// How many 16ths of what looks like copies are copies: 1 to 16.
    sixteenths: u64,
    /// What looked like copies since the last exact look.
    claimed_bytes: u64,
    /// What the process shared then.
    shared_bytes: Option<u64>,
}

impl Default for Trust {
    fn default() -> Trust {
        Trust { sixteenths: 16, claimed_bytes: 0, shared_bytes: None }
    }
}

impl Trust {
    /// How much of what looks like copies is taken for copied.
    fn believe(&mut self, claimed_bytes: u64) -> u64 {
        self.claimed_bytes += claimed_bytes;
        claimed_bytes * self.sixteenths / 16
    }

    /// An exact look has found what the process shares: what it shared before and does not now was copied. Trust is
    /// lost by halves and won back at once, since what is copied and not noticed is over the limit.
    fn judge(&mut self, shared_bytes: u64) {
        let found = match self.shared_bytes.replace(shared_bytes) {
            Some(before) if self.claimed_bytes >= JUDGED_BYTES_MIN => {
                let copied = before.saturating_sub(shared_bytes);
                (copied * 16 / self.claimed_bytes).clamp(1, 16)
            }
            _ => 16,
        };
        self.sixteenths = found.max(u64::midpoint(self.sixteenths, found));
        self.claimed_bytes = 0;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Families {
    /// Page faults at the last look.
    faults: BTreeMap<u32, Faults>,
    /// The root of each forked process.
    roots: BTreeMap<u32, u32>,
    /// What the engine of each process has served.
    served: BTreeMap<u32, Served>,
    /// How far the faults of each forked process tell of copies.
    trust: BTreeMap<u32, Trust>,
    /// What was copied since the last exact look.
    copied_bytes: u64,
}

impl Families {
    /// Whether pages were copied since the last exact look.
    pub(super) fn has_copied(&self) -> bool {
        self.copied_bytes > 0
    }

    /// Notes how many faults each process has served in all, by its id.
    pub(super) fn note_served(&mut self, all: impl Iterator<Item = (u32, u64)>) {
        let before = std::mem::take(&mut self.served);
        let noted = all.map(|(pid, all)| {
            // What was served before the first look at a process is no part of any difference.
            let known = before.get(&pid).copied().unwrap_or(Served { all, left: 0 });
            (pid, Served { all, left: known.left + all.saturating_sub(known.all) })
        });
        self.served = noted.collect();
    }

    /// Looks at all pages: what each of `forked` shares with others who pay for it. `is_alive` says
    /// whether a process belongs to the run.
    pub(super) fn look(&mut self, forked: &[Forked], is_alive: impl Fn(u32) -> bool) -> Vec<Found> {
        self.find_roots(forked);
        self.copied_bytes = 0;
        let mut families = BTreeMap::<u32, Vec<(Forked, Pages)>>::new();
        for one in forked {
            self.note_faults(one.pid);
            if let Some(pages) = proc::pages(one.pid) {
                families.entry(self.root(one.pid)).or_default().push((*one, pages));
            }
        }
        let mut found = Vec::new();
        for (root, family) in families {
            self.note_faults(root);
            let members: Vec<Pages> = family.iter().map(|(_, pages)| *pages).collect();
            let root = if !is_alive(root) {
                Root::Gone
            } else if members.len() == 1 {
                Root::Alone
            } else {
                proc::pages(root).map_or(Root::Alone, Root::Has)
            };
            let shared = shared_bytes(root, &members);
            for ((one, _), bytes) in family.iter().zip(shared) {
                self.trust.entry(one.pid).or_default().judge(bytes);
                found.push(Found { index: one.index, bytes });
            }
        }
        found
    }

    /// What each of `forked` may have copied since the last look of either kind. What a root has
    /// copied is divided among its family: the pages are the others' alone now.
    pub(super) fn follow(&mut self, forked: &[Forked]) -> Vec<Found> {
        if forked.iter().any(|one| !self.roots.contains_key(&one.pid)) {
            self.find_roots(forked);
        }
        let mut sizes = BTreeMap::<u32, u64>::new();
        forked.iter().for_each(|one| *sizes.entry(self.root(one.pid)).or_default() += 1);
        let of_roots: BTreeMap<u32, u64> =
            sizes.iter().map(|(root, size)| (*root, self.copied(*root) / size)).collect();
        let found = forked.iter().map(|one| {
            let of_root = of_roots.get(&self.root(one.pid)).copied().unwrap_or(0);
            let claimed = self.copied(one.pid) + of_root;
            let bytes = self.trust.entry(one.pid).or_default().believe(claimed);
            Found { index: one.index, bytes }
        });
        let found: Vec<Found> = found.collect();
        self.copied_bytes += found.iter().map(|one| one.bytes).sum::<u64>();
        found
    }

    fn root(&self, pid: u32) -> u32 {
        self.roots.get(&pid).copied().unwrap_or(0)
    }

    fn find_roots(&mut self, forked: &[Forked]) {
        let parents = forked.iter().map(|one| (one.pid, proc::parent(one.pid).unwrap_or(0)));
        self.roots = roots(&parents.collect());
        let roots = &self.roots;
        self.faults.retain(|pid, _| roots.iter().any(|(one, root)| one == pid || root == pid));
        self.trust.retain(|pid, _| roots.contains_key(pid));
    }

    /// What a process may have copied since the last call.
    fn copied(&mut self, pid: u32) -> u64 {
        let before = self.faults.get(&pid).copied();
        let (Some(before), Some(now)) = (before, self.note_faults(pid)) else { return 0 };
        let mut none = Served::default();
        copied_bytes(before, now, self.served.get_mut(&pid).unwrap_or(&mut none))
    }

    fn note_faults(&mut self, pid: u32) -> Option<Faults> {
        let now = proc::faults(pid)?;
        self.faults.insert(pid, now);
        Some(now)
    }
}

/// Each page that is copied is a fault. So is each page by which the process grows, or that it has served itself.
fn copied_bytes(before: Faults, now: Faults, served: &mut Served) -> u64 {
    let faults = served.take_out_of(now.minor.saturating_sub(before.minor)) * PAGE_BYTES as u64;
    faults.saturating_sub(now.resident_bytes.saturating_sub(before.resident_bytes))
}

/// The root of each process, by the parent of each.
fn roots(parents: &BTreeMap<u32, u32>) -> BTreeMap<u32, u32> {
    let root = |pid: &u32| {
        let mut at = *pid;
        // No longer than the family: the kernel's answers may belong to different moments.
        for _ in parents {
            match parents.get(&at) {
                Some(parent) => at = *parent,
                None => break,
            }
        }
        at
    };
    parents.keys().map(|pid| (*pid, root(pid))).collect()
}

/// The root of a family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Root {
    /// It has ended: nobody pays for what the others share.
    Gone,
    /// It pays for what is shared.
    Alone,
    /// It pays for what is shared, and has these pages.
    Has(Pages),
}

/// How much of what it has each of `members` does not pay for.
fn shared_bytes(root: Root, members: &[Pages]) -> Vec<u64> {
    let proportional: u64 = members.iter().map(|pages| pages.proportional_bytes).sum();
    let private: u64 = members.iter().map(|pages| pages.private_bytes).sum();
    let unpaid = match root {
        Root::Has(pages) => {
            (proportional + pages.proportional_bytes).saturating_sub(private + pages.resident_bytes)
        }
        Root::Gone | Root::Alone => 0,
    };
    let count = u64::try_from(members.len()).unwrap_or(u64::MAX).max(1);
    let own = |pages: &Pages| match root {
        Root::Gone => pages.proportional_bytes,
        _ => pages.private_bytes + unpaid / count,
    };
    members.iter().map(|pages| pages.resident_bytes.saturating_sub(own(pages))).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        Families, Faults, Forked, Pages, Root, Served, Trust, copied_bytes, roots, shared_bytes,
    };
    use std::collections::BTreeMap;

    fn pages(resident_bytes: u64, private_bytes: u64, proportional_bytes: u64) -> Pages {
        Pages { resident_bytes, private_bytes, proportional_bytes }
    }

    /// Goal: the family pays for each page once. Method: pages by who has them, and what the kernel
    /// would say.
    #[test]
    fn each_page_of_a_family_is_paid_for_once() {
        // Which of the root (bit 0) and two children (bits 1 and 2) have a page; and how many pages.
        let kinds =
            [(0b111, 60_u64), (0b110, 30), (0b011, 12), (0b010, 6), (0b100, 18), (0b001, 24)];
        let of = |bit: u32| {
            let has = kinds.iter().filter(|(who, _)| who >> bit & 1 == 1);
            has.fold(Pages::default(), |sum, (who, count)| Pages {
                resident_bytes: sum.resident_bytes + count,
                private_bytes: sum.private_bytes + if *who == 1 << bit { *count } else { 0 },
                proportional_bytes: sum.proportional_bytes
                    + count / u64::from(u32::count_ones(*who)),
            })
        };
        let (root, children) = (of(0), [of(1), of(2)]);
        let all: u64 = kinds.iter().map(|(_, count)| count).sum();
        let paid = |shared: Vec<u64>| -> u64 {
            children.iter().zip(shared).map(|(pages, shared)| pages.resident_bytes - shared).sum()
        };
        let beside_the_root = paid(shared_bytes(Root::Has(root), &children));
        assert_eq!(root.resident_bytes + beside_the_root, all);
        let without = [pages(60 + 30, 0, 45), pages(60 + 30, 0, 45)];
        assert_eq!(shared_bytes(Root::Gone, &without), [45, 45], "90 pages, and two who pay");
    }

    #[test]
    fn one_child_pays_for_what_is_private_to_it() {
        assert_eq!(shared_bytes(Root::Alone, &[pages(100, 30, 65)]), [70]);
        assert!(shared_bytes(Root::Gone, &[]).is_empty());
    }

    #[test]
    fn growth_is_not_copying() {
        let faults = |minor, mib: u64| Faults { minor, resident_bytes: mib << 20 };
        let copied = |before, now| copied_bytes(before, now, &mut Served::default());
        assert_eq!(copied(faults(10, 8), faults(266, 8)), 1 << 20);
        assert_eq!(copied(faults(10, 8), faults(266, 9)), 0);
        assert_eq!(copied(faults(10, 8), faults(11, 10)), 0, "a huge page");
        assert_eq!(copied(faults(10, 8), faults(5, 7)), 0, "another process by now");
    }

    /// Goal: faults that an engine has served are none of copies, be they seen at once or at the next look; and each is
    /// taken out once.
    #[test]
    fn what_was_served_is_not_copying() {
        let mut families = Families::default();
        let mut rest = |served: &[(u32, u64)], pid, faults| {
            families.note_served(served.iter().copied());
            families.served.get_mut(&pid).map_or(faults, |one| one.take_out_of(faults))
        };
        assert_eq!(rest(&[(7, 100), (8, 5)], 7, 30), 30, "served before anybody looked");
        assert_eq!(rest(&[(7, 140), (8, 5)], 7, 30), 0);
        assert_eq!(rest(&[(7, 140), (8, 5)], 7, 30), 20, "10 were served before and are seen now");
        assert_eq!(rest(&[(7, 141), (8, 5)], 8, 3), 3);
        assert_eq!(rest(&[(7, 2)], 7, 5), 4, "one of these, and another process by now");
        assert_eq!(rest(&[(7, 2)], 8, 5), 5, "it is gone");
    }

    /// Goal: faults that turn out to be no copies count less, no less than a 16th, and count in full again once they
    /// are copies. Method: a process that gives 4 MiB back and touches it again between two exact looks.
    #[test]
    fn faults_that_are_no_copies_are_believed_less() {
        const MIB: u64 = 1 << 20;
        let mut trust = Trust::default();
        let mut interval = |shared_mib: u64, claimed: u64| {
            let believed = trust.believe(claimed);
            trust.judge(shared_mib * MIB);
            believed
        };
        assert_eq!(interval(40, 4 * MIB), 4 * MIB, "nothing is known");
        assert_eq!(interval(40, 4 * MIB), 4 * MIB);
        let less: Vec<u64> = (0..4).map(|_| interval(40, 4 * MIB)).collect();
        assert_eq!(less, [2 * MIB, MIB, MIB / 2, MIB / 4]);
        assert_eq!(interval(40, 4 * MIB), MIB / 4);
        assert_eq!(interval(38, 2 * MIB), MIB / 8, "it has copied");
        assert_eq!(interval(36, 2 * MIB), 2 * MIB);
        assert_eq!(interval(36, 4 * MIB), 4 * MIB);
        assert_eq!(interval(36, MIB / 2), MIB / 4, "too little to judge by");
        assert_eq!(interval(36, 4 * MIB), 4 * MIB);
    }

    #[test]
    fn the_root_is_found_by_parents() {
        let parents = BTreeMap::from([(12, 11), (11, 10), (13, 10), (21, 20), (31, 32), (32, 31)]);
        let found = roots(&parents);
        assert_eq!((found[&12], found[&11], found[&13], found[&21]), (10, 10, 10, 20));
        assert!(found.contains_key(&31), "a circle ends");
    }

    /// Goal: both looks read what the kernel says about a real process, and forget one that is gone.
    #[test]
    fn a_process_that_sleeps_copies_nothing() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let forked = [Forked { index: 3, pid: child.id() }];
        // On a busy machine it takes a while until it has been loaded.
        let stat = format!("/proc/{}/stat", child.id());
        while !std::fs::read_to_string(&stat).unwrap().contains("(sleep) S") {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let mut families = Families::default();
        let found = families.look(&forked, |_| true);
        assert_eq!((found.len(), found[0].index), (1, 3));
        assert_eq!(families.root(child.id()), std::process::id());
        // The other of the two, this process, runs the other tests meanwhile.
        assert_eq!(families.copied(child.id()), 0);
        assert_eq!(families.follow(&forked).len(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(families.look(&forked, |_| true).is_empty());
    }
}
