//! The simulated memory: pages with their state, the threads that wait for them, and the messages.
//!
//! The bytes are real: a move copies them, and overwrites the source with [`POISON`], so that a
//! read of a missing page returns garbage. The state of each page (present, shared, read-only, ...)
//! is kept separately.
//!
//! `system` has the calls of the engine, `program` the accesses and calls of the program.

#![allow(clippy::disallowed_types, reason = "the simulated kernel's lock is none of the engine's")]

mod program;
mod system;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::map::Reservation;
use zfolio_sys::uffd::Message;

use super::random::Random;
use super::schedule::{self, Schedule};
use crate::config::Mode;
use crate::system::Side;

pub(super) use program::Access;

/// How many calls take long in one run at most.
const SLOW_MAX: usize = 300;

/// The bytes of a missing page.
const POISON: u8 = 0xDB;

/// Where the simulated program's memory begins in the address space: a multiple of what a branch of
/// the folio table covers, in folios of 2 MiB, so that runs of one seed have the same branches and leaves.
const ALIGN_BYTES: usize = 16 << 30;

/// How often the kernel refuses or interferes although it need not: once in so many calls; 0 is
/// never.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Refusals {
    /// `EAGAIN` with nothing done.
    pub(super) again: usize,
    /// A move or copy stops early.
    pub(super) short: usize,
    /// A move is done, but returns `EEXIST` (`MOVE-3`).
    pub(super) denied: usize,
    /// A registration is refused.
    pub(super) register: usize,
    /// Whether a thread that waits for a page may be interrupted by a signal, and then faults
    /// again.
    pub(super) signal: bool,
    /// A page is swapped out by the system.
    pub(super) swap: usize,
    /// A call takes long: other threads do much before it begins.
    pub(super) slow: usize,
}

/// For how many points of the schedule a capture stops in a directed test. It does not stop until all
/// other threads wait, because one may be trying to take a lock that the capturing thread holds.
const CAPTURE_POINTS: usize = 20_000;

/// Where the engine's calls to the kernel stop in a directed test, so that other threads run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Halt {
    /// A call that puts pages into the program: before the kernel looks at the mappings.
    Before,
    /// The same, between the two looks that the kernel takes at the mappings.
    Between,
    /// A call that takes pages out of the program: before it begins.
    Capture,
    /// The same, once it has taken them.
    Captured,
}

/// What lies at a page's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Here {
    Missing,
    /// The page of zeros that all processes share.
    Zero,
    Own,
    /// On the system's swap device: not resident, and not missing.
    Swapped,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    /// The mapping that the page lies in; 0 is none.
    mapping: u32,
    here: Here,
    registered: bool,
    read_only: bool,
    /// A device writes to it.
    pinned: bool,
    /// A child has the page, too, or had it; the page was not written to since.
    shared: bool,
}

impl Page {
    const UNMAPPED: Page = Page {
        mapping: 0,
        here: Here::Missing,
        registered: false,
        read_only: false,
        pinned: false,
        shared: false,
    };

    /// A move, a copy or `mremap` fails for a range in which these change.
    fn kind(&self) -> (u32, bool, bool) {
        (self.mapping, self.read_only, self.registered)
    }
}

/// One of the two ranges of addresses.
#[derive(Debug, Default)]
struct Area {
    start: usize,
    pages: Vec<Page>,
}

impl Area {
    fn end(&self) -> usize {
        self.start + self.pages.len() * PAGE_BYTES
    }

    fn contains(&self, address: usize) -> bool {
        (self.start..self.end()).contains(&address)
    }
}

/// A thread that waits for a page.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    thread: usize,
    address: usize,
    /// The message of this fault was read.
    is_read: bool,
}

/// An event of a change; the thread that made the change waits until it is read.
#[derive(Debug, Clone, Copy)]
struct Event {
    thread: usize,
    message: Message,
}

#[derive(Debug)]
struct State {
    random: Random,
    program: Area,
    staging: Area,
    /// Threads that wait for pages of the program's side, and of the staging area.
    waiters: [Vec<Waiter>; 2],
    events: VecDeque<Event>,
    /// Unfinished changes of the program's mappings; meanwhile nothing is moved or copied in.
    changing: usize,
    /// Ranges whose `Remove` was read, and whose pages the program's thread is about to drop.
    dropping: Vec<(usize, usize)>,
    /// A child has the pages that are shared.
    has_child: bool,
    /// How many calls may still take long: with many of them, a thread that waits for the table
    /// would wait for most of the run.
    slow_left: usize,
    /// Threads of the engine that sleep until there is a message.
    sleepers: Vec<usize>,
    /// Where calls stop, and whether one has stopped.
    halt: Option<Halt>,
    has_stopped: bool,
    /// So many registrations are refused next.
    refused_next: usize,
    mappings: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Space {
    state: Mutex<State>,
    pub(super) schedule: Arc<Schedule>,
    pub(super) mode: Mode,
    refusals: Refusals,
    cpus: usize,
    /// The program's memory.
    memory: Reservation,
}

impl Space {
    pub(super) fn new(
        schedule: Arc<Schedule>,
        random: Random,
        mode: Mode,
        refusals: Refusals,
        (pages, cpus): (usize, usize),
    ) -> Arc<Space> {
        let memory = Reservation::new(pages * PAGE_BYTES, ALIGN_BYTES).expect("address space");
        let program = Area { start: memory.address(), pages: vec![Page::UNMAPPED; pages] };
        let state = State {
            random,
            program,
            staging: Area::default(),
            waiters: [Vec::new(), Vec::new()],
            events: VecDeque::new(),
            changing: 0,
            dropping: Vec::new(),
            has_child: false,
            slow_left: SLOW_MAX,
            sleepers: Vec::new(),
            halt: None,
            has_stopped: false,
            refused_next: 0,
            mappings: 0,
        };
        Arc::new(Space { state: Mutex::new(state), schedule, mode, refusals, cpus, memory })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first address of the program's memory.
    pub(super) fn start(&self) -> usize {
        self.memory.address()
    }

    /// The address of page number `page` of the program.
    pub(super) fn address(&self, page: usize) -> usize {
        self.start() + page * PAGE_BYTES
    }

    /// The number of the program's page that `address` lies in.
    pub(super) fn page(&self, address: usize) -> usize {
        (address - self.start()) / PAGE_BYTES
    }

    /// For the trace: the page number of an address. In the staging area it has bit 32 set; for an
    /// address in neither area it is `u64::MAX`.
    fn place(&self, state: &State, address: usize) -> u64 {
        if state.program.contains(address) {
            self.page(address) as u64
        } else if state.staging.contains(address) {
            (1 << 32) | ((address - state.staging.start) / PAGE_BYTES) as u64
        } else {
            u64::MAX
        }
    }

    /// Wakes the threads that wait for pages of a range.
    fn wake_range(&self, state: &mut State, side: Side, start: usize, bytes: usize) {
        let waiters = &mut state.waiters[side as usize];
        waiters.retain(|waiter| {
            let wakes = (start..start + bytes).contains(&waiter.address);
            if wakes {
                self.schedule.wake(waiter.thread);
            }
            !wakes
        });
    }

    /// From now on calls stop at this place.
    pub(super) fn halt(&self, at: Halt) {
        self.lock().halt = Some(at);
    }

    /// The next registration is refused.
    pub(super) fn refuse_next(&self) {
        self.lock().refused_next += 1;
    }

    /// Whether a call has stopped.
    pub(super) fn has_stopped(&self) -> bool {
        self.lock().has_stopped
    }

    /// Stops here if a test wants that.
    fn stop(&self, here: Halt) {
        let mut state = self.lock();
        if state.halt == Some(here) {
            state.has_stopped = true;
            drop(state);
            match here {
                Halt::Capture | Halt::Captured => {
                    (0..CAPTURE_POINTS).for_each(|_| schedule::point())
                }
                Halt::Before | Halt::Between => schedule::let_others_run(),
            }
        }
    }

    /// Wakes the threads that sleep until there is a message.
    fn ring(&self, state: &mut State) {
        state.sleepers.drain(..).for_each(|thread| self.schedule.wake(thread));
    }

    /// Waits until the page at `address` of `side` was served, or a signal comes.
    fn sleep_for(&self, mut state: MutexGuard<'_, State>, side: Side, address: usize) {
        let thread = schedule::me();
        state.waiters[side as usize].push(Waiter { thread, address, is_read: false });
        self.ring(&mut state);
        let what = format!("page {:#x} of {side:?}", self.place(&state, address));
        let signal = self.refusals.signal && state.random.one_in(4);
        let at_most = signal.then(|| state.random.below(400_000) as u64);
        drop(state);
        schedule::wait(what, at_most);
        self.lock().waiters[side as usize].retain(|waiter| waiter.thread != thread);
    }
}

impl State {
    fn area(&self, address: usize) -> Option<&Area> {
        [&self.program, &self.staging].into_iter().find(|area| area.contains(address))
    }

    fn get(&self, address: usize) -> Option<&Page> {
        let area = self.area(address)?;
        area.pages.get((address - area.start) / PAGE_BYTES)
    }

    fn get_mut(&mut self, address: usize) -> Option<&mut Page> {
        let area =
            if self.program.contains(address) { &mut self.program } else { &mut self.staging };
        area.contains(address).then(|| &mut area.pages[(address - area.start) / PAGE_BYTES])
    }

    /// Whether a range lies in one mapping, and all its pages are of the same kind.
    fn is_one_mapping(&self, start: usize, bytes: usize) -> bool {
        self.is_all_of(start, bytes, Page::kind)
    }

    /// Whether all pages of a range are mapped and have the same of what `kind` tells.
    fn is_all_of<K: PartialEq>(
        &self,
        start: usize,
        bytes: usize,
        kind: impl Fn(&Page) -> K,
    ) -> bool {
        let kind = |at| self.get(at).filter(|page| page.mapping != 0).map(&kind);
        let first = kind(start);
        first.is_some() && pages(start, bytes).all(|at| kind(at) == first)
    }

    /// Whether the call that begins takes long.
    fn is_slow(&mut self, slow: usize) -> bool {
        let is_slow = self.slow_left > 0 && self.random.one_in(slow);
        self.slow_left -= usize::from(is_slow);
        is_slow
    }

    /// Empties a page.
    fn take_away(&mut self, address: usize) {
        if let Some(page) = self.get_mut(address) {
            (page.here, page.pinned, page.shared) = (Here::Missing, false, false);
            fill(address, POISON);
        }
    }

    /// Makes a page present, whose bytes were written before.
    fn bring(&mut self, address: usize, here: Here) {
        if let Some(page) = self.get_mut(address) {
            (page.here, page.pinned, page.shared) = (here, false, false);
        }
    }
}

/// The pages of a range.
fn pages(start: usize, bytes: usize) -> impl Iterator<Item = usize> {
    (start..start + bytes).step_by(PAGE_BYTES)
}

/// The bytes of a page of the simulated memory.
#[allow(unsafe_code, reason = "the simulated kernel's own access to the memory that it hands out")]
fn bytes_of(address: usize) -> *mut u8 {
    (address & !(PAGE_BYTES - 1)) as *mut u8
}

/// Writes `byte` over a page.
#[allow(unsafe_code, reason = "as above")]
fn fill(address: usize, byte: u8) {
    // SAFETY: the page is of one of the two reservations; by SCHED-1 no other thread runs, and the
    // page is missing or about to be, so by the engine's and the program's contracts no reference
    // to it is alive.
    unsafe { bytes_of(address).write_bytes(byte, PAGE_BYTES) }
}

/// Copies a page's bytes. The source may be of the engine's heap, and begin anywhere.
#[allow(unsafe_code, reason = "as above")]
fn copy_page(from: usize, to: usize) {
    // SAFETY: both are whole and mapped, as for fill(); they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes_of(to), PAGE_BYTES) }
}

/// Whether a page holds nothing but `byte`.
#[allow(unsafe_code, reason = "as above")]
fn is_filled(address: usize, byte: u8) -> bool {
    // SAFETY: as for fill(); the slice is gone before anybody else runs (SCHED-1).
    let bytes = unsafe { std::slice::from_raw_parts(bytes_of(address), PAGE_BYTES) };
    bytes.iter().all(|found| *found == byte)
}
