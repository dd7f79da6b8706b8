//! The structures that driver and device exchange through memory, and the numbers in them.
//!
//! Sources: `linux/idxd.h` for descriptor, record, opcodes and statuses (a test compiles a comparison with the header
//! of the machine); the published `iaa_crypto` driver and Intel's Query Processing Library (QPL) for the AECS
//! ("analytics engine configuration and state"), the flags of the two codecs and the error codes.

use std::mem::offset_of;

/// One job, as the device reads it: `struct iax_hw_desc`.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Address space of the submitter; `enqcmd` and the queue's configuration fill it in. Bit 31: privileged.
    pub pasid: u32,
    /// Flags in the low 24 bits ([`flag`]), the opcode above ([`opcode`]).
    pub flags_opcode: u32,
    /// Address of the [`Record`].
    pub record: u64,
    /// Address of the bytes to read.
    pub source: u64,
    /// Address of the bytes to write.
    pub dest: u64,
    /// Bytes to read.
    pub source_bytes: u32,
    /// Interrupt handle; not used, since the driver polls.
    pub interrupt: u16,
    /// Flags of the codec ([`compress`], [`decompress`]).
    pub codec_flags: u16,
    /// Address of the AECS.
    pub aecs: u64,
    /// Bytes that may be written.
    pub dest_bytes_max: u32,
    /// Bytes of the AECS.
    pub aecs_bytes: u32,
    /// Flags of the filter operations; not used.
    pub filter_flags: u32,
    /// Elements of the filter operations; not used.
    pub inputs: u32,
}

impl Descriptor {
    /// The operation.
    #[must_use]
    pub fn opcode(&self) -> u8 {
        self.flags_opcode.to_le_bytes()[3]
    }

    /// The flags, without the operation.
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.flags_opcode & 0x00FF_FFFF
    }
}

/// What the device writes when a job has ended: `struct iax_completion_record`. The status is written last.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    /// How the job ended ([`status`]); 0 until then. Bit 7: the page fault was a write.
    pub status: u8,
    /// Why, if the status is [`status::ANALYTICS_ERROR`] ([`error`]).
    pub error: u8,
    /// More on a page fault.
    pub fault_info: u8,
    /// Zero.
    pub reserved: u8,
    /// Bytes of the source that were processed.
    pub bytes_completed: u32,
    /// The address whose page was missing.
    pub fault_address: u64,
    /// Which flags of the descriptor were refused.
    pub invalid_flags: u32,
    /// Zero.
    pub reserved2: u32,
    /// Bytes that were written, or would have been ([`decompress::SUPPRESS_OUTPUT`]).
    pub output_bytes: u32,
    /// Bits of the last byte that count.
    pub output_bits: u8,
    /// Zero.
    pub reserved3: u8,
    /// Exclusive or of the 16-bit words of the data before compression.
    pub xor: u16,
    /// CRC-32 of the data before compression.
    pub crc: u32,
    /// Of the filter operations.
    pub min: u32,
    /// Of the filter operations.
    pub max: u32,
    /// Of the filter operations.
    pub sum: u32,
    /// Zero.
    pub reserved4: [u64; 2],
}

/// What a compression starts from: the bits that are already in the output, and the Huffman codes.
/// `struct aecs_comp_table_record`.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub struct AecsCompress {
    /// CRC of what came before.
    pub crc: u32,
    /// Exclusive or of what came before.
    pub xor: u32,
    /// Zero.
    pub reserved: [u32; 5],
    /// How many bits of `output` there are.
    pub output_bits: u32,
    /// The first bits of the stream: the header of the block.
    pub output: [u8; 256],
    /// Codes of literals and lengths, as [`code`] makes them.
    pub literals: [u32; 286],
    /// Zero.
    pub reserved2: [u32; 2],
    /// Codes of distances.
    pub distances: [u32; 30],
    /// Zero.
    pub reserved3: [u32; 2],
}

/// What a decompression starts from, if not from nothing: the state of the filter, of the parser and the last 4 KiB.
/// Fields that no published code uses by name are bytes. The driver needs none of it: its jobs are whole streams.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub struct AecsDecompress {
    /// CRC of what came before.
    pub crc: u32,
    /// Exclusive or of what came before.
    pub xor: u32,
    /// Low and high limit of the filter, index and bytes to drop.
    pub filter: [u32; 4],
    /// Zero.
    pub reserved: [u32; 36],
    /// Bits of output that are not written yet.
    pub output_accumulator: [u32; 2],
    /// How many there are.
    pub output_bits: u32,
    /// Where the index is.
    pub index_bit: u32,
    /// Bits of input that are not parsed yet.
    pub input_accumulator: [u64; 32],
    /// How many there are in each word.
    pub input_bits: [u8; 32],
    /// Tables of the parser.
    pub tables: [u32; 151],
    /// What the parser expects, in its low four bits.
    pub state: u16,
    /// Zero.
    pub reserved2: u16,
    /// More tables of the parser.
    pub tables2: [u32; 43],
    /// Bits 0 to 14: where `history` goes on; bit 15: it has been round.
    pub history_at: u16,
    /// Zero.
    pub reserved3: u16,
    /// The last [`WINDOW_BYTES`] of output.
    pub history: [u8; WINDOW_BYTES],
    /// Zero.
    pub reserved4: [u32; 6],
}

/// Bytes of the AECS of a compression, as a descriptor says them.
#[expect(clippy::cast_possible_truncation, reason = "1568")]
pub const AECS_BYTES: u32 = size_of::<AecsCompress>() as u32;

/// How far back a match of the device refers, and how far back one may refer that it decompresses.
pub const WINDOW_BYTES: usize = 4096;

/// The longest source that is compressed with a header of its own in one pass.
pub const ONE_PASS_BYTES_MAX: usize = 4096;

const _: () = {
    assert!(size_of::<Descriptor>() == 64 && size_of::<Record>() == 64);
    assert!(size_of::<AecsCompress>() == 1568 && size_of::<AecsDecompress>() == 5376);
    assert!(offset_of!(Descriptor, codec_flags) == 38 && offset_of!(Descriptor, inputs) == 60);
    assert!(offset_of!(Record, output_bytes) == 24 && offset_of!(Record, reserved4) == 48);
    assert!(offset_of!(AecsCompress, output) == 32 && offset_of!(AecsCompress, literals) == 288);
    assert!(offset_of!(AecsCompress, distances) == 1440);
    assert!(offset_of!(AecsDecompress, input_accumulator) == 184);
    assert!(
        offset_of!(AecsDecompress, state) == 1076 && offset_of!(AecsDecompress, history) == 1256
    );
};

/// Operations of the device that the driver uses.
pub mod opcode {
    /// Does nothing but write a record.
    pub const NOOP: u8 = 0;
    /// Raw deflate to data.
    pub const DECOMPRESS: u8 = 0x42;
    /// Data to raw deflate.
    pub const COMPRESS: u8 = 0x43;
}

/// Flags of a descriptor, `IDXD_OP_FLAG_*`.
pub mod flag {
    /// The device waits for a page that is missing, if the queue allows that. Otherwise the job ends.
    pub const BLOCK_ON_FAULT: u32 = 0x2;
    /// The address of the record is valid.
    pub const RECORD_VALID: u32 = 0x4;
    /// Write a record whatever happens.
    pub const RECORD_WANTED: u32 = 0x8;
    /// Write the result to the cache.
    pub const CACHE: u32 = 0x100;
    /// Read the AECS.
    pub const READ_AECS: u32 = 0x1_0000;
}

/// Flags of a compression.
pub mod compress {
    /// Fill the last byte with zeros, and write it.
    pub const FLUSH_OUTPUT: u16 = 1 << 1;
    /// Write the code of the end of the block.
    pub const APPEND_END: u16 = 1 << 2;
    /// Make codes for this source, and write their header as that of a last block.
    pub const ONE_PASS_LAST: u16 = 3 << 12;
}

/// Flags of a decompression.
pub mod decompress {
    /// Decompress at all.
    pub const ENABLE: u16 = 1 << 0;
    /// Write the last bytes.
    pub const FLUSH_OUTPUT: u16 = 1 << 1;
    /// Stop at the end of a block, and fail if the source has none: one bit each, always used together.
    pub const STOP_AND_CHECK: u16 = 3 << 2;
    /// By the end of a block, that of the last one is meant.
    pub const LAST_BLOCK: u16 = 1 << 4;
    /// Write nothing, but compute the checksums.
    pub const SUPPRESS_OUTPUT: u16 = 1 << 9;
}

/// How a job ended, `IAX_COMP_*`.
pub mod status {
    /// It has not.
    pub const NONE: u8 = 0;
    /// All is done.
    pub const SUCCESS: u8 = 0x01;
    /// A page was missing and the descriptor did not ask to wait for it, as devices of the family number it.
    pub const PAGE_FAULT_NO_BLOCK: u8 = 0x03;
    /// A page was missing.
    pub const PAGE_FAULT: u8 = 0x04;
    /// The engine failed; [`super::error`] says why.
    pub const ANALYTICS_ERROR: u8 = 0x0A;
    /// The output does not fit.
    pub const OUTPUT_OVERFLOW: u8 = 0x0B;
    /// The device has no such operation, or the queue does not allow it.
    pub const BAD_OPCODE: u8 = 0x10;
    /// Refused flags.
    pub const INVALID_FLAGS: u8 = 0x11;
    /// A reserved field is not zero.
    pub const NONZERO_RESERVED: u8 = 0x12;
    /// A length is 0 or too large.
    pub const INVALID_SIZE: u8 = 0x13;
    /// Source and destination overlap.
    pub const OVERLAPPING: u8 = 0x16;
    /// The interrupt handle is not valid.
    pub const INVALID_INTERRUPT: u8 = 0x19;
    /// The address of the record could not be translated.
    pub const RECORD_TRANSLATION: u8 = 0x1A;
    /// The record is not aligned by 64 bytes.
    pub const RECORD_ALIGNMENT: u8 = 0x1B;
    /// The AECS is not aligned by 32 bytes.
    pub const ADDRESS_ALIGNMENT: u8 = 0x1C;
    /// Privileged mode is not allowed.
    pub const PRIVILEGE: u8 = 0x1D;
    /// The traffic class is not configured as the flags say.
    pub const TRAFFIC_CLASS: u8 = 0x1E;
    /// A page of the record's address was missing.
    pub const RECORD_PAGE_FAULT: u8 = 0x1F;
    /// The hardware failed.
    pub const HARDWARE: u8 = 0x20;
    /// The hardware failed while it drained.
    pub const HARDWARE_DRAIN: u8 = 0x21;
    /// An address could not be translated.
    pub const TRANSLATION: u8 = 0x22;
    /// The system did not answer a page request.
    pub const PAGE_REQUEST_TIMEOUT: u8 = 0x23;
    /// The job took longer than the device allows.
    pub const WATCHDOG: u8 = 0x24;
    /// Refused flags of the codec.
    pub const INVALID_CODEC_FLAGS: u8 = 0x30;
    /// Refused flags of the filter.
    pub const INVALID_FILTER_FLAGS: u8 = 0x31;
    /// The size of the input is not valid.
    pub const INVALID_INPUT_SIZE: u8 = 0x32;
    /// The number of elements is not valid.
    pub const INVALID_ELEMENTS: u8 = 0x33;
    /// The width of elements is not valid.
    pub const INVALID_WIDTH: u8 = 0x34;
    /// The output cannot be inverted.
    pub const INVALID_INVERSION: u8 = 0x35;

    /// The status without the bit of a fault that was a write.
    pub const MASK: u8 = 0x7F;
    /// The page fault was a write.
    pub const WRITE: u8 = 0x80;
}

/// Why the engine failed (QPL's `AD_ERROR_CODE_*`).
pub mod error {
    /// The header of a block runs over its limit.
    pub const BIG_HEADER: u8 = 1;
    /// A code that no code length has.
    pub const UNDEFINED_LENGTH_CODE: u8 = 2;
    /// The first length of the literals repeats one before it.
    pub const FIRST_LITERAL_REPEATS: u8 = 3;
    /// No literal has a code.
    pub const NO_LITERAL_CODE: u8 = 5;
    /// The lengths are more than the header says.
    pub const WRONG_CODE_COUNT: u8 = 6;
    /// The code of code lengths is over-subscribed or incomplete.
    pub const BAD_LENGTHS_CODE: u8 = 8;
    /// The code of literals is.
    pub const BAD_LITERALS_CODE: u8 = 9;
    /// The code of distances is.
    pub const BAD_DISTANCES_CODE: u8 = 10;
    /// A code that no literal has.
    pub const UNDEFINED_LITERAL: u8 = 11;
    /// A code that no distance has.
    pub const UNDEFINED_DISTANCE: u8 = 12;
    /// Type 3.
    pub const BLOCK_TYPE: u8 = 13;
    /// The two lengths of a stored block disagree.
    pub const STORED_LENGTH: u8 = 14;
    /// The source ended before the stream.
    pub const BAD_END: u8 = 15;
    /// A match is further back than the window.
    pub const BAD_DISTANCE: u8 = 17;
    /// A match is from before the start.
    pub const BEFORE_START: u8 = 18;
    /// The AECS has an impossible value.
    pub const BAD_AECS: u8 = 22;
    /// The result of a compression does not fit.
    pub const OUTPUT_OVERFLOW: u8 = 25;
    /// A symbol has no code in the AECS.
    pub const INVALID_CODE: u8 = 30;
    /// A header has more than 286 literals.
    pub const TOO_MANY_LITERALS: u8 = 35;
    /// A header has more than 30 distances.
    pub const TOO_MANY_DISTANCES: u8 = 36;
}

/// A Huffman code as the AECS has it: its bits, first bit highest, and its length above.
#[must_use]
pub const fn code(bits: u32, length: u32) -> u32 {
    length << 15 | bits
}

/// Bits of the header of a last block with fixed codes: 1, then type 1.
const FIXED_HEADER: u8 = 0b011;
const FIXED_HEADER_BITS: u32 = 3;

/// A last block with the fixed codes of deflate. Static, because the device may read it at any time.
pub static FIXED: AecsCompress = fixed();

/// The fixed codes (RFC 1951, 3.2.6).
#[expect(clippy::cast_possible_truncation, reason = "symbols are below 288")]
const fn fixed() -> AecsCompress {
    let mut aecs = AecsCompress {
        crc: 0,
        xor: 0,
        reserved: [0; 5],
        output_bits: FIXED_HEADER_BITS,
        output: [0; 256],
        literals: [0; 286],
        reserved2: [0; 2],
        distances: [0; 30],
        reserved3: [0; 2],
    };
    aecs.output[0] = FIXED_HEADER;
    let mut symbol = 0;
    while symbol < aecs.literals.len() {
        let number = symbol as u32;
        aecs.literals[symbol] = match number {
            0..144 => code(0x30 + number, 8),
            144..256 => code(0x190 + (number - 144), 9),
            256..280 => code(number - 256, 7),
            _ => code(0xC0 + (number - 280), 8),
        };
        symbol += 1;
    }
    let mut symbol = 0;
    while symbol < aecs.distances.len() {
        aecs.distances[symbol] = code(symbol as u32, 5);
        symbol += 1;
    }
    aecs
}

// The first and some later entries of the published driver's table.
const _: () = {
    assert!(FIXED.literals[0] == 0x40030 && FIXED.literals[144] == 0x48190);
    assert!(FIXED.literals[256] == 0x38000 && FIXED.literals[280] == 0x400C0);
    assert!(FIXED.distances[1] == 0x28001);
};

#[cfg(test)]
mod tests;
