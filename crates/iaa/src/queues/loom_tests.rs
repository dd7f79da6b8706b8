//! The table in every order of steps. loom's cell panics if a queue is taken away while somebody uses it.

use loom::sync::Arc;
use loom::thread;

use super::{Direction, Fate, Queue, Queues};
use crate::layout::Descriptor;
use crate::portal::{Portal, Submitted};

#[derive(Debug)]
struct Nowhere;

#[allow(unsafe_code, reason = "a portal to nowhere")]
// SAFETY: it accesses nothing.
unsafe impl Portal for Nowhere {
    unsafe fn submit(&self, _descriptor: &Descriptor) -> Submitted {
        Submitted::Full
    }
}

fn queue(device: usize) -> Queue {
    Queue { name: String::new(), device, package: 0, portal: Box::new(Nowhere) }
}

fn world(depth: u32) -> Arc<Queues> {
    let queues = Queues::new(1, 1);
    queues.install(queue(0), depth).expect("there is room");
    queues.assign(0, [1, 1]);
    Arc::new(queues)
}

/// Submits one job, if there is a queue for it.
fn submit(queues: &Queues) -> bool {
    let Ok(ticket) = queues.next(0, Direction::Compress) else { return false };
    queues.with_portal(&ticket, |portal| assert_eq!(format!("{portal:?}"), "Nowhere"));
    queues.give_back(ticket);
    true
}

/// Goal: while two threads submit, the table is rebuilt: the queue leaves, and another one comes in its place.
#[test]
fn loom_a_queue_leaves_under_submitters() {
    loom::model(|| {
        let queues = world(4);
        let others = [0, 1].map(|_| {
            let queues = Arc::clone(&queues);
            thread::spawn(move || submit(&queues))
        });
        queues.sweep(|queue| Fate::when(queue.device == 0, Fate::Leaves));
        let is_replaced = queues.install(queue(1), 4).is_ok();
        others.into_iter().for_each(|other| _ = other.join().unwrap());
        assert_eq!(queues.in_flight(), 0);
        assert_eq!(queues.sweep(|_| Fate::Stays).len(), usize::from(is_replaced));
        assert_eq!(submit(&queues), is_replaced);
    });
}

/// Goal: while a thread submits, the queue is disabled and back: the new one is used at once in another cell, and the
/// old one is dropped when nobody uses it.
#[test]
fn loom_a_queue_is_back_under_a_submitter() {
    loom::model(|| {
        let queues = Arc::new(Queues::new(1, 2));
        queues.install(queue(0), 1).expect("there is room");
        queues.assign(0, [0b11; 2]);
        let other = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || submit(&queues))
        };
        queues.sweep(|_| Fate::IsGone);
        queues.install(queue(0), 1).expect("its name is free, whoever uses the old one");
        other.join().unwrap();
        assert_eq!(queues.in_flight(), 0);
        assert_eq!(queues.sweep(|_| Fate::Stays).len(), 1);
        assert!(submit(&queues));
    });
}

/// Goal: a job is given up while its queue is disabled: its ticket goes back, now or by the next sweep, and the place
/// is free for another queue.
#[test]
fn loom_a_lost_job_keeps_no_place() {
    loom::model(|| {
        let queues = world(1);
        let ticket = queues.next(0, Direction::Compress).expect("it is open");
        let other = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || {
                queues.with_portal(&ticket, |portal| assert_eq!(format!("{portal:?}"), "Nowhere"));
                queues.abandon(ticket);
            })
        };
        queues.sweep(|_| Fate::IsGone);
        let is_early = queues.install(queue(1), 1).is_ok();
        other.join().unwrap();
        queues.sweep(|_| Fate::Stays);
        assert!(is_early || queues.install(queue(1), 1).is_ok(), "there is room");
        assert_eq!(queues.in_flight(), 0);
        assert!(submit(&queues));
    });
}

/// Goal: a queue of one never has two jobs, and one that a submitter closes is swept once.
#[test]
fn loom_a_queue_is_never_overrun() {
    loom::model(|| {
        let queues = world(1);
        let others = [0, 1].map(|_| {
            let queues = Arc::clone(&queues);
            thread::spawn(move || queues.next(0, Direction::Compress).ok())
        });
        let tickets: Vec<_> = others.into_iter().flat_map(|it| it.join().unwrap()).collect();
        assert!(tickets.len() <= 1, "{tickets:?}");
        for ticket in tickets {
            queues.close(&ticket);
            queues.give_back(ticket);
        }
        assert_eq!(queues.in_flight(), 0);
    });
}
