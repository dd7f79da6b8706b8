//! How long a folio of 64 KiB takes in units of 4 KiB, alone and with a crew, and how long one unit takes:
//! `folio CORPUS [WORKERS]`, with the corpus of `zfolio corpus make`. Medians, of rounds that take turns.

use std::fs::File;
use std::os::unix::fs::FileExt;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{Algorithm, Element, Outcome, Params, Unpack, Zcomp};
use zfolio_sys::clock;
use zfolio_workers::{Crew, with_crew};

const UNIT: usize = 4096;
const FOLIO: usize = 64 << 10;
const FOLIOS: usize = 512;
const ROUNDS: usize = 7;

/// Nanoseconds of each batch of so many bytes, in and out.
fn run(codec: &Zcomp, bytes: &[u8], batch: usize) -> [f64; 2] {
    let mut took = [Vec::new(), Vec::new()];
    for folio in bytes.chunks_exact(batch) {
        let units: Vec<&[u8]> = folio.chunks_exact(UNIT).collect();
        let mut packed = vec![Vec::with_capacity(UNIT); units.len()];
        let began = clock::monotonic_ns();
        codec.compress(0, &units, &mut |elements: &[Element<'_>]| {
            for element in elements {
                if let Outcome::Compressed(bytes) = element.outcome {
                    packed[element.index].extend_from_slice(bytes);
                }
            }
        });
        took[0].push((clock::monotonic_ns() - began) as f64);
        let mut into = vec![0; batch];
        let jobs = packed.iter().zip(into.chunks_exact_mut(UNIT));
        let mut jobs: Vec<_> = jobs
            .filter(|(from, _)| !from.is_empty())
            .map(|(from, to)| Unpack::new(from, to))
            .collect();
        let began = clock::monotonic_ns();
        codec.unpack(0, &mut jobs);
        took[1].push((clock::monotonic_ns() - began) as f64);
    }
    took.map(median)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let corpus = File::open(arguments.next().ok_or("folio CORPUS [WORKERS]")?)?;
    let workers = arguments.next().map_or(Ok(1), |workers| workers.parse())?;
    let mut bytes = vec![0; FOLIO * FOLIOS];
    corpus.read_exact_at(&mut bytes, 64 << 20)?;
    let unit = UnitOrder::from_bytes(UNIT).ok_or("a unit")?;
    let threads = Crew::new(workers).start()?;
    for algorithm in [Algorithm::Lz4, Algorithm::LzoRle, Algorithm::Zstd] {
        let alone = Zcomp::new(Params::from(algorithm), unit, 1)?;
        let together = with_crew(Params::from(algorithm), unit, 1, threads.crew())?;
        for (what, batch) in [("a folio", FOLIO), ("one unit", UNIT)] {
            print(&format!("{algorithm}, {what}"), [&alone, &together], &bytes, batch, workers);
        }
    }
    Ok(())
}

/// Measures one size of batch alone and with workers.
fn print(what: &str, codecs: [&Zcomp; 2], bytes: &[u8], batch: usize, workers: usize) {
    let mut ratios = [Vec::new(), Vec::new()];
    let mut ns = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let [one, with] = codecs.map(|codec| run(codec, bytes, batch));
        for way in 0..2 {
            ratios[way].push(with[way] / one[way]);
            ns[way].push(one[way]);
        }
    }
    let [inward, outward] = ratios.map(median);
    let [one_in, one_out] = ns.map(median);
    println!(
        "{what}: in {:.2} us alone, {inward:.3} of it with {workers} workers; out {:.2} us, {outward:.3}",
        one_in / 1000.0,
        one_out / 1000.0
    );
}
