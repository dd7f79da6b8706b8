//! The summary for processes that zfolio cannot manage. It was once wrong, or silent, about each of
//! these.

use std::path::Path;
use std::process::Stdio;

use crate::run::works;
use crate::stage::{NOBODY, Nobody, holder, scratch, texts, zfolio};

/// What each process of these tests holds, in MiB, and the accepted range in the summary.
const HELD: &str = "100";
const HELD_MIB: std::ops::RangeInclusive<u64> = 100..=112;

/// Runs under a limit of 64M; returns exit status and standard error.
fn run(variables: &[(&str, &str)], program: &[&str]) -> (Option<i32>, String) {
    let arguments: Vec<&str> = ["run", "-l", "64M", "--"].iter().chain(program).copied().collect();
    let mut command = zfolio(&arguments);
    command.envs(variables.iter().copied());
    let output = command.output().expect("it was built");
    (output.status.code(), texts(&output).1)
}

/// The number of MiB that follows `before` in `text`.
#[track_caller]
fn mib_after(text: &str, before: &str) -> u64 {
    let at = text.find(before).unwrap_or_else(|| panic!("no '{before}' in: {text}"));
    let digits: String =
        text[at + before.len()..].chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number after '{before}' in: {text}"))
}

fn path(program: &Path) -> &str {
    program.to_str().expect("UTF-8")
}

/// Goal: a program that replaces another one has the same PID, and so the figures of the other one,
/// which stayed below the limit.
#[test]
fn a_static_program_behind_env_is_not_managed() {
    let Some(program) = holder("static-env", &["-static"]).filter(|_| works()) else { return };
    let (code, err) = run(&[], &["env", path(&program), HELD, "700", "5"]);
    assert_eq!(code, Some(5));
    assert!(err.starts_with("zfolio: static-env was not managed (statically linked): "), "{err}");
    assert!(HELD_MIB.contains(&mib_after(&err, "peak ")), "{err}");
    assert!(err.contains(" over the limit of 64M\n") && !err.contains("stayed below"), "{err}");
}

#[test]
fn static_children_are_counted_by_program() {
    let Some(program) = holder("static-child", &["-static"]).filter(|_| works()) else { return };
    let script = format!("{0} {HELD} 700; {0} 1 700; exit 3", path(&program));
    let report = scratch("static-child").join("report.json");
    let stats = format!("--stats={}", report.display());
    let output = zfolio(&["run", "-l", "64M", &stats, "--", "sh", "-c", &script]).output().unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(3));
    let expected = "zfolio: 2 processes static-child were not managed (statically linked): peak ";
    assert!(err.starts_with(expected) && HELD_MIB.contains(&mib_after(&err, expected)), "{err}");
    assert!(err.contains("and         1 more process"), "the shell: {err}");
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
    let group = &report["without_figures"][0];
    assert_eq!((&group["command"], &group["processes"]), (&"static-child".into(), &2.into()));
    assert!(HELD_MIB.contains(&(group["resident_bytes_max"].as_u64().unwrap() >> 20)), "{group}");
}

/// Goal: the lines of the summary count the same processes. Method: most of them end between two looks, and are known
/// by their figures only.
#[test]
fn processes_that_nobody_saw_are_counted() {
    if !works() {
        return;
    }
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0; done; sleep 0.7; exit 0";
    let (_, err) = run(&[], &["sh", "-c", script]);
    assert!(err.contains("and         11 more processes, "), "{err}");
    assert!(err.contains("together    its 12 processes had "), "{err}");
}

/// Goal: an unmanaged process below the limit is not in the first line.
#[test]
fn a_small_stranger_is_told_of_besides() {
    let Some(program) = holder("static-small", &["-static"]).filter(|_| works()) else { return };
    let (_, err) = run(&[], &["sh", "-c", &format!("{} 1 700; exit 0", path(&program))]);
    assert!(err.starts_with("zfolio: sh stayed below its limit: peak "), "{err}");
    assert!(err.contains("  besides     static-small was not managed (statically linked): peak "));
}

/// Goal: a program whose loader took longer than a process is given to have figures is told of once, as managed.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_that_starts_slowly_is_managed() {
    let Some(program) = holder("slow-start", &["-DSLOW_LOADER"]).filter(|_| works()) else {
        return;
    };
    let (code, err) = run(&[], &[path(&program), "1", "400", "6"]);
    assert_eq!(code, Some(6));
    assert!(err.starts_with("zfolio: slow-start stayed below its limit: "), "{err}");
    assert!(!err.contains("besides"), "{err}");
}

#[test]
fn a_program_that_holds_what_nobody_manages_is_over_its_limit() {
    let Some(program) = holder("unmanaged", &[]).filter(|_| works()) else { return };
    let (_, err) = run(&[], &[path(&program), HELD, "2000"]);
    assert!(err.starts_with("zfolio: unmanaged went over its limit: peak "), "{err}");
    assert!(HELD_MIB.contains(&mib_after(&err, "peak ")), "{err}");
    assert!((36..=48).contains(&mib_after(&err, "over limit  by ")), "{err}");
    assert!(HELD_MIB.contains(&mib_after(&err, "not managed were ")), "{err}");
}

#[test]
fn a_program_without_its_environment_is_not_managed() {
    let Some(program) = holder("bare", &[]).filter(|_| works()) else { return };
    let (_, err) = run(&[], &["env", "-i", path(&program), HELD, "2000"]);
    let expected =
        "zfolio: bare was not managed (started without LD_PRELOAD in its environment): peak ";
    assert!(err.starts_with(expected) && HELD_MIB.contains(&mib_after(&err, expected)), "{err}");
}

/// Goal: a process in a root directory without /proc, which cannot count its own pages, is
/// described.
#[test]
fn a_process_that_cannot_see_itself_did_not_run_in_0() {
    let Some(program) = holder("blind", &[]).filter(|_| works()) else { return };
    let blind = [("STAND_IN_ENGAGED", "1"), ("STAND_IN_BLIND", "1")];
    let (_, err) = run(&blind, &[path(&program), "40", "700"]);
    assert!(err.starts_with("zfolio: blind needed 1G and ran in "), "{err}");
    assert!((40..=52).contains(&mib_after(&err, "ran in ")), "{err}");
}

#[test]
fn a_managed_process_whose_figures_are_missing_is_told_of() {
    let Some(program) = holder("mute", &[]).filter(|_| works()) else { return };
    let (_, err) = run(&[("STAND_IN_MUTE", "1")], &[path(&program), HELD, "2000"]);
    let expected = "zfolio: mute was managed (its figures are unknown: ";
    assert!(err.starts_with(expected) && HELD_MIB.contains(&mib_after(&err, "peak ")), "{err}");
}

/// Goal: a peak between two looks is still in the kernel's count, which does not say whose it is.
#[test]
fn what_was_held_between_two_looks_is_not_lost() {
    let Some(program) = holder("brief", &["-static"]).filter(|_| works()) else { return };
    let (_, err) = run(&[], &["sh", "-c", &format!("{} {HELD}; sleep 0.3", path(&program))]);
    let seen = err.contains("brief was not managed") && err.contains("over the limit");
    // The peak of a process that ends at once lacks the pages that a CPU has counted and not yet added
    // to the process's: 128 KiB for each CPU, and more where there are more than 16.
    let by_the_kernel = "by the kernel's count one of its processes had a peak of ";
    assert!(seen || (92..=112).contains(&mib_after(&err, by_the_kernel)), "{err}");
}

#[test]
fn a_core_file_lacks_what_was_compressed() {
    if !works() {
        return;
    }
    let directory = scratch("core");
    let mut command = zfolio(&["run", "--", "sh", "-c", "ulimit -c unlimited; kill -s ABRT $$"]);
    let output = command.current_dir(&directory).env("STAND_IN_ENGAGED", "1").output().unwrap();
    let (_, err) = texts(&output);
    let entries = std::fs::read_dir(&directory).unwrap().flatten();
    if !entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("core")) {
        eprintln!("SKIPPED: no core file is written here, see /proc/sys/kernel/core_pattern");
        return;
    }
    let expected = "zfolio: the core lacks 700M that were compressed: they are zeros in it\n";
    assert!(err.ends_with(expected), "{err}");
}

/// Goal: what a run had is judged by the highest limit that it was given, not by the first one. Method: the same
/// program, whose run gets twice as much while it holds its memory.
#[test]
fn a_limit_that_was_raised_is_the_limit() {
    let Some(program) = holder("raised", &[]).filter(|_| works()) else { return };
    let mut command = zfolio(&["run", "-l", "64M", "--", path(&program), HELD, "3000"]);
    let run = command.stderr(Stdio::piped()).spawn().expect("it was built");
    let raise = ["set", &run.id().to_string(), "limit=128M"];
    // Its ledger is there a moment after it was started.
    while zfolio(&raise).output().unwrap().status.code() == Some(2) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let output = run.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(err.starts_with("zfolio: raised stayed below its limit: peak 10"), "{err}");
    assert!(err.contains(" of 128M"), "{err}");
}

/// Goal: of a process that has become another user's, and then executed a program, the summary has what that program
/// needed, and its figures are removed. Method: the library of the tests, which reports 1 GiB for the second program.
#[test]
fn a_program_of_another_user_has_figures() {
    let Some(nobody) = Nobody::stage().filter(|_| works()) else { return };
    // Makes the directory of nobody's figures.
    nobody.output(&["run", "-q", "--", "true"]);
    let id = NOBODY.to_string();
    let script = "echo $$; exec env STAND_IN_ENGAGED=1 sleep 0.5";
    let program = ["setpriv", "--reuid", &id, "--clear-groups", "sh", "-c", script];
    let mut command = zfolio(&[&["run", "-l", "64M", "--"][..], &program].concat());
    let output = command.env("ZFOLIO_PRELOAD", nobody.library()).output().unwrap();
    let (out, err) = texts(&output);
    assert!(err.starts_with("zfolio: sleep needed 1G and ran in 250M"), "{err}");
    for uid in [0, NOBODY] {
        let left = format!("/dev/shm/zfolio-{uid}/{}", out.trim());
        assert!(!Path::new(&left).exists(), "{left} is left");
    }
}
