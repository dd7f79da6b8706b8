//! Zstandard, by its own library, in static workspaces.
//!
//! A frame here has a header of 2 bytes, without magic number, content size, dictionary number and
//! checksum. The pool knows the first three, and the store has its own checksum.
//!
//! # Invariants
//!
//! - `ZSTD-1` A context lies in the workspace next to it, which lives as long and is never resized. It is made
//!   there when it is first used: before that the workspace is not touched, so it takes no memory.
//!   A static context cannot allocate: if it would have to, the library returns an error.
//! - `ZSTD-2` The workspace of a compressor has the size that the library requires to compress one
//!   unit at this level; sources are never longer than a unit. The library derives its parameters
//!   from level and source length, so that small units get small tables.
//! - `ZSTD-3` A context that refers to a digested dictionary holds an `Arc` of it.

mod digest;
pub(super) mod train;

use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use zstd_sys::{
    ZSTD_CCtx, ZSTD_DCtx, ZSTD_ErrorCode, ZSTD_cParameter, ZSTD_compressionParameters,
    ZSTD_dParameter,
};

use super::Error;
use super::backend::{Answer, Compressor, Corrupt, Decompressor, Extended, Software};
use digest::Digest;

/// `ZSTD_c_format`, a parameter that zstd.h names by macro only.
const FORMAT_COMPRESS: ZSTD_cParameter = ZSTD_cParameter::ZSTD_c_experimentalParam2;
/// `ZSTD_d_format`, likewise.
const FORMAT_DECOMPRESS: ZSTD_dParameter = ZSTD_dParameter::ZSTD_d_experimentalParam1;
/// `ZSTD_f_zstd1_magicless`: frames without the magic number, which saves 4 bytes a unit.
const MAGICLESS: c_int = 1;

/// Memory aligned by 8, as the library requires. A `Vec` and not a `Box`: moving a `Box` would
/// assert that no other pointer to its contents exists, and the context is such a pointer.
struct Workspace(Vec<u64>);

impl Workspace {
    fn new(bytes: usize) -> Workspace {
        Workspace(vec![0; bytes.div_ceil(size_of::<u64>())])
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

/// Whether a result of the library is an error.
fn is_error(result: usize) -> bool {
    // SAFETY: a pure function of its argument.
    unsafe { zstd_sys::ZSTD_isError(result) != 0 }
}

struct ZstdCompressor {
    level: c_int,
    /// Lies in the workspace (`ZSTD-1`).
    context: Option<NonNull<ZSTD_CCtx>>,
    workspace: Workspace,
    /// The context refers to it (`ZSTD-3`).
    digest: Option<Arc<Digest>>,
}

// SAFETY: `context` points into `workspace` (ZSTD-1), which the compressor owns and moves with it;
// the library keeps nothing of a context anywhere else, neither per thread nor globally.
unsafe impl Send for ZstdCompressor {}

fn compressor(level: i32, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    // SAFETY: a pure function of its arguments; any level and size will do.
    let parameters = unsafe { zstd_sys::ZSTD_getCParams(level, unit_bytes as u64, 0) };
    Ok(Box::new(ZstdCompressor::new(level, parameters, None)))
}

impl ZstdCompressor {
    /// A context for one unit with these parameters, which the library derived from the level.
    fn new(
        level: i32,
        parameters: ZSTD_compressionParameters,
        digest: Option<Arc<Digest>>,
    ) -> Self {
        // SAFETY: a pure function of its arguments, which come from the library.
        let bytes = unsafe { zstd_sys::ZSTD_estimateCCtxSize_usingCParams(parameters) };
        assert!(!is_error(bytes), "the library accepts its own parameters for level {level}");
        ZstdCompressor { level, context: None, workspace: Workspace::new(bytes), digest }
    }

    /// The context, made at the first call.
    fn context(&mut self) -> NonNull<ZSTD_CCtx> {
        if let Some(context) = self.context {
            return context;
        }
        let bytes = self.workspace.bytes();
        // SAFETY: the workspace is writable for `bytes`, aligned by 8, and no one else's; it lives as long as the
        // context (ZSTD-1).
        let context =
            unsafe { zstd_sys::ZSTD_initStaticCCtx(self.workspace.0.as_mut_ptr().cast(), bytes) };
        let context = NonNull::new(context).expect("the workspace is aligned and large enough");
        let settings = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, self.level),
            (FORMAT_COMPRESS, MAGICLESS),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (ZSTD_cParameter::ZSTD_c_checksumFlag, 0),
            (ZSTD_cParameter::ZSTD_c_dictIDFlag, 0),
        ];
        for (parameter, value) in settings {
            // SAFETY: the context is live and ours alone (ZSTD-1, `&mut self`).
            let result =
                unsafe { zstd_sys::ZSTD_CCtx_setParameter(context.as_ptr(), parameter, value) };
            assert!(!is_error(result), "{parameter:?} = {value} was checked or is a constant");
        }
        if let Some(digest) = &self.digest {
            // SAFETY: both are live, the context is ours alone, and the digest lives as long (ZSTD-3).
            let result =
                unsafe { zstd_sys::ZSTD_CCtx_refCDict(context.as_ptr(), digest.to_compress()) };
            assert!(!is_error(result), "a fresh context takes a dictionary");
        }
        self.context = Some(context);
        context
    }
}

impl Compressor for ZstdCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let context = self.context();
        // SAFETY: the context is live and ours alone (ZSTD-1, `&mut self`) and can't allocate; its
        // workspace is enough for `source` (ZSTD-2), or the library returns an error. `source` is
        // readable and `dest` writable for their lengths by the types of the slices, and they
        // don't overlap because `dest` is exclusive. The call starts a new frame, so what an
        // earlier failure left in the context is dropped.
        let written = unsafe {
            zstd_sys::ZSTD_compress2(
                context.as_ptr(),
                dest.as_mut_ptr().cast(),
                dest.len(),
                source.as_ptr().cast(),
                source.len(),
            )
        };
        if !is_error(written) {
            return Answer::Compressed(written);
        }
        // SAFETY: a pure function of its argument, which is an error; bindings and library are of
        // one version, so that the code is one of the enum.
        let code = unsafe { zstd_sys::ZSTD_getErrorCode(written) };
        match code {
            ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall => Answer::Incompressible,
            _ => Answer::Failed,
        }
    }

    fn memory_bytes(&self) -> usize {
        self.workspace.bytes()
    }
}

struct ZstdDecompressor {
    /// Lies in the workspace (`ZSTD-1`).
    context: Option<NonNull<ZSTD_DCtx>>,
    workspace: Workspace,
    /// The context refers to it (`ZSTD-3`).
    digest: Option<Arc<Digest>>,
}

// SAFETY: as for `ZstdCompressor`.
unsafe impl Send for ZstdDecompressor {}

fn decompressor() -> Result<Box<dyn Decompressor>, Error> {
    Ok(Box::new(ZstdDecompressor::new(None)))
}

impl ZstdDecompressor {
    fn new(digest: Option<Arc<Digest>>) -> Self {
        // SAFETY: no argument, no state: it returns a constant.
        let bytes = unsafe { zstd_sys::ZSTD_estimateDCtxSize() };
        ZstdDecompressor { context: None, workspace: Workspace::new(bytes), digest }
    }

    /// The context, made at the first call.
    fn context(&mut self) -> NonNull<ZSTD_DCtx> {
        if let Some(context) = self.context {
            return context;
        }
        let bytes = self.workspace.bytes();
        // SAFETY: the workspace is writable for `bytes`, aligned by 8, and no one else's; it lives as long as the
        // context (ZSTD-1).
        let context =
            unsafe { zstd_sys::ZSTD_initStaticDCtx(self.workspace.0.as_mut_ptr().cast(), bytes) };
        let context = NonNull::new(context).expect("the workspace is aligned and large enough");
        // SAFETY: the context is live and ours alone (ZSTD-1, `&mut self`).
        let result = unsafe {
            zstd_sys::ZSTD_DCtx_setParameter(context.as_ptr(), FORMAT_DECOMPRESS, MAGICLESS)
        };
        assert!(!is_error(result), "the library knows the format");
        if let Some(digest) = &self.digest {
            // SAFETY: both are live, the context is ours alone, and the digest lives as long (ZSTD-3).
            let result =
                unsafe { zstd_sys::ZSTD_DCtx_refDDict(context.as_ptr(), digest.to_decompress()) };
            assert!(!is_error(result), "a fresh context takes a dictionary");
        }
        self.context = Some(context);
        context
    }
}

impl Decompressor for ZstdDecompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let context = self.context();
        // SAFETY: the context is live and ours alone (ZSTD-1, `&mut self`) and can't allocate.
        // `source` is readable and `dest` writable for their lengths by the types of the slices,
        // and they don't overlap because `dest` is exclusive. The library stays inside both
        // whatever `source` holds, and reads of `dest` only what it wrote.
        let written = unsafe {
            zstd_sys::ZSTD_decompressDCtx(
                context.as_ptr(),
                dest.as_mut_ptr().cast(),
                dest.len(),
                source.as_ptr().cast(),
                source.len(),
            )
        };
        // An error code is larger than any length. A success means that the whole source was used.
        if written == dest.len() { Ok(()) } else { Err(Corrupt) }
    }

    /// Decompresses block by block, each at most 128 KiB of the unit: a unit of one block gains
    /// nothing.
    fn decompress_prefix(
        &mut self,
        source: &[u8],
        unit: &mut [u8],
        wanted: usize,
    ) -> Result<(), Corrupt> {
        let context = self.context().as_ptr();
        let digest = self.digest.as_ref().map_or(ptr::null(), |digest| digest.to_decompress());
        // SAFETY: the context is live and ours alone (ZSTD-1, `&mut self`); the digest is null or lives as
        // long (ZSTD-3).
        let begun = unsafe { zstd_sys::ZSTD_decompressBegin_usingDDict(context, digest) };
        assert!(!is_error(begun), "a context can begin");
        // The same pointer for all blocks, because the library refers to earlier blocks by it.
        let start = unit.as_mut_ptr();
        let (mut read, mut written) = (0_usize, 0);
        while written < wanted {
            // SAFETY: the context is live and ours alone.
            let next = unsafe { zstd_sys::ZSTD_nextSrcSizeToDecompress(context) };
            let part = source.get(read..read.saturating_add(next)).ok_or(Corrupt)?;
            if next == 0 {
                return Err(Corrupt);
            }
            // SAFETY: the context is live and ours alone, and can't allocate. `part` is readable, and `unit`
            // writable behind the `written` bytes, by the types of the slices; they don't overlap because
            // `unit` is exclusive. The library refers to what it wrote before, in `unit`, and to the digest.
            let more = unsafe {
                zstd_sys::ZSTD_decompressContinue(
                    context,
                    start.wrapping_add(written).cast(),
                    unit.len() - written,
                    part.as_ptr().cast(),
                    part.len(),
                )
            };
            if is_error(more) {
                return Err(Corrupt);
            }
            read += next;
            written += more;
        }
        Ok(())
    }

    fn memory_bytes(&self) -> usize {
        self.workspace.bytes()
    }
}

/// The library's own range. A negative level is an acceleration, at most one block of 128 KiB.
const LEVELS: RangeInclusive<i32> = -131_072..=22;

/// The name is the kernel's.
pub(super) static BACKEND: Software = Software {
    name: "zstd",
    levels: LEVELS,
    level_default: 1,
    batch_max: 1,
    compressor,
    decompressor,
    extended: Some(Extended { levels: LEVELS, windows: None, share: digest::share }),
};
