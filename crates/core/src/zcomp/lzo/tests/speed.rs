//! The speed of our codec compared with liblzo2.

use super::super::LzoCompressor;
use super::super::decoder::decode;
use super::liblzo2::Liblzo2;
use super::{VERSIONS, stream_bytes_max};
use crate::page::same_filled;

/// Seconds to compress, seconds to decompress, and bytes of all streams.
type Measure = (f64, f64, usize);

/// Compresses and decompresses all `units`, and keeps each stream in `store`.
#[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
fn measure(
    units: &[&[u8]],
    store: &mut [u8],
    compress: &mut dyn FnMut(&[u8], &mut [u8]) -> usize,
    decompress: &mut dyn FnMut(&[u8], &mut [u8]) -> bool,
) -> Measure {
    let place = stream_bytes_max(units[0].len());
    let mut lengths = vec![0; units.len()];
    let begin = std::time::Instant::now();
    for ((unit, stream), length) in units.iter().zip(store.chunks_mut(place)).zip(&mut lengths) {
        *length = compress(unit, stream);
    }
    let compress_s = begin.elapsed().as_secs_f64();
    let mut dest = vec![0; units[0].len()];
    let begin = std::time::Instant::now();
    for (stream, length) in store.chunks(place).zip(&lengths) {
        assert!(decompress(&stream[..*length], &mut dest));
    }
    (compress_s, begin.elapsed().as_secs_f64(), lengths.iter().sum())
}

/// The median.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Prints speed and ratio of our codec and of liblzo2, and the quotient: the median of rounds in
/// which both run one after the other. Run it as `ZCOMP_FILE=corpus cargo test --release -p
/// zfolio-core lzo_speed -- --ignored --nocapture`. It takes `ZCOMP_MIB` of the file, in 16 pieces
/// spread over it; of these only units that consist of runs of 64 zeros to at least `ZCOMP_ZEROS`
/// percent.
#[test]
#[ignore = "a measurement: needs ZCOMP_FILE, liblzo2 and a quiet machine"]
fn lzo_speed() {
    let path = std::env::var("ZCOMP_FILE").expect("ZCOMP_FILE names a file to compress");
    let file = std::fs::read(&path).expect("ZCOMP_FILE can be read");
    let mib = std::env::var("ZCOMP_MIB").map_or(8, |s| s.parse().expect("a number"));
    let zeros = std::env::var("ZCOMP_ZEROS").map_or(0, |s| s.parse().expect("a percentage"));
    let mut liblzo2 = Liblzo2::load().expect("liblzo2 to compare with");
    let decompress = Liblzo2::load().expect("liblzo2 to compare with");
    let piece = (mib << 20) / 16;
    let data: Vec<u8> = file
        .chunks(file.len() / 16)
        .flat_map(|part| &part[..piece.min(part.len())])
        .copied()
        .collect();
    println!("{:>7} {:<8} {:>15} {:>15} {:>15}", "unit", "MB/s", "in", "out", "ratio");
    for unit_bytes in [4 << 10, 16 << 10, 64 << 10, 2 << 20] {
        let has_zeros = |unit: &[u8]| {
            let runs = unit.chunks(64).filter(|part| part.iter().all(|byte| *byte == 0));
            runs.count() * 64 * 100 >= zeros * unit.len()
        };
        let units: Vec<&[u8]> = data
            .chunks_exact(unit_bytes)
            .filter(|unit| same_filled(unit).is_none() && has_zeros(unit))
            .collect();
        if units.is_empty() {
            continue;
        }
        let mut store = vec![1; units.len() * stream_bytes_max(unit_bytes)];
        let mut ours = VERSIONS.map(LzoCompressor::new);
        let mut rounds: [Vec<Measure>; 3] = Default::default();
        for _ in 0..15 {
            let theirs = measure(
                &units,
                &mut store,
                &mut |unit, stream| liblzo2.compress(0, unit, stream),
                &mut |stream, dest| decompress.decompress(stream, dest),
            );
            rounds[0].push(theirs);
            for (version, ours) in ours.iter_mut().enumerate() {
                rounds[1 + version].push(measure(
                    &units,
                    &mut store,
                    &mut |unit, stream| ours.encode(unit, stream).expect("fits"),
                    &mut |stream, dest| decode(stream, dest, VERSIONS[version]).is_ok(),
                ));
            }
        }
        let megabytes = (units.len() * unit_bytes) as f64 / 1e6;
        for (name, round) in ["liblzo2", "lzo", "lzo-rle"].iter().zip(&rounds) {
            let column = |seconds: fn(&Measure) -> f64| {
                let speed = megabytes / median(round.iter().map(seconds).collect());
                let pairs = round.iter().zip(&rounds[0]);
                let times = median(pairs.map(|(a, b)| seconds(b) / seconds(a)).collect());
                format!("{speed:.0} ({times:.3})")
            };
            println!(
                "{unit_bytes:>7} {name:<8} {:>15} {:>15} {:>15}",
                column(|measure| measure.0),
                column(|measure| measure.1),
                format!(
                    "{:.3} ({:.4})",
                    megabytes * 1e6 / round[0].2 as f64,
                    rounds[0][0].2 as f64 / round[0].2 as f64
                ),
            );
        }
    }
}
