//! Text that is printed.

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

/// A name for a line of text, with its control characters escaped: `\n`, `\u{1b}`. A file or process may be called
/// anything, and a terminal obeys such characters.
pub(crate) fn escaped(name: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    name.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn a_name_cannot_command_the_terminal() {
        assert_eq!(escaped("a\nb\x1b[2J\u{9b}c"), "a\\nb\\u{1b}[2J\\u{9b}c");
        assert_eq!(escaped("'a b' \\ \"日本語\""), "'a b' \\ \"日本語\"");
    }
}
