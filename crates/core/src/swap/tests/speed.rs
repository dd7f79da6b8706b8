//! What sealing and packing cost, and how much is lost at the ends of slots.
//!
//! The measurement takes the pages of a corpus, as `zfolio corpus` saves it, and compresses them: what spills is what
//! the pool has.

use std::hint::black_box;

use super::super::disk::SLOT_BYTES;
use super::super::disk::memory::Memory;
use super::super::location::Place;
use super::super::{Areas, Config, KeyRoom, NewArea, SECRET_BYTES, Seal};
use super::thirds;
use crate::page::{UnitOrder, same_filled};
use crate::store::backing::{Backing, Completed, Completion, Location, Operation, Request, Token};
use crate::testing::{Random, seed};
use crate::zcomp::{Outcome, Zcomp};
use crate::zsmalloc::world::bytes;

fn seal() -> Seal {
    Seal::new(Box::new(Box::<KeyRoom>::default()), &mut [7; SECRET_BYTES])
}

/// Areas over a disk in memory with room for these objects.
fn areas(objects: &[Vec<u8>]) -> Areas {
    let object_bytes_max = objects.iter().map(Vec::len).max().expect("there are some");
    let config = Config { object_bytes_max, buffer_bytes: 1 << 20, limit_bytes: u64::MAX };
    let bytes: usize = objects.iter().map(|object| object.len().div_ceil(8) * 10).sum();
    let slots = bytes / SLOT_BYTES + objects.len() / 4 + 2048;
    let areas = Areas::new(config);
    let new = NewArea {
        disk: Box::new(Memory::new(slots)),
        slots: u32::try_from(slots).expect("the corpus is below 256 GiB"),
        priority: 0,
        seal: seal(),
    };
    areas.add(new).expect("the first");
    areas
}

/// Writes `objects` in batches, each of which is flushed. Returns where they are.
fn write(areas: &Areas, objects: &[Vec<u8>], batch: usize) -> Vec<Location> {
    let mut locations = vec![None; objects.len()];
    let mut poll = || {
        areas.poll(&mut |Completion { token, result }| match result {
            Ok(Completed::Written(location)) => locations[token.number() as usize] = Some(location),
            result => panic!("{result:?}"),
        });
    };
    for (number, objects) in objects.chunks(batch).enumerate() {
        for (at, object) in objects.iter().enumerate() {
            let token = Token::numbered(u32::try_from(number * batch + at).expect("few"));
            let request = Request { token, operation: Operation::Write(object), refused: None };
            let mut request = [request];
            areas.submit(&mut request);
            while request[0].refused.take().is_some() {
                // All frames are on their way.
                poll();
                areas.submit(&mut request);
            }
        }
        areas.flush();
        poll();
    }
    locations.into_iter().map(|location| location.expect("it was written")).collect()
}

/// Reads objects in batches.
fn read(areas: &Areas, wanted: &[(Location, usize)], batch: usize) {
    for wanted in wanted.chunks(batch) {
        for (location, length) in wanted.iter().copied() {
            let operation = Operation::Read { location, length };
            let mut request = [Request { token: Token::numbered(0), operation, refused: None }];
            areas.submit(&mut request);
            assert_eq!(request[0].refused, None, "there is room");
        }
        areas.flush();
        let mut left = wanted.len();
        while left > 0 {
            areas.poll(&mut |Completion { result, .. }| match result {
                Ok(Completed::Read(bytes)) => {
                    black_box(bytes);
                    left -= 1;
                }
                result => panic!("{result:?}"),
            });
        }
    }
}

/// Goal: few bytes are lost in front of objects, and few objects touch two slots. Method: objects of a third of a page,
/// some of them whole pages, in batches of 32.
#[test]
fn little_is_lost_by_packing() {
    let mut objects = thirds(3200);
    objects.iter_mut().step_by(9).for_each(|object| *object = vec![7; SLOT_BYTES]);
    let areas = areas(&objects);
    let locations = write(&areas, &objects, 32);
    let bytes: usize = objects.iter().map(Vec::len).sum();
    let written = usize::try_from(areas.stats().bytes_written).expect("64 bits");
    // A batch loses half of its last slot of 13; and an eighth of a slot at most at the others' ends.
    assert!(written * 100 < bytes * 110, "{written} bytes for {bytes}");
    let slots =
        |(location, object): (&Location, &Vec<u8>)| Place::of(*location).slots(object.len()).len();
    let two = locations.iter().zip(&objects).filter(|object| slots(*object) > 1).count();
    assert!(two * 100 < objects.len() * 30, "{two} of {} objects touch two slots", objects.len());
    let wanted: Vec<_> = locations.into_iter().zip(objects.iter().map(Vec::len)).collect();
    read(&areas, &wanted, 32);
}

/// What `zcomp` makes of the pages; without those that are one word repeated.
fn compressed(pages: &[u8], algorithm: &str) -> Vec<Vec<u8>> {
    let order = UnitOrder::from_bytes(SLOT_BYTES).expect("a page");
    let zcomp = Zcomp::new(algorithm.parse().expect("an algorithm"), order, 1).expect("memory");
    let mut objects = Vec::new();
    for page in pages.chunks_exact(SLOT_BYTES).filter(|page| same_filled(page).is_none()) {
        zcomp.compress(0, &[page], &mut |elements| {
            objects.extend(elements.iter().map(|element| match element.outcome {
                Outcome::Compressed(bytes) => bytes.to_vec(),
                _ => page.to_vec(),
            }));
        });
    }
    objects
}

#[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
fn seconds(run: impl FnOnce()) -> f64 {
    let begin = std::time::Instant::now();
    run();
    begin.elapsed().as_secs_f64()
}

/// The best of five.
fn best(mut run: impl FnMut()) -> f64 {
    (0..5).map(|_| seconds(&mut run)).fold(f64::MAX, f64::min)
}

/// Prints the speed of sealing alone, and what packing loses and costs: `AREAS_FILE=corpus cargo test --release -p
/// zfolio-core areas_speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement: needs AREAS_FILE and a quiet machine"]
#[allow(clippy::cast_precision_loss, reason = "figures to be read")]
fn areas_speed() {
    const SEALS: usize = 50_000;
    let seal = seal();
    let mut slot = [3; SLOT_BYTES];
    let mut tag = seal.seal(1, 1, &mut slot);
    let mut generation = 1;
    let sealing = best(|| {
        for _ in 0..SEALS {
            generation += 1;
            tag = seal.seal(1, generation, &mut slot);
        }
    });
    let mut copy = slot;
    let opening = best(|| {
        for _ in 0..SEALS {
            copy.copy_from_slice(&slot);
            assert_eq!(seal.open(1, generation, tag, black_box(&mut copy)), Ok(()));
        }
    });
    let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e9;
    let bytes_sealed = SLOT_BYTES * SEALS;
    println!(
        "seal: {:.2} GB/s, open: {:.2} GB/s",
        rate(bytes_sealed, sealing),
        rate(bytes_sealed, opening)
    );
    let path = std::env::var("AREAS_FILE").expect("AREAS_FILE names a corpus");
    let pages = std::fs::read(&path).expect("AREAS_FILE can be read");
    for algorithm in ["lz4", "zstd", "raw"] {
        let objects = match algorithm {
            "raw" => (0..8192).map(|tag| bytes(tag, SLOT_BYTES)).collect(),
            algorithm => compressed(&pages, algorithm),
        };
        for batch in [32, 256] {
            report(algorithm, &objects, batch);
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "figures to be read")]
fn report(algorithm: &str, objects: &[Vec<u8>], batch: usize) {
    let bytes: usize = objects.iter().map(Vec::len).sum();
    let areas = areas(objects);
    let mut locations = Vec::new();
    let mut writing = f64::MAX;
    for _ in 0..4 {
        for (location, object) in locations.iter().zip(objects) {
            areas.discard(*location, object.len());
        }
        areas.flush();
        let took = seconds(|| locations = write(&areas, objects, batch));
        writing = writing.min(took);
    }
    let stats = areas.stats();
    let written = stats.bytes_written / 4;
    let mut wanted: Vec<_> = locations.iter().copied().zip(objects.iter().map(Vec::len)).collect();
    let two = wanted.iter().filter(|(at, length)| Place::of(*at).slots(*length).len() > 1).count();
    let in_order = best(|| read(&areas, &wanted, 32));
    let mut random = Random::new(seed());
    for at in (1..wanted.len()).rev() {
        wanted.swap(at, random.below(at + 1));
    }
    let alone = best(|| read(&areas, &wanted, 1));
    let count = objects.len() as f64;
    println!(
        "{algorithm:4} {} objects of {:.0} bytes, batches of {batch:3}: slots {:.3} of the bytes (a page \
         each: {:.3}), {:.1} % touch one more; pack, seal, write {:.2} GB/s; read 32 in order {:.2} us, one by one \
         {:.2} us an object; table {:.2} %",
        objects.len(),
        bytes as f64 / count,
        written as f64 / bytes as f64,
        count * SLOT_BYTES as f64 / bytes as f64,
        two as f64 * 100.0 / count,
        bytes as f64 / writing / 1e9,
        in_order * 1e6 / count,
        alone * 1e6 / count,
        stats.table_bytes as f64 * 100.0 / bytes as f64,
    );
}
