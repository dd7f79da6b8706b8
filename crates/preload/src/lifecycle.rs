//! The life of the engine in a process: when its threads start, and what each step sets up.
//!
//! The engine's threads share a table of file descriptors that the program does not have.
//!
//! ```text
//! first malloc  a program with a sanitizer executes itself again, without this library
//! constructor   settings and statistics; no thread
//! start         the manageable mappings pass half of the limit: the reclaim thread starts, makes the
//!               engine (userfaultfds, handler, mapping proxy, prefetcher), and watches the process.
//!               With a share of a tree's limit the engine is made later (`share::is_large`)
//! engage        the process is near its limit: the mappings are registered, and the reclaim thread
//!               begins to reclaim
//! ```

use std::ffi::CStr;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use zfolio_core::stats::set;
use zfolio_pager::spill::{Hooks, SpillDisk};
use zfolio_pager::{Engine, fatal};
use zfolio_sys::custody::Asked;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::process::Resident;
use zfolio_sys::{Errno, clock, cpu, custody, files, futex, process, signal, thread};

use crate::candidates::{Blocked, Candidates};
use crate::settings::Settings;
use crate::{
    allocator, candidates, fork, identity, mapping_proxy, mappings, sanitizer, settings, share,
    statistics, zerocopy,
};

/// 0 not started, 1 started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// Whether faults are served again in a child of `fork`: set by its reclaim thread.
static READY: AtomicU32 = AtomicU32::new(WAIT);
const WAIT: u32 = 0;
const SERVED: u32 = 1;
const FAILED: u32 = 2;

/// How often to try to start a thread, once a millisecond, while the kernel answers `EAGAIN`. It does so while
/// another thread is in `execve`. A child of `fork`, and a program that begins, has no other thread, and tries for a
/// shorter time.
const TRIES: u32 = 2000;
const CHILD_TRIES: u32 = 20;

/// Set once [`wake_up`] has run.
static AWAKE: AtomicBool = AtomicBool::new(false);

/// Does what must be done before the program runs: reads the settings, registers the handlers of `fork`.
///
/// Runs at the first `malloc` or mapping, and not in the constructor: a library that is initialised earlier
/// (jemalloc) may register fork handlers that touch managed memory, and ours must run before them in a child.
pub(crate) fn wake_up() {
    if AWAKE.load(Ordering::Relaxed) || AWAKE.swap(true, Ordering::Relaxed) {
        return;
    }
    files::learn_error();
    sanitizer::step_aside();
    settings::read();
    if settings::get().is_some() {
        files::learn_journal();
        fork::install();
        std::panic::set_hook(Box::new(|defect| fatal::defect(defect)));
    }
}

/// Runs when the library is loaded.
extern "C" fn constructor() {
    allocator::start();
    let Some(settings) = settings::get() else { return };
    // Look these symbols up now: the symbol tables of libraries loaded later may lie in managed memory.
    std::hint::black_box(cpu::current());
    cpu::learn();
    let me = share::owner();
    share::open(settings, me);
    statistics::open(settings, me);
    identity::start_over();
    thread::learn();
    fork::learn();
    zerocopy::learn();
    // Libraries that were initialised earlier may have mapped enough already. No other thread is in `execve` now: what
    // refuses a thread does so for longer than anybody wants to wait.
    start_within(settings, CHILD_TRIES);
}

/// Runs when the process exits by `exit` or by returning from `main`.
extern "C" fn destructor() {
    if let Some(settings) = settings::get() {
        // This takes locks of the engine: a handler that forks would wait for this thread.
        let _blocked = Blocked::begin();
        if let Some(engine) = candidates::engine() {
            engine.sample();
            engine.tell_over_limit();
        }
        // At the next look of the run a hundred others may have begun and ended.
        if STARTED.load(Ordering::Relaxed) == 0 && identity::is_own_process() {
            share::leave();
        }
        statistics::close(settings);
    }
}

/// Its number puts it before mimalloc's own constructor, which would start mimalloc without [`allocator::start`].
#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array.00099"))]
static CONSTRUCTOR: extern "C" fn() = constructor;

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static DESTRUCTOR: extern "C" fn() = destructor;

/// Starts the reclaim thread once the manageable mappings exceed half of the limit.
///
/// Half, because the rest of the process counts towards the limit too. From then on the thread watches
/// the size of the whole process.
pub(crate) fn start_if_needed() {
    if let Some(settings) = settings::get() {
        start_within(settings, TRIES);
    }
}

/// The same, with so many tries to start a thread.
fn start_within(settings: &'static Settings, tries: u32) {
    let manageable = candidates::manageable_bytes();
    if share::is_small(settings, manageable) || STARTED.load(Ordering::Relaxed) != 0 {
        return;
    }
    // A handler that leaves by a jump would leave a part of the share to nobody, or the start half done.
    let _blocked = Blocked::begin();
    if share::covers(settings, manageable) {
        return;
    }
    // A child of `vfork` shares this memory. A thread that it starts is its own, and ends with it.
    let may_start = thread::has_learnt() && identity::is_own_process();
    if may_start && STARTED.swap(1, Ordering::Relaxed) == 0 {
        // The sandbox may answer a system call of our threads by a signal. Our threads block all signals,
        // so that the kernel would end the process.
        if signal::with_faults_open(process::is_confined) {
            share::leave();
            return fatal::print_here(format_args!(
                "a sandbox of the program's own forbids to open files: the limit is not held"
            ));
        }
        if !start_thread(c"zfolio-reclaim", tries, fatal::print_here, move || live(settings)) {
            share::leave();
        }
    }
}

/// Starts a thread of the engine, with all signals blocked.
fn spawn(
    name: &'static CStr,
    tries: u32,
    life: impl FnOnce() + Send + 'static,
) -> Result<(), Errno> {
    let mask = signal::block_all();
    let started = thread::spawn(name, tries, Box::new(life));
    signal::restore(&mask);
    started
}

/// Prints a line: [`fatal::print_here`] on a thread of the program's, which has the program's table of files, and
/// [`fatal::print`] on one of the engine's.
type Tell = fn(fmt::Arguments<'_>);

/// As [`spawn`]. If that fails, reports that the limit is not held, and why, and returns false.
fn start_thread(
    name: &'static CStr,
    tries: u32,
    tell: Tell,
    life: impl FnOnce() + Send + 'static,
) -> bool {
    let started = spawn(name, tries, life);
    if let Err(error) = started {
        let name = name.to_str().unwrap_or("?");
        // `spawn` has tried for long, so that another thread's `execve` is not the cause.
        let limits =
            if error == Errno::AGAIN { ", RLIMIT_NPROC or a cgroup's pids.max?" } else { "" };
        let (why, errno) = (ErrnoText(error), error.raw_os_error());
        tell(format_args!("{name}: clone: {why} (errno {errno}{limits}): the limit is not held"));
    }
    started.is_ok()
}

/// Makes a reclaim thread, and the threads that it starts, run soon after a wake-up.
///
/// It inherited the CPU affinity of the program's thread that started it. While other programs keep all CPUs busy, the
/// program would pass its limit before this thread saw it, and wait longer for each fault.
fn run_soon() {
    cpu::unpin(0);
    // A filter may end the process for a system call that it does not know.
    if !process::is_filtered() {
        cpu::take_short_turns();
    }
}

/// The reclaim thread: waits until the process is near its limit, makes the engine, engages it, and reclaims.
///
/// It leaves the program's table of files before anything else (`PRE-3`), since it reads files from then on: in that
/// table it would take numbers which the program has just freed, and read from what the program then puts there.
fn live(settings: &'static Settings) {
    if let Err(errno) = files::leave_program_files(&[]) {
        fatal::print_here(format_args!(
            "unshare(CLONE_FILES) or close_range: {}: the limit is not held",
            ErrnoText(errno)
        ));
        return share::leave();
    }
    run_soon();
    share::set_watches();
    let is_early =
        |resident| statistics::stall_ppm(settings) > 0 && resident >= share::PROACTIVE_BYTES_MIN;
    watch(settings, |resident| share::is_large(resident) || is_early(resident));
    let Some(engine) = make_engine(settings) else { return share::leave() };
    watch(settings, is_early);
    engine.follow_asked();
    let mut ours = candidates::lock();
    ours.set_engine(engine);
    engine.engage();
    entrust(engine, settings);
    engine.adopt_all(ours.all());
    drop(ours);
    share::set_reclaims();
    engine.sample();
    engine.reclaim_in_background();
}

/// Makes what takes time, before the process is near its limit: userfaultfds, streams, the other threads.
fn make_engine(settings: &'static Settings) -> Option<&'static Engine> {
    match Engine::new(settings.accelerated(), Box::new(statistics::page()?)) {
        Ok(engine) => {
            engine.follow_need(settings.follow_per_mille);
            engine.spill_when_needed(Hooks { start: start_disk, claim });
            if let Some(member) = share::member() {
                engine.hold_share(member);
            }
            let engine = candidates::keep_engine(engine);
            start_other_threads(engine, TRIES).then_some(engine)
        }
        Err(error) => {
            fatal::print(format_args!("{error}: the limit is not held"));
            None
        }
    }
}

/// Bytes that a program with two threads can touch in a nanosecond, in huge pages.
const BYTES_PER_NS: u64 = 20;

/// How long registering takes, while the program goes on: 8 ms on a machine with two busy CPUs.
const ENGAGE_NS: u64 = 8_000_000;

/// The longest pause between two looks at the size of the process.
const PAUSE_NS_MAX: u64 = 20_000_000;

/// Returns when the process is near its limit, when its size cannot be read, or once it has a size that is `enough`.
///
/// A share of a tree's limit grows meanwhile with the process, as long as there is more.
fn watch(settings: &Settings, enough: impl Fn(u64) -> bool) {
    let (mut before, mut before_ns) = (u64::MAX, clock::monotonic_ns());
    let summed_ns = AtomicU64::new(0);
    let meter = process::ResidentMeter::new();
    let mut pause_ns_min = 0;
    while let Some(Resident { memory_bytes: resident, file_bytes }) = meter.read() {
        let now_ns = clock::monotonic_ns();
        let limit = share::limit_bytes(settings);
        let margin = (limit / 16).clamp(4 << 20, 32 << 20);
        let grown = resident.saturating_sub(before);
        let soon = grown.saturating_mul(ENGAGE_NS) / (now_ns - before_ns).max(100_000);
        // On a busy machine this thread looks late. Then the process may grow as much again until the next look.
        let ahead = soon.max(2 * grown).min(share::ahead_max(settings, limit)).max(margin);
        let limit = share::follow(settings, resident, ahead);
        if let Some(page) = statistics::page() {
            let figures = &page.figures;
            figures.limit_bytes.store(limit, Ordering::Relaxed);
            figures.stall_ppm.store(statistics::stall_ppm(settings).into(), Ordering::Relaxed);
            set(&figures.process_bytes, &figures.process_bytes_max, resident);
            set(&figures.file_bytes, &figures.file_bytes_max, file_bytes);
            figures.sum_over_time(&summed_ns, now_ns, resident, resident);
        }
        if (resident + ahead >= limit && !share::is_below_notice(resident)) || enough(resident) {
            return;
        }
        // At least 0.2 ms, so that watching costs below 1 % of a CPU; at most 20 ms. A share is never far above what
        // its process has; so the pauses become longer while the process does not grow.
        let is_share = share::member().is_some();
        let longer = (2 * pause_ns_min).clamp(200_000, PAUSE_NS_MAX);
        pause_ns_min = if is_share && grown == 0 { longer } else { 0 };
        (before, before_ns) = (resident, now_ns);
        let headroom_ns = limit.saturating_sub(margin + resident) / BYTES_PER_NS;
        let pause_ns = headroom_ns.clamp(200_000, PAUSE_NS_MAX).max(pause_ns_min);
        thread::sleep(Duration::from_nanos(pause_ns));
        thread::follow();
    }
}

/// Gives `zfolio run` a copy of the userfaultfd, on a thread of the engine: that process keeps it open until all
/// threads of this one have ended.
///
/// The threads of a process that is killed end one by one. With the last of ours the userfaultfd would be
/// closed, and a thread that is still in a `write` would send zeros for what is compressed. While the userfaultfd
/// is open, a missing page ends that thread's `write` instead: the kernel lets no killed thread wait for a fault.
/// Where this fails (a process of another user, in another PID namespace, in a sandbox), such a `write` may send
/// zeros.
fn entrust(engine: &Engine, settings: &Settings) {
    // A filter may end the process for a socket.
    let Some(file) = engine.file().filter(|_| !process::is_filtered()) else { return };
    let Ok(run) = u32::try_from(settings.run) else { return };
    custody::entrust(&format!("{run}.custody"), run, file, cpu::thread_id());
}

/// Asks the run for a copy of its claim of a device. `None`: the run has ended, or is of another user or in another PID
/// namespace; then this process can have the device if nobody else does.
fn claim(path: &Path) -> Option<Asked> {
    let settings = settings::get().filter(|_| !process::is_filtered())?;
    let run = u32::try_from(settings.run).ok()?;
    let place = settings.config.spill.paths.iter().position(|(other, _)| other == path)?;
    custody::ask(&format!("{run}.custody"), run, u32::try_from(place).ok()?)
}

/// Starts the engine's other threads, which share this thread's table of files. False if one does not start.
fn start_other_threads(engine: &'static Engine, tries: u32) -> bool {
    // Nobody gives the workers anything to do before faults are served.
    engine.crew().start_over();
    let start = |name, life: fn(&'static Engine)| {
        start_thread(name, tries, fatal::print, move || life(engine))
    };
    let started = start(c"zfolio-handler", Engine::handle_faults)
        && start(c"zfolio-mapproxy", mapping_proxy::serve_requests)
        && start(c"zfolio-prefetch", Engine::prefetch_in_background);
    // Last: the engine goes on without them, if there is room for no more threads.
    if started {
        start_assistants(engine);
        start_workers(engine);
    }
    started
}

/// Gives each worker a thread. Without one the threads that reclaim and serve faults work alone.
fn start_workers(engine: &'static Engine) {
    let crew = engine.crew();
    for worker in 0..crew.len() {
        if spawn(c"zfolio-worker", CHILD_TRIES, move || crew.serve(worker)).is_err() {
            break;
        }
    }
}

/// Starts the threads that serve faults beside the handler, which serves alone without them.
fn start_assistants(engine: &'static Engine) {
    for number in 0..engine.assistants() {
        if spawn(c"zfolio-assist", CHILD_TRIES, move || engine.assist(number)).is_err() {
            break;
        }
    }
}

/// Starts the thread of a disk. Without one the threads that read and write carry out themselves what io_uring does
/// not.
fn start_disk(disk: Arc<SpillDisk>) -> bool {
    spawn(c"zfolio-disk", CHILD_TRIES, move || disk.serve()).is_ok()
}

/// In a child of `fork`, on its only thread: makes again what the fork did not copy.
///
/// `quiet` is the engine, held still, if the parent had one. Then `ours` has that engine.
pub(crate) fn start_over(
    settings: &'static Settings,
    ours: &mut Candidates,
    quiet: Option<&mut zfolio_pager::Quiet<'static>>,
) {
    mapping_proxy::start_over();
    thread::start_over();
    identity::start_over();
    let me = share::owner();
    share::start_over(me);
    statistics::open(settings, me);
    // What a process could not have for its children, these and theirs have not either. It has said so.
    let has_given_up = candidates::has_given_up();
    STARTED.store(u32::from(has_given_up), Ordering::Relaxed);
    let Some((engine, quiet)) = ours.engine().zip(quiet) else { return candidates::forget_made() };
    if quiet.is_empty() {
        ours.forget_engine();
        if has_given_up {
            return share::leave();
        }
        // The engine has nothing that this process needs. Once the process is near its limit, it makes its own.
        return candidates::forget_made();
    }
    STARTED.store(1, Ordering::Relaxed);
    // What is read there would be taken for this process's memory, or end as somebody else's file.
    if !quiet.lent().is_whole() {
        fatal::print_here(format_args!(
            "a child's memory cannot be brought back: the program closed the spill file at the fork: stopped"
        ));
        process::abort_now(fatal::STATUS)
    }
    // This comes first: any other mapping could take the place of the staging area.
    if let Err(error) = engine.map_again(quiet) {
        fatal::print_here(format_args!("{error}: the limit is not held in a child"));
        return live_without(engine, ours, quiet);
    }
    READY.store(WAIT, Ordering::Relaxed);
    // The reclaim thread must own the new descriptors, and this thread must not go on before faults are
    // served. So this thread lends `quiet` to the reclaim thread until READY changes.
    let lent = std::ptr::from_mut(quiet) as usize;
    let started = start_thread(c"zfolio-reclaim", CHILD_TRIES, fatal::print_here, move || {
        run_soon();
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
        return live_without(engine, ours, quiet);
    }
    while READY.load(Ordering::Acquire) == WAIT {
        futex::wait(&READY, WAIT, None);
    }
    if READY.load(Ordering::Acquire) == FAILED {
        live_without(engine, ours, quiet);
    }
}

/// On a child's reclaim thread: opens new descriptors and starts the other threads. False if that fails,
/// after a report of the reason.
fn live_again(engine: &'static Engine, quiet: &mut zfolio_pager::Quiet<'_>) -> bool {
    let lent: Vec<_> = quiet.lent().files().collect();
    let lent = match files::leave_program_files(&lent) {
        Ok(lent) => lent,
        Err(errno) => {
            fatal::print_here(format_args!(
                "unshare(CLONE_FILES) or close_range: {}: the limit is not held in a child",
                ErrnoText(errno)
            ));
            return false;
        }
    };
    if let Err(error) = engine.open_again(quiet, lent) {
        fatal::print(format_args!("{error}: the limit is not held in a child"));
        return false;
    }
    if !start_other_threads(engine, CHILD_TRIES) {
        return false;
    }
    if let Some(settings) = settings::get() {
        entrust(engine, settings);
    }
    if let Err(error) = engine.register_again(quiet, mappings::is_not_all_inherited()) {
        not_brought_back(error, fatal::print);
    }
    share::set_reclaims();
    true
}

/// A child would read zeros where its data was.
fn not_brought_back(error: Errno, tell: Tell) -> ! {
    let (why, errno) = (ErrnoText(error), error.raw_os_error());
    tell(format_args!("a child's memory cannot be brought back: {why} (errno {errno}): stopped"));
    process::abort_now(fatal::STATUS)
}

/// For a child that cannot have an engine: brings all of its memory back, which the kernel alone serves from
/// then on. `fork` has succeeded already. A child over the limit is better than one that ends, or that reads
/// zeros where its data was.
fn live_without(engine: &Engine, ours: &mut Candidates, quiet: &mut zfolio_pager::Quiet<'_>) {
    share::leave();
    if let Err(error) = engine.return_all(quiet) {
        not_brought_back(error, fatal::print_here);
    }
    ours.forget_engine();
}
