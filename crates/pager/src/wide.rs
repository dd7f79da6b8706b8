//! Wide units: four adjacent units of a page that are stored as one object.
//!
//! ```text
//! folio    |0 1 2 3|4 5 6 7|8 9 . .|      16 units of 4 KiB
//! objects  |   a   |b c d e|f g           a: a wide unit; b to g: a unit each
//! ```
//!
//! Larger units shrink more, four pages are decompressed in 0.6 of the time of four times one, and one fault brings
//! all of them. But where a program touches a page here and a page there, three of them come back for nothing and
//! displace three others. No size is best for all programs (`docs/design/density.md`), nor for all memory of one.
//!
//! So each **region**, 16 MiB, measures how its units are used. When a folio goes out again, each unit that came back
//! by itself tells how many of the three beside it have come back, too. Where most did, more than would have if units
//! were used in any order (`thresholds`), and in all memory most did lately, four units that go out together become a
//! wide one, and a fault on one of four single units brings all of them. A wide unit comes back as a whole, and tells
//! nothing; so of the folios that go out one in 16 has none, and tells when it has come back. Once units are no longer
//! used together, wide ones that go out become four again.
//!
//! All memory counts besides because a region may have a few folios only (V8 has hundreds of such regions), of which
//! none tells for a long time: with regions alone node took 1.4 times as long.
//!
//! Units that hardly shrink stay apart: larger ones gain nothing, and belong on the disk (`is_for_the_disk`).
//! The dense codec alone makes wide units: memory is short then, and what the program does has been seen for a while.
//! What they save counts for the dense codec when it is compared with the fast one (`Span::together`). When it takes
//! over, four stored units are repacked as one.
//!
//! # Invariants
//!
//! - `WIDE-1` A wide unit (`Folio::wide`) has one copy, which is kept for the first of its units. All four are stored,
//!   or none is.
//!
//! # Cost
//!
//! 16 bytes for each region, 5 for each folio; and the streams of one more codec (0.9 MiB for two CPUs), which is set
//! up once units would become wide.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use zfolio_core::page::{UnitOrder, same_filled};
use zfolio_core::stats::{add, subtract};
use zfolio_core::store::{Form, Outgoing};

use crate::engine::Engine;
use crate::folio::{Folio, Table, UNITS_MAX, Units, WIDE_UNITS};
use crate::mover::Full;

/// The order of a wide unit.
pub(crate) fn order(unit: UnitOrder) -> Option<UnitOrder> {
    UnitOrder::from_bytes(unit.bytes() * WIDE_UNITS)
}

/// Of the folios of a region with wide units that go out, one in so many has none, to tell how its units are used.
const TELLS_EVERY: u32 = 16;

/// A mean is that of so many, and before there are so many no unit becomes wide.
const SEEN_MAX: u32 = 16;

/// Units become wide from this share on, and no longer below that one, in millionths; where more of memory is resident
/// from a larger share on ([`thresholds`]).
const WIDE_FROM: u32 = 750_000;
const WIDE_TO: u32 = 560_000;

/// Whether the units that come back to a folio tell how its units are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Telling {
    /// They do: no unit became wide when the folio went out. Stored units may become wide.
    Free,
    /// They do: it is the folio's turn, and its units stay apart.
    Turn,
    /// They do not: some came along with others.
    No,
}

/// How units are used: of a region, or of all memory.
#[derive(Debug, Default)]
pub(crate) struct Use {
    /// Of the three units beside one that came back: the share that came back, too, in millionths; the mean of the
    /// last 16 or so.
    together: AtomicU32,
    /// How many this is the mean of, up to 16.
    seen: AtomicU32,
    /// Four units that go out together become a wide one.
    is_wide: AtomicBool,
    /// How many folios went out while that was so.
    went: AtomicU32,
    /// Units are taken to be used together, whatever is seen.
    #[cfg(test)]
    is_forced: AtomicBool,
}

impl Use {
    /// Whether four units that go out together become a wide one.
    fn is_wide(&self) -> bool {
        self.is_wide.load(Relaxed)
    }

    /// Whether it is the next folio's turn to tell.
    fn is_turn(&self) -> bool {
        self.went.fetch_add(1, Relaxed) % TELLS_EVERY == TELLS_EVERY - 1
    }

    /// Notes which units of a folio that goes out had come back one by one. Units become wide from the share `from` on,
    /// and no longer below `to`.
    fn note(&self, alone: Units, [from, to]: [u32; 2]) {
        for start in (0..UNITS_MAX).step_by(WIDE_UNITS) {
            let used = (alone & Units::wide_around(start)).count();
            if used > 0 {
                self.add((used - 1) * 1_000_000 / (WIDE_UNITS - 1));
            }
        }
        // Two thresholds, so that a share between them changes nothing.
        let together = self.together.load(Relaxed);
        if together < to {
            self.is_wide.store(false, Relaxed);
        } else if together >= from && self.seen.load(Relaxed) == SEEN_MAX {
            self.is_wide.store(true, Relaxed);
        }
    }

    /// A number that is lost to a race hardly changes the mean.
    fn add(&self, share: usize) {
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        let seen = (self.seen.load(Relaxed) + 1).min(SEEN_MAX);
        let mean = self.together.load(Relaxed);
        self.together.store(mean - mean / seen + share / seen, Relaxed);
        self.seen.store(seen, Relaxed);
    }
}

/// From which share on units become wide while `resident` millionths of memory are resident, and below which no longer.
///
/// Where a program uses its pages in any order, those beside one come back, too, while the folio is there, the more of
/// memory is resident the sooner. Say that each unit of a folio is asked for at the same rate, and that the folio goes
/// out after a time in which x of these come for each unit: then 1 - e^-x of its units are back at the end, and on the
/// way there were 1 - (1 - e^-x) / x of them in the mean, which is the share that is resident, R. So the share that is
/// missing at the end, e^-x, follows from R: it is (1 - R)^3 (1 + R) to within 0.03. Where units are used together less
/// is missing.
fn thresholds(resident: u64) -> [u32; 2] {
    const ONE: u64 = 1_000_000;
    let away = ONE - resident.min(ONE);
    let missing = away * away / ONE * away / ONE * (2 * ONE - away) / ONE;
    let share = |missing: u64| u32::try_from(ONE - missing).expect("a share");
    [share(missing * 2 / 3).max(WIDE_FROM), share(missing).max(WIDE_TO)]
}

impl Engine {
    /// Notes that stored units are loaded for a fault on them, or on their stream.
    pub(crate) fn note_asked_for(&self, folio: &mut Folio, units: Units) {
        if !self.work.density.may_widen() {
            return;
        }
        let together = match self.work.density.is_dense() {
            true => units.whole(folio.wide) & folio.wide,
            false if self.work.used.is_wide() => units & folio.asked.fours(),
            false => Units::NONE,
        };
        self.copies.note_together(together.count());
        folio.asked |= units - folio.wide;
    }

    /// A folio has come back, and goes out again: notes how its units were used, if it tells, and whether it will.
    fn note_use(&self, table: &Table, base: usize, folio: &mut Folio, units: Units) {
        let asked = std::mem::take(&mut folio.asked) & units;
        let Some(region) = table.region(base).filter(|_| self.work.density.may_widen()) else {
            return;
        };
        if folio.telling != Telling::No {
            let thresholds = thresholds(self.resident_share());
            region.note(asked, thresholds);
            self.work.used.note(asked, thresholds);
        }
        folio.telling = match self.is_wide_now(region) {
            false => Telling::Free,
            true if region.is_turn() => Telling::Turn,
            true => Telling::No,
        };
    }

    /// How much of all memory is resident, in millionths.
    fn resident_share(&self) -> u64 {
        let resident = self.charge.resident_bytes();
        let all = resident + self.figures().demand_stored_bytes.load(Relaxed);
        (resident * 1_000_000).checked_div(all).unwrap_or(0)
    }

    /// Whether four units of a region that go out together become a wide one.
    fn is_wide_now(&self, region: &Use) -> bool {
        #[cfg(test)]
        if self.work.used.is_forced.load(Relaxed) {
            return self.work.density.widens();
        }
        self.work.density.widens() && region.is_wide() && self.work.used.is_wide()
    }

    /// Sets up the codec for wide units, once they would be used: its streams take memory. Called by the background
    /// thread, without a lock.
    pub(crate) fn prepare_wide(&self) {
        let (density, config, work) = (&self.work.density, self.config(), &self.work);
        if !density.wants_wide() || !work.used.is_wide() {
            return;
        }
        let dense = config.algorithm.codecs().pop();
        let codec = dense.zip(config.wide_unit()).map(|(params, unit)| {
            config.accelerated.zcomp(params, unit, work.cpus.max(2), &work.crew)
        });
        let codec = codec.and_then(Result::ok);
        density.set_wide(codec.and_then(|codec| self.add_codec(codec)));
    }

    /// A folio's slot is about to be stored: says which of its units are stored as wide ones, and drops copies that were
    /// made otherwise. Notes how the units were used.
    pub(crate) fn widen(
        &self,
        table: &Table,
        base: usize,
        slot: &Full,
        folio: &mut Folio,
    ) -> Units {
        self.note_use(table, base, folio, slot.units());
        let is_filled =
            |index: usize| same_filled(self.mover.part(slot, index..index + 1)).is_some();
        let fours = self.wide_units(table, base, folio, slot.units());
        // Same-filled units take no object.
        let fours = fours.filter(|four| !four.iter().any(is_filled));
        let wide = fours.collect();
        let before = (slot.units() & folio.wide).whole(folio.wide);
        self.drop_copies(folio, (before - wide) | (wide - before));
        wide
    }

    /// The stored units that come along with a unit where units are used together. The folio tells nothing then.
    pub(crate) fn beside(
        &self,
        table: &Table,
        base: usize,
        folio: &mut Folio,
        index: usize,
    ) -> Units {
        let mut fours = self.wide_units(table, base, folio, Units::wide_around(index));
        let beside = fours.next().unwrap_or(Units::NONE) & folio.stored;
        if !beside.is_empty() {
            folio.telling = Telling::No;
        }
        beside
    }

    /// Those of `units` of a folio that are or should be wide units: each four units.
    pub(crate) fn wide_units(
        &self,
        table: &Table,
        base: usize,
        folio: &Folio,
        units: Units,
    ) -> impl Iterator<Item = Units> + use<> {
        let may = self.work.density.widens() && folio.telling != Telling::Turn;
        let is_wide = may && table.region(base).is_some_and(|region| self.is_wide_now(region));
        let starts = (0..UNITS_MAX).step_by(WIDE_UNITS).filter(move |_| is_wide);
        starts.map(Units::wide_around).filter(move |four| (*four - units).is_empty())
    }

    /// Stores four stored units of a folio as one object, if they are in the pool and none is same-filled. `room` has
    /// room for them.
    pub(crate) fn join(&self, folio: &mut Folio, base: usize, four: Units, room: &mut [u8]) {
        let (span, cpu) = (self.geometry().bytes(four.span()), self.cpu());
        let Some(codec) = self.work.density.wide() else { return };
        if !(folio.wide & four).is_empty() {
            return;
        }
        let room = &mut room[..span.len()];
        let bytes = self.geometry().unit_bytes();
        for ((index, unit), at) in
            four.iter().zip(room.chunks_exact_mut(bytes)).zip(span.step_by(bytes))
        {
            let copy = folio.copies[index].as_ref().expect("UNIT-2: a stored unit has a copy");
            let is_filled = self.store.form(copy) == Form::SameFilled;
            if is_filled || self.load_unit(copy, base + at, unit, cpu).is_err() {
                return;
            }
        }
        let mut object = [Outgoing::new(room, None)];
        self.store.store(cpu, codec, &mut object, self.figures());
        let [object] = object;
        let Some(copy) = object.entry else { return };
        for index in four.iter() {
            let old = folio.copies[index].take();
            old.into_iter().for_each(|old| self.store.invalidate(old, self.figures()));
        }
        folio.copies[four.span().start] = Some(copy);
        self.set_wide(folio, folio.wide | four);
        folio.telling = Telling::No;
        add(&self.figures().recompressed, four.count() as u64);
    }

    /// From now on these are a folio's wide units.
    pub(crate) fn set_wide(&self, folio: &mut Folio, wide: Units) {
        let (before, after) = (folio.wide.count() as u64, wide.count() as u64);
        folio.wide = wide;
        match after.checked_sub(before) {
            Some(0) => {}
            Some(more) => add(&self.figures().wide_units, more),
            None => subtract(&self.figures().wide_units, before - after),
        }
    }

    /// How many units have an object in the pool, at most: as if no wide unit were on the backing. With fewer the pool
    /// would seem to hold what does not shrink, and more would be written to the backing (`is_for_the_disk`).
    pub(crate) fn pooled_units(&self) -> u64 {
        let (objects, wide) = (self.store.pool_stats().objects, &self.figures().wide_units);
        // Each wide object holds three units more than others do.
        let more = WIDE_UNITS as u64 - 1;
        objects + more * objects.min(wide.load(Relaxed) / WIDE_UNITS as u64)
    }
}

#[cfg(test)]
impl Engine {
    /// Changes to the dense codec, and stores wide units with `codec` whatever is seen of their use, as long as the
    /// dense one is in use.
    pub(crate) fn use_wide_units(&self, codec: zfolio_core::zcomp::Zcomp) {
        self.work.used.is_forced.store(true, Relaxed);
        self.work.density.set_wide(self.add_codec(codec));
        self.work.density.use_dense(true);
    }
}
