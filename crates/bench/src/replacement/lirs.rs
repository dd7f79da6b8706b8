//! LIRS: pages are ranked by the number of other pages accessed between their last two accesses.
//!
//! S. Jiang, X. Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to
//! improve buffer cache performance", SIGMETRICS 2002. Pages of low rank (LIR) have 99 % of the
//! capacity; pages of high rank (HIR) pass through a queue that has the rest. The number of ghosts
//! in the stack is not bounded, as in the paper.

use super::order::Order;
use super::policy::{Access, Policy};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not held. In the stack: a ghost.
    Out,
    /// Held, of low rank; always in the stack.
    Low,
    /// Held, of high rank; always in the queue.
    High,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lirs {
    capacity: usize,
    low_max: usize,
    low: usize,
    /// The stack S of the paper: pages by their last access; the oldest is of low rank.
    stack: Order,
    /// The queue Q of the paper.
    queue: Order,
    states: Vec<State>,
}

impl Lirs {
    pub(crate) fn new(pages: usize, capacity: usize) -> Lirs {
        Lirs {
            capacity,
            low_max: capacity - (capacity / 100).max(1),
            low: 0,
            stack: Order::new(pages),
            queue: Order::new(pages),
            states: vec![State::Out; pages],
        }
    }

    /// Removes pages of high rank from the bottom of the stack.
    fn prune(&mut self) {
        while let Some(page) = self.stack.oldest() {
            if self.states[page as usize] == State::Low {
                return;
            }
            self.stack.pop();
        }
    }

    /// Gives `page` a low rank. The oldest page of low rank gets a high one if there are too many.
    fn promote(&mut self, page: u32) {
        self.queue.remove(page);
        self.states[page as usize] = State::Low;
        self.low += 1;
        self.stack.push(page);
        self.prune();
        if self.low > self.low_max {
            if let Some(oldest) = self.stack.pop() {
                self.states[oldest as usize] = State::High;
                self.low -= 1;
                self.queue.push(oldest);
            }
            self.prune();
        }
    }

    fn miss(&mut self, page: u32) {
        if self.held() == self.capacity {
            if let Some(out) = self.queue.pop() {
                self.states[out as usize] = State::Out;
            }
        }
        if self.stack.contains(page) || self.low < self.low_max {
            return self.promote(page);
        }
        self.states[page as usize] = State::High;
        self.stack.push(page);
        self.queue.push(page);
    }
}

impl Policy for Lirs {
    fn access(&mut self, page: u32) -> Access {
        match self.states[page as usize] {
            State::Low => {
                self.stack.push(page);
                self.prune();
            }
            State::High if self.stack.contains(page) => self.promote(page),
            State::High => {
                self.stack.push(page);
                self.queue.push(page);
                self.prune();
            }
            State::Out => {
                self.miss(page);
                return Access::Miss;
            }
        }
        Access::Hit
    }

    fn held(&self) -> usize {
        self.low + self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::replacement::policy::hits_of;

    /// Goal: a loop over one page more than the capacity hits in all pages of low rank (LRU never
    /// hits there). Method: capacity 5 is four pages of low rank and one of high rank.
    #[test]
    fn a_loop_longer_than_the_capacity_hits() {
        let string: Vec<u32> = (0..6).cycle().take(12).collect();
        assert_eq!(hits_of("lirs", &string, 5), [6, 7, 8, 9]);
        assert!(hits_of("lru", &string, 5).is_empty());
    }

    /// Goal: a page of high rank that is accessed again soon gets a low rank, and stays during a
    /// scan.
    #[test]
    fn a_page_accessed_again_soon_stays() {
        let string = [0, 1, 2, 2, 3, 4, 5, 2];
        assert_eq!(hits_of("lirs", &string, 3), [3, 7]);
    }
}
