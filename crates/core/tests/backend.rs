//! A codec that somebody else provides: registered, and used by a store beside one of the library's own.

mod heap;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use heap::Heap;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::Figures;
use zfolio_core::store::{CodecId, Incoming, Key, Loaded, Outcome, Outgoing, Reject, Store};
use zfolio_core::zcomp::{
    Algorithm, Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Error, Job, Unpack,
    Zcomp,
};

const UNIT_BYTES: usize = 4096;

/// An "accelerator" that takes eight units at once and is done when it is asked the third time. It keeps the first
/// half of a unit whose second half is zeros, with each byte inverted. It cannot compress a unit that begins with `!`.
#[derive(Clone, Default)]
struct Inverter {
    batches: Arc<AtomicUsize>,
    longest: Arc<AtomicUsize>,
}

/// The work of one stream.
struct Queue {
    inverter: Inverter,
    /// Times that the present batch was polled; `None` when no batch is at work.
    polled: Option<u32>,
    /// Times that the present batch was waited for.
    waited: u32,
}

impl Backend for Inverter {
    fn name(&self) -> &'static str {
        "inverter"
    }

    fn batch_max(&self) -> usize {
        BATCH_MAX
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        self.queue(unit_bytes).map(|queue| Box::new(queue) as Box<dyn Compressor>)
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        self.queue(unit_bytes).map(|queue| Box::new(queue) as Box<dyn Decompressor>)
    }

    fn memory_bytes(&self) -> usize {
        12345
    }
}

impl Inverter {
    fn queue(&self, unit_bytes: usize) -> Result<Queue, Error> {
        if unit_bytes > 65536 {
            let why = format!("units of {unit_bytes} bytes; accepted: 64K at most");
            return Err(Error::SetUp { codec: self.name(), why });
        }
        Ok(Queue { inverter: self.clone(), polled: None, waited: 0 })
    }
}

impl Queue {
    fn submit(&mut self, jobs: usize) {
        assert!(self.polled.replace(0).is_none(), "a batch is at work");
        self.waited = 0;
        self.inverter.batches.fetch_add(1, Relaxed);
        self.inverter.longest.fetch_max(jobs, Relaxed);
    }

    fn is_done(&mut self) -> bool {
        let polled = self.polled.as_mut().expect("a batch was submitted");
        assert_eq!(*polled, self.waited, "between two polls it is waited for once");
        *polled += 1;
        let is_done = *polled == 3;
        if is_done {
            self.polled = None;
        }
        is_done
    }
}

fn invert(source: &[u8], dest: &mut [u8]) {
    dest.iter_mut().zip(source).for_each(|(to, from)| *to = !from);
}

impl Compressor for Queue {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let (kept, zeros) = source.split_at(source.len() / 2);
        if source[0] == b'!' {
            return Answer::Failed;
        }
        if zeros.iter().any(|byte| *byte != 0) {
            return Answer::Incompressible;
        }
        invert(kept, dest);
        // A length that no device should report: it is not believed.
        if source[0] == b'?' {
            Answer::Compressed(dest.len() + 1)
        } else {
            Answer::Compressed(kept.len())
        }
    }

    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        Queue::submit(self, jobs.len());
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let is_done = self.is_done();
        for job in jobs.iter_mut().filter(|_| is_done) {
            job.answer = self.compress_unit(job.source, job.dest);
        }
        is_done
    }

    fn wait(&mut self) {
        self.waited += 1;
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

impl Decompressor for Queue {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let (kept, zeros) = dest.split_at_mut(dest.len() / 2);
        if source.len() != kept.len() {
            return Err(Corrupt);
        }
        invert(source, kept);
        zeros.fill(0);
        Ok(())
    }

    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        Queue::submit(self, jobs.len());
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        let is_done = self.is_done();
        for job in jobs.iter_mut().filter(|_| is_done) {
            job.result = self.decompress(job.source, job.dest);
        }
        is_done
    }

    fn wait(&mut self) {
        self.waited += 1;
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

fn order(bytes: usize) -> UnitOrder {
    UnitOrder::from_bytes(bytes).expect("a unit's size")
}

/// A unit whose first half is text that begins with `first`, the other half zeros, or text too.
fn unit(first: u8, number: usize, is_full: bool) -> Vec<u8> {
    let text = (number..).flat_map(|number| format!("{number} ").into_bytes());
    let mut unit: Vec<u8> = std::iter::once(first).chain(text).take(UNIT_BYTES).collect();
    if !is_full {
        unit[UNIT_BYTES / 2..].fill(0);
    }
    unit
}

/// Goal: an implementer outside of the crate has its codec in a store beside zstd; entries know which is theirs.
/// Method: units of all kinds to both codecs, loaded in one batch in mixed order.
#[test]
fn a_store_has_a_codec_from_outside_beside_zstd() {
    let inverter = Inverter::default();
    let codecs = vec![
        Zcomp::new(Algorithm::Zstd.into(), order(UNIT_BYTES), 1).expect("the default level"),
        Zcomp::with_backend(&inverter, order(UNIT_BYTES), 1).expect("the unit is small"),
    ];
    assert_eq!((codecs[1].name(), codecs[1].params()), ("inverter", None));
    assert!(codecs[1].memory_bytes() > 12345);
    let store = Store::new(codecs, Heap, Key::new([7; Key::BYTES]));
    let figures = Figures::default();
    let (zstd, outside) = (CodecId::FIRST, CodecId::new(1).expect("the second"));

    let mut units: Vec<Vec<u8>> = (0..20).map(|number| unit(b'a', number, false)).collect();
    units[3] = unit(b'!', 3, false);
    units[5] = unit(b'?', 5, false);
    units[7] = unit(b'a', 7, true);
    units[9] = vec![9; UNIT_BYTES];
    let mut batch: Vec<Outgoing<'_>> = units.iter().map(|unit| Outgoing::new(unit, None)).collect();
    store.store(0, outside, &mut batch, &figures);
    let outcomes: Vec<Outcome> = batch.iter().map(|unit| unit.outcome).collect();
    for (number, outcome) in outcomes.iter().enumerate() {
        let expected = match number {
            3 | 5 => Outcome::Rejected(Reject::CompressFail),
            7 => Outcome::Incompressible,
            9 => Outcome::SameFilled,
            _ => Outcome::Compressed,
        };
        assert_eq!(*outcome, expected, "unit {number}");
    }
    // 19 units, in rounds of 16 and 4 less the same-filled one, as 8 + 7 + 4.
    assert_eq!((inverter.batches.load(Relaxed), inverter.longest.load(Relaxed)), (3, BATCH_MAX));
    // What the codec failed at, zstd takes; the entries of the others stay.
    store.store(0, zstd, &mut batch[3..4], &figures);
    assert_eq!(
        batch[3].outcome,
        Outcome::Rejected(Reject::CompressFail),
        "a rejected unit is left alone"
    );
    let mut again: Vec<Outgoing<'_>> =
        batch.into_iter().map(|unit| Outgoing::new(unit.bytes, unit.entry)).collect();
    store.store(0, zstd, &mut again, &figures);
    for (number, unit) in again.iter().enumerate() {
        let expected = if [3, 5].contains(&number) { Outcome::Compressed } else { Outcome::Clean };
        assert_eq!(unit.outcome, expected, "unit {number}");
    }

    let mut places = vec![vec![0xC3; UNIT_BYTES]; units.len()];
    let mut wanted: Vec<Incoming<'_>> = again
        .iter()
        .zip(&mut places)
        .map(|(unit, place)| Incoming::new(unit.entry.as_ref().expect("stored"), place))
        .collect();
    wanted.rotate_left(8);
    let before = inverter.batches.load(Relaxed);
    store.load(0, &mut wanted);
    assert!(wanted.iter().all(|unit| unit.outcome == Loaded::Whole));
    // 16 units of this codec: those up to zstd's two end a batch each, the others fill batches of 8.
    assert!((3..=5).contains(&(inverter.batches.load(Relaxed) - before)));
    drop(wanted);
    assert!(places == units);
    for unit in again {
        unit.entry.into_iter().for_each(|entry| store.invalidate(entry, &figures));
    }
    assert_eq!(store.pool_stats().objects, 0);
    assert_eq!(figures.get("stored_units"), Some(0));
}

#[test]
fn a_codec_says_why_it_cannot_be_set_up() {
    let refused = Zcomp::with_backend(&Inverter::default(), order(2 << 20), 1);
    let text = refused.expect_err("its units are too large").to_string();
    assert!(text.contains("inverter") && text.contains("64K at most"), "{text}");
}

/// Goal: units of two sizes in one store. Method: same-filled units of both, whose checksums are equal.
#[test]
fn an_entry_knows_how_long_its_unit_is() {
    let codecs = [4096, 16384].map(|bytes| {
        Zcomp::new(Algorithm::Lz4.into(), order(bytes), 1).expect("the default level")
    });
    let store = Store::new(codecs.into(), Heap, Key::new([7; Key::BYTES]));
    let figures = Figures::default();
    let (small, large) = (vec![1; 4096], vec![1; 16384]);
    let mut first = [Outgoing::new(&small, None)];
    store.store(0, CodecId::FIRST, &mut first, &figures);
    let mut second = [Outgoing::new(&large, first[0].entry.take())];
    store.store(0, CodecId::new(1).expect("the second"), &mut second, &figures);
    assert_eq!(second[0].outcome, Outcome::SameFilled, "a small unit is no copy of a large one");
    assert_eq!(figures.get("stored_bytes"), Some(16384));
    let entry = second[0].entry.take().expect("it is stored");
    let mut place = vec![0; 16384];
    let mut wanted = [Incoming::new(&entry, &mut place)];
    store.load(0, &mut wanted);
    assert_eq!(wanted[0].outcome, Loaded::Whole);
    assert!(place == large);
    store.invalidate(entry, &figures);
}
