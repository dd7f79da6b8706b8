//! Many random descriptors with faults injected: no wrong byte, nothing leaked.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::{UNIT, World, compress, decompress, software, unit};
use zfolio_core::sync::Mutex;
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Answer, BATCH_MAX, Bare};
use zfolio_iaa::model::{Faults, Model, Setup};
use zfolio_iaa::{Codes, Settings, WhenBusy};

/// Descriptors of one world: few, because a job that is never answered keeps its memory for good.
const WORLD_DESCRIPTORS: u64 = 20_000;

/// How many descriptors, from the environment.
fn descriptors(default: u64) -> u64 {
    let given = std::env::var("IAA_DESCRIPTORS");
    given.map_or(default, |given| given.parse().expect("IAA_DESCRIPTORS is a number"))
}

/// What goes wrong in a world: each kind of fault in half of the worlds, often in some.
fn faults(random: &mut Random) -> Faults {
    let scale = [64, 1024, 8192][random.below(3)];
    let mut chance = |at_most: usize| {
        let of = random.below(scale.min(at_most));
        u16::try_from(of * random.below(2)).expect("below 8192")
    };
    Faults {
        full: chance(8192),
        page: chance(8192),
        status: chance(8192),
        late: chance(8192),
        never: chance(16),
        lie: chance(8192),
        gone: chance(16),
        reset: chance(16),
    }
}

/// A world whose driver finds every lie: it verifies, and compares checksums. Also whether a compression without room
/// fails.
fn world(random: &mut Random) -> (World, bool) {
    let settings = Settings {
        comp_wqs_per_iaa: random.below(2),
        distribute_comps: random.below(2) == 0,
        distribute_decomps: random.below(2) == 0,
        is_sync: random.below(4) == 0,
        verify_compress: true,
        check_crc: true,
        when_busy: [WhenBusy::Reject, WhenBusy::Software][random.below(2)],
        polls_max: 40,
    };
    let setups: Vec<Setup> = (0..1 + random.below(4)).map(|_| setup(random)).collect();
    (World::new(settings, &setups), settings.when_busy == WhenBusy::Reject)
}

fn setup(random: &mut Random) -> Setup {
    Setup {
        depth: [4, 64, 512][random.below(3)],
        is_shared: random.below(2) == 0,
        is_stepped: false,
        faults: faults(random),
        seed: random.word(),
        ..Setup::default()
    }
}

/// One batch there and back. A unit may fail only for want of room, of its verification too, and where that `fails`.
fn batch(world: &World, streams: &mut Streams, random: &mut Random, fails: bool, who: &str) {
    let count = 1 + random.below(BATCH_MAX);
    let lengths = [1 + random.below(500), 1 + random.below(UNIT)];
    let units: Vec<Vec<u8>> = (0..count)
        .map(|_| match random.below(50) {
            0 => random.bytes(lengths[1]),
            place => unit(random, lengths[usize::from(place < 5)]),
        })
        .collect();
    let mut dests: Vec<Vec<u8>> = units.iter().map(|unit| vec![0xC3; unit.len()]).collect();
    let which = random.below(2);
    let busy = || {
        let stats = world.driver.driver_stats();
        stats.busy_comps + stats.busy_decomps
    };
    let mut left = busy();
    let answers = compress(&mut *streams.compress[which], &units, &mut dests, || {});
    left = busy() - left;
    let mut packed: Vec<&[u8]> = Vec::new();
    let mut originals = Vec::new();
    for ((answer, dest), unit) in answers.iter().zip(&dests).zip(units) {
        match answer {
            Answer::Compressed(bytes) => {
                let mut place = vec![0; unit.len()];
                let is_read = streams.software.decompress(&dest[..*bytes], &mut place);
                assert!(is_read && place == unit, "{who}: compressed to something else");
                packed.push(&dest[..*bytes]);
                originals.push(unit);
            }
            Answer::Incompressible => {}
            Answer::Failed => {
                assert!(fails && left > 0, "{who}: it failed where there was room");
                left -= 1;
            }
        }
    }
    let mut places: Vec<Vec<u8>> = originals.iter().map(|unit| vec![0x3C; unit.len()]).collect();
    let results = decompress(&mut *streams.decompress, &packed, &mut places, || {});
    assert!(results.iter().all(Result::is_ok), "{who}: a sound unit is refused");
    assert!(places == originals, "{who}: decompressed to something else");
}

struct Streams {
    compress: [Box<dyn zfolio_core::zcomp::Compressor>; 2],
    decompress: Box<dyn zfolio_core::zcomp::Decompressor>,
    software: Bare,
}

impl Streams {
    fn new(world: &World) -> Streams {
        Streams {
            compress: [Codes::Fixed, Codes::Dynamic].map(|codes| world.compressor(codes, UNIT)),
            decompress: world.decompressor(UNIT),
            software: software(UNIT),
        }
    }
}

/// What happened in worlds: how many there were, their descriptors, and how often each kind of fault.
#[derive(Default)]
struct Seen {
    worlds: u64,
    descriptors: u64,
    faults: [u64; 8],
}

/// Goal: whatever goes wrong, no byte is wrong, and what is not leaked for the device's sake comes back. Method: worlds
/// with devices and faults at random, two at a time, in which devices also vanish and come; at last all late records
/// come, and the descriptors that are still out are those that were never answered, one by one.
fn no_byte_is_wrong(wanted: u64) {
    let seen = Mutex::<0, _>::new(Seen::default());
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while seen.lock().descriptors < wanted {
                    no_byte_of_a_world_is_wrong(next.fetch_add(1, Ordering::Relaxed), &seen);
                }
            });
        }
    });
    let Seen { worlds, descriptors, faults } = *seen.lock();
    println!(
        "{descriptors} descriptors in {worlds} worlds, with pages missing, other statuses, late records, "
    );
    println!(
        "none, lies, full queues, jobs forgotten by devices that vanished or were reset, resets: {faults:?}"
    );
    assert!(
        worlds < 20 || faults.iter().all(|count| *count > 0),
        "a fault never happened: {faults:?}"
    );
}

fn no_byte_of_a_world_is_wrong(number: u64, seen: &Mutex<0, Seen>) {
    let who = format!("seed {}, world {number}", seed());
    let mut random = Random::new(seed().wrapping_add(number));
    let (mut world, fails) = world(&mut random);
    let mut streams = Streams::new(&world);
    while world.count(|counts| counts.accepted) < WORLD_DESCRIPTORS {
        let before = world.count(|counts| counts.accepted);
        batch(&world, &mut streams, &mut random, fails, &who);
        if random.below(1000) == 0 && world.models.len() < 16 {
            world.add(setup(&mut random));
        }
        if random.below(500) == 0 {
            world.models[random.below(world.models.len())].disable();
            world.driver.refresh();
        }
        if world.count(|counts| counts.accepted) == before {
            // No device is left, or no buffer.
            settle(&world, &mut streams);
            streams = Streams::new(&world);
            if world.models.len() == 16 {
                break;
            }
            world.add(setup(&mut random));
        }
    }
    settle(&world, &mut streams);
    let unanswered = world.count(|counts| counts.faults[3] + counts.forgotten);
    assert_eq!(world.driver.driver_stats().in_flight, unanswered, "{who}: tickets are lost");
    assert_eq!(world.count(|counts| counts.overruns), 0, "{who}");
    let mut seen = seen.lock();
    seen.worlds += 1;
    seen.descriptors += world.count(|counts| counts.accepted);
    for model in &world.models {
        let it = model.counts();
        let [page, status, late, never, lie] = it.faults;
        let kinds = [page, status, late, never, lie, it.full, it.forgotten, it.resets];
        seen.faults.iter_mut().zip(kinds).for_each(|(sum, more)| *sum += more);
    }
}

/// All late records come, and the streams see them, without new jobs.
fn settle(world: &World, streams: &mut Streams) {
    world.models.iter().for_each(Model::finish_late);
    let none: [Vec<u8>; 0] = [];
    for stream in &mut streams.compress {
        compress(&mut **stream, &none, &mut [], || {});
    }
    decompress(&mut *streams.decompress, &[], &mut [], || {});
}

#[test]
fn no_byte_is_wrong_whatever_goes_wrong() {
    no_byte_is_wrong(descriptors(1_000_000));
}

#[test]
#[ignore = "three quarters of an hour: make iaa-faults"]
fn no_byte_is_wrong_in_a_hundred_million_descriptors() {
    no_byte_is_wrong(descriptors(100_000_000));
}
