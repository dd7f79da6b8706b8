//! Histograms of durations that another process may map and read.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets of a [`Histogram`]: four for each power of two of a 64-bit value.
pub const BUCKETS: usize = 256;

/// Counts of durations, in buckets at most 25 % wide.
#[repr(C)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

/// Prints count and quantiles, not the 256 buckets.
impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p50, p99) = (self.quantile(500), self.quantile(990));
        write!(f, "Histogram {{ count: {}, p50: {p50}, p99: {p99} }}", self.count())
    }
}

impl Histogram {
    /// The bucket of `value`: the place of its highest bit, and the two bits below that.
    fn index(value: u64) -> usize {
        let value = value.max(4);
        let top = value.ilog2();
        (top as usize) * 4 + ((value >> (top - 2)) & 3) as usize
    }

    /// Counts one `value`.
    pub fn add(&self, value: u64) {
        self.buckets[Self::index(value)].fetch_add(1, Relaxed);
    }

    /// Begins anew.
    pub fn reset(&self) {
        self.buckets.iter().for_each(|bucket| bucket.store(0, Relaxed));
    }

    /// How many values were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum()
    }

    /// How many of the values are less than 2^`power`, of which `power` is 3 at least.
    #[must_use]
    pub fn count_below(&self, power: u32) -> u64 {
        let end = (power as usize * 4).min(BUCKETS);
        self.buckets[..end].iter().map(|bucket| bucket.load(Relaxed)).sum()
    }

    /// The sum of the values, within 13 %: each counts as the middle of its bucket.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let sum = self.buckets.iter().enumerate().map(|(index, bucket)| {
            let (top, step) = (index / 4, (index % 4) as u128);
            // 2^top * (1 + (step + 1/2) / 4).
            u128::from(bucket.load(Relaxed)) * (((9 + 2 * step) << top) / 8)
        });
        u64::try_from(sum.sum::<u128>()).unwrap_or(u64::MAX)
    }

    /// The upper end of the bucket with the `per_mille` quantile; 0 if nothing was counted.
    #[must_use]
    pub fn quantile(&self, per_mille: u64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = (count * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.load(Relaxed);
            if seen >= rank {
                let (top, step) = (index / 4, (index % 4) as u64);
                // 2^top * (1 + (step + 1) / 4) - 1: the last value of the bucket.
                return ((5 + step) << top >> 2) - 1;
            }
        }
        u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::Histogram;

    #[test]
    fn values_below_a_power_are_exact() {
        let histogram = Histogram::default();
        [0, 7, 8, 1023, 1024, 1025, u64::MAX].iter().for_each(|value| histogram.add(*value));
        let below = [3, 10, 11, 64, 99].map(|power| histogram.count_below(power));
        assert_eq!(below, [2, 4, 6, 7, 7]);
    }

    #[test]
    fn quantile_is_within_its_bucket() {
        for value in [1u64, 4, 5, 7, 100, 1000, 12_345, 1 << 40] {
            let histogram = Histogram::default();
            histogram.add(value);
            let found = histogram.quantile(500);
            assert!(found >= value && found <= (value.max(4)) * 5 / 4, "{value}: {found}");
        }
    }

    #[test]
    fn quantiles_rise() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value));
        let (p50, p99) = (histogram.quantile(500), histogram.quantile(990));
        assert!((500..=640).contains(&p50), "p50 {p50}");
        assert!((990..=1280).contains(&p99), "p99 {p99}");
    }

    #[test]
    fn sum_is_within_an_eighth() {
        for value in [4u64, 5, 7, 100, 1000, 12_345, (1 << 40) + 1] {
            let histogram = Histogram::default();
            (0..3).for_each(|_| histogram.add(value));
            let off = histogram.sum().abs_diff(3 * value);
            assert!(off <= 3 * value / 8 + 3, "{value}: {}", histogram.sum());
        }
    }
}
