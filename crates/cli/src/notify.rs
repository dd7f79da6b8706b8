//! What a service tells systemd (`sd_notify(3)`): that it is ready, and a line on how it is.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that names the socket of whoever wants to be told.
pub(crate) const VARIABLE: &str = "NOTIFY_SOCKET";

/// Sends a message, lines of NAME=VALUE, if anybody wants it. It is not known whether it arrives.
pub(crate) fn send(message: &str) {
    let Some(name) = std::env::var_os(VARIABLE) else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let send = |address| UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address);
    address.and_then(send).ok();
}
