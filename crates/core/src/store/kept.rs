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
//! 16 bytes in each of [`BUCKETS`] buckets. A handle has one bucket; a newer entry takes it from an older one,
//! whose location is given up.

use super::backing::{Location, RANK_BACKING};
use crate::sync::Mutex;
use crate::zsmalloc::Handle;

/// Entries that keep their locations, at most. Only those are many that come back while the pool has room.
const BUCKETS: usize = 4096;

/// Rank of the lock: taken with the store's lock held, or without; none is taken below it.
const RANK_KEPT: u8 = RANK_BACKING + 1;

type Bucket = Option<(Handle, Location)>;

/// See the module.
#[derive(Debug)]
pub(super) struct Kept(Mutex<RANK_KEPT, Buckets>);

#[derive(Debug)]
struct Buckets {
    all: Box<[Bucket]>,
    /// Where [`Kept::take_one`] looks next.
    hand: usize,
}

impl Kept {
    pub(super) fn new() -> Kept {
        Kept(Mutex::new(Buckets { all: vec![None; BUCKETS].into_boxed_slice(), hand: 0 }))
    }

    /// Handles are given out in rising order, so neighbours have different buckets.
    fn bucket(handle: Handle) -> usize {
        handle.to_raw() as usize % BUCKETS
    }

    /// Notes the location of an entry. `give_up` says whether the entry that has the bucket can do without its
    /// own, and makes its state say so; that location is returned then. `Err`: it cannot.
    pub(super) fn insert(
        &self,
        handle: Handle,
        location: Location,
        give_up: impl FnOnce(Handle) -> bool,
    ) -> Result<Option<Location>, ()> {
        let mut buckets = self.0.lock();
        let bucket = &mut buckets.all[Kept::bucket(handle)];
        if let Some((other, _)) = *bucket {
            debug_assert_ne!(other, handle, "KEPT-1");
            if !give_up(other) {
                return Err(());
            }
        }
        Ok(bucket.replace((handle, location)).map(|(_, location)| location))
    }

    /// Takes the location of some entry that can do without it (`give_up`), and returns it.
    pub(super) fn take_one(&self, mut give_up: impl FnMut(Handle) -> bool) -> Option<Location> {
        let mut buckets = self.0.lock();
        for _ in 0..BUCKETS {
            let at = buckets.hand;
            buckets.hand = (at + 1) % BUCKETS;
            if let Some((_, location)) = buckets.all[at].take_if(|(handle, _)| give_up(*handle)) {
                return Some(location);
            }
        }
        None
    }

    /// The location of an entry.
    pub(super) fn get(&self, handle: Handle) -> Option<Location> {
        let bucket = self.0.lock().all[Kept::bucket(handle)];
        bucket.filter(|(kept, _)| *kept == handle).map(|(_, location)| location)
    }

    /// Forgets the location of an entry, and returns it.
    pub(super) fn remove(&self, handle: Handle) -> Option<Location> {
        let mut buckets = self.0.lock();
        let bucket = &mut buckets.all[Kept::bucket(handle)];
        bucket.take_if(|(kept, _)| *kept == handle).map(|(_, location)| location)
    }
}

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Kept, Location};
    use crate::zsmalloc::Handle;

    /// Goal: a location is found until it is removed, and a newer entry gets the bucket of an older one only if that
    /// can do without.
    #[test]
    fn a_bucket_goes_to_the_newer_entry() {
        let kept = Kept::new();
        let handle = |index: usize| Handle::from_index(u32::try_from(index).expect("small"));
        let location = |number| Location::new(number).expect("small");
        let never = |_| -> bool { panic!("the bucket is free") };
        assert_eq!(kept.insert(handle(1), location(10), never), Ok(None));
        assert_eq!(kept.insert(handle(2), location(20), never), Ok(None));
        assert_eq!(kept.get(handle(1)), Some(location(10)));
        let newer = handle(1 + BUCKETS);
        assert_eq!(kept.get(newer), None);
        assert_eq!(kept.insert(newer, location(30), |_| false), Err(()));
        assert_eq!(kept.get(handle(1)), Some(location(10)));
        let gives_up = |other| other == handle(1);
        assert_eq!(kept.insert(newer, location(30), gives_up), Ok(Some(location(10))));
        assert_eq!(kept.remove(handle(1)), None);
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
