//! Following: which CPU the handler is pinned to.
//!
//! The handler runs on the CPU of the faulting thread; from another, idle CPU each of the two wake-ups of a fault
//! would be an interrupt to a halted core. Only the kernel knows where a thread runs. Asking it takes 8 us, and moving
//! the handler as long again. So the handler remembers of a few threads where they ran, and asks again once in
//! [`FOLLOW_INTERVAL`] faults of each. It moves when more faults come from another CPU than from its own: threads on
//! two CPUs that fault in turns leave it where it is.
//!
//! # Cost
//!
//! 0.1 us a fault, and up to 0.5 us where more threads than [`SEEN_MAX`] fault in turns.

use zfolio_sys::cpu;

use super::Watched;

/// The handler asks for a thread's CPU once in so many of its faults: asking takes 8 us, so 0.1 us a fault.
const FOLLOW_INTERVAL: u64 = 64;

/// With threads that it has not seen lately it asks once in so many faults at most, so 0.5 us a fault.
const ASK_INTERVAL: u64 = 16;

/// Of how many threads the handler remembers where they run.
const SEEN_MAX: usize = 32;

/// How many faults more than from its own CPU must come from others before the handler moves, at most. If threads on
/// two CPUs fault in random turns, it moves once in 200 faults or so.
const LEAD_MAX: u32 = 16;

const _: () = assert!(LEAD_MAX >= 4, "a handler that has just moved stays for some faults");

/// A thread whose faults were served lately.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    thread: u32,
    /// The CPU that the kernel named when it was last asked.
    cpu: Option<usize>,
    /// How many faults of the thread are left until the kernel is asked again.
    faults_left: u64,
    /// The thread's last fault, by `Follow::faults`.
    last: u64,
}

/// What the handler remembers about the threads that it serves: a few of them, so that threads which fault in turns
/// are not taken for one that moves.
#[derive(Debug, Default)]
pub(super) struct Follow {
    seen: [Seen; SEEN_MAX],
    faults: u64,
    /// Not before this fault is the kernel asked again about any thread.
    ask_at: u64,
    /// The CPU that the handler is pinned to.
    cpu: Option<usize>,
    /// How many more faults came from that CPU than from others, `LEAD_MAX` at most. At 0 the handler moves.
    lead: u32,
}

impl Follow {
    /// Counts a fault of `thread`, and pins the calling thread to the CPU from which most faults come, unless it is to
    /// stay unpinned.
    pub(super) fn go(&mut self, thread: u32, watched: &Watched, now_ns: impl FnOnce() -> u64) {
        if watched.roams(now_ns) {
            *self = Follow::default();
        } else if let Some(there) = self.where_to(thread, cpu::of_thread) {
            cpu::pin(there);
        }
    }

    /// Counts a fault of `thread`. Returns the CPU that the handler is to move to; `ask` asks the kernel for a thread's
    /// CPU.
    fn where_to(&mut self, thread: u32, ask: impl FnOnce(u32) -> Option<usize>) -> Option<usize> {
        self.faults += 1;
        let there = self.cpu_of(thread, ask)?;
        if self.cpu == Some(there) {
            self.lead = LEAD_MAX.min(self.lead + 1);
            return None;
        }
        self.lead = self.lead.saturating_sub(1);
        if self.lead > 0 {
            return None;
        }
        (self.cpu, self.lead) = (Some(there), LEAD_MAX / 2);
        self.cpu
    }

    /// Where `thread` ran when the kernel was last asked.
    fn cpu_of(&mut self, thread: u32, ask: impl FnOnce(u32) -> Option<usize>) -> Option<usize> {
        let now = self.faults;
        let known = self.seen.iter().position(|seen| seen.thread == thread && seen.last > 0);
        let oldest = || (0..SEEN_MAX).min_by_key(|index| self.seen[*index].last).unwrap_or(0);
        let seen = &mut self.seen[known.unwrap_or_else(oldest)];
        if known.is_none() {
            *seen = Seen { thread, ..Seen::default() };
        }
        seen.last = now;
        seen.faults_left = seen.faults_left.saturating_sub(1);
        if seen.faults_left == 0 && now >= self.ask_at {
            seen.cpu = ask(thread);
            (seen.faults_left, self.ask_at) = (FOLLOW_INTERVAL, now + ASK_INTERVAL);
        }
        seen.cpu
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::{self, Random};

    use super::{ASK_INTERVAL, FOLLOW_INTERVAL, Follow, LEAD_MAX, SEEN_MAX};

    /// The same rule, on the list of all faults.
    #[derive(Default)]
    struct Model {
        /// The thread of each fault, and its CPU if the kernel was asked then.
        faults: Vec<(u32, Option<usize>)>,
        pinned: Option<(usize, i64)>,
    }

    impl Model {
        /// From where in the list on the handler remembers `thread`: it forgets a thread when as many others as it
        /// can remember have faulted since.
        fn known_from(&self, thread: u32) -> usize {
            let (mut from, mut others) = (self.faults.len(), Vec::new());
            for (at, (other, _)) in self.faults.iter().enumerate().rev() {
                if *other == thread {
                    (from, others) = (at, Vec::new());
                } else if !others.contains(other) {
                    others.push(*other);
                }
                if others.len() == SEEN_MAX {
                    break;
                }
            }
            from
        }

        /// Whether the kernel is asked about a fault of `thread` on `cpu`, and where the handler goes.
        fn fault(&mut self, thread: u32, cpu: usize) -> (bool, Option<usize>) {
            let since = &self.faults[self.known_from(thread)..];
            let own: Vec<_> = since.iter().filter(|fault| fault.0 == thread).collect();
            let since_asked = own.iter().rev().position(|fault| fault.1.is_some());
            let is_due = since_asked.is_none_or(|faults| faults as u64 + 1 >= FOLLOW_INTERVAL);
            let mut lately =
                self.faults.iter().rev().take(usize::try_from(ASK_INTERVAL).unwrap() - 1);
            let asks = is_due && lately.all(|fault| fault.1.is_none());
            let known = own.iter().rev().find_map(|fault| fault.1);
            self.faults.push((thread, asks.then_some(cpu)));
            let Some(there) = (if asks { Some(cpu) } else { known }) else { return (asks, None) };
            let lead = match self.pinned {
                Some((pinned, lead)) if pinned == there => (lead + 1).min(LEAD_MAX.into()),
                Some((_, lead)) => lead - 1,
                None => 0,
            };
            let moves = lead <= 0;
            let pinned = self.pinned.map_or(there, |pinned| pinned.0);
            self.pinned =
                Some(if moves { (there, i64::from(LEAD_MAX) / 2) } else { (pinned, lead) });
            (asks, moves.then_some(there))
        }
    }

    /// Goal: the rule is the model's. Method: random threads, which move now and then; some seeds have more threads
    /// than the handler remembers.
    #[test]
    fn following_agrees_with_the_model() {
        let seed = testing::seed();
        let mut random = Random::new(seed);
        for threads in [1, 2, 3, SEEN_MAX, 3 * SEEN_MAX] {
            let (mut follow, mut model) = (Follow::default(), Model::default());
            let mut cpus = vec![0; threads];
            let mut thread = 0;
            for fault in 0..3000 {
                if random.below(3) == 0 {
                    thread = random.below(threads);
                }
                if random.below(200) == 0 {
                    cpus[thread] = random.below(3);
                }
                let (number, mut asked) = (u32::try_from(thread).unwrap() + 1, false);
                let goes = follow.where_to(number, |wanted| {
                    assert_eq!(wanted, number);
                    asked = true;
                    Some(cpus[thread])
                });
                let expected = model.fault(number, cpus[thread]);
                assert_eq!(
                    (asked, goes),
                    expected,
                    "seed {seed}, {threads} threads, fault {fault}"
                );
            }
        }
    }

    /// How often the kernel is asked and the handler moves for these faults: thread and CPU of each.
    fn count(faults: impl Iterator<Item = (u32, usize)>) -> (u64, u64) {
        let (mut follow, mut asked, mut moved) = (Follow::default(), 0, 0);
        for (thread, cpu) in faults {
            let goes = follow.where_to(thread, |_| {
                asked += 1;
                Some(cpu)
            });
            moved += u64::from(goes.is_some());
        }
        (asked, moved)
    }

    /// Goal: threads that fault in turns neither move the handler nor ask at each fault.
    #[test]
    fn threads_in_turns_leave_the_handler_where_it_is() {
        const FAULTS: u32 = 64_000;
        let turns = |threads: u32| (0..FAULTS).map(move |fault| fault % threads);
        for threads in [2, 4, 8] {
            let (asked, moved) = count(turns(threads).map(|turn| (turn + 1, turn as usize % 2)));
            assert!(asked <= u64::from(FAULTS) / FOLLOW_INTERVAL + u64::from(threads), "{asked}");
            assert_eq!(moved, 1, "{threads} threads");
        }
        // More threads than it remembers.
        let (asked, moved) = count(turns(40).map(|turn| (turn + 1, turn as usize % 2)));
        let most = u64::from(FAULTS) / ASK_INTERVAL;
        assert!(asked <= most && moved <= most / u64::from(LEAD_MAX / 2), "{asked}, {moved}");
    }

    /// Goal: the handler follows a thread that moves, and one that takes over from another.
    #[test]
    fn the_handler_follows_soon() {
        let soon = FOLLOW_INTERVAL + u64::from(LEAD_MAX);
        let mut follow = Follow::default();
        let mut fault = |thread, cpu| follow.where_to(thread, |_| Some(cpu));
        assert_eq!(fault(7, 1), Some(1), "at its first fault");
        assert!((0..1000).all(|_| fault(7, 1).is_none()));
        assert!((0..soon).any(|_| fault(7, 0) == Some(0)));
        assert!((0..1000).all(|_| fault(7, 0).is_none()));
        assert!((0..ASK_INTERVAL + u64::from(LEAD_MAX)).any(|_| fault(8, 1) == Some(1)));
    }

    /// Goal: a thread that has ended, or a kernel that does not answer, moves nothing.
    #[test]
    fn no_answer_moves_nothing() {
        let mut follow = Follow::default();
        assert!((0..200).all(|_| follow.where_to(7, |_| None).is_none()));
        assert!((0..200).any(|_| follow.where_to(7, |_| Some(1)) == Some(1)));
    }
}
