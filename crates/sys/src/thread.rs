//! Threads that the C library does not know.
//!
//! `pthread_create` allocates with the program's `calloc`, counts the thread, and reads its records
//! of the program's libraries. So a thread is made here by `clone` itself, with its own stack and
//! thread-local storage ([`learn`]), and runs only the given function.
//!
//! The C library does not take care of such a thread. It takes no part in `setuid` and its like
//! (see [`lead`] and [`follow`]), it gets no signals, and the process does not wait for it when the
//! program's last thread ends.
//!
//! # Invariants
//!
//! - `THR-1` A **seat** (stack and storage) belongs to one thread for the life of the process. A
//!   child of `fork` does not have that thread, so there the seat goes to the next one.

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

/// Bytes of a stack. The deepest call of a codec needs 4 KiB.
const STACK_BYTES: usize = 256 << 10;

/// The most threads at a time: 64 workers, and those that there are beside them.
const SEATS: usize = 128;

/// A stack with storage above it, for one thread.
struct Seat {
    /// The thread pointer of the seat; 0 until it is made.
    pointer: AtomicUsize,
    taken: AtomicBool,
    /// The last change of identity that the thread has followed.
    turn: AtomicUsize,
}

static ALL: [Seat; SEATS] = [const {
    Seat { pointer: AtomicUsize::new(0), taken: AtomicBool::new(false), turn: AtomicUsize::new(0) }
}; SEATS];

/// The argument of a new thread.
struct Start {
    name: &'static CStr,
    life: Life,
    seat: &'static Seat,
}

/// The flags of `pthread_create`: a sandbox may allow no others.
const FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Returns the flag that hides a new thread from a tracer, if the process is traced; otherwise 0.
///
/// A tracer (`strace -f`) reads the program's memory with `process_vm_readv`, which may wait for a
/// fault. If it had stopped the thread that serves faults, both would wait for ever. Without a
/// tracer the flag is omitted, because a sandbox may not allow it.
///
/// A child is traced if its parent is, so one test is enough. A tracer that attaches later stops
/// all threads.
fn untraced() -> i32 {
    /// Not tested yet: 0; not traced: 1; traced: 2.
    static TRACED: AtomicU32 = AtomicU32::new(0);
    if TRACED.load(Relaxed) == 0 {
        let traced = crate::process::is_traced();
        TRACED.store(if traced { 2 } else { 1 }, Relaxed);
    }
    if TRACED.load(Relaxed) == 2 { libc::CLONE_UNTRACED } else { 0 }
}

/// Learns the layout of thread-local storage. No thread can start before that.
///
/// Must be called when the program's libraries are loaded, and no code of the program holds a lock
/// of the loader.
pub fn learn() {
    storage::learn();
}

/// Whether [`learn`] was called.
#[must_use]
pub fn has_learnt() -> bool {
    storage::layout().is_some()
}

/// Starts a thread, which inherits the signal mask. Only Rust's global allocator is called. If the
/// kernel has no room, `clone` is tried `tries` times, a millisecond apart.
///
/// # Errors
///
/// `NOMEM`: no memory for a stack. `AGAIN`, after all tries: no room for a thread; the kernel also
/// answers this while another thread is in `execve`, which soon ends this process, or fails.
/// `INTR`: the process is being killed. `PERM`: a sandbox. `NOSYS`: before [`learn`], or on another
/// architecture.
pub fn spawn(name: &'static CStr, tries: u32, life: Life) -> Result<(), Errno> {
    let layout = storage::layout().ok_or(Errno::NOSYS)?;
    let seat = ALL.iter().find(|seat| !seat.taken.swap(true, Ordering::AcqRel));
    let seat = seat.ok_or(Errno::AGAIN)?;
    let begun = seat.prepare(layout).and_then(|pointer| {
        let start = Box::into_raw(Box::new(Start { name, life, seat }));
        let begun = begin(pointer, layout.span, tries, start);
        if begun.is_err() {
            // SAFETY: no thread has taken it, since none was started.
            drop(unsafe { Box::from_raw(start) });
        }
        begun
    });
    if begun.is_err() {
        seat.taken.store(false, Ordering::Release);
    }
    begun
}

/// In a child of `fork`, on its only thread: frees the seats of the parent's other threads.
pub fn start_over() {
    identity::start_over();
    for seat in &ALL {
        seat.turn.store(0, Ordering::Relaxed);
        seat.taken.store(false, Ordering::Relaxed);
    }
}

/// Sleeps, without being a cancellation point of the C library.
pub fn sleep(time: Duration) {
    let mut left = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&left) {
        left = rest;
    }
}

/// Lets another thread that waits for this CPU run first.
pub fn yield_now() {
    rustix::thread::sched_yield();
}

/// The thread pointer of the calling thread: a number that no other living thread of the process has.
fn pointer() -> usize {
    // SAFETY: no preconditions; it reads the thread pointer.
    unsafe { libc::pthread_self() }.try_into().unwrap_or(0)
}

impl Seat {
    /// Makes the seat ready for a new thread; returns its thread pointer.
    fn prepare(&self, layout: &storage::Layout) -> Result<usize, Errno> {
        let mut pointer = self.pointer.load(Ordering::Acquire);
        if pointer == 0 {
            let above = layout.span + storage::CONTROL_BYTES;
            let memory = Reservation::new(PAGE_BYTES + STACK_BYTES + above, PAGE_BYTES)?;
            let none = rustix::mm::MprotectFlags::empty();
            // A stack overflow ends the process instead of overwriting other memory.
            // SAFETY: the lowest page of fresh memory of ours.
            unsafe { rustix::mm::mprotect(memory.base().as_ptr().cast(), PAGE_BYTES, none) }?;
            let bytes = memory.bytes();
            // Never freed: a thread cannot unmap its own stack.
            pointer = memory.leak().as_ptr() as usize + bytes - storage::CONTROL_BYTES;
            self.pointer.store(pointer, Ordering::Release);
        } else {
            let start = (pointer - layout.span) as *mut u8;
            // SAFETY: the seat's own storage. Its thread exists only in the parent (THR-1).
            unsafe { start.write_bytes(0, layout.span + storage::CONTROL_BYTES) };
        }
        // SAFETY: the seat is ours, and its storage is new or was cleared above.
        unsafe { layout.lay_out(pointer) };
        Ok(pointer)
    }
}

/// Makes the kernel start the thread.
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

/// The first function of a thread.
extern "C" fn live(start: *mut Start) -> ! {
    // SAFETY: spawn() made it for this thread alone.
    let Start { name, life, seat } = *unsafe { Box::from_raw(start) };
    if let Some(layout) = storage::layout() {
        layout.register_sequence(pointer());
    }
    // The name is for people only, so an error does not matter.
    rustix::thread::set_name(name).ok();
    life();
    // lead() no longer waits for this thread.
    seat.turn.store(usize::MAX, Ordering::Release);
    loop {
        // SAFETY: it ends this thread alone, which owns nothing any more except its seat.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

/// Makes the `clone` call: the new thread calls `life(start)` on a stack that ends at `stack`.
///
/// # Safety
///
/// `stack` is the end of an unused stack, `storage` a thread pointer with storage around it,
/// `number` a word for the kernel; all live as long as the thread.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(
    stack: usize,
    number: usize,
    storage: usize,
    life: extern "C" fn(*mut Start) -> !,
    start: *mut Start,
) -> i64 {
    let answer: i64;
    // SAFETY: for the calling thread this is a system call that changes rax, rcx and r11. The new
    // thread has its own stack, does not touch this frame, and never returns here.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            // Marks the outermost frame for those who walk the stack.
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

    /// Goal: the function of a thread runs with its own storage: thread-locals have their initial
    /// values, `errno` is not the caller's, and the CPU number is right.
    #[test]
    fn a_thread_runs_what_it_is_given() {
        static RAN: AtomicU32 = AtomicU32::new(0);
        static SEEN: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
        super::learn();
        OWN.set(7);
        let tag = super::pointer();
        let life = Box::new(move || {
            let (known, asked) = loop {
                // Repeated until the thread is not moved to another CPU in between.
                let asked = rustix::thread::sched_getcpu();
                let known = crate::cpu::current();
                if asked == rustix::thread::sched_getcpu() {
                    break (known, asked);
                }
            };
            // SAFETY: the call fails, and sets `errno`.
            unsafe { libc::close(-1) };
            SEEN[0].store(OWN.get(), Ordering::Relaxed);
            SEEN[1].store(usize::from(known == asked), Ordering::Relaxed);
            SEEN[2].store(usize::from(super::pointer() != tag), Ordering::Relaxed);
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

    /// Goal: many threads can live at once, each on a seat of its own. A panic in such a thread
    /// would end the process, so nothing else is checked.
    #[test]
    fn threads_have_seats_of_their_own() {
        static LIVING: AtomicU32 = AtomicU32::new(0);
        static TAGS: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
        super::learn();
        for tag in &TAGS {
            let life = Box::new(|| {
                tag.store(super::pointer(), Ordering::Relaxed);
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
