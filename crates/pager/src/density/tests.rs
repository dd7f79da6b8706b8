//! Tests of the choice between two codecs.

use super::{DENSE, DONE, Density, FAST, SAMPLES_MAX, SAMPLES_MIN, Samples, Stored, Sums};
use crate::copies::Span;
use crate::engine::Engine;
use crate::reclaim::busy::{Done, Lately};
use crate::reclaim::{By, Reclaimed};
use std::sync::atomic::Ordering::Relaxed;
use zfolio_core::economy::{REVIEWS, Switch};
use zfolio_core::page::UnitOrder;
use zfolio_core::store::Form;
use zfolio_core::zcomp::asked::{self, Refused};
use zfolio_sys::map::Reservation;

const MIB: u64 = 1 << 20;
const UNIT: u64 = 16 << 10;

/// As measured with lz4 and zstd on a heap of node: 16 KiB shrink to 6 KiB in 10 us and come back
/// in 6, or to 4 KiB in 50 us and come back in 30.
fn samples() -> Samples {
    Samples::of(measured())
}

fn measured() -> [Sums; 2] {
    let fast = Sums { bytes: 6 << 10, compress_ns: 10_000, decompress_ns: 6_000 };
    let dense = Sums { bytes: 4 << 10, compress_ns: 50_000, decompress_ns: 30_000 };
    [fast, dense]
}

/// 2000 loads of 50 us each, of which the dense codec would save a share.
fn span(saved_percent: u64, compressed: u64) -> Span {
    let loads = 2000;
    let (saved, lately) = (loads * saved_percent / 100, Lately::default());
    Span { loads, saved, together: 0, compressed, refault_ns: 50_000, lately }
}

/// Whether the dense codec should be in use, given that it is or not.
fn pays(samples: &Samples, is_dense: bool, span: &Span) -> Option<bool> {
    let switch = Switch::default();
    switch.set(is_dense);
    samples.verdict(is_dense, span).map(|verdict| switch.wants_on(verdict))
}

/// Units that the fast codec stored.
fn stored(mib: u64) -> Stored {
    let units = mib * MIB / UNIT;
    Stored { units, unit_bytes: UNIT, bytes: units * (6 << 10), is_dense: false }
}

/// The same units, stored by the dense codec.
fn stored_dense(mib: u64) -> Stored {
    Stored { bytes: stored(mib).bytes / 6 * 4, is_dense: true, ..stored(mib) }
}

/// Goal: the dense codec pays if the loads that it saves are worth more than the time of the
/// others, by figures that can be checked by hand.
#[test]
fn the_dense_codec_pays_where_it_saves_more_time_than_it_costs() {
    let samples = samples();
    // Each load that remains costs 24 us more, each that is saved saves 50.
    assert_eq!(pays(&samples, false, &span(40, 0)), Some(true), "40 ms against 29");
    assert_eq!(pays(&samples, false, &span(20, 0)), Some(false), "20 ms against 38");
    assert_eq!(pays(&samples, false, &span(0, 0)), Some(false), "it saves nothing");
    // Each unit that is still compressed costs 40 us more.
    assert_eq!(pays(&samples, false, &span(40, 2000)), Some(false), "40 ms against 77");
    assert_eq!(pays(&samples, false, &span(60, 2000)), Some(false), "60 ms against 51");
    assert_eq!(pays(&samples, false, &span(80, 2000)), Some(true), "80 ms against 26");
}

/// Goal: units that the background thread has time to compress cost nothing.
#[test]
fn compression_costs_what_is_waited_for() {
    let samples = samples();
    assert_eq!(pays(&samples, false, &span(40, 2000)), Some(false), "as above");
    // With 40 us more for each of 2000 units it has 280 ms to do in a second.
    let span_ns = 1_000_000_000;
    let (busy_ns, units) = (span_ns / 5, 2000);
    let done = Done { span_ns, busy_ns, compressed: units, background: units, ..Done::default() };
    let idle = |saved| Span { lately: Lately::one(done), ..span(saved, 2000) };
    assert_eq!(pays(&samples, false, &idle(40)), Some(true), "40 ms against 29");
    assert_eq!(pays(&samples, false, &idle(20)), Some(false), "20 ms against 38");
}

/// Goal: a small difference changes nothing, whichever codec is in use.
#[test]
fn a_small_difference_keeps_the_codec() {
    let samples = samples();
    // 33 ms against 32.
    assert_eq!(pays(&samples, false, &span(33, 0)), Some(false));
    // With the dense codec a load takes 50 us, so 26 with the fast one if nothing is compressed, but
    // 50 - 24 - 40 is less than nothing. Longer loads: 100 us, so 36; 80 % of 2000 are 58 ms.
    let slow = |saved, compressed| Span { refault_ns: 100_000, ..span(saved, compressed) };
    assert_eq!(pays(&samples, true, &slow(80, 0)), Some(true), "58 ms against 48");
    assert_eq!(pays(&samples, true, &slow(60, 0)), Some(true), "43 ms against 48");
    assert_eq!(pays(&samples, true, &slow(50, 0)), Some(false), "36 ms against 48");
    assert_eq!(pays(&samples, true, &slow(80, 2000)), Some(false), "58 ms against 128");
}

/// Goal: the dense codec saves the loads within the distance that its memory keeps. Method: 12 MiB
/// are stored in 768 units, and each takes 2 KiB less, so 1.5 MiB keep 128 more units resident.
#[test]
fn what_is_saved_is_what_more_memory_would_keep() {
    assert_eq!(samples().saved_bytes(stored(12)), 128 * UNIT);
    assert_eq!(samples().saved_bytes(stored_dense(12)), 128 * UNIT);
}

/// Goal: the price of the dense codec is what it saves less what it costs, with the bytes that it takes less.
#[test]
fn the_balance_is_gain_less_cost() {
    let bytes = 768 * (2 << 10);
    let balance = |saved_percent, stored| samples().balance(stored, &span(saved_percent, 0));
    assert_eq!(balance(40, stored(12)), Some((40_000_000 - 28_800_000, bytes)));
    assert_eq!(balance(0, stored(12)), Some((-48_000_000, bytes)));
    // With the dense codec in use all loads cost 24 us more, and each of those saved would cost 36.
    let slow = Span { refault_ns: 100_000, ..span(50, 0) };
    let balance = samples().balance(stored_dense(12), &slow);
    assert_eq!(balance, Some((36_000_000 - 48_000_000, bytes)));
    assert_eq!(Samples { count: 0, ..samples() }.balance(stored(12), &span(40, 0)), None);
}

#[test]
fn without_samples_nothing_is_decided() {
    let mut samples = samples();
    samples.count = SAMPLES_MIN - 1;
    assert_eq!(pays(&samples, false, &span(50, 0)), None);
    assert!(!samples.is_large(stored(192), 0));
}

/// Goal: old samples fade, and the means stay.
#[test]
fn the_mean_is_that_of_the_latest_samples() {
    let mut samples = samples();
    let one = Sums { bytes: 1 << 10, compress_ns: 1000, decompress_ns: 500 };
    (0..4 * SAMPLES_MAX).for_each(|_| samples.note([one, one]));
    assert!(samples.count <= SAMPLES_MAX);
    assert!(samples.sums[0].bytes / samples.count < 1100, "{samples:?}");
}

/// Goal: one review changes nothing, several in a row do, and stored units are walked over only
/// after a change to the dense codec.
#[test]
fn several_reviews_in_a_row_change_the_codec() {
    let density = Density::new(2, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
    let hand = || density.hand.load(Relaxed);
    assert_eq!((density.codec(), hand()), (FAST, DONE));
    for _ in 0..REVIEWS - 1 {
        density.vote(true, 0);
    }
    density.vote(false, 0);
    for _ in 0..REVIEWS - 1 {
        density.vote(true, 0);
    }
    assert_eq!(density.codec(), FAST);
    density.vote(true, 0);
    assert_eq!((density.codec(), hand()), (DENSE, 0));
    for _ in 0..4 * REVIEWS - 1 {
        density.vote(false, 0);
    }
    assert_eq!(density.codec(), DENSE, "the fast one is tried after more reviews");
    density.vote(false, 0);
    assert_eq!((density.codec(), hand()), (FAST, DONE));
    // Each time that this was wrong it is tried later.
    (0..REVIEWS).for_each(|_| density.vote(true, 0));
    (0..4 * REVIEWS).for_each(|_| density.vote(false, 0));
    assert_eq!(density.codec(), DENSE);
}

/// After how many reviews in a row that would save all loads the dense codec is in use.
fn reviews_until_dense(density: &Density, samples: &Samples, stored: Stored) -> u32 {
    let review = |_: &u32| {
        density.review(samples, stored, &span(100, 0), u64::MAX);
        density.codec() == DENSE
    };
    (1..1000).find(|count| review(count)).expect("it pays")
}

/// Goal: the more is stored, and would be repacked, the longer the dense codec has to pay.
#[test]
fn much_that_is_stored_is_not_repacked_for_a_few_loads() {
    let density = Density::new(2, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
    let fast = Sums { bytes: 6 << 10, compress_ns: 10_000, decompress_ns: 6_000 };
    let samples = Samples::of([fast, Sums { bytes: fast.bytes - 64, ..fast }]);
    // A 16th of a million units are 65,536 loads, 256 for each review. The dense codec would keep 6,700 units.
    assert_eq!(reviews_until_dense(&density, &samples, stored(16 << 10)), 256);
}

/// Goal: a run of loads that the dense codec would have saved changes nothing while it may be the only one: as many as
/// units that its memory would keep.
#[test]
fn what_is_saved_once_changes_nothing() {
    let density = Density::new(2, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
    // 76,800 units, of which a sixth more would be resident: 50 reviews.
    let review = || density.review(&samples(), stored(1200), &span(100, 0), u64::MAX);
    (0..49).for_each(|_| _ = review());
    assert_eq!(density.codec(), FAST);
    density.review(&samples(), stored(1200), &span(0, 0), u64::MAX);
    assert_eq!(reviews_until_dense(&density, &samples(), stored(1200)), 50);
}

/// Goal: only what the codec in use would store otherwise is stored again.
#[test]
fn what_the_other_codec_stored_is_outdated() {
    let density = Density::new(2, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
    let forms = [Form::SameFilled, Form::Compressed(FAST), Form::Incompressible(FAST)];
    let dense_forms = [Form::Compressed(DENSE), Form::Incompressible(DENSE)];
    let outdated = |forms: &[Form]| -> Vec<bool> {
        forms.iter().map(|form| density.is_outdated(*form)).collect()
    };
    assert_eq!(outdated(&forms), [false, false, false]);
    assert_eq!(outdated(&dense_forms), [true, false]);
    density.use_dense(true);
    assert_eq!(outdated(&forms), [false, true, true]);
    assert_eq!(outdated(&dense_forms), [false, false]);
}

/// Goal: the dense codec is used at once only where it helps: what is stored takes much with the
/// fast codec, and less with the dense one.
#[test]
fn a_large_pool_is_one_that_the_dense_codec_makes_smaller() {
    // 192 MiB in units of 6 KiB of 16 are 72 MiB.
    assert!(samples().is_large(stored(192), 71 * MIB));
    assert!(!samples().is_large(stored(192), 72 * MIB));
    assert!(samples().is_large(stored_dense(192), 71 * MIB));
    assert!(!samples().is_large(stored_dense(192), 72 * MIB));
    let mut noise = Samples { count: 0, ..samples() };
    let sums = Sums { bytes: UNIT, compress_ns: 1000, decompress_ns: 1000 };
    noise.sums = [Sums::default(); 2];
    (0..SAMPLES_MIN).for_each(|_| noise.note([sums, sums]));
    assert!(!noise.is_large(stored(192), 72 * MIB), "nothing shrinks");
}

/// Goal: one measurement during which the thread lost its CPU decides nothing. Method: it falls on either codec.
#[test]
fn one_measurement_that_took_long_decides_nothing() {
    let decides = |outlier: Option<(usize, usize)>, span: &Span| {
        let mut samples = Samples { count: 0, sums: [Sums::default(); 2], ..samples() };
        for at in 0..100 {
            let mut measured = measured();
            if let Some((codec, _)) = outlier.filter(|(_, when)| at == *when) {
                measured[codec].compress_ns = 4_000_000;
            }
            samples.note(measured);
        }
        pays(&samples, false, span)
    };
    let outliers = [0, 1, 50].into_iter().flat_map(|when| [Some((0, when)), Some((1, when))]);
    for outlier in outliers.chain([None]) {
        assert_eq!(decides(outlier, &span(40, 900)), Some(false), "40 ms against 29 and 4");
        assert_eq!(decides(outlier, &span(60, 1800)), Some(true), "60 ms against 19 and 24");
    }
}

/// Goal: samples are never far apart. Method: the largest gap between two of them.
#[test]
fn samples_are_taken_all_the_time() {
    for step in [1, 4, 16] {
        let density = Density::new(2, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
        let (mut last, mut gap) = (0_u64, 0);
        for at in (0..50_000).step_by(step) {
            if density.is_due(at) {
                gap = gap.max(at - last);
                last = at;
            }
        }
        assert!((500..600).contains(&gap), "{gap} with steps of {step}");
    }
}

/// Goal: with one codec nothing is measured.
#[test]
fn one_codec_is_not_measured() {
    let density = Density::new(1, (UnitOrder::DEFAULT, UnitOrder::DEFAULT));
    assert!((0..1000).all(|compressed| !density.is_due(compressed)));
}

/// Goal: units are stored with the algorithm that was asked for, those that are stored already stay as they are, and
/// every byte is there. Method: mappings that are stored before and after each change.
#[test]
#[allow(unsafe_code, reason = "what a program does")]
fn another_algorithm_is_used_from_then_on() {
    if let Err(why) = crate::config::Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    const BYTES: usize = 2 << 20;
    let engine: &Engine = Box::leak(Box::new(Engine::inline_for_test(8 << 20)));
    let served = crate::inline::register(engine).expect("few engines");
    let value = |at: usize, seed: usize| u8::try_from((at / 64 + seed) % 251).expect("a byte");
    let store_all = |seed: usize| {
        let fill = |bytes: &mut [u8]| {
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at, seed));
        };
        let space = engine.adopted(BYTES, fill);
        let table = engine.table.read();
        while engine.reclaim_one(&table, 0, By::Background) != Reclaimed::Nothing {}
        drop(table);
        space
    };
    let codecs_of = |space: &Reservation| {
        let table = engine.table.read();
        let folios = table.known_folios(space.address(), space.address() + BYTES);
        let mut codecs = std::collections::BTreeSet::new();
        for (_, lock) in folios {
            let folio = lock.lock();
            let copies = folio.stored.iter().filter_map(|index| folio.copies[index].as_ref());
            codecs.extend(copies.map(|copy| match engine.store.form(copy) {
                Form::Compressed(codec) => codec.get(),
                other => panic!("{other:?}"),
            }));
        }
        codecs.into_iter().collect::<Vec<usize>>()
    };
    let stats = engine.stats();
    let ask = |text: &str| {
        let word = asked::to_word(&text.parse().expect("an algorithm")).expect("no dictionary");
        stats.algorithm_asked.store(word, Relaxed);
        engine.follow_asked_algorithm();
        asked::answered(word, stats.algorithm_answer.load(Relaxed)).expect("it is the answer")
    };
    let before = store_all(1);
    assert_eq!(ask("zstd"), Ok(()));
    assert_eq!(stats.algorithm(), "zstd");
    let after = store_all(2);
    assert_eq!(ask("auto"), Err(Refused::Auto));
    assert_eq!(stats.algorithm(), "zstd", "it stays");
    assert_eq!(
        ask("lz4,level=1"),
        Ok(()),
        "what was there at the start, with its default written out"
    );
    let again = store_all(3);
    for level in 2..16 {
        assert_eq!(ask(&format!("zstd,level={level}")), Ok(()));
    }
    assert_eq!(ask("deflate"), Err(Refused::Full), "an entry names one of 16");
    let spaces = [(before, 1, 0), (after, 2, 1), (again, 3, 0)];
    spaces.iter().for_each(|(space, _, codec)| assert_eq!(codecs_of(space), [*codec]));
    for (space, seed, _) in &spaces {
        for at in (0..BYTES).step_by(64) {
            // SAFETY: inside the mapping.
            let byte = unsafe { space.base().add(at) };
            // SAFETY: the mapping is ours, and nobody else has a reference into it.
            let byte = unsafe { byte.read_volatile() };
            assert_eq!(byte, value(at, *seed), "{at} of {seed}");
        }
    }
    spaces.iter().for_each(|(space, ..)| engine.unmap_adopted(space));
    drop(served);
}
