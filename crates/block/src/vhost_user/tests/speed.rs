//! How many requests a queue serves in a second. The other side is a thread that polls, so only a guest's kicks and
//! interrupts are missing.
//!
//!     REQUESTS=500000 cargo test --release -p zfolio-block --lib vhost_user::tests::speed -- --nocapture

use std::sync::Arc;

use vm_memory::{Bytes as _, GuestAddress};
use zfolio_core::page::UnitOrder;
use zfolio_core::testing::{Random, seed};
use zfolio_sys::clock::monotonic_ns;

use super::connections::Stage;
use super::frontend::{FrontEnd, MEMORY_BYTES};
use super::rig::{BUFFERS, OK, Rig};
use crate::device::Device;
use crate::testing::{Memory, ram, ram_of_units};
use crate::vhost_user::guest::{Driver, header, linked};

const SIZE: u64 = 64 << 20;
const BLOCK: u32 = 4096;
const PLACES: u16 = 16;

/// A page of letters, as compressible as memory is.
fn page(random: &mut Random) -> Vec<u8> {
    let mut word = || random.bytes(8).into_iter().map(|byte| b'a' + byte % 16).collect::<Vec<u8>>();
    let words: Vec<Vec<u8>> = (0..64).map(|_| word()).collect();
    (0..BLOCK as usize / 8).flat_map(|_| words[random.below(64)].clone()).collect()
}

/// Has `depth` requests under way until `count` are done. Returns how many are done in a second.
fn rate(front_end: &mut FrontEnd, kind: u32, depth: u16, count: u64) -> u64 {
    let mut random = Random::new(seed());
    let at = |place: u16| (1 << 20) + u64::from(place) * 16384;
    for place in 0..PLACES {
        front_end.memory.write_slice(&page(&mut random), GuestAddress(at(place))).unwrap();
    }
    assert!(at(PLACES) <= MEMORY_BYTES);
    let began = monotonic_ns();
    let (mut free, mut sent, mut done) = ((0..depth).collect::<Vec<_>>(), 0, 0);
    while done < count {
        while let Some(place) = free.pop().filter(|_| sent < count) {
            let sector = random.below_u64(SIZE / u64::from(BLOCK)) * 8;
            let (data, table) = (at(place), front_end.queues[0].driver.descriptors);
            let other = data + u64::from(BLOCK);
            front_end.memory.write_slice(&header(kind, sector), GuestAddress(other)).unwrap();
            let ranges = [(other, 16, false), (data, BLOCK, kind == 0), (other + 16, 1, true)];
            Driver::put(&front_end.memory, table, place * 3, &linked(&ranges, place * 3));
            let queue = &mut front_end.queues[0];
            queue.driver.offer(&front_end.memory, place * 3);
            if queue.driver.wants_kick(&front_end.memory) {
                queue.kick.write(1).unwrap();
            }
            sent += 1;
        }
        while let Some((head, _)) = front_end.queues[0].driver.take(&front_end.memory) {
            let place = u16::try_from(head / 3).unwrap();
            let status: u8 =
                front_end.memory.read_obj(GuestAddress(at(place) + 4096 + 16)).unwrap();
            assert_eq!(status, 0);
            free.push(place);
            done += 1;
        }
        if free.is_empty() {
            std::thread::yield_now();
        }
    }
    count * 1_000_000_000 / (monotonic_ns() - began).max(1)
}

/// Goal: many requests at once are all served. Method: random ones of 4 KiB, one or sixteen under way.
#[test]
fn many_requests_at_once_are_served() {
    let count = std::env::var("REQUESTS").map_or(2000, |count| count.parse().unwrap());
    let bytes: Arc<dyn Device> = Arc::new(Memory::new(SIZE));
    let compressed: Arc<dyn Device> = Arc::new(ram(SIZE, &["lz4"]));
    for (name, disk) in [("bytes", bytes), ("lz4", compressed)] {
        let stage = Stage::of(&format!("speed-{name}"), disk);
        let mut front_end = FrontEnd::new(&stage.path, 1);
        for (kind, what) in [(1, "write"), (0, "read")] {
            for depth in [1, PLACES] {
                let rate = rate(&mut front_end, kind, depth, count);
                println!("{name:6}{what:6}depth {depth:2}: {rate} requests a second");
            }
        }
    }
}

/// Goal: requests of whole large units have right contents, and so have those of parts. Method: a disk written and read
/// in order; `DISK_MIB` says how much.
#[test]
fn large_units_are_served() {
    let bytes = std::env::var("DISK_MIB").map_or(4, |mib| mib.parse().unwrap()) << 20;
    let mut random = Random::new(seed());
    let (data, head, status) = (BUFFERS + 4096, BUFFERS, BUFFERS + 1024);
    let pages: Vec<Vec<u8>> = (0..64).map(|_| page(&mut random)).collect();
    for (unit, request) in [(256, 256), (512, 256), (2048, 256), (512, 2048), (2048, 2048)] {
        let request: u32 = request << 10;
        let blocks = request / BLOCK;
        let contents: Vec<u8> = (0..blocks).flat_map(|_| pages[random.below(64)].clone()).collect();
        let order = UnitOrder::from_bytes(unit << 10).unwrap();
        let mut rig = Rig::with(&Arc::new(ram_of_units(order, bytes, &["lz4"])), true, false);
        for (kind, what) in [(1, "write"), (0, "read")] {
            let began = monotonic_ns();
            for at in (0..bytes).step_by(request as usize) {
                rig.write(head, &header(kind, at / 512));
                if kind == 1 {
                    rig.write(data, &contents);
                    rig.write(data, &at.to_le_bytes());
                }
                let ranges = [(head, 16, false), (data, request, kind == 0), (status, 1, true)];
                let chain = rig.offer(&ranges);
                rig.serve_one(chain);
                assert_eq!(rig.read(status, 1), [OK]);
                if kind == 0 {
                    assert!(rig.read(data, 8) == at.to_le_bytes());
                    assert!(rig.read(data + 8, contents.len() - 8) == contents[8..]);
                }
            }
            let us = (monotonic_ns() - began) / 1000 / (bytes >> 20);
            println!("{unit} KiB, requests of {} KiB: {what:5} {us} us a MiB", request >> 10);
        }
    }
}
