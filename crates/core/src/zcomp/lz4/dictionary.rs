//! A dictionary for LZ4: hashed once, and attached to a stream for each unit.
//!
//! The library copies the hashed dictionary into the stream for a unit of more than 4 KiB; for a
//! smaller unit it searches both. It never writes to the dictionary.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::super::backend::{Answer, Compressor, Decompressor, Shared, Wanted};
use super::super::{Dictionary, Error};
use super::{Lz4Decompressor, answer, state};

// lz4-sys builds these functions, but does not declare them (lz4.h).
unsafe extern "C" {
    fn LZ4_initStream(stream: *mut c_void, bytes: usize) -> *mut c_void;
    fn LZ4_resetStream_fast(stream: *mut c_void);
    fn LZ4_loadDictSlow(stream: *mut c_void, dictionary: *const c_char, bytes: c_int) -> c_int;
    fn LZ4_attach_dictionary(stream: *mut c_void, dictionary: *const c_void);
    fn LZ4_compress_fast_continue(
        stream: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
}

/// Initialises the words as a stream.
fn init(stream: &mut Vec<u64>) {
    let bytes = size_of_val(stream.as_slice());
    // SAFETY: the words are writable for `bytes`, aligned by 8, and ours alone.
    let initialised = unsafe { LZ4_initStream(stream.as_mut_ptr().cast(), bytes) };
    assert!(!initialised.is_null(), "aligned and large enough");
}

/// The dictionary, hashed for the level, in a stream of lz4 or lz4hc. The streams of all threads
/// read it.
pub(in super::super) struct Digest {
    pub(in super::super) stream: Vec<u64>,
    pub(in super::super) dictionary: Arc<Dictionary>,
}

/// What the streams share: a digest, and how a stream of this level is initialised.
pub(in super::super) struct Share {
    pub(in super::super) level: c_int,
    pub(in super::super) digest: Arc<Digest>,
    pub(in super::super) compressor: fn(level: c_int, Arc<Digest>) -> Box<dyn Compressor>,
}

pub(super) fn share(wanted: &Wanted) -> Result<Box<dyn Shared>, Error> {
    let dictionary = Arc::clone(wanted.dictionary());
    let mut stream = state();
    init(&mut stream);
    let bytes = c_int::try_from(dictionary.bytes().len()).expect("at most DICTIONARY_BYTES");
    // SAFETY: the stream is initialised and ours alone; the dictionary is readable for its length, and
    // lives, unchanged, as long as the digest (DICT-1).
    let loaded = unsafe {
        LZ4_loadDictSlow(stream.as_mut_ptr().cast(), dictionary.bytes().as_ptr().cast(), bytes)
    };
    assert!(loaded > 0, "a dictionary has 8 bytes or more");
    let digest = Arc::new(Digest { stream, dictionary });
    Ok(Box::new(Share { level: wanted.level, digest, compressor: DictionaryCompressor::boxed }))
}

impl Shared for Share {
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error> {
        Ok((self.compressor)(self.level, Arc::clone(&self.digest)))
    }

    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error> {
        Ok(Box::new(Lz4Decompressor(Some(Arc::clone(&self.digest.dictionary)))))
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.digest.stream) + self.digest.dictionary.bytes().len()
    }
}

struct DictionaryCompressor {
    acceleration: c_int,
    /// An initialised `LZ4_stream_t`.
    stream: Vec<u64>,
    digest: Arc<Digest>,
}

impl DictionaryCompressor {
    fn boxed(acceleration: c_int, digest: Arc<Digest>) -> Box<dyn Compressor> {
        let mut stream = state();
        init(&mut stream);
        Box::new(DictionaryCompressor { acceleration, stream, digest })
    }
}

impl Compressor for DictionaryCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let source_bytes = c_int::try_from(source.len()).expect("a unit is at most 2 MiB");
        let dest_bytes = c_int::try_from(dest.len()).expect("shorter than a unit");
        let stream: *mut c_void = self.stream.as_mut_ptr().cast();
        // SAFETY: the stream is initialised, and ours alone by `&mut self`.
        unsafe { LZ4_resetStream_fast(stream) };
        // SAFETY: as above; the digest is a stream that LZ4_loadDictSlow has prepared, which nobody
        // changes, and lives as long as `self`.
        unsafe { LZ4_attach_dictionary(stream, self.digest.stream.as_ptr().cast()) };
        // SAFETY: the stream was reset, so that it has no history but the dictionary, which lives
        // (DICT-1). `source` is readable for `source_bytes`, `dest` writable for `dest_bytes`, both by
        // the types of the slices, and they don't overlap because one of them is exclusive. The
        // library writes at most `dest_bytes`, and allocates nothing.
        let written = unsafe {
            LZ4_compress_fast_continue(
                stream,
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
                self.acceleration,
            )
        };
        if written <= 0 {
            // The result does not fit. After that the stream is undefined (lz4.h).
            init(&mut self.stream);
        }
        answer(written)
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.stream)
    }
}
