//! Thread-local storage for a thread that the C library does not make.
//!
//! `pthread_create` allocates with the program's `calloc`, and reads the C library's records of the
//! libraries that the program has loaded. A thread of the engine may do neither. So the layout is
//! learnt at the start of the program, from the calling thread, and the storage of a new thread is
//! laid out in the same way, in our own memory:
//! ```text
//! tp - span   the initial images of the modules loaded at the start, where the code expects them
//! tp          the head of the control block: its own address, the vector, both guards; then zeros
//!             ... the area of restartable sequences, where the C library has it
//! tp + 6 KiB  the vector: the address of each module's storage
//!
//! The code that runs in a thread of the engine needs of this: `errno`, the thread-locals of this
//! library, and both guards.
//!
//! # Invariants
//!
//! - `TLS-1` The storage of a module is as far below the thread pointer as in every other thread:
//!   the code of libraries loaded at the start has that distance in its relocations.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

/// Bytes above the thread pointer: `struct pthread` has 2304 in glibc 2.36 and grows slowly.
pub(super) const CONTROL_BYTES: usize = 8 << 10;

/// The offset of the vector from the thread pointer.
const VECTOR_AT: usize = 6 << 10;

/// The offset at which the kernel stores the thread's id.
pub(super) const NUMBER_AT: usize = VECTOR_AT - 64;

/// Modules that fit into the vector; its length and its generation take one entry each.
const MODULES_MAX: usize = (CONTROL_BYTES - VECTOR_AT) / size_of::<Entry>() - 2;

/// A longer distance cannot belong to thread-local storage.
const SPAN_MAX: usize = 1 << 30;

/// `dtv_t` of glibc: the address of a module's storage, and what to free.
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

/// A module that was loaded at the start.
struct Module {
    number: usize,
    /// The distance of its storage below the thread pointer.
    below: usize,
    /// Its initial image, which is never unloaded.
    image: usize,
    image_bytes: usize,
}

/// The layout of the program's thread-local storage.
pub(super) struct Layout {
    modules: Vec<Module>,
    /// Bytes below the thread pointer.
    pub(super) span: usize,
    generation: usize,
    /// The offset of the area of restartable sequences from the thread pointer, if it is in use.
    sequence: Option<isize>,
    sequence_in_use: bool,
}

static LAYOUT: OnceLock<Layout> = OnceLock::new();

/// Bytes of the first version of `struct rseq`, which every kernel accepts, and its signature on
/// x86-64.
const SEQUENCE_BYTES: usize = 32;
const SEQUENCE_SIGNATURE: u32 = 0x5305_3053;
/// `RSEQ_CPU_ID_UNINITIALIZED`.
const NO_CPU: i32 = -1;

/// The layout, if [`super::learn`] was called.
pub(super) fn layout() -> Option<&'static Layout> {
    LAYOUT.get()
}

/// Learns the layout from the calling thread and the modules of the program.
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

/// The value of a variable that the C library exports, if it does.
fn number_of<T: Copy>(name: &CStr) -> Option<T> {
    // SAFETY: a look-up by name.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: null, or the C library's variable, which has this type.
    unsafe { at.cast::<T>().as_ref() }.copied()
}

/// Notes one module: its number, its place and its initial image.
unsafe extern "C" fn note(
    about: *mut libc::dl_phdr_info,
    _bytes: usize,
    layout: *mut c_void,
) -> c_int {
    // SAFETY: learn() passed this pointer, and no other code has it.
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
    /// Lays out the storage around the thread pointer `at`.
    ///
    /// # Safety
    ///
    /// `at - self.span` to `at + CONTROL_BYTES` is the caller's memory, page-aligned, and all
    /// zeros.
    pub(super) unsafe fn lay_out(&self, at: usize) {
        let put = |offset: usize, value: usize| {
            // SAFETY: below CONTROL_BYTES, where the memory is the caller's by the contract.
            unsafe { ((at + offset) as *mut usize).write(value) };
        };
        for module in &self.modules {
            let to = (at - module.below) as *mut u8;
            // SAFETY: the image is a part of a loaded module; the place lies within the span (learn()),
            // as far below the thread pointer as in a thread of the program, so it fits (TLS-1).
            unsafe { to.copy_from_nonoverlapping(module.image as *const u8, module.image_bytes) };
        }
        head::ITSELF.iter().for_each(|offset| put(*offset, at));
        // A stack protector compares with the guard of its own thread only; one value for all
        // threads is what the C library uses.
        head::GUARDS.iter().for_each(|offset| put(*offset, word_of_thread(*offset)));
        self.make_vector(at, put);
        if let Some(offset) = self.sequence {
            let area = at.wrapping_add_signed(offset) as *mut i32;
            // SAFETY: within the control block or the span (learn()); `cpu_id` is its second word.
            unsafe { area.wrapping_add(1).write(NO_CPU) };
        }
    }

    /// Writes the vector: its length, its generation, and an entry for each module.
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

    /// On the new thread: registers the area in which the kernel stores the number of its CPU.
    pub(super) fn register_sequence(&self, at: usize) {
        if let Some(offset) = self.sequence.filter(|_| self.sequence_in_use) {
            let area = at.wrapping_add_signed(offset);
            // This fails on a kernel without such sequences; the area then says "no CPU".
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
    // SAFETY: each thread of the C library has a vector of at least two entries.
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
