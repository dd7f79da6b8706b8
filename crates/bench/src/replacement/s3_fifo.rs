//! S3-FIFO: a small queue for new pages, a main queue, and a ghost queue of pages that left the
//! small one.
//!
//! J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache
//! eviction", SOSP 2023, algorithm 1: the small queue has a tenth of the capacity, the ghost queue
//! as many entries as main; a page moves from small to main if it was accessed more than once in
//! small.

use std::collections::VecDeque;

use super::order::Order;
use super::policy::{Access, Policy};

/// Accesses are counted up to this number.
const ACCESSES_MAX: u8 = 3;

/// See the module.
#[derive(Debug)]
pub(crate) struct S3Fifo {
    capacity: usize,
    small_share: usize,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghosts: Order,
    held: Vec<bool>,
    /// How often each held page was accessed since it came or moved.
    accesses: Vec<u8>,
}

impl S3Fifo {
    pub(crate) fn new(pages: usize, capacity: usize) -> S3Fifo {
        S3Fifo {
            capacity,
            small_share: (capacity / 10).max(1),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: Order::new(pages),
            held: vec![false; pages],
            accesses: vec![0; pages],
        }
    }

    /// Pages that main may hold, and entries of the ghost queue.
    fn main_share(&self) -> usize {
        self.capacity - self.small_share
    }

    fn evict_small(&mut self) {
        while let Some(page) = self.small.pop_front() {
            if std::mem::take(&mut self.accesses[page as usize]) > 1 {
                if self.main.len() >= self.main_share().max(1) {
                    self.evict_main();
                }
                self.main.push_back(page);
                continue;
            }
            self.held[page as usize] = false;
            self.ghosts.push(page);
            if self.ghosts.len() > self.main_share() {
                self.ghosts.pop();
            }
            return;
        }
    }

    fn evict_main(&mut self) {
        while let Some(page) = self.main.pop_front() {
            let accesses = &mut self.accesses[page as usize];
            if *accesses == 0 {
                self.held[page as usize] = false;
                return;
            }
            *accesses -= 1;
            self.main.push_back(page);
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, page: u32) -> Access {
        let accesses = &mut self.accesses[page as usize];
        if self.held[page as usize] {
            *accesses = (*accesses + 1).min(ACCESSES_MAX);
            return Access::Hit;
        }
        *accesses = 0;
        while self.held() == self.capacity {
            if self.small.len() >= self.small_share {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
        let ghost = self.ghosts.remove(page);
        if ghost { &mut self.main } else { &mut self.small }.push_back(page);
        self.held[page as usize] = true;
        Access::Miss
    }

    fn held(&self) -> usize {
        self.small.len() + self.main.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::replacement::policy::hits_of;

    /// Goal: quick demotion: pages accessed once pass through the small queue, and a page that is
    /// accessed three times there stays. Method: capacity 10, so the small queue is one page.
    #[test]
    fn a_scan_passes_through_the_small_queue() {
        let mut string = vec![0, 0, 0];
        string.extend(1..40);
        string.push(0);
        assert_eq!(hits_of("s3-fifo", &string, 10), [1, 2, 42]);
    }

    /// Goal: a page that comes back while it is a ghost goes to main, and survives the next scan.
    #[test]
    fn a_ghost_comes_back_to_main() {
        let mut string: Vec<u32> = (0..11).collect();
        // 0 was the first to leave. It comes back as a ghost, and a scan of 30 pages follows.
        string.push(0);
        string.extend(20..50);
        string.push(0);
        assert_eq!(hits_of("s3-fifo", &string, 10), [string.len() - 1]);
    }
}
