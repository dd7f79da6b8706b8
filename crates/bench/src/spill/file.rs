//! What the file system itself can do: the same bytes and reads, straight to a file, by the rings that spill uses too.

use std::path::Path;
use std::sync::Arc;

use zfolio_core::swap::disk::{Buffer, Direction, Disk as _, SLOT_BYTES, Transfer};
use zfolio_core::testing::Random;
use zfolio_pager::spill::{Medium, Sender, Uring};
use zfolio_sys::clock;
use zfolio_sys::eventfd::EventFd;

use super::Figures;

/// Slots of a transfer when the file is written and read in order: 64 KiB.
const SLOTS: usize = 16;

/// Transfers of 64 KiB at a time.
const DEPTH: usize = 16;

/// Measures in the folder `dir`: in order with 64 KiB at a time, and `reads` random reads of 4 KiB, one at a time and
/// `threads` at a time.
///
/// # Errors
///
/// One line: no file, no `io_uring`, or a transfer that failed.
pub(super) fn measure(
    dir: &Path,
    bytes: usize,
    threads: usize,
    reads: usize,
) -> Result<Figures, String> {
    let medium = Medium::open(dir, bytes as u64, SLOT_BYTES as u64);
    let medium = medium.map_err(|refusal| refusal.to_string())?;
    let ended = EventFd::new().map_err(|errno| format!("eventfd: {errno}"))?;
    let ring = Uring::new(medium, DEPTH.max(threads).min(48), Arc::new(ended), Sender::Caller);
    let ring = ring.map_err(|(_, errno)| format!("io_uring: {errno}"))?;
    let transfers = bytes / (SLOTS * SLOT_BYTES);
    let in_order = |index: usize| (index * SLOTS) as u64;
    let write_ns = carry_out(&ring, Direction::Write, (DEPTH, SLOTS), transfers, in_order)?;
    let read_ns = carry_out(&ring, Direction::Read, (DEPTH, SLOTS), transfers, in_order)?;
    let slots = transfers * SLOTS;
    let mut random = Random::new(1);
    let mut anywhere = |_| random.below(slots) as u64;
    let one_ns = carry_out(&ring, Direction::Read, (1, 1), reads, &mut anywhere)?;
    let all_ns = carry_out(&ring, Direction::Read, (threads, 1), 4 * reads, &mut anywhere)?;
    Ok(Figures::new(
        transfers * SLOTS * SLOT_BYTES,
        [write_ns, read_ns],
        [(reads, one_ns), (4 * reads, all_ns)],
    ))
}

/// What a buffer is full of: a device may treat zeros differently.
fn pattern(number: usize) -> u8 {
    u8::try_from(number % 255).expect("below 255") + 1
}

/// Carries `count` transfers out, so many at a time of so many slots; `first` says where each begins. Returns the
/// nanoseconds.
fn carry_out(
    ring: &Uring,
    direction: Direction,
    (depth, slots): (usize, usize),
    count: usize,
    mut first: impl FnMut(usize) -> u64,
) -> Result<u64, String> {
    let mut free: Vec<Buffer> = (0..depth).map(|_| Buffer::new(slots)).collect();
    for (at, buffer) in free.iter_mut().enumerate() {
        buffer.slots_mut().iter_mut().for_each(|slot| slot.0.fill(pattern(at)));
    }
    let (mut begun, mut ended, mut failure) = (0, 0, None);
    let began = clock::monotonic_ns();
    while ended < count && failure.is_none() {
        while begun < count {
            let Some(buffer) = free.pop() else { break };
            let first = first(begun);
            let token = begun as u64;
            let transfer =
                Transfer { token, direction, first, count: slots, buffer, result: Ok(()) };
            match ring.begin(transfer) {
                Ok(()) => begun += 1,
                Err(refused) => {
                    free.push(refused.buffer);
                    break;
                }
            }
        }
        ring.flush();
        let before = ended;
        ring.poll(&mut |transfer| {
            failure = failure.or(transfer.result.err());
            free.push(transfer.buffer);
            ended += 1;
        });
        if ended == before {
            ring.pause();
        }
    }
    let took = clock::monotonic_ns() - began;
    failure.map_or(Ok(took), |error| Err(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::measure;
    use crate::scratch::Scratch;

    /// Goal: all transfers are carried out, on a file system that has a disk.
    #[test]
    fn a_file_is_measured() {
        let folder = Scratch::create("bench-spill").unwrap();
        match measure(folder.path(), 8 << 20, 4, 50) {
            Ok(figures) => assert!(figures.0.iter().all(|figure| *figure > 0.0), "{figures:?}"),
            Err(why) => eprintln!("SKIPPED: {why}"),
        }
    }
}
