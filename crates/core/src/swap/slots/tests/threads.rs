//! Several threads. They are interrupted at random before each lock, since two CPUs alone do not often meet.

use std::cell::Cell;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use super::super::model::check;
use super::super::{CLUSTER_SLOTS, Slots};
use super::take_all;
use crate::testing::{Random, seed};

const C: u32 = CLUSTER_SLOTS;
const THREADS: usize = 4;
const STEPS: usize = if cfg!(miri) { 40 } else { 6_000 };

thread_local! {
    static POINT: Cell<u32> = const { Cell::new(1) };
}

/// Lets another thread run, at about each eighth call.
#[cfg(debug_assertions)]
fn point() {
    let mixed = POINT.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    POINT.set(mixed);
    if mixed >> 29 == 0 {
        std::thread::yield_now();
    }
}

/// From now on this thread is interrupted, where the build can do that.
fn interrupt(seed: usize) {
    POINT.set(u32::try_from(seed % 1_000_000).expect("a small number"));
    #[cfg(debug_assertions)]
    crate::sync::schedule::set(Some(point));
}

/// Who has each slot: a thread claims it after it took it, and gives it up before it frees it.
struct Board(Vec<AtomicBool>);

impl Board {
    fn new(slots: u32) -> Board {
        Board((0..slots).map(|_| AtomicBool::new(false)).collect())
    }

    fn claim(&self, first: u32, count: u32) {
        for slot in first..first + count {
            let other = self.0[slot as usize].swap(true, Relaxed);
            assert!(!other, "SLOT-1: slot {slot} was handed out twice, seed {}", seed());
        }
    }

    fn give_up(&self, first: u32, count: u32) {
        for slot in first..first + count {
            assert!(self.0[slot as usize].swap(false, Relaxed), "slot {slot}");
        }
    }
}

/// One thread's work: takes, and frees a part of what it has or all.
struct Worker<'a> {
    area: &'a Slots,
    board: &'a Board,
    random: Random,
    mine: Vec<(u32, u32)>,
}

impl Worker<'_> {
    fn new<'a>(area: &'a Slots, board: &'a Board, number: usize) -> Worker<'a> {
        interrupt(number + 1);
        let random = Random::new(seed() + number as u64 * 7_919);
        Worker { area, board, random, mine: Vec::new() }
    }

    fn below(&mut self, end: u32) -> u32 {
        u32::try_from(self.random.below_u64(u64::from(end))).expect("below a u32")
    }

    /// Takes a run of a random order on a random CPU.
    fn take(&mut self) -> bool {
        let (cpu, order) = (self.random.below(3), [0, 0, 0, 1, 4, 4, 6, 9][self.random.below(8)]);
        self.take_on(cpu, order)
    }

    fn take_on(&mut self, cpu: usize, order: u32) -> bool {
        let Some(first) = self.area.take(cpu, order) else { return false };
        assert_eq!(first % (1 << order), 0);
        self.board.claim(first, 1 << order);
        self.mine.push((first, 1 << order));
        true
    }

    /// Frees a random part of a random run.
    fn free(&mut self) {
        if self.mine.is_empty() {
            return;
        }
        let nth = self.random.below(self.mine.len());
        let (first, count) = self.mine.swap_remove(nth);
        let half = if self.below(2) == 0 { count } else { 1 + self.below(count) };
        self.give_back(first, half);
        if half < count {
            self.mine.push((first + half, count - half));
        }
    }

    fn give_back(&self, first: u32, count: u32) {
        self.board.give_up(first, count);
        self.area.free(first, count);
    }

    fn free_all(&mut self) {
        let mine = std::mem::take(&mut self.mine);
        mine.into_iter().for_each(|(first, count)| self.give_back(first, count));
    }
}

/// Goal: threads that take, free and discard disturb each other at no step. Method: four of them with few
/// clusters, so that they take from each other; a board on which each slot has one owner; the books are
/// balanced at the end.
#[test]
fn threads_share_an_area() {
    let (slots, cpus) = (6 * C + 77, 3);
    let (area, board) = (Slots::new(slots, cpus), Board::new(slots));
    let running = AtomicUsize::new(THREADS);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (area, board, running) = (&area, &board, &running);
            scope.spawn(move || {
                let mut worker = Worker::new(area, board, number);
                for _ in 0..STEPS {
                    // What is in use goes up and down.
                    if worker.random.below(if worker.mine.len() < 40 { 4 } else { 2 }) > 0 {
                        worker.take();
                    } else {
                        worker.free();
                    }
                }
                worker.free_all();
                running.fetch_sub(1, Release);
            });
        }
        interrupt(99);
        while running.load(Acquire) > 0 {
            let mut ranges = Vec::new();
            area.take_discards(3, &mut |range| {
                board.claim(range.start, range.end - range.start);
                ranges.push(range);
            });
            assert!(area.used() <= area.total());
            for range in ranges {
                board.give_up(range.start, range.end - range.start);
                area.discarded(range);
            }
            std::thread::yield_now();
        }
        #[cfg(debug_assertions)]
        crate::sync::schedule::set(None);
    });
    assert_eq!((area.used(), area.in_use(0)), (0, None));
    check(&area);
    assert_eq!(take_all(&area, 0, 0).len(), slots as usize, "no slot is lost");
    check(&area);
}

/// Goal: a cluster that a CPU takes from its list just when its place changes is with that CPU. Method: runs
/// of half a cluster, so that each free changes a place, in as many clusters as there are threads less one.
#[test]
fn clusters_change_their_places_all_the_time() {
    let slots = (u32::try_from(THREADS).expect("few") - 1) * C;
    let (area, board) = (Slots::new(slots, THREADS), Board::new(slots));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (area, board) = (&area, &board);
            scope.spawn(move || {
                let mut worker = Worker::new(area, board, number);
                for step in 0..STEPS * 4 {
                    let order = if step % 16 < 12 { 8 } else { 0 };
                    while worker.take_on(number, order) && worker.random.below(2) == 0 {}
                    worker.free_all();
                }
            });
        }
    });
    assert_eq!(area.used(), 0);
    check(&area);
    assert_eq!(take_all(&area, 0, 0).len(), slots as usize, "no slot is lost");
    check(&area);
}

/// Goal: SLOT-5. Method: threads take and free without end; once `begin_drain` has returned, none of them
/// gets a slot; once they have freed what they have, the area is empty; then they go on.
#[test]
fn an_area_is_drained_while_threads_take() {
    let slots = 5 * C;
    let (area, board) = (Slots::new(slots, 2), Board::new(slots));
    // Odd while the area is drained.
    let (drains, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (area, board, drains, is_over) = (&area, &board, &drains, &is_over);
            scope.spawn(move || {
                let mut worker = Worker::new(area, board, number);
                while !is_over.load(Acquire) {
                    let before = drains.load(Acquire);
                    let (taken, is_drained) = (worker.take(), before % 2 == 1);
                    // If the number has changed, the drain has ended, or may have before the take.
                    let went_on = drains.load(Acquire) == before;
                    assert!(!(is_drained && taken && went_on), "SLOT-5");
                    if is_drained {
                        worker.free_all();
                    } else if worker.random.below(3) == 0 {
                        worker.free();
                    }
                }
                worker.free_all();
            });
        }
        for _ in 0..if cfg!(miri) { 2 } else { 60 } {
            std::thread::sleep(std::time::Duration::from_micros(300));
            area.begin_drain();
            drains.fetch_add(1, Release);
            while area.in_use(0).is_some() {
                std::thread::yield_now();
            }
            assert_eq!(area.used(), 0);
            drains.fetch_add(1, Release);
            area.end_drain();
        }
        is_over.store(true, Release);
    });
    check(&area);
    assert_eq!(take_all(&area, 1, 0).len(), slots as usize);
}

/// Goal: slots that are added while threads take are taken once, and none is lost. Method: the area grows in
/// odd steps.
#[test]
fn an_area_grows_while_threads_take() {
    let slots = 9 * C + 3;
    let (area, board) = (Slots::new(10, 2), Board::new(slots));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (area, board) = (&area, &board);
            scope.spawn(move || {
                let mut worker = Worker::new(area, board, number);
                for _ in 0..STEPS {
                    if !worker.take() || worker.random.below(4) == 0 {
                        worker.free();
                    }
                }
                worker.free_all();
            });
        }
        // Two threads, so that one may find that the other was faster.
        for number in 0..2 {
            let area = &area;
            scope.spawn(move || {
                interrupt(number + 50);
                let mut random = Random::new(seed() + number as u64);
                let mut left = (slots - 10) / 2 + u32::from(number == 0) * ((slots - 10) % 2);
                while left > 0 {
                    let more = u32::try_from(1 + random.below(90)).expect("small").min(left);
                    area.grow(more);
                    left -= more;
                    std::thread::yield_now();
                }
            });
        }
    });
    assert_eq!((area.total(), area.used()), (slots, 0));
    check(&area);
    assert_eq!(take_all(&area, 0, 0).len(), slots as usize, "no slot is lost");
}
