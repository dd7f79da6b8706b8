//! What batches save in the store: `batch CORPUS`, with the corpus of `zfolio corpus make`. 32 MiB in units of 4 KiB go
//! into a store one unit a call, one folio of 64 KiB a call, and 32 folios a call. Medians, of rounds that take turns.

#[path = "../../core/tests/heap/mod.rs"]
mod heap;

use std::fs::File;
use std::os::unix::fs::FileExt;

use heap::Heap;
use zfolio_core::page::UnitOrder;
use zfolio_core::stats::Figures;
use zfolio_core::store::{CodecId, Key, Outgoing, Store};
use zfolio_core::zcomp::{Algorithm, Zcomp};
use zfolio_sys::clock;

const UNIT: usize = 4096;
const FOLIO: usize = 16;
const BYTES: usize = 32 << 20;
const ROUNDS: usize = 9;
/// Units a call.
const CALLS: [usize; 3] = [FOLIO, 1, 32 * FOLIO];

/// Nanoseconds a unit.
fn run(store: &Store<Heap>, bytes: &[u8], units: usize) -> f64 {
    let figures = Figures::default();
    let mut all: Vec<_> = bytes.chunks_exact(UNIT).map(|unit| Outgoing::new(unit, None)).collect();
    let began = clock::monotonic_ns();
    for call in all.chunks_mut(units) {
        store.store(0, CodecId::FIRST, call, &figures);
    }
    let took = (clock::monotonic_ns() - began) as f64 / all.len() as f64;
    let entries = all.iter_mut().filter_map(|unit| unit.entry.take());
    entries.for_each(|entry| store.invalidate(entry, &figures));
    took
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = File::open(std::env::args().nth(1).ok_or("batch CORPUS")?)?;
    let mut bytes = vec![0; BYTES];
    corpus.read_exact_at(&mut bytes, 64 << 20)?;
    let unit = UnitOrder::from_bytes(UNIT).ok_or("a unit")?;
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let codec = Zcomp::new(algorithm.into(), unit, 1)?;
        let store = Store::new(vec![codec], Heap, Key::new([7; Key::BYTES]));
        let mut rounds: Vec<[f64; 3]> =
            (0..=ROUNDS).map(|_| CALLS.map(|units| run(&store, &bytes, units))).collect();
        // The first has the pool's pages made.
        rounds.remove(0);
        let folio = median(rounds.iter().map(|round| round[0]).collect());
        let faster = |at: usize| median(rounds.iter().map(|round| round[at] / round[0]).collect());
        println!(
            "{algorithm}: {:.2} us a unit by folios; one unit a call takes {:.3} of that, 32 folios a call {:.3}",
            folio / 1000.0,
            faster(1),
            faster(2)
        );
    }
    Ok(())
}
