//! Blocks for those who allocate while mimalloc starts.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What the size of a block takes, before it: as much as keeps each block aligned as by `malloc(3)`.
const HEAD_BYTES: usize = 16;

/// Where the size of a block is.
fn head_of(block: *mut c_void) -> *mut usize {
    block.wrapping_byte_sub(HEAD_BYTES).cast()
}

/// A buffer in which each block follows the last one. What is freed is not used again, so all blocks are zero.
#[repr(C, align(16))]
pub(crate) struct EarlyBlocks<const BYTES: usize> {
    buffer: UnsafeCell<[u8; BYTES]>,
    used: AtomicUsize,
}

// SAFETY: a part of the buffer is given away once, by an atomic exchange of `used`, and only whoever asked for it
// writes to it.
unsafe impl<const BYTES: usize> Sync for EarlyBlocks<BYTES> {}

impl<const BYTES: usize> EarlyBlocks<BYTES> {
    pub(crate) const fn new() -> Self {
        Self { buffer: UnsafeCell::new([0; BYTES]), used: AtomicUsize::new(0) }
    }

    /// A block of this size and alignment, a power of two; null if there is no room.
    pub(crate) fn allocate(&self, bytes: usize, align: usize) -> *mut c_void {
        let (start, align) = (self.buffer.get().addr(), align.max(HEAD_BYTES));
        let place = |used: usize| {
            let at = (start + used + HEAD_BYTES).checked_next_multiple_of(align)? - start;
            // At least a byte: the address of an empty block is one in the buffer, too.
            let end = at.checked_add(bytes.max(1))?;
            (end <= BYTES).then_some((at, end))
        };
        let used = self.used.fetch_update(Relaxed, Relaxed, |used| Some(place(used)?.1));
        let Some((at, _)) = used.ok().and_then(place) else { return null_mut() };
        let block = self.buffer.get().cast::<c_void>().wrapping_byte_add(at);
        // SAFETY: aligned, and at least `used` above the buffer's start: in the part that this call alone was given.
        unsafe { head_of(block).write(bytes) };
        block
    }

    /// Whether a block is one of these.
    #[inline]
    pub(crate) fn has(&self, block: *const c_void) -> bool {
        block.addr().wrapping_sub(self.buffer.get().addr()) < BYTES
    }

    /// The size of a block.
    ///
    /// # Safety
    ///
    /// The block is from [`Self::allocate`] of these.
    pub(crate) unsafe fn bytes_of(&self, block: *const c_void) -> usize {
        // SAFETY: allocate() wrote it there.
        unsafe { head_of(block.cast_mut()).read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zfolio_core::testing::Random;

    /// Blocks of every size and alignment do not overlap, have their size, and are zero, until there is no room.
    #[test]
    fn blocks_are_apart_aligned_and_zero() {
        let early = Box::new(EarlyBlocks::<{ 16 << 10 }>::new());
        let mut random = Random::new(1);
        let mut model: Vec<(*mut c_void, usize)> = Vec::new();
        let mut refused = 0;
        while refused < 100 {
            let (bytes, align) = (random.below(200), 1 << random.below(9));
            let block = early.allocate(bytes, align);
            if block.is_null() {
                refused += 1;
                continue;
            }
            let (at, end) = (block.addr(), block.addr() + bytes);
            assert!(
                early.has(block) && (bytes == 0 || early.has(block.wrapping_byte_add(bytes - 1)))
            );
            assert_eq!(at % align.max(16), 0);
            let is_apart = |&(other, its): &(*mut c_void, usize)| {
                end.max(at + 1) <= other.addr() || other.addr() + its.max(1) <= at
            };
            assert!(model.iter().all(is_apart));
            // SAFETY: `bytes` bytes are this test's alone.
            let content = unsafe { std::slice::from_raw_parts_mut(block.cast::<u8>(), bytes) };
            assert!(content.iter().all(|byte| *byte == 0));
            content.fill(0xff);
            model.push((block, bytes));
        }
        assert!(model.len() > 50);
        for (block, bytes) in model {
            // SAFETY: a block of these.
            assert_eq!(unsafe { early.bytes_of(block) }, bytes);
        }
    }

    /// What has no room, or a size or an alignment that no address space has, is refused, and takes nothing.
    #[test]
    fn what_has_no_room_is_refused() {
        let early = Box::new(EarlyBlocks::<1024>::new());
        for (bytes, align) in
            [(1024, 1), (usize::MAX, 1), (1, 1 << 63), (usize::MAX, 1 << 63), (1009, 16)]
        {
            assert!(early.allocate(bytes, align).is_null(), "{bytes} {align}");
        }
        let block = early.allocate(992, 16);
        assert!(early.has(block));
        // An empty block would be at the end of the buffer.
        assert!(early.allocate(0, 1).is_null());
        for other in [null_mut(), block.wrapping_byte_sub(17), block.wrapping_byte_add(1008)] {
            assert!(!early.has(other));
        }
    }

    /// Threads that allocate at the same time get different blocks.
    #[test]
    fn threads_get_different_blocks() {
        let early = Box::new(EarlyBlocks::<{ 64 << 10 }>::new());
        let work = || (0..500).map(|_| early.allocate(16, 16).addr()).collect::<Vec<_>>();
        let mut all = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        all.sort_unstable();
        all.dedup();
        assert_eq!((all.len(), all[0] != 0), (2000, true));
    }
}
