//! A compressed disk in memory as a [`Device`]: [`Zram`] with memory of the system, this thread's CPU and a clock.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::budget::WriteBudget;
use zfolio_core::page::UnitOrder;
use zfolio_core::store::{Backing, Key};
use zfolio_core::zcomp::{self, Params};
use zfolio_core::zram::{self, Zram};
use zfolio_core::zsmalloc::PageSource;
use zfolio_sys::{Errno, clock, cpu, random};
use zfolio_workers::{Accelerated, Crew, Hardware, Threads};

use crate::device::{Device, Error};
use crate::requests::{Kind, Requests};

/// What a disk is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// The size of the disk in bytes: a multiple of the unit.
    pub disk_bytes: u64,
    /// The algorithms; the first compresses what is written, the others are for recompression.
    pub algorithms: Vec<Params>,
    /// What is compressed as one object.
    pub unit: UnitOrder,
    /// The most memory that it may take; 0: any amount.
    pub limit_bytes: u64,
    /// Units that were not used for so many seconds are recompressed, if there is a second algorithm; sooner the nearer
    /// memory is to its limit.
    pub age_s: u32,
    /// What compresses and decompresses beside the threads that serve requests.
    pub accelerated: Accelerated,
}

/// Where a disk writes units back to, and when.
#[derive(Debug)]
pub struct Writeback {
    /// Where.
    pub backing: Box<dyn Backing>,
    /// Its name for people: `backing_dev`.
    pub name: String,
    /// Units that were not used for so many seconds are written; sooner the nearer memory is to its limit.
    pub age_s: u32,
    /// What the disk may write by itself.
    pub budget: WriteBudget,
}

/// Why there is no disk.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unmade {
    /// The size is no multiple of the unit, 0, or too large.
    Size,
    /// A codec could not be set up.
    Codec(zcomp::Error),
    /// The system gives no random bytes.
    Random(Errno),
    /// The system gives no thread.
    Threads(io::Error),
}

impl fmt::Display for Unmade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unmade::Size => {
                f.write_str("the size of the disk is no multiple of the unit, 0, or too large")
            }
            Unmade::Codec(error) => error.fmt(f),
            Unmade::Random(error) => write!(f, "no random key: {error}"),
            Unmade::Threads(error) => write!(f, "no thread for a worker: {error}"),
        }
    }
}

impl std::error::Error for Unmade {}

/// What is called when a unit turns out to be lost.
pub type Report = Box<dyn Fn(&zram::Error) + Send + Sync>;

/// See the module.
pub struct Ram {
    zram: Zram<Arc<dyn PageSource>>,
    since_ns: u64,
    report: Report,
    age_s: u32,
    /// Until then nothing is to be recompressed: a look at all units has found none.
    rests_until_ns: AtomicU64,
    policy: PolicyStat<AtomicU64>,
    writes_back: Option<WritesBack>,
    accelerated: Accelerated,
    requests: Requests,
    _workers: Threads,
}

/// What a disk keeps that writes units back.
struct WritesBack {
    name: String,
    age_s: u32,
    /// As [`Ram::rests_until_ns`].
    rests_until_ns: AtomicU64,
}

/// What the policy has done by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyStat<N = u64> {
    /// Units that were recompressed, or tried.
    pub tried: N,
    /// Units that are smaller since.
    pub shrank: N,
    /// By how many bytes all of them together.
    pub bytes_saved: N,
}

/// How much of its time the thread of [`Ram::work`] may recompress: a twentieth.
const WORK_SHARE: u64 = 20;

/// How much of its time the thread of [`Ram::work`] may join units: an eighth.
const JOIN_SHARE: u64 = 8;

/// Units of which pages are apart are joined when none of them was written for so many seconds.
const JOIN_AGE_S: u32 = 5;

/// Units that are joined between two looks at the clock.
const JOIN_UNITS: usize = 4;

/// Units that are tried between two looks at the clock.
const WORK_UNITS: u64 = 16;

/// At the limit of memory a unit is recompressed at this part of the age that was asked for.
const AGE_PART_MIN: u64 = 60;

/// So long a disk rests on which nothing was old enough, as a part of the age.
const REST_PART: u64 = 20;

/// How much of its time the thread of [`Ram::work`] may write back: half, most of which it waits for the backing.
const WRITE_SHARE: u64 = 2;

/// So long nothing old is written after the budget was used up, or the backing took nothing.
const STOPPED_NS: u64 = 1_000_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// How long to rest after a look at all units that has found none of this age.
fn rest_ns(age_s: u32) -> u64 {
    u64::from(age_s).max(REST_PART) * (SECOND_NS / REST_PART)
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ram").field("stat", &self.zram.mm_stat()).finish_non_exhaustive()
    }
}

impl Ram {
    /// A disk of zeros, whose memory comes from `source`.
    ///
    /// # Errors
    ///
    /// See [`Unmade`].
    ///
    /// # Panics
    ///
    /// If there are no algorithms, or more than [`zram::ALGORITHMS_MAX`].
    pub fn new(
        config: &Config,
        source: Arc<dyn PageSource>,
        report: Report,
    ) -> Result<Ram, Unmade> {
        let mut secret = [0; Key::BYTES];
        random::fill(&mut secret).map_err(Unmade::Random)?;
        Ram::with_key(config, Key::new(secret), source, report)
    }

    /// The same with the key of a disk that was saved, which is to be loaded next ([`crate::saved::load`]).
    ///
    /// # Errors
    ///
    /// See [`Unmade`].
    ///
    /// # Panics
    ///
    /// See [`Ram::new`].
    pub fn with_key(
        config: &Config,
        key: Key,
        source: Arc<dyn PageSource>,
        report: Report,
    ) -> Result<Ram, Unmade> {
        let cpus = cpu::online();
        let accelerated = &config.accelerated;
        let workers = Crew::new(accelerated.workers()).start().map_err(Unmade::Threads)?;
        let codec =
            |params: &Params| accelerated.zcomp(params.clone(), config.unit, cpus, workers.crew());
        let codecs = config.algorithms.iter().map(codec).collect::<Result<_, _>>();
        let codecs = codecs.map_err(Unmade::Codec)?;
        let zram = Zram::new(codecs, source, key, config.disk_bytes, cpus);
        let zram = zram.map_err(|_| Unmade::Size)?;
        let zram = zram.with_pages_apart(config.algorithms[0].clone()).map_err(Unmade::Codec)?;
        zram.set_mem_limit(config.limit_bytes);
        Ok(Ram {
            zram,
            since_ns: clock::monotonic_ns(),
            report,
            age_s: config.age_s,
            rests_until_ns: AtomicU64::new(0),
            policy: PolicyStat::default(),
            writes_back: None,
            accelerated: accelerated.clone(),
            requests: Requests::new(cpus),
            _workers: workers,
        })
    }

    /// The same with a place that units are written back to.
    #[must_use]
    pub fn with_writeback(self, writeback: Writeback) -> Ram {
        let Writeback { backing, name, age_s, budget } = writeback;
        let zram = self.zram.with_backing(backing, budget);
        let rests_until_ns = AtomicU64::new(0);
        Ram { zram, writes_back: Some(WritesBack { name, age_s, rests_until_ns }), ..self }
    }

    /// Where units are written back to: `backing_dev`.
    #[must_use]
    pub fn backing_name(&self) -> &str {
        self.writes_back.as_ref().map_or("none", |writes_back| &writes_back.name)
    }

    /// The accelerator, if it is hardware.
    #[must_use]
    pub fn hardware(&self) -> Option<&dyn Hardware> {
        self.accelerated.hardware()
    }

    /// Drops all contents, and begins what is counted of requests and memory anew.
    pub(crate) fn reset(&self) {
        self.zram.reset();
        self.requests.reset();
        let PolicyStat { tried, shrank, bytes_saved } = &self.policy;
        [tried, shrank, bytes_saved].into_iter().for_each(|count| count.store(0, Relaxed));
    }

    /// The disk.
    #[must_use]
    pub fn zram(&self) -> &Zram<Arc<dyn PageSource>> {
        &self.zram
    }

    /// Whether a client has written or discarded anything, as far as requests have ended.
    pub(crate) fn is_changed(&self) -> bool {
        [Kind::Write, Kind::Discard].iter().any(|kind| self.requests.sums(*kind).0 > 0)
    }

    /// `stat`: what was asked of the disk, as far as it was no mistake.
    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Has the disk know the time: to be called each second or so.
    pub fn tick(&self) {
        self.tick_at(clock::monotonic_ns());
    }

    fn tick_at(&self, now_ns: u64) {
        let age_s = (now_ns - self.since_ns) / 1_000_000_000;
        self.zram.set_now(u32::try_from(age_s).unwrap_or(u32::MAX));
    }

    /// After how many seconds without use a unit is recompressed now: [`Config::age_s`] while memory is empty, and a
    /// 60th of that at the limit.
    #[must_use]
    pub fn age_s(&self) -> u32 {
        self.age_now(self.age_s)
    }

    /// The same for writeback; 0 without a place for it.
    #[must_use]
    pub fn writeback_age_s(&self) -> u32 {
        self.writes_back.as_ref().map_or(0, |writes_back| self.age_now(writes_back.age_s))
    }

    fn age_now(&self, age_s: u32) -> u32 {
        let stat = self.zram.mm_stat();
        let (age, used) = (u64::from(age_s), stat.mem_used_total.min(stat.mem_limit));
        let (least, limit) = (age / AGE_PART_MIN, stat.mem_limit.max(1));
        let less = u128::from(age - least) * u128::from(used) / u128::from(limit);
        u32::try_from(u128::from(age) - less).unwrap_or(age_s)
    }

    /// What the policy has done.
    #[must_use]
    pub fn policy_stat(&self) -> PolicyStat {
        let load = |count: &AtomicU64| count.load(Relaxed);
        let PolicyStat { tried, shrank, bytes_saved } = &self.policy;
        PolicyStat { tried: load(tried), shrank: load(shrank), bytes_saved: load(bytes_saved) }
    }

    /// Has the disk know the time, makes room below its limit, joins units that were written in part, and writes back
    /// and recompresses what is old, each for a part of the time since the last call; has the accelerator look for its
    /// hardware; and gives back memory that became unused. To be called several times a second.
    pub fn work(&self, since_ns: u64) {
        self.tick();
        let began = clock::monotonic_ns();
        self.hardware().into_iter().for_each(|hardware| hardware.look(began));
        if let Some(writes_back) = &self.writes_back {
            self.write_back(writes_back, began, began + since_ns / WRITE_SHARE);
        }
        self.join(JOIN_AGE_S, clock::monotonic_ns() + since_ns / JOIN_SHARE);
        self.recompress(clock::monotonic_ns(), since_ns / WORK_SHARE);
        self.zram.compact_if_wasteful();
    }

    fn write_back(&self, writes_back: &WritesBack, began: u64, until: u64) {
        self.zram.tidy();
        while clock::monotonic_ns() < until && self.zram.write_ahead() {}
        if began < writes_back.rests_until_ns.load(Relaxed) {
            return;
        }
        let age_s = self.writeback_age_s();
        while clock::monotonic_ns() < until {
            let turn = self.zram.write_back_old(age_s);
            let rest_ns = match turn.done.stop {
                Some(_) => STOPPED_NS,
                None if turn.is_round => rest_ns(age_s),
                None => continue,
            };
            return writes_back.rests_until_ns.store(began + rest_ns, Relaxed);
        }
    }

    fn join(&self, age_s: u32, until: u64) {
        while clock::monotonic_ns() < until {
            let joined = self.zram.join_old(cpu::current(), age_s, JOIN_UNITS);
            if joined.units == 0 {
                return;
            }
        }
    }

    fn recompress(&self, began: u64, share_ns: u64) {
        if began < self.rests_until_ns.load(Relaxed) {
            return;
        }
        let age_s = self.age_s();
        while clock::monotonic_ns() < began + share_ns {
            let turn = self.zram.recompress_old(cpu::current(), age_s, WORK_UNITS);
            let counts = [&self.policy.tried, &self.policy.shrank, &self.policy.bytes_saved];
            let done = [turn.done.tried, turn.done.shrank, turn.done.bytes_saved];
            counts.iter().zip(done).for_each(|(count, done)| _ = count.fetch_add(done, Relaxed));
            if turn.is_round {
                self.rests_until_ns.store(began + rest_ns(age_s), Relaxed);
            }
            // Without memory for a second copy of a unit nothing can be done now. A unit that is lost is reported when
            // it is read.
            if turn.is_round || matches!(turn.error, Some(zram::Error::NoMemory)) {
                return;
            }
        }
    }

    /// Carries a request out on this CPU, counts it, and takes its time.
    fn carry_out(
        &self,
        kind: Kind,
        bytes: u64,
        request: impl FnOnce(usize) -> Result<(), zram::Error>,
    ) -> Result<(), Error> {
        let (cpu, began) = (cpu::current(), clock::monotonic_ns());
        // Whoever calls tick() may wait for long, and a rest of the backing ends by this time (`WB-4`).
        self.tick_at(began);
        let done = request(cpu);
        if !matches!(done, Err(zram::Error::Invalid { .. })) {
            self.requests.add(cpu, kind, bytes, clock::monotonic_ns() - began);
        }
        self.answer(done)
    }

    fn answer(&self, done: Result<(), zram::Error>) -> Result<(), Error> {
        done.map_err(|error| match error {
            zram::Error::Invalid { .. } => Error::Invalid,
            zram::Error::NoSpace { .. } => Error::NoSpace,
            zram::Error::NoMemory => Error::NoMemory,
            error => {
                (self.report)(&error);
                Error::Io
            }
        })
    }
}

impl Device for Ram {
    fn size_bytes(&self) -> u64 {
        self.zram.disk_bytes()
    }

    fn preferred_bytes(&self) -> u32 {
        u32::try_from(self.zram.unit().bytes()).expect("2 MiB at most")
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        let bytes = into.len() as u64;
        self.carry_out(Kind::Read, bytes, |cpu| self.zram.read(cpu, at, into))
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Error> {
        let bytes = from.len() as u64;
        self.carry_out(Kind::Write, bytes, |cpu| self.zram.write(cpu, at, from))
    }

    fn discard(&self, at: u64, bytes: u64) -> Result<(), Error> {
        self.carry_out(Kind::Discard, bytes, |cpu| self.zram.discard(cpu, at, bytes))
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _keeps_room: bool) -> Result<(), Error> {
        // There is no room that could be kept: how much contents will take is not known.
        self.carry_out(Kind::Write, bytes, |cpu| self.zram.write_zeroes(cpu, at, bytes))
    }

    fn flush(&self) -> Result<(), Error> {
        // What is in memory survives everything but the end of this process.
        self.carry_out(Kind::Flush, 0, |_| Ok(()))
    }

    fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error> {
        self.answer(self.zram.runs(at, bytes, each))
    }

    fn note_invalid(&self) {
        self.zram.note_invalid();
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::page::UnitOrder;
    use zfolio_core::testing::Random;

    use crate::attributes;
    use crate::device::Device as _;
    use crate::testing::{ram, ram_of_units, written_back};

    /// Goal: requests advance the disk's clock. A rest of the place that units are written to lasted as long as the
    /// thread waited that ticks, and clients had no space meanwhile.
    #[test]
    fn a_request_advances_the_clock() {
        let mut ram = ram(1 << 20, &["lz4"]);
        ram.since_ns -= 2_000_000_000;
        ram.write(0, &[1; 4096]).unwrap();
        let mut state = String::new();
        ram.zram().block_state(&mut state).unwrap();
        let used_s = state.split_whitespace().nth(1).map(|seconds| seconds.parse::<f64>().unwrap());
        assert!(used_s >= Some(2.0), "{state}");
    }

    /// Goal: what is discarded gives its memory back by itself, also where other units share its pages. Method: every
    /// second page of a disk of text.
    #[test]
    fn a_disk_compacts_itself() {
        let ram = ram(8 << 20, &["zstd"]);
        let text = |at: u64| Random::new(at).bytes(700).repeat(6)[..4096].to_vec();
        let pages = 0..2048;
        pages.clone().for_each(|at| ram.write(at << 12, &text(at)).unwrap());
        let filled = ram.zram().mm_stat().mem_used_total;
        pages.clone().step_by(2).for_each(|at| ram.discard(at << 12, 4096).unwrap());
        for _ in 0..10 {
            ram.work(1);
        }
        let stat = ram.zram().mm_stat();
        ram.zram().compact();
        let least = ram.zram().mm_stat().mem_used_total;
        let most = least + least / 16;
        assert!(stat.mem_used_total <= most, "{filled} {} {least}", stat.mem_used_total);
        let mut found = vec![0; 4096];
        for at in pages {
            ram.read(at << 12, &mut found).unwrap();
            assert!(found == if at % 2 == 0 { vec![0; 4096] } else { text(at) }, "page {at}");
        }
    }

    /// Goal: a unit that was not used for the disk's age is recompressed by itself, sooner if memory is short, and the
    /// figures say so.
    #[test]
    fn what_is_old_is_recompressed() {
        let ram = ram(1 << 20, &["lz4", "zstd"]);
        let letters: Vec<u8> = (0..4096_u32).map(|at| b'a' + (at * at % 251 % 16) as u8).collect();
        ram.write(0, &letters).unwrap();
        assert_eq!(ram.age_s(), 600);
        attributes::write(&ram, "mem_limit", &ram.zram().mm_stat().mem_used_total.to_string())
            .unwrap();
        assert_eq!(ram.age_s(), 10);
        attributes::write(&ram, "mem_limit", "0").unwrap();
        let second_ns = 1_000_000_000;
        ram.work(second_ns);
        assert_eq!(ram.policy_stat().tried, 0);
        // The clock of the disk is that of the system: nothing is ever old here but what an age of 0 makes so.
        let turn = ram.zram().recompress_old(0, 0, 9);
        assert_eq!(turn.done.tried, 1);
        let mut found = vec![0; 4096];
        ram.read(0, &mut found).unwrap();
        assert!(found == letters);
    }

    /// Goal: of a disk in large units, pages that are written are apart, and are joined once they are old, however many
    /// there are; the figures say so.
    #[test]
    fn what_was_written_in_part_is_joined() {
        let ram = ram_of_units(UnitOrder::FOLIO, 2 << 20, &["zstd"]);
        let mut contents = Random::new(1).bytes(2 << 20);
        ram.write(0, &contents).unwrap();
        for at in (0..contents.len()).step_by(32 << 10) {
            let page = Random::new(at as u64 + 2).bytes(4096);
            ram.write(at as u64, &page).unwrap();
            contents[at..at + 4096].copy_from_slice(&page);
        }
        ram.work(u64::from(u32::MAX));
        let stat = attributes::read(&ram, "apart_stat").unwrap();
        let columns: Vec<u64> = stat.split_whitespace().map(|word| word.parse().unwrap()).collect();
        assert_eq!(columns, [32, 0, 64, 64 << 12, 0], "all of that is young");
        ram.join(0, u64::MAX);
        let stat = ram.zram().apart_stat();
        assert_eq!((stat.units, stat.pages, stat.joined_units), (0, 0, 32));
        let mut found = vec![0; contents.len()];
        ram.read(0, &mut found).unwrap();
        assert!(found == contents);
    }

    /// Goal: near its limit a disk makes room by itself, and the ages of both policies shrink alike.
    #[test]
    fn room_is_made_by_itself() {
        let ram = written_back(ram(4 << 20, &["lz4", "zstd"]));
        assert_eq!((ram.backing_name(), ram.writeback_age_s()), ("memory", 600));
        let noise = Random::new(1).bytes(2 << 20);
        ram.write(0, &noise).unwrap();
        ram.work(1_000_000_000);
        assert_eq!(ram.zram().writeback_stat().room_units, 0, "there is no limit");
        let used = ram.zram().mm_stat().mem_used_total;
        ram.zram().set_mem_limit(used);
        assert_eq!((ram.age_s(), ram.writeback_age_s()), (10, 10));
        ram.work(1_000_000_000);
        let stat = ram.zram().mm_stat();
        assert!(stat.mem_used_total <= used - used / 16, "{stat:?}");
        assert!(ram.zram().writeback_stat().room_units > 0);
        let mut found = vec![0; noise.len()];
        ram.read(0, &mut found).unwrap();
        assert!(found == noise);
    }
}
