//! The server with sockets: listening, stopping, and clients that harm nobody but themselves.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zfolio_sys::clock::monotonic_ns;

use super::client::{FLUSH, READ, TRIM, WRITE, exporting, go_data, option, request};
use crate::address::Address;
use crate::listen::{Listener, Unusable};
use crate::nbd::{Config, Server};
use crate::testing::{Gated, Memory};

/// A path of this test, where nothing is.
pub(super) fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("zfolio-nbd-{}-{name}", std::process::id()));
    std::fs::remove_file(&path).ok();
    path
}

pub(super) fn listen(path: &std::path::Path) -> Result<Vec<Listener>, Unusable> {
    Listener::open(&Address::Unix(path.to_path_buf()))
}

fn serve(path: &std::path::Path, config: Config) -> Server {
    let exports = exporting(Arc::new(Memory::new(64 << 20)));
    Server::start(listen(path).unwrap(), exports, config).unwrap()
}

/// Chooses the export. Replies are simple.
pub(super) fn shake_hands(stream: &mut (impl Read + Write)) -> std::io::Result<()> {
    stream.write_all(&[&3_u32.to_be_bytes()[..], &option(1, b"disk")].concat())?;
    stream.read_exact(&mut [0; 18 + 10])
}

pub(super) fn connect(path: &std::path::Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    shake_hands(&mut stream).unwrap();
    stream
}

/// Sends a request without payload, and reads a reply that says whether it has succeeded.
pub(super) fn ask(
    stream: &mut (impl Read + Write),
    command: u16,
    bytes: u32,
) -> std::io::Result<bool> {
    stream.write_all(&request(command, 0, 1, 0, bytes))?;
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    if command == READ && reply[4..8] == [0; 4] {
        stream.read_exact(&mut vec![0; bytes as usize])?;
    }
    Ok(reply[4..8] == [0; 4])
}

/// Waits until `is_so`, which must be the case soon.
#[track_caller]
pub(super) fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..2000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("not in 10 s: {what}");
}

/// Goal: a dead socket is replaced; a live one, and any other file, is left alone, with a clear line.
#[test]
fn a_path_is_taken_only_from_the_dead() {
    let path = scratch("taken");
    drop(UnixListener::bind(&path).unwrap());
    let first = listen(&path).unwrap();
    assert!(first[0].has_replaced());
    let why = listen(&path).unwrap_err();
    assert!(matches!(why, Unusable::InUse(_)), "{why}");
    assert_eq!(
        why.to_string(),
        format!("{}: another server listens on this socket", path.display())
    );
    drop(first);
    assert!(!path.exists(), "it goes with its listener");
    std::fs::write(&path, "precious").unwrap();
    let why = listen(&path).unwrap_err();
    assert!(why.to_string().ends_with("there is a file here that is not a socket"), "{why}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    // A path that somebody else has taken meanwhile stays.
    let first = listen(&path).unwrap();
    assert!(!first[0].has_replaced());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "another's").unwrap();
    drop(first);
    assert_eq!(std::fs::read(&path).unwrap(), b"another's");
    std::fs::remove_file(&path).unwrap();
    assert!(listen(&scratch("no/such/directory")).is_err());
    let long = scratch(&"x".repeat(200));
    assert!(listen(&long).unwrap_err().to_string().starts_with(&long.display().to_string()));
}

/// Goal: only this machine's own addresses, on a port of the system's choice, too.
#[test]
fn only_loopback_is_listened_on() {
    for address in ["0.0.0.0:0", "192.168.1.1", "[::]:0"] {
        let why = Listener::open(&address.parse().unwrap()).unwrap_err().to_string();
        assert!(why.ends_with("no certificates for TLS; accepted: 127.0.0.1, [::1]"), "{why}");
    }
    assert!(matches!(Listener::open(&Address::Systemd), Err(Unusable::NothingInherited)));
    let listeners = Listener::open(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let port = listeners[0].port().unwrap();
    let why = Listener::open(&Address::Tcp(port)).unwrap_err().to_string();
    assert!(why.starts_with(&format!("{port}: ")), "{why}");
    let exports = exporting(Arc::new(Memory::new(1 << 20)));
    let mut server = Server::start(listeners, exports, Config::default()).unwrap();
    let mut stream = TcpStream::connect(port).unwrap();
    shake_hands(&mut stream).unwrap();
    assert!(ask(&mut stream, READ, 1 << 20).unwrap());
    assert_eq!(server.stop(), 0);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end of the connection");
    assert!(TcpStream::connect(port).is_err());
}

/// Goal: ten thousand connections in turn, each left in the middle of something, leave nothing behind.
#[test]
fn clients_that_vanish_leave_nothing_behind() {
    let path = scratch("vanish");
    let server = serve(&path, Config::default());
    let mut faithful = connect(&path);
    let read = request(READ, 0, 1, 0, 1 << 20);
    let write = [request(WRITE, 0, 1, 0, 1 << 20), vec![1; 70_000]].concat();
    let endings: [&[u8]; 8] = [
        &[],
        &3_u32.to_be_bytes(),
        &option(7, &go_data("disk", &[]))[..20],
        &request(READ, 0, 1, 0, 512)[..27],
        &read,
        &write,
        &request(TRIM, 0, 1, 0, 64 << 20),
        &request(FLUSH, 0, 1, 0, 0),
    ];
    for number in 0..10_000 {
        let ending = endings[number % endings.len()];
        if number % 8 < 3 {
            // The handshake is not finished.
            UnixStream::connect(&path).unwrap().write_all(ending).unwrap();
        } else {
            // The server may be reading or sending when the socket is closed.
            connect(&path).write_all(ending).unwrap();
        }
        if number % 1000 == 0 {
            assert!(ask(&mut faithful, FLUSH, 0).unwrap(), "others are served");
        }
    }
    until("all but one have ended", || server.counts().live == 1);
    assert_eq!((server.counts().accepted, server.counts().refused), (10_001, 0));
    assert!(ask(&mut faithful, READ, 4096).unwrap());
}

/// Goal: a client that never reads its replies keeps neither others nor the server's stop waiting.
#[test]
fn a_client_that_never_reads_waits_alone() {
    let path = scratch("deaf");
    let drain = Duration::from_millis(300);
    let mut server = serve(&path, Config { drain, ..Config::default() });
    let mut deaf = connect(&path);
    let mut other = connect(&path);
    deaf.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let requests: Vec<u8> = (0..1000).flat_map(|_| request(READ, 0, 1, 0, 32 << 20)).collect();
    while deaf.write_all(&requests).is_ok() {}
    assert!(ask(&mut other, FLUSH, 0).unwrap());
    let began = monotonic_ns();
    assert_eq!(server.stop(), 0);
    let took_ms = (monotonic_ns() - began) / 1_000_000;
    assert!((300..10_000).contains(&took_ms), "{took_ms} ms");
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    assert!(UnixStream::connect(&path).is_err() && !path.exists());
}

/// Goal: who does not finish the handshake is sent away in time, even one that sends a byte now and then.
#[test]
fn the_handshake_has_a_deadline() {
    let path = scratch("slow");
    let handshake = Duration::from_millis(400);
    let server = serve(&path, Config { handshake, ..Config::default() });
    let mut shaken = connect(&path);
    let mut slow = UnixStream::connect(&path).unwrap();
    let began = monotonic_ns();
    let option = option(999, &vec![0; 10_000]);
    let message = [&3_u32.to_be_bytes()[..], &option].concat();
    let sent = message.iter().take_while(|byte| {
        std::thread::sleep(Duration::from_millis(20));
        slow.write_all(&[**byte]).is_ok()
    });
    assert!(sent.count() < 1000);
    assert!(monotonic_ns() - began >= 300_000_000);
    until("it is counted", || server.counts().timed_out == 1);
    // Whoever has chosen an export may be idle.
    assert!(ask(&mut shaken, FLUSH, 0).unwrap());
}

/// Goal: a full server keeps those that it has, and sends the next one away after a while; then there is room again.
#[test]
fn a_full_server_says_so() {
    let path = scratch("full");
    let mut server = serve(&path, Config { connections_max: 3, ..Config::default() });
    let mut held: Vec<_> = (0..3).map(|_| connect(&path)).collect();
    let mut more = UnixStream::connect(&path).unwrap();
    let result = shake_hands(&mut more);
    let kind = result.expect_err("it is full").kind();
    let gone = [ErrorKind::UnexpectedEof, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
    assert!(gone.contains(&kind), "{kind}");
    until("it is counted", || server.counts().refused == 1);
    held.iter_mut().for_each(|stream| assert!(ask(stream, FLUSH, 0).unwrap()));
    held.pop();
    // Whoever waits when another one leaves is served.
    let mut waiting = connect(&path);
    assert!(ask(&mut waiting, FLUSH, 0).unwrap());
    assert_eq!(server.stop(), 0);
}

/// Goal: what was received when the server stops is answered. Method: requests that are in the socket already.
#[test]
fn a_stop_drains() {
    let path = scratch("drain");
    for round in 0..50 {
        let mut server = serve(&path, Config::default());
        let mut stream = connect(&path);
        let requests: Vec<u8> = (0..100).flat_map(|_| request(FLUSH, 0, 1, 0, 0)).collect();
        stream.write_all(&requests).unwrap();
        if round % 2 == 0 {
            // The first reply proves that they were received.
            stream.read_exact(&mut [0; 16]).unwrap();
        }
        assert_eq!(server.stop(), 0);
        let mut replies = Vec::new();
        // A reset: some requests were not received, and not served.
        let is_reset = stream.read_to_end(&mut replies).is_err();
        let whole = replies.len() % 16 == 0;
        let expected = if round % 2 == 0 { 99 * 16 } else { 0 };
        assert!(whole && replies.len() >= expected, "round {round}: {}, {is_reset}", replies.len());
    }
}

/// Goal: a device that does not return keeps one connection waiting, and a stop no longer than it may take.
#[test]
fn a_device_that_hangs_does_not_hang_the_server() {
    let path = scratch("stuck");
    let disk = Arc::new(Gated::for_flushes(Memory::new(1 << 20)));
    disk.shut(true);
    let config = Config { drain: Duration::from_millis(100), ..Config::default() };
    let exports = exporting(disk.clone());
    let mut server = Server::start(listen(&path).unwrap(), exports, config).unwrap();
    let (mut stuck, mut other) = (connect(&path), connect(&path));
    stuck.write_all(&request(FLUSH, 0, 1, 0, 0)).unwrap();
    assert!(ask(&mut other, READ, 4096).unwrap());
    assert_eq!(server.stop(), 1);
    disk.shut(false);
    until("the thread ends with the flush", || server.counts().live == 0);
    assert_eq!(server.stop(), 0);
}

/// Goal: clients on several connections at once see what the others have written.
#[test]
fn connections_share_the_device() {
    let path = scratch("shared");
    let _server = serve(&path, Config::default());
    std::thread::scope(|scope| {
        for number in 0..4_u8 {
            let path = &path;
            scope.spawn(move || {
                let (mut writes, mut reads) = (connect(path), connect(path));
                for round in 0..200_u64 {
                    let at = (u64::from(number) << 20) + round % 16 * 65_536;
                    let data = vec![number ^ u8::try_from(round % 251).unwrap(); 65_536];
                    writes.write_all(&request(WRITE, 0, round, at, 65_536)).unwrap();
                    writes.write_all(&data).unwrap();
                    writes.read_exact(&mut [0; 16]).unwrap();
                    reads.write_all(&request(READ, 0, round, at, 65_536)).unwrap();
                    let mut reply = vec![0; 16 + 65_536];
                    reads.read_exact(&mut reply).unwrap();
                    assert!(reply[16..] == data, "thread {number}, round {round}");
                }
            });
        }
    });
}
