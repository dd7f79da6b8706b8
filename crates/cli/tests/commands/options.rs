//! Options of `zfolio run`, and the variables with the same meaning.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use crate::run::works;
use crate::stage::{holder, output_of, stand_in, texts, wait_for, zfolio};

/// Prints the variables that the library reads.
const SCRIPT: [&str; 3] = ["sh", "-c", "echo $ZFOLIO_LIMIT $ZFOLIO_UNIT $ZFOLIO_ALGORITHM"];

fn run(options: &[&str], variables: &[(&str, &str)]) -> Output {
    let arguments: Vec<&str> =
        ["run"].iter().chain(options).chain(&["--"]).chain(&SCRIPT).copied().collect();
    zfolio(&arguments).envs(variables.iter().copied()).output().expect("it was built")
}

#[test]
fn variables_are_defaults_and_options_override_them() {
    if !works() {
        return;
    }
    let variables = [("ZFOLIO_LIMIT", "64M"), ("ZFOLIO_UNIT", "4K"), ("ZFOLIO_ALGORITHM", "lz4")];
    let (out, err) = texts(&run(&[], &variables));
    assert_eq!(out, "67108864 4096 lz4\n");
    assert!(err.contains("of 64M"), "{err}");
    let options = ["-l", "32M", "-u", "16K", "-a", "zstd,level=2"];
    assert_eq!(texts(&run(&options, &variables)).0, "33554432 16384 zstd,level=2\n");
    let (_, err) = texts(&run(&["-l", "32M"], &[("ZFOLIO_QUIET", "1")]));
    assert_eq!(err, "");
}

#[test]
fn a_bad_variable_is_status_2_and_named() {
    let cases = [
        ("ZFOLIO_LIMIT", "12Q", "'12Q' is not a size"),
        ("ZFOLIO_LIMIT", "1M", "32M or more"),
        ("ZFOLIO_UNIT", "5K", "power of two, 4K to 2M"),
        ("ZFOLIO_ALGORITHM", "rar", "'rar'"),
        ("ZFOLIO_STRICT", "perhaps", "accepted: 1 or 0"),
        ("ZFOLIO_SPILL", "/dev/shm", "'/dev/shm' is on a tmpfs"),
        ("ZFOLIO_SPILL", "/var/tmp,prio=99999", "'99999' is not a priority"),
        ("ZFOLIO_SPILL_LIMIT", "1K", "16M or more"),
        ("ZFOLIO_MAX_POOL_PERCENT", "0", "'0' is not a percentage; accepted: 1 to 100"),
        ("ZFOLIO_ACCEPT_THRESHOLD_PERCENT", "90%", "'90%' is not a percentage"),
        ("ZFOLIO_WRITE_BUDGET", "10G/week", "'10G/week' is not a budget; accepted: a size"),
    ];
    for (name, value, part) in cases {
        let output = run(&[], &[(name, value)]);
        let (out, err) = texts(&output);
        assert_eq!((output.status.code(), out.as_str()), (Some(2), ""), "{name}={value}: {err}");
        assert!(err.starts_with(&format!("zfolio: {name}: ")) && err.contains(part), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    }
}

/// Goal: the program finds where to spill to: by an option, else by a variable, else in `TMPDIR`; and nothing where
/// that is in memory and nobody asked for it.
#[test]
fn where_to_spill_is_an_option_a_variable_or_the_default() {
    if !works() {
        return;
    }
    let script = "echo \"$ZFOLIO_SPILL\" $ZFOLIO_SPILL_LIMIT";
    let said = |options: &[&str], variables: &[(&str, &str)]| {
        let program = ["--", "sh", "-c", script];
        let all: Vec<&str> =
            ["run", "-q", "-l", "64M"].iter().chain(options).chain(&program).copied().collect();
        let command = &mut zfolio(&all);
        let output = command.env_remove("TMPDIR").envs(variables.iter().copied()).output();
        texts(&output.expect("it was built")).0
    };
    let limit = ["--spill-limit", "1G"];
    assert_eq!(said(&limit, &[]), "/var/tmp 1073741824\n");
    assert!(said(&[], &[]).starts_with("/var/tmp "), "half of what is free there");
    assert_eq!(said(&limit, &[("TMPDIR", "/dev/shm")]), "none\n");
    assert_eq!(said(&["--no-spill"], &[]), "none\n");
    assert_eq!(said(&[], &[("ZFOLIO_SPILL", "none")]), "none\n");
    let two = [("ZFOLIO_SPILL", "/var/tmp\n/var/tmp,prio=7"), ("ZFOLIO_SPILL_LIMIT", "32M")];
    assert_eq!(said(&[], &two), "/var/tmp\n/var/tmp,prio=7 33554432\n");
    assert_eq!(said(&["--spill", "/var/tmp,prio=-1"], &two), "/var/tmp,prio=-1 33554432\n");
    // A run in a run, whose device is in use, or is not there any more.
    let inner = [("ZFOLIO_SPILL", "/dev/nothing"), ("ZFOLIO_RUN", "1")];
    assert_eq!(said(&limit, &inner), "/var/tmp 1073741824\n");
    assert_eq!(said(&limit, &inner[..1]), "", "refused");
}

/// Goal: the program finds the bounds of what goes to disk; variables of a run that writes nothing are not refused.
#[test]
fn what_goes_to_disk_is_bounded_by_options_or_variables() {
    if !works() {
        return;
    }
    let names = ["MAX_POOL_PERCENT", "ACCEPT_THRESHOLD_PERCENT", "WRITE_BUDGET"];
    let names = names.map(|name| format!("ZFOLIO_{name}"));
    let script = format!("echo ${} ${} ${}", names[0], names[1], names[2]);
    let said = |options: &[&str], variables: &[(&str, &str)]| {
        let program = ["--", "sh", "-c", &script];
        let all: Vec<&str> =
            ["run", "-q", "-l", "64M"].iter().chain(options).chain(&program).copied().collect();
        let mut command = zfolio(&all);
        let command = command.env_remove("TMPDIR").envs(variables.iter().copied());
        texts(&command.output().expect("it was built")).0
    };
    assert_eq!(said(&[], &[]), "100 90 none\n");
    let options =
        ["--max-pool-percent", "40", "--accept-threshold-percent=80", "--write-budget", "10G/day"];
    assert_eq!(said(&options, &[]), "40 80 10737418240/day\n");
    let variables: Vec<(&str, &str)> =
        names.iter().map(String::as_str).zip(["30", "70", "1M/s"]).collect();
    assert_eq!(said(&[], &variables), "30 70 1048576/s\n");
    assert_eq!(said(&["--write-budget", "none"], &variables), "30 70 none\n");
    assert_eq!(said(&["--no-spill"], &variables), "\n", "they have no meaning there");
}

/// Goal: the inner program has what it would have had without the inner `zfolio`; quiet and strict
/// are decided for each command.
#[test]
fn a_run_inside_of_a_run_has_its_limit() {
    if !works() {
        return;
    }
    let zfolio_itself = env!("CARGO_BIN_EXE_zfolio");
    let script = "echo $ZFOLIO_LIMIT $ZFOLIO_ALGORITHM ${ZFOLIO_STRICT:-lenient}";
    let inner = [zfolio_itself, "run", "--", "sh", "-c", script];
    let outer = ["run", "-q", "--strict", "-l", "64M", "-a", "lz4", "--"];
    let arguments: Vec<&str> = outer.iter().chain(&inner).copied().collect();
    let (code, out, err) = output_of(&arguments);
    assert_eq!((code, out.as_str()), (Some(0), "67108864 lz4 lenient\n"));
    assert!(err.starts_with("zfolio: sh stayed below its limit: peak ") && err.contains("of 64M"));
}

/// Goal: the summary of a run whose limit follows the machine names no number as its limit.
#[test]
fn a_limit_that_follows_the_machine_is_told_so() {
    if !works() {
        return;
    }
    let (code, _, err) = output_of(&["run", "--limit", "auto", "--", "sh", "-c", ":"]);
    let end = " with --limit auto; nothing was compressed\n";
    let starts = "zfolio: sh stayed below its limit: peak ";
    assert!(code == Some(0) && err.starts_with(starts) && err.contains(end), "{err}");
}

#[test]
fn a_percentage_is_of_what_is_allowed() {
    if !works() {
        return;
    }
    let limit = |share: &str| -> u64 {
        let output = run(&["-q", "-l", share], &[]);
        let (out, err) = texts(&output);
        let limit = out.split(' ').next().and_then(|limit| limit.parse().ok());
        limit.unwrap_or_else(|| panic!("{share}: {out}{err}"))
    };
    let (half, all) = (limit("50%"), limit("100%"));
    assert!(half.abs_diff(all / 2) <= 1 << 20 && half % (1 << 20) == 0, "{half} {all}");
    let (code, _, _) = output_of(&["run", "-q", "--", "true"]);
    assert_eq!(code, Some(0));
}

#[test]
fn a_limit_that_the_machine_does_not_have_is_told_of() {
    if !works() {
        return;
    }
    let (_, err) = texts(&run(&["-l", "500T"], &[]));
    let mut lines = err.lines();
    assert!(lines.next().unwrap().starts_with("zfolio: --limit: 500T is more than "), "{err}");
    assert!(lines.next().unwrap().contains("of 500T"), "{err}");
    let (_, err) = texts(&run(&[], &[("ZFOLIO_LIMIT", "500T")]));
    assert!(err.starts_with("zfolio: ZFOLIO_LIMIT: 500T is more than "), "{err}");
    let (_, err) = texts(&run(&["-q", "-l", "500T"], &[]));
    assert_eq!(err, "");
}

/// A memory cgroup with a limit of 256M, removed when dropped.
struct Cgroup {
    directory: String,
    /// The file with the limit.
    limit: String,
}

impl Cgroup {
    /// `None`, with a message, if no cgroup can be made.
    fn make(name: &str) -> Option<Cgroup> {
        // Version 2, and version 1.
        let hierarchies =
            [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        let made = hierarchies.into_iter().find_map(|(root, file)| {
            let directory = format!("{root}/zfolio-{name}-{}", std::process::id());
            fs::create_dir(&directory).ok()?;
            let cgroup = Cgroup { limit: format!("{directory}/{file}"), directory };
            // Without `create`, so that this fails in a plain directory, which does not have the
            // file.
            let file = fs::OpenOptions::new().write(true).open(&cgroup.limit);
            let limited = file.and_then(|mut file| file.write_all(b"268435456"));
            limited.is_ok().then_some(cgroup)
        });
        if made.is_none() {
            eprintln!("SKIPPED: no memory cgroup can be made here");
        }
        made
    }

    /// The output of `zfolio` in this cgroup.
    fn output(&self, arguments: &[&str]) -> Output {
        // A shell enters the cgroup, and then becomes zfolio.
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.directory);
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).arg(zfolio(&[]).get_program()).args(arguments);
        command.env("ZFOLIO_PRELOAD", stand_in()).output().expect("there is a shell")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that have ended may still be counted for a moment.
        wait_for("the cgroup to be empty", || fs::remove_dir(&self.directory).is_ok());
    }
}

#[test]
fn a_limit_that_the_cgroup_does_not_allow_is_told_of() {
    let Some(cgroup) = Cgroup::make("excess").filter(|_| works()) else { return };
    let (_, err) = texts(&cgroup.output(&["run", "-l", "300M", "--", "true"]));
    let limit = &cgroup.limit;
    let expected = format!("zfolio: --limit: 300M is more than {limit} allows (256M): the kernel");
    assert!(err.starts_with(&expected), "{err}");
}

#[test]
fn who_is_killed_because_memory_ran_out_hears_why() {
    let Some(cgroup) = Cgroup::make("killed").filter(|_| works()) else { return };
    let Some(program) = holder("greedy", &[]) else { return };
    let output = cgroup.output(&["run", "-l", "200M", "--", program.to_str().unwrap(), "400"]);
    let (_, err) = texts(&output);
    assert_eq!(output.status.signal(), Some(9), "{err}");
    let expected = format!(
        "  killed      by the kernel, because memory ran out: {} allows 256M; a lower --limit leaves \
         room for the rest\n",
        cgroup.limit
    );
    assert!(err.ends_with(&expected), "{err}");
    // The same signal from another sender is not reported like this.
    let output = cgroup.output(&["run", "-l", "200M", "--", "sh", "-c", "kill -s KILL $$"]);
    assert!(!texts(&output).1.contains("killed"));
}

#[test]
fn progress_is_shown_and_quiet_says_nothing_else() {
    if !works() {
        return;
    }
    let (code, out, err) =
        output_of(&["run", "--progress", "-q", "-l", "64M", "--", "sleep", "1.6"]);
    assert_eq!((code, out.as_str()), (Some(0), ""));
    assert!(err.lines().count() == 1 && err.starts_with("zfolio: 1s sleep: "), "{err:?}");
    assert!(err.contains(" of 64M"), "{err}");
}
