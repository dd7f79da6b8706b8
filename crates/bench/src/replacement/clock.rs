//! CLOCK: a queue in which a page that was accessed since its last turn gets another turn.
//!
//! F. J. Corbató, "A paging experiment with the Multics system", MIT Project MAC, 1968. The access
//! that brings a page in does not count as an access since.

use std::collections::VecDeque;

use super::policy::{Access, Policy};

/// See the module.
#[derive(Debug)]
pub(crate) struct Clock {
    capacity: usize,
    queue: VecDeque<u32>,
    held: Vec<bool>,
    accessed: Vec<bool>,
}

impl Clock {
    pub(crate) fn new(pages: usize, capacity: usize) -> Clock {
        let (held, accessed) = (vec![false; pages], vec![false; pages]);
        Clock { capacity, queue: VecDeque::new(), held, accessed }
    }

    fn evict(&mut self) {
        while let Some(page) = self.queue.pop_front() {
            if !std::mem::take(&mut self.accessed[page as usize]) {
                self.held[page as usize] = false;
                return;
            }
            self.queue.push_back(page);
        }
    }
}

impl Policy for Clock {
    fn access(&mut self, page: u32) -> Access {
        if self.held[page as usize] {
            self.accessed[page as usize] = true;
            return Access::Hit;
        }
        if self.queue.len() == self.capacity {
            self.evict();
        }
        self.queue.push_back(page);
        self.held[page as usize] = true;
        Access::Miss
    }

    fn held(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::replacement::policy::hits_of;

    #[test]
    fn an_accessed_page_gets_another_turn() {
        // 0 is accessed again before 3 needs room, so 1 goes out; a plain queue would drop 0.
        assert_eq!(hits_of("clock", &[0, 1, 2, 0, 3, 0, 1], 3), [3, 5]);
    }
}
