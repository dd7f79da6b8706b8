//! An inline engine on the real kernel, with a backing in memory.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::store::backing::memory::Memory;
use zfolio_core::testing::{Random, seed};
use zfolio_sys::map::Reservation;

use crate::config::Mode;
use crate::engine::Engine;
use crate::inline;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Managed memory in units of a page, each filled by a seed of its own; most pages do not compress.
struct Filled<'e> {
    engine: &'e Engine,
    space: Reservation,
    seeds: Vec<u64>,
}

fn contents(seed: u64) -> Vec<u8> {
    let mut page = Random::new(seed).bytes(PAGE);
    if seed % 5 == 0 {
        page[PAGE / 8..].fill(0);
    }
    page
}

impl Filled<'_> {
    fn at(&self, page: usize) -> NonNull<u8> {
        let base = self.space.base();
        assert!(page < self.seeds.len());
        // SAFETY: inside the mapping.
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            base.add(page * PAGE)
        }
    }

    fn write(&mut self, page: usize, seed: u64) {
        self.seeds[page] = seed;
        let (from, to) = (contents(seed), self.at(page).as_ptr());
        // SAFETY: a page of the mapping, which is ours alone.
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), to, PAGE);
        }
    }

    fn check(&self, page: usize) {
        let mut found = vec![0; PAGE];
        // SAFETY: as in write().
        #[allow(unsafe_code, reason = "what a program does")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(page).as_ptr(), found.as_mut_ptr(), PAGE);
        }
        assert!(found == contents(self.seeds[page]), "page {page}");
    }

    fn check_limit(&self) {
        let (charge, limit) = (self.engine.charge_bytes(), self.engine.limit_bytes());
        // What is fetched is in the pool for a moment, beside what it displaces.
        assert!(charge <= limit + limit / 32, "{charge} of {limit}");
    }
}

/// Goal: with a backing the limit holds for data that does not compress, and every byte is there. Method: four times
/// the limit of it, written, read in order and at random, and changed here and there.
#[test]
fn a_limit_holds_for_data_that_does_not_compress() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let (limit, bytes, seed) = (8 * MIB, 32 * MIB, seed());
    let backing = Box::new(Memory::new(2 * bytes));
    let engine = Box::leak(Box::new(Engine::spilling_for_test(limit as u64, Some(backing))));
    let engine: &Engine = engine;
    let served = inline::register(engine).expect("few engines");
    let background = std::thread::spawn(|| engine.reclaim_in_background());
    let space = engine.adopted(bytes, |_| ());
    let mut filled = Filled { engine, space, seeds: vec![0; bytes / PAGE] };
    let pages = filled.seeds.len();
    for page in 0..pages {
        filled.write(page, seed + page as u64 + 1);
        if page % 64 == 0 {
            filled.check_limit();
        }
    }
    (0..pages).for_each(|page| filled.check(page));
    let mut random = Random::new(seed);
    for step in 0..20_000_u64 {
        let page = random.below(pages);
        filled.check(page);
        if step % 8 == 0 {
            filled.write(page, seed + pages as u64 + step);
        }
        if step % 64 == 0 {
            filled.check_limit();
        }
    }
    engine.sample();
    let figures = engine.figures();
    let of = |name: &str| figures.get(name).expect("a figure");
    println!("{figures:?}");
    assert!(of("written_back_units") > 4000 && of("read_back_units") > 8000);
    assert!(of("written_back_clean") > of("written_back_units"), "most go back as they were");

    let over = of("over_limit_bytes_max");
    assert!(over <= limit as u64 / 32, "the limit was passed by {over}");
    (0..pages).for_each(|page| filled.check(page));
    engine.unmap_adopted(&filled.space);
    assert_eq!(figures.stored_units.load(Relaxed), 0);
    engine.stop();
    background.join().expect("it ends");
    drop(served);
}
