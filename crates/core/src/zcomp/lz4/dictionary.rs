//! A dictionary for LZ4: hashed once, and attached to a stream for each unit.
//!
//! The library copies the hashed dictionary into the stream for a unit of more than 4 KiB, and looks into both
//! for a smaller one. It never writes to it.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::super::backend::{Answer, Compressor, Corrupt, Decompressor, Job, Shared, Wanted};
use super::super::{Dictionary, Error};

// In the library that lz4-sys builds, but not among its declarations (lz4.h).
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

/// Room for an `LZ4_stream_t`, zeroed as the library wants it at first.
fn stream() -> Vec<u64> {
    // SAFETY: no argument, no state: it returns a constant.
    let bytes = usize::try_from(unsafe { super::LZ4_sizeofState() }).expect("16 KiB and a header");
    vec![0; bytes.div_ceil(size_of::<u64>())]
}

/// Makes an initialised stream of the words.
fn init(stream: &mut Vec<u64>) {
    let bytes = size_of_val(stream.as_slice());
    // SAFETY: the words are writable for `bytes`, aligned by 8, and ours alone.
    let initialised = unsafe { LZ4_initStream(stream.as_mut_ptr().cast(), bytes) };
    assert!(!initialised.is_null(), "aligned and large enough");
}

/// The dictionary, hashed; read by the streams of all threads.
struct Digest {
    stream: Vec<u64>,
    dictionary: Arc<Dictionary>,
}

struct Share {
    acceleration: c_int,
    digest: Arc<Digest>,
}

pub(super) fn share(wanted: &Wanted) -> Result<Box<dyn Shared>, Error> {
    let dictionary = Arc::clone(wanted.dictionary());
    let mut stream = stream();
    init(&mut stream);
    let bytes = c_int::try_from(dictionary.bytes().len()).expect("at most DICTIONARY_BYTES");
    // SAFETY: the stream is initialised and ours alone; the dictionary is readable for its length, and
    // lives, unchanged, as long as the digest (DICT-1).
    let loaded = unsafe {
        LZ4_loadDictSlow(stream.as_mut_ptr().cast(), dictionary.bytes().as_ptr().cast(), bytes)
    };
    assert!(loaded > 0, "a dictionary has 8 bytes or more");
    let digest = Arc::new(Digest { stream, dictionary });
    Ok(Box::new(Share { acceleration: wanted.level, digest }))
}

impl Shared for Share {
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error> {
        let mut stream = stream();
        init(&mut stream);
        let digest = Arc::clone(&self.digest);
        Ok(Box::new(DictionaryCompressor { acceleration: self.acceleration, stream, digest }))
    }

    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error> {
        Ok(decompressor(&self.digest.dictionary))
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
        match usize::try_from(written) {
            Ok(bytes) if bytes > 0 => Answer::Compressed(bytes),
            // It does not fit. The stream is undefined after that (lz4.h).
            failed => {
                init(&mut self.stream);
                if failed.is_ok() { Answer::Incompressible } else { Answer::Failed }
            }
        }
    }
}

impl Compressor for DictionaryCompressor {
    fn compress(&mut self, jobs: &mut [Job<'_>]) {
        for job in jobs {
            job.answer = self.compress_unit(job.source, job.dest);
        }
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.stream)
    }
}

/// Needs no state: the dictionary's bytes are enough.
struct DictionaryDecompressor(Arc<Dictionary>);

/// Reads what `lz4hc` writes as well.
pub(in super::super) fn decompressor(dictionary: &Arc<Dictionary>) -> Box<dyn Decompressor> {
    Box::new(DictionaryDecompressor(Arc::clone(dictionary)))
}

impl Decompressor for DictionaryDecompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let source_bytes = c_int::try_from(source.len()).map_err(|_| Corrupt)?;
        let dest_bytes = c_int::try_from(dest.len()).map_err(|_| Corrupt)?;
        let dictionary = self.0.bytes();
        let dictionary_bytes = c_int::try_from(dictionary.len()).expect("at most DICTIONARY_BYTES");
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
        let dictionary = self.0.bytes();
        let dictionary_bytes = c_int::try_from(dictionary.len()).expect("at most DICTIONARY_BYTES");
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
