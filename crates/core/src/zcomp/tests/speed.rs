//! The speed of every backend, through the batch interface.

use std::ops::Range;

use super::{unit, zcomp};
use crate::page::same_filled;
use crate::zcomp::{Outcome, Params, Zcomp};

/// Compresses `units` into `store` and decompresses those that shrank; returns seconds for each,
/// and the bytes kept.
#[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
fn measure(zcomp: &Zcomp, units: &[&[u8]], store: &mut [u8]) -> (f64, f64, usize) {
    let mut kept: Vec<Range<usize>> = Vec::with_capacity(units.len());
    let (mut end, mut incompressible_bytes) = (0, 0);
    let begin = std::time::Instant::now();
    zcomp.compress(0, units, &mut |elements| {
        for element in elements {
            match element.outcome {
                Outcome::Compressed(compressed) => {
                    let place = end..end + compressed.len();
                    store[place.clone()].copy_from_slice(compressed);
                    end = place.end;
                    kept.push(place);
                }
                _ => incompressible_bytes += units[element.index].len(),
            }
        }
    });
    let compress_s = begin.elapsed().as_secs_f64();
    let mut dest = vec![0; units[0].len()];
    let begin = std::time::Instant::now();
    for place in kept {
        zcomp.decompress(0, &store[place], &mut dest).expect("what was compressed");
    }
    (compress_s, begin.elapsed().as_secs_f64(), end + incompressible_bytes)
}

fn parsed(params: &str) -> Params {
    let read = |path: &str| std::fs::read(path).map_err(|error| error.to_string());
    params.parse::<Params>().and_then(|params| params.with_dictionary(read)).expect("parameters")
}

/// Prints speed and ratio. Run it as `ZCOMP_FILE=corpus cargo test --release -p zfolio-core
/// zcomp_speed -- --ignored --nocapture`. `ZCOMP_PARAMS="lz4 zstd,level=-3"` chooses what is
/// measured.
#[test]
#[ignore = "a measurement: needs ZCOMP_FILE and a quiet machine"]
fn zcomp_speed() {
    let path = std::env::var("ZCOMP_FILE").expect("ZCOMP_FILE names a file to compress");
    let data = std::fs::read(&path).expect("ZCOMP_FILE can be read");
    // Not zeros, so that every page is mapped before the clock starts.
    let mut store = vec![1; data.len()];
    let params = std::env::var("ZCOMP_PARAMS");
    let params = params.as_deref().unwrap_or("lz4 zstd,level=-3 zstd zstd,level=3 deflate");
    println!(
        "{:<16} {:>5} {:>9} {:>9} {:>6} {:>9}",
        "MB/s", "unit", "in", "out", "ratio", "memory"
    );
    for params in params.split(' ').map(parsed) {
        for unit_bytes in [4 << 10, 16 << 10, 64 << 10] {
            let zcomp = zcomp(params.clone(), unit_bytes, 1);
            // Without same-filled units, which would make the codec look better.
            let units: Vec<&[u8]> =
                data.chunks_exact(unit_bytes).filter(|unit| same_filled(unit).is_none()).collect();
            let mib = (units.len() * unit_bytes) as f64 / 1e6;
            let best = (0..3).map(|_| measure(&zcomp, &units, &mut store));
            let (compress_s, decompress_s, bytes) =
                best.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1), a.2)).expect("three measurements");
            println!(
                "{:<16} {:>5} {:>9.0} {:>9.0} {:>6.2} {:>9}",
                params.to_string(),
                unit(unit_bytes).to_string(),
                mib / compress_s,
                mib / decompress_s,
                mib * 1e6 / bytes as f64,
                zcomp.memory_bytes(),
            );
        }
    }
}
