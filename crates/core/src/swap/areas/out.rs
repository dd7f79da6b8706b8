//! Out: objects into frames, frames into runs of slots.
//!
//! A **run** is what the slot allocator gave out at once: a frame's slots if it can, fewer if the area is fragmented or
//! the limit is near. Frames follow each other in it, so that what is flushed early is not a hole: the next
//! frame begins at the next slot.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use super::super::disk::{self, Direction, SLOT_BYTES, Transfer};
use super::super::frame::Run;
use super::super::location::Place;
use super::super::slots::ORDER_MAX;
use super::{AREAS_MAX, Area, AreaId, Areas, Held, Inner};
use crate::stats::add;
use crate::store::backing::{Completed, Completion, Failure, Token};

/// Why a write is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// All frames are on their way.
    Busy,
    /// As many slots as allowed are in use.
    Limit,
    /// No area has slots for it, and the owner is about to add some ([`Areas::set_growing`]).
    Growing,
    /// No area has slots for it.
    Full,
}

impl Areas {
    /// Copies an object into the open frame, or a new one.
    pub(super) fn append(&self, token: Token, bytes: &[u8]) -> Result<(), Refused> {
        assert!((1..=self.object_bytes_max).contains(&bytes.len()), "{} bytes", bytes.len());
        let needed = bytes.len().div_ceil(SLOT_BYTES);
        let mut inner = self.inner.lock();
        // An empty frame has room for any object.
        while !inner.append(token, bytes) {
            Areas::close(&mut inner);
            if inner.free_frames.is_empty() {
                return Err(Refused::Busy);
            }
            if inner.run.as_ref().is_some_and(|run| run.count() >= needed) {
                inner.open();
                continue;
            }
            let rest = inner.run.take();
            // Tables may be made, and nothing allocates under the lock.
            drop(inner);
            let run = self.take_run(needed, rest)?;
            inner = self.inner.lock();
            inner.begin_run(run);
        }
        Ok(())
    }

    /// Closes the open frame, if there is one: it is sealed, and waits to be written.
    pub(super) fn close(inner: &mut Held<'_>) {
        let inner = &mut **inner;
        let Some(index) = inner.open.take() else { return };
        let frame = &mut inner.frames[index];
        let run = inner.run.as_mut().expect("an open frame has a run");
        let written = run.split(frame.close());
        let area = Arc::clone(&run.area);
        let (first, count) = (u64::from(written.slots.start), written.count());
        let transfer = Transfer {
            token: index as u64,
            direction: Direction::Write,
            first,
            count,
            buffer: frame.seal(written),
            result: Ok(()),
        };
        area.in_flight.fetch_add(1, AcqRel);
        inner.waiting.push_back((area, transfer));
        if inner.run.as_ref().is_some_and(|run| run.count() == 0) {
            inner.run = None;
        }
    }

    /// Takes slots for `needed` at least, and joins them to the rest of a run if they are the next ones; otherwise the
    /// rest is given back. An object that needs more than half a cluster needs a whole one, since runs are powers of
    /// two: if the rests of these were given back, two fifths of an area could stay empty for good.
    fn take_run(&self, needed: usize, rest: Option<Run>) -> Result<Run, Refused> {
        let taken = self.take_new_run(needed);
        let Some(rest) = rest else { return taken };
        match taken {
            Ok(run) if rest.is_before(&run) => {
                let Run { area, slots } = run;
                Ok(Run { area, slots: rest.slots.start..slots.end })
            }
            taken => {
                rest.area.give_back(rest.slots);
                // The rest may be what lacks.
                taken.or_else(|_| self.take_new_run(needed))
            }
        }
    }

    /// Takes slots: of the areas with the highest priority first, of equal ones in turn, of those whose last write
    /// failed last.
    fn take_new_run(&self, needed: usize) -> Result<Run, Refused> {
        let least = needed.next_power_of_two().ilog2();
        // A large object leaves room behind it for others.
        let wanted = if least > 2 { (least + 3).min(ORDER_MAX) } else { self.run_order };
        let own = self.all().filter(|area| !area.is_frozen());
        let used: u64 = own.map(|area| area.slots_used()).sum();
        let left = self.slots_limit.load(Relaxed).saturating_sub(used);
        if 1 << least > left {
            return Err(Refused::Limit);
        }
        for rests in [false, true] {
            let mut below = None;
            while let Some(priority) = self.next_priority(below, rests) {
                for order in (least..=wanted).rev().filter(|order| 1 << order <= left) {
                    if let Some(run) = self.take_of(priority, rests, order) {
                        return Ok(run);
                    }
                }
                below = Some(priority);
            }
        }
        self.all().filter(|area| area.is_open()).for_each(|area| area.try_bad_again(&(0..0)));
        Err(if self.is_growing.load(Relaxed) { Refused::Growing } else { Refused::Full })
    }

    /// Counts what a batch of writes was refused for: a full disk refuses each of them, for one reason.
    #[cold]
    pub(super) fn count_refused(&self, busy: u64, full: Option<Refused>) {
        add(&self.counters.refused_busy, busy);
        match full {
            Some(Refused::Limit) => add(&self.counters.refused_limit, 1),
            Some(Refused::Growing) => add(&self.counters.refused_growing, 1),
            Some(Refused::Full) => add(&self.counters.refused_full, 1),
            Some(Refused::Busy) | None => {}
        }
    }

    /// The highest priority of the open areas that is below `below`.
    fn next_priority(&self, below: Option<i32>, rests: bool) -> Option<i32> {
        let open = self.all().filter(|area| area.is_open() && area.rests() == rests);
        let priorities = open.map(|area| area.priority);
        priorities.filter(|priority| below.is_none_or(|below| *priority < below)).max()
    }

    /// Takes `1 << order` slots of an area with this priority.
    fn take_of(&self, priority: i32, rests: bool, order: u32) -> Option<Run> {
        let first = self.turn.load(Relaxed);
        for number in first..first + AREAS_MAX {
            let id = AreaId::new(number % AREAS_MAX)?;
            let Some(area) = self.area(id) else { continue };
            if area.priority != priority || area.rests() != rests || !area.is_open() {
                continue;
            }
            if let Some(slots) = area.take(order) {
                self.turn.store(id.get() + 1, Relaxed);
                add(&self.counters.swpout[order as usize], 1);
                return Some(Run { area, slots });
            }
        }
        add(&self.counters.swpout_fallback[order as usize], 1);
        None
    }

    /// A frame was written, or not: its objects are reported.
    pub(super) fn wrote(
        &self,
        area: &Arc<Area>,
        index: usize,
        transfer: Transfer,
        each: &mut dyn FnMut(Completion<'_>),
    ) {
        let mut frame = std::mem::take(&mut self.inner.lock().frames[index]);
        let (run, objects) = frame.contents();
        add(&self.counters.writes, 1);
        let failure = match transfer.result {
            Ok(()) => {
                let bytes = objects.iter().map(|object| object.length()).sum();
                area.written(run.slots.clone(), objects.len(), bytes);
                add(&self.counters.bytes_written, (run.count() * SLOT_BYTES) as u64);
                None
            }
            Err(error) => {
                self.counters.failed(error);
                add(&self.counters.writes_failed, u64::from(error != disk::Error::Full));
                let is_bad = matches!(error, disk::Error::Failed { .. });
                area.not_written(run.slots.clone(), is_bad);
                Some(if is_bad { Failure::Final } else { Failure::Transient })
            }
        };
        for object in objects {
            let at = u32::try_from(object.at() / SLOT_BYTES).expect("a slot of the frame");
            let place =
                Place { area: area.id, slot: run.slots.start + at, byte: object.at() % SLOT_BYTES };
            // SWAP-3: the transfer has ended.
            let result = failure.map_or(Ok(Completed::Written(place.location())), Err);
            each(Completion { token: object.token, result });
        }
        frame.reset(transfer.buffer);
        let mut inner = self.inner.lock();
        inner.frames[index] = frame;
        inner.free_frames.push(index);
        area.in_flight.fetch_sub(1, AcqRel);
    }

    /// Lets the disks forget clusters that nobody uses, a few at a time. Returns how many.
    pub(super) fn punch(&self) -> usize {
        let punched: usize = self.all().map(|area| area.punch()).sum();
        add(&self.counters.clusters_discarded, punched as u64);
        punched
    }
}

impl Inner {
    /// Copies an object into the open frame. False: there is none, or it has no room.
    fn append(&mut self, token: Token, bytes: &[u8]) -> bool {
        self.open.is_some_and(|index| self.frames[index].append(token, bytes))
    }

    /// Opens a frame on the run.
    fn open(&mut self) {
        let run = self.run.as_ref().expect("append() looked");
        let index = self.free_frames.pop().expect("append() looked");
        self.frames[index].open(run.count());
        self.open = Some(index);
    }

    /// Fills these slots next.
    fn begin_run(&mut self, run: Run) {
        // Somebody else may have begun one, or drained the area, while there was no lock.
        if self.run.is_none() && run.area.is_open() {
            self.run = Some(run);
        } else {
            run.area.give_back(run.slots);
        }
    }

    /// Gives the rest of the run back.
    pub(super) fn end_run(&mut self) {
        debug_assert!(self.open.is_none(), "a frame is open on the run");
        if let Some(Run { area, slots }) = self.run.take() {
            area.give_back(slots);
        }
    }
}
