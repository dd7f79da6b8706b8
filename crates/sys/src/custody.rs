//! Open files that another process of the same user keeps open for a while: their custodian.
//!
//! A file lives until its last descriptor is closed. A process that is killed closes its own while its threads
//! die one by one; the custodian's copy lives on. Files travel over a socket in `/dev/shm/zfolio-UID`. Between
//! [`entrust`] and [`Custodian::receive`] the socket itself keeps the file open.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::shared;

/// Connections that may wait to be received.
const BACKLOG: i32 = 1024;

/// A file from another process.
#[derive(Debug)]
pub struct Entrusted {
    /// The file, open for as long as this is.
    pub file: OwnedFd,
    /// The process that it came from.
    pub process: u32,
    /// The number that came with it.
    pub number: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Custodian {
    socket: OwnedFd,
    name: String,
    /// Connections on which nothing has arrived yet.
    waiting: Vec<OwnedFd>,
}

impl Custodian {
    /// A custodian whom others find by `name`. `None` if the directory is not this user's, or there is no socket.
    #[must_use]
    pub fn new(name: &str) -> Option<Custodian> {
        shared::open_folder()?;
        shared::remove(name);
        let socket = socket().ok()?;
        net::bind(&socket, &SocketAddrUnix::new(shared::path(name)?).ok()?).ok()?;
        net::listen(&socket, BACKLOG).ok()?;
        Some(Custodian { socket, name: name.to_owned(), waiting: Vec::new() })
    }

    /// Takes what has come, without waiting.
    pub fn receive(&mut self) -> Vec<Entrusted> {
        while let Ok(connection) = net::accept_with(&self.socket, FLAGS) {
            self.waiting.push(connection);
        }
        let mut received = Vec::new();
        self.waiting.retain(|connection| match receive_from(connection.as_fd()) {
            Ok(entrusted) => {
                received.extend(entrusted);
                false
            }
            // It connected a moment ago, and sends next.
            Err(error) => error == Errno::AGAIN,
        });
        received
    }
}

impl Drop for Custodian {
    fn drop(&mut self) {
        shared::remove(&self.name);
    }
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn socket() -> Result<OwnedFd, Errno> {
    net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)
}

/// The file on a connection; `None` if the other end is not a process that this one can see, or sent none.
fn receive_from(connection: BorrowedFd<'_>) -> Result<Option<Entrusted>, Errno> {
    let mut number = [0_u8; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut about = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut number)];
    let received = net::recvmsg(connection, into, &mut about, RecvFlags::CMSG_CLOEXEC)?;
    let rights = about.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let process = net::sockopt::socket_peercred(connection)?.pid.as_raw_nonzero().get();
    let process = u32::try_from(process).ok().filter(|_| received.bytes == number.len());
    let number = u32::from_ne_bytes(number);
    Ok(rights.zip(process).map(|(file, process)| Entrusted { file, process, number }))
}

/// Gives a copy of `file` to the custodian of that name, with a number, without waiting. False: there is none.
pub fn entrust(name: &str, file: BorrowedFd<'_>, number: u32) -> bool {
    let sent = || {
        let address = SocketAddrUnix::new(shared::path(name)?).ok()?;
        let socket = socket().ok()?;
        net::connect(&socket, &address).ok()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut about = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        about.push(SendAncillaryMessage::ScmRights(&files)).then_some(())?;
        let number = number.to_ne_bytes();
        net::sendmsg(&socket, &[IoSlice::new(&number)], &mut about, SendFlags::NOSIGNAL).ok()
    };
    sent().is_some()
}

#[cfg(test)]
mod tests {
    use super::{Custodian, entrust};
    use std::io::{ErrorKind, Read};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// Goal: a file that was entrusted is open here after the sender has closed its own. Method: one end of a
    /// socket pair; the other end is at its end only when the last copy is gone.
    #[test]
    fn a_file_outlives_its_sender() {
        let name = format!("custody-test.{}", std::process::id());
        let Some(mut custodian) = Custodian::new(&name) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        assert!(custodian.receive().is_empty());
        let (mut read, write) = UnixStream::pair().unwrap();
        read.set_nonblocking(true).unwrap();
        assert!(entrust(&name, write.as_fd(), 77));
        drop(write);
        let mut look = || read.read(&mut [0_u8]).map_err(|error| error.kind());
        assert_eq!(look(), Err(ErrorKind::WouldBlock), "in flight");
        let received = custodian.receive();
        let about: Vec<_> = received.iter().map(|one| (one.process, one.number)).collect();
        assert_eq!(about, [(std::process::id(), 77)]);
        assert_eq!(look(), Err(ErrorKind::WouldBlock), "kept");
        drop(received);
        assert_eq!(look(), Ok(0));
        drop(custodian);
        assert!(!entrust(&name, read.as_fd(), 1), "gone with its custodian");
    }
}
