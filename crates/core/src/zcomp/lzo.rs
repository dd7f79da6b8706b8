//! LZO1X-1 and its run-length variant, the kernel's `lzo` and `lzo-rle`, written from the
//! description of the format in the kernel's documentation (`staging/lzo.rst`).
//!
//! `lzo` is version 0 of the stream, which every LZO1X decoder reads. `lzo-rle` is version 1: it
//! starts with two more bytes, and has an instruction for runs of zeros. Its decoder reads both
//! versions. The decoder of `lzo` refuses version 1, because there the first instruction would
//! refer back to before the first byte. A stream contains an end mark, so no bytes may follow it.
//!
//! # Invariants
//!
//! - `LZO-1` Only [`memory`] has `unsafe` code; it checks each request.
//!
//! # Cost
//!
//! A dictionary of 16 KiB, cleared for every unit, so that the result does not depend on earlier
//! units. Decompression needs no state. A few hundred bytes of stack.

#![deny(unsafe_code)]

mod decoder;
mod encoder;
mod memory;
#[cfg(test)]
#[allow(unsafe_code, reason = "calls liblzo2")]
mod tests;

use super::backend::{Answer, Compressor, Corrupt, Decompressor, Software};
use memory::Overrun;

/// This distance marks the end of a stream; longer distances are encoded as far matches.
const FAR_DISTANCE_MIN: usize = 16384;

/// Entries of the dictionary. Twice as many would shrink units of 64 KiB by 0.3 % more, and take 3
/// % more time.
const POSITIONS: usize = 1 << 13;

/// The version of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// The version that every LZO1X decoder reads.
    Original,
    /// With runs of zeros.
    Runs,
}

struct LzoCompressor {
    version: Version,
    /// The dictionary, used while a unit is compressed.
    positions: Box<[u16; POSITIONS]>,
}

impl LzoCompressor {
    fn new(version: Version) -> LzoCompressor {
        let positions = vec![0; POSITIONS].into_boxed_slice();
        LzoCompressor { version, positions: positions.try_into().expect("as many as there are") }
    }

    /// Writes the stream of `source` to `dest`, and returns its length.
    fn encode(&mut self, source: &[u8], dest: &mut [u8]) -> Result<usize, Overrun> {
        match self.version {
            Version::Original => {
                encoder::encode::<POSITIONS, false>(source, dest, &mut self.positions)
            }
            Version::Runs => encoder::encode::<POSITIONS, true>(source, dest, &mut self.positions),
        }
    }
}

impl Compressor for LzoCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        match self.encode(source, dest) {
            Ok(bytes) => Answer::Compressed(bytes),
            // The only possible failure: the result does not fit.
            Err(Overrun) => Answer::Incompressible,
        }
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.positions)
    }
}

struct LzoDecompressor {
    /// The newest version that is accepted.
    newest: Version,
}

impl Decompressor for LzoDecompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        decoder::decode(source, dest, self.newest)
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// Every LZO1X decoder reads the result. There is no level.
pub(super) static LZO: Software = Software {
    name: "lzo",
    levels: 1..=1,
    level_default: 1,
    batch_max: 1,
    compressor: |_, _| Ok(Box::new(LzoCompressor::new(Version::Original))),
    decompressor: || Ok(Box::new(LzoDecompressor { newest: Version::Original })),
    extended: None,
};

/// With runs of zeros. There is no level.
pub(super) static LZO_RLE: Software = Software {
    name: "lzo-rle",
    levels: 1..=1,
    level_default: 1,
    batch_max: 1,
    compressor: |_, _| Ok(Box::new(LzoCompressor::new(Version::Runs))),
    decompressor: || Ok(Box::new(LzoDecompressor { newest: Version::Runs })),
    extended: None,
};
