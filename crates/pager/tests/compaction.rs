//! Compaction gives memory back to the system, which shows in the resident size of this process. There is only one
//! test in this file, so that no other test changes that size.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::zsmalloc::Pool;
use zfolio_pager::PoolMappings;

/// Objects: 32768 of 500 to 4000 bytes, 70 MiB in all.
const OBJECTS: usize = 32 << 10;

fn resident_bytes() -> usize {
    usize::try_from(zfolio_sys::process::ResidentMeter::new().read().unwrap().memory_bytes).unwrap()
}

#[test]
fn what_compaction_frees_leaves_the_process() {
    let unit = UnitOrder::from_bytes(PAGE_BYTES).unwrap();
    let pool = Pool::new(PoolMappings::default(), unit);
    let bytes: Vec<u8> = (0..4096_usize).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
    let length = |index: usize| 500 + index * 7919 % 3500;
    let handles: Vec<_> =
        (0..OBJECTS).map(|index| pool.store(&bytes[..length(index)]).unwrap()).collect();
    let full = resident_bytes();
    // Every second object is freed: no zspage is empty, and half of the memory is unused.
    let (mut kept, mut freed) = (Vec::new(), 0);
    for (index, handle) in handles.into_iter().enumerate() {
        if index * 2_654_435_761 % 7 < 4 {
            freed += length(index);
            pool.free(handle);
        } else {
            kept.push((index, handle));
        }
    }
    let holed = resident_bytes();
    assert!(full - holed.min(full) < freed / 4, "{full} {holed} {freed}");
    while pool.compact(1 << 20).pages_freed > 0 {}
    let compact = resident_bytes();
    assert!(holed - compact > freed / 10 * 8, "{holed} {compact} {freed}");
    let stats = pool.stats();
    let used = stats.pages_used * PAGE_BYTES as u64;
    assert!(used <= stats.bytes_stored * 103 / 100 + (2 << 20), "{stats:?}");
    for (index, handle) in kept {
        assert!(pool.read(handle, |found| found == &bytes[..length(index)]), "object {index}");
        pool.free(handle);
    }
}
