//! Where a server listens, as people write it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The port that is registered for NBD.
pub const PORT: u16 = 10809;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// A Unix socket at this path: `/run/disk.sock`, `unix:disk.sock`.
    Unix(PathBuf),
    /// A port: `localhost`, `127.0.0.1:10810`, `[::1]`. Addresses that other machines reach are for TLS only.
    Tcp(SocketAddr),
    /// The sockets that systemd hands over: `systemd`.
    Systemd,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(address) => write!(f, "{address}"),
            Address::Systemd => f.write_str("systemd"),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    /// Reads what [`Address`] shows for each kind.
    ///
    /// # Errors
    ///
    /// A message: what was given, and what is accepted.
    fn from_str(given: &str) -> Result<Address, String> {
        if given == "systemd" {
            return Ok(Address::Systemd);
        }
        let path = given.strip_prefix("unix:").or(given.contains('/').then_some(given));
        let address = match path {
            Some(path) => {
                check_path(Path::new(path))?;
                (!path.is_empty()).then(|| Address::Unix(PathBuf::from(path)))
            }
            None => tcp(given).map(Address::Tcp),
        };
        address.ok_or_else(|| {
            format!(
                "'{given}' is not an address; accepted: a path with a /, unix:PATH, localhost, an IP address, each of \
                 the last two with :PORT or without ({PORT}), or systemd"
            )
        })
    }
}

/// The kernel has room for so many bytes, and a zero behind them (`struct sockaddr_un`).
const PATH_BYTES_MAX: usize = 107;

/// Whether a socket can have this path.
///
/// # Errors
///
/// It is too long: what was given, and what is accepted.
pub fn check_path(path: &Path) -> Result<(), String> {
    let bytes = path.as_os_str().as_bytes().len();
    if bytes <= PATH_BYTES_MAX {
        return Ok(());
    }
    Err(format!(
        "'{}' has {bytes} bytes; accepted: the path of a socket of up to {PATH_BYTES_MAX} bytes",
        path.display()
    ))
}

fn tcp(given: &str) -> Option<SocketAddr> {
    if let Some(rest) = given.strip_prefix("localhost") {
        let port = match rest.strip_prefix(':') {
            Some(port) => port.parse().ok()?,
            None => rest.is_empty().then_some(PORT)?,
        };
        return Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    let bare = given.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(given);
    let alone = bare.parse().ok().map(|address: IpAddr| SocketAddr::new(address, PORT));
    alone.or_else(|| given.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::{Address, PORT};

    #[test]
    fn an_address_is_read_as_it_is_written() {
        for (given, expected) in [
            ("/run/a.sock", "unix:/run/a.sock"),
            ("unix:a.sock", "unix:a.sock"),
            ("./a.sock", "unix:./a.sock"),
            ("localhost", "127.0.0.1:10809"),
            ("localhost:7", "127.0.0.1:7"),
            ("127.0.0.2", "127.0.0.2:10809"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("::1", "[::1]:10809"),
            ("[::1]", "[::1]:10809"),
            ("[::1]:99", "[::1]:99"),
            ("192.168.0.1:99", "192.168.0.1:99"),
            ("systemd", "systemd"),
        ] {
            let address: Address = given.parse().unwrap();
            assert_eq!(address.to_string(), expected);
            assert_eq!(expected.parse(), Ok(address));
        }
        assert_eq!(PORT, 10809);
        for wrong in [
            "",
            "unix:",
            "localhosts",
            "localhost:",
            "localhost:65536",
            "10.0.0",
            "a.sock",
            "1.2.3.4:",
        ] {
            let why = wrong.parse::<Address>().expect_err(wrong);
            assert!(why.starts_with(&format!("'{wrong}' is not an address; accepted:")), "{why}");
        }
    }
}
