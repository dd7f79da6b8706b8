//! Areas in both processes after a fork.

use super::super::AreaId;
use super::super::disk::faulty::Faulty;
use super::{Fixture, SMALL, area_of, pages, thirds};
use crate::store::backing::{Backing, Operation, Request, Token};

fn id(number: usize) -> AreaId {
    AreaId::new(number).expect("one of 16")
}

/// The judge panics at each write and discard from now on.
fn freeze(fixture: &Fixture) -> Vec<AreaId> {
    let frozen = fixture.areas.freeze().expect("nothing is in flight");
    let frozen: Vec<AreaId> = frozen.areas().collect();
    for id in &frozen {
        fixture.disks[id.get()].break_it(|faults| faults.is_frozen = true);
    }
    frozen
}

fn done(fixture: &Fixture) -> Vec<AreaId> {
    let mut done = Vec::new();
    fixture.areas.take_done(&mut |id, _| done.push(id));
    done
}

/// Goal: the parent reads what is in the frozen area, writes to another, and closes the frozen one once it is
/// empty; nothing is written or discarded there (`SWAP-5`). Method: a disk that judges.
#[test]
fn a_parent_goes_on_in_another_area() {
    let mut fixture = Fixture::new(SMALL, &[(2048, 0)]);
    let objects = thirds(1500);
    let locations: Vec<_> = objects.chunks(100).flat_map(|part| fixture.write_all(part)).collect();
    assert_eq!(freeze(&fixture), [id(0)]);
    // Without an area there is no write.
    let mut request =
        [Request { token: Token::numbered(0), operation: Operation::Write(&[1]), refused: None }];
    fixture.areas.submit(&mut request);
    assert!(request[0].refused.is_some());
    assert_eq!(fixture.add(2048, 0), id(1));
    let more = thirds(300);
    let new: Vec<_> = more.chunks(100).flat_map(|part| fixture.write_all(part)).collect();
    assert!(area_of(&new).iter().all(|area| *area == 1));
    for (locations, objects) in locations.chunks(100).zip(objects.chunks(100)) {
        fixture.check(locations, objects);
        assert_eq!(done(&fixture), []);
        fixture.discard(locations, objects);
        fixture.areas.flush();
    }
    assert_eq!(fixture.areas.stats().clusters_discarded, 0, "the child may read there");
    assert_eq!(done(&fixture), [id(0)]);
    new.chunks(100).zip(more.chunks(100)).for_each(|(new, more)| fixture.check(new, more));
}

/// Goal: a child leaves empty areas to its parent, and reads frozen ones through disks of its own.
#[test]
fn a_child_reads_what_its_parent_wrote() {
    let mut fixture = Fixture::new(SMALL, &[(64, 1), (64, 1), (64, 0)]);
    let objects = pages(0..32);
    let locations = fixture.write_all(&objects);
    assert_eq!(freeze(&fixture), [id(0), id(1)]);
    let mut left = Vec::new();
    fixture.areas.leave_to_parent(&mut |id, _| left.push(id));
    assert_eq!(left, [id(2)]);
    for number in [0, 1] {
        let own = fixture.disks[number].fork(9);
        let parents = fixture.areas.replace_disk(id(number), Box::new(own.clone()));
        drop(parents.expect("nobody uses it"));
        fixture.disks[number] = own;
    }
    fixture.check(&locations, &objects);
    // An area that it has not can't be given a disk.
    assert!(fixture.areas.replace_disk(id(2), Box::new(Faulty::new(1))).is_err());
    assert_eq!(fixture.add(64, 0), id(2));
    assert_eq!(area_of(&fixture.write_all(&pages(50..60))), [2; 10]);
    fixture.discard(&locations, &objects);
    assert_eq!(done(&fixture), [id(0), id(1)]);
}

/// Goal: after a fork that failed all is as it was; what an earlier fork has frozen stays frozen.
#[test]
fn a_failed_fork_freezes_nothing() {
    let mut fixture = Fixture::new(SMALL, &[(64, 1)]);
    let old = fixture.write_all(&pages(0..8));
    assert_eq!(freeze(&fixture), [id(0)]);
    assert_eq!(fixture.add(64, 0), id(1));
    let new = fixture.write_all(&pages(8..16));
    let frozen = fixture.areas.freeze().expect("nothing is in flight");
    assert_eq!(frozen.areas().collect::<Vec<_>>(), [id(1)]);
    let is_frozen = |number| fixture.areas.status(id(number)).expect("it is there").is_frozen;
    assert!(is_frozen(0) && is_frozen(1));
    fixture.areas.thaw(frozen);
    assert!(is_frozen(0) && !is_frozen(1));
    assert_eq!(area_of(&fixture.write_all(&pages(16..24))), [1; 8]);
    fixture.check(&old, &pages(0..8));
    fixture.check(&new, &pages(8..16));
}

/// Goal: nothing is frozen while a request is in flight: its bytes would be written, or read into memory that the
/// child has not.
#[test]
fn a_fork_waits_for_requests() {
    let fixture = Fixture::new(SMALL, &[(64, 1)]);
    let operation = Operation::Write(&[7; 100]);
    let mut request = [Request { token: Token::numbered(0), operation, refused: None }];
    fixture.areas.submit(&mut request);
    assert_eq!(fixture.areas.freeze(), None, "a frame is open");
    fixture.areas.flush();
    assert_eq!(fixture.areas.freeze(), None, "it is on its way");
    let mut is_written = false;
    while !is_written {
        fixture.areas.poll(&mut |_| is_written = true);
        fixture.areas.pause();
    }
    assert!(fixture.areas.freeze().is_some());
}
