//! Tests of every backend through the batch interface.

mod speed;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::backend::{Answer, Compressor, Job, Software};
use super::conformance::contents::contents;
pub(super) use super::conformance::contents::text;
use super::conformance::guarded::Guarded;
use super::stream::CompressStream;
#[cfg(debug_assertions)]
use super::stream::Streams;
use super::{Algorithm, Element, Error, Outcome, Params, Zcomp, compressed_bytes_max};
use crate::page::{UnitOrder, same_filled};
pub(super) use crate::testing::{Random, seed};

fn unit(bytes: usize) -> UnitOrder {
    UnitOrder::from_bytes(bytes).expect("a unit's size")
}

/// An [`Outcome`] that outlives the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kept {
    Compressed(Vec<u8>),
    Incompressible,
}

pub(super) fn compress(zcomp: &Zcomp, cpu: usize, sources: &[&[u8]]) -> Vec<Kept> {
    let mut kept = vec![None; sources.len()];
    zcomp.compress(cpu, sources, &mut |elements| {
        for Element { index, outcome } in elements {
            let outcome = match *outcome {
                Outcome::Compressed(bytes) => Kept::Compressed(bytes.to_vec()),
                Outcome::Incompressible => Kept::Incompressible,
                Outcome::Failed => panic!("element {index} failed"),
            };
            assert_eq!(kept[*index].replace(outcome), None, "element {index} was reported twice");
        }
    });
    kept.into_iter().map(|outcome| outcome.expect("every element is reported")).collect()
}

/// Decompresses into a destination of `dest_bytes` between guards.
pub(super) fn decompress(
    zcomp: &Zcomp,
    source: &[u8],
    dest_bytes: usize,
) -> Result<Vec<u8>, Error> {
    let mut guarded = Guarded::new(dest_bytes, 0);
    let result = zcomp.decompress(0, source, guarded.dest_mut());
    assert!(guarded.is_intact(), "ZC-4: wrote outside of the destination");
    result.map(|()| guarded.dest().to_vec())
}

pub(super) fn zcomp(params: Params, unit_bytes: usize, streams: usize) -> Zcomp {
    Zcomp::new(params, unit(unit_bytes), streams).expect("valid parameters")
}

/// Compresses one unit, which must shrink.
pub(super) fn compressed(zcomp: &Zcomp, source: &[u8]) -> Vec<u8> {
    match compress(zcomp, 0, &[source]).remove(0) {
        Kept::Compressed(bytes) => bytes,
        other => panic!("{other:?} and not compressed"),
    }
}

fn check_round_trip(zcomp: &Zcomp, unit_bytes: usize, random: &mut Random) {
    let params = zcomp.params().expect("an algorithm of this crate");
    for (name, source) in contents(random, unit_bytes) {
        let reported = compress(zcomp, 0, &[&source]).remove(0);
        let what = || format!("{params}, {unit_bytes}, {name}, seed {}", seed());
        match (name, &reported) {
            ("random", Kept::Incompressible) => {}
            ("random", _) => panic!("{}: {reported:?}", what()),
            // High accelerations find almost no matches.
            (_, Kept::Incompressible) => assert_ne!(params.level, None, "{}", what()),
            (_, Kept::Compressed(bytes)) => {
                assert!((1..=compressed_bytes_max(unit_bytes)).contains(&bytes.len()), "ZC-3");
                let back = decompress(zcomp, bytes, unit_bytes).expect("what was compressed");
                assert!(back == source, "{}: other bytes came back", what());
            }
        }
    }
}

/// Goal: units of the sizes that the conformance test leaves out come back unchanged, and each kind of contents gets
/// its outcome. Method: every backend at its default level; every kind of contents; the bytes are compared.
#[test]
fn units_come_back_as_they_were() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        for unit_bytes in [8 << 10, 128 << 10, 2 << 20] {
            let zcomp = zcomp((*algorithm).into(), unit_bytes, 1);
            check_round_trip(&zcomp, unit_bytes, &mut random);
        }
    }
}

/// Goal: at every level and size the memory taken at set-up is enough (`ZSTD-2`). Method: the ends
/// and the middle of each range; the slowest levels with small units only.
#[test]
fn levels_from_end_to_end_come_back() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        let (low, high) = (*algorithm.levels().start(), *algorithm.levels().end());
        let levels = [low, -7, -1, 0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 16, 17, 18, 20, high];
        for level in levels.into_iter().filter(|level| algorithm.levels().contains(level)) {
            let params = Params { level: Some(level), ..(*algorithm).into() };
            for unit_bytes in [4 << 10, 16 << 10, 32 << 10, 256 << 10] {
                let slow = *algorithm != Algorithm::Lz4 && level > 9;
                if !slow || unit_bytes <= 32 << 10 {
                    check_round_trip(
                        &zcomp(params.clone(), unit_bytes, 1),
                        unit_bytes,
                        &mut random,
                    );
                }
            }
        }
    }
}

/// Goal: no unit affects the next one, not even one that did not fit. Method: the same unit is
/// compressed before and after a mixture of others; the results are equal.
#[test]
fn a_unit_compresses_alike_whatever_came_before() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        let unit_bytes = 16 << 10;
        let zcomp = zcomp((*algorithm).into(), unit_bytes, 1);
        let source = text(&mut random, unit_bytes);
        let first = compressed(&zcomp, &source);
        for (_, other) in contents(&mut random, unit_bytes) {
            compress(&zcomp, 0, &[&other]);
            let again = compressed(&zcomp, &source);
            let back = decompress(&zcomp, &again, unit_bytes).expect("what was compressed");
            assert!(back == source && again.len() == first.len(), "{algorithm}, seed {}", seed());
        }
    }
}

/// Goal: an element that does not shrink does not affect its neighbours. Method: a batch compared
/// with each of its elements alone.
#[test]
fn a_batch_equals_its_elements_alone() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        let unit_bytes = 4 << 10;
        let zcomp = zcomp((*algorithm).into(), unit_bytes, 1);
        let units: Vec<_> = (0..3).flat_map(|_| contents(&mut random, unit_bytes)).collect();
        let batch: Vec<&[u8]> = units.iter().map(|(_, unit)| unit.as_slice()).collect();
        let together = compress(&zcomp, 0, &batch);
        let alone: Vec<_> =
            batch.iter().map(|source| compress(&zcomp, 0, &[source]).remove(0)).collect();
        assert!(together == alone, "{algorithm}, seed {}", seed());
        assert!(together.contains(&Kept::Incompressible));
        assert_eq!(compress(&zcomp, 0, &[]), []);
    }
}

/// A backend that compresses `batch_max` units at once. For each it writes the first byte of the
/// unit, and how many units were in the same call. A first byte of 0xFF is incompressible.
/// It works in `poll`, when that is called the third time.
struct Model(usize);

impl Compressor for Model {
    fn compress_unit(&mut self, _source: &[u8], _dest: &mut [u8]) -> Answer {
        unreachable!("it has batches of its own")
    }

    #[allow(unsafe_code, reason = "as the trait declares it; what it does is safe")]
    unsafe fn submit(&mut self, _jobs: &mut [Job<'_>]) {
        assert_eq!(self.0, 0, "one batch after the other");
        self.0 = 3;
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        self.0 -= 1;
        if self.0 > 0 {
            return false;
        }
        let together = u8::try_from(jobs.len()).expect("at most BATCH_MAX");
        for job in jobs {
            job.dest[..2].copy_from_slice(&[job.source[0], together]);
            job.answer =
                if job.source[0] == 0xFF { Answer::Incompressible } else { Answer::Compressed(2) };
        }
        true
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

static MODEL: Software = Software {
    name: "model",
    levels: 0..=0,
    level_default: 0,
    batch_max: 4,
    compressor: |_, _| Ok(Box::new(Model(0))),
    decompressor: || Err(Error::OutOfMemory { codec: "model" }),
    extended: None,
};

/// Goal: a backend of more than one unit at once gets full batches without random units, and every
/// element gets its own outcome. Method: a model backend; 14 units, of which 3 are random and one
/// is refused. 11 reach the backend, as 4 + 4 + 3, and the first two batches
/// are reported together.
#[test]
fn a_backend_gets_full_batches() {
    let mut random = Random::new(seed());
    let units: Vec<Vec<u8>> = (0..14_u8)
        .map(|index| match index {
            2 | 3 | 7 => random.bytes(4096),
            9 => vec![0xFF; 4096],
            _ => vec![index; 4096],
        })
        .collect();
    let sources: Vec<&[u8]> = units.iter().map(Vec::as_slice).collect();
    let mut reported = vec![None; 14];
    let model = (MODEL.compressor)(0, 4096).expect("a model needs nothing");
    let mut stream = CompressStream::new(model, MODEL.batch_max, 4096);
    let mut groups = Vec::new();
    stream.compress(&sources, &mut |elements| {
        groups.push(elements.len());
        for &Element { index, outcome } in elements {
            let before = reported[index].replace(match outcome {
                Outcome::Compressed(bytes) => {
                    assert_eq!(usize::from(bytes[0]), index);
                    bytes[1]
                }
                Outcome::Incompressible => 200,
                Outcome::Failed => panic!("element {index} failed"),
            });
            assert_eq!(before, None);
        }
    });
    assert_eq!(groups, [1, 1, 1, 8, 3], "the random ones alone, the others in twos of batches");
    let reported: Vec<u8> =
        reported.into_iter().map(|reported| reported.expect("reported")).collect();
    assert_eq!(reported, [4, 4, 200, 200, 4, 4, 4, 200, 4, 200, 4, 3, 3, 3]);
}

/// Goal: `ZC-4` for input that was cut or extended. Method: every length from 0 to 64, then random
/// ones; then appended bytes; then shorter and longer destinations.
#[test]
fn cut_and_lengthened_input_is_an_error() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        for unit_bytes in [4 << 10, 64 << 10, 256 << 10] {
            let zcomp = zcomp((*algorithm).into(), unit_bytes, 1);
            let source = text(&mut random, unit_bytes);
            let whole = compressed(&zcomp, &source);
            let cuts = (0..64).chain((0..100).map(|_| random.below(whole.len())));
            for cut in cuts.chain([whole.len() - 1]) {
                let result = decompress(&zcomp, &whole[..cut], unit_bytes);
                assert!(result.is_err(), "{algorithm} accepts {cut} of {} bytes", whole.len());
            }
            for more in [1, 2, 7, 4096] {
                let mut longer = whole.clone();
                longer.resize(whole.len() + more, 0x5A);
                let result = decompress(&zcomp, &longer, unit_bytes);
                assert!(result.is_err(), "{algorithm} accepts {more} bytes more");
            }
            for dest_bytes in [0, 1, unit_bytes / 2, unit_bytes - 1, unit_bytes + 1, 2 * unit_bytes]
            {
                let result = decompress(&zcomp, &whole, dest_bytes);
                let (codec, source_bytes) = (algorithm.name(), whole.len());
                assert_eq!(result, Err(Error::Corrupt { codec, source_bytes, dest_bytes }));
            }
        }
    }
}

/// Goal: threads can share fewer streams. Method: 4 threads on 2 streams compress and decompress
/// units of their own; each is compared.
#[test]
fn threads_share_streams() {
    for algorithm in Algorithm::ALL {
        let unit_bytes = 4 << 10;
        let zcomp = zcomp((*algorithm).into(), unit_bytes, 2);
        let compressed_units = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let (zcomp, compressed_units) = (&zcomp, &compressed_units);
                scope.spawn(move || {
                    let mut random = Random::new(seed() + thread as u64);
                    for round in 0..100 {
                        let source = text(&mut random, unit_bytes);
                        let reported = compress(zcomp, thread + round, &[&source, &source]);
                        assert!(reported[0] == reported[1]);
                        let Kept::Compressed(bytes) = &reported[0] else {
                            panic!("{:?}", reported[0])
                        };
                        let mut dest = vec![0; unit_bytes];
                        zcomp.decompress(thread, bytes, &mut dest).expect("what was compressed");
                        assert!(dest == source, "{algorithm}, seed {}", seed());
                        compressed_units.fetch_add(1, Relaxed);
                    }
                });
            }
        });
        assert_eq!(compressed_units.into_inner(), 400);
    }
}

/// Goal: a caller waits only if no stream is free, and a stream is used only once all that were used before are taken.
/// Method: one thread holds three streams, one after the other; a wait would break `SYNC-1` and panic.
#[test]
#[cfg(debug_assertions)]
fn a_taken_stream_is_passed_over() {
    let streams = Streams::<7, usize>::new(0..3, 1000);
    let one = streams.used_bytes();
    assert!((1000..1300).contains(&one), "{one}");
    for cpu in [0, 1, 2, 63] {
        assert_eq!(*streams.hold(cpu), 0);
    }
    assert_eq!(streams.used_bytes(), one);
    let [first, second, third] = [4, 1, 1].map(|cpu| streams.hold(cpu));
    assert_eq!((*first, *second, *third), (0, 1, 2));
    drop(second);
    assert_eq!(*streams.hold(0), 1);
    drop((first, third));
    assert_eq!([4, 5, 6].map(|cpu| *streams.hold(cpu)), [1, 2, 0]);
    assert_eq!(streams.used_bytes(), 3 * one);
}

/// Goal: a fault may decompress while the compress stream of its CPU is held. Method: decompress
/// from within `each`, with one stream; it neither waits nor breaks `SYNC-1`.
#[test]
fn a_fault_may_interrupt_a_reclaim() {
    let mut random = Random::new(seed());
    for algorithm in Algorithm::ALL {
        let zcomp = zcomp((*algorithm).into(), 4096, 1);
        let source = text(&mut random, 4096);
        let mut dest = vec![0; 4096];
        zcomp.compress(0, &[&source], &mut |elements| {
            let Outcome::Compressed(bytes) = elements[0].outcome else { panic!("{elements:?}") };
            zcomp.decompress(0, bytes, &mut dest).expect("what was compressed");
        });
        assert!(dest == source);
    }
}

/// Goal: `same_filled` agrees with the naive definition. Method: each single byte changed.
#[test]
fn same_filled_agrees_with_its_definition() {
    let naive = |unit: &[u8]| unit.chunks(8).all(|word| word == &unit[..8]);
    let mut unit = 0x1122_3344_5566_7788_u64.to_ne_bytes().repeat(512);
    assert_eq!(same_filled(&unit), Some(0x1122_3344_5566_7788));
    for at in 0..unit.len() {
        unit[at] ^= 0x10;
        assert_eq!(same_filled(&unit).is_some(), naive(&unit), "byte {at} changed");
        unit[at] ^= 0x10;
    }
    assert_eq!(same_filled(&[]), None);
    assert_eq!(same_filled(&[1; 8]), Some(0x0101_0101_0101_0101));
    assert_eq!(same_filled(&[1; 12]), None);
}

/// Goal: the memory of a stream counts once it is used. Method: with 64 streams it is that of one, which is more than
/// its buffers, and of two once a unit was compressed while another was.
#[test]
fn memory_grows_with_use() {
    for algorithm in Algorithm::ALL {
        let [one, many] = [1, 64].map(|streams| {
            let zcomp = zcomp((*algorithm).into(), 64 << 10, streams);
            assert_eq!(zcomp.batch_max(), 1);
            zcomp.memory_bytes()
        });
        assert_eq!(one, many, "{algorithm}");
        assert!(one > compressed_bytes_max(64 << 10) + (16 << 10), "{algorithm}: {one}");
    }
    let zcomp = zcomp(Algorithm::Zstd.into(), 4 << 10, 64);
    let (one, unit) = (zcomp.memory_bytes(), text(&mut Random::new(seed()), 4 << 10));
    let other = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for cpu in [0, 1] {
            let (zcomp, unit, other) = (&zcomp, &unit, &other);
            scope.spawn(move || {
                zcomp.compress(cpu, &[unit], &mut |_| {
                    other.wait();
                })
            });
        }
    });
    assert!(zcomp.memory_bytes() > one + compressed_bytes_max(64 << 10), "{one}");
}
