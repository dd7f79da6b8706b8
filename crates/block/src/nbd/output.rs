//! Replies on their way to the client.

use rustix::io::Errno;
use zfolio_sys::zeroed::zeroed;

use super::GATHER_BYTES;

/// What one step adds at most beside a piece of a read: headers. The descriptions of all exports are shorter than a
/// piece.
pub(super) const HEADERS_BYTES: usize = 1024;

/// Replies that are gathered, to be sent by one call. The memory is there from the beginning, and a reply is built
/// where it is sent from (`NBD-2`).
#[derive(Debug)]
pub struct Output {
    bytes: Box<[u8]>,
    filled: usize,
}

impl Output {
    /// An empty one, for pieces of reads up to this length ([`Exports::piece_bytes`](super::Exports::piece_bytes)).
    ///
    /// # Errors
    ///
    /// `NOMEM`.
    pub fn new(piece_bytes: usize) -> Result<Output, Errno> {
        Ok(Output { bytes: zeroed(GATHER_BYTES + piece_bytes + HEADERS_BYTES)?, filled: 0 })
    }

    /// What is to be sent.
    #[must_use]
    pub fn filled(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }

    /// All of it was sent.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// Whether it is time to send.
    pub(super) fn is_full(&self) -> bool {
        self.filled >= GATHER_BYTES
    }

    pub(super) fn len(&self) -> usize {
        self.filled
    }

    /// Drops what is behind the first `length` bytes.
    pub(super) fn truncate(&mut self, length: usize) {
        self.filled = self.filled.min(length);
    }

    /// Adds bytes whose contents are anything: the caller overwrites all of them, or drops them.
    pub(super) fn extend(&mut self, count: usize) -> &mut [u8] {
        let from = self.filled;
        self.filled += count;
        &mut self.bytes[from..self.filled]
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.extend(bytes.len()).copy_from_slice(bytes);
    }

    pub(super) fn push_u16(&mut self, number: u16) {
        self.push(&number.to_be_bytes());
    }

    pub(super) fn push_u32(&mut self, number: u32) {
        self.push(&number.to_be_bytes());
    }

    pub(super) fn push_u64(&mut self, number: u64) {
        self.push(&number.to_be_bytes());
    }

    /// Overwrites what was added before.
    pub(super) fn overwrite(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
