//! `zfolio stat`: live figures of one's own processes, and one line for any other.

use std::process::{Child, Stdio};

use crate::run::{first_line, works};
use crate::stage::{Nobody, kill, texts, told, zfolio};

/// A managed process that waits, with its zfolio; both end when this is dropped.
struct Waiting {
    zfolio: Child,
    pid: String,
}

impl Waiting {
    fn start() -> Waiting {
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
        let (code, out, _) = told(arguments);
        let mut lines = out.lines();
        assert!(code == Some(0) && lines.next().unwrap().contains("RESIDENT"), "{out}");
        let line = lines.find(|line| line.split_whitespace().next() == Some(pid)).unwrap();
        assert!(line.contains("sh") && line.contains("256M") && line.contains("4.0"), "{line}");
    }
    let (code, out, _) = told(&["stat", pid]);
    assert_eq!(code, Some(0));
    for part in ["limit_bytes", "256M", "demand_bytes_max", "fault_stored_ns_p99", "sh"] {
        assert!(out.contains(part), "no '{part}' in:\n{out}");
    }
    let (_, out, _) = told(&["stat", pid, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let is_it = |process: &serde_json::Value| process["pid"].as_u64() == pid.parse().ok();
    assert!(is_it(&json), "{out}");
    assert_eq!(json["figures"]["limit_bytes"], 256 << 20);
    let (_, out, _) = told(&["stat", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(json.as_array().unwrap().iter().any(is_it), "{out}");
    let (_, out, _) = told(&["stat", "--bytes", "--noheadings"]);
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
    // Its standard output was closed or its process has ended: either way it is done.
    assert!(watch.wait().unwrap().success());
}

#[test]
fn what_is_not_managed_is_status_2() {
    let me = std::process::id().to_string();
    for (pid, part) in [("4194304", "no process 4194304"), (me.as_str(), "not managed by zfolio")] {
        let (code, out, err) = told(&["stat", pid]);
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
