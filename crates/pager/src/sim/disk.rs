//! A backing that takes its time: requests end later, in any order, and some are refused or fail for now. When it is
//! full, it refuses a write, or accepts it and fails later. In an outage everything fails for some time, and in a stall
//! nothing ends.

#![allow(clippy::disallowed_types, reason = "the disk's lock is none of the engine's")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zfolio_core::store::Backing;
use zfolio_core::store::backing::{
    Completed, Completion, Failure, Location, Operation, Request, Token, Usage,
};

use super::random::Random;
use super::schedule::{self, Schedule};

/// The longest time that a request takes.
const SLOW_NS: usize = 3_000_000;

/// The longest stall.
const STALL_NS: usize = 3_000_000_000;

/// The longest outage: shorter than somebody waits for a unit (`spill/retry.rs`).
pub(super) const OUTAGE_NS: usize = 5_000_000_000;

/// So long there is no other one, in which a wait that has begun in an outage could end.
pub(super) const GOOD_NS: u64 = 10_000_000_000;

/// So long a thread waits for a request to end, at most.
pub(super) const PAUSE_NS: u64 = 1_000_000;

/// What a run knows of what is below the engine.
pub(super) trait Below: std::fmt::Debug + Send + Sync {
    /// From now on nothing may be written, or it may again.
    fn rest(&self, is_at_rest: bool);

    /// From now on every request ends at once, or no longer.
    fn hurry(&self, hurries: bool);

    /// How much it keeps: objects, and what is not free for another reason.
    fn contents(&self) -> (usize, usize);

    /// How many threads wait for it: on a real one each of them may hold a lock, which a child would find held.
    fn waiting(&self) -> usize;

    /// A child is made just now.
    fn share(&self) {}

    /// What is under way takes so much longer.
    fn delay(&self, _ns: u64) {}
}

#[derive(Debug)]
enum Done {
    /// There was no room, which shows late.
    Full,
    Written(u64),
    Read(Vec<u8>),
}

#[derive(Debug)]
struct Pending {
    token: Token,
    due_ns: u64,
    done: Done,
}

#[derive(Debug)]
struct Book {
    random: Random,
    kept: BTreeMap<u64, Vec<u8>>,
    next: u64,
    bytes: usize,
    /// Bytes that were read, and written.
    moved: [u64; 2],
    pending: Vec<Pending>,
    /// When the last outage ends, or has ended.
    outage_until_ns: u64,
    /// Until then no request ends.
    stalls_until_ns: u64,
}

/// How a disk misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Faults {
    /// One of so many requests is refused, and one fails; 0 is none.
    pub(super) refuses: usize,
    /// At one of so many reads an outage begins; 0 is none.
    pub(super) outages: usize,
    /// The first outage does not end. Of areas: what comes damaged stays so.
    pub(super) is_lasting: bool,
    /// At one of so many requests the disk stalls: until it goes on, none ends; 0 is never.
    pub(super) stalls: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Disk {
    schedule: Arc<Schedule>,
    book: Mutex<Book>,
    bytes_max: usize,
    faults: Faults,
    /// Every request ends at once, and none fails: for a check that reads everything.
    hurries: AtomicBool,
    /// Threads that wait for it.
    waiting: AtomicUsize,
    /// A thread is about to fork: to write is an error of the engine's (`SPILL-4`).
    is_at_rest: AtomicBool,
}

impl Disk {
    pub(super) fn new(
        schedule: Arc<Schedule>,
        random: Random,
        bytes_max: usize,
        faults: Faults,
    ) -> Disk {
        let (kept, pending) = (BTreeMap::new(), Vec::new());
        let book = Book {
            random,
            kept,
            next: 0,
            bytes: 0,
            moved: [0; 2],
            pending,
            outage_until_ns: 0,
            stalls_until_ns: 0,
        };
        let book = Mutex::new(book);
        let (hurries, is_at_rest) = (AtomicBool::new(false), AtomicBool::new(false));
        let waiting = AtomicUsize::new(0);
        Disk { schedule, book, bytes_max, faults, hurries, waiting, is_at_rest }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many requests are between two that fail.
    fn refuses(&self) -> usize {
        if self.hurries.load(Relaxed) { 0 } else { self.faults.refuses }
    }
}

impl Below for Disk {
    fn rest(&self, is_at_rest: bool) {
        self.is_at_rest.store(is_at_rest, Relaxed);
    }

    fn hurry(&self, hurries: bool) {
        self.hurries.store(hurries, Relaxed);
    }

    /// Objects, and requests under way.
    fn contents(&self) -> (usize, usize) {
        let book = self.lock();
        (book.kept.len(), book.pending.len())
    }

    fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    fn delay(&self, ns: u64) {
        self.lock().pending.iter_mut().for_each(|pending| pending.due_ns += ns);
    }
}

impl Book {
    fn accept(&mut self, operation: Operation<'_>, bytes_max: usize) -> Result<Done, Failure> {
        match operation {
            Operation::Write(bytes) if self.bytes + bytes.len() > bytes_max => {
                if self.random.one_in(2) { Ok(Done::Full) } else { Err(Failure::Transient) }
            }
            Operation::Write(bytes) => {
                self.next += 1;
                self.bytes += bytes.len();
                self.moved[1] += bytes.len() as u64;
                self.kept.insert(self.next, bytes.to_vec());
                Ok(Done::Written(self.next))
            }
            Operation::Read { location, length } => {
                let bytes = self.kept.get(&location.get()).expect("it is kept there");
                assert_eq!(bytes.len(), length, "another length was written");
                self.moved[0] += length as u64;
                Ok(Done::Read(bytes.clone()))
            }
        }
    }

    /// Whether a request fails that ends now, as one does between `fails` others or in an outage.
    fn fails(&mut self, done: &Done, now_ns: u64, faults: Faults) -> bool {
        let begins = matches!(done, Done::Read(_))
            && (self.outage_until_ns == 0 || now_ns > self.outage_until_ns.saturating_add(GOOD_NS))
            && self.random.one_in(faults.outages);
        if begins && faults.is_lasting {
            self.outage_until_ns = u64::MAX;
        } else if begins {
            let longest = self.random.of(&[OUTAGE_NS / 1000, OUTAGE_NS / 10, OUTAGE_NS]);
            self.outage_until_ns = now_ns + self.random.below(longest) as u64;
        }
        now_ns < self.outage_until_ns || self.random.one_in(faults.refuses)
    }

    fn forget(&mut self, location: u64) {
        let bytes = self.kept.remove(&location).expect("a location is given up once");
        self.bytes -= bytes.len();
    }
}

/// The backing of the engine: the same disk.
#[derive(Clone, Debug)]
pub(super) struct Shared(pub(super) Arc<Disk>);

impl Backing for Shared {
    fn submit(&self, requests: &mut [Request<'_>]) {
        let (now, mut book) = (self.0.schedule.now_ns(), self.0.lock());
        for request in requests {
            let is_write = matches!(request.operation, Operation::Write(_));
            // Only who looks at what the engine keeps has the disk hurry, and may need room for it.
            let is_at_rest = self.0.is_at_rest.load(Relaxed) && !self.0.hurries.load(Relaxed);
            assert!(!(is_write && is_at_rest), "SPILL-4: a write before a fork");
            if book.random.one_in(self.0.refuses()) {
                request.refused = Some(Failure::Transient);
                continue;
            }
            match book.accept(request.operation, self.0.bytes_max) {
                Ok(done) => {
                    let slow = book.random.of(&[SLOW_NS / 1000, SLOW_NS]);
                    let due_ns = now + book.random.below(slow) as u64;
                    if book.random.one_in(self.0.faults.stalls) {
                        book.stalls_until_ns = now + book.random.below(STALL_NS) as u64;
                    }
                    book.pending.push(Pending { token: request.token, due_ns, done });
                }
                Err(failure) => request.refused = Some(failure),
            }
        }
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        loop {
            let hurries = self.0.hurries.load(Relaxed);
            let (now, mut book) = (self.0.schedule.now_ns(), self.0.lock());
            let stalls = now < book.stalls_until_ns;
            let is_due = |pending: &Pending| hurries || pending.due_ns <= now && !stalls;
            let ended = book.pending.iter().position(is_due);
            let Some(Pending { token, done, .. }) = ended.map(|at| book.pending.swap_remove(at))
            else {
                return;
            };
            let fails = !hurries && book.fails(&done, now, self.0.faults);
            if fails && matches!(done, Done::Read(_)) {
                self.0.schedule.waits_for_disk();
            }
            if let (Done::Written(location), true) = (&done, fails) {
                book.forget(*location);
            }
            drop(book);
            let result = match &done {
                _ if fails => Err(Failure::Transient),
                Done::Full => Err(Failure::Transient),
                Done::Written(location) => Ok(Completed::Written(
                    Location::new(*location).expect("a run writes less than 2^42 objects"),
                )),
                Done::Read(bytes) => Ok(Completed::Read(bytes)),
            };
            each(Completion { token, result });
        }
    }

    fn usage(&self) -> Usage {
        let book = self.0.lock();
        let [read_bytes, written_bytes] = book.moved;
        Usage { used_bytes: book.bytes as u64, read_bytes, written_bytes }
    }

    fn discard(&self, location: Location, length: usize) {
        let mut book = self.0.lock();
        assert_eq!(book.kept[&location.get()].len(), length, "another length was written");
        book.forget(location.get());
    }

    fn pause(&self) {
        let (now, stalls_until) = (self.0.schedule.now_ns(), self.0.lock().stalls_until_ns);
        if now < stalls_until {
            self.0.schedule.waits_for_disk();
        }
        self.0.waiting.fetch_add(1, Relaxed);
        schedule::wait("the disk".to_owned(), Some(PAUSE_NS));
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}
