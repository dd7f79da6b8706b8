//! What was asked of a disk, and how long that took: the figures that the kernel's block layer keeps of a device
//! (`stat`), and histograms of times.
//!
//! # Concurrency
//!
//! Each CPU has counters of its own, so that requests on two CPUs share no line of a cache. All of it is Relaxed: the
//! figures carry no data.
//!
//! # Cost
//!
//! 8.2 KiB for each CPU; two looks at the clock for each request.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::stats::Histogram;

use crate::device::SECTOR_BYTES;
use crate::metrics::Durations;

/// The groups of the kernel's columns. Zeroing is a write there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    Discard,
    Flush,
}

const KINDS: usize = 4;

/// The requests of a kind, their sectors, and how long they took together.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Count<N = u64> {
    requests: N,
    sectors: N,
    ns: N,
}

/// What one CPU has counted.
#[derive(Default, Debug)]
#[repr(align(128))]
struct OfCpu {
    counts: [Count<AtomicU64>; KINDS],
    times: [Histogram; KINDS],
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Requests(Box<[OfCpu]>);

impl Requests {
    /// `cpus`: the highest number of a CPU, plus 1; others share.
    pub(crate) fn new(cpus: usize) -> Requests {
        Requests((0..cpus.max(1)).map(|_| OfCpu::default()).collect())
    }

    /// Counts a request on this CPU, which took `ns`.
    pub(crate) fn add(&self, cpu: usize, kind: Kind, bytes: u64, ns: u64) {
        let of_cpu = &self.0[cpu % self.0.len()];
        let count = &of_cpu.counts[kind as usize];
        count.requests.fetch_add(1, Relaxed);
        count.sectors.fetch_add(bytes / u64::from(SECTOR_BYTES), Relaxed);
        count.ns.fetch_add(ns, Relaxed);
        of_cpu.times[kind as usize].add(ns);
    }

    /// Begins all counts anew.
    pub(crate) fn reset(&self) {
        for count in self.0.iter().flat_map(|cpu| &cpu.counts) {
            for figure in [&count.requests, &count.sectors, &count.ns] {
                figure.store(0, Relaxed);
            }
        }
        self.0.iter().flat_map(|cpu| &cpu.times).for_each(Histogram::reset);
    }

    /// How long the requests of a kind took, each.
    pub(crate) fn durations(&self, kind: Kind) -> Durations {
        let mut durations = Durations::default();
        self.0.iter().for_each(|cpu| durations.add(&cpu.times[kind as usize]));
        durations
    }

    /// The requests of a kind so far, and the bytes that these read, wrote or discarded.
    pub(crate) fn sums(&self, kind: Kind) -> (u64, u64) {
        let Count { requests, sectors, .. } = self.sum(kind);
        (requests, sectors * u64::from(SECTOR_BYTES))
    }

    fn sum(&self, kind: Kind) -> Count {
        let counts = self.0.iter().map(|cpu| &cpu.counts[kind as usize]);
        counts.fold(Count::default(), |sum, one| Count {
            requests: sum.requests + one.requests.load(Relaxed),
            sectors: sum.sectors + one.sectors.load(Relaxed),
            ns: sum.ns + one.ns.load(Relaxed),
        })
    }
}

/// The columns of `/sys/block/DEVICE/stat`, times in milliseconds. Requests are not merged, and nobody knows how many
/// are under way, or for how long any was: those columns are 0.
impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds =
            [Kind::Read, Kind::Write, Kind::Discard, Kind::Flush].map(|kind| self.sum(kind));
        let ms = |ns: u64| ns / 1_000_000;
        let all_ms = ms(kinds.iter().map(|count| count.ns).sum());
        let group = |count: Count| {
            let Count { requests, sectors, ns } = count;
            format!("{requests:8} {:8} {sectors:8} {:8}", 0, ms(ns))
        };
        let [read, write, discard, flush] = kinds;
        let (flushes, flush_ms) = (flush.requests, ms(flush.ns));
        let [read, write, discard] = [read, write, discard].map(group);
        write!(f, "{read} {write} {0:8} {0:8} {all_ms:8} {discard} {flushes:8} {flush_ms:8}", 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{Durations, Histogram, Kind, Requests};

    /// Goal: nothing is lost where threads count at once, also on CPUs that share.
    #[test]
    fn every_request_is_counted_once() {
        let requests = Requests::new(3);
        std::thread::scope(|scope| {
            for cpu in 0..8 {
                let requests = &requests;
                scope.spawn(move || {
                    (0..1000).for_each(|_| requests.add(cpu, Kind::Write, 4096, 2000));
                    requests.add(cpu, Kind::Flush, 0, 1_000_000);
                });
            }
        });
        let line = requests.to_string();
        let columns: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let expected = [0, 0, 0, 0, 8000, 0, 64_000, 16, 0, 0, 24, 0, 0, 0, 0, 8, 8];
        assert_eq!(columns, expected);
        let mut durations = Durations::default();
        let one = Histogram::default();
        (0..8000).for_each(|_| one.add(2000));
        durations.add(&one);
        assert_eq!(requests.durations(Kind::Write), durations);
        requests.reset();
        assert_eq!(requests.durations(Kind::Write), Durations::default());
        assert!(requests.to_string().split_whitespace().all(|column| column == "0"));
    }
}
