//! Serves exports to clients that connect.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::connection::{self, End, Order};
use super::exports::Exports;
use super::stream::Stream;
use super::tls::Security;
use crate::clients::{CUT, Clients, Counts, Held, Protocol, Refusals, Report};
use crate::listen::Listener;

/// How a server treats its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// So many connections at once, each with a thread and its memory (`NBD-1`).
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

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    clients: Clients<Nbd>,
    drain: Duration,
}

struct Nbd {
    exports: Arc<Exports>,
    handshake: Duration,
    /// An [`Order`]. Relaxed throughout: it carries no data, and a thread that sees it late is woken by `shutdown`.
    order: AtomicU8,
    timed_out: AtomicU64,
    tls_refused: AtomicU64,
    /// Those for which there was no memory.
    unserved: AtomicU64,
    refusals: Refusals,
}

impl Nbd {
    /// Counts a client that TLS has refused, and reports it.
    fn refuse(&self, why: &str) {
        self.tls_refused.fetch_add(1, Relaxed);
        self.refusals.note(&format!("TLS has failed with {why}"));
    }

    fn order(&self) -> Order {
        match self.order.load(Relaxed) {
            0 => Order::Serve,
            1 => Order::Drain,
            _ => Order::Cut,
        }
    }

    /// Gives an order. It stays if it is a later one already: a server may be stopped twice.
    fn give(&self, order: Order) {
        self.order.fetch_max(order as u8, Relaxed);
    }
}

impl Protocol for Nbd {
    const NAME: &'static str = "nbd";

    type Stream = (Stream, Security);

    fn open(&self, socket: OwnedFd, listener: &Listener) -> (Stream, Security) {
        (Stream::new(socket), listener.security().clone())
    }

    fn serve(&self, client: &Arc<(Stream, Security)>) {
        let ((stream, security), exports) = (&**client, Arc::clone(&self.exports));
        let order = || self.order();
        match connection::serve(stream, security, exports, self.handshake, order) {
            End::Closed | End::Stopped => {}
            End::Refused(why) => self.refuse(&why),
            End::NoMemory => {
                self.unserved.fetch_add(1, Relaxed);
            }
            End::TimedOut => {
                self.timed_out.fetch_add(1, Relaxed);
            }
        }
    }
}

impl Server {
    /// Serves `exports` to whoever connects.
    ///
    /// # Errors
    ///
    /// No thread or descriptor is to be had.
    pub fn start(listeners: Vec<Listener>, exports: Exports, config: Config) -> io::Result<Server> {
        Server::start_with(listeners, exports, config, Box::new(|_| {}))
    }

    /// The same, with `report` called for clients that TLS refuses: now and then, if they are many.
    ///
    /// # Errors
    ///
    /// As [`start`](Server::start).
    pub fn start_with(
        listeners: Vec<Listener>,
        exports: Exports,
        config: Config,
        report: Report,
    ) -> io::Result<Server> {
        let nbd = Nbd {
            exports: Arc::new(exports),
            handshake: config.handshake,
            order: AtomicU8::new(Order::Serve as u8),
            timed_out: AtomicU64::new(0),
            tls_refused: AtomicU64::new(0),
            unserved: AtomicU64::new(0),
            refusals: Refusals::new(report),
        };
        let clients = Clients::start(listeners, config.connections_max, nbd)?;
        Ok(Server { clients, drain: config.drain })
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let nbd = self.clients.protocol();
        let (timed_out, tls_refused) = (nbd.timed_out.load(Relaxed), nbd.tls_refused.load(Relaxed));
        let counts = self.clients.counts();
        let refused = counts.refused + nbd.unserved.load(Relaxed);
        Counts { refused, timed_out, tls_refused, ..counts }
    }

    /// Keeps clients from connecting, so that the contents can be dropped: who connects waits until this is let go.
    ///
    /// # Errors
    ///
    /// So many clients are connected.
    pub fn hold(&self) -> Result<Held, usize> {
        self.clients.hold()
    }

    /// Accepts nothing more, serves what was received, and ends all connections: those that take longer than
    /// [`Config::drain`] without regard to what they still have to send. Returns how many threads are still inside of
    /// their devices a second after that; they end when the devices return.
    pub fn stop(&mut self) -> usize {
        let nbd = self.clients.protocol();
        // Before nothing more is accepted: a connection that is still begun has the order already.
        nbd.give(Order::Drain);
        if !self.clients.close() {
            self.clients.end(|(stream, _)| stream.end_input());
            self.clients.wait_until_none(self.drain);
            self.clients.protocol().give(Order::Cut);
            self.clients.end(|(stream, _)| stream.end());
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
