//! The driver's choice of queues without descriptors, for who models the devices' time rather than their work: the
//! simulation of `zfolio bench iaa`. It runs the tables, tickets and limits that streams use.

use crate::driver::{Driver, TRIES_COMPRESS, TRIES_DECOMPRESS, TRIES_DYNAMIC};
use crate::queues::{Direction, NoTicket, Ticket};

/// A place in a queue. It goes back by [`Driver::leave`]; until then it counts against the queue's depth.
#[derive(Debug)]
#[must_use = "a seat that is lost keeps its queue for ever"]
pub struct Seat(Ticket);

impl Seat {
    /// The queue, by the order in which queues were added, as long as none was taken away in between.
    #[must_use]
    pub fn queue(&self) -> usize {
        self.0.index()
    }
}

impl Driver {
    /// The place that a stream on `cpu` would get for its next descriptor.
    ///
    /// # Errors
    ///
    /// All queues of the CPU are full, or there is none.
    pub fn seat(&self, cpu: usize, direction: Direction) -> Result<Seat, NoTicket> {
        self.queues.next(cpu, direction).map(Seat)
    }

    /// Gives a place back.
    pub fn leave(&self, seat: Seat) {
        self.queues.give_back(seat.0);
    }

    /// Places that are taken, in all queues.
    #[must_use]
    pub fn seats_taken(&self) -> u64 {
        self.queues.in_flight()
    }
}

/// A job's tries for a place, all of them in vain.
#[derive(Debug, Default)]
pub struct Tries(u32);

impl Tries {
    /// Counts one more; returns whether the job is given up.
    pub fn is_last(&mut self, direction: Direction, is_dynamic: bool) -> bool {
        self.0 += 1;
        self.0 >= tries_max(direction, is_dynamic)
    }
}

/// How often a stream asks for a place before its job is given up.
fn tries_max(direction: Direction, is_dynamic: bool) -> u32 {
    match direction {
        Direction::Compress if is_dynamic => TRIES_DYNAMIC,
        Direction::Compress => TRIES_COMPRESS,
        Direction::Decompress => TRIES_DECOMPRESS,
    }
}
