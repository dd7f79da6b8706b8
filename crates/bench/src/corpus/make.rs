//! Starts real programs, waits until they have built their data, and captures it.
//!
//! A program writes `ready` to its standard output when its data is complete, and ends when its
//! standard input is closed; so none outlives this process, even if it is killed. Otherwise it is
//! stopped by its PID.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::size;

use super::capture::Process;
use super::{CorpusFailure, Output};
use crate::os;
use crate::scratch::Scratch;
use crate::usemem::CORPUS_BYTES_MIN;

/// How long to wait for `ready`.
const READY_SECONDS_MAX: u64 = 300;

/// How one program is started; `SIZE` is replaced by the bytes of data that it should build.
struct Program {
    name: &'static str,
    command: fn(folder: &Path, size: u64) -> Command,
}

const PROGRAMS: [Program; 3] = [
    Program { name: "python3", command: python },
    Program { name: "node", command: node },
    Program { name: "java", command: java },
];

fn python(_folder: &Path, size: u64) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", include_str!("programs/objects.py"), &size.to_string()]);
    command
}

fn node(_folder: &Path, size: u64) -> Command {
    let mut command = Command::new("node");
    let heap_mib = (size >> 19) + 256;
    command.arg(format!("--max-old-space-size={heap_mib}"));
    command.args(["-e", include_str!("programs/objects.js"), "--", &size.to_string()]);
    command
}

fn java(folder: &Path, size: u64) -> Command {
    let mut command = Command::new("java");
    // The serial collector and a heap that grows: what is resident is the data.
    let heap_mib = (size >> 19) + 128;
    command.args(["-XX:+UseSerialGC", "-Xms16m"]).arg(format!("-Xmx{heap_mib}m"));
    command.arg(folder.join("Objects.java")).arg(size.to_string());
    command
}

/// A program that is ready; it is stopped when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended_already = self.0.kill();
        let _reaped = self.0.wait();
    }
}

impl Running {
    /// Starts `command` and waits until it is ready.
    fn start(mut command: Command) -> Result<Running, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "not found".to_owned(),
            _ => error.to_string(),
        })?;
        let mut running = Running(child);
        let answers = running.0.stdout.take().expect("piped above");
        let (sender, receiver) = mpsc::channel();
        // The thread ends with the first line, or with the program.
        std::thread::spawn(move || {
            let mut line = String::new();
            let length = BufReader::new(answers).read_line(&mut line).unwrap_or(0);
            // After the time limit the receiver is gone.
            let _late = sender.send((length > 0).then_some(line));
        });
        for _ in 0..READY_SECONDS_MAX * 20 {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(Some(line)) if line.trim() == "ready" => return Ok(running),
                Ok(Some(line)) => return Err(format!("said '{}', not 'ready'", line.trim())),
                Ok(None) => return Err(running.last_words()),
                Err(_) if os::stop_signal().is_some() => return Err("interrupted".to_owned()),
                Err(_) => {}
            }
        }
        Err(format!("was not ready after {READY_SECONDS_MAX} s"))
    }

    /// Why it ended: its status, and the first line on its standard error.
    fn last_words(&mut self) -> String {
        let status = self.0.wait().map_or("ended".to_owned(), |status| status.to_string());
        let complaint = self.0.stderr.take().and_then(|complaint| {
            BufReader::new(complaint).lines().map_while(Result::ok).find(|line| !line.is_empty())
        });
        format!("{status} before it was ready: {}", complaint.unwrap_or_default())
    }
}

fn stop_if_asked() -> Result<(), CorpusFailure> {
    os::stop_signal().map_or(Ok(()), |signal| Err(CorpusFailure::Stopped(signal)))
}

/// Writes about `bytes` of the memory of the available programs to `path`.
pub(crate) fn make(path: &Path, bytes: u64, zeros: bool) -> Result<(), CorpusFailure> {
    if bytes < CORPUS_BYTES_MIN {
        let given = size::display(bytes);
        return Err(CorpusFailure::Refused(format!("--bytes {given}: accepted: 1M or more")));
    }
    let failed = |error: io::Error| CorpusFailure::Failed(error.to_string());
    // So that a signal still removes the folder and the incomplete file, and ends the programs.
    os::catch_stop_signals();
    let mut output = Output::create("--output", path)?;
    let folder = Scratch::create("corpus").map_err(failed)?;
    // Java's source must be a file.
    fs::write(folder.path().join("Objects.java"), include_str!("programs/Objects.java"))
        .map_err(failed)?;
    let mut left = bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    for (index, program) in PROGRAMS.iter().enumerate() {
        // The share of a program that is not available is divided among the later ones.
        let share = left / (PROGRAMS.len() - index) as u64;
        let share = share.next_multiple_of(PAGE_BYTES as u64);
        // A tenth more than the share, because a runtime's estimate of its objects is rough.
        let running = match Running::start((program.command)(folder.path(), share + share / 10)) {
            Ok(running) => running,
            Err(reason) => {
                stop_if_asked()?;
                eprintln!("zfolio: skipped {}: {reason}", program.name);
                continue;
            }
        };
        let process = Process::open(running.0.id())?;
        let counts = process.capture(&mut output.writer, share, zeros)?;
        eprintln!("zfolio: {}: {counts}", program.name);
        left -= counts.pages_written * PAGE_BYTES as u64;
        stop_if_asked()?;
    }
    let written = bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64 - left;
    if written < CORPUS_BYTES_MIN {
        let line = "none of python3, node and java could be used; install one of them, or see \
                    'zfolio corpus capture'";
        return Err(CorpusFailure::Failed(line.to_owned()));
    }
    output.finish()?;
    let (written, asked) = (size::display(written), size::display(bytes));
    eprintln!("zfolio: {} of {asked} written to {}", written, path.display());
    Ok(())
}
