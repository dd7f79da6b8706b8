//! Compaction: what it gains, where it stops, whom it disturbs.

use super::*;

/// Goal: compaction gains what `freeable_pages` says, and the bytes stay. Method: three of four objects
/// of each zspage are freed; a pinned object stays where it is meanwhile.
#[test]
fn compaction_gives_pages_back() {
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), unit(2));
    let mut kept = Vec::new();
    let mut random = Random(seed() | 1);
    for tag in 0..4000_u64 / FEWER as u64 {
        let data = bytes(tag, 200 + 300 * random.below(8));
        let handle = pool.store(&data).expect("the world has memory");
        kept.push((handle, data));
    }
    let mut number = 0;
    kept.retain(|(handle, _)| {
        number += 1;
        if number % 4 != 0 {
            pool.free(*handle);
        }
        number % 4 == 0
    });
    pool.trim();
    let (before, freeable) = (pool.stats(), pool.freeable_pages());
    assert!(freeable as u64 > before.pages_taken / 2, "three quarters are free");
    let held_before = world.pages.load(Relaxed);
    let pinned = kept[0].0;
    let compacted = pool.read(pinned, |read| {
        let at = read.as_ptr();
        let compacted = pool.compact(usize::MAX);
        assert_eq!(pool.read(pinned, <[u8]>::as_ptr), at, "ZS-5");
        assert!(read == kept[0].1, "ZS-5");
        compacted
    });
    check(&pool);
    let after = pool.stats();
    assert_eq!(after.pages_compacted, compacted.pages_freed as u64);
    assert!(after.pages_taken < before.pages_taken / 2, "{before:?} {after:?}");
    let gone = held_before - world.pages.load(Relaxed);
    assert_eq!(gone as u64, before.pages_taken - after.pages_taken, "to the source");
    pool.reset_pages_compacted();
    assert_eq!(pool.stats().pages_compacted, 0, "a child of fork counts from zero");
    pool.compact(usize::MAX);
    assert_eq!(pool.freeable_pages(), 0, "nothing is pinned now");
    for (handle, data) in kept {
        pool.read(handle, |read| assert!(read == data));
        pool.free(handle);
    }
    check(&pool);
}

/// Goal: the bound of a step. Method: one byte of budget moves one object.
#[test]
fn compaction_stops_at_its_budget() {
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), unit(2));
    let handles: Vec<Handle> =
        (0..400).map(|tag| pool.store(&bytes(tag, 1000)).expect("memory")).collect();
    for handle in handles.iter().filter(|handle| handle.to_raw() % 3 != 0) {
        pool.free(*handle);
    }
    assert_eq!(pool.compact(0), crate::zsmalloc::Compacted::default());
    assert_eq!(pool.compact(1).bytes_moved, 1000);
    check(&pool);
}

/// Goal: readers, stores and frees go on while objects move. Method: three threads work on objects of
/// their own and check every byte, one compacts without end.
#[test]
fn compaction_disturbs_nobody() {
    let seed = seed();
    let world = World::new();
    let pool = Pool::new(Arc::clone(&world), unit(1));
    let working = AtomicUsize::new(3);
    let work = |thread: u64| {
        let mut random = Random(seed.wrapping_mul(8) + thread * 2 + 1);
        let mut mine: Vec<(Handle, u64)> = Vec::new();
        for step in 0..20_000 / FEWER {
            let most = if step / 1000 % 2 == 0 { 300 } else { 30 };
            if mine.len() < most && random.below(3) > 0 {
                let tag = random.next();
                let data = bytes(tag, 1 + random.below(2 * PAGE_BYTES));
                mine.push((pool.store(&data).expect("memory"), tag));
            } else if !mine.is_empty() {
                let (handle, tag) = mine[random.below(mine.len())];
                pool.read(handle, |read| assert!(read == bytes(tag, read.len()), "seed {seed}"));
                if random.below(2) == 0 {
                    mine.retain(|(other, _)| *other != handle);
                    pool.free(handle);
                }
            }
        }
        for (handle, tag) in mine {
            pool.read(handle, |read| assert!(read == bytes(tag, read.len()), "seed {seed}"));
            pool.free(handle);
        }
        working.fetch_sub(1, Relaxed);
    };
    std::thread::scope(|scope| {
        let work = &work;
        for thread in 0..3 {
            scope.spawn(move || work(thread));
        }
        scope.spawn(|| {
            while working.load(Relaxed) > 0 {
                pool.compact(64 << 10);
            }
        });
    });
    check(&pool);
    assert_eq!(pool.stats().objects, 0);
    assert!(pool.stats().pages_compacted > 0, "it had something to do");
}
