//! A run of a compressed disk: the real [`Zram`] with several clients, the threads of its owner, memory that is
//! refused, and a backing that is slow and fails.
//!
//! Clients read, write, zero and discard overlapping sectors. Beside them one thread does what a disk's owner does all
//! the time (`Ram::work` of `crates/block`), one sets attributes, changes the size and drops everything, and one saves
//! the disk and loads what it has saved. A model knows what each sector may hold (`model`). Once all of them have ended
//! the disk is read, counted ([`Zram::audit`]), saved, loaded and emptied.

#![allow(clippy::disallowed_types, reason = "the model's lock is none of the disk's")]

mod client;
mod end;
mod model;
mod owner;
mod save;
mod settings;

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zfolio_core::page::UnitOrder;
use zfolio_core::store::{Backing, Key};
use zfolio_core::zcomp::Params;
use zfolio_core::zram::{Error, Zram};

use super::areas::{self, Ground};
use super::codec;
use super::disk::{Below, Disk, Shared};
use super::random::Random;
use super::schedule::{self, Body, Schedule, Trace};
use super::source::Source;
use client::Client;
use model::Model;
use settings::{Settings, Spill};

/// Threads beside the clients.
const BACKGROUND: usize = 3;

/// What was done in all runs of this process.
#[derive(Debug)]
pub(super) struct Played {
    requests: AtomicU64,
    /// Requests that failed.
    failed: AtomicU64,
    /// Units that were written back.
    written_back: AtomicU64,
    /// Units that were joined by themselves.
    joined: AtomicU64,
    /// Saves that were loaded.
    saves: AtomicU64,
    resizes: AtomicU64,
}

pub(super) static PLAYED: Played = Played {
    requests: AtomicU64::new(0),
    failed: AtomicU64::new(0),
    written_back: AtomicU64::new(0),
    joined: AtomicU64::new(0),
    saves: AtomicU64::new(0),
    resizes: AtomicU64::new(0),
};

impl fmt::Display for Played {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Played { requests, failed, written_back, joined, saves, resizes } = self;
        let all = [requests, failed, written_back, joined, saves, resizes];
        let [requests, failed, written_back, joined, saves, resizes] =
            all.map(|count| count.load(Relaxed));
        write!(
            f,
            "{requests} requests, of which {failed} failed, {written_back} units written back and {joined} joined, \
             {saves} saves loaded, {resizes} changes of the size"
        )
    }
}

/// See the module.
#[derive(Debug)]
struct World {
    seed: u64,
    settings: Settings,
    schedule: Arc<Schedule>,
    zram: Zram<Arc<Source>>,
    /// The backing, if there is one.
    disk: Option<Arc<dyn Below>>,
    model: Mutex<Model>,
    /// Clients that are not done.
    clients_left: AtomicUsize,
    background_left: AtomicUsize,
}

/// Runs one seed.
pub(super) fn run(seed: u64, trace: bool) -> Result<Trace, String> {
    let settings = Settings::of(seed);
    let schedule = Schedule::new(seed, settings.clients + BACKGROUND, trace);
    let source = Arc::new(Source::new(Random::new(seed, 43), settings.pool_refuses, usize::MAX));
    let world = World::new(seed, settings, &schedule, &source);
    let done = schedule.run(world.threads());
    let done = done.map_err(|why| format!("{why}; a disk with {:?}", world.settings))?;
    drop(world);
    if source.pages() > 0 {
        return Err(format!("a disk has kept {} pages", source.pages()));
    }
    Ok(done)
}

impl World {
    fn new(seed: u64, settings: Settings, schedule: &Arc<Schedule>, source: &Arc<Source>) -> World {
        let codec = |(stream, name): (u64, &&str)| {
            let params: Params = name.parse().expect("the name of an algorithm");
            let faults = (settings.codec_fails, settings.batch);
            codec::of_disk(
                seed.wrapping_add(stream),
                (params, settings.unit),
                settings.cpus,
                faults,
            )
        };
        let codecs = (0..).zip(settings.algorithms).map(codec).collect();
        let disk_bytes = (settings.units * settings.unit.bytes()) as u64;
        let key = Key::new([0x5A; Key::BYTES]);
        let zram = Zram::new(codecs, Arc::clone(source), key, disk_bytes, settings.cpus);
        let zram = with_pages_apart(zram.expect("a good size"), settings.apart);
        let (disk, zram) = match settings.spill {
            Some(spill) => {
                let (disk, backing) = backing(seed, spill, settings.unit, schedule);
                (Some(disk), zram.with_backing(backing, spill.budget))
            }
            None => (None, zram),
        };
        let [sectors, sectors_max] =
            [settings.units, settings.units_max].map(|units| units * settings.unit_sectors());
        let model = Model::new(sectors, sectors_max, settings.unit_sectors());
        World {
            seed,
            schedule: Arc::clone(schedule),
            zram,
            disk,
            model: Mutex::new(model),
            clients_left: AtomicUsize::new(settings.clients),
            background_left: AtomicUsize::new(BACKGROUND),
            settings,
        }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn threads(&self) -> Vec<Body<'_>> {
        let clients = (0..self.settings.clients).map(|number| -> Body<'_> {
            let random = Random::new(self.seed, 64 + number as u64);
            (format!("client{number}"), Box::new(|| Client { world: self, random }.live()))
        });
        let background = |name: &str, stream: u64, turn: fn(&World, &mut Random)| -> Body<'_> {
            let random = Random::new(self.seed, stream);
            let is_over = || self.clients_left.load(Relaxed) == 0;
            let life = move || {
                schedule::take_turns(random, is_over, |random| turn(self, random));
                self.background_left.fetch_sub(1, Relaxed);
            };
            (name.to_owned(), Box::new(life))
        };
        let background = [
            background("policy", 45, World::work),
            background("attributes", 46, World::set_something),
            background("saver", 47, World::save_now_and_then),
        ];
        clients.chain(background).collect()
    }

    /// Fails unless this error is one that a request may meet in this run. That of a range is the model's.
    fn check_error(&self, error: &Error) {
        let Settings { limits, pool_refuses, codec_fails, .. } = self.settings;
        let may_be = match error {
            Error::NoSpace { .. } => limits,
            Error::NoMemory => pool_refuses > 0,
            Error::Codec { .. } => codec_fails > 0,
            Error::Lost { error, .. } => error.is_transient() && self.disk.is_some(),
            _ => false,
        };
        assert!(may_be, "{error}: {error:?}");
    }
}

fn with_pages_apart(zram: Zram<Arc<Source>>, apart: bool) -> Zram<Arc<Source>> {
    let lz4: Params = "lz4".parse().expect("the name of an algorithm");
    if apart { zram.with_pages_apart(lz4).expect("streams") } else { zram }
}

/// A backing, and what the run knows of it.
fn backing(
    seed: u64,
    spill: Spill,
    unit: UnitOrder,
    schedule: &Arc<Schedule>,
) -> (Arc<dyn Below>, Box<dyn Backing>) {
    let (schedule, random) = (Arc::clone(schedule), Random::new(seed, 44));
    if spill.areas {
        let sizes = (unit.bytes(), spill.bytes_max);
        let ground = Arc::new(Ground::new(schedule, random, sizes, (spill.faults, false)));
        return (Arc::<Ground>::clone(&ground), Box::new(areas::Shared(ground)));
    }
    let disk = Arc::new(Disk::new(schedule, random, spill.bytes_max, spill.faults));
    (Arc::<Disk>::clone(&disk), Box::new(Shared(disk)))
}
