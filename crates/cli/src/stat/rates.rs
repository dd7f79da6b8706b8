//! The rates of a process between two looks.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use crate::stats_file::StatsFile;

/// The counts of a process at one look.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Counts {
    stall_ns: u64,
    faults: u64,
    reclaimed_bytes: u64,
}

impl Counts {
    fn of(file: &StatsFile) -> Counts {
        let figures = &file.stats.figures;
        let units: u64 = [
            &figures.reclaim_clean,
            &figures.reclaim_compressed,
            &figures.reclaim_same_filled,
            &figures.reclaim_incompressible,
        ]
        .iter()
        .map(|figure| figure.load(Relaxed))
        .sum();
        Counts {
            stall_ns: figures.stall_ns.load(Relaxed),
            faults: file.stats.histograms().iter().map(|(_, histogram)| histogram.count()).sum(),
            reclaimed_bytes: units.saturating_mul(figures.unit_bytes.load(Relaxed)),
        }
    }
}

/// The rates of one process between two looks.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Rate {
    /// Nanoseconds that its threads waited, per second: more than a second if several wait at once.
    pub(super) stall_ns: u64,
    /// Faults served per second.
    pub(super) faults: u64,
    /// Bytes moved out of the program per second.
    pub(super) reclaimed_bytes: u64,
}

/// The increase from `before` to `now`, per second. 0 if the count is smaller than before, because
/// it started again.
pub(super) fn a_second(before: u64, now: u64, between_ns: u64) -> u64 {
    let added = u128::from(now.saturating_sub(before)) * 1_000_000_000;
    let between_ns = u128::from(between_ns.max(1));
    u64::try_from((added + between_ns / 2) / between_ns).unwrap_or(u64::MAX)
}

/// The counts of each process at the last look.
#[derive(Default, Debug)]
pub(super) struct Rates {
    at_ns: u64,
    /// By PID, number of the pager and start time, because a PID may be used again.
    counts: BTreeMap<(u32, u32, u64), Counts>,
}

impl Rates {
    /// The rates of `files` since the last call; `None` for a process that did not exist then.
    pub(super) fn since(&mut self, files: &[StatsFile], now_ns: u64) -> Vec<Option<Rate>> {
        let between_ns = now_ns.saturating_sub(self.at_ns);
        let key = |file: &StatsFile| {
            (file.pid, file.library.unwrap_or(0), file.stats.start_ticks.load(Relaxed))
        };
        let counts: BTreeMap<_, _> =
            files.iter().map(|file| (key(file), Counts::of(file))).collect();
        let rate = |file: &StatsFile| {
            let (now, before) = (counts[&key(file)], self.counts.get(&key(file))?);
            let grown =
                |figure: fn(&Counts) -> u64| a_second(figure(before), figure(&now), between_ns);
            Some(Rate {
                stall_ns: grown(|counts| counts.stall_ns),
                faults: grown(|counts| counts.faults),
                reclaimed_bytes: grown(|counts| counts.reclaimed_bytes),
            })
        };
        let rates = files.iter().map(rate).collect();
        (self.at_ns, self.counts) = (now_ns, counts);
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::{Rate, Rates};
    use crate::stats_file::StatsFile;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn a_rate_is_what_was_added_over_the_time_that_passed() {
        let file = StatsFile::made_up(7, "test");
        let figures = &file.stats.figures;
        figures.unit_bytes.store(16 << 10, Relaxed);
        figures.stall_ns.store(5_000_000_000, Relaxed);
        let files = [file];
        let mut rates = Rates::default();
        assert_eq!(rates.since(&files, 1_000_000_000), [None], "nothing to compare with");

        let figures = &files[0].stats.figures;
        figures.stall_ns.fetch_add(1_000_000_000, Relaxed);
        figures.reclaim_clean.store(64, Relaxed);
        (0..4).for_each(|_| files[0].stats.fault_staged_ns.add(1000));
        let rate = rates.since(&files, 3_000_000_000)[0].expect("it was there");
        let expected = Rate { stall_ns: 500_000_000, faults: 2, reclaimed_bytes: 512 << 10 };
        assert_eq!(rate, expected);
    }

    #[test]
    fn another_process_of_the_same_number_begins_anew() {
        let mut rates = Rates::default();
        let file = StatsFile::made_up(7, "test");
        rates.since(std::slice::from_ref(&file), 1);
        file.stats.start_ticks.fetch_add(1, Relaxed);
        assert_eq!(rates.since(&[file], 2), [None]);
    }
}
