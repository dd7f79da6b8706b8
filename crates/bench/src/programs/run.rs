//! Runs of one program: alone, under `zfolio run`, and under the kernel's swap.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use super::digest::Digest;
use super::equal::{Cost, Model, Search};
use super::figures::Figures;
use super::redis;
use super::workload::{SOCKET, Workload};
use crate::compare::setting::Compression;
use crate::kernel::{Kernel, KernelSetting};
use crate::os;
use crate::watch::{Ended, Look, WatchError, Whose, watch};

/// How often memory is sampled. The end of a run is noticed as soon.
const SAMPLE: Duration = Duration::from_millis(10);

/// A run may take this many times the time alone, and [`SECONDS_MORE`].
pub(crate) const SLOWDOWN_MAX: u32 = 30;

/// So that a short program has time to start on a busy machine.
const SECONDS_MORE: Duration = Duration::from_secs(10);

/// A program alone may take this long: it takes a few seconds, so more means that it hangs.
const ALONE_MAX: Duration = Duration::from_secs(300);

/// A program without a limit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Alone {
    pub(crate) seconds: f64,
    /// The peak of its anonymous and shared memory.
    pub(crate) need_bytes: u64,
    pub(crate) output: Digest,
}

/// How a run under a limit ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// With the same output as alone.
    Done,
    /// It was ended, because it took too long.
    Late,
    /// The kernel killed it, because memory ran out.
    Killed,
    /// It failed, or its output differs: the reason.
    Failed(String),
}

/// A run under a limit.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Run {
    pub(crate) end: End,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    /// The peak of anonymous and shared memory, as seen from outside.
    pub(crate) peak_bytes: u64,
    /// The figures of `zfolio run`.
    pub(crate) figures: Option<Figures>,
    /// The cgroup's limit and what zram held, for runs under the kernel.
    pub(crate) cost: Option<Cost>,
}

/// What all runs of one program share.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    pub(crate) workload: &'a Workload,
    pub(crate) zfolio: PathBuf,
    pub(crate) kernel: Option<&'a Kernel>,
    /// `--timeout`.
    pub(crate) timeout: Option<Duration>,
}

/// What a run wrote. For redis, whose own output is empty, it is what the client read.
type Output = Result<Digest, String>;

impl Runner<'_> {
    /// Runs it without a limit. The error says that it failed.
    pub(crate) fn alone(&self) -> Result<Alone, WatchError> {
        let mut command = self.command(&[]);
        os::tie(&mut command, None);
        let look = Look { whose: Whose::All, every: SAMPLE, elapsed_max: Some(ALONE_MAX) };
        let (ended, output) = self.with_client(|| watch(command, &look, Digest::of))?;
        let failed = |line: String| WatchError::System(io::Error::other(line));
        if ended.late {
            return Err(failed(format!("takes more than {} s alone", ALONE_MAX.as_secs())));
        }
        if !ended.status.success() {
            return Err(failed(format!("fails alone: {}", complaint(&ended))));
        }
        Ok(Alone {
            seconds: ended.elapsed.as_secs_f64(),
            need_bytes: ended.anonymous_bytes_max,
            output: output.map_err(|line| failed(format!("fails alone: {line}")))?,
        })
    }

    /// Runs it under `zfolio run --limit`.
    pub(crate) fn managed(
        &self,
        compression: Option<&Compression>,
        limit_bytes: u64,
        alone: &Alone,
    ) -> Result<Run, WatchError> {
        let stats = self.workload.folder.join("figures.json");
        let limit = limit_bytes.to_string();
        let mut before = vec![self.zfolio.display().to_string()];
        before.extend(["run", "--quiet", "--limit", &limit, "--stats"].map(str::to_owned));
        before.push(stats.display().to_string());
        before.extend(compression.into_iter().flat_map(Compression::options));
        before.push("--".to_owned());
        let mut command = self.command(&before);
        os::tie(&mut command, None);
        let look = self.look(Whose::Descendants, alone);
        let (ended, output) = self.with_client(|| watch(command, &look, Digest::of))?;
        let text = fs::read_to_string(&stats);
        let figures =
            text.map_err(|error| error.to_string()).and_then(|text| Figures::parse(&text));
        // A run that had to be killed leaves none.
        let _left_none = fs::remove_file(&stats);
        let mut run = judge(&ended, output, alone);
        match figures {
            Ok(figures) => run.figures = Some(figures),
            Err(line) if run.end == End::Done => run.end = End::Failed(line),
            Err(_) => {}
        }
        Ok(run)
    }

    /// Runs it in a memory cgroup with zram swap, at a cost of `total_bytes` (see [`Search`]).
    pub(crate) fn swapped(
        &self,
        setting: &KernelSetting,
        total_bytes: u64,
        alone: &Alone,
        model: &mut Model,
    ) -> Result<Run, WatchError> {
        let kernel = self.kernel.expect("the table has rows of the kernel only if there is one");
        let mut search = Search::new(model, total_bytes);
        let mut runs = Vec::new();
        let look = self.look(Whose::All, alone);
        while let Some(limit_bytes) = search.next() {
            let how = (setting, alone.need_bytes, limit_bytes);
            let command = self.command(&[]);
            let mut zram_bytes_max = 0;
            let (ended, output) = self.with_client(|| {
                let swapped = kernel.run(how, command, &look, Digest::of)?;
                zram_bytes_max = swapped.beside_bytes_max;
                Ok(swapped.ended)
            })?;
            let mut run = judge(&ended, output, alone);
            let cost = Cost { limit_bytes, zram_bytes_max, killed: run.end == End::Killed };
            run.cost = Some(cost);
            search.record(cost);
            runs.push(run);
        }
        Ok(runs.swap_remove(search.best().expect("the search begins with a run")))
    }

    /// The most that a run may take, as a multiple of the time alone: a slower one is ended.
    pub(crate) fn slowdown_max(&self, alone: &Alone) -> f64 {
        let given = self.timeout.map(|timeout| timeout.as_secs_f64() / alone.seconds);
        given.unwrap_or(f64::from(SLOWDOWN_MAX))
    }

    fn look<'b>(&self, whose: Whose<'b>, alone: &Alone) -> Look<'b> {
        let usual = Duration::from_secs_f64(alone.seconds) * SLOWDOWN_MAX + SECONDS_MORE;
        Look { whose, every: SAMPLE, elapsed_max: Some(self.timeout.unwrap_or(usual)) }
    }

    /// The program in its folder, with the words of `before` before its own.
    fn command(&self, before: &[String]) -> Command {
        let words: Vec<String> = before.iter().cloned().chain(self.workload.words()).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        self.workload.surround(&mut command);
        command
    }

    /// Runs the program by `run`, beside its client if it needs one; returns what it wrote.
    fn with_client(
        &self,
        run: impl FnOnce() -> Result<Ended<Digest>, WatchError>,
    ) -> Result<(Ended<Digest>, Output), WatchError> {
        let Some(keys) = self.workload.keys() else {
            let ended = run()?;
            let output = Ok(ended.output);
            return Ok((ended, output));
        };
        let socket = self.workload.folder.join(SOCKET);
        // That of a server that was killed would refuse the client until the next one has started.
        let _left_none = fs::remove_file(&socket);
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        // Relaxed: the flag is polled, and publishes no other data.
        let client = std::thread::spawn(move || redis::work(&socket, keys, &seen));
        let ended = run();
        over.store(true, Relaxed);
        let output = client.join().map_err(|_| "the client has panicked".to_owned());
        let output = output.and_then(|read| read.map_err(|error| format!("the client: {error}")));
        Ok((ended?, output))
    }
}

impl Run {
    /// A run that could not be made.
    pub(crate) fn failed(error: &io::Error) -> Run {
        Run {
            end: End::Failed(error.to_string()),
            seconds: 0.0,
            cpu_seconds: 0.0,
            peak_bytes: 0,
            figures: None,
            cost: None,
        }
    }
}

/// What a run under a limit was.
fn judge(ended: &Ended<Digest>, output: Output, alone: &Alone) -> Run {
    let end = if ended.late {
        End::Late
    } else if ended.status.signal() == Some(libc::SIGKILL) {
        End::Killed
    } else if !ended.status.success() {
        // A compiler reports that the kernel killed a part of it.
        let line = complaint(ended);
        if line.contains("Killed") { End::Killed } else { End::Failed(line) }
    } else {
        match output {
            Ok(output) if output == alone.output => End::Done,
            Ok(output) => End::Failed(format!("WRONG OUTPUT: {output}, alone {}", alone.output)),
            Err(line) => End::Failed(line),
        }
    };
    Run {
        end,
        seconds: ended.elapsed.as_secs_f64(),
        cpu_seconds: Duration::from_nanos(ended.cpu_ns).as_secs_f64(),
        peak_bytes: ended.anonymous_bytes_max,
        figures: None,
        cost: None,
    }
}

/// Its status, and the first line of its standard error.
fn complaint(ended: &Ended<Digest>) -> String {
    let line = ended.complaint.trim().lines().next().unwrap_or("without a word");
    format!("{}: {line}", ended.status)
}

#[cfg(test)]
mod tests {
    use super::{Alone, Digest, End, judge};
    use crate::watch::Ended;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    fn ended(status: i32, complaint: &str) -> Ended<Digest> {
        Ended {
            status: ExitStatus::from_raw(status),
            output: Digest::default(),
            complaint: complaint.to_owned(),
            elapsed: Duration::from_secs(2),
            late: false,
            resident_bytes_max: 0,
            anonymous_bytes_max: 5,
            cpu_ns: 1_500_000_000,
        }
    }

    /// Goal: only a run with the same output as alone is good. Method: every way to end.
    #[test]
    fn a_run_is_good_only_with_the_same_output() {
        let mut other = Digest::default();
        other.add(b"x");
        let alone = Alone { seconds: 1.0, need_bytes: 9, output: Digest::default() };
        let end = |ended: &Ended<Digest>, output| judge(ended, output, &alone).end;
        let good = Ok(Digest::default());
        assert_eq!(end(&ended(0, ""), good.clone()), End::Done);
        let wrong = end(&ended(0, ""), Ok(other));
        assert!(matches!(wrong, End::Failed(line) if line.contains("WRONG OUTPUT")));
        let client = end(&ended(0, ""), Err("the client: gone".to_owned()));
        assert_eq!(client, End::Failed("the client: gone".to_owned()));
        assert_eq!(end(&ended(9, ""), good.clone()), End::Killed);
        let compiler = ended(1 << 8, "gcc: fatal error: Killed signal terminated program cc1");
        assert_eq!(end(&compiler, good.clone()), End::Killed);
        let failed = end(&ended(1 << 8, "no\nmore"), good.clone());
        assert_eq!(failed, End::Failed("exit status: 1: no".to_owned()));
        let late = Ended { late: true, ..ended(15, "") };
        assert_eq!(end(&late, good.clone()), End::Late);
        let run = judge(&ended(0, ""), good, &alone);
        assert!((run.seconds - 2.0).abs() < 1e-9 && (run.cpu_seconds - 1.5).abs() < 1e-9);
        assert_eq!(run.peak_bytes, 5);
    }
}
