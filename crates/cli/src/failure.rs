//! The line that a command prints when it cannot continue, and the exit status that belongs to it.
//!
//! | status | meaning |
//! | --- | --- |
//! | 1 | `zfolio doctor`: `zfolio run` cannot work; `bench`: a result is wrong; standard output cannot be written |
//! | 2 | an argument: the line names it, what was given and what is accepted |
//! | 122 | `zfolio run --strict`: a program's limit could not be held (the library ends it with this status) |
//! | 125 | this machine or this installation: the line says what to do |
//! | 126 | PROGRAM is there, but cannot be executed, or cannot be managed |
//! | 127 | PROGRAM, or the interpreter that it names, was not found |
//! | 130 | `bench`, `corpus`: Ctrl-C; `suggest`: Ctrl-C ended the program; after another signal 128 and its number |

use std::fmt;
use std::io;

use crate::output::escaped;

/// Why a command ends early.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    status: u8,
    message: String,
}

impl Failure {
    /// An argument is not accepted.
    pub(crate) fn argument(message: impl Into<String>) -> Failure {
        Failure { status: 2, message: message.into() }
    }

    /// This machine or this installation cannot do what was requested.
    pub(crate) fn machine(message: impl Into<String>) -> Failure {
        Failure { status: 125, message: message.into() }
    }

    /// The output cannot be written.
    pub(crate) fn output(message: impl Into<String>) -> Failure {
        Failure { status: 1, message: message.into() }
    }

    /// The program cannot be executed, or cannot be managed.
    pub(crate) fn program(message: impl Into<String>) -> Failure {
        Failure { status: 126, message: message.into() }
    }

    /// The program was not found.
    pub(crate) fn not_found(message: impl Into<String>) -> Failure {
        Failure { status: 127, message: message.into() }
    }

    /// The program is there, and the kernel does not execute it, for this reason. As in a shell it counts as not found
    /// where the file that is missing is its interpreter or its loader.
    pub(crate) fn not_executed(message: impl Into<String>, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::NotFound => Failure::not_found(message),
            _ => Failure::program(message),
        }
    }

    /// Why, without the program's name.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The exit status.
    pub(crate) fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, even if a file name or a system's message contains line breaks.
        let line: Vec<&str> = self.message.split(['\n', '\r']).map(str::trim).collect();
        write!(f, "zfolio: {}", escaped(line.join(" ").trim_end()))
    }
}

#[cfg(test)]
mod tests {
    use super::Failure;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::argument("--limit: 'a\nb' is not a size\n");
        assert_eq!(failure.to_string(), "zfolio: --limit: 'a b' is not a size");
        assert_eq!(failure.status(), 2);
        let failure = Failure::program("'\x1b[2J' cannot be executed");
        assert_eq!(failure.to_string(), "zfolio: '\\u{1b}[2J' cannot be executed");
    }
}
