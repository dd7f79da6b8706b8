//! 842, the format of the compression engines of IBM's POWER processors, as the kernel's `842`
//! reads and writes it. Written from descriptions of the format.
//!
//! The unit is cut into phrases of 8 bytes. A stream is a string of bits, beginning with the
//! highest bit of each byte. Each phrase is an operation of 5 bits, followed by its arguments.
//!
//! | operation | arguments | result |
//! | --- | --- | --- |
//! | `5 * first + second` | those of the first half, those of the second | a phrase |
//! | 25 | index of 8 bits among the eights | a phrase |
//! | 27, repeat | count - 1, 6 bits | the phrase before, 1 to 64 times |
//! | 28, zeros | | 8 zeros |
//! | 29, short | count, 3 bits; 1 to 7 bytes | these bytes; only at the end, and only in software |
//! | 30, end | CRC of all bytes, 32 bits | none; zeros follow up to a multiple of 8 bytes |
//!
//! A half is 4 bytes:
//!
//! | half | arguments | bits |
//! | --- | --- | --- |
//! | 0 | 4 bytes | 32 |
//! | 1 | 2 bytes, index among the twos | 24 |
//! | 2 | index among the twos, 2 bytes | 24 |
//! | 3 | two indexes among the twos | 16 |
//! | 4 | index among the fours | 9 |
//!
//! An index names a slot of a [`Ring`]. The rings hold the last 512, 2048 and 2048 bytes, in slots
//! of 2, 4 and 8 bytes. A phrase enters the rings after it is complete.
//!
//! # Invariants
//!
//! - `P8-1` No index in a stream that we write names a slot that its own phrase fills. Decoders
//!   differ there: one that fills the rings byte by byte reads another value than one that fills
//!   them phrase by phrase, like ours and the kernel's.
//!
//! # Cost
//!
//! Dictionaries of 20 KiB, cleared for every unit, so that the result does not depend on earlier
//! units. Decompression needs no state. The tables of the CRC are constants, 16 KiB.

#![deny(unsafe_code)]

mod bits;
mod crc;
mod decoder;
mod encoder;
#[cfg(test)]
#[allow(unsafe_code, reason = "calls a library that is loaded to compare with")]
mod tests;

use super::backend::{Answer, Compressor, Corrupt, Decompressor, Software};
use bits::Full;
use encoder::Dictionary;

/// The other operations; those below `EIGHT` are pairs of halves.
const EIGHT: u64 = 25;
const REPEAT: u64 = 27;
const ZEROS: u64 = 28;
const SHORT: u64 = 29;
const END: u64 = 30;

/// The kinds of halves: `D` for bytes, `I` for an index, each with its length.
const D4: u64 = 0;
const D2_I2: u64 = 1;
const I2_D2: u64 = 2;
const I2_I2: u64 = 3;
const I4: u64 = 4;

const _: () = assert!(5 * I4 + I4 + 1 == EIGHT, "the pairs of halves are the operations below it");

const OPERATION_BITS: u32 = 5;
const REPEAT_BITS: u32 = 6;
const SHORT_BITS: u32 = 3;
const CRC_BITS: u32 = 32;
const PHRASE_BYTES: usize = 8;

/// The last bytes before the present phrase, in slots that are overwritten in turn.
#[derive(Debug, Clone, Copy)]
struct Ring {
    slot_bytes: usize,
    /// Bits of an index.
    index_bits: u32,
}

const TWOS: Ring = Ring { slot_bytes: 2, index_bits: 8 };
const FOURS: Ring = Ring { slot_bytes: 4, index_bits: 9 };
const EIGHTS: Ring = Ring { slot_bytes: 8, index_bits: 8 };

impl Ring {
    #[inline(always)]
    const fn bytes(self) -> usize {
        self.slot_bytes << self.index_bits
    }

    /// The slot of the bytes at `at`.
    #[inline(always)]
    const fn index(self, at: usize) -> usize {
        at % self.bytes() / self.slot_bytes
    }

    /// How far before the phrase at `at` the contents of slot `index` lie: 1 to the length of the
    /// ring. If that is before the first byte, the slot was never filled.
    #[inline(always)]
    const fn back(self, at: usize, index: usize) -> usize {
        (at.wrapping_sub(index * self.slot_bytes + 1) & (self.bytes() - 1)) + 1
    }
}

struct Sw842Compressor {
    dictionary: Dictionary,
}

impl Compressor for Sw842Compressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        match encoder::encode(source, dest, &mut self.dictionary) {
            Ok(bytes) => Answer::Compressed(bytes),
            // The only possible failure: the result does not fit.
            Err(Full) => Answer::Incompressible,
        }
    }

    fn memory_bytes(&self) -> usize {
        self.dictionary.memory_bytes()
    }
}

struct Sw842Decompressor;

impl Decompressor for Sw842Decompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        decoder::decode(source, dest)
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// The kernel's `842` reads the result, in software. There is no level.
pub(super) static BACKEND: Software = Software {
    name: "842",
    levels: 1..=1,
    level_default: 1,
    batch_max: 1,
    compressor: |_, _| Ok(Box::new(Sw842Compressor { dictionary: Dictionary::new() })),
    decompressor: || Ok(Box::new(Sw842Decompressor)),
    extended: None,
};
