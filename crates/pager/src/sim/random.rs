//! The simulation's only source of chance.

/// xorshift64* over a seed that was mixed first, so that adjacent seeds give different runs.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

/// The end of splitmix64.
pub(super) fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Random {
    /// One of many independent streams of a seed.
    pub(super) fn new(seed: u64, stream: u64) -> Random {
        Random(mixed(mixed(seed).wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from((self.next() >> 16) % bound as u64).expect("below a usize")
    }

    /// True once in `chances` times on average; never if `chances` is 0.
    pub(super) fn one_in(&mut self, chances: usize) -> bool {
        chances > 0 && self.below(chances) == 0
    }

    /// One of `choices`.
    pub(super) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}
