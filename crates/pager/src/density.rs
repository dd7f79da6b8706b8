//! Which of two codecs a unit is stored with: the fast one, or the dense one that shrinks it more.
//!
//! The dense codec costs time at each store and each load; what it saves is pool memory, and so
//! much more of the program stays resident. With `--algorithm auto` the store has both codecs, and
//! every 256 loads the engine compares:
//!
//! ```text
//! gain   loads saved * (time waited for one + time to reclaim a unit), with the fast codec
//! cost   loads with the dense codec * (time to decompress, dense - fast)
//!        + units compressed with it * (time to compress, dense - fast) * share waited for
//! ```
//!
//! Both are of the same bytes, what the dense codec takes less for all that is stored. How they are compared,
//! and how often before the codec changes, is the rule of [`zfolio_core::economy`].
//!
//! The background thread compresses while the program runs. As long as it keeps up, the share that is
//! waited for is 0 (`reclaim/busy.rs`).
//!
//! A load is **saved** if the unit would still be resident with as much more memory as the dense
//! codec takes less for all that is stored: fewer bytes have gone out after the unit than that
//! memory would have kept. With the fast codec in use, the dense one would have all loads but these;
//! with the dense one in use, the fast one is taken to have as many more.
//!
//! Sizes and times are measured on some of the units that go out: each of these is compressed and
//! decompressed by both codecs ([`Samples::measure`]).
//!
//! When the other codec pays, it takes over: for all units that are compressed from then on, for
//! clean units that go out (their copy is replaced), and, if it is the dense one, step by step for
//! everything stored ([`Engine::densify`]).
//!
//! While memory goes out that the program does not use (`--stall`), the dense codec stays in use: few
//! units come back, and how small they are is what counts.
//!
//! Another process may ask for an algorithm (`zfolio set`). Then units are stored with that one until another is asked
//! for, or `auto` again; and what is stored keeps its codec until it is stored again, as an old pool of zswap drains. A
//! codec that was not set up at the start is set up then, by the background thread.
//!
//! # Invariants
//!
//! - `DENS-1` A unit is repacked under its folio's lock, and its old copy is dropped only after the
//!   new one is stored.
//!
//! # Concurrency
//!
//! One mutex around the samples and the buffers for sampling and repacking. Who measures a sample
//! or reviews only tries it, since that may be a thread that serves a fault. A fault waits for it only
//! to repack, where it would pass the limit otherwise.
//!
//! # Cost
//!
//! Sampling takes about a 30th of the time that compression takes with the fast codec. With one
//! codec: one comparison for each batch that is stored.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use zfolio_core::economy::{Switch, Verdict, Worth};
use zfolio_core::ledger::signed;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::add;
use zfolio_core::store::{CodecId, Form, Outcome, Outgoing, Store};
use zfolio_core::sync::{Guard, Mutex};
use zfolio_core::zcomp::asked::{self, Refused};
use zfolio_core::zcomp::{self, Choice, Zcomp};
use zfolio_core::zsmalloc::PageSource;

use crate::copies::{REVIEW_LOADS, Span, kept_bytes};
use crate::engine::Engine;
use crate::folio::{Folio, Table, Units};
use crate::rank;
use crate::reclaim::busy::ALL;

/// The codecs of a store that has two.
const FAST: CodecId = CodecId::FIRST;
const DENSE: CodecId = CodecId::SECOND;

/// Before a change to the dense codec the reviews must also cover so many loads: one for every 16 stored
/// units, because all of these are repacked after the change.
const REPACK_SHARE: u64 = 16;

/// Of the first units that are compressed one in 8 is a sample, later one in 512.
const SAMPLE_OFTEN: u64 = 8;
const SAMPLE_SELDOM: u64 = 512;

/// No review before there are so many samples.
const SAMPLES_MIN: u64 = 8;

/// Sums are halved when they have so many samples: the mean is that of the last 64 to 128.
const SAMPLES_MAX: u64 = 128;

/// One measurement counts for so many times the mean at most.
const OUTLIER_TIMES: u64 = 8;

/// How long one turn of [`Engine::densify`] takes.
const TURN_NS: u64 = 4_000_000;

/// How many folios without anything stored are passed over at a time.
const LOOKS: usize = 256;

/// The hand is here when nothing is left to be repacked.
const DONE: usize = usize::MAX;

/// Sums over the samples, for one codec.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Sums {
    pub(crate) bytes: u64,
    pub(crate) compress_ns: u64,
    pub(crate) decompress_ns: u64,
}

impl Sums {
    fn halve(&mut self) {
        *self = Sums {
            bytes: self.bytes / 2,
            compress_ns: self.compress_ns / 2,
            decompress_ns: self.decompress_ns / 2,
        };
    }
}

/// What was measured, and where.
#[derive(Debug)]
pub(crate) struct Samples {
    count: u64,
    /// Of the fast codec, of the dense one.
    sums: [Sums; 2],
    packed: Vec<u8>,
    /// Room for a unit, or a wide one.
    unit: Box<[u8]>,
    /// The unit that was measured last.
    last: Box<[u8]>,
}

/// What is stored, for a review.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    /// Units that are stored and not resident, without same-filled ones.
    pub(crate) units: u64,
    pub(crate) unit_bytes: u64,
    /// What they take in the pool.
    pub(crate) bytes: u64,
    /// Whether the dense codec is in use. The codec in use is taken to have made all of them, although
    /// after a change the other one made some.
    pub(crate) is_dense: bool,
}

#[cfg(test)]
impl Samples {
    /// Enough samples of units that all need this with the two codecs.
    pub(crate) fn of(sums: [Sums; 2]) -> Samples {
        let sums = sums.map(|one| Sums {
            bytes: one.bytes * SAMPLES_MIN,
            compress_ns: one.compress_ns * SAMPLES_MIN,
            decompress_ns: one.decompress_ns * SAMPLES_MIN,
        });
        Samples { count: SAMPLES_MIN, sums, packed: vec![], unit: [].into(), last: [].into() }
    }
}

impl Samples {
    /// What the dense codec gains and what it costs, given that it is in use or not. `None`: nothing is
    /// known yet.
    fn gain_and_cost(&self, is_dense: bool, span: &Span) -> Option<[u64; 2]> {
        if self.count < SAMPLES_MIN {
            return None;
        }
        let [fast, dense] = self.sums;
        let more = |dense: u64, fast: u64| dense.saturating_sub(fast) / self.count;
        let load_ns = more(dense.decompress_ns, fast.decompress_ns);
        let left = if is_dense { span.loads } else { span.loads - span.saved };
        let compress_ns = more(dense.compress_ns, fast.compress_ns);
        let waited = span.lately.dense_share(is_dense, compress_ns, (left, span.loads));
        let store_ns = compress_ns * waited / ALL;
        let cost = |loads: u64, stores: u64| loads * load_ns + stores * store_ns;
        Some(if is_dense {
            let refault_ns = span.refault_ns.saturating_sub(load_ns + store_ns);
            // A wide unit took one wait, and with the fast codec each of its units would take one.
            [(span.saved + span.together) * refault_ns, cost(left, span.compressed)]
        } else {
            let stores = span.compressed.saturating_sub(span.saved);
            let together = span.together.min(left);
            [(span.saved + together) * span.refault_ns, cost(left, stores)]
        })
    }

    /// Whether the dense codec pays, given that it is in use or not. `None`: nothing is known yet.
    fn verdict(&self, is_dense: bool, span: &Span) -> Option<Verdict> {
        // Both are of the same bytes.
        let worths = self.gain_and_cost(is_dense, span)?;
        let [gain, cost] = worths.map(|saved_ns| Worth { saved_ns, bytes: 1 });
        Some(gain.against(cost))
    }

    /// What the dense codec saves less what it costs, in nanoseconds, and the bytes that it takes less.
    /// `None`: nothing is known yet.
    fn balance(&self, stored: Stored, span: &Span) -> Option<(i64, u64)> {
        let [gain, cost] = self.gain_and_cost(stored.is_dense, span)?.map(signed);
        let [fast, dense] = self.stored_bytes(stored);
        Some((gain - cost, fast.saturating_sub(dense)))
    }

    /// Loads of units that went out less than so many bytes before would be saved by the dense
    /// codec.
    fn saved_bytes(&self, stored: Stored) -> u64 {
        let [fast, dense] = self.stored_bytes(stored);
        kept_bytes(fast.saturating_sub(dense), stored.unit_bytes, dense / stored.units.max(1))
    }

    /// So many loads in a row may be saved by the dense codec and none after them: the units that its memory keeps
    /// resident come back once. (`usemem` at half of its need has 8000 to 12,000 in the middle of its increments, and
    /// then none for 250,000.)
    fn once(&self, stored: Stored) -> u64 {
        self.saved_bytes(stored) / stored.unit_bytes
    }

    /// Whether what is stored would take more than `most` bytes with the fast codec, and noticeably
    /// less with the dense one.
    fn is_large(&self, stored: Stored, most: u64) -> bool {
        let [fast, dense] = self.stored_bytes(stored);
        self.count >= SAMPLES_MIN && fast > most && dense < fast - fast / 16
    }

    /// Whether what is stored would take most of the limit with the fast codec: 13/16, so that there is
    /// time to change before reclaim stops at its floor, an eighth of the limit. The dense codec makes
    /// units resident, so that fewer are stored: with it in use, half of the limit is most.
    pub(crate) fn fills(&self, stored: Stored, limit_bytes: u64) -> bool {
        let sixteenths = if stored.is_dense { 8 } else { 13 };
        self.is_large(stored, limit_bytes / 16 * sixteenths)
    }

    /// Whether units take more than 3/4 of their size with the dense codec.
    fn hardly_shrink(&self, unit_bytes: u64) -> bool {
        4 * self.sums[1].bytes > 3 * self.count * unit_bytes
    }

    /// What all that is stored takes, or would take, with the fast codec and with the dense one.
    fn stored_bytes(&self, stored: Stored) -> [u64; 2] {
        let in_use = self.sums[usize::from(stored.is_dense)].bytes.max(1);
        self.sums.map(|sums| {
            let bytes = u128::from(stored.bytes) * u128::from(sums.bytes) / u128::from(in_use);
            u64::try_from(bytes).unwrap_or(u64::MAX)
        })
    }

    fn note(&mut self, measured: [Sums; 2]) {
        if self.count == SAMPLES_MAX {
            self.count /= 2;
            self.sums.iter_mut().for_each(Sums::halve);
        }
        self.count += 1;
        let before = self.count - 1;
        // The measuring thread may lose its CPU for longer than all other measurements took together. The first ones
        // are bounded by those that come after them.
        let with = |sum: u64, took: u64| {
            let most = OUTLIER_TIMES * before * took.max(1);
            let sum = if before < SAMPLES_MIN { sum.min(most) } else { sum };
            let mean = sum.checked_div(before).map_or(took, |mean| mean.max(1));
            sum + took.min(OUTLIER_TIMES * mean)
        };
        for (sums, one) in self.sums.iter_mut().zip(measured) {
            sums.bytes += one.bytes;
            sums.compress_ns = with(sums.compress_ns, one.compress_ns);
            sums.decompress_ns = with(sums.decompress_ns, one.decompress_ns);
        }
    }

    /// Compresses and decompresses a unit with each codec of `store`.
    ///
    /// A codec that is not in use finds neither its code nor its tables in the CPU's caches, and takes
    /// twice as long as one that is. So each codec first does the unit of the last sample.
    fn measure(
        &mut self,
        store: &Store<Arc<dyn PageSource>>,
        bytes: &[u8],
        (cpu, now_ns): (usize, &dyn Fn() -> u64),
    ) {
        let Samples { packed, unit, last, .. } = self;
        let unit = &mut unit[..bytes.len()];
        let measured = [FAST, DENSE].map(|codec| {
            let zcomp = store.codec(codec);
            round_trip(zcomp, last, (packed, unit), (cpu, now_ns));
            round_trip(zcomp, bytes, (packed, unit), (cpu, now_ns))
        });
        last.copy_from_slice(bytes);
        self.note(measured);
    }
}

/// Compresses a unit to `packed`, and decompresses that to `unit`.
fn round_trip(
    zcomp: &Zcomp,
    bytes: &[u8],
    (packed, unit): (&mut Vec<u8>, &mut [u8]),
    (cpu, now_ns): (usize, &dyn Fn() -> u64),
) -> Sums {
    let mut shrank = false;
    let began = now_ns();
    zcomp.compress(cpu, &[bytes], &mut |elements| {
        for element in elements {
            if let zcomp::Outcome::Compressed(object) = element.outcome {
                packed.clear();
                packed.extend_from_slice(object);
                shrank = true;
            }
        }
    });
    let compressed = now_ns();
    // What does not shrink is copied when it is loaded.
    if shrank {
        let _same = zcomp.decompress(cpu, packed, unit);
    } else {
        unit.copy_from_slice(bytes);
    }
    Sums {
        bytes: if shrank { packed.len() } else { bytes.len() } as u64,
        compress_ns: compressed.saturating_sub(began),
        decompress_ns: now_ns().saturating_sub(compressed),
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Density {
    /// With one codec there is nothing to choose.
    samples: Option<Mutex<{ rank::DENSITY }, Samples>>,
    /// There may be wide units.
    may_widen: bool,
    /// Most units hardly shrink: there is nothing to gain by larger ones.
    hardly_shrinks: AtomicBool,
    /// The dense codec again, for wide units (`wide.rs`): its number plus 2. 0: not set up yet; 1: it cannot be.
    wide: AtomicUsize,
    /// On while the dense codec is in use.
    switch: Switch,
    /// The dense codec stays in use: memory goes out that is not used, and its size is what counts.
    stays_dense: AtomicBool,
    /// At how many compressed units the next sample is due.
    sample_at: AtomicU64,
    /// Where [`Engine::densify`] goes on; [`DONE`] if there is nothing to do.
    hand: AtomicUsize,
    /// The number of the codec that another process has asked for, plus 1; 0: none.
    pinned: AtomicUsize,
}

impl Density {
    /// For a store with this many codecs, units of this size, and objects of at most that one.
    pub(crate) fn new(codecs: usize, (unit, object_max): (UnitOrder, UnitOrder)) -> Density {
        let samples = || Samples {
            count: 0,
            sums: [Sums::default(); 2],
            packed: Vec::with_capacity(unit.bytes()),
            unit: vec![0; object_max.bytes()].into_boxed_slice(),
            last: vec![0; unit.bytes()].into_boxed_slice(),
        };
        Density {
            samples: (codecs > 1).then(|| Mutex::new(samples())),
            may_widen: object_max > unit,
            hardly_shrinks: AtomicBool::new(false),
            wide: AtomicUsize::new(0),
            switch: Switch::default(),
            stays_dense: AtomicBool::new(false),
            sample_at: AtomicU64::new(0),
            hand: AtomicUsize::new(DONE),
            pinned: AtomicUsize::new(0),
        }
    }

    /// The codec that was asked for.
    fn pinned(&self) -> Option<CodecId> {
        // Acquire: pairs with the Release in pin(). Who sees the number sees the codec.
        self.pinned.load(Acquire).checked_sub(1).and_then(CodecId::new)
    }

    /// From now on units are stored with this codec, and what is stored already stays as it is; or, again, with the one
    /// that pays.
    pub(crate) fn pin(&self, codec: Option<CodecId>) {
        // Release: pairs with the Acquire in pinned().
        self.pinned.store(codec.map_or(0, |codec| codec.get() + 1), Release);
        // Nothing is repacked meanwhile; afterwards what the fast codec made is.
        self.use_dense(self.is_dense());
    }

    pub(crate) fn is_dense(&self) -> bool {
        self.switch.is_on()
    }

    /// Whether there may be wide units at some time.
    pub(crate) fn may_widen(&self) -> bool {
        self.may_widen
    }

    /// Whether units may become wide now: the dense codec is in use, because it pays, and they shrink.
    pub(crate) fn widens(&self) -> bool {
        let is_dense = self.is_dense() && self.pinned().is_none();
        is_dense && self.wide().is_some() && !self.hardly_shrinks.load(Relaxed)
    }

    /// The codec for wide units.
    pub(crate) fn wide(&self) -> Option<CodecId> {
        // Acquire: pairs with the Release in set_wide(). Who sees the number sees the codec.
        self.wide.load(Acquire).checked_sub(2).and_then(CodecId::new)
    }

    /// Whether the codec for wide units is to be set up.
    pub(crate) fn wants_wide(&self) -> bool {
        self.may_widen && self.is_dense() && self.wide.load(Relaxed) == 0
    }

    /// From now on there is a codec for wide units, or never.
    pub(crate) fn set_wide(&self, codec: Option<CodecId>) {
        // Release: pairs with the Acquire in wide().
        self.wide.store(codec.map_or(1, |codec| codec.get() + 2), Release);
    }

    /// The codec for units that are compressed now.
    fn codec(&self) -> CodecId {
        match self.pinned() {
            Some(codec) => codec,
            None if self.is_dense() => DENSE,
            None => FAST,
        }
    }

    /// Whether a unit in this form should be stored again, by the codec in use.
    fn is_outdated(&self, form: Form) -> bool {
        if self.pinned().is_some() {
            return false;
        }
        match (form, self.codec()) {
            // The dense codec may shrink what the fast one could not.
            (Form::Compressed(FAST) | Form::Incompressible(FAST), DENSE) => true,
            (Form::Compressed(DENSE), FAST) => true,
            _ => false,
        }
    }

    /// Whether a unit that is compressed now should be a sample, if so many were `compressed` before.
    fn is_due(&self, compressed: u64) -> bool {
        let is_due = self.has_choice()
            && self.pinned().is_none()
            && compressed >= self.sample_at.load(Relaxed);
        if is_due {
            let every = (compressed / 16).clamp(SAMPLE_OFTEN, SAMPLE_SELDOM);
            self.sample_at.store(compressed + every, Relaxed);
        }
        is_due
    }

    /// In a child of `fork`: the walk is the parent's. It would rewrite what both still share.
    pub(crate) fn end_walk(&self) {
        self.hand.store(DONE, Relaxed);
    }

    /// Bytes of the buffers.
    pub(crate) fn memory_bytes(&self, unit: UnitOrder, object_max: UnitOrder) -> usize {
        if self.has_choice() { 2 * unit.bytes() + object_max.bytes() } else { 0 }
    }

    /// Whether there are two codecs to choose from.
    pub(crate) fn has_choice(&self) -> bool {
        self.samples.is_some()
    }

    /// The samples, if there are two codecs and no other thread has the samples.
    fn try_samples(&self) -> Option<Guard<'_, { rank::DENSITY }, Samples>> {
        self.samples.as_ref()?.try_lock()
    }

    /// From now on the dense codec stays in use, or no longer.
    pub(crate) fn keep_dense(&self, stays: bool) {
        self.stays_dense.store(stays, Relaxed);
        if stays && self.has_choice() && !self.is_dense() {
            self.use_dense(true);
        }
    }

    /// Changes over to a codec.
    pub(crate) fn use_dense(&self, dense: bool) {
        self.switch.set(dense);
        let repacks = dense && self.pinned().is_none();
        self.hand.store(if repacks { 0 } else { DONE }, Relaxed);
    }

    /// Notes what a review found: whether the dense codec pays. Before a change to it reviews cover so many `loads`.
    fn vote(&self, pays: bool, loads: u64) {
        let pays = pays || self.stays_dense.load(Relaxed);
        if self.switch.vote(pays, loads / REVIEW_LOADS) {
            self.use_dense(pays);
        }
    }

    /// Compares the codecs by what the last loads cost. Returns the distance within which the dense codec
    /// would save a load.
    pub(crate) fn review(
        &self,
        samples: &Samples,
        stored: Stored,
        span: &Span,
        limit_bytes: u64,
    ) -> u64 {
        if let Some(verdict) = samples.verdict(stored.is_dense, span) {
            let pays = self.switch.wants_on(verdict) || samples.fills(stored, limit_bytes);
            self.vote(pays, (stored.units / REPACK_SHARE).max(samples.once(stored)));
        }
        samples.saved_bytes(stored)
    }
}

impl Engine {
    fn stored(&self) -> Stored {
        let (pool, copies) = (self.store.pool_stats(), self.copies.count() as u64);
        let all = self.pooled_units();
        let units = all.saturating_sub(copies);
        Stored {
            units,
            unit_bytes: self.geometry().unit_bytes() as u64,
            bytes: pool.bytes_stored / all.max(1) * units,
            is_dense: self.work.density.is_dense(),
        }
    }

    /// The codec for a batch of which `changed` units are compressed. One of them may be measured.
    pub(crate) fn codec_for(&self, units: &[Outgoing<'_>], changed: usize, cpu: usize) -> CodecId {
        let density = &self.work.density;
        if changed > 0 && density.is_due(self.work.reclaimer.busy.note_compressed(changed)) {
            // Same-filled units go to no codec.
            let packed =
                |unit: &&Outgoing<'_>| unit.outcome == Outcome::Changed && !unit.is_same_filled();
            let chosen = units.iter().rfind(packed);
            if let Some((unit, mut samples)) = chosen.zip(density.try_samples()) {
                // Of a wide unit the first page.
                let bytes = &unit.bytes[..self.geometry().unit_bytes()];
                samples.measure(&self.store, bytes, (cpu, &|| self.now_ns()));
                density.hardly_shrinks.store(samples.hardly_shrink(bytes.len() as u64), Relaxed);
            }
        }
        density.codec()
    }

    /// Marks as changed the clean units of a batch whose copy is outdated: made by the codec that is
    /// not in use. Returns their places in the batch.
    pub(crate) fn mark_outdated(&self, units: &mut [Outgoing<'_>]) -> Units {
        let mut marked = Units::NONE;
        let density = &self.work.density;
        if !density.has_choice() {
            return marked;
        }
        for (place, unit) in units.iter_mut().enumerate() {
            let copy = unit.entry.as_ref().filter(|_| unit.outcome == Outcome::Clean);
            let is_outdated = |copy| density.is_outdated(self.store.form(copy));
            // On the backing a copy takes no memory, and stays as it is.
            if copy.is_some_and(|copy| is_outdated(copy) && self.store.away(copy).is_none()) {
                unit.outcome = Outcome::Changed;
                marked |= Units::one(place);
            }
        }
        marked
    }

    /// Does what the word of another process asks for: another algorithm for units that are stored from now on. Called
    /// by the background thread, without a lock: a codec that is new takes memory for its streams.
    pub(crate) fn follow_algorithm(&self, word: u64) {
        let choice = asked::from_word(word).ok_or(Refused::SetUp);
        let done = choice.and_then(|choice| {
            self.use_algorithm(&choice)?;
            self.stats().rename_algorithm(&choice.to_string());
            Ok(())
        });
        self.stats().algorithm_answer.store(asked::answer(word, done.err()), Relaxed);
    }

    fn use_algorithm(&self, choice: &Choice) -> Result<(), Refused> {
        let density = &self.work.density;
        let params = match choice {
            Choice::Fixed(params) => params,
            Choice::Auto if density.has_choice() => {
                density.pin(None);
                return Ok(());
            }
            Choice::Auto => return Err(Refused::Auto),
        };
        let unit = self.config().unit;
        let is_it = |codec: &Zcomp| {
            codec.unit() == unit && codec.params().is_some_and(|its| asked::is_same(its, params))
        };
        let known = self.store.codecs().find(|(_, codec)| is_it(codec)).map(|(id, _)| id);
        let id = match known {
            Some(id) => id,
            None => {
                let (config, work) = (self.config(), &self.work);
                let codec = config.accelerated.zcomp(
                    params.clone(),
                    config.unit,
                    work.cpus.max(2),
                    &work.crew,
                );
                self.add_codec(codec.map_err(|_| Refused::SetUp)?).ok_or(Refused::Full)?
            }
        };
        density.pin(Some(id));
        Ok(())
    }

    /// Adds a codec to the store. `None`: it has too many.
    pub(crate) fn add_codec(&self, codec: Zcomp) -> Option<CodecId> {
        // Held, so that nobody forks meanwhile.
        let _table = self.table.read();
        let id = self.store.add_codec(codec)?;
        self.measure_streams();
        Some(id)
    }

    /// Compares the codecs, every 256 loads.
    pub(crate) fn review_density(&self, span: &Span) {
        let density = &self.work.density;
        let Some(samples) = density.try_samples() else { return };
        self.copies.set_saved(density.review(&samples, self.stored(), span, self.limit_bytes()));
    }

    /// What the dense codec would save with the last loads less what it would cost, in nanoseconds, and the
    /// bytes that it takes less. `None`: nothing is known.
    pub(crate) fn dense_balance(&self, span: &Span) -> Option<(i64, u64)> {
        if self.work.density.pinned().is_some() {
            return None;
        }
        self.work.density.try_samples()?.balance(self.stored(), span)
    }

    /// Uses the dense codec at once if the pool takes most of the memory, whatever loads cost: a
    /// program that only writes has no loads. Called by the background thread.
    ///
    /// The table's guard proves that no fork is under way (`ENG-4`).
    pub(crate) fn bound_density(&self, _table: &Table) {
        let density = &self.work.density;
        let Some(samples) = density.try_samples() else { return };
        let stored = self.stored();
        if density.pinned().is_some() {
            return self.figures().dense.store(0, Relaxed);
        }
        if !stored.is_dense && samples.fills(stored, self.limit_bytes()) {
            density.use_dense(true);
        }
        self.figures().dense.store(u64::from(density.is_dense()), Relaxed);
    }

    /// Repacks some of the stored units that the fast codec compressed, while the dense one is in
    /// use.
    pub(crate) fn densify(&self) {
        let began = self.now_ns();
        while self.is_densifying() && !self.work.stopping.load(Relaxed) {
            // Taken anew for each folio, so that a change of a mapping waits for one folio at most.
            self.densify_next(&self.table.read());
            if self.now_ns().saturating_sub(began) > TURN_NS {
                return;
            }
        }
    }

    /// Repacks one more folio, for a thread that would pass the limit otherwise. False: there is nothing
    /// to repack.
    pub(crate) fn densify_one(&self, table: &Table) -> bool {
        let is_densifying = self.is_densifying();
        if is_densifying {
            self.densify_next(table);
        }
        is_densifying
    }

    fn is_densifying(&self) -> bool {
        self.work.density.hand.load(Relaxed) != DONE && !self.work.settling.load(Relaxed)
    }

    /// Repacks the next folio that has something stored, if it is among the next few.
    fn densify_next(&self, table: &Table) {
        let hand = &self.work.density.hand;
        let start = hand.load(Relaxed);
        // If a change of codecs has moved the hand meanwhile, it stays there.
        let go_on_at = |next| _ = hand.compare_exchange(start, next, Relaxed, Relaxed);
        for (seen, (base, lock)) in table.known_folios(start, usize::MAX).enumerate() {
            match lock.try_lock() {
                Some(mut folio) if !folio.stored.is_empty() => {
                    self.repack(table, &mut folio, base);
                    return go_on_at(base + self.geometry().folio_bytes());
                }
                _ if seen == LOOKS => return go_on_at(base),
                // Nothing is stored; or another thread has the folio, and what it loads now is
                // repacked when it goes out again.
                _ => {}
            }
        }
        go_on_at(DONE);
    }

    /// Stores the outdated stored units of a folio again (`DENS-1`), and four units as a wide one where these are used
    /// together.
    fn repack(&self, table: &Table, folio: &mut Folio, base: usize) {
        let Some(samples) = &self.work.density.samples else { return };
        let (cpu, stored) = (self.cpu(), folio.stored);
        let mut samples = samples.lock();
        for four in self.wide_units(table, base, folio, stored) {
            self.join(folio, base, four, &mut samples.unit);
        }
        // What is wide is dense.
        let unit_bytes = self.geometry().unit_bytes();
        for index in (stored - folio.wide).iter() {
            let copy = folio.copies[index].take().expect("UNIT-2: a stored unit has a copy");
            if !self.work.density.is_outdated(self.store.form(&copy)) {
                folio.copies[index] = Some(copy);
                continue;
            }
            let (address, unit) = (base + index * unit_bytes, &mut samples.unit[..unit_bytes]);
            if self.load_unit(&copy, address, unit, cpu).is_err() {
                // It is on the backing, where it takes no memory.
                folio.copies[index] = Some(copy);
                continue;
            }
            let mut unit = [Outgoing::new(unit, Some(copy))];
            self.store.compare(&mut unit);
            unit[0].outcome = Outcome::Changed;
            self.store.store(cpu, self.work.density.codec(), &mut unit, self.figures());
            folio.copies[index] = unit[0].entry.take();
            if unit[0].outcome == Outcome::Compressed {
                add(&self.figures().recompressed, 1);
            }
        }
    }
}
