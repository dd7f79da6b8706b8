//! A dictionary for LZ4 high compression: hashed once, and attached to a stream for each unit.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::super::backend::{Answer, Compressor, Shared, Wanted};
use super::super::lz4::dictionary::{Digest, Share};
use super::super::{Error, lz4};
use super::Stream;

// lz4-sys builds these functions, but does not declare them (lz4hc.h).
unsafe extern "C" {
    fn LZ4_resetStreamHC_fast(stream: *mut c_void, level: c_int);
    fn LZ4_loadDictHC(stream: *mut c_void, dictionary: *const c_char, bytes: c_int) -> c_int;
    fn LZ4_attach_HC_dictionary(stream: *mut c_void, dictionary: *const c_void);
    fn LZ4_compress_HC_continue(
        stream: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
    ) -> c_int;
}

pub(super) fn share(wanted: &Wanted) -> Result<Box<dyn Shared>, Error> {
    let dictionary = Arc::clone(wanted.dictionary());
    let mut stream = Stream::new();
    let prepared = stream.initialised();
    // SAFETY: the stream is initialised, and ours alone.
    unsafe { LZ4_resetStreamHC_fast(prepared, wanted.level) };
    let bytes = c_int::try_from(dictionary.bytes().len()).expect("at most DICTIONARY_BYTES");
    // SAFETY: the stream is initialised and ours alone; the dictionary is readable for its length, and
    // lives, unchanged, as long as the digest (DICT-1).
    let loaded = unsafe { LZ4_loadDictHC(prepared, dictionary.bytes().as_ptr().cast(), bytes) };
    assert!(loaded > 0, "a dictionary has 4 bytes or more");
    let digest = Arc::new(Digest { stream: stream.words, dictionary });
    Ok(Box::new(Share { level: wanted.level, digest, compressor: DictionaryCompressor::boxed }))
}

struct DictionaryCompressor {
    level: c_int,
    stream: Stream,
    digest: Arc<Digest>,
}

impl DictionaryCompressor {
    fn boxed(level: c_int, digest: Arc<Digest>) -> Box<dyn Compressor> {
        Box::new(DictionaryCompressor { level, stream: Stream::new(), digest })
    }
}

impl Compressor for DictionaryCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let source_bytes = c_int::try_from(source.len()).expect("a unit is at most 2 MiB");
        let dest_bytes = c_int::try_from(dest.len()).expect("shorter than a unit");
        let stream = self.stream.initialised();
        // SAFETY: the stream is initialised, and ours alone by `&mut self`.
        unsafe { LZ4_resetStreamHC_fast(stream, self.level) };
        // SAFETY: as above; the digest is a stream that LZ4_loadDictHC has prepared, which nobody changes,
        // and lives as long as `self`.
        unsafe { LZ4_attach_HC_dictionary(stream, self.digest.stream.as_ptr().cast()) };
        // SAFETY: the stream was reset, so that it has no history but the dictionary, which lives
        // (DICT-1). `source` is readable for `source_bytes`, `dest` writable for `dest_bytes`, by the
        // types of the slices, and they don't overlap because one of them is exclusive. The library
        // writes at most `dest_bytes`, and below level 10 it allocates nothing.
        let written = unsafe {
            LZ4_compress_HC_continue(
                stream,
                source.as_ptr().cast(),
                dest.as_mut_ptr().cast(),
                source_bytes,
                dest_bytes,
            )
        };
        lz4::answer(written)
    }

    fn memory_bytes(&self) -> usize {
        self.stream.memory_bytes()
    }
}
