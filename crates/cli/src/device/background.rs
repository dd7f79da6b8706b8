//! `zfolio device add`: a disk in a process of its own, which stays when this one ends.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};

use zfolio_sys::probe::child;

use super::arguments::AddArgs;
use crate::failure::Failure;
use crate::output;

/// Starts `zfolio device run` with the same arguments, and waits until clients can connect.
///
/// # Errors
///
/// The disk cannot be made as asked for, and the other process has printed why; or nobody can be told of it, and then
/// it has ended.
pub(super) fn add(arguments: &AddArgs) -> Result<ExitCode, Failure> {
    arguments.check_sockets().map_err(Failure::argument)?;
    let program =
        std::env::current_exe().map_err(|error| Failure::machine(format!("zfolio: {error}")))?;
    let unstarted = |error: io::Error| {
        Failure::machine(format!("the process of the disk does not start: {error}"))
    };
    let (mut errors, theirs) = UnixStream::pair().map_err(unstarted)?;
    // `zfolio device add` and what follows.
    let given = std::env::args_os().skip(3);
    let mut disk = Command::new(program)
        .args(["device", "run", "--background"])
        .args(given)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(OwnedFd::from(theirs))
        .spawn()
        .map_err(unstarted)?;
    let Some(made) = disk.stdout.take() else {
        return Err(Failure::machine("the process of the disk has no output"));
    };
    let mut line = String::new();
    BufReader::new(made).read_line(&mut line).ok();
    if line.is_empty() {
        // It has ended, or is about to.
        let mut why = String::new();
        errors.read_to_string(&mut why).ok();
        let status = disk.wait().ok().and_then(|status| status.code()).unwrap_or(125);
        print_errors(&why);
        return Ok(ExitCode::from(u8::try_from(status).unwrap_or(125)));
    }
    // What it has to say beside that it has said before. If this fails, it is not shown.
    let mut notes = Vec::new();
    errors.set_nonblocking(true).ok();
    errors.read_to_end(&mut notes).ok();
    print_errors(&String::from_utf8_lossy(&notes));
    if let Err(failure) = output::print(&line) {
        // A command that fails leaves nothing behind.
        let pid = i32::try_from(disk.id()).unwrap_or(i32::MAX);
        child::send(pid, libc::SIGTERM).and_then(|()| disk.wait()).ok();
        return Err(failure);
    }
    Ok(ExitCode::SUCCESS)
}

/// Passes on what the other process has to say. That nobody can read it (a full disk, a pipe that was closed) is no
/// reason to end: the disk may have been made.
fn print_errors(text: &str) {
    write!(io::stderr(), "{text}").ok();
}
