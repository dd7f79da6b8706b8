//! Prefetching of memory that is needed soon.

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Starts to fetch the cache lines of the `bytes` bytes from `start` on. Any address is allowed: a
/// prefetch of memory that does not exist does nothing.
#[inline]
pub(crate) fn prefetch(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let before = start.addr() % LINE_BYTES;
        let line = start.wrapping_sub(before);
        for offset in (0..before + bytes).step_by(LINE_BYTES) {
            // SAFETY: a prefetch reads nothing that the program could see, and does not fault at
            // any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(offset).cast()) };
        }
    }
    // On other architectures the copy waits for memory.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes, LINE_BYTES);
}
