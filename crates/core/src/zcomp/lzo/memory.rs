//! Reading and writing bytes: all `unsafe` code of the codec.
//!
//! The encoder and the decoder are safe code. This costs little speed: most checks here are
//! required by the format anyway. The unsafe operations are loads and stores of 8 and 16 bytes of
//! which fewer may be needed, and copies in such steps. They may exceed the requested length, but
//! never the buffer.
//!
//! # Invariants
//!
//! - `LM-1` `Output::at <= Output::dest.len()`. Only this file can change either.
//! - `LM-2` `Window::last + 16 == Window::bytes.len()`. Neither changes.

#![allow(unsafe_code, reason = "stores that may run over, inside of what is there")]

use std::ptr;

/// How many bytes both buffers must have after the end of a fast copy.
const SLACK_BYTES: usize = 32;

/// The bytes to compress, at least 16 of them.
#[derive(Clone, Copy)]
pub(super) struct Window<'a> {
    bytes: &'a [u8],
    /// The position of the last 16 bytes (`LM-2`).
    last: usize,
}

impl<'a> Window<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.len().checked_sub(16).map(|last| Window { bytes, last })
    }

    #[inline(always)]
    pub(super) fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The last position that can be read.
    #[inline(always)]
    pub(super) fn last(self) -> usize {
        self.last
    }

    /// The 16 bytes at `at`.
    #[inline(always)]
    pub(super) fn chunk(self, at: usize) -> [u8; 16] {
        assert!(at <= self.last, "the encoder stays inside its window");
        // SAFETY: `at <= last`, so by LM-2 it is inside of the bytes.
        let from = unsafe { self.bytes.as_ptr().add(at) };
        // SAFETY: by LM-2 16 bytes from `at <= last` on are inside of the bytes, and any bytes are
        // an array of them.
        unsafe { from.cast::<[u8; 16]>().read() }
    }

    /// The 8 bytes at `at`, the first one lowest.
    ///
    /// JUSTIFICATION: a range of a slice checks two bounds, this checks one, in the hottest loop.
    #[inline(always)]
    pub(super) fn word(self, at: usize) -> u64 {
        assert!(at <= self.last, "the encoder stays inside its window");
        // SAFETY: `at <= last`, so by LM-2 it is inside of the bytes.
        let from = unsafe { self.bytes.as_ptr().add(at) };
        // SAFETY: by LM-2 16 bytes from `at <= last` on are inside of the bytes, and any 8 bytes
        // are a word.
        u64::from_le(unsafe { from.cast::<u64>().read_unaligned() })
    }
}

/// The destination, written from the first byte to the last.
pub(super) struct Output<'a> {
    dest: &'a mut [u8],
    /// How many bytes are written (`LM-1`).
    at: usize,
}

/// The bytes to write do not fit, or the bytes to repeat lie before the first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Overrun;

/// `REPEAT[d] * x` repeats the `d` lowest bytes of `x`; all other bytes of `x` are 0.
const REPEAT: [u64; 9] = [
    0,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0001_0000_0100_0001,
    0x0000_0001_0000_0001,
    0x0000_0100_0000_0001,
    0x0001_0000_0000_0001,
    0x0100_0000_0000_0001,
    1,
];

/// How many bytes of a word whole repetitions of `d` bytes fill.
const REPEAT_BYTES: [usize; 9] = [0, 8, 8, 6, 8, 5, 6, 7, 8];

impl Output<'_> {
    pub(super) fn new(dest: &mut [u8]) -> Output<'_> {
        Output { dest, at: 0 }
    }

    /// How many bytes are written.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.at
    }

    /// How many more bytes fit.
    #[inline(always)]
    pub(super) fn room(&self) -> usize {
        self.dest.len() - self.at
    }

    /// The address of the next byte.
    #[inline(always)]
    fn end(&mut self) -> *mut u8 {
        // SAFETY: by LM-1 this is inside of `dest`, or its end.
        unsafe { self.dest.as_mut_ptr().add(self.at) }
    }

    /// Runs `write` on a copy of `self`: with a pointer to `self`, `at` would not stay in a
    /// register. `write` returns its [`Self::len`].
    #[inline(always)]
    pub(super) fn aside(
        &mut self,
        write: impl FnOnce(Output<'_>) -> Result<usize, Overrun>,
    ) -> Result<(), Overrun> {
        let at = write(Output { dest: self.dest, at: self.at })?;
        if at > self.dest.len() {
            return Err(Overrun);
        }
        self.at = at;
        Ok(())
    }

    /// Sets `bits` in the byte that is `back` bytes before the next one.
    #[inline(always)]
    pub(super) fn set_bits(&mut self, back: usize, bits: u8) -> Result<(), Overrun> {
        *self.dest.get_mut(self.at.wrapping_sub(back)).ok_or(Overrun)? |= bits;
        Ok(())
    }

    /// Appends the `count` lowest bytes of `word`, the lowest first; `count <= 8`.
    #[inline(always)]
    pub(super) fn put(&mut self, word: u64, count: usize) -> Result<(), Overrun> {
        debug_assert!(count <= 8);
        if self.room() < 8 {
            return self.aside(|output| output.put_exactly(word, count));
        }
        let to = self.end();
        // SAFETY: the room is 8 bytes or more.
        unsafe { to.cast::<u64>().write_unaligned(word.to_le()) };
        self.at += count.min(8);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn put_exactly(mut self, word: u64, count: usize) -> Result<usize, Overrun> {
        self.put_slice(word.to_le_bytes().get(..count).ok_or(Overrun)?)?;
        Ok(self.at)
    }

    #[inline(always)]
    fn put_slice(&mut self, bytes: &[u8]) -> Result<(), Overrun> {
        let dest = self.dest.get_mut(self.at..).ok_or(Overrun)?;
        dest.get_mut(..bytes.len()).ok_or(Overrun)?.copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }

    /// Appends the `head.1` lowest bytes of `head.0`, the first `middle.1` of `middle.0` and the
    /// `tail.1` lowest of `tail.0`, with one check of the room.
    #[inline(always)]
    pub(super) fn append(
        &mut self,
        head: (u64, usize),
        middle: ([u8; 16], usize),
        tail: (u64, usize),
    ) -> Result<(), Overrun> {
        debug_assert!(head.1 <= 8 && middle.1 <= 16 && tail.1 <= 8);
        // 8 + 16 + 8.
        if self.room() < 32 {
            return self.aside(|output| output.append_exactly(head, middle, tail));
        }
        let to = self.end();
        // SAFETY: the room is 32 bytes or more.
        unsafe { to.cast::<u64>().write_unaligned(head.0.to_le()) };
        // SAFETY: 8 of the 32 bytes at the most.
        let to = unsafe { to.add(head.1.min(8)) };
        // SAFETY: at least 32 - 8 bytes are left.
        unsafe { to.cast::<[u8; 16]>().write(middle.0) };
        // SAFETY: 16 of the 24 bytes at the most.
        let to = unsafe { to.add(middle.1.min(16)) };
        // SAFETY: at least 32 - 8 - 16 bytes are left.
        unsafe { to.cast::<u64>().write_unaligned(tail.0.to_le()) };
        self.at += head.1.min(8) + middle.1.min(16) + tail.1.min(8);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn append_exactly(
        mut self,
        head: (u64, usize),
        middle: ([u8; 16], usize),
        tail: (u64, usize),
    ) -> Result<usize, Overrun> {
        self.put(head.0, head.1)?;
        self.put_slice(middle.0.get(..middle.1).ok_or(Overrun)?)?;
        self.put(tail.0, tail.1)?;
        Ok(self.at)
    }

    /// Appends `count` bytes of value `byte`.
    #[inline(always)]
    pub(super) fn fill(&mut self, byte: u8, count: usize) -> Result<(), Overrun> {
        let dest = self.dest.get_mut(self.at..).ok_or(Overrun)?;
        dest.get_mut(..count).ok_or(Overrun)?.fill(byte);
        self.at += count;
        Ok(())
    }

    /// Appends the first `count` of `bytes`. Fast if both buffers have [`SLACK_BYTES`] more than
    /// that.
    #[inline(always)]
    pub(super) fn copy(&mut self, bytes: &[u8], count: usize) -> Result<(), Overrun> {
        let spare = self.room().min(bytes.len());
        if count.saturating_add(SLACK_BYTES) > spare {
            return self.put_slice(bytes.get(..count).ok_or(Overrun)?);
        }
        let (from, to) = (bytes.as_ptr(), self.end());
        let mut done = 0;
        loop {
            // SAFETY: `done` is 0 or less than `count`, and `bytes` has SLACK_BYTES after `count`:
            // 32 bytes are here.
            let from = unsafe { from.add(done) };
            // SAFETY: likewise the room.
            let to = unsafe { to.add(done) };
            // SAFETY: 32 bytes are on both sides (above), and `dest` is exclusive, so that they
            // do not overlap.
            unsafe { ptr::copy_nonoverlapping(from, to, 32) };
            done += 32;
            if done >= count {
                break;
            }
        }
        self.at += count;
        Ok(())
    }

    /// Appends `length` bytes, each equal to the one `distance` before it.
    #[inline(always)]
    pub(super) fn repeat(&mut self, distance: usize, length: usize) -> Result<(), Overrun> {
        // A distance of 0 wraps to the largest number.
        if distance.wrapping_sub(1) >= self.at {
            return Err(Overrun);
        }
        if length.saturating_add(SLACK_BYTES) > self.room() {
            return self.aside(|output| output.repeat_to_end(distance, length));
        }
        let to = self.end();
        // SAFETY: `distance <= at`, so this is inside of `dest`.
        let from = unsafe { to.sub(distance) };
        if distance >= 16 {
            // SAFETY: `from` is `distance >= 16` before `to`, inside of `dest`, where the room is
            // `length + SLACK_BYTES` or more.
            unsafe { copy_16s(from, to, length) };
        } else if distance > 8 {
            // SAFETY: likewise, with `distance > 8`.
            unsafe { copy_8s(from, to, length) };
        } else {
            // SAFETY: `from` is before `to`, where the room is `length + SLACK_BYTES` or more; any
            // 8 bytes are a word.
            let word = u64::from_le(unsafe { from.cast::<u64>().read_unaligned() });
            let word = word & u64::MAX >> (64 - 8 * distance);
            // SAFETY: `1 <= distance <= 8`, so the step is 5 to 8 bytes, and the room is
            // `length + SLACK_BYTES` or more.
            unsafe {
                fill_8s(word.wrapping_mul(REPEAT[distance]), REPEAT_BYTES[distance], to, length)
            };
        }
        self.at += length;
        Ok(())
    }

    /// The last [`SLACK_BYTES`], one byte at a time.
    #[cold]
    #[inline(never)]
    fn repeat_to_end(mut self, distance: usize, length: usize) -> Result<usize, Overrun> {
        if length > self.room() {
            return Err(Overrun);
        }
        let end = self.at + length;
        let quick = self.room().saturating_sub(SLACK_BYTES);
        if quick > 0 {
            // `quick + SLACK_BYTES` is the room, so the call does not come back here; and `quick <
            // length`, or this function would not have been called.
            self.repeat(distance, quick)?;
        }
        for at in self.at..end {
            self.dest[at] = self.dest[at - distance];
        }
        Ok(end)
    }
}

/// Copies `length` bytes in steps of 16, and up to 15 bytes more; 16 bytes if `length` is 0.
///
/// # Safety
///
/// `from` is 16 bytes or more before `to`, in the same object, which is writable up to
/// `length + SLACK_BYTES` bytes from `to` on.
#[inline(always)]
unsafe fn copy_16s(from: *const u8, to: *mut u8, length: usize) {
    let mut done = 0;
    loop {
        // SAFETY: `done` is 0 or less than `length`: this is before `to + length`.
        let from = unsafe { from.add(done) };
        // SAFETY: likewise.
        let to = unsafe { to.add(done) };
        // SAFETY: 16 bytes are there from `to` on, because of the slack, and so are they before
        // it; `from` is 16 bytes or more before `to`, so that they do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to, 16) };
        done += 16;
        if done >= length {
            return;
        }
    }
}

/// Copies `length` bytes in steps of 8, and up to 7 bytes more; 8 bytes if `length` is 0.
///
/// # Safety
///
/// `from` is 8 bytes or more before `to`, in the same object, which is writable up to
/// `length + SLACK_BYTES` bytes from `to` on.
#[inline(always)]
unsafe fn copy_8s(from: *const u8, to: *mut u8, length: usize) {
    let mut done = 0;
    loop {
        // SAFETY: `done` is 0 or less than `length`: this is before `to + length`.
        let from = unsafe { from.add(done) };
        // SAFETY: likewise.
        let to = unsafe { to.add(done) };
        // SAFETY: 8 bytes are there from `to` on, because of the slack, and so are they before it;
        // `from` is 8 bytes or more before `to`, so that they do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to, 8) };
        done += 8;
        if done >= length {
            return;
        }
    }
}

/// Writes `word` every `step` bytes until `length` bytes are written, and up to 7 bytes more.
///
/// # Safety
///
/// `step` is 1 to 8, and `length + SLACK_BYTES` bytes from `to` on are writable.
#[inline(always)]
unsafe fn fill_8s(word: u64, step: usize, to: *mut u8, length: usize) {
    let mut done = 0;
    loop {
        // SAFETY: `done` is 0 or less than `length`: this is before `to + length`.
        let to = unsafe { to.add(done) };
        // SAFETY: 8 bytes are there because of the slack.
        unsafe { to.cast::<u64>().write_unaligned(word.to_le()) };
        done += step;
        if done >= length {
            return;
        }
    }
}
