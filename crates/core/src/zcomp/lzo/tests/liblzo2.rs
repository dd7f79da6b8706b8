//! liblzo2, to compare with.

use std::ffi::{CStr, c_char, c_int, c_void};

type Compress = unsafe extern "C" fn(*const u8, usize, *mut u8, *mut usize, *mut c_void) -> c_int;

/// liblzo2, loaded at run time: it is under the GPL, so nothing is built with it.
pub(super) struct Liblzo2 {
    /// `lzo1x_1`, `lzo1x_1_15` and `lzo1x_999`, which uses every instruction.
    compress: [Compress; 3],
    decompress: Compress,
    scratch: Vec<u64>,
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

impl Liblzo2 {
    /// `None` if it is not installed, with a message.
    pub(super) fn load() -> Option<Liblzo2> {
        // SAFETY: a name that ends in 0, and RTLD_NOW.
        let library = unsafe { dlopen(c"liblzo2.so.2".as_ptr(), 2) };
        if library.is_null() {
            eprintln!("SKIPPED: liblzo2.so.2 is not installed, nothing was compared with it");
            return None;
        }
        let function = |name: &CStr| {
            // SAFETY: a library that is open, and a name that ends in 0.
            let function = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!function.is_null(), "liblzo2 has {name:?}");
            // SAFETY: the functions named below have this type in LZO's API.
            unsafe { std::mem::transmute::<*mut c_void, Compress>(function) }
        };
        Some(Liblzo2 {
            compress: [c"lzo1x_1_compress", c"lzo1x_1_15_compress", c"lzo1x_999_compress"]
                .map(function),
            decompress: function(c"lzo1x_decompress_safe"),
            // `lzo1x_999` needs most: 14 * 16384 * 2 bytes.
            scratch: vec![0; 1 << 17],
        })
    }

    /// Writes a stream to `dest`, and returns its length.
    pub(super) fn compress(&mut self, which: usize, source: &[u8], dest: &mut [u8]) -> usize {
        assert!(dest.len() >= source.len() + source.len() / 16 + 67);
        let mut dest_bytes = dest.len();
        let scratch = self.scratch.as_mut_ptr().cast();
        // SAFETY: both slices have these lengths, `dest` holds the longest stream (asserted), and
        // `scratch` is as long as any of these functions needs.
        let result = unsafe {
            self.compress[which](
                source.as_ptr(),
                source.len(),
                dest.as_mut_ptr(),
                &raw mut dest_bytes,
                scratch,
            )
        };
        assert_eq!(result, 0);
        dest_bytes
    }

    /// Whether `source` is a stream that fills `dest`.
    pub(super) fn decompress(&self, source: &[u8], dest: &mut [u8]) -> bool {
        let mut dest_bytes = dest.len();
        // SAFETY: both slices have these lengths, and the function stays inside of them.
        let result = unsafe {
            (self.decompress)(
                source.as_ptr(),
                source.len(),
                dest.as_mut_ptr(),
                &raw mut dest_bytes,
                std::ptr::null_mut(),
            )
        };
        result == 0 && dest_bytes == dest.len()
    }
}
