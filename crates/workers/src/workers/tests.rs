//! Goal: with a crew a codec does what it does without one, whatever the workers do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use zfolio_core::page::UnitOrder;
use zfolio_core::testing::{self, Random};
use zfolio_core::zcomp::{
    Algorithm, Answer, Backend, Compressor, Corrupt, Decompressor, Element, Error, Outcome, Params,
    Unpack, Zcomp, conformance, software,
};

use super::{BATCH_BYTES, Workers, with_crew};
use crate::crew::Crew;
use crate::desk::State;

const UNIT: usize = 4096;

fn unit() -> UnitOrder {
    UnitOrder::from_bytes(UNIT).expect("a unit")
}

/// Units of every kind: words, text, noise, mixtures.
fn units(random: &mut Random, count: usize) -> Vec<Vec<u8>> {
    let one = |random: &mut Random| {
        let (noise, period) = (random.below(UNIT + 1), 1 + random.below(300));
        let mut bytes = random.bytes(period).repeat(UNIT / period + 1);
        bytes.truncate(UNIT);
        let bytes_of_noise = random.bytes(noise);
        bytes[..noise].copy_from_slice(&bytes_of_noise);
        if random.below(3) == 0 {
            random.bytes(period).repeat(UNIT / period + 1)[..UNIT].to_vec()
        } else {
            bytes
        }
    };
    (0..count).map(|_| one(random)).collect()
}

/// What a codec makes of units: their compressed forms, `None` for those that do not shrink.
fn compressed(codec: &Zcomp, units: &[Vec<u8>]) -> Vec<Option<Vec<u8>>> {
    let sources: Vec<&[u8]> = units.iter().map(Vec::as_slice).collect();
    let mut made = vec![None; units.len()];
    let mut told = 0;
    codec.compress(0, &sources, &mut |elements: &[Element<'_>]| {
        for element in elements {
            told += 1;
            made[element.index] = match element.outcome {
                Outcome::Compressed(bytes) => Some(bytes.to_vec()),
                Outcome::Incompressible => None,
                Outcome::Failed => panic!("unit {} failed", element.index),
            };
        }
    });
    assert_eq!(told, units.len(), "each is told once");
    made
}

fn decompressed(codec: &Zcomp, packed: &[&[u8]]) -> Vec<Result<Vec<u8>, Corrupt>> {
    let mut buffers = vec![vec![0; UNIT]; packed.len()];
    let mut jobs: Vec<Unpack<'_>> =
        packed.iter().zip(&mut buffers).map(|(from, to)| Unpack::new(from, to)).collect();
    codec.unpack(0, &mut jobs);
    let results: Vec<_> = jobs.iter().map(|job| job.result).collect();
    results.into_iter().zip(buffers).map(|(result, bytes)| result.map(|()| bytes)).collect()
}

/// Goal: a crew keeps the promises of a backend, and the codec alone reads what it writes and the other way round.
#[test]
fn a_crew_keeps_the_promises_of_a_backend() {
    let threads = Crew::new(2).start().unwrap();
    for (params, unit) in [("lz4", UNIT), ("zstd", UNIT), ("zstd", 65536)] {
        let unit = UnitOrder::from_bytes(unit).unwrap();
        let alone = || software(&params.parse().unwrap(), unit).unwrap();
        let crew = Arc::clone(threads.crew());
        let together = Workers::new(alone(), unit.bytes(), crew).unwrap();
        conformance::check(&together, &[unit]).unwrap();
        conformance::check_format(&together, &*alone(), &[unit]).unwrap();
        conformance::check_format(&*alone(), &together, &[unit]).unwrap();
    }
}

/// Goal: what a crew makes is byte for byte what the codec makes alone, in both directions, while several threads use
/// one codec with a crew of three.
#[test]
fn a_crew_makes_what_the_codec_makes() {
    let seed = testing::seed();
    let threads = Crew::new(3).start().unwrap();
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let params = Params::from(algorithm);
        let alone = Zcomp::new(params.clone(), unit(), 1).unwrap();
        let together = with_crew(params, unit(), 2, threads.crew()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (alone, together) = (&alone, &together);
                scope.spawn(move || {
                    let mut random = Random::new(seed + thread);
                    for _ in 0..60 {
                        let count = 1 + random.below(24);
                        let units = units(&mut random, count);
                        let made = compressed(together, &units);
                        assert!(made == compressed(alone, &units), "seed {seed}");
                        let packed: Vec<&[u8]> = made.iter().flatten().map(Vec::as_slice).collect();
                        let found = decompressed(together, &packed);
                        let kept = units.iter().zip(&made).filter(|(_, made)| made.is_some());
                        for (at, (found, (wanted, _))) in found.iter().zip(kept).enumerate() {
                            assert!(found.as_ref() == Ok(wanted), "seed {seed}, unit {at}");
                        }
                    }
                });
            }
        });
    }
}

/// A codec that is slow, so that workers are wanted, and panics at a unit that begins with `!`. It counts its users.
#[derive(Clone, Default)]
struct Slow {
    states: Arc<AtomicUsize>,
    by_workers: Arc<AtomicUsize>,
}

struct SlowState {
    slow: Slow,
    thread: Option<std::thread::ThreadId>,
}

impl SlowState {
    fn work(&mut self, source: &[u8], dest: &mut [u8]) -> usize {
        let me = std::thread::current();
        self.thread.get_or_insert(me.id());
        if me.name() == Some("zfolio-worker") {
            self.slow.by_workers.fetch_add(1, Relaxed);
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
        assert!(source[0] != b'!', "as the test wants");
        dest[0] = source[0];
        1
    }
}

impl Compressor for SlowState {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        Answer::Compressed(self.work(source, dest))
    }

    fn memory_bytes(&self) -> usize {
        7
    }
}

impl Decompressor for SlowState {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.work(source, dest);
        Ok(())
    }

    fn memory_bytes(&self) -> usize {
        5
    }
}

impl Backend for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn compressor(&self, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        self.states.fetch_add(1, Relaxed);
        Ok(Box::new(SlowState { slow: self.clone(), thread: None }))
    }

    fn decompressor(&self, _unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        self.states.fetch_add(1, Relaxed);
        Ok(Box::new(SlowState { slow: self.clone(), thread: None }))
    }
}

fn slow(slow: &Slow, crew: &Arc<Crew>) -> Zcomp {
    let workers = Workers::new(Box::new(slow.clone()), UNIT, Arc::clone(crew)).expect("states");
    Zcomp::with_backend(&workers, unit(), 1).expect("a stream")
}

/// Goal: workers do work; memory is counted with theirs; and streams and crew end in any order.
#[test]
fn workers_work() {
    let codec = Slow::default();
    let threads = Crew::new(2).start().unwrap();
    let zcomp = slow(&codec, threads.crew());
    assert_eq!(codec.states.load(Relaxed), 2 * (1 + 2), "a stream's, and each worker's");
    assert!(zcomp.memory_bytes() >= 3 * (7 + 5));
    let texts = vec![b"some text ".repeat(410)[..UNIT].to_vec(); 32];
    // The first batch tells how long a unit takes.
    for _ in 0..3 {
        assert!(compressed(&zcomp, &texts).iter().all(|made| made.as_deref() == Some(b"s")));
    }
    assert!(codec.by_workers.load(Relaxed) > 0, "nobody helped");
    drop(threads);
    let made = compressed(&zcomp, &texts);
    assert!(made.iter().all(Option::is_some), "alone, without threads");
}

/// Goal: a panic of the submitter leaves no worker in its memory, one of a worker is a unit that failed, and the stream
/// goes on after both. (A release ends the process instead.)
#[test]
fn panics_leave_nothing_at_work() {
    let codec = Slow::default();
    let threads = Crew::new(1).start().unwrap();
    let zcomp = slow(&codec, threads.crew());
    let good = vec![b"good text ".repeat(410)[..UNIT].to_vec(); 8];
    compressed(&zcomp, &good);
    for at in [0, 7] {
        let mut bad = good.clone();
        bad[at][0] = b'!';
        let done = catch_unwind(AssertUnwindSafe(|| compressed(&zcomp, &bad)));
        assert!(done.is_err(), "unit {at}");
        drop(bad);
        assert!(compressed(&zcomp, &good).iter().all(|made| made.as_deref() == Some(b"g")));
    }
}

/// Goal: a process without the crew's threads, as a child of `fork` is, does all by itself.
#[test]
fn without_threads_the_submitter_works() {
    let codec = Slow::default();
    let crew = Crew::new(2);
    let zcomp = slow(&codec, &crew);
    let texts = vec![b"text ".repeat(820)[..UNIT].to_vec(); 16];
    for _ in 0..2 {
        assert!(compressed(&zcomp, &texts).iter().all(Option::is_some));
        crew.start_over();
    }
    assert_eq!(codec.by_workers.load(Relaxed), 0);
}

/// Goal: a worker without a thread, as where the system had no more of them, takes no offer from one that sleeps.
/// Method: of two workers the second one has a thread; batches that one worker is wanted for, until it has helped.
#[test]
fn a_worker_without_a_thread_keeps_nobody_asleep() {
    let codec = Slow::default();
    let crew = Crew::new(2);
    let states = |crew: &Crew| [0, 1].map(|desk: usize| crew.desks()[desk].is(State::Absent));
    let zcomp = slow(&codec, &crew);
    let texts = vec![b"text ".repeat(820)[..UNIT].to_vec(); 2];
    std::thread::scope(|scope| {
        let named = std::thread::Builder::new().name("zfolio-worker".to_owned());
        let worker = named.spawn_scoped(scope, || crew.serve(1)).unwrap();
        for _ in 0..10_000 {
            if codec.by_workers.load(Relaxed) > 0 {
                break;
            }
            compressed(&zcomp, &texts);
        }
        let helped = codec.by_workers.load(Relaxed);
        crew.wake_all();
        let before = states(&crew);
        crew.stop();
        worker.join().unwrap();
        assert!(helped > 0, "it slept on");
        assert_eq!((before, states(&crew)), ([true, false], [true; 2]));
    });
}

/// Goal: a child of `fork` offers nothing to the parent's threads, which it has not.
#[test]
fn after_a_fork_no_worker_is_there() {
    let threads = Crew::new(1).start().unwrap();
    let crew = Arc::clone(threads.crew());
    while crew.desks()[0].is(State::Absent) {
        std::thread::yield_now();
    }
    assert!(zfolio_sys::testing::in_child(|| {
        crew.start_over();
        crew.wake_all();
        crew.desks()[0].is(State::Absent)
    }));
}

/// Goal: long units go one by one, and take no memory for workers.
#[test]
fn long_units_have_no_crew() {
    let codec = Slow::default();
    let workers = Workers::new(Box::new(codec.clone()), BATCH_BYTES, Crew::new(3)).unwrap();
    assert_eq!((workers.batch_max(), codec.states.load(Relaxed)), (1, 0));
    let workers = Workers::new(Box::new(codec.clone()), BATCH_BYTES / 2, Crew::new(3)).unwrap();
    assert_eq!((workers.batch_max(), codec.states.load(Relaxed)), (2, 6));
    let workers = Workers::new(Box::new(codec), UNIT, Crew::new(0)).unwrap();
    assert_eq!(workers.batch_max(), 1);
}
