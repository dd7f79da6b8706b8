//! Bad input: one line, with the argument, the value, and what is accepted.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use crate::run::works;
use crate::stage::{Nobody, holder, output_of, output_of_command, scratch, script, texts, zfolio};

/// Asserts one line on standard error that contains all of `parts`.
#[track_caller]
fn assert_refused(arguments: &[&str], status: i32, parts: &[&str]) {
    let (code, out, err) = output_of(arguments);
    assert_eq!(code, Some(status), "{arguments:?}: {err}");
    assert!(out.is_empty() && err.lines().count() == 1 && err.starts_with("zfolio: "), "{err}");
    for part in parts {
        assert!(err.contains(part), "{arguments:?}: no '{part}' in: {err}");
    }
}

#[test]
fn a_corpus_that_cannot_be_written_is_status_2() {
    let parts = ["--output: '/nowhere/corpus' cannot be written: No such file", "accepted: a file"];
    assert_refused(&["corpus", "make", "-o", "/nowhere/corpus"], 2, &parts);
}

#[test]
fn the_example_of_a_program_is_one_of_the_command() {
    let parts =
        ["PROGRAM: missing", "'zfolio bench replacement --record FILE -- python3 train.py'"];
    assert_refused(&["bench", "replacement", "--record", "x"], 2, &parts);
}

/// Goal: of several settings the one with the wrong value is named.
#[test]
fn a_wrong_setting_is_named() {
    let words = ["set", "1", "max_pool_percent=50", "accept_threshold_percent=0"];
    assert_refused(&words, 2, &["zfolio: accept_threshold_percent: '0'", "1 to 100"]);
    assert_refused(&["set", "1", "limit=-1"], 2, &["limit: '-1'", "accepted"]);
}

#[test]
fn wrong_arguments_are_status_2() {
    let cases: [(&[&str], &[&str]); 43] = [
        (&["run", "--limit", "12Q", "--", "true"], &["--limit", "'12Q'", "256M"]),
        (&["run", "--limit", "", "--", "true"], &["--limit", "''", "accepted"]),
        (&["run", "--limit", "1M", "--", "true"], &["--limit", "'1M'", "32M or more"]),
        (&["run", "--limit", "99999999T", "--", "true"], &["--limit", "'99999999T'", "EiB"]),
        (&["run", "--unit", "5000", "--", "true"], &["--unit", "'5000'", "power of two, 4K to 2M"]),
        (&["run", "--algorithm", "rar", "--", "true"], &["--algorithm", "'rar'", "zstd"]),
        (&["run", "--algorithm", "zstd,level=99", "true"], &["--algorithm", "'99'", "accepted"]),
        (
            &["run", "--algorithm", "zstd,dict=/nonexistent", "true"],
            &["--algorithm", "'/nonexistent'", "No such file"],
        ),
        (
            &["run", "--algorithm", "lz4,dict=/etc/hostname", "true"],
            &["--algorithm", "256 to 1048576"],
        ),
        (&["run", "--stats", "/nonexistent/x", "true"], &["--stats", "'/nonexistent/x'"]),
        (&["run", "--nonsense", "true"], &["'--nonsense'", "accepted"]),
        (&["run"], &["PROGRAM", "missing"]),
        (&["nonsense"], &["'nonsense'", "accepted"]),
        (&["run", "--stall", "60%", "true"], &["--stall", "'60%'", "0.01% to 50%"]),
        (&["run", "--accelerate", "gpu", "true"], &["--accelerate: 'gpu'", "cpu=N", "iaa=model"]),
        (
            &["run", "--accelerate", "iaa,sync_mode=irq", "true"],
            &["--accelerate: 'iaa,sync_mode=irq'", "sync_mode=sync|async"],
        ),
        (
            &["run", "--accelerate", "iaa", "-a", "lz4", "true"],
            &["--accelerate: iaa has none of the algorithms of this run, lz4", "deflate-iaa"],
        ),
        (
            &["run", "--algorithm", "deflate-iaa", "true"],
            &["--algorithm: 'deflate-iaa' is an accelerator's", "--accelerate iaa"],
        ),
        (&["run", "--spill", "/nowhere", "true"], &["--spill", "'/nowhere' does not exist"]),
        (&["run", "--spill", "/dev/shm", "true"], &["--spill", "'/dev/shm'", "tmpfs", "a disk"]),
        (&["run", "--spill", "/etc/passwd", "true"], &["--spill", "'/etc/passwd'", "directory"]),
        (&["run", "--spill", "/var/tmp,prio=x", "true"], &["--spill", "'x'", "-1 to 32767"]),
        (&["run", "--spill-limit", "1M", "true"], &["--spill-limit", "'1M'", "16M or more"]),
        (&["run", "--no-spill", "--spill", "/var/tmp", "true"], &["--no-spill", "--spill"]),
        (&["run", "--no-spill", "--spill-limit", "1G", "true"], &["--no-spill", "--spill-limit"]),
        (
            &["run", "--max-pool-percent", "101", "true"],
            &["--max-pool-percent", "'101'", "1 to 100"],
        ),
        (&["run", "--accept-threshold-percent", "x", "true"], &["-percent", "'x'", "1 to 100"]),
        (&["run", "--no-spill", "--max-pool-percent", "50", "true"], &["--no-spill", "--max-pool"]),
        (
            &["run", "--write-budget", "10G/week", "true"],
            &["--write-budget", "'10G/week'", "/s, /min, /h or /day, as in 10G/day"],
        ),
        (&["run", "--write-budget", "some", "true"], &["--write-budget", "'some'", "10G/day"]),
        (&["set", "1", "max_pool_percent=0"], &["'0'", "1 to 100"]),
        (&["set", "1", "limit=1G", "stall=1%", "limit=2G"], &["limit: given more than once"]),
        (&["set", "1", "write_budget=1G/y"], &["'1G/y'", "/day"]),
        (&["set", "1", "algorithm=rar"], &["'rar'", "auto, lz4"]),
        (&["set", "1", "algorithm=zstd,dict=/x"], &["'zstd,dict=/x'", "NAME[,level=N]"]),
        (&["stat", "--zswap"], &["PID", "missing"]),
        (&["stat", "1", "--zswap", "--classes"], &["--zswap", "--classes"]),
        (&["set", "1"], &["NAME=VALUE", "missing"]),
        (&["set", "1", "speed=9"], &["'speed=9'", "limit=SIZE|N%, stall=N%"]),
        (&["set", "1", "limit=1M"], &["'1M'", "32M or more"]),
        (&["set", "4194304", "limit=1G"], &["no process 4194304", "accepted"]),
        (&["stat", "pid"], &["PID", "'pid'", "accepted"]),
        (&["bench", "usemem", "--corpus", "/nowhere"], &["corpus /nowhere: No such file"]),
    ];
    for (arguments, parts) in cases {
        assert_refused(arguments, 2, parts);
    }
}

/// Goal: a word that is not in UTF-8 is named, with its option. The line said that one or more arguments had it.
#[test]
fn what_is_not_in_utf8_is_named() {
    let place = OsStr::from_bytes(b"/var/tmp/\xff");
    let joined = OsStr::from_bytes(b"--spill=/var/tmp/\xff");
    let expected =
        "zfolio: --spill: '/var/tmp/\u{fffd}' is not in UTF-8; accepted: a word in UTF-8\n";
    for words in [&["--spill".as_ref(), place][..], &[joined]] {
        let output = zfolio(&["run"]).args(words).arg("true").output().unwrap();
        assert_eq!((output.status.code(), texts(&output).1.as_str()), (Some(2), expected));
    }
}

/// Goal: a place where no file can be made, and more places than zfolio takes, are refused before the program starts,
/// whoever named them.
#[test]
fn places_to_spill_to_are_tried() {
    let parts = ["--spill: '/proc' cannot be opened (", "): give a directory on a disk"];
    assert_refused(&["run", "--spill", "/proc", "true"], 2, &parts);
    let places = ["--spill", "/var/tmp"].repeat(17);
    assert_refused(&[&["run"], &places[..], &["true"]].concat(), 2, &["--spill: 17 places", "16"]);
    let lines = vec!["/var/tmp"; 17].join("\n");
    let output = zfolio(&["run", "true"]).env("ZFOLIO_SPILL", lines).output().unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.starts_with("zfolio: ZFOLIO_SPILL: 17 places; accepted: 16 at most\n"), "{err}");
}

/// Goal: what bounds the disk is refused where there is none, whoever said so.
#[test]
fn bounds_of_a_disk_need_one() {
    for option in ["--max-pool-percent", "--accept-threshold-percent", "--write-budget"] {
        for (name, value, why) in
            [("ZFOLIO_SPILL", "none", "none"), ("TMPDIR", "/dev/shm", "'/dev/shm' is on a tmpfs")]
        {
            let value_of = if option == "--write-budget" { "1G" } else { "50" };
            let mut command = zfolio(&["run", option, value_of, "--", "true"]);
            let output = command.env(name, value).output().unwrap();
            let (_, err) = texts(&output);
            assert_eq!((output.status.code(), err.lines().count()), (Some(2), 1), "{err}");
            let start = format!("zfolio: {option}: there is no disk to write to (");
            assert!(
                err.starts_with(&start) && err.contains(why) && err.contains("--spill"),
                "{err}"
            );
        }
    }
}

#[test]
fn a_missing_program_is_127_and_one_that_cannot_run_is_126() {
    let file = scratch("plain").join("plain");
    fs::write(&file, "not a program").unwrap();
    let plain = file.to_str().unwrap();
    assert_refused(&["run", "--", "no-such-program"], 127, &["'no-such-program'", "PATH"]);
    assert_refused(&["run", "--", "/no/such"], 127, &["'/no/such'"]);
    assert_refused(&["run", "--", ""], 127, &["''"]);
    assert_refused(&["run", "--", plain], 126, &[plain, "cannot be executed"]);
    assert_refused(&["run", "--", "/"], 126, &["'/'", "directory"]);
}

/// Goal: the status is a shell's where the kernel finds no loader, which is seen when the program is executed.
#[test]
fn a_program_without_its_loader_is_127() {
    let flags = ["-Wl,--dynamic-linker=/nowhere/ld.so"];
    let Some(program) = holder("lost-loader", &flags).filter(|_| works()) else { return };
    let program = program.to_str().unwrap();
    let shell = script(&format!("exec {program}")).output().unwrap();
    assert_eq!(shell.status.code(), Some(127));
    assert_refused(&["run", "--", program], 127, &[program, "No such file"]);
}

#[test]
fn programs_that_cannot_be_managed_are_126() {
    let directory = scratch("elf");
    let executable = |name: &str, bytes: &[u8], mode: u32| {
        let path = directory.join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mut header = [0; 64];
    header[..6].copy_from_slice(b"\x7fELF\x02\x01");
    header[18] = fs::read("/proc/self/exe").unwrap()[18];
    let fixed = executable("static", &header, 0o755);
    assert_refused(&["run", "--", &fixed], 126, &[&fixed, "statically linked", "dynamically"]);
    let script = executable("script", format!("#!{fixed}\n").as_bytes(), 0o755);
    assert_refused(&["run", "--", &script], 126, &[&fixed, "statically linked"]);
    header[4] = 1;
    let old = executable("old", &header, 0o755);
    assert_refused(&["run", "--", &old], 126, &[&old, "32-bit"]);
}

#[test]
fn a_program_of_another_users_rights_is_126() {
    let path = scratch("setuid").join("setuid");
    fs::copy("/bin/true", &path).unwrap();
    let given = std::os::unix::fs::chown(&path, Some(65_534), None);
    if given.is_err() {
        eprintln!("SKIPPED: only root can give a file away");
        return;
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_refused(&["run", path.to_str().unwrap()], 126, &["setuid", "sudo zfolio run"]);
}

#[test]
fn without_the_library_it_is_125() {
    let output = zfolio(&["run", "--", "true"]).env("ZFOLIO_PRELOAD", "/no/such.so").output();
    let output = output.unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(125));
    assert!(err.contains("/no/such.so") && err.contains("make build"), "{err}");
    let spaced = scratch("with space").join("libzfolio_preload.so");
    fs::write(&spaced, "").unwrap();
    let output = zfolio(&["run", "--", "true"]).env("ZFOLIO_PRELOAD", &spaced).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(texts(&output).1.contains("space"));
}

#[test]
fn without_permission_run_says_what_to_do_and_doctor_is_1() {
    let Some(nobody) = Nobody::stage() else { return };
    let output = nobody.output(&["run", "--", "true"]);
    let (_, err) = texts(&output);
    if output.status.success() {
        eprintln!("SKIPPED: anybody may use userfaultfd here");
        return;
    }
    assert_eq!(output.status.code(), Some(125), "{err}");
    assert!(err.contains("userfaultfd") && err.contains("sysctl"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    let output = nobody.output(&["doctor"]);
    let (out, _) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert!(out.contains("FAIL") && out.contains("-> ") && out.contains("cannot work"), "{out}");
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["--version"], &["run", "--help"], &["stat", "--help"]] {
        let (code, out, err) = output_of(arguments);
        assert!(code == Some(0) && !out.is_empty() && err.is_empty(), "{arguments:?}: {err}");
    }
}

/// Goal: `doctor` says whether what is spilled goes past the page cache. Method: a filter that refuses that, as a file
/// system may.
#[test]
fn doctor_tells_of_direct_transfers() {
    let found = || -> Option<String> {
        let output = zfolio(&["doctor", "--json"]).env("TMPDIR", "/var/tmp").output().unwrap();
        let report: serde_json::Value = serde_json::from_str(&texts(&output).0).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["check"] == "direct I/O")?;
        Some(check["found"].as_str().unwrap().to_owned())
    };
    if found().as_deref() != Some("yes") {
        return eprintln!("SKIPPED: /var/tmp is on no disk, or has no direct I/O");
    }
    let refused = move || {
        zfolio_sys::testing::forbid_direct().unwrap();
        found()
    };
    assert_eq!(std::thread::spawn(refused).join().unwrap().as_deref(), Some("no"));
}

#[test]
fn doctor_and_algorithms_answer() {
    let (_, out, _) = output_of(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() > 20 && checks.iter().any(|check| check["check"] == "UFFD_FEATURE_MOVE"));
    let (code, out, _) = output_of(&["algorithms"]);
    assert!(code == Some(0) && out.contains("lz4") && out.contains("zstd"), "{out}");
}

/// Goal: a path that the variable of the program cannot hold is refused, and not cut in two.
#[test]
fn a_place_with_a_line_break_is_refused() {
    let place = scratch("line\nbreak");
    let name = place.to_str().expect("plain");
    let (code, out, err) = output_of(&["run", "--spill", name, "--", "echo", "never"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1), "{err}");
    assert!(err.starts_with("zfolio: --spill: '") && err.contains("has a line break"), "{err}");
    fs::remove_dir(place).expect("it is ours");
}

/// Goal: an empty variable is none.
#[test]
fn an_empty_name_of_the_library_is_none() {
    let arguments = ["run", "-q", "-l", "64M", "--", "sh", "-c", "exit 9"];
    let without = output_of_command(zfolio(&arguments).env_remove("ZFOLIO_PRELOAD"));
    assert_eq!(output_of_command(zfolio(&arguments).env("ZFOLIO_PRELOAD", "")), without);
}

#[test]
fn a_full_disk_is_status_1() {
    for arguments in [&["algorithms"][..], &["doctor"], &["stat"], &["--help"], &["--version"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = zfolio(arguments).stdout(full).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {err}");
        assert!(err.starts_with("zfolio: standard output: No space left"), "{arguments:?}: {err}");
    }
}

/// Goal: what nobody can read is no success. Rust's runtime opens /dev/null where standard output was closed.
#[test]
fn a_closed_output_is_status_1() {
    for arguments in ["algorithms", "doctor --json", "stat", "help run", "--version", "man"] {
        let mut command = script(&format!("exec \"$ZFOLIO\" {arguments} >&-"));
        let (code, _, err) = output_of_command(&mut command);
        assert_eq!(code, Some(1), "{arguments}: {err}");
        assert!(err.starts_with("zfolio: standard output: Bad file"), "{arguments}: {err}");
    }
}
