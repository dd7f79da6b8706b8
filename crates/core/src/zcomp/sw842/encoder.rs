//! The encoder: from the bytes to a stream.
//!
//! ```text
//! for each phrase: the same as the one before: count it
//!                  zeros
//!                  an eight that is in its ring
//!                  else each half alone: a four, or two twos, if they are in their rings
//! write the remaining bytes, the end, the CRC
//! ```
//!
//! This is the shortest stream for the matches that the dictionaries find: the arguments of a half
//! do not depend on the other half, and no operation except the repetition covers more than one
//! phrase.

#![forbid(unsafe_code)]

use super::bits::{Full, Writer};
use super::crc::crc;
use super::{
    CRC_BITS, D2_I2, D4, EIGHT, EIGHTS, END, FOURS, I2_D2, I2_I2, I4, OPERATION_BITS, PHRASE_BYTES,
    REPEAT, REPEAT_BITS, Ring, SHORT, SHORT_BITS, TWOS, ZEROS,
};

/// The most phrases of one repetition.
const REPEAT_MAX: usize = 1 << REPEAT_BITS;

/// Up to this many phrases of zeros are not longer as single operations than as a repetition: 5
/// bits each, against 11.
const ZEROS_MAX: usize = 2;

/// For hashes of values of `N` bytes: the slots that last held such a value. The contents of a slot
/// are compared before they are used, so entries may be out of date, and may start as 0.
struct Places<const N: usize> {
    ring: Ring,
    /// 2^`log2` entries.
    slots: Box<[u16]>,
    log2: u32,
}

impl<const N: usize> Places<N> {
    fn new(ring: Ring, log2: u32) -> Self {
        assert_eq!(ring.slot_bytes, N);
        Places { ring, slots: vec![0; 1 << log2].into_boxed_slice(), log2 }
    }

    /// Fibonacci hashing.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "a few bits are left")]
    fn place(&self, value: u64) -> usize {
        (value.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - self.log2)) as usize
    }

    /// The slot that holds `value` when the phrase at `at` begins.
    #[inline(always)]
    fn find(&self, source: &[u8], at: usize, value: u64) -> Option<u64> {
        let slot = self.slots[self.place(value)];
        let back = self.ring.back(at, usize::from(slot));
        if back > self.ring.bytes() - PHRASE_BYTES {
            // P8-1: the present phrase fills that slot.
            return None;
        }
        let from = at.checked_sub(back)?;
        let bytes: &[u8; N] = source.get(from..)?.first_chunk()?;
        (bytes[..] == value.to_be_bytes()[8 - N..]).then_some(u64::from(slot))
    }

    /// Records that `value` is at `at`.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "an index has at most 9 bits")]
    fn insert(&mut self, value: u64, at: usize) {
        let place = self.place(value);
        self.slots[place] = self.ring.index(at) as u16;
    }
}

/// The values seen lately.
pub(super) struct Dictionary {
    eights: Places<8>,
    fours: Places<4>,
    twos: Places<2>,
}

impl Dictionary {
    /// With 8, 8 and 16 times as many entries as the rings have slots. Half as many for the first
    /// two would shrink pages of real processes by 0.1 % less.
    pub(super) fn new() -> Self {
        Dictionary {
            eights: Places::new(EIGHTS, EIGHTS.index_bits + 3),
            fours: Places::new(FOURS, FOURS.index_bits + 3),
            twos: Places::new(TWOS, TWOS.index_bits + 4),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        [&self.eights.slots, &self.fours.slots, &self.twos.slots]
            .map(|slots| size_of_val(&**slots))
            .iter()
            .sum()
    }

    fn clear(&mut self) {
        for slots in [&mut self.eights.slots, &mut self.fours.slots, &mut self.twos.slots] {
            slots.fill(0);
        }
    }

    /// Records the phrase `word` at `at`.
    #[inline(always)]
    fn insert(&mut self, word: u64, at: usize) {
        self.eights.insert(word, at);
        self.fours.insert(word >> 32, at);
        self.fours.insert(word & 0xFFFF_FFFF, at + 4);
        for (shift, at) in [(48, at), (32, at + 2), (16, at + 4), (0, at + 6)] {
            self.twos.insert(word >> shift & 0xFFFF, at);
        }
    }

    /// How to write a half of the phrase at `at`: its kind, its arguments, and their length in
    /// bits.
    #[inline(always)]
    fn half(&self, source: &[u8], at: usize, value: u64) -> (u64, u64, u32) {
        if let Some(four) = self.fours.find(source, at, value) {
            return (I4, four, 9);
        }
        let (high, low) = (value >> 16, value & 0xFFFF);
        match (self.twos.find(source, at, high), self.twos.find(source, at, low)) {
            (Some(first), Some(second)) => (I2_I2, first << 8 | second, 16),
            (Some(first), None) => (I2_D2, first << 16 | low, 24),
            (None, Some(second)) => (D2_I2, high << 8 | second, 24),
            (None, None) => (D4, value, 32),
        }
    }

    /// Writes the phrase `word` at `at`.
    #[inline(always)]
    fn phrase(
        &self,
        writer: &mut Writer<'_>,
        source: &[u8],
        at: usize,
        word: u64,
    ) -> Result<(), Full> {
        if let Some(eight) = self.eights.find(source, at, word) {
            return writer
                .put(EIGHT << EIGHTS.index_bits | eight, OPERATION_BITS + EIGHTS.index_bits);
        }
        let (first, first_arguments, first_bits) = self.half(source, at, word >> 32);
        let (second, arguments, bits) = self.half(source, at, word & 0xFFFF_FFFF);
        let operation = 5 * first + second;
        writer.put(operation << first_bits | first_arguments, OPERATION_BITS + first_bits)?;
        writer.put(arguments, bits)
    }
}

/// Writes `count` repetitions of the phrase before, `word`.
fn repeat(writer: &mut Writer<'_>, word: u64, mut count: usize) -> Result<(), Full> {
    while count > 0 {
        if word == 0 && count <= ZEROS_MAX {
            writer.put(ZEROS, OPERATION_BITS)?;
            count -= 1;
        } else {
            let part = count.min(REPEAT_MAX);
            writer.put(REPEAT << REPEAT_BITS | (part - 1) as u64, OPERATION_BITS + REPEAT_BITS)?;
            count -= part;
        }
    }
    Ok(())
}

/// Writes the stream of `source` to `dest`; returns its length.
pub(super) fn encode(
    source: &[u8],
    dest: &mut [u8],
    dictionary: &mut Dictionary,
) -> Result<usize, Full> {
    dictionary.clear();
    let mut writer = Writer::new(dest);
    let (mut before, mut repeats) = (0, 0);
    let phrases = source.chunks_exact(PHRASE_BYTES);
    let rest = phrases.remainder();
    for (at, phrase) in (0..).step_by(PHRASE_BYTES).zip(phrases) {
        let word = u64::from_be_bytes(phrase.try_into().expect("a phrase has 8 bytes"));
        if word == before && at > 0 {
            repeats += 1;
            continue;
        }
        if repeats > 0 {
            repeat(&mut writer, before, repeats)?;
            // The slots of its first phrase may be overwritten before those of its last.
            dictionary.insert(before, at - PHRASE_BYTES);
            repeats = 0;
        }
        if word == 0 {
            writer.put(ZEROS, OPERATION_BITS)?;
        } else {
            dictionary.phrase(&mut writer, source, at, word)?;
        }
        dictionary.insert(word, at);
        before = word;
    }
    repeat(&mut writer, before, repeats)?;
    if !rest.is_empty() {
        writer.put(SHORT << SHORT_BITS | rest.len() as u64, OPERATION_BITS + SHORT_BITS)?;
        rest.iter().try_for_each(|byte| writer.put(u64::from(*byte), 8))?;
    }
    writer.put(END << CRC_BITS | u64::from(crc(source)), OPERATION_BITS + CRC_BITS)?;
    writer.finish()
}
