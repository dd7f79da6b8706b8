//! A look at a sample of a unit: is it worth giving to a codec at all?
//!
//! A codec gains from bytes that are not equally frequent, or from stretches that come again. Random
//! and already compressed bytes have neither. Both are looked for in a sample; what shows either, or
//! is in doubt, goes to the codec, which alone knows. Being wrong in that direction costs time; being
//! wrong in the other costs memory, so that the limits are far from what a random unit shows.
//!
//! ```text
//! 8 words of its beginning: too many equal bytes? -- almost every unit of a program's memory ends here
//! 64 or 128 words of all:  too many equal bytes?
//! words at every stride, looked up from 16 windows of one stride: does any come again?
//! ```
//!
//! # Frequencies
//!
//! Counted are the pairs of equal bytes in the sample. Of `n` random bytes these are n(n-1)/512 and
//! vary by the root of it. The hardest distribution that still can shrink to 15/16 is an even one over
//! 2^7.5 = 181 values (any other of 7.5 bits has more equal pairs): n(n-1)/362.
//!
//! | n | random | deviation | limit | even over 181 values |
//! | --- | --- | --- | --- | --- |
//! | 64 | 7.9 | 2.8 | 25 | 11.1: goes on to the next line |
//! | 512 | 511 | 22.6 | 590 | 722 |
//! | 1024 | 2046 | 45 | 2250 | 2894 |
//!
//! # Cost
//!
//! `docs/design/zcomp.md` has it, and how often a unit is skipped that would have shrunk. 4.3 KiB of stack, returned before the codec.

#![forbid(unsafe_code)]

use crate::page::PAGE_BYTES;

/// A word of the sample.
const WORD_BYTES: usize = 8;

/// Windows of one stride whose every place is looked up: if 1/8 of a unit is a copy of another
/// part, all of them miss it once in about 50 times.
const WINDOWS: usize = 16;

/// Words remembered, at most one per stride.
const STRIDES_MAX: usize = 1024;

/// What a stage looks at, and what it tolerates.
struct Stage {
    words: usize,
    pairs_max: u32,
}

/// Where the first stage looks: lines that the codec reads next, and no others. 8 lines all over a unit are
/// misses that nothing hides: 0.2 us, a 20th of what LZ4 takes for a page.
pub(super) const FIRST_BYTES: usize = 128;

const FIRST: Stage = Stage { words: 8, pairs_max: 25 };
const PAGE: Stage = Stage { words: 64, pairs_max: 590 };
const LARGER: Stage = Stage { words: 128, pairs_max: 2250 };

const _: () = {
    // A counter of a byte: 255 equal bytes are 32385 pairs, and counting ends before.
    assert!(255 * 254 / 2 > LARGER.pairs_max + 8 * 255);
    assert!(LARGER.words * WORD_BYTES <= PAGE_BYTES);
};

/// Whether no codec would shrink `unit` to 15/16.
///
/// `unit` has at least a page.
#[must_use]
pub(super) fn is_incompressible(unit: &[u8]) -> bool {
    if !is_even(&unit[..FIRST_BYTES], &FIRST) {
        return false;
    }
    let stage = if unit.len() == PAGE_BYTES { PAGE } else { LARGER };
    looks_random(unit, &stage)
}

#[cold]
fn looks_random(unit: &[u8], stage: &Stage) -> bool {
    is_even(unit, stage) && !repeats(unit)
}

/// Whether the bytes of a sample are as different as those of random ones.
fn is_even(unit: &[u8], stage: &Stage) -> bool {
    let stride = unit.len() / stage.words;
    let mut counts = [0_u8; 256];
    let mut pairs = 0;
    for (index, part) in unit.chunks_exact(stride).enumerate() {
        for byte in word(part, jitter(index, stride + 1 - WORD_BYTES)).to_ne_bytes() {
            let count = &mut counts[usize::from(byte)];
            pairs += u32::from(*count);
            *count += 1;
        }
        // In each round: 8 zeros are 28 pairs, so that most end here after one or two.
        if pairs > stage.pairs_max {
            return false;
        }
    }
    true
}

/// Whether a stretch of the unit comes again.
///
/// Words are known by 32 bits of their hash: one in 4 million lookups is wrong, and costs a compression.
/// No branch depends on the contents, which for random ones took 4 times as long.
fn repeats(unit: &[u8]) -> bool {
    let stride = (unit.len() / STRIDES_MAX).max(2 * WORD_BYTES);
    let mut tags = [0_u32; STRIDES_MAX];
    let mut found = false;
    for part in unit.chunks_exact(stride) {
        let (place, tag) = hash(word(part, 0));
        found |= tags[place] == tag;
        tags[place] = tag;
    }
    let window = unit.len() / stride / WINDOWS;
    for (index, strides) in unit.chunks_exact(stride * window).enumerate() {
        // Not its first place, which was remembered; and not the last stride, whose words end behind it.
        let words = strides[jitter(index, window - 1) * stride..][..stride + WORD_BYTES]
            .windows(WORD_BYTES);
        for word in words.skip(1).take(stride - 1) {
            let (place, tag) = hash(u64::from_ne_bytes(*word.first_chunk().expect("a word")));
            found |= tags[place] == tag;
        }
    }
    found
}

/// One of `choices`, for the part number `index`: equal distances would see the same field of every object
/// of an array.
fn jitter(index: usize, choices: usize) -> usize {
    let random = (index + 1).wrapping_mul(0x9E37_79B1) >> 8 & 0xFFFF;
    (random * choices) >> 16
}

fn word(part: &[u8], at: usize) -> u64 {
    let bytes = part[at..].first_chunk().expect("WORD_BYTES before the end");
    u64::from_ne_bytes(*bytes)
}

/// A place in the table of [`repeats`], and 32 bits more.
#[expect(clippy::cast_possible_truncation, reason = "10 bits, and the lower half of the rest")]
fn hash(word: u64) -> (usize, u32) {
    let hash = word.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((hash >> 54) as usize, (hash >> 22) as u32)
}

const _: () = assert!(STRIDES_MAX == 1 << 10);

#[cfg(test)]
mod tests;
