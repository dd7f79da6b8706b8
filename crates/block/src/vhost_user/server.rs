//! Accepts front ends, and ends them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;
use vhost::vhost_user::BackendReqHandler;
use zfolio_core::sync::Mutex;
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::eventfd::EventFd;

use super::CONNECTIONS_MAX;
use super::session::Session;
use crate::device::Device;
use crate::nbd::{Counts, Listener};

/// The rank of the lock of the list of connections. Nothing is called while it is held.
const RANK_LIVE: u8 = 1;

/// A front end that finds the server full waits so long for another one to leave, and then is sent away.
const FULL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// After an `accept` that failed for want of memory or descriptors, the next one waits so long.
const RETRY: Duration = Duration::from_millis(100);

/// How a server treats its front ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// So many connections at once, [`CONNECTIONS_MAX`] at most; more are closed.
    pub connections_max: usize,
    /// The time that requests have to end when the server stops.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config { connections_max: CONNECTIONS_MAX, drain: Duration::from_secs(3) }
    }
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    device: Arc<dyn Device>,
    name: String,
    config: Config,
    /// The connections, by the number of their acceptance.
    live: Mutex<RANK_LIVE, BTreeMap<u64, Arc<UnixStream>>>,
    /// Rings when a connection ends, or the server is to stop.
    wake: EventFd,
    /// Relaxed throughout: it carries no data.
    stops: AtomicBool,
    accepted: AtomicU64,
    refused: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("name", &self.name).finish_non_exhaustive()
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
        drop(stream);
        self.shared.wake.ring();
    }
}

impl Server {
    /// Serves `device` to whoever connects. `name` is what guests see as its serial number, 20 bytes of it.
    ///
    /// # Errors
    ///
    /// No thread or descriptor is to be had.
    pub fn start(
        listeners: Vec<Listener>,
        device: Arc<dyn Device>,
        name: &str,
        config: Config,
    ) -> io::Result<Server> {
        let shared = Arc::new(Shared {
            device,
            name: name.to_owned(),
            config,
            live: Mutex::new(BTreeMap::new()),
            wake: EventFd::new()?,
            stops: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("vhost-accept".to_owned());
        let acceptor = thread.spawn(move || accept(&for_thread, &listeners))?;
        Ok(Server { shared, acceptor: Some(acceptor) })
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            accepted: self.shared.accepted.load(Relaxed),
            refused: self.shared.refused.load(Relaxed),
            timed_out: 0,
            live: self.shared.live() as u64,
        }
    }

    /// Accepts nothing more, and ends all connections once the requests that are under way are done. Returns how many
    /// are not after [`Config::drain`]; their threads end when their devices return.
    pub fn stop(&mut self) -> usize {
        let Some(acceptor) = self.acceptor.take() else { return self.shared.live() };
        self.shared.stops.store(true, Relaxed);
        self.shared.wake.ring();
        // It can only have panicked, and then it accepts nothing either.
        acceptor.join().ok();
        self.shared.live.lock().values().for_each(|stream| end(stream));
        let drain_ns = u64::try_from(self.shared.config.drain.as_nanos()).unwrap_or(u64::MAX);
        self.shared.wait_until_empty(monotonic_ns().saturating_add(drain_ns));
        self.shared.live()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A thread that waits for the front end returns.
fn end(stream: &UnixStream) {
    // It fails if the front end is gone, and then there is nothing to end.
    rustix::net::shutdown(stream, Shutdown::Both).ok();
}

impl Shared {
    fn live(&self) -> usize {
        self.live.lock().len()
    }

    fn is_full(&self) -> bool {
        self.live() >= self.config.connections_max.min(CONNECTIONS_MAX)
    }

    fn wait_until_empty(&self, deadline_ns: u64) {
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

    /// Starts the thread of a connection.
    fn begin(self: &Arc<Self>, stream: UnixStream) {
        let number = self.accepted.fetch_add(1, Relaxed);
        let stream = Arc::new(stream);
        // Nobody else adds to the list.
        let is_full = self.is_full();
        if !is_full {
            self.live.lock().insert(number, Arc::clone(&stream));
        }
        let thread = std::thread::Builder::new().name("vhost".to_owned());
        let is_served = !is_full && {
            let leaves = Leaves { shared: Arc::clone(self), number };
            thread.spawn(move || serve(&leaves.shared, stream)).is_ok()
        };
        if !is_served {
            self.refused.fetch_add(1, Relaxed);
        }
    }
}

/// Accepts connections until the server stops.
fn accept(shared: &Arc<Shared>, listeners: &[Listener]) {
    while !shared.stops.load(Relaxed) {
        let is_full = shared.is_full();
        // A connection whose front end is gone leaves soon.
        let (waited_for, patience) =
            if is_full { (&[][..], Some(&FULL)) } else { (listeners, None) };
        let files =
            std::iter::once(shared.wake.file()).chain(waited_for.iter().map(|one| one.as_fd()));
        let mut polled: Vec<_> =
            files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
        let has_timed_out = poll(&mut polled, patience) == Ok(0);
        shared.wake.clear();
        if is_full && !has_timed_out {
            continue;
        }
        for listener in listeners {
            match listener.accept() {
                Ok(socket) => shared.begin(socket.into()),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }
}

/// Serves one front end until it or the server ends the connection.
fn serve(shared: &Shared, stream: Arc<UnixStream>) {
    let Ok(socket) = stream.try_clone() else { return };
    let session = Session::new(Arc::clone(&shared.device), &shared.name, stream);
    converse(socket, session);
}

/// Serves the messages that come from a socket.
pub(super) fn converse(socket: UnixStream, session: Session) {
    let session = Arc::new(session);
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    while handler.handle_request().is_ok() {}
    // The front end is told by the end of the connection once nobody touches its memory any more.
    session.stop();
}
