//! Every order of steps with at most three preemptions: `make loom`. (All orders take minutes,
//! since each step changes several words.)

use loom::sync::Arc;
use loom::thread;

use super::{Ledger, Owner};

const TOTAL: u64 = 64 << 20;

fn ledger() -> Arc<Ledger> {
    let ledger = Ledger::default();
    ledger.begin(1, TOTAL);
    Arc::new(ledger)
}

fn model(steps: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(steps);
}

fn owner(pid: u32) -> Owner {
    Owner { pid, namespace: 0, start_ticks: 1 }
}

/// Goal: two processes never have more than the total together, and nothing is lost. Method: both
/// take what is left of all but a few bytes; one gives back.
#[test]
fn loom_two_processes_take_no_byte_twice() {
    model(|| {
        let ledger = ledger();
        let seats = [1, 2].map(|pid| ledger.enter(owner(pid)).expect("a slot"));
        let left = u64::try_from(ledger.free_bytes()).expect("two first shares");
        let other = {
            let ledger = Arc::clone(&ledger);
            thread::spawn(move || {
                let taken = ledger.seat(seats[1]).take(left - 9, left - 9);
                ledger.seat(seats[1]).give_down_to(3);
                taken
            })
        };
        let mine = ledger.seat(seats[0]).take(left - 9, left);
        let others = other.join().expect("nothing panics");
        assert!(mine + others > 0, "one of them has it");
        assert!(ledger.free_bytes() >= 0 && ledger.missing_bytes() == 0, "LEDGER-1");
    });
}

/// Goal: two threads of one process and a target: the share is what was taken less what was given.
#[test]
fn loom_two_threads_of_a_process_change_one_share() {
    model(|| {
        let ledger = ledger();
        let index = ledger.enter(owner(1)).expect("a slot");
        let before = ledger.seat(index).share_bytes();
        let other = {
            let ledger = Arc::clone(&ledger);
            thread::spawn(move || ledger.seat(index).take(5, 5))
        };
        let given = ledger.seat(index).give_down_to(before - 7);
        let taken = other.join().expect("nothing panics");
        assert_eq!(ledger.seat(index).share_bytes(), before + taken - given);
        assert_eq!(ledger.missing_bytes(), 0, "LEDGER-1");
    });
}

/// Goal: a slot that the supervisor frees is entered by one process only, with nothing of the share
/// before.
#[test]
fn loom_a_freed_slot_has_one_new_owner() {
    model(|| {
        let ledger = ledger();
        let old = ledger.enter(owner(1)).expect("a slot");
        let other = {
            let ledger = Arc::clone(&ledger);
            thread::spawn(move || ledger.enter(owner(2)).expect("three slots"))
        };
        ledger.release(old);
        let mine = ledger.enter(owner(3)).expect("three slots");
        assert_ne!(mine, other.join().expect("nothing panics"));
        assert_eq!(ledger.missing_bytes(), 0, "LEDGER-1");
        assert_eq!(ledger.seats().count(), 2);
    });
}

/// Goal: the slot of a process that is gone is taken over by one process only, with nothing of the share before.
#[test]
fn loom_two_processes_take_over_one_slot() {
    model(|| {
        let ledger = ledger();
        let dead = ledger.enter(owner(1)).expect("a slot");
        let enter = |ledger: &Ledger, pid| {
            ledger.enter_or_take_over(owner(pid), |other| other.pid == 1).expect("three slots")
        };
        let other = {
            let ledger = Arc::clone(&ledger);
            thread::spawn(move || enter(&ledger, 2))
        };
        let mine = enter(&ledger, 3);
        let others = other.join().expect("nothing panics");
        assert!(mine != others && (mine == dead || others == dead));
        assert_eq!(ledger.missing_bytes(), 0, "LEDGER-1");
        assert_eq!(ledger.seats().count(), 2);
    });
}
