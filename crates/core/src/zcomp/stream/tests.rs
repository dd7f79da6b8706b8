//! Tests of decompression in batches: into scattered pieces, in part, and with failures.

use super::super::tests::{Random, compressed, seed, text, zcomp};
use super::super::{Error, Extent, Packed, Params, Zcomp};

const KINDS: [&str; 8] = [
    "lz4",
    "lz4,dict=d",
    "lz4hc,level=3",
    "zstd",
    "zstd,dict=d",
    "deflate",
    "deflate,level=6,window=9",
    "deflate,dict=d",
];

fn params(random: &mut Random, kind: &str) -> Params {
    let dictionary = text(random, 20_000);
    kind.parse::<Params>()
        .and_then(|params| params.with_dictionary(|_| Ok(dictionary)))
        .expect("parameters")
}

/// `bytes`, cut at random into separate allocations; some pieces are empty.
fn pieces(random: &mut Random, bytes: usize) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while rest > 0 {
        let piece = random.below(rest.min(5000) + 1);
        pieces.push(vec![0xA5; piece]);
        rest -= piece;
    }
    pieces
}

/// Decompresses one element into `pieces`.
fn scatter(
    zcomp: &Zcomp,
    source: &[u8],
    pieces: &mut [Vec<u8>],
    extent: Extent,
) -> Result<Vec<u8>, Error> {
    let mut dest: Vec<&mut [u8]> = pieces.iter_mut().map(Vec::as_mut_slice).collect();
    let mut result = None;
    let packed = Packed { source, dest: &mut dest, extent };
    zcomp.decompress_batch(0, &mut [packed], &mut |index, told| {
        assert_eq!((index, result.replace(told)), (0, None), "told once");
    });
    result.expect("told").map(|()| pieces.concat())
}

/// Goal: every element of a batch goes to its own places and gets its own result, also next to one
/// that fails. Method: random batches of sound, cut and changed units, whole or in part, compared
/// with the units; a cut unit must not affect the others.
#[test]
fn a_batch_goes_to_scattered_places() {
    let mut random = Random::new(seed());
    for kind in KINDS {
        for unit_bytes in [4 << 10, 64 << 10] {
            let zcomp = zcomp(params(&mut random, kind), unit_bytes, 1);
            for _ in 0..10 {
                let count = random.below(12);
                let units: Vec<Vec<u8>> =
                    (0..count).map(|_| text(&mut random, unit_bytes)).collect();
                let mut sources: Vec<Vec<u8>> =
                    units.iter().map(|unit| compressed(&zcomp, unit)).collect();
                let torn: Vec<bool> = (0..count).map(|_| random.below(3) == 0).collect();
                for (source, _) in sources.iter_mut().zip(&torn).filter(|(_, torn)| **torn) {
                    source.truncate(random.below(source.len()));
                }
                let mut places: Vec<Vec<Vec<u8>>> =
                    (0..count).map(|_| pieces(&mut random, unit_bytes)).collect();
                let mut dests: Vec<Vec<&mut [u8]>> = places
                    .iter_mut()
                    .map(|places| places.iter_mut().map(Vec::as_mut_slice).collect())
                    .collect();
                let mut batch: Vec<Packed<'_, '_>> = sources
                    .iter()
                    .zip(&mut dests)
                    .map(|(source, dest)| Packed { source, dest, extent: Extent::Whole })
                    .collect();
                let mut results = Vec::new();
                zcomp.decompress_batch(0, &mut batch, &mut |index, result| {
                    assert_eq!(index, results.len(), "in order");
                    results.push(result);
                });
                assert_eq!(results.len(), count);
                for (index, result) in results.iter().enumerate() {
                    assert_eq!(result.is_err(), torn[index], "{kind}, seed {}", seed());
                    assert!(torn[index] || places[index].concat() == units[index], "{kind}");
                }
            }
        }
    }
}

/// Goal: a prefix of any length is the beginning of the unit, and the stream still works
/// afterwards. Method: random lengths, in pieces, of units of one and of several blocks; also
/// lengths that no unit has.
#[test]
fn a_prefix_is_the_beginning() {
    let mut random = Random::new(seed());
    for kind in KINDS {
        for unit_bytes in [4 << 10, 64 << 10, 512 << 10] {
            let zcomp = zcomp(params(&mut random, kind), unit_bytes, 1);
            let unit = text(&mut random, unit_bytes);
            let source = compressed(&zcomp, &unit);
            for round in 0..20 {
                let wanted = [0, 1, 4096, unit_bytes - 1, unit_bytes];
                let wanted =
                    wanted.get(round).map_or_else(|| random.below(unit_bytes), |wanted| *wanted);
                let mut places = pieces(&mut random, wanted);
                let prefix = scatter(&zcomp, &source, &mut places, Extent::Prefix);
                assert!(prefix.is_ok_and(|prefix| prefix == unit[..wanted]), "{kind}, {wanted}");
                let mut whole = vec![0; unit_bytes];
                zcomp.decompress(0, &source, &mut whole).expect("what was compressed");
                assert!(whole == unit, "{kind}, seed {}", seed());
            }
            for bytes in [unit_bytes + 1, 3 * unit_bytes] {
                for extent in [Extent::Whole, Extent::Prefix] {
                    let mut places = [vec![0; 1], vec![0; bytes - 1]];
                    scatter(&zcomp, &source, &mut places, extent).expect_err("no unit has it");
                }
            }
            let mut places = [vec![0; 1], vec![0; unit_bytes - 2]];
            scatter(&zcomp, &source, &mut places, Extent::Whole).expect_err("the unit is longer");
        }
    }
}

/// Goal: `ZC-4` for prefixes. Method: noise, and sound units that were changed or cut, with random
/// lengths. Whether the damage is noticed is luck, but the stream must still work, and nothing may
/// panic.
#[test]
fn a_prefix_of_anything_is_harmless() {
    let mut random = Random::new(seed());
    for kind in KINDS {
        let unit_bytes = 256 << 10;
        let zcomp = zcomp(params(&mut random, kind), unit_bytes, 1);
        let unit = text(&mut random, unit_bytes);
        let source = compressed(&zcomp, &unit);
        for _ in 0..100 {
            let mut changed = source.clone();
            let at = random.below(changed.len());
            changed[at] ^= 1 << random.below(8);
            changed.truncate(random.below(2 * changed.len()));
            let noise_bytes = random.below(5000);
            for input in [changed, random.bytes(noise_bytes)] {
                let wanted = random.below(unit_bytes + 1);
                let mut places = pieces(&mut random, wanted);
                scatter(&zcomp, &input, &mut places, Extent::Prefix).ok();
            }
            let mut places = [vec![0; 5000]];
            let prefix = scatter(&zcomp, &source, &mut places, Extent::Prefix);
            assert!(prefix.is_ok_and(|prefix| prefix == unit[..5000]), "{kind}, seed {}", seed());
        }
    }
}

/// Prints the cost of a prefix. Run it as `ZCOMP_FILE=corpus cargo test --release -p zfolio-core
/// prefix_speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement: needs ZCOMP_FILE and a quiet machine"]
#[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
fn prefix_speed() {
    let path = std::env::var("ZCOMP_FILE").expect("ZCOMP_FILE names a file to compress");
    let data = std::fs::read(&path).expect("ZCOMP_FILE can be read");
    println!("us per unit of 64K: its first page, 32K, all of it, all of it in pages");
    for (kind, unit_bytes) in
        [("lz4", 64 << 10), ("zstd", 64 << 10), ("zstd", 1 << 20), ("deflate,window=12", 64 << 10)]
    {
        let zcomp = zcomp(kind.parse().expect("parameters"), unit_bytes, 1);
        let mut sources: Vec<Vec<u8>> = Vec::new();
        for unit in data.chunks_exact(unit_bytes).take((64 << 20) / unit_bytes) {
            zcomp.compress(0, &[unit], &mut |elements| {
                if let super::Outcome::Compressed(bytes) = elements[0].outcome {
                    sources.push(bytes.to_vec());
                }
            });
        }
        let mut unit = vec![0; unit_bytes];
        let mut us = |wanted: usize, piece: usize, extent: Extent| {
            let mut rounds: Vec<f64> = (0..5)
                .map(|_| {
                    let begin = std::time::Instant::now();
                    for source in &sources {
                        let mut dest: Vec<&mut [u8]> = unit[..wanted].chunks_mut(piece).collect();
                        let packed = Packed { source, dest: &mut dest, extent };
                        zcomp.decompress_batch(0, &mut [packed], &mut |_, result| {
                            result.expect("sound")
                        });
                    }
                    begin.elapsed().as_secs_f64() * 1e6 / sources.len() as f64
                })
                .collect();
            rounds.sort_by(f64::total_cmp);
            rounds[2]
        };
        println!(
            "{kind:<18} {unit_bytes:>8} {:>7.1} {:>7.1} {:>7.1} {:>7.1}",
            us(4096, 4096, Extent::Prefix),
            us(unit_bytes / 2, unit_bytes, Extent::Prefix),
            us(unit_bytes, unit_bytes, Extent::Whole),
            us(unit_bytes, 4096, Extent::Whole),
        );
    }
}
