//! `zfolio device` with contents: what is written to a disk is there, also when it was written back to a file.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};

use zfolio_core::testing::{Random, seed};

use crate::run::first_line;
use crate::stage::{kill, output_of, scratch, zfolio};

/// A disk that this process serves in a child, which is killed when this is dropped.
pub(crate) struct Served {
    pub(crate) name: String,
    socket: PathBuf,
    child: Option<Child>,
}

impl Served {
    /// Starts a disk with these options beside its name and address.
    pub(crate) fn start(name: &str, options: &[&str]) -> Served {
        let mut served = Served::named(name);
        let mut child = served.command(options).spawn().expect("it was built");
        let line = first_line(&mut child);
        assert!(line.starts_with(&format!("disk {}: ", served.name)), "{line}");
        served.child = Some(child);
        served
    }

    pub(crate) fn named(name: &str) -> Served {
        let name = format!("{name}-{}", std::process::id());
        Served { socket: scratch("contents").join(format!("{name}.sock")), name, child: None }
    }

    pub(crate) fn command(&self, options: &[&str]) -> std::process::Command {
        let socket = self.socket.to_str().expect("a name of ours");
        let fixed = ["device", "run", &self.name, "--nbd", socket];
        let mut command = zfolio(&[&fixed, options].concat());
        command.stderr(Stdio::piped());
        command
    }

    pub(crate) fn ask(&self, command: &str, rest: &[&str]) -> (Option<i32>, String, String) {
        output_of(&[&["device", command, &self.name], rest].concat())
    }

    /// The columns of an attribute.
    pub(crate) fn columns(&self, attribute: &str) -> Vec<u64> {
        let (code, out, err) = self.ask("stat", &[attribute]);
        assert_eq!(code, Some(0), "{err}");
        out.split_whitespace().map(|word| word.parse().expect("a number")).collect()
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket, &self.name).expect("the disk is served")
    }

    /// Sends a signal, and waits for the end.
    pub(crate) fn end(mut self, signal: &str) -> Output {
        let child = self.child.take().expect("it was started");
        kill(signal, child.id().into());
        let output = child.wait_with_output().expect("it ends");
        fs::remove_file(&self.socket).ok();
        output
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
        fs::remove_file(&self.socket).ok();
    }
}

/// A client of the smallest kind: a request, its reply.
pub(crate) struct Client(UnixStream);

impl Client {
    fn connect(socket: &PathBuf, name: &str) -> io::Result<Client> {
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        let length = u32::try_from(name.len()).expect("a short name");
        let flags = 3_u32.to_be_bytes();
        let option =
            [&b"IHAVEOPT"[..], &1_u32.to_be_bytes(), &length.to_be_bytes(), name.as_bytes()];
        stream.write_all(&[&flags, &option.concat()[..]].concat())?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        Ok(Client(stream))
    }

    fn request(&mut self, kind: u16, at: u64, length: usize, data: &[u8]) -> io::Result<u32> {
        let length = u32::try_from(length).expect("a small request");
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &0_u16.to_be_bytes(),
            &kind.to_be_bytes(),
            &7_u64.to_be_bytes(),
            &at.to_be_bytes(),
            &length.to_be_bytes(),
        ];
        self.0.write_all(&head.concat())?;
        self.0.write_all(data)?;
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        Ok(u32::from_be_bytes(reply[4..8].try_into().expect("four bytes")))
    }

    /// The error of the protocol, 0 for none.
    pub(crate) fn write(&mut self, at: u64, data: &[u8]) -> io::Result<u32> {
        self.request(1, at, data.len(), data)
    }

    pub(crate) fn flush(&mut self) -> io::Result<u32> {
        self.request(3, 0, 0, &[])
    }

    pub(crate) fn read(&mut self, at: u64, length: usize) -> io::Result<Vec<u8>> {
        let error = self.request(0, at, length, &[])?;
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error.try_into().expect("a small number")));
        }
        let mut data = vec![0; length];
        self.0.read_exact(&mut data)?;
        Ok(data)
    }
}

/// A directory on a disk, where the build is.
fn place(options: &str) -> String {
    format!("{}{options}", scratch("contents").display())
}

/// Goal: a disk takes more than its memory, all of which comes back; the figures and attributes say what is where; and
/// nothing is left behind.
#[test]
fn a_disk_writes_back_what_memory_has_no_room_for() {
    let place = place(",size=64M");
    let options = ["--size", "64M", "--mem-limit", "4M", "--writeback", &place];
    let disk = Served::start("wider", &options);
    assert_eq!(disk.ask("stat", &["backing_dev"]).1, format!("{place}\n"));
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    let contents: Vec<Vec<u8>> = (0..128).map(|_| random.bytes(256 << 10)).collect();
    for (at, bytes) in (0_u64..).zip(&contents) {
        assert_eq!(client.write(at << 18, bytes).unwrap(), 0, "32 MiB in 4");
    }
    let [count, reads, writes] = disk.columns("bd_stat")[..] else { panic!("three columns") };
    assert_eq!(client.flush().unwrap(), 0);
    // What is on its way is in use, and not written yet.
    assert!(count > 28 << 8 && writes > 27 << 8 && reads == 0, "{count} {reads} {writes}");
    let room = disk.columns("writeback_stat");
    assert!(room.len() == 6 && room[3] > 27 << 8, "{room:?}");
    for (at, bytes) in (0_u64..).zip(&contents) {
        assert!(client.read(at << 18, 256 << 10).unwrap() == *bytes, "seed {}, at {at}", seed());
    }
    assert_eq!(client.read((5 << 18) + 512, 512).unwrap(), contents[5][512..1024]);
    let (_, out, _) = disk.ask("stat", &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(json["bd_reads"].as_u64() >= Some(28 << 8), "{out}");
    assert!(json["mem_used_max"].as_u64() <= Some((4 << 20) + (128 << 10)), "{out}");
    for request in ["writeback=huge", "writeback=page_indexes=0-99", "writeback_limit=9"] {
        let (code, _, err) = disk.ask("set", &[request]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{request}");
    }
    assert_eq!(disk.ask("stat", &["writeback_limit"]).1, "9\n");
    assert_eq!(disk.columns("mm_stat")[7], 0, "no huge unit is in memory");
    drop(client);
    let output = disk.end("TERM");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && err.contains("32M of contents are dropped"), "{err}");
}

/// Goal: a disk that is killed leaves nothing at the place that it has written to.
#[test]
fn a_killed_disk_leaves_nothing_on_its_place() {
    let directory = scratch("killed-place");
    let place = format!("{},size=16M", directory.display());
    let disk =
        Served::start("killed", &["--size", "64M", "--mem-limit", "1M", "--writeback", &place]);
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    for at in 0..16 {
        assert_eq!(client.write(at << 18, &random.bytes(256 << 10)).unwrap(), 0);
    }
    assert!(disk.columns("bd_stat")[0] > 0);
    disk.end("KILL");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    assert!(client.read(0, 512).is_err(), "nobody answers");
}

/// Goal: when memory and file are full, writes fail with "no space", and nothing else does.
#[test]
fn a_full_file_is_no_space() {
    const ENOSPC: u32 = 28;
    let place = place(",size=16M");
    let disk =
        Served::start("full", &["--size", "64M", "--mem-limit", "2M", "--writeback", &place]);
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    let mut written = Vec::new();
    let error = loop {
        let bytes = random.bytes(64 << 10);
        match client.write((written.len() as u64) << 16, &bytes).unwrap() {
            0 => written.push(bytes),
            error => break error,
        }
    };
    assert_eq!(error, ENOSPC);
    assert!((16 << 4..=18 << 4).contains(&written.len()), "{} of 64 KiB", written.len());
    for (at, bytes) in (0_u64..).zip(&written) {
        assert!(client.read(at << 16, 64 << 10).unwrap() == *bytes, "at {at}");
    }
}

#[test]
fn places_that_are_of_no_use_are_one_line() {
    for (options, status, part) in [
        (&["--writeback", "/nowhere"][..], 2, "--writeback: '/nowhere' does not exist"),
        (&["--writeback", "/dev/null"], 2, "--writeback: '/dev/null' is neither a directory nor"),
        (&["--writeback", "/dev/shm,size=64M"], 2, "whose files are memory"),
        (&["--writeback", "/var/tmp,size=1M"], 2, "'1M' is too small; accepted: 16M or more"),
        (&["--writeback", "/var/tmp,prio=x"], 2, "'x' is not a priority"),
        (&["--writeback-age", "60"], 2, "--writeback"),
        (&["--writeback", "/var/tmp", "--writeback-budget", "much"], 2, "'much' is not a budget"),
    ] {
        let disk = Served::named("refused");
        let output = disk.command(&[&["--size", "8M"], options].concat()).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{options:?}: {err}");
        assert!(err.contains(part) && err.lines().count() == 1, "{options:?}: {err}");
        assert!(output.stdout.is_empty() && !disk.socket.exists());
    }
    let disk = Served::start("without", &["--size", "8M"]);
    let (code, _, err) = disk.ask("set", &["writeback=idle"]);
    assert!(code == Some(2) && err.contains("give it one with --writeback"), "{err}");
    assert_eq!(disk.ask("stat", &["backing_dev"]).1, "none\n");
}
