//! A backend of one's own for zfolio's codecs: an accelerator with a queue, here a thread.
//!
//! `words.rs` is what the accelerator does to a unit, `device.rs` the accelerator, and `backend.rs` its driver, which
//! shows `submit` and `poll`. This file has the driver checked by the library, and uses it in a compressed disk, whose
//! accelerator goes away in the middle.

mod backend;
mod device;
mod words;

use std::error::Error;
use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::store::Key;
use zfolio_core::zcomp::{Zcomp, conformance};
use zfolio_core::zram::Zram;
use zfolio_pager::PoolMappings;

use backend::Words;

/// Bytes of the disk, and of each request to it: 16 units, so that the accelerator gets batches.
const DISK_BYTES: usize = 16 << 20;
const REQUEST_BYTES: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let running = device::start()?;
    let backend = Words::new(running.device());
    conformance::check(&backend, &[UnitOrder::DEFAULT, UnitOrder::FOLIO])?;
    println!("every promise of a backend holds, in {} jobs of the device", running.device().jobs());
    use_disk(&backend, running)
}

/// Fills a disk and reads it back. The accelerator goes away when half of the disk is written.
fn use_disk(backend: &Words, running: device::Running) -> Result<(), Box<dyn Error>> {
    let codec = Zcomp::with_backend(backend, UnitOrder::DEFAULT, 1)?;
    // A program for more than a moment takes random bytes.
    let key = Key::new([7; Key::BYTES]);
    let memory = Arc::new(PoolMappings::default());
    let disk = Zram::new(vec![codec], memory, key, DISK_BYTES as u64, 1)?;
    let contents: Vec<u8> = (0..DISK_BYTES).map(byte).collect();
    let (device, mut running) = (Arc::clone(running.device()), Some(running));
    let before = device.jobs();
    for (at, request) in contents.chunks(REQUEST_BYTES).enumerate() {
        if at * REQUEST_BYTES == DISK_BYTES / 2 {
            running = None;
        }
        disk.write(0, (at * REQUEST_BYTES) as u64, request)?;
    }
    assert!(running.is_none(), "the accelerator has gone");
    let by_device = device.jobs() - before;
    let mut found = vec![0; DISK_BYTES];
    for (at, place) in found.chunks_mut(REQUEST_BYTES).enumerate() {
        disk.read(0, (at * REQUEST_BYTES) as u64, place)?;
    }
    assert!(found == contents, "not a byte may be lost");
    let stat = disk.mm_stat();
    let units = DISK_BYTES / UnitOrder::DEFAULT.bytes();
    println!(
        "a disk of {} bytes takes {}; the device compressed {by_device} of {units} units and went away, the driver did \
         the others; all bytes came back",
        stat.orig_data_size, stat.mem_used_total
    );
    assert_eq!(by_device, units as u64 / 2);
    Ok(())
}

/// Contents with many words of zeros.
fn byte(at: usize) -> u8 {
    let word = at / 8;
    if word % 3 == 0 { word.to_le_bytes()[at % 8] } else { 0 }
}
