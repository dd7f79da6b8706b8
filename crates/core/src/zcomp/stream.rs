//! One CPU's codec state and buffer, and how a caller comes to hold one.
//!
//! # Invariants
//!
//! - `ZC-5` The buffer of a compress stream is cut into equal places of [`compressed_bytes_max`] bytes, at
//!   least `batch_max` and at most `BATCH_MAX`; a job has one of them to itself until it is told.
//!
//! # Concurrency
//!
//! The CPU's number is a hint: where to look first. A thread may migrate the moment after it has asked, there may
//! be more CPUs than streams, or gaps between their numbers; what keeps a stream to one thread is its lock alone.
//! `make loom` tries every order. [`Streams::hold`] never waits while any stream is free. A thread holds at most one
//! stream of a rank, so the second try of an equal rank that `SYNC-1` asks about can't arise.
//!
//! # Cost
//!
//! There are as many streams as CPUs, and a process has few threads that compress at once. So a stream is touched only
//! once all that were used before are taken: on a machine with 64 CPUs the memory of two or three is resident.

use super::backend::{Answer, BATCH_MAX, Compressor, Corrupt, Decompressor, Job, Unpack};
use super::sample::is_incompressible;
use super::{Element, Extent, Outcome, Packed, compressed_bytes_max};
#[cfg(not(all(test, feature = "loom")))]
use crate::sync::{Guard, Mutex};
#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
#[cfg(all(test, feature = "loom"))]
use loom_lock::{Guard, Mutex};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A stream and its lock, on cache lines of their own: 128 B, since processors fetch lines of 64 B
/// in pairs.
#[repr(align(128))]
struct Lane<const RANK: u8, T>(Mutex<RANK, T>);

/// The streams of one direction.
pub(super) struct Streams<const RANK: u8, T> {
    lanes: Box<[Lane<RANK, T>]>,
    /// How many of them were ever held, from the first one on; 1 before that.
    used: AtomicUsize,
    /// The memory of one.
    stream_bytes: usize,
}

impl<const RANK: u8, T> Streams<RANK, T> {
    /// These `streams`, at least one, each of which takes `stream_bytes`.
    pub(super) fn new(streams: impl IntoIterator<Item = T>, stream_bytes: usize) -> Self {
        let lanes: Box<[_]> = streams.into_iter().map(|one| Lane(Mutex::new(one))).collect();
        assert!(!lanes.is_empty(), "a codec needs a stream");
        Streams { lanes, used: AtomicUsize::new(1), stream_bytes }
    }

    /// The stream of `cpu` among those that were used before; if that is taken another of these; if none is free one
    /// that was never used; if there is none the first, after its holder.
    pub(super) fn hold(&self, cpu: usize) -> Guard<'_, RANK, T> {
        let used = self.used.load(Relaxed);
        let first = cpu % used;
        let order = (first..used).chain(0..first).chain(used..self.lanes.len());
        for index in order {
            if let Some(stream) = self.lanes[index].0.try_lock() {
                if index >= used {
                    self.used.fetch_max(index + 1, Relaxed);
                }
                return stream;
            }
        }
        self.lanes[first].0.lock()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// The memory of those that were used.
    pub(super) fn used_bytes(&self) -> usize {
        self.used.load(Relaxed) * (size_of::<Lane<RANK, T>>() + self.stream_bytes)
    }
}

/// Data that a stream compresses before it tells, if units are smaller: then whoever keeps the results works
/// on several at once, and need not wait for memory one by one.
const GROUP_BYTES: usize = 64 << 10;

/// Codec state and output buffer of one CPU.
pub(super) struct CompressStream {
    compressor: Box<dyn Compressor>,
    /// `ZC-5`.
    buffer: Box<[u8]>,
    place_bytes: usize,
    batch_max: usize,
}

impl CompressStream {
    pub(super) fn new(
        compressor: Box<dyn Compressor>,
        batch_max: usize,
        unit_bytes: usize,
    ) -> Self {
        assert!((1..=BATCH_MAX).contains(&batch_max), "{batch_max}");
        let place_bytes = compressed_bytes_max(unit_bytes);
        let places = (GROUP_BYTES / unit_bytes).clamp(batch_max, BATCH_MAX);
        let buffer = vec![0; place_bytes * places].into_boxed_slice();
        CompressStream { compressor, buffer, place_bytes, batch_max }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.buffer.len() + self.compressor.memory_bytes()
    }

    /// Compresses the `sources`, and tells each outcome once.
    pub(super) fn compress(&mut self, sources: &[&[u8]], each: &mut dyn FnMut(&[Element<'_>])) {
        let mut sources = sources.iter().copied().enumerate();
        loop {
            let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
            let mut count = 0;
            for dest in self.buffer.chunks_exact_mut(self.place_bytes) {
                let Some((index, source)) = next_for_codec(&mut sources, each) else { break };
                jobs[count] = Job { index, source, dest, answer: Answer::Failed };
                count += 1;
            }
            if count == 0 {
                return;
            }
            let jobs = &mut jobs[..count];
            jobs.chunks_mut(self.batch_max).for_each(|batch| work(&mut *self.compressor, batch));
            let mut told = [Element { index: 0, outcome: Outcome::Failed }; BATCH_MAX];
            for (told, job) in told.iter_mut().zip(&*jobs) {
                *told = Element { index: job.index, outcome: outcome(job) };
            }
            each(&told[..count]);
        }
    }
}

/// Has one batch compressed, and waits for it.
pub(super) fn work(compressor: &mut dyn Compressor, batch: &mut [Job<'_>]) {
    // SAFETY: from here to the end of the loop only `poll`, with the same jobs, and `wait` are called: both borrows
    // are this function's. They keep `source` and `dest` in place, and everybody else from writing them.
    unsafe { compressor.submit(batch) };
    while !compressor.poll(batch) {
        compressor.wait();
    }
}

/// Has one batch decompressed, and waits for it.
pub(super) fn unpack(decompressor: &mut dyn Decompressor, batch: &mut [Unpack<'_>]) {
    // SAFETY: as in work(): only `poll`, with the same jobs, and `wait` are called until `poll` returns true, and
    // both borrows are this function's for that long.
    unsafe { decompressor.submit(batch) };
    while !decompressor.poll(batch) {
        decompressor.wait();
    }
}

/// The next source that the codec must see; those before it are told.
fn next_for_codec<'a>(
    sources: &mut impl Iterator<Item = (usize, &'a [u8])>,
    each: &mut dyn FnMut(&[Element<'_>]),
) -> Option<(usize, &'a [u8])> {
    sources.find(|(index, source)| {
        if is_incompressible(source) {
            each(&[Element { index: *index, outcome: Outcome::Incompressible }]);
            return false;
        }
        true
    })
}

fn outcome<'a>(job: &'a Job<'_>) -> Outcome<'a> {
    match job.answer {
        // ZC-3: a length that a device reports is checked, and not believed.
        Answer::Compressed(bytes) if (1..=job.dest.len()).contains(&bytes) => {
            Outcome::Compressed(&job.dest[..bytes])
        }
        Answer::Incompressible => Outcome::Incompressible,
        Answer::Compressed(_) | Answer::Failed => Outcome::Failed,
    }
}

/// Codec state of one CPU, and a unit's room for what goes to several places.
pub(super) struct DecompressStream {
    decompressor: Box<dyn Decompressor>,
    /// One unit. Not touched, so not resident, before a destination is in pieces, or a prefix.
    scratch: Box<[u8]>,
    batch_max: usize,
}

impl DecompressStream {
    pub(super) fn new(
        decompressor: Box<dyn Decompressor>,
        batch_max: usize,
        unit_bytes: usize,
    ) -> Self {
        assert!((1..=BATCH_MAX).contains(&batch_max), "{batch_max}");
        let scratch = vec![0; unit_bytes].into_boxed_slice();
        DecompressStream { decompressor, scratch, batch_max }
    }

    /// Decompresses whole units, in batches of what the backend works on at once.
    pub(super) fn unpack(&mut self, units: &mut [Unpack<'_>]) {
        units.chunks_mut(self.batch_max).for_each(|batch| unpack(&mut *self.decompressor, batch));
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.scratch.len() + self.decompressor.memory_bytes()
    }

    /// Decompresses a unit again, without a device.
    pub(super) fn decompress_by_software(
        &mut self,
        source: &[u8],
        dest: &mut [u8],
    ) -> Result<(), Corrupt> {
        self.decompressor.decompress_by_software(source, dest)
    }

    /// Decompresses one element, in place where its destination is in one piece.
    pub(super) fn decompress(&mut self, packed: &mut Packed<'_, '_>) -> Result<(), Corrupt> {
        if let (Extent::Whole, [dest]) = (packed.extent, &mut *packed.dest) {
            return self.decompressor.decompress(packed.source, dest);
        }
        let wanted = packed.dest_bytes();
        match packed.extent {
            Extent::Whole => {
                let unit = self.scratch.get_mut(..wanted).ok_or(Corrupt)?;
                self.decompressor.decompress(packed.source, unit)?;
            }
            Extent::Prefix if wanted <= self.scratch.len() => {
                let unit = &mut self.scratch;
                self.decompressor.decompress_prefix(packed.source, unit, wanted)?;
            }
            Extent::Prefix => return Err(Corrupt),
        }
        let mut rest = &*self.scratch;
        for piece in &mut *packed.dest {
            let (bytes, more) = rest.split_at(piece.len());
            piece.copy_from_slice(bytes);
            rest = more;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

/// [`crate::sync::Mutex`] as loom has it.
#[cfg(all(test, feature = "loom"))]
mod loom_lock {
    use std::ops::{Deref, DerefMut};

    #[derive(Debug)]
    pub(crate) struct Mutex<const RANK: u8, T>(loom::sync::Mutex<T>);

    pub(crate) struct Guard<'a, const RANK: u8, T>(loom::sync::MutexGuard<'a, T>);

    impl<const RANK: u8, T> Mutex<RANK, T> {
        pub(super) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(super) fn lock(&self) -> Guard<'_, RANK, T> {
            Guard(self.0.lock().expect("nothing panics"))
        }

        pub(super) fn try_lock(&self) -> Option<Guard<'_, RANK, T>> {
            self.0.try_lock().ok().map(Guard)
        }
    }

    impl<const RANK: u8, T> Deref for Guard<'_, RANK, T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<const RANK: u8, T> DerefMut for Guard<'_, RANK, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.0
        }
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    use super::Streams;

    /// Streams of both directions. A stream is a cell: loom sees to it that no two threads are in one.
    struct World {
        compress: Streams<1, Cell<u32>>,
        decompress: Streams<2, Cell<u32>>,
    }

    impl World {
        fn new(streams: usize) -> Arc<Self> {
            let cells = || (0..streams).map(|_| Cell::new(0));
            Arc::new(World {
                compress: Streams::new(cells(), 0),
                decompress: Streams::new(cells(), 0),
            })
        }
    }

    /// A stream at work, in two steps: whoever came between would be lost.
    fn work(stream: &Cell<u32>) {
        let done = stream.get();
        thread::yield_now();
        stream.set(done + 1);
    }

    fn done<const RANK: u8>(streams: &Streams<RANK, Cell<u32>>) -> u32 {
        streams.lanes.iter().map(|lane| lane.0.lock().get()).sum()
    }

    /// Goal: three threads that all believe to be on one CPU share two streams without harm, and none waits for
    /// ever. Their numbers are from before they migrated.
    #[test]
    fn loom_a_stream_has_one_holder() {
        loom::model(|| {
            let world = World::new(2);
            let others = [5, 5].map(|cpu| {
                let world = Arc::clone(&world);
                thread::spawn(move || work(&world.compress.hold(cpu)))
            });
            work(&world.compress.hold(0));
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(done(&world.compress), 3);
        });
    }

    /// Goal: a fault that interrupts a reclaim on its CPU, with the compress stream held, gets a stream, whatever
    /// faults and reclaims the other CPUs have, with one stream for all.
    #[test]
    fn loom_a_fault_interrupts_a_reclaim() {
        loom::model(|| {
            let world = World::new(1);
            let other = Arc::clone(&world);
            let other = thread::spawn(move || {
                work(&other.decompress.hold(1));
                let reclaim = other.compress.hold(1);
                work(&other.decompress.hold(1));
                work(&reclaim);
            });
            let reclaim = world.compress.hold(0);
            work(&world.decompress.hold(0));
            work(&reclaim);
            drop(reclaim);
            other.join().unwrap();
            assert_eq!((done(&world.compress), done(&world.decompress)), (2, 3));
        });
    }
}
