//! The cgroup's limit with which a run of the kernel costs as much memory as zfolio's limit.
//!
//! The cost of a run is the cgroup's limit plus the most that zram held (see
//! [`compare`](crate::compare)). A lower limit moves more data to zram, where it needs less memory.
//! So the cost falls with the limit, by a rule that depends on how well the data compresses:
//!
//! ```text
//! cost = limit + (data - limit) / ratio
//! ```
//!
//! The ratio follows from a first run. With it, the second run is nearly always close enough, and
//! so is the first run at the next share.

use std::ops::RangeInclusive;

/// The least limit that is tried. With less, the program itself does not fit, and is killed.
const LIMIT_BYTES_MIN: u64 = 4 << 20;

/// How many runs there are for one share of a program, at most.
const RUNS_MAX: usize = 4;

/// The ratio before anything is known.
const RATIO_FIRST: f64 = 3.0;

/// Ratios outside of this are errors of the measurement. With a ratio of 1 no limit would be right.
const RATIOS: RangeInclusive<f64> = 1.05..=50.0;

/// The cost of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cost {
    pub(crate) limit_bytes: u64,
    pub(crate) zram_bytes_max: u64,
    /// The program did not survive.
    pub(crate) killed: bool,
}

impl Cost {
    pub(crate) fn total_bytes(&self) -> u64 {
        self.limit_bytes + self.zram_bytes_max
    }

    /// How far it is from `wanted_bytes`.
    fn distance(&self, wanted_bytes: u64) -> u64 {
        self.total_bytes().abs_diff(wanted_bytes)
    }
}

/// What is known about a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    data_bytes: f64,
    ratio: f64,
    last: Option<Cost>,
}

impl Model {
    /// A program that needs `need_bytes`.
    pub(crate) fn new(need_bytes: u64) -> Model {
        Model { data_bytes: as_f64(need_bytes), ratio: RATIO_FIRST, last: None }
    }

    /// The limit whose cost is `wanted_bytes`, by the rule.
    fn limit_bytes(&self, wanted_bytes: u64) -> u64 {
        let rest = self.data_bytes / self.ratio;
        let limit = (as_f64(wanted_bytes) - rest) / (1.0 - 1.0 / self.ratio);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        let limit = limit.max(0.0) as u64;
        limit.clamp(LIMIT_BYTES_MIN.min(wanted_bytes), wanted_bytes)
    }

    /// Learns from a run: the ratio, and from two runs also how much data there really is.
    fn learn(&mut self, cost: Cost) {
        if cost.killed {
            return;
        }
        let (limit, zram) = (as_f64(cost.limit_bytes), as_f64(cost.zram_bytes_max));
        let last = self.last.replace(cost);
        let apart = last.filter(|last| {
            as_f64(last.limit_bytes.abs_diff(cost.limit_bytes)) > self.data_bytes / 20.0
        });
        let slope = apart
            .map(|last| (limit - as_f64(last.limit_bytes)) / (as_f64(last.zram_bytes_max) - zram));
        match slope {
            Some(ratio) if RATIOS.contains(&ratio) => {
                self.ratio = ratio;
                self.data_bytes = limit + zram * ratio;
            }
            _ if zram > 0.0 => {
                let ratio = (self.data_bytes - limit) / zram;
                self.ratio = ratio.clamp(*RATIOS.start(), *RATIOS.end());
            }
            _ => {}
        }
    }
}

/// The search for one share of one program.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    model: &'a mut Model,
    wanted_bytes: u64,
    /// The limit is known to lie between these.
    low_bytes: u64,
    high_bytes: u64,
    tried: Vec<Cost>,
}

impl Search<'_> {
    /// Searches for the limit whose cost is `wanted_bytes`.
    pub(crate) fn new(model: &mut Model, wanted_bytes: u64) -> Search<'_> {
        let low_bytes = LIMIT_BYTES_MIN.min(wanted_bytes);
        Search { model, wanted_bytes, low_bytes, high_bytes: wanted_bytes, tried: Vec::new() }
    }

    /// Whether the cost of a run is as wanted: within a 50th.
    fn is_close(&self, cost: Cost) -> bool {
        cost.distance(self.wanted_bytes) <= self.wanted_bytes / 50
    }

    /// The limit to try next; `None` once the search is over.
    pub(crate) fn next(&self) -> Option<u64> {
        let Some(last) = self.tried.last() else {
            return Some(self.model.limit_bytes(self.wanted_bytes));
        };
        let stuck = self.high_bytes - self.low_bytes < self.wanted_bytes / 100;
        // It was killed although it cost more than wanted: with less it does not survive either.
        let hopeless = last.killed && last.total_bytes() > self.wanted_bytes;
        if self.is_close(*last) || stuck || hopeless || self.tried.len() == RUNS_MAX {
            return None;
        }
        let by_rule = self.model.limit_bytes(self.wanted_bytes);
        let untried = !self.tried.iter().any(|cost| cost.limit_bytes == by_rule);
        let useful =
            (self.low_bytes..self.high_bytes).contains(&by_rule) && untried && !last.killed;
        Some(if useful { by_rule } else { self.low_bytes.midpoint(self.high_bytes) })
    }

    /// Records a run with the limit of [`next`](Search::next).
    pub(crate) fn record(&mut self, cost: Cost) {
        if cost.total_bytes() > self.wanted_bytes {
            self.high_bytes = cost.limit_bytes;
        } else {
            self.low_bytes = cost.limit_bytes;
        }
        self.model.learn(cost);
        self.tried.push(cost);
    }

    /// Which run counts: of those that the program survived the one nearest to the wanted cost. If
    /// it survived none, the last one.
    pub(crate) fn best(&self) -> Option<usize> {
        let survived = (0..self.tried.len()).filter(|at| !self.tried[*at].killed);
        let nearest = survived.min_by_key(|at| self.tried[*at].distance(self.wanted_bytes));
        nearest.or(self.tried.len().checked_sub(1))
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of one machine are below 2^53")]
fn as_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::{Cost, LIMIT_BYTES_MIN, Model, RUNS_MAX, Search};

    const MIB: u64 = 1 << 20;

    /// A kernel whose data compresses by `percent / 100`, and does not survive below `least_bytes`.
    fn run(limit_bytes: u64, data_bytes: u64, percent: u64, least_bytes: u64) -> Cost {
        let zram_bytes_max = data_bytes.saturating_sub(limit_bytes) * 100 / percent;
        Cost { limit_bytes, zram_bytes_max, killed: limit_bytes < least_bytes }
    }

    /// Goal: the cost of the run that counts is within a 50th of what is wanted, wherever that is
    /// possible, after few runs. Method: kernels of many ratios, whose programs have a little more
    /// data than their need.
    #[test]
    fn the_cost_is_as_wanted_after_few_runs() {
        for percent in [130, 200, 300, 450, 900] {
            let (need, data) = (200 * MIB, 206 * MIB);
            let mut model = Model::new(need);
            for (nth, wanted) in [150 * MIB, 100 * MIB, 67 * MIB, 50 * MIB].into_iter().enumerate()
            {
                let mut search = Search::new(&mut model, wanted);
                while let Some(limit) = search.next() {
                    search.record(run(limit, data, percent, 0));
                }
                let best = search.tried[search.best().expect("it has run")];
                let least = run(LIMIT_BYTES_MIN, data, percent, 0).total_bytes();
                let text = format!("{percent} %, {wanted}: {:?}", search.tried);
                if least < wanted {
                    assert!(best.distance(wanted) <= wanted / 50, "{text}");
                } else {
                    assert!(best.limit_bytes < LIMIT_BYTES_MIN + wanted / 50, "{text}");
                }
                assert!(search.tried.len() <= if nth == 0 { RUNS_MAX } else { 2 }, "{text}");
            }
        }
    }

    /// A program that dies with less memory than wanted gets more; one that dies with as much as
    /// wanted has not survived.
    #[test]
    fn a_program_that_is_killed_gets_what_it_may_have() {
        let mut model = Model::new(200 * MIB);
        let mut search = Search::new(&mut model, 100 * MIB);
        while let Some(limit) = search.next() {
            search.record(run(limit, 200 * MIB, 1000, 85 * MIB));
        }
        let best = search.tried[search.best().expect("it has run")];
        assert!(!best.killed && best.limit_bytes >= 85 * MIB, "{:?}", search.tried);

        let mut search = Search::new(&mut model, 100 * MIB);
        while let Some(limit) = search.next() {
            search.record(run(limit, 200 * MIB, 300, 200 * MIB));
        }
        let best = search.tried[search.best().expect("it has run")];
        assert!(best.killed && search.tried.len() <= RUNS_MAX, "{:?}", search.tried);
    }

    #[test]
    fn nothing_has_run_before_the_first_run() {
        let mut model = Model::new(0);
        let search = Search::new(&mut model, 50 * MIB);
        assert_eq!(search.best(), None);
        assert_eq!(search.next(), Some(50 * MIB));
    }
}
