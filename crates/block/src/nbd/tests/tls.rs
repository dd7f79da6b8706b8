//! TLS with sockets: contents, clients that may not connect, and those that keep no rule. The client is rustls's.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
};
use zfolio_core::sync::Mutex;
use zfolio_core::testing::{Random, seed};

use super::client::{DISC, FLUSH, READ, WRITE, exporting, go_data, option, request};
use super::sockets::{ask, scratch, until};
use crate::address::Address;
use crate::listen::{Listener, Protection, Unusable};
use crate::nbd::{Certificates, Config, Server, Tls, Watch};
use crate::testing::Memory;
use crate::testing::certificates::{self, Usage};

/// A directory with an authority and what it has signed, and a folder `other` with another one.
pub(super) struct Pki {
    pub(super) directory: PathBuf,
}

impl Pki {
    /// `None`: openssl is not installed.
    pub(super) fn new(name: &str) -> Option<Pki> {
        let pki = Pki { directory: scratch(&format!("pki-{name}")) };
        let other = pki.directory.join("other");
        fs::create_dir_all(&other).unwrap();
        (certificates::make(&pki.directory) && certificates::make(&other)).then_some(pki)
    }

    fn protection(&self, local: Tls, verify_peer: bool) -> Protection {
        let certificates = Certificates::open(&self.directory, verify_peer).unwrap();
        Protection { certificates: Some(certificates), local }
    }

    /// Serves a disk at all addresses of this machine.
    fn serve(&self, config: Config, verify_peer: bool) -> (Server, SocketAddr) {
        let protection = self.protection(Tls::Off, verify_peer);
        let listeners = Listener::open_with(&"0.0.0.0:0".parse().unwrap(), &protection).unwrap();
        assert_eq!(listeners[0].tls(), Tls::Require);
        let port = listeners[0].port().unwrap().port();
        let exports = exporting(Arc::new(Memory::new(64 << 20)));
        let server = Server::start(listeners, exports, config).unwrap();
        (server, SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }

    /// A client that shows the certificate `NAME-cert.pem` of the folder, or none.
    fn client(
        &self,
        folder: &str,
        shown: Option<&str>,
        version: &'static SupportedProtocolVersion,
    ) -> ClientConfig {
        let mut authorities = RootCertStore::empty();
        authorities.add(certificate(&self.directory.join("ca-cert.pem"))).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(authorities);
        let Some(name) = shown else { return config.with_no_client_auth() };
        let folder = self.directory.join(folder);
        let key = PrivateKeyDer::from_pem_file(folder.join(format!("{name}-key.pem"))).unwrap();
        let shown = certificate(&folder.join(format!("{name}-cert.pem")));
        config.with_client_auth_cert(vec![shown], key).unwrap()
    }

    fn good(&self) -> ClientConfig {
        self.client("", Some("client"), &TLS13)
    }
}

impl Drop for Pki {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.directory).ok();
    }
}

fn certificate(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).unwrap()
}

/// A socket that ends after so many bytes were sent.
#[derive(Debug)]
struct Cut {
    socket: TcpStream,
    left: usize,
}

impl Read for Cut {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Ok(0);
        }
        self.socket.read(into)
    }
}

impl Write for Cut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(self.left)];
        if bytes.is_empty() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let sent = self.socket.write(bytes)?;
        self.left -= sent;
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Secured = StreamOwned<ClientConnection, Cut>;

fn socket(to: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(to).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket
}

/// Asks for TLS, in clear.
fn start_tls(socket: &mut (impl Read + Write)) -> io::Result<()> {
    socket.write_all(&[&3_u32.to_be_bytes()[..], &option(5, &[])].concat())?;
    let mut reply = [0; 18 + 20];
    socket.read_exact(&mut reply)?;
    assert_eq!(reply[30..34], [0, 0, 0, 1], "an ACK");
    Ok(())
}

/// Connects, and chooses the export. Replies are simple.
fn try_connect(to: SocketAddr, config: ClientConfig, left: usize) -> io::Result<Secured> {
    let mut socket = Cut { socket: socket(to), left };
    start_tls(&mut socket)?;
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(client, socket);
    let sent = stream.write_all(&option(1, b"disk"));
    match sent.and_then(|()| stream.read_exact(&mut [0; 10])) {
        Ok(()) => Ok(stream),
        // The server had ended the connection before, and may have said why.
        Err(why) => Err(alert(&mut stream).unwrap_or(why)),
    }
}

/// What the server has said last. Says first what the client has to say.
fn alert(stream: &mut Secured) -> Option<io::Error> {
    while stream.conn.wants_write() && stream.conn.write_tls(&mut stream.sock).is_ok() {}
    while stream.conn.read_tls(&mut stream.sock).is_ok_and(|bytes| bytes > 0) {
        if let Err(why) = stream.conn.process_new_packets() {
            return Some(io::Error::other(why));
        }
    }
    None
}

fn connect(to: SocketAddr, config: ClientConfig) -> Secured {
    try_connect(to, config, usize::MAX).unwrap()
}

/// Goal: what is written is read, in both versions, whatever the records' lengths, also after new keys; several
/// connections, replies of more than one record. Method: random writes against a `Vec`.
#[test]
fn contents_are_the_same_over_tls() {
    let Some(pki) = Pki::new("contents") else { return };
    let (_server, to) = pki.serve(Config::default(), true);
    let mut random = Random::new(seed());
    let mut model = vec![0; 8 << 20];
    for (version, fragment) in [(&TLS13, 16_384), (&TLS12, 16_384), (&TLS13, 100), (&TLS12, 3000)] {
        let mut config = pki.client("", Some("client"), version);
        config.max_fragment_size = Some(fragment + 5);
        let (mut writes, mut reads) = (connect(to, config.clone()), connect(to, config));
        for round in 0..60 {
            let bytes = 512 * (1 + random.below([8, 200, 2048][round % 3]));
            let at = 512 * random.below((model.len() - bytes) / 512);
            let data = random.bytes(bytes);
            model[at..at + bytes].copy_from_slice(&data);
            let length = u32::try_from(bytes).unwrap();
            if version == &TLS13 && round % 8 == 0 {
                writes.conn.refresh_traffic_keys().unwrap();
                reads.conn.refresh_traffic_keys().unwrap();
            }
            writes.write_all(&request(WRITE, 0, 7, at as u64, length)).unwrap();
            writes.write_all(&data).unwrap();
            writes.read_exact(&mut [0; 16]).unwrap();
            let begin = at.saturating_sub(4096);
            let length = (bytes + 8192).min(model.len() - begin);
            let read = request(READ, 0, 8, begin as u64, u32::try_from(length).unwrap());
            // Several at once: their replies are one stream of records.
            reads.write_all(&read.repeat(3)).unwrap();
            for _ in 0..3 {
                let mut reply = vec![0; 16 + length];
                reads.read_exact(&mut reply).unwrap();
                assert!(reply[16..] == model[begin..begin + length], "round {round}, {version:?}");
            }
        }
        // As much as can be received at once, of requests that are received as a whole, so that what there is room for
        // is less than that (TLS-2).
        let (bytes, count) = (60 << 10, 100);
        let data = random.bytes(bytes * count);
        let mut stream = Vec::new();
        for (number, data) in data.chunks_exact(bytes).enumerate() {
            let (at, length) = ((number * bytes) as u64, u32::try_from(bytes).unwrap());
            stream.extend(request(WRITE, 0, 7, at, length));
            stream.extend_from_slice(data);
        }
        writes.write_all(&stream).unwrap();
        writes.read_exact(&mut vec![0; 16 * count]).unwrap();
        model[..data.len()].copy_from_slice(&data);
        let length = u32::try_from(data.len()).unwrap();
        reads.write_all(&request(READ, 0, 8, 0, length)).unwrap();
        let mut reply = vec![0; 16 + data.len()];
        reads.read_exact(&mut reply).unwrap();
        assert!(reply[16..] == data, "{version:?}");
        assert!(ask(&mut writes, FLUSH, 0).unwrap());
        // Its end is told, so that a client knows that nothing was cut off.
        writes.write_all(&request(DISC, 0, 1, 0, 0)).unwrap();
        assert_eq!(writes.read(&mut [0]).unwrap(), 0);
    }
}

/// Goal: who may connect is up to the certificate, and to the list of those that were taken back.
#[test]
fn only_clients_of_the_authority_are_served() {
    let Some(pki) = Pki::new("clients") else { return };
    certificates::sign(&pki.directory, "revoked", Usage::Client);
    revoke(&pki.directory, "revoked");
    let (server, to) = pki.serve(Config::default(), true);
    let mut faithful = connect(to, pki.good());
    for version in [&TLS13, &TLS12] {
        for (folder, shown) in [
            ("", None),
            ("other", Some("client")),
            ("", Some("server")),
            ("", Some("ca")),
            ("", Some("revoked")),
        ] {
            let config = pki.client(folder, shown, version);
            let why = try_connect(to, config, usize::MAX).expect_err("it may not connect");
            assert!(why.to_string().contains("alert"), "{folder}/{shown:?}: {why}");
        }
        assert!(ask(&mut faithful, READ, 4096).unwrap());
        connect(to, pki.client("", Some("client"), version));
    }
    until("all but one have ended", || server.counts().live == 1);
    // With no verification anybody may connect.
    let (_open, to) = pki.serve(Config::default(), false);
    connect(to, pki.client("", None, &TLS13));
    connect(to, pki.client("other", Some("client"), &TLS12));
}

/// Goal: who is refused by TLS is counted and said, as is who refuses the server; who vanishes or keeps the rules is
/// not. New certificates are for new connections, and those that are there go on.
#[test]
fn refused_clients_are_counted_and_said() {
    let Some(pki) = Pki::new("refused") else { return };
    let mut watch = Watch::open(&pki.directory, true).unwrap();
    let protection =
        Protection { certificates: Some(watch.certificates().clone()), local: Tls::Require };
    let listeners = Listener::open_with(&"127.0.0.1:0".parse().unwrap(), &protection).unwrap();
    let to = listeners[0].port().unwrap();
    let lines = Arc::new(Mutex::<9, _>::new(Vec::new()));
    let said = Arc::clone(&lines);
    let report = Box::new(move |line: &str| said.lock().push(line.to_owned()));
    let exports = exporting(Arc::new(Memory::new(1 << 20)));
    let server = Server::start_with(listeners, exports, Config::default(), report).unwrap();
    let mut faithful = connect(to, pki.good());
    drop(connect(to, pki.good()));
    let mut vanishes = socket(to);
    start_tls(&mut vanishes).unwrap();
    drop(vanishes);
    until("they have ended", || server.counts().live == 1);
    assert_eq!((server.counts().tls_refused, lines.lock().len()), (0, 0));
    for number in 1..6 {
        let stranger = pki.client("other", Some("client"), &TLS13);
        try_connect(to, stranger, usize::MAX).expect_err("it may not connect");
        until("it is counted", || server.counts().tls_refused == number);
    }
    {
        let lines = lines.lock();
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with("TLS has failed with a client at 127.0.0.1:"), "{line}");
        // The other authority has the same name.
        assert!(line.ends_with(": invalid peer certificate: BadSignature"), "{line}");
    }
    // An authority that this client does not know has signed what the server shows now.
    let old = pki.good();
    assert!(certificates::make(&pki.directory));
    assert!(watch.look().is_none() && watch.look().unwrap().contains("new certificates"));
    try_connect(to, old, usize::MAX).expect_err("it does not know the server");
    until("it is counted", || server.counts().tls_refused == 6);
    connect(to, pki.good());
    assert!(ask(&mut faithful, READ, 4096).unwrap(), "it goes on");
    assert_eq!(server.counts().tls_refused, 6);
}

/// Takes a certificate back: makes `ca-crl.pem`.
fn revoke(directory: &Path, name: &str) {
    let config = "[ca]\ndefault_ca=own\n[own]\ndatabase=index\ncrlnumber=number\ndefault_md=sha256\n\
                  default_crl_days=30\n";
    fs::write(directory.join("ca.conf"), config).unwrap();
    fs::write(directory.join("index"), "").unwrap();
    fs::write(directory.join("number"), "01\n").unwrap();
    let own = ["-config", "ca.conf", "-cert", "ca-cert.pem", "-keyfile", "ca-key.pem"];
    let cert = format!("{name}-cert.pem");
    certificates::openssl(directory, &[&["ca", "-revoke", &cert], &own[..]].concat());
    certificates::openssl(
        directory,
        &[&["ca", "-gencrl", "-out", "ca-crl.pem"], &own[..]].concat(),
    );
}

/// Goal: at an address of this machine TLS is as the server's owner wants it; at others it is required.
#[test]
fn tls_is_required_where_other_machines_connect() {
    let Some(pki) = Pki::new("addresses") else { return };
    for (address, local, expected) in [
        ("127.0.0.1:0", Tls::Off, Tls::Off),
        ("127.0.0.1:0", Tls::On, Tls::On),
        ("[::1]:0", Tls::Require, Tls::Require),
        ("0.0.0.0:0", Tls::Off, Tls::Require),
        ("0.0.0.0:0", Tls::On, Tls::Require),
        ("[::]:0", Tls::Off, Tls::Require),
        ("[::ffff:127.0.0.1]:0", Tls::Off, Tls::Require),
    ] {
        let protection = pki.protection(local, true);
        match Listener::open_with(&address.parse().unwrap(), &protection) {
            Ok(opened) => assert_eq!(opened[0].tls(), expected, "{address}, {local:?}"),
            // A machine without IPv6.
            Err(why) => assert!(matches!(why, Unusable::System(..)) && address.starts_with('[')),
        }
    }
    let path = Address::Unix(scratch("tls-unix"));
    let without = Protection { certificates: None, local: Tls::Require };
    assert!(matches!(Listener::open_with(&path, &without), Err(Unusable::NoCertificates)));
    let opened = Listener::open_with(&path, &pki.protection(Tls::Require, true)).unwrap();
    assert_eq!(opened[0].tls(), Tls::Require);
    // In clear nothing is told but that.
    let (_server, to) = pki.serve(Config::default(), true);
    let mut clear = socket(to);
    clear
        .write_all(&[&3_u32.to_be_bytes()[..], &option(7, &go_data("disk", &[]))].concat())
        .unwrap();
    let mut reply = [0; 18 + 20];
    clear.read_exact(&mut reply).unwrap();
    assert_eq!(reply[30..34], [0x80, 0, 0, 5], "TLS_REQD");
    let mut old = socket(to);
    old.write_all(&[&3_u32.to_be_bytes()[..], &option(1, b"disk")].concat()).unwrap();
    let mut told = Vec::new();
    old.read_to_end(&mut told).ok();
    assert_eq!(told.len(), 18, "the greeting");
}

/// Goal: a client that is gone in the middle of anything leaves nothing behind. Method: all that a client sends, cut at
/// many places, a thousand connections in turn.
#[test]
fn clients_that_vanish_in_tls_leave_nothing_behind() {
    let Some(pki) = Pki::new("cut") else { return };
    let (server, to) = pki.serve(Config::default(), true);
    let mut faithful = connect(to, pki.good());
    let config = pki.good();
    let write = [request(WRITE, 0, 1, 0, 1 << 20), vec![1; 70_000]].concat();
    let mut reached = 0;
    for number in 0..1000 {
        // Most of them within the handshake, which is some 1500 bytes.
        let left = if number % 8 == 0 { 2000 + 97 * number } else { 20 + number * 2 };
        if let Ok(mut stream) = try_connect(to, config.clone(), left) {
            stream.write_all(&write).ok();
            reached += 1;
        }
        if number % 100 == 0 {
            assert!(ask(&mut faithful, FLUSH, 0).unwrap(), "others are served");
        }
    }
    assert!((100..900).contains(&reached), "{reached} of 1000 have chosen an export");
    until("all but one have ended", || server.counts().live == 1);
    assert_eq!((server.counts().accepted, server.counts().refused), (1001, 0));
}

/// Goal: what is not TLS ends the connection of who sends it.
#[test]
fn what_is_not_tls_ends_its_connection_only() {
    let Some(pki) = Pki::new("noise") else { return };
    let (server, to) = pki.serve(Config::default(), true);
    let mut faithful = connect(to, pki.good());
    let seed = seed();
    let mut random = Random::new(seed);
    let record = |kind: u8, length: u16, contents: &[u8]| {
        [&[kind, 3, 3][..], &length.to_be_bytes(), contents].concat()
    };
    // A hello of 64 KiB that comes in records of one byte, and one that says it has 16 MiB.
    let tiny: Vec<u8> = [&[1, 0, 255, 255][..], &vec![3; 30_000]].concat();
    let tiny: Vec<u8> = tiny.iter().flat_map(|byte| record(22, 1, &[*byte])).collect();
    let mut messages = vec![
        option(7, &go_data("disk", &[])),
        record(23, 16, &[0; 16]),
        record(22, 65_535, &[1; 40_000]),
        record(22, 0, &[]),
        record(22, 16_384, &vec![0; 16_384]).repeat(20),
        record(22, 4, &[1, 255, 255, 255]),
        record(21, 2, &[2, 40]),
        record(21, 2, &[1, 0]),
        record(20, 1, &[1]).repeat(1000),
        record(99, 1, &[1]),
        record(22, 5, &[0, 0, 0, 1, 0]),
        tiny,
        vec![0x80, 46, 1, 3, 1],
    ];
    messages.extend((0..200).map(|_| {
        let length = random.below(3000);
        random.bytes(length)
    }));
    for (number, message) in messages.iter().enumerate() {
        let mut stream = socket(to);
        start_tls(&mut stream).unwrap();
        // The server may have ended it before all of it was sent.
        stream.write_all(message).ok();
        stream.shutdown(std::net::Shutdown::Write).ok();
        let mut told = Vec::new();
        stream.read_to_end(&mut told).ok();
        assert!(told.len() < 100, "seed {seed}, message {number}: {} bytes", told.len());
        assert!(ask(&mut faithful, READ, 4096).unwrap(), "seed {seed}, message {number}");
    }
    until("all but one have ended", || server.counts().live == 1);
    let refused = server.counts().tls_refused;
    assert!(refused > 100, "seed {seed}: {refused} of {} in the handshake", messages.len());
    // Records of a client that has chosen an export, damaged.
    for at in 0..60 {
        let mut stream = connect(to, pki.good());
        stream.conn.writer().write_all(&request(WRITE, 0, 1, 0, 512)).unwrap();
        let mut bytes = Vec::new();
        stream.conn.write_tls(&mut bytes).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << random.below(8);
        stream.sock.write_all(&bytes).unwrap();
        stream.sock.socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(stream.read(&mut [0]).is_err() || at < 5, "seed {seed}, byte {at}");
    }
    until("all but one have ended", || server.counts().live == 1);
    assert_eq!(server.counts().tls_refused, refused, "none after it");
    assert!(ask(&mut faithful, READ, 4096).unwrap());
}

/// Goal: the handshake of TLS is a part of the one that has a deadline, also for who sends a byte now and then.
#[test]
fn tls_has_the_deadline_of_the_handshake() {
    let Some(pki) = Pki::new("slow") else { return };
    let handshake = Duration::from_millis(1500);
    let (server, to) = pki.serve(Config { handshake, ..Config::default() }, true);
    let mut faithful = connect(to, pki.good());
    let mut waits = socket(to);
    start_tls(&mut waits).unwrap();
    let mut drips = socket(to);
    start_tls(&mut drips).unwrap();
    let hello = [&[22, 3, 1, 16, 0][..], &[1; 4096]].concat();
    let sent = hello.iter().take_while(|byte| {
        std::thread::sleep(Duration::from_millis(10));
        drips.write_all(&[**byte]).is_ok()
    });
    assert!(sent.count() < 2000);
    until("they are counted", || server.counts().timed_out == 2);
    assert_eq!(waits.read(&mut [0]).unwrap_or(0), 0);
    assert!(ask(&mut faithful, FLUSH, 0).unwrap());
}

/// Goal: what was received when the server stops is answered, and the end is told; a client that does not read its
/// replies keeps the stop no longer than it may take.
#[test]
fn a_stop_drains_tls() {
    let Some(pki) = Pki::new("drain") else { return };
    for round in 0..10 {
        let drain = Duration::from_millis(300);
        let (mut server, to) = pki.serve(Config { drain, ..Config::default() }, true);
        let mut stream = connect(to, pki.good());
        let mut deaf = (round % 5 == 0).then(|| connect(to, pki.good()));
        if let Some(deaf) = &mut deaf {
            deaf.sock.socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
            let requests: Vec<u8> =
                (0..100).flat_map(|_| request(READ, 0, 1, 0, 32 << 20)).collect();
            deaf.write_all(&requests).ok();
        }
        let requests: Vec<u8> = (0..100).flat_map(|_| request(FLUSH, 0, 1, 0, 0)).collect();
        stream.write_all(&requests).unwrap();
        // The first reply proves that all of them were received: they are one record.
        stream.read_exact(&mut [0; 16]).unwrap();
        assert_eq!(server.stop(), 0);
        let mut replies = Vec::new();
        stream.read_to_end(&mut replies).unwrap();
        assert_eq!(replies.len(), 99 * 16, "round {round}");
    }
}
