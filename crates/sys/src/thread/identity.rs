//! Users and groups of threads that the C library does not know.
//!
//! In the kernel each thread has its own user and groups. The C library changes all its threads
//! together, by a signal; the engine's threads are changed here. The thread that has changed its
//! own identity calls [`lead`], and each thread of the engine calls [`follow`] between two pieces
//! of work. So no thread keeps rights that the process gave up.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Gid, RawGid};

use super::{ALL, Seat};
use crate::futex;

/// In place of a user: it stays.
const SAME: u32 = u32::MAX;

/// The number of the latest change; 0: there was none.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// The identity of the latest change: from a box, or null.
static WANTED: AtomicPtr<Identity> = AtomicPtr::new(std::ptr::null_mut());
/// The number of threads that are reading `WANTED`.
static READERS: AtomicU32 = AtomicU32::new(0);
/// Changes whenever a thread has followed.
static FOLLOWED: AtomicU32 = AtomicU32::new(0);

/// The users and groups of a thread: real, effective, saved.
#[derive(PartialEq, Eq, Debug)]
struct Identity {
    users: [u32; 3],
    groups: [u32; 3],
    others: Vec<Gid>,
}

impl Identity {
    fn of_this_thread() -> Identity {
        let (mut users, mut groups) = ([0; 3], [0; 3]);
        let [real, effective, saved] = users.each_mut();
        // SAFETY: three places for numbers.
        unsafe { libc::getresuid(real, effective, saved) };
        let [real, effective, saved] = groups.each_mut();
        // SAFETY: three places for numbers.
        unsafe { libc::getresgid(real, effective, saved) };
        Identity { users, groups, others: rustix::process::getgroups().unwrap_or_default() }
    }

    /// Sets the identity of this thread, and of no other.
    fn assume(&self) {
        let others: Vec<RawGid> = self.others.iter().map(|group| group.as_raw()).collect();
        let ([user, effective, saved], [group, effective_group, saved_group]) =
            (self.users, self.groups);
        // Only an effective root may set any groups. This thread may have followed the program while
        // the program was another user for a moment, so it becomes root again first. If the thread
        // may not do that or what comes next, the leading thread could not either.
        // SAFETY: numbers only.
        unsafe { libc::syscall(libc::SYS_setresuid, SAME, 0, SAME) };
        // SAFETY: a list of so many groups.
        unsafe { libc::syscall(libc::SYS_setgroups, others.len(), others.as_ptr()) };
        // SAFETY: numbers only.
        unsafe { libc::syscall(libc::SYS_setresgid, group, effective_group, saved_group) };
        // The users come last: with them the thread may give up the right to all this.
        // SAFETY: numbers only.
        unsafe { libc::syscall(libc::SYS_setresuid, user, effective, saved) };
    }
}

/// Makes the engine's threads assume the identity of the calling thread. `wake` wakes those that
/// sleep.
///
/// If the process cannot become root again, this waits until all threads have followed: they must
/// not keep the rights that the program gave up. A process that keeps root as its saved user may
/// change often, and does not wait.
///
/// Only one call at a time, and none in a child of `vfork`.
pub fn lead(wake: impl Fn()) {
    if !ALL.iter().any(|seat| seat.taken.load(Ordering::Acquire)) {
        return;
    }
    let wanted = Identity::of_this_thread();
    let for_good = !wanted.users.contains(&0);
    let before = WANTED.swap(Box::into_raw(Box::new(wanted)), Ordering::SeqCst);
    let turn = TURN.fetch_add(1, Ordering::SeqCst) + 1;
    while READERS.load(Ordering::SeqCst) != 0 {
        futex::wait(&READERS, 1, Some(Duration::from_millis(1)));
    }
    if !before.is_null() {
        // SAFETY: an earlier call made the box. A thread that reads from now on finds the new one.
        drop(unsafe { Box::from_raw(before) });
    }
    wake();
    let waits = |seat: &Seat| {
        seat.taken.load(Ordering::Acquire) && seat.turn.load(Ordering::Acquire) < turn
    };
    while for_good && ALL.iter().any(waits) {
        let followed = FOLLOWED.load(Ordering::Acquire);
        if ALL.iter().any(waits) {
            // Some threads check by themselves now and then, and cannot be woken.
            futex::wait(&FOLLOWED, followed, Some(Duration::from_millis(1)));
            wake();
        }
    }
}

/// Called by a thread of the engine between two pieces of work: assumes the identity of the program
/// if that has changed. In other threads it does nothing.
pub fn follow() {
    let turn = TURN.load(Ordering::Acquire);
    if turn == 0 {
        return;
    }
    let own = super::pointer();
    let mine = |seat: &&Seat| seat.pointer.load(Ordering::Relaxed) == own;
    let Some(seat) = ALL.iter().find(mine) else { return };
    if seat.turn.load(Ordering::Relaxed) >= turn {
        return;
    }
    READERS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: lead() frees the replaced box only when no thread reads.
    if let Some(wanted) = unsafe { WANTED.load(Ordering::SeqCst).as_ref() } {
        wanted.assume();
    }
    READERS.fetch_sub(1, Ordering::SeqCst);
    // A newer change than `turn` may have been assumed; it is then assumed once more.
    seat.turn.store(turn, Ordering::Release);
    FOLLOWED.fetch_add(1, Ordering::Release);
    futex::wake(&FOLLOWED, u32::MAX);
}

/// In a child of `fork`: its threads start with the identity of the thread that forked.
pub(super) fn start_over() {
    TURN.store(0, Ordering::Relaxed);
    READERS.store(0, Ordering::Relaxed);
    // Not freed: the leading thread in the parent may have been about to free it.
    WANTED.store(std::ptr::null_mut(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::Identity;

    /// Sets the users and groups of this thread alone.
    fn become_now(users: [u32; 3], groups: [u32; 3]) {
        // SAFETY: numbers only.
        let answer = unsafe { libc::syscall(libc::SYS_setresgid, groups[0], groups[1], groups[2]) };
        assert_eq!(answer, 0);
        // SAFETY: numbers only.
        let answer = unsafe { libc::syscall(libc::SYS_setresuid, users[0], users[1], users[2]) };
        assert_eq!(answer, 0);
    }

    /// Goal: a thread that followed the program while it was another user for a moment still follows
    /// it in every later change. Method: threads that have each of some users and groups, real,
    /// effective and saved, assume each of the others that the program could.
    #[test]
    fn a_thread_follows_from_any_identity() {
        // SAFETY: no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            return eprintln!("SKIPPED: root is needed to change identities");
        }
        let users = [[0, 0, 0], [0, 7, 0], [7, 0, 0], [7, 7, 0], [7, 7, 7], [0, 0, 7]];
        let groups = [[0, 0, 0], [0, 1, 0], [1, 1, 1], [7, 7, 7], [2, 0, 1]];
        let pairs =
            users.iter().flat_map(|users| groups.iter().map(move |groups| (*users, *groups)));
        // A thread that cannot become root again could not go on to all of these.
        for (had, at) in pairs.clone().filter(|(users, _)| users.contains(&0)) {
            for (users, groups) in pairs.clone() {
                let assumed = std::thread::spawn(move || {
                    become_now(had, at);
                    Identity { users, groups, others: Vec::new() }.assume();
                    Identity::of_this_thread()
                });
                let wanted = Identity { users, groups, others: Vec::new() };
                assert_eq!(assumed.join().unwrap(), wanted, "from {had:?} {at:?}");
            }
        }
    }
}
