//! The mapping proxy: an engine thread that changes mappings on behalf of the program's threads.
//!
//! If a thread of the program held a lock of the engine, it could fault (on a managed stack, or in a signal
//! handler) and then wait for itself. So it posts a request and sleeps (`PRE-2`). The mapping proxy makes the
//! system call: any thread of a process can change the mappings of the process.
//!
//! # Invariants
//!
//! - `PROXY-1` A request goes `FREE -> TAKEN -> POSTED -> DONE -> FREE`. The program's thread owns it in
//!   `TAKEN` and `DONE`, the mapping proxy in `POSTED`.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use zfolio_core::ranges::Ranges;
use zfolio_pager::Engine;
use zfolio_sys::{Errno, futex, map, signal, thread};

use crate::mappings::{give_up_wiped, page_end};
use crate::{candidates, remap};

/// A request: the system call that the program made, or work for the engine alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Call {
    /// `mmap` over managed memory: a mapping made elsewhere is moved there.
    Replace,
    /// No system call of the program: manage new ranges, which the caller passes in a `Ranges`.
    Adopt,
    /// No system call of the program: make room for memory that was adopted.
    MakeRoom,
    /// `munmap`.
    Unmap,
    /// `madvise` that drops contents.
    Discard,
    /// `mremap`.
    Remap,
    /// No system call of the program: manage the range no longer.
    Pin,
    /// No system call of the program: bring staged folios back, before `fork`. 1: a child could not open a userfaultfd,
    /// so nothing is managed from here on, and the caller says so.
    Settle,
    /// No system call of the program: manage nothing from here on, since a child could not have the files that are
    /// spilled to. 1: the caller says so.
    GiveUp,
}

const CALLS: [Call; 9] = [
    Call::Replace,
    Call::Adopt,
    Call::MakeRoom,
    Call::Unmap,
    Call::Discard,
    Call::Remap,
    Call::Pin,
    Call::Settle,
    Call::GiveUp,
];

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const POSTED: u32 = 2;
const DONE: u32 = 3;

struct Request {
    state: AtomicU32,
    call: AtomicUsize,
    /// The arguments of the call.
    words: [AtomicUsize; 6],
    /// The result of the system call: a word, or a negated `errno`.
    answer: AtomicUsize,
}

/// Requests at a time: a 65th thread waits until one is free.
const REQUESTS: usize = 64;

static BOX: [Request; REQUESTS] = [const {
    Request {
        state: AtomicU32::new(FREE),
        call: AtomicUsize::new(0),
        words: [const { AtomicUsize::new(0) }; 6],
        answer: AtomicUsize::new(0),
    }
}; REQUESTS];

/// Changes when a request is posted.
static BELL: AtomicU32 = AtomicU32::new(0);

/// Posts a request to the mapping proxy, and returns its result.
pub(crate) fn ask(call: Call, words: [usize; 6]) -> Result<usize, Errno> {
    // A signal handler that leaves by longjmp would never free the request.
    let mask = signal::block_all();
    let answer = ask_blocked(call, words);
    signal::restore(&mask);
    answer
}

fn ask_blocked(call: Call, words: [usize; 6]) -> Result<usize, Errno> {
    let request = loop {
        // Acquire: pairs with the Release that stores FREE below.
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
    // Release: pairs with the Acquire in serve_requests(): the mapping proxy sees the words.
    request.state.store(POSTED, Ordering::Release);
    BELL.fetch_add(1, Ordering::Release);
    futex::wake(&BELL, 1);
    // Acquire: pairs with the Release that stores DONE: this thread sees the answer.
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

/// Wakes the mapping proxy without a request, so that it calls `thread::follow`.
pub(crate) fn ring() {
    BELL.fetch_add(1, Ordering::Release);
    futex::wake(&BELL, 1);
}

/// In a child of `fork`: frees the requests of the parent's other threads, which the child does not have.
pub(crate) fn start_over() {
    BOX.iter().for_each(|request| request.state.store(FREE, Ordering::Relaxed));
}

/// The main loop of the mapping proxy.
pub(crate) fn serve_requests(engine: &'static Engine) {
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
            // Release: pairs with the Acquire in ask_blocked(): the program's thread sees the answer.
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
            if manageable == 1 && !candidates::has_given_up() {
                adopt(engine, at, at + bytes);
            }
            Ok(at)
        }
        Call::Adopt => {
            let fresh = start as *const Ranges;
            if !candidates::has_given_up() {
                // SAFETY: Candidates::adopt_fresh() passes a `Ranges` of its own, which lives and stays
                // unchanged until it has the answer.
                engine.adopt_all(unsafe { &*fresh }.iter());
            }
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
        Call::Remap => remap::remap(engine, words),
        Call::Pin => {
            engine.pin(start, end);
            Ok(0)
        }
        Call::Settle => {
            // The process has lost the permission (setuid), or may open no file: a child could not open a userfaultfd.
            let gives_up = !engine.can_open_again() && engine.is_managing();
            let is_to_be_told = gives_up && give_up(engine);
            give_up_wiped(engine);
            engine.settle_for_fork();
            Ok(usize::from(is_to_be_told))
        }
        Call::GiveUp => Ok(usize::from(give_up(engine))),
    }
}

/// Brings everything back. From here on nothing is managed: what came under management later would have to be given up
/// before the next fork. False: the engine had given up before, and a raw `mremap` has had something managed since.
fn give_up(engine: &Engine) -> bool {
    let is_first = candidates::note_given_up();
    engine.unmanage_all();
    is_first
}

/// Manages a mapping. If it cannot be registered, it is not reclaimed, and its contents stay as they are.
fn adopt(engine: &Engine, start: usize, end: usize) {
    engine.adopt(start, end).ok();
}
