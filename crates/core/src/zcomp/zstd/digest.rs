//! A dictionary for Zstandard, digested once for each direction and shared by all streams.
//!
//! A dictionary that zstd has trained also contains tables of frequencies. Any other file is used
//! as bytes that come before the unit.

use std::ptr::NonNull;
use std::sync::Arc;

use zstd_sys::{
    ZSTD_CDict, ZSTD_DDict, ZSTD_compressionParameters, ZSTD_dictContentType_e::ZSTD_dct_auto,
    ZSTD_dictLoadMethod_e::ZSTD_dlm_byRef,
};

use super::super::backend::{Compressor, Decompressor, Shared, Wanted};
use super::super::{Dictionary, Error};
use super::{Workspace, ZstdCompressor, ZstdDecompressor, is_error};

/// A dictionary in the forms that contexts use. It never changes: contexts of all threads read it.
pub(super) struct Digest {
    /// Lies in the first workspace, and refers to the dictionary (`DICT-1`).
    to_compress: NonNull<ZSTD_CDict>,
    /// Lies in the second workspace, and refers to the dictionary.
    to_decompress: NonNull<ZSTD_DDict>,
    workspaces: [Workspace; 2],
    _dictionary: Arc<Dictionary>,
}

// SAFETY: the pointers lead into memory that the digest owns and moves with it; nothing else has them.
unsafe impl Send for Digest {}
// SAFETY: the library takes both as pointers to const, and changes neither once it is made.
unsafe impl Sync for Digest {}

impl Digest {
    fn new(
        parameters: ZSTD_compressionParameters,
        dictionary: Arc<Dictionary>,
    ) -> Result<Digest, Error> {
        let refused = || Error::Dictionary {
            path: dictionary.path().to_owned(),
            why: "zstd: it begins as a trained one and goes on as none".to_owned(),
        };
        let bytes = dictionary.bytes();
        // SAFETY: a pure function of its arguments, of which the second came from the library.
        let compress_bytes = unsafe {
            zstd_sys::ZSTD_estimateCDictSize_advanced(bytes.len(), parameters, ZSTD_dlm_byRef)
        };
        // SAFETY: a pure function of its arguments.
        let decompress_bytes =
            unsafe { zstd_sys::ZSTD_estimateDDictSize(bytes.len(), ZSTD_dlm_byRef) };
        assert!(!is_error(compress_bytes) && !is_error(decompress_bytes), "the sizes are known");
        let mut workspaces = [compress_bytes, decompress_bytes].map(Workspace::new);
        let [for_compress, for_decompress] = &mut workspaces;
        // SAFETY: the workspace is writable for `bytes()`, aligned by 8, and no one else's; it and the
        // dictionary, which is readable for its length, live as long as the digest (DICT-1).
        let to_compress = unsafe {
            zstd_sys::ZSTD_initStaticCDict(
                for_compress.0.as_mut_ptr().cast(),
                for_compress.bytes(),
                bytes.as_ptr().cast(),
                bytes.len(),
                ZSTD_dlm_byRef,
                ZSTD_dct_auto,
                parameters,
            )
        };
        // SAFETY: as above.
        let to_decompress = unsafe {
            zstd_sys::ZSTD_initStaticDDict(
                for_decompress.0.as_mut_ptr().cast(),
                for_decompress.bytes(),
                bytes.as_ptr().cast(),
                bytes.len(),
                ZSTD_dlm_byRef,
                ZSTD_dct_auto,
            )
        };
        Ok(Digest {
            to_compress: NonNull::new(to_compress.cast_mut()).ok_or_else(refused)?,
            to_decompress: NonNull::new(to_decompress.cast_mut()).ok_or_else(refused)?,
            workspaces,
            _dictionary: Arc::clone(&dictionary),
        })
    }

    pub(super) fn to_compress(&self) -> *const ZSTD_CDict {
        self.to_compress.as_ptr()
    }

    pub(super) fn to_decompress(&self) -> *const ZSTD_DDict {
        self.to_decompress.as_ptr()
    }
}

/// A level and its digested dictionary.
struct Share {
    level: i32,
    parameters: ZSTD_compressionParameters,
    digest: Arc<Digest>,
}

pub(super) fn share(wanted: &Wanted) -> Result<Box<dyn Shared>, Error> {
    let dictionary = Arc::clone(wanted.dictionary());
    // SAFETY: a pure function of its arguments; any level and sizes will do.
    let parameters = unsafe {
        zstd_sys::ZSTD_getCParams(wanted.level, wanted.unit_bytes as u64, dictionary.bytes().len())
    };
    let digest = Arc::new(Digest::new(parameters, dictionary)?);
    Ok(Box::new(Share { level: wanted.level, parameters, digest }))
}

impl Shared for Share {
    fn compressor(&self) -> Result<Box<dyn Compressor>, Error> {
        let digest = Some(Arc::clone(&self.digest));
        Ok(Box::new(ZstdCompressor::new(self.level, self.parameters, digest)))
    }

    fn decompressor(&self) -> Result<Box<dyn Decompressor>, Error> {
        Ok(Box::new(ZstdDecompressor::new(Some(Arc::clone(&self.digest)))))
    }

    fn memory_bytes(&self) -> usize {
        self.digest.workspaces.iter().map(Workspace::bytes).sum::<usize>()
            + self.digest._dictionary.bytes().len()
    }
}
