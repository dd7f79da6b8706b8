//! Texts for errors, without the use of memory.
//!
//! The C library's texts are translated, and the translations lie in the program's memory, which
//! the engine's threads must not touch.

use std::fmt;

use rustix::io::Errno;

/// An error, to be displayed.
#[derive(Clone, Copy, Debug)]
pub struct ErrnoText(pub Errno);

impl fmt::Display for ErrnoText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.0 {
            Errno::PERM => "not permitted",
            Errno::ACCESS => "permission denied",
            Errno::NOMEM => "no memory",
            Errno::MFILE => "too many open files in this process",
            Errno::NFILE => "too many open files in the system",
            Errno::NOSYS => "not known to this kernel",
            Errno::NOENT => "no such file",
            Errno::AGAIN => "not available now",
            Errno::IO => "input/output error",
            Errno::NODEV | Errno::NXIO => "no such device any more",
            other => return write!(f, "errno {}", other.raw_os_error()),
        };
        f.write_str(words)
    }
}
