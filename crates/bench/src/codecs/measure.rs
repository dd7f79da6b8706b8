//! The measurement of one algorithm at one level, in units of one size.

use std::fmt;

use serde_json::{Value, json};
use zfolio_core::page::{PAGE_BYTES, UnitOrder, same_filled};
use zfolio_core::size;
use zfolio_core::stats::Figures;
use zfolio_core::store::{CodecId, EntryId, Incoming, Key, Loaded, Outgoing, Store};
use zfolio_core::zcomp::{BATCH_MAX, Bare, Element, Outcome, Params, Zcomp};
use zfolio_core::zsmalloc::{Handle, Pool};
use zfolio_pager::PoolMappings;
use zfolio_sys::clock;

use super::{pack, seconds, unpack};
use crate::compare::outcome::median;
use crate::compare::setting::Compression;
use crate::usemem::random_below;

/// Bytes that are stored by one call, as the pager does with a folio of 64 KiB.
const BATCH_BYTES: usize = 64 << 10;

/// Units of a batch, at most.
const BATCH_UNITS: usize = BATCH_BYTES / PAGE_BYTES;

/// Loads that are timed one by one if units are small; for large units, as many as load 1 GiB.
const FAULTS: usize = 20_000;

/// One batch of this many is removed from a pool and then stored into the room that it left. The
/// other batches keep their places, so that almost no zspage becomes empty and is freed.
const PART: usize = 4;

/// With fewer units a measurement with two threads says nothing.
const UNITS_FOR_TWO: usize = 32;

/// The results for one setting.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) setting: Compression,
    /// Data divided by pages and metadata of the pool.
    pub(crate) ratio: f64,
    /// Data divided by the bytes after compression.
    codec_ratio: f64,
    /// Pages of the pool divided by the bytes stored in them.
    pool_over_codec: f64,
    /// Metadata of the pool divided by the data.
    metadata_share: f64,
    /// Speed of storing and of loading, in 10^6 bytes of data per second.
    pub(crate) store_mb_s: f64,
    pub(crate) load_mb_s: f64,
    /// Speeds without checksums, divided by those of the codec alone: into a new pool, which gets
    /// its pages from the system; into a pool that has room; and out of it.
    new_of_bare: f64,
    store_of_bare: f64,
    load_of_bare: f64,
    fault_ns: (u64, u64),
    /// The speed of two threads divided by that of one, in the pool and for the codec alone; `None`
    /// for too little data.
    two_threads: Option<(f64, f64)>,
}

impl Measured {
    /// Speed of storing and loading together, in 10^6 bytes of data per second.
    pub(crate) fn both_mb_s(&self) -> f64 {
        1.0 / (1.0 / self.store_mb_s + 1.0 / self.load_mb_s)
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "algorithm": self.setting.algorithm,
            "unit_bytes": self.setting.unit_bytes,
            "ratio": self.ratio,
            "codec_ratio": self.codec_ratio,
            "pool_over_codec": self.pool_over_codec,
            "metadata_share": self.metadata_share,
            "store_mb_s": self.store_mb_s,
            "load_mb_s": self.load_mb_s,
            "store_new_of_bare": self.new_of_bare,
            "store_of_bare": self.store_of_bare,
            "load_of_bare": self.load_of_bare,
            "fault_p50_ns": self.fault_ns.0,
            "fault_p99_ns": self.fault_ns.1,
            "two_threads": self.two_threads.map(|(pool, _)| pool),
            "two_threads_bare": self.two_threads.map(|(_, bare)| bare),
        })
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        let times =
            |times: Option<f64>| times.map_or("-".to_owned(), |times| format!("{times:.2}"));
        write!(
            f,
            "{:<18} {:>4} {:>5.2} {:>6.3} {:>8.3} {:>7.0} {:>6.0} {:>5.2} {:>5.2} {:>5.2} {:>6.1} {:>6.1} {:>5} {:>5}",
            self.setting.algorithm,
            size::display(self.setting.unit_bytes() as u64),
            self.ratio,
            self.pool_over_codec,
            self.metadata_share * 100.0,
            self.store_mb_s,
            self.load_mb_s,
            self.new_of_bare,
            self.store_of_bare,
            self.load_of_bare,
            us(self.fault_ns.0),
            us(self.fault_ns.1),
            times(self.two_threads.map(|(pool, _)| pool)),
            times(self.two_threads.map(|(_, bare)| bare)),
        )
    }
}

/// The seconds of one round, except for the last two fields.
struct Round {
    /// The codec alone.
    bare_in: f64,
    bare_out: f64,
    /// A new pool, without checksums.
    new: f64,
    out: f64,
    /// A part of the units, stored once more into the same pool; and the codec alone on that part.
    again: f64,
    bare_again: f64,
    /// The complete store.
    store: f64,
    load: f64,
    /// The speed of two threads divided by that of one.
    two_threads: f64,
    two_threads_bare: f64,
}

/// Measures one setting on `sample`; an error is one line, if a unit does not come back unchanged.
pub(crate) fn measure(
    setting: &Compression,
    params: Params,
    sample: &[u8],
    rounds: u32,
) -> Result<Measured, String> {
    let unit = UnitOrder::from_bytes(setting.unit_bytes()).expect("a setting's unit is one");
    let bench = Bench { params, unit, units: sample.chunks_exact(setting.unit_bytes()).collect() };
    let part: Vec<&[u8]> = bench.batches(&bench.units).step_by(PART).flatten().copied().collect();
    let (lower, upper) = part.split_at(part.len() / 2);
    // Made once for all rounds: on a virtual machine, freed memory may go back to the host, and the
    // next one to use it would wait for the host.
    let mut bare = bench.bare(&bench.units)?;
    let [mut bare_part, mut bare_lower, mut bare_upper] =
        [bench.bare(&part)?, bench.bare(lower)?, bench.bare(upper)?];
    let (mut finished, mut last) = (Vec::new(), None);
    for round in 0..rounds {
        let (zcomp, pool) = (bench.zcomp()?, Pool::new(PoolMappings::default(), unit));
        let bare_in = bare.compress();
        let (new, places) = bench.fill(&zcomp, &pool, &bench.units);
        let bare_out = bare.decompress();
        let out = bench.drain(&zcomp, &pool, &places)?;
        let bare_again = bare_part.compress();
        bench.batches(&places).step_by(PART).flatten().for_each(|place| place.free(&pool));
        let (again, _) = bench.fill(&zcomp, &pool, &part);
        let (units, figures) = (bench.new_store()?, Figures::default());
        let (store, mut entries) = bench.store(0, &units, &bench.units, &figures);
        let (load, wrong) = bench.load(&units, &entries, round == 0);
        if let Some(index) = wrong {
            return Err(format!("{setting}: unit {index} did not come back as it was"));
        }
        let filled = units.pool_stats();
        let two_threads = bench.two_over_one(&units, &mut entries, &part);
        let bare_one = wall(|| _ = bare_part.compress());
        let bare_two = both(|| _ = bare_lower.compress(), || _ = bare_upper.compress());
        let round = Round {
            bare_in,
            bare_out,
            new,
            out,
            again,
            bare_again,
            store,
            load,
            two_threads,
            two_threads_bare: bare_one / bare_two,
        };
        finished.push(round);
        last = Some((units, entries, filled));
    }
    let (units, entries, pool) = last.expect("there is a round");
    let (data, pages) = (sample.len() as f64, (pool.pages_used * PAGE_BYTES as u64) as f64);
    let of = |value: fn(&Round) -> f64| median(finished.iter().map(value).collect());
    Ok(Measured {
        setting: setting.clone(),
        ratio: data / (pages + pool.metadata_bytes as f64),
        codec_ratio: data / pool.bytes_stored.max(1) as f64,
        pool_over_codec: pages / pool.bytes_stored.max(1) as f64,
        metadata_share: pool.metadata_bytes as f64 / data,
        store_mb_s: data / 1e6 / of(|round| round.store),
        load_mb_s: data / 1e6 / of(|round| round.load),
        new_of_bare: of(|round| round.bare_in / round.new),
        store_of_bare: of(|round| round.bare_again / round.again),
        load_of_bare: of(|round| round.bare_out / round.out),
        fault_ns: bench.faults(&units, &entries),
        two_threads: (part.len() >= UNITS_FOR_TWO)
            .then(|| (of(|round| round.two_threads), of(|round| round.two_threads_bare))),
    })
}

/// The place of a unit that was stored without a checksum.
enum Place {
    Word(u64),
    Compressed(Handle),
    Raw(Handle),
}

impl Place {
    fn free(&self, pool: &Pool<PoolMappings>) {
        if let Place::Compressed(handle) | Place::Raw(handle) = self {
            pool.free(*handle);
        }
    }
}

/// The codec alone, as in lzbench: it writes the compressed units one after the other into memory
/// that exists already.
struct BareLoop<'u, 'a> {
    codec: Bare,
    units: &'u [&'a [u8]],
    bytes: Vec<u8>,
    /// Compressed length per unit; a unit that did not shrink counts its full size.
    lengths: Vec<usize>,
    dest: Vec<u8>,
}

impl BareLoop<'_, '_> {
    /// Compresses each unit; returns the seconds.
    fn compress(&mut self) -> f64 {
        let mut end = 0;
        let start = Timer::start();
        for (unit, length) in self.units.iter().zip(&mut self.lengths) {
            *length = pack(&mut self.codec, unit, &mut self.bytes[end..]);
            end += *length;
        }
        start.seconds()
    }

    /// Decompresses each unit; returns the seconds.
    fn decompress(&mut self) -> f64 {
        let (mut rest, mut good) = (&self.bytes[..], true);
        let start = Timer::start();
        for length in &self.lengths {
            let (packed, behind) = rest.split_at(*length);
            rest = behind;
            good &= unpack(&mut self.codec, packed, &mut self.dest);
            std::hint::black_box(&mut self.dest);
        }
        let took = start.seconds();
        assert!(good, "a codec reads what it wrote");
        took
    }
}

/// One setting, and the units to measure.
struct Bench<'a> {
    params: Params,
    unit: UnitOrder,
    units: Vec<&'a [u8]>,
}

impl<'a> Bench<'a> {
    fn bare<'u>(&self, units: &'u [&'a [u8]]) -> Result<BareLoop<'u, 'a>, String> {
        let codec = Bare::new(&self.params, self.unit).map_err(|error| error.to_string())?;
        // Written once, so that the pages exist; with room for one more unit, which the last one
        // needs.
        let bytes = vec![1; (units.len() + 1) * self.unit.bytes()];
        let (lengths, dest) = (vec![0; units.len()], vec![0; self.unit.bytes()]);
        Ok(BareLoop { codec, units, bytes, lengths, dest })
    }

    fn zcomp(&self) -> Result<Zcomp, String> {
        Zcomp::new(self.params.clone(), self.unit, 2).map_err(|error| error.to_string())
    }

    fn new_store(&self) -> Result<Store<PoolMappings>, String> {
        // The speed does not depend on the key.
        let key = Key::new([0xA5; Key::BYTES]);
        Ok(Store::new(vec![self.zcomp()?], PoolMappings::default(), key))
    }

    fn batches<'t, T>(&self, units: &'t [T]) -> std::slice::Chunks<'t, T> {
        units.chunks(self.batch())
    }

    fn batch(&self) -> usize {
        (BATCH_BYTES / self.unit.bytes()).max(1)
    }

    /// Stores each unit in a pool, without a checksum.
    fn fill(&self, zcomp: &Zcomp, pool: &Pool<PoolMappings>, units: &[&[u8]]) -> (f64, Vec<Place>) {
        let mut places = Vec::with_capacity(units.len());
        let start = Timer::start();
        for batch in self.batches(units) {
            let first = places.len();
            places.extend(batch.iter().map(|_| Place::Word(0)));
            // What goes to the codec, and the place of each.
            let mut sources = [&[][..]; BATCH_UNITS];
            let mut indices = [0; BATCH_UNITS];
            let mut wanted = 0;
            for (index, unit) in batch.iter().enumerate() {
                match same_filled(unit) {
                    Some(word) => places[first + index] = Place::Word(word),
                    None => {
                        (sources[wanted], indices[wanted]) = (*unit, first + index);
                        wanted += 1;
                    }
                }
            }
            let (sources, indices) = (&sources[..wanted], &indices[..wanted]);
            zcomp.compress(0, sources, &mut |elements| {
                // The objects for the pool: their bytes, their units, and their kinds.
                let mut objects = [&[][..]; BATCH_MAX];
                let mut owners = [(0, Place::Raw as fn(Handle) -> Place); BATCH_MAX];
                for (at, Element { index, outcome }) in elements.iter().enumerate() {
                    let (bytes, place): (_, fn(Handle) -> Place) = match *outcome {
                        Outcome::Compressed(bytes) => (bytes, Place::Compressed),
                        Outcome::Incompressible | Outcome::Failed => (sources[*index], Place::Raw),
                    };
                    (objects[at], owners[at]) = (bytes, (indices[*index], place));
                }
                pool.store_batch(&objects[..elements.len()], &mut |at, handle| {
                    let (index, place) = owners[at];
                    places[index] = place(handle.expect("there is memory"));
                });
            });
        }
        (start.seconds(), places)
    }

    /// Loads each unit from the pool.
    fn drain(
        &self,
        zcomp: &Zcomp,
        pool: &Pool<PoolMappings>,
        places: &[Place],
    ) -> Result<f64, String> {
        let (mut dest, mut good) = (vec![0_u8; self.unit.bytes()], true);
        let start = Timer::start();
        for place in places {
            match place {
                Place::Word(word) => {
                    dest.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&word.to_ne_bytes()));
                }
                Place::Raw(handle) => pool.read(*handle, |bytes| dest.copy_from_slice(bytes)),
                Place::Compressed(handle) => {
                    good &=
                        pool.read(*handle, |bytes| zcomp.decompress(0, bytes, &mut dest).is_ok());
                }
            }
            std::hint::black_box(&mut dest);
        }
        let took = start.seconds();
        let wrong = || format!("{}: a unit does not decompress", self.params);
        if good { Ok(took) } else { Err(wrong()) }
    }

    /// Stores units as the pager does, with checksums.
    fn store(
        &self,
        cpu: usize,
        store: &Store<PoolMappings>,
        units: &[&[u8]],
        figures: &Figures,
    ) -> (f64, Vec<Option<EntryId>>) {
        let mut entries = Vec::with_capacity(units.len());
        let start = Timer::start();
        for batch in self.batches(units) {
            let mut outgoing: [Outgoing<'_>; BATCH_UNITS] = Default::default();
            for (outgoing, unit) in outgoing.iter_mut().zip(batch) {
                *outgoing = Outgoing::new(unit, None);
            }
            let outgoing = &mut outgoing[..batch.len()];
            store.store(cpu, CodecId::FIRST, outgoing, figures);
            entries.extend(outgoing.iter_mut().map(|unit| unit.entry.take()));
        }
        (start.seconds(), entries)
    }

    /// Loads each unit. With `compare`, returns an error for the first one that is not what was
    /// stored.
    fn load(
        &self,
        store: &Store<PoolMappings>,
        entries: &[Option<EntryId>],
        compare: bool,
    ) -> (f64, Option<usize>) {
        let (mut dest, mut wrong) = (vec![0_u8; self.unit.bytes()], None);
        let start = Timer::start();
        for (index, entry) in entries.iter().enumerate() {
            let is_loaded = entry.as_ref().is_some_and(|entry| load(store, entry, &mut dest));
            if !is_loaded || (compare && dest != self.units[index]) {
                wrong = wrong.or(Some(index));
            }
            std::hint::black_box(&mut dest);
        }
        (start.seconds(), wrong)
    }

    /// The speed of two threads that each store half of a `part` of the units, divided by that of
    /// one thread. The pool has room, so that the speed of the system's page allocation on two CPUs
    /// is not measured.
    fn two_over_one(
        &self,
        store: &Store<PoolMappings>,
        entries: &mut [Option<EntryId>],
        part: &[&[u8]],
    ) -> f64 {
        let figures = Figures::default();
        let mut stored: Vec<Option<EntryId>> =
            entries.chunks_mut(self.batch()).step_by(PART).flatten().map(Option::take).collect();
        let take_out = |stored: &mut Vec<Option<EntryId>>| {
            stored.drain(..).flatten().for_each(|entry| store.invalidate(entry, &figures));
        };
        take_out(&mut stored);
        let one = wall(|| stored = self.store(0, store, part, &figures).1);
        take_out(&mut stored);
        let (lower, upper) = part.split_at(part.len() / 2);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let two = both(
            || first = self.store(0, store, lower, &figures).1,
            || second = self.store(1, store, upper, &figures).1,
        );
        let places = entries.chunks_mut(self.batch()).step_by(PART).flatten();
        for (place, entry) in places.zip(first.into_iter().chain(second)) {
            *place = entry;
        }
        one / two
    }

    /// The median and the 99th percentile of a load at a random place, in nanoseconds.
    fn faults(&self, store: &Store<PoolMappings>, entries: &[Option<EntryId>]) -> (u64, u64) {
        let mut dest = vec![0_u8; self.unit.bytes()];
        let mut random = 1_u64;
        let mut times: Vec<u64> = (0..FAULTS.min((1 << 30) / self.unit.bytes()))
            .filter_map(|_| {
                let entry = entries[random_below(&mut random, entries.len())].as_ref()?;
                let start = clock::monotonic_ns();
                let is_loaded = load(store, entry, &mut dest);
                let took = clock::monotonic_ns() - start;
                is_loaded.then_some(took)
            })
            .collect();
        times.sort_unstable();
        let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(0);
        (at(50), at(99))
    }
}

/// Loads one unit, as a fault does. Whether it came.
fn load(store: &Store<PoolMappings>, entry: &EntryId, dest: &mut [u8]) -> bool {
    let mut wanted = [Incoming::new(entry, dest)];
    store.load(0, &mut wanted);
    wanted[0].outcome == Loaded::Whole
}

/// The seconds that `work` takes.
fn wall(work: impl FnOnce()) -> f64 {
    let start = clock::monotonic_ns();
    work();
    seconds(clock::monotonic_ns() - start)
}

/// The elapsed seconds of two threads.
fn both(first: impl FnOnce(), second: impl FnOnce() + Send) -> f64 {
    wall(|| {
        std::thread::scope(|scope| {
            scope.spawn(second);
            first();
        });
    })
}

/// CPU time of this thread, which other programs on the machine do not affect.
struct Timer(u64);

impl Timer {
    fn start() -> Timer {
        Timer(clock::thread_ns())
    }

    fn seconds(&self) -> f64 {
        seconds(clock::thread_ns() - self.0)
    }
}
