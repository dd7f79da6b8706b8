//! Refaults by distance: how much more memory would have kept the units that were needed again.
//!
//! The **distance** of a refault is the number of bytes that were compressed between the moment at
//! which a unit left memory and the moment at which it came back. (The kernel uses the same measure
//! in `mm/workingset.c`.) The histogram here counts, by distance, the bytes that came back and the
//! time that was waited for them. From it [`Forecast`] computes how long the same run would have
//! waited at a higher limit.
//!
//! # Cost
//!
//! 3.2 KiB per process. A fault that decompresses makes two additions, each load one.

mod forecast;
mod recent;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use forecast::Forecast;
pub use recent::{OnDisk, Recent, Stored};

/// Buckets of an octave.
const STEPS: usize = 8;

/// Length of each of the first 8 buckets.
const FIRST_BYTES: u64 = 128 << 10;

/// Octaves above the first 8 buckets: from 1 MiB to 64 GiB.
const OCTAVES: usize = 16;

/// Buckets of [`Refaults`].
pub const BUCKETS: usize = STEPS + STEPS * OCTAVES;

/// A histogram of units that came back from the store, by distance.
///
/// The buckets of an octave are equally long: an eighth of it, and at least 128 KiB. The last
/// bucket also holds all longer distances.
#[repr(C)]
#[derive(Debug)]
pub struct Refaults {
    /// Faults that had to wait.
    counts: [AtomicU64; BUCKETS],
    /// Nanoseconds that they waited.
    waited_ns: [AtomicU64; BUCKETS],
    /// Bytes that came back, with or without a wait.
    bytes: [AtomicU64; BUCKETS],
}

impl Default for Refaults {
    fn default() -> Self {
        let zeros = || [const { AtomicU64::new(0) }; BUCKETS];
        Refaults { counts: zeros(), waited_ns: zeros(), bytes: zeros() }
    }
}

/// The contents of one bucket.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bucket {
    /// The shortest distance in the bucket.
    pub from: u64,
    /// All distances in the bucket are below this; `u64::MAX` for the last bucket.
    pub end: u64,
    /// Faults that had to wait.
    pub count: u64,
    /// Nanoseconds that they waited.
    pub waited_ns: u64,
    /// Bytes that came back.
    pub bytes: u64,
}

/// What was measured at one limit, in addition to the refaults: the input of a forecast for another
/// limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Measured {
    /// The limit at which the program ran.
    pub limit_bytes: u64,
    /// The most that the program would have held resident without a limit.
    pub need_bytes: u64,
    /// The part of `need_bytes` that is not managed.
    pub unmanaged_bytes: u64,
    /// The sum over time of what was stored, before compression, in KiB times milliseconds. The last moment tells
    /// nothing: a program that ends has freed most of its memory.
    pub stored_kib_ms: u64,
    /// The sum over the same time of what the pool took for that, with all overhead.
    pub pool_kib_ms: u64,
    /// Bytes that are only in the store and not resident, before compression.
    pub demand_stored_bytes: u64,
    /// All bytes that left memory for the store.
    pub left_bytes: u64,
    /// The bytes of `left_bytes` that came back.
    pub returned_bytes: u64,
    /// Time waited for units in the staging area, or already on their way back.
    pub moved_wait_ns: u64,
    /// Time waited for fresh memory.
    pub fresh_wait_ns: u64,
}

/// A recommended limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advice {
    /// The limit, a whole number of MiB.
    pub limit_bytes: u64,
    /// How long all threads together would have waited.
    pub waiting_ns: u64,
}

impl Refaults {
    /// The bucket of a distance.
    fn index(distance_bytes: u64) -> usize {
        let steps = distance_bytes / FIRST_BYTES;
        let Some(octave) = (steps / STEPS as u64).checked_ilog2() else {
            return usize::try_from(steps).unwrap_or(STEPS - 1);
        };
        // The three bits below the highest one.
        let within = usize::try_from((steps >> octave) % STEPS as u64).unwrap_or(0);
        (STEPS + STEPS * octave as usize + within).min(BUCKETS - 1)
    }

    /// The shortest distance of a bucket.
    fn start(index: usize) -> u64 {
        let Some(above) = index.checked_sub(STEPS) else { return FIRST_BYTES * index as u64 };
        (FIRST_BYTES * (STEPS + above % STEPS) as u64) << (above / STEPS)
    }

    /// The distance that all distances of a bucket are below. The last bucket has no end.
    fn end(index: usize) -> u64 {
        if index >= BUCKETS - 1 { u64::MAX } else { Self::start(index + 1) }
    }

    /// Counts one fault that decompressed a unit and took `waited_ns`. `distance_bytes` is its
    /// distance.
    pub fn add(&self, distance_bytes: u64, waited_ns: u64) {
        let index = Self::index(distance_bytes);
        self.counts[index].fetch_add(1, Relaxed);
        self.waited_ns[index].fetch_add(waited_ns, Relaxed);
    }

    /// Counts `bytes` that came back at this distance, for any reason.
    pub fn add_bytes(&self, distance_bytes: u64, bytes: u64) {
        self.bytes[Self::index(distance_bytes)].fetch_add(bytes, Relaxed);
    }

    /// Adds the contents of a bucket of another histogram.
    pub fn add_bucket(&self, bucket: &Bucket) {
        let index = Self::index(bucket.from);
        self.counts[index].fetch_add(bucket.count, Relaxed);
        self.waited_ns[index].fetch_add(bucket.waited_ns, Relaxed);
        self.bytes[index].fetch_add(bucket.bytes, Relaxed);
    }

    /// All buckets, in rising order of distance.
    pub fn each(&self) -> impl Iterator<Item = Bucket> {
        let loaded = |cells: &[AtomicU64; BUCKETS], index: usize| cells[index].load(Relaxed);
        (0..BUCKETS).map(move |index| Bucket {
            from: Self::start(index),
            end: Self::end(index),
            count: loaded(&self.counts, index),
            waited_ns: loaded(&self.waited_ns, index),
            bytes: loaded(&self.bytes, index),
        })
    }

    /// Time waited for units that were decompressed, at all distances.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.waited_ns.iter().map(|waited| waited.load(Relaxed)).sum()
    }

    /// Bytes that came back, at all distances.
    #[must_use]
    pub fn returned_bytes(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.load(Relaxed)).sum()
    }

    /// The lowest limit above the present one at which the run would have waited at most `most_ns`.
    /// `None` if the run waited no longer than that at the present limit.
    #[must_use]
    pub fn advice(&self, measured: &Measured, most_ns: u64) -> Option<Advice> {
        let ample = measured.ample_bytes();
        let forecast = Forecast::new(self, measured);
        if forecast.waiting_ns(measured.limit_bytes) <= most_ns || ample <= measured.limit_bytes {
            return None;
        }
        // FORECAST-1: from some limit on the wait is short enough, and below it is not. At `ample`
        // it is.
        let (mut long, mut good) = (measured.limit_bytes / MIB, ample / MIB);
        while long + 1 < good {
            let middle = long.midpoint(good);
            let waiting_ns = forecast.waiting_ns(middle * MIB);
            if waiting_ns <= most_ns { good = middle } else { long = middle }
        }
        let limit_bytes = good * MIB;
        Some(Advice { limit_bytes, waiting_ns: forecast.waiting_ns(limit_bytes) })
    }
}

/// A MiB: limits are given in whole MiB.
const MIB: u64 = 1 << 20;

impl Measured {
    /// A limit that is never reached: the need plus a 16th of the limit, since reclaim begins that
    /// far below it.
    #[must_use]
    pub fn ample_bytes(&self) -> u64 {
        whole_mib(self.need_bytes.saturating_add(self.need_bytes / 15))
    }

    /// What a resident byte costs of the limit, in 256ths: `1 - 1 / ratio`, at least a quarter.
    fn cost(&self) -> u64 {
        let (stored, pool) = (self.stored_kib_ms.max(1), self.pool_kib_ms.min(self.stored_kib_ms));
        let saved = u128::from(stored - pool) * 256 / u128::from(stored);
        u64::try_from(saved).unwrap_or(256).clamp(64, 256)
    }

    /// How many more bytes can be resident at `limit_bytes` than at the limit of the measurement.
    fn resident_gained(&self, limit_bytes: u64) -> u64 {
        u64::try_from(u128::from(limit_bytes) * 256 / u128::from(self.cost())).unwrap_or(u64::MAX)
    }
}

/// `bytes`, rounded up to whole MiB.
fn whole_mib(bytes: u64) -> u64 {
    bytes.div_ceil(MIB).saturating_mul(MIB)
}

#[cfg(test)]
mod tests;
