//! A child that this process represents: it passes signals on to the child, and ends as the child
//! ends.
//!
//! # Invariants
//!
//! - `CHILD-1` The caller has one thread. So no other thread holds a lock when it forks. Between
//!   `fork` and `execve` the child makes only async-signal-safe calls, on memory prepared before.
//! - `CHILD-2` From [`Signals::block`] on, every signal that can be passed on is blocked here and
//!   received with `sigtimedwait`; no signal is lost, and none runs a handler.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use crate::inherited;

/// Base of the exit status if a signal does not end this process although it should; as in a shell.
const DIED_BASE: i32 = 128;

/// A change of state of the child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It ended with this exit status.
    Exited(i32),
    /// A signal ended it.
    Died(i32),
    /// A signal ended it, and a core was dumped.
    Dumped(i32),
    /// A signal stopped it.
    Stopped(i32),
}

/// A signal that was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// Whether a process sent it (`kill`, `sigqueue`), not the kernel or the terminal.
    pub from_process: bool,
    /// The process that sent it, if one did.
    pub sender: i32,
}

/// The signals that this process receives on behalf of its child.
#[derive(Debug)]
pub struct Signals {
    taken: libc::sigset_t,
    before: libc::sigset_t,
    child_action_before: libc::sigaction,
}

impl std::fmt::Debug for Program<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Program({:?}, {} arguments)", self.path, self.arguments.len())
    }
}

/// The program to start.
pub struct Program<'a> {
    /// The file.
    pub path: &'a CStr,
    /// The arguments, the name first.
    pub arguments: &'a [CString],
    /// The environment, each `NAME=value`.
    pub environment: &'a [CString],
    /// Where its standard output and standard error go; `None`: where those of this process go.
    pub output: Option<BorrowedFd<'a>>,
    /// The signal that it gets if this process ends first.
    pub orphaned: i32,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The signals to receive: all except those that a fault of the program raises, the two that cannot
/// be blocked, and the two with which the terminal stops a background job, which must stop this
/// process.
fn signals_taken() -> libc::sigset_t {
    const LEFT: [libc::c_int; 11] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
        libc::SIGABRT,
        libc::SIGKILL,
        libc::SIGSTOP,
        libc::SIGTTIN,
        libc::SIGTTOU,
    ];
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` writes the whole set that it is given.
    let filled = unsafe { libc::sigfillset(set.as_mut_ptr()) };
    assert!(filled == 0, "sigfillset fails only for a bad address");
    // SAFETY: written whole by `sigfillset` above.
    let mut set = unsafe { set.assume_init() };
    for number in LEFT {
        // SAFETY: `set` is a valid set of ours, and `number` a signal's.
        let removed = unsafe { libc::sigdelset(&raw mut set, number) };
        assert!(removed == 0, "a signal that exists");
    }
    set
}

impl Signals {
    /// Blocks the signals that can be passed on, and makes sure that the end of a child is
    /// reported.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn block() -> io::Result<Signals> {
        let taken = signals_taken();
        let mut before = taken;
        // SAFETY: both sets are valid, ours, and outlive the call.
        let result =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const taken, &raw mut before) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SIGCHLD may be ignored in this process from the start; then children would vanish without
        // being waited for.
        let child_action_before = set_action(libc::SIGCHLD, libc::SIG_DFL)?;
        Ok(Signals { taken, before, child_action_before })
    }

    /// Waits for the next signal until `timeout` has passed; `None` if there was none.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next(&self, timeout: Duration) -> io::Result<Option<Signal>> {
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the set and the timeout are valid, and the kernel writes one `siginfo_t` on success.
        let number = unsafe {
            libc::sigtimedwait(&raw const self.taken, info.as_mut_ptr(), &raw const timeout)
        };
        if number <= 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                // Interrupted because this process was stopped and continued.
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: written by the successful `sigtimedwait` above.
        let info = unsafe { info.assume_init() };
        // A code of zero or below means a process; SI_KERNEL and the codes of the terminal are
        // above.
        let from_process = info.si_code <= 0;
        // SAFETY: `si_pid` is plain integers in the union. It has a meaning only if a process sent
        // the signal.
        let sender = unsafe { info.si_pid() };
        let sender = if from_process { sender } else { 0 };
        Ok(Some(Signal { number: info.si_signo, from_process, sender }))
    }

    /// Starts `program` and returns its process id. It gets a signal ([`Program::orphaned`]) if this process is killed.
    ///
    /// Its signal mask and its handling of SIGCHLD are those from before [`Signals::block`], and that of SIGPIPE is the
    /// one that this process has inherited. A standard descriptor that was closed when this process was started is
    /// closed.
    ///
    /// # Errors
    ///
    /// The error of `fork` or `execve`.
    pub fn start(&self, program: &Program<'_>) -> io::Result<i32> {
        let arguments = pointers(program.arguments);
        let environment = pointers(program.environment);
        let (from_child, to_parent) = pipe()?;
        // SAFETY: takes nothing, cannot fail.
        let parent = unsafe { libc::getpid() };
        // SAFETY: CHILD-1: one thread, so the child's copy of the memory is consistent.
        let pid = check(unsafe { libc::fork() })?;
        if pid == 0 {
            self.become_program(parent, program, &arguments, &environment, &to_parent);
        }
        drop(to_parent);
        let mut errno = [0; 4];
        let mut from_child = File::from(from_child);
        // A successful execve closes the pipe; only a failure writes to it.
        match from_child.read_exact(&mut errno) {
            Err(_) => Ok(pid),
            Ok(()) => {
                reap(pid)?;
                Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
            }
        }
    }

    /// The child's path from `fork` to `execve`. Allocates nothing (CHILD-1).
    fn become_program(
        &self,
        parent: i32,
        program: &Program<'_>,
        arguments: &[*const libc::c_char],
        environment: &[*const libc::c_char],
        to_parent: &OwnedFd,
    ) -> ! {
        // SAFETY: plain numbers; signals this process when the parent's only thread ends.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, program.orphaned) };
        // SAFETY: the function has no argument. The parent may have ended before the line above.
        if unsafe { libc::getppid() } != parent {
            // SAFETY: ends this process without the parent's exit handlers.
            unsafe { libc::_exit(DIED_BASE + libc::SIGKILL) };
        }
        for number in libc::STDIN_FILENO..=libc::STDERR_FILENO {
            match program.output {
                Some(output) if number != libc::STDIN_FILENO => {
                    // SAFETY: plain numbers; this process has no code of ours that owns either of them.
                    unsafe { libc::dup2(output.as_raw_fd(), number) };
                }
                // What is there is the Rust runtime's, and the program is to see that nobody reads what it writes.
                _ if inherited::is_closed(number) => {
                    // SAFETY: as above. The pipe to the parent has another number, since this one was taken.
                    unsafe { libc::close(number) };
                }
                _ => {}
            }
        }
        // The Rust runtime ignores SIGPIPE. Most programs expect that it ends them; a service of systemd does not.
        let pipe = if inherited::is_pipe_ignored() { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: sets one of two actions that run no code of ours.
        unsafe { libc::signal(libc::SIGPIPE, pipe) };
        let action = &raw const self.child_action_before;
        // SAFETY: the kernel returned this action for this signal before.
        unsafe { libc::sigaction(libc::SIGCHLD, action, ptr::null_mut()) };
        let mask = &raw const self.before;
        // SAFETY: the kernel returned this mask before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, ptr::null_mut()) };
        // SAFETY: `path` and all strings are zero-terminated and alive, both arrays end with null.
        unsafe { libc::execve(program.path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };

        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO).to_ne_bytes();
        // SAFETY: writes four bytes of our own to an open pipe.
        unsafe { libc::write(to_parent.as_raw_fd(), errno.as_ptr().cast(), errno.len()) };
        // SAFETY: as above.
        unsafe { libc::_exit(127) }
    }
}

/// Pointers to `strings`, followed by a null.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// A pipe that `execve` closes: the end to read, the end to write.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: the kernel has just opened it, and no other code has it.
    let read = unsafe { OwnedFd::from_raw_fd(ends[0]) };
    // SAFETY: as above.
    let write = unsafe { OwnedFd::from_raw_fd(ends[1]) };
    Ok((read, write))
}

/// Sets the action of `signal`; returns the previous one.
fn set_action(signal: i32, handler: libc::sighandler_t) -> io::Result<libc::sigaction> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a `sigaction` is integers and an optional function: zeroes are a valid one.
    let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    action.sa_sigaction = handler;
    // SAFETY: both are valid and ours; `handler` is SIG_DFL, so no code of ours will run.
    check(unsafe { libc::sigaction(signal, &raw const action, before.as_mut_ptr()) })?;
    // SAFETY: zeroes are a valid value, and the kernel wrote over them.
    Ok(unsafe { before.assume_init() })
}

/// Waits for the end of `pid`, whose `execve` failed.
fn reap(pid: i32) -> io::Result<()> {
    // SAFETY: no status is asked for.
    check(unsafe { libc::waitpid(pid, ptr::null_mut(), 0) }).map(drop)
}

/// The next change of state of a child, with the most memory that it (and the children it waited
/// for) had resident by the kernel's count. `None` if no child has changed.
///
/// It reports every child: if this process is the first of a container, orphans become its
/// children.
///
/// # Errors
///
/// `ECHILD` if there is no child left.
pub fn changed() -> io::Result<Option<(i32, Change, u64)>> {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    let options = libc::WNOHANG | libc::WUNTRACED;
    // SAFETY: the kernel writes one status and one `rusage`, which outlive the call.
    let pid = check(unsafe { libc::wait4(-1, &raw mut status, options, usage.as_mut_ptr()) })?;
    if pid == 0 {
        return Ok(None);
    }
    // SAFETY: zeroes are a valid value, and the kernel wrote over them.
    let usage = unsafe { usage.assume_init() };
    let change = if libc::WIFEXITED(status) {
        Change::Exited(libc::WEXITSTATUS(status))
    } else if libc::WIFSTOPPED(status) {
        Change::Stopped(libc::WSTOPSIG(status))
    } else if libc::WCOREDUMP(status) {
        Change::Dumped(libc::WTERMSIG(status))
    } else {
        Change::Died(libc::WTERMSIG(status))
    };
    Ok(Some((pid, change, u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024)))
}

/// Sends `signal` to the process `pid`.
///
/// # Errors
///
/// `ESRCH` if it has ended; `EPERM` if the id now belongs to another user's process.
pub fn send(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Stops this process until it is continued.
pub fn stop_here() {
    // SAFETY: a plain number; SIGSTOP runs no handler.
    let raised = unsafe { libc::raise(libc::SIGSTOP) };
    assert!(raised == 0, "SIGSTOP exists");
}

/// Ends this process by `signal`, as the child ended; without a second core dump.
pub fn die_of(signal: i32) -> ! {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel reads one `rlimit`. A failure leaves a second core file, no more.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
    // SAFETY: plain numbers. If cores are piped to a program, the limit alone has no effect.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    if signal != libc::SIGKILL {
        set_action(signal, libc::SIG_DFL).map(drop).unwrap_or_default();
    }
    // SAFETY: a plain number; the action is the default, so no code of ours runs.
    unsafe { libc::raise(signal) };
    let mut set = signals_taken();
    // SAFETY: the set is valid; from here on the pending signal is delivered.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, &raw mut set) };
    // Signals with the default action do not end the first process of a container.
    std::process::exit(DIED_BASE + signal)
}

#[cfg(test)]
mod tests {
    use super::{Change, Program, Signals, changed};
    use std::ffi::CString;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    fn strings(of: &[&str]) -> Vec<CString> {
        of.iter().map(|s| CString::new(*s).unwrap()).collect()
    }

    /// One test, in a process of its own, because signals and children belong to the process: it
    /// would take the end of another test's child, and has no other thread (CHILD-1).
    #[test]
    fn a_child_starts_and_its_end_is_told() {
        assert!(crate::testing::in_child(|| {
            start_and_wait();
            true
        }));
    }

    fn start_and_wait() {
        let signals = Signals::block().unwrap();
        let missing = Program {
            path: c"/nonexistent/program",
            arguments: &strings(&["program"]),
            environment: &[],
            output: None,
            orphaned: libc::SIGKILL,
        };
        let error = signals.start(&missing).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));

        let arguments = strings(&["sh", "-c", "echo out; echo err >&2; exit $CODE"]);
        let environment = strings(&["CODE=7"]);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let program = Program {
            path: c"/bin/sh",
            arguments: &arguments,
            environment: &environment,
            output: Some(theirs.as_fd()),
            orphaned: libc::SIGTERM,
        };
        let pid = signals.start(&program).unwrap();
        let change = loop {
            if let Some(change) = changed().unwrap() {
                break change;
            }
            std::thread::yield_now();
        };
        assert_eq!((change.0, change.1), (pid, Change::Exited(7)));
        assert!(change.2 > 0, "a process has memory");
        drop(theirs);
        let mut output = String::new();
        ours.read_to_string(&mut output).unwrap();
        assert_eq!(output, "out\nerr\n");
    }
}
