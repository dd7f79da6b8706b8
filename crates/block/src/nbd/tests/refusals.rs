//! Requests that fail: with which number, and what comes after.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::client::{
    BLOCK_STATUS, CACHE, Client, DF, DISC, FAST_ZERO, FLUSH, FUA, NO_HOLE, READ, REQ_ONE, Reply,
    TRIM, WRITE, WRITE_ZEROES, request,
};
use crate::device::Error;
use crate::testing::{FAILURES, Memory, ram};

const SIZE: u64 = 2 << 20;
const EPERM: u64 = 1;
const EIO: u64 = 5;
const ENOMEM: u64 = 12;
const EINVAL: u64 = 22;
const ENOSPC: u64 = 28;

fn ask(client: &mut Client, command: u16, flags: u16, at: u64, bytes: u32) -> Reply {
    if command == WRITE {
        client.write(flags, at, &vec![9; bytes as usize])
    } else {
        client.ask(command, flags, at, bytes)
    }
}

/// Goal: what the protocol forbids is refused with its number, changes nothing, and the connection goes on; ranges that
/// are not aligned or beyond the end are counted.
#[test]
fn a_refused_request_changes_nothing() {
    let large = 300 << 10;
    for is_structured in [false, true] {
        let disk = Arc::new(Memory::new(SIZE));
        let mut client = Client::of(disk.clone(), is_structured);
        let beyond = [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512), (SIZE - 4096, large)];
        for (at, bytes) in beyond {
            for (command, error) in [
                (READ, EINVAL),
                (TRIM, EINVAL),
                (CACHE, EINVAL),
                (WRITE, ENOSPC),
                (WRITE_ZEROES, ENOSPC),
            ] {
                assert_eq!(ask(&mut client, command, 0, at, bytes).error, error, "{command}, {at}");
            }
        }
        for (at, bytes) in [(1, 512), (512, 100), (0, large + 1), (0, 0)] {
            for command in [READ, WRITE, TRIM, CACHE, WRITE_ZEROES] {
                let reply = ask(&mut client, command, 0, at, bytes);
                assert_eq!(reply.error, EINVAL, "{command}, {at}, {bytes}");
                assert_eq!(!reply.text.is_empty(), is_structured);
            }
        }
        for (command, flags) in [
            (READ, NO_HOLE),
            (READ, 1 << 15),
            (WRITE, DF),
            (WRITE, 1 << 5),
            (TRIM, FAST_ZERO),
            (WRITE_ZEROES, REQ_ONE),
            (CACHE, DF),
        ] {
            assert_eq!(
                ask(&mut client, command, flags, 0, 512).error,
                EINVAL,
                "{command}, {flags}"
            );
        }
        for (command, at, bytes) in [(FLUSH, 512, 0), (FLUSH, 0, 512), (8, 0, 0), (999, 1, 2)] {
            assert_eq!(ask(&mut client, command, 0, at, bytes).error, EINVAL, "{command}");
        }
        assert_eq!(ask(&mut client, READ, DF, 0, 512).error == 0, is_structured);
        assert_eq!(ask(&mut client, BLOCK_STATUS, 0, 0, 512).error == 0, is_structured);
        assert_eq!(ask(&mut client, BLOCK_STATUS, 0, SIZE, 512).error, EINVAL);
        // Four ranges beyond the end and three that are not aligned, of five commands each; the block status is refused
        // for its context without structured replies.
        assert_eq!(disk.invalid.load(Relaxed), 35 + u64::from(is_structured));
        // FUA is right with all of them.
        for command in [READ, TRIM, CACHE, WRITE_ZEROES, WRITE] {
            assert_eq!(ask(&mut client, command, FUA, SIZE - 512, 512).error, 0, "{command}");
        }
        let contents = client.ask(READ, 0, 0, 1 << 20).contents(0, 1 << 20);
        assert!(contents.iter().all(|byte| *byte == 0));
    }
}

/// Goal: a compressed disk counts requests that were refused before it saw them. The column of `io_stat` stayed 0,
/// whatever clients sent.
#[test]
fn refused_ranges_are_in_the_figures() {
    let disk = Arc::new(ram(SIZE, &["lz4"]));
    let mut client = Client::of(disk.clone(), true);
    assert_eq!(ask(&mut client, READ, 0, SIZE, 512).error, EINVAL);
    assert_eq!(ask(&mut client, WRITE, 0, 1, 512).error, EINVAL);
    assert_eq!(ask(&mut client, READ, 0, 0, 512).error, 0);
    assert_eq!(disk.zram().io_stat().invalid_io, 2);
}

/// Goal: what a device says comes to the client with the protocol's number.
#[test]
fn failures_of_the_device_keep_their_meaning() {
    let numbers = [EIO, ENOSPC, EINVAL, EPERM, ENOMEM];
    for (error, number) in FAILURES.into_iter().zip(numbers) {
        for is_structured in [false, true] {
            let disk = Arc::new(Memory::new(SIZE));
            let mut client = Client::of(disk.clone(), is_structured);
            disk.break_from(1 << 20, error);
            for command in [READ, WRITE, TRIM, WRITE_ZEROES] {
                let reply = ask(&mut client, command, FUA, 1 << 20, 4096);
                assert_eq!(reply.error, number, "{command}");
                assert!(reply.data.is_empty() && reply.holes.is_empty());
                assert_eq!(ask(&mut client, command, 0, 0, 4096).error, 0);
            }
            assert_eq!(disk.flushes.load(Relaxed), 0, "nothing was written that is to last");
        }
    }
}

/// Goal: `NBD-4` when a long read meets a failure. Method: the last third of the range is unreadable.
#[test]
fn a_long_read_reports_where_it_failed() {
    let disk = Arc::new(Memory::new(SIZE));
    let mut client = Client::of(disk.clone(), true);
    client.write(0, 0, &vec![3; 2 << 20]);
    let broken = 1_400_000 / 4096 * 4096;
    disk.break_from(broken, Error::Io);
    let reply = client.ask(READ, 0, 512, 2 << 20);
    assert_eq!(reply.error, EINVAL, "it ends beyond the end");
    let bytes = u32::try_from(SIZE).unwrap();
    let reply = client.ask(READ, 0, 0, bytes);
    let at = reply.error_at.unwrap();
    assert_eq!(reply.error, EIO);
    assert!(at <= broken && broken - at < 256 << 10, "{at}");
    let read: usize = reply.data.iter().map(|data| data.1.len()).sum();
    assert_eq!(read as u64, at, "all before it");
    let reply = client.ask(READ, DF, 0, bytes);
    assert_eq!((reply.error, reply.error_at, reply.chunks), (EIO, Some(at), 2));
    let place = usize::try_from(at).unwrap();
    let data = &reply.data[0].1;
    assert!(
        data[..place].iter().all(|byte| *byte == 3) && data[place..].iter().all(|byte| *byte == 0)
    );
    assert_eq!(client.ask(READ, 0, 0, 4096).contents(0, 4096), [3; 4096]);
    // Without chunks, the end of the connection is the only way to say so.
    let mut client = Client::of(disk, false);
    client.send(&request(READ, 0, 5, 0, bytes));
    assert!(client.driver.is_closed);
    assert_eq!(client.incoming.bytes(16)[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    assert_eq!(client.incoming.0.len() as u64, at);
}

/// Goal: a long write that fails in the middle is received whole, answered once, and not made durable.
#[test]
fn a_long_write_that_fails_is_answered_once() {
    let disk = Arc::new(Memory::new(SIZE).preferring(64 << 10));
    let mut client = Client::of(disk.clone(), true);
    disk.break_from(1 << 20, Error::NoSpace);
    assert_eq!(client.write(FUA, 0, &vec![5; 2 << 20]).error, ENOSPC);
    assert_eq!(disk.flushes.load(Relaxed), 0);
    assert_eq!(client.write(FUA, 0, &vec![6; 1 << 20]).error, 0);
    assert_eq!(disk.flushes.load(Relaxed), 1);
    assert_eq!(client.ask(READ, 0, 0, 512).contents(0, 512), [6; 512]);
}

/// Goal: nothing changes a read-only export.
#[test]
fn a_read_only_export_stays_as_it_is() {
    let mut client = Client::of(Arc::new(Memory::new(SIZE).read_only()), true);
    for command in [WRITE, TRIM, WRITE_ZEROES] {
        for bytes in [512, 300 << 10] {
            assert_eq!(ask(&mut client, command, 0, 0, bytes).error, EPERM, "{command}");
        }
    }
    for command in [READ, CACHE, BLOCK_STATUS] {
        assert_eq!(ask(&mut client, command, 0, 0, 512).error, 0, "{command}");
    }
    assert_eq!(ask(&mut client, FLUSH, 0, 0, 0).error, 0);
}

/// Goal: a payload beyond the maximum, or a wrong magic number, ends the connection; before that all is answered. A
/// read beyond the maximum has no payload, and what comes behind it is served.
#[test]
fn a_request_that_cannot_be_skipped_ends_the_connection() {
    for is_structured in [false, true] {
        let mut client = Client::of(Arc::new(Memory::new(64 << 20)), is_structured);
        for bytes in [(32 << 20) + 512, u32::MAX - 511] {
            let messages = [READ, FLUSH].map(|command| {
                let bytes = if command == READ { bytes } else { 0 };
                request(command, 0, u64::from(command), 0, bytes)
            });
            client.send(&messages.concat());
            assert_eq!(client.incoming.reply(u64::from(READ), 0).error, EINVAL);
            assert_eq!(client.incoming.reply(u64::from(FLUSH), 0).error, 0);
        }
        client.send(&request(WRITE, 0, 5, 0, (32 << 20) + 512));
        assert_eq!(client.incoming.reply(5, 0).error, EINVAL);
        assert!(client.driver.is_closed);
    }
    let mut client = Client::of(Arc::new(Memory::new(SIZE)), true);
    let mut messages = request(FLUSH, 0, 5, 0, 0);
    messages.extend_from_slice(&[0; 28]);
    client.send(&messages);
    assert_eq!(client.incoming.reply(5, 0).error, 0);
    assert!(client.driver.is_closed && client.incoming.0.is_empty());
    let mut client = Client::of(Arc::new(Memory::new(SIZE)), false);
    client.send(&[request(FLUSH, 0, 5, 0, 0), request(DISC, 0, 6, 0, 0)].concat());
    assert_eq!(client.incoming.reply(5, 0).error, 0);
    assert!(client.driver.is_closed && client.incoming.0.is_empty());
}
