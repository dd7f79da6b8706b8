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
//! Handlers of `pthread_atfork` run in the order of registration in the child, and ours is the first;
//! before them the C library itself resets the locks of open files, which it has allocated with
//! `malloc`. So those are made resident in `prepare`.

use std::cell::UnsafeCell;

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
    mask: Mask,
}

/// Registers the three handlers.
pub(crate) fn install() {
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
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
        prepare();
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

pub(crate) extern "C" fn prepare() {
    if settings::get().is_none() {
        return;
    }
    let mask = signal::block_all();
    pin_own_stack();
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
        open_files(|at| touched.push(at));
        let native = native::lock();
        let quiet = native.engine().and_then(zfolio_pager::Engine::quiet);
        if let Some(mut quiet) = quiet {
            if touched.iter().all(|at| quiet.is_resident(*at)) {
                break (native, Some(quiet));
            }
        }
    };
    let everything = Everything { heap: heap::hold(), quiet, native, _one: one, mask };
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
    if let Some(Everything { heap, quiet, native, _one, mask }) = take() {
        drop(heap);
        drop(quiet);
        if let Some(engine) = native.engine() {
            add(&engine.figures().forks, 1);
        }
        drop(native);
        drop(_one);
        signal::restore(&mask);
    }
}

pub(crate) extern "C" fn child() {
    if let Some(Everything { heap, mut quiet, native, _one, mask }) = take() {
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
}

/// Touches every open `FILE` and its lock, and tells where they are.
fn open_files(mut tell: impl FnMut(usize)) {
    // SAFETY: a variable of the C library.
    let mut file = unsafe { _IO_list_all };
    while !file.is_null() {
        // SAFETY: a member of the list, alive as long as nobody closes it; a program that closes a
        // file in another thread while it forks has that race without us too.
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
