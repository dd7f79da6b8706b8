//! Serves a device to front ends that connect.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::net::Shutdown;
use vhost::vhost_user::BackendReqHandler;

use super::CONNECTIONS_MAX;
use super::marks::Marks;
use super::session::{Session, Unknown, end_input};
use crate::clients::{CUT, Clients, Counts, Held, Protocol, Refusals, Report};
use crate::device::Device;
use crate::listen::Listener;

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
    clients: Clients<Vhost>,
    drain: Duration,
}

struct Vhost {
    device: Arc<dyn Device>,
    name: String,
    marks: Arc<Marks>,
    /// Front ends that go on with another disk.
    unknown: AtomicU64,
    refusals: Refusals,
}

impl Vhost {
    /// Counts a front end that goes on with another disk, and reports it.
    fn refuse(&self, stream: &UnixStream, unknown: Unknown) {
        self.unknown.fetch_add(1, Relaxed);
        let address = stream.local_addr().ok();
        let path = address.as_ref().and_then(|address| address.as_pathname());
        let path = path.map_or_else(|| "a socket".into(), |path| path.display().to_string());
        self.refusals.note(&format!(
            "a guest at {path} is refused: it goes on with contents that are not those of this disk ({unknown}, which \
             this disk has not served), and would read zeros or older data; accepted: reset the guest, or start \
             the disk with the contents as they were at its end (--save FILE)"
        ));
    }
}

impl Protocol for Vhost {
    const NAME: &'static str = "vhost";

    type Stream = UnixStream;

    fn open(&self, socket: OwnedFd, _: &Listener) -> UnixStream {
        socket.into()
    }

    fn serve(&self, stream: &Arc<UnixStream>) {
        let Ok(socket) = stream.try_clone() else { return };
        let (device, marks) = (Arc::clone(&self.device), Arc::clone(&self.marks));
        let session = Session::new(device, &self.name, Arc::clone(stream), marks);
        if let Some(unknown) = converse(socket, session) {
            self.refuse(stream, unknown);
        }
    }
}

impl Server {
    /// Serves `device`, a new disk, to whoever connects. `name` is what guests see as its serial number, 20 bytes of
    /// it.
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
        let report = Box::new(|_: &str| {});
        Server::start_with(listeners, device, name, config, Marks::default(), report)
    }

    /// The same with a disk that is not new: `marks` says where its front ends were left. `report` is called for those
    /// that are refused, now and then.
    ///
    /// # Errors
    ///
    /// As [`start`](Server::start).
    pub fn start_with(
        listeners: Vec<Listener>,
        device: Arc<dyn Device>,
        name: &str,
        config: Config,
        marks: Marks,
        report: Report,
    ) -> io::Result<Server> {
        let vhost = Vhost {
            device,
            name: name.to_owned(),
            marks: Arc::new(marks),
            unknown: AtomicU64::new(0),
            refusals: Refusals::new(report),
        };
        let max = config.connections_max.min(CONNECTIONS_MAX);
        Ok(Server { clients: Clients::start(listeners, max, vhost)?, drain: config.drain })
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let unknown = self.clients.protocol().unknown.load(Relaxed);
        Counts { unknown, ..self.clients.counts() }
    }

    /// Where front ends that are gone have left their queues: what the next server of the same contents has to know.
    #[must_use]
    pub fn marks(&self) -> &Marks {
        &self.clients.protocol().marks
    }

    /// Keeps front ends from connecting, so that the contents can be dropped: who connects waits until this is let go.
    ///
    /// # Errors
    ///
    /// So many front ends are connected.
    pub fn hold(&self) -> Result<Held, usize> {
        self.clients.hold()
    }

    /// Forgets where front ends have left their queues, since the contents are about to be dropped: a guest that comes
    /// back is refused from now on (`VU-7`). The server must be held: who is connected would leave his marks later.
    pub fn forget_marks(&self) {
        self.marks().forget();
    }

    /// Accepts nothing more, and ends all connections once the requests that are under way are done. Returns how many
    /// have not ended a second after [`Config::drain`]; their threads end when their devices return.
    pub fn stop(&mut self) -> usize {
        if !self.clients.close() {
            self.clients.end(end_input);
            self.clients.wait_until_none(self.drain);
            // One that never reads its replies keeps its connection's thread waiting until here.
            self.clients.end(|stream| _ = rustix::net::shutdown(stream, Shutdown::Both).ok());
            self.clients.wait_until_none(CUT);
        }
        self.clients.live()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Serves the messages that come from a socket. Returns what the front end was refused for.
pub(super) fn converse(socket: UnixStream, session: Session) -> Option<Unknown> {
    let session = Arc::new(session);
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    while handler.handle_request().is_ok() {}
    // The front end is told by the end of the connection once nobody touches its memory any more.
    session.stop()
}
