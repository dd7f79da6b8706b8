//! Memory of a pager, as bytes. It can be larger than the limit.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::map::{self, Reservation};

use crate::pager::Core;

/// Memory of a [`Pager`](crate::Pager). It derefs to `[u8]`, begins as zeros, and is unmapped when
/// dropped.
///
/// [`prefault`](Region::prefault), [`pin`](Region::pin) and [`clear`](Region::clear) cut their
/// range off at the region's end. In a child of `fork`, where the region is not mapped, they do nothing.
pub struct Region {
    pub(crate) core: Arc<Core>,
    /// Unmapped in `drop`, by `Core::remove`.
    space: ManuallyDrop<Reservation>,
    bytes: usize,
}

impl Region {
    pub(crate) fn new(core: Arc<Core>, space: Reservation, bytes: usize) -> Region {
        Region { core, space: ManuallyDrop::new(space), bytes }
    }

    /// Makes the pages of `range` resident, so that a system call soon after can probably reach
    /// them.
    ///
    /// The pages can be reclaimed again at any time. [`Region::read_from`] and [`Region::write_to`]
    /// always work, and [`Region::pin`] keeps pages resident for good.
    pub fn prefault(&self, range: Range<usize>) {
        let (start, end) = (range.start, range.end.min(self.bytes));
        if start >= end || self.core.is_a_childs() {
            return;
        }
        // The last byte: `start` may be further into its page than the end is into the last one.
        for at in (start..end).step_by(PAGE_BYTES).chain([end - 1]) {
            std::hint::black_box(self[at]);
        }
    }

    /// Keeps `range` resident for good, in whole folios of 64 KiB, or of one unit if that is
    /// larger. Pinned folios no longer count against the limit, and system calls reach them in
    /// every mode. That holds also for what is pinned while all regions fit under the limit together.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// use std::fs::File;
    /// use std::io::Read;
    ///
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut region = pager.map(64 << 20)?;
    /// region.pin(0..4096);
    /// // The kernel itself writes into the region here.
    /// let length = File::open("/proc/self/comm")?.read(&mut region[..4096])?;
    /// assert!(length > 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin(&self, range: Range<usize>) {
        let start = self.space.address();
        let (from, to) = (start + range.start.min(self.bytes), start + range.end.min(self.bytes));
        if from < to && !self.core.is_a_childs() {
            self.core.pin(from, to);
        }
    }

    /// Drops the contents of the whole units in `range`: they read as zeros and take no memory. A
    /// unit that `range` covers only in part stays as it is.
    #[allow(unsafe_code, reason = "the pages are the region's own")]
    pub fn clear(&mut self, range: Range<usize>) {
        let unit = self.core.engine.geometry().unit_bytes();
        let start = self.space.address();
        let from = start + range.start.min(self.bytes).next_multiple_of(unit);
        let to = start + range.end.min(self.bytes) / unit * unit;
        if from < to && !self.core.is_a_childs() {
            // SAFETY: `&mut self`: nobody else looks at the region's bytes.
            let call = |at, bytes| unsafe { map::release(at, bytes) };
            // A sandbox may forbid the call.
            if self.core.engine.discard(from, to, call).is_err() {
                self[from - start..to - start].fill(0);
            }
        }
    }
}

impl Deref for Region {
    type Target = [u8];
    #[allow(unsafe_code, reason = "the view of the mapping")]
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is at least `bytes` long, readable, and lives as long as `self`; a
        // missing page is served by the engine, which `core` keeps alive.
        unsafe { std::slice::from_raw_parts(self.space.base().as_ptr(), self.bytes) }
    }
}

impl DerefMut for Region {
    #[allow(unsafe_code, reason = "the view of the mapping")]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref(), and `&mut self` is the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.space.base().as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Region {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Shows address and size, not the bytes.
impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &format_args!("{:#x}", self.space.address()))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Region {
    #[allow(unsafe_code, reason = "takes what is dropped inside of the engine")]
    fn drop(&mut self) {
        if self.core.is_a_childs() {
            // The region is not mapped in the child; something else may be mapped there by now
            // (LIB-2).
            return;
        }
        let (start, end) = (self.space.address(), self.space.address() + self.space.bytes());
        // SAFETY: taken once, here; `self` is not looked at again.
        let space = unsafe { ManuallyDrop::take(&mut self.space) };
        self.core.remove(start, end, || drop(space));
    }
}
