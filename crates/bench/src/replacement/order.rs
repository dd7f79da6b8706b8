//! Pages in the order in which they were pushed, oldest first, each at most once.

use std::collections::BTreeMap;

/// See the module.
#[derive(Debug)]
pub(crate) struct Order {
    /// The pages by the time of their push.
    pages: BTreeMap<u64, u32>,
    /// The time of each page's push, if the page is here.
    times: Vec<Option<u64>>,
    now: u64,
}

impl Order {
    /// Has no page yet. All pages are below `pages`.
    pub(crate) fn new(pages: usize) -> Order {
        Order { pages: BTreeMap::new(), times: vec![None; pages], now: 0 }
    }

    /// Makes `page` the youngest.
    pub(crate) fn push(&mut self, page: u32) {
        self.remove(page);
        self.now += 1;
        self.times[page as usize] = Some(self.now);
        self.pages.insert(self.now, page);
    }

    /// Removes `page`; false if it is not here.
    pub(crate) fn remove(&mut self, page: u32) -> bool {
        let time = self.times[page as usize].take();
        time.is_some_and(|time| self.pages.remove(&time).is_some())
    }

    /// Removes the oldest page.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let (_, page) = self.pages.pop_first()?;
        self.times[page as usize] = None;
        Some(page)
    }

    /// The oldest page.
    pub(crate) fn oldest(&self) -> Option<u32> {
        self.pages.first_key_value().map(|(_, page)| *page)
    }

    pub(crate) fn contains(&self, page: u32) -> bool {
        self.times[page as usize].is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Order;
    use zfolio_core::testing::{Random, seed};

    /// Goal: an order agrees with a plain vector. Method: seeded random operations.
    #[test]
    fn an_order_agrees_with_a_vector() {
        let seed = seed();
        let mut random = Random::new(seed);
        let (mut order, mut list) = (Order::new(20), Vec::new());
        for step in 0..5_000 {
            let page = u32::try_from(random.below(20)).unwrap();
            let at = list.iter().position(|other| *other == page);
            assert_eq!(order.contains(page), at.is_some(), "seed {seed}, step {step}");
            match random.below(4) {
                0 | 1 => {
                    order.push(page);
                    at.map(|at| list.remove(at));
                    list.push(page);
                }
                2 => assert_eq!(order.remove(page), at.map(|at| list.remove(at)).is_some()),
                _ => {
                    let oldest = (!list.is_empty()).then(|| list.remove(0));
                    assert_eq!(order.oldest(), oldest, "seed {seed}, step {step}");
                    assert_eq!(order.pop(), oldest, "seed {seed}, step {step}");
                }
            }
            assert_eq!(order.len(), list.len(), "seed {seed}, step {step}");
        }
    }
}
