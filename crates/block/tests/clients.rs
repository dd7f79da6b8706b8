//! Real clients against the server, and their contents compared: of plain bytes, and of compressed disks.
//!
//! Each client is a program of its own; one that is not installed is skipped with a message (`make setup`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

use zfolio_block::Device;
use zfolio_block::address::Address;
use zfolio_block::listen::{Listener, Protection};
use zfolio_block::nbd::{Certificates, Config, Exports, Server, Tls};
use zfolio_block::ram::{self, Ram};
use zfolio_block::testing::{ACTIVATE, Memory, UNIT_BYTES, certificates};
use zfolio_core::page::UnitOrder;
use zfolio_core::testing::{Random, seed};
use zfolio_pager::PoolMappings;
use zfolio_workers::Accelerated;

/// The disk that is served.
const SIZE: usize = 32 << 20;

/// A limit of memory not far above what is written to half of a disk, which is noise.
const LIMIT: u64 = 24 << 20;

/// A compressed disk of zeros, with somebody who works for it as long as it is there.
fn compressed(unit: UnitOrder, limit_bytes: u64) -> Arc<Ram> {
    const TURN: Duration = Duration::from_millis(20);
    let config = ram::Config {
        disk_bytes: SIZE as u64,
        algorithms: ["lz4", "zstd"].map(|name| name.parse().expect("a name of ours")).into(),
        unit,
        limit_bytes,
        age_s: 1,
        accelerated: Accelerated::NONE,
    };
    let report = Box::new(|error: &zfolio_core::zram::Error| panic!("{error}"));
    let made = Ram::new(&config, Arc::new(PoolMappings::default()), report);
    let disk = Arc::new(made.expect("the size of a disk"));
    let watched: Weak<Ram> = Arc::downgrade(&disk);
    std::thread::spawn(move || {
        while let Some(disk) = watched.upgrade() {
            disk.work(u64::try_from(TURN.as_nanos()).expect("20 ms"));
            drop(disk);
            std::thread::sleep(TURN);
        }
    });
    disk
}

/// Runs a case on plain bytes, and on compressed disks in units of 4 KiB and 64 KiB, without and with a limit.
fn on_each_disk(name: &str, case: impl Fn(&Stage)) {
    case(&Stage::new(name));
    for unit in [UnitOrder::DEFAULT, UnitOrder::FOLIO] {
        for limit_bytes in [0, LIMIT] {
            let disks = [(); 2].map(|()| compressed(unit, limit_bytes));
            let [disk, other] = disks.clone();
            let directory = scratch(&format!("{name}-{unit}-{limit_bytes}"));
            let listeners = Stage::socket(&directory);
            let mut stage = Stage::serving(directory, listeners, [disk, other]);
            (stage.unit_bytes, stage.is_compressed) = (unit.bytes() as u64, true);
            case(&stage);
            for stat in disks.map(|disk| disk.zram().mm_stat()) {
                let is_held = stat.mem_limit == 0 || stat.mem_used_max <= stat.mem_limit;
                assert!(is_held, "units of {unit}: {stat:?}");
            }
        }
    }
}

/// A directory with a served disk, and what belongs to a test.
struct Stage {
    directory: PathBuf,
    /// The disk is served by TLS at this port of all addresses, and not at a socket in the directory.
    port: Option<u16>,
    /// What is a hole or not.
    unit_bytes: u64,
    /// Its zeros are a hole also where they are to keep their room, and what it holds is bounded by its memory.
    is_compressed: bool,
    _server: Server,
}

/// A new directory of a test.
fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("zfolio-clients-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a scratch directory");
    path
}

impl Stage {
    fn new(name: &str) -> Stage {
        let directory = scratch(name);
        let listeners = Stage::socket(&directory);
        Stage::serving(directory, listeners, Stage::plain())
    }

    fn socket(directory: &Path) -> Vec<Listener> {
        let address = Address::Unix(directory.join("socket"));
        Listener::open(&address).expect("nobody else has this path")
    }

    fn plain() -> [Arc<Memory>; 2] {
        let disk = Memory::new(SIZE as u64).preferring(64 << 10);
        [disk, Memory::new(SIZE as u64)].map(Arc::new)
    }

    /// A server that other machines reach. `None`: there is nothing to make certificates.
    fn with_tls(name: &str) -> Option<Stage> {
        let directory = scratch(name);
        if !certificates::make(&directory) {
            std::fs::remove_dir_all(&directory).ok();
            return None;
        }
        let own = Certificates::open(&directory, true).expect("they were just made");
        let protection = Protection { certificates: Some(own), local: Tls::Off };
        let address = Address::Tcp(([0, 0, 0, 0], 0).into());
        let listeners = Listener::open_with(&address, &protection).expect("any port");
        Some(Stage::serving(directory, listeners, Stage::plain()))
    }

    fn serving<D: Device + 'static>(
        directory: PathBuf,
        listeners: Vec<Listener>,
        [disk, other]: [Arc<D>; 2],
    ) -> Stage {
        let port = listeners[0].port().map(|port| port.port());
        let mut exports = Exports::new();
        exports.add("disk", "a disk in memory", disk).expect("the first");
        exports.add("other", "", other).expect("another name");
        let frozen = Arc::new(Memory::new(1 << 20).read_only());
        exports.add("frozen", "", frozen).expect("another name");
        let broken = Memory::new(1 << 20);
        broken.break_from(1 << 19, zfolio_block::Error::NoSpace);
        exports.add("broken", "", Arc::new(broken)).expect("another name");
        let server = Server::start(listeners, exports, Config::default()).expect("a thread");
        let (unit_bytes, is_compressed) = (UNIT_BYTES, false);
        Stage { directory, port, unit_bytes, is_compressed, _server: server }
    }

    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn uri(&self, export: &str) -> String {
        if let Some(port) = self.port {
            let directory = self.directory.display();
            return format!("nbds://localhost:{port}/{export}?tls-certificates={directory}");
        }
        format!("nbd+unix:///{export}?socket={}", self.path("socket"))
    }

    /// Half random bytes, half holes of many lengths.
    fn image(&self, name: &str) -> Vec<u8> {
        let mut random = Random::new(seed());
        let mut bytes = vec![0; SIZE];
        let mut at = 0;
        while at < SIZE {
            let length = (512 * (1 + random.below(500))).min(SIZE - at);
            if random.below(2) == 0 {
                bytes[at..at + length].fill_with(|| random.byte());
            }
            at += length;
        }
        std::fs::write(self.directory.join(name), &bytes).expect("a scratch file");
        bytes
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).ok();
    }
}

/// Runs a client. `None`: it is not installed, which was said.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    if output.is_err() {
        eprintln!("SKIPPED: {program} is not installed (make setup)");
    }
    output.ok()
}

/// The same; the client must succeed. Returns what it has printed.
#[track_caller]
fn succeed(program: &str, arguments: &[&str]) -> Option<String> {
    let output = run(program, arguments)?;
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{out}{err}", output.status);
    Some(out.into_owned())
}

/// Goal: everything about an export is told, as another program understands it.
#[test]
fn nbdinfo_sees_the_exports() {
    let stage = Stage::new("nbdinfo");
    let Some(told) = succeed("nbdinfo", &[&stage.uri("disk")]) else { return };
    for expected in [
        "newstyle-fixed without TLS, using structured packets",
        "description: a disk in memory",
        "export-size: 33554432",
        "is_read_only: false",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 512",
        "block_size_preferred: 65536",
        "block_size_maximum: 33554432",
        "base:allocation",
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    let listed = succeed("nbdinfo", &["--list", &stage.uri("")]).unwrap_or_default();
    for name in ["disk", "other", "frozen", "broken"] {
        assert!(listed.contains(&format!("export=\"{name}\"")), "{listed}");
    }
    let map = succeed("nbdinfo", &["--map", &stage.uri("disk")]).unwrap_or_default();
    let words: Vec<&str> = map.split_whitespace().collect();
    assert_eq!(words, ["0", "33554432", "3", "hole,zero"]);
    let failed = run("nbdinfo", &[&stage.uri("none")]).expect("it was there just now");
    assert!(!failed.status.success());
}

/// Goal: an image comes back as it was. Method: several connections and many requests at once.
#[test]
fn nbdcopy_copies_in_and_out() {
    on_each_disk("nbdcopy", nbdcopy_copies);
}

fn nbdcopy_copies(stage: &Stage) {
    let image = stage.image("in");
    for (requests, connections) in [("1", "1"), ("64", "4")] {
        let how = ["--requests", requests, "--connections", connections];
        let (uri, other) = (stage.uri("disk"), stage.uri("other"));
        let copy = |from: &str, to: &str| succeed("nbdcopy", &[&how[..], &[from, to]].concat());
        if copy(&stage.path("in"), &uri).is_none() {
            return;
        }
        copy(&uri, &other);
        copy(&other, &stage.path("out"));
        assert!(std::fs::read(stage.path("out")).expect("it was copied") == image);
        std::fs::remove_file(stage.path("out")).expect("it is there");
    }
}

/// Goal: QEMU's programs write, zero, discard, read and compare.
#[test]
fn qemu_reads_what_it_writes() {
    on_each_disk("qemu", qemu_reads);
}

fn qemu_reads(stage: &Stage) {
    let image = stage.image("in");
    let (input, output, uri) = (stage.path("in"), stage.path("out"), stage.uri("disk"));
    let convert = ["convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw"];
    if succeed("qemu-img", &[&convert[..], &[&input, &uri]].concat()).is_none() {
        return;
    }
    let told = succeed("qemu-img", &["compare", "-f", "raw", "-F", "raw", &input, &uri]);
    assert!(told.unwrap_or_default().contains("identical"));
    succeed("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &output]);
    assert!(std::fs::read(&output).expect("it was converted") == image);
    let commands = [
        "write -P 7 0 4M",
        "write -P 8 -f 1536 2560",
        "write -z 1M 1M",
        "write -zu 2M 64k",
        "discard 3M 512k",
        "flush",
        "read -P 7 0 1536",
        "read -P 8 1536 2560",
        "read -P 7 4k 1020k",
        "read -P 0 1M 1M",
        "read -P 0 2M 64k",
        "read -P 0 3M 512k",
        "read -P 7 3584k 512k",
    ];
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> = ["-t", "none", "-f", "raw"].into_iter().chain(commands).collect();
    let told = succeed("qemu-io", &[&arguments[..], &[&uri]].concat()).unwrap_or_default();
    assert!(!told.contains("Pattern verification failed"), "{told}");
}

/// Goal: random writes of many sizes are read back with their checksums, and trims do no harm to neighbours.
#[test]
fn fio_verifies_what_it_writes() {
    on_each_disk("fio", fio_verifies);
}

fn fio_verifies(stage: &Stage) {
    let uri = format!("--uri={}", stage.uri("disk"));
    let common = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--output-format=terse",
        if stage.is_compressed { "--size=4M" } else { "--size=8M" },
        "--offset_increment=8M",
        "--numjobs=4",
        "--thread",
        "--group_reporting",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=64",
        // Else it leaves files in the current directory.
        "--verify_state_save=0",
    ];
    for how in [
        &["--rw=randwrite", "--bs=4k", "--iodepth=16"][..],
        &[
            "--rw=randrw",
            "--bssplit=512/10:4k/50:20k/20:64k/15:1M/5",
            "--blockalign=512",
            "--iodepth=8",
        ],
        &["--rw=write", "--bs=256k", "--iodepth=4"],
    ] {
        if succeed("fio", &[&common[..], how].concat()).is_none() {
            return;
        }
    }
    // Each block is trimmed before it is written.
    let trims = ["--rw=randtrimwrite", "--bs=64k", "--iodepth=1"];
    succeed("fio", &[&common[..], &trims].concat());
}

/// What the Python module of libnbd is to find. Arguments: the URIs of the disk, the read-only and the broken export;
/// what is a hole or not, up to 64 KiB; whether zeros that keep their room are none.
const PYTHON: &str = r#"
import errno, sys, nbd
disk, frozen, broken = sys.argv[1:4]
unit, keeps_room = int(sys.argv[4]), sys.argv[5] == 'true'

def connect(uri, structured=True):
    h = nbd.NBD()
    h.set_strict_mode(0)  # What the server refuses is to be sent.
    h.set_uri_allow_local_file(True)  # Certificates.
    h.set_request_structured_replies(structured)
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_uri(uri)
    return h

def refused(number, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as why:
        assert why.errno == errno.errorcode[number], (why.errno, errno.errorcode[number])
    else:
        raise AssertionError(f'{call.__name__}{arguments[1:]} was not refused')

def extents(h, count, offset, flags=0):
    found = []
    def extent(context, at, entries, error):
        assert context == 'base:allocation' and at == offset
        found.extend(zip(entries[::2], entries[1::2]))
    h.block_status(count, offset, extent, flags)
    return found

h = connect(disk)
assert h.get_structured_replies_negotiated() and h.can_meta_context('base:allocation')
h.pwrite(b'a' * 65536, 65536)
h.pwrite(b'b' * 512, 196608, nbd.CMD_FLAG_FUA)
chunks = []
def chunk(buffer, at, status, error):
    chunks.append((at, len(buffer), status))
contents = h.pread_structured(262144, 0, chunk)
assert contents == bytes(65536) + b'a' * 65536 + bytes(65536) + b'b' * 512 + bytes(65024)
rest = [nbd.READ_HOLE] if unit < 65536 else []
assert [status for _, _, status in chunks] == [nbd.READ_HOLE, nbd.READ_DATA] * 2 + rest, chunks
chunks.clear()
assert h.pread_structured(262144, 0, chunk, nbd.CMD_FLAG_DF) == contents
assert [status for _, _, status in chunks] == [nbd.READ_DATA], chunks
assert extents(h, 262144, 0)[:3] == [(65536, 3), (65536, 0), (65536, 3)]
assert extents(h, 262144, 0, nbd.CMD_FLAG_REQ_ONE) == [(65536, 3)]

# Another connection sees what this one has written and flushed.
h.flush()
other = connect(disk, structured=False)
assert not other.get_structured_replies_negotiated() and other.can_multi_conn()
assert other.pread(262144, 0) == contents
other.trim(65536, 65536)
assert extents(h, 131072, 0) == [(131072, 3)]
h.zero(65536, 0, nbd.CMD_FLAG_NO_HOLE)
h.zero(65536, 65536, nbd.CMD_FLAG_FAST_ZERO)
assert extents(h, 131072, 0) == ([(65536, 0), (65536, 3)] if keeps_room else [(131072, 3)])
h.cache(65536, 0)

size = h.get_size()
for c in h, other:
    refused(errno.EINVAL, c.pread, 512, size)
    refused(errno.ENOSPC, c.pwrite, bytes(1024), size - 512)
    refused(errno.EINVAL, c.pread, 1, 0)
    refused(errno.EINVAL, c.pwrite, b'x', 1)
    refused(errno.EINVAL, c.trim, 512, size)
    refused(errno.ENOSPC, c.zero, 512, size)
    refused(errno.EINVAL, c.cache, 512, size)
    refused(errno.EINVAL, c.flush, 1 << 15)
    assert len(c.pread(512, size - 512)) == 512
    big = b'z' * (32 << 20)
    c.pwrite(big, 0)
    assert c.pread(32 << 20, 0) == big
f = connect(frozen)
assert f.is_read_only()
refused(errno.EPERM, f.pwrite, bytes(512), 0)
refused(errno.EPERM, f.trim, 512, 0)
b = connect(broken)
refused(errno.ENOSPC, b.pwrite, bytes(512), 1 << 19)
refused(errno.ENOSPC, b.pread, 1 << 20, 0)
assert b.pread(1 << 19, 0) == bytes(1 << 19)
for c in h, other, f, b:
    c.shutdown()
"#;

/// Goal: structured replies, block status, several connections and each error, as libnbd understands them.
#[test]
fn libnbd_finds_the_protocol_kept() {
    on_each_disk("libnbd", libnbd_finds);
}

fn libnbd_finds(stage: &Stage) {
    let python =
        if Path::new("/usr/bin/python3").exists() { "/usr/bin/python3" } else { "python3" };
    let Some(has_module) = run(python, &["-c", "import nbd"]) else { return };
    if !has_module.status.success() {
        return eprintln!("SKIPPED: {python} has no module nbd (make setup)");
    }
    let [disk, frozen, broken] = ["disk", "frozen", "broken"].map(|name| stage.uri(name));
    let [unit, keeps_room] = [stage.unit_bytes.to_string(), (!stage.is_compressed).to_string()];
    succeed(python, &["-c", PYTHON, &disk, &frozen, &broken, &unit, &keeps_room]);
}

/// Goal: the same over TLS, where other machines could connect, with several connections.
#[test]
fn clients_of_libnbd_speak_tls() {
    let Some(stage) = Stage::with_tls("tls-libnbd") else { return };
    let Some(told) = succeed("nbdinfo", &[&stage.uri("disk")]) else { return };
    assert!(told.contains("newstyle-fixed with TLS, using structured packets"), "{told}");
    nbdcopy_copies(&stage);
    libnbd_finds(&stage);
    // Whoever speaks no TLS, has another authority's certificate, or none, is told nothing about exports.
    let (port, other) = (stage.port.expect("it has TLS"), scratch("tls-other"));
    let refused = |uri: &str| {
        let output = run("nbdinfo", &[uri]).expect("it was there just now");
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && !out.contains("export"), "{uri}: {out}");
    };
    refused(&format!("nbd://localhost:{port}/disk"));
    certificates::make(&other);
    // The client accepts the server.
    std::fs::copy(stage.directory.join("ca-cert.pem"), other.join("ca-cert.pem")).expect("a copy");
    let stranger = format!("nbds://localhost:{port}/disk?tls-certificates={}", other.display());
    refused(&stranger);
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(other.join(name)).expect("it was made");
    }
    refused(&stranger);
    std::fs::remove_dir_all(&other).ok();
}

/// Goal: QEMU's programs, too.
#[test]
fn qemu_speaks_tls() {
    let Some(stage) = Stage::with_tls("tls-qemu") else { return };
    let image = stage.image("in");
    let directory = &stage.directory.display();
    let own = format!("tls-creds-x509,id=own,endpoint=client,dir={directory},verify-peer=on");
    let port = stage.port.expect("it has TLS");
    let disk = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=own");
    let (input, output) = (stage.path("in"), stage.path("out"));
    let file = format!("driver=raw,file.driver=file,file.filename={input}");
    let to_disk = ["convert", "--object", &own, "-n", "-W", "-m", "8", "--image-opts"];
    let to_disk = [&to_disk[..], &["--target-image-opts", &file, &disk]].concat();
    if succeed("qemu-img", &to_disk).is_none() {
        return;
    }
    let told = succeed("qemu-img", &["compare", "--object", &own, "--image-opts", &file, &disk]);
    assert!(told.unwrap_or_default().contains("identical"));
    let from_disk = ["convert", "--object", &own, "--image-opts", "-O", "raw", &disk, &output];
    succeed("qemu-img", &from_disk);
    assert!(std::fs::read(&output).expect("it was converted") == image);
}

/// Goal: the server takes over the sockets of systemd.
#[test]
fn a_socket_of_systemd_is_served() {
    let stage = Stage::new("systemd");
    let socket = stage.path("activated");
    let own = std::env::current_exe().expect("a test is a file");
    // target/PROFILE/deps/clients-HASH
    let example = own.ancestors().nth(2).map(|profile| profile.join("examples/memory"));
    let Some(example) = example.filter(|example| example.exists()) else {
        return eprintln!("SKIPPED: the example `memory` is not built");
    };
    let server = Command::new("python3")
        .args(["-c", ACTIVATE, &socket])
        .arg(example)
        .args(["4M", "systemd"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut server) = server else { return eprintln!("SKIPPED: python3 is not installed") };
    let mut ready = [0; 6];
    let mut out = server.stdout.take().expect("it is piped");
    std::io::Read::read_exact(&mut out, &mut ready).expect("the server has started");
    assert_eq!(&ready, b"ready ");
    let told = succeed("nbdinfo", &["--size", &format!("nbd+unix:///disk?socket={socket}")]);
    // The server ends with its input.
    drop(server.stdin.take());
    assert!(server.wait().expect("it is our child").success());
    if let Some(told) = told {
        assert_eq!(told.trim(), "4194304");
    }
}
