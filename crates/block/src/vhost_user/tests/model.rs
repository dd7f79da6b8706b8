//! Random requests against a `Vec` of bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::testing::{Random, seed};

use super::rig::{BUFFERS, MEMORY_BYTES, OK, Rig, UNTOUCHED};
use crate::pieces::PIECE_BYTES;
use crate::testing::{Memory, Noted};
use crate::vhost_user::guest::{Driver, Entry, INDIRECT, header, linked, range};

/// The disk of the model.
const SIZE: usize = 3 << 20;

const KINDS: [u32; 12] = [0, 0, 0, 0, 1, 1, 1, 1, 4, 8, 11, 13];

/// A request that was made available, and what is known about its end.
struct Sent {
    kind: u32,
    head: u16,
    status: u64,
    /// Where a read or a name has to be, in order.
    places: Vec<(u64, u32)>,
    expected: Vec<u8>,
}

/// Gives out the memory of a guest from the front.
struct Room(u64);

impl Room {
    fn take(&mut self, random: &mut Random, bytes: u64) -> u64 {
        let at = self.0 + random.below_u64(40);
        self.0 = at + bytes;
        assert!(self.0 <= MEMORY_BYTES);
        at
    }

    /// Cuts bytes into ranges at random places.
    fn cut(&mut self, random: &mut Random, mut bytes: u64, pieces_max: usize) -> Vec<(u64, u32)> {
        let mut places = Vec::new();
        while bytes > 0 {
            let is_last = places.len() + 1 >= pieces_max || random.below(3) == 0;
            let length = if is_last { bytes } else { 1 + random.below_u64(bytes) };
            places.push((self.take(random, length), u32::try_from(length).unwrap()));
            bytes -= length;
        }
        places
    }
}

fn any_range(random: &mut Random) -> (usize, usize) {
    let sectors = SIZE / 512;
    let at = if random.below(2) == 0 { random.below(16) } else { random.below(sectors) };
    let most = (sectors - at).min(1500);
    let count = match random.below(6) {
        0 => 1 + random.below(most),
        1 => (1 + random.below(200)).min(most),
        _ => 8.min(most),
    };
    (at, count)
}

/// Writes bytes to places of the guest.
fn scatter(rig: &Rig, places: &[(u64, u32)], mut bytes: &[u8]) {
    for (at, length) in places {
        let (front, rest) = bytes.split_at(*length as usize);
        rig.write(*at, front);
        bytes = rest;
    }
}

/// Makes a request available, and carries it out on the model.
fn send(rig: &mut Rig, random: &mut Random, room: &mut Room, model: &mut [u8]) -> Sent {
    let kind = KINDS[random.below(KINDS.len())];
    let (sector, count) = any_range(random);
    let (from, to) = (512 * sector, 512 * (sector + count));
    let mut text = header(kind, sector as u64).to_vec();
    let (mut written, mut expected) = (Vec::new(), Vec::new());
    match kind {
        0 => {
            written = room.cut(random, (to - from) as u64, 12);
            expected = model[from..to].to_vec();
        }
        1 => {
            let (mut byte, step) = (random.byte(), random.byte() | 1);
            model[from..to].fill_with(|| {
                byte = byte.wrapping_mul(5).wrapping_add(step);
                byte
            });
            text.extend_from_slice(&model[from..to]);
        }
        8 => {
            written = room.cut(random, 20, 3);
            expected = b"a disk of a name that is too long"[..20].to_vec();
        }
        11 | 13 => {
            for _ in 0..1 + random.below(4) {
                let (sector, count) = any_range(random);
                let flags = if kind == 13 { u32::from(random.byte() & 1) } else { 0 };
                model[512 * sector..512 * (sector + count)].fill(0);
                text.extend_from_slice(&range(sector as u64, u32::try_from(count).unwrap(), flags));
            }
        }
        _ => {}
    }
    // For a status behind the data.
    room.0 += 1;
    // Header and data may be cut anywhere, and the status may be behind the data in the same descriptor.
    let sent = room.cut(random, text.len() as u64, 12);
    scatter(rig, &sent, &text);
    let status = if written.is_empty() || random.below(2) == 0 {
        room.take(random, 1)
    } else {
        let (at, bytes) = *written.last().unwrap();
        at + u64::from(bytes)
    };
    rig.write(status, &[UNTOUCHED]);
    let mut ranges: Vec<_> = sent.iter().map(|(at, bytes)| (*at, *bytes, false)).collect();
    ranges.extend(written.iter().map(|(at, bytes)| (*at, *bytes, true)));
    match ranges.last_mut() {
        Some((at, bytes, true)) if *at + u64::from(*bytes) == status => *bytes += 1,
        _ => ranges.push((status, 1, true)),
    }
    let head = if random.below(3) == 0 {
        let bytes = 16 * ranges.len() as u64;
        let table = room.take(random, bytes);
        Driver::put(&rig.memory, table, 0, &linked(&ranges, 0));
        let bytes = u32::try_from(bytes).unwrap();
        let first = rig.offer(&[(table, bytes, false)]);
        let entry = Entry { at: table, bytes, flags: INDIRECT, next: 0 };
        Driver::put(&rig.memory, rig.driver.descriptors, first, &[entry]);
        first
    } else {
        rig.offer(&ranges)
    };
    Sent { kind, head, status, places: written, expected }
}

fn check(rig: &mut Rig, sent: &Sent, context: &str) {
    let (head, written) = rig.driver.take(&rig.memory).expect(context);
    assert_eq!(head, u32::from(sent.head), "{context}: VU-4");
    assert_eq!(written as usize, sent.expected.len() + 1, "{context}: kind {}", sent.kind);
    assert_eq!(rig.read(sent.status, 1), [OK], "{context}: kind {}", sent.kind);
    let found: Vec<u8> =
        sent.places.iter().flat_map(|(at, bytes)| rig.read(*at, *bytes as usize)).collect();
    assert!(found == sent.expected, "{context}: contents of kind {}", sent.kind);
}

/// Goal: `VU-4`, `VU-5`, and contents as a naive disk has them. Method: random valid requests, several at a time, whose
/// bytes are cut into descriptors anywhere, in tables of their own or not.
#[test]
fn a_ring_agrees_with_a_naive_disk() {
    let seed = seed();
    let mut random = Random::new(seed);
    for round in 0..12_usize {
        let preferred = [512, 4096, 64 << 10, 2 << 20][round % 4];
        let disk = Arc::new(Memory::new(SIZE as u64).preferring(preferred));
        let mut rig = Rig::with(&disk, round % 3 != 0, round % 5 == 0);
        let mut model = vec![0; SIZE];
        for burst in 0..8 {
            let context = format!("seed {seed}, round {round}, burst {burst}");
            let mut room = Room(BUFFERS);
            // Their descriptors fit into the table together, and their data into the memory.
            let sent: Vec<Sent> = (0..1 + random.below(8))
                .map(|_| send(&mut rig, &mut random, &mut room, &mut model))
                .collect();
            let flushes = disk.flushes.load(Relaxed);
            // What is behind the buffers belongs to nobody.
            rig.write(room.0, &[UNTOUCHED; 64]);
            rig.serve().unwrap();
            sent.iter().for_each(|sent| check(&mut rig, sent, &context));
            assert_eq!(rig.driver.take(&rig.memory), None, "{context}");
            assert_eq!(
                rig.read(room.0, 64),
                [UNTOUCHED; 64],
                "{context}: bytes behind the buffers"
            );
            let through = round % 5 == 0;
            let durable =
                |sent: &&Sent| sent.kind == 4 || through && matches!(sent.kind, 1 | 11 | 13);
            let expected = flushes + sent.iter().filter(durable).count() as u64;
            assert_eq!(disk.flushes.load(Relaxed), expected, "{context}: flushes");
        }
    }
}

/// Goal: each unit that is whole in a request is read or written by one call, whatever its size, however the guest's
/// memory is cut, and wherever the request begins.
#[test]
fn a_whole_unit_is_one_call() {
    let seed = seed();
    let mut random = Random::new(seed);
    for unit in [4096, 64 << 10, 256 << 10, 512 << 10, 2 << 20] {
        for at in [0, 512, unit - 512, 5 * unit / 2] {
            let disk = Memory::new(16 << 20).preferring(u32::try_from(unit).unwrap());
            let noted = Arc::new(Noted::new(disk));
            let mut rig = Rig::with(&noted, true, false);
            let contents = random.bytes(5 << 20);
            let places = Room(BUFFERS + 16).cut(&mut random, contents.len() as u64, 12);
            let status = MEMORY_BYTES - 1;
            for (kind, what) in [(1, "write"), (0, "read")] {
                let context = format!("seed {seed}, {what}, {unit} at {at}");
                rig.write(BUFFERS, &header(kind, at / 512));
                let data = places.iter().map(|(at, bytes)| (*at, *bytes, kind == 0));
                let mut ranges = vec![(BUFFERS, 16, false)];
                ranges.extend(data);
                ranges.push((status, 1, true));
                // A read has to bring everything back.
                let untouched = vec![UNTOUCHED; contents.len()];
                scatter(&rig, &places, if kind == 1 { &contents } else { &untouched });
                let head = rig.offer(&ranges);
                rig.serve_one(head);
                assert_eq!(rig.read(status, 1), [OK], "{context}");
                let most = PIECE_BYTES.max(usize::try_from(unit).unwrap());
                noted.check_units_are_whole(at, contents.len(), most, &context);
            }
            let found: Vec<u8> =
                places.iter().flat_map(|(at, bytes)| rig.read(*at, *bytes as usize)).collect();
            assert!(found == contents, "seed {seed}, {unit} at {at}");
        }
    }
}
