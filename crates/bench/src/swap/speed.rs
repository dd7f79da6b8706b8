//! How many runs of slots a second are taken and freed.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Barrier;

use serde_json::{Value, json};
use zfolio_core::swap::slots::Slots;
use zfolio_sys::clock;

use crate::compare::outcome::median;

/// Slots of the area: 4 GiB.
const AREA_SLOTS: u32 = 1 << 20;

/// What is measured: order, runs in use on each thread, pairs of take and free on each thread.
const CASES: [Case; 4] = [
    Case { order: 0, in_use: 1, pairs: 4_000_000 },
    Case { order: 0, in_use: 4096, pairs: 4_000_000 },
    Case { order: 4, in_use: 256, pairs: 2_000_000 },
    Case { order: 9, in_use: 8, pairs: 500_000 },
];

#[derive(Clone, Copy, Debug)]
struct Case {
    order: u32,
    in_use: usize,
    pairs: u32,
}

/// The medians of one case.
#[derive(Debug)]
pub(crate) struct Speed {
    pub(crate) order: u32,
    pub(crate) in_use: usize,
    /// 10^6 pairs a second on one thread, and on all threads together.
    pub(crate) one: f64,
    pub(crate) all: f64,
}

impl Speed {
    /// The speed of all threads, divided by that of one.
    pub(crate) fn times(&self) -> f64 {
        self.all / self.one
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "order": self.order,
            "in_use": self.in_use,
            "one_thread_mpairs_s": self.one,
            "all_threads_mpairs_s": self.all,
            "times": self.times(),
        })
    }
}

/// Measures each case on one thread and on `threads`, by turns; medians of `repeats`. `share` divides the
/// number of pairs, for tests.
pub(crate) fn measure(threads: usize, repeats: u32, share: u32) -> Vec<Speed> {
    let measure = |case: Case| {
        let case = Case { pairs: case.pairs / share, ..case };
        let (mut one, mut all) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            one.push(mpairs_per_second(case, 1));
            all.push(mpairs_per_second(case, threads));
        }
        let Case { order, in_use, .. } = case;
        Speed { order, in_use, one: median(one), all: median(all) }
    };
    CASES.map(measure).into()
}

/// 10^6 pairs a second on so many threads together, each of which is a CPU to the allocator.
fn mpairs_per_second(case: Case, threads: usize) -> f64 {
    let area = Slots::new(AREA_SLOTS, threads);
    // All begin together. The time is that of the slowest.
    let barrier = Barrier::new(threads);
    let work = |cpu| {
        let mut in_use = VecDeque::with_capacity(case.in_use);
        (1..case.in_use).for_each(|_| in_use.push_back(take(&area, cpu, case.order)));
        barrier.wait();
        let start = clock::monotonic_ns();
        pairs(&area, cpu, case, &mut in_use);
        clock::monotonic_ns() - start
    };
    let slowest = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..threads).map(|cpu| scope.spawn(move || work(cpu))).collect();
        let took = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        took.max().expect("one thread or more")
    });
    let left = (case.in_use as u64 - 1) << case.order;
    assert_eq!(u64::from(area.used()), left * threads as u64, "what is in use in the end");
    f64::from(case.pairs) * threads as f64 * 1e3 / slowest as f64
}

/// Takes the newest run and frees the oldest.
fn pairs(area: &Slots, cpu: usize, case: Case, in_use: &mut VecDeque<u32>) {
    for _ in 0..case.pairs {
        in_use.push_back(take(area, cpu, case.order));
        let oldest = in_use.pop_front().expect("one was added");
        area.free(black_box(oldest), 1 << case.order);
    }
}

fn take(area: &Slots, cpu: usize, order: u32) -> u32 {
    area.take(cpu, order).expect("the area is larger than what is in use")
}
