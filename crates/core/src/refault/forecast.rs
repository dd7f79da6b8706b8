//! Computes how long the measured run would have waited at other limits.
//!
//! Two models are computed, and at each limit the longer of the two waits is used. Time is counted
//! in bytes that leave memory. `S(t)` is the share of the bytes that left which stayed away for
//! longer than `t`.
//!
//! **The order of use.** Think of the units that are away as a stack. When a unit comes back that
//! was away for longer than some other unit, that other unit sinks by one; otherwise its depth does
//! not change. So a unit that was away for `D` is at depth `x(D)`:
//!
//! ```text
//! x(D) = S(0) + ... + S(D)        with x(D) more bytes, all that is away for at most D stays resident
//! ```
//!
//! This is exact for a loop, and for random accesses with eviction of the least recently used unit.
//! The distances alone (`D` more bytes for units that are away for `D`) would count a unit that
//! leaves and comes back repeatedly each time.
//!
//! **The rate of use.** The engine has no access bits, so a unit that is used often leaves as soon
//! as any other: `R` bytes after it came, if `R` bytes are resident. The distances are modelled as
//! a mixture of classes. Each class has a mean distance `m`, and its units come back at random
//! times. With more room a unit stays for `T` instead of `R`, and comes back `(R + m) / (T + m)`
//! times as often. `T` is chosen so that all units that come back just fill the room:
//!
//! ```text
//! T * (sum of bytes * (R + m) / (T + m) over all classes) = (R + gained) * bytes
//! ```
//!
//! This is exact for first in, first out, and does not model loops. The classes are found by
//! expectation maximization: the bytes of each step are divided among the classes in proportion to
//! the likelihood of the step in each class.
//!
//! # Prior art
//!
//! The first model is the average eviction time of Hu et al., "Kinetic Modeling of Data Eviction in
//! Cache" (ATC'16), with a clock that starts when a unit leaves.
//!
//! # Invariants
//!
//! - `FORECAST-1` The wait never rises with the limit, and at the limit of the measurement it is
//!   what was measured.
//!
//! # Cost
//!
//! A millisecond for a histogram, microseconds for each limit.

use super::{BUCKETS, Measured, Refaults};

/// The number of classes. Their mean distances are half octaves from 128 KiB to 64 GiB.
const CLASSES: usize = 39;

/// Rounds of the expectation maximization. More rounds change the result less than the next run
/// differs.
const ROUNDS: usize = 30;

/// Bisection steps in the search for the stay of a unit: they narrow a factor of 2^40 to one part
/// in 2^24.
const HALVINGS: usize = 30;
const STAY_MAX: f64 = (1_u64 << 40) as f64;

/// The least resident size that is assumed, so that the forecast has a starting point.
const RESIDENT_MIN: f64 = (1_u64 << 20) as f64;

/// One step of distances: its range, the bytes that came back, and the nanoseconds waited for them.
#[derive(Clone, Copy, Debug)]
struct Step {
    from: f64,
    to: f64,
    bytes: f64,
    waited_ns: f64,
}

/// With up to `gain` more resident bytes, `waiting_ns` is still waited.
#[derive(Clone, Copy, Debug)]
struct Point {
    gain: f64,
    waiting_ns: f64,
}

/// A class: units that come back after `mean` bytes on average.
#[derive(Clone, Copy, Default, Debug)]
struct Class {
    mean: f64,
    bytes: f64,
    waited_ns: f64,
}

/// The forecasts of one run. See the module.
#[derive(Debug)]
pub struct Forecast {
    measured: Measured,
    /// Time waited for stored units.
    waited_ns: u64,
    /// The model of the order of use: linear between two points, constant after the last.
    order: Vec<Point>,
    /// The model of the rate of use.
    classes: Vec<Class>,
    /// Bytes that left and never came back, because the program dropped them in the store.
    dropped: f64,
    resident: f64,
}

impl Forecast {
    /// Computes both models from the `refaults` and figures of a run.
    #[must_use]
    pub fn new(refaults: &Refaults, measured: &Measured) -> Forecast {
        let steps = steps(refaults);
        let returned: f64 = steps.iter().map(|step| step.bytes).sum();
        let kept = (measured.returned_bytes + measured.demand_stored_bytes) as f64;
        let counted = measured.returned_bytes > 0;
        let dropped = if counted { (measured.left_bytes as f64 - kept).max(0.0) } else { 0.0 };
        let stored =
            measured.resident_gained(measured.need_bytes.saturating_sub(measured.limit_bytes));
        let managed = measured.need_bytes.saturating_sub(measured.unmanaged_bytes);
        Forecast {
            measured: *measured,
            waited_ns: refaults.waited_ns(),
            order: order(&steps, returned + dropped),
            classes: classes(&steps),
            dropped,
            resident: (managed.saturating_sub(stored) as f64).max(RESIDENT_MIN),
        }
    }

    /// How long all threads together would have waited at `limit_bytes`.
    ///
    /// A byte of limit gains more than one resident byte. Let `L` be the limit, `R` the resident
    /// bytes, `N` the need of the program; all that is not resident is stored at `ratio` to 1:
    ///
    /// ```text
    /// L = R + (N - R) / ratio        so        dR / dL = 1 / (1 - 1 / ratio)
    /// ```
    ///
    /// because a unit that becomes resident leaves the pool. A resident byte is assumed to cost at
    /// least a quarter of a byte of limit, whatever the ratio is.
    ///
    /// The wait for units that were moved back shrinks in proportion to the wait for stored units.
    /// The wait for fresh memory does not shrink until the limit exceeds the need (and a 16th more,
    /// where reclaim begins). Above that nothing is compressed.
    ///
    /// For limits below that of the measurement, only a lower bound is known: the measured wait.
    #[must_use]
    pub fn waiting_ns(&self, limit_bytes: u64) -> u64 {
        let measured = &self.measured;
        if limit_bytes > measured.limit_bytes && limit_bytes >= measured.ample_bytes() {
            return 0;
        }
        let gained = measured.resident_gained(limit_bytes.saturating_sub(measured.limit_bytes));
        let (all, left) = (self.waited_ns, self.stored_wait_ns(gained));
        let moved = measured.moved_wait_ns;
        let moved_left = match u128::from(all) {
            0 => moved,
            all => u64::try_from(u128::from(moved) * u128::from(left) / all).unwrap_or(moved),
        };
        left + moved_left + measured.fresh_wait_ns
    }

    /// The time waited for stored units with `gained` more resident bytes.
    fn stored_wait_ns(&self, gained: u64) -> u64 {
        if gained == 0 {
            return self.waited_ns;
        }
        let gained = gained as f64;
        let waiting = self.by_order(gained).max(self.by_rate(gained));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a sum of times that are not negative; the cast saturates"
        )]
        let waiting = waiting.round() as u64;
        waiting.min(self.waited_ns)
    }

    fn by_order(&self, gained: f64) -> f64 {
        let after = self.order.partition_point(|point| point.gain <= gained);
        let Some(before) = after.checked_sub(1).map(|index| self.order[index]) else {
            return self.waited_ns as f64;
        };
        let Some(next) = self.order.get(after) else { return before.waiting_ns };
        let part = (gained - before.gain) / (next.gain - before.gain);
        before.waiting_ns + (next.waiting_ns - before.waiting_ns) * part
    }

    fn by_rate(&self, gained: f64) -> f64 {
        let resident = self.resident;
        let more = |class: &Class, stay: f64| (resident + class.mean) / (stay + class.mean);
        let all = self.classes.iter().map(|class| class.bytes).sum::<f64>() + self.dropped;
        let room = (resident + gained) * all;
        let filled = |stay: f64| {
            let bytes = self.classes.iter().map(|class| class.bytes * more(class, stay));
            stay * (bytes.sum::<f64>() + self.dropped)
        };
        // The bisection takes the same steps for every limit, so that a larger limit never gives a
        // shorter stay.
        let (mut low, mut high) = (1.0, STAY_MAX);
        for _ in 0..HALVINGS {
            let middle = f64::sqrt(low * high);
            if filled(resident * middle) < room { low = middle } else { high = middle }
        }
        let stay = resident * low;
        self.classes.iter().map(|class| class.waited_ns * more(class, stay)).sum()
    }
}

/// The buckets that are not empty. Where no bytes were counted, the time waited takes their place.
fn steps(refaults: &Refaults) -> Vec<Step> {
    let counted = refaults.each().any(|bucket| bucket.bytes > 0);
    let step = |bucket: super::Bucket| Step {
        from: bucket.from as f64,
        to: if bucket.end == u64::MAX { f64::INFINITY } else { bucket.end as f64 },
        bytes: if counted { bucket.bytes } else { bucket.waited_ns } as f64,
        waited_ns: bucket.waited_ns as f64,
    };
    refaults.each().filter(|bucket| bucket.bytes + bucket.waited_ns > 0).map(step).collect()
}

/// The points of the first model; `all` bytes left in total.
fn order(steps: &[Step], all: f64) -> Vec<Point> {
    let mut waiting_ns: f64 = steps.iter().map(|step| step.waited_ns).sum();
    let mut depth = Depth::new(all);
    let mut points = Vec::with_capacity(2 * steps.len() + 1);
    points.push(Point { gain: 0.0, waiting_ns });
    // The last step has no upper end, so its time away is unknown.
    for step in steps.iter().filter(|step| step.to.is_finite()) {
        let (from, to) = depth.step(step.from, step.to, step.bytes);
        points.push(Point { gain: from, waiting_ns });
        waiting_ns = (waiting_ns - step.waited_ns).max(0.0);
        points.push(Point { gain: to, waiting_ns });
    }
    points
}

/// The depth `x(D)` of what has been away for `D`, in steps of rising distance. See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// All bytes that left, and those of them that stay away for longer than `at`.
    all: f64,
    away: f64,
    at: f64,
    depth: f64,
}

impl Depth {
    pub(super) fn new(all: f64) -> Depth {
        Depth { all, away: all, at: 0.0, depth: 0.0 }
    }

    /// The depth at both ends of the next step, of which so many bytes came back.
    pub(super) fn step(&mut self, from: f64, to: f64, bytes: f64) -> (f64, f64) {
        let share = |bytes: f64| if self.all > 0.0 { (bytes / self.all).max(0.0) } else { 1.0 };
        let start = self.depth + (from - self.at) * share(self.away);
        // The bytes of a step are assumed to be spread evenly, so that on average half of them are
        // still away.
        let end = start + (to - from) * share(self.away - bytes / 2.0);
        *self = Depth { away: self.away - bytes, at: to, depth: end, ..*self };
        (start, end)
    }
}

/// e to the power of `-x`, for an `x` of 0 or more, by the series of the rest behind the last power of two.
///
/// Not the C library's: for one function of its mathematics each process of a run would load a library more, 0.1 ms.
fn decayed(x: f64) -> f64 {
    const TERMS: u32 = 14;
    // The smallest normal number is 2 to the power of -1022.
    if x > 1000.0 * std::f64::consts::LN_2 {
        return 0.0;
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1000")]
    let halvings = (x / std::f64::consts::LN_2) as u64;
    let rest = x - halvings as f64 * std::f64::consts::LN_2;
    let series = (1..=TERMS).rev().fold(1.0, |sum, term| 1.0 - sum * rest / f64::from(term));
    series * f64::from_bits((1023 - halvings) << (f64::MANTISSA_DIGITS - 1))
}

/// The classes of the second model, by expectation maximization.
fn classes(steps: &[Step]) -> Vec<Class> {
    let first = f64::from(1 << 17);
    let half = |index: usize| if index % 2 == 1 { std::f64::consts::SQRT_2 } else { 1.0 };
    let means: [f64; CLASSES] =
        std::array::from_fn(|index| first * half(index) * (1_u64 << (index / 2)) as f64);
    // The likelihood of the step in each class.
    let likely =
        |step: &Step| means.map(|mean| decayed(step.from / mean) - decayed(step.to / mean));
    let table: Vec<[f64; CLASSES]> = steps.iter().map(likely).collect();
    let mut bytes = [1.0; CLASSES];
    let mut waited_ns = [0.0; CLASSES];
    for _ in 0..ROUNDS {
        let mut next = [0.0; CLASSES];
        waited_ns = [0.0; CLASSES];
        for (step, likely) in steps.iter().zip(&table) {
            let whole: f64 = bytes.iter().zip(likely).map(|(bytes, likely)| bytes * likely).sum();
            if whole <= 0.0 {
                continue;
            }
            for (index, likely) in likely.iter().enumerate() {
                let part = bytes[index] * likely / whole;
                next[index] += step.bytes * part;
                waited_ns[index] += step.waited_ns * part;
            }
        }
        bytes = next;
    }
    let class =
        |index| Class { mean: means[index], bytes: bytes[index], waited_ns: waited_ns[index] };
    (0..CLASSES).map(class).filter(|class| class.bytes + class.waited_ns > 0.0).collect()
}

const _: () = assert!(BUCKETS > CLASSES, "classes are coarser than what they are found from");

#[cfg(test)]
mod tests {
    use super::decayed;

    /// Goal: the function is the C library's, to 12 digits.
    #[test]
    fn e_to_the_power_of_a_negative_number() {
        let steps = (0..4000).map(|step| f64::from(step) * 0.17);
        for x in steps.chain([1e-300, 1e-9, 692.0, 700.0, 1e9, f64::MAX, f64::INFINITY]) {
            let (is, expected) = (decayed(x), (-x).exp());
            assert!((is - expected).abs() <= expected * 1e-12 + 1e-300, "{x}: {is} and {expected}");
        }
    }
}
