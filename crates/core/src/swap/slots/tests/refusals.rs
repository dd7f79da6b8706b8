//! What a caller must not do, and what memory there is not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

use super::super::model::check;
use super::super::{CLUSTER_SLOTS, Slots};
use super::take_all;

const C: u32 = CLUSTER_SLOTS;

/// The message with which `misuse` panics.
fn message(area: &Slots, misuse: impl FnOnce(&Slots)) -> String {
    let before = area.counts();
    let panic = catch_unwind(AssertUnwindSafe(|| misuse(area))).expect_err("it is misuse");
    assert_eq!(area.counts(), before, "nothing was changed");
    check(area);
    *panic.downcast::<String>().expect("the message has numbers")
}

/// Goal: each misuse panics, names the slot, and changes nothing.
#[test]
fn misuse_panics_and_names_the_slot() {
    let area = Slots::new(3 * C + 40, 1);
    assert_eq!(area.take(0, 4), Some(0));
    area.free(5, 2);
    type Misuse = &'static dyn Fn(&Slots);
    let wrong: [(Misuse, &str); 13] = [
        (&|area| area.free(5, 1), "SLOT-1: slot 5 is freed"),
        (&|area| area.free(0, 16), "SLOT-1: slot 5 is freed"),
        (&|area| area.free(6, 3), "SLOT-1: slot 6 is freed"),
        (&|area| area.free(7, 10), "SLOT-1: slot 16 is freed"),
        // A cluster that was never used.
        (&|area| area.free(2 * C + 7, 1), "SLOT-1: slot 1031 is freed"),
        (&|area| area.free(3 * C + 40, 1), "slot 1576 on; the area has 1576"),
        (&|area| area.free(3 * C + 39, 2), "slot 1575 on; the area has 1576"),
        (&|area| area.free(u32::MAX, 2), "slot 4294967295 on"),
        (&|area| area.free(9, 0), "0 slots are freed from slot 9 on"),
        (&|area| area.discarded(0..C), "SLOT-3: slot 0 is said"),
        (&|area| area.discarded(2 * C..3 * C), "SLOT-3: slot 1024 is said"),
        (&|area| area.discarded(1..C), "SLOT-3: slots 1..512"),
        (
            &|area| assert_eq!(area.take(0, 10), None),
            "order 10 of a run of slots: accepted: 0 to 9",
        ),
    ];
    for (misuse, wanted) in wrong {
        let message = message(&area, misuse);
        assert!(message.contains(wanted), "{message}");
    }
    assert_eq!(area.used(), 14, "as before");
}

/// Goal: a double free is found wherever the cluster is by then.
#[test]
fn a_slot_of_a_cluster_that_was_freed_whole_is_not_freed_again() {
    let area = Slots::new(2 * C, 1);
    let first = area.take(0, 9).expect("room");
    area.free(first, C);
    let free_again = |area: &Slots| area.free(first + 3, 1);
    assert!(message(&area, free_again).contains("slot 3 is freed"), "it waits to be discarded");
    area.take_discards(1, &mut |_| {});
    assert!(message(&area, free_again).contains("slot 3 is freed"), "it is being discarded");
    area.discarded(first..first + C);
    assert!(message(&area, free_again).contains("slot 3 is freed"), "it is free");
    assert!(message(&area, |area| area.discarded(0..C)).contains("slot 0 is said"));
}

#[test]
#[should_panic(expected = "fewer than 2^32 slots")]
fn an_area_cannot_be_larger_than_a_slot_number() {
    Slots::new(u32::MAX, 1).grow(1);
}

/// Goal: without memory for tables an area goes on with what it has, and loses nothing.
#[test]
fn no_memory_for_a_table_is_no_room() {
    let area = Slots::new(40 * C, 1);
    area.table.refuses.store(true, Relaxed);
    assert_eq!((area.take(0, 0), area.take(0, 9)), (None, None));
    area.table.refuses.store(false, Relaxed);
    let large: Vec<u32> = (0..32).map(|_| area.take(0, 9).expect("room")).collect();
    area.table.refuses.store(true, Relaxed);
    assert_eq!((area.take(0, 9), area.counts().free), (None, 8));
    area.free(large[3], C);
    assert_eq!(area.take(0, 9), Some(large[3]), "what waits to be discarded is used");
    area.free(large[4], C);
    let small = take_all(&area, 0, 0);
    assert!(small.iter().copied().eq(large[4]..large[4] + C), "{small:?}");
    area.table.refuses.store(false, Relaxed);
    assert_eq!(take_all(&area, 0, 9).len(), 8);
    check(&area);
}

/// Goal: after `prepare` the next 32 clusters need no memory.
#[test]
fn prepared_clusters_need_no_memory() {
    let area = Slots::new(80 * C, 1);
    assert_eq!(area.take(0, 9), Some(0));
    area.prepare();
    area.table.refuses.store(true, Relaxed);
    assert_eq!(take_all(&area, 0, 9).len(), 63, "two leaves");
    area.prepare();
    assert_eq!(area.take(0, 9), None, "there is no memory");
}
