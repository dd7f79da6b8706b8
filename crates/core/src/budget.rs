//! A budget for writes to a disk: so many bytes in a period, or in a whole run.
//!
//! A [`Bucket`] starts full, is filled at the rate of its budget, and never holds more than the budget. What was begun
//! is taken from the bucket right after, so one write may leave it below empty. Once it is empty nothing is written
//! until a share of the budget is there again: else a small rate would be spent a few bytes at a time, each with a
//! transfer of its own.
//!
//! # Invariants
//!
//! - `BUDGET-1` In any time `t` no more is taken than the budget, plus what the rate fills in `t`, plus what each who
//!   shares the bucket begins between its look at an almost empty one and its taking: one write.
//! - `BUDGET-2` All bytes zero is a valid bucket: one without a budget, which is never empty.
//!
//! # Concurrency
//!
//! Atomic words, no lock: a bucket lies in memory that the processes of a run share, and the holder of a lock there may
//! be killed. Time is taken first and added to the level afterwards, so whoever is killed in between loses budget, and
//! never makes some. The numbers are `Relaxed`, since each step decides by one word alone; but whoever sees a budget
//! sees its level too. Who fills while another budget is set may add what has come to the budget before.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicI64, AtomicU64};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicI64, AtomicU64};

use crate::ledger::signed;
use crate::size;

/// The smallest budget: one slot of a disk.
const BYTES_MIN: u64 = 4096;

/// The largest: a budget and its period share a word.
const BYTES_MAX: u64 = 1 << 60;

/// An empty bucket is written from again once it holds a 1024th of its budget, or 128 KiB if that is more: at 10 GiB a
/// day that is 10 MiB, which take 84 s.
const RESUME_SHARE: u64 = 1024;
const RESUME_BYTES_MIN: u64 = 128 << 10;

/// In what time a budget is filled again.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(u8)]
pub enum Period {
    /// Never: the budget is for the whole run.
    #[default]
    Run,
    /// A second.
    Second,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
    /// A day.
    Day,
}

impl Period {
    const ALL: [Period; 5] =
        [Period::Run, Period::Second, Period::Minute, Period::Hour, Period::Day];

    /// As people write it, behind a `/`.
    fn name(self) -> &'static str {
        match self {
            Period::Run => "",
            Period::Second => "s",
            Period::Minute => "min",
            Period::Hour => "h",
            Period::Day => "day",
        }
    }

    /// Its length; 0 for a whole run.
    #[must_use]
    pub fn seconds(self) -> u64 {
        match self {
            Period::Run => 0,
            Period::Second => 1,
            Period::Minute => 60,
            Period::Hour => 60 * 60,
            Period::Day => 24 * 60 * 60,
        }
    }
}

/// What may be written, and in what time; or any amount, which is the default.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WriteBudget {
    /// 0: any amount.
    bytes: u64,
    period: Period,
}

impl WriteBudget {
    /// Any amount may be written.
    pub const NONE: WriteBudget = WriteBudget { bytes: 0, period: Period::Run };

    /// How [`WriteBudget::NONE`] is written.
    const NONE_NAME: &str = "none";

    /// So many bytes in a period. `None`: less than a slot of a disk, or too much.
    #[must_use]
    pub fn new(bytes: u64, period: Period) -> Option<WriteBudget> {
        (BYTES_MIN..=BYTES_MAX).contains(&bytes).then_some(WriteBudget { bytes, period })
    }

    /// Whether any amount may be written.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.bytes == 0
    }

    /// What may be written in a period; 0: any amount.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The period.
    #[must_use]
    pub fn period(self) -> Period {
        self.period
    }

    /// The budget as one word; [`WriteBudget::NONE`] is 0.
    #[must_use]
    pub fn to_word(self) -> u64 {
        self.bytes << 3 | self.period as u64
    }

    /// The budget of a word; a word of no budget is that of none.
    #[must_use]
    pub fn from_word(word: u64) -> WriteBudget {
        let period = Period::ALL.into_iter().find(|period| *period as u64 == word & 0b111);
        period.and_then(|period| WriteBudget::new(word >> 3, period)).unwrap_or(WriteBudget::NONE)
    }

    /// The word of an `_asked` word that asks for this budget: 0 asks for nothing.
    #[must_use]
    pub fn to_asked(self) -> u64 {
        self.to_word() + 1
    }

    /// The budget that an `_asked` word asks for. `None`: nobody asked.
    #[must_use]
    pub fn from_asked(word: u64) -> Option<WriteBudget> {
        word.checked_sub(1).map(WriteBudget::from_word)
    }

    /// As [`WriteBudget::from_str`] reads it back to the byte.
    #[must_use]
    pub fn exact(self) -> String {
        self.text(self.bytes.to_string())
    }

    fn text(self, bytes: String) -> String {
        match self.period {
            _ if self.is_none() => Self::NONE_NAME.to_owned(),
            Period::Run => bytes,
            period => format!("{bytes}/{}", period.name()),
        }
    }
}

const _: () = assert!(BYTES_MAX << 3 >> 3 == BYTES_MAX && Period::Day as u64 <= 0b111);

/// For people: `10G/day`.
impl fmt::Display for WriteBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(size::display(self.bytes)))
    }
}

impl FromStr for WriteBudget {
    type Err = String;

    /// Reads `10G/day`, `1G`, `none`.
    ///
    /// # Errors
    ///
    /// A message: what was given, and what is accepted.
    fn from_str(given: &str) -> Result<WriteBudget, String> {
        let refused = || {
            format!(
                "'{given}' is not a budget; accepted: a size of 4K or more, for the whole run or with \
                 /s, /min, /h or /day, as in 10G/day; or none"
            )
        };
        if given == Self::NONE_NAME {
            return Ok(WriteBudget::NONE);
        }
        let (bytes, period) = match given.split_once('/') {
            None => (given, Some(Period::Run)),
            Some((bytes, name)) => {
                (bytes, Period::ALL[1..].iter().copied().find(|period| period.name() == name))
            }
        };
        let bytes = size::parse(bytes).map_err(|_| refused())?;
        period.and_then(|period| WriteBudget::new(bytes, period)).ok_or_else(refused)
    }
}

/// What is left of a budget. See the module.
#[repr(C)]
#[derive(Default, Debug)]
pub struct Bucket {
    budget: AtomicU64,
    level_bytes: AtomicI64,
    /// Up to this time it was filled.
    filled_ns: AtomicU64,
    /// Twice how often it was used up, less 1 while it is.
    used_up: AtomicU64,
}

impl Bucket {
    /// Makes the bucket as one that was never set. No other thread uses it meanwhile.
    pub fn clear(&self) {
        self.budget.store(0, Relaxed);
        self.level_bytes.store(0, Relaxed);
        self.filled_ns.store(0, Relaxed);
        self.used_up.store(0, Relaxed);
    }

    /// From now on this budget, of which nothing is used. One thread at a time calls it.
    pub fn set(&self, budget: WriteBudget) {
        // Not a store, which the model of `make loom` may put before a later step of fill().
        self.level_bytes.swap(signed(budget.bytes), Relaxed);
        // Release: pairs with the Acquire in budget().
        self.budget.store(budget.to_word(), Release);
        // The count stays; if the budget before is used up now, that is over. Whoever looks may see that first.
        let seen = self.used_up.load(Relaxed);
        if seen % 2 == 1 {
            self.used_up.compare_exchange(seen, seen + 1, Relaxed, Relaxed).ok();
        }
    }

    /// The first two words of a bucket, for whoever sets another budget by writing into the file that it lies in. The
    /// other two stay: the next look fills the bucket, up to its new size, and sees that it is not used up.
    #[must_use]
    pub fn words(budget: WriteBudget) -> [u64; 2] {
        [budget.to_word(), budget.bytes]
    }

    /// The budget.
    #[must_use]
    pub fn budget(&self) -> WriteBudget {
        // Acquire: pairs with the Release in set().
        WriteBudget::from_word(self.budget.load(Acquire))
    }

    /// How often it was used up.
    #[must_use]
    pub fn used_up(&self) -> u64 {
        self.used_up.load(Relaxed).div_ceil(2)
    }

    /// Takes bytes that were written, or are being written.
    pub fn take(&self, bytes: u64) {
        if bytes > 0 {
            self.level_bytes.fetch_sub(signed(bytes), Relaxed);
        }
    }

    /// Puts bytes back that were taken and are not written after all.
    pub fn give_back(&self, bytes: u64) {
        if bytes > 0 {
            let (bytes, full) = (signed(bytes), signed(self.budget().bytes));
            // Another budget, which is full, may have been set since they were taken.
            let more = |level: i64| Some(level.saturating_add(bytes).min(full).max(level));
            // The function above always has a result.
            self.level_bytes.fetch_update(Relaxed, Relaxed, more).ok();
        }
    }

    /// Adds what has come since it was last filled.
    fn fill(&self, budget: WriteBudget, now_ns: u64) {
        let period_ns = u128::from(budget.period.seconds()) * 1_000_000_000;
        let then = self.filled_ns.load(Relaxed);
        let passed = u128::from(now_ns.saturating_sub(then)).min(period_ns);
        let size = u128::from(budget.bytes);
        // At most the budget, since at most a period counts. In a whole run nothing comes.
        let bytes = (passed * size).checked_div(period_ns).unwrap_or(0);
        if bytes == 0 {
            return;
        }
        // The time that these bytes took, rounded up. What comes to a full bucket is lost.
        let took = u64::try_from((bytes * period_ns).div_ceil(size)).unwrap_or(u64::MAX);
        let until = if passed == period_ns { now_ns } else { then + took };
        if self.filled_ns.compare_exchange(then, until, Relaxed, Relaxed).is_err() {
            return;
        }
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let full = signed(budget.bytes);
        // It is fuller than its budget only if another, larger one was set meanwhile.
        let more = |level: i64| Some(level.saturating_add(bytes).min(full).max(level));
        // The function above always has a result.
        self.level_bytes.fetch_update(Relaxed, Relaxed, more).ok();
    }

    /// What may be written now, if the caller has `pending_bytes` under way, which are not taken yet. Calls
    /// `was_used_up` if the bucket is empty and was not at the last look of any process.
    pub fn left(&self, pending_bytes: u64, now_ns: u64, was_used_up: impl FnOnce()) -> u64 {
        let budget = self.budget();
        if budget.is_none() {
            return u64::MAX;
        }
        self.fill(budget, now_ns);
        let left = self.level_bytes.load(Relaxed) - signed(pending_bytes);
        let left = u64::try_from(left).unwrap_or(0);
        let seen = self.used_up.load(Relaxed);
        let is_used_up = seen % 2 == 1;
        let resume = (budget.bytes / RESUME_SHARE).max(RESUME_BYTES_MIN).min(budget.bytes);
        let changes = if is_used_up { left >= resume } else { left == 0 };
        if changes && self.used_up.compare_exchange(seen, seen + 1, Relaxed, Relaxed).is_ok() {
            if !is_used_up {
                was_used_up();
            }
            return left;
        }
        if is_used_up { 0 } else { left }
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::{Bucket, Period, WriteBudget};
    use crate::testing::{Random, seed};

    const SECOND_NS: u64 = 1_000_000_000;

    fn budget(text: &str) -> WriteBudget {
        text.parse().unwrap_or_else(|why| panic!("{why}"))
    }

    /// Goal: a bucket that is cleared keeps nothing: budget, level, time and count.
    #[test]
    fn a_bucket_that_is_cleared_is_as_new() {
        let (bucket, mut times) = (Bucket::default(), 0);
        bucket.set(budget("1M/s"));
        bucket.take(2 << 20);
        assert_eq!(bucket.left(0, 3 * SECOND_NS, || times += 1), 0);
        assert_eq!((times, bucket.used_up()), (1, 1));
        bucket.clear();
        assert_eq!(format!("{bucket:?}"), format!("{:?}", Bucket::default()));
    }

    #[test]
    fn a_budget_is_read_as_it_is_written() {
        for text in ["10G/day", "1M/s", "512K/min", "3G/h", "1G", "none"] {
            let budget = budget(text);
            assert_eq!(budget.to_string(), text);
            assert_eq!(budget.exact().parse(), Ok(budget));
            assert_eq!(WriteBudget::from_word(budget.to_word()), budget);
            assert_eq!(WriteBudget::from_asked(budget.to_asked()), Some(budget));
        }
        assert_eq!((budget("2G/h").bytes(), budget("2G/h").period()), (2 << 30, Period::Hour));
        assert!(budget("none").is_none() && WriteBudget::from_asked(0).is_none());
        for wrong in
            ["", "10G/week", "10G/", "/day", "0", "1K/s", "lots", "1G/day/day", "10 G/ day"]
        {
            let why = wrong.parse::<WriteBudget>().expect_err(wrong);
            assert!(why.starts_with(&format!("'{wrong}' is not a budget; accepted:")), "{why}");
        }
    }

    /// Goal: a bucket starts full, is empty when all was taken, and is used again once some has come.
    #[test]
    fn what_is_used_up_comes_back_at_the_rate() {
        let (bucket, mut used_up) = (Bucket::default(), 0);
        let now = 7 * SECOND_NS;
        assert_eq!(bucket.left(1 << 40, now, || ()), u64::MAX, "BUDGET-2");
        bucket.set(budget("16M/s"));
        assert_eq!(bucket.left(0, now, || ()), 16 << 20);
        assert_eq!(bucket.left(4 << 20, now, || ()), 12 << 20, "what is under way counts");
        bucket.take(17 << 20);
        for _ in 0..3 {
            assert_eq!(bucket.left(0, now, || used_up += 1), 0);
        }
        assert_eq!((used_up, bucket.used_up()), (1, 1));
        // After 1/16 s the debt is paid.
        assert_eq!(bucket.left(0, now + SECOND_NS / 16 + SECOND_NS / 1000, || used_up += 1), 0);
        let left = bucket.left(0, now + SECOND_NS / 8, || used_up += 1);
        assert!((1 << 20) - left < 16, "{left}");
        assert_eq!(bucket.left(0, now + 100 * SECOND_NS, || ()), 16 << 20, "never more");
        bucket.take(16 << 20);
        assert_eq!(bucket.left(0, now + 100 * SECOND_NS, || used_up += 1), 0);
        assert_eq!((used_up, bucket.used_up()), (2, 2));
        bucket.set(budget("1M"));
        assert_eq!(bucket.left(0, now, || ()), 1 << 20, "another budget is full");
        bucket.take(1 << 20);
        assert_eq!(bucket.left(0, now + 1_000_000 * SECOND_NS, || ()), 0, "it was for the run");
    }

    /// Goal: what is given back can be written again, and makes no bucket fuller than its budget.
    #[test]
    fn what_is_not_written_is_given_back() {
        let bucket = Bucket::default();
        bucket.set(budget("16M"));
        bucket.take(3 << 20);
        bucket.give_back(1 << 20);
        assert_eq!(bucket.left(0, 0, || ()), 14 << 20);
        bucket.set(budget("4M"));
        bucket.give_back(2 << 20);
        assert_eq!(bucket.left(0, 0, || ()), 4 << 20);
    }

    /// Goal: `BUDGET-1`. Method: random pauses and writes, against the sum that the rate allows.
    #[test]
    fn no_more_is_written_than_the_rate_allows() {
        let seed = seed();
        let mut random = Random::new(seed);
        for text in ["1M/s", "64K/min", "10G/day", "300M/h"] {
            let (bucket, budget) = (Bucket::default(), budget(text));
            bucket.set(budget);
            let begin = random.below(1 << 40) as u64;
            let (mut now, mut written, mut most) = (begin, 0_u64, 0);
            for _ in 0..5_000 {
                now += random.below_u64(budget.period().seconds() * 1_000_000);
                if bucket.left(0, now, || ()) > 0 {
                    let bytes = random.below(200_000) as u64;
                    bucket.take(bytes);
                    (written, most) = (written + bytes, most.max(bytes));
                }
                let period_ns = u128::from(budget.period().seconds()) * u128::from(SECOND_NS);
                let came = u128::from(now - begin) * u128::from(budget.bytes()) / period_ns;
                let allowed = u128::from(budget.bytes() + most) + came;
                assert!(
                    u128::from(written) <= allowed,
                    "seed {seed}, {text}: {written} of {allowed}"
                );
            }
            // At most what cannot be written at the end, or was lost to roundings, is less.
            let period_ns = u128::from(budget.period().seconds()) * u128::from(SECOND_NS);
            let came = u128::from(now - begin) * u128::from(budget.bytes()) / period_ns;
            let used = u128::from(budget.bytes()).min(came) / 2;
            assert!(
                u128::from(written) >= used.min(100_000_000),
                "seed {seed}, {text}: {written} of {came}"
            );
        }
    }
}
