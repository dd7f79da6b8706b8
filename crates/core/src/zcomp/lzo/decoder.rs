//! The decoder: from a stream to the bytes.
//!
//! ```text
//! first instruction: literals, perhaps after the version
//! repeat: read 8 bytes, find the instruction in them
//!         literals: copy them
//!         match:    repeat `length` bytes, then copy the 0 to 3 literals that it announces
//! until a match with the distance 16384, which marks the end
//! ```
//!
//! One load reads an instruction with its operands and announced literals (at most 3 + 3 bytes, 4 +
//! 3 with a run); only long lengths need more. After the end of the source zeros are read; an
//! instruction that used such a byte is refused when the decoder moves past it.

#![forbid(unsafe_code)]

use super::super::backend::Corrupt;
use super::memory::{Output, Overrun};
use super::{FAR_DISTANCE_MIN, Version};

impl From<Overrun> for Corrupt {
    fn from(_: Overrun) -> Self {
        Corrupt
    }
}

/// The rest of the stream.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    /// The next 8 bytes, the first one lowest; zeros after the end.
    #[inline(always)]
    fn word(&self) -> u64 {
        match self.0.first_chunk() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => self.word_at_end(),
        }
    }

    #[cold]
    #[inline(never)]
    fn word_at_end(&self) -> u64 {
        self.0.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    #[inline(always)]
    fn skip(&mut self, count: usize) -> Result<(), Corrupt> {
        self.0 = self.0.get(count..).ok_or(Corrupt)?;
        Ok(())
    }

    /// The rest of a length: 255 for each zero byte, plus the first byte that is not zero.
    #[cold]
    fn length_more(&mut self) -> Result<usize, Corrupt> {
        let zeros = self.0.iter().position(|byte| *byte != 0).ok_or(Corrupt)?;
        let last = usize::from(self.0[zeros]);
        self.skip(zeros + 1)?;
        zeros.checked_mul(255).and_then(|length| length.checked_add(last)).ok_or(Corrupt)
    }
}

/// `count` bits of `word`, starting at bit `from`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "at most 16 bits are wanted")]
fn bits(word: u64, from: u32, count: u32) -> usize {
    usize::from((word >> from) as u16) & ((1 << count) - 1)
}

/// Fills `dest` from `source`, as `ZC-4` requires.
pub(super) fn decode(source: &[u8], dest: &mut [u8], newest: Version) -> Result<(), Corrupt> {
    let mut input = Input(source);
    let mut output = Output::new(dest);
    let version = match newest {
        Version::Original => Version::Original,
        Version::Runs => version(&mut input)?,
    };
    let state = first(&mut input, &mut output)?;
    match version {
        Version::Original => instructions::<false>(&mut input, &mut output, state)?,
        Version::Runs => instructions::<true>(&mut input, &mut output, state)?,
    }
    if input.0.is_empty() && output.room() == 0 { Ok(()) } else { Err(Corrupt) }
}

/// The version of the stream: the original one, unless the stream says otherwise.
fn version(input: &mut Input<'_>) -> Result<Version, Corrupt> {
    let version = match *input.0 {
        [17, 0, _, _, _, ..] => Version::Original,
        [17, 1, _, _, _, ..] => Version::Runs,
        [17, _, _, _, _, ..] => return Err(Corrupt),
        _ => return Ok(Version::Original),
    };
    input.skip(2)?;
    Ok(version)
}

/// Reads the literals before the first instruction, if they have the special encoding; returns the
/// state.
fn first(input: &mut Input<'_>, output: &mut Output<'_>) -> Result<usize, Corrupt> {
    match input.0.first() {
        Some(code @ 18..) => {
            let count = usize::from(code - 17);
            input.skip(1)?;
            output.copy(input.0, count)?;
            input.skip(count)?;
            Ok(count.min(4))
        }
        _ => Ok(0),
    }
}

/// Decodes all instructions and the end. `state` is the number of literals before the first
/// instruction: 0 if there were none, 4 if there were more than 3.
fn instructions<const RUNS: bool>(
    input: &mut Input<'_>,
    output: &mut Output<'_>,
    mut state: usize,
) -> Result<(), Corrupt> {
    loop {
        let mut word = input.word();
        let code = bits(word, 0, 8);
        // Bytes of the instruction left in `word`; the announced literals: count, and place in it.
        let (mut taken, literals, literals_shift, distance, length);
        if code >= 64 {
            (taken, literals, literals_shift) = (2, bits(word, 0, 2), 16);
            distance = (bits(word, 8, 8) << 3) + bits(word, 2, 3) + 1;
            length = (code >> 5) + 1;
        } else if code >= 32 {
            taken = 3;
            length = match code & 31 {
                0 => {
                    input.skip(1)?;
                    let more = input.length_more()?;
                    word = input.word() << 8;
                    taken = 2;
                    33 + more
                }
                length => 2 + length,
            };
            (literals, literals_shift) = (bits(word, 8, 2), 24);
            distance = bits(word, 10, 14) + 1;
        } else if code >= 16 {
            if RUNS && word & 0xFF_FCF8 == 0xFF_FC18 {
                state = bits(word, 8, 2);
                output.fill(0, (bits(word, 24, 8) << 3) + bits(word, 0, 3) + 4)?;
                input.skip(4 + state)?;
                output.put(word >> 32, state)?;
                continue;
            }
            taken = 3;
            length = match code & 7 {
                0 => {
                    input.skip(1)?;
                    let more = input.length_more()?;
                    word = input.word() << 8;
                    taken = 2;
                    9 + more
                }
                length => 2 + length,
            };
            (literals, literals_shift) = (bits(word, 8, 2), 24);
            distance = FAR_DISTANCE_MIN + ((code & 8) << 11) + bits(word, 10, 14);
            if distance == FAR_DISTANCE_MIN {
                return if word & 0xFF_FFFF == 0x11 { input.skip(3) } else { Err(Corrupt) };
            }
        } else if state == 0 {
            input.skip(1)?;
            let count = if code == 0 { 18 + input.length_more()? } else { 3 + code };
            output.copy(input.0, count)?;
            input.skip(count)?;
            state = 4;
            continue;
        } else {
            (taken, literals, literals_shift) = (2, bits(word, 0, 2), 16);
            let (nearest, bytes) = if state == 4 { (2049, 3) } else { (1, 2) };
            (distance, length) = ((bits(word, 8, 8) << 2) + bits(word, 2, 2) + nearest, bytes);
        }
        output.repeat(distance, length)?;
        input.skip(taken + literals)?;
        output.put(word >> literals_shift, literals)?;
        state = literals;
    }
}
