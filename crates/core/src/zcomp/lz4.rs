//! LZ4, block format, from its own library.
//!
//! The compressor needs 16 KiB of state, which it clears for every unit: `fastReset`, the variant
//! that need not, clears too for anything of 4 KiB or more. Decompression needs no state at all.
//! There is no frame, so the length of the unit comes from the caller.

pub(super) mod dictionary;

use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;

use super::Error;
use super::backend::{Answer, Backend, Compressor, Corrupt, Decompressor, Extended, Job};

// In the library that lz4-sys builds, but not among its declarations (lz4.h, "Advanced Functions").
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
    fn LZ4_decompress_safe_partial(
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        wanted_bytes: c_int,
        dest_bytes: c_int,
    ) -> c_int;
}

struct Lz4Compressor {
    acceleration: c_int,
    /// At least `LZ4_sizeofState()` bytes; words, because the library wants them aligned by 8.
    state: Vec<u64>,
}

fn compressor(level: i32, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    // SAFETY: no argument, no state: it returns a constant.
    let state_bytes = unsafe { LZ4_sizeofState() };
    let state_bytes = usize::try_from(state_bytes).expect("16 KiB and a header");
    let state = vec![0; state_bytes.div_ceil(size_of::<u64>())];
    Ok(Box::new(Lz4Compressor { acceleration: level, state }))
}

impl Lz4Compressor {
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
        match usize::try_from(written) {
            // The one failure there is: the result does not fit.
            Ok(0) => Answer::Incompressible,
            Ok(bytes) => Answer::Compressed(bytes),
            Err(_) => Answer::Failed,
        }
    }
}

impl Compressor for Lz4Compressor {
    fn compress(&mut self, jobs: &mut [Job<'_>]) {
        for job in jobs {
            job.answer = self.compress_unit(job.source, job.dest);
        }
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

struct Lz4Decompressor;

/// Reads what `lz4hc` writes as well.
pub(super) fn decompressor() -> Result<Box<dyn Decompressor>, Error> {
    Ok(Box::new(Lz4Decompressor))
}

impl Decompressor for Lz4Decompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let source_bytes = c_int::try_from(source.len()).map_err(|_| Corrupt)?;
        let dest_bytes = c_int::try_from(dest.len()).map_err(|_| Corrupt)?;
        // SAFETY: `source` is readable for `source_bytes` and `dest` writable for `dest_bytes` by
        // the types of the slices; they don't overlap because `dest` is exclusive. The `safe`
        // variant stays inside both whatever `source` holds, and reads of `dest` only what it
        // wrote. It has no state and allocates nothing.
        let written = unsafe {
            lz4_sys::LZ4_decompress_safe(
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
            )
        };
        // Negative: malformed. Success means that the whole source was used.
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
        // SAFETY: as in `decompress`; the library stops once it has written `wanted_bytes`, and stays
        // inside `unit` in any case.
        let written = unsafe {
            LZ4_decompress_safe_partial(
                source.as_ptr().cast(),
                unit.as_mut_ptr().cast(),
                source_bytes,
                wanted_bytes,
                unit_bytes,
            )
        };
        if written >= wanted_bytes { Ok(()) } else { Err(Corrupt) }
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// The library's acceleration, clamped there to 65537.
const LEVELS: RangeInclusive<i32> = 1..=65537;

/// The level is the library's acceleration; 1 is the library's default.
pub(super) static BACKEND: Backend = Backend {
    name: "lz4",
    levels: LEVELS,
    level_default: 1,
    batch_max: 1,
    compressor,
    decompressor,
    extended: Some(Extended { levels: LEVELS, windows: None, share: dictionary::share }),
};
