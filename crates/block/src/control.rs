//! The control socket of a disk: other processes read and write its attributes, and stop it.
//!
//! ```text
//! request     one line: `read NAME`, `write NAME VALUE` or `stop`
//! reply       `ok` and a line break, then the value; or `refused` or `failed`, a space, and a line that says why
//! ```
//!
//! Each connection has one request. Who may connect to the socket may do everything: the directory in which the socket
//! lies decides who that is.
//!
//! # Concurrency
//!
//! One thread serves one connection after the other, so that a request which takes long (`recompress`) lets others wait.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use zfolio_sys::eventfd::EventFd;

use crate::attributes::{self, Refusal};
use crate::ram::Ram;

/// The longest request.
const REQUEST_BYTES_MAX: u64 = 4096;

/// A client that sends nothing, or receives nothing, for so long is left.
const PATIENCE: Duration = Duration::from_secs(2);

/// So long a client waits for a value.
const READ_PATIENCE: Duration = Duration::from_secs(5);

/// What a disk answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The value, or nothing.
    Done(String),
    /// The request is wrong.
    Refused(String),
    /// The disk could not do it.
    Failed(String),
}

/// Sends a request to the disk at `path`, and waits for the answer; for a value that is read for a few seconds at most.
///
/// # Errors
///
/// Nobody listens there, the connection broke, or it took too long: the disk has another request that takes long.
pub fn ask(path: &Path, request: &str) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(path)?;
    if request.starts_with("read ") {
        stream.set_read_timeout(Some(READ_PATIENCE))?;
    }
    stream.write_all(request.as_bytes())?;
    stream.write_all(b"\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (first, rest) = reply.split_once('\n').unwrap_or((&reply, ""));
    match first.split_once(' ') {
        None if first == "ok" => Ok(Answer::Done(rest.to_owned())),
        Some(("refused", why)) => Ok(Answer::Refused(why.to_owned())),
        Some(("failed", why)) => Ok(Answer::Failed(why.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not the answer of a disk")),
    }
}

/// A control socket that is served. Dropping it ends that and removes the socket.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    ram: Arc<Ram>,
    ends: AtomicBool,
    /// Rung when a client asks for the end.
    stop: EventFd,
}

impl Control {
    /// Listens at `path`, at which nothing may be but the socket of a process that has ended.
    ///
    /// # Errors
    ///
    /// `AddrInUse`: another process listens there. Others: the system's.
    pub fn start(path: &Path, ram: Arc<Ram>) -> io::Result<Control> {
        if UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let shared = Arc::new(Shared { ram, ends: AtomicBool::new(false), stop: EventFd::new()? });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("control".to_owned());
        let thread = thread.spawn(move || for_thread.serve(&listener))?;
        Ok(Control { path: path.to_owned(), shared, thread: Some(thread) })
    }

    /// Whether a client has asked for the end; waits for that for so many milliseconds.
    #[must_use]
    pub fn stop_within(&self, milliseconds: u16) -> bool {
        self.shared.stop.wait(milliseconds)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        // The thread waits for a connection.
        UnixStream::connect(&self.path).ok();
        std::fs::remove_file(&self.path).ok();
        self.thread.take().into_iter().for_each(|thread| _ = thread.join().ok());
    }
}

impl Shared {
    fn serve(&self, listener: &UnixListener) {
        for stream in listener.incoming() {
            if self.ends.load(Relaxed) {
                return;
            }
            match stream {
                // A client that is gone gets no answer.
                Ok(stream) => _ = self.answer(stream).ok(),
                // No descriptor or memory: later.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn answer(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new((&stream).take(REQUEST_BYTES_MAX)).read_line(&mut line)?;
        let mut words = line.trim_end().splitn(3, ' ');
        let (verb, name, value) = (words.next(), words.next().unwrap_or(""), words.next());
        let done = match (verb, value) {
            (Some("read"), None) => attributes::read(&self.ram, name),
            (Some("write"), Some(value)) => {
                attributes::write(&self.ram, name, value).map(|()| String::new())
            }
            (Some("stop"), None) if name.is_empty() => {
                self.stop.ring();
                Ok(String::new())
            }
            _ => return (&stream).write_all(b"refused not a request\n"),
        };
        let reply = match done {
            Ok(value) => format!("ok\n{value}"),
            Err(refusal @ Refusal::Failed { .. }) => format!("failed {refusal}\n"),
            Err(refusal) => format!("refused {refusal}\n"),
        };
        (&stream).write_all(reply.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::{Answer, Control, ask};
    use crate::testing::ram;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("zfolio-control-{name}-{}", std::process::id()))
    }

    /// Goal: attributes go through the socket as they are; what is wrong is refused; a stop is noticed.
    #[test]
    fn attributes_go_through_the_socket() {
        let path = path("attributes");
        let control = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        assert_eq!(ask(&path, "read disksize").unwrap(), Answer::Done("1048576\n".to_owned()));
        assert_eq!(ask(&path, "write mem_limit 1M").unwrap(), Answer::Done(String::new()));
        assert_eq!(ask(&path, "read mem_limit").unwrap(), Answer::Done("1048576\n".to_owned()));
        for wrong in
            ["", "read", "write", "write mem_limit", "read a b", "stop now", &"x".repeat(9000)]
        {
            // A request that is too long may end the connection before all of it was sent.
            let refused =
                ask(&path, wrong).map_or(true, |answer| matches!(answer, Answer::Refused(_)));
            assert!(refused, "{wrong}");
        }
        assert!(!control.stop_within(0));
        assert_eq!(ask(&path, "stop").unwrap(), Answer::Done(String::new()));
        assert!(control.stop_within(1000));
        drop(control);
        assert!(!path.exists() && ask(&path, "read disksize").is_err());
    }

    /// Goal: one disk at one path; the socket of a dead one is replaced; a client that sends nothing keeps nobody waiting
    /// for long.
    #[test]
    fn a_path_has_one_disk() {
        let path = path("one");
        let first = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        let second = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"])));
        assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
        let mut idle = UnixStream::connect(&path).unwrap();
        idle.write_all(b"read disk").unwrap();
        assert!(matches!(ask(&path, "read disksize"), Ok(Answer::Done(_))));
        // The socket stays behind, as that of a process that was killed.
        std::mem::forget(std::fs::hard_link(&path, path.with_extension("dead")));
        drop(first);
        std::fs::rename(path.with_extension("dead"), &path).unwrap();
        let third = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        assert!(matches!(ask(&path, "read disksize"), Ok(Answer::Done(_))));
        drop(third);
    }
}
