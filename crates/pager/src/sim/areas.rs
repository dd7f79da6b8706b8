//! The real areas of `zfolio_core::swap` below the engine: several with priorities, on disks in memory that fail.
//!
//! The first is small and is filled first. The disk of the second may end before its slots do. In some runs disks fail
//! for some time, a read brings other bytes than were written, and an area is emptied and replaced while the engine
//! uses it. After a fork the disks refuse writes to what a child may read (`SWAP-5`), until the child has ended.

#![allow(clippy::disallowed_types, reason = "the book's lock is none of the engine's")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zfolio_core::store::backing::{Completion, Failure, Location, Operation, Request, Usage};
use zfolio_core::store::{Backing, EntryId, Ticket};
use zfolio_core::swap::disk::SLOT_BYTES;
use zfolio_core::swap::disk::faulty::{Faults as DiskFaults, Faulty};
use zfolio_core::swap::{
    AREAS_MAX, AreaId, AreaStatus, Areas, Config, KeyRoom, NewArea, SECRET_BYTES, Seal,
};

use super::disk::{Below, Faults, GOOD_NS, OUTAGE_NS, PAUSE_NS};
use super::random::Random;
use super::schedule::{self, Schedule};
use crate::engine::Engine;
use crate::folio::{Folio, Units};

/// Bytes of the areas' buffers.
const BUFFER_BYTES: usize = 256 << 10;

/// How many there are.
const AREAS: usize = 3;

/// One in so many reads damages what the disks have, where that is what a run is about.
const LASTING: usize = 50;

/// In so many turns of the thread that looks after the areas a child has ended.
const TURNS_OF_A_CHILD: usize = 4;

/// In so many turns an area begins to be emptied.
const TURNS_UNTIL_DRAIN: usize = 8;

/// So many units are fetched in a turn from an area that is being emptied.
const DRAINED: usize = 16;

#[derive(Debug)]
struct Book {
    random: Random,
    disks: BTreeMap<AreaId, Faulty>,
    /// What went wrong on each disk before all of them had to be quick.
    before_hurry: Option<Vec<DiskFaults>>,
    /// The disk that fails, or was the last to fail, and until when.
    outage: Option<(AreaId, u64)>,
    /// The area that is being emptied.
    draining: Option<AreaId>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Ground {
    schedule: Arc<Schedule>,
    areas: Areas,
    book: Mutex<Book>,
    faults: Faults,
    /// Areas are emptied now and then.
    drains: bool,
    waiting: AtomicUsize,
    is_at_rest: AtomicBool,
    /// Areas that were replaced.
    replaced: AtomicUsize,
}

impl Ground {
    /// Areas for `bytes_max` bytes, and a small one besides.
    pub(super) fn new(
        schedule: Arc<Schedule>,
        mut random: Random,
        (unit_bytes, bytes_max): (usize, usize),
        (faults, drains): (Faults, bool),
    ) -> Ground {
        let areas = Areas::new(Config {
            object_bytes_max: unit_bytes,
            buffer_bytes: BUFFER_BYTES,
            limit_bytes: 2 * bytes_max as u64,
        });
        let slots = bytes_max / SLOT_BYTES;
        let small = 32 + random.below(256);
        let sizes: [(usize, i32); AREAS] =
            [(small, 7), (slots, random.of(&[0, 0, 1])), (slots / 2, 0)];
        let book = Book {
            random,
            disks: BTreeMap::new(),
            before_hurry: None,
            outage: None,
            draining: None,
        };
        let ground = Ground {
            schedule,
            areas,
            book: Mutex::new(book),
            faults,
            drains,
            waiting: AtomicUsize::new(0),
            is_at_rest: AtomicBool::new(false),
            replaced: AtomicUsize::new(0),
        };
        sizes.into_iter().for_each(|(slots, priority)| ground.add(slots, priority));
        let ends = faults.refuses > 0 && ground.lock().random.one_in(2);
        if let Some(second) = AreaId::new(1).filter(|_| ends) {
            ground.disk(second).break_it(|faults| faults.end = Some(slots as u64 / 2));
        }
        ground
    }

    /// The book. No disk and no area is called while this is held: their locks are the engine's, where another thread
    /// may go on, which would wait for this one.
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk of an area.
    fn disk(&self, id: AreaId) -> Faulty {
        self.lock().disks[&id].clone()
    }

    /// One more area, on an empty disk.
    fn add(&self, slots: usize, priority: i32) {
        let random = &mut self.lock().random.clone();
        let disk = Faulty::new(random.next());
        // What does not open is read once more: what is damaged twice is lost.
        let is_lasting = self.faults.is_lasting;
        disk.break_it(|faults| (faults.is_once, faults.is_lasting) = (!is_lasting, is_lasting));
        let mut secret: [u8; SECRET_BYTES] =
            std::array::from_fn(|_| random.next().to_le_bytes()[0]);
        self.lock().random = random.clone();
        let new = NewArea {
            disk: Box::new(disk.clone()),
            slots: u32::try_from(slots).expect("few"),
            priority,
            seal: Seal::new(Box::new(Box::<KeyRoom>::default()), &mut secret),
        };
        let Ok(id) = self.areas.add(new) else { panic!("there are fewer areas than there may be") };
        self.lock().disks.insert(id, disk);
    }

    /// Each area with its state.
    fn states(&self) -> impl Iterator<Item = AreaStatus> {
        (0..AREAS_MAX).filter_map(AreaId::new).filter_map(|id| self.areas.status(id))
    }

    /// How many areas were replaced.
    pub(super) fn replaced(&self) -> usize {
        self.replaced.load(Relaxed)
    }

    /// Slots that came with other bytes than were written.
    pub(super) fn damaged(&self) -> u64 {
        self.areas.stats().tampered
    }

    /// Chooses what goes wrong with a request. True: it is refused.
    fn spoil(&self, request: &Request<'_>, now_ns: u64) -> bool {
        let mut book = self.lock();
        if book.before_hurry.is_some() {
            return false;
        }
        if book.random.one_in(self.faults.refuses) {
            return true;
        }
        // A read that fails takes the other objects of its transfer along: seldom enough that no unit fails 20 times.
        let is_read = matches!(request.operation, Operation::Read { .. });
        let fails = book.random.one_in(self.faults.refuses * if is_read { 8 } else { 1 });
        let damage = self.damage(&mut book.random).filter(|_| is_read);
        let (id, kind, begins) = match request.operation {
            Operation::Write(_) => {
                let (nth, kind) = (book.random.below(AREAS), book.random.below(2));
                // Of the faults that wait for a write: others would wait for the next read, each time.
                (book.disks.keys().nth(nth).copied(), kind, false)
            }
            Operation::Read { location, .. } => {
                let is_good = book.outage.is_none_or(|(_, until)| now_ns > until + GOOD_NS);
                let begins = is_good && book.random.one_in(self.faults.outages);
                (Some(AreaId::of(location)), 2, begins)
            }
        };
        // While an area is replaced there is one less.
        let Some((id, disk)) = id.and_then(|id| Some((id, book.disks.get(&id)?.clone()))) else {
            return false;
        };
        if begins {
            let longest = book.random.of(&[OUTAGE_NS / 1000, OUTAGE_NS / 10, OUTAGE_NS]);
            book.outage = Some((id, now_ns + book.random.below(longest) as u64));
        }
        drop(book);
        disk.break_it(|faults| {
            faults.is_gone |= begins;
            let next = match kind {
                0 => &mut faults.full,
                1 => &mut faults.failed_writes,
                _ => &mut faults.failed_reads,
            };
            *next = usize::from(fails).max(*next);
            match damage {
                Some(0) => faults.flipped = 1,
                Some(1) => faults.misplaced = 1,
                Some(2) => faults.replayed = 1,
                Some(_) => faults.short_reads = 1,
                None => {}
            }
        });
        false
    }

    /// How a read is damaged, if it is.
    fn damage(&self, random: &mut Random) -> Option<usize> {
        let Faults { refuses, is_lasting, .. } = self.faults;
        let (chances, kinds) = if is_lasting { (LASTING, 4) } else { (2 * refuses, 3) };
        random.one_in(chances).then(|| random.below(kinds))
    }

    /// Ends an outage whose time has come.
    fn mend(&self) {
        let now_ns = self.schedule.now_ns();
        let book = self.lock();
        let ended = book.outage.filter(|(_, until_ns)| now_ns >= *until_ns);
        let disk = ended.and_then(|(id, _)| book.disks.get(&id).cloned());
        drop(book);
        disk.into_iter().for_each(|disk| disk.break_it(|faults| faults.is_gone = false));
    }

    /// No child has the disks any more.
    fn unshare(&self) {
        for status in self.states().filter(|status| status.is_shared) {
            self.disk(status.id).unguard();
            self.areas.unshare(status.id);
        }
    }

    /// A turn of the thread that looks after the areas.
    pub(super) fn turn(&self, engine: &Engine, random: &mut Random) {
        let table = engine.table.read();
        if engine.work.settling.load(Relaxed) {
            return;
        }
        if random.one_in(TURNS_OF_A_CHILD) {
            self.unshare();
        }
        let draining = self.lock().draining;
        match draining {
            Some(id) => {
                let mut left = DRAINED;
                for (_, lock) in table.known_folios(0, usize::MAX) {
                    self.empty(id, engine, &mut lock.lock(), &mut left);
                }
                engine.poll_backing(&table);
                self.replace(random);
            }
            None if self.drains && random.one_in(TURNS_UNTIL_DRAIN) => {
                let ids: Vec<AreaId> = self.states().map(|status| status.id).collect();
                let id = random.of(&ids);
                self.areas.drain(id);
                self.lock().draining = Some(id);
            }
            None => {}
        }
    }

    /// Has units of a folio fetched that are in an area, as many as are `left`, and has others give up what they have
    /// there. With the folio locked: nobody loads and puts away meanwhile what is asked for.
    fn empty(&self, id: AreaId, engine: &Engine, folio: &mut Folio, left: &mut usize) {
        let store = &engine.store;
        let ticket = |copy: &EntryId| {
            let ticket = store.away(copy)?;
            store.location(ticket).filter(|location| AreaId::of(*location) == id).map(|_| ticket)
        };
        let copies = folio.copies.iter().enumerate();
        let there = copies.filter_map(|(index, copy)| Some((index, ticket(copy.as_ref()?)?)));
        let there: Vec<(usize, Ticket)> = there.collect();
        for (index, ticket) in there {
            if !folio.stored.contains(index) {
                engine.drop_copies(folio, Units::one(index));
            } else if *left > 0 {
                store.fetch([ticket], |_| false);
                *left -= 1;
            }
        }
        folio.copies.iter().flatten().for_each(|copy| store.give_up_backing(copy));
    }

    /// Puts a new area in place of the one that was to be empty, if it is.
    fn replace(&self, random: &mut Random) {
        let draining = self.lock().draining.expect("an area is being emptied");
        let status = self.areas.status(draining).expect("it is there until it is empty");
        let mut is_done = false;
        self.areas.take_done(&mut |id, _| {
            assert_eq!(id, draining, "another area has ended");
            is_done = true;
        });
        if !is_done {
            return;
        }
        let mut book = self.lock();
        book.disks.remove(&draining);
        // The outage stays noted, though the disk is gone: the next one comes late enough for who waits (`GOOD_NS`).
        book.draining = None;
        drop(book);
        self.replaced.fetch_add(1, Relaxed);
        let slots = usize::try_from(status.slots).expect("few");
        self.add(slots, random.of(&[status.priority, 0, 3]));
    }
}

impl Below for Ground {
    fn rest(&self, is_at_rest: bool) {
        self.is_at_rest.store(is_at_rest, Relaxed);
    }

    fn hurry(&self, hurries: bool) {
        let disks: Vec<Faulty> = self.lock().disks.values().cloned().collect();
        let before = self.lock().before_hurry.take();
        let now = match (hurries, before) {
            (true, None) => Some(disks.iter().map(hurried).collect()),
            (true, before) => before,
            (false, before) => {
                for (disk, before) in disks.iter().zip(before.into_iter().flatten()) {
                    disk.break_it(|faults| *faults = before);
                }
                None
            }
        };
        self.lock().before_hurry = now;
    }

    fn contents(&self) -> (usize, usize) {
        self.unshare();
        let left: u64 = self.states().map(|status| status.slots_left).sum();
        let count = |number: u64| usize::try_from(number).expect("few");
        (count(self.areas.stats().objects), count(left))
    }

    fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    fn share(&self) {
        assert!(self.areas.share(), "a request is under way at a fork");
        for status in self.states().filter(|status| status.is_shared) {
            let next = |from: &u32| self.areas.in_use(status.id, from + 1);
            let slots = std::iter::successors(self.areas.in_use(status.id, 0), next);
            let slots: Vec<u64> = slots.map(u64::from).collect();
            self.disk(status.id).guard(slots.into_iter());
        }
    }
}

/// Everything on this disk succeeds and ends at once. Returns what went wrong before.
fn hurried(disk: &Faulty) -> DiskFaults {
    let mut before = DiskFaults::default();
    disk.break_it(|faults| before = faults.clone());
    disk.behave();
    disk.break_it(|faults| faults.is_prompt = true);
    before
}

/// The backing of the engine: the same areas.
#[derive(Clone, Debug)]
pub(super) struct Shared(pub(super) Arc<Ground>);

impl Backing for Shared {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let Shared(ground) = self;
        // Another outage may begin now, and this one's end would be forgotten.
        ground.mend();
        let now_ns = ground.schedule.now_ns();
        for request in requests.iter_mut() {
            let is_write = matches!(request.operation, Operation::Write(_));
            // Only who looks at what the engine keeps has the disks hurry, and may need room for it.
            let is_at_rest =
                ground.is_at_rest.load(Relaxed) && ground.lock().before_hurry.is_none();
            assert!(!(is_write && is_at_rest), "SPILL-4: a write before a fork");
            if ground.spoil(request, now_ns) {
                request.refused = Some(Failure::Transient);
            }
        }
        let is_refused = |request: &Request<'_>| request.refused.is_some();
        let parts = requests.chunk_by_mut(|one, other| is_refused(one) == is_refused(other));
        parts.filter(|part| !is_refused(&part[0])).for_each(|part| ground.areas.submit(part));
    }

    fn flush(&self) {
        self.0.areas.flush();
    }

    fn tidy(&self) {
        self.0.areas.tidy();
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        let Shared(ground) = self;
        ground.mend();
        ground.areas.poll(&mut |completion| {
            if completion.result.is_err() {
                ground.schedule.waits_for_disk();
            }
            each(completion);
        });
    }

    fn usage(&self) -> Usage {
        self.0.areas.usage()
    }

    fn discard(&self, location: Location, length: usize) {
        self.0.areas.discard(location, length);
    }

    fn pause(&self) {
        self.0.waiting.fetch_add(1, Relaxed);
        schedule::wait("the disks".to_owned(), Some(PAUSE_NS));
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}
