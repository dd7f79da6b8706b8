//! Tests of the budget of copies. On a simulated cache it runs in `economy/replay.rs`.

use super::{Copies, Ledger, Relaxed, Sizes, Verdict, Worth};
use crate::reclaim::busy::{Done, Lately};

/// Sizes of a program whose units compress to about a third.
const SIZES: Sizes = Sizes { limit: 64 << 20, unit: 16 << 10, object: 5 << 10 };

/// How long a fault takes.
const FAULT_NS: u64 = 40_000;

/// What the background thread did: a unit takes it so long to reclaim. It has time for more, or has to be
/// waited for.
fn lately(reclaim_ns: u64, has_time: bool) -> Lately {
    let (background, clean) = (100, 100);
    let span_ns = if has_time { 1_000_000_000 } else { 1 };
    let busy_ns = background * reclaim_ns;
    Lately::one(Done { span_ns, busy_ns, background, clean, ..Done::default() })
}

fn ledger(copies: u64, loads: u64, near: u64, clean: u64) -> Ledger {
    let ledger = Ledger::default();
    ledger.copies.store(copies, Relaxed);
    ledger.reviews.store(1, Relaxed);
    ledger.loads.store(loads, Relaxed);
    ledger.near.store(near, Relaxed);
    ledger.wait_ns.store(loads * FAULT_NS, Relaxed);
    ledger.clean.store(clean, Relaxed);
    ledger.compressed.store(100, Relaxed);
    ledger.compress_ns.store(100 * 10_000, Relaxed);
    ledger
}

#[test]
fn copies_that_go_out_clean_grow_and_others_shrink() {
    let verdict = |ledger: Ledger| ledger.verdict(SIZES, &lately(10_000, false));
    assert_eq!(verdict(ledger(1000, 1000, 0, 900)), Verdict::Grow);
    assert_eq!(verdict(ledger(1000, 1000, 100, 0)), Verdict::Shrink);
    assert_eq!(verdict(ledger(1000, 0, 0, 0)), Verdict::Keep);
}

/// Goal: the two sides are compared per byte. 410 copies take as many bytes as the window (2 MiB),
/// so 5 clean units of 10 us each are worth as much as one near refault of 50 us.
#[test]
fn worth_is_by_byte() {
    let verdict = |ledger: Ledger| ledger.verdict(SIZES, &lately(10_000, false));
    assert_eq!(verdict(ledger(410, 1000, 100, 500)), Verdict::Keep);
    assert_eq!(verdict(ledger(410, 1000, 100, 800)), Verdict::Grow);
    assert_eq!(verdict(ledger(410, 1000, 100, 300)), Verdict::Shrink);
    assert_eq!(verdict(ledger(820, 1000, 100, 500)), Verdict::Shrink);
}

/// Goal: what is shown is what was measured: the credit and the copies that always stay are left out.
#[test]
fn an_account_has_no_credit() {
    let ledger = ledger(10, 1000, 100, 500);
    ledger.clean_credit.store(700, Relaxed);
    let account = ledger.account(20, SIZES, lately(10_000, false));
    assert_eq!(account.copies, Worth { saved_ns: 500 * 10_000, bytes: 10 * SIZES.object });
    let near_ns = 100 * (FAULT_NS + 10_000);
    assert_eq!(account.resident, Worth { saved_ns: near_ns, bytes: 2 << 20 });
    assert_eq!((account.span.loads, account.copies_bytes), (1000, 20 * SIZES.object));
}

/// Goal: a copy is worth nothing if the background thread has time to compress the unit.
#[test]
fn what_nobody_waits_for_is_worth_nothing() {
    let few_refaults = ledger(410, 1000, 10, 800);
    assert_eq!(few_refaults.verdict(SIZES, &lately(10_000, false)), Verdict::Grow);
    assert_eq!(few_refaults.verdict(SIZES, &lately(10_000, true)), Verdict::Shrink);
}

/// Goal: a folio that is locked waits at the end of the queue, and stays in it.
#[test]
fn a_folio_passed_over_keeps_its_entry() {
    let copies = Copies::new();
    copies.reserve(3);
    (1..4).for_each(|base| assert!(copies.push(base)));
    copies.pass_over(2);
    assert_eq!(copies.oldest(), Some(1), "only the oldest is passed over");
    copies.pass_over(1);
    assert!(!copies.take_oldest(1), "another folio is the oldest");
    for base in [2, 3, 1] {
        assert_eq!(copies.oldest(), Some(base));
        assert!(copies.take_oldest(base));
    }
    assert_eq!(copies.oldest(), None);
}

/// Goal: the budget never falls below the copies that show whether more would pay.
#[test]
fn a_few_copies_always_stay() {
    let copies = Copies::new();
    for _ in 0..100 {
        copies.ledger.near.store(1000, Relaxed);
        copies.ledger.loads.store(1000, Relaxed);
        copies.ledger.wait_ns.store(1000 * FAULT_NS, Relaxed);
        copies.review(SIZES, Lately::default());
    }
    assert_eq!(copies.budget.load(Relaxed), super::BUDGET_MIN);
}
