//! How long the run that was measured would have waited at other limits.
//!
//! Two models are asked, and the one that waits longer is believed at each limit. Time is counted in
//! bytes that leave memory; `S(t)` is the share of what left that stayed away for longer than `t`.
//!
//! **The order of use.** A unit that is away sinks one unit deeper for each that comes back from further
//! away than itself, and stays where it is for the others. So what is away for `D` is `x(D)` deep:
//!
//! ```text
//! x(D) = S(0) + ... + S(D)        and with x(D) bytes more, what is away for D and less stays
//! ```
//!
//! This is exact for a loop, and for the least recently used at random. The distances alone, `D` bytes
//! more for what is away for `D`, would count what goes out and comes back again and again each time.
//!
//! **The rate of use.** There are no access bits: a unit that is used often leaves as soon as one that is
//! not, `R` bytes after it came, with `R` resident. The distances are taken for a mixture of classes, each
//! with a mean distance `m` of its own, whose units come back at random times. With more room a unit
//! stays for `T` instead of `R`, and comes `(R + m) / (T + m)` times as often. `T` is where all that comes
//! fills the room:
//!
//! ```text
//! T * (sum of bytes * (R + m) / (T + m) over all classes) = (R + gained) * bytes
//! ```
//!
//! It is exact for first in, first out, and knows nothing of loops. The classes are found by expectation
//! maximization: bytes of each step go to the classes in proportion to how likely they are there.
//!
//! # Prior art
//!
//! The first model is the average eviction time of Hu et al., "Kinetic Modeling of Data Eviction in Cache"
//! (ATC'16), with the clock started when a unit leaves.
//!
//! # Invariants
//!
//! - `FORECAST-1` Waiting never rises with the limit, and is what was measured at the limit of the
//!   measurement.
//!
//! # Cost
//!
//! A millisecond for a histogram, microseconds for a limit.

use super::{BUCKETS, Measured, Refaults};

/// Mean distances of the classes: half octaves from 128 KiB to 64 GiB.
const CLASSES: usize = 39;

/// Rounds in which the classes are found. The gain of more is within what the next run differs.
const ROUNDS: usize = 30;

/// Halvings of the range in which the stay of a unit is sought: a factor of 2^40 to a part in 2^24.
const HALVINGS: usize = 30;
const STAY_OCTAVES: f64 = 40.0;

/// What is least resident: a forecast needs something to start from.
const RESIDENT_MIN: f64 = (1_u64 << 20) as f64;

/// One step of distances: from where to where, bytes that came back, nanoseconds waited for them.
#[derive(Clone, Copy, Debug)]
struct Step {
    from: f64,
    to: f64,
    bytes: f64,
    waited_ns: f64,
}

/// Up to `gain` bytes more that are resident leave `waiting_ns`.
#[derive(Clone, Copy, Debug)]
struct Point {
    gain: f64,
    waiting_ns: f64,
}

/// Units that come back after `mean` bytes on average.
#[derive(Clone, Copy, Default, Debug)]
struct Class {
    mean: f64,
    bytes: f64,
    waited_ns: f64,
}

/// See the module.
#[derive(Debug)]
pub struct Forecast {
    measured: Measured,
    /// What was waited for stored units.
    waited_ns: u64,
    /// The order of use: a line between two points, and the last one to the end.
    order: Vec<Point>,
    /// The rate of use.
    classes: Vec<Class>,
    /// Bytes that left and were dropped in the store: others took their place for good.
    dropped: f64,
    resident: f64,
}

impl Forecast {
    /// Finds what `refaults` say of a run that was `measured`.
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

    /// How long the run would have waited at `limit_bytes`, all threads together.
    ///
    /// A byte of limit gains more than one resident byte. With `L` the limit, `R` resident, `N` what
    /// the program needs, and everything that is not resident stored at `ratio` to 1:
    ///
    /// ```text
    /// L = R + (N - R) / ratio        so        dR / dL = 1 / (1 - 1 / ratio)
    /// ```
    ///
    /// for a unit that becomes resident leaves the pool. A resident byte is taken to cost a quarter of a
    /// byte of limit at least, whatever the ratio.
    ///
    /// Waiting for units that were moved back shrinks as that for stored ones does, and waiting for fresh
    /// memory not at all, until the limit is above the need (and a 16th: where reclaim begins). Then
    /// nothing is compressed.
    ///
    /// Below the limit of the measurement nothing is known but that the run would have waited at least
    /// as long.
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

    /// What is waited for stored units with so many more resident bytes.
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
        // The same halves are looked at for each limit, so that a larger one never finds a shorter stay.
        let (mut low, mut high) = (0.0, STAY_OCTAVES);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if filled(resident * middle.exp2()) < room { low = middle } else { high = middle }
        }
        let stay = resident * low.exp2();
        self.classes.iter().map(|class| class.waited_ns * more(class, stay)).sum()
    }
}

/// The buckets that hold anything. Where no bytes were counted, the waiting stands for them.
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

/// The points of the first model, when `all` bytes left.
fn order(steps: &[Step], all: f64) -> Vec<Point> {
    let mut waiting_ns: f64 = steps.iter().map(|step| step.waited_ns).sum();
    let (mut away, mut gain, mut at) = (all, 0.0, 0.0);
    let mut points = Vec::with_capacity(2 * steps.len() + 1);
    let share = |bytes: f64| if all > 0.0 { bytes / all } else { 1.0 };
    points.push(Point { gain, waiting_ns });
    // How long the last step may be away, nobody knows.
    for step in steps.iter().filter(|step| step.to.is_finite()) {
        gain += (step.from - at) * share(away);
        points.push(Point { gain, waiting_ns });
        // Evenly spread within the step: half of it is still away, on average.
        gain += (step.to - step.from) * share(away - step.bytes / 2.0);
        away = (away - step.bytes).max(0.0);
        waiting_ns = (waiting_ns - step.waited_ns).max(0.0);
        points.push(Point { gain, waiting_ns });
        at = step.to;
    }
    points
}

/// The classes of the second model, by expectation maximization.
fn classes(steps: &[Step]) -> Vec<Class> {
    let first = f64::from(1 << 17);
    let means: [f64; CLASSES] = std::array::from_fn(|index| first * (index as f64 / 2.0).exp2());
    // How likely a unit of each class comes back within a step.
    let likely =
        |step: &Step| means.map(|mean| (-step.from / mean).exp() - (-step.to / mean).exp());
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
