//! A connected socket of any kind.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use zfolio_sys::clock::monotonic_ns;

/// A TCP client that says nothing for so long is asked whether it is still there.
const SILENCE: Duration = Duration::from_secs(60);

/// Time between two such questions, and how many without an answer end the connection: two minutes after the client has
/// vanished.
const QUESTIONS: (Duration, u32) = (Duration::from_secs(15), 4);

/// There is no deadline.
const NEVER_NS: u64 = u64::MAX;

/// See the module. Its calls may be made by several threads at once.
#[derive(Debug)]
pub(super) struct Stream {
    socket: OwnedFd,
    /// See [`Stream::set_deadline`]. Relaxed: only the thread that sends and receives has to do with it.
    deadline_ns: AtomicU64,
}

impl Stream {
    pub(super) fn new(socket: OwnedFd) -> Stream {
        // A reply is sent by one call and must not wait for others. Fails on a Unix socket, which does not wait.
        if sockopt::set_tcp_nodelay(&socket, true).is_ok() {
            ask_silent_clients(&socket);
        }
        Stream { socket, deadline_ns: AtomicU64::new(NEVER_NS) }
    }

    /// Where the client is, for people.
    pub(super) fn peer(&self) -> String {
        let address = rustix::net::getpeername(&self.socket).ok().flatten();
        let port = address.and_then(|address| SocketAddr::try_from(address).ok());
        port.map_or_else(|| "a Unix socket".to_owned(), |port| port.to_string())
    }

    /// Receives what there is, at least a byte. 0: the client has ended its side.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        self.in_time(PollFlags::IN, |has_deadline| {
            let flags = if has_deadline { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
            rustix::net::recv(&self.socket, &mut *into, flags).map(|(bytes, _)| bytes)
        })
    }

    /// Sends all of it.
    pub(super) fn send(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            let sent = self.in_time(PollFlags::OUT, |has_deadline| {
                // Without SIGPIPE, whatever the program does with that signal.
                let mut flags = SendFlags::NOSIGNAL;
                flags.set(SendFlags::DONTWAIT, has_deadline);
                rustix::net::send(&self.socket, bytes, flags)
            })?;
            if sent == 0 {
                return Err(Errno::PIPE);
            }
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Makes a call that sends or receives, again if that was interrupted. With a deadline the call does not wait by
    /// itself, since the kernel's time limits hold anew for each part that is sent: `call` is told so.
    fn in_time(
        &self,
        event: PollFlags,
        mut call: impl FnMut(bool) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        loop {
            let deadline_ns = self.deadline_ns.load(Relaxed);
            let has_deadline = deadline_ns != NEVER_NS;
            let left_ns = deadline_ns.saturating_sub(monotonic_ns());
            if left_ns == 0 {
                return Err(Errno::AGAIN);
            }
            match call(has_deadline) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if has_deadline => {
                    let time = Duration::from_nanos(left_ns);
                    let time = Timespec::try_from(time).map_err(|_| Errno::INVAL)?;
                    // Ready, late or interrupted: the next turn finds out.
                    poll(&mut [PollFd::new(&self.socket, event)], Some(&time)).ok();
                }
                result => return result,
            }
        }
    }

    /// Sends what can be sent without waiting, if the client is still there.
    pub(super) fn send_now(&self, bytes: &[u8]) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::send(&self.socket, bytes, flags).ok();
    }

    /// From this time of the monotonic clock on calls that send or receive fail with `AGAIN`, also one that was made
    /// before; `None`: they wait.
    pub(super) fn set_deadline(&self, deadline_ns: Option<u64>) {
        self.deadline_ns.store(deadline_ns.unwrap_or(NEVER_NS), Relaxed);
    }

    /// Nothing more is received: a thread that waits for input returns.
    pub(super) fn end_input(&self) {
        // It fails if the client is gone, and then there is nothing to end.
        rustix::net::shutdown(&self.socket, Shutdown::Read).ok();
    }

    /// Nothing more is received or sent: a thread that waits for the client returns.
    pub(super) fn end(&self) {
        rustix::net::shutdown(&self.socket, Shutdown::Both).ok();
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
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::net::sockopt;
    use zfolio_sys::clock::monotonic_ns;

    use super::Stream;

    /// Goal: a client that receives a little now and then does not put its deadline off. It did: the kernel's time
    /// limit holds for each part that is sent. Method: a client that would need minutes, and never lets the time of one
    /// part pass.
    #[test]
    fn a_deadline_is_not_put_off_by_a_slow_client() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        let stream = Stream::new(ours.into());
        stream.set_deadline(Some(monotonic_ns() + 200_000_000));
        let client = std::thread::spawn(move || {
            let mut read = 0;
            while theirs.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {
                read += 4096;
                std::thread::sleep(Duration::from_millis(50));
            }
            read
        });
        let bytes = 16 << 20;
        assert_eq!(stream.send(&vec![1; bytes]), Err(Errno::AGAIN));
        assert_eq!(stream.receive(&mut [0]), Err(Errno::AGAIN));
        // Whoever has none waits: here for the end, which comes once the client is told of it.
        stream.set_deadline(None);
        stream.end();
        assert!(client.join().unwrap() < bytes);
        assert_eq!(stream.receive(&mut [0]), Ok(0));
    }

    /// Goal: a client that vanishes, as by the loss of its machine, does not hold its connection for ever. It did.
    /// Method: what the kernel is asked for, since no test can wait for two minutes.
    #[test]
    fn silent_tcp_clients_are_asked_whether_they_are_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Stream::new(listener.accept().unwrap().0.into());
        assert_eq!(sockopt::socket_keepalive(&stream.socket), Ok(true));
        assert_eq!(sockopt::tcp_keepidle(&stream.socket), Ok(Duration::from_secs(60)));
        assert_eq!(sockopt::tcp_keepintvl(&stream.socket), Ok(Duration::from_secs(15)));
        assert_eq!(sockopt::tcp_keepcnt(&stream.socket), Ok(4));
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(sockopt::socket_keepalive(&Stream::new(ours.into()).socket), Ok(false));
    }
}
