//! What threads waited for, in words.

use zfolio_core::stats::Figures;

use super::detail::of;
use crate::duration;

/// Reasons of less than this part of the whole wait are not told.
const TOLD_SHARE: u64 = 20;

/// What a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    Disk,
    Decompress,
    Room,
    Queue,
    Lock,
    Pages,
}

impl Reason {
    /// In words.
    fn text(self) -> &'static str {
        match self {
            Reason::Disk => "for the disk",
            Reason::Decompress => "decompressing",
            Reason::Room => "making room",
            Reason::Queue => "behind other faults",
            Reason::Lock => "behind reclaim or prefetch",
            Reason::Pages => "moving and clearing pages",
        }
    }

    /// In one word, for a label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Reason::Disk => "disk",
            Reason::Decompress => "decompress",
            Reason::Room => "room",
            Reason::Queue => "queue",
            Reason::Lock => "lock",
            Reason::Pages => "pages",
        }
    }
}

/// The reasons of a wait with their nanoseconds, the longest first. The sum is that of the whole wait.
pub(super) fn reasons(figures: &Figures) -> [(u64, Reason); 6] {
    let mut left = of(&figures.stall_ns);
    // A figure may be ahead of the whole by the fault that is just being served.
    let mut part = |figure: u64, name| {
        let part = figure.min(left);
        left -= part;
        (part, name)
    };
    let mut reasons = [
        part(of(&figures.stall_spill_ns), Reason::Disk),
        part(of(&figures.stall_decompress_ns), Reason::Decompress),
        part(of(&figures.stall_reclaim_ns), Reason::Room),
        part(of(&figures.stall_queue_ns), Reason::Queue),
        part(of(&figures.stall_lock_ns), Reason::Lock),
        // The rest.
        part(u64::MAX, Reason::Pages),
    ];
    reasons.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    reasons
}

/// The reasons that count, as in `4.1s decompressing, 660ms making room`; empty if nobody waited.
pub(super) fn text(figures: &Figures) -> String {
    let reasons = reasons(figures);
    let whole: u64 = reasons.iter().map(|(time, _)| time).sum();
    let told = reasons.iter().filter(|(time, _)| *time > whole / TOLD_SHARE);
    let told: Vec<String> = told
        .map(|(time, reason)| format!("{} {}", duration::display(*time), reason.text()))
        .collect();
    told.join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use zfolio_core::stats::Stats;

    #[test]
    fn the_parts_of_a_wait_are_the_whole() {
        let stats = Stats::default();
        let figures = &stats.figures;
        assert_eq!(super::text(figures), "");
        figures.stall_ns.store(10_000_000_000, Relaxed);
        assert_eq!(super::text(figures), "10s moving and clearing pages");
        figures.stall_reclaim_ns.store(6_000_000_000, Relaxed);
        figures.stall_decompress_ns.store(3_000_000_000, Relaxed);
        figures.stall_lock_ns.store(400_000_000, Relaxed);
        assert_eq!(
            super::text(figures),
            "6.0s making room, 3.0s decompressing, 600ms moving and clearing pages"
        );
        figures.stall_spill_ns.store(5_000_000_000, Relaxed);
        assert!(super::text(figures).contains("5.0s for the disk"));
        // Read while a fault is served: the reasons are ahead of the sum.
        figures.stall_queue_ns.store(9_000_000_000, Relaxed);
        let sum: u64 = super::reasons(figures).iter().map(|(time, _)| time).sum();
        assert_eq!(sum, 10_000_000_000);
    }
}
