//! The optimum: what goes out is the page whose next access is the farthest away. It needs the
//! future, so it is a bound and no policy.
//!
//! L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
//! Journal 5(2), 1966: the algorithm MIN.

use std::collections::BTreeSet;

use super::policy::{Access, Policy};
use super::trace::Trace;

/// See the module. It must get the accesses of its trace, in their order.
#[derive(Debug)]
pub(crate) struct Opt {
    capacity: usize,
    /// For each access, when its page is accessed next; `usize::MAX` if never.
    next: Vec<usize>,
    /// The pages held, by the time of their next access.
    held: BTreeSet<(usize, u32)>,
    now: usize,
}

impl Opt {
    pub(crate) fn new(trace: &Trace, capacity: usize) -> Opt {
        let mut next = vec![usize::MAX; trace.accesses.len()];
        let mut seen = vec![usize::MAX; trace.pages.len()];
        for (at, visit) in trace.accesses.iter().enumerate().rev() {
            next[at] = std::mem::replace(&mut seen[visit.page() as usize], at);
        }
        Opt { capacity, next, held: BTreeSet::new(), now: 0 }
    }
}

impl Policy for Opt {
    fn access(&mut self, page: u32) -> Access {
        let hit = self.held.remove(&(self.now, page));
        if !hit && self.held.len() == self.capacity {
            self.held.pop_last();
        }
        self.held.insert((self.next[self.now], page));
        self.now += 1;
        if hit { Access::Hit } else { Access::Miss }
    }

    fn held(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::replacement::policy::misses_of;

    /// The reference string of Silberschatz, Galvin, Gagne, "Operating system concepts", with three
    /// frames: 9 faults by the optimum, 12 by LRU.
    #[test]
    fn the_textbook_string_faults_nine_times_in_three_frames() {
        let string = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        assert_eq!(misses_of("opt", &string, 3), 9);
        assert_eq!(misses_of("lru", &string, 3), 12);
    }
}
