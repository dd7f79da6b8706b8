//! Pages of files: they are not charged, and are given back where they are many and idle.
//!
//! A page of a file costs the program nothing to lose: the kernel frees it when the machine is short of memory, and
//! reads it again when it is touched. So the limit is for what only swap could free, and a program that maps a large
//! file keeps its anonymous memory. When pages of files pass a quarter of the limit, the background thread asks the
//! kernel to reclaim some of them, 32 MiB at a time, going round through the mappings.
//!
//! Nothing says which of these pages are in use. What comes back soon was in use: then the next turn waits twice as
//! long.
//!
//! # Invariants
//!
//! - `FILE-1` No byte depends on what is mapped where: a mapping may change between the look at the list and the call.
//!   `MADV_PAGEOUT` loses no contents of any memory. (`MADV_DONTNEED` would drop a page for a tenth of the price, and
//!   would lose anonymous memory that was mapped there in between.)
//! - `FILE-2` A page that was written to a private mapping is anonymous memory, which `MADV_PAGEOUT` would write to the
//!   machine's swap. So private mappings that may be written to are left alone.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use zfolio_core::stats::{add, set};
use zfolio_sys::maps::FileMapping;

use crate::engine::Engine;

/// A quarter of the limit may be pages of files before any are given back, and no less than 32 MiB: the code of a
/// large program.
const SHARE: u64 = 4;
const SHARE_BYTES_MIN: u64 = 32 << 20;

/// What one turn gives back: 1 to 3 ms.
const TURN_BYTES: u64 = 32 << 20;

/// What one call gives back.
const CALL_BYTES: usize = 2 << 20;

/// Address space that one turn looks at: a database maps more than the memory of the machine, most of it empty.
const SPAN_BYTES: usize = 4 << 30;

/// Smaller mappings are not worth a call.
const MAPPING_BYTES_MIN: usize = 1 << 20;

/// How long it is from one turn to the next.
const REST_NS_MIN: u64 = 100_000_000;
const REST_NS_MAX: u64 = 64_000_000_000;

/// What the background thread remembers between two turns. No other thread uses it.
#[derive(Debug, Default)]
pub(crate) struct FilePages {
    pace: Pace,
    /// Up to where the last turn came.
    hand: AtomicUsize,
}

/// When the next turn is due.
#[derive(Debug, Default)]
struct Pace {
    next_ns: AtomicU64,
    rest_ns: AtomicU64,
    /// What the last turn gave back, and what was resident after it.
    gained: AtomicU64,
    left: AtomicU64,
}

impl Pace {
    /// How many bytes to give back now, with `file_bytes` resident of which `share` may stay.
    fn due(&self, now_ns: u64, file_bytes: u64, share: u64) -> u64 {
        if file_bytes <= share {
            self.rest_ns.store(REST_NS_MIN, Relaxed);
            self.gained.store(0, Relaxed);
            return 0;
        }
        if now_ns < self.next_ns.load(Relaxed) {
            return 0;
        }
        let gained = self.gained.load(Relaxed);
        let returned = file_bytes.saturating_sub(self.left.load(Relaxed));
        let rest = self.rest_ns.load(Relaxed).max(REST_NS_MIN);
        let was_in_use = gained > 0 && returned >= gained / 2;
        let rest = if was_in_use { (2 * rest).min(REST_NS_MAX) } else { rest };
        self.rest_ns.store(rest, Relaxed);
        (file_bytes - share).min(TURN_BYTES)
    }

    /// Notes what a turn that wanted `wanted` gave back.
    fn done(&self, now_ns: u64, wanted: u64, gained: u64, left: u64) {
        let rest = self.rest_ns.load(Relaxed);
        // Nothing is there to take: code, or files of other users.
        let rest = if gained < wanted / 2 { (2 * rest).min(REST_NS_MAX) } else { rest };
        self.rest_ns.store(rest, Relaxed);
        self.next_ns.store(now_ns + rest, Relaxed);
        self.gained.store(gained, Relaxed);
        self.left.store(left, Relaxed);
    }
}

/// Whether pages of this mapping may be given back (`FILE-2`). Code is always in use.
fn is_idle_data(mapping: &FileMapping) -> bool {
    let large = mapping.end - mapping.start >= MAPPING_BYTES_MIN;
    large && !mapping.is_executable && (mapping.is_shared || !mapping.is_writable)
}

impl Engine {
    /// Gives pages of files back if they are more than their share.
    pub(crate) fn page_out_files(&self) {
        let files = &self.charge.file_pages;
        let share = (self.limit_bytes() / SHARE).max(SHARE_BYTES_MIN);
        // As of the sample that was just taken.
        let before = self.figures().file_bytes.load(Relaxed);
        let wanted = files.pace.due(self.now_ns(), before, share);
        if wanted == 0 {
            return;
        }
        let gained = || before.saturating_sub(self.file_bytes());
        let mut span = 0;
        // From the hand to the end; and from the beginning, if that was not enough.
        for from in [files.hand.load(Relaxed), 0] {
            let mut enough = false;
            self.mover.system.each_file_mapping(&mut |mapping| {
                let start = mapping.start.max(from);
                if !is_idle_data(mapping) || start >= mapping.end {
                    return true;
                }
                for at in (start..mapping.end).step_by(CALL_BYTES) {
                    let end = mapping.end.min(at + CALL_BYTES);
                    self.mover.system.page_out(at, end - at);
                    files.hand.store(end, Relaxed);
                    span += CALL_BYTES;
                    enough = gained() >= wanted || span >= SPAN_BYTES;
                    if enough {
                        return false;
                    }
                }
                true
            });
            if enough {
                break;
            }
        }
        let gained = gained();
        add(&self.figures().file_paged_out_bytes, gained);
        files.pace.done(self.now_ns(), wanted, gained, before - gained);
    }

    /// Pages of files that are resident now; brings the gauges up to date.
    fn file_bytes(&self) -> u64 {
        let bytes = self.mover.system.resident().map_or(0, |resident| resident.file_bytes);
        self.set_file_bytes(bytes);
        bytes
    }

    /// Sets the gauges of pages of files.
    pub(crate) fn set_file_bytes(&self, bytes: u64) {
        set(&self.figures().file_bytes, &self.figures().file_bytes_max, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::{Pace, REST_NS_MAX, REST_NS_MIN, TURN_BYTES, is_idle_data};
    use zfolio_sys::maps::FileMapping;

    const MIB: u64 = 1 << 20;

    #[test]
    fn nothing_goes_within_the_share() {
        let pace = Pace::default();
        assert_eq!(pace.due(1, 64 * MIB, 64 * MIB), 0);
        assert_eq!(pace.due(1, 65 * MIB, 64 * MIB), MIB);
        assert_eq!(pace.due(1, 900 * MIB, 64 * MIB), TURN_BYTES);
    }

    /// Goal: turn by turn of idle pages; and rarely, of pages that come back.
    #[test]
    fn what_comes_back_is_left_alone_for_longer() {
        let pace = Pace::default();
        let (mut now, mut file) = (0, 400 * MIB);
        let mut turns = 0;
        while file > 100 * MIB {
            let wanted = pace.due(now, file, 100 * MIB);
            if wanted > 0 {
                file -= wanted;
                pace.done(now, wanted, wanted, file);
                turns += 1;
            }
            now += REST_NS_MIN / 4;
        }
        assert_eq!(turns, 10, "300 MiB");
        assert!(now <= 10 * REST_NS_MIN, "at the shortest rest: {now}");

        let (mut turns, until) = (0, now + 4 * REST_NS_MAX);
        while now < until {
            let wanted = pace.due(now, 400 * MIB, 100 * MIB);
            if wanted > 0 {
                pace.done(now, wanted, wanted, 400 * MIB - wanted);
                turns += 1;
            }
            now += REST_NS_MIN;
        }
        // 0.2 s, 0.4 s, ... 51.2 s: 9 turns in 102 s; then one each 64 s.
        assert!((9..=14).contains(&turns), "{turns}");
    }

    #[test]
    fn where_nothing_can_be_had_it_is_rarely_tried() {
        let pace = Pace::default();
        let turns = (0..4 * REST_NS_MAX / REST_NS_MIN).filter(|step| {
            let now = step * REST_NS_MIN;
            let wanted = pace.due(now, 400 * MIB, 100 * MIB);
            if wanted > 0 {
                pace.done(now, wanted, 0, 400 * MIB);
            }
            wanted > 0
        });
        assert!((9..=14).contains(&turns.count()));
    }

    /// Goal: `FILE-2`, and no code.
    #[test]
    fn written_private_pages_and_code_stay() {
        let mapping = |is_writable, is_executable, is_shared| FileMapping {
            start: 0,
            end: 2 << 20,
            is_writable,
            is_executable,
            is_shared,
        };
        assert!(is_idle_data(&mapping(false, false, false)));
        assert!(is_idle_data(&mapping(true, false, true)));
        assert!(!is_idle_data(&mapping(true, false, false)), "private and written");
        assert!(!is_idle_data(&mapping(false, true, false)), "code");
        assert!(!is_idle_data(&FileMapping { end: 4096, ..mapping(false, false, false) }));
    }
}
