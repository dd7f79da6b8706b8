//! The jobs of one stream, from a free slot to a result.
//!
//! ```text
//! begin -> waiting --ticket, accepted--> at the device --record--> done, or failed
//!             ^  \                          |      \
//!             |   `-- no ticket, too often  |       `-- polled too often: the slot and the ticket are lost
//!             |       (failed: busy)        |           until the record comes after all
//!             `---- page fault, or verify --'
//! ```
//!
//! Nothing here allocates; only a slot that was lost to a device which is gone gets other memory, by `mmap`. Each
//! [`Flights::poll`] takes a job one step further if it can go, and does not wait; [`Flights::pause`] does, for a
//! moment.
//!
//! # Invariants
//!
//! - `FLIGHT-1` A flight at the device has a ticket. A lost slot keeps its ticket, so its queue stays, and a
//!   dedicated queue is not overrun; unless the system has disabled the queue, whose portal leads nowhere then.

use std::sync::Arc;

use zfolio_core::zcomp::BATCH_MAX;

use crate::completion::{Kind, SLOTS, Slots};
use crate::driver::Driver;
use crate::failure::Failure;
use crate::layout::{ONE_PASS_BYTES_MAX, Record, status};
use crate::portal::Submitted;
use crate::portal::hardware::Pause;
use crate::queues::{Direction, NoTicket, Ticket};
use crate::seat::Tries;
use crate::stats::{Count, Wq};

/// The result of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    /// Bytes in the slot's destination.
    pub(crate) bytes: usize,
    /// The checksum of the data before compression, as the device says.
    pub(crate) crc: u32,
}

/// One job.
#[derive(Debug)]
struct Flight {
    slot: usize,
    kind: Kind,
    /// Of source and destination.
    lengths: [usize; 2],
    /// Where it is; `None` while it waits for room.
    ticket: Option<Ticket>,
    /// Tries for room, of a compression and of its verification each.
    tries: Tries,
    /// Polls and page faults, of the whole job.
    polls: u32,
    faults: usize,
    /// The compression that is being verified.
    unverified: Option<Done>,
}

/// The jobs of one stream.
#[derive(Debug)]
pub(crate) struct Flights {
    pub(crate) driver: Arc<Driver>,
    slots: Slots,
    /// By the place of a job in its batch.
    flights: [Option<Flight>; BATCH_MAX],
    /// By slot: what was given up and may still be written to.
    lost: [Option<Ticket>; SLOTS],
    /// A bit for each slot that is in a flight or lost.
    taken: u8,
    pause: Pause,
    /// The CPU of the present batch.
    pub(crate) cpu: usize,
    /// Whether the present batch may go to devices.
    has_devices: bool,
}

impl Flights {
    pub(crate) fn new(driver: &Arc<Driver>, slots: Slots) -> Flights {
        Flights {
            driver: Arc::clone(driver),
            slots,
            flights: Default::default(),
            lost: Default::default(),
            taken: 0,
            pause: Pause::new(),
            cpu: 0,
            has_devices: true,
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes()
    }

    /// Begins a batch.
    pub(crate) fn begin_batch(&mut self) {
        self.cpu = zfolio_sys::cpu::current();
        if self.slots.disinherit() {
            self.start_over();
        }
        debug_assert!(self.flights.iter().all(Option::is_none), "a batch is under way");
        self.has_devices = self.driver.is_ours();
        self.recover();
        if self.lost.iter().any(Option::is_some) {
            self.renew();
        }
    }

    /// In a child of `fork`: what the parent has at devices, or has given up, is the parent's alone. If a batch is
    /// under way, nothing more of it goes to devices.
    #[cold]
    fn start_over(&mut self) {
        let flying = self.flights.iter_mut().flatten().map(|flight| &mut flight.ticket);
        for ticket in flying.chain(&mut self.lost).filter_map(Option::take) {
            self.driver.queues.give_back(ticket);
        }
        let flying = self.flights.iter().flatten().map(|flight| 1 << flight.slot);
        self.taken = flying.fold(0, |taken, slot| taken | slot);
        self.has_devices = false;
    }

    /// Slots whose records have come after all are free again.
    fn recover(&mut self) {
        for slot in 0..SLOTS {
            if self.lost[slot].is_some() && self.slots.poll(slot).is_some() {
                let ticket = self.lost[slot].take().expect("looked at above");
                self.driver.queues.give_back(ticket);
                self.taken &= !(1 << slot);
                self.count(Count::LateRecords, 1);
            }
        }
    }

    /// Gives other memory to the slots that are lost to devices which will hardly answer any more. The old memory is
    /// leaked, once for each job that such a device has forgotten.
    ///
    /// Where the system has disabled the queue the ticket goes back: with it out, the queue would keep its place in the
    /// table for ever. At a queue that is only closed the ticket stays out, and there a slot is renewed only if another
    /// queue may be open.
    #[cold]
    fn renew(&mut self) {
        let queues = &self.driver.queues;
        let has_another = [Direction::Compress, Direction::Decompress]
            .iter()
            .any(|direction| queues.has_any(self.cpu, *direction));
        for slot in 0..SLOTS {
            let Some(ticket) = &self.lost[slot] else { continue };
            let is_hopeless = queues.is_gone(ticket) || (has_another && !queues.is_open(ticket));
            if is_hopeless && self.slots.renew(slot).is_ok() {
                self.lost[slot].take().into_iter().for_each(|ticket| queues.abandon(ticket));
                self.taken &= !(1 << slot);
                self.count(Count::LeakedBuffers, 1);
            }
        }
    }

    /// Begins a job: copies its source, and submits it if there is room.
    pub(crate) fn begin(
        &mut self,
        job: usize,
        kind: Kind,
        source: &[u8],
        dest_bytes: usize,
    ) -> Result<(), Failure> {
        debug_assert!(self.flights[job].is_none(), "its batch has ended");
        // Before the source is copied: there may be no queue for long.
        if !self.has_devices || !self.driver.queues.has_any(self.cpu, kind.direction()) {
            return Err(Failure::NoQueue);
        }
        let lengths = [source.len(), dest_bytes];
        let room = self.slots.buffer_bytes();
        let is_long = kind == Kind::OnePass && source.len() > ONE_PASS_BYTES_MAX;
        if is_long || lengths.iter().any(|bytes| !(1..=room).contains(bytes)) {
            return Err(Failure::Length);
        }
        let slot = (0..SLOTS).find(|slot| self.taken >> slot & 1 == 0).ok_or(Failure::NoBuffer)?;
        self.slots.fill(slot, source);
        self.taken |= 1 << slot;
        let mut flight = Flight {
            slot,
            kind,
            lengths,
            ticket: None,
            tries: Tries::default(),
            polls: 0,
            faults: 0,
            unverified: None,
        };
        match self.depart(&mut flight) {
            Ok(()) => self.flights[job] = Some(flight),
            Err(failure) => {
                self.taken &= !(1 << slot);
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Whether a job has been begun and has not ended.
    pub(crate) fn is_active(&self, job: usize) -> bool {
        self.flights[job].is_some()
    }

    /// Takes a job one step further. `None`: it is still under way. After an error it has ended; after a result it
    /// ends by [`Flights::end`].
    pub(crate) fn poll(&mut self, job: usize) -> Option<Result<Done, Failure>> {
        if self.slots.disinherit() {
            // The caller has forked in the middle of a batch.
            self.start_over();
        }
        let mut flight = self.flights[job].take().expect("the job has been begun");
        let step = if flight.ticket.is_none() {
            self.depart(&mut flight).map(|()| None)
        } else {
            self.arrive(&mut flight)
        };
        match step {
            Ok(done) => {
                self.flights[job] = Some(flight);
                done.map(Ok)
            }
            Err(failure) => {
                if self.lost[flight.slot].is_none() {
                    self.taken &= !(1 << flight.slot);
                }
                Some(Err(failure))
            }
        }
    }

    /// Copies the result of a job to `dest`, as much as there is room for, and ends the job.
    pub(crate) fn end(&mut self, job: usize, dest: &mut [u8]) {
        let flight = self.flights[job].take().expect("the job has a result");
        self.slots.take(flight.slot, dest);
        self.taken &= !(1 << flight.slot);
    }

    /// Waits a moment for the record of the first job that is at a device. A job that waits for room is tried again
    /// at once instead.
    pub(crate) fn pause(&mut self) {
        let mut first = None;
        for flight in self.flights.iter().flatten() {
            if flight.ticket.is_none() {
                return std::hint::spin_loop();
            }
            first = first.or(Some(flight.slot));
        }
        let Some(slot) = first else { return };
        if self.slots.pause(slot, self.pause) {
            // It was not waited for to the end.
            return;
        }
        for flight in self.flights.iter_mut().flatten() {
            // All of them have waited. The poll that comes next is one of these.
            flight.polls = flight.polls.saturating_add(self.pause.polls() - 1);
        }
    }

    /// From now on a wait counts as so many polls, as if the processor had `umwait`.
    #[cfg(test)]
    pub(crate) fn count_a_pause_as(&mut self, polls: u32) {
        self.pause = Pause::counted(polls);
    }

    fn count(&self, of: Count, more: usize) {
        self.driver.queues.count(self.cpu, of, more);
    }

    /// Tries once to submit a flight that waits. An error: it has tried too often.
    fn depart(&mut self, flight: &mut Flight) -> Result<(), Failure> {
        if !self.has_devices {
            return Err(Failure::NoQueue);
        }
        let queues = &self.driver.queues;
        let direction = flight.kind.direction();
        let ticket = match queues.next(self.cpu, direction) {
            Ok(ticket) => ticket,
            Err(NoTicket::Full) => return self.wait_for_room(flight),
            Err(NoTicket::Closed) => return Err(Failure::NoQueue),
        };
        let (slots, slot) = (&mut self.slots, flight.slot);
        let submitted = queues
            .with_portal(&ticket, |portal| slots.launch(slot, flight.kind, flight.lengths, portal));
        match submitted {
            Submitted::Accepted => {
                // As in the kernel: a verification is no call, and a job after a page fault is none again.
                if flight.kind != Kind::Verify && flight.faults == 0 {
                    let (calls, wq_calls) = match direction {
                        Direction::Compress => (Count::CompCalls, Wq::CompCalls),
                        Direction::Decompress => (Count::DecompCalls, Wq::DecompCalls),
                    };
                    self.count(calls, 1);
                    queues.count_wq(self.cpu, &ticket, wq_calls, 1);
                }
                flight.ticket = Some(ticket);
                Ok(())
            }
            Submitted::Full => {
                queues.give_back(ticket);
                self.wait_for_room(flight)
            }
            Submitted::Gone => {
                queues.close(&ticket);
                queues.give_back(ticket);
                self.wait(flight)
            }
        }
    }

    /// Notes a try that has found no room.
    #[cold]
    fn wait_for_room(&self, flight: &mut Flight) -> Result<(), Failure> {
        self.count(Count::Full, 1);
        self.wait(flight)
    }

    /// Notes a try in vain.
    #[cold]
    fn wait(&self, flight: &mut Flight) -> Result<(), Failure> {
        let direction = flight.kind.direction();
        let busy = match direction {
            Direction::Compress => Count::BusyComps,
            Direction::Decompress => Count::BusyDecomps,
        };
        if !flight.tries.is_last(direction, flight.kind == Kind::OnePass) {
            return Ok(());
        }
        self.count(busy, 1);
        Err(Failure::Busy)
    }

    /// Looks for the record of a flight at the device.
    fn arrive(&mut self, flight: &mut Flight) -> Result<Option<Done>, Failure> {
        let Some(record) = self.slots.poll(flight.slot) else {
            flight.polls += 1;
            if flight.polls < self.driver.settings.polls_max {
                return Ok(None);
            }
            self.lost[flight.slot] = flight.ticket.take();
            self.count(Count::Timeout, 1);
            return Err(Failure::Timeout);
        };
        let ticket = flight.ticket.take().expect("FLIGHT-1");
        let is_success = record.status & status::MASK == status::SUCCESS;
        let done = if is_success { flight.done(&record) } else { None };
        if let Some(done) = done {
            // While the ticket is out: the queue's place may be another one's afterwards.
            self.count_bytes(flight, done, &ticket);
        }
        self.driver.queues.give_back(ticket);
        match record.status & status::MASK {
            status::SUCCESS => {
                self.succeed(flight, done).inspect_err(|failure| self.note(*failure))
            }
            status::PAGE_FAULT | status::PAGE_FAULT_NO_BLOCK => self.fault(flight, &record),
            _ => {
                let failure = match Failure::of(&record) {
                    Failure::Overflow if flight.kind.direction() == Direction::Decompress => {
                        Failure::Long
                    }
                    failure => failure,
                };
                self.note(failure);
                Err(failure)
            }
        }
    }

    #[cold]
    fn note(&self, failure: Failure) {
        match failure {
            Failure::Overflow => self.count(Count::Overflow, 1),
            Failure::Watchdog => self.count(Count::Timeout, 1),
            Failure::Implausible => self.count(Count::Implausible, 1),
            Failure::Checksum => self.count(Count::Checksum, 1),
            _ => self.count(Count::Einval, 1),
        }
    }

    /// Counts the compressed bytes of a success, as the kernel does: those that were written, or read. A verification
    /// counts none.
    fn count_bytes(&self, flight: &Flight, done: Done, ticket: &Ticket) {
        let (all, wq, bytes) = match flight.kind {
            Kind::Fixed | Kind::OnePass => (Count::CompBytesOut, Wq::CompBytes, done.bytes),
            Kind::Decompress => (Count::DecompBytesIn, Wq::DecompBytes, flight.lengths[0]),
            Kind::Verify => return,
        };
        self.count(all, bytes);
        self.driver.queues.count_wq(self.cpu, ticket, wq, bytes);
    }

    /// What follows from a success; `None`: it cannot be one.
    fn succeed(
        &mut self,
        flight: &mut Flight,
        done: Option<Done>,
    ) -> Result<Option<Done>, Failure> {
        let done = done.ok_or(Failure::Implausible)?;
        match flight.kind {
            Kind::Fixed | Kind::OnePass if self.driver.settings.verify_compress => {
                flight.kind = Kind::Verify;
                flight.unverified = Some(done);
                flight.lengths = [done.bytes, flight.lengths[0]];
                flight.tries = Tries::default();
                self.depart(flight).map(|()| None)
            }
            Kind::Fixed | Kind::OnePass | Kind::Decompress => Ok(Some(done)),
            Kind::Verify => {
                let unverified = flight.unverified.expect("it was compressed before");
                let is_same = unverified.crc == done.crc;
                if is_same { Ok(Some(unverified)) } else { Err(Failure::Checksum) }
            }
        }
    }

    /// Brings in the page that was missing, and submits the job again.
    #[cold]
    fn fault(&mut self, flight: &mut Flight, record: &Record) -> Result<Option<Done>, Failure> {
        // Each page of both buffers, and some more: a page may be taken away again.
        let pages = 2 * self.slots.buffer_bytes() / zfolio_sys::map::PAGE_BYTES;
        flight.faults += 1;
        if flight.faults > pages + 8 || !self.slots.touch(flight.slot, record.fault_address) {
            self.note(Failure::PageFault);
            return Err(Failure::PageFault);
        }
        self.count(Count::PageFaults, 1);
        // Tries and polls go on from where they were: a device that answers so at the last moment, again and again,
        // holds the job up no longer than one that never answers.
        self.depart(flight).map(|()| None)
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        if self.slots.disinherit() {
            return self.start_over();
        }
        // What the device has answered by now need not be leaked.
        self.recover();
        self.count(Count::LeakedBuffers, self.slots.at_devices());
        let flying = self.flights.iter_mut().flatten().map(|flight| &mut flight.ticket);
        for ticket in flying.chain(&mut self.lost).filter_map(Option::take) {
            self.driver.queues.abandon(ticket);
        }
    }
}

impl Flight {
    /// What a record of success says, if it can be one.
    fn done(&self, record: &Record) -> Option<Done> {
        let length = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        let [source_bytes, dest_bytes] = self.lengths;
        let bytes = length(record.output_bytes);
        let can_be = match self.kind {
            Kind::Fixed | Kind::OnePass => (1..=dest_bytes).contains(&bytes),
            Kind::Decompress | Kind::Verify => {
                bytes == dest_bytes && length(record.bytes_completed) == source_bytes
            }
        };
        can_be.then_some(Done { bytes, crc: record.crc })
    }
}

impl Kind {
    fn direction(self) -> Direction {
        match self {
            Kind::Fixed | Kind::OnePass => Direction::Compress,
            Kind::Decompress | Kind::Verify => Direction::Decompress,
        }
    }
}

#[cfg(test)]
mod tests;
