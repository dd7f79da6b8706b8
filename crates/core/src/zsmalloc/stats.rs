//! What a pool tells: its counters, and the kernel's table of classes.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::class::GROUPS;

/// Pages of empty zspages that a pool may keep whatever its size: 256 KiB.
pub(super) const RESERVE_PAGES: usize = 64;

/// Beyond that, one part in so many of the pages in use: 0.8 %.
const RESERVE_PART: usize = 128;

/// Figures of a pool, as they were at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolStats {
    /// Pages that hold objects or did: what the pool costs, without metadata.
    pub pages_used: u64,
    /// The most of it.
    pub pages_used_max: u64,
    /// Pages taken from the source for objects. Those beyond `pages_used` were never written.
    pub pages_taken: u64,
    /// Objects stored now.
    pub objects: u64,
    /// Their bytes.
    pub bytes_stored: u64,
    /// Handle slots, descriptors and classes.
    pub metadata_bytes: u64,
    /// Pages that compaction freed.
    pub pages_compacted: u64,
    /// Of `pages_used` those of empty zspages, which the next objects find ([`super::Pool::trim`] gives them back).
    pub pages_reserved: u64,
}

/// The pool's counters. Told, and used for the bound on the reserve; never needed to be exact at
/// one moment, hence `Relaxed` throughout.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Counters {
    /// Pages that may be reserved whatever the pool's size.
    reserve_pages: usize,
    pub(super) pages_used: AtomicUsize,
    pub(super) pages_used_max: AtomicUsize,
    pub(super) pages_taken: AtomicUsize,
    pub(super) objects: AtomicUsize,
    pub(super) bytes_stored: AtomicUsize,
    pub(super) pages_compacted: AtomicUsize,
    /// Pages touched of the empty zspages that classes keep.
    reserved: AtomicUsize,
}

impl Counters {
    pub(super) fn new() -> Counters {
        Counters { reserve_pages: RESERVE_PAGES, ..Counters::default() }
    }

    /// From now on so many pages may be reserved whatever the pool's size, [`RESERVE_PAGES`] at least.
    pub(super) fn may_reserve(&mut self, pages: usize) {
        self.reserve_pages = pages.max(RESERVE_PAGES);
    }

    /// Counts `pages` more that take memory.
    pub(super) fn pages_touched(&self, pages: usize) {
        if pages > 0 {
            let used = self.pages_used.fetch_add(pages, Relaxed) + pages;
            self.pages_used_max.fetch_max(used, Relaxed);
        }
    }

    /// The most pages that were used; from now on those of now.
    pub(super) fn take_max(&self) -> usize {
        let most = self.pages_used_max.swap(self.pages_used.load(Relaxed), Relaxed);
        // Others may have touched some since the load.
        self.pages_used_max.fetch_max(self.pages_used.load(Relaxed), Relaxed);
        most
    }

    /// Counts so many objects more, of `bytes` together.
    pub(super) fn stored(&self, objects: usize, bytes: usize) {
        self.objects.fetch_add(objects, Relaxed);
        self.bytes_stored.fetch_add(bytes, Relaxed);
    }

    /// Counts one object less.
    pub(super) fn freed(&self, length: usize) {
        self.objects.fetch_sub(1, Relaxed);
        self.bytes_stored.fetch_sub(length, Relaxed);
    }

    /// Whether a class keeps an empty zspage. One that was never used is not kept, so it has pages.
    pub(super) fn has_reserve(&self) -> bool {
        self.reserved.load(Relaxed) > 0
    }

    /// Takes an empty zspage with `pages` touched into the reserve, if it is within bounds then.
    pub(super) fn reserve_joined(&self, pages: usize) -> bool {
        let bound = self.reserve_pages + self.pages_used.load(Relaxed) / RESERVE_PART;
        let within = self.reserved.fetch_add(pages, Relaxed) + pages <= bound;
        if !within {
            self.reserve_left(pages);
        }
        within
    }

    /// An empty zspage left the reserve.
    pub(super) fn reserve_left(&self, pages: usize) {
        self.reserved.fetch_sub(pages, Relaxed);
    }

    /// What is told, with `metadata_bytes` from elsewhere.
    pub(super) fn tell(&self, metadata_bytes: usize) -> PoolStats {
        let load = |counter: &AtomicUsize| counter.load(Relaxed) as u64;
        PoolStats {
            pages_used: load(&self.pages_used),
            pages_used_max: load(&self.pages_used_max),
            pages_taken: load(&self.pages_taken),
            objects: load(&self.objects),
            bytes_stored: load(&self.bytes_stored),
            metadata_bytes: metadata_bytes as u64,
            pages_compacted: load(&self.pages_compacted),
            pages_reserved: load(&self.reserved),
        }
    }
}

/// One class, in the columns of the kernel's `zsmalloc/<pool>/classes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassStats {
    /// Number of the class.
    pub class: usize,
    /// Bytes of its objects.
    pub size: usize,
    /// Zspages by fullness: none in use (kept in reserve), under 10 %, under 20 %, ... under 90 %,
    /// under 100 %, full. The kernel calls them 0%, 10%, 20%, ... 90%, 99%, 100%.
    pub fullness: [u32; GROUPS],
    /// Objects that its zspages have place for.
    pub obj_allocated: usize,
    /// Objects in use.
    pub obj_used: usize,
    /// Pages that hold objects or did.
    pub pages_used: usize,
    /// Pages of one zspage, touched or not.
    pub pages_per_zspage: usize,
    /// Pages of the zspages that compaction would empty.
    pub freeable: usize,
}

impl ClassStats {
    /// The names of the columns, for a table above the rows that `Display` writes.
    pub const COLUMNS: [&'static str; 18] = [
        "class",
        "size",
        "10%",
        "20%",
        "30%",
        "40%",
        "50%",
        "60%",
        "70%",
        "80%",
        "90%",
        "99%",
        "100%",
        "obj_allocated",
        "obj_used",
        "pages_used",
        "pages_per_zspage",
        "freeable",
    ];
}

/// Text with a line for each class that has a zspage, for a process that reads it as `zfolio stat` does.
#[must_use]
pub fn lines(classes: &[ClassStats]) -> String {
    let used = classes.iter().filter(|class| class.obj_allocated > 0);
    used.map(|class| format!("{class}\n")).collect()
}

impl fmt::Display for ClassStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>5} {:>7}", self.class, self.size)?;
        for zspages in &self.fullness[1..] {
            write!(f, " {zspages:>6}")?;
        }
        write!(
            f,
            " {:>13} {:>10} {:>10} {:>16} {:>8}",
            self.obj_allocated,
            self.obj_used,
            self.pages_used,
            self.pages_per_zspage,
            self.freeable
        )
    }
}
