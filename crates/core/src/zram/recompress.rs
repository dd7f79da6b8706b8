//! Recompression: units that are not used, or do not shrink, are tried with a denser algorithm.
//!
//! A unit is decompressed and compressed again under its slot's lock. The new object replaces the old one only if it is
//! smaller; if it is not, the slot has a note that algorithms up to this priority need not be tried again. With a
//! [threshold](Recompression::threshold) it replaces the old one only if it is below that, too; one that is smaller and
//! not below leaves no note, since another threshold may take it. What is written later is compressed by the first
//! algorithm again.
//!
//! That is done when it is asked for ([`Zram::recompress`]), and by itself for what was not used for long
//! ([`Zram::recompress_old`], which the device's owner calls now and then).
//!
//! A unit that was tried on request is no longer marked idle, as in the kernel: else one mark would have it
//! recompressed, and then written back. What the device does by itself leaves the marks: they are for the next request.

use std::sync::atomic::Ordering::Relaxed;

use super::slot::Slot;
use super::table::UNITS_MAX;
use super::{Error, Zram};
use crate::store::{CodecId, Form, Outcome, Outgoing, Reject};
use crate::zsmalloc::PageSource;

/// Which units are tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum What {
    /// All.
    #[default]
    All,
    /// Those that are marked idle.
    Idle,
    /// Those that did not shrink.
    Huge,
    /// Those that are both.
    HugeIdle,
}

/// What [`Zram::recompress`] is to do; the kernel's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recompression {
    /// Which units.
    pub what: What,
    /// Only units whose objects have so many bytes at least, and only new objects that have fewer; 0: all.
    pub threshold: usize,
    /// How many units are tried at most.
    pub max_pages: u64,
    /// The algorithm, by its place among the device's; 1 to 3.
    pub priority: usize,
}

impl Default for Recompression {
    fn default() -> Self {
        Recompression { what: What::All, threshold: 0, max_pages: u64::MAX, priority: 1 }
    }
}

/// What [`Zram::recompress`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recompressed {
    /// Units that were tried.
    pub tried: u64,
    /// Units that are smaller now.
    pub shrank: u64,
    /// By how many bytes all of them together.
    pub bytes_saved: u64,
}

/// How many slots [`Zram::recompress_old`] looks at in one call: 0.1 ms.
const LOOKS_MAX: usize = 4096;

/// What [`Zram::recompress_old`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Turn {
    /// What it did.
    pub done: Recompressed,
    /// It has come to the end of the disk, and begins anew with the next call.
    pub is_round: bool,
    /// What failed first: [`Error::Lost`], a unit that cannot be read (the others were tried), or
    /// [`Error::NoMemory`], after which no more were tried. The next call goes on behind that unit.
    pub error: Option<Error>,
}

impl<S: PageSource> Zram<S> {
    /// Recompresses units that were not used for so many seconds with the algorithm of priority 1, `most` units at a
    /// time: goes on where the last call stopped. A unit that no denser algorithm shrinks is not tried again.
    pub fn recompress_old(&self, cpu: usize, age_s: u32, most: u64) -> Turn {
        let (now, first) = (self.now_s.load(Relaxed), self.hand.load(Relaxed));
        let mut turn = Turn::default();
        let Some(codec) = CodecId::new(1).filter(|_| self.codecs().count() > 1) else {
            return Turn { is_round: true, ..turn };
        };
        let request = Recompression::default();
        for (unit, lock) in self.table.slots(first, UNITS_MAX).take(LOOKS_MAX) {
            if turn.done.tried >= most {
                return turn;
            }
            self.hand.store(unit + 1, Relaxed);
            let mut slot = lock.lock();
            if now.saturating_sub(slot.used_s()) < age_s || !self.is_wanted(&slot, request, codec) {
                continue;
            }
            if let Err(error) = self.try_one(cpu, unit, &mut slot, (codec, 0), &mut turn.done) {
                turn.error = turn.error.or(Some(error));
                if matches!(error, Error::NoMemory) {
                    return turn;
                }
            }
        }
        turn.is_round = self.table.slots(self.hand.load(Relaxed), UNITS_MAX).next().is_none();
        if turn.is_round {
            self.hand.store(0, Relaxed);
        }
        turn
    }

    /// Marks units in memory idle until they are used again, recompressed on request ([`Zram::recompress`]) or written
    /// back: all of them, or those that were last used so many seconds ago. Not those of one word, as in Linux: nothing
    /// can be done with them, neither recompression nor writeback.
    pub fn mark_idle(&self, age_s: Option<u32>) {
        let now = self.now_s.load(Relaxed);
        for (_, lock) in self.table.slots(0, UNITS_MAX) {
            let mut slot = lock.lock();
            let is_old = age_s.is_none_or(|age_s| now.saturating_sub(slot.used_s()) >= age_s);
            let has_object = |entry| self.store.form(entry) != Form::SameFilled;
            let is_markable = slot.is_apart() || self.entry_here(&slot).is_some_and(has_object);
            if is_markable && is_old {
                slot.mark_idle();
            }
        }
    }

    /// Compresses units again, with the algorithm of a higher priority.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the first unit that could not be read; all others were tried. [`Error::NoMemory`]: there is
    /// none for a second copy of a unit. What was done until then stays done.
    ///
    /// # Panics
    ///
    /// If the device has no algorithm of this priority, or it is 0.
    pub fn recompress(&self, cpu: usize, request: Recompression) -> Result<Recompressed, Error> {
        let count = self.codecs().count();
        let codec =
            CodecId::new(request.priority).filter(|codec| (1..count).contains(&codec.get()));
        let codec = codec.expect("the device has an algorithm of this priority");
        let (mut done, mut lost) = (Recompressed::default(), None);
        for (unit, lock) in self.table.slots(0, UNITS_MAX) {
            if done.tried >= request.max_pages || self.is_halted.load(Relaxed) {
                break;
            }
            let mut slot = lock.lock();
            self.join_if_here(cpu, unit, &mut slot);
            if !self.is_wanted(&slot, request, codec) {
                continue;
            }
            let way = (codec, request.threshold);
            match self.try_one(cpu, unit, &mut slot, way, &mut done) {
                Err(error @ Error::Lost { .. }) => lost = lost.or(Some(error)),
                Err(error) => return Err(error),
                Ok(()) => slot.end_idle(),
            }
        }
        lost.map_or(Ok(done), Err)
    }

    /// Tries a unit with a codec and a threshold, and counts it.
    fn try_one(
        &self,
        cpu: usize,
        unit: u64,
        slot: &mut Slot,
        (codec, threshold): (CodecId, usize),
        done: &mut Recompressed,
    ) -> Result<(), Error> {
        done.tried += 1;
        let saved = self.recompress_one(cpu, unit, slot, codec, threshold)?;
        let Some(saved) = saved else { return Ok(()) };
        done.shrank += u64::from(saved > 0);
        done.bytes_saved += saved;
        if saved == 0 && self.entry_here(slot).is_some() {
            let is_last = codec.get() + 1 == self.codecs().count();
            if is_last { slot.note_no_codec() } else { slot.note_failed(codec.get()) }
        }
        Ok(())
    }

    fn is_wanted(&self, slot: &Slot, request: Recompression, codec: CodecId) -> bool {
        let Some(entry) = self.entry_here(slot) else { return false };
        let (form, idle) = (self.store.form(entry), slot.is_idle());
        let is_huge = matches!(form, Form::Incompressible(_));
        let is_asked = match request.what {
            What::All => true,
            What::Idle => idle,
            What::Huge => is_huge,
            What::HugeIdle => is_huge && idle,
        };
        let has_failed = slot.has_failed(codec.get());
        let was_tried = match form {
            Form::SameFilled => true,
            Form::Incompressible(_) => has_failed,
            Form::Compressed(by) => by.get() >= codec.get() || has_failed,
        };
        is_asked && !was_tried && self.store.object_bytes(entry) >= request.threshold
    }

    /// Bytes that this saved. `None`: the codec has failed, the unit is away, or the new object is smaller, but not
    /// below the threshold.
    fn recompress_one(
        &self,
        cpu: usize,
        unit: u64,
        slot: &mut Slot,
        codec: CodecId,
        threshold: usize,
    ) -> Result<Option<u64>, Error> {
        // Without a look at the limit, which one unit passes for a moment: this is what makes room below it.
        let mut scratch = self.scratch(cpu);
        match self.fill(cpu, slot, &mut scratch) {
            Ok(None) => {}
            // It has left since the look of is_wanted(), and takes no memory where it is.
            Ok(Some(_)) => return Ok(None),
            Err(error) => return Err(Error::Lost { unit, error }),
        }
        let mut outgoing = [Outgoing::new(&scratch.bytes, None)];
        self.store.store(cpu, codec, &mut outgoing, &self.figures);
        let Some(new) = outgoing[0].entry.take() else {
            return match outgoing[0].outcome {
                // The old object is as good as before.
                Outcome::Rejected(Reject::CompressFail) => Ok(None),
                _ => Err(Error::NoMemory),
            };
        };
        let Some(old) = slot.entry.take() else { unreachable!("is_wanted() has seen an entry") };
        let [before, after] = [&old, &new].map(|entry| self.store.object_bytes(entry));
        let is_below = threshold == 0 || after < threshold;
        let (kept, gone) = if after < before && is_below { (new, old) } else { (old, new) };
        slot.entry = Some(kept);
        self.store.invalidate(gone, &self.figures);
        Ok((is_below || after >= before).then(|| before.saturating_sub(after) as u64))
    }
}
