//! A disk in memory, certificates and a stand-in for systemd, for tests and measurements. Not part of the interface.

pub mod certificates;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

#[cfg(test)]
use zfolio_core::sync::Mutex;
use zfolio_core::sync::RwLock;

use crate::device::{Device, Error, SECTOR_BYTES};

/// A disk whose contents are bytes in memory. Every [`UNIT_BYTES`] are a hole until they are written.
#[derive(Debug)]
pub struct Memory {
    pieces: Vec<RwLock<RANK_PIECE, Vec<u8>>>,
    /// One for each unit: whether it was written.
    written: Vec<AtomicBool>,
    size_bytes: u64,
    preferred_bytes: u32,
    is_read_only: bool,
    /// How often it was flushed.
    pub flushes: AtomicU64,
    /// How many requests front ends have refused for their ranges.
    pub invalid: AtomicU64,
    /// Requests that touch this offset or what is behind it fail.
    pub broken_from: AtomicU64,
    /// What they fail with: an index into `FAILURES`.
    pub broken_how: AtomicU64,
}

/// No other lock is taken below it.
const RANK_PIECE: u8 = 1;

/// A Python program that hands a listening socket to the program whose arguments follow the first one, as systemd does.
/// The first argument is the path of a Unix socket, or an address at which a port is chosen, whose number is printed.
pub const ACTIVATE: &str = r"
import os, socket, sys
where, program = sys.argv[1], sys.argv[2:]
if '/' in where:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(where)
    listener.listen()
else:
    listener = socket.create_server((where, 0))
    print(listener.getsockname()[1], flush=True)
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))
os.execv(program[0], program)
";

/// What is a hole or not.
pub const UNIT_BYTES: u64 = 4096;

/// What is locked as one.
const PIECE_BYTES: u64 = 1 << 20;

/// What [`Memory::broken_how`] chooses from.
pub const FAILURES: [Error; 5] =
    [Error::Io, Error::NoSpace, Error::Invalid, Error::NotPermitted, Error::NoMemory];

impl Memory {
    /// A disk of zeros.
    ///
    /// # Panics
    ///
    /// The size is not a multiple of a sector.
    #[must_use]
    pub fn new(size_bytes: u64) -> Memory {
        assert!(size_bytes % u64::from(SECTOR_BYTES) == 0, "{size_bytes} bytes");
        let piece = |index: u64| {
            let bytes = (size_bytes - index * PIECE_BYTES).min(PIECE_BYTES);
            RwLock::new(vec![0; place(bytes)])
        };
        Memory {
            pieces: (0..size_bytes.div_ceil(PIECE_BYTES)).map(piece).collect(),
            written: (0..size_bytes.div_ceil(UNIT_BYTES)).map(|_| AtomicBool::new(false)).collect(),
            size_bytes,
            preferred_bytes: 4096,
            is_read_only: false,
            flushes: AtomicU64::new(0),
            invalid: AtomicU64::new(0),
            broken_from: AtomicU64::new(u64::MAX),
            broken_how: AtomicU64::new(0),
        }
    }

    /// The same disk with another preferred size of requests.
    #[must_use]
    pub fn preferring(self, preferred_bytes: u32) -> Memory {
        Memory { preferred_bytes, ..self }
    }

    /// The same disk, read-only.
    #[must_use]
    pub fn read_only(self) -> Memory {
        Memory { is_read_only: true, ..self }
    }

    /// Requests that touch `from` or what is behind it fail from now on.
    pub fn break_from(&self, from: u64, how: Error) {
        let index = FAILURES.iter().position(|failure| *failure == how).expect("all are there");
        self.broken_how.store(index as u64, Relaxed);
        self.broken_from.store(from, Relaxed);
    }

    fn check(&self, at: u64, bytes: u64) -> Result<(), Error> {
        let end = at.checked_add(bytes).ok_or(Error::Invalid)?;
        if end > self.size_bytes || (at | bytes) % u64::from(SECTOR_BYTES) != 0 {
            return Err(Error::Invalid);
        }
        if end > self.broken_from.load(Relaxed) {
            return Err(FAILURES[place(self.broken_how.load(Relaxed))]);
        }
        Ok(())
    }

    fn check_change(&self, at: u64, bytes: u64) -> Result<(), Error> {
        if self.is_read_only { Err(Error::NotPermitted) } else { self.check(at, bytes) }
    }

    /// Calls `each` with each piece of the range: its index, the range in it, and the range in the request.
    fn pieces(
        at: u64,
        bytes: u64,
        mut each: impl FnMut(usize, std::ops::Range<usize>, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < bytes {
            let from = (at + done) % PIECE_BYTES;
            let length = (PIECE_BYTES - from).min(bytes - done);
            let (index, end) = ((at + done) / PIECE_BYTES, from + length);
            each(place(index), place(from)..place(end), place(done)..place(done + length));
            done += length;
        }
    }

    /// Notes for the units of a range whether they are written: all that it touches, or those that are whole in it.
    fn mark(&self, at: u64, bytes: u64, is_written: bool) {
        let end = at + bytes;
        let (first, last) = if is_written {
            (at / UNIT_BYTES, end.div_ceil(UNIT_BYTES))
        } else if end == self.size_bytes {
            (at.div_ceil(UNIT_BYTES), end.div_ceil(UNIT_BYTES))
        } else {
            (at.div_ceil(UNIT_BYTES), end / UNIT_BYTES)
        };
        for unit in first..last {
            self.written[place(unit)].store(is_written, Relaxed);
        }
    }

    fn zero(&self, at: u64, bytes: u64) {
        Memory::pieces(at, bytes, |index, range, _| self.pieces[index].write()[range].fill(0));
    }
}

/// A number of this disk as an index. The disk is in memory, so it fits.
fn place(number: u64) -> usize {
    usize::try_from(number).expect("the disk is in memory")
}

impl Device for Memory {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn preferred_bytes(&self) -> u32 {
        self.preferred_bytes
    }

    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check(at, into.len() as u64)?;
        Memory::pieces(at, into.len() as u64, |index, range, here| {
            into[here].copy_from_slice(&self.pieces[index].read()[range]);
        });
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Error> {
        self.check_change(at, from.len() as u64)?;
        self.mark(at, from.len() as u64, true);
        Memory::pieces(at, from.len() as u64, |index, range, here| {
            self.pieces[index].write()[range].copy_from_slice(&from[here]);
        });
        Ok(())
    }

    fn discard(&self, at: u64, bytes: u64) -> Result<(), Error> {
        self.check_change(at, bytes)?;
        self.zero(at, bytes);
        self.mark(at, bytes, false);
        Ok(())
    }

    fn write_zeroes(&self, at: u64, bytes: u64, keeps_room: bool) -> Result<(), Error> {
        if !keeps_room {
            return self.discard(at, bytes);
        }
        self.check_change(at, bytes)?;
        self.mark(at, bytes, true);
        self.zero(at, bytes);
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        self.flushes.fetch_add(1, Relaxed);
        Ok(())
    }

    fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error> {
        self.check(at, bytes)?;
        let (mut from, end) = (at, at + bytes);
        while from < end {
            let to = ((from / UNIT_BYTES + 1) * UNIT_BYTES).min(end);
            let is_hole = !self.written[place(from / UNIT_BYTES)].load(Relaxed);
            if !each(to - from, is_hole) {
                return Ok(());
            }
            from = to;
        }
        Ok(())
    }

    fn note_invalid(&self) {
        self.invalid.fetch_add(1, Relaxed);
    }
}

/// Runs the test of this name in a process of its own, in which `test` finds no more memory than there is at its
/// beginning, and a little more.
///
/// # Panics
///
/// The test has failed.
#[cfg(test)]
pub(crate) fn without_memory(name: &str, test: impl FnOnce()) {
    use rustix::process::{Resource, getrlimit, setrlimit};

    const MARK: &str = "ZFOLIO_TEST_WITHOUT_MEMORY";
    if std::env::var_os(MARK).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().expect("a program"));
        let status = child.args(["--exact", name]).env(MARK, "1").output().expect("it starts");
        let said = String::from_utf8_lossy(&status.stdout);
        assert!(status.status.success() && said.contains("1 passed"), "{status:?}");
        return;
    }
    // What is writable and private is counted, whether it was touched or not.
    let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).expect("VmData");
    let kib = line.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
    let most = (kib.expect("a number") + 256) << 10;
    let limit = getrlimit(Resource::Data);
    let few = rustix::process::Rlimit { current: Some(most), ..limit };
    setrlimit(Resource::Data, few).expect("less is allowed");
    test();
    setrlimit(Resource::Data, limit).expect("as it was");
}

/// Asserts that all metrics which a dashboard asks for, and whose names begin with `prefix`, are on the page.
///
/// # Panics
///
/// If one is not, or there are none.
pub fn check_dashboard(dashboard: &str, prefix: &str, page: &str) {
    let is_part = |letter: char| letter.is_ascii_lowercase() || letter == '_';
    let words = dashboard.split(|letter| !is_part(letter));
    let names: Vec<&str> = words.filter(|word| word.starts_with(prefix)).collect();
    assert!(names.len() > 5, "{names:?}");
    for name in names {
        let is_it =
            |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        assert!(page.lines().any(is_it), "{name} is on no page");
    }
}

/// A compressed disk with units of 4 KiB.
#[cfg(test)]
pub(crate) fn ram(disk_bytes: u64, algorithms: &[&str]) -> crate::ram::Ram {
    ram_of_units(zfolio_core::page::UnitOrder::DEFAULT, disk_bytes, algorithms)
}

/// The same disk in other units.
#[cfg(test)]
pub(crate) fn ram_of_units(
    unit: zfolio_core::page::UnitOrder,
    disk_bytes: u64,
    algorithms: &[&str],
) -> crate::ram::Ram {
    let config = crate::ram::Config {
        disk_bytes,
        algorithms: algorithms.iter().map(|name| name.parse().unwrap()).collect(),
        unit,
        limit_bytes: 0,
        age_s: 600,
        accelerated: zfolio_workers::Accelerated::NONE,
    };
    let source = std::sync::Arc::new(zfolio_pager::PoolMappings::default());
    crate::ram::Ram::new(&config, source, Box::new(|error| panic!("{error}"))).unwrap()
}

/// The same disk with a place in memory that units are written back to.
#[cfg(test)]
pub(crate) fn written_back(ram: crate::ram::Ram) -> crate::ram::Ram {
    let backing = Box::new(zfolio_core::store::backing::memory::Memory::new(64 << 20));
    let budget = zfolio_core::budget::WriteBudget::NONE;
    let name = "memory".to_owned();
    ram.with_writeback(crate::ram::Writeback { backing, name, age_s: 600, budget })
}

/// A request that is about to be carried out.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// A range is read or written: where, and how many bytes.
    Moves(u64, usize),
    Flush,
    Other,
}

/// A disk whose requests pass somebody before they are carried out.
#[cfg(test)]
pub(crate) struct Watched<W> {
    pub(crate) disk: Memory,
    watch: W,
}

/// Whom the requests of a [`Watched`] disk pass.
#[cfg(test)]
pub(crate) trait Watch: Send + Sync {
    fn pass(&self, call: Call);

    /// The kind of so many bytes is looked at.
    fn look(&self, _bytes: u64) {}
}

#[cfg(test)]
impl<W: Watch> Device for Watched<W> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn preferred_bytes(&self) -> u32 {
        self.disk.preferred_bytes()
    }
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.watch.pass(Call::Moves(at, into.len()));
        self.disk.read(at, into)
    }
    fn write(&self, at: u64, from: &[u8]) -> Result<(), Error> {
        self.watch.pass(Call::Moves(at, from.len()));
        self.disk.write(at, from)
    }
    fn discard(&self, at: u64, bytes: u64) -> Result<(), Error> {
        self.watch.pass(Call::Other);
        self.disk.discard(at, bytes)
    }
    fn write_zeroes(&self, at: u64, bytes: u64, keeps_room: bool) -> Result<(), Error> {
        self.watch.pass(Call::Other);
        self.disk.write_zeroes(at, bytes, keeps_room)
    }
    fn flush(&self) -> Result<(), Error> {
        self.watch.pass(Call::Flush);
        self.disk.flush()
    }
    fn runs(
        &self,
        at: u64,
        bytes: u64,
        each: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Error> {
        self.watch.pass(Call::Other);
        // A run is reported at its end, as by a compressed disk.
        let (mut run, mut goes_on) = ((0, false), true);
        self.disk.runs(at, bytes, &mut |length, is_hole| {
            self.watch.look(length);
            if run.0 > 0 && run.1 != is_hole {
                goes_on = each(run.0, run.1);
                run.0 = 0;
            }
            run = (run.0 + length, is_hole);
            goes_on
        })?;
        if goes_on && run.0 > 0 {
            each(run.0, run.1);
        }
        Ok(())
    }
}

/// Counts the bytes whose kinds are looked at.
#[cfg(test)]
pub(crate) struct Looks(AtomicU64);

#[cfg(test)]
pub(crate) type Looked = Watched<Looks>;

#[cfg(test)]
impl Watch for Looks {
    fn pass(&self, _call: Call) {}

    fn look(&self, bytes: u64) {
        self.0.fetch_add(bytes, Relaxed);
    }
}

#[cfg(test)]
impl Looked {
    pub(crate) fn new(disk: Memory) -> Looked {
        Watched { disk, watch: Looks(AtomicU64::new(0)) }
    }

    /// How many bytes that were so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.watch.0.load(Relaxed)
    }
}

/// Notes which ranges are read and written, each with its length.
#[cfg(test)]
pub(crate) struct Notes(Mutex<RANK_CALLS, Vec<(u64, usize)>>);

/// Never held with another one.
#[cfg(test)]
const RANK_CALLS: u8 = 9;

#[cfg(test)]
pub(crate) type Noted = Watched<Notes>;

#[cfg(test)]
impl Watch for Notes {
    fn pass(&self, call: Call) {
        if let Call::Moves(at, bytes) = call {
            self.0.lock().push((at, bytes));
        }
    }
}

#[cfg(test)]
impl Noted {
    pub(crate) fn new(disk: Memory) -> Noted {
        Watched { disk, watch: Notes(Mutex::new(Vec::new())) }
    }

    /// Asserts that what was noted is one request of `bytes` from `at` on, in order, in calls of `most` bytes at most
    /// that end where units do; and forgets it.
    pub(crate) fn check_units_are_whole(&self, at: u64, bytes: usize, most: usize, context: &str) {
        let unit_bytes = u64::from(self.preferred_bytes());
        let (mut next, end) = (at, at + bytes as u64);
        for (from, length) in self.watch.0.lock().drain(..) {
            assert_eq!(from, next, "{context}");
            next += length as u64;
            let is_whole = next % unit_bytes == 0 || next == end;
            assert!(is_whole && length <= most, "{context}: {length}");
        }
        assert_eq!(next, end, "{context}");
    }
}

/// Requests wait until it is open.
#[cfg(test)]
pub(crate) struct Gate {
    /// Only flushes wait.
    for_flushes: bool,
    is_shut: AtomicBool,
    waits: AtomicU64,
}

#[cfg(test)]
pub(crate) type Gated = Watched<Gate>;

#[cfg(test)]
impl Watch for Gate {
    fn pass(&self, call: Call) {
        if self.for_flushes && call != Call::Flush {
            return;
        }
        if self.is_shut.load(Relaxed) {
            self.waits.fetch_add(1, Relaxed);
        }
        while self.is_shut.load(Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
impl Gated {
    /// With an open gate.
    pub(crate) fn new(disk: Memory) -> Gated {
        let (is_shut, waits) = (AtomicBool::new(false), AtomicU64::new(0));
        Watched { disk, watch: Gate { for_flushes: false, is_shut, waits } }
    }

    /// With an open gate that only flushes have to pass.
    pub(crate) fn for_flushes(disk: Memory) -> Gated {
        let mut gated = Gated::new(disk);
        gated.watch.for_flushes = true;
        gated
    }

    pub(crate) fn shut(&self, is_shut: bool) {
        self.watch.is_shut.store(is_shut, Relaxed);
    }

    /// How many requests have come to a shut gate.
    pub(crate) fn waits(&self) -> u64 {
        self.watch.waits.load(Relaxed)
    }
}
