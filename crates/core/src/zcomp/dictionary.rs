//! Dictionaries: bytes that come before every unit, so that the unit can refer to them.
//!
//! Small units gain most, since they contain little to refer back to. Any file of typical data is a
//! dictionary. `zfolio dict train` makes a better one from captured memory: zstd uses all of it,
//! the other algorithms only its bytes. lz4 and lz4hc use the last 64 KiB, deflate the last
//! 2^window bytes.
//!
//! # Invariants
//!
//! - `DICT-1` The bytes never move and never change: codecs keep pointers to them, together with an
//!   `Arc` of the dictionary.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::RangeInclusive;

use super::Error;

/// Accepted lengths: from the least that zstd can train to eight times the length that it
/// recommends.
pub const DICTIONARY_BYTES: RangeInclusive<usize> = 256..=1 << 20;

/// A dictionary, or the name of one that is not read yet.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Dictionary {
    path: String,
    /// The bytes (`DICT-1`); empty if they are not read yet.
    bytes: Box<[u8]>,
}

impl Dictionary {
    /// The dictionary in the file `path`, not read yet.
    pub(super) fn unread(path: &str) -> Dictionary {
        Dictionary { path: path.to_owned(), bytes: Box::default() }
    }

    /// The dictionary of these bytes, which were read from `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Dictionary`] if its length is not in [`DICTIONARY_BYTES`], or if the path cannot be
    /// part of a parameter.
    pub fn new(path: &str, bytes: Vec<u8>) -> Result<Dictionary, Error> {
        let refused = |why| Err(Error::Dictionary { path: path.to_owned(), why });
        if path.is_empty() || path.contains(',') {
            return refused("its name is empty or has a ','; accepted: another".to_owned());
        }
        if !DICTIONARY_BYTES.contains(&bytes.len()) {
            let (low, high) = (DICTIONARY_BYTES.start(), DICTIONARY_BYTES.end());
            return refused(format!("{} bytes; accepted: {low} to {high}", bytes.len()));
        }
        Ok(Dictionary { path: path.to_owned(), bytes: bytes.into_boxed_slice() })
    }

    /// The path of its file.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The bytes; none if the dictionary is not read yet.
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
