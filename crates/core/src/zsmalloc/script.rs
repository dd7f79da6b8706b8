//! A script of operations, played on a pool and on a map at once. The fuzz target plays what the fuzzer
//! writes, the tests what seeded numbers write: one interpreter, so that what one finds the other repeats.
//!
//! Any bytes are a script: the first chooses the unit, each next one an operation that takes its numbers
//! from those that follow. A pinned object stays pinned while the script goes on, until it says otherwise.
//! Operations that a caller must not do (a free of what is pinned) are left out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::world::{World, bytes, check, unit};
use super::{ClassStats, Handle, Pool};
use crate::page::{PAGE_BYTES, UnitOrder};

/// The units that scripts choose from: 4, 16 and 64 KiB and 2 MiB, as orders.
const ORDERS: [u8; 4] = [0, 2, 4, 9];

/// A script stores no more than this at a time.
const STORED_BYTES_MAX: usize = 12 << 20;

/// Objects pinned at a time.
const PINS_MAX: usize = 6;

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When the pool does not do what a map does.
pub fn play(script: &[u8]) {
    let Some((first, rest)) = script.split_first() else { return };
    let order = ORDERS[usize::from(*first) % ORDERS.len()];
    play_refusing(unit(order), rest, 0..0);
}

/// Plays a script, with the page source refusing the requests of these numbers until the script says
/// otherwise. Returns how many requests there were.
pub(crate) fn play_refusing(unit: UnitOrder, script: &[u8], refused: Range<usize>) -> usize {
    let world = World::new();
    world.refuse(refused);
    let pool = Pool::new(Arc::clone(&world), unit);
    let mut player = Player {
        pool: &pool,
        world: &world,
        unit,
        sizes: pool.classes().iter().map(|row| row.size).collect(),
        script,
        stored: BTreeMap::new(),
        stored_bytes: 0,
        pinned: Vec::new(),
        tag: 0,
    };
    while !player.script.is_empty() {
        player.play();
    }
    player.end();
    let requests = world.requests.load(Relaxed);
    drop(pool);
    assert_eq!(world.pages.load(Relaxed), 0, "a page was kept");
    requests
}

/// The pool, the map beside it, and what is left of the script.
struct Player<'p> {
    pool: &'p Pool<Arc<World>>,
    world: &'p World,
    unit: UnitOrder,
    /// The sizes of the classes, rising.
    sizes: Vec<usize>,
    script: &'p [u8],
    stored: BTreeMap<u32, Vec<u8>>,
    stored_bytes: usize,
    pinned: Vec<u32>,
    tag: u64,
}

impl Player<'_> {
    /// The next byte of the script; 0 at its end.
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.script.split_first() else { return 0 };
        self.script = rest;
        usize::from(*first)
    }

    fn two_bytes(&mut self) -> usize {
        self.byte() << 8 | self.byte()
    }

    /// Plays to the end of the script, or, within a pin, to the end of that.
    fn play(&mut self) {
        while !self.script.is_empty() {
            match self.byte() % 16 {
                0..=3 => {
                    let length = self.length();
                    self.store(&[length]);
                }
                4 => {
                    let (length, count) = (self.length(), self.byte() % 64);
                    let step = self.byte() % 64;
                    let lengths: Vec<usize> =
                        (0..count).map(|nth| length.saturating_sub(nth * step).max(1)).collect();
                    self.store(&lengths);
                }
                5..=7 => {
                    let nth = self.two_bytes();
                    self.chosen(nth).into_iter().for_each(|raw| self.free(raw));
                }
                8 => {
                    let (each, from) = (2 + self.byte() % 8, self.byte());
                    let chosen: Vec<u32> =
                        self.stored.keys().copied().skip(from).step_by(each).collect();
                    chosen.into_iter().for_each(|raw| self.free(raw));
                }
                9 => {
                    let nth = self.two_bytes();
                    self.chosen(nth).into_iter().for_each(|raw| self.read(raw));
                }
                10 => self.pin(),
                11 if !self.pinned.is_empty() => return,
                12 => self.compact(),
                13 => self.pool.trim(),
                14 => {
                    let first = self.world.requests.load(Relaxed) + self.byte() % 8;
                    let count = self.byte() % 8;
                    self.world.refuse(first..first + count);
                }
                _ => check(self.pool),
            }
            self.agrees();
        }
    }

    /// A length: the ends of a class, of all lengths, or any, each power of two about as often.
    fn length(&mut self) -> usize {
        let unit_bytes = self.unit.bytes();
        match self.byte() % 8 {
            0 => unit_bytes,
            1 => 1 + self.byte(),
            2 => self.class_bytes(),
            3 => self.class_bytes() + 1,
            halvings => 1 + self.two_bytes() * (unit_bytes >> (halvings - 4)) / (1 << 16),
        }
        .min(unit_bytes)
    }

    /// The size of a class.
    fn class_bytes(&mut self) -> usize {
        let nth = self.two_bytes();
        self.sizes[nth % self.sizes.len()]
    }

    /// The object with this number, counted round.
    fn chosen(&self, nth: usize) -> Option<u32> {
        self.stored.keys().nth(nth % self.stored.len().max(1)).copied()
    }

    /// Stores objects of these lengths, in one batch.
    fn store(&mut self, lengths: &[usize]) {
        if self.stored_bytes + lengths.iter().sum::<usize>() > STORED_BYTES_MAX {
            return;
        }
        let mut objects: Vec<Vec<u8>> =
            (self.tag..).zip(lengths).map(|(tag, length)| bytes(tag, *length)).collect();
        self.tag += lengths.len() as u64;
        let before = self.pool.stats();
        let mut told = vec![None; objects.len()];
        let slices: Vec<&[u8]> = objects.iter().map(Vec::as_slice).collect();
        self.pool.store_batch(&slices, &mut |at, stored| {
            assert_eq!(told[at].replace(stored), None, "object {at} was told twice");
        });
        if told.iter().all(|stored| matches!(stored, Some(Err(_)))) {
            let after = self.pool.stats();
            let metadata_bytes = after.metadata_bytes;
            assert_eq!(super::PoolStats { metadata_bytes, ..before }, after, "a trace is left");
        }
        for (object, stored) in objects.iter_mut().zip(told) {
            match stored.expect("each is told") {
                Ok(handle) => {
                    let object = std::mem::take(object);
                    self.stored_bytes += object.len();
                    let other = self.stored.insert(handle.to_raw(), object);
                    assert!(other.is_none(), "a handle twice");
                }
                Err(refused) => assert!(refused.wanted_bytes >= PAGE_BYTES),
            }
        }
    }

    fn read(&self, raw: u32) {
        let data = &self.stored[&raw];
        assert_eq!(self.pool.length(named(raw)), data.len(), "handle {raw}");
        self.pool.read(named(raw), |read| assert!(read == data, "bytes of handle {raw}"));
    }

    fn free(&mut self, raw: u32) {
        if self.pinned.contains(&raw) {
            return;
        }
        self.read(raw);
        self.pool.free(named(raw));
        let data = self.stored.remove(&raw).expect("read just now");
        self.stored_bytes -= data.len();
    }

    /// Plays on with an object pinned.
    fn pin(&mut self) {
        let nth = self.two_bytes();
        let Some(raw) = self.chosen(nth).filter(|_| self.pinned.len() < PINS_MAX) else { return };
        let pool = self.pool;
        pool.read(named(raw), |read| {
            self.pinned.push(raw);
            self.play();
            self.pinned.pop();
            pool.read(named(raw), |again| assert_eq!(again.as_ptr(), read.as_ptr(), "ZS-5"));
            assert!(read == self.stored[&raw], "ZS-5: bytes of handle {raw}");
        });
    }

    fn compact(&mut self) {
        let bytes_max = match self.byte() % 4 {
            0 => 1,
            1 => self.byte() << 4,
            2 => self.byte() << 12,
            _ => usize::MAX,
        };
        let before = self.pool.stats();
        let compacted = self.pool.compact(bytes_max);
        let freed = self.pool.stats().pages_compacted - before.pages_compacted;
        assert_eq!(freed, compacted.pages_freed as u64);
        // The last object was begun before.
        let unit_bytes = self.unit.bytes();
        assert!(compacted.bytes_moved < bytes_max.saturating_add(unit_bytes), "{compacted:?}");
        if bytes_max == usize::MAX && self.pinned.is_empty() {
            self.pool.trim();
            self.pool.classes().iter().for_each(packed);
        }
    }

    /// The counters say what the map says.
    fn agrees(&self) {
        let stats = self.pool.stats();
        let model = (self.stored.len() as u64, self.stored_bytes as u64);
        assert_eq!((stats.objects, stats.bytes_stored), model, "objects and their bytes");
        let page = PAGE_BYTES as u64;
        assert!(stats.bytes_stored <= stats.pages_used * page, "{stats:?}");
        assert!(stats.pages_used <= stats.pages_taken, "{stats:?}");
        assert!(stats.pages_used <= stats.pages_used_max, "{stats:?}");
        assert!(stats.pages_taken <= self.world.pages.load(Relaxed) as u64, "{stats:?}");
    }

    /// Each object is in the class of its length.
    fn classes_agree(&self) {
        let mut objects = vec![0; self.sizes.len()];
        for data in self.stored.values() {
            objects[self.sizes.partition_point(|size| *size < data.len())] += 1;
        }
        let rows = self.pool.classes();
        assert!(rows.iter().map(|row| row.obj_used).eq(objects), "objects of each class");
    }

    /// Memory is there again: everything is as it was stored, goes, and leaves nothing.
    fn end(&mut self) {
        self.world.refuse(0..0);
        check(self.pool);
        self.classes_agree();
        self.store(&[1]);
        assert!(
            !self.stored.is_empty() || self.stored_bytes == STORED_BYTES_MAX,
            "no memory again"
        );
        self.stored.keys().for_each(|raw| self.read(*raw));
        let all: Vec<u32> = self.stored.keys().copied().collect();
        all.into_iter().for_each(|raw| self.free(raw));
        self.agrees();
        check(self.pool);
        self.pool.trim();
        let stats = self.pool.stats();
        assert_eq!((stats.pages_used, stats.pages_taken, stats.bytes_stored), (0, 0, 0));
    }
}

/// As few zspages as hold the objects, each with as few pages as hold its own.
fn packed(row: &ClassStats) {
    let zspages = row.fullness.iter().sum::<u32>() as usize;
    let objects = row.obj_allocated / zspages.max(1);
    assert_eq!(zspages, row.obj_used.div_ceil(objects.max(1)), "zspages of {row:?}");
    assert!(row.pages_used <= row.obj_used * row.size / PAGE_BYTES + zspages, "pages of {row:?}");
}

fn named(raw: u32) -> Handle {
    Handle::from_raw(raw).expect("never 0")
}
