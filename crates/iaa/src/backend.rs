//! `deflate-iaa` and `deflate-iaa-dynamic`, as backends of zfolio's codecs.
//!
//! What they write is raw deflate that refers at most 4 KiB back, and so is what software writes in their place:
//! `deflate,window=12` reads all of it, and they read all of that. A stream from elsewhere that refers further back is
//! refused by the device, and read by software.

use std::sync::Arc;
use std::{array, iter};

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{
    Algorithm, Answer, BATCH_MAX, Backend, Bare, Compressor, Corrupt, Decompressor, Error, Job,
    Params, Unpack,
};

use crate::checksum::crc;
use crate::completion::{Kind, Slots};
use crate::driver::Driver;
use crate::failure::Failure;
use crate::flights::{Done, Flights};
use crate::settings::WhenBusy;
use crate::stats::Count;

/// What software does in a device's place.
pub(crate) const SOFTWARE: &str = "deflate,window=12";

/// log2 of how many bytes back a device refers.
const WINDOW: u8 = 12;

/// Whether these parameters are those of software with the accelerator's format. The level is the
/// software's alone.
#[must_use]
pub fn has_format_of(params: &Params) -> bool {
    let Params { algorithm, window, dictionary, .. } = params;
    *algorithm == Algorithm::Deflate && *window == Some(WINDOW) && dictionary.is_none()
}

/// How a device compresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codes {
    /// With the fixed codes of deflate: `deflate-iaa`.
    Fixed,
    /// With codes made for each unit: `deflate-iaa-dynamic`. Units longer than 4 KiB are compressed by software.
    Dynamic,
}

impl Codes {
    /// Both.
    pub const ALL: [Codes; 2] = [Codes::Fixed, Codes::Dynamic];

    /// The kernel's name of the algorithm.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Codes::Fixed => "deflate-iaa",
            Codes::Dynamic => "deflate-iaa-dynamic",
        }
    }
}

/// The accelerator as a codec.
#[derive(Debug, Clone)]
pub struct Iaa {
    driver: Arc<Driver>,
    codes: Codes,
}

impl Iaa {
    /// A codec that works on the devices of `driver`, whichever there are at any time.
    #[must_use]
    pub fn new(driver: &Arc<Driver>, codes: Codes) -> Iaa {
        Iaa { driver: Arc::clone(driver), codes }
    }

    fn stream(&self, unit_bytes: usize) -> Result<Stream, Error> {
        let codec = self.name();
        let unit = UnitOrder::from_bytes(unit_bytes).ok_or_else(|| Error::SetUp {
            codec,
            why: format!("units of {unit_bytes} bytes; accepted: 4K to 2M"),
        })?;
        let params: Params = SOFTWARE.parse()?;
        let slots = Slots::new(unit_bytes).map_err(|_| Error::OutOfMemory { codec })?;
        let software = Bare::new(&params, unit)?;
        let kind = match self.codes {
            Codes::Fixed => Kind::Fixed,
            Codes::Dynamic => Kind::OnePass,
        };
        Ok(Stream { flights: Flights::new(&self.driver, slots), software, kind })
    }
}

impl Backend for Iaa {
    fn name(&self) -> &'static str {
        self.codes.name()
    }

    fn batch_max(&self) -> usize {
        BATCH_MAX
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        Ok(Box::new(self.stream(unit_bytes)?))
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        Ok(Box::new(self.stream(unit_bytes)?))
    }
}

/// One stream, of either direction.
struct Stream {
    flights: Flights,
    software: Bare,
    /// How it compresses.
    kind: Kind,
}

impl Stream {
    fn memory_bytes(&self) -> usize {
        self.flights.memory_bytes() + self.software.memory_bytes()
    }

    /// Whether a result of a device has the checksum of `data`, if that is to be looked at.
    fn is_right(&self, done: Done, data: &[u8]) -> bool {
        let is_right = !self.flights.driver.settings.check_crc || done.crc == crc(data);
        if !is_right {
            self.flights.driver.queues.count(self.flights.cpu, Count::Checksum, 1);
        }
        is_right
    }

    /// Begins to compress one unit; an answer if that failed.
    fn begin_compress(&mut self, job: usize, source: &[u8], dest: &mut [u8]) -> Option<Answer> {
        let begun = self.flights.begin(job, self.kind, source, dest.len());
        begun.err().map(|failure| self.compress_otherwise(failure, source, dest))
    }

    /// Looks after one unit; its answer, if it has one.
    fn poll_compress(&mut self, job: usize, source: &[u8], dest: &mut [u8]) -> Option<Answer> {
        let failure = match self.flights.poll(job)? {
            Ok(done) => {
                self.flights.end(job, &mut dest[..done.bytes]);
                if self.is_right(done, source) {
                    return Some(Answer::Compressed(done.bytes));
                }
                Failure::Checksum
            }
            Err(failure) => failure,
        };
        Some(self.compress_otherwise(failure, source, dest))
    }

    /// What becomes of a unit that no device has compressed.
    #[cold]
    fn compress_otherwise(&mut self, failure: Failure, source: &[u8], dest: &mut [u8]) -> Answer {
        let driver = &self.flights.driver;
        if failure == Failure::Overflow {
            return Answer::Incompressible;
        }
        if failure.is_transient() && driver.settings.when_busy == WhenBusy::Reject {
            return Answer::Failed;
        }
        driver.queues.count(self.flights.cpu, Count::SwCompCalls, 1);
        self.software.compress(source, dest).map_or(Answer::Incompressible, Answer::Compressed)
    }

    /// Begins to decompress one unit; a result if that failed.
    fn begin_decompress(
        &mut self,
        job: usize,
        source: &[u8],
        dest: &mut [u8],
    ) -> Option<Result<(), Corrupt>> {
        let begun = self.flights.begin(job, Kind::Decompress, source, dest.len());
        begun.err().map(|_| self.decompress_otherwise(source, dest))
    }

    /// Looks after one unit; its result, if it has one.
    fn poll_decompress(
        &mut self,
        job: usize,
        source: &[u8],
        dest: &mut [u8],
    ) -> Option<Result<(), Corrupt>> {
        if let Ok(done) = self.flights.poll(job)? {
            self.flights.end(job, dest);
            if self.is_right(done, dest) {
                return Some(Ok(()));
            }
        }
        Some(self.decompress_otherwise(source, dest))
    }

    /// Whatever a device says of a stream, software decides.
    #[cold]
    fn decompress_otherwise(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.flights.driver.queues.count(self.flights.cpu, Count::SwDecompCalls, 1);
        if self.software.decompress(source, dest) { Ok(()) } else { Err(Corrupt) }
    }
}

/// The places of jobs in the order in which they are begun: the two largest first, because the others are done
/// while these are.
fn largest_first(
    lengths: impl ExactSizeIterator<Item = usize>,
) -> iter::Take<array::IntoIter<usize, BATCH_MAX>> {
    let count = lengths.len();
    let mut order: [usize; BATCH_MAX] = array::from_fn(|place| place);
    let mut sizes = [0; BATCH_MAX];
    sizes.iter_mut().zip(lengths).for_each(|(size, length)| *size = length);
    for place in 0..count.min(2) {
        let largest = (place..count).rev().max_by_key(|at| sizes[order[*at]]).expect("not empty");
        order[place..=largest].rotate_right(1);
    }
    order.into_iter().take(count)
}

impl Compressor for Stream {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        self.flights.begin_batch();
        let mut answer = self.begin_compress(0, source, dest);
        loop {
            if let Some(answer) = answer {
                return answer;
            }
            self.flights.pause();
            answer = self.poll_compress(0, source, dest);
        }
    }

    #[allow(
        unsafe_code,
        reason = "the trait's contract; nothing of it is needed, since all is copied"
    )]
    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        self.flights.begin_batch();
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.flights.driver.settings.is_sync {
                job.answer = self.compress_unit(job.source, job.dest);
            } else if let Some(answer) = self.begin_compress(at, job.source, job.dest) {
                job.answer = answer;
            }
        }
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let mut all = true;
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.flights.is_active(at) {
                let answer = self.poll_compress(at, job.source, job.dest);
                all &= answer.map(|answer| job.answer = answer).is_some();
            }
        }
        all
    }

    fn wait(&mut self) {
        self.flights.pause();
    }

    fn memory_bytes(&self) -> usize {
        Stream::memory_bytes(self)
    }
}

impl Decompressor for Stream {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.flights.begin_batch();
        let mut result = self.begin_decompress(0, source, dest);
        loop {
            if let Some(result) = result {
                return result;
            }
            self.flights.pause();
            result = self.poll_decompress(0, source, dest);
        }
    }

    fn decompress_by_software(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.decompress_otherwise(source, dest)
    }

    #[allow(
        unsafe_code,
        reason = "the trait's contract; nothing of it is needed, since all is copied"
    )]
    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        self.flights.begin_batch();
        for at in largest_first(jobs.iter().map(|job| job.source.len())) {
            let job = &mut jobs[at];
            if self.flights.driver.settings.is_sync {
                job.result = self.decompress(job.source, job.dest);
            } else if let Some(result) = self.begin_decompress(at, job.source, job.dest) {
                job.result = result;
            }
        }
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        let mut all = true;
        for (at, job) in jobs.iter_mut().enumerate() {
            if self.flights.is_active(at) {
                let result = self.poll_decompress(at, job.source, job.dest);
                all &= result.map(|result| job.result = result).is_some();
            }
        }
        all
    }

    fn wait(&mut self) {
        self.flights.pause();
    }

    fn memory_bytes(&self) -> usize {
        Stream::memory_bytes(self)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zfolio_core::zcomp::{Answer, BATCH_MAX, Compressor, Decompressor, Job, Unpack};

    use super::{Codes, Iaa, SOFTWARE, has_format_of, largest_first};
    use crate::driver::{Driver, WorkQueue};
    use crate::model::{Model, Setup};
    use crate::settings::Settings;

    /// Goal: a batch that a device never answers is given up after as many polls as are allowed, however it is waited
    /// for, and all of its jobs at once. Method: what a wait counts as is 1, and that of `umwait`.
    #[test]
    #[allow(unsafe_code, reason = "a batch is submitted")]
    fn a_batch_is_waited_for_as_long_as_its_polls_take() {
        let settings = Settings { polls_max: 711, ..Settings::default() };
        let driver = Arc::new(Driver::new(settings, vec![0]));
        let portal = Box::new(Model::new(Setup { is_stepped: true, ..Setup::default() }));
        let queue =
            WorkQueue { name: "wq1.0".to_owned(), device: 1, package: 0, depth: 128, portal };
        driver.add([queue]).unwrap();
        let iaa = Iaa::new(&driver, Codes::Fixed);
        let unit = [7; 4096];
        let mut packed = [0; 4096];
        for (polls, rounds) in [(1, 711), (71, 11)] {
            let mut stream = iaa.stream(unit.len()).unwrap();
            stream.flights.count_a_pause_as(polls);
            let mut dests = vec![[0; 4096]; BATCH_MAX];
            let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
            for (job, dest) in jobs.iter_mut().zip(&mut dests) {
                (job.source, job.dest) = (&unit, dest);
            }
            // SAFETY: until `poll` returns true only it and `wait` are called, with the same jobs.
            unsafe { Compressor::submit(&mut stream, &mut jobs) };
            let mut polled = 1;
            while !Compressor::poll(&mut stream, &mut jobs) {
                assert!(jobs.iter().all(|job| job.answer == Answer::Failed), "all end at once");
                Compressor::wait(&mut stream);
                polled += 1;
            }
            assert_eq!(polled, rounds);
            let Answer::Compressed(bytes) = jobs[0].answer else { panic!("{:?}", jobs[0].answer) };
            packed[..bytes].copy_from_slice(&jobs[0].dest[..bytes]);

            let mut stream = iaa.stream(unit.len()).unwrap();
            stream.flights.count_a_pause_as(polls);
            let mut dests = vec![[0; 4096]; BATCH_MAX];
            let mut jobs: Vec<Unpack<'_>> =
                dests.iter_mut().map(|dest| Unpack::new(&packed[..bytes], dest)).collect();
            // SAFETY: the same.
            unsafe { Decompressor::submit(&mut stream, &mut jobs) };
            let mut polled = 1;
            while !Decompressor::poll(&mut stream, &mut jobs) {
                assert!(jobs.iter().all(|job| job.result.is_err()), "all end at once");
                Decompressor::wait(&mut stream);
                polled += 1;
            }
            assert_eq!(polled, rounds);
            assert!(jobs.iter().all(|job| job.result.is_ok() && *job.dest == unit));
        }
        assert_eq!(driver.global_stats().total_completion_timeout_errors, 32);
    }

    #[test]
    fn the_format_is_that_of_one_software_codec() {
        let is = |params: &str| has_format_of(&params.parse().unwrap());
        assert!(is(SOFTWARE) && is("deflate,window=12,level=9"));
        assert!(!is("deflate") && !is("deflate,window=11") && !is("lz4"));
        assert!(!is("deflate,window=12,dict=FILE"));
    }

    #[test]
    fn the_two_largest_sources_go_first_and_the_rest_in_order() {
        let order = |lengths: &[usize]| largest_first(lengths.iter().copied()).collect::<Vec<_>>();
        assert_eq!(order(&[5, 9, 3, 8, 1]), [1, 3, 0, 2, 4]);
        assert_eq!(order(&[7, 7, 7]), [0, 1, 2]);
        assert_eq!((order(&[4]), order(&[])), (vec![0], vec![]));
        assert_eq!(order(&[0, 1, 2, 3, 4, 5, 6, 7]), [7, 6, 0, 1, 2, 3, 4, 5]);
    }
}
