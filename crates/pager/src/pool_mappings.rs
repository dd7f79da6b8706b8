//! Runs of pages for the allocator, straight from the kernel.
//!
//! Address space costs little and runs come in few lengths. So the pages of a run that is given
//! back go back to the system at once, and its addresses are kept for the next run of the same
//! length.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::sync::Mutex;
use zfolio_core::zsmalloc::PageSource;
use zfolio_sys::map::{self, Reservation};

use crate::rank;

/// How much address space is requested at once. It is little, since all of it counts where the
/// address space of a process is limited (`RLIMIT_AS`, `RLIMIT_DATA`): requests of 1 GiB, halved
/// until granted, took up half of the rest.
const CHUNK_BYTES: usize = 8 << 20;

/// How often the request is halved if it is refused: down to 1 MiB.
const CHUNK_SHRINKS: u32 = 3;

#[derive(Debug, Default)]
struct Space {
    /// Addresses not yet used in the newest chunk.
    next: usize,
    end: usize,
    chunks: Vec<Reservation>,
    /// Addresses of runs that were given back, by the length of the run in pages.
    idle: BTreeMap<usize, Vec<usize>>,
}

/// The pool's memory: private mappings, which are unmapped when this is dropped.
#[derive(Debug)]
pub struct PoolMappings(Mutex<{ rank::POOL_MAPPINGS }, Space>);

impl Default for PoolMappings {
    fn default() -> Self {
        PoolMappings(Mutex::new(Space::default()))
    }
}

#[allow(unsafe_code, reason = "the contract of PageSource")]
// SAFETY: a run is cut from a fresh private mapping that only this source knows, or was given back;
// the lock hands it to one caller. Mappings live as long as the source.
unsafe impl PageSource for PoolMappings {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        let bytes = pages * PAGE_BYTES;
        let mut space = self.0.lock();
        if let Some(address) = space.idle.get_mut(&pages).and_then(Vec::pop) {
            return NonNull::new(address as *mut u8);
        }
        if space.end - space.next < bytes {
            // A shorter chunk if the process may not have so much address space (RLIMIT_AS).
            let lengths = (0..=CHUNK_SHRINKS).map(|shrink| (CHUNK_BYTES >> shrink).max(bytes));
            let chunk =
                lengths.map(|length| Reservation::new(length, PAGE_BYTES)).find_map(Result::ok)?;
            space.next = chunk.address();
            space.end = chunk.address() + chunk.bytes();
            space.chunks.push(chunk);
        }
        let address = space.next;
        space.next += bytes;
        NonNull::new(address as *mut u8)
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        let address = run.as_ptr() as usize;
        // SAFETY: by the contract the run is ours again and nobody reads it.
        let released = unsafe { map::release(address, pages * PAGE_BYTES) };
        debug_assert!(released.is_ok());
        self.0.lock().idle.entry(pages).or_default().push(address);
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        // SAFETY: by the contract nobody relies on what these pages of a run hold.
        let released = unsafe { map::release(start.as_ptr() as usize, pages * PAGE_BYTES) };
        debug_assert!(released.is_ok());
    }
}
