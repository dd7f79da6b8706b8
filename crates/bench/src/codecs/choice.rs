//! Selects the settings that are worth having, and three to start with.

use super::measure::Measured;

/// The Pareto front, and the recommended settings.
#[derive(Debug)]
pub(crate) struct Choice {
    best: Vec<bool>,
    fastest: usize,
    smallest: usize,
    balanced: usize,
}

impl Choice {
    /// The choice among `rows`, of which there is at least one.
    pub(crate) fn of(rows: &[Measured]) -> Choice {
        let points: Vec<(f64, f64)> = rows.iter().map(|row| (row.both_mb_s(), row.ratio)).collect();
        Choice::of_points(&points)
    }

    /// The choice among pairs of speed and ratio.
    fn of_points(points: &[(f64, f64)]) -> Choice {
        let beaten = |(speed, ratio): (f64, f64)| {
            points.iter().any(|&(other_speed, other_ratio)| {
                (other_speed > speed && other_ratio >= ratio)
                    || (other_speed >= speed && other_ratio > ratio)
            })
        };
        let best: Vec<bool> = points.iter().map(|point| !beaten(*point)).collect();
        let most = |value: &dyn Fn(f64, f64) -> f64| {
            let front = (0..points.len()).filter(|index| best[*index]);
            let by = |index: &usize| value(points[*index].0, points[*index].1);
            front.max_by(|one, other| by(one).total_cmp(&by(other))).unwrap_or(0)
        };
        let (fastest, smallest) = (most(&|speed, _| speed), most(&|_, ratio| ratio));
        // The setting nearest to both maxima, each on a logarithmic scale between the two ends of
        // the front.
        let share = |value: f64, low: f64, high: f64| (value / low).ln() / (high / low).ln();
        let (fast, small) = (points[fastest], points[smallest]);
        let balance = |speed: f64, ratio: f64| {
            share(speed, small.0, fast.0).min(1.0) + share(ratio, fast.1, small.1).min(1.0)
        };
        let balanced = if fastest == smallest { fastest } else { most(&balance) };
        Choice { best, fastest, smallest, balanced }
    }

    /// Whether no other row is both faster and smaller.
    pub(crate) fn is_best(&self, index: usize) -> bool {
        self.best[index]
    }

    /// The recommended settings: a word for each, and its row.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, usize)> {
        [("fastest", self.fastest), ("balanced", self.balanced), ("smallest", self.smallest)]
            .into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::Choice;

    #[test]
    fn the_front_has_what_nothing_beats() {
        let points =
            [(100.0, 2.0), (90.0, 3.0), (80.0, 2.5), (10.0, 3.2), (100.0, 1.9), (5.0, 3.2)];
        let choice = Choice::of_points(&points);
        assert_eq!(choice.best, [true, true, false, true, false, false]);
        assert_eq!((choice.fastest, choice.balanced, choice.smallest), (0, 1, 3));
        let one = Choice::of_points(&points[..1]);
        assert_eq!((one.fastest, one.balanced, one.smallest), (0, 0, 0));
    }
}
