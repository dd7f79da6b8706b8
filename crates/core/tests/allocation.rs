//! `ZC-1`: after set-up a codec allocates nothing, whatever its input is; nor does a store, nor do areas.
//!
//! The test counts calls of Rust's allocator, in its own process. The C libraries have no other
//! memory than what they are given.

mod heap;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use heap::Heap;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::Figures;
use zfolio_core::store::backing::{
    Backing, Completed, Completion, Location, Operation, Request, Token,
};
use zfolio_core::store::{
    CodecId, EntryId, Incoming, Key, Loaded, Outcome as Stored, Outgoing, Store,
};
use zfolio_core::swap::disk::memory::Memory;
use zfolio_core::swap::{Areas, Config, KeyRoom, NewArea, SECRET_BYTES, Seal};
use zfolio_core::testing::Random;
use zfolio_core::zcomp::{Extent, Outcome, Packed, Params, Zcomp};

struct Counting;

thread_local! {
    /// Per thread: the thread of the test harness allocates when it likes.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: it is the system's allocator, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Goal: compression and decompression do not allocate. Method: every kind of parameter; units that
/// shrink, that do not, and that are same-filled; sound and cut input.
#[test]
fn a_codec_that_is_set_up_allocates_nothing() {
    let numbers = (0..).flat_map(|number: u32| (number * number).to_string().into_bytes());
    let text: Vec<u8> = numbers.take(64 << 10).collect();
    let mut noise = text.clone();
    let mut random = Random::new(1);
    noise[4096..].fill_with(|| random.byte());
    let zeros = vec![0; 64 << 10];
    let mut packed = vec![0; 64 << 10];
    let mut back = vec![0; 64 << 10];
    let order = UnitOrder::from_bytes(64 << 10).expect("a unit");
    for params in [
        "lz4",
        "lz4hc",
        "zstd",
        "zstd,level=19",
        "deflate",
        "deflate,window=12",
        "lz4,dict=d",
        "lz4hc,dict=d",
        "zstd,dict=d",
        "zstd,level=19,dict=d",
        "deflate,dict=d",
    ] {
        let params: Params = params.parse().expect("parameters");
        let dictionary = text[..40_000].to_vec();
        let params = params.with_dictionary(|_| Ok(dictionary)).expect("a dictionary");
        let zcomp = Zcomp::new(params, order, 1).expect("there is memory");
        let before = ALLOCATIONS.get();
        for _ in 0..3 {
            let mut length = 0;
            zcomp.compress(0, &[&noise, &zeros, &text], &mut |elements| {
                for element in elements {
                    if let (2, Outcome::Compressed(bytes)) = (element.index, element.outcome) {
                        packed[..bytes.len()].copy_from_slice(bytes);
                        length = bytes.len();
                    }
                }
            });
            assert!(length > 0);
            let whole = zcomp.decompress(0, &packed[..length], &mut back);
            assert!(whole.is_ok() && back == text);
            assert!(zcomp.decompress(0, &packed[..length / 2], &mut back).is_err());
            let (first, second) = back.split_at_mut(4096);
            let whole: &mut [&mut [u8]] = &mut [first, second];
            for (extent, count) in [(Extent::Whole, 2), (Extent::Prefix, 1)] {
                let (source, dest) = (&packed[..length], &mut whole[..count]);
                let batch = &mut [Packed { source, dest, extent }];
                zcomp.decompress_batch(0, batch, &mut |_, result| assert!(result.is_ok()));
            }
        }
        assert_eq!(ALLOCATIONS.get(), before, "{:?}", zcomp.params());
    }
}

/// Goal: nothing of a store allocates but its page source. Method: units of all kinds, some new, some changed, some
/// clean, are stored, loaded and dropped.
#[test]
fn a_store_that_is_set_up_allocates_nothing() {
    const UNITS: usize = 40;
    let order = UnitOrder::from_bytes(4096).expect("a unit");
    let zcomp =
        Zcomp::new("lz4".parse().expect("an algorithm"), order, 1).expect("there is memory");
    let store = Store::new(vec![zcomp], Heap, Key::new([3; Key::BYTES]));
    let figures = Figures::default();
    let mut contents = vec![[0_u8; 4096]; UNITS];
    let mut entries: [Option<EntryId>; UNITS] = [const { None }; UNITS];
    let mut state = 1_u64;
    let before = ALLOCATIONS.get();
    for round in 0..20 {
        for (number, unit) in contents.iter_mut().enumerate().filter(|(n, _)| n % 3 != round % 3) {
            unit.fill(0);
            unit[..number * 4096 / UNITS].fill_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_le_bytes()[7]
            });
        }
        let mut batch: [Outgoing<'_>; UNITS] =
            std::array::from_fn(|at| Outgoing::new(&contents[at], entries[at].take()));
        store.store(0, CodecId::FIRST, &mut batch, &figures);
        assert!(!batch.iter().any(|unit| matches!(unit.outcome, Stored::Rejected(_))));
        entries = batch.map(|unit| unit.entry);
        let mut place = [0; 4096];
        for (entry, unit) in entries.iter().zip(&contents) {
            let entry = entry.as_ref().expect("it is stored");
            let mut wanted = [Incoming::new(entry, &mut place)];
            store.load(0, &mut wanted);
            assert!(wanted[0].outcome == Loaded::Whole && place == *unit);
        }
        if let Some(entry) = entries[round].take() {
            store.invalidate(entry, &figures);
        }
    }
    assert_eq!(ALLOCATIONS.get(), before);
    entries.into_iter().flatten().for_each(|entry| store.invalidate(entry, &figures));
}

/// Goal: areas allocate nothing but the table of a cluster, when it is first used. Method: objects are written, read
/// and dropped in one cluster, again and again.
#[test]
fn areas_that_are_set_up_allocate_nothing() {
    const OBJECTS: usize = 60;
    let config = Config { object_bytes_max: 4096, buffer_bytes: 1 << 20, limit_bytes: 1 << 30 };
    let areas = Areas::new(config);
    let seal = Seal::new(Box::new(Box::<KeyRoom>::default()), &mut [5; SECRET_BYTES]);
    let disk = Box::new(Memory::new(300));
    areas.add(NewArea { disk, slots: 300, priority: 0, seal }).expect("the first");
    let contents = [7_u8; 4096];
    let length = |at: usize| 1 + at * 4095 / (OBJECTS - 1);
    let submit = |at: usize, operation: Operation<'_>| {
        let token = Token::numbered(u32::try_from(at).expect("few"));
        let mut request = [Request { token, operation, refused: None }];
        areas.submit(&mut request);
        assert_eq!(request[0].refused, None);
    };
    let mut before = 0;
    for round in 0..20 {
        let mut locations: [Option<Location>; OBJECTS] = [None; OBJECTS];
        (0..OBJECTS).for_each(|at| submit(at, Operation::Write(&contents[..length(at)])));
        areas.flush();
        areas.poll(&mut |Completion { token, result }| match result {
            Ok(Completed::Written(location)) => locations[token.number() as usize] = Some(location),
            result => panic!("{result:?}"),
        });
        let locations = locations.map(|location| location.expect("the disk is prompt"));
        for (at, location) in locations.into_iter().enumerate() {
            submit(at, Operation::Read { location, length: length(at) });
        }
        areas.flush();
        let mut read = 0;
        while read < OBJECTS {
            areas.poll(&mut |Completion { token, result }| match result {
                Ok(Completed::Read(bytes)) => {
                    read += 1;
                    assert!(*bytes == contents[..length(token.number() as usize)]);
                }
                result => panic!("{result:?}"),
            });
        }
        for (at, location) in locations.into_iter().enumerate() {
            areas.discard(location, length(at));
        }
        if round == 0 {
            before = ALLOCATIONS.get();
        }
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert_eq!(areas.stats().objects, 0);
}
