//! The areas beside a map, with disks that fail; and each promise of their own.

mod fork;
mod speed;
mod tamper;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;

use super::disk::faulty::{Faults, Faulty};
use super::location::Place;
use super::slots::CLUSTER_SLOTS;
use super::{
    AREAS_MAX, AreaId, Areas, AreasStats, Config, KeyRoom, NewArea, SECRET_BYTES, Seal, script,
};
use crate::store::backing::{
    Backing, Completed, Completion, Failure, Location, Operation, Request, Token,
};
use crate::testing::{Random, seed};
use crate::zsmalloc::world::bytes;

/// Goal: areas do what a map does, whatever their disks do; and the scripts meet everything that is counted. Method:
/// scripts of seeded bytes.
#[test]
fn areas_agree_with_a_map() {
    let seed = seed();
    let mut all = BTreeMap::new();
    for round in 0..if cfg!(debug_assertions) { 1000 } else { 4000 } {
        let mut random = Random::new(seed.wrapping_mul(1 << 20) + round);
        let length = 200 + random.below(3000);
        let script = random.bytes(length);
        println!("seed {seed}, round {round}");
        let (stats, no_memory) = script::play_and_count(&script);
        for (name, count) in counts(&stats).into_iter().chain([("no memory", no_memory)]) {
            *all.entry(name).or_insert(0) += count;
        }
    }
    println!("{all:#?}");
    for (name, count) in all {
        assert!(count > 0, "no script comes to {name}");
    }
}

/// What a script must come to.
fn counts(stats: &AreasStats) -> [(&'static str, u64); 17] {
    [
        ("swpout 0", stats.swpout[0]),
        ("swpout 4", stats.swpout[4]),
        ("fallback 0", stats.swpout_fallback[0]),
        ("fallback 4", stats.swpout_fallback[4]),
        ("writes", stats.writes),
        ("reads", stats.reads),
        ("bytes_written", stats.bytes_written),
        ("bytes_read", stats.bytes_read),
        ("reads_again", stats.reads_again),
        ("clusters_discarded", stats.clusters_discarded),
        ("failed", stats.failed_full.min(stats.failed_busy).min(stats.failed_medium)),
        ("tampered", stats.tampered),
        ("refused_limit", stats.refused_limit),
        ("refused_full", stats.refused_full),
        ("refused_busy", stats.refused_busy),
        ("slots_bad", stats.slots_bad),
        ("memory", stats.table_bytes.min(stats.buffer_bytes)),
    ]
}

/// Areas over faulty disks.
pub(super) struct Fixture {
    pub(super) areas: Areas,
    pub(super) disks: Vec<Faulty>,
}

/// What became of a write, and of a read.
pub(super) type Written = Result<Location, Failure>;
pub(super) type ReadBack = Result<Vec<u8>, Failure>;

/// For objects of up to a page.
pub(super) const SMALL: Config =
    Config { object_bytes_max: 4096, buffer_bytes: 4 << 20, limit_bytes: u64::MAX };

pub(super) fn new_area(disk: &Faulty, slots: u32, priority: i32) -> NewArea {
    let mut secret = [u8::try_from(slots % 251).expect("a byte"); SECRET_BYTES];
    let seal = Seal::new(Box::new(Box::<KeyRoom>::default()), &mut secret);
    NewArea { disk: Box::new(disk.clone()), slots, priority, seal }
}

impl Fixture {
    /// One disk for each area, of so many slots and with this priority.
    pub(super) fn new(config: Config, areas: &[(u32, i32)]) -> Fixture {
        let mut fixture = Fixture { areas: Areas::new(config), disks: Vec::new() };
        areas.iter().for_each(|(slots, priority)| _ = fixture.add(*slots, *priority));
        fixture
    }

    pub(super) fn add(&mut self, slots: u32, priority: i32) -> AreaId {
        self.add_on(Faulty::new(seed() + self.disks.len() as u64), slots, priority)
    }

    fn add_on(&mut self, disk: Faulty, slots: u32, priority: i32) -> AreaId {
        let id = self.areas.add(new_area(&disk, slots, priority)).expect("fewer than 16");
        self.disks.push(disk);
        id
    }

    /// Submits one request after the other, flushes, and waits for all of them.
    fn submit(&self, operations: &[Operation<'_>]) -> Vec<Result<Option<Vec<u8>>, Failure>> {
        let mut ends: Vec<Option<Result<Option<Vec<u8>>, Failure>>> = vec![None; operations.len()];
        for (number, operation) in (0..).zip(operations) {
            let token = Token::numbered(number);
            let mut request = [Request { token, operation: *operation, refused: None }];
            self.areas.submit(&mut request);
            ends[number as usize] = request[0].refused.map(Err);
        }
        self.areas.flush();
        while ends.iter().any(Option::is_none) {
            self.areas.poll(&mut |Completion { token, result }| {
                let end = &mut ends[token.number() as usize];
                assert_eq!(*end, None, "a request ends twice");
                *end = Some(result.map(|completed| match completed {
                    Completed::Written(location) => Some(location.get().to_le_bytes().into()),
                    Completed::Read(bytes) => Some(bytes.to_vec()),
                }));
            });
            self.areas.pause();
        }
        ends.into_iter().flatten().collect()
    }

    pub(super) fn write(&self, objects: &[Vec<u8>]) -> Vec<Written> {
        let operations: Vec<_> = objects.iter().map(|object| Operation::Write(object)).collect();
        let location = |bytes: Option<Vec<u8>>| {
            let bytes = bytes.expect("a location").try_into().expect("8 bytes");
            Location::new(u64::from_le_bytes(bytes)).expect("42 bits")
        };
        self.submit(&operations).into_iter().map(|end| end.map(location)).collect()
    }

    /// Submits a batch of writes, which are all refused. Returns by how much the counts of the limit and of slots rise.
    fn refused_together(&self) -> (u64, u64) {
        let (before, page) = (self.areas.stats(), [1; 4096]);
        let request = |number| Request {
            token: Token::numbered(number),
            operation: Operation::Write(&page),
            refused: None,
        };
        let mut requests = [0, 1, 2].map(request);
        self.areas.submit(&mut requests);
        let is_refused = |request: &Request<'_>| request.refused == Some(Failure::Transient);
        assert!(requests.iter().all(is_refused));
        let after = self.areas.stats();
        (after.refused_limit - before.refused_limit, after.refused_full - before.refused_full)
    }

    /// Writes, where nothing fails.
    pub(super) fn write_all(&self, objects: &[Vec<u8>]) -> Vec<Location> {
        self.write(objects).into_iter().map(|end| end.expect("nothing fails")).collect()
    }

    pub(super) fn read(&self, objects: &[(Location, usize)]) -> Vec<ReadBack> {
        let operation = |(location, length): &(Location, usize)| Operation::Read {
            location: *location,
            length: *length,
        };
        let operations: Vec<_> = objects.iter().map(operation).collect();
        let bytes = |bytes: Option<Vec<u8>>| bytes.expect("bytes");
        self.submit(&operations).into_iter().map(|end| end.map(bytes)).collect()
    }

    /// Reads all of them in one batch, and compares.
    pub(super) fn check(&self, locations: &[Location], objects: &[Vec<u8>]) {
        let wanted: Vec<_> = locations.iter().copied().zip(objects.iter().map(Vec::len)).collect();
        for (found, object) in self.read(&wanted).into_iter().zip(objects) {
            assert!(found.as_ref() == Ok(object), "other bytes, or none");
        }
    }

    pub(super) fn discard(&self, locations: &[Location], objects: &[Vec<u8>]) {
        for (location, object) in locations.iter().zip(objects) {
            self.areas.discard(*location, object.len());
        }
    }

    /// Slots in use, once the rest of the run is given back.
    pub(super) fn slots_used(&self) -> u64 {
        assert!(self.areas.end_run(), "nothing is in flight");
        self.areas.stats().slots_used
    }
}

/// Objects of a page each, all different.
pub(super) fn pages(tags: std::ops::Range<u64>) -> Vec<Vec<u8>> {
    tags.map(|tag| bytes(tag, 4096)).collect()
}

/// Objects of a third of a page or so.
pub(super) fn thirds(count: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(count);
    (0..count).map(|tag| bytes(tag, 700 + random.below(1300))).collect()
}

fn area_of(locations: &[Location]) -> Vec<usize> {
    locations.iter().map(|location| AreaId::of(*location).get()).collect()
}

/// Goal: what is written together is written and read by few transfers, and fills its slots. Method: objects of a
/// third of a page, of which 60 go out; all of them are read in one batch.
#[test]
fn neighbours_share_transfers() {
    let fixture = Fixture::new(SMALL, &[(1000, 0)]);
    let objects = thirds(60);
    let locations = fixture.write_all(&objects);
    let bytes: usize = objects.iter().map(Vec::len).sum();
    let written = fixture.areas.stats();
    let slots = bytes.div_ceil(4096) as u64;
    assert!(written.bytes_written <= (slots + 2) * 4096 * 105 / 100, "{bytes} {written:?}");
    assert!(written.writes <= slots.div_ceil(16) + 1, "{written:?}");
    fixture.check(&locations, &objects);
    let read = fixture.areas.stats();
    assert!(read.reads <= slots.div_ceil(14) + 1, "{read:?}");
    // Between two reads a slot may be needed by both.
    assert!(read.bytes_read <= written.bytes_written + read.reads * 4096, "{read:?}");
    fixture.discard(&locations, &objects);
    assert_eq!(fixture.slots_used(), 0);
}

/// Goal: an object that is wanted by itself costs one transfer of the slots that it touches.
#[test]
fn one_object_is_one_short_read() {
    let fixture = Fixture::new(SMALL, &[(1000, 0)]);
    let objects = thirds(40);
    let locations = fixture.write_all(&objects);
    for (location, object) in locations.iter().zip(&objects) {
        let before = fixture.areas.stats();
        fixture.check(&[*location], std::slice::from_ref(object));
        let after = fixture.areas.stats();
        let touched = Place::of(*location).slots(object.len()).len() as u64;
        assert_eq!(after.reads - before.reads, 1);
        assert_eq!(after.bytes_read - before.bytes_read, touched * 4096);
    }
}

/// Goal: the area of the highest priority is filled first, equal ones in turn, and the limit counts over all.
#[test]
fn areas_are_filled_by_priority_and_in_turn() {
    let fixture = Fixture::new(SMALL, &[(128, 1), (128, 5), (128, 5)]);
    // Thirty-two pages are a run.
    let areas = area_of(&fixture.write_all(&pages(0..384)));
    let runs: Vec<usize> = areas.chunks(32).map(|run| run[0]).collect();
    assert!(areas.chunks(32).all(|run| run.iter().all(|area| *area == run[0])));
    assert_eq!(runs[..8], [1, 2, 1, 2, 1, 2, 1, 2]);
    assert_eq!(runs[8..], [0; 4]);
    assert_eq!(fixture.write(&pages(400..401)), [Err(Failure::Transient)]);
    assert_eq!(fixture.refused_together(), (0, 1), "the limit, no slots");
}

/// Goal: no more slots are in use than the limit says, and it can be raised.
#[test]
fn the_limit_holds_over_all_areas() {
    let fixture = Fixture::new(Config { limit_bytes: 50 << 12, ..SMALL }, &[(40, 0), (40, 0)]);
    let first = fixture.write(&pages(0..80));
    let kept: Vec<Location> = first.iter().copied().flatten().collect();
    assert_eq!((kept.len(), fixture.slots_used()), (50, 50));
    assert_eq!(fixture.write(&pages(80..81)), [Err(Failure::Transient)]);
    assert_eq!(fixture.refused_together(), (1, 0), "the limit, no slots");
    fixture.areas.set_limit(60 << 12);
    assert_eq!(fixture.write(&pages(80..100)).iter().flatten().count(), 10);
    fixture.areas.set_limit(0);
    fixture.check(&kept, &pages(0..50));
}

/// Goal: a disk without room is not the end: another area is filled, and the first again when it has room.
#[test]
fn a_full_disk_leaves_the_objects_to_others() {
    let fixture = Fixture::new(SMALL, &[(1000, 2), (1000, 1)]);
    let objects = pages(0..16);
    let full = |faults: &mut Faults| faults.full = usize::MAX;
    fixture.disks[0].break_it(full);
    assert_eq!(fixture.write(&objects), [Err(Failure::Transient); 16]);
    assert_eq!(fixture.slots_used(), 0, "slots of a failed write are free");
    let locations = fixture.write_all(&objects);
    assert_eq!(area_of(&locations), [1; 16]);
    fixture.check(&locations, &objects);
    // Both are full: the objects stay where they are. Then there is room.
    fixture.disks[1].break_it(full);
    for _ in 0..3 {
        assert_eq!(fixture.write(&pages(16..32)), [Err(Failure::Transient); 16]);
    }
    fixture.disks[0].behave();
    let mut first = Vec::new();
    for round in 0..3 {
        first = fixture.write(&pages(16..32));
        if first.iter().all(Result::is_ok) {
            break;
        }
        assert!(round < 2, "the one with room is found");
    }
    fixture.check(&first.into_iter().flatten().collect::<Vec<_>>(), &pages(16..32));
    fixture.check(&locations, &objects);
    let stats = fixture.areas.stats();
    assert!(stats.failed_full >= 4 && stats.writes_failed == 0, "{stats:?}");
}

/// Goal: slots that a write did not reach are not used again, and do not count.
#[test]
fn bad_slots_are_left_alone() {
    let fixture = Fixture::new(SMALL, &[(128, 0)]);
    fixture.disks[0].break_it(|faults| faults.failed_writes = 1);
    assert_eq!(fixture.write(&pages(0..32)), [Err(Failure::Final); 32]);
    let stats = fixture.areas.stats();
    assert_eq!((stats.slots_bad, stats.failed_medium, fixture.slots_used()), (32, 1, 0));
    assert_eq!(stats.writes_failed, 1);
    let objects = pages(0..96);
    let locations = fixture.write_all(&objects);
    let slot = |location: &Location| Place::of(*location).slot;
    assert!(locations.iter().all(|location| slot(location) >= 32), "a bad slot is used");
    fixture.check(&locations, &objects);
    assert_eq!(fixture.write(&pages(100..101)), [Err(Failure::Transient)]);
}

/// Goal: one object that cannot be read costs no other its bytes, and only one whose slots are gone is lost. Method: a
/// batch that is read by one transfer, which fails; then each is read alone, and one of these fails too.
#[test]
fn a_failed_read_is_not_the_neighbours() {
    let fixture = Fixture::new(SMALL, &[(64, 0)]);
    let objects = pages(0..8);
    let locations = fixture.write_all(&objects);
    let wanted: Vec<_> = locations.iter().map(|location| (*location, 4096)).collect();
    for (failures, lost, is_short) in [(1, 0, false), (2, 1, false), (1, 0, true), (2, 1, true)] {
        fixture.disks[0].break_it(|faults| {
            let count = if is_short { &mut faults.short_reads } else { &mut faults.failed_reads };
            *count = failures;
        });
        let found = fixture.read(&wanted);
        let why = if is_short { Failure::Final } else { Failure::Transient };
        assert_eq!(found.iter().filter(|found| **found == Err(why)).count(), lost);
        let right =
            found.iter().zip(&objects).filter(|(found, object)| *found == &Ok((*object).clone()));
        assert_eq!(right.count(), 8 - lost);
    }
    fixture.disks[0].break_it(|faults| faults.busy = 1);
    assert!(fixture.read(&wanted).iter().all(|found| *found == Err(Failure::Transient)));
    fixture.check(&locations, &objects);
    let stats = fixture.areas.stats();
    assert!(stats.failed_medium > 0 && stats.failed_busy > 0 && stats.writes_failed == 0);
}

/// Goal: of a file that was truncated underneath, what is left is right, and the rest is lost for good.
#[test]
fn a_truncated_file_loses_what_was_there() {
    let fixture = Fixture::new(SMALL, &[(64, 0)]);
    let objects = pages(0..32);
    let locations = fixture.write_all(&objects);
    fixture.disks[0].break_it(|faults| faults.end = Some(20));
    let wanted: Vec<_> = locations.iter().map(|location| (*location, 4096)).collect();
    for ((found, object), location) in fixture.read(&wanted).into_iter().zip(objects).zip(locations)
    {
        let is_there = Place::of(location).slot < 20;
        assert_eq!(found, if is_there { Ok(object) } else { Err(Failure::Final) });
    }
}

/// Goal: a disk that takes one transfer at a time, and is late, gets all of them.
#[test]
fn a_slow_disk_gets_everything() {
    let fixture = Fixture::new(SMALL, &[(1000, 0)]);
    fixture.disks[0].break_it(|faults| faults.depth = 1);
    let objects = thirds(200);
    let locations = fixture.write_all(&objects);
    fixture.check(&locations, &objects);
    fixture.discard(&locations, &objects);
    assert_eq!(fixture.slots_used(), 0);
}

/// Goal: objects of any size up to 2 MiB, in adjacent slots; without such there is a refusal.
#[test]
fn large_objects_have_runs_of_their_own() {
    let config = Config { object_bytes_max: 2 << 20, buffer_bytes: 16 << 20, ..SMALL };
    let fixture = Fixture::new(config, &[(2048, 0)]);
    let objects: Vec<Vec<u8>> = [2 << 20, (2 << 20) - 1, 700_000, 4096, 5000, 100, 1 << 20]
        .map(|n| bytes(n as u64, n))
        .into();
    let locations = fixture.write_all(&objects);
    fixture.check(&locations, &objects);
    let bytes: usize = objects.iter().map(Vec::len).sum();
    assert!(fixture.slots_used() <= bytes.div_ceil(4096) as u64 + 7, "one slot for each at most");
    // Every other page stays: there are slots, but no two together.
    fixture.discard(&locations, &objects);
    let small = pages(0..2048);
    let small: Vec<_> = small.chunks(256).flat_map(|part| fixture.write_all(part)).collect();
    small.iter().step_by(2).for_each(|location| fixture.areas.discard(*location, 4096));
    assert_eq!(fixture.write(&objects[..1]), [Err(Failure::Transient)]);
    assert_eq!(fixture.write(&objects[3..4]).iter().flatten().count(), 1);
}

/// Goal: objects that need more than half of a cluster fill an area. Method: one of 300 slots after the other, until
/// there is no room.
#[test]
fn large_objects_fill_an_area() {
    let config = Config { object_bytes_max: 2 << 20, buffer_bytes: 16 << 20, ..SMALL };
    let fixture = Fixture::new(config, &[(16 << 9, 0)]);
    let mut locations = Vec::new();
    let object = |tag: usize| bytes(tag as u64, 300 * 4096 - 100);
    while let Ok(location) = fixture.write(&[object(locations.len())])[0] {
        locations.push(location);
    }
    // Of 8192 slots a last rest stays free, which is less than a cluster.
    assert!(locations.len() > (8192 - 512) / 300, "{} objects of 300 slots", locations.len());
    let objects: Vec<_> = (0..locations.len()).map(object).collect();
    // Two are read together.
    for (locations, objects) in locations.chunks(2).zip(objects.chunks(2)) {
        fixture.check(locations, objects);
    }
    fixture.discard(&locations, &objects);
    assert_eq!(fixture.slots_used(), 0);
}

/// Goal: no transfer goes on from one stretch into the next (`DISK-4`). Method: the areas assert it, while an area of
/// two stretches is filled with pages, and those at the border are read in one batch.
#[test]
fn stretches_have_transfers_of_their_own() {
    let mut fixture = Fixture::new(SMALL, &[]);
    let disk = Faulty::new(seed()).with_stretches(CLUSTER_SLOTS);
    fixture.add_on(disk, 2 * CLUSTER_SLOTS, 0);
    let objects = pages(0..u64::from(2 * CLUSTER_SLOTS));
    let write = |part: &[Vec<u8>]| fixture.write_all(part);
    let locations: Vec<_> = objects.chunks(200).flat_map(write).collect();
    // Frames are filled from the back, too, so neighbours are found by their slots.
    let mut written: Vec<_> = locations.into_iter().zip(objects).collect();
    written.sort_by_key(|(location, _)| Place::of(*location).slot);
    let (locations, objects): (Vec<_>, Vec<_>) = written.into_iter().unzip();
    let before = fixture.areas.stats().reads;
    let around = CLUSTER_SLOTS as usize - 4..CLUSTER_SLOTS as usize + 4;
    fixture.check(&locations[around.clone()], &objects[around]);
    assert_eq!(fixture.areas.stats().reads - before, 2, "neighbours are read together");
}

/// Goal: a cluster that nobody uses is given back to the disk, and used again.
#[test]
fn empty_clusters_are_punched_out() {
    let fixture = Fixture::new(SMALL, &[(1024, 0)]);
    for round in 0..3 {
        let objects = pages(0..700);
        let locations: Vec<_> =
            objects.chunks(200).flat_map(|part| fixture.write_all(part)).collect();
        fixture.check(&locations[..200], &objects[..200]);
        fixture.discard(&locations, &objects);
        assert_eq!(fixture.slots_used(), 0);
        fixture.areas.flush();
        assert!(fixture.areas.stats().clusters_discarded > round, "round {round}");
        assert!(fixture.disks[0].slots_kept() < 512, "the disk has forgotten a cluster");
    }
}

/// Goal: the disk hears of each cluster that nobody uses, also while nothing is written, and of no more at once than it
/// takes. It heard of them only with the next write, and what it had no room for it never heard of.
#[test]
fn the_disk_hears_of_all_empty_clusters() {
    let fixture = Fixture::new(SMALL, &[(4096, 0)]);
    let objects = pages(0..4000);
    let locations: Vec<_> = objects.chunks(200).flat_map(|part| fixture.write_all(part)).collect();
    fixture.disks[0].break_it(|faults| faults.discards = Some(3));
    fixture.discard(&locations, &objects);
    let kept = fixture.disks[0].slots_kept();
    for heard in [3, 3] {
        fixture.areas.tidy();
        assert_eq!(fixture.areas.stats().clusters_discarded, heard, "as many as it takes");
    }
    assert_eq!(fixture.disks[0].slots_kept(), kept - 3 * 512);
    fixture.disks[0].behave();
    (0..4).for_each(|_| fixture.areas.tidy());
    // One cluster is filled next, and one was left as it is for the one after it.
    assert!(fixture.disks[0].slots_kept() <= 2 * 512, "{}", fixture.disks[0].slots_kept());
}

/// Goal: after an outage of the medium the slots of the writes that failed are used again. Method: writes that fail
/// until no slot is left; then the medium is well.
#[test]
fn slots_come_back_after_an_outage() {
    let fixture = Fixture::new(SMALL, &[(256, 0)]);
    fixture.disks[0].break_it(|faults| faults.failed_writes = usize::MAX);
    while fixture.write(&pages(0..32))[0] == Err(Failure::Final) {}
    assert_eq!((fixture.areas.stats().slots_bad, fixture.slots_used()), (256, 0));
    fixture.disks[0].behave();
    let objects = pages(0..32);
    let mut locations = fixture.write(&objects);
    for _ in 0..64 {
        if locations.iter().all(Result::is_ok) {
            break;
        }
        locations = fixture.write(&objects);
    }
    fixture.check(&locations.into_iter().flatten().collect::<Vec<_>>(), &objects);
    assert_eq!(fixture.areas.stats().slots_bad, 0);
}

/// Goal: an area is emptied while it is used. Method: drain, with objects in flight; what is there is fetched and
/// dropped, and the area is handed back with its disk.
#[test]
fn a_drained_area_ends_when_it_is_empty() {
    let mut fixture = Fixture::new(SMALL, &[(64, 5)]);
    let first = AreaId::new(0).expect("the first");
    let objects = pages(0..20);
    let locations = fixture.write_all(&objects);
    let second = fixture.add(1000, 1);
    // One object more has been accepted, and waits for the flush.
    let more = bytes(99, 900);
    let operation = Operation::Write(&more);
    let mut request = [Request { token: Token::numbered(0), operation, refused: None }];
    fixture.areas.submit(&mut request);
    fixture.areas.drain(first);
    let mut last = None;
    while last.is_none() {
        fixture.areas.poll(&mut |Completion { result, .. }| match result {
            Ok(Completed::Written(location)) => last = Some(location),
            result => panic!("{result:?}"),
        });
        fixture.areas.pause();
    }
    let last = last.expect("it was written");
    assert_eq!(AreaId::of(last), first, "what was accepted is written");
    assert_eq!(area_of(&fixture.write_all(&objects)), [second.get(); 20]);
    fixture.check(&locations, &objects);
    let is_done = || {
        let mut done = Vec::new();
        fixture.areas.take_done(&mut |id, disk| done.push((id, disk)));
        done.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    let mut left: BTreeSet<u32> = locations.iter().map(|at| Place::of(*at).slot).collect();
    left.insert(Place::of(last).slot);
    for (location, object) in locations.iter().zip(&objects) {
        assert_eq!(fixture.areas.in_use(first, 0), left.first().copied());
        left.remove(&Place::of(*location).slot);
        assert!(is_done().is_empty());
        fixture.areas.discard(*location, object.len());
    }
    fixture.areas.discard(last, more.len());
    assert_eq!(fixture.areas.in_use(first, 0), None);
    assert_eq!(is_done(), [first]);
    assert_eq!(fixture.areas.status(first), None);
    // Its number is free again.
    assert_eq!(fixture.add(16, 9), first);
    fixture.areas.drain(second);
    fixture.areas.end_drain(second);
    let locations = fixture.write_all(&pages(0..40));
    assert!(area_of(&locations).contains(&second.get()), "it is used again");
}

/// Goal: an area grows while it is used. What it has no room for counts as "full" only where it is not about to grow.
#[test]
fn an_area_grows() {
    let fixture = Fixture::new(SMALL, &[(16, 0)]);
    let first = fixture.write_all(&pages(0..16));
    for (is_growing, counted) in [(true, (1, 0)), (false, (1, 1))] {
        fixture.areas.set_growing(is_growing);
        assert_eq!(fixture.write(&pages(16..17)), [Err(Failure::Transient)]);
        let stats = fixture.areas.stats();
        assert_eq!((stats.refused_growing, stats.refused_full), counted);
    }
    assert_eq!(fixture.areas.refused_for_room(), 2);
    fixture.areas.grow(AreaId::new(0).expect("the first"), 600);
    let second = fixture.write_all(&pages(16..200));
    fixture.check(&first, &pages(0..16));
    fixture.check(&second[..100], &pages(16..116));
}

/// Goal: there are 16 areas at most, and the one too many comes back.
#[test]
fn a_seventeenth_area_is_given_back() {
    let fixture = Fixture::new(SMALL, &[(16, 0); AREAS_MAX]);
    let refused = fixture.areas.add(new_area(&Faulty::new(1), 77, 3)).expect_err("it is full");
    assert_eq!((refused.slots, refused.priority), (77, 3));
    let locations = fixture.write_all(&pages(0..200));
    fixture.check(&locations, &pages(0..200));
}

/// One thread as the store: what is written and read, and by whom it is ended.
struct Writer<'w> {
    areas: &'w Areas,
    contents: &'w [Vec<u8>],
    enders: &'w [mpsc::Sender<(Location, usize)>],
    /// Where an object is read from, by its token.
    reads: BTreeMap<u32, Location>,
    in_flight: usize,
}

impl Writer<'_> {
    fn contents(&self, number: u32) -> &[u8] {
        &self.contents[number as usize % self.contents.len()]
    }

    fn submit(&self, number: u32, operation: Operation<'_>) -> bool {
        let mut request = [Request { token: Token::numbered(number), operation, refused: None }];
        self.areas.submit(&mut request);
        request[0].refused.is_none()
    }

    /// Reports what has ended to those who end objects; every third object is read before.
    fn poll(&mut self) {
        let areas = self.areas;
        let mut to_read = Vec::new();
        areas.poll(&mut |Completion { token, result }| {
            let number = token.number();
            let location = match result {
                Ok(Completed::Written(location)) if number % 3 == 0 => {
                    to_read.push((number, location));
                    return;
                }
                Ok(Completed::Written(location)) => location,
                Ok(Completed::Read(bytes)) => {
                    assert!(bytes == self.contents(number), "other bytes");
                    self.reads.remove(&number).expect("it was read from there")
                }
                Err(failure) => panic!("{failure}"),
            };
            self.in_flight -= 1;
            let ender = &self.enders[number as usize % 7 % self.enders.len()];
            ender.send((location, self.contents(number).len())).expect("it lives");
        });
        for (number, location) in to_read {
            self.reads.insert(number, location);
            let length = self.contents(number).len();
            let accepted = self.submit(number, Operation::Read { location, length });
            assert!(accepted, "few are read at once");
        }
    }
}

/// Goal: objects end in any thread while others are written and read. Method: one thread is the store, three take
/// locations from it, of objects that share slots, and end them.
#[test]
fn threads_end_objects_while_others_are_written() {
    const OBJECTS: u32 = if cfg!(debug_assertions) { 6000 } else { 30_000 };
    let fixture = Fixture::new(SMALL, &[(600, 0), (600, 0)]);
    let (areas, ended, contents) = (&fixture.areas, AtomicUsize::new(0), thirds(64));
    std::thread::scope(|scope| {
        let ender = |_| {
            let (sender, receiver) = mpsc::channel();
            let ended = &ended;
            scope.spawn(move || {
                for (location, length) in receiver {
                    areas.discard(location, length);
                    ended.fetch_add(1, Relaxed);
                }
            });
            sender
        };
        let enders: Vec<mpsc::Sender<(Location, usize)>> = (0..3).map(ender).collect();
        let (reads, in_flight) = (BTreeMap::new(), 0);
        let mut writer = Writer { areas, contents: &contents, enders: &enders, reads, in_flight };
        let mut next = 0;
        while next < OBJECTS || writer.in_flight > 0 {
            let batch = next..OBJECTS.min(next + 20);
            for number in batch {
                if !writer.submit(number, Operation::Write(writer.contents(number))) {
                    break;
                }
                (next, writer.in_flight) = (number + 1, writer.in_flight + 1);
            }
            areas.flush();
            writer.poll();
            assert!(areas.stats().slots_used <= 1200);
            areas.pause();
        }
    });
    assert_eq!(ended.load(Relaxed), OBJECTS as usize);
    let stats = fixture.areas.stats();
    assert_eq!((stats.objects, stats.bytes, fixture.slots_used()), (0, 0, 0), "{stats:?}");
}
