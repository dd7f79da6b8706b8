//! Memory of a pager as values of a type.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use zfolio_core::page::PAGE_BYTES;

use crate::region::Region;

/// Types whose values are nothing but their bytes: they can be made of zeros, of bytes from a file,
/// or of bytes that come back from the store.
///
/// Integers, floats and arrays of them are such types.
///
/// # Safety
///
/// Any bytes are a value of the type; the type has no padding and no interior mutability; its
/// alignment is at most 4096. A structure qualifies if it is `repr(C)` or `repr(transparent)`, all
/// its fields are of such types, and its size is the sum of the sizes of its fields.
#[allow(unsafe_code, reason = "whoever implements it promises what makes a slice sound")]
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

macro_rules! pod {
    ($($type:ty)+) => {
        $(
            #[allow(unsafe_code, reason = "a promise about a primitive type")]
            // SAFETY: a primitive number has no padding, and every bit pattern is a value.
            unsafe impl Pod for $type {}
        )+
    };
}

pod! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 }

#[allow(unsafe_code, reason = "a promise about arrays")]
// SAFETY: an array is its elements one after the other, without padding between or after them.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

/// Memory of a [`Pager`](crate::Pager) as values of a type. It derefs to `[T]`, begins as zeros,
/// and is unmapped when dropped.
pub struct Slice<T: Pod> {
    region: Region,
    length: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Slice<T> {
    /// The first `length` values of a region, which is at least so long.
    pub(crate) fn new(region: Region, length: usize) -> Slice<T> {
        const { assert!(align_of::<T>() <= PAGE_BYTES, "a region begins at a page") };
        assert!(length * size_of::<T>() <= region.len());
        Slice { region, length, of: PhantomData }
    }

    /// The region with the slice's bytes: to write them to a file, to pin or to prefault them.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The region with the slice's bytes: to fill them from a file, or to clear them.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut numbers = pager.map_slice::<u16>(4)?;
    /// let file: &[u8] = &[1, 0, 2, 0, 3, 0, 4, 0];
    /// numbers.region_mut().read_from(.., &mut &*file)?;
    /// assert_eq!(numbers[..], [1, 2, 3, 4].map(u16::to_le));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn region_mut(&mut self) -> &mut Region {
        &mut self.region
    }
}

impl<T: Pod> Deref for Slice<T> {
    type Target = [T];
    #[allow(unsafe_code, reason = "the view of the region")]
    fn deref(&self) -> &[T] {
        // SAFETY: the region has the bytes of `length` values (asserted in new) and begins at a
        // page, to which `T` is aligned (asserted there too); any bytes are values (Pod).
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().cast::<T>(), self.length) }
    }
}

impl<T: Pod> DerefMut for Slice<T> {
    #[allow(unsafe_code, reason = "the view of the region")]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref(), and `&mut self` is the only borrow. Values that are written leave
        // bytes that are valid values again (Pod).
        unsafe { std::slice::from_raw_parts_mut(self.region.as_mut_ptr().cast::<T>(), self.length) }
    }
}

/// Shows address and length, not the values.
impl<T: Pod> fmt::Debug for Slice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice")
            .field("type", &std::any::type_name::<T>())
            .field("length", &self.length)
            .field("region", &self.region)
            .finish()
    }
}
