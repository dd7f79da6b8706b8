//! What a command prints.

use std::io::{self, ErrorKind, Write};

use crate::failure::Failure;

/// Writes `text` to standard output; false if nobody reads any more, who has then read enough.
///
/// # Errors
///
/// When it cannot be written: a full disk.
pub(crate) fn print(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::output(format!("standard output: {error}"))),
    }
}
