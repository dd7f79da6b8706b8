//! A script of operations, played on a store and on a map at once. The fuzz target plays what the fuzzer
//! writes, the tests what seeded numbers write: one interpreter, so that what one finds the other repeats.
//!
//! Any bytes are a script: the first chooses the units and the backing, each next one an operation that takes its
//! numbers from those that follow. Page source, codec and backing fail as the script says. Whatever fails, an entry
//! gives back what was stored in it, unless its bytes on the backing were hurt; and then it says so.

pub(crate) mod odd;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::backing::faulty::{Breakable, Faulty};
use super::backing::sealed::Sealed;
use super::{CodecId, EntryId, Incoming, Key, Loaded, Outcome, Outgoing, Reject, Store, Ticket};
use crate::page::{PAGE_BYTES, UnitOrder, same_filled};
use crate::stats::Figures;
use crate::zcomp::{Algorithm, Zcomp};
use crate::zsmalloc::world::{World, bytes, check_rows, unit};
use odd::Odd;

/// Bytes that a script stores at a time, at most.
const STORED_BYTES_MAX: usize = 4 << 20;

/// What the backing holds: a script that stores much finds it full.
const BACKING_BYTES: usize = 256 << 10;

/// Codecs of the store: two of this crate in units of one size, one of another implementer in pages.
const CODECS: usize = 3;

/// What was stored.
struct Stored {
    id: EntryId,
    contents: Vec<u8>,
    codec: CodecId,
    is_raw: bool,
}

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When the store does not do what a map does.
pub fn play(script: &[u8]) {
    let Some((first, rest)) = script.split_first() else { return };
    let order = [0, 2, 4][usize::from(*first) % 3];
    match first / 3 % 2 {
        0 => play_on::<Faulty>(unit(order), rest),
        _ => play_on::<Sealed>(unit(order), rest),
    }
}

fn play_on<B: Breakable>(order: UnitOrder, script: &[u8]) {
    let mut player = Player::<B>::new(order, script);
    while !player.script.is_empty() {
        player.step();
    }
    player.end();
}

/// The store, the map beside it, and what is left of the script.
struct Player<'p, B> {
    store: Store<Arc<World>>,
    world: Arc<World>,
    backing: B,
    odd: Odd,
    figures: Figures,
    script: &'p [u8],
    /// By the number of the handle.
    stored: BTreeMap<u32, Stored>,
    /// Tickets, most of them of entries that have ended.
    tickets: Vec<Ticket>,
    tag: u64,
}

impl<'p, B: Breakable> Player<'p, B> {
    fn new(order: UnitOrder, script: &'p [u8]) -> Self {
        let (world, backing, odd) = (World::new(), B::new(BACKING_BYTES), Odd::default());
        let software = |algorithm: Algorithm| Zcomp::new(algorithm.into(), order, 1);
        let codecs = vec![
            software(Algorithm::Lz4).expect("the default level"),
            software(Algorithm::Zstd).expect("the default level"),
            Zcomp::with_backend(&odd, unit(0), 1).expect("it needs nothing"),
        ];
        let key = Key::new(bytes(42, Key::BYTES).try_into().expect("as many bytes as a key has"));
        let store = Store::new(codecs, Arc::clone(&world), key);
        let store = store.with_backing(Box::new(backing.clone()), 0);
        let figures = Figures::default();
        let (stored, tickets) = (BTreeMap::new(), Vec::new());
        Player { store, world, backing, odd, figures, script, stored, tickets, tag: 0 }
    }

    /// The next byte of the script; 0 at its end.
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.script.split_first() else { return 0 };
        self.script = rest;
        usize::from(*first)
    }

    fn step(&mut self) {
        match self.byte() % 20 {
            0..=3 => self.store(),
            4..=6 => self.load(),
            7 => self.invalidate(),
            8..=9 => {
                let most = self.byte() % 32;
                let done = self.store.write_back(most);
                assert!(done.started <= most, "{done:?}");
            }
            10 => {
                let holds = self.byte() % 2 == 1;
                self.backing.faults().holds.store(holds, Relaxed);
            }
            11 => {
                let first = self.world.requests.load(Relaxed) + self.byte() % 8;
                let count = self.byte() % 8;
                self.world.refuse(first..first + count);
            }
            12 => {
                let count = self.byte() % 4;
                self.odd.0.store(count, Relaxed);
            }
            13 => self.break_the_backing(),
            14 => {
                let budget = self.byte() << 8;
                self.store.pool().compact(budget);
            }
            15 => self.put_away(),
            16 => {
                let (first, count) = (self.byte(), self.byte() % 12);
                let some = self.tickets.iter().skip(first % self.tickets.len().max(1)).take(count);
                let some: Vec<Ticket> = some.copied().collect();
                let waits = self.byte() % 2 == 0;
                self.store.fetch(some.iter().copied(), |_| waits);
                self.store.poll();
                some.into_iter().for_each(|ticket| _ = self.store.is_coming(ticket));
            }
            17 => self.write_back_chosen(),
            18 => self.give_up_backing(),
            _ => {
                let nth = self.byte();
                if let Some(ticket) = self.tickets.get(nth % self.tickets.len().max(1)) {
                    // Its entry may have ended, or be hurt.
                    self.store.wait(*ticket).ok();
                }
            }
        }
        self.agrees();
    }

    /// Lets some entries leave the pool again that were fetched.
    fn put_away(&mut self) {
        let (count, first) = (self.byte() % 12, self.byte());
        for raw in (0..count).filter_map(|nth| self.chosen(first + nth)) {
            let id = &self.stored[&raw].id;
            let returned = self.store.spill_stats().returned;
            let has_left = self.store.put_away(id);
            let returned = self.store.spill_stats().returned - returned;
            assert!(returned <= u64::from(has_left), "{returned} have left");
            assert_eq!(self.store.away(id).is_some(), has_left);
        }
    }

    /// Lets some entries that were fetched stay in the pool: the backing does not have them any more.
    fn give_up_backing(&mut self) {
        let (count, first) = (self.byte() % 12, self.byte());
        for raw in (0..count).filter_map(|nth| self.chosen(first + nth)) {
            let id = &self.stored[&raw].id;
            let was_away = self.store.away(id).is_some();
            let was = self.store.row(id.0).cell().load();
            let returned = self.store.spill_stats().returned;
            self.store.give_up_backing(id);
            assert_eq!(self.store.away(id).is_some(), was_away);
            assert_eq!(self.store.spill_stats().returned, returned, "it stays where it is");
            // What is damaged in the pool may be whole on the backing.
            let keeps = was.is_kept() && was.has_failed();
            assert_eq!(self.store.keeps_location(id), keeps, "{was:?}");
            assert!(keeps || was_away || !self.store.put_away(id), "it had a location");
        }
    }

    /// Writes back entries that the script chooses, some of which are away, same-filled or have ended.
    fn write_back_chosen(&mut self) {
        let (count, first) = (self.byte() % 40, self.byte());
        let living = (0..count).filter_map(|nth| self.chosen(first + nth));
        let living = living.map(|raw| self.store.ticket(&self.stored[&raw].id));
        let mut chosen: Vec<Ticket> =
            living.chain(self.tickets.iter().rev().take(3).copied()).collect();
        chosen.sort_by_key(|ticket| ticket.handle.to_raw());
        chosen.dedup();
        let done = self.store.write_back_chosen(&chosen);
        assert!(done.started + done.refused <= chosen.len(), "{done:?}");
        let are_here = chosen.iter().filter(|ticket| self.store.is_leaving(**ticket));
        assert!(are_here.count() <= self.store.in_flight().0);
        self.tickets.extend(chosen.into_iter().take(2));
    }

    fn break_the_backing(&mut self) {
        let (what, count) = (self.byte(), self.byte() % 4);
        let faults = self.backing.faults();
        faults.is_final.store(what % 2 == 0, Relaxed);
        let counter = match what / 2 % 3 {
            0 => &faults.refuse,
            1 => &faults.fail,
            _ => &faults.damage,
        };
        counter.store(count, Relaxed);
    }

    /// The entry with this number, counted round.
    fn chosen(&self, nth: usize) -> Option<u32> {
        self.stored.keys().nth(nth % self.stored.len().max(1)).copied()
    }

    /// Contents of a kind that the script chooses: same-filled, random, or shrinking to some length.
    fn contents(&mut self, length: usize) -> Vec<u8> {
        let kind = self.byte();
        self.tag += 1;
        let mut contents = bytes(self.tag, length);
        match kind % 8 {
            0 => contents.fill(self.byte().try_into().expect("a byte")),
            1 => {}
            part => contents[length * part / 16..].fill(0),
        }
        contents
    }

    /// Stores a batch: some units new, some of them copies that have changed, some that have not.
    fn store(&mut self) {
        let codec = CodecId::new(self.byte() % CODECS).expect("one of three");
        let length = self.store.codec(codec).unit().bytes();
        let mut olds: Vec<Option<Stored>> = Vec::new();
        let mut units: Vec<Vec<u8>> = Vec::new();
        for _ in 0..1 + self.byte() % 20 {
            let (how, nth) = (self.byte(), self.byte());
            let old = self.chosen(nth).filter(|_| how % 2 == 0);
            let old = old.and_then(|raw| self.stored.remove(&raw));
            let same = old.as_ref().filter(|old| how % 4 == 0 && old.contents.len() == length);
            let contents = match same.map(|old| old.contents.clone()) {
                Some(contents) => contents,
                None => self.contents(length),
            };
            units.push(contents);
            olds.push(old);
        }
        let (mut ids, olds): (Vec<_>, Vec<_>) = olds
            .into_iter()
            .map(|old| match old {
                Some(Stored { id, contents, codec, is_raw }) => {
                    (Some(id), Some((contents, codec, is_raw)))
                }
                None => (None, None),
            })
            .unzip();
        let mut batch: Vec<Outgoing<'_>> =
            units.iter().zip(&mut ids).map(|(unit, id)| Outgoing::new(unit, id.take())).collect();
        if self.bytes() + units.len() * length <= STORED_BYTES_MAX {
            if self.byte() % 2 == 0 {
                self.store.compare(&mut batch);
            }
            self.store.store(0, codec, &mut batch, &self.figures);
        }
        let results: Vec<_> = batch.into_iter().map(|unit| (unit.entry, unit.outcome)).collect();
        for ((unit, old), (id, outcome)) in units.into_iter().zip(olds).zip(results) {
            self.note(codec, unit, old, id, outcome);
        }
    }

    /// Notes what became of one unit.
    fn note(
        &mut self,
        codec: CodecId,
        unit: Vec<u8>,
        old: Option<(Vec<u8>, CodecId, bool)>,
        id: Option<EntryId>,
        outcome: Outcome,
    ) {
        let fresh = |is_raw| Some((unit.clone(), codec, is_raw));
        let kept = match outcome {
            Outcome::SameFilled => {
                assert!(same_filled(&unit).is_some());
                fresh(false)
            }
            Outcome::Compressed => fresh(false),
            Outcome::Incompressible => fresh(true),
            Outcome::Clean => {
                assert!(old.as_ref().is_some_and(|(contents, ..)| *contents == unit), "not clean");
                old
            }
            // The script had no room, or it was refused: the old copy is as it was.
            Outcome::Pending | Outcome::Rejected(Reject::AllocFail) => old,
            Outcome::Rejected(Reject::CompressFail) => {
                assert_eq!(codec.get(), CODECS - 1, "only one codec fails");
                old
            }
            Outcome::Changed => panic!("a unit is neither stored nor rejected"),
        };
        let is_new =
            matches!(outcome, Outcome::SameFilled | Outcome::Compressed | Outcome::Incompressible);
        assert_eq!(id.is_some(), kept.is_some(), "{outcome:?}");
        if let (Some(id), Some((contents, codec, is_raw))) = (id, kept) {
            if is_new {
                self.backing.faults().heal(id.0);
            }
            let other = self.stored.insert(id.0.to_raw(), Stored { id, contents, codec, is_raw });
            assert!(other.is_none(), "a handle twice");
        }
    }

    fn bytes(&self) -> usize {
        self.stored.values().map(|stored| stored.contents.len()).sum()
    }

    /// Loads a batch of entries, in any order, one of them perhaps twice.
    fn load(&mut self) {
        let (count, first, step) = (self.byte() % 12, self.byte(), self.byte());
        let chosen: Vec<u32> =
            (0..count).filter_map(|nth| self.chosen(first + nth * step)).collect();
        self.load_these(&chosen);
    }

    fn load_these(&mut self, chosen: &[u32]) {
        let mut places: Vec<Vec<u8>> =
            chosen.iter().map(|raw| vec![0xC3; self.stored[raw].contents.len()]).collect();
        let mut batch: Vec<Incoming<'_>> = chosen
            .iter()
            .zip(&mut places)
            .map(|(raw, place)| Incoming::new(&self.stored[raw].id, place))
            .collect();
        self.store.load(0, &mut batch);
        let outcomes: Vec<Loaded> = batch.into_iter().map(|unit| unit.outcome).collect();
        for ((raw, place), outcome) in chosen.iter().zip(places).zip(outcomes) {
            let Some(stored) = self.stored.get(raw) else { continue };
            match outcome {
                Loaded::Whole => assert!(place == stored.contents, "entry {raw} has other bytes"),
                Loaded::Away(ticket) => {
                    self.tickets.push(ticket);
                    self.fetch(*raw, ticket);
                }
                Loaded::Lost(error) => {
                    assert!(self.backing.faults().has_hurt(stored.id.0), "entry {raw}: {error}");
                }
                Loaded::Pending => panic!("entry {raw} was passed over"),
            }
        }
    }

    /// Waits for an entry, and loads it then.
    fn fetch(&mut self, raw: u32, ticket: Ticket) {
        let stored = &self.stored[&raw];
        if let Err(error) = self.store.wait(ticket) {
            let may_fail = self.backing.faults().has_hurt(stored.id.0) || error.is_transient();
            assert!(may_fail, "entry {raw}: {error}");
            return;
        }
        let mut place = vec![0xC3; stored.contents.len()];
        let mut batch = [Incoming::new(&stored.id, &mut place)];
        self.store.load(0, &mut batch);
        match batch[0].outcome {
            Loaded::Whole => assert!(place == stored.contents, "entry {raw} has other bytes"),
            Loaded::Lost(_) if self.backing.faults().has_hurt(stored.id.0) => {}
            outcome => panic!("entry {raw} after a wait: {outcome:?}"),
        }
    }

    fn invalidate(&mut self) {
        let (count, first, step) = (self.byte() % 8, self.byte(), self.byte());
        for nth in 0..count {
            if let Some(raw) = self.chosen(first + nth * step) {
                self.end_one(raw);
            }
        }
    }

    fn end_one(&mut self, raw: u32) {
        let stored = self.stored.remove(&raw).expect("it was chosen");
        self.store.invalidate(stored.id, &self.figures);
    }

    /// The figures say what the map says (`STORE-3`).
    fn agrees(&self) {
        let figure = |name: &str| self.figures.get(name).expect("a figure");
        let count = |wanted: &dyn Fn(&Stored) -> bool| {
            self.stored.values().filter(|stored| wanted(stored)).count() as u64
        };
        let same = |stored: &Stored| same_filled(&stored.contents).is_some();
        assert_eq!(figure("stored_units"), self.stored.len() as u64, "STORE-3");
        assert_eq!(figure("stored_bytes"), self.bytes() as u64);
        assert_eq!(figure("same_filled_units"), count(&same));
        assert_eq!(figure("incompressible_units"), count(&|stored| stored.is_raw));
        let of_codec = |codec| count(&|stored: &Stored| stored.codec == codec);
        let all: u64 = (0..CODECS).filter_map(CodecId::new).map(of_codec).sum();
        assert_eq!(all, self.stored.len() as u64, "each has one of the codecs");
        let (pool, spill) = (self.store.pool_stats(), self.store.spill_stats());
        let compressed = figure("compressed_bytes");
        // What has died in flight is still in the pool or on the backing.
        assert!(compressed <= pool.bytes_stored + spill.bytes, "{compressed} {pool:?} {spill:?}");
        assert!(spill.bytes <= self.backing.bytes() as u64, "{spill:?}");
        // Of two sizes: pages, and the units of the other codecs.
        let most = self.store.codec(CodecId::FIRST).unit().bytes() as u64;
        let sizes = |count: u64| count * PAGE_BYTES as u64..=count * most;
        assert!(sizes(spill.written).contains(&spill.written_unit_bytes), "{spill:?}");
        assert!(sizes(spill.read).contains(&spill.read_unit_bytes), "{spill:?}");
    }

    /// Nothing fails any more: everything is as it was stored, goes, and leaves nothing.
    fn end(mut self) {
        self.world.refuse(0..0);
        self.backing.behave();
        self.odd.0.store(0, Relaxed);
        self.store.drain();
        self.agrees();
        let (pool, spill) = (self.store.pool_stats(), self.store.spill_stats());
        let figure = |name: &str| self.figures.get(name).expect("a figure");
        assert_eq!(pool.bytes_stored + spill.bytes, figure("compressed_bytes"));
        assert_eq!(spill.units + spill.kept, self.backing.locations() as u64);
        assert_eq!(spill.bytes + spill.kept_bytes, self.backing.bytes() as u64);
        let without_object = figure("same_filled_units") + spill.units;
        check_rows(self.store.pool(), usize::try_from(without_object).expect("few"));
        let all: Vec<u32> = self.stored.keys().copied().collect();
        self.load_these(&all);
        all.into_iter().for_each(|raw| self.end_one(raw));
        self.agrees();
        self.store.drain();
        check_rows(self.store.pool(), 0);
        assert_eq!(self.store.pool_stats().objects, 0);
        assert_eq!(self.backing.locations(), 0, "a location was kept");
        drop(self.store);
        assert_eq!(self.world.pages.load(Relaxed), 0, "a page was kept");
    }
}
