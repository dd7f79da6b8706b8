//! The accelerator below a store: what a device that lies can do to the units of a store, and to those of others.

mod common;
#[path = "../../core/tests/heap/mod.rs"]
mod heap;

use common::{UNIT, World, unit};
use heap::Heap;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::Figures;
use zfolio_core::store::{CodecId, Incoming, Key, Loaded, Outcome, Outgoing, Store};
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Algorithm, Zcomp};
use zfolio_iaa::model::{Faults, Setup};
use zfolio_iaa::{Codes, Iaa, Settings};

/// Goal: without any check by the driver, units that a hostile device compressed or decompressed to something else are
/// found by the store's checksum and never handed out, and no unit of another codec is harmed. Method: 400 units in
/// turn to a lying device and to zstd, in one store, loaded in one batch.
#[test]
fn a_store_never_hands_out_what_a_lying_device_made() {
    let order = UnitOrder::from_bytes(UNIT).expect("a unit's size");
    let world = World::new(Settings::default(), &[Setup::default()]);
    let codecs = vec![
        Zcomp::with_backend(&Iaa::new(&world.driver, Codes::Fixed), order, 1).expect("memory"),
        Zcomp::new(Algorithm::Zstd.into(), order, 1).expect("memory"),
    ];
    let store = Store::new(codecs, Heap, Key::new([7; Key::BYTES]));
    let figures = Figures::default();
    let mut random = Random::new(seed());
    let units: Vec<Vec<u8>> = (0..400).map(|_| unit(&mut random, UNIT)).collect();
    let lies = |of: u16| Faults { lie: of, ..Faults::default() };
    world.models[0].set_faults(lies(0x4000));
    let mut kept = Vec::new();
    for (number, unit) in units.iter().enumerate() {
        let mut one = [Outgoing::new(unit, None)];
        let codec = CodecId::new(number % 2).expect("there are two");
        store.store(0, codec, &mut one, &figures);
        let is_kept = one[0].outcome == Outcome::Compressed;
        assert!(is_kept || number % 2 == 0, "zstd keeps its units");
        kept.extend(one[0].entry.take().map(|entry| (number, entry)));
    }
    assert!(kept.len() > 380, "{}", kept.len());
    let mut lost = [0, 0];
    for faults in [lies(0x4000), lies(0)] {
        world.models[0].set_faults(faults);
        let mut places = vec![vec![0xC3; UNIT]; kept.len()];
        let mut wanted: Vec<Incoming<'_>> =
            kept.iter().zip(&mut places).map(|(it, place)| Incoming::new(&it.1, place)).collect();
        store.load(0, &mut wanted);
        let outcomes: Vec<bool> =
            wanted.iter().map(|unit| matches!(unit.outcome, Loaded::Whole)).collect();
        drop(wanted);
        for ((is_whole, place), (number, _)) in outcomes.iter().zip(&places).zip(&kept) {
            assert!(!is_whole || *place == units[*number], "unit {number}: a wrong byte");
            assert!(*is_whole || number % 2 == 0, "unit {number} is not the device's");
            lost[usize::from(faults.lie == 0)] += u32::from(!is_whole);
        }
    }
    assert_eq!(lost[0], lost[1], "a unit that was only decompressed wrongly is not lost");
    let decompressed = world.driver.global_stats().total_sw_decomp_calls;
    assert!(
        decompressed > u64::from(lost[0] + lost[1]),
        "the device lied when it decompressed: {decompressed}"
    );
    assert!(lost[1] > 10, "the device lied when it compressed: {lost:?}");
    kept.into_iter().for_each(|(_, entry)| store.invalidate(entry, &figures));
}
