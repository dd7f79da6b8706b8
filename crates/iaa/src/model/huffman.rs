//! Huffman codes of deflate: lengths from frequencies, codes from lengths, and symbols from codes.

/// The longest code of deflate.
pub(super) const LENGTH_MAX: usize = 15;

/// Lengths of an optimal code with no length above `length_max`, by package-merge. At least two symbols get a code, so
/// that the code is complete.
pub(super) fn lengths(frequencies: &[u32], length_max: usize) -> Vec<u8> {
    let mut leaves: Vec<(u64, usize)> = frequencies
        .iter()
        .enumerate()
        .filter(|(_, frequency)| **frequency > 0)
        .map(|(symbol, frequency)| (u64::from(*frequency), symbol))
        .collect();
    let absent = (0..frequencies.len()).filter(|symbol| frequencies[*symbol] == 0);
    let missing = 2_usize.saturating_sub(leaves.len());
    leaves.extend(absent.take(missing).map(|symbol| (1, symbol)));
    leaves.sort_unstable();
    let mut weights: Vec<u64> = leaves.iter().map(|leaf| leaf.0).collect();
    // For each round, which of the packages are leaves, in the order of their weights.
    let mut rounds = vec![vec![true; leaves.len()]];
    for _ in 1..length_max {
        let pairs = weights.chunks_exact(2).map(|pair| (pair[0] + pair[1], false));
        let mut merged: Vec<(u64, bool)> =
            pairs.chain(leaves.iter().map(|leaf| (leaf.0, true))).collect();
        merged.sort_by_key(|package| package.0);
        weights.clear();
        weights.extend(merged.iter().map(|package| package.0));
        rounds.push(merged.iter().map(|package| package.1).collect());
    }
    // The lightest packages of the last round, and of each round before what those of the next are made of. A symbol's
    // length is how often it is among them.
    let mut lengths = vec![0; frequencies.len()];
    let mut wanted = 2 * leaves.len() - 2;
    for is_leaf in rounds.iter().rev() {
        let light = is_leaf[..wanted].iter().filter(|is_leaf| **is_leaf).count();
        leaves[..light].iter().for_each(|(_, symbol)| lengths[*symbol] += 1);
        wanted = 2 * (wanted - light);
    }
    lengths
}

/// The canonical code of each symbol, first bit highest.
pub(super) fn codes(lengths: &[u8]) -> Vec<u16> {
    let mut next = [0_u16; LENGTH_MAX + 2];
    let counts = counts(lengths);
    for length in 1..=LENGTH_MAX {
        next[length + 1] = (next[length] + counts[length]) << 1;
    }
    let mut code = |length: &u8| {
        let code = next[usize::from(*length)];
        next[usize::from(*length)] += 1;
        code
    };
    lengths.iter().map(|length| if *length == 0 { 0 } else { code(length) }).collect()
}

/// How many symbols have each length; those without a code are not counted.
fn counts(lengths: &[u8]) -> [u16; LENGTH_MAX + 1] {
    let mut counts = [0; LENGTH_MAX + 1];
    lengths.iter().for_each(|length| counts[usize::from(*length)] += 1);
    counts[0] = 0;
    counts
}

/// Finds symbols of a canonical code bit by bit.
#[derive(Debug)]
pub(super) struct Decoder {
    counts: [u16; LENGTH_MAX + 1],
    /// In the order of their codes.
    symbols: Vec<u16>,
}

/// Why lengths are no code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoCode;

impl Decoder {
    /// The code with these lengths. It must be complete, except that one code of one bit, or none at all, may stand
    /// alone if `may_be_incomplete`.
    pub(super) fn new(lengths: &[u8], may_be_incomplete: bool) -> Result<Decoder, NoCode> {
        let counts = counts(lengths);
        let (mut free, mut used) = (1_i32, 0);
        for count in &counts[1..] {
            free = free * 2 - i32::from(*count);
            used += count;
            if free < 0 {
                return Err(NoCode);
            }
        }
        let is_single = used == 0 || (used == 1 && counts[1] == 1);
        if free > 0 && !(may_be_incomplete && is_single) {
            return Err(NoCode);
        }
        let mut symbols: Vec<u16> =
            (0..).zip(lengths).filter(|it| *it.1 > 0).map(|it| it.0).collect();
        symbols.sort_by_key(|symbol| lengths[usize::from(*symbol)]);
        Ok(Decoder { counts, symbols })
    }

    /// The symbol whose code `bit` gives, bit by bit. `Ok(None)`: no symbol has this code.
    pub(super) fn symbol<E>(
        &self,
        mut bit: impl FnMut() -> Result<u16, E>,
    ) -> Result<Option<u16>, E> {
        let (mut code, mut first, mut index) = (0_u16, 0_u16, 0_u16);
        for count in &self.counts[1..] {
            code = code << 1 | bit()?;
            if code - first < *count {
                return Ok(Some(self.symbols[usize::from(index + (code - first))]));
            }
            index += count;
            first = (first + count) << 1;
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::{Decoder, LENGTH_MAX, lengths};

    /// Goal: lengths form a complete code, keep their limit, and cost no more than a Huffman code without limit where
    /// that keeps it too. Method: frequencies whose unlimited code is as deep as there are symbols, and flat ones.
    #[test]
    fn lengths_are_complete_and_limited() {
        let steep: Vec<u32> = (0..30).map(|power| 1 << power).collect();
        for (frequencies, limit) in [(&steep[..], 7), (&steep[..], LENGTH_MAX), (&[5; 8][..], 7)] {
            let lengths = lengths(frequencies, limit);
            assert!(lengths.iter().all(|length| (1..=limit).contains(&usize::from(*length))));
            assert!(Decoder::new(&lengths, false).is_ok(), "{lengths:?}");
        }
        assert_eq!(lengths(&[5; 8], 7), [3; 8]);
        assert_eq!(lengths(&[1, 1, 2, 4], 7), [3, 3, 2, 1]);
        assert_eq!(lengths(&[0, 9, 0, 0], 7), [1, 1, 0, 0], "two codes at least");
    }
}
