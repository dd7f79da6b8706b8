//! The phases: what the threads do with a disk, and what it must contain afterwards.
//!
//! # Invariants
//!
//! - `PHS-1` A page of a disk belongs to one thread, and [`Side::contents`] has the number of the sample's page that
//!   was written to it last.

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::testing::Random;
use zfolio_sys::clock;

use super::disk::Disk;
use crate::mapping::Anonymous;

/// Bytes of a request in order.
pub(super) const REQUEST_BYTES: usize = 64 << 10;

/// Pages of a request in order.
const REQUEST_PAGES: usize = REQUEST_BYTES / PAGE_BYTES;

const _: () = assert!(REQUEST_PAGES * PAGE_BYTES == REQUEST_BYTES);

/// Random requests between two looks at the clock.
const REQUESTS_PER_LOOK: u64 = 8;

/// What is measured, in this order, which is that of iozone.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Fills the disk in order
    Write,
    /// Overwrites the disk in order with other contents
    Rewrite,
    /// Reads the disk in order
    Read,
    /// Reads the disk in order once more
    Reread,
    /// Overwrites pages at random with other contents
    RandomWrite,
    /// Reads pages at random
    RandomRead,
    /// Half of the requests are random reads, the others random writes
    RandomMixed,
}

impl Phase {
    pub(super) const ALL: [Phase; 7] = [
        Phase::Write,
        Phase::Rewrite,
        Phase::Read,
        Phase::Reread,
        Phase::RandomWrite,
        Phase::RandomRead,
        Phase::RandomMixed,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Write => "write 64K",
            Phase::Rewrite => "rewrite 64K",
            Phase::Read => "read 64K",
            Phase::Reread => "reread 64K",
            Phase::RandomWrite => "random write 4K",
            Phase::RandomRead => "random read 4K",
            Phase::RandomMixed => "random mixed 4K",
        }
    }

    /// Whether requests are in order and of 64 KiB.
    pub(super) fn is_in_order(self) -> bool {
        matches!(self, Phase::Write | Phase::Rewrite | Phase::Read | Phase::Reread)
    }
}

/// What a phase took on one disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    pub(super) requests: u64,
    /// Elapsed time.
    pub(super) wall_ns: u64,
    /// CPU time of all threads, with what the kernel did for them.
    pub(super) cpu_ns: u64,
}

/// What the phases of one round need.
pub(super) struct Plan<'a> {
    /// The data; as many pages as the disk, or more.
    pub(super) sample: &'a [u8],
    pub(super) jobs: usize,
    /// How long a phase of random requests goes on.
    pub(super) random_ns: u64,
    /// Both disks get the same random requests.
    pub(super) seed: u64,
}

/// A disk and what it contains (`PHS-1`).
pub(super) struct Side {
    pub(super) disk: Box<dyn Disk>,
    contents: Vec<usize>,
}

fn page_of(sample: &[u8], page: usize) -> &[u8] {
    &sample[page * PAGE_BYTES..][..PAGE_BYTES]
}

impl Side {
    /// A new disk, which [`Phase::Write`] has to fill first.
    pub(super) fn new(disk: Box<dyn Disk>, pages: usize) -> Side {
        Side { disk, contents: (0..pages).collect() }
    }

    /// Carries out a phase with all jobs, each with its part of the disk.
    pub(super) fn carry_out(&mut self, phase: Phase, plan: &Plan<'_>) -> Result<Speed, String> {
        let part = self.contents.len() / plan.jobs;
        let disk = &*self.disk;
        let (began, cpu_began) = (clock::monotonic_ns(), clock::process_ns());
        let ends = began + plan.random_ns;
        let requests = std::thread::scope(|scope| {
            let parts = self.contents.chunks_exact_mut(part).enumerate();
            let threads: Vec<_> = parts
                .map(|(number, contents)| {
                    let first = number * part;
                    let random = Random::new(plan.seed * 64 + number as u64);
                    let job = Job { disk, sample: plan.sample, first, contents, random };
                    scope.spawn(move || job.carry_out(phase, ends))
                })
                .collect();
            let ended = threads.into_iter().map(|thread| thread.join().expect("no job panics"));
            ended.sum::<Result<u64, String>>()
        })?;
        let wall_ns = (clock::monotonic_ns() - began).max(1);
        let cpu_ns = (clock::process_ns() - cpu_began).max(1);
        Ok(Speed { requests, wall_ns, cpu_ns })
    }

    /// Reads the disk, and compares every byte with what was written last.
    pub(super) fn check(&self, sample: &[u8]) -> Result<(), String> {
        let mut buffer = Anonymous::new(REQUEST_BYTES).map_err(|error| error.to_string())?;
        for (number, pages) in self.contents.chunks(REQUEST_PAGES).enumerate() {
            let at = number * REQUEST_BYTES;
            let read = &mut buffer[..pages.len() * PAGE_BYTES];
            self.disk.read(at as u64, read)?;
            let both = pages.iter().zip(read.chunks_exact(PAGE_BYTES));
            let wrong =
                both.enumerate().find(|(_, (page, bytes))| page_of(sample, **page) != *bytes);
            if let Some((index, _)) = wrong {
                let at = at + index * PAGE_BYTES;
                return Err(format!("the page at byte {at} is not what was written there last"));
            }
        }
        Ok(())
    }
}

/// One thread with its part of the disk.
struct Job<'a> {
    disk: &'a dyn Disk,
    sample: &'a [u8],
    /// Its first page of the disk.
    first: usize,
    /// Its part of [`Side::contents`].
    contents: &'a mut [usize],
    random: Random,
}

impl Job<'_> {
    /// Returns the number of requests.
    fn carry_out(mut self, phase: Phase, ends: u64) -> Result<u64, String> {
        let mut buffer = Anonymous::new(REQUEST_BYTES).map_err(|error| error.to_string())?;
        if phase.is_in_order() {
            return self.in_order(phase, &mut buffer);
        }
        let mut requests = 0;
        // A job that gets no CPU before the phase is over makes some, too: without a request there is no speed to tell.
        while requests % REQUESTS_PER_LOOK > 0 || requests == 0 || clock::monotonic_ns() < ends {
            let reads = match phase {
                Phase::RandomRead => true,
                Phase::RandomWrite => false,
                _ => self.random.below(2) == 0,
            };
            let index = self.random.below(self.contents.len());
            let at = ((self.first + index) * PAGE_BYTES) as u64;
            if reads {
                self.disk.read(at, &mut buffer[..PAGE_BYTES])?;
            } else {
                let page = self.other_page(self.contents[index]);
                self.disk.write(at, page_of(self.sample, page))?;
                self.contents[index] = page;
            }
            requests += 1;
        }
        Ok(requests)
    }

    fn in_order(&mut self, phase: Phase, buffer: &mut [u8]) -> Result<u64, String> {
        let mut requests = 0;
        for start in (0..self.contents.len()).step_by(REQUEST_PAGES) {
            let at = ((self.first + start) * PAGE_BYTES) as u64;
            match phase {
                Phase::Write => self.write_in_order(at, start, self.first + start)?,
                Phase::Rewrite => self.write_in_order(at, start, self.shifted(start))?,
                _ => self.disk.read(at, buffer)?,
            }
            requests += 1;
        }
        Ok(requests)
    }

    /// Writes to the pages from `start` of this job's part what the sample has from `page`.
    fn write_in_order(&mut self, at: u64, start: usize, page: usize) -> Result<(), String> {
        self.disk.write(at, &self.sample[page * PAGE_BYTES..][..REQUEST_BYTES])?;
        let contents = &mut self.contents[start..][..REQUEST_PAGES];
        contents.iter_mut().zip(page..).for_each(|(content, page)| *content = page);
        Ok(())
    }

    /// Where the sample has other contents for the request from `start`: half of the sample further on.
    fn shifted(&self, start: usize) -> usize {
        let requests = self.sample.len() / REQUEST_BYTES;
        let own = (self.first + start) / REQUEST_PAGES;
        (own + requests.div_ceil(2)) % requests * REQUEST_PAGES
    }

    /// A random page of the sample, but not `page`.
    fn other_page(&mut self, page: usize) -> usize {
        let other = self.random.below(self.sample.len() / PAGE_BYTES - 1);
        other + usize::from(other >= page)
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::sync::Mutex;

    use super::{Disk, PAGE_BYTES, Phase, Plan, Side, page_of};
    use crate::zram::disk::Sizes;

    /// A disk of plain memory, which refuses a page that it has already.
    struct Plain(Mutex<1, Vec<u8>>);

    impl Disk for Plain {
        fn name(&self) -> &'static str {
            "plain"
        }

        fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String> {
            into.copy_from_slice(&self.0.lock()[usize::try_from(at).unwrap()..][..into.len()]);
            Ok(())
        }

        fn write(&self, at: u64, from: &[u8]) -> Result<(), String> {
            let mut disk = self.0.lock();
            let into = &mut disk[usize::try_from(at).unwrap()..][..from.len()];
            if into == from {
                return Err(format!("{at} has these contents already"));
            }
            into.copy_from_slice(from);
            Ok(())
        }

        fn sizes(&self) -> Result<Sizes, String> {
            Ok(Sizes::default())
        }
    }

    /// Goal: random writes change the page that they write, and a wrong page is found. Method: pages of distinct
    /// contents on a disk of plain memory, one page of which is changed afterwards.
    #[test]
    fn a_write_changes_its_page_and_a_wrong_page_is_found() {
        let sample: Vec<u8> = (1..=33_u8).flat_map(|page| vec![page; PAGE_BYTES]).collect();
        let plan = Plan { sample: &sample, jobs: 2, random_ns: 2_000_000, seed: 1 };
        let disk = Plain(Mutex::new(vec![0; 32 * PAGE_BYTES]));
        let mut side = Side::new(Box::new(disk), 32);
        for phase in Phase::ALL {
            let speed = side.carry_out(phase, &plan).unwrap();
            assert!(speed.requests > 0, "{phase:?}: {speed:?}");
            assert!(!phase.is_in_order() || speed.requests == 2, "{phase:?}: {speed:?}");
        }
        side.check(&sample).unwrap();
        assert!(side.contents.iter().enumerate().any(|(index, page)| index != *page));
        let other = (side.contents[9] + 1) % 33;
        side.disk.write(9 * 4096, page_of(&sample, other)).unwrap();
        assert!(side.check(&sample).unwrap_err().contains("byte 36864"));
    }
}
