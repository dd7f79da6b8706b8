//! What was asked of a disk: the figures that the kernel's block layer keeps of a device (`stat`).
//!
//! # Concurrency
//!
//! Each CPU has counters of its own, so that requests on two CPUs share no line of a cache. All of it is Relaxed: the
//! figures carry no data.
//!
//! # Cost
//!
//! 128 bytes for each CPU.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::device::SECTOR_BYTES;

/// The groups of the kernel's columns. Zeroing is a write there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    Discard,
    Flush,
}

const KINDS: usize = 4;

/// The requests of a kind, and their sectors.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Count<N = u64> {
    requests: N,
    sectors: N,
}

/// What one CPU has counted.
#[derive(Default, Debug)]
#[repr(align(128))]
struct OfCpu([Count<AtomicU64>; KINDS]);

/// See the module.
#[derive(Debug)]
pub(crate) struct Requests(Box<[OfCpu]>);

impl Requests {
    /// `cpus`: the highest number of a CPU, plus 1; others share.
    pub(crate) fn new(cpus: usize) -> Requests {
        Requests((0..cpus.max(1)).map(|_| OfCpu::default()).collect())
    }

    /// Counts a request on this CPU.
    pub(crate) fn add(&self, cpu: usize, kind: Kind, bytes: u64) {
        let count = &self.0[cpu % self.0.len()].0[kind as usize];
        count.requests.fetch_add(1, Relaxed);
        count.sectors.fetch_add(bytes / u64::from(SECTOR_BYTES), Relaxed);
    }

    /// Begins all counts anew.
    pub(crate) fn reset(&self) {
        for count in self.0.iter().flat_map(|cpu| &cpu.0) {
            count.requests.store(0, Relaxed);
            count.sectors.store(0, Relaxed);
        }
    }

    /// The requests of a kind so far, and the bytes that these read, wrote or discarded.
    pub(crate) fn sums(&self, kind: Kind) -> (u64, u64) {
        let Count { requests, sectors } = self.sum(kind);
        (requests, sectors * u64::from(SECTOR_BYTES))
    }

    fn sum(&self, kind: Kind) -> Count {
        self.0.iter().map(|cpu| &cpu.0[kind as usize]).fold(Count::default(), |sum, one| Count {
            requests: sum.requests + one.requests.load(Relaxed),
            sectors: sum.sectors + one.sectors.load(Relaxed),
        })
    }
}

/// The columns of `/sys/block/DEVICE/stat`. No time is taken, requests are not merged, and nobody knows how many are
/// under way: those columns are 0.
impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = |kind| {
            let Count { requests, sectors } = self.sum(kind);
            format!("{requests:8} {0:8} {sectors:8} {0:8}", 0)
        };
        let [read, write, discard] = [Kind::Read, Kind::Write, Kind::Discard].map(group);
        let flushes = self.sum(Kind::Flush).requests;
        write!(f, "{read} {write} {0:8} {0:8} {0:8} {discard} {flushes:8} {0:8}", 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, Requests};

    /// Goal: nothing is lost where threads count at once, also on CPUs that share.
    #[test]
    fn every_request_is_counted_once() {
        let requests = Requests::new(3);
        std::thread::scope(|scope| {
            for cpu in 0..8 {
                let requests = &requests;
                scope.spawn(move || {
                    (0..1000).for_each(|_| requests.add(cpu, Kind::Write, 4096));
                    requests.add(cpu, Kind::Flush, 0);
                });
            }
        });
        let line = requests.to_string();
        let columns: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let expected = [0, 0, 0, 0, 8000, 0, 64_000, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(columns, expected);
        requests.reset();
        assert!(requests.to_string().split_whitespace().all(|column| column == "0"));
    }
}
