//! The settings of an engine, and its errors.

use std::fmt;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{self, Choice, DICTIONARY_BYTES, Params};
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::{Errno, files};
use zfolio_workers::Accelerated;

use crate::charge::OverLimit;
use crate::spill::{PlaceError, Places, Refusal};
use crate::wide;

/// The smallest limit: staging, streams and tables take a few MiB, and the rest must be enough for
/// the program to make progress.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// How the touch of a compressed page is served.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Mode {
    /// By the touching thread itself, in a handler of SIGBUS. This mode needs no permission. The
    /// kernel's own accesses are not served: `read(2)` into a compressed page, or `write(2)` from
    /// one, fails with `EFAULT`.
    #[default]
    Inline,
    /// By a thread of the pager. System calls work on compressed memory as on any other memory.
    /// This mode needs the permission that `zfolio run` needs: read and write on
    /// `/dev/userfaultfd`, `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd=1`.
    Handler,
}

/// An engine's settings, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The most bytes that resident + staged + pool + metadata may take together.
    pub limit_bytes: u64,
    /// The codec, or the two to choose from.
    pub algorithm: Choice,
    /// The size of what is compressed as one object.
    pub unit: UnitOrder,
    /// Four units may be stored as one object, where that pays ([`Config::wide_unit`]).
    pub wide_units: bool,
    /// How faults are served.
    pub mode: Mode,
    /// The limit is for the whole process: memory that is not managed counts too.
    pub whole_process: bool,
    /// Stop the process rather than go over the limit.
    pub strict: bool,
    /// Memory goes out also below the limit, as long as the program waits for less than so many
    /// millionths of its time. 0: only the limit counts.
    pub stall_ppm: u32,
    /// Where data goes that does not fit; without a path, nowhere.
    pub spill: Places,
    /// What compresses and decompresses beside the engine's own threads.
    pub accelerated: Accelerated,
    /// How many threads serve faults beside the handler, in handler mode. `None`: as many as the CPUs allow.
    pub assistants: Option<usize>,
}

impl Config {
    /// The size of wide units, if there are any: beside units of a page, with two codecs to choose from.
    #[must_use]
    pub fn wide_unit(&self) -> Option<UnitOrder> {
        let may = self.wide_units && self.algorithm == Choice::Auto && self.unit == UnitOrder::PAGE;
        may.then(|| wide::order(self.unit)).flatten()
    }

    /// The largest unit that is compressed as one object.
    pub(crate) fn object_max(&self) -> UnitOrder {
        self.wide_unit().unwrap_or(self.unit)
    }
}

/// Reads the dictionary that `params` name into them; without one they stay as they are.
///
/// # Errors
///
/// The file cannot be read, or is no dictionary.
pub fn with_dictionary(params: Params) -> Result<Params, zcomp::Error> {
    params.with_dictionary(|path| {
        files::read_whole(path, *DICTIONARY_BYTES.end()).map_err(|errno| match errno {
            Errno::NOENT => "there is no such file".to_owned(),
            Errno::ACCESS | Errno::PERM => "it may not be read".to_owned(),
            Errno::ISDIR => "it is a directory; accepted: a file".to_owned(),
            Errno::FBIG => {
                format!("it is too long; accepted: at most {} bytes", DICTIONARY_BYTES.end())
            }
            other => format!("it cannot be read: {}", ErrnoText(other)),
        })
    })
}

/// An engine cannot be set up.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a userfaultfd.
    Userfaultfd {
        /// How faults were to be served.
        mode: Mode,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The kernel refused memory or a registration.
    Memory {
        /// What was asked for.
        what: &'static str,
        /// The kernel's answer.
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
    /// More memory is held than the limit allows, because data does not compress. Nothing is lost;
    /// the program needs less data or a higher limit.
    OverLimit(OverLimit),
    /// There is nothing to spill to.
    Spill(PlaceError),
    /// The pager was made by another process, of which this one is a child: build a new one.
    Inherited,
    /// More pagers in inline mode than a process can have: drop one, or use one for several
    /// regions.
    TooManyPagers {
        /// How many there can be.
        most: usize,
    },
}

impl Error {
    /// Whether the machine, the kernel or a missing permission rules a pager out, whatever the
    /// settings: a test may skip, a program may go on with ordinary memory. A shortage, of descriptors or of memory, is
    /// none of these.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        let Error::Userfaultfd { errno, .. } = self else { return false };
        matches!(
            *errno,
            Errno::INVAL | Errno::PERM | Errno::ACCESS | Errno::NOSYS | Errno::NOENT | Errno::NODEV
        )
    }

    /// The kernel's answer, if it was the kernel that refused.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Error::Userfaultfd { errno, .. } | Error::Memory { errno, .. } => {
                Some(errno.raw_os_error())
            }
            Error::Spill(
                PlaceError::System { errno, .. }
                | PlaceError::Path(Refusal::NotWritable { errno, .. }),
            ) => Some(errno.raw_os_error()),
            _ => None,
        }
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> std::io::Error {
        let kind = match &error {
            error if error.is_unsupported() => std::io::ErrorKind::Unsupported,
            Error::Userfaultfd { .. } => std::io::ErrorKind::Other,
            Error::Memory { .. } | Error::OverLimit(_) => std::io::ErrorKind::OutOfMemory,
            _ => std::io::ErrorKind::InvalidInput,
        };
        std::io::Error::new(kind, error)
    }
}

/// Prints what the kernel's refusal of a userfaultfd means, and what to do.
fn tell_refusal(f: &mut fmt::Formatter<'_>, mode: Mode, errno: Errno) -> fmt::Result {
    match (errno, mode) {
        (Errno::INVAL, _) => f.write_str(
            "this kernel has no UFFDIO_MOVE: Linux 6.8 or later is needed (zfolio doctor shows more)",
        ),
        (Errno::PERM | Errno::ACCESS, Mode::Handler) => write!(
            f,
            "no permission for a userfaultfd that serves system calls ({}): needed is one of read and \
             write permission on /dev/userfaultfd (the group zfolio has it where the udev rule is \
             installed), CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1; the library's inline mode needs none of them",
            ErrnoText(errno)
        ),
        (Errno::PERM | Errno::NOSYS, _) => write!(
            f,
            "userfaultfd: {}: a sandbox refuses the system call, or the kernel was built without it \
             (zfolio doctor shows more)",
            ErrnoText(errno)
        ),
        _ => write!(f, "userfaultfd: {} (zfolio doctor shows what to do)", ErrnoText(errno)),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Userfaultfd { mode, errno } => tell_refusal(f, *mode, *errno),
            Error::Memory { what, errno } => write!(f, "{what}: {}", ErrnoText(*errno)),
            Error::Codec(why) | Error::Algorithm(why) => f.write_str(why),
            Error::LimitTooSmall { given } => {
                write!(f, "limit {given}: at least {LIMIT_BYTES_MIN} bytes are needed")
            }
            Error::Unit { given } => {
                write!(f, "unit {given}: a power of two from 4096 to 2097152 is accepted")
            }
            Error::OverLimit(over) => over.fmt(f),
            Error::Spill(why) => why.fmt(f),
            Error::Inherited => {
                f.write_str("the pager was made by another process, of which this one is a child")
            }
            Error::TooManyPagers { most } => {
                write!(f, "more than {most} pagers in inline mode in one process")
            }
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::{Errno, Error, Mode, PlaceError};

    /// Goal: a shortage, which may be over soon, does not read as a machine that cannot have a pager: a program would
    /// go on without any limit.
    #[test]
    fn a_shortage_is_not_a_machine_without_support() {
        let refused = |errno| Error::Userfaultfd { mode: Mode::Inline, errno };
        for errno in [Errno::INVAL, Errno::PERM, Errno::ACCESS, Errno::NOSYS, Errno::NOENT] {
            assert!(refused(errno).is_unsupported(), "{errno:?}");
            assert_eq!(std::io::Error::from(refused(errno)).kind(), ErrorKind::Unsupported);
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(!refused(errno).is_unsupported(), "{errno:?}");
            assert_eq!(refused(errno).raw_os_error(), Some(errno.raw_os_error()));
            assert_eq!(std::io::Error::from(refused(errno)).kind(), ErrorKind::Other);
        }
    }

    #[test]
    fn the_answer_about_a_place_to_spill_to_is_kept() {
        let error = Error::Spill(PlaceError::System { what: "a key", errno: Errno::NOMEM });
        assert_eq!(error.raw_os_error(), Some(Errno::NOMEM.raw_os_error()));
        assert_eq!(Error::Spill(PlaceError::Nowhere).raw_os_error(), None);
    }
}
