//! The ledger beside a plain map.

use std::collections::BTreeMap;

use super::{Ledger, Member, Owner, SLOTS, SMALL_MARGIN_BYTES, signed};
use crate::testing::{Random, seed};

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 512 * MIB;
const FIRST: u64 = TOTAL / 64;

fn owner(pid: u32) -> Owner {
    Owner { pid, namespace: 0, start_ticks: u64::from(pid) * 7 }
}

fn ledger() -> Box<Ledger> {
    let ledger = Box::<Ledger>::default();
    assert!(!ledger.is_whole(), "LEDGER-4");
    ledger.begin(1, TOTAL);
    assert!(ledger.is_whole() && ledger.seats().count() == 0);
    ledger
}

#[derive(Default)]
struct Model {
    free: i64,
    shares: BTreeMap<u32, (usize, u64, Option<u64>)>,
    reserve: u64,
    fair: u64,
}

impl Model {
    fn take(&mut self, pid: u32, least: u64, most: u64, left: u64) -> u64 {
        let (_, share, target) = self.shares.get_mut(&pid).expect("a process of the model");
        let at_least_0 = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        let ample = at_least_0(self.free - signed(self.reserve.max(left)));
        let for_small = (self.fair / 2).saturating_sub(*share).min(at_least_0(self.free));
        let room = ample
            .max(for_small)
            .min(target.map_or(u64::MAX, |target| target.saturating_sub(*share)));
        if room < least || room == 0 {
            return 0;
        }
        let taken = room.min(most);
        *share += taken;
        self.free -= signed(taken);
        taken
    }

    fn enter(&mut self, pid: u32, index: usize) {
        if let Some((_, share, target)) = self.shares.get_mut(&pid) {
            self.free += signed(share.saturating_sub(FIRST));
            (*share, *target) = ((*share).min(FIRST), None);
            return;
        }
        self.shares.insert(pid, (index, 0, None));
        if self.take(pid, FIRST, FIRST, 0) == 0 {
            self.free -= signed(SMALL_MARGIN_BYTES);
            self.shares.get_mut(&pid).expect("just inserted").1 = SMALL_MARGIN_BYTES;
        }
    }
}

/// Goal: shares, targets and what is free never disagree with a plain map, and nothing is lost.
/// Method: random steps of random processes against the model.
#[test]
fn the_ledger_agrees_with_a_plain_map() {
    let seed = seed();
    let mut random = Random::new(seed);
    for round in 0..20 {
        let ledger = ledger();
        let mut model = Model { free: signed(TOTAL), fair: TOTAL, ..Model::default() };
        for step in 0..2_000 {
            let pid = u32::try_from(1 + random.below(12)).expect("small");
            let bytes = random.below_u64(TOTAL / 4);
            let known = model.shares.get(&pid).copied();
            match (random.below(8), known) {
                (0, _) => {
                    let index = ledger.enter(owner(pid)).expect("12 processes");
                    model.enter(pid, index);
                }
                (1, Some((index, share, _))) if random.below(4) == 0 => {
                    ledger.release(index);
                    model.shares.remove(&pid);
                    model.free += signed(share);
                }
                (2 | 3, Some((index, ..))) => {
                    let least = random.below_u64(bytes + 1);
                    let seat = ledger.seat(index);
                    let watching = random.below(2) == 0;
                    let left = if watching && model.fair < TOTAL { TOTAL / 16 } else { 0 };
                    let taken = match watching {
                        true => seat.take_watching(least, bytes),
                        false => seat.take(least, bytes),
                    };
                    let expected = model.take(pid, least, bytes, left);
                    assert_eq!(taken, expected, "seed {seed}, step {step}");
                }
                (4, Some((index, share, target))) => {
                    ledger.seat(index).force(bytes / 16);
                    let share = share + bytes / 16;
                    let target = target.filter(|target| *target >= share);
                    model.free -= signed(bytes / 16);
                    model.shares.insert(pid, (index, share, target));
                }
                (5, Some((index, share, target))) => {
                    let given = ledger.seat(index).give_down_to(bytes);
                    assert_eq!(given, share.saturating_sub(bytes), "seed {seed}, step {step}");
                    model.free += signed(given);
                    model.shares.insert(pid, (index, share.min(bytes), target));
                }
                (6, Some((index, share, _))) => {
                    let target = (random.below(2) == 0).then_some(bytes.max(1));
                    ledger.seat(index).set_target(target);
                    model.shares.insert(pid, (index, share, target));
                }
                (7, _) => {
                    (model.reserve, model.fair) = (bytes / 8, TOTAL / (1 + bytes % 8));
                    ledger.set_reserve(model.reserve, model.fair);
                }
                _ => {}
            }
            assert_eq!(ledger.free_bytes(), model.free, "seed {seed}, round {round}, step {step}");
            assert_eq!(ledger.missing_bytes(), 0, "LEDGER-1: seed {seed}, step {step}");
            let seats = ledger.seats().map(|(index, seat)| {
                (seat.owner().pid, (index, seat.share_bytes(), seat.target_bytes()))
            });
            assert_eq!(seats.collect::<BTreeMap<_, _>>(), model.shares, "seed {seed}, step {step}");
        }
    }
}

#[test]
fn a_new_program_of_a_process_keeps_the_slot_and_a_first_share() {
    let ledger = ledger();
    let index = ledger.enter(owner(5)).unwrap();
    let seat = ledger.seat(index);
    assert_eq!(seat.take(1, 100 * MIB), 100 * MIB);
    seat.set_forked(40 * MIB);
    seat.set_watches();
    assert_eq!(seat.limit_bytes(), FIRST + 100 * MIB + 32 * MIB + 40 * MIB, "for copies: 32 MiB");
    assert_eq!(ledger.enter(owner(5)), Some(index));
    assert_eq!((seat.share_bytes(), seat.limit_bytes()), (FIRST, FIRST));
    assert!(!seat.is_forked() && !seat.watches());
    let later = Owner { start_ticks: 9, ..owner(5) };
    assert_ne!(ledger.enter(later), Some(index), "another process of that number");
}

/// A regression: a program began with the target of the one before it in the same process, could take nothing beyond
/// that, and compressed its memory while enough was free.
#[test]
fn a_new_program_of_a_process_has_no_target() {
    let ledger = ledger();
    let seat = ledger.seat(ledger.enter(owner(5)).unwrap());
    seat.set_target(Some(FIRST / 2));
    assert!(ledger.enter(owner(5)).is_some());
    assert_eq!((seat.target_bytes(), seat.limit_bytes()), (None, FIRST));
    assert_eq!(seat.take(MIB, MIB), MIB);
}

#[test]
fn who_has_half_of_a_fair_part_leaves_the_reserve() {
    let ledger = ledger();
    let [large, small] = [1, 2].map(|pid| ledger.seat(ledger.enter(owner(pid)).unwrap()));
    ledger.set_reserve(64 * MIB, 256 * MIB);
    assert_eq!(large.take(1, u64::MAX), TOTAL - 64 * MIB - 2 * FIRST);
    assert_eq!(large.take(1, MIB), 0, "the reserve");
    assert_eq!(small.take(60 * MIB, 60 * MIB), 60 * MIB);
    assert_eq!(small.take(8 * MIB, 8 * MIB), 0, "there is not so much");
    assert_eq!(ledger.free_bytes(), signed(4 * MIB));
}

#[test]
fn a_target_bounds_the_limit_and_what_is_taken() {
    let ledger = ledger();
    let seat = ledger.seat(ledger.enter(owner(1)).unwrap());
    assert_eq!(seat.take(1, 92 * MIB), 92 * MIB);
    seat.set_target(Some(50 * MIB));
    assert_eq!((seat.share_bytes(), seat.limit_bytes()), (100 * MIB, 50 * MIB));
    assert_eq!(seat.take(1, MIB), 0);
    assert_eq!(seat.give_down_to(50 * MIB), 50 * MIB);
    assert_eq!(seat.take(1, MIB), 0, "at the target");
    seat.force(MIB);
    assert_eq!((seat.limit_bytes(), seat.target_bytes(), seat.forced()), (51 * MIB, None, 1));
    assert_eq!(seat.take(1, MIB), MIB);
}

#[test]
fn a_child_takes_what_it_may_copy_if_that_is_free() {
    let ledger = ledger();
    let [parent, child, late] = [1, 2, 3].map(|pid| ledger.seat(ledger.enter(owner(pid)).unwrap()));
    ledger.set_reserve(8 * MIB, TOTAL / 3);
    child.set_forked(300 * MIB);
    assert_eq!((child.share_bytes(), child.shared_bytes()), (FIRST + 32 * MIB, 300 * MIB));
    child.note_copied(100 * MIB);
    assert_eq!(child.limit_bytes(), FIRST + 232 * MIB);
    assert_eq!(child.copies_ahead_bytes(), 16 * MIB);
    child.note_copied(u64::MAX);
    assert_eq!((child.shared_bytes(), child.copies_ahead_bytes()), (0, 0));
    assert!(parent.take(1, u64::MAX) > 0);
    late.set_forked(300 * MIB);
    assert_eq!((late.share_bytes(), late.forced()), (FIRST + 8 * MIB, 0), "all of the reserve");
    assert_eq!(ledger.free_bytes(), 0);
    assert_eq!(ledger.missing_bytes(), 0);
}

#[test]
fn a_process_that_only_watches_leaves_some_free_unless_it_is_alone() {
    let ledger = ledger();
    let seat = ledger.seat(ledger.enter(owner(1)).unwrap());
    ledger.set_reserve(0, TOTAL / 2);
    assert_eq!(seat.take_watching(1, u64::MAX), TOTAL - TOTAL / 16 - FIRST);
    assert_eq!(seat.take_watching(1, u64::MAX), 0);
    ledger.set_reserve(0, TOTAL);
    assert_eq!(seat.take_watching(1, u64::MAX), TOTAL / 16);
}

#[test]
fn shares_are_taken_when_nothing_is_free_and_slots_end() {
    let ledger = ledger();
    for pid in 0..SLOTS {
        assert_eq!(ledger.enter(owner(u32::try_from(pid).unwrap() + 1)), Some(pid));
    }
    assert!(ledger.free_bytes() < 0 && ledger.missing_bytes() == 0);
    assert_eq!(ledger.enter(owner(5_000)), None);
    ledger.release(77);
    assert_eq!(ledger.enter(owner(5_000)), Some(77));
    (0..SLOTS).for_each(|index| ledger.release(index));
    assert_eq!(ledger.free_bytes(), signed(TOTAL));
    assert_eq!(ledger.seats().count(), 0);
}

/// Goal: where nobody frees the slots of the dead, those who come later do, and no share is lost. Method: a server
/// that lives, and many times as many children as there are slots, each of which ends before the next begins.
#[test]
fn children_without_a_supervisor_take_over_what_the_dead_had() {
    let ledger = ledger();
    let server = ledger.seat(ledger.enter(owner(1)).unwrap());
    let gone_supervisor = ledger.seat(ledger.enter(owner(2)).unwrap());
    gone_supervisor.force(3 * MIB);
    for pid in 3..3 * u32::try_from(SLOTS).unwrap() {
        let index = ledger.enter_or_take_over(owner(pid), |other| other.pid != 1).expect("a slot");
        assert_eq!((index, ledger.seat(index).owner()), (1, owner(pid)));
        assert_eq!(ledger.seat(index).share_bytes(), FIRST);
        assert!(ledger.seat(index).take(MIB, MIB) > 0 && ledger.missing_bytes() == 0);
        ledger.seat(index).set_target(Some(MIB));
    }
    assert_eq!((server.owner(), server.share_bytes()), (owner(1), FIRST));
    // While nobody is gone, a new one has a slot of its own.
    assert_eq!(ledger.enter_or_take_over(owner(9_999), |_| false), Some(2));
}

/// Goal: a process whose slot was taken over, since somebody thought that it was gone, does not end the slot of the
/// other.
#[test]
fn who_has_lost_its_slot_leaves_that_of_another_alone() {
    let ledger: &'static Ledger = Box::leak(Box::new(ledger()));
    let member = Member::new(ledger, owner(1)).unwrap();
    assert_eq!(ledger.enter_or_take_over(owner(2), |other| other.pid == 1), Some(0));
    member.leave();
    assert_eq!((ledger.seat(0).owner(), ledger.seat(0).share_bytes()), (owner(2), FIRST));
    assert!(member.seat().is_none());
}

/// Goal: a process sees what the run sees only where namespaces and filters of both are known, and the same.
#[test]
fn what_is_not_known_is_not_the_same() {
    let ledger = ledger();
    let sees = |namespace, filters| ledger.sees_the_same(namespace, || filters);
    assert!(!sees(0, Some(0)) && !sees(0, None) && !sees(7, Some(0)));
    ledger.set_surroundings(7, Some(1));
    assert!(sees(7, Some(1)) && !sees(7, Some(2)) && !sees(7, None));
    assert!(!sees(0, Some(1)) && !sees(8, Some(1)));
    ledger.set_surroundings(7, None);
    assert!(!sees(7, None) && !sees(7, Some(0)));
}

#[test]
fn what_a_killed_process_lost_is_put_back() {
    let ledger = ledger();
    // As a process that was killed between the two steps of a take.
    ledger.free_bytes.fetch_sub(5, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(ledger.missing_bytes(), 5);
    ledger.settle(5);
    assert_eq!((ledger.missing_bytes(), ledger.free_bytes()), (0, signed(TOTAL)));
}

/// A regression: what had been put back for a process that was only stopped between the two steps of a take was there
/// twice when the process went on, so that all together had more than the total for good.
#[test]
fn what_was_put_back_for_a_stopped_process_is_taken_away_again() {
    let ledger = ledger();
    let index = ledger.enter(owner(1)).unwrap();
    ledger.free_bytes.fetch_sub(5, std::sync::atomic::Ordering::Relaxed);
    ledger.settle(ledger.missing_bytes());
    ledger.slots[index].share_bytes.fetch_add(5, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(ledger.missing_bytes(), -5);
    ledger.settle(ledger.missing_bytes());
    assert_eq!((ledger.missing_bytes(), ledger.free_bytes()), (0, signed(TOTAL - FIRST - 5)));
}

/// Goal: another total is free at once, or missing until somebody gives; nothing else changes. Method:
/// a process has half of the total while that is doubled, and then halved twice.
#[test]
fn the_total_follows_what_is_asked_for() {
    let ledger = Ledger::default();
    ledger.begin(1, 64 * MIB);
    let seat = ledger.seat(ledger.enter(owner(1)).unwrap());
    assert!(seat.take(28 * MIB, 28 * MIB) > 0);
    assert_eq!((seat.share_bytes(), ledger.free_bytes()), (32 * MIB, 32 << 20));
    ledger.follow_asked();
    assert_eq!(ledger.total_bytes(), 64 * MIB, "nobody asked");
    for (asked, free) in [(128, 96), (64, 32), (24, -8)] {
        ledger.limit_asked.store(asked * MIB, std::sync::atomic::Ordering::Relaxed);
        ledger.follow_asked();
        ledger.follow_asked();
        assert_eq!((ledger.total_bytes(), ledger.free_bytes()), (asked * MIB, free << 20));
        assert_eq!((seat.share_bytes(), ledger.missing_bytes()), (32 * MIB, 0));
    }
    assert_eq!(seat.take(MIB, MIB), 0, "nothing is free");
}
