//! Areas in both processes after a fork.

use super::super::disk::faulty::Faulty;
use super::super::{AreaId, AreasStats};
use super::{Fixture, SMALL, area_of, pages, thirds};
use crate::store::backing::{Backing, Failure, Operation, Request, Token};

fn id(number: usize) -> AreaId {
    AreaId::new(number).expect("one of 16")
}

/// Forks in the parent: the judge panics at a write or discard of what is there now.
fn share(fixture: &Fixture) {
    assert!(fixture.areas.share(), "nothing is in flight");
    for (number, disk) in fixture.disks.iter().enumerate() {
        let next = |from: &u32| fixture.areas.in_use(id(number), from + 1);
        let slots = std::iter::successors(fixture.areas.in_use(id(number), 0), next);
        let slots: Vec<u64> = slots.map(u64::from).collect();
        disk.guard(slots.into_iter());
    }
}

fn done(fixture: &Fixture) -> Vec<AreaId> {
    let mut done = Vec::new();
    fixture.areas.take_done(&mut |id, _| done.push(id));
    done
}

/// Goal: after a fork the parent reads, writes and frees as before, but no slot that a child may read is written or
/// discarded (`SWAP-5`); these are free once no child has the disk. Method: a disk that judges, in a small area.
#[test]
fn a_parent_keeps_what_a_child_may_read() {
    let fixture = Fixture::new(SMALL, &[(2048, 0)]);
    let objects = thirds(1500);
    let locations: Vec<_> = objects.chunks(100).flat_map(|part| fixture.write_all(part)).collect();
    let before = fixture.slots_used();
    share(&fixture);
    for (locations, objects) in locations.chunks(100).zip(objects.chunks(100)) {
        fixture.check(locations, objects);
        fixture.discard(locations, objects);
        fixture.areas.flush();
    }
    assert_eq!(fixture.slots_used(), before, "a child may read them");
    assert_eq!(fixture.areas.stats().clusters_discarded, 0, "a child may read there");
    // The rest of the area is written, freed and written again.
    for round in 0..8 {
        let more = thirds(300);
        let new: Vec<_> = more.chunks(100).flat_map(|part| fixture.write_all(part)).collect();
        new.chunks(100).zip(more.chunks(100)).for_each(|(new, more)| fixture.check(new, more));
        fixture.discard(&new, &more);
        assert_eq!(fixture.slots_used(), before, "round {round}");
    }
    // A second child, of a process that has nothing there any more.
    share(&fixture);
    assert_eq!(done(&fixture), []);
    fixture.areas.unshare(id(0));
    fixture.disks[0].unguard();
    assert_eq!(fixture.slots_used(), 0);
    let status = fixture.areas.status(id(0)).expect("it is there");
    assert!(!status.is_shared && status.slots_left == 0, "{status:?}");
    let all: Vec<_> = objects.chunks(100).flat_map(|part| fixture.write_all(part)).collect();
    all.chunks(100).zip(objects.chunks(100)).for_each(|(all, part)| fixture.check(all, part));
}

/// Goal: a child leaves empty areas to its parent, and reads the others through disks of its own; it never writes
/// there, and closes them once they are empty.
#[test]
fn a_child_reads_what_its_parent_wrote() {
    let mut fixture = Fixture::new(SMALL, &[(128, 1), (128, 1), (128, 0)]);
    let objects = pages(0..64);
    let locations = fixture.write_all(&objects);
    fixture.areas.set_limit(0);
    assert_eq!(fixture.write(&pages(64..65)), [Err(Failure::Transient)]);
    fixture.areas.set_limit(SMALL.limit_bytes);
    let before = fixture.areas.stats();
    assert!(
        before.refused_limit > 0
            && before.bytes_written > 0
            && before.swpout.iter().any(|runs| *runs > 0)
    );
    assert!(fixture.areas.share());
    let mut left = Vec::new();
    fixture.areas.leave_to_parent(&mut |id, _| left.push(id));
    assert_eq!(left, [id(2)], "the parent's");
    // What the areas did is the parent's, and its slots too; what they have is what a child has.
    let (now, AreasStats { objects: count, bytes, .. }) = (fixture.areas.stats(), before);
    let AreasStats { table_bytes, buffer_bytes, .. } = now;
    let none = AreasStats::default();
    assert_eq!(now, AreasStats { objects: count, bytes, table_bytes, buffer_bytes, ..none });
    for number in [0, 1] {
        let own = fixture.disks[number].fork(9);
        own.break_it(|faults| faults.is_frozen = true);
        let parents = fixture.areas.replace_disk(id(number), Box::new(own.clone()));
        drop(parents.expect("nobody uses it"));
        fixture.disks[number] = own;
    }
    fixture.check(&locations, &objects);
    // Without an area of its own there is no write.
    let mut request =
        [Request { token: Token::numbered(0), operation: Operation::Write(&[1]), refused: None }];
    fixture.areas.submit(&mut request);
    assert!(request[0].refused.is_some());
    // An area that it has not can't be given a disk.
    assert!(fixture.areas.replace_disk(id(2), Box::new(Faulty::new(1))).is_err());
    assert_eq!(fixture.add(64, 0), id(2));
    assert_eq!(area_of(&fixture.write_all(&pages(50..60))), [2; 10]);
    // That its parent has ended changes nothing.
    fixture.areas.unshare(id(0));
    assert_eq!(area_of(&fixture.write_all(&pages(60..70))), [2; 10]);
    fixture.discard(&locations, &objects);
    assert_eq!(done(&fixture), [id(0), id(1)]);
}

/// Goal: nothing is shared while a request is in flight: its bytes would be written, or read into memory that the
/// child has not.
#[test]
fn a_fork_waits_for_requests() {
    let fixture = Fixture::new(SMALL, &[(64, 1)]);
    let operation = Operation::Write(&[7; 100]);
    let mut request = [Request { token: Token::numbered(0), operation, refused: None }];
    fixture.areas.submit(&mut request);
    assert!(!fixture.areas.share(), "a frame is open");
    fixture.areas.flush();
    assert!(!fixture.areas.share(), "it is on its way");
    let mut is_written = false;
    while !is_written {
        fixture.areas.poll(&mut |_| is_written = true);
        fixture.areas.pause();
    }
    assert!(fixture.areas.share());
}
