//! A disk of the daemon: its process, and what that prints.

use std::ffi::CString;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;

use zfolio_sys::probe::child::{Change, Program, Signals};

use super::settings::Settings;
use crate::device::serve::say;
use crate::notify;

/// A line of a disk that is longer is printed in pieces.
const LINE_BYTES_MAX: usize = 64 << 10;

/// How far a disk is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Clients cannot connect yet.
    Starting,
    /// Clients can connect.
    Served,
    /// There is no process: it has ended in order, or this is the status of the daemon for that.
    Ended(Option<u8>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) settings: Settings,
    pub(super) state: State,
    /// Its process, while there is one.
    pub(super) pid: Option<i32>,
    /// What it prints.
    output: Option<UnixStream>,
    /// The beginning of a line.
    partial: Vec<u8>,
    /// Why it does not start, if it has said that.
    why: Option<String>,
}

impl Disk {
    /// Starts the process of a disk. A disk that cannot be started has ended.
    pub(super) fn start(settings: Settings, signals: &Signals) -> Disk {
        let mut disk = Disk {
            settings,
            state: State::Ended(None),
            pid: None,
            output: None,
            partial: Vec::new(),
            why: None,
        };
        let options = match &disk.settings.options {
            Ok(options) => options,
            Err(why) => {
                say(why);
                disk.state = State::Ended(Some(2));
                return disk;
            }
        };
        match spawn(&disk.settings.words(options), signals) {
            Ok((pid, output)) => {
                (disk.pid, disk.output) = (Some(pid), Some(output));
                disk.state = State::Starting;
            }
            Err(error) => {
                say(&format!("disk {}: its process does not start: {error}", disk.name()));
                disk.state = State::Ended(Some(125));
            }
        }
        disk
    }

    pub(super) fn name(&self) -> &str {
        &self.settings.name
    }

    /// Whether there is a process.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.state, State::Ended(_))
    }

    /// The daemon's exit status on account of this disk, if it has failed.
    pub(super) fn failure(&self) -> Option<u8> {
        match self.state {
            State::Ended(status) => status,
            State::Starting | State::Served => None,
        }
    }

    /// Prints what the process has printed. Returns whether the disk is served from now on.
    pub(super) fn read(&mut self) -> bool {
        let before = self.state;
        let Some(mut output) = self.output.take() else { return false };
        let mut piece = [0; 4096];
        loop {
            match output.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => self.take(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.output = Some(output);
                    break;
                }
                Err(_) => break,
            }
        }
        self.state != before
    }

    fn take(&mut self, bytes: &[u8]) {
        self.partial.extend(bytes);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            self.pass_on(&String::from_utf8_lossy(&line[..end]));
        }
        if self.partial.len() > LINE_BYTES_MAX {
            let line = std::mem::take(&mut self.partial);
            self.pass_on(&String::from_utf8_lossy(&line));
        }
    }

    fn pass_on(&mut self, line: &str) {
        let Some(line) = line.strip_prefix("zfolio: ") else {
            // The first line that is none of these says that clients can connect.
            if self.state == State::Starting && line.starts_with(&format!("disk {}: ", self.name()))
            {
                self.state = State::Served;
            }
            // Nobody may read it any more.
            writeln!(io::stdout(), "{line}").ok();
            return;
        };
        // What does not name the disk is said with its name when it has ended.
        if self.state == State::Starting && !line.starts_with("disk ") {
            self.why = Some(line.to_owned());
        } else {
            say(line);
        }
    }

    /// What is lost when the process is killed, and whether it can start again. One that was never saved begins empty.
    fn lost(&self) -> String {
        let mut options = self.settings.options.iter().flatten();
        let file = options.find_map(|option| option.strip_prefix("--save="));
        match file.and_then(|file| fs::canonicalize(file).ok()) {
            Some(file) => format!(
                "what was written since '{0}' was saved is lost; it does not start again until '{0}.saving' is removed",
                file.display()
            ),
            None => "its contents are lost".to_owned(),
        }
    }

    /// Notes the end of the process, and says what it means.
    pub(super) fn note_end(&mut self, change: Change, is_asked: bool) {
        self.read();
        let why = self.why.take();
        let was_served = self.state == State::Served;
        let (name, at) = (self.name(), &self.settings.at);
        // Its status, or the signal that killed it.
        let end = match change {
            Change::Exited(status) => Ok(status),
            Change::Died(signal) | Change::Dumped(signal) | Change::Stopped(signal) => Err(signal),
        };
        let failure = match end {
            Ok(0) => None,
            // It has said why.
            Ok(status) if was_served => Some(u8::try_from(status).unwrap_or(125)),
            Err(signal) if was_served => {
                let lost = self.lost();
                say(&format!("disk {name} was killed by signal {signal}; {lost}"));
                Some(125)
            }
            _ if is_asked => None,
            end => {
                let why = why.unwrap_or_else(|| match end {
                    Ok(status) => format!("its process has ended with status {status}"),
                    Err(signal) => format!("its process was killed by signal {signal}"),
                });
                say(&format!("disk {name} ({at}) has not started: {why}"));
                Some(if end == Ok(2) { 2 } else { 125 })
            }
        };
        self.state = State::Ended(failure);
        (self.pid, self.output) = (None, None);
    }
}

/// Starts a process with these words. Returns its id, and what it prints.
fn spawn(words: &[String], signals: &Signals) -> io::Result<(i32, UnixStream)> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
    let path = text(std::env::current_exe()?.as_os_str().as_bytes())?;
    let arguments: Vec<CString> =
        words.iter().map(|word| text(word.as_bytes())).collect::<io::Result<_>>()?;
    // Only the daemon speaks to systemd.
    let environment = std::env::vars_os().filter(|(name, _)| name != notify::VARIABLE);
    let environment: Vec<CString> = environment
        .map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
        .collect::<io::Result<_>>()?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let pid = signals.start(&Program {
        path: &path,
        arguments: &arguments,
        environment: &environment,
        output: Some(theirs.as_fd()),
        // It ends in order, and saves its contents if it is to (`DMN-1`).
        orphaned: libc::SIGTERM,
    })?;
    Ok((pid, ours))
}
