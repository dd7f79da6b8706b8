//! All areas of a store: a [`Backing`] whose bytes are sealed and packed.
//!
//! An object's life: [`Areas::submit`](Backing::submit) copies it into the open frame, which was opened on a run of
//! slots of the first area that has any (`out`). A full frame, or the open one at a flush, is sealed and handed
//! to the area's disk. Once the transfer has ended, the object's location is reported by [`poll`](Backing::poll).
//! A read waits in a queue until the next flush or poll, and is then read together with its neighbours (`back`); what
//! was read is opened, and reported by `poll`. [`discard`](Backing::discard) takes the object off its slots. `life` adds
//! areas and ends them, and holds them still for a fork.
//!
//! # Concurrency
//!
//! `inner` (46) -> an area's cell (47) -> the slot allocator. Under `inner` frames are packed and sealed; the store
//! submits, flushes and polls under a lock of its own, so nobody waits for that. No lock is held while a disk is
//! called, nor while a completion is reported. `discard` takes a cell for reading, and may be called from anywhere.
//!
//! # Cost
//!
//! Buffers are made by [`Areas::new`], tables a cluster at a time when slots are first used. Nothing else allocates
//! but adding an area.

mod back;
mod life;
mod out;
mod present;
mod stats;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::area::Area;
use super::buffers::Buffers;
use super::disk::{Direction, SLOT_BYTES, Transfer};
use super::frame::{FRAME_ORDER, Frame, Run};
use super::location::{AREAS_MAX, AreaId, Place};
use super::read::{Queue, Read, Wanted};
use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX};
use crate::store::backing::{
    Backing, Completion, Failure, Location, Operation, RANK_BACKING, Request, Usage,
};
use crate::sync::{Guard, Mutex, RwLock};
pub use life::NewArea;
use out::Refused;
use present::Present;
use stats::Counters;
pub use stats::{AreaStatus, AreasStats};

/// Rank of the lock on frames and reads.
const RANK_TRANSFERS: u8 = RANK_BACKING + 1;

/// Rank of an area's cell. The locks of the slot allocator have higher ranks.
const RANK_AREA: u8 = RANK_BACKING + 2;

/// Bytes of the largest unit.
const OBJECT_BYTES_MAX: usize = PAGE_BYTES << UNIT_ORDER_MAX;

/// Reads that may wait to begin.
const QUEUE: usize = 512;

/// Sizes and limit of [`Areas`].
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of the largest object.
    pub object_bytes_max: usize,
    /// Bytes of all buffers together, about: two frames and two reads there are in any case.
    pub buffer_bytes: usize,
    /// Bytes of slots that may be in use at once, over all areas.
    pub limit_bytes: u64,
}

impl Config {
    /// Bytes of buffers that keep a fast disk busy with objects of 4 KiB units.
    pub const BUFFER_BYTES: usize = 768 << 10;
}

/// See the module.
#[derive(Debug)]
pub struct Areas {
    inner: Mutex<RANK_TRANSFERS, Inner>,
    cells: [RwLock<RANK_AREA, Option<Arc<Area>>>; AREAS_MAX],
    /// The cells that have an area: most calls look at few.
    present: Present,
    /// Slots that may be in use at once.
    slots_limit: AtomicU64,
    /// [`Areas::set_growing`].
    is_growing: AtomicBool,
    /// The number of the area that is asked first for the next run.
    turn: AtomicUsize,
    /// Whose disk is waited for next.
    pauses: AtomicUsize,
    object_bytes_max: usize,
    /// log2 of the slots that are taken at once, if there are as many.
    run_order: u32,
    buffer_bytes: usize,
    counters: Counters,
}

type Held<'a> = Guard<'a, RANK_TRANSFERS, Inner>;

#[derive(Debug)]
struct Inner {
    frames: Box<[Frame]>,
    free_frames: Vec<usize>,
    /// The frame that is filled. It has an object, and the run has slots for it.
    open: Option<usize>,
    run: Option<Run>,
    queue: Queue,
    reads: Box<[Read]>,
    free_reads: Vec<usize>,
    /// The requests of the read that begins.
    batch: Vec<Wanted>,
    /// Transfers that no disk has accepted yet.
    waiting: VecDeque<(Arc<Area>, Transfer)>,
    /// Room for an object of several slots. Gone while somebody polls.
    scratch: Option<Box<[u8]>>,
}

/// In the token of a transfer: it is a read. The rest is an index.
const READ: u64 = 1 << 32;

impl Areas {
    /// No areas yet. Allocates all buffers.
    ///
    /// # Panics
    ///
    /// If the largest object has no bytes, or more than the largest unit.
    #[must_use]
    pub fn new(config: Config) -> Areas {
        let Config { object_bytes_max, buffer_bytes, limit_bytes } = config;
        assert!((1..=OBJECT_BYTES_MAX).contains(&object_bytes_max), "{object_bytes_max} bytes");
        let buffers = Buffers::new(object_bytes_max, buffer_bytes);
        let frames: Box<[Frame]> =
            (0..buffers.frames).map(|_| Frame::new(buffers.frame_slots)).collect();
        let reads: Box<[Read]> = buffers.reads().map(Read::new).collect();
        let requests = reads.iter().map(|read| Read::requests_max(read.capacity()));
        let (batch, again) = (requests.clone().max().unwrap_or(0), requests.sum());
        let inner = Inner {
            free_frames: (0..frames.len()).collect(),
            open: None,
            run: None,
            queue: Queue::new(QUEUE, again),
            free_reads: (0..reads.len()).collect(),
            batch: Vec::with_capacity(batch),
            waiting: VecDeque::with_capacity(frames.len() + reads.len()),
            scratch: Some(vec![0; object_bytes_max].into()),
            frames,
            reads,
        };
        Areas {
            inner: Mutex::new(inner),
            cells: [const { RwLock::new(None) }; AREAS_MAX],
            present: Present::default(),
            slots_limit: AtomicU64::new(limit_bytes / SLOT_BYTES as u64),
            is_growing: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            pauses: AtomicUsize::new(0),
            object_bytes_max,
            run_order: buffers.frame_slots.ilog2().max(FRAME_ORDER),
            buffer_bytes: buffers.memory_bytes() + object_bytes_max,
            counters: Counters::default(),
        }
    }

    /// Changes the limit. What is there stays.
    pub fn set_limit(&self, limit_bytes: u64) {
        self.slots_limit.store(limit_bytes / SLOT_BYTES as u64, Relaxed);
    }

    /// The area of this number, if it is there.
    fn area(&self, id: AreaId) -> Option<Arc<Area>> {
        self.cells[id.get()].read().clone()
    }

    /// All areas.
    fn all(&self) -> impl Iterator<Item = Arc<Area>> {
        self.present.ids().filter_map(|id| self.area(id))
    }

    /// From now on there is, or is not, memory for an area's tables of clusters. Returns how often there was none.
    #[cfg(any(test, fuzzing))]
    pub(super) fn refuse_memory(&self, id: AreaId, refuses: bool) -> u64 {
        self.area(id).map_or(0, |area| area.refuse_memory(refuses))
    }

    /// Hands transfers to their disks, those that were refused before too, and sends them on their way.
    fn start(&self) {
        let waiting = self.inner.lock().waiting.len();
        for _ in 0..waiting {
            let Some((area, transfer)) = self.inner.lock().waiting.pop_front() else { break };
            if let Err(transfer) = area.begin(transfer) {
                self.inner.lock().waiting.push_back((area, transfer));
            }
        }
        self.all().for_each(|area| area.flush());
    }

    /// A disk has ended a transfer.
    fn ended(
        &self,
        area: &Arc<Area>,
        transfer: Transfer,
        scratch: &mut [u8],
        each: &mut dyn FnMut(Completion<'_>),
    ) {
        let index = usize::try_from(transfer.token & !READ).expect("a token of ours");
        match transfer.direction {
            Direction::Write => self.wrote(area, index, transfer, each),
            Direction::Read => self.read(area, index, transfer, scratch, each),
        }
    }
}

impl Backing for Areas {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let (mut busy, mut full) = (0, None);
        for request in requests {
            request.refused = match request.operation {
                Operation::Write(bytes) => {
                    let refused = self.append(request.token, bytes).err();
                    match refused {
                        Some(Refused::Busy) => busy += 1,
                        refused => full = full.or(refused),
                    }
                    refused.map(|_| Failure::Transient)
                }
                Operation::Read { location, length } => {
                    self.want(request.token, location, length).err()
                }
            };
        }
        if busy > 0 || full.is_some() {
            self.count_refused(busy, full);
        }
    }

    fn flush(&self) {
        let mut inner = self.inner.lock();
        Areas::close(&mut inner);
        drop(inner);
        self.start_reads();
        self.start();
        self.punch();
    }

    fn tidy(&self) {
        if self.punch() > 0 {
            self.start();
        }
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        // Without it: another thread polls, and reports what there is.
        let Some(mut scratch) = self.inner.lock().scratch.take() else { return };
        for area in self.all() {
            area.disk.poll(&mut |transfer| self.ended(&area, transfer, &mut scratch, each));
        }
        self.inner.lock().scratch = Some(scratch);
        self.start_reads();
        self.start();
    }

    fn memory_bytes(&self) -> usize {
        let tables: usize = self.all().map(|area| area.table_bytes()).sum();
        tables + self.buffer_bytes
    }

    fn usage(&self) -> Usage {
        let stats = self.stats();
        // What is left of the run has no objects.
        let left = self.inner.lock().run.as_ref().map_or(0, |run| run.count() as u64);
        Usage {
            used_bytes: stats.slots_used.saturating_sub(left) * SLOT_BYTES as u64,
            read_bytes: stats.bytes_read,
            written_bytes: stats.bytes_written,
        }
    }

    fn discard(&self, location: Location, length: usize) {
        let place = Place::of(location);
        let cell = self.cells[place.area.get()].read();
        let area = cell.as_ref().expect("an area with objects is not closed");
        area.forget(place.slots(length), length);
    }

    fn pause(&self) {
        let turn = self.pauses.fetch_add(1, Relaxed);
        let mut areas = (turn..turn + AREAS_MAX)
            .filter_map(|number| self.area(AreaId::new(number % AREAS_MAX)?))
            .peekable();
        // Nothing may be in flight yet: another thread is about to submit, and has no CPU. This pause takes time as
        // well, or a caller that counts its pauses would count thousands meanwhile.
        let any = areas.peek().cloned();
        match areas.find(|area| area.in_flight.load(Relaxed) > 0).or(any) {
            Some(area) => area.disk.pause(),
            None => crate::sync::pause(),
        }
    }
}
