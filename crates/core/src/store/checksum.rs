//! The checksum of a unit: what proves that a unit is what was stored, or has not changed since.

#![forbid(unsafe_code)]

use std::fmt;

use twox_hash::XxHash3_128;

use crate::page::same_filled;

/// The checksum of a unit: 112 bits of XXH3 with a secret; of a same-filled unit, its word and a mark.
///
/// 112 bits leave 16 for the state in an entry's row. Two different units have equal checksums by chance once in
/// 2^112 pairs.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Checksum {
    /// The lower half of the hash, or the word of a same-filled unit.
    low: u64,
    /// The next 48 bits of the hash, or [`SAME_FILLED`].
    high: u64,
}

/// Bits of [`Checksum::high`] that a hash has.
const HIGH_BITS: u32 = 48;

/// The upper half of a same-filled unit's checksum. No hash has it: it has a bit more.
const SAME_FILLED: u64 = 1 << HIGH_BITS;

impl Checksum {
    /// Bytes of one that is kept elsewhere.
    pub(crate) const BYTES: usize = 16;

    /// The checksum as bytes.
    pub(crate) fn to_bytes(self) -> [u8; Checksum::BYTES] {
        let mut bytes = [0; Checksum::BYTES];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&self.low.to_le_bytes());
        high.copy_from_slice(&self.high.to_le_bytes());
        bytes
    }

    /// The checksum of such bytes. `None`: no unit has it.
    pub(crate) fn from_bytes(bytes: [u8; Checksum::BYTES]) -> Option<Checksum> {
        let (low, high) = bytes.split_at(8);
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("8 of 16 bytes"));
        let checksum = Checksum { low: word(low), high: word(high) };
        (checksum.high <= SAME_FILLED).then_some(checksum)
    }

    /// Whether it is that of a same-filled unit.
    pub(crate) fn is_of_word(self) -> bool {
        self.same_filled().is_some()
    }

    /// The word that a same-filled unit repeats.
    pub(super) fn same_filled(self) -> Option<u64> {
        (self.high == SAME_FILLED).then_some(self.low)
    }

    /// The checksum without the mark of a same-filled unit: the word, or 112 bits of hash.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "cut into words and the 16 bits that remain"
    )]
    pub(super) fn to_words(self) -> ([u32; 3], u16) {
        let words = [self.low as u32, (self.low >> 32) as u32, self.high as u32];
        (words, (self.high >> 32) as u16)
    }

    /// The checksum that [`Checksum::to_words`] cut up.
    pub(super) fn from_words([first, second, third]: [u32; 3], rest: u16, same: bool) -> Checksum {
        let low = u64::from(second) << 32 | u64::from(first);
        let high = u64::from(rest) << 32 | u64::from(third);
        Checksum { low, high: if same { SAME_FILLED } else { high } }
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.same_filled() {
            Some(word) => write!(f, "of the word {word:016x}"),
            None => write!(f, "{:012x}{:016x}", self.high, self.low),
        }
    }
}

/// A secret of the process, with which its checksums are taken.
///
/// A unit with the checksum of its stored copy is taken for that copy, and its contents are dropped. Who chooses
/// contents (a peer, a file's author) could otherwise build two units with one checksum, and lose one for
/// the other. A child of `fork` has its parent's secret, as it has the parent's entries.
#[derive(Clone)]
pub struct Key([u8; Key::BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// As long as XXH3's own constants, which it replaces.
    pub const BYTES: usize = 192;

    /// A key of random bytes.
    #[must_use]
    pub fn new(secret: [u8; Key::BYTES]) -> Key {
        Key(secret)
    }

    /// Its bytes.
    pub(crate) fn secret(&self) -> &[u8; Key::BYTES] {
        &self.0
    }

    /// The checksum of `unit`.
    #[must_use]
    pub fn checksum(&self, unit: &[u8]) -> Checksum {
        match same_filled(unit) {
            Some(word) => Checksum { low: word, high: SAME_FILLED },
            None => self.hash(unit),
        }
    }

    /// The checksum of `unit` if the unit is not same-filled; another than that of any unit if it is.
    pub(crate) fn hash(&self, unit: &[u8]) -> Checksum {
        let hash = XxHash3_128::oneshot_with_secret(&self.0, unit).expect("136 bytes or more");
        let bytes = hash.to_le_bytes();
        let word = |from: usize| {
            u64::from_le_bytes(bytes[from..from + 8].try_into().expect("8 of 16 bytes"))
        };
        Checksum { low: word(0), high: word(8) & (SAME_FILLED - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Checksum, Key};
    use crate::zsmalloc::world::bytes;

    /// Goal: nobody can build two units with one checksum without the key, and a store knows its own units. Method:
    /// each bit of the key counts for the checksum of a unit of each size; the same key gives the same.
    #[test]
    fn checksums_depend_on_all_of_the_key() {
        for unit in [4096, 16384, 65536] {
            let contents = bytes(7, unit);
            let secret: [u8; Key::BYTES] = bytes(42, Key::BYTES).try_into().expect("as many bytes");
            let checksum = Key::new(secret).checksum(&contents);
            assert_eq!(Key::new(secret).checksum(&contents), checksum);
            for at in 0..Key::BYTES {
                let mut other = secret;
                other[at] ^= 1;
                assert_ne!(Key::new(other).checksum(&contents), checksum, "byte {at}, unit {unit}");
            }
        }
    }

    /// The load of a same-filled unit takes its word from the checksum.
    #[test]
    fn the_checksum_of_a_same_filled_unit_is_its_word() {
        let unit = vec![0x5A; 4096];
        let key = |seed| Key::new(bytes(seed, Key::BYTES).try_into().expect("as many bytes"));
        assert_eq!(key(1).checksum(&unit), key(2).checksum(&unit));
        assert_eq!(key(1).checksum(&unit).same_filled(), Some(0x5A5A_5A5A_5A5A_5A5A));
        assert_ne!(key(1).hash(&unit), key(1).checksum(&unit), "a hash never says same-filled");
    }

    #[test]
    fn bytes_that_are_no_checksum_are_none() {
        let mut bytes = [0xFF; Checksum::BYTES];
        assert_eq!(Checksum::from_bytes(bytes), None);
        (bytes[14], bytes[15]) = (0, 0);
        assert!(Checksum::from_bytes(bytes).is_some_and(|checksum| !checksum.is_of_word()));
        (bytes[14], bytes[9]) = (1, 0);
        assert_eq!(Checksum::from_bytes(bytes), None, "a bit more than that of a word");
    }

    #[test]
    fn a_checksum_survives_its_words() {
        let key = Key::new([7; Key::BYTES]);
        for unit in [vec![0; 4096], vec![0xFF; 4096], bytes(1, 4096), bytes(2, 8192)] {
            let checksum = key.checksum(&unit);
            let (words, rest) = checksum.to_words();
            let same = checksum.same_filled().is_some();
            assert_eq!(Checksum::from_words(words, rest, same), checksum);
            assert_eq!(Checksum::from_bytes(checksum.to_bytes()), Some(checksum));
        }
    }
}
