//! The numbers of the protocol, and how they lie in messages: big-endian, without padding.
//!
//! The names are those of the protocol's text, without `NBD_`:
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

/// The server's first words, and the magic number of options.
pub(super) const MAGIC: u64 = 0x4e42_444d_4147_4943;
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Lengths of headers.
pub(super) const CLIENT_FLAGS_BYTES: usize = 4;
pub(super) const OPTION_BYTES: usize = 16;
pub(super) const REQUEST_BYTES: usize = 28;
pub(super) const SIMPLE_REPLY_BYTES: usize = 16;
pub(super) const CHUNK_BYTES: usize = 20;

/// Handshake flags, the server's and the client's.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;
pub(super) const FLAG_C_FIXED_NEWSTYLE: u32 = 1 << 0;
pub(super) const FLAG_C_NO_ZEROES: u32 = 1 << 1;

/// Options.
pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;

/// Replies to options.
pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERROR + 1;
pub(super) const REP_ERR_INVALID: u32 = REP_ERROR + 3;
pub(super) const REP_ERR_TLS_REQD: u32 = REP_ERROR + 5;
pub(super) const REP_ERR_UNKNOWN: u32 = REP_ERROR + 6;
pub(super) const REP_ERR_TOO_BIG: u32 = REP_ERROR + 9;

/// What `OPT_INFO` and `OPT_GO` ask for.
pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_DESCRIPTION: u16 = 2;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags.
pub(super) const FLAG_HAS_FLAGS: u16 = 1 << 0;
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(super) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(super) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const FLAG_SEND_DF: u16 = 1 << 7;
pub(super) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const FLAG_SEND_CACHE: u16 = 1 << 10;
pub(super) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Commands, and their flags.
pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_CACHE: u16 = 5;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
pub(super) const CMD_BLOCK_STATUS: u16 = 7;
pub(super) const CMD_FLAG_FUA: u16 = 1 << 0;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_DF: u16 = 1 << 2;
pub(super) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

/// Structured replies: a flag, and the types of chunks.
pub(super) const REPLY_FLAG_DONE: u16 = 1 << 0;
pub(super) const REPLY_TYPE_NONE: u16 = 0;
pub(super) const REPLY_TYPE_OFFSET_DATA: u16 = 1;
pub(super) const REPLY_TYPE_OFFSET_HOLE: u16 = 2;
pub(super) const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
pub(super) const REPLY_TYPE_ERROR: u16 = (1 << 15) + 1;
pub(super) const REPLY_TYPE_ERROR_OFFSET: u16 = (1 << 15) + 2;

/// The state of a range in `base:allocation`.
pub(super) const STATE_HOLE: u32 = 1 << 0;
pub(super) const STATE_ZERO: u32 = 1 << 1;

/// Errors: Linux's numbers, but the protocol's list.
pub(super) const EPERM: u32 = 1;
pub(super) const EIO: u32 = 5;
pub(super) const ENOMEM: u32 = 12;
pub(super) const EINVAL: u32 = 22;
pub(super) const ENOSPC: u32 = 28;

/// What is left of a message. Each call takes something off its front; `None`: the message is too short.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length of 32 bits, and as many bytes.
    pub(super) fn counted(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).ok()?)
    }
}
