//! Printing to standard output.

use zfolio_sys::files;

use crate::failure::Failure;

/// Writes `text` to standard output; false if the reader has closed the pipe, which is not an
/// error.
///
/// # Errors
///
/// If it cannot be written, as on a full disk.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    files::print(text).map_err(|error| Failure::output(format!("standard output: {error}")))
}
