//! `zfolio bench usemem --against kernel` undoes all its changes to the system.
//!
//! One test, since the state belongs to the machine. It needs root, zram and a memory cgroup, and
//! prints a message if one is missing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Parser;
use zfolio_bench::BenchArgs;

/// Set in a process that should act as `zfolio bench`: its arguments.
const CHILD: &str = "ZFOLIO_TEST_BENCH";

/// Set if that process should panic in the middle of the run.
const PANIC: &str = "ZFOLIO_TEST_PANIC";

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: BenchArgs,
}

/// Not a test: the code that `start` runs.
#[test]
fn child_is_the_command() {
    let Ok(words) = std::env::var(CHILD) else { return };
    if std::env::var_os(PANIC).is_some() {
        std::thread::spawn(panic_while_swapping);
    }
    let line = Line::parse_from(std::iter::once("bench").chain(words.split(' ')));
    let status = zfolio_bench::bench(line.args);
    // The number of an ExitCode is only in its Debug output.
    let text = format!("{status:?}");
    let number: String = text.chars().filter(char::is_ascii_digit).collect();
    std::process::exit(number.parse().expect("a status"));
}

/// Does what a panic does in a release build: the hook runs, nothing is dropped, the process
/// aborts.
fn panic_while_swapping() {
    wait_for_swap(&std::env::var(PANIC).expect("set by the test"));
    let panic = std::panic::catch_unwind(|| panic!("on purpose"));
    assert!(panic.is_err());
    std::process::abort();
}

fn start(corpus: &str, usemem: &str) -> Child {
    command(corpus, usemem).spawn().expect("this test starts")
}

fn command(corpus: &str, usemem: &str) -> Command {
    let words = format!(
        "usemem --against kernel --corpus {corpus} --bytes 48M --limit 16M -r 1 --reads 500 \
         --usemem {usemem} --without free --without run --without inline"
    );
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args(["--exact", "child_is_the_command", "--nocapture"]).env(CHILD, words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Everything that a run changes.
fn state() -> String {
    let mut state = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut note = |path: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        state.push_str(&format!("{path}: {}\n", text.trim()));
    };
    note("/sys/module/zswap/parameters/enabled");
    note("/sys/fs/cgroup/cgroup.subtree_control");
    for folder in ["/sys/kernel/mm/transparent_hugepage", "/sys/block"] {
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let mut names: Vec<_> = entries.map(|entry| entry.path()).collect();
        names.sort();
        for path in names {
            note(&path.join("enabled").display().to_string());
            if path.to_string_lossy().contains("zram") {
                for name in ["initstate", "disksize", "comp_algorithm"] {
                    note(&path.join(name).display().to_string());
                }
            }
        }
    }
    for group in ["/sys/fs/cgroup/memory/zfolio-bench", "/sys/fs/cgroup/zfolio-bench"] {
        state.push_str(&format!("{group}: {}\n", fs::exists(group).unwrap_or(true)));
    }
    state.push_str(&format!(
        "zfolio-bench.journal: {}\n",
        fs::exists("/run/zfolio-bench.journal").unwrap_or(true)
    ));
    state
}

/// Waits until there is more swap than in `before`, a text that begins with `/proc/swaps`.
fn wait_for_swap(before: &str) {
    for _ in 0..400 {
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        if !before.starts_with(&swaps) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the run has not begun to swap after 2 s");
}

fn complaint(child: &mut Child) -> String {
    let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    lines.map_while(Result::ok).collect::<Vec<_>>().join("\n")
}

/// Why the kernel's part cannot run here, if it cannot.
fn obstacle() -> Option<&'static str> {
    if zfolio_sys::probe::effective_uid() != 0 {
        return Some("it needs root");
    }
    if !fs::exists("/sys/class/zram-control/hot_add").unwrap_or(false) {
        return Some("zram is not loaded");
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let v2 = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let has_group = mounts.contains("rw,relatime,memory") || v2.contains("memory");
    (!has_group).then_some("there is no memory cgroup controller")
}

fn signal(child: &Child, name: &str) {
    let ended = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(ended.expect("kill(1) is there").success());
}

/// Goal: the system is the same after success, failure and SIGINT, after a panic that aborts, and
/// after the run that follows a SIGKILL. Method: each of these, with the state compared before and
/// after.
#[test]
fn the_system_is_put_back_however_a_run_ends() {
    if let Some(obstacle) = obstacle() {
        eprintln!("SKIPPED the_system_is_put_back_however_a_run_ends: {obstacle}");
        return;
    }
    let corpus = std::env::temp_dir().join(format!("zfolio-put-back-{}.bin", std::process::id()));
    let contents: Vec<u8> = (0_u32..1 << 18).flat_map(|word| (word >> 3).to_le_bytes()).collect();
    fs::write(&corpus, contents).expect("a file of our own");
    let name = corpus.to_str().expect("our own name");
    let before = state();

    let mut child = start(name, env!("CARGO_BIN_EXE_usemem"));
    let line = complaint(&mut child);
    assert_eq!(child.wait().expect("our child").code(), Some(0), "{line}");
    assert_eq!(state(), before, "after success: {line}");

    // false(1) acts as a usemem that fails at once.
    let mut child = start(name, "/bin/false");
    let line = complaint(&mut child);
    assert_eq!(child.wait().expect("our child").code(), Some(1), "{line}");
    assert_eq!(state(), before, "after failure: {line}");

    for (how, status) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let mut child = start(name, env!("CARGO_BIN_EXE_usemem"));
        wait_for_swap(&before);
        signal(&child, how);
        let line = complaint(&mut child);
        assert_eq!(child.wait().expect("our child").code(), Some(status), "{how}: {line}");
        assert_eq!(state(), before, "after {how}: {line}");
    }

    let mut child =
        command(name, env!("CARGO_BIN_EXE_usemem")).env(PANIC, &before).spawn().expect("us");
    let line = complaint(&mut child);
    // It aborted, or failed: the other thread may have failed first.
    assert!(!child.wait().expect("our child").success(), "{line}");
    let after = state().replace("zfolio-bench.journal: true", "zfolio-bench.journal: false");
    assert_eq!(after, before, "after a panic: {line}");

    let mut child = start(name, env!("CARGO_BIN_EXE_usemem"));
    wait_for_swap(&before);
    signal(&child, "-KILL");
    child.wait().expect("our child");
    assert_ne!(state(), before, "SIGKILL leaves everything as it is");
    let mut child = start(name, env!("CARGO_BIN_EXE_usemem"));
    let line = complaint(&mut child);
    assert_eq!(child.wait().expect("our child").code(), Some(0), "{line}");
    assert!(line.contains("undoing what an earlier run"), "{line}");
    assert_eq!(state(), before, "after the run that follows SIGKILL: {line}");
    fs::remove_file(&corpus).expect("our own file");
}
