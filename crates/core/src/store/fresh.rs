//! The entries that were fetched last.
//!
//! Who has an entry fetched loads it soon: a fault, or a thread that prefetches ahead of a walk. If the walker
//! took it before, it would have to be read again; when the pool holds little else, it would be taken within
//! microseconds, whatever its age. So what was fetched stays until it was loaded once (`FRESH` in the entry's
//! state), or until [`BYTES`] more were fetched: nobody may come for it. It goes too if nothing was fetched while many
//! walks (`VAIN_WALKS`) found nothing else; those do not count while something is being read, unless there was no room
//! for what came.
//!
//! # Cost
//!
//! 8 bytes for each of the last [`COUNT`] entries.

use std::collections::VecDeque;

use crate::zsmalloc::Handle;

/// The bytes of the entries that stay, beside the newest: a prefetching thread has about half of it on its way.
const BYTES: usize = 1 << 20;

/// As many entries stay at most, and so many at least, however large they are: twice the unit of a fault and the two
/// beyond it, which are the smallest window of a walk, since two walks take turns where memory is copied. Of units of 2
/// MiB these are 12 MiB that may be held against who lacks memory, beside what is waited for.
const COUNT: usize = 512;
const COUNT_MIN: usize = 6;

/// See the module.
#[derive(Debug)]
pub(super) struct Fresh {
    /// The oldest first. The entry of a handle may have ended, or another may have the handle.
    queue: VecDeque<(Handle, u32)>,
    bytes: usize,
}

impl Fresh {
    /// Allocates; nothing does later.
    pub(super) fn new() -> Fresh {
        Fresh { queue: VecDeque::with_capacity(COUNT), bytes: 0 }
    }

    /// Adds an entry of `length` bytes; `let_go` is called with those that need not stay any more.
    pub(super) fn push(&mut self, handle: Handle, length: usize, mut let_go: impl FnMut(Handle)) {
        while self.queue.len() == COUNT || self.queue.len() >= COUNT_MIN && self.bytes > BYTES {
            let Some((oldest, length)) = self.queue.pop_front() else { break };
            self.bytes -= length as usize;
            let_go(oldest);
        }
        self.queue.push_back((handle, u32::try_from(length).expect("a unit is below 4 GiB")));
        self.bytes += length;
    }

    /// None need stay any more.
    pub(super) fn clear(&mut self, mut let_go: impl FnMut(Handle)) {
        self.queue.drain(..).for_each(|(handle, _)| let_go(handle));
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::{BYTES, COUNT, COUNT_MIN, Fresh};
    use crate::zsmalloc::Handle;

    /// A regression: 16 units stayed at least, 32 MiB of units of 2 MiB. Goal: what stays of large units is little.
    #[test]
    fn large_entries_hold_little_memory() {
        for length in [1 << 16, 1 << 18, 1 << 20, 1 << 21] {
            let mut fresh = Fresh::new();
            for number in 0..100 {
                fresh.push(Handle::from_index(number), length, |_| {});
                assert!(
                    fresh.bytes <= (BYTES + length).max(6 * length),
                    "{length}: {}",
                    fresh.bytes
                );
            }
            assert!(fresh.queue.len() >= 6, "{length}: two walks need them");
        }
    }

    /// Goal: the entries that stay are the newest, of [`BYTES`] in all, but [`COUNT_MIN`] at least and [`COUNT`] at
    /// most.
    #[test]
    fn the_oldest_are_let_go_first() {
        for (length, stay) in [(100, COUNT), (4096, BYTES / 4096 + 1), (1 << 21, COUNT_MIN)] {
            let mut fresh = Fresh::new();
            let mut gone = 0;
            for number in 0..3000 {
                fresh.push(Handle::from_index(number), length, |handle| {
                    assert_eq!(handle, Handle::from_index(gone));
                    gone += 1;
                });
                let stays = number as usize + 1 - gone as usize;
                assert_eq!(stays, (number as usize + 1).min(stay), "of {length} bytes");
            }
            assert_eq!(fresh.bytes, fresh.queue.len() * length);
            let (left, mut cleared) = (fresh.queue.len(), 0);
            fresh.clear(|_| cleared += 1);
            assert_eq!((cleared, fresh.queue.len(), fresh.bytes), (left, 0, 0));
        }
    }
}
