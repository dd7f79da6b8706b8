//! Accepts connections, and ends them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use zfolio_core::sync::Mutex;
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::eventfd::EventFd;

use super::connection::{self, End, Order};
use super::exports::Exports;
use super::listen::Listener;
use super::stream::Stream;
use super::tls::Security;

/// The rank of the lock of the list of connections. Nothing is called while it is held.
const RANK_LIVE: u8 = 1;

/// A client that finds the server full waits so long for another one to leave, and then is sent away.
const FULL_MS: u64 = 1000;

/// After an `accept` that failed for want of memory or descriptors, the next one waits so long.
const RETRY_MS: u64 = 100;

/// Connections whose sockets were shut down have so long to end.
const CUT_MS: u64 = 1000;

/// How a server treats its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// So many connections at once; each has a thread and 1 MiB at most.
    pub connections_max: usize,
    /// The time that a client has to choose an export.
    pub handshake: Duration,
    /// The time that clients have to receive their replies when the server stops.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            connections_max: 128,
            handshake: Duration::from_secs(10),
            drain: Duration::from_secs(3),
        }
    }
}

/// What a server has counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were closed at once: the server was full, or no thread was to be had.
    pub refused: u64,
    /// Connections whose handshake took too long.
    pub timed_out: u64,
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
            live: self.live + other.live,
        }
    }
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    exports: Arc<Exports>,
    config: Config,
    /// The connections, by the number of their acceptance.
    live: Mutex<RANK_LIVE, BTreeMap<u64, Arc<Stream>>>,
    /// Rings when a connection ends, or the server is to stop.
    wake: EventFd,
    /// An [`Order`]. Relaxed throughout: it carries no data, and a thread that sees it late is woken by `shutdown`.
    order: AtomicU8,
    accepted: AtomicU64,
    refused: AtomicU64,
    timed_out: AtomicU64,
}

impl Shared {
    fn order(&self) -> Order {
        match self.order.load(Relaxed) {
            0 => Order::Serve,
            1 => Order::Drain,
            _ => Order::Cut,
        }
    }

    fn live(&self) -> usize {
        self.live.lock().len()
    }

    /// Waits until the server has no connections, for this time at most.
    fn wait_until_empty(&self, milliseconds: u64) {
        let deadline_ns = monotonic_ns().saturating_add(milliseconds.saturating_mul(1_000_000));
        while self.live() > 0 {
            let left_ms = deadline_ns.saturating_sub(monotonic_ns()).div_ceil(1_000_000);
            if left_ms == 0 {
                return;
            }
            if self.wake.wait(u16::try_from(left_ms).unwrap_or(u16::MAX)) {
                self.wake.clear();
            }
        }
    }
}

/// Takes a connection off the list when its thread ends, however it ends.
struct Leaves {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        let stream = self.shared.live.lock().remove(&self.number);
        // The last use of the socket, which closes it; not under the lock.
        drop(stream);
        self.shared.wake.ring();
    }
}

impl Server {
    /// Serves `exports` to whoever connects.
    ///
    /// # Errors
    ///
    /// No thread or descriptor is to be had.
    pub fn start(listeners: Vec<Listener>, exports: Exports, config: Config) -> io::Result<Server> {
        let shared = Arc::new(Shared {
            exports: Arc::new(exports),
            config,
            live: Mutex::new(BTreeMap::new()),
            wake: EventFd::new()?,
            order: AtomicU8::new(Order::Serve as u8),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
        });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new().name("nbd-accept".to_owned());
        let acceptor = thread.spawn(move || accept(&for_thread, &listeners))?;
        Ok(Server { shared, acceptor: Some(acceptor) })
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            accepted: self.shared.accepted.load(Relaxed),
            refused: self.shared.refused.load(Relaxed),
            timed_out: self.shared.timed_out.load(Relaxed),
            live: self.shared.live() as u64,
        }
    }

    /// Accepts nothing more, serves what was received, and ends all connections: those that take longer than
    /// [`Config::drain`] without regard to what they still have to send. Returns how many threads are still inside of
    /// their devices a second after that; they end when the devices return.
    pub fn stop(&mut self) -> usize {
        let Some(acceptor) = self.acceptor.take() else { return self.shared.live() };
        self.give(Order::Drain);
        self.shared.wake.ring();
        // It can only have panicked, and then it accepts nothing either.
        acceptor.join().ok();
        self.all(Stream::end_input);
        let drain = self.shared.config.drain;
        self.shared.wait_until_empty(u64::try_from(drain.as_millis()).unwrap_or(u64::MAX));
        self.give(Order::Cut);
        self.all(Stream::end);
        self.shared.wait_until_empty(CUT_MS);
        self.shared.live()
    }

    fn give(&self, order: Order) {
        self.shared.order.store(order as u8, Relaxed);
    }

    fn all(&self, end: impl Fn(&Stream)) {
        self.shared.live.lock().values().for_each(|stream| end(stream));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Accepts connections until the server stops.
fn accept(shared: &Arc<Shared>, listeners: &[Listener]) {
    while shared.order() == Order::Serve {
        let is_full = shared.live() >= shared.config.connections_max;
        let waited_for = if is_full { &[] } else { listeners };
        let (ready, timed_out) = wait(&shared.wake, waited_for, is_full.then_some(FULL_MS));
        if is_full && timed_out {
            // Nobody has left: those that wait are told by the end of their connections, and do not wait for ever.
            listeners.iter().for_each(|listener| send_away(shared, listener));
            continue;
        }
        for (listener, is_ready) in waited_for.iter().zip(ready) {
            match if is_ready { listener.accept() } else { Err(Errno::AGAIN) } {
                Ok(socket) => begin(shared, Stream::new(socket), listener.security().clone()),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => {
                    wait(&shared.wake, &[], Some(RETRY_MS));
                }
            }
        }
    }
}

/// Waits for a connection or a ring. Returns which listeners have a connection, and whether nothing came in time.
fn wait(wake: &EventFd, listeners: &[Listener], milliseconds: Option<u64>) -> (Vec<bool>, bool) {
    let timeout = milliseconds.map(|milliseconds| Timespec {
        tv_sec: i64::try_from(milliseconds / 1000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(milliseconds % 1000).unwrap_or(0) * 1_000_000,
    });
    let files = std::iter::once(wake.file()).chain(listeners.iter().map(AsFd::as_fd));
    let mut polled: Vec<_> =
        files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
    let count = poll(&mut polled, timeout.as_ref()).unwrap_or(1);
    wake.clear();
    (polled[1..].iter().map(|file| !file.revents().is_empty()).collect(), count == 0)
}

fn send_away(shared: &Shared, listener: &Listener) {
    // One backlog at most, since more can come as fast as they are sent away.
    for _ in 0..128 {
        if listener.accept().is_err() {
            return;
        }
        shared.refused.fetch_add(1, Relaxed);
    }
}

/// Starts the thread of a connection.
fn begin(shared: &Arc<Shared>, stream: Stream, security: Security) {
    let number = shared.accepted.fetch_add(1, Relaxed);
    let stream = Arc::new(stream);
    shared.live.lock().insert(number, stream.clone());
    let leaves = Leaves { shared: shared.clone(), number };
    let thread = std::thread::Builder::new().name("nbd".to_owned());
    let started = thread.spawn(move || {
        let shared = &leaves.shared;
        let (exports, handshake) = (shared.exports.clone(), shared.config.handshake);
        let end = connection::serve(&stream, &security, exports, handshake, || shared.order());
        if end == End::TimedOut {
            shared.timed_out.fetch_add(1, Relaxed);
        }
        drop(stream);
    });
    if started.is_err() {
        shared.refused.fetch_add(1, Relaxed);
    }
}
