//! Generated accesses to pages, as programs make them. The same seed gives the same accesses.

use super::Random;

/// How large a trace is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// So many pages, numbered from 0: 8 at least.
    pub pages: u64,
    /// So many accesses: 10 at least.
    pub accesses: usize,
}

/// All generated traces with their names: the numbers of the pages, in the order of the accesses.
#[must_use]
pub fn all(seed: u64, shape: Shape) -> [(&'static str, Vec<u64>); 5] {
    let random = || Random::new(seed);
    [
        ("loop", (0..shape.pages).cycle().take(shape.accesses).collect()),
        ("uniform", uniform(random(), shape)),
        ("zipf", zipf(random(), shape)),
        ("scan + hot set", scan_and_hot_set(random(), shape)),
        ("phases", phases(random(), shape)),
    ]
}

/// Every page is equally likely.
fn uniform(mut random: Random, shape: Shape) -> Vec<u64> {
    (0..shape.accesses).map(|_| random.below_u64(shape.pages)).collect()
}

/// The page of rank r is accessed with a probability proportional to 1/r. The ranks are spread over
/// the addresses.
fn zipf(mut random: Random, shape: Shape) -> Vec<u64> {
    // 2^32 / r in whole numbers, summed up: the same on every machine.
    let mut sums = Vec::new();
    let mut sum = 0;
    for rank in 1..=shape.pages {
        sum += (1 << 32) / rank;
        sums.push(sum);
    }
    let accesses = (0..shape.accesses).map(|_| {
        let chosen = random.below_u64(sum);
        let rank = sums.partition_point(|sum| *sum <= chosen) as u64;
        // An odd factor permutes the pages.
        rank * 1_597 % shape.pages
    });
    accesses.collect()
}

/// A scan over all pages, again and again, between accesses to a hot eighth of the pages.
fn scan_and_hot_set(mut random: Random, shape: Shape) -> Vec<u64> {
    let hot = shape.pages / 8;
    let mut next = 0;
    let accesses = (0..shape.accesses).map(|_| {
        if random.below(2) == 0 {
            return random.below_u64(hot);
        }
        next = (next + 1) % (shape.pages - hot);
        hot + next
    });
    accesses.collect()
}

/// Ten phases; in each, most accesses go to another eighth of the pages, and some to any page.
fn phases(mut random: Random, shape: Shape) -> Vec<u64> {
    let part = shape.pages / 8;
    let accesses = (0..shape.accesses).map(|at| {
        let phase = (at / (shape.accesses / 10)) as u64;
        match random.below(20) {
            0 => random.below_u64(shape.pages),
            _ => phase * 3 % 8 * part + random.below_u64(part),
        }
    });
    accesses.collect()
}

#[cfg(test)]
mod tests {
    use super::{Shape, all};

    #[test]
    fn a_seed_gives_the_same_traces_again() {
        let shape = Shape { pages: 4096, accesses: 200_000 };
        let traces = |seed| all(seed, shape);
        for ((one, again), other) in traces(7).into_iter().zip(traces(7)).zip(traces(8)) {
            assert_eq!(one, again);
            assert_eq!(one.1 == other.1, one.0 == "loop", "{}", one.0);
            assert_eq!(one.1.len(), shape.accesses);
            assert!(one.1.iter().all(|page| *page < shape.pages), "{}", one.0);
        }
    }
}
