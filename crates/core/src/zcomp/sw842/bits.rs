//! Strings of bits in bytes, the highest bit of each byte first.

#![forbid(unsafe_code)]

use std::slice::ChunksExactMut;

/// The bytes of a stream are a multiple of this.
const WORD_BYTES: usize = 8;

/// The bits of a stream, from the first to the last, and zeros behind it.
pub(super) struct Reader<'a> {
    source: &'a [u8],
    /// Bits that were taken.
    taken: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(source: &'a [u8]) -> Self {
        Reader { source, taken: 0 }
    }

    /// The next 57 bits or more, the first one highest, and zeros.
    #[inline(always)]
    pub(super) fn window(&self) -> u64 {
        let rest = self.source.get(self.taken / 8..).unwrap_or(&[]);
        let word = match rest.first_chunk() {
            Some(bytes) => u64::from_be_bytes(*bytes),
            None => word_at_end(rest),
        };
        word << (self.taken % 8)
    }

    /// Passes `count` bits.
    #[inline(always)]
    pub(super) fn skip(&mut self, count: u32) {
        self.taken += count as usize;
    }

    /// The next `count` bits, 1 to 57.
    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u64 {
        let bits = first_bits(self.window(), count);
        self.skip(count);
        bits
    }

    /// Whether the bits that were taken are there, and what is left is no more than the zeros that
    /// make whole words of them.
    pub(super) fn is_at_end(&self) -> bool {
        let Some(left) = (8 * self.source.len()).checked_sub(self.taken) else { return false };
        // With less than a word left, the window has all of it.
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

/// What was to be written does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// Where bits go, in whole words.
pub(super) struct Writer<'a> {
    words: ChunksExactMut<'a, u8>,
    /// Words that were written.
    count: usize,
    /// The bits that are not yet written, from the highest on, and zeros.
    pending: u64,
    /// How many those are: 0 to 63.
    pending_bits: u32,
}

impl<'a> Writer<'a> {
    pub(super) fn new(dest: &'a mut [u8]) -> Self {
        let words = dest.chunks_exact_mut(WORD_BYTES);
        Writer { words, count: 0, pending: 0, pending_bits: 0 }
    }

    /// Appends `bits`, `count` of them, 1 to 64. Those above are 0.
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

    /// Fills up the last word; the bytes of all.
    pub(super) fn finish(mut self) -> Result<usize, Full> {
        if self.pending_bits > 0 {
            self.word(self.pending)?;
        }
        Ok(self.count * WORD_BYTES)
    }
}
