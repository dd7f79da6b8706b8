//! A submitter and a worker, in every order.

use loom::sync::Arc;
use loom::thread;

use super::Desk;
use crate::atomic::{AtomicU32, Ordering};
use crate::batch::{Batch, End};

/// A desk with a worker that takes what it is offered, until it has done so `offers` times or is told to stop.
struct World {
    desk: Desk<Batch>,
    batch: Batch,
    stopping: AtomicU32,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(World { desk: Desk::new(), batch: Batch::new(), stopping: AtomicU32::new(0) })
    }

    fn take_all(&self, batch: &Batch, end: End) {
        while let Some(taken) = batch.take(end) {
            taken.work(|from, to| {
                to[0] = from[0] + 1;
                1
            });
        }
    }

    /// The worker's life, without the linger.
    fn serve(&self) {
        self.desk.arrive();
        loop {
            if let Some(batch) = self.desk.next() {
                self.take_all(batch, End::Last);
                self.desk.finish();
            } else if self.stopping.load(Ordering::Relaxed) == 1 {
                return;
            } else if self.desk.will_sleep() {
                if self.stopping.load(Ordering::Relaxed) == 1 {
                    return;
                }
                self.desk.sleep();
            }
        }
    }

    /// A batch: published, offered, worked on, waited for, withdrawn.
    fn submit(&self) {
        let (from, mut to) = ([[1], [11]], [[0]; 2]);
        let jobs = from.iter().zip(&mut to).map(|(from, to)| (&from[..], &mut to[..]));
        // SAFETY: the bytes are this function's, which leaves them alone until the batch is done.
        let count = unsafe { self.batch.publish(jobs) };
        self.desk.offer(&self.batch);
        self.take_all(&self.batch, End::First);
        while !self.batch.is_done(count) {
            thread::yield_now();
        }
        self.desk.withdraw(&self.batch);
        assert_eq!(to, [[2], [12]]);
        assert_eq!((self.batch.made(0), self.batch.made(1)), (1, 1));
    }

    fn stop(&self) {
        self.stopping.store(1, Ordering::Relaxed);
        crate::atomic::fence(Ordering::SeqCst);
        self.desk.wake();
    }
}

/// Goal: a batch is done once, whoever does it; the worker misses no wake-up and no end; and nobody is at the batch any
/// more when its owner is told so. One batch, and `swap` where a store would do: loom remembers seven values of a word,
/// and gets their order wrong beyond.
#[test]
fn loom_a_worker_helps_and_ends() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::new();
        let other = Arc::clone(&world);
        let worker = thread::spawn(move || other.serve());
        world.submit();
        while world.desk.has(&world.batch) {
            thread::yield_now();
        }
        world.stop();
        worker.join().unwrap();
    });
}
