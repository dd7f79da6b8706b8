//! Strings of bits in bytes, starting with the highest bit of each byte.

#![forbid(unsafe_code)]

use std::slice::ChunksExactMut;

/// The length of a stream is a multiple of this.
const WORD_BYTES: usize = 8;

/// Reads the bits of a stream from first to last; zeros after the end.
pub(super) struct Reader<'a> {
    source: &'a [u8],
    /// How many bits were read.
    taken: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(source: &'a [u8]) -> Self {
        Reader { source, taken: 0 }
    }

    /// The next 57 or more bits, the first one highest, followed by zeros.
    #[inline(always)]
    pub(super) fn window(&self) -> u64 {
        let rest = self.source.get(self.taken / 8..).unwrap_or(&[]);
        let word = match rest.first_chunk() {
            Some(bytes) => u64::from_be_bytes(*bytes),
            None => word_at_end(rest),
        };
        word << (self.taken % 8)
    }

    /// Skips `count` bits.
    #[inline(always)]
    pub(super) fn skip(&mut self, count: u32) {
        self.taken += count as usize;
    }

    /// Reads the next `count` bits, 1 to 57.
    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u64 {
        let bits = first_bits(self.window(), count);
        self.skip(count);
        bits
    }

    /// Whether all bits that were read exist, and only the zeros that fill the last word are left.
    pub(super) fn is_at_end(&self) -> bool {
        let Some(left) = (8 * self.source.len()).checked_sub(self.taken) else { return false };
        // With less than a word left, the window contains all of it.
        self.source.len() % WORD_BYTES == 0 && left < 8 * WORD_BYTES && self.window() == 0
    }
}

/// The `count` highest bits of `word`, 1 to 64.
#[inline(always)]
pub(super) fn first_bits(word: u64, count: u32) -> u64 {
    word >> (64 - count)
}

#[cold]
#[inline(never)]
fn word_at_end(rest: &[u8]) -> u64 {
    let bytes = rest.iter().take(WORD_BYTES).enumerate();
    bytes.fold(0, |word, (at, byte)| word | u64::from(*byte) << (56 - 8 * at))
}

/// The bits to write do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// Writes bits, in whole words.
pub(super) struct Writer<'a> {
    words: ChunksExactMut<'a, u8>,
    /// How many words were written.
    count: usize,
    /// The bits that are not written yet, from the highest on, followed by zeros.
    pending: u64,
    /// How many bits are pending: 0 to 63.
    pending_bits: u32,
}

impl<'a> Writer<'a> {
    pub(super) fn new(dest: &'a mut [u8]) -> Self {
        let words = dest.chunks_exact_mut(WORD_BYTES);
        Writer { words, count: 0, pending: 0, pending_bits: 0 }
    }

    /// Appends the `count` lowest bits of `bits`, 1 to 64. The bits above them are 0.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, count: u32) -> Result<(), Full> {
        debug_assert!((1..=64).contains(&count) && (count == 64 || bits >> count == 0));
        let free = 64 - self.pending_bits;
        if count < free {
            self.pending |= bits << (free - count);
            self.pending_bits += count;
            return Ok(());
        }
        let left = count - free;
        self.word(self.pending | bits >> left)?;
        self.pending = if left == 0 { 0 } else { bits << (64 - left) };
        self.pending_bits = left;
        Ok(())
    }

    #[inline(always)]
    fn word(&mut self, word: u64) -> Result<(), Full> {
        self.words.next().ok_or(Full)?.copy_from_slice(&word.to_be_bytes());
        self.count += 1;
        Ok(())
    }

    /// Fills the last word; returns how many bytes were written.
    pub(super) fn finish(mut self) -> Result<usize, Full> {
        if self.pending_bits > 0 {
            self.word(self.pending)?;
        }
        Ok(self.count * WORD_BYTES)
    }
}
