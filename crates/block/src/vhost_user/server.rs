//! Serves a device to front ends that connect.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::Shutdown;
use vhost::vhost_user::BackendReqHandler;

use super::CONNECTIONS_MAX;
use super::session::Session;
use crate::clients::{Clients, Counts, Protocol};
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
}

impl Protocol for Vhost {
    const NAME: &'static str = "vhost";

    type Stream = UnixStream;

    fn open(&self, socket: OwnedFd, _: &Listener) -> UnixStream {
        socket.into()
    }

    fn serve(&self, stream: &Arc<UnixStream>) {
        let Ok(socket) = stream.try_clone() else { return };
        let session = Session::new(Arc::clone(&self.device), &self.name, Arc::clone(stream));
        converse(socket, session);
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
        let vhost = Vhost { device, name: name.to_owned() };
        let max = config.connections_max.min(CONNECTIONS_MAX);
        Ok(Server { clients: Clients::start(listeners, max, vhost)?, drain: config.drain })
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.clients.counts()
    }

    /// Accepts nothing more, and ends all connections once the requests that are under way are done. Returns how many
    /// are not after [`Config::drain`]; their threads end when their devices return.
    pub fn stop(&mut self) -> usize {
        if !self.clients.close() {
            self.clients.end(end);
            self.clients.wait_until_none(self.drain);
        }
        self.clients.live()
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

/// Serves the messages that come from a socket.
pub(super) fn converse(socket: UnixStream, session: Session) {
    let session = Arc::new(session);
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    while handler.handle_request().is_ok() {}
    // The front end is told by the end of the connection once nobody touches its memory any more.
    session.stop();
}
