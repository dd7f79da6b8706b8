//! `zfolio device`: compressed disks in memory, each served by a process of its own.
//!
//! The process of a disk listens on its control socket, `/dev/shm/zfolio-UID/device.NAME`, through which the other
//! commands read and write its attributes, and stop it. The directory belongs to the user alone (`SF-1`).

mod arguments;
mod background;
mod daemon;
mod list;
mod saved;
mod serve;

use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use zfolio_block::control::{self, Answer};
use zfolio_block::listen;
use zfolio_sys::{probe, process};
use zfolio_workers::HARDWARE_STATS;

use crate::failure::Failure;
use crate::output;
use crate::stats_file;

pub(crate) use arguments::DeviceArgs;
use arguments::{Command, RemoveArgs, StatArgs};

/// What the names of control sockets begin with.
const PREFIX: &str = "device.";

/// How long to wait for a disk to end; and for its process after that, which may have much memory to free.
const STOP_TURNS: u32 = 500;
const END_TURNS: u32 = 3000;
const STOP_TURN: Duration = Duration::from_millis(20);

/// How long to wait for a disk that has ended a connection without an answer.
const ENDING_TURNS: u32 = 50;

/// Runs one of the commands.
///
/// # Errors
///
/// See each.
pub(crate) fn device(arguments: &DeviceArgs) -> Result<ExitCode, Failure> {
    match &arguments.command {
        Command::Add(arguments) => background::add(arguments),
        Command::Run(arguments) => serve::run(arguments),
        Command::Daemon(arguments) => daemon::daemon(arguments),
        Command::List(arguments) => list::list(arguments),
        Command::Stat(arguments) => stat(arguments),
        Command::Set(arguments) => {
            for (name, value) in &arguments.attributes {
                ask(&arguments.name, &format!("write {name} {value}"))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Save(arguments) => saved::save(arguments),
        Command::Reset(arguments) => {
            ask(&arguments.name, "write reset 1")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Remove(arguments) => remove(arguments),
    }
}

/// The directory of the control sockets.
fn directory() -> Result<PathBuf, Failure> {
    stats_file::prepare_directory(probe::effective_uid()).map_err(Failure::machine)
}

fn socket(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{PREFIX}{name}"))
}

/// Why a request has no value.
enum Unanswered {
    /// There is no such disk.
    Nobody(Failure),
    /// The disk refuses the request: it may be older than this program, and not know it.
    Refused(Failure),
    /// The disk cannot do it, or does not answer.
    Failed(Failure),
}

impl From<Unanswered> for Failure {
    fn from(why: Unanswered) -> Failure {
        let (Unanswered::Nobody(failure)
        | Unanswered::Refused(failure)
        | Unanswered::Failed(failure)) = why;
        failure
    }
}

/// Sends a request to a disk, and returns the value that it answers with.
fn ask(name: &str, request: &str) -> Result<String, Failure> {
    Ok(request_of(name, request)?)
}

/// The same, for whoever goes on in some of the cases.
fn request_of(name: &str, request: &str) -> Result<String, Unanswered> {
    let directory = directory().map_err(Unanswered::Failed)?;
    match ask_at(&socket(&directory, name), request) {
        Ok(Answer::Done(value)) => Ok(value),
        Ok(Answer::Refused(why)) => Err(Unanswered::Refused(Failure::argument(why))),
        Ok(Answer::Failed(why)) => {
            Err(Unanswered::Failed(Failure::machine(format!("{name}: {why}"))))
        }
        Err(error) if is_nobody(&error) => {
            let known = names(&directory).join(", ");
            let known = if known.is_empty() {
                "there is none".to_owned()
            } else {
                format!("accepted: {known}")
            };
            let line = format!("'{name}' is not a disk; {known}");
            Err(Unanswered::Nobody(Failure::argument(line)))
        }
        Err(error) => {
            let line = format!("{name}: the disk does not answer: {error}");
            Err(Unanswered::Failed(Failure::machine(line)))
        }
    }
}

/// Whether no process listens on a socket.
fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Asks a disk, and finds out whether one that does not answer is just ending: then nobody listens, soon after.
fn ask_at(socket: &Path, request: &str) -> io::Result<Answer> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let answer = control::ask_and_say(socket, request, || say_what_is_waited_for(socket));
    let Err(error) = &answer else { return answer };
    if !matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
        || !request.starts_with("read ")
    {
        return answer;
    }
    for _ in 0..ENDING_TURNS {
        match control::connect(socket) {
            Err(error) if is_nobody(&error) => return Err(error),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => break,
            _ => std::thread::sleep(STOP_TURN),
        }
    }
    answer
}

/// Says why a command has not returned yet.
fn say_what_is_waited_for(socket: &Path) {
    let file = socket.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = file.strip_prefix(PREFIX).unwrap_or(file);
    serve::say(&format!(
        "{name}: waiting for the disk's process, which is busy, or stopped (SIGSTOP)"
    ));
}

/// The disks that run. Sockets of disks that were killed are removed.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| {
        Some(entry.file_name().to_str()?.strip_prefix(PREFIX)?.to_owned())
    };
    let lives = |name: &String| {
        let socket = socket(directory, name);
        let is_dead = ask_at(&socket, "read initstate").is_err_and(|error| is_nobody(&error));
        if is_dead {
            listen::bury(&socket);
        }
        !is_dead
    };
    let mut names: Vec<String> = entries.filter_map(name).filter(lives).collect();
    names.sort_unstable();
    names
}

/// Prints the attributes of a disk, or one of them.
fn stat(arguments: &StatArgs) -> Result<ExitCode, Failure> {
    let read = |attribute: &str| ask(&arguments.name, &format!("read {attribute}"));
    let text = match &arguments.attribute {
        Some(attribute) => read(attribute)?,
        None => {
            let all = list::Disk::read(&arguments.name).map_err(Failure::from)?;
            if arguments.json { all.json().to_string() + "\n" } else { all.lines() }
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The figures of the accelerators that the user's disks use; empty if none does.
///
/// # Errors
///
/// The directory of the disks is not the user's alone.
pub(crate) fn accelerators() -> Result<String, Failure> {
    let mut text = String::new();
    for name in names(&directory()?) {
        let stats: Result<Vec<String>, Failure> =
            HARDWARE_STATS.into_iter().map(|stats| ask(&name, &format!("read {stats}"))).collect();
        // A disk without one has no such figures, and one that has just ended none at all.
        if let Ok(stats) = stats {
            text += &format!("disk {name}:\n{}", stats.concat());
        }
    }
    Ok(text)
}

/// Ends a disk, and waits until its process has ended: so its name, its file, its places and its memory are free.
///
/// # Errors
///
/// There is no such disk, or something is on it. It cannot be saved, and stays. It has not ended in time.
fn remove(arguments: &RemoveArgs) -> Result<ExitCode, Failure> {
    let RemoveArgs { disk, no_save } = arguments;
    let name = &disk.name;
    let path = socket(&directory()?, name);
    // Before the disk is asked: it answers after that, so this is its process. The socket goes some time earlier.
    let connected = control::connect(&path).ok();
    let process = connected.and_then(|connection| process::of_peer(connection.as_fd()));
    ask(name, if *no_save { "stop unsaved" } else { "stop" })?;
    let has_ended = || process.as_ref().map(|process| process::has_ended(process.as_fd()));
    let has_gone = || has_ended() == Some(true) || !path.exists();
    let why = if !comes(STOP_TURNS, has_gone) {
        "the disk has not ended yet: a client has a request that takes long"
    } else if !comes(END_TURNS, || has_ended() != Some(false)) {
        "the disk's process has not ended yet: it waits for a place of --writeback, or frees its memory"
    } else {
        return Ok(ExitCode::SUCCESS);
    };
    Err(Failure::machine(format!("{name}: {why}")))
}

/// Waits until something is so, for so many turns. Returns whether it is.
fn comes(turns: u32, is_so: impl Fn() -> bool) -> bool {
    for _ in 0..turns {
        if is_so() {
            return true;
        }
        std::thread::sleep(STOP_TURN);
    }
    is_so()
}
