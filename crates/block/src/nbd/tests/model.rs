//! Random requests against a `Vec` of bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::testing::{Random, seed};

use super::client::{
    BLOCK_STATUS, CACHE, Client, DF, FAST_ZERO, FLUSH, FUA, NO_HOLE, READ, REQ_ONE, TRIM, WRITE,
    WRITE_ZEROES, request,
};
use crate::device::Device;
use crate::pieces::PIECE_BYTES;
use crate::testing::{Looked, Memory, Noted, UNIT_BYTES};

/// The disk of the model.
const SIZE: usize = 3 << 20;

/// A request that was sent, and what is known about its reply.
struct Sent {
    command: u16,
    flags: u16,
    cookie: u64,
    at: u64,
    bytes: u32,
    /// What a read has to return: the contents when it was sent, since requests are served in order (`NBD-3`).
    contents: Vec<u8>,
}

/// Any valid request: mostly small, some of several pieces, some up to the end of the disk.
fn any_request(random: &mut Random, is_structured: bool) -> (u16, u16, u64, u32) {
    let sectors = SIZE / 512;
    let at = match random.below(4) {
        0 => random.below(8),
        1 => random.below(sectors / 8) * 8,
        _ => random.below(sectors),
    };
    let most = sectors - at;
    let count = match random.below(8) {
        0 => most,
        1 => 1 + random.below(most),
        2 | 3 => (1 + random.below(200)).min(most),
        _ => 8.min(most),
    };
    let (command, flags) = match random.below(16) {
        0..=5 => (READ, if is_structured && random.below(3) == 0 { DF } else { 0 }),
        6..=10 => (WRITE, 0),
        11 => (TRIM, 0),
        12 | 13 => {
            let flags = [0, NO_HOLE, FAST_ZERO, NO_HOLE | FAST_ZERO][random.below(4)];
            (WRITE_ZEROES, flags)
        }
        14 if is_structured => (BLOCK_STATUS, [0, REQ_ONE][random.below(2)]),
        14 => (CACHE, 0),
        _ => return (FLUSH, 0, 0, 0),
    };
    let flags = flags | if random.below(8) == 0 { FUA } else { 0 };
    (command, flags, 512 * at as u64, u32::try_from(512 * count).unwrap())
}

/// Appends requests to the stream and carries them out on the model.
fn send_some(
    random: &mut Random,
    is_structured: bool,
    model: &mut [u8],
    stream: &mut Vec<u8>,
) -> Vec<Sent> {
    let mut sent = Vec::new();
    for _ in 0..1 + random.below(20) {
        let (command, flags, at, bytes) = any_request(random, is_structured);
        let cookie = random.word();
        let from = usize::try_from(at).unwrap();
        let range = from..from + bytes as usize;
        stream.extend_from_slice(&request(command, flags, cookie, at, bytes));
        let mut contents = Vec::new();
        match command {
            READ => contents = model[range].to_vec(),
            WRITE => {
                let first = random.byte();
                let step = random.byte() | 1;
                let mut byte = first;
                model[range.clone()].fill_with(|| {
                    byte = byte.wrapping_mul(5).wrapping_add(step);
                    byte
                });
                stream.extend_from_slice(&model[range]);
            }
            TRIM | WRITE_ZEROES => model[range].fill(0),
            _ => {}
        }
        sent.push(Sent { command, flags, cookie, at, bytes, contents });
    }
    sent
}

fn check(client: &mut Client, sent: &Sent, context: &str) {
    let data_bytes = if sent.command == READ { sent.bytes as usize } else { 0 };
    let reply = client.incoming.reply(sent.cookie, data_bytes);
    assert_eq!(reply.error, 0, "{context}: {}", reply.text);
    match sent.command {
        READ => {
            let contents = reply.contents(sent.at, sent.bytes as usize);
            assert!(contents == sent.contents, "{context}: contents at {}", sent.at);
            if sent.flags & DF != 0 {
                assert_eq!(reply.data.len() + reply.holes.len(), 1, "{context}: one chunk");
            }
        }
        BLOCK_STATUS => {
            let total: u64 = reply.extents.iter().map(|extent| extent.0).sum();
            assert!(total <= u64::from(sent.bytes), "{context}: {total}");
            assert!(reply.extents.iter().all(|extent| [0, 3].contains(&extent.1)), "{context}");
            let is_joined = reply.extents.windows(2).all(|pair| pair[0].1 != pair[1].1);
            assert!(is_joined, "{context}: neighbours of a kind");
            if sent.flags & REQ_ONE != 0 {
                assert_eq!(reply.extents.len(), 1, "{context}");
            } else {
                assert_eq!(total, u64::from(sent.bytes), "{context}");
            }
        }
        _ => assert_eq!(reply.chunks, 0, "{context}"),
    }
}

/// Goal: `NBD-3`, and contents as a naive disk has them. Method: random valid requests, several at a time, in a stream
/// that is cut at random places.
#[test]
fn a_session_agrees_with_a_naive_disk() {
    let seed = seed();
    let mut random = Random::new(seed);
    for round in 0..12 {
        let is_structured = round % 3 != 0;
        let preferred = [512, 4096, 64 << 10, 2 << 20][round % 4];
        let disk = Arc::new(Memory::new(SIZE as u64).preferring(preferred));
        let mut client = Client::of(disk.clone(), is_structured);
        let mut model = vec![0; SIZE];
        for burst in 0..6 {
            let context = format!("seed {seed}, round {round}, burst {burst}");
            let mut stream = Vec::new();
            let sent = send_some(&mut random, is_structured, &mut model, &mut stream);
            let flushes = disk.flushes.load(Relaxed);
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let most = [3, 100, 5000, 300_000][random.below(4)];
                let (front, behind) = rest.split_at((1 + random.below(most)).min(rest.len()));
                client.send(front);
                rest = behind;
            }
            sent.iter().for_each(|sent| check(&mut client, sent, &context));
            assert!(client.incoming.0.is_empty() && !client.driver.is_closed, "{context}");
            let is_durable = |sent: &&Sent| {
                let changes = [WRITE, TRIM, WRITE_ZEROES].contains(&sent.command);
                sent.command == FLUSH || (changes && sent.flags & FUA != 0)
            };
            let expected = sent.iter().filter(is_durable).count() as u64;
            assert_eq!(disk.flushes.load(Relaxed) - flushes, expected, "{context}: FUA, FLUSH");
        }
        let bytes = u32::try_from(SIZE).unwrap();
        assert!(client.ask(READ, 0, 0, bytes).contents(0, SIZE) == model, "seed {seed}");
    }
}

/// Goal: each unit that is whole in a request is read or written by one call, whatever its size, and however the
/// payload arrives.
#[test]
fn a_whole_unit_is_one_call() {
    let seed = seed();
    let mut random = Random::new(seed);
    for unit in [4096, 64 << 10, 256 << 10, 512 << 10, 2 << 20] {
        for (round, at) in [0, 512, unit as u64 - 512, 5 * unit as u64 / 2].into_iter().enumerate()
        {
            let disk = Memory::new(24 << 20).preferring(u32::try_from(unit).unwrap());
            let noted = Arc::new(Noted::new(disk));
            let mut client = Client::of(noted.clone(), round % 2 == 0);
            let bytes = 7 << 20;
            let check = |what: &str, most: usize| {
                let context = format!("seed {seed}, {what}, {unit} at {at}");
                noted.check_units_are_whole(at, bytes, most, &context);
            };
            let contents = random.bytes(bytes);
            let length = u32::try_from(bytes).unwrap();
            client.send(&request(WRITE, 0, 3, at, length));
            let mut rest = &contents[..];
            while !rest.is_empty() {
                let (front, behind) = rest.split_at((1 + random.below(600_000)).min(rest.len()));
                client.send(front);
                rest = behind;
            }
            assert_eq!(client.incoming.reply(3, 0).error, 0);
            check("write", bytes);
            for flags in [0, DF] {
                if flags == DF && round % 2 == 1 {
                    // Replies are simple.
                    continue;
                }
                let reply = client.ask(READ, flags, at, length);
                assert!(reply.contents(at, bytes) == contents);
                check("read", unit.max(PIECE_BYTES));
            }
        }
    }
}

/// Goal: the work for a read grows with its length only: all the rest of it was looked at again for each piece, 528 000
/// units for 8192. Method: a disk that counts, with data throughout, behind a hole, and between holes.
#[test]
fn each_unit_of_a_long_read_is_looked_at_twice_at_most() {
    let bytes = 32_u32 << 20;
    for (hole, data) in
        [(0, 32 << 20), (1 << 20, 31 << 20), (512 << 10, 512 << 10), (252 << 10, 4 << 10)]
    {
        let disk = Memory::new(u64::from(bytes));
        for at in (0..bytes as usize).step_by(hole + data) {
            Device::write(&disk, (at + hole) as u64, &vec![7; data]).unwrap();
        }
        let looked = Arc::new(Looked::new(disk));
        let reply = Client::of(looked.clone(), true).ask(READ, 0, 0, bytes);
        let holes: u64 = reply.holes.iter().map(|hole| hole.1).sum();
        assert_eq!(holes, (bytes as usize / (hole + data) * hole) as u64, "{hole} and {data}");
        let contents = reply.contents(0, bytes as usize);
        assert!(contents.chunks(hole + data).all(|part| {
            part[..hole].iter().all(|byte| *byte == 0) && part[hole..].iter().all(|byte| *byte == 7)
        }));
        let seen = looked.bytes();
        assert!(seen <= 2 * u64::from(bytes), "{hole} and {data}: {seen} bytes were looked at");
    }
}

/// Goal: holes are sent as holes and reported as such, and not if the client wants one chunk.
#[test]
fn holes_are_told_from_data() {
    let disk = Arc::new(Memory::new(1 << 20));
    let mut client = Client::of(disk, true);
    let unit = UNIT_BYTES;
    client.write(0, 4 * unit, &vec![1; 2 * 4096]);
    client.write(0, 9 * unit, &[2; 4096]);
    let whole = client.ask(READ, 0, 0, 1 << 20);
    assert_eq!(whole.holes, [(0, 4 * unit), (6 * unit, 3 * unit), (10 * unit, 246 * unit)]);
    assert_eq!(whole.data.iter().map(|data| data.1.len()).collect::<Vec<_>>(), [8192, 4096]);
    let extents = client.ask(BLOCK_STATUS, 0, 0, 1 << 20).extents;
    let expected =
        [(4, 3), (2, 0), (3, 3), (1, 0), (246, 3)].map(|(count, state)| (count * unit, state));
    assert_eq!(extents, expected);
    assert_eq!(client.ask(BLOCK_STATUS, REQ_ONE, unit, 1 << 19).extents, [(3 * unit, 3)]);
    assert_eq!(client.ask(BLOCK_STATUS, 0, 4608, 512).extents, [(512, 3)]);
    let uncut = client.ask(READ, DF, 0, 1 << 20);
    assert_eq!((uncut.holes.len(), uncut.data.len(), uncut.chunks), (0, 1, 2));
    assert_eq!(uncut.contents(0, 1 << 20), whole.contents(0, 1 << 20));
    // A small request in a hole is a hole, though a short one within data is not.
    assert_eq!(client.ask(READ, 0, 0, 512).holes, [(0, 512)]);
    // What is reserved is no hole.
    client.ask(WRITE_ZEROES, NO_HOLE, 0, 4096);
    client.ask(WRITE_ZEROES, 0, 4 * unit, 4096);
    client.ask(TRIM, 0, 9 * unit, 4096);
    let extents = client.ask(BLOCK_STATUS, 0, 0, 1 << 20).extents;
    assert_eq!(
        extents,
        [(1, 0), (4, 3), (1, 0), (250, 3)].map(|(count, state)| (count * unit, state))
    );
}

/// Goal: a block status describes 4096 runs at most, in order from the beginning of the range.
#[test]
fn a_block_status_is_bounded() {
    let mut client = Client::of(Arc::new(Memory::new(64 << 20)), true);
    for unit in (0..16 << 10).step_by(2) {
        client.write(0, unit * UNIT_BYTES, &[1; 512]);
    }
    let extents = client.ask(BLOCK_STATUS, 0, 0, 64 << 20).extents;
    assert_eq!(extents.len(), 4096);
    assert!(
        extents
            .iter()
            .enumerate()
            .all(|(index, extent)| { *extent == (UNIT_BYTES, [0, 3][index % 2]) })
    );
}
