//! What the tests of several crates share. Not part of the interface.

pub mod recording;
pub mod traces;

/// The seed of random tests: the variable `SEED`, or 42.
///
/// # Panics
///
/// `SEED` is set to something other than a number.
#[must_use]
pub fn seed() -> u64 {
    std::env::var("SEED").map_or(42, |seed| seed.parse().expect("SEED is a u64"))
}

/// Pseudo-random numbers for tests: Marsaglia's xorshift64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that belongs to `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let number = self.below_u64(bound as u64);
        usize::try_from(number).expect("it is below a usize")
    }

    /// The same as [`below`](Random::below), for a `u64`.
    pub fn below_u64(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// A random byte.
    pub fn byte(&mut self) -> u8 {
        self.word().to_le_bytes()[4]
    }

    /// `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}
