//! The units of a slot, on their way into the store.

use zfolio_core::stats::add;
use zfolio_core::store::{self, Outcome};

use crate::engine::Engine;
use crate::folio::{Folio, UNITS_MAX, Units};
use crate::mover::Full;

/// What becomes one object each: wide units first, then single ones.
struct Batch<'a> {
    objects: [store::Outgoing<'a>; UNITS_MAX],
    /// The units of each object.
    units: [Units; UNITS_MAX],
    /// How many objects are wide ones.
    wide: usize,
    /// How many objects there are.
    len: usize,
}

impl<'a> Batch<'a> {
    fn objects(&mut self) -> &mut [store::Outgoing<'a>] {
        &mut self.objects[..self.len]
    }

    /// The wide ones, and the single ones.
    fn parts(&mut self) -> (&mut [store::Outgoing<'a>], &mut [store::Outgoing<'a>]) {
        self.objects[..self.len].split_at_mut(self.wide)
    }

    /// Each object with its units.
    fn each(&self) -> impl Iterator<Item = (&store::Outgoing<'a>, Units)> {
        self.objects[..self.len].iter().zip(self.units)
    }

    /// How many units have changed.
    fn changed(&self) -> usize {
        let changed = self.each().filter(|(object, _)| object.outcome == Outcome::Changed);
        changed.map(|(_, units)| units.count()).sum()
    }
}

impl Engine {
    /// Stores the units of a slot that differ from their copies, in one batch, and those whose copies
    /// are outdated; four units in `wide` as one object. Returns the units that are stored, one at least: all but
    /// unused zeros, which keep nothing. `None`: a changed unit was rejected, and keeps the copy that it had; all
    /// others are stored or unused zeros.
    pub(super) fn store(
        &self,
        slot: &Full,
        wide: Units,
        folio: &mut Folio,
        cpu: usize,
    ) -> Option<Units> {
        let units = slot.units();
        let mut batch = self.batch(slot, wide, folio);
        self.store.compare(batch.objects());
        let zeros = self.unused_zeros(&batch);
        if units == self.geometry().all() {
            self.work.reclaimer.zero_share.add(zeros.count(), units.count());
        }
        self.drop_zeros(batch.objects(), zeros);
        let dirty = batch.changed();
        self.work.reclaimer.dirty_share.add(dirty, units.count());
        let outdated = self.mark_outdated(batch.objects());
        let changed = dirty + outdated.count();
        let codec = self.codec_for(batch.objects(), changed, cpu);
        let began = self.now_ns();
        let (wide, single) = batch.parts();
        self.store.store(cpu, codec, single, self.figures());
        if !wide.is_empty() {
            let codec = self.work.density.wide().expect("units became wide");
            self.store.store(cpu, codec, wide, self.figures());
        }
        let took = self.now_ns().saturating_sub(began);
        self.copies.note_stored(units.count() - zeros.count() - dirty, changed, took);
        self.note_outcomes(folio, units, batch, (zeros, outdated))
    }

    /// What is to be stored of a slot.
    fn batch<'a>(&'a self, slot: &'a Full, wide: Units, folio: &mut Folio) -> Batch<'a> {
        let mut batch = Batch {
            objects: Default::default(),
            units: [Units::NONE; UNITS_MAX],
            wide: wide.objects(wide).count(),
            len: 0,
        };
        let single = slot.units() - wide;
        for object in wide.objects(wide).chain(single.objects(Units::NONE)) {
            let copy = folio.copies[object.start].take();
            batch.units[batch.len] = Units::from(object.clone());
            batch.objects[batch.len] = store::Outgoing::new(self.mover.part(slot, object), copy);
            batch.len += 1;
        }
        batch
    }

    /// Gives the folio the copies of its `units` back, and counts what became of them. `zeros` and `outdated` are
    /// places in the batch. Returns what [`Engine::store`] returns.
    fn note_outcomes(
        &self,
        folio: &mut Folio,
        units: Units,
        batch: Batch<'_>,
        (zeros, outdated): (Units, Units),
    ) -> Option<Units> {
        let figures = self.figures();
        let (mut all, mut stored, mut wide) = (true, units, folio.wide - units);
        let objects = batch.objects.into_iter().zip(batch.units).take(batch.len);
        for (place, (object, of)) in objects.enumerate() {
            if place < batch.wide && object.entry.is_some() {
                wide |= of;
            }
            folio.copies[of.span().start] = object.entry;
            if zeros.contains(place) {
                stored -= of;
            }
            let counter = match object.outcome {
                // If there was no memory for a better copy, the old one is still good.
                Outcome::Rejected(_) if outdated.contains(place) => &figures.reclaim_clean,
                Outcome::Compressed if outdated.contains(place) => &figures.recompressed,
                Outcome::Clean => &figures.reclaim_clean,
                Outcome::SameFilled => &figures.reclaim_same_filled,
                Outcome::Compressed => &figures.reclaim_compressed,
                Outcome::Incompressible => &figures.reclaim_incompressible,
                _ => {
                    all = false;
                    continue;
                }
            };
            add(counter, of.count() as u64);
        }
        self.set_wide(folio, wide);
        all.then_some(stored)
    }

    /// The places in a batch of the units that are zeros and were probably never touched: all units of zeros, if these
    /// are most of the batch and not all of it. Where a batch is zeros alone the program wrote or read them, and needs
    /// them. Where zeros are few they stay stored, so that the folio comes back as a whole, the zeros at no cost.
    fn unused_zeros(&self, batch: &Batch<'_>) -> Units {
        let zeros = batch.each().enumerate().filter(|(_, (object, _))| object.is_zeros());
        let zeros: Units = zeros.map(|(place, _)| Units::one(place)).collect();
        let units: usize = batch.each().map(|(_, units)| units.count()).sum();
        let is_most = (units / 2 + 1..units).contains(&zeros.count());
        if is_most { zeros } else { Units::NONE }
    }

    /// Drops the copies of the units at these places in a batch, which are zeros now. Nothing else need be kept of
    /// them, since an empty unit reads as zeros.
    fn drop_zeros(&self, batch: &mut [store::Outgoing<'_>], zeros: Units) {
        for place in zeros.iter() {
            let unit = &mut batch[place];
            let copy = unit.entry.take();
            copy.into_iter().for_each(|copy| self.store.invalidate(copy, self.figures()));
            unit.outcome = Outcome::SameFilled;
        }
    }
}
