//! One part of a check, on its own thread with its own streams.

use std::sync::mpsc::Sender;
use std::thread;

use super::contents::contents;
use super::guarded::Guarded;
use super::{Promise, Streams, Told};
use crate::testing::Random;
use crate::zcomp::{Answer, Corrupt, Job, Unpack, compressed_bytes_max, stream};

/// The parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Units one at a time.
    Alone,
    /// Batches of every length.
    Batches,
    /// Sources that were damaged, and destinations of other lengths.
    Damaged,
    /// Beginnings of units.
    Prefixes,
    /// Streams beside those of other threads.
    Together,
    /// One backend compresses, and another one decompresses.
    Format,
}

impl Part {
    /// Those that one thread runs with one stream.
    pub(super) const OF_ONE_STREAM: [Part; 4] =
        [Part::Alone, Part::Batches, Part::Damaged, Part::Prefixes];
}

/// What became of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Made {
    Compressed(Vec<u8>),
    Incompressible,
    Failed,
}

impl Made {
    fn name(&self) -> &'static str {
        match self {
            Made::Compressed(_) => "Compressed",
            Made::Incompressible => "Incompressible",
            Made::Failed => "Failed",
        }
    }
}

/// A unit, what it is called, and its compressed form.
#[derive(Debug, Clone)]
struct Sample {
    name: &'static str,
    unit: Vec<u8>,
    packed: Vec<u8>,
}

type Unpacked = Result<Vec<u8>, Corrupt>;

/// Bytes of units that are damaged in one check: small units are cheap.
const DAMAGED_BYTES: usize = 1 << 20;

/// See the module.
pub(super) struct Trial {
    unit_bytes: usize,
    batch_max: usize,
    streams: Vec<Streams>,
    random: Random,
    tell: Sender<Told>,
}

impl Trial {
    pub(super) fn new(
        unit_bytes: usize,
        batch_max: usize,
        streams: Vec<Streams>,
        random: Random,
        tell: Sender<Told>,
    ) -> Trial {
        Trial { unit_bytes, batch_max, streams, random, tell }
    }

    pub(super) fn run(mut self, part: Part) {
        let before = self.streams[0].memory_bytes();
        match part {
            Part::Alone => self.alone(),
            Part::Batches => self.batches(),
            Part::Damaged => self.damaged(),
            Part::Prefixes => self.prefixes(),
            Part::Together => self.together(),
            Part::Format => self.format(),
        }
        let after = self.streams[0].memory_bytes();
        if before != after {
            let what =
                format!("a stream's two directions had {before:?} bytes, and {after:?} later");
            self.broken(Promise::Memory, what);
        }
    }

    fn tell(&self, told: Told) {
        if self.tell.send(told).is_err() {
            // A call took so long that nobody waits for this thread any more.
            loop {
                thread::park();
            }
        }
    }

    fn broken(&self, promise: Promise, what: String) {
        self.tell(Told::Broken(promise, what));
    }

    /// The room for a compressed unit.
    fn room(&self) -> usize {
        compressed_bytes_max(self.unit_bytes)
    }

    /// What an answer means, if it is a possible one.
    fn made(&self, name: &str, answer: Answer, place: &Guarded) -> Made {
        if !place.is_intact() {
            self.broken(Promise::Outside, format!("{name}: compressed outside of its destination"));
        }
        let room = place.dest().len();
        match answer {
            Answer::Compressed(bytes) if (1..=room).contains(&bytes) => {
                Made::Compressed(place.dest()[..bytes].to_vec())
            }
            Answer::Compressed(bytes) => {
                let what = format!("{name}: compressed to {bytes} bytes where {room} have room");
                self.broken(Promise::Length, what);
                Made::Failed
            }
            Answer::Incompressible => Made::Incompressible,
            Answer::Failed => Made::Failed,
        }
    }

    fn compress(&mut self, name: &str, unit: &[u8], room: usize) -> Made {
        self.tell(Told::Calls("compress_unit"));
        let mut place = Guarded::new(room, 0x3C);
        let before = unit.to_vec();
        let answer = self.streams[0].compressor.compress_unit(unit, place.dest_mut());
        self.is_unchanged(name, &before, unit);
        self.made(name, answer, &place)
    }

    fn compress_batch(&mut self, stream: usize, units: &[(&str, &[u8])]) -> Vec<Made> {
        self.tell(Told::Calls("submit and poll, to compress"));
        let mut places: Vec<Guarded> =
            units.iter().map(|_| Guarded::new(self.room(), 0x3C)).collect();
        let each = units.iter().zip(&mut places).enumerate();
        let mut jobs: Vec<Job<'_>> = each
            .map(|(index, ((_, source), place))| Job {
                index,
                source,
                dest: place.dest_mut(),
                answer: Answer::Failed,
            })
            .collect();
        let slices = |jobs: &[Job<'_>]| -> Vec<_> {
            jobs.iter().map(|job| (job.source.as_ptr_range(), job.dest.as_ptr_range())).collect()
        };
        let before = slices(&jobs);
        stream::work(&mut *self.streams[stream].compressor, &mut jobs);
        if slices(&jobs) != before {
            self.broken(Promise::Job, "a job to compress has other slices afterwards".to_owned());
        }
        let answers: Vec<Answer> = jobs.into_iter().map(|job| job.answer).collect();
        let each = units.iter().zip(&places).zip(answers);
        each.map(|(((name, _), place), answer)| self.made(name, answer, place)).collect()
    }

    fn is_unchanged(&self, name: &str, before: &[u8], now: &[u8]) {
        if before != now {
            self.broken(Promise::Outside, format!("{name}: the source was written to"));
        }
    }

    /// Decompresses to a destination in which each byte is `fill` before.
    fn decompress(&mut self, name: &str, source: &[u8], bytes: usize, fill: u8) -> Unpacked {
        self.tell(Told::Calls("decompress"));
        let mut place = Guarded::new(bytes, fill);
        let before = source.to_vec();
        let result = self.streams[0].decompressor.decompress(source, place.dest_mut());
        self.is_unchanged(name, &before, source);
        self.unpacked(name, result, &place)
    }

    fn unpacked(&self, name: &str, result: Result<(), Corrupt>, place: &Guarded) -> Unpacked {
        if !place.is_intact() {
            let what = format!("{name}: decompressed outside of its destination");
            self.broken(Promise::Outside, what);
        }
        result.map(|()| place.dest().to_vec())
    }

    fn unpack_batch(&mut self, stream: usize, sources: &[(&str, &[u8])]) -> Vec<Unpacked> {
        self.tell(Told::Calls("submit and poll, to decompress"));
        let mut places: Vec<Guarded> =
            sources.iter().map(|_| Guarded::new(self.unit_bytes, 0xC3)).collect();
        let each = sources.iter().zip(&mut places);
        let mut jobs: Vec<Unpack<'_>> =
            each.map(|((_, source), place)| Unpack::new(source, place.dest_mut())).collect();
        let slices = |jobs: &[Unpack<'_>]| -> Vec<_> {
            jobs.iter().map(|job| (job.source.as_ptr_range(), job.dest.as_ptr_range())).collect()
        };
        let before = slices(&jobs);
        stream::unpack(&mut *self.streams[stream].decompressor, &mut jobs);
        if slices(&jobs) != before {
            self.broken(Promise::Job, "a job to decompress has other slices afterwards".to_owned());
        }
        let results: Vec<_> = jobs.into_iter().map(|job| job.result).collect();
        let each = sources.iter().zip(&places).zip(results);
        each.map(|(((name, _), place), result)| self.unpacked(name, result, place)).collect()
    }

    /// Compares what came back.
    fn compare(&self, promise: Promise, what: &str, found: &Unpacked, unit: &[u8]) {
        let why = match found {
            Err(Corrupt) => "what was compressed is Corrupt".to_owned(),
            Ok(found) if found == unit => return,
            Ok(found) => {
                let at = found.iter().zip(unit).position(|(found, byte)| found != byte);
                format!("another byte {} came back", at.unwrap_or(unit.len()))
            }
        };
        self.broken(promise, format!("{what}: {why}"));
    }

    fn check_comes_back(&mut self, promise: Promise, what: &str, packed: &[u8], unit: &[u8]) {
        let found = self.decompress(what, packed, self.unit_bytes, 0x5A);
        self.compare(promise, what, &found, unit);
    }

    /// Units that shrink, of every kind.
    fn samples(&mut self) -> Vec<Sample> {
        let units = contents(&mut self.random, self.unit_bytes);
        let each = units.into_iter().filter_map(|(name, unit)| {
            let made = self.compress(name, &unit, self.room());
            if let Made::Compressed(packed) = made {
                Some(Sample { name, unit, packed })
            } else {
                None
            }
        });
        let samples: Vec<Sample> = each.collect();
        if samples.is_empty() {
            let what = "no unit of any kind shrinks, not even one of zeros".to_owned();
            self.broken(Promise::Shrinks, what);
        }
        samples
    }

    fn alone(&mut self) {
        let samples = self.samples();
        for Sample { name, unit, packed } in &samples {
            self.check_comes_back(Promise::RoundTrip, name, packed, unit);
            let bytes = packed.len();
            for room in [1, 2, bytes / 2, bytes - 1] {
                if (1..bytes).contains(&room) {
                    self.check_small_dest(name, unit, room);
                }
            }
            match self.compress(name, unit, self.room()) {
                Made::Compressed(packed) => {
                    self.check_comes_back(Promise::Aftermath, name, &packed, unit);
                }
                made => {
                    let made = made.name();
                    let what = format!("{name}: it was Compressed, and is {made} after a failure");
                    self.broken(Promise::Aftermath, what);
                }
            }
        }
    }

    fn check_small_dest(&mut self, name: &str, unit: &[u8], room: usize) {
        let what = format!("{name}, in a destination of {room} bytes");
        match self.compress(&what, unit, room) {
            Made::Compressed(packed) => {
                self.check_comes_back(Promise::SmallDest, &what, &packed, unit);
            }
            Made::Incompressible => {}
            Made::Failed => {
                self.broken(Promise::SmallDest, format!("{what}: Failed, not Incompressible"));
            }
        }
    }

    fn batches(&mut self) {
        self.empty_batches();
        for count in 1..=self.batch_max {
            for _ in 0..3 {
                let units = contents(&mut self.random, self.unit_bytes);
                let alone: Vec<Made> = units
                    .iter()
                    .map(|(name, unit)| self.compress(name, unit, self.room()))
                    .collect();
                let chosen: Vec<usize> =
                    (0..count).map(|_| self.random.below(units.len())).collect();
                let batch: Vec<(&str, &[u8])> =
                    chosen.iter().map(|at| (units[*at].0, &*units[*at].1)).collect();
                let together = self.compress_batch(0, &batch);
                for (at, (made, which)) in together.iter().zip(&chosen).enumerate() {
                    let (name, unit) = &units[*which];
                    let what = format!("{name}, as element {at} of {count}");
                    self.check_element(&what, &alone[*which], made, unit);
                }
                self.check_unpack(count, &units, &alone);
            }
            // Others have gone before: a stream that learns from its batches has something to go by.
            self.empty_batches();
        }
    }

    /// Batches without a job: they end, and change nothing for the next ones.
    fn empty_batches(&mut self) {
        self.compress_batch(0, &[]);
        self.unpack_batch(0, &[]);
    }

    /// An element of a batch has the result that it has alone. What shrinks by so little that it may depend on
    /// anything is not compared.
    fn check_element(&mut self, what: &str, alone: &Made, made: &Made, unit: &[u8]) {
        match (alone, made) {
            (_, Made::Compressed(packed)) => {
                self.check_comes_back(Promise::Batch, what, packed, unit);
            }
            (Made::Compressed(packed), made) if packed.len() < self.room() / 8 * 7 => {
                let what = format!("{what}: Compressed alone, and {} in a batch", made.name());
                self.broken(Promise::Batch, what);
            }
            _ => {}
        }
    }

    /// Decompresses a batch of `count` units, without a damaged one and with one.
    fn check_unpack(&mut self, count: usize, units: &[(&'static str, Vec<u8>)], alone: &[Made]) {
        let packed: Vec<(&str, &[u8], &[u8])> = units
            .iter()
            .zip(alone)
            .filter_map(|((name, unit), made)| match made {
                Made::Compressed(packed) => Some((*name, &unit[..], &packed[..])),
                _ => None,
            })
            .collect();
        if packed.is_empty() {
            return;
        }
        let chosen: Vec<_> = (0..count).map(|_| packed[self.random.below(packed.len())]).collect();
        let damaged_at = self.random.below(count);
        let damaged = self.damage(chosen[damaged_at].2);
        for skipped in [None, Some(damaged_at)] {
            let mut sources: Vec<(&str, &[u8])> = chosen.iter().map(|it| (it.0, it.2)).collect();
            if let Some(at) = skipped {
                sources[at].1 = &damaged;
            }
            let found = self.unpack_batch(0, &sources);
            for (at, (found, (name, unit, _))) in found.iter().zip(&chosen).enumerate() {
                if skipped != Some(at) {
                    let beside = if skipped.is_some() { ", beside a damaged one" } else { "" };
                    let what = format!("{name}, as element {at} of {count}{beside}");
                    self.compare(Promise::Batch, &what, found, unit);
                }
            }
        }
    }

    /// A source that is not what it was.
    fn damage(&mut self, packed: &[u8]) -> Vec<u8> {
        let mut damaged = packed.to_vec();
        match self.random.below(4) {
            0 => damaged.truncate(self.random.below(packed.len())),
            1 => {
                let bytes = self.random.below(packed.len() + 64);
                damaged = self.random.bytes(bytes);
            }
            2 => {
                let at = self.random.below(packed.len());
                let noise = self.random.bytes(packed.len() - at);
                damaged[at..].copy_from_slice(&noise);
            }
            _ => {
                for _ in 0..=self.random.below(4) {
                    let at = self.random.below(packed.len());
                    damaged[at] ^= 1 << self.random.below(8);
                }
            }
        }
        damaged
    }

    fn damaged(&mut self) {
        let rounds = (DAMAGED_BYTES / self.unit_bytes).clamp(4, 256);
        for Sample { name, unit, packed } in self.samples() {
            let what = format!("{name}, damaged");
            for _ in 0..rounds {
                let damaged = self.damage(&packed);
                self.check_determined(&what, &damaged, self.unit_bytes);
                self.check_comes_back(Promise::Aftermath, name, &packed, &unit);
            }
            for bytes in [0, 1, self.unit_bytes / 2, self.unit_bytes - 1, self.unit_bytes + 1] {
                let what = format!("{name}, to {bytes} bytes");
                self.check_determined(&what, &packed, bytes);
                self.check_comes_back(Promise::Aftermath, name, &packed, &unit);
            }
            for cut in (0..packed.len()).rev().take(rounds.min(16)) {
                self.check_determined(&what, &packed[..cut], self.unit_bytes);
            }
            for more in [1, 2, 7, 300] {
                self.check_tail(name, &packed, more);
            }
        }
    }

    /// Whether a source is accepted, and as what, does not depend on what was in the destination.
    fn check_determined(&mut self, what: &str, source: &[u8], bytes: usize) {
        self.check_fills(what, &mut |trial, fill| trial.decompress(what, source, bytes, fill));
    }

    /// The same for any call, which gets the byte that the destination is filled with.
    fn check_fills(&mut self, what: &str, call: &mut dyn FnMut(&mut Trial, u8) -> Unpacked) {
        let (first, second) = (call(self, 0x00), call(self, 0xFF));
        let why = match (&first, &second) {
            (first, second) if first == second => return,
            (Ok(_), Ok(_)) => "Ok, but some of the destination was not written",
            _ => "whether it is Ok depends on what was in the destination",
        };
        // A device and the software in its place may judge a damaged source differently: then it is not the
        // destination that makes the difference.
        if call(self, 0xFF) == second && call(self, 0x00) == first {
            self.broken(Promise::AllOfDest, format!("{what}: {why}"));
        }
    }

    /// Bytes behind a unit are part of it: with others the result is another one.
    fn check_tail(&mut self, name: &str, packed: &[u8], more: usize) {
        let what = format!("{name}, with {more} bytes behind it");
        let [first, second] = [0x5A, 0xA6].map(|byte| {
            let mut longer = packed.to_vec();
            longer.resize(packed.len() + more, byte);
            self.decompress(&what, &longer, self.unit_bytes, 0)
        });
        if first.is_ok() && first == second {
            let what = format!("{what}: Ok, though these bytes are not looked at");
            self.broken(Promise::AllOfSource, what);
        }
    }

    fn prefix(&mut self, name: &str, source: &[u8], wanted: usize, fill: u8) -> Unpacked {
        self.tell(Told::Calls("decompress_prefix"));
        let mut place = Guarded::new(self.unit_bytes, fill);
        let decompressor = &mut self.streams[0].decompressor;
        let result = decompressor.decompress_prefix(source, place.dest_mut(), wanted);
        self.unpacked(name, result, &place).map(|mut unit| {
            unit.truncate(wanted);
            unit
        })
    }

    fn prefixes(&mut self) {
        let rounds = (DAMAGED_BYTES / self.unit_bytes).clamp(4, 64);
        for Sample { name, unit, packed } in self.samples() {
            for wanted in [1, 63, self.unit_bytes / 2, self.unit_bytes - 1, self.unit_bytes] {
                let what = format!("{name}, its first {wanted} bytes");
                let found = self.prefix(&what, &packed, wanted, 0x5A);
                self.compare(Promise::Prefix, &what, &found, &unit[..wanted]);
            }
            let what = format!("{name}, a prefix, damaged");
            for _ in 0..rounds {
                let (damaged, wanted) =
                    (self.damage(&packed), 1 + self.random.below(self.unit_bytes));
                self.check_fills(&what, &mut |trial, fill| {
                    trial.prefix(&what, &damaged, wanted, fill)
                });
            }
            self.check_comes_back(Promise::Aftermath, name, &packed, &unit);
        }
    }

    /// Batches on two streams in turn, what one compressed to be decompressed by the other. In the middle one stream
    /// ends, while the other threads go on.
    fn together(&mut self) {
        let samples = self.samples();
        if samples.is_empty() {
            return;
        }
        let rounds = (DAMAGED_BYTES / self.unit_bytes).clamp(4, 64);
        for round in 0..rounds {
            if round == rounds / 2 {
                self.streams.truncate(1);
            }
            let (writer, reader) = (round % self.streams.len(), (round + 1) % self.streams.len());
            let count = 1 + self.random.below(self.batch_max);
            let chosen: Vec<&Sample> =
                (0..count).map(|_| &samples[self.random.below(samples.len())]).collect();
            let batch: Vec<(&str, &[u8])> = chosen.iter().map(|it| (it.name, &*it.unit)).collect();
            let made = self.compress_batch(writer, &batch);
            let found = made.iter().zip(&chosen).filter_map(|(made, sample)| match made {
                Made::Compressed(packed) => Some((*sample, &packed[..])),
                _ => None,
            });
            let found: Vec<(&Sample, &[u8])> = found.collect();
            let sources: Vec<(&str, &[u8])> = found.iter().map(|it| (it.0.name, it.1)).collect();
            if sources.is_empty() {
                continue;
            }
            for (unpacked, (sample, _)) in self.unpack_batch(reader, &sources).iter().zip(&found) {
                let what = format!("{}, beside other threads", sample.name);
                self.compare(Promise::Streams, &what, unpacked, &sample.unit);
            }
        }
    }

    fn format(&mut self) {
        let samples = self.samples();
        for Sample { name, unit, packed } in &samples {
            self.check_comes_back(Promise::Format, name, packed, unit);
        }
        for some in samples.chunks(self.batch_max) {
            let batch: Vec<(&str, &[u8])> = some.iter().map(|it| (it.name, &*it.unit)).collect();
            let made = self.compress_batch(0, &batch);
            let packed: Vec<(&str, &[u8])> = made
                .iter()
                .zip(some)
                .map(|(made, sample)| match made {
                    Made::Compressed(packed) => (sample.name, &packed[..]),
                    _ => (sample.name, &sample.packed[..]),
                })
                .collect();
            for (found, sample) in self.unpack_batch(0, &packed).iter().zip(some) {
                self.compare(Promise::Format, sample.name, found, &sample.unit);
            }
        }
    }
}
