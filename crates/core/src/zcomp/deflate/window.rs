//! Deflate with a small window or a dictionary, by zlib: libdeflate has neither.
//!
//! An accelerator refers at most 4 KiB back (`window=12`). A unit that is no longer than the window
//! is still compressed by libdeflate, since it cannot refer further back.
//!
//! zlib has no digested dictionary: the compressor hashes it for every unit.
//!
//! # Invariants
//!
//! - `ZLIB-1` A state gets all memory that it will ever use at set-up: a compressor when it is
//!   made, a decompressor when it is first given a dictionary, which happens at set-up.
//! - `ZLIB-2` A `z_stream` never moves: the library checks its address.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use libz_sys::{
    Z_BUF_ERROR, Z_DEFAULT_STRATEGY, Z_DEFLATED, Z_FINISH, Z_OK, Z_STREAM_END, uInt, z_stream,
};

use super::super::backend::{Answer, Compressor, Corrupt, Decompressor, Extended, Shared, Wanted};
use super::super::{Dictionary, Error};
use super::{allocate, counted, release};

/// log2 of the furthest reference of the format.
const WINDOW_MAX: u8 = 15;

/// The level of memory use, 1 to 9, for a unit and what of a dictionary the window holds. A level has blocks of
/// 2^(level + 6) symbols, enough for one block per unit, and a table of 2^(level + 8) bytes, which zlib clears for each
/// unit.
fn memory_level(wanted: &Wanted, window: u8) -> c_int {
    let dictionary = wanted.dictionary.as_ref().map_or(0, |dictionary| dictionary.bytes().len());
    let bytes = wanted.unit_bytes + dictionary.min(1 << window);
    c_int::try_from(bytes.next_power_of_two().ilog2()).map_or(9, |log2| (log2 - 6).clamp(1, 9))
}

pub(super) const EXTENDED: Extended =
    Extended { levels: 1..=9, windows: Some(9..=WINDOW_MAX), share };

#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "112 bytes")]
const STREAM_BYTES: c_int = size_of::<z_stream>() as c_int;

/// The allocator, with the signature that zlib requires.
unsafe extern "C" fn zalloc(_: *mut c_void, items: uInt, bytes: uInt) -> *mut c_void {
    // SAFETY: no contract but that of an allocator: what it returns is given to `zfree` once.
    unsafe { allocate(items as usize * bytes as usize) }
}

unsafe extern "C" fn zfree(_: *mut c_void, memory: *mut c_void) {
    // SAFETY: zlib frees what `zalloc` returned, once.
    unsafe { release(memory) };
}

/// A zlib state for one direction, set up by `init` and ended by `end`.
struct Stream {
    /// `ZLIB-2`; from `Box::into_raw`.
    stream: NonNull<z_stream>,
    end: unsafe extern "C" fn(*mut z_stream) -> c_int,
    memory_bytes: usize,
}

// SAFETY: the state is in memory of an allocator that any thread may free to, and zlib keeps nothing of it
// anywhere else.
unsafe impl Send for Stream {}

impl Stream {
    fn new(
        init: impl FnOnce(*mut z_stream) -> c_int,
        end: unsafe extern "C" fn(*mut z_stream) -> c_int,
    ) -> Result<Stream, Error> {
        let stream = Box::into_raw(Box::new(z_stream {
            next_in: ptr::null_mut(),
            avail_in: 0,
            total_in: 0,
            next_out: ptr::null_mut(),
            avail_out: 0,
            total_out: 0,
            msg: ptr::null_mut(),
            state: ptr::null_mut(),
            zalloc,
            zfree,
            opaque: ptr::null_mut(),
            data_type: 0,
            adler: 0,
            reserved: 0,
        }));
        let (mut made, memory_bytes) = counted(|| {
            let result = init(stream);
            // `drop` ends it even if `init` failed: without a state that does nothing.
            let stream = Stream { stream: NonNull::new(stream)?, end, memory_bytes: 0 };
            (result == Z_OK).then_some(stream)
        })?;
        made.memory_bytes = memory_bytes;
        Ok(made)
    }

    /// Runs `step` from all of `source` to all of `dest`, to the end. Returns the result of zlib,
    /// and how many bytes were read and written. `None` if a length does not fit in zlib's type.
    fn run(
        &mut self,
        step: unsafe extern "C" fn(*mut z_stream, c_int) -> c_int,
        source: &[u8],
        dest: &mut [u8],
    ) -> Option<(c_int, usize, usize)> {
        let source_bytes = uInt::try_from(source.len()).ok()?;
        let dest_bytes = uInt::try_from(dest.len()).ok()?;
        // SAFETY: the stream is live and ours alone by `&mut self`; the library is not running.
        let stream = unsafe { self.stream.as_mut() };
        stream.next_in = source.as_ptr().cast_mut();
        stream.avail_in = source_bytes;
        stream.next_out = dest.as_mut_ptr();
        stream.avail_out = dest_bytes;
        // SAFETY: the state is live and ours alone. `source` is readable (zlib does not write to it) and
        // `dest` writable for these lengths by the types of the slices, and they don't overlap because
        // `dest` is exclusive. zlib stays inside both whatever `source` holds, reads of `dest` only what
        // it wrote, and allocates nothing (ZLIB-1).
        let result = unsafe { step(stream, Z_FINISH) };
        let (read, written) = (source_bytes - stream.avail_in, dest_bytes - stream.avail_out);
        Some((result, read as usize, written as usize))
    }

    /// Resets the state with `reset`, and sets the last 2^`window` bytes of the dictionary with
    /// `set`.
    fn begin(
        &mut self,
        reset: unsafe extern "C" fn(*mut z_stream) -> c_int,
        set: unsafe extern "C" fn(*mut z_stream, *const u8, uInt) -> c_int,
        dictionary: Option<&Dictionary>,
        window: u8,
    ) -> bool {
        // SAFETY: the state is live and ours alone by `&mut self`.
        let result = unsafe { reset(self.stream.as_ptr()) };
        let bytes = dictionary.map_or(&[][..], Dictionary::bytes);
        let last = &bytes[bytes.len().saturating_sub(1 << window)..];
        let length = uInt::try_from(last.len()).expect("at most DICTIONARY_BYTES");
        // SAFETY: as above; `last` is readable for its length, and copied. ZLIB-1: nothing is allocated.
        result == Z_OK
            && (last.is_empty()
                || unsafe { set(self.stream.as_ptr(), last.as_ptr(), length) } == Z_OK)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is live; what its state has is freed, and not used after this.
        unsafe { (self.end)(self.stream.as_ptr()) };
        // SAFETY: from `Box::into_raw`, and not used after this.
        drop(unsafe { Box::from_raw(self.stream.as_ptr()) });
    }
}

struct Share(Wanted);

fn share(wanted: &Wanted) -> Result<Box<dyn Shared>, Error> {
    Ok(Box::new(Share(wanted.clone())))
}

/// The version of the library, which its functions require as an argument.
fn version() -> *const std::ffi::c_char {
    // SAFETY: no argument, no state: it returns a constant.
    unsafe { libz_sys::zlibVersion() }
}

impl Shared for Share {
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error> {
        let window = self.0.window.unwrap_or(WINDOW_MAX);
        let init = |stream| {
            // SAFETY: `stream` is whole and of the length that is stated, and the functions in it behave as
            // zlib.h wants. The level and the window, negative for a raw stream, are in `EXTENDED`.
            unsafe {
                libz_sys::deflateInit2_(
                    stream,
                    self.0.level,
                    Z_DEFLATED,
                    -c_int::from(window),
                    memory_level(&self.0, window),
                    Z_DEFAULT_STRATEGY,
                    version(),
                    STREAM_BYTES,
                )
            }
        };
        let stream = Stream::new(init, libz_sys::deflateEnd)?;
        Ok(Box::new(WindowCompressor { stream, window, dictionary: self.0.dictionary.clone() }))
    }

    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error> {
        let init = |stream| {
            // SAFETY: as for the compressor.
            let result = unsafe {
                libz_sys::inflateInit2_(stream, -c_int::from(WINDOW_MAX), version(), STREAM_BYTES)
            };
            if result != Z_OK {
                return result;
            }
            // ZLIB-1: this allocates the window.
            // SAFETY: the state is live and ours alone, and the byte is readable.
            unsafe { libz_sys::inflateSetDictionary(stream, [0].as_ptr(), 1) }
        };
        let stream = Stream::new(init, libz_sys::inflateEnd)?;
        Ok(Box::new(WindowDecompressor { stream, dictionary: self.0.dictionary.clone() }))
    }

    fn memory_bytes(&self) -> usize {
        self.0.dictionary.as_ref().map_or(0, |dictionary| dictionary.bytes().len())
    }
}

struct WindowCompressor {
    stream: Stream,
    window: u8,
    dictionary: Option<Arc<Dictionary>>,
}

impl Compressor for WindowCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let (reset, set) = (libz_sys::deflateReset, libz_sys::deflateSetDictionary);
        if !self.stream.begin(reset, set, self.dictionary.as_deref(), self.window) {
            return Answer::Failed;
        }
        match self.stream.run(libz_sys::deflate, source, dest) {
            Some((Z_STREAM_END, _, written)) => Answer::Compressed(written),
            // There is more input, and no room.
            Some((Z_OK | Z_BUF_ERROR, ..)) => Answer::Incompressible,
            _ => Answer::Failed,
        }
    }

    fn memory_bytes(&self) -> usize {
        self.stream.memory_bytes
    }
}

struct WindowDecompressor {
    stream: Stream,
    dictionary: Option<Arc<Dictionary>>,
}

impl Decompressor for WindowDecompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let (reset, set) = (libz_sys::inflateReset, libz_sys::inflateSetDictionary);
        if !self.stream.begin(reset, set, self.dictionary.as_deref(), WINDOW_MAX) {
            return Err(Corrupt);
        }
        match self.stream.run(libz_sys::inflate, source, dest) {
            Some((Z_STREAM_END, read, written))
                if read == source.len() && written == dest.len() =>
            {
                Ok(())
            }
            _ => Err(Corrupt),
        }
    }

    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        let (reset, set) = (libz_sys::inflateReset, libz_sys::inflateSetDictionary);
        if !self.stream.begin(reset, set, self.dictionary.as_deref(), WINDOW_MAX) {
            return Err(Corrupt);
        }
        match self.stream.run(libz_sys::inflate, source, &mut unit[..wanted]) {
            // All is decompressed; there is no room for more.
            Some((Z_STREAM_END | Z_OK | Z_BUF_ERROR, _, written)) if written == wanted => Ok(()),
            _ => Err(Corrupt),
        }
    }

    fn memory_bytes(&self) -> usize {
        self.stream.memory_bytes
    }
}
