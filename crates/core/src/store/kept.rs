//! Where the bytes of entries are that are in the pool and on the backing.
//!
//! An entry that was fetched need not be written again: its bytes never change. So it keeps its location until it
//! ends, and can leave the pool at any moment without a transfer. The slot of its handle has no room for the
//! location while it holds the object's address; the location is here instead.
//!
//! # Invariants
//!
//! - `KEPT-1` An entry is here if and only if its state says `kept`, but for moments under the lock of rank
//!   `RANK_BACKING`, and for the moment in which its owner ends it. A handle that is here is not given out anew:
//!   the owner removes it before it frees the handle.
//!
//! # Cost
//!
//! 16 bytes in each of [`BUCKETS`] buckets. A handle has a set of [`WAYS`] buckets; if all of them are taken, a newer
//! entry gets that of the oldest one which can do without its location. With one bucket for each handle two of 64
//! entries that were fetched together met in every second batch or so, and one of the two stayed in memory for good.

use std::ops::Range;

use super::backing::{Location, RANK_BACKING};
use crate::sync::Mutex;
use crate::zsmalloc::Handle;

/// Entries that keep their locations, at most. Only those are many that come back while the pool has room.
const BUCKETS: usize = 4096;

/// Buckets that a handle may have. Of 64 entries that are fetched together nine meet in one set next to never.
const WAYS: usize = 8;

const SETS: usize = BUCKETS / WAYS;

const _: () = assert!(SETS * WAYS == BUCKETS);

/// Rank of the lock: taken with the store's lock held, or without; none is taken below it.
const RANK_KEPT: u8 = RANK_BACKING + 1;

type Bucket = Option<(Handle, Location)>;

/// See the module.
#[derive(Debug)]
pub(super) struct Kept(Mutex<RANK_KEPT, Buckets>);

#[derive(Debug)]
struct Buckets {
    /// Set by set; in each the older ones first.
    all: Box<[Bucket]>,
    /// Where [`Buckets::next`] looks next.
    hand: usize,
}

impl Buckets {
    /// The place of the next entry that is one of `these`; the hand goes round once at most.
    fn next(&mut self, these: &mut dyn FnMut(Handle) -> bool) -> Option<usize> {
        for _ in 0..BUCKETS {
            let at = self.hand;
            self.hand = (at + 1) % BUCKETS;
            if self.all[at].is_some_and(|(handle, _)| these(handle)) {
                return Some(at);
            }
        }
        None
    }
}

impl Kept {
    pub(super) fn new() -> Kept {
        Kept(Mutex::new(Buckets { all: vec![None; BUCKETS].into_boxed_slice(), hand: 0 }))
    }

    /// The buckets of a handle. Handles are given out in rising order, so neighbours have different sets.
    fn set(handle: Handle) -> Range<usize> {
        let first = handle.to_raw() as usize % SETS * WAYS;
        first..first + WAYS
    }

    /// Notes the location of an entry. If its set is full, `give_up` says whether an entry there can do without its
    /// own, and makes its state say so; that location is returned then. `Err`: none can.
    pub(super) fn insert(
        &self,
        handle: Handle,
        location: Location,
        mut give_up: impl FnMut(Handle) -> bool,
    ) -> Result<Option<Location>, ()> {
        let mut buckets = self.0.lock();
        let set = &mut buckets.all[Kept::set(handle)];
        debug_assert!(set.iter().flatten().all(|(other, _)| *other != handle), "KEPT-1");
        let empty = set.iter().position(Option::is_none);
        let given_up = || set.iter().flatten().position(|(other, _)| give_up(*other));
        let place = empty.or_else(given_up).ok_or(())?;
        // The newest is the last of its set.
        set[place..].rotate_left(1);
        Ok(set[WAYS - 1].replace((handle, location)).map(|(_, location)| location))
    }

    /// Takes the location of some entry that can do without it (`give_up`), and returns it.
    pub(super) fn take_one(&self, mut give_up: impl FnMut(Handle) -> bool) -> Option<Location> {
        let mut buckets = self.0.lock();
        let at = buckets.next(&mut give_up)?;
        buckets.all[at].take().map(|(_, location)| location)
    }

    /// Finds some entry that can leave the pool for its location (`begin`).
    pub(super) fn find(&self, mut begin: impl FnMut(Handle) -> bool) -> Option<Handle> {
        let mut buckets = self.0.lock();
        let at = buckets.next(&mut begin)?;
        buckets.all[at].map(|(handle, _)| handle)
    }

    /// The location of an entry.
    pub(super) fn get(&self, handle: Handle) -> Option<Location> {
        let buckets = self.0.lock();
        let mut set = buckets.all[Kept::set(handle)].iter().flatten();
        set.find(|(kept, _)| *kept == handle).map(|(_, location)| *location)
    }

    /// Forgets the location of an entry, and returns it.
    pub(super) fn remove(&self, handle: Handle) -> Option<Location> {
        let mut buckets = self.0.lock();
        let mut set = buckets.all[Kept::set(handle)].iter_mut();
        set.find_map(|bucket| bucket.take_if(|(kept, _)| *kept == handle))
            .map(|(_, location)| location)
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, Location, SETS, WAYS};
    use crate::zsmalloc::Handle;

    /// Goal: a location is found until it is removed, and a newer entry gets the bucket of an older one only if its set
    /// is full and that can do without; the oldest is asked first.
    #[test]
    fn a_bucket_goes_to_the_newer_entry() {
        let kept = Kept::new();
        let handle = |index: usize| Handle::from_index(u32::try_from(index).expect("small"));
        let location = |number| Location::new(number).expect("small");
        let never = |_| -> bool { panic!("the bucket is free") };
        assert_eq!(kept.insert(handle(1), location(10), never), Ok(None));
        assert_eq!(kept.insert(handle(2), location(20), never), Ok(None));
        assert_eq!(kept.get(handle(1)), Some(location(10)));
        let like = |number: usize| handle(1 + number * SETS);
        for number in 1..WAYS {
            assert_eq!(kept.insert(like(number), location(100 + number as u64), never), Ok(None));
        }
        let newer = like(WAYS);
        assert_eq!(kept.get(newer), None);
        assert_eq!(kept.insert(newer, location(30), |_| false), Err(()));
        assert_eq!(kept.get(handle(1)), Some(location(10)));
        let gives_up = |other| other == handle(1);
        assert_eq!(kept.insert(newer, location(30), gives_up), Ok(Some(location(10))));
        assert_eq!(kept.remove(handle(1)), None);
        assert_eq!(kept.insert(handle(1), location(31), |_| true), Ok(Some(location(101))));
        assert_eq!(kept.remove(like(3)), Some(location(103)));
        assert_eq!(kept.insert(like(1), location(32), never), Ok(None), "the empty one");
        assert_eq!(kept.insert(like(3), location(33), |_| true), Ok(Some(location(102))));
        assert_eq!(kept.get(newer), Some(location(30)), "it came after these");
        (4..WAYS).for_each(|number| assert!(kept.remove(like(number)).is_some()));
        let rest = [(1, 32), (3, 33), (0, 31)];
        for (number, place) in rest {
            assert_eq!(kept.remove(like(number)), Some(location(place)));
        }
        assert_eq!(kept.remove(newer), Some(location(30)));
        assert_eq!(kept.remove(handle(2)), Some(location(20)));
        assert_eq!(kept.remove(handle(2)), None);
        for at in [3, 4] {
            assert_eq!(kept.insert(handle(at), location(at as u64), never), Ok(None));
        }
        assert_eq!(kept.take_one(|handle| handle.to_raw() == 5), Some(location(4)));
        assert_eq!(kept.take_one(|_| false), None);
        assert_eq!(kept.take_one(|_| true), Some(location(3)));
        assert_eq!(kept.take_one(|_| true), None);
    }
}
