//! One algorithm at one level in units of one size.

use std::fmt;

use serde_json::{Value, json};
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::size;
use zfolio_core::stats::Figures;
use zfolio_core::zcomp::{Bare, Outcome, Params, Zcomp};
use zfolio_core::zsmalloc::{Handle, Pool};
use zfolio_core::zswap::{Checksum, Entry, Zswap};
use zfolio_pager::Runs;
use zfolio_sys::clock;

use super::seconds;
use crate::compare::outcome::median;
use crate::compare::setting::Compression;

/// Units that are stored by one call, as the pager does with a folio of 64 KiB.
const BATCH_BYTES: usize = 64 << 10;

/// Loads that are timed one by one.
const FAULTS: usize = 20_000;

/// What one setting does.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) setting: Compression,
    /// Data over pages and metadata of the pool.
    pub(crate) ratio: f64,
    /// Data over what the codec made of it.
    codec_ratio: f64,
    /// Pages of the pool over the bytes stored in them.
    pool_over_codec: f64,
    /// Metadata of the pool, of the data.
    metadata_share: f64,
    /// Data stored, and loaded, in 10^6 bytes a second.
    pub(crate) store_mb_s: f64,
    pub(crate) load_mb_s: f64,
    /// Without checksums, over the codec alone.
    store_of_bare: f64,
    load_of_bare: f64,
    fault_ns: (u64, u64),
    two_threads: f64,
    two_threads_bare: f64,
}

impl Measured {
    /// Data that is stored and loaded again, in 10^6 bytes a second.
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
            "store_of_bare": self.store_of_bare,
            "load_of_bare": self.load_of_bare,
            "fault_p50_ns": self.fault_ns.0,
            "fault_p99_ns": self.fault_ns.1,
            "two_threads": self.two_threads,
            "two_threads_bare": self.two_threads_bare,
        })
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        write!(
            f,
            "{:<18} {:>4} {:>5.2} {:>6.3} {:>8.3} {:>7.0} {:>6.0} {:>5.2} {:>5.2} {:>6.1} {:>6.1} {:>5.2} {:>5.2}",
            self.setting.algorithm,
            size::display(self.setting.unit_bytes as u64),
            self.ratio,
            self.pool_over_codec,
            self.metadata_share * 100.0,
            self.store_mb_s,
            self.load_mb_s,
            self.store_of_bare,
            self.load_of_bare,
            us(self.fault_ns.0),
            us(self.fault_ns.1),
            self.two_threads,
            self.two_threads_bare,
        )
    }
}

/// Measures one setting on `sample`; one line if a unit does not come back as it was.
pub(crate) fn measure(
    setting: &Compression,
    sample: &[u8],
    rounds: u32,
) -> Result<Measured, String> {
    let params: Params = setting.algorithm.parse().map_err(|error| format!("{error}"))?;
    let unit = UnitOrder::from_bytes(setting.unit_bytes).expect("a setting's unit is one");
    let bench = Bench { params, unit, units: sample.chunks_exact(setting.unit_bytes).collect() };
    let mut times: [Vec<f64>; 8] = Default::default();
    let mut last = None;
    let mut bare = bench.bare()?;
    for round in 0..rounds {
        let (zcomp, pool) = (bench.zcomp()?, Pool::new(Runs::default(), unit));
        times[0].push(bare.compress(&bench.units));
        let (took, places) = bench.fill(&zcomp, &pool);
        times[1].push(took);
        times[2].push(bare.decompress());
        times[3].push(bench.drain(&zcomp, &pool, &places)?);
        let (zswap, figures) = (bench.zswap()?, Figures::default());
        let (took, entries) = bench.store(0, &zswap, &bench.units, &figures);
        times[4].push(took);
        let (took, wrong) = bench.load(&zswap, &entries, round == 0);
        if let Some(index) = wrong {
            return Err(format!("{setting}: unit {index} did not come back as it was"));
        }
        times[5].push(took);
        let (pool, bare) = bench.two_over_one()?;
        times[6].push(pool);
        times[7].push(bare);
        last = Some((zswap, entries));
    }
    let (zswap, entries) = last.expect("there is a round");
    let pool = zswap.pool_stats();
    let (data, pages) = (sample.len() as f64, (pool.pages_used * PAGE_BYTES as u64) as f64);
    let mb_s = |times: &[f64]| data / 1e6 / median(times.to_vec());
    let of = |bare: &[f64], pooled: &[f64]| {
        median(bare.iter().zip(pooled).map(|(bare, pooled)| bare / pooled).collect())
    };
    Ok(Measured {
        setting: setting.clone(),
        ratio: data / (pages + pool.metadata_bytes as f64),
        codec_ratio: data / pool.bytes_stored.max(1) as f64,
        pool_over_codec: pages / pool.bytes_stored.max(1) as f64,
        metadata_share: pool.metadata_bytes as f64 / data,
        store_mb_s: mb_s(&times[4]),
        load_mb_s: mb_s(&times[5]),
        store_of_bare: of(&times[0], &times[1]),
        load_of_bare: of(&times[2], &times[3]),
        fault_ns: bench.faults(&zswap, &entries),
        two_threads: median(times[6].clone()),
        two_threads_bare: median(times[7].clone()),
    })
}

/// Where a unit went that was stored without a checksum.
enum Place {
    Word(u64),
    Compressed(Handle),
    Raw(Handle),
}

/// The codec alone, and what it made of the units.
struct BareLoop {
    codec: Bare,
    bytes: Vec<u8>,
    ends: Vec<Option<usize>>,
    dest: Vec<u8>,
}

impl BareLoop {
    /// Compresses each unit; tells the seconds that the codec took.
    fn compress(&mut self, units: &[&[u8]]) -> f64 {
        let start = Timer::start();
        let mut shrunk = 0;
        for unit in units {
            shrunk += usize::from(self.codec.compress(std::hint::black_box(unit)).is_some());
        }
        let took = start.seconds();
        std::hint::black_box(shrunk);
        if self.ends.is_empty() {
            // Kept for decompress(), and not timed.
            for unit in units {
                let packed = self.codec.compress(unit);
                self.bytes.extend_from_slice(packed.unwrap_or(unit));
                self.ends.push(packed.map(<[u8]>::len));
            }
        }
        took
    }

    /// Decompresses each again; what did not shrink is copied.
    fn decompress(&mut self) -> f64 {
        let (mut rest, mut good) = (&self.bytes[..], true);
        let start = Timer::start();
        for length in &self.ends {
            let (packed, behind) = rest.split_at(length.unwrap_or(self.dest.len()));
            rest = behind;
            match length {
                Some(_) => good &= self.codec.decompress(packed, &mut self.dest),
                None => self.dest.copy_from_slice(packed),
            }
            std::hint::black_box(&mut self.dest);
        }
        let took = start.seconds();
        assert!(good, "a codec reads what it wrote");
        took
    }
}

/// One setting and the units to measure it on.
struct Bench<'a> {
    params: Params,
    unit: UnitOrder,
    units: Vec<&'a [u8]>,
}

impl<'a> Bench<'a> {
    fn bare(&self) -> Result<BareLoop, String> {
        let codec = Bare::new(&self.params, self.unit).map_err(|error| error.to_string())?;
        let (bytes, ends, dest) = (Vec::new(), Vec::new(), vec![0; self.unit.bytes()]);
        Ok(BareLoop { codec, bytes, ends, dest })
    }

    fn zcomp(&self) -> Result<Zcomp, String> {
        Zcomp::new(self.params.clone(), self.unit, 2).map_err(|error| error.to_string())
    }

    fn zswap(&self) -> Result<Zswap<Runs>, String> {
        Ok(Zswap::new(self.zcomp()?, Runs::default(), self.unit))
    }

    fn batches<'u>(&self, units: &'u [&'a [u8]]) -> impl Iterator<Item = &'u [&'a [u8]]> {
        units.chunks((BATCH_BYTES / self.unit.bytes()).max(1))
    }

    /// Stores each unit in a pool, without a checksum.
    fn fill(&self, zcomp: &Zcomp, pool: &Pool<Runs>) -> (f64, Vec<Place>) {
        let mut places = Vec::with_capacity(self.units.len());
        let start = Timer::start();
        for batch in self.batches(&self.units) {
            let first = places.len();
            places.extend(batch.iter().map(|_| Place::Word(0)));
            zcomp.compress(0, batch, &mut |index, outcome| {
                let keep = |bytes| pool.store(bytes).expect("there is memory");
                places[first + index] = match outcome {
                    Outcome::SameFilled(word) => Place::Word(word),
                    Outcome::Compressed(bytes) => Place::Compressed(keep(bytes)),
                    Outcome::Incompressible | Outcome::Failed => Place::Raw(keep(batch[index])),
                };
            });
        }
        (start.seconds(), places)
    }

    /// Loads each unit from the pool.
    fn drain(&self, zcomp: &Zcomp, pool: &Pool<Runs>, places: &[Place]) -> Result<f64, String> {
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

    /// Stores units as the pager does, checksums included.
    fn store(
        &self,
        cpu: usize,
        zswap: &Zswap<Runs>,
        units: &[&[u8]],
        figures: &Figures,
    ) -> (f64, Vec<Option<Entry>>) {
        let mut entries = Vec::with_capacity(units.len());
        let start = Timer::start();
        for batch in units.chunks((BATCH_BYTES / self.unit.bytes()).max(1)) {
            let first = entries.len();
            entries.extend(batch.iter().map(|_| None));
            let mut checksums = [Checksum::default(); BATCH_BYTES / PAGE_BYTES];
            for (checksum, unit) in checksums.iter_mut().zip(batch) {
                *checksum = Checksum::of(unit);
            }
            zswap.store(cpu, batch, &checksums[..batch.len()], figures, &mut |index, entry| {
                entries[first + index] = entry.ok();
            });
        }
        (start.seconds(), entries)
    }

    /// Loads each unit; tells the first that is not what was stored, if it is to `compare`.
    fn load(
        &self,
        zswap: &Zswap<Runs>,
        entries: &[Option<Entry>],
        compare: bool,
    ) -> (f64, Option<usize>) {
        let (mut dest, mut wrong) = (vec![0_u8; self.unit.bytes()], None);
        let start = Timer::start();
        for (index, entry) in entries.iter().enumerate() {
            let loaded =
                entry.as_ref().is_some_and(|entry| zswap.load(0, entry, &mut dest).is_ok());
            if !loaded || (compare && dest != self.units[index]) {
                wrong = wrong.or(Some(index));
            }
            std::hint::black_box(&mut dest);
        }
        (start.seconds(), wrong)
    }

    /// The speed of two threads that work on half of the units each, over that of one: storing into one
    /// pool, and the codec alone. What the latter is below 2 is the processor's.
    fn two_over_one(&self) -> Result<(f64, f64), String> {
        let (one, two, figures) = (self.zswap()?, self.zswap()?, Figures::default());
        let store = |(cpu, zswap): &mut (usize, &Zswap<Runs>), units: &[&[u8]]| {
            drop(self.store(*cpu, zswap, units, &figures));
        };
        let pool = self.doubled((0, &one), [(0, &two), (1, &two)], store);
        let compress = |codec: &mut Bare, units: &[&[u8]]| {
            for unit in units {
                std::hint::black_box(codec.compress(unit));
            }
        };
        let bare = || Bare::new(&self.params, self.unit).map_err(|error| error.to_string());
        Ok((pool, self.doubled(bare()?, [bare()?, bare()?], compress)))
    }

    /// The time that `work` takes for all units with `one`, over that for a half of them with each of `two`
    /// at once.
    fn doubled<T: Send>(
        &self,
        mut one: T,
        two: [T; 2],
        work: impl Fn(&mut T, &[&[u8]]) + Sync,
    ) -> f64 {
        let (lower, upper) = self.units.split_at(self.units.len() / 2);
        let [mut first, mut second] = two;
        let start = clock::monotonic_ns();
        work(&mut one, &self.units);
        let between = clock::monotonic_ns();
        std::thread::scope(|scope| {
            scope.spawn(|| work(&mut second, upper));
            work(&mut first, lower);
        });
        seconds(between - start) / seconds(clock::monotonic_ns() - between)
    }

    /// The median and the 99th percentile of a load at a random place, in nanoseconds.
    fn faults(&self, zswap: &Zswap<Runs>, entries: &[Option<Entry>]) -> (u64, u64) {
        let mut dest = vec![0_u8; self.unit.bytes()];
        let mut random = 1_u64;
        let mut times: Vec<u64> = (0..FAULTS)
            .filter_map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(random >> 33).unwrap_or(0) % entries.len();
                let entry = entries[at].as_ref()?;
                let start = clock::monotonic_ns();
                let loaded = zswap.load(0, entry, &mut dest);
                let took = clock::monotonic_ns() - start;
                loaded.ok().map(|()| took)
            })
            .collect();
        times.sort_unstable();
        let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(0);
        (at(50), at(99))
    }
}

/// What this thread has run: other programs on the machine do not count.
struct Timer(u64);

impl Timer {
    fn start() -> Timer {
        Timer(clock::thread_ns())
    }

    fn seconds(&self) -> f64 {
        seconds(clock::thread_ns() - self.0)
    }
}
