//! The rules, one by one, with known results.

use super::super::model::check;
use super::super::{CLUSTER_SLOTS, ORDER_MAX, Slots};
use super::take_all;

const C: u32 = CLUSTER_SLOTS;

/// Each CPU takes slots in sequence, and the runs of one order lie together.
#[test]
fn cpus_and_orders_do_not_meet() {
    let area = Slots::new(8 * C, 2);
    let mut found = Vec::new();
    for nth in 0..8 {
        for (cluster, (cpu, order)) in (0..).zip([(0, 0), (1, 0), (0, 4), (1, 4)]) {
            let first = area.take(cpu, order).expect("room");
            assert_eq!(first, cluster * C + (nth << order), "CPU {cpu}, order {order}");
            found.push((first, 1 << order));
        }
    }
    assert_eq!(area.used(), 8 * 2 * 17);
    found.into_iter().for_each(|(first, count)| area.free(first, count));
    assert_eq!((area.used(), area.in_use(0)), (0, None));
    check(&area);
}

#[test]
fn every_slot_is_taken_once_at_each_order() {
    for order in 0..=ORDER_MAX {
        let area = Slots::new(3 * C, 2);
        let mut firsts = take_all(&area, 0, order);
        firsts.extend(take_all(&area, 1, order));
        firsts.sort_unstable();
        assert!(firsts.iter().copied().eq((0..3 * C).step_by(1 << order)), "order {order}");
        assert_eq!(area.counts().full, 3);
        check(&area);
    }
}

/// The last cluster has 300 slots: runs up to order 8 fit in it, and all of it serves order 0.
#[test]
fn a_tail_is_used_as_far_as_it_goes() {
    for (order, runs) in [(0, 812), (1, 406), (3, 101), (5, 25), (8, 3), (9, 1)] {
        let area = Slots::new(C + 300, 1);
        assert_eq!(take_all(&area, 0, order).len(), runs, "order {order}");
        let rest = take_all(&area, 0, 0).len();
        assert_eq!(rest + (runs << order), 812, "order {order}");
        check(&area);
    }
    let area = Slots::new(5, 1);
    assert_eq!((area.take(0, 3), area.take(0, 2), area.take(0, 2)), (None, Some(0), None));
    assert_eq!((area.take(0, 0), area.take(0, 0), area.total()), (Some(4), None, 5));
    let empty = Slots::new(0, 1);
    assert_eq!((empty.take(0, 0), empty.in_use(0), empty.used()), (None, None, 0));
}

#[test]
fn order_0_takes_from_larger_orders_last_and_where_they_lose_least() {
    let area = Slots::new(4 * C, 1);
    let pairs: Vec<u32> = (0..C / 2).map(|_| area.take(0, 1).expect("room")).collect();
    let large: Vec<u32> = (0..C / 16).map(|_| area.take(0, 4).expect("room")).collect();
    let small = take_all(&area, 0, 0);
    assert_eq!(small, (2 * C..4 * C).collect::<Vec<_>>(), "there were two empty clusters");
    // Order 1 has a run again. Of order 4 there are 16 slots, but no run.
    area.free(pairs[7], 2);
    large.iter().step_by(2).for_each(|first| area.free(first + 3, 1));
    assert_eq!(area.take(0, 4), None);
    let counts = area.counts();
    assert_eq!((counts.frag[4], counts.nonfull[1], counts.steals), (1, 1, 0));
    // So order 0 takes from order 4 first, and then from order 1.
    let stolen = take_all(&area, 0, 0);
    let of_order_4 = large.iter().step_by(2).map(|first| first + 3);
    assert!(stolen.iter().copied().eq(of_order_4.chain([pairs[7], pairs[7] + 1])), "{stolen:?}");
    assert_eq!((area.counts().steals, area.used()), (2, 4 * C));
    check(&area);
}

#[test]
fn a_large_order_never_takes_from_another() {
    let area = Slots::new(2 * C, 1);
    (0..C / 2).for_each(|_| assert!(area.take(0, 1).is_some()));
    (0..C).for_each(|_| assert!(area.take(0, 0).is_some()));
    // 256 slots of order 1 and all but one of order 0 are free.
    area.free(0, 256);
    area.free(C, C - 1);
    for order in 2..=ORDER_MAX {
        assert_eq!(area.take(0, order), None, "order {order}");
        assert_eq!(area.counts().swpout_fallback[order as usize], 1);
    }
    assert_eq!(area.take(0, 1), Some(0));
    // Without the last slot the cluster is empty, and serves any order.
    area.free(2 * C - 1, 1);
    assert_eq!(area.take(0, 4), Some(C));
    check(&area);
}

/// A cluster freed whole waits to be discarded; new ones are used first, then it is used as it is.
#[test]
fn a_cluster_that_waits_is_used_when_no_other_is_left() {
    let area = Slots::new(3 * C, 1);
    assert_eq!((area.take(0, 9), area.take(0, 9)), (Some(0), Some(C)));
    area.free(0, C);
    assert_eq!((area.counts().discard, area.counts().free), (1, 1));
    assert_eq!(area.take(0, 9), Some(2 * C), "the one that was never used");
    assert_eq!((area.take(0, 9), area.counts().discards_skipped), (Some(0), 1));
    // The first cluster that is freed waits; the next one is free at once, since there is no free one.
    area.free(C, C);
    area.free(0, C);
    let counts = area.counts();
    assert_eq!((counts.discard, counts.free, counts.discards_skipped), (1, 1, 2));
    check(&area);
}

#[test]
fn clusters_are_handed_out_once_and_come_back() {
    let area = Slots::new(71 * C + 9, 1);
    let all: Vec<u32> = (0..71).map(|_| area.take(0, 9).expect("room")).collect();
    let tail = area.take(0, 3).expect("room");
    // The second one is free at once, since there is no free one; all others wait.
    all.iter().rev().for_each(|first| area.free(*first, C));
    area.free(tail, 8);
    area.begin_drain();
    area.end_drain();
    let mut handed_out = Vec::new();
    area.take_discards(2, &mut |range| handed_out.push(range));
    assert_eq!(handed_out, [68 * C..69 * C, 70 * C..71 * C], "the oldest, in rising order");
    area.take_discards(usize::MAX, &mut |range| handed_out.push(range));
    assert_eq!((handed_out.len(), area.counts().discarding), (71, 71));
    assert!(handed_out.contains(&(71 * C..71 * C + 9)), "the tail");
    area.take_discards(9, &mut |range| panic!("{range:?} twice"));
    assert_eq!((area.take(0, 9), area.take(0, 0)), (Some(69 * C), None), "SLOT-3");
    area.discarded(66 * C..69 * C);
    assert_eq!((area.counts().free, area.counts().discards), (3, 3));
    assert_eq!(area.take(0, 9), Some(66 * C));
    handed_out.retain(|range| !(66 * C..69 * C).contains(&range.start));
    handed_out.into_iter().for_each(|range| area.discarded(range));
    assert_eq!((area.counts().free, area.counts().discarding), (70, 0));
    check(&area);
}

/// Another CPU's current cluster, and its empty ones, are not lost to a CPU that has nothing else.
#[test]
fn a_cpu_gets_what_others_hold_but_do_not_use() {
    let area = Slots::new(2 * C, 2);
    let small = area.take(1, 0).expect("room");
    let large = area.take(1, 4).expect("room");
    assert_eq!(area.take(0, 4), Some(large + 16), "the rest of the cluster of CPU 1");
    assert_eq!(area.take(0, 9), None);
    area.free(small, 1);
    assert_eq!(area.take(0, 9), Some(0), "the empty cluster of CPU 1");
    let small = take_all(&area, 0, 0);
    assert_eq!(small.len(), C as usize - 32, "what order 4 does not use");
    assert_eq!((area.used(), area.counts().current), (2 * C, 0));
    check(&area);
}

#[test]
fn nothing_is_taken_while_an_area_is_drained() {
    let area = Slots::new(4 * C, 2);
    let runs: Vec<u32> = (0..40).map(|nth| area.take(nth % 2, 4).expect("room")).collect();
    let single = area.take(0, 0).expect("room");
    area.begin_drain();
    assert_eq!((area.take(0, 0), area.take(1, 4), area.take(1, 9)), (None, None, None));
    assert_eq!(area.counts().swpout_fallback, [0; 10], "not for want of room");
    let mut listed = Vec::new();
    while let Some(slot) = area.in_use(listed.last().map_or(0, |last| last + 1)) {
        listed.push(slot);
    }
    let mut wanted: Vec<u32> = runs.iter().flat_map(|first| *first..first + 16).collect();
    wanted.push(single);
    wanted.sort_unstable();
    assert_eq!(listed, wanted);
    listed.iter().for_each(|slot| area.free(*slot, 1));
    assert_eq!((area.used(), area.in_use(0)), (0, None));
    check(&area);
    area.end_drain();
    assert!(area.take(0, 0).is_some() && area.take(1, 9).is_some());
}

/// The short last cluster of an area that grows gets its other slots, wherever it is.
#[test]
fn a_tail_grows() {
    // Never used; full; nonfull; current; waits to be discarded; is being discarded.
    let before: [&dyn Fn(&Slots); 6] = [
        &|_| {},
        &|area| drop(take_all(area, 0, 0)),
        &|area| {
            take_all(area, 0, 0);
            area.free(C, 1);
        },
        &|area| assert_eq!((area.take(0, 9), area.take(0, 0)), (Some(0), Some(C))),
        &|area| {
            take_all(area, 0, 0);
            area.free(C, 100);
        },
        &|area| {
            take_all(area, 0, 0);
            area.free(C, 100);
            area.take_discards(1, &mut |range| assert_eq!(range, C..C + 100));
        },
    ];
    for (nth, before) in before.into_iter().enumerate() {
        let area = Slots::new(C + 100, 1);
        before(&area);
        area.grow(0);
        check(&area);
        area.grow(50);
        check(&area);
        area.grow(2 * C);
        check(&area);
        assert_eq!(area.total(), 3 * C + 150);
        if nth == 5 {
            area.discarded(C..C + 100);
        }
        take_all(&area, 0, 0);
        assert_eq!(area.used(), area.total(), "way {nth}");
        check(&area);
    }
}

#[test]
fn a_frag_tail_that_grows_has_runs_again() {
    let area = Slots::new(20, 1);
    assert_eq!((area.take(0, 4), area.take(0, 4), area.counts().frag[4]), (Some(0), None, 1));
    area.grow(12);
    assert_eq!(area.take(0, 4), Some(16));
    check(&area);
}

/// Goal: an area as large as there can be works at both ends. Method: 2^32 - 1 slots, of which some are taken.
#[test]
fn an_area_may_have_all_but_one_of_2_pow_32_slots() {
    let area = Slots::new(u32::MAX - 700, 3);
    area.grow(700);
    assert_eq!((area.take(7, 9), area.total(), area.used()), (Some(0), u32::MAX, C));
    assert_eq!(area.in_use(1), Some(1));
    area.free(0, C);
    area.take_discards(1, &mut |range| assert_eq!(range, 0..C));
    assert_eq!((area.in_use(0), area.in_use(u32::MAX)), (None, None));
    assert_eq!(area.counts().free, u32::MAX / C);
}
