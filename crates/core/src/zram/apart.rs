//! Pages apart: pages that were written in part of a unit, compressed one by one until their unit is joined again.
//!
//! To change 4 KiB of a unit of 32 KiB takes a decompression and a compression of 32 KiB. So a page that is written is
//! compressed alone instead, and kept beside the unit's copy. A unit of which more than an eighth of the pages would be
//! beside the copy is **split**: the copy's other pages are compressed one by one too, and the copy is dropped. What is
//! written of a split unit later costs one page, and the unit takes as much memory as units of 4 KiB do. What was not
//! written for some seconds is **joined**: compressed as one object again.
//!
//! ```text
//!               a page is written             more are written
//!   joined ----------------------> beside ---------------------> split
//!   entry                          entry, apart                  apart
//!     ^                                |                           |
//!     +--------------------------------+---------------------------+
//!            not written for a while; overwritten or zeroed; saved
//! ```
//!
//! # Invariants
//!
//! - `APART-1` A slot says that pages are apart (`Slot::is_apart`) exactly if `Apart` has pages of its unit. These are
//!   used and exchanged only under the slot's lock, as the slot's entry is (`ZRAM-3`).
//! - `APART-2` A page that is apart is newer than the copy. Of a unit without a copy all pages are apart, or none.
//! - `APART-3` A write keeps all of its pages apart, or none (`ZRAM-2`): the new entries are all made before the first
//!   old one is dropped.
//! - `APART-4` A unit is split, or gets a page beside its copy, only while pages apart cost no more than a quarter of
//!   what is stored ([`EXTRA_PART`], [`EXTRA_BYTES`]).
//! - `APART-5` Pages apart are always in the pool; copies beside them may be on the backing. So that they leave room
//!   for others, a disk with a limit of memory keeps more apart only while an eighth of it is free ([`LIMIT_PART`]).
//!   With a backing, on which a copy may be that is wanted to join its pages, this holds for units that are split; any
//!   pages may be apart while all of them take less than an eighth.
//! - `APART-6` A write fails for want of room only after units were joined, in as many tries as there are to write
//!   others back (`Zram::with_room`).
//!
//! # Concurrency
//!
//! The pages of a unit are taken out of their shard for the time in which they are used, and put back: so a shard is
//! locked for two moments.
//!
//! # Cost
//!
//! Nothing while nothing is apart, but the streams of a codec for pages. A unit with pages apart takes 4 bytes for each
//! of its pages and [`PARTS_BYTES`]; each page apart what the store keeps of a stored unit (28 bytes).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::slot::Slot;
use super::{Error, TOGETHER_MAX, Zram};
use crate::page::{PAGE_BYTES, UnitOrder};
use crate::stats::{Figures, add, subtract};
use crate::store::{self, CodecId, EntryId, Outgoing, Ticket};
use crate::sync::Mutex;
use crate::zcomp::{self, Params, Zcomp};
use crate::zsmalloc::PageSource;

const RANK_APART: u8 = 23;

/// Pages apart may cost as much memory as this part of what is stored, and [`EXTRA_BYTES`] more: on a disk on which
/// there is little, a part of it would be nothing.
const EXTRA_PART: u64 = 4;

const EXTRA_BYTES: u64 = 256 << 10;

/// The part of the limit that pages apart may take or leave free (`APART-5`).
const LIMIT_PART: u64 = 8;

/// Units that are joined together to make room for a write.
const JOIN_FOR_ROOM: usize = 32;

/// Beside a copy there are at most as many pages as this part of the unit has, or one.
const BESIDE_PART: usize = 8;

/// A write of more than this part of a unit, or of more than one page, changes the unit as a whole, unless it is split.
const WRITE_PART: usize = 4;

/// What the map takes for a unit, beside its pages: about 32 bytes of it, in nodes that are half full or more.
const PARTS_BYTES: usize = 64;

const SHARDS: usize = 64;

/// The pages of one unit that are apart.
#[derive(Debug, Default)]
struct Parts {
    /// By their place in the unit.
    pages: Box<[Option<EntryId>]>,
    written_s: u32,
    /// By how much the pages make the disk larger: their objects, less the copy that they replaced.
    extra_bytes: u64,
}

impl Parts {
    fn new(unit: UnitOrder) -> Parts {
        Parts { pages: (0..unit.pages()).map(|_| None).collect(), ..Parts::default() }
    }

    fn count(&self) -> usize {
        self.pages.iter().flatten().count()
    }
}

type Shard = Mutex<RANK_APART, BTreeMap<u64, Parts>>;

/// See the module.
#[derive(Debug)]
pub(super) struct Apart {
    /// For units of one page.
    codec: CodecId,
    shards: Box<[Shard]>,
    /// What the pages are.
    figures: Figures,
    units: AtomicU64,
    split_units: AtomicU64,
    extra_bytes: AtomicU64,
    joined_units: AtomicU64,
    /// The shard in which [`Zram::join_old`] begins.
    hand: AtomicUsize,
    /// How many units the store had written back when last it could write none back, though the limit was passed: until
    /// that number changes no unit is joined whose copy is away.
    in_vain: AtomicU64,
}

/// What is apart, and what was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ApartStat {
    /// Units with pages apart.
    pub units: u64,
    /// Those of them that have no copy.
    pub split_units: u64,
    /// Pages apart.
    pub pages: u64,
    /// Their bytes, compressed.
    pub compressed_bytes: u64,
    /// Units that were joined because they were not written for a while.
    pub joined_units: u64,
}

/// What [`Zram::join_old`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Joined {
    /// Units that were joined.
    pub units: u64,
    /// Units that stay apart for now: there is no memory, or they are damaged.
    pub stayed: u64,
}

impl Apart {
    fn shard(&self, unit: u64) -> &Shard {
        // The remainder is below SHARDS.
        &self.shards[usize::try_from(unit % SHARDS as u64).unwrap_or(0)]
    }

    /// Takes the pages of a unit out, whose slot the caller has, or none.
    fn take(&self, unit: u64) -> Option<Parts> {
        self.shard(unit).lock().get_mut(&unit).map(std::mem::take)
    }

    fn put_back(&self, unit: u64, parts: Parts) {
        self.shard(unit).lock().insert(unit, parts);
    }

    /// What the pages are.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Calls `act` with the pages of each unit of which some are apart.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn each(&self, mut act: impl FnMut(&[Option<EntryId>])) {
        for shard in &self.shards {
            shard.lock().values().for_each(|parts| act(&parts.pages));
        }
    }
}

/// How much of a write of `pages` is to be kept apart, and how.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// The pages replace others that are apart.
    Again,
    /// They come beside the copy.
    Beside,
    /// The other pages of the unit are to be apart too.
    Split,
}

impl<S: PageSource> Zram<S> {
    /// The same, with pages that are kept apart where a part of a unit is written, compressed by this algorithm. On a
    /// disk whose units are pages nothing is ever apart.
    ///
    /// # Errors
    ///
    /// Those of [`Zcomp::new`].
    pub fn with_pages_apart(mut self, params: Params) -> Result<Self, zcomp::Error> {
        if self.unit.pages() > 1 {
            // As many streams as there are of the others.
            let codec = Zcomp::new(params, UnitOrder::DEFAULT, self.scratch.len())?;
            let codec = self.store.add_codec(codec).expect("one at a time, and a place for it");
            self.store.keep_in_pool(codec);
            self.apart = Some(Apart {
                codec,
                shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
                figures: Figures::default(),
                units: AtomicU64::new(0),
                split_units: AtomicU64::new(0),
                extra_bytes: AtomicU64::new(0),
                joined_units: AtomicU64::new(0),
                hand: AtomicUsize::new(0),
                in_vain: AtomicU64::new(u64::MAX),
            });
        }
        Ok(self)
    }

    /// What is apart; zeros if nothing ever is.
    #[must_use]
    pub fn apart_stat(&self) -> ApartStat {
        self.apart.as_ref().map_or_else(ApartStat::default, |apart| ApartStat {
            units: apart.units.load(Relaxed),
            split_units: apart.split_units.load(Relaxed),
            pages: apart.figures.stored_units.load(Relaxed),
            compressed_bytes: apart.figures.compressed_bytes.load(Relaxed),
            joined_units: apart.joined_units.load(Relaxed),
        })
    }

    /// The device is reset.
    pub(super) fn note_apart_reset(&self) {
        self.apart.iter().for_each(|apart| apart.joined_units.store(0, Relaxed));
    }

    /// Fails if the slot of a unit does not say what is apart of the unit.
    #[cfg(any(test, fuzzing, debug_assertions))]
    pub(super) fn check_apart(&self, unit: u64, slot: &Slot) {
        let Some(apart) = &self.apart else { return assert!(!slot.is_apart(), "APART-1") };
        let shard = apart.shard(unit).lock();
        let parts = shard.get(&unit);
        assert_eq!(parts.is_some(), slot.is_apart(), "APART-1: unit {unit}");
        let is_split = parts.is_none_or(|parts| parts.count() == parts.pages.len());
        assert!(is_split || slot.entry.is_some(), "APART-2: unit {unit}");
    }

    /// Bytes of what is kept of units with pages apart, but the pages.
    pub(super) fn apart_tables_bytes(&self) -> u64 {
        let unit_bytes = self.unit.pages() * size_of::<Option<EntryId>>() + PARTS_BYTES;
        self.apart.as_ref().map_or(0, |apart| apart.units.load(Relaxed) * unit_bytes as u64)
    }

    /// Bytes of the units that are split, uncompressed.
    pub(super) fn split_bytes(&self) -> u64 {
        self.apart_stat().split_units * self.unit.bytes() as u64
    }

    /// Bytes of all objects, wherever they are.
    pub(super) fn compressed_bytes(&self) -> u64 {
        self.figures.compressed_bytes.load(Relaxed) + self.apart_stat().compressed_bytes
    }

    /// Whether pages may be apart in this way (`APART-4`, `APART-5`).
    fn may_be(&self, apart: &Apart, how: How) -> bool {
        if how == How::Again {
            return true;
        }
        let extra_bytes = apart.extra_bytes.load(Relaxed);
        if extra_bytes >= self.compressed_bytes() / EXTRA_PART + EXTRA_BYTES {
            return false;
        }
        let (limit_bytes, has_backing) = (self.limit.get(), self.has_backing());
        let part = limit_bytes / LIMIT_PART;
        limit_bytes == 0
            || has_backing && apart.figures.compressed_bytes.load(Relaxed) < part
            || (how == How::Split || !has_backing) && self.used_bytes() < limit_bytes - part
    }

    /// Keeps whole pages of a unit apart that are written. False: nothing has changed, and the unit is to be changed as
    /// a whole.
    pub(super) fn write_apart(
        &self,
        cpu: usize,
        unit: u64,
        slot: &mut Slot,
        within: &Range<usize>,
        bytes: &[u8],
    ) -> bool {
        let Some(apart) = &self.apart else { return false };
        let is_whole_pages = (within.start | within.end) % PAGE_BYTES == 0;
        if slot.is_empty() || !is_whole_pages {
            return false;
        }
        let pages = within.start / PAGE_BYTES..within.end / PAGE_BYTES;
        let is_split = slot.entry.is_none();
        if !is_split && pages.len() > (self.unit.pages() / WRITE_PART).max(1) {
            return false;
        }
        let taken = if slot.is_apart() { apart.take(unit) } else { None };
        let mut parts = taken.unwrap_or_else(|| Parts::new(self.unit));
        let count = parts.pages[pages.clone()].iter().filter(|page| page.is_none()).count();
        let beside_max = (self.unit.pages() / BESIDE_PART).max(1);
        let is_few = parts.count() + count <= beside_max;
        let how = match count {
            0 => How::Again,
            _ if is_few && self.may_be(apart, How::Beside) => How::Beside,
            _ => How::Split,
        };
        let is_kept = self.may_be(apart, how)
            && self.keep_apart(cpu, slot, (apart, &mut parts), how, pages.start, bytes);
        if slot.is_apart() {
            if is_kept {
                slot.touch(self.now_s.load(Relaxed));
            }
            apart.put_back(unit, parts);
        }
        is_kept
    }

    /// The same, once it is known how. The room below the limit is reserved first (`LIM-1`).
    fn keep_apart(
        &self,
        cpu: usize,
        slot: &mut Slot,
        (apart, parts): (&Apart, &mut Parts),
        how: How,
        first: usize,
        bytes: &[u8],
    ) -> bool {
        let written = (first..).zip(bytes.chunks_exact(PAGE_BYTES));
        // What is there already is not compressed again.
        let is_new = |(page, bytes): &(usize, &[u8])| {
            parts.pages[*page].as_ref().is_none_or(|entry| !self.store.is_unit(entry, bytes))
        };
        let mut new = Parts::new(self.unit);
        let pages = if how == How::Split { self.unit.pages() } else { bytes.len() / PAGE_BYTES };
        let Some(_room) = self.limit.reserve(self, pages, PAGE_BYTES, 0) else { return false };
        if !self.store_pages(cpu, apart, &mut new, &mut written.filter(is_new)) {
            return false;
        }
        if how == How::Split {
            let mut scratch = self.scratch(cpu);
            let is_read = self.fill(cpu, slot, &mut scratch) == Ok(None);
            let pages = scratch.bytes.chunks_exact(PAGE_BYTES).enumerate();
            let written = first..first + bytes.len() / PAGE_BYTES;
            let is_left = |(page, _): &(usize, &[u8])| {
                parts.pages[*page].is_none() && !written.contains(page)
            };
            if !is_read {
                self.drop_pages(apart, &mut new);
                return false;
            }
            if !self.store_pages(cpu, apart, &mut new, &mut pages.filter(is_left)) {
                return false;
            }
        }
        self.exchange(slot, apart, parts, &mut new);
        true
    }

    /// Stores pages for a unit. False: not all could be, and none is left.
    fn store_pages(
        &self,
        cpu: usize,
        apart: &Apart,
        new: &mut Parts,
        pages: &mut dyn Iterator<Item = (usize, &[u8])>,
    ) -> bool {
        loop {
            let mut outgoing: [Outgoing<'_>; TOGETHER_MAX] = Default::default();
            let mut places = [0; TOGETHER_MAX];
            let mut count = 0;
            for (page, bytes) in pages.take(TOGETHER_MAX) {
                (places[count], outgoing[count]) = (page, Outgoing::new(bytes, None));
                count += 1;
            }
            if count == 0 {
                return true;
            }
            self.store.store(cpu, apart.codec, &mut outgoing[..count], &apart.figures);
            let mut are_stored = true;
            for (page, outgoing) in places.iter().zip(&mut outgoing[..count]) {
                new.pages[*page] = outgoing.entry.take();
                are_stored &= new.pages[*page].is_some();
            }
            if !are_stored {
                self.drop_pages(apart, new);
                return false;
            }
        }
    }

    /// Puts new pages in the places of old ones, and drops the copy if all pages are apart then.
    fn exchange(&self, slot: &mut Slot, apart: &Apart, parts: &mut Parts, new: &mut Parts) {
        for (old, new) in parts.pages.iter_mut().zip(&mut new.pages) {
            if let Some(new) = new.take() {
                let old = old.replace(new);
                old.into_iter().for_each(|old| self.store.invalidate(old, &apart.figures));
            }
        }
        parts.written_s = self.now_s.load(Relaxed);
        let before = parts.extra_bytes;
        if let Some(copy) = &slot.entry {
            let sizes = parts.pages.iter().flatten().map(|page| self.store.object_bytes(page));
            parts.extra_bytes = sizes.sum::<usize>() as u64;
            if parts.count() == parts.pages.len() {
                let copy_bytes = self.store.object_bytes(copy) as u64;
                parts.extra_bytes = parts.extra_bytes.saturating_sub(copy_bytes);
                add(&apart.split_units, 1);
                let copy = slot.entry.take();
                copy.into_iter().for_each(|copy| self.store.invalidate(copy, &self.figures));
            }
        }
        add(&apart.extra_bytes, parts.extra_bytes);
        subtract(&apart.extra_bytes, before);
        if !slot.is_apart() {
            self.note_used();
            add(&apart.units, 1);
            slot.set_apart(true);
        }
    }

    fn drop_pages(&self, apart: &Apart, parts: &mut Parts) {
        let pages = parts.pages.iter_mut().filter_map(Option::take);
        pages.for_each(|page| self.store.invalidate(page, &apart.figures));
    }

    /// Drops the pages of a unit that are apart: it has a new copy, or is to be empty.
    pub(super) fn drop_apart(&self, unit: u64, slot: &mut Slot) {
        let Some(apart) = self.apart.as_ref().filter(|_| slot.is_apart()) else { return };
        let parts = apart.shard(unit).lock().remove(&unit);
        let mut parts = parts.expect("APART-1");
        let is_split = parts.count() == parts.pages.len();
        self.drop_pages(apart, &mut parts);
        subtract(&apart.extra_bytes, parts.extra_bytes);
        subtract(&apart.split_units, is_split.into());
        self.note_used();
        subtract(&apart.units, 1);
        slot.set_apart(false);
    }

    /// Reads a part of a unit of which pages are apart, or all of it. A ticket: the copy is wanted, and is away.
    pub(super) fn read_apart(
        &self,
        cpu: usize,
        unit: u64,
        slot: &Slot,
        within: Range<usize>,
        into: &mut [u8],
    ) -> Result<Option<Ticket>, store::Error> {
        let apart = self.apart.as_ref().expect("APART-1");
        let parts = apart.take(unit).expect("APART-1");
        let loaded = self.load_parts(cpu, slot, &parts, within, into);
        apart.put_back(unit, parts);
        loaded
    }

    fn load_parts(
        &self,
        cpu: usize,
        slot: &Slot,
        parts: &Parts,
        within: Range<usize>,
        into: &mut [u8],
    ) -> Result<Option<Ticket>, store::Error> {
        let is_here = |away: Option<Ticket>| assert!(away.is_none(), "APART-5");
        let pages = within.start / PAGE_BYTES..within.end.div_ceil(PAGE_BYTES);
        if parts.pages[pages.clone()].iter().any(Option::is_none) {
            let away = if within.len() == self.unit.bytes() {
                self.load(cpu, slot, into)?
            } else {
                let mut scratch = self.scratch(cpu);
                let away = self.fill(cpu, slot, &mut scratch)?;
                into.copy_from_slice(&scratch.bytes[within.clone()]);
                away
            };
            if away.is_some() {
                return Ok(away);
            }
        }
        for page in pages {
            let Some(entry) = &parts.pages[page] else { continue };
            let at = page * PAGE_BYTES;
            let wanted = within.start.max(at)..within.end.min(at + PAGE_BYTES);
            let to = &mut into[wanted.start - within.start..wanted.end - within.start];
            if wanted.len() == PAGE_BYTES {
                is_here(self.load_entry(cpu, entry, to)?);
            } else {
                let mut whole = [0; PAGE_BYTES];
                is_here(self.load_entry(cpu, entry, &mut whole)?);
                to.copy_from_slice(&whole[wanted.start - at..wanted.end - at]);
            }
        }
        Ok(None)
    }

    /// Makes one object of a unit of which pages are apart. A ticket: the copy is away, and nothing was done.
    ///
    /// # Errors
    ///
    /// As those of a write. The unit stays as it was.
    fn join(&self, cpu: usize, unit: u64, slot: &mut Slot) -> Result<Option<Ticket>, Error> {
        let mut scratch = self.scratch(cpu);
        let read = self.fill_joined(cpu, unit, slot, &mut scratch);
        let away = read.map_err(|error| Error::Lost { unit, error })?;
        if away.is_none() {
            self.join_as(cpu, unit, slot, &scratch.bytes)?;
        }
        Ok(away)
    }

    /// The same, once it is known what is in the unit. The limit is not looked at, which one unit passes for a moment:
    /// what is joined takes less, or can be written back, which the pages could not.
    pub(super) fn join_as(
        &self,
        cpu: usize,
        unit: u64,
        slot: &mut Slot,
        bytes: &[u8],
    ) -> Result<(), Error> {
        // To be joined is no use.
        let (used_s, is_idle) = (slot.used_s(), slot.is_idle());
        self.replace(cpu, unit, &mut [Some(&mut *slot)], bytes).1?;
        slot.renew(used_s);
        if is_idle {
            slot.mark_idle();
        }
        Ok(())
    }

    /// The same, if pages are apart, and as far as that is possible now: for whoever looks for units to work on.
    pub(super) fn join_if_here(&self, cpu: usize, unit: u64, slot: &mut Slot) {
        if slot.is_apart() {
            // What cannot be joined now stays as it is, and is no such unit.
            self.join(cpu, unit, slot).ok();
        }
    }

    /// Joins some units: what is apart takes more memory than what is joined. If all of their copies are away, it joins
    /// one, which can be written back then. False: nothing was joined. The caller holds no lock.
    pub(super) fn join_for_room(&self, cpu: usize) -> bool {
        let Some(apart) = &self.apart else { return false };
        let (first, mut joined, mut away) = (apart.hand.load(Relaxed), 0, None);
        for turn in 0..SHARDS {
            let shard = (first + turn) % SHARDS;
            let units: Vec<u64> = apart.shards[shard].lock().keys().copied().collect();
            for unit in units {
                let Some(lock) = self.table.get(unit) else { continue };
                let mut slot = lock.lock();
                match slot.is_apart().then(|| self.join(cpu, unit, &mut slot)) {
                    Some(Ok(None)) => joined += 1,
                    Some(Ok(Some(_))) => away = away.or(Some(unit)),
                    Some(Err(_)) | None => {}
                }
                if joined == JOIN_FOR_ROOM {
                    apart.hand.store(shard, Relaxed);
                    return true;
                }
            }
        }
        joined > 0 || away.is_some_and(|unit| self.join_away(apart, cpu, unit) != Some(false))
    }

    /// Joins units that were not written for so many seconds, `most` at a time. Copies that are away are fetched for
    /// that.
    pub fn join_old(&self, cpu: usize, age_s: u32, most: usize) -> Joined {
        let mut joined = Joined::default();
        let Some(apart) = &self.apart else { return joined };
        for unit in self.old_parts(apart, age_s, most) {
            let is_joined = self.join_away(apart, cpu, unit);
            joined.units += u64::from(is_joined == Some(true));
            joined.stayed += u64::from(is_joined == Some(false));
            if is_joined == Some(false) {
                // Not again at once.
                if let Some(parts) = apart.shard(unit).lock().get_mut(&unit) {
                    parts.written_s = self.now_s.load(Relaxed);
                }
            }
        }
        add(&apart.joined_units, joined.units);
        joined
    }

    /// Some units whose pages were not written for so many seconds.
    fn old_parts(&self, apart: &Apart, age_s: u32, most: usize) -> Vec<u64> {
        let (mut found, now_s) = (Vec::new(), self.now_s.load(Relaxed));
        if apart.units.load(Relaxed) == 0 {
            return found;
        }
        let first = apart.hand.load(Relaxed);
        for turn in 0..SHARDS {
            let shard = (first + turn) % SHARDS;
            let is_old = |(_, parts): &(&u64, &Parts)| {
                // Without pages: somebody has taken them out for now.
                !parts.pages.is_empty() && now_s.saturating_sub(parts.written_s) >= age_s
            };
            let left = most - found.len();
            let parts = apart.shards[shard].lock();
            found.extend(parts.iter().filter(is_old).map(|(unit, _)| *unit).take(left));
            if found.len() == most {
                apart.hand.store(shard, Relaxed);
                break;
            }
        }
        found
    }

    /// Joins a unit, whose copy is fetched if it is away, and writes units back if the limit is passed then. False: it
    /// stays apart. `None`: it was not apart any more.
    fn join_away(&self, apart: &Apart, cpu: usize, unit: u64) -> Option<bool> {
        let is_joined = self.join_one(apart, cpu, unit);
        if !self.write_beyond_limit() {
            apart.in_vain.store(self.store.spill_stats().written, Relaxed);
        }
        is_joined
    }

    fn join_one(&self, apart: &Apart, cpu: usize, unit: u64) -> Option<bool> {
        let lock = self.table.get(unit)?;
        loop {
            let mut slot = lock.lock();
            let joined = slot.is_apart().then(|| self.join(cpu, unit, &mut slot));
            drop(slot);
            match joined? {
                Ok(None) => return Some(true),
                Ok(Some(ticket)) if self.may_join_away(apart) && self.fetch(ticket) => {}
                Ok(Some(_)) | Err(_) => return Some(false),
            }
        }
    }

    /// Whether a unit may be joined whose copy is away, which takes more memory than its pages: it fits, or what was
    /// joined before could be written back (`LIM-1`).
    fn may_join_away(&self, apart: &Apart) -> bool {
        let fits = self.limit.reserve(self, 1, self.unit.bytes(), 0).is_some();
        fits || apart.in_vain.load(Relaxed) != self.store.spill_stats().written
    }
}
