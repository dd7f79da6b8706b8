//! Every order of the steps of two threads: `make loom`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{Entrance, Gate};

const MAIN: usize = 1;
const OTHER: usize = 2;

/// What only those inside read, and only whoever has closed the gate writes: loom finds both at once.
struct Guarded {
    gate: Gate,
    value: UnsafeCell<u32>,
}

fn enter(gate: &Gate, thread: usize) {
    let mut insists = false;
    loop {
        match gate.try_enter(thread, insists) {
            Entrance::Inside => return,
            Entrance::Wanted => insists = true,
            Entrance::Closed => thread::yield_now(),
        }
    }
}

/// Goal: nobody is inside while the gate is closed (`GATE-1`), and a thread that is inside enters once more (`GATE-2`).
/// Method: one thread enters twice and reads; the other closes and writes.
#[test]
fn loom_nobody_is_inside_a_closed_gate() {
    loom::model(|| {
        let guarded = Arc::new(Guarded { gate: Gate::new(), value: UnsafeCell::new(0) });
        let other = {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || {
                enter(&guarded.gate, OTHER);
                // SAFETY: whoever writes has closed the gate, which is what is tested.
                guarded.value.with(|value| unsafe { *value });
                enter(&guarded.gate, OTHER);
                guarded.gate.leave();
                // SAFETY: the same.
                guarded.value.with(|value| unsafe { *value });
                guarded.gate.leave();
            })
        };
        while !guarded.gate.try_close(MAIN) {
            thread::yield_now();
        }
        // The one that has closed it passes.
        enter(&guarded.gate, MAIN);
        // SAFETY: nobody reads: the gate is closed.
        guarded.value.with_mut(|value| unsafe { *value += 1 });
        guarded.gate.leave();
        guarded.gate.open(MAIN);
        other.join().expect("nothing panics");
        assert!(guarded.gate.try_close(MAIN), "all have left");
    });
}

/// Goal: two threads that want to close it do so one after the other.
#[test]
fn loom_two_close_one_after_the_other() {
    loom::model(|| {
        let guarded = Arc::new(Guarded { gate: Gate::new(), value: UnsafeCell::new(0) });
        let write = |guarded: &Guarded, thread: usize| {
            while !guarded.gate.try_close(thread) {
                thread::yield_now();
            }
            // SAFETY: the gate is closed by this thread.
            guarded.value.with_mut(|value| unsafe { *value += 1 });
            guarded.gate.open(thread);
        };
        let other = {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || write(&guarded, OTHER))
        };
        write(&guarded, MAIN);
        other.join().expect("nothing panics");
        // SAFETY: the other thread has ended.
        assert_eq!(guarded.value.with(|value| unsafe { *value }), 2);
    });
}
