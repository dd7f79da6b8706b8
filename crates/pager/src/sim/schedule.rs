//! Threads that run one at a time; a seed decides which one runs.
//!
//! A simulated thread is a thread of the system that holds the **baton** while it runs. At each
//! **point** (before a lock, in a call of the simulated kernel, between two steps of the program)
//! the generator may hand the baton to another thread. So each run from the same seed is the same.
//!
//! Two kinds of scheduling are mixed: long stretches in which a thread runs on for a while, and
//! short stretches with a switch at every second point. Now and then a thread is **frozen** for
//! many points while the others go on, as if the system had taken its CPU away.
//!
//! # Invariants
//!
//! - `SCHED-1` One thread runs: the one whose number is `current`. Only this thread changes
//!   anything.
//! - `SCHED-2` A waiting thread goes on when it is woken, or when its simulated time has come. If
//!   no thread can go on, or the program makes no progress for [`POINTS_MAX`] points, the run has
//!   failed.

#![allow(
    clippy::disallowed_types,
    reason = "the lock of the scheduler itself is none of the engine's locks"
)]

use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use super::random::{Random, mixed};

/// After so many points without progress of the program the run has failed.
const POINTS_MAX: u64 = 2_000_000;

/// Waits of a millisecond for a disk that fails, and reads that have failed: more than in ten seconds of several
/// threads.
const DISK_WAITS_MAX: u32 = 30_000;

/// A stretch with a switch at every second point has so many points, and begins once in [`FINE_IN`]
/// points.
const FINE_POINTS: u64 = 60;
const FINE_IN: usize = 1500;

/// The most points for which a thread is frozen.
const FREEZE_MAX: usize = 3000;

thread_local! {
    static SEAT: RefCell<Option<(Arc<Schedule>, usize)>> = const { RefCell::new(None) };
}

/// The panic payload of a thread that ends because another thread has made the run fail.
struct Ended;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Life {
    Ready,
    /// What the thread waits for, and until when at the latest.
    Waits(String, Option<u64>),
    Done,
}

#[derive(Debug)]
struct Seat {
    name: String,
    life: Life,
    /// The thread does not run until this point.
    frozen_until: u64,
}

#[derive(Debug)]
struct State {
    random: Random,
    seats: Vec<Seat>,
    /// One of so many points switches threads.
    switch_in: usize,
    /// Until this point every second point switches threads.
    fine_until: u64,
    /// One of so many switches freezes the thread.
    freeze_in: usize,
    now_ns: u64,
    points: u64,
    progress: u64,
    disk_waits: u32,
    hash: u64,
    failure: Option<String>,
    /// Every thread prints its backtrace when it ends.
    describe: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Schedule {
    state: Mutex<State>,
    current: AtomicUsize,
    handles: Vec<OnceLock<Thread>>,
    trace: bool,
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Trace {
    /// A hash of all decisions and of everything noted.
    pub(super) hash: u64,
    pub(super) points: u64,
}

/// A thread's name and the function that it runs.
pub(super) type Body<'a> = (String, Box<dyn FnOnce() + Send + 'a>);

impl Schedule {
    /// A schedule for `threads` threads, not yet begun.
    pub(super) fn new(seed: u64, threads: usize, trace: bool) -> Arc<Schedule> {
        let mut random = Random::new(seed, 0);
        let state = State {
            switch_in: random.of(&[10, 30, 100, 300]),
            fine_until: 0,
            freeze_in: random.of(&[0, 30, 200]),
            random,
            seats: Vec::new(),
            now_ns: 1_000_000,
            points: 0,
            progress: 0,
            disk_waits: 0,
            hash: seed,
            failure: None,
            describe: false,
        };
        Arc::new(Schedule {
            state: Mutex::new(state),
            current: AtomicUsize::new(usize::MAX),
            handles: (0..threads).map(|_| OnceLock::new()).collect(),
            trace,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs all these threads to their end, one at a time.
    ///
    /// # Errors
    ///
    /// The message of the first thread that failed.
    pub(super) fn run(self: &Arc<Self>, bodies: Vec<Body<'_>>) -> Result<Trace, String> {
        assert_eq!(bodies.len(), self.handles.len());
        let seat =
            |(name, _): &Body<'_>| Seat { name: name.clone(), life: Life::Ready, frozen_until: 0 };
        self.lock().seats = bodies.iter().map(seat).collect();
        std::thread::scope(|scope| {
            for (me, (name, body)) in bodies.into_iter().enumerate() {
                let named = std::thread::Builder::new().name(name);
                let thread = named.spawn_scoped(scope, move || self.live(me, body));
                let thread = thread.expect("the system has a thread").thread().clone();
                self.handles[me].set(thread).expect("set once");
            }
            let first = self.lock().choose();
            self.give(first.expect("all are ready"));
        });
        let state = self.lock();
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(Trace { hash: state.hash, points: state.points }),
        }
    }

    fn live(self: &Arc<Self>, me: usize, body: Box<dyn FnOnce() + Send + '_>) {
        SEAT.set(Some((Arc::clone(self), me)));
        zfolio_core::sync::schedule::set(Some(point));
        self.await_baton(me);
        let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            self.end_if_failed(me);
            body();
        }));
        zfolio_core::sync::schedule::set(None);
        SEAT.set(None);
        let mut state = self.lock();
        if let Err(payload) = answer {
            if !payload.is::<Ended>() {
                let text = payload.downcast_ref::<String>().cloned();
                let text = text.or(payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                let text = text.unwrap_or_default();
                let why = format!("{} panicked: {text}", state.seats[me].name);
                state.fail(why, false);
            }
        }
        state.seats[me].life = Life::Done;
        let next = state.choose();
        drop(state);
        if let Some(next) = next {
            self.give(next);
        }
    }

    fn await_baton(&self, me: usize) {
        // Acquire: pairs with the Release in give(): this thread sees what the previous one did
        // (SCHED-1).
        while self.current.load(Ordering::Acquire) != me {
            std::thread::park();
        }
    }

    fn give(&self, next: usize) {
        // Release: pairs with the Acquire in await_baton().
        self.current.store(next, Ordering::Release);
        self.handles[next].get().expect("every thread was started").unpark();
    }

    /// Ends the calling thread if the run has failed.
    fn end_if_failed(&self, me: usize) {
        let state = self.lock();
        if state.failure.is_none() {
            return;
        }
        if state.describe {
            let seat = &state.seats[me];
            let trace = Backtrace::force_capture().to_string();
            let ours = trace
                .lines()
                .filter(|line| line.contains("zfolio") && !line.contains("sim::schedule"));
            let ours: Vec<&str> = ours.take(14).collect();
            eprintln!("{} is here:\n{}", seat.name, ours.join("\n"));
        }
        drop(state);
        std::panic::resume_unwind(Box::new(Ended));
    }

    /// Hands the baton to `next`, and waits until it comes back.
    fn pass(&self, me: usize, next: Option<usize>) {
        if let Some(next) = next.filter(|next| *next != me) {
            self.give(next);
            self.await_baton(me);
        }
        self.end_if_failed(me);
    }

    fn step(&self, me: usize) {
        if std::thread::panicking() {
            return;
        }
        let mut state = self.lock();
        state.points += 1;
        state.now_ns += 50 + state.random.below(400) as u64;
        if state.points - state.progress > POINTS_MAX {
            state.fail("no progress for a long time: threads wait for each other".into(), true);
        }
        if state.random.one_in(FINE_IN) {
            state.fine_until = state.points + FINE_POINTS;
        }
        let fine = state.points < state.fine_until;
        let switch_in = if fine { 2 } else { state.switch_in };
        if state.failure.is_none() && !state.random.one_in(switch_in) {
            return;
        }
        let freeze_in = state.freeze_in;
        if state.random.one_in(freeze_in) {
            state.seats[me].frozen_until = state.points + state.random.below(FREEZE_MAX) as u64;
        }
        let next = state.choose();
        drop(state);
        self.pass(me, next);
    }

    /// Freezes the calling thread for a random number of points.
    fn freeze(&self, me: usize) {
        let mut state = self.lock();
        let most = state.random.of(&[FREEZE_MAX / 100, FREEZE_MAX / 10, FREEZE_MAX]);
        let points = state.random.below(most) as u64;
        state.points += 1;
        state.seats[me].frozen_until = state.points + points;
        let next = state.choose();
        drop(state);
        self.pass(me, next);
    }

    /// Waits until [`Schedule::wake`], or for some time at most.
    fn wait(&self, me: usize, what: String, until: Option<u64>) {
        let mut state = self.lock();
        state.points += 1;
        state.seats[me].life = Life::Waits(what, until);
        let next = state.choose();
        drop(state);
        self.pass(me, next);
    }

    /// Lets a thread that waits go on.
    pub(super) fn wake(&self, thread: usize) {
        let mut state = self.lock();
        if matches!(state.seats[thread].life, Life::Waits(..)) {
            state.seats[thread].life = Life::Ready;
        }
    }

    /// Notes that the program has made progress.
    pub(super) fn progress(&self) {
        let mut state = self.lock();
        state.progress = state.points;
    }

    /// A read has failed, or somebody waits until it is tried again, or while the disk stalls: that is progress too,
    /// but not for ever. In ten seconds other threads may reach many points, above all those that spin on a lock and
    /// never look at the clock.
    pub(super) fn waits_for_disk(&self) {
        let mut state = self.lock();
        if state.disk_waits < DISK_WAITS_MAX {
            state.disk_waits += 1;
            state.progress = state.points;
        }
    }

    /// The simulated time. Each call advances it, now and then by a lot.
    pub(super) fn now_ns(&self) -> u64 {
        let mut state = self.lock();
        let step = match state.random.below(4000) {
            0 => 300_000_000,
            1..40 => 5_000_000,
            _ => 1000,
        };
        state.now_ns += 1 + state.random.below(step) as u64;
        state.now_ns
    }

    /// Adds an event to the hash of the run, and prints it if a trace is wanted.
    pub(super) fn note(&self, what: &str, numbers: [u64; 3]) {
        let mut state = self.lock();
        let words = [what.len() as u64, numbers[0], numbers[1], numbers[2]];
        state.hash = words.iter().fold(state.hash, |hash, word| mixed(hash ^ word));
        if self.trace {
            let me = SEAT.with_borrow(|seat| seat.as_ref().map(|seat| seat.1));
            let name = me.map_or("setup", |me| &state.seats[me].name);
            let [first, second, third] = numbers;
            eprintln!("{:8} {name}: {what} {first:#x} {second:#x} {third:#x}", state.points);
        }
    }
}

impl State {
    /// Chooses the thread that goes on. `None`: no thread is left.
    fn choose(&mut self) -> Option<usize> {
        let now = self.now_ns;
        for seat in &mut self.seats {
            if matches!(seat.life, Life::Waits(_, Some(until)) if until <= now) {
                seat.life = Life::Ready;
            }
        }
        let ready = |state: &State, frozen: bool| -> Vec<usize> {
            let all = state.seats.iter().enumerate();
            let thawed = |seat: &Seat| frozen || seat.frozen_until <= state.points;
            all.filter(|(_, seat)| seat.life == Life::Ready && thawed(seat))
                .map(|(at, _)| at)
                .collect()
        };
        let mut able = ready(self, false);
        if able.is_empty() {
            able = ready(self, true);
        }
        if able.is_empty() {
            able = self.pass_time();
        }
        if able.is_empty() && self.seats.iter().any(|seat| seat.life != Life::Done) {
            self.fail("nobody can go on".into(), true);
            able = ready(self, true);
        }
        let next = able.get(self.random.below(able.len().max(1))).copied();
        self.hash = mixed(self.hash ^ next.unwrap_or(usize::MAX) as u64 ^ self.points);
        next
    }

    /// No thread is ready: advances the time to the first moment that a thread waits for.
    fn pass_time(&mut self) -> Vec<usize> {
        let until = |seat: &Seat| match seat.life {
            Life::Waits(_, until) => until,
            _ => None,
        };
        let Some(first) = self.seats.iter().filter_map(until).min() else { return Vec::new() };
        self.now_ns = self.now_ns.max(first);
        let due = |(_, seat): &(usize, &mut Seat)| until(seat).is_some_and(|until| until <= first);
        let due = self.seats.iter_mut().enumerate().filter(due);
        due.map(|(at, seat)| {
            seat.life = Life::Ready;
            at
        })
        .collect()
    }

    /// The run has failed: all threads end.
    fn fail(&mut self, why: String, describe: bool) {
        if self.failure.is_some() {
            return;
        }
        let waits = |seat: &Seat| match &seat.life {
            Life::Waits(what, _) => format!("; {} waits for {what}", seat.name),
            Life::Ready => format!("; {} could go on", seat.name),
            Life::Done => String::new(),
        };
        let all: String =
            if describe { self.seats.iter().map(waits).collect() } else { String::new() };
        self.failure = Some(format!("{why}{all} (at point {})", self.points));
        self.describe = describe;
        for seat in &mut self.seats {
            if seat.life != Life::Done {
                (seat.life, seat.frozen_until) = (Life::Ready, 0);
            }
        }
    }
}

/// Calls `act` with the schedule of the calling thread and its number, if it is a simulated one.
fn with_seat<R>(act: impl FnOnce(&Schedule, usize) -> R) -> Option<R> {
    let seat = SEAT.with_borrow(Clone::clone);
    seat.map(|(schedule, me)| act(&schedule, me))
}

/// A point: another thread may run here.
pub(super) fn point() {
    with_seat(Schedule::step);
}

/// The calling thread goes on after many points of the others, if any of them can go on.
pub(super) fn freeze() {
    with_seat(Schedule::freeze);
}

/// Begins a stretch with a switch at every second point: what the calling thread is about to do has few points.
pub(super) fn mix() {
    with_seat(|schedule, _| {
        let mut state = schedule.lock();
        state.fine_until = state.points + FINE_POINTS;
    });
}

/// Calls `turn` until `is_over`, with a wait for some random time behind each turn.
pub(super) fn take_turns(
    mut random: Random,
    is_over: impl Fn() -> bool,
    mut turn: impl FnMut(&mut Random),
) {
    while !is_over() {
        turn(&mut random);
        let pause = random.of(&[20_000, 200_000, 5_000_000]);
        wait("its turn".to_owned(), Some(random.below(pause) as u64));
    }
}

/// The calling thread goes on once all others wait (or after a second of simulated time).
pub(super) fn let_others_run() {
    wait("all others to wait".to_owned(), Some(1_000_000_000));
}

/// The number of the calling thread; 0 outside of a run.
pub(super) fn me() -> usize {
    with_seat(|_, me| me).unwrap_or(0)
}

/// Waits for [`Schedule::wake`], or for `at_most_ns` at most.
pub(super) fn wait(what: String, at_most_ns: Option<u64>) {
    with_seat(|schedule, me| {
        let until = at_most_ns.map(|time| schedule.lock().now_ns + time);
        schedule.wait(me, what, until);
    })
    .expect("only threads of the simulation wait");
}
