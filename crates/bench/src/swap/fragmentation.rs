//! The fragmentation test: do folios of 64 KiB still find room when memory has come and gone for some time?
//!
//! Memory of folios of 64 KiB, and beside it a fifteenth as much in pages of 4 KiB. All of it is swapped out.
//! Then, in each round,
//!
//! 1. a quarter of it, chosen at random, is dropped, and touched anew: its slots are freed;
//! 2. a quarter, chosen at random, is swapped in, and its slots are freed: whole folios, or page by page;
//! 3. all that is in memory is swapped out. A folio that came in whole, or was touched anew, takes 16 slots
//!    together, and if there is no such run, it **falls back**: each of its pages takes a slot. Pages that came
//!    in one by one take slots one by one.
//!
//! The fallback rate is the part of the folios that fell back. A book that says whose each slot is finds any
//! slot that is handed out twice.

use serde_json::{Value, json};
use zfolio_core::swap::slots::Slots;

use crate::usemem::random_below;

/// The order of a folio, and its pages.
const ORDER: u32 = 4;
const FOLIO_PAGES: usize = 1 << ORDER;

/// CPUs that take slots.
const CPUS: usize = 2;

/// Of 16 parts of the memory one consists of single pages.
const SMALL_PART: usize = 16;

/// The part of the memory that is dropped in a round, and the part that is swapped in.
const ROUND_PART: usize = 4;

/// How folios come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SwapIn {
    Whole,
    PageByPage,
}

/// One run of the test: the fallback rate of each round, in percent.
#[derive(Debug)]
pub(crate) struct Fragmentation {
    pub(crate) swap_in: SwapIn,
    pub(crate) full_percent: u32,
    pub(crate) rates: Vec<f64>,
}

impl Fragmentation {
    pub(crate) fn json(&self) -> Value {
        json!({
            "swap_in": if self.swap_in == SwapIn::Whole { "whole" } else { "page by page" },
            "full_percent": self.full_percent,
            "fallback_percent": self.rates,
        })
    }
}

/// Plays `rounds` rounds on an area of `slots` slots, of which all memory needs `full_percent`.
pub(crate) fn measure(
    slots: u32,
    swap_in: SwapIn,
    full_percent: u32,
    rounds: u32,
    seed: u64,
) -> Fragmentation {
    let pages = slots as usize * full_percent as usize / 100;
    let small = pages / SMALL_PART;
    let folios = (pages - small) / FOLIO_PAGES;
    let mut test = Test {
        area: Slots::new(slots, CPUS),
        seed,
        folios: vec![Folio::default(); folios],
        small: vec![None; small],
        book: vec![None; slots as usize],
    };
    test.swap_out();
    let rates = (0..rounds).map(|_| test.round(swap_in)).collect();
    Fragmentation { swap_in, full_percent, rates }
}

/// Memory of 64 KiB.
#[derive(Clone, Debug, Default)]
struct Folio {
    /// The pages that are in memory came one by one.
    is_split: bool,
    /// Where each page is; `None` for one that is in memory.
    slots: [Option<u32>; FOLIO_PAGES],
}

/// Whose a slot is: a page of the folios or, counted after these, a single page.
type Page = usize;

struct Test {
    area: Slots,
    seed: u64,
    folios: Vec<Folio>,
    small: Vec<Option<u32>>,
    /// Whose each slot is.
    book: Vec<Option<Page>>,
}

impl Test {
    /// Returns the fallback rate in percent.
    fn round(&mut self, swap_in: SwapIn) -> f64 {
        let before = self.area.counts();
        let (folios, small) = (self.folios.len(), self.small.len());
        for _ in 0..folios / ROUND_PART {
            let nth = random_below(&mut self.seed, folios);
            self.bring_folio(nth);
            // What is touched anew is one folio again.
            self.folios[nth].is_split = false;
        }
        for _ in 0..folios / ROUND_PART {
            let nth = random_below(&mut self.seed, folios);
            match swap_in {
                SwapIn::Whole => self.bring_folio(nth),
                SwapIn::PageByPage => self.bring_pages(),
            }
        }
        for _ in 0..small / ROUND_PART * 2 {
            let nth = random_below(&mut self.seed, small);
            let slot = self.small[nth].take();
            self.free(folios * FOLIO_PAGES + nth, slot);
        }
        self.swap_out();
        self.area.take_discards(usize::MAX, &mut |range| self.area.discarded(range));
        let after = self.area.counts();
        let order = ORDER as usize;
        let fallen = after.swpout_fallback[order] - before.swpout_fallback[order];
        let tried = after.swpout[order] - before.swpout[order] + fallen;
        if tried == 0 { 0.0 } else { fallen as f64 * 100.0 / tried as f64 }
    }

    /// Brings a whole folio into memory.
    fn bring_folio(&mut self, nth: usize) {
        for (page, slot) in std::mem::take(&mut self.folios[nth].slots).into_iter().enumerate() {
            self.free(nth * FOLIO_PAGES + page, slot);
        }
    }

    /// Brings as many single pages into memory as a folio has, from anywhere.
    fn bring_pages(&mut self) {
        for _ in 0..FOLIO_PAGES {
            let page = random_below(&mut self.seed, self.folios.len() * FOLIO_PAGES);
            let folio = &mut self.folios[page / FOLIO_PAGES];
            let slot = folio.slots[page % FOLIO_PAGES].take();
            folio.is_split |= slot.is_some();
            self.free(page, slot);
        }
    }

    /// Frees the slot of a page, if that was not in memory.
    fn free(&mut self, page: Page, slot: Option<u32>) {
        let Some(slot) = slot else { return };
        let found = self.book[slot as usize].take();
        assert_eq!(found, Some(page), "the page in slot {slot}");
        self.area.free(slot, 1);
    }

    /// Swaps all memory out, folios and single pages mixed.
    fn swap_out(&mut self) {
        let (folios, small) = (self.folios.len(), self.small.len());
        for nth in 0..folios {
            self.swap_out_folio(nth);
            let first = folios * FOLIO_PAGES;
            let mixed_in = first + nth * small / folios..first + (nth + 1) * small / folios;
            mixed_in.for_each(|page| self.swap_out_page(page));
        }
    }

    /// Swaps a folio out: whole, if it is one in memory and there is a run of slots, else what of it is in
    /// memory page by page.
    fn swap_out_folio(&mut self, nth: usize) {
        let folio = &self.folios[nth];
        if !folio.is_split && folio.slots.iter().all(Option::is_none) {
            let cpu = random_below(&mut self.seed, CPUS);
            if let Some(first) = self.area.take(cpu, ORDER) {
                for (page, slot) in (0..FOLIO_PAGES).zip(first..) {
                    self.note(nth * FOLIO_PAGES + page, slot);
                }
                return;
            }
            self.folios[nth].is_split = true;
        }
        (0..FOLIO_PAGES).for_each(|page| self.swap_out_page(nth * FOLIO_PAGES + page));
    }

    fn swap_out_page(&mut self, page: Page) {
        if self.slot_of(page).is_none() {
            let cpu = random_below(&mut self.seed, CPUS);
            let slot = self.area.take(cpu, 0).expect("the area is as large as all memory");
            self.note(page, slot);
        }
    }

    fn slot_of(&mut self, page: Page) -> &mut Option<u32> {
        let folios = self.folios.len() * FOLIO_PAGES;
        match page.checked_sub(folios) {
            Some(nth) => &mut self.small[nth],
            None => &mut self.folios[page / FOLIO_PAGES].slots[page % FOLIO_PAGES],
        }
    }

    /// Notes that a page is in a slot.
    fn note(&mut self, page: Page, slot: u32) {
        let other = self.book[slot as usize].replace(page);
        assert_eq!(other, None, "slot {slot} is handed out twice");
        *self.slot_of(page) = Some(slot);
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::swap::slots::CLUSTER_SLOTS;

    use super::{SwapIn, measure};

    /// Goal: known results. With whole folios no folio falls back up to 90 %; with single pages all of them
    /// do before long, where the area is 90 % full.
    #[test]
    fn whole_folios_never_fall_back_and_single_pages_make_them() {
        let slots = 32 * CLUSTER_SLOTS;
        for seed in 1..6 {
            for full in [50, 75, 90] {
                let whole = measure(slots, SwapIn::Whole, full, 20, seed);
                assert!(whole.rates.iter().all(|rate| *rate == 0.0), "{whole:?} seed {seed}");
            }
            let pages = measure(slots, SwapIn::PageByPage, 90, 20, seed);
            assert!(*pages.rates.last().unwrap() > 50.0, "{pages:?} seed {seed}");
        }
    }
}
