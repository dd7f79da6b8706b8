//! Programs that are built with a sanitizer: they run again, without this library.
//!
//! The address, memory and thread sanitizers serve `malloc` and `mmap` themselves, and must see every call.
//! `zfolio run` refuses such a program. But another program may start one, and then this library is loaded into
//! it. So the process executes its program again, with the same arguments and without this library.
//!
//! This happens at the first `malloc`, which the sanitizer's runtime calls before any constructor runs. The C
//! library has no environment then, so it is read from `/proc`. The runtime replaces many functions of the C
//! library, and these cannot be called before it is ready: this module only makes system calls and copies memory.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use zfolio_pager::fatal;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::{Errno, files, map, process};

use crate::interpose::interpose;

// The address of each runtime's first function, or 0. The loader fills these words in when it loads this
// library. A look-up by name is not possible: it allocates if the name does not exist.
std::arch::global_asm!(
    ".weak __asan_init",
    ".weak __hwasan_init",
    ".weak __msan_init",
    ".weak __tsan_init",
    ".pushsection .data.rel.ro, \"aw\"",
    ".p2align 3",
    ".globl zfolio_sanitizers",
    ".hidden zfolio_sanitizers",
    "zfolio_sanitizers:",
    "    .8byte __asan_init",
    "    .8byte __hwasan_init",
    "    .8byte __msan_init",
    "    .8byte __tsan_init",
    ".popsection",
);

unsafe extern "C" {
    static zfolio_sanitizers: [usize; 4];
}

/// Returns if there is no sanitizer in this process.
pub(crate) fn step_aside() {
    // SAFETY: the words above, which nobody writes once the loader has filled them in.
    let runtimes = unsafe { std::ptr::read_volatile(&raw const zfolio_sanitizers) };
    if runtimes != [0; 4] {
        execute_again();
    }
}

#[cold]
fn execute_again() -> ! {
    let (arguments, mut environment) =
        match (read(c"/proc/self/cmdline"), read(c"/proc/self/environ")) {
            (Ok(arguments), Ok(environment)) => (arguments, environment),
            (Err(error), _) | (_, Err(error)) => stop(error),
        };
    // If the library stayed in LD_PRELOAD, it would be loaded again, without end.
    if !leave_out(&mut environment, &own_path()) {
        stop(Errno::NOENT);
    }
    let name = arguments.split(|byte| *byte == 0).next().unwrap_or_default();
    fatal::print_here(format_args!(
        "{} is built with a sanitizer, which must have the memory to itself: it runs without zfolio",
        String::from_utf8_lossy(name)
    ));
    stop(execute(&arguments, &environment))
}

/// Ends the process: the program can run neither with this library nor without.
fn stop(error: Errno) -> ! {
    fatal::print_here(format_args!(
        "a program that is built with a sanitizer cannot be started without zfolio: {}: stopped",
        ErrnoText(error)
    ));
    process::abort_now(fatal::STATUS)
}

/// The contents of a file. It is left open for `execve` to close: `close` may be the runtime's, which is not ready.
fn read(path: &CStr) -> Result<Vec<u8>, Errno> {
    let file = ManuallyDrop::new(files::open_read(path)?);
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::io::read(&*file, &mut piece) {
            Ok(0) => return Ok(bytes),
            Ok(length) => bytes.extend_from_slice(&piece[..length]),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The path of this library, as it is in `LD_PRELOAD`.
fn own_path() -> Vec<u8> {
    let mut about = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address of ours, and a place for the answer.
    let found = unsafe { libc::dladdr(step_aside as *const c_void, about.as_mut_ptr()) };
    // SAFETY: all zeros is a value of this type.
    let name = unsafe { about.assume_init() }.dli_fname;
    if found == 0 || name.is_null() {
        return Vec::new();
    }
    // SAFETY: the loader's own text, which lives as long as the library.
    unsafe { CStr::from_ptr(name) }.to_bytes().to_vec()
}

/// Removes `library` from `LD_PRELOAD` in an environment whose variables each end with a zero byte, as the kernel
/// has it. False if the library is not there.
fn leave_out(environment: &mut Vec<u8>, library: &[u8]) -> bool {
    const NAME: &[u8] = b"LD_PRELOAD=";
    let mut left = Vec::with_capacity(environment.len());
    let mut found = false;
    for variable in environment.split_inclusive(|byte| *byte == 0) {
        let Some(list) = variable.strip_prefix(NAME) else {
            left.extend_from_slice(variable);
            continue;
        };
        let others: Vec<&[u8]> = list
            .split(|byte| b": \0".contains(byte))
            .filter(|path| !path.is_empty() && *path != library)
            .collect();
        found |= list.split(|byte| b": \0".contains(byte)).any(|path| path == library);
        if !others.is_empty() {
            left.extend_from_slice(NAME);
            left.extend(others.join(&b':'));
            left.push(0);
        }
    }
    *environment = left;
    found
}

/// Executes this process's program again. Returns only if that fails, with the error.
fn execute(arguments: &[u8], environment: &[u8]) -> Errno {
    // First by its path, so that the process has the right name; by the kernel's link if the file is gone.
    let mut name = [0_u8; 4096];
    let link = c"/proc/self/exe";
    let words = [link.as_ptr() as usize, name.as_mut_ptr() as usize, name.len() - 1, 0, 0, 0];
    // SAFETY: a path, and a buffer of more than `words[2]` bytes, so that a zero byte remains after the text.
    unsafe { map::forward(libc::SYS_readlink, words) }.ok();
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    let try_path = |path: *const u8| {
        let lists = [arguments.as_ptr() as usize, environment.as_ptr() as usize];
        let words = [path as usize, lists[0], lists[1], 0, 0, 0];
        // SAFETY: a path, and two lists of texts: each text ends with a zero byte, each list with a null.
        unsafe { map::forward(libc::SYS_execve, words) }.err().unwrap_or(Errno::NOENT)
    };
    try_path(name.as_ptr());
    try_path(link.as_ptr().cast())
}

/// Pointers to the texts in `texts`, each of which ends with a zero byte; a null pointer is the last.
fn pointers(texts: &[u8]) -> Vec<*const u8> {
    let starts = texts.split_inclusive(|byte| *byte == 0).map(<[u8]>::as_ptr);
    starts.chain([std::ptr::null()]).collect()
}

interpose! {
    /// Options for the address sanitizer, which calls this function at its start. By default it would end the
    /// process before the first `malloc`, because it is not the first library. A program's own definition of this
    /// function takes precedence.
    fn __asan_default_options() -> *const c_char {
        c"verify_asan_link_order=0".as_ptr()
    }
}
