//! Thread-local storage for a thread that the C library does not make.
//!
//! The C library's own way (`pthread_create`) allocates by the program's `calloc`, and reads what it keeps
//! about the libraries that the program has loaded. A thread of the engine may do neither. So the layout is
//! learnt while the program starts, from the thread that is there, and a new thread's storage is laid out
//! likewise, in memory of our own:
//!
//! ```text
//! tp - span   the initial images of the modules that were there at the start, where the code expects them
//! tp          the head of the control block: itself, its vector, both guards; then zeros
//!             ... the area of restartable sequences, where the C library has it
//! tp + 6 KiB  the vector: where each module's storage is
//! ```
//!
//! What a thread of ours runs needs of this: `errno`, the thread-locals of our library, and both guards.
//!
//! # Invariants
//!
//! - `TLS-1` A module's storage lies as far below the thread pointer as in every other thread: code of
//!   libraries that were loaded at the start has that distance in its relocations.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

/// Bytes above the thread pointer: `struct pthread` has 2304 in glibc 2.36 and grows slowly.
pub(super) const CONTROL_BYTES: usize = 8 << 10;

/// Where the vector begins, behind the thread pointer.
const VECTOR_AT: usize = 6 << 10;

/// Where the kernel keeps the thread's number.
pub(super) const NUMBER_AT: usize = VECTOR_AT - 64;

/// Modules that fit into the vector: its length and its generation take an entry each.
const MODULES_MAX: usize = (CONTROL_BYTES - VECTOR_AT) / size_of::<Entry>() - 2;

/// More than that is no distance of thread-local storage.
const SPAN_MAX: usize = 1 << 30;

/// `dtv_t` of glibc: where a module's storage is, and what to free.
#[repr(C)]
struct Entry {
    value: usize,
    to_free: usize,
}

/// The value of a module without storage in this thread.
const UNALLOCATED: usize = usize::MAX;

/// Offsets in `tcbhead_t` of glibc on x86-64.
mod head {
    pub(super) const ITSELF: [usize; 2] = [0, 16];
    pub(super) const VECTOR: usize = 8;
    pub(super) const GUARDS: [usize; 2] = [0x28, 0x30];
}

/// A module that was there at the start.
struct Module {
    number: usize,
    /// Bytes from its storage up to the thread pointer.
    below: usize,
    /// Its initial image, which is never unloaded.
    image: usize,
    image_bytes: usize,
}

/// What is known of the program's thread-local storage.
pub(super) struct Layout {
    modules: Vec<Module>,
    /// Bytes below the thread pointer.
    pub(super) span: usize,
    generation: usize,
    /// Where the area of restartable sequences is, from the thread pointer; if it is in use.
    sequence: Option<isize>,
    sequence_in_use: bool,
}

static LAYOUT: OnceLock<Layout> = OnceLock::new();

/// Bytes of `struct rseq` as it was first, which every kernel accepts, and its signature on x86-64.
const SEQUENCE_BYTES: usize = 32;
const SEQUENCE_SIGNATURE: u32 = 0x5305_3053;
/// `RSEQ_CPU_ID_UNINITIALIZED`.
const NO_CPU: i32 = -1;

/// What [`super::learn`] has learnt.
pub(super) fn layout() -> Option<&'static Layout> {
    LAYOUT.get()
}

/// Looks at the calling thread, and at the modules of the program.
pub(super) fn learn() {
    LAYOUT.get_or_init(|| {
        let mut layout = Layout {
            modules: Vec::new(),
            span: 0,
            generation: vector_word(0),
            sequence: number_of(c"__rseq_offset"),
            sequence_in_use: number_of::<u32>(c"__rseq_size").is_some_and(|bytes| bytes > 0),
        };
        // SAFETY: `note` is called with the pointer given here, while `layout` lives.
        unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut layout).cast()) };
        let sequence = layout.sequence.unwrap_or(0).min(0).unsigned_abs();
        let lowest = layout.modules.iter().map(|module| module.below).max().unwrap_or(0);
        layout.span = (lowest.max(sequence) + 64).next_multiple_of(crate::map::PAGE_BYTES);
        layout
    });
}

/// A number that the C library exports, if it does.
fn number_of<T: Copy>(name: &CStr) -> Option<T> {
    // SAFETY: a look-up by name.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: null, or the C library's variable, which has this type.
    unsafe { at.cast::<T>().as_ref() }.copied()
}

/// Notes one module: its number, its place and its image.
unsafe extern "C" fn note(
    about: *mut libc::dl_phdr_info,
    _bytes: usize,
    layout: *mut c_void,
) -> c_int {
    // SAFETY: learn() gave this pointer, and nobody else has one.
    let layout = unsafe { &mut *layout.cast::<Layout>() };
    // SAFETY: the C library's description of a module, valid during the call.
    let about = unsafe { &*about };
    let below = super::pointer().wrapping_sub(about.dlpi_tls_data as usize);
    if about.dlpi_tls_data.is_null() || below > SPAN_MAX || about.dlpi_tls_modid > MODULES_MAX {
        return 0;
    }
    // SAFETY: the module's table of program headers, which stays mapped.
    let headers =
        unsafe { std::slice::from_raw_parts(about.dlpi_phdr, usize::from(about.dlpi_phnum)) };
    let word = |value: u64| usize::try_from(value).unwrap_or(0);
    if let Some(header) = headers.iter().find(|header| header.p_type == libc::PT_TLS) {
        layout.modules.push(Module {
            number: about.dlpi_tls_modid,
            below,
            image: word(about.dlpi_addr) + word(header.p_vaddr),
            image_bytes: word(header.p_filesz),
        });
    }
    0
}

impl Layout {
    /// Lays storage out around the thread pointer `at`.
    ///
    /// # Safety
    ///
    /// `at - self.span` to `at + CONTROL_BYTES` is memory of the caller's, page-aligned, and all zeros.
    pub(super) unsafe fn lay_out(&self, at: usize) {
        let put = |offset: usize, value: usize| {
            // SAFETY: below CONTROL_BYTES; by the contract that is the caller's.
            unsafe { ((at + offset) as *mut usize).write(value) };
        };
        for module in &self.modules {
            let to = (at - module.below) as *mut u8;
            // SAFETY: the image is a part of a loaded module; the place lies within the span (learn()),
            // as far below the thread pointer as in a thread of the program, so it fits (TLS-1).
            unsafe { to.copy_from_nonoverlapping(module.image as *const u8, module.image_bytes) };
        }
        head::ITSELF.iter().for_each(|offset| put(*offset, at));
        // Code with a stack protector compares with the word of its own thread only; one value for all
        // is what the C library has.
        head::GUARDS.iter().for_each(|offset| put(*offset, word_of_thread(*offset)));
        self.make_vector(at, put);
        if let Some(offset) = self.sequence {
            let area = at.wrapping_add_signed(offset) as *mut i32;
            // SAFETY: within the control block or the span (learn()); `cpu_id` is its second word.
            unsafe { area.wrapping_add(1).write(NO_CPU) };
        }
    }

    /// The vector: its length, its generation, and an entry for each module.
    fn make_vector(&self, at: usize, put: impl Fn(usize, usize)) {
        let entry = |index: usize| VECTOR_AT + index * size_of::<Entry>();
        put(head::VECTOR, at + entry(1));
        put(entry(0), MODULES_MAX);
        put(entry(1), self.generation);
        (0..MODULES_MAX).for_each(|index| put(entry(2 + index), UNALLOCATED));
        for module in &self.modules {
            put(entry(1 + module.number), at - module.below);
        }
    }

    /// On the new thread: has the kernel tell it in which CPU it runs.
    pub(super) fn register_sequence(&self, at: usize) {
        if let Some(offset) = self.sequence.filter(|_| self.sequence_in_use) {
            let area = at.wrapping_add_signed(offset);
            // It fails where there are no such sequences; the area says "no CPU" then.
            // SAFETY: the area is this thread's alone, and stays as long as the thread.
            unsafe {
                libc::syscall(libc::SYS_rseq, area, SEQUENCE_BYTES, 0_usize, SEQUENCE_SIGNATURE)
            };
        }
    }
}

/// A word of the calling thread's vector.
fn vector_word(index: usize) -> usize {
    let vector = word_of_thread(head::VECTOR) + index * size_of::<Entry>();
    // SAFETY: each thread of the C library has a vector of two entries at least.
    unsafe { (vector as *const usize).read() }
}

/// A word of the calling thread's control block.
#[cfg(target_arch = "x86_64")]
fn word_of_thread(offset: usize) -> usize {
    let word: usize;
    // SAFETY: `fs:` is the control block of this thread, and the offset is in its head.
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:[{}]", out(reg) word, in(reg) offset,
            options(nostack, readonly, preserves_flags));
    }
    word
}

#[cfg(not(target_arch = "x86_64"))]
fn word_of_thread(_offset: usize) -> usize {
    0
}
