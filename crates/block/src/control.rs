//! The control socket of a disk: other processes read and write its attributes, and stop it.
//!
//! ```text
//! request     one line: `read NAME`, `write NAME VALUE`, `save FILE`, `stop` or `stop unsaved`; NAME: an attribute, or
//!             `address`
//! reply       `ok` and a line break, then the value; or `refused` or `failed`, a space, and a line that says why
//! ```
//!
//! The value of `save` is how many units were saved, the bytes of their contents, the bytes of the file, and how many
//! of the units are lost. A disk that is to be saved when it ends answers `stop` once it is, or cannot be, or ends
//! without being saved since somebody else has asked for that; the others, and `stop unsaved`, at once.
//!
//! Each connection has one request. Who may connect to the socket may do everything: the directory in which the socket
//! lies decides who that is.
//!
//! # Concurrency
//!
//! A thread for each connection, `CONNECTIONS_MAX` at most: so a request that takes long (`recompress`) lets nobody
//! wait. The end of a disk waits for requests that have arrived, at most `END_PATIENCE`, so that each gets its
//! answer; those that take long end with the unit that they have. It does not wait for clients that have sent nothing.

use std::fmt::{self, Write as _};
use std::io::{self, BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use zfolio_core::sync::Mutex;
use zfolio_core::zram::Saved;
use zfolio_sys::eventfd::EventFd;

use crate::address::Address;
use crate::attributes::{self, Refusal};
use crate::clients::{Clients, Held, Protocol};
use crate::listen::{Listener, Unusable};
use crate::ram::Ram;
use crate::saved::{self, Kept};

/// The longest request.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// A client that sends nothing, or receives nothing, for so long is left.
const PATIENCE: Duration = Duration::from_secs(2);

/// Connections at once.
const CONNECTIONS_MAX: usize = 16;

/// So long a client waits for an answer, unless it has asked for what may take long; and for a place among those whose
/// connections the disk has not accepted yet.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// After so long without an answer to what may take long, the client is told of it: most requests have ended by then,
/// and nobody looks at a silent terminal for longer without asking why.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// What requests begin with that may take long. The text of `block_state` has a line for each unit.
const LONG: [&str; 4] = ["write ", "save ", "stop", "read block_state"];

/// The ranks of the locks of where clients connect, who asked for the end, and whether the disk is about to end: nobody
/// has two of them.
const RANK_ADDRESSES: u8 = 1;
const RANK_ASKED: u8 = 1;
const RANK_ENDING: u8 = 1;

/// The rank of the lock of the notes. A reset takes it while it holds that of the end.
const RANK_NOTES: u8 = 2;

/// So long the end of a disk waits for the answers to requests that have arrived.
const END_PATIENCE: Duration = Duration::from_secs(2);

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

/// Connects to the control socket at `path`. The process that listens there may be stopped, and so many clients may
/// have connected since that there is no room for one more: that is waited for, but not for ever.
///
/// # Errors
///
/// Nobody listens there; [`io::ErrorKind::TimedOut`]: there is no room for so long that the disk does not answer.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let family = AddressFamily::UNIX;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The time of a `connect` is that of a send. So it is this stream's for writes, too.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ANSWER_PATIENCE))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::AGAIN) => Err(nothing_came()),
        Err(error) => Err(error.into()),
    }
}

/// The disk does not answer.
fn nothing_came() -> io::Error {
    let why = format!("nothing for {} s", ANSWER_PATIENCE.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// Sends a request to the disk at `path`, and waits for the answer: for a few seconds, unless the request is to write,
/// to save or to end, or is for a long text.
///
/// # Errors
///
/// Nobody listens there, the connection broke, or the disk does not answer.
pub fn ask(path: &Path, request: &str) -> io::Result<Answer> {
    ask_and_say(path, request, || {})
}

/// The same. Calls `say` if a request that may take long has no answer after `SILENCE_MAX`, and waits on.
///
/// # Errors
///
/// As those of [`ask`].
pub fn ask_and_say(path: &Path, request: &str, say: impl FnOnce()) -> io::Result<Answer> {
    let mut stream = connect(path)?;
    let takes_long = LONG.iter().any(|word| request.starts_with(word));
    let patience = if takes_long { SILENCE_MAX } else { ANSWER_PATIENCE };
    stream.set_read_timeout(Some(patience))?;
    let sent = stream.write_all(format!("{request}\n").as_bytes());
    sent.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => nothing_came(),
        _ => error,
    })?;
    // What was read before the time was up stays in the buffer.
    let mut reply = Vec::new();
    let mut read = stream.read_to_end(&mut reply);
    if takes_long && read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
        say();
        stream.set_read_timeout(None)?;
        read = stream.read_to_end(&mut reply);
    }
    match read {
        Ok(_) if reply.is_empty() => {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(nothing_came()),
        Err(error) => return Err(error),
    }
    let reply = String::from_utf8(reply)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not the answer of a disk"))?;
    let (first, rest) = reply.split_once('\n').unwrap_or((&reply, ""));
    match first.split_once(' ') {
        None if first == "ok" => Ok(Answer::Done(rest.to_owned())),
        Some(("refused", why)) => Ok(Answer::Refused(why.to_owned())),
        Some(("failed", why)) => Ok(Answer::Failed(why.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not the answer of a disk")),
    }
}

/// What a client asks for that may be forbidden.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guarded {
    /// That the disk ends.
    End,
    /// That its contents are dropped. If nothing forbids it they are, at once.
    Reset,
}

/// Looks whether a disk may be ended or reset now. An error says in one line why it must not. What it holds otherwise
/// is let go when the contents are dropped.
pub type Guard = Box<dyn Fn(Guarded) -> Result<Vec<Held>, String> + Send + Sync>;

/// A control socket that is served. Dropping it ends that and removes the socket.
#[derive(Debug)]
pub struct Control {
    clients: Clients<Requests>,
}

struct Requests {
    ram: Arc<Ram>,
    /// Where clients connect; empty: nowhere yet, or no longer.
    addresses: Mutex<RANK_ADDRESSES, String>,
    /// What forbids the end and a reset.
    guard: OnceLock<Guard>,
    /// The file that the disk is saved in when it ends.
    kept: Option<Arc<Kept>>,
    /// What is saved with the contents. Each save has a handle of its own until its file is whole: so a reset sees it.
    notes: Mutex<RANK_NOTES, Arc<Vec<u8>>>,
    /// Rung when a client asks for the end.
    stop: EventFd,
    /// `None`: nobody has asked since the last one was taken.
    asked: Mutex<RANK_ASKED, Option<Asked>>,
    /// Whether no reset is accepted. Held until a reset that was accepted is done.
    is_ending: Mutex<RANK_ENDING, bool>,
    /// Why the disk ends without being saved, although it was to be.
    unsaved: OnceLock<String>,
}

/// Somebody has asked for the end of the disk. Dropping this says that it ends, as [`Control::note_unsaved`] says.
#[derive(Debug, Default)]
pub struct Asked {
    /// The contents are not needed.
    is_unsaved: bool,
    /// Who waits for an answer.
    waiting: Vec<mpsc::Sender<String>>,
}

impl Asked {
    /// Whether the disk is to be saved, if it has a file for that.
    #[must_use]
    pub fn is_saved(&self) -> bool {
        !self.is_unsaved
    }

    /// The disk does not end: says why.
    pub fn refuse(self, why: &str) {
        for client in self.waiting {
            // One that is gone need not know.
            client.send(why.to_owned()).ok();
        }
    }
}

impl Control {
    /// Listens at `path`, at which nothing may be but the socket of a process that has ended.
    ///
    /// # Errors
    ///
    /// [`Unusable::InUse`]: another process listens there. Others: the system's.
    pub fn start(path: &Path, ram: Arc<Ram>) -> Result<Control, Unusable> {
        Control::start_kept(path, ram, None)
    }

    /// The same for a disk that is saved in this file when it ends, if that is given: whoever asks for the end waits
    /// for that from the first connection on, and a client may save the disk there before.
    ///
    /// # Errors
    ///
    /// As [`Control::start`].
    pub fn start_kept(
        path: &Path,
        ram: Arc<Ram>,
        kept: Option<Arc<Kept>>,
    ) -> Result<Control, Unusable> {
        let failed = |error: io::Error| Unusable::System(path.display().to_string(), error);
        let listeners = Listener::open(&Address::Unix(path.to_owned()))?;
        let stop = EventFd::new().map_err(|error| failed(error.into()))?;
        let (guard, unsaved) = (OnceLock::new(), OnceLock::new());
        let (addresses, asked) = (Mutex::new(String::new()), Mutex::new(None));
        let (is_ending, notes) = (Mutex::new(false), Mutex::new(Arc::default()));
        let requests =
            Requests { ram, addresses, guard, kept, notes, stop, asked, is_ending, unsaved };
        let clients = Clients::start(listeners, CONNECTIONS_MAX, requests);
        Ok(Control { clients: clients.map_err(failed)? })
    }

    /// Where clients of the disk connect: several are separated by spaces. Empty: nowhere any more.
    pub fn set_addresses(&self, addresses: String) {
        *self.clients.protocol().addresses.lock() = addresses;
    }

    /// Asked before a client may end or reset the disk, which is served now: before this call there is no reset. The
    /// first call counts.
    pub fn set_guard(&self, guard: Guard) {
        self.clients.protocol().guard.set(guard).ok();
    }

    /// The clients have left, and this is what those have to know that serve the disk when it goes on
    /// ([`Kept::save`]): from now on it is in each file that the disk is saved in, until the disk is reset.
    pub fn set_notes(&self, notes: Vec<u8>) {
        *self.clients.protocol().notes.lock() = Arc::new(notes);
    }

    /// What [`Control::set_notes`] was given, unless the disk was reset since.
    #[must_use]
    pub fn notes(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.clients.protocol().notes.lock())
    }

    /// Says whether the disk is about to end: then no client may reset it, since it may be saved, and the kernel may
    /// still write to it. Waits for a reset that is under way. To be called before the servers end: until then the
    /// guard says whether the disk is in use.
    pub fn set_ending(&self, is_ending: bool) {
        *self.clients.protocol().is_ending.lock() = is_ending;
    }

    /// The disk ends, and was not saved although it has a file for that: whoever waits for its end, or asks for it from
    /// now on, is told why. The first call counts.
    pub fn note_unsaved(&self, why: &str) {
        self.clients.protocol().unsaved.set(why.to_owned()).ok();
    }

    /// Waits for a client that asks for the end, for so many milliseconds. The caller may go on, and call this again.
    #[must_use]
    pub fn stop_within(&self, milliseconds: u16) -> Option<Asked> {
        let Requests { stop, asked, .. } = self.clients.protocol();
        // Whoever asks after this rings again.
        stop.wait(milliseconds).then(|| stop.clear())?;
        // Nobody, if it is the ring of a client that the last call has taken with another one.
        asked.lock().take()
    }

    /// Whether a client has asked for the end without a save, which [`Control::stop_within`] has not returned yet.
    #[must_use]
    pub fn is_unsaved_asked(&self) -> bool {
        self.clients.protocol().asked.lock().as_ref().is_some_and(|asked| asked.is_unsaved)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // It removes the socket.
        self.clients.close();
        // Who waits for an answer gets it: the disk ends.
        drop(self.stop_within(0));
        // A save ends without a file, which it removes.
        self.clients.protocol().ram.zram().halt();
        // What a client has sent is still read, and answered; one that has sent nothing is at its end.
        self.clients.end(|stream| {
            stream.shutdown(Shutdown::Read).ok();
        });
        self.clients.wait_until_none(END_PATIENCE);
    }
}

impl Protocol for Requests {
    const NAME: &'static str = "control";

    type Stream = UnixStream;

    fn open(&self, socket: OwnedFd, _: &Listener) -> UnixStream {
        socket.into()
    }

    fn serve(&self, stream: &Arc<UnixStream>) {
        // A client that is gone gets no answer.
        self.answer(stream).ok();
    }
}

impl Requests {
    fn answer(&self, mut stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(stream.take(REQUEST_BYTES_MAX as u64)).read_line(&mut line)?;
        // Without a line break it is a part of a request, whose client was killed or sends too much: as if empty.
        let line = line.strip_suffix('\n').unwrap_or_default();
        if let Some(path) = line.strip_prefix("save ") {
            return stream.write_all(self.save(Path::new(path)).as_bytes());
        }
        if let Some(value) = line.strip_prefix("write reset ") {
            return stream.write_all(self.reset(value).as_bytes());
        }
        let guard = line.strip_prefix("stop").and_then(|_| self.guard.get());
        if let Some(Err(why)) = guard.map(|guard| guard(Guarded::End)) {
            return stream.write_all(format!("refused {why}\n").as_bytes());
        }
        if line == "read block_state" {
            return self.send_block_state(stream);
        }
        let mut words = line.splitn(3, ' ');
        let (verb, name, value) = (words.next(), words.next().unwrap_or(""), words.next());
        let done = match (verb, value) {
            (Some("read"), None) if name == "address" => {
                let all = self.addresses.lock().clone();
                Ok(if all.is_empty() { all } else { all + "\n" })
            }
            (Some("read"), None) => attributes::read(&self.ram, name),
            (Some("write"), Some(value)) => {
                attributes::write(&self.ram, name, value).map(|()| String::new())
            }
            (Some("stop"), None) if name.is_empty() => return self.end(stream, true),
            (Some("stop"), None) if name == "unsaved" => return self.end(stream, false),
            _ => return stream.write_all(b"refused not a request\n"),
        };
        stream.write_all(reply(done).as_bytes())
    }

    /// Sends `block_state` as it is made: all of it would be 40 bytes for each unit, for each client.
    fn send_block_state(&self, stream: &UnixStream) -> io::Result<()> {
        let mut text = Text { to: BufWriter::new(stream), failed: None };
        let made = text.write_str("ok\n").and_then(|()| self.ram.zram().block_state(&mut text));
        match (made, text.failed) {
            (Err(_), Some(error)) => {
                // Without another try to send what it holds.
                drop(text.to.into_parts());
                Err(error)
            }
            _ => text.to.flush(),
        }
    }

    /// Resets the disk, unless that is forbidden, and returns the reply.
    fn reset(&self, value: &str) -> String {
        // The guard has forgotten whose the contents are once it has allowed it: then nothing may be wrong any more.
        if let Err(refusal) = attributes::check_reset(value) {
            return reply(Err(refusal));
        }
        // Else the end could begin between this look and the reset, and save a part of what is dropped.
        let is_ending = self.is_ending.lock();
        let held = match self.guard.get() {
            _ if *is_ending => Err("the disk is about to end".to_owned()),
            // Its servers start, and nobody can say yet whether clients are there.
            None => Err("the disk is not served yet; accepted: once it is".to_owned()),
            Some(guard) => guard(Guarded::Reset),
        };
        // Held until the contents are gone: a client that connected before would see a part of them go.
        match held.and_then(|held| self.forget_notes().map(|()| held)) {
            Err(why) => format!("refused {why}\n"),
            Ok(_held) => {
                reply(attributes::write(&self.ram, "reset", value).map(|()| String::new()))
            }
        }
    }

    /// Forgets the notes, since the contents are dropped and nobody may go on with them. An error: a file is being
    /// written that has the notes already.
    fn forget_notes(&self) -> Result<(), String> {
        let mut notes = self.notes.lock();
        if !notes.is_empty() && Arc::strong_count(&notes) > 1 {
            return Err("the disk is being saved; accepted: once that is done".to_owned());
        }
        *notes = Arc::default();
        Ok(())
    }

    /// Has the disk end, and answers.
    fn end(&self, mut stream: &UnixStream, saves: bool) -> io::Result<()> {
        if !saves || self.kept.is_none() {
            // This process may end as soon as it rings: the client gets its answer before. One that is gone has asked
            // for the end all the same.
            let answered = stream.write_all(b"ok\n");
            self.asked.lock().get_or_insert_default().is_unsaved |= !saves;
            self.stop.ring();
            return answered;
        }
        let (client, answer) = mpsc::channel();
        self.asked.lock().get_or_insert_default().waiting.push(client);
        self.stop.ring();
        // A disk that ends says so to nobody in particular.
        let refused = answer.recv().ok().or_else(|| self.unsaved.get().cloned());
        match refused {
            Some(why) => stream.write_all(format!("failed {why}\n").as_bytes()),
            None => stream.write_all(b"ok\n"),
        }
    }

    /// Saves the disk, and returns the reply.
    fn save(&self, path: &Path) -> String {
        let notes = Arc::clone(&self.notes.lock());
        match saved::save_with(&self.ram, path, self.kept.as_deref(), &notes) {
            Ok(Saved { units, bytes, lost, .. }) => {
                let contents = units * self.ram.zram().unit().bytes() as u64;
                format!("ok\n{units} {contents} {bytes} {lost}\n")
            }
            Err(error) if error.is_about_the_name() => format!("refused {error}\n"),
            Err(error) => format!("failed {error}\n"),
        }
    }
}

/// Text that goes to a client.
struct Text<'s> {
    to: BufWriter<&'s UnixStream>,
    failed: Option<io::Error>,
}

impl fmt::Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.to.write_all(text.as_bytes()).map_err(|error| {
            self.failed = Some(error);
            fmt::Error
        })
    }
}

/// The reply to a request for an attribute.
fn reply(done: Result<String, Refusal>) -> String {
    match done {
        // In front of the value, which may be too large to be copied.
        Ok(mut value) => {
            value.insert_str(0, "ok\n");
            value
        }
        Err(refusal @ Refusal::Failed { .. }) => format!("failed {refusal}\n"),
        Err(refusal) => format!("refused {refusal}\n"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::{Answer, Control, ask};
    use crate::device::Device as _;
    use crate::listen::Unusable;
    use crate::saved::Kept;
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
        assert_eq!(ask(&path, "read address").unwrap(), Answer::Done(String::new()));
        control.set_addresses("a b".to_owned());
        assert_eq!(ask(&path, "read address").unwrap(), Answer::Done("a b\n".to_owned()));
        control.set_addresses(String::new());
        assert_eq!(ask(&path, "read address").unwrap(), Answer::Done(String::new()));
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
        // Of a request that breaks off nothing is done.
        for part in ["write mem_limit 2M", "stop"] {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(part.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "refused not a request\n", "{part}");
        }
        assert_eq!(ask(&path, "read mem_limit").unwrap(), Answer::Done("1048576\n".to_owned()));
        assert!(control.stop_within(0).is_none());
        assert_eq!(ask(&path, "stop").unwrap(), Answer::Done(String::new()));
        assert!(control.stop_within(1000).is_some());
        drop(control);
        assert!(!path.exists() && ask(&path, "read disksize").is_err());
    }

    /// Goal: a disk whose process is stopped keeps no client waiting for ever, however many have connected before. The
    /// one that found no room waited. Method: a socket with room for few, on which nobody accepts.
    #[test]
    fn a_disk_that_accepts_nobody_does_not_answer() {
        let path = path("full");
        let flags = SocketFlags::CLOEXEC;
        let full =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let (say, said) = std::sync::mpsc::channel();
        let at = path.clone();
        std::thread::spawn(move || {
            let _before: Vec<_> = (0..3).map_while(|_| super::connect(&at).ok()).collect();
            say.send(ask(&at, "stop")).ok();
        });
        let answer = said.recv_timeout(Duration::from_secs(60)).expect("it does not wait for ever");
        std::fs::remove_file(&path).unwrap();
        let error = answer.unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (ErrorKind::TimedOut, "nothing for 2 s")
        );
    }

    /// Goal: whoever asks a disk to end that does not answer, or for its largest text, is told of that, and gets the
    /// answer that comes later. The text took longer than the client had patience. Method: a disk that answers when the
    /// client has been told.
    #[test]
    fn silence_before_an_answer_that_takes_long_is_told() {
        for request in ["stop", "read block_state"] {
            silence_is_told(request);
        }
    }

    fn silence_is_told(request: &'static str) {
        let path = path("silence");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (told, hears) = std::sync::mpsc::channel();
        let disk = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Closing a socket with unread bytes would reset the connection.
            stream.read_exact(&mut vec![0; request.len() + 1]).unwrap();
            hears.recv().unwrap();
            stream.write_all(b"ok\n").unwrap();
        });
        let answer = super::ask_and_say(&path, request, move || told.send(()).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(answer.unwrap(), Answer::Done(String::new()));
        disk.join().unwrap();
    }

    /// Goal: a disk that is in use is neither ended nor reset, and everything else goes on. Method: a guard that says
    /// so, until it does not.
    #[test]
    fn a_guarded_disk_is_not_ended() {
        let path = path("guard");
        let control = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        let is_used = Arc::new(AtomicBool::new(true));
        let used = Arc::clone(&is_used);
        control.set_guard(Box::new(move |asked| {
            let is_free = !used.load(Relaxed);
            is_free.then(Vec::new).ok_or_else(|| format!("it is in use: {asked:?}"))
        }));
        for (request, asked) in [("stop", "End"), ("write reset 1", "Reset")] {
            let refused = Answer::Refused(format!("it is in use: {asked}"));
            assert_eq!(ask(&path, request).unwrap(), refused, "{request}");
        }
        // What is no reset does not come to the guard, which may forget something for one.
        let accepted = "reset: '0' is not accepted; accepted: 1, or another positive number";
        let wrong = Answer::Refused(accepted.to_owned());
        assert_eq!(ask(&path, "write reset 0").unwrap(), wrong);
        assert_eq!(ask(&path, "write mem_limit 1M").unwrap(), Answer::Done(String::new()));
        assert!(control.stop_within(0).is_none());
        is_used.store(false, Relaxed);
        // Nobody is on it any more, but it may be saved.
        control.set_ending(true);
        let ends = Answer::Refused("the disk is about to end".to_owned());
        assert_eq!(ask(&path, "write reset 1").unwrap(), ends);
        control.set_ending(false);
        assert_eq!(ask(&path, "write reset 1").unwrap(), Answer::Done(String::new()));
        assert_eq!(ask(&path, "stop").unwrap(), Answer::Done(String::new()));
        assert!(control.stop_within(1000).is_some());
    }

    /// Goal: there is no reset before somebody can say whether clients are connected: the servers start a moment after
    /// the control socket, and it emptied the disk under the first client. Everything else is served.
    #[test]
    fn a_disk_that_is_not_served_yet_is_not_reset() {
        let path = path("early");
        let disk = Arc::new(ram(1 << 20, &["lz4"]));
        disk.write(0, &[1; 4096]).unwrap();
        let control = Control::start(&path, Arc::clone(&disk)).unwrap();
        let early = Answer::Refused("the disk is not served yet; accepted: once it is".to_owned());
        assert_eq!(ask(&path, "write reset 1").unwrap(), early);
        assert_eq!(disk.zram().mm_stat().orig_data_size, 4096);
        assert_eq!(ask(&path, "write mem_limit 1M").unwrap(), Answer::Done(String::new()));
        control.set_guard(Box::new(|_| Ok(Vec::new())));
        assert_eq!(ask(&path, "write reset 1").unwrap(), Answer::Done(String::new()));
        assert_eq!(disk.zram().mm_stat().orig_data_size, 0);
    }

    /// Goal: a disk that its clients have left is saved with their notes wherever that is, until it is reset; and no
    /// reset comes in the middle of such a save. A guest was refused by what had all that it had written.
    #[test]
    fn notes_are_saved_until_a_reset() {
        let path = path("notes");
        let file = path.with_extension("disk");
        let control = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        control.set_guard(Box::new(|_| Ok(Vec::new())));
        let saved = || {
            let asked = ask(&path, &format!("save {}", file.display())).unwrap();
            assert!(matches!(asked, Answer::Done(_)), "{asked:?}");
            crate::saved::open(&file).unwrap().header().notes.clone()
        };
        assert!(saved().is_empty());
        control.set_notes(vec![0, 0, 5, 0]);
        assert_eq!(saved(), [0, 0, 5, 0]);
        let save = control.notes();
        let busy = "the disk is being saved; accepted: once that is done";
        assert_eq!(ask(&path, "write reset 1").unwrap(), Answer::Refused(busy.to_owned()));
        assert_eq!(*save, [0, 0, 5, 0]);
        drop(save);
        assert_eq!(ask(&path, "write reset 1").unwrap(), Answer::Done(String::new()));
        assert!(saved().is_empty() && control.notes().is_empty());
        std::fs::remove_file(&file).unwrap();
    }

    /// Goal: the end of a disk waits for a reset that has begun, also for one that only looks yet whether it may: a
    /// save beside a reset had some units and not others, and once the servers end nothing says that the disk is in
    /// use. Method: a guard that takes its time.
    #[test]
    fn the_end_waits_for_a_reset_under_way() {
        let path = path("reset");
        let disk = Arc::new(ram(1 << 20, &["lz4"]));
        disk.write(0, &vec![1; 8192]).unwrap();
        let control = Control::start(&path, Arc::clone(&disk)).unwrap();
        let (looks, begins) = std::sync::mpsc::channel();
        let (say, may) = std::sync::mpsc::channel();
        let may = zfolio_core::sync::Mutex::<9, _>::new(may);
        control.set_guard(Box::new(move |_| {
            looks.send(()).unwrap();
            may.lock().recv().unwrap()
        }));
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reset = scope.spawn(|| ask(&path, "write reset 1").unwrap());
            begins.recv().unwrap();
            let left = scope.spawn(|| {
                control.set_ending(true);
                has_ended.store(true, Relaxed);
                disk.zram().mm_stat().orig_data_size
            });
            // Where nothing waits this is where it shows.
            std::thread::sleep(Duration::from_millis(100));
            let is_early = has_ended.load(Relaxed);
            say.send(Ok(Vec::new())).unwrap();
            assert_eq!(reset.join().unwrap(), Answer::Done(String::new()));
            assert_eq!((is_early, left.join().unwrap()), (false, 0));
        });
        let ends = Answer::Refused("the disk is about to end".to_owned());
        assert_eq!(ask(&path, "write reset 1").unwrap(), ends);
    }

    /// Goal: one disk at one path; the socket of a dead one is replaced; a client that sends nothing keeps nobody
    /// waiting for long.
    #[test]
    fn a_path_has_one_disk() {
        let path = path("one");
        let first = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        let second = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"])));
        assert!(matches!(second, Err(Unusable::InUse(_))), "{second:?}");
        let mut idle = UnixStream::connect(&path).unwrap();
        idle.write_all(b"read disk").unwrap();
        assert!(matches!(ask(&path, "read disksize"), Ok(Answer::Done(_))));
        // As that of a process that was killed.
        drop(first);
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let third = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        assert!(matches!(ask(&path, "read disksize"), Ok(Answer::Done(_))));
        // Somebody has removed its socket: it ends all the same.
        std::fs::remove_file(&path).unwrap();
        drop(third);
    }

    /// Goal: who asks for the end of a disk that is to be saved learns that it could not be, and may ask again; who
    /// needs no contents need not wait.
    #[test]
    fn the_end_of_a_disk_that_is_saved_can_be_refused() {
        let path = path("kept");
        let kept = Kept::take(&path.with_extension("disk")).unwrap();
        let disk = Arc::new(ram(1 << 20, &["lz4"]));
        let control = Control::start_kept(&path, disk, Some(Arc::new(kept))).unwrap();
        let stop = || ask(&path, "stop").unwrap();
        let next = |control: &Control| control.stop_within(10_000).expect("somebody asks");
        std::thread::scope(|scope| {
            let refused = [scope.spawn(stop), scope.spawn(stop)];
            // They may come together or not.
            while refused.iter().any(|client| !client.is_finished()) {
                if let Some(asked) = control.stop_within(10) {
                    assert!(asked.is_saved());
                    asked.refuse("no room");
                }
            }
            for client in refused {
                assert_eq!(client.join().unwrap(), Answer::Failed("no room".to_owned()));
            }
            // As that of the second one, if the first ring has brought both. It made an end that nobody had asked for.
            control.clients.protocol().stop.ring();
            assert!(control.stop_within(0).is_none(), "the disk has just said that it stays");
            assert!(!control.is_unsaved_asked());
            let ended = scope.spawn(stop);
            drop(next(&control));
            assert_eq!(ended.join().unwrap(), Answer::Done(String::new()));
            assert_eq!(ask(&path, "stop unsaved").unwrap(), Answer::Done(String::new()));
            while !control.is_unsaved_asked() {
                std::thread::yield_now();
            }
            assert!(!next(&control).is_saved());
            // The end comes by a signal: they are answered all the same.
            let late = scope.spawn(stop);
            while !control.clients.protocol().stop.wait(10_000) {}
            drop(control);
            assert_eq!(late.join().unwrap(), Answer::Done(String::new()));
        });
    }

    /// Goal: who waits for the end of a disk that is to be saved is not told that all is well if it ends unsaved, since
    /// another client has asked for that: his contents are gone. Method: two clients, of whom the disk hears at once.
    #[test]
    fn who_waits_for_a_save_learns_that_there_is_none() {
        let path = path("unsaved");
        let kept = Kept::take(&path.with_extension("disk")).unwrap();
        let disk = Arc::new(ram(1 << 20, &["lz4"]));
        let control = Control::start_kept(&path, disk, Some(Arc::new(kept))).unwrap();
        assert_eq!(ask(&path, "stop unsaved").unwrap(), Answer::Done(String::new()));
        std::thread::scope(|scope| {
            let clients = [scope.spawn(|| ask(&path, "stop")), scope.spawn(|| ask(&path, "stop"))];
            let await_waiting = |count| {
                let asked = || control.clients.protocol().asked.lock();
                while asked().as_ref().is_none_or(|asked| asked.waiting.len() < count) {
                    std::thread::yield_now();
                }
            };
            await_waiting(2);
            let asked = control.stop_within(10_000).expect("they have asked");
            assert!(!asked.is_saved());
            control.note_unsaved("not saved");
            drop(asked);
            for client in clients {
                let answer = client.join().unwrap().unwrap();
                assert_eq!(answer, Answer::Failed("not saved".to_owned()));
            }
            // Who comes before the disk has gone.
            let late = scope.spawn(|| ask(&path, "stop"));
            await_waiting(1);
            drop(control);
            assert_eq!(late.join().unwrap().unwrap(), Answer::Failed("not saved".to_owned()));
        });
    }

    /// Goal: who asks for the end gets an answer, however soon the process ends after that. Method: a client that does
    /// not read yet, so that the answer has no room: the end must not be asked for before it has.
    #[test]
    fn the_end_is_answered_before_it_begins() {
        let path = path("end");
        let control = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"stop\n").unwrap();
        theirs.set_nonblocking(true).unwrap();
        // Small pieces, so that not even the answer fits in behind them.
        let mut room = 0;
        while let Ok(written) = theirs.write(&[b'.'; 3]) {
            room += written;
        }
        theirs.set_nonblocking(false).unwrap();
        std::thread::scope(|scope| {
            let answers = scope.spawn(|| control.clients.protocol().answer(&theirs));
            // Where the order is wrong this is where it shows.
            assert!(control.stop_within(100).is_none(), "it ends, and has not answered");
            ours.read_exact(&mut vec![0; room]).unwrap();
            let mut answer = [0; 3];
            ours.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"ok\n");
            answers.join().unwrap().unwrap();
        });
        assert!(control.stop_within(1000).is_some());
        // A client that is gone gets no answer, and the end comes all the same.
        let second = Control::start(&path.with_extension("2"), Arc::new(ram(1 << 20, &["lz4"])));
        let second = second.unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"stop\n").unwrap();
        drop(ours);
        second.clients.protocol().answer(&theirs).unwrap_err();
        assert!(second.stop_within(1000).is_some());
    }

    /// Goal: the end waits for an answer that is under way. Method: one that is longer than the socket has room for,
    /// and a client that reads the rest of it late.
    #[test]
    fn the_end_waits_for_an_answer_under_way() {
        let path = path("under-way");
        let disk = ram(64 << 20, &["lz4"]);
        (0..16 << 10).for_each(|at| disk.write(at << 12, &[1; 4096]).unwrap());
        let control = Control::start(&path, Arc::new(disk)).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"read block_state\n").unwrap();
        let mut begin = [0; 3];
        client.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"ok\n");
        let has_ended = AtomicBool::new(false);
        let mut rest = String::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(control);
                has_ended.store(true, Relaxed);
            });
            while path.exists() {
                std::thread::yield_now();
            }
            // Where nothing waits this is where it shows.
            std::thread::sleep(Duration::from_millis(100));
            assert!(!has_ended.load(Relaxed), "it has ended before its answer was sent");
            client.read_to_string(&mut rest).unwrap();
        });
        assert_eq!(rest.lines().count(), 16 << 10);
    }

    /// Goal: `block_state` is sent as it is made. Method: a unit that is dropped while the text has no room to be sent.
    #[test]
    fn a_long_text_is_sent_as_it_is_made() {
        let path = path("text");
        let disk = Arc::new(ram(64 << 20, &["lz4"]));
        (0..16 << 10).for_each(|at| disk.write(at << 12, &[1; 4096]).unwrap());
        let control = Control::start(&path, Arc::clone(&disk)).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"read block_state\n").unwrap();
        let mut begin = [0; 3];
        client.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"ok\n");
        // 640 KB are three times as much as the sockets have room for.
        disk.discard((64 << 20) - 4096, 4096).unwrap();
        let mut rest = String::new();
        client.read_to_string(&mut rest).unwrap();
        assert_eq!(rest.lines().count(), (16 << 10) - 1);
        drop(control);
    }

    /// Goal: a request that takes long keeps neither others waiting nor the end.
    #[test]
    fn a_long_request_keeps_nobody_waiting() {
        let path = path("long");
        let control = Control::start(&path, Arc::new(ram(1 << 20, &["lz4"]))).unwrap();
        // Requests that are never finished stand for it: each has a thread until its client is left.
        let long: Vec<_> = (0..4).map(|_| UnixStream::connect(&path).unwrap()).collect();
        assert!(matches!(ask(&path, "read disksize"), Ok(Answer::Done(_))));
        drop(control);
        assert!(!path.exists());
        drop(long);
    }
}
