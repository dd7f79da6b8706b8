//! The keeper: an engine thread that changes mappings on behalf of the program's threads.
//!
//! A thread of the program that held an engine's lock could fault, on a stack of its own making or in
//! a signal handler, and wait for itself. So it posts what it wants and sleeps (`PRE-2`); the keeper
//! makes the system call, for which any thread of the process will do.
//!
//! # Invariants
//!
//! - `KEEP-1` A request goes `FREE -> TAKEN -> POSTED -> DONE -> FREE`; the program's thread has it in
//!   `TAKEN` and `DONE`, the keeper in `POSTED`.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use zfolio_core::ranges::Ranges;
use zfolio_pager::Engine;
use zfolio_sys::{Errno, futex, map, signal, thread};

use crate::mappings::page_end;

/// A change of mappings: what the program called, with its words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Call {
    /// `mmap` over managed memory: a mapping made elsewhere takes its place.
    Replace,
    /// Nothing for the kernel: ranges that are new are to be managed. Who asks keeps them in a `Ranges`.
    Adopt,
    /// Nothing for the kernel: what was adopted is more than there is room for.
    MakeRoom,
    /// `munmap`.
    Unmap,
    /// `madvise` that drops contents.
    Discard,
    /// `mremap`.
    Remap,
    /// Nothing for the kernel: the range is given up for good.
    Pin,
    /// Nothing for the kernel: what is staged comes back, before `fork`.
    Settle,
}

const CALLS: [Call; 8] = [
    Call::Replace,
    Call::Adopt,
    Call::MakeRoom,
    Call::Unmap,
    Call::Discard,
    Call::Remap,
    Call::Pin,
    Call::Settle,
];

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const POSTED: u32 = 2;
const DONE: u32 = 3;

struct Request {
    state: AtomicU32,
    call: AtomicUsize,
    words: [AtomicUsize; 6],
    /// What the kernel answered: a word, or minus an error.
    answer: AtomicUsize,
}

/// Requests at a time; the 65th thread waits for a free one.
const REQUESTS: usize = 64;

static BOX: [Request; REQUESTS] = [const {
    Request {
        state: AtomicU32::new(FREE),
        call: AtomicUsize::new(0),
        words: [const { AtomicUsize::new(0) }; 6],
        answer: AtomicUsize::new(0),
    }
}; REQUESTS];

/// Changes when there is something to do.
static BELL: AtomicU32 = AtomicU32::new(0);

/// Has the keeper make a call, and waits for it.
pub(crate) fn ask(call: Call, words: [usize; 6]) -> Result<usize, Errno> {
    // A handler that leaves by longjmp would leave the request behind.
    let mask = signal::block_all();
    let answer = ask_blocked(call, words);
    signal::restore(&mask);
    answer
}

fn ask_blocked(call: Call, words: [usize; 6]) -> Result<usize, Errno> {
    let request = loop {
        // Acquire: pairs with the Release that freed it.
        let free = |request: &&Request| {
            request
                .state
                .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        match BOX.iter().find(free) {
            Some(request) => break request,
            None => std::thread::yield_now(),
        }
    };
    request.call.store(call as usize, Ordering::Relaxed);
    for (to, word) in request.words.iter().zip(words) {
        to.store(word, Ordering::Relaxed);
    }
    // Release: pairs with the Acquire in keep(): the keeper sees the words.
    request.state.store(POSTED, Ordering::Release);
    BELL.fetch_add(1, Ordering::Release);
    futex::wake(&BELL, 1);
    // Acquire: pairs with the Release of DONE: we see the answer.
    while request.state.load(Ordering::Acquire) == POSTED {
        futex::wait(&request.state, POSTED, None);
    }
    let answer = isize::from_ne_bytes(request.answer.load(Ordering::Relaxed).to_ne_bytes());
    request.state.store(FREE, Ordering::Release);
    if (-4095..0).contains(&answer) {
        return Err(Errno::from_raw_os_error(i32::try_from(-answer).unwrap_or(libc::EINVAL)));
    }
    Ok(usize::from_ne_bytes(answer.to_ne_bytes()))
}

/// Wakes the keeper for its own sake.
pub(crate) fn ring() {
    BELL.fetch_add(1, Ordering::Release);
    futex::wake(&BELL, 1);
}

/// In a child of `fork`: the requests of the parent's other threads are nobody's.
pub(crate) fn start_over() {
    BOX.iter().for_each(|request| request.state.store(FREE, Ordering::Relaxed));
}

/// The keeper's life.
pub(crate) fn keep(engine: &'static Engine) {
    loop {
        let bell = BELL.load(Ordering::Acquire);
        thread::follow();
        for request in &BOX {
            if request.state.load(Ordering::Acquire) != POSTED {
                continue;
            }
            let words = std::array::from_fn(|index| request.words[index].load(Ordering::Relaxed));
            let call = CALLS[request.call.load(Ordering::Relaxed) % CALLS.len()];
            let answer = match serve(engine, call, words) {
                Ok(word) => word,
                Err(error) => {
                    usize::from_ne_bytes((-(error.raw_os_error() as isize)).to_ne_bytes())
                }
            };
            request.answer.store(answer, Ordering::Relaxed);
            // Release: pairs with the Acquire in ask().
            request.state.store(DONE, Ordering::Release);
            futex::wake(&request.state, 1);
        }
        futex::wait(&BELL, bell, None);
    }
}

fn serve(engine: &Engine, call: Call, words: [usize; 6]) -> Result<usize, Errno> {
    let [start, bytes, ..] = words;
    let end = page_end(start, bytes);
    match call {
        Call::Replace => {
            let [_, _, made, manageable, ..] = words;
            let bytes = end - start;
            let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unsigned_abs() as usize;
            let at = engine.unmap(start, start + bytes, || {
                // SAFETY: the program's own MAP_FIXED, in two steps: `made` is a mapping of this length.
                unsafe { map::forward(libc::SYS_mremap, [made, bytes, bytes, flags, start, 0]) }
            })?;
            if manageable == 1 {
                adopt(engine, at, at + bytes);
            }
            Ok(at)
        }
        Call::Adopt => {
            let fresh = start as *const Ranges;
            // SAFETY: the asker's own, alive and untouched until it has the answer (Native::adopt_fresh).
            engine.adopt_all(unsafe { &*fresh }.iter());
            Ok(0)
        }
        Call::MakeRoom => {
            engine.make_room(start);
            Ok(0)
        }
        Call::Unmap => {
            // SAFETY: the program's own call, with its own words.
            engine.unmap(start, end, || unsafe { map::forward(libc::SYS_munmap, words) })
        }
        Call::Discard => {
            let advice = words[2];
            // SAFETY: the program's own call, or a part of it.
            engine.discard(start, end, |at, bytes| unsafe {
                map::forward(libc::SYS_madvise, [at, bytes, advice, 0, 0, 0])
            })
        }
        Call::Remap => remap(engine, words),
        Call::Pin => {
            engine.pin(start, end);
            Ok(0)
        }
        Call::Settle => {
            let allowed = engine.can_open_again();
            if !allowed && engine.is_managing() {
                // The rights to it are gone (setuid): a child could not have one of its own.
                engine.unmanage_all();
                zfolio_pager::fatal::tell(format_args!(
                    "this process may no longer open a userfaultfd: the limit is not held from here on"
                ));
            }
            engine.settle_for_fork();
            Ok(0)
        }
    }
}

/// `mremap`; the last word says that a manageable mapping is moved, perhaps one smaller than a folio.
fn remap(engine: &Engine, words: [usize; 6]) -> Result<usize, Errno> {
    let [start, bytes, new_bytes, flags, to, manageable] = words;
    let length = page_end(0, new_bytes);
    let move_it = || {
        let call = [start, bytes, new_bytes, flags, to, 0];
        // SAFETY: the program's own call, with its own words.
        let at = unsafe { map::forward(libc::SYS_mremap, call) }?;
        Ok::<_, Errno>((at, at + length))
    };
    let fixed = i32::try_from(flags).unwrap_or(0) & libc::MREMAP_FIXED != 0;
    let onto = if fixed { (to, to.saturating_add(length)) } else { (0, 0) };
    let end = page_end(start, bytes);
    let (at, at_end, managed) = engine.relocate((start, end), onto, move_it)?;
    if managed || manageable == 1 {
        adopt(engine, at, at_end);
    }
    Ok(at)
}

/// A mapping that cannot be registered stays the kernel's: it is not reclaimed, and nothing is lost.
fn adopt(engine: &Engine, start: usize, end: usize) {
    engine.adopt(start, end).ok();
}
