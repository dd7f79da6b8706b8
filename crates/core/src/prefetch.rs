//! Cache lines that are wanted soon.

/// Bytes of a line.
const LINE_BYTES: usize = 64;

/// Has the cache lines of the `bytes` bytes from `start` on fetched meanwhile. Any address will do: a
/// prefetch of what is not there does nothing.
#[inline]
pub(crate) fn prefetch(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let before = start.addr() % LINE_BYTES;
        let line = start.wrapping_sub(before);
        for offset in (0..before + bytes).step_by(LINE_BYTES) {
            // SAFETY: reads nothing that a program could see, and does not fault, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(offset).cast()) };
        }
    }
    // Elsewhere the copy waits.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes, LINE_BYTES);
}
