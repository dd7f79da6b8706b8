//! A machine whose sysfs is a directory, and whose queues are those of models.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::sync::Mutex;
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Answer, BATCH_MAX, Backend as _, Compressor, Job};
use zfolio_sys::testing::in_child;

use super::{INTERVAL_NS, Machine};
use crate::backend::{Codes, Iaa};
use crate::discover::Unusable;
use crate::driver::WorkQueue;
use crate::layout::Descriptor;
use crate::model::{Faults, Model, Setup};
use crate::portal::{Portal, Submitted};
use crate::queues::{Direction, QUEUES_MAX};
use crate::settings::Settings;
use crate::testing::Tree;

const UNIT: usize = 4096;

/// What the test knows of the queues behind the driver.
#[derive(Debug, Default)]
struct Behind {
    /// The model that a queue has when it is opened next; without one it cannot be opened.
    models: BTreeMap<String, Model>,
    /// How many mappings there are of each.
    mapped: BTreeMap<String, Arc<AtomicU64>>,
    /// How many there were, of all.
    opened: u64,
}

/// A mapped queue.
#[derive(Debug)]
struct Mapped {
    model: Model,
    count: Arc<AtomicU64>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Relaxed);
    }
}

#[allow(unsafe_code, reason = "forwards a contract")]
// SAFETY: the model keeps it.
unsafe impl Portal for Mapped {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submitted {
        // SAFETY: the caller's contract.
        unsafe { self.model.submit(descriptor) }
    }
}

/// A machine with its directories.
struct World {
    tree: Tree,
    behind: Arc<Mutex<40, Behind>>,
    machine: Machine,
    now_ns: u64,
    files: u64,
    found: Result<(), String>,
}

impl World {
    /// One with these queues, each with a model of its own.
    fn new(name: &str, queues: &[&str]) -> World {
        let tree = Tree::new(name);
        tree.write("devices/system/cpu/cpu0/topology/physical_package_id", "0");
        tree.write("dev/none", "");
        for device in [1, 3] {
            tree.write(&format!("bus/dsa/devices/iax{device}/state"), "enabled");
        }
        let behind = Arc::new(Mutex::<40, Behind>::new(Behind::default()));
        let settings = Settings { polls_max: 50, distribute_decomps: true, ..Settings::default() };
        let idle =
            Machine::new(&tree.0.join("none"), &tree.0, settings, Box::new(|_| unreachable!()));
        let mut world = World { tree, behind, machine: idle.0, now_ns: 1, files: 0, found: idle.1 };
        queues.iter().for_each(|queue| _ = world.enable(queue, Setup::default()));
        let behind = Arc::clone(&world.behind);
        let open = Box::new(move |found: &super::Found| {
            let mut behind = behind.lock();
            let model = behind.models.get(&found.name).cloned();
            let name = found.name.clone();
            let model = model.ok_or(Unusable { name, why: "it is busy".to_owned() })?;
            let count = Arc::clone(behind.mapped.entry(found.name.clone()).or_default());
            count.fetch_add(1, Relaxed);
            behind.opened += 1;
            Ok(found.with(Box::new(Mapped { model, count })))
        });
        let dev = world.dev();
        (world.machine, world.found) = Machine::new(&world.tree.0, &dev, settings, open);
        world
    }

    fn dev(&self) -> PathBuf {
        self.tree.0.join("dev/iax")
    }

    /// Has a queue, as the kernel does it: another file each time, and no job.
    fn enable(&mut self, queue: &str, setup: Setup) -> Model {
        let model = Model::new(setup);
        self.behind.lock().models.insert(queue.to_owned(), model.clone());
        self.tree.queue(queue, &[]);
        // Made before the old one goes, so that it has another inode.
        self.files += 1;
        let made = format!("dev/made{}", self.files);
        self.tree.write(&made, "");
        fs::create_dir_all(self.dev()).unwrap();
        fs::rename(self.tree.0.join(made), self.dev().join(queue)).unwrap();
        model
    }

    fn disable(&self, queue: &str) {
        if let Some(model) = self.behind.lock().models.remove(queue) {
            model.disable();
        }
        self.tree.queue(queue, &[("state", "disabled")]);
        drop(fs::remove_file(self.dev().join(queue)));
    }

    fn look(&mut self) {
        self.now_ns += INTERVAL_NS;
        self.machine.look(self.now_ns);
    }

    fn mapped(&self, queue: &str) -> u64 {
        self.behind.lock().mapped.get(queue).map_or(0, |count| count.load(Relaxed))
    }

    fn open(&self) -> Vec<String> {
        let mut open = self.machine.driver.open_queues();
        open.sort_unstable();
        open
    }

    fn stream(&self) -> Box<dyn Compressor> {
        Iaa::new(&self.machine.driver, Codes::Fixed).compressor(UNIT).unwrap()
    }

    /// How many units software has compressed.
    fn by_software(&self) -> u64 {
        self.machine.driver.global_stats().total_sw_comp_calls
    }

    fn changes(&self) -> [u64; 2] {
        let stats = self.machine.driver.driver_stats();
        [stats.wq_added, stats.wq_removed]
    }

    /// Compresses a batch, calling `between` before each poll, and decompresses it.
    #[allow(unsafe_code, reason = "a batch is submitted")]
    fn exchange(&self, stream: &mut dyn Compressor, byte: u8, mut between: impl FnMut()) {
        let units: Vec<Vec<u8>> = (0..8).map(|at| vec![byte ^ at; UNIT]).collect();
        let mut dests = vec![vec![0; UNIT]; 8];
        let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
        for ((job, unit), dest) in jobs.iter_mut().zip(&units).zip(&mut dests) {
            (job.source, job.dest) = (unit, dest);
        }
        // SAFETY: until `poll` returns true only it is called, with the same jobs.
        unsafe { stream.submit(&mut jobs) };
        between();
        while !stream.poll(&mut jobs) {
            between();
        }
        let answers = jobs.map(|job| job.answer);
        let iaa = Iaa::new(&self.machine.driver, Codes::Fixed);
        let mut reader = iaa.decompressor(UNIT).unwrap();
        for ((answer, dest), unit) in answers.iter().zip(&dests).zip(&units) {
            let Answer::Compressed(bytes) = answer else { panic!("{answer:?}") };
            let mut place = vec![0xC3; UNIT];
            assert_eq!(reader.decompress(&dest[..*bytes], &mut place), Ok(()));
            assert!(place == *unit);
        }
    }
}

fn stepped() -> Setup {
    Setup { is_stepped: true, ..Setup::default() }
}

/// Goal: a queue that appears is used, once a look is due, and nothing is done in vain before and after.
#[test]
fn a_queue_that_appears_is_used() {
    let mut world = World::new("appears", &["wq1.0"]);
    assert_eq!(world.found, Ok(()));
    let new = world.enable("wq3.0", Setup::default());
    world.machine.look(0);
    assert_eq!(world.open(), ["wq1.0", "wq3.0"], "the first look is due at once");
    let newer = world.enable("wq3.1", Setup::default());
    world.machine.look(INTERVAL_NS - 1);
    assert_eq!(world.open().len(), 2, "not yet");
    world.look();
    assert_eq!((world.open().len(), world.changes()), (3, [3, 0]));
    let mut stream = world.stream();
    world.exchange(&mut *stream, 1, || {});
    assert!(new.counts().accepted > 0 && newer.counts().accepted > 0);
    (0..3).for_each(|_| world.look());
    assert_eq!((world.changes(), world.by_software()), ([3, 0], 0));
    assert!(["wq1.0", "wq3.0", "wq3.1"].iter().all(|queue| world.mapped(queue) == 1));
}

/// Goal: a queue that is disabled gets no more jobs; those under way end, and then its memory is unmapped, not before.
/// When the device is back it is used again.
#[test]
fn a_disabled_queue_is_unmapped_after_its_last_job() {
    let mut world = World::new("disabled", &[]);
    let model = world.enable("wq1.0", stepped());
    world.look();
    let mut stream = world.stream();
    let (unit, mut dest) = ([7; UNIT], [0; UNIT]);
    let mut jobs = [Job::default()];
    (jobs[0].source, jobs[0].dest) = (&unit, &mut dest);
    #[allow(unsafe_code, reason = "a batch is submitted")]
    // SAFETY: until `poll` returns true only it is called, with the same job.
    unsafe {
        stream.submit(&mut jobs);
    }
    // By its state alone: the device still ends what it has.
    world.tree.queue("wq1.0", &[("state", "disabled")]);
    world.look();
    assert_eq!((world.open().len(), world.changes()), (0, [1, 1]));
    let mut polls = 0;
    while !stream.poll(&mut jobs) {
        world.look();
        assert_eq!(world.mapped("wq1.0"), 1, "a job is under way");
        polls += 1;
        if polls == 3 {
            assert!(model.step());
        }
    }
    assert!(matches!(jobs[0].answer, Answer::Compressed(_)));
    assert_eq!(world.by_software(), 0, "the device did it");
    world.look();
    assert_eq!(world.mapped("wq1.0"), 0);
    world.exchange(&mut *stream, 2, || {});
    assert_eq!((model.counts().accepted, world.by_software()), (1, 8));
    let back = world.enable("wq1.0", Setup::default());
    world.look();
    assert_eq!((world.open().len(), world.changes(), world.mapped("wq1.0")), (1, [2, 1], 1));
    world.exchange(&mut *stream, 3, || {});
    assert_eq!((back.counts().accepted, world.by_software()), (16, 8));
}

/// Goal: a queue that was disabled and enabled between two looks is opened again, also if jobs of its were forgotten: a
/// portal of the old one may reach nothing.
#[test]
fn a_queue_that_is_back_is_opened_again() {
    for loses_jobs in [false, true] {
        let mut world = World::new(&format!("back-{loses_jobs}"), &[]);
        let faults = Faults { never: if loses_jobs { u16::MAX } else { 0 }, ..Faults::default() };
        let old = world.enable("wq1.0", Setup { faults, ..Setup::default() });
        world.look();
        let mut stream = world.stream();
        world.exchange(&mut *stream, 1, || {});
        let accepted = old.counts().accepted;
        let new = world.enable("wq1.0", Setup::default());
        world.look();
        assert_eq!((world.open().len(), world.changes()), (1, [2, 1]));
        // What was never answered is never unmapped.
        assert_eq!(world.mapped("wq1.0"), 1 + u64::from(loses_jobs));
        let mut stream = world.stream();
        world.exchange(&mut *stream, 2, || {});
        assert_eq!(old.counts().accepted, accepted);
        assert_eq!(new.counts().accepted, 16, "compressed and decompressed");
    }
}

/// Goal: a device that is disabled while its batch is half collected costs time and no unit, whenever the look comes.
#[test]
fn a_device_vanishes_when_a_batch_is_half_collected() {
    for steps in 0..8 {
        let mut world = World::new(&format!("half-{steps}"), &[]);
        let model = world.enable("wq1.0", stepped());
        world.look();
        let mut stream = world.stream();
        let mut polls = 0;
        let now_ns = world.now_ns + INTERVAL_NS;
        world.exchange(&mut *stream, 9, || {
            polls += 1;
            if polls == 2 {
                (0..steps).for_each(|_| assert!(model.step()));
            }
            if polls == 3 {
                world.disable("wq1.0");
                world.machine.look(now_ns);
            }
        });
        let stats = world.machine.driver.global_stats();
        assert_eq!(stats.total_sw_comp_calls, 8 - steps);
        assert_eq!(
            (stats.total_completion_timeout_errors, stats.total_sw_decomp_calls),
            (8 - steps, 8)
        );
        world.now_ns = now_ns;
        world.look();
        assert_eq!((world.mapped("wq1.0"), world.open().len()), (1, 0), "some were never answered");
        let back = world.enable("wq1.0", Setup::default());
        world.look();
        let mut stream = world.stream();
        world.exchange(&mut *stream, 10, || {});
        assert_eq!(back.counts().accepted, 16);
    }
}

/// Goal: MACH-1.
#[test]
fn where_sysfs_cannot_be_read_queues_stay() {
    let mut world = World::new("hidden", &["wq1.0"]);
    let [bus, hidden] = ["bus", "hidden"].map(|name| world.tree.0.join(name));
    fs::rename(&bus, &hidden).unwrap();
    (0..2).for_each(|_| world.look());
    assert_eq!(world.open(), ["wq1.0"], "as after chroot");
    fs::rename(&hidden, &bus).unwrap();
    fs::remove_dir_all(world.dev()).unwrap();
    (0..2).for_each(|_| world.look());
    assert_eq!((world.open().len(), world.changes()), (1, [1, 0]), "its file is not seen");
    fs::remove_dir_all(bus.join("dsa")).unwrap();
    world.look();
    assert_eq!((world.open().len(), world.changes()), (0, [1, 1]), "the device is gone");
}

/// Goal: MACH-1: a file that cannot be read is no file that is not there. Method: an attribute, or the file of the
/// queue, is a link to itself, which no system call gets through, as none that opens does without a free descriptor.
#[test]
fn what_cannot_be_read_is_not_gone() {
    let mut world = World::new("unread", &["wq1.0"]);
    let own = world.tree.0.join("bus/dsa/devices/wq1.0");
    let (state, size, file) = (own.join("state"), own.join("size"), world.dev().join("wq1.0"));
    for path in [&state, &size, &file] {
        let aside = world.tree.0.join("aside");
        fs::rename(path, &aside).unwrap();
        std::os::unix::fs::symlink(path, path).unwrap();
        // A queue that comes meanwhile has all of sysfs read.
        world.enable("wq3.0", Setup::default());
        (0..2).for_each(|_| world.look());
        assert!(world.open().contains(&"wq1.0".to_owned()), "{}", path.display());
        fs::remove_file(path).unwrap();
        fs::rename(&aside, path).unwrap();
        world.look();
        assert_eq!(world.open(), ["wq1.0", "wq3.0"], "{}: seen late", path.display());
        world.disable("wq3.0");
        world.look();
        assert_eq!(world.open(), ["wq1.0"]);
    }
    assert_eq!((world.mapped("wq1.0"), world.changes()), (1, [4, 3]), "it was never opened again");
    fs::remove_file(&size).unwrap();
    fs::remove_file(&state).unwrap();
    world.look();
    assert_eq!(world.open().len(), 0, "these are gone");
}

/// Goal: a queue for which there is no place is not mapped in vain at each look, somebody is told once, and it is used
/// as soon as there is a place. Method: a job is under way at each of 64 queues that have left.
#[test]
fn without_a_place_a_queue_waits() {
    let mut world = World::new("full", &[]);
    let driver = Arc::clone(&world.machine.driver);
    let others = (0..QUEUES_MAX).map(|number| WorkQueue {
        name: format!("wq9.{number}"),
        device: 9,
        package: 0,
        depth: 1,
        portal: Box::new(Model::new(Setup::default())),
    });
    driver.add(others).unwrap();
    let seats: Vec<_> =
        (0..QUEUES_MAX).map(|_| driver.seat(0, Direction::Compress).unwrap()).collect();
    driver.remove(9);
    world.enable("wq1.0", Setup::default());
    for _ in 0..3 {
        world.look();
        let is_told = world.machine.is_told.load(Relaxed);
        assert_eq!((world.open().len(), world.behind.lock().opened, is_told), (0, 0, true));
    }
    seats.into_iter().for_each(|seat| driver.leave(seat));
    world.look();
    assert_eq!((world.open(), world.behind.lock().opened), (vec!["wq1.0".to_owned()], 1));
}

/// Goal: MACH-2. Method: the machine is made to believe that there was one filter more.
#[test]
fn a_thread_under_a_new_filter_opens_nothing() {
    let mut world = World::new("filtered", &["wq1.0"]);
    let filters = world.machine.filters.fetch_add(1, Relaxed);
    world.enable("wq1.1", Setup::default());
    world.look();
    assert_eq!(world.open().len(), 1);
    world.machine.filters.store(filters, Relaxed);
    world.look();
    assert_eq!(world.open().len(), 2);
}

/// Goal: a queue that cannot be opened, since another program has it, is tried again, and no other suffers. A driver
/// without any queue goes on by software until one comes.
#[test]
fn a_queue_that_was_busy_is_used_when_it_is_free() {
    let mut world = World::new("busy", &[]);
    assert!(world.found.clone().unwrap_err().contains("is configured"), "{:?}", world.found);
    let mut stream = world.stream();
    world.exchange(&mut *stream, 1, || {});
    assert_eq!(world.by_software(), 8);
    let model = world.enable("wq1.0", Setup::default());
    world.behind.lock().models.clear();
    world.enable("wq3.0", Setup::default());
    world.look();
    assert_eq!(world.open(), ["wq3.0"]);
    world.behind.lock().models.insert("wq1.0".to_owned(), model.clone());
    world.look();
    assert_eq!(world.open(), ["wq1.0", "wq3.0"]);
    world.exchange(&mut *stream, 2, || {});
    assert!(model.counts().accepted > 0 && world.by_software() == 8);
}

/// Goal: a child of `fork` opens the queues for itself, sees changes of its own, and leaves the parent's alone.
#[test]
fn a_child_looks_for_itself() {
    let world = World::new("child", &["wq1.0"]);
    let mut stream = world.stream();
    world.exchange(&mut *stream, 1, || {});
    let inherited = std::cell::RefCell::new(Some((world, stream)));
    let is_good = in_child(|| {
        let (mut world, mut stream) = inherited.take().expect("the parent's");
        // The parent's model is the parent's alone.
        let own = Model::new(Setup::default());
        world.behind.lock().models.insert("wq1.0".to_owned(), own.clone());
        world.machine.start_over();
        world.exchange(&mut *stream, 2, || {});
        let is_used = own.counts().accepted == 16 && world.changes() == [1, 0];
        let other = world.enable("wq1.1", Setup::default());
        world.look();
        world.exchange(&mut *stream, 3, || {});
        let is_seen = other.counts().accepted > 0 && world.changes() == [2, 0];
        // The directory is the parent's.
        std::mem::forget(world.tree);
        is_used && is_seen
    });
    assert!(is_good);
    let (mut world, mut stream) = inherited.take().expect("it is still here");
    world.exchange(&mut *stream, 4, || {});
    assert_eq!((world.by_software(), world.changes()), (0, [1, 0]));
    world.behind.lock().models.insert("wq1.1".to_owned(), Model::new(Setup::default()));
    world.look();
    assert_eq!(world.changes(), [2, 0]);
}

/// Goal: after each look the driver has exactly the queues that there are and that can be opened; each is mapped once,
/// and all others only while somebody looks for a job of theirs; and no unit is wrong. Method: random events against a
/// map, and a count of the devices of each name that have lost a job.
#[test]
fn looks_agree_with_a_naive_model() {
    let mut random = Random::new(seed());
    let mut world = World::new("random", &[]);
    let names = ["wq1.0", "wq1.1", "wq3.0"];
    // For each queue that there is: whether it can be opened, and its model.
    let mut there: BTreeMap<&str, Model> = BTreeMap::new();
    let mut ever: BTreeMap<&str, Vec<Model>> = BTreeMap::new();
    let mut stream = world.stream();
    for round in 0..600 {
        let name = names[random.below(names.len())];
        match random.below(8) {
            0 | 1 => {
                let faults = Faults {
                    never: [0, 0, 2000][random.below(3)],
                    reset: [0, 2000][random.below(2)],
                    ..Faults::default()
                };
                let setup = Setup { faults, seed: round, ..Setup::default() };
                let model = world.enable(name, setup);
                ever.entry(name).or_default().push(model.clone());
                there.insert(name, model);
            }
            2 => {
                world.disable(name);
                there.remove(name);
            }
            3 => _ = world.behind.lock().models.remove(name),
            4 => {
                if let Some(model) = there.get(name) {
                    world.behind.lock().models.insert(name.to_owned(), model.clone());
                }
            }
            5 => stream = world.stream(),
            _ => world.exchange(&mut *stream, random.byte(), || {}),
        }
        let before = world.open();
        world.look();
        let open = world.open();
        let openable: Vec<String> = {
            let behind = world.behind.lock();
            let is_open = |name: &&str| {
                there.contains_key(*name)
                    && (behind.models.contains_key(*name) || before.iter().any(|it| it == name))
            };
            names.iter().filter(|name| is_open(name)).map(|&name| name.to_owned()).collect()
        };
        let extra = open.iter().any(|name| !openable.contains(name));
        // One that was open may be another one now, which cannot be opened.
        let misses = openable
            .iter()
            .any(|name| world.behind.lock().models.contains_key(name) && !open.contains(name));
        assert!(!extra && !misses, "seed {}, {round}: {open:?} {openable:?}", seed());
        let [added, removed] = world.changes();
        assert_eq!(added - removed, open.len() as u64, "seed {}, {round}", seed());
        let is_owed = world.machine.driver.driver_stats().in_flight > 0;
        for name in names {
            let is_open = u64::from(open.iter().any(|it| it == name));
            let has_lost = |model: &&Model| {
                let counts = model.counts();
                is_owed && counts.faults[3] + counts.forgotten > 0
            };
            let lost = ever.get(name).map_or(0, |all| all.iter().filter(has_lost).count());
            let right = is_open..=is_open + lost as u64;
            let mapped = world.mapped(name);
            assert!(right.contains(&mapped), "seed {}, {round}: {name}, {mapped}", seed());
        }
    }
    assert!(world.changes()[1] > 20, "{:?}", world.changes());
    drop(stream);
    names.iter().for_each(|name| world.disable(name));
    world.look();
    let left = names.map(|name| world.mapped(name));
    assert_eq!((left, world.machine.driver.driver_stats().in_flight), ([0; 3], 0), "{}", seed());
}
