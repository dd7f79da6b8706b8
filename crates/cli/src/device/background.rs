//! `zfolio device add`: a disk in a process of its own, which stays when this one ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, ExitCode, Stdio};

use super::arguments::AddArgs;
use crate::failure::Failure;
use crate::output;

/// Starts `zfolio device run` with the same arguments, and waits until clients can connect.
///
/// # Errors
///
/// The disk cannot be made as asked for. The other process has printed why.
pub(super) fn add(arguments: &AddArgs) -> Result<ExitCode, Failure> {
    arguments.check_sockets().map_err(Failure::argument)?;
    let program =
        std::env::current_exe().map_err(|error| Failure::machine(format!("zfolio: {error}")))?;
    // `zfolio device add` and what follows.
    let given = std::env::args_os().skip(3);
    let mut disk = Command::new(program)
        .args(["device", "run", "--background"])
        .args(given)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| {
            Failure::machine(format!("the process of the disk does not start: {error}"))
        })?;
    let (Some(made), Some(mut errors)) = (disk.stdout.take(), disk.stderr.take()) else {
        return Err(Failure::machine("the process of the disk has no output"));
    };
    let mut line = String::new();
    BufReader::new(made).read_line(&mut line).ok();
    if line.is_empty() {
        // It has ended, or is about to.
        let mut why = String::new();
        errors.read_to_string(&mut why).ok();
        let status = disk.wait().ok().and_then(|status| status.code()).unwrap_or(125);
        eprint!("{why}");
        return Ok(ExitCode::from(u8::try_from(status).unwrap_or(125)));
    }
    output::print(&line)?;
    Ok(ExitCode::SUCCESS)
}
