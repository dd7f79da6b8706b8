//! Where queues were left: how a front end is known that goes on with a disk which it has used.
//!
//! A front end whose connection ends may come back while its guest runs, with QEMU's `reconnect=1`: also to another
//! disk at the same path, since the process that had the first one has ended. The guest would take that disk's zeros
//! for what it has written. The messages do not say which disk is meant. But they say where each queue goes on
//! (`SET_VRING_BASE`): at 0 when a driver begins, and else at the place that its disk has left it at.
//!
//! A **mark** is such a place: a queue, and the entry of its rings that is served next. Each connection that ends
//! leaves the marks of its queues; they are saved with the contents ([`Marks::to_notes`]), once all clients have left.
//! A queue that goes on at a mark is one of this disk's, and takes its mark; every other one is refused
//! (`VU-7`). Whoever drops the contents forgets the marks: a guest that has left would take zeros for what it has
//! written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use zfolio_core::sync::Mutex;
use zfolio_core::zram::NOTES_BYTES_MAX;

use super::{CONNECTIONS_MAX, QUEUES_MAX};

/// The rank of the lock. It is taken while a session's is held, for a look at all marks, and while that of a disk's
/// end is, when a reset forgets them.
const RANK_MARKS: u8 = 3;

/// So many marks are kept: those of as many front ends as there may be at once. The oldest are forgotten, which are
/// mostly those of guests that were turned off.
const MARKS_MAX: usize = CONNECTIONS_MAX * QUEUES_MAX as usize;

/// A front end that has ended its connection by itself may be back before that was noticed: the mark is waited for,
/// half a second at most.
const TURNS: u32 = 50;
const TURN: Duration = Duration::from_millis(10);

const _: () = assert!(MARKS_MAX * Mark::BYTES <= NOTES_BYTES_MAX);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mark {
    queue: u16,
    next: u16,
}

impl Mark {
    const BYTES: usize = 4;
}

/// See the module.
#[derive(Debug)]
pub struct Marks(Mutex<RANK_MARKS, VecDeque<Mark>>);

impl Default for Marks {
    fn default() -> Marks {
        Marks(Mutex::new(VecDeque::new()))
    }
}

impl Marks {
    /// The marks of a disk that was saved, from its notes.
    #[must_use]
    pub fn from_notes(notes: &[u8]) -> Marks {
        let marks = Marks::default();
        for mark in notes.chunks_exact(Mark::BYTES) {
            let half = |at: usize| u16::from_le_bytes([mark[at], mark[at + 1]]);
            marks.leave(half(0), half(2));
        }
        marks
    }

    /// The notes that [`Marks::from_notes`] reads.
    #[must_use]
    pub fn to_notes(&self) -> Vec<u8> {
        let bytes = |mark: &Mark| [mark.queue.to_le_bytes(), mark.next.to_le_bytes()].concat();
        self.0.lock().iter().flat_map(bytes).collect()
    }

    /// A queue stands at an entry. Every driver begins at 0, so that is no mark.
    pub(super) fn leave(&self, queue: u16, next: u16) {
        if next == 0 {
            return;
        }
        let mut marks = self.0.lock();
        if marks.len() == MARKS_MAX {
            marks.pop_front();
        }
        marks.push_back(Mark { queue, next });
    }

    /// The contents are dropped: nobody goes on with them any more.
    pub(super) fn forget(&self) {
        self.0.lock().clear();
    }

    /// Whether a queue may go on at an entry, perhaps in a moment: as long as another connection is there, which has
    /// not left its marks. It takes the mark.
    pub(super) fn wait_for(self: &Arc<Marks>, queue: u16, next: u16) -> bool {
        for _ in 0..TURNS {
            // The server has the marks, and each connection, this one too. Another one leaves its marks before it ends.
            let has_others = Arc::strong_count(self) > 2;
            if self.take(queue, next) {
                return true;
            }
            if !has_others {
                break;
            }
            std::thread::sleep(TURN);
        }
        false
    }

    /// Whether a queue may go on at an entry; it takes the mark.
    fn take(&self, queue: u16, next: u16) -> bool {
        if next == 0 {
            return true;
        }
        let mut marks = self.0.lock();
        let found = marks.iter().position(|mark| *mark == Mark { queue, next });
        found.and_then(|at| marks.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::{Random, seed};

    use super::{MARKS_MAX, Marks};

    /// Goal: a queue goes on where it was left and nowhere else, once for each time that it was left, also behind a
    /// save; the oldest marks are forgotten first. Method: few queues and places, against a plain list.
    #[test]
    fn a_queue_goes_on_where_it_was_left() {
        let seed = seed();
        let mut random = Random::new(seed);
        let (mut marks, mut model) = (Marks::default(), Vec::new());
        let (mut taken, mut refused) = (0, 0);
        for step in 0..20_000 {
            // Often full, often empty.
            let leaves = if step / 5000 % 2 == 0 { 6 } else { 3 };
            let small = |random: &mut Random, below| u16::try_from(random.below(below)).unwrap();
            let (queue, next) = (small(&mut random, 3), small(&mut random, 2000));
            match random.below(8) {
                what if what < leaves => {
                    marks.leave(queue, next);
                    if next > 0 {
                        model.push((queue, next));
                    }
                    if model.len() > MARKS_MAX {
                        model.remove(0);
                    }
                }
                7 => marks = Marks::from_notes(&marks.to_notes()),
                _ => {
                    let (queue, next) = match random.below(2) {
                        0 => (queue, next),
                        _ => *model.get(random.below(MARKS_MAX)).unwrap_or(&(queue, next)),
                    };
                    let at = model.iter().position(|mark| *mark == (queue, next));
                    at.map(|at| model.remove(at));
                    let goes_on = marks.take(queue, next);
                    assert_eq!(goes_on, at.is_some() || next == 0, "seed {seed}, step {step}");
                    *if goes_on { &mut taken } else { &mut refused } += 1;
                }
            }
        }
        assert!(taken > 1000 && refused > 1000, "seed {seed}: {taken}, {refused}");
        assert!(Marks::from_notes(&marks.to_notes()[..3]).to_notes().is_empty());
    }
}
