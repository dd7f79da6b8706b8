//! A codec without streams, locks or samples: the baseline that a store is measured against.

#![forbid(unsafe_code)]

use std::fmt;

use super::backend::{Answer, Compressor, Decompressor};
use super::{Error, Params, shared};
use crate::page::UnitOrder;

/// Both directions of one codec, for one thread. Every unit goes to the codec, without a look at a
/// sample.
pub struct Bare {
    compressor: Box<dyn Compressor>,
    decompressor: Box<dyn Decompressor>,
}

impl fmt::Debug for Bare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bare").finish_non_exhaustive()
    }
}

impl Bare {
    /// Sets up both directions.
    ///
    /// # Errors
    ///
    /// As [`super::Zcomp::new`].
    pub fn new(params: &Params, unit: UnitOrder) -> Result<Bare, Error> {
        let shared = shared(params, unit)?;
        Ok(Bare { compressor: shared.compressor()?, decompressor: shared.decompressor()? })
    }

    /// Compresses `source`, one unit, to the start of `dest`. Returns the length, or `None` if it
    /// does not fit.
    pub fn compress(&mut self, source: &[u8], dest: &mut [u8]) -> Option<usize> {
        match self.compressor.compress_unit(source, dest) {
            Answer::Compressed(bytes) => Some(bytes),
            Answer::Incompressible | Answer::Failed => None,
        }
    }

    /// Fills `dest` from `source`; false if `source` is not a compressed unit of this codec.
    pub fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> bool {
        self.decompressor.decompress(source, dest).is_ok()
    }

    /// Bytes taken at set-up, for both directions.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.compressor.memory_bytes() + self.decompressor.memory_bytes()
    }
}
