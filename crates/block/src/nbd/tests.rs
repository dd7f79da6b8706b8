//! Tests of the session without sockets, and of the server with them.

mod certificates;
mod client;
mod handshake;
mod hostile;
mod model;
mod refusals;
mod sockets;
mod tls;
mod vanish;
