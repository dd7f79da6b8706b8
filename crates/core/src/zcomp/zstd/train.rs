//! Training of dictionaries, by the library of Zstandard.
//!
//! Only for a command: it allocates through the C library, and takes seconds.

use std::ffi::c_uint;

use super::super::{DICTIONARY_BYTES, Error};

/// Makes a dictionary of at most `bytes_max` bytes from `samples`, which are units one after the
/// other.
///
/// Samples of about a hundred times its length are enough.
///
/// # Errors
///
/// [`Error::Training`] if the samples are too few or have nothing in common, or if memory is short.
///
/// # Panics
///
/// If `bytes_max` is not in [`DICTIONARY_BYTES`], or `samples` does not consist of whole units.
pub fn train(samples: &[u8], unit_bytes: usize, bytes_max: usize) -> Result<Vec<u8>, Error> {
    assert!(DICTIONARY_BYTES.contains(&bytes_max), "{bytes_max}");
    assert_eq!(samples.len() % unit_bytes, 0, "whole units");
    let count = samples.len() / unit_bytes;
    let count_word = c_uint::try_from(count).map_err(|_| Error::Training { samples: count })?;
    let lengths = vec![unit_bytes; count];
    let mut dictionary = vec![0; bytes_max];
    // SAFETY: `dictionary` is writable for its length, `samples` readable for the sum of `lengths`, which are
    // `count`; none overlap because the first is exclusive.
    let written = unsafe {
        zstd_sys::ZDICT_trainFromBuffer(
            dictionary.as_mut_ptr().cast(),
            dictionary.len(),
            samples.as_ptr().cast(),
            lengths.as_ptr(),
            count_word,
        )
    };
    // SAFETY: a pure function of its argument.
    let failed = unsafe { zstd_sys::ZDICT_isError(written) } != 0;
    if failed || !DICTIONARY_BYTES.contains(&written) {
        return Err(Error::Training { samples: count });
    }
    dictionary.truncate(written);
    Ok(dictionary)
}

/// A trained dictionary without its tables of frequencies: only the bytes that come before every
/// unit.
///
/// At its faster levels zstd uses the tables even if they do not fit a unit, which can cost more
/// than the dictionary gains. A dictionary that was not trained is returned unchanged.
#[must_use]
pub fn without_tables(dictionary: &[u8]) -> &[u8] {
    // SAFETY: the dictionary is readable for its length; it returns an error for malformed contents.
    let header_bytes =
        unsafe { zstd_sys::ZDICT_getDictHeaderSize(dictionary.as_ptr().cast(), dictionary.len()) };
    dictionary.get(header_bytes..).filter(|rest| !rest.is_empty()).unwrap_or(dictionary)
}
