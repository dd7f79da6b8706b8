//! Users and groups: the engine's threads change theirs when the program changes its own.
//!
//! In the kernel each thread has its own user and groups. The C library changes those of all threads that
//! it knows, and it does not know the engine's. A program that gives up root must not keep four threads
//! with root's rights.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{gid_t, uid_t};
use zfolio_sys::{process, thread};

use crate::interpose::{interpose, next};
use crate::{candidates, fork, mapping_proxy};

/// The process that the engine's threads belong to.
static OWN: AtomicU32 = AtomicU32::new(0);

/// Notes the process: when the library is loaded, and in a child of `fork`.
pub(crate) fn start_over() {
    OWN.store(process::id(), Relaxed);
}

/// Whether this is the process that the engine's threads belong to or will belong to, and not a child of `vfork`,
/// which shares its memory.
pub(crate) fn is_own_process() -> bool {
    process::id() == OWN.load(Relaxed)
}

/// After a call that may have changed this thread's user or groups: the engine's threads change theirs.
fn follow(answer: c_int) -> c_int {
    // A child of `vfork` changes its own process, not ours.
    if answer == 0 && is_own_process() {
        fork::while_nobody_forks(|| {
            thread::lead(|| {
                mapping_proxy::ring();
                if let Some(engine) = candidates::made() {
                    engine.wake_all();
                }
            });
        });
    }
    answer
}

/// Makes the C library's call, and then changes the engine's threads.
macro_rules! change {
    ($name:ident, $($word:expr),+) => {{
        let next = next!($name);
        // SAFETY: the program's own call, with its own arguments.
        follow(unsafe { next($($word),+) })
    }};
}

interpose! {
    /// `setuid(2)`.
    fn setuid(user: uid_t) -> c_int { change!(setuid, user) }

    /// `seteuid(3)`.
    fn seteuid(user: uid_t) -> c_int { change!(seteuid, user) }

    /// `setreuid(2)`.
    fn setreuid(user: uid_t, effective: uid_t) -> c_int {
        change!(setreuid, user, effective)
    }

    /// `setresuid(2)`.
    fn setresuid(user: uid_t, effective: uid_t, saved: uid_t) -> c_int {
        change!(setresuid, user, effective, saved)
    }

    /// `setgid(2)`.
    fn setgid(group: gid_t) -> c_int { change!(setgid, group) }

    /// `setegid(3)`.
    fn setegid(group: gid_t) -> c_int { change!(setegid, group) }

    /// `setregid(2)`.
    fn setregid(group: gid_t, effective: gid_t) -> c_int {
        change!(setregid, group, effective)
    }

    /// `setresgid(2)`.
    fn setresgid(group: gid_t, effective: gid_t, saved: gid_t) -> c_int {
        change!(setresgid, group, effective, saved)
    }

    /// `setgroups(2)`.
    fn setgroups(count: usize, groups: *const gid_t) -> c_int {
        change!(setgroups, count, groups)
    }

    /// `initgroups(3)`: the C library's does not call our `setgroups`.
    fn initgroups(user: *const c_char, group: gid_t) -> c_int {
        change!(initgroups, user, group)
    }
}
