//! The transmission: requests, and what is done for them.
//!
//! A request that is small is served in one step. A large one becomes a [`Job`], and each step does a piece of it, so
//! that neither its payload nor its reply has to be in memory as a whole (`NBD-1`).

use std::fmt;
use std::sync::Arc;

use super::output::Output;
use super::reading;
use super::reply::{Failure, Recipient};
use super::session::Step;
use super::wire::{self, Reader};
use super::{REQUEST_BYTES_MAX, WHOLE_BYTES};
use crate::device::{Device, SECTOR_BYTES};
use crate::pieces::Pieces;

/// So much is zeroed or discarded in one step: between two of them the connection can be ended.
const ZERO_BYTES: u32 = 64 << 20;

/// A client's use of an export.
pub(super) struct Transmission {
    pub(super) device: Arc<dyn Device>,
    is_structured: bool,
    /// `base:allocation` was set for this export.
    has_contexts: bool,
    job: Option<Job>,
}

impl fmt::Debug for Transmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transmission").field("job", &self.job).finish_non_exhaustive()
    }
}

/// A request as it was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) flags: u16,
    command: u16,
    cookie: u64,
    pub(super) at: u64,
    pub(super) bytes: u32,
}

/// A request that is served in several steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) to: Recipient,
    /// So much of it was done.
    pub(super) done: u32,
    /// What went wrong, and where. The rest of the request is received or sent without the device.
    pub(super) failure: Option<(Failure, u64)>,
}

impl Job {
    pub(super) fn left(&self) -> u32 {
        self.request.bytes - self.done
    }

    /// Where it goes on.
    pub(super) fn at(&self) -> u64 {
        self.request.at + u64::from(self.done)
    }

    fn fail(&mut self, failure: impl Into<Failure>) {
        self.failure.get_or_insert((failure.into(), self.request.at + u64::from(self.done)));
    }
}

impl Request {
    /// `Err`: what to do since there is none.
    fn read(input: &[u8]) -> Result<Request, Step> {
        let mut reader = Reader(input);
        let mut next = || {
            let magic = reader.u32()?;
            let (flags, command) = (reader.u16()?, reader.u16()?);
            let (cookie, at, bytes) = (reader.u64()?, reader.u64()?, reader.u32()?);
            Some((magic, Request { flags, command, cookie, at, bytes }))
        };
        match next() {
            Some((wire::REQUEST_MAGIC, request)) => Ok(request),
            Some(_) => Err(Step::Ends(0)),
            None => Err(Step::Needs(wire::REQUEST_BYTES)),
        }
    }

    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    fn changes(&self) -> bool {
        matches!(self.command, wire::CMD_WRITE | wire::CMD_TRIM | wire::CMD_WRITE_ZEROES)
    }

    /// Whether its payload, or that of its reply, is longer than allowed.
    fn is_too_long(&self) -> bool {
        matches!(self.command, wire::CMD_READ | wire::CMD_WRITE) && self.bytes > REQUEST_BYTES_MAX
    }

    /// The flags that its command may have. `None`: there is no such command.
    fn flags_allowed(&self, is_structured: bool) -> Option<u16> {
        // FUA is allowed with every command, and ignored where nothing is written.
        let others = match self.command {
            wire::CMD_READ if is_structured => wire::CMD_FLAG_DF,
            wire::CMD_READ | wire::CMD_WRITE | wire::CMD_DISC | wire::CMD_FLUSH => 0,
            wire::CMD_TRIM | wire::CMD_CACHE => 0,
            wire::CMD_WRITE_ZEROES => wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO,
            wire::CMD_BLOCK_STATUS => wire::CMD_FLAG_REQ_ONE,
            _ => return None,
        };
        Some(others | wire::CMD_FLAG_FUA)
    }
}

impl Transmission {
    pub(super) fn new(
        device: Arc<dyn Device>,
        is_structured: bool,
        has_contexts: bool,
    ) -> Transmission {
        Transmission { device, is_structured, has_contexts, job: None }
    }

    /// Serves the request at the front of the input, or a piece of the one that is under way.
    pub(super) fn step(&mut self, input: &[u8], output: &mut Output) -> Step {
        if let Some(mut job) = self.job.take() {
            let step = match job.request.command {
                wire::CMD_WRITE => self.write_piece(&mut job, input, output),
                wire::CMD_READ => reading::piece(&*self.device, &mut job, output),
                _ => self.zero_piece(&mut job, output),
            };
            self.job = (job.left() > 0).then_some(job);
            return step;
        }
        let request = match Request::read(input) {
            Ok(request) => request,
            Err(step) => return step,
        };
        if request.command == wire::CMD_DISC {
            return Step::Ends(wire::REQUEST_BYTES);
        }
        let to = Recipient { cookie: request.cookie, is_structured: self.is_structured };
        let refused = self.refusal(&request);
        if refused.is_some_and(Failure::is_about_the_range) {
            self.device.note_invalid();
        }
        if request.command == wire::CMD_WRITE && request.is_too_long() {
            // To receive its payload could take as long as the client likes.
            to.failure(output, Failure::LONG);
            return Step::Ends(wire::REQUEST_BYTES);
        }
        if request.command == wire::CMD_WRITE && request.bytes > 0 {
            return self.write(&request, to, refused, &input[wire::REQUEST_BYTES..], output);
        }
        match refused {
            Some(failure) => to.failure(output, failure),
            None => self.serve(&request, to, output),
        }
        Step::Took(wire::REQUEST_BYTES)
    }

    /// Why a request is refused before the device sees it.
    fn refusal(&self, request: &Request) -> Option<Failure> {
        let Some(allowed) = request.flags_allowed(self.is_structured) else {
            return Some(Failure::COMMAND);
        };
        if request.flags & !allowed != 0 {
            return Some(Failure::FLAGS);
        }
        if request.changes() && self.device.is_read_only() {
            return Some(Failure::READ_ONLY);
        }
        if request.command == wire::CMD_FLUSH {
            return (request.at != 0 || request.bytes != 0).then_some(Failure::NOT_ZERO);
        }
        if request.command == wire::CMD_BLOCK_STATUS && !self.has_contexts {
            return Some(Failure::NO_CONTEXT);
        }
        if request.is_too_long() {
            return Some(Failure::LONG);
        }
        if request.bytes == 0 {
            return Some(Failure::EMPTY);
        }
        let bytes = u64::from(request.bytes);
        if request.at.checked_add(bytes).is_none_or(|end| end > self.device.size_bytes()) {
            let fills = matches!(request.command, wire::CMD_WRITE | wire::CMD_WRITE_ZEROES);
            return Some(if fills { Failure::BEYOND } else { Failure::RANGE });
        }
        // The end of a range in the device does not overflow, and is aligned if these two are.
        ((request.at | bytes) % u64::from(SECTOR_BYTES) != 0).then_some(Failure::UNALIGNED)
    }

    /// Serves a request that is neither refused nor a write.
    fn serve(&mut self, request: &Request, to: Recipient, output: &mut Output) {
        match request.command {
            wire::CMD_FLUSH => self.finish(self.device.flush(), request, to, output),
            wire::CMD_BLOCK_STATUS => reading::block_status(&*self.device, request, to, output),
            wire::CMD_CACHE => to.success(output),
            _ => {
                // A read or a change without payload: the next step begins it.
                self.job = Some(Job { request: *request, to, done: 0, failure: None });
            }
        }
    }

    /// Ends a request that has no data in its reply.
    fn finish(
        &self,
        result: Result<(), impl Into<Failure>>,
        request: &Request,
        to: Recipient,
        output: &mut Output,
    ) {
        let result = result.map_err(Into::into).and_then(|()| {
            let is_durable = request.changes() && request.has(wire::CMD_FLAG_FUA);
            if is_durable { self.device.flush().map_err(Failure::from) } else { Ok(()) }
        });
        match result {
            Ok(()) => to.success(output),
            Err(failure) => to.failure(output, failure),
        }
    }

    /// Begins a write; `payload` is what there is of it. A refused write is received all the same, since its payload is
    /// on the way.
    fn write(
        &mut self,
        request: &Request,
        to: Recipient,
        refused: Option<Failure>,
        payload: &[u8],
        output: &mut Output,
    ) -> Step {
        if refused.is_none() && request.bytes as usize <= WHOLE_BYTES {
            let Some(payload) = payload.get(..request.bytes as usize) else {
                return Step::Needs(wire::REQUEST_BYTES + request.bytes as usize);
            };
            let result = self.device.write(request.at, payload);
            self.finish(result, request, to, output);
            return Step::Took(wire::REQUEST_BYTES + payload.len());
        }
        let failure = refused.map(|failure| (failure, request.at));
        self.job = Some(Job { request: *request, to, done: 0, failure });
        Step::Took(wire::REQUEST_BYTES)
    }

    /// Writes what there is of a large write, or receives what there is of a refused one.
    fn write_piece(&self, job: &mut Job, input: &[u8], output: &mut Output) -> Step {
        let available = u32::try_from(input.len()).unwrap_or(u32::MAX).min(job.left());
        let bytes = if job.failure.is_some() {
            if available == 0 {
                return Step::Needs(1);
            }
            available
        } else {
            match self.cut(job, available) {
                Ok(bytes) => bytes,
                Err(needed) => return Step::Needs(needed),
            }
        };
        if job.failure.is_none() {
            if let Err(error) = self.device.write(job.at(), &input[..bytes as usize]) {
                job.fail(error);
            }
        }
        job.done += bytes;
        if job.left() == 0 {
            let result = job.failure.map_or(Ok(()), |(failure, _)| Err(failure));
            self.finish(result, &job.request, job.to, output);
        }
        Step::Took(bytes as usize)
    }

    /// How many of the available bytes of a write are written by one call: all that is left, or up to the last unit's
    /// end. `Err`: how many there have to be.
    fn cut(&self, job: &Job, available: u32) -> Result<u32, usize> {
        if available == job.left() {
            return Ok(available);
        }
        let pieces = Pieces::of(&*self.device);
        let bytes = pieces.last_end(job.at(), available.into()).saturating_sub(job.at());
        if bytes >= WHOLE_BYTES as u64 {
            return Ok(u32::try_from(bytes).expect("no more than what is available"));
        }
        let least = pieces.end_behind(job.at(), WHOLE_BYTES as u64) - job.at();
        let least = least.min(u64::from(job.left()));
        Err(usize::try_from(least).expect("no more than WHOLE_BYTES and a unit"))
    }

    /// Zeroes or discards a piece.
    fn zero_piece(&self, job: &mut Job, output: &mut Output) -> Step {
        // Pieces end where units do, except the last one.
        let end = (job.at() / u64::from(ZERO_BYTES) + 1) * u64::from(ZERO_BYTES);
        let bytes = (end - job.at()).min(u64::from(job.left()));
        let result = if job.request.command == wire::CMD_TRIM {
            self.device.discard(job.at(), bytes)
        } else {
            // FAST_ZERO refuses what is no faster than a write. Zeros take no payload and no compression here.
            let keeps_room = job.request.has(wire::CMD_FLAG_NO_HOLE);
            self.device.write_zeroes(job.at(), bytes, keeps_room)
        };
        job.done += u32::try_from(bytes).expect("no more than what is left");
        if result.is_err() {
            job.done = job.request.bytes;
        }
        if job.left() > 0 {
            return Step::TookLong(0);
        }
        self.finish(result, &job.request, job.to, output);
        Step::Took(0)
    }
}
