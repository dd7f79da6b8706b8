//! Printing to standard output.

use std::io;

use zfolio_sys::files;

use crate::failure::Failure;

/// Writes `text` to standard output; false if the reader has closed the pipe, which is not an
/// error.
///
/// # Errors
///
/// If it cannot be written, as on a full disk.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    files::print(text).map_err(|error| failed(&error))
}

/// Why standard output cannot be written.
pub(crate) fn failed(error: &io::Error) -> Failure {
    Failure::output(format!("standard output: {error}"))
}
