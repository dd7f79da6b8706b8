//! The pool against a naive model, with sources that fail, with threads, and what it costs.

mod compaction;
mod overhead;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::script;
use super::world::{Random, World, bytes, check, unit};
use super::{Handle, OutOfMemory, Pool};
use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX, UnitOrder};

impl Random {
    /// From `0..end`.
    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % end
    }

    /// 1 to `max`, each power of two about as often: many small, some very large.
    fn length(&mut self, max: usize) -> usize {
        match self.below(8) {
            0 => max,
            1 => 1,
            _ => {
                let halvings = self.below(max.ilog2() as usize);
                1 + self.below(max >> halvings)
            }
        }
    }

    /// Lengths of 4 KiB units after LZ4: a tenth incompressible, some nearly empty, the rest between
    /// 400 and 3500, most in the middle.
    fn length_lz4(&mut self) -> usize {
        match self.below(20) {
            0 | 1 => 4096,
            2..5 => 30 + self.below(271),
            _ => 400 + self.below(1500) + self.below(1600),
        }
    }
}

/// Under Miri, which is some thousand times slower, tests take so much fewer steps.
const FEWER: usize = if cfg!(miri) { 40 } else { 1 };

fn seed() -> u64 {
    let seed = std::env::var("SEED").map_or(42, |seed| seed.parse().expect("SEED is a u64"));
    println!("SEED={seed}");
    seed
}

/// Goal: the pool never disagrees with a map. Method: seeded random stores, reads and frees.
fn agrees_with_model(order: u8, seed: u64, steps: usize, objects_max: usize) {
    let unit = unit(order);
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), unit);
    let mut random = Random(seed.wrapping_mul(2) | 1);
    let mut model: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for step in 0..steps {
        let at = |random: &mut Random, model: &BTreeMap<u32, Vec<u8>>| {
            let nth = random.below(model.len().max(1));
            model.keys().nth(nth).copied()
        };
        // The target size drifts, so that zspages fill and empty.
        let target = objects_max / 2 + objects_max / 2 * (step * 8 / steps % 2);
        if model.len() < random.below(target) + target / 4 {
            let data = bytes(random.next(), random.length(unit.bytes()));
            let handle = pool.store(&data).expect("the world has memory");
            assert!(model.insert(handle.to_raw(), data).is_none(), "handle twice, seed {seed}");
        } else if let Some(raw) = at(&mut random, &model) {
            let handle = Handle::from_raw(raw).expect("never 0");
            let data = model.remove(&raw).expect("a key of the model");
            assert_eq!(pool.length(handle), data.len(), "seed {seed} step {step}");
            pool.read(handle, |read| assert!(read == data, "seed {seed} step {step}"));
            pool.free(handle);
        }
        if random.below(200) == 0 {
            pool.compact(random.below(8 * unit.bytes()));
        }
        if step % (steps / 8).max(1) == 0 {
            check(&pool);
            assert_eq!(pool.stats().objects, model.len() as u64, "seed {seed}");
        }
    }
    let stored: usize = model.values().map(Vec::len).sum();
    assert_eq!(pool.stats().bytes_stored, stored as u64, "seed {seed}");
    for (raw, data) in &model {
        let handle = Handle::from_raw(*raw).expect("never 0");
        pool.read(handle, |read| assert!(read == data, "seed {seed} handle {raw}"));
    }
    check(&pool);
    drop(pool);
    assert_eq!(world.pages.load(Relaxed), 0, "a page was kept, seed {seed}");
}

#[test]
fn pool_agrees_with_model() {
    let seed = seed();
    for (order, steps, objects) in [(0, 6000, 600), (2, 3000, 200), (4, 2000, 80), (9, 300, 10)] {
        agrees_with_model(order, seed, steps / FEWER, objects / FEWER.min(objects / 4));
    }
}

/// A seeded script for [`script::play`].
fn random_script(random: &mut Random, length: usize) -> Vec<u8> {
    bytes(random.next(), length)
}

/// Goal: no sequence of operations makes the pool disagree with a map. Method: seeded scripts, of the
/// kind that the fuzz target plays, for each unit.
#[test]
fn random_scripts_agree_with_a_map() {
    let mut random = Random(seed().wrapping_mul(2) | 1);
    for number in 0..80 / FEWER {
        let length = 100 + random.below(4000 / FEWER);
        let mut script = random_script(&mut random, length);
        script[0] = u8::try_from(number % 4).expect("below 4");
        script::play(&script);
    }
}

/// Goal: a refusal at any point loses nothing, leaks nothing, and panics nowhere. Method: the same script
/// with the first request of the source refused, the second, ... alone and with all that follow, until
/// none is.
#[test]
fn a_refusal_at_any_point_is_survived() {
    let mut random = Random(seed().wrapping_mul(2) | 1);
    for order in [0, 2, 4, 9] {
        // Operation 14 refuses by itself, and would end what is tested here.
        let mut script = random_script(&mut random, 160 / FEWER.min(4));
        script.iter_mut().filter(|byte| **byte % 16 == 14).for_each(|byte| *byte -= 14);
        let mut number = 0;
        while number < script::play_refusing(unit(order), &script, number..number + 1) {
            script::play_refusing(unit(order), &script, number..usize::MAX);
            number += 1;
        }
        println!("{}: {number} requests", unit(order));
        assert!(number > 8, "the script asks for memory");
    }
}

/// Goal: every page comes back. Method: two zspages of each class of each order, filled and freed.
#[test]
fn every_page_comes_back() {
    for order in 0..=UNIT_ORDER_MAX {
        let world = World::new();
        world.rubbish.store(false, Relaxed);
        let pool = Pool::new(Arc::clone(&world), unit(order));
        let mut handles = Vec::new();
        // Large classes are many and alike: every 16th for large units.
        for class in pool.classes.iter().step_by(if order > 4 { 16 } else { 1 }) {
            for object in 0..=class.shape().objects {
                let data = bytes(object as u64, class.shape().object_bytes);
                handles.push(pool.store(&data).expect("the world has memory"));
            }
        }
        check(&pool);
        for handle in handles {
            pool.free(handle);
        }
        check(&pool);
        let kept = pool.stats();
        assert!(kept.pages_used <= 64 + kept.pages_used_max / 128, "reserve: {kept:?}");
        pool.trim();
        check(&pool);
        let stats = pool.stats();
        assert_eq!((stats.pages_used, stats.pages_taken, stats.bytes_stored), (0, 0, 0));
        drop(pool);
        assert_eq!(world.pages.load(Relaxed), 0);
    }
}

/// Goal: what passes through a pool with a reserve takes no page from the source after the first time, and the reserve
/// stays within its bound. Method: batches within the bound, and one beyond it.
#[test]
fn a_reserve_serves_what_passes_through() {
    let world = World::new();
    let mut pool = Pool::new(Arc::clone(&world), unit(0));
    pool.may_reserve(2 << 20);
    let pass = |count: usize| {
        let stores = (0..count).map(|at| pool.store(&bytes(at as u64, PAGE_BYTES)));
        let handles: Vec<_> = stores.map(|stored| stored.expect("the world has memory")).collect();
        check(&pool);
        handles.into_iter().for_each(|handle| _ = pool.free(handle));
        check(&pool);
        world.pages.load(Relaxed)
    };
    let pages = pass(256);
    for count in [256, 200, 1, 256] {
        assert_eq!(pass(count), pages);
    }
    pass(2000);
    let kept = pool.stats();
    assert!(kept.pages_used >= 400, "{kept:?}");
    assert!(kept.pages_used <= 512 + kept.pages_used_max / 128, "{kept:?}");
    pool.trim();
    assert_eq!(pool.stats().pages_used, 0);
}

/// Goal: a refusal changes nothing. Method: the same stores, with each take in turn the last one.
#[test]
fn a_refused_take_leaves_no_trace() {
    let (seed, unit) = (seed(), unit(2));
    let lengths: Vec<usize> = {
        let mut random = Random(seed | 1);
        (0..60).map(|_| random.length(unit.bytes())).collect()
    };
    let run = |takes: usize| {
        let world = World::new();
        world.refuse(takes..usize::MAX);
        let pool = Pool::new(Arc::clone(&world), unit);
        let mut stored = Vec::new();
        let mut refused = 0;
        for (tag, length) in lengths.iter().enumerate() {
            let before = pool.stats();
            match pool.store(&bytes(tag as u64, *length)) {
                Ok(handle) => stored.push((handle, tag, *length)),
                Err(OutOfMemory { wanted_bytes }) => {
                    refused += 1;
                    assert!(wanted_bytes >= PAGE_BYTES);
                    let after = pool.stats();
                    assert_eq!(
                        (before.objects, before.pages_used, before.pages_taken),
                        (after.objects, after.pages_used, after.pages_taken)
                    );
                }
            }
        }
        check(&pool);
        let requests = world.requests.load(Relaxed);
        // Memory is back: what was refused can be stored, and nothing was damaged.
        world.refuse(0..0);
        pool.store(&[1]).expect("the world has memory again");
        for (handle, tag, length) in stored {
            pool.read(handle, |read| assert!(read == bytes(tag as u64, length), "seed {seed}"));
            pool.free(handle);
        }
        check(&pool);
        drop(pool);
        assert_eq!(world.pages.load(Relaxed), 0, "take {takes} of seed {seed}");
        (requests, refused)
    };
    let (requests, refused) = run(usize::MAX);
    assert_eq!(refused, 0);
    for takes in 0..requests {
        assert!(run(takes).1 > 0, "take {takes} was never refused, seed {seed}");
    }
}

/// Goal: threads do not disturb each other. Method: four of them store, read each other's objects
/// through a board, and free; all contents are compared and the books are balanced after.
#[test]
fn threads_agree() {
    const BOARD: usize = 64;
    let seed = seed();
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), unit(1));
    // A place of the board holds an object's handle while nobody works with it.
    let board: Vec<crate::sync::Mutex<1, Option<(Handle, u64)>>> =
        (0..BOARD).map(|_| crate::sync::Mutex::new(None)).collect();
    let work = |thread: u64| {
        let mut random = Random(seed.wrapping_mul(8) + thread * 2 + 1);
        let mut mine: Vec<(Handle, u64)> = Vec::new();
        for _ in 0..4000 / FEWER {
            let place = &board[random.below(BOARD)];
            match random.below(4) {
                0 | 1 => {
                    let tag = random.next();
                    let length = 1 + random.below(2 * PAGE_BYTES);
                    mine.push((pool.store(&bytes(tag, length)).expect("memory"), tag));
                }
                2 => {
                    let place = place.lock();
                    if let Some((handle, tag)) = *place {
                        pool.read(handle, |read| assert!(read == bytes(tag, read.len())));
                    }
                }
                _ if mine.is_empty() => {}
                _ => {
                    let object = mine.swap_remove(random.below(mine.len()));
                    let old = place.lock().replace(object);
                    if let Some((handle, tag)) = old {
                        pool.read(handle, |read| assert!(read == bytes(tag, read.len())));
                        pool.free(handle);
                    }
                }
            }
        }
        for (handle, tag) in mine {
            pool.read(handle, |read| assert!(read == bytes(tag, read.len()), "seed {seed}"));
            pool.free(handle);
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || work(thread));
        }
    });
    check(&pool);
    for place in &board {
        if let Some((handle, _)) = place.lock().take() {
            pool.free(handle);
        }
    }
    check(&pool);
    assert_eq!(pool.stats().objects, 0);
    pool.trim();
    assert_eq!(pool.stats().pages_taken, 0);
    drop(pool);
    assert_eq!(world.pages.load(Relaxed), 0);
}

#[test]
#[should_panic(expected = "ZS-3")]
fn a_second_free_panics() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    let handle = pool.store(b"once").expect("memory");
    pool.free(handle);
    pool.free(handle);
}

#[test]
#[should_panic(expected = "ZS-3")]
fn a_stale_read_panics() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    let handle = pool.store(b"once").expect("memory");
    pool.free(handle);
    pool.read(handle, <[u8]>::len);
}

#[test]
#[should_panic(expected = "no entry")]
fn a_forged_handle_panics() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    let forged = Handle::from_raw(u32::MAX).expect("not 0");
    assert_eq!(pool.length(forged), 0, "not reached");
}

#[test]
#[should_panic(expected = "ZS-5")]
fn a_free_inside_a_read_panics() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    let handle = pool.store(b"held").expect("memory");
    pool.read(handle, |_| pool.free(handle));
}

#[test]
#[should_panic(expected = "object of 0 bytes")]
fn an_empty_object_panics() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    pool.store(&[]).expect("memory");
}

/// Goal: an object may be stored from within a read of another, and reads may nest.
#[test]
fn reads_nest() {
    let pool = Pool::new(World::new(), UnitOrder::FOLIO);
    let first = pool.store(b"first").expect("memory");
    let second = pool.read(first, |read| pool.store(read).expect("memory"));
    pool.read(first, |one| {
        pool.read(first, |again| {
            pool.read(second, |two| {
                assert!(one == again && one == two);
            })
        })
    });
    check(&pool);
}

/// Goal: no trip to the source for each store at the edge of a zspage. Method: fill zspages exactly,
/// then free and store the one object more.
#[test]
fn a_boundary_does_not_thrash() {
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), UnitOrder::FOLIO);
    let data = bytes(1, 20_000);
    for _ in 0..pool.class_of(data.len()).shape().objects {
        pool.store(&data).expect("memory");
    }
    let takes = world.requests.load(Relaxed);
    for _ in 0..100 {
        let handle = pool.store(&data).expect("memory");
        pool.free(handle);
    }
    assert_eq!(world.requests.load(Relaxed), takes + 1);
    check(&pool);
}
