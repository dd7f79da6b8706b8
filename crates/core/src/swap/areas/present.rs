//! Which cells have an area.
//!
//! # Concurrency
//!
//! A bit for each cell, changed with the cell's lock held. Who finds a bit sees what was done before it was set. What
//! the cell has meanwhile is asked of the cell.

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::AtomicU32;
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::super::location::{AREAS_MAX, AreaId};

/// See the module.
#[derive(Default, Debug)]
pub(super) struct Present(AtomicU32);

const _: () = assert!(AREAS_MAX <= 32, "a bit for each");

impl Present {
    /// The cell has an area now.
    pub(super) fn add(&self, id: AreaId) {
        // Release: pairs with the Acquire in ids().
        self.0.fetch_or(1 << id.get(), Release);
    }

    /// The cell has none any more.
    pub(super) fn remove(&self, id: AreaId) {
        // Release: what was added before is still seen with its bit.
        self.0.fetch_and(!(1 << id.get()), Release);
    }

    /// The cells that have one.
    pub(super) fn ids(&self) -> impl Iterator<Item = AreaId> + use<> {
        // Acquire: pairs with the Release in add().
        let present = self.0.load(Acquire);
        AreaId::all().filter(move |id| present >> id.get() & 1 == 1)
    }
}

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;
    use std::sync::atomic::Ordering::Relaxed;

    use super::{AreaId, Present};

    /// Goal: threads that add and remove areas leave each other's alone, and who finds an area sees what it is. Method:
    /// one thread adds the area 0, another removes 1 and adds 2; 3 is there all the time.
    #[test]
    fn loom_areas_come_and_go() {
        loom::model(|| {
            let id = |number| AreaId::new(number).expect("one of 16");
            let cells = [0, 1, 0, 1].map(AtomicU32::new);
            let shared = Arc::new((Present::default(), cells));
            shared.0.add(id(1));
            shared.0.add(id(3));
            let threads = [0, 2].map(|number| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (present, cells) = &*shared;
                    if number == 2 {
                        present.remove(id(1));
                    }
                    cells[number].store(1, Relaxed);
                    present.add(id(number));
                })
            });
            let (present, cells) = &*shared;
            let found: Vec<usize> = present.ids().map(AreaId::get).collect();
            assert!(found.contains(&3), "{found:?}");
            let is_made = |number: &usize| cells[*number].load(Relaxed) == 1;
            assert!(found.iter().all(is_made), "{found:?}: one of them is not there yet");
            threads.into_iter().for_each(|thread| thread.join().expect("nothing panics"));
            assert!(present.ids().map(AreaId::get).eq([0, 2, 3]));
        });
    }
}
