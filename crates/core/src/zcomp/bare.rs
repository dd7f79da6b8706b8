//! A codec alone, with nothing around it: what a store is measured against.

#![forbid(unsafe_code)]

use std::fmt;

use super::backend::{Answer, Compressor, Decompressor};
use super::{Error, Params, shared};
use crate::page::UnitOrder;

/// One codec's two directions, for one thread. No unit is looked at before the codec has it.
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
    /// Sets it up.
    ///
    /// # Errors
    ///
    /// As [`super::Zcomp::new`].
    pub fn new(params: &Params, unit: UnitOrder) -> Result<Bare, Error> {
        let shared = shared(params, unit)?;
        Ok(Bare { compressor: shared.compressor()?, decompressor: shared.decompressor()? })
    }

    /// Compresses `source`, one unit, to the start of `dest`; tells its length, or `None` if it would not fit.
    pub fn compress(&mut self, source: &[u8], dest: &mut [u8]) -> Option<usize> {
        match self.compressor.compress_unit(source, dest) {
            Answer::Compressed(bytes) => Some(bytes),
            Answer::Incompressible | Answer::Failed => None,
        }
    }

    /// Fills `dest` from `source`; false if that is not one of its units compressed.
    pub fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> bool {
        self.decompressor.decompress(source, dest).is_ok()
    }
}
