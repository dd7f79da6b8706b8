//! Raw deflate (RFC 1951), by libdeflate; by zlib with a small window or a dictionary ([`window`]).
//!
//! Both libraries allocate when a compressor or decompressor is made, through functions that they
//! are given. The functions here take the memory from Rust's allocator. The libraries free memory
//! without its length, so each allocation begins with its length ([`HEADER_BYTES`]).
//!
//! # Invariants
//!
//! - `DEFL-1` A pointer that [`allocate`] returned lies `HEADER_BYTES` into a live allocation that
//!   is aligned by `HEADER_BYTES`. The first word of the allocation is its length, header included.

mod window;

use std::alloc::Layout;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

use libdeflate_sys::{
    libdeflate_compressor, libdeflate_decompressor, libdeflate_options,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS,
};

use super::Error;
use super::backend::{Answer, Compressor, Corrupt, Decompressor, Software};

/// Room for the length; also the alignment that `malloc` promises.
const HEADER_BYTES: usize = 16;

const _: () = assert!(HEADER_BYTES.is_power_of_two() && HEADER_BYTES >= size_of::<usize>());

thread_local! {
    /// All bytes that [`allocate`] ever returned to this thread. libdeflate's functions have no argument that refers to
    /// the caller. No lock: a child of `fork` would wait for ever for one that another thread of its parent held.
    static ALLOCATED_BYTES: Cell<usize> = const { Cell::new(0) };
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, HEADER_BYTES).ok()
}

unsafe extern "C" fn allocate(bytes: usize) -> *mut c_void {
    let Some(total) = bytes.checked_add(HEADER_BYTES) else { return ptr::null_mut() };
    let Some(layout) = layout(total) else { return ptr::null_mut() };
    // Zeroed, because the pages of a new zeroed mapping are not used until the codec touches them.
    // SAFETY: the layout is not empty: it has at least `HEADER_BYTES` bytes.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: `start` is writable for `total >= HEADER_BYTES` bytes and aligned by `HEADER_BYTES`,
    // so a `usize` fits there.
    unsafe { start.cast::<usize>().write(total) };
    // The sum wraps after 2^64 bytes; the difference of two is still right.
    ALLOCATED_BYTES.set(ALLOCATED_BYTES.get().wrapping_add(total));
    // SAFETY: `HEADER_BYTES <= total`, so the offset stays inside the allocation. DEFL-1 holds.
    unsafe { start.add(HEADER_BYTES) }.cast()
}

unsafe extern "C" fn release(memory: *mut c_void) {
    if memory.is_null() {
        return;
    }
    // SAFETY: libdeflate frees what `allocate` returned, so by DEFL-1 the allocation starts there.
    let start = unsafe { memory.cast::<u8>().sub(HEADER_BYTES) };
    // SAFETY: by DEFL-1 the first word is the length.
    let total = unsafe { start.cast::<usize>().read() };
    let layout = layout(total).expect("DEFL-1: the length that allocate checked");
    // SAFETY: by DEFL-1 this is the allocation and its layout; libdeflate frees it once.
    unsafe { std::alloc::dealloc(start, layout) };
}

/// Runs `make`; returns its result and the bytes that it took from [`allocate`].
fn counted<T>(make: impl FnOnce() -> Option<T>) -> Result<(T, usize), Error> {
    let before = ALLOCATED_BYTES.get();
    let made = make().ok_or(Error::OutOfMemory { codec: "deflate" })?;
    Ok((made, ALLOCATED_BYTES.get().wrapping_sub(before)))
}

/// Runs `make` with options that contain the allocator above; returns its result and the bytes that
/// it took.
fn set_up<T>(
    make: impl FnOnce(*const libdeflate_options) -> *mut T,
) -> Result<(NonNull<T>, usize), Error> {
    let options = libdeflate_options {
        sizeof_options: size_of::<libdeflate_options>(),
        malloc_func: Some(allocate),
        free_func: Some(release),
    };
    counted(|| NonNull::new(make(&raw const options)))
}

/// CRC-32 as in gzip.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    // SAFETY: `bytes` is readable for its length by the type of the slice. Neither memory nor state is kept.
    unsafe { libdeflate_sys::libdeflate_crc32(0, bytes.as_ptr().cast(), bytes.len()) }
}

struct DeflateCompressor {
    state: NonNull<libdeflate_compressor>,
    memory_bytes: usize,
}

// SAFETY: the compressor owns the state, whose memory comes from an allocator that any thread may
// free to; libdeflate keeps nothing of it anywhere else.
unsafe impl Send for DeflateCompressor {}

fn compressor(level: i32, _unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
    let (state, memory_bytes) = set_up(|options| {
        // SAFETY: `options` is live for the call, whole, and of the length that it states; the
        // functions in it behave as `malloc` and `free`. The level is in `BACKEND.levels`, and any
        // other would give null.
        unsafe { libdeflate_sys::libdeflate_alloc_compressor_ex(level, options) }
    })?;
    Ok(Box::new(DeflateCompressor { state, memory_bytes }))
}

impl Compressor for DeflateCompressor {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        // SAFETY: the state is live until `drop` and ours alone by `&mut self`. `source` is
        // readable and `dest` writable for their lengths by the types of the slices, and they
        // don't overlap because `dest` is exclusive. libdeflate allocates at set-up only.
        let written = unsafe {
            libdeflate_sys::libdeflate_deflate_compress(
                self.state.as_ptr(),
                source.as_ptr().cast(),
                source.len(),
                dest.as_mut_ptr().cast(),
                dest.len(),
            )
        };
        // 0 means the only possible failure: the result does not fit.
        if written == 0 { Answer::Incompressible } else { Answer::Compressed(written) }
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

impl Drop for DeflateCompressor {
    fn drop(&mut self) {
        // SAFETY: the state is live, and not used after this.
        unsafe { libdeflate_sys::libdeflate_free_compressor(self.state.as_ptr()) };
    }
}

struct DeflateDecompressor {
    state: NonNull<libdeflate_decompressor>,
    memory_bytes: usize,
}

// SAFETY: as for `DeflateCompressor`.
unsafe impl Send for DeflateDecompressor {}

fn decompressor() -> Result<Box<dyn Decompressor>, Error> {
    let (state, memory_bytes) = set_up(|options| {
        // SAFETY: `options` is live for the call, whole, and of the length that it states; the
        // functions in it behave as `malloc` and `free`.
        unsafe { libdeflate_sys::libdeflate_alloc_decompressor_ex(options) }
    })?;
    Ok(Box::new(DeflateDecompressor { state, memory_bytes }))
}

impl Decompressor for DeflateDecompressor {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let mut used = 0;
        // SAFETY: the state is live until `drop` and ours alone by `&mut self`. `source` is
        // readable, `dest` and `used` are writable for their lengths by their types, and none
        // overlap because `dest` and `used` are exclusive. libdeflate stays inside all of them
        // whatever `source` holds, reads of `dest` only what it wrote, and takes the null pointer
        // as "exactly `dest.len()` bytes or failure".
        let result = unsafe {
            libdeflate_sys::libdeflate_deflate_decompress_ex(
                self.state.as_ptr(),
                source.as_ptr().cast(),
                source.len(),
                dest.as_mut_ptr().cast(),
                dest.len(),
                &raw mut used,
                ptr::null_mut(),
            )
        };
        if result == SUCCESS && used == source.len() { Ok(()) } else { Err(Corrupt) }
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

impl Drop for DeflateDecompressor {
    fn drop(&mut self) {
        // SAFETY: the state is live, and not used after this.
        unsafe { libdeflate_sys::libdeflate_free_decompressor(self.state.as_ptr()) };
    }
}

/// The levels of libdeflate without 0, which does not compress. The default is 1 because speed
/// matters most.
pub(super) static BACKEND: Software = Software {
    name: "deflate",
    levels: 1..=12,
    level_default: 1,
    batch_max: 1,
    compressor,
    decompressor,
    extended: Some(window::EXTENDED),
};
