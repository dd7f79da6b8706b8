//! Wide units, alone and on the real kernel.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::stats::Stats;
use zfolio_core::zcomp::Zcomp;
use zfolio_sys::map::Reservation;

use super::{SEEN_MAX, TELLS_EVERY, Use, WIDE_FROM, WIDE_TO, thresholds};
use crate::config::{Config, Mode};
use crate::engine::Engine;
use crate::folio::Units;
use crate::inline::{self, Registered};
use crate::reclaim::{By, Reclaimed};

/// Goal: units become wide once those beside them were used, too, sixteen times, and no longer once they are not.
#[test]
fn units_become_wide_where_they_are_used_together() {
    let region = Use::default();
    let all = Units::from(0..16);
    for _ in 0..SEEN_MAX / 4 - 1 {
        region.note(all, [WIDE_FROM, WIDE_TO]);
    }
    assert!(!region.is_wide(), "too few were seen");
    region.note(all, [WIDE_FROM, WIDE_TO]);
    assert!(region.is_wide());
    // One unit in use, and none beside it: the mean takes a while to fall from one threshold to the other.
    let mut notes = 0;
    while region.is_wide() {
        region.note(Units::one(3), [WIDE_FROM, WIDE_TO]);
        notes += 1;
        assert!(notes < 100, "one unit in use of four");
    }
    assert!(notes > 4, "after {notes} notes");
    (0..100).for_each(|_| region.note(Units::NONE, [WIDE_FROM, WIDE_TO]));
    assert!(!region.is_wide(), "nothing came back: nothing is known");
}

/// Goal: units that come back in any order never become wide, however much of memory is resident. Method: the share of
/// those beside one that would come back is computed by the formulas of `thresholds`.
#[test]
fn units_that_are_used_in_any_order_stay_apart() {
    assert_eq!(thresholds(0), [WIDE_FROM, WIDE_TO]);
    assert_eq!(thresholds(1_000_000), [1_000_000; 2]);
    assert_eq!(thresholds(2_000_000), [1_000_000; 2], "figures that do not belong together");
    for percent in 1..90_u32 {
        let resident = f64::from(percent) / 100.0;
        let back = |x: f64| 1.0 - (-x).exp();
        // The more come the more are resident: x by halves.
        let (mut x, mut step) = (0.0, 16.0);
        while step > 1e-6 {
            let more: f64 = x + step;
            x = if 1.0 - back(more) / more < resident { more } else { x };
            step /= 2.0;
        }
        let shares = thresholds(u64::from(percent) * 10_000).map(|share| f64::from(share) / 1e6);
        let [from, to] = shares;
        let at_random = back(x);
        assert!(
            to > at_random - 0.03 && from > at_random - 0.005,
            "{percent} % are resident: {at_random} at random, {from}, {to}"
        );
    }
}

#[test]
fn one_folio_in_so_many_tells() {
    let region = Use::default();
    let turns = (0..10 * TELLS_EVERY).filter(|_| region.is_turn()).count();
    assert_eq!(turns, 10);
}

const BYTES: usize = 2 << 20;

/// An engine whose units become wide, with a mapping of pages that differ, all of them stored. `None`: this kernel has
/// no inline mode.
fn stored() -> Option<(&'static Engine, Reservation, Registered)> {
    if let Err(why) = Mode::Inline.check() {
        eprintln!("SKIPPED: {why}");
        return None;
    }
    let unit = UnitOrder::DEFAULT;
    let algorithm = "auto".parse().expect("an algorithm");
    let config = Config { algorithm, unit, wide_units: true, ..Config::for_test(16 << 20) };
    let wide = config.wide_unit().expect("auto, and units of a page");
    let engine = Engine::with_backing(config, Box::new(Box::<Stats>::default()), None);
    let engine: &Engine = Box::leak(Box::new(engine.expect("Mode::check has passed")));
    engine.use_wide_units(
        Zcomp::new("zstd".parse().expect("a codec"), wide, 2).expect("it is there"),
    );
    let fill = |bytes: &mut [u8]| {
        bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at));
    };
    let space = engine.adopted(BYTES, fill);
    let served = inline::register(engine).expect("few engines");
    store_all(engine);
    Some((engine, space, served))
}

fn value(at: usize) -> u8 {
    u8::try_from((at / 64 + at / PAGE_BYTES) % 251).expect("a byte")
}

fn store_all(engine: &Engine) {
    let table = engine.table.read();
    while engine.reclaim_one(&table, 0, By::Background) != Reclaimed::Nothing {}
}

/// Where the units of the folio at an address are: resident, stored, wide.
fn places(engine: &Engine, address: usize) -> [Units; 3] {
    let table = engine.table.read();
    let folio = table.known(address).expect("it is managed").lock();
    [folio.resident, folio.stored, folio.wide]
}

#[allow(unsafe_code, reason = "what a program does")]
fn read(space: &Reservation, at: usize) -> u8 {
    assert!(at < space.bytes());
    // SAFETY: inside the mapping.
    let byte = unsafe { space.base().add(at) };
    // SAFETY: the mapping is ours, and nobody else has a reference into it.
    unsafe { byte.read_volatile() }
}

fn read_all(space: &Reservation) {
    (0..BYTES).step_by(64).for_each(|at| assert_eq!(read(space, at), value(at), "{at}"));
}

/// Goal: four units that go out together are one object, come back by one fault, and are what they were. Method: all of
/// a mapping goes out; one page is touched, then all; then all of it goes out again, unchanged.
#[test]
fn four_units_are_one_object_and_come_back_together() {
    let Some((engine, space, served)) = stored() else { return };
    let (all, pages) = (Units::from(0..16), (BYTES / PAGE_BYTES) as u64);
    assert_eq!(places(engine, space.address()), [Units::NONE, all, all]);
    let figures = engine.figures();
    // Of 32 folios two tell, or one if they lie in two regions.
    let folio = 16 * PAGE_BYTES;
    let first = ((space.address() + 1).next_multiple_of(16 << 20) - space.address()) / folio;
    let first = first.min(BYTES / folio);
    let told = (first / 16 + (BYTES / folio - first) / 16) as u64 * 16;
    let wide = pages - told;
    assert_eq!(figures.wide_units.load(Relaxed), wide);
    assert_eq!(figures.stored_units.load(Relaxed), wide / 4 + told, "objects");
    assert_eq!(figures.stored_bytes.load(Relaxed), BYTES as u64);

    assert_eq!(read(&space, 5 * PAGE_BYTES), value(5 * PAGE_BYTES));
    let four = Units::from(4..8);
    assert_eq!(places(engine, space.address()), [four, all - four, all]);
    assert_eq!(figures.faults_stored.load(Relaxed), 1);
    read_all(&space);

    let compressed = figures.reclaim_compressed.load(Relaxed);
    store_all(engine);
    // Each 16th folio of a region tells: the first one now, if 15 or 31 of its region went out before.
    let wide = if first % 16 == 15 { Units::NONE } else { all };
    assert_eq!(places(engine, space.address()), [Units::NONE, all, wide]);
    let again = figures.reclaim_compressed.load(Relaxed) - compressed;
    let clean = figures.reclaim_clean.load(Relaxed);
    assert_eq!(again + clean, pages, "{clean} are clean");
    assert!(clean > 0, "copies of wide units are kept, too");
    read_all(&space);
    engine.unmap_adopted(&space);
    assert_eq!(figures.wide_units.load(Relaxed), 0);
    assert_eq!(engine.store.pool_stats().objects, 0);
    drop(served);
}

/// Goal: wide units that go out again become four units where there are to be none any more. Method: the fast codec is
/// used from then on.
#[test]
fn wide_units_become_four_again() {
    let Some((engine, space, served)) = stored() else { return };
    engine.work.density.use_dense(false);
    assert_eq!(read(&space, 0), value(0));
    store_all(engine);
    let all = Units::from(0..16);
    assert_eq!(places(engine, space.address()), [Units::NONE, all, all - Units::from(0..4)]);
    // And stored ones become wide where all is repacked.
    engine.work.density.use_dense(true);
    engine.densify();
    assert_eq!(places(engine, space.address()), [Units::NONE, all, all]);
    read_all(&space);
    engine.unmap_adopted(&space);
    drop(served);
}
