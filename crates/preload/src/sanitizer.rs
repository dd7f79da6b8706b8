//! Programs with the runtime of a sanitizer: they run as if we had not been there.
//!
//! The address, memory and thread sanitizers serve `malloc` and `mmap` themselves, and know only what they
//! served. `zfolio run` refuses such a program; but one that another program starts has this library in it. So
//! the process executes its program once more, with the same words and without this library.
//!
//! This happens at the first `malloc`, which the runtime's own start asks for before any constructor runs. The
//! C library has no environment by then, so `/proc` is asked. Many functions of the C library are the runtime's, and
//! cannot be called yet: here only system calls are made, and memory is copied.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use zfolio_pager::fatal;
use zfolio_sys::words::Words;
use zfolio_sys::{Errno, files, map, process};

use crate::allocator::interpose;

// The address of each runtime's first function, or 0: the loader fills these words in when it loads us. To
// look a name up that is not there would allocate.
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
    // A library that is still asked for would be loaded again, and so on for ever.
    if !leave_out(&mut environment, &own_path()) {
        stop(Errno::NOENT);
    }
    let name = arguments.split(|byte| *byte == 0).next().unwrap_or_default();
    fatal::tell_here(format_args!(
        "{} is built with a sanitizer, which must have the memory to itself: it runs without zfolio",
        String::from_utf8_lossy(name)
    ));
    stop(execute(&arguments, &environment))
}

/// The program can run neither with us nor without.
fn stop(error: Errno) -> ! {
    fatal::tell_here(format_args!(
        "a program that is built with a sanitizer cannot be started without zfolio: {}: stopped",
        Words(error)
    ));
    process::abort_now(fatal::STATUS)
}

/// What is in a file. It is not closed, since `close` may be the runtime's, which is not ready; `execve` closes it.
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

/// What this library is called where it was asked for.
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

/// Takes `library` out of `LD_PRELOAD`, in an environment as the kernel keeps it: each variable ends with a 0.
/// False if it is not there.
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

/// `execve` of this process's own program; the error, since it returns only then.
fn execute(arguments: &[u8], environment: &[u8]) -> Errno {
    // By its own name, which the process is then called by; by the kernel's link if that name is gone.
    let mut name = [0_u8; 4096];
    let link = c"/proc/self/exe";
    let words = [link.as_ptr() as usize, name.as_mut_ptr() as usize, name.len() - 1, 0, 0, 0];
    // SAFETY: a path, and a place for as many bytes as are told; a 0 is left behind them.
    unsafe { map::forward(libc::SYS_readlink, words) }.ok();
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    let try_path = |path: *const u8| {
        let lists = [arguments.as_ptr() as usize, environment.as_ptr() as usize];
        let words = [path as usize, lists[0], lists[1], 0, 0, 0];
        // SAFETY: a path, and two lists of texts: each text has a 0 at its end, each list a null.
        unsafe { map::forward(libc::SYS_execve, words) }.err().unwrap_or(Errno::NOENT)
    };
    try_path(name.as_ptr());
    try_path(link.as_ptr().cast())
}

/// The texts of a list in which each ends with a 0, and a null.
fn pointers(texts: &[u8]) -> Vec<*const u8> {
    let starts = texts.split_inclusive(|byte| *byte == 0).map(<[u8]>::as_ptr);
    starts.chain([std::ptr::null()]).collect()
}

interpose! {
    /// Asked for by the address sanitizer at its start: it would end because it is not the first library, before
    /// it has come to its first `malloc`, and to us. A program's own function of this name comes first.
    fn __asan_default_options() -> *const c_char {
        c"verify_asan_link_order=0".as_ptr()
    }
}
