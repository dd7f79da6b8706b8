use std::collections::BTreeMap;

use zfolio_core::swap::disk::{Buffer, Direction, Error, SLOT_BYTES, Transfer};
use zfolio_core::testing::{Random, seed};
use zfolio_sys::Errno;

use super::{DISCARDS, Queue, Share, Work};
use crate::spill::flight::{By, Next};

const SLOTS: usize = 24;
const DEPTH: usize = 8;

/// The naive disk: a byte for each slot.
type Disk = [u8; SLOTS];

fn transfer(token: u64, direction: Direction, first: u64, count: usize, fill: u8) -> Transfer {
    let mut buffer = Buffer::new(count);
    for slot in buffer.slots_mut() {
        slot.0.fill(fill);
    }
    Transfer { token, direction, first, count, buffer, result: Ok(()) }
}

/// Carries work out on the disk.
fn carry_out(disk: &mut Disk, work: &mut Work) {
    match work {
        Work::Discard(discard) => {
            let first = usize::try_from(discard.first).unwrap();
            disk[first..first + usize::try_from(discard.count).unwrap()].fill(0);
        }
        Work::Transfer(flight) => {
            let first = usize::try_from(flight.transfer.first).unwrap();
            let is_read = flight.is_read();
            for (slot, bytes) in flight.rest().chunks_mut(SLOT_BYTES).enumerate() {
                if is_read {
                    bytes.fill(disk[first + slot]);
                } else {
                    disk[first + slot] = bytes[0];
                }
            }
        }
    }
}

/// Where the transfers of a test are: what each must read.
struct World {
    seed: u64,
    random: Random,
    queue: Queue,
    disk: Disk,
    /// The disk on which everything happens at the moment when it is accepted.
    model: Disk,
    /// Expected bytes of each transfer that was accepted and not returned.
    expected: BTreeMap<u64, (usize, Vec<u8>)>,
    taken: Vec<Work>,
    next: u64,
}

impl World {
    fn range(&mut self) -> (usize, usize) {
        let count = 1 + self.random.below(4);
        (self.random.below(SLOTS - count + 1), count)
    }

    fn begin(&mut self) {
        let (first, count) = self.range();
        let overlaps = |(other, bytes): &(usize, Vec<u8>)| {
            first < other + bytes.len() && *other < first + count
        };
        // As areas do it: no two transfers of one slot at a time (SWAP-1).
        if self.expected.values().any(overlaps) {
            return;
        }
        self.next += 1;
        let fill = self.random.byte();
        let is_read = self.random.below(2) == 0;
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let begun = self.queue.begin(transfer(self.next, direction, first as u64, count, fill));
        assert_eq!(begun.is_err(), self.expected.len() == DEPTH, "seed {}", self.seed);
        if begun.is_ok() {
            if !is_read {
                self.model[first..first + count].fill(fill);
            }
            let bytes = self.model[first..first + count].to_vec();
            self.expected.insert(self.next, (first, bytes));
        }
    }

    fn discard(&mut self) {
        let (first, count) = self.range();
        let before = self.queue.counts.discards_left_out;
        self.queue.discard(first as u64, count as u64);
        if self.queue.counts.discards_left_out == before {
            self.model[first..first + count].fill(0);
        }
    }

    fn take(&mut self) {
        let share = [Share::All, Share::Ring, Share::Calls][self.random.below(3)];
        let has_work = self.queue.has_work(share);
        let work = self.queue.take(share);
        assert_eq!(has_work, work.is_some(), "seed {}", self.seed);
        if let Some(Work::Transfer(flight)) = &work {
            let is_meant = match share {
                Share::All => true,
                Share::Ring => !flight.is_for_calls,
                Share::Calls => flight.is_for_calls,
            };
            assert!(is_meant, "seed {}", self.seed);
        }
        self.taken.extend(work);
    }

    fn end(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        let index = self.random.below(self.taken.len());
        let mut work = self.taken.swap_remove(index);
        let is_refused = self.random.below(4) == 0;
        if !is_refused {
            carry_out(&mut self.disk, &mut work);
        }
        match work {
            Work::Discard(discard) if is_refused => self.queue.give_discard_back(discard),
            Work::Discard(discard) => self.queue.end_discard(discard, Ok(())),
            Work::Transfer(mut flight) => {
                let answer = if is_refused { Err(Errno::AGAIN) } else { Ok(flight.rest().len()) };
                match flight.note(answer, true, By::Ring) {
                    Next::Again => self.queue.give_back(flight),
                    Next::Ended(result) => self.queue.end(flight, result),
                }
            }
        }
    }

    fn poll(&mut self) {
        while let Some(transfer) = self.queue.next_ended() {
            let (_, bytes) = self.expected.remove(&transfer.token).expect("once (DISK-1)");
            assert_eq!(transfer.result, Ok(()), "seed {}", self.seed);
            let found = transfer.buffer.slots().iter().map(|slot| slot.0[7]);
            assert!(found.eq(bytes), "seed {}: {transfer:?}", self.seed);
        }
    }
}

/// Goal: transfers and discards have the effect that they would have one after the other (`QUEUE-2`), each transfer
/// comes back once (`DISK-1`), and nothing grows (`QUEUE-1`). Method: random operations against a disk that does
/// everything at once; work is carried out late, in any order, and refused now and then.
#[test]
fn the_queue_agrees_with_a_disk_that_does_everything_at_once() {
    let seed = seed();
    let mut random = Random::new(seed);
    for _ in 0..200 {
        let queue = Queue::new(DEPTH, random.below(2) == 0);
        let mut world = World {
            seed,
            random: random.clone(),
            queue,
            disk: [0; SLOTS],
            model: [0; SLOTS],
            expected: BTreeMap::new(),
            taken: Vec::new(),
            next: 0,
        };
        let capacities = |queue: &Queue| {
            let lists = [queue.waiting.capacity(), queue.ended.capacity(), queue.out.capacity()];
            (lists, queue.discards.capacity(), queue.discards_out.capacity())
        };
        let before = capacities(&world.queue);
        for _ in 0..400 {
            match world.random.below(8) {
                0 | 1 => world.begin(),
                2 => world.discard(),
                3 | 4 => world.take(),
                5 | 6 => world.end(),
                _ => world.poll(),
            }
            assert_eq!(world.queue.under_way(), world.expected.len(), "seed {seed}");
        }
        while world.queue.has_work(Share::All) || !world.taken.is_empty() {
            if let Some(work) = world.queue.take(Share::All) {
                world.taken.push(work);
            }
            world.end();
        }
        world.poll();
        assert_eq!((world.queue.under_way(), world.queue.is_anything_out()), (0, false));
        assert_eq!(world.disk, world.model, "seed {seed}");
        assert_eq!(before, capacities(&world.queue), "seed {seed}");
        random = world.random;
    }
}

fn take(queue: &mut Queue) -> super::Flight {
    match queue.take(Share::All) {
        Some(Work::Transfer(flight)) => flight,
        other => panic!("{other:?}"),
    }
}

/// Goal: reads come first, but a write is not passed over for ever.
#[test]
fn reads_come_first_and_writes_come_too() {
    let mut queue = Queue::new(40, true);
    queue.begin(transfer(100, Direction::Write, 0, 1, 1)).unwrap();
    let mut taken = Vec::new();
    for token in 0..30 {
        queue.begin(transfer(token, Direction::Read, 1 + token, 1, 0)).unwrap();
        if token > 1 {
            let flight = take(&mut queue);
            taken.push(flight.transfer.token);
            queue.end(flight, Ok(()));
        }
    }
    let place = taken.iter().position(|token| *token == 100).expect("it has come");
    assert_eq!(place, super::PASSES_MAX as usize, "{taken:?}");
    taken.remove(place);
    assert!(taken.iter().copied().eq(0..27), "{taken:?}");
}

/// Goal: a transfer that is handed back keeps its turn, one that failed says why, and a medium that cannot discard is
/// not asked again.
#[test]
fn what_is_handed_back_keeps_its_turn() {
    let mut queue = Queue::new(4, false);
    for token in 0..3 {
        queue.begin(transfer(token, Direction::Read, token, 1, 0)).unwrap();
    }
    let (first, second) = (take(&mut queue), take(&mut queue));
    queue.give_back(second);
    queue.give_back(first);
    for token in 0..3 {
        let flight = take(&mut queue);
        assert_eq!(flight.transfer.token, token);
        queue.end(flight, Err(Error::Full));
    }
    assert!((0..3).all(|_| queue.next_ended().unwrap().result == Err(Error::Full)));
    assert_eq!(queue.counts.failed, 3);
    for number in 0..=DISCARDS as u64 {
        queue.discard(2 * number, 1);
    }
    assert_eq!(queue.counts.discards_left_out, 1, "too many");
    // An error of the medium says nothing about the next one.
    let Some(Work::Discard(discard)) = queue.take(Share::Ring) else { panic!("a discard") };
    queue.end_discard(discard, Err(Errno::IO));
    assert_eq!((queue.counts.discards, queue.counts.discards_left_out), (0, 2));
    let Some(Work::Discard(discard)) = queue.take(Share::Ring) else { panic!("a discard") };
    queue.end_discard(discard, Err(Errno::OPNOTSUPP));
    queue.discard(0, 1);
    assert_eq!(queue.counts.discards_left_out, 4, "one was refused, and one was not asked for");
}

/// Goal: what was the ring's is for plain calls once there is no ring, also for a thread that has asked before what it
/// is to look for.
#[test]
fn without_a_ring_all_is_for_plain_calls() {
    let mut queue = Queue::new(4, false);
    queue.begin(transfer(0, Direction::Read, 0, 1, 0)).unwrap();
    queue.discard(4, 1);
    assert!(queue.has_work(Share::Ring) && !queue.has_work(Share::Calls));
    queue.is_without_ring = true;
    assert!(matches!(queue.take(Share::Calls), Some(Work::Transfer(_))));
    assert!(matches!(queue.take(Share::Calls), Some(Work::Discard(_))));
    assert!(queue.take(Share::Calls).is_none());
}

/// A regression: reads of a device waited for its discards, since the one thread that began them discarded; two threads
/// could both have done so. Goal: one discard of a device at a time, and transfers meanwhile. A file's are short.
#[test]
fn a_device_is_read_while_it_discards() {
    let mut queue = Queue::new(DEPTH, true);
    queue.discard(0, 4);
    queue.discard(8, 4);
    let Some(Work::Discard(first)) = queue.take(Share::Calls) else { panic!("nothing to do") };
    for share in [Share::Calls, Share::All] {
        assert!(!queue.has_work(share) && queue.take(share).is_none());
    }
    queue.begin(transfer(1, Direction::Read, 16, 1, 0)).unwrap();
    assert!(matches!(queue.take(Share::All), Some(Work::Transfer(_))));
    queue.end_discard(first, Ok(()));
    assert!(matches!(queue.take(Share::Calls), Some(Work::Discard(_))));

    let mut queue = Queue::new(DEPTH, false);
    queue.discard(0, 4);
    queue.discard(8, 4);
    assert!((0..2).all(|_| matches!(queue.take(Share::Ring), Some(Work::Discard(_)))));
}
