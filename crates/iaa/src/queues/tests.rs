//! The table with one thread, and with queues that vanish under many.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Direction, Fate, NoTicket, Queue, Queues, Refused};
use crate::layout::Descriptor;
use crate::portal::{Portal, Submitted};
use crate::stats::Count;

/// A portal that counts how many of its kind there are.
#[derive(Debug)]
struct Counted(Arc<AtomicU64>);

impl Counted {
    fn queue(alive: &Arc<AtomicU64>, device: usize) -> Queue {
        alive.fetch_add(1, Relaxed);
        let portal = Box::new(Counted(Arc::clone(alive)));
        Queue { name: format!("wq{device}.0"), device, package: 0, portal }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[allow(unsafe_code, reason = "a portal to nowhere")]
// SAFETY: it accesses nothing.
unsafe impl Portal for Counted {
    unsafe fn submit(&self, _descriptor: &Descriptor) -> Submitted {
        assert!(self.0.load(Relaxed) > 0, "used after it was dropped");
        Submitted::Full
    }
}

#[test]
fn tickets_go_round_and_end_at_the_depth() {
    let alive = Arc::default();
    let queues = Queues::new(2, 4);
    for device in 0..2 {
        queues.install(Counted::queue(&alive, device), 2).expect("there is room");
    }
    queues.assign(0, [0b11, 0b10]);
    let tickets: Vec<_> =
        (0..4).map(|_| queues.next(0, Direction::Compress).expect("2 queues of 2")).collect();
    let indices: Vec<u8> = tickets.iter().map(|ticket| ticket.index).collect();
    assert_eq!(indices, [0, 1, 0, 1]);
    assert_eq!(queues.next(0, Direction::Decompress).expect_err("full"), NoTicket::Full);
    assert_eq!(queues.next(1, Direction::Compress).expect_err("no queue"), NoTicket::Closed);
    assert_eq!(queues.in_flight(), 4);
    tickets.into_iter().for_each(|ticket| queues.give_back(ticket));
    assert_eq!(queues.in_flight(), 0);
}

/// Goal: a queue that leaves is dropped when its last job has ended and not before; its place is used again, and what
/// is never given back is left to the device.
#[test]
fn a_queue_leaves_after_its_last_job() {
    let alive = Arc::new(AtomicU64::new(0));
    let queues = Queues::new(1, 1);
    queues.install(Counted::queue(&alive, 7), 4).expect("there is room");
    queues.assign(0, [1, 1]);
    let ticket = queues.next(0, Direction::Compress).expect("it is open");
    assert_eq!(queues.sweep(|queue| Fate::when(queue.device == 7, Fate::Leaves)), []);
    assert_eq!(queues.next(0, Direction::Compress).expect_err("it leaves"), NoTicket::Closed);
    let again = queues.install(Counted::queue(&alive, 7), 4).expect_err("it has a job");
    assert_eq!(again.to_string(), "wq7.0 is in use already");
    let more = queues.install(Counted::queue(&alive, 8), 4).expect_err("its place is taken");
    assert!(matches!(more, Refused::TooMany { .. }));
    assert_eq!(alive.load(Relaxed), 1, "its job is under way");
    queues.with_portal(&ticket, |portal| assert!(format!("{portal:?}").contains("Counted")));
    queues.give_back(ticket);
    assert_eq!(queues.sweep(|_| Fate::Stays), []);
    assert_eq!(alive.load(Relaxed), 0);
    queues.install(Counted::queue(&alive, 8), 4).expect("there is room again");
    let lost = queues.next(0, Direction::Compress).expect("it is open");
    drop((lost, queues));
    assert_eq!(alive.load(Relaxed), 1, "left to the device");
}

/// Goal: a queue that the system has disabled is replaced at once by the one that comes under its name, though a job
/// was never answered; its own memory stays as long as that.
#[test]
fn a_queue_that_is_back_is_another_one() {
    let alive = Arc::new(AtomicU64::new(0));
    let queues = Queues::new(1, 3);
    queues.install(Counted::queue(&alive, 7), 1).expect("there is room");
    queues.assign(0, [0b111; 2]);
    let lost = queues.next(0, Direction::Compress).expect("it is open");
    assert!(queues.install(Counted::queue(&alive, 7), 1).is_err(), "it is in use");
    assert_eq!(queues.sweep(|_| Fate::IsGone), []);
    assert_eq!(queues.install(Counted::queue(&alive, 7), 1), Ok(1));
    assert!(queues.install(Counted::queue(&alive, 7), 1).is_err(), "the name is taken again");
    assert_eq!(alive.load(Relaxed), 2);
    let ticket = queues.next(0, Direction::Compress).expect("the new one is empty");
    assert_eq!((ticket.index, queues.in_flight()), (1, 2));
    queues.give_back(ticket);
    queues.give_back(lost);
    assert_eq!(queues.sweep(|_| Fate::Stays).len(), 1);
    assert_eq!(alive.load(Relaxed), 1, "the old one is dropped after its job");
    let counts = [Count::WqAdded, Count::WqRemoved].map(|of| queues.total(of));
    assert_eq!(counts, [2, 1]);
    // The bits of the old one went with it: its cell is one like any other.
    assert_eq!(queues.install(Counted::queue(&alive, 8), 1), Ok(0));
    assert!(queues.install(Counted::queue(&alive, 8), 1).is_err(), "it is in use");
}

/// Goal: a queue that is gone gives its place back when nobody looks for its jobs any more, whether they were given up
/// before it went or after. One that only leaves is kept for them. Method: rounds with lost jobs, in one place.
#[test]
fn lost_jobs_keep_no_place_of_a_queue_that_is_gone() {
    let alive = Arc::new(AtomicU64::new(0));
    let queues = Queues::new(1, 1);
    for round in 0..3 {
        assert_eq!(queues.room(), 1);
        queues.install(Counted::queue(&alive, 7), 4).expect("there is room");
        queues.assign(0, [1, 1]);
        let [early, late] = [0, 1].map(|_| queues.next(0, Direction::Compress).expect("of 4"));
        assert!(!queues.is_gone(&early), "{round}: that is over");
        queues.abandon(early);
        assert_eq!((queues.sweep(|_| Fate::Leaves), queues.in_flight()), (vec![], 2));
        assert_eq!((queues.sweep(|_| Fate::IsGone), queues.in_flight()), (vec![], 1));
        assert!(queues.is_gone(&late));
        assert_eq!((alive.load(Relaxed), queues.room()), (1, 0), "its last job is waited for");
        queues.abandon(late);
        assert_eq!((queues.sweep(|_| Fate::Stays), alive.load(Relaxed)), (vec![], 0));
    }
}

/// Goal: the number of a queue is that of its name, whatever its place in the table is.
#[test]
fn a_queue_has_the_number_of_its_name() {
    let (alive, queues) = (Arc::default(), Queues::new(1, 3));
    for name in ["wq7.10", "wq7.0", "other"] {
        let queue = Queue { name: name.to_owned(), ..Counted::queue(&alive, 7) };
        queues.install(queue, 1).expect("there is room");
    }
    let placed = queues.sweep(|_| Fate::Stays);
    let found: Vec<_> = placed.iter().map(|queue| (queue.index, queue.number)).collect();
    assert_eq!(found, [(0, 10), (1, 0), (2, 0)]);
}

/// Goal: threads that submit while queues come and go never use one that is gone, and all goes back. Method: a portal
/// that knows whether it was dropped; `make loom` has the same with every order of steps.
#[test]
fn queues_come_and_go_under_submitters() {
    let alive = Arc::new(AtomicU64::new(0));
    let queues = Queues::new(3, 4);
    let done = AtomicU64::new(0);
    let fate = |it_leaves, round| Fate::when(it_leaves, [Fate::Leaves, Fate::IsGone][round % 2]);
    std::thread::scope(|scope| {
        for cpu in 0..3 {
            let (queues, done) = (&queues, &done);
            scope.spawn(move || {
                while done.load(Relaxed) == 0 {
                    let Ok(ticket) = queues.next(cpu, Direction::Compress) else { continue };
                    queues.with_portal(&ticket, |portal| {
                        #[allow(unsafe_code, reason = "a portal to nowhere")]
                        // SAFETY: `Counted` accesses nothing.
                        let submitted = unsafe { portal.submit(&Descriptor::default()) };
                        assert_eq!(submitted, Submitted::Full);
                    });
                    if cpu == 2 {
                        queues.close(&ticket);
                    }
                    queues.give_back(ticket);
                }
            });
        }
        for round in 0..20_000 {
            drop(queues.install(Counted::queue(&alive, round % 5), 2));
            let open = queues.sweep(|queue| fate(queue.device == (round + 2) % 5, round));
            let mask = open.iter().fold(0, |mask, queue| mask | 1 << queue.index);
            (0..3).for_each(|cpu| queues.assign(cpu, [mask; 2]));
        }
        done.store(1, Relaxed);
    });
    assert_eq!(queues.in_flight(), 0);
    assert_eq!(queues.sweep(|_| Fate::IsGone), []);
    assert_eq!(alive.load(Relaxed), 0);
}
