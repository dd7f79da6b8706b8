//! What is wrong is refused, and changes nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::rig::{BUFFERS, IO_ERROR, MEMORY_BYTES, OK, Rig, UNSUPPORTED, UNTOUCHED};
use crate::device::{Device as _, Error};
use crate::testing::Memory;
use crate::vhost_user::guest::{Driver, Entry, INDIRECT, NEXT, WRITE, header, range};
use crate::vhost_user::ring::Broken;
use crate::vhost_user::{RANGE_BYTES_MAX, RANGES_MAX};

const SIZE: u64 = 1 << 20;
const BYTES: usize = 1 << 20;

/// Places of a request: header, data, status.
const HEADER: u64 = BUFFERS;
const DATA: u64 = BUFFERS + 4096;
const STATUS: u64 = MEMORY_BYTES - 1;

/// A disk that is full of ones.
fn disk() -> Arc<Memory> {
    let disk = Arc::new(Memory::new(SIZE));
    disk.write(0, &vec![1; BYTES]).unwrap();
    disk
}

fn contents(disk: &Memory) -> Vec<u8> {
    let mut found = vec![0; BYTES];
    disk.read(0, &mut found).unwrap();
    found
}

/// Serves a request whose data are at `DATA`. Returns the status, and how much was written.
fn ask(rig: &mut Rig, kind: u32, sector: u64, data: &[u8], read_bytes: u32) -> (u8, u32) {
    rig.write(HEADER, &header(kind, sector));
    rig.write(DATA, data);
    rig.write(STATUS, &[UNTOUCHED]);
    let mut ranges = vec![(HEADER, 16, false)];
    if !data.is_empty() {
        ranges.push((DATA, u32::try_from(data.len()).unwrap(), false));
    }
    if read_bytes > 0 {
        ranges.push((DATA, read_bytes, true));
    }
    ranges.push((STATUS, 1, true));
    let head = rig.offer(&ranges);
    let written = rig.serve_one(head);
    (rig.read(STATUS, 1)[0], written)
}

/// Goal: each wrong request has its status, and leaves the disk as it is; those that are wrong by their range are
/// counted.
#[test]
fn wrong_requests_are_refused() {
    let disk = disk();
    let mut rig = Rig::new(&disk);
    let sectors = SIZE / 512;
    let huge = u32::try_from(RANGE_BYTES_MAX / 512).unwrap() + 1;
    let many: Vec<u8> = (0..=RANGES_MAX).flat_map(|_| range(0, 1, 0)).collect();
    let good_then_bad = [range(0, 8, 0), range(sectors, 1, 0)].concat();
    let short = &range(0, 8, 0)[..15];
    for (what, kind, sector, data, read_bytes, status) in [
        ("read beyond the end", 0, sectors, &[][..], 512, IO_ERROR),
        ("read over the end", 0, sectors - 1, &[], 1024, IO_ERROR),
        ("read far beyond", 0, u64::MAX, &[], 512, IO_ERROR),
        ("read where bytes overflow", 0, u64::MAX / 512, &[], 512, IO_ERROR),
        ("read of half a sector", 0, 0, &[], 511, IO_ERROR),
        ("write beyond the end", 1, sectors, &[2; 512], 0, IO_ERROR),
        ("write over the end", 1, sectors - 1, &[2; 1024], 0, IO_ERROR),
        ("write of half a sector", 1, 0, &[2; 100], 0, IO_ERROR),
        ("discard without a range", 11, 0, &[], 0, IO_ERROR),
        ("discard of half a range", 11, 0, short, 0, IO_ERROR),
        ("discard of too many", 11, 0, &many, 0, IO_ERROR),
        ("discard beyond the end", 11, 0, &range(sectors, 1, 0), 0, IO_ERROR),
        ("discard far beyond", 11, 0, &range(u64::MAX, 1, 0), 0, IO_ERROR),
        ("discard of too much", 11, 0, &range(0, huge, 0), 0, IO_ERROR),
        ("discard of good and bad", 11, 0, &good_then_bad, 0, IO_ERROR),
        ("discard with a flag", 11, 0, &range(0, 8, 1), 0, UNSUPPORTED),
        ("zeroes of good and bad", 13, 0, &good_then_bad, 0, IO_ERROR),
        ("zeroes with a flag", 13, 0, &range(0, 8, 2), 0, UNSUPPORTED),
        ("a secure erase", 14, 0, &range(0, 8, 0), 0, UNSUPPORTED),
        ("a command of SCSI", 2, 0, &[], 512, UNSUPPORTED),
        ("an unknown kind", 0xffff_ffff, 0, &[], 512, UNSUPPORTED),
    ] {
        let (found, written) = ask(&mut rig, kind, sector, data, read_bytes);
        assert_eq!(found, status, "{what}");
        assert_eq!(written, 1, "{what}: the status alone");
        assert!(contents(&disk) == vec![1; BYTES], "{what}: VU-3");
    }
    assert_eq!(ask(&mut rig, 0, 0, &[], 512), (OK, 513), "it still serves");
    // Five reads, three writes, three discards and a zeroing.
    assert_eq!(disk.invalid.load(Relaxed), 12);
}

/// Goal: a request without data does nothing and succeeds; a name goes where there is room.
#[test]
fn odd_lengths_are_served() {
    let disk = disk();
    let mut rig = Rig::new(&disk);
    assert_eq!(ask(&mut rig, 0, 0, &[], 0), (OK, 1));
    assert_eq!(ask(&mut rig, 1, 0, &[], 0), (OK, 1));
    assert_eq!(ask(&mut rig, 11, 0, &range(0, 0, 0), 0), (OK, 1));
    assert_eq!(ask(&mut rig, 8, 0, &[], 5), (OK, 6));
    assert_eq!(rig.read(DATA, 5), b"a dis");
    assert_eq!(ask(&mut rig, 8, 0, &[], 30), (OK, 31));
    assert_eq!(rig.read(DATA, 21), b"a disk of a name tha\0");
    assert!(contents(&disk) == vec![1; BYTES]);
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let disk = Arc::new(Memory::new(SIZE).read_only());
    let mut rig = Rig::new(&disk);
    assert_eq!(ask(&mut rig, 1, 0, &[2; 512], 0).0, IO_ERROR);
    assert_eq!(ask(&mut rig, 11, 0, &range(0, 1, 0), 0).0, IO_ERROR);
    assert_eq!(ask(&mut rig, 13, 0, &range(0, 1, 0), 0).0, IO_ERROR);
    assert_eq!(ask(&mut rig, 0, 0, &[], 512).0, OK);
    assert_eq!(ask(&mut rig, 4, 0, &[], 0).0, OK);
}

/// Goal: what the device cannot do is an error of the request alone, and no byte of a failed read reaches the guest.
#[test]
fn a_failure_of_the_device_is_told() {
    let disk = disk();
    disk.break_from(SIZE / 2, Error::NoSpace);
    let mut rig = Rig::new(&disk);
    let middle = SIZE / 2 / 512;
    assert_eq!(ask(&mut rig, 1, middle, &[2; 512], 0), (IO_ERROR, 1));
    assert_eq!(ask(&mut rig, 11, 0, &range(middle, 1, 0), 0), (IO_ERROR, 1));
    rig.write(DATA, &[9; 1024]);
    assert_eq!(ask(&mut rig, 0, middle - 1, &[], 1024).0, IO_ERROR);
    assert_eq!(rig.read(DATA, 1024), [9; 1024], "VU-5");
    assert_eq!(ask(&mut rig, 0, middle - 1, &[], 512), (OK, 513));
}

/// Goal: chains that are wrong as such are returned, with a status where it is known where that belongs, and the next
/// request is served.
#[test]
fn wrong_chains_are_returned() {
    let disk = disk();
    let mut rig = Rig::new(&disk);
    let status = Entry { at: STATUS, bytes: 1, flags: WRITE, next: 0 };
    let head = |next| Entry { at: HEADER, bytes: 16, flags: NEXT, next };
    let data = |at, bytes, flags| Entry { at, bytes, flags: flags | NEXT, next: 2 };
    let table = Entry { at: DATA, bytes: 32, flags: INDIRECT, next: 0 };
    for (what, entries, known) in [
        ("only a status", vec![status], true),
        ("no status", vec![Entry { flags: 0, ..head(0) }], false),
        ("half a header", vec![Entry { bytes: 8, ..head(1) }, status], true),
        (
            "a chain that loops",
            vec![head(1), data(DATA, 512, 0), Entry { flags: NEXT, ..head(1) }],
            false,
        ),
        ("a chain to itself", vec![head(0)], false),
        ("a chain out of the table", vec![head(4000)], false),
        ("data outside of memory", vec![head(1), data(MEMORY_BYTES, 512, WRITE), status], false),
        (
            "data that end outside",
            vec![head(1), data(MEMORY_BYTES - 100, 512, WRITE), status],
            false,
        ),
        ("data that overflow", vec![head(1), data(u64::MAX - 10, 512, WRITE), status], false),
        ("data of any length", vec![head(1), data(DATA, u32::MAX, WRITE), status], false),
        ("a header outside", vec![Entry { at: 1 << 50, ..head(1) }, status], false),
        ("a status outside", vec![head(1), Entry { at: MEMORY_BYTES, ..status }], false),
        (
            "data behind the status",
            vec![head(1), Entry { flags: WRITE | NEXT, next: 2, ..status }, head(0)],
            false,
        ),
        ("a table of half an entry", vec![Entry { bytes: 24, ..table }], false),
        ("an empty table", vec![Entry { bytes: 0, ..table }], false),
        ("a table outside", vec![Entry { at: 1 << 40, ..table }], false),
        ("a table of any length", vec![Entry { bytes: u32::MAX - 15, ..table }], false),
    ] {
        rig.write(HEADER, &header(0, 0));
        rig.write(STATUS, &[UNTOUCHED]);
        let head = rig.offer_entries(&entries);
        let written = rig.serve_one(head);
        assert_eq!(written, u32::from(known), "{what}");
        let expected = if known { IO_ERROR } else { UNTOUCHED };
        assert_eq!(rig.read(STATUS, 1), [expected], "{what}");
    }
    // A table in a table.
    let inner = Entry { at: DATA + 512, ..table };
    Driver::put(&rig.memory, DATA, 0, &[inner, status]);
    let head = rig.offer_entries(&[table]);
    assert_eq!(rig.serve_one(head), 0);
    assert!(contents(&disk) == vec![1; BYTES]);
    assert_eq!(ask(&mut rig, 0, 0, &[], 512), (OK, 513), "it still serves");
}

/// Goal: rings that lie are not followed.
#[test]
fn broken_rings_are_left() {
    let disk = disk();
    let mut rig = Rig::new(&disk);
    rig.driver.publish(&rig.memory, 30_000);
    assert_eq!(rig.serve(), Err(Broken), "more chains than the ring has entries");
    let mut rig = Rig::new(&disk);
    rig.driver.offer(&rig.memory.clone(), 256);
    assert_eq!(rig.serve(), Err(Broken), "a head beyond the table");
}
