//! ARC: two LRU lists, of pages accessed once and of pages accessed more often, each with a list of
//! ghosts; hits in the ghosts move the boundary between the two.
//!
//! N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003,
//! figure 4. The names of the fields are those of the paper.

use super::order::Order;
use super::policy::{Access, Policy};

/// See the module.
#[derive(Debug)]
pub(crate) struct Arc {
    /// The capacity.
    c: usize,
    /// The target length of `t1`.
    p: f64,
    /// Pages held that were accessed once.
    t1: Order,
    /// Pages held that were accessed more often.
    t2: Order,
    /// Ghosts of `t1`.
    b1: Order,
    /// Ghosts of `t2`.
    b2: Order,
}

impl Arc {
    pub(crate) fn new(pages: usize, capacity: usize) -> Arc {
        let list = || Order::new(pages);
        Arc { c: capacity, p: 0.0, t1: list(), t2: list(), b1: list(), b2: list() }
    }

    /// Makes the oldest page of `t1` or of `t2` a ghost. `in_b2`: the page that comes in is in
    /// `b2`.
    fn replace(&mut self, in_b2: bool) {
        let length = self.t1.len() as f64;
        let from_t1 = self.t1.len() > 0 && (length > self.p || (in_b2 && length >= self.p));
        let (list, ghosts) =
            if from_t1 { (&mut self.t1, &mut self.b1) } else { (&mut self.t2, &mut self.b2) };
        if let Some(page) = list.pop() {
            ghosts.push(page);
        }
    }

    /// Makes room for a page that is in none of the four lists (case IV of the paper).
    fn make_room(&mut self) {
        let first = self.t1.len() + self.b1.len();
        let all = first + self.t2.len() + self.b2.len();
        if first == self.c {
            if self.t1.len() < self.c {
                self.b1.pop();
                self.replace(false);
            } else {
                self.t1.pop();
            }
        } else if all >= self.c {
            if all == 2 * self.c {
                self.b2.pop();
            }
            self.replace(false);
        }
    }
}

impl Policy for Arc {
    fn access(&mut self, page: u32) -> Access {
        if self.t1.remove(page) || self.t2.contains(page) {
            self.t2.push(page);
            return Access::Hit;
        }
        let (in_b1, in_b2) = (self.b1.contains(page), self.b2.contains(page));
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        if in_b1 {
            self.p = (self.p + (b2 / b1).max(1.0)).min(self.c as f64);
        } else if in_b2 {
            self.p = (self.p - (b1 / b2).max(1.0)).max(0.0);
        } else {
            self.make_room();
            self.t1.push(page);
            return Access::Miss;
        }
        self.replace(in_b2);
        self.b1.remove(page);
        self.b2.remove(page);
        self.t2.push(page);
        Access::Miss
    }

    fn held(&self) -> usize {
        self.t1.len() + self.t2.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Arc;
    use crate::replacement::policy::{Access, Policy, hits_of};

    #[test]
    fn a_scan_does_not_push_out_what_was_accessed_twice() {
        let mut string = vec![0, 0, 1, 1];
        string.extend(2..40);
        string.extend([0, 1]);
        assert_eq!(hits_of("arc", &string, 4), [1, 3, 42, 43]);
    }

    /// Goal: a hit in a ghost list moves the target as the paper has it: by one, or by the ratio of
    /// the lists if that is more.
    #[test]
    fn ghosts_move_the_target() {
        let mut arc = Arc::new(20, 4);
        // 0 and 1 are in t2; 2 and 3 in t1; 4 and 5 push 2 and 3 into b1.
        for page in [0, 0, 1, 1, 2, 3, 4, 5] {
            arc.access(page);
        }
        assert_eq!((arc.t1.len(), arc.t2.len(), arc.b1.len(), arc.b2.len()), (2, 2, 2, 0));
        assert_eq!(arc.access(2), Access::Miss);
        assert!((arc.p - 1.0).abs() < 1e-9, "{}", arc.p);
        assert!(arc.t2.contains(2));
        // t1 is above the target, so its oldest page became a ghost.
        assert!(arc.b1.contains(4));
    }
}
