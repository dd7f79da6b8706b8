//! The limit of memory: `mem_limit`.
//!
//! # Invariants
//!
//! - `LIM-1` While a limit is set, a write begins only if its units fit below the limit even if nothing of them
//!   shrinks, beside all writes that are under way, and so does what the table grows by for a unit that is far from
//!   others. So the disk stays below the limit; the pool's own tables may grow by a step (64 KiB or so) beyond, and
//!   what is fetched from a backing is in the pool until it was read (`FETCH_BYTES` for each thread that reads). To
//!   recompress a unit, or to join its pages, has no look at the limit: for a moment both copies are there, or, if its
//!   copy was on the backing, until the unit is written back, which comes next; if nothing can be written back, one
//!   unit is joined so, and no more until something was. A disk that is loaded was below the limit when it was saved:
//!   a unit of it is taken in while the limit is not passed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Zram;
use crate::page::PAGE_BYTES;
use crate::zsmalloc::PageSource;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Limit {
    /// 0: there is none.
    bytes: AtomicU64,
    /// What the writes that are under way may take.
    pending: AtomicU64,
}

/// Room for the units of one write.
#[derive(Debug)]
pub(super) struct Room<'l>(Option<(&'l Limit, u64)>);

impl Room<'_> {
    /// For what takes none.
    pub(super) fn none() -> Room<'static> {
        Room(None)
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if let Some((limit, bytes)) = self.0 {
            limit.pending.fetch_sub(bytes, Relaxed);
        }
    }
}

impl Limit {
    pub(super) fn get(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Whether the disk has more than its limit.
    pub(super) fn is_passed<S: PageSource>(&self, zram: &Zram<S>) -> bool {
        let limit = self.get();
        limit > 0 && zram.used_bytes() > limit
    }

    pub(super) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Relaxed);
    }

    /// Room for some objects of up to `object_bytes` and so many bytes of the table. `None`: there is none below the
    /// limit; of one object, also after compaction.
    pub(super) fn reserve<S: PageSource>(
        &self,
        zram: &Zram<S>,
        objects: usize,
        object_bytes: usize,
        table_bytes: usize,
    ) -> Option<Room<'_>> {
        let limit = self.get();
        if limit == 0 {
            return Some(Room::none());
        }
        // An object may begin in the middle of a page.
        let bytes = (objects * (object_bytes + PAGE_BYTES) + table_bytes) as u64;
        // Whoever finds no room for several tries one.
        for is_last in [objects > 1, true] {
            let pending = self.pending.fetch_add(bytes, Relaxed) + bytes;
            let room = Room(Some((self, bytes)));
            if zram.used_bytes() + pending <= limit {
                return Some(room);
            }
            drop(room);
            if is_last {
                break;
            }
            zram.make_room();
        }
        None
    }
}
