//! `zfolio suggest`: what it prints where, and how it ends. The stand-in needs 1 GiB and never
//! waits.

use std::fs;
use std::os::unix::process::ExitStatusExt;

use crate::run::{first_line, works};
use crate::stage::{self, kill, output_of, scratch, texts};

/// `zfolio` with a stand-in that needs memory.
fn zfolio(arguments: &[&str]) -> std::process::Command {
    let mut command = stage::zfolio(arguments);
    command.env("STAND_IN_NEEDS", "1");
    command
}

/// Runs it to its end; returns exit status, standard output, standard error.
fn output_of_need(arguments: &[&str]) -> (Option<i32>, String, String) {
    stage::output_of_command(&mut zfolio(arguments))
}

#[test]
fn the_curve_is_told_after_the_program_and_its_status_passes_through() {
    if !works() {
        return;
    }
    let script = "sleep 0.3; echo out; exit 3";
    let (code, out, err) = output_of_need(&["suggest", "--points", "3", "--", "sh", "-c", script]);
    assert_eq!((code, out.as_str()), (Some(3), "out\n"), "{err}");
    // Two processes, each observed with a limit of its own.
    let recommended = "recommended: --per-process --limit 64M";
    for part in ["LIMIT", "sh needed 1024M", "<- recommended", recommended] {
        assert!(err.contains(part), "no '{part}' in:\n{err}");
    }
    let (_, _, err) = output_of_need(&["suggest", "--", "sh", "-c", "exec sleep 0.3"]);
    assert!(err.contains("recommended: --limit 64M"), "{err}");
}

#[test]
fn json_is_all_of_standard_output_and_a_plot_is_drawn() {
    if !works() {
        return;
    }
    let plot = scratch("suggest").join("curve.svg");
    let script = "sleep 0.3; echo out";
    let arguments =
        ["suggest", "--json", "--plot", plot.to_str().unwrap(), "--", "sh", "-c", script];
    let (code, out, err) = output_of_need(&arguments);
    assert_eq!((code, err.as_str()), (Some(0), "out\n"));
    let printed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(printed["need_bytes"], 1_u64 << 30);
    assert_eq!(printed["recommended_bytes"], 64 << 20);
    assert_eq!(printed["points"].as_array().unwrap().len(), 8);
    let drawn = fs::read_to_string(plot).unwrap();
    assert!(drawn.contains("--limit 64M") && drawn.contains("<polyline"), "{drawn}");
}

#[test]
fn the_run_is_repeated_to_verify() {
    if !works() {
        return;
    }
    let script = "sleep 0.2; echo $ZFOLIO_LIMIT,$ZFOLIO_FOLLOW,$ZFOLIO_UNIT,$ZFOLIO_ALGORITHM";
    let arguments =
        ["suggest", "--verify", "-u", "4K", "-a", "lz4", "--share", "30", "--", "sh", "-c", script];
    let (code, out, err) = output_of_need(&arguments);
    let limit = 64 << 20;
    assert_eq!((code, out), (Some(0), format!("{limit},300,4096,lz4\n{limit},,4096,lz4\n")));
    assert!(err.contains("run again with --per-process --limit 64M"), "{err}");
}

/// Goal: what is observed is what is recommended: without `--unit` the run chooses, as `zfolio run` does.
#[test]
fn a_unit_that_is_not_given_is_left_to_the_run() {
    if !works() {
        return;
    }
    let script = "echo unit=$ZFOLIO_UNIT,$ZFOLIO_ALGORITHM";
    let (code, out, err) = output_of_need(&["suggest", "--", "sh", "-c", script]);
    assert_eq!((code, out.as_str()), (Some(0), "unit=,auto\n"), "{err}");
}

/// Goal: JSON has the same keys, whatever the program needed.
#[test]
fn json_of_a_small_program_has_every_key() {
    if !works() {
        return;
    }
    let keys = |mut command: std::process::Command| {
        let (code, out, err) = stage::output_of_command(&mut command);
        assert_eq!(code, Some(0), "{err}");
        let printed: serde_json::Value = serde_json::from_str(&out).expect("JSON alone");
        let printed = printed.as_object().expect("an object").clone();
        assert_eq!(printed["recommended_bytes"], 64 << 20);
        (printed.keys().cloned().collect::<Vec<_>>(), printed["need_bytes"].clone())
    };
    // It must be looked at once at least, also on a busy machine.
    let words = ["suggest", "--json", "--", "sh", "-c", "exec sleep 1"];
    let ((small, no_need), (large, need)) = (keys(stage::zfolio(&words)), keys(zfolio(&words)));
    assert_eq!(small, large);
    assert!(no_need.is_null() && need.is_u64(), "{no_need} {need}");
}

#[test]
fn what_cannot_be_run_is_refused_as_by_run() {
    let (code, out, err) = output_of(&["suggest", "--", "zfolio-no-such-program"]);
    assert_eq!((code, out.as_str()), (Some(127), ""), "{err}");
    assert!(err.lines().count() == 1 && err.contains("not found"), "{err}");
    // A drawing that is there outlives a run that was refused.
    let drawn = scratch("suggest-refused").join("curve.svg");
    fs::write(&drawn, "earlier").unwrap();
    let plot = drawn.to_str().unwrap();
    let (code, _, err) = output_of(&["suggest", "--plot", plot, "--", "zfolio-no-such-program"]);
    assert_eq!(
        (code, fs::read_to_string(&drawn).unwrap().as_str()),
        (Some(127), "earlier"),
        "{err}"
    );
    // Nor is there an empty one, where there was none.
    fs::remove_file(&drawn).unwrap();
    assert_eq!(
        output_of(&["suggest", "--plot", plot, "--", "zfolio-no-such-program"]).0,
        Some(127)
    );
    assert!(!drawn.exists());
    let (code, _, err) = output_of(&["suggest", "--plot", "/nonexistent/curve.svg", "--", "true"]);
    assert!(code == Some(2) && err.contains("--plot") && err.lines().count() == 1, "{err}");
    let (code, _, err) = output_of(&["suggest", "--share", "95", "--", "true"]);
    assert!(code == Some(2) && err.contains("--share") && err.lines().count() == 1, "{err}");
}

#[test]
fn a_program_that_is_interrupted_is_told_about_all_the_same() {
    if !works() {
        return;
    }
    let script = "echo $$; exec sleep 100";
    for (signal, code, died) in [("INT", Some(130), None), ("TERM", None, Some(15))] {
        let mut child = zfolio(&["suggest", "--", "sh", "-c", script]).spawn().unwrap();
        first_line(&mut child);
        kill(signal, child.id().into());
        let output = child.wait_with_output().unwrap();
        let (_, err) = texts(&output);
        assert_eq!((output.status.code(), output.status.signal()), (code, died), "{err}");
        assert!(err.contains("recommended"), "{err}");
    }
}
