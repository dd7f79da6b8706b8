//! What the driver itself costs: no allocation, and the time per descriptor without the device's.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Release};

use common::{UNIT, unit};
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Answer, BATCH_MAX, Backend as _, Job, Unpack};
use zfolio_iaa::layout::{Descriptor, Record, opcode, status};
use zfolio_iaa::portal::{Portal, Submitted};
use zfolio_iaa::{Codes, Driver, Iaa, Settings, WorkQueue};
use zfolio_sys::clock::monotonic_ns;

/// Counts what is allocated.
struct Counting;

thread_local! {
    /// Of this thread: the test program's own thread allocates when it likes.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator, and a count.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(memory, layout) };
    }
}

/// A typical compressed page.
const PACKED_BYTES: u32 = 1400;

/// A device that needs no time: it writes a record, and no output.
#[derive(Debug)]
struct Instant;

// SAFETY: it writes the record of each descriptor, the status last, and accesses nothing else.
unsafe impl Portal for Instant {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submitted {
        let address = usize::try_from(descriptor.record).expect("64 bits");
        let record: *mut Record = with_exposed_provenance_mut(address);
        let is_compress = descriptor.opcode() == opcode::COMPRESS;
        let bytes = if is_compress { PACKED_BYTES } else { descriptor.dest_bytes_max };
        // SAFETY: the record is the device's until it has a status.
        unsafe { (*record).output_bytes = bytes };
        // SAFETY: the same.
        unsafe { (*record).bytes_completed = descriptor.source_bytes };
        // SAFETY: the same.
        let done = unsafe { &raw mut (*record).status };
        // SAFETY: a byte of the record, which driver and device access by atomic operations.
        let done = unsafe { AtomicU8::from_ptr(done) };
        done.store(status::SUCCESS, Release);
        Submitted::Accepted
    }
}

/// A driver with two queues that all CPUs share.
fn driver() -> Arc<Driver> {
    let driver = Arc::new(Driver::new(Settings::default(), vec![0; 2]));
    let queues = [1, 3].map(|device| WorkQueue {
        name: format!("wq{device}.0"),
        device,
        package: 0,
        depth: 128,
        portal: Box::new(Instant),
    });
    driver.add(queues).expect("two");
    driver
}

/// Runs batches of both directions; returns nanoseconds per descriptor of each, and the allocations.
fn measure(driver: &Arc<Driver>, rounds: u64) -> ([f64; 2], u64) {
    let backend = Iaa::new(driver, Codes::Fixed);
    let mut compressor = backend.compressor(UNIT).expect("there is memory");
    let mut decompressor = backend.decompressor(UNIT).expect("there is memory");
    let mut random = Random::new(seed());
    let units: Vec<Vec<u8>> = (0..BATCH_MAX).map(|_| unit(&mut random, UNIT)).collect();
    let mut dests = vec![vec![0; UNIT]; BATCH_MAX];
    let before = ALLOCATIONS.get();
    let start = monotonic_ns();
    for _ in 0..rounds {
        let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
        for ((job, unit), dest) in jobs.iter_mut().zip(&units).zip(&mut dests) {
            (job.source, job.dest) = (unit, dest);
        }
        // SAFETY: only `poll` is called until it is true, with the same jobs.
        unsafe { compressor.submit(&mut jobs) };
        while !compressor.poll(&mut jobs) {}
        let expected = Answer::Compressed(usize::try_from(PACKED_BYTES).expect("64 bits"));
        assert!(black_box(&jobs).iter().all(|job| job.answer == expected));
    }
    let middle = monotonic_ns();
    for _ in 0..rounds {
        let mut jobs: [Unpack<'_>; BATCH_MAX] = Default::default();
        for ((job, unit), dest) in jobs.iter_mut().zip(&units).zip(&mut dests) {
            *job = Unpack::new(&unit[..usize::try_from(PACKED_BYTES).expect("64 bits")], dest);
        }
        // SAFETY: the same.
        unsafe { decompressor.submit(&mut jobs) };
        while !decompressor.poll(&mut jobs) {}
        assert!(black_box(&jobs).iter().all(|job| job.result.is_ok()));
    }
    let end = monotonic_ns();
    let allocations = ALLOCATIONS.get() - before;
    assert_eq!(driver.global_stats().total_sw_comp_calls, 0);
    let jobs = f64::from(u32::try_from(rounds).expect("few")) * 8.0;
    let per_job = |ns: u64| f64::from(u32::try_from(ns).expect("below four seconds")) / jobs;
    ([per_job(middle - start), per_job(end - middle)], allocations)
}

#[test]
fn a_batch_allocates_nothing() {
    assert_eq!(measure(&driver(), 100).1, 0);
}

#[test]
#[ignore = "a measurement: cargo test --release -p zfolio-iaa --test overhead -- --ignored --nocapture"]
fn overhead_of_a_descriptor() {
    for _ in 0..5 {
        let [compress, decompress] = measure(&driver(), 100_000).0;
        println!("{compress:.0} ns per compression, {decompress:.0} ns per decompression");
    }
    for _ in 0..5 {
        let driver = driver();
        let both = std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(|| measure(&driver, 100_000).0));
            threads.map(|thread| thread.join().expect("it does not panic"))
        });
        let [compress, decompress] = [0, 1].map(|way| f64::midpoint(both[0][way], both[1][way]));
        println!(
            "two threads: {compress:.0} ns per compression, {decompress:.0} ns per decompression"
        );
    }
    let unit = unit(&mut Random::new(seed()), UNIT);
    let start = monotonic_ns();
    let sum = (0..100_000).fold(0, |sum, _| sum ^ zfolio_iaa::checksum::crc(black_box(&unit)));
    let ns = (monotonic_ns() - start) / 100_000;
    println!("{ns} ns per checksum of 4 KiB ({sum})");
}
