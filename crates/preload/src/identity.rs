//! Users and groups: the engine's threads change along with the program's.
//!
//! To the kernel they belong to a thread. The C library changes all threads that it knows, and it does
//! not know ours. A program that gives up root must not keep four threads that have it.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{gid_t, uid_t};
use zfolio_sys::{process, thread};

use crate::allocator::{interpose, next};
use crate::{fork, keeper, native};

/// The process whose threads ours are.
static OWN: AtomicU32 = AtomicU32::new(0);

/// When the library is loaded, and in a child of `fork`.
pub(crate) fn start_over() {
    OWN.store(process::id(), Relaxed);
}

/// After a call that may have changed this thread's users or groups.
fn follow(answer: c_int) -> c_int {
    // A child of `vfork` has our memory, but it is not our process that changes.
    if answer == 0 && process::id() == OWN.load(Relaxed) {
        fork::while_nobody_forks(|| {
            thread::lead(|| {
                keeper::ring();
                if let Some(engine) = native::made() {
                    engine.wake_all();
                }
            });
        });
    }
    answer
}

/// Makes the C library's call, and has the engine's threads follow.
macro_rules! change {
    ($name:literal, ($($type:ty),+), $($word:expr),+) => {{
        type Call = unsafe extern "C" fn($($type),+) -> c_int;
        let next = next!($name as Call);
        // SAFETY: the program's own call, with its own arguments.
        follow(unsafe { next($($word),+) })
    }};
}

interpose! {
    /// `setuid(2)`.
    fn setuid(user: uid_t) -> c_int { change!(c"setuid", (uid_t), user) }

    /// `seteuid(3)`.
    fn seteuid(user: uid_t) -> c_int { change!(c"seteuid", (uid_t), user) }

    /// `setreuid(2)`.
    fn setreuid(user: uid_t, effective: uid_t) -> c_int {
        change!(c"setreuid", (uid_t, uid_t), user, effective)
    }

    /// `setresuid(2)`.
    fn setresuid(user: uid_t, effective: uid_t, saved: uid_t) -> c_int {
        change!(c"setresuid", (uid_t, uid_t, uid_t), user, effective, saved)
    }

    /// `setgid(2)`.
    fn setgid(group: gid_t) -> c_int { change!(c"setgid", (gid_t), group) }

    /// `setegid(3)`.
    fn setegid(group: gid_t) -> c_int { change!(c"setegid", (gid_t), group) }

    /// `setregid(2)`.
    fn setregid(group: gid_t, effective: gid_t) -> c_int {
        change!(c"setregid", (gid_t, gid_t), group, effective)
    }

    /// `setresgid(2)`.
    fn setresgid(group: gid_t, effective: gid_t, saved: gid_t) -> c_int {
        change!(c"setresgid", (gid_t, gid_t, gid_t), group, effective, saved)
    }

    /// `setgroups(2)`.
    fn setgroups(count: usize, groups: *const gid_t) -> c_int {
        change!(c"setgroups", (usize, *const c_void), count, groups.cast())
    }

    /// `initgroups(3)`, which does not call our `setgroups`.
    fn initgroups(user: *const c_char, group: gid_t) -> c_int {
        change!(c"initgroups", (*const c_char, gid_t), user, group)
    }
}
