//! The page over HTTP. Whoever connects gets it; the address is this machine's.
//!
//! # Concurrency
//!
//! A thread for each connection, `CONNECTIONS_MAX` at most. A client that has not sent its request and taken the page
//! after two seconds is left.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use zfolio_sys::clock;

use crate::clients::{Clients, Protocol};
use crate::listen::Listener;
use crate::nbd::tls::Security;

/// The longest request that is read.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Connections at once.
const CONNECTIONS_MAX: usize = 4;

/// The time that a client has.
const PATIENCE_NS: u64 = 2_000_000_000;

/// What makes the page.
pub type Page = Box<dyn Fn() -> String + Send + Sync>;

/// A page that is served. Dropping it ends that, and its clients.
#[derive(Debug)]
pub struct Metrics {
    address: SocketAddr,
    clients: Clients<Pages>,
}

struct Pages(Page);

impl Protocol for Pages {
    const NAME: &'static str = "metrics";

    type Stream = TcpStream;

    fn open(&self, socket: OwnedFd, _: &Listener) -> TcpStream {
        socket.into()
    }

    fn serve(&self, stream: &Arc<TcpStream>) {
        // A client that is gone gets no page.
        answer(stream, &self.0).ok();
    }
}

/// An address at which nothing is served yet.
#[derive(Debug)]
pub struct Address {
    listener: Listener,
    address: SocketAddr,
}

impl Address {
    /// Takes an address of this machine.
    ///
    /// # Errors
    ///
    /// `PermissionDenied`: the address is not this machine's alone. Others: the system's.
    pub fn take(address: SocketAddr) -> io::Result<Address> {
        if !address.ip().is_loopback() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let listener = Listener::new(listener.into(), None, Security::Off)?;
        Ok(Address { listener, address })
    }

    /// Where that is, with the port that the system chose for port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves what `page` returns.
    ///
    /// # Errors
    ///
    /// The system's: there is no thread or descriptor.
    pub fn serve(self, page: Page) -> io::Result<Metrics> {
        let clients = Clients::start(vec![self.listener], CONNECTIONS_MAX, Pages(page))?;
        Ok(Metrics { address: self.address, clients })
    }
}

impl Metrics {
    /// Where it is served, with the port that the system chose for port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.clients.close();
        // It fails if the client is gone, and then there is nothing to end.
        self.clients.end(|stream| _ = stream.shutdown(Shutdown::Both).ok());
    }
}

/// A client, and until when it is served.
struct Client<'a> {
    stream: &'a TcpStream,
    until_ns: u64,
}

impl Client<'_> {
    /// What is left of its time.
    fn left(&self) -> io::Result<Option<Duration>> {
        let left_ns = self.until_ns.saturating_sub(clock::monotonic_ns());
        if left_ns == 0 {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(Some(Duration::from_nanos(left_ns)))
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(self.left()?)?;
            let written = self.stream.write(bytes)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

/// Reads a request, and answers it.
fn answer(stream: &TcpStream, page: &Page) -> io::Result<()> {
    let mut client = Client { stream, until_ns: clock::monotonic_ns() + PATIENCE_NS };
    let (mut request, mut length) = (vec![0; REQUEST_BYTES_MAX], 0);
    while length < request.len() && !request[..length].windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut request[length..])? {
            0 => break,
            bytes => length += bytes,
        }
    }
    let line = request[..length].split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let mut words = line.split(|byte| *byte == b' ');
    let (method, path) = (words.next().unwrap_or(&[]), words.next().unwrap_or(&[]));
    let path = path.split(|byte| *byte == b'?').next().unwrap_or(&[]);
    let (status, body) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => ("200 OK", page()),
        (b"GET" | b"HEAD", _) => ("404 Not Found", "accepted: /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "accepted: GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    if method != b"HEAD" {
        client.write_all(body.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::{Address, Metrics};

    fn get(metrics: &Metrics, request: &str) -> String {
        let mut stream = TcpStream::connect(metrics.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    /// Goal: only GET and HEAD of the page are answered with it, odd requests end their connection alone, and no other
    /// machine is served.
    #[test]
    fn requests_are_answered() {
        let refused = Address::take("0.0.0.0:0".parse().unwrap());
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        let taken = Address::take("127.0.0.1:0".parse().unwrap()).unwrap();
        let metrics = taken.serve(Box::new(|| "a 1\n".to_owned())).unwrap();
        let good = get(&metrics, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            good.starts_with("HTTP/1.1 200 OK\r\n") && good.ends_with("\r\n\r\na 1\n"),
            "{good}"
        );
        assert!(good.contains("Content-Length: 4\r\n"));
        let head = get(&metrics, "HEAD / HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(get(&metrics, "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(get(&metrics, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(get(&metrics, "\r\n\r\n").starts_with("HTTP/1.1 405 "));
        // Longer than any request that is read: the rest is not waited for.
        let mut long = TcpStream::connect(metrics.address()).unwrap();
        long.write_all(&vec![b'x'; 100_000]).ok();
        drop(long);
        assert!(get(&metrics, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        // The end does not wait for a client that sends nothing.
        let slow = TcpStream::connect(metrics.address()).unwrap();
        let second = Address::take(metrics.address());
        assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
        drop(metrics);
        drop(slow);
    }
}
