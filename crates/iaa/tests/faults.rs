//! Many random descriptors with faults injected: no wrong byte, nothing leaked.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{UNIT, World, compress, decompress, queue, software, unit};
use zfolio_core::sync::Mutex;
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Answer, BATCH_MAX, Bare};
use zfolio_iaa::model::{Faults, Model, Setup};
use zfolio_iaa::{Codes, Settings, WhenBusy};

/// Descriptors of one world: few, because a job that is never answered keeps its memory for good.
const WORLD_DESCRIPTORS: u64 = 20_000;

/// Devices of one world that are there, or whose queues the driver has closed and not forgotten.
const DEVICES_MAX: usize = 16;

/// Devices of one world, those included whose queues were forgotten. Each may keep some memory for good.
const EVER_MAX: usize = 40;

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

/// A driver, its devices, and what has become of them.
struct Changing {
    world: World,
    /// Of each model: the number of its device, and whether its queue was forgotten.
    devices: Vec<(usize, bool)>,
    /// Whether a compression without room fails.
    fails: bool,
    /// How often a slot got other memory.
    renewed: u64,
}

impl Changing {
    /// How many queues were forgotten.
    fn forgotten(&self) -> usize {
        self.devices.iter().filter(|(_, is_forgotten)| *is_forgotten).count()
    }

    fn may_grow(&self) -> bool {
        self.devices.len() < EVER_MAX && self.devices.len() - self.forgotten() < DEVICES_MAX
    }

    /// One more device, of a number that no other one has had.
    fn add(&mut self, random: &mut Random) {
        let numbers = self.devices.iter().map(|(number, _)| number + 2);
        self.add_as(numbers.max().unwrap_or(1), random);
    }

    /// One more device, whose queue has the name of this number.
    fn add_as(&mut self, number: usize, random: &mut Random) {
        let setup = setup(random);
        let depth = setup.depth;
        let model = Model::new(setup);
        self.world.driver.add([queue(number, depth, &model)]).expect("few queues, and a free name");
        self.world.models.push(model);
        self.devices.push((number, false));
    }

    /// The system disables a device. The driver may learn of it by a job, by a look, or be told so at once: then it
    /// forgets the queue, and another one may have its name.
    fn disable(&mut self, random: &mut Random) {
        let places = (0..self.devices.len()).filter(|place| !self.devices[*place].1);
        let there: Vec<usize> = places.collect();
        if there.is_empty() {
            return;
        }
        let place = there[random.below(there.len())];
        self.world.models[place].disable();
        let number = self.devices[place].0;
        if random.below(2) == 0 {
            self.world.driver.refresh();
        }
        if random.below(3) == 0 {
            return;
        }
        self.world.driver.forget(&[format!("wq{number}.0")]);
        self.devices[place].1 = true;
        if random.below(2) == 0 && self.may_grow() {
            self.add_as(number, random);
        }
    }

    /// The jobs that were never answered, of all devices and of those whose queues were not forgotten.
    fn unanswered(&self) -> [u64; 2] {
        let counts = self.world.models.iter().map(|model| {
            let counts = model.counts();
            counts.faults[3] + counts.forgotten
        });
        let counts: Vec<u64> = counts.collect();
        let kept = counts.iter().zip(&self.devices).filter(|(_, device)| !device.1);
        [counts.iter().sum(), kept.map(|(count, _)| count).sum()]
    }
}

/// A world whose driver finds every lie: it verifies, and compares checksums.
fn world(random: &mut Random) -> Changing {
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
    let mut changing = Changing {
        world: World::new(settings, &[]),
        devices: Vec::new(),
        fails: settings.when_busy == WhenBusy::Reject,
        renewed: 0,
    };
    (0..1 + random.below(4)).for_each(|_| changing.add(random));
    changing
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

/// One batch there and back, during which a device may be disabled. A unit may fail only for want of room, of its
/// verification too, and where that `fails`.
fn batch(world: &mut Changing, streams: &mut Streams, random: &mut Random, who: &str) {
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
    let (driver, fails) = (Arc::clone(&world.world.driver), world.fails);
    let busy = || {
        let stats = driver.driver_stats();
        stats.busy_comps + stats.busy_decomps
    };
    let renewed = driver.driver_stats().leaked_buffers;
    // Polls until a device is disabled; few batches have as many.
    let mut wait = random.below(1000);
    let mut between = || {
        if wait == 0 {
            world.disable(random);
        }
        wait = wait.wrapping_sub(1);
    };
    let mut left = busy();
    let answers = compress(&mut *streams.compress[which], &units, &mut dests, &mut between);
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
    let results = decompress(&mut *streams.decompress, &packed, &mut places, &mut between);
    // No stream has ended meanwhile, so what was leaked was so because a slot was renewed.
    world.renewed += driver.driver_stats().leaked_buffers - renewed;
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
    /// Queues that were forgotten, and slots that got other memory.
    lost: [u64; 2],
}

/// Goal: whatever goes wrong, no byte is wrong, and what is not leaked for the device's sake comes back. Method: worlds
/// with devices and faults at random, two at a time, in which devices also vanish and come, with and without the
/// driver's knowledge; at last all late records come. Then the descriptors that are still out are those which devices
/// never answered whose queues were not forgotten, and the buffers that were leaked are those of all jobs that were
/// never answered, one by one.
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
    let Seen { worlds, descriptors, faults, lost } = *seen.lock();
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
    println!("queues forgotten, and slots that got other memory: {lost:?}");
    assert!(worlds < 20 || lost.iter().all(|count| *count > 0), "it never happened: {lost:?}");
}

fn no_byte_of_a_world_is_wrong(number: u64, seen: &Mutex<0, Seen>) {
    let who = format!("seed {}, world {number}", seed());
    let mut random = Random::new(seed().wrapping_add(number));
    let mut changing = world(&mut random);
    let mut streams = Streams::new(&changing.world);
    let accepted = |changing: &Changing| changing.world.count(|counts| counts.accepted);
    while accepted(&changing) < WORLD_DESCRIPTORS {
        let before = accepted(&changing);
        batch(&mut changing, &mut streams, &mut random, &who);
        if random.below(1000) == 0 && changing.may_grow() {
            changing.add(&mut random);
        }
        if random.below(500) == 0 {
            changing.disable(&mut random);
        }
        if accepted(&changing) == before {
            // No device is left, or no buffer.
            settle(&mut changing, &mut streams);
            streams = Streams::new(&changing.world);
            if !changing.may_grow() {
                break;
            }
            changing.add(&mut random);
        }
    }
    settle(&mut changing, &mut streams);
    assert_nothing_is_lost(&changing, streams, &who);
    let mut seen = seen.lock();
    let forgotten = u64::try_from(changing.forgotten()).expect("few devices");
    seen.lost.iter_mut().zip([forgotten, changing.renewed]).for_each(|(sum, more)| *sum += more);
    let world = changing.world;
    seen.worlds += 1;
    seen.descriptors += world.count(|counts| counts.accepted);
    for model in &world.models {
        let it = model.counts();
        let [page, status, late, never, lie] = it.faults;
        let kinds = [page, status, late, never, lie, it.full, it.forgotten, it.resets];
        seen.faults.iter_mut().zip(kinds).for_each(|(sum, more)| *sum += more);
    }
}

/// After all late records have come, and all streams have looked: what is kept is what the devices never answered.
fn assert_nothing_is_lost(changing: &Changing, streams: Streams, who: &str) {
    let world = &changing.world;
    let [unanswered, kept] = changing.unanswered();
    assert_eq!(world.driver.driver_stats().in_flight, kept, "{who}: tickets are lost");
    assert!(world.driver.driver_stats().leaked_buffers <= unanswered, "{who}: leaked in vain");
    drop(streams);
    let stats = world.driver.driver_stats();
    assert_eq!(stats.in_flight, kept, "{who}: a stream that ends keeps its lost tickets out");
    assert_eq!(stats.leaked_buffers, unanswered, "{who}: each lost job leaks its buffers, once");
    world.driver.refresh();
    let queues: usize = world.driver.wq_stats().iter().map(|device| device.wqs.len()).sum();
    let there = changing.devices.len() - changing.forgotten();
    assert!(queues <= there, "{who}: {queues} queues, though all but {there} were forgotten");
    assert_eq!(world.count(|counts| counts.overruns), 0, "{who}");
}

/// All late records come, and the streams see them, without new jobs.
fn settle(changing: &mut Changing, streams: &mut Streams) {
    let world = &changing.world;
    let renewed = world.driver.driver_stats().leaked_buffers;
    world.models.iter().for_each(Model::finish_late);
    let none: [Vec<u8>; 0] = [];
    for stream in &mut streams.compress {
        compress(&mut **stream, &none, &mut [], || {});
    }
    decompress(&mut *streams.decompress, &[], &mut [], || {});
    changing.renewed += world.driver.driver_stats().leaked_buffers - renewed;
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
