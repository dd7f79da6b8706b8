//! A functional model of the device, behind the same [`Portal`] as the hardware.
//!
//! It executes descriptors on the memory that they name, with codecs of its own, and writes completion records. It
//! has no notion of time. What goes wrong is chosen at random by [`Faults`], from a seed. What no document says is in
//! `docs/design/iaa.md`, as a list of assumptions.
//!
//! # Invariants
//!
//! - `MODEL-1` After a descriptor's record has its status, nothing of its memory is read or written.
//!   A child of `fork` has a copy of the model, which has forgotten all descriptors: they name the parent's memory.
//! - `MODEL-2` A queue never holds more descriptors than its depth: a shared queue answers
//!   [`Submitted::Full`], a dedicated one loses the descriptor ([`Counts::overruns`]), as the hardware does.

mod deflate;
mod engine;
mod huffman;
mod inflate;
#[allow(unsafe_code, reason = "a device works on addresses")]
mod memory;
pub mod script;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use zfolio_core::sync::{Guard, Mutex};
use zfolio_core::testing::Random;
use zfolio_sys::lineage;

use crate::layout::{AecsCompress, Descriptor, Record, flag, opcode, status};
use crate::portal::{Portal, Submitted};
use engine::Done;
pub use inflate::{Limits, Stop, inflate};
use script::Script;

/// Rank of the model's lock: above those of streams, below which its driver runs.
pub const RANK_MODEL: u8 = 43;

/// What goes wrong, each as so many of 65536 descriptors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// The queue is full.
    pub full: u16,
    /// A page of source or destination is missing.
    pub page: u16,
    /// The job ends with some other status, and half of its output.
    pub status: u16,
    /// The job is done, and its record written, only with one of the next descriptors.
    pub late: u16,
    /// The job is never done.
    pub never: u16,
    /// The record, the output or both are noise, though the job is said to have succeeded.
    pub lie: u16,
    /// The device is disabled: it forgets all jobs, and takes no more.
    pub gone: u16,
    /// The device is reset: it forgets all jobs, and goes on with the next one.
    pub reset: u16,
}

/// A queue of a device.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Descriptors that it holds.
    pub depth: usize,
    /// Whether it is shared: it says when it is full.
    pub is_shared: bool,
    /// Whether descriptors wait for [`Model::step`]; otherwise they are executed at once.
    pub is_stepped: bool,
    /// Steps of the decompressor before the watchdog ends the job.
    pub steps_max: usize,
    /// What goes wrong.
    pub faults: Faults,
    /// The seed of what goes wrong.
    pub seed: u64,
    /// What else goes wrong, for fuzzing ([`script`]).
    pub script: Vec<u8>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            depth: 128,
            is_shared: true,
            is_stepped: false,
            steps_max: 1 << 24,
            faults: Faults::default(),
            seed: 42,
            script: Vec::new(),
        }
    }
}

/// What happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Descriptors that came in.
    pub accepted: u64,
    /// Descriptors that were refused because the queue was full.
    pub full: u64,
    /// Descriptors that a dedicated queue lost because the driver gave it more than it holds.
    pub overruns: u64,
    /// Descriptors that were in the queue when the device was disabled or reset.
    pub forgotten: u64,
    /// Times that the device was reset.
    pub resets: u64,
    /// Page faults, other bad statuses, late records, records that never came, lies.
    pub faults: [u64; 5],
}

#[derive(Debug)]
struct Inner {
    setup: Setup,
    random: Random,
    script: Script,
    waiting: VecDeque<Descriptor>,
    /// Jobs whose records come late.
    late: VecDeque<Descriptor>,
    is_gone: bool,
    counts: Counts,
    /// The process that it works for.
    process: u64,
}

/// A work queue of a modelled device, and the device behind it. A clone is the same queue.
#[derive(Debug, Clone)]
pub struct Model(Arc<Mutex<RANK_MODEL, Inner>>);

#[allow(unsafe_code, reason = "forwards a contract")]
// SAFETY: the model accesses what a descriptor names until its record has its status, and not after (MODEL-1).
unsafe impl Portal for Model {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submitted {
        let inner = &mut *self.lock();
        let faults = inner.setup.faults;
        if inner.is_gone || inner.chance(faults.gone) {
            inner.disable();
            return Submitted::Gone;
        }
        let is_crowded = inner.waiting.len() + inner.late.len() >= inner.setup.depth;
        if is_crowded && !inner.setup.is_shared {
            inner.counts.overruns += 1;
            return Submitted::Accepted;
        }
        if is_crowded || inner.chance(faults.full) {
            inner.counts.full += 1;
            // SAFETY: the driver of these descriptors keeps their memory.
            unsafe { inner.finish_late() };
            return Submitted::Full;
        }
        inner.counts.accepted += 1;
        inner.waiting.push_back(*descriptor);
        if !inner.setup.is_stepped {
            // SAFETY: the caller's contract.
            while unsafe { inner.step() } {}
        }
        Submitted::Accepted
    }
}

impl Model {
    /// A queue.
    #[must_use]
    pub fn new(mut setup: Setup) -> Model {
        Model(Arc::new(Mutex::new(Inner {
            random: Random::new(setup.seed),
            script: std::mem::take(&mut setup.script).into(),
            setup,
            waiting: VecDeque::new(),
            late: VecDeque::new(),
            is_gone: false,
            counts: Counts::default(),
            process: lineage::current(),
        })))
    }

    /// Executes the oldest descriptor that waits; false if none does.
    #[allow(unsafe_code, reason = "forwards a contract")]
    pub fn step(&self) -> bool {
        // SAFETY: the submitter of a descriptor keeps its memory until its record has a status.
        unsafe { self.lock().step() }
    }

    /// Executes all jobs whose records are late.
    #[allow(unsafe_code, reason = "forwards a contract")]
    pub fn finish_late(&self) {
        // SAFETY: the submitter of a descriptor keeps its memory until its record has a status.
        unsafe { self.lock().finish_late() };
    }

    fn lock(&self) -> Guard<'_, RANK_MODEL, Inner> {
        let mut inner = self.0.lock();
        if inner.process != lineage::current() {
            inner.disable();
        }
        inner
    }

    /// Forgets all jobs, and accepts no more: the device was disabled.
    pub fn disable(&self) {
        self.0.lock().disable();
    }

    /// Forgets all jobs: the device was reset, and set up as it had been.
    pub fn reset(&self) {
        self.0.lock().reset();
    }

    /// From now on so much goes wrong.
    pub fn set_faults(&self, faults: Faults) {
        self.0.lock().setup.faults = faults;
    }

    /// What happened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.0.lock().counts
    }
}

/// Statuses that a device may give at any time.
const ANY_STATUS: [u8; 12] = [
    status::ANALYTICS_ERROR,
    status::OUTPUT_OVERFLOW,
    status::BAD_OPCODE,
    status::INVALID_FLAGS,
    status::INVALID_SIZE,
    status::RECORD_TRANSLATION,
    status::HARDWARE,
    status::HARDWARE_DRAIN,
    status::TRANSLATION,
    status::PAGE_REQUEST_TIMEOUT,
    status::WATCHDOG,
    0x7E,
];

impl Inner {
    fn chance(&mut self, of_65536: u16) -> bool {
        of_65536 > 0 && self.random.below(65536) < usize::from(of_65536)
    }

    fn disable(&mut self) {
        self.is_gone = true;
        self.forget();
    }

    fn reset(&mut self) {
        self.counts.resets += 1;
        self.forget();
    }

    fn forget(&mut self) {
        let forgotten = self.waiting.drain(..).chain(self.late.drain(..)).count();
        self.counts.forgotten += u64::try_from(forgotten).expect("the queue is short");
    }

    /// As [`Model::step`].
    ///
    /// # Safety
    ///
    /// That of [`Portal::submit`], for every descriptor without a status.
    #[allow(unsafe_code, reason = "a device works on addresses")]
    unsafe fn step(&mut self) -> bool {
        let faults = self.setup.faults;
        if !self.waiting.is_empty() && self.chance(faults.reset) {
            self.reset();
        }
        let Some(descriptor) = self.waiting.pop_front() else { return false };
        if self.chance(faults.never) {
            self.counts.faults[3] += 1;
            return true;
        }
        if self.chance(faults.late) {
            self.counts.faults[2] += 1;
            self.late.push_back(descriptor);
            return true;
        }
        // SAFETY: the caller's contract.
        unsafe { self.finish(&descriptor) };
        if self.random.below(16) == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.finish_late() };
        }
        true
    }

    /// As [`Model::finish_late`].
    ///
    /// # Safety
    ///
    /// As [`Inner::step`].
    #[allow(unsafe_code, reason = "a device works on addresses")]
    unsafe fn finish_late(&mut self) {
        while let Some(descriptor) = self.late.pop_front() {
            // SAFETY: the caller's contract.
            unsafe { self.finish(&descriptor) };
        }
    }

    /// Does one job, and writes output and record.
    ///
    /// # Safety
    ///
    /// As [`Inner::step`].
    #[allow(unsafe_code, reason = "a device works on addresses")]
    unsafe fn finish(&mut self, descriptor: &Descriptor) {
        let done = match engine::refusal(descriptor) {
            Some(status) => Done::failed(status, 0, Vec::new()),
            // SAFETY: the caller's contract.
            None => unsafe { self.done(descriptor) },
        };
        // SAFETY: the destination is writable by the contract, and the output no longer than it is.
        unsafe { memory::write(descriptor.dest, &done.output) };
        // SAFETY: the record is, by the contract. It has no status yet, or the job would have ended.
        unsafe { memory::complete(descriptor.record, &done.record) };
    }

    /// What one job gives, with faults.
    ///
    /// # Safety
    ///
    /// As [`Inner::step`].
    #[allow(unsafe_code, reason = "a device works on addresses")]
    unsafe fn done(&mut self, descriptor: &Descriptor) -> Done {
        let needs_source = descriptor.opcode() != opcode::NOOP;
        let bytes = if needs_source { descriptor.source_bytes } else { 0 };
        // SAFETY: the source is readable by the contract.
        let source = unsafe { memory::read(descriptor.source, bytes) };
        let wants_aecs = needs_source && descriptor.flags() & flag::READ_AECS != 0;
        // SAFETY: the AECS is there by the contract; refusal() has compared its length.
        let aecs = wants_aecs.then(|| unsafe { memory::read_one::<AecsCompress>(descriptor.aecs) });
        let mut done = engine::execute(descriptor, &source, aecs.as_ref(), self.setup.steps_max);
        let faults = self.setup.faults;
        if self.chance(faults.page) {
            self.counts.faults[0] += 1;
            return self.without_page(descriptor, done);
        }
        if self.chance(faults.status) {
            self.counts.faults[1] += 1;
            let status = ANY_STATUS[self.random.below(ANY_STATUS.len())];
            let half = done.output[..done.output.len() / 2].to_vec();
            return Done::failed(status, self.random.byte(), half);
        }
        if self.chance(faults.lie) {
            self.counts.faults[4] += 1;
            return self.lie(done, descriptor.dest_bytes_max);
        }
        self.counts.faults[4] += u64::from(self.script.change(&mut done));
        done
    }

    /// The same job up to a page that is missing.
    fn without_page(&mut self, descriptor: &Descriptor, mut done: Done) -> Done {
        let is_write = self.random.below(2) == 0;
        let (start, bytes, write) = match is_write {
            true => (descriptor.dest, descriptor.dest_bytes_max, status::WRITE),
            false => (descriptor.source, descriptor.source_bytes, 0),
        };
        let at = self.random.below_u64(bytes.into());
        done.output.truncate(self.random.below(done.output.len() + 1));
        let status = [status::PAGE_FAULT, status::PAGE_FAULT_NO_BLOCK][self.random.below(2)];
        let mut failed = Done::failed(status | write, 0, done.output);
        failed.record.fault_address = (start + at) & !0xFFF;
        failed.record.bytes_completed = descriptor.source_bytes / 2;
        failed
    }

    /// A success with other bytes or another record.
    fn lie(&mut self, mut done: Done, dest_bytes_max: u32) -> Done {
        let what = self.random.below(4);
        if what != 0 && !done.output.is_empty() {
            let at = self.random.below(done.output.len());
            done.output[at] ^= self.random.byte() | 1;
        }
        if what != 1 {
            let mut word = || u32::try_from(self.random.word() >> 32).expect("32 bits");
            done.record = Record {
                status: [status::SUCCESS, word().to_le_bytes()[0] | 1][usize::from(what == 2)],
                error: word().to_le_bytes()[0],
                output_bytes: [word(), word() % (dest_bytes_max + 2)][usize::from(what == 3)],
                bytes_completed: [word(), done.record.bytes_completed][usize::from(what == 3)],
                fault_address: u64::from(word()) << 16,
                crc: word(),
                ..done.record
            };
        }
        done
    }
}
