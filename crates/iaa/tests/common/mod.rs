//! What the tests of the driver share: drivers on modelled devices, units, and one call for a batch.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::testing::Random;
use zfolio_core::zcomp::{
    Answer, BATCH_MAX, Backend as _, Bare, Compressor, Corrupt, Decompressor, Job, Unpack,
};
use zfolio_iaa::model::{Model, Setup};
use zfolio_iaa::{Codes, Driver, Iaa, Settings, WorkQueue};

/// Bytes of a unit.
pub(crate) const UNIT: usize = 4096;

/// A driver and the queues behind it.
pub(crate) struct World {
    pub(crate) driver: Arc<Driver>,
    pub(crate) models: Vec<Model>,
}

impl World {
    /// A driver with one queue for each of `setups`, each of a device of its own, for CPUs of one package.
    pub(crate) fn new(settings: Settings, setups: &[Setup]) -> World {
        let driver = Arc::new(Driver::new(settings, vec![0; 64]));
        let mut world = World { driver, models: Vec::new() };
        setups.iter().for_each(|setup| world.add(setup.clone()));
        world
    }

    /// One more device with a queue.
    pub(crate) fn add(&mut self, setup: Setup) {
        let depth = setup.depth;
        let model = Model::new(setup);
        let device = 2 * self.models.len() + 1;
        self.driver.add([queue(device, depth, &model)]).expect("few queues");
        self.models.push(model);
    }

    /// The sum of a count over all devices.
    pub(crate) fn count(&self, of: fn(&zfolio_iaa::model::Counts) -> u64) -> u64 {
        self.models.iter().map(|model| of(&model.counts())).sum()
    }

    pub(crate) fn compressor(&self, codes: Codes, unit: usize) -> Box<dyn Compressor> {
        Iaa::new(&self.driver, codes).compressor(unit).expect("there is memory")
    }

    pub(crate) fn decompressor(&self, unit: usize) -> Box<dyn Decompressor> {
        Iaa::new(&self.driver, Codes::Fixed).decompressor(unit).expect("there is memory")
    }
}

pub(crate) fn queue(device: usize, depth: usize, model: &Model) -> WorkQueue {
    WorkQueue {
        name: format!("wq{device}.0"),
        device,
        package: 0,
        depth: u32::try_from(depth).expect("a queue is short"),
        portal: Box::new(model.clone()),
    }
}

/// Software with the same format.
pub(crate) fn software(unit: usize) -> Bare {
    let order = UnitOrder::from_bytes(unit).expect("a unit's size");
    Bare::new(&"deflate,window=12".parse().expect("parameters"), order).expect("there is memory")
}

/// A unit that shrinks.
pub(crate) fn unit(random: &mut Random, bytes: usize) -> Vec<u8> {
    let words =
        ["compressed ", "memory ", "0123456789", "\0\0\0\0\0\0\0\0\0\0\0\0", "for ", "Linux "];
    let mut unit = Vec::new();
    while unit.len() < bytes {
        match random.below(8) {
            0 => unit.push(random.byte()),
            word => unit.extend(words[word % words.len()].bytes()),
        }
    }
    unit.truncate(bytes);
    unit
}

/// Compresses a batch of at most [`BATCH_MAX`] to `dests`. `between` is called before each poll.
pub(crate) fn compress(
    stream: &mut dyn Compressor,
    units: &[Vec<u8>],
    dests: &mut [Vec<u8>],
    mut between: impl FnMut(),
) -> Vec<Answer> {
    let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
    for ((job, unit), dest) in jobs.iter_mut().zip(units).zip(dests) {
        (job.source, job.dest) = (unit, dest);
    }
    let jobs = &mut jobs[..units.len()];
    // SAFETY: until `poll` is true nothing else is called, with the same jobs, whose borrows last as long.
    unsafe { stream.submit(jobs) };
    between();
    while !stream.poll(jobs) {
        between();
    }
    jobs.iter().map(|job| job.answer).collect()
}

/// Decompresses a batch to `dests`.
pub(crate) fn decompress(
    stream: &mut dyn Decompressor,
    sources: &[&[u8]],
    dests: &mut [Vec<u8>],
    mut between: impl FnMut(),
) -> Vec<Result<(), Corrupt>> {
    let mut jobs: [Unpack<'_>; BATCH_MAX] = Default::default();
    for ((job, source), dest) in jobs.iter_mut().zip(sources).zip(dests) {
        *job = Unpack::new(source, dest);
    }
    let jobs = &mut jobs[..sources.len()];
    // SAFETY: as above.
    unsafe { stream.submit(jobs) };
    between();
    while !stream.poll(jobs) {
        between();
    }
    jobs.iter().map(|job| job.result).collect()
}

/// Compresses `unit`; what came of it.
pub(crate) fn compress_one(stream: &mut dyn Compressor, unit: &[u8]) -> (Answer, Vec<u8>) {
    let mut dest = vec![0xC3; unit.len()];
    let answer = stream.compress_unit(unit, &mut dest);
    if let Answer::Compressed(bytes) = answer {
        dest.truncate(bytes);
    }
    (answer, dest)
}
