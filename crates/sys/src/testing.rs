//! What the tests of several crates share. Not part of the interface.

use crate::Errno;
use std::io::Write;

/// The system calls of io_uring.
pub const IO_URING: [libc::c_long; 3] =
    [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// Seconds after which a child is ended: it waits for what will never come.
const LIFE_SECONDS_MAX: u32 = 120;

/// Runs `life` in a child of `fork`, and returns whether it returned true. A child that does not end is ended, and that
/// is false.
///
/// # Panics
///
/// There is no process for it.
pub fn in_child(life: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only calls `life`, and ends. The C library and the standard library keep their locks and
    // their allocator usable in a child.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: it sets a timer of this process; nothing handles its signal, which ends the process.
        unsafe { libc::alarm(LIFE_SECONDS_MAX) };
        let life = std::panic::AssertUnwindSafe(life);
        let good = std::panic::catch_unwind(life).unwrap_or_else(|payload| {
            // What the hook has printed is kept for a test of this process, which nobody will read.
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref().copied()).unwrap_or("it panicked");
            drop(writeln!(std::io::stderr(), "in a child: {text}"));
            false
        });
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for the status of our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status == 0
}

/// Forbids system calls to the calling thread and its children, for good: the kernel answers `error`, as a container's
/// seccomp profile does.
///
/// # Errors
///
/// The kernel takes no filter.
///
/// # Panics
///
/// More than 200 calls.
pub fn forbid_calls(calls: &[libc::c_long], error: Errno) -> Result<(), Errno> {
    let errno = u32::try_from(error.raw_os_error()).expect("errors are positive");
    // The number of the call is the first word of the filter's input.
    let mut filter = vec![instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for (index, call) in calls.iter().enumerate() {
        // Over the other calls, and over the permission.
        let jump = u8::try_from(calls.len() - index).expect("few calls");
        let number = u32::try_from(*call).expect("numbers are small");
        filter.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jump, 0, number));
    }
    filter.push(instruction(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(instruction(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ERRNO | errno));
    confine(&mut filter)
}

/// Refuses direct transfers to the calling thread and its children, for good, as a file system does that has none:
/// `INVAL` when a file that is open gets the flag.
///
/// # Errors
///
/// The kernel takes no filter.
///
/// # Panics
///
/// Never: the constants are small.
pub fn forbid_direct() -> Result<(), Errno> {
    /// Where the lower half of an argument is in the filter's input.
    const fn argument(index: u32) -> u32 {
        16 + 8 * index
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    let small = |number: i64| u32::try_from(number).expect("numbers are small");
    let errno = small(Errno::INVAL.raw_os_error().into());
    confine(&mut [
        instruction(LOAD, 0, 0, 0),
        instruction(EQUAL, 0, 5, small(libc::SYS_fcntl)),
        instruction(LOAD, 0, 0, argument(1)),
        instruction(EQUAL, 0, 3, small(libc::F_SETFL.into())),
        instruction(LOAD, 0, 0, argument(2)),
        instruction(ANY_BIT, 0, 1, small(libc::O_DIRECT.into())),
        instruction(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ERRNO | errno),
        instruction(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW),
    ])
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).expect("codes are short"), jt, jf, k }
}

/// Puts the calling thread under a filter.
fn confine(filter: &mut [libc::sock_filter]) -> Result<(), Errno> {
    let len = u16::try_from(filter.len()).expect("few calls");
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    let last_error = || Errno::from_io_error(&std::io::Error::last_os_error());
    // SAFETY: it takes numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(last_error().unwrap_or(Errno::PERM));
    }
    // SAFETY: `program` names the instructions of `filter`, which live until it returns.
    let answer =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if answer == 0 { Ok(()) } else { Err(last_error().unwrap_or(Errno::PERM)) }
}
