//! Disks of tests, and a client that reads and writes them.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use zfolio_core::testing::Random;

use crate::run::first_line;
use crate::stage::{kill, output_of, scratch, zfolio};

/// A disk of a test, which ends when this is dropped: a child of this process, one in the background, or one of a
/// daemon.
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    child: Option<Child>,
}

impl Disk {
    /// Starts a disk with these options beside its name and address.
    pub(crate) fn start(name: &str, options: &[&str]) -> Disk {
        Disk::start_by(name, options, |command| command)
    }

    /// The same by another command, which is made from the one that starts it.
    pub(crate) fn start_by(
        name: &str,
        options: &[&str],
        by: impl FnOnce(Command) -> Command,
    ) -> Disk {
        let mut disk = Disk::named(name);
        let mut child = by(disk.command(options)).spawn().expect("it was built");
        let line = first_line(&mut child);
        assert!(line.starts_with(&format!("disk {}: ", disk.name)), "{line}");
        disk.child = Some(child);
        disk
    }

    /// Starts a disk in the background.
    pub(crate) fn add(name: &str, options: &[&str]) -> Disk {
        let disk = Disk::named(name);
        let (code, out, err) = disk.try_add(options);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
        let expected = format!("disk {}: 8M, lz4, units of 4K, at nbd+unix:///", disk.name);
        assert!(out.starts_with(&expected) && out.lines().count() == 1, "{out}");
        disk
    }

    pub(crate) fn try_add(&self, options: &[&str]) -> (Option<i32>, String, String) {
        let socket = self.socket.to_str().expect("a name of ours");
        let fixed = ["device", "add", &self.name, "--size", "8M", "--nbd", socket];
        output_of(&[&fixed, options].concat())
    }

    pub(crate) fn is_served(&self) -> bool {
        let mut greeting = [0; 8];
        UnixStream::connect(&self.socket)
            .and_then(|mut stream| stream.read_exact(&mut greeting))
            .is_ok()
            && &greeting == b"NBDMAGIC"
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("it is a child of this process").id()
    }

    /// Whether the process of the disk, a child of this one, has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut().expect("it is a child of this process");
        child.try_wait().expect("it is a child").is_some()
    }

    /// Names are of this process, since the disks of a user are listed together.
    pub(crate) fn named(name: &str) -> Disk {
        let name = format!("{name}-{}", std::process::id());
        Disk { socket: scratch("disks").join(format!("{name}.sock")), name, child: None }
    }

    pub(crate) fn command(&self, options: &[&str]) -> Command {
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
        Disk::client_of(&self.socket, &self.name)
    }

    /// A client of the disk of this name, whichever listens there.
    pub(crate) fn client_of(socket: &PathBuf, name: &str) -> Client {
        Client::connect(socket, name).expect("the disk is served")
    }

    /// Asserts that there is no disk with these options, and one line says why.
    pub(crate) fn refused(&self, options: &[&str], status: i32, part: &str) {
        let output = self.command(options).output().expect("it was built");
        let err = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(status), "{options:?}: {err}");
        assert!(err.contains(part) && err.lines().count() == 1, "{options:?}: {err}");
        assert!(output.stdout.is_empty() && !self.socket.exists());
        assert_eq!(self.ask("stat", &[]).0, Some(2), "there is no such disk");
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

impl Drop for Disk {
    fn drop(&mut self) {
        match self.child.take() {
            Some(mut child) => {
                child.kill().ok();
                child.wait().ok();
            }
            None => drop(self.ask("remove", &[])),
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

    pub(crate) fn request(
        &mut self,
        kind: u16,
        at: u64,
        length: usize,
        data: &[u8],
    ) -> io::Result<u32> {
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

/// Contents of every kind, with a number in each 4 KiB.
pub(crate) fn numbered(bytes: usize, number: u8) -> Vec<u8> {
    let mut random = Random::new(u64::from(number));
    let mut contents = vec![0; bytes];
    for (at, unit) in contents.chunks_mut(4096).enumerate() {
        match at % 4 {
            0 => unit.fill(number),
            1 => unit.fill_with(|| random.byte()),
            2 => unit[..1500].fill_with(|| random.byte()),
            _ => {}
        }
        unit[..2].copy_from_slice(&[number, u8::try_from(at % 251).expect("a byte")]);
    }
    contents
}

pub(crate) fn write_all(client: &mut Client, contents: &[u8]) {
    for (at, bytes) in (0_u64..).zip(contents.chunks(256 << 10)) {
        assert_eq!(client.write(at << 18, bytes).expect("it is connected"), 0);
    }
}

pub(crate) fn read_all(client: &mut Client, bytes: usize) -> Vec<u8> {
    let mut piece = |at: usize| client.read((at as u64) << 18, 256 << 10).expect("it can be read");
    (0..bytes >> 18).flat_map(&mut piece).collect()
}
