use super::super::backend::Answer;
use super::{LEVELS, compressor};
use crate::testing::Random;

/// Goal: a unit's bytes do not depend on what was compressed before, though the tables are not cleared. Method: units
/// of many sizes, of few different bytes and with repeats, some that do not compress and some without room, by one
/// compressor and by a new one for each.
#[test]
fn a_unit_does_not_depend_on_those_before() {
    let mut random = Random::new(crate::testing::seed());
    for level in LEVELS {
        let mut old = compressor(level, 1 << 18).expect("memory for a state");
        for round in 0..60 {
            let bytes = random.below(if round % 10 == 0 { 1 << 18 } else { 1 << 13 });
            let kinds: u8 = [1, 3, 40, 255][random.below(4)];
            let mut unit: Vec<u8> = random.bytes(bytes).iter().map(|byte| byte % kinds).collect();
            let half = unit.len() / 2;
            if round % 3 == 0 {
                unit.copy_within(..half, half);
            }
            let room = if round % 7 == 0 { bytes / 8 } else { bytes };
            let (mut by_old, mut by_new) = (vec![0; room], vec![0; room]);
            let answer = old.compress_unit(&unit, &mut by_old);
            let mut new = compressor(level, 1 << 18).expect("memory for a state");
            let expected = new.compress_unit(&unit, &mut by_new);
            assert_eq!(
                format!("{answer:?}"),
                format!("{expected:?}"),
                "level {level}, round {round}"
            );
            if let Answer::Compressed(length) = answer {
                assert_eq!(by_old[..length], by_new[..length], "level {level}, round {round}");
            }
        }
    }
}
