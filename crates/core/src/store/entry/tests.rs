//! The states of a row.

#[cfg(not(feature = "loom"))]
use super::{AGES, Cell, CodecId, Dead, NotRead, Place, Row, State, Word};
#[cfg(not(feature = "loom"))]
use crate::store::Key;

#[cfg(not(feature = "loom"))]
fn row() -> [std::sync::atomic::AtomicU32; 4] {
    Default::default()
}

/// How many looks of the walker take an entry; `None`: it stays.
#[cfg(not(feature = "loom"))]
fn looks<W: Word>(cell: Cell<'_, W>) -> Option<u32> {
    (1..10).find(|_| cell.begin_write(None).is_some())
}

/// Goal: a row gives back what was put into it. Method: every codec and place, every checksum's ends.
#[test]
#[cfg(not(feature = "loom"))]
fn a_row_keeps_what_it_was_begun_with() {
    let key = Key::new([3; Key::BYTES]);
    for (unit, place) in [(vec![9; 4096], Place::SameFilled), (vec![9; 4097], Place::Pool)] {
        let checksum = key.checksum(&unit);
        for number in 0..super::CODECS_MAX {
            let codec = CodecId::new(number).expect("a codec's number");
            for is_raw in [false, true] {
                let words = row();
                let row = Row(&words);
                row.begin(place, codec, is_raw, checksum);
                let state = row.cell().load();
                assert_eq!((state.place(), state.codec(), state.is_raw()), (place, codec, is_raw));
                assert_eq!(row.checksum(state), checksum);
                row.cell().protect();
                assert_eq!(row.checksum(row.cell().load()), checksum, "ROW-4");
                assert_eq!(row.cell().end().place(), place);
                assert_eq!(row.cell().load(), State::VACANT);
            }
        }
    }
}

/// Goal: the second chance. Method: looks until an entry is taken, after a store and after a load.
#[test]
#[cfg(not(feature = "loom"))]
fn an_entry_that_was_loaded_is_passed_longer() {
    let words = row();
    let row = Row(&words);
    let looks = |cell: Cell<'_, _>| looks(cell).expect("it is taken");
    row.begin(Place::Pool, CodecId::FIRST, false, Key::new([3; 192]).checksum(&vec![1; 4097]));
    assert_eq!(looks(row.cell()), 2);
    assert_eq!(row.cell().not_written(), Ok(()));
    assert_eq!(looks(row.cell()), AGES, "it was wanted, or could not be written");
    assert_eq!(row.cell().written(), Ok(()));
    assert!(row.cell().begin_write(None).is_none(), "it is not in the pool");
    assert_eq!(row.cell().begin_read(false), Ok(()));
    assert!(row.cell().begin_read(false).is_err(), "one request at a time");
    let ends = [
        (NotRead::Failed, (true, false)),
        (NotRead::Untried, (false, false)),
        (NotRead::NoRoom, (false, true)),
        (NotRead::Untried, (false, true)),
        (NotRead::Failed, (true, false)),
    ];
    for (why, told) in ends {
        assert_eq!(row.cell().not_read(why), Ok(()));
        let state = row.cell().load();
        assert_eq!((state.is_unread(), state.has_come()), told, "{why:?}");
        assert_eq!(row.cell().begin_read(false), Ok(()));
        let state = row.cell().load();
        assert!(!state.is_unread(), "nobody knows yet how this read ends");
        assert_eq!(state.has_come(), told.1, "{why:?}: it has come before");
    }
    assert_eq!(row.cell().not_read(NotRead::Lost), Ok(()));
    assert!(row.cell().begin_read(false).is_err_and(State::has_failed), "it cannot be read");
    assert_eq!(row.cell().end().place(), Place::Backing);
}

/// Goal: an entry whose object was damaged is lost, also once it was written, unless the backing has what was stored.
#[test]
#[cfg(not(feature = "loom"))]
fn a_damaged_object_spoils_no_good_copy() {
    let words = row();
    let row = Row(&words);
    let cell = row.cell();
    row.begin(Place::Pool, CodecId::FIRST, false, Key::new([3; 192]).checksum(&vec![1; 4097]));
    let write = || {
        assert!((1..10).any(|_| cell.begin_write(None).is_some()));
        assert_eq!(cell.written(), Ok(()));
        cell.load()
    };
    assert!(!write().is_in_doubt());
    cell.spoil();
    assert!(!cell.load().is_in_doubt(), "it has left the pool");
    assert_eq!(cell.begin_read(true), Ok(()));
    assert!(cell.load().is_in_doubt(), "the read may fail");
    assert_eq!(cell.read(true), Ok(()));
    cell.protect();
    cell.spoil();
    assert!(cell.load().has_failed());
    assert!(!cell.give_up(), "the backing has the only good copy");
    assert!(!write().is_in_doubt(), "the backing has had it");
    assert_eq!((cell.begin_read(true), cell.read(false)), (Ok(()), Ok(())));
    cell.protect();
    cell.spoil();
    assert!(write().has_failed(), "what was damaged was written");
    assert_eq!(cell.end().place(), Place::Backing);
}

#[test]
#[cfg(not(feature = "loom"))]
fn an_entry_that_ends_in_flight_is_dead() {
    let words = row();
    let cell = Row(&words).cell();
    let begin = |age: u32| {
        cell.0.store(Place::Pool as u32 | age << super::AGE_SHIFT, super::Relaxed);
        assert!(cell.begin_write(None).is_some());
    };
    begin(0);
    assert_eq!(cell.end().place(), Place::Writing);
    assert_eq!(cell.written(), Err(Dead));
    assert_eq!(cell.not_written(), Err(Dead));
    cell.vacate();
    begin(0);
    assert_eq!((cell.written(), cell.begin_read(false)), (Ok(()), Ok(())));
    assert_eq!(cell.end().place(), Place::Reading);
    assert_eq!((cell.read(false), cell.not_read(NotRead::Lost)), (Err(Dead), Err(Dead)));
}

/// Goal: an incompressible entry, which saves nothing in the pool, is taken a look sooner.
#[test]
#[cfg(not(feature = "loom"))]
fn an_incompressible_entry_is_taken_sooner() {
    let words = row();
    let row = Row(&words);
    row.begin(Place::Pool, CodecId::FIRST, true, Key::new([3; 192]).checksum(&vec![1; 4097]));
    assert_eq!(looks(row.cell()), Some(1));
    assert_eq!(row.cell().not_written(), Ok(()));
    assert_eq!(looks(row.cell()), Some(AGES - 1), "it was wanted, or could not be written");
}

/// Goal: an entry for which somebody waits stays until it was loaded once.
#[test]
#[cfg(not(feature = "loom"))]
fn a_wanted_entry_stays_until_it_was_loaded() {
    let words = row();
    let cell = Row(&words).cell();
    cell.0.store(Place::Backing as u32, super::Relaxed);
    assert_eq!(cell.begin_read(true), Ok(()));
    assert_eq!(cell.read(false), Ok(()));
    assert_eq!(looks(cell), None);
    cell.protect();
    assert_eq!(looks(cell), Some(AGES));
    cell.0.store(Place::Backing as u32, super::Relaxed);
    assert_eq!(cell.begin_read(false), Ok(()));
    cell.want();
    assert_eq!(cell.read(true), Ok(()));
    assert_eq!(looks(cell), None);
}

/// A regression: an entry whose last reader had stopped waiting stayed in the pool for good. Goal: it stays as long as
/// any other that was fetched. Method: the reader stops before the read has ended, after it, or when it has failed.
#[test]
#[cfg(not(feature = "loom"))]
fn an_entry_that_nobody_waits_for_any_more_leaves() {
    let words = row();
    let cell = Row(&words).cell();
    for stops in ["before", "after", "failed"] {
        cell.0.store(Place::Backing as u32, super::Relaxed);
        assert_eq!(cell.begin_read(true), Ok(()));
        match stops {
            "before" => cell.unwant(),
            "failed" => {
                assert_eq!(cell.not_read(NotRead::Failed), Ok(()));
                assert_eq!(cell.begin_read(false), Ok(()));
            }
            _ => {}
        }
        assert_eq!(cell.read(false), Ok(()));
        if stops == "after" {
            cell.unwant();
        }
        assert_eq!(looks(cell), None, "{stops}: it is fresh");
        cell.let_go();
        assert_eq!(looks(cell), Some(AGES), "{stops}");
    }
}

/// Goal: an entry that was fetched stays until it was loaded, or let go.
#[test]
#[cfg(not(feature = "loom"))]
fn a_fresh_entry_stays_until_it_was_loaded_or_let_go() {
    let words = row();
    let cell = Row(&words).cell();
    for loads in [true, false] {
        cell.0.store(Place::Backing as u32, super::Relaxed);
        cell.let_go();
        assert_eq!(cell.begin_read(false), Ok(()));
        cell.let_go();
        assert_eq!(cell.read(true), Ok(()));
        assert_eq!(looks(cell), None);
        if loads {
            cell.protect()
        } else {
            cell.let_go()
        }
        assert_eq!(looks(cell), Some(AGES));
        assert_eq!(cell.written(), Ok(()));
        assert_eq!(cell.load().0, Place::Backing as u32, "nothing is left of it");
    }
}

/// Goal: an entry that keeps its location says so until it leaves the pool or gives the location up.
#[test]
#[cfg(not(feature = "loom"))]
fn an_entry_keeps_its_location_while_it_is_in_the_pool() {
    let words = row();
    let cell = Row(&words).cell();
    let fetch = |is_kept| {
        cell.0.store(Place::Reading as u32, super::Relaxed);
        assert_eq!(cell.read(is_kept), Ok(()));
        assert_eq!(cell.load().is_kept(), is_kept);
    };
    fetch(false);
    assert!(!cell.begin_return() && !cell.give_up(), "it has no location");
    fetch(true);
    assert!(cell.begin_return());
    assert!(!cell.give_up() && !cell.begin_return(), "it is on its way out");
    assert_eq!(cell.written(), Ok(()));
    assert!(!cell.load().is_kept() && cell.load().place() == Place::Backing);
    fetch(true);
    assert!(cell.give_up());
    assert!(!cell.load().is_kept() && !cell.begin_return());
    fetch(true);
    assert!(cell.end().is_kept());
}

#[test]
#[should_panic(expected = "STORE-1")]
#[cfg(not(feature = "loom"))]
fn a_vacant_row_cannot_end() {
    let words = row();
    Row(&words).cell().end();
}

/// Every order of steps: `make loom`.
#[cfg(feature = "loom")]
#[allow(unsafe_code, reason = "loom's cells, which are what it checks")]
mod loom_tests {
    use std::sync::atomic::Ordering;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Arc, Mutex};

    use super::super::{Cell, Place, Word};
    use crate::zsmalloc::loom_slot::LoomSlot;

    impl Word for AtomicU32 {
        fn load(&self, order: Ordering) -> u32 {
            AtomicU32::load(self, order)
        }

        fn store(&self, value: u32, order: Ordering) {
            AtomicU32::store(self, value, order);
        }

        fn compare_exchange(&self, now: u32, new: u32) -> Result<u32, u32> {
            AtomicU32::compare_exchange(self, now, new, Ordering::AcqRel, Ordering::Acquire)
        }

        fn fetch_or(&self, bits: u32) {
            AtomicU32::fetch_or(self, bits, Ordering::Relaxed);
        }

        fn fetch_and(&self, bits: u32) {
            AtomicU32::fetch_and(self, bits, Ordering::Relaxed);
        }
    }

    const BYTES: u32 = 7;
    const GONE: u32 = 0;

    /// One row, its object in the pool and its bytes on the backing. Loom sees to it that nobody reads an object
    /// while it is freed or filled. The steps are those of `store/spill.rs`, in their order.
    struct World {
        state: AtomicU32,
        slot: LoomSlot,
        object: UnsafeCell<u32>,
        /// What the lock of rank `RANK_BACKING` protects: the bytes on the backing, if there are any.
        side: Mutex<Option<u32>>,
        /// The location that the entry keeps while it is in the pool (`kept.rs`), here the bytes themselves.
        kept: Mutex<Option<u32>>,
        /// Times that the handle was given back.
        ended: AtomicU32,
    }

    impl World {
        fn new() -> Arc<World> {
            let slot = LoomSlot::new();
            slot.publish();
            Arc::new(World {
                state: AtomicU32::new(Place::Pool as u32),
                slot,
                object: UnsafeCell::new(BYTES),
                side: Mutex::new(None),
                kept: Mutex::new(None),
                ended: AtomicU32::new(0),
            })
        }

        fn cell(&self) -> Cell<'_, AtomicU32> {
            Cell(&self.state)
        }

        fn free(&self) {
            assert!(self.slot.vacate(), "a dead entry is read by nobody");
            // SAFETY: the slot is vacant, so nobody reads the object: what loom checks here.
            self.object.with_mut(|object| unsafe { *object = GONE });
            self.ended.fetch_add(1, Ordering::Relaxed);
        }

        /// As `Store::load` does. False: it is away.
        fn load(&self) -> bool {
            let here = match self.cell().load().place() {
                Place::Pool | Place::Writing => self.slot.pin(),
                Place::Backing | Place::Reading => false,
                place => panic!("{place:?}"),
            };
            if here {
                // SAFETY: pinned, so nobody writes the object: what loom checks here.
                self.object.with(|object| assert_eq!(unsafe { *object }, BYTES));
                self.slot.unpin();
                self.cell().protect();
            }
            here
        }

        /// As `Store::write_back` with a backing that writes at once.
        fn write_back(&self) {
            let mut side = self.side.lock().unwrap();
            let Some(before) = self.cell().begin_write(None) else { return };
            if before.is_kept() {
                return self.send_back(&mut side);
            }
            assert!(self.slot.pin(), "ROW-3");
            // SAFETY: pinned, as in load().
            let bytes = self.object.with(|object| unsafe { *object });
            self.slot.unpin();
            assert_eq!(bytes, BYTES);
            if self.cell().load().place() == Place::WritingDead {
                self.cell().vacate();
                self.free();
            } else if !self.slot.send_away() {
                if self.cell().not_written().is_err() {
                    self.cell().vacate();
                    self.free();
                }
            } else {
                // SAFETY: the slot has no object any more, so nobody reads it.
                self.object.with_mut(|object| unsafe { *object = GONE });
                *side = Some(bytes);
                if self.cell().written().is_err() {
                    *side = None;
                    self.cell().vacate();
                    self.ended.fetch_add(1, Ordering::Relaxed);
                }
            }
        }

        /// As `Store::send_back`.
        fn send_back(&self, side: &mut Option<u32>) {
            let bytes = self.kept.lock().unwrap().expect("KEPT-1");
            if !self.slot.send_away() {
                if self.cell().not_written().is_err() {
                    self.cell().vacate();
                    assert!(self.kept.lock().unwrap().take().is_some(), "KEPT-1");
                    self.free();
                }
                return;
            }
            // SAFETY: the slot has no object any more, so nobody reads it.
            self.object.with_mut(|object| unsafe { *object = GONE });
            *self.kept.lock().unwrap() = None;
            *side = Some(bytes);
            if self.cell().written().is_err() {
                *side = None;
                self.cell().vacate();
                self.ended.fetch_add(1, Ordering::Relaxed);
            }
        }

        /// As `Store::put_away`, but waits for the lock.
        fn put_away(&self) {
            let mut side = self.side.lock().unwrap();
            if self.cell().begin_return() {
                self.send_back(&mut side);
            }
        }

        /// As `Store::keep_location` does to the entry that has the bucket.
        fn give_up(&self) {
            let _side = self.side.lock().unwrap();
            let mut kept = self.kept.lock().unwrap();
            if self.cell().give_up() {
                assert!(kept.take().is_some(), "KEPT-1");
            }
        }

        /// As `Store::wait` with a backing that reads at once.
        fn wait(&self) {
            let mut side = self.side.lock().unwrap();
            if self.cell().begin_read(false).is_err() {
                return;
            }
            let bytes = side.take().expect("ROW-3: it is on the backing");
            // SAFETY: the slot has no object, so nobody reads it.
            self.object.with_mut(|object| unsafe { *object = bytes });
            self.slot.publish();
            *self.kept.lock().unwrap() = Some(bytes);
            if self.cell().read(true).is_err() {
                self.cell().vacate();
                *self.kept.lock().unwrap() = None;
                self.free();
            }
        }

        /// As `Store::invalidate`.
        fn end(&self) {
            let state = self.cell().end();
            match state.place() {
                Place::Pool => {
                    if state.is_kept() {
                        assert!(self.kept.lock().unwrap().take().is_some(), "KEPT-1");
                    }
                    self.free();
                }
                Place::Backing => {
                    self.ended.fetch_add(1, Ordering::Relaxed);
                }
                Place::Writing | Place::Reading => {}
                place => panic!("{place:?}"),
            }
        }
    }

    /// Goal: an entry that is loaded again and again, while it is written back and fetched, always has its bytes.
    #[test]
    fn loom_loads_and_a_walker() {
        loom::model(|| {
            let world = World::new();
            let walker = Arc::clone(&world);
            let walker = loom::thread::spawn(move || walker.write_back());
            if !world.load() {
                world.wait();
                assert!(world.load(), "nobody writes it back any more");
            }
            walker.join().unwrap();
            world.end();
            assert_eq!(world.ended.load(Ordering::Relaxed), 1);
        });
    }

    /// Goal: an entry that ends at any moment of a write-back ends once, and nobody touches it after.
    #[test]
    fn loom_an_end_and_a_walker() {
        loom::model(|| {
            let world = World::new();
            let walker = Arc::clone(&world);
            let walker = loom::thread::spawn(move || walker.write_back());
            world.end();
            walker.join().unwrap();
            assert_eq!(world.ended.load(Ordering::Relaxed), 1);
            assert_eq!(world.cell().load().place(), Place::Vacant);
        });
    }

    /// Goal: the same while somebody with an old ticket fetches the entry.
    #[test]
    fn loom_an_end_and_a_fetch() {
        loom::model(|| {
            let world = World::new();
            world.write_back();
            assert_eq!(world.cell().load().place(), Place::Backing);
            let waiter = Arc::clone(&world);
            let waiter = loom::thread::spawn(move || waiter.wait());
            world.end();
            waiter.join().unwrap();
            assert_eq!(world.ended.load(Ordering::Relaxed), 1);
            assert_eq!(world.cell().load().place(), Place::Vacant);
        });
    }

    /// An entry that is in the pool and keeps its location.
    fn at_both() -> Arc<World> {
        let world = World::new();
        world.write_back();
        world.wait();
        assert!(world.cell().load().is_kept());
        world
    }

    /// Goal: an entry that keeps its location has its bytes, whether it is sent back, gives the location up, or
    /// neither.
    #[test]
    fn loom_a_load_while_an_entry_goes_back() {
        loom::model(|| {
            let world = at_both();
            let other = Arc::clone(&world);
            let other = loom::thread::spawn(move || {
                other.put_away();
                other.give_up();
            });
            if !world.load() {
                world.wait();
                assert!(world.load(), "nobody sends it away any more");
            }
            other.join().unwrap();
            world.end();
            assert_eq!(world.ended.load(Ordering::Relaxed), 1);
            assert!(world.kept.lock().unwrap().is_none(), "KEPT-1");
        });
    }

    /// Goal: an entry that keeps its location ends once at any moment of its way back, or of giving up, and leaves no
    /// location behind.
    #[test]
    fn loom_an_end_while_an_entry_goes_back() {
        for gives_up in [false, true] {
            loom::model(move || {
                let world = at_both();
                let other = Arc::clone(&world);
                let other =
                    loom::thread::spawn(
                        move || {
                            if gives_up { other.give_up() } else { other.put_away() }
                        },
                    );
                world.end();
                other.join().unwrap();
                assert_eq!(world.ended.load(Ordering::Relaxed), 1);
                assert!(world.kept.lock().unwrap().is_none(), "KEPT-1");
                assert_eq!(world.cell().load().place(), Place::Vacant);
            });
        }
    }
}
