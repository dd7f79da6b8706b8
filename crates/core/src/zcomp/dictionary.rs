//! Bytes that come before every unit: what they hold, a unit need only name.
//!
//! Small units gain most, since they have little history of their own. A dictionary is any file of typical
//! data; `zfolio dict train` makes a better one from captured memory, which zstd uses in full and the
//! others as bytes. lz4 and lz4hc use the last 64 KiB of it, deflate the last 2^window.
//!
//! # Invariants
//!
//! - `DICT-1` The bytes never move and never change: codecs keep pointers into them, beside an `Arc` of it.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::RangeInclusive;

use super::Error;

/// From what zstd can train to eight times what it recommends.
pub const DICTIONARY_BYTES: RangeInclusive<usize> = 256..=1 << 20;

/// A dictionary, or the name of one that is still to be read.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Dictionary {
    path: String,
    /// Empty if it is not read yet. `DICT-1`.
    bytes: Box<[u8]>,
}

impl Dictionary {
    /// The one that the file `path` holds; not read yet.
    pub(super) fn unread(path: &str) -> Dictionary {
        Dictionary { path: path.to_owned(), bytes: Box::default() }
    }

    /// The one of these bytes, read from `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Dictionary`] if it is longer or shorter than [`DICTIONARY_BYTES`], or if its name cannot
    /// stand in a parameter.
    pub fn new(path: &str, bytes: Vec<u8>) -> Result<Dictionary, Error> {
        let refused = |why| Err(Error::Dictionary { path: path.to_owned(), why });
        if path.is_empty() || path.contains(',') {
            return refused("accepted is a file without ',' in its name".to_owned());
        }
        if !DICTIONARY_BYTES.contains(&bytes.len()) {
            let (low, high) = (DICTIONARY_BYTES.start(), DICTIONARY_BYTES.end());
            return refused(format!("{} bytes: accepted are {low} to {high}", bytes.len()));
        }
        Ok(Dictionary { path: path.to_owned(), bytes: bytes.into_boxed_slice() })
    }

    /// Where it was read from.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What it holds; nothing if it is not read yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}', {} bytes", self.path, self.bytes.len())
    }
}

#[cfg(test)]
mod tests;
