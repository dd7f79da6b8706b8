//! `fork`: the child gets its own copy of everything, by copy-on-write, and an engine of its own.
//!
//! ```text
//! prepare   what is staged comes back; what the C library touches in the child before us comes back
//!           (open `FILE`s); then the engine, the ranges and the heap are held still
//! parent    lets go
//! child     new userfaultfds and threads, the same tables; then lets go
//! ```
//!
//! The child's engine must be there before the child touches managed memory, or it would read zeros.
//! Handlers of `pthread_atfork` run in the order of registration in the child, and ours is the first.
//!
//! Between `prepare` and the system call, and in the child before our handler, the C library's `fork` uses memory that
//! it has allocated with `malloc`: the open `FILE`s, whose locks it resets; the name service's state; a long list of
//! handlers. All of that is made resident in `prepare`. And it waits for locks, whose holders must not wait for us:
//!
//! - that of the list of `FILE`s, which others hold while they touch them: `prepare` takes it first (`FILES`);
//! - that of the name service's state, under which nothing but that state is touched: it is resident.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use zfolio_core::stats::add;
use zfolio_pager::Quiet;
use zfolio_sys::map::{self, Reservation};
use zfolio_sys::signal::{self, Mask};

use crate::allocator::{interpose, next, set_errno};
use crate::heap::{self, Held, Lock};
use crate::keeper::{Call, ask};
use crate::native::{self, Native};
use crate::{home, mappings, settings};

/// One fork at a time.
static ONE: Lock = Lock::new();
static STILL: Still = Still(UnsafeCell::new(None));

struct Still(UnsafeCell<Option<Everything>>);

// SAFETY: reached between prepare() and parent() or child() only, by the one thread that forks.
unsafe impl Sync for Still {}

/// Everything that is held across the call. Fields drop in this order: the outermost lock last.
struct Everything {
    heap: Held<'static>,
    quiet: Option<Quiet<'static>>,
    native: Native,
    _one: Held<'static>,
    files: Option<Files>,
    mask: Mask,
}

type Handler = extern "C" fn();
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// Registers the three handlers, with the C library itself: `pthread_atfork` calls its `__register_atfork` by name,
/// and a program may have put a function of its own there. Firefox keeps a list so, and calls the handlers around
/// its `clone` as well, where we prepare too: this thread would wait for itself.
pub(crate) fn install() {
    let register = next!(c"__register_atfork" as Register);
    // SAFETY: the handlers are functions of this library, which is never unloaded: no handle is needed.
    unsafe { register(prepare, parent, child, std::ptr::null_mut()) };
}

/// What a child needs beyond its copy of the parent: four stacks, a little heap.
const CHILD_BYTES: usize = 2 << 20;

/// Whether a child could have what it needs; if not, leaves the error with which `fork` is to fail.
///
/// Where address space is short (`RLIMIT_AS`, `RLIMIT_DATA`) the child would have to end, of which the
/// parent hears too late. Another thread may take what is found here: then the child ends, and says so.
pub(crate) fn child_has_room() -> bool {
    let room = native::engine().is_none() || Reservation::new(CHILD_BYTES, map::PAGE_BYTES).is_ok();
    if !room {
        set_errno(libc::ENOMEM);
    }
    room
}

type Fork = unsafe extern "C" fn() -> libc::pid_t;

interpose! {
    /// `fork(3)`: our handlers do the work, as for those forks that the C library makes by itself; here
    /// it can fail.
    fn fork() -> libc::pid_t {
        if !child_has_room() {
            return -1;
        }
        let next = next!(c"fork" as Fork);
        // SAFETY: it has no precondition.
        unsafe { next() }
    }

    /// `_Fork(3)`: as `fork`, without the program's handlers.
    fn _Fork() -> libc::pid_t {
        if !child_has_room() {
            return -1;
        }
        let next = next!(c"_Fork" as Fork);
        prepare_bare();
        // SAFETY: it has no precondition.
        let answer = unsafe { next() };
        if answer == 0 { child() } else { parent() }
        answer
    }
}

/// Runs `work` while nobody forks, with every signal blocked.
pub(crate) fn while_nobody_forks<R>(work: impl FnOnce() -> R) -> R {
    let mask = signal::block_all();
    let one = ONE.lock();
    let answer = work();
    drop(one);
    signal::restore(&mask);
    answer
}

/// Before a `fork` of the C library's, which does more than the system call.
extern "C" fn prepare() {
    prepare_to(true);
}

/// Before a system call that forks.
pub(crate) fn prepare_bare() {
    prepare_to(false);
}

fn prepare_to(fork_by_library: bool) {
    if settings::get().is_none() {
        return;
    }
    let mask = signal::block_all();
    pin_own_stack();
    let mut files = fork_by_library.then(Files::lock);
    let one = ONE.lock();
    let (native, quiet) = loop {
        if native::engine().is_none() {
            let native = native::lock();
            if native.engine().is_none() {
                break (native, None);
            }
            continue;
        }
        // Faults are still served: touch, then hold, then look whether all of it is still there.
        ask(Call::Settle, [0; 6]).ok();
        let mut touched = Vec::new();
        if let Some(files) = &mut files {
            files.touch(|at| touched.push(at));
            touch_kept(|at| touched.push(at));
        }
        let native = native::lock();
        let quiet = native.engine().and_then(zfolio_pager::Engine::quiet);
        if let Some(mut quiet) = quiet {
            if touched.iter().all(|at| quiet.is_resident(*at)) {
                break (native, Some(quiet));
            }
        }
    };
    let everything = Everything { heap: heap::hold(), quiet, native, _one: one, files, mask };
    // SAFETY: `ONE` is held: no other thread is between prepare() and parent().
    unsafe { *STILL.0.get() = Some(everything) };
}

/// This thread's stack must not fault while it holds the engine still; most are not managed anyway.
fn pin_own_stack() {
    const AROUND: usize = 64 << 10;
    let here = 0_u8;
    let stack = std::ptr::from_ref(std::hint::black_box(&here)) as usize;
    mappings::give_up(stack - AROUND, stack + AROUND);
    // The thread's control block, where the kernel writes its restartable sequence.
    // SAFETY: a call without arguments; the answer is the block's address.
    let block = unsafe { libc::pthread_self() };
    if let Ok(block) = usize::try_from(block) {
        mappings::give_up(block, block + map::PAGE_BYTES);
    }
}

/// Takes what prepare() left.
fn take() -> Option<Everything> {
    // SAFETY: this is the thread that forked, or its copy in the child.
    unsafe { (*STILL.0.get()).take() }
}

pub(crate) extern "C" fn parent() {
    if let Some(Everything { heap, quiet, native, _one, files, mask }) = take() {
        drop(heap);
        drop(quiet);
        if let Some(engine) = native.engine() {
            add(&engine.figures().forks, 1);
        }
        drop(native);
        drop(_one);
        drop(files);
        signal::restore(&mask);
    }
}

pub(crate) extern "C" fn child() {
    if let Some(Everything { heap, mut quiet, native, _one, files, mask }) = take() {
        if let Some(files) = files {
            files.forget_in_child();
        }
        drop(heap);
        if let Some(settings) = settings::get() {
            home::start_over(settings, native.engine().zip(quiet.as_mut()));
        }
        drop(quiet);
        drop(native);
        drop(_one);
        signal::restore(&mask);
        home::start_if_needed();
    }
}

/// `struct _IO_FILE` as far as the C library's public header tells it.
#[repr(C)]
struct File {
    flags: i32,
    pointers: [usize; 11],
    markers: usize,
    chain: *mut File,
    number: i32,
    flags2: i32,
    old_offset: i64,
    column: u16,
    vtable: i8,
    short: u8,
    lock: usize,
}

const _: () = {
    assert!(std::mem::offset_of!(File, chain) == 104);
    assert!(std::mem::offset_of!(File, lock) == 136);
};

unsafe extern "C" {
    /// The C library's list of open files.
    static _IO_list_all: *mut File;
    /// Its lock: recursive. Whoever opens, closes or flushes files takes it before that of any file.
    fn _IO_list_lock();
    fn _IO_list_unlock();
    fn _IO_list_resetlock();
}

/// The list of open `FILE`s, locked: none of them is opened, closed or freed meanwhile.
///
/// Taken before `ONE`: who flushes all files has it, and may fork in a function of the program's (`fopencookie`). The
/// C library's `fork` takes it too, after us: by then no other thread can have it, and wait for a fault with it.
struct Files(());

impl Files {
    fn lock() -> Files {
        // SAFETY: no preconditions; the same thread unlocks it.
        unsafe { _IO_list_lock() };
        Files(())
    }

    /// Touches every open `FILE` and its lock, and tells where they are.
    fn touch(&mut self, mut tell: impl FnMut(usize)) {
        // SAFETY: a variable of the C library, read under its lock.
        let mut file = unsafe { _IO_list_all };
        while !file.is_null() {
            // SAFETY: a member of the list, which stays in it, and so alive, while the list is locked.
            let about = unsafe { &*file };
            let (chain, lock) = (about.chain, about.lock);
            tell(file as usize);
            tell(file as usize + size_of::<File>());
            if lock != 0 {
                // SAFETY: the file's lock, a word at least.
                std::hint::black_box(unsafe { (lock as *const u32).read_volatile() });
                tell(lock);
            }
            file = chain;
        }
    }

    /// In a child the C library has made the lock anew, unless the process had a single thread: then we do.
    fn forget_in_child(self) {
        std::mem::forget(self);
        // SAFETY: the child's only thread, which holds the lock or finds it free.
        unsafe { _IO_list_resetlock() };
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // SAFETY: this thread took it in lock().
        unsafe { _IO_list_unlock() };
    }
}

/// Where the C library keeps its variables.
static VARIABLES: OnceLock<Vec<(usize, usize)>> = OnceLock::new();

/// Bytes of what one of them points to: the name service's state has 200. Of the list of handlers, ours, the first, is
/// what must be there: once it has run, faults are served.
const KEPT_BYTES: usize = 256;

/// Learns where the C library keeps its variables. In the constructor, when nobody holds a lock of the loader.
pub(crate) fn learn() {
    let mut found: Vec<(usize, usize)> = Vec::new();
    let found_at = (&raw mut found).cast();
    // SAFETY: note_variables() takes a vector of ranges, and keeps no reference to it.
    unsafe { libc::dl_iterate_phdr(Some(note_variables), found_at) };
    VARIABLES.set(found).ok();
}

/// Notes the writable segments of the module that `_IO_list_lock` is in.
unsafe extern "C" fn note_variables(
    about: *mut libc::dl_phdr_info,
    _bytes: usize,
    found: *mut libc::c_void,
) -> c_int {
    // SAFETY: dl_iterate_phdr passes a description of a module.
    let about = unsafe { &*about };
    // SAFETY: learn() passes a vector of ranges, which it does not touch meanwhile.
    let found = unsafe { &mut *found.cast::<Vec<(usize, usize)>>() };
    // SAFETY: the module's own table of so many segments.
    let segments =
        unsafe { std::slice::from_raw_parts(about.dlpi_phdr, usize::from(about.dlpi_phnum)) };
    let address = |word: u64| usize::try_from(word).unwrap_or(0);
    let loaded = segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD).map(|segment| {
        let start = address(about.dlpi_addr) + address(segment.p_vaddr);
        (start, start + address(segment.p_memsz), segment.p_flags & libc::PF_W != 0)
    });
    let inside = _IO_list_lock as *const () as usize;
    if loaded.clone().any(|(start, end, _)| (start..end).contains(&inside)) {
        found.extend(loaded.filter(|segment| segment.2).map(|(start, end, _)| (start, end)));
        return 1;
    }
    0
}

/// Touches what the C library's variables point to, and tells where that is.
///
/// Which variables those are that `fork` uses is told nowhere. So every word is taken for an address that may be
/// in managed memory: 8000 words, of which some tens are.
fn touch_kept(mut tell: impl FnMut(usize)) {
    let variables = VARIABLES.get().map_or(&[][..], |ranges| ranges);
    let mut pages = Vec::new();
    for &(start, end) in variables {
        for at in (start.next_multiple_of(size_of::<usize>())..end).step_by(size_of::<usize>()) {
            if at + size_of::<usize>() > end {
                break;
            }
            // SAFETY: a word of the C library's variables, which it never unmaps; another thread may write
            // it meanwhile, so that it is one of two values.
            let word = unsafe { (at as *const usize).read_volatile() };
            if native::may_be_managed(word, word.saturating_add(1)) {
                let page = word & !(map::PAGE_BYTES - 1);
                pages.extend((page..word + KEPT_BYTES).step_by(map::PAGE_BYTES));
            }
        }
    }
    pages.sort_unstable();
    pages.dedup();
    // It fails where there is nothing, or no access: nobody can use that.
    let there = |page: &usize| map::populate_read(*page, map::PAGE_BYTES).is_ok();
    pages.into_iter().filter(there).for_each(&mut tell);
}
