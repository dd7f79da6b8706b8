//! Areas over a disk that fails: for the tests that other backings pass too.
//!
//! What is to go wrong is passed on to the disk, so that it is the areas which find out. Only refusals are played
//! here.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::faulty::{Breakable, Faults};
use super::{Backing, Completion, Failure, Location, Request, Usage};
use crate::swap::disk::faulty::Faulty as Disk;
use crate::swap::{Areas, Config, KeyRoom, NewArea, SECRET_BYTES, Seal};

/// The backing.
#[derive(Clone, Debug)]
pub(crate) struct Sealed(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    faults: Faults,
    areas: Areas,
    disk: Disk,
}

impl Inner {
    /// Passes on what is to go wrong.
    fn arm(&self) {
        let (fail, damage) =
            (self.faults.fail.swap(0, Relaxed), self.faults.damage.swap(0, Relaxed));
        let is_final = self.faults.is_final.load(Relaxed);
        self.disk.break_it(|disk| {
            disk.holds = self.faults.holds.load(Relaxed);
            if fail > 0 {
                let (lasting, passing) = if is_final { (fail, 0) } else { (0, fail) };
                (disk.failed_writes, disk.short_reads) = (lasting, lasting);
                (disk.failed_reads, disk.busy) = (passing / 2, passing - passing / 2);
            }
            if damage > 0 {
                let by_kind = [&mut disk.replayed, &mut disk.flipped, &mut disk.misplaced];
                let kind = damage % by_kind.len();
                // What does not open is read once more.
                by_kind.into_iter().enumerate().for_each(|(at, count)| {
                    *count = if at == kind { 2 * damage } else { 0 };
                });
            }
        });
    }
}

impl Breakable for Sealed {
    fn new(bytes_max: usize) -> Sealed {
        let areas = Areas::new(Config {
            object_bytes_max: 64 << 10,
            buffer_bytes: 8 << 20,
            limit_bytes: bytes_max as u64,
        });
        let disk = Disk::new(bytes_max as u64);
        disk.break_it(|disk| disk.is_prompt = true);
        let new = NewArea {
            disk: Box::new(disk.clone()),
            slots: 1 << 14,
            priority: 0,
            seal: Seal::new(Box::new(Box::<KeyRoom>::default()), &mut [7; SECRET_BYTES]),
        };
        areas.add(new).expect("the first");
        Sealed(Arc::new(Inner { faults: Faults::default(), areas, disk }))
    }

    fn faults(&self) -> &Faults {
        &self.0.faults
    }

    fn behave(&self) {
        self.0.faults.behave();
        self.0.disk.behave();
    }

    fn locations(&self) -> usize {
        usize::try_from(self.0.areas.stats().objects).expect("few")
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.0.areas.stats().bytes).expect("few")
    }
}

impl Backing for Sealed {
    fn submit(&self, requests: &mut [Request<'_>]) {
        self.0.arm();
        for request in requests {
            if !self.0.faults.refuses(request) {
                self.0.areas.submit(std::slice::from_mut(request));
            }
        }
    }

    fn flush(&self) {
        self.0.areas.flush();
    }

    fn tidy(&self) {
        self.0.areas.tidy();
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.0.arm();
        self.0.areas.poll(&mut |completion| {
            if completion.result == Err(Failure::Final) {
                // Of a write it does no harm: the entry stays in the pool.
                self.0.faults.hurts(completion.token);
            }
            each(completion);
        });
    }

    fn usage(&self) -> Usage {
        self.0.areas.usage()
    }

    fn discard(&self, location: Location, length: usize) {
        self.0.areas.discard(location, length);
    }

    fn pause(&self) {
        self.0.faults.holds.store(false, Relaxed);
        self.0.areas.pause();
    }
}
