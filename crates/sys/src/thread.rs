//! Threads that the C library does not know of.
//!
//! `pthread_create` allocates by the program's `calloc`, counts the thread, and reads what it keeps about
//! the program's libraries. So a thread is made here by `clone` itself, with a stack and thread-local storage
//! of our own ([`learn`]), and runs nothing but what it is given.
//!
//! What the C library would do for a thread that it knows is left to whoever wants it: such a thread does not
//! take part in `setuid` and its like ([`lead`] and [`follow`] are for that), gets no signal, and is not waited for
//! when the program's last thread ends.
//!
//! # Invariants
//!
//! - `THR-1` A **seat** (stack and storage) belongs to one thread, for the life of the process; in a child of
//!   `fork`, where that thread is not, to the next one.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, Ordering::Relaxed};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::Timespec;

use crate::map::{PAGE_BYTES, Reservation};

mod identity;
mod storage;

pub use identity::{follow, lead};

type Life = Box<dyn FnOnce() + Send>;

/// Bytes of a stack: a codec's deepest call takes 4 KiB.
const STACK_BYTES: usize = 256 << 10;

/// Threads at a time.
const SEATS: usize = 64;

/// A stack with storage above it.
struct Seat {
    /// Its thread pointer, once it is made; 0 before.
    pointer: AtomicUsize,
    taken: AtomicBool,
    /// The last change of identity that its thread has followed.
    turn: AtomicUsize,
}

static ALL: [Seat; SEATS] = [const {
    Seat { pointer: AtomicUsize::new(0), taken: AtomicBool::new(false), turn: AtomicUsize::new(0) }
}; SEATS];

/// What a new thread is handed.
struct Start {
    name: &'static CStr,
    life: Life,
    seat: &'static Seat,
}

/// As `pthread_create` has it: a sandbox may let no other threads begin.
const FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Whether the process is traced: then a thread of ours is made such that the tracer does not get it as well
/// (`strace -f`). It reads the program's memory by `process_vm_readv`, which may wait for a fault that a
/// stopped thread would have to serve. Elsewhere the flag is left out, for the sake of sandboxes.
///
/// A child is traced as its parent is, so one look is enough. A tracer that comes later stops all threads.
fn untraced() -> i32 {
    /// 0 not looked yet, 1 not traced, 2 traced.
    static TRACED: AtomicU32 = AtomicU32::new(0);
    if TRACED.load(Relaxed) == 0 {
        let traced = crate::process::is_traced();
        TRACED.store(if traced { 2 } else { 1 }, Relaxed);
    }
    if TRACED.load(Relaxed) == 2 { libc::CLONE_UNTRACED } else { 0 }
}

/// Learns how thread-local storage is laid out. Before that no thread can start.
///
/// To be called when the program's libraries are loaded and none of its own code holds a lock of the loader.
pub fn learn() {
    storage::learn();
}

/// Whether [`learn`] was called.
#[must_use]
pub fn has_learnt() -> bool {
    storage::layout().is_some()
}

/// Starts a thread; it inherits the signal mask. No allocator but Rust's global one is called. A `clone` that the
/// kernel has no room for is tried `tries` times, a millisecond apart.
///
/// # Errors
///
/// `NOMEM` for want of a stack. `AGAIN` for want of threads, after all tries: `AGAIN` is also told while another
/// thread is in `execve`, which ends this process in a moment, or fails. `INTR`: the process is being killed.
/// `PERM` in a sandbox. `NOSYS` before [`learn`], or on another kind of machine.
pub fn spawn(name: &'static CStr, tries: u32, life: Life) -> Result<(), Errno> {
    let layout = storage::layout().ok_or(Errno::NOSYS)?;
    let seat = ALL.iter().find(|seat| !seat.taken.swap(true, Ordering::AcqRel));
    let seat = seat.ok_or(Errno::AGAIN)?;
    let begun = seat.prepare(layout).and_then(|pointer| {
        let start = Box::into_raw(Box::new(Start { name, life, seat }));
        let begun = begin(pointer, layout.span, tries, start);
        if begun.is_err() {
            // SAFETY: no thread has taken it.
            drop(unsafe { Box::from_raw(start) });
        }
        begun
    });
    if begun.is_err() {
        seat.taken.store(false, Ordering::Release);
    }
    begun
}

/// In a child of `fork`, on its only thread: the parent's other threads are not here.
pub fn start_over() {
    identity::start_over();
    for seat in &ALL {
        seat.turn.store(0, Ordering::Relaxed);
        seat.taken.store(false, Ordering::Relaxed);
    }
}

/// Sleeps, without any of the C library's ways to be cancelled.
pub fn sleep(time: Duration) {
    let mut left = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&left) {
        left = rest;
    }
}

/// A number that no other living thread of the process has.
#[must_use]
pub fn tag() -> usize {
    pointer()
}

/// The thread pointer of the calling thread.
fn pointer() -> usize {
    // SAFETY: no preconditions; it reads the thread pointer.
    unsafe { libc::pthread_self() }.try_into().unwrap_or(0)
}

impl Seat {
    /// Makes the seat ready for a new thread; tells its thread pointer.
    fn prepare(&self, layout: &storage::Layout) -> Result<usize, Errno> {
        let mut pointer = self.pointer.load(Ordering::Acquire);
        if pointer == 0 {
            let above = layout.span + storage::CONTROL_BYTES;
            let memory = Reservation::new(PAGE_BYTES + STACK_BYTES + above, PAGE_BYTES)?;
            let none = rustix::mm::MprotectFlags::empty();
            // A stack that grows too far ends the process, and writes over nothing.
            // SAFETY: the lowest page of fresh memory of ours.
            unsafe { rustix::mm::mprotect(memory.base().as_ptr().cast(), PAGE_BYTES, none) }?;
            let bytes = memory.bytes();
            // Never given back: a thread cannot unmap what it stands on.
            pointer = memory.leak().as_ptr() as usize + bytes - storage::CONTROL_BYTES;
            self.pointer.store(pointer, Ordering::Release);
        } else {
            let start = (pointer - layout.span) as *mut u8;
            // SAFETY: the seat's own storage, whose thread was in the parent and is not here (THR-1).
            unsafe { start.write_bytes(0, layout.span + storage::CONTROL_BYTES) };
        }
        // SAFETY: the seat is ours, and its storage is fresh or was cleared above.
        unsafe { layout.lay_out(pointer) };
        Ok(pointer)
    }
}

/// Has the kernel make the thread.
fn begin(pointer: usize, span: usize, tries: u32, start: *mut Start) -> Result<(), Errno> {
    let mut tried = 1;
    loop {
        // SAFETY: the seat is this thread's alone, with a stack that ends where its storage begins; `live`
        // takes what it is given and does not return.
        let answer =
            unsafe { clone(pointer - span, pointer + storage::NUMBER_AT, pointer, live, start) };
        let Ok(error) = i32::try_from(-answer) else { return Err(Errno::INVAL) };
        match error {
            ..=0 => return Ok(()),
            libc::EAGAIN if tried < tries => sleep(Duration::from_millis(1)),
            error => return Err(Errno::from_raw_os_error(error)),
        }
        tried += 1;
    }
}

/// A thread's first function.
extern "C" fn live(start: *mut Start) -> ! {
    // SAFETY: spawn() made it for this thread alone.
    let Start { name, life, seat } = *unsafe { Box::from_raw(start) };
    if let Some(layout) = storage::layout() {
        layout.register_sequence(pointer());
    }
    // A name is for people only.
    rustix::thread::set_name(name).ok();
    life();
    // Nobody waits for it in lead() any more.
    seat.turn.store(usize::MAX, Ordering::Release);
    loop {
        // SAFETY: it ends this thread alone, which owns nothing any more but its seat.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

/// `clone`: the new thread calls `life(start)` on a stack that ends at `stack`.
///
/// # Safety
///
/// `stack` is the end of a stack that nobody uses, `storage` a thread pointer with storage around it, `number` a
/// word for the kernel; all live as long as the thread.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(
    stack: usize,
    number: usize,
    storage: usize,
    life: extern "C" fn(*mut Start) -> !,
    start: *mut Start,
) -> i64 {
    let answer: i64;
    // SAFETY: the calling thread sees a system call that changes rax, rcx and r11. The new thread has its own stack,
    // touches nothing of this frame, and never comes back.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            // The outermost frame, for whoever walks the stack.
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone => answer,
            in("rdi") i64::from(FLAGS | untraced()),
            in("rsi") stack,
            in("rdx") number,
            in("r10") number,
            in("r8") storage,
            in("r12") start,
            in("r13") life,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    answer
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn clone(
    _stack: usize,
    _number: usize,
    _storage: usize,
    _life: extern "C" fn(*mut Start) -> !,
    _start: *mut Start,
) -> i64 {
    -i64::from(libc::ENOSYS)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(41) };
    }

    /// What a thread is given runs, with storage of its own: its thread-locals are as at the start, `errno` is
    /// not the caller's, and it knows its CPU.
    #[test]
    fn a_thread_runs_what_it_is_given() {
        static RAN: AtomicU32 = AtomicU32::new(0);
        static SEEN: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
        super::learn();
        OWN.set(7);
        let tag = super::tag();
        let life = Box::new(move || {
            let (known, asked) = loop {
                // Until it is not moved to another CPU in between.
                let asked = rustix::thread::sched_getcpu();
                let known = crate::cpu::current();
                if asked == rustix::thread::sched_getcpu() {
                    break (known, asked);
                }
            };
            // SAFETY: it fails, and leaves an error behind.
            unsafe { libc::close(-1) };
            SEEN[0].store(OWN.get(), Ordering::Relaxed);
            SEEN[1].store(usize::from(known == asked), Ordering::Relaxed);
            SEEN[2].store(usize::from(super::tag() != tag), Ordering::Relaxed);
            let error = std::io::Error::last_os_error().raw_os_error();
            SEEN[3].store(usize::from(error == Some(libc::EBADF)), Ordering::Relaxed);
            RAN.store(7, Ordering::Release);
            crate::futex::wake(&RAN, 1);
        });
        // SAFETY: it has no precondition.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the C library's variable of this thread.
        unsafe { errno.write(0) };
        super::spawn(c"zfolio-test", 1, life).unwrap();
        while RAN.load(Ordering::Acquire) != 7 {
            crate::futex::wait(&RAN, 0, None);
        }
        let seen: Vec<usize> = SEEN.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        assert_eq!(seen, [41, 1, 1, 1]);
        assert_eq!(OWN.get(), 7);
        assert_ne!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    }

    /// Threads that panic would take the process along: so all that is checked is that many can live at once,
    /// each on a seat of its own.
    #[test]
    fn threads_have_seats_of_their_own() {
        static LIVING: AtomicU32 = AtomicU32::new(0);
        static TAGS: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
        super::learn();
        for tag in &TAGS {
            let life = Box::new(|| {
                tag.store(super::tag(), Ordering::Relaxed);
                LIVING.fetch_add(1, Ordering::Release);
            });
            super::spawn(c"zfolio-test", 1, life).unwrap();
        }
        while LIVING.load(Ordering::Acquire) < 8 {
            std::thread::yield_now();
        }
        let mut tags: Vec<usize> = TAGS.iter().map(|tag| tag.load(Ordering::Relaxed)).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), 8);
    }
}
