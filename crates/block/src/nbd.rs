//! A server of the NBD protocol: block devices over a socket.
//!
//! The protocol's text is <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>; the words are its own.
//! A connection begins with a **handshake** (fixed newstyle), in which the client sends **options** and chooses an
//! **export**. Then comes the **transmission**: requests, each with a **cookie** (the text also says handle) that its
//! reply repeats. A reply is **simple**, or **structured** in **chunks** if the client asked for that.
//!
//! [`Session`] is all of the protocol: bytes of the client in, bytes for the client out, calls of a [`Device`] between
//! them. It has no socket, thread or clock, so tests and fuzzers play any input. A connection (`connection`) moves the
//! bytes between a session and a socket on a thread of its own, through TLS (`tls`) once the session says so;
//! [`Server`] has connections accepted on [`Listener`]s.
//!
//! # Invariants
//!
//! - `NBD-1` A connection takes room for its input ([`Exports::input_bytes`]) and an [`Output`], whatever its client
//!   sends: about 1 MiB, and with devices of larger units than 256 KiB two units and 512 KiB. TLS takes 256 KiB more
//!   (`TLS-3`). Memory that was never needed takes no pages.
//! - `NBD-2` No request allocates, but for the copy that rustls makes of each record. The payload of a write goes to
//!   the device from where it was received; what is read comes from the device to where it is sent from.
//! - `NBD-3` Each request gets one reply, in the order of the requests. A request that is refused changes nothing.
//! - `NBD-4` Bytes are sent as contents only if the device has returned them without an error, or the chunk is followed
//!   by an error for them and they are zeros.
//! - `NBD-5` A session consumes no byte behind the request that it cannot finish: what it reports as needed is the
//!   number of bytes with which it goes on.
//!
//! # Concurrency
//!
//! One thread for each connection, which shares only the devices with others.
//!
//! # Cost
//!
//! With requests in the socket, one `recv` and one `send` for all of them. `docs/design/nbd.md` has measurements.
//!
//! [`Device`]: crate::device::Device
//! [`Listener`]: crate::listen::Listener

mod certificates;
mod connection;
mod exports;
mod handshake;
mod options;
mod output;
mod reading;
mod reply;
#[cfg(any(test, fuzzing))]
pub mod script;
mod server;
mod session;
mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod tls;
mod transmission;
mod wire;

use crate::pieces::PIECE_BYTES;

pub use certificates::{BadCertificates, Certificates, Watch};
pub use exports::{EXPORTS_MAX, Exports, NAME_BYTES_MAX, Refusal};
pub use output::Output;
pub use server::{Config, Server};
pub use session::{Next, Received, Session};
pub use tls::Tls;

/// The longest payload of a request. Clients send no more than this even if they were not told.
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;

/// A write up to this size is given to the device by one call.
const WHOLE_BYTES: usize = 64 << 10;

/// Replies are sent once there are so many bytes of them, even if more requests are there.
const GATHER_BYTES: usize = 256 << 10;

/// Room for what was received and not served, beside a piece.
const BESIDE_BYTES: usize = 256 << 10;

/// The longest data of an option. The longest of the protocol that makes sense here, a name and some queries, is below
/// 2 KiB.
const OPTION_BYTES_MAX: usize = 16 << 10;

const _: () = {
    // What a session may need before it goes on: an option, or the smallest piece of a write.
    assert!(wire::OPTION_BYTES + OPTION_BYTES_MAX <= PIECE_BYTES + BESIDE_BYTES);
    assert!(WHOLE_BYTES <= BESIDE_BYTES);
};
