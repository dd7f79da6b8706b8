//! Runs one program to its end, and samples its memory from outside.

use std::fs;
use std::io::{self, Read};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::os;

/// How long a program that was asked to end may take, so that `zfolio run` can write its figures.
const ENDING_SECONDS_MAX: u64 = 5;

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

/// Whose memory is summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose<'a> {
    /// Of the program and its descendants.
    All,
    /// Of its descendants, without the program itself: it is `zfolio run`.
    Descendants,
    /// Of all of them that have this name.
    Named(&'a str),
}

/// How a program is watched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look<'a> {
    pub(crate) whose: Whose<'a>,
    /// How often memory is sampled, and the end or a signal to this process is noticed.
    pub(crate) every: Duration,
    /// A program that runs longer is ended.
    pub(crate) elapsed_max: Option<Duration>,
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ended<T> {
    pub(crate) status: ExitStatus,
    /// What was read from its standard output.
    pub(crate) output: T,
    pub(crate) complaint: String,
    pub(crate) elapsed: Duration,
    /// It was ended because it took longer than [`Look::elapsed_max`].
    pub(crate) late: bool,
    /// The most that the processes had resident at one moment.
    pub(crate) resident_bytes_max: u64,
    /// The most of it that was anonymous or shared memory: what compression could apply to.
    pub(crate) anonymous_bytes_max: u64,
    /// CPU time of the program and its children.
    pub(crate) cpu_ns: u64,
}

/// The program, which is killed when this is dropped.
struct Watched(Child);

impl Drop for Watched {
    fn drop(&mut self) {
        self.kill();
        let _reaped = self.0.wait();
    }
}

impl Watched {
    /// Kills the descendants and then the program: as orphans they would not be found.
    fn kill(&mut self) {
        for pid in descendants(self.0.id()) {
            // It may have ended since it was listed.
            let _already_gone = os::signal(pid, libc::SIGKILL);
        }
        let _already_gone = self.0.kill();
    }

    /// Asks the program and its descendants to end, and waits for the program for a while.
    fn ask_to_end(&mut self, every: Duration) -> io::Result<Option<ExitStatus>> {
        let root = self.0.id();
        for pid in std::iter::once(root).chain(descendants(root)) {
            let _already_gone = os::signal(pid, libc::SIGTERM);
        }
        let asked = os::now();
        while asked.elapsed() < Duration::from_secs(ENDING_SECONDS_MAX) {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            std::thread::sleep(every);
        }
        Ok(None)
    }
}

/// Runs `command` to its end; `read` reads its standard output, on a thread of its own.
pub(crate) fn watch<T: Default + Send + 'static>(
    mut command: Command,
    look: &Look<'_>,
    read: fn(ChildStdout) -> T,
) -> Result<Ended<T>, WatchError> {
    let cpu_before = os::children_cpu_ns();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = os::now();
    let mut watched = Watched(command.spawn()?);
    let output = watched.0.stdout.take().expect("piped above");
    let output = std::thread::spawn(move || read(output));
    let complaint = watched.0.stderr.take().expect("piped above");
    let complaint = std::thread::spawn(move || read_text(complaint));
    let mut peak = Peak::default();
    let ended = wait(&mut watched, look, started, &mut peak)?;
    let elapsed = started.elapsed();
    let (status, late) = match ended {
        Some(status) => (status, false),
        None => match watched.ask_to_end(look.every)? {
            Some(status) => (status, true),
            None => {
                watched.kill();
                (watched.0.wait()?, true)
            }
        },
    };
    let (output, complaint) = (joined(output), joined(complaint));
    let cpu_ns = os::children_cpu_ns() - cpu_before;
    let Peak { resident_bytes: resident_bytes_max, anonymous_bytes: anonymous_bytes_max } = peak;
    Ok(Ended {
        status,
        output,
        complaint,
        elapsed,
        late,
        resident_bytes_max,
        anonymous_bytes_max,
        cpu_ns,
    })
}

/// Samples memory until the program ends; `None` if it takes too long.
fn wait(
    watched: &mut Watched,
    look: &Look<'_>,
    started: Instant,
    peak: &mut Peak,
) -> Result<Option<ExitStatus>, WatchError> {
    loop {
        if let Some(signal) = os::stop_signal() {
            return Err(WatchError::Stopped(signal));
        }
        if let Some(status) = watched.0.try_wait()? {
            return Ok(Some(status));
        }
        if look.elapsed_max.is_some_and(|most| started.elapsed() > most) {
            return Ok(None);
        }
        peak.raise(Peak::now(watched.0.id(), look.whose));
        std::thread::sleep(look.every);
    }
}

fn joined<T: Default>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_default()
}

/// Reads a pipe to its end, so that the program never waits for this process.
pub(crate) fn read_text(mut pipe: impl Read) -> String {
    let mut text = Vec::new();
    // The part that was read before an error is still useful.
    let _partial = pipe.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
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

/// Resident memory, summed over processes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Peak {
    resident_bytes: u64,
    anonymous_bytes: u64,
}

impl Peak {
    fn now(root: u32, whose: Whose<'_>) -> Peak {
        let itself = (whose != Whose::Descendants).then_some(root);
        let mut sum = Peak::default();
        for pid in itself.into_iter().chain(descendants(root)) {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let one = Peak::in_status(&status, whose);
            sum.resident_bytes += one.resident_bytes;
            sum.anonymous_bytes += one.anonymous_bytes;
        }
        sum
    }

    /// Reads the text of `/proc/PID/status`.
    fn in_status(status: &str, whose: Whose<'_>) -> Peak {
        let field = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        if matches!(whose, Whose::Named(name) if field("Name:") != Some(name)) {
            return Peak::default();
        }
        let bytes = |key| {
            let kib = field(key).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
            kib.unwrap_or(0) << 10
        };
        Peak {
            resident_bytes: bytes("VmRSS:"),
            anonymous_bytes: bytes("RssAnon:") + bytes("RssShmem:"),
        }
    }

    fn raise(&mut self, now: Peak) {
        self.resident_bytes = self.resident_bytes.max(now.resident_bytes);
        self.anonymous_bytes = self.anonymous_bytes.max(now.anonymous_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::{Look, Peak, Whose, read_text, watch};
    use std::process::Command;
    use std::time::Duration;

    fn shell(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command
    }

    fn look(whose: Whose<'_>) -> Look<'_> {
        Look { whose, every: Duration::from_millis(50), elapsed_max: None }
    }

    #[test]
    fn output_status_and_memory_are_reported() {
        let command = shell("echo out; echo err >&2; sleep 0.2; exit 3");
        let ended = watch(command, &look(Whose::Named("sh")), read_text).expect("sh starts");
        assert_eq!(ended.status.code(), Some(3));
        assert_eq!((ended.output.as_str(), ended.complaint.as_str()), ("out\n", "err\n"));
        assert!(ended.resident_bytes_max > 100 << 10 && !ended.late, "{ended:?}");
        assert!(ended.anonymous_bytes_max < ended.resident_bytes_max, "{ended:?}");
        let command = shell("sleep 0.2; true");
        let ended = watch(command, &look(Whose::Named("nobody")), read_text).expect("sh starts");
        assert_eq!(ended.resident_bytes_max, 0);
    }

    /// Goal: a program that takes too long is ended with its children, and its output until then is
    /// kept. Method: a shell waits for a child that would hold the pipe open for 1000 seconds.
    #[test]
    fn a_program_that_takes_too_long_is_ended() {
        let look =
            Look { elapsed_max: Some(Duration::from_millis(300)), ..look(Whose::Descendants) };
        let ended = watch(shell("echo begun; sleep 1000; true"), &look, read_text).expect("starts");
        assert!(ended.late && !ended.status.success(), "{ended:?}");
        assert_eq!(ended.output, "begun\n");
        // A program that ignores the request is killed, with its children.
        let stubborn = shell("trap '' TERM; echo begun; while :; do sleep 1; done");
        let ended = watch(stubborn, &look, read_text).expect("starts");
        assert!(ended.late && !ended.status.success(), "{ended:?}");
    }

    #[test]
    fn files_do_not_count_as_anonymous() {
        let status = "Name:\tsort\nVmRSS:\t  100 kB\nRssAnon:\t  60 kB\nRssFile:\t  30 kB\n\
                      RssShmem:\t  10 kB\n";
        let expected = Peak { resident_bytes: 100 << 10, anonymous_bytes: 70 << 10 };
        assert_eq!(Peak::in_status(status, Whose::All), expected);
        assert_eq!(Peak::in_status(status, Whose::Named("sort")), expected);
        assert_eq!(Peak::in_status(status, Whose::Named("other")), Peak::default());
        assert_eq!(Peak::in_status("", Whose::All), Peak::default());
    }
}
