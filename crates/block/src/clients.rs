//! The clients of a server: accepts their connections, counts them, and ends them.
//!
//! # Concurrency
//!
//! One thread accepts, and each connection has a thread of its own. A lock (`Shared::live`) protects the list of
//! connections; it is held for an insert or a remove, never across a system call that waits. What must be done while
//! nobody is connected holds the server ([`Clients::hold`]): who connects then waits until it is let go.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use zfolio_core::sync::Mutex;
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::eventfd::EventFd;

use crate::listen::Listener;

/// The rank of the lock of the list of connections. A reset of a disk takes it while it holds that
/// of the disk's end (`control.rs`).
const RANK_LIVE: u8 = 2;

/// Connections whose sockets were shut down have so long to end.
pub(crate) const CUT: Duration = Duration::from_secs(1);

/// A client that finds the server full waits so long for another one to leave, and then is sent away.
const FULL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// After an `accept` that failed for want of memory or descriptors, the next one waits so long.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// So many clients are sent away before the server looks after others again: one backlog, since more can come as fast
/// as they are sent away.
const SENT_AWAY_MAX: usize = 128;

/// The rank of the lock of what was reported. Nothing is called while it is held.
const RANK_REPORTED: u8 = 1;

/// A line about what may happen often comes so often at most: anybody can be refused as often as he likes.
const REPORT_NS: u64 = 10_000_000_000;

/// What is called with a line for people.
pub type Report = Box<dyn Fn(&str) + Send + Sync>;

/// Reports what happens again and again, as clients that are refused: now and then, if it is often.
pub struct Refusals {
    report: Report,
    reported: Mutex<RANK_REPORTED, Reported>,
}

impl std::fmt::Debug for Refusals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refusals").finish_non_exhaustive()
    }
}

/// What was reported.
#[derive(Default)]
struct Reported {
    /// The earliest time of the next line.
    next_ns: u64,
    /// Those since the last one.
    unsaid: u64,
}

impl Refusals {
    /// Lines go to `report`.
    #[must_use]
    pub fn new(report: Report) -> Refusals {
        Refusals { report, reported: Mutex::new(Reported::default()) }
    }

    /// It happened once more, as the line says. That is reported if nothing was for a while, with how often it happened
    /// since.
    pub fn note(&self, line: &str) {
        let turn = self.reported.lock().turn(monotonic_ns());
        match turn {
            None => {}
            Some(0) => (self.report)(line),
            Some(more) => (self.report)(&format!("{line}; and {more} more before")),
        }
    }
}

impl Reported {
    /// How many a line now stands for beside the one that has happened; `None`: there is no line now.
    fn turn(&mut self, now_ns: u64) -> Option<u64> {
        if now_ns < self.next_ns {
            self.unsaid += 1;
            return None;
        }
        self.next_ns = now_ns + REPORT_NS;
        Some(std::mem::take(&mut self.unsaid))
    }
}

/// What a server has counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were closed at once: the server was full, or no thread or memory was to be had.
    pub refused: u64,
    /// Connections whose handshake took too long.
    pub timed_out: u64,
    /// Connections that ended because the handshake of TLS failed.
    pub tls_refused: u64,
    /// Connections that ended because their front end goes on with a disk that is not this one.
    pub unknown: u64,
    /// Connections that exist now.
    pub live: u64,
}

impl std::ops::Add for Counts {
    type Output = Counts;

    /// The counts of two servers of one disk.
    fn add(self, other: Counts) -> Counts {
        Counts {
            accepted: self.accepted + other.accepted,
            refused: self.refused + other.refused,
            timed_out: self.timed_out + other.timed_out,
            tls_refused: self.tls_refused + other.tls_refused,
            unknown: self.unknown + other.unknown,
            live: self.live + other.live,
        }
    }
}

/// What is spoken on the connections.
pub(crate) trait Protocol: Send + Sync + 'static {
    /// The name of its threads.
    const NAME: &'static str;

    /// A connection, as its own thread and the one that ends it need it.
    type Stream: Send + Sync;

    /// A client of `listener` has connected.
    fn open(&self, socket: OwnedFd, listener: &Listener) -> Self::Stream;

    /// Serves a client until the connection ends.
    fn serve(&self, stream: &Arc<Self::Stream>);
}

/// See the module. Dropping it accepts nothing more, and leaves the connections to end by themselves.
pub(crate) struct Clients<P: Protocol> {
    shared: Arc<Shared<P>>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared<P: Protocol> {
    protocol: P,
    /// So many connections at once.
    max: usize,
    /// The connections, by the number of their acceptance.
    live: Mutex<RANK_LIVE, BTreeMap<u64, Arc<P::Stream>>>,
    gate: Arc<Gate>,
    /// Nothing more is accepted. Relaxed throughout: it carries no data.
    ends: AtomicBool,
    accepted: AtomicU64,
    refused: AtomicU64,
}

/// Whether connections begin.
#[derive(Debug)]
struct Gate {
    /// Rings when a connection ends, nothing more is to be accepted, or a hold ends.
    wake: EventFd,
    /// No connection begins while this is set. Relaxed throughout: it is set while the list of connections is locked,
    /// and looked at under the same lock, before a connection is put on the list.
    is_held: AtomicBool,
}

/// Nobody is connected to a server, and nobody's connection begins until this is dropped: who connects waits.
#[derive(Debug)]
#[must_use = "connections begin once it is dropped"]
pub struct Held(Arc<Gate>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.is_held.store(false, Relaxed);
        self.0.wake.ring();
    }
}

/// Takes a connection off the list when its thread ends, however it ends.
struct Leaves<P: Protocol> {
    shared: Arc<Shared<P>>,
    number: u64,
}

impl<P: Protocol> Drop for Leaves<P> {
    fn drop(&mut self) {
        let stream = self.shared.live.lock().remove(&self.number);
        // The last use of the socket, which closes it; not under the lock.
        drop(stream);
        self.shared.gate.wake.ring();
    }
}

impl<P: Protocol> Clients<P> {
    /// Serves whoever connects, `max` of them at once.
    ///
    /// # Errors
    ///
    /// No thread or descriptor is to be had.
    pub(crate) fn start(
        listeners: Vec<Listener>,
        max: usize,
        protocol: P,
    ) -> io::Result<Clients<P>> {
        let shared = Arc::new(Shared {
            protocol,
            max,
            live: Mutex::new(BTreeMap::new()),
            gate: Arc::new(Gate { wake: EventFd::new()?, is_held: AtomicBool::new(false) }),
            ends: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("{}-accept", P::NAME));
        let acceptor = thread.spawn(move || for_thread.accept(&listeners))?;
        Ok(Clients { shared, acceptor: Some(acceptor) })
    }

    pub(crate) fn protocol(&self) -> &P {
        &self.shared.protocol
    }

    /// What was counted; nothing of the protocol.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            accepted: self.shared.accepted.load(Relaxed),
            refused: self.shared.refused.load(Relaxed),
            timed_out: 0,
            tls_refused: 0,
            unknown: 0,
            live: self.live() as u64,
        }
    }

    pub(crate) fn live(&self) -> usize {
        self.shared.live()
    }

    /// Keeps connections from beginning until the result is dropped. An error: there are so many already. One caller
    /// at a time.
    pub(crate) fn hold(&self) -> Result<Held, usize> {
        let live = self.shared.live.lock();
        if !live.is_empty() {
            return Err(live.len());
        }
        let was_held = self.shared.gate.is_held.swap(true, Relaxed);
        debug_assert!(!was_held, "whoever ends first would let clients in under the other");
        Ok(Held(Arc::clone(&self.shared.gate)))
    }

    /// Accepts nothing more, and closes the listeners. Returns whether it did so before.
    pub(crate) fn close(&mut self) -> bool {
        let Some(acceptor) = self.acceptor.take() else { return true };
        self.shared.ends.store(true, Relaxed);
        self.shared.gate.wake.ring();
        // It can only have panicked, and then it accepts nothing either.
        acceptor.join().ok();
        false
    }

    /// Tells every connection to end.
    pub(crate) fn end(&self, end: impl Fn(&P::Stream)) {
        self.shared.live.lock().values().for_each(|stream| end(stream));
    }

    /// Waits until there are no connections, for this time at most.
    pub(crate) fn wait_until_none(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let deadline_ns = monotonic_ns().saturating_add(time_ns);
        while self.live() > 0 {
            let left_ms = deadline_ns.saturating_sub(monotonic_ns()).div_ceil(1_000_000);
            if left_ms == 0 {
                return;
            }
            if self.shared.gate.wake.wait(u16::try_from(left_ms).unwrap_or(u16::MAX)) {
                self.shared.gate.wake.clear();
            }
        }
    }
}

impl<P: Protocol> Drop for Clients<P> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<P: Protocol> std::fmt::Debug for Clients<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct(P::NAME).field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl<P: Protocol> Shared<P> {
    fn live(&self) -> usize {
        self.live.lock().len()
    }

    /// Accepts connections until nothing more is to be accepted.
    fn accept(self: &Arc<Self>, listeners: &[Listener]) {
        while !self.ends.load(Relaxed) {
            let is_full = self.live() >= self.max;
            let waited_for = if is_full { &[] } else { listeners };
            let (ready, timed_out) = self.wait(waited_for, is_full.then_some(&FULL));
            if is_full && timed_out {
                // Nobody has left: those that wait are told by the end of their connections, and do not wait for ever.
                listeners.iter().for_each(|listener| self.send_away(listener));
                continue;
            }
            for (listener, is_ready) in waited_for.iter().zip(ready) {
                // Several listeners may be ready at once, with room for one more.
                let is_full = self.live() >= self.max;
                match if is_ready && !is_full { listener.accept() } else { Err(Errno::AGAIN) } {
                    Ok(socket) => self.begin(socket, listener),
                    Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                    Err(_) => {
                        self.wait(&[], Some(&RETRY));
                    }
                }
            }
        }
    }

    /// Waits for a connection or a ring. Returns which listeners have a connection, and whether nothing came in time.
    fn wait(&self, listeners: &[Listener], time: Option<&Timespec>) -> (Vec<bool>, bool) {
        let files = std::iter::once(self.gate.wake.file()).chain(listeners.iter().map(AsFd::as_fd));
        let mut polled: Vec<_> =
            files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
        let count = poll(&mut polled, time).unwrap_or(1);
        self.gate.wake.clear();
        (polled[1..].iter().map(|file| !file.revents().is_empty()).collect(), count == 0)
    }

    fn send_away(&self, listener: &Listener) {
        for _ in 0..SENT_AWAY_MAX {
            if listener.accept().is_err() {
                return;
            }
            self.refused.fetch_add(1, Relaxed);
        }
    }

    /// Starts the thread of a connection, once the server is not held.
    fn begin(self: &Arc<Self>, socket: OwnedFd, listener: &Listener) {
        let number = self.accepted.fetch_add(1, Relaxed);
        let stream = Arc::new(self.protocol.open(socket, listener));
        let mut live = self.live.lock();
        while self.gate.is_held.load(Relaxed) && !self.ends.load(Relaxed) {
            drop(live);
            self.wait(&[], None);
            live = self.live.lock();
        }
        live.insert(number, Arc::clone(&stream));
        drop(live);
        let leaves = Leaves { shared: Arc::clone(self), number };
        let thread = std::thread::Builder::new().name(P::NAME.to_owned());
        let started = thread.spawn(move || {
            leaves.shared.protocol.serve(&stream);
            drop(stream);
            drop(leaves);
        });
        if started.is_err() {
            self.refused.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{REPORT_NS, Reported};

    /// Goal: however many clients are refused, lines are far between, and each client is in one of them.
    #[test]
    fn lines_about_refused_clients_are_few() {
        let mut reported = Reported::default();
        assert_eq!(reported.turn(7), Some(0));
        let clients = 1000;
        let lines: Vec<u64> =
            (0..clients).filter_map(|at| reported.turn(8 + at * REPORT_NS / 100)).collect();
        assert!((9..=10).contains(&lines.len()), "one in each time: {lines:?}");
        let said = lines.len() as u64 + lines.iter().sum::<u64>();
        assert_eq!(said + reported.unsaid, clients);
    }
}
