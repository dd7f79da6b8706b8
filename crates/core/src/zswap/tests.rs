//! The store when its pool gets no memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Checksum, Entry, Key, Reject, Zswap};
use crate::page::UnitOrder;
use crate::stats::Figures;
use crate::zcomp::{Algorithm, Zcomp};
use crate::zsmalloc::world::{World, bytes, unit};

/// Units of all kinds: same-filled, random (kept raw), and shrinking to many lengths.
fn units(unit: UnitOrder) -> Vec<Vec<u8>> {
    let kind = |index: usize| match index % 4 {
        0 if index % 8 == 0 => vec![b'z'; unit.bytes()],
        0 => bytes(index as u64, unit.bytes()),
        _ => {
            let mut data = bytes(index as u64, unit.bytes());
            data[unit.bytes() * (index % 31) / 32..].fill(0);
            data
        }
    };
    (1..60).map(kind).collect()
}

fn key(seed: u64) -> Key {
    Key::new(bytes(seed, Key::BYTES).try_into().expect("as many bytes as a key has"))
}

/// Goal: nobody can build two units with one checksum without the key, and a store knows its own units. Method: each
/// bit of the key counts for the checksum of a unit of each size; the same key gives the same.
#[test]
fn checksums_depend_on_all_of_the_key() {
    for unit in [4096, 16384, 65536] {
        let contents = bytes(7, unit);
        let secret: [u8; Key::BYTES] = bytes(42, Key::BYTES).try_into().expect("as many bytes");
        let checksum = Key::new(secret).checksum(&contents);
        assert_eq!(Key::new(secret).checksum(&contents), checksum);
        for at in 0..Key::BYTES {
            let mut other = secret;
            other[at] ^= 1;
            assert_ne!(Key::new(other).checksum(&contents), checksum, "byte {at}, unit {unit}");
        }
    }
}

/// The load of a same-filled unit takes its word from the checksum.
#[test]
fn the_checksum_of_a_same_filled_unit_is_its_word() {
    let unit = vec![0x5A; 4096];
    assert_eq!(key(1).checksum(&unit), key(2).checksum(&unit));
    assert_eq!(key(1).checksum(&unit).0[0], 0x5A5A_5A5A_5A5A_5A5A);
}

/// A store, its units, and what became of each.
struct Store {
    world: Arc<World>,
    zswap: Zswap<Arc<World>>,
    figures: Figures,
    units: Vec<Vec<u8>>,
    entries: Vec<Option<Entry>>,
}

impl Store {
    fn new(unit: UnitOrder) -> Store {
        let world = World::new();
        let zcomp = Zcomp::new(Algorithm::Lz4.into(), unit, 1).expect("the default level");
        let zswap = Zswap::new(zcomp, Arc::clone(&world), unit, key(42));
        let units = units(unit);
        let entries = units.iter().map(|_| None).collect();
        Store { world, zswap, figures: Figures::default(), units, entries }
    }

    /// Stores what is not stored, in batches, with these requests of the source refused. Returns how many
    /// units were rejected.
    fn store(&mut self, refused: Range<usize>) -> usize {
        self.world.refuse(refused);
        let missing: Vec<usize> =
            (0..self.units.len()).filter(|at| self.entries[*at].is_none()).collect();
        let (mut told, mut rejected) = (0, 0);
        for batch in missing.chunks(8) {
            let units: Vec<&[u8]> = batch.iter().map(|at| &self.units[*at][..]).collect();
            let checksums: Vec<Checksum> =
                units.iter().map(|unit| self.zswap.checksum(unit)).collect();
            let entries = &mut self.entries;
            self.zswap.store(0, &units, &checksums, &self.figures, &mut |index, stored| {
                told += 1;
                match stored {
                    Ok(entry) => entries[batch[index]] = Some(entry),
                    Err(reject) => {
                        assert_eq!(reject, Reject::AllocFail);
                        rejected += 1;
                    }
                }
            });
        }
        assert_eq!(told, missing.len(), "one result for each unit");
        rejected
    }

    /// The gauges say what was stored, the pool holds no more, and all of it comes back.
    fn check(&self) {
        let stored: Vec<(usize, &Entry)> = self
            .entries
            .iter()
            .enumerate()
            .filter_map(|(at, entry)| Some((at, entry.as_ref()?)))
            .collect();
        let figure = |name: &str| self.figures.get(name).expect("a figure");
        let unit_bytes = self.zswap.unit.bytes();
        assert_eq!(figure("stored_units"), stored.len() as u64, "ZSWAP-3");
        assert_eq!(figure("stored_bytes"), (stored.len() * unit_bytes) as u64);
        let pool = self.zswap.pool_stats();
        assert_eq!(pool.objects + figure("same_filled_units"), stored.len() as u64);
        assert_eq!(pool.bytes_stored, figure("compressed_bytes"));
        let mut loaded = vec![0; unit_bytes];
        for (at, entry) in stored {
            self.zswap.load(0, entry, &mut loaded).expect("what was stored loads");
            assert!(loaded == self.units[at], "unit {at}");
        }
    }
}

/// Goal: a pool without memory costs no unit and no page. Method: the same batches with the first request
/// of the source refused, the second, ..., alone and with all that follow, until none is.
#[test]
fn a_refusal_at_any_point_leaves_the_unit_with_its_owner() {
    for order in [0, 4] {
        let mut number = 0;
        loop {
            let mut rejects = [0; 2];
            for (all, rejects) in rejects.iter_mut().enumerate() {
                let mut store = Store::new(unit(order));
                *rejects = store.store(number..if all == 1 { usize::MAX } else { number + 1 });
                assert_eq!(store.figures.reject_alloc_fail.load(Relaxed), *rejects as u64);
                let missing = store.entries.iter().filter(|entry| entry.is_none()).count();
                assert_eq!(missing, *rejects, "request {number}");
                store.check();
                // There is memory again: what was rejected is stored, and everything goes.
                assert_eq!(store.store(0..0), 0);
                store.check();
                for entry in std::mem::take(&mut store.entries).into_iter().flatten() {
                    store.zswap.invalidate(entry, &store.figures);
                }
                store.check();
                assert_eq!(store.zswap.pool_stats().bytes_stored, 0);
                drop(store.zswap);
                assert_eq!(store.world.pages.load(Relaxed), 0, "request {number}: a page was kept");
            }
            if rejects == [0, 0] {
                break;
            }
            // One request alone refused is one unit, and those after it are stored.
            assert!(rejects[0] == 1 && rejects[1] >= 1, "request {number}: {rejects:?}");
            number += 1;
        }
        println!("{}: {number} requests", unit(order));
        assert!(number > 20, "the store asks for memory");
    }
}
