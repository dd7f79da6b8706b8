//! `zfolio iaa` on a made-up sysfs, where no driver answers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::stage::{kill, output_of, scratch, texts, wait_for, zfolio};

/// A device with a queue of the kernel's and one that is off. `state` is that of the first.
fn tree(name: &str, state: &str) -> PathBuf {
    let root = scratch(name);
    for (path, value) in [
        ("iax1/state", "disabled"),
        ("iax1/numa_node", "-1"),
        ("iax1/pasid_enabled", "1"),
        ("iax1/max_work_queues_size", "128"),
        ("wq1.0/state", state),
        ("wq1.0/type", "kernel"),
        ("wq1.0/mode", "dedicated"),
        ("wq1.0/size", "128"),
        ("wq1.1/state", "disabled"),
        ("wq1.1/size", "0"),
        ("../drivers/idxd/bind", ""),
        ("../drivers/idxd/unbind", ""),
    ] {
        let path = root.join("bus/dsa/devices").join(path);
        fs::create_dir_all(root.join("bus/dsa/devices")).expect("it is ours");
        fs::create_dir_all(path.parent().expect("it has one")).expect("it is ours");
        fs::write(path, format!("{value}\n")).expect("it is ours");
    }
    root
}

fn iaa(root: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let root = root.to_str().expect("plain");
    output_of(&[&["iaa"], arguments, &["--sysfs", root, "--dev", root]].concat())
}

#[test]
fn queues_are_listed() {
    let root = tree("iaa-list", "enabled");
    let (code, out, err) = iaa(&root, &["list", "--noheadings"]);
    assert_eq!(code, Some(0), "{err}");
    let words: Vec<&str> = out.split_whitespace().collect();
    let expected = "iax1 wq1.0 - - kernel dedicated 128 - enabled - - -";
    assert_eq!(words.join(" "), expected);
    fs::write(root.join("wq1.0"), "").expect("it is ours");
    let (_, out, _) = iaa(&root, &["list", "--all", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&out).expect("it is JSON");
    assert_eq!(all[0]["queues"][0]["size"], 128);
    assert!(all[0]["queues"][0]["access"].is_string() && all[0]["queues"][1]["access"].is_null());
    let obstacle = all[0]["queues"][0]["obstacle"].as_str().expect("it is of the wrong type");
    assert!(obstacle.contains("run 'zfolio iaa setup --replace' as root"), "{obstacle}");
}

#[test]
fn what_cannot_be_set_up_is_one_line() {
    let root = tree("iaa-refused", "enabled");
    let cases: [(&[&str], i32, &str); 5] = [
        (&["setup"], 125, "type 'kernel', where 'user' is needed: --replace"),
        (&["setup", "--queues", "9"], 2, "--queues: 9; accepted: 1 to 2"),
        (&["setup", "--devices", "2"], 2, "--devices: 2 of each package; accepted: 1 to 1"),
        (&["setup", "--mode", "both"], 2, "'both'"),
        (&["setup", "--queues", "x"], 2, "--queues: 'x' is not a number; accepted: 1 or more"),
    ];
    for (arguments, status, part) in cases {
        let (code, out, err) = iaa(&root, arguments);
        assert_eq!((code, &*out), (Some(status), ""), "{err}");
        assert!(err.lines().count() == 1 && err.contains(part), "{err}");
    }
    let (code, _, err) = iaa(Path::new("/nonexistent"), &["setup"]);
    assert!(code == Some(125) && err.contains("no Intel In-Memory Analytics Accelerator"), "{err}");
    let (code, _, err) = iaa(Path::new("/nonexistent"), &["list"]);
    assert!(code == Some(125) && err.lines().count() == 1, "{err}");
}

#[test]
fn a_dry_run_writes_nothing_and_a_failure_is_undone() {
    let root = tree("iaa-undone", "disabled");
    let read = |path: &str| {
        fs::read_to_string(root.join("bus/dsa").join(path)).expect("it is there").trim().to_owned()
    };
    let (code, out, err) = iaa(&root, &["setup", "--queues", "1", "--dry-run"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("echo user > ") && out.contains("devices/wq1.0/type\n"), "{out}");
    assert_eq!(
        (read("devices/wq1.0/type"), read("drivers/idxd/bind")),
        ("kernel".into(), String::new())
    );
    // No driver enables the device here.
    let (code, _, err) = iaa(&root, &["setup", "--queues", "1"]);
    assert!(code == Some(125) && err.contains("iax1 was not enabled by its driver"), "{err}");
    assert!(err.contains("everything is as before"), "{err}");
    assert_eq!(read("drivers/idxd/bind"), "iax1", "it came that far");
    assert_eq!(
        (read("devices/wq1.0/type"), read("devices/wq1.0/size")),
        ("kernel".into(), "128".into())
    );
}

/// Goal: a signal in the middle of a setup leaves nothing half done. Method: a FIFO in place of a file, at which the
/// command waits once it has changed the configuration; no driver enables the device then, so that all is undone.
#[test]
fn a_signal_does_not_interrupt_a_setup() {
    let root = tree("iaa-signal", "disabled");
    let at = root.to_str().expect("plain");
    let fifo = root.join("bus/dsa/drivers/idxd/bind");
    fs::remove_file(&fifo).expect("it is ours");
    let made = Command::new("mkfifo").arg(&fifo).status().expect("there is mkfifo");
    assert!(made.success());
    let kind = || {
        let text = fs::read_to_string(root.join("bus/dsa/devices/wq1.0/type"));
        text.expect("it is there").trim().to_owned()
    };
    let arguments = ["iaa", "setup", "--queues", "1", "--sysfs", at, "--dev", at];
    let mut setup = zfolio(&arguments);
    let setup = setup.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it is built");
    wait_for("the new configuration", || kind() == "user");
    for signal in ["TERM", "INT", "HUP"] {
        kill(signal, setup.id().into());
    }
    // Opened for both, it waits for nobody, also if the command is gone.
    let both = fs::OpenOptions::new().read(true).write(true).open(&fifo).expect("it is ours");
    let output = setup.wait_with_output().expect("it ends");
    drop(both);
    let (out, err) = texts(&output);
    assert_eq!((output.status.code(), &*out), (Some(125), ""), "{err}");
    assert!(
        err.contains("iax1 was not enabled") && err.contains("everything is as before"),
        "{err}"
    );
    assert_eq!(kind(), "kernel");
}
