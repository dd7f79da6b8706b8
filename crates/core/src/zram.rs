//! A compressed disk in memory: what the kernel's zram is, over the [store].
//!
//! The disk is cut into **units** of 4 KiB to 2 MiB, each of which is compressed as one object. The `table` leads
//! from the index of a unit to its slot, and the slot has the unit's entry in the store. A unit without an entry, of
//! which no pages are apart either, reads as zeros and takes no memory.
//!
//! ```text
//! read    of each unit: lock the slot
//!           no entry             zeros
//!           the whole unit       decompressed into the caller's memory; with a codec that works on several units at
//!                                once, up to 16 together
//!           a part               decompressed into a scratch buffer, and copied from there
//! write   whole units, up to 16: lock their slots; compressed from the caller's memory, nothing is read
//!         some pages of a unit: lock the slot; compressed one by one, and kept apart (`apart`)
//!         another part of a unit: lock the slot; decompressed into a scratch buffer, changed there, compressed
//! ```
//!
//! Where a unit's pages are apart, a read takes these from there, and everything else from the unit's copy; whoever
//! changes the unit as a whole drops them.
//!
//! A device may have a [`Backing`], a file to which units go that are not used, or that memory has no room for
//! (`writeback`). A unit that is there is fetched when it is wanted: the request drops its locks, waits, and begins
//! anew.
//!
//! # Invariants
//!
//! - `ZRAM-1` A unit that is read is what was written to it last, or the read fails ([`Error::Lost`]); the store
//!   compares checksums (`STORE-2`).
//! - `ZRAM-2` A write that fails leaves each unit as it was before, or as it was to be after: any of its units may be
//!   written.
//! - `ZRAM-3` An entry is used and exchanged only under its slot's lock.
//! - `ZRAM-4` Beyond the end of the disk all units are empty.
//! - `ZRAM-5` A scratch buffer that holds a checksum (`Scratch::holds`) has the contents of the copy that has it.
//!
//! # Concurrency
//!
//! slot -> scratch of this CPU -> a shard of pages apart, for a moment -> the store's. Requests on different units
//! share no lock but the pool's, and now and then a shard. A request waits for a slot only while it holds no other:
//! those that follow are taken if they are free (`slot::lock_after`). So nobody waits in a circle, and a request of
//! several units is not one step to others, as on any disk.
//!
//! # Cost
//!
//! Beside the pool: 16 bytes for each unit of the table, and what the store keeps (28 bytes for each stored unit). A
//! part of a unit costs the decompression of all of it, unless this CPU's scratch buffer still has it: so a walk
//! through a disk in small pieces decompresses each unit once.

mod apart;
#[cfg(any(test, fuzzing, debug_assertions))]
mod audit;
mod limit;
#[cfg(test)]
mod races;
mod recompress;
mod save;
#[cfg(any(test, fuzzing))]
pub mod script;
mod slot;
mod stat;
mod table;
#[cfg(test)]
mod tests;
mod writeback;

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
    Ordering::SeqCst, fence,
};

use crate::budget::WriteBudget;
use crate::page::{PAGE_BYTES, UnitOrder, same_filled};
use crate::size;
use crate::stats::Figures;
use crate::store::{
    self, Backing, Checksum, CodecId, EntryId, Form, Incoming, Key, Loaded, Outcome, Outgoing,
    Reject, Store, Ticket,
};
use crate::sync::{Guard, Mutex};
use crate::zcomp::Zcomp;
use crate::zsmalloc::{Compaction, PageSource, STEP_BYTES};

use apart::Apart;
use limit::{Limit, Room};
use slot::{Slot, SlotLock};
use table::{GROWTH_BYTES_MAX, Table, UNITS_MAX};
use writeback::{Why, Writeback};

pub use apart::{ApartStat, Joined};
pub use recompress::{Recompressed, Recompression, Turn, What};
#[cfg(any(test, fuzzing))]
pub use save::script as save_script;
pub use save::{FormatError, Header, LoadError, NOTES_BYTES_MAX, Reader, SaveError, Saved, Unread};
pub use stat::{BdStat, IoStat, MmStat};
pub use writeback::{
    Chosen, OldTurn, Stop, WRITEBACK_BATCH_DEFAULT, WRITEBACK_BATCH_MAX, WritebackStat, WroteBack,
};

/// What offsets and lengths of requests are multiples of.
pub const SECTOR_BYTES: u64 = 512;

/// Algorithms of one device: the kernel's `ZRAM_MAX_COMPS`.
pub const ALGORITHMS_MAX: usize = 4;

const RANK_SCRATCH: u8 = 22;

/// The rank of the lock of changes of the size. It is taken before a slot's ([`RANK_SLOT`](slot::RANK_SLOT)).
const RANK_SIZE: u8 = slot::RANK_SLOT - 1;

/// Bytes of units that a read has fetched together.
const FETCH_BYTES: usize = 256 << 10;

/// Whole units that go to the store together: as many as this, or as a codec works on at once if that is more.
const TOGETHER_BYTES: usize = 64 << 10;

/// The most of them. What a request has of each lies on the stack: 16 x (64 + 16) B of a read, 16 x (48 + 16 + 8) B of
/// a write.
const TOGETHER_MAX: usize = 16;

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// Offset or length is no multiple of [`SECTOR_BYTES`], or the range lies beyond the end of the disk.
    Invalid {
        /// Where the range begins.
        at: u64,
        /// How long it is.
        bytes: u64,
        /// How long the disk is.
        disk_bytes: u64,
    },
    /// Memory is at its limit. What was to be written is still the caller's.
    NoSpace {
        /// The limit.
        limit_bytes: u64,
    },
    /// The system has no memory. What was to be written is still the caller's.
    NoMemory,
    /// The codec failed to compress the unit. What was to be written is still the caller's.
    Codec {
        /// The unit's index.
        unit: u64,
    },
    /// The unit cannot be read. Unless the error is transient, its contents are lost until it is overwritten whole.
    Lost {
        /// The unit's index.
        unit: u64,
        /// Why.
        error: store::Error,
    },
    /// There is data beyond the end that the disk was to have.
    Busy {
        /// The first unit with data there.
        unit: u64,
    },
}

impl Error {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Lost { error, .. } => error.is_transient(),
            error => matches!(error, Error::NoSpace { .. } | Error::NoMemory),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid { at, bytes, disk_bytes } => write!(
                f,
                "{bytes} bytes at {at} are no whole sectors of {SECTOR_BYTES} bytes on a disk of {disk_bytes}"
            ),
            Error::NoSpace { limit_bytes } => {
                write!(f, "memory is at its limit of {limit_bytes} bytes")
            }
            Error::NoMemory => f.write_str("the system has no memory"),
            Error::Codec { unit } => write!(f, "unit {unit} could not be compressed"),
            Error::Lost { unit, error } => write!(f, "unit {unit} {error}"),
            Error::Busy { unit } => write!(f, "unit {unit} has data"),
        }
    }
}

impl std::error::Error for Error {}

/// A buffer for one unit, for requests that have only a part of it.
#[derive(Debug)]
struct Scratch {
    bytes: Box<[u8]>,
    /// The checksum of the unit whose contents the buffer has (`ZRAM-5`). The checksum of a unit says what is in it: so
    /// nothing need be done when a unit changes.
    holds: Option<Checksum>,
}

/// How many whole units of one request go to the store together, 1 to [`TOGETHER_MAX`].
#[derive(Debug)]
struct Together {
    writes: usize,
    /// Software decompresses one by one: then the locks of several slots would gain nothing.
    reads: usize,
}

impl Together {
    fn new(unit: UnitOrder, codecs: &[Zcomp]) -> Self {
        let at_once = TOGETHER_BYTES / unit.bytes();
        let most = |batch_max: usize| at_once.max(batch_max).min(TOGETHER_MAX);
        let read_max = codecs.iter().map(Zcomp::batch_max).max().unwrap_or(1);
        let reads = if read_max > 1 { most(read_max) } else { 1 };
        Together { writes: most(codecs[0].batch_max()), reads }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Zram<S: PageSource> {
    store: Store<S>,
    /// How many of the store's codecs are for whole units.
    algorithms: usize,
    /// `None`: nothing is kept apart.
    apart: Option<Apart>,
    table: Table,
    unit: UnitOrder,
    together: Together,
    disk_bytes: AtomicU64,
    limit: Limit,
    compaction: Compaction,
    /// One for each CPU.
    scratch: Box<[Mutex<RANK_SCRATCH, Scratch>]>,
    /// Held while the size is changed.
    resizing: Mutex<RANK_SIZE, ()>,
    /// Seconds since the device was made, as its owner says.
    now_s: AtomicU32,
    figures: Figures,
    io: IoStat<AtomicU64>,
    /// Incompressible units that clients ever wrote.
    huge_since: AtomicU64,
    /// Where [`Zram::recompress_old`] goes on.
    hand: AtomicU64,
    /// What takes long is to return.
    is_halted: AtomicBool,
    /// The most that `used_bytes` was, up to the last note of it.
    used_max: AtomicU64,
    /// `None`: there is no backing.
    writeback: Option<Writeback>,
}

/// Whether a disk in these units can have this size: a multiple of the unit, not 0, up to 2^32 units.
#[must_use]
pub fn is_size(disk_bytes: u64, unit: UnitOrder) -> bool {
    let unit_bytes = unit.bytes() as u64;
    disk_bytes > 0 && disk_bytes % unit_bytes == 0 && disk_bytes / unit_bytes <= UNITS_MAX
}

/// Which sizes a disk in these units can have ([`is_size`]), for a message.
#[must_use]
pub fn accepted_sizes(unit: UnitOrder) -> String {
    let most = size::display(UNITS_MAX * unit.bytes() as u64);
    format!("a multiple of the unit, {unit}, up to {most}")
}

impl<S: PageSource> Zram<S> {
    /// A disk of zeros. The first of the codecs compresses what is written; the others are for
    /// [`Zram::recompress`], by their place, which is the kernel's `priority`. `cpus`: the highest number of a CPU
    /// that calls, plus 1; others share.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`]: the size is no multiple of the unit, 0, or too large.
    ///
    /// # Panics
    ///
    /// If there is no codec, there are more than [`ALGORITHMS_MAX`], or their units differ.
    pub fn new(
        codecs: Vec<Zcomp>,
        source: S,
        key: Key,
        disk_bytes: u64,
        cpus: usize,
    ) -> Result<Self, Error> {
        assert!(
            !codecs.is_empty() && codecs.len() <= ALGORITHMS_MAX,
            "1 to {ALGORITHMS_MAX} codecs"
        );
        let unit = codecs[0].unit();
        assert!(codecs.iter().all(|codec| codec.unit() == unit), "units of one size");
        let scratch = || Scratch { bytes: vec![0; unit.bytes()].into_boxed_slice(), holds: None };
        let together = Together::new(unit, &codecs);
        let zram = Zram {
            algorithms: codecs.len(),
            apart: None,
            store: Store::new(codecs, source, key),
            table: Table::new(),
            unit,
            together,
            disk_bytes: AtomicU64::new(0),
            limit: Limit::default(),
            compaction: Compaction::default(),
            resizing: Mutex::new(()),
            scratch: (0..cpus.max(1)).map(|_| Mutex::new(scratch())).collect(),
            now_s: AtomicU32::new(0),
            figures: Figures::default(),
            io: IoStat::default(),
            huge_since: AtomicU64::new(0),
            hand: AtomicU64::new(0),
            is_halted: AtomicBool::new(false),
            used_max: AtomicU64::new(0),
            writeback: None,
        };
        zram.check_size(disk_bytes)?;
        zram.disk_bytes.store(disk_bytes, Release);
        Ok(zram)
    }

    /// The same with a backing, to which the device writes by itself within a budget.
    #[must_use]
    pub fn with_backing(self, backing: Box<dyn Backing>, budget: WriteBudget) -> Self {
        let store = self.store.with_backing(backing, 0);
        let writeback = Some(Writeback::new(store.backing_bytes(), budget));
        Zram { store, writeback, ..self }
    }

    fn check_size(&self, disk_bytes: u64) -> Result<(), Error> {
        let is_good = is_size(disk_bytes, self.unit);
        if is_good { Ok(()) } else { Err(Error::Invalid { at: 0, bytes: disk_bytes, disk_bytes }) }
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        // Acquire: pairs with the Release in resize().
        self.disk_bytes.load(Acquire)
    }

    /// The size of a unit.
    #[must_use]
    pub fn unit(&self) -> UnitOrder {
        self.unit
    }

    /// The codecs, by their priority.
    pub fn codecs(&self) -> impl Iterator<Item = &Zcomp> {
        self.store.codecs().take(self.algorithms).map(|(_, codec)| codec)
    }

    /// Says how many seconds the device is old: its owner does so each second or so, or with each request.
    pub fn set_now(&self, now_s: u32) {
        // Requests of all CPUs read it: no CPU writes what is there already.
        if self.now_s.load(Relaxed) != now_s {
            self.now_s.store(now_s, Relaxed);
        }
    }

    /// Changes the size of the disk, also while it is in use. A disk can always grow, and shrink by what has no data.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`]: there is data. If it was written at this very moment, other requests beyond the new end may
    /// have failed. [`Error::Invalid`]: see [`Zram::new`].
    pub fn resize(&self, disk_bytes: u64) -> Result<(), Error> {
        self.check_size(disk_bytes)?;
        // Else the size that a change puts back could be one that another change has replaced meanwhile.
        let _one = self.resizing.lock();
        let busy_beyond = |end: u64| {
            let [first, end] = [disk_bytes, end].map(|bytes| bytes / self.unit.bytes() as u64);
            let busy = self.table.slots(first, end).find(|(_, slot)| !slot.lock().is_empty());
            busy.map_or(Ok(()), |(unit, _)| Err(Error::Busy { unit }))
        };
        // Without a new size first: nobody notices a change that is refused.
        busy_beyond(self.disk_bytes())?;
        // Release: pairs with the Acquire in disk_bytes(). A writer looks at the size again under its slot's lock
        // (`check_unit`), and the slots beyond the new end are locked below: so each of them sees the new size, or is
        // seen here (ZRAM-4).
        let before = self.disk_bytes.swap(disk_bytes, Release);
        // Pairs with the fence in slot_to_write(): a leaf that a writer makes meanwhile is found below, or the writer
        // sees the new size.
        fence(SeqCst);
        busy_beyond(before).inspect_err(|_| self.disk_bytes.store(before, Release))
    }

    /// Has what takes long return soon ([`Zram::recompress`], [`Zram::write_back`], [`Zram::save`]): the disk is about
    /// to end.
    pub fn halt(&self) {
        self.is_halted.store(true, Relaxed);
    }

    /// Drops all contents: the disk reads as zeros. `mm_stat`, `io_stat` and `bd_stat` begin anew.
    pub fn reset(&self) {
        for (unit, slot) in self.table.slots(0, UNITS_MAX) {
            self.clear(unit, &mut slot.lock());
        }
        self.store.pool().trim();
        self.reset_counts();
    }

    /// Fills `into` with the contents at `at`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], [`Error::Lost`]. What is in `into` then is nothing that anybody wrote.
    pub fn read(&self, cpu: usize, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check(at, into.len() as u64)?;
        self.fetch_ahead(cpu, at, into.len() as u64);
        let (mut at, mut rest) = (at, into);
        while !rest.is_empty() {
            let read = self.read_front(cpu, at, rest).inspect_err(|_| {
                self.io.failed_reads.fetch_add(1, Relaxed);
            })?;
            at += read as u64;
            rest = &mut rest[read..];
        }
        Ok(())
    }

    /// Writes `from` to `at`.
    ///
    /// # Errors
    ///
    /// Any but [`Error::Busy`]; see `ZRAM-2`. [`Error::Lost`]: a unit of which this writes a part cannot be read.
    pub fn write(&self, cpu: usize, at: u64, from: &[u8]) -> Result<(), Error> {
        self.check(at, from.len() as u64)?;
        let (mut at, mut rest) = (at, from);
        while !rest.is_empty() {
            let written = self
                .with_room(cpu, Why::Policy, || self.write_front(cpu, at, rest))
                .inspect_err(|_| {
                    self.io.failed_writes.fetch_add(1, Relaxed);
                })?;
            at += written as u64;
            rest = &rest[written..];
        }
        Ok(())
    }

    /// The range reads as zeros afterwards. Its whole units take no memory, and its parts of units are zeroed.
    ///
    /// # Errors
    ///
    /// As [`Zram::write`].
    pub fn write_zeroes(&self, cpu: usize, at: u64, bytes: u64) -> Result<(), Error> {
        self.zero(cpu, at, bytes, false)
    }

    /// The same as advice, which costs no room: where there is none to store the rest of a unit anew, a part of that
    /// unit stays as it is.
    ///
    /// # Errors
    ///
    /// As [`Zram::write`], without [`Error::NoSpace`] and [`Error::NoMemory`].
    pub fn discard(&self, cpu: usize, at: u64, bytes: u64) -> Result<(), Error> {
        self.zero(cpu, at, bytes, true)
    }

    fn zero(&self, cpu: usize, at: u64, bytes: u64, is_advice: bool) -> Result<(), Error> {
        self.check(at, bytes)?;
        for (unit, within) in self.pieces(at, bytes) {
            let write = || self.write_piece(cpu, unit, within.clone(), None);
            match self.with_room(cpu, Why::Policy, write) {
                Err(Error::NoSpace { .. } | Error::NoMemory) if is_advice => {}
                done => done.inspect_err(|_| {
                    self.io.failed_writes.fetch_add(1, Relaxed);
                })?,
            }
        }
        let page = PAGE_BYTES as u64;
        let pages = ((at + bytes) / page).saturating_sub(at.div_ceil(page));
        self.io.notify_free.fetch_add(pages, Relaxed);
        Ok(())
    }

    /// Calls `each` with the runs of a range in their order, until it returns false: how long the run is, and whether
    /// it takes no memory and reads as zeros.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`].
    pub fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error> {
        self.check(at, bytes)?;
        let (mut length, mut is_hole) = (0, false);
        for (unit, within) in self.pieces(at, bytes) {
            let hole = self.table.get(unit).is_none_or(|slot| slot.lock().is_empty());
            if length > 0 && hole != is_hole {
                if !each(length, is_hole) {
                    return Ok(());
                }
                length = 0;
            }
            (length, is_hole) = (length + within.len() as u64, hole);
        }
        if length > 0 {
            each(length, is_hole);
        }
        Ok(())
    }

    fn check(&self, at: u64, bytes: u64) -> Result<(), Error> {
        let disk_bytes = self.disk_bytes();
        let is_inside = at.checked_add(bytes).is_some_and(|end| end <= disk_bytes);
        if is_inside && at % SECTOR_BYTES == 0 && bytes % SECTOR_BYTES == 0 {
            return Ok(());
        }
        self.note_invalid();
        Err(Error::Invalid { at, bytes, disk_bytes })
    }

    /// Counts a request that was refused before it came here, since it was not aligned, or beyond the end
    /// ([`IoStat::invalid_io`]).
    pub fn note_invalid(&self) {
        self.io.invalid_io.fetch_add(1, Relaxed);
    }

    /// The units of a range: their indices, and which part of each is in the range.
    fn pieces(&self, at: u64, bytes: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
        let (mut at, end) = (at, at + bytes);
        std::iter::from_fn(move || {
            let piece = (at < end).then(|| self.front(at, end - at))?;
            at += piece.1.len() as u64;
            Some(piece)
        })
    }

    /// The first of them, of a range that is not empty.
    fn front(&self, at: u64, bytes: u64) -> (u64, Range<usize>) {
        let unit_bytes = self.unit.bytes() as u64;
        let start = at & (unit_bytes - 1);
        let end = unit_bytes.min(start.saturating_add(bytes));
        let [start, end] =
            [start, end].map(|at| usize::try_from(at).expect("a unit fits into memory"));
        (at >> unit_bytes.trailing_zeros(), start..end)
    }

    fn scratch(&self, cpu: usize) -> Guard<'_, RANK_SCRATCH, Scratch> {
        self.scratch[cpu % self.scratch.len()].lock()
    }

    /// The ticket of a slot's unit, if that is on the backing.
    fn away(&self, slot: &Slot) -> Option<Ticket> {
        self.store.away(slot.entry.as_ref()?)
    }

    /// The entry of a slot's unit, if that is not on the backing, where it takes no memory.
    fn entry_here<'s>(&self, slot: &'s Slot) -> Option<&'s EntryId> {
        slot.entry.as_ref().filter(|entry| self.store.away(entry).is_none())
    }

    /// Has the units of a read fetched together that are away: they are read by few transfers then.
    fn fetch_ahead(&self, cpu: usize, at: u64, bytes: u64) {
        let unit_bytes = self.unit.bytes();
        if bytes <= unit_bytes as u64 || !self.store.has_away() {
            return;
        }
        let away = |(unit, within): (u64, Range<usize>)| {
            let ticket = self.away(&self.table.get(unit)?.lock())?;
            // A part of a unit is read from the scratch buffer if that has the unit.
            let is_part = within.len() < unit_bytes;
            let is_at_hand = is_part && self.scratch(cpu).holds == Some(ticket.checksum());
            (!is_at_hand).then_some(ticket)
        };
        let most = (FETCH_BYTES / unit_bytes).max(1);
        // Whoever reads one waits for it then. Of some only pages are read that are apart: nobody loads these.
        self.store.fetch(self.pieces(at, bytes).filter_map(away).take(most), |_| false);
        self.store.poll();
    }

    /// Reads the beginning of `into`: whole units together, or a part of one. Returns how many bytes.
    fn read_front(&self, cpu: usize, at: u64, into: &mut [u8]) -> Result<usize, Error> {
        let (unit, within) = self.front(at, into.len() as u64);
        let unit_bytes = self.unit.bytes();
        let units = (into.len() / unit_bytes).min(self.together.reads);
        if within.len() == unit_bytes && units > 1 {
            let read = self.read_together(cpu, unit, &mut into[..units * unit_bytes]);
            if read > 0 {
                return Ok(read);
            }
        }
        let bytes = within.len();
        self.read_piece(cpu, unit, within, &mut into[..bytes])?;
        Ok(bytes)
    }

    /// Reads whole units, at most [`TOGETHER_MAX`], up to the first whose slot somebody else has, that is not here, or
    /// of which pages are apart.
    /// Returns how many bytes.
    fn read_together(&self, cpu: usize, unit: u64, into: &mut [u8]) -> usize {
        let now_s = self.now_s.load(Relaxed);
        let mut slots = [const { None }; TOGETHER_MAX];
        let mut count = 0;
        for (unit, place) in (unit..).zip(&mut slots[..into.len() / self.unit.bytes()]) {
            let Some(lock) = self.table.get(unit) else { break };
            let Some(mut slot) = slot::lock_after(count, lock) else { break };
            if slot.is_apart() {
                break;
            }
            slot.touch(now_s);
            *place = Some(slot);
            count += 1;
        }
        let mut incoming: [Incoming<'_>; TOGETHER_MAX] = Default::default();
        let units = into.chunks_exact_mut(self.unit.bytes());
        for ((incoming, slot), bytes) in incoming.iter_mut().zip(slots.iter().flatten()).zip(units)
        {
            match &slot.entry {
                Some(entry) => *incoming = Incoming::new(entry, bytes),
                None => bytes.fill(0),
            }
        }
        self.store.load(cpu, &mut incoming[..count]);
        let mut here = 0;
        for incoming in &incoming[..count] {
            match (incoming.entry, incoming.outcome) {
                // What was fetched to be read stays on the backing.
                (Some(entry), Loaded::Whole) => _ = self.store.put_away(entry),
                (None, _) => {}
                _ => break,
            }
            here += 1;
        }
        here * self.unit.bytes()
    }

    fn read_piece(
        &self,
        cpu: usize,
        unit: u64,
        within: Range<usize>,
        into: &mut [u8],
    ) -> Result<(), Error> {
        loop {
            let Some(lock) = self.table.get(unit) else {
                into.fill(0);
                return Ok(());
            };
            let mut slot = lock.lock();
            slot.touch(self.now_s.load(Relaxed));
            let loaded = if slot.is_apart() {
                self.read_apart(cpu, unit, &slot, within.clone(), into)
            } else if within.len() == self.unit.bytes() {
                self.load(cpu, &slot, into)
            } else {
                let mut scratch = self.scratch(cpu);
                let loaded = self.fill(cpu, &slot, &mut scratch);
                into.copy_from_slice(&scratch.bytes[within.clone()]);
                loaded
            };
            drop(slot);
            match loaded {
                Ok(None) => return Ok(()),
                Ok(Some(ticket)) => self.await_backing(unit, ticket)?,
                Err(error) => return Err(Error::Lost { unit, error }),
            }
        }
    }

    /// Writes the beginning of `from`: whole units together, or a part of one. Returns how many bytes.
    fn write_front(&self, cpu: usize, at: u64, from: &[u8]) -> Result<usize, Error> {
        let (unit, within) = self.front(at, from.len() as u64);
        let unit_bytes = self.unit.bytes();
        let units = (from.len() / unit_bytes).min(self.together.writes);
        if within.len() == unit_bytes && units > 1 {
            let written = self.write_together(cpu, unit, &from[..units * unit_bytes]);
            // There may be room for one, and zeros may need none.
            if !matches!(written, Err(Error::NoSpace { .. } | Error::NoMemory)) {
                return written;
            }
        }
        let bytes = within.len();
        self.write_piece(cpu, unit, within, Some(&from[..bytes]))?;
        Ok(bytes)
    }

    /// Writes whole units, at most [`TOGETHER_MAX`], up to the first whose slot somebody else has. Returns how many
    /// bytes.
    fn write_together(&self, cpu: usize, unit: u64, from: &[u8]) -> Result<usize, Error> {
        let units = from.len() / self.unit.bytes();
        let mut locks = [None; TOGETHER_MAX];
        for (unit, lock) in (unit..).zip(&mut locks[..units]) {
            *lock = self.slot_to_write(unit, Some(from))?;
        }
        let mut slots = [const { None }; TOGETHER_MAX];
        let mut count = 0;
        for (index, lock) in locks.iter().flatten().enumerate() {
            let Some(slot) = slot::lock_after(index, lock) else { break };
            match self.check_unit(unit + index as u64) {
                Err(error) if index == 0 => return Err(error),
                Err(_) => break,
                Ok(()) => slots[index] = Some(slot),
            }
            count += 1;
        }
        let bytes = count * self.unit.bytes();
        self.put(cpu, unit, &mut slots[..count], &from[..bytes])?;
        Ok(bytes)
    }

    /// Writes a part of a unit, or all of it: `from`, or zeros.
    fn write_piece(
        &self,
        cpu: usize,
        unit: u64,
        within: Range<usize>,
        from: Option<&[u8]>,
    ) -> Result<(), Error> {
        let found = self.slot_to_write(unit, from).or_else(|error| {
            // Without a leaf the unit reads as zeros already, and these take no room. Another client may have made it.
            let is_zeros = from.is_some_and(|bytes| same_filled(bytes) == Some(0));
            if is_zeros && error.is_transient() { Ok(self.table.get(unit)) } else { Err(error) }
        });
        let Some(lock) = found? else { return Ok(()) };
        loop {
            let mut slot = lock.lock();
            self.check_unit(unit)?;
            let is_whole = within.len() == self.unit.bytes();
            match from {
                None if is_whole || slot.is_empty() => {
                    self.clear(unit, &mut slot);
                    return Ok(());
                }
                Some(bytes) if is_whole => return self.put(cpu, unit, &mut [Some(slot)], bytes),
                Some(bytes) if self.write_apart(cpu, unit, &mut slot, &within, bytes) => {
                    return Ok(());
                }
                _ => {}
            }
            let mut scratch = self.scratch(cpu);
            match self.fill_joined(cpu, unit, &slot, &mut scratch) {
                Ok(None) => {}
                Ok(Some(ticket)) => {
                    drop(scratch);
                    drop(slot);
                    self.await_backing(unit, ticket)?;
                    continue;
                }
                Err(error) => return Err(Error::Lost { unit, error }),
            }
            // ZRAM-5: until it is stored nobody knows the checksum of this.
            scratch.holds = None;
            let part = &mut scratch.bytes[within];
            match from {
                Some(bytes) => part.copy_from_slice(bytes),
                None => part.fill(0),
            }
            self.put(cpu, unit, &mut [Some(&mut *slot)], &scratch.bytes)?;
            scratch.holds = slot.entry.as_ref().map(|entry| self.store.checksum(entry));
            if from.is_none() && self.reads_as_zeros(&slot) {
                self.clear(unit, &mut slot);
            }
            return Ok(());
        }
    }

    /// The slot of a unit that is to be written. `None`: the unit is to be zeroed, and its leaf was never made.
    fn slot_to_write(&self, unit: u64, from: Option<&[u8]>) -> Result<Option<&SlotLock>, Error> {
        let known = self.table.get(unit);
        if known.is_some() || from.is_none() {
            // No fence here, which each write would pay for. Whoever finds a leaf that another writer has just made,
            // and resize() does not find yet, looks at the size after that, and it was stored before resize() looked
            // for the leaf. So he sees the new one wherever a store is visible to all others at once, as on x86-64
            // and ARMv8; the memory model of the language alone does not say so.
            return Ok(known);
        }
        // Before the table grows: else a client could fill the memory with tables by writes that are refused.
        let Some(_room) = self.limit.reserve(self, 1, self.unit.bytes(), GROWTH_BYTES_MAX) else {
            return Err(Error::NoSpace { limit_bytes: self.limit.get() });
        };
        let made = self.table.make(unit).map_err(|_| Error::NoMemory)?;
        // See resize().
        fence(SeqCst);
        Ok(Some(made))
    }

    /// Whether the disk still has this unit. The caller has its slot (`ZRAM-4`).
    fn check_unit(&self, unit: u64) -> Result<(), Error> {
        let (disk_bytes, bytes) = (self.disk_bytes(), self.unit.bytes() as u64);
        let at = unit * bytes;
        if at < disk_bytes { Ok(()) } else { Err(Error::Invalid { at, bytes, disk_bytes }) }
    }

    fn await_backing(&self, unit: u64, ticket: Ticket) -> Result<(), Error> {
        self.store.wait(ticket).map_err(|error| Error::Lost { unit, error })
    }

    /// Has the unit of a slot in the scratch buffer, with its pages that are apart. A ticket: it is away.
    fn fill_joined(
        &self,
        cpu: usize,
        unit: u64,
        slot: &Slot,
        scratch: &mut Scratch,
    ) -> Result<Option<Ticket>, store::Error> {
        if !slot.is_apart() {
            return self.fill(cpu, slot, scratch);
        }
        // ZRAM-5: nobody knows the checksum of this.
        scratch.holds = None;
        self.read_apart(cpu, unit, slot, 0..self.unit.bytes(), &mut scratch.bytes)
    }

    /// Has the copy of a slot's unit in the scratch buffer, without pages that are apart. A ticket: it is away.
    fn fill(
        &self,
        cpu: usize,
        slot: &Slot,
        scratch: &mut Scratch,
    ) -> Result<Option<Ticket>, store::Error> {
        let checksum = slot.entry.as_ref().map(|entry| self.store.checksum(entry));
        if checksum.is_some() && checksum == scratch.holds {
            // It may have been fetched for this request; nobody loads it, and it stays on the backing.
            slot.entry.iter().for_each(|entry| _ = self.store.put_away(entry));
            return Ok(None);
        }
        scratch.holds = None;
        let loaded = self.load(cpu, slot, &mut scratch.bytes);
        if loaded == Ok(None) {
            scratch.holds = checksum;
        }
        loaded
    }

    /// Loads the copy of a slot's unit, without pages that are apart. A ticket: it is away.
    fn load(
        &self,
        cpu: usize,
        slot: &Slot,
        into: &mut [u8],
    ) -> Result<Option<Ticket>, store::Error> {
        let Some(entry) = &slot.entry else {
            into.fill(0);
            return Ok(None);
        };
        self.load_entry(cpu, entry, into)
    }

    /// Loads a unit, or a page that is apart. A ticket: it is away.
    fn load_entry(
        &self,
        cpu: usize,
        entry: &EntryId,
        into: &mut [u8],
    ) -> Result<Option<Ticket>, store::Error> {
        let mut unit = [Incoming::new(entry, into)];
        self.store.load(cpu, &mut unit);
        match unit[0].outcome {
            Loaded::Whole => {
                // What was fetched to be read stays on the backing.
                self.store.put_away(entry);
                Ok(None)
            }
            Loaded::Away(ticket) => Ok(Some(ticket)),
            Loaded::Lost(error) => Err(error),
            Loaded::Pending => unreachable!("a load says what became of each unit"),
        }
    }

    /// Stores the new contents of the units from `unit` on, whose slots these are. A unit that an error is for has its
    /// old contents; of several, the error is the first one's.
    fn put<G: DerefMut<Target = Slot>>(
        &self,
        cpu: usize,
        unit: u64,
        slots: &mut [Option<G>],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let _room = self.room_for(slots, bytes)?;
        let (huge, done) = self.replace(cpu, unit, slots, bytes);
        self.huge_since.fetch_add(huge, Relaxed);
        done
    }

    /// The same without a look at the limit. Returns how many of the units that have new contents do not shrink, too.
    fn replace<G: DerefMut<Target = Slot>>(
        &self,
        cpu: usize,
        unit: u64,
        slots: &mut [Option<G>],
        bytes: &[u8],
    ) -> (u64, Result<(), Error>) {
        let mut outgoing: [Outgoing<'_>; TOGETHER_MAX] = Default::default();
        let outgoing = &mut outgoing[..slots.len()];
        let units = bytes.chunks_exact(self.unit.bytes());
        for ((slot, outgoing), bytes) in slots.iter_mut().flatten().zip(&mut *outgoing).zip(units) {
            *outgoing = Outgoing::new(bytes, slot.entry.take());
        }
        self.store.store(cpu, CodecId::FIRST, outgoing, &self.figures);
        let refused = Outcome::Rejected(Reject::AllocFail);
        if outgoing.iter().any(|unit| unit.outcome == refused) {
            // Empty pages of other classes may serve.
            self.make_room();
            let refused = outgoing.iter_mut().filter(|unit| unit.outcome == refused);
            refused.for_each(|unit| unit.outcome = Outcome::Pending);
            self.store.store(cpu, CodecId::FIRST, outgoing, &self.figures);
        }
        let now_s = self.now_s.load(Relaxed);
        let (mut huge, mut result) = (0, Ok(()));
        for ((unit, slot), outgoing) in (unit..).zip(slots.iter_mut().flatten()).zip(outgoing) {
            slot.entry = outgoing.entry.take();
            let done = match outgoing.outcome {
                Outcome::Rejected(Reject::CompressFail) => Err(Error::Codec { unit }),
                Outcome::Rejected(_) => Err(Error::NoMemory),
                outcome => Ok(outcome),
            };
            if let Ok(outcome) = done {
                self.drop_apart(unit, slot);
                slot.renew(now_s);
                huge += u64::from(outcome == Outcome::Incompressible);
            }
            result = result.and(done.map(drop));
        }
        (huge, result)
    }

    /// Room below the limit for the new contents of units. A word takes none: a full disk can be overwritten with
    /// zeros. Nor does what is there already.
    fn room_for<G: Deref<Target = Slot>>(
        &self,
        slots: &[Option<G>],
        bytes: &[u8],
    ) -> Result<Room<'_>, Error> {
        let takes_none = |slot: &G| {
            let is_there = || slot.entry.as_ref().is_some_and(|it| self.store.is_unit(it, bytes));
            same_filled(bytes).is_some() || is_there()
        };
        let room =
            self.limit.reserve(self, slots.len(), self.unit.bytes(), 0).or_else(|| match slots {
                [Some(slot)] => takes_none(slot).then(Room::none),
                _ => None,
            });
        room.ok_or(Error::NoSpace { limit_bytes: self.limit.get() })
    }

    /// Gives back to the system what the pool has and does not need.
    fn make_room(&self) {
        self.store.pool().compact(STEP_BYTES);
        self.store.pool().trim();
    }

    fn reads_as_zeros(&self, slot: &Slot) -> bool {
        let is_zeros = |entry| self.store.same_filled(entry) == Some(0);
        slot.entry.as_ref().is_none_or(is_zeros)
    }

    /// Drops the contents of a unit.
    fn clear(&self, unit: u64, slot: &mut Slot) {
        self.drop_apart(unit, slot);
        if let Some(entry) = slot.entry.take() {
            self.store.invalidate(entry, &self.figures);
        }
        slot.renew(self.now_s.load(Relaxed));
    }

    fn form(&self, slot: &Slot) -> Option<Form> {
        slot.entry.as_ref().map(|entry| self.store.form(entry))
    }
}
