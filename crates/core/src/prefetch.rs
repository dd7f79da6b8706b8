//! Cache lines that are wanted soon.

/// Bytes of a line, and how far one prefetch reaches.
const LINE_BYTES: usize = 64;

/// Has the cache lines of the `bytes` bytes from `start` on fetched meanwhile. Any address will do: a
/// prefetch of what is not there does nothing.
#[inline]
pub(crate) fn prefetch(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes).step_by(LINE_BYTES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: reads nothing that a program could see, and does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset).cast()) };
    }
    // Elsewhere the copy waits.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes, LINE_BYTES);
}
