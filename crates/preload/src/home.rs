//! The engine's home: its threads, and the table of files that they share with nobody.
//!
//! ```text
//! first malloc  a program with a sanitizer executes itself again, without us
//! constructor   settings, statistics; no thread
//! start         the manageable mappings pass half of the limit: the home thread starts, and watches
//!               (the engine is made ready: userfaultfds, handler, keeper, prefetcher)
//! engage        the process is near its limit: the mappings are registered; the home thread becomes
//!               the reclaimer
//! ```

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use zfolio_pager::{Engine, fatal};
use zfolio_sys::words::Words;
use zfolio_sys::{Errno, clock, cpu, files, futex, process, signal, thread};

use crate::settings::Settings;
use crate::{fork, identity, keeper, native, sanitizer, settings, statistics};

/// 0 not started, 1 started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// Whether a child's home thread serves faults again.
static READY: AtomicU32 = AtomicU32::new(WAIT);
const WAIT: u32 = 0;
const SERVED: u32 = 1;
const FAILED: u32 = 2;

/// How often a thread is tried, a millisecond apart, when the kernel has no room for it: while another thread is
/// in `execve` none is let begin. In a child of `fork` there is no other thread; room may come up all the same.
const TRIES: u32 = 2000;
const CHILD_TRIES: u32 = 20;

/// Set once [`wake_up`] has run.
static AWAKE: AtomicBool = AtomicBool::new(false);

/// What must come before anything of the program's: settings, and the handlers of `fork`.
///
/// At the first `malloc` or mapping, not in the constructor: a library initialised before us (jemalloc) may have
/// handlers of its own, which touch memory that is managed; ours must run first in a child.
pub(crate) fn wake_up() {
    if AWAKE.load(Ordering::Relaxed) || AWAKE.swap(true, Ordering::Relaxed) {
        return;
    }
    sanitizer::step_aside();
    settings::read();
    if settings::get().is_some() {
        fork::install();
        std::panic::set_hook(Box::new(|defect| fatal::defect(defect)));
    }
}

/// Runs when the library is loaded.
extern "C" fn constructor() {
    wake_up();
    let Some(settings) = settings::get() else { return };
    // Looked up now: the symbol tables of libraries loaded later may lie in managed memory.
    std::hint::black_box(cpu::current());
    cpu::learn();
    statistics::open(settings);
    identity::start_over();
    thread::learn();
    fork::learn();
    // What was mapped before, by libraries that were initialised before us.
    start_if_needed();
}

/// Runs when the process exits in good order.
extern "C" fn destructor() {
    if let Some(settings) = settings::get() {
        if let Some(engine) = native::engine() {
            engine.sample();
        }
        statistics::close(settings);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

/// Starts the home thread once the manageable mappings could take the process to its limit.
///
/// Half of the limit: the rest of the process counts too, and it is watched from then on.
pub(crate) fn start_if_needed() {
    let Some(settings) = settings::get() else { return };
    if native::manageable_bytes() < settings.config.limit_bytes / 2
        || STARTED.load(Ordering::Relaxed) != 0
    {
        return;
    }
    if thread::has_learnt() && STARTED.swap(1, Ordering::Relaxed) == 0 {
        // Its filter may answer the calls that our threads make by a signal, and ours block all signals: that
        // ends the process.
        if process::is_confined() {
            return fatal::tell_here(format_args!(
                "a sandbox of the program's own forbids to open files: the limit is not held"
            ));
        }
        start_thread(c"zfolio-home", TRIES, move || live(settings));
    }
}

/// Starts a thread of the engine, with all signals blocked; if there can be none, tells why.
fn start_thread(name: &'static CStr, tries: u32, life: impl FnOnce() + Send + 'static) -> bool {
    let mask = signal::block_all();
    let started = thread::spawn(name, tries, Box::new(life));
    signal::restore(&mask);
    if let Err(error) = started {
        let name = name.to_str().unwrap_or("?");
        // `spawn` has tried for long: it is no `execve` of another thread.
        let limits =
            if error == Errno::AGAIN { ", RLIMIT_NPROC or a cgroup's pids.max?" } else { "" };
        let (why, errno) = (Words(error), error.raw_os_error());
        fatal::tell(format_args!(
            "{name}: clone: {why} (errno {errno}{limits}): the limit is not held"
        ));
    }
    started.is_ok()
}

/// The home thread: makes the engine ready, looks how near the limit is, and has it take over.
fn live(settings: &'static Settings) {
    // The program's thread that happened to start us may be pinned to a CPU, and keep it for itself.
    cpu::unpin(0);
    let Some(engine) = make_engine(settings) else { return };
    watch(settings.config.limit_bytes);
    let mut ours = native::lock();
    ours.set_engine(engine);
    engine.engage();
    engine.adopt_all(ours.all());
    drop(ours);
    engine.sample();
    engine.reclaim_in_background();
}

/// Everything that takes time, before there is a hurry: userfaultfds, streams, the other threads.
fn make_engine(settings: &'static Settings) -> Option<&'static Engine> {
    if files::leave_program_files().is_err() {
        fatal::tell(format_args!(
            "unshare(CLONE_FILES) is not allowed here: the limit is not held"
        ));
        return None;
    }
    match Engine::new(settings.config.clone(), Box::new(statistics::home()?)) {
        Ok(engine) => {
            engine.follow_need(settings.follow_per_mille);
            let engine = native::keep_engine(engine);
            start_servants(engine, TRIES).then_some(engine)
        }
        Err(error) => {
            fatal::tell(format_args!("{error}: the limit is not held"));
            None
        }
    }
}

/// Bytes that a program can touch in a nanosecond: two threads, huge pages.
const BYTES_PER_NS: u64 = 20;

/// Time that registering takes, in which the program goes on: 8 ms where both CPUs are busy.
const ENGAGE_NS: u64 = 8_000_000;

/// Returns when the process is near its limit, or nobody can tell.
fn watch(limit: u64) {
    let margin = (limit / 16).clamp(4 << 20, 32 << 20);
    let (mut before, mut before_ns) = (u64::MAX, clock::monotonic_ns());
    while let Some(resident) = process::resident_bytes() {
        let now_ns = clock::monotonic_ns();
        if let Some(home) = statistics::home() {
            home.figures.process_bytes.store(resident, Ordering::Relaxed);
            zfolio_core::stats::raise(&home.figures.process_bytes_max, resident);
        }
        let grown = resident.saturating_sub(before);
        let soon = grown.saturating_mul(ENGAGE_NS) / (now_ns - before_ns).max(100_000);
        if resident + soon.min(limit / 2).max(margin) >= limit {
            return;
        }
        (before, before_ns) = (resident, now_ns);
        // 0.2 ms at least, so that the watch costs below 1 %; 20 ms at most.
        let headroom_ns = (limit - margin - resident) / BYTES_PER_NS;
        thread::sleep(Duration::from_nanos(headroom_ns.clamp(200_000, 20_000_000)));
        thread::follow();
    }
}

/// The threads beside the home thread, which share its table of files. False: not all of them.
fn start_servants(engine: &'static Engine, tries: u32) -> bool {
    start_thread(c"zfolio-handler", tries, move || engine.handle_faults())
        && start_thread(c"zfolio-keeper", tries, move || keeper::keep(engine))
        && start_thread(c"zfolio-prefetch", tries, move || engine.prefetch_in_background())
}

/// In a child of `fork`, on its only thread: what the fork did not copy comes back.
///
/// `quiet` is the engine held still, if it was started in the parent.
pub(crate) fn start_over(
    settings: &'static Settings,
    quiet: Option<(&'static Engine, &mut zfolio_pager::Quiet<'static>)>,
) {
    keeper::start_over();
    thread::start_over();
    identity::start_over();
    statistics::open(settings);
    STARTED.store(0, Ordering::Relaxed);
    let Some((engine, quiet)) = quiet else { return };
    STARTED.store(1, Ordering::Relaxed);
    if quiet.is_empty() {
        // The right to a userfaultfd is gone (Call::Settle): the child is the kernel's alone.
        return native::Native::forget_engine();
    }
    // First of all: whatever is mapped now could go where the staging area was.
    if let Err(error) = engine.map_again(quiet) {
        fatal::tell(format_args!("{error}: the limit is not held in a child"));
        return live_without(engine, quiet);
    }
    READY.store(WAIT, Ordering::Relaxed);
    // The home thread must own the new descriptors, and this thread must not go on before faults are
    // served: it lends its hold on the engine until READY.
    let lent = std::ptr::from_mut(quiet) as usize;
    let started = start_thread(c"zfolio-home", CHILD_TRIES, move || {
        cpu::unpin(0);
        // SAFETY: start_over() waits for READY before it uses `quiet` again, or its borrow ends.
        let quiet = unsafe { &mut *(lent as *mut zfolio_pager::Quiet<'static>) };
        let ready = live_again(engine, quiet);
        // Release: pairs with the Acquire below.
        READY.store(if ready { SERVED } else { FAILED }, Ordering::Release);
        futex::wake(&READY, 1);
        if ready {
            engine.reclaim_in_background();
        }
    });
    if !started {
        return live_without(engine, quiet);
    }
    while READY.load(Ordering::Acquire) == WAIT {
        futex::wait(&READY, WAIT, None);
    }
    if READY.load(Ordering::Acquire) == FAILED {
        live_without(engine, quiet);
    }
}

/// A child's home thread: descriptors and servants of its own. False: it cannot have them, which was told.
fn live_again(engine: &'static Engine, quiet: &mut zfolio_pager::Quiet<'_>) -> bool {
    if files::leave_program_files().is_err() {
        fatal::tell(format_args!("unshare(CLONE_FILES): the limit is not held in a child"));
        return false;
    }
    if let Err(error) = engine.open_again(quiet) {
        fatal::tell(format_args!("{error}: the limit is not held in a child"));
        return false;
    }
    if !start_servants(engine, CHILD_TRIES) {
        return false;
    }
    engine.register_again(quiet);
    true
}

/// A child that cannot have an engine: its memory comes back at once, and is the kernel's alone. `fork` has
/// succeeded by then, and a child that reads zeros where its data was, or none at all, would be worse than one
/// that goes over the limit.
fn live_without(engine: &'static Engine, quiet: &mut zfolio_pager::Quiet<'_>) {
    if let Err(error) = engine.return_all(quiet) {
        let (why, errno) = (Words(error), error.raw_os_error());
        fatal::tell(format_args!(
            "a child's memory cannot be brought back: {why} (errno {errno}): stopped"
        ));
        process::abort_now(fatal::STATUS)
    }
    native::Native::forget_engine();
}
