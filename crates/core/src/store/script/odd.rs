//! A codec that is not one of this crate's, and that fails when it is told to. For tests.
//!
//! A unit without the zeros at its end, each byte changed. It works on up to three units at once, and not
//! before it is asked the second time whether it is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::zcomp::{Answer, Backend, Compressor, Corrupt, Decompressor, Error, Job, Unpack};

/// How many of the next units fail.
#[derive(Clone, Default, Debug)]
pub(crate) struct Odd(pub(crate) Arc<AtomicUsize>);

/// One direction, and whether it was asked.
struct Stream(Odd, bool);

const CHANGED: u8 = 0x5A;

impl Backend for Odd {
    fn name(&self) -> &'static str {
        "odd"
    }

    fn batch_max(&self) -> usize {
        3
    }

    fn compressor(&self, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        Ok(Box::new(Stream(self.clone(), false)))
    }

    fn decompressor(&self, _unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        Ok(Box::new(Stream(self.clone(), false)))
    }
}

impl Stream {
    fn is_asked_again(&mut self) -> bool {
        self.1 = !self.1;
        !self.1
    }
}

impl Compressor for Stream {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        if self.0.0.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1)).is_ok() {
            return Answer::Failed;
        }
        let length = source.iter().rposition(|byte| *byte != 0).map_or(1, |last| last + 1);
        let Some(dest) = dest.get_mut(..length) else { return Answer::Incompressible };
        dest.iter_mut().zip(source).for_each(|(to, from)| *to = from ^ CHANGED);
        Answer::Compressed(length)
    }

    #[allow(unsafe_code, reason = "as the trait declares it; what it does is safe")]
    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        assert!(
            (1..=3).contains(&jobs.len()) && !self.1,
            "a batch of three at most, and none for nothing"
        );
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        let is_done = self.is_asked_again();
        for job in jobs.iter_mut().filter(|_| is_done) {
            job.answer = self.compress_unit(job.source, job.dest);
        }
        is_done
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

impl Decompressor for Stream {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let (bytes, zeros) = dest.split_at_mut_checked(source.len()).ok_or(Corrupt)?;
        bytes.iter_mut().zip(source).for_each(|(to, from)| *to = from ^ CHANGED);
        zeros.fill(0);
        Ok(())
    }

    #[allow(unsafe_code, reason = "as the trait declares it; what it does is safe")]
    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        assert!(
            (1..=3).contains(&jobs.len()) && !self.1,
            "a batch of three at most, and none for nothing"
        );
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        let is_done = self.is_asked_again();
        for job in jobs.iter_mut().filter(|_| is_done) {
            job.result = self.decompress(job.source, job.dest);
        }
        is_done
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}
