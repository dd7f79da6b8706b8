//! Sockets that a server accepts connections on.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

use crate::address::Address;
use crate::nbd::tls::Security;
use crate::nbd::{Certificates, Tls};

/// The first descriptor that systemd hands over.
const SYSTEMD_FIRST: i32 = 3;

/// More sockets than any unit has.
const SYSTEMD_MAX: i32 = 64;

/// A socket that is listened on. A Unix socket that this value made is removed with it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// A file that is ours: its path, device and inode.
    file: Option<(PathBuf, u64, u64)>,
    has_replaced: bool,
    security: Security,
}

/// How clients of NBD are served at an address. By default in clear, and at addresses that other machines reach not at
/// all.
#[derive(Clone, Debug, Default)]
pub struct Protection {
    /// Other machines are served with these.
    pub certificates: Option<Certificates>,
    /// What clients on this machine may do, with the same certificates. Other machines' have to speak TLS.
    pub local: Tls,
}

impl Protection {
    /// How to serve at the port, or the Unix socket.
    fn at(&self, port: Option<SocketAddr>) -> Result<Security, Unusable> {
        let others = port.filter(|address| !address.ip().is_loopback());
        match (&self.certificates, if others.is_some() { Tls::Require } else { self.local }) {
            (_, Tls::Off) => Ok(Security::Off),
            (Some(own), Tls::On) => Ok(Security::On(own.clone())),
            (Some(own), Tls::Require) => Ok(Security::Require(own.clone())),
            (None, _) => Err(others.map_or(Unusable::NoCertificates, Unusable::NotLoopback)),
        }
    }
}

/// Why nothing can be listened on.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unusable {
    /// Another server listens on this Unix socket.
    InUse(PathBuf),
    /// There is a file at this path that is no socket.
    NotASocket(PathBuf),
    /// The address is one that other machines reach.
    NotLoopback(SocketAddr),
    /// TLS is wanted, and there are no certificates for it.
    NoCertificates,
    /// Systemd has handed over no socket, or not to this process.
    NothingInherited,
    /// A descriptor that systemd has handed over is no stream socket that listens.
    BadInherited(i32),
    /// What the system says.
    System(String, io::Error),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::InUse(path) => {
                write!(f, "{}: another server listens on this socket", path.display())
            }
            Unusable::NotASocket(path) => {
                write!(f, "{}: there is a file here that is not a socket", path.display())
            }
            Unusable::NotLoopback(address) => write!(
                f,
                "{address}: other machines reach this address, and there are no certificates for TLS; accepted: \
                 127.0.0.1, [::1]"
            ),
            Unusable::NoCertificates => f.write_str("there are no certificates for TLS"),
            Unusable::NothingInherited => f.write_str(
                "systemd has handed over no socket (LISTEN_FDS, LISTEN_PID); this needs a .socket unit",
            ),
            Unusable::BadInherited(number) => {
                write!(f, "descriptor {number} from systemd is not a stream socket that listens")
            }
            Unusable::System(what, why) => write!(f, "{what}: {why}"),
        }
    }
}

impl std::error::Error for Unusable {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Unusable::System(_, why) => Some(why),
            _ => None,
        }
    }
}

impl Listener {
    /// Listens on an address, in clear and for this machine only; systemd may hand over several sockets.
    ///
    /// A Unix socket whose server is gone is replaced. Who may connect to a new one is up to the umask.
    ///
    /// # Errors
    ///
    /// See [`Unusable`].
    pub fn open(address: &Address) -> Result<Vec<Listener>, Unusable> {
        Listener::open_with(address, &Protection::default())
    }

    /// The same, with TLS where the protection has it.
    ///
    /// # Errors
    ///
    /// See [`Unusable`].
    pub fn open_with(
        address: &Address,
        protection: &Protection,
    ) -> Result<Vec<Listener>, Unusable> {
        match address {
            Address::Unix(path) => Ok(vec![unix(path, protection.at(None)?)?]),
            Address::Tcp(address) => Ok(vec![tcp(*address, protection.at(Some(*address))?)?]),
            Address::Systemd => systemd(protection),
        }
    }

    /// Whether its clients speak TLS.
    #[must_use]
    pub fn tls(&self) -> Tls {
        self.security.tls()
    }

    pub(crate) fn security(&self) -> &Security {
        &self.security
    }

    /// Whether it has replaced a Unix socket whose server had ended without removing it: it was killed.
    #[must_use]
    pub fn has_replaced(&self) -> bool {
        self.has_replaced
    }

    /// Where it listens, if that is a port: with the number that the system chose for port 0.
    #[must_use]
    pub fn port(&self) -> Option<SocketAddr> {
        rustix::net::getsockname(&self.socket).ok().and_then(|name| name.try_into().ok())
    }

    /// The next connection. `Err(AGAIN)`: there is none.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)
    }

    /// A socket that listens, and the file that is to be removed with it.
    pub(crate) fn new(
        socket: OwnedFd,
        file: Option<(PathBuf, u64, u64)>,
        security: Security,
    ) -> io::Result<Listener> {
        // A client may go away between the wait for it and `accept`, which must not wait for the next one.
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Listener { socket, file, has_replaced: false, security })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some((path, device, inode)) = &self.file else { return };
        // Whoever has replaced the file keeps it.
        let is_ours = |found: std::fs::Metadata| found.dev() == *device && found.ino() == *inode;
        if std::fs::symlink_metadata(path).is_ok_and(is_ours) {
            // If it cannot be removed, the next server replaces it.
            std::fs::remove_file(path).ok();
        }
    }
}

fn system(what: impl fmt::Display, why: impl Into<io::Error>) -> Unusable {
    Unusable::System(what.to_string(), why.into())
}

fn tcp(address: SocketAddr, security: Security) -> Result<Listener, Unusable> {
    let listener = TcpListener::bind(address).map_err(|why| system(address, why))?;
    Listener::new(listener.into(), None, security).map_err(|why| system(address, why))
}

fn unix(path: &Path, security: Security) -> Result<Listener, Unusable> {
    // Two servers that start at once would both find a dead socket, and the second would remove the first one's.
    let _lock = lock_directory(path)?;
    let mut has_replaced = false;
    let listener = match UnixListener::bind(path) {
        Err(why) if why.kind() == io::ErrorKind::AddrInUse => {
            remove_dead(path)?;
            has_replaced = true;
            UnixListener::bind(path)
        }
        result => result,
    };
    let listener = listener.map_err(|why| system(path.display(), why))?;
    let found = std::fs::symlink_metadata(path).map_err(|why| system(path.display(), why))?;
    let file = (path.to_path_buf(), found.dev(), found.ino());
    let listener = Listener::new(listener.into(), Some(file), security);
    let mut listener = listener.map_err(|why| system(path.display(), why))?;
    listener.has_replaced = has_replaced;
    Ok(listener)
}

/// Locks the directory of a path until the file is dropped.
fn lock_directory(path: &Path) -> Result<File, Unusable> {
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    let failed = |why: io::Error| system(path.display(), why);
    let file = File::open(directory).map_err(failed)?;
    // Others hold it as briefly as this function's caller. A program that locks directories for long is not waited for.
    for _ in 0..100 {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(10)),
            // A file system without locks has no second server either, or nobody can tell.
            Err(_) => return Ok(file),
        }
    }
    Err(failed(Errno::WOULDBLOCK.into()))
}

/// Removes a Unix socket whose server has ended without removing it, if it is still there. Otherwise it does nothing.
pub fn bury(path: &Path) {
    // A server that starts holds the lock from before its socket is there until it listens.
    if let Ok(_lock) = lock_directory(path) {
        remove_dead(path).ok();
    }
}

/// Removes a socket that nobody listens on.
fn remove_dead(path: &Path) -> Result<(), Unusable> {
    let failed = |why: io::Error| system(path.display(), why);
    let found = std::fs::symlink_metadata(path).map_err(failed)?;
    if !found.file_type().is_socket() {
        return Err(Unusable::NotASocket(path.to_path_buf()));
    }
    // Does not wait, even if a live server accepts nothing at the moment: then the answer is AGAIN.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let probe = probe.map_err(|why| failed(why.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|why| failed(why.into()))?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(failed),
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(Unusable::InUse(path.to_path_buf())),
        Err(why) => Err(failed(why.into())),
    }
}

/// The sockets that systemd has handed over, as `sd_listen_fds(3)` describes it.
fn systemd(protection: &Protection) -> Result<Vec<Listener>, Unusable> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let own = rustix::process::getpid();
    if number("LISTEN_PID") != Some(own.as_raw_nonzero().get()) {
        return Err(Unusable::NothingInherited);
    }
    let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, SYSTEMD_MAX);
    if count == 0 {
        return Err(Unusable::NothingInherited);
    }
    let opened = rustix::process::pidfd_open(own, PidfdFlags::empty());
    let process = opened.map_err(|why| system("systemd", why))?;
    let numbers = SYSTEMD_FIRST..SYSTEMD_FIRST + count;
    numbers.map(|number| inherited(&process, number, protection)).collect()
}

/// A copy of a descriptor of this process. The number itself stays open: what owns a number that was not opened here
/// cannot be said in safe code.
fn inherited(
    process: &OwnedFd,
    number: i32,
    protection: &Protection,
) -> Result<Listener, Unusable> {
    let copied = rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty());
    let socket = copied.map_err(|_| Unusable::BadInherited(number))?;
    let is_stream = sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
    if !is_stream || sockopt::socket_acceptconn(&socket) != Ok(true) {
        return Err(Unusable::BadInherited(number));
    }
    let name = rustix::net::getsockname(&socket).map_err(|_| Unusable::BadInherited(number))?;
    let security = protection.at(inherited_port(number, name)?)?;
    Listener::new(socket, None, security).map_err(|why| system("systemd", why))
}

/// The port of a socket. `None`: a Unix socket.
fn inherited_port(number: i32, name: SocketAddrAny) -> Result<Option<SocketAddr>, Unusable> {
    if name.address_family() == AddressFamily::UNIX {
        return Ok(None);
    }
    SocketAddr::try_from(name).map(Some).map_err(|_| Unusable::BadInherited(number))
}
