//! Tests of every backend that accepts a dictionary or a window.

use std::sync::Arc;

use super::super::tests::{Kept, Random, compress, compressed, decompress, seed, text, zcomp};
use super::super::{Algorithm, Error, Params, Zcomp, compressed_bytes_max, train, without_tables};
use super::{DICTIONARY_BYTES, Dictionary};
use crate::page::UnitOrder;

/// Objects of 32 bytes: each is one of 100 kinds, with a number that differs.
fn objects(random: &mut Random, kinds: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let mut objects = Vec::with_capacity(bytes);
    while objects.len() < bytes {
        objects.extend_from_slice(&kinds[random.below(kinds.len())]);
        objects.extend_from_slice(&random.bytes(4));
    }
    objects.truncate(bytes);
    objects
}

fn kinds(random: &mut Random) -> Vec<Vec<u8>> {
    (0..100).map(|_| random.bytes(28)).collect()
}

fn with(algorithm: Algorithm, dictionary: &[u8]) -> Params {
    let dictionary = Dictionary::new("test", dictionary.to_vec()).expect("of an accepted length");
    Params { dictionary: Some(Arc::new(dictionary)), ..algorithm.into() }
}

fn takers() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.iter().copied().filter(|algorithm| algorithm.takes_dictionary())
}

fn check_round_trip(zcomp: &Zcomp, unit: &[u8]) -> Option<usize> {
    match compress(zcomp, 0, &[unit]).remove(0) {
        Kept::Compressed(bytes) => {
            assert!(bytes.len() <= compressed_bytes_max(unit.len()), "ZC-3");
            let back = decompress(zcomp, &bytes, unit.len()).expect("what was compressed");
            assert!(back == unit, "{:?}, seed {}", zcomp.params(), seed());
            Some(bytes.len())
        }
        _ => None,
    }
}

/// Goal: with a dictionary of any length, at any level and size, units come back unchanged, also
/// after a unit that did not fit. Method: objects that the dictionary contains, text, half random
/// bytes; the bytes are compared.
#[test]
fn units_come_back_with_a_dictionary() {
    let mut random = Random::new(seed());
    let kinds = kinds(&mut random);
    for algorithm in takers() {
        let (low, high) = (*algorithm.levels().start(), *algorithm.levels().end());
        for dictionary_bytes in [*DICTIONARY_BYTES.start(), 4000, 40_000, 112_640, 200_001] {
            let dictionary = objects(&mut random, &kinds, dictionary_bytes);
            for unit_bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10] {
                for level in [low, -1, 1, 2, 3, 9, 19, high] {
                    let slow = algorithm != Algorithm::Lz4 && level > 9;
                    let params = Params { level: Some(level), ..with(algorithm, &dictionary) };
                    if params.checked().is_err() || slow && dictionary_bytes + unit_bytes > 80_000 {
                        continue;
                    }
                    let zcomp = zcomp(params, unit_bytes, 1);
                    let mut half = objects(&mut random, &kinds, unit_bytes);
                    let noise = random.bytes(unit_bytes);
                    half[..unit_bytes / 3].copy_from_slice(&noise[..unit_bytes / 3]);
                    // Seven eighths are random: the sample does not skip it, and lz4 gives up.
                    let mut noisy = noise.clone();
                    noisy[..unit_bytes / 8].fill(7);
                    let words = text(&mut random, unit_bytes);
                    let same = objects(&mut random, &kinds, unit_bytes);
                    for unit in [&same, &noise, &half, &noisy, &words, &same] {
                        check_round_trip(&zcomp, unit);
                    }
                }
            }
        }
    }
}

/// Goal: a dictionary helps with small units, can be used again after any unit, and is needed for
/// decompression. Method: units of 4 KiB of objects that the dictionary contains; with it, without
/// it, with another.
#[test]
fn a_dictionary_pays_and_is_needed() {
    let mut random = Random::new(seed());
    let kinds = kinds(&mut random);
    for algorithm in takers() {
        let dictionary = objects(&mut random, &kinds, 30_000);
        let other = random.bytes(30_000);
        let [with_it, with_other] =
            [&dictionary, &other].map(|bytes| zcomp(with(algorithm, bytes), 4096, 1));
        let without = zcomp(algorithm.into(), 4096, 1);
        let unit = objects(&mut random, &kinds, 4096);
        let alone = check_round_trip(&without, &unit).unwrap_or(4096);
        let first = check_round_trip(&with_it, &unit).expect("it shrinks");
        assert!(first * 10 < alone * 7, "{algorithm}: {first} of {alone}, seed {}", seed());
        for _ in 0..50 {
            let mut noise = random.bytes(4096);
            noise[..256].fill(7);
            compress(&with_it, 0, &[&noise]);
            assert_eq!(check_round_trip(&with_it, &unit), Some(first), "{algorithm}");
        }
        let bytes = compressed(&with_it, &unit);
        for wrong in [&without, &with_other] {
            assert!(decompress(wrong, &bytes, 4096).ok() != Some(unit.clone()), "{algorithm}");
        }
    }
}

/// Goal: `ZC-4` with a dictionary. Method: flipped bits, cuts and noise into a guarded destination.
#[test]
fn corrupt_input_stays_inside_the_destination() {
    let mut random = Random::new(seed());
    let kinds = kinds(&mut random);
    let dictionary = objects(&mut random, &kinds, 20_000);
    let window = "deflate,window=9,level=6".parse().expect("parameters");
    for params in takers().map(|algorithm| with(algorithm, &dictionary)).chain([window]) {
        let zcomp = zcomp(params, 4096, 1);
        let unit = text(&mut random, 4096);
        let whole = compressed(&zcomp, &unit);
        for _ in 0..1000 {
            let mut corrupt = whole.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(corrupt.len());
                corrupt[at] ^= 1 << random.below(8);
            }
            decompress(&zcomp, &corrupt, 4096).ok();
            let cut = random.below(whole.len());
            decompress(&zcomp, &whole[..cut], 4096).expect_err("it was cut");
            decompress(&zcomp, &whole, 4095).expect_err("it is longer");
            decompress(&zcomp, &whole, 4097).expect_err("it is shorter");
            let noise_bytes = random.below(5000);
            decompress(&zcomp, &random.bytes(noise_bytes), 4096).ok();
            assert!(decompress(&zcomp, &whole, 4096).is_ok_and(|back| back == unit));
        }
    }
}

/// Goal: a window is used in full, and never exceeded. Method: random bytes that repeat with every
/// period; they shrink only if the window is longer than the period.
#[test]
fn a_window_is_kept() {
    let mut random = Random::new(seed());
    for period_bits in 9..15 {
        let period = random.bytes(1 << period_bits);
        let unit: Vec<u8> = period.iter().copied().cycle().take(64 << 10).collect();
        for window in 9..=15 {
            let params = format!("deflate,level=6,window={window}").parse().expect("parameters");
            let shrinks = check_round_trip(&zcomp(params, 64 << 10, 1), &unit).is_some();
            assert_eq!(shrinks, window > period_bits, "{window}, {period_bits}, seed {}", seed());
        }
    }
}

/// Goal: a dictionary that cannot be used is refused in one line. Method: each reason; also a
/// trained one that was cut.
#[test]
fn a_bad_dictionary_is_refused() {
    let refused = |path: &str, bytes: usize| {
        Dictionary::new(path, vec![1; bytes]).expect_err("refused").to_string()
    };
    let low = "dictionary 'd': 255 bytes; accepted: 256 to 1048576";
    assert_eq!(refused("d", 255), low);
    assert_eq!(refused("d", 0), low.replace("255", "0"));
    assert_eq!(refused("d", (1 << 20) + 1), low.replace("255", "1048577"));
    assert!(
        refused("a,b", 4096)
            .starts_with("dictionary 'a,b': its name is empty or has a ','; accepted: another")
    );

    let zstd: Params = "zstd,level=1,dict=d".parse().expect("parameters");
    let missing = zstd.clone().with_dictionary(|path| Err(format!("{path} is not there")));
    let missing = missing.expect_err("it was not read");
    assert_eq!(missing.to_string(), "dictionary 'd': d is not there");
    let torn = [&[0x37, 0xA4, 0x30, 0xEC][..], &[0xFF; 1000]].concat();
    let torn = zstd.with_dictionary(|_| Ok(torn)).expect("of an accepted length");
    let error = Zcomp::new(torn, UnitOrder::DEFAULT, 1).expect_err("no trained dictionary");
    assert!(matches!(error, Error::Dictionary { .. }), "{error}");
}

/// Goal: a trained dictionary is recognized, helps with data like its samples, and is refused if a
/// byte of its tables is wrong. Method: objects of 100 kinds; all algorithms; also too few samples.
#[test]
fn a_trained_dictionary_pays() {
    let mut random = Random::new(seed());
    let kinds = kinds(&mut random);
    let samples = objects(&mut random, &kinds, 1 << 20);
    let trained = train(&samples, 4096, 16 << 10).expect("they have much in common");
    assert!(trained.len() <= 16 << 10 && trained.starts_with(&[0x37, 0xA4, 0x30, 0xEC]));
    for algorithm in takers() {
        let with_it = zcomp(with(algorithm, &trained), 4096, 1);
        let without = zcomp(algorithm.into(), 4096, 1);
        let unit = objects(&mut random, &kinds, 4096);
        let alone = check_round_trip(&without, &unit).unwrap_or(4096);
        let bytes = check_round_trip(&with_it, &unit).expect("it shrinks");
        assert!(bytes * 10 < alone * 7, "{algorithm}: {bytes} of {alone}, seed {}", seed());
    }
    let bytes = without_tables(&trained);
    assert!(trained.ends_with(bytes) && bytes.len() < trained.len() && bytes.len() > 15 << 10);
    assert_eq!(without_tables(&samples), samples);
    let error = train(&samples[..4096], 4096, 16 << 10).expect_err("one sample");
    assert_eq!(error, Error::Training { samples: 1 });
    assert!(!error.to_string().contains('\n'));
    train(&[], 4096, 16 << 10).expect_err("no sample");
}
