use super::{Entrance, Gate};

/// Goal: each rule of the gate, by hand. Orders of steps are tried by `loom_tests`.
#[test]
fn a_gate_closes_when_all_have_left() {
    let gate = Gate::default();
    assert_eq!(gate.try_enter(1, false), Entrance::Inside);
    assert_eq!(gate.try_enter(1, false), Entrance::Inside);
    assert!(!gate.try_close(2), "one is inside");
    assert_eq!(gate.try_enter(1, false), Entrance::Wanted, "asks for a pause");
    assert_eq!(gate.try_enter(1, true), Entrance::Inside, "GATE-2");
    for _ in 0..3 {
        assert!(!gate.try_close(2));
        gate.leave();
    }
    assert!(gate.try_close(2));
    assert!(!gate.try_close(3), "another has closed it");
    assert_eq!(gate.try_enter(1, true), Entrance::Closed, "GATE-1");
    assert_eq!(gate.try_enter(2, false), Entrance::Inside, "its own");
    gate.leave();
    gate.open(3);
    assert_eq!(gate.try_enter(1, true), Entrance::Closed, "it is not the third's to open");
    gate.open(2);
    assert_eq!(gate.try_enter(1, false), Entrance::Inside);
    gate.leave();
    assert!(gate.try_close(1));
}

/// Goal: in a child nobody is inside, and a thread that was leaves without effect.
#[test]
fn a_child_starts_with_an_open_gate() {
    let gate = Gate::new();
    assert_eq!(gate.try_enter(1, false), Entrance::Inside);
    assert!(!gate.try_close(2));
    gate.start_over();
    gate.leave();
    assert_eq!(gate.try_enter(2, false), Entrance::Inside, "no longer wanted");
    assert!(!gate.try_close(3), "one is inside, not one less than nobody");
}

/// Goal: whoever gives up waiting for the last to leave opens the gate, and those inside stay so.
#[test]
fn a_gate_that_is_given_up_is_wanted_no_more() {
    let gate = Gate::new();
    assert_eq!(gate.try_enter(1, false), Entrance::Inside);
    assert!(!gate.try_close(2));
    gate.open(2);
    assert_eq!(gate.try_enter(3, false), Entrance::Inside);
    gate.leave();
    assert!(!gate.try_close(2), "the first is inside still");
    gate.leave();
    assert!(gate.try_close(2));
}
