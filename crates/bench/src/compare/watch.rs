//! Runs one program to its end, and samples its memory from outside.

use std::fs;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::os;

/// How often memory is sampled, and a signal to this process is noticed.
const SAMPLE: Duration = Duration::from_millis(50);

/// Why the run of a program gave no result.
#[derive(Debug)]
pub(crate) enum WatchError {
    /// The program could not be started, or not be waited for.
    System(io::Error),
    /// A signal requested a stop; the program has been ended.
    Stopped(i32),
}

impl From<io::Error> for WatchError {
    fn from(error: io::Error) -> WatchError {
        WatchError::System(error)
    }
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
    pub(crate) complaint: String,
    /// The most that all processes called `name` had resident at one moment.
    pub(crate) resident_bytes_max: u64,
    /// CPU time of the program and its children.
    pub(crate) cpu_ns: u64,
}

/// The program, which is killed when this is dropped.
struct Watched(Child);

impl Drop for Watched {
    fn drop(&mut self) {
        for pid in descendants(self.0.id()) {
            // It may have ended since it was listed.
            let _already_gone = os::kill(pid);
        }
        let _already_gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Runs `command` to its end. The memory is the sum over its descendants that are called `name`.
pub(crate) fn watch(mut command: Command, name: Option<&str>) -> Result<Ended, WatchError> {
    let cpu_before = os::children_cpu_ns();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut watched = Watched(command.spawn()?);
    let output = collect(watched.0.stdout.take().expect("piped above"));
    let complaint = collect(watched.0.stderr.take().expect("piped above"));
    let mut resident_bytes_max = 0;
    let status = loop {
        if let Some(signal) = os::stop_signal() {
            return Err(WatchError::Stopped(signal));
        }
        if let Some(status) = watched.0.try_wait()? {
            break status;
        }
        resident_bytes_max = resident_bytes_max.max(resident_bytes(watched.0.id(), name));
        std::thread::sleep(SAMPLE);
    };
    let text = |thread: JoinHandle<String>| thread.join().unwrap_or_default();
    let (output, complaint) = (text(output), text(complaint));
    let cpu_ns = os::children_cpu_ns() - cpu_before;
    Ok(Ended { status, output, complaint, resident_bytes_max, cpu_ns })
}

/// Reads a pipe to its end, so that the program never waits for this process.
fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        // The part that was read before an error is still useful.
        let _partial = pipe.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// The descendants of `pid`, without itself.
fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut unseen = vec![pid];
    while let Some(pid) = unseen.pop() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.filter_map(Result::ok) {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let children = children.split_whitespace().filter_map(|word| word.parse::<u32>().ok());
            let before = found.len();
            found.extend(children);
            unseen.extend_from_slice(&found[before..]);
        }
    }
    found
}

fn resident_bytes(pid: u32, name: Option<&str>) -> u64 {
    let all = std::iter::once(pid).chain(descendants(pid));
    all.map(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        if name.is_some_and(|name| field("Name:") != Some(name)) {
            return 0;
        }
        let kib = field("VmRSS:").and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    })
    .sum()
}

#[cfg(test)]
mod tests {
    use super::watch;
    use std::process::Command;

    #[test]
    fn output_status_and_memory_are_told() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; sleep 0.2; exit 3"]);
        let ended = watch(command, Some("sh")).expect("sh starts");
        assert_eq!(ended.status.code(), Some(3));
        assert_eq!((ended.output.as_str(), ended.complaint.as_str()), ("out\n", "err\n"));
        assert!(ended.resident_bytes_max > 100 << 10, "{ended:?}");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 0.2; true"]);
        let ended = watch(command, Some("nobody")).expect("sh starts");
        assert_eq!(ended.resident_bytes_max, 0);
    }
}
