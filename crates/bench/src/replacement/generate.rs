//! Generated traces, for machines without valgrind. The same seed gives the same traces.

use zfolio_core::testing::traces::{self, Shape};

use super::trace::Trace;

/// 16 MiB of memory.
const SHAPE: Shape = Shape { pages: 4096, accesses: 200_000 };

/// All generated traces.
pub(crate) fn all(seed: u64) -> Vec<Trace> {
    let traces = traces::all(seed, SHAPE).into_iter();
    traces.map(|(name, accesses)| Trace::of(name, accesses)).collect()
}

#[cfg(test)]
mod tests {
    use super::{SHAPE, all};

    /// Goal: hardly a page is left out, so that a share of the pages is a share of the memory.
    #[test]
    fn traces_touch_their_pages() {
        for trace in all(7) {
            let pages = trace.pages.len() as u64;
            assert!(pages > SHAPE.pages / 2 && pages <= SHAPE.pages, "{}", trace.name);
            assert_eq!(trace.accesses.len(), SHAPE.accesses);
        }
    }
}
