//! Accesses to pages, in memory.
//!
//! # Cost
//!
//! 4 bytes for each access and 8 for each page.

use std::collections::BTreeSet;

use zfolio_core::testing::recording::Touch;

/// One access of a [`Trace`]: which of its pages, and whether it writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Visit(u32);

impl Visit {
    const WRITE: u32 = 1 << 31;

    /// The page, as an index into [`Trace::pages`].
    pub(crate) fn page(self) -> u32 {
        self.0 & !Visit::WRITE
    }

    pub(crate) fn is_write(self) -> bool {
        self.0 & Visit::WRITE != 0
    }
}

/// The accesses of a program, in order.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) name: String,
    /// The numbers of the pages accessed, rising.
    pub(crate) pages: Vec<u64>,
    /// Each access.
    pub(crate) accesses: Vec<Visit>,
}

impl Trace {
    /// The trace of reads of these page numbers.
    pub(crate) fn of(name: &str, pages: impl IntoIterator<Item = u64>) -> Trace {
        let touches: Vec<Touch> =
            pages.into_iter().map(|page| Touch { page, write: false }).collect();
        Trace::of_touches(name, &touches)
    }

    /// The trace of these accesses.
    pub(crate) fn of_touches(name: &str, touches: &[Touch]) -> Trace {
        let pages: BTreeSet<u64> = touches.iter().map(|touch| touch.page).collect();
        let pages: Vec<u64> = pages.into_iter().collect();
        let visit = |touch: &Touch| {
            let index = pages.binary_search(&touch.page).expect("every page is in the set");
            let page = u32::try_from(index).expect("fewer pages than ACCESSES_MAX");
            Visit(page | if touch.write { Visit::WRITE } else { 0 })
        };
        let accesses = touches.iter().map(visit).collect();
        Trace { name: name.to_owned(), pages, accesses }
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::recording::Touch;

    use super::{Trace, Visit};

    #[test]
    fn pages_are_numbered_in_the_order_of_their_addresses() {
        let trace = Trace::of("x", [70, 5, 70, 6]);
        assert_eq!(
            (trace.pages, trace.accesses),
            (vec![5, 6, 70], [2, 0, 2, 1].map(Visit).to_vec())
        );
        let touches =
            [(9, true), (7, false), (9, false)].map(|(page, write)| Touch { page, write });
        let visits = Trace::of_touches("x", &touches).accesses;
        let visits: Vec<_> = visits.iter().map(|visit| (visit.page(), visit.is_write())).collect();
        assert_eq!(visits, [(1, true), (0, false), (1, false)]);
    }
}
