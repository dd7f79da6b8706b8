//! Which use of memory gets more of it: one rule for all of them.
//!
//! A limit is divided among several **uses** ([`Use`]): units that are resident, stored copies of these,
//! the staging area, units that were brought back before a fault. What a use is **worth** is the time
//! that it saved in some span, for each byte that it had ([`Worth`]). Memory moves to the use that is
//! worth most:
//!
//! - Two uses are compared in the same span. A difference of less than a quarter is noise
//!   ([`Worth::against`]).
//! - A use that can have any size gains or loses a quarter of its size at each review
//!   ([`Verdict::step`]). So it comes from any size to any other in a few reviews, and what one review
//!   did wrong the next one undoes.
//! - A use that is either on or off changes only after several reviews in a row that agree; and each
//!   time that it is switched on, it takes more of them to switch it off again ([`Switch`]).
//!
//! The worth of a use is the mean over its bytes, not that of its last byte: what one more byte would
//! save is less, and cannot be seen without trying.
//!
//! # Invariants
//!
//! - `ECON-1` A comparison depends on the two ratios alone: both spans may be multiplied by the same
//!   number, and the order of the two sides does not matter.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// What memory is used for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Use {
    /// Units that are mapped in the program.
    Resident,
    /// Stored copies of units that are resident again.
    Copies,
    /// Units that left the program, and are not compressed yet.
    Staging,
    /// Units that were brought back before a fault, and are not used yet.
    Prefetch,
    /// The pool memory that the denser of two codecs saves.
    DenseCodec,
    /// What is on the disk: no memory, but what the program pays to have that memory for others.
    Disk,
}

impl Use {
    /// All uses, in the order in which they are shown.
    pub const ALL: [Use; 6] =
        [Use::Resident, Use::Copies, Use::Staging, Use::Prefetch, Use::DenseCodec, Use::Disk];

    /// The name in tables and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Use::Resident => "resident",
            Use::Copies => "copies",
            Use::Staging => "staging",
            Use::Prefetch => "prefetch",
            Use::DenseCodec => "dense_codec",
            Use::Disk => "disk",
        }
    }

    /// What the memory of this use is.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Use::Resident => "Managed memory that is mapped in the program.",
            Use::Copies => "Stored copies of units that are resident again.",
            Use::Staging => "Unmapped but not yet compressed, and free staging pages.",
            Use::Prefetch => "Brought back ahead of walks through memory, and not reached yet.",
            Use::DenseCodec => "What zstd takes less in the pool than lz4, whichever is in use.",
            Use::Disk => "What is on disk; the price is what reading it again costs.",
        }
    }
}

/// What a use saved in a span: so much time, with so many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Worth {
    /// The time that the program would have waited, or the engine worked, without these bytes.
    pub saved_ns: u64,
    /// The bytes.
    pub bytes: u64,
}

/// The result of a comparison of two uses, for the first of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is worth more than the other.
    Grow,
    /// They are worth the same, within the noise.
    Keep,
    /// It is worth less.
    Shrink,
}

impl Worth {
    /// Compares what a byte of this use saved with what a byte of the `other` did.
    #[must_use]
    pub fn against(self, other: Worth) -> Verdict {
        // Both sides are multiplied by the bytes of both.
        let this = u128::from(self.saved_ns) * u128::from(other.bytes);
        let that = u128::from(other.saved_ns) * u128::from(self.bytes);
        if 4 * this > 5 * that {
            Verdict::Grow
        } else if 4 * that > 5 * this {
            Verdict::Shrink
        } else {
            Verdict::Keep
        }
    }
}

impl Verdict {
    /// The next size of a use that has `size` at most, and `held` of that.
    #[must_use]
    pub fn step(self, size: usize, held: usize) -> usize {
        let held = held.min(size);
        match self {
            Verdict::Grow => size.saturating_add(held / 4 + 1),
            Verdict::Keep => size,
            Verdict::Shrink => held - held / 4,
        }
    }
}

/// How many reviews in a row must agree, at least.
pub const REVIEWS: u32 = 4;

/// What a switch costs while it is off is known only when it is off. Each time that it is switched on, so
/// many times more reviews are needed before that is tried again...
const PATIENCE_FACTOR: u32 = 4;

/// ...up to this many.
const REVIEWS_MAX: u32 = 256;

/// A use that is either on or off; off at first.
///
/// The words are atomics: a vote that is lost to a race between two reviews only delays a change.
#[derive(Debug)]
pub struct Switch {
    is_on: AtomicBool,
    /// Reviews in a row that found that the other state is better.
    votes: AtomicU32,
    /// So many of them are needed to switch it off.
    patience: AtomicU32,
}

impl Default for Switch {
    fn default() -> Switch {
        let (votes, patience) = (AtomicU32::new(0), AtomicU32::new(REVIEWS));
        Switch { is_on: AtomicBool::new(false), votes, patience }
    }
}

impl Switch {
    /// Whether it is on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Whether a verdict on it is that it should be on: within the noise it stays as it is.
    #[must_use]
    pub fn wants_on(&self, verdict: Verdict) -> bool {
        match verdict {
            Verdict::Grow => true,
            Verdict::Keep => self.is_on(),
            Verdict::Shrink => false,
        }
    }

    /// Notes that a review found that it should be on, or off. True: enough reviews in a row did, and it
    /// should be [`set`](Switch::set). To switch it on takes `reviews` of them, and [`REVIEWS`] at least.
    #[must_use]
    pub fn vote(&self, on: bool, reviews: u64) -> bool {
        if on == self.is_on() {
            self.votes.store(0, Relaxed);
            return false;
        }
        let votes = self.votes.fetch_add(1, Relaxed) + 1;
        let needed = match on {
            true => reviews.max(REVIEWS.into()),
            false => self.patience.load(Relaxed).into(),
        };
        u64::from(votes) >= needed
    }

    /// Switches it on or off, whatever the votes.
    pub fn set(&self, on: bool) {
        self.votes.store(0, Relaxed);
        let was_on = self.is_on.swap(on, Relaxed);
        if on && !was_on {
            let patience = self.patience.load(Relaxed) * PATIENCE_FACTOR;
            self.patience.store(patience.min(REVIEWS_MAX), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{REVIEWS, REVIEWS_MAX, Switch, Use, Verdict, Worth};
    use crate::testing::{Random, seed};

    fn worth(saved_ns: u64, bytes: u64) -> Worth {
        Worth { saved_ns, bytes }
    }

    /// Goal: only a change makes the way back longer.
    #[test]
    fn what_is_on_already_is_as_easy_to_switch_off() {
        let needed = |times: u32| {
            let switch = Switch::default();
            (0..times).for_each(|_| switch.set(true));
            (1..).find(|_| switch.vote(false, 0)).expect("at some time")
        };
        assert_eq!(needed(1), needed(5));
    }

    /// Goal: uses are compared by the byte, and a quarter is noise, by figures that can be checked by hand.
    #[test]
    fn more_time_by_the_byte_grows() {
        let other = worth(100, 10);
        assert_eq!(worth(100, 10).against(other), Verdict::Keep);
        assert_eq!(worth(125, 10).against(other), Verdict::Keep, "a quarter more");
        assert_eq!(worth(126, 10).against(other), Verdict::Grow);
        assert_eq!(worth(80, 10).against(other), Verdict::Keep, "a fifth less");
        assert_eq!(worth(79, 10).against(other), Verdict::Shrink);
        assert_eq!(worth(100, 5).against(other), Verdict::Grow, "with half of the bytes");
        assert_eq!(worth(0, 5).against(worth(0, 7)), Verdict::Keep, "neither saves anything");
        assert_eq!(worth(0, 0).against(worth(1, 7)), Verdict::Keep, "nothing is known");
    }

    /// Goal: `ECON-1`. Method: random worths, as they are, exchanged, and in a longer span.
    #[test]
    fn a_comparison_depends_on_the_ratios_alone() {
        let seed = seed();
        let mut random = Random::new(seed);
        for round in 0..100_000 {
            let mut any = || worth(random.below_u64(1 << 20), 1 + random.below_u64(1 << 40));
            let (one, other) = (any(), any());
            let verdict = one.against(other);
            let exchanged = match other.against(one) {
                Verdict::Grow => Verdict::Shrink,
                Verdict::Keep => Verdict::Keep,
                Verdict::Shrink => Verdict::Grow,
            };
            let times = 1 + random.below_u64(1 << 10);
            let longer = |worth: Worth| Worth { saved_ns: worth.saved_ns * times, ..worth };
            let context = format!("seed {seed}, round {round}: {one:?} {other:?} {times}");
            assert_eq!(verdict, exchanged, "{context}");
            assert_eq!(verdict, longer(one).against(longer(other)), "{context}");
        }
    }

    /// Goal: a size comes from any place to any other in few steps, and stays above 0.
    #[test]
    fn a_size_moves_by_a_quarter() {
        assert_eq!(Verdict::Grow.step(1000, 1000), 1251);
        assert_eq!(Verdict::Keep.step(1000, 10), 1000);
        assert_eq!(Verdict::Shrink.step(1000, 1000), 750);
        assert_eq!(Verdict::Shrink.step(usize::MAX, 400), 300, "what is held counts");
        assert_eq!(Verdict::Grow.step(usize::MAX, 400), usize::MAX);
        assert_eq!(Verdict::Shrink.step(1, 1), 1);
        let steps = |verdict: Verdict, from: usize, to: usize| {
            let (mut size, mut steps) = (from, 0);
            while (verdict == Verdict::Grow) == (size < to) {
                size = verdict.step(size, size);
                steps += 1;
            }
            steps
        };
        assert!(steps(Verdict::Grow, 1, 1 << 20) < 64);
        assert!(steps(Verdict::Shrink, 1 << 20, 64) < 40);
    }

    /// Goal: one review changes nothing, several in a row do; and what was switched off in vain is switched
    /// off later the next time.
    #[test]
    fn several_reviews_in_a_row_switch() {
        let switch = Switch::default();
        let vote = |on, times| (0..times).any(|_| switch.vote(on, 0));
        assert!(!vote(true, REVIEWS - 1) && !vote(false, 1) && !vote(true, REVIEWS - 1));
        assert!(switch.vote(true, 0));
        switch.set(true);
        for factor in [4, 16, 64] {
            assert!(!vote(false, factor * REVIEWS - 1), "{factor}");
            assert!(switch.vote(false, 0), "{factor}");
            switch.set(false);
            switch.set(true);
        }
        assert!(!vote(false, REVIEWS_MAX - 1) && switch.vote(false, 0), "not later than that");
    }

    /// Goal: a change that costs much needs more reviews.
    #[test]
    fn so_many_reviews_as_are_asked_for() {
        let switch = Switch::default();
        assert!(!(0..99).any(|_| switch.vote(true, 100)) && switch.vote(true, 100));
    }

    /// Goal: a difference that is noise switches nothing.
    #[test]
    fn within_the_noise_a_switch_stays() {
        let switch = Switch::default();
        let wants = |verdict| switch.wants_on(verdict);
        let all = [Verdict::Grow, Verdict::Keep, Verdict::Shrink];
        assert_eq!(all.map(wants), [true, false, false]);
        switch.set(true);
        assert_eq!(all.map(wants), [true, true, false]);
    }

    #[test]
    fn names_differ() {
        for (at, one) in Use::ALL.into_iter().enumerate() {
            assert_eq!(one as usize, at, "they are indexes");
            assert!(!one.meaning().is_empty());
            assert!(Use::ALL.into_iter().filter(|other| other.name() == one.name()).count() == 1);
        }
    }
}
