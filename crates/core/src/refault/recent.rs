//! What came back lately, and so what it pays to have on a disk.
//!
//! [`Refaults`] are sums over the whole run. Their differences between two looks are added here, and each look takes an
//! eighth away of what was there before: so what counts is the time of the last eight looks, or so.
//!
//! **What it pays.** The units that are stored can be put on a disk in the order in which they left memory, those first
//! that left longest ago. The room that they take in memory is then for others. Time is counted in bytes that left, as
//! in [`Forecast`], and of the units that left only the share `S(t)` stays away for longer than `t`; so
//!
//! ```text
//! older(d) = stored - (S(0) + ... + S(d))     is stored and left more than `d` ago                     (`Depth`)
//! gain(d)  = wait at this limit - wait at a limit that is higher by what older(d) takes in memory     (`Forecast`)
//! cost(d)  = faults on units that were away for longer than d * what a read takes longer than to decompress
//! ```
//!
//! The best `d` is that with the largest `gain - cost`. Where all is used alike, as in a loop, the oldest units are
//! what comes back next, and nothing pays.

use super::forecast::Depth;
use super::{BUCKETS, Bucket, Forecast, Measured, Refaults};

/// Each look takes this part (1/8) of what was there before.
const FORGOTTEN_SHARE: u64 = 8;

const SECOND_NS: f64 = 1e9;

/// See the module.
#[derive(Debug)]
pub struct Recent {
    last: Vec<Bucket>,
    last_left: u64,
    last_ns: u64,
    lately: Vec<Bucket>,
    left_bytes: u64,
    span_ns: u64,
}

/// What is stored now, and where.
#[derive(Clone, Copy, Default, Debug)]
pub struct Stored {
    /// Units that are stored and not resident, before compression.
    pub bytes: u64,
    /// What the pool takes in memory for those that are not on the disk.
    pub pool_bytes: u64,
    /// What the disk holds of the others.
    pub disk_bytes: u64,
    /// How much longer a fault takes that reads from the disk.
    pub read_ns: u64,
}

/// What is to be on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OnDisk {
    /// What left memory longer ago than so many bytes.
    pub distance_bytes: u64,
    /// It takes so many bytes, compressed.
    pub bytes: u64,
    /// So much less threads would wait in each second than now, all in all.
    pub saved_ns: u64,
    /// So much more of that they would wait for the disk.
    pub read_ns: u64,
}

impl Default for Recent {
    fn default() -> Self {
        let nothing = || vec![Bucket::default(); BUCKETS];
        Recent {
            last: nothing(),
            last_left: 0,
            last_ns: 0,
            lately: nothing(),
            left_bytes: 0,
            span_ns: 0,
        }
    }
}

impl Recent {
    /// Adds what has happened since the last look. `left_bytes` is the sum of all bytes that left.
    pub fn look(&mut self, refaults: &Refaults, left_bytes: u64, now_ns: u64) {
        let is_first = self.last_ns == 0;
        let add = |lately: u64, now: u64, last: u64| {
            // Rounded up: else a few would never be forgotten.
            let kept = lately - lately.div_ceil(FORGOTTEN_SHARE);
            if is_first { 0 } else { kept.saturating_add(now.saturating_sub(last)) }
        };
        let cells = self.last.iter_mut().zip(self.lately.iter_mut());
        for (now, (last, lately)) in refaults.each().zip(cells) {
            lately.from = now.from;
            lately.end = now.end;
            lately.count = add(lately.count, now.count, last.count);
            lately.waited_ns = add(lately.waited_ns, now.waited_ns, last.waited_ns);
            lately.bytes = add(lately.bytes, now.bytes, last.bytes);
            *last = now;
        }
        self.left_bytes = add(self.left_bytes, left_bytes, self.last_left);
        self.span_ns = add(self.span_ns, now_ns, self.last_ns);
        (self.last_left, self.last_ns) = (left_bytes, now_ns);
    }

    /// What it pays to have on the disk, if that is more than there is, and saves at least `least_ns` in a second.
    ///
    /// `measured` has the limit and the need as they are now; its sums over the run do not matter.
    #[must_use]
    pub fn on_disk(&self, measured: &Measured, stored: &Stored, least_ns: u64) -> Option<OnDisk> {
        let refaults = Refaults::default();
        self.lately.iter().for_each(|bucket| refaults.add_bucket(bucket));
        let limit = measured.limit_bytes;
        let per_second = |ns: f64| ns * SECOND_NS / self.span_ns.max(1) as f64;
        if stored.bytes == 0 || per_second(refaults.waited_ns() as f64) < least_ns as f64 {
            return None;
        }
        let forecast = Forecast::new(
            &refaults,
            &Measured {
                stored_kib_ms: stored.bytes,
                pool_kib_ms: stored.pool_bytes,
                left_bytes: self.left_bytes,
                returned_bytes: refaults.returned_bytes(),
                // What has left and is still away counts as if it never came back: so it takes room in the forecast.
                demand_stored_bytes: 0,
                moved_wait_ns: 0,
                fresh_wait_ns: 0,
                ..*measured
            },
        );
        let now = forecast.waiting_ns(limit);
        let ages = self.ages(stored);
        let is_there = |age: &&Age| (1..=stored.disk_bytes).contains(&age.bytes);
        let here = ages.iter().find(is_there);
        let reads_now = here.map_or(0, |age| age.reads);
        let worth = |age: &Age| {
            let more = age.bytes.checked_sub(stored.disk_bytes).filter(|more| *more > 0)?;
            let gain = now.saturating_sub(forecast.waiting_ns(limit.saturating_add(more)));
            let cost = age.reads.saturating_sub(reads_now) as f64 * stored.read_ns as f64;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "where it is negative 0 is meant; the cast saturates"
            )]
            let whole = |ns: f64| per_second(ns) as u64;
            Some(OnDisk {
                distance_bytes: age.distance_bytes,
                bytes: age.bytes,
                saved_ns: whole(gain as f64 - cost),
                read_ns: whole(cost),
            })
        };
        // Steps of a 32nd of all are fine enough. From the oldest on: of those that take about as much, it is the one
        // with the fewest reads.
        let (least, mut last) = ((stored.pool_bytes + stored.disk_bytes) / 32, 0);
        let steps = ages.iter().rev().filter(|age| {
            let is_step = age.bytes - last > least;
            last = if is_step { age.bytes } else { last };
            is_step
        });
        let best = steps.filter_map(worth).max_by_key(|best| best.saved_ns);
        best.filter(|best| best.saved_ns >= least_ns.max(1))
    }

    /// What is stored by its age, the youngest first.
    pub(super) fn ages(&self, stored: &Stored) -> Vec<Age> {
        let taken = (stored.pool_bytes + stored.disk_bytes) as f64 / stored.bytes.max(1) as f64;
        let mut reads: u64 = self.lately.iter().map(|bucket| bucket.count).sum();
        let mut depth = Depth::new(self.left_bytes as f64);
        let mut last = (0, 0.0);
        let mut ages = Vec::new();
        let mut push = |distance_bytes: u64, younger: f64, reads: u64| {
            let older = (stored.bytes as f64 - younger).max(0.0) * taken;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "not negative; the cast saturates"
            )]
            ages.push(Age { distance_bytes, bytes: older as u64, reads });
        };
        for bucket in self.lately.iter().filter(|bucket| bucket.count + bucket.bytes > 0) {
            let (from, end) =
                depth.step(bucket.from as f64, bucket.end as f64, bucket.bytes as f64);
            push(bucket.from, from, reads);
            if bucket.end == u64::MAX {
                return ages;
            }
            reads -= bucket.count;
            last = (bucket.end, end);
        }
        let (distance_bytes, younger) = last;
        push(distance_bytes, younger, 0);
        ages
    }
}

/// What has been stored for longer than it takes to put so many bytes away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Age {
    pub(super) distance_bytes: u64,
    /// What it takes, compressed.
    pub(super) bytes: u64,
    /// Faults on it, lately.
    pub(super) reads: u64,
}
