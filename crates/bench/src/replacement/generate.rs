//! Generated traces, for machines without valgrind. The same seed gives the same traces.

use zfolio_core::testing::Random;

use super::trace::Trace;

/// Pages of each trace, about: 16 MiB of memory.
const PAGES: u64 = 4096;
/// Accesses of each trace.
const ACCESSES: usize = 200_000;

/// All generated traces.
pub(crate) fn all(seed: u64) -> Vec<Trace> {
    let random = || Random::new(seed);
    vec![
        Trace::of("loop", (0..PAGES).cycle().take(ACCESSES)),
        uniform(random()),
        zipf(random()),
        scan_and_hot_set(random()),
        phases(random()),
    ]
}

/// Every page is equally likely.
fn uniform(mut random: Random) -> Trace {
    Trace::of("uniform", (0..ACCESSES).map(|_| random.below_u64(PAGES)))
}

/// The page of rank r is accessed with a probability proportional to 1/r. The ranks are spread over
/// the addresses.
fn zipf(mut random: Random) -> Trace {
    // 2^32 / r in whole numbers, summed up: the same on every machine.
    let mut sums = Vec::new();
    let mut sum = 0;
    for rank in 1..=PAGES {
        sum += (1 << 32) / rank;
        sums.push(sum);
    }
    let accesses = (0..ACCESSES).map(|_| {
        let chosen = random.below_u64(sum);
        let rank = sums.partition_point(|sum| *sum <= chosen) as u64;
        // An odd factor permutes the pages.
        rank * 1_597 % PAGES
    });
    Trace::of("zipf", accesses)
}

/// A scan over all pages, again and again, between accesses to a hot eighth of the pages.
fn scan_and_hot_set(mut random: Random) -> Trace {
    let hot = PAGES / 8;
    let mut next = 0;
    let accesses = (0..ACCESSES).map(|_| {
        if random.below(2) == 0 {
            return random.below_u64(hot);
        }
        next = (next + 1) % (PAGES - hot);
        hot + next
    });
    Trace::of("scan + hot set", accesses)
}

/// Ten phases; in each, most accesses go to another eighth of the pages, and some to any page.
fn phases(mut random: Random) -> Trace {
    let part = PAGES / 8;
    let accesses = (0..ACCESSES).map(|at| {
        let phase = (at / (ACCESSES / 10)) as u64;
        match random.below(20) {
            0 => random.below_u64(PAGES),
            _ => phase * 3 % 8 * part + random.below_u64(part),
        }
    });
    Trace::of("phases", accesses)
}

#[cfg(test)]
mod tests {
    use super::{ACCESSES, PAGES, all};

    #[test]
    fn a_seed_gives_the_same_traces_again() {
        for ((one, again), other) in all(7).into_iter().zip(all(7)).zip(all(8)) {
            assert_eq!(one.accesses, again.accesses, "{}", one.name);
            assert_eq!(one.accesses == other.accesses, one.name == "loop", "{}", one.name);
            assert_eq!(one.accesses.len(), ACCESSES);
            assert!(one.pages.len() as u64 > PAGES / 2 && one.pages.len() as u64 <= PAGES);
        }
    }
}
