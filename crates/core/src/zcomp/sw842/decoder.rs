//! The decoder: from a stream to the bytes.
//!
//! ```text
//! repeat: take an operation
//!         two halves, an eight, a repetition, zeros: write phrases
//! until a short one, or the end; then compare the CRC
//! ```
//!
//! After the end of the source zeros are read. An operation of zeros writes a phrase, so that a
//! stream that was cut fills the destination, and is refused then at the latest.

#![forbid(unsafe_code)]

use super::super::backend::Corrupt;
use super::bits::{Reader, first_bits};
use super::crc::crc;
use super::{
    CRC_BITS, D2_I2, D4, EIGHT, EIGHTS, END, FOURS, I2_D2, I2_I2, I4, OPERATION_BITS, PHRASE_BYTES,
    REPEAT, REPEAT_BITS, Ring, SHORT, SHORT_BITS, TWOS, ZEROS,
};

/// Fills `dest` from `source`, as `ZC-4` requires.
pub(super) fn decode(source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
    let mut reader = Reader::new(source);
    // The position of the present phrase.
    let mut at = 0;
    loop {
        let window = reader.window();
        let operation = first_bits(window, OPERATION_BITS);
        reader.skip(OPERATION_BITS);
        let phrase = match operation {
            0..EIGHT => {
                let past = dest.get(..at).ok_or(Corrupt)?;
                let (first, bits) = half(operation / 5, window << OPERATION_BITS, past)?;
                reader.skip(bits);
                let (second, bits) = half(operation % 5, reader.window(), past)?;
                reader.skip(bits);
                first << 32 | second
            }
            EIGHT => {
                let past = dest.get(..at).ok_or(Corrupt)?;
                let index = small(reader.take(EIGHTS.index_bits));
                u64::from_be_bytes(indexed(EIGHTS, past, index)?)
            }
            REPEAT => {
                let count = 1 + small(reader.take(REPEAT_BITS));
                let before = at.checked_sub(PHRASE_BYTES).ok_or(Corrupt)?;
                let end = at + count * PHRASE_BYTES;
                let (past, next) = dest.get_mut(before..end).ok_or(Corrupt)?.split_at_mut(8);
                next.chunks_exact_mut(PHRASE_BYTES).for_each(|phrase| phrase.copy_from_slice(past));
                at = end;
                continue;
            }
            ZEROS => 0,
            SHORT => {
                at = short(&mut reader, dest, at)?;
                break;
            }
            END => break,
            _ => return Err(Corrupt),
        };
        let place = dest.get_mut(at..at + PHRASE_BYTES).ok_or(Corrupt)?;
        place.copy_from_slice(&phrase.to_be_bytes());
        at += PHRASE_BYTES;
    }
    let is_whole = at == dest.len() && reader.take(CRC_BITS) == u64::from(crc(dest));
    if is_whole && reader.is_at_end() { Ok(()) } else { Err(Corrupt) }
}

/// Converts a number of a few bits.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "at most 9 bits are wanted")]
fn small(bits: u64) -> usize {
    usize::from(bits as u16)
}

/// Decodes the half whose arguments are at the start of `window`; returns it and the length of the
/// arguments.
#[inline(always)]
fn half(kind: u64, window: u64, past: &[u8]) -> Result<(u64, u32), Corrupt> {
    let two = |index| indexed::<2>(TWOS, past, index).map(u16::from_be_bytes).map(u64::from);
    let four = |index| indexed::<4>(FOURS, past, index).map(u32::from_be_bytes).map(u64::from);
    let bits = |from: u32, count| first_bits(window << from, count);
    Ok(match kind {
        D4 => (bits(0, 32), 32),
        D2_I2 => (bits(0, 16) << 16 | two(small(bits(16, 8)))?, 24),
        I2_D2 => (two(small(bits(0, 8)))? << 16 | bits(8, 16), 24),
        I2_I2 => (two(small(bits(0, 8)))? << 16 | two(small(bits(8, 8)))?, 16),
        I4 => (four(small(bits(0, 9)))?, 9),
        _ => return Err(Corrupt),
    })
}

/// The `N` bytes in slot `index` of `ring`; `past` ends with the last bytes of the ring.
#[inline(always)]
fn indexed<const N: usize>(ring: Ring, past: &[u8], index: usize) -> Result<[u8; N], Corrupt> {
    let from = past.len().checked_sub(ring.back(past.len(), index)).ok_or(Corrupt)?;
    past.get(from..).and_then(|bytes| bytes.first_chunk()).copied().ok_or(Corrupt)
}

/// Decodes the bytes of [`SHORT`], after which only the end may follow; returns their end.
#[cold]
fn short(reader: &mut Reader<'_>, dest: &mut [u8], at: usize) -> Result<usize, Corrupt> {
    let count = small(reader.take(SHORT_BITS));
    let bytes = dest.get_mut(at..at + count).ok_or(Corrupt)?;
    for byte in &mut *bytes {
        *byte = reader.take(8).to_le_bytes()[0];
    }
    let is_last = count > 0 && reader.take(OPERATION_BITS) == END;
    if is_last { Ok(at + count) } else { Err(Corrupt) }
}
