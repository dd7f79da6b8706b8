//! Users and groups of threads that the C library does not know of.
//!
//! To the kernel a user and groups belong to a thread. The C library has all its threads change together, by a
//! signal; ours change here: who has changed calls [`lead`], and each thread of ours calls [`follow`] between
//! two pieces of work. So no thread of a process that gave up its rights has them still.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Gid, RawGid};

use super::{ALL, Seat};
use crate::futex;

/// Which change is the latest; 0: there was none.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// What it was: a box, or null.
static WANTED: AtomicPtr<Identity> = AtomicPtr::new(std::ptr::null_mut());
/// Threads that look into it.
static READERS: AtomicU32 = AtomicU32::new(0);
/// Changes whenever somebody has followed.
static FOLLOWED: AtomicU32 = AtomicU32::new(0);

/// A thread's users and groups: real, effective, saved.
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

    /// Has this thread, and no other, assume it.
    fn assume(&self) {
        let others: Vec<RawGid> = self.others.iter().map(|group| group.as_raw()).collect();
        // Twice: to get rights back takes the user first, to give them up takes it last. What is not allowed
        // to this thread was not allowed to the one that leads either.
        for _ in 0..2 {
            let ([user, effective, saved], [group, effective_group, saved_group]) =
                (self.users, self.groups);
            // SAFETY: a list of so many groups.
            unsafe { libc::syscall(libc::SYS_setgroups, others.len(), others.as_ptr()) };
            // SAFETY: numbers only.
            unsafe { libc::syscall(libc::SYS_setresgid, group, effective_group, saved_group) };
            // SAFETY: numbers only.
            unsafe { libc::syscall(libc::SYS_setresuid, user, effective, saved) };
        }
    }
}

/// Has the threads of ours assume the identity of the calling thread. `wake` wakes those that sleep.
///
/// Waits until they have, where there is no way back to root: they must not keep what the program gave up. Who
/// keeps root as its saved user changes to and fro, and need not wait.
///
/// One at a time, and not in a child of `vfork`.
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
        // SAFETY: made above by an earlier call. Who reads from now on finds the new one.
        drop(unsafe { Box::from_raw(before) });
    }
    wake();
    let waits = |seat: &Seat| {
        seat.taken.load(Ordering::Acquire) && seat.turn.load(Ordering::Acquire) < turn
    };
    while for_good && ALL.iter().any(waits) {
        let followed = FOLLOWED.load(Ordering::Acquire);
        if ALL.iter().any(waits) {
            // Some look after themselves now and then, and cannot be woken.
            futex::wait(&FOLLOWED, followed, Some(Duration::from_millis(1)));
            wake();
        }
    }
}

/// A thread of ours, between two pieces of work: assumes the identity of the program, if that has changed. For
/// other threads nothing happens.
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
    // SAFETY: lead() frees what it has replaced when nobody reads.
    if let Some(wanted) = unsafe { WANTED.load(Ordering::SeqCst).as_ref() } {
        wanted.assume();
    }
    READERS.fetch_sub(1, Ordering::SeqCst);
    // A newer change than `turn` may have been assumed: then it is assumed once more.
    seat.turn.store(turn, Ordering::Release);
    FOLLOWED.fetch_add(1, Ordering::Release);
    futex::wake(&FOLLOWED, u32::MAX);
}

/// In a child of `fork`: its threads begin as the one that forked.
pub(super) fn start_over() {
    TURN.store(0, Ordering::Relaxed);
    READERS.store(0, Ordering::Relaxed);
    // Not freed: the thread that led in the parent may have been about to.
    WANTED.store(std::ptr::null_mut(), Ordering::Relaxed);
}
