//! Replies to requests, and why a request fails.

use super::output::Output;
use super::wire;
use crate::device::Error;

/// Why a request failed: a number of the protocol, and a text for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    pub(super) code: u32,
    text: &'static str,
}

const fn invalid(text: &'static str) -> Failure {
    Failure { code: wire::EINVAL, text }
}

impl Failure {
    pub(super) const COMMAND: Failure = invalid("this server does not know this command");
    pub(super) const FLAGS: Failure = invalid("the command does not have this flag");
    pub(super) const LONG: Failure = invalid("a request has 32 MiB at most");
    pub(super) const EMPTY: Failure = invalid("the request has no length");
    pub(super) const UNALIGNED: Failure =
        invalid("offset and length have to be multiples of 512 bytes");
    pub(super) const RANGE: Failure = invalid("the request ends beyond the end of the device");
    pub(super) const NOT_ZERO: Failure = invalid("a flush has neither offset nor length");
    pub(super) const NO_CONTEXT: Failure = invalid("no context was set for this export");
    pub(super) const BEYOND: Failure =
        Failure { code: wire::ENOSPC, text: "the write ends beyond the end of the device" };
    pub(super) const READ_ONLY: Failure =
        Failure { code: wire::EPERM, text: "the export is read-only" };

    /// Whether the request is not aligned, or beyond the end.
    pub(super) fn is_about_the_range(self) -> bool {
        [Failure::UNALIGNED, Failure::RANGE, Failure::BEYOND].contains(&self)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let (code, text) = match error {
            Error::Invalid => (wire::EINVAL, "the device refuses offset or length"),
            Error::NoSpace => (wire::ENOSPC, "the device is full"),
            Error::Io => (wire::EIO, "the contents cannot be read or written"),
            Error::NotPermitted => (wire::EPERM, "the device is read-only"),
            Error::NoMemory => (wire::ENOMEM, "no memory for the request"),
        };
        Failure { code, text }
    }
}

/// To whom replies go, and in which form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipient {
    pub(super) cookie: u64,
    pub(super) is_structured: bool,
}

impl Recipient {
    /// A simple reply, or its header if data follows.
    pub(super) fn simple(self, output: &mut Output, code: u32) {
        let header = output.extend(wire::SIMPLE_REPLY_BYTES);
        header[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        header[4..8].copy_from_slice(&code.to_be_bytes());
        header[8..].copy_from_slice(&self.cookie.to_be_bytes());
    }

    /// The header of a chunk.
    pub(super) fn chunk(self, output: &mut Output, flags: u16, kind: u16, bytes: u32) {
        let header = output.extend(wire::CHUNK_BYTES);
        header[..4].copy_from_slice(&wire::CHUNK_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&kind.to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..].copy_from_slice(&bytes.to_be_bytes());
    }

    /// Success, of a request without data in its reply. A simple reply is allowed with structured replies too, and
    /// shorter.
    pub(super) fn success(self, output: &mut Output) {
        self.simple(output, 0);
    }

    /// Failure of a request as a whole: the last chunk of its reply.
    pub(super) fn failure(self, output: &mut Output, failure: Failure) {
        self.fail(output, failure, None);
    }

    /// Failure of a read at an offset: the last chunk of its reply. Only if replies are structured.
    pub(super) fn failure_at(self, output: &mut Output, failure: Failure, at: u64) {
        self.fail(output, failure, Some(at));
    }

    fn fail(self, output: &mut Output, failure: Failure, at: Option<u64>) {
        if !self.is_structured {
            return self.simple(output, failure.code);
        }
        let text_bytes = u16::try_from(failure.text.len()).expect("the texts above are short");
        let (kind, fixed_bytes) = match at {
            None => (wire::REPLY_TYPE_ERROR, 6),
            Some(_) => (wire::REPLY_TYPE_ERROR_OFFSET, 14),
        };
        self.chunk(output, wire::REPLY_FLAG_DONE, kind, fixed_bytes + u32::from(text_bytes));
        output.push_u32(failure.code);
        output.push_u16(text_bytes);
        output.push(failure.text.as_bytes());
        if let Some(at) = at {
            output.push_u64(at);
        }
    }
}
