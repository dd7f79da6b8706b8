//! `zfolio stat`: live figures of the user's own processes, and one line for any other.

use std::process::{Child, Stdio};

use crate::run::{first_line, works};
use crate::stage::{Nobody, kill, output_of, texts, wait_for, zfolio};

/// A managed process that waits, with its zfolio; both end when this is dropped.
pub(crate) struct Waiting {
    zfolio: Child,
    pub(crate) pid: String,
}

impl Waiting {
    pub(crate) fn start() -> Waiting {
        let mut zfolio = zfolio(&["run", "-l", "256M", "--", "sh", "-c", "echo $$; read line"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("it was built");
        let pid = first_line(&mut zfolio);
        Waiting { zfolio, pid }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        kill("TERM", self.zfolio.id().into());
        self.zfolio.wait().expect("our child");
    }
}

#[test]
fn a_managed_process_is_listed_and_told_in_full() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    let pid = waiting.pid.as_str();
    for arguments in [&["stat"][..], &["stat", "--all"]] {
        let (code, out, _) = output_of(arguments);
        let mut lines = out.lines();
        assert!(code == Some(0) && lines.next().unwrap().contains("RESIDENT"), "{out}");
        let line = lines.find(|line| line.split_whitespace().next() == Some(pid)).unwrap();
        assert!(line.contains("sh") && line.contains("256M") && line.contains("4.0"), "{line}");
    }
    let (code, out, _) = output_of(&["stat", pid]);
    assert_eq!(code, Some(0));
    let parts = ["limit_bytes", "256M", "demand_bytes_max", "fault_stored_ns_p99", "sh"];
    for part in parts.into_iter().chain(["A MIB OF", "dense_codec"]) {
        assert!(out.contains(part), "no '{part}' in:\n{out}");
    }
    let (_, out, _) = output_of(&["stat", pid, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let is_it = |process: &serde_json::Value| process["pid"].as_u64() == pid.parse().ok();
    assert!(is_it(&json), "{out}");
    assert_eq!(json["figures"]["limit_bytes"], 256 << 20);
    assert!(json["prices"]["resident"]["price_ns"].is_null(), "nothing was measured: {out}");
    let (_, out, _) = output_of(&["stat", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(json.as_array().unwrap().iter().any(is_it), "{out}");
    let (_, out, _) = output_of(&["stat", "--bytes", "--noheadings"]);
    assert!(out.contains("268435456") && !out.contains("RESIDENT"), "{out}");
}

#[test]
fn watching_ends_with_the_process() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    let mut watch = zfolio(&["stat", &waiting.pid, "--watch", "0.01", "--json"]).spawn().unwrap();
    let line = first_line(&mut watch);
    assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok(), "a line is JSON: {line}");
    drop(waiting);
    // Its standard output was closed, or its process has ended: in both cases it ends.
    assert!(watch.wait().unwrap().success());
}

#[test]
fn what_is_not_managed_is_status_2() {
    // Not this process, which may use the library in another test.
    let parent = std::os::unix::process::parent_id().to_string();
    for (pid, part) in
        [("4194304", "no process 4194304"), (parent.as_str(), "not managed by zfolio")]
    {
        let (code, out, err) = output_of(&["stat", pid]);
        assert_eq!(code, Some(2), "{err}");
        assert!(out.is_empty() && err.contains(part) && err.contains("accepted"), "{err}");
        assert_eq!(err.lines().count(), 1);
    }
}

#[test]
fn a_process_of_another_user_is_status_2() {
    let me = std::process::id().to_string();
    let Some(nobody) = Nobody::stage() else { return };
    let output = nobody.output(&["stat", &me]);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(2));
    assert!(err.contains("belongs to uid 0") && err.lines().count() == 1, "{err}");
}

/// Goal: a process that uses the Rust library is listed with those of `zfolio run`, and marked.
/// Method: this process uses it.
#[test]
fn a_user_of_the_library_is_listed_and_marked() {
    let pager = zfolio::Pager::builder().limit(8 << 20).name("of-a-test").build();
    let pager = match pager {
        Err(why) if why.is_unsupported() => return eprintln!("SKIPPED: {why}"),
        pager => pager.unwrap(),
    };
    let mut region = pager.map(24 << 20).unwrap();
    region.iter_mut().zip(0_usize..).for_each(|(byte, at)| *byte = at.to_le_bytes()[1]);
    let me = std::process::id().to_string();
    let (code, out, _) = output_of(&["stat"]);
    let line = out.lines().find(|line| line.contains(":of-a-test[library]")).expect(&out);
    assert_eq!((code, line.split_whitespace().next()), (Some(0), Some(me.as_str())), "{out}");
    let (_, out, _) = output_of(&["stat", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let process =
        json.as_array().unwrap().iter().find(|process| process["pid"] == std::process::id());
    let process = process.expect(&out);
    assert!(process["library"].as_u64().is_some_and(|number| number >= 1), "{out}");
    assert_eq!(process["figures"]["limit_bytes"], 8 << 20);
    let (code, out, _) = output_of(&["stat", &me, "--zswap"]);
    let line = |name: &str| -> u64 {
        let mut lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let fields =
            lines.find(|fields| fields[0] == name).unwrap_or_else(|| panic!("{name}: {out}"));
        fields[1].parse().expect("a number")
    };
    assert_eq!((code, out.lines().count(), &out[..7]), (Some(0), 15, "COUNTER"), "{out}");
    assert!(line("stored_pages") > 0 && line("pool_total_size") > 0, "{out}");
    assert!(line("zswpout") >= line("stored_pages") && line("zswpwb") == 0, "{out}");
    let (_, bare, _) = output_of(&["stat", &me, "--zswap", "--noheadings"]);
    assert!(bare.starts_with("stored_pages ") && bare.lines().count() == 14, "{bare}");
    let (_, json, _) = output_of(&["stat", &me, "--zswap", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["pool_total_size"].as_u64() > Some(0) && json["reject_compress_poor"] == 0);
    for algorithm in ["zstd,level=3", "lz4", "auto"] {
        let (code, _, err) = output_of(&["set", &me, &format!("algorithm={algorithm}")]);
        assert_eq!((code, err.as_str()), (Some(0), ""));
        let (_, out, _) = output_of(&["stat", &me]);
        assert!(out.contains(&format!("compressed with {algorithm}\n")), "{out}");
    }
    let (code, out, err) = output_of(&["set", &me, "max_pool_percent=50"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1));
    assert!(err.contains("max_pool_percent: process ") && err.contains("--spill"), "{err}");
    let (code, out, _) = output_of(&["stat", &me, "--classes"]);
    assert!(code == Some(0) && out.lines().count() > 1, "{out}");
    let (code, out, err) = output_of(&["set", &me, "limit=32M", "stall=0.5%"]);
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    let (_, out, _) = output_of(&["stat", &me, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&json["figures"]["limit_bytes"], &json["figures"]["stall_ppm"]),
        (&(32 << 20).into(), &5000.into())
    );
    assert!(region.iter().zip(0_usize..).all(|(byte, at)| *byte == at.to_le_bytes()[1]));
    drop((region, pager));
    let (_, out, _) = output_of(&["stat"]);
    assert!(!out.contains(":of-a-test"), "{out}");
    // In this test, since a command for a process means its first pager.
    settings_of_a_disk_are_changed();
}

/// What bounds the disk is changed while a process runs, and the figures say so; so is the algorithm.
fn settings_of_a_disk_are_changed() {
    let pager = zfolio::Pager::builder().limit(8 << 20).algorithm("lz4").spill("/var/tmp");
    let pager = match pager.max_pool_percent(60).write_budget("1G").build() {
        Err(why) => return eprintln!("SKIPPED: /var/tmp: {why}"),
        Ok(pager) => pager,
    };
    let seen = || {
        let figures = pager.stats().figures;
        let percents = [figures.max_pool_percent, figures.accept_threshold_percent];
        [percents[0], percents[1], figures.write_budget_bytes, figures.write_budget_s]
    };
    let until = |expected: [u64; 4]| {
        for _ in 0..2_000 {
            if seen() == expected {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("{:?} is not {expected:?}", seen());
    };
    until([60, 90, 1 << 30, 0]);
    let me = std::process::id().to_string();
    let settings = ["max_pool_percent=30", "accept_threshold_percent=70", "write_budget=10G/day"];
    let arguments: Vec<&str> = ["set", &me].into_iter().chain(settings).collect();
    let (code, out, err) = output_of(&arguments);
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    until([30, 70, 10 << 30, 86_400]);
    // The one algorithm that it was started with is all that 'auto' has to choose from.
    let (code, out, err) = output_of(&["set", &me, "algorithm=auto"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1));
    assert!(err.contains("was started with one algorithm") && err.contains("accepted:"), "{err}");
}

/// A process that has outlived its run, and is killed when this is dropped.
struct Survivor {
    pid: String,
    run: String,
}

impl Survivor {
    /// Of a run with these options.
    fn start(options: &[&str]) -> Survivor {
        let script = "sleep 60 > /dev/null 2>&1 & echo $! $ZFOLIO_RUN";
        let words = [&["run", "-q", "-l", "256M"], options, &["--", "sh", "-c", script]].concat();
        let (code, out, err) = output_of(&words);
        assert_eq!((code, err.as_str()), (Some(0), ""));
        let (pid, run) = out.trim().split_once(' ').expect("two numbers");
        wait_for("a managed process", || output_of(&["stat", pid]).0 == Some(0));
        Survivor { pid: pid.to_owned(), run: run.to_owned() }
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        kill("KILL", self.pid.parse().expect("a number"));
        // This removes its file.
        output_of(&["stat"]);
    }
}

/// Goal: what the processes of a run share is refused for one that has outlived the run, in one line: nobody would act
/// on it, and it was said that it will hold later. With --per-process the limit is its own, and may be set.
#[test]
fn what_a_run_shared_is_refused_after_its_end() {
    if !works() {
        return;
    }
    let shares = Survivor::start(&[]);
    for pid in [&shares.pid, &shares.run] {
        for (name, value) in [("limit", "512M"), ("write_budget", "1G")] {
            let (code, out, err) = output_of(&["set", pid, "stall=1%", &format!("{name}={value}")]);
            assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1), "{err}");
            let expected = format!("zfolio: {name}: run {} has ended, and nobody", shares.run);
            assert!(err.starts_with(&expected) && err.contains("accepted:"), "{err}");
        }
    }
    let alone = Survivor::start(&["--per-process"]);
    let (code, out, err) = output_of(&["set", &alone.pid, "limit=512M"]);
    assert_eq!((code, out.as_str()), (Some(0), ""), "{err}");
    // The library of the tests does not answer.
    assert!(err.contains("this will hold once they have mapped more"), "{err}");
}
