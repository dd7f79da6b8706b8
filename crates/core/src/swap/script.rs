//! A script of operations, played on areas and on a map at once. The fuzz target plays what the fuzzer writes, the
//! tests what seeded numbers write.
//!
//! Any bytes are a script: the first two choose sizes, each next one an operation that takes its numbers from those
//! that follow. The disks fail, dawdle and damage as the script says, and judge what they are asked to do, and there is
//! no memory for a table now and then. Whatever fails, an object comes back as it was written, or not at all; and
//! then its slot was damaged. No two objects have a byte of a disk in common, and no slot is in use that no object
//! touches.

use std::collections::{BTreeMap, BTreeSet};

use super::disk::faulty::{Faults, Faulty};
use super::location::{Place, SLOTS_MAX};
use super::slots::CLUSTER_SLOTS;
use super::{AREAS_MAX, AreaId, Areas, AreasStats, Config, KeyRoom, NewArea, SECRET_BYTES, Seal};
use crate::store::backing::{
    Backing, Completed, Completion, Failure, Location, Operation, Request, Token,
};
use crate::zsmalloc::world::bytes;

/// Bytes of all objects at a time, at most.
const BYTES_MAX: usize = 4 << 20;

/// Areas that a script has at once, but for frozen ones.
const OPEN_MAX: usize = 3;

/// One object.
#[derive(Debug)]
struct Object {
    contents: Vec<u8>,
    stage: Stage,
    /// Its owner has ended it while a request was in flight.
    is_dead: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Writing,
    Kept(Location),
    Reading(Location),
}

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When the areas do not do what a map does.
pub fn play(script: &[u8]) {
    play_and_count(script);
}

/// The same. Returns what the areas did, and how often those that are there at the end had no memory for a table.
pub(super) fn play_and_count(script: &[u8]) -> (AreasStats, u64) {
    let [sizes, limit, rest @ ..] = script else { return (AreasStats::default(), 0) };
    let mut player = Player::new(usize::from(*sizes), usize::from(*limit), rest);
    while !player.script.is_empty() {
        player.step();
    }
    player.end()
}

struct Player<'p> {
    areas: Areas,
    disks: [Option<Faulty>; AREAS_MAX],
    object_bytes_max: usize,
    script: &'p [u8],
    objects: BTreeMap<u32, Object>,
    /// The token of what is kept, by its location.
    places: BTreeMap<Location, u32>,
    next: u32,
    tag: u64,
}

impl<'p> Player<'p> {
    fn new(sizes: usize, limit: usize, script: &'p [u8]) -> Self {
        let object_bytes_max = [4096, 4096, 16 << 10, 64 << 10][sizes % 4];
        let buffer_bytes = [16 << 10, 64 << 10, 256 << 10, 1 << 20][sizes / 4 % 4];
        let limit_bytes = (16 + limit as u64 * 8) << 12;
        let areas = Areas::new(Config { object_bytes_max, buffer_bytes, limit_bytes });
        let mut player = Player {
            areas,
            disks: [const { None }; AREAS_MAX],
            object_bytes_max,
            script,
            objects: BTreeMap::new(),
            places: BTreeMap::new(),
            next: 0,
            tag: 0,
        };
        player.add(200, 0);
        player
    }

    /// The next byte of the script; 0 at its end.
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.script.split_first() else { return 0 };
        self.script = rest;
        usize::from(*first)
    }

    fn step(&mut self) {
        match self.byte() % 16 {
            0..=4 => self.write(),
            5 => self.areas.flush(),
            6..=7 => self.poll(),
            8..=9 => self.read(),
            10..=11 => self.discard(),
            12 => {
                self.areas.flush();
                self.areas.pause();
                self.poll();
            }
            13 => self.break_a_disk(),
            14 => self.change(),
            _ => self.settle(),
        }
        self.agrees();
    }

    fn add(&mut self, slots: u32, priority: i32) -> Option<AreaId> {
        self.tag += 1;
        // Every other disk has its clusters anywhere (`DISK-4`).
        let stretch_slots = if self.tag % 2 == 0 { CLUSTER_SLOTS } else { SLOTS_MAX };
        let disk = Faulty::new(self.tag).with_stretches(stretch_slots);
        let mut secret: [u8; SECRET_BYTES] =
            bytes(self.tag, SECRET_BYTES).try_into().expect("as many");
        let seal = Seal::new(Box::new(Box::<KeyRoom>::default()), &mut secret);
        assert_eq!(secret, [0; SECRET_BYTES]);
        let new = NewArea { disk: Box::new(disk.clone()), slots, priority, seal };
        match self.areas.add(new) {
            Ok(id) => {
                let before = self.disks[id.get()].replace(disk);
                assert!(before.is_none(), "an area twice");
                Some(id)
            }
            Err(_) => {
                assert!(self.disks.iter().all(Option::is_some), "there is room for an area");
                None
            }
        }
    }

    fn disk(&self, id: AreaId) -> &Faulty {
        self.disks[id.get()].as_ref().expect("an area has a disk")
    }

    /// The areas that are there.
    fn ids(&self) -> Vec<AreaId> {
        (0..AREAS_MAX).filter(|at| self.disks[*at].is_some()).filter_map(AreaId::new).collect()
    }

    /// A length of a kind that the script chooses: short, about a third of a page, whole slots, anything.
    fn length(&mut self) -> usize {
        let (kind, number) = (self.byte(), self.byte() << 8 | self.byte());
        let length = match kind % 8 {
            0 => 1 + number % 64,
            1..=3 => 700 + number % 1300,
            4 => (1 + number % 16) * 4096,
            5 => 4096 - number % 3,
            _ => 1 + number,
        };
        length.min(self.object_bytes_max)
    }

    fn write(&mut self) {
        let mut batch = Vec::new();
        for _ in 0..1 + self.byte() % 24 {
            let length = self.length();
            self.tag += 1;
            let contents = bytes(self.tag, length);
            let kept: usize = self.objects.values().map(|object| object.contents.len()).sum();
            if kept + length > BYTES_MAX {
                continue;
            }
            let object = Object { contents, stage: Stage::Writing, is_dead: false };
            self.objects.insert(self.next, object);
            batch.push(self.next);
            self.next += 1;
        }
        let request = |token: &u32| Request {
            token: Token::numbered(*token),
            operation: Operation::Write(&self.objects[token].contents),
            refused: None,
        };
        let mut requests: Vec<_> = batch.iter().map(request).collect();
        self.areas.submit(&mut requests);
        let refused = requests.iter().map(|request| request.refused).collect();
        self.refused(&batch, refused);
    }

    fn refused(&mut self, batch: &[u32], refused: Vec<Option<Failure>>) {
        for (token, refused) in batch.iter().zip(refused) {
            assert_ne!(refused, Some(Failure::Final), "nothing is refused for good");
            if refused.is_none() {
                continue;
            }
            let object = self.objects.get_mut(token).expect("it was submitted");
            match object.stage {
                Stage::Reading(location) => object.stage = Stage::Kept(location),
                _ => _ = self.objects.remove(token),
            }
        }
    }

    /// Reads objects that follow each other on a disk, or do not.
    fn read(&mut self) {
        let (count, first, step) = (1 + self.byte() % 24, self.byte(), 1 + self.byte() % 5);
        let kept: Vec<u32> = self.places.values().copied().collect();
        let mut batch: Vec<u32> = Vec::new();
        for nth in 0..count {
            let Some(token) = kept.get((first + nth * step) % kept.len().max(1)) else { break };
            if let Object { stage: Stage::Kept(_), .. } = self.objects[token] {
                if !batch.contains(token) {
                    batch.push(*token);
                }
            }
        }
        self.read_these(&batch);
    }

    fn read_these(&mut self, batch: &[u32]) {
        let mut requests = Vec::new();
        for token in batch {
            let object = self.objects.get_mut(token).expect("it is kept");
            let Stage::Kept(location) = object.stage else { panic!("{token} is not kept") };
            object.stage = Stage::Reading(location);
            requests.push(Request {
                token: Token::numbered(*token),
                operation: Operation::Read { location, length: object.contents.len() },
                refused: None,
            });
        }
        self.areas.submit(&mut requests);
        let refused = requests.iter().map(|request| request.refused).collect();
        self.refused(batch, refused);
    }

    fn poll(&mut self) {
        let Player { areas, disks, objects, places, .. } = self;
        areas.poll(&mut |completion| complete(areas, disks, objects, places, completion));
    }

    fn discard(&mut self) {
        let (count, first, step) = (self.byte() % 32, self.byte(), self.byte());
        for nth in 0..count {
            let all = self.objects.len().max(1);
            let chosen = self.objects.keys().nth((first + nth * step) % all).copied();
            if let Some(token) = chosen {
                self.end_one(token);
            }
        }
    }

    fn end_one(&mut self, token: u32) {
        let object = self.objects.get_mut(&token).expect("it was chosen");
        match object.stage {
            Stage::Writing | Stage::Reading(_) => object.is_dead = true,
            Stage::Kept(location) => {
                self.areas.discard(location, object.contents.len());
                self.places.remove(&location);
                self.objects.remove(&token);
            }
        }
    }

    fn break_a_disk(&mut self) {
        let (what, nth, count) = (self.byte(), self.byte(), self.byte() % 4);
        let ids = self.ids();
        let Some(id) = ids.get(nth % ids.len().max(1)) else { return };
        let change = |faults: &mut Faults| match what % 12 {
            0 => faults.full = count,
            1 => faults.busy = count,
            2 => faults.failed_writes = count,
            3 => faults.failed_reads = count,
            4 => faults.flipped = count,
            5 => faults.misplaced = count,
            6 => faults.replayed = count,
            7 => faults.is_lasting = count > 1,
            8 => faults.end = (count > 0).then(|| 64 * count as u64),
            9 => faults.depth = count,
            10 => faults.is_gone = count == 1,
            _ => faults.holds = count > 1,
        };
        self.disk(*id).break_it(change);
        if what % 29 == 0 {
            let slot = self.places.keys().nth(count).map(|location| Place::of(*location));
            if let Some(place) = slot {
                self.disk(place.area).tamper(u64::from(place.slot), |bytes| bytes[17] ^= 4);
            }
        }
    }

    /// Areas come and go, and processes fork.
    fn change(&mut self) {
        let (what, number) = (self.byte(), self.byte());
        let ids = self.ids();
        let id = ids.get(number % ids.len().max(1)).copied();
        let open = ids.iter().filter(|id| {
            let status = self.areas.status(**id).expect("it is there");
            !status.is_frozen && !status.is_draining
        });
        match (what % 9, id) {
            (0, _) if open.count() < OPEN_MAX => {
                let slots = u32::try_from(1 + number * 5).expect("few");
                let new = self.add(slots, i32::try_from(what / 9 % 3).expect("few") - 1);
                // A quarter of them has no memory for a table at first.
                if let Some(id) = new.filter(|_| number % 4 == 0) {
                    self.areas.refuse_memory(id, true);
                }
            }
            (1, Some(id)) => self.areas.drain(id),
            (2, Some(id)) => self.areas.end_drain(id),
            (3, Some(id)) => self.areas.grow(id, u32::try_from(number).expect("few")),
            (4, _) => self.areas.set_limit((16 + number as u64 * 8) << 12),
            (5, _) => self.take_done(),
            (6, _) => self.fork(number),
            (7, Some(id)) => _ = self.areas.refuse_memory(id, what / 9 % 4 == 0),
            _ => self.children_end(),
        }
    }

    fn take_done(&mut self) {
        let (disks, places) = (&mut self.disks, &self.places);
        self.areas.take_done(&mut |id, disk| {
            drop(disk);
            assert!(disks[id.get()].take().is_some(), "an area ends twice");
            assert!(places.keys().all(|location| AreaId::of(*location) != id), "it is in use");
        });
    }

    /// No other process has the disks.
    fn children_end(&mut self) {
        for id in self.ids() {
            self.areas.unshare(id);
            self.disk(id).unguard();
        }
    }

    /// Goes on as the parent, or as the child. The other process reads from then on what was there.
    fn fork(&mut self, number: usize) {
        self.settle();
        assert!(self.areas.share(), "nothing is in flight");
        if number % 2 == 0 {
            for (location, token) in &self.places {
                let place = Place::of(*location);
                let slots = place.slots(self.objects[token].contents.len());
                self.disk(place.area).guard(slots.map(u64::from));
            }
            return;
        }
        let disks = &mut self.disks;
        self.areas.leave_to_parent(&mut |id, _| disks[id.get()] = None);
        for id in self.ids() {
            self.tag += 1;
            let own = self.disk(id).fork(self.tag);
            own.break_it(|faults| faults.is_frozen = true);
            let old = self.areas.replace_disk(id, Box::new(own.clone()));
            assert!(old.is_ok(), "nobody uses it");
            self.disks[id.get()] = Some(own);
        }
        for (location, token) in &self.places {
            assert!(self.disks[AreaId::of(*location).get()].is_some(), "{token} is in no area");
        }
    }

    /// Waits until nothing is in flight.
    fn settle(&mut self) {
        self.areas.flush();
        for round in 0.. {
            self.poll();
            if self.objects.values().all(|object| matches!(object.stage, Stage::Kept(_))) {
                break;
            }
            assert!(round < 100_000, "a request does not end");
            self.areas.pause();
        }
        self.agrees();
        self.slots_are_those_of_objects();
    }

    /// What is counted is what the map has.
    fn agrees(&self) {
        let stats = self.areas.stats();
        let bytes: usize =
            self.places.values().map(|token| self.objects[token].contents.len()).sum();
        assert_eq!((stats.objects, stats.bytes), (self.places.len() as u64, bytes as u64));
    }

    /// Nothing is in flight: the slots in use are those which objects touch.
    fn slots_are_those_of_objects(&self) {
        assert!(self.areas.end_run(), "nothing is in flight");
        for id in self.ids() {
            let of_area = self.places.iter().filter(|(location, _)| AreaId::of(**location) == id);
            let touched: BTreeSet<u32> = of_area
                .flat_map(|(location, token)| {
                    Place::of(*location).slots(self.objects[token].contents.len())
                })
                .collect();
            let status = self.areas.status(id).expect("it is there");
            assert!(status.slots_left == 0 || status.is_shared || status.is_frozen, "{status:?}");
            assert_eq!(status.slots_used, touched.len() as u64 + status.slots_left, "{status:?}");
            let mut found = BTreeSet::new();
            let mut from = 0;
            while let Some(slot) = self.areas.in_use(id, from) {
                found.insert(slot);
                from = slot + 1;
            }
            assert_eq!(found, touched, "slots with objects");
        }
    }

    /// Nothing fails any more: everything is as it was written, goes, and leaves nothing.
    fn end(mut self) -> (AreasStats, u64) {
        self.disks.iter().flatten().for_each(Faulty::behave);
        let refused = self.ids().into_iter().map(|id| self.areas.refuse_memory(id, false)).sum();
        self.settle();
        loop {
            let kept: Vec<u32> = self.places.values().copied().take(100).collect();
            if kept.is_empty() {
                break;
            }
            self.read_these(&kept);
            self.settle();
            kept.into_iter().for_each(|token| self.end_one(token));
        }
        assert!(self.objects.is_empty());
        self.slots_are_those_of_objects();
        self.children_end();
        self.take_done();
        self.areas.flush();
        let stats = self.areas.stats();
        assert_eq!((stats.slots_used, stats.objects, stats.bytes), (0, 0, 0), "{stats:?}");
        for id in self.ids() {
            let status = self.areas.status(id).expect("it is there");
            assert!(!status.is_frozen && !status.is_draining, "it is done: {status:?}");
        }
        self.takes_more();
        (stats, refused)
    }

    /// A fresh area takes an object, and gives it back.
    fn takes_more(mut self) {
        self.areas.set_limit(u64::MAX);
        if self.ids().len() == AREAS_MAX {
            return;
        }
        self.add(16, i32::MAX);
        let contents = bytes(1, self.object_bytes_max);
        let object = Object { contents, stage: Stage::Writing, is_dead: false };
        self.objects.insert(0, object);
        let mut request = [Request {
            token: Token::numbered(0),
            operation: Operation::Write(&self.objects[&0].contents),
            refused: None,
        }];
        self.areas.submit(&mut request);
        assert_eq!(request[0].refused, None);
        self.settle();
        self.read_these(&[0]);
        self.settle();
        assert_eq!(self.places.len(), 1, "it was written");
    }
}

/// A request has ended.
fn complete(
    areas: &Areas,
    disks: &[Option<Faulty>],
    objects: &mut BTreeMap<u32, Object>,
    places: &mut BTreeMap<Location, u32>,
    Completion { token, result }: Completion<'_>,
) {
    let token = token.number();
    let object = objects.get_mut(&token).expect("it was requested");
    let length = object.contents.len();
    match (object.stage, result) {
        (Stage::Writing, Ok(Completed::Written(location))) => {
            let end = |location: Location, length: usize| location.get() + length as u64;
            let (before, after) =
                (places.range(..=location).next_back(), places.range(location..).next());
            assert!(after.is_none_or(|(next, _)| end(location, length) <= next.get()), "shared");
            let before = before.map(|(at, token)| (*at, *token));
            object.stage = Stage::Kept(location);
            if let Some((at, other)) = before {
                assert!(end(at, objects[&other].contents.len()) <= location.get(), "shared");
            }
            places.insert(location, token);
        }
        (Stage::Writing, Err(_)) => {
            objects.remove(&token);
            return;
        }
        (Stage::Reading(location), Ok(Completed::Read(found))) => {
            assert!(found == object.contents, "object {token} has other bytes");
            object.stage = Stage::Kept(location);
        }
        (Stage::Reading(location), Err(failure)) => {
            let place = Place::of(location);
            let disk = disks[place.area.get()].as_ref().expect("it has a disk");
            let is_hurt = place.slots(length).any(|slot| disk.has_hurt(u64::from(slot)));
            assert!(
                failure == Failure::Transient || is_hurt,
                "{token} is lost, and nothing failed"
            );
            object.stage = Stage::Kept(location);
        }
        (stage, result) => panic!("{result:?} of an object that is {stage:?}"),
    }
    let object = &objects[&token];
    if let (true, Stage::Kept(location)) = (object.is_dead, object.stage) {
        areas.discard(location, length);
        places.remove(&location);
        objects.remove(&token);
    }
}
