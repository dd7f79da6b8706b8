//! Which resident folio goes out next: two queues, and the clock of the ghosts.
//!
//! This is the rule alone, without locks: the pager keeps the queues behind a lock and the clock in
//! an atomic, and `zfolio bench replacement` counts what the rule misses on recorded accesses. Why
//! the rule is as it is stands in `replacement.rs` of the pager.
//!
//! # Invariants
//!
//! - `RULE-1` Each queue is ordered by the time of the push: the oldest entry leaves first.
//!
//! # Cost
//!
//! 8 bytes for each entry, and as many for each entry that room was made for.

use std::collections::VecDeque;

/// Which queue a folio joins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Folios that came back soon, or came while there was room.
    Main,
    /// Folios brought in once.
    Probation,
}

/// The queues main and probation. An entry is whatever identifies a folio.
#[derive(Debug, Default)]
pub struct Queues {
    main: VecDeque<usize>,
    probation: VecDeque<usize>,
}

impl Queues {
    /// Makes room for `folios` more entries in each queue.
    pub fn reserve(&mut self, folios: usize) {
        self.main.reserve(folios);
        self.probation.reserve(folios);
    }

    /// Appends a folio to a queue, as the youngest.
    pub fn push(&mut self, folio: usize, queue: Queue) {
        self.queue_mut(queue).push_back(folio);
    }

    /// Takes the folio that should go out next, and returns its queue too. With more than `share`
    /// entries in probation, that is the oldest of probation.
    pub fn pop(&mut self, share: usize) -> Option<(usize, Queue)> {
        let probation = self.probation.len() > share || self.main.is_empty();
        let queue = if probation { Queue::Probation } else { Queue::Main };
        Some((self.queue_mut(queue).pop_front()?, queue))
    }

    /// Takes the oldest folio of `queue`, if that is `folio`.
    pub fn pop_if(&mut self, folio: usize, queue: Queue) -> bool {
        let queue = self.queue_mut(queue);
        let next = queue.front() == Some(&folio);
        if next {
            queue.pop_front();
        }
        next
    }

    /// The oldest of each queue, one part in `parts`.
    pub fn oldest(&self, parts: usize) -> impl Iterator<Item = usize> + '_ {
        let part = move |queue: &VecDeque<usize>| queue.len().div_ceil(parts);
        let main = self.main.iter().take(part(&self.main));
        main.chain(self.probation.iter().take(part(&self.probation))).copied()
    }

    /// Drops the entries for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        self.main.retain(|folio| keep(*folio));
        self.probation.retain(|folio| keep(*folio));
    }

    /// Entries of both queues.
    #[must_use]
    pub fn len(&self) -> usize {
        self.main.len() + self.probation.len()
    }

    /// Whether both queues are empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries of the main queue.
    #[must_use]
    pub fn main_len(&self) -> usize {
        self.main.len()
    }

    /// How many entries both queues have room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.main.capacity() + self.probation.capacity()
    }

    fn queue_mut(&mut self, queue: Queue) -> &mut VecDeque<usize> {
        match queue {
            Queue::Main => &mut self.main,
            Queue::Probation => &mut self.probation,
        }
    }
}

/// Whether a folio that was captured at `time` came back soon enough for main, with `main` entries
/// in that queue. Both times are numbers of captures from probation, wrapping; `now` is the later.
#[must_use]
pub fn came_back_soon(time: u32, now: u32, main: usize) -> bool {
    (now.wrapping_sub(time) as usize) < main
}

#[cfg(test)]
mod tests {
    use super::{Queue, Queues, came_back_soon};
    use crate::testing::{Random, seed};

    /// Goal: the queues agree with a naive model. Method: seeded random pushes and pops; the model
    /// is one list of entries with their queues, oldest first.
    #[test]
    fn queues_agree_with_one_list() {
        let seed = seed();
        let mut random = Random::new(seed);
        for round in 0..200 {
            let share = random.below(5);
            let mut queues = Queues::default();
            let mut list: Vec<(usize, Queue)> = Vec::new();
            for step in 0..200 {
                let context = format!("seed {seed}, round {round}, step {step}");
                let of =
                    |list: &[(usize, Queue)], q| list.iter().filter(|entry| entry.1 == q).count();
                match random.below(8) {
                    0..4 => {
                        let queue = [Queue::Main, Queue::Probation][random.below(2)];
                        queues.push(step, queue);
                        list.push((step, queue));
                    }
                    4..6 => {
                        let probation =
                            of(&list, Queue::Probation) > share || of(&list, Queue::Main) == 0;
                        let queue = if probation { Queue::Probation } else { Queue::Main };
                        let at = list.iter().position(|entry| entry.1 == queue);
                        assert_eq!(queues.pop(share), at.map(|at| list.remove(at)), "{context}");
                    }
                    6 => {
                        let (folio, queue) = (random.below(step + 1), Queue::Main);
                        let at = list.iter().position(|entry| entry.1 == queue);
                        let next = at.filter(|at| list[*at].0 == folio);
                        assert_eq!(queues.pop_if(folio, queue), next.is_some(), "{context}");
                        next.map(|at| list.remove(at));
                    }
                    _ => {
                        let dropped = random.below(7);
                        queues.retain(|folio| folio % 7 != dropped);
                        list.retain(|(folio, _)| folio % 7 != dropped);
                    }
                }
                assert_eq!(queues.len(), list.len(), "{context}");
                let oldest = [Queue::Main, Queue::Probation].into_iter().flat_map(|queue| {
                    let all = list.iter().filter(move |entry| entry.1 == queue);
                    all.take(of(&list, queue).div_ceil(3)).map(|entry| entry.0)
                });
                assert!(queues.oldest(3).eq(oldest), "{context}");
                assert_eq!(queues.main_len(), of(&list, Queue::Main), "{context}");
            }
        }
    }

    /// Goal: the number of captures in between decides, also when the clock wraps.
    #[test]
    fn soon_is_fewer_captures_than_main_has_entries() {
        assert!(came_back_soon(5, 5, 1) && !came_back_soon(5, 5, 0));
        assert!(came_back_soon(5, 7, 3) && !came_back_soon(5, 7, 2));
        assert!(came_back_soon(u32::MAX, 1, 3) && !came_back_soon(u32::MAX, 1, 2));
    }
}
