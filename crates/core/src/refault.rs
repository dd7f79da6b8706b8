//! Refaults by distance: how much more memory would have kept what was wanted again.
//!
//! The **distance** of a refault is the number of bytes that were compressed between the moment at
//! which a unit left memory and the moment at which the program waited for it. If that many more
//! bytes had been resident, the unit would still have been there, and nobody would have waited: the
//! queue of resident memory would have reached back that much further. (The kernel decides in the
//! same way in `mm/workingset.c`.)
//!
//! So a histogram of the time waited, by distance, tells how long the same run would have waited at
//! a higher limit: [`Refaults::waiting_ns`].
//!
//! # Cost
//!
//! 512 bytes a process, and two additions for each fault that decompresses.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets of [`Refaults`]: half octaves of 1 MiB, up to 32 GiB and beyond.
pub const BUCKETS: usize = 32;

/// 1 MiB, the end of the first bucket.
const FIRST_BYTES: u64 = 1 << 20;

/// Faults on stored units, and the time waited for them, by distance.
///
/// Bucket `i` holds distances below 2^(i/2) MiB that are in no bucket before it; the last one holds
/// all that are longer, too.
#[repr(C)]
#[derive(Debug)]
pub struct Refaults {
    counts: [AtomicU64; BUCKETS],
    waited_ns: [AtomicU64; BUCKETS],
}

impl Default for Refaults {
    fn default() -> Self {
        let zeros = || [const { AtomicU64::new(0) }; BUCKETS];
        Refaults { counts: zeros(), waited_ns: zeros() }
    }
}

/// What was measured at one limit, beside the refaults: the ground that a guess about another limit
/// stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Measured {
    /// The limit at which the program ran.
    pub limit_bytes: u64,
    /// What the program would have held without a limit, at most.
    pub need_bytes: u64,
    /// What is stored, before compression.
    pub stored_bytes: u64,
    /// The same in the pool, everything included.
    pub pool_bytes: u64,
    /// Time waited for units that were moved back from the staging area.
    pub staged_wait_ns: u64,
    /// Time waited for anything else that was not decompressed: fresh memory, above all.
    pub other_wait_ns: u64,
}

/// A limit, and how long the run would have waited at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advice {
    /// The limit, a whole number of MiB.
    pub limit_bytes: u64,
    /// All threads together.
    pub waiting_ns: u64,
}

impl Refaults {
    /// The bucket of a distance.
    fn index(distance_bytes: u64) -> usize {
        let Some(octave) = (distance_bytes / FIRST_BYTES).checked_ilog2() else { return 0 };
        let index = (2 * octave as usize + 1).min(BUCKETS - 1);
        if distance_bytes < Self::end(index) { index } else { (index + 1).min(BUCKETS - 1) }
    }

    /// The distance that all of a bucket is below; nothing is above the last bucket.
    fn end(index: usize) -> u64 {
        if index >= BUCKETS - 1 {
            return u64::MAX;
        }
        let octave = FIRST_BYTES << (index / 2);
        // 181/128 = 1.4141, the square root of 2.
        if index % 2 == 0 { octave } else { octave / 128 * 181 }
    }

    /// Counts one fault that decompressed a unit and took `waited_ns`, after `distance_bytes` of other
    /// reclaim.
    pub fn add(&self, distance_bytes: u64, waited_ns: u64) {
        let index = Self::index(distance_bytes);
        self.counts[index].fetch_add(1, Relaxed);
        self.waited_ns[index].fetch_add(waited_ns, Relaxed);
    }

    /// Each bucket: the end of its distances (`u64::MAX` for the last), faults, nanoseconds waited.
    pub fn each(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let loaded = |cells: &[AtomicU64; BUCKETS], index: usize| cells[index].load(Relaxed);
        (0..BUCKETS).map(move |index| {
            (Self::end(index), loaded(&self.counts, index), loaded(&self.waited_ns, index))
        })
    }

    /// Time waited for units that were decompressed, at whatever distance.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.waited_at_least(0)
    }

    /// The same, for units whose distance may have been `gained` bytes and more.
    fn waited_at_least(&self, gained: u64) -> u64 {
        self.each().filter(|(end, ..)| *end > gained).map(|(.., waited)| waited).sum()
    }

    /// How long the run that was measured would have waited at `limit_bytes`, all threads together.
    ///
    /// A byte of limit gains more than one resident byte. With `L` the limit, `R` resident, `N` what
    /// the program needs, and everything that is not resident stored at `ratio` to 1:
    ///
    /// ```text
    /// L = R + (N - R) / ratio        so        dR / dL = 1 / (1 - 1 / ratio)
    /// ```
    ///
    /// for a unit that becomes resident leaves the pool. The guess is careful, so that the promise is
    /// kept rather than broken:
    ///
    /// - a resident byte is taken to cost a quarter of a byte of limit at least, whatever the ratio;
    /// - a unit counts as kept only if the longest distance of its bucket is gained;
    /// - waiting for staged units shrinks only as that for stored ones does, and waiting for fresh
    ///   memory not at all, until the limit is above the need (and a 16th: where reclaim begins). Then
    ///   nothing is compressed.
    ///
    /// It never rises with the limit. Below the limit of the measurement nothing is known but that the
    /// run would have waited at least as long.
    #[must_use]
    pub fn waiting_ns(&self, measured: &Measured, limit_bytes: u64) -> u64 {
        if limit_bytes > measured.limit_bytes && limit_bytes >= measured.ample_bytes() {
            return 0;
        }
        let gained = measured.resident_gained(limit_bytes.saturating_sub(measured.limit_bytes));
        let (all, left) = (self.waited_ns(), self.waited_at_least(gained));
        let staged = measured.staged_wait_ns;
        let staged_left = match u128::from(all) {
            0 => staged,
            all => u64::try_from(u128::from(staged) * u128::from(left) / all).unwrap_or(staged),
        };
        left + staged_left + measured.other_wait_ns
    }

    /// The lowest limit above the present one at which the run would have waited `most_ns` at most;
    /// `None` if it waited no longer than that as it was.
    #[must_use]
    pub fn advice(&self, measured: &Measured, most_ns: u64) -> Option<Advice> {
        let ample = measured.ample_bytes();
        let steps = (0..BUCKETS - 1).map(|index| measured.limit_gaining(Self::end(index)));
        let at = |limit: u64| Advice {
            limit_bytes: limit,
            waiting_ns: self.waiting_ns(measured, limit),
        };
        if at(measured.limit_bytes).waiting_ns <= most_ns || ample <= measured.limit_bytes {
            return None;
        }
        let steps = steps.take_while(|limit| *limit < ample).chain([ample]);
        steps.map(at).find(|advice| advice.waiting_ns <= most_ns)
    }
}

impl Measured {
    /// A limit that is never reached: the need, and the 16th of the limit at which reclaim begins.
    fn ample_bytes(&self) -> u64 {
        whole_mib(self.need_bytes.saturating_add(self.need_bytes / 15))
    }

    /// What a resident byte costs of the limit, in 256ths: `1 - 1 / ratio`, a quarter at least.
    fn cost(&self) -> u64 {
        let (stored, pool) = (self.stored_bytes.max(1), self.pool_bytes.min(self.stored_bytes));
        let saved = u128::from(stored - pool.min(stored)) * 256 / u128::from(stored);
        u64::try_from(saved).unwrap_or(256).clamp(64, 256)
    }

    /// Resident bytes that so many more bytes of limit make room for.
    fn resident_gained(&self, limit_bytes: u64) -> u64 {
        u64::try_from(u128::from(limit_bytes) * 256 / u128::from(self.cost())).unwrap_or(u64::MAX)
    }

    /// The limit that makes room for so many more resident bytes.
    fn limit_gaining(&self, resident_bytes: u64) -> u64 {
        let more = (u128::from(resident_bytes) * u128::from(self.cost())).div_ceil(256);
        whole_mib(self.limit_bytes.saturating_add(u64::try_from(more).unwrap_or(u64::MAX)))
    }
}

/// `bytes`, rounded up to whole MiB.
fn whole_mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20).saturating_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::{Advice, BUCKETS, Measured, Refaults};

    const MIB: u64 = 1 << 20;

    /// 64M of limit for a need of 256M, stored at 2 to 1.
    fn measured() -> Measured {
        Measured {
            limit_bytes: 64 * MIB,
            need_bytes: 256 * MIB,
            stored_bytes: 200 * MIB,
            pool_bytes: 100 * MIB,
            staged_wait_ns: 0,
            other_wait_ns: 0,
        }
    }

    #[test]
    fn a_distance_is_in_the_first_bucket_that_ends_above_it() {
        let ends: Vec<u64> = (0..BUCKETS).map(Refaults::end).collect();
        assert!(ends.is_sorted_by(|a, b| a < b) && ends[0] == MIB && ends[2] == 2 * MIB);
        let around = ends[..BUCKETS - 1].iter().flat_map(|end| [end - 1, *end, end + 1]);
        for distance in around.chain([0, 1, 64 << 30, u64::MAX]) {
            let expected = ends.iter().position(|end| distance < *end).unwrap_or(BUCKETS - 1);
            assert_eq!(Refaults::index(distance), expected, "{distance}");
        }
    }

    /// Goal: the formula. A loop over 256M at 64M with all of it coming back after 150M: at a ratio of
    /// 2 each resident byte costs half a byte, so that 181M of distance are gained with 90.5M.
    #[test]
    fn a_resident_byte_costs_what_the_pool_does_not_give_back() {
        let refaults = Refaults::default();
        (0..10).for_each(|_| refaults.add(150 * MIB, 1000));
        let waiting = |limit: u64| refaults.waiting_ns(&measured(), limit * MIB);
        assert_eq!((waiting(64), waiting(154), waiting(155)), (10_000, 10_000, 0));
        let advice = refaults.advice(&measured(), 999);
        assert_eq!(advice, Some(Advice { limit_bytes: 155 * MIB, waiting_ns: 0 }));
        assert_eq!(refaults.advice(&measured(), 10_000), None);
    }

    #[test]
    fn fresh_memory_is_waited_for_until_nothing_is_compressed() {
        let refaults = Refaults::default();
        refaults.add(3 * MIB, 500);
        refaults.add(u64::MAX, 500);
        let measured = Measured { staged_wait_ns: 100, other_wait_ns: 70, ..measured() };
        let waiting = |limit: u64| refaults.waiting_ns(&measured, limit * MIB);
        assert_eq!(waiting(64), 1170);
        assert_eq!(waiting(66), 620, "half of what was decompressed, and of what was staged");
        assert_eq!(waiting(272), 620, "256M and a 15th are 274M");
        assert_eq!(waiting(274), 0);
        assert_eq!(
            refaults.advice(&measured, 100).map(|advice| advice.limit_bytes / MIB),
            Some(274)
        );
    }

    #[test]
    fn nothing_is_promised_where_nothing_was_measured() {
        let refaults = Refaults::default();
        let nothing = Measured::default();
        assert_eq!(refaults.waiting_ns(&nothing, 0), 0);
        assert_eq!(refaults.advice(&nothing, 0), None);
        refaults.add(MIB, 5);
        assert_eq!(refaults.waiting_ns(&measured(), 1), 5, "at least as long at a lower limit");
        // Over its limit without a need above it: no limit is known to help.
        let full = Measured { limit_bytes: 300 * MIB, ..measured() };
        assert_eq!(refaults.advice(&full, 0), None);
    }

    /// Goal: more memory is never said to cost time, and a limit advised holds what it promises.
    /// Method: seeded random histograms and measurements.
    #[test]
    fn a_higher_limit_never_waits_longer() {
        let seed: u64 = std::env::var("SEED").map_or(42, |s| s.parse().expect("SEED is a u64"));
        let mut state = seed | 1;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 8) % below
        };
        for _ in 0..500 {
            let refaults = Refaults::default();
            for _ in 0..random(200) {
                let longest = 1 << (10 + random(30));
                refaults.add(random(longest), random(1 << 30));
            }
            let measured = Measured {
                limit_bytes: (32 + random(1000)) * MIB,
                need_bytes: random(3000) * MIB,
                stored_bytes: random(1 << 32),
                pool_bytes: random(1 << 32),
                staged_wait_ns: random(1 << 36),
                other_wait_ns: random(1 << 36),
            };
            let limits = (0..100).map(|step| measured.limit_bytes + step * 37 * MIB);
            let waiting: Vec<u64> =
                limits.map(|limit| refaults.waiting_ns(&measured, limit)).collect();
            assert!(waiting.is_sorted_by(|a, b| a >= b), "seed {seed}: {measured:?} {waiting:?}");
            let most = random(waiting[0] + 1);
            if let Some(advice) = refaults.advice(&measured, most) {
                assert!(advice.waiting_ns <= most, "seed {seed}: {advice:?} {measured:?}");
                assert!(advice.limit_bytes > measured.limit_bytes, "seed {seed}: {advice:?}");
            }
        }
    }
}
