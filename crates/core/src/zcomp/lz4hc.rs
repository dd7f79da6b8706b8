//! LZ4 high compression, by the library of LZ4: a slower search, the same format.
//!
//! The compressor needs 256 KiB of state. The library clears it at first and after a unit that did not fit, and not for
//! every unit: it counts its positions up from unit to unit, with a gap that is wider than any match reaches, so what
//! an earlier unit left in the tables is never followed. (Up to 1.25 times as fast: units of 4 KiB at level 3.)
//!
//! From level 10 on the library allocates memory for each unit, so those levels are not offered (`ZC-1`).

mod dictionary;
#[cfg(test)]
mod tests;

use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;

use super::Error;
use super::backend::{Answer, Compressor, Extended, Software};
use super::lz4;

// lz4-sys builds these functions, but does not declare them (lz4hc.h).
unsafe extern "C" {
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_initStreamHC(stream: *mut c_void, bytes: usize) -> *mut c_void;
    fn LZ4_compress_HC_extStateHC_fastReset(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        level: c_int,
    ) -> c_int;
}

/// Memory for an `LZ4_streamHC_t`, which nobody touches before the first unit.
struct Stream {
    /// At least `LZ4_sizeofStateHC()` bytes. Of `u64`, because the library requires alignment by 8.
    words: Vec<u64>,
    is_initialised: bool,
}

impl Stream {
    fn new() -> Stream {
        // SAFETY: the function takes no argument and returns a constant.
        let bytes = unsafe { LZ4_sizeofStateHC() };
        Stream { words: lz4::words(bytes), is_initialised: false }
    }

    /// The stream, initialised. Later the library knows itself whether a failure has left it to be initialised anew.
    fn initialised(&mut self) -> *mut c_void {
        let stream: *mut c_void = self.words.as_mut_ptr().cast();
        if !self.is_initialised {
            // SAFETY: the words are writable for their length, aligned by 8, and ours alone by `&mut self`.
            let initialised = unsafe { LZ4_initStreamHC(stream, size_of_val(&*self.words)) };
            assert!(!initialised.is_null(), "aligned and large enough");
            self.is_initialised = true;
        }
        stream
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }
}

struct Lz4hcCompressor {
    level: c_int,
    stream: Stream,
}

fn compressor(level: i32, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    Ok(Box::new(Lz4hcCompressor { level, stream: Stream::new() }))
}

impl Compressor for Lz4hcCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let source_bytes = c_int::try_from(source.len()).expect("a unit is at most 2 MiB");
        let dest_bytes = c_int::try_from(dest.len()).expect("shorter than a unit");
        let stream = self.stream.initialised();
        // SAFETY: the stream is initialised, and ours alone by `&mut self`. `source` is readable for
        // `source_bytes`, `dest` writable for `dest_bytes`, by the types of the slices, and they don't
        // overlap because one of them is exclusive. The library writes at most `dest_bytes`, and below
        // level 10 it allocates nothing, the state being given.
        let written = unsafe {
            LZ4_compress_HC_extStateHC_fastReset(
                stream,
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
        self.stream.memory_bytes()
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
