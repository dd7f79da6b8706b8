//! A script of operations, played on an area and on the naive model at once. The fuzz target plays what the
//! fuzzer writes, the tests what seeded numbers write: one interpreter, so that what one finds the other
//! repeats.
//!
//! Any bytes are a script: the first ones choose the size of the area and the number of CPUs, each next one
//! an operation that takes its numbers from those that follow. What a caller must not do (a free of what is
//! free) is left out.

use std::sync::atomic::Ordering::Relaxed;

use super::model::{Model, check};
use super::{CLUSTER_SLOTS, Counts, ORDERS, Slots};

/// A script does not grow an area beyond this.
const SLOTS_MAX: usize = 40 * CLUSTER_SLOTS as usize;

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When the area does not do what the model does.
pub fn play(script: &[u8]) {
    let _counts: Counts = play_counting(script);
}

/// The same. Returns what the area counted up to the end of the script; of clusters, the most at once.
pub(super) fn play_counting(script: &[u8]) -> Counts {
    let mut script = Script(script);
    let (slots, cpus) = (script.slots(), 1 + script.byte() % 3);
    let mut player = Player {
        area: Slots::new(number(slots), cpus),
        model: Model::new(slots, cpus),
        cpus,
        taken: Vec::new(),
        handed_out: Vec::new(),
        seen: Counts::default(),
    };
    while !script.0.is_empty() {
        player.step(&mut script);
        player.agrees();
        player.see();
    }
    player.end();
    player.seen
}

/// What is left of the script.
struct Script<'s>(&'s [u8]);

impl Script<'_> {
    /// The next byte; 0 at the end.
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first)
    }

    fn two_bytes(&mut self) -> usize {
        self.byte() << 8 | self.byte()
    }

    /// A number of slots: few, some clusters, or some clusters and a part of one. Of the largest areas the
    /// clusters need two leaves of the table.
    fn slots(&mut self) -> usize {
        let clusters = self.byte() % 6 * CLUSTER_SLOTS as usize;
        match self.byte() % 8 {
            0 => self.byte() % 20,
            1 => clusters,
            2 => clusters * 7,
            _ => clusters + self.two_bytes() % CLUSTER_SLOTS as usize,
        }
    }

    /// An order: mostly the small ones.
    fn order(&mut self) -> u32 {
        const ORDERS_OFTEN: [u32; 16] = [0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9, 9];
        ORDERS_OFTEN[self.byte() % 16]
    }
}

/// The area, the model, and what the player has of it.
struct Player {
    area: Slots,
    model: Model,
    cpus: usize,
    /// Runs that are taken, or what is left of them.
    taken: Vec<(usize, usize)>,
    /// Clusters that were handed out to be discarded.
    handed_out: Vec<usize>,
    /// What was counted; of clusters, the most at once.
    seen: Counts,
}

impl Player {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() % 32 {
            0..=7 => {
                let (cpu, order) = (script.byte(), script.order());
                self.take(cpu, order);
            }
            8..=10 => {
                let (cpu, order, most) = (script.byte(), script.order(), script.two_bytes());
                (0..most % 600).all(|_| self.take(cpu, order));
            }
            11..=16 => {
                let (nth, from, count) = (script.two_bytes(), script.byte(), script.byte());
                self.free_part(nth, from, count);
            }
            17..=20 => {
                let nth = script.two_bytes();
                self.free_part(nth, 0, usize::MAX);
            }
            21 => {
                let (each, from) = (1 + script.byte() % 6, script.byte());
                let chosen: Vec<_> = self.taken.iter().copied().skip(from).step_by(each).collect();
                self.taken.retain(|run| !chosen.contains(run));
                chosen.iter().for_each(|run| self.free(run.0, run.1));
            }
            22 => self.free_joined(),
            23 | 24 => {
                let most = script.byte() % 80;
                self.take_discards(most);
            }
            25 | 26 => {
                let count = script.byte() % 16;
                self.discarded(count);
            }
            27 => self.grow(script.slots()),
            28 => {
                self.area.begin_drain();
                self.model.begin_drain();
                let from = script.two_bytes() % (self.model.total() + 1);
                assert_eq!(self.area.in_use(number(from)).map(index), self.model.in_use(from));
            }
            29 => {
                self.area.end_drain();
                self.model.is_draining = false;
            }
            30 => {
                self.model.refuses = script.byte() % 2 == 0;
                self.area.table.refuses.store(self.model.refuses, Relaxed);
            }
            31 if script.byte() % 2 == 0 => {
                self.area.prepare();
                self.model.prepare();
            }
            _ => check(&self.area),
        }
    }

    /// Takes a run from both. False: there is none.
    fn take(&mut self, cpu: usize, order: u32) -> bool {
        let wanted = self.model.take(cpu % self.cpus, order);
        let first = self.area.take(cpu % self.cpus, order).map(index);
        assert_eq!(first, wanted, "order {order} on CPU {}", cpu % self.cpus);
        match first {
            Some(first) => {
                assert_eq!(first % (1 << order), 0, "a run of order {order} is aligned");
                self.taken.push((first, 1 << order));
            }
            None if !self.model.is_draining => self.model.assert_no_room(order),
            None => {}
        }
        first.is_some()
    }

    /// Frees a part of a run; keeps what is before and after it.
    fn free_part(&mut self, nth: usize, from: usize, count: usize) {
        if self.taken.is_empty() {
            return;
        }
        let nth = nth % self.taken.len();
        let (first, len) = self.taken.swap_remove(nth);
        let from = from % len;
        let count = count.clamp(1, len - from);
        self.free(first + from, count);
        let parts = [(first, from), (first + from + count, len - from - count)];
        self.taken.extend(parts.iter().filter(|part| part.1 > 0));
    }

    /// Frees all that is in use from the lowest slot on, up to the first that is not, in one call.
    fn free_joined(&mut self) {
        self.taken.sort_unstable();
        let Some((first, _)) = self.taken.first().copied() else { return };
        let mut end = first;
        let joined = self.taken.iter().take_while(|(first, len)| {
            let joins = *first == end;
            end += if joins { len } else { &0 };
            joins
        });
        let joined = joined.count();
        self.taken.drain(..joined);
        self.free(first, end - first);
    }

    fn free(&mut self, first: usize, count: usize) {
        self.model.free(first, count);
        self.area.free(number(first), number(count));
    }

    fn take_discards(&mut self, most: usize) {
        let wanted = self.model.take_discards(most);
        let mut ranges = Vec::new();
        self.area
            .take_discards(most, &mut |range| ranges.push(index(range.start)..index(range.end)));
        let of_model = wanted.iter().map(|index| self.model.range(*index));
        assert_eq!(ranges, of_model.collect::<Vec<_>>());
        self.handed_out.extend(wanted);
    }

    /// Some of the clusters that were handed out are discarded, the first two together if they are neighbours.
    fn discarded(&mut self, count: usize) {
        let count = count.min(self.handed_out.len());
        let done: Vec<usize> = self.handed_out.drain(..count).collect();
        let mut left = &done[..];
        while let [first, rest @ ..] = left {
            let joins = rest.first().is_some_and(|second| *second == first + 1);
            let of = if joins { 2 } else { 1 };
            left.iter().take(of).for_each(|index| self.model.discarded(*index));
            let (begin, end) = (self.model.range(*first).start, self.model.range(left[of - 1]).end);
            self.area.discarded(number(begin)..number(end));
            left = &left[of..];
        }
    }

    fn grow(&mut self, slots: usize) {
        let slots = slots.min(SLOTS_MAX.saturating_sub(self.model.total()));
        self.area.grow(number(slots));
        self.model.grow(slots);
    }

    fn agrees(&self) {
        assert_eq!(self.area.counts(), self.model.counts());
        let totals = (index(self.area.used()), index(self.area.total()));
        assert_eq!(totals, (self.model.used(), self.model.total()), "used, total");
        assert_eq!(self.area.in_use(0).map(index), self.model.in_use(0));
    }

    fn see(&mut self) {
        let counts = self.area.counts();
        let most = |one: [u32; ORDERS], other: [u32; ORDERS]| {
            std::array::from_fn(|order| one[order].max(other[order]))
        };
        self.seen = Counts {
            free: self.seen.free.max(counts.free),
            nonfull: most(self.seen.nonfull, counts.nonfull),
            frag: most(self.seen.frag, counts.frag),
            full: self.seen.full.max(counts.full),
            discard: self.seen.discard.max(counts.discard),
            discarding: self.seen.discarding.max(counts.discarding),
            current: self.seen.current.max(counts.current),
            ..counts
        };
    }

    /// All is freed, by the list of what is in use, and the whole area serves any order again.
    fn end(&mut self) {
        self.model.refuses = false;
        self.area.table.refuses.store(false, Relaxed);
        check(&self.area);
        let mut slots: Vec<usize> =
            self.taken.drain(..).flat_map(|(first, len)| first..first + len).collect();
        slots.sort_unstable();
        let from = |slot: u32| self.area.in_use(slot);
        let listed = std::iter::successors(from(0), |slot| from(slot + 1)).map(index);
        assert_eq!(listed.collect::<Vec<_>>(), slots, "what is in use");
        slots.into_iter().for_each(|slot| self.free(slot, 1));
        self.area.begin_drain();
        self.model.begin_drain();
        self.agrees();
        self.discarded(usize::MAX);
        self.take_discards(usize::MAX);
        self.discarded(usize::MAX);
        self.area.end_drain();
        self.model.is_draining = false;
        check(&self.area);
        let whole = self.model.total() / CLUSTER_SLOTS as usize;
        let free = self.area.counts().free;
        assert_eq!(index(free), self.model.total().div_ceil(CLUSTER_SLOTS as usize));
        (0..whole).for_each(|_| assert!(self.take(0, 9), "a free cluster"));
        assert!(!self.take(0, 9));
        let orders = (0..ORDERS).map(number);
        orders.for_each(|order| while self.take(0, order) {});
        assert_eq!(self.model.used(), self.model.total(), "no slot is lost");
        check(&self.area);
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("areas of the model are small")
}

fn index(number: u32) -> usize {
    number as usize
}
