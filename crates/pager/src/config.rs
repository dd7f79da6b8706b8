//! What an engine is asked to do.

use std::fmt;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{self, DICTIONARY_BYTES, Params};
use zfolio_sys::words::Words;
use zfolio_sys::{Errno, files};

/// The smallest limit: staging, streams and tables take a few MiB, and the rest must make progress.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// How faults reach the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The faulting thread serves itself, in a handler of SIGBUS. No privilege needed; the kernel's
    /// own accesses (`read(2)` into a region) fail with `EFAULT`.
    Inline,
    /// Threads of the engine serve. The kernel's accesses work too.
    Handler,
}

/// An engine's settings, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Resident + staged + pool + metadata may have so many bytes.
    pub limit_bytes: u64,
    /// The codec.
    pub params: Params,
    /// What is compressed as one object.
    pub unit: UnitOrder,
    /// How faults are served.
    pub mode: Mode,
    /// The limit is the whole process's: what is not managed counts too.
    pub whole_process: bool,
    /// Stop the process rather than go over the limit.
    pub strict: bool,
}

/// `params` with the bytes of the dictionary that they name, if they do.
///
/// # Errors
///
/// The file cannot be read, or is no dictionary.
pub fn with_dictionary(params: Params) -> Result<Params, zcomp::Error> {
    params.with_dictionary(|path| {
        files::read_whole(path, *DICTIONARY_BYTES.end()).map_err(|errno| match errno {
            Errno::NOENT => "there is no such file".to_owned(),
            Errno::ACCESS | Errno::PERM => "it may not be read".to_owned(),
            Errno::ISDIR => "it is a directory; accepted is a file".to_owned(),
            Errno::FBIG => format!("accepted are at most {} bytes", DICTIONARY_BYTES.end()),
            other => format!("it cannot be read: {}", Words(other)),
        })
    })
}

/// An engine cannot be set up.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a userfaultfd.
    Userfaultfd {
        /// Its answer.
        errno: Errno,
    },
    /// The kernel refused memory or a registration.
    Memory {
        /// What was asked for.
        what: &'static str,
        /// Its answer.
        errno: Errno,
    },
    /// The codec cannot be set up.
    Codec(String),
    /// The limit is below [`LIMIT_BYTES_MIN`].
    LimitTooSmall {
        /// What was given.
        given: u64,
    },
    /// The unit is not a power of two of 4 KiB to 2 MiB.
    Unit {
        /// What was given.
        given: usize,
    },
    /// The algorithm is not known, or its level out of range.
    Algorithm(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Userfaultfd { errno: Errno::INVAL } => write!(
                f,
                "this kernel has no UFFDIO_MOVE: Linux 6.8 or later is needed (zfolio doctor tells more)"
            ),
            Error::Userfaultfd { errno } => {
                write!(f, "userfaultfd: {} (zfolio doctor tells what to do)", Words(*errno))
            }
            Error::Memory { what, errno } => write!(f, "{what}: {}", Words(*errno)),
            Error::Codec(why) | Error::Algorithm(why) => f.write_str(why),
            Error::LimitTooSmall { given } => {
                write!(f, "limit {given}: at least {LIMIT_BYTES_MIN} bytes are needed")
            }
            Error::Unit { given } => {
                write!(f, "unit {given}: a power of two from 4096 to 2097152 is accepted")
            }
        }
    }
}

impl std::error::Error for Error {}
