//! `zfolio corpus`, end to end: it captures exactly what the process holds, and refuses bad input.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use clap::Parser;
use zfolio_bench::CorpusArgs;
use zfolio_core::testing::Random;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: CorpusArgs,
}

/// Runs `corpus` with these arguments; returns whether its exit status is `status`.
fn corpus_ends_with(words: &[&str], status: u8) -> bool {
    let line = Line::try_parse_from(std::iter::once("corpus").chain(words.iter().copied()));
    let ended = zfolio_bench::corpus(line.unwrap_or_else(|error| panic!("{error}")).args);
    // ExitCode has no PartialEq, but its Debug output contains the number.
    format!("{ended:?}") == format!("{:?}", ExitCode::from(status))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("zfolio-test-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("a folder of our own");
        Folder(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("our own name").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("our own folder");
    }
}

struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }
}

/// Starts usemem as a worker, lets it fill its memory, and keeps it there.
fn filled_usemem(corpus: &Path, bytes: u64) -> Stopped {
    let mut child = Command::new(env!("CARGO_BIN_EXE_usemem"))
        .arg("--corpus")
        .arg(corpus)
        .args(["--bytes", &bytes.to_string(), "--worker", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("usemem was built with this test");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut go = child.stdin.take().expect("piped");
    let mut ready = || assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    ready();
    go.write_all(b"go\n").expect("usemem reads");
    // The memory is filled: before the second phase the worker waits as long as its input is open.
    ready();
    child.stdin = Some(go);
    Stopped(child)
}

fn pages(bytes: &[u8]) -> BTreeSet<&[u8]> {
    bytes.chunks(4096).collect()
}

/// Goal: every page that a process filled is captured, and pages of zeros are omitted unless
/// requested. Method: usemem fills its memory from a corpus of known pages, a quarter of them zero.
#[test]
fn what_a_process_holds_is_captured() {
    let folder = Folder::new("capture");
    let source = folder.file("source.bin");
    let contents: Vec<u8> = (0_u32..1024)
        .flat_map(|page| if page % 4 == 0 { [0; 4096] } else { filled(page) })
        .collect();
    fs::write(&source, &contents).expect("our own file");
    let process = filled_usemem(Path::new(&source), 4 << 20);
    let pid = process.0.id().to_string();

    let output = folder.file("without.bin");
    assert!(corpus_ends_with(&["capture", &pid, "-o", &output], 0));
    let captured = fs::read(&output).expect("written");
    assert_eq!(captured.len() % 4096, 0);
    let mode = fs::metadata(&output).expect("written").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it is its owner's alone");
    let found = pages(&captured);
    let zeros: &[u8] = &[0; 4096];
    assert!(!found.contains(zeros));
    let missing =
        pages(&contents).into_iter().filter(|page| *page != zeros && !found.contains(page));
    assert_eq!(missing.count(), 0);

    let output = folder.file("with.bin");
    assert!(corpus_ends_with(&["capture", &pid, "-o", &output, "--zeros"], 0));
    let captured = fs::read(&output).expect("written");
    assert!(captured.chunks(4096).filter(|page| *page == zeros).count() >= 256);
    let left: Vec<_> = fs::read_dir(&folder.0).expect("our own folder").collect();
    assert_eq!(left.len(), 3, "no partial file stays: {left:?}");
}

/// A page that differs from every other and from the rest of this process's memory.
fn filled(page: u32) -> [u8; 4096] {
    let mut random = Random::new(page.into());
    std::array::from_fn(|_| random.byte())
}

#[test]
fn a_process_that_is_not_there_is_refused() {
    let folder = Folder::new("missing");
    let output = folder.file("out.bin");
    // Above the largest PID that Linux assigns (2^22).
    assert!(corpus_ends_with(&["capture", "4194305", "-o", &output], 2));
    assert!(!Path::new(&output).exists());
    let own = std::process::id().to_string();
    assert!(corpus_ends_with(&["capture", &own, "-o", "/nonexistent/out.bin"], 2));
    assert!(corpus_ends_with(&["capture", &own, "-o", "/tmp"], 2));
    // A kernel thread has no memory: root gets that message; for others it belongs to another user.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd") {
        assert!(corpus_ends_with(&["capture", "2", "-o", &output], 2));
    }
    assert!(corpus_ends_with(&["make", "--bytes", "4K", "-o", &output], 2));
}

/// Goal: usemem names a bad corpus, exits with 2, and prints nothing else.
#[test]
fn usemem_refuses_a_bad_corpus_in_one_line() {
    let folder = Folder::new("bad");
    let (empty, cut) = (folder.file("empty.bin"), folder.file("cut.bin"));
    fs::write(&empty, b"").expect("our own file");
    fs::write(&cut, vec![1; (1 << 20) + 100]).expect("our own file");
    for (file, word) in [(&empty, "empty"), (&cut, "truncated"), (&folder.file("none"), "No such")]
    {
        let ended = Command::new(env!("CARGO_BIN_EXE_usemem"))
            .args(["--corpus", file, "--bytes", "1M"])
            .output()
            .expect("usemem was built with this test");
        let line = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{line}");
        assert!(line.contains(word) && line.contains(file.as_str()), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
    }
}

/// Goal: workers that are processes do the same work as threads.
#[test]
fn usemem_runs_as_threads_and_as_processes() {
    let folder = Folder::new("workers");
    let source = folder.file("source.bin");
    let contents: Vec<u8> = (1_u32..=256).flat_map(filled).collect();
    fs::write(&source, &contents).expect("our own file");
    for way in ["--threads", "--processes"] {
        let ended = Command::new(env!("CARGO_BIN_EXE_usemem"))
            .args(["--corpus", &source, "--bytes", "6M", "-n", "3", "--json", "--salt", way])
            .output()
            .expect("usemem was built with this test");
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success(), "{way}: {ended:?}");
        assert!(text.contains("\"workers\":3") && text.contains("\"verify\":\"ok\""), "{text}");
        assert!(text.contains("\"bytes\":6291456"), "{text}");
    }
}
