//! A look at a sample of a unit: is it worth compressing at all?
//!
//! A codec can use two things: bytes that are not equally frequent, and sequences that repeat.
//! Random bytes and already compressed bytes have neither. This module looks for both in a sample.
//! A unit that shows either, or leaves doubt, goes to the codec. A wrong "compress" costs time, a
//! wrong "skip" costs memory; so the thresholds are far from the values of random bytes.
//!
//! ```text
//! 8 words at the start:    too many equal bytes? Almost every unit of a program's memory ends here.
//! 64 or 128 words of all:  too many equal bytes?
//! the words at each stride, compared with 16 windows of one stride: does any repeat?
//! ```
//!
//! # Frequencies
//!
//! The number of pairs of equal bytes in the sample is counted. For `n` random bytes it is
//! n(n-1)/512, with a deviation of its square root. Of all distributions that can just shrink to
//! 15/16, the hardest to detect is the even one over 2^7.5 = 181 values (any other of 7.5 bits has
//! more equal pairs). It has n(n-1)/362 pairs.
//!
//! | n | random | deviation | limit | even over 181 values |
//! | --- | --- | --- | --- | --- |
//! | 64 | 7.9 | 2.8 | 25 | 11.1: goes on to the next line |
//! | 512 | 511 | 22.6 | 590 | 722 |
//! | 1024 | 2046 | 45 | 2250 | 2894 |
//!
//! # Cost
//!
//! `docs/design/zcomp.md` lists it, and how often a unit is skipped that would have shrunk. 4.3 KiB
//! of stack, which are free again before the codec runs.

#![forbid(unsafe_code)]

use crate::page::PAGE_BYTES;

/// A word of the sample.
const WORD_BYTES: usize = 8;

/// The number of windows, each one stride long, in which every place is looked up. If 1/8 of a unit
/// is a copy of another part, all windows miss it about once in 50 times.
const WINDOWS: usize = 16;

/// The most words remembered; at most one per stride.
const STRIDES_MAX: usize = 1024;

/// The sample of one stage, and its threshold.
struct Stage {
    words: usize,
    pairs_max: u32,
}

/// The bytes that the first stage reads. They are the cache lines that the codec reads next: 8
/// lines all over the unit would be cache misses of their own, 0.2 us, a 20th of what LZ4 needs for
/// a page.
pub(super) const FIRST_BYTES: usize = 128;

const FIRST: Stage = Stage { words: 8, pairs_max: 25 };
const PAGE: Stage = Stage { words: 64, pairs_max: 590 };
const LARGER: Stage = Stage { words: 128, pairs_max: 2250 };

const _: () = {
    // The counters are bytes: 255 equal bytes make 32385 pairs, and counting ends before that.
    assert!(255 * 254 / 2 > LARGER.pairs_max + 8 * 255);
    assert!(LARGER.words * WORD_BYTES <= PAGE_BYTES);
};

/// Whether no codec would shrink `unit` to 15/16, as far as the sample shows.
///
/// `unit` has at least one page.
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

/// Whether the bytes of a sample are spread as evenly as random ones.
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
        // Tested in each round: 8 zeros make 28 pairs, so that most units end here after one or two
        // rounds.
        if pairs > stage.pairs_max {
            return false;
        }
    }
    true
}

/// Whether a sequence of bytes in the unit repeats.
///
/// Words are compared by 32 bits of their hash. One lookup in 4 million is wrong, which costs one
/// compression. No branch depends on the contents: with random contents such branches took 4 times
/// as long.
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
        // Without the first place of the window, which was remembered itself, and without the last
        // stride, whose words would end after the unit.
        let words = strides[jitter(index, window - 1) * stride..][..stride + WORD_BYTES]
            .windows(WORD_BYTES);
        for word in words.skip(1).take(stride - 1) {
            let (place, tag) = hash(u64::from_ne_bytes(*word.first_chunk().expect("a word")));
            found |= tags[place] == tag;
        }
    }
    found
}

/// A number below `choices` for part number `index`. Equal distances would hit the same field of
/// every object of an array.
fn jitter(index: usize, choices: usize) -> usize {
    let random = (index + 1).wrapping_mul(0x9E37_79B1) >> 8 & 0xFFFF;
    (random * choices) >> 16
}

fn word(part: &[u8], at: usize) -> u64 {
    let bytes = part[at..].first_chunk().expect("WORD_BYTES before the end");
    u64::from_ne_bytes(*bytes)
}

/// A place in the table of [`repeats`], and 32 more bits of the hash.
#[expect(clippy::cast_possible_truncation, reason = "10 bits, and the lower half of the rest")]
fn hash(word: u64) -> (usize, u32) {
    let hash = word.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((hash >> 54) as usize, (hash >> 22) as u32)
}

const _: () = assert!(STRIDES_MAX == 1 << 10);

#[cfg(test)]
mod tests;
