//! The store beside a map, with failures of everything that it uses; and each promise of its own.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use super::backing::faulty::{Breakable, Faulty};
use super::backing::sealed::Sealed;
use super::backing::{Backing, Completion, Failure, Location, RANK_BACKING, Request};
use super::{
    CodecId, EntryId, Error, Incoming, Key, Loaded, Outcome, Outgoing, Reject, SpillStats, Store,
    Ticket, WrittenBack, script,
};
use crate::page::UnitOrder;
use crate::stats::Figures;
use crate::sync::Mutex;
use crate::testing::{Random, seed};
use crate::zcomp::{Algorithm, Zcomp};
use crate::zsmalloc::world::{World, bytes, check_rows, unit};

fn key() -> Key {
    Key::new(bytes(42, Key::BYTES).try_into().expect("as many bytes as a key has"))
}

/// Goal: the store does what a map does, whatever fails. Method: scripts of seeded bytes.
#[test]
fn the_store_agrees_with_a_map() {
    let seed = seed();
    for round in 0..if cfg!(debug_assertions) { 100 } else { 400 } {
        let mut random = Random::new(seed.wrapping_mul(1 << 20) + round);
        let length = 200 + random.below(3000);
        let script = random.bytes(length);
        println!("seed {seed}, round {round}");
        script::play(&script);
    }
}

/// Each of these tests with a backing that keeps entries in memory, and with areas over a disk.
macro_rules! on_each_backing {
    ($($name:ident,)*) => {
        mod memory {
            $(#[test] fn $name() { super::$name::<super::Faulty>(); })*
        }
        mod sealed {
            $(#[test] fn $name() { super::$name::<super::Sealed>(); })*
        }
    };
}

on_each_backing! {
    all_of_a_store_goes_out_and_comes_back,
    a_child_counts_from_zero,
    a_child_waits_for_no_unit,
    what_was_fetched_outlasts_walks,
    what_was_fetched_outlasts_walks_beside_a_slow_read,
    the_oldest_go_first,
    the_incompressible_go_first,
    the_chosen_go_whatever_their_age,
    a_unit_in_flight_is_still_here,
    a_unit_that_is_read_stays,
    a_drain_waits_for_the_last_request,
    a_read_in_flight_outlives_its_entry,
    failures_of_the_backing_are_named,
    threads_and_walkers_agree,
}

/// Units of all kinds: same-filled, random (kept raw), and shrinking to many lengths.
fn units(unit: UnitOrder) -> Vec<Vec<u8>> {
    let kind = |index: usize| match index % 4 {
        0 if index % 8 == 0 => vec![b'z'; unit.bytes()],
        0 => bytes(index as u64, unit.bytes()),
        _ => {
            let mut data = bytes(index as u64, unit.bytes());
            data[unit.bytes() * (index % 31) / 32..].fill(0);
            data
        }
    };
    (1..60).map(kind).collect()
}

/// A store, its units, and what became of each.
struct Fixture<B> {
    world: Arc<World>,
    backing: B,
    store: Store<Arc<World>>,
    figures: Figures,
    units: Vec<Vec<u8>>,
    entries: Vec<Option<EntryId>>,
}

impl<B: Breakable> Fixture<B> {
    fn new(unit: UnitOrder) -> Fixture<B> {
        let world = World::new();
        let backing = B::new(usize::MAX);
        let zcomp = Zcomp::new(Algorithm::Lz4.into(), unit, 1).expect("the default level");
        let store = Store::new(vec![zcomp], Arc::clone(&world), key());
        let store = store.with_backing(Box::new(backing.clone()), 0);
        let units = units(unit);
        let entries = units.iter().map(|_| None).collect();
        Fixture { world, backing, store, figures: Figures::default(), units, entries }
    }

    /// Stores every unit again, in batches. Returns the outcomes.
    fn store_all(&mut self) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for (units, entries) in self.units.chunks(8).zip(self.entries.chunks_mut(8)) {
            let pairs = units.iter().zip(&mut *entries);
            let mut batch: Vec<Outgoing<'_>> =
                pairs.map(|(unit, entry)| Outgoing::new(unit, entry.take())).collect();
            self.store.store(0, CodecId::FIRST, &mut batch, &self.figures);
            for (unit, entry) in batch.into_iter().zip(entries) {
                outcomes.push(unit.outcome);
                *entry = unit.entry;
            }
        }
        outcomes
    }

    fn load(&self, at: usize) -> (Loaded, Vec<u8>) {
        let entry = self.entries[at].as_ref().expect("it is stored");
        let mut place = vec![0; self.units[at].len()];
        let mut batch = [Incoming::new(entry, &mut place)];
        self.store.load(0, &mut batch);
        (batch[0].outcome, place)
    }

    /// Loads, from the backing if need be, and compares.
    fn check_unit(&self, at: usize) {
        let (mut outcome, mut place) = self.load(at);
        if let Loaded::Away(ticket) = outcome {
            self.store.wait(ticket).expect("nothing fails");
            (outcome, place) = self.load(at);
        }
        assert_eq!(outcome, Loaded::Whole, "unit {at}");
        assert!(place == self.units[at], "unit {at}");
    }

    /// The gauges say what was stored, the pool holds no more, and all of it comes back.
    fn check(&self) {
        let stored: Vec<usize> =
            (0..self.units.len()).filter(|at| self.entries[*at].is_some()).collect();
        let figure = |name: &str| self.figures.get(name).expect("a figure");
        assert_eq!(figure("stored_units"), stored.len() as u64, "STORE-3");
        let (pool, spill) = (self.store.pool_stats(), self.store.spill_stats());
        assert_eq!(pool.objects + spill.units + figure("same_filled_units"), stored.len() as u64);
        assert_eq!(pool.bytes_stored + spill.bytes, figure("compressed_bytes"));
        let without_object = figure("same_filled_units") + spill.units;
        check_rows(self.store.pool(), usize::try_from(without_object).expect("few"));
        stored.into_iter().for_each(|at| self.check_unit(at));
    }

    /// Some units are in the pool and at the backing, those that were `changed` since in the pool only, and the others
    /// at the backing.
    fn with_some_at_both(changed: &[usize]) -> Self {
        let mut fixture = Self::new(unit(0));
        fixture.store_all();
        fixture.write_all_back();
        (1..20).for_each(|at| fixture.check_unit(at));
        changed.iter().for_each(|at| fixture.units[*at][0] ^= 1);
        fixture.store_all();
        fixture
    }

    fn write_all_back(&self) -> WrittenBack {
        let first = self.store.write_back(usize::MAX);
        assert_eq!(self.store.write_back(usize::MAX), WrittenBack::default(), "all of it is gone");
        first
    }

    fn end(mut self) {
        for entry in self.entries.iter_mut().filter_map(Option::take) {
            self.store.invalidate(entry, &self.figures);
        }
        self.check();
        self.store.drain();
        assert_eq!(self.store.pool_stats().bytes_stored, 0);
        assert_eq!(self.backing.locations(), 0);
        drop(self.store);
        assert_eq!(self.world.pages.load(Relaxed), 0, "a page was kept");
    }
}

/// Goal: a pool without memory costs no unit and no page. Method: the same batches with the first request
/// of the source refused, the second, ..., alone and with all that follow, until none is.
#[test]
fn a_refusal_at_any_point_leaves_the_unit_with_its_owner() {
    let rejected = |outcome: &Outcome| *outcome == Outcome::Rejected(Reject::AllocFail);
    let play = |order, refused: Range<usize>| {
        let mut fixture = Fixture::<Faulty>::new(unit(order));
        fixture.world.refuse(refused.clone());
        let rejects = fixture.store_all().iter().filter(|outcome| rejected(outcome)).count();
        assert_eq!(fixture.figures.reject_alloc_fail.load(Relaxed), rejects as u64);
        let missing = fixture.entries.iter().filter(|entry| entry.is_none()).count();
        assert_eq!(missing, rejects, "requests {refused:?}");
        fixture.check();
        // There is memory again: what was rejected is stored, what was stored is clean.
        fixture.world.refuse(0..0);
        let again = fixture.store_all();
        assert_eq!(again.iter().filter(|outcome| rejected(outcome)).count(), 0);
        let clean = again.iter().filter(|outcome| **outcome == Outcome::Clean).count();
        assert_eq!(clean, fixture.units.len() - rejects);
        fixture.check();
        fixture.end();
        rejects
    };
    for order in [0, 4] {
        let mut number = 0;
        loop {
            let rejects = [play(order, number..number + 1), play(order, number..usize::MAX)];
            if rejects == [0, 0] {
                break;
            }
            // One request alone refused is one unit, and those after it are stored; or it was for marks, which are
            // done without.
            assert!(rejects[0] <= 1 && rejects[1] >= 1, "request {number}: {rejects:?}");
            number += 1;
        }
        println!("{}: {number} requests", unit(order));
        assert!(number > 20, "the store asks for memory");
    }
}

/// Goal: a unit for which the pool has no room stays away, which is told once for each try; when others have left, it
/// comes. Method: a source that has no more pages than half of the units need, while the other half is away.
#[test]
fn what_comes_back_needs_room() {
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    for at in 0..fixture.units.len() / 2 {
        fixture.check_unit(at);
    }
    fixture.store.pool().trim();
    fixture.world.bound(fixture.world.pages.load(Relaxed));
    let ticket = |at| match fixture.load(at).0 {
        Loaded::Away(ticket) => Some(ticket),
        _ => None,
    };
    let away: Vec<usize> = (0..fixture.units.len()).filter(|at| ticket(*at).is_some()).collect();
    let mut lacked = 0;
    for at in away {
        while let Some(ticket) = ticket(at) {
            fixture.store.fetch([ticket], |_| true);
            while fixture.store.poll() > 0 {}
            assert!(!fixture.store.is_unread(ticket), "nothing has failed");
            if fixture.store.lacks_room() {
                assert!(
                    fixture.store.is_away(ticket) && fixture.store.has_come(ticket),
                    "unit {at}"
                );
                assert!(fixture.store.take_lack_of_room() && !fixture.store.lacks_room());
                lacked += 1;
                assert!(lacked < 1000, "others have left");
                fixture.store.write_back(8);
            }
        }
        fixture.check_unit(at);
    }
    assert!(lacked > 0, "there was always room");
    // What the pool keeps empty is room for all classes.
    fixture.write_all_back();
    assert!(fixture.store.pool_stats().pages_reserved > 0, "it keeps nothing empty");
    fixture.world.bound(fixture.world.pages.load(Relaxed));
    for at in 0..fixture.units.len() {
        fixture.check_unit(at);
        fixture.write_all_back();
    }
    fixture.world.bound(usize::MAX);
    fixture.check();
    fixture.end();
}

/// Goal: a reject leaves the old copy where it was, good for the contents that it had. Method: units change
/// while the source has no memory.
#[test]
fn a_reject_leaves_the_old_entry() {
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    fixture.store_all();
    let before = fixture.units.clone();
    fixture.units.iter_mut().for_each(|unit| unit[17] ^= 1);
    fixture.world.refuse(0..usize::MAX);
    let outcomes = fixture.store_all();
    assert!(outcomes.iter().all(|outcome| *outcome != Outcome::Clean));
    let rejected = |outcome| outcome == Outcome::Rejected(Reject::AllocFail);
    assert!(outcomes.iter().any(|outcome| rejected(*outcome)), "{outcomes:?}");
    for (at, outcome) in outcomes.into_iter().enumerate() {
        if rejected(outcome) {
            fixture.units[at].clone_from(&before[at]);
        }
    }
    fixture.world.refuse(0..0);
    fixture.check();
    fixture.end();
}

/// Goal: what went to the backing comes back, and is good for a clean unit meanwhile. Method: all of a store
/// goes out and is stored again unchanged, loaded, and written again.
fn all_of_a_store_goes_out_and_comes_back<B: Breakable>() {
    for order in [0, 4] {
        let mut fixture = Fixture::<B>::new(unit(order));
        fixture.store_all();
        let done = fixture.write_all_back();
        assert_eq!(done.bytes as u64, fixture.store.spill_stats().bytes);
        assert_eq!(fixture.store.pool_stats().objects, 0);
        assert!(fixture.store_all().iter().all(|outcome| *outcome == Outcome::Clean));
        assert_eq!(fixture.store.pool_stats().objects, 0, "nothing was stored");
        fixture.check();
        let spill = fixture.store.spill_stats();
        assert_eq!(spill.units, 0, "all of it was loaded");
        assert_eq!(spill.kept, done.written as u64, "and is still there");
        assert_eq!(fixture.backing.locations(), done.written);
        assert_eq!(fixture.write_all_back().written, done.written);
        let spill = fixture.store.spill_stats();
        assert_eq!(
            (spill.kept, spill.returned),
            (0, done.written as u64),
            "nothing was written again"
        );
        let unit_bytes = unit(order).bytes() as u64;
        assert_eq!(spill.written_unit_bytes, spill.written * unit_bytes);
        assert_eq!(spill.read_unit_bytes, spill.read * unit_bytes);
        fixture.check();
        fixture.end();
    }
}

/// Goal: what a process has done before a fork is not counted by its child, and what is stored is. Method: a counter of
/// each kind is above zero; after that only the gauges are.
fn a_child_counts_from_zero<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    fixture.check();
    fixture.write_all_back();
    fixture.check_unit(0);
    let before = fixture.store.spill_stats();
    assert!(before.written > 0 && before.returned > 0 && before.read > 0, "{before:?}");
    assert!(fixture.store.completions() > 0);
    fixture.store.start_over();
    let SpillStats { units, bytes, raw_units, kept, kept_bytes, .. } = before;
    assert!(units > 0 && kept > 0, "{before:?}");
    let gauges = SpillStats { units, bytes, raw_units, kept, kept_bytes, ..SpillStats::default() };
    assert_eq!((fixture.store.spill_stats(), fixture.store.completions()), (gauges, 0));
    fixture.check();
    assert!(fixture.store.spill_stats().read > 0, "from here on it counts");
    fixture.end();
}

/// A regression: what a thread of the parent's waited to load at the fork stayed in the child's pool for ever. Goal:
/// in a child it goes out as anything else does.
fn a_child_waits_for_no_unit<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    let ticket = fixture.store.ticket(fixture.entries[1].as_ref().expect("it is stored"));
    fixture.store.wait(ticket).expect("nothing fails");
    assert_eq!(fixture.store.write_back_chosen(&[ticket]).started, 0, "it is wanted");
    fixture.store.start_over();
    let done = fixture.store.write_back_chosen(&[ticket]);
    assert_eq!(done.started + done.written, 1, "{done:?}");
    fixture.store.drain();
    assert!(fixture.store.is_away(ticket));
    fixture.check();
    fixture.end();
}

/// Goal: what was fetched and not loaded yet stays however often somebody walks for memory meanwhile, as long as other
/// reads may be on their way; in the end it leaves. It left with the third walk, microseconds later, and was read
/// again.
fn what_was_fetched_outlasts_walks<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    let ticket = fixture.store.ticket(fixture.entries[1].as_ref().expect("it is stored"));
    fixture.store.fetch([ticket], |_| false);
    fixture.store.drain();
    for walk in 0..100 {
        assert_eq!(fixture.store.write_back(8).written, 0, "walk {walk}");
    }
    let walks = (100..1000).find(|_| fixture.store.write_back(8).written > 0);
    assert!(walks.is_some() && fixture.store.is_away(ticket), "{walks:?}");
    fixture.check();
    fixture.end();
}

/// Goal: the same while a read is on its way, however long it takes: on a disk that is slower than 256 walks a quarter
/// was read again. Method: a read whose completion is kept back, and many walks.
fn what_was_fetched_outlasts_walks_beside_a_slow_read<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    let [first, slow] = [1, 2]
        .map(|at: usize| fixture.store.ticket(fixture.entries[at].as_ref().expect("it is stored")));
    fixture.store.fetch([first], |_| false);
    fixture.store.drain();
    fixture.backing.faults().holds.store(true, Relaxed);
    fixture.store.fetch([slow], |_| false);
    for walk in 0..1000 {
        assert_eq!(fixture.store.write_back(8).written, 0, "walk {walk}");
    }
    assert!(fixture.store.is_coming(slow) && !fixture.store.is_away(first));
    fixture.backing.behave();
    fixture.store.drain();
    let walks = (0..1000).find(|_| fixture.store.write_back(8).written > 0);
    assert!(walks.is_some() && fixture.store.is_away(first), "{walks:?}");
    fixture.check();
    fixture.end();
}

/// Goal: where what comes has no room, what was fetched before and not loaded leaves, although somebody always has a
/// read on its way: else they would all wait for ever. Method: a source that has no more pages, and a read whose
/// completion is kept back.
#[test]
fn what_was_fetched_makes_room_for_what_comes() {
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    fixture.units = (0..64).map(|at| bytes(at, 4096)).collect();
    fixture.entries = fixture.units.iter().map(|_| None).collect();
    fixture.store_all();
    fixture.write_all_back();
    let ticket = |at: usize| fixture.store.ticket(fixture.entries[at].as_ref().expect("stored"));
    fixture.store.fetch((0..32).map(ticket), |_| false);
    fixture.store.drain();
    fixture.store.pool().trim();
    fixture.world.bound(fixture.world.pages.load(Relaxed));
    let without_room = (32..63).find(|at| {
        fixture.store.fetch([ticket(*at)], |_| true);
        fixture.store.drain();
        fixture.store.lacks_room()
    });
    assert!(without_room.is_some(), "there was always room");
    fixture.backing.faults().holds.store(true, Relaxed);
    fixture.store.fetch([ticket(63)], |_| true);
    assert_eq!(fixture.store.in_flight().0, 1);
    let walks = (0..1000).find(|_| fixture.store.write_back(8).written > 0);
    assert!(walks.is_some(), "nothing leaves");
    fixture.backing.behave();
    fixture.store.drain();
    fixture.world.bound(usize::MAX);
    fixture.check();
    fixture.end();
}

/// Goal: the walker takes the oldest first, and what was just loaded last. Method: raw units, whose handles a class
/// takes by eights; some of them are loaded, some stored anew.
fn the_oldest_go_first<B: Breakable>() {
    const UNITS: usize = 64;
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.units = (1..=UNITS as u64).map(|tag| bytes(tag, 4096)).collect();
    fixture.entries = fixture.units.iter().map(|_| None).collect();
    fixture.store_all();
    let away = |fixture: &Fixture<B>| -> Vec<usize> {
        (0..UNITS).filter(|at| matches!(fixture.load(*at).0, Loaded::Away(_))).collect()
    };
    assert_eq!(fixture.store.write_back(16).written, 16);
    // To ask where a unit is, is to load it: all that are left are protected now.
    let oldest: Vec<usize> = (0..16).collect();
    assert_eq!(away(&fixture), oldest);
    // Every other one of them is stored anew, and not loaded since.
    let fresh: Vec<usize> = (16..UNITS).step_by(2).collect();
    for at in &fresh {
        fixture.units[*at] = bytes(1000 + *at as u64, 4096);
    }
    fixture.store_all();
    assert_eq!(fixture.store.write_back(fresh.len()).written, fresh.len());
    assert!(away(&fixture).into_iter().eq(oldest.into_iter().chain(fresh)));
    fixture.check();
    fixture.end();
}

/// Goal: of entries of one age the walker takes the incompressible ones first; one that was just loaded stays longer
/// than a compressed one that was not. Method: as many of each in turn, of which some are loaded.
fn the_incompressible_go_first<B: Breakable>() {
    const UNITS: usize = 64;
    let mut fixture = Fixture::<B>::new(unit(0));
    let shrinking = |tag: u64| [bytes(tag, 512), vec![0; 4096 - 512]].concat();
    let contents = |tag: u64| if tag % 2 == 0 { bytes(tag, 4096) } else { shrinking(tag) };
    fixture.units = (0..UNITS as u64).map(contents).collect();
    fixture.entries = fixture.units.iter().map(|_| None).collect();
    fixture.store_all();
    // Ages count from the first walk on. All have the same, but those that were loaded since.
    fixture.store.write_back(0);
    let loaded: Vec<usize> = (0..8).collect();
    loaded.iter().for_each(|at| assert_eq!(fixture.load(*at).0, Loaded::Whole));
    let is_away = |fixture: &Fixture<B>, at: usize| {
        let entry = fixture.entries[at].as_ref().expect("it is stored");
        fixture.store.away(entry).is_some()
    };
    let away = |fixture: &Fixture<B>| -> Vec<usize> {
        (0..UNITS).filter(|at| is_away(fixture, *at)).collect()
    };
    let raw: Vec<usize> = (8..UNITS).step_by(2).collect();
    assert_eq!(fixture.store.write_back(raw.len()).written, raw.len());
    assert_eq!(away(&fixture), raw);
    assert_eq!(fixture.store.write_back(raw.len()).written, raw.len());
    assert_eq!(away(&fixture), (8..UNITS).collect::<Vec<usize>>());
    let spilled = fixture.store.spill_stats();
    assert_eq!((spilled.units, spilled.raw_units), (2 * raw.len() as u64, raw.len() as u64));
    fixture.check();
    fixture.end();
}

/// Goal: what was chosen goes out, however lately it was used, and nothing else; entries that have ended, are away or
/// have no object are passed over; what the backing refuses stays, and goes with the next call. Method: every third
/// unit, chosen right after it was loaded.
fn the_chosen_go_whatever_their_age<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    let ticket = |fixture: &Fixture<B>, at: usize| {
        fixture.store.ticket(fixture.entries[at].as_ref().expect("it is stored"))
    };
    let mut chosen: Vec<Ticket> =
        (0..fixture.units.len()).step_by(3).map(|at| ticket(&fixture, at)).collect();
    let ended = fixture.entries[3].take().expect("it is stored");
    fixture.store.invalidate(ended, &fixture.figures);
    (0..fixture.units.len()).filter(|at| *at != 3).for_each(|at| fixture.check_unit(at));
    fixture.backing.faults().refuse.store(1, Relaxed);
    let first = fixture.store.write_back_chosen(&chosen);
    assert!(first.refused == 1 && first.started < chosen.len(), "{first:?}");
    let rest = fixture.store.write_back_chosen(&chosen);
    let same = chosen.iter().filter(|ticket| ticket.checksum.same_filled().is_some()).count();
    assert_eq!(rest.refused, 0, "{rest:?}");
    assert_eq!(first.started + rest.started, chosen.len() - 1 - same);
    fixture.store.drain();
    assert_eq!(fixture.store.write_back_chosen(&chosen), WrittenBack::default(), "all are gone");
    for at in (0..fixture.units.len()).filter(|at| *at != 3) {
        let entry = fixture.entries[at].as_ref().expect("it is stored");
        let is_chosen = at % 3 == 0 && fixture.store.same_filled(entry).is_none();
        assert_eq!(fixture.store.away(entry).is_some(), is_chosen, "unit {at}");
    }
    // In flight, and wanted by somebody: neither is written a second time.
    chosen = (1..fixture.units.len()).step_by(3).map(|at| ticket(&fixture, at)).collect();
    fixture.backing.faults().holds.store(true, Relaxed);
    assert!(fixture.store.write_back_chosen(&chosen).started > 10);
    assert!(chosen.iter().any(|ticket| fixture.store.is_leaving(*ticket)));
    assert_eq!(fixture.store.write_back_chosen(&chosen), WrittenBack::default());
    fixture.backing.behave();
    fixture.store.drain();
    let usage = fixture.store.backing_usage();
    assert!(usage.used_bytes >= fixture.store.spill_stats().bytes, "{usage:?}");
    assert!(usage.written_bytes >= usage.used_bytes && usage.read_bytes == 0, "{usage:?}");
    fixture.store.wait(chosen[0]).expect("nothing fails");
    assert_eq!(fixture.store.write_back_chosen(&chosen), WrittenBack::default(), "it is wanted");
    // Once it was loaded nobody waits for it, also if the backing has it no more.
    fixture.check_unit(1);
    fixture.store.give_up_backing(fixture.entries[1].as_ref().expect("it is stored"));
    assert_eq!(fixture.store.write_back_chosen(&chosen).started, 1);
    fixture.store.drain();
    fixture.check();
    fixture.end();
}

/// Goal: a unit in flight is loaded from the pool; one that ends in flight leaves nothing. Method: completions
/// are kept back.
fn a_unit_in_flight_is_still_here<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.backing.faults().holds.store(true, Relaxed);
    let done = fixture.store.write_back(usize::MAX);
    assert!(done.started > 30 && done.written == 0, "{done:?}");
    for at in 0..fixture.units.len() {
        assert_eq!(fixture.load(at).0, Loaded::Whole);
    }
    assert!(fixture.store_all().iter().all(|outcome| *outcome == Outcome::Clean));
    for entry in fixture.entries.iter_mut().step_by(3) {
        let entry = entry.take().expect("it is stored");
        fixture.store.invalidate(entry, &fixture.figures);
    }
    fixture.backing.faults().holds.store(false, Relaxed);
    fixture.store.drain();
    fixture.check();
    fixture.end();
}

/// Goal: a unit that was written while somebody reads it stays in the pool, and goes when the reader is done. Method:
/// the reader's pin is held over the write.
fn a_unit_that_is_read_stays<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    let pin = fixture.store.pool().pin(handle(&fixture, 1)).expect("it is in the pool");
    let before = pin.to_vec();
    let done = fixture.store.write_back(usize::MAX);
    assert!(done.written > 30 && done.kept > 0, "{done:?}");
    assert_eq!(fixture.load(1).0, Loaded::Whole);
    assert!(*pin == *before, "its bytes have changed under the reader");
    drop(pin);
    assert_eq!(fixture.store.write_back(usize::MAX).written, 1);
    fixture.check();
    fixture.end();
}

/// Goal: after a drain nothing is in flight. Method: few writes, so that the last ones count, whose completions are
/// kept back.
fn a_drain_waits_for_the_last_request<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    for most in 1..4 {
        fixture.backing.faults().holds.store(true, Relaxed);
        let done = fixture.store.write_back(most);
        assert_eq!((done.started, fixture.store.in_flight().0), (most, most), "{done:?}");
        fixture.store.drain();
        assert_eq!(fixture.store.in_flight(), (0, 0));
    }
    fixture.check();
    fixture.end();
}

/// Goal: a read that is in flight when its entry ends leaves nothing, and the wait for it ends. Method: a waiter
/// whose completion is kept back; the entry ends between.
fn a_read_in_flight_outlives_its_entry<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    fixture.write_all_back();
    let (outcome, _) = fixture.load(0);
    let Loaded::Away(ticket) = outcome else { panic!("{outcome:?}") };
    fixture.backing.faults().holds.store(true, Relaxed);
    fixture.backing.faults().refuse.store(1, Relaxed);
    let waited = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| fixture.store.wait(ticket));
        waiter.join().expect("it does not panic")
    });
    assert_eq!(waited, Ok(()), "a second try succeeds");
    fixture.check_unit(0);
    // With a ticket of an entry that has ended nothing is waited for.
    let entry = fixture.entries[0].take().expect("it is stored");
    fixture.store.invalidate(entry, &fixture.figures);
    assert_eq!(fixture.store.wait(ticket), Ok(()));
    fixture.check();
    fixture.end();
}

/// Goal: errors of the backing are told as what they are. Method: each kind once.
fn failures_of_the_backing_are_named<B: Breakable>() {
    let mut fixture = Fixture::<B>::new(unit(0));
    fixture.store_all();
    let backing = fixture.backing.clone();
    let faults = backing.faults();
    // A write that fails for good: the unit stays in the pool.
    faults.is_final.store(true, Relaxed);
    faults.fail.store(usize::MAX, Relaxed);
    let done = fixture.store.write_back(usize::MAX);
    assert!(done.written == 0 && done.kept == done.started && done.kept > 0, "{done:?}");
    assert_eq!(backing.locations(), 0);
    backing.behave();
    fixture.check();
    // A full backing: the walk ends.
    faults.refuse.store(usize::MAX, Relaxed);
    let done = fixture.store.write_back(usize::MAX);
    assert!(done.started == 0 && (1..=8).contains(&done.refused), "{done:?}");
    backing.behave();
    fixture.check();
    fixture.write_all_back();
    let ticket = |at| match fixture.load(at) {
        (Loaded::Away(ticket), _) => ticket,
        (outcome, _) => panic!("{outcome:?}"),
    };
    let expected = |at: usize| key().checksum(&fixture.units[at]);
    // Reads that fail for now: the wait gives up, and a later one succeeds.
    faults.is_final.store(false, Relaxed);
    faults.fail.store(3, Relaxed);
    let error = fixture.store.wait(ticket(0)).expect_err("three tries");
    assert_eq!(error, Error::Unreadable { expected: expected(0), is_transient: true });
    fixture.check_unit(0);
    // One that fails for good.
    faults.is_final.store(true, Relaxed);
    faults.fail.store(1, Relaxed);
    let error = fixture.store.wait(ticket(1)).expect_err("it cannot be read");
    assert_eq!(error, Error::Unreadable { expected: expected(1), is_transient: false });
    assert_eq!(fixture.load(1).0, Loaded::Lost(error));
    assert_eq!(fixture.store.wait(Ticket { handle: handle(&fixture, 1), ..ticket(2) }), Ok(()));
    // Other bytes.
    faults.damage.store(1, Relaxed);
    let damaged = fixture.store.wait(ticket(2));
    let outcome = fixture.load(2).0;
    let Loaded::Lost(error) = outcome else { panic!("{damaged:?} {outcome:?}") };
    let text = error.to_string();
    assert!(text.contains(&format!("{:?}", expected(2))), "{text}");
    // What is stored anew is well again, and so is all the rest.
    assert_eq!(fixture.store_all()[1], Outcome::Compressed);
    fixture.entries[2].take().into_iter().for_each(|entry| {
        fixture.store.invalidate(entry, &fixture.figures);
    });
    fixture.check();
    fixture.end();
}

fn handle<B>(fixture: &Fixture<B>, at: usize) -> crate::zsmalloc::Handle {
    fixture.entries[at].as_ref().expect("it is stored").0
}

/// Goal: fetched entries keep their locations, whatever their handles are: who let one go to make place for another
/// left it in memory for good. Method: two entries whose handles differ by 4096 are fetched, and put away.
#[test]
fn entries_of_like_handles_keep_their_locations() {
    const APART: usize = 4096;
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    fixture.units = (0..=APART).map(|at| bytes(at as u64, 4096)).collect();
    fixture.entries = fixture.units.iter().map(|_| None).collect();
    fixture.store_all();
    fixture.write_all_back();
    let entries = [0, APART].map(|at| fixture.entries[at].as_ref().expect("it is stored"));
    let [first, last] = [0, APART].map(|at| handle(&fixture, at).to_raw() as usize);
    assert_eq!(last - first, APART);
    fixture.store.fetch(entries.map(|entry| fixture.store.ticket(entry)), |_| false);
    fixture.store.drain();
    assert_eq!(fixture.store.spill_stats().kept, 2);
    entries.into_iter().for_each(|entry| assert!(fixture.store.put_away(entry)));
    let (spill, pool) = (fixture.store.spill_stats(), fixture.store.pool_stats());
    assert_eq!((spill.units, pool.objects), (APART as u64 + 1, 0), "{spill:?}");
    fixture.end();
}

/// Goal: a backing that is busy costs no location; one that refuses while nothing is on its way may lack room, and gets
/// some. Method: some entries are at both, one write is on its way, and the next is refused.
#[test]
fn a_busy_backing_costs_no_location() {
    let fixture = Fixture::<Faulty>::with_some_at_both(&[20, 21]);
    let ticket = |at: usize| fixture.store.ticket(fixture.entries[at].as_ref().expect("stored"));
    let kept = fixture.store.spill_stats().kept;
    assert!(kept > 10);
    let faults = fixture.backing.faults();
    faults.holds.store(true, Relaxed);
    assert_eq!(fixture.store.write_back_chosen(&[ticket(20)]).started, 1);
    faults.refuse.store(1, Relaxed);
    assert_eq!(fixture.store.write_back_chosen(&[ticket(21)]).refused, 1);
    assert_eq!(fixture.store.spill_stats().kept, kept);
    faults.holds.store(false, Relaxed);
    fixture.store.drain();
    faults.refuse.store(1, Relaxed);
    assert_eq!(fixture.store.write_back_chosen(&[ticket(21)]).refused, 1);
    assert_eq!(fixture.store.spill_stats().kept, 0);
    fixture.check();
    fixture.end();
}

/// A regression: what the backing has too did not leave the pool if a write that had failed was completed by the same
/// call, and a client of a disk found no room. Goal: it leaves. Method: a write that fails is on its way, and others
/// are at both.
#[test]
fn a_failed_write_keeps_nobody_from_returning() {
    let fixture = Fixture::<Faulty>::with_some_at_both(&[20]);
    let ticket = fixture.store.ticket(fixture.entries[20].as_ref().expect("it is stored"));
    let faults = fixture.backing.faults();
    faults.holds.store(true, Relaxed);
    assert_eq!(fixture.store.write_back_chosen(&[ticket]).started, 1);
    faults.fail.store(1, Relaxed);
    faults.holds.store(false, Relaxed);
    let done = fixture.store.return_kept(4);
    assert_eq!((done.written, done.kept), (4, 1), "{done:?}");
    fixture.check();
    fixture.end();
}

/// A backing that refuses all writes; while it looks at a write, the owner ends that write's entry, if it is this one.
#[derive(Debug, Default)]
struct Ending {
    store: OnceLock<Weak<Store<Arc<World>>>>,
    entry: Mutex<{ RANK_BACKING + 1 }, Option<EntryId>>,
}

impl Backing for Ending {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let (store, entry) = (self.store.get().and_then(Weak::upgrade), self.entry.lock().take());
        if let (Some(store), Some(entry)) = (store, entry) {
            store.invalidate(entry, &Figures::default());
        }
        requests.iter_mut().for_each(|request| request.refused = Some(Failure::Transient));
    }

    fn poll(&self, _each: &mut dyn FnMut(Completion<'_>)) {}

    fn discard(&self, _location: Location, _length: usize) {}
}

/// Goal: a refused write counts as refused only if it counts as not written: who subtracts one from the other had less
/// than nothing. Method: two writes are refused, and one entry ends meanwhile.
#[test]
fn a_refused_write_of_a_dead_entry_counts_nowhere() {
    let zcomp = Zcomp::new(Algorithm::Lz4.into(), unit(0), 1).expect("the default level");
    let backing = Arc::new(Ending::default());
    let store = Store::new(vec![zcomp], World::new(), key());
    let store = Arc::new(store.with_backing(Box::new(Arc::clone(&backing)), 0));
    backing.store.set(Arc::downgrade(&store)).expect("it is set once");
    let pages = [bytes(1, 4096), bytes(2, 4096)];
    let mut batch = [0, 1].map(|at| Outgoing::new(&pages[at], None));
    store.store(0, CodecId::FIRST, &mut batch, &Figures::default());
    let [lives, dies] = batch.map(|unit| unit.entry.expect("there is memory"));
    let tickets = [store.ticket(&lives), store.ticket(&dies)];
    *backing.entry.lock() = Some(dies);
    assert_eq!(store.write_back_chosen(&tickets).refused, 2);
    let stats = store.spill_stats();
    assert_eq!((stats.not_written, stats.refused, store.pool_stats().objects), (1, 1, 1));
    store.invalidate(lives, &Figures::default());
}

/// Goal: bytes that change in the pool are not handed out. Method: the words of a row are exchanged, which is the
/// same.
#[test]
fn a_unit_with_another_checksum_is_lost() {
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    fixture.store_all();
    let word = &fixture.store.pool().words(handle(&fixture, 1))[1];
    word.fetch_xor(1, Relaxed);
    let Loaded::Lost(Error::Corrupt { expected, found }) = fixture.load(1).0 else {
        panic!("it is handed out")
    };
    assert_eq!(found, key().checksum(&fixture.units[1]));
    assert_ne!(expected, found);
    word.fetch_xor(1, Relaxed);
    fixture.check();
    fixture.end();
}

/// Goal: without a backing nothing is written and nobody waits.
#[test]
fn a_store_without_a_backing_keeps_everything() {
    let mut fixture = Fixture::<Faulty>::new(unit(0));
    let zcomp = Zcomp::new(Algorithm::Zstd.into(), unit(0), 1).expect("the default level");
    fixture.store = Store::new(vec![zcomp], Arc::clone(&fixture.world), key());
    fixture.store_all();
    assert_eq!(fixture.store.write_back(usize::MAX), WrittenBack::default());
    fixture.store.drain();
    fixture.check();
    fixture.end();
}

/// Goal: threads, walkers and waiters do not disturb each other. Method: three threads store, load, compare and end
/// entries of their own, two write back and compact, and the backing fails now and then.
fn threads_and_walkers_agree<B: Breakable>() {
    const STEPS: usize = if cfg!(debug_assertions) { 4000 } else { 20_000 };
    let seed = seed();
    let (world, backing) = (World::new(), B::new(300 << 10));
    let codecs = [Algorithm::Lz4, Algorithm::Zstd]
        .map(|algorithm| Zcomp::new(algorithm.into(), unit(0), 2).expect("the default level"));
    let store = Store::new(codecs.into(), Arc::clone(&world), key());
    let store = store.with_backing(Box::new(backing.clone()), 0);
    let (figures, working) = (Figures::default(), AtomicUsize::new(3));
    // What is to be written back whatever its age; some of it has ended by then.
    let some = Mutex::<1, Vec<Ticket>>::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (store, figures, working, some) = (&store, &figures, &working, &some);
            scope.spawn(move || {
                let choose = |ticket| some.lock().push(ticket);
                work(store, figures, Random::new(seed.wrapping_mul(8) + thread), STEPS, choose);
                working.fetch_sub(1, Relaxed);
            });
        }
        for walker in 0..2 {
            let (store, working, faults, some) = (&store, &working, backing.faults(), &some);
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_mul(16) + 8 + walker);
                while working.load(Relaxed) > 0 {
                    store.write_back(1 + random.below(20));
                    let chosen: Vec<Ticket> = some.lock().drain(..).collect();
                    store.write_back_chosen(&chosen);
                    match random.below(4) {
                        0 => _ = store.pool().compact(16 << 10),
                        1 => faults.holds.store(random.below(2) == 0, Relaxed),
                        2 => faults.fail.store(random.below(3), Relaxed),
                        _ => faults.refuse.store(random.below(3), Relaxed),
                    }
                }
            });
        }
    });
    backing.behave();
    store.drain();
    assert_eq!(figures.stored_units.load(Relaxed), 0, "STORE-3");
    assert_eq!(figures.compressed_bytes.load(Relaxed), 0);
    let spill = store.spill_stats();
    println!("{spill:?}");
    assert!(
        spill.units == 0 && spill.kept == 0 && spill.read > 0 && spill.returned > 0,
        "{spill:?}"
    );
    assert!(spill.written + spill.returned >= spill.read, "{spill:?}");
    assert_eq!(backing.locations(), 0);
    check_rows(store.pool(), 0);
    assert_eq!(store.pool_stats().objects, 0);
    drop(store);
    assert_eq!(world.pages.load(Relaxed), 0);
}

/// One thread's entries: each with its contents.
fn work(
    store: &Store<Arc<World>>,
    figures: &Figures,
    mut random: Random,
    steps: usize,
    choose: impl Fn(Ticket),
) {
    let mut mine: Vec<(EntryId, Vec<u8>)> = Vec::new();
    let load = |entry: &EntryId, contents: &Vec<u8>| {
        let mut place = vec![0; contents.len()];
        loop {
            let mut batch = [Incoming::new(entry, &mut place)];
            store.load(0, &mut batch);
            match batch[0].outcome {
                Loaded::Whole => break,
                Loaded::Away(ticket) => match store.wait(ticket) {
                    Ok(()) => {}
                    Err(error) => assert!(error.is_transient(), "{error}"),
                },
                outcome => panic!("{outcome:?}"),
            }
        }
        assert!(place == *contents, "other bytes");
    };
    for step in 0..steps {
        let most = if step / 500 % 2 == 0 { 120 } else { 20 };
        if mine.len() < most && random.below(3) > 0 {
            let mut contents = random.bytes(4096);
            contents[random.below(4096)..].fill(0);
            let old = (random.below(3) == 0 && !mine.is_empty())
                .then(|| mine.swap_remove(random.below(mine.len())));
            let is_same = random.below(3) == 0;
            let contents = match &old {
                Some((_, same)) if is_same => same.clone(),
                _ => contents,
            };
            let is_clean = is_same && old.is_some();
            let codec = CodecId::new(random.below(2)).expect("one of two");
            let mut batch = [Outgoing::new(&contents, old.map(|(entry, _)| entry))];
            store.store(0, codec, &mut batch, figures);
            assert_eq!(batch[0].outcome == Outcome::Clean, is_clean);
            let entry = batch[0].entry.take().expect("there is memory");
            mine.push((entry, contents));
        } else if !mine.is_empty() {
            let at = random.below(mine.len());
            let (entry, contents) = &mine[at];
            load(entry, contents);
            match random.below(6) {
                0 | 1 => _ = store.put_away(entry),
                2 => choose(store.ticket(entry)),
                3 => store.give_up_backing(entry),
                _ => {}
            }
            if random.below(2) == 0 {
                let (entry, _) = mine.swap_remove(at);
                store.invalidate(entry, figures);
            }
        }
    }
    for (entry, contents) in mine {
        load(&entry, &contents);
        store.invalidate(entry, figures);
    }
}
