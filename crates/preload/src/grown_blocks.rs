//! Large blocks that `realloc` has made grow: each is a mapping of its own, which grows by `mremap`.
//!
//! mimalloc would copy the block each time: what was compressed would come back, and be compressed at the new place
//! again. A list of Python grows by an eighth each time, so it is copied six times while it doubles. The kernel moves
//! page tables instead, and what the pool has stays there; the C library's `malloc` does the same with blocks from 128
//! KiB on.
//!
//! # Invariants
//!
//! - `GROWN-1` A place of the table is free, taken (by the one thread that changes it), or has the address of a block,
//!   which is the start of a page; its size is written before the address. Whoever has a block finds both.
//!
//! # Concurrency
//!
//! No lock: a block is one thread's at a time, as with every `malloc`. A child of `fork` has the parent's blocks; a
//! place that another thread had taken stays so, and is lost.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use zfolio_core::page::PAGE_BYTES;

use crate::mappings;

/// From this size on a block that grows becomes one of these, if it has four folios or more: a part of a folio at its
/// end would not be managed.
pub(crate) const GROWN_BYTES_MIN: usize = 1 << 20;
const FOLIOS_MIN: usize = 4;

/// Below this size a block that shrinks is mimalloc's again.
const KEPT_BYTES_MIN: usize = GROWN_BYTES_MIN / 4;

/// Sizes are multiples of this, and of a folio.
const STEP_BYTES: usize = 64 << 10;

/// How many blocks there may be; more are mimalloc's. All places are looked at when the start of a page is freed: 64
/// take 512 bytes.
const PLACES: usize = 64;

const FREE: usize = 0;
const TAKEN: usize = 1;

/// The blocks.
pub(crate) struct GrownBlocks {
    addresses: [AtomicUsize; PLACES],
    bytes: [AtomicUsize; PLACES],
}

impl GrownBlocks {
    pub(crate) const fn new() -> Self {
        Self {
            addresses: [const { AtomicUsize::new(FREE) }; PLACES],
            bytes: [const { AtomicUsize::new(0) }; PLACES],
        }
    }

    /// The place of a block, if it is one of these.
    #[inline]
    pub(crate) fn find(&self, block: *const c_void) -> Option<Place<'_>> {
        if block.addr() % PAGE_BYTES != 0 || block.is_null() {
            return None;
        }
        self.look(block.addr())
    }

    #[inline(never)]
    fn look(&self, address: usize) -> Option<Place<'_>> {
        // Relaxed: whoever gave the block to this thread had it, and so had written both.
        let index =
            self.addresses.iter().position(|place| place.load(Ordering::Relaxed) == address)?;
        Some(Place { address: &self.addresses[index], bytes: &self.bytes[index] })
    }

    /// A block of `bytes`, all zeros. Null: there is no memory for it, or no place, or it is too small.
    pub(crate) fn make(&self, bytes: usize) -> *mut c_void {
        let Some(size) = size_for(bytes).filter(|_| bytes >= FOLIOS_MIN * mappings::folio_bytes())
        else {
            return null_mut();
        };
        let take = |place: &&AtomicUsize| {
            place.compare_exchange(FREE, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let Some(index) = self.addresses.iter().position(|place| take(&place)) else {
            return null_mut();
        };
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: without an address, so no mapping changes.
        let block = unsafe { mappings::mmap(null_mut(), size, access, kind, -1, 0) };
        let failed = block == libc::MAP_FAILED;
        self.bytes[index].store(size, Ordering::Relaxed);
        self.addresses[index].store(if failed { FREE } else { block.addr() }, Ordering::Relaxed);
        if failed { null_mut() } else { block }
    }
}

/// What a block of `bytes` gets: an eighth more, so that the next bytes need no system call. What is not touched takes
/// no memory.
fn size_for(bytes: usize) -> Option<usize> {
    bytes.checked_add(bytes / 8)?.checked_next_multiple_of(STEP_BYTES.max(mappings::folio_bytes()))
}

/// The place of a block.
pub(crate) struct Place<'b> {
    address: &'b AtomicUsize,
    bytes: &'b AtomicUsize,
}

impl Place<'_> {
    /// The size of the block.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether a block of `bytes` is to be mimalloc's.
    pub(crate) fn is_too_large_for(&self, bytes: usize) -> bool {
        bytes < KEPT_BYTES_MIN
    }

    /// Makes the block one of `bytes`, and returns it. Null: there is no memory; the block is as it was.
    pub(crate) fn resize(&self, bytes: usize) -> *mut c_void {
        let (block, size) = (self.address.load(Ordering::Relaxed), self.bytes());
        if (size / 2..=size).contains(&bytes) {
            return block as *mut c_void;
        }
        let Some(new_size) = size_for(bytes) else { return null_mut() };
        // Another thread may get the old addresses for a block of its own, before this call has returned.
        self.address.store(TAKEN, Ordering::Relaxed);
        let moves = libc::MREMAP_MAYMOVE;
        // SAFETY: the block's mapping, which is the caller's alone.
        let moved =
            unsafe { mappings::mremap(block as *mut c_void, size, new_size, moves, null_mut()) };
        if moved == libc::MAP_FAILED {
            self.address.store(block, Ordering::Relaxed);
            return if bytes <= size { block as *mut c_void } else { null_mut() };
        }
        self.bytes.store(new_size, Ordering::Relaxed);
        self.address.store(moved.addr(), Ordering::Relaxed);
        moved
    }

    /// Gives the block back.
    pub(crate) fn free(self) {
        let (block, size) = (self.address.load(Ordering::Relaxed), self.bytes());
        // Before the mapping goes: another thread may get its addresses for a block of its own.
        self.address.store(FREE, Ordering::Relaxed);
        // SAFETY: the block's mapping, which nobody uses any more.
        unsafe { mappings::munmap(block as *mut c_void, size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zfolio_core::testing::{Random, seed};

    /// The word that lies at `index` of a block.
    fn word(block: *mut c_void, index: usize) -> *mut u64 {
        block.cast::<u64>().wrapping_add(index)
    }

    /// Goal: a block keeps what it has while it grows, shrinks and moves, is found by its address alone, and what it
    /// grows by is zeros; no more than there are places can be had. Method: random sizes beside a model.
    #[test]
    fn blocks_keep_what_they_have() {
        const WORDS: usize = STEP_BYTES / 8;
        let (blocks, mut random) = (GrownBlocks::new(), Random::new(seed()));
        let mut model: Vec<(*mut c_void, u64)> = Vec::new();
        let (mut most, mut refused) = (0, 0);
        for turn in 0..4000_u64 {
            let bytes = GROWN_BYTES_MIN + random.below(4 << 20);
            if random.below(3) == 0 {
                let block = blocks.make(bytes);
                if block.is_null() {
                    refused += 1;
                    assert_eq!(model.len(), PLACES);
                    continue;
                }
                assert!(blocks.find(block).expect("made").bytes() >= bytes);
                // SAFETY: the first word of the block.
                unsafe { word(block, 0).write(turn) };
                model.push((block, turn));
                most = most.max(model.len());
                continue;
            }
            let Some(index) = (!model.is_empty()).then(|| random.below(model.len())) else {
                continue;
            };
            let (block, first) = model[index];
            let place = blocks.find(block).expect("a block");
            // SAFETY: the first word of the block.
            assert_eq!(unsafe { word(block, 0).read() }, first);
            assert!(blocks.find(block.wrapping_byte_add(PAGE_BYTES)).is_none());
            if random.below(4) == 0 {
                place.free();
                model.swap_remove(index);
                continue;
            }
            let before = place.bytes();
            let block = place.resize(bytes);
            assert!(!block.is_null());
            let now = blocks.find(block).expect("it is one still").bytes();
            assert!(now >= bytes);
            // SAFETY: the last word of the block.
            let last = unsafe { word(block, (now / STEP_BYTES) * WORDS - 1).read() };
            assert!(now <= before || last == 0);
            model[index] = (block, first);
        }
        assert!(most > 8, "{most}");
        for (block, _) in model {
            blocks.find(block).expect("a block").free();
            assert!(blocks.find(block).is_none());
        }
        assert!(refused == 0 || most == PLACES);
    }

    /// Goal: there are as many blocks as places, and a size that no block can have is refused. Method: all are made.
    #[test]
    fn blocks_have_a_place_each() {
        let blocks = GrownBlocks::new();
        let all: Vec<_> = (0..PLACES).map(|_| blocks.make(GROWN_BYTES_MIN)).collect();
        assert!(all.iter().all(|block| !block.is_null()));
        assert!(blocks.make(GROWN_BYTES_MIN).is_null());
        let one = blocks.find(all[7]).expect("a block");
        assert!(one.resize(usize::MAX - 5).is_null() && one.resize(1 << 50).is_null());
        assert_eq!(one.resize(GROWN_BYTES_MIN), all[7]);
        one.free();
        assert!(!blocks.make(GROWN_BYTES_MIN).is_null());
        let rest = blocks.addresses.iter().map(|place| place.load(Ordering::Relaxed));
        rest.for_each(|block| blocks.find(block as *const c_void).expect("a block").free());
    }
}
