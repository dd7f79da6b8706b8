//! The results: slowdowns, their means, and which programs are far above the mean.

use std::fmt;

use zfolio_core::zcomp::{ALGORITHM_DEFAULT, Choice};

use super::run::{Alone, End, Run};
use super::share::Share;
use super::workload::Program;
use crate::compare::outcome::median;
use crate::compare::setting::Compression;
use crate::kernel::KernelSetting;

/// How many times the mean a program's slowdown should not exceed.
pub(crate) const TIMES_MEAN_MAX: f64 = 2.0;

/// How a program's memory is limited.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// By `zfolio run`; `None`: with its default compression.
    Run(Option<Compression>),
    /// By a memory cgroup, with zram swap.
    Kernel(KernelSetting),
}

impl Way {
    /// Whether zfolio chooses the codec itself.
    pub(crate) fn is_auto(&self) -> bool {
        match self {
            Way::Run(None) => ALGORITHM_DEFAULT == Choice::AUTO,
            Way::Run(Some(compression)) => compression.algorithm == Choice::AUTO,
            Way::Kernel(_) => false,
        }
    }

    /// Whether zfolio uses one codec throughout.
    pub(crate) fn is_fixed(&self) -> bool {
        matches!(self, Way::Run(_)) && !self.is_auto()
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Run(None) => f.write_str("run"),
            Way::Run(Some(compression)) => write!(f, "run {compression}"),
            Way::Kernel(setting) => setting.fmt(f),
        }
    }
}

/// The runs of a program in one way with one share of its need.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) share: Share,
    pub(crate) limit_bytes: u64,
    pub(crate) runs: Vec<Run>,
    /// It was not run, because it took too long with this larger share.
    pub(crate) late_before: Option<Share>,
    /// It was not run, because `zfolio run` accepts no limit that low.
    pub(crate) limit_too_low: bool,
}

/// What became of a program.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Slowdown {
    /// The median of its times, divided by that alone.
    Times(f64),
    /// More than that: it was ended.
    Above(f64),
    /// The kernel killed it.
    Killed,
    /// It failed, or its output was wrong.
    Failed,
    /// It was not run.
    Absent,
}

impl Slowdown {
    /// The number, and whether it is only a lower bound.
    pub(crate) fn number(self) -> Option<(f64, bool)> {
        match self {
            Slowdown::Times(times) => Some((times, false)),
            Slowdown::Above(times) => Some((times, true)),
            Slowdown::Killed | Slowdown::Failed | Slowdown::Absent => None,
        }
    }
}

impl fmt::Display for Slowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Slowdown::Times(times) => f.write_str(&number(*times)),
            Slowdown::Above(times) => write!(f, "> {}", number(*times)),
            Slowdown::Killed => f.write_str("killed"),
            Slowdown::Failed => f.write_str("FAILED"),
            Slowdown::Absent => f.write_str("-"),
        }
    }
}

/// A number of times, with three digits or so.
pub(crate) fn number(times: f64) -> String {
    if times < 10.0 { format!("{times:.2}") } else { format!("{times:.0}") }
}

impl Cell {
    /// The slowdown of a program that takes `alone_seconds` alone, and may take `slowdown_max`
    /// times as long.
    pub(crate) fn slowdown(&self, alone_seconds: f64, slowdown_max: f64) -> Slowdown {
        let any = |wanted: fn(&End) -> bool| self.runs.iter().any(|run| wanted(&run.end));
        if any(|end| matches!(end, End::Failed(_))) {
            Slowdown::Failed
        } else if any(|end| *end == End::Killed) {
            Slowdown::Killed
        } else if any(|end| *end == End::Late) || self.late_before.is_some() {
            Slowdown::Above(slowdown_max)
        } else if self.runs.is_empty() {
            Slowdown::Absent
        } else {
            let seconds = self.runs.iter().map(|run| run.seconds).collect();
            Slowdown::Times(median(seconds) / alone_seconds)
        }
    }

    /// The run whose time is the median.
    pub(crate) fn typical(&self) -> Option<&Run> {
        let mut runs: Vec<&Run> = self.runs.iter().collect();
        runs.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        runs.get(runs.len().saturating_sub(1) / 2).copied()
    }
}

/// The cells of a program in one way.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) way: Way,
    pub(crate) cells: Vec<Cell>,
}

/// Everything about one program.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) program: Program,
    /// One for each round; not empty.
    pub(crate) alone: Vec<Alone>,
    pub(crate) slowdown_max: f64,
    /// One for each way, in the same order for all programs.
    pub(crate) rows: Vec<Row>,
}

impl Measured {
    pub(crate) fn alone_seconds(&self) -> f64 {
        median(self.alone.iter().map(|alone| alone.seconds).collect())
    }

    pub(crate) fn slowdown(&self, way: usize, share: usize) -> Slowdown {
        self.rows[way].cells[share].slowdown(self.alone_seconds(), self.slowdown_max)
    }

    /// The slowdown of the best fixed way, unless none came to an end.
    pub(crate) fn best_fixed(&self, share: usize) -> Option<f64> {
        let fixed = self.rows.iter().enumerate().filter(|(_, row)| row.way.is_fixed());
        let times = fixed.filter_map(|(way, _)| match self.slowdown(way, share) {
            Slowdown::Times(times) => Some(times),
            _ => None,
        });
        times.min_by(f64::total_cmp)
    }
}

/// The geometric mean of slowdowns.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Mean {
    pub(crate) times: f64,
    /// One of them is a lower bound, and so is the mean.
    pub(crate) at_least: bool,
    /// How many there are.
    pub(crate) programs: usize,
}

impl Mean {
    /// The mean over the programs that have a slowdown; `None` if none has.
    pub(crate) fn of(slowdowns: &[Slowdown]) -> Option<Mean> {
        let numbers: Vec<(f64, bool)> = slowdowns.iter().filter_map(|one| one.number()).collect();
        let programs = numbers.len();
        let count = u32::try_from(programs).ok().filter(|count| *count > 0)?;
        let sum: f64 = numbers.iter().map(|(times, _)| times.ln()).sum();
        let at_least = numbers.iter().any(|(_, at_least)| *at_least);
        Some(Mean { times: (sum / f64::from(count)).exp(), at_least, programs })
    }

    /// Whether a program is slowed down by more than twice the mean.
    pub(crate) fn is_far_below(&self, slowdown: Slowdown) -> bool {
        slowdown.number().is_some_and(|(times, _)| times > TIMES_MEAN_MAX * self.times)
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.at_least { "> " } else { "" }, number(self.times))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Alone, Cell, End, Mean, Measured, Row, Run, Slowdown, Way};
    use crate::programs::digest::Digest;
    use crate::programs::workload::Program;

    pub(crate) fn run(seconds: f64, end: End) -> Run {
        Run { end, seconds, cpu_seconds: seconds, peak_bytes: 0, figures: None, cost: None }
    }

    pub(crate) fn cell(runs: Vec<Run>) -> Cell {
        Cell {
            share: "1/2".parse().expect("well formed"),
            limit_bytes: 50 << 20,
            runs,
            late_before: None,
            limit_too_low: false,
        }
    }

    /// A program that takes 2 s alone, with these cells under `zfolio run`.
    pub(crate) fn measured(program: Program, cells: Vec<Cell>) -> Measured {
        let alone = Alone { seconds: 2.0, need_bytes: 100 << 20, output: Digest::default() };
        let rows = vec![Row { way: Way::Run(None), cells }];
        Measured { program, alone: vec![alone], slowdown_max: 30.0, rows }
    }

    #[test]
    fn a_slowdown_is_the_median_unless_a_run_ended_badly() {
        let done = |seconds| run(seconds, End::Done);
        let of = |runs| cell(runs).slowdown(2.0, 30.0);
        assert_eq!(of(vec![done(9.0), done(3.0), done(4.0)]), Slowdown::Times(2.0));
        assert_eq!(of(vec![done(3.0), run(70.0, End::Late)]), Slowdown::Above(30.0));
        assert_eq!(of(vec![run(70.0, End::Late), run(1.0, End::Killed)]), Slowdown::Killed);
        let failed = End::Failed("WRONG OUTPUT".to_owned());
        assert_eq!(of(vec![run(1.0, failed), done(3.0), run(1.0, End::Killed)]), Slowdown::Failed);
        assert_eq!(of(vec![]), Slowdown::Absent);
        let late = Cell { late_before: Some("3/4".parse().expect("a share")), ..cell(vec![]) };
        assert_eq!(late.slowdown(2.0, 30.0), Slowdown::Above(30.0));
        let typical = cell(vec![done(9.0), done(3.0), done(4.0)]);
        assert_eq!(typical.typical().map(|run| run.seconds), Some(4.0));
        assert_eq!(cell(vec![]).typical(), None);
        let program = measured(Program::Sort, vec![cell(vec![done(3.0)])]);
        assert_eq!(program.slowdown(0, 0), Slowdown::Times(1.5));
    }

    #[test]
    fn a_mean_is_geometric_and_may_be_a_lower_bound() {
        use Slowdown::{Above, Absent, Failed, Killed, Times};
        let mean = Mean::of(&[Times(2.0), Times(8.0), Killed, Absent, Failed]).expect("two");
        assert!((mean.times - 4.0).abs() < 1e-9 && !mean.at_least && mean.programs == 2);
        assert_eq!(mean.to_string(), "4.00");
        let bound = Mean::of(&[Times(1.0), Above(25.0)]).expect("two");
        assert_eq!(bound.to_string(), "> 5.00");
        assert_eq!(Mean::of(&[Killed]), None);
        assert!(mean.is_far_below(Times(8.1)) && !mean.is_far_below(Times(8.0)));
        assert!(mean.is_far_below(Above(30.0)) && !mean.is_far_below(Killed));
    }

    #[test]
    fn slowdowns_are_short() {
        let texts = [Slowdown::Times(1.234), Slowdown::Times(12.34), Slowdown::Above(30.0)]
            .map(|slowdown| slowdown.to_string());
        assert_eq!(texts, ["1.23", "12", "> 30"]);
    }
}
