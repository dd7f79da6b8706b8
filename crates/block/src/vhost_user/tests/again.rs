//! Front ends that come back while their guests go on: to their disk, to one with its contents, and to another one.

use std::sync::Arc;

use vhost::VhostBackend as _;

use super::connections::Stage;
use super::frontend::{FrontEnd, Step};
use crate::testing::{Gated, Memory};
use crate::vhost_user::Marks;

const SIZE: u64 = 4 << 20;

/// The next life of a disk: what the notes of a saved one say.
fn notes_of(stage: &mut Stage) -> Marks {
    assert_eq!(stage.server.stop(), 0);
    Marks::from_notes(&stage.server.marks().to_notes())
}

/// Goal: `VU-7`. A guest that goes on finds its own disk, or one that has its contents, or none. Method: both queues
/// have served some requests; every one of the other starts is off by something.
#[test]
fn a_guest_goes_on_with_its_own_disk_only() {
    let disk = Arc::new(Memory::new(SIZE));
    let mut stage = Stage::of("own", disk.clone());
    let mut guest = FrontEnd::new(&stage.path, 2);
    assert_eq!(guest.write(0, 8, &[7; 4096]), 0);
    (0..5).for_each(|_| assert_eq!(guest.read(1, 8, 4096), [7; 4096]));
    assert_eq!(guest.used(), [1, 5]);
    // The connection is lost, and the disk goes on.
    guest.messages.get_vring_base(1).unwrap();
    guest.reconnect(&stage.path, &[1, 5]).unwrap();
    assert_eq!(guest.read(1, 8, 4096), [7; 4096]);
    let marks = notes_of(&mut stage);
    assert_eq!(marks.to_notes(), [0, 0, 1, 0, 1, 0, 6, 0]);

    // The disk has ended, and another one is there: for others it is a disk as any.
    let other = Stage::new("own");
    for (bases, why) in
        [([1, 6], "queue 0 goes on at request 1,"), ([0, 6], "queue 1 goes on at request 6,")]
    {
        assert!(guest.reconnect(&other.path, &bases).is_err());
        other.wait_for(0);
        let counts = other.server.counts();
        // The others are in a later line.
        let lines = other.lines();
        assert_eq!(lines.len(), usize::from(counts.unknown == 1), "{lines:?}");
        if let [line] = &lines[..] {
            assert!(line.contains(why) && line.contains("zfolio-vhost-own"), "{line}");
            assert!(line.contains("accepted: reset the guest") && !line.contains('\n'), "{line}");
        }
    }
    assert_eq!(other.server.counts().unknown, 2);
    let mut young = FrontEnd::new(&other.path, 2);
    assert_eq!(young.read(1, 8, 4096), [0; 4096]);
    drop((young, other));

    // The disk has ended, and goes on with its contents; what is not exactly its guest is refused.
    let stage = Stage::going_on("own", disk, marks);
    for bases in [[1, 5], [1, 7], [2, 6], [6, 1]] {
        assert!(guest.reconnect(&stage.path, &bases).is_err(), "{bases:?}");
        stage.wait_for(0);
    }
    assert_eq!(stage.server.counts().unknown, 4);
    guest.reconnect(&stage.path, &[1, 6]).unwrap();
    assert_eq!(guest.read(0, 8, 4096), [7; 4096]);
    // Its marks are taken: nobody else goes on there.
    let mut second = FrontEnd::connect(&stage.path, 2).unwrap();
    assert!(second.reconnect(&stage.path, &[1, 6]).is_err());
    assert_eq!(guest.read(1, 8, 4096), [7; 4096]);
    // Its driver begins anew.
    guest.messages.get_vring_base(0).unwrap();
    guest.place_rings(0, 0).unwrap();
}

/// Goal: nobody goes on with contents that were dropped, and nothing is forgotten while a front end is connected. After
/// a reset a guest came back to its disk, and read zeros where it had written.
#[test]
fn a_guest_does_not_go_on_with_contents_that_are_gone() {
    let stage = Stage::new("gone");
    let mut guest = FrontEnd::new(&stage.path, 2);
    assert_eq!(guest.write(0, 8, &[7; 4096]), 0);
    assert_eq!(stage.server.hold().err(), Some(1));
    // It is still known: it may leave and come back.
    guest.reconnect(&stage.path, &[1, 0]).unwrap();
    assert_eq!(guest.read(1, 8, 4096), [7; 4096]);
    drop(guest);
    stage.wait_for(0);
    assert_eq!(stage.server.marks().to_notes(), [0, 0, 1, 0, 1, 0, 1, 0]);
    let held = stage.server.hold().unwrap();
    stage.server.forget_marks();
    // Who connects meanwhile is served once the contents are gone.
    let mut late = FrontEnd::connect(&stage.path, 2).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(stage.server.counts().live, 0);
    drop(held);
    assert!(late.reconnect(&stage.path, &[1, 1]).is_err());
    stage.wait_for(0);
    assert_eq!(stage.server.counts().unknown, 1);
    // Its driver begins anew.
    assert_eq!(FrontEnd::new(&stage.path, 2).read(0, 0, 512), [0; 512]);
}

/// Goal: wherever a front end that comes back vanishes again, it may still come back. Method: each step.
#[test]
fn marks_are_not_lost_on_the_way() {
    let stage = Stage::new("marks");
    let mut guest = FrontEnd::new(&stage.path, 2);
    assert_eq!(guest.write(0, 8, &[7; 4096]), 0);
    assert_eq!(guest.write(1, 16, &[8; 4096]), 0);
    for last in 0..4 {
        guest.connect_again(&stage.path);
        guest.go(Step::Memory).unwrap();
        (0..2.min(last)).for_each(|queue| guest.place_rings(queue, 1).unwrap());
        if last == 3 {
            guest.enable(true).unwrap();
        }
    }
    guest.reconnect(&stage.path, &[1, 1]).unwrap();
    assert_eq!(guest.read(0, 16, 4096), [8; 4096]);
    assert_eq!(guest.read(1, 8, 4096), [7; 4096]);
    assert_eq!((stage.server.counts().unknown, stage.lines().len()), (0, 0));
}

/// Goal: a front end reads from the used rings how far its disk has come, once the connection has ended: so that is
/// final then, and is what the disk's mark says. Method: a stop while a request is under way.
#[test]
fn the_end_of_a_connection_is_the_last_thing() {
    let disk = Arc::new(Gated::new(Memory::new(SIZE)));
    let mut stage = Stage::of("final", disk.clone());
    let mut guest = FrontEnd::new(&stage.path, 2);
    assert_eq!(guest.write(0, 0, &[1; 512]), 0);
    disk.shut(true);
    guest.offer(0, 1, 0, 512);
    while disk.waits() == 0 {
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let (path, server) = (stage.path.clone(), &mut stage.server);
        let stops = scope.spawn(move || server.stop());
        // Once the server stops, its socket goes first.
        while path.exists() {
            std::thread::yield_now();
        }
        assert!(!guest.has_ended(100), "a request is under way");
        assert_eq!(guest.used(), [1, 0]);
        disk.shut(false);
        assert!(guest.has_ended(10_000));
        assert_eq!(guest.used(), [2, 0]);
        assert_eq!(stops.join().unwrap(), 0);
    });
    assert_eq!(stage.server.marks().to_notes(), [0, 0, 2, 0]);
}
