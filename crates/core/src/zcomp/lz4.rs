//! LZ4, block format, by its own library.
//!
//! The compressor needs 16 KiB of state, which the library clears for every unit; its variant
//! `fastReset` also clears it for inputs of 4 KiB or more. Decompression needs no state. There is
//! no frame, so the caller must know the length of the unit.

pub(super) mod dictionary;

use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::backend::{Answer, Compressor, Corrupt, Decompressor, Extended, Software};
use super::{Dictionary, Error};

// Named so that the library is linked: lz4-sys does not declare the functions used here (lz4.h,
// lz4hc.h).
use lz4_sys as _;

unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_compress_fast_extState(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_usingDict(
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        dictionary: *const c_char,
        dictionary_bytes: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_partial_usingDict(
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        wanted_bytes: c_int,
        dest_bytes: c_int,
        dictionary: *const c_char,
        dictionary_bytes: c_int,
    ) -> c_int;
}

struct Lz4Compressor {
    acceleration: c_int,
    /// At least `LZ4_sizeofState()` bytes. Of `u64`, because the library requires alignment by 8.
    state: Vec<u64>,
}

fn compressor(level: i32, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    Ok(Box::new(Lz4Compressor { acceleration: level, state: state() }))
}

/// Memory for a state, which is an `LZ4_stream_t`. Zeroed, as the library requires at first.
fn state() -> Vec<u64> {
    // SAFETY: the function takes no argument and returns a constant.
    words(unsafe { LZ4_sizeofState() })
}

/// At least `bytes` zero bytes, aligned by 8.
pub(super) fn words(bytes: c_int) -> Vec<u64> {
    let bytes = usize::try_from(bytes).expect("16 or 256 KiB, and a header");
    vec![0; bytes.div_ceil(size_of::<u64>())]
}

/// Translates the result of the library's compressors.
pub(super) fn answer(written: c_int) -> Answer {
    match usize::try_from(written) {
        // The only possible failure: the result does not fit.
        Ok(0) => Answer::Incompressible,
        Ok(bytes) => Answer::Compressed(bytes),
        Err(_) => Answer::Failed,
    }
}

impl Compressor for Lz4Compressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let source_bytes = c_int::try_from(source.len()).expect("a unit is at most 2 MiB");
        let dest_bytes = c_int::try_from(dest.len()).expect("shorter than a unit");
        // SAFETY: `state` is aligned by 8, is long enough (see the field), ours alone by
        // `&mut self`, and initialised by this very function. `source` is readable for
        // `source_bytes`, `dest` writable for `dest_bytes`, both by the types of the slices, and
        // they don't overlap because one of them is exclusive. The library writes at most
        // `dest_bytes`, and allocates nothing, the state being given.
        let written = unsafe {
            LZ4_compress_fast_extState(
                self.state.as_mut_ptr().cast(),
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
                self.acceleration,
            )
        };
        answer(written)
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

/// The decompressor has no state other than the dictionary's bytes, if there is one.
struct Lz4Decompressor(Option<Arc<Dictionary>>);

/// Also decompresses what `lz4hc` wrote.
pub(super) fn decompressor() -> Result<Box<dyn Decompressor>, Error> {
    Ok(Box::new(Lz4Decompressor(None)))
}

impl Lz4Decompressor {
    /// The bytes before the unit and their length: 0 without a dictionary.
    fn dictionary(&self) -> (&[u8], c_int) {
        let bytes = self.0.as_ref().map_or(&[][..], |dictionary| dictionary.bytes());
        (bytes, c_int::try_from(bytes.len()).expect("at most DICTIONARY_BYTES"))
    }
}

impl Decompressor for Lz4Decompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let source_bytes = c_int::try_from(source.len()).map_err(|_| Corrupt)?;
        let dest_bytes = c_int::try_from(dest.len()).map_err(|_| Corrupt)?;
        let (dictionary, dictionary_bytes) = self.dictionary();
        // SAFETY: `source` and the dictionary are readable and `dest` writable for their lengths by the
        // types of the slices; none overlap because `dest` is exclusive. The `safe` variant stays inside
        // all of them whatever `source` holds, and reads of `dest` only what it wrote. It has no
        // state and allocates nothing.
        let written = unsafe {
            LZ4_decompress_safe_usingDict(
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
                dictionary.as_ptr().cast(),
                dictionary_bytes,
            )
        };
        // A negative result means malformed input. A success means that the whole source was used.
        if written == dest_bytes { Ok(()) } else { Err(Corrupt) }
    }

    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        let source_bytes = c_int::try_from(source.len()).map_err(|_| Corrupt)?;
        let wanted_bytes = c_int::try_from(wanted).map_err(|_| Corrupt)?;
        let unit_bytes = c_int::try_from(unit.len()).map_err(|_| Corrupt)?;
        let (dictionary, dictionary_bytes) = self.dictionary();
        // Here the library accepts a match of distance 0, which copies bytes that nothing has written onto
        // themselves: what was in `unit` before must not become a part of the result.
        unit.get_mut(..wanted).ok_or(Corrupt)?.fill(0);
        // SAFETY: as in `decompress`; the library stops once it has written `wanted_bytes`, and stays
        // inside `unit` in any case.
        let written = unsafe {
            LZ4_decompress_safe_partial_usingDict(
                source.as_ptr().cast(),
                unit.as_mut_ptr().cast(),
                source_bytes,
                wanted_bytes,
                unit_bytes,
                dictionary.as_ptr().cast(),
                dictionary_bytes,
            )
        };
        if written >= wanted_bytes { Ok(()) } else { Err(Corrupt) }
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// The library clamps its acceleration to 65537.
const LEVELS: RangeInclusive<i32> = 1..=65537;

/// The level is the library's acceleration; its default is 1.
pub(super) static BACKEND: Software = Software {
    name: "lz4",
    levels: LEVELS,
    level_default: 1,
    batch_max: 1,
    compressor,
    decompressor,
    extended: Some(Extended { levels: LEVELS, windows: None, share: dictionary::share }),
};
