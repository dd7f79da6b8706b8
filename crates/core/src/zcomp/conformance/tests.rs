//! Goal: the check passes what keeps its promises, and finds each promise that is broken. Method: a small accelerator
//! that is done at the third poll, and the same with one flaw at a time.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{Promise, Report, check, check_format, check_within};
use crate::page::UnitOrder;
use crate::sync::Mutex;
use crate::zcomp::{
    Algorithm, Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Error, Job, Params,
    Unpack, software,
};

/// What is wrong with the accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// No flaw: every second damaged source is accepted, as zeros.
    JudgesInTurn,
    HasNoName,
    TakesNothing,
    TakesTooMuch,
    SharesMoreAndMore,
    StreamsGrow,
    OneDirection,
    EmptyResult,
    LongResult,
    NeverShrinks,
    OtherByte,
    SmallDestFails,
    SmallDestIsCut,
    SwapsResults,
    ForgetsLast,
    DoneTooEarly,
    OneSpoilsAll,
    ReplacesDest,
    IgnoresTail,
    LeavesTail,
    ReadsDest,
    PrefixOfZeros,
    RemembersDamage,
    RemembersFailure,
    SharesMemory,
    OtherFormat,
    Panics,
    PanicsInPoll,
    PanicsIfEmpty,
    NeverDone,
    Sleeps,
}

use Flaw as F;

/// Which promise each flaw breaks.
const FOUND: [(Flaw, Promise); 29] = [
    (F::HasNoName, Promise::Name),
    (F::TakesNothing, Promise::BatchMax),
    (F::TakesTooMuch, Promise::BatchMax),
    (F::SharesMoreAndMore, Promise::Memory),
    (F::StreamsGrow, Promise::Memory),
    (F::OneDirection, Promise::SetUp),
    (F::EmptyResult, Promise::Length),
    (F::LongResult, Promise::Length),
    (F::NeverShrinks, Promise::Shrinks),
    (F::OtherByte, Promise::RoundTrip),
    (F::SmallDestFails, Promise::SmallDest),
    (F::SmallDestIsCut, Promise::SmallDest),
    (F::SwapsResults, Promise::Batch),
    (F::ForgetsLast, Promise::Batch),
    (F::DoneTooEarly, Promise::Batch),
    (F::OneSpoilsAll, Promise::Batch),
    (F::ReplacesDest, Promise::Job),
    (F::IgnoresTail, Promise::AllOfSource),
    (F::LeavesTail, Promise::AllOfDest),
    (F::ReadsDest, Promise::AllOfDest),
    (F::PrefixOfZeros, Promise::Prefix),
    (F::RemembersDamage, Promise::Aftermath),
    (F::RemembersFailure, Promise::Aftermath),
    (F::SharesMemory, Promise::Streams),
    (F::Panics, Promise::NoPanic),
    (F::PanicsInPoll, Promise::NoPanic),
    (F::PanicsIfEmpty, Promise::NoPanic),
    (F::NeverDone, Promise::Returns),
    (F::Sleeps, Promise::Returns),
];

/// A rank for the memory that streams share by mistake.
const RANK: u8 = 3;

/// An accelerator that writes a count and a word for each run of equal words.
struct Runs {
    flaw: Flaw,
    /// Of the device of [`Flaw::SharesMemory`].
    memory: Arc<Mutex<RANK, Vec<u8>>>,
    streams: Mutex<RANK, usize>,
}

impl Runs {
    fn new(flaw: Flaw) -> Runs {
        Runs { flaw, memory: Arc::default(), streams: Mutex::new(0) }
    }

    fn stream(&self) -> Stream {
        *self.streams.lock() += 1;
        let memory = Arc::clone(&self.memory);
        Stream { flaw: self.flaw, memory, polled: 0, calls: 0, is_damaged: false, failed: false }
    }
}

struct Stream {
    flaw: Flaw,
    memory: Arc<Mutex<RANK, Vec<u8>>>,
    polled: u32,
    calls: usize,
    is_damaged: bool,
    failed: bool,
}

const WORD: usize = 8;
const RUN: usize = WORD + 1;

impl Backend for Runs {
    fn name(&self) -> &'static str {
        if self.flaw == F::HasNoName { "" } else { "runs" }
    }

    fn batch_max(&self) -> usize {
        match self.flaw {
            F::TakesNothing => 0,
            F::TakesTooMuch => BATCH_MAX + 1,
            _ => BATCH_MAX,
        }
    }

    fn compressor(&self, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        Ok(Box::new(self.stream()))
    }

    fn decompressor(&self, _unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        if self.flaw == F::OneDirection {
            return Err(Error::OutOfMemory { codec: "runs" });
        }
        Ok(Box::new(self.stream()))
    }

    fn memory_bytes(&self) -> usize {
        if self.flaw == F::SharesMoreAndMore { *self.streams.lock() } else { 100 }
    }
}

impl Stream {
    fn memory_bytes(&self) -> usize {
        if self.flaw == F::StreamsGrow { self.calls } else { 10 }
    }

    /// Whether a batch is done now.
    fn is_done(&mut self) -> bool {
        self.polled += 1;
        match self.flaw {
            F::NeverDone => {
                thread::sleep(Duration::from_millis(1));
                return false;
            }
            F::PanicsInPoll => panic!("a device is gone"),
            F::SharesMemory => thread::yield_now(),
            _ => {}
        }
        self.polled == 3
    }

    fn encode(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        self.calls += 1;
        let mut bytes = 0;
        let mut words = source.chunks_exact(WORD).peekable();
        while let Some(word) = words.next() {
            let mut count = 1;
            while count < 255 && words.next_if_eq(&word).is_some() {
                count += 1;
            }
            let Some(run) = dest.get_mut(bytes..bytes + RUN) else {
                return self.too_small(dest.len());
            };
            (run[0], bytes) = (count, bytes + RUN);
            run[1..].copy_from_slice(word);
        }
        if std::mem::take(&mut self.failed) {
            return Answer::Failed;
        }
        match self.flaw {
            F::EmptyResult => Answer::Compressed(0),
            F::LongResult => Answer::Compressed(dest.len() + 1),
            F::NeverShrinks => Answer::Incompressible,
            _ => Answer::Compressed(bytes),
        }
    }

    fn too_small(&mut self, room: usize) -> Answer {
        self.failed = self.flaw == F::RemembersFailure;
        match self.flaw {
            F::SmallDestFails => Answer::Failed,
            F::SmallDestIsCut if room < 1000 => Answer::Compressed(room),
            _ => Answer::Incompressible,
        }
    }

    fn decode(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.calls += 1;
        if self.flaw == F::OtherFormat && source.first() == Some(&255) {
            return Err(Corrupt);
        }
        let done = self.decode_runs(source, dest);
        if done.is_err() {
            self.is_damaged = self.flaw == F::RemembersDamage;
            match self.flaw {
                F::Panics => panic!("it is damaged"),
                F::Sleeps => thread::sleep(Duration::from_secs(3600)),
                F::LeavesTail if source.len() % RUN == 0 => return Ok(()),
                F::JudgesInTurn if self.calls % 2 == 0 => {
                    dest.fill(0);
                    return Ok(());
                }
                F::ReadsDest if dest.first() == Some(&0) => return Ok(()),
                _ => {}
            }
        } else if std::mem::take(&mut self.is_damaged) {
            return Err(Corrupt);
        }
        if let (F::OtherByte, Some(last)) = (self.flaw, dest.last_mut()) {
            *last = 1;
        }
        done
    }

    fn decode_runs(&self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let mut words = dest.chunks_exact_mut(WORD);
        for run in source.chunks(RUN) {
            if run.len() < RUN {
                return if self.flaw == F::IgnoresTail { Ok(()) } else { Err(Corrupt) };
            }
            for _ in 0..run[0] {
                words.next().ok_or(Corrupt)?.copy_from_slice(&run[1..]);
            }
        }
        let is_full = words.next().is_none() && words.into_remainder().is_empty();
        if is_full { Ok(()) } else { Err(Corrupt) }
    }
}

impl Compressor for Stream {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        self.encode(source, dest)
    }

    #[allow(unsafe_code, reason = "as the trait declares it; what it does is safe")]
    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        self.polled = 0;
        if self.flaw == F::SharesMemory {
            *self.memory.lock() = jobs.iter().flat_map(|job| job.source).copied().collect();
        }
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let is_done = self.is_done();
        if !is_done {
            return self.flaw == F::DoneTooEarly;
        }
        if jobs.is_empty() {
            assert_ne!(self.flaw, F::PanicsIfEmpty, "there is a first job");
            return true;
        }
        let shared = self.memory.lock().clone();
        let mut shared = shared.chunks_exact(jobs[0].source.len());
        let last = jobs.len() - 1;
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.flaw == F::ForgetsLast && at == BATCH_MAX - 1 {
                continue;
            }
            job.answer = self.encode(shared.next().unwrap_or(job.source), job.dest);
            if self.flaw == F::ReplacesDest && at == last {
                job.dest = &mut [];
            }
        }
        if self.flaw == F::SwapsResults && last > 0 {
            let (first, others) = jobs.split_at_mut(1);
            std::mem::swap(&mut first[0].answer, &mut others[0].answer);
        }
        true
    }

    fn memory_bytes(&self) -> usize {
        Stream::memory_bytes(self)
    }
}

impl Decompressor for Stream {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.decode(source, dest)
    }

    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        self.decode(source, unit)?;
        if self.flaw == F::PrefixOfZeros {
            unit[..wanted].fill(0);
        }
        Ok(())
    }

    #[allow(unsafe_code, reason = "as the trait declares it; what it does is safe")]
    unsafe fn submit(&mut self, _jobs: &mut [Unpack<'_>]) {
        self.polled = 0;
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        if !self.is_done() {
            return false;
        }
        for job in &mut *jobs {
            job.result = self.decode(job.source, job.dest);
        }
        if self.flaw == F::OneSpoilsAll && jobs.iter().any(|job| job.result.is_err()) {
            jobs.iter_mut().for_each(|job| job.result = Err(Corrupt));
        }
        true
    }

    fn memory_bytes(&self) -> usize {
        Stream::memory_bytes(self)
    }
}

fn has(report: &Report, promise: Promise) -> bool {
    report.broken.iter().any(|broken| broken.promise == promise)
}

const UNIT: [UnitOrder; 1] = [UnitOrder::DEFAULT];

#[test]
fn a_good_accelerator_passes() {
    check(&Runs::new(F::None), &[UnitOrder::DEFAULT, UnitOrder::FOLIO]).unwrap();
    check_format(&Runs::new(F::None), &Runs::new(F::None), &UNIT).unwrap();
    check(&Runs::new(F::JudgesInTurn), &UNIT).unwrap();
}

/// Goal: each flaw is found by its name, and the line says what happened.
#[test]
fn every_flaw_is_found() {
    for (flaw, promise) in FOUND {
        let is_slow = matches!(flaw, F::NeverDone | F::Sleeps);
        let patience = if is_slow { Duration::from_millis(500) } else { super::PATIENCE };
        let report = check_within(&Runs::new(flaw), &UNIT, patience);
        let report = report.expect_err(&format!("{flaw:?} is not found"));
        assert!(has(&report, promise), "{flaw:?}: {promise:?} is not in {report}");
        let of_each = |of: Promise| report.broken.iter().filter(|it| it.promise == of).count();
        assert_eq!(of_each(promise), 1, "{report}");
        println!("{flaw:?}: {report}");
    }
}

#[test]
fn a_report_says_what_happened() {
    let report = check(&Runs::new(F::IgnoresTail), &UNIT).unwrap_err();
    let text = report.to_string();
    let wanted = "runs (SEED=";
    assert!(text.starts_with(wanted) && text == format!("{report:?}"), "{text}");
    let wanted = "\n  AllOfSource, units of 4096 bytes: zeros, with 1 bytes behind it: Ok, though";
    assert!(text.contains(wanted), "{text}");
    let report = check(&Runs::new(F::Panics), &UNIT).unwrap_err();
    assert!(report.to_string().contains("panicked: it is damaged"), "{report}");
}

/// Goal: a reader of another format is found, although it keeps all other promises.
#[test]
fn another_format_is_found() {
    let (writer, reader) = (Runs::new(F::None), Runs::new(F::OtherFormat));
    let report = check_format(&writer, &reader, &UNIT).unwrap_err();
    assert!(has(&report, Promise::Format), "{report}");
    assert!(check_format(&Runs::new(F::NeverShrinks), &reader, &UNIT).is_err());
    assert!(check_format(&writer, &Runs::new(F::OneDirection), &UNIT).is_err());
}

/// Goal: all codecs of this crate keep the promises.
#[test]
fn our_codecs_keep_their_promises() {
    for algorithm in Algorithm::ALL {
        for unit in [UnitOrder::DEFAULT, UnitOrder::FOLIO] {
            let backend = software(&Params::from(*algorithm), unit).unwrap();
            check(&*backend, &[unit]).unwrap();
        }
    }
}

/// Goal: what deflate writes with a window, deflate reads without one, and the other way round it is seen that the
/// formats of two codecs differ.
#[test]
fn formats_are_told_apart() {
    let unit = UnitOrder::FOLIO;
    let codec = |params: &str| software(&params.parse().unwrap(), unit).unwrap();
    check_format(&*codec("deflate,window=12"), &*codec("deflate"), &[unit]).unwrap();
    check_format(&*codec("lzo"), &*codec("lzo-rle"), &[unit]).unwrap();
    let report = check_format(&*codec("lz4"), &*codec("deflate"), &[unit]).unwrap_err();
    assert!(has(&report, Promise::Format), "{report}");
}
