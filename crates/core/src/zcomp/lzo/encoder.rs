//! The encoder: from the bytes to a stream.
//!
//! ```text
//! repeat: look up where these 4 bytes were last; if nowhere, step on, in longer steps after many misses
//!         a run of zeros (version 1): extend it in both directions
//!         else a match:               extend it forwards
//!         write the literals before it, then it
//! write the remaining literals and the end
//! ```
//!
//! Departures from this, measured on pages of real processes (MB/s of input, 4 KiB):
//!
//! - The dictionary holds positions of 16 bits relative to a base (`LE-1`). So an entry is a place
//!   to read, without a subtraction, a mask and a check of the distance before the load: 889 to
//!   948. The base moves every 32 KiB, which costs one pass over the dictionary.
//! - Branches instead of conditional moves where the encoding depends on the match: the processor
//!   predicts the number of literals from the loop before. 720 to 765.
//! - No match is extended backwards, and no bytes inside a match enter the dictionary: 717 to 836,
//!   at a cost of 0.3 % of the ratio.
//! - One check of the room for literals and match together: 855 to 889.
//! - Where a match begins with 8 zeros, a run is tried first, and the match only if the run is too
//!   short: 4 to 6 % of the speed on pages with runs.
//!
//! # Invariants
//!
//! - `LE-1` Every entry of the dictionary plus the base is before the present position, which is
//!   less than [`DISTANCE_MAX`] after the base. The bytes there are compared before they are used,
//!   so an entry that was cleared, or set to 0 because it was too old, does no harm.
//! - `LE-2` A stream with a match or a run begins with at least 4 literals: after a version, a
//!   decoder might read a first instruction of another kind as literals.
//! - `LE-3` No distance is 49151, and with a distance whose bits `0x803F` are all set no length is
//!   261 to 264: in version 1 these would read as runs.

#![forbid(unsafe_code)]

use std::ops::Range;

use super::FAR_DISTANCE_MIN;
use super::memory::{Output, Overrun, Window};

/// The longest distance of the format. Every match is nearer (`LE-1`, `LE-3`).
const DISTANCE_MAX: usize = 0xBFFF;

/// How many bytes before the position remain reachable when the base moves. More bytes give better
/// matches, and more passes over the dictionary.
const BEHIND_BYTES: usize = 16 << 10;

const _: () = {
    assert!(DISTANCE_MAX <= 1 << 16, "a position fits in an entry");
    assert!(BEHIND_BYTES < DISTANCE_MAX / 2, "the base moves by more than it keeps");
};

/// log2 of the number of misses after which a step grows by one byte.
const MISSES_LOG2: u32 = 6;

/// The shortest run that is written as a run: its instruction has 4 bytes, a short match 2. Of the
/// values 12 to 64, this one shrinks pages of real processes most.
const RUN_BYTES_MIN: usize = 20;

/// The longest run of one instruction.
const RUN_BYTES_MAX: usize = 4 + 0x7FF;

/// Converts a number that is known to fit.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "LE-1: positions fit, and so do the others")]
fn low_16(number: usize) -> u16 {
    number as u16
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "these 4 bytes are what is compared")]
fn low_32(word: u64) -> u32 {
    word as u32
}

/// Fibonacci hashing of 4 bytes to a place in a table of `N` entries.
#[inline(always)]
fn place<const N: usize>(word: u64) -> usize {
    const { assert!(N.is_power_of_two() && N > 1) };
    (low_32(word).wrapping_mul(0x9E37_79B1) >> (32 - N.trailing_zeros())) as usize
}

/// The stream that is written.
struct Stream<'a, const RUNS: bool> {
    output: Output<'a>,
    /// How many bytes back the byte is that holds the number of literals (up to 3) after the last
    /// instruction.
    literals_back: usize,
}

/// Writes the rest of a length (255 for each zero byte, then a byte that is not zero), and then a
/// word.
#[cold]
#[inline(never)]
fn length_more(
    mut output: Output<'_>,
    length: usize,
    (word, bytes): (u64, usize),
) -> Result<usize, Overrun> {
    let zeros = (length - 1) / 255;
    output.fill(0, zeros)?;
    output.put((length - 255 * zeros) as u64, 1)?;
    output.put(word, bytes)?;
    Ok(output.len())
}

impl<const RUNS: bool> Stream<'_, RUNS> {
    /// Records in the last instruction that `count <= 3` literals follow.
    #[inline(always)]
    fn announce(&mut self, count: usize) -> Result<(), Overrun> {
        self.output
            .set_bits(if RUNS { self.literals_back } else { 2 }, low_16(count).to_le_bytes()[0])
    }

    /// Writes the first `count` of `bytes` as literals.
    #[inline(always)]
    fn literals(&mut self, bytes: &[u8], count: usize) -> Result<(), Overrun> {
        if count <= 3 {
            self.announce(count)?;
        } else if count <= 18 {
            self.output.put((count - 3) as u64, 1)?;
        } else {
            self.output.put(0, 1)?;
            self.output.aside(|output| length_more(output, count - 18, (0, 0)))?;
        }
        self.output.copy(bytes, count)
    }

    /// Writes `count` literals starting at `at`, and then a match of `length` bytes (at least 4) at
    /// `distance`.
    #[inline(always)]
    fn literals_and_match(
        &mut self,
        window: Window<'_>,
        (at, count): (usize, usize),
        (distance, length): (usize, usize),
    ) -> Result<(), Overrun> {
        let instruction = if distance <= 2048 && length <= 8 {
            let back = distance - 1;
            (((length - 1) << 5 | (back & 7) << 2 | back >> 3 << 8) as u64, 2)
        } else {
            let (code, back, short) = if distance <= FAR_DISTANCE_MIN {
                (32, distance - 1, 33)
            } else {
                let back = distance - FAR_DISTANCE_MIN;
                (16 | back >> 14 << 3, back & 0x3FFF, 9)
            };
            if length > short {
                self.literals(&window.bytes()[at..], count)?;
                self.set_literals_back(2);
                self.output.put(code as u64, 1)?;
                let back = ((back << 2) as u64, 2);
                return self.output.aside(|output| length_more(output, length - short, back));
            }
            ((code | (length - 2) | back << 10) as u64, 3)
        };
        if count <= 3 {
            self.announce(count)?;
            self.output.append((0, 0), (window.chunk(at), count), instruction)?;
        } else if count <= 16 {
            let code = ((count - 3) as u64, 1);
            self.output.append(code, (window.chunk(at), count), instruction)?;
        } else {
            self.literals(&window.bytes()[at..], count)?;
            self.output.put(instruction.0, instruction.1)?;
        }
        self.set_literals_back(2);
        Ok(())
    }

    #[inline(always)]
    fn set_literals_back(&mut self, back: usize) {
        if RUNS {
            self.literals_back = back;
        }
    }

    /// Writes the first `count` of `bytes` as literals, and a run of `length` zeros (at least 8).
    #[inline(always)]
    fn literals_and_run(
        &mut self,
        bytes: &[u8],
        count: usize,
        length: usize,
    ) -> Result<(), Overrun> {
        let literals_back = self.literals_back;
        self.output.aside(|output| {
            let mut stream = Stream::<RUNS> { output, literals_back };
            stream.literals(bytes, count)?;
            stream.run(length)
        })?;
        self.literals_back = 3;
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn run(mut self, mut length: usize) -> Result<usize, Overrun> {
        while length > 0 {
            let part = match length {
                0..=RUN_BYTES_MAX => length,
                // The rest must not be too short for a run either.
                _ => RUN_BYTES_MAX.min(length - 4),
            };
            let more = part - 4;
            self.output.put((0xFF_FC18 | more & 7 | more >> 3 << 24) as u64, 4)?;
            length -= part;
        }
        Ok(self.output.len())
    }

    /// Writes the remaining `bytes` and the end.
    fn finish(mut self, bytes: &[u8]) -> Result<usize, Overrun> {
        let count = bytes.len();
        if self.output.len() > 0 || count > 238 {
            self.literals(bytes, count)?;
        } else if count > 0 {
            self.output.put(count as u64 + 17, 1)?;
            self.output.copy(bytes, count)?;
        }
        self.output.put(0x11, 3)?;
        Ok(self.output.len())
    }
}

/// How many bytes starting at `at` equal those `distance` before them. The first 4 do.
#[inline(always)]
fn match_length(window: Window<'_>, at: usize, distance: usize) -> usize {
    let mut end = at + 4;
    while end <= window.last() {
        let differences = window.word(end) ^ window.word(end - distance);
        if differences != 0 {
            return end - at + (differences.trailing_zeros() / 8) as usize;
        }
        end += 8;
    }
    let bytes = window.bytes();
    while end < bytes.len() && bytes[end] == bytes[end - distance] {
        end += 1;
    }
    end - at
}

/// The end of the run of zeros that contains `at`.
#[inline(always)]
fn run_end(window: Window<'_>, at: usize) -> usize {
    let is_zero = |block: &&[u8]| block.iter().fold(0, |bits, byte| bits | byte) == 0;
    let blocks = window.bytes()[at..].chunks_exact(32).take_while(is_zero).count();
    let mut end = at + 32 * blocks;
    while end <= window.last() {
        let word = window.word(end);
        if word != 0 {
            return end + (word.trailing_zeros() / 8) as usize;
        }
        end += 8;
    }
    let bytes = window.bytes();
    end + bytes[end..].iter().take_while(|byte| **byte == 0).count()
}

/// Writes the stream of `source` to `dest`, with runs for version 1; returns its length.
/// `positions` is scratch memory.
pub(super) fn encode<const N: usize, const RUNS: bool>(
    source: &[u8],
    dest: &mut [u8],
    positions: &mut [u16; N],
) -> Result<usize, Overrun> {
    let mut output = Output::new(dest);
    if RUNS && source.len() >= 4 {
        output.put(0x0111, 2)?;
    }
    let mut stream = Stream::<RUNS> { output, literals_back: 2 };
    let Some(window) = Window::new(source) else { return stream.finish(source) };
    positions.fill(0);
    // LE-2: the first match is at 4 or later.
    let (mut anchor, mut at, mut base) = (0, 4, 0);
    loop {
        let end = (window.last() + 1).min(base + DISTANCE_MAX);
        (anchor, at) = search(window, positions, &mut stream, (anchor, at), base..end)?;
        if at > window.last() {
            return stream.finish(&source[anchor..]);
        }
        let step = at - BEHIND_BYTES - base;
        base += step;
        let step = low_16(step.min(0xFFFF));
        for position in &mut *positions {
            *position = position.saturating_sub(step);
        }
    }
}

/// Writes the matches that begin before the end of `range`, whose start is the base. The literals
/// from `anchor` on are not written yet. Returns the new anchor and position.
#[inline(always)]
fn search<const N: usize, const RUNS: bool>(
    window: Window<'_>,
    positions: &mut [u16; N],
    stream: &mut Stream<'_, RUNS>,
    (mut anchor, mut at): (usize, usize),
    Range { start: base, end }: Range<usize>,
) -> Result<(usize, usize), Overrun> {
    let bytes = window.bytes();
    let behind = Window::new(&bytes[base..]).ok_or(Overrun)?;
    loop {
        let mut misses = 0;
        let (word, candidate) = loop {
            if at >= end {
                return Ok((anchor, at));
            }
            let word = window.word(at);
            let position = &mut positions[place::<N>(word)];
            let candidate = usize::from(*position);
            *position = low_16(at - base);
            if low_32(behind.word(candidate)) == low_32(word) {
                break (word, candidate);
            }
            misses += 1;
            at += 1 + (misses >> MISSES_LOG2);
        };
        let distance = at - base - candidate;
        if RUNS && word == 0 {
            let end = run_end(window, at);
            if end - at >= RUN_BYTES_MIN {
                // LE-2 for the first match.
                let floor = anchor.max(4);
                let back = bytes[floor..at].iter().rev().take_while(|byte| **byte == 0).count();
                let begin = at - back;
                stream.literals_and_run(&bytes[anchor..], begin - anchor, end - begin)?;
                (anchor, at) = (end, end);
                continue;
            }
        }
        let mut length = match_length(window, at, distance);
        if RUNS && distance & 0x803F == 0x803F && (261..=264).contains(&length) {
            // By LE-3.
            length = 260;
        }
        stream.literals_and_match(window, (anchor, at - anchor), (distance, length))?;
        at += length;
        anchor = at;
    }
}
