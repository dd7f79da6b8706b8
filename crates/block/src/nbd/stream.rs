//! A connected socket of any kind.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};

/// A TCP client that says nothing for so long is asked whether it is still there.
const SILENCE: Duration = Duration::from_secs(60);

/// Time between two such questions, and how many without an answer end the connection: two minutes after the client has
/// vanished.
const QUESTIONS: (Duration, u32) = (Duration::from_secs(15), 4);

/// See the module. Its calls may be made by several threads at once.
#[derive(Debug)]
pub(super) struct Stream(OwnedFd);

impl Stream {
    pub(super) fn new(socket: OwnedFd) -> Stream {
        // A reply is sent by one call and must not wait for others. Fails on a Unix socket, which does not wait.
        if sockopt::set_tcp_nodelay(&socket, true).is_ok() {
            ask_silent_clients(&socket);
        }
        Stream(socket)
    }

    /// Where the client is, for people.
    pub(super) fn peer(&self) -> String {
        let address = rustix::net::getpeername(&self.0).ok().flatten();
        let port = address.and_then(|address| SocketAddr::try_from(address).ok());
        port.map_or_else(|| "a Unix socket".to_owned(), |port| port.to_string())
    }

    /// Receives what there is, at least a byte. 0: the client has ended its side.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match rustix::net::recv(&self.0, &mut *into, RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                result => return result.map(|(bytes, _)| bytes),
            }
        }
    }

    /// Sends all of it.
    pub(super) fn send(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            // Without SIGPIPE, whatever the program does with that signal.
            match rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(Errno::PIPE),
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    /// Sends what can be sent without waiting, if the client is still there.
    pub(super) fn send_now(&self, bytes: &[u8]) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::send(&self.0, bytes, flags).ok();
    }

    /// From now on a call fails with `AGAIN` after this time; `None`: it waits.
    pub(super) fn set_timeout(&self, time: Option<Duration>) -> Result<(), Errno> {
        // The kernel takes 0 for no limit.
        let time = time.map(|time| time.max(Duration::from_millis(1)));
        sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, time)?;
        sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Send, time)
    }

    /// Nothing more is received: a thread that waits for input returns.
    pub(super) fn end_input(&self) {
        // It fails if the client is gone, and then there is nothing to end.
        rustix::net::shutdown(&self.0, Shutdown::Read).ok();
    }

    /// Nothing more is received or sent: a thread that waits for the client returns.
    pub(super) fn end(&self) {
        rustix::net::shutdown(&self.0, Shutdown::Both).ok();
    }
}

/// Has the kernel end the connection of a client that has vanished without a word: its machine, or the way to it. A
/// client that waits for nothing would hold its place for ever.
fn ask_silent_clients(socket: &OwnedFd) {
    let (interval, count) = QUESTIONS;
    // A kernel without one of them has its own figures: two hours, where nothing is said.
    sockopt::set_tcp_keepidle(socket, SILENCE).ok();
    sockopt::set_tcp_keepintvl(socket, interval).ok();
    sockopt::set_tcp_keepcnt(socket, count).ok();
    sockopt::set_socket_keepalive(socket, true).ok();
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::net::sockopt;

    use super::Stream;

    /// Goal: a client that vanishes, as by the loss of its machine, does not hold its connection for ever. It did.
    /// Method: what the kernel is asked for, since no test can wait for two minutes.
    #[test]
    fn silent_tcp_clients_are_asked_whether_they_are_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Stream::new(listener.accept().unwrap().0.into());
        assert_eq!(sockopt::socket_keepalive(&stream.0), Ok(true));
        assert_eq!(sockopt::tcp_keepidle(&stream.0), Ok(Duration::from_secs(60)));
        assert_eq!(sockopt::tcp_keepintvl(&stream.0), Ok(Duration::from_secs(15)));
        assert_eq!(sockopt::tcp_keepcnt(&stream.0), Ok(4));
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(sockopt::socket_keepalive(&Stream::new(ours.into()).0), Ok(false));
    }
}
