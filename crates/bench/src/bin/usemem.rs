//! `usemem`: a plain program that uses much memory and checks every byte of it.
//!
//! It does not use zfolio: the same program is measured with the kernel's swap and with `zfolio
//! run`. It links only the standard library and libc.
//!
//! With `--processes` the program starts itself once per worker. A worker writes `ready` before
//! each phase, and continues when it reads a line, so that all workers are in the same phase.

#[path = "../mapping.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the library")]
mod mapping;
#[path = "../report.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the library")]
mod report;
#[path = "../../../core/src/size.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the library")]
mod size;
#[path = "../usemem.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the library")]
mod usemem;

// The tests of `size` use it as `crate::testing`.
#[cfg(test)]
use zfolio_core::testing;

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use mapping::Anonymous;
use usemem::{Corpus, Measured, Mismatch, Phase, Report, Workload, share_bytes};

const HELP: &str = "\
usemem: fill memory from a corpus, use it, check every byte

usage: usemem --corpus FILE --bytes SIZE [options]

  --corpus FILE   pages of real processes (zfolio corpus make -o FILE); 1 MiB or more
  --bytes SIZE    how much memory to use in all: 256M, 1.5G, 1048576
  -n N            workers that share it evenly [default: 1]
  --threads       workers are threads of one process [default]
  --processes     workers are processes
  --seed S        what chooses the pages of the random reads [default: 1]
  --reads N       random reads in all [default: 50000]
  --salt          make each repetition of the corpus differ by 8 bytes a page
  --json          one JSON object instead of lines
  -h, --help      this text

exit status: 0 all bytes are right, 1 a byte is wrong or the system refused, 2 bad arguments

examples:
  usemem --corpus corpus.bin --bytes 1G
  usemem --corpus corpus.bin --bytes 1G -n 4 --processes --json
";

struct Arguments {
    corpus: PathBuf,
    bytes: u64,
    workers: usize,
    processes: bool,
    seed: u64,
    reads: usize,
    salt: bool,
    json: bool,
    /// The number of this worker, in a process that `--processes` started.
    worker: Option<usize>,
}

/// Why the program ends early: a line to print, and the exit status.
struct Failure(String, u8);

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure(error.to_string(), 1)
    }
}

fn main() -> ExitCode {
    let outcome = match parse(std::env::args().skip(1)) {
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Ok(Some(arguments)) => run(&arguments),
        Err(line) => Err(Failure(line, 2)),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(Failure(line, status)) => {
            eprintln!("usemem: {line}");
            ExitCode::from(status)
        }
    }
}

/// The arguments, or `None` if help is requested.
fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>, String> {
    let (mut corpus, mut bytes) = (None, None);
    let (mut workers, mut seed, mut reads, mut worker) = (1, 1, 50_000, None);
    let (mut processes, mut salt, mut json) = (false, false, false);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: a value must follow"));
        match word.as_str() {
            "-h" | "--help" => return Ok(None),
            "--corpus" => corpus = Some(PathBuf::from(value()?)),
            "--bytes" => {
                let parsed = size::parse(&value()?).map_err(|error| format!("--bytes: {error}"))?;
                bytes = Some(parsed);
            }
            "-n" => workers = number(&word, &value()?, 1..=1024)?,
            "--seed" => seed = number(&word, &value()?, 0..=usize::MAX)? as u64,
            "--reads" => reads = number(&word, &value()?, 1..=100_000_000)?,
            "--worker" => worker = Some(number(&word, &value()?, 0..=1023)?),
            "--threads" => processes = false,
            "--processes" => processes = true,
            "--salt" => salt = true,
            "--json" => json = true,
            _ => return Err(format!("{word}: unknown argument; see usemem --help")),
        }
    }
    let corpus = corpus.ok_or("--corpus FILE is missing; see usemem --help")?;
    let bytes = bytes.ok_or("--bytes SIZE is missing; see usemem --help")?;
    if share_bytes(bytes, workers) == 0 {
        return Err(format!(
            "--bytes {bytes}: accepted: at least 4096 for each of {workers} workers"
        ));
    }
    Ok(Some(Arguments { corpus, bytes, workers, processes, seed, reads, salt, json, worker }))
}

fn number(
    name: &str,
    text: &str,
    accepted: std::ops::RangeInclusive<usize>,
) -> Result<usize, String> {
    let (least, most) = (accepted.start(), accepted.end());
    let parsed = text.parse().ok().filter(|value| accepted.contains(value));
    parsed.ok_or(format!("{name} {text}: accepted: {least} to {most}"))
}

fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let corpus = Corpus::open(&arguments.corpus).map_err(|error| Failure(error.to_string(), 2))?;
    if let Some(index) = arguments.worker {
        return work_for_parent(arguments, &corpus, index).map(|()| 0);
    }
    let (workers, resident) = if arguments.processes {
        run_processes(arguments)?
    } else {
        let mut memory = map(share_bytes(arguments.bytes, arguments.workers) * arguments.workers)?;
        let workers =
            usemem::run_threads(&mut memory, &whole(arguments, &corpus), arguments.workers)?;
        (workers, usemem::resident_bytes_max())
    };
    let share = share_bytes(arguments.bytes, arguments.workers) as u64;
    let report = Report::of(share * arguments.workers as u64, workers, resident);
    if arguments.json {
        println!("{}", report.json());
    } else {
        println!("{report}");
    }
    let Some(mismatch) = report.mismatch else { return Ok(0) };
    eprintln!("usemem: wrong data at {mismatch}");
    Ok(1)
}

/// The workload of a single worker.
fn whole<'a>(arguments: &Arguments, corpus: &'a Corpus) -> Workload<'a> {
    let Arguments { salt, seed, reads, .. } = *arguments;
    Workload { corpus, start: 0, salt, seed, reads }
}

fn map(bytes: usize) -> Result<Anonymous, Failure> {
    Anonymous::new(bytes).map_err(|error| Failure(format!("cannot map {bytes} bytes: {error}"), 1))
}

/// A worker process, on the parent's side.
struct Worker {
    child: Child,
    go: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It has ended, or the parent is about to fail: in both cases it must not remain.
        let _gone_already = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn run_processes(arguments: &Arguments) -> Result<(Vec<Measured>, u64), Failure> {
    let started: Result<Vec<Worker>, Failure> =
        (0..arguments.workers).map(|index| start_worker(arguments, index)).collect();
    let mut workers = started?;
    for _ in Phase::ALL {
        for worker in &mut workers {
            let line = answer(worker)?;
            if line != "ready" {
                return Err(Failure(format!("a worker said: {line}"), 1));
            }
        }
        for worker in &mut workers {
            worker.go.write_all(b"go\n")?;
        }
    }
    let mut resident = 0;
    let mut measured = Vec::new();
    for worker in &mut workers {
        let line = answer(worker)?;
        let (figures, bytes) =
            decode(&line).ok_or(Failure("a worker's report is garbled".into(), 1))?;
        measured.push(figures);
        resident += bytes;
    }
    Ok((measured, resident))
}

fn start_worker(arguments: &Arguments, index: usize) -> Result<Worker, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--worker").arg(index.to_string());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let go = child.stdin.take().expect("piped above");
    let answers = BufReader::new(child.stdout.take().expect("piped above"));
    debug_assert!(index < arguments.workers);
    Ok(Worker { child, go, answers })
}

fn answer(worker: &mut Worker) -> Result<String, Failure> {
    let mut line = String::new();
    if worker.answers.read_line(&mut line)? == 0 {
        let status = worker.child.wait()?;
        return Err(Failure(format!("a worker ended early: {status}"), 1));
    }
    line.truncate(line.trim_end().len());
    Ok(line)
}

fn work_for_parent(arguments: &Arguments, corpus: &Corpus, index: usize) -> Result<(), Failure> {
    let mut memory = map(share_bytes(arguments.bytes, arguments.workers))?;
    let mut parent_gone = false;
    let whole = whole(arguments, corpus);
    let part = usemem::part_of(&whole, arguments.bytes, arguments.workers, index);
    let measured = part.run(&mut memory, |_| {
        println!("ready");
        parent_gone |= io::stdin().lines().next().is_none();
        if parent_gone {
            // The parent has gone, and there is nothing to undo.
            std::process::exit(1);
        }
    })?;
    println!("{}", encode(&measured, usemem::resident_bytes_max()));
    Ok(())
}

/// One line: phases, resident bytes, mismatch, latencies; numbers separated by blanks.
fn encode(measured: &Measured, resident: u64) -> String {
    let mut line = String::new();
    let wrong = measured.mismatch.map_or((0, 0, 0, 0), |m| (1, m.offset, m.expected, m.found));
    let phases = measured.phase_ns.map(|ns| ns.to_string()).join(" ");
    let (is_wrong, offset, expected, found) = wrong;
    let head = write!(line, "{phases} {resident} {is_wrong} {offset} {expected} {found}");
    head.expect("a String takes everything");
    for ns in &measured.latencies_ns {
        write!(line, " {ns}").expect("a String takes everything");
    }
    line
}

fn decode(line: &str) -> Option<(Measured, u64)> {
    let numbers: Option<Vec<u64>> = line.split(' ').map(|word| word.parse().ok()).collect();
    let numbers = numbers?;
    let (phases, rest) = numbers.split_first_chunk::<5>()?;
    let (&[resident, is_wrong, offset, expected, found], latencies) = rest.split_first_chunk()?;
    let (expected, found) = (u8::try_from(expected).ok()?, u8::try_from(found).ok()?);
    let mismatch = (is_wrong == 1).then_some(Mismatch { offset, expected, found });
    let latencies_ns = latencies.iter().map(|ns| u32::try_from(*ns).ok()).collect::<Option<_>>()?;
    Some((Measured { phase_ns: *phases, latencies_ns, mismatch }, resident))
}

#[cfg(test)]
mod tests {
    use super::{Measured, Mismatch, decode, encode, parse};

    #[test]
    fn a_workers_report_survives_its_pipe() {
        let mismatch = Some(Mismatch { offset: 1 << 40, expected: 255, found: 0 });
        let sent =
            Measured { phase_ns: [1, 2, 3, 4, 5], latencies_ns: vec![7, u32::MAX], mismatch };
        assert_eq!(decode(&encode(&sent, 99)), Some((sent, 99)));
        assert_eq!(decode("1 2 3"), None);
    }

    #[test]
    fn bad_arguments_are_named_with_what_is_accepted() {
        let refuse =
            |line: &str| parse(line.split(' ').map(String::from)).err().unwrap_or_default();
        assert!(refuse("--corpus a --bytes 1000").contains("at least 4096"));
        assert!(refuse("--corpus a --bytes 1G -n 0").contains("-n 0: accepted: 1 to 1024"));
        assert!(refuse("--corpus a --bytes 1X").contains("'1X' is not a size; accepted"));
        assert!(refuse("--bytes 1G").contains("--corpus FILE is missing"));
        assert!(refuse("--corpus").contains("a value must follow"));
        assert!(refuse("--frobnicate").contains("unknown argument"));
    }
}
