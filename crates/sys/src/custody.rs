//! Open files that another process of the same user keeps open for a while: their custodian.
//!
//! A file lives until its last descriptor is closed. A process that is killed closes its own while its threads
//! die one by one; the custodian's copy lives on. Files travel over a socket in `/dev/shm/zfolio-UID`. Between
//! [`entrust`] and [`Custodian::receive`] the socket itself keeps the file open.
//!
//! A process also gets files from there: it [asks](ask) by a number, and entrusts one end of a pair of sockets, over
//! which the custodian [answers](Entrusted::answer).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::descriptor::Descriptor;
use crate::shared;

/// Connections that may wait to be received.
const BACKLOG: i32 = 1024;

/// Of them, those that are looked at together.
const WAITING_MAX: usize = 64;

/// Looks at a connection on which nothing comes, before it is closed.
const LOOKS_MAX: u32 = 10;

/// In the number of what is entrusted: it asks for the file of the number's other bits. Numbers of threads are smaller.
const ASKS: u32 = 1 << 31;

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

impl Entrusted {
    /// The number of the file that the process asks for; `None`: it gives one.
    #[must_use]
    pub fn asked(&self) -> Option<u32> {
        (self.number & ASKS != 0).then_some(self.number & !ASKS)
    }

    /// Gives the process a copy of the file that it asked for.
    pub fn answer(&self, file: BorrowedFd<'_>) {
        // Who has gone needs no answer.
        send(self.file.as_fd(), file, self.number).ok();
    }
}

/// See the module.
#[derive(Debug)]
pub struct Custodian {
    socket: OwnedFd,
    name: String,
    /// Connections on which nothing has arrived yet, and how often that was looked at.
    waiting: Vec<(OwnedFd, u32)>,
}

impl Custodian {
    /// A custodian whom others find by `name`. `None` if the directory is not this user's, or there is no socket.
    #[must_use]
    pub fn new(name: &str) -> Option<Custodian> {
        shared::open_folder().ok()?;
        shared::remove(name);
        let socket = socket().ok()?;
        net::bind(&socket, &SocketAddrUnix::new(shared::path(name)?).ok()?).ok()?;
        // From here on it removes the file when it is dropped.
        let custodian = Custodian { socket, name: name.to_owned(), waiting: Vec::new() };
        net::listen(&custodian.socket, BACKLOG).ok()?;
        Some(custodian)
    }

    /// Takes what has come, without waiting.
    pub fn receive(&mut self) -> Vec<Entrusted> {
        while self.waiting.len() < WAITING_MAX {
            let Ok(connection) = net::accept_with(&self.socket, FLAGS) else { break };
            self.waiting.push((connection, 0));
        }
        let mut received = Vec::new();
        self.waiting.retain_mut(|(connection, looks)| match receive_from(connection.as_fd()) {
            Ok(entrusted) => {
                received.extend(entrusted);
                false
            }
            // It connected a moment ago, and sends next; or never will.
            Err(error) => {
                *looks += 1;
                error == Errno::AGAIN && *looks < LOOKS_MAX
            }
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

/// The process that has the other end of a connection. `None`: it is another user's, or in another PID namespace.
pub(crate) fn peer(connection: BorrowedFd<'_>) -> Option<u32> {
    // By hand: rustix holds the PID in a type that is never 0, and the kernel says 0 of another namespace.
    let mut about = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&about)).ok()?;
    // SAFETY: SO_PEERCRED writes a `struct ucred`, for which `bytes` says there is room.
    let answer = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut about).cast(),
            &raw mut bytes,
        )
    };
    let is_ours = answer == 0 && about.uid == rustix::process::geteuid().as_raw();
    u32::try_from(about.pid).ok().filter(|pid| is_ours && *pid > 0)
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
    let process = peer(connection).filter(|_| received.bytes == number.len());
    let number = u32::from_ne_bytes(number);
    Ok(rights.zip(process).map(|(file, process)| Entrusted { file, process, number }))
}

/// Gives a copy of `file` to the custodian of that name, with a number, without waiting. False: there is none, or it
/// is not the process `custodian`. To nobody else: who has a userfaultfd can write to the memory behind it.
pub fn entrust(name: &str, custodian: u32, file: BorrowedFd<'_>, number: u32) -> bool {
    let sent = || {
        // Not through a directory that another user made in this place.
        let folder = shared::open_folder().ok()?;
        let path = format!("/proc/thread-self/fd/{}/{name}", folder.as_raw_fd());
        let socket = socket().ok()?;
        net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
        peer(socket.as_fd()).filter(|process| *process == custodian)?;
        send(socket.as_fd(), file, number).ok()
    };
    sent().is_some()
}

/// Sends a file with a number, without waiting.
fn send(socket: BorrowedFd<'_>, file: BorrowedFd<'_>, number: u32) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut about = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    assert!(about.push(SendAncillaryMessage::ScmRights(&files)), "there is space for one");
    let number = number.to_ne_bytes();
    net::sendmsg(socket, &[IoSlice::new(&number)], &mut about, SendFlags::NOSIGNAL)
}

/// Asks the custodian of that name for the file of a number. `None`: there is no custodian, or it is not the process
/// `custodian`.
#[must_use]
pub fn ask(name: &str, custodian: u32, number: u32) -> Option<Asked> {
    let (ours, theirs) =
        net::socketpair(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).ok()?;
    let is_asked = entrust(name, custodian, theirs.as_fd(), ASKS | number);
    // `theirs` ends here: the custodian alone has that end, so that its end is told.
    is_asked.then(|| Asked(Descriptor::new(ours)))
}

/// A question to a custodian. A child of `fork` has its copy for nothing.
#[derive(Debug)]
pub struct Asked(Descriptor);

impl Asked {
    /// Whether there is an answer, or none to come.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        let mut poll = [PollFd::from_borrowed_fd(self.0.file(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// The file. `None`: the custodian has no such file, has ended, or has not answered.
    #[must_use]
    pub fn answer(self) -> Option<OwnedFd> {
        receive_from(self.0.file()).ok()?.map(|answer| answer.file)
    }
}

#[cfg(test)]
mod tests {
    use super::{Custodian, ask, entrust};
    use std::io::{ErrorKind, Read, Write};
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
        assert!(
            !entrust(&name, std::process::id() + 1, write.as_fd(), 77),
            "somebody else listens"
        );
        assert!(custodian.receive().is_empty());
        assert!(entrust(&name, std::process::id(), write.as_fd(), 77));
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
        assert!(!entrust(&name, std::process::id(), read.as_fd(), 1), "gone with its custodian");
    }

    /// Goal: who asks gets the file of his number, once there is an answer; and is told if there is none to come.
    #[test]
    fn a_file_is_given_to_who_asks() {
        let name = format!("custody-ask-test.{}", std::process::id());
        let Some(mut custodian) = Custodian::new(&name) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        let process = std::process::id();
        let (mut read, write) = UnixStream::pair().unwrap();
        let (first, second) = (ask(&name, process, 7).unwrap(), ask(&name, process, 0).unwrap());
        assert!(!first.is_answered(), "nobody has looked");
        let questions = custodian.receive();
        let numbers: Vec<_> = questions.iter().map(super::Entrusted::asked).collect();
        assert_eq!(numbers, [Some(7), Some(0)]);
        questions[0].answer(write.as_fd());
        assert!(first.is_answered() && !second.is_answered());
        drop((questions, write));
        let given = first.answer().expect("it was answered");
        UnixStream::from(given).write_all(b"z").unwrap();
        let mut got = [0];
        read.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"z");
        assert!(second.is_answered() && second.answer().is_none(), "there is no such file");
        let third = ask(&name, process, 1).unwrap();
        drop(custodian);
        assert!(third.is_answered() && third.answer().is_none(), "the custodian has ended");
        assert!(ask(&name, process, 1).is_none());
        assert!(ask("no-custodian", process, 0).is_none());
    }
}
