//! Cores that compress on devices: a discrete-event simulation.
//!
//! The choice of queues is the driver's own code: each core asks [`Driver::seat`] for a place in a queue, a vanished
//! device is [`Driver::remove`]d, and [`Tries`] says when a job is given up. Time is modelled:
//!
//! ```text
//! core: [submit_ns] try -> seat -> device: port_ns each, in order -> record, latency_ns after its start
//!                     `-> full: every other waiting job is tried, try_ns each; given up -> software_ns
//! ```
//!
//! # What is written again here
//!
//! A stream of the driver works on memory and polls records; here both are events. So this is the simulation's own:
//!
//! - A folio goes to devices by batches of 8 pages, the next one when all pages of the last one have ended.
//! - A core submits all pages of a batch, and then polls. The driver tries each waiting job once in each round of
//!   polls; here they take turns, one at each try.
//! - A record is seen at once: there are no timeouts, no `umwait`, and no lost slots. Who has jobs at a device that
//!   vanishes knows at once.
//! - A job without a place ends in software; a compression is never refused.
//! - Pages are equal, and none fails: no page faults, no verification, and no order by size when decompressing.
//! - The entries of a device are divided evenly over its queues, as `zfolio iaa setup` does.
//!
//! # Invariants
//!
//! - `SIM-1` Every job ends once: by its record, or by software.
//! - `SIM-2` No queue has more jobs than its depth.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use zfolio_core::testing::Random;
use zfolio_iaa::queues::Direction;
use zfolio_iaa::seat::{Seat, Tries};
use zfolio_iaa::{Driver, Settings, WorkQueue, portal::Nowhere};

/// What things cost, in nanoseconds. The first three are fitted, the others assumed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants {
    /// A core submits one page.
    pub(super) submit_ns: u64,
    /// A device begins pages at least so far apart.
    pub(super) port_ns: u64,
    /// From the beginning of a page at the device to its record as seen by the core.
    pub(super) latency_ns: u64,
    /// Pages begin at least so far apart on all devices together: the memory's bandwidth.
    pub(super) memory_ns: u64,
    /// One try for a place in vain.
    pub(super) try_ns: u64,
    /// Software compresses a page.
    pub(super) software_ns: u64,
}

/// Fitted, in this order, to 3503 = submit + latency, 8 x 1356 = submit + 7 port + latency, and
/// 8 x 706 = 8 submit + latency (with four devices the port is not what jobs wait for).
/// Assumed: 6 KB of memory traffic a page at 250 GB/s; a try of a pause and an atomic addition; 4 KiB by software
/// deflate.
pub(super) const CONSTANTS: Constants = Constants {
    submit_ns: 306,
    port_ns: 1049,
    latency_ns: 3197,
    memory_ns: 24,
    try_ns: 100,
    software_ns: 20_000,
};

/// Engines of a device: each works on one page at a time.
pub(super) const ENGINES: usize = 8;

/// What is simulated.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) devices: usize,
    /// Of each device.
    pub(super) queues: usize,
    /// Entries of a device, divided evenly over its queues.
    pub(super) entries: u32,
    /// Cores that work, and all of the package, which the table divides over the devices.
    pub(super) busy_cores: usize,
    pub(super) cores: usize,
    /// The working cores have the first numbers of the package; otherwise they are spread evenly over it.
    pub(super) consecutive: bool,
    pub(super) settings: Settings,
    pub(super) folio_pages: usize,
    pub(super) batch: usize,
    /// Work of a core between two folios.
    pub(super) work_ns: u64,
    /// Up to so many percent more of work before each folio, by chance: cores do not stay in step.
    pub(super) jitter_percent: u64,
    /// Of 100 folios so many are decompressed instead.
    pub(super) decompress_percent: u64,
    /// For each core.
    pub(super) folios: usize,
    /// At these times a device goes, the first one first.
    pub(super) vanish_ns: Vec<u64>,
    pub(super) seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Nanoseconds per page of each folio, sorted.
    pub(super) page_ns: Vec<u64>,
    pub(super) begun: u64,
    pub(super) by_device: u64,
    pub(super) by_software: u64,
    /// Tries in vain, and jobs given up after too many of them.
    pub(super) retries: u64,
    pub(super) given_up: u64,
    /// When the last core had done its work.
    pub(super) end_ns: u64,
    /// When each core had.
    pub(super) core_end_ns: Vec<u64>,
    /// The most jobs in a queue.
    pub(super) depth_most: u32,
}

impl Outcome {
    /// A percentile of the time per page.
    pub(super) fn percentile(&self, percent: usize) -> u64 {
        self.page_ns[(self.page_ns.len() - 1) * percent / 100]
    }
}

#[derive(Debug)]
enum State {
    Waiting { tries: Tries },
    AtDevice { seat: Seat, is_answered: bool },
    Ended,
}

#[derive(Debug)]
struct Core {
    batch: Vec<State>,
    /// Jobs of the batch that were not begun yet.
    to_begin: usize,
    pages_left: usize,
    folios_left: usize,
    folio_began: u64,
    direction: Direction,
    /// Which waiting job is tried next.
    turn: usize,
    /// It has nothing to do until a record comes.
    sleeps: bool,
    /// Distinguishes batches: records of an earlier one are ignored.
    generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Vanish,
    Record { core: usize, job: usize, generation: u64 },
    Step { core: usize },
}

#[derive(Debug)]
struct Device {
    port_free: u64,
    engines: [u64; ENGINES],
    is_gone: bool,
}

struct Simulation<'a> {
    machine: &'a Machine,
    constants: Constants,
    driver: Driver,
    devices: Vec<Device>,
    in_queue: Vec<u32>,
    cores: Vec<Core>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    memory_free: u64,
    gone: usize,
    random: Random,
    outcome: Outcome,
}

/// Runs a machine until every core has done its folios.
pub(super) fn simulate(machine: &Machine, constants: Constants) -> Outcome {
    let driver = Driver::new(machine.settings, vec![0; machine.cores]);
    let depth = machine.depth();
    let queues = (0..machine.devices * machine.queues).map(|index| WorkQueue {
        name: format!("wq{}.{}", index / machine.queues, index % machine.queues),
        device: index / machine.queues,
        package: 0,
        depth,
        portal: Box::new(Nowhere),
    });
    driver.add(queues).expect("the arguments allow 64 queues at most");
    let device = |_| Device { port_free: 0, engines: [0; ENGINES], is_gone: false };
    let core = |_| Core {
        batch: Vec::new(),
        to_begin: 0,
        pages_left: 0,
        folios_left: machine.folios,
        folio_began: 0,
        direction: Direction::Compress,
        turn: 0,
        sleeps: false,
        generation: 0,
    };
    let mut simulation = Simulation {
        machine,
        constants,
        driver,
        devices: (0..machine.devices).map(device).collect(),
        in_queue: vec![0; machine.devices * machine.queues],
        cores: (0..machine.busy_cores).map(core).collect(),
        events: BinaryHeap::new(),
        sequence: 0,
        memory_free: 0,
        gone: 0,
        random: Random::new(machine.seed),
        outcome: Outcome { core_end_ns: vec![0; machine.busy_cores], ..Outcome::default() },
    };
    simulation.run();
    assert_eq!(simulation.driver.seats_taken(), 0, "SIM-1");
    simulation.outcome.page_ns.sort_unstable();
    simulation.outcome
}

impl Machine {
    /// Entries of each queue.
    pub(super) fn depth(&self) -> u32 {
        (self.entries / u32::try_from(self.queues).unwrap_or(u32::MAX)).max(1)
    }

    /// The number of the CPU of a working core.
    fn cpu(&self, core: usize) -> usize {
        if self.consecutive { core } else { core * self.cores / self.busy_cores }
    }
}

impl Simulation<'_> {
    fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    fn run(&mut self) {
        for core in 0..self.cores.len() {
            let began = self.random.below_u64(self.machine.work_ns + 10_000);
            self.at(began, Event::Step { core });
        }
        for time in self.machine.vanish_ns.clone() {
            self.at(time, Event::Vanish);
        }
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Step { core } => self.step(core, now),
                Event::Record { core, job, generation } => self.record(core, job, generation, now),
                Event::Vanish => self.vanish(now),
            }
        }
    }

    /// One action of a core: a page begun, a try, or a look at its records.
    fn step(&mut self, core: usize, now: u64) {
        self.cores[core].sleeps = false;
        if self.cores[core].to_begin > 0 {
            self.cores[core].to_begin -= 1;
            self.cores[core].batch.push(State::Waiting { tries: Tries::default() });
            self.outcome.begun += 1;
            let job = self.cores[core].batch.len() - 1;
            let cost = self.attempt(core, job, now);
            let more = self.cores[core].to_begin > 0;
            let next = now + cost + if more { self.constants.submit_ns } else { 0 };
            return self.at(next, Event::Step { core });
        }
        self.collect(core);
        let states = &self.cores[core].batch;
        let waiting: Vec<usize> =
            (0..states.len()).filter(|job| matches!(states[*job], State::Waiting { .. })).collect();
        if !waiting.is_empty() {
            let turn = self.cores[core].turn;
            self.cores[core].turn = turn.wrapping_add(1);
            let cost = self.attempt(core, waiting[turn % waiting.len()], now);
            self.at(now + cost.max(1), Event::Step { core });
        } else if states.iter().all(|state| matches!(state, State::Ended)) {
            self.next_batch(core, now);
        } else {
            self.cores[core].sleeps = true;
        }
    }

    /// Gives the places of answered jobs back.
    fn collect(&mut self, core: usize) {
        for state in &mut self.cores[core].batch {
            if matches!(state, State::AtDevice { is_answered: true, .. }) {
                let State::AtDevice { seat, .. } = std::mem::replace(state, State::Ended) else {
                    unreachable!("looked at above");
                };
                self.in_queue[seat.queue()] -= 1;
                self.driver.leave(seat);
                self.outcome.by_device += 1;
            }
        }
    }

    /// Tries to submit one job; returns what that cost beside `submit_ns`.
    fn attempt(&mut self, core: usize, job: usize, now: u64) -> u64 {
        let direction = self.cores[core].direction;
        match self.driver.seat(self.machine.cpu(core), direction) {
            Ok(seat) => {
                let generation = self.cores[core].generation;
                let finish = self.accept(&seat, now);
                self.cores[core].batch[job] = State::AtDevice { seat, is_answered: false };
                self.at(finish, Event::Record { core, job, generation });
                0
            }
            Err(zfolio_iaa::queues::NoTicket::Closed) => self.do_by_software(core, job),
            Err(zfolio_iaa::queues::NoTicket::Full) => {
                self.outcome.retries += 1;
                let State::Waiting { tries } = &mut self.cores[core].batch[job] else {
                    unreachable!("only waiting jobs are tried");
                };
                if !tries.is_last(direction, false) {
                    return self.constants.try_ns;
                }
                self.outcome.given_up += 1;
                self.constants.try_ns + self.do_by_software(core, job)
            }
        }
    }

    fn do_by_software(&mut self, core: usize, job: usize) -> u64 {
        self.cores[core].batch[job] = State::Ended;
        self.outcome.by_software += 1;
        self.constants.software_ns
    }

    /// A device has a job; returns when its record comes.
    fn accept(&mut self, seat: &Seat, now: u64) -> u64 {
        let count = &mut self.in_queue[seat.queue()];
        *count += 1;
        assert!(*count <= self.machine.depth(), "SIM-2");
        self.outcome.depth_most = self.outcome.depth_most.max(*count);
        let device = &mut self.devices[seat.queue() / self.machine.queues];
        assert!(!device.is_gone, "the table does not offer a device that is gone");
        let engine = device.engines.iter_mut().min().expect("there are some");
        // The memory's time is taken on arrival: a job that waits for its device does not delay those of others.
        let fetched = now.max(self.memory_free);
        self.memory_free = fetched + self.constants.memory_ns;
        let start = fetched.max(device.port_free).max(*engine);
        device.port_free = start + self.constants.port_ns;
        *engine = start + self.constants.latency_ns;
        *engine
    }

    fn record(&mut self, core: usize, job: usize, generation: u64, now: u64) {
        if self.cores[core].generation != generation {
            return;
        }
        if let State::AtDevice { is_answered, .. } = &mut self.cores[core].batch[job] {
            *is_answered = true;
            if self.cores[core].sleeps {
                self.step(core, now);
            }
        }
    }

    /// The next device goes. Its jobs get no records: their cores find that out and do them by software.
    fn vanish(&mut self, now: u64) {
        let Some(device) = self.devices.get_mut(self.gone) else { return };
        device.is_gone = true;
        self.driver.remove(self.gone);
        for core in 0..self.cores.len() {
            let mut cost = 0;
            for job in 0..self.cores[core].batch.len() {
                let is_lost = |seat: &Seat| seat.queue() / self.machine.queues == self.gone;
                let state = &mut self.cores[core].batch[job];
                if !matches!(state, State::AtDevice { seat, is_answered: false } if is_lost(seat)) {
                    continue;
                }
                let State::AtDevice { seat, .. } = std::mem::replace(state, State::Ended) else {
                    unreachable!("looked at above");
                };
                self.in_queue[seat.queue()] -= 1;
                self.driver.leave(seat);
                cost += self.do_by_software(core, job);
            }
            if cost > 0 && self.cores[core].sleeps {
                self.cores[core].sleeps = false;
                self.at(now + cost, Event::Step { core });
            }
        }
        self.driver.refresh();
        self.gone += 1;
    }

    /// A batch has ended: the next one of the folio, or of the next folio.
    fn next_batch(&mut self, core: usize, now: u64) {
        let machine = self.machine;
        let mut begins = now;
        if self.cores[core].pages_left == 0 {
            if self.cores[core].generation > 0 {
                let per_page = (now - self.cores[core].folio_began) / machine.folio_pages as u64;
                self.outcome.page_ns.push(per_page);
                begins += machine.work_ns;
            }
            if self.cores[core].folios_left == 0 {
                self.outcome.end_ns = self.outcome.end_ns.max(begins);
                self.outcome.core_end_ns[core] = begins;
                return;
            }
            let more = machine.work_ns * machine.jitter_percent / 100;
            begins += self.random.below_u64(more + 1);
            let decompresses = self.random.below_u64(100) < machine.decompress_percent;
            let it = &mut self.cores[core];
            it.direction = if decompresses { Direction::Decompress } else { Direction::Compress };
            it.folios_left -= 1;
            (it.pages_left, it.folio_began) = (machine.folio_pages, begins);
        }
        let it = &mut self.cores[core];
        it.batch.clear();
        it.to_begin = it.pages_left.min(machine.batch);
        it.pages_left -= it.to_begin;
        it.generation += 1;
        self.at(begins + self.constants.submit_ns, Event::Step { core });
    }
}
