//! What comes back from a disk that lies.

use super::super::disk::SLOT_BYTES;
use super::super::location::Place;
use super::{Fixture, SMALL, pages, thirds};
use crate::store::backing::{Failure, Location};
use crate::testing::{Random, seed};

fn slot(location: &Location) -> u64 {
    u64::from(Place::of(*location).slot)
}

/// Reads all of the objects in one batch; those in the slots `hurt` are lost, the others right.
fn check(fixture: &Fixture, locations: &[Location], objects: &[Vec<u8>], hurt: &[u64]) {
    let before = fixture.areas.stats();
    let wanted: Vec<_> = locations.iter().copied().zip(objects.iter().map(Vec::len)).collect();
    for ((found, object), (location, length)) in
        fixture.read(&wanted).into_iter().zip(objects).zip(&wanted)
    {
        let touched = Place::of(*location).slots(*length);
        let is_hurt = touched.into_iter().any(|slot| hurt.contains(&u64::from(slot)));
        let expected = if is_hurt { Err(Failure::Final) } else { Ok(object.clone()) };
        assert!(found == expected, "{location:?}, hurt slots {hurt:?}");
    }
    let after = fixture.areas.stats();
    assert!(after.tampered - before.tampered >= 2 * hurt.len() as u64, "{after:?}");
    assert_eq!(after.failed_medium, before.failed_medium, "it is counted apart");
    assert!(hurt.is_empty() || after.reads_again > before.reads_again);
}

/// Goal: a flipped bit is found, wherever it is. Method: one bit of each slot in turn, each of 8 bits of a byte.
#[test]
fn a_flipped_bit_is_found() {
    let mut random = Random::new(seed());
    for objects in [pages(0..24), thirds(60)] {
        let fixture = Fixture::new(SMALL, &[(64, 0)]);
        let locations = fixture.write_all(&objects);
        let mut slots: Vec<u64> = locations.iter().map(slot).collect();
        slots.dedup();
        for slot in slots {
            let (byte, bit) = (random.below(SLOT_BYTES), random.below(8));
            fixture.disks[0].tamper(slot, |bytes| bytes[byte] ^= 1 << bit);
            check(&fixture, &locations, &objects, &[slot]);
            fixture.disks[0].tamper(slot, |bytes| bytes[byte] ^= 1 << bit);
            check(&fixture, &locations, &objects, &[]);
        }
    }
}

/// Goal: two slots that changed places are found, both.
#[test]
fn a_swapped_slot_is_found() {
    let fixture = Fixture::new(SMALL, &[(64, 0)]);
    let objects = pages(0..24);
    let locations = fixture.write_all(&objects);
    let disk = &fixture.disks[0];
    let exchange = |one: u64, other: u64| {
        let bytes = [one, other].map(|slot| disk.slot(slot).expect("it was written"));
        disk.tamper(one, |place| *place = bytes[1]);
        disk.tamper(other, |place| *place = bytes[0]);
    };
    for pair in locations.windows(2) {
        let (one, other) = (slot(&pair[0]), slot(&pair[1]));
        exchange(one, other);
        check(&fixture, &locations, &objects, &[one, other]);
        exchange(one, other);
        check(&fixture, &locations, &objects, &[]);
    }
}

/// Goal: slots of two areas that changed places are found: each area has a key of its own.
#[test]
fn a_slot_of_another_area_is_found() {
    let fixture = Fixture::new(SMALL, &[(16, 0), (17, 0)]);
    let objects = pages(0..32);
    let locations = fixture.write_all(&objects);
    // The same slot, generation and contents, under two keys.
    let bytes = fixture.disks[1].slot(3).expect("it was written");
    fixture.disks[0].tamper(3, |place| *place = bytes);
    let hurt = |location: &Location| Place::of(*location).area.get() == 0 && slot(location) == 3;
    let wanted: Vec<_> = locations.iter().map(|location| (*location, 4096)).collect();
    for (found, location) in fixture.read(&wanted).into_iter().zip(&locations) {
        assert_eq!(found.is_err(), hurt(location));
    }
}

/// Goal: the bytes that a slot had before are found, even if an object of then had the same place and length.
#[test]
fn a_replayed_slot_is_found() {
    let fixture = Fixture::new(SMALL, &[(16, 0)]);
    let (old, new) = (pages(0..16), pages(100..116));
    let before = fixture.write_all(&old);
    fixture.discard(&before, &old);
    let locations = fixture.write_all(&new);
    assert_eq!(locations, before, "the same slots");
    for location in &locations {
        let slot = slot(location);
        let disk = &fixture.disks[0];
        let (now, replayed) = (disk.slot(slot), disk.slot_before(slot));
        disk.tamper(slot, |bytes| *bytes = replayed.expect("it was written twice"));
        check(&fixture, &locations, &new, &[slot]);
        disk.tamper(slot, |bytes| *bytes = now.expect("it was written"));
        check(&fixture, &locations, &new, &[]);
    }
}

/// Goal: a slot of zeros, as a hole has them, is found.
#[test]
fn a_hole_is_found() {
    let fixture = Fixture::new(SMALL, &[(64, 0)]);
    let objects = thirds(30);
    let locations = fixture.write_all(&objects);
    let slot = slot(&locations[7]);
    fixture.disks[0].tamper(slot, |bytes| bytes.fill(0));
    check(&fixture, &locations, &objects, &[slot]);
}

/// Goal: bytes that were wrong once only are not a loss. Method: each kind of damage, on the way and not on the
/// medium.
#[test]
fn what_is_wrong_once_is_read_again() {
    let fixture = Fixture::new(SMALL, &[(16, 0)]);
    let (old, new) = (pages(0..16), pages(100..116));
    fixture.discard(&fixture.write_all(&old), &old);
    let locations = fixture.write_all(&new);
    for kind in 0..3 {
        fixture.disks[0].break_it(|faults| match kind {
            0 => faults.flipped = 1,
            1 => faults.misplaced = 1,
            _ => faults.replayed = 1,
        });
        let before = fixture.areas.stats();
        fixture.check(&locations, &new);
        let after = fixture.areas.stats();
        assert_eq!(after.tampered - before.tampered, 1, "kind {kind}");
        assert_eq!(after.reads_again - before.reads_again, 1, "kind {kind}");
    }
}

/// Goal: bytes that were wrong once are not a loss, either, if the read before has failed for all objects of its
/// transfer.
#[test]
fn what_is_wrong_once_after_a_failed_read_is_read_again() {
    let fixture = Fixture::new(SMALL, &[(16, 0)]);
    let objects = pages(0..16);
    let locations = fixture.write_all(&objects);
    // The first read, of several objects, fails. One of those that follow, each of one object, brings a flipped bit.
    fixture.disks[0].break_it(|faults| (faults.failed_reads, faults.flipped) = (1, 1));
    let before = fixture.areas.stats();
    fixture.check(&locations, &objects);
    let after = fixture.areas.stats();
    assert_eq!(after.failed_medium - before.failed_medium, 1);
    assert_eq!(after.tampered - before.tampered, 1);
}

/// Goal: what is on the disk says nothing of what was written. Method: the same contents, twice, with long runs of
/// one byte.
#[test]
fn contents_do_not_show_on_the_disk() {
    let fixture = Fixture::new(SMALL, &[(64, 0)]);
    let objects = vec![vec![0x5A; 4096]; 32];
    let locations = fixture.write_all(&objects);
    let slots = locations.iter().map(|location| fixture.disks[0].slot(slot(location)));
    let slots: Vec<_> = slots.map(|bytes| bytes.expect("it was written")).collect();
    for (at, bytes) in slots.iter().enumerate() {
        assert!(bytes.chunks(16).all(|block| block != [0x5A; 16]), "slot {at}");
        let ones: u32 = bytes.iter().map(|byte| byte.count_ones()).sum();
        assert!((15_700..17_100).contains(&ones), "slot {at}: {ones} of 32768 bits");
        assert!(slots[..at].iter().all(|other| other != bytes), "slot {at} as another");
    }
    fixture.check(&locations, &objects);
}
