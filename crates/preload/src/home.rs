//! The engine's home: its threads, and the table of files that they share with nobody.
//!
//! ```text
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
use crate::{fork, identity, keeper, native, settings, statistics};

/// 0 not started, 1 started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// Set by the home thread of a child when faults are served again.
static READY: AtomicU32 = AtomicU32::new(0);

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
        start_thread(c"zfolio-home", move || live(settings));
    }
}

/// Starts a thread of the engine, with all signals blocked; if there can be none, tells why.
fn start_thread(name: &'static CStr, life: impl FnOnce() + Send + 'static) -> bool {
    let mask = signal::block_all();
    let started = thread::spawn(name, Box::new(life));
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
            start_servants(engine).then_some(engine)
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
fn start_servants(engine: &'static Engine) -> bool {
    start_thread(c"zfolio-handler", move || engine.handle_faults())
        && start_thread(c"zfolio-keeper", move || keeper::keep(engine))
        && start_thread(c"zfolio-prefetch", move || engine.prefetch_in_background())
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
    if engine.map_again(quiet).is_err() {
        cannot_start_over();
    }
    READY.store(0, Ordering::Relaxed);
    // The home thread must own the new descriptors, and this thread must not go on before faults are
    // served: it lends its hold on the engine until READY.
    let quiet = std::ptr::from_mut(quiet) as usize;
    let started = start_thread(c"zfolio-home", move || {
        cpu::unpin(0);
        // SAFETY: start_over() waits for READY before its borrow of `quiet` ends.
        let quiet = unsafe { &mut *(quiet as *mut zfolio_pager::Quiet<'static>) };
        let again = files::leave_program_files().is_ok() && engine.open_again(quiet).is_ok();
        if !again || !start_servants(engine) {
            cannot_start_over();
        }
        // Release: pairs with the Acquire below.
        READY.store(1, Ordering::Release);
        futex::wake(&READY, 1);
        engine.reclaim_in_background();
    });
    if !started {
        cannot_start_over();
    }
    while READY.load(Ordering::Acquire) == 0 {
        futex::wait(&READY, 0, None);
    }
}

/// A child without an engine would read zeros where its data is.
fn cannot_start_over() -> ! {
    fatal::tell(format_args!(
        "a child process cannot have a userfaultfd and threads of its own: stopped"
    ));
    process::abort_now(fatal::STATUS)
}
