//! The parts of a block device that a process has, where the processes of a run share the device.
//!
//! The device is cut into equal parts. A process that needs room takes one that nobody has, and keeps it until it ends.
//! Who has a part is told by a mark (`sys::disk::take`): a lock of the kernel's, of which each child of `fork` that may
//! read there has one too, and which ends with its process, however that ends. So there is no list of parts that a
//! process could leave wrong, and no message when one is taken.
//!
//! The slots of an area are counted through its parts, in the order in which these were taken.
//!
//! # Invariants
//!
//! - `PART-1` A part is written to by one process at a time: the one that took it.
//! - `PART-2` A part is a stretch of the area's disk, so a transfer lies in one (`DISK-4`).
//!
//! # Concurrency
//!
//! One thread takes parts. Whoever transfers slots of one was told of them after that, by the slot allocator.
//!
//! # Cost
//!
//! 4 bytes for each part of the device. To take one are two system calls, and one for each that another has before it.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use zfolio_core::swap::SLOTS_MAX;
use zfolio_core::swap::disk::SLOT_BYTES;
use zfolio_core::swap::slots::CLUSTER_SLOTS;
use zfolio_sys::Errno;
use zfolio_sys::disk::{self, Range};

/// As many parts a device has, or fewer: as many processes can spill to it at once.
const PARTS_MAX: u64 = 1024;

/// Slots of the smallest part, 4 MiB: a unit of 2 MiB that shrinks a little leaves most of a cluster empty behind it at
/// the end of a part.
const PART_SLOTS_MIN: u64 = 2 * CLUSTER_SLOTS as u64;

/// A process takes another part when less than one in [`RESERVE_SHARE`] of what it has is free, within these bounds:
/// what it may write before its background thread looks again. Who has little on disk keeps little from others.
const RESERVE_SHARE: u64 = 8;
const RESERVE_BYTES_MIN: u64 = 1 << 20;
const RESERVE_BYTES_MAX: u64 = 16 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Parts {
    part_slots: u32,
    /// For each part of the area, which part of the device it is. As long as the device has parts.
    taken: Box<[AtomicU32]>,
    /// How many of these are the area's.
    count: AtomicU32,
}

impl Parts {
    /// None yet, of a device of so many slots. What is left of it behind the last whole part is not used.
    pub(super) fn of(device_slots: u64) -> Parts {
        let clusters = device_slots.div_ceil(PARTS_MAX).div_ceil(u64::from(CLUSTER_SLOTS));
        let part_slots = clusters * u64::from(CLUSTER_SLOTS);
        // An area has one part at least, also of a device above 256 TiB, which has more parts then.
        let part_slots = part_slots.clamp(PART_SLOTS_MIN, SLOTS_MAX.into());
        let taken = (0..device_slots / part_slots).map(|_| AtomicU32::new(0)).collect();
        let part_slots = u32::try_from(part_slots).expect("SLOTS_MAX at most");
        Parts { part_slots, taken, count: AtomicU32::new(0) }
    }

    /// In a child of `fork`: what its parent has.
    pub(super) fn copy(&self) -> Parts {
        let taken = self.taken.iter().map(|part| AtomicU32::new(part.load(Relaxed))).collect();
        let count = AtomicU32::new(self.count.load(Relaxed));
        Parts { part_slots: self.part_slots, taken, count }
    }

    /// The area's parts, by their numbers on the device.
    fn all(&self) -> impl Iterator<Item = u32> {
        let count = self.count.load(Relaxed) as usize;
        self.taken[..count].iter().map(|part| part.load(Relaxed))
    }

    /// Slots of one part.
    pub(super) fn part_slots(&self) -> u32 {
        self.part_slots
    }

    /// Slots of all parts together.
    pub(super) fn slots(&self) -> u64 {
        u64::from(self.count.load(Relaxed)) * u64::from(self.part_slots)
    }

    /// With fewer free slots than this another part is due.
    pub(super) fn reserve_slots(&self) -> u64 {
        let slot = SLOT_BYTES as u64;
        (self.slots() / RESERVE_SHARE).clamp(RESERVE_BYTES_MIN / slot, RESERVE_BYTES_MAX / slot)
    }

    /// Where on the device a slot of the area is.
    pub(super) fn on_device(&self, slot: u64) -> u64 {
        let part_slots = u64::from(self.part_slots);
        let (part, within) = (slot / part_slots, slot % part_slots);
        let part = usize::try_from(part).ok().and_then(|part| self.taken.get(part));
        let part = part.expect("a slot of the area is in one of its parts").load(Relaxed);
        u64::from(part) * part_slots + within
    }

    /// The bytes of the device that the parts are.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.all().map(|part| self.range(part))
    }

    fn range(&self, part: u32) -> Range {
        let bytes = u64::from(self.part_slots) * SLOT_BYTES as u64;
        let start = u64::from(part) * bytes;
        start..start + bytes
    }

    /// Takes a part more; returns its slots. It is the next behind the last one, if nobody has that; the first is
    /// looked for from `first` on, which differs from process to process.
    ///
    /// # Errors
    ///
    /// `NOSPC`: others have all that are left, or an area has no number for more slots. Else there are no locks.
    pub(super) fn take(&self, file: BorrowedFd<'_>, first: u32) -> Result<u32, Errno> {
        let total = u32::try_from(self.taken.len()).unwrap_or(u32::MAX);
        let count = self.count.load(Relaxed);
        if self.slots() + u64::from(self.part_slots) > u64::from(SLOTS_MAX) {
            return Err(Errno::NOSPC);
        }
        let from = self.all().last().map_or(first, |last| last + 1);
        for at in 0..total {
            let part = from.wrapping_add(at) % total;
            // The kernel would let this process have it once more.
            if self.all().any(|ours| ours == part) {
                continue;
            }
            match disk::take(file, self.range(part)) {
                Err(Errno::AGAIN | Errno::ACCESS) => {}
                Err(errno) => return Err(errno),
                Ok(()) => {
                    self.taken[count as usize].store(part, Relaxed);
                    self.count.store(count + 1, Relaxed);
                    return Ok(self.part_slots);
                }
            }
        }
        Err(Errno::NOSPC)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

    use zfolio_core::swap::disk::SLOT_BYTES;
    use zfolio_core::swap::slots::CLUSTER_SLOTS;
    use zfolio_core::testing::{Random, seed};
    use zfolio_sys::{Errno, cpu, disk};

    use super::{PART_SLOTS_MIN, Parts};

    fn file() -> OwnedFd {
        disk::open_unlinked(std::path::Path::new("/var/tmp")).unwrap()
    }

    /// As another process has it: a description of its own.
    fn again(file: &OwnedFd) -> OwnedFd {
        disk::open_again(cpu::thread_id(), file.as_raw_fd()).unwrap()
    }

    #[test]
    fn a_device_is_cut_into_whole_clusters() {
        let least = PART_SLOTS_MIN;
        for (slots, part, count) in [
            // 16 MiB, the smallest device.
            (4 * least, least, 4),
            (8 * least + least - 1, least, 8),
            (1024 * least, least, 1024),
            (1024 * least + 1, least + u64::from(CLUSTER_SLOTS), 682),
            // 1 TiB: parts of 1 GiB. 1 PiB: parts of 256 GiB, as much as an area can have.
            (1 << 28, 1 << 18, 1024),
            (1 << 38, 1 << 26, 4096),
        ] {
            let parts = Parts::of(slots);
            assert_eq!((u64::from(parts.part_slots), parts.taken.len()), (part, count), "{slots}");
        }
        // Nothing was taken: 1 MiB. 1 GiB was taken: 16 MiB.
        let (file, parts) = (file(), Parts::of(1 << 28));
        assert_eq!(parts.reserve_slots(), 256);
        parts.take(file.as_fd(), 0).unwrap();
        assert_eq!(parts.reserve_slots(), 4096);
    }

    /// A process, with its description of the file that stands for the device. A child has a copy of its parent's
    /// parts, and takes none.
    struct Process {
        file: OwnedFd,
        parts: Parts,
        is_child: bool,
    }

    /// The answer of `look`, as soon as it is as it should be. Where another test starts a program, that has a copy of
    /// all files for a moment, also of those that are closed here meanwhile.
    fn once_settled<T>(look: impl Fn() -> T, is_right: impl Fn(&T) -> bool) -> T {
        for _ in 0..1000 {
            let answer = look();
            if is_right(&answer) {
                return answer;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        look()
    }

    const TOTAL: u32 = 12;
    const PROCESSES_MAX: usize = 6;

    impl Process {
        fn new(device: &OwnedFd) -> Process {
            let parts = Parts::of(u64::from(TOTAL) * PART_SLOTS_MIN);
            Process { file: again(device), parts, is_child: false }
        }

        fn fork(&self, device: &OwnedFd) -> Process {
            let (file, parts) = (again(device), self.parts.copy());
            parts.ranges().for_each(|range| disk::mark_used(file.as_fd(), range).unwrap());
            Process { file, parts, is_child: true }
        }

        /// Takes a part: one that is not in `had`, if there is any.
        fn take(&self, had: &HashSet<u32>, first: u32, about: &str) {
            let is_full = had.len() == TOTAL as usize;
            let take = || self.parts.take(self.file.as_fd(), first);
            match once_settled(take, |taken| taken.is_ok() || is_full) {
                Ok(slots) => {
                    assert_eq!(u64::from(slots), PART_SLOTS_MIN, "{about}");
                    let part = self.parts.all().last().unwrap();
                    assert!(!had.contains(&part), "PART-1: {part}, {about}");
                    let there = u64::from(part + 1) * PART_SLOTS_MIN - 1;
                    assert_eq!(self.parts.on_device(self.parts.slots() - 1), there, "{about}");
                }
                Err(errno) => {
                    assert_eq!((errno, had.len()), (Errno::NOSPC, TOTAL as usize), "{about}");
                }
            }
        }
    }

    /// Goal: no part has two owners (`PART-1`), whoever takes, forks and ends in which order; what is left is found;
    /// who else has a part is told right. Method: random steps of several "processes" against a list of who has what.
    #[test]
    fn parts_have_one_owner() {
        let (seed, device) = (seed(), file());
        let mut random = Random::new(seed);
        let mut processes: Vec<Process> = vec![Process::new(&device)];
        for step in 0..2000 {
            let about = format!("seed {seed}, step {step}");
            let (what, at) = (random.below(8), random.below(processes.len()));
            match what {
                0 if processes.len() < PROCESSES_MAX => processes.push(Process::new(&device)),
                1 if processes.len() < PROCESSES_MAX => {
                    let child = processes[at].fork(&device);
                    processes.push(child);
                }
                2 if processes.len() > 1 => drop(processes.swap_remove(at)),
                _ if !processes[at].is_child => {
                    let had = processes.iter().flat_map(|process| process.parts.all()).collect();
                    let first = u32::try_from(random.below(1 << 20)).unwrap();
                    processes[at].take(&had, first, &about);
                }
                _ => {}
            }
            for (at, process) in processes.iter().enumerate() {
                let others = || processes.iter().enumerate().filter(|(other, _)| *other != at);
                for range in process.parts.ranges() {
                    let mut theirs = others().flat_map(|(_, other)| other.parts.ranges());
                    let is_theirs = Ok(theirs.any(|other| other == range));
                    let look = || disk::is_used_by_others(process.file.as_fd(), range.clone());
                    assert_eq!(once_settled(look, |told| *told == is_theirs), is_theirs, "{about}");
                }
            }
        }
    }

    /// An area of a device that is larger than an area can be takes what it has numbers for.
    #[test]
    fn an_area_does_not_grow_beyond_its_numbers() {
        let (file, parts) = (file(), Parts::of(1 << 34));
        let part_bytes = u64::from(parts.part_slots) * SLOT_BYTES as u64;
        assert_eq!(part_bytes, 64 << 30);
        for _ in 0..4 {
            parts.take(file.as_fd(), 1020).unwrap();
        }
        assert_eq!(parts.take(file.as_fd(), 0), Err(Errno::NOSPC));
        let all: Vec<u32> = parts.all().collect();
        assert_eq!(all, [1020, 1021, 1022, 1023]);
    }
}
