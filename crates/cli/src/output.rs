//! What a command prints.

use zfolio_sys::files;

use crate::failure::Failure;

/// Writes `text` to standard output; false if nobody reads any more, who has then read enough.
///
/// # Errors
///
/// When it cannot be written: a full disk.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    files::print(text).map_err(|error| Failure::output(format!("standard output: {error}")))
}
