//! LZ4 high compression, by the library of LZ4: a slower search, the same format.
//!
//! The compressor needs 256 KiB of state, which the library clears for every unit (about 10 us).
//! From level 10 on the library allocates memory for each unit, so those levels are not offered
//! (`ZC-1`).

mod dictionary;

use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;

use super::Error;
use super::backend::{Answer, Compressor, Extended, Software};
use super::lz4;

// lz4-sys builds these functions, but does not declare them (lz4hc.h).
unsafe extern "C" {
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_compress_HC_extStateHC(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        level: c_int,
    ) -> c_int;
}

struct Lz4hcCompressor {
    level: c_int,
    /// At least `LZ4_sizeofStateHC()` bytes. Of `u64`, because the library requires alignment by 8.
    state: Vec<u64>,
}

fn compressor(level: i32, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    Ok(Box::new(Lz4hcCompressor { level, state: state() }))
}

/// Memory for a state, which is an `LZ4_streamHC_t`.
fn state() -> Vec<u64> {
    // SAFETY: the function takes no argument and returns a constant.
    lz4::words(unsafe { LZ4_sizeofStateHC() })
}

impl Compressor for Lz4hcCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let source_bytes = c_int::try_from(source.len()).expect("a unit is at most 2 MiB");
        let dest_bytes = c_int::try_from(dest.len()).expect("shorter than a unit");
        // SAFETY: `state` is aligned by 8, is long enough (see the field), ours alone by `&mut
        // self`, and initialised by this very function. `source` is readable for `source_bytes`,
        // `dest` writable for `dest_bytes`, by the types of the slices, and they don't overlap
        // because one of them is exclusive. The library writes at most `dest_bytes`, and below
        // level 10 it allocates nothing, the state being given.
        let written = unsafe {
            LZ4_compress_HC_extStateHC(
                self.state.as_mut_ptr().cast(),
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
                self.level,
            )
        };
        lz4::answer(written)
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

/// From level 10 on the library allocates.
const LEVELS: RangeInclusive<i32> = 2..=9;

/// The decompressor of LZ4 reads this format.
pub(super) static BACKEND: Software = Software {
    name: "lz4hc",
    levels: LEVELS,
    level_default: 9,
    batch_max: 1,
    compressor,
    decompressor: lz4::decompressor,
    extended: Some(Extended { levels: LEVELS, windows: None, share: dictionary::share }),
};
