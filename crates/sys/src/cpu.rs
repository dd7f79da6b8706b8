//! On which CPU a thread runs, and on which CPUs it may run.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

use rustix::thread::{CpuSet, Pid};

use crate::files;

/// Offset of the rseq area from the thread pointer; 0: not looked up yet, 1: there is none.
///
/// Real offsets are multiples of 4, so 1 is free to mean "none".
static RSEQ_OFFSET: AtomicIsize = AtomicIsize::new(0);

/// Byte offset of `cpu_id` in `struct rseq`.
const RSEQ_CPU_ID: isize = 4;

/// The number of the CPU on which this thread is running, or was a moment ago.
///
/// From the rseq area that glibc 2.35 and later registers for each thread (0.3 ns), or by asking
/// the kernel (about 30 ns).
#[must_use]
pub fn current() -> usize {
    let offset = match RSEQ_OFFSET.load(Relaxed) {
        0 => find_rseq(),
        known => known,
    };
    if offset != 1 {
        // SAFETY: find_rseq() read the offset from glibc; the area there lives as long as the
        // thread.
        let cpu = unsafe { rseq_cpu(offset) };
        if let Ok(cpu) = usize::try_from(cpu) {
            return cpu;
        }
    }
    rustix::thread::sched_getcpu()
}

#[cold]
fn find_rseq() -> isize {
    // SAFETY: the name is a C string; dlsym only looks it up.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) };
    let offset = if symbol.is_null() || cfg!(not(target_arch = "x86_64")) {
        1
    } else {
        // SAFETY: glibc declares it `const ptrdiff_t __rseq_offset`.
        unsafe { symbol.cast::<isize>().read() }
    };
    RSEQ_OFFSET.store(offset, Relaxed);
    offset
}

/// # Safety
///
/// `offset` is glibc's `__rseq_offset`.
#[cfg(target_arch = "x86_64")]
unsafe fn rseq_cpu(offset: isize) -> i32 {
    let cpu: i32;
    // SAFETY: `fs:` is the thread pointer on x86-64 Linux; by the contract the area is there.
    unsafe {
        std::arch::asm!("mov {0:e}, dword ptr fs:[{1} + {2}]", out(reg) cpu, in(reg) offset,
            const RSEQ_CPU_ID, options(nostack, readonly, preserves_flags));
    }
    cpu
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn rseq_cpu(_offset: isize) -> i32 {
    -1
}

/// The number of CPUs that are online.
#[must_use]
pub fn online() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Makes this thread run on `cpu` only.
pub fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
        // This fails if the CPU went offline or is not in the cpuset; the thread then only runs
        // slower.
        rustix::thread::sched_setaffinity(None::<Pid>, &set).ok();
    }
}

/// The CPUs on which the process could run at its start.
static GIVEN: OnceLock<CpuSet> = OnceLock::new();

/// Records on which CPUs this thread may run. Only the first call has an effect; it must come
/// before any thread is pinned.
pub fn learn() {
    GIVEN.get_or_init(|| rustix::thread::sched_getaffinity(None).unwrap_or_default());
}

/// How many CPUs [`learn`] recorded.
#[must_use]
pub fn given() -> usize {
    GIVEN.get().map_or(0, |given| given.count() as usize)
}

/// Lets a thread of this process (0: the calling one) run on every CPU that [`learn`] recorded.
pub fn unpin(thread: u32) {
    let thread = i32::try_from(thread).ok().and_then(Pid::from_raw);
    if let Some(given) = GIVEN.get() {
        // This fails if the thread has ended, or if all of these CPUs are offline.
        rustix::thread::sched_setaffinity(thread, given).ok();
    }
}

/// How long the calling thread could have run since its start, but had no CPU. `None`: the kernel does not count it
/// (`CONFIG_SCHED_INFO`), or `/proc` is not there. Takes 5 us.
#[must_use]
pub fn run_delay_ns() -> Option<u64> {
    let mut text = [0; 64];
    let length = files::read_small(c"/proc/thread-self/schedstat", &mut text).ok()?;
    // Time on a CPU, time waited for one, turns.
    let text = std::str::from_utf8(&text[..length]).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The shortest turn that the kernel gives to a thread which asks for one.
const TURN_NS: u64 = 100_000;

/// Makes the calling thread, and the threads that it starts, run soon after a wake-up, also while other threads
/// keep every CPU busy: it asks for short turns.
///
/// The kernel's scheduler (EEVDF) serves first whose turn would end first, and interrupts a longer turn for a
/// shorter one. How much of a CPU a thread gets in all does not change. Linux 6.12 and later; earlier kernels ignore
/// the request, and so do we where it is refused. Real-time threads stay as they are.
pub fn take_short_turns() {
    if let Some(mut how) = scheduling().filter(is_fair) {
        how.sched_runtime = TURN_NS;
        // SAFETY: the call reads `how`, and changes only how this thread is scheduled.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const how, 0) };
    }
}

/// Whether the calling thread takes turns with others, and is not a real-time thread.
#[must_use]
pub fn takes_turns() -> bool {
    scheduling().as_ref().is_some_and(is_fair)
}

fn is_fair(how: &libc::sched_attr) -> bool {
    let fair = [libc::SCHED_OTHER, libc::SCHED_BATCH];
    fair.iter().any(|policy| u32::try_from(*policy) == Ok(how.sched_policy))
}

/// How the kernel schedules the calling thread; `None` if it does not say.
fn scheduling() -> Option<libc::sched_attr> {
    // SAFETY: integers only, for which zero is a value.
    let mut how: libc::sched_attr = unsafe { std::mem::zeroed() };
    let bytes = size_of::<libc::sched_attr>();
    // SAFETY: `how` is writable for `bytes`.
    let answer = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut how, bytes, 0) };
    (answer == 0).then_some(how)
}

/// The id of this thread.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// The CPU that thread `tid` of this process last ran on, from `/proc` (about 8 us).
#[must_use]
pub fn of_thread(tid: u32) -> Option<usize> {
    use std::io::Write as _;
    let mut path = [0_u8; 48];
    let mut rest = &mut path[..];
    write!(rest, "/proc/self/task/{tid}/stat\0").ok()?;
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    let mut text = [0_u8; 512];
    let length = crate::files::read_small(path, &mut text).ok()?;
    // Field 39, counted after the command's closing parenthesis, which is the end of field 2.
    let tail = &text[text[..length].iter().rposition(|byte| *byte == b')')? + 2..length];
    let field = tail.split(|byte| *byte == b' ').nth(39 - 3)?;
    std::str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_thread_is_where_it_was_pinned() {
        let here = super::current();
        super::pin(here);
        assert_eq!(super::current(), here);
        assert_eq!(super::of_thread(super::thread_id()), Some(here));
    }

    #[test]
    fn a_thread_and_those_that_it_starts_take_short_turns() {
        let scheduled =
            || super::scheduling().map(|how| (how.sched_policy, how.sched_nice, how.sched_runtime));
        std::thread::spawn(move || {
            let (policy, nice, before) = scheduled().unwrap();
            if before == 0 {
                return eprintln!("SKIPPED: turns are as the kernel chooses before Linux 6.12");
            }
            assert!(super::takes_turns());
            super::take_short_turns();
            let wanted = Some((policy, nice, super::TURN_NS));
            assert_eq!(scheduled(), wanted);
            assert_eq!(std::thread::spawn(scheduled).join().unwrap(), wanted);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn another_thread_can_be_unpinned() {
        super::learn();
        let before = rustix::thread::sched_getaffinity(None).unwrap();
        assert!((1..=before.count() as usize).contains(&super::given()));
        super::pin(super::current());
        let here = super::thread_id();
        std::thread::spawn(move || super::unpin(here)).join().unwrap();
        assert!(rustix::thread::sched_getaffinity(None).unwrap() == before);
    }

    /// Goal: after each migration of a thread its CPU number is right.
    #[test]
    fn a_thread_that_migrates_is_told_so() {
        let here = super::current();
        for cpu in (0..super::online().max(2)).cycle().take(50) {
            super::pin(cpu);
            // Pinning fails for a CPU that this process may not use.
            assert_eq!(super::current(), rustix::thread::sched_getcpu());
        }
        super::pin(here);
    }

    /// Prints the cost of reading the number: `cargo test --release -p zfolio-sys cpu_speed --
    /// --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    #[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
    fn cpu_speed() {
        let ns = |look: &dyn Fn() -> usize| {
            let mut rounds: Vec<f64> = (0..15)
                .map(|_| {
                    let begin = std::time::Instant::now();
                    for _ in 0..1_000_000 {
                        std::hint::black_box(look());
                    }
                    begin.elapsed().as_secs_f64() * 1e3
                })
                .collect();
            rounds.sort_by(f64::total_cmp);
            rounds[7]
        };
        // SAFETY: no precondition.
        let libc_s = || unsafe { libc::sched_getcpu() }.unsigned_abs() as usize;
        println!("nothing {:.2} ns", ns(&|| 0));
        println!("rseq area {:.2} ns", ns(&super::current));
        println!("glibc's sched_getcpu {:.2} ns", ns(&libc_s));
        println!("getcpu by the vDSO or a system call {:.2} ns", ns(&rustix::thread::sched_getcpu));
    }
}
