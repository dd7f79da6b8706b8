//! Halt polling: on a machine with two CPUs the background thread stays awake while the program faults.
//!
//! The handler runs on the CPU of the thread that it serves (`handler.rs`). When the background thread sleeps, the
//! other CPU is idle, and the scheduler moves a thread that the handler wakes to an idle CPU. Then each fault wakes
//! two halted CPUs; in a virtual machine that takes as long as all the rest. While the background thread polls, no
//! CPU is idle, and both threads stay where they are. (The kernel polls before it halts a CPU for the same reason:
//! `haltpoll`, which some hosts forbid.)
//!
//! It yields all the time, so that another thread gets the CPU soon. A yield that takes long says that one needed it;
//! then the background thread sleeps as usual for a while.
//!
//! # Cost
//!
//! The CPU time that is left over, while faults are less than [`FAULT_NS`] apart; it counts as the process's. There is
//! no polling with one CPU, which leaves no time over; with more than two, of which the scheduler would find another
//! idle one; and by a real-time thread, which would yield to no ordinary thread.

use std::time::Duration;

/// Polling ends when the program has not faulted for so long.
const FAULT_NS: u64 = 100_000;

/// How often the counts of faults are read. The handler writes them at each fault, and each look takes their cache line
/// from its CPU.
const LOOK_NS: u64 = 10_000;

/// A yield that takes so long: somebody else needed the CPU...
const AWAY_NS: u64 = 200_000;

/// ...and there is no polling for so many times as long.
const PATIENCE: u64 = 50;

/// A longer yield counts as this long: the process may have been stopped for hours.
const AWAY_NS_MAX: u64 = 20_000_000;

/// A yield that takes so long ran another thread.
const YIELD_NS: u64 = 5_000;

/// How many CPUs there must be.
const CPUS: usize = 2;

/// What the background thread keeps between its sleeps.
#[derive(Debug)]
pub(super) struct HaltPoll {
    /// Not before this time, by [`World::now_ns`]; `u64::MAX` is never.
    after_ns: u64,
    /// The faults at the last look.
    faults: u64,
    /// How long the thread waited for a CPU while it polled.
    away_ns: u64,
}

/// What polling looks at.
pub(super) trait World {
    fn now_ns(&self) -> u64;
    /// How many faults were served.
    fn faults(&self) -> u64;
    /// Whether there is work.
    fn rang(&self) -> bool;
    /// Lets other threads run.
    fn pause(&self);
}

impl HaltPoll {
    /// `cpus`: how many there are.
    pub(super) fn new(cpus: usize) -> HaltPoll {
        let after_ns = if cpus == CPUS { 0 } else { u64::MAX };
        HaltPoll { after_ns, faults: 0, away_ns: 0 }
    }

    /// Polls during a pause of `most`. Returns how long the thread is to sleep then; `None`: there is work, or the
    /// pause is over.
    pub(super) fn poll(&mut self, world: &impl World, most: Duration) -> Option<Duration> {
        if self.after_ns == u64::MAX || !self.has_faulted(world) {
            return Some(most);
        }
        let mut now = world.now_ns();
        let end_ns = now.saturating_add(u64::try_from(most.as_nanos()).unwrap_or(u64::MAX));
        let (mut fault_ns, mut looked_ns) = (now, now);
        while now >= self.after_ns && now - fault_ns < FAULT_NS && now < end_ns {
            if world.rang() {
                return None;
            }
            world.pause();
            let then = std::mem::replace(&mut now, world.now_ns());
            let took = now.saturating_sub(then).min(AWAY_NS_MAX);
            if took >= YIELD_NS {
                self.away_ns += took;
            }
            if took >= AWAY_NS {
                self.after_ns = now + PATIENCE * took;
            }
            if now - looked_ns >= LOOK_NS {
                looked_ns = now;
                if self.has_faulted(world) {
                    fault_ns = now;
                }
            }
        }
        let left_ns = end_ns.saturating_sub(now);
        (left_ns > 0).then_some(Duration::from_nanos(left_ns))
    }

    /// Whether a fault was served since the last look.
    fn has_faulted(&mut self, world: &impl World) -> bool {
        let faults = world.faults();
        std::mem::replace(&mut self.faults, faults) != faults
    }

    /// How long the thread waited for a CPU while it polled, since the last call.
    pub(super) fn take_away_ns(&mut self) -> u64 {
        std::mem::take(&mut self.away_ns)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::{AWAY_NS, AWAY_NS_MAX, FAULT_NS, HaltPoll, PATIENCE, World};

    /// A program that faults each 10 us until `last_ns`, and work at `work_ns`. A yield takes `yield_ns`.
    struct Fake {
        now_ns: Cell<u64>,
        last_ns: u64,
        work_ns: u64,
        yield_ns: u64,
    }

    impl World for Fake {
        fn now_ns(&self) -> u64 {
            self.now_ns.get()
        }

        fn faults(&self) -> u64 {
            self.now_ns.get().min(self.last_ns) / 10_000
        }

        fn rang(&self) -> bool {
            self.now_ns.get() >= self.work_ns
        }

        fn pause(&self) {
            self.now_ns.set(self.now_ns.get() + self.yield_ns);
        }
    }

    const PAUSE_NS: u64 = 15 * MS;

    impl Fake {
        /// Polls from `at` on; returns until when, and until when the thread sleeps then.
        fn poll(&self, poll: &mut HaltPoll, at: u64) -> (u64, Option<u64>) {
            self.now_ns.set(at);
            let sleep = poll.poll(self, Duration::from_nanos(PAUSE_NS));
            let now = self.now_ns.get();
            (now, sleep.map(|sleep| now + u64::try_from(sleep.as_nanos()).unwrap()))
        }
    }

    const MS: u64 = 1_000_000;

    fn fake() -> Fake {
        Fake { now_ns: Cell::new(0), last_ns: 5 * MS, work_ns: 20 * MS, yield_ns: 1000 }
    }

    /// Goal: it polls while the program faults and until there is work, and sleeps only for the rest of the pause.
    #[test]
    fn it_polls_while_the_program_faults() {
        let mut poll = HaltPoll::new(2);
        assert_eq!(fake().poll(&mut poll, MS), (5 * MS + FAULT_NS, Some(MS + PAUSE_NS)));
        assert_eq!(fake().poll(&mut poll, 6 * MS), (6 * MS, Some(6 * MS + PAUSE_NS)), "no fault");
        let mut poll = HaltPoll::new(2);
        assert_eq!(Fake { work_ns: 3 * MS, ..fake() }.poll(&mut poll, MS), (3 * MS, None));
        assert_eq!(poll.take_away_ns(), 0);
    }

    /// Goal: the thread takes its turns in time, however long the program faults: it compares the count with the
    /// kernel's, and looks for a new limit.
    #[test]
    fn it_polls_for_a_pause_at_most() {
        let long = Fake { last_ns: 100 * MS, work_ns: 100 * MS, ..fake() };
        assert_eq!(long.poll(&mut HaltPoll::new(2), MS), (MS + PAUSE_NS, None));
    }

    #[test]
    fn it_polls_with_two_cpus_only() {
        for cpus in [0, 1, 3, 4, 96] {
            let polled = fake().poll(&mut HaltPoll::new(cpus), MS);
            assert_eq!(polled, (MS, Some(MS + PAUSE_NS)), "{cpus}");
        }
    }

    /// Goal: after somebody else needed the CPU there is no polling for a while, which has an end.
    #[test]
    fn it_does_not_poll_for_a_while_if_somebody_else_needs_the_cpu() {
        let poll = &mut HaltPoll::new(2);
        let slow = Fake { yield_ns: AWAY_NS, ..fake() };
        assert_eq!(slow.poll(poll, MS), (MS + AWAY_NS, Some(MS + PAUSE_NS)));
        assert_eq!(poll.take_away_ns(), AWAY_NS);
        let after = MS + AWAY_NS + PATIENCE * AWAY_NS;
        let long = Fake { last_ns: u64::MAX, work_ns: u64::MAX, ..fake() };
        assert_eq!(long.poll(poll, 2 * MS), (2 * MS, Some(2 * MS + PAUSE_NS)));
        assert_eq!(long.poll(poll, after - 1), (after - 1, Some(after - 1 + PAUSE_NS)));
        assert_eq!(long.poll(poll, after + 1), (after + 1 + PAUSE_NS, None));

        let hour = 3_600_000 * MS;
        let stopped = Fake { yield_ns: hour, last_ns: u64::MAX, work_ns: u64::MAX, ..fake() };
        let began = after + 100 * MS;
        assert_eq!(stopped.poll(poll, began), (began + hour, None));
        assert_eq!(poll.take_away_ns(), AWAY_NS_MAX, "an hour is no wait for a CPU");
        let after = began + hour + PATIENCE * AWAY_NS_MAX;
        assert_eq!(long.poll(poll, after), (after + PAUSE_NS, None));
    }
}
