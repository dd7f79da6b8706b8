//! LRU: the page that was not accessed for the longest time goes out.

use super::order::Order;
use super::policy::{Access, Policy};

/// See the module.
#[derive(Debug)]
pub(crate) struct Lru {
    capacity: usize,
    held: Order,
}

impl Lru {
    pub(crate) fn new(pages: usize, capacity: usize) -> Lru {
        Lru { capacity, held: Order::new(pages) }
    }
}

impl Policy for Lru {
    fn access(&mut self, page: u32) -> Access {
        let hit = self.held.contains(page);
        if !hit && self.held.len() == self.capacity {
            self.held.pop();
        }
        self.held.push(page);
        if hit { Access::Hit } else { Access::Miss }
    }

    fn held(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Lru;
    use crate::replacement::policy::{Access, Policy};
    use zfolio_core::testing::{Random, seed};

    /// Goal: LRU agrees with a naive list. Method: seeded random accesses, the list youngest last.
    #[test]
    fn lru_agrees_with_a_list() {
        let seed = seed();
        let mut random = Random::new(seed);
        for capacity in 1..8 {
            let (mut lru, mut list) = (Lru::new(12, capacity), Vec::new());
            for step in 0..1_000 {
                let page = u32::try_from(random.below(12)).unwrap();
                let at = list.iter().position(|other| *other == page);
                let access = lru.access(page);
                assert_eq!(access == Access::Hit, at.is_some(), "seed {seed}, step {step}");
                at.map(|at| list.remove(at));
                list.push(page);
                if list.len() > capacity {
                    list.remove(0);
                }
                assert_eq!(lru.held(), list.len(), "seed {seed}, step {step}");
            }
        }
    }
}
