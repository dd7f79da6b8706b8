//! A buffer of zeros that may be refused. A large one takes no memory before it is used: the kernel makes a page at the
//! first access.

use std::alloc::Layout;
use std::ptr::{self, NonNull};

use rustix::io::Errno;

/// A buffer of so many zeros. `vec![0; bytes]` is the same, but ends the process where there is no memory for it; and a
/// vector that is filled once it has room touches each page.
///
/// # Errors
///
/// `NOMEM`: there is no memory for it.
pub fn zeroed(bytes: usize) -> Result<Box<[u8]>, Errno> {
    if bytes == 0 {
        return Ok(Box::default());
    }
    let layout = Layout::array::<u8>(bytes).map_err(|_| Errno::NOMEM)?;
    // SAFETY: the layout has a byte at least.
    // JUSTIFICATION: the standard library's way that can fail is not stable yet (`Box::try_new_zeroed_slice`).
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
    let slice = ptr::slice_from_raw_parts_mut(start.as_ptr(), bytes);
    // SAFETY: the global allocator has just returned these bytes, for the layout of a `[u8]` of this length; zeros are
    // valid bytes, and nobody else has the pointer.
    Ok(unsafe { Box::from_raw(slice) })
}

#[cfg(test)]
mod tests {
    use super::zeroed;
    use crate::Errno;

    #[test]
    fn a_buffer_is_zeros_or_refused() {
        for bytes in [0, 1, 4097, 1 << 20] {
            let buffer = zeroed(bytes).unwrap();
            assert!(buffer.len() == bytes && buffer.iter().all(|byte| *byte == 0), "{bytes}");
        }
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert_eq!(zeroed(bytes), Err(Errno::NOMEM), "{bytes}");
        }
    }
}
