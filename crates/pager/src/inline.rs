//! Inline mode: the faulting thread serves its own fault, in a handler of SIGBUS.
//!
//! # Invariants
//!
//! - `INL-1` The handler runs with every signal blocked, so it is never interrupted while it holds
//!   a lock of an engine.
//! - `INL-2` A SIGBUS that no engine serves goes to the handler that was installed before ours. So does one that says
//!   that memory is defective: the access would only fail again, for ever.
//! - `INL-3` The handler leaves `errno` as it was: the thread may be between a call that failed and its look at
//!   `errno`.
//!
//! The engines are found in a fixed table of weak slots, without a lock: a handler may run at any
//! time.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use zfolio_core::stats::add;
use zfolio_sys::clock;

use crate::engine::Engine;
use crate::fault::Turn;
use crate::spill::{Later, Tries};

/// How many pagers in inline mode a process can have at the same time.
pub(crate) const ENGINES: usize = 64;

/// One inline engine, and how many threads are inside a handler that may use it. In a cache line of its own, since
/// all threads that fault write to it.
#[repr(align(64))]
struct Slot {
    engine: AtomicPtr<Engine>,
    inside: AtomicUsize,
}

static SLOTS: [Slot; ENGINES] =
    [const { Slot { engine: AtomicPtr::new(std::ptr::null_mut()), inside: AtomicUsize::new(0) } };
        ENGINES];

static INSTALL: Once = Once::new();

/// The action of SIGBUS before ours was installed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// An engine is known to the handler for as long as this lives.
#[derive(Debug)]
pub(crate) struct Registered(usize);

/// Makes the handler find `engine`. `None`: there are [`ENGINES`] already.
#[allow(unsafe_code, reason = "installs the handler")]
pub(crate) fn register(engine: &'static Engine) -> Option<Registered> {
    INSTALL.call_once(install);
    let pointer = std::ptr::from_ref(engine).cast_mut();
    SLOTS.iter().enumerate().find_map(|(index, slot)| {
        // Release: pairs with the SeqCst load in ask(): a thread that sees the pointer sees
        // the engine.
        let null = std::ptr::null_mut();
        let taken =
            slot.engine.compare_exchange(null, pointer, Ordering::Release, Ordering::Relaxed);
        // Not `then_some`: it would always make a Registered, whose drop clears another engine's
        // slot.
        taken.is_ok().then(|| Registered(index))
    })
}

impl Drop for Registered {
    fn drop(&mut self) {
        let slot = &SLOTS[self.0];
        // SeqCst, as in ask(): either the handler sees null, or we see that it is inside.
        slot.engine.store(std::ptr::null_mut(), Ordering::SeqCst);
        while slot.inside.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
    }
}

#[allow(unsafe_code, reason = "installs the handler")]
fn install() {
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: the set is ours (INL-1: every signal is blocked while the handler runs).
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    // A thread whose SIGBUS is blocked when it faults is killed: the handler itself must not fault.
    let mut previous = Box::new(action);
    // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for, and only does what a handler
    // may; `previous` is a valid place.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut *previous) };
    PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
    // SAFETY: `forget_all` is a function without arguments that only stores to atomics. If there is
    // no memory to register it, a child keeps the table of engines. That matters only for a SIGBUS
    // in the child, where no engine serves faults.
    unsafe { libc::pthread_atfork(None, None, Some(forget_all)) };
}

/// In a child of `fork`: the child has no managed memory (`LIB-2`), and locks may be held by
/// threads that do not exist in the child.
extern "C" fn forget_all() {
    for slot in &SLOTS {
        slot.engine.store(std::ptr::null_mut(), Ordering::SeqCst);
        slot.inside.store(0, Ordering::SeqCst);
    }
}

/// What the engine in a slot says, if there is one.
#[allow(unsafe_code, reason = "the engine is counted as in use")]
fn ask<R>(slot: &Slot, question: impl FnOnce(&Engine) -> R) -> Option<R> {
    // A thread that faults on an engine's memory got that address after the engine was registered, so it sees the slot
    // filled.
    if slot.engine.load(Ordering::Relaxed).is_null() {
        return None;
    }
    slot.inside.fetch_add(1, Ordering::SeqCst);
    let engine = slot.engine.load(Ordering::SeqCst);
    // SAFETY: a pointer in a slot is a live engine while `inside` is counted: Registered::drop takes the pointer out
    // first and then waits for us.
    let answer = unsafe { engine.as_ref() }.map(question);
    slot.inside.fetch_sub(1, Ordering::SeqCst);
    answer
}

#[allow(unsafe_code, reason = "the handler")]
extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let began = clock::monotonic_ns();
    let errno = Errno::of_this_thread();
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let about = unsafe { &*info };
    // SAFETY: SIGBUS has an address.
    let address = unsafe { about.si_addr() } as usize;
    // A missing page of a userfaultfd is BUS_ADRERR. A signal that was sent by a process has no address, and a page
    // whose memory is defective (BUS_MCEERR_AR) is not missing.
    let slots = if about.si_code == libc::BUS_ADRERR { &SLOTS[..] } else { &[] };
    let is_served =
        slots.iter().any(|slot| ask(slot, |engine| engine.serves(address, began)) == Some(true));
    // The page may have been pinned after it was touched. Then it is left to the kernel, and the access works when it
    // is repeated. Any engine can find that out, after all have said that the page is not theirs.
    if is_served
        || slots.iter().find_map(|slot| ask(slot, |engine| engine.is_the_kernels(address)))
            == Some(true)
    {
        return;
    }
    drop(errno);
    pass_on(signal, info, context);
}

/// Puts `errno` back when it is dropped (`INL-3`).
struct Errno {
    place: *mut c_int,
    before: c_int,
}

#[allow(unsafe_code, reason = "errno is the C library's")]
impl Errno {
    fn of_this_thread() -> Errno {
        // SAFETY: no precondition.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the place is this thread's, for as long as it lives.
        let before = unsafe { *place };
        Errno { place, before }
    }
}

#[allow(unsafe_code, reason = "errno is the C library's")]
impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: as above; an Errno is not sent to another thread, since it has a pointer.
        unsafe { *self.place = self.before };
    }
}

/// Hands a SIGBUS that is not ours to the previous handler (`INL-2`).
#[allow(unsafe_code, reason = "calls the previous handler")]
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: null, or leaked by install() and never changed.
    let Some(previous) = (unsafe { previous.as_ref() }) else { return };
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let code = unsafe { &*info }.si_code;
    // By a process, or by the kernel about defective memory that no access has met yet: nothing is repeated.
    let sent = code <= 0 || code == libc::BUS_MCEERR_AO;
    match previous.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the default action; on return the access is repeated, which ends the
            // process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            if sent {
                // SAFETY: no precondition. The signal is blocked until this handler returns.
                unsafe { libc::raise(signal) };
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Action = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the program registered it as a three-argument handler.
            let handler = unsafe { std::mem::transmute::<usize, Action>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: the program registered it as a one-argument handler.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            handler(signal);
        }
    }
}

impl Engine {
    /// Serves a fault if `address` is in this engine's memory, or staged by it. True if the access can be repeated.
    pub(crate) fn serves(&self, address: usize, began: u64) -> bool {
        let (mut tries, mut turn) = (Tries::default(), Turn::new(began));
        let mut last = None;
        loop {
            let table = self.table.read();
            if !table.manages(address) {
                break;
            }
            let since = self.now_ns();
            let served = self.serve(table, address, &mut turn);
            let Err(later) = served else { return true };
            if last.replace(later) != Some(later) {
                tries = Tries::default();
            }
            self.await_backing(later);
            if let Later::Away(ticket) = later {
                if self.store.is_unread(ticket) {
                    self.await_try(&mut tries, address, ticket);
                } else if self.store.is_away(ticket) {
                    self.forgive(&mut tries);
                    self.pause_for_room();
                }
            }
            add(&self.figures().faults_spilled, 1);
            turn.spilled_ns += self.now_ns().saturating_sub(since);
        }
        let is_staged = self.mover.has(address);
        if is_staged {
            self.mover.answer_stranger(address);
        }
        is_staged
    }

    /// Whether the kernel itself serves a touch of `address`. If nothing is mapped there, populating the page fails.
    pub(crate) fn is_the_kernels(&self, address: usize) -> bool {
        self.mover.is_the_kernels(address)
    }
}
