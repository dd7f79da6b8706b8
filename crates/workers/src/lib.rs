//! The accelerator that every machine has: its other CPUs.
//!
//! A [`Crew`] is some threads. [`Workers`] is a codec whose batches a crew works on together with the thread that
//! submits them: a [`Backend`](zfolio_core::zcomp::Backend) around another one. What it writes is what the other one
//! writes.
//!
//! ```text
//! submit   the jobs go to the stream's batch; if they are worth a wake-up, the batch is offered to workers that have
//!          nothing to do; then the submitter takes jobs itself until none is left
//! a worker takes jobs until none is left, and waits for the next offer
//! poll     whether the jobs that workers have taken are done
//! ```
//!
//! A worker that comes late, or never, costs nothing: nobody waits for a job that was not taken. So a process whose
//! threads are gone, as in a child of `fork`, goes on without them ([`Crew::start_over`]).
//!
//! # Invariants
//!
//! - `WORK-1` A job is taken once, and only while its batch is published; its bytes are the taker's until it is done.
//! - `WORK-2` A batch lives as long as any worker has it.
//! - `WORK-3` `submit` and `poll` allocate nothing and take no lock (`ZC-1`).
//!
//! # Cost
//!
//! A batch of one job goes to the codec as if there were no crew. Others take two looks at the clock, and, where their
//! work takes longer than [`OFFER_NS`] for each worker, a wake-up of some microseconds. A worker that has just been at
//! work looks for the next offer for [`LINGER_NS`] before it sleeps. Each worker has the state of one stream for each
//! direction and codec.

#![deny(unsafe_code)]

mod accelerated;
mod accelerator;
#[allow(unsafe_code, reason = "bytes whose borrows are the submitter's")]
mod batch;
mod crew;
#[allow(unsafe_code, reason = "a batch that its stream keeps for as long as a worker has it")]
mod desk;
mod workers;

pub use accelerated::{Accelerated, HARDWARE_STATS, Hardware};
pub use accelerator::Accelerator;
pub use crew::{CREW_MAX, Crew, LINGER_NS, Threads};
pub use workers::{OFFER_NS, Workers, with_crew};

/// What loom replaces.
mod atomic {
    #[cfg(all(test, feature = "loom"))]
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
    #[cfg(not(all(test, feature = "loom")))]
    pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
}
